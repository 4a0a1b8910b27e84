"""One answer of an engine, whole and in chunks cut anywhere, through every dialect, plain and streamed: the same."""
import json
import time

import hypothesis
import jiter
import pytest
from hypothesis import strategies as st

import steps
import stream
from dialects import chat, completions, messages
from dialects.messages import ids
from dialects.read import mended
from dialects.responses import Responses
from errors import Refusal, UpstreamError
from mending.answer import CALL_IN_REASONING, NO_CALL, ONLY_REASONING, UNKNOWN_FINISH
from mending.arguments import ObjectText, whole_values
from mending.thinking import LeakedThinking
from mending.tool_calls import NO_NAME, NO_OBJECT, SAME_ID
from support.cuts import cuts, pieces
from support.dialect_tables import JSON, Fleet
from support.engine import sse

HELLO = [{"role": "user", "content": "Hello"}]
USAGE = {"prompt_tokens": 15, "completion_tokens": 5, "total_tokens": 20}
DIALECTS = {
    "chat": (chat, {"messages": HELLO}, {"stream": True, "stream_options": {"include_usage": True}}),
    "messages": (messages, {"messages": HELLO, "max_tokens": 100, "thinking": {"type": "adaptive"}}, {"stream": True}),
    "responses": (Responses(lambda: 1, lambda: "ab" * 24), {"input": "Hello"}, {"stream": True}),
}
CUT = {"length", "max_tokens", "incomplete"}


def asked(name, streams=False, **fields):
    dialect, request, more = DIALECTS[name]
    return dialect, dialect.read(json.dumps({**request, **fields, **(more if streams else {})}).encode(), Fleet())


# ---- what a client reads

def events_in(out):
    return [json.loads(block.partition("data: ")[2]) for block in out.decode().split("\n\n")
            if "data: {" in block]


def a_call(ident, name, arguments):
    return [ident, name, arguments]


def chat_said(answer, at=0):
    choice = answer["choices"][at]
    message = choice["message"]
    calls = [a_call(call["id"], call["function"]["name"], call["function"]["arguments"])
             for call in message.get("tool_calls", [])]
    assert all(call["type"] == "function" for call in message.get("tool_calls", []))
    text = (message["refusal"] or "") + (message.get("content") or "")
    return text, message.get("reasoning", ""), calls, choice["finish_reason"], answer["usage"]


def chat_streamed(out, at=0):
    """As an SDK that joins names would be fooled, a name must come once, with an id and a type."""
    text, reasoning, calls, finish, usage = "", "", [], None, None
    for event in events_in(out):
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if choice["index"] != at:
                continue
            delta = choice["delta"]
            text += (delta.get("refusal") or "") + (delta.get("content") or "")
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
        if block["type"] == "tool_use" and block["json"]:
            block["input"] = jiter.from_json(block["json"].encode(), partial_mode=True)  # as the SDK does
    return message_said({**said, "content": blocks})


def response_said(said):
    texts = {"message": "", "reasoning": ""}
    calls = []
    for item in said["output"]:
        if item["type"] == "function_call":
            calls.append(a_call(item["call_id"], item["name"], item["arguments"]))
        else:
            texts[item["type"]] += "".join(part.get("text") or part.get("refusal", "") for part in item["content"])
    usage = said["usage"]
    return (texts["message"], texts["reasoning"], calls, said["status"],
            {"prompt_tokens": usage["input_tokens"], "completion_tokens": usage["output_tokens"]})


def response_streamed(out):
    return response_said(events_in(out)[-1]["response"])


READERS = {"chat": (chat_said, chat_streamed), "messages": (message_said, message_streamed),
           "responses": (response_said, response_streamed)}


def same_text(text):
    """A text without the white space around it; halves of a character that came apart are put together."""
    return text.strip().encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def object_or_text(arguments):
    """What a client makes of a call's arguments."""
    if isinstance(arguments, str):
        try:
            return json.loads(mended(arguments)) if isinstance(json.loads(arguments), dict) else arguments
        except ValueError:
            return arguments
    return arguments


