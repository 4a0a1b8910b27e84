"""OpenAI chat completions.

Near-identity: what the gateway does not own goes through untouched. It owns the model's name, the
controls and the fields of reasoning, and stream_options. It reads messages and tools far enough to
mend what clients get wrong.

Source: the gateway's specification, pages 1 to 3; OpenAI's reference of POST /v1/chat/completions.
"""

import re

from dialects import sampling
from dialects.engine import engine_chat, fault_of_image
from dialects.history import Ignored, Past
from dialects.read import choices_asked, mended, parse, read_stream, typed
from errors import InvalidRequest, error_body
from mending.answer import choices_of, index_of, read_message, required_choices
from mending.tool_calls import arguments_text
from stream import ChatStream, chunks_of
from values import as_dict, dumps, object_in, objects_in

ROLES = {  # a client's -> the engine's
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
}
TEXTS = {"text": "text", "input_text": "text", "output_text": "text"}  # types of parts
MEDIA = {
    "image_url": "image_url",
    "input_image": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
}
FETCHED = ("image_url", "video_url", "audio_url")  # fields whose addresses an engine would fetch
DATA = {  # what such a field must begin with, beside images
    "video_url": re.compile(r"data:video/[\w.+-]+;base64,.", re.I),
    "audio_url": re.compile(r"data:audio/[\w.+-]+;base64,.", re.I),
}
REFUSED = {  # where the model is asked about it
    "input_audio": "audio is not supported; send text or images",
    "file": "files are not supported; send their text, or images of their pages",
}
# Beside OpenAI's types of parts: what some engines know too.
PASSED = ("refusal", "thinking", "image_embeds", "audio_embeds", "tool_reference")
KNOWN = {*TEXTS, *MEDIA, *PASSED}
# Fields of a message that some engines give as null, which OpenAI's schema forbids.
NEVER_NULL = ("annotations", "function_call", "audio", "tool_calls")


def read(body, fleet):
    """A request's body (bytes) as an Ask. Raises Refusal."""
    payload = parse(body)
    streams, usage = read_stream(payload)
    typed(payload, "model", str, "a text")
    past = Past(Ignored())
    read_messages(payload, past)
    read_tools(payload)
    sampling.read_lengths(payload)
    sampling.read_format(payload)
    make_stream = None
    if streams:
        n = choices_asked(payload.get("n"))

        def make_stream(names, model):
            return ChatStream(names, usage, n, model.id)

    ask = engine_chat(payload, fleet, make_stream)
    ask.ignored = past.ignored.header
    return ask


# ---- messages


def bad(where, problem):
    return InvalidRequest(f"{where} {problem}", "messages")


def read_messages(payload, past):
    """Check the messages, and bring them into the form that engines take, in place.

    past  history.Past
    """
    messages = payload.get("messages")
    if messages is None:
        raise InvalidRequest(
            'messages is missing: send a list such as [{"role": "user", "content": "Hello"}]',
            "messages",
        )
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", "messages")
    answered = answered_up_to(messages)
    for at, message in enumerate(messages):
        check_message(message, f"messages[{at}]", past if at < answered else None)


def answered_up_to(messages):
    """How many messages there are up to the last that does not ask the model."""
    for number in range(len(messages), 0, -1):
        if as_dict(messages[number - 1]).get("role") in ("assistant", "tool", "function"):
            return number
    return 0


