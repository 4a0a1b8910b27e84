"""Storms: many requests of all kinds at once, after which everything is as it was, and counted.

SPARKS_SOAK makes them long: 2,000 requests and 500 twins instead of 200 and 30.
"""
import json
import os
import random
import select
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

import keys
from store.database import open_database
from support.client import Truncated
from support.engine import (
    Close,
    Engine,
    Hang,
    Head,
    Json,
    Pause,
    Reset,
    Send,
    chat_chunks,
    chunk,
    compact,
    completion,
    died,
    refusal,
    sse,
)
from support.gateway import started
from support.observe import descriptors, gauges, idle, resident
from support.processes import wait_until
from support.rows import days, read, row_now, row_of, rows, sums
from support.state import STATE, state

LONG = bool(os.environ.get("SPARKS_SOAK"))
REQUESTS, TWINS = (2000, 500) if LONG else (200, 30)
SLOTS, THREADS, SEED = 8, 24, 3
PATH, MODEL = "/v1/chat/completions", "GLM-5.3-Flash-EXL3"
PATHS = (PATH, "/v1/messages")
LAST = (b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n')
MB = 1 << 20


def stock_of(folder, *names):
    """A database with a key for each name: (file, {name: key})."""
    db = folder / "stock.db"
    open_database(db)
    try:
        made = {name: keys.add_key(name) for name in names}
    finally:
        keys.database.close()
    return db, made


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A gateway with eight slots, five keys (two of them with limits), and its engine."""
    folder = tmp_path_factory.mktemp("storm")
    db, made = stock_of(folder, "alice", "bob", "carol", "strict", "narrow")
    with Engine() as engine, started(engine, folder, (db, made["alice"]), STATE, max_active=SLOTS, max_queued=14, poll=0.1,
                                     keepalive=0.2) as gateway:
        gateway.engine, gateway.names = engine, made
        assert gateway.keys("limit", "strict", "--rpm", "15").returncode == 0
        assert gateway.keys("limit", "narrow", "--active", "2").returncode == 0
        yield gateway


# ---- the engine's side

class Busy:
    """How many requests the engine serves at once: those whose last byte it has not sent, and whose client is still there."""

    def __init__(self, engine):
        self.engine, self.lock, self.running, self.most = engine, threading.Lock(), set(), 0

    def __call__(self, request, steps):
        """The steps, counted while they are played."""
        *steps, last = steps
        with self.lock:
            self.running.add(request.connection)
            self.most = max(self.most, sum(map(self.alive, self.running)))
        try:
            yield from steps
        finally:
            with self.lock:
                self.running.discard(request.connection)
        yield last

    def alive(self, number):
        sock = next((thread.sock for thread in list(self.engine.threads) if thread.number == number), None)
        if sock is None or sock.fileno() < 0:
            return False
        poller = select.poll()
        poller.register(sock, select.POLLRDHUP)
        return not poller.poll(0)


def figures(number):
    """What the engine says that request number so-and-so cost."""
    return {"prompt_tokens": 100 + number, "completion_tokens": 5 + number % 7, "total_tokens": 105 + number + number % 7,
            "prompt_tokens_details": {"cached_tokens": number % 50},
            "completion_tokens_details": {"reasoning_tokens": number % 3}}


def answer(kind, number, streams, pause):
    """The engine's steps for a kind of request."""
    events = chat_chunks("Hello there my friend", reasoning="Let me think", usage=figures(number))
    if kind == "whole" or kind == "leaves":
        whole = [step for event in events for step in (event, Pause(pause))][:-1]
        return whole if streams else [Pause(4 * pause), Json(completion("Hello there", usage=figures(number)))]
    broken = compact(completion("Hello"))
    return {
        "refuses": [refusal(400, "This model's maximum context length is 2048 tokens.")],
        "fails": [Json({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, 500)],
        "closes": [Pause(pause), Close()],
        "resets": [Pause(pause), Reset()],
        "babbles": [Head(framing=9, type="text/html"), Send(b"<html></a")],
        "breaks off": [*events[:4], Close()] if streams else [Head(framing=len(broken)), broken[:30], Close()],
        "dies": [*events[:4], died(), b"data: [DONE]\n\n"] if streams else [Json({"error": {"message": "x"}})],
    }[kind]


FAILURES = ("refuses", "fails", "closes", "resets", "babbles", "breaks off", "dies")


# ---- the clients' side

class Storm:
    """Sends requests of all kinds, each once, and notes what became of each: ids -> (kind, streams, outcome)."""

    def __init__(self, gateway, seed):
        self.gateway, self.random, self.ids, self.became = gateway, random.Random(seed), count(), {}
        self.keyless = 0
        self.busy = Busy(gateway.engine)
        gateway.engine.always(self.answer)

    def answer(self, request):
        kind, number, pause = json.loads(request.json()["messages"][0]["content"])
        return self.busy(request, answer(kind, number, request.json().get("stream", False), pause))

    def plan(self):
        """A request as its arguments."""
        r = self.random
        kind = r.choices(["whole", "leaves", "malformed", "unknown", "keyless", "engine"], [40, 30, 6, 6, 4, 14])[0]
        if kind == "engine":
            kind = r.choice(FAILURES)
        return (kind, next(self.ids), r.random() < 0.6, r.choice(list(self.gateway.names)), r.uniform(0, 0.006),
                r.uniform(0, 0.08), r.random() < 0.5)

    def send(self, kind, number, streams, name, pause, patience, resets):
        ident = f"storm-{id(self):x}-{number}"
        body = {"messages": [{"role": "user", "content": json.dumps([kind, number, pause])}], "stream": streams, "max_tokens": 50}
        if kind == "malformed":
            body["messages"] = "Hello"
        if kind == "unknown":
            body["model"] = "no-such-model"
        key = "sk-sparks-wrong" if kind == "keyless" else self.gateway.names[name]
        with self.gateway.client(key, timeout=60).open() as connection:
            connection.start("POST", PATHS[number % 2], body, {"x-request-id": ident})
            if kind == "leaves":
                outcome = self.leave(connection, patience, resets)
            else:
                outcome = outcome_of(connection.answer())
        self.became[ident] = (kind, number, streams, outcome)

    @staticmethod
    def leave(connection, patience, resets):
        """Read for a while, then go. A connection that is reset before a byte came back may never have been seen."""
        connection.sock.settimeout(patience + 0.001)
        got = b""
        try:
            while data := connection.sock.recv(65536):
                got += data
                connection.sock.settimeout(0.01)
        except TimeoutError:
            pass
        if resets:
            connection.reset()
        return "unseen" if resets and not got else "left"


def outcome_of(answer):
    """(status, whether the answer was whole, the code of its error; Anthropic's errors have none: "?")."""
    if answer.status != 200:
        return answer.status, False, answer.json()["error"].get("code", "?")
    data = answer.read_all()
    if data.endswith(LAST) or data.startswith(b"{"):
        return 200, True, None
    return 200, False, json.loads(data.rpartition(b"data: ")[2])["error"].get("code", "?")


# ---- the soak

def test_soak(house, capsys):
    house.engine.reset()
    with house.client().open() as connection:       # once, so that what is made only once is there
        connection.post(PATH, {"messages": [{"role": "user", "content": "Hello"}]}).json()
    rest(house, {})
    before, files, earlier = state(house), descriptors(house), len(rows(house.db))
    counted, memory = gauges(house), resident(house)
    storm, began = Storm(house, SEED), time.monotonic()
    plans = [storm.plan() for _ in range(REQUESTS)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda plan: storm.send(*plan), plans))
    took = time.monotonic() - began
    idle(house)
    house.engine.wait_idle()
    after = rest(house, before)
    wait_until(lambda: len(descriptors(house)) <= len(files), 5, what=f"only {files} open (now {descriptors(house)})")
    assert after["live"] == before["live"] and after["held"] == after["put by"] == 0
    assert SLOTS - 2 <= after["most"] <= SLOTS and storm.busy.most <= SLOTS and len(storm.became) == REQUESTS
    found = check_rows(house, storm, earlier)
    check_sums(house, counted, found)
    assert not house.engine.faults, house.engine.faults[0]
    statuses = Counter(row["status"] for row in found)
    kinds = ", ".join(f"{statuses[status]} × {status}" for status in sorted(statuses))
    with capsys.disabled():
        print(f"\nstorm: {REQUESTS} requests in {took:.1f} s, {len(found)} rows ({kinds}), at most {after['most']} at "
              f"once (the engine saw {storm.busy.most}), greenlets {before['greenlets']} -> {after['greenlets']}, "
              f"descriptors {len(files)} -> {len(descriptors(house))}, memory {memory / MB:.0f} -> {resident(house) / MB:.0f} MB")


def rest(gateway, before):
    """The state once it is as it was: greenlets end a moment after their connections, and so do idle engine connections."""
    def calm():
        now = state(gateway)
        return now["idle"] == 0 and now["greenlets"] <= before.get("greenlets", now["greenlets"])
    wait_until(calm, 8, what=f"a gateway at rest: {before}, {state(gateway)}")
    return state(gateway)


def check_rows(gateway, storm, earlier):
    """One row for each request that got past its key, and each as its client saw it."""
    found = rows(gateway.db)[earlier:]
    by_id = {row["id"]: row for row in found}
    assert len(by_id) == len(found)
    expected = {ident for ident, (kind, _, _, outcome) in storm.became.items() if kind != "keyless"}
    maybe = {ident for ident, (_, _, _, outcome) in storm.became.items() if outcome == "unseen"}
    assert expected - maybe <= set(by_id) <= expected
    for ident, row in by_id.items():
        check_row(row, *storm.became[ident])
    return found


def check_row(row, kind, number, streams, outcome):
    if kind == "leaves":
        assert row["aborted"] == (row["status"] == 499) and row["status"] in (200, 499, 429, 503), row
        return
    status, whole, code = outcome
    assert row["aborted"] == 0 and row["error"] == (code if code != "?" else row["error"] or "none"), (row, outcome)
    assert row["status"] == status if status != 200 or whole else row["status"] >= 400, (row, outcome)
    if whole:
        said = figures(number)
        assert [row[f"{name}_tokens"] for name in ("prompt", "completion", "cached", "reasoning")] == \
            [said["prompt_tokens"], said["completion_tokens"], number % 50, number % 3] and row["counted"] == "engine"
        assert row["streamed"] == streams and row["first_ms"] is not None or not streams
    if kind in ("malformed", "unknown"):
        assert row["model"] == row["engine"] == "" and row["prompt_tokens"] is None


def check_sums(gateway, before, found):
    """Rows, daily totals and metrics agree."""
    assert sums(gateway.db) == days(gateway.db)
    now = gauges(gateway)

    def grown(prefix):
        return sum(value - before.get(name, 0) for name, value in now.items() if name.startswith(prefix))
    assert grown("sparks_requests_total") == grown("sparks_total_seconds_count") == len(found)
    for kind in ("prompt", "cached", "completion", "reasoning"):
        assert grown(f'sparks_tokens_total{{kind="{kind}"}}') == sum(row[f"{kind}_tokens"] or 0 for row in found)


# ---- twins

def test_twins(house):
    """The same turn streamed and plain at once; one of the two is aborted at some moment: the other one is whole."""
    house.engine.reset()
    chance = random.Random(SEED)
    house.engine.always(lambda request: answer("whole", 1, request.json().get("stream", False), 0.004))
    with ThreadPoolExecutor(SLOTS // 2) as pool:
        plans = [(n, chance.random() < 0.5, chance.uniform(0, 0.06), chance.random() < 0.5) for n in range(TWINS)]
        fates = list(pool.map(lambda plan: twins(house, *plan), plans))
    idle(house)
    house.engine.wait_idle()
    assert fates.count(True) > TWINS / 4             # most were left in the middle of it
    assert len(rows(house.db, "id LIKE 'twin-%'")) == 2 * TWINS


def twins(gateway, number, leaves_stream, patience, resets):
    """Whether the one that left was still being served."""
    connections = {}
    for streams in (True, False):
        connection = connections[streams] = gateway.client(gateway.names["bob"], timeout=60).open()
        connection.start("POST", PATH, {"messages": [{"role": "user", "content": f"twin {number}"}], "stream": streams},
                         {"x-request-id": f"twin-{number}-{streams}"})
    wait_until(lambda: any(f"twin-{number}-{leaves_stream}" == request.header("x-request-id")
                           for request in list(gateway.engine.requests)), 20, what="a twin at the engine")
    left = connections.pop(leaves_stream)
    select.select([left.sock], [], [], patience)
    left.reset() if resets else left.close()
    (streams, other), = connections.items()
    with closing(other):
        status, whole, _ = outcome_of(other.answer())
    assert (status, whole) == (200, True)
    mine = row_now(gateway.db, f"twin-{number}-{streams}")
    assert (mine["status"], mine["aborted"], mine["prompt_tokens"]) == (200, 0, 101)
    other = row_of(gateway.db, f"twin-{number}-{leaves_stream}", 5)
    assert (other["status"], other["aborted"]) in ((499, 1), (200, 0))
    return bool(other["aborted"])


# ---- fairness

NOTED = """
import bisect, os, time
from admission import Gate
activate, moments = Gate.activate, []

def noted(gate, ticket, place, now):
    "How many had their turn since this one came: a line a grant."
    ahead = len(moments) - bisect.bisect_right(moments, ticket.entered)
    activated = activate(gate, ticket, place, now)
    moments.append(time.time())
    os.write(noted.file, b"%d %d\\n" % (ticket.key, ahead))
    return activated

noted.file = os.open(os.environ["SPARKS_DB"].removeprefix("sqlite:///") + ".grants", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
Gate.activate = noted
import sparks
"""
BY_ARRIVAL = """
def by_arrival(gate, now):
    lanes = [lane for lane in gate.lanes.values() if gate.free_places(lane)]
    heads = [queue[0] for lane in lanes for (_, key), queue in lane.queues.items() if not gate.account(key).busy()]
    first = min(heads, key=lambda ticket: ticket.entered, default=None)
    return first and (first, gate.free_places(first.lane)[0])

Gate.next = by_arrival
"""


def crowd(folder, patch):
    """Key A keeps 40 requests waiting while key B sends 8 one after the other, 50 ms each in 8 slots.
    B's waits: ([ms], [turns of others before its own])."""
    db, made = stock_of(folder, "a", "b")
    with Engine() as engine, started(engine, folder, (db, made["a"]), NOTED + patch, max_active=SLOTS) as gateway:
        engine.always(lambda request: [Pause(0.05), Json(completion("Hello"))])
        over = threading.Event()
        with ThreadPoolExecutor(SLOTS + 40) as pool:
            crowd = [pool.submit(keep_asking, gateway, over) for _ in range(SLOTS + 40)]
            try:
                wait_until(lambda: gauges(gateway)["sparks_queued"] >= 40, 10, what="40 requests in the queue")
                waits = [int(ask(gateway, made["b"]).headers["x-sparks-queue-ms"]) for _ in range(8)]
            finally:
                over.set()
            assert sum(one.result() for one in crowd) > SLOTS
        grants = [line.split() for line in Path(f"{gateway.db}.grants").read_text().splitlines()]
        idle(gateway)
    b, = {row["id"] for row in read(gateway.db, "SELECT id FROM key WHERE name = 'b'")}
    return waits, [int(ahead) for key, ahead in grants if int(key) == b]


def ask(gateway, key, connection=None):
    with closing(connection or gateway.client(key, timeout=60).open()) as connection:
        answer = connection.post(PATH, {"messages": [{"role": "user", "content": "Hello"}]})
        assert answer.status == 200 and answer.json()
        return answer


def keep_asking(gateway, over):
    """The same person, again and again: how often."""
    times = 0
    while not over.is_set():
        ask(gateway, gateway.key)
        times += 1
    return times


def test_fairness(tmp_path, capsys):
    """One person's twenty agents don't hold up another's one question: its wait is one round of the slots at most."""
    for name in ("fair", "arrival"):
        (tmp_path / name).mkdir()
    fair, turns = crowd(tmp_path / "fair", "")
    late, arrivals = crowd(tmp_path / "arrival", BY_ARRIVAL)
    with capsys.disabled():
        for name, waits, ahead in (("turns by key", fair, turns), ("first come, first served", late, arrivals)):
            print(f"\nfairness, {name}: B waited {sum(waits) / len(waits):.0f} ms on average, {max(waits)} ms at worst; "
                  f"{max(ahead)} turns before its own at worst = {max(ahead) / SLOTS:.1f} rounds of {SLOTS} slots", end="")
        print()
    assert len(turns) == len(fair) == 8 and max(turns) <= SLOTS
    assert min(arrivals) > SLOTS and max(fair) < max(late)


# ---- privacy

MARK = "ZEBRA7421"


def marked_bodies():
    """Requests whose every text is marked: (path, body, key, headers)."""
    text = {"role": "user", "content": f"say {MARK}"}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{MARK}"}}]}
    called = {"role": "assistant", "tool_calls": [{"id": f"call_{MARK}", "type": "function",
                                                   "function": {"name": MARK, "arguments": json.dumps({MARK: MARK})}}]}
    tool = {"type": "function", "function": {"name": f"f_{MARK}", "description": MARK, "parameters": {MARK: {}}}}
    for streams in (True, False):
        yield PATH, {"messages": [text, image, called], "stream": streams, "tools": [tool], "user": MARK}, None, {}
        yield f"{PATH}?q={MARK}", {"messages": [text], "stream": streams, MARK: MARK}, None, {"user-agent": MARK}
        yield PATH, {"messages": [text], "stream": streams, "model": MARK}, None, {}
        yield PATH, {"messages": [{"role": MARK, "content": MARK}], "stream": streams}, None, {}
        use = {"type": "tool_use", "id": MARK, "name": MARK, "input": MARK}
        yield PATHS[1], {"messages": [text, {"role": "assistant", "content": [use]}], "max_tokens": 9, "system": MARK,
                         "stream": streams,
                         "tools": [{"name": MARK, "input_schema": {MARK: MARK}}], "metadata": {"user_id": MARK}}, None, {}
        yield PATHS[1], {"messages": [{"role": "user", "content": [{"type": MARK}]}],
                         "max_tokens": 9}, None, {"anthropic-beta": MARK}
        yield f"{PATHS[1]}/count_tokens?{MARK}=1", {"messages": [text]}, None, {"anthropic-version": MARK}
        yield PATH, {"messages": [text], "stream": streams, "stop": MARK, "seed": MARK, "max_tokens": MARK}, None, {}
        yield PATH, {"messages": [text], "stream": streams}, f"sk-sparks-{MARK}", {}
        yield PATH, {"messages": [text], "stream": streams}, False, {"x-api-key": MARK}
        yield f"/v1/{MARK}", {"messages": [text], "stream": streams}, None, {}
        yield f"/v1/models/{MARK}?{MARK}={MARK}", None, None, {}
        yield PATH, {"messages": [text], "stream": streams}, None, {"x-request-id": f"no {MARK};", "content-type": MARK}
    yield PATH, f'{{"messages": "{MARK}'.encode(), None, {}
    yield PATH, f"[{MARK}".encode(), None, {"content-encoding": MARK}
    yield PATH, {"messages": [text]}, None, {"transfer-encoding": MARK}
    yield PATH, {"messages": [text]}, None, {"content-length": MARK}
    yield PATH, {"messages": [text]}, None, {f"bad {MARK}": MARK}
    yield f"{PATH} {MARK} {MARK}", {"messages": [text]}, None, {}


def marked_answers():
    """The engine's answers, marked too, good ones and failures."""
    said = {"reasoning": f"{MARK} {MARK}", "tools": [(f"f_{MARK}", {MARK: MARK})]}
    error = {"error": {"message": f"bad {MARK}", "type": MARK, "param": MARK, "code": MARK}}
    events = chat_chunks(f"{MARK} there", **said, usage=True, id=MARK)
    return [
        (events, [Json(completion(f"{MARK} there", **said, id=MARK))]),
        ([*events[:3], Hang()], [Hang()]),
        ([*events[:3], died(MARK)], [Json(error, 500)]),
        ([*events[:3], sse(error)], [Json(error, 400)]),
        ([sse(error)], [Json({"detail": MARK}, 404)]),
        ([*events[:3], f"data: {MARK}\n\n".encode()], [Head(framing=len(MARK), type=MARK), MARK.encode()]),
        ([*events[:3], Close()], [Head(framing=99), MARK.encode(), Close()]),
        ([sse(chunk({"content": [MARK]})), sse(chunk({}, MARK))], [Json({"choices": MARK, "usage": MARK})]),
        ([sse({"choices": MARK, "usage": {MARK: MARK}})], [Json({"choices": [{"message": MARK}], "usage": {MARK: MARK}})]),
    ]


def test_no_word_of_a_clients_is_kept(tmp_path, stock):
    """Neither in the database nor in the log: prompts, completions, tool arguments, images, model names, keys, addresses."""
    with Engine() as engine, started(engine, tmp_path, stock, max_active=2, keepalive=0.1, stall_timeout=1,
                                     answer_timeout=1) as gateway:
        answers, bodies = marked_answers(), list(marked_bodies())
        for streamed, plain in answers:
            engine.always(lambda request, a=streamed, b=plain: a if request.json().get("stream") else b)
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda body: ask_marked(gateway, *body), bodies))
        idle(gateway)
        engine.always(lambda request: answers[0][0 if request.json().get("stream") else 1])
        with gateway.client().open() as connection:         # and still it works
            assert connection.post(PATH, {"messages": [{"role": "user", "content": MARK}]}).status == 200
        assert len(rows(gateway.db)) > 100
        for file in tmp_path.glob("sparks.db*"):
            check_unmarked(file)
        check_unmarked(gateway.log_file)
    for file in [*tmp_path.glob("sparks.db*"), gateway.log_file]:       # also what was written at the end
        check_unmarked(file)


def check_unmarked(file):
    data = file.read_bytes()
    at = data.find(MARK.encode())
    assert at < 0, f"{file.name}: {data[max(0, at - 300):at + 100]!r}"


def ask_marked(gateway, path, body, key, headers):
    """Send it; read some of the answer, or leave in the middle."""
    with gateway.client(key, timeout=5).open() as connection:
        try:
            connection.start("GET" if body is None else "POST", path, body, headers)
            answer = connection.answer()
            if hash((path, str(body))) % 3:
                answer.read_all()
        except (Truncated, ConnectionError, TimeoutError):
            pass
