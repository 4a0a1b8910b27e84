"""Signs of life in silent streams, as the vendors' SDKs take them: comments, empty chunks, and the events of other APIs."""
import json
import threading

import anthropic
import httpx
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialects.messages.events import MessageStream
from dialects.responses.events import Options, ResponseStream
from stream import ChatStream, CompletionStream
from support.engine import (
    DONE,
    Head,
    Pause,
    Wait,
    chat_chunks,
    chunk,
    llama_chunks,
    sse,
    text_chunks,
)
from support.message_streams import STREAMS
from support.messages import THINK, TOOLS
from support.node import node_asker, node_result
from support.openai_schema import event_problems, problems
from support.tools import TWO_CALLS, WANTED

MODEL = "GLM-5.3-Flash-EXL3"
HELLO = [{"role": "user", "content": "Hello"}]
USAGE = {"stream_options": {"include_usage": True}}
CHAT = {"model": MODEL, "messages": HELLO}
MESSAGE = {**CHAT, "max_tokens": 2000, **THINK}
NAMES = ("id", "created", "model")


def two_choices():
    said = [({"role": "assistant", "content": ""}, 0), ({"role": "assistant", "content": ""}, 1), ({"content": "a"}, 0),
            ({"content": "b"}, 1), ({"content": "c"}, 1)]
    return [*(sse(chunk(delta, index=at, created=5)) for delta, at in said),
            *(sse(chunk({}, "stop", index=at, created=5)) for at in (0, 1)), DONE]


ANSWERS = [chat_chunks("Hello there", "Let me think", TWO_CALLS, usage=True), llama_chunks("Hello there", "Let me", TWO_CALLS),
           *(STREAMS[name][0] for name in ("no role chunk", "both in one delta, with the finish"))]


# ---- signs of life anywhere: the SDK adds up the same, from the very bytes

def written(stream, events, places):
    """The client's bytes, with signs of life before the events of these places."""
    out = []
    for at, event in enumerate(events):
        out += [stream.alive() for place in places if place == at]
        out.append(stream.feed(event))
    return b"".join([*out, stream.end()])


def replayer(sdk, http):
    """An SDK's client, and a list whose last bytes it gets, whatever it asks."""
    replay = []
    transport = http.MockTransport(lambda request: http.Response(200, headers={"content-type": "text/event-stream"},
                                                                 content=replay[-1]))
    return sdk(api_key="x", base_url="http://test", http_client=http.Client(transport=transport)), replay


OPENAI, ANTHROPIC = replayer(openai.OpenAI, httpx), replayer(anthropic.Anthropic, httpx2)


def over(data, replayer):
    client, replay = replayer
    replay[:] = [data]
    return client


