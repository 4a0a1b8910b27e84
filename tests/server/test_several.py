"""Several engines for one model: one queue, who gets which request, one more try, and engines that come and go."""
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from support.engine import (
    MODELS,
    Close,
    Early,
    Engine,
    Hang,
    Head,
    Json,
    Pause,
    Reset,
    Wait,
    chat_chunks,
    completion,
    embeddings,
    llama_chunks,
    llama_completion,
    llama_refusal,
    refusal,
    sse,
)
from support.gateway import WITH_VECTORS, Gateway
from support.observe import gauges, idle
from support.processes import wait_until
from support.rows import read, row_of, rows

CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "Hello"}]
KINDS = ("vllm", "llama")
CHUNKS, WHOLE = {"vllm": chat_chunks, "llama": llama_chunks}, {"vllm": completion, "llama": llama_completion}


def tables(*engines):
    """The text of a sparks.toml: (engine, its other fields in TOML) or an engine alone."""
    pairs = [one if isinstance(one, tuple) else (one, "") for one in engines]
    return "".join(f'[[engines]]\nurl = "{engine.url}"\n{more}\n' for engine, more in pairs)


def two(stack, like):
    """Two engines of a kind with the same model."""
    both = [stack.enter_context(Engine()) for _ in range(2)]
    for engine in both:
        engine.like = like
    return both


@pytest.fixture(scope="module", params=KINDS)
def house(request, tmp_path_factory, stock):
    """A gateway in front of two engines of a kind, which have a second model that embeds."""
    with ExitStack() as stack:
        both = two(stack, request.param)
        gateway = Gateway(tmp_path_factory.mktemp("several"), None, stock, tables(*both) + WITH_VECTORS, poll=0.1, keepalive=0.2)
        stack.callback(gateway.kill)
        gateway.wait_alive().like = request.param
        yield gateway, both
        gateway.stop()
        gateway.check_log()


@pytest.fixture
def shared(house):
    """The same with nothing left of earlier tests."""
    gateway, both = house
    anew(gateway, both)
    yield house
    anew(gateway, both)


def anew(gateway, both):
    for engine in both:
        assert not engine.faults, engine.faults
        engine.reset()
        engine.like = gateway.like
        engine.on(EMBED, [Json(embeddings([0.5, 1.0]))])
        engine.start()
    idle(gateway)
    wait_until(lambda: all(is_in(gateway, engine, "up") for engine in both), 5)


@pytest.fixture
def pair():
    with ExitStack() as stack:
        both = two(stack, "vllm")
        yield both
        assert not [engine.faults for engine in both if engine.faults]


@pytest.fixture
def front(gateway, pair):
    """A function: another gateway in front of a pair of engines, with other settings, once it has seen them."""
    def start(config=None, **settings):
        started = gateway(" ", wait="alive", config=tables(*pair) if config is None else config, **settings)
        wait_until(lambda: all(is_in(started, engine, "up") for engine in pair), 10)
        return started
    return start


def is_in(front, engine, word):
    return gauges(front).get(f'sparks_engine_state{{engine="{engine.url}",state="{word}"}}') == 1


def reload(front, config):
    front.settings["config"].write_text(config)
    before = front.log.count("sparks.toml was read")
    os.kill(front.pid, signal.SIGHUP)
    wait_until(lambda: front.log.count("sparks.toml was read") > before, 5)


def ask(front, stream=False, path=CHAT, **fields):
    body = {"input": "Hello", "model": "vectors"} if path == EMBED else {"messages": HELLO, "stream": stream}
    return front.client().post(path, {**body, **fields})


def text_of(answer):
    """All that a stream says, which must be whole."""
    events = list(answer.events())
    assert events[-1].data == "[DONE]"
    choices = [event.json()["choices"] for event in events[:-1] if event.data]
    return "".join(choice[0]["delta"].get("content") or "" for choice in choices if choice)


def counts(pair):
    return [len(engine.requests) for engine in pair]


