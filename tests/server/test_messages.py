"""Anthropic's Messages through the real gateway, before a scripted engine."""
import json
import threading
import time

import pytest

from support.engine import (
    Close,
    Hang,
    Head,
    Json,
    Pause,
    Wait,
    chat_chunks,
    completion,
    died,
    refusal,
)
from support.gateway import started
from support.messages import COUNTED, HELLO, MODEL, transcript
from support.observe import gauges, idle
from support.processes import wait_until
from support.rows import row_of
from support.state import STATE
from support.templates import render

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"


def body(**fields):
    return {"model": MODEL, "max_tokens": 100, "messages": HELLO, **fields}


def post(gateway, path=PATH, headers=None, key=None, **fields):
    return gateway.client(key).post(path, body(**fields), headers)


def failure(answer):
    """(status, type, message) of an error in Anthropic's shape."""
    value = answer.json()
    assert value["type"] == "error" and set(value) == {"type", "error", "request_id"} and set(value["error"]) == {"type", "message"}
    assert answer.headers["request-id"] == answer.headers["x-request-id"] == value["request_id"]
    return answer.status, value["error"]["type"], value["error"]["message"]


# ---- the answer

def test_plain(shared):
    shared.engine.play(Json(completion("Hello there", cached=8)))
    answer = post(shared, model="claude-sonnet-4-6")
    value = answer.json()
    assert value["content"] == [{"type": "text", "text": "Hello there", "citations": []}] and value["model"] == "claude-sonnet-4-6"
    assert value["usage"]["input_tokens"] == 7 and value["usage"]["cache_read_input_tokens"] == 8
    assert answer.headers["request-id"] and answer.headers["content-type"] == "application/json"
    sent = shared.engine.requests[-1]
    assert (sent.path, sent.json()["model"]) == ("/v1/chat/completions", MODEL)
    assert "/tokenize" not in [probe.path for probe in shared.engine.probes]


@pytest.mark.parametrize("headers", [
    {"authorization": None, "x-api-key": "KEY"}, {}, {"anthropic-version": "2023-06-01",
                                                      "anthropic-beta": "a-2025-01-01,b-2025-01-01"},
    {"anthropic-version": "2099-01-01"}])
@pytest.mark.parametrize("query", ["", "?beta=true"])
def test_ways_to_ask(shared, headers, query):
    headers = {name: shared.key if value == "KEY" else value for name, value in headers.items()}
    assert post(shared, PATH + query, headers).json()["type"] == "message"


def test_stream(shared):
    shared.engine.play(*chat_chunks("Hello there", reasoning="Let me", usage=True, cached=8))
    answer = post(shared, stream=True, thinking={"type": "adaptive"})
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.headers["request-id"]
    data = answer.read_all()
    assert transcript(data)[:3] == [("start", COUNTED), ("ping",), (0, "thinking")] and transcript(data)[-2:] == [("end_turn",),
        ("end",)]
    assert b'"input_tokens":7,"cache_creation_input_tokens":0,"cache_read_input_tokens":8' in data
    assert [probe.json()["messages"] for probe in shared.engine.probes if probe.path == "/tokenize"] == [HELLO]


@pytest.mark.parametrize("steps", [[Json(completion("Hello there"))]])
def test_a_plain_answer_to_a_stream(shared, steps):
    shared.engine.play(*steps)
    found = transcript(post(shared, stream=True).read_all())
    assert found[0] == ("start", COUNTED) and found[3] == (0, "+text", "Hello there") and found[-1] == ("end",)


def test_a_large_body_comes_whole(gateway, engine):
    """Long texts of a large body are never parsed; those inside tool inputs are escaped once more on their way."""
    front = gateway()
    words, image = 'say "hi"\n\\ é 🌍' * 3000, "iVBORw0K" * 400_000
    use = {"type": "tool_use", "id": "t", "name": "Write", "input": {"content": words, "n": 1}}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [
        {"type": "text", "text": words}, {"type": "image", "source": {"type": "base64", "media_type": "image/png",
            "data": image}}]}
    answer = post(front, stream=True, system=[{"type": "text", "text": words}], messages=[
        {"role": "user", "content": words}, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}])
    assert answer.status == 200 and answer.read_all()
    system, user, called, told, shown = engine.requests[-1].json()["messages"]
    assert system["content"] == user["content"] == words and told["content"] == f"Error: {words}\n[image 1 of the tool results]"
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"content": words, "n": 1}
    assert shown["content"][1] == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    counted = next(probe for probe in engine.probes if probe.path == "/tokenize")
    assert counted.json()["messages"][:4] == [system, user, called, told] and image[:1000].encode() not in counted.body


