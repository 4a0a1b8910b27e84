"""What a chat template does with the controls of thinking, found out by asking for the prompts that
it makes: a control that it obeys makes them differ. Pure.

    prompt   a function: (fields of a question) -> a prompt, a text or a list of tokens; None where
             the template refuses them. Each question has `messages`, and perhaps `tools` and
             `chat_template_kwargs`

Source: the chat templates of GLM, Qwen, DeepSeek and gpt-oss.
"""

import re

import steps
from reasoning import (
    ASKED,
    ECHOED,
    LEVEL_OF,
    LONG,
    LONGEST,
    MEDIUM,
    OFF,
    ON,
    SHORT,
    SWITCHES,
    TABLES,
    UNCHANGED,
    WORDS,
    Level,
    Table,
)

ASKED_IN = [{"role": "user", "content": "What is 2+2?"}]
ANOTHER = [{"role": "user", "content": "What is 3+3?"}]  # as long: some count and tell no more
STRANGE = "zqz"  # a word of effort that no template knows
USUAL = ""  # no word at all, which counts as a medium effort
RANKS = {USUAL: WORDS.index("medium"), **{word: at for at, word in enumerate(WORDS)}}
# Of words that mean the same to a template, the first of these is sent.
PREFERRED = tuple(dict.fromkeys(("high", "low", "medium", "max", "xhigh", "none", *WORDS)))
BY_LEVEL = {"off": SHORT, "short": SHORT, "long": LONG, "longest": LONGEST}
EFFECTS = {**{word: BY_LEVEL[level] for word, level in LEVEL_OF.items()}, "medium": MEDIUM}
# What a template is told that hands on any word: the words of GLM, which has a switch, and of
# gpt-oss, which has none.
ECHOED_WITH_SWITCH = ("low", "high", "max")
ECHOED_ALONE = ("low", "medium", "high")


class Unclear(Exception):
    """The prompts tell nothing: there are none, all are the same, or one question has two."""


def table_of(prompt, as_field=False):
    """The Table of a template. Raises Unclear.

    as_field  where there is no switch and any word will do, the effort goes into the request's own
              field: the engine makes the prompts of such models itself
    """

    def made_with(**kwargs):
        return prompt(messages=ASKED_IN, chat_template_kwargs=kwargs)

    plain = made_with()
    if not plain or prompt(messages=ANOTHER) == plain:
        raise Unclear
    switches = tuple(name for name in SWITCHES if is_switch(made_with, name))
    on = dict.fromkeys(switches[:1], True)
    made = {word: made_with(**on, reasoning_effort=word) for word in WORDS}
    strange = made_with(**on, reasoning_effort=STRANGE)
    usual = made_with(**on)
    echoes = is_echo(strange, (usual, *made.values()))
    if echoes:
        words = {word: word for word in (ECHOED_WITH_SWITCH if on else ECHOED_ALONE)}
    else:
        words = words_of(made, strange, usual)
    table = table_for(switches, words, as_field and echoes and not on)
    if made_with() != plain:  # a clock in it, or another engine by now
        raise Unclear
    return table._replace(
        origin=ECHOED if echoes else ASKED,
        late_system=takes_late_system(prompt),
        bare_schemas=has_bare_schemas(prompt),
    )


def is_switch(made_with, name):
    on = made_with(**{name: True})
    off = made_with(**{name: False})
    return None not in (on, off) and on != off


def is_echo(strange, others):
    """Whether the prompt of a word that means nothing holds that word; without a text it does where
    it is like none of the others."""
    if isinstance(strange, str):
        return STRANGE in strange.lower()
    return strange is not None and strange not in others


def words_of(made, strange, usual):
    """{word of effort that a template knows: the one to send for it}, USUAL where no word is better
    than some.

    made     {word: its prompt, or None where it is refused}
    strange  the prompt of a word that means nothing
    usual    that of no word
    """
    known = [word for word in WORDS if made[word] not in (None, strange)]
    if all(made[word] == usual for word in known):
        return {}
    words = {}
    for word in sorted(known, key=PREFERRED.index):
        alike = (other for other in words if made[other] == made[word])
        words[word] = next(alike, word)
    rest = [word for word in WORDS if word != "none" and made[word] == strange]
    if rest and strange is not None:
        name = name_of_rest(strange, rest, known, made)
        words[name] = name
    return words