def says(like, text, stream):
    return CHUNKS[like](text) if stream else [Json(WHOLE[like](text))]


# ---- one queue

def test_one_queue_and_each_engine_its_slots(front, pair):
    start, (first, second) = front, pair
    front = start(tables((first, "slots = 1"), (second, "slots = 2")), keepalive=0.2)
    go = {engine: threading.Event() for engine in pair}
    for engine in pair:
        engine.always(lambda request, engine=engine: [Wait(go[engine]), *says(engine.like, "Hi", json.loads(request.body)["stream"])])
    assert [entry["id"] for entry in front.client().get("/v1/models").json()["data"]] == [MODELS[0]["id"]]
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(lambda n=n: text_of(ask(front, n % 2 == 0)) if n % 2 == 0 else ask(front).status) for n in range(5)]
        wait_until(lambda: counts(pair) == [1, 2] and gauges(front)["sparks_queued"] == 2, 5)
        assert (gauges(front)["sparks_slots"], gauges(front)["sparks_active"]) == (3, 3)
        go[first].set()                             # its slot is the others', one after the other
        wait_until(lambda: counts(pair) == [3, 2], 5)
        go[second].set()
        assert [one.result() for one in asked] == ["Hi", 200] * 2 + ["Hi"]
    assert Counter(row["engine"] for row in rows(front.db, "model <> ''")) == {first.url: 3, second.url: 2}


# ---- where a conversation goes on

SYSTEM = "You are a helpful assistant. " * 1000      # so long that it is cut out of large bodies
SYSTEM_PARTS = [{"type": "text", "text": SYSTEM}]


def chat(turns, stream):
    return CHAT, {"messages": [{"role": "system", "content": SYSTEM}, *turns], "stream": stream}


def messages(turns, stream):
    return "/v1/messages", {"system": SYSTEM_PARTS, "messages": turns, "max_tokens": 9, "stream": stream}


def responses(turns, stream):
    return "/v1/responses", {"instructions": SYSTEM, "input": [{"role": "user", "content": "environment"}, *turns], "stream": stream}


def completions(turns, stream):
    return "/v1/completions", {"prompt": "\n".join(f"{turn['role']}: {turn['content']}" for turn in turns), "stream": stream}


@pytest.mark.parametrize("api", [chat, messages, responses, completions], ids=lambda api: api.__name__)
def test_a_conversation_goes_on_where_it_ran(shared, api):
    """Also where its turns are streamed and plain, small and large, and all conversations have one system prompt."""
    (front, pair), went = shared, []
    said = {n: [{"role": "user", "content": f"{n} is the question. " + "More of it. " * (30 + n * 400)}] for n in range(5)}
    for turn in range(4):
        for n, turns in said.items():
            before = counts(pair)
            path, body = api(turns, turn % 2 == 1)
            answer = front.client().post(path, body)
            assert answer.status == 200 and answer.read_all()
            went.append((n, [now - then for now, then in zip(counts(pair), before, strict=True)].index(1)))
            turns += [{"role": "assistant", "content": f"Answer {turn}. " * 2000}, {"role": "user", "content": f"And then? {turn}"}]
    homes = {n: {engine for number, engine in went if number == n} for n in said}
    assert all(len(home) == 1 for home in homes.values()), homes
    assert len(set.union(*homes.values())) == 2


def test_a_conversation_moves_on_from_an_engine_that_is_full_or_gone(front, pair):
    start, (first, second) = front, pair
    front = start(tables((first, "slots = 1"), (second, "slots = 1")))
    assert ask(front).status == ask(front).status == 200 and counts(pair) == [2, 0]
    first.play(Hang())
    with front.client().open() as other:
        other.start("POST", CHAT, {"messages": HELLO})
        first.wait_for(3)                           # its home, which is full now
        assert ask(front).status == 200 and counts(pair) == [3, 1]
    idle(front)
    assert ask(front).status == 200 and counts(pair) == [3, 2]      # where it ran last
    second.stop()
    wait_until(lambda: is_in(front, second, "off"), 5)
    assert ask(front).status == 200 and counts(pair) == [4, 2]
    second.start()


