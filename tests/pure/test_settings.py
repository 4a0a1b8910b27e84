"""Settings: the example file against the code, and the ways to set things, right and wrong."""
import re
import tomllib

import pytest

import reasoning
import settings
from errors import SettingsError
from settings import ENGINE_KEYS, MODEL_KEYS, SETTINGS, EngineEntry

EXAMPLE = settings.HOME / "sparks.example.toml"
MARK = re.compile(r"^#(?=[a-z_]+ = |\[)", re.M)      # a setting that is commented out; prose has a space after the mark


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """No sparks.toml of the machine's owner gets in the way."""
    monkeypatch.setattr(settings, "HOME", tmp_path)
    return tmp_path


def load(text="", **variables):
    """Settings from the text of a sparks.toml and variables without their SPARKS_; warnings fail."""
    (settings.HOME / "sparks.toml").write_text(text, encoding="utf-8")
    return settings.load({"SPARKS_" + name.upper(): value for name, value in variables.items()}, warn=pytest.fail)


def refusal(text="", **variables):
    with pytest.raises(SettingsError) as caught:
        load(text, **variables)
    return str(caught.value)


# ---- the example file

def example(uncommented=True):
    text = EXAMPLE.read_text(encoding="utf-8")
    return tomllib.loads(MARK.sub("", text) if uncommented else text)


def test_example_sets_nothing_by_itself():
    assert example(uncommented=False) == {}


def test_example_has_every_setting_in_order_with_its_default():
    table = example()
    models, engines = table.pop("models"), table.pop("engines")
    assert [list(engine) for engine in engines] == [list(ENGINE_KEYS)]
    assert list(table.items()) == [(s.name, "" if s.default is None else s.default) for s in SETTINGS]
    assert [(name, list(model)) for name, model in models.items()] == [("glm-5.3-flash", list(MODEL_KEYS))]


def test_example_uncommented_is_the_same_as_no_file():
    text = re.sub("^upstream = .*", "", MARK.sub("", EXAMPLE.read_text(encoding="utf-8")), flags=re.M)     # one or the other
    with_file = vars(load(text))
    model, = with_file.pop("models")
    assert (with_file.pop("engines"), with_file.pop("upstream")) == ([EngineEntry("http://10.0.0.1:8000", slots=8)], ["http://10.0.0.1:8000"])
    without = vars(load())
    assert without.pop("models") == []
    assert (without.pop("engines"), without.pop("upstream")) == ([EngineEntry("http://127.0.0.1:8000")], ["http://127.0.0.1:8000"])
    assert with_file == without
    assert vars(model) == {
        "id": "glm-5.3-flash", "engine": "GLM-5.3-Flash-EXL3", "aliases": ["glm", "claude-*", "gpt-*"], "default": True,
        "effort": "glm", "reasoning_field": "both", "context": 850000, "kind": "chat", "hidden": False, "system": "You are a helpful assistant.",
        "sampling": {"temperature": 1.0, "top_p": 0.95}}


def test_example_explains_every_setting():
    text = EXAMPLE.read_text(encoding="utf-8")
    for name in [s.name for s in SETTINGS] + list(MODEL_KEYS) + list(ENGINE_KEYS):
        assert re.search(rf"^# .*\n#{name} = ", text, re.M), f"no comment above {name}"
    for setting in SETTINGS:
        assert setting.variable in text or setting.name == "upstream_key"


def test_example_says_what_each_effort_table_does(subtests):
    for name in reasoning.TABLES:
        with subtests.test(name):
            about = re.escape(reasoning.TABLES[name].about)
            assert re.search(rf'^#   "{name}" +{about}', EXAMPLE.read_text(encoding="utf-8"), re.M)


# ---- defaults and precedence

def test_defaults(home):
    assert vars(load()) == {
        "upstream": ["http://127.0.0.1:8000"], "upstream_key": None, "scheduling": "fcfs", "model": None, "stand_in_for": ["claude-*", "gpt-*"], "bind": "127.0.0.1:8080",
        "db": home / "sparks.db", "base_url": None, "description": None, "operator": None, "edge_secret": None, "cors_origins": [],
        "max_active": 8, "max_queued": 64, "heavy_prompt": 8000, "heavy_at_once": 1, "kv_tokens": None, "queue_timeout": 600, "keep_days": 90, "drain": 30, "loop_warn": 0.1, "log": "logfmt", "keepalive": 15, "keepalive_form": "comment", "stall_timeout": 300, "answer_timeout": 1800, "poll": 5,
            "stuck_after": 60, "on_stuck": None, "on_stuck_pause": 600,
        "reasoning_field": "both", "max_body": 100 << 20, "max_bodies": 1 << 30, "image_urls": ["public"], "max_images": 16, "max_image": 20 << 20, "image_timeout": 10,
        "models": [], "engines": [EngineEntry("http://127.0.0.1:8000")]}


