"""What becomes of every chat, whatever its API: the engine's own words in it."""
import json
import os
from types import SimpleNamespace

import pytest

from dialects import chat, completions, messages
from dialects.completions import opening_of_prompt
from dialects.engine import engine_chat, opening_of
from dialects.history import Ignored
from dialects.messages import count
from dialects.responses import Responses
from engines.kinds import OTHER, Kind
from engines.models import Model
from errors import InvalidRequest
from front.large_json import LONG

HELLO = {"role": "user", "content": "Hello"}
EARLIER = {
    chat: {"messages": [HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}, HELLO]},
    messages: {"max_tokens": 9, "messages": [HELLO, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "Hi"}]}, HELLO]},
    Responses(lambda: 0, lambda: "00"): {"input": [HELLO, {"type": "reasoning", "summary": [
        {"type": "summary_text", "text": "hm"}]}, {"role": "assistant", "content": "Hi"}, HELLO]},
}


NO_IMAGES = [
    "data:", "data:,", "data:text/html,<b>", "data:text/html;base64,PGI+", "data:image/png", "data:image/png,AAAA", "data:image/png;base64",
    "data:image/png;base64,", "data:;base64,AAAA", "data:image;base64,AAAA", "data:image/;base64,AAAA", "data:image/svg+xml;base64,AAAA",
    "data:image/tiff;base64,AAAA", "data:image/x-none;base64,AAAA", "data:image/*;base64,AAAA", "data:image/pngx;base64,AAAA",
    "data:application/pdf;base64,AAAA", "data:application/octet-stream;base64,AAAA", "data:video/mp4;base64,AAAA", "data: image/png;base64,AAAA",
    "data:image/png;charset=utf-8;base64,AAAA", "data:image/png;base32,AAAA", "data:image/png;base64,<b>", "data:image/png;base64,AA AA",
    "data:image/png;base64,AAAA\n", "data:image/png;base64,AA\nAA", "data:image/png;base64,A", "data:image/png;base64,AAA",
    "data:image/png;base64,AA-_", "data:image/png;base64,AA%3D%3D", "data:image/png;base64,AA==AA==", "data:image/png;base64,====",
    "data:image/png;base64,äöüß", "data:image/png;base64,AAAA\u0001", "data:image/png;base64,data:image/png;base64,AAAA",
    "data:image/png;base64,\u00010123456789abcdef:0\u0001", "data:image/png;base64,<b>\u00010123456789abcdef:0\u0001",
    "data:image/png;base64," + "A" * 50_001, "data:image/png;base64,<" + "A" * 50_003, "data:image/png;base64," + "A" * 50_003 + "-",
]
IMAGES = [*(f"data:image/{kind};base64,AAAA" for kind in ("png", "jpeg", "jpg", "gif", "webp", "bmp")), "DATA:image/PNG;Base64,AA==",
          "data:image/png;base64," + "A" * 50_002 + "==", "data:image/png;base64," + "+/" * 700 + "\u00010123456789abcdef:12\u0001"]
ANSWER = {"role": "assistant", "content": "b"}
RESPONSES = Responses(lambda: 0, lambda: "00")
DIALECTS = [pytest.param(chat, id="chat"), pytest.param(messages, id="messages"), pytest.param(count, id="count"),
            pytest.param(RESPONSES, id="responses")]


