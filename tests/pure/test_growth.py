"""What reading a request costs grows no faster than the request, whichever of its values is made larger.

Each list, object, text and number of the schemas' fields (those that tests/pure/test_shapes.py lists, of the five APIs) is
made 1, 4 and 16 times as large: from 4 to 16 times, the processor's time may grow by 1.3 times as much as the body. In CI
each place is measured at sizes that take some milliseconds, and steps are so small that these take many, as a large body
does; SPARKS_GROWTH=8 measures eight times as much of everything. The slowest ten are printed: `pytest -rA tests/pure/test_growth.py`.
"""
import copy
import gc
import json
import os
import time

import pytest

import steps
from counting import Chain, measure
from dialects import embeddings, messages
from dialects.messages import count
from errors import Refusal
from pure.test_shapes import DIALECTS, places
from reasoning import TABLES
from support.dialect_tables import Fleet

SIZE = int(os.environ.get("SPARKS_GROWTH", "1"))
MOST = 1.3                                          # times as much as the body
COUNTS = 0.004                                      # seconds from which on the clock tells something
slowest = []                                        # (seconds, bytes, what)


def larger(value, times):
    """A value of the same kind that is so many times as large."""
    if isinstance(value, list):
        return value * times if value else ["x"] * times
    if isinstance(value, dict):
        first = next(iter(value.values()), "x")
        return value | {f"x{number}": first for number in range(times)}
    if isinstance(value, str):
        return value * times or "x" * times
    return [value] * times                          # a number has no size


def changed(body, path, times):
    body = copy.deepcopy(body)
    *way, last = path
    holder = body
    for name in way:
        holder = holder[name]
    holder[last] = larger(holder[last], times)
    return json.dumps(body).encode()


def cost(dialect, data, fleet, tries):
    """(seconds of CPU, whether it was accepted) of reading a body."""
    times = []
    accepted = True
    for _ in range(tries):
        since = time.process_time()
        try:
            dialect.read(data, fleet)
        except Refusal:
            accepted = False
        times.append(time.process_time() - since)
    return min(times), accepted


def grows(dialect, body, path, fleet, what):
    """How much faster the cost grows than the body, from 4 to 16 times; 1 where the clock tells nothing."""
    unit = 30 * SIZE if not isinstance(value_at(body, path), str) else 1000 * SIZE
    small, middle, large = (changed(body, path, unit * times) for times in (1, 4, 16))
    took, _ = cost(dialect, large, fleet, 1)
    slowest.append((took, len(large), what))
    if took < COUNTS:
        return 1
    for _ in range(3):
        before, _ = cost(dialect, middle, fleet, 3)
        after, _ = cost(dialect, large, fleet, 2)
        rate = after / before / (len(large) / len(middle))
        if rate <= MOST:
            break
    return rate


def value_at(body, path):
    for name in path:
        body = body[name]
    return body


def tables(dialect):
    """The effort tables that a dialect reads differently: each kind of template once, where tools or messages depend on it."""
    return ["glm", "qwen", "gpt-oss"] if dialect is messages else ["glm"] if SIZE == 1 else list(TABLES)


CASES = {**DIALECTS, "count_tokens": (count, DIALECTS["messages"][1])}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    for name, size in {"LARGE": 2048, "LIGHT": 2048, "LONG": 0}.items():
        monkeypatch.setattr(steps, name, size)


@pytest.mark.parametrize("name", CASES)
def test_cost_grows_as_the_body_does(name):
    dialect, body = CASES[name]
    body = {**body, "unknown": {"a": [1, "x", {"b": []}]}}
    gc.disable()
    try:
        too_fast = []
        for table in tables(dialect):
            fleet = Fleet(purpose="embedding") if dialect is embeddings else Fleet(effort=table)
            for path in list(places(body))[1:]:
                what = f"{name} {table} {'.'.join(map(str, path))}"
                rate = grows(dialect, body, path, fleet, what)
                if rate > MOST:
                    too_fast.append(f"{what}: {rate:.2f}")
    finally:
        gc.enable()
    assert not too_fast, too_fast


BODIES = {
    "one text": lambda size: [b"x" * size],
    "pieces": lambda size: [b"x" * 9000] * (size // 9000),
    "images": lambda size: [b'{"url":"data:image/png;base64,AAAA"},' * (size // 40)],
    "no images": lambda size: [b'"url":"data' * (size // 11)],
    "marks": lambda size: [b',"cache_control":{"type":"ephemeral"}' * (size // 37)],
    "no marks": lambda size: [b',"cache_control":{' * (size // 18)],
}


@pytest.mark.parametrize("body", BODIES)
def test_measuring_and_hashing_grow_as_the_body_does(body):
    def seconds(size):
        parts = BODIES[body](size)
        times = []
        for _ in range(5):
            since = time.process_time()
            measure(parts, Chain(b"k" * 32, "m"))
            times.append(time.process_time() - since)
        return min(times)

    rates = (seconds(SIZE << 23) / seconds(SIZE << 21) / 4 for _ in range(3))
    assert any(rate <= MOST for rate in rates)


def test_the_slowest_ten():
    """Not a test: they are printed."""
    for took, size, what in sorted(slowest, reverse=True)[:10]:
        print(f"{1000 * took:7.1f} ms  {size:9,} bytes  {what}")