def test_variables_win_over_the_file():
    assert load("max_active = 3").max_active == 3
    assert load("max_active = 3", max_active="4").max_active == 4


@pytest.mark.parametrize("empty", ["", " "])
def test_empty_counts_as_not_set(empty):
    assert load("max_active = 3", max_active=empty).max_active == 3
    assert load('operator = ""', operator=empty).operator is None
    assert load(upstream=empty).upstream == ["http://127.0.0.1:8000"]


def test_config_names_another_file(tmp_path):
    path = tmp_path / "other.toml"
    path.write_text("poll = 0.5")
    assert settings.load({"SPARKS_CONFIG": str(path)}, warn=pytest.fail).poll == 0.5


def test_config_that_is_missing(tmp_path):
    assert refusal(config=str(tmp_path / "none.toml")) == f"SPARKS_CONFIG: there is no file {tmp_path / 'none.toml'}"


def test_unknown_variables_only_warn_and_a_clients_are_silent():
    lines = []
    settings.load({"SPARKS_MAX_ACTIV": "1", "SPARKS_API_KEY": "sk-sparks-x", "PATH": "/bin"}, warn=lines.append)
    assert lines == [
        "warning: SPARKS_MAX_ACTIV is no setting of Sparks and is ignored; sparks.example.toml lists them all"]


# ---- values

VALUES = [
    ("upstream", "http://a:1, http://b:2/v1 ,", ["http://a:1", "http://b:2"]),
    ("upstream", "http://a:1, http://b, http://a:1/v1/", ["http://a:1", "http://b"]),
    ("upstream", "https://engine/v1/", ["https://engine"]),
    ("upstream", "http://A:80, HTTP://a, http://a:/, http://a//v1//, https://A:443", ["http://a", "https://a"]),   # one place, however it is written
    ("upstream", "http://[::1]:8000/", ["http://[::1]:8000"]),
    ("upstream", "http://host/prefix/v1", ["http://host/prefix"]),
    ("upstream_key", " key ", "key"),
    ("model", " GLM 5 ", "GLM 5"),
    ("bind", "0.0.0.0:80", "0.0.0.0:80"),
    ("bind", "[::]:8080", "[::]:8080"),
    ("base_url", "https://sparks.example.net/v1", "https://sparks.example.net"),
    ("base_url", "https://sparks.example.net/", "https://sparks.example.net"),
    ("max_active", "1", 1),
    ("max_active", "100000", 100000),
    ("keepalive", "0.1", 0.1),
    ("stall_timeout", "86400", 86400),
    ("reasoning_field", "reasoning", "reasoning"),
    ("keepalive_form", "chunk", "chunk"),
    ("reasoning_field", "reasoning_content", "reasoning_content"),
    ("max_body", "1", 1),
    ("max_body", "512 B", 512),
    ("max_body", "1.5kb", 1536),
    ("max_body", " 3 MB ", 3 << 20),
    ("max_body", "1GB", 1 << 30),
    ("image_urls", "off", []),
    ("image_urls", "Public, pictures.lan,10.0.0.5:9000 , [::1]:80", ["public", "pictures.lan", "10.0.0.5:9000", "[::1]:80"]),
    ("cors_origins", " * ", ["*"]),
    ("cors_origins", "https://App.example.net/, http://localhost:3000,null , https://a:443, http://b:80, http://c:443, http://[::1]:5173",
     ["https://app.example.net", "http://localhost:3000", "null", "https://a", "http://b", "http://c:443", "http://[::1]:5173"]),
    ("cors_origins", "https://a:0443, http://[0:0:0:0:0:0:0:1]:080, http://b:08080", ["https://a", "http://[::1]", "http://b:8080"]),
    ("cors_origins", "chrome-extension://abcdef, app://obsidian.md", ["chrome-extension://abcdef", "app://obsidian.md"]),
    ("max_images", "0", 0),
    ("max_image", "5 MB", 5 << 20),
]


