"""Models: what is listed, and how a client's name finds one, on the real server."""
import errno
import os
import sqlite3
import ssl
import subprocess
import sys
import time
from contextlib import closing
from itertools import count
from threading import Event
from types import SimpleNamespace

import pytest

from engines import engine as engines_side
from engines import http1
from engines.fleet import Fleet
from engines.models import ids_of
from errors import Refusal
from support import ROOT
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
    Send,
    Wait,
    chat_chunks,
)
from support.gateway import Gateway, Shared, started
from support.observe import gauges, idle
from support.processes import clean_environment, free_port, wait_until
from support.rows import read, rows

CHAT = "/v1/chat/completions"
LISTED = "/v1/models"
OWN = MODELS[0]["id"]


def ask(gateway, model=None, **fields):
    name = {} if model is None else {"model": model}
    return gateway.client().post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], **name, **fields})


def listed(gateway):
    answer = gateway.client().get(LISTED)
    found = answer.json()
    assert answer.status == 200 and answer.headers["content-type"] == "application/json" and found["object"] == "list"
    return found["data"]


def until(gateway, models, seconds=5):
    """Wait until these models are listed, in this order: their ids, or all of their fields."""
    end = time.monotonic() + seconds
    while (found := listed(gateway)) != models and [entry["id"] for entry in found] != models:
        assert time.monotonic() < end, found
        time.sleep(0.02)


def model(id, context=None, owned_by="sparks-gateway"):
    names = ("max_model_len", "context_length", "context_window", "max_input_tokens")
    return {"id": id, "object": "model", "created": 0, "owned_by": owned_by, "type": "model", "display_name": id,
            "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active", **(dict.fromkeys(names, context) if context else {})}


def reaches(engine, answer, name):
    """The request came to the engine under its own name. (Which one the client reads is in test_the_clients_name.)"""
    assert answer.status == 200
    return engine.requests[-1].json()["model"] == name


def no_model(answer):
    error = answer.json()["error"]
    assert answer.status == 404
    assert (error["code"], error["type"], error["param"]) == ("model_not_found", "not_found_error", "model")
    return error["message"]


@pytest.fixture(scope="module")
def pair(stock, tmp_path_factory):
    """A gateway that looks at its engine twenty times a second."""
    with Engine() as engine:
        gateway = Gateway(tmp_path_factory.mktemp("models"), engine.url, stock, poll=0.05)
        try:
            gateway.wait_alive()
            yield Shared(engine, gateway)
        finally:
            gateway.stop()
        gateway.check_log()


@pytest.fixture
def shared(pair):
    pair.engine.reset()
    pair.engine.start()
    until(pair, [model(OWN, 850000)])
    yield pair
    assert not pair.engine.faults, "\n".join(pair.engine.faults)


# ---- the list

def test_fields(shared):
    assert listed(shared) == [model(OWN, 850000)]


def test_context_of_llama_cpp(shared):
    shared.engine.like, shared.engine.models = "llama", [{"id": "small", "max_model_len": 4096}]
    until(shared, ["small"])
    assert listed(shared) == [model("small", 4096)]


@pytest.mark.parametrize("entry", [{}, {"max_model_len": None}, {"max_model_len": 0}, {"max_model_len": "many"},
                                   {"meta": None}, {"meta": [1]}, {"meta": {"n_ctx": None}},
                                   {"max_model_len": -5, "meta": 3}], ids=str)
def test_context_that_is_not_known(shared, entry):
    shared.engine.on(LISTED, [Json({"object": "list", "data": [{"id": "odd", **entry}]})])
    until(shared, ["odd"])
    assert listed(shared) == [model("odd")]


@pytest.mark.parametrize("answer", [
    Json({"error": {"message": "Loading model"}}, 503), Json({"detail": "Not Found"}, 404),
    Json({"error": "Unauthorized"}, 401), Json({}, 307, {"Location": "http://127.0.0.1:9/"}), Json({}),
    Json([]), Json(None), Json("text"), *(Json({"data": data}) for data in (None, {}, [], [1], [{}], [{"id": 5}])),
], ids=lambda answer: f"{answer.status} {answer.value}"[:40])
def test_engine_whose_list_is_none(shared, answer):
    """It counts as off: an empty list, 503 for requests, and back as soon as it answers well."""
    shared.engine.on(LISTED, [answer])
    until(shared, [])
    refused = ask(shared)
    assert refused.status == 503 and refused.json()["error"]["code"] == "model_unavailable"
    assert refused.headers["retry-after"].isdigit()
    del shared.engine.routes[LISTED]
    until(shared, [OWN])
    assert ask(shared).status == 200


def test_empty_while_off(shared):
    shared.engine.stop()
    until(shared, [])
    assert shared.client().get(f"{LISTED}/{OWN}").json()["error"]["code"] == "model_unavailable"
    shared.engine.start()
    until(shared, [OWN])


def test_empty_while_it_loads(shared):
    shared.engine.models = []
    until(shared, [])
    assert ask(shared, OWN).json()["error"]["code"] == "model_unavailable"
    no_model(ask(shared, "other"))                  # what was known stays known: this one is never to come
    shared.engine.models = MODELS
    until(shared, [OWN])


def test_engine_that_changes_its_model(shared):
    shared.engine.models = [{"id": "next", "max_model_len": 1000}]
    until(shared, ["next"])
    assert reaches(shared.engine, ask(shared), "next")
    no_model(ask(shared, OWN))


def test_sick_engine(shared):
    shared.engine.on("/health", [Json({}, 500)])
    until(shared, [])
    del shared.engine.routes["/health"]
    until(shared, [OWN])


def test_engine_without_health(shared):
    shared.engine.on("/health", [Json({}, 404)])
    before, end = len(shared.engine.probes), time.monotonic() + 5
    while len(shared.engine.probes) < before + 6:
        assert time.monotonic() < end
        time.sleep(0.02)
    until(shared, [OWN])


