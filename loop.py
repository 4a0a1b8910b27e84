"""The event loop that all requests share."""

import gc
from contextlib import contextmanager
from time import monotonic

import gevent

TURN = 0.02  # seconds
WORK = 0.005  # seconds for which a greenlet works in one go


def give_way():
    """Between two pieces of something large: streams go first, but not for ever.

    (With gevent.sleep(0) they would wait twice as long.)
    """
    with gevent.Timeout(TURN, False):
        gevent.idle()


class Pacer:
    """Called often by whoever works for long, gives way when the time for that has come. What runs
    in the loop itself cannot."""

    def __init__(self):
        self.greenlet = None  # the one that works
        self.since = 0.0

    def __call__(self):
        current = gevent.getcurrent()
        now = monotonic()
        if current is not self.greenlet:
            self.greenlet = current
            self.since = now
        elif now - self.since > WORK and current is not gevent.get_hub():
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
