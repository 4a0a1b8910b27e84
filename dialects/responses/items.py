"""The output items of OpenAI's Responses API: each writes its own events, and itself, as bytes.

What an engine says is written on as it came: the inside of a JSON string stays the inside of one.

Source: OpenAI's published schema (github.com/openai/openai-openapi), OutputItem and
ResponseStreamEvent.
"""

from typing import NamedTuple

import steps
from dialects.responses.custom_input import CustomInput, input_of
from dialects.responses.logprobs import logprobs_of
from values import dumps


class TextEvents(NamedTuple):
    """The events of one text of an item, and those of the part that it stands in.

    event   response.<event>.delta and .done
    field   what .done calls the whole text
    part    response.<part>.added and .done; b"" where the text is in no part
    form    the part as JSON, %b being the text
    place   which part of the item it is
    """

    event: bytes
    field: bytes
    part: bytes = b""
    form: bytes = b""
    place: bytes = b""


TEXT = TextEvents(
    event=b"output_text",
    field=b"text",
    part=b"content_part",
    form=b'{"type":"output_text","text":"%b","annotations":[],"logprobs":%b}',
    place=b',"content_index":0',
)
REFUSAL = TextEvents(
    event=b"refusal",
    field=b"refusal",
    part=b"content_part",
    form=b'{"type":"refusal","refusal":"%b"}',
    place=b',"content_index":0',
)
REASONING = TextEvents(
    event=b"reasoning_text",
    field=b"text",
    part=b"content_part",
    form=b'{"type":"reasoning_text","text":"%b"}',
    place=b',"content_index":0',
)
SUMMARY = TextEvents(
    event=b"reasoning_summary_text",
    field=b"text",
    part=b"reasoning_summary_part",
    form=b'{"type":"summary_text","text":"%b"}',
    place=b',"summary_index":0',
)
ARGUMENTS = TextEvents(event=b"function_call_arguments", field=b"arguments")
INPUT = TextEvents(event=b"custom_tool_call_input", field=b"input")


class EventWriter:
    """Writes the events of one response, and knows what its items have in common.

    token     hexadecimal digits (bytes), other ones for each response: ids are made of them
    options   an Options of events.py
    number    of the next event
    plain     no event is wanted, only the items
    logprobs  those of the chunk that is being read
    """

    def __init__(self, token, options):
        self.token = token
        self.options = options
        self.number = 0
        self.plain = False
        self.logprobs = []

    def next_number(self):
        self.number += 1
        return self.number - 1

    def event(self, name, fields):
        """An event with its sequence number. fields: the inside of a JSON object."""
        return b"".join(self.parts(name, fields))

    def parts(self, name, *fields):
        """The same in parts, of which a long text is none that is copied. fields: in parts too."""
        number = self.next_number()
        head = b'event: response.%b\ndata: {"type":"response.%b",' % (name, name)
        return [head, *fields, b',"sequence_number":%d}\n\n' % number]


class Item:
    """One item of the output while it is made.

    texts   the TextEvents under which its one text is written
    prefix  of its id
    beside  what stands beside the text in a delta
    said    the pieces of its text
    size    how many bytes these are
    final   the item as JSON, once it is closed
    """

    texts = ()
    prefix = b""
    beside = b""

    def __init__(self, writer, index):
        """
        writer  the EventWriter of its response
        index   its place in the output
        """
        self.writer = writer
        self.index = index
        self.said = []
        self.size = 0
        self.final = None
        self.id = b"%b_%b%02x" % (self.prefix, writer.token, index)
        self.place = b'"item_id":"%b","output_index":%d' % (self.id, index)
        # what stands around the text in a delta's event: of the first of `texts`, and of the others
        (self.before, self.after), *self.others = map(self.around, self.texts)

    def around(self, events):
        name = b"response.%b.delta" % events.event
        head = b'event: %b\ndata: {"type":"%b"' % (name, name)
        before = b'%b,%b%b,"delta":"' % (head, self.place, events.place)
        return before, b'",%b"sequence_number":' % self.beside

    # -- events

    def open(self):
        """Those of its beginning."""
        out = self.as_a_whole(b"output_item.added", self.json(b"", b"in_progress"))
        for events in self.texts:
            if events.part:
                out += self.event(events, events.part + b".added", self.part_field(events, b""))
        return out

    def say(self, text):
        """Those of one more piece of text, the inside of a JSON string."""
        self.said.append(text)
        self.size += len(text)
        writer = self.writer
        if writer.plain:
            return b""
        # the hot path: no JSON, no call
        out = b"%b%b%b%d}\n\n" % (self.before, text, self.after, writer.number)
        writer.number += 1
        for before, after in self.others:
            out += b"%b%b%b%d}\n\n" % (before, text, after, writer.number)
            writer.number += 1
        return out

    def close(self, status):
        """Those of its end, b"completed" or b"incomplete"."""
        out = []
        if status == b"completed" and (last := self.last_words()):
            out.append(self.say(last))
        text = steps.gathered(self.said)
        self.final = self.json(text, status)
        if self.writer.plain:
            return b""
        steps.pause()
        for events in self.texts:
            steps.pause()
            place = b"%b%b," % (self.place, events.place)
            fields = (place, b'%b"%b":"' % (self.beside_done(), events.field), text, b'"')
            out += self.writer.parts(events.event + b".done", *fields)
            if events.part:
                steps.pause()
                part = (place, b'"part":', self.part(events, text))
                out += self.writer.parts(events.part + b".done", *part)
        place = b'"output_index":%d,"item":' % self.index
        out += self.writer.parts(b"output_item.done", place, self.final, b"")
        return steps.gathered(out)

    def event(self, events, name, fields):
        return self.writer.event(name, b"%b%b,%b" % (self.place, events.place, fields))

    def part_field(self, events, text):
        return b'"part":%b' % self.part(events, text)

    def as_a_whole(self, name, item):
        return self.writer.event(name, b'"output_index":%d,"item":%b' % (self.index, item))

    # -- what the kinds of items differ in

    def json(self, text, status):
        """The item with this text."""
        raise NotImplementedError

    def part(self, events, text):
        return events.form % text

    def beside_done(self):
        """What stands beside the text in a .done event."""
        return b""

    def last_words(self):
        """What is still to be said before the end."""
        return b""

    @property
    def whole(self):
        """Whether nothing more can follow."""
        return True

    def so_far(self, status):
        """The item as it is by now, with this status unless it is closed."""
        return self.final or self.json(b"".join(self.said), status)


