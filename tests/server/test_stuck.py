"""Engines that stop working behind a server that goes on answering: found out, ended, and let in again.

What tells them apart is in tests/pure/test_pulse.py; real vLLM is stopped and killed in tests/engines/test_stuck_vllm.py.
"""
import socket
import threading
import time
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from support import responses
from support.client import Truncated
from support.engine import (
    KEEP_ALIVE,
    Dribble,
    Early,
    Engine,
    Hang,
    Head,
    Json,
    Send,
    chat_chunks,
    text_chunks,
)
from support.gateway import Gateway, Patched, started
from support.observe import descriptors, gauge, gauges, idle
from support.processes import wait_until
from support.rows import row_of

CHAT, MESSAGES, TEXTS = "/v1/chat/completions", "/v1/messages", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100},
    TEXTS: {"prompt": "Hi"},
    responses.PATH: {"input": "Hi"},
}
EVENTS = chat_chunks("Hello there my friend", usage=True)
SOON = 0.8                                          # the setting stuck_after
WITHIN = SOON + 10                                  # seconds in which it has to be found out
STEADY = {"stuck_after": SOON, "poll": 0.2, "keepalive": 0.2}


def begin(gateway, path=CHAT, ident=None, **fields):
    """A request under way: its connection."""
    connection = gateway.client(timeout=30).open()
    connection.start("POST", path, {**BODIES[path], **fields}, {"x-request-id": ident} if ident else {})
    return connection


def state(gateway):
    found = gauges(gateway)
    return next(name.partition('state="')[2][:-2] for name, value in found.items()
                if name.startswith("sparks_engine_state") and value)


def wait_stuck(gateway, seconds=WITHIN):
    wait_until(lambda: state(gateway) == "stuck", seconds / 3, gateway.process, "the engine counts as stuck")


def wait_up(gateway, seconds=5):
    wait_until(lambda: state(gateway) == "up", seconds, gateway.process, "the engine is up")




@pytest.fixture(scope="module")
def house(stock, tmp_path_factory):
    with Engine() as engine:
        gateway = Gateway(tmp_path_factory.mktemp("stuck"), engine.url, stock, **STEADY)
        try:
            gateway.engine = engine
            gateway.wait_alive().wait_ready()
            yield gateway
        finally:
            gateway.stop()
        gateway.check_log()


@pytest.fixture
def one(house):
    """The gateway before an engine that is as new, and up."""
    house.engine.reset()
    house.engine.start()
    wait_up(house)
    yield house
    idle(house)
    house.engine.wait_idle()
    assert not house.engine.faults, house.engine.faults[0]


