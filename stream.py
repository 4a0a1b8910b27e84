"""Server-sent events: the engine's bytes in, the client's bytes out. Pure: no socket, no clock, no
greenlet.

A stream is fed whatever the engine's socket gave, and returns what the client's socket gets:

    feed(bytes) -> bytes      whole events only; never the last one
    alive(note) -> bytes      a sign of life for a silent moment: a comment with the note, or what
                              `alive_in_chunks` or the API has instead
    end() -> bytes            the last event; raises Refusal where the answer is not whole
    fail(error) -> bytes      the last event of a stream that went wrong
    .tokens, .thoughts        how many events carried a token, and how many of these a thought
    .usage                    the engine's own figures, if it gave them

How far it is, which only the stream itself sets:

    .over       the engine's last word has come, [DONE] or a fault: feed no more, call end()
    .fault      the Refusal that end() raises, where the engine's last word was one; else None
    .finished   every choice that was asked for has its finish_reason; usage and [DONE] may follow

Source: the WHATWG's event stream grammar; OpenAI's chat completion chunks; what engines send.
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
OPEN = "<think>"
CLOSE = "</think>"
NAMES = ("reasoning", "reasoning_content")  # of the reasoning's field; engines use either
BROKE_OFF = "the engine broke off before the answer was finished; send the request again"


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
    lines = [
        line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
    ]
    if not lines:
        return None
    return b"\n".join(lines)


def data_event(value):
    """An event with a value as its data."""
    return b"data: " + dumps(value) + b"\n\n"


# ---- JSON


def loads(data):
    """An engine's JSON (bytes) as a value. Takes what Python's own reader takes, such as NaN, and
    replaces bad UTF-8. Raises ValueError, or RecursionError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data.decode("utf-8", "replace"))


def dumps(value):
    """A value as JSON (bytes). A lone surrogate, half a character that an engine has cut in two,
    stays as an escape."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def is_utf8(data):
    """Whether bytes are UTF-8."""
    if data.isascii():
        return True
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def as_id(value):
    """A value that can name something, or None."""
    return value if isinstance(value, (str, int)) else None


def object_in(table, name):
    """A field that should be an object; an empty one where it is anything else."""
    value = table.get(name)
    return value if isinstance(value, dict) else {}


def objects_in(table, name):
    """The objects of a field that should be a list of them; none where it is anything else."""
    values = table.get(name)
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, dict)]


# ---- reasoning


class LeakedThinking:
    """The start of a choice's content, where `<think>…</think>` stands if the engine's parser has
    missed it. Such a tag anywhere else is a quotation.

    feed, flush   return (reasoning, content)
    past_tags     all that follows is content: it needn't be fed
    held          a text that waits because it could become a tag
    """

    def __init__(self):
        self.state = "start"  # then "thinking", "closed", "content"; from "start" also "content"
        self.held = ""

    @property
    def past_tags(self):
        return self.state == "content"

    def feed(self, text):
        """The reasoning and the content in one more piece of text. One piece may pass through
        several states."""
        text = self.held + text
        self.held = ""
        reasoning = ""
        if self.state == "start":
            text = self.after_opening(text)
        if self.state == "thinking":
            reasoning, text = self.around_closing(text)
        if self.state == "closed":  # models put line ends between the tag and the answer
            text = text.lstrip()
            if text:
                self.state = "content"
        return reasoning, text

    def flush(self):
        """What was held back because it could have become a tag."""
        text = self.held
        self.held = ""
        if self.state == "thinking":
            return text, ""
        return "", text

    def after_opening(self, text):
        """What follows the opening tag, or all of the text where there is none."""
        bare = text.lstrip()
        if bare.startswith(OPEN):
            self.state = "thinking"
            return bare[len(OPEN) :]
        if OPEN.startswith(bare):
            self.held = text
            return ""
        self.state = "content"
        return text

    def around_closing(self, text):
        """(the text before the closing tag, the text after it)."""
        before, tag, after = text.partition(CLOSE)
        if tag:
            self.state = "closed"
            return before, after
        whole = len(text) - overlap(text, CLOSE)
        self.held = text[whole:]
        return text[:whole], ""


def overlap(text, tag):
    """How many characters at the end of `text` could be the beginning of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


def split_thinking(content):
    """(reasoning, content) of a whole message. Its thinking may also have lost the opening tag."""
    leak = LeakedThinking()
    reasoning, rest = leak.feed(content)
    last_reasoning, last_rest = leak.flush()
    reasoning += last_reasoning
    rest += last_rest
    if not reasoning and leak.past_tags and rest == content:
        before, tag, after = content.partition(CLOSE)
        quoted = before.endswith(("`", "'", '"'))
        if tag and OPEN not in before and not quoted:
            return before.strip(), after.lstrip()
    return reasoning.strip(), rest