@pytest.mark.parametrize("data", [
    b'{"data":[{"id":"m","root":5}]}', b'{"data":[{"id":"m","root":["x"]}]}', b"[" * 200_000, b'{"data":[{"id":"\\ud83d"}]}',
    b'{"data":5}', b"null"])
def test_odd_model_lists_do_not_end_the_look_out(gateway, engine, data):
    front = gateway(poll=0.1)
    engine.on("/v1/models", [Head(type="application/json", framing=len(data)), Send(data)])
    wait_until(lambda: len([probe for probe in engine.probes if probe.path == "/v1/models"]) > 5, 5)
    assert front.client(key=False).get("/metrics").status == 200
    engine.on("/v1/models", None)
    wait_until(lambda: [model["id"] for model in front.client().get("/v1/models").json()["data"]] == ["GLM-5.3-Flash-EXL3"], 5)
    front.traceback_allowed = True                      # whatever it was is in the log


MANY = b"[%b]" % b",".join([b'{"a":1}'] * 30_000)     # too much to be read in one step


def test_odd_entries_hinder_nothing_that_follows_a_look(gateway, engine):
    """The engine's state is kept for the owner and the next start, with the entries that can be."""
    front = gateway(poll=0.1, wait="alive")
    for number, odd in enumerate((b'"meta":' + MANY, b'"x":"%b"' % (b"y" * 300_000), b'"x":' + b"[" * 990 + b"]" * 990, b'"x":NaN', b'"x":"\\ud83d"',
                                  b'"root":"\\ud83d"', b'"status":["x"]', b'"status":{"value":{}},"parent":[]', b'"owned_by":{}', b'"x":1e999')):
        data = b'{"data":[{"id":"a%d",%b},{"id":"b%d"}]}' % (number, odd, number)
        engine.on(LISTED, [Head(type="application/json", framing=len(data)), Send(data)])
        kept = f"SELECT 1 FROM engine WHERE word = 'up' AND listed LIKE '%\"b{number}\"%'"
        wait_until(lambda kept=kept: read(front.db, kept), 5)


# ---- on or off

def stays_on(front, engine, count):
    """The engine's model is there until it has been asked for its list so often, and the log says nothing else."""
    end = time.monotonic() + 30
    while sum(probe.path == LISTED for probe in engine.probes) < count:
        assert ask(front).status == 200 and time.monotonic() < end
        time.sleep(0.02)
    assert "models loaded: none" not in front.log


@pytest.mark.parametrize("closing", [Close(), Reset()])
def test_an_engine_that_closes_an_idle_connection_as_it_is_used_is_on(gateway, engine, closing):
    """It takes the bytes of a second request and closes without an answer, RFC 9112 9.3.1: so a probe sends none."""
    for path in ("/health", LISTED):
        engine.on(path, lambda request: [closing] if request.nth > 1 else None)
    stays_on(gateway(poll=0.05), engine, 60)
    assert all(probe.nth == 1 for probe in engine.probes)


def test_an_engine_whose_patience_is_the_pause_between_probes_is_on(gateway, engine):
    """As with the defaults: `poll`, and what uvicorn allows an idle connection, are 5 seconds both."""
    engine.idle = 0.05
    stays_on(gateway(poll=0.05), engine, 60)


HEALTH = "/health"
FAILED = {
    "closed": (LISTED, [Close()]),
    "reset": (LISTED, [Reset()]),
    "closed at once": (HEALTH, [Close()]),
    "silent": (HEALTH, [Hang()]),
    "silent behind the head": (LISTED, [Head(), Hang()]),
    "half a head": (LISTED, [Raw(b"HTTP/1.1 200"), Close()]),
    "half a list": (LISTED, [Head(framing=500), b'{"data": [', Close()]),
    "half a chunk": (LISTED, [Head(), b'{"data": [', Close()]),
    "drips": (LISTED, [Head(), Dribble(b" " * 1000, 1, 0.02)]),
    "no HTTP": (HEALTH, [Raw(b"220 mail.example.org ESMTP\r\n\r\n"), Hang()]),
    "ailing": (HEALTH, [Json({}, 503)]),
    "loading": (LISTED, [Json({"error": {"message": "Loading model"}}, 503)]),
    "another's key": (LISTED, [Json({"error": "Unauthorized"}, 401)]),
    "no list": (LISTED, [Json({"detail": "Not Found"}, 404)]),
    "no JSON": (LISTED, [Head(), b'{"data": [{"id": ']),
    "deep JSON": (LISTED, [Head(), b"[" * 200_000]),
    "an empty list": (LISTED, [Json({"data": []})]),
    "odd entries": (LISTED, [Json({"data": [1]})]),
}
SLOW = ("busy", "has not answered")
NO_LIST = ("misconfigured", "OpenAI server")
WORDS = {  # of those that are not "off": the state and words of the reason
    "silent": SLOW, "silent behind the head": SLOW, "drips": SLOW, "loading": ("loading",),
    "another's key": ("misconfigured", "SPARKS_UPSTREAM_KEY"), "no list": NO_LIST, "no JSON": NO_LIST,
    "deep JSON": NO_LIST, "an empty list": ("misconfigured", "no model"), "odd entries": ("misconfigured", "no model"),
    "ailing": ("off", "not well", "503"), "no HTTP": ("misconfigured", "OpenAI server"),
    **dict.fromkeys(("closed", "reset", "closed at once", "half a head", "half a list", "half a chunk"), ("busy",)),
}


@pytest.fixture
def looked_at(engine, monkeypatch):
    """The gateway's side of an engine that is on."""
    monkeypatch.setattr(engines_side, "LOOK_TIMEOUT", 0.3)
    looked_at = engines_side.Engine(engine.url)
    assert looked_at.health.word == "loading" and not looked_at.serves
    looked_at.look()
    assert looked_at.serves and ids_of(looked_at.listed) == [OWN]
    return looked_at