def test_values(subtests):
    for name, text, value in VALUES:
        with subtests.test(name, text=text):
            assert getattr(load(**{name: text}), name) == value


def test_values_of_the_file_may_have_their_own_types():
    values = load('upstream = ["http://a:1", "http://b:2/v1"]\nmax_body = 1024\nkeepalive = 0.5\nmax_active = 2')
    assert (values.upstream, values.max_body, values.keepalive, values.max_active) == (
        ["http://a:1", "http://b:2"], 1024, 0.5, 2)


def test_database_beside_run_sh_or_absolute(home):
    assert load(db="sqlite:///data/s.db").db == home / "data/s.db"
    assert str(load(db="sqlite:////var/lib/s.db").db) == "/var/lib/s.db"


ADDRESS = "must be an address such as http://127.0.0.1:8000"
ACTIVE = "must be a whole number from 1 to 100000"
ORIGINS = 'must be "*", or origins such as "https://app.example.net"'
HOSTS = 'must be "public", "off", or hosts such as "public, pictures.lan, 10.0.0.5:9000"'


OUT_OF_RANGE = [
    ("upstream", "127.0.0.1:8000", ADDRESS),
    ("upstream", "ftp://a", ADDRESS),
    ("upstream", "http://", ADDRESS),
    ("upstream", "http://a:99999", ADDRESS),
    ("upstream", "http://a:b", ADDRESS),
    ("upstream", "http://a?x=1", ADDRESS),
    ("upstream", "http://a/v1#x", ADDRESS),
    ("upstream", "http://a..b:8000", ADDRESS),
    ("upstream", f"http://{'a' * 70}:8000", ADDRESS),
    ("upstream", "http://me:secret@a", ADDRESS),
    ("upstream", "http://a, b", ADDRESS),
    ("base_url", "sparks.example.net", ADDRESS),
    ("upstream_key", "two words", "must be printable ASCII without spaces"),
    ("edge_secret", "schlüssel", "must be printable ASCII without spaces"),
    ("bind", "8080", "must be HOST:PORT, such as 127.0.0.1:8080"),
    ("bind", "127.0.0.1:0", "must be HOST:PORT, such as 127.0.0.1:8080"),
    ("bind", "::1:8080", "must be HOST:PORT, such as 127.0.0.1:8080"),
    ("bind", "127.0.0.1:65536", "must be HOST:PORT, such as 127.0.0.1:8080"),
    ("db", "sparks.db", "must be sqlite:///FILE (beside run.sh) or sqlite:////absolute/FILE"),
    ("db", "sqlite:///:memory:", "must be sqlite:///FILE (beside run.sh) or sqlite:////absolute/FILE"),
    ("db", "sqlite:///", "must be sqlite:///FILE (beside run.sh) or sqlite:////absolute/FILE"),
    ("max_active", "0", ACTIVE),
    ("max_active", "100001", ACTIVE),
    ("max_active", "1.5", ACTIVE),
    ("max_active", "many", ACTIVE),
    ("keepalive", "0", "must be seconds from 0.1 to 3600"),
    ("keepalive", "nan", "must be seconds from 0.1 to 3600"),
    ("keepalive", "3601", "must be seconds from 0.1 to 3600"),
    ("stall_timeout", "-1", "must be seconds from 0.1 to 86400"),
    ("stuck_after", "0.1", "must be seconds from 0.2 to 86400"),
    ("on_stuck_pause", "never", "must be seconds from 0 to 86400"),
    ("answer_timeout", "inf", "must be seconds from 0.1 to 86400"),
    ("poll", "5s", "must be seconds from 0.05 to 3600"),
    ("keepalive_form", "ping", "must be one of comment, chunk"),
    ("reasoning_field", "thoughts", "must be one of both, reasoning, reasoning_content"),
    ("max_body", "0", 'must be a size such as "100 MB"'),
    ("max_body", "-1 MB", 'must be a size such as "100 MB"'),
    ("max_body", "1 TB", 'must be a size such as "100 MB"'),
    ("max_bodies", "plenty", 'must be a size such as "100 MB"'),
    ("image_urls", ",", HOSTS), ("image_urls", "http://pictures.lan", HOSTS), ("image_urls", "a b", HOSTS),
    *(("cors_origins", f"https://fine.net, {text}", f"{ORIGINS}; {text!r} is none") for text in (
        "app.example.net", "https://a/path", "https://a//", "https://*.example.net", "https://a b", "https://me@a", "https://a?b", "https://", "*.net",
        "http://a:0", "http://a:65536", "http://a:", "http://[::1", "http://[:::]", "http://[fe80::1%25lo]", "https://\u00e4.net", "file://", "all")),
    ("image_urls", "*", HOSTS), ("image_urls", "a:port", HOSTS), ("image_urls", "off, a/b", HOSTS),
]


