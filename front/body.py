"""A request's body: taken in piece by piece, within bounds, while other streams flow."""

import re
import secrets
from collections import Counter
from contextlib import contextmanager, nullcontext
from time import monotonic

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
from loop import give_way
from tcp import linger

PIECE = 1 << 18  # bytes at a time
LARGE = 2 << 20  # bytes up to which a body is parsed as it is
SILENCE = 30  # seconds without a byte until a body counts as abandoned
SMALL = 1 << 16  # bytes left that gunicorn may throw away by itself
MOST_DIGITS = 16  # of a chunk's size: 64 bits
# What may have come of the first LOOKED_AT bytes of a line with a chunk's size, before its LF.
BEGUN = re.compile(rb"(?:[0-9A-Fa-f]{1,%d}[ \t]*(?:;[^\r\n]*)?\r?)?" % MOST_DIGITS)
LOOKED_AT = 32
LONGEST_LINE = 1 << 13  # bytes of such a line, with its extensions
WORK = 0.005  # seconds for which chunks are taken apart in one go


class Bodies:
    """How many bytes all bodies in memory have together, and how many they may have.

    A key with more than one body gets half of them at most.
    """

    def __init__(self, most):
        self.most = most
        self.held = 0
        self.by_key = Counter()  # bytes by the key's id

    def hold(self, key, size):
        """Raises Overloaded where there is no room for so many bytes more."""
        own = self.by_key[key]
        if self.held + size > self.most or own and own + size > self.most / 2:
            raise Overloaded(
                "too many large requests are being taken in; try again shortly",
                retry_after=RETRY_AFTER,
            )
        self.held += size
        self.by_key[key] += size

    def release(self, key, size):
        self.held -= size
        self.by_key[key] -= size


class YieldingSocket:
    """A client's socket for gunicorn's reader of chunks, which works on what it reads without ever
    giving way. Other requests get their turn by time, not by bytes: a body in tiny chunks costs a
    thousand times as much as the same in large ones."""

    def __init__(self, sock):
        self.sock = sock
        self.worked = 0.0
        self.since = monotonic()

    def recv(self, size):
        self.worked += monotonic() - self.since  # on what was read before
        if self.worked > WORK:
            give_way()
            self.worked = 0.0
        data = self.sock.recv(size)
        self.since = monotonic()
        return data


@contextmanager
def yielding(reader):
    """While gunicorn's reader of chunks is used, its socket gives way."""
    unreader = reader.req.unreader
    sock = unreader.sock
    unreader.sock = YieldingSocket(sock)
    try:
        yield
    finally:
        unreader.sock = sock


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
        if self.chunked:
            ChunkSizes(self.input.reader, most, self.too_large)

    @property
    def breaks(self):
        """Whether its rest cannot be read: the connection ends with this request."""
        return self.pending and (self.begun or self.chunked or self.length > SMALL)

    def read(self, key):
        """Take it in, on the account of a key (its id). Raises Refusal, ClientGone."""
        self.key = key
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
        self.hold(self.length)
        self.begun = True
        size = 0
        first = bytearray()
        while piece := self.piece(self.step(size)):
            if size:
                give_way()
            size += len(piece)
            if size > self.most:
                raise self.too_large()
            self.hold(size - self.held)
            if size <= LARGE:
                first += piece
            else:
                self.take(piece, first)
        self.pending = False
        if size < self.length:
            raise ClientGone
        if not self.abridged:
            self.first = first

    def text(self):
        """What it says, once; a large one's is abridged, see `restore`. Raises InvalidRequest."""
        if self.abridged:
            return self.abridged.text()
        first = self.first
        self.first = None
        return first

    def step(self, size):
        """How much to read after `size` bytes: up to the first byte too many.

        Asked for a few bytes, gunicorn waits for 1 KB, which may never come. So a rest that small
        is read together with the piece before it.
        """
        left = self.most + 1 - size
        if left <= PIECE + 1024:
            return left
        return PIECE

    def take(self, piece, first):
        """A piece of a large body, of which `first` came before it."""
        if self.abridged is None:
            self.abridged = Abridged(secrets.token_hex(8))
            for at in range(0, len(first), PIECE):
                self.abridged.feed(bytes(first[at : at + PIECE]))
                give_way()
            first.clear()
        self.abridged.feed(piece)

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

    def piece(self, size):
        """The next piece, b"" at the end. Raises Refusal, ClientGone."""
        self.sock.settimeout(SILENCE)
        try:
            with yielding(self.input.reader) if self.chunked else nullcontext():
                return self.input.read(size)
        except TimeoutError:
            raise BodyTimeout(
                f"no byte of the body has come for {SILENCE} seconds; send the request again"
            ) from None
        except NoMoreData:
            raise ClientGone from None
        except ParseException as error:
            raise InvalidRequest(f"the body cannot be read: {problem_of(error)}") from None
        except OSError:
            raise ClientGone from None
        finally:
            self.sock.settimeout(None)

    def too_large(self):
        most = f"{self.most} bytes"
        if self.most >= 1 << 20:
            most = f"{self.most / (1 << 20):.4g} MB"
        return TooLarge(f"the body is over {most}; shrink embedded images or send fewer of them")

    def hold(self, size):
        if size > 0:
            self.bodies.hold(self.key, size)
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
        linger(self.sock)