# ---- one more try

def busy(like):
    """A 503 of a full queue, as the kind says it."""
    if like == "llama":
        return llama_refusal(503, "Loading model", "unavailable_error")
    return refusal(503, "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance.",
                   "ServiceUnavailableError")


class Die:
    """Close without an answer, and listen no more."""

    def run(self, c):
        listener, c.engine.listener = c.engine.listener, None
        listener.shutdown(socket.SHUT_RDWR)
        c.engine.acceptor.join(5)
        listener.close()
        c.close()


TOO_MANY = Json({"error": {"message": "Too many requests", "type": "TooManyRequests", "param": None, "code": 429}}, 429, {"retry-after": "7"})
NOT_BEGUN = {
    "full or loading": lambda engine: engine.play(busy(engine.like)),
    "a proxy's page": lambda engine: engine.play(Head(503, type="text/plain"), b"no healthy upstream"),
    "too many": lambda engine: engine.play(TOO_MANY),
    "another key": lambda engine: engine.play(Json({"error": "Unauthorized"}, 401)),
    "another model": lambda engine: engine.play(refusal(404, "The model `it` does not exist.", "NotFoundError")),
    "refused": lambda engine: engine.stop(),
    "stale": lambda engine: engine.play(Die()),     # it dies in the moment in which a connection is used again
}
BEGUN = {
    "fails": [refusal(500, "EngineCore encountered an issue.", "InternalServerError")],
    "asks to retry": [refusal(503, "Request failed; please retry", "ServiceUnavailableError")],
    "closes": [Pause(0.3), Close()],
    "resets": [Pause(0.3), Reset()],
    "closes behind the head": [Head(), Pause(0.1), Close()],
    "fails in its stream": [Head(), sse({"error": {"message": "The request queue is full", "code": 503}})],
}
LARGE = {"messages": [{"role": "user", "content": "x" * 300_000}]}


def next_of(pair, front, *args, **fields):
    """(the engine that gets such a request next, the other one), known from one that was answered."""
    before = counts(pair)
    assert ask(front, *args, **fields).read_all()
    first = counts(pair)[0] > before[0]
    if args[1:] == (EMBED,):                        # there is no conversation: they take turns
        first = not first
    return pair if first else pair[::-1]


@pytest.mark.parametrize("how", NOT_BEGUN)
def test_what_an_engine_has_not_begun_another_one_does(shared, subtests, how):
    """Whatever is refused before the work goes once to the other engine, and nobody notices."""
    front, pair = shared
    for what, args, fields in (("plain", (False,), {}), ("stream", (True,), {}), ("large", (False,), LARGE),
                               ("large stream", (True,), LARGE), ("embeddings", (False, EMBED), {})):
        with subtests.test(what):
            first, second = next_of(pair, front, *args, **fields)
            before = counts((first, second))
            if how != "refused":
                first.on(EMBED, None)
            NOT_BEGUN[how](first)
            answer = ask(front, *args, **fields)
            assert answer.status == 200 and answer.read_all()
            assert counts((first, second)) == [before[0] + (how != "refused"), before[1] + 1]
            row = row_of(front.db, answer.headers["x-request-id"])
            assert (row["engine"], row["status"], row["error"]) == (second.url, 200, None)
            assert second.requests[-1].body
        anew(front, pair)


def test_a_request_that_an_engine_has_not_taken_goes_to_another_one(shared):
    """It closes before it could have read all of it, on a new connection too."""
    front, pair = shared
    first, second = next_of(pair, front)
    before = counts((first, second))
    body = {"messages": [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "x" * 30_000_000}]}
    for _ in range(2):
        first.play(Early(), Close())
    assert front.client().post(CHAT, body).status == 200
    assert counts((first, second)) == [before[0] + 2, before[1] + 1] and len(second.requests[-1].body) > 30_000_000


