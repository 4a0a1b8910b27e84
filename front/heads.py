"""A request's head: taken in within bounds of size and time before gunicorn's parser works on it.

gunicorn's own way copies and searches all that has come at each read. Here each byte is looked at
once.
"""

from time import monotonic

from gunicorn.http.errors import LimitRequestHeaders, LimitRequestLine, NoMoreData, ParseException
from gunicorn.http.message import Request
from gunicorn.http.parser import RequestParser

KEEPALIVE = 75  # seconds that an idle connection stays open
TIME = 30  # seconds for a head, from its first byte on
REST = 10  # seconds for a small body that nobody reads
MOST = 1 << 16  # bytes of a head
MOST_FIELD = 16380  # bytes of one of its lines
MOST_FIELDS = 100
MOST_TRAILERS = 1 << 13  # bytes of the fields behind a body in chunks
EMPTY_LINE = 2  # bytes; one may come before the first line (RFC 9112 2.2)


class SlowHead(ParseException):
    """A head that takes too long."""


class Head:
    """What has come of a head.

    data  the bytes, and those that came with its last ones
    line  where its first line ends; -1 as long as it has not
    """

    def __init__(self, most_line):
        self.most_line = most_line
        self.data = bytearray()
        self.line = -1

    def take(self, piece):
        """Whether gunicorn can judge it now: all of it is there, or a line end that is none.

        Raises LimitRequestLine, LimitRequestHeaders.
        """
        known = len(self.data)
        self.data += piece
        end = self.data.find(b"\r\n\r\n", max(0, known - 3))
        size = len(self.data) if end < 0 else end
        if self.line < 0:
            self.line = self.data.find(b"\r\n", max(EMPTY_LINE, known - 1))
            line = size if self.line < 0 else self.line
            if line > self.most_line + EMPTY_LINE:
                raise LimitRequestLine(line, self.most_line)
        if size > MOST or end >= 0 and self.data.count(b"\r\n", 0, end) > MOST_FIELDS:
            raise LimitRequestHeaders("the whole head")
        return end >= 0 or self.has_bare_line_end(known)

    def has_bare_line_end(self, known):
        """Whether one without a CR came behind so many bytes (RFC 9112 2.2)."""
        return self.data.count(b"\n", known) != self.data.count(b"\r\n", max(0, known - 1))


class HeadRequest(Request):
    """gunicorn's request, which finds its head whole."""

    def parse(self, unreader):
        self.max_buffer_headers = MOST_TRAILERS  # by now for these alone
        head = Head(self.limit_request_line)
        try:
            self.take_in(head, unreader)
        finally:
            unreader.sock.settimeout(None)
        unreader.unread(head.data)
        return super().parse(unreader)

    def take_in(self, head, unreader):
        """Read until gunicorn can judge it.

        Raises StopIteration where no request comes, NoMoreData, ParseException.
        """
        piece = first_piece(unreader)
        if head.take(piece):
            return
        end = monotonic() + TIME
        checked = False
        while True:
            if head.line >= 0 and not checked:  # what is no request need not be waited for
                self.parse_request_line(bytes(head.data[: head.line]).removeprefix(b"\r\n"))
                checked = True
            if head.take(next_piece(unreader, end)):
                return


def first_piece(unreader):
    """Raises StopIteration where none comes."""
    unreader.sock.settimeout(KEEPALIVE)
    try:
        piece = unreader.read()
    except TimeoutError:
        piece = b""
    if not piece:
        raise StopIteration
    return piece


def next_piece(unreader, end):
    """The piece that comes before a moment (monotonic). Raises SlowHead, NoMoreData."""
    unreader.sock.settimeout(max(end - monotonic(), 0.001))
    try:
        piece = unreader.read()
    except TimeoutError:
        raise SlowHead from None
    if not piece:
        raise NoMoreData
    return piece


class HeadParser(RequestParser):
    """gunicorn's parser of a connection: each request of it in turn."""

    mesg_class = HeadRequest

    def finish_body(self):
        """Whether the last request's body is out of the way, which its client has some seconds
        for."""
        return super().finish_body(monotonic() + REST)
