"""The output items of OpenAI's Responses API: each writes its own events, and itself as JSON, as bytes.

What an engine says is written on as it came: the inside of a JSON string stays the inside of a JSON string.

Source: OpenAI's published schema (github.com/openai/openai-openapi), OutputItem and ResponseStreamEvent.
"""

import re
from typing import NamedTuple

from stream import dumps, loads


class Strand(NamedTuple):
    """The events of one text of an item: its deltas and its end, and those of the part that it stands in.

    event   response.<event>.delta and .done; `field` is what .done calls the whole text
    part    response.<part>.added and .done; b"" where the text is in no part
    form    the part as JSON, %b being the text
    place   which part of the item it is
    """

    event: bytes
    field: bytes
    part: bytes = b""
    form: bytes = b""
    place: bytes = b""


UNLIKELY = -9999.0  # OpenAI's logprob for what is hardly possible: JSON has no infinity
FIRST = b',"content_index":0'
TEXT = Strand(
    b"output_text",
    b"text",
    b"content_part",
    b'{"type":"output_text","text":"%b","annotations":[],"logprobs":%b}',
    FIRST,
)
REFUSAL = Strand(
    b"refusal", b"refusal", b"content_part", b'{"type":"refusal","refusal":"%b"}', FIRST
)
THOUGHT = Strand(
    b"reasoning_text", b"text", b"content_part", b'{"type":"reasoning_text","text":"%b"}', FIRST
)
SUMMARY = Strand(
    b"reasoning_summary_text",
    b"text",
    b"reasoning_summary_part",
    b'{"type":"summary_text","text":"%b"}',
    b',"summary_index":0',
)
ARGUMENTS = Strand(b"function_call_arguments", b"arguments")
INPUT = Strand(b"custom_tool_call_input", b"input")


class Tool(NamedTuple):
    """A tool as the client named it: kind "function" or "custom"."""

    kind: str
    name: str
    namespace: str | None = None


class Pen:
    """Writes the events of one response, and knows what its items have in common.

    token     hexadecimal digits, as bytes, of which no other response has the same; the ids are made from them
    options   an Options
    number    of the next event;  logprobs  those of the chunk that is being read
    """

    def __init__(self, token, options):
        self.token, self.options, self.number, self.logprobs = token, options, 0, []

    def count(self):
        self.number += 1
        return self.number - 1

    def event(self, name, fields):
        """An event with its sequence number. fields: the inside of a JSON object."""
        return b'event: response.%b\ndata: {"type":"response.%b",%b,"sequence_number":%d}\n\n' % (
            name,
            name,
            fields,
            self.count(),
        )


class Item:
    """One item of the output while it is made.

    pen      the Pen of its response
    index    its place in the output
    said     the pieces of its text;  final  the item as JSON, once it is closed
    before, after   what stands around a text in a delta of its first strand; others: the same of the others
    """

    prefix, strands, beside = b"", (), b""  # beside: what stands beside a delta

    def __init__(self, pen, index):
        self.pen, self.index, self.said, self.final = pen, index, [], None
        self.id = b"%b_%b%02x" % (self.prefix, pen.token, index)
        self.place = b'"item_id":"%b","output_index":%d' % (self.id, index)
        (self.before, self.after), *self.others = map(self.around, self.strands)

    def around(self, strand):
        name = b"response.%b.delta" % strand.event
        return (
            b'event: %b\ndata: {"type":"%b",%b%b,"delta":"'
            % (name, name, self.place, strand.place),
            b'",%b"sequence_number":' % self.beside,
        )

    # -- events

    def open(self):
        """Those of its beginning."""
        return self.as_a_whole(b"output_item.added", self.json(b"", b"in_progress")) + b"".join(
            self.event(strand, strand.part + b".added", b'"part":%b' % self.part(strand, b""))
            for strand in self.strands
            if strand.part
        )

    def say(self, text):
        """Those of one more piece of text, the inside of a JSON string."""
        self.said.append(text)
        pen = self.pen
        out = b"%b%b%b%d}\n\n" % (
            self.before,
            text,
            self.after,
            pen.number,
        )  # the hot path: no JSON, no call
        pen.number += 1
        for before, after in self.others:
            out += b"%b%b%b%d}\n\n" % (before, text, after, pen.number)
            pen.number += 1
        return out

    def close(self, status):
        """Those of its end, b"completed" or b"incomplete"."""
        last = self.last_words() if status == b"completed" else b""
        out = self.say(last) if last else b""
        text = b"".join(self.said)
        self.final = self.json(text, status)
        return (
            out
            + b"".join(self.ends(strand, text) for strand in self.strands)
            + self.as_a_whole(b"output_item.done", self.final)
        )

    def ends(self, strand, text):
        out = self.event(
            strand, strand.event + b".done", b'%b"%b":"%b"' % (self.told(), strand.field, text)
        )
        if strand.part:
            out += self.event(
                strand, strand.part + b".done", b'"part":%b' % self.part(strand, text)
            )
        return out

    def event(self, strand, name, fields):
        return self.pen.event(name, b"%b%b,%b" % (self.place, strand.place, fields))

    def as_a_whole(self, name, item):
        return self.pen.event(name, b'"output_index":%d,"item":%b' % (self.index, item))

    # -- what the kinds of items differ in

    def json(self, text, status):
        """The item with this text."""
        raise NotImplementedError

    def part(self, strand, text):
        return strand.form % text

    def told(self):
        """What a .done event says beside the text."""
        return b""

    def last_words(self):
        """What is still to be said before the end."""
        return b""

    @property
    def whole(self):
        """Whether nothing more can follow."""
        return True

    def so_far(self):
        return self.final or self.json(b"".join(self.said), b"incomplete")


