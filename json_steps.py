"""JSON in steps: a large text is read, and a large value written, some hundred thousand bytes at a
time, since orjson lets nobody else run while it works. What is valid orjson alone decides.

A step reads as many whole members of an object or a list as fit into it. A member that fits into
none is opened, and its own members are read in the same way.

To let go of a million values takes its time too: who reads in a thread sets `kept` to a list, gets
all values there, and gives it to `let_go` in the end.
"""

import json
import re
from contextvars import ContextVar
from typing import NamedTuple

import orjson

from values import dumps

SHORT = 1 << 17  # bytes of a text that is read as it is: 3 ms if they are all brackets
LONG = 2 << 20  # bytes of one that is never read so
FEW = 20_000  # values of one between these that is: 3 ms
STEP = 1 << 16  # bytes of a longer one that are read in one go: to find its members costs more
LIGHT = 1 << 18  # bytes that are written in one go, about
DEEPEST = 1000  # objects and lists in each other
LEVELS = 6  # of objects and lists that a member may have which is read in one step
DENSE = 32  # bytes for a comma, colon or bracket: with less of them these are no text's
MARKS = (b",", b":", b"[", b"{")
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
LAST = rb"([\]}])"


def member(levels, apart):
    """An expression for a value with its name and white space. `apart`: the bytes that it ends at,
    beside brackets."""
    inner = rb'[^"\[\]{}' + apart + rb"]++|" + STRING
    if levels:
        inner += rb"|[\[{]" + member(levels - 1, b"") + rb"[\]}]"
    return rb"(?:" + inner + rb")*+"


MEMBER = member(LEVELS, b",")
# Whole members with a comma each, or all up to the end of what holds them.
MEMBERS = re.compile(rb"(?:" + MEMBER + rb",)*+(?:" + MEMBER + rb"([\]}]))?", re.S)
NAME = re.compile(rb"(" + STRING + rb")[ \t\r\n]*:", re.S)
LONG_STRING = re.compile(STRING, re.S)
NUMBER = re.compile(rb"[a-z0-9.+E-]{1,1000}")  # or a word; a longer one is no number for anybody
SPACES = b" \t\r\n"
SPACE = re.compile(rb"[ \t\r\n]*")
CLOSING = {dict: b"}", list: b"]"}

kept = ContextVar("values that were read and written", default=None)


class Most(NamedTuple):
    """How many values a text may hold, names included, and how many of them objects and lists."""

    values: int
    holders: int


class TooMany(ValueError):
    """There are more of them. Its text says of what, and how many there may be."""


def loads(text, most):
    """A JSON text (bytes) as a value. Raises ValueError, RecursionError; TooMany where it holds
    more than that (a Most): a short one never does."""
    if is_light(text):
        return exact(text)
    reader = Reader(bytes(text), most)
    try:
        return reader.read()
    finally:
        keep(reader.root)


def is_light(text):
    """Whether a text is read in a few milliseconds."""
    return len(text) <= SHORT or len(text) <= LONG and sum(map(text.count, MARKS)) <= FEW


def keep(value):
    """Have a value let go of in pieces, where somebody does that. Returns it."""
    values = kept.get()
    if values is not None:
        values.append(value)
    return value


def let_go(values):
    """Let go of a list of values piece by piece: of each object and list after what holds it."""
    for value in values:  # while it grows
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, list):
            continue
        values.extend(inner for inner in value if isinstance(inner, (dict, list)))
    value = None
    values.reverse()
    while values:
        values.pop()


def exact(text):
    """A short JSON text as a value. Raises ValueError, RecursionError."""
    value = orjson.loads(text)
    if isinstance(value, dict) and any(map(is_large_float, value.values())):
        return json.loads(text)
    return value


def is_large_float(value):
    """Whether a value may be a whole number, such as a large seed, of which orjson made a float."""
    return isinstance(value, float) and abs(value) >= 1 << 63


