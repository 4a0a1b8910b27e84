"""Server-sent events: the engine's bytes in, the client's bytes out. Pure: no socket, no clock, no
greenlet.

A stream is fed whatever the engine's socket gave, and returns what the client's socket gets:

    feed(bytes) -> bytes      whole events only; never the last one
    alive(note) -> bytes      a sign of life for a silent moment: a comment with the note, or what
                              `alive_in_chunks` or the API has instead
    end_hold() -> bytes       the content that is held back, which a silence ends as well
    end() -> bytes            the last event; raises Refusal where the answer is not whole
    fail(error) -> bytes      the last event of a stream that went wrong
    .tokens, .thoughts        how many events carried a token, and how many of these a thought; the
                              arguments of a call count by their length, since they come at once
    .ends                     how many of the tokens were the end of a choice
    .usage                    the engine's own figures, if it gave them
    .tokens_at_usage          how many tokens there were when it did so last
    .own_figures              what stands in for those it doesn't give, in the same names; may be
                              set before end() and fail()

How far it is, which only the stream itself sets:

    .over       the engine's last word has come, [DONE] or a fault: feed no more, call end()
    .closing    all that was asked for has come, or the last word
    .fault      the Refusal that end() raises, where the engine's last word was one; else None
    .finished   every choice that was asked for has its finish_reason; usage and [DONE] may follow

Source: the WHATWG's event stream grammar; OpenAI's chat completion chunks; what engines send.
"""

import re
from types import NoneType

import steps
from engines.failures import from_engine
from engines.kinds import GIVEN_UP
from errors import UpstreamError, error_body
from mending.answer import (
    ABANDONED,
    BROKE_OFF,
    CALL_IN_REASONING,
    CALL_TAG,
    CUT,
    choices_of,
    fit_finish,
    index_of,
    join_parts,
    name_tier,
    note_end,
    read_message,
    read_text,
)
from mending.thinking import NAMES, LeakedThinking, overlap, set_reasoning
from mending.tool_calls import ToolCalls, without
from values import as_id, dumps, is_utf8, loads, object_in, objects_in

DONE = b"data: [DONE]\n\n"
BOM = b"\xef\xbb\xbf"
BYTES_A_TOKEN = 4  # of a call's arguments: engines give them in events of any length
MAX_EVENT = 32 << 20  # bytes; an engine that sends more without a blank line is broken
MOST_LINES = 1000  # of an event: engines write their JSON in one
TOO_MANY = 16  # times as many choices as were asked for: no engine means that
SOME = 1024  # choices, where nobody knows how many were
SLICE = 4096  # bytes of which the events are read in one go
BLANK = re.compile(rb"(?: |\\[nrt])*+")  # white space, as the inside of a JSON string

# ---- events


class Events:
    """Cuts bytes into events. `feed(bytes)` returns those that are whole, as bytes without their
    blank line. An unfinished one is kept for the next bytes; the standard has it discarded at the
    stream's end."""

    def __init__(self):
        self.rest = bytearray()
        self.after_cr = False  # the last byte was a CR: an LF that follows belongs to it
        self.first = True

    def feed(self, data):
        """The events that these bytes complete."""
        if self.after_cr or b"\r" in data:
            data = self.unify(data)
        if self.rest:
            seen = max(0, len(self.rest) - 1)
            self.rest += data
            if self.rest.find(b"\n\n", seen) < 0:
                return ()
            data = bytes(self.rest)
            self.rest = bytearray()
            if len(data) > steps.LARGE:
                steps.pause()
        *events, rest = data.split(b"\n\n")
        if rest:
            self.rest = bytearray(rest)
        if self.first and events:
            self.first = False
            events[0] = events[0].removeprefix(BOM)
        return events

    def unify(self, data):
        """The same with LF at the end of every line, where CR, LF or CRLF may stand, even a CRLF
        of which the LF comes with the next bytes."""
        if self.after_cr and data.startswith(b"\n"):
            data = data[1:]
            self.after_cr = False
        if data:
            self.after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def data_of(event):
    """An event's data lines joined by LF, or None if it has none (a comment, another field)."""
    if event.startswith(b"data: ") and b"\n" not in event:  # as most are
        return event[6:]
    lines = [
        line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
    ]
    if not lines:
        return None
    return b"\n".join(lines)


