"""The input of a Responses request, as the messages of a chat.

Items come one by one: thoughts, words and tool calls of one turn of the model make one message.
Those of unknown types, or that lack something, are read as history.py does, but for the messages
that ask the model.

Source: OpenAI's published schema (github.com/openai/openai-openapi), InputItem.
"""

import re

from dialects.engine import as_earlier, fault_of_image
from dialects.history import LONGEST, UNTYPED, Past, as_content, in_json, message_of
from dialects.read import mended, typed
from dialects.responses.compaction import TOLD, is_asked
from dialects.responses.tools import BRINGS_TOOLS, ClientTool, full_name
from errors import InvalidRequest
from values import as_dict, dumps

MESSAGE = ("message", "")  # types of an item that is one
ROLES = ("user", "assistant", "system", "developer")
TEXTS = {  # type of a part -> the field of its text
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}
SCREENS = ("computer_screenshot", "input_image")
MISSING = object()
IMAGES = (*SCREENS, "image_url")
DETAILS = ("auto", "low", "high")
REFUSED = {  # where the model is asked about it
    "input_file": "files are not supported; send their text, or images of their pages",
    "input_audio": "audio is not supported; send text or images",
}
TOOL_CALLS = {"function_call": "function", "custom_tool_call": "custom"}  # -> type of the tool
OUTPUTS = ("function_call_output", "custom_tool_call_output")
SHELL = "local_shell_call"  # a call whose result Codex gives as a function's
CIPHER = re.compile(r"[A-Za-z0-9+/_=-]{40,}+")
AGENTS = {"author": "from", "recipient": "to"}  # fields of an agent's message
# What says nothing to a model, though it has fields that elsewhere hold texts.
TRACES = ("image_generation_call", "mcp_list_tools")
COMPACTIONS = ("compaction", "compaction_summary", "context_compaction")
REFERENCE = (
    "refers to an item by its id, but nothing is stored here: "
    "send the item itself, and set store: false"
)
SHOWN = "The tool's result holds this:"  # before an image, which a tool message cannot hold


