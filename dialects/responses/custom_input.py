"""The input of a custom tool, which is any text.

The engine knows such a tool as a function with one string, and gives {"input": "the text"}.
"""

import re

from mending.arguments import CONTENT, mended_content
from values import loads

OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# What can still become one.
BEGUN_OPENING = re.compile(
    r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:ut?)?)?)?)?)?)?\Z|\s*\{\s*"input"\s*(?::\s*)?\Z'
)


class CustomInput:
    """Gives the text out of {"input": "the text"} while it arrives.

    found  whether it is such an object; else all that came is looked at in the end (`input_of`)
    over   nothing more of it can follow
    """

    def __init__(self):
        self.held = ""
        self.found = False
        self.over = False

    def feed(self, piece):
        """The next bytes of the text, perhaps none: inside a JSON string, no escape cut in two."""
        if self.over:
            return b""
        self.held += piece
        if not self.found:
            opening = OPENING.match(self.held)
            if not opening:
                self.over = not BEGUN_OPENING.match(self.held)
                return b""
            self.found = True
            self.held = self.held[opening.end() :]
        content = CONTENT.match(self.held)[0]
        self.held = self.held[len(content) :]
        self.over = self.held[:1] == '"'
        return mended_content(content).encode()


def input_of(arguments):
    """The text that is meant by arguments (a str) of another form than the engine was told."""
    try:
        value = loads(arguments.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return arguments
    if value == {}:
        return ""
    if isinstance(value, dict):
        if "input" in value:
            value = value["input"]
        elif len(value) == 1:
            value = next(iter(value.values()))
    if isinstance(value, str):
        return value
    return arguments
