"""Watches the event loop from a thread: how long one run of it takes, and where it was meanwhile.

A *run* is what the loop does between two looks for what is ready: while it lasts, nobody else gets
a turn. The loop itself pays nothing for it. The thread looks at the number of the loop's turn and
at what it executes, every 10 ms, so a run is known to some milliseconds, and one that is shorter
than that only by the mean of its neighbours.

A thread that keeps Python's lock holds everybody up as well. It is found because the monitor itself
had to wait, while somebody used the processor.
"""

import logging
import sys
import time
from collections import Counter
from pathlib import Path

from gevent import get_hub
from gevent.hub import Hub
from gevent.monkey import get_original

start_thread = get_original("_thread", "start_new_thread")
get_ident = get_original("_thread", "get_ident")
sleep = get_original("time", "sleep")

logger = logging.getLogger("sparks")
TICK = 0.01  # seconds between two looks
CLOSE = 0.002  # the same while a run lasts
LATE = 0.005  # seconds that a look may come after its time: Python hands on its lock so often
DEEP = 4  # frames of the stack that are told
HOME = f"{Path(__file__).resolve().parent}/"
RUN = "one run of the loop took %d ms (%d ms of CPU) at %s"
KEPT = "threads kept Python's lock for %d ms (%d ms of CPU) at %s"
WAITING = Hub.run.__code__  # what the loop's thread executes while it waits for something to do


class Monitor:
    """Measures the loop of the thread that calls `start`.

    observe   a function that is told of runs: (seconds together, how many)
    settings  `loop_warn`: seconds of a run from which on there is a line in the log
    """

    def __init__(self, observe, settings):
        """It watches once it is started."""
        self.observe = observe
        self.settings = settings
        self.turn = 0  # the loop's, at the last look
        self.begun = None  # the Moment of the run that is going on
        self.where = Counter()  # seconds of that run by the place that was seen in them
        self.last = None  # the Moment of the last look

    def start(self):
        self.loop = get_hub().loop
        self.ident = get_ident()
        self.clock = time.pthread_getcpuclockid(self.ident)
        self.last = self.moment()
        start_thread(self.watch, ())

    def watch(self):
        """The thread: for ever."""
        while True:
            pause = self.pause()
            sleep(pause)
            try:
                self.look(self.moment(), pause)
            except Exception as error:  # one look less
                self.tell("the monitor of the loop failed: %r", error)
                sleep(1)

    def pause(self):
        """Seconds to the next look: the end of a long run is to be seen at once."""
        if self.begun and self.last.at - self.begun.at >= TICK:
            return CLOSE
        return TICK

    def moment(self):
        return Moment(time.monotonic(), time.process_time(), time.clock_gettime(self.clock))

    def look(self, now, pause):
        """Where the loop is now, `pause` seconds after the last look or later."""
        last = self.last
        self.last = now
        turns = self.loop.iteration - self.turn
        self.turn += turns
        frame = sys._current_frames().get(self.ident)
        works = frame is not None and frame.f_code is not WAITING
        late = max(now.at - last.at - pause - LATE, 0)
        own = now.loop - last.loop
        others = now.cpu - last.cpu - own
        kept_out = late and others > max(own, LATE)
        where = others_places(self.ident) if kept_out else place(frame)
        if self.begun and (turns or not works):
            self.end(now, last, max(turns, 1))
        elif turns:
            self.note(own, own, f"a place before {where}", turns)
        if works:
            self.go_on(now, last, where, late if turns < 2 else 0)
        elif kept_out:
            self.note(min(late, others), others, where, words=KEPT)

    def go_on(self, now, last, where, late):
        """A run lasts; `late` seconds of it went by before the first look at it."""
        if self.begun is None:
            self.begun = now
            self.where.clear()
            if late:
                self.begun = now.earlier(late, last)
        self.where[where] += now.at - last.at

    def end(self, now, last, turns):
        """The run that was going on at the last look has ended, so many turns of the loop ago: what
        came since then is shared by them."""
        begun = self.begun
        self.begun = None
        where, _ = self.where.most_common(1)[0]
        seconds = last.at - begun.at + (now.at - last.at) / turns
        cpu = last.loop - begun.loop + (now.loop - last.loop) / turns
        self.note(seconds, cpu, where)

    def note(self, seconds, cpu, where, runs=1, words=RUN):
        """Count runs, which took so many seconds together."""
        self.observe(seconds, runs)
        mean = seconds / runs
        if mean >= self.settings.loop_warn:
            cpu = min(cpu / runs, mean)
            self.tell(words, mean * 1000, cpu * 1000, where)

    def tell(self, *words):
        """Log it in the loop's own thread: logging's locks are gevent's."""
        self.loop.run_callback_threadsafe(logger.warning, *words)


class Moment:
    """A moment: `at`, of the monotonic clock; seconds of CPU that the process and the loop's thread
    have used by then."""

    def __init__(self, at, cpu, loop):
        self.at = at
        self.cpu = cpu
        self.loop = loop

    def earlier(self, seconds, last):
        """So many seconds before this moment, but with the processor's time of the `last` one."""
        return Moment(self.at - seconds, last.cpu, last.loop)


def others_places(ident):
    """What all threads but that one and the monitor's execute."""
    frames = sys._current_frames()
    del frames[get_ident()]  # in a circle with itself it would keep all of them, and what they know
    frames.pop(ident, None)
    return "; ".join([place(frame) for frame in frames.values()])


def place(frame):
    """The innermost frames of a stack, as "pump.py:141 on_engine < gevent/hub.py:665 run". As a
    text: a frame would keep alive all that its functions know."""
    found = []
    while frame is not None and len(found) < DEEP:
        code = frame.f_code
        file = code.co_filename.removeprefix(HOME).split("/")[-2:]
        found.append(f"{'/'.join(file)}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(found)