def messages_of(payload, box, decrypt, ignored):
    """The messages. Raises InvalidRequest.

    box      the Toolbox of the request
    decrypt  gives the text of reasoning that was encrypted here, else None; it may be None itself
    ignored  history.Ignored
    """
    given = payload.get("input")
    if given is None:
        raise InvalidRequest("input is missing: send a text or a list of items", "input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise InvalidRequest("input must be a text or a list with at least one item", "input")
    if is_asked(payload):
        given = given[:-1]
    reader = Reader(box, decrypt, typed(payload, "instructions", str, "a text"), Past(ignored))
    answered = answered_up_to(given)
    for at, item in enumerate(given):
        if at == answered:
            reader.begin_asking()
        reader.read(item, f"input[{at}]")
    return reader.end()


def answered_up_to(items):
    """How many items there are up to the last that the model or a tool has made."""
    for at in range(len(items), 0, -1):
        item = as_dict(items[at - 1])
        kind = item.get("type")
        if item.get("role") == "assistant" or isinstance(kind, str) and kind not in MESSAGE:
            return at
    return 0


def invalid(where, problem):
    return InvalidRequest(f"{where} {problem}", "input")


class Reader:
    """Takes items and makes messages.

    front   the texts that make the one system message in front
    turn    the message of the model that items still add to, or None
    words, thoughts   the texts that it will hold
    waiting call ids of its calls that have no result yet
    shown   parts of the user message that follows the last result of a turn: what tools show
    past    history.Past
    parts   Parts
    answered how many messages there were before those that ask the model
    fault   the Refusal that the first item of the history would be that lacks something, or None
    """

    def __init__(self, box, decrypt, instructions, past):
        """box and decrypt: see `messages_of`"""
        self.engine_names = {tool: name for name, tool in box.names.items()}
        self.decrypt = decrypt
        self.past = past
        self.parts = Parts(past, self.read_sealed)
        self.front = [instructions] if instructions else []
        self.messages = []
        self.turn = None
        self.words = []
        self.thoughts = []
        self.waiting = set()
        self.shown = []
        self.answered = 0
        self.fault = None

    def read(self, item, where):
        """Add an item."""
        kind = type_of(item, where, self.parts.asked)
        if kind == f"{SHELL}_output" and item.get("call_id"):
            kind = "function_call_output"
        if kind == "message" or kind not in OUTPUTS and not self.waiting:
            self.show()
        try:
            self.read_known(item, kind, where)
        except InvalidRequest as error:
            if self.parts.asked:
                raise
            self.fault = self.fault or error
            self.read_other(item, kind, where)

    def read_known(self, item, kind, where):
        """Add an item. Raises InvalidRequest where it lacks something."""
        if kind == "message":
            self.read_message(item, where)
        elif kind in TOOL_CALLS:
            self.read_tool_call(item, kind, where)
        elif kind == SHELL:
            self.read_shell_call(item, where)
        elif kind in OUTPUTS:
            self.read_output(item, where)
        elif kind == "reasoning":
            self.read_reasoning(item, where)
        elif kind == "agent_message":
            self.read_agent_message(item, where)
        elif kind in COMPACTIONS and (summary := self.decrypted(item.get("encrypted_content"))):
            self.shown.append({"type": "text", "text": f"{TOLD}\n{summary}"})
        elif kind not in BRINGS_TOOLS:  # the tools have been read
            self.read_other(item, kind, where)

    def begin_asking(self):
        """From here on come the messages that ask the model."""
        self.show()
        self.parts.asked = True
        self.answered = len(self.messages)

    def end(self):
        """All messages."""
        self.show()
        self.end_turn()
        asked = self.messages[self.answered :]
        if self.parts.unread and not any(message["content"] for message in asked):
            raise self.parts.unread  # nothing else is asked
        if self.front:
            return [{"role": "system", "content": "\n\n".join(self.front)}, *self.messages]
        if not self.messages:
            raise self.fault or InvalidRequest(
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
        if item.get("tool_calls"):  # of chat completions; calls are items of their own
            self.past.ignored.add(f"{where}.tool_calls", "tool_calls")
        if "content" not in item and self.parts.asked:
            raise invalid(f"{where}.content", "must be a text or a list of parts")
        parts = self.parts.read(item.get("content"), f"{where}.content")
        only_text = all(part["type"] == "text" for part in parts)
        if not only_text and role != "user":
            self.past.ignored.add(f"{where}.content", "image")
        if role == "user":
            content = parts
            if only_text and len(parts) <= 1:
                content = text_in(parts, "")
            self.add({"role": "user", "content": content})
        elif not only_text and self.parts.asked:
            raise invalid(
                f"{where}.content", f"holds an image, which a message of the role {role} cannot"
            )
        elif role == "assistant":
            self.new_turn_after_answer()
            self.own_turn()
            if text := text_in(parts, ""):
                self.words.append(text)
        elif self.messages or self.turn:  # later ones stay where they stand
            self.add({"role": "system", "content": text_in(parts, "\n")})
        else:
            self.front.append(text_in(parts, "\n"))

    def read_reasoning(self, item, where):
        text = self.reasoning_of(item, where)
        if item.get("encrypted_content") and not text:
            self.past.ignored.add(where, "reasoning")
        if text:
            self.new_turn_after_answer()
            self.own_turn()
            self.thoughts.append(text)

    def read_tool_call(self, item, kind, where):
        """A tool call, under the engine's name of the tool."""
        call_id = required_id(item, where)
        name = required_text(item, "name", where)
        namespace = item.get("namespace")
        if kind == "custom_tool_call":
            arguments = dumps({"input": in_json(item.get("input") or "")}).decode()
        else:
            arguments = mended_arguments(item.get("arguments"), where)
        if not isinstance(namespace, str):
            namespace = None
        tool = ClientTool(TOOL_CALLS[kind], name, namespace)
        engine_name = self.engine_names.get(tool) or full_name(name, namespace)
        self.add_call(call_id, engine_name, arguments)

    def read_shell_call(self, item, where):
        """A call of a tool that Codex has by itself, under a name of its own."""
        call_id = required_id({"call_id": item.get("call_id") or item.get("id")}, where)
        self.add_call(call_id, "local_shell", mended_arguments(item.get("action"), where))

    def add_call(self, call_id, name, arguments):
        function = {"name": name, "arguments": arguments}
        tool_calls = self.own_turn().setdefault("tool_calls", [])
        tool_calls.append({"id": call_id, "type": "function", "function": function})
        self.waiting.add(call_id)

    def read_output(self, item, where):
        """What came of a tool call."""
        call_id = required_id(item, where)
        output = item.get("output")
        if isinstance(output, dict):
            output = in_json(output)
        parts = self.parts.read(output, f"{where}.output")
        self.add({"role": "tool", "tool_call_id": call_id, "content": text_in(parts, "\n")})
        self.waiting.discard(call_id)
        images = [part for part in parts if part["type"] == "image_url"]
        if images:
            self.shown += [{"type": "text", "text": SHOWN}, *images]

    def read_agent_message(self, item, where):
        """What another agent says to this one: a user's message that names its author."""
        parts = self.parts.read(item.get("content"), f"{where}.content")
        if not any(part["type"] != "text" or part["text"] for part in parts):
            self.past.ignored.add(where, "agent_message")
            return
        label = "Message"
        for name, word in AGENTS.items():
            if isinstance(item.get(name), str):
                label += f" {word} {item[name]}"
        self.shown += [{"type": "text", "text": f"[{label}]"}, *parts]

    def read_other(self, item, kind, where):
        """An item of another type: what can be read in it, which the model has not said."""
        call_id = as_dict(item).get("call_id")
        output = as_dict(as_dict(item).get("output"))
        if kind == "message":
            kind = message_of(item)
        image = output.get("type") in SCREENS and self.parts.read_image(output, f"{where}.output")
        if image:
            self.shown += [{"type": "text", "text": f"[{kind[:LONGEST]}]"}, image]
        elif kind in TRACES:
            self.past.ignored.add(where, kind)
        elif text := self.past.read(typed_as(kind, item), where, call_id):
            self.shown.append({"type": "text", "text": text})
        self.past.remember(as_dict(item), call_id)

    # -- messages

    def add(self, message):
        self.end_turn()
        self.messages.append(message)

    def own_turn(self):
        """The message of the model that is being put together."""
        if self.turn is None:
            self.turn = {"role": "assistant", "content": ""}
            self.messages.append(self.turn)
        return self.turn

    def new_turn_after_answer(self):
        """Two answers in a row are two messages."""
        if self.words and "tool_calls" not in self.turn:
            self.end_turn()

    def end_turn(self):
        """Nothing more is added to the model's message: it gets its texts, each copied once."""
        if self.words:
            self.turn["content"] = "".join(self.words)
        if self.thoughts:
            self.turn["reasoning"] = "\n\n".join(self.thoughts)
        self.turn = None
        self.words = []
        self.thoughts = []

    def show(self):
        self.waiting = set()
        if self.shown:
            content = self.shown
            if all(part["type"] == "text" for part in content):
                content = text_in(content, "\n")
            self.add({"role": "user", "content": content})
            self.shown = []

    def decrypted(self, token):
        """The text of what was encrypted here, or None."""
        if self.decrypt and isinstance(token, str) and token:
            return self.decrypt(token)
        return None

    def read_sealed(self, token):
        """The text of an encrypted_content in a message of an agent, or None.

        OpenAI's models encrypt what they tell another agent, and Codex passes it on under this
        name. The models here do not: it is plain text.
        """
        text = self.decrypted(token)
        if text is None and isinstance(token, str) and not CIPHER.fullmatch(token):
            return token
        return text

    def reasoning_of(self, item, where):
        """The text of a reasoning item: as it was encrypted here, else in the clear.

        What somebody else has encrypted, nobody here can read: it counts as absent.
        """
        text = self.decrypted(item.get("encrypted_content"))
        if text is not None:
            return text
        for name in ("content", "summary"):
            parts = item.get(name)
            if parts:
                return text_in(self.parts.read(parts, f"{where}.{name}"), "\n")
        return ""


def type_of(item, where, asked):
    """An item's type; a message may go without it.

    asked  whether one without a type is refused
    """
    kind = as_dict(item).get("type")
    if kind == "item_reference":
        return reference(item, where)
    if kind and isinstance(kind, str):
        return kind
    if "role" in as_dict(item):
        return "message"
    if "id" in as_dict(item):
        return reference(item, where)
    if not asked:
        return UNTYPED
    if item == {}:
        raise invalid(where, "must have a type, or a role and content")
    raise invalid(where, "must be an object with a type, such as message")


def reference(item, where):
    """The type of an item that refers to another one. Without a thought the model can do."""
    if not str(item.get("id")).startswith("rs_"):
        raise invalid(where, REFERENCE)
    return "item_reference"


def typed_as(kind, item):
    """An item with that type; one that is no object has none."""
    return {**item, "type": kind} if isinstance(item, dict) else item


# ---- parts


class Parts:
    """Reads contents as the parts of a chat: texts and images.

    past    history.Past
    unseal  gives the text of an encrypted_content, or None
    asked   whether the model is asked about them now
    unread  the Refusal of a part that was left out though it is asked about, or None
    """

    def __init__(self, past, unseal):
        self.past = past
        self.unseal = unseal
        self.asked = False
        self.unread = None

    def read(self, content, where):
        """A content, a text or a list, or None, as a list of parts."""
        if content is None or not self.asked:
            content = as_content(content)  # a client keeps null of an item that held nothing
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise invalid(where, "must be a text or a list of parts")
        parts = [self.read_part(part, f"{where}[{at}]") for at, part in enumerate(content)]
        return [part for part in parts if part]

    def read_part(self, part, where):
        """A part, a text or an image, as that of a chat; another one as a text, or None."""
        if isinstance(part, str):
            return {"type": "text", "text": part}
        kind = as_dict(part).get("type")
        if not isinstance(kind, str):
            kind = None
        if kind in IMAGES:
            return self.read_image(part, where)
        try:
            return known_part(part, kind, where)
        except InvalidRequest as error:
            return self.other_part(part, kind, where, error)

    def other_part(self, part, kind, where, error):
        """A part of another type, or one that lacks something: `error`."""
        if self.asked and (kind is None or kind in TEXTS or kind in REFUSED):
            raise error
        found = None
        if kind == "encrypted_content":
            found = self.unseal(part.get(kind))
        found = found or self.past.read(part, where)
        if found:
            return {"type": "text", "text": found}
        if self.asked:
            self.unread = self.unread or error
        return None

    def read_image(self, part, where):
        """An image, or None for an earlier one that nobody here can read."""
        try:
            image = image_part(part, where)
            return image if self.asked else as_earlier(image, where)
        except InvalidRequest:
            if self.asked:
                raise
            self.past.ignored.add(where, part["type"])
            return None


def known_part(part, kind, where):
    """A text as a chat has it. Raises InvalidRequest for anything else."""
    if kind is None:
        raise invalid(where, "must be an object with a type, such as input_text")
    if kind in REFUSED:
        raise invalid(where, f"is {kind}: {REFUSED[kind]}")
    if kind not in TEXTS:
        remedy = "use input_text, output_text or input_image"
        raise invalid(f"{where}.type", f"{kind[:60]!r} is unknown: {remedy}")
    text = part.get(TEXTS[kind], MISSING)
    if text is None:
        text = ""
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


def required_text(item, name, where):
    value = item.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{where}.{name}", "must be a text that is not empty")
    return value


def required_id(item, where):
    """The id of a call; some clients have a number for it."""
    value = item.get("call_id")
    if type(value) is int:
        return str(value)
    return required_text(item, "call_id", where)


def mended_arguments(arguments, where):
    try:
        return mended(arguments)
    except RecursionError:
        raise invalid(f"{where}.arguments", "are nested too deeply") from None
