"""The monitor of the event loop: what holds it is measured, counted, and told with its place; nothing else is."""
import re

import pytest

from support.gateway import started
from support.observe import gauges
from support.processes import wait_until

# GET /?python is held by the function of that name.
HOLD = """
import re, time, loop, monitor
from flask import request
from gevent import get_hub
from front import views

def python():
    end = time.monotonic() + 0.4
    while time.monotonic() < end: pass

def asleep():
    monitor.sleep(0.4)

def call_of_c():                                    # doubles with each letter, and keeps Python's lock
    re.match('(a|a)*$', 'a' * 22 + '!')

def thread():
    get_hub().threadpool.apply(call_of_c)

def polite():
    for _ in range(100):
        [str(number) for number in range(10_000)]
        loop.give_way()
    get_hub().threadpool.apply(lambda: [str(number) for number in range(2_000_000)] and None)

def hold():
    globals()[request.query_string.decode()]()
    return ""

views.root = hold
"""
PLACE = "(one run of the loop took|threads kept Python's lock for) [0-9]{{3}} ms .* at .*<string>:[0-9]+ {name}"


@pytest.fixture(scope="module")
def held(shared_pair, tmp_path_factory, stock):
    """A gateway whose loop can be held."""
    with started(shared_pair.engine, tmp_path_factory.mktemp("held"), stock, HOLD) as gateway:
        gateway.long_runs_allowed = True
        yield gateway


def test_work_that_gives_way_is_no_long_run(held):
    """Half a second of it, in steps, and in a thread whose Python lets the loop run."""
    before = gauges(held)["sparks_loop_seconds_count"]
    held.client().get("/?polite").read_all()
    assert gauges(held)["sparks_loop_seconds_count"] > before + 20
    assert "hold" not in held.log


@pytest.mark.parametrize(("what", "place"), [
    ("python", "python"), ("asleep", "asleep"), ("call_of_c", "call_of_c"), ("thread", "call_of_c"),
], ids=["python", "asleep", "a call of C", "a thread that keeps the lock"])
def test_a_long_run_is_measured_and_told_with_its_place(held, what, place):
    since = len(held.log)
    told = re.compile(PLACE.format(name=place))
    wait_until(lambda: held.client().get(f"/?{what}").read_all() or told.search(held.log[since:]), 10)
    seen = gauges(held)
    assert seen["sparks_loop_longest_seconds"] > 0.1
    assert seen["sparks_loop_seconds_count"] > seen['sparks_loop_seconds_bucket{le="0.1"}']
