"""What may reach an engine, and what an engine's end means: on every route, streamed and plain, on the real server."""
import json

import pytest

import support.chat
from support.chat import HELLO
from support.chat import PATH as CHAT
from support.engine import (
    DONE,
    MODELS,
    Close,
    Json,
    Pause,
    chat_chunks,
    completion,
    died,
    embeddings,
    sse,
    text_chunks,
    text_completion,
)
from support.observe import idle
from support.rows import row_of

MODEL = MODELS[0]["id"]
TEXT = "/v1/completions"
ROUTES = {**support.chat.ROUTES, "/v1/embeddings": {"input": "Hello", "model": "vectors"}}
WAYS = [(path, streams) for path in ROUTES for streams in (False, True) if not (streams and path == "/v1/embeddings")]
ALL_WAYS = pytest.mark.parametrize("path, streams", WAYS, ids=[f"{path} {'streamed' if streams else 'plain'}" for path, streams in WAYS])


def ask(pair, path, streams, headers=None, **fields):
    return pair.client().post(path, {**ROUTES[path], **({"stream": True} if streams else {}), **fields}, headers)


# ---- what never reaches an engine

STEERING = {"priority": -9, "session_id": "mine", "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"},
            "ec_transfer_params": {"a": 1}, "session_params": {"id": "s"}, "routed_dp_rank": 1, "data_parallel_rank": 1, "bootstrap_host": "h",
            "bootstrap_port": 1, "bootstrap_room": 1, "id_slot": 0, "nvext": {"agent_hints": {"priority": 9}}}
HEADERS = {"X-Vllm-Priority": "-9", "X-data-parallel-rank": "1", "X-Session-ID": "mine", "endpoint-load-metrics-format": "TEXT",
           "x-vllm-PRIORITY": "-10", "X-Dynamo-Request-Priority": "9", "X-SMG-Routing-Key": "k", "traceparent": "00-1-1-01", "Cookie": "a=b",
           "X-Forwarded-For": "10.0.0.1", "User-Agent": "me", "X-Anything": "x", "Priority": "u=0", "X-Request-Id": "mine-1"}
# All that an engine is told beside the body.
TOLD = {"host", "accept-encoding", "content-type", "content-length", "x-request-id"}


@ALL_WAYS
def test_a_client_cannot_steer_an_engine(shared_vectors, path, streams):
    """Its own place in the engine's queue, a rank, another's cache: neither by a header nor by a field, nor by one inside another."""
    inside = {"vllm_xargs": {**STEERING, "kept": 1}, "extra_body": {**STEERING, "extra_body": STEERING, "kept": [2]}}
    if path == "/v1/embeddings":
        shared_vectors.engine.play(Json(embeddings([0.5])))
    answer = ask(shared_vectors, path, streams, HEADERS, **STEERING, **inside)
    said = answer.read_all()
    assert answer.status == 200, said
    idle(shared_vectors.gateway)
    asked = [*shared_vectors.engine.requests, *(probe for probe in shared_vectors.engine.probes if probe.method == "POST")]
    for request in asked:
        assert {name.lower() for name, _ in request.headers} <= TOLD
        assert not STEERING.keys() & request.json().keys() and not any(f'"{name}"'.encode() in request.body for name in STEERING)
    sent = shared_vectors.engine.requests[-1].json()
    if path == "/v1/messages":                      # it has its own list of what passes
        assert not inside.keys() & sent.keys()
    else:
        assert sent["vllm_xargs"] == {"kept": 1} and sent["extra_body"] == {"extra_body": {}, "kept": [2]}
    named = answer.headers["x-sparks-ignored"]
    assert named.startswith("priority field, session_id field, kv_transfer_params field") and "more" in named


def test_a_field_that_says_nothing_is_not_named(shared):
    for path, streams in WAYS[:4]:
        answer = ask(shared, path, streams, priority=None, vllm_xargs=None)
        assert answer.status == 200 and "x-sparks-ignored" not in answer.headers
        answer.read_all()
        assert "priority" not in shared.engine.requests[-1].json()


def test_what_a_prompts_length_costs_is_not_steered_either(shared):
    answer = shared.client().post("/v1/messages/count_tokens", {"messages": HELLO, "priority": -9, "vllm_xargs": {"session_id": "x"}}, HEADERS)
    assert answer.status == 200 and answer.headers["x-sparks-ignored"] == "priority field, vllm_xargs.session_id field"
    probe = [probe for probe in shared.engine.probes if probe.path == "/tokenize"][-1]
    assert {name.lower() for name, _ in probe.headers} <= TOLD and b"priority" not in probe.body


# ---- what an engine gave up

TURNS = [path for path in ROUTES if path != "/v1/embeddings"]


def streamed(path, finish=None, usage=True):
    """An engine's stream, as a list of events. `finish`: with which word it ends; None: it breaks off."""
    if path != TEXT:
        events = chat_chunks("Hello there", reasoning="Hm", usage=usage, finish=finish or "stop")
        return events if finish else events[:4]
    events = [event.replace(b'"stop"', json.dumps(finish).encode()) for event in text_chunks("Hello there", usage=usage)]
    return events if finish else events[:2]


def plain(path, finish):
    answer = text_completion("Hello") if path == TEXT else completion("Hello")
    answer["choices"][0]["finish_reason"] = finish
    return [Json(answer)]


