"""Long work in steps, between which others have their turn: above all JSON that is too large to be
read or written in one go. Pure: whoever runs an event loop says what happens between two steps.

What is small is done at once, as ever.
"""

import re
from itertools import repeat

import orjson

from values import dumps, loads

LARGE = 1 << 16  # bytes that are read, or written, in one step
MOST_TEXT = 32 << 20  # bytes of one text in memory: all its characters are as wide as its widest
MOST_VALUES = 300_000  # objects and lists in what is read: each costs time and a hundred bytes
DEEPEST = 200  # large values inside each other
SMALL = 1 << 15  # what `weight` says of a value that is written in one step
MANY = 16  # items, from which on there are pauses between them
FEW = 1000  # items that are let go in one step
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

SPACE = rb"[ \t\n\r]*+"
STRING = rb'"(?:[^"\\]++|\\.)*+"'


def balanced(depth):
    """Matches what may stand inside brackets, with so many of them inside each other."""
    inside = rb'[^"{}\[\]]++|' + STRING
    for _ in range(depth):
        inside = rb'[^"{}\[\]]++|' + STRING + rb"|[{\[](?:" + inside + rb")*+[}\]]"
    return inside


NESTED = STRING + rb"|[{\[](?:" + balanced(3) + rb")*+[}\]]"
ITEM = rb'(?:[^"{}\[\],]++|' + NESTED + rb")*+"
# As many whole items as there are, each with its comma; and the last one, with what closes them.
ITEMS = re.compile(rb"(?:" + ITEM + rb",)*+", re.S)
LAST = re.compile(ITEM + rb"(?=[}\]])", re.S)
SCALARS = re.compile(rb'[^"{}\[\]]*+')
SCALAR = re.compile(rb'[^"{}\[\],]*+')
KEY = re.compile(SPACE + rb"(" + STRING + rb")" + SPACE + rb":" + SPACE, re.S)
BLANK = re.compile(SPACE)
# The inside of a string up to its end, or to an escape that is not all there: half a character's
# escape waits for that of its other half.
HIGH = rb"\\u[dD][89abAB].."
LOW = rb"\\u[dD][c-fC-F].."
NO_LOW = rb"[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]"
INSIDE = re.compile(
    rb'(?:[^"\\]++|%b(?:%b|(?=%b))|(?!%b)\\u....|\\[^u])*+' % (HIGH, LOW, NO_LOW, HIGH), re.S
)

between = []  # functions that let others have their turn, if it is time


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


# ---- reading


class Raw:
    """A large value that was looked through and not read: it goes on as it came.

    parts  its JSON, as a list of bytes or memoryviews
    """

    def __init__(self, parts):
        self.parts = parts

    def value(self):
        """What it stands for."""
        return Reader(b"".join(self.parts), opens_all=True).whole()


def read(text, each=None, strict=False):
    """JSON (bytes or a bytearray) as a value, as values.loads. Raises ValueError, RecursionError.

    Of a large text, values that are large themselves are a Raw where nobody here looks into them.

    each  of a large text only: (a name, a function), or None. The items of the list under that name
          in the outermost object go through the function as they are read
    strict  whether what JSON has not is refused
    """
    if len(text) <= LARGE:
        return loads(bytes(text))
    reader = Reader(text, each)
    if strict:
        reader.loads = orjson.loads
    return reader.whole()