class Message(Item):
    """What the model says."""

    kind, prefix, strands, beside, logprobs = "text", b"msg", (TEXT,), b'"logprobs":[],', ()

    def told(self):
        return b'"logprobs":%b,' % dumps(self.logprobs)

    def part(self, strand, text):
        return strand.form % (text, dumps(self.logprobs))

    def json(self, text, status):
        parts = b"" if status == b"in_progress" else self.part(self.strands[0], text)
        return b'{"id":"%b","type":"message","status":"%b","role":"assistant","content":[%b]}' % (
            self.id,
            status,
            parts,
        )


class LoggedMessage(Message):
    """The same with `logprobs`, its tokens."""

    def __init__(self, pen, index):
        self.logprobs = []
        super().__init__(pen, index)

    def say(self, text):
        tokens = spoken(unquoted(text), self.pen.logprobs)
        if not tokens:
            return super().say(text)
        self.said.append(text)
        self.logprobs += tokens
        return b'%b%b","logprobs":%b,"sequence_number":%d}\n\n' % (
            self.before,
            text,
            dumps(tokens),
            self.pen.count(),
        )


class Refused(Message):
    """A message in which the model declines."""

    kind, strands, beside, told, part = "refusal", (REFUSAL,), b"", Item.told, Item.part


class Thinking(Item):
    """Reasoning: its text, the same as a summary where one is asked for, and sealed where that is."""

    kind, prefix = "reasoning", b"rs"

    def __init__(self, pen, index):
        self.strands = (THOUGHT, SUMMARY) if pen.options.summary else (THOUGHT,)
        super().__init__(pen, index)

    def json(self, text, status):
        begun, seal = status != b"in_progress", self.pen.options.seal
        content, summary = (
            self.part(strand, text) if begun and strand in self.strands else b""
            for strand in (THOUGHT, SUMMARY)
        )
        sealed = b',"encrypted_content":%b' % dumps(seal(unquoted(text))) if begun and seal else b""
        return b'{"id":"%b","type":"reasoning","status":"%b","summary":[%b],"content":[%b]%b}' % (
            self.id,
            status,
            summary,
            content,
            sealed,
        )


class Call(Item):
    """A call of a function. tool: the Tool that the client knows it as; ident: the id of the call."""

    kind, prefix, strands, type, field = "call", b"fc", (ARGUMENTS,), b"function_call", b"arguments"

    def __init__(self, pen, index, tool, ident):
        self.name = b'"name":%b,' % dumps(tool.name)
        namespace = b'"namespace":%b,' % dumps(tool.namespace) if tool.namespace else b""
        self.who = b'"call_id":%b,%b%b' % (dumps(ident), namespace, self.name)
        super().__init__(pen, index)

    def take(self, piece):
        """The events of a piece of its arguments, as the engine gives them."""
        return self.say(quoted(piece)) if piece else b""

    def told(self):
        return self.name

    def last_words(self):
        return b"" if self.said else b"{}"

    @property
    def whole(self):
        return is_json(unquoted(b"".join(self.said)))

    def json(self, text, status):
        return b'{"id":"%b","type":"%b","status":"%b",%b"%b":"%b"}' % (
            self.id,
            self.type,
            status,
            self.who,
            self.field,
            text,
        )