def with_image(dialect, url):
    """(where the image is, a body with it, whether that is history), each way that the dialect has."""
    said = {"type": "text", "text": "look"}
    if dialect is chat:
        for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": url}):
            yield "messages[0].content[1].image_url", {"messages": [{"role": "user", "content": [said, part]}]}, False
            for role in ("user", "tool"):
                yield "messages[0].content[1]", {"messages": [{"role": role, "content": [said, part]}, ANSWER, HELLO]}, True
    elif dialect is RESPONSES:
        part = {"type": "input_image", "image_url": url}
        asked = {"role": "user", "content": [part]}
        yield "input[0].content[0].image_url", {"input": [asked]}, False
        yield "input[0].content[0]", {"input": [asked, ANSWER, HELLO]}, True
        yield "input[1].output[0]", {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                                               {"type": "function_call_output", "call_id": "a", "output": [part]}]}, True
    else:
        kind, _, data = url[len("data:"):].partition(";base64,")
        sources = [{"type": "url", "url": url}]
        if f"data:{kind};base64,{data}" == url:
            sources.append({"type": "base64", "media_type": kind, "data": data})
        for source in sources:
            image = {"type": "image", "source": source}
            asked = {"role": "user", "content": [said, image]}
            call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
            result = {"type": "tool_result", "tool_use_id": "a", "content": [said, image]}
            yield "messages.0.content.1.source", {"max_tokens": 9, "messages": [asked]}, False
            yield "messages.0.content.1", {"max_tokens": 9, "messages": [asked, ANSWER, HELLO]}, True
            yield "messages.2.content.0.content.1", {"max_tokens": 9, "messages": [HELLO, call, {"role": "user", "content": [result]}]}, True


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_data_url_that_is_no_image_is_refused_by_its_place(dialect, subtests):
    """In a history the client would send it again each time: it is left out, and named."""
    for url in NO_IMAGES:
        for stream in (True, False):
            for where, body, past in with_image(dialect, url):
                text = json.dumps({**body, "stream": stream}).encode()
                if past:
                    with subtests.test(url[:60], where=where):
                        ask = dialect.read(text, Fleet(OTHER))
                        assert ask.ignored.rpartition(" ")[0] == where
                        assert b"image_url" not in b"".join(ask.body)
                    continue
                with subtests.test(url[:60], where=where), pytest.raises(InvalidRequest) as caught:
                    dialect.read(text, Fleet(OTHER))
                assert where in caught.value.message and len(caught.value.message) < 300
                assert caught.value.param == where.partition("[")[0].partition(".")[0]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_data_url_that_is_an_image_goes_on_as_it_is(dialect, subtests):
    for url in IMAGES:
        for _, body, _ in with_image(dialect, url):
            with subtests.test(url[:60]):
                ask = dialect.read(json.dumps(body).encode(), Fleet(OTHER))
                assert dialect is count or json.dumps(url)[1:-1].partition(";base64,")[2].encode() in b"".join(ask.body)


class Thoughtful(Kind):
    earlier_reasoning = "thoughts"


class Fleet:
    def __init__(self, kind):
        self.model = Model(id="m", engine_id="engine/m", engine_kind=kind)

    def find(self, name):
        return self.model


@pytest.mark.parametrize("kind, field", [(OTHER, "reasoning_content"), (Thoughtful(), "thoughts")], ids=["usual", "another"])
@pytest.mark.parametrize("dialect, body", EARLIER.items(), ids=["chat", "messages", "responses"])
def test_reasoning_of_earlier_turns_goes_where_the_engine_reads_it(dialect, body, kind, field):
    sent = json.loads(b"".join(dialect.read(json.dumps(body).encode(), Fleet(kind)).body))
    assert sent["messages"] == [HELLO, {"role": "assistant", "content": "Hi", field: "hm"}, HELLO]


# ---- which conversation it is

