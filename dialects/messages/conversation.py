"""Anthropic's conversation in the form of chat completions.

    a user's turn         tool results as messages of their own, first; then one message with the
                          rest in its order
    an assistant's turn   one message: its text, its reasoning, its tool calls
    a system message      stays in its place: at the front it would change the prompt's beginning,
                          and the engine's cache would hold nothing of the rest
    other blocks          a text in their place, where they hold one (history.py); so are those of
                          known types that lack something, where the model is not asked about them

Source: Anthropic's reference of POST /v1/messages, `messages` and `system`.
"""

import re

from dialects.engine import as_earlier, fault_of_image
from dialects.history import as_content, document_texts, type_of
from dialects.messages import ids
from dialects.messages.errors import invalid
from dialects.messages.tools import SEARCHED, found_by
from dialects.read import mended
from errors import InvalidRequest
from values import as_dict, as_list

# A client's line that differs in each request. \x01: where a large body's text is left out.
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n\x01]*(?:\n|$)")
# A block that is refused where the model is asked about it, and what to do instead.
REMEDIES = {"document": "send its text, or images of its pages"}
# What is read with the tools.
TOOL_CHANGES = ("tool_addition", "tool_removal", "tool_definition")
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = {  # type of a block -> its fields that must be texts
    "tool_reference": ("tool_name",),
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}
WORDS = ("text", "thinking")  # those that may hold nothing
# The types of blocks that may stand in a turn, a tool's result, a system prompt.
IN_USER = ("text", "image", "tool_result")
IN_ASSISTANT = ("text", "thinking", "redacted_thinking", "tool_use")
IN_RESULT = ("text", "image", "tool_reference")
IN_SYSTEM = ("text",)
HERE = {*IN_USER, *IN_ASSISTANT, *IN_RESULT}


def read_conversation(system, messages, table, past):
    """The messages for the engine. Raises InvalidRequest.

    table  the model's reasoning.Table, which tells what its template can do
    past   history.Past
    """
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "must be a list with at least one message")
    late_role = "system" if table.late_system else "user"
    out = read_system(system, past)
    answered = answered_up_to(messages)
    blocks = Blocks(past)
    asked = []
    for number, message in enumerate(messages):
        blocks.asked = number >= answered and not holds_result(message)
        made = read_message(message, f"messages.{number}", late_role, blocks)
        out += made
        asked += made if number >= answered else ()
    if blocks.unread and not any(message["content"] for message in asked):
        raise blocks.unread  # nothing else is asked
    return out


def answered_up_to(messages):
    """How many messages there are up to the model's last."""
    numbers = range(len(messages), 0, -1)
    return next((number for number in numbers if is_answer(messages[number - 1])), 0)


def is_answer(message):
    return as_dict(message).get("role") == "assistant"


def holds_result(message):
    """Whether a tool has put it there, not somebody who asks."""
    blocks = as_list(as_dict(message).get("content"))
    return any(as_dict(block).get("type") == "tool_result" for block in blocks)


def broken_inputs(messages):
    """How many tool calls of a history, which has been read, had no object for an input."""
    blocks = (block for message in messages for block in as_list(as_dict(message).get("content")))
    calls = (block for block in map(as_dict, blocks) if block.get("type") == "tool_use")
    return sum(not isinstance(call.get("input"), dict) for call in calls)


def read_system(system, past):
    """The system prompt without a billing line, which would keep it out of the engine's cache."""
    if system is None:
        return []
    texts = texts_of(system, "system", Blocks(past, strict=True))
    if texts:
        texts[0] = BILLING.sub("", texts[0])
    return said("system", lines(texts))


def said(role, content):
    """A list of one message, or of none where there is nothing in it."""
    return [{"role": role, "content": content}] if content else []


def lines(texts):
    return "\n".join(text for text in texts if text)


def read_message(message, where, late_role, blocks):
    """A message as a list of messages.

    late_role  that of a system message among the others
    blocks     Blocks
    """
    role = as_dict(message).get("role")
    if not isinstance(role, str) or role not in ROLES:
        return odd_message(message, where, blocks)
    where = f"{where}.content"
    if "content" not in message and blocks.asked and role == "user":
        raise invalid(where, "Field required")
    content = message.get("content")
    if ROLES[role] == "user":
        return user_turn(blocks.read(content, where, IN_USER), where, blocks)
    if ROLES[role] == "assistant":
        return [assistant_message(blocks.read(content, where, IN_ASSISTANT))]
    return said(late_role, lines(texts_of(content, where, blocks)))


def odd_message(message, where, blocks):
    """One that nobody here has a role for: an earlier one is told to the model."""
    if blocks.asked and isinstance(message, dict):
        raise invalid(f"{where}.role", "must be user or assistant")
    if blocks.asked:
        raise invalid(where, "must be an object with role and content")
    return said("user", blocks.past.read_message(message, where))


# ---- blocks


def texts_of(content, where, blocks):
    """The texts of content that may hold nothing else."""
    return [block["text"] for block in blocks.read(content, where, IN_SYSTEM)]


