"""/help: what it says in each form, and that it says it of the tables the code uses."""
import html.parser
import json
import re
import shlex
import tomllib
from types import SimpleNamespace

import pytest

import errors
import reasoning
from front.routes import NOT_SUPPORTED, ROUTES
from pages import help
from support.help_page import (
    BASE,
    HOSTILE,
    MODELS,
    NAMES,
    configured,
    data,
    fences,
    model,
    page,
    shown,
)


class Reader(html.parser.HTMLParser):
    """Checks that tags are closed in order, and collects the text and the tags."""
    VOID = {"meta", "link", "br", "hr"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.text += text


# ---- which form

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


@pytest.mark.parametrize("accept, wanted, form", [
    (None, None, "md"), ("", None, "md"), ("*/*", None, "md"), ("nonsense", None, "md"), ("image/png", None, "md"),
    (BROWSER, None, "html"), ("text/html", None, "html"), ("TEXT/HTML; charset=utf-8", None, "html"),
    ("text/html;q=0, */*", None, "md"), ("text/html;q=0.2, */*;q=0.5", None, "md"),
    ("text/markdown, text/html", None, "md"),
    ("application/json", None, "json"), ("application/json; charset=utf-8", None, "json"),
    ("application/json, text/plain, */*", None, "json"), ("application/json;q=0.1, text/html;q=0.9", None, "html"),
    ("application/json;q=0.9, text/html;q=0.1", None, "json"), ("text/plain", None, "md"),
    (BROWSER, "md", "md"), (BROWSER, "json", "json"), ("application/json", "html", "html"), (None, "HTML", "html"),
    (BROWSER, "xml", "md"), (BROWSER, "", "html"), ("text/html;q=nan, */*", None, "md"), (";;,,/;q=,", None, "md"),
])
def test_form(accept, wanted, form):
    assert help.form_of(accept, wanted) == form


@pytest.mark.parametrize("form, mimetype", [
    ("md", "text/markdown"), ("html", "text/html"), ("json", "application/json")])
def test_mimetype(form, mimetype):
    assert help.render(configured(), [], BASE, form)[1] == mimetype


# ---- what it says

def test_head_of_the_page():
    text = page(description="GLM-5.3 Flash (EXL3 4 bpw) on vLLM, tensor-split across four DGX Sparks.",
                models=[model(aliases=["claude-*", "gpt-*"])])
    assert text.split("## Connecting")[0] == """\
# sparks-gateway: glm-5.3-flash

OpenAI-compatible access to one local model, for agents and harnesses.
This page is machine readable: request it with `Accept: application/json`
or `?format=json` for a structured version. It contains no secrets; replace
`$SPARKS_API_KEY` with your own per-person key.

- Base URL: `https://sparks.example.net/v1`
- Model status right now: `glm-5.3-flash` is loaded and serving
- Model id (the only one): `glm-5.3-flash`
- Other names of `glm-5.3-flash`: `claude-*`, `gpt-*`
- Under the hood: GLM-5.3 Flash (EXL3 4 bpw) on vLLM, tensor-split across four DGX Sparks.
- Context 850,000 tokens, 8 requests run at once (shared between
  everyone). Full context is allowed; one huge request can slow everyone
  down, so be a good neighbour.
- Privacy: prompts and completions are never stored. Per-key request counts,
  status, latency, and token counts are.

"""


def test_chapters():
    assert re.findall("^## (.*)", page(), re.M) == [
        "Connecting", "Auth", "Reasoning", "Examples", "Errors", "Harnesses", "Agent notes"]
    assert "\n\n\n" not in page()


@pytest.mark.parametrize("loaded, sentence", [
    (True, "`glm-5.3-flash` is loaded and serving"), (False, "`glm-5.3-flash` is not loaded right now")])
def test_status(loaded, sentence):
    text = page(models=[model(loaded=loaded)])
    assert f"- Model status right now: {sentence}\n" in text
    assert ("is loaded and serving" in text) is loaded
    assert data(models=[model(loaded=loaded)])["models"][0]["loaded"] is loaded


@pytest.mark.parametrize("form", help.FORMS)
def test_no_model_yet(form):
    text = page(form, models=[])
    assert "is loaded and serving" not in text and "MODEL-ID" in text
    if form == "json":
        assert [json.loads(text)[key] for key in ("models", "model", "reasoning")] == [[], None, None]
    else:
        assert "no model is known yet: the engine hasn" in text


def test_several_models():
    models = [model(id="a", default=False, context=None), model(id="b", effort="none", context=4096, loaded=False)]
    text = page(models=models)
    assert "# sparks-gateway: b\n" in text and "access to local models," in text
    assert "`a` is loaded and serving; `b` is not loaded right now\n" in text
    assert "- Model ids: `a`, `b` (the default)\n" in text
    assert "- Context 4,096 tokens (`b`), 8 requests run at once" in text
    assert re.findall("^### (.*)", text, re.M) == ["`a`", "`b`"]
    assert list(json.loads(data(models=models)["harnesses"]["opencode"])["provider"]["sparks"]["models"]) == ["a", "b"]


def test_an_embedding_model():
    """It has no chapter on reasoning, stands in no harness, and answers no example."""
    models = [model(), model(id="minilm", purpose="embedding", default=False, context=512, effort="qwen")]
    text = page(models=models)
    assert "- Model ids: `glm-5.3-flash` (the default), `minilm` (embeddings)\n" in text
    assert not re.findall("^### (.*)", text, re.M) and "minilm" not in text.split("## Auth")[1]
    found = data(models=models)
    assert [(entry["kind"], bool(entry["reasoning"])) for entry in found["models"]] == [("chat", True), ("embedding", False)]
    assert data(models=models[::-1])["model"] == "glm-5.3-flash"
    alone = data(models=[models[1]])
    assert (alone["model"], alone["reasoning"]) == (None, None) and "MODEL-ID" in page(models=[models[1]])


@pytest.mark.parametrize("hosts, words", [
    ("public", "or with the `http` address of a public image (PNG, JPEG, GIF or WebP, up to 20 MB, at most 16 per request)"),
    ("public, a.lan:90", "address of a public image (PNG"), ("a.lan:90", "address of an image at a host that the operator names (PNG"),
    ("off", "an image's `http` address is refused."),
])
def test_images_by_address(hosts, words):
    assert words in " ".join(page(image_urls=hosts).split()) and "a.lan" not in page("json", image_urls=hosts)
    assert (data(image_urls=hosts)["images"] is None) is (hosts == "off")


def test_what_is_missing_is_not_there():
    there = [route.path.removeprefix("/v1/") for route in ROUTES]
    assert not any(name in path for name in NOT_SUPPORTED for path in there)


def test_models_that_think_alike_share_a_chapter():
    text = page(models=[model(id="a"), model(id="b", default=False), model(id="c", default=False, effort="qwen")])
    assert re.findall("^### (.*)", text, re.M) == ["`a` and `b`", "`c`"]


def test_without_a_known_context_none_is_named():
    text = page(models=[model(context=None)])
    assert "- 8 requests run at once" in text and "contextWindow" not in text and "850" not in text


def test_slots_of_several_engines():
    engines = [SimpleNamespace(slots=n, serves=n > 1, url=str(n)) for n in (1, 2, 4)]
    assert "- 6 requests run at once" in page(models=[model(context=None, places={engine.url: engine for engine in engines})], max_active="3")


def test_slots():
    assert "- 1 request runs at once" in page(models=[model(context=None)], max_active="1")
    text = page(max_active="12")
    assert "12 requests run at once" in text and "more than 12 streams are active" in text


def test_optional_lines():
    assert "Under the hood" not in page() and "ask the operator;" in page()
    assert "ask Ada (ada@example.net);" in page(operator="Ada (ada@example.net)")


@pytest.mark.parametrize("base_url", [BASE, BASE + "/", BASE + "/v1", BASE + "/v1/", BASE + "/v1/v1"])
@pytest.mark.parametrize("form", help.FORMS)
def test_base_url_has_one_v1(form, base_url):
    assert page(form, base_url=base_url) == page(form)
    assert "/v1/v1" not in page(form) and BASE + "/v1" in page(form)


@pytest.mark.parametrize("form", help.FORMS)
def test_every_route_is_named(form):
    text = page(form)
    for route in ROUTES:
        assert f"{route.method} {BASE if route.keyed else ''}{route.path}" in text or form == "json"
        assert route.path in text
    assert [(e["method"], e["path"], e["url"]) for e in data()["endpoints"]] == [
        (r.method, r.path, BASE + r.path) for r in ROUTES]
    assert f"Not supported: {', '.join(NOT_SUPPORTED)}." in page()


def test_limits():
    assert "Body over 100 MB;" in page() and "up to 100 MB:" in page()
    assert "Body over 1.5 MB;" in page(max_body="1.5 MB")
    assert "comes every 2.5 s;" in page(keepalive="2.5")
    assert data(max_active="3", max_body="1 MB", keepalive="2", stall_timeout="3", answer_timeout="4")["limits"] == {
        "active_requests": 3, "body_bytes": 1 << 20, "keepalive_seconds": 2, "stall_seconds": 3, "answer_seconds": 4}


SENTENCES = [
    "one huge request can slow everyone down, so be a good neighbour.",
    "Unknown paths and unknown models return OpenAI-shaped `404` errors.",
    "Send your key on every `/v1` request, as a bearer token (preferred) or an `x-api-key` header",
    "Keys look like `sk-sparks-<random>`, are per person, and can be revoked.",
    "there is no signup.",
    "A missing or revoked key gives `401` with code `invalid_api_key`.",
    '`reasoning: {"effort": "high"}` works too',
    '"stream_options": {"include_usage": true}` and the final chunk carries `usage`',
    "ending with `data: [DONE]`",
    "Tools use the normal OpenAI `tools` / `tool_choice` fields, streaming or not",
    "Images use OpenAI `image_url` content parts with a base64 data URL",
    'All errors are `{"error": {"message", "type", "code", "param"}}` in OpenAI shape.',
    "`error code: 1010`",
    "`base URL = https://sparks.example.net/v1`, `api key = $SPARKS_API_KEY`, `model = glm-5.3-flash`",
    "`pi --provider sparks --model glm-5.3-flash`",
    "Harnesses that speak none of these need an",
    "Check `GET /v1/models` before a long run",
    'Prefer `reasoning_effort: "none"` for quick tool turns',
    "Back off on `503` instead of retrying in a tight loop.",
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentences_of_the_specification(sentence):
    assert sentence in " ".join(page().split())


# ---- errors

def kinds():
    return [kind for kind in vars(errors).values()
            if isinstance(kind, type) and issubclass(kind, errors.Refusal) and kind is not errors.Refusal]


def test_errors_are_those_of_the_code():
    assert sorted((e["status"], e["code"]) for e in data()["errors"]) == sorted((k.status, k.code) for k in kinds())
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \| \S.* \|$", page(), re.M)
    assert [(int(status), code) for status, code in rows] == [(e["status"], e["code"]) for e in data()["errors"]]


def test_errors_hold_those_of_the_specification():
    assert {(400, "invalid_request"), (401, "invalid_api_key"), (403, "forbidden"), (404, "model_not_found"),
            (404, "not_found"), (413, "request_too_large"), (503, "model_unavailable")} <= {
        (e["status"], e["code"]) for e in data()["errors"]}


# ---- reasoning

def chapter(text, title="Reasoning"):
    return " ".join(text.split(f"## {title}\n")[1].split("\n## ")[0].split())


@pytest.mark.parametrize("effort", reasoning.TABLES)
def test_the_table_in_force(effort):
    models = [model(effort=effort)]
    rows = re.findall(r"^\| (`none`.*|`low`.*|`medium`.*|`high`.*|`xhigh`.*) \| (.*) \|$", page(models=models), re.M)
    rows = [(re.findall("`(.*?)`", words), effect) for words, effect in rows]
    assert rows == ([] if effort == "none" else reasoning.rows(reasoning.TABLES[effort]))
    assert data(models=models)["reasoning"]["efforts"] == [
        {"words": words, "effect": effect} for words, effect in reasoning.rows(reasoning.TABLES[effort])]


def test_reasoning_of_glm_as_specified():
    text = chapter(page())
    assert ("Sending a native `chat_template_kwargs` with `enable_thinking` (`false` / `true`) or `reasoning_effort` "
            "(`low` / `high` / `max`) overrides the translation") in text
    assert "Omitting everything keeps the model's own default, which for GLM is thinking on." in text


@pytest.mark.parametrize("effort", reasoning.TABLES)
def test_nothing_is_promised_that_the_table_cannot_do(effort):
    text = page(models=[model(effort=effort)])
    levels, on = reasoning.TABLES[effort].levels, reasoning.TABLES[effort].on
    off = levels["none"].effect == reasoning.OFF
    kwargs = {name for level in levels.values() for name in level.kwargs}
    nothing = all(level.effect == reasoning.UNCHANGED for level in levels.values())
    assert ("Thinking off" in text) == off
    assert ("can't be turned off" in text) == (not off and not nothing)
    assert ('`reasoning_effort: "none"` for quick' in text) == off
    assert ('"reasoning_effort": "none"' in text) == off
    assert ("turns thinking on" in text) == bool(on.kwargs)
    assert ("thinking on." in text) == (effort == "glm" or bool(on.kwargs))
    switches = {"enable_thinking", "thinking"}
    assert {name for name in switches if f"`{name}`" in text} == kwargs & switches
    assert ("native `chat_template_kwargs`" in text) == bool(kwargs)
    assert ("no control of thinking" in text) == nothing
    for control in ("reasoning_effort=", "map onto `reasoning_effort`", "thinkingLevelMap"):
        assert (control in text) == (not nothing)


@pytest.mark.parametrize("field", reasoning.FIELDS)
@pytest.mark.parametrize("form", help.FORMS)
def test_the_fields_of_the_reasoning(field, form):
    text = page(form, models=[model(reasoning_field=field)])
    names = set(re.findall(r"(?:message|delta)\.(reasoning\w*)", text)) | set(
        re.findall(r'\\?(?:"|&quot;)(reasoning\w*)\\?(?:"|&quot;):\\?(?:"|&quot;)19', text))
    assert ("reasoning_content" in text) == (field != "reasoning")
    if form == "json":
        assert json.loads(text)["reasoning"]["fields"] == list(reasoning.FIELDS[field])
    assert names <= set(reasoning.FIELDS[field]) and names
    assert ("`message.reasoning`" in page(models=[model(reasoning_field=field)])) == (field != "reasoning_content")


# ---- the examples are what they claim to be

@pytest.fixture(params=MODELS, ids=NAMES)
def some(request):
    return [request.param] if request.param else []


def test_json_blocks(some):
    blocks = [json.loads(block) for block in fences(page(models=some), "json")]
    assert len(blocks) == 5
    assert blocks[2]["data"][0]["id"] == shown(some)
    provider, = blocks[3]["providers"].values()
    assert provider["baseUrl"] == BASE + "/v1" and provider["models"][0]["id"] == shown(some)
    assert blocks[4]["model"] == "sparks/" + shown(some)


def test_codex_block(some):
    settings, = [tomllib.loads(block) for block in fences(page(models=some), "toml")]
    assert (settings["model"], settings["model_provider"]) == (shown(some), "sparks")
    assert settings["model_providers"]["sparks"] == {
        "name": "Sparks", "base_url": BASE + "/v1", "env_key": "SPARKS_API_KEY", "wire_api": "responses"}
    assert settings.get("model_context_window") == (some[0].context if some else None)


def test_python_block(some):
    for source in fences(page(models=some), "python"):
        strings = compile(source, "example", "exec").co_consts
        assert shown(some) in str(strings) or shown(some) in strings


@pytest.mark.parametrize("example", ["chat", "stream", "tools", "messages"])
def test_curl_blocks(some, example):
    command = data(models=some)["examples"][example]
    words = shlex.split(command)
    assert words[0] == "curl" and words[2] == "$SPARKS_BASE_URL/" + ("messages" if example == "messages" else "chat/completions")
    assert json.loads(words[-1])["model"] == shown(some)
    assert command in page(models=some)


def test_pi_command(some):
    command = data(models=some)["harnesses"]["pi_command"]
    assert shlex.split(command) == ["pi", "--provider", "sparks", "--model", shown(some)]


def test_claude_code(some):
    command = data(models=some)["harnesses"]["claude_code"]
    given = dict(word.split("=", 1) for word in shlex.split(command, comments=True) if "=" in word)
    assert given["ANTHROPIC_BASE_URL"] == BASE and given["ANTHROPIC_MODEL"] == shown(some)
    assert given.get("CLAUDE_CODE_AUTO_COMPACT_WINDOW") == (str(some[0].context) if some and some[0].context else None)


def test_example_stream():
    *events, last = data()["examples"]["events"].splitlines()
    assert last == "data: [DONE]"
    assert [list(json.loads(event.removeprefix("data: "))) for event in events] == [["choices"], ["choices"],
                                                                                   ["choices", "usage"]]


# ---- nothing leaks, nothing breaks out

SECRETS = {"upstream": "http://marked-upstream:9", "upstream_key": "marked-key", "edge_secret": "marked-edge",
           "db": "sqlite:////marked/db", "bind": "127.0.0.1:8123"}


@pytest.mark.parametrize("form", help.FORMS)
def test_no_secrets(form):
    text = page(form, **SECRETS)
    assert "marked" not in text and "8123" not in text and text == page(form)


def test_html_is_well_formed_and_self_contained():
    text = page("html", models=[model(aliases=["claude-*"])])
    read = Reader(text)
    assert text.startswith("<!doctype html>") and '<html lang="en">' in text
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert not {tag for tag, _ in read.tags} & {"script", "img", "iframe", "object", "form"}
    links = {attrs.get("href") for tag, attrs in read.tags if tag in ("a", "link")}
    assert links == {"?format=md", "?format=json", "#connecting", "#auth", "#reasoning", "#examples", "#errors",
                     "#harnesses", "#agent-notes"}
    anchors = {attrs["id"] for tag, attrs in read.tags if "id" in attrs}
    assert {link[1:] for link in links if link.startswith("#")} == anchors
    for route in ROUTES:
        assert route.path in read.text


def hostile(form):
    return page(form, models=[model(id=HOSTILE, aliases=[HOSTILE])], description=HOSTILE, operator=HOSTILE,
                base_url="https://a\"'`$(id)<script>|\n\u2028b/v1")


def test_hostile_values_in_html():
    read = Reader(hostile("html"))
    plain = Reader(page("html", models=[model(aliases=["x"])], description="x"))
    assert [tag for tag, _ in read.tags] == [tag for tag, _ in plain.tags]        # nothing of theirs became a tag
    assert [attrs for tag, attrs in read.tags if tag == "a"] == [attrs for tag, attrs in plain.tags if tag == "a"]
    assert "<script>alert(1)</script>" in read.text


def test_hostile_values_in_markdown():
    text = hostile("md")
    assert re.findall("^#+ .*", text, re.M)[1:] == re.findall("^#+ .*", page(), re.M)[1:]
    assert text.count("\n```") == page().count("\n```")
    assert "- Base URL: `https://a%22%27%60%24(id)%3Cscript%3E%7C%0A%E2%80%A8b/v1`\n" in text
    head = text.split("## Connecting")[0]
    assert "<script>" not in re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)|\\<", "", head)   # outside code spans it is escaped


def test_hostile_values_in_json():
    out = json.loads(hostile("json"))
    assert out["models"][0]["id"] == out["models"][0]["aliases"][0] == shown([model(id=HOSTILE)])


@pytest.mark.parametrize("value, markdown", [
    ("GLM-5.3 (EXL3 4 bpw), 50 tok/s; R&D at a_b.c #1 > 2!", "GLM-5.3 (EXL3 4 bpw), 50 tok/s; R&D at a_b.c \\#1 > 2!"),
    ("*a* _b_ `c` [d](e) <f> &amp; \\", "\\*a\\* \\_b\\_ \\`c\\` \\[d](e) \\<f> \\&amp; \\\\"),
    ("two\nlines\tand  more ", "two lines and more"),
    ("a\u202eb", "a\ufffdb"),
])
def test_plain(value, markdown):
    assert help.prose(value) == markdown
    text = help.MARKDOWN.renderInline(markdown)
    assert Reader(text).text == help.visible(" ".join(value.split())) and Reader(text).tags == []


@pytest.mark.parametrize("value", ["a", "", " ", "`", "``a`", "a`b``c", " a ", "a\nb", "|", "\\", "\\|", "<b>&amp;"])
def test_code(value):
    text = help.MARKDOWN.renderInline(help.code(value))
    assert Reader(text).tags == ([("code", {})])
    assert Reader(text).text.strip() == help.visible(value).strip()


@pytest.mark.parametrize("value", ["a|b", "a\\|b", "|", "`|`"])
def test_code_in_a_table(value):
    read = Reader(help.MARKDOWN.render(f"| a | b |\n|---|---|\n| {help.cell(help.code(value))} | x |"))
    assert [tag for tag, _ in read.tags].count("td") == 2 and f"{value}\nx" in read.text


@pytest.mark.parametrize("number, text", [
    (512, "512 bytes"), (1024, "1 KB"), (1536, "1.5 KB"), (100 << 20, "100 MB"), (3 << 40, "3072 GB")])
def test_bytes_text(number, text):
    assert help.bytes_text(number) == text


# ---- what is kept

ADDRESSES = ["http://a", "https://a.b-c_d.example.:80/v1", "http://[::1]:8080", "http://gateway_1:8080", "http://a~b", "http://_/", "http://v1",
             "https://x.example/a&b=*_c_*", "https://x.example/<a>'\"`"]


SEVERAL = MODELS[:3]


def test_what_is_kept_is_the_page():
    """For each address and form, and after each change."""
    kept = help.Kept()
    for settings, models in ((configured(), []), (configured(), SEVERAL), (configured(max_active="3"), SEVERAL)):
        for form in help.FORMS:
            for address in ADDRESSES:
                assert kept.render(settings, models, address, form) == help.render(settings, models, address, form), (form, address)


def test_the_page_is_rendered_once_for_each_state(monkeypatch):
    kept, rendered, render = help.Kept(), [], help.render
    monkeypatch.setattr(help, "render", lambda *arguments: rendered.append(arguments) or render(*arguments))
    for number in range(50):
        for form in help.FORMS:
            kept.render(configured(), list(SEVERAL), f"http://{number}", form)
    assert len(rendered) == len(help.FORMS)


def test_many_models():
    """The page tells of the first ones, and where the others are."""
    many = [model(id=f"model-{number}") for number in range(1000)]
    found = data(models=many)
    assert [one["id"] for one in found["models"]] == [f"model-{number}" for number in range(help.MOST_MODELS)]
    assert "all 1000 models" in found["notes"][-1] and "all 1000 models" in page(models=many)


def test_an_endless_accept_header_costs_no_more_than_a_long_one():
    assert help.form_of("text/html," + ",".join(f"a/b{n};q=0.1" for n in range(100_000))) == "html"
