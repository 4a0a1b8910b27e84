"""OpenAI's Responses API, stateless: what a request says is all that is known.

Its items become the messages of a chat, its tools functions of the engine's; events.py writes the answer.

Source: OpenAI's published schema (github.com/openai/openai-openapi), CreateResponse; what Codex sends.
"""

from dialects import sampling
from dialects.engine import engine_chat
from dialects.read import parse, typed
from dialects.responses.input import messages_of
from dialects.responses.events import Options, ResponseStream
from dialects.responses.tools import Toolbox
from errors import InvalidRequest, error_body
from stream import dumps

NOT_KEPT = "nothing is stored here, so an answer cannot be built on an earlier one; send all items in `input`, with store: false"
STORED = {  # fields that only make sense where answers are stored
    "previous_response_id": NOT_KEPT,
    "conversation": NOT_KEPT,
    "background": "nothing is stored here, so there would be nowhere to fetch the answer; set stream: true instead",
    "prompt": "prompt templates are not stored here; send their text as `instructions` and `input`",
}
# What the engine gets in other words or not at all; every other field goes through as it is.
OWN = (
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "max_output_tokens",
    "top_logprobs",
    "include",
    "store",
    "metadata",
    "client_metadata",
    "truncation",
    "service_tier",
    "max_tool_calls",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "context_management",
    "moderation",
    "stream",
    "stream_options",
    "reasoning",
    "n",
    "messages",
    *STORED,
)
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")
TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
TRUNCATIONS = ("auto", "disabled")
PAIRS, NAME, VALUE = 16, 64, 512  # how many metadata there may be, and the longest of them
RANGES = {
    "temperature": (0, 2, 1),
    "top_p": (0, 1, 1),
    "presence_penalty": (-2, 2, 0),
    "frequency_penalty": (-2, 2, 0),
}
PARAMS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}  # engine's -> client's
LARGEST = 1 << 53


class Responses:
    """The dialect. It is given what it must not fetch by itself:

    now     gives the time, in epoch seconds
    token   gives hexadecimal digits, others each time
    seal    encrypts and decrypts reasoning that a client keeps (seal.Seal), or None: then none is given and none is read
    """

    def __init__(self, now, token, seal=None):
        self.now, self.token, self.seal = now, token, seal

    def read(self, body, fleet):
        """A request's body (bytes) as an Ask. Raises Refusal."""
        payload = parse(body)
        refuse_stored(payload)
        streams = typed(payload, "stream", bool, "true or false") or False
        typed(payload, "stream_options", dict, "an object")
        typed(payload, "model", str, "a text")
        box, reasoning, wanted = Toolbox(payload), read_reasoning(payload), read_include(payload)
        chat = {
            "messages": messages_of(payload, box, self.seal and self.seal.decrypt),
            **box.fields,
            **settings(payload, wanted),
        }
        echo = echo_of(payload, box, reasoning)
        if reasoning["effort"] is not None:
            chat["reasoning"] = {"effort": reasoning["effort"]}
        own = (
            OWN + sampling.LENGTH if "max_tokens" in chat else OWN
        )  # else a chat's name for it would win
        rest = {name: value for name, value in payload.items() if name not in own}
        sealed = "reasoning.encrypted_content" in wanted and self.seal
        stream = ResponseStream(
            self.token(),
            Options(
                self.now,
                box.names,
                reasoning["summary"] is not None,
                self.seal.encrypt if sealed else None,
                "logprobs" in chat,
            ),
        )
        if streams:
            rest["stream"] = True
        ask = engine_chat(
            {**rest, **chat}, fleet, (lambda names: stream) if streams else None, writer=stream
        )
        stream.echo = ask.echo = written_echo({"model": ask.model.id, **echo})
        return ask

    def write(self, answer, ask):
        """(the client's bytes, the usage) of an engine's answer: a dict, or the bytes of a stream that nobody asked for."""
        stream = ask.extra["writer"]
        if isinstance(answer, bytes):
            stream.feed(answer + b"\n\n")
        else:
            stream.whole(answer)
        stream.end()
        return stream.response, stream.usage

    def refusal(self, error):
        """The body for a Refusal, which names the field as the client knows it."""
        body = error_body(error)
        body["error"]["param"] = PARAMS.get(error.param, error.param)
        return dumps(body)


def refuse_stored(payload):
    for name, reason in STORED.items():
        if payload.get(name) not in (None, False):
            raise InvalidRequest(f"{name} is not supported: {reason}", name)


# ---- settings


def settings(payload, wanted):
    """The fields that the engine knows under other names."""
    chat, most = {}, typed(payload, "max_output_tokens", int, "a positive whole number")
    if most is not None:
        if isinstance(most, bool) or not 1 <= most < LARGEST:
            raise InvalidRequest(
                "max_output_tokens must be a positive whole number", "max_output_tokens"
            )
        chat["max_tokens"] = most
    top = read_whole(payload, "top_logprobs", 20) or 0
    if top or "message.output_text.logprobs" in wanted:
        chat |= {"logprobs": True, "top_logprobs": top}
    return chat | read_text(payload)


