"""Long work in steps, between which others have their turn: above all JSON that is too large to be
read or written in one go, since orjson lets nobody else run while it works. Pure: whoever runs an
event loop says what happens between two steps. What is small is done at once.

A step reads as many whole members of an object or a list as fit into it. A member that fits into
none is opened, and its own members are read in the same way. What is valid the parser alone
decides: of clients' texts orjson, of engines' values.loads, which is lenient.
"""

import json
import re
from contextvars import ContextVar
from sys import getrefcount
from typing import NamedTuple

import orjson

from values import dumps, loads

LARGE = 1 << 17  # bytes that are read, or written, in one step
LIGHT = 1 << 17  # what `weight` says of a value that is written in one step
COPIED = 1 << 20  # bytes that are copied in one step
LONG = 2 << 20  # bytes of a client's text that is never read at once
FEW = 20_000  # marks in one between these that is: 3 ms, while to find its members costs more
MOST_TEXT = 32 << 20  # bytes of one text in memory: all its characters are as wide as its widest
DEEPEST = 1000  # large values inside each other
LEVELS = 6  # of objects and lists that a member may have which is read in one step
DENSE = 32  # bytes for a comma, colon or bracket: with less of them these are no text's
MANY = 16  # items, from which on there are pauses between them
SOME = 1000  # items that are let go in one step
MARKS = (b",", b":", b"[", b"{")
CLOSERS = {b"{": b"}", b"[": b"]"}
# Names of objects and lists in an engine's answer that are looked into here. Any other large one,
# such as the tokens' logprobs, is passed on without being read.
OPENED = {
    "arguments",
    "choices",
    "completion_tokens_details",
    "content",
    "data",
    "delta",
    "detail",
    "embedding",
    "error",
    "function",
    "message",
    "prompt_tokens_details",
    "tool_calls",
    "usage",
}

SPACE = re.compile(rb"[ \t\r\n]*")
STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
ANY_STRING = re.compile(STRING, re.S)
SCALARS = re.compile(rb'[^"{}\[\]]*+')
NUMBER = re.compile(rb"[A-Za-z0-9.+-]{1,1000}")  # or a word; a longer one is none for anybody


def member(levels, apart):
    """An expression for a value with its name and white space. `apart`: the bytes that it ends at,
    beside brackets."""
    inner = rb'[^"\[\]{}' + apart + rb"]++|" + STRING
    if levels:
        inner += rb"|[\[{]" + member(levels - 1, b"") + rb"[\]}]"
    return rb"(?:" + inner + rb")*+"


MEMBER = member(LEVELS, b",")
# Whole members with a comma each, or all up to the end of what holds them, behind which (group 1)
# there is none.
MEMBERS = re.compile(rb"(?:(?(1)(?!))" + MEMBER + rb"(?:,|([\]}])))*+", re.S)
# The inside of a string up to its end, or to an escape that is not all there: half a character's
# escape waits for that of its other half.
HIGH = rb"\\u[dD][89abAB].."
LOW = rb"\\u[dD][c-fC-F].."
NO_LOW = rb"[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]"
INSIDE = re.compile(
    rb'(?:[^"\\]++|%b(?:%b|(?=%b))|(?!%b)\\u....|\\[^u])*+' % (HIGH, LOW, NO_LOW, HIGH), re.S
)

between = []  # functions that let others have their turn, if it is time
kept = ContextVar("large values of a client's request", default=None)


def pause():
    """Called between two steps, as often as one likes."""
    for give_way in between:
        give_way()


def paced(items):
    """The items of a list, with a pause before each where they are many."""
    if len(items) <= MANY:
        return items
    return with_pauses(items)


def with_pauses(items):
    for item in items:
        pause()
        yield item


def gathered(parts):
    """Parts of bytes as one: no copy of a single one, and in steps where they are large."""
    parts = [part for part in parts if part]
    if len(parts) == 1:
        return parts[0]
    if sum(map(len, parts)) <= COPIED:
        return b"".join(parts)
    whole = bytearray()
    for part in map(memoryview, parts):
        for at in range(0, len(part), COPIED):
            pause()
            whole += part[at : at + COPIED]
    return whole


def gathered_text(texts):
    """Texts as one, in steps where they are long: Python lets a text that nobody else has grow in
    its place."""
    if sum(map(len, texts)) <= COPIED:
        return "".join(texts)
    whole = ""
    for text in with_pauses(texts):
        whole += text
    return whole


# ---- reading


class Most(NamedTuple):
    """How many values a text may hold, names included, and how many of them objects and lists."""

    values: int
    holders: int


