"""The input of a custom tool, which is any text.

The engine knows such a tool as a function with one string, and gives {"input": "the text"}.
"""

import re

from values import loads

HEX = "[0-9a-fA-F]"
# The two escapes of a character outside the basic plane: a high surrogate and a low one.
HIGH = rf"\\u[dD][89abAB]{HEX}{{2}}"
LOW = rf"\\u[dD][c-fC-F]{HEX}{{2}}"
OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# What can still become one.
BEGUN_OPENING = re.compile(
    r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:ut?)?)?)?)?)?)?\Z|\s*\{\s*"input"\s*(?::\s*)?\Z'
)
# The inside of the string as far as it is whole: up to its end, or to an escape that still arrives.
CONTENT = re.compile(
    rf'(?:[^"\\]|{HIGH}{LOW}|{HIGH}(?!(?:\\(?:u{HEX}{{0,3}})?)?\Z)|(?!{HIGH})\\u{HEX}{{4}}'
    rf'|\\u(?!{HEX}{{4}})(?!{HEX}{{0,3}}\Z)|\\[^u])*+',
    re.S,
)
ESCAPE = re.compile(
    rf'{HIGH}{LOW}|(?P<half>\\u[dD][89a-fA-F]{HEX}{{2}})|\\(?:u{HEX}{{4}}|["\\/bfnrt])'
    r"|(?P<backslash>\\)|(?P<control>[\x00-\x1f])"
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
        return ESCAPE.sub(mended_escape, content).encode("utf-8", "replace")


def mended_escape(found):
    """What an escape in a JSON string should be; models write some that are none."""
    if found["half"]:
        return r"\ufffd"
    if found["backslash"]:
        return r"\\"
    if found["control"]:
        return f"\\u{ord(found['control']):04x}"
    return found[0]


def input_of(arguments):
    """The text that is meant by arguments (a str) of another form than the engine was told."""
    try:
        value = loads(arguments.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict):
        if "input" in value:
            value = value["input"]
        elif len(value) == 1:
            value = next(iter(value.values()))
    if isinstance(value, str):
        return value
    return arguments
