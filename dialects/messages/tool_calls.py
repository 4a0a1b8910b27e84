"""A tool call that arrives in pieces, made what Anthropic's clients take: its input is an object.

Source: what the accumulators of Anthropic's SDKs insist on.
"""

import re

from dialects.loose import arguments_text, as_dict
from dialects.read import mended
from stream import as_id

MARK = re.compile(r'"|\\.|\\\Z|[{}\[\]]', re.S)


class ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self):
        self.depth = 0  # brackets that are open
        self.in_string = False
        self.escaping = False  # the last piece ended with a backslash
        self.reached = False

    def cut(self, text):
        """As much of the text as belongs to the object."""
        if self.reached or not text:
            return ""
        begin = int(self.escaping)
        self.escaping = False
        for found in MARK.finditer(text, begin):
            mark = found[0]
            if mark == '"':
                self.in_string = not self.in_string
            elif mark[0] == "\\":
                self.escaping = len(mark) == 1
            elif not self.in_string:
                if mark in "{[":
                    self.depth += 1
                    continue
                self.depth -= 1
                if not self.depth:
                    self.reached = True
                    return text[: found.end()]
        return text


class ToolCall:
    """A tool call on its way to the client.

    id, name  None until the engine has said them
    state     of its content block: "waiting" to begin, "open" or "closed"
    held      pieces of its arguments that the client has not got: all of them until they are seen
              to be an object. The SDKs raise at anything else, so in the end it is put into one
    opening   the arguments without white space, while they are held
    """

    def __init__(self):
        self.id = None
        self.name = None
        self.state = "waiting"
        self.held = []
        self.opening = ""
        self.end = ObjectEnd()

    def take(self, piece):
        """Add a piece, an entry of a delta's tool_calls."""
        function = as_dict(piece.get("function"))
        name = function.get("name")
        self.id = self.id or as_id(piece.get("id"))
        if isinstance(name, str) and self.state == "waiting":
            self.name = (self.name or "") + name
        self.held.append(arguments_text(function.get("arguments")))

    def sayable(self):
        """What the client can be given of the arguments now."""
        if self.opening in ("", "{", "{}"):  # it could still become anything
            self.held = ["".join(self.held)]
            self.opening = "".join(self.held[0].split())
        if not self.opening.startswith('{"'):
            return ""
        text = "".join(self.held)
        self.held = []
        return self.end.cut(text)

    def rest(self):
        """What the client must be given of them in the end."""
        text = "".join(self.held)
        if text.strip():
            return mended(text)
        return ""

    @property
    def whole(self):
        """Whether its arguments are all there."""
        return self.end.reached or self.opening == "{}"
