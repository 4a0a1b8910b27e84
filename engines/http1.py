"""One HTTP/1.1 exchange with an engine: pooled sockets, the head, the body's framing, TLS.

Small because it does one thing: POST some JSON and read what comes back as it comes. An `Answer` can be read by a
greenlet (`read`, `all`) or, once its head is in, by whoever watches its file descriptor and calls `decode`.

Source: RFC 9112 (message framing), RFC 9110 15.2 (interim responses).
"""

import os
import ssl
import struct
from contextlib import suppress
from time import monotonic
from urllib.parse import urlsplit

import gevent
from gevent import socket

from errors import ModelUnavailable, UpstreamError
from loop import give_way
from tcp import send_all

CONNECT_TIMEOUT = 10  # seconds
SEND_TIMEOUT = 60  # seconds in which an engine takes a piece of a request
IDLE = 4  # seconds: uvicorn closes a connection that was idle for 5
READ = 65536  # bytes a read
PIECE = 1 << 18  # bytes a write
MAX_HEAD = 65536
MAX_LINE = 4096  # bytes of a chunk's size line
MAX_DIGITS = 18  # of a Content-Length
HEXADECIMAL = b"0123456789abcdefABCDEF"
SIZES = {b"%x" % size: size for size in range(1, 1 << 10)}  # the size lines of usual chunks


class BadAnswer(UpstreamError):
    """The engine's bytes are no HTTP."""


class Silent(Exception):
    """Nothing has come within the time."""


class Off(ModelUnavailable):
    """Nobody listens where the engine should be."""


# ---- framing: feed(bytes) -> the body's bytes; .ended after the last one; .surplus if bytes came after it


class Chunked:
    """The chunked transfer coding."""

    def __init__(self):
        self.left = 0  # bytes of this chunk's data still to come
        self.line = b""  # an unfinished line
        self.state = "size"  # what comes next: size, data, end (of a chunk), trailer
        self.ended = self.surplus = False

    def feed(self, data):
        if self.state == "size" and not self.line:
            head = data.find(
                b"\r\n", 0, 6
            )  # the usual case: exactly one chunk, as vLLM sends one event
            if len(data) - head - 4 == SIZES.get(data[:head]) and data.endswith(b"\r\n"):
                return data[head + 2 : -2]
        return b"".join(self.pieces(self.line + data))

    def pieces(self, data):
        at, self.line = 0, b""
        while at < len(data):
            if self.ended:
                self.surplus = True
                return
            if self.state == "data":
                piece = data[at : at + self.left]
                yield piece
                at, self.left = at + len(piece), self.left - len(piece)
                if not self.left:
                    self.state = "end"
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > MAX_LINE:
                    raise BadAnswer("the engine sent a chunk whose size line does not end")
                self.line = data[at:]
                return
            self.on_line(data[at:end])
            at = end + 2

    def on_line(self, line):
        if self.state == "size":
            self.left = hexadecimal(line.partition(b";")[0].strip())
            self.state = "data" if self.left else "trailer"
        elif self.state == "end":
            if line:
                raise BadAnswer("the engine sent a chunk that is longer than its size")
            self.state = "size"
        else:  # trailer fields, until an empty line
            self.ended = not line

    def eof(self):
        """The connection has ended. Returns whether the body is whole."""
        return self.ended


def hexadecimal(digits):
    if not digits or digits.strip(HEXADECIMAL):
        raise BadAnswer("the engine sent a chunk whose size cannot be read")
    return int(digits, 16)


class Length:
    """A body of Content-Length bytes."""

    def __init__(self, length):
        self.left, self.ended, self.surplus = length, not length, False

    def feed(self, data):
        body = data[: self.left]
        self.surplus = self.surplus or len(data) > self.left
        self.left -= len(body)
        self.ended = not self.left
        return body

    def eof(self):
        return self.ended


class UntilClose:
    """A body that ends with its connection, as in HTTP/1.0."""

    ended = surplus = False

    def feed(self, data):
        return data

    def eof(self):
        self.ended = True
        return True


# ---- connections


class Plain:
    """A connection's bytes as they are."""

    decode = None  # nothing to do

    def __init__(self, sock):
        self.sock = sock

    def send(self, data):
        send_all(self.sock, data)


class Tls:
    """A TLS connection over a plain socket, so that its bytes too can be read by whoever has them."""

    def __init__(self, sock, host, context=None):
        self.sock, self.incoming, self.outgoing = sock, ssl.MemoryBIO(), ssl.MemoryBIO()
        context = context or ssl.create_default_context()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)
        self.shake_hands()

    def shake_hands(self):
        while True:
            try:
                self.tls.do_handshake()
                return self.flush()
            except ssl.SSLWantReadError:
                self.flush()
                data = self.sock.recv(READ)
                if not data:
                    raise ConnectionResetError("closed during the TLS handshake")
                self.incoming.write(data)

    def flush(self):
        if self.outgoing.pending:
            self.sock.sendall(self.outgoing.read())

    def send(self, data):
        self.tls.write(data)
        self.flush()

    def decode(self, data):
        self.incoming.write(data)
        out = []
        try:
            while piece := self.tls.read(READ):
                out.append(piece)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            raise BadAnswer(f"the engine's TLS is broken ({error.reason})") from None
        return b"".join(out)


