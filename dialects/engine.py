"""The engine's request: what every chat API becomes, a chat completion with the engine's own words in it."""

import hashlib

import reasoning
from dialects import Ask, sampling
from dialects.read import too_deep
from errors import InvalidRequest
from stream import dumps, set_reasoning

CHAT = "/v1/chat/completions"
PURPOSES = {"chat": "a chat model", "embedding": "an embedding model"}


def engine_chat(payload, fleet, streaming=None, **extra):
    """The Ask of a chat completion: its model found and what is particular about it, its reasoning controls translated, its
    images by address taken out, its usage asked for.

    payload     the request in the form of chat completions, `model` a name of ours; changed in place
    streaming   makes the stream, given the names under which the client gets the reasoning; None: a plain answer
    """
    model = for_engine(payload, fleet)
    names = reasoning.FIELDS[model.reasoning_field]
    if streaming is None:
        return Ask(
            CHAT, written(payload, images_of(payload)), model, extra={"names": names, **extra}
        )
    payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
    return Ask(CHAT, written(payload, images_of(payload)), model, streaming(names), extra)


def model_for(fleet, name, purpose):
    """The model that a client means, which must serve that purpose. Raises Refusal."""
    model = fleet.find(name)
    if model.purpose != purpose:
        fit = ", ".join(
            other.id for other in fleet.models() if other.purpose == purpose and not other.hidden
        )
        raise InvalidRequest(
            f"{model.id} is {PURPOSES[model.purpose]}, and this needs {PURPOSES[purpose]}: "
            + (f"use {fit}" if fit else "none is loaded here"),
            "model",
        )
    return model


def instruct(messages, system):
    """Put the model's own system prompt before messages that have none."""
    if system and not any(message.get("role") in ("system", "developer") for message in messages):
        messages.insert(0, {"role": "system", "content": system})


def for_engine(payload, fleet):
    """Put the engine's own words, and what is particular about the model, into a chat; its Model."""
    model = model_for(fleet, payload.get("model"), "chat")
    reasoning.translate(payload, model.effort)
    sampling.fill_in(payload, model.sampling)
    instruct(payload["messages"], model.system)
    for message in payload["messages"]:
        set_reasoning(message, (model.engine_kind.earlier_reasoning,))
    payload["model"] = model.engine_id
    return model


def count_only(payload, fleet):
    """The Ask of a chat completion whose prompt is only counted."""
    model = for_engine(payload, fleet)
    images_of(payload)  # raises as for the request itself
    return with_count(Ask(None, [], model), payload)


def with_count(ask, payload):
    """Have the tokens of an Ask's prompt counted; `payload` is what `engine_chat` made of it. Images are left out: an
    engine's tokenizer doesn't see them, and they would be sent twice."""
    prompt = {
        name: payload[name]
        for name in ("model", "tools", "chat_template_kwargs")
        if payload.get(name)
    }
    if payload.get(
        "reasoning_effort"
    ):  # here vLLM knows it as a field, there inside the kwargs only
        effort = {"reasoning_effort": payload["reasoning_effort"]}
        prompt["chat_template_kwargs"] = {**effort, **prompt.get("chat_template_kwargs", {})}
    prompt["messages"] = [without_images(message) for message in payload["messages"]]
    ask.unseen = sum(
        len(parts_of(whole)) - len(parts_of(bare))
        for whole, bare in zip(payload["messages"], prompt["messages"])
    )
    ask.count = written(prompt)
    return ask


def without_images(message):
    if not any(part.get("type") == "image_url" for part in parts_of(message)):
        return message
    return {
        **message,
        "content": [part for part in message["content"] if part.get("type") != "image_url"],
    }


def parts_of(message):
    return message["content"] if isinstance(message.get("content"), list) else []


def written(payload, images=()):
    """A payload as the bytes for the engine; while the request waits for its slot, nothing else of it is kept. `images` are
    the image_url objects in it, in their order, whose addresses are to stand as a str between the bytes."""
    try:
        text = dumps(payload)
    except RecursionError:  # it is read deeper than it can be written
        raise too_deep() from None
    if not images:
        return [text]
    mark = (
        "image:" + hashlib.sha256(text).hexdigest()
    )  # which cannot stand in what it was made from
    urls = [image["url"] for image in images]
    for image in images:
        image["url"] = mark
    first, *rest = dumps(payload).split(mark.encode())
    return [first, *(piece for pair in zip(urls, rest) for piece in pair)]


def images_of(payload):
    """The image_url objects of a chat that hold an address. Raises InvalidRequest where an engine would read something else,
    a file of its own for example."""
    sources = [
        part.get("image_url")
        for message in payload["messages"]
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict) and part.get("type") == "image_url"
    ]
    found = [source for source in sources if not is_data(source)]
    if not all(isinstance(source, dict) and is_address(source.get("url")) for source in found):
        raise InvalidRequest(
            "an image must be a data URL (data:image/png;base64,...) or an http(s) address",
            "messages",
        )
    return found


def is_data(source):
    return (
        isinstance(source, dict)
        and isinstance(source.get("url"), str)
        and source["url"][:5].lower() == "data:"
    )


def is_address(url):
    return isinstance(url, str) and url[:8].lower().startswith(("http://", "https://"))
