"""What a chat template does with the controls of thinking, from the prompts that it makes; and what else an engine tells."""
import orjson
import pytest

from engines import kinds
from engines.found import ENOUGH, PAUSE, Found
from engines.http1 import Silent
from engines.template import Unclear, table_of
from reasoning import ASKED, ECHOED, TABLES, WORDS
from support.templates import TEMPLATES, Refused, render

KINDS = {"vllm": kinds.VLLM, "llama": kinds.LLAMA_CPP}


def engine_with(template, texts=True, **odd):
    """A function that asks an engine with this template. odd: {a path without its slashes: its answer}; texts: it gives
    those of tokens too."""
    def ask(path, question=None):
        if path.strip("/") in odd:
            return odd[path.strip("/")]
        if path.startswith("/metrics/?"):
            return 200, b'# HELP\nvllm:cache_config_info{block_size="128",engine="0",kv_cache_size_tokens="65536"} 1.0\n'
        if path == "/props":
            return 200, orjson.dumps({"default_generation_settings": {"n_ctx": 4096}, "total_slots": 2})
        if "messages" not in question:
            words = (question.get("prompt") or question["content"]).split()
            return 200, orjson.dumps({"count": len(words), "tokens": list(range(len(words))), "max_model_len": 32768})
        try:
            made = render(template, question)
        except Refused as refused:
            return 400, orjson.dumps({"error": {"code": 400, "message": str(refused)}})
        if path == "/apply-template":
            return 200, orjson.dumps({"prompt": made})
        words = list(made) if texts and question.get("return_token_strs") else None
        return 200, orjson.dumps({"count": len(made), "tokens": list(made.encode()), "token_strs": words})
    return ask


def found_of(name, kind="vllm", **odd):
    found = Found()
    found.ask(KINDS[kind], engine_with(TEMPLATES[name], **odd), "m")
    return found


# Template -> its table, whether it takes a late system message, knows $defs, hands words on, ends in an opened tag.
EXPECTED = {
    "glm": ("glm", True, False, ASKED, True),
    "no-switch": ("no-switch", True, False, ASKED, True),
    "qwen": ("qwen", False, True, ASKED, True),
    "glm-4.6": ("qwen", True, False, ASKED, True),
    "deepseek": ("deepseek", True, False, ASKED, False),
    "gpt-oss": ("gpt-oss", False, True, ECHOED, False),
    "echo": ("gpt-oss", True, False, ECHOED, True),
    "echo-switch": ("glm", True, False, ECHOED, True),
    "raising": ("found", True, False, ASKED, True),
    "earlier": ("none", True, False, ASKED, True),
    "thinking-only": ("none", True, False, ASKED, True),
    "none": ("none", True, False, ASKED, False),
}


def test_every_template_is_expected():
    assert EXPECTED.keys() == TEMPLATES.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_the_table_of_a_template(name):
    found = found_of(name)
    table = found.table
    assert (table.name, table.late_system, table.bare_schemas, table.origin, found.opens) == EXPECTED[name]
    if table.name in TABLES:
        assert (table.levels, table.on) == (TABLES[table.name].levels, TABLES[table.name].on)
    assert set(table.switches) <= set(table.native) and ("reasoning_effort" in table.native) == (table.name != "none")
    assert table.can_turn_off == (name in ("glm", "qwen", "glm-4.6", "deepseek", "echo-switch", "raising"))
    other = found_of(name, "llama")
    by_field = name in ("gpt-oss", "echo")              # an effort beside the kwargs does nothing there
    assert (other.table == table) != by_field and other.opens == found.opens
    if by_field:
        assert [(*level.kwargs.values(), level.effect) for level in other.table.levels.values()] == [
            (*level.fields.values(), level.effect) for level in table.levels.values()]


def level(effect, **kwargs):
    return effect, kwargs


SHORT, MEDIUM, LONG, LONGEST, ON = "Short thinking", "Medium thinking", "Long thinking", "Longest thinking", "Thinking on"
OFF, SAME = "Thinking off (fastest)", "No effect on this model"