# ---- refusals

@pytest.mark.parametrize("path, fields, expected, word", [
    (PATH, {"max_tokens": None}, (400, "invalid_request_error"), "max_tokens: Field required"),
    (PATH, {"model": "nothing"}, (404, "not_found_error"), "there is no model 'nothing'"),
    (COUNT, {"messages": 5}, (400, "invalid_request_error"), "messages: must be a list"),
    (COUNT, {"model": "nothing"}, (404, "not_found_error"), "nothing"),
    ("/v1/messages/batches", {}, (404, "not_found_error"), "POST /v1/messages/batches is nothing here"),
])
def test_refusals(shared, path, fields, expected, word):
    answer = post(shared, path, **fields)
    status, kind, message = failure(answer)
    assert (status, kind) == expected and word in message and answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", [PATH, COUNT])
def test_wrong_keys(shared, path):
    for key in (False, "sk-sparks-wrong"):
        answer = post(shared, path, key=key)
        assert failure(answer)[:2] == (401, "authentication_error") and answer.headers["x-should-retry"] == "false"


def test_wrong_methods_and_bodies(shared):
    for path in (PATH, COUNT):
        answer = shared.client().get(path)
        assert failure(answer)[:2] == (405, "invalid_request_error") and "POST" in answer.headers["allow"]
        for broken in (b"{", b"[]", b"\xff", b"", b'{"messages": NaN}'):
            assert failure(shared.client().post(path, broken))[:2] == (400, "invalid_request_error")
        assert failure(shared.client().post(path, b"{}", {"content-encoding": "gzip"}))[0] == 415


@pytest.mark.parametrize("path, status, kind", [("/v1/nothing", 404, "not_found_error"),
    ("/v1/models/none", 404, "not_found_error"),
    ("/v1/models?limit=x", 400, "invalid_request_error")])
def test_who_sends_anthropics_version_is_answered_in_its_shape(shared, path, status, kind):
    assert failure(shared.client().get(path, {"anthropic-version": "2023-06-01"}))[:2] == (status, kind)
    assert set(shared.client().get(path).json()["error"]) == {"message", "type", "code", "param"}
    wrong = shared.client("sk-sparks-wrong").get("/v1/models", {"anthropic-version": "2023-06-01"})
    assert failure(wrong)[:2] == (401, "authentication_error")


def test_too_large(gateway):
    front = gateway(max_body="10 KB")
    for path in (PATH, COUNT):
        assert failure(post(front, path, system="x" * 20_000))[:2] == (413, "request_too_large")


def test_the_queue(gateway, engine):
    front = gateway(max_active=1, max_queued=0, keepalive=0.2)
    engine.play(Hang())
    held = front.client().open()
    held.start("POST", PATH, body(stream=True))
    engine.wait_for(1)
    waiting = front.client().open()
    waiting.start("POST", PATH, body(stream=True))      # one of a key may always wait
    wait_until(lambda: gauges(front)["sparks_queued"] == 1, 5)
    answer = post(front)
    assert failure(answer)[:2] == (503, "overloaded_error")
    assert answer.headers["retry-after"] and "x-should-retry" not in answer.headers
    first = next(waiting.answer().events())
    assert (first.comment, first.name, first.data) == ("queued 1", "ping", '{"type":"ping"}')
    held.close()
    waiting.close()
    idle(front)