@pytest.mark.parametrize("steps", [[Close()], [Pause(1)]])
def test_what_its_models_are_for_is_asked_until_it_is_known(engine, monkeypatch, steps):
    monkeypatch.setattr(engines_side, "LOOK_TIMEOUT", 0.3)
    looked_at, engine.embeds = engines_side.Engine(engine.url), True
    engine.on("/v1/embeddings", steps)
    looked_at.look()
    assert (looked_at.serves, looked_at.purpose) == (True, "chat")
    engine.on("/v1/embeddings", None)
    for _ in range(2):
        looked_at.look()
        assert looked_at.purpose == "embedding"
    assert [probe.path for probe in engine.probes].count("/v1/chat/completions") == 1
    engine.on("/v1/embeddings", steps)
    engine.models = [{"id": "another"}]
    for _ in range(8):
        looked_at.look()
    assert [probe.path for probe in engine.probes].count("/v1/embeddings") == 2 + engines_side.PURPOSE_LOOKS


@pytest.mark.parametrize("name", FAILED)
def test_two_failed_looks_in_a_row_put_an_engine_off(engine, looked_at, name):
    """One alone says nothing, since a healthy engine has its moments; one that is slow, or closed, never does."""
    path, steps = FAILED[name]
    word, *reason = WORDS.get(name, ("off", path))
    for _ in range(2):
        engine.on(path, steps)
        begun = time.monotonic()
        looked_at.look()
        assert looked_at.serves and time.monotonic() - begun < 3
        del engine.routes[path]
        looked_at.look()                            # the next one is well: it is as if nothing had been
        assert looked_at.health.told() == "up"
    engine.on(path, steps)
    looked_at.look()
    looked_at.look()
    assert looked_at.serves == (word == "busy") and ids_of(looked_at.listed) == [OWN]
    told = looked_at.health.told()
    assert told.startswith(f"{word}: ") and all(part in told for part in reason), told
    assert engine.url not in told
    del engine.routes[path]
    looked_at.look()
    assert looked_at.serves and looked_at.health.word == "up"


def answered(looked_at):
    """A request, to its end."""
    answer = looked_at.pool.post(CHAT, [b'{"messages": [{"role": "user", "content": "Hi"}]}'], {})
    answer.all(5, 1 << 20)
    answer.close(True)


@pytest.mark.parametrize("name", FAILED)
def test_requests_that_are_answered_are_better_evidence(engine, looked_at, name):
    """Whatever its looks say: it is busy at worst, until nothing comes any more."""
    path, steps = FAILED[name]
    engine.on(path, steps)
    for _ in range(3):
        answered(looked_at)
        looked_at.look()
        assert looked_at.serves and looked_at.health.word == ("up" if path == HEALTH else "busy")
    looked_at.look()
    looked_at.look()
    assert looked_at.serves == (WORDS.get(name, ("off",))[0] == "busy")


def test_one_look_is_enough_after_a_request_that_went_wrong(engine, looked_at):
    """Together they are two kinds of evidence; what comes after it makes up for it."""
    for was_answered, serves in ((False, False), (True, True)):
        looked_at.note_fault()
        assert looked_at.look_due.is_set()
        looked_at.look()
        assert looked_at.health.word == "up"        # it was the request's own fault
        looked_at.note_fault()
        if was_answered:
            answered(looked_at)
        engine.on(HEALTH, [Json({}, 500)])
        looked_at.look()
        assert looked_at.serves is serves
        del engine.routes[HEALTH]
        looked_at.look()


def test_questions_that_are_answered_are_no_evidence(engine, looked_at):
    """A server counts tokens, too, before a core that is dead."""
    engine.on(HEALTH, [Json({}, 503)])
    for serves in (True, False):
        looked_at.post("/tokenize", [b'{"prompt": "a"}'])
        looked_at.look()
        assert looked_at.serves is serves


def test_another_engine_under_the_same_name(engine, looked_at):
    """Whether it was away or not: it is asked as its kind wants it, for what it can do."""
    assert looked_at.figures().work and looked_at.purpose == "chat"
    engine.like, engine.models = "llama", [{"id": OWN}]
    looked_at.look()
    assert looked_at.kind.owner == "llamacpp" and b"n_decoded" in looked_at.figures().work
    engine.like = "vllm"
    looked_at.look()
    engine.stop()
    looked_at.look()
    engine.embeds = True
    engine.start()
    looked_at.look()
    assert looked_at.serves and (looked_at.kind.owner, looked_at.purpose) == ("vllm", "embedding")


def test_what_is_found_out_during_a_look_counts(engine, looked_at):
    """While it asks about a model, the watchdog finds the engine stuck, or a request finds it gone."""
    for word in ("stuck", "off"):
        looked_at.found.clear()
        engine.on("/tokenize", lambda request, word=word: looked_at.health.note(word, "found out", time.time()))
        looked_at.look()
        assert looked_at.health.told() == f"{word}: found out"
        engine.routes.clear()
        looked_at.look()
        assert looked_at.health.word == "up"


class Waits:
    owed_since = 0.0                                # a request that its engine has


def test_a_canary_is_asked_while_nothing_else_runs(engine, looked_at):
    """It would wait behind that. Once it is answered, what was known of the engine's work is over."""
    looked_at.health.note("stuck", "x", 0)
    looked_at.pulse.measure(looked_at.figures(), 1.0, 5)
    looked_at.pulse.owe(waits := Waits(), 0.0)
    looked_at.look()
    assert looked_at.health.word == "stuck" and "/v1/completions" not in [probe.path for probe in engine.probes]
    looked_at.pulse.settle(waits, False, 1.0)
    looked_at.look()
    assert looked_at.health.word == "up" and engine.probes[-1].path == "/v1/completions" and not looked_at.pulse.figures


