"""Parts of a message: its id and its end, streamed or plain, and the blocks of a plain one.

Source: Anthropic's reference of POST /v1/messages, the answer.
"""

import logging

import steps
from mending.answer import CUT, check_finish
from mending.arguments import whole_values
from values import as_id

logger = logging.getLogger("sparks")
REASONS = {"length": "max_tokens", "content_filter": "refusal"}  # by finish_reason

# What the reference always has in a message, and here is never anything else.
NULLS = {"container": None, "diagnostics": None, "stop_details": None}


def message_id(completion_id):
    """The engine's id of the completion as one of a message."""
    return "msg_" + str(as_id(completion_id) or 0).removeprefix("chatcmpl-")


def stop_of(choice, tool_calls, declines):
    """(stop_reason, stop_sequence) of a choice. Raises UpstreamError where it did not end.

    tool_calls  the ToolCalls in the message, a list
    declines    whether it says that the model declines
    """
    finish = choice.get("finish_reason")
    stopped_by = choice.get("stop_reason")
    check_finish(finish)
    if isinstance(finish, str) and finish in REASONS:
        return REASONS[finish], None
    if any(tool_call.broken for tool_call in tool_calls):
        return "max_tokens", None  # else a tool would run on a part of its input
    # Some engines name the stop sequence here, the number of a token, or nothing.
    if isinstance(stopped_by, str) and stopped_by:
        return "stop_sequence", stopped_by
    if declines:
        return "refusal", None
    if tool_calls:  # the finish_reason of a call that was forced is "stop" in some engines
        return "tool_use", None
    return "end_turn", None


def content_blocks(message, tool_calls, thinks, finish):
    """The content blocks of a plain completion's message, which mending/answer.py has mended.

    tool_calls  its ToolCalls
    thinks      whether the client wants the reasoning
    finish      the finish_reason
    """
    blocks = []
    thinking = message.get("reasoning", "")
    texts = (message.get("refusal"), message.get("content"))
    text = "".join(text for text in texts if isinstance(text, str))
    if thinks:
        if thinking.strip():
            blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    elif finish not in CUT and not text.strip() and not tool_calls:
        text = thinking  # else there would be no answer at all
    elif thinking:
        logger.info("thinking was off; %d characters of it were left out", len(thinking))
    if text.strip():
        blocks.append({"type": "text", "text": text, "citations": []})
    for tool_call in steps.paced(tool_calls):
        arguments = tool_call.sayable() + tool_call.rest()
        blocks.append({**tool_call.block, "input": whole_values(arguments)})
    return blocks