def reading(said):
    """What plain and streamed must agree on."""
    if isinstance(said, str):
        return said
    text, reasoning, calls, end, usage = said
    return (same_text(text), same_text(reasoning), [(ident, name, object_or_text(arguments)) for ident, name, arguments in calls],
            end, (usage["prompt_tokens"], usage["completion_tokens"]))


def common(said):
    """What the dialects must agree on too: arguments that are no object, and the end that comes of them, they can't."""
    if isinstance(said, str):
        return said
    text, thought, calls, end, usage = reading(said)
    return text, thought, [call[:2] for call in calls], usage


def attempted(read, *args):
    """What a client reads, or the Refusal's code."""
    try:
        return read(*args)
    except Refusal as fault:
        return fault.code


def every_way(whole, events, cut, n=1):
    """{(dialect, choice, way): (what a client reads, what is odd)}"""
    found = {}
    fields = {"n": n} if n > 1 else {}

    def wrote(plain, dialect, answer, one, *at):
        return plain(json.loads(dialect.write(answer, one)[0]), *at)

    def said(streamed, one, out, *at):
        return streamed(out + one.end(), *at)

    for name, (plain, streamed) in READERS.items():
        if n > 1 and name != "chat":  # the others ask for one
            continue
        for at in range(n):
            place = (at,) if at else ()
            for way, answer in (("plain", json.loads(json.dumps(whole))), ("plain, of a stream", events)):
                dialect, one = asked(name, **fields)
                found[name, at, way] = attempted(wrote, plain, dialect, answer, one, *place), one.oddities
            for way in ("streamed", "streamed, of a whole one"):
                one = asked(name, streams=True, **fields)[1].stream
                out = one.feed_plain(json.loads(json.dumps(whole))) if "whole" in way else b"".join(map(one.feed, cut(events)))
                found[name, at, way] = attempted(said, streamed, one, out, *place), one.oddities
    return found


# ---- what an engine sends

WORDS = st.text(st.sampled_from(list("ab \n<>é🌍\"\\\ud83d")), max_size=12)
ARGUMENTS = st.sampled_from([
    '{}', '{"city": "Par\\"is"}', '{"a": {"b": [1, 2]}}', ' {"a":1}', '{"a":1}</tool_call>', '{"city": "Par', '{"a": [1', '{"a": tr',
    '{"a":1}{"b":2}', '{"a":1,}', '{"a": NaN}', '{"a":"\\ud83d"}', '{"a":"\ud83d"}', '{"a":"\n"}', '{"a":"\\x"}', '{"a": -1.50e2, "é": [true,null]} ',
    "{'a': 1}", '{"a": "say "no""}', '{"a"', "{", "", " ", None, "absent", {"a": 1}, {}, [1], 5, True, "no JSON", "[1]", '"a"', "5", "true", "null", "NaN", "]", '{"a":' * 3,
])
NAMES = st.sampled_from(["get_weather", "f", "ping", "é.x", "", None, "absent", 7])
IDS = st.sampled_from(["A", "B", "functions.f:0", None, "", "absent", 7, 0, True, 1.5, {"a": 1}, "toolu_64_x", "é", "\ud83d", "a" * 300, "call_c1_1"])
CALLS = st.lists(st.tuples(NAMES, IDS, ARGUMENTS), max_size=3)
FINISHES = st.sampled_from(["stop", "tool_calls", "length", "content_filter", "function_call", "eos", "abort", "error", None, "", "absent", 1])
CONTENTS = st.one_of(WORDS, WORDS.map(lambda text: f"<think>{text}</think>{text}"), WORDS.map(lambda text: f"\n <think>{text}"),
                     WORDS.map(lambda text: f"{text} <think>a</think>"), st.none(), st.just("absent"))


def present(**fields):
    return {name: value for name, value in fields.items() if not (isinstance(value, str) and value == "absent")}


def call_of(name, ident, arguments):
    return present(id=ident, type="function", function=present(name=name, arguments=arguments))


