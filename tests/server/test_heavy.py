"""Heavy prompts, what is cached, and tokens that are put by, through the real server: the Gate's own chapter is tests/pure/test_gate_tokens.py."""
import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor as ThreadPool

import pytest

from support.chat import HELLO, PATH, PNG, ROUTES, text_of
from support.engine import (
    DONE,
    Close,
    Engine,
    Hang,
    Head,
    Json,
    Pause,
    Reset,
    Wait,
    chat_chunks,
    completion,
    default_answer,
    died,
    embeddings,
    llama_chunks,
    refusal,
    sse,
    text_chunks,
    vllm_models,
)
from support.gateway import Gateway, started
from support.observe import gauge, gauges, idle
from support.processes import wait_until
from support.templates import TEMPLATES

LONG = "All work and no play makes Jack a dull boy. " * 1500     # 66 kB: 16,500 tokens


def body_of(path, text, **more):
    """What a route is asked, with that text."""
    said = {"prompt": text} if path == "/v1/completions" else {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
    return {**ROUTES[path], **said, **more}


class Cluster:
    """One gateway and engine for the whole chapter. Each test has a model of its own, and with that a place whose mirror and
    pace know nothing yet; settings of its own come by a reload, and go by another."""

    def __init__(self, folder, stock):
        self.engine = Engine()
        self.engine.models = [{"id": name, "max_model_len": 850_000, "root": f"/models/{name}"} for name in ["vectors", *MODELS]]
        self.engine.template = TEMPLATES["thinking-only"]
        self.models, self.settings = iter(MODELS), {}
        self.front = Gateway(folder, self.engine.url, stock, config=toml({}))
        self.front.wait_alive().wait_ready()
        self.other = self.front.client(self.front.add_key("other"))

    def set(self, settings):
        """What sparks.toml says is in force, beside USUAL."""
        if settings == self.settings:
            return
        self.settings, since = settings, len(self.front.log)
        self.front.settings["config"].write_text(toml(settings))
        os.kill(self.front.pid, signal.SIGHUP)
        wait_until(lambda: "sparks.toml was read" in self.front.log[since:], 5)

    def close(self):
        self.front.stop()
        self.engine.close()
        self.front.check_log()
        assert not self.engine.faults, "\n".join(self.engine.faults)


WITH_VECTORS = '[models.vectors]\nkind = "embedding"\n'
MODELS = [f"model-{number}" for number in range(80)]
USUAL = {"keepalive": 0.1, "heavy_prompt": 4000}


def toml(settings):
    settings = {**USUAL, **settings}
    tables = settings.pop("config", "")
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()) + tables


class House:
    """A model whose engine keeps prompts that begin with SLOW from being answered until `go` is set."""

    def __init__(self, cluster, **settings):
        cluster.set(settings)
        self.cluster, self.front, self.other, self.engine = cluster, cluster.front, cluster.other, cluster.engine
        self.model, self.go, self.pool = next(cluster.models), threading.Event(), ThreadPool(90)
        self.engine.requests.clear()
        self.engine.always(self.answer)

    def answer(self, request):
        """The usual answer; of a SLOW one later."""
        steps = default_answer(self.engine, request)
        return [Wait(self.go), *steps] if b"SLOW" in request.body else steps

    def ask(self, body, path=PATH, client=None):
        """The answer, all of it, as soon as it is there."""
        def read():
            answer = (client or self.front.client()).post(path, {"model": self.model, **body})
            return answer.status, answer.read_all().decode(), dict(answer.headers)
        return self.pool.submit(read)

    def key(self, name, *limits):
        """A client with a key of its own, within those limits."""
        name = f"{name}-{self.model}"
        made = self.front.client(self.front.add_key(name))
        if limits:
            self.front.keys("limit", name, *limits)
        return made

    def waiting(self, count):
        wait_until(lambda: gauge(self.front, "sparks_queued") == count, 5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, stock):
    made = Cluster(tmp_path_factory.mktemp("cluster"), stock)
    yield made
    made.close()


@pytest.fixture
def house(cluster):
    made = []

    def make(**settings):
        made.append(House(cluster, **settings))
        return made[-1]

    yield make
    for one in made:
        one.go.set()
        one.pool.shutdown()
        idle(cluster.front)
    cluster.engine.scripts.clear()
    cluster.engine.routes.clear()
    cluster.set({})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ROUTES)