def test_an_engine_that_refuses_is_off_at_once(front, pair):
    front = front(poll=30)
    pair[0].stop()
    assert ask(front).status == 200 and is_in(front, pair[0], "off")
    pair[0].start()


@pytest.mark.parametrize("how", BEGUN)
def test_what_an_engine_may_have_begun_is_never_done_twice(shared, subtests, how):
    front, pair = shared
    for stream in (False, True):
        with subtests.test(stream=stream):
            first, second = next_of(pair, front, stream)
            before = counts((first, second))
            first.play(*BEGUN[how])
            answer = ask(front, stream)
            if answer.status == 200:                # a sign of life has gone
                code = [event for event in answer.events() if event.data][-1].json()["error"]["code"]
            else:
                code = answer.json()["error"]["code"]
            assert code in ("upstream_error", "model_unavailable")
            assert counts((first, second)) == [before[0] + 1, before[1]]
            assert row_of(front.db, answer.headers["x-request-id"])["engine"] == first.url


def test_the_connection_of_a_request_that_went_on_serves_again(shared):
    front, (first, _) = shared
    first.always([TOO_MANY])
    for n in range(5):                              # they take turns, so that each comes here first
        answer = ask(front, n % 2 == 0, messages=[{"role": "user", "content": str(n)}])
        assert answer.status == 200 and answer.read_all()
    assert len(first.requests) >= 4 and len({request.connection for request in first.requests}) == 1


def test_one_more_try_is_the_last(front, pair):
    with Engine() as third:
        third.like = pair[0].like
        front = front(tables(*pair, third), poll=30)
        for engine in (*pair, third):
            engine.always([busy(engine.like)])
        for number, stream in enumerate((False, True), 1):
            answer = ask(front, stream)
            assert answer.status == 503 and answer.json()["error"]["code"] == "model_unavailable" and answer.headers["retry-after"]
            assert sum(counts((*pair, third))) == 2 * number
        idle(front)


def test_the_count_of_a_prompt_holds_for_the_other_engine(shared):
    """An engine that is asked counts once, and whoever leaves in the middle is charged by that."""
    front, pair = shared
    first, second = next_of(pair, front)
    for engine in pair:
        counted = {"count": 777} if engine.like == "vllm" else {"tokens": [1] * 777}
        engine.on("/tokenize", [Json(counted)])
    first.play(Pause(0.2), busy(first.like))
    second.play(Head(), *CHUNKS[second.like]("a b")[:2], Hang())
    with front.client().open() as connection:
        connection.start("POST", "/v1/messages", {"messages": HELLO, "max_tokens": 9, "stream": True})
        answer = connection.answer()
        begun = next(event for event in answer.events() if event.name == "message_start").json()
    row = row_of(front.db, answer.headers["x-request-id"])
    assert begun["message"]["usage"]["input_tokens"] == row["prompt_tokens"] == 777
    assert (row["engine"], row["aborted"]) == (second.url, 1)


def test_where_no_other_engine_serves_its_own_word_counts(shared):
    """At once: nobody waits for one that is off."""
    front, pair = shared
    pair[1].stop()
    wait_until(lambda: is_in(front, pair[1], "off"), 5)
    for stream in (False, True):
        pair[0].play(TOO_MANY)
        answer = ask(front, stream)
        assert (answer.status, answer.json()["error"]["code"], answer.headers["retry-after"]) == (429, "rate_limit_exceeded", "7")