def set_reasoning(message, names, extra=""):
    """Give a message or a delta its reasoning under `names` alone, `extra` added to it. Returns
    whether anything changed."""
    had = {name: message[name] for name in NAMES if name in message}
    if not had and not extra:
        return False
    texts = [text for text in had.values() if isinstance(text, str) and text]
    text = "".join(texts[:1]) + extra
    wanted = {name: text for name in names if text}
    if had == wanted:
        return False
    for name in had:
        del message[name]
    message.update(wanted)
    return True


# ---- tool calls


class ToolCalls:
    """Tells the tool calls of one choice apart. Engines forget the index, use one index for two
    calls, or repeat id and name with each piece, which the SDKs would join to one long id.

    by_id, by_index   an engine's id, an engine's index -> the true index
    names             of the calls so far; None while a call has none
    """

    def __init__(self):
        self.by_id = {}
        self.by_index = {}
        self.names = []

    def place(self, tool_call, completion_id):
        """Set the true index in a piece of a tool call (a dict, changed in place). Returns whether
        anything changed."""
        before = dict(tool_call)
        engine_index = as_id(tool_call.get("index"))
        engine_id = as_id(tool_call.get("id"))
        function = object_in(tool_call, "function")
        index = self.known(engine_index, engine_id, function.get("name"))
        if index is None:
            index = self.open(tool_call, engine_id, completion_id)
        else:
            tool_call.pop("id", None)
            if function.get("name") == self.names[index] and "name" in function:
                function = {name: value for name, value in function.items() if name != "name"}
                tool_call["function"] = function
        if engine_index is not None:
            self.by_index[engine_index] = index
        tool_call["index"] = index
        self.names[index] = self.names[index] or function.get("name")
        return tool_call != before

    def known(self, engine_index, engine_id, name):
        """The true index of the call that a piece goes on with, or None if it begins one."""
        index = self.by_id.get(engine_id)
        begins_another = (  # some engines give several calls one id
            name
            and engine_index is not None
            and engine_index not in self.by_index
            and index in self.by_index.values()
        )
        if index is not None and not begins_another:
            return index
        if engine_index is not None:
            return None if engine_id and name else self.by_index.get(engine_index)
        if not self.names or name and (engine_id or self.names[-1]):
            return None
        return len(self.names) - 1

    def open(self, tool_call, engine_id, completion_id):
        """Begin a call, and give it an id of its own: without one the client could not send the
        tool's result back. Returns its true index."""
        index = len(self.names)
        self.names.append(None)
        if not engine_id or engine_id in self.by_id:
            self.by_id[engine_id] = None  # it tells no calls apart any more
            tool_call["id"] = f"call_{completion_id}_{index}"
        self.by_id[tool_call["id"]] = index
        return index


# ---- chat completion chunks

# A piece of text or reasoning inside an event. Quotes inside JSON strings are escaped, so this
# cannot match inside a text.
INSIDE = rb'":"((?!")[^"\\]*(?:\\.[^"\\]*)*)"'
CHAT_TEXT = re.compile(rb'"(content|reasoning|reasoning_content)' + INSIDE)
COMPLETION_TEXT = re.compile(rb'"(text)' + INSIDE)

# As numbers: looking for bytes in bytes takes seven times as long.
QUOTE, LF, CR, BACKSLASH = b'"\n\r\\'

# Whatever holds one of these says more than a text.
NOT_ONLY_TEXT = (b'"tool_calls"', b'"role"', b'"usage"', b'"error"')