def test_a_heavy_prompt_waits_for_the_one_that_is_read_and_light_ones_pass(house, path, stream):
    here = house()
    first = here.ask(body_of(path, f"SLOW {LONG}", stream=stream), path)
    here.engine.wait_for(1)
    second = here.ask(body_of(path, f"Another {LONG}", stream=stream), path, here.other)
    here.waiting(1)
    status, text, headers = here.ask(body_of(path, "Hello", stream=stream), path, here.other).result(10)
    assert status == 200 and len(here.engine.requests) == 2 and not second.done()
    here.go.set()
    assert first.result(10)[0] == second.result(10)[0] == 200 and len(here.engine.requests) == 3


def test_a_stream_lets_the_next_one_in_with_its_first_token(house):
    here, over = house(), threading.Event()
    here.engine.play(Head(), *chat_chunks("a b c")[:2], Wait(over), *chat_chunks("a b c")[2:])
    first = here.ask(body_of(PATH, f"First {LONG}", stream=True))
    here.engine.wait_for(1)
    assert here.ask(body_of(PATH, f"Second {LONG}", stream=True), client=here.other).result(10)[0] == 200
    over.set()
    assert first.result(10)[0] == 200


@pytest.mark.parametrize("path", ROUTES)
def test_the_next_turn_of_a_conversation_is_light(house, path):
    """Its beginning is cached, wherever the fields stand that change from turn to turn."""
    here = house()
    assert here.ask(body_of(path, f"Mine {LONG}"), path).result(10)[0] == 200
    here.ask(body_of(PATH, f"SLOW {LONG}"), client=here.other)
    here.engine.wait_for(2)
    again = {"temperature": 0.5, **body_of(path, f"Mine {LONG} and more", stream=True), "top_p": 0.9}
    assert here.ask(again, path).result(10)[0] == 200


def test_a_model_that_was_unloaded_has_nothing_cached(house):
    """As by a router, to make room for another one."""
    here = house()
    assert here.ask(body_of(PATH, f"Mine {LONG}")).result(10)[0] == 200
    listed = vllm_models(here.engine.models)
    for entry in listed["data"]:
        entry["status"] = {"value": "unloaded" if entry["id"] == here.model else "loaded"}
    here.engine.on("/v1/models", [Json(listed)])
    looks = len(here.engine.probes)
    wait_until(lambda: sum(probe.path == "/v1/models" for probe in here.engine.probes[looks:]) > 2, 10)
    here.ask(body_of(PATH, f"SLOW {LONG}", stream=True), client=here.other)
    here.engine.wait_for(2)
    here.ask(body_of(PATH, f"Mine {LONG}", stream=True))
    here.waiting(1)


def test_what_somebody_else_has_asked_is_cached_for_all(house):
    here = house()
    assert here.ask(body_of(PATH, f"Mine {LONG}")).result(10)[0] == 200
    here.ask(body_of(PATH, f"SLOW {LONG}"))
    here.engine.wait_for(2)
    assert here.ask(body_of(PATH, f"Mine {LONG}"), client=here.other).result(10)[0] == 200


def test_an_image_is_not_heavy(house):
    here = house()
    here.ask(body_of(PATH, f"SLOW {LONG}"))
    here.engine.wait_for(1)
    picture = {"type": "image_url", "image_url": {"url": PNG.removesuffix("=") + "A" * 400_001}}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": "Hello"}]}]
    assert here.ask({"messages": messages}, client=here.other).result(10)[0] == 200


def test_embeddings_hold_up_nobody(house):
    here = house(config=WITH_VECTORS)
    here.engine.always(lambda request: [Wait(here.go), Json(embeddings([1.0], [2.0]))])
    asked = [here.ask({"model": "vectors", "input": [f"{n} {LONG}"] * 2}, "/v1/embeddings") for n in range(3)]
    here.engine.wait_for(3)
    here.go.set()
    assert [one.result(10)[0] for one in asked] == [200] * 3


def test_off_by_a_setting(house):
    here = house(heavy_prompt=0)
    tickets = [here.ask(body_of(PATH, f"SLOW {n} {LONG}", stream=True)) for n in range(3)]
    here.engine.wait_for(3)
    here.go.set()
    assert [ticket.result(10)[0] for ticket in tickets] == [200] * 3


