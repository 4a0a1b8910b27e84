"""Text completions and embeddings through the real server: OpenAI's SDK, LangChain, and OpenAI's published schema."""
import asyncio
import math
import threading

import langchain_openai
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from support.engine import (
    Close,
    Head,
    Json,
    Wait,
    embeddings,
    llama_refusal,
    refusal,
    text_chunks,
    text_completion,
)
from support.openai_schema import problems
from support.rows import row_now

MODEL = "GLM-5.3-Flash-EXL3"
TEXT, VECTORS = "/v1/completions", "/v1/embeddings"


@pytest.fixture
def sdk(shared_vectors):
    with openai.OpenAI(base_url=shared_vectors.url + "/v1", api_key=shared_vectors.key, max_retries=0, timeout=20) as client:
        yield client


def create(sdk, **fields):
    return sdk.completions.create(**{"model": MODEL, "prompt": "Once", **fields})


# ---- completions

def test_a_completion(shared_vectors, sdk):
    shared_vectors.engine.play(Json(text_completion("upon a time")))
    answer = create(sdk)
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.object) == ("upon a time", "stop", "text_completion")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert shared_vectors.engine.requests[-1].path == TEXT
    assert shared_vectors.engine.requests[-1].json() == {"model": MODEL, "prompt": "Once", "max_tokens": 16}


def test_several_prompts_and_choices(shared_vectors, sdk):
    answer = create(sdk, prompt=["a", "b"], n=2, echo=True, logprobs=1, suffix="end")
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    sent = shared_vectors.engine.requests[-1].json()
    assert [sent[name] for name in ("prompt", "n", "echo", "logprobs", "suffix")] == [["a", "b"], 2, True, 1, "end"]
    create(sdk, prompt=[[1, 2], [3]])
    assert shared_vectors.engine.requests[-1].json()["prompt"] == [[1, 2], [3]]


@pytest.mark.parametrize("usage", [True, False])
def test_a_stream(shared_vectors, sdk, usage):
    shared_vectors.engine.play(*text_chunks("upon a time", usage=True))
    chunks = list(create(sdk, stream=True, **({"stream_options": {"include_usage": True}} if usage else {})))
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "upon a time"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "stop"
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == ([4] if usage else [])


def test_a_stream_of_several(shared_vectors, sdk):
    shared_vectors.engine.play(*text_chunks("a b", "c", usage=True))
    texts = {0: "", 1: ""}
    for chunk in create(sdk, prompt=["x", "y"], stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "a b", 1: "c"}


def test_an_async_stream(shared_vectors):
    async def collected():
        async with openai.AsyncOpenAI(base_url=shared_vectors.url + "/v1", api_key=shared_vectors.key, max_retries=0) as client:
            return [chunk async for chunk in await client.completions.create(model=MODEL, prompt="Once", stream=True)]
    assert len(asyncio.run(collected())) == 3


def test_a_stream_that_breaks_off(shared_vectors, sdk):
    shared_vectors.engine.play(*text_chunks("upon a time", usage=True)[:2], Close())
    with pytest.raises(openai.APIError) as caught:
        list(create(sdk, stream=True))
    assert caught.value.code == "upstream_error"


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("fields, param", [({"prompt": []}, "prompt"), ({"prompt": 5}, "prompt"),
                                           ({"max_tokens": 0}, "max_tokens"),
                                           ({"model": "vectors"}, "model"), ({"n": 1, "prompt": None}, "prompt")])
def test_refusals(shared_vectors, sdk, streams, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        create(sdk, stream=streams, extra_body=fields)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param) and shared_vectors.engine.requests == []


@pytest.mark.parametrize("streams", [True, False])
def test_a_prompt_that_is_too_long(shared_vectors, sdk, streams):
    """An engine's refusal, in words of this API."""
    shared_vectors.engine.play(refusal(400, "This model's maximum context length is 2048 tokens.", param="input_tokens"))
    with pytest.raises(openai.BadRequestError) as caught:
        create(sdk, stream=streams)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_alive_while_it_waits(gateway, engine):
    front, go = gateway(keepalive=0.2), threading.Event()
    engine.play(Head(), Wait(go), *text_chunks("a"))
    with front.client().open() as connection:
        events = connection.post(TEXT, {"prompt": "a", "stream": True}).events()
        assert next(events).comment == "keep-alive"
        go.set()
        assert [event.data for event in events][-1] == "[DONE]"


def test_a_plain_answer_that_comes_as_a_stream(shared_vectors, sdk):
    shared_vectors.engine.play(*text_chunks("upon a time", "b", usage=True))
    answer = create(sdk, prompt=["a", "b"])
    assert [choice.text for choice in answer.choices] == ["upon a time", "b"] and answer.usage.completion_tokens == 6


def test_completions_fit_the_schema(shared_vectors):
    answer = shared_vectors.client().post(TEXT, {"prompt": ["a", "b"]}).json()
    assert problems("CreateCompletionResponse", answer) == []


def test_langchain_completes(shared_vectors):
    llm = langchain_openai.OpenAI(base_url=shared_vectors.url + "/v1", api_key=shared_vectors.key, model=MODEL, max_retries=0)
    assert llm.invoke("Once") == "Hello there" and "".join(llm.stream("Once")) == "Hello there"


