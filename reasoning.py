"""Reasoning: the words for effort, what each engine's template makes of them, and the names of the
answer's field.

Read by the dialects, by /help and by the tests alike. Source: the gateway's specification,
"Reasoning".
"""

from typing import NamedTuple

from errors import InvalidRequest

# A word for effort -> which of a template's four levels it means. A new word is a line here: every
# table below has it then.
LEVEL_OF = {
    "none": "off",
    "minimal": "off",
    "low": "short",
    "medium": "long",
    "high": "long",
    "xhigh": "longest",
    "max": "longest",
}
WORDS = tuple(LEVEL_OF)
FIELDS = {  # setting -> the names under which a client gets the reasoning
    "both": ("reasoning", "reasoning_content"),
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
}

# Effects, in words for people.
OFF = "Thinking off (fastest)"
SHORT = "Short thinking"
MEDIUM = "Medium thinking"
LONG = "Long thinking"
LONGEST = "Longest thinking"
ON = "Thinking on"
UNCHANGED = "No effect on this model"


class Level(NamedTuple):
    """What some words do.

    effect   one of those above
    kwargs   what goes into chat_template_kwargs
    fields   what goes beside it, into the request itself
    """

    effect: str
    kwargs: dict = {}
    fields: dict = {}


class Table(NamedTuple):
    """One kind of template.

    about    what it is, for people
    levels   {word: Level}, with every word of WORDS
    on       what `think: true` means
    native   the template's own switches, which cancel the translation
    """

    about: str
    levels: dict
    on: Level
    native: tuple = ("enable_thinking", "reasoning_effort")


def all_words(**levels):
    """{word: Level} with every word, of a Level each for off, short, long and longest."""
    return {word: levels[level] for word, level in LEVEL_OF.items()}


def thinking(effect, effort):
    return Level(effect, {"enable_thinking": True, "reasoning_effort": effort})


def kwarg(effect, effort):
    return Level(effect, {"reasoning_effort": effort})


def field(effect, effort):
    return Level(effect, fields={"reasoning_effort": effort})


def switch(name):
    """The Table of a template that has one switch, of this name."""
    off = Level(OFF, {name: False})
    on = Level(ON, {name: True})
    return Table(
        f"a template with the switch {name} only",
        all_words(off=off, short=on, long=on, longest=on),
        on,
        (name, "reasoning_effort"),
    )


TABLES = {
    "glm": Table(
        "GLM: a switch and three levels",
        all_words(
            off=Level(OFF, {"enable_thinking": False}),
            short=thinking(SHORT, "low"),
            long=thinking(LONG, "high"),
            longest=thinking(LONGEST, "max"),
        ),
        Level(ON, {"enable_thinking": True}),
    ),
    "no-switch": Table(
        "a GLM template that always thinks",
        all_words(
            off=kwarg(SHORT, "low"),
            short=kwarg(SHORT, "low"),
            long=kwarg(LONG, "high"),
            longest=kwarg(LONGEST, "max"),
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
            **all_words(
                off=field(SHORT, "low"),
                short=field(SHORT, "low"),
                long=field(LONG, "high"),
                longest=field(LONG, "high"),
            ),
            "medium": field(MEDIUM, "medium"),
        },
        Level(UNCHANGED),
    ),
    "none": Table(
        "a model without such a control", dict.fromkeys(WORDS, Level(UNCHANGED)), Level(UNCHANGED)
    ),
}


def rows(table):
    """A table for people: [(words, effect)], neighbours with one effect joined. `table`: a key of
    TABLES."""
    out = []
    for word, level in TABLES[table].levels.items():
        if out and out[-1][1] == level.effect:
            out[-1][0].append(word)
        else:
            out.append(([word], level.effect))
    return out


def translate(payload, table):
    """Take every control of thinking out of `payload` (a request body, changed in place) and put in
    what the engine's template understands. A native switch in `chat_template_kwargs` cancels the
    translation. `table`: a key of TABLES.

    Raises InvalidRequest for a wrong type, or a word that the table does not have.
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
    """The Level that a client's controls ask for: `reasoning_effort` wins over `reasoning`, that
    over `think`."""
    for name, word in (
        ("reasoning_effort", asked["reasoning_effort"]),
        ("reasoning.effort", effort_in(asked["reasoning"])),
    ):
        if word is not None:
            if not isinstance(word, str) or word not in table.levels:
                raise InvalidRequest(f"{name} must be one of: {', '.join(table.levels)}", name)
            return table.levels[word]
    think = asked["think"]
    if think is None:
        return Level("")
    if not isinstance(think, bool):
        raise InvalidRequest("think must be true or false; for more, use reasoning_effort", "think")
    return table.on if think else table.levels["none"]


def effort_in(reasoning):
    """The word in a `reasoning` object, or None."""
    if reasoning is None:
        return None
    if not isinstance(reasoning, dict):
        raise InvalidRequest('reasoning must be an object such as {"effort": "high"}', "reasoning")
    return reasoning.get("effort")