def deltas_of(calls, data):
    """The same calls in pieces: the name whole, in two, or after the arguments."""
    for index, (name, ident, arguments) in enumerate(calls):
        if not isinstance(arguments, str) or arguments == "absent" or not isinstance(name, str) or name == "absent":
            yield {"index": index, **call_of(name, ident, arguments)}
            continue
        named = call_of(name, ident, "absent")
        parts = pieces(arguments, data.draw(cuts(arguments))) if arguments else [""]
        way = data.draw(st.sampled_from(["whole", "two", "after", "null", "at once", "again"]))
        if way == "two" and len(name) > 1:
            yield {"index": index, **named, "function": {"name": name[:2]}}
            yield {"index": index, "function": {"name": name[2:], "arguments": ""}}
        elif way == "after" and name:
            yield {"index": index, **named, "function": {"arguments": parts[0]}}
            yield {"index": index, "function": {"name": name}}
            parts = parts[1:]
        elif way == "again" and name and "}{" not in arguments:  # these would be two calls
            yield from ({"index": index, **call_of(name, ident, part)} for part in parts)
            continue
        elif way == "at once":
            yield {"index": index, **named, "function": {"name": name, "arguments": parts[0]}}
            parts = parts[1:]
        else:
            yield {"index": index, **named}
        for part in parts:
            yield {"index": index, "function": {"arguments": part} if way != "null" else {"name": None, "arguments": part}}


def words_in(name, text, data):
    """The deltas of a text, in pieces."""
    if not isinstance(text, str) or text == "absent":
        return [] if text == "absent" else [{name: text}]
    return [{name: part} for part in pieces(text, data.draw(cuts(text)))]


def a_choice(index, data):
    """(a choice of a whole completion, the same as choices of chunks)"""
    draw = data.draw
    name = draw(st.sampled_from(["reasoning", "reasoning_content"]))
    thought, content, refusal = draw(st.one_of(WORDS, st.none(), st.just("absent"))), draw(CONTENTS), draw(st.sampled_from(["absent"] * 3 + [None, "No."]))
    calls, finish = draw(CALLS), draw(st.one_of(st.sampled_from(["stop", "tool_calls"]), FINISHES))
    message = present(role="assistant", content=content, refusal=refusal, **{name: thought})
    deltas = [{"role": "assistant", "content": draw(st.sampled_from(["", None]))},
              *words_in(name, thought, data), *words_in("refusal", refusal, data), *words_in("content", content, data)]
    if calls:
        message["tool_calls"] = [call_of(*call) for call in calls]
        deltas += [{"tool_calls": [piece]} for piece in deltas_of(calls, data)]
    if draw(st.booleans()):
        deltas = [{"role": "assistant", **delta} for delta in deltas]
    elif draw(st.booleans()):
        deltas = deltas[1:]
    choices = [{"index": index, "delta": delta, "finish_reason": draw(st.sampled_from([None, ""])), **draw(st.sampled_from([{}, {"token_ids": None, "x": [1]}]))}
               for delta in deltas]
    last = present(index=index, delta={}, finish_reason=finish)
    if draw(st.booleans()):
        last["message"] = message
        del last["delta"]
    elif choices and draw(st.booleans()):
        last = present(**{**choices.pop(), "finish_reason": finish})
    choices.append(last)
    if draw(st.booleans()) and finish not in (None, "", "absent"):  # what comes after the end is no part of the answer
        choices.append({"index": index, "delta": draw(st.sampled_from([{}, {"content": "b"}, {"tool_calls": [call_of("f", "C", "{}")]}])),
                        "finish_reason": draw(st.sampled_from([None, "stop", "length"]))})
    return present(index=index, message=message, finish_reason=finish), choices


