"""One answer of an engine, whole and in chunks cut anywhere, through every dialect, plain and streamed: the same."""
import json

import hypothesis
import pytest
from hypothesis import strategies as st

import stream
from dialects import chat, completions, messages
from dialects.messages import ids
from dialects.read import mended
from dialects.responses import Responses
from errors import Refusal
from mending.answer import CALL_IN_REASONING, NO_CALL, ONLY_REASONING, UNKNOWN_FINISH
from mending.tool_calls import NO_NAME, NO_OBJECT, SAME_ID
from support.cuts import cuts, pieces
from support.dialect_tables import Fleet
from support.engine import sse

HELLO = [{"role": "user", "content": "Hello"}]
USAGE = {"prompt_tokens": 15, "completion_tokens": 5, "total_tokens": 20}
DIALECTS = {
    "chat": (chat, {"messages": HELLO}, {"stream": True, "stream_options": {"include_usage": True}}),
    "messages": (messages, {"messages": HELLO, "max_tokens": 100, "thinking": {"type": "adaptive"}}, {"stream": True}),
    "responses": (Responses(lambda: 1, lambda: "ab" * 24), {"input": "Hello"}, {"stream": True}),
}
CUT = {"length", "max_tokens", "incomplete"}


def asked(name, streams=False):
    dialect, request, more = DIALECTS[name]
    return dialect, dialect.read(json.dumps({**request, **(more if streams else {})}).encode(), Fleet())


# ---- what a client reads

def events_in(out):
    return [json.loads(block.partition("data: ")[2]) for block in out.decode().split("\n\n")
            if "data: {" in block]


def a_call(ident, name, arguments):
    return [ident, name, arguments]


def chat_said(answer):
    choice = answer["choices"][0]
    message = choice["message"]
    calls = [a_call(call["id"], call["function"]["name"], call["function"]["arguments"])
             for call in message.get("tool_calls", [])]
    assert all(call["type"] == "function" for call in message.get("tool_calls", []))
    return message.get("content") or "", message.get("reasoning", ""), calls, choice["finish_reason"], answer["usage"]


def chat_streamed(out):
    """As an SDK that joins names would be fooled, a name must come once, with an id and a type."""
    text, reasoning, calls, finish, usage = "", "", [], None, None
    for event in events_in(out):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            for piece in delta.get("tool_calls", []):
                function = piece["function"]
                if piece["index"] == len(calls):
                    assert piece["type"] == "function" and finish is None
                    calls.append(a_call(piece["id"], function["name"], ""))
                else:
                    assert "id" not in piece and "name" not in function
                calls[piece["index"]][2] += function.get("arguments", "")
            finish = choice["finish_reason"] or finish
    return text, reasoning, calls, finish, usage


def message_said(said):
    def joined(kind, field):
        return "".join(block[field] for block in said["content"] if block["type"] == kind)

    calls = [a_call(ids.for_engine(block["id"]), block["name"], block["input"])
             for block in said["content"] if block["type"] == "tool_use"]
    assert all(ids.FITS.fullmatch(block["id"]) for block in said["content"] if block["type"] == "tool_use")
    usage = said["usage"]
    return (joined("text", "text"), joined("thinking", "thinking"), calls, said["stop_reason"],
            {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]})


def message_streamed(out):
    blocks, said = [], {}
    for event in events_in(out):
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            for field in ("text", "thinking"):
                if field in event["delta"]:
                    blocks[-1][field] += event["delta"][field]
            blocks[-1]["json"] += event["delta"].get("partial_json", "")
        elif event["type"] == "message_delta":
            said = {"usage": event["usage"], **event["delta"]}
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = block["json"]
    return message_said({**said, "content": blocks})


def response_said(said):
    texts = {"message": "", "reasoning": ""}
    calls = []
    for item in said["output"]:
        if item["type"] == "function_call":
            calls.append(a_call(item["call_id"], item["name"], item["arguments"]))
        else:
            texts[item["type"]] += "".join(part["text"] for part in item["content"])
    usage = said["usage"]
    return (texts["message"], texts["reasoning"], calls, said["status"],
            {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]})


