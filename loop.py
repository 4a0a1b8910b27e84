"""The event loop that all requests share: how long work takes its turns in it."""

import gc
from collections import Counter, defaultdict, deque
from contextlib import contextmanager
from time import monotonic, time

from gevent import get_hub, getcurrent
from gevent.lock import BoundedSemaphore
from gevent.monkey import get_original

get_ident = get_original("_thread", "get_ident")

TURN = 0.02  # seconds after which work goes on though the loop is busy
LOOK = 0.005  # seconds between two looks whether it is time
RUN = 0.01  # seconds of one run of the loop that is long enough
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
        """Have the hub call as long as anybody waits."""
        if self.waiting and self.idle is None:
            loop = get_hub().loop
            self.idle = loop.idle()
            self.timer = loop.timer(LOOK, LOOK)
            self.idle.start(self.next)
            self.timer.start(self.overdue)
        elif not self.waiting and self.idle is not None:
            for watcher in (self.idle, self.timer):
                watcher.stop()
                watcher.close()
            self.idle = self.timer = None

    def next(self):
        """The loop is idle: let the first one go on."""
        if self.waiting:
            self.waiting.popleft()[0].switch()
        self.watch()

    def overdue(self):
        """Let those go on that have waited for TURN, for as long as one works in one go: many of
        them have little to do."""
        now = monotonic()
        end = now + WORK
        while self.waiting and self.waiting[0][1] <= now - TURN and monotonic() < end:
            self.waiting.popleft()[0].switch()
        self.watch()


turns = Turns()


def give_way():
    """Between two pieces of something large: streams go first, but not for ever.

    (gevent.sleep(0) would not look at any socket before fifty others had their turn.)
    """
    turns.wait()


def take_turn():
    """Before something small: give way only where this run of the loop is a long one already."""
    if time() - get_hub().loop.now() > RUN:
        give_way()


class Shares:
    """How many of something go on at once: at most `each` for an owner, and `most` in all. An owner
    waits for its own first, so that what it has too much of takes no place from others.

    spare   how many more each owner may have where all are taken: then it waits for no other's
    """

    def __init__(self, each, most, spare=0):
        self.users = Counter()  # how many have or want something, by their owner
        self.owned = defaultdict(lambda: BoundedSemaphore(each))
        self.all = BoundedSemaphore(most)
        self.spares = defaultdict(lambda: BoundedSemaphore(spare))
        self.spare = spare

    def acquire(self, owner):
        """Wait for a place; `release` gives it back."""
        self.users[owner] += 1
        try:
            self.owned[owner].acquire()
        except BaseException:  # the time is over, or the client has left
            self.leave(owner)
            raise
        place = self.all
        if self.spare and place.locked():
            place = self.spares[owner]
        try:
            place.acquire()
        except BaseException:
            self.owned[owner].release()
            self.leave(owner)
            raise

    def release(self, owner):
        spares = self.spares[owner]
        if spares.counter < self.spare:
            spares.release()
        else:
            self.all.release()
        self.owned[owner].release()
        self.leave(owner)

    def leave(self, owner):
        """Nothing is kept of owners that are gone."""
        self.users[owner] -= 1
        if not self.users[owner]:
            for table in (self.users, self.owned, self.spares):
                table.pop(owner, None)

    @contextmanager
    def one(self, owner):
        self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)


class Pacer:
    """Called often by whoever works for long, gives way when the time for that has come. What runs
    in the loop itself cannot, and what runs in a thread of its own need not."""

    def __init__(self):
        self.thread = get_ident()  # the loop's
        self.greenlet = None  # the one that works
        self.since = 0.0

    def __call__(self):
        """Give way, if it is time."""
        if get_ident() != self.thread:
            return
        current = getcurrent()
        now = monotonic()
        if current is not self.greenlet:
            self.greenlet = current
            self.since = now
        elif now - self.since > WORK and current is not get_hub():
            give_way()
            self.since = monotonic()


pause = Pacer()


class Collections:
    """Python's search for garbage in circles, which would go through millions of new objects in one
    go. It rests while anybody makes them, in a greenlet or in a thread."""

    def __init__(self):
        self.resting = 0
        self.lock = get_original("_thread", "allocate_lock")()  # gevent's is none between threads

    def rest(self, more):
        with self.lock:
            self.resting += more
            if self.resting:
                gc.disable()
            else:
                gc.enable()


collections = Collections()


@contextmanager
def without_collections():
    """While millions of new objects are made."""
    collections.rest(1)
    try:
        yield
    finally:
        collections.rest(-1)
