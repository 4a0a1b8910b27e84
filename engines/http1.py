"""HTTP/1.1 to an engine: pooled connections, TLS, heads, and the framing of bodies.

It sends a request and hands on what comes back as it comes. An `Answer` is read by a greenlet
(`read`, `all`) or, once its head is in, by whoever watches its file descriptor and calls `decode`
on the bytes that come there.

Source: RFC 9112 (message framing), RFC 9110 15.2 (interim responses).
"""

import errno
import os
import ssl
import struct
from contextlib import suppress
from time import monotonic
from urllib.parse import urlsplit

import gevent
from gevent import socket

from engines.signs import Signs
from errors import ModelUnavailable, UpstreamError
from loop import give_way, pause
from tcp import detect_vanished_peer, send_all

CONNECT_TIMEOUT = 10  # seconds
SEND_TIMEOUT = 60  # seconds in which an engine takes a piece of a request
STALE = 0.1  # seconds in which a connection that had ended before a request was sent shows it
IDLE = 4  # seconds: uvicorn and cpp-httplib close a connection that was idle for 5
READ = 65536  # bytes a read
PIECE = 1 << 18  # bytes a write
MAX_HEAD = 65536
MAX_LINE = 4096  # bytes of a chunk's size line
MAX_DIGITS = 18  # of a Content-Length
# What this machine may be out of: descriptors, ports, memory.
OWN_FAULTS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM)
HEXADECIMAL = b"0123456789abcdefABCDEF"
SIZES = {b"%x" % size: size for size in range(1, 1 << 10)}  # the size lines of usual chunks


class BadAnswer(UpstreamError):
    """The engine's bytes are no HTTP, or more of it than is taken."""


class Silent(Exception):
    """Nothing has come within the time."""


class NotTaken(UpstreamError):
    """The engine has not taken all of the request."""

    not_begun = True


class Off(ModelUnavailable):
    """There is no way to connect to the engine.

    reason  why, in words for the owner
    sure    nobody listens there, so that another try would be of no use
    ours    the engine has nothing to do with it
    """

    def __init__(self, message, reason, sure=False, ours=False):
        super().__init__(message)
        self.reason = reason
        self.sure = sure
        self.ours = ours


# ---- framing: where a body ends. All three have
#
# feed(bytes)  the body's bytes among these bytes of the connection
# ended        the last byte of the body has come
# surplus      bytes have come after it
# eof()        the connection has ended; returns whether the body is whole


class Chunked:
    """The chunked transfer coding.

    left   bytes of this chunk's data still to come
    line   the beginning of a line whose end has not come yet
    state  what comes next: "size", "data", "end" (of a chunk) or "trailer"
    trailer  bytes of such fields so far
    """

    def __init__(self):
        self.left = 0
        self.line = b""
        self.state = "size"
        self.trailer = 0
        self.ended = self.surplus = False

    def feed(self, data):
        if self.state == "size" and not self.line:
            # The usual case: exactly one chunk, as engines send one event.
            head = data.find(b"\r\n", 0, 6)
            if len(data) - head - 4 == SIZES.get(data[:head]) and data.endswith(b"\r\n"):
                return data[head + 2 : -2]
        return b"".join(self.pieces(self.line + data))

    def pieces(self, data):
        """The parts of the body in bytes that may hold any parts of any chunks."""
        at = 0
        self.line = b""
        while at < len(data):
            if self.ended:
                self.surplus = True
                return
            if self.state == "data":
                piece = data[at : at + self.left]
                yield piece
                at += len(piece)
                self.left -= len(piece)
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
        """A whole line of the framing, without its end."""
        if self.state == "size":
            self.left = hexadecimal(line.partition(b";")[0].strip())
            self.state = "data" if self.left else "trailer"
        elif self.state == "end":
            if line:
                raise BadAnswer("the engine sent a chunk that is longer than its size")
            self.state = "size"
        else:  # trailer fields, until an empty line
            self.ended = not line
            self.trailer += len(line)
            if self.trailer > MAX_HEAD:
                raise BadAnswer("the engine sent a trailer that does not end")

    def eof(self):
        return self.ended


