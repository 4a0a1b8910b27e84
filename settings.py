"""Settings: `SPARKS_*` variables over `sparks.toml` over defaults.

`sparks.example.toml` is their manual.
"""

import os
import re
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import reasoning
from errors import SettingsError

HOME = Path(__file__).resolve().parent
# What keeps a silent stream alive: comment lines, or empty chunks.
KEEPALIVE_FORMS = ("comment", "chunk")
# What an engine goes by among the requests that it has: when they came, or their priority first.
POLICIES = ("fcfs", "priority")
UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
HOST = re.compile(r"(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:\d{1,5})?")  # [IPv6], IPv4 or a name; a port
# A scheme may be an app's or a browser extension's; a page from a file has the origin "null".
ORIGIN = re.compile(
    r"\*|null|(?P<scheme>[a-z][a-z0-9+.-]*)://"
    r"(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>\d{1,5}))?",
    re.ASCII,
)
ORIGINS = 'must be "*", or origins such as "https://app.example.net"'
USUAL_PORTS = {"http": 80, "https": 443}


# ---- readers: a variable's text or a TOML value -> the setting's value
#
# They raise ValueError with what it should be: "must be ...".


def read_text(value):
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value.strip()


def read_flag(value):
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def one_of(*words):
    def read(value):
        if isinstance(value, str):
            value = value.strip()
        if value not in words:
            raise ValueError("must be one of " + ", ".join(words))
        return value

    return read


def whole_number(least, most):
    """A reader of whole numbers within these bounds, which may come as text."""

    def read(value):
        number = None
        if not isinstance(value, (bool, float)):
            with suppress(TypeError, ValueError):
                number = int(value)
        if number is None or not least <= number <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return number

    return read


def seconds(least, most):
    """A reader of seconds within these bounds, fractions allowed, which may come as text."""

    def read(value):
        number = None
        if not isinstance(value, bool):
            with suppress(TypeError, ValueError):
                number = float(value)
        if number is None or not least <= number <= most:
            raise ValueError(f"must be seconds from {least} to {most}")
        return number

    return read


def number_within(least, most):
    """A reader of TOML's numbers, not of text, within these bounds."""

    def read(value):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise ValueError(f"must be a number from {least} to {most}")
        return value

    return read


def read_size(value):
    """Bytes, of a text such as "1.5 GB" or a whole number."""
    number = 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)?", str(value).strip().upper())
    if match and not isinstance(value, bool):
        number = int(float(match[1]) * UNITS[match[2] or ""])
    if number < 1:
        raise ValueError('must be a size such as "100 MB"')
    return number


def read_url(value):
    """An http(s) address, without the /v1 at its end, and written as any other of the same place
    (RFC 3986, 6.2.3)."""
    text = read_text(value)
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        (parts.hostname or "").encode("idna")  # as a look-up of the name would do
    except ValueError:
        good = False
    more = good and (parts.query or parts.fragment or parts.username)
    if not good or more or re.search(r"[\s\x00-\x1f\x7f]", text):
        raise ValueError("must be an address such as http://127.0.0.1:8000")
    usual = f":{USUAL_PORTS[parts.scheme]}"
    host = parts.netloc.lower().removesuffix(usual).removesuffix(":")
    return f"{parts.scheme}://{host}" + re.sub(r"/+(v1/*)?$", "", parts.path)


def read_urls(value):
    """Several of them, with commas or as a list."""
    parts = value
    if not isinstance(value, list):
        parts = read_text(value).split(",")
    found = [read_url(part) for part in parts if not isinstance(part, str) or part.strip()]
    if not found:
        raise ValueError("must hold an address such as http://127.0.0.1:8000")
    return list(dict.fromkeys(found))


def read_hosts(value):
    """ "public" and names of hosts, with commas or as a list. Empty: "off"."""
    parts = value
    if not isinstance(value, list):
        parts = [part for part in read_text(value).split(",") if part.strip()]
    found = [part.strip().lower() for part in parts if isinstance(part, str) and part.strip()]
    if not found or len(found) < len(parts) or not all(map(HOST.fullmatch, found)):
        raise ValueError(
            'must be "public", "off", or hosts such as "public, pictures.lan, 10.0.0.5:9000"'
        )
    if found == ["off"]:
        return []
    return found


def read_origins(value):
    """Origins of web pages (RFC 6454), with commas or as a list; "*" is any."""
    parts = value
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(parts, list):
        raise ValueError(ORIGINS)
    return [read_origin(part) for part in parts if part != ""]