def test_it_waits_in_front_for_the_other_engine(front, pair):
    """With signs of life; and its body is there when its turn comes."""
    start, (first, second) = front, pair
    front = start(tables((first, "slots = 1"), (second, "slots = 1")), keepalive=0.1, poll=30)
    go = threading.Event()
    loading, done = threading.Event(), says(first.like, "Hi", True)
    first.play(Wait(loading), busy(first.like))
    second.play(Wait(go), *done)
    with ThreadPoolExecutor(3) as pool:
        mine = pool.submit(ask, front, True, messages=[{"role": "user", "content": "x" * 200_000}])
        first.wait_for(1)
        others = [pool.submit(lambda: text_of(ask(front, True)))]
        second.wait_for(1)
        first.play(Wait(go), *done)
        others.append(pool.submit(lambda: text_of(ask(front, True))))
        wait_until(lambda: gauges(front)["sparks_queued"] == 1, 5)
        loading.set()
        wait_until(lambda: (len(first.requests), gauges(front)["sparks_queued"]) == (2, 1), 5)      # the other took its slot
        events = mine.result().events()
        assert next(event for event in events if (event.comment or "").startswith("queued 1"))
        go.set()
        assert list(events)[-1].data == "[DONE]"
        assert [one.result() for one in others] == ["Hi", "Hi"]
    assert second.requests[1].json()["messages"][0]["content"] == "x" * 200_000


def test_nobody_waits_where_nobody_serves(front, pair):
    """Those in the queue are told as soon as the last engine has gone."""
    front = front(tables(*((engine, "slots = 1") for engine in pair)), keepalive=60)
    for engine in pair:
        engine.always([Head(), Hang()])
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, front, n % 2 == 0) for n in range(6)]
        wait_until(lambda: gauges(front)["sparks_queued"] == 4, 5)
        for engine in pair:
            engine.wait_for(1)
        for engine in pair:
            engine.stop()
        begun = time.monotonic()
        answers = [one.result() for one in asked]
        assert time.monotonic() - begun < 10
    codes = Counter((answer.status, answer.json()["error"]["code"]) for answer in answers)
    assert sum(codes.values()) == 6 and codes[503, "model_unavailable"] >= 4        # the other one may die first, or later
    assert codes.keys() <= {(503, "model_unavailable"), (502, "upstream_error")}
    idle(front)
    for engine in pair:
        engine.reset()
        engine.start()


def test_a_request_is_held_until_its_answer_has_begun(front, pair):
    """Not for longer: its memory is for others then."""
    first, front = pair[0], front(max_body="1 MB", max_bodies="1 MB")
    large = [{"role": "user", "content": "x" * 600_000}]
    go, loading = threading.Event(), threading.Event()
    first.play(Wait(loading), Head(), CHUNKS[first.like]("a b")[0], Wait(go), *CHUNKS[first.like]("a b")[1:])
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, front, True, messages=large)
        first.wait_for(1)
        assert ask(front, messages=large).status == 503
        loading.set()
        running = running.result()
    assert ask(front, messages=large).status == 200
    go.set()
    assert text_of(running) == "a b"


def test_a_count_is_asked_of_an_engine_that_serves(shared):
    front, pair = shared
    body = {"model": MODELS[0]["id"], "messages": HELLO}
    pair[0].stop()
    wait_until(lambda: is_in(front, pair[0], "off"), 5)
    assert front.client().post("/v1/messages/count_tokens", body).status == 200
    assert any(probe.path in ("/tokenize", "/apply-template") for probe in pair[1].probes)


# ---- one of two dies

def test_killing_one_of_two_loses_only_what_had_begun_to_stream_there(shared):
    """Under load: 24 at once, for 8 + 8 slots. Who had read something of the dead engine's is told so; all others are served."""
    (front, pair), (victim, _) = shared, shared[1]
    over, met, lock = threading.Event(), [], threading.Lock()

    def answer(request):
        return [step for event in CHUNKS[victim.like]("a b c d e f") for step in (event, Pause(0.03))]

    for engine in pair:
        engine.always(answer)

    def client(n):
        while not over.is_set():
            answer = ask(front, True, messages=[{"role": "user", "content": str(n)}])
            last = answer
            if answer.status == 200:
                last = [event for event in answer.events() if event.data][-1]
                assert answer.complete
            found = "whole" if answer.status == 200 and last.data == "[DONE]" else last.json()["error"]["code"]
            with lock:
                met.append((found, answer.headers["x-request-id"]))

    with ThreadPoolExecutor(24) as pool:
        clients = [pool.submit(client, n) for n in range(24)]
        wait_until(lambda: len(met) > 48, 20)
        victim.stop()
        since = len(met)
        wait_until(lambda: len(met) > since + 72, 20)
        victim.start()
        back = len(victim.requests)
        wait_until(lambda: len(victim.requests) > back + 8, 20)
        over.set()
        for one in clients:
            one.result()
    lost = [(found, ident) for found, ident in met if found != "whole"]
    assert 0 < len(lost) <= 8                       # its slots
    for found, ident in lost:
        assert found == "upstream_error"            # it had begun, or perhaps: it was sent there, and no answer came
        assert row_of(front.db, ident)["engine"] == victim.url
    idle(front)