def response_streamed(out):
    return response_said(events_in(out)[-1]["response"])


READERS = {"chat": (chat_said, chat_streamed), "messages": (message_said, message_streamed),
           "responses": (response_said, response_streamed)}


def reading(said):
    """What the dialects must agree on."""
    text, reasoning, calls, end, usage = said
    cut = end in CUT
    read = [(ident, name, None if cut else json.loads(mended(arguments))) for ident, name, arguments in calls]
    return (text if text.strip() else "", reasoning.strip(), read, cut,
            (usage["prompt_tokens"], usage["completion_tokens"]))


def every_way(whole, events, cut):
    """{(dialect, way): what a client reads}"""
    found = {}
    for name, (plain, streamed) in READERS.items():
        for way, answer in (("plain", json.loads(json.dumps(whole))), ("plain, of a stream", events)):
            dialect, one = asked(name)
            found[name, way] = plain(json.loads(dialect.write(answer, one)[0])), one.oddities
        for way in ("streamed", "streamed, of a whole one"):
            one = asked(name, streams=True)[1].stream
            out = one.feed_plain(json.loads(json.dumps(whole))) if "whole" in way else b"".join(map(one.feed, cut(events)))
            found[name, way] = streamed(out + one.end()), one.oddities
    return found


# ---- what an engine sends

WORDS = st.text(st.sampled_from(list("ab \n<>é🌍\"\\")), max_size=12)
ARGUMENTS = st.sampled_from([
    '{}', '{"city": "Par\\"is"}', '{"a": {"b": [1, 2]}}', ' {"a":1}', '{"a":1}</tool_call>', '{"city": "Par', '{"a": [1',
    "", " ", None, "absent", {"a": 1}, {}, "no JSON", "[1]", '"a"',
])
NAMES = st.sampled_from(["get_weather", "f", "ping"])
IDS = st.sampled_from(["A", "B", "functions.f:0", None, "", "absent", 7, "toolu_64_x", "é"])
CALLS = st.lists(st.tuples(NAMES, IDS, ARGUMENTS), max_size=3)
NOT_ONLY = st.sampled_from(["stop", "tool_calls", "length"])


def call_of(name, ident, arguments):
    function = {"name": name} if arguments == "absent" else {"name": name, "arguments": arguments}
    return {"function": function} if ident == "absent" else {"id": ident, "type": "function", "function": function}


def deltas_of(calls, data):
    """The same calls in pieces: the name whole, in two, or after the arguments."""
    for index, (name, ident, arguments) in enumerate(calls):
        text = arguments if isinstance(arguments, str) and arguments != "absent" else ""
        named = call_of(name, ident, "absent")
        if isinstance(arguments, dict):
            yield {"index": index, **call_of(name, ident, arguments)}
            continue
        way = data.draw(st.sampled_from(["whole", "two", "after"]))
        parts = pieces(text, data.draw(cuts(text))) if text else []
        if way == "two" and len(name) > 1:
            yield {"index": index, **named, "function": {"name": name[:2]}}
            yield {"index": index, "function": {"name": name[2:], "arguments": ""}}
        elif way == "after" and text and [call[1] for call in calls].count(ident) == 1:
            yield {"index": index, **named, "function": {"arguments": parts[0]}}
            yield {"index": index, "function": {"name": name}}
            parts = parts[1:]
        else:
            yield {"index": index, **named}
        for part in parts:
            yield {"index": index, "function": {"arguments": part}}


