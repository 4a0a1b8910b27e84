"""The life of a request: what it holds, and how it ends, whatever ends it.

`relay` is a stream from top to bottom, `plain` a request that is answered whole.
"""

import logging
import re
import random
from array import array
from fcntl import ioctl
from termios import FIONREAD
from time import monotonic, time

from gevent import get_hub, getcurrent, sleep, socket, spawn
from gevent.event import Event

from engines import images
import pump
from errors import ClientGone, InternalError, Refusal, ShuttingDown, UpstreamError, UpstreamTimeout
from engines.failures import from_engine
from engines.http1 import Silent
from store.ledger import Row, figures
from stream import loads

logger = logging.getLogger("sparks")
MAX_ANSWER = 256 << 20  # bytes of a plain answer


LOOK = 0.25  # seconds between two looks at a socket that has bytes waiting
STARTED = time() - monotonic()  # the epoch by a clock that is never set back
ESTABLISHED = 1  # in TCP_INFO
COUNT_WAIT = 0.5  # seconds for which the first event waits for the count of the prompt
LEFT = 499  # the status in the ledger of a request whose client went away


class Gateway:
    """What all calls of a gateway share. `notes` are called with each Row of the ledger: log, metrics."""

    def __init__(self, settings, fleet, gate, ledger, bodies, notes=()):
        self.settings, self.fleet, self.gate, self.ledger, self.notes = (
            settings,
            fleet,
            gate,
            ledger,
            notes,
        )
        self.bodies, self.live = bodies, set()

    def drain(self, seconds):
        """Let nobody in any more, give the live requests so long, then end each with an error."""
        self.gate.closed = True
        end = monotonic() + seconds
        while self.live and monotonic() < end:
            sleep(0.05)
        for call in list(self.live):
            get_hub().loop.run_callback(call.interrupt, restarting())

    def abandon(self):
        """The end at once: write the rows."""
        for call in list(self.live):
            call.settle(503, restarting())


def restarting():
    return ShuttingDown("the gateway is restarting; send the request again", retry_after=5)