def in_events(head, chunks, draw):
    """The bytes of a stream of these chunks, with the usage where engines have it."""
    where = draw(st.sampled_from(["alone", "with the finish", "twice", "null first"]))
    if where == "with the finish":
        chunks[-1]["usage"] = USAGE
    else:
        chunks.append({**head, "choices": [], "usage": USAGE})
    if where == "twice":
        chunks.append({**head, "usage": USAGE})
    if where == "null first":
        chunks = [{"usage": None, **chunk} for chunk in chunks]
    if draw(st.booleans()):
        chunks.insert(0, {**head, "choices": []})
    end, field = draw(st.sampled_from([("\n", "data: "), ("\r\n", "data:"), ("\r", "data: ")]))
    between = draw(st.sampled_from(["", f": hello{end}{end}", f"event: message{end}"]))
    ascii_only = draw(st.booleans())
    blocks = [f"{between}{field}{json.dumps(chunk, ensure_ascii=ascii_only)}{end}{end}" for chunk in chunks]
    return "".join([*blocks, f"data: [DONE]{end}{end}"]).encode("utf-8", "backslashreplace")


@st.composite
def answers(draw, a_choice):
    """(a whole completion, the bytes of a stream of the same, how many choices they have)"""
    data = draw(st.data())
    n = draw(st.sampled_from([1, 1, 1, 2]))
    head = {"id": "c1", "created": 1, "model": "/srv/model.gguf", **draw(st.sampled_from([{}, {"x": {"y": 1}}]))}
    choices, streams = zip(*(a_choice(index, data) for index in range(n)), strict=True)
    chunks = [{**head, "choices": [one]} for stream_ in streams for one in stream_]
    return {**head, "usage": USAGE, "choices": list(choices)}, in_events(head, chunks, draw), n


@hypothesis.given(answers(a_choice), st.data())
def test_an_answer_is_read_once(answer, data):
    whole, events, n = answer
    found = every_way(whole, events, lambda data_: pieces(data_, data.draw(cuts(data_))), n)
    for (name, at, way), (said, odd) in found.items():
        plain = found[name, at, "plain"]
        assert reading(said) == reading(plain[0]), (name, at, way)
        assert odd == plain[1] or isinstance(said, str), (name, at, way)
        if not at:
            assert common(said) == common(found["chat", 0, "plain"][0]), (name, way)


def a_text(index, data):
    """As a_choice, of a text completion."""
    text, finish = data.draw(st.one_of(WORDS, st.none(), st.just("absent"))), data.draw(FINISHES)
    choices = [{"index": index, "finish_reason": data.draw(st.sampled_from([None, ""])), **piece} for piece in words_in("text", text, data)]
    last = present(index=index, text="", finish_reason=finish)
    if choices and data.draw(st.booleans()):
        last = present(**{**choices.pop(), "finish_reason": finish})
    choices.append(last)
    if data.draw(st.booleans()) and finish not in (None, "", "absent"):
        choices.append({"index": index, "text": "b", "finish_reason": data.draw(st.sampled_from([None, "stop"]))})
    return present(index=index, text=text, finish_reason=finish), choices


def text_said(answer):
    return answer["model"], [(same_text(choice["text"]), choice["finish_reason"]) for choice in answer["choices"]], answer["usage"]


def text_streamed(out):
    choices, last = {}, {}
    for event in events_in(out):
        last |= {"model": event["model"], **({"usage": event["usage"]} if event.get("usage") else {})}
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "finish_reason": None})
            assert not whole["finish_reason"]
            whole |= {"text": whole["text"] + choice["text"], "finish_reason": choice.get("finish_reason")}
    return text_said({**last, "choices": list(choices.values())})


def text_ask(n, **fields):
    return completions.read(json.dumps({"prompt": "a", "n": n, **fields}).encode(), Fleet())


def text_written(answer, one):
    return text_said(json.loads(completions.write(answer, one)[0]))


def text_of_stream(out, one):
    return text_streamed(out + one.end())


@hypothesis.given(answers(a_text), st.data())
def test_a_text_is_read_once(answer, data):
    whole, events, n = answer
    found = []
    for given in (json.loads(json.dumps(whole)), events):
        one = text_ask(n)
        found.append((attempted(text_written, given, one), one.oddities))
    for way in ("a stream", "a whole one"):
        one = text_ask(n, stream=True, stream_options={"include_usage": True}).stream
        cut = pieces(events, data.draw(cuts(events)))
        out = b"".join(map(one.feed, cut)) if way == "a stream" else one.feed_plain(json.loads(json.dumps(whole)))
        found.append((attempted(text_of_stream, out, one), one.oddities))
    said, odd = found[0]
    assert all(other == said and (isinstance(said, str) or odd == other_odd) for other, other_odd in found), found