class Reader:
    """Reads one JSON text. Its methods take a place in it, and give a value and the place behind.

    A run of small items goes to the parser together; only what is large itself is looked into.

    begin  where the part of a Raw begins that is looked through
    """

    def __init__(self, text, each=None, opens_all=False):
        self.text = text
        self.loads = loads
        self.name, self.each = each or (None, None)
        self.opens_all = opens_all
        self.values_left = MOST_VALUES
        if opens_all:
            self.values_left *= 10
        self.depth = 0
        self.begin = 0

    def whole(self):
        """What the text stands for."""
        value, at = self.value(0, [])
        if self.blank(at) < len(self.text):
            raise ValueError("something follows the value")
        return value

    def value(self, at, around, name="", each=None):
        """The value that begins there, behind white space perhaps. `around`: what it stands in,
        `name`: under which name."""
        pause()
        at = self.blank(at)
        first = bytes(self.text[at : at + 1])
        if first == b'"':
            return self.string(at + 1, keeps=not isinstance(around, Raw))
        if first not in CLOSERS:
            end = SCALAR.match(self.text, at, at + LARGE).end()  # of a number or a word
            return self.loads(bytes(self.text[at:end])), end
        self.depth += 1
        if self.depth > DEEPEST:
            raise RecursionError
        if isinstance(around, Raw):
            value = self.container(at + 1, first, around, None)
        elif isinstance(around, dict) and name not in OPENED and not self.opens_all:
            value = self.raw(at, first)
        else:
            value = self.container(at + 1, first, self.loads(first + CLOSERS[first]), each)
        self.depth -= 1
        return value

    def raw(self, at, opener):
        """What begins there as a Raw."""
        found = Raw([])
        self.begin = at
        _, end = self.container(at + 1, opener, found, None)
        found.parts.append(memoryview(self.text)[self.begin : end])
        return found, end

    def container(self, at, opener, found, each):
        """An object, a list or a Raw with the items that begin there."""
        comma = False  # one has come, so that another item must follow
        while True:
            pause()
            end = self.items(at)
            if end > at:
                self.add(found, opener, at, end - 1, each)
                at = end
                comma = True
                continue
            last = LAST.match(self.text, at, at + LARGE)
            if last:
                if comma or last[0].strip():
                    self.add(found, opener, at, last.end(), each)
                return found, self.closed(last.end(), opener)
            at = self.blank(self.large_item(at, opener, found, each))
            if self.text[at : at + 1] != b",":
                return found, self.closed(at, opener)
            at += 1
            comma = True

    def items(self, at):
        """Where a run of small items ends, behind its last comma."""
        run = SCALARS.match(self.text, at, at + LARGE).end()
        comma = self.text.rfind(b",", at, run)  # numbers alone, which is found out fastest
        if comma >= 0 and run - at > LARGE // 2:
            return comma + 1
        return ITEMS.match(self.text, at, at + LARGE).end()

    def add(self, found, opener, begin, end, each):
        """Add the items that stand there."""
        text = self.text[begin:end]
        if not text.strip():
            raise ValueError("an item is missing")
        text = b"".join((opener, text, CLOSERS[opener]))
        if isinstance(found, Raw):
            self.look_through(text, found, begin, end)
            return
        self.values_left -= text.count(b"{") + text.count(b"[")
        if self.values_left < 0:
            raise ValueError("it holds values beyond all bounds")
        items = self.loads(text)
        if isinstance(found, dict):
            found.update(items)
        elif each is None:
            found += items
        else:
            for item in items:
                pause()
                found.append(each(item))

    def look_through(self, text, found, begin, end):
        """Items of a Raw: what only a lenient reader takes is written anew."""
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError:
            again = dumps(self.loads(text))[1:-1]
            found.parts += [memoryview(self.text)[self.begin : begin], again]
            self.begin = end

    def large_item(self, at, opener, found, each):
        """Add an item that is too large for one step. Returns the place behind it."""
        if opener == b"[":
            item, at = self.value(at, found)
            if isinstance(found, list):
                found.append(each(item) if each else item)
            return at
        key = KEY.match(self.text, at, at + LARGE)
        if not key:
            raise ValueError("a name is missing, or too long")
        name = self.loads(key[1])
        if self.depth == 1 and name == self.name:
            each = self.each
        item, at = self.value(key.end(), found, name, each)
        if isinstance(found, dict):
            found[name] = item
        return at

    def string(self, at, keeps):
        """The text whose inside begins there. `keeps`: whether anybody wants it."""
        parts = []
        width = 1
        length = 0
        closes = False
        while not closes:
            pause()
            end = self.inside(at)
            closes = self.text[end : end + 1] == b'"'
            if end == at and not closes:
                raise ValueError("a text does not end, or holds what is no escape")
            part = self.loads(b'"%b"' % self.text[at:end])
            at = end
            if keeps:
                parts.append(part)
                width = max(width, width_of(part))
                length += len(part)
            if length * width > MOST_TEXT:
                raise ValueError("a text is beyond all bounds")
        pause()
        return "".join(parts), at + 1

    def inside(self, at):
        """The place behind a part of a string, which ends at no half of anything."""
        stop = min(at + LARGE, len(self.text))
        quote = self.text.find(b'"', at, stop)
        end = stop if quote < 0 else quote
        if self.text.find(b"\\", at, end) >= 0:
            end = INSIDE.match(self.text, at, stop).end()
        return end - self.begun_character(end)

    def begun_character(self, end):
        """How many bytes before that place belong to a character that goes on behind it."""
        if end == len(self.text) or self.text[end] & 0xC0 != 0x80:
            return 0
        for size in range(1, 4):
            if self.text[end - size] & 0xC0 == 0xC0:
                return size
        return 0

    def blank(self, at):
        """The place behind white space."""
        while (end := BLANK.match(self.text, at, at + LARGE).end()) > at:
            pause()
            at = end
        return at

    def closed(self, at, opener):
        """The place behind the bracket there. Raises ValueError where it is another one."""
        if self.text[at : at + 1] != CLOSERS[opener]:
            raise ValueError("brackets do not fit")
        return at + 1


