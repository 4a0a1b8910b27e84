"""The soak: requests of all kinds on all routes, from clients of all manners, before an engine that does what it likes. At the end
each has its row and nothing is left: no slot, no byte of a body, no socket, no greenlet, no memory.
And requests with pauses before real servers, which close connections in these: no engine is off for a moment, nobody is turned away.

`./run.sh test --soak` runs each for a quarter of an hour, SPARKS_SOAK=60 for a minute; without it there is a short one.
"""
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from types import SimpleNamespace

import pytest

import keys
from store.database import open_database
from support import SUPPORT
from support.client import Truncated
from support.engine import (
    MODELS,
    Close,
    Dribble,
    Engine,
    Hang,
    Head,
    Json,
    Pause,
    Raw,
    Reset,
    chat_chunks,
    compact,
    completion,
    died,
    embeddings,
    refusal,
    text_chunks,
    text_completion,
)
from support.gateway import WITH_VECTORS, started
from support.observe import descriptors, gauges, idle, resident
from support.processes import free_port, wait_until
from support.real_engines import serve
from support.rows import days, rows, sums
from support.state import STATE, state

SECONDS = float(os.environ.get("SPARKS_SOAK") or 6)
THREADS, SLOTS, MB = 20, 12, 1 << 20
SOME_PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
ROUTES = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses", "completions": "/v1/completions",
          "embeddings": "/v1/embeddings"}