def effort(words, unknown="''", unset=None):
    """A template without a switch that knows these words: {word: text}; `unknown` is what it says else."""
    return f"{{{{- {words}.get(reasoning_effort, {unknown}) if reasoning_effort is defined else {unset or unknown} -}}}}{{{{- messages[0].content -}}}}"


# A template -> what each of none, minimal, low, medium, high, xhigh, max does.
WORDED = [
    (effort("{'low': 1, 'medium': 2, 'high': 3}", "2"),          # a word that it does not know is max, as GLM has it
     [level(SHORT, reasoning_effort="low")] * 3 + [level(LONG, reasoning_effort="high")] * 2 + [level(LONGEST, reasoning_effort="max")] * 2),
    (effort("{'low': 1, 'medium': 2, 'high': 3}", "4"),
     [level(SHORT, reasoning_effort="low")] * 3 + [level(MEDIUM, reasoning_effort="medium"), level(LONG, reasoning_effort="high")]
     + [level(LONGEST, reasoning_effort="max")] * 2),
    (effort("{'max': 1}"), [level(LONG, reasoning_effort="high")] * 5 + [level(LONGEST, reasoning_effort="max")] * 2),
    (effort("{'high': 1}"), [level(SAME)] * 4 + [level(LONG, reasoning_effort="high")] * 3),
    # The words that a prompt holds tell what all others stand for: GLM 5.3, 5.2 (two levels and a switch), and one like gpt-oss.
    (effort("{'low': 'Reasoning Effort: Low. ', 'high': 'Reasoning Effort: High. '}", "'Reasoning Effort: Max. '"),
     [level(SHORT, reasoning_effort="low")] * 3 + [level(LONG, reasoning_effort="high")] * 2 + [level(LONGEST, reasoning_effort="max")] * 2),
    ("Effort: {{ 'High' if reasoning_effort is defined and reasoning_effort == 'high' else 'Max' }}. {{- messages[0].content -}}"
     "{{- '</think>' if enable_thinking is defined and not enable_thinking else '<think>' -}}",
     [level(OFF, enable_thinking=False)] * 2 + [level(LONG, enable_thinking=True, reasoning_effort="high")] * 3
     + [level(LONGEST, enable_thinking=True, reasoning_effort="max")] * 2),
    (effort("{'low': 'Reasoning: low. ', 'high': 'Reasoning: high. '}", "'Reasoning: medium. '"),
     [level(SHORT, reasoning_effort="low")] * 3 + [level(MEDIUM, reasoning_effort="medium")] + [level(LONG, reasoning_effort="high")] * 3),
    # DeepSeek's fourth, which vLLM does without a template.
    ("{%- set word = reasoning_effort if reasoning_effort is defined else 'high' -%}"
     "{{- 'Little. ' if word in ['low', 'minimal', 'medium'] else 'All. ' if word == 'max' else '' -}}"
     "{{- messages[0].content -}}{{- '<think>' if thinking is defined and thinking and word != 'none' else '</think>' -}}",
     [level(OFF, thinking=False)] * 2 + [level(SHORT, thinking=True, reasoning_effort="low")] * 2
     + [level(LONG, thinking=True, reasoning_effort="high")] + [level(LONGEST, thinking=True, reasoning_effort="max")] * 2),
    (effort("{'low': 1}"), [level(SHORT, reasoning_effort="low")] * 3 + [level(SAME)] * 4),
    (effort("{'none': 0, 'low': 1, 'high': 3}", "3"),
     [level(OFF, reasoning_effort="none")] * 2 + [level(SHORT, reasoning_effort="low")] + [level(SAME)] * 4),
    (effort("{'minimal': 0, 'low': 1, 'medium': 2, 'high': 3}", "2"),
     [level(SHORT, reasoning_effort="minimal")] * 2 + [level(SHORT, reasoning_effort="low"), *[level(LONG, reasoning_effort="high")] * 2]
     + [level(LONGEST, reasoning_effort="max")] * 2),
    ("{{- raise_exception('x') if reasoning_effort is defined and reasoning_effort not in ['low', 'high', 'max'] else '' -}}"
     "{{- 'twice' if reasoning_effort is defined and reasoning_effort != 'low' else '' -}}{{- messages[0].content -}}",
     [level(SHORT, reasoning_effort="low")] * 3 + [level(LONG, reasoning_effort="high")] * 4),
    ("{{- raise_exception('x') if reasoning_effort is defined else '' -}}{{- messages[0].content -}}", [level(SAME)] * 7),
    # Only together with the switch, which is off by itself.
    ("{{- {'low': 1, 'high': 3, 'max': 4}.get(reasoning_effort, 0) if thinking is defined and thinking else 9 -}}{{- messages[0].content -}}",
     [level(OFF, thinking=False)] * 2 + [level(SHORT, thinking=True, reasoning_effort="low")]
     + [level(ON, thinking=True)] + [level(LONG, thinking=True, reasoning_effort="high")]
     + [level(LONGEST, thinking=True, reasoning_effort="max")] * 2),
    # All words, and something else again for any other.
    (effort("{'none': 0, 'minimal': 1, 'low': 2, 'medium': 3, 'high': 4, 'xhigh': 5, 'max': 6}", "7", "4"),
     [level(OFF, reasoning_effort="none"), level(SHORT, reasoning_effort="minimal"), level(SHORT, reasoning_effort="low"),
      level(MEDIUM, reasoning_effort="medium"), level(LONG, reasoning_effort="high"), level(LONGEST, reasoning_effort="xhigh"),
      level(LONGEST, reasoning_effort="max")]),
    # `none` is a word for low, or one of its own, under which minimal goes too.
    ("{%- set word = reasoning_effort if reasoning_effort is defined else 'high' -%}{{- raise_exception('x') if word not in ['none', 'low', 'high']"
     " else 2 if word == 'high' else 1 -}}{{- messages[0].content -}}",
     [level(SHORT, reasoning_effort="low")] * 3 + [level(LONG, reasoning_effort="high")] * 4),
    ("{{- raise_exception('x') if reasoning_effort is defined and reasoning_effort in ['zqz', 'xhigh'] else '' -}}{{- messages[0].content -}}"
     "{{- '</think>' if reasoning_effort is defined and reasoning_effort in ['none', 'minimal'] else '' -}}",
     [level(OFF, reasoning_effort="none")] * 2 + [level(LONG, reasoning_effort="high")] * 5),
    # Something else under each of its values than without it, and yet no switch.
    ("{{- 'set' if enable_thinking is defined else '' -}}{{- messages[0].content -}}", [level(SAME)] * 7),
    # One under both names, and one that can't be turned off but by an error.
    ("{{- 0 if not (enable_thinking if enable_thinking is defined else thinking if thinking is defined else true) else 1 -}}{{- messages[0].content -}}",
     [level(OFF, enable_thinking=False)] * 2 + [level(ON, enable_thinking=True)] * 5),
    ("{{- raise_exception('x') if enable_thinking is defined and not enable_thinking else '' -}}{{- messages[0].content -}}", [level(SAME)] * 7),
]


