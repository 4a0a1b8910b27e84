"""Anthropic's events, made of the pieces of a chat completion's stream.

    message_start, ping, then blocks, strictly one after the other: content_block_start, _delta …, _stop
    message_delta with stop_reason and usage, message_stop;  or `error`, and nothing after it

A block begins with the first of its kind that is more than white space, so that none is empty: the line ends that models
write between reasoning, text and calls open none. While a tool call is unfinished, what belongs to others waits for it.

Source: Anthropic's reference of streaming messages, and what its SDKs' accumulators insist on.
"""

import logging
import re

from dialects.read import mended
from engines.kinds import lengths_of
from stream import PieceStream, as_id, check_finish, dumps

logger = logging.getLogger("sparks")
BLANK = re.compile(rb"(?: |\\[nrt])*+")  # white space inside a JSON string
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
EMPTY = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
DELTAS = {
    "reasoning": b'{"type":"thinking_delta","thinking":"',
    "text": b'{"type":"text_delta","text":"',
    "tool": b'{"type":"input_json_delta","partial_json":"',
}
SIGNED = b'{"type":"signature_delta","signature":"'  # ends a thinking block, as clients expect; there is nothing to sign
TAIL = b'"}}\n\n'
REASONS = {"length": "max_tokens", "content_filter": "refusal"}


def event(kind, **fields):
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps({"type": kind, **fields}))


def delta_head(kind, index):
    """An event up to its text, which is the inside of a JSON string."""
    return (
        b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b'
        % (index, kind)
    )


class Extent:
    """Tells where a JSON object ends that arrives in pieces."""

    MARK = re.compile(r'"|\\.|\\\Z|[{}\[\]]', re.S)

    def __init__(self):
        self.depth, self.inside, self.escaped, self.over = (
            0,
            False,
            False,
            False,
        )  # inside: of a string

    def cut(self, text):
        """As much of the text as belongs to the object."""
        if self.over or not text:
            return ""
        begin, self.escaped = int(self.escaped), False
        for found in self.MARK.finditer(text, begin):
            mark = found[0]
            if mark == '"':
                self.inside = not self.inside
            elif mark[0] == "\\":
                self.escaped = len(mark) == 1
            elif not self.inside:
                self.depth += 1 if mark in "{[" else -1
                if not self.depth:
                    self.over = True
                    return text[: found.end()]
        return text


class Tool:
    """A tool call on its way. `state`: "" (not begun), "open" or "closed".

    held    what is not said of its arguments: all of them until they are seen to be an object. The SDKs raise at anything
            else, so that in the end it is put into one
    bare    the arguments without white space, while they are held
    """

    def __init__(self):
        self.id, self.name, self.state = None, None, ""
        self.held, self.bare, self.extent = [], "", Extent()

    def take(self, call):
        """Add a piece."""
        function = call.get("function") if isinstance(call.get("function"), dict) else {}
        self.id = self.id or as_id(call.get("id"))
        if isinstance(function.get("name"), str) and not self.state:
            self.name = (self.name or "") + function["name"]
        given = function.get("arguments")
        self.held.append(
            given if isinstance(given, str) else "" if given is None else dumps(given).decode()
        )

    def ready(self):
        """What can be said of its arguments now."""
        if self.bare in ("", "{", "{}"):  # not seen yet what they are
            self.held = ["".join(self.held)]
            self.bare = "".join(self.held[0].split())
        if not self.bare.startswith('{"'):
            return ""
        text, self.held = "".join(self.held), []
        return self.extent.cut(text)

    def rest(self):
        """What is said of them in the end."""
        text = "".join(self.held)
        return mended(text) if text.strip() else ""

    @property
    def whole(self):
        """Whether its arguments are all there."""
        return self.extent.over or self.bare == "{}"


