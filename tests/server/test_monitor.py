"""The monitor of the event loop: what holds it is measured, counted, and told with its place; nothing else is."""
import re

import pytest

from support.gateway import started
from support.observe import gauges
from support.processes import wait_until

# What GET / does, in a function of the name `hold`.
HOLD = """
import re, time, gevent, loop, monitor
from front import views
def hold():
    {what}
    return ""
views.root = hold
"""
IN_C = "re.match('(a|a)*$', 'a' * {size} + '!')"      # doubles with each letter, and keeps Python's lock
PLACE = re.compile(r"one run of the loop took \d\d\d ms .* at .*<string>:\d+ (hold|<lambda>)")


@pytest.mark.parametrize("what", [
    "end = time.monotonic() + 0.4\n    while time.monotonic() < end: pass",
    "monitor.sleep(0.4)",
    IN_C.format(size=22),
    f"gevent.get_hub().threadpool.apply(lambda: {IN_C.format(size=22)})",
], ids=["python", "asleep", "a call of C", "a thread that keeps the lock"])
def test_a_long_run_is_measured_and_told_with_its_place(engine, tmp_path, stock, what):
    with started(engine, tmp_path, stock, HOLD.format(what=what)) as gateway:
        gateway.long_runs_allowed = True
        gateway.client().get("/").read_all()
        wait_until(lambda: PLACE.search(gateway.log), 5)
        seen = gauges(gateway)
        assert seen["sparks_loop_longest_seconds"] > 0.1
        assert seen["sparks_loop_seconds_count"] > seen['sparks_loop_seconds_bucket{le="0.1"}']


def test_work_that_gives_way_is_no_long_run(engine, tmp_path, stock):
    """Half a second of it, in steps, and in a thread whose Python lets the loop run."""
    steps = "[([str(n) for n in range(10_000)], loop.give_way()) for _ in range(100)]"
    thread = "gevent.get_hub().threadpool.apply(lambda: [str(n) for n in range(2_000_000)] and None)"
    with started(engine, tmp_path, stock, HOLD.format(what=f"{steps}\n    {thread}")) as gateway:
        before = gauges(gateway)["sparks_loop_seconds_count"]
        gateway.client().get("/").read_all()
        assert gauges(gateway)["sparks_loop_seconds_count"] > before + 20