def test_a_conversation_is_told_by_what_stands_before_its_first_answer():
    system, question = {"role": "system", "content": "S" * 20_000}, {"role": "user", "content": "How?"}
    begun = [system, {"role": "user", "content": [{"type": "text", "text": "It is so."},
             {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}, question]
    more = [{"role": "assistant", "content": "So."}, {"role": "user", "content": "Why?"}]
    assert opening_of(begun) == opening_of(begun + more) == opening_of(begun + more * 20)
    cut = {**system, "content": "S" * 1000 + "\x01" + "0123456789abcdef" + ":7\x01"}       # as it is in a large request
    assert opening_of([cut, *begun[1:], *more]) == opening_of(begun)
    others = [[system, question], [question], [{**system, "content": "T" * 20_000}, *begun[1:]], [system, begun[1], {**question, "content": "When?"}],
              [*begun[:2], {**question, "role": "developer"}], [{"role": "user", "content": None}], []]
    assert len({opening_of(messages) for messages in (begun, *others)}) == len(others) + 1


@pytest.mark.parametrize("letter", ["x", "\n", "é", "й", "語", "😀"])
def test_a_text_that_is_cut_in_a_large_request_is_told_by_its_beginning(letter):
    """However it is escaped there, as Python's json does all but ASCII."""
    told = [opening_of([{"role": "user", "content": letter * length}]) for length in range(300, 9000, 20)]
    longest = 300 + 20 * max(at for at, one in enumerate(told) if one != told[0])
    assert longest >= 800 and len(json.dumps(letter * longest)) <= LONG


def test_what_is_looked_at_of_an_opening_is_bounded():
    message = {"role": "user", "content": [{"type": "text", "text": "x" * 100_000}] * 1000}
    assert len(opening_of([message] * 1000)) < 400_000


def test_only_a_model_with_several_engines_has_its_conversations_told_apart():
    body = [{"role": "user", "content": "Hi"}]
    for places, told in (({}, False), ({1: None}, False), ({1: None, 2: None}, True)):
        model = Model("m", engine_id="m", places=places)
        fleet = SimpleNamespace(find=lambda name, model=model: model)
        assert (engine_chat({"messages": [*body]}, fleet, Ignored()).opening is not None) == told
        assert (completions.read(b'{"prompt": "Once"}', fleet).opening is not None) == told
    prompts = ("x" * 1000, "x" * 5000, ["x" * 400, "y"], "y", [1, 2, 3], [[1, 2, 3], [4]], None)
    assert [opening_of_prompt(prompt) for prompt in prompts] == [b'"' + b"x" * 300 + b'"'] * 3 + [b'"y"', b"[1,2,3]", b"[1,2,3]", b'""']


# ---- its order

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "f", "parameters": PARAMETERS}
CONVERSATIONS = {                                                               # what a turn adds to; where; its tools
    "chat": (chat, "messages", {"tools": [FUNCTION]}),
    "messages": (messages, "messages", {"max_tokens": 9, "tools": [{"name": "f", "input_schema": PARAMETERS}], "system": "S"}),
    "responses": (RESPONSES, "input", {"tools": [FUNCTION], "instructions": "S"}),
}


def body_of(dialect, first, second):
    """The engine's body of a client's, whose fields stand in that order."""
    return b"".join(dialect.read(json.dumps({**first, **second}).encode(), Fleet(OTHER)).body)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_turns_of_a_conversation_begin_alike(name):
    """Whatever its client puts first, and changes from turn to turn."""
    dialect, where, given = CONVERSATIONS[name]
    begun = {**given, where: [HELLO, ANSWER, HELLO]}
    former = body_of(dialect, {}, begun)
    assert former.startswith(b'{"tools":[{') and former.partition(b"]")[2].startswith(b',"messages":[{')
    grown = {where: [*begun[where], ANSWER, HELLO]}
    for others in ({"stream": True, "temperature": 0.5}, {"max_tokens": 7, "top_p": 0.5, "tool_choice": {"type": "none"} if name == "messages" else "none"}):
        for order in ([{**others, **given}, grown], [grown, {**given, **others}], [others, {**grown, **given}]):
            later = body_of(dialect, *order)
            same = len(os.path.commonprefix([former, later]))
            assert later[same - 1:same + 1] == b"}," and former[same:].startswith(b"],")


def test_the_turns_of_a_text_begin_alike():
    former = body_of(completions, {"max_tokens": 5}, {"prompt": "Once upon"})
    later = body_of(completions, {"temperature": 0, "stream": True}, {"prompt": "Once upon a time"})
    assert former.startswith(b'{"prompt":"Once upon"') and later.startswith(b'{"prompt":"Once upon a time"')
