"""OpenAI chat completions.

Near-identity: what the gateway does not own goes through untouched. It owns the model's name, the controls and the
fields of reasoning, and stream_options; it reads messages and tools far enough to mend what clients get wrong.

Source: the gateway's specification, pages 1 to 3; OpenAI's reference of POST /v1/chat/completions.
"""

import reasoning
from dialects import sampling
from dialects.engine import engine_chat, is_address
from dialects.read import choices_asked, mended, parse, read_stream, typed
from errors import InvalidRequest, error_body
from stream import (
    ChatStream,
    chunks_of,
    required_choices,
    choices_of,
    dumps,
    split_thinking,
    set_reasoning,
)

ROLES = {
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "function",
}
TEXTS = {"text": "text", "input_text": "text", "output_text": "text"}
MEDIA = {
    "image_url": "image_url",
    "input_image": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
}
FETCHED = {
    "image_url": " or an http(s) address",
    "video_url": ": addresses are not fetched here",
    "audio_url": ": addresses are not fetched here",
}
REFUSED = {
    "input_audio": "audio is not supported; send text or images",
    "file": "files are not supported; send their text, or images of their pages",
}
ABSENT = (
    "annotations",
    "function_call",
    "audio",
    "tool_calls",
)  # null in vLLM's messages, which OpenAI's schema forbids
PASSED = (
    "refusal",
    "thinking",
    "image_embeds",
    "audio_embeds",
    "tool_reference",
)  # vLLM knows them


def read(body, fleet):
    """A request's body (bytes) as an Ask. Raises Refusal."""
    payload = parse(body)
    streams, usage = read_stream(payload)
    typed(payload, "model", str, "a text")
    read_messages(payload)
    read_tools(payload)
    sampling.read_lengths(payload)
    sampling.read_format(payload)
    if not streams:
        return engine_chat(payload, fleet)
    return engine_chat(
        payload, fleet, lambda names: ChatStream(names, usage, choices_asked(payload.get("n")))
    )


# ---- messages


def bad(where, problem):
    return InvalidRequest(f"{where} {problem}", "messages")


def read_messages(payload):
    messages = payload.get("messages")
    if messages is None:
        raise InvalidRequest(
            "messages is missing: send a list such as [{\"role\": \"user\", \"content\": \"Hello\"}]",
            "messages",
        )
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", "messages")
    for at, message in enumerate(messages):
        read_message(message, f"messages[{at}]")


def read_message(message, where):
    if not isinstance(message, dict):
        raise bad(where, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    message["role"] = ROLES[role]
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [
            read_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)
        ]
    elif content is not None and not isinstance(content, str):
        raise bad(f"{where}.content", "must be a text or a list of parts")
    read_calls(message, where)


def read_part(part, where):
    """A content part as the engine takes it. An address stands in no part of another kind: beside a `uuid` vLLM would go by it,
    whatever the type says."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise bad(where, "must be an object with a type")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise bad(f"{where}.type", "is missing: text or image_url, for example")
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
    """An image (or a video, where the model takes one). The engine must not fetch addresses on its own network: the gateway
    fetches images, and no more."""
    given = part.get(kind)
    source = given if isinstance(given, dict) else {"url": given}
    url = source.get("url")
    if not isinstance(url, str):
        raise bad(f"{where}.{kind}", 'must hold a data URL: {"url": "data:image/png;base64,..."}')
    if url[:5].lower() != "data:" and not (kind == "image_url" and is_address(url)):
        raise bad(
            f"{where}.{kind}", "must be a data URL (data:image/png;base64,...)" + FETCHED[kind]
        )
    detail = (
        {"detail": part["detail"]}
        if kind == "image_url" and isinstance(part.get("detail"), str)
        else {}
    )
    rest = {name: value for name, value in part.items() if name not in ("type", kind, "detail")}
    return {"type": kind, kind: {**detail, **source}, **rest}


def read_calls(message, where):
    """Tool calls in the history: a client that once received broken arguments sends them for ever."""
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list):
        raise bad(f"{where}.tool_calls", "must be a list")
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f"{where}.tool_calls[{at}]", "must hold a function with a name")
        try:
            function["arguments"] = mended(function.get("arguments"))
        except RecursionError:
            raise bad(
                f"{where}.tool_calls[{at}]", "has arguments that are nested too deeply"
            ) from None


# ---- the other fields


def read_tools(payload):
    tools = typed(payload, "tools", list, "a list")
    if tools == []:  # vLLM would refuse a tool_choice beside it
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
    """(the client's bytes, the usage) of an engine's answer: a dict, or the bytes of a stream that nobody asked for."""
    if isinstance(answer, bytes):
        answer = collected(answer, ask)
    for choice in required_choices(answer):
        choice.setdefault("logprobs", None)
        message = choice.get("message")
        if isinstance(message, dict):
            write_message(message, ask.extra["names"])
    return dumps(answer), answer.get("usage")


def write_message(message, names):
    content, thought = message.get("content"), ""
    if isinstance(content, str):
        had = any(message.get(name) for name in reasoning.FIELDS["both"])
        thought, rest = split_thinking(content) if not had else ("", content)
        if rest != content:
            message["content"] = rest
    set_reasoning(message, names, thought)
    for name in ABSENT:
        if message.get(name, "") is None:
            del message[name]
    message.setdefault("refusal", None)


def collected(events, ask):
    """A stream's bytes as the plain completion they add up to. Raises Refusal if they are no whole answer."""
    stream = ChatStream(usage=True, n=None)  # so that every event is looked into
    chunks = chunks_of(events, stream)
    messages, ends = {}, {}
    for chunk in chunks:
        for choice in choices_of(chunk):
            index = choice["index"] if isinstance(choice.get("index"), int) else 0
            add(messages.setdefault(index, {"role": "assistant", "content": None}), choice["delta"])
            add_end(ends.setdefault(index, {"logprobs": None}), choice)
    head = {name: chunks[0].get(name) for name in ("id", "created", "model")}
    whole = [
        {"index": index, "message": messages[index], **ends[index]} for index in sorted(messages)
    ]
    return {**head, "object": "chat.completion", "choices": whole, "usage": stream.usage}


def add(message, delta):
    """Add one delta to a message."""
    for name, value in delta.items():
        if name == "tool_calls":
            for call in value if isinstance(value, list) else ():
                if isinstance(call, dict):
                    add_call(message.setdefault("tool_calls", []), call)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value


def add_end(end, choice):
    """Add what stands beside a delta: how the choice ended, and its logprobs."""
    end |= {name: choice.get(name) for name in ("finish_reason", "stop_reason") if name in choice}
    given = choice.get("logprobs")
    if isinstance(given, dict) and isinstance(given.get("content"), list):
        end["logprobs"] = end["logprobs"] or {"content": []}
        end["logprobs"]["content"] += given["content"]


def add_call(calls, piece):
    if piece["index"] == len(calls):
        calls.append(
            {"id": piece.get("id"), "type": "function", "function": {"name": "", "arguments": ""}}
        )
    function = piece.get("function")
    for name, value in function.items() if isinstance(function, dict) else ():
        text = value if isinstance(value, str) else "" if value is None else dumps(value).decode()
        calls[piece["index"]]["function"][name] = (
            calls[piece["index"]]["function"].get(name, "") + text
        )