def test_requests_a_minute(gateway):
    front = gateway()
    front.keys("limit", "tester", "--rpm", "1")
    assert post(front).status == 200
    for _ in range(14):                                 # one /context of Claude Code's
        assert post(front, COUNT).json() == {"input_tokens": COUNTED}
    answer = post(front)
    assert failure(answer)[:2] == (429, "rate_limit_error") and int(answer.headers["retry-after"])


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("step, expected, word", [
    (refusal(400, "This model's maximum context length is 2048 tokens. However, your prompt contains 2049 input tokens, which"),
     (400, "invalid_request_error"), "prompt is too long: 2049 tokens > 2048 maximum"),
    (refusal(500, "no"), (500, "api_error"), "no"),
    (Json({"error": {"message": "Loading model", "code": 503}}, 503), (503, "overloaded_error"), "Loading"),
    (Close(), (502, "api_error"), "without an answer"),
])
def test_refusals_of_the_engine(shared, streams, step, expected, word):
    for _ in range(2):                              # a connection that was used may be stale, and is tried once more
        shared.engine.play(step)
    answer = post(shared, stream=streams)
    status, kind, message = failure(answer)
    assert (status, kind) == expected and word in message
    assert (answer.headers.get("x-should-retry") == "false") == (status == 400)
    assert ("retry-after" in answer.headers) == (status == 503)


@pytest.mark.parametrize("ending", [[died(), b"data: [DONE]\n\n"], [Close()], [b"data: [DONE]\n\n"]],
                         ids=["error", "cut", "no finish"])
def test_failure_in_the_middle(shared, ending):
    shared.engine.play(*chat_chunks("Hello there")[:3], *ending)
    answer = post(shared, stream=True)
    found = transcript(answer.read_all())
    assert answer.status == 200 and answer.complete and found[-1][:2] == ("error", "api_error")
    assert not {("end",), (0, "stop")} & set(found)


@pytest.mark.parametrize("steps", [chat_chunks("Hello there"), [Json({**completion("Hello there"), "usage": None})]],
                         ids=["stream", "plain"])
def test_an_engine_without_figures(shared, steps):
    """Its tokens are counted here: a client is told whole numbers, and the row has the same."""
    shared.engine.play(*steps)
    streams = len(steps) > 1
    answer = post(shared, stream=streams, headers={"x-request-id": (ident := f"messages-figures-{streams}")})
    if streams:
        usage = [event.json() for event in answer.events()][-2]["usage"]
    else:
        usage = answer.json()["usage"]
    row = row_of(shared.gateway.db, ident)
    told = [usage["input_tokens"], usage["output_tokens"]]
    assert told == [row["prompt_tokens"], row["completion_tokens"]] and min(told) > 0 and row["counted"] == "gateway"


def test_pings_while_nothing_comes(gateway, engine):
    front, go = gateway(keepalive=0.2), threading.Event()
    engine.play(Head(), Pause(0.5), *chat_chunks("Hello there")[:3], Wait(go), *chat_chunks("Hello there")[3:])
    events, seen = post(front, stream=True).events(), []
    for event in events:
        seen.append(event.name)
        if seen[-3:] == ["content_block_delta", "ping", "ping"]:
            go.set()
    assert seen[:2] == ["ping", "ping"] and seen[-1] == "message_stop" and seen.index("message_start") > 1


# ---- a history with what nobody here knows

def test_what_was_left_out_stands_in_a_header(shared):
    upload = {"type": "container_upload\r\nx: y", "file_id": "f"}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, upload]}, {"role": "assistant", "content": None},
                {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "mcp__x"}}]}, *HELLO]
    tools = [{"name": "mcp__x", "input_schema": {"type": "object"}, "defer_loading": True}]
    for path, fields in ((PATH, {}), (PATH, {"stream": True}), (COUNT, {})):
        answer = post(shared, path, messages=messages, tools=tools, **fields)
        assert answer.read_all() and answer.status == 200
        assert answer.headers["x-sparks-ignored"] == "messages.0.content.1 container_upload__x__y"
    shared.engine.play(refusal(400, "no"))
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
    for more in ([], [{"role": "user", "content": [image]}]):
        refused = post(shared, messages=[*messages, *more], tools=tools)
        assert (refused.status, refused.headers["x-sparks-ignored"]) == (400, "messages.0.content.1 container_upload__x__y")
    shared.engine.play(Json(completion("Hello")))
    assert "x-sparks-ignored" not in post(shared).headers
    known = [request.json()["tools"][0]["function"]["name"] for request in shared.engine.requests[-4:-1]]
    assert known == ["mcp__x"] * 3


# ---- counting