def test_out_of_range(subtests):
    for name, text, message in OUT_OF_RANGE:
        with subtests.test(name, text=text):
            assert refusal(**{name: text}) == f"SPARKS_{name.upper()} {message}"
            assert refusal(f"{name} = '{text}'") == f"sparks.toml: {name} {message}"


TABLE = "must be a table such as { temperature = 0.6 }, with " + ", ".join(settings.SAMPLING)


WRONG_FILES = [
    ("max_activ = 1", "sparks.toml: there is no setting 'max_activ'; sparks.example.toml lists them all"),
    ("[poll]\nx = 1", "sparks.toml: poll must be seconds from 0.05 to 3600"),
    ('db = "sqlite:///a\\u0000b"', "sparks.toml: db must be sqlite:///FILE (beside run.sh) or sqlite:////absolute/FILE"),
    ("max_active = true", f"sparks.toml: max_active {ACTIVE}"),
    ("max_active = 2.0", f"sparks.toml: max_active {ACTIVE}"),
    ("max_active = [1]", f"sparks.toml: max_active {ACTIVE}"),
    ("keepalive = true", "sparks.toml: keepalive must be seconds from 0.1 to 3600"),
    ("max_body = true", 'sparks.toml: max_body must be a size such as "100 MB"'),
    ("operator = 5", "sparks.toml: operator must be a text"),
    ("upstream = 8000", "sparks.toml: upstream must be a text"),
    ("reasoning_field = ['both']", "sparks.toml: reasoning_field must be one of both, reasoning, reasoning_content"),
    ("models = 1", 'sparks.toml: models must hold tables such as [models."glm-5.3-flash"]'),
    ("[models]\nglm = 1", 'sparks.toml: models must hold tables such as [models."glm-5.3-flash"]'),
    ("[models.glm]\nname = 'x'", 'sparks.toml: models."glm".name is unknown; there are ' + ", ".join(MODEL_KEYS)),
    ("[models.glm]\ncontext = 0", f'sparks.toml: models."glm".context must be a whole number from 1 to {1 << 40}'),
    ("[models.glm]\neffort = 'x'", 'sparks.toml: models."glm".effort must be one of ' + ", ".join(reasoning.TABLES)),
    ("[models.glm]\naliases = 'glm-*'", 'sparks.toml: models."glm".aliases must be a list of names'),
    ("[models.glm]\naliases = ['']", 'sparks.toml: models."glm".aliases must be a list of names'),
    ("[models.glm]\ndefault = 1", 'sparks.toml: models."glm".default must be true or false'),
    ("[models.glm]\nhidden = 'no'", 'sparks.toml: models."glm".hidden must be true or false'),
    ("[models.glm]\nkind = 'image'", 'sparks.toml: models."glm".kind must be one of chat, embedding'),
    ("[models.glm]\nsystem = 5", 'sparks.toml: models."glm".system must be a text'),
    ("[models.glm]\nsampling = 5", f'sparks.toml: models."glm".sampling {TABLE}'),
    ("[models.glm]\nsampling = { temp = 5 }", f'sparks.toml: models."glm".sampling {TABLE}'),
    ("[models.glm]\nsampling = { top_p = 2 }", 'sparks.toml: models."glm".sampling top_p must be a number from 0 to 1'),
    ("[models.glm]\nsampling = { top_p = '1' }", 'sparks.toml: models."glm".sampling top_p must be a number from 0 to 1'),
    ("[models.glm]\nsampling = { max_tokens = 0 }",
     f'sparks.toml: models."glm".sampling max_tokens must be a whole number from 1 to {1 << 40}'),
    ("cors_origins = ['https://a', 1]", f"sparks.toml: cors_origins {ORIGINS}; 1 is none"), ("cors_origins = true", f"sparks.toml: cors_origins {ORIGINS}"),
    ("image_urls = [1]", f"sparks.toml: image_urls {HOSTS}"),
    ("[models.a]\ndefault = true\n[models.b]\ndefault = true", "sparks.toml: only one model can be the default"),
    *((f"[[engines]]\nurl = 'http://a'\n[[engines]]\n{text}", f"sparks.toml: engines, number 2: {message}") for text, message in (
        ("slots = 1", "it needs a url"), ("url = ''", "it needs a url"), ("url = 'a'", f"url {ADDRESS}"), ("url = 5", "url must be a text"),
        ("name = 'x'", "name is unknown; there are " + ", ".join(ENGINE_KEYS)), ("slots = 0", f"slots {ACTIVE}"),
        ("slots = 1.5", f"slots {ACTIVE}"), ("weight = 0", "weight must be a number from 0.01 to 100"),
        ("weight = -1", "weight must be a number from 0.01 to 100"), ("weight = '2'", "weight must be a number from 0.01 to 100"),
        ("weight = nan", "weight must be a number from 0.01 to 100"), ("drain = 1", "drain must be true or false"),
        ("scheduling = 'lifo'", "scheduling must be one of fcfs, priority"),
        ("key = 'two words'", "key must be printable ASCII without spaces"))),
    *((text, "sparks.toml: engines must be tables, each below a line [[engines]]") for text in (
        "engines = 1", "engines = ['http://a']", "[engines]\nurl = 'http://a'", "engines = ''")),
    ("[[engines]]\nurl = 'http://a:1/v1'\n[[engines]]\nurl = 'http://A:1'", "sparks.toml: two engines have one url, http://a:1"),
    ("upstream = 'http://a'\n[[engines]]\nurl = 'http://b'", "sparks.toml: upstream is the short form of [[engines]]; take one away"),
    ('[models.""]', "sparks.toml: a model needs a name"), ('[models." "]', "sparks.toml: a model needs a name"),
]


