"""Heavy prompts, what is cached, and tokens that are put by, through the real server: the Gate's own chapter is tests/pure/test_gate_tokens.py."""
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.chat import HELLO, PATH, PNG, ROUTES
from support.engine import Head, Json, Pause, Wait, chat_chunks, completion, default_answer
from support.gateway import WITH_VECTORS
from support.observe import gauge, gauges, idle
from support.processes import wait_until

LONG = "All work and no play makes Jack a dull boy. " * 1500     # 66 kB: 16,500 tokens


def body_of(path, text, **more):
    """What a route is asked, with that text."""
    said = {"prompt": text} if path == "/v1/completions" else {"input": text} if path == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}
    return {**ROUTES[path], **said, **more}


class House:
    """A gateway whose engine keeps prompts that begin with SLOW from being answered until `go` is set."""

    def __init__(self, gateway, engine, **settings):
        self.engine, self.go = engine, threading.Event()
        engine.always(lambda request: [Wait(self.go), *default_answer(engine, request)] if b"SLOW" in request.body else default_answer(engine, request))
        self.front = gateway(**{"keepalive": 0.1, "heavy_prompt": 4000, **settings})
        self.other = self.front.client(self.front.add_key("other"))
        self.pool = ThreadPoolExecutor(8)

    def ask(self, body, path=PATH, client=None):
        """The answer, all of it, as soon as it is there."""
        def read():
            answer = (client or self.front.client()).post(path, body)
            return answer.status, answer.read_all().decode(), dict(answer.headers)
        return self.pool.submit(read)

    def waiting(self, count):
        wait_until(lambda: gauge(self.front, "sparks_queued") == count, 5)


@pytest.fixture
def house(gateway, engine):
    made = []

    def make(**settings):
        made.append(House(gateway, engine, **settings))
        return made[-1]

    yield make
    for one in made:
        one.go.set()
        one.pool.shutdown()
        idle(one.front)


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
    here.engine.embeds = True
    here.engine.always(lambda request: [Wait(here.go), *default_answer(here.engine, request)])
    asked = [here.ask({"model": "vectors", "input": [f"{n} {LONG}"] * 2}, "/v1/embeddings") for n in range(3)]
    here.engine.wait_for(3)
    here.go.set()
    assert [one.result(10)[0] for one in asked] == [200] * 3


def test_off_by_a_setting_and_by_a_reload(house):
    here = house(heavy_prompt=0, config="max_queued = 64\n")
    tickets = [here.ask(body_of(PATH, f"SLOW {n} {LONG}", stream=True)) for n in range(3)]
    here.engine.wait_for(3)
    here.go.set()
    assert [ticket.result(10)[0] for ticket in tickets] == [200] * 3


def test_a_reload_turns_it_on(house):
    here = house(heavy_prompt=None, config="heavy_prompt = 0\n")
    here.ask(body_of(PATH, f"SLOW 0 {LONG}"))
    here.ask(body_of(PATH, f"SLOW 1 {LONG}"))
    here.engine.wait_for(2)
    here.front.settings["config"].write_text("heavy_prompt = 4000\n")
    os.kill(here.front.pid, signal.SIGHUP)
    wait_until(lambda: "was read" in here.front.log, 5)
    here.ask(body_of(PATH, f"SLOW 2 {LONG}"))
    here.ask(body_of(PATH, f"SLOW 3 {LONG}"))
    here.waiting(1)


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
    assert ": queued 1\n" in second.result(10)[1] and int(second.result()[2].get("x-sparks-queue-ms", "-1")) >= -1


def test_leaving_while_waiting_leaves_nothing(house):
    here = house()
    here.ask(body_of(PATH, f"SLOW {LONG}"))
    here.engine.wait_for(1)
    held = [here.other.open() for _ in range(5)]
    for number, connection in enumerate(held):
        connection.start("POST", PATH, body_of(PATH, f"{number} {LONG}", stream=bool(number % 2)))
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


# ---- tokens put by

@pytest.mark.parametrize(("path", "limit"), list(zip(ROUTES, ["--tpm", "--tokens-per-day", "--tokens-per-month", "--tpm"], strict=True)))
def test_many_at_once_cannot_spend_a_budget_many_times(house, path, limit):
    here = house(max_active=20)
    here.front.keys("limit", "tester", limit, "2000")
    asked = [here.ask(body_of(path, f"SLOW {n}", stream=n % 2 == 0, **{"max_output_tokens" if "responses" in path else "max_tokens": 900}), path) for n in range(8)]
    wait_until(lambda: sum(one.done() for one in asked) == 5, 5)
    refused = [one.result() for one in asked if one.done()]
    assert all(status == 429 and "running" in text and int(headers["retry-after"]) <= 5 for status, text, headers in refused)
    here.go.set()
    assert sorted(one.result(10)[0] for one in asked) == [200] * 3 + [429] * 5
    assert here.ask(body_of(path, "Hello"), path).result(10)[0] == 200      # for little was used


def test_what_a_long_answer_has_used_by_now_counts(house):
    here = house()
    here.front.keys("limit", "tester", "--tokens-per-day", "4000")
    here.engine.play(Head(), *[chunk for n in range(50) for chunk in chat_chunks("a " * 100, done=False)[1:-1]][:4500], Wait(here.go), *chat_chunks("b")[1:])
    stream = here.front.client().post(PATH, {"messages": HELLO, "stream": True})
    events = stream.events()
    for _ in range(4400):
        next(events)
    assert here.ask({"messages": HELLO}).result(10)[0] == 429
    stream.close()


def test_those_that_wait_are_refused_once_the_budget_is_used_up(house):
    here = house(max_active=1)
    here.front.keys("limit", "tester", "--tokens-per-day", "5000")
    here.engine.play(Wait(here.go), Json(completion("Hello", usage={"prompt_tokens": 4000, "completion_tokens": 2000, "total_tokens": 6000})))
    asked = [here.ask({"messages": HELLO, "max_tokens": 9})]
    here.engine.wait_for(1)
    asked += [here.ask({"messages": HELLO, "max_tokens": 9, "stream": stream}) for stream in (True, False)]
    here.waiting(2)
    here.go.set()
    assert asked[0].result(10)[0] == 200 and asked[2].result(10)[0] == 429
    assert "tokens today" in asked[1].result(10)[1] and len(here.engine.requests) == 1