def test_the_pause_between_looks(engine, looked_at):
    """Longer where figures tell as much meanwhile, shorter where it is gone."""
    fleet = SimpleNamespace(settings=SimpleNamespace(poll=5))
    found = [Fleet.pause_after(fleet, looked_at)]
    looked_at.pulse.owe(Waits(), 0.0)
    found.append(Fleet.pause_after(fleet, looked_at))
    looked_at.pulse.measure(looked_at.figures(), 1.0, 5)
    found.append(Fleet.pause_after(fleet, looked_at))
    engine.stop()
    looked_at.look()
    found.append(Fleet.pause_after(fleet, looked_at))
    fleet.settings.poll = 3600                      # one that is out is not left so for an hour
    found.append(Fleet.pause_after(fleet, looked_at))
    looked_at.health.note("stuck", "x", 0)
    assert [*found, Fleet.pause_after(fleet, looked_at)] == [5, 5, 10, 0.5, 0.5, 5]


def test_a_full_engine_is_no_fault(gateway, engine):
    """A look follows at once what may be an engine's end, and not what says that it has much to do."""
    front = gateway(poll=30)

    def looks():
        return sum(probe.path == LISTED for probe in engine.probes)

    def refused(status):
        engine.always([Json({"error": {"message": "the queue is full"}}, status)])
        assert ask(front).status == status

    seen = looks()
    for status in (503, 429, 400):
        refused(status)
        time.sleep(0.2)                             # twice what such a look would wait for
    assert looks() == seen
    refused(500)
    engine.wait_until(lambda: looks() > seen, 5)


def test_one_that_closes_looks_and_requests_is_off(engine, looked_at):
    engine.on(HEALTH, [Close()])
    engine.always([Close()])
    for answered, word in (([], "busy"), ([Close()], "off")):
        if answered:
            with pytest.raises(Refusal):
                looked_at.pool.post(CHAT, [b"{}"], {}).head(5)
        looked_at.look()
        looked_at.look()
        assert looked_at.health.word == word
    del engine.routes[HEALTH]
    looked_at.look()
    assert looked_at.health.word == "up"