def read_origin(value):
    """An origin as browsers write it; "*" and "null" as they are."""
    text = ""
    if isinstance(value, str):
        text = value.strip().lower().removesuffix("/")
    found = ORIGIN.fullmatch(text)
    if not found or int(found["port"] or 1) not in range(1, 65536):
        raise ValueError(f"{ORIGINS}; {value!r:.99} is none")
    if text in ("*", "null"):
        return text
    scheme = found["scheme"]
    host = found["host"]
    if host[0] == "[":
        host = in_brackets(host, value)
    port = found["port"]
    if not port or int(port) == USUAL_PORTS.get(scheme):
        return f"{scheme}://{host}"
    return f"{scheme}://{host}:{int(port)}"


def in_brackets(host, value):
    """An IPv6 address in its shortest form."""
    try:
        return f"[{IPv6Address(host[1:-1])}]"
    except ValueError:
        raise ValueError(f"{ORIGINS}; {value!r:.99} is none") from None


def read_bind(value):
    text = read_text(value)
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/]+):(\d{1,5})", text)
    if not match or not 0 < int(match[2]) < 65536:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:8080")
    return text


def read_database(value):
    """The path of a file, of sqlite:///FILE. Not :memory:, since the ledger has to last."""
    match = re.fullmatch(r"sqlite:///(?!:memory:)([^\0\n]+)", read_text(value))
    if not match:
        raise ValueError("must be sqlite:///FILE (beside run.sh) or sqlite:////absolute/FILE")
    return HOME / Path(match[1]).expanduser()


def read_secret(value):
    text = read_text(value)
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise ValueError("must be printable ASCII without spaces")
    return text


def read_list(value):
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("must be a list of names")
    return value


