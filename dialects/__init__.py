"""One file per API: it reads a request into an Ask, and writes what the engine answers.

    read(body, fleet) -> Ask            `fleet` finds models; raises Refusal
    write(answer, ask) -> (bytes, usage)    the client's body for a plain answer (a dict, or the bytes of a stream that
                                        nobody asked for), and the engine's own figures
    refusal(error) -> bytes             the body for a Refusal

What several APIs share stands here: they all become one engine request, a chat completion.
"""
import gc
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

import orjson

import reasoning
from dialects import sampling
from errors import InvalidRequest, error_body
from stream import data_of, dumps, loads

CHAT = "/v1/chat/completions"
KINDS = {"chat": "a chat model", "embedding": "an embedding model"}


@dataclass
class Ask:
    """A request as its engine gets it.

    path, body      where it goes, and the JSON body as a list of bytes; a str among them is an address: the image that is
                    there goes in, as a data URL. No path: it is only counted
    model           upstream.Model
    stream          a stream of stream.py for the answer, or None for a plain one
    extra           what the dialect keeps for itself
    count           the body of a question how long the prompt is, as a list of bytes; None: nobody needs to know before
                    the engine says it
    unseen          how many images were left out of `count`
    echo            what the answer repeats of the request, as a list of bytes
    """
    path: str
    body: list
    model: Any
    stream: Any = None
    extra: dict = field(default_factory=dict)
    count: list | None = None
    unseen: int = 0
    echo: list = field(default_factory=list)

    @property
    def images(self):
        """The addresses of images that are still to be fetched."""
        return [part for part in self.body if isinstance(part, str)]


def engine_chat(payload, fleet, streaming=None, **extra):
    """The Ask of a chat completion: its model found and what is particular about it, its reasoning controls translated, its
    images by address taken out, its usage asked for.

    payload     the request in the form of chat completions, `model` a name of ours; changed in place
    streaming   makes the stream, given the names under which the client gets the reasoning; None: a plain answer
    """
    model = for_engine(payload, fleet)
    names = reasoning.FIELDS[model.reasoning_field]
    if streaming is None:
        return Ask(CHAT, written(payload, images_of(payload)), model, extra={"names": names, **extra})
    payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
    return Ask(CHAT, written(payload, images_of(payload)), model, streaming(names), extra)


def model_for(fleet, name, kind):
    """The model that a client means, which must be of that kind. Raises Refusal."""
    model = fleet.find(name)
    if model.kind != kind:
        fit = ", ".join(other.id for other in fleet.models() if other.kind == kind and not other.hidden)
        raise InvalidRequest(f"{model.id} is {KINDS[model.kind]}, and this needs {KINDS[kind]}: "
                             + (f"use {fit}" if fit else "none is loaded here"), "model")
    return model


def instruct(messages, system):
    """Put the model's own system prompt before messages that have none."""
    if system and not any(message.get("role") in ("system", "developer") for message in messages):
        messages.insert(0, {"role": "system", "content": system})


def for_engine(payload, fleet):
    """Put the engine's own words, and what is particular about the model, into a chat; its Model."""
    model = model_for(fleet, payload.get("model"), "chat")
    reasoning.translate(payload, model.effort)
    sampling.settle(payload, model.sampling)
    instruct(payload["messages"], model.system)
    payload["model"] = model.engine_id
    return model


def counted(payload, fleet):
    """The Ask of a chat completion whose prompt is only counted."""
    model = for_engine(payload, fleet)
    images_of(payload)                                  # raises as for the request itself
    return to_count(Ask(None, [], model), payload)


def to_count(ask, payload):
    """Have the tokens of an Ask's prompt counted; `payload` is what `engine_chat` made of it. Images are left out: an
    engine's tokenizer doesn't see them, and they would be sent twice."""
    prompt = {name: payload[name] for name in ("model", "tools", "chat_template_kwargs") if payload.get(name)}
    if payload.get("reasoning_effort"):                 # here vLLM knows it as a field, there inside the kwargs only
        effort = {"reasoning_effort": payload["reasoning_effort"]}
        prompt["chat_template_kwargs"] = {**effort, **prompt.get("chat_template_kwargs", {})}
    prompt["messages"] = [without_images(message) for message in payload["messages"]]
    ask.unseen = sum(len(parts_of(whole)) - len(parts_of(bare))
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


def read_stream(payload):
    """(whether a stream is asked for, whether with its usage)."""
    streams = typed(payload, "stream", bool, "true or false") or False
    options = typed(payload, "stream_options", dict, "an object")
    if options is not None and not streams:
        raise InvalidRequest("stream_options needs stream: true", "stream_options")
    return streams, typed(options or {}, "include_usage", bool, "true or false", "stream_options.") or False


def chunks_of(events, stream):
    """The chunks (dicts) in the bytes of a whole stream, which `stream` reads. Raises Refusal if they are no whole answer."""
    chunks = [loads(data_of(event)) for event in stream.feed(events + b"\n\n").split(b"\n\n") if event]
    stream.end()
    return chunks


def count_of(n):
    """The number of choices that `n` asks for, or None where it is odd: the engine then decides."""
    if n is None:
        return 1
    return n if isinstance(n, int) and not isinstance(n, bool) and n > 0 else None


def parse(body):
    """The JSON object of a body. NaN, lone surrogates, bad UTF-8 and endless nesting are none."""
    gc.disable()                                        # it would walk through millions of new objects, again and again
    try:
        payload = orjson.loads(body)
        if isinstance(payload, dict) and any(isinstance(value, float) and abs(value) >= 1 << 63 for value in payload.values()):
            payload = json.loads(body)                  # a whole number that orjson makes a float, such as a large seed
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:                              # json reads less deep
        raise too_deep() from None
    finally:
        gc.enable()
    if not isinstance(payload, dict):
        raise InvalidRequest("the body must be a JSON object")
    return payload


def written(payload, images=()):
    """A payload as the bytes for the engine; while the request waits for its slot, nothing else of it is kept. `images` are
    the image_url objects in it, in their order, whose addresses are to stand as a str between the bytes."""
    try:
        text = dumps(payload)
    except RecursionError:                              # it is read deeper than it can be written
        raise too_deep() from None
    if not images:
        return [text]
    mark = "image:" + hashlib.sha256(text).hexdigest()  # which cannot stand in what it was made from
    urls = [image["url"] for image in images]
    for image in images:
        image["url"] = mark
    first, *rest = dumps(payload).split(mark.encode())
    return [first, *(piece for pair in zip(urls, rest) for piece in pair)]


def images_of(payload):
    """The image_url objects of a chat that hold an address. Raises InvalidRequest where an engine would read something else,
    a file of its own for example."""
    sources = [part.get("image_url") for message in payload["messages"] if isinstance(message.get("content"), list)
               for part in message["content"] if isinstance(part, dict) and part.get("type") == "image_url"]
    found = [source for source in sources if not is_data(source)]
    if not all(isinstance(source, dict) and is_address(source.get("url")) for source in found):
        raise InvalidRequest("an image must be a data URL (data:image/png;base64,...) or an http(s) address", "messages")
    return found


def is_data(source):
    return isinstance(source, dict) and isinstance(source.get("url"), str) and source["url"][:5].lower() == "data:"


def is_address(url):
    return isinstance(url, str) and url[:8].lower().startswith(("http://", "https://"))


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