def test_what_this_machine_is_out_of_is_no_engines_fault(engine, looked_at, monkeypatch):
    def out_of_descriptors(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(http1.socket, "create_connection", out_of_descriptors)
    for _ in range(3):
        looked_at.look()
        assert looked_at.health.told() == "busy: the gateway's machine cannot connect: Too many open files"


def test_a_slow_handshake_is_busy_where_there_was_one(engine, looked_at, monkeypatch):
    """It takes connections as before; a request that finds none says more than that."""
    engine.on(HEALTH, [Hang()])
    looked_at.looks.tls = ssl.create_default_context()
    monkeypatch.setattr(http1.Tls, "shake_hands", lambda tls: tls.sock.recv(1))     # which never comes
    for failed, word in ((0.0, "busy"), (time.monotonic(), "off")):
        looked_at.signs.failed = failed
        looked_at.look()
        looked_at.look()
        assert looked_at.health.word == word


def test_an_engine_that_is_gone_is_off_at_once(engine, looked_at):
    engine.stop()
    looked_at.look()
    assert not looked_at.serves and looked_at.health.told() == "off: connection refused: nothing listens there"


def nowhere(port):
    """Addresses at which there is no engine -> the beginning of what the owner is told."""
    return {
        f"http://127.0.0.1:{port}": "off: connection refused",
        "http://no-such-host.invalid:8000": "off: no such name",
        "http://[100::1]:8000": "off: unreachable",
    }


def test_why_there_is_no_connection(monkeypatch):
    monkeypatch.setattr(engines_side, "LOOK_TIMEOUT", 0.5)
    for url, beginning in nowhere(free_port()).items():
        looked_at = engines_side.Engine(url)
        looked_at.look()
        assert looked_at.health.told().startswith(beginning), looked_at.health.told()


def test_an_engine_that_speaks_no_tls(engine, monkeypatch):
    monkeypatch.setattr(engines_side, "LOOK_TIMEOUT", 0.5)
    looked_at = engines_side.Engine(engine.url.replace("http:", "https:"))
    looked_at.look()
    assert looked_at.health.told().startswith("off: TLS: "), looked_at.health.told()


def test_what_people_and_the_owner_learn(gateway, engine):
    """In the log at each change, in /metrics, by a command; people learn no address, and when to come back."""
    front = gateway()
    engine.key = "another"
    wait_until(lambda: state_in(front, engine.url) == "misconfigured", 10)
    refused = ask(front)
    assert refused.status == 503 and refused.json()["error"]["code"] == "model_unavailable"
    assert refused.headers["retry-after"] == "60" and engine.url not in str(refused.json()) and "UPSTREAM" not in str(refused.json())
    wanted = f"engine {engine.url} is misconfigured: it wants another key (401): set SPARKS_UPSTREAM_KEY"
    assert wanted in front.log
    assert engines_of(front).startswith(f"{engine.url}  misconfigured, for ")
    engine.key = None
    wait_until(lambda: state_in(front, engine.url) == "up", 10)
    told = engines_of(front)
    assert told.startswith(f"{engine.url}  up, for ") and "last error  misconfigured" in told and OWN in told, told
    engine.models = [{"id": "other", "max_model_len": 77}]  # the state is the same
    wait_until(lambda: "serves      other, 77 tokens" in engines_of(front), 10)
    closed = iter([[Close()]])
    engine.on(HEALTH, lambda request: next(closed, None))
    wait_until(lambda: "last error  busy: /health" in engines_of(front), 10)
    engine.stop()
    wait_until(lambda: state_in(front, engine.url) == "off", 10)
    assert ask(front).headers["retry-after"] == "5" and f"engine {engine.url} is off: connection refused" in front.log
    front.stop()
    told = engines_of(front)
    assert told.startswith("no gateway runs here now") and "why         connection refused" in told, told


def test_what_the_start_says_and_the_log_repeats(engine, tmp_path, stock):
    """Why there is no model is on the start screen; the log says it again while it lasts."""
    engine.key = "another"
    with started(engine, tmp_path, stock, patch="import engines.fleet as fleet; fleet.REMIND = 0.3", wait=False) as front:
        again = f"engine {engine.url} is still misconfigured: it wants another key (401): set SPARKS_UPSTREAM_KEY (for 0 min)"
        wait_until(lambda: front.log.count(again) > 1, 15)
        wait_until(lambda: "listens at" in front.log, 10)
        assert f"engine      {engine.url} is misconfigured: it wants another key (401)" in front.log
        engine.key = None
        wait_until(lambda: f"engine {engine.url} is up" in front.log, 10)
        engine.on(HEALTH, [Close()])
        wait_until(lambda: front.log.count(f"engine {engine.url} is still busy: /health: ") > 1, 10)


def test_the_log_is_not_flooded(gateway, engine):
    """Another reason at each look is no change of the state; the owner's command knows the state however long the database was
    locked in the moment of the change."""
    front, looks = gateway(poll=0.05), count()
    wait_until(lambda: f"engine {engine.url} is up" in front.log, 5)
    with closing(sqlite3.connect(front.db, isolation_level=None)) as owner:
        owner.execute("BEGIN IMMEDIATE")
        engine.on(HEALTH, lambda request: [Json({}, 500 + next(looks) % 5)])
        wait_until(lambda: state_in(front, engine.url) == "off", 5)
        seen = len(engine.probes)
        engine.wait_until(lambda: len(engine.probes) > seen + 20, 10)
        owner.execute("COMMIT")
    wait_until(lambda: "off, for" in engines_of(front), 5)
    assert front.log.count(f"engine {engine.url} is off") < 5 and front.log.count("cannot be kept") == 1


def state_in(front, url):
    """The state of an engine by /metrics."""
    lines = front.client(key=False).get("/metrics").read_all().decode().split("\n")
    (word,) = [line.split('state="')[1].split('"')[0] for line in lines
               if line.startswith(f'sparks_engine_state{{engine="{url}"') and line.endswith(" 1.0")]
    return word


def engines_of(front):
    """What the owner's command tells."""
    done = subprocess.run([sys.executable, "sparks.py", "--engines"], cwd=ROOT, env=clean_environment(**front.settings),
                          capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", [HEALTH, LISTED])
def test_what_a_look_takes_is_bounded(engine, looked_at, path):
    sent, done = [], Event()

    def endless(request):
        yield Head()
        for n in range(1000):
            sent.append(n)
            yield b" " * (1 << 20)
        yield Wait(done)

    engine.on(path, endless)
    looked_at.look()
    done.set()
    assert len(sent) < 50


# ---- one of them

def test_one_model(shared):
    answer = shared.client().get(f"{LISTED}/{OWN}")
    assert answer.status == 200 and answer.json() == model(OWN, 850000)
    assert shared.client().get(f"{LISTED}/{OWN.lower()}").json() == model(OWN, 850000)


def test_id_with_slashes(shared):
    shared.engine.models = [{"id": "zai-org/GLM-5.3/Flash", "max_model_len": 10}]
    until(shared, ["zai-org/GLM-5.3/Flash"])
    for path in ("zai-org/GLM-5.3/Flash", "zai-org%2FGLM-5.3%2fFlash", "Flash"):
        assert shared.client().get(f"{LISTED}/{path}").json() == model("zai-org/GLM-5.3/Flash", 10)
    no_model(shared.client().get(f"{LISTED}/zai-org"))


def test_id_with_odd_letters(shared):
    name = "modèle 日本 %41?#"
    shared.engine.models = [{"id": name}]
    until(shared, [name])
    path = "mod%C3%A8le%20%E6%97%A5%E6%9C%AC%20%2541%3F%23"
    assert shared.client().get(f"{LISTED}/{path}").json()["id"] == name
    assert reaches(shared.engine, ask(shared, name), name)


@pytest.mark.parametrize("name", ["nothing", "x" * 2000, OWN + "x", OWN[:-1], "*", "a/b", ".gguf"])
def test_unknown_model(shared, name):
    for answer in (shared.client().get(f"{LISTED}/{name}"), ask(shared, name), ask(shared, name, stream=True)):
        message = no_model(answer)
        assert OWN in message and len(message) < 300
    assert shared.engine.requests == []


# ---- which one is meant

@pytest.mark.parametrize("name", [None, OWN, OWN.lower(), OWN.upper()])
def test_names_of_the_only_model(shared, name):
    assert reaches(shared.engine, ask(shared, name), OWN)


def test_null_is_the_default(shared):
    answer = shared.client().post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "model": None})
    assert reaches(shared.engine, answer, OWN)


@pytest.mark.parametrize("name", [1, True, 0, [], {}, [OWN], {"id": OWN}])
def test_name_of_the_wrong_type(shared, name):
    answer = shared.client().post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "model": name})
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (400, "invalid_request", "model")


@pytest.mark.parametrize("file, names", [
    ("/models/Tiny-1B.Q4_K_M.gguf", ["tiny-1b.q4_k_m.gguf", "Tiny-1B.Q4_K_M", "/models/Tiny-1B.Q4_K_M.gguf"]),
    ("/models/GLM-5.3", ["glm-5.3", "/MODELS/glm-5.3"]),
])
def test_file_name_of_the_engine(shared, file, names):
    """llama.cpp calls a model by its file."""
    shared.engine.models = [{"id": file}]
    until(shared, [file])
    assert all(reaches(shared.engine, ask(shared, name), file) for name in names)


