"""Anthropic's Messages: a request as an Ask, the engine's plain answer as a message, and refusals.

    read    conversation.py and tools.py make a chat of the request, events.py the client's stream
    write   message.py and usage.py have what a plain message shares with a streamed one
    refusal errors.py

Source: the gateway's specification, pages 3 and 4; Anthropic's reference of POST /v1/messages;
docs/messages.md lists where this differs from either, and why.
"""

import reasoning
import steps
from dialects.chat import collected
from dialects.engine import engine_chat, with_count
from dialects.history import Ignored, Past
from dialects.messages.conversation import broken_inputs, read_conversation
from dialects.messages.errors import invalid, refusal
from dialects.messages.events import MessageStream
from dialects.messages.message import NULLS, content_blocks, message_id, stop_of
from dialects.messages.tool_calls import whole_call
from dialects.messages.tools import read_tools
from dialects.messages.usage import TIERS, UNKNOWN, usage_of
from dialects.read import hold_back, parse, typed, whole
from errors import InvalidRequest, NotFound
from mending.answer import read_message, required_choices
from values import as_dict, objects_in

__all__ = ["read", "write", "refusal"]

# What engines understand beside Anthropic's own fields goes on as it came.
PASSED = (
    "seed",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "chat_template_kwargs",
    "enable_thinking",
)
# `thinking` says that the model shall not think, so these words are not for effort.
EFFORTS = tuple(word for word in reasoning.WORDS if word not in ("none", "minimal"))
NO_THREAD = (
    "thread.previous_message_id: conversations are not kept here; send all messages again, without "
    'a thread or with {"type": "create"}'
)
LARGEST = 1 << 53  # of tokens; beyond it JSON's numbers are not exact


def read(body, fleet):
    """A request's body (bytes) as an Ask. Raises Refusal."""
    request = parse(body)
    ignored = Ignored()
    payload, model, thinks = read_prompt(request, fleet, ignored)
    payload["max_tokens"] = read_max_tokens(request, model.context)
    read_sampling(request, payload)
    payload["service_tier"] = read_tier(request)
    model_name = request.get("model") or model.id
    if not typed(request, "stream", bool, "true or false"):
        ask = engine_chat(payload, fleet, ignored, model_name=model_name, thinks=thinks)
    else:
        payload["stream"] = True

        def make_stream(names, model):
            return MessageStream(model_name, thinks)

        ask = engine_chat(payload, fleet, ignored, make_stream)
        with_count(ask, payload)
    if broken := broken_inputs(request["messages"]):
        ask.remarks.append(f"{broken} tool calls in a history had no object for an input")
    return ask


def write(answer, ask):
    """(the client's bytes, the usage) of an engine's answer.

    answer  a chat completion (a dict), or the bytes of a stream that nobody asked for
    """
    if not isinstance(answer, dict):
        answer = collected(answer, ask.oddities)
    choice = required_choices(answer)[0]
    read_message(choice, answer.get("id"), ("reasoning",), ask.oddities)
    message = as_dict(choice.get("message"))
    pieces = steps.paced(objects_in(message, "tool_calls"))
    tool_calls = [whole_call(piece) for piece in pieces]
    blocks = content_blocks(message, tool_calls, ask.extra["thinks"], choice.get("finish_reason"))
    reason, sequence = stop_of(choice, tool_calls, bool(message.get("refusal")))
    usage = answer.get("usage")
    said = {
        "id": message_id(answer.get("id")),
        "type": "message",
        "role": "assistant",
        "model": ask.extra["model_name"],
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": sequence,
        **NULLS,
        "usage": {**UNKNOWN, "service_tier": TIERS[ask.tier], **usage_of(usage, ask.own_figures)},
    }
    return steps.write(said), usage


# ---- the prompt


