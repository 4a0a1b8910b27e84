"""Parts of a message: its id and its end, streamed or plain, and the blocks of a plain one.

Source: Anthropic's reference of POST /v1/messages, the answer.
"""

import logging

from dialects.chat import write_message
from dialects.loose import as_dict, as_list
from dialects.read import mended
from stream import as_id, check_finish, loads

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


def content_blocks(message, thinks):
    """The content blocks of a plain completion's message (a dict, mended in place).

    thinks  whether the client wants the reasoning
    """
    write_message(message, ("reasoning",))
    blocks = []
    thinking = message.get("reasoning")
    if thinking and not thinks:
        logger.info("thinking was off; %d characters of it were left out", len(thinking))
    elif isinstance(thinking, str) and thinking.strip():
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    texts = (message.get("refusal"), message.get("content"))
    text = "".join(text for text in texts if isinstance(text, str))
    if text.strip():
        blocks.append({"type": "text", "text": text, "citations": None})
    return blocks + list(tool_use_blocks(message.get("tool_calls")))


def tool_use_blocks(tool_calls):
    """A message's tool calls as blocks, no two of one id; what has no name is no call."""
    taken = set()
    for tool_call in as_list(tool_calls):
        function = as_dict(as_dict(tool_call).get("function"))
        name = function.get("name")
        if not isinstance(name, str) or not name:
            continue
        ident = str(as_id(tool_call.get("id")) or "")
        if not ident or ident in taken:
            ident = f"toolu_{len(taken)}"
        taken.add(ident)
        arguments = mended(function.get("arguments")).encode("utf-8", "surrogatepass")
        yield {"type": "tool_use", "id": ident, "name": name, "input": loads(arguments)}