WAITS = {
    "before its head": [Hang()],
    "behind its head": [Head(), Hang()],
    "behind comments": [Head(), b": keep-alive\n\n" * 3, Hang()],
    "plain, in the middle": [Head(headers={"Content-Type": "application/json"}), b'{"id": "chatcmpl-1", "choices": [', Hang()],
}


@pytest.mark.parametrize("how", WAITS)
def test_what_a_dead_engine_had_not_begun_to_answer_the_other_one_does(shared, how):
    """It cannot be going on any more. On every route; whoever waits may have had signs of life."""
    front, pair = shared
    ways = [(api, stream) for api in (chat, completions, messages, responses) for stream in (False, True)]    # some engines stream nothing

    def send(number):
        api, stream = ways[number]
        path, body = api([{"role": "user", "content": f"{number} is the question {how}"}], stream)
        return front.client().post(path, body)

    victim, stays = pair[::-1]
    victim.always(WAITS[how])
    with ThreadPoolExecutor(len(ways)) as pool:
        asked = [pool.submit(send, number) for number in range(len(ways))]
        wait_until(lambda: sum(counts(pair)) == len(ways), 10)
        sent = counts(pair)[1]
        time.sleep(0.3)                             # signs of life go out
        victim.stop()
        answers = [answer.result() for answer in asked]
        for answer in answers:
            assert answer.status == 200 and b'"error":{' not in answer.read_all() and answer.complete
    assert sent and counts(pair) == [len(ways), sent]
    assert {(row["status"], row["engine"]) for row in rows(front.db)[-len(ways):]} == {(200, stays.url)}


def test_the_time_at_a_dead_engine_was_no_waiting_in_the_queue(front, pair):
    """Though it was longer than anybody may wait there."""
    front, (first, second) = front(tables(*((engine, "slots = 1") for engine in pair)), queue_timeout=1), pair
    go = threading.Event()
    first.play(Hang())
    second.play(Wait(go), *says("vllm", "Hi", False))
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(ask, front) for _ in range(2)]
        wait_until(lambda: counts(pair) == [1, 1], 5)
        time.sleep(1.1)
        first.stop()
        wait_until(lambda: gauges(front)["sparks_queued"] == 1 or asked[0].done() or asked[1].done(), 5)
        go.set()
        assert [one.result().status for one in asked] == [200, 200]


# ---- engines come and go

def test_drain(front, pair):
    start, (first, second) = front, pair
    front = start(poll=30)
    go = threading.Event()
    first.play(Head(), CHUNKS[first.like]("a b")[0], Wait(go), *CHUNKS[first.like]("a b")[1:])
    running, looks = ask(front, True), len(first.probes)
    reload(front, tables((first, "drain = true"), second))
    wait_until(lambda: is_in(front, first, "draining") and len(first.probes) > looks, 5)
    assert all(ask(front, messages=[{"role": "user", "content": str(n)}]).status == 200 for n in range(4))
    assert counts(pair) == [1, 4] and "is drained" not in front.log
    go.set()
    assert text_of(running) == "a b"
    wait_until(lambda: f"engine {first.url} is drained: nothing runs there any more" in front.log, 5)
    first.stop()                                    # it may go, and come back
    first.start()
    reload(front, tables((first, "drain = false"), second))
    wait_until(lambda: is_in(front, first, "up"), 5)
    assert {ask(front, messages=[{"role": "user", "content": f"new {n}"}]).status for n in range(4)} == {200}
    assert counts(pair)[0] > 1


