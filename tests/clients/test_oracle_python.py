"""The Python SDK of OpenAI against the gateway, and OpenAI's published schema for all that leaves it."""
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
    chunk,
    completion,
    died,
    llama_chunks,
    llama_completion,
    refusal,
    sse,
)
from support.openai_schema import problems
from support.tools import TWO_CALLS, WANTED

CHAT = "/v1/chat/completions"
MODEL = "GLM-5.3-Flash-EXL3"
HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": name, "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}}}
    for name in ("get_weather", "get_time")]


def create(client, **fields):
    return client.chat.completions.create(model=MODEL, messages=HELLO, **fields)


def calls_of(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


# ---- plain

def test_chat(shared, client):
    shared.engine.play(Json(completion("Hello there", reasoning="Let me think")))
    answer = create(client, max_tokens=5, reasoning_effort="high")
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, choice.index) == ("Hello there", "stop", 0)
    assert choice.message.reasoning == choice.message.reasoning_content == "Let me think"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id == shared.engine.requests[-1].header("x-request-id")
    sent = shared.engine.requests[-1].json()
    assert sent["max_tokens"] == 5
    assert sent["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "high"}


def test_tools(shared, client):
    shared.engine.play(Json(completion(None, tools=TWO_CALLS)))
    answer = create(client, tools=TOOLS, tool_choice="auto", parallel_tool_calls=True)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content is None
    assert calls_of(message) == WANTED and len({call.id for call in message.tool_calls}) == 2

    # and the answer goes back as history, with the results
    results = [{"role": "tool", "tool_call_id": call.id, "content": "19"} for call in message.tool_calls]
    client.chat.completions.create(model=MODEL, messages=[*HELLO, message, *results], tools=TOOLS)
    sent = shared.engine.requests[-1].json()["messages"]
    assert [part["function"] for part in sent[1]["tool_calls"]] == [
        {"name": name, "arguments": "".join(arguments)} for name, arguments in TWO_CALLS]
    assert [result["tool_call_id"] for result in sent[2:]] == [call.id for call in message.tool_calls]


def test_n_and_logprobs(shared, client):
    one, two = completion("first"), completion("second")
    token = {"token": "first", "logprob": -0.1, "bytes": [1], "top_logprobs": []}
    one["choices"] += [{**two["choices"][0], "index": 1}]
    one["choices"][0]["logprobs"] = {"content": [token], "refusal": None}
    shared.engine.play(Json(one))
    answer = create(client, n=2, logprobs=True)
    assert [choice.message.content for choice in answer.choices] == ["first", "second"]
    assert answer.choices[0].logprobs.content[0].logprob == -0.1


def test_parse(shared, client):
    """response_format from a Pydantic model."""
    class Place(pydantic.BaseModel):
        city: str

    shared.engine.play(Json(completion(['{"city": "Paris"}'])))
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Place)
    assert answer.choices[0].message.parsed == Place(city="Paris")
    assert shared.engine.requests[-1].json()["response_format"]["json_schema"]["name"] == "Place"


def test_images_and_developer_messages(shared, client):
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo=", "detail": "low"}}
    question = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}
    client.chat.completions.create(model=MODEL, messages=[{"role": "developer", "content": "Be brief."}, question])
    sent = shared.engine.requests[-1].json()["messages"]
    assert sent[0] == {"role": "system", "content": "Be brief."} and sent[1]["content"][1] == picture


def test_raw_and_streaming_response(shared, client):
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO)
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=HELLO, stream=True) as response:
        assert list(response.iter_lines())[-2:][0] == "data: [DONE]"


# ---- streams

@pytest.mark.parametrize("make", [chat_chunks, llama_chunks])
@pytest.mark.parametrize("usage", [True, False])
def test_stream(shared, client, make, usage):
    shared.engine.play(*make("Hello there, you", reasoning="Let me think", usage=True))
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(create(client, stream=True, **options))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hello there, you"
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, None) or "" for delta in deltas) == "Let me think"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["stop"]
    assert deltas[0].role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    figures = [chunk.usage for chunk in chunks if chunk.usage]
    assert [(figure.prompt_tokens, figure.total_tokens > 15) for figure in figures] == [(15, True)] * usage
    assert all(chunk.choices for chunk in chunks[:-1]) and bool(chunks[-1].choices) != usage