def is_blank(text):
    """Whether the inside of a JSON string (bytes) is white space."""
    at = 0
    while at < len(text):
        end = BLANK.match(text, at, at + steps.LARGE).end()
        if end == at:
            return False
        steps.pause()
        at = end
    return True


def data_event(value):
    """An event with a value as its data."""
    return b"data: " + dumps(value) + b"\n\n"


# ---- chat completion chunks

# A piece of text or reasoning inside an event. Quotes inside JSON strings are escaped, so this
# cannot match inside a text.
INSIDE = rb'":"((?!")[^"\\]*(?:\\.[^"\\]*)*)"'
CHAT_TEXT = re.compile(rb'"(content|reasoning|reasoning_content)' + INSIDE)
COMPLETION_TEXT = re.compile(rb'"(text)' + INSIDE)
MODEL = re.compile(rb'"model"' + INSIDE[1:])

# As numbers: looking for bytes in bytes takes seven times as long.
QUOTE, LF, CR, BACKSLASH, LESS = b'"\n\r\\<'

# Whatever holds one of these says more than a text.
NOT_ONLY_TEXT = (b'"tool_calls"', b'"role"', b'"usage"', b'"error"')


class EventTemplate:
    """What the events of one kind have in common: most of an engine's chunks differ in their text
    alone.

    before, after   the bytes around the text, with the blank line
    begin, end      where in such an event the text stands, as a slice's bounds
    thought, kind   whether the text is reasoning; "reasoning" or "text"
    joints          for a client that gets the reasoning, or the model, under other names, or is
                    told its tier: what stands before, between and after the texts; else None
    """

    __slots__ = ("before", "after", "begin", "end", "joints", "thought", "kind")

    def __init__(self, event, found, names, model=None, tier=None):
        """
        event   one that is all text, without its blank line
        found   the text in it: a match of CHAT_TEXT or COMPLETION_TEXT
        names   those under which the client gets the reasoning, as bytes
        model   what the client gets for the model's name, with the field's; None: what came
        tier    what the client gets before all other fields; None: nothing
        """
        self.before = event[: found.start(2)]
        self.after = event[found.end(2) :] + b"\n\n"
        self.begin = len(self.before)
        self.end = -len(self.after)
        self.thought = found[1].startswith(b"reasoning")
        self.kind = "reasoning" if self.thought else "text"
        self.joints = None
        if self.thought and names != (found[1],):
            head = event[: found.start()]
            fields = [b'"%b":"' % name for name in names]
            self.joints = (head + fields[0], *(b'",' + field for field in fields[1:]), self.after)
        if model is not None:
            first, *between = (self.joints or (self.before, self.after))[:-1]
            ends = (MODEL.sub(lambda _: model, end) for end in (first, self.after))
            first, last = ends
            self.joints = (first, *between, last)
        if tier is not None:
            first, *rest = self.joints or (self.before, self.after)
            self.joints = (first.replace(b"{", b"{" + tier, 1), *rest)

    def text(self, data):
        """The text of an event that fits, or None. `data` is one event with its blank line, or
        anything else."""
        if data.startswith(self.before) and data.endswith(self.after):
            text = data[self.begin : self.end]
            if (
                text
                and QUOTE not in text
                and LF not in text
                and CR not in text
                and text[-1] != BACKSLASH
                and (text.isascii() or is_utf8(text))  # mostly no call
            ):
                return text
        return None


class ChoiceState:
    """What is known of one choice of a completion.

    finished   its finish_reason has come
    thought    it has said some reasoning
    spoke      it has said something else, which is not only white space
    """

    def __init__(self, tool_calls, orphan=False):
        self.leak = LeakedThinking(orphan)
        self.tool_calls = tool_calls
        self.finished = False
        self.thought = False
        self.spoke = False

    @property
    def is_silent(self):
        """Whether nothing has come of it, but white space."""
        begun = self.thought or self.spoke or self.tool_calls.calls
        return not begun and self.leak.state == "start" and not self.leak.held


