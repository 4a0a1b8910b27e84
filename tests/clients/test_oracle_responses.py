"""The Python SDK of OpenAI against POST /v1/responses: create, stream and parse, plain and streamed."""
import asyncio
import json

import openai
import pydantic
import pytest

from support.engine import (
    DONE,
    Close,
    Head,
    Json,
    chat_chunks,
    completion,
    died,
    llama_chunks,
    llama_completion,
    refusal,
)
from support.openai_schema import event_problems, problems
from support.tools import TWO_CALLS, WANTED

MODEL = "GLM-5.3-Flash-EXL3"
TOOLS = [{"type": "function", "name": name, "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}}
    for name in ("get_weather", "get_time")]
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files"}
SEALED = {"reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False}


class Place(pydantic.BaseModel):
    city: str


def create(client, input="Hello", **fields):
    return client.responses.create(model=MODEL, input=input, **fields)


def valid(response):
    """A Response of the SDK, which the schema allows; what the SDK added by itself aside."""
    assert problems("Response", json.loads(response.to_json())) == []
    return response


def calls_of(response):
    return [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]


# ---- create

@pytest.mark.parametrize("make", [completion, llama_completion])
def test_create(shared, client, make):
    shared.engine.play(Json(make("Hello there", reasoning="Let me think")))
    answer = valid(create(client, instructions="Be brief.", max_output_tokens=50, **SEALED))
    assert (answer.output_text, answer.status, answer.model) == ("Hello there", "completed", MODEL)
    thought, message = answer.output
    assert thought.summary[0].text == thought.content[0].text == "Let me think" and thought.encrypted_content
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.output_tokens_details.reasoning_tokens is not None
    assert answer._request_id == shared.engine.requests[-1].header("x-request-id")
    sent = shared.engine.requests[-1].json()
    assert sent["max_tokens"] == 50 and sent["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "high"}


def test_a_whole_conversation_goes_back(shared, client):
    """What the SDK gave is sent again as it is, with the results."""
    shared.engine.play(Json(completion("I look.", reasoning="Hm", tools=TWO_CALLS)))
    history = [{"role": "user", "content": "Weather and time?"}]
    answer = valid(create(client, history, tools=TOOLS, **SEALED))
    assert calls_of(answer) == WANTED
    history += answer.output
    history += [{"type": "function_call_output", "call_id": item.call_id, "output": "19"}
                for item in answer.output if item.type == "function_call"]
    valid(create(client, history, tools=TOOLS, **SEALED))
    _, turn, *results = shared.engine.requests[-1].json()["messages"]
    assert (turn["content"], turn["reasoning_content"]) == ("I look.", "Hm")
    assert [call["function"]["name"] for call in turn["tool_calls"]] == ["get_weather", "get_time"]
    assert [result["tool_call_id"] for result in results] == [call["id"] for call in turn["tool_calls"]]


def test_parse(shared, client):
    shared.engine.play(Json(completion(['{"city": "Paris"}'])))
    answer = client.responses.parse(model=MODEL, input="Where?", text_format=Place)
    assert answer.output_parsed == Place(city="Paris")
    assert shared.engine.requests[-1].json()["response_format"]["json_schema"]["name"] == "Place"
    shared.engine.play(Json(completion(None, tools=[("Place", {"city": "Rome"})])))
    answer = client.responses.parse(model=MODEL, input="Where?", tools=[openai.pydantic_function_tool(Place)])
    assert answer.output[0].parsed_arguments == Place(city="Rome")


def test_custom_tool(shared, client):
    shared.engine.play(Json(completion(None, tools=[("apply_patch", {"input": "*** Begin\n"})])))
    call, = valid(create(client, tools=[PATCH])).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", "*** Begin\n")


def test_cut_short(shared, client):
    shared.engine.play(Json(completion("Hello", finish="length")))
    answer = valid(create(client))
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_logprobs(shared, client):
    one = completion("first")
    one["choices"][0]["logprobs"] = {"content": [{"token": "first", "logprob": -0.1, "bytes": [1], "top_logprobs": []}]}
    shared.engine.play(Json(one))
    answer = valid(create(client, include=["message.output_text.logprobs"]))
    assert answer.output[0].content[0].logprobs[0].logprob == -0.1


# ---- streams

@pytest.mark.parametrize("make", [chat_chunks, llama_chunks])
def test_events(shared, client, make):
    shared.engine.play(*make("Hello there, you", reasoning="Let me think", tools=TWO_CALLS, usage=True))
    events = list(create(client, tools=TOOLS, stream=True, **SEALED))
    assert [problem for event in events for problem in event_problems(json.loads(event.to_json()))] == []
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = lambda kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")      # noqa: E731
    assert text("output_text") == "Hello there, you"
    assert text("reasoning_text") == text("reasoning_summary_text") == "Let me think"
    final = events[-1]
    assert final.type == "response.completed" and calls_of(final.response) == WANTED
    assert [event.item for event in events if event.type == "response.output_item.done"] == final.response.output


@pytest.mark.parametrize("make", [chat_chunks, llama_chunks])
def test_the_helper(shared, client, make):
    shared.engine.play(*make("Hello there", reasoning="Let me think", tools=TWO_CALLS, usage=True))
    snapshots = []
    with client.responses.stream(model=MODEL, input="Hello", tools=TOOLS, **SEALED) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                snapshots.append(event.snapshot)
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == "Hello there" and calls_of(final) == WANTED
    assert final.usage.input_tokens == 15


def test_the_helper_parses(shared, client):
    shared.engine.play(*chat_chunks(['{"city"', ': "Paris"}'], usage=True))
    with client.responses.stream(model=MODEL, input="Where?", text_format=Place) as stream:
        assert stream.get_final_response().output_parsed == Place(city="Paris")


def test_async(shared):
    async def ask():
        sdk = openai.AsyncOpenAI(base_url=shared.url + "/v1", api_key=shared.key, max_retries=0)
        async with sdk as client, client.responses.stream(model=MODEL, input="Hello") as stream:
            return await stream.get_final_response()
    assert asyncio.run(ask()).output_text == "Hello there"


def test_custom_tool_in_a_stream(shared, client):
    shared.engine.play(*chat_chunks(None, tools=[("apply_patch", ['{"input": "*** Be', 'gin\\n"}'])], usage=True))
    events = list(create(client, tools=[PATCH], stream=True))
    assert "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta") == "*** Begin\n"
    assert events[-1].response.output[0].input == "*** Begin\n"


def test_a_stream_that_fails(shared, client):
    shared.engine.play(Head(), *chat_chunks("Hello there")[:2], died(), DONE)
    events = list(create(client, stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"


def test_a_stream_that_is_left(shared, client):
    shared.engine.play(Head(), *chat_chunks("a b c d")[:3], *[chat_chunks("x")[1]] * 100_000)
    with create(client, stream=True) as stream:
        assert next(stream).type == "response.created"
    assert shared.engine.requests[-1].gone.wait(10)


# ---- errors

@pytest.mark.parametrize("steps, kind, code", [
    ([refusal(400, "no")], openai.BadRequestError, "invalid_request"), ([refusal(503, "busy")], openai.InternalServerError,
                                                                        "model_unavailable"),
    ([Head(), Close()], openai.InternalServerError, "upstream_error")])
@pytest.mark.parametrize("stream", [True, False])
def test_errors_of_the_engine(shared, client, steps, kind, code, stream):
    shared.engine.play(*steps)
    with pytest.raises(kind) as caught:
        create(client, stream=stream)
    assert caught.value.code == code


def test_errors_of_the_request(client):
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id" and "nothing is stored here" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
