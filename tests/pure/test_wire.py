"""What clients send before anybody knows them: heads, slow bodies, idle connections. No socket is real here."""
import pytest
from gunicorn.config import Config
from gunicorn.http.errors import LimitRequestHeaders, LimitRequestLine, NoMoreData, ParseException

from errors import BodyTimeout
from front import body, connections, heads
from front.heads import Head, HeadParser, SlowHead

LINE = 4094                                         # gunicorn's bound


# ---- heads

class Sock:
    """Gives these pieces, then nothing. waited: the timeouts at each read."""

    def __init__(self, pieces):
        self.pieces, self.waited, self.timeout = list(pieces), [], None

    def settimeout(self, seconds):
        self.timeout = seconds

    def gettimeout(self):
        return self.timeout

    def recv(self, size):
        self.waited.append(self.timeout)
        piece = self.pieces.pop(0) if self.pieces else b""
        if piece is TimeoutError:
            raise TimeoutError
        return piece


def config():
    found = Config()
    for name, value in (("limit_request_field_size", heads.MOST_FIELD), ("limit_request_fields", heads.MOST_FIELDS),
                        ("forwarder_headers", ""), ("secure_scheme_headers", {}), ("forwarded_allow_ips", "*")):
        found.set(name, value)
    return found


CONFIG = config()


def parsed(pieces):
    """What comes of a connection: [(method, target, headers, body) or the exception's class]."""
    parser, found = HeadParser(CONFIG, Sock(pieces), ("127.0.0.1", 1)), []
    while True:
        try:
            request = next(parser)
        except StopIteration:
            return found
        except (ParseException, NoMoreData) as error:
            return [*found, type(error)]
        found.append((request.method, request.uri, request.headers, request.body.read()))


def single(data):
    return [data[at:at + 1] for at in range(len(data))]


def get(*fields, line="GET / HTTP/1.1"):
    return "\r\n".join([line, *fields, "", ""]).encode()


FINE = [get("Host: a"), b"\r\n" + get("Host: a"), get(line="GET / HTTP/1.0"), get("Host: a") * 3,
        get("Host: a", "Content-Length: 3", line="POST /b HTTP/1.1") + b"abc" + get("Host: a"),
        get("Host: a", "Transfer-Encoding: chunked", line="POST /b HTTP/1.1") + b"1\r\nx\r\n0\r\nT: u\r\n\r\n" + get("Host: a"),
        get(*[f"X-{number}: " + "y" * 640 for number in range(heads.MOST_FIELDS)]), get("X: " + "y" * 16_000, "Y: " + "z" * 16_000)]
NONE = [b"GET / HTTP/1.1\nHost: a\n\n", b"GET / HTTP/1.1\r\nHost: a\nX: y\r\n\r\n", b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/9.9\r\nX: y", b"GET",
        b"GET /" + b"a" * 9000, get(line="GET /" + "a" * 9000 + " HTTP/1.1"), get(*["X: y"] * (heads.MOST_FIELDS + 1)),
        get(*["X: " + "y" * 16_000] * 5), b"GET / HTTP/1.1\r\nHost: a\r\n"]


