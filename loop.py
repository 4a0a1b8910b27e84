"""The event loop that all requests share."""

from collections import defaultdict
from contextlib import contextmanager

import gevent
from gevent.lock import BoundedSemaphore

TURN = 0.02  # seconds


def give_way():
    """Between two pieces of something large: streams go first, but not for ever.

    (With gevent.sleep(0) they would wait twice as long.)
    """
    with gevent.Timeout(TURN, False):
        gevent.idle()


class Shares:
    """How many of something go on at once: at most `each` for an owner, and `most` in all. An owner
    waits for its own first, so that what it has too much of takes no place from others."""

    def __init__(self, each, most):
        self.owned = defaultdict(lambda: BoundedSemaphore(each))
        self.all = BoundedSemaphore(most)

    def acquire(self, owner):
        self.owned[owner].acquire()
        try:
            self.all.acquire()
        except BaseException:  # the time is over, or the client has left
            self.owned[owner].release()
            raise

    def release(self, owner):
        self.all.release()
        self.owned[owner].release()

    @contextmanager
    def one(self, owner):
        self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)
