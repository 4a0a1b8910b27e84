"""Server-sent events, pure: the engine's bytes in, the client's bytes out. No socket, no clock, no greenlet.

A stream is fed whatever the engine's socket gave and answers with what the client's socket gets:

    feed(bytes) -> bytes      whole events only; never the last one
    alive(note) -> bytes      a comment for a silent moment
    end() -> bytes            the last event, or a Refusal where the answer is not whole
    fail(error) -> bytes      the last event of a stream that went wrong
    .over                     the engine has said its last word: feed no more, call end()
    .tokens, .thoughts        how many events carried a token, and how many of these a thought
    .usage                    the engine's own figures, if it gave them

Source: the WHATWG's event stream grammar; OpenAI's chat completion chunks; what vLLM and llama.cpp send.
"""

import json
import re

import orjson

from engines.failures import from_engine
from engines.kinds import GIVEN_UP
from errors import UpstreamError, error_body

DONE = b"data: [DONE]\n\n"
BOM = b"\xef\xbb\xbf"
MAX_EVENT = 64 << 20  # bytes; an engine that sends more without a blank line is broken
OPEN, CLOSE = "<think>", "</think>"
NAMES = ("reasoning", "reasoning_content")


# ---- events


class Events:
    """Cuts bytes into events, however they arrive. `feed(bytes)` gives the whole ones, as bytes without their
    blank line; an unfinished tail is kept, and discarded in the end, as the standard says."""

    def __init__(self):
        self.rest = bytearray()
        self.after_cr = False  # the last byte was a CR: an LF that follows belongs to it
        self.first = True

    def feed(self, data):
        if self.after_cr or b"\r" in data:
            data = self.unify(data)
        if self.rest:
            seen = max(0, len(self.rest) - 1)
            self.rest += data
            if self.rest.find(b"\n\n", seen) < 0:
                return ()
            data, self.rest = bytes(self.rest), bytearray()
        *events, rest = data.split(b"\n\n")
        if rest:
            self.rest = bytearray(rest)
        if self.first and events:
            self.first = False
            events[0] = events[0].removeprefix(BOM)
        return events

    def unify(self, data):
        """CR, LF and CRLF end a line, and nothing else does: all become LF, also where a CRLF is cut in two."""
        if self.after_cr and data.startswith(b"\n"):
            data = data[1:]
            self.after_cr = False
        if data:
            self.after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def data_of(event):
    """An event's data lines joined by LF, or None if it has none (a comment, another field)."""
    lines = [
        line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None


def loads(data):
    """JSON of an engine, forgiving what Python's own reader forgives, with bad UTF-8 replaced. ValueError if none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data.decode("utf-8", "replace"))


def dumps(value):
    """JSON as bytes; lone surrogates, which an engine can cut out of a character, stay as escapes."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def data_event(value):
    return b"data: " + dumps(value) + b"\n\n"


# ---- reasoning


class LeakedThinking:
    """The start of a choice's content, where a leaked `<think>…</think>` stands if the engine's parser missed it.
    `feed` and `flush` give (reasoning, content); once `settled`, all is content and tags are quotations."""

    def __init__(self):
        self.state, self.held = "start", ""

    @property
    def settled(self):
        return self.state == "content"

    def feed(self, text):
        text, self.held = self.held + text, ""
        return getattr(self, self.state)(text)

    def flush(self):
        """What was held back because it could have become a tag."""
        text, self.held = self.held, ""
        return (text, "") if self.state == "thinking" else ("", text)

    def start(self, text):
        bare = text.lstrip()
        if bare.startswith(OPEN):
            self.state = "thinking"
            return self.thinking(bare[len(OPEN) :])
        if OPEN.startswith(bare):
            self.held = text
            return "", ""
        self.state = "content"
        return "", text

    def thinking(self, text):
        reasoning, tag, rest = text.partition(CLOSE)
        if tag:
            self.state = "closed"
            return reasoning, self.closed(rest)[1]
        whole = len(text) - overlap(text, CLOSE)
        self.held = text[whole:]
        return text[:whole], ""

    def closed(self, text):
        text = text.lstrip()
        if text:
            self.state = "content"
        return "", text

    def content(self, text):
        return "", text


def overlap(text, tag):
    """How many characters at the end of `text` could be the beginning of `tag`."""
    return next(
        (n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0
    )


def split_thinking(content):
    """(reasoning, content) of a whole message, whose thinking may also have lost its opening tag."""
    lead = LeakedThinking()
    parts = zip(lead.feed(content), lead.flush())
    reasoning, rest = map("".join, parts)
    if not reasoning and lead.settled and rest == content:
        before, tag, after = content.partition(CLOSE)
        if (
            tag and OPEN not in before and before[-1:] not in tuple("`'\"")
        ):  # in quotes it is talked about
            return before.strip(), after.lstrip()
    return reasoning.strip(), rest


def set_reasoning(message, names, extra=""):
    """Give a message or delta its reasoning under `names`, `extra` added. Returns whether anything changed."""
    had = {name: message[name] for name in NAMES if name in message}
    value = next((text for text in had.values() if isinstance(text, str) and text), "") + extra
    wanted = dict.fromkeys(names, value) if value else {}
    if had == wanted:
        return False
    for name in had:
        del message[name]
    message.update(wanted)
    return True


# ---- tool calls


class ToolCalls:
    """Tells the tool calls of one choice apart. Engines forget the index, use one index for two calls, or say id and name
    again with each piece, which the SDKs would join to one long id."""

    def __init__(self):
        self.by_id, self.by_index = {}, {}  # an engine's id, an engine's index -> the true index
        self.names = []  # of the calls so far; None while a call has none

    def place(self, call, completion):
        """Set the true index of a delta's call (a dict, changed in place). Returns whether anything changed."""
        before = dict(call)
        theirs, ident = as_id(call.get("index")), as_id(call.get("id"))
        function = call.get("function") if isinstance(call.get("function"), dict) else {}
        index = self.known(theirs, ident, function.get("name"))
        if index is None:
            index = self.open(call, ident, completion)
        else:
            call.pop("id", None)
            if function.get("name") == self.names[index] and "name" in function:
                function = call["function"] = {
                    name: value for name, value in function.items() if name != "name"
                }
        if theirs is not None:
            self.by_index[theirs] = index
        call["index"] = index
        self.names[index] = self.names[index] or function.get("name")
        return call != before

    def known(self, theirs, ident, name):
        """The true index of the call that a piece goes on with, or None if it begins one."""
        index = self.by_id.get(ident)
        another = (
            name
            and theirs is not None
            and theirs not in self.by_index
            and index in self.by_index.values()
        )
        if index is not None and not another:  # some engines have one id for several calls
            return index
        if theirs is not None:
            return None if ident and name else self.by_index.get(theirs)
        goes_on = self.names and not (name and (ident or self.names[-1]))
        return len(self.names) - 1 if goes_on else None

    def open(self, call, ident, completion):
        index = len(self.names)
        self.names.append(None)
        if not ident or ident in self.by_id:
            self.by_id[ident] = None  # no more a way to tell
            call["id"] = (
                f"call_{completion}_{index}"  # without one the client could not send its result back
            )
        self.by_id[call["id"]] = index
        return index


def as_id(value):
    """A value that can name something, or None."""
    return value if isinstance(value, (str, int)) else None


# ---- chat completion chunks

# A piece of text or reasoning inside an event. Quotes inside JSON strings are escaped, so this cannot match in a text.
INSIDE = rb'":"((?!")[^"\\]*(?:\\.[^"\\]*)*)"'
PIECE = re.compile(rb'"(content|reasoning|reasoning_content)' + INSIDE)
TEXT_PIECE = re.compile(rb'"(text)' + INSIDE)  # of a text completion


QUOTE, LF, CR, BACKSLASH = (
    b'"\n\r\\'  # numbers: bytes are looked for in bytes seven times as slowly
)
SIGNS = (
    b'"tool_calls"',
    b'"role"',
    b'"usage"',
    b'"error"',
)  # of an event that says more than a text


class EventTemplate:
    """What all events of one kind have in common: an engine's chunks differ in their text alone.

    before, after   the bytes around the text, the blank line included
    joints          for a client that gets the text under two names: what stands before, between and after; else None
    """

    __slots__ = ("before", "after", "begin", "end", "joints", "thought")

    def __init__(self, event, found, names):
        self.before, self.after = event[: found.start(2)], event[found.end(2) :] + b"\n\n"
        self.begin, self.end = len(self.before), -len(self.after)
        self.thought, self.joints = found[1].startswith(b"reasoning"), None
        if self.thought and names != (found[1],):
            head = event[: found.start()]
            fields = [b'"%b":"' % name for name in names]
            self.joints = (head + fields[0], *(b'",' + field for field in fields[1:]), self.after)

    def text(self, data):
        """The text of an event that fits, or None. `data` is one event with its blank line, or anything else."""
        if data.startswith(self.before) and data.endswith(self.after):
            text = data[self.begin : self.end]
            if (
                text
                and QUOTE not in text
                and LF not in text
                and CR not in text
                and text[-1] != BACKSLASH
                and is_utf8(text)
            ):
                return text
        return None


class ChoiceState:
    """What is known of one choice of a completion."""

    def __init__(self):
        self.lead, self.calls, self.finished = LeakedThinking(), ToolCalls(), False


class ChatStream:
    """A chat completion stream on its way from engine to client.

    names    the names under which the client gets the reasoning
    usage    whether the client asked for the usage chunk (the engine is always asked)
    n        how many choices the request asks for; None: unknown, and every event is looked into

    Most events go through as the bytes they are: only one that must change, or that says something about the
    stream's end, is parsed.
    """

    kind, texts = "chat.completion.chunk", PIECE  # of a chunk; where its texts are

    def __init__(self, names=NAMES, usage=False, n=1):
        self.names, self.wants_usage = names, usage
        self.raw_names = tuple(name.encode() for name in names)
        self.n, self.one = n, n == 1
        self.events, self.choices = Events(), {}
        self.settled = False  # no leaked tag can come any more: content needs no look
        self.template = None  # of the latest event that was all text
        self.over = self.done = False  # done: the engine itself said so
        self.fault = None
        self.tokens, self.thoughts, self.usage = 0, 0, None

    def feed(self, data):
        template, events = self.template, self.events
        if (
            template is not None and not events.rest
        ):  # the hot path: one more event like the last one
            text = template.text(data)
            if text is not None:
                return self.write_event(data, text)
        out = []
        for event in events.feed(data):
            if self.over:
                break
            said = self.from_template(event)
            if said is None:
                said = self.from_bytes(event)
            out.append(self.from_json(event) if said is None else said)  # b"" is an answer too
        if len(self.events.rest) > MAX_EVENT:
            self.break_off(UpstreamError("the engine sent an event that does not end"))
        return b"".join(out)

    def alive(self, note="keep-alive"):
        return b": %b\n\n" % note.encode()

    def end(self):
        if self.fault:
            raise self.fault
        if not self.finished and not (self.done and self.choices and self.all_ended):
            raise UpstreamError(
                "the engine broke off before the answer was finished; send the request again"
            )
        return DONE

    @property
    def finished(self):
        """Whether the answer is whole, though the engine may have more to say."""
        return len(self.choices) >= (self.n or 1) and self.all_ended

    @property
    def all_ended(self):
        return all(choice.finished for choice in self.choices.values())

    def fail(self, error):
        return data_event(error_body(error))

    def feed_plain(self, completion):
        """Feed a plain completion (a dict): what an engine gave that does not stream."""
        head = {name: completion.get(name) for name in ("id", "created", "model")}
        head["object"] = self.kind
        chunks = [{**head, "choices": [self.chunk_of(choice)]} for choice in choices_of(completion)]
        if completion.get("usage"):
            chunks.append({**head, "choices": [], "usage": completion["usage"]})
        return self.feed(b"".join(map(data_event, chunks)) + DONE)

    def chunk_of(self, choice):
        """A whole choice as the only chunk of its stream."""
        message = choice.get("message") if isinstance(choice.get("message"), dict) else {}
        return {
            "index": choice.get("index", 0),
            "delta": {name: value for name, value in message.items() if value is not None},
            "logprobs": choice.get("logprobs"),
            "finish_reason": choice.get("finish_reason"),
        }

    # -- an event

    def from_template(self, event):
        """The event for the client if only its text differs from the last one's, else None."""
        if self.template is None:
            return None
        event += b"\n\n"
        text = self.template.text(event)
        return None if text is None else self.write_event(event, text)

    def write_event(self, event, text):
        """The client's bytes for an event of the present template with this text."""
        template = self.template
        self.tokens += 1
        self.thoughts += template.thought
        return event if template.joints is None else text.join(template.joints)

    def from_bytes(self, event):
        """The event for the client where bytes tell enough, else None."""
        if not (
            self.one
            and event.startswith(b"data: {")
            and b'"finish_reason":null' in event
            and (self.settled or b'"content":' not in event)
            and b"\n" not in event
            and not any(sign in event for sign in SIGNS)
            and is_utf8(event)
        ):
            return None
        found = self.texts.search(event)
        if not found or event.count(b'"reasoning') + event.count(b'"content"') > 1:
            return None
        self.template = EventTemplate(event, found, self.raw_names)
        return self.write_event(event + b"\n\n", found[2])

    def from_json(self, event):
        """The event for the client, parsed; empty where there is nothing to say."""
        data = data_of(event)
        if data is None or not data.strip():
            return b""
        if data.strip() == b"[DONE]":
            self.over = self.done = True
            return b""
        try:
            chunk = loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            return self.break_off(UpstreamError("the engine sent an event that cannot be read"))
        if chunk.get("error") or chunk.get("object") == "error":
            return self.break_off(from_engine(None, chunk))
        return self.read_chunk(chunk, data)

    def break_off(self, fault):
        self.over, self.fault = True, fault
        return b""

    def read_chunk(self, chunk, data):
        choices = choices_of(chunk)
        changed = self.take_usage(chunk, choices)
        if changed is None:
            return b""
        empty = [self.mend_choice(choice, chunk) for choice in choices]
        if any(state is None for state in empty):
            choices = [choice for choice, state in zip(choices, empty) if state is not None]
            if not choices:
                return b""
            chunk["choices"] = choices
            changed = True
        if self.one:
            self.settled = all(choice.lead.settled for choice in self.choices.values()) and bool(
                self.choices
            )
        return self.write_chunk(chunk, data, changed or any(empty))

    def write_chunk(self, chunk, data, changed):
        """The client's bytes for a chunk that was looked into, and the data it came as."""
        if changed or b"\n" in data or not is_utf8(data):
            return data_event(chunk)
        return b"data: " + data + b"\n\n"

    def take_usage(self, chunk, choices):
        """Note the usage, and take it off for a client that did not ask. Returns whether the chunk changed,
        or None if nothing is left of it."""
        if "usage" not in chunk:
            return False
        if isinstance(chunk["usage"], dict):
            self.usage = chunk["usage"]
            if not choices and not self.wants_usage:
                return None
        if not self.wants_usage:
            del chunk["usage"]
            return True
        if not choices and chunk.get("choices") != []:
            chunk["choices"] = []  # the SDKs iterate it
            return True
        return False

    def mend_choice(self, choice, chunk):
        """Mend one choice in place. Returns whether it changed, or None if nothing is left of it."""
        state = self.choices.setdefault(index_of(choice), ChoiceState())
        delta, odd = choice.get("delta"), not isinstance(choice.get("delta"), dict)
        if odd:
            delta = choice["delta"] = {}
        finishes = bool(choice.get("finish_reason"))  # some say "" all along
        held_back = delta.get("content")
        changed = self.mend_text(delta, state, finishes) or odd
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                changed = state.calls.place(call, chunk.get("id") or "0") or changed
        state.finished = state.finished or finishes
        says = any(delta.get(name) for name in ("content", "tool_calls", "refusal", *NAMES))
        self.tokens += bool(says or finishes)  # the last one is the token that ends the turn
        self.thoughts += any(delta.get(name) for name in NAMES)
        if (
            held_back
            and not says
            and not finishes
            and "role" not in delta
            and not choice.get("logprobs")
        ):
            return None
        return changed

    def mend_text(self, delta, state, finishes):
        reasoning, content = "", delta.get("content")
        if isinstance(content, str) and content and not state.lead.settled:
            reasoning, content = state.lead.feed(content)
        if finishes and state.lead.held and isinstance(content, (str, type(None))):
            last = state.lead.flush()
            reasoning, content = reasoning + last[0], (content or "") + last[1]
        changed = content != delta.get("content")
        if changed:
            delta["content"] = content
            if not content and "role" not in delta:
                del delta["content"]
        return set_reasoning(delta, self.names, reasoning) or changed


class CompletionStream(ChatStream):
    """A text completion stream. What the model writes is the answer: no tag in it is looked for. `n` as for a chat."""

    kind, texts = "text_completion", TEXT_PIECE

    def __init__(self, usage=False, n=1):
        super().__init__((), usage, n)

    def chunk_of(self, choice):
        return choice

    def mend_choice(self, choice, chunk):
        state = self.choices.setdefault(index_of(choice), ChoiceState())
        finishes = bool(choice.get("finish_reason"))
        state.finished = state.finished or finishes
        self.tokens += bool(choice.get("text") or finishes)
        odd = not isinstance(choice.get("text"), str)
        if odd:
            choice["text"] = ""  # the SDKs add it up
        return odd


SAID = {
    "reasoning": "reasoning",
    "refusal": "refusal",
    "text": "content",
}  # kind of a text -> its name in a delta


class PieceStream(ChatStream):
    """A stream for an API with events of its own, over the same reading and mending. A dialect writes the events:

    text(kind, text) -> bytes       kind "reasoning", "text" or "refusal"; text is the inside of a JSON string, as bytes
    piece(kind, value) -> bytes     "tool": a tool call's delta; "finish": the choice that ends (a dict, with
                                    finish_reason and vLLM's stop_reason); "usage": the engine's figures
    end(), fail(error), alive()     as for every stream
    """

    def __init__(self):
        super().__init__(("reasoning",), usage=True)

    def write_event(self, event, text):
        thought = self.template.thought
        self.tokens += 1
        self.thoughts += thought
        return self.text("reasoning" if thought else "text", text)

    def from_bytes(self, event):
        """Not before the choice is known whose texts count."""
        own = self.choices and b'"index":%d' % next(iter(self.choices)) in event
        return super().from_bytes(event) if own else None

    def write_chunk(self, chunk, data, changed):
        out = [
            self.one_piece(kind, value)
            for choice in self.own_choices(chunk)
            for kind, value in pieces_of(choice)
        ]
        if isinstance(chunk.get("usage"), dict):
            out.append(self.piece("usage", chunk["usage"]))
        return b"".join(out)

    def own_choices(self, chunk):
        """The choices of a chunk that belong to the one answer there is: an engine may give more, unasked."""
        first = next(iter(self.choices), 0)
        return [choice for choice in choices_of(chunk) if index_of(choice) == first]

    def one_piece(self, kind, value):
        return self.text(kind, dumps(value)[1:-1]) if kind in SAID else self.piece(kind, value)


def pieces_of(choice):
    """What a mended choice of a chunk says, in order: (kind, value)."""
    delta = choice["delta"]
    for kind, name in SAID.items():
        if isinstance(delta.get(name), str) and delta[name]:
            yield kind, delta[name]
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            yield "tool", call
    if choice.get("finish_reason"):
        yield "finish", choice


def check_finish(finish):
    """Raises UpstreamError where a finish_reason says that the answer is not whole."""
    if not finish:
        raise UpstreamError(
            "the engine broke off before the answer was finished; send the request again"
        )
    if finish in GIVEN_UP:
        raise UpstreamError("the engine gave this answer up; send the request again")


def index_of(choice):
    return choice["index"] if isinstance(choice.get("index"), int) else 0


def choices_of(answer):
    """The choices of a chunk or a completion; what is none is left out."""
    choices = answer.get("choices")
    return (
        [choice for choice in choices if isinstance(choice, dict)]
        if isinstance(choices, list)
        else []
    )


def chunks_of(events, stream):
    """The chunks (dicts) in the bytes of a whole stream, which `stream` (a ChatStream) reads. Raises
    Refusal if they add up to no whole answer."""
    sent = stream.feed(events + b"\n\n")
    stream.end()
    return [loads(data_of(event)) for event in sent.split(b"\n\n") if event]


def required_choices(completion):
    """The choices of a plain completion. Raises UpstreamError where it has none: that is no answer."""
    choices = choices_of(completion)
    if not choices:
        raise UpstreamError("the engine's answer holds no completion; send the request again")
    return choices


def is_utf8(data):
    """Whether bytes are UTF-8."""
    if data.isascii():
        return True
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False