class Reader:
    """Reads one text.

    at     how far it was read
    most   a Most
    values, holders   how many there were
    root   the outermost object or list
    open   the objects and lists that are not read to their end, the innermost last
    fresh  whether nothing of the innermost was read yet
    """

    def __init__(self, text, most):
        self.text = text
        self.most = most
        self.values = 0
        self.holders = 0
        self.at = 0
        self.open = []
        self.root = None
        self.fresh = True

    def read(self):
        value = self.value()
        while self.open:
            self.members()
        if self.skip() != b"":
            raise self.bad("unexpected content after document")
        return value

    def members(self):
        """The next step of the innermost object or list."""
        inside = self.open[-1]
        found = MEMBERS.match(self.text, self.at, self.at + STEP)
        if found.end() == self.at:
            self.member(inside)
            return
        part = self.text[self.at : found.end() - 1]
        if part.strip() or not (found[1] and self.fresh):
            self.take(inside, part)
        self.at = found.end()
        self.fresh = False
        if found[1]:
            self.close(found[1])
            self.go_on()

    def take(self, inside, part):
        """Read members, and add them."""
        if not part.strip():
            raise self.bad("unexpected character")
        self.count(part)
        try:
            if isinstance(inside, list):
                inside.extend(orjson.loads(b"[%b]" % part))
            elif len(self.open) > 1:
                inside.update(orjson.loads(b"{%b}" % part))
            else:
                inside.update(exact(b"{%b}" % part))
        except orjson.JSONDecodeError as error:
            raise self.bad(error.msg) from None

    def member(self, inside):
        """A single member that fits into no step, or has too many levels for it."""
        name = None
        char = self.skip()
        if isinstance(inside, dict):
            found = NAME.match(self.text, self.at)
            if not found:
                raise self.bad("unexpected character")
            name = self.one(found[1])
            self.at = found.end()
            char = self.skip()
        if not char or char in b",]}":
            raise self.bad("unexpected character")
        value = self.value()
        if isinstance(inside, dict):
            inside[name] = value
        else:
            inside.append(value)
        if not isinstance(value, (dict, list)):
            self.fresh = False
            self.go_on()

    def value(self):
        """A value, of which an object or a list is only opened."""
        char = self.skip()
        if char and char in b"[{":
            self.at += 1
            self.add(1, 1)
            value = [] if char == b"[" else {}
            self.start(value)
            return value
        found = LONG_STRING.match(self.text, self.at) or NUMBER.match(self.text, self.at)
        if not found:
            raise self.bad("unexpected character")
        value = self.one(found[0])
        self.at = found.end()
        return value

    def start(self, value):
        """An object or a list begins."""
        if not self.open:
            self.root = value
        self.open.append(value)
        self.fresh = True
        if len(self.open) > DEEPEST:
            raise self.bad("recursion limit exceeded")

    def one(self, text):
        """A text or a number."""
        self.add(1, 0)
        try:
            if len(self.open) == 1 and isinstance(self.root, dict):
                return exact(b'{"":%b}' % text)[""]
            return orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise self.bad(error.msg) from None

    def go_on(self):
        """What follows a member: a comma, or the end of what holds it, and so on outwards."""
        while self.open:
            char = self.skip()
            if not char or char not in b",]}":
                raise self.bad("unexpected character")
            self.at += 1
            if char == b",":
                return
            self.close(char)

    def close(self, char):
        """The end of the innermost object or list."""
        if CLOSING[type(self.open.pop())] != char:
            raise self.bad("unexpected character")
        self.fresh = False

    def skip(self):
        """Go to what follows white space. Returns its first byte; b"" at the end."""
        while (char := self.text[self.at : self.at + 1]) and char in SPACES:
            self.at = SPACE.match(self.text, self.at, self.at + STEP).end()
        return char

    def count(self, part):
        """Count the values of some members."""
        marks = sum(map(part.count, MARKS))
        if marks * DENSE > len(part):  # otherwise there is room for texts around them
            part = LONG_STRING.sub(b"", part)
            marks = sum(map(part.count, MARKS))
        self.add(1 + marks, part.count(b"[") + part.count(b"{"))

    def add(self, values, holders):
        self.values += values
        self.holders += holders
        if self.values > self.most.values:
            raise TooMany(
                f"{self.most.values:,} texts, numbers, objects, lists and names of fields"
            )
        if self.holders > self.most.holders:
            raise TooMany(f"{self.most.holders:,} objects and lists")

    def bad(self, problem):
        return ValueError(f"{problem}: byte {self.at}")


# ---- writing


def dumps_in_steps(value):
    """A value as JSON, a list of bytes. Raises RecursionError."""
    out = []
    write(value, out)
    return out


def write(value, out):
    """Add a value's JSON to a list of bytes."""
    if weight_of(value) <= LIGHT or not isinstance(value, (str, list, dict)):
        out.append(dumps(value))
    elif isinstance(value, str):
        parts = (dumps(value[at : at + LIGHT])[1:-1] for at in range(0, len(value), LIGHT))
        out += [b'"', *parts, b'"']
    else:
        write_members(value, out)


def write_members(value, out):
    """The same of a large object or list: several light members at once, each heavy one alone."""
    begin, end = b"{}" if isinstance(value, dict) else b"[]"
    members = Members(out, type(value), bytes([begin]))
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        members.add(name, inner)
    members.flush()
    out.append(bytes([end]))


class Members:
    """Writes the members of one object or list.

    kind    dict or list
    before  what goes before the next of them
    light   {name or place: value} of those that are written together
    weight  of these
    """

    def __init__(self, out, kind, before):
        self.out = out
        self.kind = kind
        self.before = before
        self.light = {}
        self.weight = 0

    def add(self, name, value):
        """The next one. `name`: its place, in a list."""
        weight = weight_of(value)
        if weight <= LIGHT:
            self.light[name] = value
            self.weight += weight + 8
            if self.kind is dict:
                self.weight += len(name)
            if self.weight > LIGHT:
                self.flush()
            return
        self.flush()
        self.put(dumps(name) + b":" if self.kind is dict else b"")
        write(value, self.out)

    def flush(self):
        if self.light:
            values = self.light
            if self.kind is list:
                values = list(values.values())
            self.put(dumps(values)[1:-1])
            self.light = {}
            self.weight = 0

    def put(self, data):
        self.out += [self.before, data]
        self.before = b","


def weight_of(value):
    """About how many bytes a value's JSON has; of a large one, that it has more than a step."""
    if isinstance(value, str):
        return 2 + len(value)
    weight = 8
    if isinstance(value, dict):
        for name, inner in value.items():
            weight += len(name) + 4 + weight_of(inner)
            if weight > LIGHT:
                break
    elif isinstance(value, list):
        for inner in value:
            weight += weight_of(inner)
            if weight > LIGHT:
                break
    return weight