def said(value):
    """Without what the SDK takes from the first chunk alone: vLLM's nulls and its stop_reason."""
    if isinstance(value, list):
        return [said(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: said(one) for name, one in value.items() if one is not None and name != "stop_reason"}


def chat_of(data):
    with over(data, OPENAI).chat.completions.stream(**CHAT) as stream:
        return said(stream.get_final_completion().to_dict())


def completion_of(data):
    chunks = list(over(data, OPENAI).completions.create(model=MODEL, prompt="a", stream=True))
    choices = [choice for part in chunks for choice in part.choices]
    texts = [(at, "".join(choice.text for choice in choices if choice.index == at)) for at in (0, 1)]
    ends = [(choice.index, choice.finish_reason) for choice in choices if choice.finish_reason]
    return {"texts": texts, "ends": ends, **{name: getattr(chunks[-1], name) for name in NAMES}}


def message_of(data):
    with over(data, ANTHROPIC).messages.stream(**MESSAGE) as stream:
        return stream.get_final_message().to_dict()


def response_of(data):
    with over(data, OPENAI).responses.stream(model=MODEL, input="a") as stream:
        numbers = [event.sequence_number for event in stream]
        assert numbers == [*range(len(numbers))]
        return stream.get_final_response().to_dict()


def response_stream():
    stream = ResponseStream("ab", Options(clock=lambda: 5))
    stream.echo = [b'{"model":"m","tools":[],"parallel_tool_calls":true,"tool_choice":"auto"}']
    return stream


READERS = {"chat": (lambda: ChatStream(usage=True), chat_of, ANSWERS),
           "chat of two": (lambda: ChatStream(usage=True, n=2), chat_of, [two_choices()]),
           "completion": (lambda: CompletionStream(usage=True, n=2), completion_of, [text_chunks("a b", "c", usage=True)]),
           "message": (lambda: MessageStream("m", True), message_of, ANSWERS),
           "response": (response_stream, response_of, ANSWERS)}


@pytest.mark.parametrize("chunks", [False, True], ids=["comments", "chunks"])
@pytest.mark.parametrize("api", READERS)
@given(st.data())
def test_they_change_nothing(api, chunks, data):
    make, added_up, answers = READERS[api]
    events = data.draw(st.sampled_from(answers))
    places = data.draw(st.lists(st.integers(0, len(events) - 1), min_size=1, max_size=8))
    stream = make()
    if chunks:
        stream.alive_in_chunks("other", 7, "other")
    out = written(stream, events, places)
    expected, found = added_up(written(make(), events, ())), added_up(out)
    if not chunks or api in ("message", "response"):
        assert found == expected
        return
    parts = [json.loads(line[6:]) for line in out.split(b"\n") if line.startswith(b"data: {")]
    assert len({tuple(part.get(name) for name in NAMES) for part in parts}) == 1
    if 0 in places:                                 # the first of all chunks names them all
        expected |= {"id": ("cmpl-" if api == "completion" else "chatcmpl-") + "other", "created": 7, "model": "other"}
    assert found == expected


def test_chunks_fit_the_schema():
    stream = ChatStream()
    stream.alive_in_chunks("1", 7, MODEL)
    value = json.loads(stream.alive()[6:])
    assert problems("CreateChatCompletionStreamResponse", value) == [] and value["choices"][0]["delta"] == {}


# ---- the real server, silent in the queue, in prefill and between tokens

def silent(events, place=4):
    return [Pause(0.5), Head(), Pause(0.5), *events[:place], Pause(0.5), *events[place:]]


@pytest.fixture(params=["comment", "chunk"])
def front(request, gateway):
    return gateway(keepalive=0.2, keepalive_form=request.param)


@pytest.fixture
def queued(gateway, engine):
    """A gateway whose only slot is taken for half a second."""
    front = gateway(keepalive=0.2, max_active=1, config='keepalive_form = "chunk"')
    engine.play(Head(), Wait(go := threading.Event()), *chat_chunks("first"))
    with front.client().open() as connection:
        connection.start("POST", "/v1/chat/completions", {**CHAT, "stream": True})
        engine.wait_for(1)
        timer = threading.Timer(0.7, go.set)
        timer.start()
        yield front
        timer.join()


def openai_client(front):
    return openai.OpenAI(base_url=front.url + "/v1", api_key=front.key, max_retries=0, timeout=20)


def check_chat(client):
    chunks = []
    with client.chat.completions.stream(**CHAT, **USAGE) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Hello there", "assistant", "stop")
    assert choice.message.reasoning == "Let me think" and final.usage.prompt_tokens == 15
    assert {(part.id, part.created, part.model) for part in chunks} == {(final.id, final.created, final.model)}
    return [part for part in chunks if part.choices and not part.choices[0].delta.to_dict()
            and not part.choices[0].finish_reason]


def test_chat(no_proxy, front, engine):
    engine.play(*silent(chat_chunks("Hello there", "Let me think", usage=True)))
    empty = check_chat(openai_client(front))
    assert (len(empty) >= 4) if front.settings["keepalive_form"] == "chunk" else not empty


def test_completions(no_proxy, front, engine):
    engine.play(*silent(text_chunks("Hello there", usage=True), 1))
    chunks = list(openai_client(front).completions.create(model=MODEL, prompt="Once", stream=True))
    assert "".join(part.choices[0].text for part in chunks) == "Hello there" and chunks[-1].choices[0].finish_reason == "stop"
    assert len({(part.id, part.created, part.model, part.object) for part in chunks}) == 1
    assert (len(chunks) >= 7) == (front.settings["keepalive_form"] == "chunk")


def test_chat_in_the_queue(no_proxy, queued, engine):
    engine.play(*chat_chunks("Hello there", "Let me think", usage=True))
    assert len(check_chat(openai_client(queued))) >= 2


def test_a_message(no_proxy, front, engine):
    engine.play(*silent(chat_chunks("Hello there", "Let me think", TWO_CALLS, usage=True)))
    client = anthropic.Anthropic(base_url=front.url, api_key=front.key, max_retries=0, timeout=20)
    with client.messages.stream(**MESSAGE, tools=TOOLS) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(block.name, block.input) for block in message.content[2:]] == WANTED


@pytest.mark.parametrize("where", ["queue", "prefill"])
def test_a_response(no_proxy, request, engine, where):
    front = request.getfixturevalue("queued" if where == "queue" else "gateway")
    if where == "prefill":
        front = front(keepalive=0.2)
    engine.play(*silent(chat_chunks("Hello there", "Let me think", usage=True)))
    with openai_client(front).responses.stream(model=MODEL, input="Hello") as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == "Hello there"
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[0] == "created" and kinds.count("created") == 1 and kinds[-1] == "completed"
    first = kinds.index("output_item.added")
    assert set(kinds[1:first]) == {"in_progress"} and first > 4 and "in_progress" in kinds[first:]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [problem for event in events for problem in event_problems(event.to_dict(warnings=False))] == []


def test_chat_with_node(front, engine):
    ask = node_asker("oracle.mjs", front.url + "/v1", front.key)
    engine.play(*silent(chat_chunks("Hello there", "Let me think", TWO_CALLS, usage=True)))
    found = node_result(ask("helper", **USAGE))
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found["message"]["tool_calls"]] == WANTED
    assert (found["message"]["content"], found["message"]["role"], found["finish"]) == ("Hello there", "assistant", "tool_calls")
    assert found["usage"]["prompt_tokens"] == 15


def test_a_message_with_node(gateway, engine):
    front = gateway(keepalive=0.2, keepalive_form="chunk")
    engine.play(*silent(chat_chunks("Hello there", "Let me think", TWO_CALLS, usage=True)))
    found = node_result(node_asker("anthropic.mjs", front.url, front.key)("helper", tools=TOOLS, **THINK))
    assert found["said"] == {"text": "Hello there", "thinking": "Let me think", "inputs": [list(pair) for pair in WANTED]}


@pytest.mark.parametrize("case", ["helper", "vercel_stream"])
def test_a_response_with_node(gateway, engine, case):
    front = gateway(keepalive=0.2)
    engine.play(*silent(chat_chunks("Hello there", "Let me think", usage=True)))
    found = node_result(node_asker("responses.mjs", front.url + "/v1", front.key)(case))
    if case == "helper":
        assert found["final"]["output_text"] == "Hello there" and found["deltas"] == ["Hello", "Hello there"]
    else:
        texts = [part["text"] for part in found["parts"] if part["type"] in ("text-delta", "reasoning-delta")]
        assert "".join(texts) == "Let me thinkHello there" and "error" not in [part["type"] for part in found["parts"]]
