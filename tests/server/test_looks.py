"""What looks at engines find: no healthy one is ever off, whatever it does with connections, and what it loads on demand is there."""
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest

from support.chat import HELLO, ROUTES
from support.chat import PATH as CHAT
from support.engine import (
    DONE,
    MODELS,
    Close,
    Connection,
    Dribble,
    Engine,
    Gone,
    Hang,
    Head,
    Json,
    Pause,
    Reset,
    Stopped,
    Wait,
    chat_chunks,
    compact,
    completion,
    died,
    llama_refusal,
    probe_answer,
    refusal,
    router_models,
    swap_models,
    text_chunks,
    vllm_models,
)
from support.gateway import started
from support.processes import wait_until
from support.rows import row_of

MODEL = MODELS[0]["id"]
HEALTH, LISTED = "/health", "/v1/models"
TEXT = "/v1/completions"


def listed(front):
    return [entry["id"] for entry in front.client().get(LISTED).json()["data"]]


def ask(front, **fields):
    return front.client().post(CHAT, {"messages": HELLO, **fields})


# ---- engines that are well, each in its own way

QUICK = "from engines import engine\nengine.LOOK_TIMEOUT = 0.3"     # seconds that a look waits, where ten are usual
POLL = 0.2


class OneByOne(Engine):
    """It has one thread: who connects waits until the one before has been answered, and its connection is closed."""

    current = None

    def _take(self, sock):
        self.before()
        self.connections += 1
        self.current = Connection(self, sock, self.connections)
        with suppress(OSError, Gone, Stopped):
            self.current.serve()
        sock.close()

    def before(self):
        """What it does before it looks at a connection."""

    def stop(self):
        self.stopping = True
        if self.current:
            with suppress(OSError):
                self.current.sock.shutdown(socket.SHUT_RDWR)
        super().stop()


class SlowToAccept(OneByOne):
    def before(self):
        time.sleep(0.1)


class Narrow(OneByOne):
    """Nobody but the next one can even wait for it."""

    def start(self):
        super().start()
        self.listener.listen(0)


def as_it_is(engine):
    """Nothing is to be set up."""


def closes(seconds):
    def set_up(engine):
        engine.idle = seconds
    return set_up


def looks_end_with(path, *steps):
    """How it answers looks once it has been seen."""
    def set_up(engine):
        engine.on(path, list(steps))
    return set_up


