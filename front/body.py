"""A request's body: taken in piece by piece, within bounds, while other streams flow."""

import re
import secrets
from collections import Counter
from contextlib import contextmanager
from time import monotonic

from gevent import get_hub, getcurrent, sleep
from gunicorn.http.errors import InvalidChunkSize, NoMoreData, ParseException

from errors import (
    RETRY_AFTER,
    BodyTimeout,
    ClientGone,
    InvalidRequest,
    Overloaded,
    TooLarge,
    UnsupportedEncoding,
)
from front.large_json import Abridged
from front.wsgi import problem_of
from loop import WORK, give_way, pause, take_turn
from tcp import linger

PIECE = 1 << 18  # bytes at a time
LARGE = 2 << 20  # bytes up to which a body is parsed as it is
SILENCE = 30  # seconds without a byte until a body counts as abandoned
RATE = 256  # bytes a second that a body comes with at least
GRACE = 60  # seconds that it may be behind that
LONGEST = 1800  # seconds for a body
MOMENT = 0.001  # seconds in which what has come already is read, however late
SMALL = 1 << 16  # bytes left that gunicorn may throw away by itself
MOST_DIGITS = 16  # of a chunk's size: 64 bits
# What may have come of the first LOOKED_AT bytes of a line with a chunk's size, before its LF.
BEGUN = re.compile(rb"(?:[0-9A-Fa-f]{1,%d}[ \t]*(?:;[^\r\n]*)?\r?)?" % MOST_DIGITS)
LOOKED_AT = 32
LONGEST_LINE = 1 << 13  # bytes of such a line, with its extensions


class Room:
    """How many bytes of one kind all requests have in memory together, and how many they may have.
    A key that holds them for more than one request gets half of them at most."""

    def __init__(self, most):
        self.most = most
        self.held = 0
        self.by_key = Counter()  # bytes by a Call's account, of those that hold any

    def fits(self, key, own, size):
        """Whether a request of that key, which has `own` bytes of them, may have `size` more."""
        return self.held + size <= self.most and self.is_in_share(key, own, size)

    def is_in_share(self, key, own, size):
        of_key = self.by_key[key]
        return of_key == own or of_key + size <= self.most / 2

    def take(self, key, size):
        self.held += size
        self.by_key[key] += size

    def release(self, key, size):
        self.held -= size
        self.by_key[key] -= size
        if not self.by_key[key]:
            del self.by_key[key]


class Bodies(Room):
    """The room for bodies. What counts is what has come, not what was announced.

    Where there is no room for what comes, the newest body that is still coming gives way, of the
    key that holds the most: so nobody keeps a key out that has little.
    """

    def __init__(self, most):
        super().__init__(most)
        self.coming = {}  # Body -> None, in the order in which they began

    def hold(self, body, size):
        """Raises Overloaded where there is no room for so many bytes more, and none can be made."""
        while not self.fits(body.key, body.held, size):
            last = self.last_of(self.heaviest(body, size), body)
            if last is body:
                raise overloaded()
            last.gives_way = True
            get_hub().loop.run_callback(self.end, last)
            sleep(0)  # it lets go
        self.take(body.key, size)

    def heaviest(self, body, size):
        """The key that is to have less: this body's own, if that is beyond its share."""
        if not self.is_in_share(body.key, body.held, size):
            return body.key
        keys = [body.key, *(other.key for other in self.coming if not other.gives_way)]
        return max(keys, key=self.by_key.__getitem__)

    def last_of(self, key, body):
        """The newest body of a key that is still coming, or else the one that asks."""
        for other in reversed(self.coming):
            if other.key == key and not other.gives_way:
                return other
        return body

    def end(self, body):
        """Called in the hub."""
        if body in self.coming:
            body.greenlet.throw(overloaded())


def overloaded():
    return Overloaded(
        "too many large requests are being taken in; try again shortly", retry_after=RETRY_AFTER
    )


