"""A tool call that arrives in pieces, made what Anthropic's clients take: its input is an object.

Source: what the accumulators of Anthropic's SDKs insist on.
"""

from dialects.read import mended
from mending.tool_calls import ObjectEnd


class ToolCall:
    """A tool call on its way to the client.

    state     of its content block: "waiting" to begin, "open" or "closed"
    held      pieces of its arguments that the client has not got: all of them until they are seen
              to be an object. The SDKs raise at anything else, so in the end it is put into one
    opening   the arguments without white space, while they are held
    """

    def __init__(self):
        self.state = "waiting"
        self.held = []
        self.opening = ""
        self.end = ObjectEnd()

    def take(self, piece):
        """Add a piece, an entry of a delta's tool_calls that stream.py has mended."""
        self.held.append(piece["function"].get("arguments", ""))

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