class ChatStream:
    """A chat completion stream on its way from engine to client.

    Most events go through as the bytes they are: only one that must change, or that tells how the
    stream goes on, is parsed.
    """

    # Python finds the fields of an object with more than 30 of them in a slower way, and a dialect
    # has its own beside these: what every event needs is kept apart.
    __slots__ = (
        "choices",
        "early",
        "ends",
        "events",
        "fresh",
        "held",
        "n",
        "names",
        "oddities",
        "orphan",
        "over",
        "single",
        "tag",
        "template",
        "thoughts",
        "tokens",
        "wants_usage",
        "__dict__",
    )

    chunk_object = "chat.completion.chunk"  # what a chunk's `object` says
    id_prefix = "chatcmpl-"
    closes_calls = True  # a call whose arguments are empty gets {}
    text_pattern = CHAT_TEXT
    holds = 0  # bytes of a text that is kept, to be said again at its end

    def __init__(self, names=NAMES, usage=False, n=1, model=None):
        """
        names   the names under which the client gets the reasoning
        usage   whether the client asked for the usage chunk (the engine is always asked)
        n       how many choices the request asks for; None: unknown, and every event is parsed
        model   the model's name for the client; None: the engine's
        """
        self.names = names
        self.model = model
        self.tier = None  # what its chunks say of the service tier
        self.raw_model = model and b'"model":' + dumps(model)
        self.raw_names = tuple(name.encode() for name in names)
        self.wants_usage = usage
        self.n = n
        self.orphan = False  # a choice's thinking may leak without its opening tag
        self.latest = {}  # then: the last chunk, but for its usage
        self.single = n == 1  # of several choices only parsing tells whose text it is
        self.events = Events()
        self.choices = {}  # index -> ChoiceState
        self.past_tags = False  # no leaked tag can come any more: content needs no look
        self.template = None  # of the latest event that was all text
        self.said = set()  # the kinds of such events
        self.tag = b""  # the end of the reasoning so far, if a call's tag can begin with it
        self.held = None  # (chunk, data, changed) of a call whose name can still go on
        self.held_calls = []  # those that begin in it
        self.fresh = []  # the calls that begin in the chunk which is read
        self.early = []  # choices (dicts) for a chunk before the one that ends them
        self.oddities = set()
        self.over = False
        self.closing = False
        self.fault = None
        self.tokens = 0
        self.thoughts = 0
        self.ends = 0
        self.usage = None
        self.tokens_at_usage = 0
        self.own_figures = {}
        # signs of life as chunks
        self.head = None  # what they say of the completion: its id, object, created, model
        self.named = False  # the engine's first chunk has come, and they say the same
        self.renames = False  # one came before it, and the engine's chunks say the same as that

    def feed(self, data):
        """The client's bytes for these of the engine's."""
        template = self.template
        if template is not None and not self.events.rest:
            text = template.text(data)  # the hot path: one more event like the last one
            if text is not None:
                return self.write_event(data, text)
        out = []
        for event in self.events.feed(data):
            if self.over:
                break
            written = self.from_template(event)
            if written is None:
                written = self.from_bytes(event)
            if written is None:
                written = self.from_json(event)
            out.append(written)
        if len(self.events.rest) > MAX_EVENT:
            self.break_off(UpstreamError("the engine sent an event that does not end"))
        return steps.gathered(out)

    def feed_plain(self, completion):
        """Feed a plain completion (a dict), of an engine that does not stream."""
        try:
            self.read_plain(completion)
        except UpstreamError as fault:
            return self.break_off(fault)
        if self.gives_too_many(choices_of(completion)):
            return b""
        head = {name: completion.get(name) for name in ("id", "created", "model")}
        head["object"] = self.chunk_object
        chunks = [{**head, "choices": [self.chunk_of(choice)]} for choice in choices_of(completion)]
        if completion.get("usage"):
            chunks.append({**head, "choices": [], "usage": completion["usage"]})
        written = []
        for chunk in steps.paced(chunks):
            if not self.over:
                written.append(self.read_chunk(chunk, b""))
        self.over = self.closing = True
        return steps.gathered(written)

    def read_plain(self, completion):
        """Mend a plain completion in place. Raises UpstreamError where it is no answer."""
        for choice in steps.paced(choices_of(completion)):
            read_message(choice, completion.get("id"), self.names, self.oddities)
            self.choice_state(choice).leak.state = "content"  # what had leaked is taken out

    def chunk_of(self, choice):
        """A whole choice as the only chunk of its stream."""
        message = object_in(choice, "message")
        delta = {name: value for name, value in message.items() if value is not None}
        if delta.get("tool_calls"):
            calls = delta["tool_calls"]
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        return {
            "index": choice.get("index", 0),
            "delta": delta,
            "logprobs": choice.get("logprobs"),
            "finish_reason": choice.get("finish_reason"),
        }

    def expect_orphan(self):
        """Hold the content back at first: the model may think where its engine does not look for
        thoughts, and a prompt may have opened the tag of these."""
        self.orphan = True

    def end_hold(self):
        """The client's bytes for the content that is held: none is in a silence, or at an error."""
        choices = []
        for index, state in self.choices.items():
            if state.leak.unsure:
                delta = {"content": state.leak.settle()}
                self.note_texts(delta, state)
                choices.append({**self.empty_choice(index), "delta": delta})
        if not choices:
            return b""
        return self.write_chunk({**self.latest, "choices": choices}, b"", True)

    def alive(self, note=""):
        return self.end_hold() + self.sign_of_life(note or "keep-alive")

    def sign_of_life(self, note):
        index = self.open_choice()
        if self.head is None or index is None:
            return b": %b\n\n" % note.encode()
        self.renames = self.renames or not self.named
        sign = {**self.head, "choices": [self.empty_choice(index)]}
        name_tier(sign, self.tier)
        return data_event(sign)

    def alive_in_chunks(self, name, created, model):
        """Have the signs of life be empty chunks, for clients that count events and no comments.

        They are called what the engine's chunks are; until one has come, `name`, in epoch seconds
        `created`, and `model`.
        """
        self.head = {
            "id": self.id_prefix + name,
            "object": self.chunk_object,
            "created": created,
            "model": model,
        }
        self.single = False  # the engine's first chunk has to be read

    def open_choice(self):
        """The index of a choice that may still grow; None after the last finish, which an empty
        chunk would hide from clients that look at the last one."""
        if self.finished:
            return None
        ended = {at for at, choice in self.choices.items() if choice.finished}
        return next((at for at in range(self.n or 1) if at not in ended), None)

    def empty_choice(self, index):
        return {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}

    def end(self):
        """The last event. Raises Refusal where the answer is not whole."""
        if self.fault:
            raise self.fault
        # After its [DONE] an engine may have given fewer choices than the request asked for.
        if not self.finished and not (self.over and self.have_finished(1)):
            raise UpstreamError(BROKE_OFF)
        return DONE

    def fail(self, error):
        return self.end_hold() + data_event(error_body(error))

    @property
    def untouched(self):
        """Whether nothing has come but comments: another engine's answer can take its place."""
        return not (self.events.rest or self.choices or self.usage or self.over)

    @property
    def finished(self):
        return self.have_finished(self.n or 1)

    def have_finished(self, least):
        """Whether there are at least so many choices, and all of them have their finish_reason."""
        return self.ends == len(self.choices) >= least

    # -- from the engine's event to the client's, by the cheapest way that will do

    def from_template(self, event):
        """The client's event where only the text differs from the last one's, else None."""
        if self.template is None or len(event) > steps.LARGE:
            return None
        event += b"\n\n"
        text = self.template.text(event)
        if text is None:
            return None
        return self.write_event(event, text)

    def from_bytes(self, event):
        """The client's event where the bytes show that it is all text, else None."""
        if not (
            self.single
            and self.held is None
            and len(event) <= steps.LARGE
            and event.startswith(b"data: {")
            and b'"finish_reason":null' in event
            and (self.past_tags or b'"content":' not in event)
            and b"\n" not in event
            and not any(field in event for field in NOT_ONLY_TEXT)
            and is_utf8(event)
        ):
            return None
        if self.tier and b'"service_tier"' in event:
            return None
        found = self.text_pattern.search(event)
        if not found or event.count(b'"reasoning') + event.count(b'"content"') > 1:
            return None
        model = self.raw_model
        if model is None or model in event or b'"model"' not in event:
            model = None
        elif event.count(b'"model"') > 1 or not MODEL.search(event):
            return None
        tier = self.tier and b'"service_tier":%b,' % dumps(self.tier)
        template = EventTemplate(event, found, self.raw_names, model, tier)
        if template.kind not in self.said:
            if is_blank(found[2]):  # line ends alone say nothing
                return None
            self.said.add(template.kind)
        self.template = template
        return self.write_event(event + b"\n\n", found[2])

    def from_json(self, event):
        """The client's event, by parsing; empty where there is nothing to say."""
        if event.count(b"\n") > MOST_LINES:
            return self.break_off(UpstreamError("the engine sent an event of too many lines"))
        data = data_of(event)
        if data is None or not data.strip():
            return b""
        if data.strip() == b"[DONE]":
            self.over = self.closing = True
            return b""
        read = loads
        if len(data) > steps.LARGE:
            steps.pause()
            read = steps.read
        try:
            chunk = read(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            return self.break_off(UpstreamError("the engine sent an event that cannot be read"))
        if chunk.get("error") or chunk.get("object") == "error":
            return self.break_off(from_engine(None, chunk))
        return self.read_chunk(chunk, data)

    def break_off(self, fault):
        self.over = self.closing = True
        self.fault = fault
        return b""

    def write_event(self, event, text):
        """The client's bytes for an event of the present template, of which this is the text."""
        template = self.template
        self.tokens += 1
        if template.thought:
            self.thoughts += 1
            if LESS in text or self.tag:
                self.look_for_call(text)
        return event if template.joints is None else text.join(template.joints)

    def look_for_call(self, text):
        """Note whether reasoning (bytes) holds the tag of a call, which may come in pieces."""
        text = self.tag + text
        self.tag = text[len(text) - overlap(text, CALL_TAG) :]
        if CALL_TAG in text:
            self.oddities.add(CALL_IN_REASONING)

    def write_chunk(self, chunk, data, changed):
        """The client's bytes for a chunk that was read.

        data      the engine's bytes of it, or b"" where there are none
        changed   whether the chunk is no longer what they say
        """
        if not data or len(data) > steps.LARGE:
            return steps.joined(chunk, b"data: ", b"\n\n")
        if changed or b"\n" in data or not is_utf8(data):
            return data_event(chunk)
        return b"data: " + data + b"\n\n"

    # -- a chunk

    def read_chunk(self, chunk, data):
        """The client's bytes for a chunk (a dict, changed in place), which came as `data`, or as
        b"" in another form."""
        choices = choices_of(chunk)
        if self.gives_too_many(choices):
            return b""
        usage = self.usage
        changed = self.take_usage(chunk, choices)
        if changed is None:
            self.tokens_at_usage = self.tokens
            return b""
        changed = self.take_model(chunk) or changed
        changed = name_tier(chunk, self.tier) or changed
        if chunk.get("choices") != choices:
            chunk["choices"] = choices  # the SDKs iterate it
            changed = True
        if self.head is not None:
            changed = self.rename(chunk) or changed
        if self.orphan:
            self.latest = without(chunk, ("usage",))
        mended = []
        for choice in steps.paced(choices):
            mended.append(self.mend_choice(choice, chunk))
        if self.usage is not usage:  # it counts the chunk that it came with
            self.tokens_at_usage = self.tokens
        if self.fault:
            return b""
        if None in mended:
            kept = [choice for choice, how in zip(choices, mended, strict=True) if how is not None]
            if not kept and not (self.finished and chunk.get("usage")):
                return b""
            chunk["choices"] = kept
            changed = True
        if self.single:
            self.past_tags = bool(self.choices) and all(
                choice.leak.past_tags for choice in self.choices.values()
            )
        resumed = self.resume()
        return steps.gathered((resumed, self.write_mended(chunk, data, changed or any(mended))))

    def gives_too_many(self, choices):
        """Whether there are more choices than anybody asks for. That ends the stream."""
        if len(choices) + len(self.choices) <= TOO_MANY * (self.n or SOME):
            return False
        self.break_off(UpstreamError("the engine gives choices beyond all bounds"))
        return True

    def write_mended(self, chunk, data, changed):
        """The client's bytes for a chunk that is mended, or none while it is held back."""
        if self.fresh:
            fresh = self.fresh[:]
            self.fresh.clear()
            if not any(choice.get("finish_reason") for choice in choices_of(chunk)):
                self.held = (chunk, data, changed)
                self.held_calls = fresh
                self.template = None
                return b""
        early = b""
        if self.early:
            before = {**chunk, "choices": self.early}
            before.pop("usage", None)
            self.early = []
            early = self.write_chunk(before, b"", True)
        return steps.gathered((early, self.write_chunk(chunk, data, changed)))

    def resume(self):
        """The client's bytes for the chunk that was held back."""
        if self.held is None:
            return b""
        for call in self.held_calls:
            call.first = None
        out = self.write_chunk(*self.held)
        self.held = None
        return out

    def take_model(self, chunk):
        """Give the model its name for the client. Returns whether it had another one."""
        if self.model is None or chunk.get("model", self.model) == self.model:
            return False
        chunk["model"] = self.model
        return True

    def rename(self, chunk):
        """Have the engine's chunks and the signs of life agree, on what the first of them all said.
        Returns whether the chunk changed."""
        if self.renames:
            chunk.update(self.head)
            return True
        self.head.update((name, chunk[name]) for name in self.head if name in chunk)
        self.named = True
        self.single = self.n == 1
        return False

    def take_usage(self, chunk, choices):
        """Note the usage, and take it off for a client that did not ask. Returns whether the chunk
        changed, or None if nothing is left of it."""
        if "usage" not in chunk:
            return False
        if isinstance(chunk["usage"], dict):
            self.usage = chunk["usage"] or self.usage  # an empty one takes nothing back
            if not choices and not self.wants_usage:
                return None
        if not self.wants_usage:
            del chunk["usage"]
            return True
        return False

    def mend_choice(self, choice, chunk):
        """Mend a choice in place. Returns whether it changed, or None if nothing is left of it."""
        state = self.choice_state(choice)
        if state.finished:  # more of it is none of the answer
            return None
        changed = "message" in choice or not isinstance(choice.get("delta"), dict)
        if changed:
            self.take_message(choice, state)
        delta = choice["delta"]
        if not isinstance(delta.get("content"), (str, NoneType)):
            changed = join_parts(delta)
        finishes = bool(choice.get("finish_reason"))  # some engines say "" all along
        had_call = bool(delta.get("tool_calls"))
        if had_call:
            self.tokens += max(0, length_of_calls(delta) // BYTES_A_TOKEN - 1)
        held = len(state.leak.unsure)
        alone = had_call and len(delta) == 1 and not held
        if alone and not finishes and not choice.get("logprobs"):
            self.tokens += 1  # a piece of a call alone, as most of them come
            changed = self.mend_calls(delta, state, chunk) or changed
            return changed if delta else None
        had_words = had_call or delta.get("content")
        # Of an answer that is given up, what is held comes before the error.
        ends = finishes and choice["finish_reason"] not in GIVEN_UP
        changed = self.mend_text(delta, state, ends) or changed
        if had_call:
            changed = self.mend_calls(delta, state, chunk) or changed
        says = any(delta.get(name) for name in ("content", "tool_calls", "refusal", *NAMES))
        # The last one ends the turn.
        self.tokens += bool(says or had_call or finishes or len(state.leak.unsure) > held)
        self.thoughts += self.note_texts(delta, state) * (1 + held)
        if finishes:
            changed = self.end_choice(choice, state) or changed
        held_back = had_words and not says
        if held_back and not (finishes or "role" in delta or choice.get("logprobs")):
            return None
        return changed

    def take_message(self, choice, state):
        """Give a choice without a delta one. Some engines end with the message instead: that counts
        where nothing was said, and else says it again."""
        message = choice.pop("message", None)
        if not isinstance(choice.get("delta"), dict):
            choice["delta"] = {}
            if isinstance(message, dict) and not self.said and state.is_silent:
                choice["delta"] = self.chunk_of({"message": message})["delta"]

    def choice_state(self, choice):
        """The ChoiceState of a choice."""
        index = index_of(choice)
        if index not in self.choices:
            calls = ToolCalls(self.oddities, self.fresh)
            self.choices[index] = ChoiceState(calls, self.orphan)
            self.closing = False
        return self.choices[index]

    def note_texts(self, delta, state):
        """Note what a mended delta says. Returns whether that is reasoning."""
        texts = (delta.get("content"), delta.get("refusal"))
        state.spoke = state.spoke or any(isinstance(text, str) and text.strip() for text in texts)
        thoughts = [delta[name] for name in self.names if delta.get(name)]
        if not thoughts:
            return False
        state.thought = state.thought or not thoughts[0].isspace()
        self.look_for_call(thoughts[0].encode("utf-8", "replace"))
        return True

    def mend_calls(self, delta, state, chunk):
        """Mend the pieces of tool calls in a delta. Returns whether it changed."""
        given = delta["tool_calls"]
        calls = state.tool_calls
        completion_id = as_id(chunk.get("id")) or "0"
        mended = []
        for piece in steps.paced(objects_in(delta, "tool_calls")):
            taken = calls.take(piece, completion_id)
            if taken is not None:
                mended.append(taken)
        if calls.renamed and self.held is not None:
            self.held = (*self.held[:2], True)
        calls.renamed = False
        if mended:
            delta["tool_calls"] = mended
        else:
            del delta["tool_calls"]
        return mended != given

    def end_choice(self, choice, state):
        """End a choice (a dict, changed in place). Returns whether it changed."""
        reason = choice["finish_reason"]
        state.finished = True
        self.ends += 1
        self.single = False  # what comes now has to be read
        self.template = None
        self.closing = self.n is not None and self.finished
        if reason in GIVEN_UP and self.counts(choice):
            self.break_off(UpstreamError(ABANDONED))
            return True
        calls = state.tool_calls
        last = ()
        if self.closes_calls and reason not in CUT:
            last = calls.close()
        calls.judge()
        thought = state.thought or "reasoning" in self.said
        spoke = state.spoke or "text" in self.said
        note_end(reason, calls, thought and not spoke, self.oddities)
        if last:  # before the end: some SDKs look at no call that comes with it
            delta = choice["delta"]
            delta = {**delta, "tool_calls": [*(delta.get("tool_calls") or ()), *last]}
            early = without(choice, ("stop_reason",))
            self.early.append({**early, "delta": delta, "finish_reason": None})
            choice["delta"] = {}
            choice["logprobs"] = None
        return fit_finish(choice, calls) or bool(last)

    def counts(self, choice):
        """Whether a choice belongs to the answer."""
        return True

    def mend_text(self, delta, state, finishes):
        """Take leaked thinking out of a delta's content, and give the reasoning its names. Returns
        whether the delta changed."""
        reasoning = ""
        content = delta.get("content")
        held = ""
        if state.leak.orphan and self.has_thought_or_called(delta, state):
            held = state.leak.settle()
        if isinstance(content, str) and content and not state.leak.past_tags:
            reasoning, content = state.leak.feed(content)
        if held:
            content = held + (content or "")
        ends = finishes or state.leak.orphan and delta.get("tool_calls")
        if ends and state.leak.waits and (content is None or isinstance(content, str)):
            last_reasoning, last_content = state.leak.flush()
            reasoning += last_reasoning
            content = (content or "") + last_content
        changed = content != delta.get("content")
        if changed:
            delta["content"] = content
            if not content and "role" not in delta:
                del delta["content"]
        return set_reasoning(delta, self.names, reasoning) or changed

    def has_thought_or_called(self, delta, state):
        """Whether a choice's content is no reasoning whose tag has not come yet: the engine has
        found some itself, or calls have begun."""
        thought = state.thought or "reasoning" in self.said or any(map(delta.get, NAMES))
        return thought or state.tool_calls.calls


class CompletionStream(ChatStream):
    """A text completion stream. What the model writes is the answer: no tag in it is looked for.
    `usage`, `n` and `model` as for a chat."""

    chunk_object = "text_completion"
    id_prefix = "cmpl-"
    text_pattern = COMPLETION_TEXT

    def __init__(self, usage=False, n=1, model=None):
        super().__init__((), usage, n, model)

    def read_plain(self, completion):
        for choice in choices_of(completion):
            read_text(choice, self.oddities)

    def chunk_of(self, choice):
        return choice

    def empty_choice(self, index):
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def mend_choice(self, choice, chunk):
        """Mend a choice in place. Returns whether it changed, or None if nothing is left of it."""
        state = self.choice_state(choice)
        if state.finished:
            return None
        finishes = bool(choice.get("finish_reason"))
        self.tokens += bool(choice.get("text") or finishes)
        changed = not isinstance(choice.get("text"), str)
        if changed:
            choice["text"] = ""  # the SDKs add it up
        if finishes:
            changed = self.end_choice(choice, state) or changed
        return changed


# ---- other APIs

TEXT_FIELDS = {"reasoning": "reasoning", "refusal": "refusal", "text": "content"}  # kind -> field


class PieceStream(ChatStream):
    """A stream for an API with events of its own: read and mended as a chat, written by a dialect:

    text(kind, text) -> bytes     kind: "reasoning", "text" or "refusal"
                                  text: the inside of a JSON string, as bytes
    piece(kind, value) -> bytes   kind "tool": a tool call's delta (a dict)
                                  "usage": the engine's figures (a dict)
                                  "finish": the choice that ends (a dict with finish_reason; some
                                  engines add stop_reason, the stop sequence that was met)
    end(), fail(error), alive()   as for every stream
    """

    def __init__(self):
        super().__init__(("reasoning",), usage=True)

    def alive_in_chunks(self, name, created, model):
        """Its API has no such chunks."""

    def write_event(self, event, text):
        template = self.template
        self.tokens += 1
        if template.thought:
            self.thoughts += 1
            if LESS in text or self.tag:
                self.look_for_call(text)
        return self.text(template.kind, text)

    def from_bytes(self, event):
        """As for a chat, but not before the choice is known whose texts count."""
        if not self.choices or b'"index":%d' % next(iter(self.choices)) not in event:
            return None
        return super().from_bytes(event)

    def write_chunk(self, chunk, data, changed):
        """The client's bytes for a chunk that was read: its pieces, then its usage."""
        out = []
        for choice in self.own_choices(chunk):
            for kind, value in pieces_of(choice):
                if kind in TEXT_FIELDS:
                    out.append(self.text(kind, quoted(value)))
                else:
                    out.append(self.piece(kind, value))
        if isinstance(chunk.get("usage"), dict):
            out.append(self.piece("usage", chunk["usage"]))
        return steps.gathered(out)

    def own_choices(self, chunk):
        """The choices of a chunk that belong to the answer, which is the first one that came: an
        engine may give more of them, unasked."""
        return [choice for choice in choices_of(chunk) if self.counts(choice)]

    def counts(self, choice):
        return index_of(choice) == next(iter(self.choices), 0)

    def read_plain(self, completion):
        completion["choices"] = choices_of(completion)[:1]
        super().read_plain(completion)


def length_of_calls(delta):
    """How long the arguments are that a delta brings."""
    length = 0
    for call in steps.paced(objects_in(delta, "tool_calls")):
        arguments = object_in(call, "function").get("arguments")
        if isinstance(arguments, str):
            length += len(arguments)
    return length


def quoted(text):
    """The inside of a text's JSON string."""
    if len(text) > steps.LARGE:
        return steps.joined(text)[1:-1]
    return dumps(text)[1:-1]


def pieces_of(choice):
    """What a mended choice of a chunk says, in order: (kind, value)."""
    delta = choice["delta"]
    for kind, name in TEXT_FIELDS.items():
        if isinstance(delta.get(name), str) and delta[name]:
            yield kind, delta[name]
    for tool_call in steps.paced(objects_in(delta, "tool_calls")):
        yield "tool", tool_call
    if choice.get("finish_reason"):
        yield "finish", choice


# ---- an engine's answer, whole or in chunks


def chunks_of(events, stream):
    """The chunks (dicts) in the bytes of a whole stream, one by one, as `stream` (a ChatStream)
    mends them. Raises Refusal where they add up to no whole answer."""
    for at in range(0, len(events), SLICE):
        steps.pause()
        written = stream.feed(bytes(events[at : at + SLICE]))
        yield from map(chunk_in, filter(None, written.split(b"\n\n")))
    written = stream.feed(b"\n\n")
    yield from map(chunk_in, filter(None, written.split(b"\n\n")))
    stream.end()


def chunk_in(event):
    """The chunk in an event."""
    steps.pause()
    return steps.read(data_of(event))
