"""WSGI over a client's socket: the environment of a request that gunicorn has read, and its
response.

gunicorn's own ways of both do more than is needed here, and are a tenth of a plain request's cost.
"""

import json
import re
import sys
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from time import time

from gunicorn import util
from gunicorn.http.errors import ParseException

from errors import error_body
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
KEEP_ALIVE = "Connection: keep-alive\r\n"
# Header lines that may be sent: a token, a value without control characters (RFC 9110 5.1, 5.5).
FIELDS = re.compile(r"(?:[!#-'*+.^-z|~\w-]+: [\t -~\x80-\xff]*\r\n)*", re.ASCII)

HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]{1,255})(:(?P<port>\d{0,5}))?", re.ASCII)


class BadHost(ParseException):
    """A Host header that is none."""


def environ_of(request, sock, client, server):
    """The WSGI environment of gunicorn's Request. `client` and `server`: (host, port, ...)."""
    headers = {}
    for name, value in request.headers:
        name = "HTTP_" + name.replace("-", "_")  # gunicorn refuses names that have "_" already
        if name in headers:
            value = f"{headers[name]},{value}"
        headers[name] = value
    return {
        **CONSTANT,
        **headers,
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


def check_host(request):
    """Raises BadHost where a request does not say its host (RFC 9112 3.2), or says anything beside
    it: it becomes part of addresses that others are shown."""
    given = [value for name, value in request.headers if name == "HOST"]
    if not given and request.version <= (1, 0):
        return
    found = HOST.fullmatch("".join(given))
    if not found or int(found["port"] or 0) > 65535:
        raise BadHost


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
        send_all(self.sock, data)

    def end(self):
        if self.chunked:
            self.send(b"0\r\n\r\n")
        else:
            self.flush()


@lru_cache(2)
def server_fields(second):
    return f"Server: sparks\r\nDate: {formatdate(second, usegmt=True)}\r\n"


def refuse(sock, refusal, request_id):
    """Answer what never became a request, and let go of the connection."""
    body = json.dumps(error_body(refusal)).encode()
    head = (
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\n"
        f"Connection: close\r\n"
        f"Content-Type: application/json\r\n"
        f"Cache-Control: no-store\r\n"
        f"x-request-id: {request_id}\r\n"
        f"request-id: {request_id}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    try:
        util.write_nonblock(sock, head.encode() + body)
    except OSError:
        return
    linger(sock)