def test_served_names_of_one_root(shared):
    """vLLM's --served-model-name a b c: each is listed and reaches the engine as it is; the root's name means the first."""
    names = ["first", "second", "third"]
    shared.engine.models = [{"id": name, "root": "/models/glm", "max_model_len": 7} for name in names]
    until(shared, names)
    assert listed(shared) == [model(name, 7) for name in names]
    for name, own in (("first", "first"), ("SECOND", "second"), ("third", "third"), ("glm", "first"), (None, "first")):
        assert reaches(shared.engine, ask(shared, name), own)
    assert shared.client().get(f"{LISTED}/second").json()["id"] == "second"


def test_served_names_of_one_root_share_its_slots(gateway, engine):
    front = gateway(max_active=1, keepalive=0.2)
    engine.models = [{"id": name, "root": "/models/glm"} for name in ("first", "second")]
    until(front, ["first", "second"])
    engine.always(lambda request: [Head(), Hang()])
    held = [front.client().post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "model": name,
                                       "stream": True}) for name in ("first", "second")]
    assert engine.active == engine.max_active == 1
    for answer in held:
        answer.close()


def test_different_roots_are_different_models(shared):
    roots = {"one": "/models/one", "two": "/models/two", "uno": "/models/one"}
    shared.engine.models = [{"id": name, "root": root} for name, root in roots.items()]
    until(shared, ["one", "two", "uno"])
    assert reaches(shared.engine, ask(shared), "one")
    assert reaches(shared.engine, ask(shared, "two"), "two")
    assert reaches(shared.engine, ask(shared, "uno"), "uno")
    assert set(no_model(ask(shared, "three")).replace(" ", ",").split(",")) >= {"one", "two"}


# ---- SPARKS_MODEL

def test_the_clients_name(gateway, engine):
    """The engine's name can be a path of the operator's; what the client reads is the public one, streamed or not."""
    front = gateway(model="glm-5.3-flash")
    for name in ("glm-5.3-flash", None, OWN):
        assert ask(front, name).json()["model"] == "glm-5.3-flash"
        engine.play(*chat_chunks("a b c", usage=True))
        events = list(ask(front, name, stream=True).events())
        assert {event.json()["model"] for event in events[:-1]} == {"glm-5.3-flash"} and len(events) > 4


def test_public_name(gateway, engine):
    front = gateway(model="glm-5.3-flash")
    assert listed(front) == [model("glm-5.3-flash", 850000)]
    for name in ("glm-5.3-flash", "GLM-5.3-Flash", None, OWN, OWN.lower()):
        assert reaches(engine, ask(front, name), OWN)
    assert front.client().get(f"{LISTED}/{OWN}").json()["id"] == "glm-5.3-flash"
    message = no_model(ask(front, "mixtral"))
    assert "glm-5.3-flash" in message and OWN not in message

    stream = ask(front, "glm-5.3-flash", stream=True)
    assert {event.json()["model"] for event in stream.events() if event.data != "[DONE]"} == {"glm-5.3-flash"}

    engine.models = [{"id": "other"}, {"id": "glm-5.3-FLASH"}]      # the engine's own model of that name is meant
    end = time.monotonic() + 5
    while ask(front).status != 200 or engine.requests[-1].json()["model"] != "glm-5.3-FLASH":
        assert time.monotonic() < end
    engine.models = []
    until(front, [])
    assert ask(front, "glm-5.3-flash").status == 503
    no_model(ask(front, "mixtral"))


def test_public_name_while_the_engine_was_never_there(gateway, engine):
    engine.models = []
    front = gateway(model="glm-5.3-flash", wait="alive")
    assert listed(front) == []
    assert ask(front, "GLM-5.3-flash").json()["error"]["code"] == "model_unavailable"
    assert ask(front).json()["error"]["code"] == "model_unavailable"
    no_model(ask(front, "mixtral"))
    no_model(front.client().get(f"{LISTED}/mixtral"))


# ---- [models] in sparks.toml

CONFIG = """
[models."glm-5.3-flash"]
engine = "GLM-5.3-Flash-EXL3"
aliases = ["claude-*", "gpt-*o*", "Best", "odd[1]"]
context = 200000

[models."small"]
engine = "qwen/Qwen3-4B"
default = true
aliases = ["*-mini", "haiku*", "Claude-Tiny"]
effort = "qwen"
reasoning_field = "reasoning"

[models."later"]
"""


@pytest.fixture
def front(gateway, engine):
    engine.models = [*MODELS, {"id": "qwen/Qwen3-4B", "max_model_len": 32768}, {"id": "unmentioned"}]
    return gateway(config=CONFIG)