class Message(Item):
    """What the model says."""

    texts = (TEXT,)
    prefix = b"msg"
    beside = b'"logprobs":[],'
    logprobs = ()  # pieces of their JSON

    def beside_done(self):
        return b'"logprobs":[%b],' % b",".join(self.logprobs)

    def part(self, events, text):
        return events.form % (text, b"[%b]" % b",".join(self.logprobs))

    def json(self, text, status):
        parts = b""
        if text or status != b"in_progress":
            parts = self.part(self.texts[0], text)
        return b'{"id":"%b","type":"message","status":"%b","role":"assistant","content":[%b]}' % (
            self.id,
            status,
            parts,
        )


class MessageWithLogprobs(Message):
    """The same with `logprobs`, its tokens."""

    def __init__(self, writer, index):
        self.logprobs = []
        super().__init__(writer, index)

    def say(self, text):
        """The events of one more piece of text, and its logprobs."""
        tokens = logprobs_of(unquoted(text), self.writer.logprobs)
        if not tokens:
            return super().say(text)
        self.said.append(text)
        self.size += len(text)
        written = steps.joined(tokens)
        self.logprobs.append(written[1:-1])
        if self.writer.plain:
            return b""
        number = self.writer.next_number()
        return b'%b%b","logprobs":%b,"sequence_number":%d}\n\n' % (
            self.before,
            text,
            written,
            number,
        )


class RefusalMessage(Message):
    """A message in which the model declines. It has no logprobs."""

    texts = (REFUSAL,)
    beside = b""
    beside_done = Item.beside_done
    part = Item.part


class Reasoning(Item):
    """Reasoning: its text; where that is asked for, also the same as a summary, and encrypted."""

    prefix = b"rs"

    def __init__(self, writer, index):
        self.texts = (REASONING,)
        if writer.options.summary:
            self.texts += (SUMMARY,)
        super().__init__(writer, index)

    def json(self, text, status):
        """The item with this text; one without any yet has no parts, and nothing is encrypted that
        still goes on."""
        content = summary = encrypted = b""
        if text or status != b"in_progress":
            content = self.part(REASONING, text)
            if SUMMARY in self.texts:
                summary = self.part(SUMMARY, text)
        if status != b"in_progress" and (encrypt := self.writer.options.encrypt):
            encrypted = b',"encrypted_content":%b' % dumps(encrypt(unquoted(text)))
        return b'{"id":"%b","type":"reasoning","status":"%b","summary":[%b],"content":[%b]%b}' % (
            self.id,
            status,
            summary,
            content,
            encrypted,
        )


class ToolCall(Item):
    """A call of a function."""

    texts = (ARGUMENTS,)
    prefix = b"fc"
    type = b"function_call"
    field = b"arguments"

    def __init__(self, writer, index, tool, call_id):
        """
        tool     a ClientTool of tools.py
        call_id  the engine's id of the call, a text
        """
        self.name = b'"name":%b,' % dumps(tool.name)
        self.names = b'"call_id":%b,' % dumps(call_id)
        if tool.namespace:
            self.names += b'"namespace":%b,' % dumps(tool.namespace)
        self.names += self.name
        super().__init__(writer, index)

    def take(self, piece):
        """The events of a piece of its arguments, as the engine gives them (a str)."""
        return self.say(quoted(piece)) if piece else b""

    def beside_done(self):
        return self.name

    @property
    def whole(self):
        return is_json(unquoted(b"".join(self.said)))

    def json(self, text, status):
        head = b'{"id":"%b","type":"%b","status":"%b"' % (self.id, self.type, status)
        return b'%b,%b"%b":"%b"}' % (head, self.names, self.field, text)


class CustomToolCall(ToolCall):
    """A call of a custom tool, whose input is any text."""

    texts = (INPUT,)
    prefix = b"ctc"
    type = b"custom_tool_call"
    field = b"input"
    beside_done = Item.beside_done

    def __init__(self, writer, index, tool, call_id):
        self.arguments = []  # the engine's, as they came
        self.input = CustomInput()
        super().__init__(writer, index, tool, call_id)

    def take(self, piece):
        self.arguments.append(piece)
        text = self.input.feed(piece)
        return self.say(text) if text else b""

    def last_words(self):
        if self.input.found:
            return b""
        return quoted(input_of("".join(self.arguments)))

    @property
    def whole(self):
        return is_json("".join(self.arguments))


def is_json(text):
    try:
        steps.read(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return True


def quoted(text):
    """The inside of a text's JSON string."""
    return steps.joined(text)[1:-1]


def unquoted(text):
    """The text whose JSON string has this inside."""
    return steps.read(b'"%b"' % text)