def hexadecimal(digits):
    """A chunk's size. int() alone would take "+5", "0x5" and "5_0" too."""
    if not digits or digits.strip(HEXADECIMAL):
        raise BadAnswer("the engine sent a chunk whose size cannot be read")
    return int(digits, 16)


class Length:
    """A body of Content-Length bytes."""

    def __init__(self, length):
        self.left = length
        self.ended = not length
        self.surplus = False

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


def framing_of(headers):
    """How a body is framed (RFC 9112 6.3): chunked wins over a length."""
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return Chunked()
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit():
        if len(length) > MAX_DIGITS:  # Python itself reads no more than some thousands of them
            raise BadAnswer("the engine's answer has a length beyond all bounds")
        return Length(int(length))
    return UntilClose()


# ---- connections


class Cleartext:
    """The bytes of a connection as they are."""

    decode = None  # nothing to do
    over = False  # TCP alone says when the other side has ended

    def __init__(self, sock):
        self.sock = sock

    def send(self, data):
        send_all(self.sock, data)


class Tls:
    """TLS over a socket that itself stays untouched, so that the pump can read it like any other.

    over  the engine has said that it sends no more, which can be long before TCP says so

    Raises OSError (ssl.SSLError is one) where the handshake fails.
    """

    def __init__(self, sock, host, context):
        self.sock = sock
        self.over = False
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)
        self.shake_hands()

    def shake_hands(self):
        """Exchange messages with the engine until both sides have the keys."""
        while True:
            try:
                self.tls.do_handshake()
                return self.flush()
            except ssl.SSLWantReadError:
                self.flush()
                data = self.sock.recv(READ)
                if not data:
                    raise ConnectionResetError("closed during the TLS handshake") from None
                self.incoming.write(data)

    def flush(self):
        if self.outgoing.pending:
            self.sock.sendall(self.outgoing.read())

    def send(self, data):
        self.tls.write(data)
        self.flush()

    def decode(self, data):
        """What these bytes of the connection say; b"" while a record is not whole."""
        self.incoming.write(data)
        out = []
        try:
            while piece := self.tls.read(READ):
                out.append(piece)
            self.over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.over = True
        except ssl.SSLError as error:
            raise BadAnswer(f"the engine's TLS is broken ({error.reason})") from None
        return b"".join(out)


class Connection:
    """A connection to an engine. It serves again only if the last answer on it ended cleanly.

    framing     that of the last answer
    used        it has had an answer: the engine may be closing it just now
    idle_since  the monotonic moment of that answer's end
    """

    def __init__(self, address, host, tls):
        """Connect to an address (host, port). Raises OSError."""
        self.sock = socket.create_connection(address, CONNECT_TIMEOUT)
        try:
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            detect_vanished_peer(self.sock)
            self.layer = Tls(self.sock, host, tls) if tls else Cleartext(self.sock)
        except BaseException:
            self.sock.close()
            raise
        self.sock.settimeout(None)  # that time was for connecting; an engine may think for longer
        self.framing = None
        self.used = False
        self.idle_since = 0.0

    def is_reusable(self):
        """Whether it is open, the last answer's end has come, and nothing after it."""
        try:
            data = os.read(self.sock.fileno(), READ)  # that end may have come since
            self.framing.feed(self.layer.decode(data) if self.layer.decode else data)
            open_still = bool(data) and not self.layer.over
            return open_still and self.framing.ended and not self.framing.surplus
        except BlockingIOError:
            return self.framing.ended
        except (OSError, UpstreamError):
            return False

    def close(self):
        self.sock.close()

    def reset(self):
        """Close with a RST. An engine that does not read would see a FIN only behind the bytes that
        wait for it."""
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def why_off(error):
    """Why there is no connection: an OSError in words for the owner."""
    if error.errno in OWN_FAULTS:
        return f"the gateway's machine cannot connect: {error.strerror}"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(error, socket.gaierror):
        return f"no such name: {error.strerror}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error.strerror}: does it speak https at all?"
    if isinstance(error, ConnectionResetError):
        return f"closed while connecting: {error.strerror or error}"
    return f"unreachable: {error.strerror or 'no answer'}"


