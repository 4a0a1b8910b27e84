"""Reasoning: every word in every table, as payload in and payload out."""
import copy
import types
from pathlib import Path

import pytest

import reasoning
from dialects.history import Ignored
from errors import InvalidRequest
from reasoning import FIELDS, TABLES, UNCHANGED, WORDS, rows

OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ON = {"chat_template_kwargs": {"enable_thinking": True}}
NOTHING = {}


def glm(effort):
    return {"chat_template_kwargs": {"enable_thinking": True, "reasoning_effort": effort}}


def kwarg(effort):
    return {"chat_template_kwargs": {"reasoning_effort": effort}}


def field(effort):
    return {"reasoning_effort": effort}


def deepseek(thinking):
    return {"chat_template_kwargs": {"thinking": thinking}}


# Per table: none, minimal, low, medium, high, xhigh, max; then think: false and think: true.
EXPECTED = {
    "glm": [OFF, OFF, glm("low"), glm("high"), glm("high"), glm("max"), glm("max"), OFF, ON],
    "no-switch": [kwarg("low"), kwarg("low"), kwarg("low"), kwarg("high"), kwarg("high"), kwarg("max"), kwarg("max"),
                  kwarg("low"), NOTHING],
    "qwen": [OFF, OFF, ON, ON, ON, ON, ON, OFF, ON],
    "deepseek": [deepseek(False), deepseek(False), *[deepseek(True)] * 5, deepseek(False), deepseek(True)],
    "gpt-oss": [field("low"), field("low"), field("low"), field("medium"), field("high"), field("high"), field("high"),
                field("low"), NOTHING],
    "none": [NOTHING] * 9,
}
CASES = [(table, word, after) for table, row in EXPECTED.items() for word, after in zip(WORDS, row[:7], strict=True)]
THINK = [(table, think, row[7 + think]) for table, row in EXPECTED.items() for think in (False, True)]


def translate(payload, table="glm", budget_field=None):
    """(whether thoughts are unwanted, what was left out)."""
    ignored = Ignored()
    return reasoning.translate(payload, TABLES[table], ignored, budget_field), ignored.header


def translated(payload, table="glm"):
    before = copy.deepcopy(TABLES)
    payload = copy.deepcopy(payload)
    assert translate(payload, table)[1] == ""
    assert before == TABLES
    return payload


def test_every_table_and_word_is_expected_here():
    assert list(EXPECTED) == list(TABLES)
    assert all(tuple(table.levels) == WORDS for table in TABLES.values())


@pytest.mark.parametrize("table, word, after", CASES)
def test_words(table, word, after):
    assert translated({"model": "m", "reasoning_effort": word}, table) == {"model": "m", **after}
    assert translated({"reasoning": {"effort": word, "summary": "auto"}}, table) == after


@pytest.mark.parametrize("table, think, after", THINK)
def test_think(table, think, after):
    assert translated({"think": think}, table) == after


@pytest.mark.parametrize("table", TABLES)
def test_nothing_asked_nothing_sent(table):
    assert translated({"model": "m"}, table) == {"model": "m"}
    assert translated({"reasoning_effort": None, "reasoning": None, "think": None}, table) == {}
    assert translated({"reasoning": {}}, table) == {}
    assert translated({"reasoning": {"effort": None}}, table) == {}


@pytest.mark.parametrize("payload, after", [
    ({"reasoning_effort": "none", "reasoning": {"effort": "max"}, "think": True}, OFF),
    ({"reasoning": {"effort": "low"}, "think": False}, glm("low")),
    ({"reasoning_effort": None, "reasoning": {"effort": "low"}}, glm("low")),
    ({"reasoning_effort": None, "think": False}, OFF),
    ({"thinking": {"type": "disabled"}}, OFF), ({"thinking": {"type": "disabled"}, "think": True}, OFF),
    ({"thinking": {"type": "enabled"}, "think": False}, ON), ({"thinking": {"type": "adaptive"}}, ON),
    ({"thinking": {"type": "between_tools"}}, ON),
    ({"thinking": {"type": "auto"}}, {}), ({"thinking": {"type": "auto"}, "think": False}, OFF),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024.0}}, glm("low")), ({"thinking": False}, OFF),
    ({"thinking": {"type": "enabled", "budget_tokens": 5000}, "reasoning_effort": "none"}, OFF),
    ({"thinking": {"type": "disabled"}, "reasoning": {"effort": "max"}}, glm("max")),
    ({"reasoning": {"enabled": False}, "thinking": {"type": "enabled"}}, OFF),
    ({"reasoning": {"enabled": False, "effort": "high", "max_tokens": 9}}, OFF),
    ({"reasoning": {"enabled": True, "effort": "none"}}, OFF), ({"reasoning": {"enabled": True}}, ON),
    ({"reasoning": {"max_tokens": 16384, "effort": "low"}}, glm("low")), ({"reasoning": {"max_tokens": 16384}}, glm("max")),
])
def test_the_most_exact_control_wins(payload, after):
    assert translated(payload) == after


