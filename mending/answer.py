"""What ends an answer, what is odd about it, and answers that come whole."""

import steps
from engines.kinds import GIVEN_UP
from errors import UpstreamError
from mending.thinking import NAMES, set_reasoning, split_thinking
from mending.tool_calls import ToolCalls
from values import as_dict, as_id, drop_nulls, object_in, objects_in

CALL_TAG = b"<tool_call>"  # how several models write a call, which an engine's parser takes out
ABANDONED = "the engine gave this answer up; send the request again"
BROKE_OFF = "the engine broke off before the answer was finished; send the request again"
FINISHES = ("stop", "length", "tool_calls", "content_filter", "function_call")
CUT = ("length", "content_filter")  # the finish_reasons of an answer that is not all there

# Fields of an answer that some engines give as null, which OpenAI's schema forbids, or did lately.
NEVER_NULL = ("service_tier", "system_fingerprint", "usage")

# What is odd about an answer, and worth counting: Ask.oddities, sparks_oddities_total{kind}. Others
# are in mending/tool_calls.py.
ONLY_REASONING = "only_reasoning"
CALL_IN_REASONING = "call_in_reasoning"
NO_CALL = "finish_without_call"
UNKNOWN_FINISH = "unknown_finish"


def check_finish(reason):
    """Raises UpstreamError where a finish_reason says that the answer is not whole."""
    if not reason:
        raise UpstreamError(BROKE_OFF)
    if reason in GIVEN_UP:
        raise UpstreamError(ABANDONED)


def note_end(reason, calls, only_thought, oddities):
    """Note what is odd about the end of a choice.

    reason         its finish_reason
    calls          its ToolCalls
    only_thought   whether it has said reasoning, and nothing else
    oddities       a set, to which that is added
    """
    if reason and reason not in FINISHES:
        oddities.add(UNKNOWN_FINISH)
    if reason == "tool_calls" and not calls.begun:
        oddities.add(NO_CALL)
    if only_thought and not calls.begun and reason and reason not in CUT:
        oddities.add(ONLY_REASONING)


def fit_finish(choice, calls):
    """Give a choice that ends, with these ToolCalls, a finish_reason that is true and that clients
    know: by another one some SDKs run no tool. Returns whether it had another one."""
    reason = choice.get("finish_reason")
    if not reason or reason in CUT:
        return False
    fitting = reason
    if calls.cut_short:
        fitting = "length"
    elif reason not in FINISHES or reason == "tool_calls" and not calls.begun:
        fitting = "tool_calls" if calls.begun else "stop"
    choice["finish_reason"] = fitting
    return fitting != reason


def read_message(choice, completion_id, names, oddities):
    """Mend a choice of a plain completion as a stream does one, in place. Of a whole message more
    is known: each of its tool calls is one of its own, and its thinking may have lost its opening
    tag. Raises UpstreamError where it is no answer.

    names      those under which the client gets the reasoning
    oddities   a set, to which what is odd is added
    """
    reason = choice.get("finish_reason")
    check_finish(reason)
    message = choice["message"] = object_in(choice, "message")
    join_parts(message)
    content = message.get("content")
    thought = ""
    if isinstance(content, str):
        thought, rest = split_thinking(content, any(message.get(name) for name in NAMES))
        if rest != content:
            message["content"] = rest
    set_reasoning(message, names, thought)
    steps.pause()
    calls = ToolCalls(oddities, [])
    if message.get("tool_calls"):
        given = objects_in(message, "tool_calls")
        message["tool_calls"] = calls.whole(given, as_id(completion_id) or "0", reason in CUT)
        if not message["tool_calls"]:
            del message["tool_calls"]
    thoughts = [message[name] for name in names if message.get(name)]
    if thoughts and CALL_TAG.decode() in thoughts[0]:
        oddities.add(CALL_IN_REASONING)
    texts = (message.get("content"), message.get("refusal"))
    spoke = any(isinstance(text, str) and text.strip() for text in texts)
    note_end(reason, calls, bool("".join(thoughts).strip()) and not spoke, oddities)
    fit_finish(choice, calls)


def read_text(choice, oddities):
    """Mend a choice of a plain text completion. Raises UpstreamError where it is no answer."""
    reason = choice.get("finish_reason")
    check_finish(reason)
    calls = ToolCalls(oddities, [])
    note_end(reason, calls, False, oddities)
    fit_finish(choice, calls)
    if not isinstance(choice.get("text"), str):
        choice["text"] = ""


def name_tier(answer, tier):
    """Have an answer or a chunk say which service tier it had, in place, if anybody has asked.
    Returns whether it said another one."""
    if tier is None or answer.get("service_tier") == tier:
        return False
    answer["service_tier"] = tier
    return True


def fit_nulls(answer):
    """Take the nulls out of a plain answer that OpenAI's schema forbids, in place."""
    drop_nulls(answer, NEVER_NULL)
    usage = object_in(answer, "usage")
    drop_nulls(usage, steps.paced(list(usage)))


def join_parts(message):
    """Make texts of content that is a list of parts, in a message or a delta, in place. Returns
    whether it was: any other content than that, a text or null is none."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return False
    texts = {"text": [], "thinking": []}
    for part in steps.paced(objects_in(message, "content")):
        kind = part.get("type")
        if kind in texts:
            texts[kind].append(text_of(part.get(kind)))
    message["content"] = "".join(texts["text"])
    thinking = "".join(texts["thinking"])
    if thinking and not any(message.get(name) for name in NAMES):
        message[NAMES[0]] = thinking
    return True


def text_of(value):
    """The text in a part: one, or a list of texts."""
    if isinstance(value, list):
        texts = [as_dict(part).get("text") for part in value]
        return "".join(text for text in texts if isinstance(text, str))
    return value if isinstance(value, str) else ""


def index_of(choice):
    """The index of a choice; 0 where it has none."""
    return choice["index"] if isinstance(choice.get("index"), int) else 0


def choices_of(answer):
    """The choices (dicts) of a chunk or a completion."""
    return objects_in(answer, "choices")


def required_choices(completion):
    """The choices of a plain completion. Raises UpstreamError where it has none."""
    choices = completion["choices"] = choices_of(completion)
    if not choices:
        raise UpstreamError("the engine's answer holds no completion; send the request again")
    return choices
