"""The messages of a chat completion, far enough to mend what clients get wrong.

What the model has said, what tools have given, and all before it is history: it is read as
history.py does, so that it never ends a session. So are the ids by which calls and results belong
together, which some clients lack, and some engines cannot do without.

Source: OpenAI's reference of POST /v1/chat/completions; what engines refuse.
"""

from collections import deque

from dialects.engine import as_earlier, fault_of_image
from dialects.history import as_content
from dialects.read import mended
from errors import InvalidRequest
from mending.thinking import NAMES
from values import as_dict, as_list, object_in

ROLES = {  # a client's -> the engine's
    "developer": "system",
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # by OpenAI's first form of calls
}
MADE = ("assistant", "tool", "function")  # roles of what nobody asks
TEXTS = {  # type of a part -> the field of its text
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
MEDIA = {
    "image_url": "image_url",
    "input_image": "image_url",
    "video_url": "video_url",
    "audio_url": "audio_url",
}
FETCHED = ("image_url", "video_url", "audio_url")  # fields whose addresses an engine would fetch
REFUSED = {  # where the model is asked about it
    "input_audio": "audio is not supported; send text or images",
    "file": "files are not supported; send their text, or images of their pages",
}
# Beside OpenAI's types of parts: what some engines know too.
PASSED = ("thinking", "image_embeds", "audio_embeds", "tool_reference")

MISSING = object()


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
    reader = Reader(past)
    for at, message in enumerate(messages):
        reader.asked = at >= answered
        messages[at] = reader.read(message, f"messages[{at}]")
    payload["messages"] = [message for message in messages if message]


def answered_up_to(messages):
    """How many messages there are up to the last that does not ask the model."""
    for number in range(len(messages), 0, -1):
        if as_dict(messages[number - 1]).get("role") in MADE:
            return number
    return 0


class Reader:
    """Reads messages, one by one.

    past   history.Past
    asked  whether the model is asked about them now
    calls  CallIds
    """

    def __init__(self, past):
        self.past = past
        self.asked = False
        self.calls = CallIds()

    def read(self, message, where):
        """One in the form that engines take; None for an earlier one that is left out."""
        role = as_dict(message).get("role")
        if not isinstance(role, str) or role not in ROLES:
            return self.read_odd(message, where)
        message["role"] = ROLES[role]
        if not is_text_or_null(message.get("name")):
            self.past.ignored.add(f"{where}.name", "name")
            del message["name"]
        self.read_content(message, where)
        if not self.asked:
            self.read_thoughts(message, where)
        self.read_tool_calls(message, where)
        if message["role"] == "tool":
            message["tool_call_id"] = self.calls.of_result(message.get("tool_call_id"))
        elif role == "assistant":
            self.read_answer(message, where)
        if not self.asked and "tool_calls" not in message:
            message.setdefault("content", "")
        return message

    def read_odd(self, message, where):
        """One that nobody here has a role for: an earlier one is told to the model."""
        if self.asked and isinstance(message, dict):
            raise bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
        if self.asked:
            raise bad(where, "must be an object with role and content")
        text = self.past.read_message(message, where)
        return {"role": "user", "content": text} if text else None

    def read_content(self, message, where):
        """Bring a message's content into the form that engines take, in place."""
        content = message.get("content")
        if content is not None and not self.asked:
            content = message["content"] = as_content(content)
        if isinstance(content, list):
            parts = [
                self.read_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)
            ]
            message["content"] = [part for part in parts if part is not None]
            if content and not message["content"]:
                message["content"] = ""
        elif content is not None and not isinstance(content, str):
            raise bad(f"{where}.content", "must be a text or a list of parts")

    def read_part(self, part, where):
        """A content part as the engine takes it; None for an earlier one that is left out."""
        if isinstance(part, str):  # not all engines take it
            return {"type": "text", "text": part}
        try:
            known = known_part(part, where)
            return known if self.asked else as_earlier(known, where)
        except InvalidRequest:
            if self.asked:
                raise
        text = self.past.read(part, where)
        return {"type": "text", "text": text} if text else None

    def read_thoughts(self, message, where):
        """Parts that are thoughts, which not all engines know, as a message's reasoning, in
        place."""
        for name in NAMES:
            if not is_text_or_null(message.get(name)):
                message[name] = self.past.read(message[name], f"{where}.{name}")
        parts = message.get("content")
        if not isinstance(parts, list) or not any(map(is_thought, parts)):
            return
        thoughts = [part.get("thinking") for part in parts if is_thought(part)]
        message["content"] = [part for part in parts if not is_thought(part)] or ""
        if message["role"] != "assistant":
            self.past.ignored.add(f"{where}.content", "thinking")
        elif not any(message.get(name) for name in NAMES):
            message["reasoning"] = "\n\n".join(filter(is_text, thoughts))

    def read_answer(self, message, where):
        """What the model said beside its content, in place."""
        if isinstance(message.get("refusal"), str) and not message.get("content"):
            message["content"] = message["refusal"]
        if message.get("audio") is not None:
            self.past.ignored.add(f"{where}.audio", "audio")
            del message["audio"]

    def read_tool_calls(self, message, where):
        """Mend the tool calls of a message, in place: a client that once received broken ones
        sends them again with every request."""
        first_form = message.pop("function_call", None)
        given = message.pop("tool_calls", None)
        if not given and first_form:
            given = [{"function": first_form}]
        if not given:
            return
        self.calls.begin()
        made = [
            self.read_call(call, f"{where}.tool_calls[{at}]")
            for at, call in enumerate(as_list(as_content(given)) or [given])
        ]
        made = [call for call in made if call]
        if made:
            message["tool_calls"] = made

    def read_call(self, call, where):
        """A call of a function; None for one that is left out."""
        call = as_function(as_dict(call))
        function = object_in(call, "function")
        name = function.get("name")
        if not is_text(name):
            self.past.ignored.add(where, "tool_call")
            return None
        try:
            function["arguments"] = mended(function.get("arguments"))
        except RecursionError:
            self.past.ignored.add(where, "tool_call")
            return None
        return {**call, "id": self.calls.of_call(call.get("id")), "type": "function"}