def test_what_a_reload_says_of_an_engine_holds_at_once(front, pair):
    """Its key, too; and of one where nothing runs, that it is drained."""
    start, (first, second) = front, pair
    front = start(poll=30)
    second.key = "another"
    reload(front, tables((first, "drain = true"), (second, 'key = "wrong"')))
    wait_until(lambda: f"engine {first.url} is drained: nothing runs there any more" in front.log, 5)
    wait_until(lambda: any(probe.header("authorization") == "Bearer wrong" for probe in second.probes), 5)
    reload(front, tables(first, (second, 'key = "another"')))
    wait_until(lambda: any(probe.header("authorization") == "Bearer another" for probe in second.probes), 5)
    assert {ask(front, messages=[{"role": "user", "content": str(n)}]).status for n in range(4)} == {200} and all(counts(pair))


def test_when_all_drain(front, pair):
    """Nobody is let in, and those that wait are told."""
    front = front(tables(*((engine, "slots = 1") for engine in pair)))
    go = threading.Event()
    for engine in pair:
        engine.always([Wait(go), *says(engine.like, "Hi", False)])
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, front) for _ in range(3)]
        wait_until(lambda: gauges(front)["sparks_queued"] == 1, 5)
        reload(front, tables(*((engine, "slots = 1\ndrain = true") for engine in pair)))
        wait_until(lambda: gauges(front)["sparks_queued"] == 0, 5)
        answer = ask(front)
        assert (answer.status, answer.json()["error"]["code"]) == (503, "model_unavailable") and answer.headers["retry-after"]
        go.set()
        assert sorted(one.result().status for one in asked) == [200, 200, 503]


def test_engines_come_and_go_while_it_runs(front, pair):
    """What runs at one that the settings name no more ends there; one that comes is looked at at once, by its own key."""
    start, (first, second) = front, pair
    front = start(poll=30)
    with Engine() as third:
        third.like, third.key = first.like, "its-own"
        first.idle, go = None, threading.Event()
        assert ask(front).status == 200             # a connection that may serve again
        first.requests.clear()
        first.play(Head(), CHUNKS[first.like]("a b")[0], Wait(go), *CHUNKS[first.like]("a b")[1:])
        running = ask(front, True)
        assert len(first.requests) == 1
        reload(front, tables(second, (third, 'key = "its-own"\nweight = 5')))
        wait_until(lambda: is_in(front, third, "up"), 5)
        assert all(ask(front, messages=[{"role": "user", "content": str(n)}]).status == 200 for n in range(4))
        assert counts((first, second, third)) == [1, 0, 4]
        go.set()
        assert text_of(running) == "a b"
        wait_until(lambda: f"engine {first.url} is drained" in front.log, 5)
        wait_until(lambda: not first.threads, 5)    # nothing keeps it
        assert first.url not in front.client(key=False).get("/metrics").read_all().decode()
        looks = len(first.probes)
        reload(front, tables(first, second))        # and back
        wait_until(lambda: len(first.probes) > looks and is_in(front, first, "up"), 5)
        assert all(ask(front, messages=[{"role": "user", "content": f"new {n}"}]).status == 200 for n in range(4))
        assert counts((first, third)) != [1, 4] and len(third.requests) == 4 and not third.faults


