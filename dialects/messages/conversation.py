"""Anthropic's conversation in the form of chat completions.

    a user's turn         tool results as messages of their own, first; then one message with the
                          rest in its order
    an assistant's turn   one message: its text, its reasoning, its tool calls
    a system message      stays in its place: at the front it would change the prompt's beginning,
                          and the engine's cache would hold nothing of the rest

Source: Anthropic's reference of POST /v1/messages, `messages` and `system`.
"""

import logging
import re

from dialects.loose import as_dict, as_list
from dialects.messages import ids
from dialects.messages.errors import invalid
from dialects.read import mended, typed

logger = logging.getLogger("sparks")
# The effort tables (reasoning.TABLES) whose templates take a system message anywhere.
LATE_SYSTEM = ("glm", "no-switch", "deepseek")
# A client's line that differs in each request. \x01: where a large body's text is left out.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n\x01]*(?:\n|$)")
REMEDIES = {"document": "send its text, or images of its pages"}  # for blocks that are refused
TEXTS = {  # type of a block -> its fields that must be texts
    "tool_reference": ("tool_name",),
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}
# The types of blocks that may stand in a turn, a tool's result, a system prompt.
IN_USER = ("text", "image", "tool_result")
IN_ASSISTANT = ("text", "thinking", "redacted_thinking", "tool_use")
IN_RESULT = ("text", "image", "tool_reference")
IN_SYSTEM = ("text",)


def read_conversation(system, messages, effort):
    """The messages for the engine. Raises InvalidRequest.

    effort  the model's table in reasoning.TABLES, which tells what its template can do
    """
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list with at least one message")
    late_role = "system" if effort in LATE_SYSTEM else "user"
    out = read_system(system)
    for number, message in enumerate(messages):
        out += read_message(message, f"messages.{number}", late_role)
    log_broken_inputs(messages)
    return out


def log_broken_inputs(messages):
    broken = 0
    for message in messages:
        for block in as_list(message.get("content")):
            broken += block["type"] == "tool_use" and not isinstance(block.get("input"), dict)
    if broken:
        logger.info(
            "%d tool calls in a history had no object for an input, and were mended", broken
        )


def read_system(system):
    """The system prompt without a billing line, which would keep it out of the engine's cache."""
    if system is None:
        return []
    texts = texts_of(system, "system")
    if texts:
        texts[0] = BILLING.sub("", texts[0])
    return said("system", lines(texts))


def said(role, content):
    """A list of one message, or of none where there is nothing in it."""
    return [{"role": role, "content": content}] if content else []


def lines(texts):
    return "\n".join(text for text in texts if text)


def read_message(message, where, late_role):
    """A message as a list of messages.

    late_role  that of a system message among the others
    """
    if not isinstance(message, dict):
        raise invalid(where, "must be an object with role and content")
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{where}.role", "must be user or assistant")
    where = f"{where}.content"
    if content is None:
        raise invalid(where, "Field required")
    if role == "user":
        return user_turn(blocks_of(content, where, IN_USER), where)
    if role == "assistant":
        return [assistant_message(blocks_of(content, where, IN_ASSISTANT), where)]
    return said(late_role, lines(texts_of(content, where)))


# ---- blocks


def texts_of(content, where):
    """The texts of content that may hold nothing else."""
    return [block["text"] for block in blocks_of(content, where, IN_SYSTEM)]


def blocks_of(content, where, known):
    """Content as checked blocks: each of a known type and with the fields of that type."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(where, "must be a text or a list of blocks")
    for number, block in enumerate(content):
        check_block(block, f"{where}.{number}", known)
    return content


def check_block(block, where, known):
    """Raises InvalidRequest for what is no block of a known type."""
    kind = as_dict(block).get("type")
    if not isinstance(kind, str):
        raise invalid(f"{where}.type", "Field required")
    if kind not in known:
        remedy = REMEDIES.get(kind, f"there are {', '.join(known)}")
        raise invalid(where, f"a block of type {kind[:40]!r} is not supported here; {remedy}")
    for name in TEXTS.get(kind, ()):
        if name not in block:
            raise invalid(f"{where}.{name}", "Field required")
        if not isinstance(block[name], str):
            raise invalid(f"{where}.{name}", "must be a text")


# ---- a user's turn


def user_turn(blocks, where):
    """The messages of a turn: the results of its tools, then what the user says."""
    results = []
    parts = []
    for number, block in enumerate(blocks):
        if block["type"] == "tool_result":
            results.append(tool_message(block, f"{where}.{number}", parts))
    for number, block in enumerate(blocks):
        if block["type"] == "text" and block["text"]:
            parts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "image":
            parts.append(image_part(block, f"{where}.{number}"))
    return results + said("user", joined(parts)) or [{"role": "user", "content": ""}]


def joined(parts):
    """Parts as a text where they are all text, which every template takes; else as they are."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def tool_message(block, where, parts):
    """A tool's result as its message, which holds text alone; where an image was stands its name.

    parts  those of the user's message behind it; name and image are added
    """
    content = block.get("content")
    if content is None:
        content = ""
    texts = []
    for number, inner in enumerate(blocks_of(content, f"{where}.content", IN_RESULT)):
        if inner["type"] == "text":
            texts.append(inner["text"])
        elif inner["type"] == "tool_reference":
            texts.append(f"The tool {inner['tool_name']} can be called now.")
        else:
            name = f"[image {len(parts) // 2 + 1} of the tool results]"
            texts.append(name)
            parts.append({"type": "text", "text": name})
            parts.append(image_part(inner, f"{where}.content.{number}"))
    text = lines(texts)
    if typed(block, "is_error", bool, "true or false", f"{where}."):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": ids.for_engine(block["tool_use_id"]), "content": text}


def image_part(block, where):
    """An image as a part with a data URL or an address."""
    source = as_dict(block.get("source"))
    kind = source.get("type")
    url = source.get("url")
    if kind == "base64":
        media_type = source.get("media_type")
        data = source.get("data")
        if not isinstance(media_type, str) or not isinstance(data, str):
            raise invalid(f"{where}.source", "must hold media_type and data, both texts")
        url = f"data:{media_type};base64,{data}"
    elif kind != "url" or not isinstance(url, str):
        raise invalid(f"{where}.source", "must be of type base64 or url; files are not stored here")
    return {"type": "image_url", "image_url": {"url": url}}


# ---- an assistant's turn


def assistant_message(blocks, where):
    """One message. Texts follow each other as the model wrote them, with nothing in between."""
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning"] = lines(thoughts)
    tool_calls = [
        tool_call_of(block, f"{where}.{number}")
        for number, block in enumerate(blocks)
        if block["type"] == "tool_use"
    ]
    if tool_calls:
        message["tool_calls"] = tool_calls
        message["content"] = message["content"] or None
    return message


def tool_call_of(block, where):
    """A tool call of the history. Its input is made an object, whatever a client kept of it."""
    try:
        function = {"name": block["name"], "arguments": mended(block.get("input"))}
    except RecursionError:
        raise invalid(f"{where}.input", "is nested too deeply") from None
    return {"id": ids.for_engine(block["id"]), "type": "function", "function": function}
