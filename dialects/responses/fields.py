"""The fields of a Responses request that say how the model shall answer, in the form of a chat's.

Source: OpenAI's published schema (github.com/openai/openai-openapi), CreateResponse.
"""

from dialects.read import typed
from errors import InvalidRequest

SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")
FORMS = ("text", "json_schema", "json_object")
LARGEST = 1 << 53  # beyond it JSON's numbers are not exact


def chat_fields(payload, include):
    """The fields that the engine knows under other names.

    include  names of further data that the client wants, from `read_include`
    """
    chat = {}
    most = typed(payload, "max_output_tokens", int, "a positive whole number")
    if most is not None:
        if isinstance(most, bool) or not 1 <= most < LARGEST:
            raise InvalidRequest(
                "max_output_tokens must be a positive whole number", "max_output_tokens"
            )
        chat["max_tokens"] = most
    top = read_whole(payload, "top_logprobs", 20) or 0
    if top or "message.output_text.logprobs" in include:
        chat |= {"logprobs": True, "top_logprobs": top}
    return chat | read_text(payload)


def read_text(payload):
    """`text`: the form and the length of what the model says."""
    text = typed(payload, "text", dict, 'an object such as {"format": {"type": "text"}}') or {}
    chat = {}
    if text.get("verbosity") is not None:
        chat["verbosity"] = one_of(text["verbosity"], VERBOSITIES, "text.verbosity")
    form = typed(text, "format", dict, "an object with a type", "text.") or {"type": "text"}
    kind = one_of(form.get("type"), FORMS, "text.format.type")
    if kind == "json_object":
        chat["response_format"] = {"type": kind}
    if kind == "json_schema":
        chat["response_format"] = {"type": kind, "json_schema": read_schema(form)}
    return chat


def read_schema(form):
    """A format's schema, as a chat has it."""
    where = "text.format."
    if typed(form, "schema", dict, "a JSON schema", where) is None:
        raise InvalidRequest("text.format.schema is missing: a JSON schema", "text.format.schema")
    if not typed(form, "name", str, "a text", where):
        raise InvalidRequest(
            "text.format.name is missing: any short name for the schema", "text.format.name"
        )
    typed(form, "strict", bool, "true or false", where)
    typed(form, "description", str, "a text", where)
    names = ("name", "schema", "strict", "description")
    return {name: form[name] for name in names if form.get(name) is not None}


def read_reasoning(payload):
    """`reasoning`, with its effort and summary."""
    given = typed(payload, "reasoning", dict, 'an object such as {"effort": "high"}') or {}
    summary = given.get("summary")
    if summary is None:
        summary = given.get("generate_summary")
    if summary is not None:
        one_of(summary, SUMMARIES, "reasoning.summary")
    return {"effort": typed(given, "effort", str, "a text", "reasoning."), "summary": summary}


def read_include(payload):
    """`include`: the names of further data that the client wants."""
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