def test_the_first_engine_is_off_when_the_gateway_starts(front, pair):
    """Its models are known from before: an equal engine serves them, and one with another model does not stand in."""
    front = front()
    wait_until(lambda: [state["word"] for state in read(front.db, "SELECT word FROM engine")] == ["up"] * 2, 5)
    front.stop()
    pair[0].stop()
    front.launch()
    front.wait_alive()
    wait_until(lambda: is_in(front, pair[1], "up"), 10)
    for path, body in (chat(HELLO, False), messages(HELLO, True), responses(HELLO, False), completions(HELLO, True)):
        for named in ({}, {"model": "claude-opus-4-5"}):
            answer = front.client().post(path, {**body, **named})
            assert answer.status == 200 and answer.read_all()
    front.stop()
    pair[1].on("/v1/models", [Json({"object": "list", "data": [{**MODELS[0], "id": "small"}]})])
    pair[1].on(CHAT, [Json(completion("Hi"))])
    front.launch()
    front.wait_alive()
    wait_until(lambda: is_in(front, pair[1], "up"), 10)
    assert ask(front).status == 503
    assert ask(front, model="small").status == 200
    assert [entry["id"] for entry in front.client().get("/v1/models").json()["data"]] == ["small"]
    pair[0].start()
    wait_until(lambda: ask(front).status == 200, 5)


def test_an_engine_that_takes_another_ones_place(front, pair):
    """Requests that come before it has been looked at wait for that, whether the other one drains or is gone."""
    start, (first, second) = front, pair
    front = start(tables(first, second), poll=30)
    for config in ("{0}drain = true\n{1}", "{1}"):
        with Engine() as third:
            third.like = first.like
            third.on("/health", [Pause(0.3), Json({})])
            reload(front, config.format(tables(first), tables(third)))
            assert [ask(front, stream).status for stream in (True, False)] == [200, 200]
            assert len(third.requests) == 2
            reload(front, tables(first, second))
            wait_until(lambda: is_in(front, first, "up") and is_in(front, second, "up"), 5)


def test_one_that_comes_and_goes_and_comes_again_is_waited_for(front, pair):
    """Though it was known when the settings named it again, it has not been looked at."""
    start, (first, second) = front, pair
    front, go = start(poll=30), threading.Event()
    with Engine() as third, ThreadPoolExecutor(1) as pool:
        third.models = [{**MODELS[0], "id": "other"}]
        third.on("/health", lambda request: [Wait(go), Json({})])
        for engines in ((first, second, third), (first, second), (first, second, third)):
            looks = len(first.probes)
            reload(front, tables(*engines))
            wait_until(lambda looks=looks: len(first.probes) > looks, 5)
        asked = pool.submit(ask, front, model="other")
        time.sleep(0.3)
        go.set()
        assert asked.result().status == 200


def test_those_that_wait_go_to_the_engine_that_takes_anothers_place(front, pair):
    """Though it has not been looked at when the other one drains."""
    start, (first, second) = front, pair
    front, go = start(tables((first, "slots = 1"), (second, "slots = 1")), poll=30), threading.Event()
    for engine in pair:
        engine.always(lambda request: [Wait(go), *says("vllm", "Hi", False)])
    with Engine() as third, ThreadPoolExecutor(4) as pool:
        third.on("/health", [Pause(0.3), Json({})])
        asked = [pool.submit(lambda: ask(front).status) for _ in range(4)]
        wait_until(lambda: gauges(front)["sparks_queued"] == 2, 5)
        reload(front, tables((first, "drain = true"), (second, "drain = true"), third))
        third.wait_for(2)
        go.set()
        assert [one.result() for one in asked] == [200] * 4


def test_slots_and_weight_by_reload(front, pair):
    start, (first, second) = front, pair
    front = start(tables((first, "slots = 1"), (second, "slots = 1")), poll=30)
    for engine in pair:
        engine.always([Head(), Hang()])
    connections = [front.client().open() for _ in range(8)]
    for number, connection in enumerate(connections):
        connection.start("POST", CHAT, {"messages": [{"role": "user", "content": str(number)}], "stream": True})
    wait_until(lambda: gauges(front)["sparks_queued"] == 6, 5)
    reload(front, tables((first, "slots = 2\nweight = 3"), (second, "slots = 5")))
    wait_until(lambda: (gauges(front)["sparks_slots"], gauges(front)["sparks_queued"]) == (7, 1), 5)    # those that wait have them at once
    wait_until(lambda: counts(pair) == [2, 5], 5)
    for connection in connections:
        connection.close()
    idle(front)
