"""Reasoning: the words for effort, what each engine's template makes of them, and the names of the answer's field.

Read by the dialects, by /help and by the tests alike. Source: the gateway's specification, "Reasoning".
"""

from typing import NamedTuple

from errors import InvalidRequest

WORDS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FIELDS = {  # setting -> the names under which a client gets the reasoning
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}

OFF, SHORT, LONG, LONGEST = (
    "Thinking off (fastest)",
    "Short thinking",
    "Long thinking",
    "Longest thinking",
)
ON, UNCHANGED = "Thinking on", "No effect on this model"


class Level(NamedTuple):
    """What some words do: `kwargs` for the chat template, `fields` beside them, and the effect in plain words."""

    effect: str
    kwargs: dict = {}
    fields: dict = {}


class Table(NamedTuple):
    """One kind of template. `levels` maps words to a Level; `on` is what `think: true` means;
    `native` names the template's own switches, which cancel the translation."""

    about: str
    levels: dict
    on: Level
    native: tuple = ("enable_thinking", "reasoning_effort")


def spread(off, low, high, top):
    """The seven words over four levels."""
    return dict(zip(WORDS, (off, off, low, high, high, top, top)))


def thinking(effect, effort):
    return Level(effect, {"enable_thinking": True, "reasoning_effort": effort})


def effort(effect, word):
    return Level(effect, {"reasoning_effort": word})


def field(effect, word):
    return Level(effect, fields={"reasoning_effort": word})


def switch(name):
    on = Level(ON, {name: True})
    return Table(
        f"a template with the switch {name} only",
        spread(Level(OFF, {name: False}), on, on, on),
        on,
        (name, "reasoning_effort"),
    )


TABLES = {
    "glm": Table(
        "GLM: a switch and three levels",
        spread(
            Level(OFF, {"enable_thinking": False}),
            thinking(SHORT, "low"),
            thinking(LONG, "high"),
            thinking(LONGEST, "max"),
        ),
        Level(ON, {"enable_thinking": True}),
    ),
    "no-switch": Table(
        "a GLM template that always thinks",
        spread(
            effort(SHORT, "low"), effort(SHORT, "low"), effort(LONG, "high"), effort(LONGEST, "max")
        ),
        Level(UNCHANGED),
    ),
    "qwen": switch("enable_thinking"),
    "deepseek": switch("thinking")._replace(
        native=("thinking", "enable_thinking", "reasoning_effort")
    ),
    "gpt-oss": Table(
        "the plain field reasoning_effort",
        {
            **spread(
                field(SHORT, "low"), field(SHORT, "low"), field(LONG, "high"), field(LONG, "high")
            ),
            "medium": field("Medium thinking", "medium"),
        },
        Level(UNCHANGED),
    ),
    "none": Table(
        "a model without such a control", dict.fromkeys(WORDS, Level(UNCHANGED)), Level(UNCHANGED)
    ),
}


def rows(table):
    """The table in force for people: [(words, effect)], neighbours with one effect joined."""
    out = []
    for word, level in TABLES[table].levels.items():
        if out and out[-1][1] == level.effect:
            out[-1][0].append(word)
        else:
            out.append(([word], level.effect))
    return out


def translate(payload, table):
    """Take every control of thinking out of `payload` (a request body, changed in place) and put in what the
    engine's template understands. A native switch in `chat_template_kwargs` cancels the translation.

    Raises InvalidRequest for a wrong type or a word that is not in WORDS.
    """
    kwargs = payload.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", "chat_template_kwargs")
    asked = {name: payload.pop(name, None) for name in ("reasoning_effort", "reasoning", "think")}
    if kwargs and any(kwargs.get(name) is not None for name in TABLES[table].native):
        return
    level = wanted(asked, TABLES[table])
    if level.kwargs:
        payload["chat_template_kwargs"] = {**(kwargs or {}), **level.kwargs}
    payload.update(level.fields)


def wanted(asked, table):
    """The Level that a client's controls ask for; `reasoning_effort` wins over `reasoning`, that over `think`."""
    for name, word in (
        ("reasoning_effort", asked["reasoning_effort"]),
        ("reasoning.effort", inner(asked["reasoning"])),
    ):
        if word is not None:
            if not isinstance(word, str) or word not in table.levels:
                raise InvalidRequest(f"{name} must be one of: {', '.join(WORDS)}", name)
            return table.levels[word]
    think = asked["think"]
    if think is None:
        return Level("")
    if not isinstance(think, bool):
        raise InvalidRequest("think must be true or false; for more, use reasoning_effort", "think")
    return table.on if think else table.levels["none"]


def inner(value):
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest('reasoning must be an object such as {"effort": "high"}', "reasoning")
    return value.get("effort")