def test_tables(front, engine):
    names = ["glm-5.3-flash", "Best", "odd[1]"]                         # aliases too, patterns aside
    assert listed(front) == [*(model(name, 200000) for name in names), model("small", 32768), model("Claude-Tiny", 32768)]

    for name in ("glm-5.3-flash", "GLM-5.3-FLASH", OWN, "claude-sonnet-4-5", "Claude-X", "claude-", "gpt-4o",
                 "GPT-4O-2024", "best", "odd[1]"):
        assert reaches(engine, ask(front, name), OWN), name
    for name in (None, "small", "SMALL", "qwen/qwen3-4b", "Qwen3-4B", "o4-mini", "haiku", "HAIKU 4\n5", "claude-tiny"):
        assert reaches(engine, ask(front, name), "qwen/Qwen3-4B"), name
    assert reaches(engine, ask(front, "gpt-4o-mini"), OWN)              # both match: the first table wins

    for name in ("gpt-3", "GPT-"):                                      # nobody's alias: for the default model
        assert reaches(engine, ask(front, name), "qwen/Qwen3-4B"), name
    for name in ("claude", "odd1", "b.st", "unmentioned", "best2", "x-claude-y"):
        message = no_model(ask(front, name))
        assert message == f"there is no model {name!r} here; there is glm-5.3-flash, small, later (see GET /v1/models)"

    assert front.client().get(f"{LISTED}/claude-opus").json()["id"] == "glm-5.3-flash"
    unloaded = ask(front, "later")
    assert unloaded.status == 503 and "later" in unloaded.json()["error"]["message"]
    assert front.client().get(f"{LISTED}/later").status == 503

    ask(front, "small", reasoning_effort="high").read_all()             # each model has its own effort table
    assert engine.requests[-1].json()["chat_template_kwargs"] == {"enable_thinking": True}
    ask(front, "best", reasoning_effort="high").read_all()
    assert engine.requests[-1].json()["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "high"}
    for name, fields in (("small", {"reasoning"}), ("best", {"reasoning", "reasoning_content"})):
        message = ask(front, name).json()["choices"][0]["message"]
        assert {"reasoning", "reasoning_content"} & set(message) == fields

    engine.models = MODELS                                              # one of them goes
    until(front, names)
    assert ask(front, "small").status == 503 and ask(front).status == 503 and ask(front, "best").status == 200
    engine.models = [{"id": "later", "max_model_len": 5}]               # another one comes
    until(front, ["later"])
    assert ask(front, "LATER").status == 200 and ask(front, "best").status == 503


def test_only_table_takes_the_only_model(gateway, engine):
    """One table and one model: they mean each other without `engine`."""
    front = gateway(config='[models."mine"]\naliases = ["claude-*"]')
    assert listed(front) == [model("mine", 850000)]
    for name in ("mine", "claude-x", OWN, None):
        assert reaches(engine, ask(front, name), OWN)
    engine.models = [{"id": "one"}, {"id": "two"}]                      # now nobody knows which one is meant
    until(front, [])
    engine.models = [{"id": "one"}, {"id": "MINE"}]
    until(front, ["mine"])
    assert reaches(engine, ask(front), "MINE")


# ---- names of other makers' models

def test_default_model_stands_in(gateway, engine):
    """Claude Code asks small questions of a small model of its own choice; such a name need not be anybody's alias."""
    front = gateway(model="glm-5.3-flash")
    for name in ("claude-haiku-4-5-20251001", "Claude-x[1m]", "gpt-5", "gpt-"):
        assert reaches(engine, ask(front, name), OWN), name
        assert front.client().get(f"{LISTED}/{name}").json()["id"] == "glm-5.3-flash"
    for name in ("claude", "my-claude-x", "o4"):
        no_model(ask(front, name))
    assert front.keys("limit", "tester", "--models", "other").returncode == 0
    assert ask(front, "claude-x").json()["error"]["code"] == "model_not_allowed"


@pytest.mark.parametrize("settings, names, others", [
    ({"config": "stand_in_for = []"}, (), ("claude-x", "gpt-5")),
    ({"stand_in_for": "o4-*, gemini-*"}, ("o4-mini", "gemini-3"), ("claude-x", "gpt-5")),
])
def test_default_model_stands_in_for_whom_the_settings_name(gateway, engine, settings, names, others):
    front = gateway(**settings)
    for name in names:
        assert reaches(engine, ask(front, name), OWN)
    for name in others:
        no_model(ask(front, name))


# ---- pages of the list

@pytest.mark.parametrize("query, ids, more", [
    ("", "abcd", False), ("?limit=1000", "abcd", False), ("?limit=2", "ab", True), ("?limit=2&after_id=b", "cd", False),
    ("?limit=1&after_id=b", "c", True), ("?after_id=d", "", False), ("?limit=2&before_id=d", "bc", True),
    ("?limit=3&before_id=d", "abc", False), ("?before_id=a", "", False),
])
def test_pages(shared, query, ids, more):
    shared.engine.models = [{"id": name} for name in "abcd"]
    until(shared, list("abcd"))
    page = shared.client().get(LISTED + query).json()
    assert "".join(entry["id"] for entry in page["data"]) == ids and page["object"] == "list"
    assert (page["has_more"], page["first_id"], page["last_id"]) == (more, ids[:1] or None, ids[-1:] or None)


@pytest.mark.parametrize("query, param", [
    ("limit=0", "limit"), ("limit=1001", "limit"), ("limit=-1", "limit"), ("limit=x", "limit"), ("limit=", "limit"),
    ("limit=" + "9" * 3000, "limit"), ("limit=%D9%A3", "limit"), ("after_id=nobody", "after_id"), ("before_id=", "before_id")])
def test_odd_pages(shared, query, param):
    answer = shared.client().get(f"{LISTED}?{query}")
    assert answer.status == 400 and answer.json()["error"]["param"] == param
# ---- what the tables say beside names


PARTICULAR = """
[models.chat]
engine = "GLM-5.3-Flash-EXL3"
system = "Be brief."
sampling = { temperature = 0.6, max_tokens = 100 }

[models.secret]
engine = "GLM-5.3-Flash-EXL3"
hidden = true
aliases = ["internal"]
effort = "none"
"""


def test_system_prompt_sampling_and_hidden(gateway, engine):
    front = gateway(config=PARTICULAR)
    assert [entry["id"] for entry in listed(front)] == ["chat"]
    assert reaches(engine, ask(front, temperature=0), OWN)
    sent = engine.requests[-1].json()
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (sent["temperature"], sent["max_tokens"]) == (0, 100)
    for name in ("secret", "internal"):
        assert reaches(engine, ask(front, name), OWN) and len(engine.requests[-1].json()["messages"]) == 1
    assert front.client().get(f"{LISTED}/secret").json()["id"] == "secret"
    assert no_model(ask(front, "other")).endswith("there is chat (see GET /v1/models)")
    page = front.client().get("/help?format=json").json()
    assert [entry["id"] for entry in page["models"]] == ["chat"]


@pytest.mark.parametrize("path, body", [
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}), ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]})])
def test_system_prompt_through_every_api(gateway, engine, path, body):
    front = gateway(config=PARTICULAR)
    for own, system in (({}, "Be brief."), ({"instructions" if "responses" in path else "system": "Mine."}, "Mine.")):
        assert front.client().post(path, {**body, **own, "model": "chat"}).status == 200
        asked = [probe for probe in engine.probes if probe.path == "/tokenize"] if "count" in path else engine.requests
        sent = asked[-1].json()
        assert [message for message in sent["messages"] if message["role"] == "system"] == [{"role": "system", "content": system}]
        assert "count" in path or sent["temperature"] == 0.6


