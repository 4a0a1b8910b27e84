"""What engines really answer, through the SDKs' own loops of tools.

Each gives the right answer or raises an ordinary error of its own, and no tool runs on half of its input.
"""
import pytest

from support.engine import DONE, Json, chat_chunks, chunk, completion, sse
from support.loops import CLIENTS, STORED, TEXT_CLIENTS

PARIS = [["get_weather", {"city": "Paris"}]]
JSON = '{"city": "Paris"}'
NOTHING = [["get_weather", {}]]
DONE_IT = (completion("Done."), chat_chunks("Done.", usage=True))
KIMI = "functions.get_weather:0"


def call(arguments=JSON, name="get_weather", **more):
    return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def without(piece, *names):
    return {name: value for name, value in piece.items() if name not in names}


def whole(*calls, finish="tool_calls", **message):
    answer = completion(None, finish=finish)
    answer["choices"][0]["message"].update({"tool_calls": list(calls), **message})
    return answer


def streamed(*deltas, finish="tool_calls"):
    return [sse(chunk({"role": "assistant", "content": ""})), *(sse(chunk(delta)) for delta in deltas),
            sse(chunk({}, finish)), DONE]


def pieces(*calls):
    """Deltas with a piece of a call each, of index 0 unless it says another one."""
    return [{"tool_calls": [{"index": 0, **piece}]} for piece in calls]


def both(*calls, finish="tool_calls", **message):
    """The same calls in a whole answer and in a stream, each in one piece."""
    indexed = [{**piece, "index": at} for at, piece in enumerate(calls)]
    said = [{name: value} for name, value in message.items()]
    return (whole(*calls, finish=finish, **message), streamed(*said, *pieces(*indexed), finish=finish))


def begun(arguments):
    """The same arguments, in a stream of which one piece brings the name and another one the arguments."""
    first, rest = call(""), {"function": {"arguments": arguments}}
    return whole(call(arguments)), streamed(*pieces(first, rest))


NO_ARGUMENTS = {"id": "call-1", "type": "function", "function": {"name": "get_weather"}}
HALF = '{"city": "Par'
TWO = [["get_weather", {"city": "Paris"}], ["get_time", {"city": "Rome"}]]
ROME = '{"city": "Rome"}'