# STACK of real engines: what they send when they are killed, stopped, or lose a rank, in the middle of an answer.
ENDS = {
    "killed": lambda path: [*streamed(path), died(), DONE],
    "killed, in one piece": lambda path: [b"".join([*streamed(path), died(), DONE])],
    "killed behind a comment": lambda path: [*streamed(path), b": keep-alive\n\n", died(), DONE],
    "killed without a last word": lambda path: [*streamed(path), died(), Close()],
    "an error of the older form": lambda path: [*streamed(path), sse({"object": "error", "message": "gone", "code": 500}), DONE],
    "an error in words": lambda path: [*streamed(path), sse({"error": "EngineDeadError"}), DONE],
    "stopped": lambda path: streamed(path, "abort"),
    "stopped without usage": lambda path: streamed(path, "abort", usage=False),
    "failed": lambda path: streamed(path, "error"),
    "cancelled": lambda path: streamed(path, "cancelled"),
    "out of time": lambda path: streamed(path, "timeout"),
    "only [DONE]": lambda path: [*streamed(path), DONE],
    "only an end": lambda path: streamed(path),
    "cut": lambda path: [*streamed(path), Close()],
}


def last_words(answer):
    """(what the client reads last, all of it) of a stream."""
    data = answer.read_all()
    assert answer.complete
    return data.rstrip().rpartition(b"data: ")[2], data


@pytest.mark.parametrize("path", TURNS)
def test_a_stream_that_its_engine_did_not_finish_ends_with_an_error(shared, path, subtests):
    for name, end in ENDS.items():
        with subtests.test(name):
            shared.engine.play(*end(path))
            ident = f"given-up-{name.replace(' ', '-').replace(',', '').replace('[', '').replace(']', '')}-{path[4:].replace('/', '-')}"
            answer = ask(shared, path, True, {"x-request-id": ident})
            assert answer.status == 200
            word, data = last_words(answer)
            said = json.loads(word)
            error = said.get("error") or said["response"]["error"]
            assert error["message"] and b"Hello" in data
            for whole in (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b'"abort"', b'"cancelled"'):
                assert whole not in data, whole
            row = row_of(shared.gateway.db, ident)
            assert row["status"] >= 500 and row["truncated"] and not row["aborted"] and row["error"]


@pytest.mark.parametrize("path", TURNS)
def test_before_the_first_word_it_is_a_status(shared, path, subtests):
    for name, steps in {"killed": [died(), DONE], "stopped": streamed(path, "abort")[-3:], "by its status": Json(json.loads(died()[6:]), 500)}.items():
        for streams in (True, False):
            with subtests.test(name, streams=streams):
                shared.engine.play(*(steps if isinstance(steps, list) else [steps]))
                answer = ask(shared, path, streams)
                assert answer.status in (500, 502), answer.read_all()
                assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", TURNS)
def test_a_plain_answer_that_its_engine_did_not_finish_is_none(shared, path, subtests):
    """SIGTERM: 200, with a part of the answer. Beside it an engine that streams unasked."""
    for finish in ("abort", "error", "cancelled", "timeout"):
        for form, steps in {"plain": plain(path, finish), "a stream": streamed(path, finish)}.items():
            with subtests.test(finish, form=form):
                shared.engine.play(*steps)
                answer = ask(shared, path, False)
                assert answer.status == 502 and "gave this answer up" in answer.json()["error"]["message"]
                shared.engine.play(*plain(path, finish))
                asked = ask(shared, path, True)     # and one that does not stream, though asked to
                assert asked.status == 502, asked.read_all()


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_one_of_several_that_was_given_up_is_an_error(shared, path, subtests):
    """A whole answer beside it changes nothing: the client asked for all of them."""
    for gone in (0, 1):
        with subtests.test(gone=gone):
            whole = text_completion("a", "b") if path == TEXT else {**completion("a"), "choices": [
                {**completion(text)["choices"][0], "index": at} for at, text in enumerate("ab")]}
            whole["choices"][gone]["finish_reason"] = "abort"
            shared.engine.play(Json(whole))
            assert ask(shared, path, False, n=2).status == 502
            field = {"text": "a"} if path == TEXT else {"delta": {"content": "a"}}
            head = {"id": "c", "object": "chunk", "created": 1, "model": MODEL}
            ends = [(1 - gone, "stop"), (gone, "abort")]
            events = [sse({**head, "choices": [{"index": at, "logprobs": None, "finish_reason": None, **field}]}) for at in (0, 1)]
            events += [sse({**head, "choices": [{"index": at, "logprobs": None, "finish_reason": end, **{name: type(value)() for name, value in field.items()}}]})
                       for at, end in ends]
            shared.engine.play(*events, DONE)
            word, data = last_words(ask(shared, path, True, n=2))
            assert "gave this answer up" in json.loads(word)["error"]["message"] and b"[DONE]" not in data


def test_an_error_behind_the_finish_is_one(shared):
    """All was said, and then the engine takes it back before its [DONE]."""
    shared.engine.play(*chat_chunks("Hello", done=False), Pause(0.02), died(), DONE)
    word, data = last_words(ask(shared, CHAT, True))
    assert json.loads(word)["error"]["code"] == "upstream_error" and b"[DONE]" not in data
