"""The Python SDK of Anthropic against the gateway: its accumulator raises on a wrong index, type or order, and each event
is checked against its types."""
import asyncio
import json
import os

import anthropic
import pydantic
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent

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
    refusal,
)
from support.message_streams import STREAMS
from support.messages import COUNTED, HELLO, MODEL, PNG, THINK, TOOLS, result, text, use, user
from support.tools import TWO_CALLS, WANTED

EVENT = pydantic.TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith("ANTHROPIC_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def client(shared):
    with anthropic.Anthropic(base_url=shared.url, api_key=shared.key, max_retries=0, timeout=20) as client:
        yield client


def asked(**fields):
    return {"model": MODEL, "max_tokens": 2000, "messages": HELLO, **fields}


def strict(kind, value):
    """The value, if it is one of that type in every field; unknown fields are none of it."""
    data = json.dumps(value).encode()
    checked = kind.validate_json(data, strict=True) if isinstance(kind, pydantic.TypeAdapter) else kind.model_validate_json(data,
        strict=True)
    assert json.loads(checked.model_dump_json(exclude_unset=True)) == value, value
    assert not checked.model_extra
    return checked


def calls_of(message):
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


# ---- plain

@pytest.mark.parametrize("make", [completion, llama_completion])
def test_message(shared, client, make):
    shared.engine.play(Json(make("Hello there", reasoning="Let me think", cached=8)))
    raw = client.messages.with_raw_response.create(**asked(**THINK))
    message = raw.parse()
    assert [block.type for block in message.content] == ["thinking", "text"] and message.content[1].text == "Hello there"
    assert (message.stop_reason, message.role, message.usage.input_tokens, message.usage.cache_read_input_tokens) == ("end_turn",
        "assistant", 7, 8)
    assert message._request_id == shared.engine.requests[-1].header("x-request-id")
    strict(Message, json.loads(raw.text()))


NOT_ALWAYS = {"caller", "toolset_name", "parsed_output"}           # not nullable, not always there, or the helper's own


def absent(value):
    """The fields that an answer of the SDK's types should have, in all of it, and has not."""
    if isinstance(value, list):
        return [name for part in value for name in absent(part)]
    if not isinstance(value, pydantic.BaseModel):
        return []
    missing = set(type(value).model_fields) - value.model_fields_set - NOT_ALWAYS
    return [*(f"{type(value).__name__}.{name}" for name in missing),
            *(name for field in value.model_fields_set for name in absent(getattr(value, field)))]


@pytest.mark.parametrize("cached", [None, 8])
def test_every_nullable_field_is_there(shared, client, cached):
    """Programs in typed languages read what the reference always has."""
    given = {"reasoning": "Let me think", "tools": [("f", {"a": 1})], "cached": cached}
    shared.engine.play(Json(completion("Hello there", **given)))
    assert absent(client.messages.create(**asked(**THINK))) == []
    shared.engine.play(*chat_chunks("Hello there", usage=True, **given))
    events = list(client.messages.create(**asked(**THINK), stream=True))
    assert {event.type for event in events} >= {"message_start", "content_block_start", "message_delta"} and absent(events) == []
    shared.engine.play(*chat_chunks("Hello there", usage=True, **given))
    with client.messages.stream(**asked(**THINK)) as stream:
        message = stream.get_final_message()
    assert absent(message) == []
    shared.engine.play(Json(completion("Well")))        # and back: what an SDK gives is what it sends
    assert client.messages.create(**asked(messages=[*HELLO, {"role": "assistant", "content": [
        block.model_dump() for block in message.content if block.type == "text"]}, *HELLO])).content[0].text == "Well"


def test_tools_and_their_results(shared, client):
    shared.engine.play(Json(completion(None, tools=TWO_CALLS)))
    message = client.messages.create(**asked(tools=TOOLS, tool_choice={"type": "any"}))
    assert calls_of(message) == WANTED and message.stop_reason == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "19"} for block in message.content]
    client.messages.create(**asked(tools=TOOLS, messages=[*HELLO, {"role": "assistant", "content": message.content},
                                                          {"role": "user", "content": results}]))
    sent = shared.engine.requests[-1].json()["messages"]
    assert [part["function"]["name"] for part in sent[1]["tool_calls"]] == ["get_weather", "get_time"]
    assert [told["tool_call_id"] for told in sent[2:]] == [block.id for block in message.content]


