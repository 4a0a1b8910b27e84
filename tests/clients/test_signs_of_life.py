"""Signs of life in silent streams, as the vendors' SDKs take them: comments, empty chunks, and the events of other APIs."""
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache

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
    Engine,
    Head,
    Pause,
    Wait,
    chat_chunks,
    chunk,
    llama_chunks,
    sse,
    text_chunks,
)
from support.gateway import started
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


@cache
def undisturbed(api, at):
    """What one of its answers adds up to."""
    make, added_up, answers = READERS[api]
    return added_up(written(make(), answers[at], ()))


# Messages and Responses have events of their own, whatever is asked for.
@pytest.mark.parametrize("api, chunks", [(api, chunks) for api in READERS for chunks in (False, True)
                                         if chunks or api not in ("message", "response")])
@given(st.data())
def test_they_change_nothing(api, chunks, data):
    make, added_up, answers = READERS[api]
    at = data.draw(st.integers(0, len(answers) - 1))
    events = answers[at]
    places = data.draw(st.lists(st.integers(0, len(events) - 1), min_size=1, max_size=8))
    stream = make()
    if chunks:
        stream.alive_in_chunks("other", 7, "other")
    out = written(stream, events, places)
    expected, found = undisturbed(api, at), added_up(out)
    if not chunks or api in ("message", "response"):
        assert found == expected
        return
    parts = [json.loads(line[6:]) for line in out.split(b"\n") if line.startswith(b"data: {")]
    assert len({tuple(part.get(name) for name in NAMES) for part in parts}) == 1
    if 0 in places:                                 # the first of all chunks names them all
        expected = expected | {"id": ("cmpl-" if api == "completion" else "chatcmpl-") + "other", "created": 7, "model": "other"}
    assert found == expected


def test_chunks_fit_the_schema():
    stream = ChatStream()
    stream.alive_in_chunks("1", 7, MODEL)
    value = json.loads(stream.alive()[6:])
    assert problems("CreateChatCompletionStreamResponse", value) == [] and value["choices"][0]["delta"] == {}


# ---- the real server, silent in the queue, in prefill and between tokens

SILENCE = 0.3
SLOTS = 3


def silent(events, place=4):
    return [Pause(SILENCE), Head(), Pause(SILENCE), *events[:place], Pause(SILENCE), *events[place:]]


@pytest.fixture(scope="module")
def house(stock, tmp_path_factory):
    """A gateway that sends empty chunks, but to one of its keys."""
    folder = tmp_path_factory.mktemp("alive")
    with Engine() as engine, started(engine, folder, stock, keepalive=0.1, max_active=SLOTS, keepalive_form="chunk") as gateway:
        gateway.keys_of = {"chunk": gateway.key, "comment": gateway.add_key("commented")}
        assert gateway.keys("limit", "commented", "--keepalive-form", "comment").returncode == 0
        gateway.engine = engine
        yield gateway


@pytest.fixture
def front(house, no_proxy):
    house.engine.reset()
    yield house
    house.engine.wait_idle()
    assert not house.engine.faults, "\n".join(house.engine.faults)


@pytest.fixture
def engine(front):
    return front.engine


@pytest.fixture
def queue(front, engine):
    """All slots are taken until this event is set."""
    go = threading.Event()
    with ExitStack() as connections:
        for number in range(SLOTS):
            engine.play(Head(), Wait(go), *chat_chunks("first"))
            connection = connections.enter_context(front.client().open())
            connection.start("POST", "/v1/chat/completions", {**CHAT, "stream": True})
            engine.wait_for(number + 1)
        yield go
        go.set()


def openai_client(front, form="chunk"):
    return openai.OpenAI(base_url=front.url + "/v1", api_key=front.keys_of[form], max_retries=0, timeout=20)


def check_chat(client, go=None):
    """The signs of life in a chat. go: an event to be set after the second of them."""
    chunks = []
    with client.chat.completions.stream(**CHAT, **USAGE) as stream:
        for event in stream:
            chunks += [event.chunk] if event.type == "chunk" else []
            if go and len(chunks) == 2:
                go.set()
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == ("Hello there", "assistant", "stop")
    assert choice.message.reasoning == "Let me think" and final.usage.prompt_tokens == 15
    assert {(part.id, part.created, part.model) for part in chunks} == {(final.id, final.created, final.model)}
    return [part for part in chunks if part.choices and not part.choices[0].delta.to_dict()
            and not part.choices[0].finish_reason]