class MessageStream(PieceStream):
    """named: the model as the client calls it; thinks: whether the client wants reasoning.

    prompt_tokens may be set before the first event: message_start then says how long the prompt is.
    """

    prompt_tokens = None

    def __init__(self, named, thinks):
        super().__init__()
        self.named, self.thinks = named, thinks
        self.begun, self.ident = False, None
        self.kind, self.index, self.head = None, -1, b""  # of the block that is open
        self.blank, self.dropped = (None, b""), 0
        self.calls, self.open, self.waiting = (
            {},
            None,
            [],
        )  # index -> Tool; the one that is open; pieces behind it
        self.ended, self.refused = {}, False  # the choice that ended; whether the model declined

    # -- the pieces

    def from_bytes(self, event):
        return super().from_bytes(event) if self.begun else None  # the first event tells the id

    def write_chunk(self, chunk, data, changed):
        self.ident = self.ident or as_id(chunk.get("id"))
        out = super().write_chunk(chunk, data, changed)
        return self.start() + out if not self.begun and chunk.get("choices") else out

    def text(self, kind, text):
        if kind == self.kind:
            return self.head + text + TAIL
        return self.switch(kind, text)

    def piece(self, kind, value):
        if kind == "tool":
            return self.call(value)
        if kind == "finish":
            self.ended = value
            return self.release() + self.close()
        return b""

    def switch(self, kind, text):
        """A text of another kind than the block that is open."""
        if kind == "refusal":
            self.refused = True
            return self.text("text", text)
        if kind == "reasoning" and not self.thinks:
            self.dropped += 1
            return b""
        if self.waiting or self.unfinished:
            self.waiting.append((kind, text))
            return b""
        held = self.blank[1] if self.blank[0] == kind else b""
        if BLANK.fullmatch(text):
            self.blank = kind, held + text
            return b""
        return self.begin(kind, EMPTY[kind]) + self.head + held + text + TAIL

    def call(self, call):
        """A piece of a tool call."""
        tool = self.calls.setdefault(call.get("index"), Tool())
        if tool is self.open:
            tool.take(call)
            out = self.arguments(tool.ready())
            return out + self.release(tool.whole) if self.waiting else out
        if tool.state == "closed":  # its arguments were whole
            return b""
        if self.waiting or self.unfinished:
            self.waiting.append(("tool", call))
            return b""
        tool.take(call)
        return self.begin_call(tool) if tool.name else b""

    def begin_call(self, tool):
        ident = f"toolu_{len(self.calls)}" if tool.id is None else str(tool.id)
        out = self.begin("tool", {"type": "tool_use", "id": ident, "name": tool.name, "input": {}})
        self.open, tool.state = tool, "open"
        return out + self.arguments(tool.ready())

    def arguments(self, text):
        return self.head + dumps(text)[1:-1] + TAIL if text else b""

    @property
    def unfinished(self):
        """Whether a tool call is open whose arguments still come."""
        return self.open is not None and not self.open.whole

    def release(self, done=True):
        """What waited for the open call, in its order: all of it once the answer has ended."""
        out = []
        while done and self.waiting:
            waiting, self.waiting = self.waiting, []
            out.append(self.close())
            out += [
                self.call(value) if kind == "tool" else self.text(kind, value)
                for kind, value in waiting
            ]
            done = bool(self.ended) or not self.unfinished
        return b"".join(out)

    # -- the blocks

    def start(self):
        self.begun = True
        usage = {"input_tokens": self.prompt_tokens or 0, "output_tokens": 0}
        return (
            event(
                "message_start",
                message={
                    "id": message_id(self.ident),
                    "type": "message",
                    "role": "assistant",
                    "model": self.named,
                    "content": [],
                    "stop_reason": None,
                    "stop_sequence": None,
                    "usage": usage,
                },
            )
            + PING
        )

    def begin(self, kind, block):
        out = b"" if self.begun else self.start()
        out += self.close()
        self.kind, self.index = kind, self.index + 1
        self.head = delta_head(DELTAS[kind], self.index)
        return out + event("content_block_start", index=self.index, content_block=block)

    def close(self):
        """The end of the block that is open; with it goes the white space that opened none."""
        kind, self.kind, self.blank = self.kind, None, (None, b"")
        last = delta_head(SIGNED, self.index) + TAIL if kind == "reasoning" else b""
        if self.open is not None:
            last = self.arguments(self.open.rest())
            self.open.state, self.open = "closed", None
        return last + event("content_block_stop", index=self.index) if kind else b""

    # -- the end

    def alive(self, note=""):
        return (b": %b\n" % note.encode() if note else b"") + PING

    def fail(self, error):
        return b"event: error\ndata: " + refusal(error) + b"\n\n"

    def end(self):
        super().end()
        out = b"" if self.begun else self.start()
        out += self.release() + self.close()
        if self.dropped:
            logger.info("thinking was off; %d tokens of it were left out", self.dropped)
        reason, sequence = reason_of(
            self.ended, any(tool.state for tool in self.calls.values()), self.refused
        )
        usage = figures(self.usage, self.prompt_tokens, self.tokens)
        return (
            out
            + event(
                "message_delta",
                delta={"stop_reason": reason, "stop_sequence": sequence},
                usage=usage,
            )
            + STOP
        )


