"""What of a conversation's past is read where its form is not known here.

A client sends its history again with every request: what is refused in it once is refused for ever.
So what a model can read becomes a text that names where it came from, and what says nothing to a
model is left out, and named in the response's header x-sparks-ignored.
"""

import re

from steps import joined
from values import as_dict, as_list, dumps

# Of what was left out: how many are named, in how many bytes.
MOST_NAMED = 20
MOST_BYTES = 1000
LONGEST = 60  # characters of a type or a name
LONGEST_CALL = 300  # characters of what a tool was called with; a long text is whole up to there
DEEPEST = 8  # objects and lists round a text
UNTYPED = "untyped"
# Types that say no more than that it is a text.
PLAIN = ("text", "input_text", "output_text", UNTYPED)
DATA = re.compile(r"data:[^,]{0,200};base64,", re.I)  # no text, though it may stand for an address
UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")  # in a header, where a client's own words must not stand
# The fields in which results, contents and errors of all kinds hold their texts.
READABLE = (
    "text",
    "refusal",
    "transcript",
    "title",
    "url",
    "source",
    "message",
    "summary",
    "answer",
    "code",
    "content",
    "output",
    "outputs",
    "result",
    "results",
    "resource",
    "lines",
    "tabs",
    "logs",
    "stdout",
    "stderr",
    "error",
    "error_code",
)
CALLED_WITH = ("input", "arguments", "action", "operation", "query", "queries")
FILES = ("document", "input_file", "file", "input_audio")  # types of parts that no model here reads


class Ignored:
    """The names of what was left out of a request, bounded."""

    def __init__(self):
        self.names = []
        self.bytes = 0
        self.more = 0

    def add(self, where, kind):
        """where: the place in the request;  kind: what stood there, in the client's own word"""
        name = f"{where} {UNSAFE.sub('_', str(kind)[:LONGEST]) or 'unnamed'}"
        self.bytes += len(name) + 2
        if self.more or len(self.names) == MOST_NAMED or self.bytes > MOST_BYTES:
            self.more += 1
        else:
            self.names.append(name)

    @property
    def header(self):
        """The value of x-sparks-ignored, or an empty text."""
        if self.more:
            return ", ".join([*self.names, f"and {self.more} more"])
        return ", ".join(self.names)


class Past:
    """Reads what is not known in a history.

    ignored  Ignored
    calls    id of a call -> its block or item, which may be left out: its result tells of it
    """

    def __init__(self, ignored):
        self.ignored = ignored
        self.calls = {}

    def remember(self, call, ident):
        if isinstance(ident, str):
            self.calls.setdefault(ident, call)

    def read(self, value, where, call_id=None):
        """A block, an item or a part of any form as a text; an empty one where it is left out."""
        kind = type_of(value)
        if kind in FILES:
            return self.read_file(value, where)
        lost = []
        text = "\n".join(texts_in(value, lost))
        if not text:
            lost = [] if value == "" else [kind]
        for one in lost:
            self.ignored.add(where, one)
        if not text or kind in PLAIN:
            return text
        call = value
        if isinstance(call_id, str):
            call = self.calls.pop(call_id, value)  # told once: it may be large, and results many
        label = kind[:LONGEST] + told(call)
        if value.get("is_error") is True:
            label += ", an error"
        return f"[{label}]\n{text}"

    def read_message(self, message, where):
        """A message of somebody that no API has a role for, as a text."""
        if isinstance(message, dict):
            message = {**message, "type": message_of(message)}
        return self.read(message, where)

    def read_file(self, value, where):
        """A file's text, or a text in its place."""
        inner = as_dict(value.get("file"))  # in a chat
        name = value.get("title") or value.get("filename") or inner.get("filename")
        label = value["type"]
        if isinstance(name, str):
            label += " " + dumps(name[:LONGEST]).decode()
        text = "\n".join(document_texts(value))
        if text:
            return f"[{label}]\n{text}"
        self.ignored.add(where, value["type"])
        return f"[{label}: it could not be read here]"


def type_of(value):
    """The type of a block, an item or a part."""
    kind = as_dict(value).get("type")
    return kind if kind and isinstance(kind, str) else UNTYPED


def message_of(message):
    """What a message is called whose role nobody knows."""
    role = message.get("role")
    return f"message of {role}" if role and isinstance(role, str) else "message of nobody"


def as_content(value):
    """What stands in the place of a content as a text or a list."""
    if value is None:
        return []
    if isinstance(value, (str, list)):
        return value
    return [value] if isinstance(value, dict) else in_json(value)


def texts_in(value, lost, depth=DEEPEST):
    """The texts that a model can read in a block or an item, in their order.

    lost  gets the types of those inside of it that hold none
    """
    if isinstance(value, str):
        if value.strip() and not DATA.match(value):
            yield value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)
    elif depth and isinstance(value, list):
        for one in value:
            found = list(texts_in(one, lost, depth - 1))
            if not found:
                lost.append(type_of(one))
            yield from found
    elif depth and isinstance(value, dict):
        yield from texts_of(value, lost, depth)


def texts_of(value, lost, depth):
    """Those of an object."""
    if value.get("type") == "document":
        yield from texts_in(value.get("title"), lost, depth)
        texts = document_texts(value)
        if not texts:
            lost.append("document")
        yield from texts
        return
    for name, inner in value.items():
        if name in READABLE:
            yield from texts_in(inner, lost, depth - 1)


def document_texts(block):
    """The texts of a document that holds texts, and what the client says of it before them."""
    source = as_dict(block.get("source"))
    texts = []
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        texts = [source["data"]]
    if source.get("type") == "content":
        content = source.get("content")
        if isinstance(content, str):
            texts = [content]
        texts += [one["text"] for one in map(as_dict, as_list(content)) if has_text(one)]
    if texts and block.get("context") and isinstance(block["context"], str):
        return [block["context"], *texts]
    return texts


def has_text(block):
    return isinstance(block.get("text"), str)


def told(call):
    """What was called, and with what, or an empty text."""
    words = [call["name"][:LONGEST]] if isinstance(call.get("name"), str) else []
    given = next((call[name] for name in CALLED_WITH if call.get(name)), None)
    if given is not None:
        words.append(in_json(given)[:LONGEST_CALL])
    return " of " + " ".join(words) if words else ""


def in_json(value):
    """A value as a text."""
    if isinstance(value, str):
        return value
    try:
        return joined(value).decode()
    except RecursionError:  # it is read deeper than it is written
        return ""