def name_of_rest(strange, rest, known, made):
    """The word to send for what a template does with all words that it does not know: one of them,
    or USUAL.

    strange  the prompt of such a word
    rest     the words that are like that
    known    those that are not
    made     {word: its prompt}
    """
    if isinstance(strange, str):
        others = [made[word] for word in known]
        named = [
            word for word in rest if all(says(strange, word) > says(one, word) for one in others)
        ]
        if named:  # "Reasoning effort: Max"
            return named[-1]
    if "high" in rest and ("max" in known or "medium" in known):
        return "high"
    # GLM takes what it does not know for max; it may have no word for low, but none for medium.
    alike = "low" in known or not isinstance(strange, str) and "medium" not in known
    if "high" in known and "max" in rest and alike:
        return "max"
    return USUAL


def says(prompt, word):
    """How often a prompt (a text) has that word."""
    steps.pause()
    return len(re.findall(rf"(?<![A-Za-z]){word}(?![A-Za-z])", prompt, re.IGNORECASE))


def table_for(switches, words, as_field):
    """The Table of a template with these switches and words of effort (see words_of): one of
    TABLES, if it is like that."""
    on = Level(UNCHANGED)
    if switches:
        on = Level(ON, {switches[0]: True})
    levels = {word: level_for(word, switches, words, as_field) for word in WORDS}
    for table in TABLES.values():
        if (levels, on) == (table.levels, table.on):
            native = tuple(name for name in table.native if name not in SWITCHES)
            return table._replace(native=(*switches, *native), switches=switches)
    about = "a template without a switch"
    if switches:
        about = f"a template with the switch {switches[0]}"
    if efforts := sorted(set(words.values()) - {USUAL}, key=rank):
        about += f", with the efforts {', '.join(efforts)}"
    return Table("found", about, levels, on, (*switches, "reasoning_effort"), switches)


def level_for(word, switches, words, as_field):
    """What one of our words does."""
    on = dict.fromkeys(switches[:1], True)
    if on and LEVEL_OF[word] == "off":
        return Level(OFF, {switches[0]: False})
    chosen = chosen_for(word, words)
    if chosen == "none":
        return Level(OFF, {"reasoning_effort": "none"})
    if chosen == USUAL:
        return Level(ON if on else UNCHANGED, on)
    if as_field:
        return Level(EFFECTS[chosen], fields={"reasoning_effort": chosen})
    return Level(EFFECTS[chosen], {**on, "reasoning_effort": chosen})


def chosen_for(word, words):
    """The word to send for one of ours: what the template itself makes of it, or else the nearest,
    which is the least where no thinking is wanted."""
    if word in words:
        return words[word]
    efforts = sorted(set(words.values()) - {"none"}, key=rank)
    if LEVEL_OF[word] == "off" and "none" in words.values():
        return "none"
    if not efforts:
        return USUAL
    return min(efforts, key=lambda one: distance(word, one))


def rank(word):
    """Where a word stands among others: no word before the medium one."""
    return RANKS[word], word


def distance(word, other):
    """How far another word is from one: first come those of its level, of two the greater."""
    alike = LEVEL_OF[word] == LEVEL_OF.get(other or "medium")
    return not alike, abs(RANKS[word] - RANKS[other]), -RANKS[other]


# ---- what else a template does


def opens_thoughts(text):
    """Whether a prompt ends in thoughts that have begun, so that an answer has the closing tag
    alone; None where it is no text."""
    if not isinstance(text, str):
        return None
    return text.rfind("<think>") > text.rfind("</think>")


def takes_late_system(prompt):
    """Whether a system message in the middle of a chat is read where it stands."""
    first = prompt(messages=chat_with("one", "one"))
    early = prompt(messages=chat_with("two", "one"))
    late = prompt(messages=chat_with("one", "two"))
    if None in (first, early, late) or late == first:
        return False
    return common(first, early) < common(first, late)


def chat_with(asked, instructed):
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "Yes."},
        {"role": "system", "content": instructed},
        *ASKED_IN,
    ]


def has_bare_schemas(prompt):
    """Whether the fields of a tool's schema are read, but not the definitions behind them."""
    first = prompt(messages=ASKED_IN, tools=[tool_with("one", "one")])
    field = prompt(messages=ASKED_IN, tools=[tool_with("two", "one")])
    definition = prompt(messages=ASKED_IN, tools=[tool_with("one", "two")])
    if first is None:  # whatever it is that it can't read
        return True
    return field != first and definition == first


def tool_with(field, definition):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": field}, "b": {"$ref": "#/$defs/B"}},
        "required": ["a"],
        "$defs": {"B": {"type": "string", "description": definition}},
    }
    function = {"name": "look", "description": "Look it up.", "parameters": schema}
    return {"type": "function", "function": function}


def common(one, other):
    """How long the beginning is that two prompts have in common."""
    length = 0
    most = min(len(one), len(other))
    while length < most:
        middle = (length + most + 1) // 2
        if one[length:middle] == other[length:middle]:
            length = middle
        else:
            most = middle - 1
    return length