class Pool:
    """The connections to an engine, as many as are needed at once.

    signs  signs.Signs of the requests on them
    """

    def __init__(self, url, tls=None):
        """`tls`: the ssl.SSLContext of an https engine; by default one that trusts whom the system
        trusts."""
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        self.host = parts.hostname
        self.address = (parts.hostname, parts.port or (443 if secure else 80))
        self.tls = None
        if secure:
            self.tls = tls or ssl.create_default_context()
        self.prefix = parts.path.rstrip("/")
        self.netloc = parts.netloc
        self.idle = []
        self.signs = Signs()

    def take(self):
        """A connection for a request: an idle one, or a new one. Raises Off."""
        while self.idle:
            connection = self.idle.pop()
            if monotonic() - connection.idle_since < IDLE and connection.is_reusable():
                return connection
            connection.close()
        return self.connect()

    def connect(self):
        """A new connection. Raises Off."""
        try:
            return Connection(self.address, self.host, self.tls)
        except OSError as error:
            ours = error.errno in OWN_FAULTS
            if not ours:
                self.signs.failed = monotonic()
            raise Off(
                f"the engine does not answer ({type(error).__name__}); the model is off,"
                " try again later",
                why_off(error),
                sure=isinstance(error, ConnectionRefusedError),
                ours=ours,
            ) from None

    def give(self, connection):
        connection.used = True
        connection.idle_since = monotonic()
        self.idle.append(connection)

    def prune(self):
        """Close what has been idle for too long."""
        now = monotonic()
        kept = [connection for connection in self.idle if now - connection.idle_since < IDLE]
        for connection in self.idle:
            if connection not in kept:
                connection.close()
        self.idle = kept

    def clear(self):
        """Close all that is idle."""
        idle = self.idle
        self.idle = []
        for connection in idle:
            connection.close()

    def get(self, path, headers):
        """GET; the Answer's head is still to come. Raises Off, UpstreamError."""
        return Answer(self, [self.request_head("GET", path, headers)], harmless=True)

    def post(self, path, body, headers, harmless=False):
        """POST `body` (JSON, a list of bytes); the Answer's head is still to come. Raises Off,
        UpstreamError.

        harmless  it changes and costs nothing if the engine does it twice
        """
        length = sum(map(len, body))
        headers = {"Content-Type": "application/json", "Content-Length": length, **headers}
        return Answer(self, [self.request_head("POST", path, headers), *body], harmless)

    def request_head(self, method, path, headers):
        lines = [
            f"{method} {self.prefix}{path} HTTP/1.1",
            f"Host: {self.netloc}",
            "Accept-Encoding: identity",
        ]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


# ---- requests and their answers