TOKENS = st.lists(st.sampled_from(['{', '}', '[', ']', ':', ',', '"a"', '"', '1', '0', '-', '.5', 'e', 'true', 'nul', 'NaN', ' ', ' ' * 30, '\n',
                                   '\\', '\\u', 'd83d', '\\ude00', 'x', 'é', '\ud83d']), max_size=12).map("".join)


@hypothesis.given(st.sampled_from(["{", '{"a"', '{"a":', '{"a":"', '{"a":["']), TOKENS, st.sampled_from(["", '"}', "}"]), st.data())
def test_arguments_are_what_the_sdk_can_parse(begin, middle, end, data):
    text = begin + middle + end
    whole, cut = ObjectText(), ObjectText()
    given, in_pieces = whole.feed(text), "".join(map(cut.feed, pieces(text, data.draw(cuts(text)))))
    assert (whole.whole, whole.broken) == (cut.whole, cut.broken)
    for said in filter(None, (given, in_pieces)):
        assert whole_values(said) == whole_values(given) == jiter.from_json(said.encode(), partial_mode=True)


@pytest.mark.parametrize("number", ["1" * 5000, "1e" + "1" * 5000, "1" * 4_000_000])
def test_a_number_that_no_client_can_read(number):
    """Nobody's parser takes it, so the arguments end before it."""
    said = ObjectText().feed('{"a":1,"b":' + number + "}")
    assert whole_values(said) == {"a": 1}


def test_arguments_beyond_all_bounds(monkeypatch):
    monkeypatch.setattr(steps, "ANSWER", steps.Most(values=1000, holders=100))
    with pytest.raises(UpstreamError, match="arguments of a tool call"):
        whole_values('{"data":[' + "{},".ljust(2000) * 101 + "1]}")


@hypothesis.given(st.dictionaries(st.text(max_size=3), JSON), st.sampled_from([None, 12]), st.booleans(), st.data())
def test_sound_arguments_stay(value, indent, ascii_only, data):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    one = ObjectText()
    given = "".join(map(one.feed, pieces(text, data.draw(cuts(text)))))
    assert one.whole and "".join(given.split()) == "".join(text.split()) and json.loads(given) == value


@pytest.mark.parametrize("text", ['{"a": 1' + " " * 20_000 + "}", '{"a":"' + "\\" * 20_000, '{"a":' + "[" * 20_000, '{"a":[' + "1," * 10_000,
                                  '{"a":' + "1" * 20_000, '{"a":"' + "\\ud83d" * 10_000])
def test_arguments_are_read_in_linear_time(text):
    begun = time.process_time()
    one = ObjectText()
    for character in text:
        one.feed(character)
    assert time.process_time() - begun < 5


