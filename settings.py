"""Settings: `SPARKS_*` variables over `sparks.toml` over defaults. `sparks.example.toml` is their manual."""

import os
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable
from urllib.parse import urlsplit

from errors import SettingsError
import reasoning

HOME = Path(__file__).resolve().parent
UNITS = {"": 1, "B": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


# ---- readers: the text or TOML value of a setting -> its value, or ValueError with what it should be


def text(value):
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value.strip()


def whole(least, most):
    def read(value):
        try:
            number = int(value) if not isinstance(value, (bool, float)) else None
        except (TypeError, ValueError):
            number = None
        if number is None or not least <= number <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return number

    return read


def seconds(least, most):
    def read(value):
        try:
            number = float(value) if not isinstance(value, bool) else -1
        except (TypeError, ValueError):
            number = -1
        if not least <= number <= most:
            raise ValueError(f"must be seconds from {least} to {most}")
        return number

    return read


def number(least, most):
    def read(value):
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not least <= value <= most
        ):
            raise ValueError(f"must be a number from {least} to {most}")
        return value

    return read


def size(value):
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)?", str(value).strip().upper())
    number = (
        int(float(match[1]) * UNITS[match[2] or ""]) if match and not isinstance(value, bool) else 0
    )
    if number < 1:
        raise ValueError('must be a size such as "100 MB"')
    return number


def one_of(*words):
    def read(value):
        word = value.strip() if isinstance(value, str) else value
        if word not in words:
            raise ValueError("must be one of " + ", ".join(words))
        return word

    return read


def url(value):
    try:
        parts = urlsplit(text(value))
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.username or re.search(r"[\s\x00-\x1f\x7f]", value.strip()):
        raise ValueError("must be an address such as http://127.0.0.1:8000")
    return re.sub(r"/(v1/?)?$", "", value.strip())


def urls(value):
    parts = value if isinstance(value, list) else text(value).split(",")
    found = [
        url(part) for part in parts if part != "" and (not isinstance(part, str) or part.strip())
    ]
    if not found:
        raise ValueError("must hold an address such as http://127.0.0.1:8000")
    return found


def hosts(value):
    parts = value if isinstance(value, list) else text(value).split(",")
    found = [part.strip().lower() for part in parts if isinstance(part, str) and part.strip()]
    if (
        not found
        or len(found) < len(parts)
        and isinstance(value, list)
        or not all(
            re.fullmatch(r"(\[[0-9a-f:]+\]|[a-z0-9._-]+)(:\d{1,5})?", part) for part in found
        )
    ):
        raise ValueError(
            'must be "public", "off", or hosts such as "public, pictures.lan, 10.0.0.5:9000"'
        )
    return [] if found == ["off"] else found


def bind(value):
    match = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^\s:/]+):(\d{1,5})", text(value))
    if not match or not 0 < int(match[2]) < 65536:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:8080")
    return value.strip()


def database(value):
    match = re.fullmatch(r"sqlite:///(?!:memory:)([^\0\n]+)", text(value))  # the ledger has to last
    if not match:
        raise ValueError("must be sqlite:///FILE (beside run.sh) or sqlite:////absolute/FILE")
    return HOME / Path(match[1]).expanduser()


def secret(value):
    if not re.fullmatch(r"[\x21-\x7e]+", text(value)):
        raise ValueError("must be printable ASCII without spaces")
    return value.strip()


def matches(name, pattern):
    """Whether a name fits a pattern, in which only * is special; ignoring case."""
    parts = map(re.escape, pattern.lower().split("*"))
    return re.fullmatch(".*".join(parts), name.lower(), re.S) is not None


def aliases(value):
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("must be a list of names")
    return value


def names(value):
    return aliases(
        [name.strip() for name in value.split(",") if name.strip()]
        if isinstance(value, str)
        else value
    )


def flag(value):
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


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
    Setting("upstream", "http://127.0.0.1:8000", urls),
    Setting("upstream_key", None, secret),
    Setting("model", None, text),
    Setting("stand_in_for", ["claude-*", "gpt-*"], names),
    Setting("bind", "127.0.0.1:8080", bind),
    Setting("db", "sqlite:///sparks.db", database),
    Setting("base_url", None, url),
    Setting("description", None, text),
    Setting("operator", None, text),
    Setting("edge_secret", None, secret),
    Setting("max_active", 8, whole(1, 100_000)),
    Setting("max_queued", 64, whole(0, 100_000)),
    Setting("queue_timeout", 600, seconds(0.1, 86400)),
    Setting("keepalive", 15, seconds(0.1, 3600)),
    Setting("stall_timeout", 300, seconds(0.1, 86400)),
    Setting("answer_timeout", 1800, seconds(0.1, 86400)),
    Setting("poll", 5, seconds(0.05, 3600)),
    Setting("reasoning_field", "both", one_of(*reasoning.FIELDS)),
    Setting("max_body", "100 MB", size),
    Setting("max_bodies", "1 GB", size),
    Setting("image_urls", "public", hosts),
    Setting("max_images", 16, whole(0, 1000)),
    Setting("max_image", "20 MB", size),
    Setting("image_timeout", 10, seconds(0.1, 600)),
    Setting("keep_days", 90, whole(1, 36500)),
    Setting("drain", 30, seconds(0, 3600)),
    Setting("log", "logfmt", one_of("logfmt", "json")),
]
FIXED = ("upstream", "upstream_key", "bind", "db", "log")  # cannot change while the gateway runs
ELSEWHERE = {
    "SPARKS_CONFIG",
    "SPARKS_API_KEY",
    "SPARKS_PYTHON",
    "SPARKS_VLLM_VENV",
}  # read elsewhere


