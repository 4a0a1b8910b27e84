"""Anthropic's Messages: the request as an Ask, the plain answer, the refusals.

Conversation and tools are read in conversation.py, the stream's events are made in events.py. Clients read
`content[0].text`, so without thinking there is no thinking block: reasoning that comes all the same is left out.

Source: the gateway's specification, pages 3 and 4; Anthropic's reference of POST /v1/messages; docs/messages.md lists
where this differs from either, and why.
"""

import logging

from dialects.engine import engine_chat, with_count
from dialects.read import mended, parse, typed
from dialects.chat import collected, write_message
from dialects.messages.conversation import at, read_conversation, read_tools
from dialects.messages.events import MessageStream, figures, message_id, reason_of
from dialects.messages.events import refusal  # noqa: F401, part of a dialect
from errors import InvalidRequest
from stream import required_choices, as_id, dumps, loads

logger = logging.getLogger("sparks")
BUDGETS = (
    (4096, "low"),
    (16384, "high"),
)  # thinking tokens below which a word stands for them; from there on: max
EFFORTS = ("low", "medium", "high", "xhigh", "max")
# What engines understand beside Anthropic's own fields goes on as it came.
PASSED = (
    "seed",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "chat_template_kwargs",
)
NUMBERS = ("temperature", "top_p")
LONGEST = 1 << 53  # tokens; beyond it JSON's numbers are not exact


def read(body, fleet):
    """A request's body (bytes) as an Ask. Raises Refusal."""
    request = parse(body)
    payload, model, thinks = read_prompt(request, fleet)
    payload["max_tokens"] = read_max_tokens(request, model.context)
    read_sampling(request, payload)
    named = request.get("model") or model.id
    if not typed(request, "stream", bool, "true or false"):
        return engine_chat(payload, fleet, named=named, thinks=thinks)
    payload["stream"] = True
    return with_count(
        engine_chat(payload, fleet, lambda names: MessageStream(named, thinks)), payload
    )


def read_prompt(request, fleet):
    """(payload, model, whether it thinks): all that the chat template sees."""
    typed(request, "model", str, "a text")
    payload = {
        "model": request.get("model"),
        **{name: request[name] for name in PASSED if request.get(name) is not None},
    }
    messages = request.get("messages")
    if messages is None:
        raise InvalidRequest("messages: Field required", "messages")
    model = fleet.find(payload["model"])
    payload["messages"] = read_conversation(request.get("system"), messages, model.effort)
    read_tools(request, payload, model.effort)
    return payload, model, read_thinking(request, payload, model)


def read_max_tokens(request, context):
    """It is a limit here, no wish: Claude Code asks for 128,000, and vLLM refuses more than the context."""
    value = request.get("max_tokens")
    if value is None:
        raise InvalidRequest("max_tokens: Field required", "max_tokens")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < LONGEST:
        raise at("max_tokens", "must be a positive whole number")
    return min(value, context or value)


# ---- thinking and the form of the answer


def read_thinking(request, payload, model):
    """Put in how much the model shall think; whether it shall."""
    config = typed(request, "output_config", dict, "an object") or {}
    read_format(config.get("format") or request.get("output_format"), payload)
    thinking = typed(request, "thinking", dict, 'an object such as {"type": "adaptive"}')
    thinking = {"type": "disabled"} if thinking is None else thinking
    kind, effort = thinking.get("type"), config.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise at("output_config.effort", f"must be one of {', '.join(EFFORTS)}")
    if kind == "enabled":
        payload["reasoning_effort"] = read_budget(thinking.get("budget_tokens"), payload, model)
    elif kind in ("adaptive", "between_tools"):
        payload["reasoning_effort"] = effort or "high"
    elif kind == "disabled":
        payload["reasoning_effort"] = "none"
    else:
        raise at("thinking.type", "must be enabled, adaptive or disabled")
    return kind != "disabled"


def read_budget(budget, payload, model):
    """The word for a number of thinking tokens; an engine that can count them gets the number too."""
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget < LONGEST:
        raise at("thinking.budget_tokens", "must be a positive whole number")
    if model.engine_kind.thinking_budget:
        payload[model.engine_kind.thinking_budget] = budget
    return next((word for least, word in BUDGETS if budget < least), "max")


def read_format(form, payload):
    if form is None:
        return
    if (
        not isinstance(form, dict)
        or form.get("type") != "json_schema"
        or not isinstance(form.get("schema"), dict)
    ):
        raise at("output_config.format", 'must be {"type": "json_schema", "schema": {...}}')
    payload["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": form["schema"]},
    }


def read_sampling(request, payload):
    for name in NUMBERS:
        value = typed(request, name, (int, float), "a number")
        if isinstance(value, bool):
            raise at(name, "must be a number")
        if value is not None:
            payload[name] = value
    top_k = typed(request, "top_k", int, "a whole number")
    if top_k is not None:
        payload["top_k"] = top_k
    stops = typed(request, "stop_sequences", list, "a list of texts")
    if stops and not all(isinstance(stop, str) for stop in stops):
        raise at("stop_sequences", "must be a list of texts")
    if stops := [stop for stop in stops or () if stop]:
        payload["stop"] = stops


# ---- the plain answer


def write(answer, ask):
    """(the client's bytes, the usage) of an engine's answer: a dict, or the bytes of a stream that nobody asked for."""
    if isinstance(answer, bytes):
        answer = collected(answer)
    choice = required_choices(answer)[0]
    message = choice["message"] if isinstance(choice.get("message"), dict) else {}
    blocks = blocks_of(message, ask.extra["thinks"])
    called, refused = (
        any(block["type"] == "tool_use" for block in blocks),
        bool(message.get("refusal")),
    )
    reason, sequence = reason_of(choice, called, refused)
    usage = answer.get("usage")
    return dumps(
        {
            "id": message_id(answer.get("id")),
            "type": "message",
            "role": "assistant",
            "model": ask.extra["named"],
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": figures(usage),
        }
    ), usage


def blocks_of(message, thinks):
    """The content blocks of a message of the engine's."""
    write_message(message, ("reasoning",))
    thought, texts = message.get("reasoning"), [message.get("refusal"), message.get("content")]
    blocks = []
    if isinstance(thought, str) and thought.strip() and thinks:
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    elif thought and not thinks:
        logger.info("thinking was off; %d characters of it were left out", len(thought))
    text = "".join(text for text in texts if isinstance(text, str))
    if text.strip():
        blocks.append({"type": "text", "text": text})
    return blocks + list(tool_uses(message.get("tool_calls")))


def tool_uses(calls):
    """The calls as blocks, no two of one id."""
    taken = set()
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            continue
        ident = str(as_id(call.get("id")) or "")
        ident = ident if ident and ident not in taken else f"toolu_{len(taken)}"
        taken.add(ident)
        yield {
            "type": "tool_use",
            "id": ident,
            "name": function["name"],
            "input": loads(mended(function.get("arguments")).encode("utf-8", "surrogatepass")),
        }