DEAD = Json({"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}, 500)


def hang(engine, *first):
    """From here on each answer comes to a halt after these steps, and so do canaries."""
    engine.always(lambda request: [*first, Hang()])
    engine.canary = [Hang()]


class Work:
    """Until the end of the block the engine's figures move, as in a long prefill."""

    def __init__(self, *engines):
        self.engines, self.over = engines, threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        for step in count(1):
            for engine in self.engines:
                engine.figures = {**engine.figures, "kv_cache_usage_perc": step / 1e6, "n_decoded": step}
            if self.over.wait(0.05):
                return

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


# ---- it is stuck

@pytest.mark.parametrize("path", BODIES)
def test_all_that_it_owes_ends(one, path):
    """A stream in its middle, one that has had no word, one whose head alone came, a plain answer; and the log says why."""
    engine, before = one.engine, len(one.log)
    engine.play(*(text_chunks("Hello there")[:1] if path == TEXTS else EVENTS[:2]), Hang())
    engine.play(Head(), KEEP_ALIVE, Hang())
    hang(engine)
    idents = [f"stuck-{n}-{path[4:7]}" for n in range(4)]
    calls = []
    for n, ident in enumerate(idents):              # each gets the script that is meant for it
        calls.append(begin(one, path, ident, stream=n < 3))
        engine.wait_for(n + 1)
    wait_stuck(one)
    for connection in calls[:3]:
        answer = connection.answer()
        last = [event for event in answer.events() if event.comment is None][-1]
        assert answer.status == 200 and "stopped working" in last.data and engine.url not in last.data
        assert path in (MESSAGES, responses.PATH) or "engine_stuck" in last.data
    answer = calls[3].answer()
    said = answer.read_all().decode()
    assert answer.status == 502 and "stopped working" in said and engine.url not in said
    assert int(answer.headers["retry-after"]) > 0
    for ident in idents:
        row = row_of(one.db, ident)
        assert (row["status"], row["error"]) == (502, "engine_stuck")
    assert f"engine {engine.url} is stuck: it owes 4 answers" in one.log[before:]
    engine.wait_idle()


IMPATIENT = "from engines import engine; engine.PROGRESS_TIMEOUT = 0.3"


class Full(Engine):
    """Once it is full it takes no connection any more, nor answers those that wait to be taken."""

    def __init__(self):
        self.full, self.over = threading.Event(), threading.Event()
        super().__init__()

    def _take(self, sock):
        super()._take(sock)
        if self.full.is_set():
            self.over.wait(30)

    def fill(self):
        self.full.set()
        self.listener.listen(0)
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", self.port))
            yield sock


def test_a_request_that_is_still_connecting_ends_too(stock, tmp_path):
    with Full() as engine, started(engine, tmp_path, stock, IMPATIENT, max_active=9, **STEADY) as front:
        wait_until(lambda: any("/metrics" in probe.path for probe in engine.probes), 5)
        hang(engine)
        first = begin(front, stream=True)
        engine.wait_for(1)
        waiting = list(engine.fill())
        second = begin(front)
        wait_stuck(front)
        since = time.monotonic()
        answer = second.answer()
        assert (answer.status, answer.json()["error"]["code"]) == (502, "engine_stuck") and time.monotonic() - since < 3
        for connection in (first, second, *waiting):
            connection.close()
        engine.over.set()


def test_nobody_waits_for_it(stock, tmp_path):
    """Who waits for a slot is told within a second, and who comes at once; as long as it is stuck, whatever looks say."""
    with Engine() as engine, started(engine, tmp_path, stock, max_active=1, **STEADY) as front:
        hang(engine)
        engine.canary = [DEAD]
        runs = begin(front, stream=True)
        engine.wait_for(1)
        waiting = [begin(front, stream=n < 2, ident=f"waits-{n}") for n in range(3)]
        wait_until(lambda: gauge(front, "sparks_queued") == 3, 5)
        wait_stuck(front)
        began = time.monotonic()
        assert list(runs.answer().events())[-1].json()["error"]["code"] == "engine_stuck"
        for n, connection in enumerate(waiting):
            answer = connection.answer()
            last = list(answer.events())[-1].json() if answer.status == 200 else answer.json()
            assert last["error"]["code"] == "model_unavailable" and (n < 2 or answer.status == 503)
        for path in BODIES:
            for streams in (True, False):
                answer = front.client().post(path, {**BODIES[path], "stream": streams})
                assert answer.status == 503 and int(answer.headers["retry-after"]) > 0
                assert "stopped working" in answer.read_all().decode()
        assert time.monotonic() - began < 5         # on an idle machine 0.1 s
        assert len(engine.requests) == 1
        looks = len(engine.probes)
        engine.wait_until(lambda: len(engine.probes) > looks + 9)       # which all find it well
        assert state(front) == "stuck" and gauge(front, "sparks_active") == 0


def test_it_is_let_in_by_a_canary_alone(one):
    """One at a time, and given up in time; an error is none, a refusal is an answer."""
    engine = one.engine
    hang(engine)
    engine.probes.clear()
    runs = begin(one, stream=True)
    wait_stuck(one)
    runs.close()
    engine.wait_until(lambda: len(canaries(engine)) == 2, 10)
    first = canaries(engine)[0]
    assert first.path == TEXTS and first.gone.wait(1)
    engine.canary = [DEAD]
    seen = len(canaries(engine)) + 1                # one may have hung when that was said
    engine.wait_until(lambda: len(canaries(engine)) > seen + 1, 10)
    assert state(one) == "stuck"
    engine.canary, engine.answer = [Json({"detail": "Not Found"}, 404)], None
    wait_up(one)
    assert one.client().post(CHAT, BODIES[CHAT]).status == 200


def test_a_wrong_key_is_no_way_back(one):
    """What is misconfigured meanwhile is in doubt as before."""
    engine = one.engine
    hang(engine)
    runs = begin(one, stream=True)
    wait_stuck(one)
    runs.close()
    engine.on("/v1/models", [Json({"error": "Unauthorized"}, 401)])
    wait_until(lambda: state(one) == "misconfigured", 5)
    seen = len(canaries(engine))
    engine.canary = [DEAD]
    engine.routes.clear()
    engine.wait_until(lambda: len(canaries(engine)) > seen + 1, 10)
    assert state(one) == "loading" and one.client().post(CHAT, BODIES[CHAT]).status == 503
    engine.canary, engine.answer = None, None
    wait_up(one)


def test_spaces_are_no_answer(one):
    """What drips in front of a plain answer that never comes is no sign of work."""
    hang(one.engine)
    one.engine.always([Head(framing=9000, type="application/json"), Dribble(b" " * 9000, 1, 0.02)])
    answer = begin(one).answer()
    assert answer.status == 502 and answer.json()["error"]["code"] == "engine_stuck"
    one.engine.reset()


CLOCK = """
import time
real = time.time
time.time = lambda: real() + float(open({file!r}).read())
from engines import engine
engine.LOOK_TIMEOUT = engine.PROGRESS_TIMEOUT = 0.2
"""


def test_one_that_owes_nothing_and_is_slow_is_busy(stock, tmp_path):
    """However long, and whatever the wall clock shows, as long as it still says how far it is."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    with Engine() as engine, started(engine, tmp_path, stock, CLOCK.format(file=str(clock)), **STEADY) as front:
        wait_until(lambda: any(FIGURES in probe.path for probe in engine.probes), 5)
        for path in ("/health", "/v1/models"):
            engine.on(path, [Hang()])
        wait_until(lambda: state(front) == "busy", 5)
        (tmp_path / "new").write_text("100000")
        (tmp_path / "new").replace(clock)
        asked = len(engine.probes)
        engine.wait_until(lambda: sum(FIGURES in probe.path for probe in engine.probes[asked:]) > 1, WITHIN)
        assert state(front) == "busy" and front.client().post(CHAT, BODIES[CHAT]).status == 200
        engine.play(Early(), Hang())                # it takes no more of this one
        large = begin(front, messages=[{"role": "user", "content": "long " * 2_000_000}])
        engine.wait_for(2)
        engine.on(FIGURES, [Hang()])
        wait_stuck(front)
        assert large.answer().json()["error"]["code"] == "engine_stuck"


def canaries(engine):
    return [probe for probe in engine.probes if probe.method == "POST" and probe.path in (TEXTS, "/v1/embeddings")]


def test_after_a_restart(one):
    """It is loading until it has answered a canary, unless it is of another kind."""
    engine = one.engine
    engine.stop()
    wait_until(lambda: state(one) == "off", 5)
    engine.canary = [Hang()]
    engine.start()
    wait_until(lambda: state(one) == "loading", 5)
    refused = one.client().post(CHAT, BODIES[CHAT])
    assert refused.status == 503 and "is being loaded" in refused.json()["error"]["message"]
    engine.canary = None
    wait_up(one)
    engine.on("/v1/models", [Json({"data": [{"id": "other", "owned_by": "somebody"}]})])
    wait_until(lambda: one.client().get("/v1/models").json()["data"][0]["id"] == "other", 5)
    engine.stop()
    wait_until(lambda: state(one) == "off", 5)
    engine.canary = [Hang()]
    engine.start()
    wait_up(one)


# ---- what is stuck and what is not

def page(*lines):
    data = "".join(f"vllm:{line}\n" for line in lines).encode()
    return [Head(framing=len(data), type="text/plain"), Send(data)]


def still(request):
    return [Json({"detail": "Not Found"}, 404)]


def once(steps, later=None):
    """The first answer to the question for figures; after it there is none, or another one."""
    answers = iter([steps])
    return lambda request: None if "cache_config" in request.path else next(answers, later or [Hang()])


def only_whole(*lines):
    """Several API servers: nothing for those who ask for names."""
    return lambda request: page(*([] if "name" in request.path else lines))


class Moving:
    """Answers to the question for figures, each other than the one before."""

    def __init__(self, *lines):
        self.lines, self.steps = lines, count()

    def __call__(self, request):
        return page(f"kv_cache_usage_perc 0.{next(self.steps)}", *self.lines)


def busy_slots(request):
    return [Json([{"is_processing": True, "n_decoded": time.monotonic()}])]


FIGURES = "/metrics/"
# What the engine answers to a stream, and to whom asks for its figures: {path: steps}; then whether it is stuck.
LIKE = {
    "hangs": ([Hang()], {}, True),
    "hangs in its middle": ([*EVENTS[:2], Hang()], {}, True),
    "sends comments": ([Head(), Dribble(KEEP_ALIVE * 1000, len(KEEP_ALIVE), 0.02, chunks=True)], {}, True),
    "gives no figures any more": ([Hang()], {FIGURES: once(page("kv_cache_usage_perc 0.5"))}, True),
    "is refused its figures by now": ([Hang()], {FIGURES: once(page("kv_cache_usage_perc 0.5")), "/metrics": still}, True),
    "has several servers": ([Hang()], {FIGURES: only_whole("kv_cache_usage_perc 0.5", "num_requests_running 1")}, True),
    "has lost it": ([Hang()], {FIGURES: Moving("num_requests_running 0.0")}, True),
    "works": ([Hang()], {FIGURES: Moving("num_requests_running 1.0")}, False),
    "works on what waits": ([Hang()], {FIGURES: Moving("num_requests_running 0.0", "num_requests_waiting 1.0")}, False),
    "sends tokens": ([EVENTS[0], Dribble(EVENTS[1] * 1000, len(EVENTS[1]), 0.1, chunks=True)], {}, False),
    "has no figures": ([Hang()], {FIGURES: still}, False),
    "has garbage for figures": ([Hang()], {FIGURES: [Json({"vllm:kv_cache_usage_perc": [0.5]})]}, False),
    "has huge figures": ([Hang()], {FIGURES: [Head(framing=3 << 20), Send(b"vllm:kv_cache_usage_perc 0.5\n" + b"#" * ((3 << 20) - 29))]},
                         False),
    "has trouble with its figures by now": ([Hang()], {FIGURES: once(page("kv_cache_usage_perc 0.5"), [Json({}, 500)])}, True),
    "has no figures any more": ([Hang()], {FIGURES: once(page("kv_cache_usage_perc 0.5"), [Json({"detail": "Not Found"}, 404)])}, False),
    "is of another kind": ([Hang()], {"/v1/models": [Json({"data": [{"id": "is of another kind", "owned_by": "somebody"}]})]}, False),
}


class Sudden:
    """It answers nothing any more from its first request on, about its work neither."""

    def __init__(self):
        self.asked, self.begun = threading.Event(), threading.Event()

    def slots(self, request):
        self.asked.set()
        return [Hang()] if self.begun.is_set() else None

    def work(self, request):
        self.begun.set()
        return [Hang()]


SUDDEN = Sudden()
LLAMA = {
    "llama hangs": ([Hang()], {}, True),
    "llama hangs at once": (SUDDEN.work, {"/slots": SUDDEN.slots}, True),
    "llama has slots that grow": ([Hang()], {"/slots": once([Json([{"is_processing": True}])], [Json([{"prompt": "x" * 600_000}])]),
                                             "/metrics": [Json({"error": {"code": 501}}, 501)]}, False),
    "llama has no slots": ([Hang()], {"/slots": [Json({"error": {"code": 501}}, 501)]}, False),
    "llama works": ([Hang()], {"/slots": busy_slots}, False),
}


def test_who_is_stuck(stock, tmp_path):
    """All at once, each an engine of its own behind one gateway."""
    table = {**LIKE, **LLAMA}
    with several(table) as engines:
        upstream = ",".join(engine.url for engine in engines.values())
        front = Patched(tmp_path, upstream, stock, "import engines.engine; engines.engine.PROGRESS_TIMEOUT = 0.3", max_active=100,
                        **STEADY)
        try:
            front.wait_alive()
            wait_until(lambda: len(front.client().get("/v1/models").json()["data"]) == len(table), 10)
            assert SUDDEN.asked.wait(5)             # before it owes anything
            calls = {name: begin(front, model=name, stream=True) for name in table}
            reader = threading.Thread(target=drain, args=[calls["sends tokens"]], daemon=True)
            reader.start()
            expected = {name for name, (_, _, stuck) in table.items() if stuck}
            end = time.monotonic() + WITHIN
            while not expected <= stuck_of(front, engines):
                assert time.monotonic() < end, f"not found out: {expected - stuck_of(front, engines)}\n{front.log}"
                time.sleep(0.05)
            time.sleep(2 * SOON)                    # for the others, time enough to be taken for stuck
            assert stuck_of(front, engines) == expected
            assert not [name for name in table.keys() - expected if canaries(engines[name])]
        finally:
            for connection in calls.values():
                connection.close()
            front.stop()
        front.check_log()


@contextmanager
def several(table):
    """{name: an engine that is like that}."""
    engines = {}
    try:
        for name, (steps, routes, _) in table.items():
            engine = engines[name] = Engine()
            engine.like = "llama" if name.startswith("llama") else "vllm"
            engine.models, engine.canary, engine.routes = [{"id": name}], [Hang()], routes
            engine.always(steps)
        yield engines
    finally:
        for engine in engines.values():
            engine.close()
    assert not [engine.faults for engine in engines.values() if engine.faults]


def stuck_of(front, engines):
    found = gauges(front)
    return {name for name, engine in engines.items()
            if found[f'sparks_engine_state{{engine="{engine.url}",state="stuck"}}']}


def drain(connection):
    try:
        for _ in connection.answer().events():
            pass
    except (OSError, Truncated):
        pass


def test_a_client_that_reads_nothing_is_no_engine_that_hangs(stock, tmp_path):
    """Its stream cannot be read: it says nothing about the engine, which works again for the next one."""
    with Engine() as engine, started(engine, tmp_path, stock, **STEADY) as front:
        piece = chat_chunks(["x" * 4000])[1]
        engine.always(lambda request: [EVENTS[0], Dribble(piece * 5000, len(piece), chunks=True)])
        connection = front.client(rcvbuf=4096).open()
        connection.start("POST", CHAT, {**BODIES[CHAT], "stream": True})
        engine.wait_for(1)
        time.sleep(3 * SOON)
        assert state(front) == "up" and engine.active == 1
        connection.close()
        engine.wait_idle()


def test_work_for_others_excuses_what_waits_behind_it(stock, tmp_path):
    """Longer than both limits; and when the work is over, they count from there."""
    limits = {"stall_timeout": 0.5, "answer_timeout": 0.5}
    with Engine() as engine, started(engine, tmp_path, stock, **{**STEADY, "stuck_after": 100}, **limits) as front:
        engine.figures = {"num_requests_running": 4.0}
        with Work(engine):
            engine.play(*EVENTS[:2], Hang())
            engine.always([Hang()])
            calls = []
            for n in range(3):
                calls.append(begin(front, stream=n < 2))
                engine.wait_for(n + 1)
            time.sleep(1.5)
            assert engine.active == 3
            over = time.monotonic()
        for n, connection in enumerate(calls):
            answer = connection.answer()
            error = (list(answer.events())[-1] if n < 2 else answer).json()["error"]
            assert error["code"] == "upstream_timeout" and n < 2 or answer.status == 504
        assert 0.3 < time.monotonic() - over < 5


# ---- the owner's command

def test_on_stuck(stock, tmp_path):
    """It restarts the engine, whose address it knows; the log has its words; it is not run again so soon, and never twice
    at once."""
    ran, go = tmp_path / "ran", tmp_path / "go"
    command = f"echo restarting; echo $SPARKS_ENGINE >> {ran}; while [ ! -e {go} ]; do sleep 0.05; done; echo done >&2; exit 3"
    with Engine() as engine, started(engine, tmp_path, stock, on_stuck=command, **STEADY) as front:
        for _ in range(2):
            hang(engine)
            runs = begin(front, stream=True)
            wait_stuck(front)
            runs.close()
            wait_until(lambda: "on_stuck: restarting" in front.log, 5)
            engine.reset()
            wait_up(front)
        assert ran.read_text() == f"{engine.url}\n" and "on_stuck is not run again" in front.log
        go.touch()
        wait_until(lambda: "on_stuck: done" in front.log and "on_stuck has ended with 3" in front.log, 5)


def test_on_stuck_where_it_was_too_soon_or_did_not_help(stock, tmp_path):
    """It is run as soon as that may be, and again after a while, as long as the engine is stuck."""
    ran = tmp_path / "ran"
    patch = "import engines.remedy; engines.remedy.TIME = 3"
    with Engine() as engine, started(engine, tmp_path, stock, patch, on_stuck=f"date +%s.%N >> {ran}", on_stuck_pause=2.5, **STEADY) as front:
        for helps in (True, False):
            hang(engine)
            runs = begin(front, stream=True)
            wait_stuck(front)
            runs.close()
            wait_until(ran.exists, 5)
            if helps:
                engine.reset()
                wait_up(front)
        wait_until(lambda: ran.read_text().count("\n") >= 3, 15)
        first, second, third = [float(line) for line in ran.read_text().splitlines()[:3]]
        assert second - first > 2.4 and third - second > 2.9 and front.log.count("on_stuck is not run again") <= 1


@pytest.mark.parametrize("patch", ["import engines.remedy; engines.remedy.TIME = 0.5", ""], ids=["its time is over", "stopped"])
def test_a_command_that_does_not_end(stock, tmp_path, patch):
    """It is killed, with all that it has started; also when the gateway ends before."""
    ran = tmp_path / "ran"
    with Engine() as engine, started(engine, tmp_path, stock, patch, on_stuck=f"sleep 100 & echo $! > {ran}; yes", **STEADY) as front:
        hang(engine)
        runs = begin(front, stream=True)
        wait_until(lambda: ran.exists() and ran.read_text(), 10)
        if patch:
            wait_until(lambda: "is killed" in front.log, 5)
        runs.close()
    status = Path(f"/proc/{int(ran.read_text())}/stat")
    wait_until(lambda: not status.exists() or ") Z " in status.read_text(), 5)


# ---- nothing is left of it

def test_nothing_leaks(one):
    """Stuck and well again, and once more: no descriptor more, no slot taken."""
    before = None
    for n in range(2):
        hang(one.engine, *EVENTS[:2])
        calls = [begin(one, stream=n < 3) for n in range(4)]
        wait_stuck(one)
        for connection in calls:
            connection.answer().read_all()
            connection.close()
        one.engine.reset()
        wait_up(one)
        idle(one)
        if n == 0:
            before = len(descriptors(one))
    wait_until(lambda: len(descriptors(one)) <= before, 5)


def test_it_owes_only_what_it_has(one):
    """Clients that give up before that and come again find it out all the same; a pause between them is none."""
    hang(one.engine)
    for _ in range(4):
        connection = begin(one, stream=True)
        time.sleep(0.45 * SOON)
        connection.close()
    one.engine.wait_idle()
    wait_stuck(one)
