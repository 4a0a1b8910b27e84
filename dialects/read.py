"""How a client's body is read, whatever its API: JSON, fields and their types."""

from contextlib import suppress

import steps
from engines.kinds import STEERING, WRAPPERS
from errors import InvalidRequest, TooLarge
from values import loads

LIMIT = 1 << 53  # from here on JSON's numbers are not exact
PIECE = 10_000  # values
# Of a body: a million token ids beside thousands of tools and messages.
MOST = steps.Most(values=1_500_000, holders=300_000)
# Fields of all APIs and engines that hold a whole number. Clients in languages that know one type
# of numbers write 50.0.
WHOLE = {
    "best_of",
    "dimensions",
    "logprobs",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tokens",
    "max_tool_calls",
    "min_tokens",
    "n",
    "n_keep",
    "n_predict",
    "n_probs",
    "prompt_logprobs",
    "repeat_last_n",
    "seed",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "top_k",
    "top_logprobs",
    "truncate_prompt_tokens",
}


def parse(body):
    """The JSON object (a dict) of a body (bytes). Raises InvalidRequest, also for NaN, lone
    surrogates, bad UTF-8 and endless nesting."""
    try:
        payload = steps.read_exactly(body, MOST)
    except steps.TooMany as error:
        raise InvalidRequest(f"the body holds over {error}") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:  # json's depth is less than orjson's
        raise too_deep() from None
    if not isinstance(payload, dict):
        raise InvalidRequest("the body must be a JSON object")
    for name, value in payload.items():
        if type(value) is float and name in WHOLE:
            payload[name] = whole(value)
    return payload


def hold_back(payload, ignored):
    """Take the fields out by which a request would steer its engine, in place. `ignored`, a
    history.Ignored, gets their names."""
    tables = [("", payload)]
    for where, table in tables:  # it grows by those inside
        for name in STEERING:
            if table.pop(name, None) is not None:
                ignored.add(where + name, "field")
        inside = [name for name in WRAPPERS if isinstance(table.get(name), dict)]
        tables += [(f"{where}{name}.", table[name]) for name in inside]


def whole(value):
    """The whole number that a float stands for; any other value as it is."""
    if isinstance(value, float) and value.is_integer() and abs(value) < LIMIT:
        return int(value)
    return value


def whole_ids(given):
    """Token ids, a list or a list of lists, in which floats may stand for whole numbers."""
    if holds(given, list):
        return [whole_numbers(one) if isinstance(one, list) else one for one in given]
    return whole_numbers(given)


def whole_numbers(values):
    if holds(values, float):
        return [whole(value) for value in values]
    return values


def holds(values, kind):
    """Whether a list holds something of that type. A million values are not looked at in one go."""
    pieces = (values[at : at + PIECE] for at in range(0, len(values), PIECE))
    return any(kind in set(map(type, piece)) for piece in pieces)


def too_deep():
    return InvalidRequest("the body is nested too deeply")


def typed(table, name, wanted, expected, where=""):
    """A field of the right type, or None if it is absent or null. Raises InvalidRequest.

    wanted     the type, or a tuple of types
    expected   the same in words, for the client
    where      what stands before the field's name in the error, such as "stream_options."
    """
    value = table.get(name)
    if value is not None and not isinstance(value, wanted):
        raise InvalidRequest(f"{where}{name} must be {expected}", where + name)
    return value


def read_stream(payload):
    """(whether a stream is asked for, whether with its usage). Raises InvalidRequest."""
    streams = typed(payload, "stream", bool, "true or false")
    options = typed(payload, "stream_options", dict, "an object")
    if options is None:
        return bool(streams), False
    if not streams:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    usage = typed(options, "include_usage", bool, "true or false", "stream_options.")
    return True, bool(usage)


def choices_asked(n):
    """How many choices the field `n` asks for, or None where it is odd: the engine then decides."""
    if n is None:
        return 1
    return n if type(n) is int and n > 0 else None


def mended(arguments):
    """A tool call's arguments, as a client has them in its history, as the text of a JSON object:
    chat templates insist on one. What is no object goes into one, as {"input": …}. Raises
    RecursionError where they are no text, and nested too deeply."""
    if isinstance(arguments, dict):
        return as_text(arguments)
    if arguments is None or isinstance(arguments, str) and not arguments.strip():
        return "{}"
    value = arguments
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            value = read_arguments(arguments.encode())
        if isinstance(value, dict):
            return arguments
        with suppress(RecursionError):  # it is read deeper than it is written
            return as_text({"input": value})
    return as_text({"input": arguments})


def read_arguments(data):
    """The value that a call's arguments (bytes) are. Raises ValueError, RecursionError,
    TooLarge."""
    if len(data) <= steps.LARGE:
        return loads(data)
    try:
        return steps.read_exactly(data, MOST)
    except steps.TooMany as error:
        raise TooLarge(f"the arguments of a tool call hold over {error}") from None


def as_text(value):
    """A value as JSON. Raises RecursionError."""
    return steps.joined(value).decode()