def read_text(payload):
    """`text`: the form and the length of what the model says."""
    text = typed(payload, "text", dict, 'an object such as {"format": {"type": "text"}}') or {}
    chat, verbosity = {}, text.get("verbosity")
    if verbosity is not None:
        chat["verbosity"] = one_of(verbosity, VERBOSITIES, "text.verbosity")
    form = typed(text, "format", dict, "an object with a type", "text.") or {"type": "text"}
    kind = one_of(form.get("type"), ("text", "json_schema", "json_object"), "text.format.type")
    if kind == "json_object":
        chat["response_format"] = {"type": kind}
    if kind == "json_schema":
        chat["response_format"] = {"type": kind, "json_schema": read_schema(form)}
    return chat


def read_schema(form):
    where = "text.format."
    if typed(form, "schema", dict, "a JSON schema", where) is None:
        raise InvalidRequest("text.format.schema is missing: a JSON schema", "text.format.schema")
    if not typed(form, "name", str, "a text", where):
        raise InvalidRequest(
            "text.format.name is missing: any short name for the schema", "text.format.name"
        )
    typed(form, "strict", bool, "true or false", where)
    typed(form, "description", str, "a text", where)
    return {
        name: form[name]
        for name in ("name", "schema", "strict", "description")
        if form.get(name) is not None
    }


def read_reasoning(payload):
    """`reasoning`, with its effort and summary."""
    given = typed(payload, "reasoning", dict, 'an object such as {"effort": "high"}') or {}
    summary = (
        given.get("summary") if given.get("summary") is not None else given.get("generate_summary")
    )
    if summary is not None:
        one_of(summary, SUMMARIES, "reasoning.summary")
    return {"effort": typed(given, "effort", str, "a text", "reasoning."), "summary": summary}


def read_include(payload):
    include = typed(payload, "include", list, "a list of texts") or []
    if not all(isinstance(name, str) for name in include):
        raise InvalidRequest("include must be a list of texts", "include")
    return include


def one_of(value, words, name):
    if not isinstance(value, str) or value not in words:
        raise InvalidRequest(f"{name} must be one of: {', '.join(words)}", name)
    return value


def read_whole(payload, name, most=LARGEST):
    """A whole number from 0 to `most`, or None."""
    value = payload.get(name)
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most
    ):
        raise InvalidRequest(f"{name} must be a whole number from 0 to {most}", name)
    return value


# ---- what the answer repeats


def echo_of(payload, box, reasoning):
    """The fields of a Response that say how it was asked for: what holds here, and else what the client wished."""
    numbers = {name: read_number(payload, name) for name in RANGES}
    parallel = typed(payload, "parallel_tool_calls", bool, "true or false")
    for name, words in (("service_tier", TIERS), ("truncation", TRUNCATIONS)):
        if payload.get(name) is not None:
            one_of(payload[name], words, name)
    typed(payload, "store", bool, "true or false")
    text = payload.get("text") or {}
    user = {"user": read_name(payload, "user")} if payload.get("user") is not None else {}
    return {
        "instructions": typed(payload, "instructions", str, "a text"),
        **numbers,
        **user,
        "reasoning": reasoning,
        "tools": box.echo,
        "tool_choice": box.choice,
        "parallel_tool_calls": True if parallel is None else parallel,
        "text": {
            "format": echo_of_format(text.get("format")),
            "verbosity": text.get("verbosity") or "medium",
        },
        "max_output_tokens": payload.get("max_output_tokens"),
        "max_tool_calls": read_whole(payload, "max_tool_calls"),
        "top_logprobs": payload.get("top_logprobs") or 0,
        "metadata": read_metadata(payload),
        "prompt_cache_key": read_name(payload, "prompt_cache_key"),
        "safety_identifier": read_name(payload, "safety_identifier"),
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
        "service_tier": "default",
    }


def echo_of_format(form):
    if not form or form["type"] != "json_schema":
        return {"type": form["type"] if form else "text"}
    return {"type": "json_schema", "strict": False, **read_schema(form)}


def read_number(payload, name):
    low, high, usual = RANGES[name]
    value = payload.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low} to {high}", name)
    return value


def read_name(payload, name):
    value = typed(payload, name, str, "a text")
    if value is not None and len(value) > VALUE:
        raise InvalidRequest(f"{name} must not be longer than {VALUE} characters", name)
    return value


def read_metadata(payload):
    given = typed(payload, "metadata", dict, "an object of texts") or {}
    if len(given) > PAIRS:
        raise InvalidRequest(f"metadata must not have more than {PAIRS} fields", "metadata")
    for name, value in given.items():
        if not isinstance(value, str) or len(value) > VALUE or len(name) > NAME:
            raise InvalidRequest(
                f"metadata must hold texts of at most {VALUE} characters, their names {NAME}",
                "metadata",
            )
    return given


def written_echo(echo):
    try:
        return [dumps(echo)]
    except RecursionError:
        raise InvalidRequest("the tools are nested too deeply", "tools") from None
