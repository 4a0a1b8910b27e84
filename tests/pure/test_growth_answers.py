"""What an engine's answer costs: each of its values in turn, made 1, 4 and 16 times as large, plain and streamed, in each API.

Its time may not grow much faster than its size; and no step of it, from one pause to the next, may be long. Both are of the
processor's time, the least of some runs. The slowest ten steps are printed with

    pytest -s tests/pure/test_growth_answers.py
"""
import copy
import gc
import json
import time
from contextlib import suppress
from functools import cache, partial

import pytest

import pump
import steps
from answering import checked
from counting import Meter, Tally
from dialects import chat, completions, embeddings, messages
from dialects.responses import Responses
from errors import Refusal
from support.dialect_tables import Fleet
from support.runs import LONGEST

GROWTH, STEP = 2, LONGEST                           # times its size, with what caches and the machine add; seconds of a step
START = 100                                         # of a text in characters, of a list in items, of an object in fields
SIZES = (1, 4, 16)
QUICK = 0.15                                        # seconds up to which time says nothing of growth

LOGPROB = {"token": " x", "logprob": -0.5, "bytes": [32, 120]}
MESSAGE = {
    "role": "assistant", "content": "a text", "refusal": None, "reasoning": "a thought", "annotations": [{"type": "x"}],
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, "b"]}'}}]}
USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 1}}
CHAT = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "system_fingerprint": "x", "usage": USAGE,
    "choices": [
        {
            "index": 0, "message": MESSAGE, "finish_reason": "stop", "stop_reason": None,
            "logprobs": {"content": [{**LOGPROB, "top_logprobs": [LOGPROB]}]}}]}