def test_images(shared, client):
    client.messages.create(**asked(messages=[user(text("what?"), PNG), {"role": "assistant", "content": [use("t", "f", {})]},
                                             user(result("t", PNG))]))
    sent = shared.engine.requests[-1].json()["messages"]
    assert [part["type"] for part in sent[0]["content"]] == ["text", "image_url"] and sent[3]["content"][1]["type"] == "image_url"


def test_parse(shared, client):
    class Place(pydantic.BaseModel):
        city: str

    shared.engine.play(Json(completion(['{"city": "Paris"}'])))
    message = client.messages.parse(**asked(output_format=Place))
    assert message.parsed_output == Place(city="Paris")
    assert shared.engine.requests[-1].json()["response_format"]["json_schema"]["schema"]["properties"]["city"]


# ---- streams

def test_every_stream_is_one_to_the_sdk(shared, client, subtests):
    """The whole table, through sockets: each event of a type, and one message in the end."""
    for name, (chunks, _) in STREAMS.items():
        for thinking in (THINK, {}):
            shared.engine.reset()
            with subtests.test(name, thinking=thinking):
                shared.engine.play(*chunks)
                with client.messages.with_streaming_response.create(**asked(stream=True, **thinking)) as response:
                    events = [json.loads(line[6:]) for line in response.read().split(b"\n") if line.startswith(b"data: ")]
                for event in events:
                    if event["type"] != "ping":
                        strict(EVENT, event)
                shared.engine.play(*chunks)
                with client.messages.stream(**asked(**thinking)) as stream:
                    message = stream.get_final_message()
                starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
                assert [block.type for block in message.content] == starts and (thinking or "thinking" not in starts)
                assert message.stop_reason == events[-2]["delta"]["stop_reason"] and message.usage.output_tokens


@pytest.mark.parametrize("make", [chat_chunks, llama_chunks])
def test_stream_helper(shared, client, make):
    shared.engine.play(*make("Hello there, you", reasoning="Let me think", tools=TWO_CALLS, usage=True, cached=8))
    with client.messages.stream(**asked(tools=TOOLS, **THINK)) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use",
                                                         "tool_use"] and calls_of(message) == WANTED
    assert (message.content[0].thinking, message.content[0].signature, message.content[1].text) == ("Let me think", "",
        "Hello there, you")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.stop_reason) == (7, 8, "tool_use")
    assert {"thinking", "text", "input_json", "content_block_stop", "message_stop"} <= set(kinds)
    assert stream.request_id == shared.engine.requests[-1].header("x-request-id")


def test_text_stream(shared, client):
    shared.engine.play(*chat_chunks("Hello there, you", reasoning="Let me think", usage=True))
    with client.messages.stream(**asked()) as stream:
        assert "".join(stream.text_stream) == "Hello there, you"
        assert stream.get_final_message().content[0].text == "Hello there, you"


def test_async(shared):
    async def run():
        sdk = anthropic.AsyncAnthropic(base_url=shared.url, auth_token=shared.key, max_retries=0, timeout=20)
        async with sdk as client, client.messages.stream(**asked()) as stream:
            return await stream.get_final_message()
    shared.engine.play(*chat_chunks("Hello there", usage=True))
    assert asyncio.run(run()).content[0].text == "Hello there"