@pytest.mark.parametrize("template, expected", WORDED)
def test_words_of_effort(template, expected):
    found = Found()
    found.ask(kinds.VLLM, engine_with(template), "m")
    assert [(effect, kwargs) for effect, kwargs, _ in found.table.levels.values()] == expected
    assert found.table.can_turn_off == (expected[0][0] == OFF)


def test_one_that_raises_at_a_strange_word_hands_on_none():
    """Though it knows all of ours; and without texts, too."""
    knows = "{{- raise_exception('x') if reasoning_effort is defined and reasoning_effort == 'zqz' else reasoning_effort -}}{{- messages[0].content -}}"
    for texts in (True, False):
        found = Found()
        found.ask(kinds.VLLM, engine_with(knows, texts=texts), "m")
        assert found.table.origin == ASKED and [level.kwargs for level in found.table.levels.values()] == [{"reasoning_effort": word} for word in WORDS]


@pytest.mark.parametrize("template, about", [
    (TEMPLATES["raising"], "a template without a switch, with the efforts none, high"),
    (TEMPLATES["raising"] + "{{- enable_thinking -}}", "a template with the switch enable_thinking, with the efforts none, high"),
    ("{{- messages[0].content -}}{{- thinking -}}", "a template with the switch thinking only"),
])
def test_what_people_hear_of_it(template, about):
    found = Found()
    found.ask(kinds.VLLM, engine_with(template), "m")
    assert found.table.about == about