class Call:
    """All that a request holds: body, slot, the engine's answer, the watcher of its client.

    `settle` ends it once, before the last bytes leave; `close` does if nothing else did. Whatever ends a request early
    is thrown into its greenlet by `interrupt`, as gevent.Timeout does, in every phase alike.
    """

    def __init__(self, gateway, environ, body):
        self.gateway, self.sock = gateway, environ["gunicorn.socket"]
        self.id = request_id(environ.get("HTTP_X_REQUEST_ID", ""))
        self.frame = environ["sparks.frame"]  # bytes of the answer -> bytes for the socket
        self.body = body
        self.greenlet, self.open = getcurrent(), True
        self.key = self.ask = self.ticket = self.answer = self.watcher = self.usage = (
            self.counting
        ) = None
        self.begun, self.started, self.route = monotonic(), time(), ""
        self.entered = self.granted = self.first = None  # monotonic moments of its way
        gateway.live.add(self)

    # -- the client

    def attend(self):
        """Watch the client from here on: its body is in, so a readable socket means that it has gone."""
        self.watcher = get_hub().loop.io(self.sock.fileno(), pump.READABLE)
        self.watcher.start(self.on_readable)

    def on_readable(self):
        waiting = array("i", [0])
        try:
            ioctl(self.sock.fileno(), FIONREAD, waiting)
        except OSError:
            pass
        self.unwatch()
        if waiting[0]:  # a pipelined request: its bytes are gunicorn's
            self.watcher = get_hub().loop.timer(LOOK, LOOK)
            self.watcher.start(self.on_look)
        else:
            self.interrupt(ClientGone())

    def on_look(self):
        """The socket stays readable: ask TCP itself whether the client has closed."""
        if self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
            self.unwatch()
            self.interrupt(ClientGone())

    def unwatch(self):
        if self.watcher:
            self.watcher.stop()
            self.watcher.close()
            self.watcher = None

    def interrupt(self, error):
        """End the call early with `error` (Refusal or ClientGone). Called in the hub."""
        if self.open:
            self.greenlet.throw(error)

    # -- the slot and the engine

    def fill(self, ask):
        """Fetch the images that the request names by their addresses, unless it would be turned away. Raises Refusal."""
        if ask.images:
            self.gateway.gate.check(self.key.id, ask.model.lane, self.key.limits, now())
            found = images.fetch_all(ask.images, self.gateway.settings, self.hold)
            ask.body = [found[part] if isinstance(part, str) else part for part in ask.body]

    def hold(self, size):
        """Bytes that came beside the body. A fetch that is being ended may still say so when nothing is held any more."""
        if self.open:
            self.body.add(size)

    def enter(self, ask):
        """Ask for a slot; `turn` waits for it. Raises Refusal."""
        self.ask, self.entered = ask, monotonic()
        if ask.count:  # beside the queue and the prefill
            self.counting = spawn(self.gateway.fleet.count, ask)
            self.counting.link(lambda _: self.counted())
        self.ticket, granted = self.gateway.gate.enter(
            self.key.id, ask.model.lane, self.key.limits, now()
        )
        self.ticket.granted = Event()
        wake(granted)

    def turn(self, seconds):
        """Whether the slot came within so many seconds. Raises Refusal when the queue has lasted too long."""
        left = self.entered + self.gateway.settings.queue_timeout - monotonic()
        if self.ticket.granted.wait(min(seconds, max(left, 0))):
            self.granted = monotonic()
            return True
        if seconds >= left:
            raise self.gateway.gate.late(self.ticket, now())
        return False

    def send(self):
        self.answer = self.gateway.fleet.send(self.ask, self.id)
        self.ask.body = None
        self.body.abridged = None
        self.answer.when_freed(self.release)
        return self.answer

    def release(self):
        """The body has gone; it weighs nothing any more once its prompt is counted."""
        if not self.ask.count:
            self.body.release()

    def prompt_tokens(self):
        """How many tokens the prompt has, as counted by now or soon, else estimated."""
        self.counting.join(COUNT_WAIT)
        tokens = (
            self.counting.value
            if self.counting.successful()
            else self.gateway.fleet.estimate(self.ask)
        )
        self.counting.kill(block=False)
        self.counted()
        return tokens

    def counted(self):
        """The prompt is not needed any more for that."""
        self.ask.count = None
        if self.answer:
            self.answer.free()

    # -- the end

    def settle(self, status, error=None, whole=False):
        """Let go of everything, and write the row. `error`: the Refusal that it ended with; `whole`: the engine's answer
        came to its end, so its connection may serve again."""
        if not self.open:
            return
        self.open = False
        self.gateway.live.discard(self)
        self.body.release()
        self.unwatch()
        self.sock.settimeout(
            self.gateway.settings.stall_timeout
        )  # for each write that is still to come
        if self.counting:
            self.counting.kill(block=False)
        if self.answer:
            self.answer.close(whole)
        row = self.row(status, error)
        if self.ticket:
            wake(self.gateway.gate.leave(self.ticket, row.tokens, self.answer is not None, now()))
        if self.key:
            self.gateway.ledger.write(row)
        if self.route:
            for note in self.gateway.notes:
                note(row, self.key)

    def row(self, status, error):
        model = self.ask.model if self.ask else None
        stream = self.ask.stream if self.ask else None
        return Row(
            id=self.id,
            key_id=self.key.id if self.key else 0,
            model=model.id if model else "",
            engine=model.engine.url if self.answer else "",
            route=self.route,
            started=self.started,
            queued_ms=self.queued_ms,
            first_ms=between(self.begun, self.first),
            total_ms=between(self.begun, monotonic()),
            status=status,
            error=error.code if error else None,
            streamed=stream is not None,
            aborted=status == LEFT,
            truncated=bool(stream and error and self.first),
            **figures(self.usage or stream and stream.usage, stream),
        )

    @property
    def queued_ms(self):
        return between(self.entered, self.granted)

    def close(self):
        self.settle(LEFT)
        self.sock.settimeout(None)
        if self.body.breaks:
            self.body.discard()


def request_id(wish):
    """The client's own id if it is a clean one, and no key by mistake; else a new one."""
    return (
        wish
        if re.fullmatch(r"(?!(?i:sk-))[A-Za-z0-9._-]{1,64}", wish)
        else f"{random.getrandbits(128):032x}"
    )


def now():
    """Epoch seconds for the Gate, whose windows must not jump with the wall clock."""
    return STARTED + monotonic()


def between(begin, end):
    """Whole milliseconds between two moments, or None if one has not been."""
    return None if begin is None or end is None else round((end - begin) * 1000)


def wake(tickets):
    for ticket in tickets:
        ticket.granted.set()


