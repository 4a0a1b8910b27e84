"""How long one run of a gateway's event loop may be in a test: LONGEST. monitor.py measures it, and the log has it.

What counts is the processor's time that it took: a machine with much else to do lets a short run last long. And a slow
machine has its factor, by a piece of work that is timed at the start.
"""
import re
import time

USUAL = 0.01                                        # seconds of CPU for `work` on a usual machine with nothing else to do
LINE = re.compile(r"one run of the loop took (\d+) ms \((\d+) ms of CPU\) at [^\"\n]*")


def work():
    table = {}
    for number in range(100_000):
        table[number % 1000] = str(number)
    return table


def slowness():
    """How many times as long as usual this machine takes; never less than once."""
    times = []
    for _ in range(3):
        since = time.process_time()
        work()
        times.append(time.process_time() - since)
    return max(1.0, min(times) / USUAL)


LONGEST = round(0.05 * slowness(), 3)               # seconds


def too_long(log):
    """The lines of a log about runs that took more than LONGEST."""
    return [found[0] for found in LINE.finditer(log) if int(found[2]) >= LONGEST * 1000]
