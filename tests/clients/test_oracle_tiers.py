"""Answers that name their service tier, and the SDKs' own types of them, each of which knows the tiers that there are."""
import anthropic
import openai
import pytest

from support.engine import Json, embeddings
from support.messages import HELLO, MODEL


def strict(value):
    """The same, which is of its type in every field."""
    return type(value).model_validate_json(value.to_json(exclude_unset=True), strict=True)


def test_openai(shared_vectors, no_proxy, asked="flex", had="flex"):
    shared_vectors.engine.on("/v1/embeddings", [Json(embeddings([0.5]))])
    with openai.OpenAI(base_url=f"{shared_vectors.url}/v1", api_key=shared_vectors.key, max_retries=0) as client:
        chat, text, responses = client.chat.completions, client.completions, client.responses
        asks = {"model": MODEL, "service_tier": asked}
        messages = [{"role": "user", "content": "Hello"}]
        assert strict(chat.create(messages=messages, **asks)).service_tier == had
        chunks = [*chat.create(messages=messages, stream=True, stream_options={"include_usage": True}, **asks)]
        assert len(chunks) > 3 and {strict(chunk).service_tier for chunk in chunks} == {had}
        with chat.stream(messages=messages, **asks) as stream:
            assert stream.get_final_completion().service_tier == had
        assert strict(responses.create(input="Hello", **asks)).service_tier == had
        with responses.stream(input="Hello", **asks) as stream:
            events = [event.response for event in stream if hasattr(event, "response")]
        assert len(events) == 3 and {event.service_tier for event in events} == {had}
        extra = {"model": MODEL, "extra_body": {"service_tier": asked}}     # these two have no such field at OpenAI
        assert text.create(prompt="Hello", **extra).service_tier == had
        assert {chunk.service_tier for chunk in text.create(prompt="Hello", stream=True, **extra)} == {had}
        assert client.embeddings.create(input="Hello", **{**extra, "model": "vectors"}).service_tier == had


@pytest.mark.parametrize("asked, had", [("flex", "batch"), ("auto", "standard"), ("standard_only", "standard")])
def test_anthropic(shared, asked, had, no_proxy):
    with anthropic.Anthropic(base_url=shared.url, api_key=shared.key, max_retries=0) as client:
        asks = {"model": MODEL, "max_tokens": 9, "messages": HELLO, "service_tier": asked}
        assert strict(client.messages.create(**asks)).usage.service_tier == had
        with client.messages.stream(**asks) as stream:
            assert strict(stream.get_final_message()).usage.service_tier == had
