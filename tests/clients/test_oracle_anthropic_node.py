"""The Node SDK of Anthropic against the gateway; tests/support/oracle_node/anthropic.mjs does the asking."""

import pytest

from support.engine import (
    Close,
    Head,
    Json,
    Pause,
    chat_chunks,
    completion,
    died,
    llama_chunks,
    llama_completion,
)
from support.messages import COUNTED, MODEL, THINK, TOOLS
from support.node import node_asker, node_result
from support.tools import TWO_CALLS, WANTED

STREAM_TOOLS = {"tools": TOOLS, **THINK}


@pytest.fixture
def ask(shared):
    return node_asker("anthropic.mjs", shared.url, shared.key)


def calls_of(message):
    return [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"]


@pytest.mark.parametrize("make", [completion, llama_completion])
def test_message(shared, ask, make):
    shared.engine.play(Json(make("Hello there", reasoning="Let me think", tools=TWO_CALLS, cached=8)))
    message = node_result(ask("message", **STREAM_TOOLS))
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use",
                                                               "tool_use"] and calls_of(message) == WANTED
    assert message["stop_reason"] == "tool_use" and message["usage"]["input_tokens"] == 7


@pytest.mark.parametrize("make", [chat_chunks, llama_chunks])
def test_stream_helper(shared, ask, make):
    shared.engine.play(*make("Hello there, you", reasoning="Let me think", tools=TWO_CALLS, usage=True, cached=8))
    found = node_result(ask("helper", **STREAM_TOOLS))
    message = found["message"]
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use",
                                                               "tool_use"] and calls_of(message) == WANTED
    assert found["said"] == {"text": "Hello there, you", "thinking": "Let me think", "inputs": [list(pair) for pair in WANTED]}
    assert (message["usage"]["input_tokens"], message["usage"]["cache_read_input_tokens"], message["stop_reason"]) == (7, 8,
        "tool_use")
    assert found["requestID"] == shared.engine.requests[-1].header("x-request-id")


def test_stream(shared, ask):
    shared.engine.play(*chat_chunks("Hello there", reasoning="Let me think", usage=True))
    events = node_result(ask("stream"))["events"]
    assert [event["type"] for event in events] == ["message_start", "content_block_start", "content_block_delta",
                                                   "content_block_delta",
                                                   "content_block_stop", "message_delta", "message_stop"]


def test_runner_sends_the_results_back(shared, ask):
    shared.engine.play(Json(completion(None, tools=TWO_CALLS[:1])))
    shared.engine.play(Json(completion("It is sunny.")))
    found = node_result(ask("runner"))
    assert found["message"]["content"][0]["text"] == "It is sunny." and found["ran"] == [{"city": "Paris"}]
    assert shared.engine.wait_for(2)[1].json()["messages"][-1]["content"] == "sunny in Paris"


def test_count_and_models(ask):
    assert node_result(ask("count", tools=TOOLS)) == {"input_tokens": COUNTED}
    found = node_result(ask("models"))
    assert [model["id"] for model in found["list"]] == [MODEL] and found["one"]["id"] == MODEL


@pytest.mark.parametrize("case", ["message", "stream", "count"])
def test_wrong_key_is_not_tried_again(shared, ask, case):
    before = shared.gateway.log.count("status=401")
    error = ask(case, retries=3, key="sk-sparks-wrong")["error"]
    assert (error["kind"], error["status"], error["type"]) == ("AuthenticationError", 401, "authentication_error")
    assert error["requestID"] and shared.gateway.log.count("status=401") == before + 1


@pytest.mark.parametrize("ending", [[died(), b"data: [DONE]\n\n"], [Close()]], ids=["error event", "cut"])
def test_failure_in_the_middle(shared, ask, ending):
    shared.engine.play(*chat_chunks("Hello there")[:3], *ending)
    error = ask("helper")["error"]
    assert error["body"]["error"]["type"] == "api_error"


def test_client_that_leaves(shared, ask):
    pieces = chat_chunks(["a"] * 3)
    shared.engine.play(Head(), *pieces[:2], *[step for _ in range(200) for step in (Pause(0.05), pieces[1])])
    assert ask("leave") == {"result": {}}
    assert shared.engine.wait_for(1)[0].gone.wait(10)