@pytest.mark.parametrize("data", FINE + NONE, ids=lambda data: repr(data)[:30])
def test_heads_in_pieces_are_heads(data):
    """Byte by byte, in two parts, in gunicorn's reads: the same as at once."""
    whole = parsed([data])
    assert (data in FINE) == all(isinstance(one, tuple) for one in whole) and whole
    assert parsed(single(data)) == whole
    assert parsed([data[at:at + 8192] for at in range(0, len(data), 8192)]) == whole
    for at in {1, 2, 15, 16, 17, len(data) // 2, len(data) - 1} - {len(data), 0}:
        assert parsed([data[:at], data[at:]]) == whole


def test_a_head_that_is_none_is_not_waited_for():
    for data in (b"GET / HTTP/9.9\r\n", b"GET / HTTP/1.1\n", b"GET / HTTP/1.1\r\nX: y\n", b"a b c\r\n"):
        sock = Sock([*single(data), TimeoutError])
        with pytest.raises(ParseException) as caught:
            next(HeadParser(CONFIG, sock, ("127.0.0.1", 1)))
        assert caught.type is not SlowHead and sock.pieces == [TimeoutError]


@pytest.mark.parametrize("line, error", [(b"", LimitRequestLine), (b"GET / HTTP/1.1\r\n", LimitRequestHeaders)])
def test_an_endless_head_is_read_up_to_its_bound(line, error):
    head, taken = Head(LINE), 0
    with pytest.raises(error):
        head.take(line)
        while True:
            taken += 1
            head.take(b"x")
    assert taken <= (heads.MOST if line else LINE) + 4


class Counted(bytearray):
    """Bytes that count how many of them are looked at."""
    looked = 0

    def find(self, what, start=0):
        self.looked += len(self) - start
        return super().find(what, start)

    def count(self, what, start=0, *end):
        self.looked += (end[0] if end else len(self)) - start
        return super().count(what, start, *end)


@pytest.mark.parametrize("size", [1000, 4000, 16_000, 60_000])
def test_each_byte_of_a_head_is_looked_at_a_few_times(size):
    head = Head(LINE)
    head.data = Counted()
    for byte in single(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10 + b"x" * size):
        assert not head.take(byte)
    assert head.data.looked < 10 * size


def test_a_head_has_its_time(monkeypatch):
    """An idle connection is closed without a word; one that has begun a head is told."""
    moments = iter(range(0, 1000, 10))
    monkeypatch.setattr(heads, "monotonic", lambda: next(moments))
    assert parsed([TimeoutError]) == [] and parsed([get("Host: a"), TimeoutError]) == [("GET", "/", [("HOST", "a")], b"")]
    sock = Sock([b"GET / HTTP/1.1\r\n", b"X", b": y", b"z", TimeoutError])
    with pytest.raises(SlowHead):
        next(HeadParser(CONFIG, sock, ("127.0.0.1", 1)))
    assert sock.waited == [heads.KEEPALIVE, 20, 10, 0.001, 0.001] and sock.timeout is None


# ---- bodies

class Clock:
    def __init__(self):
        self.now = 0.0


class Line:
    """A client that sends so many bytes every so many seconds."""

    def __init__(self, clock, size, seconds):
        self.clock, self.size, self.seconds, self.due = clock, size, seconds, seconds

    def settimeout(self, seconds):
        self.timeout = seconds

    def recv(self, _):
        if self.due - self.clock.now > self.timeout:
            self.clock.now += self.timeout
            raise TimeoutError
        self.clock.now = max(self.clock.now, self.due)
        self.due += self.seconds
        return b"x" * self.size


MB = 1 << 20
LINES = [                                           # (bytes, every so many seconds, of so many bytes, whether it may be)
    (1, 25, 100 * MB, False), (1, 1, 100 * MB, False), (1, 0.01, 100 * MB, False), (1000, 5, 100 * MB, False), (100, 29, 64 * 1024, False),
    (1, 31, 10, False), (4096, 31, 10_000, False), (16_384, 1, 100 * MB, False),
    (1, 0.5, 100, True), (100, 1, 6000, True), (1400, 5, 200_000, True), (1400, 29, 2800, True), (8000, 1, 5 * MB, True), (65_536, 1, 100 * MB, True),
]


@pytest.mark.parametrize("size, seconds, whole, passes", LINES)
def test_the_least_rate_of_a_body(monkeypatch, size, seconds, whole, passes):
    clock = Clock()
    monkeypatch.setattr(body, "monotonic", lambda: clock.now)
    monkeypatch.setattr(body, "give_way", lambda: None)
    sock, come = body.BodySocket(Line(clock, size, seconds)), 0
    if passes:
        while come < whole:
            come += len(sock.recv(0))
        return
    with pytest.raises(BodyTimeout, match="no byte|too slowly"):
        while come < whole:
            come += len(sock.recv(0))
    assert clock.now <= body.LONGEST + body.SILENCE


def test_a_body_that_came_fast_has_no_credit(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(body, "monotonic", lambda: clock.now)
    sock = body.BodySocket(Line(clock, 90 * MB, 1))
    sock.recv(0)
    sock.sock = Line(clock, 1, 5)
    with pytest.raises(BodyTimeout):
        for _ in range(100):
            sock.recv(0)
    assert clock.now < body.GRACE + 10


# ---- idle connections

class Idle:
    ended = False

    def shutdown(self, _):
        self.ended = True


def test_the_oldest_idle_connection_gives_way(monkeypatch):
    monkeypatch.setattr(connections, "MOST_OF_ONE", 3)
    book, socks = connections.Connections(5), [Idle() for _ in range(9)]
    for number, sock in enumerate(socks[:4]):       # one address: its oldest one ends
        book.add()
        book.rest(sock, "a")
        assert [one.ended for one in socks] == [number == 3 and one is socks[0] for one in socks]
    book.remove(socks[0])
    book.awake(socks[1])                            # in the middle of a request
    for sock in socks[4:7]:                         # others: beyond five of them the one that is idle for longest
        book.add()
        book.rest(sock, sock)
    assert [one.ended for one in socks] == [True, False, True] + 6 * [False]
    book.remove(socks[2])
    for sock in socks[:7]:
        if not sock.ended:
            book.remove(sock)
    assert (book.open, book.idle, dict(book.by_address)) == (0, {}, {})


def test_none_ends_in_the_middle_of_a_request():
    book = connections.Connections(2)
    for _ in range(5):
        book.add()
    assert book.open == 5