class CustomCall(Call):
    """A call of a custom tool, whose input is any text. The engine gives it as {"input": "the text"}."""

    prefix, strands, type, field, told = b"ctc", (INPUT,), b"custom_tool_call", b"input", Item.told

    def __init__(self, pen, index, tool, ident):
        self.raw, self.inside = [], Inside()
        super().__init__(pen, index, tool, ident)

    def take(self, piece):
        self.raw.append(piece)
        text = self.inside.feed(piece)
        return self.say(text) if text else b""

    def last_words(self):
        return b"" if self.inside.found else quoted(input_of("".join(self.raw)))

    @property
    def whole(self):
        return is_json("".join(self.raw))


# ---- a custom tool's input

HEX = "[0-9a-fA-F]"
HIGH, LOW = (
    rf"\\u[dD][89abAB]{HEX}{{2}}",
    rf"\\u[dD][c-fC-F]{HEX}{{2}}",
)  # the two halves of a character


class Inside:
    """Gives the text out of {"input": "the text"} while it arrives: the inside of a JSON string, no escape and no pair of
    surrogates cut in two. `found`: it is such an object; else all that came is to be looked at in the end."""

    OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    BEGUN = re.compile(
        r'\s*(?:\{\s*(?:"(?:i(?:n(?:p(?:ut?)?)?)?)?)?)?\Z|\s*\{\s*"input"\s*(?::\s*)?\Z'
    )
    CONTENT = re.compile(
        rf'(?:[^"\\]|{HIGH}{LOW}|{HIGH}(?!(?:\\(?:u{HEX}{{0,3}})?)?\Z)|(?!{HIGH})\\u{HEX}{{4}}'
        rf'|\\u(?!{HEX}{{4}})(?!{HEX}{{0,3}}\Z)|\\[^u])*+',
        re.S,
    )
    ODD = re.compile(
        rf'{HIGH}{LOW}|(\\u[dD][89a-fA-F]{HEX}{{2}})|\\(?:u{HEX}{{4}}|["\\/bfnrt])|(\\)|([\x00-\x1f])'
    )

    def __init__(self):
        self.held, self.found, self.over = "", False, False

    def feed(self, piece):
        """The next bytes of the text, perhaps none."""
        if self.over:
            return b""
        self.held += piece
        if not self.found:
            opening = self.OPENING.match(self.held)
            if not opening:
                self.over = not self.BEGUN.match(self.held)
                return b""
            self.found, self.held = True, self.held[opening.end() :]
        content = self.CONTENT.match(self.held)[0]
        self.held = self.held[len(content) :]
        self.over = self.held[:1] == '"'
        return self.ODD.sub(mended_escape, content).encode("utf-8", "replace")


def mended_escape(found):
    """An escape in a JSON string; what is no good one, and what may not stand in a string, becomes one."""
    lone, slash, control = found.groups()
    return (
        r"\ufffd" if lone else r"\\" if slash else f"\\u{ord(control):04x}" if control else found[0]
    )


def input_of(raw):
    """The text that is meant for a custom tool by arguments of another form than it was offered with."""
    try:
        value = loads(raw.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return raw
    if isinstance(value, dict):
        value = (
            value["input"]
            if "input" in value
            else next(iter(value.values()))
            if len(value) == 1
            else None
        )
    return value if isinstance(value, str) else raw


# ---- small things


def spoken(text, logprobs):
    """The logprobs of a text, among those of its chunk, where thoughts and the turn's end stand too."""
    tokens = [str(token.get("token")) for token in logprobs]
    begin, at, found = "".join(tokens).rfind(text), 0, []
    for token, given in zip(tokens, logprobs):
        if begin < 0 or begin <= at < begin + len(text):
            found.append(logprob_of(given))
        at += len(token)
    return found


def logprob_of(given):
    """A token's logprob with the fields that the schema wants."""
    top = given.get("top_logprobs")
    return {
        **bare_logprob(given),
        "top_logprobs": [bare_logprob(one) for one in top if isinstance(one, dict)]
        if isinstance(top, list)
        else [],
    }


def bare_logprob(given):
    token = str(given.get("token"))
    logprob, raw = given.get("logprob"), given.get("bytes")
    return {
        "token": token,
        "logprob": max(logprob, UNLIKELY) if isinstance(logprob, (int, float)) else 0,
        "bytes": raw if raw and isinstance(raw, list) else list(token.encode("utf-8", "replace")),
    }


def is_json(text):
    try:
        loads(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return True


def quoted(text):
    """The inside of a text's JSON string."""
    return dumps(text)[1:-1]


def unquoted(text):
    """The text whose JSON string has this inside."""
    return loads(b'"%b"' % text)