def read_prompt(request, fleet, ignored):
    """(payload, model, whether it thinks): all that the chat template sees.

    ignored  history.Ignored, which gets the names of what is left out
    """
    typed(request, "model", str, "a text")
    hold_back(request, ignored)
    payload = {"model": request.get("model")}
    for name in PASSED:
        if request.get(name) is not None:
            payload[name] = request[name]
    read_thread(request, ignored)
    messages = request.get("messages")
    if messages is None:
        raise InvalidRequest("messages: Field required", "messages")
    model = fleet.find(payload["model"])
    past = Past(ignored)
    payload["messages"] = read_conversation(request.get("system"), messages, model.table, past)
    read_tools(request, payload, model.table, ignored)
    return payload, model, read_thinking(request, payload, model)


def read_thread(request, ignored):
    """Look whether a conversation is meant that the server keeps, of which `messages` has only the
    end. None is kept; Anthropic's SDKs send all of it again when they hear that."""
    thread = as_dict(request.get("thread"))
    if thread.get("type") == "continue":
        raise NotFound(NO_THREAD, "thread", code="thread_not_found")
    if thread:
        ignored.add("thread", thread.get("type"))


def read_thinking(request, payload, model):
    """Put in how much the model shall think, and its answer's form. Returns whether it thinks."""
    config = typed(request, "output_config", dict, "an object") or {}
    read_format(config.get("format") or request.get("output_format"), payload)
    thinking = typed(request, "thinking", dict, 'an object such as {"type": "adaptive"}')
    mode = "disabled" if thinking is None else thinking.get("type")
    effort = config.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise invalid("output_config.effort", f"must be one of {', '.join(EFFORTS)}")
    if mode == "enabled":
        payload["reasoning_effort"] = read_budget(thinking.get("budget_tokens"), payload, model)
    elif mode in ("adaptive", "between_tools"):
        payload["reasoning_effort"] = effort or "high"
    elif mode == "disabled":
        payload["reasoning_effort"] = "none"
    else:
        raise invalid("thinking.type", "must be enabled, adaptive or disabled")
    return mode != "disabled"


def read_budget(budget, payload, model):
    """The effort for a number of thinking tokens. An engine that counts them gets these too."""
    budget = whole(budget)
    check_tokens(budget, "thinking.budget_tokens")
    if model.engine_kind.thinking_budget:
        payload[model.engine_kind.thinking_budget] = budget
    return reasoning.effort_for(budget)


def read_format(form, payload):
    """Put the schema that the answer must keep to into the payload; None: it is free."""
    if form is None:
        return
    schema = as_dict(form).get("schema")
    if as_dict(form).get("type") != "json_schema" or not isinstance(schema, dict):
        raise invalid("output_config.format", 'must be {"type": "json_schema", "schema": {...}}')
    payload["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema},
    }


# ---- the rest of the request


def read_max_tokens(request, context):
    """The most tokens of the answer.

    Claude Code asks for 128,000 of any model, and engines refuse more than the context (in tokens).
    """
    value = request.get("max_tokens")
    if value is None:
        raise InvalidRequest("max_tokens: Field required", "max_tokens")
    check_tokens(value, "max_tokens")
    return min(value, context or value)


def read_tier(request):
    """The service tier in OpenAI's words. Both of Anthropic's are the usual one here; "flex" is
    taken too, since Anthropic's API has no word for what need not be soon."""
    asked = request.get("service_tier")
    if asked not in (None, "auto", "standard_only", "flex"):
        raise invalid("service_tier", "must be auto or standard_only, or flex: last in turn")
    return asked and asked.replace("standard_only", "default")


def check_tokens(value, where):
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < LARGEST:
        raise invalid(where, "must be a positive whole number")


def read_sampling(request, payload):
    """Put in how the model chooses its tokens, and where it stops."""
    for name in ("temperature", "top_p"):
        value = typed(request, name, (int, float), "a number")
        if isinstance(value, bool):
            raise invalid(name, "must be a number")
        if value is not None:
            payload[name] = value
    top_k = typed(request, "top_k", int, "a whole number")
    if top_k is not None:
        payload["top_k"] = top_k
    stops = typed(request, "stop_sequences", list, "a list of texts") or []
    if not all(isinstance(stop, str) for stop in stops):
        raise invalid("stop_sequences", "must be a list of texts")
    stops = [stop for stop in stops if stop]
    if stops:
        payload["stop"] = stops