class Answer:
    """A request that is being sent, and the engine's answer to it.

    request     the parts that may still have to be sent, or None
    harmless    the engine may do it twice
    since       the monotonic moment when all of it had gone
    sent        all of it has gone
    sender      the greenlet that sends a large one
    status, headers, framing
                known once `head(seconds)` has returned; names of headers are in lower case
    head_bytes  bytes that have come so far before the end of the head
    buffer      bytes that came behind it
    keep_alive  the engine will take another request on this connection
    closed      the connection was given back or closed
    streams     whether the body is events: whoever reads it finds out and notes it here
    """

    def __init__(self, pool, request, harmless=False):
        """Send a request (a list of bytes) on a connection of the pool. Raises Off."""
        self.pool = pool
        self.request = request
        self.harmless = harmless
        self.since = 0.0
        self.sender = None
        self.sent = False
        self.status = self.headers = self.framing = None
        self.head_bytes = 0
        self.buffer = b""
        self.keep_alive = False
        self.closed = False
        self.streams = None
        self.on_request_dropped = lambda: None
        self.connection = pool.take()
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
        """All of the body has come."""
        return self.framing is not None and self.framing.ended

    # -- the request

    def send(self):
        """Send the request. A large one goes on in a greenlet of its own, while whoever waits for
        the answer waits: sending and waiting have their own times."""
        self.sent = False
        if sum(map(len, self.request)) < READ:
            self.sock.settimeout(SEND_TIMEOUT)
            with suppress(OSError):  # as in `send_pieces`
                self.connection.layer.send(b"".join(self.request))
                self.note_sent()
            self.sock.settimeout(None)
            self.drop_request()
        else:
            self.sender = gevent.spawn(self.send_pieces, self.connection.layer, self.request)
            self.sender.link(lambda _: self.drop_request())

    def send_pieces(self, layer, parts):
        """Send all parts, in pieces that each have their time. An engine may answer, and close,
        before it has read all; then what it says counts, so an OSError is no fault yet."""
        try:
            for number, piece in enumerate(pieces(parts)):
                if number:
                    give_way()
                with gevent.Timeout(SEND_TIMEOUT, TimeoutError):
                    layer.send(piece)
            self.note_sent()
        except TimeoutError:
            self.give_up_sending(layer)
        except OSError:
            pass

    def note_sent(self):
        self.sent = True
        self.since = monotonic()

    def give_up_sending(self, layer):
        """The engine takes no more of the request. Without all of it no answer will come, unless it
        has begun already: end the wait for one."""
        if self.status is None:
            with suppress(OSError):
                layer.sock.shutdown(socket.SHUT_RDWR)

    def drop_request(self):
        """Let go of the request, unless it is being sent or may have to be sent again."""
        sending = self.sender and not self.sender.ready()
        if not sending and (self.status is not None or not self.connection.used):
            self.request = None
            self.on_request_dropped()

    def when_request_dropped(self, callback):
        """Have `callback` called once the request is held no longer: now or later, perhaps more
        than once."""
        self.on_request_dropped = callback
        self.drop_request()

    def stop_sending(self):
        if self.sender:
            self.sender.kill(block=False)
            self.sender = None

    def retry_if_stale(self):
        """Send the request again on a new connection, if that is safe; returns whether it was.

        A server may close an idle connection in the very moment in which it is used (RFC 9112
        9.3.1). Then not a byte comes back, and the end comes at once.
        """
        if not self.connection.used or self.head_bytes or self.may_have_begun:
            return False
        self.stop_sending()
        self.disconnect()
        self.pool.clear()  # those are as old
        self.connection = self.pool.connect()
        self.send()
        return True

    @property
    def may_have_begun(self):
        """Whether the engine may be at work on the request, or may have been: it has all of it, and
        has had it for longer than a connection takes to show that it was stale."""
        return self.sent and not self.harmless and monotonic() - self.since > STALE

    def no_answer(self):
        """The error for a connection that ended without an answer."""
        if self.may_have_begun:
            return UpstreamError(
                "the engine took the request and closed the connection without an answer; it may"
                " have worked on it: send the request again if that does no harm"
            )
        kind = UpstreamError if self.sent else NotTaken
        return kind("the engine closed the connection without an answer; send the request again")

    # -- the answer

    def head(self, seconds):
        """Read the head. Raises Silent if it has not come within `seconds`: call again."""
        until = monotonic() + seconds
        while self.status is None:
            head, end, rest = self.buffer.partition(b"\r\n\r\n")
            if end:
                self.buffer = rest
                self.parse(head)
            elif self.head_bytes > MAX_HEAD:  # interim heads are counted too
                raise BadAnswer("the engine sent a head that does not end")
            else:
                data = self.receive(until - monotonic())
                if not data and not self.retry_if_stale():
                    if not self.harmless:
                        self.pool.signs.failed = monotonic()
                    raise self.no_answer()
                self.buffer += data
                self.head_bytes += len(data)

    def parse(self, head):
        """Take in a head. After an interim one (100 Continue, 103 Early Hints) another follows."""
        first, *lines = head.split(b"\r\n")
        if not first.startswith(b"HTTP/1.") or not first[9:12].isdigit():
            raise BadAnswer("the engine's answer is no HTTP")
        status = int(first[9:12])
        if 100 <= status < 200:
            return
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self.headers = headers
        self.framing = Length(0) if status in (204, 304) else framing_of(headers)
        self.connection.framing = self.framing
        closes = headers.get("connection", "").lower() == "close"
        self.keep_alive = first.startswith(b"HTTP/1.1") and not closes
        self.status = status
        self.drop_request()
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise BadAnswer("the engine compressed its answer, though it was asked not to")

    def receive(self, seconds):
        """Bytes of the connection, decrypted; b"" at its end. Raises Silent."""
        layer = self.connection.layer
        try:
            with gevent.Timeout(max(seconds, 0.001), Silent):
                while not layer.over and (data := self.sock.recv(READ)):
                    if layer.decode:
                        data = layer.decode(data)
                    if data:  # a TLS record may hold nothing for us
                        return data
        except OSError:
            pass
        return b""

    def read(self, seconds):
        """Bytes of the body. None: none came within `seconds`. b"": the end, clean or not (see
        `ended`)."""
        until = monotonic() + seconds
        try:
            self.head(seconds)
            while not self.ended:
                data = self.buffer
                self.buffer = b""
                if not data:
                    data = self.receive(until - monotonic())
                    if not data:
                        self.framing.eof()
                        return b""
                body = self.framing.feed(data)
                if body:
                    if self.status == 200 and not self.harmless:
                        self.pool.signs.heard = monotonic()
                    return body
                pause()  # framing alone may come faster than it is read
        except Silent:
            return None
        return b""

    @property
    def decode(self):
        """A function from bytes of the connection to those of the body."""
        layer = self.connection.layer
        framing = self.framing
        if not layer.decode:
            return framing.feed

        def decode(data):
            body = framing.feed(layer.decode(data))
            if layer.over:
                framing.eof()
            return body

        return decode

    def all(self, seconds, limit, hold=None, more=None):
        """The whole body, at most `limit` bytes; a bytearray where it is large. Raises Silent,
        UpstreamError.

        hold  a function that is told of more bytes before they are kept, and may wait or raise
        more  a function that gives further seconds when the time is over, or none
        """
        until = monotonic() + seconds
        whole = bytearray()
        while (data := self.read(until - monotonic())) != b"":
            if data is None:
                seconds = more() if more else 0
                if seconds <= 0:
                    raise Silent
                until = monotonic() + seconds
                continue
            pause()
            if len(whole) + len(data) > limit:
                raise BadAnswer("the engine's answer is too large")
            if hold:
                hold(len(data))
            whole += data
        if not self.ended:
            raise UpstreamError("the engine broke off midway; send the request again")
        return whole if len(whole) > READ else bytes(whole)

    def close(self, whole=False):
        """Give the connection back. `whole`: all that matters has come, so it may serve again.
        Otherwise it is closed, which tells the engine to stop."""
        if self.closed:
            return
        self.closed = True
        self.stop_sending()
        clean = self.keep_alive and not self.buffer and not isinstance(self.framing, UntilClose)
        if whole and self.sent and clean and not self.framing.surplus:
            self.pool.give(self.connection)
        else:
            self.disconnect()

    def disconnect(self):
        if self.sent:
            self.connection.close()
        else:
            self.connection.reset()


def pieces(parts):
    """Parts as pieces to be sent one by one: small ones go together, large ones are cut."""
    piece = []
    size = 0
    for part in parts:
        for at in range(0, len(part), PIECE):
            more = part[at : at + PIECE]
            if size + len(more) > PIECE:
                yield b"".join(piece)
                piece = []
                size = 0
            piece.append(more)
            size += len(more)
    yield b"".join(piece)
