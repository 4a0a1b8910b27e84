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

    path, body      where it goes, and the JSON body as a list of bytes; no path: it is only counted
    model           upstream.Model
    stream          a stream of stream.py for the answer, or None for a plain one
    extra           what the dialect keeps for itself
    count           the body of a question how long the prompt is, as a list of bytes; None: nobody needs to know before
                    the engine says it
    uncounted       how many images were left out of `count`
    echo            what the answer repeats of the request, as a list of bytes
    """
    path: str
    body: list
    model: Any
    stream: Any = None
    extra: dict = field(default_factory=dict)
    count: list | None = None
    uncounted: int = 0
    echo: list = field(default_factory=list)


def engine_chat(payload, fleet, streaming=None, **extra):
    """The Ask of a chat completion: its model found, its reasoning controls translated, its usage asked for.

    payload     the request in the form of chat completions, `model` a name of ours; changed in place
    streaming   makes the stream, given the names under which the client gets the reasoning; None: a plain answer
    """
    model = for_engine(payload, fleet)
    names = reasoning.FIELDS[model.reasoning_field]
    if streaming is None:
        return Ask(CHAT, written(payload), model, extra={"names": names, **extra})
    payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
    return Ask(CHAT, written(payload), model, streaming(names), extra)


def for_engine(payload, fleet):
    """Put the engine's own words into a payload; its Model."""
    model = fleet.find(payload.get("model"))
    reasoning.translate(payload, model.effort)
    payload["model"] = model.engine_id
    return model


def counted(payload, fleet):
    """The Ask of a chat completion whose prompt is only counted."""
    return to_count(Ask(None, [], for_engine(payload, fleet)), payload)


def to_count(ask, payload):
    """Have the tokens of an Ask's prompt counted; `payload` is what `engine_chat` made of it. Images are left out: an
    engine's tokenizer doesn't see them, and they would be sent twice."""
    prompt = {name: payload[name] for name in ("model", "tools", "chat_template_kwargs") if payload.get(name)}
    if payload.get("reasoning_effort"):                 # here vLLM knows it as a field, there inside the kwargs only
        effort = {"reasoning_effort": payload["reasoning_effort"]}
        prompt["chat_template_kwargs"] = {**effort, **prompt.get("chat_template_kwargs", {})}
    prompt["messages"] = [without_images(message) for message in payload["messages"]]
    ask.uncounted = sum(len(parts_of(whole)) - len(parts_of(bare))
                     for whole, bare in zip(payload["messages"], prompt["messages"]))
    ask.count = written(prompt)
    return ask


def without_images(message):
    if not any(part.get("type") == "image_url" for part in parts_of(message)):
        return message
    return {**message, "content": [part for part in message["content"] if part.get("type") != "image_url"]}


def parts_of(message):
    return message["content"] if isinstance(message.get("content"), list) else []


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