def test_a_reload_turns_it_on(house):
    here = house(heavy_prompt=0)
    here.ask(body_of(PATH, f"SLOW 0 {LONG}"))
    here.ask(body_of(PATH, f"SLOW 1 {LONG}"))
    here.engine.wait_for(2)
    here.cluster.set({})
    here.ask(body_of(PATH, f"SLOW 2 {LONG}"))
    here.ask(body_of(PATH, f"SLOW 3 {LONG}"))
    here.waiting(1)


@pytest.mark.parametrize("settings", [{"heavy_prompt": 0}, {"heavy_prompt": 100_000}, {"heavy_at_once": 2}], ids=str)
def test_a_reload_lets_in_who_waits(house, settings):
    here = house()
    for number in range(2):
        here.ask(body_of(PATH, f"SLOW {number} {LONG}", stream=bool(number)))
    here.waiting(1)
    here.cluster.set(settings)
    here.engine.wait_for(2)


def test_a_reload_that_says_how_much_the_cache_holds_lets_in_who_waits(house):
    here = house(kv_tokens=20_000)
    here.engine.always(lambda request: [*[Wait(here.go)] * (b"SLOW" in request.body), Json(completion("Hi", prompt=len(request.body) // 4))])
    assert here.ask(body_of(PATH, f"Mine {LONG}")).result(10)[0] == 200
    here.ask(body_of(PATH, f"Mine {LONG} SLOW"))
    here.engine.wait_for(2)
    here.ask(body_of(PATH, f"Another {LONG}"), client=here.other)
    here.waiting(1)
    here.cluster.set({"kv_tokens": 60_000})
    here.engine.wait_for(3)


def test_how_far_the_prompt_is_read_is_told(house):
    """Once the pace is known."""
    here = house()
    here.engine.play(Pause(0.5), *chat_chunks("Hi"))
    here.ask(body_of(PATH, f"Pace {LONG}", stream=True)).result(10)
    first = here.ask(body_of(PATH, f"SLOW {LONG}", stream=True), client=here.other)
    here.engine.wait_for(2)
    second = here.ask(body_of(PATH, f"Next {LONG}", stream=True))
    here.waiting(1)
    threading.Timer(0.8, here.go.set).start()
    found = [int(number) for number in re.findall(r": reading your prompt, about (\d+) %\n", first.result(10)[1])]
    assert found and found == sorted(found) and set(found) <= set(range(0, 101, 10))
    assert ": queued 1\n" in second.result(10)[1]


def test_leaving_while_waiting_leaves_nothing(house):
    here = house()
    here.ask(body_of(PATH, f"SLOW {LONG}"))
    here.engine.wait_for(1)
    held = [here.other.open() for _ in range(5)]
    for number, connection in enumerate(held):
        connection.start("POST", PATH, {"model": here.model, **body_of(PATH, f"{number} {LONG}", stream=bool(number % 2))})
    here.waiting(5)
    for connection in held:
        connection.close()
    here.waiting(0)
    assert gauges(here.front)["sparks_active"] == 1 and len(here.engine.requests) == 1


def test_who_waits_too_long_learns_why(house):
    here = house(queue_timeout=0.5)
    here.ask(body_of(PATH, f"SLOW {LONG}"))
    here.engine.wait_for(1)
    status, text, headers = here.ask(body_of(PATH, f"Late {LONG}"), client=here.other).result(10)
    assert status == 503 and "long prompts are read one after the other" in text and int(headers["retry-after"]) > 0


def test_the_cluster_that_is_full_says_so(house):
    """Two conversations fill what the owner says of the cache; one of them runs."""
    here = house(queue_timeout=0.5, kv_tokens=35_000)
    here.engine.always(lambda request: [*[Wait(here.go)] * (b"SLOW" in request.body), Json(completion("Hi", prompt=len(request.body) // 4))])
    for name in ("One", "Two"):
        assert here.ask(body_of(PATH, f"{name} {LONG}")).result(10)[0] == 200
    here.ask(body_of(PATH, f"Two {LONG} SLOW"))
    here.engine.wait_for(3)
    status, text, _ = here.ask(body_of(PATH, f"Three {LONG}"), client=here.other).result(10)
    assert status == 503 and "memory is full of 2 conversations" in text


# ---- when a prompt has been read

@pytest.mark.parametrize("path", ROUTES)
def test_how_far_an_engine_says_it_is_is_no_first_token(house, path):
    """llama.cpp does so where the client asks for it: its events look like the first one of an answer."""
    here, read = house(), threading.Event()
    first, *rest = text_chunks("a", "b") if path == "/v1/completions" else llama_chunks("a b")
    chunk = json.loads(first.removeprefix(b"data: "))
    if path == "/v1/completions":
        chunk["choices"][0]["text"] = ""
    early = {**chunk, "prompt_progress": {"total": 16500, "cache": 0, "processed": 2048, "time_ms": 77}}
    here.engine.play(Head(), sse(early), Wait(read), first, *rest)
    one = here.ask(body_of(path, f"First {LONG}", stream=True, return_progress=True), path)
    here.engine.wait_for(1)
    other = here.ask(body_of(path, f"Second {LONG}", stream=True), path, here.other)
    here.waiting(1)
    assert here.ask(body_of(path, "Hello", stream=True), path).result(10)[0] == 200 and not other.done()
    read.set()
    assert one.result(10)[0] == other.result(10)[0] == 200 and '"error"' not in one.result()[1].replace('"error":null', "")
    assert ("prompt_progress" in one.result()[1]) == (path in (PATH, "/v1/completions"))


@pytest.mark.parametrize(("path", "off"), [(PATH, {"reasoning_effort": "none"}), ("/v1/messages", {"thinking": {"type": "disabled"}})])
@pytest.mark.parametrize("role", [True, False])
def test_what_is_held_back_of_an_answer_is_a_first_token(house, path, off, role):
    """It may be a thought of which nobody knows yet that it is one."""
    here, over = house(keepalive=15), threading.Event()
    events = chat_chunks("Well, is it a b c")[not role:]
    here.engine.play(Head(), *events[:2], Wait(over), *events[2:])
    first = here.ask({**body_of(path, f"First {LONG}", stream=True), **off}, path)
    here.engine.wait_for(1)
    assert here.ask(body_of(PATH, f"Second {LONG}", stream=True), client=here.other).result(10)[0] == 200
    over.set()
    assert "Well" in first.result(10)[1]


ENDS = {
    "refuses": (lambda first: [refusal(400, "no")], 400),
    "fails": (lambda first: [refusal(500, "no")], 500),
    "is full": (lambda first: [refusal(503, "no")], 503),
    "closes": (lambda first: [Head(), Close()], 502),
    "resets": (lambda first: [Head(), Reset()], 502),
    "dies": (lambda first: [Head(), died(), DONE], 500),
    "dies behind a beginning": (lambda first: [Head(), first, died(), DONE], None),
    "says nothing": (lambda first: [Head(), DONE], 502),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "end"), list(zip([*ROUTES] * 2, ENDS, strict=True)))
def test_an_engine_that_fails_lets_the_next_one_in(house, path, end, stream):
    here = house()
    script, status = ENDS[end]
    first = (text_chunks if path == "/v1/completions" else chat_chunks)("a b")[0]
    here.engine.play(Wait(here.go), *script(first))
    one = here.ask(body_of(path, f"First {LONG}", stream=stream), path)
    here.engine.wait_for(1)
    other = here.ask(body_of(path, f"Second {LONG}", stream=stream), path, here.other)
    here.waiting(1)
    here.go.set()
    assert other.result(10)[0] == 200
    assert one.result(10)[0] == status or status is None and "error" in one.result()[1]


@pytest.mark.parametrize(("path", "stream", "begun"), [(PATH, True, False), ("/v1/messages", False, False), ("/v1/completions", True, True), ("/v1/responses", True, True)])
def test_leaving_while_it_is_read_or_answered_lets_the_next_one_in(house, path, stream, begun):
    here = house()
    events = (text_chunks if path == "/v1/completions" else chat_chunks)("a b")
    here.engine.play(*[Head(), *events[:2]] * begun, Hang())
    connection = here.front.client().open()
    connection.start("POST", path, {"model": here.model, **body_of(path, f"First {LONG}", stream=stream)})
    here.engine.wait_for(1)
    other = begun or here.ask(body_of(path, f"Second {LONG}", stream=stream), path, here.other)
    here.waiting(0 if begun else 1)
    connection.close()
    assert begun or other.result(10)[0] == 200
    assert here.engine.requests[0].gone.wait(5)
    assert here.ask(body_of(path, f"Third {LONG}", stream=stream), path, here.other).result(10)[0] == 200


PICTURES = {
    PATH: lambda url: {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}] * 12}]},
    "/v1/messages": lambda url: {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}] * 12}]},
    "/v1/responses": lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}] * 12}]},
}