TEXT = {
    "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "usage": USAGE,
    "choices": [
        {
            "index": 0, "text": "a", "finish_reason": "stop",
            "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}], "text_offset": [0]}}]}
ERROR = {"error": {"message": "wrong", "type": "x", "param": "p", "code": 400}, "detail": [{"loc": ["a"], "msg": "m"}]}
ASKED = {"messages": [{"role": "user", "content": "x"}]}
APIS = {
    "chat": (chat, ASKED, CHAT),
    "messages": (messages, {**ASKED, "max_tokens": 9, "thinking": {"type": "adaptive"}}, CHAT),
    "responses": (
        Responses(time.time, lambda: "ab", None),
        {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "reasoning": {"summary": "auto"}}, CHAT),
    "completions": (completions, {"prompt": "x"}, TEXT),
}
SAYS = "data: %s\n\n"


class Clock:
    """The longest time from one pause to the next, in seconds of CPU."""

    def __init__(self):
        self.longest, self.since = 0.0, time.thread_time()

    def __call__(self):
        now = time.thread_time()
        self.longest, self.since = max(self.longest, now - self.since), now


def places(value, path=()):
    """Where the values of a JSON tree stand, the tree's own place among them."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from places(item, (*path, name))


def large(value, size):
    """A value of the same type with so many parts."""
    if isinstance(value, str):
        return value.replace("b", "b" * size) if value.startswith("{") else (value + "\n") * (size // len(value) + 1)
    if isinstance(value, list):
        return (value or [1]) * size
    if isinstance(value, dict):
        return {**{f"x{at}": {"a": [1]} for at in range(size)}, **value}
    return [value] * size


def grown(tree, path, size):
    tree = copy.deepcopy(tree)
    if not path:
        return large(tree, size)
    *above, last = path
    table = tree
    for name in above:
        table = table[name]
    table[last] = large(table[last], size)
    return tree


def chunks(completion):
    """The events that say the same as a completion."""
    out = []
    for choice in completion["choices"] if isinstance(completion["choices"], list) else []:
        if not isinstance(choice, dict):
            continue
        said = {name: value for name, value in choice.items() if name not in ("message", "finish_reason")}
        message = choice.get("message")
        if isinstance(message, dict):
            said["delta"] = message
        out.append({**completion, "choices": [{**said, "finish_reason": None}], "usage": None})
    out.append({**completion, "choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}]})
    return "".join(SAYS % json.dumps(one) for one in out).encode() + b"data: [DONE]\n\n"


class Came:
    """As much of an engine's answer as `checked` looks at."""

    headers = {}

    def __init__(self, status=200):
        self.status = status


@cache
def asking(api, streams):
    dialect, body, _ = APIS[api]
    return json.dumps({**body, "stream": streams}).encode()


def plain(api, data):
    """An answer through all that is done with it, and its size."""
    dialect = APIS[api][0]
    ask = dialect.read(asking(api, False), Fleet())
    value = checked(Came(), data, ask.each)
    tally = Tally(Meter(), [])
    tally.take(value)
    dialect.write(value, ask)
    steps.let_go(value)


def streamed(api, data):
    stream = APIS[api][0].read(asking(api, True), Fleet()).stream
    pump.feed(stream, data)
    stream.end()


def unasked(api, data):
    dialect = APIS[api][0]
    dialect.write(bytearray(data), dialect.read(asking(api, False), Fleet()))


WAYS = {"plain": (plain, lambda tree: json.dumps(tree).encode()), "streamed": (streamed, chunks), "unasked": (unasked, chunks)}


def made(written, tree, path, size):
    return written(grown(tree, path, size))


def read_error(status, api, data):
    checked(Came(status), data)


def cost(way, api, data, clock, times=2):
    """Seconds of CPU, the least of some runs; the longest step, likewise."""
    seconds, longest = [], []
    for _ in range(times):
        clock.longest, clock.since, begun = 0.0, time.thread_time(), time.thread_time()
        with suppress(Refusal):
            way(api, data)
        clock()
        seconds.append(time.thread_time() - begun)
        longest.append(clock.longest)
        if seconds[-1] < QUICK and longest[-1] < STEP:
            break
    return min(seconds), min(longest)


@pytest.fixture
def clock(monkeypatch):
    """Told of each pause; without collections of garbage, as where large answers are read."""
    clock = Clock()
    monkeypatch.setattr(steps, "between", [clock])
    monkeypatch.setattr(pump, "pause", clock)
    gc.disable()
    yield clock
    gc.enable()


def check(name, make, way, api, clock, slowest):
    """What is made 16 times as large first: only what takes long is looked at more closely."""
    sizes = [len(data := make(START * SIZES[-1]))]
    seconds, longest = cost(way, api, data, clock)
    slowest.append((longest, seconds, f"{name}, {len(data):,} bytes"))
    assert longest < STEP, f"{name}: a step took {longest * 1000:.0f} ms"
    if seconds < QUICK:
        return
    times = [seconds]
    for size in (SIZES[1], SIZES[0]):
        sizes.append(len(data := make(START * size)))
        times.append(cost(way, api, data, clock)[0])
    for at in (0, 1):
        if times[at] > QUICK:
            growth = times[at] / max(times[at + 1], 0.001) / (sizes[at] / sizes[at + 1])
            assert growth < GROWTH, f"{name}: {times[at] * 1000:.0f} ms is {growth:.1f} times its growth in size"


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("api", APIS)
def test_each_value_of_an_answer(api, kind, clock):
    way, written = WAYS[kind]
    tree = APIS[api][2]
    slowest = []
    for path in places(tree):
        name = f"{api} {kind} {'.'.join(map(str, path))}"
        check(name, partial(made, written, tree, path), way, api, clock, slowest)
    show(slowest)


@pytest.mark.parametrize("said", [
    {"content": "hello wo" * 100}, {"reasoning": "hello wo" * 100},
    {"tool_calls": [{"index": 0, "function": {"arguments": " " * 800}}]},
], ids=["text", "reasoning", "a call"])
def test_the_end_of_a_long_answer(said, clock):
    """What was said in many small events is said again at the end, several times."""
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":'}}

    def event(delta, finish=None):
        return SAYS % json.dumps({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def make(size):
        begin = event({"role": "assistant", "tool_calls": [call]} if "tool_calls" in said else {"role": "assistant"})
        return (begin + event(said) * (10 * size) + event({}, "stop") + "data: [DONE]\n\n").encode()

    check(f"the end, {list(said)}", make, streamed, "responses", clock, [])


def test_each_value_of_an_error(clock):
    slowest = []
    for status in (400, 500, 200):
        for path in places(ERROR):
            make = partial(made, WAYS["plain"][1], ERROR, path)
            check(f"error {status} {path}", make, partial(read_error, status), "", clock, slowest)
    show(slowest)


@pytest.mark.parametrize("given", ["float", "base64"])
@pytest.mark.parametrize("wanted", [{}, {"encoding_format": "base64"}, {"dimensions": 200}])
def test_embeddings(given, wanted, clock):
    """As many as 100 of 4,096 dimensions: more of them are more of the same."""
    vector = [0.5 + at / 9999 for at in range(4096)]
    written = vector if given == "float" else embeddings.b64encode(embeddings.array("f", vector).tobytes()).decode()
    slowest = []

    def make(size):
        items = [{"object": "embedding", "index": at, "embedding": written} for at in range(size // 16)]
        return json.dumps({"object": "list", "data": items, "model": "m", "usage": USAGE}).encode()

    def way(api, data):
        count = data.count(b'"index"')
        ask = embeddings.read(json.dumps({"input": ["x"] * count, "model": "vectors", **wanted}).encode(), Vectors())
        value = checked(Came(), data, ask.each)
        body, usage = embeddings.write(value, ask)
        assert usage == USAGE and sum(part.count(b'"index"') for part in map(bytes, body)) == count

    check(f"embeddings {given} {wanted}", make, way, "", clock, slowest)
    show(slowest)


class Vectors(Fleet):
    def find(self, name):
        model = copy.copy(super().find(None))
        model.purpose = "embedding"
        return model


def show(slowest):
    for longest, seconds, name in sorted(slowest, reverse=True)[:10]:
        print(f"{longest * 1000:6.1f} ms the longest step, {seconds * 1000:6.1f} ms in all: {name}")