def call_chunks(pieces):
    """The chunks of a stream of calls, [(index, arguments, …)], each of which begins with its first piece."""
    begun = set()
    for index, arguments in pieces:
        first = {} if index in begun else {"id": f"c{index}"}
        name = {} if index in begun else {"name": "f"}
        begun.add(index)
        call = {"index": index, **first, "function": {**name, "arguments": arguments}}
        yield sse({"id": "c1", "choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]})


MANY = 5000
MANY_PIECES = {
    "calls by turns": [(at, piece) for piece in ('{"a":', "1}") for at in range(MANY)],
    "calls without arguments": [(at, "") for at in range(MANY)],
}


@pytest.mark.parametrize("what", MANY_PIECES)
def test_many_calls_are_written_in_linear_time(what):
    """Messages has one block after the other: what belongs to other calls waits."""
    events = b"".join(call_chunks(MANY_PIECES[what])) + sse({"id": "c1", "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    one = asked("messages", streams=True)[1].stream
    begun = time.process_time()
    calls = message_streamed(one.feed(events) + one.end())[2]
    assert time.process_time() - begun < 2 and len(calls) == MANY
    assert all(arguments == ({"a": 1} if "turns" in what else {}) for _, _, arguments in calls)


def test_white_space_that_waits_for_a_tag_is_read_in_linear_time():
    begun = time.process_time()
    leak = LeakedThinking()
    assert {leak.feed("\n  ") for _ in range(100_000)} == {("", "")} and leak.waits
    assert leak.feed("a") == ("", "\n  " * 100_000 + "a")
    assert time.process_time() - begun < 2


def test_a_text_is_put_together_in_linear_time():
    """Also its logprobs."""
    logprobs = {"tokens": ["a"], "token_logprobs": [0], "text_offset": [0], "top_logprobs": [None]}
    event = sse({"id": "c1", "choices": [{"index": 0, "text": "a", "logprobs": logprobs, "finish_reason": None}]})
    last = sse({"id": "c1", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    begun = time.process_time()
    choice = completions.collected(event * 40_000 + last, set())["choices"][0]
    assert time.process_time() - begun < 5
    assert choice["text"] == "a" * 40_000 and {len(values) for values in choice["logprobs"].values()} == {40_000}


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


CALL, HALF = ({"tool_calls": [{"index": 0, **call_of("f", "A", arguments)}]} for arguments in ("{}", '{"a'))
FITTING = [({"content": "a"}, "eos", "stop"), ({"content": "a"}, 5, "stop"), ({"content": "a"}, "tool_calls", "stop"),
            (CALL, "eos", "tool_calls"), (CALL, "stop", "stop"), (HALF, "eos", "length"), (HALF, "content_filter", "content_filter")]


@pytest.mark.parametrize("message, finish, fitting", FITTING)
def test_a_finish_that_clients_know(message, finish, fitting):
    """The AI SDK runs no tool by another one; a client in Rust or Go may not even read it."""
    found = every_way(whole_of(finish, **message), streamed_of(message, finish=finish), lambda data: [data])
    assert {said[3] for (dialect, *_), (said, _) in found.items() if dialect == "chat"} == {fitting}


def test_a_finish_of_a_text_that_clients_know():
    plain = {"id": "c1", "choices": [{"index": 0, "text": "Hello", "finish_reason": "eos"}]}
    one = completions.read(b'{"prompt": "a", "stream": true}', Fleet()).stream
    written = events_in(one.feed(sse(plain) + stream.DONE) + one.end())
    one = completions.read(b'{"prompt": "a"}', Fleet())
    for said in (*written, json.loads(completions.write(plain, one)[0])):
        assert said["choices"][0]["finish_reason"] == "stop"


def test_a_tag_in_reasoning_may_come_in_pieces():
    one = asked("chat", streams=True)[1].stream
    for event in streamed_of(*({"reasoning": part} for part in ("a", "<tool", "_call", ">", "b")), {"content": "c"}).split(b"\n\n"):
        one.feed(event + b"\n\n")
    assert one.oddities == {CALL_IN_REASONING}


@pytest.mark.parametrize("ident", ["functions.get_weather:0", "a b", "é", "toolu_64_x", "\ud83d", "a" * 500 + "!", "é" * 3000, "toolu_64_",
                                   "toolu_64_" + "A" * 500, ids.for_client("é"), "\x00\n"])
def test_an_id_fits_and_leads_back(ident):
    made = ids.for_client(ident)
    assert ids.FITS.fullmatch(made) and ids.for_engine(made) == ident
    history = [{"role": "assistant", "content": [{"type": "tool_use", "id": made, "name": "f", "input": {}}]},
               {"role": "user", "content": [{"type": "tool_result", "tool_use_id": made, "content": "a"}]}]
    one = messages.read(json.dumps({"messages": history, "max_tokens": 5}).encode(), Fleet())
    sent = json.loads(b"".join(one.body))["messages"]
    assert (sent[0]["tool_calls"][0]["id"], sent[1]["tool_call_id"]) == (ident, ident)


@pytest.mark.parametrize("ident", ["toolu_01", "call_abc", "toolu_64_!", "toolu_64_", "A.b"])
def test_an_id_that_was_not_made_here_stays(ident):
    assert ids.for_engine(ident) == ident