@pytest.mark.parametrize("path", PICTURES)
def test_a_conversation_about_pictures_is_not_heavy(house, path):
    """Of its images nothing is kept: at each turn all of them would count as not cached, if it counted them at all."""
    here = house()
    key = here.key("limited", "--tpm", "9000000")
    here.ask(body_of(PATH, f"SLOW {LONG}"), client=here.other)
    here.engine.wait_for(1)
    asked = {**ROUTES[path], **PICTURES[path](PNG)}
    assert here.ask(asked, path, key).result(10)[0] == here.ask({**asked, "stream": True}, path, key).result(10)[0] == 200


RAISES_ONCE = """
import gateway
from admission import Gate
usual = Gate.tick
def once(gate, now):
    Gate.tick = usual
    raise RuntimeError("once")
Gate.tick = once
"""


def test_a_look_at_those_that_wait_may_fail(engine, tmp_path, stock):
    """The rest of the key ends by the next one, which nothing else brings."""
    with started(engine, tmp_path, stock, RAISES_ONCE, heavy_prompt=4000, poll=60) as front, ThreadPool(3) as pool:
        front.traceback_allowed = True
        go, other = threading.Event(), front.client(front.add_key("other"))
        engine.play(Head(), *chat_chunks("a b")[:2], Wait(go), *chat_chunks("a b")[2:])
        running = pool.submit(lambda: text_of(other.post(PATH, {"messages": HELLO, "stream": True})))
        engine.wait_for(1)
        engine.play(Pause(0.3), *chat_chunks("Hi"))
        for name in ("One", "Two"):
            assert text_of(front.client().post(PATH, body_of(PATH, f"{name} {LONG}", stream=True)))
        go.set()
        assert running.result(10) and "a look at those that wait failed" in front.log


