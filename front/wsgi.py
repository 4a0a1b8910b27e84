"""WSGI over a client's socket: the environment of a request that gunicorn has read, and its
response.

gunicorn's own ways of both do more than is needed here, and are a tenth of a plain request's cost.
"""

import json
import os
import re
import sys
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from ipaddress import IPv6Address
from time import time

from gunicorn import util
from gunicorn.http.errors import (
    ChunkMissingTerminator,
    ExpectationFailed,
    InvalidChunkExtension,
    InvalidChunkSize,
    InvalidHeader,
    InvalidHeaderName,
    InvalidHTTPVersion,
    InvalidRequestLine,
    InvalidRequestMethod,
    LimitRequestHeaders,
    LimitRequestLine,
    ObsoleteFolding,
    ParseException,
    UnsupportedTransferCoding,
)

from errors import error_body
from front import heads
from loop import pause
from tcp import linger, send_all

CONSTANT = {  # what is the same in every environment, see PEP 3333
    "wsgi.version": (1, 0),
    "wsgi.url_scheme": "http",
    "wsgi.errors": sys.stderr,
    "wsgi.multithread": False,
    "wsgi.multiprocess": False,
    "wsgi.run_once": False,
    "wsgi.input_terminated": True,
    "SCRIPT_NAME": "",
}
CHUNKED = "Transfer-Encoding: chunked\r\n"
CLOSE = "Connection: close\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
KEEP_ALIVE = "Connection: keep-alive\r\n"
# Header lines that may be sent: a token, a value without control characters (RFC 9110 5.1, 5.5).
FIELDS = re.compile(r"(?:[!#-'*+.^-z|~\w-]+: [\t -~\x80-\xff]*\r\n)*", re.ASCII)

# An address in brackets, or a name: labels of at most 63 characters, and a dot at the end perhaps.
HOST = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?=[^:]{1,255}(?::|\Z))[\w~-]{1,63}(?:\.[\w~-]{1,63})*\.?)"
    r"(?::(?P<port>\d{0,5}))?",
    re.ASCII,
)
ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")  # a target with the host in it


class BadHost(ParseException):
    """A Host header that is none."""


CHUNKS = "a body in chunks must keep to RFC 9112, 7.1"
PROBLEMS = {  # of malformed HTTP, in words
    BadHost: "its Host header must be one host name or address, with a port perhaps",
    ChunkMissingTerminator: f"a chunk does not end where its size says; {CHUNKS}",
    ExpectationFailed: "the only expectation that is met is 100-continue",
    InvalidChunkExtension: f"a chunk's extension is none; {CHUNKS}",
    InvalidChunkSize: "the size of a chunk must be at most 16 hexadecimal digits, in a line that "
    f"ends with CRLF; {CHUNKS}",
    InvalidHeader: "a header, or a trailer, is malformed, contradicts another or came twice",
    InvalidHeaderName: "the name of a header, or of a trailer, is none or may not stand there",
    InvalidHTTPVersion: "its version must be HTTP/1.1 or HTTP/1.0",
    InvalidRequestLine: "its first line must be a method, an address and a version",
    InvalidRequestMethod: "its method is none",
    LimitRequestHeaders: "its headers, or its trailers, are too many or too long: there may be "
    f"{heads.MOST_FIELDS} of {heads.MOST_FIELD} bytes each, and {heads.MOST} bytes in all",
    LimitRequestLine: "its first line is too long; send parameters in the body",
    ObsoleteFolding: "a header goes over several lines",
    heads.SlowHead: f"its head has not come within {heads.TIME} seconds",
    UnsupportedTransferCoding: "the only Transfer-Encoding that is known here is chunked",
}


def problem_of(error):
    """What is wrong with malformed HTTP, in words. `error`: gunicorn's ParseException."""
    return PROBLEMS.get(type(error), type(error).__name__)


def environ_of(request, host, sock, client, server):
    """The WSGI environment of gunicorn's Request. `sparks.repeated` in it has the names of headers
    that came more than once.

    host            as host_of gives it
    client, server  (host, port, ...)
    """
    headers = {}
    repeated = ()
    for name, value in request.headers:
        name = "HTTP_" + name.replace("-", "_")  # gunicorn refuses names that have "_" already
        if name in headers:
            repeated += (name,)
            value = f"{headers[name]},{value}"
        headers[name] = value
    if host:
        headers["HTTP_HOST"] = host
    return {
        **CONSTANT,
        **headers,
        "sparks.repeated": repeated,
        "wsgi.input": request.body,
        "gunicorn.socket": sock,
        "REQUEST_METHOD": request.method,
        "PATH_INFO": util.unquote_to_wsgi_str(request.path),
        "QUERY_STRING": request.query,
        "SERVER_PROTOCOL": protocol(request),
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1]),
        "REMOTE_ADDR": client[0],
        "REMOTE_PORT": str(client[1]),
        "CONTENT_TYPE": headers.get("HTTP_CONTENT_TYPE", ""),
        "CONTENT_LENGTH": headers.get("HTTP_CONTENT_LENGTH", ""),
    }


