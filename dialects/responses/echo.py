"""What a Response repeats of its request.

Source: OpenAI's published schema (github.com/openai/openai-openapi), Response.
"""

from dialects.engine import TIERS
from dialects.read import typed
from dialects.responses.fields import one_of, read_schema, read_whole
from errors import InvalidRequest
from steps import keep, parts_of

WORDS = {"service_tier": TIERS, "truncation": ("auto", "disabled")}
NUMBERS = {  # field -> (least, most, what holds where the client says nothing)
    "temperature": (0, 2, 1),
    "top_p": (0, 1, 1),
    "presence_penalty": (-2, 2, 0),
    "frequency_penalty": (-2, 2, 0),
}
# Metadata: how many fields there may be, the longest name of one, the longest value.
MOST_FIELDS = 16
LONGEST_NAME = 64
LONGEST_VALUE = 512


def echo_of(payload, box, reasoning):
    """The fields of a Response that say how it was asked for: what holds here, or what was wished.

    box        the Toolbox of the request
    reasoning  {"effort", "summary"}, from fields.read_reasoning
    """
    numbers = {name: read_number(payload, name) for name in NUMBERS}
    parallel = typed(payload, "parallel_tool_calls", bool, "true or false")
    for name, words in WORDS.items():
        if payload.get(name) is not None:
            one_of(payload[name], words, name)
    typed(payload, "store", bool, "true or false")
    echo = {"instructions": typed(payload, "instructions", str, "a text"), **numbers}
    if payload.get("user") is not None:
        echo["user"] = read_short(payload, "user")
    return {
        **echo,
        "reasoning": reasoning,
        "tools": box.echo,
        "tool_choice": box.choice,
        "parallel_tool_calls": True if parallel is None else parallel,
        "text": echo_of_text(payload.get("text") or {}),
        "max_output_tokens": payload.get("max_output_tokens"),
        "max_tool_calls": read_whole(payload, "max_tool_calls"),
        "top_logprobs": payload.get("top_logprobs") or 0,
        "metadata": read_metadata(payload),
        "prompt_cache_key": read_short(payload, "prompt_cache_key"),
        "safety_identifier": read_short(payload, "safety_identifier"),
        "previous_response_id": None,
        "background": False,
        "store": False,
        "truncation": "disabled",
    }


def echo_of_text(text):
    form = text.get("format") or {"type": "text"}
    echo = {"type": form["type"]}
    if form["type"] == "json_schema":
        echo |= {"strict": False, **read_schema(form)}
    return {"format": echo, "verbosity": text.get("verbosity") or "medium"}


def read_number(payload, name):
    low, high, usual = NUMBERS[name]
    value = payload.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be a number from {low} to {high}", name)
    return value


def read_short(payload, name):
    """A text that is no longer than metadata may be, or None."""
    value = typed(payload, name, str, "a text")
    if value is not None and len(value) > LONGEST_VALUE:
        raise InvalidRequest(f"{name} must not be longer than {LONGEST_VALUE} characters", name)
    return value


def read_metadata(payload):
    """The client's own notes."""
    given = typed(payload, "metadata", dict, "an object of texts") or {}
    if len(given) > MOST_FIELDS:
        raise InvalidRequest(f"metadata must not have more than {MOST_FIELDS} fields", "metadata")
    for name, value in given.items():
        if not isinstance(value, str) or len(value) > LONGEST_VALUE or len(name) > LONGEST_NAME:
            raise InvalidRequest(
                f"metadata must hold texts of at most {LONGEST_VALUE} characters, "
                f"their names {LONGEST_NAME}",
                "metadata",
            )
    return given


def written_echo(echo):
    """An echo as a list of bytes. Raises InvalidRequest where it is read deeper than written."""
    try:
        return parts_of(keep(echo))
    except RecursionError:
        raise InvalidRequest("the tools are nested too deeply", "tools") from None
