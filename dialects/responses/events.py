"""The answer of OpenAI's Responses API: a stream's events, and the Response that they add up to.

A plain answer is the Response of a stream's last event, so the two cannot differ.

Source: OpenAI's published schema (github.com/openai/openai-openapi), ResponseStreamEvent and
Response.
"""

from collections.abc import Callable
from typing import NamedTuple

import steps
from dialects.responses.items import (
    CustomToolCall,
    EventWriter,
    Message,
    MessageWithLogprobs,
    Reasoning,
    RefusalMessage,
    ToolCall,
)
from dialects.responses.tools import ClientTool
from dialects.responses.usage import usage_of
from mending.answer import check_finish
from stream import PieceStream, is_blank
from values import as_dict, dumps, objects_in

# finish_reason -> why a Response is incomplete
INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
TOOL_CALL_CLASSES = {"function": ToolCall, "custom": CustomToolCall}
# A Refusal's code, or else its status -> the code of a failed Response. The first is in no
# published schema, but OpenAI sends it and Codex acts on it.
CODES = {"context_length_exceeded": "context_length_exceeded", 429: "rate_limit_exceeded"}


class Options(NamedTuple):
    """What a request asks of the writing.

    clock     gives the time, in epoch seconds
    tools     the engine's name of a tool -> ClientTool
    summary   whether reasoning is also given as a summary
    encrypt   encrypts a text, or None where no encrypted reasoning is asked for
    logprobs  whether they are asked for
    """

    clock: Callable
    tools: dict = {}
    summary: bool = False
    encrypt: Callable | None = None
    logprobs: bool = False


