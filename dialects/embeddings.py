"""OpenAI embeddings: texts in, vectors out.

The engine is asked in the form that the client wants, and what it gives is brought into that form:
some engines know only one of the two. `dimensions` is the gateway's own: vectors are cut and
normalised here, whatever the engine can do.

Source: the gateway's specification, pages 2 and 3; OpenAI's reference of POST /v1/embeddings.
"""

import math
from array import array
from base64 import b64decode, b64encode

import steps
from dialects import Ask
from dialects.completions import are_tokens
from dialects.engine import model_for, take_tier, written
from dialects.history import Ignored
from dialects.read import hold_back, parse, typed, whole_ids
from errors import InvalidRequest, UpstreamError, error_body
from mending.answer import name_tier
from values import dumps

PATH = "/v1/embeddings"
FORMATS = ("float", "base64")
EXPECTED = (
    "must be a text, a list of texts, a list of token ids, or a list of such lists, and not empty"
)
UNREADABLE = "the engine's embeddings cannot be read"
MOST = 1 << 20  # dimensions


def read(body, fleet):
    """A request's body (bytes) as an Ask. Raises Refusal."""
    payload = parse(body)
    public = typed(payload, "model", str, "a text")
    ignored = Ignored()
    hold_back(payload, ignored)
    inputs = read_input(payload)
    form = read_form(payload)
    dimensions = payload.pop("dimensions", None)
    if dimensions is not None and not (type(dimensions) is int and 1 <= dimensions <= MOST):
        raise InvalidRequest("dimensions must be a positive whole number", "dimensions")
    for name in ("stream", "stream_options"):  # there is nothing to stream
        payload.pop(name, None)
    if public is None:
        public = first_model(fleet)
    model = model_for(fleet, public, "embedding")
    tier = take_tier(payload, model)
    payload |= {"model": model.engine_id, "encoding_format": form}
    extra = {"form": form, "dimensions": dimensions, "inputs": inputs}
    each = ("data", lambda item: steps.Raw([dumps(formed_item(item, extra))]))
    more = {"each": each, "left_out": ignored, "tier": tier}
    return Ask(PATH, written(payload), model, extra=extra, most=0, **more)


def read_form(payload):
    """The encoding_format, one of FORMATS."""
    form = typed(payload, "encoding_format", str, "float or base64")
    if form is None:
        return FORMATS[0]
    if form not in FORMATS:
        raise InvalidRequest(
            f"encoding_format must be float or base64, not {form[:40]!r}", "encoding_format"
        )
    return form


def first_model(fleet):
    """The id of the first embedding model, or None. The fleet's own default is for chats."""
    for model in fleet.models():
        if model.purpose == "embedding":
            return model.id
    return None


def read_input(payload):
    """How many inputs there are. Raises InvalidRequest where there is none."""
    given = payload.get("input")
    # Some engines embed messages, and would fetch the images in them themselves.
    if payload.pop("messages", None) is not None:
        raise InvalidRequest("messages are not embedded here: send texts as input alone", "input")
    if given is None:
        raise InvalidRequest("input is missing: send a text or a list of texts", "input")
    if isinstance(given, str):
        return 1
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"input {EXPECTED}", "input")
    given = payload["input"] = whole_ids(given)
    if are_tokens(given):
        return 1
    types = {type(one) for one in given}
    if types == {str} or types == {list} and all(one and are_tokens(one) for one in given):
        return len(given)
    raise InvalidRequest(f"input {EXPECTED}", "input")


# ---- what is answered


def write(answer, ask):
    """(the client's bytes, the usage) of an engine's answer. Raises Refusal."""
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or len(data) != ask.extra["inputs"]:
        raise UpstreamError(UNREADABLE)
    for at, item in enumerate(data):
        steps.pause()
        if not isinstance(item, steps.Raw):  # as `each` has made of those of a large answer
            data[at] = formed_item(item, ask.extra)
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        usage = None
    counted = ask.own_figures.get("prompt_tokens", 0)
    answer["usage"] = usage or {"prompt_tokens": counted, "total_tokens": counted}
    answer["model"] = ask.model.id
    name_tier(answer, ask.tier)
    return steps.write(answer), usage


def formed_item(item, extra):
    """An item of the engine's answer, changed in place to what the client wants (`Ask.extra`)."""
    vector = vector_in(item)
    item["embedding"] = formed(vector, extra["form"], extra["dimensions"])
    return item


def vector_in(item):
    """What an item of the engine's answer holds: a list of numbers, or a text in base64."""
    value = item.get("embedding") if isinstance(item, dict) else None
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]  # some engines put the vector into a list
    if not isinstance(value, (list, str)) or not value:
        raise UpstreamError(UNREADABLE)
    return value


def formed(value, form, dimensions):
    """A vector in the form that the client wants. Raises Refusal.

    What is in that form already stays as it came. A list would be cut to 32 bits; a text may hold
    other types of numbers, where the client asked the engine for them.
    """
    if dimensions is None and form == "base64" and isinstance(value, str):
        unpacked(value)
        return value
    numbers = floats(value)
    if dimensions is None and form == "float" and isinstance(value, list):
        return value
    if dimensions is not None:
        numbers = shortened(numbers, dimensions)
    if form == "float":
        return numbers.tolist()
    return b64encode(numbers.tobytes()).decode()


def floats(value):
    """A vector as an array of 32-bit floats, whose bytes are what base64 holds. Raises
    UpstreamError where it is none, also where it holds a NaN: JSON has none."""
    if isinstance(value, str):
        value = unpacked(value)
    try:
        numbers = array("f", value)
    except (TypeError, ValueError, OverflowError):
        raise UpstreamError(UNREADABLE) from None
    if not math.isfinite(sum(numbers)):
        raise UpstreamError(UNREADABLE)
    return numbers


def unpacked(text):
    """The bytes in base64. Raises UpstreamError."""
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise UpstreamError(UNREADABLE) from None


def shortened(numbers, dimensions):
    """The beginning of a vector, with length 1 again. Raises InvalidRequest."""
    if dimensions > len(numbers):
        raise InvalidRequest(
            f"dimensions must be at most {len(numbers)} for this model", "dimensions"
        )
    numbers = numbers[:dimensions]
    length = math.sqrt(math.fsum(number * number for number in numbers))
    if not length:
        return numbers
    return array("f", (number / length for number in numbers))


def refusal(error):
    """A Refusal in this API's words, as bytes: what is too long for the context is the input."""
    if error.param == "messages":
        error.param = "input"
    return dumps(error_body(error))