# Of an engine's answer: 2,048 embeddings of the longest kind have half as many numbers. Each object
# and list costs time and a hundred bytes.
ANSWER = Most(values=1 << 26, holders=300_000)
PASSED_ON = Most(values=1 << 26, holders=3_000_000)


class TooMany(ValueError):
    """There are more of them. Its text says of what, and how many there may be."""


class Raw:
    """A large value that was looked through and not read: it goes on as it came.

    parts  its JSON, as a list of bytes or memoryviews
    """

    def __init__(self, parts):
        self.parts = parts

    def value(self):
        """What it stands for."""
        return Reader(b"".join(self.parts), PASSED_ON, loads, opens_all=True).read()


def read(text, each=None, strict=False):
    """An engine's JSON (bytes or a bytearray) as a value, as values.loads. Raises ValueError,
    RecursionError.

    Of a large text, values that are large themselves are a Raw where nobody here looks into them.

    each    (a name, a function), or None. The items of a large list under that name in the
            outermost object go through the function as they are read
    strict  of a large text only: whether what JSON has not is refused
    """
    if len(text) <= LARGE:
        return loads(bytes(text))
    return Reader(text, ANSWER, orjson.loads if strict else loads, each).read()


def read_exactly(text, most):
    """A client's JSON (bytes) as a value, as orjson. Raises ValueError, RecursionError; TooMany
    where it holds more than that (a Most): one that is read at once never does.

    Who lets go of what was read, which takes long as well, sets `kept` to a list, and finds it
    there, also where it was not read to its end.
    """
    if len(text) <= LARGE or len(text) <= LONG and sum(map(text.count, MARKS)) <= FEW:
        return exact(text)
    reader = Reader(bytes(text), most, orjson.loads, opens_all=True, outermost=exact)
    try:
        return reader.read()
    finally:
        keep(reader.root)


def keep(value):
    """Have a value let go of in steps, where somebody does that. Returns it."""
    values = kept.get()
    if values is not None and all(value is not other for other in values):
        values.append(value)
    return value


def exact(text):
    """A client's JSON as a value. Raises ValueError, RecursionError."""
    value = orjson.loads(text)
    if isinstance(value, dict) and any(map(is_large_float, value.values())):
        return json.loads(text)
    return value


def is_large_float(value):
    """Whether a value may be a whole number, such as a large seed, of which orjson made a float."""
    return isinstance(value, float) and abs(value) >= 1 << 63