class EventTemplate:
    """What the events of one kind have in common: most of an engine's chunks differ in their text
    alone.

    before, after   the bytes around the text, with the blank line
    begin, end      where in such an event the text stands, as a slice's bounds
    thought, kind   whether the text is reasoning; "reasoning" or "text"
    joints          for a client that gets the reasoning under other names: what stands before,
                    between and after the texts; else None
    """

    __slots__ = ("before", "after", "begin", "end", "joints", "thought", "kind")

    def __init__(self, event, found, names):
        """
        event   one that is all text, without its blank line
        found   the text in it: a match of CHAT_TEXT or COMPLETION_TEXT
        names   those under which the client gets the reasoning, as bytes
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
                and is_utf8(text)
            ):
                return text
        return None


class ChoiceState:
    """What is known of one choice of a completion.

    finished   its finish_reason has come
    """

    def __init__(self):
        self.leak = LeakedThinking()
        self.tool_calls = ToolCalls()
        self.finished = False


class ChatStream:
    """A chat completion stream on its way from engine to client.

    Most events go through as the bytes they are: only one that must change, or that tells how the
    stream goes on, is parsed.
    """

    chunk_object = "chat.completion.chunk"  # what a chunk's `object` says
    id_prefix = "chatcmpl-"
    text_pattern = CHAT_TEXT

    def __init__(self, names=NAMES, usage=False, n=1):
        """
        names   the names under which the client gets the reasoning
        usage   whether the client asked for the usage chunk (the engine is always asked)
        n       how many choices the request asks for; None: unknown, and every event is parsed
        """
        self.names = names
        self.raw_names = tuple(name.encode() for name in names)
        self.wants_usage = usage
        self.n = n
        self.single = n == 1  # of several choices only parsing tells whose text it is
        self.events = Events()
        self.choices = {}  # index -> ChoiceState
        self.past_tags = False  # no leaked tag can come any more: content needs no look
        self.template = None  # of the latest event that was all text
        self.over = False
        self.fault = None
        self.tokens = 0
        self.thoughts = 0
        self.usage = None
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
        return b"".join(out)

    def feed_plain(self, completion):
        """Feed a plain completion (a dict), of an engine that does not stream."""
        head = {name: completion.get(name) for name in ("id", "created", "model")}
        head["object"] = self.chunk_object
        chunks = [{**head, "choices": [self.chunk_of(choice)]} for choice in choices_of(completion)]
        if completion.get("usage"):
            chunks.append({**head, "choices": [], "usage": completion["usage"]})
        return self.feed(b"".join(map(data_event, chunks)) + DONE)

    def chunk_of(self, choice):
        """A whole choice as the only chunk of its stream."""
        message = object_in(choice, "message")
        return {
            "index": choice.get("index", 0),
            "delta": {name: value for name, value in message.items() if value is not None},
            "logprobs": choice.get("logprobs"),
            "finish_reason": choice.get("finish_reason"),
        }

    def alive(self, note="keep-alive"):
        index = self.open_choice()
        if self.head is None or index is None:
            return b": %b\n\n" % note.encode()
        self.renames = self.renames or not self.named
        return data_event({**self.head, "choices": [self.empty_choice(index)]})

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
        if not self.choices:
            return 0
        return next((at for at, choice in self.choices.items() if not choice.finished), None)

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
        return data_event(error_body(error))

    @property
    def finished(self):
        return self.have_finished(self.n or 1)

    def have_finished(self, least):
        """Whether there are at least so many choices, and all of them have their finish_reason."""
        return len(self.choices) >= least and all(
            choice.finished for choice in self.choices.values()
        )

    # -- from the engine's event to the client's, by the cheapest way that will do

    def from_template(self, event):
        """The client's event where only the text differs from the last one's, else None."""
        if self.template is None:
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
            and event.startswith(b"data: {")
            and b'"finish_reason":null' in event
            and (self.past_tags or b'"content":' not in event)
            and b"\n" not in event
            and not any(field in event for field in NOT_ONLY_TEXT)
            and is_utf8(event)
        ):
            return None
        found = self.text_pattern.search(event)
        if not found or event.count(b'"reasoning') + event.count(b'"content"') > 1:
            return None
        self.template = EventTemplate(event, found, self.raw_names)
        return self.write_event(event + b"\n\n", found[2])

    def from_json(self, event):
        """The client's event, by parsing; empty where there is nothing to say."""
        data = data_of(event)
        if data is None or not data.strip():
            return b""
        if data.strip() == b"[DONE]":
            self.over = True
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
        self.over = True
        self.fault = fault
        return b""

    def write_event(self, event, text):
        """The client's bytes for an event of the present template, of which this is the text."""
        template = self.template
        self.tokens += 1
        self.thoughts += template.thought
        return event if template.joints is None else text.join(template.joints)

    def write_chunk(self, chunk, data, changed):
        """The client's bytes for a chunk that was read.

        data      the engine's bytes of it
        changed   whether the chunk is no longer what they say
        """
        if changed or b"\n" in data or not is_utf8(data):
            return data_event(chunk)
        return b"data: " + data + b"\n\n"

    # -- a chunk

    def read_chunk(self, chunk, data):
        """The client's bytes for a chunk (a dict, changed in place), which came as `data`."""
        choices = choices_of(chunk)
        changed = self.take_usage(chunk, choices)
        if changed is None:
            return b""
        if self.head is not None:
            changed = self.rename(chunk) or changed
        mended = [self.mend_choice(choice, chunk) for choice in choices]
        if None in mended:
            kept = [choice for choice, how in zip(choices, mended, strict=True) if how is not None]
            if not kept:
                return b""
            chunk["choices"] = kept
            changed = True
        if self.single:
            self.past_tags = bool(self.choices) and all(
                choice.leak.past_tags for choice in self.choices.values()
            )
        return self.write_chunk(chunk, data, changed or any(mended))

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
        """Mend a choice in place. Returns whether it changed, or None if nothing is left of it."""
        state = self.choices.setdefault(index_of(choice), ChoiceState())
        delta = choice.get("delta")
        changed = not isinstance(delta, dict)
        if changed:
            delta = choice["delta"] = {}
        finishes = bool(choice.get("finish_reason"))  # some engines say "" all along
        had_content = delta.get("content")
        changed = self.mend_text(delta, state, finishes) or changed
        for tool_call in objects_in(delta, "tool_calls"):
            placed = state.tool_calls.place(tool_call, chunk.get("id") or "0")
            changed = placed or changed
        state.finished = state.finished or finishes
        says = any(delta.get(name) for name in ("content", "tool_calls", "refusal", *NAMES))
        self.tokens += bool(says or finishes)  # the last one is the token that ends the turn
        self.thoughts += any(delta.get(name) for name in NAMES)
        held_back = had_content and not says
        if held_back and not (finishes or "role" in delta or choice.get("logprobs")):
            return None
        return changed

    def mend_text(self, delta, state, finishes):
        """Take leaked thinking out of a delta's content, and give the reasoning its names. Returns
        whether the delta changed."""
        reasoning = ""
        content = delta.get("content")
        if isinstance(content, str) and content and not state.leak.past_tags:
            reasoning, content = state.leak.feed(content)
        if finishes and state.leak.held and (content is None or isinstance(content, str)):
            last_reasoning, last_content = state.leak.flush()
            reasoning += last_reasoning
            content = (content or "") + last_content
        changed = content != delta.get("content")
        if changed:
            delta["content"] = content
            if not content and "role" not in delta:
                del delta["content"]
        return set_reasoning(delta, self.names, reasoning) or changed


