"""The arguments of a tool call as models write them: JSON, or nearly, that arrives in pieces."""

import re

import orjson

import steps
from errors import UpstreamError
from mending.tool_calls import ObjectEnd

DEEPEST = 100  # brackets in each other; clients' parsers give up at some depth
LONG = 1 << 15  # characters of a string that are mended in one step
HEX = "[0-9a-fA-F]"
# The two escapes of a character outside the basic plane: a high surrogate and a low one.
HIGH = rf"\\u[dD][89abAB]{HEX}{{2}}"
LOW = rf"\\u[dD][c-fC-F]{HEX}{{2}}"
# The inside of a string as far as it is whole: up to its end, or to an escape that still arrives.
CONTENT = re.compile(
    rf'(?:[^"\\]|{HIGH}{LOW}|{HIGH}(?!(?:\\(?:u{HEX}{{0,3}})?)?\Z)|(?!{HIGH})\\u{HEX}{{4}}'
    rf'|\\u(?!{HEX}{{4}})(?!{HEX}{{0,3}}\Z)|\\[^u])*+',
    re.S,
)
PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]*')
ESCAPE = re.compile(
    rf'{HIGH}{LOW}|(?P<half>\\u[dD][89a-fA-F]{HEX}{{2}}|[\ud800-\udfff])'
    rf'|\\(?:u{HEX}{{4}}|["\\/bfnrt])|(?P<backslash>\\)|(?P<control>[\x00-\x1f])'
)
SPACE = re.compile(r"[ \t\n\r]*")
SCALAR = re.compile(
    r"(?:-?(?:0|[1-9][0-9]{0,400}+)(?:\.[0-9]++)?+(?:[eE][+-]?[0-9]{1,400}+)?+"
    r"|true|false|null|NaN|-?Infinity)"
    r"(?=[ \t\n\r]*+(?P<mark>[,\]}]))"
)
NO_VALUE = dict.fromkeys(("NaN", "Infinity", "-Infinity"), "null")  # as JavaScript writes them
SCALAR_BEGUN = re.compile(r"([-+.0-9a-zA-Z]{1,400}+)([ \t\n\r]*+)\Z")
CLOSERS = {"{": "}", "[": "]"}
# What stands before a token -> the marks that may follow, and whether a number or a word may.
MAY_FOLLOW = {
    "nothing": ("{", False),
    "{": ('"}', False),
    "[": ('"{[]', True),
    "key": (":", False),
    ":": ('"{[', True),
    "value": (",}]", False),
    ", in {": ('"', False),
    ", in [": ('"{[', True),
}


def mended_content(text):
    """The inside of a JSON string, of which no escape is cut in two, as JSON has it."""
    return ESCAPE.sub(mended_escape, text)


def mended_escape(found):
    """What an escape in a JSON string should be; models write some that are none."""
    if found["half"]:
        return r"\ufffd"
    if found["backslash"]:
        return r"\\"
    if found["control"]:
        return f"\\u{ord(found['control']):04x}"
    return found[0]


class ObjectText:
    """A JSON object that arrives in pieces, as far as every client can parse it: feed(text) gives
    the next part. Its strings are mended; a number or a word waits for its end.

    whole   its end has come, and nothing more of it is given
    broken  it has gone on as no JSON does, and nothing more of it is given
    """

    def __init__(self):
        self.held = ""  # the beginning of a token
        self.before = "nothing"  # a key of MAY_FOLLOW
        self.in_string = False
        self.open = ""  # the brackets
        self.length = 0  # of what was given
        self.values = (0, "")  # how much of that holds whole values, and the brackets open there
        self.whole = False
        self.broken = False

    def feed(self, text):
        """The next part of it, once this piece has come."""
        if self.in_string and not self.held and len(text) <= LONG and PLAIN.fullmatch(text):
            self.length += len(text)  # as most pieces are
            return text
        if self.before == "nothing" and is_object(text):
            self.whole = True
            self.values = (len(text), "")
            return text
        text = self.held + text
        self.held = ""
        out = []
        at = 0
        while at < len(text) and not (self.whole or self.broken):
            steps.pause()
            read = self.string if self.in_string else self.token
            at, part = read(text, at)
            self.length += len(part)
            out.append(part)
            if self.before in ("value", "{", "[") and not self.in_string:
                self.values = (self.length, self.open)
        return "".join(out)

    def string(self, text, at):
        """(where the inside of a string ends in a text, what is given for it)."""
        parts = []
        size = LONG
        while size > LONG // 2:  # less is read only at its end, or where an escape still arrives
            steps.pause()
            content = CONTENT.match(text, at, at + LONG)[0]
            size = len(content)
            at += size
            parts.append(mended_content(content))
            if text.startswith('"', at):
                self.in_string = False
                return at + 1, "".join(parts) + '"'
        self.held = text[at:]
        return len(text), "".join(parts)

    def token(self, text, at):
        """The same of the next token outside strings, and the white space before it."""
        begin = at
        at = SPACE.match(text, at).end()
        if at == len(text):
            return at, text[begin:]
        space = text[begin:at]
        mark = text[at]
        marks, scalars = MAY_FOLLOW[self.before]
        if mark in marks and self.fits(mark):
            self.take_mark(mark)
            return at + 1, space + mark
        scalar = SCALAR.match(text, at) if scalars else None
        if scalar and self.fits(scalar["mark"]):
            self.before = "value"
            return scalar.end(), space + NO_VALUE.get(scalar[0], scalar[0])
        begun = SCALAR_BEGUN.match(text, at) if scalars else None
        if begun:
            self.held = begun[1] + begun[2][:1]  # more white space says nothing
            return len(text), space
        self.broken = True
        return len(text), space

    def fits(self, mark):
        """Whether a mark that may follow fits the brackets that are open."""
        if mark in "{[":
            return len(self.open) < DEEPEST
        return mark not in "}]" or CLOSERS[self.open[-1]] == mark

    def take_mark(self, mark):
        """Go on behind a mark that may follow."""
        if mark == '"':
            is_key = self.before in ("{", ", in {")
            self.in_string = True
            self.before = "key" if is_key else "value"
        elif mark in "{[":
            self.open += mark
            self.before = mark
        elif mark in "}]":
            self.open = self.open[:-1]
            self.before = "value"
            self.whole = not self.open
        elif mark == ",":
            self.before = ", in " + self.open[-1]
        else:
            self.before = mark


def is_object(text):
    """Whether a text is a JSON object as every client parses it."""
    if text.count("{") + text.count("[") > DEEPEST and depth_of(text) > DEEPEST:
        return False
    if len(text) > steps.LARGE:
        return is_large_object(text)
    try:
        return isinstance(orjson.loads(text.encode()), dict)
    except ValueError:
        return False


def is_large_object(text):
    """The same of a large text. What JSON doesn't have, such as NaN, is read there, and no client
    would."""
    try:
        return isinstance(steps.read(text.encode(), strict=True), dict)
    except (ValueError, RecursionError):
        return False


def depth_of(text):
    """How many brackets are inside each other in a JSON text."""
    end = ObjectEnd()
    end.cut(text)
    return end.deepest


def whole_values(text):
    """What is whole in what an ObjectText gave (a dict): as much as clients read in it. Raises
    UpstreamError where that is more than anybody reads."""
    one = ObjectText()
    one.feed(text)
    length, brackets = one.values
    closers = [CLOSERS[bracket] for bracket in reversed(brackets)]
    try:
        return steps.read((text[:length] + "".join(closers)).encode() or b"{}")
    except (ValueError, RecursionError):
        raise UpstreamError("the arguments of a tool call are beyond all bounds") from None