# ---- parts


def known_part(part, where):
    """A part of a known type as the engine takes it. Raises InvalidRequest.

    The fields of other media are left out: beside a `uuid` some engines go by such a field,
    whatever the type says, and would fetch the address in it.
    """
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
        text = part.pop(TEXTS[kind], MISSING)
        if text is None:
            text = ""
        if not isinstance(text, str):
            raise bad(f"{where}.{TEXTS[kind]}", "must be a text")
        return {**part, "type": "text", "text": text}
    if kind in MEDIA:
        return read_media(part, MEDIA[kind], where)
    if kind not in PASSED:
        raise bad(f"{where}.type", f"{kind[:40]!r} is unknown: use text or image_url")
    return part


def is_thought(part):
    return part["type"] == "thinking"


def is_text_or_null(value):
    return value is None or isinstance(value, str)


def is_text(value):
    return isinstance(value, str) and value != ""


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
    elif url[:5].lower() != "data:":
        fault = "must be a data URL: addresses are not fetched here"
    if fault:
        raise bad(f"{where}.{kind}", fault)
    if kind == "image_url" and isinstance(part.get("detail"), str):
        source = {"detail": part["detail"], **source}
    rest = {name: value for name, value in part.items() if name not in ("type", kind, "detail")}
    return {"type": kind, kind: source, **rest}


# ---- calls


class CallIds:
    """The ids of calls and results, where some may lack them.

    waiting   ids of the calls of the last turn that has some, the earliest first
    answered  those of them that have a result
    made      how many were made here
    """

    def __init__(self):
        self.made = 0
        self.begin()

    def begin(self):
        """The calls of another turn follow."""
        self.waiting = deque()
        self.answered = set()

    def of_call(self, given):
        ident = id_text(given) or self.new()
        self.waiting.append(ident)
        return ident

    def of_result(self, given):
        """The id of a result's call; without one it belongs to the first that has no result."""
        ident = id_text(given)
        while not ident and self.waiting:
            first = self.waiting.popleft()
            if first not in self.answered:
                ident = first
        ident = ident or self.new()
        self.answered.add(ident)
        return ident

    def new(self):
        """One that is the same each time, for the engine's cache."""
        self.made += 1
        return f"call_{self.made}"


def id_text(given):
    """An id as a text, or None; some clients have a number for it."""
    if type(given) is int:
        return str(given)
    return given if is_text(given) else None


def as_function(call):
    """A call in the form of a function's: clients of other APIs send it flat, and that of a custom
    tool, which takes any text, in an object of its own."""
    custom = object_in(call, "custom")
    if custom.get("name"):
        arguments = {"input": custom.get("input") or ""}
        return {"id": call.get("id"), "function": {"name": custom["name"], "arguments": arguments}}
    if call.get("function") is None and isinstance(call.get("name"), str):
        function = {"name": call["name"], "arguments": call.get("arguments")}
        return {"id": call.get("call_id") or call.get("id"), "function": function}
    return call