def width_of(text):
    """How many bytes each character of a text has in memory."""
    if text.isascii():
        return 1
    most = max(text)
    if most < "\u0100":
        return 1
    return 2 if most < "\U00010000" else 4


# ---- writing


def write(value):
    """A value as JSON, as values.dumps: bytes, or a list of bytes where it is large."""
    if weight(value) <= SMALL:
        return dumps(value)
    return list(pieces_of(value))


def joined(value, before=b"", after=b""):
    """The same as bytes, with others before and after it."""
    if weight(value) <= SMALL:
        return before + dumps(value) + after
    whole = b"".join([before, *pieces_of(value), after])
    pause()
    return whole


def pieces_of(value):
    """The JSON of a large value, piece by piece."""
    pause()
    if isinstance(value, Raw):
        yield from pieces_of_raw(value)
    elif isinstance(value, str):
        yield from pieces_of_text(value)
    elif isinstance(value, (dict, list)):
        yield from pieces_of_container(value)
    else:
        yield dumps(value)


def pieces_of_text(text):
    yield b'"'
    for at in range(0, len(text), LARGE):
        pause()
        yield dumps(text[at : at + LARGE])[1:-1]
    yield b'"'


def pieces_of_raw(raw):
    for part in raw.parts:
        for at in range(0, len(part), LARGE):
            pause()
            yield part[at : at + LARGE]


def pieces_of_container(value):
    """Small items go to the writer together, as many as are a step."""
    is_object = isinstance(value, dict)
    opener = b"{" if is_object else b"["
    mark = opener
    some = []  # (name, item), the name being None in a list
    heavy = 0  # their weight
    for name, item in value.items() if is_object else zip(repeat(None), value):
        more = weight(item) + len(name or "")
        if some and heavy + more > SMALL:
            yield mark + items_of(some)
            pause()
            mark = b","
            some = []
            heavy = 0
        if more > SMALL:
            yield mark if name is None else b"%b%b:" % (mark, dumps(name))
            yield from pieces_of(item)
            mark = b","
        else:
            some.append((name, item))
            heavy += more
    if some:
        yield mark + items_of(some)
    elif mark == opener:
        yield opener
    yield CLOSERS[opener]


def items_of(some):
    """What stands between the brackets round (name, item) pairs, the name being None in a list."""
    if some[0][0] is None:
        return dumps([item for _, item in some])[1:-1]
    return dumps(dict(some))[1:-1]


def weight(value):
    """How much work a value is, about in bytes of its JSON; of a large one only that it is over
    SMALL."""
    total = 0
    ahead = [value]
    while ahead and total <= SMALL:
        one = ahead.pop()
        kind = type(one)
        total += 8
        if kind is str:
            total += len(one)
        elif kind is Raw:
            total += SMALL
        elif kind is dict or kind is list:
            total += 8 * len(one)
            if total <= SMALL:
                ahead += one if kind is list else [*one, *one.values()]
    return total


def let_go(value):
    """Take a large value apart, which nobody needs any more: at once, that would take long."""
    ahead = [value]
    while ahead:
        pause()
        one = ahead.pop()
        while one:
            if isinstance(one, dict):
                some = [one.popitem()[1] for _ in range(min(FEW, len(one)))]
            else:
                some = one[-FEW:]
                del one[-FEW:]
            ahead += [item for item in some if isinstance(item, (dict, list))]
            pause()
