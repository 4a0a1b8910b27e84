"""OpenAI's Node SDK and Vercel's AI SDK against POST /v1/responses; tests/support/oracle_node/responses.mjs does the asking."""

import pytest

from support.engine import DONE, Head, Json, chat_chunks, completion, died, llama_chunks, refusal
from support.node import node_asker, node_result
from support.openai_schema import event_problems, problems

TOOL = {"type": "function", "name": "get_weather", "strict": False, "parameters": {"type": "object"}}
CALL = [("get_weather", ['{"ci', 'ty": "Paris"}'])]
SEALED = {"reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False}


@pytest.fixture
def ask(shared):
    return node_asker("responses.mjs", shared.url + "/v1", shared.key)


# ---- OpenAI's

def test_create(shared, ask):
    shared.engine.play(Json(completion("Hello there", reasoning="Let me think")))
    answer = node_result(ask("create", **SEALED))
    assert answer.pop("output_text") == "Hello there" and problems("Response", answer) == []
    assert answer["output"][0]["summary"][0]["text"] == "Let me think" and answer["output"][0]["encrypted_content"]


@pytest.mark.parametrize("make", [chat_chunks, llama_chunks])
def test_stream(shared, ask, make):
    shared.engine.play(*make("Hello there", reasoning="Let me think", tools=CALL, usage=True))
    events = node_result(ask("stream", tools=[TOOL], **SEALED))["events"]
    assert [problem for event in events for problem in event_problems(event)] == []
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]


def test_the_helper(shared, ask):
    shared.engine.play(*chat_chunks("Hello there", reasoning="Let me think", tools=CALL, usage=True))
    found = node_result(ask("helper", tools=[TOOL], **SEALED))
    assert found["deltas"] == ["Hello", "Hello there", '{"ci', '{"city": "Paris"}']
    assert found["final"]["output_text"] == "Hello there" and found["final"]["output"][2]["name"] == "get_weather"


def test_parse(shared, ask):
    shared.engine.play(Json(completion(['{"city": "Paris"}'])))
    assert node_result(ask("parse"))["parsed"] == {"city": "Paris"}


def test_mistakes(shared, ask):
    error = ask("create", previous_response_id="resp_1")["error"]
    assert (error["kind"], error["status"], error["param"]) == ("BadRequestError", 400, "previous_response_id")
    shared.engine.play(refusal(503, "busy"))
    assert ask("stream")["error"]["status"] == 503


def test_failure_in_the_middle(shared, ask):
    shared.engine.play(Head(), *chat_chunks("Hello there")[:3], died(), DONE)
    last = node_result(ask("stream"))["events"][-1]
    assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "server_error")


# ---- Vercel's

def test_vercel_text(shared, ask):
    found = node_result(ask("vercel_text"))
    assert (found["text"], found["reasoningText"], found["finishReason"]) == ("Hello there", "Let me think", "stop")
    assert found["usage"]["inputTokens"] == 15
    assert shared.engine.requests[-1].json()["chat_template_kwargs"]["reasoning_effort"] == "high"


def test_vercel_stream(shared, ask):
    parts = node_result(ask("vercel_stream"))["parts"]
    said = lambda kind: "".join(part["text"] for part in parts if part["type"] == kind)         # noqa: E731
    assert (said("text-delta"), said("reasoning-delta"), parts[-1]["type"]) == ("Hello there", "Let me think", "finish")
    assert "error" not in [part["type"] for part in parts]


def test_vercel_runs_tools_and_sends_its_reasoning_back(shared, ask):
    shared.engine.play(Json(completion(None, reasoning="I look", tools=[("weather", {"city": "Paris"})])))
    shared.engine.play(Json(completion("It is sunny.")))
    assert node_result(ask("vercel_tools")) == {"text": "It is sunny.", "steps": 2, "results": ["sunny in Paris"]}
    _, turn, answer = shared.engine.requests[-1].json()["messages"]
    assert (turn["reasoning_content"], turn["tool_calls"][0]["function"]["name"]) == ("I look", "weather")
    assert answer["tool_call_id"] == turn["tool_calls"][0]["id"] and "sunny in Paris" in answer["content"]


def test_vercel_object(shared, ask):
    shared.engine.play(Json(completion(['{"city": "Paris"}'])))
    assert node_result(ask("vercel_object"))["output"] == {"city": "Paris"}
    assert shared.engine.requests[-1].json()["response_format"]["type"] == "json_schema"


def test_vercel_failure(shared, ask):
    shared.engine.play(refusal(400, "This prompt cannot be"))
    assert ask("vercel_text")["error"]["message"] == "This prompt cannot be"
    shared.engine.play(Head(), *chat_chunks("Hello there")[:3], died(), DONE)
    assert "error" in [part["type"] for part in node_result(ask("vercel_stream"))["parts"]]