# ---- tokens put by

@pytest.mark.parametrize(("path", "limit"), list(zip(ROUTES, ["--tpm", "--tokens-per-day", "--tokens-per-month", "--tpm"], strict=True)))
def test_many_at_once_cannot_spend_a_budget_many_times(house, path, limit):
    here = house(max_active=20)
    key = here.key("limited", limit, "2000")
    asked = [here.ask(body_of(path, f"SLOW {n}", stream=n % 2 == 0, **{"max_output_tokens" if "responses" in path else "max_tokens": 900}), path, key) for n in range(8)]
    wait_until(lambda: sum(one.done() for one in asked) == 5, 5)
    refused = [one.result() for one in asked if one.done()]
    assert all(status == 429 and "running" in text and int(headers["retry-after"]) <= 5 for status, text, headers in refused)
    assert not any("x-should-retry" in headers for *_, headers in refused)   # SDKs are to try again, for it pays
    here.go.set()
    assert sorted(one.result(10)[0] for one in asked) == [200] * 3 + [429] * 5
    assert here.ask(body_of(path, "Hello"), path, key).result(10)[0] == 200      # for little was used


def test_what_a_long_answer_has_used_by_now_counts(house):
    here = house()
    key = here.key("limited", "--tokens-per-day", "1600")
    here.engine.play(Head(), *chat_chunks("a " * 1900, done=False)[:-1], Wait(here.go), *chat_chunks("b")[1:])
    stream = key.post(PATH, {"model": here.model, "messages": HELLO, "stream": True})
    events = stream.events()
    for _ in range(1700):
        next(events)
    time.sleep(0.6)                                     # the Gate is told every half second
    assert here.ask({"messages": HELLO}, client=key).result(10)[0] == 429
    stream.close()


def test_those_that_wait_are_refused_once_the_budget_is_used_up(house):
    here = house(max_active=1)
    key = here.key("limited", "--tokens-per-day", "5000")
    here.engine.play(Wait(here.go), Json(completion("Hello", usage={"prompt_tokens": 4000, "completion_tokens": 2000, "total_tokens": 6000})))
    asked = [here.ask({"messages": HELLO, "max_tokens": 9}, client=key)]
    here.engine.wait_for(1)
    asked += [here.ask({"messages": HELLO, "max_tokens": 9, "stream": stream}, client=key) for stream in (True, False)]
    here.waiting(2)
    here.go.set()
    assert asked[0].result(10)[0] == 200 and asked[2].result(10)[0] == 429
    assert "tokens today" in asked[1].result(10)[1] and len(here.engine.requests) == 1

