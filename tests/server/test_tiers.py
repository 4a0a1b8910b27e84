"""Service tiers: who asks for one, or whose key is batch, hears on every route which one it had, streamed and plain.

The SDKs' types of these answers: tests/clients/test_oracle_tiers.py."""

import json
import threading

import pytest

import support.chat
from support.engine import (
    DONE,
    MODELS,
    Head,
    Json,
    Wait,
    chat_chunks,
    completion,
    embeddings,
    sse,
    text_chunks,
    text_completion,
)
from support.gateway import WITH_VECTORS
from support.rows import rows

CHAT, TEXT, MESSAGES, RESPONSES = support.chat.ROUTES
VECTORS = "/v1/embeddings"
ROUTES = {**support.chat.ROUTES, VECTORS: {"input": "Hello", "model": "vectors"}}
WAYS = [(path, streams) for path in ROUTES for streams in (False, True) if not (streams and path == VECTORS)]
ALL_WAYS = pytest.mark.parametrize("path, streams", WAYS, ids=[f"{path} {'streamed' if streams else 'plain'}" for path, streams in WAYS])
OURS = {"flex": "batch", "default": "standard"}     # in Anthropic's words


@pytest.fixture(scope="module")
def batch(shared_vectors_pair):
    """A key that is batch."""
    gateway = shared_vectors_pair.gateway
    key = gateway.add_key("jobs")
    assert gateway.keys("limit", "jobs", "--batch").returncode == 0
    return key


def post(pair, path, streams, key=None, **fields):
    return pair.client(key).post(path, {**ROUTES[path], **({"stream": True} if streams else {}), **fields})


def said(answer, path, streams):
    """The tiers in an answer, of each event that has a place for one."""
    assert answer.status == 200, answer.read_all()
    if not streams:
        values = [answer.json()]
    else:
        values = [event.json() for event in answer.events() if event.comment is None and event.data != "[DONE]"]
    if path == MESSAGES:
        holders = [value.get("message", value) for value in values if value["type"] in ("message", "message_start")]
        return [holder["usage"]["service_tier"] for holder in holders]
    if path == RESPONSES and streams:
        values = [value["response"] for value in values if "response" in value]
    return [value.get("service_tier") for value in values]


def contradicting(engine):
    """An engine that names a tier of its own in everything it says, as vLLM's Responses do."""
    for way, whole, events in ((CHAT, completion("Hello there you"), chat_chunks("Hello there you", usage=True)),
                               (TEXT, text_completion("Hello there you"), text_chunks("Hello there you", usage=True))):
        named = [sse({**json.loads(event[6:]), "service_tier": "auto"}) for event in events if event != DONE]
        engine.on(way, lambda request, whole=whole, named=named: [*named, DONE] if request.json().get("stream") else [
            Json({**whole, "service_tier": "auto"})])
    engine.on(VECTORS, [Json({**embeddings([0.5]), "service_tier": "auto"})])


@ALL_WAYS
@pytest.mark.parametrize("asked, had", [("flex", "flex"), ("auto", "default")])
@pytest.mark.parametrize("echoes", [False, True], ids=["", "an engine that names its own"])
def test_what_was_asked_for(shared_vectors, path, streams, asked, had, echoes):
    """The engine never hears of it."""
    shared_vectors.engine.on(VECTORS, [Json(embeddings([0.5]))])
    if echoes:
        contradicting(shared_vectors.engine)
    if path == MESSAGES:
        had = OURS[had]
    tiers = said(post(shared_vectors, path, streams, service_tier=asked, stream_options={"include_usage": True} if path in (
        CHAT, TEXT) and streams else None), path, streams)
    assert tiers and set(tiers) == {had}
    assert "service_tier" not in shared_vectors.engine.requests[-1].json()


@ALL_WAYS
def test_a_key_that_is_batch(shared_vectors, batch, path, streams):
    """Whatever it asks for."""
    shared_vectors.engine.on(VECTORS, [Json(embeddings([0.5]))])
    for asked in (None, "auto"):
        tiers = said(post(shared_vectors, path, streams, batch, service_tier=asked), path, streams)
        assert tiers and set(tiers) == {"batch" if path == MESSAGES else "flex"}


@ALL_WAYS
def test_nobody_asked(shared_vectors, path, streams):
    shared_vectors.engine.on(VECTORS, [Json(embeddings([0.5]))])
    tiers = said(post(shared_vectors, path, streams, service_tier=None), path, streams)
    assert set(tiers) == {"default" if path == RESPONSES else None}


@ALL_WAYS
def test_words_that_are_none(shared_vectors, path, streams):
    for wrong in ("gold", "Flex", "", 5, True, ["flex"], {"tier": "flex"}):
        answer = post(shared_vectors, path, streams, service_tier=wrong)
        error = answer.json()["error"]
        assert answer.status == 400 and "service_tier" in error["message"] and "flex" in error["message"]
        assert path == MESSAGES or error["param"] == "service_tier"
    assert not shared_vectors.engine.requests


# ---- the engine's own queue

@pytest.mark.parametrize("like, scheduling, sent", [("vllm", "priority", 1), ("vllm", "fcfs", None), ("llama", "priority", None)])
def test_the_engine_s_own_queue(gateway, engine, like, scheduling, sent):
    """Where the owner says that vLLM goes by priority, what is batch comes behind all others."""
    engine.like = like
    engine.on(VECTORS, [Json(embeddings([0.5]))])
    front = gateway(config=WITH_VECTORS, scheduling=scheduling)
    for path, streams in WAYS:
        for tier in ("flex", None):
            answer = front.client().post(path, {**ROUTES[path], "stream": streams, "service_tier": tier, "priority": -5})
            assert answer.status == 200, answer.read_all()
            answer.read_all()
            body = engine.requests[-1].json()
            assert body.get("priority") == (sent if tier else None), (path, streams)
            assert body["model"] == MODELS[0]["id"]


# ---- our own

@pytest.mark.parametrize("heavy", [8000, 0])
def test_it_is_last_in_turn(gateway, engine, heavy):
    """Whoever asked first, and whichever key it is of."""
    front = gateway(max_active=1, keepalive=0.1, heavy_prompt=heavy)
    other = front.add_key("other")
    go = threading.Event()
    engine.always(lambda request: [Head(), Wait(go), *chat_chunks("Hi")])
    answers = []
    for key, tier, name in ((None, None, "runs"), (None, "flex", "last"), (None, None, "second"), (other, None, "first")):
        body = {**ROUTES[CHAT], "stream": True, "service_tier": tier}
        answers.append(front.client(key).post(CHAT, body, {"x-request-id": name}))
        next(answers[-1].events())
    go.set()
    for answer in answers:
        answer.read_all()
    assert [row["id"] for row in rows(front.db, "route LIKE 'POST%'")] == ["runs", "first", "second", "last"]