def read_names(value):
    """Names with commas, or a list of them."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return read_list(value)


# ---- the table


@dataclass(frozen=True)
class Setting:
    """One setting: its variable is SPARKS_NAME, its key in sparks.toml is name."""

    name: str
    default: Any  # as written in sparks.example.toml; None: not set
    read: Callable

    @property
    def variable(self):
        return "SPARKS_" + self.name.upper()


SETTINGS = [
    Setting("upstream", "http://127.0.0.1:8000", read_urls),
    Setting("upstream_key", None, read_secret),
    Setting("scheduling", "fcfs", one_of(*POLICIES)),
    Setting("model", None, read_text),
    Setting("stand_in_for", ["claude-*", "gpt-*"], read_names),
    Setting("bind", "127.0.0.1:8080", read_bind),
    Setting("db", "sqlite:///sparks.db", read_database),
    Setting("base_url", None, read_url),
    Setting("description", None, read_text),
    Setting("operator", None, read_text),
    Setting("edge_secret", None, read_secret),
    Setting("cors_origins", [], read_origins),
    Setting("max_active", 8, whole_number(1, 100_000)),
    Setting("max_queued", 64, whole_number(0, 100_000)),
    Setting("heavy_prompt", 8000, whole_number(0, 100_000_000)),
    Setting("heavy_at_once", 1, whole_number(1, 1000)),
    Setting("kv_tokens", None, whole_number(0, 1_000_000_000)),
    Setting("queue_timeout", 600, seconds(0.1, 86400)),
    Setting("keepalive", 15, seconds(0.1, 3600)),
    Setting("keepalive_form", "comment", one_of(*KEEPALIVE_FORMS)),
    Setting("stall_timeout", 300, seconds(0.1, 86400)),
    Setting("answer_timeout", 1800, seconds(0.1, 86400)),
    Setting("poll", 5, seconds(0.05, 3600)),
    Setting("stuck_after", 60, seconds(0.2, 86400)),
    Setting("on_stuck", None, read_text),
    Setting("on_stuck_pause", 600, seconds(0, 86400)),
    Setting("reasoning_field", "both", one_of(*reasoning.FIELDS)),
    Setting("max_body", "100 MB", read_size),
    Setting("max_bodies", "1 GB", read_size),
    Setting("image_urls", "public", read_hosts),
    Setting("max_images", 16, whole_number(0, 1000)),
    Setting("max_image", "20 MB", read_size),
    Setting("image_timeout", 10, seconds(0.1, 600)),
    Setting("keep_days", 90, whole_number(1, 36500)),
    Setting("drain", 30, seconds(0, 3600)),
    Setting("loop_warn", 0.1, seconds(0.01, 3600)),
    Setting("log", "logfmt", one_of("logfmt", "json")),
]
FIXED = ("bind", "db", "log")  # cannot change while the gateway runs
# Variables that are no settings: read by `load`, by people's clients, and by run.sh.
NO_SETTINGS = {"SPARKS_CONFIG", "SPARKS_API_KEY", "SPARKS_PYTHON", "SPARKS_VLLM_VENV"}


# ---- engines


@dataclass
class EngineEntry:
    """An `[[engines]]` table: where an engine is, and how much of the work is its own."""

    url: str
    key: str | None = field(default=None, repr=False)  # None: the setting upstream_key
    slots: int | None = None  # of each of its models; None: the setting max_active
    weight: float = 1  # how many requests it takes beside another one's
    drain: bool = False  # it gets no new requests
    scheduling: str | None = None  # one of POLICIES; None: the setting scheduling


ENGINE_KEYS = {
    "url": read_url,
    "key": read_secret,
    "slots": whole_number(1, 100_000),
    "weight": number_within(0.01, 100),
    "drain": read_flag,
    "scheduling": one_of(*POLICIES),
}


# ---- models


@dataclass
class ModelEntry:
    """A `[models."id"]` table: what people call a model, and what is particular about it."""

    id: str
    engine: str | None = None  # the engine's id, when it differs
    aliases: list[str] = field(default_factory=list)  # other names, patterns with *
    default: bool = False  # answers requests that name no model
    effort: str | None = None  # a table of reasoning.TABLES; None: its engine is asked
    reasoning_field: str | None = None  # None: the setting reasoning_field
    context: int | None = None  # tokens; None: as the engine reports it
    kind: str | None = None  # "chat" or "embedding"; None: as the engine looks
    hidden: bool = False  # in no list, though it answers to its names
    system: str | None = None  # the system prompt of requests that have none
    sampling: dict = field(default_factory=dict)  # fields of SAMPLING that a request leaves out


SAMPLING = {
    "temperature": number_within(0, 10),
    "top_p": number_within(0, 1),
    "top_k": whole_number(-1, 1 << 31),
    "min_p": number_within(0, 1),
    "presence_penalty": number_within(-2, 2),
    "frequency_penalty": number_within(-2, 2),
    "repetition_penalty": number_within(0.01, 10),
    "max_tokens": whole_number(1, 1 << 40),
}


def read_sampling(value):
    """A table with fields of SAMPLING."""
    if not isinstance(value, dict) or not value.keys() <= SAMPLING.keys():
        raise ValueError(
            "must be a table such as { temperature = 0.6 }, with " + ", ".join(SAMPLING)
        )
    for name in value:
        try:
            SAMPLING[name](value[name])
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return value


MODEL_KEYS = {
    "engine": read_text,
    "aliases": read_list,
    "default": read_flag,
    "effort": one_of(*reasoning.TABLES),
    "reasoning_field": one_of(*reasoning.FIELDS),
    "context": whole_number(1, 1 << 40),
    "kind": one_of("chat", "embedding"),
    "hidden": read_flag,
    "system": read_text,
    "sampling": read_sampling,
}


def matches(name, pattern):
    """Whether a name fits a pattern, in which only * is special; ignoring case."""
    parts = map(re.escape, pattern.lower().split("*"))
    return re.fullmatch(".*".join(parts), name.lower(), re.S) is not None


# ---- reading them


class Settings:
    """All settings as attributes; `engines`, a list of EngineEntry; `models`, one of ModelEntry.

    With engines of their own tables `upstream` is the list of their addresses.
    """

    def __init__(self, values, engines, models):
        self.__dict__.update(values)
        self.models = models
        self.engines = engines or [EngineEntry(url) for url in self.upstream]
        self.upstream = [entry.url for entry in self.engines]

    def update_from(self, new):
        """Take over what may change while the gateway runs.

        Returns the names of the settings that differ and may not.
        """
        fixed = [name for name in FIXED if getattr(new, name) != getattr(self, name)]
        changeable = {name: value for name, value in vars(new).items() if name not in FIXED}
        self.__dict__.update(changeable)
        return fixed


def load(environ=os.environ, warn=lambda line: print(line, file=sys.stderr)):
    """Settings from `environ` and the file it names. Raises SettingsError with one line."""
    table = read_file(environ)
    known = {setting.variable for setting in SETTINGS} | NO_SETTINGS
    for name in environ:
        if name.startswith("SPARKS_") and name not in known:
            warn(
                f"warning: {name} is no setting of Sparks and is ignored; "
                "sparks.example.toml lists them all"
            )
    models = read_models(table.pop("models", {}))
    engines = read_engines(table, environ)
    unknown = table.keys() - {setting.name for setting in SETTINGS}
    if unknown:
        raise SettingsError(
            f"sparks.toml: there is no setting {min(unknown)!r}; sparks.example.toml lists them all"
        )
    values = {each.name: value_of(each, environ, table) for each in SETTINGS}
    settings = Settings(values, engines, models)
    if settings.max_bodies < settings.max_body:
        raise SettingsError(
            "max_bodies must not be below max_body, or the largest request could never come in"
        )
    return settings


def read_file(environ):
    """What sparks.toml holds, as a dict; empty if there is none, unless SPARKS_CONFIG names it."""
    path = Path(environ.get("SPARKS_CONFIG") or HOME / "sparks.toml")
    if not path.exists():
        if environ.get("SPARKS_CONFIG"):
            raise SettingsError(f"SPARKS_CONFIG: there is no file {path}")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # bad TOML and UTF-8 are ValueErrors
        raise SettingsError(f"{path.name} cannot be read: {error}") from None


def value_of(setting, environ, table):
    """A setting's value: the variable's if it is set and not empty, the file's, or the default."""
    if environ.get(setting.variable, "").strip():
        name = setting.variable
        raw = environ[setting.variable]
    elif table.get(setting.name) not in (None, ""):
        name = f"sparks.toml: {setting.name}"
        raw = table[setting.name]
    elif setting.default is None:
        return None
    else:
        name = setting.name
        raw = setting.default
    try:
        return setting.read(raw)
    except (ValueError, OverflowError, RuntimeError) as error:
        # OverflowError: a size beyond all bounds; RuntimeError: a ~user that nobody is.
        raise SettingsError(f"{name} {error}") from None


