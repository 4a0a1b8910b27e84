"""A request's body: taken in piece by piece, within bounds, while other streams flow."""

import secrets
from collections import Counter
from contextlib import contextmanager, nullcontext
from time import monotonic

from gunicorn.http.errors import NoMoreData, ParseException

from errors import (
    BodyTimeout,
    ClientGone,
    InvalidRequest,
    Overloaded,
    RETRY_AFTER,
    TooLarge,
    UnsupportedEncoding,
)
from front.large_json import Skeleton
from loop import give_way
from tcp import linger

PIECE = 1 << 18  # bytes at a time
LARGE = 2 << 20  # bytes up to which a body is parsed as it is
SILENCE = 30  # seconds without a byte until a body counts as abandoned
SMALL = 1 << 16  # bytes left that gunicorn may throw away by itself
WORK = 0.005  # seconds for which chunks are taken apart in one go


class Bodies:
    """What all bodies in memory weigh together, and how much they may. A key with more than one gets half of it at most."""

    def __init__(self, most):
        self.most, self.held, self.by_key = most, 0, Counter()

    def hold(self, key, size):
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


class Turns:
    """A client's socket, as gunicorn reads it, that gives way by time: tiny chunks cost a thousand times what they weigh."""

    def __init__(self, sock):
        self.sock, self.worked, self.since = sock, 0.0, monotonic()

    def recv(self, size):
        self.worked += monotonic() - self.since  # with what came before
        if self.worked > WORK:
            give_way()
            self.worked = 0.0
        data = self.sock.recv(size)
        self.since = monotonic()
        return data


@contextmanager
def by_turns(reader):
    """While gunicorn's reader of chunks is used, its socket is Turns."""
    unreader = reader.req.unreader
    sock, unreader.sock = unreader.sock, Turns(unreader.sock)
    try:
        yield
    finally:
        unreader.sock = sock


class Body:
    """The body of one request. `read` it once; `release` when it is no longer held; `discard` what was not read."""

    def __init__(self, environ, bodies, most):
        self.input, self.sock = environ["wsgi.input"], environ["gunicorn.socket"]
        self.bodies, self.most, self.held = bodies, most, 0
        self.encoding = environ.get("HTTP_CONTENT_ENCODING", "").strip().lower()
        self.chunked = "chunked" in environ.get("HTTP_TRANSFER_ENCODING", "").lower()
        self.length = int(environ.get("CONTENT_LENGTH") or 0)
        self.skeleton = None
        self.pending, self.begun = self.chunked or self.length > 0, False

    @property
    def breaks(self):
        """Whether its rest cannot be read: the connection ends with this request."""
        return self.pending and (self.begun or self.chunked or self.length > SMALL)

    def read(self, key):
        """Its text, on the account of a key (its id); of a large one the skeleton, see `restore`. Raises Refusal, ClientGone."""
        self.key = key
        if self.encoding not in ("", "identity"):
            raise UnsupportedEncoding(
                "send the body as it is, without Content-Encoding", "Content-Encoding"
            )
        if self.length > self.most:
            raise self.too_large()
        self.hold(self.length)
        self.begun, size, first = True, 0, bytearray()
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
        return self.skeleton.text() if self.skeleton else first

    def step(self, size):
        """How much to read after `size` bytes: up to the first byte too many, and never under the 1 KB that gunicorn reads
        at least, or it would wait for more than that byte."""
        left = self.most + 1 - size
        return left if left <= PIECE + 1024 else PIECE

    def take(self, piece, first):
        """A piece of a large body, of which `first` came before it."""
        if self.skeleton is None:
            self.skeleton = Skeleton(secrets.token_hex(8))
            for at in range(0, len(first), PIECE):
                self.skeleton.feed(bytes(first[at : at + PIECE]))
                give_way()
            first.clear()
        self.skeleton.feed(piece)

    def restore(self, parts):
        """Parts made from the text, with what was left out of it; what is no bytes stays."""
        if self.skeleton is None:
            return parts
        return [
            piece
            for part in parts
            for piece in ([part] if isinstance(part, str) else self.skeleton.restore(part))
        ]

    def piece(self, size):
        self.sock.settimeout(SILENCE)
        try:
            with by_turns(self.input.reader) if self.chunked else nullcontext():
                return self.input.read(size)
        except TimeoutError:
            raise BodyTimeout(
                f"no byte of the body has come for {SILENCE} seconds; send the request again"
            ) from None
        except NoMoreData:
            raise ClientGone from None
        except ParseException as error:
            raise InvalidRequest(f"the body's chunks are broken: {type(error).__name__}") from None
        except OSError:
            raise ClientGone from None
        finally:
            self.sock.settimeout(None)

    def too_large(self):
        most = f"{self.most / (1 << 20):.4g} MB" if self.most >= 1 << 20 else f"{self.most} bytes"
        return TooLarge(f"the body is over {most}; shrink embedded images or send fewer of them")

    def hold(self, size):
        if size > 0:
            self.bodies.hold(self.key, size)
            self.held += size

    def add(self, size):
        """So many bytes more belong to it, though they did not come with it. Raises Refusal."""
        if self.held + size > self.most:
            raise self.too_large()
        self.hold(size)

    def release(self):
        if self.held:
            self.bodies.release(self.key, self.held)
            self.held = 0

    def discard(self):
        linger(self.sock)
