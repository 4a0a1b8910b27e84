"""How a client's body is read, whatever its API: JSON, fields and their types."""

import gc
import json

import orjson

from errors import InvalidRequest
from stream import dumps, loads


def read_stream(payload):
    """(whether a stream is asked for, whether with its usage)."""
    streams = typed(payload, "stream", bool, "true or false") or False
    options = typed(payload, "stream_options", dict, "an object")
    if options is not None and not streams:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return streams, typed(
        options or {}, "include_usage", bool, "true or false", "stream_options."
    ) or False


def choices_asked(n):
    """The number of choices that `n` asks for, or None where it is odd: the engine then decides."""
    if n is None:
        return 1
    return n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else None


def parse(body):
    """The JSON object of a body. NaN, lone surrogates, bad UTF-8 and endless nesting are none."""
    gc.disable()  # it would walk through millions of new objects, again and again
    try:
        payload = orjson.loads(body)
        if isinstance(payload, dict) and any(
            isinstance(value, float) and abs(value) >= 1 << 63 for value in payload.values()
        ):
            payload = json.loads(
                body
            )  # a whole number that orjson makes a float, such as a large seed
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:  # json reads less deep
        raise too_deep() from None
    finally:
        gc.enable()
    if not isinstance(payload, dict):
        raise InvalidRequest("the body must be a JSON object")
    return payload


def too_deep():
    return InvalidRequest("the body is nested too deeply")


def typed(table, name, kind, expected, where=""):
    """A field of the right type, or None if it is absent or null."""
    value = table.get(name)
    if value is not None and not isinstance(value, kind):
        raise InvalidRequest(f"{where}{name} must be {expected}", where + name)
    return value


def mended(arguments):
    """Tool arguments as the JSON object that chat templates insist on, in a string."""
    if isinstance(arguments, dict):
        return dumps(arguments).decode()
    if arguments is None or isinstance(arguments, str) and not arguments.strip():
        return "{}"
    try:
        value = loads(arguments.encode()) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = arguments
    return arguments if isinstance(value, dict) else dumps({"input": value}).decode()