def test_without_texts_what_other_words_mean_is_not_guessed():
    """Under a template that takes them for the least there is, the longest thinking is what it has a word for."""
    least = "{{- {'medium': 2, 'high': 3}.get(reasoning_effort if reasoning_effort is defined else '', 1) -}}{{- messages[0].content -}}"
    found = Found()
    found.ask(kinds.VLLM, engine_with(least, texts=False), "m")
    assert found.table.levels["max"].kwargs == {"reasoning_effort": "high"} and found.table.levels["low"].kwargs == {}


def test_without_texts_the_tokens_tell():
    found = [found_of(name, texts=False).table for name in EXPECTED]
    assert [(table.name, table.late_system, table.bare_schemas, table.origin) for table in found] == [
        expected[:4] for expected in EXPECTED.values()]
    two_levels, = (template for template, _ in WORDED if template.startswith("Effort: {{ 'High'"))
    found = Found()
    found.ask(kinds.VLLM, engine_with(two_levels, texts=False), "m")
    assert [level.kwargs.get("reasoning_effort") for level in found.table.levels.values()] == [None, None, *["high"] * 3, "max", "max"]
    assert found.opens is None


MESSAGE = "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>' ~ m.content -}}{%- endfor -%}"
SYSTEM_ALONE = "{%- for m in messages if m.role == 'system' -%}{{- m.content -}}{%- endfor -%}"
OTHERS_ALONE = "{%- for m in messages if m.role != 'system' -%}{{- m.content -}}{%- endfor -%}"
TOOLS = "{{- messages[0].content -}}{%- for t in tools or [] -%}{{- EXPRESSION -}}{%- endfor -%}"


@pytest.mark.parametrize("template, late_system, bare_schemas", [
    (MESSAGE, True, False), (OTHERS_ALONE, False, False), (SYSTEM_ALONE + OTHERS_ALONE, False, False), (OTHERS_ALONE + SYSTEM_ALONE, True, False),
    ("{{- raise_exception('x') if messages[1:] | selectattr('role', 'eq', 'system') | list else messages | map(attribute='content') | join -}}", False, False),
    (TOOLS.replace("EXPRESSION", "t | tojson"), False, False), (TOOLS.replace("EXPRESSION", "t.function.name"), False, False),
    (TOOLS.replace("EXPRESSION", "t.function.parameters.properties | tojson"), False, True),
    (TOOLS.replace("EXPRESSION", "raise_exception('no tools')"), False, True),
])
def test_system_messages_and_schemas(template, late_system, bare_schemas):
    """A late system message that is not read, or not where it stands, comes early; a schema whose definitions are not read has none."""
    found = Found()
    found.ask(kinds.VLLM, engine_with(template), "m")
    assert (found.table.late_system, found.table.bare_schemas) == (late_system, bare_schemas)


# ---- engines that can't be asked

@pytest.mark.parametrize("answer", [
    (404, b'{"detail":"Not Found"}'), (501, b"{}"), (503, b"{}"), (400, b"{}"), (500, b"oh"), (200, b""), (200, b"no!"), (200, b"[]"),
    (200, b'{"tokens":"many","prompt":5}'), (200, b'{"tokens":[],"prompt":""}'), (200, b'{"count":3}'), (200, b"[" * 100_000),
])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_answer_says_nothing(kind, answer):
    found = found_of("no-switch", kind, **{"tokenize": answer, "apply-template": answer})
    assert (found.table, found.opens, found.due) == (None, None, PAUSE)


def test_an_unknown_kind_is_not_asked():
    found = Found()
    found.ask(kinds.OTHER, lambda *_: pytest.fail("it was asked"), "m")
    assert (found.table, found.due) == (None, PAUSE)


