"""The input of a Responses request, as the messages of a chat.

Items come one by one: thoughts, words and tool calls of one turn of the model make one message.

Source: OpenAI's published schema (github.com/openai/openai-openapi), InputItem.
"""

from dialects.engine import fault_of_image
from dialects.loose import as_dict
from dialects.read import mended, typed
from dialects.responses.tools import ClientTool, full_name
from errors import InvalidRequest
from stream import dumps

ROLES = ("user", "assistant", "system", "developer")
TEXTS = {  # type of a part -> the field of its text
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
IMAGES = ("input_image", "image_url")
DETAILS = ("auto", "low", "high")
REFUSED = {
    "input_file": "files are not supported; send their text, or images of their pages",
    "input_audio": "audio is not supported; send text or images",
}
TOOL_CALLS = {"function_call": "function", "custom_tool_call": "custom"}  # -> type of the tool
OUTPUTS = ("function_call_output", "custom_tool_call_output")
# Traces of tools that OpenAI has run: what came of them, the model has said.
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
REFERENCE = (
    "refers to an item by its id, but nothing is stored here: "
    "send the item itself, and set store: false"
)
SHOWN = "The tool's result holds this:"  # before an image, which a tool message cannot hold


def messages_of(payload, box, decrypt):
    """The messages. Raises InvalidRequest.

    box      the Toolbox of the request
    decrypt  gives the text of reasoning that was encrypted here, else None; it may be None itself
    """
    given = payload.get("input")
    if given is None:
        raise InvalidRequest("input is missing: send a text or a list of items", "input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be a text or a list with at least one item", "input")
    reader = Reader(box, decrypt, typed(payload, "instructions", str, "a text"))
    for at, item in enumerate(given):
        reader.read(item, f"input[{at}]")
    return reader.end()


def invalid(where, problem):
    return InvalidRequest(f"{where} {problem}", "input")


class Reader:
    """Takes items and makes messages.

    front   the texts that make the one system message in front
    turn    the message of the model that items still add to, or None
    images  parts of the user message that follows the last result of a turn: what tools show
    """

    def __init__(self, box, decrypt, instructions):
        self.engine_names = {tool: name for name, tool in box.names.items()}
        self.decrypt = decrypt
        self.front = [instructions] if instructions else []
        self.messages = []
        self.turn = None
        self.images = []

    def read(self, item, where):
        """Add an item."""
        kind = type_of(item, where)
        if kind in FOREIGN:
            return
        if kind not in OUTPUTS:
            self.show_images()
        if kind == "message":
            self.read_message(item, where)
        elif kind in TOOL_CALLS:
            self.read_tool_call(item, kind, where)
        elif kind in OUTPUTS:
            self.read_output(item, where)
        elif kind == "reasoning":
            self.read_reasoning(item, where)
        else:
            known = ", ".join(("message", "reasoning", *TOOL_CALLS, *OUTPUTS))
            raise invalid(f"{where}.type", f"{kind[:60]!r} cannot be read here; there are {known}")

    def end(self):
        """All messages."""
        self.show_images()
        if self.front:
            return [{"role": "system", "content": "\n\n".join(self.front)}, *self.messages]
        if not self.messages:
            raise InvalidRequest(
                "input holds nothing that a model could read: send a message, a call or its output",
                "input",
            )
        return self.messages

    # -- items

    def read_message(self, item, where):
        """A message. Only a user's may hold images."""
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        parts = parts_of(item.get("content"), f"{where}.content")
        only_text = all(part["type"] == "text" for part in parts)
        if role == "user":
            content = parts
            if only_text and len(parts) == 1:
                content = parts[0]["text"]
            self.add({"role": "user", "content": content})
        elif not only_text:
            raise invalid(
                f"{where}.content", f"holds an image, which a message of the role {role} cannot"
            )
        elif role == "assistant":
            self.new_turn_after_answer()
            self.own_turn()["content"] += text_in(parts, "")
        elif self.messages or self.turn:  # later ones stay where they stand
            self.add({"role": "system", "content": text_in(parts, "\n")})
        else:
            self.front.append(text_in(parts, "\n"))

    def read_reasoning(self, item, where):
        text = reasoning_of(item, self.decrypt, where)
        if text:
            self.new_turn_after_answer()
            turn = self.own_turn()
            earlier = turn.get("reasoning")
            turn["reasoning"] = f"{earlier}\n\n{text}" if earlier else text

    def read_tool_call(self, item, kind, where):
        """A tool call, under the engine's name of the tool."""
        call_id = required_text(item, "call_id", where)
        name = required_text(item, "name", where)
        given = optional_text(item, "input" if kind == "custom_tool_call" else "arguments", where)
        namespace = optional_text(item, "namespace", where)
        if kind == "custom_tool_call":
            arguments = dumps({"input": given or ""}).decode()
        else:
            arguments = mended_arguments(given, where)
        tool = ClientTool(TOOL_CALLS[kind], name, namespace)
        engine_name = self.engine_names.get(tool) or full_name(name, namespace)
        function = {"name": engine_name, "arguments": arguments}
        tool_calls = self.own_turn().setdefault("tool_calls", [])
        tool_calls.append({"id": call_id, "type": "function", "function": function})

    def read_output(self, item, where):
        """What came of a tool call."""
        parts = parts_of(item.get("output"), f"{where}.output")
        call_id = required_text(item, "call_id", where)
        self.add({"role": "tool", "tool_call_id": call_id, "content": text_in(parts, "\n")})
        images = [part for part in parts if part["type"] == "image_url"]
        if images:
            self.images += [{"type": "text", "text": SHOWN}, *images]

    # -- messages

    def add(self, message):
        self.turn = None
        self.messages.append(message)

    def own_turn(self):
        """The message of the model that is being put together."""
        if self.turn is None:
            self.turn = {"role": "assistant", "content": ""}
            self.messages.append(self.turn)
        return self.turn

    def new_turn_after_answer(self):
        """Two answers in a row are two messages."""
        if self.turn and self.turn["content"] and "tool_calls" not in self.turn:
            self.turn = None

    def show_images(self):
        if self.images:
            self.add({"role": "user", "content": self.images})
            self.images = []


def type_of(item, where):
    """An item's type; a message may go without it."""
    if not isinstance(item, dict):
        raise invalid(where, "must be an object with a type, such as message")
    kind = item.get("type")
    if kind is None:
        if "role" in item:
            return "message"
        if "id" in item:
            raise invalid(where, REFERENCE)
        raise invalid(where, "must have a type, or a role and content")
    if not isinstance(kind, str):
        raise invalid(where, "must be an object with a type, such as message")
    if kind == "item_reference":
        raise invalid(where, REFERENCE)
    return kind or "message"


# ---- parts


def parts_of(content, where):
    """A content, a text or a list, as a chat's parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(where, "must be a text or a list of parts")
    return [part_of(part, f"{where}[{at}]") for at, part in enumerate(content)]


def part_of(part, where):
    """A part, a text or an image, as that of a chat."""
    kind = as_dict(part).get("type")
    if not isinstance(kind, str):
        raise invalid(where, "must be an object with a type, such as input_text")
    if kind in REFUSED:
        raise invalid(where, f"is {kind}: {REFUSED[kind]}")
    if kind in IMAGES:
        return image_part(part, where)
    if kind not in TEXTS:
        raise invalid(
            f"{where}.type", f"{kind[:60]!r} is unknown: use input_text, output_text or input_image"
        )
    text = part.get(TEXTS[kind])
    if not isinstance(text, str):
        raise invalid(f"{where}.{TEXTS[kind]}", "must be a text")
    return {"type": "text", "text": text}


def image_part(part, where):
    """An image; clients of chat completions put its address and detail into an object."""
    source = part.get("image_url")
    if not isinstance(source, dict):
        source = {"url": source, "detail": part.get("detail")}
    url = source.get("url")
    if url is None and part.get("file_id") is not None:
        raise invalid(
            f"{where}.file_id",
            "is not supported: no files are stored here; send the image in image_url",
        )
    if fault := fault_of_image(url):
        raise invalid(f"{where}.image_url", fault)
    image = {"url": url}
    if source.get("detail") in DETAILS:
        image["detail"] = source["detail"]
    return {"type": "image_url", "image_url": image}


def text_in(parts, between):
    return between.join(part["text"] for part in parts if part["type"] == "text")


# ---- fields of items


def reasoning_of(item, decrypt, where):
    """The text of a reasoning item: as it was encrypted here, else in the clear.

    What somebody else has encrypted, nobody here can read: it counts as absent.
    """
    encrypted = item.get("encrypted_content")
    if decrypt and isinstance(encrypted, str) and encrypted:
        text = decrypt(encrypted)
        if text is not None:
            return text
    for name in ("content", "summary"):
        parts = item.get(name)
        if parts:
            return text_in(parts_of(parts, f"{where}.{name}"), "\n")
    return ""


def required_text(item, name, where):
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{name}", "must be a text that is not empty")
    return value


def optional_text(item, name, where):
    value = item.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(f"{where}.{name}", "must be a text")
    return value


def mended_arguments(arguments, where):
    try:
        return mended(arguments)
    except RecursionError:
        raise invalid(f"{where}.arguments", "are nested too deeply") from None
