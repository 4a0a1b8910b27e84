"""Anthropic's events, made of the pieces of a chat completion's stream.

    message_start, ping
    content_block_start, content_block_delta …, content_block_stop  for one block after the other
    message_delta (stop_reason, usage), message_stop                or `error`, and nothing after it

A block begins with the first of its kind that is more than white space, so that none is empty: the
line ends that models write between reasoning, text and tool calls open no block. While a tool call
is unfinished, whatever belongs to other blocks waits for its end.

Source: Anthropic's reference of streaming messages, and what its SDKs' accumulators insist on.
"""

import logging
from collections import deque

from dialects.messages.errors import refusal
from dialects.messages.message import NULLS, message_id, stop_of
from dialects.messages.tool_calls import ToolCall
from dialects.messages.usage import TIERS, UNKNOWN, UNKNOWN_IN_DELTA, usage_of
from mending.answer import CUT
from stream import PieceStream, is_blank
from values import as_id, dumps

logger = logging.getLogger("sparks")
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
EMPTY_BLOCKS = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": "", "citations": []},
}
DELTAS = {
    "reasoning": b'{"type":"thinking_delta","thinking":"',
    "text": b'{"type":"text_delta","text":"',
    "tool": b'{"type":"input_json_delta","partial_json":"',
}
# Clients expect it at the end of a thinking block; there is nothing here to sign.
SIGNATURE = b'{"type":"signature_delta","signature":"'
AFTER = b'"}}\n\n'  # what follows the text of a delta's event


def event(kind, **fields):
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dumps({"type": kind, **fields}))


def before_delta(delta, index):
    """The event of a block's delta up to its text, which is the inside of a JSON string."""
    return (
        b"event: content_block_delta\n"
        b'data: {"type":"content_block_delta","index":%d,"delta":%b' % (index, delta)
    )