def test_tool_runner(shared, client):
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    shared.engine.play(Json(completion(None, tools=TWO_CALLS[:1])))
    shared.engine.play(Json(completion("It is sunny.")))
    message = client.beta.messages.tool_runner(**asked(tools=[get_weather])).until_done()
    assert message.content[0].text == "It is sunny."
    assert shared.engine.requests[-1].json()["messages"][-1]["content"] == "sunny in Paris"


# ---- everything else

def test_count_tokens(shared, client):
    count = client.messages.count_tokens(model=MODEL, messages=HELLO, tools=TOOLS)
    assert count.input_tokens == COUNTED and client.beta.messages.count_tokens(model="claude-x",
        messages=HELLO).input_tokens == COUNTED
    strict(MessageTokensCount, {"input_tokens": count.input_tokens})


def test_models(shared, client):
    models = list(client.models.list(limit=1))
    assert [(model.id, model.type, model.display_name, model.max_input_tokens) for model in models] == [(MODEL, "model", MODEL,
        850_000)]
    assert client.models.retrieve(MODEL).created_at == models[0].created_at and isinstance(models[0], ModelInfo)
    assert models[0].created_at.year == 1970 and client.models.retrieve("claude-haiku-4-5").id == MODEL


@pytest.mark.parametrize("fields, kind, word", [
    ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"), ({"model": "nothing"}, anthropic.NotFoundError, "nothing"),
    ({"messages": []}, anthropic.BadRequestError, "messages")])
@pytest.mark.parametrize("streams", [True, False])
def test_mistakes(client, fields, kind, word, streams):
    with pytest.raises(kind) as caught:
        client.messages.create(**asked(stream=streams, **fields))
    assert word in caught.value.message and caught.value.request_id
    assert caught.value.body["error"]["type"] == caught.value.type


def test_wrong_key_is_not_tried_again(shared):
    before = shared.gateway.log.count("status=401")
    with (anthropic.Anthropic(base_url=shared.url, api_key="sk-sparks-wrong", max_retries=3) as client,
          pytest.raises(anthropic.AuthenticationError) as caught):
        client.messages.create(**asked())
    assert caught.value.type == "authentication_error" and shared.gateway.log.count("status=401") == before + 1


@pytest.mark.parametrize("answer, kind, type", [
    (refusal(400, "maximum context length is 10 tokens"), anthropic.BadRequestError, "invalid_request_error"),
    (Json({"error": {"message": "Loading model", "code": 503}}, 503), anthropic.InternalServerError, "overloaded_error"),
    (refusal(500, "no"), anthropic.InternalServerError, "api_error")])
def test_refusals_of_the_engine(shared, client, answer, kind, type):
    shared.engine.play(answer)
    with pytest.raises(kind) as caught:
        client.messages.create(**asked(stream=True))
    assert caught.value.type == type


def test_a_busy_engine_is_tried_again(shared):
    shared.engine.play(Json({"error": {"message": "busy", "code": 503}}, 503, {"retry-after": "1"}))
    with anthropic.Anthropic(base_url=shared.url, api_key=shared.key, max_retries=1, timeout=20) as client:
        assert client.messages.create(**asked()).content[0].text and len(shared.engine.requests) == 2


@pytest.mark.parametrize("ending", [[died(), b"data: [DONE]\n\n"], [Close()]], ids=["error event", "cut"])
def test_failure_in_the_middle(shared, client, ending):
    shared.engine.play(*chat_chunks("Hello there")[:3], *ending)
    with pytest.raises(anthropic.APIStatusError) as caught, client.messages.stream(**asked()) as stream:
        stream.get_final_message()
    assert caught.value.body["error"]["type"] == "api_error"


def test_client_that_leaves(shared, client):
    pieces = chat_chunks(["a"] * 3)
    shared.engine.play(Head(), *pieces[:2], *[step for _ in range(200) for step in (Pause(0.05), pieces[1])])
    with client.messages.stream(**asked()) as stream:
        next(iter(stream.text_stream))
    assert shared.engine.wait_for(1)[0].gone.wait(10)
