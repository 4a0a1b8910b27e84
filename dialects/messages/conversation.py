"""Anthropic's conversation and tools in the form of chat completions.

    blocks of a user's turn         tool results as messages of their own, first; then one message with the rest in order
    blocks of an assistant's turn   one message: its text, its reasoning, its tool calls
    a system message in the middle  stays in its place: moved to the front it would change the prompt's beginning, and with
                                    it all that the engine has in its cache

A message of a refusal begins with the place of the fault, as Anthropic's do: `messages.2.content.0.source: …`.
"""

import logging
import re

from dialects.read import mended, typed
from errors import InvalidRequest

logger = logging.getLogger("sparks")
LATE_SYSTEM = (
    "glm",
    "no-switch",
    "deepseek",
)  # effort tables whose templates take a system message anywhere
BARE_SCHEMAS = (
    "qwen",
    "gpt-oss",
)  # those whose templates render a schema's fields, and know no $ref
BILLING = re.compile(
    r"x-anthropic-billing-header:[^\n\x01]*(?:\n|$)"
)  # \x01: where a large body's text is left out
REFUSED = {"document": "send its text, or images of its pages"}
DEEPEST, MOST = 16, 20_000  # levels of $ref in each other, and values that inlining may make


def at(where, problem):
    """The refusal of a field, whose first part is its `param`."""
    return InvalidRequest(f"{where}: {problem}", where.partition(".")[0])


def read_conversation(system, messages, effort):
    """The messages for the engine. `effort`: the model's table in reasoning.TABLES, which tells its template's kind."""
    if not isinstance(messages, list) or not messages:
        raise at("messages", "must be a list with at least one message")
    out, late = read_system(system), "system" if effort in LATE_SYSTEM else "user"
    for number, message in enumerate(messages):
        out += read_message(message, f"messages.{number}", late)
    if broken := sum(
        block["type"] == "tool_use" and not isinstance(block.get("input"), dict)
        for message in messages
        for block in listed(message)
    ):
        logger.info(
            "%d tool calls in a history had no object for an input, and were mended", broken
        )
    return out


def read_system(system):
    """The system prompt without a client's billing line: it changes from turn to turn, and the cache with it."""
    if system is None:
        return []
    texts = [block["text"] for block in blocks_of(system, "system", ("text",))]
    if texts:
        texts[0] = BILLING.sub("", texts[0], count=1) if BILLING.match(texts[0]) else texts[0]
    return said("system", "\n".join(text for text in texts if text))


def said(role, content):
    return [{"role": role, "content": content}] if content else []


def read_message(message, where, late):
    if not isinstance(message, dict):
        raise at(where, "must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise at(f"{where}.role", "must be user or assistant")
    if content is None:
        raise at(f"{where}.content", "Field required")
    if role == "system":
        texts = [block["text"] for block in blocks_of(content, f"{where}.content", ("text",))]
        return said(late, "\n".join(text for text in texts if text))
    return TURNS[role](blocks_of(content, f"{where}.content", KNOWN[role]), f"{where}.content")


def blocks_of(content, where, known):
    """Content as checked blocks: each of a known type and with the fields of that type."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise at(where, "must be a text or a list of blocks")
    for number, block in enumerate(content):
        check_block(block, f"{where}.{number}", known)
    return content


def check_block(block, where, known):
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise at(f"{where}.type", "Field required")
    if kind not in known:
        remedy = REFUSED.get(kind, f"there are {', '.join(known)}")
        raise at(where, f"a block of type {kind[:40]!r} is not supported here; {remedy}")
    for name in FIELDS.get(kind, ()):
        if not isinstance(block.get(name), str):
            raise at(f"{where}.{name}", "must be a text" if name in block else "Field required")


FIELDS = {
    "tool_reference": ("tool_name",),
    "text": ("text",),
    "thinking": ("thinking",),
    "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}
KNOWN = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "result": ("text", "image", "tool_reference"),
}


# ---- a user's turn


def user_turn(blocks, where):
    results, parts = [], []
    for number, block in enumerate(blocks):
        if block["type"] == "tool_result":
            result, images = tool_result(block, f"{where}.{number}", len(parts))
            results.append(result)
            parts += images
    for number, block in enumerate(blocks):
        if block["type"] == "text" and block["text"]:
            parts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "image":
            parts.append(read_image(block, f"{where}.{number}"))
    return results + said("user", joined(parts)) or [{"role": "user", "content": ""}]


def joined(parts):
    """Parts as a text where they are all text, which every template takes; else as they are."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def tool_result(block, where, before):
    """(the tool's message, its images as parts for the user's message behind it). A tool's message holds text alone;
    where an image was stands its name. `before`: how many parts other results have given."""
    texts, images = [], []
    content = block.get("content")
    for number, inner in enumerate(
        blocks_of("" if content is None else content, f"{where}.content", KNOWN["result"])
    ):
        if inner["type"] != "image":
            texts.append(
                inner["text"]
                if inner["type"] == "text"
                else f"The tool {inner['tool_name']} can be called now."
            )
            continue
        name = f"[image {(before + len(images)) // 2 + 1} of the tool results]"
        texts.append(name)
        images += [{"type": "text", "text": name}, read_image(inner, f"{where}.content.{number}")]
    text = "\n".join(text for text in texts if text)
    if typed(block, "is_error", bool, "true or false", f"{where}."):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}, images


