"""The life of a request: what it holds, and how it ends, whatever ends it.

`relay` is a stream from top to bottom, `plain` a request that is answered whole.
"""
import logging
import re
import secrets
from array import array
from fcntl import ioctl
from termios import FIONREAD
from time import monotonic

from gevent import get_hub, getcurrent
from gevent.event import Event

import pump
from body import Bodies, Body
from errors import ClientGone, InternalError, Refusal, UpstreamError, UpstreamTimeout, from_engine
from http1 import Silent
from stream import loads

log = logging.getLogger("sparks")
MAX_ANSWER = 256 << 20                              # bytes of a plain answer


class Desk:
    """What all calls of a gateway share."""

    def __init__(self, settings, fleet, gate):
        self.settings, self.fleet, self.gate = settings, fleet, gate
        self.bodies, self.live = Bodies(settings.max_bodies), set()


class Call:
    """All that a request holds: body, slot, the engine's answer, the watcher of its client.

    `settle` ends it once, before the last bytes leave; `close` does if nothing else did. Whatever ends a request early
    is thrown into its greenlet by `interrupt`, as gevent.Timeout does, in every phase alike.
    """

    def __init__(self, desk, environ):
        self.desk, self.sock = desk, environ["gunicorn.socket"]
        self.id = request_id(environ.get("HTTP_X_REQUEST_ID", ""))
        self.chunked = environ["SERVER_PROTOCOL"] == "HTTP/1.1"
        self.body = Body(environ, desk.bodies, desk.settings.max_body)
        self.greenlet, self.open = getcurrent(), True
        self.key = self.ticket = self.answer = self.watcher = None
        self.started, self.route = monotonic(), ""
        desk.live.add(self)

    # -- the client

    def attend(self):
        """Watch the client from here on: its body is in, so a readable socket means that it has gone."""
        self.watcher = get_hub().loop.io(self.sock.fileno(), pump.READABLE)
        self.watcher.start(self.on_readable)

    def on_readable(self):
        self.watcher.stop()
        waiting = array("i", [0])
        try:
            ioctl(self.sock.fileno(), FIONREAD, waiting)
        except OSError:
            pass
        if not waiting[0]:                          # else a pipelined request: its bytes are gunicorn's
            self.interrupt(ClientGone())

    def interrupt(self, error):
        """End the call early with `error` (Refusal or ClientGone). Called in the hub."""
        if self.open:
            self.greenlet.throw(error)

    # -- the slot and the engine

    def enter(self):
        self.ticket, granted = self.desk.gate.enter(self.key.id)
        self.ticket.granted = Event()
        wake(granted)

    def send(self, ask):
        self.answer = self.desk.fleet.send(ask, self.id)
        ask.payload = None
        self.body.release()
        return self.answer

    # -- the end

    def settle(self, status, whole=False):
        """Let go of everything. `whole`: the engine's answer came to its end, so its connection may serve again."""
        if not self.open:
            return
        self.open = False
        self.desk.live.discard(self)
        self.body.release()
        if self.watcher:
            self.watcher.stop()
            self.watcher.close()
        if self.answer:
            self.answer.close(whole)
        if self.ticket:
            wake(self.desk.gate.leave(self.ticket))
        if self.route:
            self.note(status)

    def note(self, status):
        log.info("%s %s key=%s status=%s ms=%d", self.id, self.route, self.key.name if self.key else "-", status,
                 (monotonic() - self.started) * 1000)

    def close(self):
        self.settle("aborted")
        if self.body.breaks:
            self.body.discard()


def request_id(wish):
    """The client's own id if it is a clean one, else a new one."""
    return wish if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", wish) else secrets.token_hex(16)


def wake(tickets):
    for ticket in tickets:
        ticket.granted.set()


def relay(call, ask):
    """A stream: an iterator of the client's bytes, each item one write. What fails before the first item is raised
    and can still be an HTTP status; what fails later is the stream's last event."""
    stream, begun, settings = ask.stream, False, call.desk.settings
    try:
        call.enter()
        while not call.ticket.granted.wait(settings.keepalive):
            begun = True
            yield stream.alive("queued")
        since = monotonic()
        answer = call.send(ask)
        while (events := first_events(answer, stream, settings, since)) is None:
            begun = True
            yield stream.alive()
        begun = True
        yield events
        if not (stream.over or answer.ended):
            pump.move(answer, stream, call.sock, call.chunked, settings, since)
        status, last = 200, stream.end()
    except Exception as error:
        fault = ours(error)
        if not begun:
            raise fault from None
        status, last = fault.status, stream.fail(fault)
    call.settle(status, whole=status == 200)
    yield last


def first_events(answer, stream, settings, since):
    """The first events for the client, or None after a silence that is worth a comment. Raises Refusal."""
    deadline = since + settings.answer_timeout
    pause = min(monotonic() + settings.keepalive, deadline)
    while (left := pause - monotonic()) > 0:
        data = answer.read(left)
        if data is None:
            break
        if answer.status != 200 or not is_stream(answer, data):
            return unstreamed(answer, stream, data, settings, since)
        events = stream.feed(data)
        if events:
            return events
        if not data or stream.over:
            stream.end()                            # raises: it ended without a word, which is still an HTTP status
            return events
    if monotonic() >= deadline:
        raise unanswered(settings)
    return None


def unstreamed(answer, stream, data, settings, since):
    """A whole answer, or an error, to a request that asked for a stream."""
    rest = b"" if answer.ended else collect(answer, settings, since)
    events = stream.whole(checked(answer, data + rest))
    if stream.fault:
        raise stream.fault
    return events


def plain(call, ask, write):
    """A whole answer: `write(body, ask)` makes the client's bytes of the engine's. Raises Refusal."""
    settings = call.desk.settings
    try:
        call.enter()
        call.ticket.granted.wait()
        since = monotonic()
        answer = call.send(ask)
        body = collect(answer, settings, since)
        data = write(body if is_stream(answer, body) and answer.status == 200 else checked(answer, body), ask)
    except Exception as error:
        raise ours(error) from None
    call.settle(200, whole=True)
    return data


def collect(answer, settings, since):
    """The rest of an answer's body."""
    try:
        return answer.all(since + settings.answer_timeout - monotonic(), MAX_ANSWER)
    except Silent:
        raise unanswered(settings) from None


def unanswered(settings):
    return UpstreamTimeout(f"the engine has not answered within {settings.answer_timeout:g} seconds")


def is_stream(answer, data):
    """Whether the engine answers with events; some forget to say so."""
    return "text/event-stream" in answer.headers.get("content-type", "") or data[:6] in (b"data: ", b"event:", b": keep")


def checked(answer, body):
    """The JSON object of an engine's plain answer. Raises the Refusal that it stands for."""
    try:
        value = loads(body)
    except (ValueError, RecursionError):
        value = None
    if answer.status != 200:
        raise from_engine(answer.status, value)
    if not isinstance(value, dict):
        raise UpstreamError("the engine's answer cannot be read")
    if value.get("error") or value.get("object") == "error":
        raise from_engine(None, value)
    return value


def ours(error):
    """An exception as a Refusal; one that is no Refusal is a fault of ours and leaves its traceback in the log."""
    if isinstance(error, Refusal):
        return error
    log.exception("a fault of the gateway")
    return InternalError("the gateway failed; this is its own fault, and its log has the details")
