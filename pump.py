"""Moves a stream's bytes between two sockets in the hub: no greenlet is woken for a chunk.

The request's greenlet sleeps in `move` while callbacks of the event loop read the engine's socket,
run the bytes through the stream and write the client's socket. If the client does not take them,
the engine is not read.
"""

import os
from time import monotonic

from gevent import get_hub
from gevent.event import AsyncResult

from errors import ClientGone, UpstreamTimeout
from loop import give_way, pause, without_collections
from steps import gathered, with_pauses

READABLE = 1  # as the event loop's watchers take it
WRITABLE = 2
READ = 65536  # bytes a read
SLICE = 4096  # bytes that are worked on in one go: thousands of events, if they are tiny
LARGE = 1 << 20  # bytes that a stream says again at its end: too much for a callback
LEAST_RATE = 8192  # bytes a second that a client takes on the whole: half of what a modem can
AFTERWORD = 0.9  # seconds that an engine has for usage and [DONE] after the last finish
GRACE = 0.1  # seconds of them for what most engines send at once: the request keeps its slot
SILENCE = 5.0  # the same where more choices could come
FLUSH = 2.0  # seconds for the rest of a chunk when a stream is ended early
NUDGE = b":\n\n"  # a comment: whatever its API is, a client passes over it
TICK = 1.0  # seconds between two sweeps, or half a keep-alive if that is less


class Sweep:
    """One coarse timer for all live streams: who has been silent for how long."""

    def __init__(self):
        self.live = set()
        self.timer = None

    def add(self, pump, tick):
        self.live.add(pump)
        if self.timer is None:
            self.timer = get_hub().loop.timer(tick, tick)
            self.timer.start(self.look)

    def look(self):
        now = monotonic()
        for pump in list(self.live):
            pump.guarded(pump.on_sweep, now)

    def drop(self, pump):
        self.live.discard(pump)
        if not self.live and self.timer is not None:
            self.timer.stop()
            self.timer.close()
            self.timer = None


sweep = Sweep()


