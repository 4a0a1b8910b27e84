"""Parts of a message: its id and its end, streamed or plain, and the blocks of a plain one.

Source: Anthropic's reference of POST /v1/messages, the answer.
"""

import logging

from dialects.messages import ids
from dialects.read import mended
from mending.answer import CUT, check_finish
from values import as_id, loads, objects_in

logger = logging.getLogger("sparks")
REASONS = {"length": "max_tokens", "content_filter": "refusal"}  # by finish_reason

# What the reference always has in a message, and here is never anything else.
NULLS = {"container": None, "diagnostics": None, "stop_details": None}


def message_id(completion_id):
    """The engine's id of the completion as one of a message."""
    return "msg_" + str(as_id(completion_id) or 0).removeprefix("chatcmpl-")


def stop_of(choice, calls_tool, declines):
    """(stop_reason, stop_sequence) of a choice. Raises UpstreamError where it did not end.

    calls_tool  whether the message holds a tool call
    declines    whether it says that the model declines
    """
    finish = choice.get("finish_reason")
    stopped_by = choice.get("stop_reason")
    check_finish(finish)
    if isinstance(finish, str) and finish in REASONS:
        return REASONS[finish], None
    # Some engines name the stop sequence here, the number of a token, or nothing.
    if isinstance(stopped_by, str) and stopped_by:
        return "stop_sequence", stopped_by
    if declines:
        return "refusal", None
    if calls_tool:  # the finish_reason of a call that was forced is "stop" in some engines
        return "tool_use", None
    return "end_turn", None


def content_blocks(message, thinks, finish):
    """The content blocks of a plain completion's message, which mending/answer.py has mended.

    thinks  whether the client wants the reasoning
    finish  the finish_reason
    """
    blocks = []
    thinking = message.get("reasoning", "")
    texts = (message.get("refusal"), message.get("content"))
    text = "".join(text for text in texts if isinstance(text, str))
    tool_calls = objects_in(message, "tool_calls")
    if thinks:
        if thinking.strip():
            blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    elif finish not in CUT and not text.strip() and not tool_calls:
        text = thinking  # else there would be no answer at all
    elif thinking:
        logger.info("thinking was off; %d characters of it were left out", len(thinking))
    if text.strip():
        blocks.append({"type": "text", "text": text, "citations": None})
    return blocks + [tool_use_block(tool_call) for tool_call in tool_calls]


def tool_use_block(tool_call):
    """A tool call as a block."""
    function = tool_call["function"]
    arguments = mended(function["arguments"]).encode("utf-8", "surrogatepass")
    return {
        "type": "tool_use",
        "id": ids.for_client(tool_call["id"]),
        "name": function["name"],
        "input": loads(arguments),
    }
