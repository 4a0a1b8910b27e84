"""The front: the WSGI application, which makes a Call for each request and releases it.

Requests that ask a model are answered here. All others go to the Flask app of views.py, which would
double what a completion costs.
"""

import http.client
import secrets
from collections import deque
from itertools import chain
from time import monotonic, time

from werkzeug.wsgi import ClosingIterator

from answering import answer_whole, count_prompt, relay, size_of
from call import Call
from dialects.responses import Responses
from errors import ClientGone
from faults import as_refusal
from front import reading
from front.body import Body
from front.edge import check_edge, identify, response_headers
from front.routes import ROUTES
from front.views import small_app
from loop import pause
from pump import LEAST_RATE

PIECE = 1 << 17  # bytes of a plain answer in one write
JSON = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
STREAM_HEADERS = [
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache, no-transform"),
    ("X-Accel-Buffering", "no"),
]


def create_app(gateway, keyring, metrics, seal):
    """The WSGI application over a gateway.Gateway, a keys.Keyring, Metrics and a Seal."""
    return Front(gateway, keyring, dialects(seal), small_app(gateway, keyring, metrics))


def dialects(seal):
    """{path: dialect} for the routes that ask a model."""
    found = {route.path: route.dialect for route in ROUTES if route.dialect}
    for path, dialect in found.items():
        if dialect is Responses:
            found[path] = Responses(time, lambda: secrets.token_hex(24), seal)
    return found


class Front:
    """The one place that makes a Call and releases it, whatever becomes of the response.

    dialects   {path: dialect}
    small_app  the WSGI application for everything else
    """

    def __init__(self, gateway, keyring, dialects, small_app):
        self.gateway = gateway
        self.keyring = keyring
        self.dialects = dialects
        self.small_app = small_app

    def __call__(self, environ, start_response):
        """One request, as WSGI has it."""
        gateway = self.gateway
        body = Body(environ, gateway.bodies, gateway.settings.max_body)
        call = environ["sparks.call"] = Call(gateway, environ, body)
        # As Flask's router reads it, since clients' base URLs end with slashes.
        path = "/" + environ["PATH_INFO"].strip("/")
        try:
            if environ["REQUEST_METHOD"] == "POST" and path in self.dialects:
                response = self.complete(call, path, environ, start_response)
            else:
                response = self.small_app(environ, start_response)
            return ClosingIterator(response, call.close)
        except BaseException as error:
            if isinstance(error, Exception):  # such as a header that may not be sent
                call.settle(500, as_refusal(error))
            call.close()
            raise

    def complete(self, call, path, environ, start_response):
        """A request that asks a model, through the dialect of its path."""
        call.route = f"POST {path}"
        dialect = self.dialects[path]
        status = 200
        try:
            check_edge(environ, self.gateway.settings)
            identify(call, environ, self.keyring)
            headers, body = serve(call, dialect)
        except Exception as error:
            refusal = as_refusal(error)
            refusal.request_id = call.id
            call.settle(refusal.status, refusal)
            status = refusal.status
            body = [dialect.refusal(refusal)]
            headers = [*JSON, ("Content-Length", str(len(body[0]))), *refusal.headers.items()]
            headers += ignored_header(call.ask)  # the reason may lie in what the engine did not get
        phrase = http.client.responses.get(status, "Unknown")
        start_response(f"{status} {phrase}", [*headers, *response_headers(call, environ)])
        return body


def serve(call, dialect):
    """(headers, body) of the response: the body is an iterable of bytes. Raises Refusal."""
    call.body.read(call.account)
    call.attend()
    ask = reading.read(call, dialect)
    if ask.stream is not None:
        events = relay(call, ask)
        first = next(events)  # a Refusal here is still an HTTP status
        return STREAM_HEADERS + ignored_header(ask), chain([first], events)
    if ask.path:
        body = answer_whole(call, ask, dialect.write)
    else:
        body, _ = dialect.write(count_prompt(call, ask), ask)
    headers = [*JSON, ("Content-Length", str(size_of(body)))]
    return headers + ignored_header(ask), pieces(body, call)


def ignored_header(ask):
    """What was left out of a request is said here: nothing is dropped in silence. `ask`: None for
    one that was never read."""
    return [("x-sparks-ignored", ask.ignored)] if ask and ask.ignored else []


def pieces(body, call):
    """A body, bytes or a list of them, in pieces that the client has its time to take."""
    if isinstance(body, list):
        return in_time(together(deque(body), call), call)
    if len(body) <= PIECE:
        return [body]
    cut = (body[at : at + PIECE] for at in range(0, len(body), PIECE))
    return in_time(cut, call)


def together(parts, call):
    """Small parts of a body as pieces of about one size. The parts, a deque, are let go one by
    one."""
    left = sum(map(len, parts))
    piece = []
    size = 0
    while parts:
        piece.append(parts.popleft())
        size += len(piece[-1])
        if size >= PIECE or not parts:
            yield b"".join(piece)
            left -= size
            call.keep_only(left)
            piece = []
            size = 0


def in_time(pieces, call):
    """The pieces of a large body, which is kept in memory for its client: it must take them fast
    enough, on the whole. Raises ClientGone."""
    sent = 0
    begun = monotonic()
    patience = call.gateway.settings.stall_timeout
    for piece in pieces:
        time_left = patience + sent / LEAST_RATE - (monotonic() - begun)
        if time_left <= 0:
            raise ClientGone
        call.sock.settimeout(min(patience, time_left))
        yield piece
        sent += len(piece)
        pause()  # one that takes each piece at once would have the loop for itself