def now_and_then(path, *steps):
    """Every third look goes wrong in this way, and every third one in another."""
    def set_up(engine):
        engine.on(path, lambda request: [list(steps), [Reset()], None][len(engine.probes) // 2 % 3])
    return set_up


def speaks_old(engine):
    """HTTP/1.0: no chunks, no length, the connection's end says that it was all."""
    def answer(request):
        head = Head(version="1.0", framing="close", type="application/json")
        if request.path == LISTED:
            return [head, compact(vllm_models(engine.models))]
        if request.path == HEALTH:
            return [head]
        if b'"stream":true' in request.body:
            return [Head(version="1.0", framing="close"), *chat_chunks("Hello", usage=True)]
        return [head, compact(completion("Hello"))]
    for path in (HEALTH, LISTED):
        engine.on(path, answer)
    engine.always(answer)


WELL = {  # what kind of engine -> how it is set up once it has been seen
    "closes idle connections before the next look": (Engine, closes(POLL / 2)),
    "closes them at the next look": (Engine, closes(POLL)),
    "closes them after it": (Engine, closes(POLL * 1.5)),
    "closes each at once": (Engine, closes(0)),
    "does not answer /health": (Engine, looks_end_with(HEALTH, Hang())),
    "does not list its models": (Engine, looks_end_with(LISTED, Hang())),
    "drips its list": (Engine, looks_end_with(LISTED, Head(), Dribble(b" " * 1000, 1, 0.02))),
    "closes looks": (Engine, looks_end_with(HEALTH, Close())),
    "resets looks": (Engine, looks_end_with(HEALTH, Reset())),
    "resets its list": (Engine, looks_end_with(LISTED, Reset())),
    "breaks its list off": (Engine, looks_end_with(LISTED, Head(framing=500), b'{"data": [', Close())),
    "is slow now and closes then": (Engine, now_and_then(HEALTH, Hang())),
    "speaks HTTP/1.0": (Engine, speaks_old),
    "has one thread": (OneByOne, as_it_is),
    "is slow to accept": (SlowToAccept, as_it_is),
    "has no queue": (Narrow, as_it_is),
}


def test_healthy_engines_are_never_off(stock, tmp_path, subtests):
    """Each has its model, and serves it: with nobody's requests on it, with short ones, and with a stream that is longer than a look
    waits."""
    with ExitStack() as stack:
        engines = {name: stack.enter_context(kind()) for name, (kind, _) in WELL.items()}
        for name, engine in engines.items():
            engine.models = [{"id": name}]
        urls = SimpleNamespace(url=",".join(engine.url for engine in engines.values()))
        front = stack.enter_context(started(urls, tmp_path, stock, QUICK, poll=POLL, max_active=4))
        wait_until(lambda: listed(front) == list(WELL), 10)
        for name, engine in engines.items():
            WELL[name][1](engine)
        until = time.monotonic() + 3.5
        with ThreadPoolExecutor(len(WELL) + 1) as pool:
            served = {name: pool.submit(serve, front, engine, name, until) for name, engine in engines.items()}
            lists = pool.submit(lists_until, front, until)
            for name in WELL:
                with subtests.test(name):
                    assert served[name].result() > 1
                    assert f"engine {engines[name].url} is off" not in front.log and not engines[name].faults
        assert lists.result() == [list(WELL)], front.log
        told = front.log.partition(f"models loaded: {', '.join(WELL)}")[2]
        for bad in (" is off", " is misconfigured", " is loading: ", "models loaded: "):
            assert bad not in told, told


def lists_until(front, until):
    """The lists of models that people see meanwhile, without repetitions."""
    seen = []
    while time.monotonic() < until:
        now = listed(front)
        if now not in seen:
            seen.append(now)
        time.sleep(0.02)
    return seen


def serve(front, engine, name, until):
    """Ask for the model until then, with pauses: how many answers there were. All of them have to be whole."""
    begun, count = time.monotonic(), 0
    old_form = [Head(version="1.0", framing="close")] if name == "speaks HTTP/1.0" else []
    engine.play(*old_form, *(step for event in chat_chunks("Hello there my friend") for step in (Pause(0.2), event)))
    while time.monotonic() < until:
        answer = ask(front, model=name, stream=count % 2 == 0)
        said = answer.read_all()
        assert answer.status == 200 and b"Hello" in said and (b"[DONE]" in said or count % 2), (answer.status, said)
        count += 1
        # Some come before an idle connection is closed, some in that moment, some after it.
        time.sleep([0.02, POLL / 2, POLL, POLL * 1.5][count % 4] if time.monotonic() < begun + 3 else 0.01)
    return count


def test_an_engine_that_freezes_is_busy(stock, tmp_path, engine):
    """Whoever asks meanwhile waits, as its streams do; nobody is turned away."""
    thawed = threading.Event()
    with started(engine, tmp_path, stock, QUICK, poll=POLL) as front:
        first, second, *rest = chat_chunks("Hello there")
        engine.play(first, second, Wait(thawed), *rest)
        stream = ask(front, stream=True)
        events = stream.events()
        assert next(events).json() and next(events).json()
        for path in (HEALTH, LISTED):
            engine.on(path, lambda request: [Wait(thawed), *probe_answer(engine, request)])
        engine.always(lambda request: [Wait(thawed), Json(completion("Hello"))])
        wait_until(lambda: f"engine {engine.url} is busy: it has not answered" in front.log, 10)
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(lambda: (answer := ask(front)).status or answer.read_all()) for _ in range(3)]
            until = time.monotonic() + 1             # several looks
            assert lists_until(front, until) == [[MODEL]]
            thawed.set()
            assert [one.result() for one in waiting] == [200] * 3
        assert list(events)[-1].data == "[DONE]"
        wait_until(lambda: front.log.rstrip().splitlines() and f"engine {engine.url} is up" in front.log.partition("is busy")[2], 10)
        assert " is off" not in front.log and "none" not in front.log


def test_an_engine_that_starts_again(gateway, engine):
    """Between two looks nobody notices; else it is off only while nobody listens, whatever `poll` is."""
    front = gateway(poll=30)
    for _ in range(3):
        assert ask(front).status == 200             # and its connection stays for the next one
        engine.stop()
        engine.start()
        assert ask(front).status == 200
    engine.stop()
    assert [ask(front).status for _ in range(3)] == [503] * 3
    wait_until(lambda: listed(front) == [], 2)
    time.sleep(1)
    assert ask(front).status == 503
    engine.start()
    begun = time.monotonic()
    while ask(front).status == 503:
        assert time.monotonic() - begun < 5
        time.sleep(0.02)
    assert listed(front) == [MODEL]


@pytest.mark.parametrize("answer", [[refusal(500, "EngineDeadError")], [died(), DONE], [*chat_chunks("Hello")[:3], died(), DONE], chat_chunks("Hello", finish="abort")],
                         ids=["refusals", "error events", "broken answers", "abandoned answers"])
def test_one_that_says_itself_that_it_is_not_well_is_off_though_it_answers(gateway, engine, answer):
    """Its answers to requests are no good: they are no evidence."""
    front = gateway(poll=0.1)
    engine.on(HEALTH, [refusal(503, "The engine is dead")])
    engine.always(answer)
    begun = time.monotonic()
    while listed(front):
        assert time.monotonic() - begun < 10
        answered = ask(front, stream=True)
        answered.read_all()


def test_one_that_only_counts_tokens_is_off(gateway, engine):
    """Its server does so before a core that is dead."""
    front = gateway(poll=0.2)
    engine.on(HEALTH, [refusal(503, "The engine is dead")])
    engine.always([refusal(500, "EngineDeadError")])
    over = threading.Event()

    def count():
        while not over.is_set():
            front.client().post("/v1/messages/count_tokens", {"messages": HELLO}).read_all()

    with ThreadPoolExecutor(2) as pool:
        counting = [pool.submit(count) for _ in range(2)]
        try:
            until = time.monotonic() + 10
            while listed(front):
                assert time.monotonic() < until, "it is still on"
                ask(front).read_all()
        finally:
            over.set()
        for one in counting:
            one.result()


def test_looks_cost_less_while_requests_are_answered(gateway, engine):
    front = gateway(poll=0.1, keepalive=0.1)
    wait_until(lambda: len(engine.probes) > 8, 5)
    assert sum(probe.path == HEALTH for probe in engine.probes) >= 3
    engine.play(*(step for event in chat_chunks(" ".join("word" for _ in range(24))) for step in (Pause(0.04), event)))
    answer = ask(front, stream=True)
    time.sleep(0.2)
    seen = len(engine.probes)
    answer.read_all()
    asked = [probe.path for probe in engine.probes[seen:]]
    assert asked.count(LISTED) > 3 and asked.count(HEALTH) < asked.count(LISTED)


def test_looks_cost_less_while_figures_tell_as_much(gateway, engine):
    """An engine that owes an answer and is silent is asked for its figures: /health would say no more."""
    front = gateway(poll=0.1, keepalive=0.1, stuck_after=60)
    wait_until(lambda: len(engine.probes) > 8, 5)
    idle = list(engine.probes)
    engine.play(Head(), Hang())
    answer = ask(front, stream=True)
    wait_until(lambda: sum("/metrics" in probe.path for probe in engine.probes[len(idle):]) > 3, 5)
    seen = len(engine.probes)
    wait_until(lambda: sum("/metrics" in probe.path for probe in engine.probes[seen:]) > 8, 5)
    asked = [probe.path for probe in engine.probes[seen:]]
    assert LISTED in asked and asked.count(HEALTH) <= 1 and asked.count(LISTED) < sum("/metrics" in path for path in asked)
    answer.close()


# ---- what is loaded on demand

LISTS = {"router": router_models, "swap": swap_models}


class OnDemand:
    """An engine that lists two models, and loads one when a request wants it, the other one going."""

    def __init__(self, engine, lists):
        self.engine, self.lists, self.statuses = engine, LISTS[lists], {"small": "unloaded", "large": "unloaded"}
        self.loaded, self.ready = threading.Event(), None
        engine.on(LISTED, lambda request: [Json(self.lists(self.statuses))])
        engine.always(self.answer)

    def answer(self, request):
        ask = request.json()
        if self.ready != ask["model"]:
            # llama-swap calls it loaded from here on.
            self.statuses.update(dict.fromkeys(self.statuses, "unloaded"), **{ask["model"]: "loaded" if self.lists is swap_models else "loading"})
            yield Wait(self.loaded)
            self.ready = ask["model"]
            self.statuses[self.ready] = "loaded"
        if not ask.get("stream"):
            yield Json(completion("Hello there", model=ask["model"]))
        else:
            yield from (text_chunks if request.path == TEXT else chat_chunks)("Hello there", model=ask["model"], usage=True)


@pytest.fixture(scope="module", params=LISTS)
def before_swap(request, stock, tmp_path_factory):
    """A gateway before an engine that loads on demand."""
    with Engine() as engine:
        OnDemand(engine, request.param)
        folder = tmp_path_factory.mktemp("swap")
        with started(engine, folder, stock, poll=0.05, keepalive=0.1, stall_timeout=0.2) as front:
            front.engine, front.lists = engine, request.param
            yield front


@pytest.fixture
def front(before_swap):
    """The same, and nothing is loaded."""
    before_swap.swap = OnDemand(before_swap.engine, before_swap.lists)
    before_swap.engine.requests.clear()
    before_swap.engine.probes.clear()
    wait_until(lambda: len(before_swap.engine.probes) > 4, 5)   # it has been seen
    assert listed(before_swap) == ["small", "large"]
    return before_swap


def test_nobody_but_a_request_has_it_loaded(front):
    """Neither a look, nor what is asked of an engine once, nor a count."""
    counted = front.client().post("/v1/messages/count_tokens", {"messages": HELLO, "model": "large"})
    assert counted.status == 200 and counted.json()["input_tokens"] > 0
    seen = len(front.engine.probes)
    wait_until(lambda: len(front.engine.probes) > seen + 20, 5)
    assert {probe.method for probe in front.engine.probes} == {"GET"} and not front.engine.requests
    assert set(front.swap.statuses.values()) == {"unloaded"}


@pytest.mark.parametrize("path", ROUTES)
def test_a_slow_first_answer_is_loading(front, path):
    """It is listed, and said to be loading for as long as that takes; then it answers like any other."""
    ident = f"first-{front.lists}-{path[4:].replace('/', '-')}"
    answer = front.client().post(path, {**ROUTES[path], "model": "large", "stream": True}, {"x-request-id": ident})
    assert answer.status == 200
    events = answer.events()
    signs = [next(events) for _ in range(5)]        # longer than an engine may be silent once it has begun
    assert listed(front) == ["small", "large"]
    front.swap.loaded.set()
    rest = list(events)
    assert [sign.comment for sign in signs].count("loading") >= 2 and {sign.comment for sign in signs} <= {"loading", None}
    if path == "/v1/messages":
        assert {sign.name for sign in signs} == {"ping"}
    said = "".join(event.data or "" for event in rest)
    assert "Hello" in said and '"error":{' not in said
    assert row_of(front.db, ident)["status"] == 200
    again = front.client().post(path, {**ROUTES[path], "model": "large"})
    assert again.status == 200 and "Hello" in again.read_all().decode()
    assert front.engine.requests[-1].json()["model"] == "large"


def test_who_waits_for_a_whole_answer_gets_it(front):
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(lambda: ask(front, model="large").status) for _ in range(2)]
        front.engine.wait_for(2)
        time.sleep(0.5)                             # several looks, and no timeout
        assert not any(one.done() for one in waiting)
        front.swap.loaded.set()
        assert [one.result() for one in waiting] == [200] * 2


FAILED = {
    "failed to load": (llama_refusal(500, "model name=large failed to load", "server_error"), 500),
    "not ready yet": (llama_refusal(503, "Loading model", "unavailable_error"), 503),
    "too many to load": (Json({"src": "llama-swap", "error": {"message": "Too many requests", "type": "rate_limit_error", "param": None,
                                                              "code": "concurrency_limit"}}, 429, {"Retry-After": "1"}), 429),
    "a process that went": (Json({"src": "llama-swap", "error": {"message": "unable to start process: upstream command exited", "type": "server_error",
                                                                 "param": None, "code": "bad_gateway"}}, 502), 502),
}


def test_one_that_cannot_be_loaded_puts_nothing_off(front, subtests):
    front.swap.loaded.set()
    for name, (steps, status) in FAILED.items():
        with subtests.test(name):
            front.engine.play(steps)
            refused = ask(front, model="large")
            assert refused.status == status and refused.json()["error"]["message"]
            assert (refused.headers.get("retry-after") is None) == (status in (500, 502))
            assert ask(front, model="small").status == 200 and listed(front) == ["small", "large"]