class Blocks:
    """Reads content as blocks of known types.

    past    history.Past
    strict  whether other blocks are refused: these are no history
    asked   whether the model is asked about them now
    unread  the Refusal of a block that was left out though it is asked about, or None
    """

    def __init__(self, past, strict=False):
        self.past = past
        self.strict = strict
        self.asked = False
        self.unread = None

    def read(self, content, where, known):
        """Content as a list of blocks, each with the fields of its type."""
        if content is None or not self.asked and not self.strict:
            content = as_content(content)  # a client keeps null of a turn that held nothing
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise invalid(where, "must be a text or a list of blocks")
        return [
            self.read_block(block, f"{where}.{number}", known)
            for number, block in enumerate(content)
        ]

    def read_block(self, block, where, known):
        """A block of a known type with its fields; another one as a text, which may be empty."""
        kind = type_of(block)
        if kind.endswith("_use"):
            self.past.remember(block, block.get("id"))
        if kind == "redacted_thinking" and kind in known:
            self.past.ignored.add(where, kind)
        if isinstance(block, str):
            return {"type": "text", "text": block}
        if changes_tools(block, kind) and known is not IN_RESULT and not self.strict:
            return {"type": "text", "text": ""}
        try:
            return known_block(block, kind, where, known)
        except InvalidRequest as error:
            return self.other_block(block, kind, where, error)

    def other_block(self, block, kind, where, error):
        """A block that is none of those that are known there, or lacks something: `error`."""
        known = kind in HERE or not isinstance(as_dict(block).get("type"), str)
        unread = kind in REMEDIES and not document_texts(block)
        if self.strict or self.asked and (known or unread):
            raise error
        text = self.past.read(block, where, as_dict(block).get("tool_use_id"))
        if self.asked and not text:
            self.unread = self.unread or error
        return {"type": "text", "text": text, "found": True}

    def read_image(self, block, where, asked):
        """[the part of an image], or [] for one that cannot be read and is not asked about.

        A tool's result is never asked about: the client would send it again each time.
        """
        try:
            image = image_part(block, where)
            return [image if asked else as_earlier(image, where)]
        except InvalidRequest:
            if asked:
                raise
            self.past.ignored.add(where, "image")
            return []


def changes_tools(block, kind):
    """Whether a block is read with the tools, and says no more."""
    return kind in TOOL_CHANGES or kind == SEARCHED and found_by(block) is not None


def known_block(block, kind, where, known):
    """A block of one of the known types, its fields as they are meant. Raises InvalidRequest."""
    if not isinstance(as_dict(block).get("type"), str):
        raise invalid(f"{where}.type", "Field required")
    if kind not in known:
        remedy = REMEDIES.get(kind, f"there are {', '.join(known)}")
        raise invalid(where, f"a block of type {kind[:40]!r} is not supported here; {remedy}")
    fields = {name: field_of(block, name, where) for name in TEXTS.get(kind, ())}
    if kind == "tool_use":
        fields["input"] = input_of(block, where)
    return {**block, **fields}


def field_of(block, name, where):
    """A field that must be a text."""
    if name not in block:
        raise invalid(f"{where}.{name}", "Field required")
    value = block[name]
    if value is None and name in WORDS:
        return ""
    if type(value) is int and name not in WORDS:  # an id
        return str(value)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", "must be a text")
    return value


def input_of(block, where):
    """What a tool was called with, as the text of an object, whatever a client kept of it."""
    try:
        return mended(block.get("input"))
    except RecursionError:
        raise invalid(f"{where}.input", "is nested too deeply") from None


# ---- a user's turn


def user_turn(blocks, where, reader):
    """The messages of a turn: the results of its tools, then what the user says.

    reader  Blocks, for what is inside of results
    """
    results = []
    parts = []
    for number, block in enumerate(blocks):
        if block["type"] == "tool_result":
            results.append(tool_message(block, f"{where}.{number}", parts, reader))
    for number, block in enumerate(blocks):
        if block["type"] == "text" and block["text"]:
            parts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "image":
            parts += reader.read_image(block, f"{where}.{number}", reader.asked)
    return results + said("user", joined(parts)) or [{"role": "user", "content": ""}]


def joined(parts):
    """Parts as a text where they are all text, which every template takes; else as they are."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def tool_message(block, where, parts, reader):
    """A tool's result as its message, which holds text alone; where an image was stands its name.

    parts   those of the user's message behind it; name and image are added
    reader  Blocks
    """
    texts = []
    for number, inner in enumerate(
        reader.read(block.get("content"), f"{where}.content", IN_RESULT)
    ):
        if inner["type"] == "text":
            texts.append(inner["text"])
        elif inner["type"] == "tool_reference":
            texts.append(f"The tool {inner['tool_name']} can be called now.")
        else:
            image = reader.read_image(inner, f"{where}.content.{number}", asked=False)
            if image:
                name = f"[image {len(parts) // 2 + 1} of the tool results]"
                texts.append(name)
                parts += [{"type": "text", "text": name}, *image]
    text = lines(texts)
    if block.get("is_error"):
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
    if fault := fault_of_image(url):
        raise invalid(f"{where}.source", fault)
    return {"type": "image_url", "image_url": {"url": url}}


# ---- an assistant's turn


def assistant_message(blocks):
    """One message. Texts follow each other as the model wrote them, with nothing in between."""
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    message = {"role": "assistant", "content": words_of(blocks)}
    if any(thoughts):
        message["reasoning"] = lines(thoughts)
    tool_calls = [tool_call_of(block) for block in blocks if block["type"] == "tool_use"]
    if tool_calls:
        message["tool_calls"] = tool_calls
        message["content"] = message["content"] or None
    return message


def words_of(blocks):
    """What the model said in a turn. What the tools of others gave it stands in paragraphs of its
    own."""
    words = ""
    for block in blocks:
        if block["type"] == "text" and block["text"]:
            if "found" in block:
                words += f"\n\n{block['text']}\n\n"
            else:
                words += block["text"]
    return words.strip("\n") if any("found" in block for block in blocks) else words


def tool_call_of(block):
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": ids.for_engine(block["id"]), "type": "function", "function": function}