class BodySocket:
    """A client's socket for gunicorn's reader while a body comes.

    Others get their turn by time, not by bytes: a body in tiny chunks costs a thousand times as
    much as the same in large ones. And its client has not any time: SILENCE without a byte ends it,
    and so does a body that has fallen behind its least rate by more than GRACE, or takes LONGEST.
    No line is as slow, and a small body on a bad one comes within the grace. One that came fast has
    no credit for it later.
    """

    def __init__(self, sock):
        self.sock = sock
        self.worked = 0.0
        self.since = monotonic()
        self.end = self.since + LONGEST
        self.due = self.since + GRACE  # the moment until which more must have come

    def recv(self, size):
        """As the socket's. Raises BodyTimeout."""
        self.worked += monotonic() - self.since  # on what was read before
        if self.worked > WORK:
            give_way()
            self.worked = 0.0
        left = min(self.due, self.end) - monotonic()
        self.sock.settimeout(max(min(left, SILENCE), MOMENT))
        try:
            data = self.sock.recv(size)
        except TimeoutError:
            raise self.too_slow(left) from None
        self.since = monotonic()
        self.due = min(self.due + len(data) / RATE, self.since + GRACE)
        return data

    def too_slow(self, left):
        """The Refusal where nothing came in time; so many seconds were `left` for it."""
        what = f"no byte of the body has come for {SILENCE} seconds"
        if left < SILENCE:
            what = f"the body comes too slowly, with less than {RATE} bytes a second"
        return BodyTimeout(f"{what}; send the request again")


class ChunkSizes:
    """Looks at each line with a chunk's size before gunicorn's reader does, which would wait for as
    many bytes as it is told, and for the end of a number that never ends."""

    def __init__(self, reader, most, too_large):
        """
        most       bytes that the body may have
        too_large  a function that makes the Refusal of a body with more
        """
        self.parse = reader.parse_chunk_size
        self.left = most
        self.too_large = too_large
        reader.parse_chunk_size = self.next_size

    def next_size(self, unreader, data=None):
        """(size, what was read behind its line), as gunicorn's has it."""
        line = data or b""
        while (end := line.find(b"\n")) < 0:
            if len(line) > LONGEST_LINE or not BEGUN.fullmatch(line, 0, LOOKED_AT):
                raise InvalidChunkSize(line[:MOST_DIGITS])
            more = unreader.read()
            if not more:
                raise NoMoreData
            line += more
        if line[end - 1 : end] != b"\r" or not BEGUN.fullmatch(line, 0, min(end, LOOKED_AT)):
            raise InvalidChunkSize(line[:MOST_DIGITS])
        size, rest = self.parse(unreader, line)
        self.left -= size
        if self.left < 0:
            raise self.too_large()
        return size, rest


def next_of(reader):
    """What has come, or comes next, of a body of known length (gunicorn's LengthReader)."""
    if not reader.length:
        return b""
    piece = reader.unreader.read(read_ahead=min(reader.length, PIECE))
    if len(piece) > reader.length:  # the next request's
        reader.unreader.unread(piece[reader.length :])
        piece = piece[: reader.length]
    reader.length -= len(piece)
    return piece