def relay(call, ask):
    """A stream: an iterator of the client's bytes, each item one write. What fails before the first item is raised
    and can still be an HTTP status; what fails later is the stream's last event."""
    stream, begun, settings = ask.stream, False, call.gateway.settings
    try:
        call.fill(ask)
        call.enter(ask)
        while not call.turn(settings.keepalive):
            begun = True
            yield stream.alive(f"queued {call.gateway.gate.place(call.ticket)}")
        since = monotonic()
        answer = call.send()
        while (events := first_events(call, since)) is None:
            begun = True
            yield stream.alive()
        begun, call.first = True, monotonic()
        yield b""  # the head; all that follows goes through the pump
        pump.move(answer, stream, call.sock, call.frame, settings, since, events)
        last, fault = stream.end(), None
    except Exception as error:
        fault = ours(error)
        if not begun:
            raise fault from None
        last = stream.fail(fault)
    call.settle(
        fault.status if fault else 200, fault, whole=not fault and (stream.done or answer.ended)
    )
    yield last


def first_events(call, since):
    """The first events for the client, or None after a silence that is worth a comment. Raises Refusal."""
    answer, stream, settings = call.answer, call.ask.stream, call.gateway.settings
    deadline = since + settings.answer_timeout
    pause = min(monotonic() + settings.keepalive, deadline)
    while (left := pause - monotonic()) > 0:
        data = answer.read(left)
        if data is None:
            break
        if answer.streams is None:  # its first bytes tell
            answer.streams = answer.status == 200 and is_stream(answer, data)
        if (
            call.counting is not None and stream.prompt_tokens is None
        ):  # one that has ended is false
            stream.prompt_tokens = call.prompt_tokens()
        if not answer.streams:
            return unstreamed(answer, stream, data, settings, since)
        events = stream.feed(data)
        if events:
            return events
        if not data or stream.over:
            stream.end()  # raises: it ended without a word, which is still an HTTP status
            return events
    if monotonic() >= deadline:
        raise unanswered(settings)
    return None


def unstreamed(answer, stream, data, settings, since):
    """A whole answer, or an error, to a request that asked for a stream."""
    rest = b"" if answer.ended else collect(answer, settings, since)
    events = stream.whole(checked(answer, data + rest))
    if stream.fault or not events:
        stream.end()  # raises: it is none, which is still an HTTP status
    return events


def plain(call, ask, write):
    """A whole answer: `write(body, ask)` makes the client's bytes and the usage of the engine's. Raises Refusal."""
    settings = call.gateway.settings
    try:
        call.fill(ask)
        call.enter(ask)
        call.turn(settings.queue_timeout)
        since = monotonic()
        answer = call.send()
        body = collect(answer, settings, since)
        data, call.usage = write(
            body if is_stream(answer, body) and answer.status == 200 else checked(answer, body), ask
        )
    except Exception as error:
        raise ours(error) from None
    call.settle(200, whole=True)
    return data


def count(call, ask):
    """How many tokens a prompt has: asked without a slot, beside everything else."""
    call.ask = ask
    tokens = call.gateway.fleet.count(ask)
    call.settle(200)
    return tokens


def collect(answer, settings, since):
    """The rest of an answer's body."""
    try:
        return answer.all(since + settings.answer_timeout - monotonic(), MAX_ANSWER)
    except Silent:
        raise unanswered(settings) from None


def unanswered(settings):
    return UpstreamTimeout(
        f"the engine has not answered within {settings.answer_timeout:g} seconds"
    )


def is_stream(answer, data):
    """Whether the engine answers with events; some forget to say so."""
    kind = answer.headers.get("content-type", "")
    return (
        "event-stream" in kind
        or "json" not in kind
        and data.lstrip()[:1] not in (b"{", b"[", b"<", b"")
    )


def checked(answer, body):
    """The JSON object of an engine's plain answer. Raises the Refusal that it stands for."""
    try:
        value = loads(body)
    except (ValueError, RecursionError):
        value = None
    if answer.status != 200:
        raise from_engine(answer.status, value, answer.headers.get("retry-after"))
    if not isinstance(value, dict):
        raise UpstreamError("the engine's answer cannot be read")
    if value.get("error") or value.get("object") == "error":
        raise from_engine(None, value)
    return value


def ours(error):
    """An exception as a Refusal; one that is no Refusal is a fault of ours and leaves its traceback in the log."""
    if isinstance(error, Refusal):
        return error
    logger.exception("a fault of the gateway")
    return InternalError("the gateway failed; this is its own fault, and its log has the details")