class ResponseStream(PieceStream):
    """A stream of Responses events.

    writer    writes the events
    echo      what a Response repeats of its request: the bytes of a JSON object, in a list
    response  the Response (bytes), once the stream has ended
    """

    def __init__(self, token, options):
        """
        token    hexadecimal digits of which no other response has the same
        options  an Options
        """
        super().__init__()
        self.writer = EventWriter(token.encode(), options)
        self.options = options
        self.echo = []
        self.item_classes = {
            "text": MessageWithLogprobs if options.logprobs else Message,
            "refusal": RefusalMessage,
            "reasoning": Reasoning,
        }
        self.created = int(options.clock())
        self.begun = False
        self.items = []
        self.item = None  # the one that goes on
        self.saying = None  # the kind of its text, or None
        self.tool_calls = {}  # index -> ToolCall or CustomToolCall
        self.blank = []  # the pieces of a text that is no message yet
        self.finish = None  # the finish_reason
        self.response = None
        self.last_event = None

    # -- events

    def begin(self):
        """The first events, once."""
        if self.begun:
            return b""
        self.begun = True
        response = self.response_field(b"in_progress")
        created = self.writer.event(b"created", response)
        return created + self.writer.event(b"in_progress", response)

    def alive(self, note=""):
        """Events, since clients count no comments; a note is one all the same."""
        out = self.end_hold()
        if note:
            out += b": %b\n\n" % note.encode()
        if not self.begun:
            return out + self.begin()
        return out + self.writer.event(b"in_progress", self.response_field(b"in_progress"))

    def end(self):
        """The last event; none where only the Response is wanted."""
        super().end()
        check_finish(self.finish)
        if self.last_event is None:
            status = b"incomplete" if self.finish in INCOMPLETE else b"completed"
            self.response = self.as_json(status)
            if self.writer.plain:
                return b""
            steps.pause()
            last = self.writer.parts(status, b'"response":', self.response)
            self.last_event = steps.gathered(last)
        return self.last_event

    def fail(self, error):
        failed = {"code": code_of(error), "message": error.message}
        out = self.begin() + self.end_hold()
        return out + self.writer.event(b"failed", self.response_field(b"failed", failed))

    # -- the Response

    def response_field(self, status, error=None):
        return b'"response":%b' % self.as_json(status, error)

    def as_json(self, status, error=None):
        """The Response, as far as it is known (bytes)."""
        head = {
            "id": f"resp_{self.writer.token.decode()}",
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status.decode(),
            "error": error,
            "incomplete_details": None,
            "usage": None,
        }
        if status == b"in_progress":
            head["usage"] = usage_of(self.usage, {})
        else:
            seen = {"completion_tokens": self.tokens, "reasoning_tokens": self.thoughts}
            head["usage"] = usage_of(self.usage, seen | self.own_figures)
        if status == b"completed":
            head["completed_at"] = int(self.options.clock())
        if status == b"incomplete":
            head["incomplete_details"] = {"reason": INCOMPLETE[self.finish]}
        open_status = b"incomplete"
        if status == b"in_progress":
            open_status = status
        output = []
        for item in steps.paced(self.items):
            output += [b",", item.so_far(open_status)]
        echo = b"".join(self.echo)[1:]
        return steps.gathered((dumps(head)[:-1], b',"output":[', *output[1:], b"],", echo))

    # -- pieces

    def text(self, kind, text):
        if kind == self.saying:
            return self.item.say(text)
        return self.other_text(kind, text)

    def other_text(self, kind, text):
        """A text of another kind than the item that goes on."""
        if self.finish is not None:
            return b""
        if kind == "text":
            self.blank.append(text)
            if is_blank(text):  # line ends before a tool call are no message
                return b""
            text = b"".join(self.blank)
        self.blank = []
        out = self.begin_item(self.item_classes[kind])
        self.saying = kind
        return out + self.item.say(text)

    def begin_item(self, item_class, *args):
        """The events of a new item's beginning, and of the end of the one before."""
        out = self.begin()
        if self.item is not None and self.item.whole:
            out += self.item.close(b"completed")
        self.item = item_class(self.writer, len(self.items), *args)
        self.items.append(self.item)
        self.saying = None
        return out + self.item.open()

    def piece(self, kind, value):
        if kind == "tool" and self.finish is None:
            return self.tool_call(value)
        if kind == "finish":
            return self.finishes(value["finish_reason"])
        return b""

    def tool_call(self, piece):
        """The events of a piece of a tool call, the first of which says what it is called."""
        index = piece["index"]
        function = piece["function"]
        out = b""
        if index not in self.tool_calls:
            out = self.begin_tool_call(index, piece["id"], function["name"])
        item = self.tool_calls[index]
        if item.final:
            return out
        return out + item.take(function.get("arguments", ""))

    def begin_tool_call(self, index, call_id, name):
        self.blank = []
        tool = self.options.tools.get(name) or ClientTool("function", name)
        out = self.begin_item(TOOL_CALL_CLASSES[tool.type], tool, call_id)
        self.tool_calls[index] = self.item
        return out

    def finishes(self, reason):
        """The events of the end of all that is still open."""
        out = [self.begin()]
        if self.blank and not self.items:
            out.append(self.begin_item(self.item_classes["text"]))
            out.append(self.item.say(b"".join(self.blank)))
        self.finish = "stop"
        if isinstance(reason, str):
            self.finish = reason
        self.item = None
        self.saying = None
        still_open = [item for item in self.items if not item.final]
        for item in steps.paced(still_open):
            cut = self.finish in INCOMPLETE and (item is still_open[-1] or not item.whole)
            out.append(item.close(b"incomplete" if cut else b"completed"))
        return steps.gathered(out)

    @property
    def holds(self):
        return self.item.size if self.item else 0

    def write_chunk(self, chunk, data, changed):
        """Also logprobs, which stand in chunks that are looked into."""
        if self.options.logprobs:
            for choice in self.own_choices(chunk):
                logprobs = choice.get("logprobs")
                if isinstance(logprobs, steps.Raw):
                    logprobs = logprobs.value()
                self.writer.logprobs = objects_in(as_dict(logprobs), "content")
        out = super().write_chunk(chunk, data, changed)
        self.writer.logprobs = []
        return out


def code_of(error):
    """The code of a failed Response for a Refusal."""
    for known in (error.code, error.status):
        if known in CODES:
            return CODES[known]
    if error.status < 500:
        return "invalid_prompt"
    return "server_error"