@pytest.mark.parametrize("like", ["vllm", "llama"])
def test_count_tokens(gateway, engine, like):
    engine.like = like
    front = gateway()
    tool = {"name": "f", "input_schema": {"type": "object"}}
    for _ in range(2):
        answer = post(front, COUNT, max_tokens=None, tools=[tool])
        prompt = render(engine.template, next(probe for probe in engine.probes if probe.method == "POST").json())
        assert answer.json() == {"input_tokens": COUNTED if like == "vllm" else len(prompt) // 4} and prompt.endswith("</think>")
    asked = [probe for probe in engine.probes if probe.method == "POST"]
    assert [probe.path for probe in asked] == {"vllm": ["/tokenize"], "llama": ["/apply-template", "/tokenize"]}[like] * 2
    assert asked[-2].json()["tools"][0]["function"]["name"] == "f" and not engine.requests


def test_earlier_reasoning_counts(shared):
    """vLLM's /tokenize knows it by one of the names that its chat knows."""
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    post(shared, COUNT, messages=[{"role": "assistant", "content": [thinking, {"type": "text", "text": "4"}]}])
    probe = [probe for probe in shared.engine.probes if probe.path == "/tokenize"][-1]
    assert probe.json()["messages"] == [{"role": "assistant", "content": "4", "reasoning": "hm"}]


def test_images_count_by_an_estimate(shared):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    plain = post(shared, COUNT, messages=[{"role": "user", "content": [{"type": "text",
        "text": "Hello"}]}]).json()["input_tokens"]
    seen = post(shared, COUNT, messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}, image,
        image]}]).json()["input_tokens"]
    assert 3000 <= seen - plain < 3010


@pytest.mark.parametrize("answer", [
    [Json({"detail": "Not Found"}, 404)], [Json({"count": "many"})], [Json([])], [Head(framing=3), b"no!"], [Close()],
    [Json({"count": -1, "tokens": 5})]], ids=["404", "text", "list", "no JSON", "cut", "odd"])
def test_an_engine_that_cannot_count(shared, answer):
    shared.engine.routes["/tokenize"] = answer
    said = post(shared, COUNT).json()["input_tokens"]
    assert 0 < said < 100
    assert transcript(post(shared, stream=True).read_all())[0] == ("start", said)


def test_counting_takes_no_slot_and_ends_with_its_client(gateway, engine):
    front = gateway(max_active=1)
    engine.routes["/tokenize"] = [Hang()]
    connection = front.client().open()
    connection.start("POST", COUNT, body(), {"x-request-id": "count-1"})
    wait_until(lambda: [probe for probe in engine.probes if probe.path == "/tokenize"], 5, what="the question")
    assert gauges(front)["sparks_active"] == 0 and post(front).status == 200
    probe = next(probe for probe in engine.probes if probe.path == "/tokenize")
    connection.close()
    assert row_of(front.db, "count-1")["status"] == 499
    wait_until(lambda: engine.active == 0, 2)
    assert probe


def test_a_slow_count_holds_up_nothing(shared):
    shared.engine.routes["/tokenize"] = [Hang()]
    began = time.monotonic()
    found = transcript(post(shared, stream=True).read_all())
    assert time.monotonic() - began < 4 and found[0][0] == "start" and 0 < found[0][1] < 100 and found[-1] == ("end",)


@pytest.mark.timeout(60)
def test_nothing_of_counting_is_left_behind(engine, tmp_path, stock):
    """Streams that leave at any moment while their prompt is counted for ever."""
    engine.routes["/tokenize"] = [Hang()]
    engine.always([*chat_chunks("Hello there")[:3], Hang()])
    with started(engine, tmp_path, stock, STATE, max_active=4) as gateway:
        def state():
            return gateway.client(key=False).get("/state").json()
        gateway.client().get("/v1/models").read_all()
        before = state()["greenlets"]
        for n in range(24):
            with gateway.client().open() as connection:
                connection.start("POST", PATH if n % 6 else COUNT, body(stream=True))
                if n % 4 == 3:
                    next(connection.answer().events())
        idle(gateway)
        wait_until(lambda: state()["greenlets"] <= before and state()["live"] <= 1, 5,
                   what=f"{before} greenlets again ({state()})")
        assert state()["held"] == 0