# ---- models


@dataclass
class ModelEntry:
    """A `[models."id"]` table: what people call a model, and what is particular about it."""

    id: str
    engine: str | None = None  # the engine's id, when it differs
    aliases: list[str] = field(default_factory=list)  # other names, patterns with *
    default: bool = False  # answers requests that name no model
    effort: str = "glm"  # a table of reasoning.TABLES
    reasoning_field: str | None = None  # None: the setting reasoning_field
    context: int | None = None  # tokens; None: as the engine reports it
    kind: str | None = None  # "chat" or "embedding"; None: as the engine looks
    hidden: bool = False  # in no list, though it answers to its names
    system: str | None = None  # the system prompt of requests that have none
    sampling: dict = field(default_factory=dict)  # fields of SAMPLING that a request leaves out


SAMPLING = {
    "temperature": number(0, 10),
    "top_p": number(0, 1),
    "top_k": whole(-1, 1 << 31),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0.01, 10),
    "max_tokens": whole(1, 1 << 40),
}


def sampling(value):
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
    "engine": text,
    "aliases": aliases,
    "default": flag,
    "effort": one_of(*reasoning.TABLES),
    "reasoning_field": one_of(*reasoning.FIELDS),
    "context": whole(1, 1 << 40),
    "kind": one_of("chat", "embedding"),
    "hidden": flag,
    "system": text,
    "sampling": sampling,
}


# ---- reading them


class Settings:
    """All settings as attributes, and `models`, a list of ModelEntry."""

    def __init__(self, values, models):
        self.__dict__.update(values)
        self.models = models

    def adopt(self, new):
        """Take over what may change while the gateway runs. Returns the names of those that changed and may not."""
        fixed = [name for name in FIXED if getattr(new, name) != getattr(self, name)]
        self.__dict__.update(
            {name: value for name, value in vars(new).items() if name not in FIXED}
        )
        return fixed


def load(environ=os.environ, warn=lambda line: print(line, file=sys.stderr)):
    """Settings from `environ` and the file it names. Raises SettingsError with one line."""
    table = read_file(environ)
    for name in environ:
        if (
            name.startswith("SPARKS_")
            and name not in ELSEWHERE
            and name not in {s.variable for s in SETTINGS}
        ):
            warn(
                f"warning: {name} is no setting of Sparks and is ignored; sparks.example.toml lists them all"
            )
    models = [
        model_entry(name, entry)
        for name, entry in tables(table.pop("models", {}), "models").items()
    ]
    if sum(model.default for model in models) > 1:
        raise SettingsError("sparks.toml: only one model can be the default")
    if not all(model.id.strip() for model in models):
        raise SettingsError("sparks.toml: a model needs a name")
    if len({model.id.lower() for model in models}) < len(models):
        raise SettingsError("sparks.toml: two models have one name; case makes no difference")
    unknown = table.keys() - {s.name for s in SETTINGS}
    if unknown:
        raise SettingsError(
            f"sparks.toml: there is no setting {min(unknown)!r}; sparks.example.toml lists them all"
        )
    settings = Settings({s.name: value_of(s, environ, table) for s in SETTINGS}, models)
    if settings.max_bodies < settings.max_body:
        raise SettingsError(
            "max_bodies must not be below max_body, or the largest request could never come in"
        )
    return settings


def read_file(environ):
    path = Path(environ.get("SPARKS_CONFIG") or HOME / "sparks.toml")
    if not path.exists():
        if environ.get("SPARKS_CONFIG"):
            raise SettingsError(f"SPARKS_CONFIG: there is no file {path}")
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # TOML's and UTF-8's errors are ValueErrors
        raise SettingsError(f"{path.name} cannot be read: {error}") from None


def value_of(setting, environ, table):
    """A setting's value: the variable if it is set and not empty, else the file's, else the default."""
    if environ.get(setting.variable, "").strip():
        name, raw = setting.variable, environ[setting.variable]
    elif table.get(setting.name) not in (None, ""):
        name, raw = f"sparks.toml: {setting.name}", table[setting.name]
    elif setting.default is None:
        return None
    else:
        name, raw = setting.name, setting.default
    try:
        return setting.read(raw)
    except (
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:  # a number, a size or a ~user beyond all bounds
        raise SettingsError(f"{name} {error}") from None


def tables(value, name):
    if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
        raise SettingsError(
            f'sparks.toml: {name} must hold tables such as [models."glm-5.3-flash"]'
        )
    return value


def model_entry(name, entry):
    values = {}
    for key, value in entry.items():
        where = f'sparks.toml: models."{name}".{key}'
        if key not in MODEL_KEYS:
            raise SettingsError(f"{where} is unknown; there are {', '.join(MODEL_KEYS)}")
        try:
            values[key] = MODEL_KEYS[key](value)
        except ValueError as error:
            raise SettingsError(f"{where} {error}") from None
    return ModelEntry(name, **values)