@pytest.mark.parametrize("make", [chat_chunks, llama_chunks])
def test_stream_helper(shared, client, make):
    shared.engine.play(*make("Hello there, you", reasoning="Let me think", usage=True))
    with client.chat.completions.stream(model=MODEL, messages=HELLO, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there, you" and final.choices[0].finish_reason == "stop"
    assert final.usage.prompt_tokens == 15
    assert "".join(event.delta for event in events if event.type == "content.delta") == "Hello there, you"
    assert [event.content for event in events if event.type == "content.done"] == ["Hello there, you"]


def broken_indexes(how):
    """The stream of TWO_CALLS as careless engines send it."""
    yield sse(chunk({"role": "assistant", "content": ""}))
    for n, (name, pieces) in enumerate(TWO_CALLS):
        index = {"none": {}, "all 0": {"index": 0}, "from 1": {"index": n + 1}, "null": {"index": None}}[how]
        function = {"name": name, "arguments": pieces[0]}
        yield sse(chunk({"tool_calls": [{**index, "id": f"call-{n}", "type": "function", "function": function}]}))
        for piece in pieces[1:]:
            yield sse(chunk({"tool_calls": [{**index, "function": {"arguments": piece}}]}))
    yield sse(chunk({}, "tool_calls"))
    yield DONE


TOOL_STREAMS = {"vLLM": chat_chunks(None, tools=TWO_CALLS, usage=True),
                "llama.cpp": llama_chunks(None, tools=TWO_CALLS, usage=True),
                **{f"index {how}": list(broken_indexes(how)) for how in ("none", "all 0", "from 1", "null")}}


@pytest.mark.parametrize("kind", TOOL_STREAMS)
def test_streamed_tools(shared, client, kind):
    shared.engine.play(*TOOL_STREAMS[kind])
    found = {}
    for part in create(client, stream=True, tools=TOOLS):
        for call in part.choices[0].delta.tool_calls or () if part.choices else ():
            at = found.setdefault(call.index, {"id": call.id, "name": "", "arguments": ""})
            at["name"] += call.function.name or ""
            at["arguments"] += call.function.arguments or ""
    assert list(found) == [0, 1] and all(call["id"] for call in found.values())
    assert [(call["name"], json.loads(call["arguments"])) for call in found.values()] == WANTED


@pytest.mark.parametrize("kind", TOOL_STREAMS)
def test_streamed_tools_with_the_helper(shared, client, kind):
    shared.engine.play(*TOOL_STREAMS[kind])
    with client.chat.completions.stream(model=MODEL, messages=HELLO, tools=TOOLS) as stream:
        events = list(stream)
        message = stream.get_final_completion().choices[0].message
    assert calls_of(message) == WANTED
    assert [call.function.parsed_arguments for call in message.tool_calls] == [arguments for _, arguments in WANTED]
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name, event.parsed_arguments) for event in done] == [
        (n, name, arguments) for n, (name, arguments) in enumerate(WANTED)]


def test_stream_that_is_closed_early(shared, client):
    shared.engine.play(Head(), *chat_chunks(["a", "b"] * 5000))
    stream = create(client, stream=True)
    next(iter(stream))
    stream.close()
    request = shared.engine.wait_for(1)[0]
    assert request.gone.wait(10) or request.finished.is_set()


# ---- errors

def tries(shared, status):
    return shared.gateway.log.count(f"status={status}")


