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
# Numbers of thinking tokens, each with the effort that stands for less of them; from there on: max.
BUDGETS = ((4096, "low"), (16384, "high"))
MOST_TOKENS = 1 << 53  # from here on JSON's numbers are not exact
MODES = ("enabled", "adaptive", "between_tools", "auto", "disabled")  # what `thinking` can say
CONTROLS = ("reasoning_effort", "reasoning", "thinking", "think")  # fields; the first one wins
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

# Names of switches in chat templates. Engines' parsers obey either, whatever the template does.
SWITCHES = ("enable_thinking", "thinking")

# How a table is known, in words for people.
ASSUMED = "assumed: its engine could not be asked"
SET = "set in sparks.toml"
ASKED = "asked of its template"
ECHOED = "asked of its template, which hands any word of effort on"


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

    name          its key in TABLES, or "found"
    about         what it is, for people
    levels        {word: Level}, with every word of WORDS
    on            what `think: true` means
    native        the template's own controls, which cancel the translation
    switches      those of SWITCHES that turn its thinking off
    late_system   it takes a system message anywhere
    bare_schemas  it renders the fields of a tool's schema, and knows no $ref
    origin        how it is known, in words for people
    """

    name: str
    about: str
    levels: dict
    on: Level
    native: tuple = ("enable_thinking", "reasoning_effort")
    switches: tuple = SWITCHES
    late_system: bool = True
    bare_schemas: bool = False
    origin: str = ASSUMED

    @property
    def can_turn_off(self):
        """Whether there is a way not to think."""
        return self.levels["none"].effect == OFF

    def level(self, word):
        """The Level of a word, or of "on"."""
        return self.on if word == "on" else self.levels[word]


def all_words(**levels):
    """{word: Level} with every word, of a Level each for off, short, long and longest."""
    return {word: levels[level] for word, level in LEVEL_OF.items()}


def thinking(effect, effort):
    return Level(effect, {"enable_thinking": True, "reasoning_effort": effort})


def kwarg(effect, effort):
    return Level(effect, {"reasoning_effort": effort})


def field(effect, effort):
    return Level(effect, fields={"reasoning_effort": effort})


def switch(name, title):
    """The Table, called `title`, of a template that has one switch, of this name."""
    off = Level(OFF, {name: False})
    on = Level(ON, {name: True})
    return Table(
        title,
        f"a template with the switch {name} only",
        all_words(off=off, short=on, long=on, longest=on),
        on,
        (name, "reasoning_effort"),
    )


def named(*tables):
    return {table.name: table for table in tables}


TABLES = named(
    Table(
        "glm",
        "GLM: a switch and three levels",
        all_words(
            off=Level(OFF, {"enable_thinking": False}),
            short=thinking(SHORT, "low"),
            long=thinking(LONG, "high"),
            longest=thinking(LONGEST, "max"),
        ),
        Level(ON, {"enable_thinking": True}),
    ),
    Table(
        "no-switch",
        "a GLM template that always thinks",
        all_words(
            off=kwarg(SHORT, "low"),
            short=kwarg(SHORT, "low"),
            long=kwarg(LONG, "high"),
            longest=kwarg(LONGEST, "max"),
        ),
        Level(UNCHANGED),
        native=("reasoning_effort",),
        switches=(),
    ),
    switch("enable_thinking", "qwen")._replace(late_system=False, bare_schemas=True),
    switch("thinking", "deepseek")._replace(
        native=("thinking", "enable_thinking", "reasoning_effort")
    ),
    Table(
        "gpt-oss",
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
        native=("reasoning_effort",),
        switches=(),
        late_system=False,
        bare_schemas=True,
    ),
    Table(
        "none",
        "a model without such a control",
        dict.fromkeys(WORDS, Level(UNCHANGED)),
        Level(UNCHANGED),
        native=(),
        switches=(),
        late_system=False,
    ),
)


def rows(table):
    """A Table for people: [(words, effect)], neighbours with one effect joined."""
    out = []
    for word, level in table.levels.items():
        if out and out[-1][1] == level.effect:
            out[-1][0].append(word)
        else:
            out.append(([word], level.effect))
    return out


def translate(payload, table, ignored, budget_field=None):
    """Take every control of thinking out of `payload` (a request body, changed in place) and put in
    what the engine's template understands. A native control in `chat_template_kwargs` cancels the
    translation. Returns whether the client wants no thinking.

    table         a Table
    ignored       its add(where, what) is told of what is left out
    budget_field  the engine's own field for how many tokens a model may think, or None

    Raises InvalidRequest for a wrong type, or a word that the table does not have.
    """
    kwargs = payload.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", "chat_template_kwargs")
    vain = leave_out(payload, table, ignored)
    asked = {name: payload.pop(name, None) for name in CONTROLS}
    take_off(payload, table, asked)
    kwargs = payload.get("chat_template_kwargs")
    if kwargs and any(kwargs.get(name) is not None for name in table.native):
        return vain
    word, budget = wanted(asked, table)
    if word is None:
        return vain
    level = table.level(word)
    if level.kwargs:
        payload["chat_template_kwargs"] = {**(kwargs or {}), **level.kwargs}
    payload.update(level.fields)
    if budget and budget_field:
        payload.setdefault(budget_field, budget)
    return vain or LEVEL_OF.get(word) == "off"


def leave_out(payload, table, ignored):
    """Take out the switches that the template does not have, where a client turns them off: the
    engine would only stop looking for thoughts, which then stand in the answer. Returns whether
    there were any."""
    kwargs = payload.get("chat_template_kwargs") or {}
    unknown = [name for name in SWITCHES if name not in table.switches]
    vain = [name for name in unknown if name in kwargs and not kwargs[name]]
    for name in vain:
        ignored.add("chat_template_kwargs", name)
    drop_kwargs(payload, vain)
    beside = [name for name in SWITCHES if not table.switches and payload.get(name) is False]
    for name in beside:
        ignored.add(name, "false")
    if "enable_thinking" in beside:  # `thinking` is also a control, which means `none`
        del payload["enable_thinking"]
    return bool(vain or beside)


def take_off(payload, table, asked):
    """Take a native `none` or `minimal` for one of ours where the template can't turn thinking off:
    it may not know the word, and think the more."""
    effort = (payload.get("chat_template_kwargs") or {}).get("reasoning_effort")
    if not table.can_turn_off and effort in ("none", "minimal"):
        drop_kwargs(payload, ["reasoning_effort"])
        asked["reasoning_effort"] = effort


def drop_kwargs(payload, names):
    """Take these out of chat_template_kwargs, and that out of the payload where nothing is left."""
    if not names:
        return
    kwargs = payload.pop("chat_template_kwargs")
    left = {name: value for name, value in kwargs.items() if name not in names}
    if left:
        payload["chat_template_kwargs"] = left


def wanted(asked, table):
    """(the word or "on" that a client's controls ask for, the tokens of thinking), each or None.

    `reasoning_effort` wins over `reasoning`, that over `thinking`, that over `think`.
    """
    for read, value in (
        (in_effort, asked["reasoning_effort"]),
        (in_reasoning, object_in(asked, "reasoning", '{"effort": "high"}')),
        (in_thinking, asked["thinking"]),
        (in_think, asked["think"]),
    ):
        found = None if value is None else read(value, table)
        if found:
            return found
    return None, None


def in_effort(word, table, name="reasoning_effort"):
    if not isinstance(word, str) or word not in table.levels:
        raise InvalidRequest(f"{name} must be one of: {', '.join(table.levels)}", name)
    return word, None


def in_reasoning(given, table):
    """What a `reasoning` object asks for: `enabled: false` wins over `effort`, that over
    `max_tokens`, that over `enabled: true`."""
    enabled = given.get("enabled")
    if enabled is not None and not isinstance(enabled, bool):
        raise InvalidRequest("reasoning.enabled must be true or false", "reasoning.enabled")
    if enabled is False:
        return "none", None
    if given.get("effort") is not None:
        return in_effort(given["effort"], table, "reasoning.effort")
    if given.get("max_tokens") is not None:
        return in_budget(given["max_tokens"], table, "reasoning.max_tokens")
    return ("on", None) if enabled else None


def in_thinking(given, table):
    """What `thinking` asks for, in the form of Anthropic's API, which others have taken over."""
    if isinstance(given, bool):
        return in_think(given, table)
    expected = 'thinking must be an object such as {"type": "disabled"}'
    if not isinstance(given, dict):
        raise InvalidRequest(expected, "thinking")
    mode = given.get("type")
    if mode not in MODES:
        raise InvalidRequest(f"thinking.type must be one of: {', '.join(MODES)}", "thinking.type")
    if mode == "disabled":
        return "none", None
    if given.get("budget_tokens") is not None:
        return in_budget(given["budget_tokens"], table, "thinking.budget_tokens")
    return None if mode == "auto" else ("on", None)


def in_think(given, table):
    if not isinstance(given, bool):
        raise InvalidRequest("think must be true or false; for more, use reasoning_effort", "think")
    return "on" if given else "none", None


def in_budget(budget, table, name):
    """The word for a number of thinking tokens, and the number."""
    if isinstance(budget, float) and budget.is_integer():
        budget = int(budget)
    if type(budget) is not int or not 0 < budget < MOST_TOKENS:
        raise InvalidRequest(f"{name} must be a positive whole number", name)
    effort = effort_for(budget)
    return effort if effort in table.levels else "on", budget


def effort_for(budget):
    """The word for a number of thinking tokens."""
    return next((effort for limit, effort in BUDGETS if budget < limit), "max")


def object_in(asked, name, example):
    value = asked.get(name)
    if value is not None and not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object such as {example}", name)
    return value