def test_an_engine_that_counts_thinking_gets_the_number():
    for given in ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, {"reasoning": {"max_tokens": 5000.0}}):
        translate(given, "glm", "thinking_token_budget")
        assert given == {**glm("high"), "thinking_token_budget": 5000}


# ---- a new word

@pytest.mark.parametrize("level, before", [("off", '"low":'), ("longest", "}")])
def test_a_new_word_is_known_to_every_table(level, before):
    """One line makes a word: no table can be without it, and the error names it where it is understood."""
    module = changed(f'"ultra": "{level}",', before)
    assert "ultra" in module.WORDS
    for name, table in module.TABLES.items():
        assert tuple(table.levels) == module.WORDS
        assert [word for words, _ in module.rows(table) for word in words] == list(module.WORDS)
        payload = {"reasoning_effort": "ultra"}
        module.translate(payload, table, Ignored())
        assert payload == {"off": EXPECTED[name][0], "longest": EXPECTED[name][6]}[level]
        with pytest.raises(InvalidRequest, match=", ".join(module.WORDS)):
            module.translate({"reasoning_effort": "turbo"}, table, Ignored())


def test_a_new_word_without_a_level_fails_at_the_start():
    with pytest.raises(KeyError, match="strange"):
        changed('"ultra": "strange",', "}")


def test_an_error_names_the_words_of_the_table_in_force(monkeypatch):
    few = {word: TABLES["glm"].levels[word] for word in ("none", "high")}
    monkeypatch.setitem(TABLES, "glm", TABLES["glm"]._replace(levels=few))
    with pytest.raises(InvalidRequest, match="must be one of: none, high$"):
        translate({"reasoning_effort": "max"}, "glm")


def changed(line, before):
    """The module reasoning with one more line in LEVEL_OF, before the first of such."""
    start, end = Path(reasoning.__file__).read_text().split("LEVEL_OF = {", 1)
    module = types.ModuleType("changed")
    exec(start + "LEVEL_OF = {" + end.replace(before, line + before, 1), vars(module))
    return module


# ---- native switches

@pytest.mark.parametrize("table, kwargs", [
    ("glm", {"enable_thinking": True}),
    ("glm", {"enable_thinking": False, "other": 1}),
    ("glm", {"reasoning_effort": "max"}),
    ("no-switch", {"reasoning_effort": "high"}),
    ("qwen", {"enable_thinking": True}),
    ("deepseek", {"thinking": False}),
    ("deepseek", {"enable_thinking": False}),
    ("gpt-oss", {"reasoning_effort": "low"}),
])
def test_a_native_switch_cancels_the_translation(table, kwargs):
    payload = {"reasoning_effort": "low", "reasoning": {"effort": "low"}, "think": True, "chat_template_kwargs": kwargs}
    assert translated(payload, table) == {"chat_template_kwargs": kwargs}


def test_other_kwargs_stay():
    assert translated({"reasoning_effort": "low", "chat_template_kwargs": {"clear_thinking": False}}) == {
        "chat_template_kwargs": {"clear_thinking": False, "enable_thinking": True, "reasoning_effort": "low"}}
    assert translated({"chat_template_kwargs": {"clear_thinking": False}}) == {
        "chat_template_kwargs": {"clear_thinking": False}}


