"""An exchange with a client: the WSGI environment of a request that gunicorn has read, and how the answer to it is written.

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

from errors import error_body
from tcp import linger, send_all

SAME = {
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
FIELDS = re.compile(
    r"(?:[!#-'*+.^-z|~\w-]+: [\t -~\x80-\xff]*\r\n)*", re.ASCII
)  # RFC 9110 5.1, 5.5


def environ_of(request, sock, client, server):
    """The WSGI environment of gunicorn's Request. `client` and `server` are addresses: (host, port, ...)."""
    headers = {}
    for name, value in request.headers:
        name = "HTTP_" + name.replace("-", "_")  # gunicorn refuses names that have "_" already
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    return {
        **SAME,
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


def protocol(request):
    return "HTTP/{}.{}".format(*request.version)


class Response:
    """An answer. Its head leaves in one packet with what follows it; an empty item of the app sends the head alone."""

    def __init__(self, request, sock):
        self.request, self.sock = request, sock
        self.head, self.begun = (
            b"",
            False,
        )  # the head, until it is sent; whether the app has said it
        self.chunked = self.closes = False

    def start_response(self, status, headers, exc_info=None):
        sized = any(name.lower() == "content-length" for name, _ in headers)
        self.chunked = not sized and self.request.version > (1, 0)
        self.closes = self.request.should_close() or not (sized or self.chunked)
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers])
        if not FIELDS.fullmatch(fields) or fields.count("\n") != len(
            headers
        ):  # a value may hold a good field
            raise ValueError("a header cannot be sent as it is")
        head = (
            f"{protocol(self.request)} {status}\r\n{server_fields(int(time()))}"
            f"Connection: {'close' if self.closes else 'keep-alive'}\r\n"
            f"{CHUNKED if self.chunked else ''}{fields}\r\n"
        )
        self.head, self.begun = head.encode("latin-1"), True

    def write(self, data):
        if not data:
            self.flush()
        else:
            self.send(self.frame(data))

    def frame(self, data):
        """A piece of the body as the client gets it. Known once the head is made."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data

    def flush(self):
        if self.head:
            self.send(b"")

    def send(self, data):
        data, self.head = self.head + data, b""
        send_all(self.sock, data)

    def end(self):
        if self.chunked:
            self.send(b"0\r\n\r\n")
        else:
            self.flush()


@lru_cache(2)
def server_fields(second):
    return f"Server: sparks\r\nDate: {formatdate(second, usegmt=True)}\r\n"


def refuse(sock, refusal, ident):
    """Answer what never became a request, and let go of the connection."""
    body = json.dumps(error_body(refusal)).encode()
    head = (
        f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nx-request-id: {ident}\r\nrequest-id: {ident}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        util.write_nonblock(sock, head.encode() + body)
    except OSError:
        return
    linger(sock)