class Connection:
    """A connection to an engine. It is reused only if the last answer on it ended cleanly."""

    def __init__(self, address, host, tls):
        self.sock = socket.create_connection(address, CONNECT_TIMEOUT)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self.layer = Tls(self.sock, host, tls) if tls else Plain(self.sock)
        except BaseException:
            self.sock.close()
            raise
        self.sock.settimeout(None)  # that time was for connecting; an engine may think for longer
        self.framing, self.rested, self.used = None, 0.0, False

    def fresh(self):
        """Whether it is fit for another request: still open, the last answer's end in, and nothing after it."""
        try:
            data = os.read(
                self.sock.fileno(), READ
            )  # the end of the last answer may have come since
            self.framing.feed(self.layer.decode(data) if self.layer.decode else data)
            return bool(data) and self.framing.ended and not self.framing.surplus
        except BlockingIOError:
            return self.framing.ended
        except (OSError, UpstreamError):
            return False

    def close(self):
        self.sock.close()

    def reset(self):
        """Close with a RST: an engine that does not read sees no other end, behind the bytes that wait for it."""
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class Pool:
    """The connections to one engine at `url`, as many as are needed at once."""

    def __init__(self, url, tls=None):
        parts = urlsplit(url)
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        self.address = (parts.hostname, parts.port or (443 if self.secure else 80))
        self.tls = (tls or ssl.create_default_context()) if self.secure else None
        self.prefix = parts.path.rstrip("/")
        self.netloc = parts.netloc
        self.idle = []

    def take(self):
        while self.idle:
            connection = self.idle.pop()
            if monotonic() - connection.rested < IDLE and connection.fresh():
                return connection
            connection.close()
        try:
            return Connection(self.address, self.host, self.tls)
        except OSError as error:
            raise Off(
                f"the engine does not answer ({error.__class__.__name__}); the model is off, try again later"
            )

    def give(self, connection):
        connection.used, connection.rested = True, monotonic()
        self.idle.append(connection)

    def prune(self):
        """Close what has been idle for too long."""
        stale = [connection for connection in self.idle if monotonic() - connection.rested >= IDLE]
        self.idle = [connection for connection in self.idle if connection not in stale]
        for connection in stale:
            connection.close()

    def post(self, path, body, headers):
        """POST `body` (JSON, a list of bytes) and give the Answer, whose head is still to come. Raises Off, UpstreamError."""
        lines = [
            f"POST {self.prefix}{path} HTTP/1.1",
            f"Host: {self.netloc}",
            "Content-Type: application/json",
            "Accept-Encoding: identity",
            f"Content-Length: {sum(map(len, body))}",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return Answer(self, ["\r\n".join(lines).encode("latin-1") + b"\r\n\r\n", *body])


class Answer:
    """What an engine answers. `status` and `headers` (lower-case names) are there once `head(seconds)` is."""

    def __init__(self, pool, request):
        self.pool, self.request = pool, request
        self.status = self.headers = self.framing = None
        self.buffer, self.keeps, self.closed = b"", False, False
        self.streams = None  # whether its body is events; for whoever reads it to say
        self.heads = 0  # bytes that have come before the end of the head
        self.sent = False  # all of the request has gone
        self.freed = lambda: None  # called when nothing of it is held any more
        self.connection, self.sender = pool.take(), None
        try:
            self.send()
        except BaseException:
            self.close()
            raise

    @property
    def sock(self):
        return self.connection.sock

    @property
    def ended(self):
        return self.framing is not None and self.framing.ended

    def send(self):
        """Send the request; a large body goes on in a greenlet of its own, while whoever waits for the answer waits."""
        self.sent = False
        if sum(map(len, self.request)) < READ:
            self.sock.settimeout(SEND_TIMEOUT)
            with suppress(OSError):  # as in `send_pieces`
                self.connection.layer.send(b"".join(self.request))
                self.sent = True
            self.sock.settimeout(None)
            self.free()
        else:  # sending and reading have their own times, at the same time
            self.sender = gevent.spawn(self.send_pieces, self.connection.layer, self.request)
            self.sender.link(lambda _: self.free())

    def send_pieces(self, layer, parts):
        """Send all parts, in pieces that each have their time. An engine may answer, and close, before it has read all: what it
        says then counts."""
        try:
            for number, piece in enumerate(pieces(parts)):
                if number:
                    give_way()
                with gevent.Timeout(SEND_TIMEOUT, TimeoutError):
                    layer.send(piece)
            self.sent = True
        except TimeoutError:
            self.unheard(layer)
        except OSError:
            pass

    def unheard(self, layer):
        """The engine takes no more of the request: without all of it no answer will come, unless it has begun already."""
        if self.status is None:
            with suppress(OSError):
                layer.sock.shutdown(socket.SHUT_RDWR)

    def free(self):
        """Let go of the request, unless it is still being sent or may have to be sent again."""
        sending = self.sender and not self.sender.ready()
        if not sending and (self.status is not None or not self.connection.used):
            self.request = None
            self.freed()

    def when_freed(self, callback):
        """Have `callback` called when nothing of the request is held any more: now, later, or more than once."""
        self.freed = callback
        self.free()

    def stop_sending(self):
        if self.sender:
            self.sender.kill(block=False)
            self.sender = None

    def again(self):
        """Once more on a new connection. A server may close an idle one in the very moment in which it is used:
        then not a byte has come back, and nobody has seen the request."""
        stale = self.connection.used and not self.heads
        if stale:
            self.stop_sending()
            self.drop()
            self.pool.idle, old = [], self.pool.idle
            for connection in old:
                connection.close()
            self.connection = self.pool.take()
            self.send()
        return stale

    def head(self, seconds):
        """Read the head. Raises Silent if it has not come within `seconds`: call again."""
        until = monotonic() + seconds
        while self.status is None:
            end = self.buffer.find(b"\r\n\r\n")
            if end >= 0:
                head, self.buffer = self.buffer[:end], self.buffer[end + 4 :]
                self.parse(head)
            elif self.heads > MAX_HEAD:  # interim heads are counted too
                raise BadAnswer("the engine sent a head that does not end")
            else:
                data = self.receive(until - monotonic())
                if not data and not self.again():
                    raise UpstreamError(
                        "the engine closed the connection without an answer; send the request again"
                    )
                self.buffer += data
                self.heads += len(data)

    def parse(self, head):
        first, *lines = head.split(b"\r\n")
        if not first.startswith(b"HTTP/1.") or not first[9:12].isdigit():
            raise BadAnswer("the engine's answer is no HTTP")
        status = int(first[9:12])
        if 100 <= status < 200:  # 100 Continue, 103 Early Hints: the answer comes after it
            return
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.framing = self.connection.framing = (
            Length(0) if status in (204, 304) else framing_of(self.headers)
        )
        self.keeps = (
            first.startswith(b"HTTP/1.1") and self.headers.get("connection", "").lower() != "close"
        )
        self.status = status
        self.free()
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise BadAnswer("the engine compressed its answer, though it was asked not to")

    def receive(self, seconds):
        """Bytes of the connection, b"" at its end. Raises Silent."""
        decode = self.connection.layer.decode
        try:
            with gevent.Timeout(max(seconds, 0.001), Silent):
                while data := self.sock.recv(READ):
                    if (
                        plain := decode(data) if decode else data
                    ):  # a TLS record may hold nothing for us
                        return plain
        except OSError:
            pass
        return b""

    def read(self, seconds):
        """Body bytes; None: nothing within `seconds`; b"": the end, clean or not (see `ended`)."""
        end = monotonic() + seconds
        try:
            self.head(seconds)
            while not self.ended:
                data, self.buffer = self.buffer, b""
                if not data:
                    data = self.receive(end - monotonic())
                    if not data:
                        self.framing.eof()
                        return b""
                body = self.framing.feed(data)
                if body:
                    return body
        except Silent:
            return None
        return b""

    @property
    def decode(self):
        """A function from the bytes of the connection to those of the body."""
        layer, framing = self.connection.layer.decode, self.framing.feed
        return (lambda data: framing(layer(data))) if layer else framing

    def all(self, seconds, limit):
        """The whole body, at most `limit` bytes. Raises Silent, UpstreamError."""
        end, parts, size = monotonic() + seconds, [], 0
        while True:
            data = self.read(end - monotonic())
            if data is None:
                raise Silent
            if not data:
                break
            parts.append(data)
            size += len(data)
            if size > limit:
                raise BadAnswer("the engine's answer is too large")
        if not self.ended:
            raise UpstreamError("the engine broke off midway; send the request again")
        return b"".join(parts)

    def close(self, whole=False):
        """Give the connection back. `whole`: all that matters has come, so it may serve again; otherwise it is
        closed, which tells the engine to stop."""
        if self.closed:
            return
        self.closed = True
        self.stop_sending()
        reusable = self.keeps and not self.buffer and not isinstance(self.framing, UntilClose)
        if whole and self.sent and reusable and not self.framing.surplus:
            self.pool.give(self.connection)
        else:
            self.drop()

    def drop(self):
        if self.sent:
            self.connection.close()
        else:
            self.connection.reset()


def pieces(parts):
    """Parts as pieces that are sent at a time: what is small goes together, what is large is cut."""
    piece, size = [], 0
    for part in parts:
        for at in range(0, len(part), PIECE):
            more = part[at : at + PIECE]
            if size + len(more) > PIECE:
                yield b"".join(piece)
                piece, size = [], 0
            piece.append(more)
            size += len(more)
    yield b"".join(piece)


def framing_of(headers):
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return Chunked()
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit():
        if len(length) > MAX_DIGITS:  # Python reads no more than some thousands of them
            raise BadAnswer("the engine's answer has a length beyond all bounds")
        return Length(int(length))
    return UntilClose()