class Reader:
    """Reads one JSON text.

    most    a Most
    loads   the parser
    outermost  the same for the members of the outermost object
    name, each  see `read`
    opens_all  whether nothing becomes a Raw
    at      how far it was read
    values, holders  how many there were
    root    the outermost object or list
    open    (value, its closing bracket) of the objects and lists that are not read to their end,
            the innermost last; the value is a Raw where they stand in one
    fresh   whether nothing of the innermost was read yet
    mapped  the list whose items go through `each`
    begin   where the part of a Raw begins that is looked through
    """

    def __init__(self, text, most, loads, each=None, opens_all=False, outermost=None):
        """Nothing is read yet."""
        self.text = text
        self.most = most
        self.loads = loads
        self.outermost = outermost or loads
        self.name, self.each = each or (None, None)
        self.opens_all = opens_all
        self.at = 0
        self.values = 0
        self.holders = 0
        self.root = None
        self.open = []
        self.fresh = True
        self.mapped = None
        self.begin = 0

    def read(self):
        """What the text stands for."""
        value = self.value()
        while self.open:
            pause()
            self.members(self.open[-1][0])
        if self.skip():
            raise self.bad("unexpected content after document")
        return value

    def members(self, inside):
        """The next step of the innermost object or list."""
        end = self.numbers()
        closing = None
        if not end:
            found = MEMBERS.match(self.text, self.at, self.at + LARGE)
            end = found.end()
            closing = found[1]
        if end == self.at:
            self.member(inside)
            return
        part = self.text[self.at : end - 1]
        if part.strip() or not (closing and self.fresh):
            self.take(inside, part, end - 1)
        self.at = end
        self.fresh = False
        if closing:
            self.close(closing)
            self.go_on()

    def numbers(self):
        """Where members end, behind a comma, that are numbers alone: these are found fastest. 0
        where there are other ones."""
        end = SCALARS.match(self.text, self.at, self.at + LARGE).end()
        if end - self.at < LARGE // 2:
            return 0
        return self.text.rfind(b",", self.at, end) + 1

    def take(self, inside, part, end):
        """Add members that end there."""
        if not part.strip():
            raise self.bad("unexpected character")
        closer = self.open[-1][1]
        text = (b"{%b}" if closer == b"}" else b"[%b]") % part
        if isinstance(inside, Raw):
            self.look_through(text, inside, end)
            return
        self.count(part)
        members = self.parsed(text)
        if isinstance(inside, dict):
            inside.update(members)
        elif inside is self.mapped:
            inside.extend(map(self.each, with_pauses(members)))
        else:
            inside.extend(members)

    def look_through(self, text, raw, end):
        """Members of a Raw: what only a lenient reader takes is written anew."""
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError:
            again = dumps(self.parsed(text))[1:-1]
            raw.parts += [memoryview(self.text)[self.begin : self.at], again]
            self.begin = end

    def member(self, inside):
        """A single member that fits into no step, or has too many levels for it."""
        name = None
        char = self.skip()
        if self.open[-1][1] == b"}":
            if char != b'"':
                raise self.bad("unexpected character")
            name = self.string()
            if self.skip() != b":":
                raise self.bad("unexpected character")
            self.at += 1
            char = self.skip()
        if not char or char in b",]}":
            raise self.bad("unexpected character")
        depth = len(self.open)
        value = self.value(inside, name)
        if isinstance(inside, dict):
            inside[name] = value
        elif isinstance(inside, list):
            inside.append(value)
        if len(self.open) == depth:
            self.fresh = False
            self.map_last(inside)
            self.go_on()

    def map_last(self, inside):
        """The last member of the innermost object or list is whole."""
        if self.mapped is not None and inside is self.mapped:
            inside[-1] = self.each(inside[-1])

    def value(self, inside=None, name=None):
        """A value, of which an object or a list is only opened. `inside`: what it stands in,
        `name`: under which name."""
        char = bytes(self.skip())
        if char in CLOSERS:
            return self.start(char, inside, name)
        if char == b'"':
            return self.string(keeps=not isinstance(inside, Raw))
        found = NUMBER.match(self.text, self.at)
        if not found:
            raise self.bad("unexpected character")
        self.add(1, 0)
        self.at = found.end()
        return self.parsed(b'{"":%b}' % found[0])[""]

    def start(self, char, inside, name):
        """An object or a list begins."""
        self.add(1, 1)
        if isinstance(inside, Raw):
            value = inside
        elif isinstance(inside, dict) and name not in OPENED and not self.opens_all:
            value = Raw([])
            self.begin = self.at
        else:
            value = {} if char == b"{" else []
        if self.each and name == self.name and len(self.open) == 1 and isinstance(value, list):
            self.mapped = value
        if not self.open:
            self.root = value
        self.at += 1
        self.open.append((value, CLOSERS[char]))
        self.fresh = True
        if len(self.open) > DEEPEST:
            raise self.bad("recursion limit exceeded")
        return value

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
        """The end of the innermost object or list, behind its bracket."""
        value, closer = self.open.pop()
        if char != closer:
            raise self.bad("unexpected character")
        self.fresh = False
        outer = self.open[-1][0] if self.open else None
        if isinstance(value, Raw) and outer is not value:
            value.parts.append(memoryview(self.text)[self.begin : self.at])
        self.map_last(outer)

    def parsed(self, text):
        """What a text or some members stand for, with their quotes or brackets."""
        loads = self.loads
        if len(self.open) == 1 and self.open[0][1] == b"}":
            loads = self.outermost
        try:
            return loads(text)
        except orjson.JSONDecodeError as error:
            raise self.bad(error.msg) from None

    def string(self, keeps=True):
        """The text that begins here. `keeps`: whether anybody wants it."""
        self.add(1, 0)
        self.at += 1
        parts = []
        width = 1
        length = 0
        closes = False
        while not closes:
            pause()
            end = self.inside()
            closes = self.text[end : end + 1] == b'"'
            if end == self.at and not closes:
                raise self.bad("a text does not end, or holds what is no escape")
            part = self.parsed(b'"%b"' % self.text[self.at : end])
            self.at = end
            if keeps:
                parts.append(part)
                width = max(width, width_of(part))
                length += len(part)
            if length * width > MOST_TEXT:
                raise self.bad("a text is beyond all bounds")
        pause()
        self.at += 1
        return gathered_text(parts)

    def inside(self):
        """The place behind the next part of a string, which ends at no half of anything."""
        stop = min(self.at + LARGE, len(self.text))
        quote = self.text.find(b'"', self.at, stop)
        end = stop if quote < 0 else quote
        if self.text.find(b"\\", self.at, end) >= 0:
            end = INSIDE.match(self.text, self.at, stop).end()
        return end - self.begun_character(end)

    def begun_character(self, end):
        """How many bytes before that place belong to a character that goes on behind it."""
        if end == len(self.text) or self.text[end] & 0xC0 != 0x80:
            return 0
        for size in range(1, 4):
            if self.text[end - size] & 0xC0 == 0xC0:
                return size
        return 0

    def skip(self):
        """Go to what follows white space. Returns its first byte; none at the end."""
        while (end := SPACE.match(self.text, self.at, self.at + LARGE).end()) > self.at:
            pause()
            self.at = end
        return self.text[self.at : self.at + 1]

    def count(self, part):
        """Count the values of some members."""
        marks = sum(map(part.count, MARKS))
        # Otherwise there is room for texts around them.
        if marks * DENSE > len(part) and b'"' in part:
            part = ANY_STRING.sub(b"", part)
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