@hypothesis.given(WORDS, WORDS, st.booleans(), CALLS, NOT_ONLY, st.data())
def test_an_answer_is_read_once(thought, content, leaks, calls, finish, data):
    hypothesis.assume("<think>" not in content and "</think>" not in content + thought)
    message = {"role": "assistant", "content": content, "reasoning": thought}
    deltas = [{"role": "assistant", "content": ""}, *({"reasoning": part} for part in pieces(thought, data.draw(cuts(thought))))]
    if leaks:
        content = f"<think>{thought}</think>{content}"
        message = {"role": "assistant", "content": content}
        deltas = deltas[:1]
    deltas += [{"content": part} for part in pieces(content, data.draw(cuts(content)))]
    if calls:
        message["tool_calls"] = [call_of(*call) for call in calls]
        deltas += [{"tool_calls": [piece]} for piece in deltas_of(calls, data)]
    head = {"id": "c1", "created": 1, "model": "/srv/model.gguf"}
    whole = {**head, "object": "chat.completion", "usage": USAGE,
             "choices": [{"index": 0, "message": message, "finish_reason": finish}]}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [{**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
               {**head, "choices": [], "usage": USAGE}]
    events = b"".join(map(sse, chunks)) + stream.DONE

    found = every_way(whole, events, lambda data_: pieces(data_, data.draw(cuts(data_))))
    for way, (said, odd) in found.items():
        assert reading(said) == reading(found["chat", "plain"][0]), way
        assert odd == found["chat", "plain"][1], way


# ---- one by one

def whole_of(finish="stop", **message):
    return {"id": "c1", "created": 1, "model": "/srv/model.gguf", "usage": USAGE,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": finish}]}


def streamed_of(*deltas, finish="stop"):
    head = {"id": "c1", "created": 1, "model": "/srv/model.gguf"}
    choices = [*({"index": 0, "delta": delta, "finish_reason": None} for delta in deltas),
               {"index": 0, "delta": {}, "finish_reason": finish}]
    chunks = [*({**head, "choices": [choice]} for choice in choices), {**head, "choices": [], "usage": USAGE}]
    return b"".join(map(sse, chunks)) + stream.DONE


def test_two_calls_of_one_id_in_a_whole_answer():
    calls = [call_of("ping", "A", '{"x":1}'), call_of("pong", "A", '{"y":2}')]
    given = whole_of("tool_calls", tool_calls=calls)
    for way, (said, odd) in every_way(given, streamed_of({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]},
                                                         finish="tool_calls"), lambda data: [data]).items():
        assert reading(said)[2] == [("A", "ping", {"x": 1}), ("call_c1_1", "pong", {"y": 2})], way
        assert odd == {SAME_ID}, way


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_answer_that_was_given_up_is_none(finish, subtests):
    for name in DIALECTS:
        for answer in (whole_of(finish, content="Hello"), streamed_of({"content": "Hello"}, finish=finish)):
            with subtests.test(name, form=type(answer).__name__):
                dialect, one = asked(name)
                with pytest.raises(Refusal, match="gave this answer up"):
                    dialect.write(json.loads(json.dumps(answer)) if isinstance(answer, dict) else answer, one)
                one = asked(name, streams=True)[1].stream
                feed = one.feed_plain if isinstance(answer, dict) else one.feed
                feed(answer)
                with pytest.raises(Refusal, match="gave this answer up"):
                    one.end()
    plain = {"id": "c1", "choices": [{"index": 0, "text": "Hello", "finish_reason": finish}]}
    one = completions.read(b'{"prompt": "a"}', Fleet())
    with pytest.raises(Refusal, match="gave this answer up"):
        completions.write(plain, one)
    one = completions.read(b'{"prompt": "a", "stream": true}', Fleet()).stream
    one.feed(sse(plain) + stream.DONE)
    with pytest.raises(Refusal, match="gave this answer up"):
        one.end()


def test_thinking_that_has_lost_its_opening_tag():
    for name, (plain, streamed) in READERS.items():
        dialect, one = asked(name)
        assert reading(plain(json.loads(dialect.write(whole_of(content="I think.</think>4"), one)[0])))[:2] == ("4", "I think.")
        one = asked(name, streams=True)[1].stream
        out = one.feed_plain(whole_of(content="I think.</think>4")) + one.end()
        assert reading(streamed(out))[:2] == ("4", "I think.")


@pytest.mark.parametrize("streams", [False, True])
def test_the_model_has_its_public_name(streams):
    """In each event, wherever the engine puts its own name; what already has it keeps its bytes."""
    if not streams:
        one = asked("chat")[1]
        assert json.loads(chat.write(whole_of(content="a"), one)[0])["model"] == "model"
        return
    deltas = [{"role": "assistant", "content": ""}, *[{"reasoning": "b"}] * 3, *[{"content": "a"}] * 3]
    sent = streamed_of(*deltas)
    turned = b"".join(sse(dict(reversed(event.items()))) for event in events_in(sent)) + stream.DONE
    for given in (sent, turned):
        one = asked("chat", streams=True)[1].stream
        out = b"".join(one.feed(event + b"\n\n") for event in given.split(b"\n\n") if event)
        assert {event["model"] for event in events_in(out)} == {"model"}
        assert chat_streamed(out)[:2] == ("aaa", "bbb")
    text = {"id": "c1", "model": "/srv/model.gguf", "choices": [{"index": 0, "text": "a", "finish_reason": None}]}
    one = completions.read(b'{"prompt": "a", "stream": true}', Fleet()).stream
    assert {event["model"] for event in events_in(b"".join(one.feed(sse(text)) for _ in range(3)))} == {"model"}


def test_reasoning_alone_is_the_text_for_a_client_that_wants_none():
    request = {"messages": HELLO, "max_tokens": 100}
    one = messages.read(json.dumps(request).encode(), Fleet())
    said = message_said(json.loads(messages.write(whole_of(content="", reasoning="Paris."), one)[0]))
    assert (said[0], said[3], one.oddities) == ("Paris.", "end_turn", {ONLY_REASONING})
    one = messages.read(json.dumps({**request, "stream": True}).encode(), Fleet()).stream
    out = one.feed(streamed_of({"role": "assistant", "content": ""}, {"reasoning": "Par"}, {"reasoning": "is."})) + one.end()
    said = message_streamed(out)
    assert (said[0], said[3], one.oddities) == ("Paris.", "end_turn", {ONLY_REASONING})


ODD = [
    ({"reasoning": "hm"}, "stop", ONLY_REASONING), ({"reasoning": "a <tool_call> b", "content": "c"}, "stop", CALL_IN_REASONING),
    ({"content": "a"}, "tool_calls", NO_CALL), ({"content": "a"}, "eos", UNKNOWN_FINISH),
    ({"content": "a", "tool_calls": [{"index": 0, "id": "A", "function": {"arguments": "{}"}}]}, "stop", NO_NAME),
    ({"tool_calls": [{"index": 0, **call_of("f", "A", "no")}]}, "stop", NO_OBJECT),
]


def test_oddities(subtests):
    for message, finish, kind in ODD:
        with subtests.test(kind):
            events = streamed_of(message, finish=finish)
            for way, (_, odd) in every_way(whole_of(finish, **message), events, lambda data: [data]).items():
                assert odd == {kind}, way


def test_a_tag_in_reasoning_may_come_in_pieces():
    one = asked("chat", streams=True)[1].stream
    for event in streamed_of(*({"reasoning": part} for part in ("a", "<tool", "_call", ">", "b")), {"content": "c"}).split(b"\n\n"):
        one.feed(event + b"\n\n")
    assert one.oddities == {CALL_IN_REASONING}


@pytest.mark.parametrize("ident", ["functions.get_weather:0", "a b", "é", "toolu_64_x", "\ud83d", "a" * 500 + "!"])
def test_an_id_fits_and_leads_back(ident):
    made = ids.for_client(ident)
    assert ids.FITS.fullmatch(made) and ids.for_engine(made) == ident
    history = [{"role": "assistant", "content": [{"type": "tool_use", "id": made, "name": "f", "input": {}}]},
               {"role": "user", "content": [{"type": "tool_result", "tool_use_id": made, "content": "a"}]}]
    if ident.isascii():
        one = messages.read(json.dumps({"messages": history, "max_tokens": 5}).encode(), Fleet())
        sent = json.loads(b"".join(one.body))["messages"]
        assert (sent[0]["tool_calls"][0]["id"], sent[1]["tool_call_id"]) == (ident, ident)


@pytest.mark.parametrize("ident", ["toolu_01", "call_abc", "toolu_64_!", "toolu_64_", "A.b"])
def test_an_id_that_was_not_made_here_stays(ident):
    assert ids.for_engine(ident) == ident