# ---- what a stream and a plain answer have in common


def message_id(ident):
    """The engine's own id of the completion as one of a message."""
    return "msg_" + str(as_id(ident) or 0).removeprefix("chatcmpl-")


def reason_of(choice, called, refused):
    """(stop_reason, stop_sequence) of a choice that ended. `called`: whether the message holds a tool call; `refused`:
    whether it says that the model declines. Raises UpstreamError where it did not end."""
    finish, stopped = choice.get("finish_reason"), choice.get("stop_reason")
    check_finish(finish)
    if isinstance(finish, str) and finish in REASONS:
        return REASONS[finish], None
    if (
        isinstance(stopped, str) and stopped
    ):  # vLLM's: the sequence, or the number of a token, or nothing
        return "stop_sequence", stopped
    if refused:
        return "refusal", None
    return (
        "tool_use" if called else "end_turn",
        None,
    )  # a forced call ends with "stop" in vLLM, and so do others


def figures(usage, prompt=None, completion=None):
    """Anthropic's usage from the engine's; what the engine doesn't say is what was counted here, or is left out. The three
    figures of the input add up to the prompt."""
    usage = dict_of(usage)
    prompt, completion = (
        number(usage.get("prompt_tokens"), prompt),
        number(usage.get("completion_tokens"), completion),
    )
    inside, out = dict_of(usage.get("prompt_tokens_details")), {}
    cached = number(inside.get("cached_tokens"))
    if prompt is not None:
        read = min(cached or 0, prompt)
        created = min(number(inside.get("created_cache_tokens"), 0), prompt - read)
        out = {"input_tokens": prompt - read - created, "cache_creation_input_tokens": created}
        out |= {"cache_read_input_tokens": read} if cached is not None else {}
    if completion is not None:
        out["output_tokens"] = completion
    thought = number(dict_of(usage.get("completion_tokens_details")).get("reasoning_tokens"))
    return (
        out if thought is None else {**out, "output_tokens_details": {"thinking_tokens": thought}}
    )


def number(value, otherwise=None):
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0
        else otherwise
    )


def dict_of(value):
    return value if isinstance(value, dict) else {}


# ---- refusals

TYPES = {  # error.type by status; anything else is an api_error
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
TOO_LONG = "prompt is too long: {prompt} tokens > {most} maximum"


def refusal(error):
    """A Refusal in Anthropic's shape, as bytes."""
    return dumps({"type": "error", "error": {"type": type_of(error), "message": message_of(error)}})


def type_of(error):
    return TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")


def message_of(error):
    """The message; that of a prompt which is too long in the words by which Claude Code knows that it must compact."""
    if error.code != "context_length_exceeded":
        return error.message
    if lengths := lengths_of(error.message):
        return TOO_LONG.format(**lengths)
    return f"prompt is too long: {error.message}"
