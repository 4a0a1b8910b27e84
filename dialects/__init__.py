"""One file per API: it reads a request into an Ask, and writes what the engine answers.

    read(body, fleet) -> Ask            `fleet` finds models; raises Refusal
    write(answer, ask) -> (bytes, usage)    the client's body for a plain answer (a dict, or the bytes of a stream that
                                        nobody asked for), and the engine's own figures
    refusal(error) -> bytes             the body for a Refusal

What several APIs share stands here: they all become one engine request, a chat completion.
"""
import gc
import json
from dataclasses import dataclass, field
from typing import Any

import orjson

import reasoning
from errors import InvalidRequest, error_body
from stream import dumps, loads

CHAT = "/v1/chat/completions"


@dataclass
class Ask:
    """A request as its engine gets it.

    path, body      where it goes, and the JSON body as a list of bytes
    model           upstream.Model
    stream          a stream of stream.py for the answer, or None for a plain one
    extra           what the dialect keeps for itself
    echo            what the answer repeats of the request, as a list of bytes
    """
    path: str
    body: list
    model: Any
    stream: Any = None
    extra: dict = field(default_factory=dict)
    echo: list = field(default_factory=list)


def engine_chat(payload, fleet, streaming=None, **extra):
    """The Ask of a chat completion: its model found, its reasoning controls translated, its usage asked for.

    payload     the request in the form of chat completions, `model` a name of ours; changed in place
    streaming   makes the stream, given the names under which the client gets the reasoning; None: a plain answer
    """
    model = fleet.find(payload.get("model"))
    reasoning.translate(payload, model.effort)
    payload["model"] = model.engine_id
    names = reasoning.FIELDS[model.reasoning_field]
    if streaming is None:
        return Ask(CHAT, written(payload), model, extra={"names": names, **extra})
    payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
    return Ask(CHAT, written(payload), model, streaming(names), extra)


def openai_refusal(error):
    return dumps(error_body(error))


def parse(body):
    """The JSON object of a body. NaN, lone surrogates, bad UTF-8 and endless nesting are none."""
    gc.disable()                                        # it would walk through millions of new objects, again and again
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    finally:
        gc.enable()
    if not isinstance(payload, dict):
        raise InvalidRequest("the body must be a JSON object")
    if any(isinstance(value, float) and abs(value) >= 1 << 63 for value in payload.values()):
        payload = json.loads(body)                    # a whole number that orjson makes a float, such as a large seed
    return payload


def written(payload):
    """A payload as the bytes for the engine; while the request waits for its slot, nothing else of it is kept."""
    try:
        return [dumps(payload)]
    except RecursionError:                              # it is read deeper than it can be written
        raise InvalidRequest("the body is nested too deeply") from None


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