# ---- embeddings

@pytest.fixture
def vectors(shared_vectors):
    shared_vectors.engine.embeds = True
    return shared_vectors.engine


def test_embeddings(vectors, sdk, shared_vectors):
    """The SDK asks for base64 unless it is told otherwise."""
    answer = sdk.embeddings.create(model="vectors", input=["a", "bcd"])
    sent = vectors.requests[-1].json()
    assert sent == {"model": MODEL, "input": ["a", "bcd"], "encoding_format": "base64"}
    assert [entry.embedding for entry in answer.data] == [[0.5, -0.25, 0.75, 0.125], [0.5, -0.25, 0.75, 0.375]]
    assert [entry.index for entry in answer.data] == [0, 1] and answer.usage.total_tokens == 3
    row = row_now(shared_vectors.gateway.db, answer._request_id) if hasattr(answer, "_request_id") else None
    assert row is None or (row["prompt_tokens"], row["completion_tokens"], row["model"]) == (3, None, "vectors")


@pytest.mark.parametrize("gives", ["float", "base64"])
@pytest.mark.parametrize("wants", ["float", "base64", None])
def test_an_engine_that_knows_one_form(vectors, sdk, gives, wants):
    vectors.play(Json(embeddings([0.5, -0.25], form=gives)))
    answer = sdk.embeddings.create(model="vectors", input="a", **({"encoding_format": wants} if wants else {}))
    found = answer.data[0].embedding
    assert found == ([0.5, -0.25] if wants != "base64" else "AAAAPwAAgL4=")


@pytest.mark.parametrize("form", ["float", "base64"])
def test_dimensions(vectors, sdk, form):
    answer = sdk.embeddings.create(model="vectors", input="a", dimensions=2,
                                   **({"encoding_format": "float"} if form == "float" else {}))
    found = answer.data[0].embedding
    assert found == pytest.approx([0.8944271909999159, -0.4472135954999579]) and math.hypot(*found) == pytest.approx(1)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.embeddings.create(model="vectors", input="a", dimensions=5)
    assert caught.value.param == "dimensions" and "at most 4" in str(caught.value)


@pytest.mark.parametrize("given", ["", [""], ["a"] * 2048, "x" * (1 << 20), [1, 2], [[1], [2, 3]]],
                         ids=lambda value: repr(value)[:15])
def test_inputs(vectors, sdk, given):
    answer = sdk.embeddings.create(model="vectors", input=given)
    assert len(answer.data) == (len(given) if isinstance(given, list) and not isinstance(given[0], int) else 1)
    assert vectors.requests[-1].json()["input"] == given


@pytest.mark.parametrize("fields, param", [
    ({"input": []}, "input"), ({"input": 5}, "input"), ({"input": ["a", 1]}, "input"),
    ({"encoding_format": "hex"}, "encoding_format"),
    ({"dimensions": 0}, "dimensions"), ({"model": MODEL}, "model")])
def test_refusals_of_embeddings(vectors, sdk, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.embeddings.create(**{"model": "vectors", "input": "a"}, extra_body=fields)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param) and vectors.requests == []
    assert param != "model" or "use vectors" in str(caught.value)


@pytest.mark.parametrize("answer, code", [
    (refusal(400, "This model's maximum context length is 512 tokens."), "context_length_exceeded"),
    (llama_refusal(500, "input (700 tokens) is too large to process. increase the physical batch size (current batch size: 512)",
                   "server_error"), "context_length_exceeded"),
    (llama_refusal(400, "input (700 tokens) is larger than the max context size (512 tokens). skipping", n_ctx=512,
                   type="exceed_context_size_error"), "context_length_exceeded"),
])
def test_an_input_that_is_too_long(vectors, sdk, answer, code):
    vectors.play(answer)
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.embeddings.create(model="vectors", input="a")
    assert (caught.value.code, caught.value.param) == (code, "input")


@pytest.mark.parametrize("answer", [Json({}), Json({"data": []}), Json({"data": [{"embedding": "!"}]}),
                                    Json(text_completion("a"))])
def test_an_engine_that_gives_none(vectors, sdk, answer):
    vectors.play(answer)
    with pytest.raises(openai.InternalServerError) as caught:
        sdk.embeddings.create(model="vectors", input="a", dimensions=1)
    assert caught.value.code == "upstream_error"


def test_embeddings_fit_the_schema(vectors, shared_vectors):
    answer = shared_vectors.client().post(VECTORS, {"input": ["a", "b"], "model": "vectors"}).json()
    assert problems("CreateEmbeddingResponse", answer) == []


def test_langchain_embeds(vectors, shared_vectors):
    """With token arrays too, as it counts them itself by default; but that needs a tokenizer from the network."""
    embedder = OpenAIEmbeddings(base_url=shared_vectors.url + "/v1", api_key=shared_vectors.key, model="vectors", max_retries=0,
                                check_embedding_ctx_length=False)
    assert embedder.embed_query("abc") == [0.5, -0.25, 0.75, 0.375]
    assert embedder.embed_documents(["a", "bc"]) == [[0.5, -0.25, 0.75, 0.125], [0.5, -0.25, 0.75, 0.25]]
