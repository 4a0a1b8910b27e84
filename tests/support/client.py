"""A raw HTTP/1.1 client for tests: it hides nothing, guesses nothing, and never waits longer than it was told.

    client = Client(gateway.url, gateway.key)
    answer = client.post("/v1/chat/completions", {"messages": [...], "stream": True})       # a connection of its own
    answer.status, answer.headers["content-type"], answer.header_list
    for event in answer.events():               # SSE, each with the moment its last byte came
        event.data, event.comment, event.name, event.at, event.raw, event.json()
    answer.read_all(), answer.json(), answer.complete, answer.trailers
    answer.close() / answer.reset() / answer.half_close()

    connection = client.open()                  # several requests, or halves of one
    connection.send_head("POST", "/v1/chat/completions", {"content-length": 10})
    connection.send(b'{"mess')
    connection.answer()

A body that ends before its length or its last chunk raises Truncated, with what came in `.data`.
"""
import json
import select
import socket
import struct
import time
from dataclasses import dataclass
from urllib.parse import urlsplit


class Truncated(Exception):
    """The connection ended in the middle of an answer."""

    def __init__(self, message, data=b""):
        super().__init__(message)
        self.data = data


class Client:
    """timeout: seconds that one answer may take in all; rcvbuf: bytes of the receive buffer, for slow readers."""

    def __init__(self, url, key=None, timeout=20, rcvbuf=None):
        parts = urlsplit(url)
        self.address, self.host = (parts.hostname, parts.port or 80), parts.netloc
        self.key, self.timeout, self.rcvbuf = key, timeout, rcvbuf

    def open(self):
        return Connection(self)

    def request(self, method, path, body=None, headers=None, chunked=False):
        connection = self.open()
        try:
            return connection.request(method, path, body, headers, chunked)
        except BaseException:
            connection.close()
            raise

    def get(self, path, headers=None):
        return self.request("GET", path, headers=headers)

    def post(self, path, body=None, headers=None, chunked=False):
        return self.request("POST", path, body, headers, chunked)