class CompletionStream(ChatStream):
    """A text completion stream. What the model writes is the answer: no tag in it is looked for.
    `usage` and `n` as for a chat."""

    chunk_object = "text_completion"
    id_prefix = "cmpl-"
    text_pattern = COMPLETION_TEXT

    def __init__(self, usage=False, n=1):
        super().__init__((), usage, n)

    def chunk_of(self, choice):
        return choice

    def empty_choice(self, index):
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def mend_choice(self, choice, chunk):
        """Mend one choice in place. Returns whether it changed."""
        state = self.choices.setdefault(index_of(choice), ChoiceState())
        finishes = bool(choice.get("finish_reason"))
        state.finished = state.finished or finishes
        self.tokens += bool(choice.get("text") or finishes)
        if isinstance(choice.get("text"), str):
            return False
        choice["text"] = ""  # the SDKs add it up
        return True


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
        self.thoughts += template.thought
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
                    out.append(self.text(kind, dumps(value)[1:-1]))
                else:
                    out.append(self.piece(kind, value))
        if isinstance(chunk.get("usage"), dict):
            out.append(self.piece("usage", chunk["usage"]))
        return b"".join(out)

    def own_choices(self, chunk):
        """The choices of a chunk that belong to the answer, which is the first one that came: an
        engine may give more of them, unasked."""
        first = next(iter(self.choices), 0)
        return [choice for choice in choices_of(chunk) if index_of(choice) == first]


def pieces_of(choice):
    """What a mended choice of a chunk says, in order: (kind, value)."""
    delta = choice["delta"]
    for kind, name in TEXT_FIELDS.items():
        if isinstance(delta.get(name), str) and delta[name]:
            yield kind, delta[name]
    for tool_call in objects_in(delta, "tool_calls"):
        yield "tool", tool_call
    if choice.get("finish_reason"):
        yield "finish", choice


# ---- an engine's answer, whole or in chunks


def check_finish(reason):
    """Raises UpstreamError where a finish_reason says that the answer is not whole."""
    if not reason:
        raise UpstreamError(BROKE_OFF)
    if reason in GIVEN_UP:
        raise UpstreamError("the engine gave this answer up; send the request again")


def index_of(choice):
    """The index of a choice; 0 where it has none."""
    return choice["index"] if isinstance(choice.get("index"), int) else 0


def choices_of(answer):
    """The choices (dicts) of a chunk or a completion."""
    return objects_in(answer, "choices")


def chunks_of(events, stream):
    """The chunks (dicts) in the bytes of a whole stream, as `stream` (a ChatStream) mends them.
    Raises Refusal where they add up to no whole answer."""
    written = stream.feed(events + b"\n\n")
    stream.end()
    return [loads(data_of(event)) for event in written.split(b"\n\n") if event]


def required_choices(completion):
    """The choices of a plain completion. Raises UpstreamError where it has none."""
    choices = choices_of(completion)
    if not choices:
        raise UpstreamError("the engine's answer holds no completion; send the request again")
    return choices