def test_prompts_that_never_repeat_say_nothing():
    """A template with a clock in it makes each two prompts differ."""
    times = iter(range(100))
    with pytest.raises(Unclear):
        table_of(lambda **_: str(next(times)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_says_the_same_of_all_chats_says_nothing(kind):
    """Or of all that are equally long."""
    answer = 200, b'{"count":3,"tokens":[1,2,3],"prompt":"1 2 3"}'
    assert found_of("glm", kind, **{"tokenize": answer, "apply-template": answer}).table is None
    found = Found()
    found.ask(KINDS[kind], lambda path, question: (200, orjson.dumps({"tokens": [*range(len(orjson.dumps(question["messages"])))],
                                                                      "prompt": "x" * len(orjson.dumps(question["messages"]))})), "m")
    assert (found.table, found.due) == (None, PAUSE)


def test_it_is_asked_again_later_and_what_was_known_stays():
    found = found_of("qwen")
    found.due = 0
    with pytest.raises(Silent):
        found.ask(kinds.VLLM, silent, "m")
    assert found.table.name == "qwen" and [found.is_due() for _ in range(PAUSE + 1)] == [False] * (PAUSE - 1) + [True] * 2
    found.ask(kinds.VLLM, engine_with(TEMPLATES["none"]), "m")
    assert found.table.name == "none" and not found.is_due()


def silent(path, question=None):
    raise Silent


# ---- what else is asked

@pytest.mark.parametrize("kind, context, capacity", [("vllm", 32768, 65536), ("llama", 4096, None)])
def test_facts(kind, context, capacity):
    found = found_of("glm", kind)
    assert (found.context, found.capacity, found.due) == (context, capacity, None)
    assert found.bytes_a_token == len(kinds.SAMPLE) / len(kinds.SAMPLE.split())


@pytest.mark.parametrize("filtered, whole, capacity", [
    (b"", b'vllm:cache_config_info{kv_cache_size_tokens="10"} 1\n', 10),      # with several servers there is no filter
    (b'vllm:cache_config_info{engine="0",kv_cache_size_tokens="10"} 1\nvllm:cache_config_info{engine="1",kv_cache_size_tokens="7"} 1', b"", 17),
    (b"", b"", None), (b'vllm:cache_config_info{kv_cache_size_tokens="None"} 1', b"", None),
])
def test_capacity_of_the_cache(filtered, whole, capacity):
    pages = {f"metrics/?name%5B%5D={kinds.CACHE}": (200, filtered), "metrics": (200, whole)}
    assert found_of("glm", **pages).capacity == capacity


# A line of a real one, which has a label for each of its settings, less some of these.
REAL = (b'vllm:cache_config_info{block_size="%d",cache_dtype="auto",enable_prefix_caching="%b",engine="%d",gpu_memory_utilization="0.92",'
        b'kv_cache_max_concurrency="2.0",kv_cache_size_tokens="65536",num_gpu_blocks="512",prefix_caching_hash_algo="sha256"} 1.0\n')


@pytest.mark.parametrize("told, caches", [
    ([b"False"], False), ([b"True"], True), ([b"False", b"False"], False), ([b"True", b"False"], True), ([b"None"], True), ([], True),
])
def test_an_engine_that_caches_nothing_says_so(told, caches):
    page = b"# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n" + b"".join(REAL % (128, one, at) for at, one in enumerate(told))
    found = found_of("glm", **{f"metrics/?name%5B%5D={kinds.CACHE}": (200, page), "metrics": (200, b"")})
    assert (found.caches, found.capacity, found.due) == (caches, len(told) * 65536 or None, None)


def test_usage_names_cached_tokens_or_does_not():
    found, other = Found(), Found()
    for usage in ({}, None, {"prompt_tokens_details": None}, {"prompt_tokens_details": {"cached_tokens": 0}}):
        assert found.names_cached is None
        found.note_usage(usage)
    assert found.names_cached is True
    for _ in range(ENOUGH):
        assert other.names_cached is None
        other.note_usage({"prompt_tokens": 5})
    assert other.names_cached is False
    other.note_usage({"prompt_tokens_details": {"cached_tokens": 3}})
    assert other.names_cached is True


@pytest.mark.parametrize("status, loaded", [
    (None, True), ("odd", True), ({"value": "loaded"}, True), ({"value": "unloaded"}, False), ({"value": "loading"}, False), ({}, True),
])
def test_what_is_not_loaded_is_not_asked(status, loaded):
    assert kinds.LLAMA_CPP.is_loaded({"id": "m", "status": status}) is loaded