class MessageStream(PieceStream):
    """A stream of Anthropic's events.

    prompt_tokens  may be set before the first event: message_start then says how long the prompt is
    """

    closes_calls = False  # an empty input needs no words

    def __init__(self, model_name, thinks):
        """
        model_name  the model as the client calls it
        thinks      whether the client wants the reasoning
        """
        super().__init__()
        self.prompt_tokens = None
        self.model_name = model_name
        self.thinks = thinks
        self.begun = False
        self.completion_id = None
        self.last_choice = {}  # the choice with a finish_reason
        self.declined = False  # the model gave a refusal
        self.left_out = 0  # tokens of reasoning that the client doesn't want
        self.kept = []  # their texts, while there is no other answer
        # the block that is open
        self.block = None  # its kind, a name in DELTAS
        self.index = -1
        self.before = b""  # what stands before the text in its deltas' events
        self.blanks = {}  # kind of a text -> pieces of white space that have opened no block yet
        # tool calls
        self.tool_calls = {}  # index -> ToolCall
        self.open_tool_call = None
        # (kind, values) of the pieces that came before the open call was whole, a call's together
        self.waiting = deque()
        self.waiting_calls = {}  # index -> the values of a call in there

    # -- the pieces

    def from_bytes(self, event):
        """Not for the first event, which says the id."""
        return super().from_bytes(event) if self.begun else None

    def write_chunk(self, chunk, data, changed):
        self.completion_id = self.completion_id or as_id(chunk.get("id"))
        out = super().write_chunk(chunk, data, changed)
        if chunk.get("choices"):
            return self.start() + out
        return out

    def text(self, kind, text):
        if kind == self.block:
            return self.before + text + AFTER
        return self.other_text(kind, text)

    def piece(self, kind, value):
        if kind == "tool":
            return self.tool_call(value)
        if kind == "finish":
            self.last_choice = value
            return self.release() + self.only_thoughts() + self.close()
        return b""

    def other_text(self, kind, text):
        """A text of another kind than the block that is open."""
        if kind == "refusal":
            self.declined = True
            return self.text("text", text)
        if kind == "reasoning" and not self.thinks:
            self.left_out += 1
            if self.index < 0:
                self.kept.append(text)
            return b""
        if self.waiting or self.unfinished:
            self.waiting.append((kind, [text]))
            return b""
        return self.new_text(kind, text)

    def new_text(self, kind, text):
        """The same once no call is open."""
        if kind == self.block:
            return self.before + text + AFTER
        held = self.blanks.get(kind, [])
        if is_blank(text):
            held.append(text)
            self.blanks = {kind: held}
            return b""
        begin = self.begin(kind, EMPTY_BLOCKS[kind])
        return b"".join((begin, self.before, *held, text, AFTER))

    def tool_call(self, piece):
        """A piece of a tool call."""
        index = piece["index"]
        if index not in self.tool_calls:
            self.tool_calls[index] = ToolCall(piece)
        tool_call = self.tool_calls[index]
        if tool_call.state == "waiting" and (self.waiting or self.unfinished):
            if index not in self.waiting_calls:
                self.waiting_calls[index] = []
                self.waiting.append(("tool", self.waiting_calls[index]))
            self.waiting_calls[index].append(piece)
            return b""
        out = self.go_on(tool_call, piece)
        if tool_call.whole:
            out += self.release()
        return out

    def go_on(self, tool_call, piece):
        """A piece of a call whose turn it is."""
        if tool_call.state == "closed":  # its arguments were whole
            return b""
        tool_call.take(piece)
        out = b""
        if tool_call.state == "waiting":
            out = self.begin("tool", tool_call.block)
            tool_call.state = "open"
            self.open_tool_call = tool_call
        return out + self.arguments(tool_call.sayable())

    def arguments(self, text):
        return self.before + dumps(text)[1:-1] + AFTER if text else b""

    @property
    def unfinished(self):
        """Whether a tool call is open whose arguments still come."""
        return self.open_tool_call is not None and not self.open_tool_call.whole

    def release(self):
        """What waited for the open call, in its order: all of it once the answer has ended."""
        out = []
        while self.waiting and (self.last_choice or not self.unfinished):
            if self.block == "tool":
                out.append(self.close())
            kind, values = self.waiting.popleft()
            for value in values:
                if kind == "tool":
                    self.waiting_calls.pop(value["index"], None)
                    out.append(self.go_on(self.tool_calls[value["index"]], value))
                else:
                    out.append(self.new_text(kind, value))
        return b"".join(out)

    def only_thoughts(self):
        """The events of reasoning that is the whole answer, for a client that doesn't want any:
        else it would get no answer at all."""
        if self.index >= 0 or not self.kept or self.last_choice["finish_reason"] in CUT:
            return b""
        self.left_out = 0
        self.blanks = {}
        return self.text("text", b"".join(self.kept))

    # -- the blocks

    def start(self):
        """The events before all others, once."""
        if self.begun:
            return b""
        self.begun = True
        message = {
            "id": message_id(self.completion_id),
            "type": "message",
            "role": "assistant",
            "model": self.model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **NULLS,
            "usage": {
                **UNKNOWN,
                "service_tier": TIERS[self.tier],
                "input_tokens": self.prompt_tokens or 0,
            },
        }
        return event("message_start", message=message) + PING

    def begin(self, kind, block):
        out = self.start() + self.close()
        self.block = kind
        self.kept = []
        self.index += 1
        self.before = before_delta(DELTAS[kind], self.index)
        return out + event("content_block_start", index=self.index, content_block=block)

    def close(self):
        """The end of the block that is open; white space that opened none goes with it."""
        block = self.block
        self.block = None
        self.blanks = {}
        if block is None:
            return b""
        last = b""
        if block == "reasoning":
            last = before_delta(SIGNATURE, self.index) + AFTER
        if block == "tool":
            last = self.arguments(self.open_tool_call.rest())
            self.open_tool_call.state = "closed"
            self.open_tool_call = None
        return last + event("content_block_stop", index=self.index)

    # -- the end

    def alive(self, note=""):
        out = self.end_hold()
        if note:
            out += b": %b\n" % note.encode()
        return out + PING

    def fail(self, error):
        return self.end_hold() + b"event: error\ndata: " + refusal(error) + b"\n\n"

    def end(self):
        """What is still to be said, and the last two events."""
        super().end()
        out = self.start() + self.release() + self.close()
        if self.left_out:
            logger.info("thinking was off; %d tokens of it were left out", self.left_out)
        tool_calls = [one for one in self.tool_calls.values() if one.state != "waiting"]
        reason, sequence = stop_of(self.last_choice, tool_calls, self.declined)
        delta = {
            "stop_reason": reason,
            "stop_sequence": sequence,
            "container": None,
            "stop_details": None,
        }
        seen = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens}
        usage = {**UNKNOWN_IN_DELTA, **usage_of(self.usage, seen | self.own_figures)}
        return out + event("message_delta", delta=delta, usage=usage) + STOP