LAST = (b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n')      # of a stream; Responses' are below
LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n")

# What an engine does, and how often. GOOD: the client gets a whole answer, or hears that there are too many requests.
GOOD = {"whole": 50, "drips": 4, "repeats": 3, "megabytes": 2, "without done": 2, "closes behind it": 6}
HANGS = 0.05 if SECONDS >= 60 else 0                # each takes as long as an engine may be silent
BAD = {"hangs": HANGS, "hangs later": HANGS, "is cut": 14, "breaks off": 4, "refuses": 3, "fails": 3, "dies": 3, "babbles": 3, "resets": 3}
MANNERS = {"reads": 60, "leaves": 16, "half-closes": 4, "reads slowly": 5, "sends slowly": 5, "gives up sending": 3, "pipelines": 6}
NOISE = [b"GET /help HTTP/1.1\r\nhost: a\r\n\r\n", b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n" * 5, b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HT",
         b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9999\r\n\r\n{", b"nonsense\r\n\r\n", b"",
         b"POST /v1/messages HTTP/1.1\r\nhost: a\r\nx-api-key: sk-sparks-wrong\r\ncontent-length: 2\r\n\r\n{}",
         b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 90 + b"\r\n"]


# Large ones are made once: whoever makes one keeps Python's lock, and the engine needs that, too.
TEXTS = [b'Hello \\"there\\"\\n' * (size // 18 + 1) for size in (20, 20_000, 3 * MB, 8 * MB)]
X = b"x" * (20 * MB)
REFUSED = [b'{"model":"no-such-model","messages":[{"role":"user","content":"%b"}]}' % X, b'{"messages":[{"role":"user","content":"%b"' % X,
           b'{"messages":"%b","input":5,"prompt":5}' % X, b'"' + b"\\u0001" * (3 * MB) + b'"']


def one_of(table, chance):
    return chance.choices(list(table), list(table.values()))[0]


# ---- the engine's side

def wire(steps):
    """What an engine sends for a list of events, or of one Json, as bytes."""
    if isinstance(steps[0], Json):
        data = compact(steps[0].value)
        return Head(framing=len(data), type="application/json").bytes(LIKE) + data
    return Head().bytes(LIKE) + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in steps) + b"0\r\n\r\n"


class LIKE:
    like = "vllm"


def good(path, streams, text):
    """A whole answer: a list of events, or of one Json."""
    if path == ROUTES["embeddings"]:
        return [Json(embeddings([0.5] * 300, [0.25] * 300))]
    if path == ROUTES["completions"]:
        return text_chunks(text, usage=True) if streams else [Json(text_completion(text))]
    if not streams:
        return [Json(completion(text, reasoning="Let me think"))]
    return chat_chunks(text, reasoning="Let me think", usage=True)


def answer(kind, path, streams, chance):
    """The engine's steps for a request of a kind."""
    text = "Hello there my friend"
    if kind == "megabytes":
        text = "word " * chance.choice([1, 20]) + "x" * chance.choice([1 << 16, 1 << 20, 3 << 20])
    steps, pause = good(path, streams, text), chance.uniform(0, 0.01)
    events, some = not isinstance(steps[0], Json), chance.randrange(1, 5)
    if kind in ("whole", "megabytes"):
        return [step for event in steps for step in (Pause(pause), event)]
    if kind == "drips":
        return [Head(), Dribble(b"".join(steps), 7, 0.001, chunks=True)] if events else [Raw(wire(steps)[:99]), Pause(0.1), Raw(wire(steps)[99:])]
    if kind == "repeats":
        return [*steps[:1], *steps[1:2] * 200, *steps[1:-1], *steps[-1:] * 2] if events else steps
    if kind == "without done":
        return [*steps[:-1], Hang()] if events else steps
    if kind == "closes behind it":
        return [Raw(wire(steps)), chance.choice([Close, Reset, Close])()]
    if kind == "hangs later":
        return [*steps[:some], Hang()] if events else [Raw(wire(steps)[:-9]), Hang()]
    if kind == "is cut":
        data = wire(steps)
        return [Raw(data[:chance.randrange(len(data))]), Pause(chance.choice([0, 0.01])), chance.choice([Close, Reset])()]
    if kind == "breaks off":
        return [*steps[:some], Close()] if events else [Head(framing=99), b'{"a": 1', Close()]
    return {"hangs": [Hang()], "refuses": [refusal(chance.choice([400, 404, 422, 429]), "This model's maximum context length is 2048.")],
            "fails": [Json({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, chance.choice([500, 502, 503]))],
            "dies": [*steps[:some], died(), b"data: [DONE]\n\n"] if events else [Json({"error": {"message": "x"}})],
            "babbles": [Head(framing=9, type="text/html"), b"<html></a"], "resets": [Pause(pause), Reset()]}[kind]


class Engines:
    """The engine, and the server of pictures."""

    def __init__(self, engine, pictures):
        self.engine, self.pictures, self.chance, self.lock = engine, pictures, random.Random(5), threading.Lock()
        engine.idle = pictures.idle = 0.5           # it closes idle connections all the time
        engine.always(self.answer)
        host = f"http://127.0.0.1:{pictures.port}"
        shown = {"good": [Head(framing=len(SOME_PNG)), SOME_PNG], "large": [Head(), SOME_PNG + bytes(300_000)], "none": [Head(404, framing=0)],
                 "slow": [Pause(0.3), Head(framing=len(SOME_PNG)), SOME_PNG], "hang": [Head(), SOME_PNG, Hang()],
                 "cut": [Head(framing=900), SOME_PNG, Close()], "moved": [Head(302, {"Location": "/good"}, framing=0)]}
        for name, steps in shown.items():
            pictures.on(f"/{name}", steps)
        self.good = [f"{host}/{name}" for name in ("good", "large", "slow", "moved")]
        self.bad = [f"{host}/{name}" for name in ("none", "hang", "cut")]

    def answer(self, request):
        """By the kind in the request's id."""
        wish = request.header("x-request-id") or ""
        kind = wish.split("-")[1].replace("_", " ") if wish.startswith("soak-") else "whole"
        streams = b'"stream":true' in request.body[-300:] or b'"stream":true' in request.body[:300]
        request.body = b""                          # or they would all be kept
        with self.lock:
            chance = random.Random(self.chance.random())
        return answer(kind, request.path, streams, chance)


# ---- the clients' side

class Client:
    """One of the clients: sends what its chance tells it, and notes what came of each request in `became`, by its id."""

    def __init__(self, house, seed, ids):
        self.house, self.chance, self.ids, self.became = house, random.Random(seed), ids, {}

    def run(self, until):
        while time.monotonic() < until:
            what = self.chance.random()
            if what < 0.05:
                self.make_noise()
            elif what < 0.07:
                self.be_refused()
            else:
                self.ask()

    def make_noise(self):
        """Without a key: nobody has to answer that well."""
        with self.house.client(key=False, timeout=5).open() as connection, suppress(OSError):
            connection.send(self.chance.choice(NOISE))
            connection.sock.settimeout(self.chance.choice([0.01, 0.1]))
            connection.sock.recv(65536)

    def ident(self, kind):
        return f"soak-{kind.replace(' ', '_')}-{next(self.ids)}"

    def be_refused(self):
        """Twenty megabytes for nothing: read and refused, or refused at their length."""
        ident, path = self.ident("whole"), ROUTES[self.chance.choice(list(ROUTES))]
        body = self.chance.choice(REFUSED)
        with self.house.client(self.house.names["alice"], timeout=60).open() as connection:
            try:
                connection.start("POST", path, body, {"x-request-id": ident})
            except OSError:                         # it is refused before all has come
                self.became[ident] = "left"
                return
            self.became[ident] = self.read(connection.answer(), "refuses")

    def ask(self):
        chance = self.chance
        kind, manner, route = one_of({**GOOD, **BAD}, chance), one_of(MANNERS, chance), chance.choice(list(ROUTES))
        streams = chance.random() < 0.6 and route != "embeddings"
        urls = chance.choices(self.house.made.good, k=chance.randrange(1, 4)) if chance.random() < 0.08 and route not in ("completions", "embeddings") else []
        if urls and chance.random() < 0.3:
            urls, kind = [*urls, chance.choice(self.house.made.bad)], "refuses"
        body = body_of(route, streams, chance.choices(TEXTS, [90, 8, 1.5, 0.5])[0], urls)
        key = self.house.names[chance.choice(list(self.house.names))]
        with self.house.client(key, timeout=120, rcvbuf=8192 if manner == "reads slowly" else None).open() as connection:
            if manner == "pipelines":
                self.pipeline(connection, ROUTES[route], body, kind)
                return
            ident = self.ident(kind)
            self.became[ident] = "left"             # unless we know better
            data = connection.encode("POST", ROUTES[route], body, {"x-request-id": ident}, chunked=manner == "sends slowly" and chance.random() < 0.5)
            if manner in ("sends slowly", "gives up sending"):
                if self.dribble(connection, data, manner == "gives up sending"):
                    return
            else:
                connection.send(data)
            if manner == "half-closes":
                connection.half_close()
            if manner in ("leaves", "half-closes"):
                self.leave(connection, chance.uniform(0, 0.1))
            else:
                self.became[ident] = self.read(connection.answer(), kind, slowly=manner == "reads slowly")

    def dribble(self, connection, data, gives_up):
        """Send it in some pieces. Whether it was given up."""
        size = len(data) // 6 + 1
        for at in range(0, len(data), size):
            if gives_up and at > 2 * size:
                self.end(connection)
                return True
            connection.send(data[at:at + size])
            time.sleep(0.02)

    def leave(self, connection, patience):
        """Read for a while, then go."""
        connection.sock.settimeout(patience + 0.001)
        with suppress(OSError):
            while connection.sock.recv(65536):
                connection.sock.settimeout(0.01)
        self.end(connection)

    def end(self, connection):
        connection.reset() if self.chance.random() < 0.5 else connection.close()

    def pipeline(self, connection, path, body, kind):
        """Three requests in one go, and their answers in this order."""
        idents = [self.ident(kind) for _ in range(3)]
        self.became.update(dict.fromkeys(idents, "left"))
        connection.send(b"".join(connection.encode("POST", path, body, {"x-request-id": ident}) for ident in idents))
        for ident in idents:
            try:
                answer = connection.answer()
            except (Truncated, OSError):            # a refusal may end the connection
                return
            self.became[ident] = self.read(answer, kind)
            if answer.headers.get("connection") == "close":
                return

    def read(self, answer, kind, slowly=False):
        """What became of it: its status where that is an error, "whole", or "error" at the end of a stream."""
        parts = []
        for number, (data, _) in enumerate(answer.pieces()):
            parts.append(data)
            if slowly and number < 30:
                time.sleep(0.03)
        data = b"".join(parts)
        assert answer.complete
        if answer.status != 200:
            json.loads(data)
            if kind in GOOD:
                assert answer.status in (429, 503), (answer.headers["x-request-id"], answer.status, data[:500])
            return answer.status
        if data.startswith(b"{"):
            json.loads(data)
            return "whole"
        tail = data[-100_000:] if len(data) < 200_000 else data
        if data.endswith(LAST) or any(event in tail for event in LAST_EVENTS):
            return "whole"
        assert b"error" in data.rpartition(b"data: ")[2] and (kind not in GOOD or b"images" in data), (answer.headers["x-request-id"], data[-500:])
        return "error"


def body_of(route, streams, text, urls):
    """A request for a route, as bytes, with images by their addresses."""
    return json.dumps(fields_of(route, streams, "@text@", urls), separators=(",", ":")).encode().replace(b"@text@", text)


def fields_of(route, streams, text, urls):
    body = {"stream": streams, "model": MODELS[0]["id"], "max_tokens": 99}
    if route == "embeddings":
        return {"model": "vectors", "input": [text, "b"]}
    if route == "completions":
        return {**body, "prompt": text}
    if route == "responses":
        parts = [{"type": "input_text", "text": text}, *({"type": "input_image", "image_url": url} for url in urls)]
        del body["max_tokens"]
        return {**body, "input": [{"role": "user", "content": parts}]}
    if route == "messages":
        parts = [{"type": "text", "text": text}, *({"type": "image", "source": {"type": "url", "url": url}} for url in urls)]
    else:
        parts = [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    return {**body, "messages": [{"role": "user", "content": parts}]}


# ---- the soak

@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    db = folder / "stock.db"
    open_database(db)
    try:
        made = {name: keys.add_key(name) for name in ("alice", "bob", "carol", "strict", "narrow")}
    finally:
        keys.database.close()
    with Engine() as engine, Engine() as pictures, started(
            engine, folder, (db, made["alice"]), STATE, config=WITH_VECTORS, max_active=SLOTS, max_queued=40, poll=0.5, keepalive=0.3,
            stall_timeout=10, answer_timeout=20, image_urls=f"127.0.0.1:{pictures.port}", image_timeout=1, max_body="24 MB",
            max_bodies="400 MB") as gateway:
        assert gateway.keys("limit", "strict", "--rpm", "60").returncode == 0
        assert gateway.keys("limit", "narrow", "--active", "2").returncode == 0
        gateway.engine, gateway.names, gateway.made = engine, made, Engines(engine, pictures)
        yield gateway


@pytest.mark.timeout(SECONDS * 1.2 + 90)
def test_soak(house, capsys):
    ids, warm = count(), Client(house, 1, count())
    warm.run(time.monotonic() + 1)                  # once, so that what is made only once is there
    at_rest(house)
    before, files, earlier, counted = state(house), descriptors(house), len(rows(house.db)), gauges(house)
    clients = [Client(house, seed, ids) for seed in range(2, THREADS + 2)]
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(THREADS) as pool:
        running = [pool.submit(client.run, until) for client in clients]
        memory = watch(house, running, until)
        for one in running:
            one.result()
    at_rest(house, before["greenlets"])
    wait_until(lambda: len(descriptors(house)) <= len(files), 5, what=f"only {files} open (now {descriptors(house)})")
    became = {ident: outcome for client in clients for ident, outcome in client.became.items()}
    found = rows(house.db)[earlier:]
    now = gauges(house)
    with capsys.disabled():
        print("\n" + report(became, found, memory, now, counted, before, state(house)))
    check_rows(became, found)
    assert sums(house.db) == days(house.db)
    assert state(house)["held"] == 0 and now["sparks_active"] == now["sparks_queued"] == 0
    first, last = thirds(memory)
    assert SECONDS < 60 or last <= first * 1.15 + 30 * MB, f"{first / MB:.0f} -> {last / MB:.0f} MB"
    assert not house.engine.faults, house.engine.faults[0]


def watch(house, running, until):
    """The worker's memory each quarter of a second, until the end, or until a client fails."""
    memory = []
    while time.monotonic() < until and not any(one.done() for one in running):
        time.sleep(0.25)
        memory.append(resident(house))
        for server in (house.engine, house.made.pictures):
            with server.changed:
                server.requests.clear(), server.probes.clear()
    return memory


def at_rest(house, greenlets=None):
    """Until nothing goes on any more, and as few greenlets are there."""
    idle(house, 10)

    def calm():
        now = state(house)
        return now["live"] <= 1 and now["idle"] == now["held"] == 0 and now["greenlets"] <= (greenlets or now["greenlets"])
    wait_until(calm, 10, what=f"a gateway at rest: {greenlets} greenlets, {state(house)}")


def thirds(memory):
    """The median of the first third and of the last one."""
    size = len(memory) // 3
    return statistics.median(memory[:size]), statistics.median(memory[-size:])


def check_rows(became, found):
    """One row for each request whose client saw an answer, and at most one for the others; each as its client saw it."""
    by_id = {row["id"]: row for row in found if row["id"].startswith("soak-")}
    assert len(by_id) == sum(row["id"].startswith("soak-") for row in found)
    missing = [ident for ident, outcome in became.items() if outcome != "left" and ident not in by_id]
    assert not missing and by_id.keys() <= became.keys(), missing[:5]
    for ident, row in by_id.items():
        outcome = became[ident]
        fits = {"left": True, "whole": row["status"] == 200 and not row["aborted"], "error": row["status"] >= 400 and not row["aborted"]}
        assert fits.get(outcome, row["status"] == outcome), (outcome, row)


# ---- real servers, and pauses

USUAL = 5                                           # seconds: the gateway's poll, and what uvicorn and llama.cpp leave a connection idle
SCALE = 1 if SECONDS >= 60 else 0.2
NAMES = ("asgi", "tiny", MODELS[0]["id"])
ASKED = [{"role": "user", "content": "Hello"}]
ASKS = {"/v1/chat/completions": {"messages": ASKED, "max_tokens": 8}, "/v1/messages": {"messages": ASKED, "max_tokens": 8},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 8}}


@pytest.fixture
def real(llama, tmp_path, stock):
    """A gateway as it is by default, before real uvicorn, real llama.cpp, and a scripted engine whose looks go wrong every third time."""
    pytest.importorskip("uvicorn", reason="./run.sh test --soak installs it")
    port = free_port()
    uvicorn = serve([sys.executable, SUPPORT / "asgi_engine.py", port, max(1, round(USUAL * SCALE))], port, tmp_path, 30)
    with Engine() as engine:
        engine.idle = USUAL * SCALE
        engines = SimpleNamespace(url=",".join((next(uvicorn), llama, engine.url)))
        with started(engines, tmp_path, stock, poll=USUAL * SCALE, max_active=8) as gateway:
            wait_until(lambda: listed(gateway) == NAMES, 15)
            engine.on("/health", lambda request: [Reset()] if len(engine.probes) % 3 == 0 else None)
            yield gateway
    uvicorn.close()


def listed(gateway):
    return tuple(entry["id"] for entry in gateway.client().get("/v1/models").json()["data"])


@pytest.mark.timeout(SECONDS * 1.2 + 90)
def test_no_real_server_is_off_for_a_moment(real, capsys):
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(13) as pool:
        visitors = [pool.submit(visit, real, NAMES[seed % 3], random.Random(seed), until) for seed in range(12)]
        lists = pool.submit(lists_until, real, until)
    became = sum((visitor.result() for visitor in visitors), Counter())
    with capsys.disabled():
        print(f"\nsoak: {SECONDS:.0f} s before real servers: {dict(became)}; lists of models: {lists.result()}")
    assert set(became) == {(name, 200) for name in NAMES} and lists.result() == {NAMES}
    assert " is off" not in real.log and "models loaded: none" not in real.log


def visit(gateway, name, chance, until):
    """Ask that model now and then: how often, by status. Most pauses end about when an idle connection does."""
    became = Counter()
    while time.monotonic() < until:
        path, streams = chance.choice(list(ASKS)), chance.random() < 0.5
        answer = gateway.client(timeout=60).post(path, {**ASKS[path], "model": name, "stream": streams})
        data = answer.read_all()
        became[name, answer.status] += 1
        assert answer.status == 200 and answer.complete and b'"error":{' not in data, data
        assert not streams or data.endswith(LAST) or any(event in data for event in LAST_EVENTS), data
        time.sleep(min(chance.choice([0, chance.uniform(0.8, 1.2) * USUAL * SCALE, chance.uniform(0, 2) * USUAL * SCALE]),
                       max(0, until - time.monotonic())))
    return became


def lists_until(gateway, until):
    """All lists of models that people could see meanwhile."""
    seen = set()
    while time.monotonic() < until:
        seen.add(listed(gateway))
        time.sleep(0.1)
    return seen


def report(became, found, memory, now, counted, before, after):
    outcomes, statuses = Counter(map(str, became.values())), Counter(row["status"] for row in found)
    runs = {name: value - counted.get(name, 0) for name, value in now.items() if name.startswith("sparks_loop_seconds_bucket")}
    first, last = thirds(memory)
    return (f"soak: {SECONDS:.0f} s, {len(became)} requests ({dict(outcomes.most_common())}), {len(found)} rows ({dict(statuses.most_common())})\n"
            f"      memory {first / MB:.0f} -> {last / MB:.0f} MB, at most {max(memory) / MB:.0f}; greenlets {before['greenlets']} -> "
            f"{after['greenlets']}; the longest run of the loop {now['sparks_loop_longest_seconds'] * 1000:.0f} ms\n      runs: "
            + ", ".join(f"{name.partition('le=')[2][1:-2]} s: {value:.0f}" for name, value in runs.items()))