def test_a_key_is_told_of_its_own_models(gateway, engine):
    engine.models = [*MODELS, {"id": "other"}]
    front = gateway()
    key = front.add_key("ann")
    assert front.keys("limit", "ann", "--models", "oth*").returncode == 0
    answer = front.client(key).post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "model": "none"})
    assert no_model(answer).endswith("there is other (see GET /v1/models)")


# ---- several engines

@pytest.fixture
def both(engine):
    """A second engine, with an embedding model."""
    with Engine() as second:
        second.models, second.embeds = [{"id": "minilm", "max_model_len": 512}], True
        yield engine, second
        assert not second.faults, "\n".join(second.faults)


def upstream(engines):
    return ", ".join(one.url for one in engines)


def embed(front, model=None, **fields):
    return front.client().post("/v1/embeddings", {"input": "Hi", **({"model": model} if model else {}), **fields})


def test_each_model_goes_to_its_engine(gateway, both):
    first, second = both
    front = gateway(upstream(both), wait="alive")
    until(front, [model(OWN, 850000), model("minilm", 512)])
    assert reaches(first, ask(front), OWN) and reaches(first, ask(front, OWN), OWN)
    assert embed(front, "minilm").json()["model"] == "minilm" and second.requests[-1].json()["model"] == "minilm"
    assert embed(front).status == 200 and len(first.requests) == len(second.requests) == 2
    for name, path, fields, fit in ((OWN, "/v1/embeddings", {"input": "a"}, "use minilm"),
                                    ("minilm", CHAT, {"messages": [{"role": "user", "content": "a"}]}, f"use {OWN}"),
                                    ("minilm", "/v1/completions", {"prompt": "a"}, f"use {OWN}")):
        answer = front.client().post(path, {"model": name, **fields})
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "invalid_request", "model") and fit in error["message"]
    row = rows(front.db, "model = 'minilm' AND status = 200")[0]
    assert (row["engine"], row["route"]) == (second.url, "POST /v1/embeddings")


def test_one_of_two_engines_is_off(gateway, both):
    first, second = both
    front = gateway(upstream(both), wait="alive")
    until(front, [OWN, "minilm"])
    second.stop()
    until(front, [OWN])
    assert ask(front).status == 200 and embed(front, "minilm").status == 503
    second.start()
    until(front, [OWN, "minilm"])
    first.stop()
    until(front, ["minilm"])
    assert ask(front).status == ask(front, OWN).status == 503 and embed(front, "minilm").status == 200
    assert ask(front, "minilm").status == 400       # the default stays the first one's


def test_the_first_engine_was_never_there(gateway, both):
    first, second = both
    second.embeds = False
    first.stop()
    front = gateway(upstream(both), wait="alive")
    until(front, ["minilm"])
    assert ask(front).status == ask(front, "claude-haiku-4-5").status == 503 and ask(front, "minilm").status == 200
    first.start()
    until(front, [OWN, "minilm"])
    assert reaches(first, ask(front), OWN)


def test_an_engine_that_does_not_answer_holds_up_no_other(gateway, both):
    first, second = both
    for path in ("/health", LISTED):
        second.on(path, [Hang()])
    front = gateway(upstream(both), wait="alive")
    until(front, [OWN], 2)
    begun = time.monotonic()
    assert ask(front).status == 200 and time.monotonic() - begun < 4
    assert embed(front, "minilm").status == 404     # unknown until it answers
    first.stop()
    until(front, [], 2)


def test_the_same_model_on_two_engines(gateway, both):
    """The first that is up has it."""
    first, second = both
    second.models, second.embeds = first.models, False
    front = gateway(upstream(both), wait="alive")
    wait_until(lambda: front.log.count(" is up") == 2, 10)
    assert reaches(first, ask(front), OWN)
    first.stop()
    end = time.monotonic() + 5
    while ask(front).status != 200:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert reaches(second, ask(front), OWN)


def test_the_public_name_is_the_first_engines(gateway, both):
    front = gateway(upstream(both), wait="alive", model="glm")
    until(front, ["glm", "minilm"])
    assert reaches(both[0], ask(front), OWN) and reaches(both[0], ask(front, "glm"), OWN)


def test_tables_over_two_engines(gateway, both):
    front = gateway(upstream(both), wait="alive", config="""
[models.vectors]
engine = "minilm"
kind = "embedding"
aliases = ["text-embedding-*"]
[models.glm]
engine = "GLM-5.3-Flash-EXL3"
""")
    until(front, ["vectors", "glm"])
    assert reaches(both[0], ask(front), OWN)        # the first one that chats
    for name in ("vectors", "text-embedding-3-small", "minilm"):
        assert embed(front, name).status == 200 and both[1].requests[-1].json()["model"] == "minilm"


def test_embeddings_take_no_slot_of_a_chat(gateway, both):
    first, second = both
    front = gateway(upstream(both), wait="alive", max_active=1)
    until(front, [OWN, "minilm"])
    first.play(Hang())
    with front.client().open() as held:
        held.start("POST", CHAT, {"messages": [{"role": "user", "content": "Hi"}]})
        first.wait_for(1)
        assert embed(front, "minilm").status == 200
        second.play(Hang())
        with front.client().open() as other:
            other.start("POST", "/v1/embeddings", {"model": "minilm", "input": "a"})
            second.wait_for(2)
            with front.client().open() as third:
                third.start("POST", "/v1/embeddings", {"model": "minilm", "input": "a"})
                wait_until(lambda: gauges(front)["sparks_queued"] == 1, 5)
                assert gauges(front)["sparks_active"] == 2
    idle(front)