# prompt -> (what the engine answers whole and streamed, the tools that are to run)
CALLS = {
    "ordinary": (both(call(), reasoning="I look"), PARIS),
    "no characters": (both(call("")), NOTHING),
    "blank": (both(call(" ")), NOTHING),
    "null": (both(call(None)), NOTHING),
    "absent": (both(NO_ARGUMENTS), NOTHING),
    "an object": (both(call({"city": "Paris"})), PARIS),
    "an empty object": (both(call({})), NOTHING),
    "null, then a text": ((whole(call()), streamed(*pieces(call(None), {"function": {"arguments": JSON}}))), PARIS),
    "then null": ((whole(call()), streamed(*pieces(call(), {"function": {"arguments": None}}))), PARIS),
    "arguments first": ((whole(call()), streamed(*pieces(
        {"id": "call-1", "function": {"arguments": JSON[:5]}}, {"function": {"name": "get_weather", "arguments": JSON[5:]}}))), PARIS),
    "a name in pieces": ((whole(call()), streamed(*pieces(
        call("", "get_"), {"function": {"name": "weather"}}, {"function": {"arguments": JSON}}))), PARIS),
    "id and name again": ((whole(call()), streamed(*pieces(call(JSON[:5]), call(JSON[5:])))), PARIS),
    "no id": (both(without(call(), "id")), PARIS),
    "id null": (both(call(id=None)), PARIS),
    "id empty": (both(call(id="")), PARIS),
    "id a number": (both(call(id=7)), PARIS),
    "id of Kimi": (both(call(id=KIMI)), PARIS),
    "id long": (both(call(id="call é|" * 40)), PARIS),
    "no type": (both(without(call(), "type")), PARIS),
    "type null": (both(call(type=None)), PARIS),
    "two": (both(call(), call(ROME, "get_time", id="call-2")), TWO),
    "two of one id": (both(call(), call(ROME, "get_time")), TWO),
    "two without id": (both(*(without(one, "id") for one in (call(), call(ROME, "get_time")))), TWO),
    "two of one index": ((whole(call(), call(ROME, "get_time", id="call-2")),
                          streamed(*pieces(call(), call(ROME, "get_time", id="call-2")))), TWO),
    "no index": ((whole(call()), streamed({"tool_calls": [call(JSON[:5])]}, {"tool_calls": [{"function": {"arguments": JSON[5:]}}]})),
                 PARIS),
    "finish stop": (both(call(), finish="stop"), PARIS),
    "finish unknown": (both(call(), finish="eos"), PARIS),
    "with text": (both(call(), content="I look"), PARIS),
    "with thoughts and text": (both(call(), reasoning="I look", content="Let me see"), PARIS),
    "content in the call's delta": ((whole(call(), content=""), streamed({"content": "", "tool_calls": [call(index=0)]})), PARIS),
    "finish with the call": ((whole(call()), [sse(chunk({"role": "assistant", "tool_calls": [call(index=0)]}, "tool_calls")), DONE]),
                             PARIS),
    "more fields": (both(call(extra={"a": 1}, index=None)), PARIS),
    "more behind": (both(call(JSON + "</tool_call>")), PARIS),
}
CUT = {f"cut, {finish}": both(call(HALF), finish=finish) for finish in ("tool_calls", "stop", "length")}
CUT |= {"the second cut": both(call(), call(HALF, "get_time", id="call-2"))}
GIVEN_UP = {f"{finish}, {kind}": answer for finish in ("abort", "error") for kind, answer in {
    "call": both(call(), finish=finish), "half a call": both(call(HALF), finish=finish),
    "text": both(finish=finish, content="So")}.items()}


# prompt -> (what the engine answers, the text, the reasoning)
BARE = {"index": 0, "finish_reason": "stop"}
TEXTS = {
    "said": (both(finish="stop", reasoning="hm", content="4"), "4", "hm"),
    "under the other name": (both(finish="stop", reasoning_content="hm", content="4"), "4", "hm"),
    "only thought": (both(finish="stop", reasoning="hm"), "", "hm"),
    "nothing": (both(finish="stop"), "", ""),
    "content empty": (both(finish="stop", content=""), "", ""),
    "nulls": (both(finish="stop", content="4", reasoning=None, refusal=None, function_call=None, audio=None), "4", ""),
    "calls null": ((whole(finish="stop", content="4", tool_calls=None), streamed({"content": "4", "tool_calls": None}, finish="stop")),
                   "4", ""),
    "calls of none": ((whole(finish="stop", content="4"), streamed({"content": "4", "tool_calls": []}, finish="stop")), "4", ""),
    "no name": (both(call(name=None), content="4"), "4", ""),
    "no call": (both(content="4"), "4", ""),
    "said, finish unknown": (both(finish="eos", content="4"), "4", ""),
    "a tag": (both(finish="stop", content="<think>hm</think>4"), "4", "hm"),
    "bare": (({"choices": [{**BARE, "message": {"role": "assistant", "content": "4"}}]},
              [sse({"object": "chat.completion.chunk", "choices": [{**BARE, "delta": {"role": "assistant", "content": "4"}}]}), DONE]),
             "4", ""),
}
ANSWERS = {**{name: answer for name, (answer, _) in CALLS.items()}, **CUT, **GIVEN_UP,
           **{name: row[0] for name, row in TEXTS.items()}}


def scripted(request):
    ask = request.json()
    plain, chunks = DONE_IT if ask["messages"][-1]["role"] == "tool" else ANSWERS[prompt_of(ask)]
    return chunks if ask.get("stream") else [Json(plain)]