def read_image(block, where):
    source = block.get("source") if isinstance(block.get("source"), dict) else {}
    kind, url = source.get("type"), source.get("url")
    if kind == "base64":
        media, data = source.get("media_type"), source.get("data")
        if not isinstance(media, str) or not isinstance(data, str):
            raise at(f"{where}.source", "must hold media_type and data, both texts")
        url = f"data:{media};base64,{data}"
    elif kind != "url" or not isinstance(url, str):
        raise at(f"{where}.source", "must be of type base64 or url; files are not stored here")
    return {"type": "image_url", "image_url": {"url": url}}


# ---- an assistant's turn


def assistant_turn(blocks, where):
    """One message. Texts follow each other as the model wrote them, with nothing in between."""
    message = {"role": "assistant", "content": "".join(of_type(blocks, "text"))}
    if thoughts := [thought for thought in of_type(blocks, "thinking") if thought]:
        message["reasoning"] = "\n".join(thoughts)
    calls = [
        call_of(block, f"{where}.{number}")
        for number, block in enumerate(blocks)
        if block["type"] == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return [message]


def of_type(blocks, kind):
    return (block[kind] for block in blocks if block["type"] == kind)


def call_of(block, where):
    """A tool call of the history, whose input must be an object whatever a client kept of a broken one."""
    try:
        function = {"name": block["name"], "arguments": mended(block.get("input"))}
    except RecursionError:
        raise at(f"{where}.input", "is nested too deeply") from None
    return {"id": block["id"], "type": "function", "function": function}


TURNS = {"user": user_turn, "assistant": assistant_turn}


# ---- tools


def read_tools(request, payload, effort):
    """Put the tools with a schema into the payload, and what the model shall do with them."""
    given = typed(request, "tools", list, "a list") or []
    tools = [
        read_tool(tool, f"tools.{number}", effort in BARE_SCHEMAS)
        for number, tool in enumerate(given)
    ]
    tools = loaded(given, tools, request["messages"])
    choice = typed(request, "tool_choice", dict, 'an object such as {"type": "auto"}')
    wanted = (
        read_choice(choice, [tool["function"]["name"] for tool in tools], bool(given))
        if choice
        else None
    )
    if not tools:
        return
    payload["tools"] = tools
    if choice:
        payload["tool_choice"] = wanted
        if typed(choice, "disable_parallel_tool_use", bool, "true or false", "tool_choice."):
            payload["parallel_tool_calls"] = False


def loaded(given, tools, messages):
    """The tools that the model knows by now. Those with defer_loading are none of them until a client's search finds them
    (a tool_reference in a result); then they stand behind the others, whose text stays the same."""
    searched = any(
        str(tool.get("type")).startswith("tool_search_tool") for tool in given
    )  # by a server: not here
    later = [bool(tool.get("defer_loading")) and not searched for tool in given]
    found = {
        inner["tool_name"]
        for message in messages
        for block in listed(message)
        if block["type"] == "tool_result"
        for inner in listed(block)
        if inner["type"] == "tool_reference"
    }
    return [tool for tool, late in zip(tools, later) if tool and not late] + [
        tool
        for tool, late in zip(tools, later)
        if tool and late and tool["function"]["name"] in found
    ]


def listed(value):
    """The blocks of a message or a result whose content has been read."""
    return value["content"] if isinstance(value.get("content"), list) else []


def read_tool(tool, where, bare):
    """A tool as a function, or None for one of Anthropic's own servers', which has a type and no schema."""
    if not isinstance(tool, dict):
        raise at(where, "must be an object with name and input_schema")
    schema = tool.get("input_schema")
    if schema is None and tool.get("type") not in (None, "custom"):
        return None
    if not isinstance(schema, dict):
        raise at(
            f"{where}.input_schema", "Field required" if schema is None else "must be an object"
        )
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise at(f"{where}.name", "Field required")
    described = (
        {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
    )
    return {
        "type": "function",
        "function": {"name": name, **described, "parameters": inlined(schema) if bare else schema},
    }


def read_choice(choice, names, any_given):
    """The tool_choice of chat completions. `any_given`: whether the client sent tools, usable ones or not."""
    kind = choice.get("type")
    if kind == "tool":
        name = choice.get("name")
        if name not in names:
            raise at(
                "tool_choice.name",
                f"{str(name)[:100]!r} is none of the tools that can be called here "
                f"({', '.join(names[:30]) or 'none'}); tools without an input_schema are skipped",
            )
        return {"type": "function", "function": {"name": name}}
    if kind == "any" and any_given and not names:
        raise at(
            "tool_choice",
            "wants a tool, but none of them can be called here; tools without an input_schema are skipped",
        )
    words = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in words:
        raise at("tool_choice.type", "must be auto, any, tool or none")
    return words[kind]


# ---- schemas


def inlined(schema):
    """A schema with what its local $refs mean in their places; one that is endless or huge stays as it is."""
    try:
        return Inliner(schema).value(schema, ())
    except (OverflowError, RecursionError):
        return schema


class Inliner:
    def __init__(self, root):
        self.root, self.made = root, 0

    def value(self, value, within):
        """A copy of any part of the schema. `within`: the $refs that led here."""
        if not isinstance(value, (dict, list)):
            return value
        self.count(value, within)
        if isinstance(value, list):
            return [self.value(item, within) for item in value]
        rest = {
            name: READ.get(name, Inliner.value)(self, inner, within)
            for name, inner in value.items()
            if name not in ("$ref", "$defs", "definitions")
        }
        ref = value.get("$ref")
        if not isinstance(ref, str):
            return {**rest, **({"$ref": ref} if "$ref" in value else {})}
        if ref in within:  # a schema that holds itself: from here on anything fits
            return rest
        meant = self.target(ref)
        return (
            {**rest, "$ref": ref}
            if meant is None
            else {**self.value(meant, (*within, ref)), **rest}
        )

    def fields(self, properties, within):
        """Properties, whose names are no words of the schema's language."""
        if not isinstance(properties, dict):
            return properties
        return {name: self.value(inner, within) for name, inner in properties.items()}

    def data(self, value, within):
        """What an instance may be, which is no schema."""
        if isinstance(value, (dict, list)):
            self.count(value, within)
            for inner in value.values() if isinstance(value, dict) else value:
                self.data(inner, within)
        return value

    def count(self, value, within):
        self.made += 1 + len(value)
        if self.made > MOST or len(within) > DEEPEST:
            raise OverflowError

    def target(self, ref):
        """What a local $ref (a JSON pointer, RFC 6901) means, or None."""
        here = self.root if ref.startswith("#") else None
        for step in ref[1:].split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            here = here.get(step) if isinstance(here, dict) else None
        return here if isinstance(here, dict) else None


READ = {
    **dict.fromkeys(("properties", "patternProperties"), Inliner.fields),
    **dict.fromkeys(("const", "enum", "default", "examples"), Inliner.data),
}