class Pump:
    """One live stream.

    answer   http1.Answer whose head is in
    stream   of stream.py
    sock     the client's socket
    frame    a function: bytes of the answer -> bytes as they go over the socket
    limits   settings with keepalive, stall_timeout, answer_timeout, stuck_after, in seconds
    since    the moment from which the engine's silence counts (monotonic)
    told     two functions: `said` is called when all choices have finished, and more is slow to
             follow; `hold` counts what the stream has in memory, and may wait or raise
    pulse    engines.pulse.Pulse of its engine
    backlog  events that wait for the client already

    What it knows meanwhile:

    left          framed bytes that the client has not taken yet
    source_ended  nothing more is wanted of the engine
    result        set when all is moved, to the exception that ended it, or to bytes of the engine
                  that are too many for a callback of the hub
    working       the request's greenlet works on such bytes
    behind        the moment since which the client has never taken all, or None
    taken         bytes that it has taken since then
    written       the moment at which the client last took something
    token         the moment of the last token, or since when the next one is waited for
    tokens        the stream's count of tokens at the last sweep
    afterword     the timer of what may follow the last finish, or None
    """

    def __init__(self, answer, stream, sock, frame, limits, since, told, pulse, backlog=b""):
        """Everything that a chunk needs is looked up here, once."""
        loop = get_hub().loop
        self.source = answer.sock.fileno()
        self.target = sock.fileno()
        self.reader = loop.io(self.source, READABLE)
        self.writer = loop.io(self.target, WRITABLE)
        self.signs = answer.pool.signs
        self.decode = answer.decode
        self.framing = answer.framing
        self.stream = stream
        self.feed = stream.feed
        self.frame = frame
        self.sock = sock
        self.limits = limits
        self.backlog = backlog
        self.said, self.hold = told
        self.pulse = pulse
        self.left = b""
        self.events = stream.events
        self.working = False
        self.behind = None
        self.taken = 0
        self.source_ended = stream.over or answer.ended
        self.result = AsyncResult()
        self.written = monotonic()
        self.token = since
        self.tokens = 0
        self.afterword = None

    def move(self):
        """Run until the engine has said all and the client has taken it.

        Raises Refusal, ClientGone, or what the stream raises.
        """
        try:
            self.run()
        except Exception:
            self.complete()
            raise

    def run(self):
        """Set the watchers going, and sleep until they have done it all."""
        try:
            if self.backlog:
                self.write(self.backlog)
            if self.stream.closing:
                self.on_closing()
            if not self.left:
                self.go_on()
            sweep.add(self, min(TICK, self.limits.keepalive / 2))
            while data := self.result.get():
                self.work_on(data)
        finally:
            sweep.drop(self)
            for watcher in (self.reader, self.writer, self.afterword):
                if watcher is not None:
                    watcher.stop()
                    watcher.close()

    def work_on(self, data):
        """Run many bytes through the stream, or the end of a large event, in steps. They are of the
        engine's connection."""
        self.result = AsyncResult()
        self.working = True
        with without_collections():
            for at in range(0, len(data), SLICE):
                pause()
                self.hold()
                events = self.feed(self.decode(data[at : at + SLICE]))
                if events:
                    pause()
                    self.write(events)
        self.working = False
        if self.stream.closing or self.framing.ended:
            self.on_closing()
        if not self.left and not self.result.ready():
            self.go_on()

    def complete(self):
        """Bring a half-written chunk to its end, so that an error event can follow it.

        A client that does not take it in time is left with what it has.
        """
        self.sock.settimeout(FLUSH)
        try:
            self.sock.sendall(self.left)
        except OSError:
            raise ClientGone from None

    def guarded(self, callback, *args):
        """Call back from the hub, which would only print what is raised there."""
        try:
            callback(*args)
        except BaseException as error:
            self.stop(error)

    def stop(self, error=None):
        self.reader.stop()
        self.writer.stop()
        if self.result.ready():
            return
        if error:
            self.result.set_exception(error)
        else:
            self.result.set(None)

    def on_engine(self):
        """The hot path: once for what the engine sends at a time."""
        try:
            try:
                data = os.read(self.source, READ)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if len(data) > SLICE or len(self.events.rest) > SLICE or self.stream.holds > LARGE:
                self.reader.stop()
                self.result.set(data)
            elif data:
                events = self.feed(self.decode(data))
                if events:
                    self.write(events)
                if self.stream.closing or self.framing.ended:
                    self.on_closing()
            else:
                self.framing.eof()
                self.end()
        except BaseException as error:  # as in `guarded`, without the cost of its call
            self.stop(error)

    def on_closing(self):
        """All that was asked for has come, or all that there is: what may follow has its time."""
        if self.stream.over or self.framing.ended:
            self.end()
        elif self.afterword is None:
            self.afterword = get_hub().loop.timer(GRACE, AFTERWORD - GRACE)
            self.afterword.start(self.guarded, self.on_afterword)

    def on_afterword(self):
        """First the slot is given away; then no more is waited for, unless the engine was not read,
        or has begun another choice."""
        if self.said:
            self.said()
            self.said = None
        elif self.stream.closing and not self.left:
            self.end()

    def end(self):
        """The engine has said all."""
        self.source_ended = True
        self.reader.stop()
        if not self.left:
            self.stop()

    def write(self, events):
        data = self.frame(events) if len(events) <= LARGE else self.framed(events)
        if self.left:
            self.left = b"".join((self.left, data))
        else:
            self.push(data)

    def framed(self, events):
        """Many bytes of events as they go over the socket. One copy of them would take long."""
        begins = with_pauses(range(0, len(events), LARGE))
        return gathered([self.frame(events[at : at + LARGE]) for at in begins])

    def nudge(self):
        """Send something, unless there is something on its way that does the same."""
        if not self.left and not self.result.ready():
            self.write(NUDGE)

    def push(self, data):
        """Write to the client at once; what it does not take waits, and the engine with it."""
        try:
            sent = os.write(self.target, data)
        except BlockingIOError:
            sent = 0
        except OSError:
            raise ClientGone from None
        if sent:
            self.written = monotonic()
        if sent == len(data):
            self.left = b""
            self.behind = None
        else:  # the engine waits for the client
            self.left = memoryview(data)[sent:]  # of a large event, no copy at each write
            self.fall_behind(sent)
            self.reader.stop()
            self.writer.start(self.guarded, self.on_client)

    def fall_behind(self, sent):
        """The client has taken so many bytes, and not all."""
        if self.behind is None:
            self.behind = monotonic()
            self.taken = 0
        self.taken += sent

    def is_too_slow(self, now):
        """Whether the client takes nothing, or so little that it keeps a slot for ever."""
        patience = self.limits.stall_timeout
        late = now - self.behind > patience + self.taken / LEAST_RATE
        return late or now - self.written > patience

    def on_client(self):
        """The client takes bytes again."""
        self.writer.stop()
        self.push(self.left)
        if self.left:
            return
        self.token = monotonic()
        self.go_on()

    def go_on(self):
        """The client has taken all: the end, or the engine's next bytes."""
        if self.source_ended:
            self.stop()
        elif not self.working:
            self.reader.start(self.on_engine)

    def on_sweep(self, now):
        """Look for silence: the client's, the engine's, and one that wants a sign of life."""
        if self.result.ready() or self.working:
            return
        if self.left:  # the engine is not read because the client takes nothing
            if self.is_too_slow(now):
                raise ClientGone
            return
        if self.stream.tokens != self.tokens:
            self.tokens = self.stream.tokens
            self.token = self.signs.heard = now
            self.pulse.hear(now)
        if not self.stream.finished:
            self.check_engine(now)
        elif now - self.token > min(SILENCE, self.limits.stall_timeout):
            self.end()
            return
        if now - self.written >= self.limits.keepalive - 0.05:
            self.write(self.stream.alive())

    def check_engine(self, now):
        """Raises UpstreamTimeout for an engine without tokens: its comments are no sign of life.
        What it does for others excuses it."""
        limit = self.limits.stall_timeout if self.tokens else self.limits.answer_timeout
        if now - self.token <= limit:
            return
        if now - self.pulse.progress(now, self.limits.stuck_after) > limit:
            raise UpstreamTimeout(
                f"the engine has sent no token for {limit:g} seconds; send the request again"
            )


def feed(stream, data, hold=None):
    """What stream.feed gives for many bytes, which are worked on in steps. `hold`: see Pump."""
    events = []
    for at in range(0, len(data), SLICE):
        pause()
        events.append(stream.feed(data[at : at + SLICE]))
        if hold:
            hold()
    return gathered(events)


def hear_out(answer, stream, until):
    """Read on behind an answer whose client has left, until a moment (monotonic) at most. Raises
    Refusal."""
    while not stream.over and (left := until - monotonic()) > 0:
        data = answer.read(left)
        if not data:
            return
        feed(stream, data)
        give_way()  # they may come faster than they are read
