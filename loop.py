"""The event loop that all requests share: how long work takes its turns in it."""

import gc
from collections import deque
from contextlib import contextmanager
from time import monotonic

from gevent import get_hub, getcurrent

TURN = 0.02  # seconds after which work goes on though the loop is busy
LOOK = 0.005  # seconds between two looks whether it is time
WORK = 0.005  # seconds for which a greenlet works in one go


class Turns:
    """Greenlets with work to do, which goes on one at a time: if each took its few milliseconds in
    the same run of the loop, hundreds of them would hold up the streams as one long one does."""

    def __init__(self):
        """Nobody waits."""
        self.waiting = deque()  # (greenlet, since when)
        self.idle = self.timer = None

    def wait(self):
        """Until the loop has nothing else to do, or TURN is over."""
        turn = (getcurrent(), monotonic())
        self.waiting.append(turn)
        self.watch()
        try:
            get_hub().switch()
        finally:
            if turn in self.waiting:  # something else has ended the wait
                self.waiting.remove(turn)

    def watch(self):
        """Have the hub call `next` as long as anybody waits."""
        if self.idle is None:
            loop = get_hub().loop
            self.idle = loop.idle()
            self.timer = loop.timer(LOOK, LOOK)
            self.idle.start(self.next)
            self.timer.start(self.next, TURN)

    def next(self, least=0.0):
        """Let the first one go on, if it has waited for so many seconds."""
        if self.waiting and monotonic() - self.waiting[0][1] >= least:
            self.waiting.popleft()[0].switch()
        if not self.waiting and self.idle is not None:
            for watcher in (self.idle, self.timer):
                watcher.stop()
                watcher.close()
            self.idle = self.timer = None


turns = Turns()


def give_way():
    """Between two pieces of something large: streams go first, but not for ever.

    (gevent.sleep(0) would not look at any socket before fifty others had their turn.)
    """
    turns.wait()


class Pacer:
    """Called often by whoever works for long, gives way when the time for that has come. What runs
    in the loop itself cannot."""

    def __init__(self):
        self.greenlet = None  # the one that works
        self.since = 0.0

    def __call__(self):
        current = getcurrent()
        now = monotonic()
        if current is not self.greenlet:
            self.greenlet = current
            self.since = now
        elif now - self.since > WORK and current is not get_hub():
            give_way()
            self.since = monotonic()


pause = Pacer()

working = []  # those who want no collections of garbage just now


@contextmanager
def without_collections():
    """While millions of new objects are made: Python would walk through all of them, in one go."""
    working.append(None)
    gc.disable()
    try:
        yield
    finally:
        working.pop()
        if not working:
            gc.enable()
