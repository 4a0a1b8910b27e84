"""Sampling: the names that engines give to one thing, the model's defaults under the client's values, and the output's form.

Source: the gateway's specification, pages 2 and 3; vLLM's sampling parameters; llama.cpp's.
"""

from errors import InvalidRequest

PENALTY_NAMES = ("repetition_penalty", "repeat_penalty")  # vLLM's name, llama.cpp's
LENGTH_NAMES = ("max_completion_tokens", "max_tokens")  # of two, the first one counts
MOST = 1 << 53


def fill_in(payload, defaults):
    """Bring what stands under several names to all of them, and add `defaults`, {name: value}, where the client is silent.
    `payload` is changed in place."""
    defaults = {
        name: value for name, value in defaults.items() if first_of(payload, synonyms(name)) is None
    }
    payload |= defaults
    penalty, length = first_of(payload, PENALTY_NAMES), payload.get(LENGTH_NAMES[0])
    if penalty is not None:
        payload |= dict.fromkeys(PENALTY_NAMES, penalty)
    if length is not None:
        payload[LENGTH_NAMES[1]] = length


def synonyms(name):
    return next((names for names in (PENALTY_NAMES, LENGTH_NAMES) if name in names), (name,))


def first_of(payload, names):
    """The first value among names that stand for one thing, or None."""
    return next((payload[name] for name in names if payload.get(name) is not None), None)


def read_lengths(payload, least=1):
    for name in LENGTH_NAMES:
        value = payload.get(name)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not least <= value < MOST
        ):
            raise InvalidRequest(
                f"{name} must be a {'positive ' if least else ''}whole number", name
            )


def read_format(payload):
    """`response_format` as engines take it: a schema has a name, and without a schema it is plain JSON mode."""
    form = payload.get("response_format")
    if form is None:
        return
    if not isinstance(form, dict) or not isinstance(form.get("type"), str):
        raise InvalidRequest(
            'response_format must be an object such as {"type": "json_object"}', "response_format"
        )
    if form["type"] != "json_schema":
        return
    inner = form.get("json_schema")
    if inner is not None and not isinstance(inner, dict):
        raise InvalidRequest(
            'response_format.json_schema must be an object: {"name": "answer", "schema": {...}}',
            "response_format",
        )
    inner = inner or {}
    if inner.get("schema") is None:
        payload["response_format"] = {"type": "json_object"}
    elif not inner.get("name"):
        payload["response_format"] = {**form, "json_schema": {**inner, "name": "answer"}}