@pytest.mark.parametrize("form", ["comment", "chunk"])
def test_chat(front, engine, form):
    engine.play(*silent(chat_chunks("Hello there", "Let me think", usage=True)))
    empty = check_chat(openai_client(front, form))
    assert (len(empty) >= 4) if form == "chunk" else not empty


@pytest.mark.parametrize("form", ["comment", "chunk"])
def test_completions(front, engine, form):
    engine.play(*silent(text_chunks("Hello there", usage=True), 1))
    chunks = list(openai_client(front, form).completions.create(model=MODEL, prompt="Once", stream=True))
    assert "".join(part.choices[0].text for part in chunks) == "Hello there" and chunks[-1].choices[0].finish_reason == "stop"
    assert len({(part.id, part.created, part.model, part.object) for part in chunks}) == 1
    assert (len(chunks) >= 7) == (form == "chunk")


def test_chat_in_the_queue(front, engine, queue):
    engine.play(*chat_chunks("Hello there", "Let me think", usage=True))
    assert len(check_chat(openai_client(front), queue)) >= 2


def test_a_message(front, engine):
    engine.play(*silent(chat_chunks("Hello there", "Let me think", TWO_CALLS, usage=True)))
    client = anthropic.Anthropic(base_url=front.url, api_key=front.key, max_retries=0, timeout=20)
    with client.messages.stream(**MESSAGE, tools=TOOLS) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(block.name, block.input) for block in message.content[2:]] == WANTED


@pytest.mark.parametrize("where", ["queue", "prefill"])
def test_a_response(request, front, engine, where):
    go = request.getfixturevalue("queue") if where == "queue" else threading.Event()
    engine.play(Wait(go), *silent(chat_chunks("Hello there", "Let me think", usage=True)))    # however slow this machine is
    events = []
    with openai_client(front).responses.stream(model=MODEL, input="Hello") as stream:
        for event in stream:
            events.append(event)
            if len(events) == 4:
                go.set()
        assert stream.get_final_response().output_text == "Hello there"
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[0] == "created" and kinds.count("created") == 1 and kinds[-1] == "completed"
    first = kinds.index("output_item.added")
    assert set(kinds[1:first]) == {"in_progress"} and first > 4 and "in_progress" in kinds[first:]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [problem for event in events for problem in event_problems(event.to_dict(warnings=False))] == []


def test_with_node(front, engine):
    """OpenAI's, Anthropic's and Vercel's SDKs, all at once."""
    engine.always(lambda request: silent(chat_chunks(
        "Hello there", "Let me think", TWO_CALLS if request.json().get("tools") else None, usage=True)))
    tools = [{"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}} for tool in TOOLS]
    base = front.url + "/v1"
    chat, responses = node_asker("oracle.mjs", base, front.key), node_asker("responses.mjs", base, front.key)
    asks = [lambda form=form: chat("helper", tools=tools, key=front.keys_of[form], **USAGE) for form in ("comment", "chunk")]
    asks += [lambda: node_asker("anthropic.mjs", front.url, front.key)("helper", tools=TOOLS, **THINK),
             lambda: responses("helper"), lambda: responses("vercel_stream")]
    with ThreadPoolExecutor(len(asks)) as pool:
        *chats, message, response, vercel = [node_result(done.result()) for done in [pool.submit(ask) for ask in asks]]
    for found in chats:
        assert [(call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in found["message"]["tool_calls"]] == WANTED
        assert (found["message"]["content"], found["message"]["role"], found["finish"]) == ("Hello there", "assistant", "tool_calls")
        assert found["usage"]["prompt_tokens"] == 15
    assert message["said"] == {"text": "Hello there", "thinking": "Let me think", "inputs": [list(pair) for pair in WANTED]}
    assert response["final"]["output_text"] == "Hello there" and response["deltas"] == ["Hello", "Hello there"]
    texts = [part["text"] for part in vercel["parts"] if part["type"] in ("text-delta", "reasoning-delta")]
    assert "".join(texts) == "Let me thinkHello there" and "error" not in [part["type"] for part in vercel["parts"]]