class Connection:
    """One connection. A header given as None is left out; a list of pairs may repeat names."""

    def __init__(self, client):
        self.client, self.buffer = client, b""
        self.sock = socket.socket()
        if client.rcvbuf:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, client.rcvbuf)
        self.sock.settimeout(client.timeout)
        self.sock.connect(client.address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.deadline = time.monotonic() + client.timeout

    # out

    def request(self, method, path, body=None, headers=None, chunked=False):
        """A whole request, and the head of its answer. body: an object, bytes, or, with `chunked`, a list of bytes."""
        self.start(method, path, body, headers, chunked)
        return self.answer(method)

    def get(self, path, headers=None):
        return self.request("GET", path, headers=headers)

    def post(self, path, body=None, headers=None, chunked=False):
        return self.request("POST", path, body, headers, chunked)

    def start(self, method, path, body=None, headers=None, chunked=False):
        """The same without waiting for the answer."""
        self.send(self.encode(method, path, body, headers, chunked))

    def encode(self, method, path, body=None, headers=None, chunked=False):
        """The bytes of a request, to send in pieces or behind each other."""
        usual = {}
        if body is not None and not isinstance(body, (bytes, list)):
            body = json.dumps(body).encode()
        if chunked:
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in _listed(body)) + b"0\r\n\r\n"
            usual["transfer-encoding"] = "chunked"
        elif body is not None or method == "POST":
            usual["content-length"] = str(len(body or b""))
        if body is not None:
            usual["content-type"] = "application/json"
        return self.head(method, path, headers, usual) + (body or b"")

    def head(self, method, path, headers=None, usual=None):
        given = list(headers.items()) if isinstance(headers, dict) else list(headers or [])
        names = {name.lower() for name, _ in given}
        usual = {"host": self.client.host, "accept-encoding": "identity", **(usual or {})}
        if self.client.key:
            usual["authorization"] = f"Bearer {self.client.key}"
        pairs = [pair for pair in usual.items() if pair[0] not in names] + given
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in pairs if value is not None)]
        return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")

    def send_head(self, method, path, headers=None):
        self.send(self.head(method, path, headers))

    def send(self, data):
        """Bytes as they are. The time for an answer starts anew."""
        self.deadline = time.monotonic() + self.client.timeout
        self.sock.settimeout(self.client.timeout)
        self.sock.sendall(data)

    def half_close(self):
        self.sock.shutdown(socket.SHUT_WR)

    def close(self):
        self.sock.close()

    def reset(self):
        """Close with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # in

    def answer(self, method="POST"):
        """The head of the next answer; interim ones (1xx) are kept in its `interim`."""
        interim = []
        while True:
            first, *lines = self.read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
            pairs = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
            answer = Answer(self, method, first, pairs, interim)
            if answer.status >= 200:
                return answer
            interim.append(answer)

    def read(self, size=65536):
        """What is there, b"" at the end; TimeoutError when the time is up."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the answer took longer than {self.client.timeout} s")
        self.sock.settimeout(left)
        return self.sock.recv(size)

    def read_until(self, mark):
        while mark not in self.buffer:
            data = self.read()
            if not data:
                place = "inside a line or a head" if self.buffer else "without an answer"
                raise Truncated(f"the connection ended {place}", self.buffer)
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(mark)
        return line

    def ended(self, seconds=5):
        """Whether the server closes the connection within so many seconds; data that still comes is thrown away."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.sock], [], [], left)[0]:
                return False
            try:
                if not self.sock.recv(65536):
                    return True
            except ConnectionError:
                return True
        return False


@dataclass
class Event:
    """A block of server-sent events. comment: its first comment line; at: time.monotonic() of its last byte."""
    raw: bytes
    at: float
    name: str | None = None
    data: str | None = None
    comment: str | None = None

    def json(self):
        return json.loads(self.data)


class Answer:
    def __init__(self, connection, method, first, pairs, interim):
        self.connection, self.interim, self.header_list = connection, interim, pairs
        self.version, status, self.reason = (first.split(" ", 2) + [""])[:3]
        self.status, self.at = int(status), time.monotonic()
        self.headers = {}
        for name, value in pairs:
            before = self.headers.get(name.lower())
            self.headers[name.lower()] = value if before is None else f"{before}, {value}"
        self.body = None
        self.trailers, self.complete, self.bodiless = [], False, method == "HEAD" or self.status in (204, 304)

    def pieces(self):
        """(bytes, moment) for each HTTP chunk, or for each read where the answer is not chunked."""
        if self.bodiless:
            self.complete = True
        elif self.headers.get("transfer-encoding", "").lower() == "chunked":
            yield from self._chunks()
        elif "content-length" in self.headers:
            yield from self._counted(int(self.headers["content-length"]))
        else:
            yield from self._to_the_end()

    def read_all(self):
        parts = []
        try:
            for data, _ in self.pieces():
                parts.append(data)
        except (Truncated, ConnectionError) as error:
            raise Truncated(str(error), b"".join(parts)) from None
        return b"".join(parts)

    def json(self):
        """The body as JSON; it is read once, and may be asked for again."""
        if self.body is None:
            self.body = self.read_all()
        return json.loads(self.body)

    def events(self):
        """Each block of the stream as an Event. A rest without a blank line is no event: it raises Truncated."""
        buffer = b""
        for data, at in self.pieces():
            *blocks, buffer = (buffer + data).split(b"\n\n")
            for block in blocks:
                yield _event(block + b"\n\n", at)
        if buffer:
            raise Truncated("the stream ended inside an event", buffer)

    def close(self):
        self.connection.close()

    def reset(self):
        self.connection.reset()

    def half_close(self):
        self.connection.half_close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _chunks(self):
        while size := int(self.connection.read_until(b"\r\n").partition(b";")[0], 16):
            yield from self._exactly(size + 2, size)
        while line := self.connection.read_until(b"\r\n").decode("latin-1"):
            name, _, value = line.partition(":")
            self.trailers.append((name, value.strip()))
        self.complete = True

    def _exactly(self, size, keep):
        parts, had = [self.connection.buffer], len(self.connection.buffer)
        while had < size:
            data = self.connection.read()
            if not data:
                raise Truncated("the connection ended inside a chunk", b"".join(parts))
            parts.append(data)
            had += len(data)
        whole = b"".join(parts)
        self.connection.buffer = whole[size:]
        yield whole[:keep], time.monotonic()

    def _counted(self, left):
        while left:
            data = self.connection.buffer[:left] or self.connection.read(left)
            if not data:
                raise Truncated(f"the connection ended {left} bytes early")
            self.connection.buffer = self.connection.buffer[left:]
            left -= len(data)
            yield data, time.monotonic()
        self.complete = True

    def _to_the_end(self):
        while data := self.connection.buffer or self.connection.read():
            self.connection.buffer = b""
            yield data, time.monotonic()
        self.complete = True


def _listed(body):
    return [piece for piece in (body if isinstance(body, list) else [body or b""]) if piece]


def _event(raw, at):
    event = Event(raw, at)
    for line in raw.decode().split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if line.startswith(":"):
            event.comment = event.comment if event.comment is not None else value
        elif field == "data":
            event.data = value if event.data is None else f"{event.data}\n{value}"
        elif field == "event":
            event.name = value
    return event
