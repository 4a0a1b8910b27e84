"""The engine's request: what every chat API becomes, a chat completion in the words of engines."""

import binascii
import hashlib
import re

import reasoning
from dialects import Ask, Earlier, sampling
from dialects.read import too_deep
from errors import InvalidRequest
from mending.thinking import set_reasoning
from steps import joined, keep, paced, parts_of
from values import as_dict, dumps

CHAT = "/v1/chat/completions"
IMAGE = "a data URL (data:image/png;base64,...)"
# Also under what some programs call them. Engines look at the bytes, and not at the name.
FORMATS = "PNG, JPEG, GIF, WebP or BMP"
DATA_IMAGE = re.compile(r"data:image/(?:png|jpe?g|pjpeg|gif|webp|(?:x-ms-)?bmp);base64,", re.I)
# The end of a string that front/large_json.py has cut, whose rest is not looked at.
CUT = re.compile(r"\x01[0-9a-f]{16}:\d{1,9}\x01\Z")
MOST_CUT = 32  # characters of it
MOST_OPENING = 32  # messages before an answer, and parts of one, that are looked at
MOST_WHOLE = 8000  # bytes of a text that is not cut, however a program escapes it
USUALLY_LEFT = 300  # characters of one that is
LOOKED_AT = 1 << 13  # characters of an image, a multiple of 8
ALPHABET = re.compile(r"[A-Za-z0-9+/]+")  # of base64 (RFC 4648, 4)
# The words of `service_tier` (OpenAI's reference of chat completions and Responses). There is one
# tier here beside the usual one: what need not be soon.
TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
# Fields that stand first: an engine's prompt begins with them, and they stay while a chat goes on.
# Under another cache_salt an engine's cache holds nothing of it.
BEGINNING = ("cache_salt", "tools", "documents", "messages", "prompt")
PURPOSES = {"chat": "a chat model", "embedding": "an embedding model"}


def engine_chat(payload, fleet, ignored, make_stream=None, **extra):
    """The Ask of a chat completion. Raises Refusal.

    payload       the request in the form of chat completions, `model` a name that clients know;
                  changed in place
    ignored       history.Ignored, which gets the names of what is left out
    make_stream   a function: the names under which the client gets the reasoning, the Model -> a
                  stream of stream.py; None: the answer is not streamed
    extra         the Ask's
    """
    model, unwanted = fit_to_model(payload, fleet, ignored)
    tier = take_tier(payload, model)
    names = reasoning.FIELDS[model.reasoning_field]
    stream = None
    if make_stream is None:
        extra = {"names": names, **extra}
    else:
        payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
        stream = make_stream(names, model)
        stream.tier = tier
        if unwanted and model.may_leak:
            stream.expect_orphan()
    most = sampling.most_tokens(payload, payload.get("n") or 1)
    opening = opening_of(payload["messages"]) if len(model.places) > 1 else None
    body = written(payload, images_of(payload))
    more = {"left_out": ignored, "opening": opening, "tier": tier}
    return Ask(CHAT, body, model, stream, extra, most=most, **more)


def take_tier(payload, model):
    """The service tier of a request, see Ask. The field is taken out: the gateway alone decides
    whose turn it is. Raises InvalidRequest."""
    asked = payload.pop("service_tier", None)
    if asked is not None and asked not in TIERS:
        raise InvalidRequest(f"service_tier must be one of {', '.join(TIERS)}", "service_tier")
    if model.batch or asked == "flex":
        return "flex"
    return asked and "default"


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


def fit_to_model(payload, fleet, ignored):
    """Put the engine's own words, and what is particular about the model, into a chat (changed in
    place). Returns (the Model, whether thoughts are unwanted). Raises Refusal.

    ignored  history.Ignored, which gets the names of what is left out
    """
    model = model_for(fleet, payload.get("model"), "chat")
    budget_field = model.engine_kind.thinking_budget
    unwanted = reasoning.translate(payload, model.table, ignored, budget_field)
    sampling.fill_in(payload, model.sampling)
    messages = payload["messages"]
    instructed = any(message.get("role") in ("system", "developer") for message in messages)
    if model.system and not instructed:
        messages.insert(0, {"role": "system", "content": model.system})
    for message in messages:
        set_reasoning(message, (model.engine_kind.earlier_reasoning,))
    payload["model"] = model.engine_id
    return model, unwanted


# ---- which conversation it is


def opening_of(messages):
    """What stands before the first answer of a chat, as bytes: it stays while the chat goes on."""
    texts = []
    for message in messages[:MOST_OPENING]:
        if message.get("role") == "assistant":
            break
        texts += [message["role"], *texts_in(message.get("content"))]
    return dumps([beginning_of(text) for text in texts])


def texts_in(content):
    """The texts of a message's content, and the addresses of its images."""
    if isinstance(content, str):
        return [content]
    parts = [part for part in content or () if isinstance(part, dict)][:MOST_OPENING]
    images = [as_dict(part.get("image_url")).get("url") for part in parts]
    found = [*(part.get("text") for part in parts), *images]
    return [text for text in found if isinstance(text, str)]


def beginning_of(text):
    """A text or, of one that front/large_json.py cuts in large requests, what that leaves: the next
    turn may be such a request."""
    escaped = text[: MOST_WHOLE + 1].encode("ascii", "backslashreplace")
    if len(escaped) > MOST_WHOLE or CUT.search(text):
        return text[:USUALLY_LEFT]
    return text


# ---- the length of a prompt