class Body:
    """The body of one request. `read` it once; `release` when it is no longer held; `discard` what
    was not read.

    most      bytes that it may have
    held      bytes that it has on the account of `bodies`
    lent      a thread works on it
    let_go    it counts no more as soon as none does
    abridged  large_json.Abridged of a large one, or None
    first     the bytes of another one, once they have come
    pending   not all of it was read yet
    """

    def __init__(self, environ, bodies, most):
        """`environ` is WSGI's, `bodies` are the Bodies that it counts among."""
        self.input = environ["wsgi.input"]
        self.sock = environ["gunicorn.socket"]
        self.bodies = bodies
        self.most = most
        self.held = 0
        self.lent = self.let_go = False
        self.encoding = environ.get("HTTP_CONTENT_ENCODING", "").strip().lower()
        self.coding = environ.get("HTTP_TRANSFER_ENCODING", "").strip().lower()
        self.chunked = "chunked" in self.coding
        self.length = int(environ.get("CONTENT_LENGTH") or 0)
        self.abridged = self.first = None
        self.pending = self.chunked or self.length > 0
        self.begun = False
        self.gives_way = False  # to others, see Bodies
        self.greenlet = getcurrent()

    @property
    def breaks(self):
        """Whether its rest cannot be read: the connection ends with this request."""
        return self.pending and (self.begun or self.chunked or self.length > SMALL)

    def read(self, key):
        """Take it in, for a Call's account. Raises Refusal, ClientGone."""
        self.key = key
        self.check()
        self.begun = True
        self.bodies.coming[self] = None
        try:
            self.take_in()
        finally:
            del self.bodies.coming[self]
        self.pending = False

    def check(self):
        """Raises Refusal for what need not be read."""
        if self.encoding not in ("", "identity"):
            raise UnsupportedEncoding(
                "send the body as it is, without Content-Encoding", "Content-Encoding"
            )
        if self.coding not in ("", "chunked"):  # gunicorn lets gzip pass, and does not unpack it
            raise UnsupportedEncoding(
                "send the body as it is: the only Transfer-Encoding that is known here is chunked",
                "Transfer-Encoding",
            )
        if self.length > self.most:
            raise self.too_large()
        if not self.bodies.is_in_share(self.key, self.held, self.length):
            raise overloaded()

    def take_in(self):
        """All of it."""
        size = 0
        text = bytearray()
        with self.watched():
            while piece := self.piece():
                size += len(piece)
                if size > self.most:
                    raise self.too_large()
                self.hold(len(piece))
                text += piece
                if size > LARGE and len(text) >= PIECE:
                    self.abridge(text)
        if size < self.length:
            raise ClientGone
        if self.abridged is None:
            self.first = text
        else:
            self.abridge(text)

    def text(self):
        """What it says, once; a large one's is abridged, see `restore`. Raises InvalidRequest."""
        if self.abridged:
            return self.abridged.text()
        first = self.first
        self.first = None
        return first

    @contextmanager
    def watched(self):
        """While it is read, so are its socket and the sizes of its chunks. In the end gunicorn's
        reader has nothing that knows the body."""
        reader = self.input.reader
        unreader = reader.req.unreader if self.chunked else reader.unreader
        unreader.sock = BodySocket(self.sock)
        if self.chunked:
            ChunkSizes(reader, self.most, self.too_large)
        try:
            yield
        finally:
            unreader.sock = self.sock
            self.sock.settimeout(None)
            if self.chunked:
                reader.parser = None
                del reader.parse_chunk_size

    def piece(self):
        """What has come, or comes next; b"" at the end. Raises Refusal, ClientGone."""
        try:
            if self.chunked:
                return next(filter(None, self.input.reader.parser), b"")
            return next_of(self.input.reader)
        except NoMoreData:
            raise ClientGone from None
        except ParseException as error:
            raise InvalidRequest(f"the body cannot be read: {problem_of(error)}") from None
        except OSError:
            raise ClientGone from None

    def abridge(self, text):
        """Take over what has come of a large body; `text` is empty then."""
        if self.abridged is None:
            self.abridged = Abridged(secrets.token_hex(8))
        for at in range(0, len(text), PIECE):
            take_turn()  # pieces of many bodies together would be a long run
            if at:
                give_way()
            self.abridged.feed(bytes(text[at : at + PIECE]))
        text.clear()

    def restore(self, parts):
        """An engine's body that was made from the text, see dialects.Ask, with what `read` left
        out.

        Parts that are a str, addresses of images, stay.
        """
        if self.abridged is None:
            return parts
        whole = []
        for part in parts:
            if isinstance(part, str):
                whole.append(part)
            else:
                whole += self.abridged.restore(part)
        return whole

    def too_large(self):
        most = f"{self.most} bytes"
        if self.most >= 1 << 20:
            most = f"{self.most / (1 << 20):.4g} MB"
        return TooLarge(f"the body is over {most}; shrink embedded images or send fewer of them")

    def hold(self, size):
        self.bodies.hold(self, size)
        self.held += size

    def add(self, size):
        """Count bytes that did not come with it, such as images that it names. Raises Refusal."""
        if self.held + size > self.most:
            raise self.too_large()
        self.hold(size)

    def lend(self):
        """A thread works on it: until `give_back` it counts, whatever becomes of the request."""
        self.lent = True

    def give_back(self):
        self.lent = False
        if self.let_go:
            self.release()

    def release(self):
        self.let_go = True
        if self.held and not self.lent:
            self.bodies.release(self.key, self.held)
            self.held = 0

    def discard(self):
        linger(self.sock, pause)