def test_wrong_files(subtests):
    for text, message in WRONG_FILES:
        with subtests.test(text):
            assert refusal(text) == message


def test_a_file_that_is_no_toml():
    message = refusal("max_active = ")
    assert message.startswith("sparks.toml cannot be read: ") and "\n" not in message


def test_a_file_in_another_encoding(home):
    (home / "sparks.toml").write_bytes("operator = 'Jürgen'".encode("latin-1"))
    with pytest.raises(SettingsError, match=r"^sparks\.toml cannot be read: .*"):
        settings.load({}, warn=pytest.fail)


# ---- engines

ENGINES = """
upstream_key = "shared"
[[engines]]
url = "http://a:1/v1"
[[engines]]
url = "http://b"
key = "own"
slots = 3
weight = 2.5
drain = true
scheduling = "priority"
"""


def test_engines_of_the_file():
    values = load(ENGINES)
    assert values.engines == [EngineEntry("http://a:1"), EngineEntry("http://b", "own", 3, 2.5, True, "priority")]
    assert (values.upstream, values.upstream_key) == (["http://a:1", "http://b"], "shared")
    assert load("engines = []").engines == [EngineEntry("http://127.0.0.1:8000")]


def test_the_short_form_of_engines():
    for values in (load("upstream = 'http://c, http://d'"), load(ENGINES, upstream="http://c, http://d")):
        assert values.engines == [EngineEntry("http://c"), EngineEntry("http://d")] and values.upstream == ["http://c", "http://d"]


def test_what_may_change_while_it_runs():
    values = load(ENGINES)
    assert values.update_from(load("upstream = 'http://c'\nbind = '127.0.0.1:1'\nmax_active = 2")) == ["bind"]
    assert (values.engines, values.upstream_key, values.max_active) == ([EngineEntry("http://c")], None, 2)
    assert values.bind == "127.0.0.1:8080"


# ---- models

def test_models_of_the_file():
    first, second = load('[models."glm-5.3-flash"]\nengine = "GLM"\ndefault = true\n'
                         '[models.tiny]\neffort = "none"').models
    assert first == settings.ModelEntry("glm-5.3-flash", engine="GLM", default=True)
    assert second == settings.ModelEntry("tiny", effort="none")


def test_model_names():
    def known(name):
        return any(settings.matches(name, pattern) for pattern in ("glm-5.3-flash", "claude-*", "GLM"))

    names = ["glm-5.3-flash", "GLM-5.3-Flash", "claude-sonnet-4-5", "Claude-X", "glm", "claude", "glm-5", "my-claude-x", ""]
    assert [name for name in names if known(name)] == names[:5]


def test_only_the_star_is_special_in_an_alias():
    assert settings.matches("claude-x[1m]?", "claude-*[1m]?") and not settings.matches("claude-x1", "claude-x[1m]")
