"""The input of a Responses request, as the messages of a chat.

Items come one by one: thoughts, words and calls of one turn of the model are put together into one message.
"""

from dialects.read import mended, typed
from dialects.responses.items import Tool
from errors import InvalidRequest
from stream import dumps

ROLES = ("user", "assistant", "system", "developer")
TEXTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}  # type of a part -> where its text stands
IMAGES = ("input_image", "image_url")
DETAILS = ("auto", "low", "high")
REFUSED = {
    "input_file": "files are not supported; send their text, or images of their pages",
    "input_audio": "audio is not supported; send text or images",
}
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
# Traces of tools that OpenAI has run, in a history from there: what came of them, the model has said.
FOREIGN = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_list_tools",
    "mcp_call",
    "mcp_approval_request",
    "mcp_approval_response",
    "tool_search_call",
    "tool_search_output",
    "compaction",
)
REFERENCE = "refers to an item by its id, but nothing is stored here: send the item itself, and set store: false"
SHOWN = "The tool's result holds this:"  # before an image, which a tool message cannot hold


def messages_of(payload, box, unseal):
    """The messages. box: the Toolbox; unseal: gives the text of our own sealed reasoning or None. Raises InvalidRequest."""
    given = payload.get("input")
    if given is None:
        raise InvalidRequest("input is missing: send a text or a list of items", "input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be a text or a list with at least one item", "input")
    reader = Reader(box, unseal, typed(payload, "instructions", str, "a text"))
    for at, item in enumerate(given):
        reader.read(item, f"input[{at}]")
    return reader.end()


def bad(where, problem):
    return InvalidRequest(f"{where} {problem}", "input")


class Reader:
    """Takes items and makes messages. `turn` is the message of the model that items still add to; `images` are those of
    tools, which wait for the last result of their turn."""

    def __init__(self, box, unseal, instructions):
        self.unseal, self.messages, self.turn, self.images = unseal, [], None, []
        self.lead = (
            [instructions] if instructions else []
        )  # what makes the one system message in front
        self.engine_names = {tool: name for name, tool in box.names.items()}

    def read(self, item, where):
        kind = kind_of(item, where)
        if kind in FOREIGN:
            return
        if kind not in OUTPUTS:
            self.show_images()
        if kind == "message":
            self.message(item, where)
        elif kind in CALLS:
            self.call(item, CALLS[kind], where)
        elif kind in OUTPUTS:
            self.output(item, where)
        elif kind == "reasoning":
            self.think(item, where)
        else:
            raise bad(
                f"{where}.type",
                f"{kind[:60]!r} cannot be read here; there are message, reasoning, "
                f"{', '.join((*CALLS, *OUTPUTS))}",
            )

    def end(self):
        self.show_images()
        lead = [{"role": "system", "content": "\n\n".join(self.lead)}] if self.lead else []
        if not lead and not self.messages:
            raise InvalidRequest(
                "input holds nothing that a model could read: send a message, a call or its output",
                "input",
            )
        return lead + self.messages

    # -- items

    def message(self, item, where):
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        parts = parts_of(content, f"{where}.content")
        if role == "user":
            self.say(
                {
                    "role": "user",
                    "content": parts[0]["text"] if text_alone(parts) and len(parts) == 1 else parts,
                }
            )
        elif not text_alone(parts):
            raise bad(
                f"{where}.content", f"holds an image, which a message of the role {role} cannot"
            )
        elif role == "assistant":
            self.speak(text_in(parts, ""))
        elif self.messages or self.turn:  # later ones stay where they stand
            self.say({"role": "system", "content": text_in(parts, "\n")})
        else:
            self.lead.append(text_in(parts, "\n"))

    def say(self, message):
        self.turn = None
        self.messages.append(message)

    def own(self):
        """The message of the model that is being put together."""
        if self.turn is None:
            self.turn = {"role": "assistant", "content": ""}
            self.messages.append(self.turn)
        return self.turn

    def speak(self, text):
        if self.turn and self.turn["content"] and "tool_calls" not in self.turn:
            self.turn = None  # two answers in a row are two messages
        turn = self.own()
        turn["content"] += text

    def think(self, item, where):
        text = thought_of(item, self.unseal, where)
        if not text:
            return
        if self.turn and self.turn["content"] and "tool_calls" not in self.turn:
            self.turn = None
        turn = self.own()
        turn["reasoning"] = "\n\n".join(part for part in (turn.get("reasoning"), text) if part)

    def call(self, item, field, where):
        call_id, name = text_of(item, "call_id", where), text_of(item, "name", where)
        given, namespace = item.get(field), item.get("namespace")
        if not isinstance(given, (str, type(None))):
            raise bad(f"{where}.{field}", "must be a text")
        if not isinstance(namespace, (str, type(None))):
            raise bad(f"{where}.namespace", "must be a text")
        arguments = (
            dumps({"input": given or ""}).decode() if field == "input" else mended_of(given, where)
        )
        tool = Tool("custom" if field == "input" else "function", name, namespace)
        name = self.engine_names.get(tool) or (f"{namespace}__{name}" if namespace else name)
        self.own().setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def output(self, item, where):
        parts = parts_of(item.get("output"), f"{where}.output")
        images = [part for part in parts if part["type"] == "image_url"]
        self.say(
            {
                "role": "tool",
                "tool_call_id": text_of(item, "call_id", where),
                "content": text_in(parts, "\n"),
            }
        )
        self.images += [{"type": "text", "text": SHOWN}, *images] if images else []

    def show_images(self):
        if self.images:
            self.say({"role": "user", "content": self.images})
            self.images = []