def read_engines(table, environ):
    """A list of EngineEntry, of the tables [[engines]], which are taken out of the file's. The
    variable of the short form wins over them, as any variable does over the file."""
    if "engines" not in table:
        return []
    value = table.pop("engines")
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise SettingsError("sparks.toml: engines must be tables, each below a line [[engines]]")
    engines = [read_engine(number, entry) for number, entry in enumerate(value, 1)]
    urls = [engine.url for engine in engines]
    twice = next((url for url in urls if urls.count(url) > 1), None)
    if twice:
        raise SettingsError(f"sparks.toml: two engines have one url, {twice}")
    if engines and table.get("upstream"):
        raise SettingsError("sparks.toml: upstream is the short form of [[engines]]; take one away")
    if environ.get("SPARKS_UPSTREAM", "").strip():
        return []
    return engines


def read_engine(number, entry):
    """An EngineEntry, of its table, the first of which is number 1."""
    where = f"sparks.toml: engines, number {number}:"
    given = {name: value for name, value in entry.items() if value != ""}
    values = read_fields(where, given, ENGINE_KEYS)
    if "url" not in values:
        raise SettingsError(f"{where} it needs a url")
    return EngineEntry(**values)


def read_models(value):
    """A list of ModelEntry, of the tables below [models]."""
    if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
        raise SettingsError('sparks.toml: models must hold tables such as [models."glm-5.3-flash"]')
    models = [read_model(name, entry) for name, entry in value.items()]
    if sum(model.default for model in models) > 1:
        raise SettingsError("sparks.toml: only one model can be the default")
    if not all(model.id.strip() for model in models):
        raise SettingsError("sparks.toml: a model needs a name")
    if len({model.id.lower() for model in models}) < len(models):
        raise SettingsError("sparks.toml: two models have one name; case makes no difference")
    return models


def read_model(name, entry):
    """A ModelEntry, of its name and its table."""
    return ModelEntry(name, **read_fields(f'sparks.toml: models."{name}"', entry, MODEL_KEYS, "."))


def read_fields(where, table, readers, mark=" "):
    """The values of a table's fields as their readers give them. `where` it is, and `mark` stand in
    front of a field's name. Raises SettingsError."""
    values = {}
    for key, value in table.items():
        field_name = f"{where}{mark}{key}"
        if key not in readers:
            raise SettingsError(f"{field_name} is unknown; there are {', '.join(readers)}")
        try:
            values[key] = readers[key](value)
        except ValueError as error:
            raise SettingsError(f"{field_name} {error}") from None
    return values