def check_message(message, where, past):
    """Check one, and bring it into the form that engines take, in place.

    past  history.Past, or None for one that asks the model
    """
    if not isinstance(message, dict):
        raise bad(where, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    message["role"] = ROLES[role]
    content = message.get("content")
    if isinstance(content, list):
        parts = [read_part(part, f"{where}.content[{at}]", past) for at, part in enumerate(content)]
        message["content"] = [part for part in parts if part is not None]
        if content and not message["content"]:
            message["content"] = ""
    elif content is not None and not isinstance(content, str):
        raise bad(f"{where}.content", "must be a text or a list of parts")
    read_tool_calls(message, where)


def read_part(part, where, past):
    """A content part as the engine takes it; None for an earlier one that is left out.

    The fields of other media are left out: beside a `uuid` some engines go by such a field,
    whatever the type says, and would fetch the address in it.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad(where, "must be an object with a type")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise bad(f"{where}.type", "is missing: text or image_url, for example")
    if past and (kind in REFUSED or kind not in KNOWN):
        text = past.read(part, where)
        return {"type": "text", "text": text} if text else None
    if kind in REFUSED:
        raise bad(where, f"is {kind}: {REFUSED[kind]}")
    part = {
        name: value
        for name, value in part.items()
        if name not in FETCHED or name == MEDIA.get(kind)
    }
    if kind in TEXTS:
        if not isinstance(part.get("text"), str):
            raise bad(f"{where}.text", "must be a text")
        return {**part, "type": TEXTS[kind]}
    if kind in MEDIA:
        return read_media(part, MEDIA[kind], where)
    if kind not in PASSED:
        raise bad(f"{where}.type", f"{kind[:40]!r} is unknown: use text or image_url")
    return part


def read_media(part, kind, where):
    """An image (or a video, where the model takes one) as a part of its own type, `kind`.

    The engine must not fetch addresses, on its own network: the gateway fetches images, and nothing
    else.
    """
    source = part.get(kind)
    if not isinstance(source, dict):
        source = {"url": source}
    url = source.get("url")
    if not isinstance(url, str):
        raise bad(f"{where}.{kind}", 'must hold a data URL: {"url": "data:image/png;base64,..."}')
    fault = None
    if kind == "image_url":
        fault = fault_of_image(url)
    elif not DATA[kind].match(url):
        example = f"data:{kind[:5]}/...;base64,..."
        fault = f"must be a data URL ({example}): addresses are not fetched here"
    if fault:
        raise bad(f"{where}.{kind}", fault)
    if kind == "image_url" and isinstance(part.get("detail"), str):
        source = {"detail": part["detail"], **source}
    rest = {name: value for name, value in part.items() if name not in ("type", kind, "detail")}
    return {"type": kind, kind: source, **rest}


def read_tool_calls(message, where):
    """Mend the tool calls of a message in the history, in place: a client that once received broken
    arguments sends them again with every request."""
    tool_calls = message.get("tool_calls")
    if tool_calls is None:
        return
    if not isinstance(tool_calls, list):
        raise bad(f"{where}.tool_calls", "must be a list")
    for at, tool_call in enumerate(tool_calls):
        here = f"{where}.tool_calls[{at}]"
        if isinstance(tool_call, dict) and object_in(tool_call, "custom").get("name"):
            tool_call = tool_calls[at] = as_function(tool_call)
        function = object_in(tool_call, "function") if isinstance(tool_call, dict) else {}
        if not isinstance(function.get("name"), str):
            raise bad(here, "must hold a function with a name")
        try:
            function["arguments"] = mended(function.get("arguments"))
        except RecursionError:
            raise bad(here, "has arguments that are nested too deeply") from None


def as_function(tool_call):
    """A call of a custom tool, which takes any text, as a function's."""
    custom = tool_call["custom"]
    function = {"name": custom["name"], "arguments": {"input": custom.get("input") or ""}}
    return {"id": tool_call.get("id"), "type": "function", "function": function}


# ---- the other fields


def read_tools(payload):
    """Check tools and tool_choice, and bring them into the nested form, in place."""
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


def refusal(error, request_id=None):
    """A Refusal in OpenAI's shape, as bytes."""
    return dumps(error_body(error))


def write(answer, ask):
    """(the client's bytes, the usage) of an engine's answer: a dict, or the bytes of a stream that
    nobody asked for. Raises Refusal."""
    if isinstance(answer, bytes):
        answer = collected(answer, ask.oddities)
    for choice in required_choices(answer):
        choice.setdefault("logprobs", None)
        read_message(choice, answer.get("id"), ask.extra["names"], ask.oddities)
        message = choice.get("message")
        if isinstance(message, dict):
            fit_schema(message)
    if "model" in answer:
        answer["model"] = ask.model.id
    return dumps(answer), answer.get("usage")


def fit_schema(message):
    """Bring an engine's message, which is mended already, into OpenAI's form, in place."""
    for name in NEVER_NULL:
        if message.get(name, "") is None:
            del message[name]
    message.setdefault("refusal", None)


def collected(events, oddities):
    """The plain completion (a dict) that a stream's bytes add up to. Raises Refusal if they are no
    whole answer. What is odd about it is added to `oddities`, a set."""
    stream = ChatStream(usage=True, n=None)  # so that every event is parsed
    stream.oddities = oddities
    chunks = chunks_of(events, stream)
    choices = {}
    for chunk in chunks:
        for choice in choices_of(chunk):
            index = index_of(choice)
            message = {"role": "assistant", "content": None}
            new = {"index": index, "message": message, "logprobs": None}
            whole = choices.setdefault(index, new)
            add_delta(whole["message"], choice["delta"])
            add_end(whole, choice)
    return {
        **{name: chunks[0].get(name) for name in ("id", "created", "model")},
        "object": "chat.completion",
        "choices": [choices[index] for index in sorted(choices)],
        "usage": stream.usage,
    }


def add_delta(message, delta):
    """Add one delta to a message."""
    for name, value in delta.items():
        if name == "tool_calls":
            for piece in objects_in(delta, name):
                add_tool_call(message.setdefault(name, []), piece)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value


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
        function = {"name": "", "arguments": ""}
        tool_calls.append({"id": piece.get("id"), "type": "function", "function": function})
    function = tool_calls[piece["index"]]["function"]
    for name, value in object_in(piece, "function").items():
        function[name] = function.get(name, "") + arguments_text(value)