def kind_of(item, where):
    """An item's type; a message may go without it."""
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(kind, (str, type(None))):
        raise bad(where, "must be an object with a type, such as message")
    if kind == "item_reference" or kind is None and "role" not in item and "id" in item:
        raise bad(where, REFERENCE)
    if kind is None and "role" not in item:
        raise bad(where, "must have a type, or a role and content")
    return kind or "message"


# ---- parts


def parts_of(content, where):
    """A content, a text or a list, as a chat's parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad(where, "must be a text or a list of parts")
    return [part_of(part, f"{where}[{at}]") for at, part in enumerate(content)]


def part_of(part, where):
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise bad(where, "must be an object with a type, such as input_text")
    if kind in REFUSED:
        raise bad(where, f"is {kind}: {REFUSED[kind]}")
    if kind in IMAGES:
        return image_of(part, where)
    if kind not in TEXTS:
        raise bad(
            f"{where}.type", f"{kind[:60]!r} is unknown: use input_text, output_text or input_image"
        )
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise bad(f"{where}.{TEXTS[kind]}", "must be a text")
    return {"type": "text", "text": text}


def image_of(part, where):
    given = part.get("image_url")
    source = given if isinstance(given, dict) else {"url": given, "detail": part.get("detail")}
    url, detail = source.get("url"), source.get("detail")
    if url is None and part.get("file_id") is not None:
        raise bad(
            f"{where}.file_id",
            "is not supported: no files are stored here; send the image in image_url",
        )
    if not isinstance(url, str) or not url.lower().startswith(("data:", "http://", "https://")):
        raise bad(
            f"{where}.image_url", "must be a data URL (data:image/png;base64,...) or an address"
        )
    return {
        "type": "image_url",
        "image_url": {"url": url, **({"detail": detail} if detail in DETAILS else {})},
    }


def text_alone(parts):
    return all(part["type"] == "text" for part in parts)


def text_in(parts, between):
    return between.join(part["text"] for part in parts if part["type"] == "text")


def thought_of(item, unseal, where):
    """The text of a reasoning item: as we sealed it, else in the clear. Somebody else's seal is no matter."""
    sealed = item.get("encrypted_content")
    text = unseal(sealed) if unseal and isinstance(sealed, str) and sealed else None
    if text is not None:
        return text
    for name in ("content", "summary"):
        parts = item.get(name)
        if parts:
            return text_in(parts_of(parts, f"{where}.{name}"), "\n")
    return ""


def text_of(item, name, where):
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise bad(f"{where}.{name}", "must be a text that is not empty")
    return value


def mended_of(arguments, where):
    try:
        return mended(arguments)
    except RecursionError:
        raise bad(f"{where}.arguments", "are nested too deeply") from None