def test_a_native_null_cancels_nothing():
    assert translated({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": None}}) == OFF
    assert translated({"reasoning_effort": "none", "chat_template_kwargs": None}) == OFF


def test_the_clients_own_kwargs_are_not_changed_in_place():
    kwargs = {"a": 1}
    translate({"reasoning_effort": "low", "chat_template_kwargs": kwargs}, "glm")
    assert kwargs == {"a": 1}


# ---- switches that the template does not have

@pytest.mark.parametrize("table", ["no-switch", "gpt-oss", "none"])
@pytest.mark.parametrize("given, left, header", [
    ({"chat_template_kwargs": {"enable_thinking": False}}, {}, "chat_template_kwargs enable_thinking"),
    ({"chat_template_kwargs": {"enable_thinking": False, "thinking": 0, "a": 1}}, {"chat_template_kwargs": {"a": 1}},
     "chat_template_kwargs enable_thinking, chat_template_kwargs thinking"),
    ({"chat_template_kwargs": {"enable_thinking": None}, "enable_thinking": False}, {},
     "chat_template_kwargs enable_thinking, enable_thinking false"),
    ({"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}, {"chat_template_kwargs": {"enable_thinking": True,
                                                                                                     "thinking": True}}, ""),
    ({"enable_thinking": True}, {"enable_thinking": True}, ""),
])
def test_a_switch_that_is_not_there_is_left_out(table, given, left, header):
    before, payload = copy.deepcopy(given), copy.deepcopy(given)
    kwargs = payload.get("chat_template_kwargs")
    assert translate(payload, table) == (bool(header), header) and payload == left
    assert kwargs == before.get("chat_template_kwargs")
    payload = {**given, "reasoning_effort": "high"}     # other controls count all the same
    translate(payload, table)
    effort = EXPECTED[table][4]
    kwargs = {**left.get("chat_template_kwargs", {}), **effort.get("chat_template_kwargs", {})}
    assert payload == {**left, **effort, **({"chat_template_kwargs": kwargs} if kwargs else {})}


def test_one_switch_is_not_the_other():
    """Engines' parsers obey either name, whichever the template knows."""
    for name, other in (("qwen", "thinking"), ("deepseek", "enable_thinking")):
        known = TABLES[name]._replace(switches=(TABLES[name].native[0],))
        ignored, payload = Ignored(), {"chat_template_kwargs": {other: False}}
        assert reasoning.translate(payload, known, ignored) and payload == {} and ignored.header == f"chat_template_kwargs {other}"


@pytest.mark.parametrize("payload, unwanted", [
    ({}, False), ({"reasoning_effort": "none"}, True), ({"reasoning_effort": "minimal"}, True), ({"reasoning_effort": "low"}, False),
    ({"think": False}, True), ({"think": True}, False), ({"thinking": {"type": "disabled"}}, True), ({"thinking": False}, True),
    ({"reasoning": {"enabled": False}}, True), ({"reasoning": {"effort": "none"}}, True), ({"reasoning": {"max_tokens": 5}}, False),
    ({"chat_template_kwargs": {"reasoning_effort": "none"}}, True), ({"chat_template_kwargs": {"reasoning_effort": "low"}}, False),
    ({"chat_template_kwargs": {"reasoning_effort": ["none"]}}, False),
])
def test_whether_thoughts_are_wanted_is_known(payload, unwanted):
    assert translate(payload, "no-switch")[0] is unwanted
    assert payload.get("chat_template_kwargs") != {"reasoning_effort": "none"}


# ---- mistakes

NAMES = "none, minimal, low, medium, high, xhigh, max"


@pytest.mark.parametrize("payload, param, message", [
    ({"reasoning_effort": "turbo"}, "reasoning_effort", f"reasoning_effort must be one of: {NAMES}"),
    ({"reasoning_effort": "High"}, "reasoning_effort", f"reasoning_effort must be one of: {NAMES}"),
    ({"reasoning_effort": ""}, "reasoning_effort", f"reasoning_effort must be one of: {NAMES}"),
    ({"reasoning_effort": 3}, "reasoning_effort", f"reasoning_effort must be one of: {NAMES}"),
    ({"reasoning_effort": ["low"]}, "reasoning_effort", f"reasoning_effort must be one of: {NAMES}"),
    ({"reasoning_effort": {}}, "reasoning_effort", f"reasoning_effort must be one of: {NAMES}"),
    ({"reasoning": {"effort": "turbo"}}, "reasoning.effort", f"reasoning.effort must be one of: {NAMES}"),
    ({"reasoning": {"effort": False}}, "reasoning.effort", f"reasoning.effort must be one of: {NAMES}"),
    ({"reasoning": "high"}, "reasoning", 'reasoning must be an object such as {"effort": "high"}'),
    ({"reasoning": True}, "reasoning", 'reasoning must be an object such as {"effort": "high"}'),
    ({"reasoning": {"enabled": "no"}}, "reasoning.enabled", "reasoning.enabled must be true or false"),
    ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens", "reasoning.max_tokens must be a positive whole number"),
    ({"thinking": "on"}, "thinking", 'thinking must be an object such as {"type": "disabled"}'),
    ({"thinking": {}}, "thinking.type", "thinking.type must be one of: enabled, adaptive, between_tools, auto, disabled"),
    ({"thinking": {"type": ["x"]}}, "thinking.type", "thinking.type must be one of: enabled, adaptive, between_tools, auto, disabled"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens",
     "thinking.budget_tokens must be a positive whole number"),
    ({"think": "yes"}, "think", "think must be true or false; for more, use reasoning_effort"),
    ({"think": 1}, "think", "think must be true or false; for more, use reasoning_effort"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "chat_template_kwargs must be an object"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "chat_template_kwargs must be an object"),
])
@pytest.mark.parametrize("table", TABLES)
def test_mistakes(table, payload, param, message):
    with pytest.raises(InvalidRequest) as caught:
        translated(payload, table)
    assert (caught.value.param, caught.value.message) == (param, message)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")


# ---- what people are told

def test_rows_of_glm_are_those_of_the_specification():
    assert rows(TABLES["glm"]) == [
        (["none", "minimal"], "Thinking off (fastest)"),
        (["low"], "Short thinking"),
        (["medium", "high"], "Long thinking"),
        (["xhigh", "max"], "Longest thinking"),
    ]


@pytest.mark.parametrize("table", TABLES)
def test_rows_name_every_word_once(table):
    assert [word for words, _ in rows(TABLES[table]) for word in words] == list(WORDS)


@pytest.mark.parametrize("table", TABLES)
def test_effects_are_true(table):
    """Only what sends something claims an effect, and only what switches off claims to."""
    for level in TABLES[table].levels.values():
        assert (level.effect == UNCHANGED) == (not level.kwargs and not level.fields)
        assert level.effect.startswith("Thinking off") == (False in level.kwargs.values())


def test_fields():
    assert FIELDS == {"both": ("reasoning", "reasoning_content"), "reasoning": ("reasoning",),
                      "reasoning_content": ("reasoning_content",)}
