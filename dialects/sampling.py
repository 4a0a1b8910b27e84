"""Sampling: what engines call by different names, the model's defaults under the client's values,
and the form of the output.

Source: the gateway's specification, pages 2 and 3; the engines' sampling parameters.
"""

from errors import InvalidRequest

# Two names of one thing. An engine may know only one of them; of a client's two values the one
# under the first name counts.
PENALTY_NAMES = ("repetition_penalty", "repeat_penalty")
LENGTH_NAMES = ("max_completion_tokens", "max_tokens")
LIMIT = 1 << 53  # from here on JSON's numbers are not exact


def fill_in(payload, defaults):
    """Add `defaults`, {name: value}, where the client is silent, and put a value also under the
    name that other engines have for it. `payload` is changed in place."""
    payload |= {
        name: value
        for name, value in defaults.items()
        if first_of(payload, names_beside(name)) is None
    }
    penalty = first_of(payload, PENALTY_NAMES)
    if penalty is not None:
        payload |= dict.fromkeys(PENALTY_NAMES, penalty)
    newer_name, older_name = LENGTH_NAMES
    if payload.get(newer_name) is not None:
        payload[older_name] = payload[newer_name]


def names_beside(name):
    """All names of the thing that has this one."""
    for names in (PENALTY_NAMES, LENGTH_NAMES):
        if name in names:
            return names
    return (name,)


def first_of(payload, names):
    """The first value among these fields that is not null, or None."""
    for name in names:
        if payload.get(name) is not None:
            return payload[name]
    return None


def read_lengths(payload, least=1):
    """Check how many tokens the client wants, at least `least`. Raises InvalidRequest."""
    expected = "a positive whole number" if least else "a whole number"
    for name in LENGTH_NAMES:
        value = payload.get(name)
        if value is not None and not (type(value) is int and least <= value < LIMIT):
            raise InvalidRequest(f"{name} must be {expected}", name)


def most_tokens(payload, choices=1):
    """How many tokens the answer can have, as the payload for the engine says it, or None."""
    most = first_of(payload, LENGTH_NAMES)
    if type(most) is int and type(choices) is int:
        return most * choices
    return None


def read_format(payload):
    """Bring `response_format` into the form that engines take: a schema has a name, and without a
    schema it is plain JSON mode. Raises InvalidRequest."""
    wanted = payload.get("response_format")
    if wanted is None:
        return
    if not isinstance(wanted, dict) or not isinstance(wanted.get("type"), str):
        raise InvalidRequest(
            'response_format must be an object such as {"type": "json_object"}', "response_format"
        )
    if wanted["type"] != "json_schema":
        return
    named_schema = wanted.get("json_schema")
    if named_schema is None:
        named_schema = {}
    if not isinstance(named_schema, dict):
        raise InvalidRequest(
            'response_format.json_schema must be an object: {"name": "answer", "schema": {...}}',
            "response_format",
        )
    if named_schema.get("schema") is None:
        payload["response_format"] = {"type": "json_object"}
    elif not named_schema.get("name"):
        payload["response_format"] = {**wanted, "json_schema": {**named_schema, "name": "answer"}}
