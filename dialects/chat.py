"""OpenAI chat completions.

Near-identity: what the gateway does not own goes through untouched. It owns the model's name, the
controls and the fields of reasoning, and stream_options. It reads messages and tools far enough to
mend what clients get wrong.

Source: the gateway's specification, pages 1 to 3; OpenAI's reference of POST /v1/chat/completions.
"""

import steps
from dialects import sampling
from dialects.chat_messages import read_messages
from dialects.engine import engine_chat
from dialects.history import Ignored, Past
from dialects.read import choices_asked, hold_back, parse, read_stream, typed
from errors import InvalidRequest, error_body
from mending.answer import (
    choices_of,
    fit_nulls,
    index_of,
    name_tier,
    read_message,
    required_choices,
)
from mending.tool_calls import arguments_text
from stream import ChatStream, chunks_of
from values import drop_nulls, dumps, object_in, objects_in

# Fields of a message that some engines give as null, which OpenAI's schema forbids.
NEVER_NULL = ("annotations", "function_call", "audio", "tool_calls")


def read(body, fleet):
    """A request's body (bytes) as an Ask. Raises Refusal."""
    payload = parse(body)
    streams, usage = read_stream(payload)
    typed(payload, "model", str, "a text")
    past = Past(Ignored())
    hold_back(payload, past.ignored)
    read_messages(payload, past)
    read_tools(payload)
    sampling.read_lengths(payload)
    sampling.read_format(payload)
    make_stream = None
    if streams:
        n = choices_asked(payload.get("n"))

        def make_stream(names, model):
            return ChatStream(names, usage, n, model.id)

    return engine_chat(payload, fleet, past.ignored, make_stream)


# ---- the other fields


def read_tools(payload):
    """Check tools and tool_choice, and bring them into the nested form, in place."""
    if payload.get("functions"):  # engines do without a word
        raise InvalidRequest("functions are not supported: send them as tools", "functions")
    tools = typed(payload, "tools", list, "a list")
    if tools == []:  # some engines refuse a tool_choice beside it
        del payload["tools"]
        payload.pop("tool_choice", None)
    if tools:
        payload["tools"] = [read_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]
    choice = payload.get("tool_choice")
    if (
        isinstance(choice, dict)
        and isinstance(choice.get("name"), str)
        and "function" not in choice
    ):
        payload["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}


def read_tool(tool, where):
    """A tool in the nested form; clients of the Responses API send it flat."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, "function"):
        raise InvalidRequest(
            f"{where} must be a function: only function tools are supported", "tools"
        )
    if tool.get("function") is None:
        tool = {
            "function": {
                name: value for name, value in tool.items() if name not in ("type", "function")
            }
        }
    function = tool["function"]
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise InvalidRequest(f"{where} needs a name", "tools")
    return {**tool, "type": "function"}


# ---- the plain answer


def refusal(error):
    """A Refusal in OpenAI's shape, as bytes."""
    return dumps(error_body(error))


def write(answer, ask):
    """(the client's bytes, the usage) of an engine's answer: a dict, or the bytes of a stream that
    nobody asked for. Raises Refusal."""
    if not isinstance(answer, dict):
        answer = collected(answer, ask.oddities)
    for choice in steps.paced(required_choices(answer)):
        choice.setdefault("logprobs", None)
        read_message(choice, answer.get("id"), ask.extra["names"], ask.oddities)
        message = choice.get("message")
        if isinstance(message, dict):
            fit_schema(message)
    answer["model"] = ask.model.id
    name_tier(answer, ask.tier)
    fit_nulls(answer)
    return steps.write(answer), answer.get("usage")


def fit_schema(message):
    """Bring an engine's message, which is mended already, into OpenAI's form, in place."""
    drop_nulls(message, NEVER_NULL)
    message.setdefault("refusal", None)


def collected(events, oddities):
    """The plain completion (a dict) that a stream's bytes add up to. Raises Refusal if they are no
    whole answer. What is odd about it is added to `oddities`, a set."""
    stream = ChatStream(usage=True, n=None)  # so that every event is parsed
    stream.oddities = oddities
    first = {}
    choices = {}
    for chunk in chunks_of(events, stream):
        first = first or chunk
        for choice in steps.paced(choices_of(chunk)):
            index = index_of(choice)
            message = {"role": "assistant", "content": None}
            new = {"index": index, "message": message, "logprobs": None}
            whole = choices.setdefault(index, new)
            add_delta(whole["message"], choice["delta"])
            add_end(whole, choice)
    for choice in choices.values():
        steps.pause()
        join(choice["message"])
    return {
        **{name: first.get(name) for name in ("id", "created", "model")},
        "object": "chat.completion",
        "choices": [choices[index] for index in sorted(choices)],
        "usage": stream.usage,
    }


def add_delta(message, delta):
    """Add one delta to a message, whose texts are lists of pieces."""
    for name, value in delta.items():
        if name == "tool_calls":
            for piece in steps.paced(objects_in(delta, name)):
                add_tool_call(message.setdefault(name, []), piece)
        elif isinstance(value, str) and name != "role":
            message[name] = message.get(name) or []
            message[name].append(value)


def add_end(whole, choice):
    """Add what stands beside a delta: how the choice ended, and its logprobs."""
    for name in ("finish_reason", "stop_reason"):
        if name in choice:
            whole[name] = choice[name]
    tokens = object_in(choice, "logprobs").get("content")
    if isinstance(tokens, list):
        whole["logprobs"] = whole["logprobs"] or {"content": []}
        whole["logprobs"]["content"] += tokens


def add_tool_call(tool_calls, piece):
    """Add a piece of a tool call, which has its true index, to those of a message."""
    if piece["index"] == len(tool_calls):
        function = {"name": [], "arguments": []}
        tool_calls.append({"id": piece.get("id"), "type": "function", "function": function})
    function = tool_calls[piece["index"]]["function"]
    for name, value in object_in(piece, "function").items():
        function.setdefault(name, []).append(arguments_text(value))


def join(message):
    """Make texts of the pieces in a message, in place."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    for table in (message, *functions):
        steps.pause()
        for name, value in table.items():
            if isinstance(value, list) and name != "tool_calls":
                table[name] = steps.gathered_text(value)