def count_only(payload, fleet, ignored):
    """The Ask of a chat whose prompt is only counted. Raises Refusal.

    ignored  history.Ignored, which gets the names of what is left out
    """
    model, _ = fit_to_model(payload, fleet, ignored)
    images_of(payload)  # raises as for the request itself
    return with_count(Ask(None, [], model, left_out=ignored), payload)


def with_count(ask, payload):
    """An Ask that also has its prompt counted. `payload`: the chat, after `engine_chat`.

    Images are left out: an engine's tokenizer doesn't see them, and they would be sent twice.
    """
    prompt = {
        name: payload[name]
        for name in ("model", "tools", "chat_template_kwargs")
        if payload.get(name)
    }
    # Where an engine counts, it knows the effort among the kwargs alone; in a chat as a field too.
    if payload.get("reasoning_effort"):
        effort = {"reasoning_effort": payload["reasoning_effort"]}
        prompt["chat_template_kwargs"] = {**effort, **prompt.get("chat_template_kwargs", {})}
    prompt["messages"] = [
        counted(message, ask.model.engine_kind.counted_reasoning) for message in payload["messages"]
    ]
    ask.unseen = sum(len(images_in(message)) for message in payload["messages"])
    ask.count = written(prompt)
    return ask


def counted(message, field):
    """A message as an engine counts it. `field`: where it then reads the reasoning."""
    message = without_images({**message})
    set_reasoning(message, (field,))
    return message


# ---- images


def is_image(part):
    return isinstance(part, dict) and part.get("type") == "image_url"


def images_in(message):
    """The parts of a message that are images."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return []
    return [part for part in parts if is_image(part)]


def without_images(message):
    if not images_in(message):
        return message
    return {**message, "content": [part for part in message["content"] if not is_image(part)]}


def images_of(payload):
    """The parts of a chat that are an image with an address. Raises InvalidRequest where an engine
    would read something else, a file of its own for example."""
    found = [
        part
        for message in payload["messages"]
        for part in images_in(message)
        if not is_data(part.get("image_url"))
    ]
    sources = [part.get("image_url") for part in found]
    if not all(isinstance(source, dict) and is_address(source.get("url")) for source in sources):
        raise InvalidRequest(f"an image must be {IMAGE} or an http(s) address", "messages")
    return found


def fault_of_image(url):
    """What is wrong with what a client gives for an image, after "the field ..."; None: nothing."""
    if is_address(url):
        return None
    if not isinstance(url, str) or url[:5].lower() != "data:":
        return f"must be {IMAGE} or an http(s) address"
    begin = DATA_IMAGE.match(url)
    if not begin:
        return f"must be {IMAGE} that holds a {FORMATS} image in base64"
    if not is_base64(url, begin.end()):
        return "must hold its image in base64 that is whole, padded and without white space"
    return None


def is_base64(url, begin):
    """Whether a URL holds base64 from there on, as engines want it. Of a long one its beginning
    and end are looked at, if it was cut only its beginning: the engine decodes it anyway."""
    if cut := CUT.search(url, max(begin, len(url) - MOST_CUT)):
        return ALPHABET.fullmatch(url, begin, cut.start()) is not None
    length = len(url) - begin
    if length > LOOKED_AT and length % 4 == 0:
        data = url[begin : begin + LOOKED_AT // 2] + url[-LOOKED_AT // 2 :]
    else:
        data = url[begin:]
    try:
        return bool(binascii.a2b_base64(data, strict_mode=True))
    except ValueError:  # also for what is not ASCII
        return False


def as_earlier(part, where):
    """A part of the history; if it is an image, its address may lead nowhere by now.

    where  its place in the client's request
    """
    source = part.get("image_url")
    if is_image(part) and is_address(source["url"]):
        source["url"] = Earlier(source["url"], where)
    return part


def is_data(source):
    """Whether an image_url object holds a data URL."""
    url = source.get("url") if isinstance(source, dict) else None
    return isinstance(url, str) and url[:5].lower() == "data:"


def is_address(url):
    return isinstance(url, str) and url[:8].lower().startswith(("http://", "https://"))


# ---- bytes


def written(payload, images=()):
    """A payload as the bytes for the engine, a list: while the request waits for its slot, nothing
    else of it is kept. Raises InvalidRequest where it is nested too deeply.

    images   the parts of images in it, in their order, whose addresses are to stand as a str
             between the bytes; changed in place
    """
    put_in_order(payload)
    try:
        parts = parts_of(keep(payload))
    except RecursionError:  # orjson reads deeper than it writes
        raise too_deep() from None
    if not images:
        return parts
    urls = [image["image_url"]["url"] for image in images]
    text = b"".join(parts)
    mark = "image:" + hashlib.sha256(text).hexdigest()  # a text can't hold a hash of itself
    for image in images:
        image["image_url"]["url"] = mark
    first, *rest = joined(payload).split(mark.encode())
    body = [first]
    for image, url, piece in zip(images, urls, rest, strict=True):
        if isinstance(url, Earlier):  # all of the part goes with it
            before, after = url.around = tuple(dumps(image).split(mark.encode()))
            body[-1] = body[-1].removesuffix(before)
            piece = piece.removeprefix(after)
        body += [url, piece]
    return body


def put_in_order(payload):
    """Bring a payload's fields into the order in which they are written, in place. So the turns of
    a conversation begin alike, whatever else changes in its client's requests."""
    others = [name for name in payload if name not in BEGINNING]
    for name in (*BEGINNING, *paced(others)):
        if name in payload:
            payload[name] = payload.pop(name)