def width_of(text):
    """How many bytes each character of a text has in memory."""
    if text.isascii():
        return 1
    most = max(text)
    if most < "\u0100":
        return 1
    return 2 if most < "\U00010000" else 4


# ---- writing


WEIGHED = (str, dict, list, Raw)  # other values are light


def write(value):
    """A value as JSON, as values.dumps: bytes, or a list of bytes where it is large. Raises
    RecursionError."""
    if weight(value) <= LIGHT:
        return dumps(value)
    out = []
    put(value, out)
    return out


def parts_of(value):
    """The same, always as a list."""
    written = write(value)
    return [written] if isinstance(written, bytes) else written


def joined(value, before=b"", after=b""):
    """The same as bytes, with others before and after it."""
    written = write(value)
    if isinstance(written, bytes):
        return before + written + after
    return gathered([before, *written, after])


def put(value, out):
    """Add a large value's JSON to a list of bytes."""
    if isinstance(value, Raw):
        for part in value.parts:
            pause()
            out += [part[at : at + LARGE] for at in range(0, len(part), LARGE)]
    elif isinstance(value, str):
        out.append(b'"')
        for at in range(0, len(value), LARGE):
            pause()
            out.append(dumps(value[at : at + LARGE])[1:-1])
        out.append(b'"')
    else:
        put_members(value, out)


def put_members(value, out):
    """The same of a large object or list: as many light members at once as are a step, each heavy
    one alone."""
    is_object = isinstance(value, dict)
    places = list(value) if is_object else value
    mark = b"{" if is_object else b"["
    closer = CLOSERS[mark]
    at = 0
    many = SOME
    while at < len(places):
        pause()
        some = places[at : at + many]
        if is_object:
            some = {name: value[name] for name in some}
        heavy = weight(some)
        if heavy > LIGHT and len(some) > 1:
            many = len(some) // 2
            continue
        if heavy <= LIGHT:
            out.append(mark + dumps(some)[1:-1])
        elif is_object:
            out.append(b"%b%b:" % (mark, dumps(places[at])))
            out += parts_of(some[places[at]])
        else:
            out += [mark, *parts_of(some[0])]
        at += len(some)
        mark = b","
        if heavy < LIGHT // 2:
            many *= 2
    out.append(closer)


def weight(value):
    """How much work a value is, about in bytes of its JSON; of a large one only that it is over
    LIGHT. Raises RecursionError."""
    if isinstance(value, str):
        return 8 + len(value)
    total = 8
    if isinstance(value, dict):
        for name, inner in value.items():
            total += len(name) + 8 + weight(inner)
            if total > LIGHT:
                break
    elif isinstance(value, list):
        total += 16 * len(value)
        if total <= LIGHT:
            for inner in value:
                if isinstance(inner, WEIGHED):
                    total += weight(inner)
                    if total > LIGHT:
                        break
    elif isinstance(value, Raw):
        total += LIGHT
    return total


def let_go(value):
    """Take a large object or list apart, which nobody needs any more: at once, that would take
    long. Of what is in it, that stays which is still held by anybody."""
    ahead = [value]
    while ahead:
        pause()
        one = ahead.pop()
        # Nobody else holds what only `one` and the call of getrefcount do.
        if one is value or len(one) > SOME and getrefcount(one) == 2:
            while one:
                pause()
                ahead += holders_in(taken(one))
        elif isinstance(one, dict):
            ahead += holders_in(one.values())
        else:
            ahead += holders_in(one)


def taken(value):
    """Some items that are taken out of an object or a list."""
    if isinstance(value, dict):
        return [value.popitem()[1] for _ in range(min(SOME, len(value)))]
    some = value[-SOME:]
    del value[-SOME:]
    return some


def holders_in(items):
    return [item for item in items if isinstance(item, (dict, list)) and item]