def prompt_of(ask):
    prompt = next(message["content"] for message in ask["messages"] if message["role"] == "user")
    return prompt if isinstance(prompt, str) else prompt[0]["text"]


# ---- each with each

FORGETFUL = ("Node chat", "Node vercel openai", "Node vercel openai, chat")      # they don't send reasoning back, or a reference to it
SHOWS_NO_REASONING = "Node vercel openai, chat"
# By the class of the error and of its cause: the SDKs' own for a status, an event that is an error, and an answer cut short.
ORDINARY = (("APIError", None), ("APIStatusError", None), ("InternalServerError", None), ("OpenAIError", None),
            ("LengthFinishReasonError", None), ("APICallError", None), ("Object", None))
CUT_ENDS = ("length", "max_tokens", "max_output_tokens")


def is_right(prompt, one, client):
    """Whether what came of a prompt is what should come of it."""
    failed = tuple(one["error"][:2]) in ORDINARY if "error" in one else None
    if prompt in GIVEN_UP:
        return bool(failed) and one["ran"] == []
    if prompt in CUT:       # some run a call that is whole; some tell the model that one is not
        return one["ran"] in ([], PARIS) and (failed or one.get("end") in CUT_ENDS or one.get("text") == "Done.")
    if client == STORED and prompt == "with thoughts and text":
        return one["ran"] == PARIS and one["error"][:2] == ["APICallError", None] and "set store: false" in one["error"][2]
    if prompt in CALLS:
        return (one["ran"], one.get("text")) == (CALLS[prompt][1], "Done.")
    _, text, thoughts = TEXTS[prompt]
    shown = "" if client == SHOWS_NO_REASONING else thoughts
    return "error" not in one and (one["text"] or "", one.get("thoughts") or "", one["ran"]) == (text, shown, [])


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
def test_odd_answers(shared, no_proxy, client, streams):
    shared.engine.always(scripted)
    found = dict(zip(ANSWERS, CLIENTS[client](shared, ANSWERS, streams), strict=True))
    assert {prompt: one for prompt, one in found.items() if not is_right(prompt, one, client)} == {}
    asked = [request.json() for request in shared.engine.requests]
    results = {prompt_of(ask): ask["messages"] for ask in asked if ask["messages"][-1]["role"] == "tool"}
    for history in (results[prompt] for prompt in CALLS if prompt in results):       # each result names its call, and the engine gets its own id back
        made = [one["id"] for message in history for one in message.get("tool_calls") or ()]
        assert made == [message["tool_call_id"] for message in history if message["role"] == "tool"]
    assert results["id of Kimi"][-1]["tool_call_id"] == KIMI
    thoughts = [message.get("reasoning_content") for message in results["ordinary"] if message["role"] == "assistant"]
    assert thoughts == [None if client in FORGETFUL else "I look"]


# ---- text completions

ENDS = {"stop": "stop", "eos": "stop", "length": "length", "abort": None, "error": None}       # what an engine says: what a client reads


def text_of(request):
    ask = request.json()
    head, choice = {"id": "cmpl-1", "object": "text_completion", "created": 1}, {"index": 0, "logprobs": None}
    plain = {**head, "choices": [{**choice, "text": "4", "finish_reason": ask["prompt"]}]}
    chunks = [{**head, "choices": [{**choice, "text": text, "finish_reason": finish}]} for text, finish in (
        ("4", None), (None, ask["prompt"]))]
    return [*map(sse, chunks), DONE] if ask.get("stream") else [Json(plain)]


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("client", TEXT_CLIENTS)
def test_ends_of_texts(shared, no_proxy, client, streams):
    shared.engine.always(text_of)
    for (said, end), one in zip(ENDS.items(), TEXT_CLIENTS[client](shared, ENDS, streams), strict=True):
        assert (one["text"], one["end"]) == ("4", end) if end else tuple(one["error"][:2]) in ORDINARY, (said, one)