@pytest.mark.parametrize("streams", [True, False])
def test_wrong_key_is_not_tried_again(shared, client, streams):
    before = tries(shared, 401)
    with pytest.raises(openai.AuthenticationError) as caught:
        create(client.with_options(api_key="sk-sparks-wrong", max_retries=3), stream=streams)
    error = caught.value
    assert (error.code, error.type, error.param) == ("invalid_api_key", "invalid_request_error", None)
    assert error.status_code == 401 and error.request_id and tries(shared, 401) == before + 1


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("fields, kind, status, code, param", [
    ({"model": "other"}, openai.NotFoundError, 404, "model_not_found", "model"),
    ({"messages": []}, openai.BadRequestError, 400, "invalid_request", "messages"),
    ({"reasoning_effort": "huge"}, openai.BadRequestError, 400, "invalid_request", "reasoning_effort"),
    ({"max_tokens": -1}, openai.BadRequestError, 400, "invalid_request", "max_tokens"),
])
def test_mistakes(shared, client, fields, kind, status, code, param, streams):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "stream": streams, **fields})
    error = caught.value
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.body["message"] in str(error) and shared.engine.requests == []


def test_unknown_route(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.audio.speech.create(model="tts", voice="alloy", input="Hello")
    assert caught.value.code == "not_found" and "/v1/chat/completions" in str(caught.value)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("answer, kind, code", [
    (refusal(400, "maximum context length is 10 tokens"), openai.BadRequestError, "context_length_exceeded"),
    (refusal(422, "Unprocessable"), openai.UnprocessableEntityError, "invalid_request"),
    (Json({"error": {"message": "slow down"}}, 429), openai.RateLimitError, "rate_limit_exceeded"),
    (Json({"error": "Unauthorized"}, 401), openai.InternalServerError, "upstream_error"),
    (Json({"detail": "oh"}, 500), openai.InternalServerError, "upstream_error"),
    (Json({"error": {"message": "Loading model", "code": 503}}, 503), openai.InternalServerError, "model_unavailable"),
], ids=["400", "422", "429", "401", "500", "503"])
def test_refusals_of_the_engine(shared, client, answer, kind, code, streams):
    shared.engine.play(answer)
    with pytest.raises(kind) as caught:
        create(client, stream=streams)
    assert caught.value.code == code and isinstance(caught.value, openai.APIStatusError)


def test_engine_that_is_off(shared, client):
    shared.engine.stop()
    with pytest.raises(openai.APIStatusError) as caught:
        create(client)
    assert (caught.value.status_code, caught.value.code) == (503, "model_unavailable")
    assert caught.value.response.headers["retry-after"].isdigit()


@pytest.mark.parametrize("ending", [[died(), DONE], [Close()]], ids=["error event", "cut"])
def test_failure_in_the_middle(shared, client, ending):
    shared.engine.play(*chat_chunks("Hello there")[:3], *ending)
    got = []
    with pytest.raises(openai.APIError) as caught:
        for part in create(client, stream=True):
            got.append(part.choices[0].delta.content)
    assert "".join(filter(None, got)) == "Hello there"
    assert caught.value.code == "upstream_error" and caught.value.type == "api_error"


def test_failure_in_the_middle_of_the_helper(shared, client):
    shared.engine.play(*chat_chunks("Hello there")[:3], died(), DONE)
    with pytest.raises(openai.APIError), client.chat.completions.stream(model=MODEL, messages=HELLO) as stream:
        stream.until_done()


def test_retries_get_through(shared, client):
    """The SDK tries a 5xx again by itself."""
    shared.engine.play(Close())
    assert create(client.with_options(max_retries=2)).choices[0].message.content == "Hello there"
    assert len(shared.engine.requests) == 2


# ---- models

def test_models(client):
    models = client.models.list()
    assert [model.id for model in models] == [MODEL] and models.data[0].max_model_len == 850000
    found = client.models.retrieve(MODEL)
    assert (found.id, found.object, found.created, found.owned_by) == (MODEL, "model", 0, "sparks-gateway")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def ask_async(shared, count):
    async with openai.AsyncOpenAI(base_url=shared.url + "/v1", api_key=shared.key, max_retries=0, timeout=20) as client:
        async def one(n):
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True, user=str(n))
            return "".join([part.choices[0].delta.content or "" async for part in stream])
        return await asyncio.gather(*map(one, range(count)))


def test_many_at_once(shared):
    """More than there are slots."""
    assert asyncio.run(ask_async(shared, 20)) == ["Hello there"] * 20
    assert shared.engine.max_active <= 8