def host_of(request):
    """What a request says that its host is, perhaps with a port; None in HTTP/1.0, which need not
    say it. A whole address as its target goes before the header (RFC 9112 3.2.2).

    Raises BadHost where it says none (RFC 9112 3.2), or anything beside it: it becomes part of
    addresses that others are shown.
    """
    given = [value for name, value in request.headers if name == "HOST"]
    if given or request.version > (1, 0):
        check_host("".join(given))
    if target := ABSOLUTE.match(request.uri):
        given = [target[1]]
        check_host(target[1])
    return given[0] if given else None


def check_host(text):
    found = HOST.fullmatch(text)
    if not found or int(found["port"] or 0) > 65535:
        raise BadHost
    if found["ipv6"]:
        try:
            IPv6Address(found["ipv6"])
        except ValueError:
            raise BadHost from None


def protocol(request):
    """The version of the answer: ours, whichever later one the client has (RFC 9110 6.2)."""
    return "HTTP/1.1" if request.version > (1, 0) else "HTTP/1.0"


class Response:
    """What is written to a client. The head leaves in one packet with what follows it; an empty
    item of the app sends the head alone.

    begun     the app has given status and headers
    closes    the connection ends with this response
    """

    def __init__(self, request, sock):
        self.request = request
        self.sock = sock
        self.head = b""  # until it is sent
        self.begun = False
        self.chunked = False
        self.closes = False
        self.sending = False

    def start_response(self, status, headers, exc_info=None):
        """As in WSGI, but for its write(). Raises ValueError for a header that cannot be sent."""
        sized = any(name.lower() == "content-length" for name, _ in headers)
        bodiless = status.startswith("204")  # has no length, and no framing (RFC 9112 6.1)
        self.chunked = not (sized or bodiless) and self.request.version > (1, 0)
        self.closes = self.request.should_close() or not (sized or bodiless or self.chunked)
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers])
        # Counted too, since a value with a line break in it could look like two good fields.
        if not FIELDS.fullmatch(fields) or fields.count("\n") != len(headers):
            raise ValueError("a header cannot be sent as it is")
        if self.chunked:
            fields = CHUNKED + fields
        head = (
            f"{protocol(self.request)} {status}\r\n{server_fields(int(time()))}"
            f"{CLOSE if self.closes else KEEP_ALIVE}{fields}\r\n"
        )
        self.head = head.encode("latin-1")
        self.begun = True

    def write(self, data):
        if not data:
            self.flush()
        else:
            self.send(self.frame(data))

    def frame(self, data):
        """A piece of the body as it goes over the socket. Known once the head is made."""
        if self.chunked:
            return b"%x\r\n%b\r\n" % (len(data), data)
        return data

    def flush(self):
        if self.head:
            self.send(b"")

    def send(self, data):
        data = self.head + data
        self.head = b""
        self.sending = True
        send_all(self.sock, data)
        self.sending = False

    def nudge(self, sign):
        """Send something that a client passes over, unless something is on its way already; whether
        that could be. Called in the hub.

        sign  such a piece of the body. Before the answer has begun it is an interim one, which
              HTTP/1.0 does not have (RFC 9110 15.2): 100, since not all programs know the others
        """
        if self.sending:
            return True
        if self.begun:
            data = self.head + self.frame(sign)
            self.head = b""
        elif self.request.version > (1, 0):
            data = CONTINUE
        else:
            return False
        try:
            return os.write(self.sock.fileno(), data) == len(data)
        except BlockingIOError:  # what it has not taken yet is enough
            return True
        except OSError:
            return False

    def end(self):
        if self.chunked:
            self.send(b"0\r\n\r\n")
        else:
            self.flush()


@lru_cache(2)
def server_fields(second):
    return f"Server: sparks\r\nDate: {formatdate(second, usegmt=True)}\r\n"


def refuse(sock, refusal, request_id, headers=()):
    """Answer what never became a request, and let go of the connection. Whose client it is cannot
    be told: the body has OpenAI's shape and Anthropic's at once. `headers`: further ones, as
    pairs."""
    body = {"type": "error", **error_body(refusal), "request_id": request_id}
    body = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n"
        f"Connection: close\r\n"
        f"Content-Type: application/json\r\n"
        f"Cache-Control: no-store\r\n"
        f"x-request-id: {request_id}\r\n"
        f"request-id: {request_id}\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    head += "".join([f"{name}: {value}\r\n" for name, value in headers])
    try:
        util.write_nonblock(sock, f"{head}\r\n".encode() + body)
    except OSError:
        return
    linger(sock, pause)
