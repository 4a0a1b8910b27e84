"""The Node SDK of OpenAI against the gateway; tests/support/oracle_node/oracle.mjs does the asking."""
import json

import pytest

from support.engine import (
    DONE,
    Close,
    Head,
    Json,
    Pause,
    chat_chunks,
    chunk,
    completion,
    died,
    llama_chunks,
    llama_completion,
    refusal,
    sse,
)
from support.node import node_asker, node_result
from support.tools import TWO_CALLS, WANTED

MODEL = "GLM-5.3-Flash-EXL3"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
         for name in ("get_weather", "get_time")]


@pytest.fixture
def ask(shared):
    return node_asker("oracle.mjs", shared.url + "/v1", shared.key)


def calls_of(message):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


@pytest.mark.parametrize("make", [completion, llama_completion])
def test_chat(shared, ask, make):
    shared.engine.play(Json(make("Hello there", reasoning="Let me think")))
    answer = node_result(ask("chat", reasoning_effort="low"))
    message = answer["choices"][0]["message"]
    assert message["content"] == "Hello there"
    assert message["reasoning"] == message["reasoning_content"] == "Let me think"
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["prompt_tokens"] == 15
    sent = shared.engine.requests[-1].json()
    assert sent["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "low"}


def test_tools(shared, ask):
    shared.engine.play(Json(completion(None, tools=TWO_CALLS)))
    message = node_result(ask("chat", tools=TOOLS))["choices"][0]["message"]
    assert calls_of(message) == WANTED and message["content"] is None


@pytest.mark.parametrize("make", [chat_chunks, llama_chunks])
@pytest.mark.parametrize("usage", [True, False])
def test_stream(shared, ask, make, usage):
    shared.engine.play(*make("Hello there, you", reasoning="Let me think", usage=True))
    chunks = node_result(ask("stream", **({"stream_options": {"include_usage": True}} if usage else {})))["chunks"]
    deltas = [choice["delta"] for part in chunks for choice in part["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello there, you"
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "Let me think"
    assert [part["usage"]["prompt_tokens"] for part in chunks if part.get("usage")] == [15] * usage
    assert chunks[-1 - usage]["choices"][0]["finish_reason"] == "stop"


def broken_indexes():
    """The stream of TWO_CALLS with one index for both."""
    yield sse(chunk({"role": "assistant", "content": ""}))
    for n, (name, pieces) in enumerate(TWO_CALLS):
        function = {"name": name, "arguments": pieces[0]}
        yield sse(chunk({"tool_calls": [{"index": 0, "id": f"call-{n}", "type": "function", "function": function}]}))
        for piece in pieces[1:]:
            yield sse(chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}))
    yield sse(chunk({}, "tool_calls"))
    yield DONE


@pytest.mark.parametrize("steps", [
    chat_chunks(None, tools=TWO_CALLS, usage=True), llama_chunks(None, tools=TWO_CALLS, usage=True),
    list(broken_indexes()),
], ids=["vLLM", "llama.cpp", "one index"])
def test_streamed_tools_with_the_helper(shared, ask, steps):
    shared.engine.play(*steps)
    found = node_result(ask("helper", tools=TOOLS))
    assert calls_of(found["message"]) == WANTED and found["finish"] == "tool_calls"
    ids = {call["id"] for call in found["message"]["tool_calls"]}
    assert len(ids) == 2 and all(ids)
    assert [(event[1], event[2], json.loads(event[3])) for event in found["events"] if event[0] == "call"] == [
        (n, name, arguments) for n, (name, arguments) in enumerate(WANTED)]


def test_text_with_the_helper(shared, ask):
    shared.engine.play(*chat_chunks("Hello there, you", reasoning="Let me think", usage=True))
    found = node_result(ask("helper", stream_options={"include_usage": True}))
    assert found["message"]["content"] == "".join(event[1] for event in found["events"]) == "Hello there, you"
    assert found["usage"]["prompt_tokens"] == 15


def test_runner_sends_the_results_back(shared, ask):
    shared.engine.play(*chat_chunks(None, reasoning="Hm", tools=TWO_CALLS[:1]))
    shared.engine.play(*chat_chunks("It is sunny."))
    found = node_result(ask("runner"))
    assert found["content"] == "It is sunny." and found["ran"] == [{"city": "Paris"}]
    first, second = shared.engine.wait_for(2)
    history = second.json()["messages"]
    assert [message["role"] for message in history] == ["user", "assistant", "tool"]
    assert history[2]["content"] == "sunny in Paris" and history[2]["tool_call_id"] == history[1]["tool_calls"][0]["id"]
    assert first.json()["tools"][0]["function"]["name"] == "get_weather"


@pytest.mark.parametrize("case", ["chat", "stream"])
def test_wrong_key_is_not_tried_again(shared, ask, case):
    before = shared.gateway.log.count("status=401")
    error = ask(case, retries=3, key="sk-sparks-wrong")["error"]
    assert (error["kind"], error["status"], error["code"]) == ("AuthenticationError", 401, "invalid_api_key")
    assert error["requestID"] and shared.gateway.log.count("status=401") == before + 1


@pytest.mark.parametrize("fields, kind, code, param", [
    ({"messages": []}, "BadRequestError", "invalid_request", "messages"),
    ({"model": "other"}, "NotFoundError", "model_not_found", "model"),
])
def test_mistakes(ask, fields, kind, code, param):
    error = ask("stream", **fields)["error"]
    assert (error["kind"], error["code"], error["param"], error["type"] is not None) == (kind, code, param, True)


@pytest.mark.parametrize("answer, kind, status, code", [
    (refusal(400, "maximum context length is 10 tokens"), "BadRequestError", 400, "context_length_exceeded"),
    (Json({"error": {"message": "Loading model", "code": 503}}, 503), "InternalServerError", 503, "model_unavailable"),
    (Close(), "InternalServerError", 502, "upstream_error"),
], ids=["400", "503", "cut"])
def test_refusals_of_the_engine(shared, ask, answer, kind, status, code):
    shared.engine.play(answer)
    error = ask("stream")["error"]
    assert (error["kind"], error["status"], error["code"]) == (kind, status, code)


@pytest.mark.parametrize("ending", [[died(), DONE], [Close()]], ids=["error event", "cut"])
def test_failure_in_the_middle(shared, ask, ending):
    shared.engine.play(*chat_chunks("Hello there")[:3], *ending)
    error = ask("stream")["error"]
    assert (error["kind"], error["code"], error["type"]) == ("APIError", "upstream_error", "api_error")


def test_client_that_leaves(shared, ask):
    pieces = chat_chunks(["a"] * 3)
    shared.engine.play(Head(), *pieces[:2], *[step for _ in range(200) for step in (Pause(0.05), pieces[1])])
    assert ask("leave") == {"result": {}}
    assert shared.engine.wait_for(1)[0].gone.wait(10)


def test_models(ask):
    found = node_result(ask("models"))
    assert [model["id"] for model in found["list"]] == [MODEL] and found["one"] == found["list"][0]
    assert found["one"]["context_window"] == 850000