# ---- the schema

CASES = {"text": {}, "reasoning": {"reasoning": "Let me think"}, "tools": {"text": None, "tools": TWO_CALLS},
         "both": {"reasoning": "Hm", "tools": TWO_CALLS[:1]}, "empty": {"text": ""}, "length": {"finish": "length"},
         "cached": {"cached": 12}}
SHAPES = {"vLLM": (completion, chat_chunks), "llama.cpp": (llama_completion, llama_chunks)}


def test_the_schema_is_in_force():
    """It says no where it should."""
    good = completion()
    for name in ("annotations", "function_call"):       # vLLM's null, where OpenAI leaves the field out
        del good["choices"][0]["message"][name]
    assert problems("CreateChatCompletionResponse", good) == []
    assert problems("CreateChatCompletionResponse", {**good, "object": "text"})
    assert problems("CreateChatCompletionResponse", {**good, "usage": {"prompt_tokens": "1"}})
    assert problems("CreateChatCompletionStreamResponse", chunk({"tool_calls": [{"id": "x"}]}))
    assert problems("CreateChatCompletionStreamResponse", chunk({"content": "x"}, "unknown"))


def test_completions_fit_the_schema(shared, subtests):
    for case in CASES:
        for shape in SHAPES:
            shared.engine.reset()
            with subtests.test(shape, case=case):
                shared.engine.play(Json(SHAPES[shape][0](**CASES[case])))
                answer = shared.client().post(CHAT, {"messages": HELLO}).json()
                assert problems("CreateChatCompletionResponse", answer) == []


def test_streams_collected_into_completions_fit_the_schema(shared, subtests):
    """An engine that streams to a plain request."""
    for case in CASES:
        for shape in SHAPES:
            shared.engine.reset()
            with subtests.test(shape, case=case):
                shared.engine.play(*SHAPES[shape][1](**CASES[case], usage=True))
                answer = shared.client().post(CHAT, {"messages": HELLO}).json()
                assert problems("CreateChatCompletionResponse", answer) == []


def chunks_of(shared, steps, **fields):
    shared.engine.play(*steps)
    answer = shared.client().post(CHAT, {"messages": HELLO, "stream": True, **fields})
    *events, last = [event for event in answer.events() if event.comment is None]
    assert last.data == "[DONE]" and events
    return [event.json() for event in events]


def test_chunks_fit_the_schema(shared, subtests):
    for usage in [True, False]:
        for case in CASES:
            for shape in SHAPES:
                shared.engine.reset()
                with subtests.test(shape, case=case, usage=usage):
                    steps = SHAPES[shape][1](**CASES[case], usage=True)
                    for part in chunks_of(shared, steps, stream_options={"include_usage": usage}):
                        assert problems("CreateChatCompletionStreamResponse", part) == []


def test_completions_given_as_streams_fit_the_schema(shared, subtests):
    """An engine that answers plainly to a request for a stream."""
    for case in CASES:
        for shape in SHAPES:
            shared.engine.reset()
            with subtests.test(shape, case=case):
                for part in chunks_of(shared, [Json(SHAPES[shape][0](**CASES[case]))], stream_options={"include_usage": True}):
                    assert problems("CreateChatCompletionStreamResponse", part) == []


MENDED = {"leaked reasoning": chat_chunks(["<think>Hm", "</thi", "nk>Hi"], usage=True),
          "no [DONE]": chat_chunks("Hi", done=False, usage=True), **TOOL_STREAMS}


def test_mended_chunks_fit_the_schema(shared, subtests):
    for kind in MENDED:
        shared.engine.reset()
        with subtests.test(kind):
            for part in chunks_of(shared, MENDED[kind], stream_options={"include_usage": True}):
                assert problems("CreateChatCompletionStreamResponse", part) == []


def test_models_fit_the_schema(shared):
    client = shared.client()
    assert problems("ListModelsResponse", client.get("/v1/models").json()) == []
    assert problems("Model", client.get(f"/v1/models/{MODEL}").json()) == []
