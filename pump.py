"""Moves a stream's bytes between two sockets in the hub: no greenlet is woken for a chunk.

The request's greenlet sleeps in `move` while callbacks of the event loop read the engine's socket, run the bytes
through the stream and write the client's socket. If the client does not take them, the engine is not read.
"""

import os
from time import monotonic

from gevent import get_hub
from gevent.event import AsyncResult

from errors import ClientGone, UpstreamTimeout

READABLE, WRITABLE = 1, 2
READ = 65536  # bytes a read
AFTERWORD = 5.0  # seconds that an engine has for usage and [DONE] after the last finish
FLUSH = 2.0  # seconds for the rest of a chunk when a stream is ended early
TICK = 1.0  # seconds between two sweeps, or half a keep-alive if that is less


class Sweep:
    """One coarse timer for all live streams: who has been silent for how long."""

    def __init__(self):
        self.live, self.timer = set(), None

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
    limits   settings with keepalive, stall_timeout, answer_timeout, in seconds
    since    the moment from which the engine's silence counts (monotonic)
    backlog  events that wait for the client already
    """

    def __init__(self, answer, stream, sock, frame, limits, since, backlog=b""):
        self.answer, self.stream, self.frame, self.limits = answer, stream, frame, limits
        self.sock, self.source, self.target = sock, answer.sock.fileno(), sock.fileno()
        self.done = AsyncResult()
        self.decode, self.framing, self.feed = answer.decode, answer.framing, stream.feed
        self.backlog, self.left = backlog, b""  # left: what the client has not taken yet
        self.ended = stream.over or answer.ended  # nothing more is wanted of the engine
        loop = get_hub().loop
        self.reader, self.writer = loop.io(self.source, READABLE), loop.io(self.target, WRITABLE)
        self.written, self.token, self.tokens = monotonic(), since, 0

    def move(self):
        """Run until the engine has said all and the client has taken it. Raises Refusal, ClientGone, or what the
        stream raises."""
        try:
            self.run()
        except Exception:
            self.complete()
            raise

    def run(self):
        try:
            if self.backlog:
                self.write(self.backlog)
            if not self.left:
                self.go_on()
            sweep.add(self, min(TICK, self.limits.keepalive / 2))
            self.done.get()
        finally:
            sweep.drop(self)
            for watcher in (self.reader, self.writer):
                watcher.stop()
                watcher.close()

    def complete(self):
        """Bring a half-written chunk to its end, so that an error event can follow it; a client that does not take it in
        time is left with what it has."""
        self.sock.settimeout(FLUSH)
        try:
            self.sock.sendall(self.left)
        except OSError:
            raise ClientGone from None

    def guarded(self, callback, *args):
        try:
            callback(*args)
        except BaseException as error:
            self.stop(error)

    def stop(self, error=None):
        self.reader.stop()
        self.writer.stop()
        if not self.done.ready():
            self.done.set_exception(error) if error else self.done.set(None)

    def on_engine(self):
        """The hot path: once for what the engine sends at a time."""
        try:
            try:
                data = os.read(self.source, READ)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                events = self.feed(self.decode(data))
                if events:
                    self.write(events)
                if self.stream.over or self.framing.ended:
                    self.end()
            else:
                self.framing.eof()
                self.end()
        except (
            BaseException
        ) as error:  # one that leaves a hub callback is only printed: the stream would hang
            self.stop(error)

    def end(self):
        """The engine has said all."""
        self.ended = True
        self.reader.stop()
        if not self.left:
            self.stop()

    def write(self, events):
        data = self.frame(events)
        if self.left:
            self.left = b"".join((self.left, data))
        else:
            self.push(data)

    def push(self, data):
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
        else:  # the engine waits for the client
            self.left = memoryview(data)[sent:]  # of a large event, no copy at each write
            self.reader.stop()
            self.writer.start(self.guarded, self.on_client)

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
        if self.ended:
            self.stop()
        else:
            self.reader.start(self.on_engine)

    def on_sweep(self, now):
        if self.done.ready():
            return
        if self.left:  # silent because the client is
            if now - self.written > self.limits.stall_timeout:
                raise ClientGone
            return
        if self.stream.tokens != self.tokens:
            self.token, self.tokens = now, self.stream.tokens
        if self.stream.finished and now - self.token > AFTERWORD:
            return self.end()
        limit = self.limits.stall_timeout if self.tokens else self.limits.answer_timeout
        if now - self.token > limit:
            raise UpstreamTimeout(
                f"the engine has sent no token for {limit:g} seconds; send the request again"
            )
        if now - self.written >= self.limits.keepalive - 0.05:
            self.write(self.stream.alive())


def move(*args, **options):
    """Move a stream from the engine to the client, to its end. See Pump."""
    Pump(*args, **options).move()
