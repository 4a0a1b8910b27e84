"""The answer of OpenAI's Responses API: the events of a stream, and the Response that they add up to.

A plain answer is the Response of a stream's last event, so the two cannot differ.

Source: OpenAI's published schema (github.com/openai/openai-openapi), ResponseStreamEvent and Response.
"""

import re
from typing import Callable, NamedTuple

from dialects.responses.items import (
    Call,
    CustomCall,
    LoggedMessage,
    Message,
    Pen,
    Refused,
    Thinking,
    Tool,
)
from stream import PieceStream, check_finish, dumps

BLANK = re.compile(rb"(?: |\\[nrt])*+")  # the inside of a JSON string without a word
CUT = {
    "length": "max_output_tokens",
    "content_filter": "content_filter",
}  # finish_reason -> why it is incomplete
# Our code, or else the status -> that of a failed Response. The first is in no schema, but OpenAI sends it and Codex acts on it.
CODES = {"context_length_exceeded": "context_length_exceeded", 429: "rate_limit_exceeded"}


class Options(NamedTuple):
    """What a request asks of the writing.

    now       gives the time, in epoch seconds
    tools     the engine's name of a tool -> Tool
    summary   whether reasoning is also given as a summary
    seal      seals a text, or None where no sealed reasoning is asked for
    logprobs  whether they are asked for
    """

    now: Callable
    tools: dict = {}
    summary: bool = False
    seal: Callable | None = None
    logprobs: bool = False


class ResponseStream(PieceStream):
    """A stream of Responses events.

    pen       writes the events: its token makes the ids
    echo      what a Response repeats of its request, as the bytes of a JSON object in a list
    response  the Response, once the stream has ended
    """

    def __init__(self, token, options):
        super().__init__()
        self.pen, self.options, self.echo = Pen(token.encode(), options), options, []
        self.kinds = {
            "text": LoggedMessage if options.logprobs else Message,
            "refusal": Refused,
            "reasoning": Thinking,
        }
        self.created, self.begun = int(options.now()), False
        self.items, self.calls = [], {}
        self.item = self.saying = None  # where text goes on, and its kind
        self.blank = []  # the pieces of a text that is no message yet
        self.finish = self.response = self.last = None

    # -- events

    def begin(self):
        """The first events, once."""
        if self.begun:
            return b""
        self.begun = True
        response = b'"response":%b' % self.object(b"in_progress")
        return self.pen.event(b"created", response) + self.pen.event(b"in_progress", response)

    def end(self):
        super().end()
        check_finish(self.finish)
        if self.last is None:
            status = b"incomplete" if self.finish in CUT else b"completed"
            self.response = self.object(status)
            self.last = self.pen.event(status, b'"response":%b' % self.response)
        return self.last

    def fail(self, error):
        code = (
            CODES.get(error.code)
            or CODES.get(error.status)
            or ("invalid_prompt" if error.status < 500 else "server_error")
        )
        failed = {"code": code, "message": error.message}
        return self.begin() + self.pen.event(
            b"failed", b'"response":%b' % self.object(b"failed", failed)
        )

    # -- the Response

    def object(self, status, error=None):
        """It as JSON."""
        reason = {"reason": CUT[self.finish]} if status == b"incomplete" else None
        ended = int(self.options.now()) if status == b"completed" else None
        usage = (
            self.figures(0, 0)
            if status == b"in_progress"
            else self.figures(self.tokens, self.thoughts)
        )
        head = {
            "id": f"resp_{self.pen.token.decode()}",
            "object": "response",
            "created_at": self.created,
            "completed_at": ended,
            "status": status.decode(),
            "error": error,
            "incomplete_details": reason,
            "usage": usage,
        }
        output = b",".join([item.so_far() for item in self.items])
        return b'%b,"output":[%b],%b' % (dumps(head)[:-1], output, b"".join(self.echo)[1:])

    def figures(self, tokens, thoughts):
        """The usage: the engine's own figures, else what was counted here."""
        usage = self.usage or {}
        read, written = number(usage, "prompt_tokens"), number(usage, "completion_tokens", tokens)
        prompt, completion = (
            usage.get("prompt_tokens_details"),
            usage.get("completion_tokens_details"),
        )
        thought, cached = (
            number(completion, "reasoning_tokens", thoughts),
            number(prompt, "cached_tokens"),
        )
        return {
            "input_tokens": read,
            "output_tokens": written,
            "total_tokens": read + written,
            "input_tokens_details": {
                "cached_tokens": min(cached, read),
                "cache_write_tokens": number(prompt, "created_cache_tokens"),
            },
            "output_tokens_details": {"reasoning_tokens": min(thought, written)},
        }

    # -- pieces

    def text(self, kind, text):
        if kind == self.saying:
            return self.item.say(text)
        if self.finish is not None:
            return b""
        if kind == "text" and BLANK.fullmatch(text):  # line ends before a call are no message
            self.blank.append(text)
            return b""
        held, self.blank = self.blank if kind == "text" else [], []
        return self.turn(self.kinds[kind]) + self.item.say(b"".join((*held, text)))

    def turn(self, kind, *args):
        """The events of a new item's beginning, and of the end of the one before."""
        out = self.begin()
        if self.item is not None and self.item.whole:
            out += self.item.close(b"completed")
        self.item = kind(self.pen, len(self.items), *args)
        self.items.append(self.item)
        self.saying = kind.kind
        return out + self.item.open()

    def piece(self, kind, value):
        if kind == "tool" and self.finish is None:
            return self.call(value)
        return self.finishes(value["finish_reason"]) if kind == "finish" else b""

    def call(self, value):
        """The events of a piece of a tool call. One without a name yet waits for it."""
        function = value.get("function") if isinstance(value.get("function"), dict) else {}
        call = self.calls.setdefault(
            value["index"], {"id": str(value.get("id")), "held": "", "item": None}
        )
        call["held"] += argument(function.get("arguments"))
        out, name = b"", function.get("name")
        if call["item"] is None:
            if not isinstance(name, str) or not name:
                return b""
            self.blank = []
            tool = self.options.tools.get(name) or Tool("function", name)
            out = self.turn(CustomCall if tool.kind == "custom" else Call, tool, call["id"])
            call["item"] = self.item
        held, call["held"] = call["held"], ""
        return out if call["item"].final else out + call["item"].take(held)

    def finishes(self, reason):
        """The events of the end of all that is still open."""
        out = self.begin()
        if self.blank and not self.items:
            out += self.turn(self.kinds["text"]) + self.item.say(b"".join(self.blank))
        self.finish = reason if isinstance(reason, str) else "stop"
        self.item = self.saying = None
        still = [item for item in self.items if not item.final]
        for item in still:
            out += item.close(
                b"incomplete" if self.finish in CUT and item is still[-1] else b"completed"
            )
        return out

    def write_chunk(self, chunk, data, changed):
        """Also logprobs, which stand in chunks that are looked into."""
        for choice in self.own_choices(chunk) if self.options.logprobs else ():
            given = choice.get("logprobs")
            if isinstance(given, dict) and isinstance(given.get("content"), list):
                self.pen.logprobs = [token for token in given["content"] if isinstance(token, dict)]
        out = super().write_chunk(chunk, data, changed)
        self.pen.logprobs = []
        return out


def argument(value):
    """A piece of arguments as a text; some engines send an object."""
    return value if isinstance(value, str) else "" if value is None else dumps(value).decode()


def number(table, name, default=0):
    """A count in an engine's usage."""
    value = table.get(name) if isinstance(table, dict) else None
    return (
        value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default
    )
