"""A tool call that arrives in pieces, made what Anthropic's clients take: its input is an object.

Source: what the accumulators of Anthropic's SDKs insist on.
"""

from dialects.messages import ids
from dialects.read import mended
from mending.arguments import ObjectText

CALLER = {"type": "direct"}  # the model itself, not a program that it runs
NOT_YET = ("", "{", "{}")  # beginnings of arguments that could still become anything


class ToolCall:
    """A tool call on its way to the client.

    block     its content block as it begins
    state     of its content block: "waiting" to begin, "open" or "closed"
    held      pieces of its arguments that the client has not got: all of them until they are seen
              to be an object. The SDKs raise at anything else, so in the end it is put into one
    opening   how the arguments begin, without white space
    object    they, if they begin as an object
    """

    def __init__(self, piece):
        """piece: the first of a call, mended, which says what it is called"""
        ident = ids.for_client(piece["id"])
        name = piece["function"]["name"]
        self.block = {"type": "tool_use", "id": ident, "name": name, "input": {}, "caller": CALLER}
        self.state = "waiting"
        self.held = []
        self.opening = ""
        self.object = ObjectText()

    def take(self, piece):
        """Add the arguments in a piece."""
        text = piece["function"].get("arguments", "")
        self.held.append(text)
        if self.opening in NOT_YET:
            self.opening += "".join(text.split())

    def sayable(self):
        """What the client can be given of the arguments now."""
        if not self.opening.startswith('{"'):
            return ""
        text = "".join(self.held)
        self.held = []
        return self.object.feed(text)

    def rest(self):
        """What the client must be given of them in the end."""
        text = "".join(self.held)
        if not text.strip():
            return ""
        return ObjectText().feed(mended(text))

    @property
    def whole(self):
        """Whether nothing of its arguments is still to come."""
        return self.object.whole or self.broken or self.opening == "{}"

    @property
    def broken(self):
        """Whether it began as an object and is none: the client has only the beginning."""
        return self.object.broken


def whole_call(piece):
    """The ToolCall of a plain answer's, all of which is in one piece."""
    tool_call = ToolCall(piece)
    tool_call.take(piece)
    return tool_call
