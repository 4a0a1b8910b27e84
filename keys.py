#!/usr/bin/env python3
"""Personal keys: who may come in. Also the owner's command, `./run.sh keys`.

A key is `sk-sparks-` and random characters; only its SHA-256 and a short prefix are stored.
"""

import os
import sys

HOME = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HOME, ".venv")

PYTHON = os.path.join(VENV, "bin", "python")

if (
    __name__ == "__main__"
    and os.path.exists(PYTHON)
    and os.path.realpath(sys.prefix) != os.path.realpath(VENV)
):
    os.execv(
        PYTHON, [PYTHON, os.path.abspath(__file__)] + sys.argv[1:]
    )  # typed with the machine's own Python

try:
    import click
    import peewee
except ImportError:
    if __name__ != "__main__":
        raise
    sys.exit("Sparks is not set up yet: run ./run.sh once, then try again.")

import csv
import hashlib
import io
import json
import secrets
import time
from datetime import date, datetime, timedelta, timezone
from typing import NamedTuple

from store import ledger
import reasoning
import settings as settings_module
from admission import Limits
from store.database import database, open_database
from errors import InvalidKey, SettingsError

PREFIX = "sk-sparks-"
RANDOM_BYTES = 32  # 43 URL-safe characters
FRESH = 0.01  # seconds for which a gateway does not ask whether keys were changed
SHOWN = len(PREFIX) + 6  # characters of a key that lists may show


class KeyRow(peewee.Model):
    name = peewee.CharField()
    prefix = peewee.CharField()
    digest = peewee.CharField(unique=True)  # SHA-256 of the key, hexadecimal
    created = peewee.DateTimeField()
    revoked = peewee.DateTimeField(null=True)
    requests_per_minute = peewee.IntegerField(null=True)
    tokens_per_minute = peewee.IntegerField(null=True)
    active = peewee.IntegerField(null=True)  # requests running at once
    tokens_per_day = peewee.IntegerField(null=True)
    tokens_per_month = peewee.IntegerField(null=True)
    models = peewee.CharField(null=True)  # patterns, with commas
    expires = peewee.DateTimeField(null=True)  # UTC
    reasoning_field = peewee.CharField(null=True)
    admin = peewee.BooleanField(default=False)

    class Meta:
        database = database
        table_name = "key"

    @property
    def limits(self):
        return Limits(*(getattr(self, name) for name in Limits._fields))


# ---- keys for the gateway


class Key(NamedTuple):
    """A valid key as the gateway knows it."""

    id: int
    name: str
    limits: Limits = Limits()
    models: tuple = ()  # patterns of the models it may use; empty: all
    expires: float | None = None  # epoch seconds
    reasoning_field: str | None = None  # None: as the model's
    admin: bool = False


def key_of(row):
    expires = row.expires and row.expires.replace(tzinfo=timezone.utc).timestamp()
    models = tuple(row.models.split(",")) if row.models else ()
    return Key(row.id, row.name, row.limits, models, expires, row.reasoning_field, row.admin)


class Keyring:
    """The valid keys in memory, read again whenever another process has changed the database, within FRESH seconds."""

    def __init__(self):
        self.version, self.keys, self.looked = None, {}, -FRESH

    def check(self, authorization, x_api_key):
        """The Key of a request's headers (strings, or None). Raises InvalidKey."""
        given = credentials(authorization, x_api_key)
        if not given:
            raise InvalidKey(
                "no API key: send it as 'Authorization: Bearer sk-sparks-...' or in 'x-api-key'"
            )
        if len(given) > 1:
            raise InvalidKey("several different API keys: send one")
        self.refresh()
        key = self.keys.get(
            digest(given.pop())
        )  # a hash gives nothing away by the time it takes to look up
        if key is None:
            raise InvalidKey("this API key is wrong or was revoked; ask the operator for a new one")
        if key.expires is not None and key.expires <= time.time():
            raise InvalidKey("this API key has expired; ask the operator for a new one")
        return key

    def refresh(self):
        now = time.monotonic()
        if now - self.looked < FRESH:
            return
        connection = database.connection()
        version = (
            connection,
            connection.execute("PRAGMA data_version").fetchone(),
        )  # by itself: a new one may get its id
        if version != self.version:
            self.keys = {row.digest: key_of(row) for row in active()}
            self.version = version
        self.looked = now  # last: keys that could not be read are not fresh


def credentials(authorization, x_api_key):
    """The different keys in both headers; one that was sent twice arrives joined by a comma."""
    found = {part.strip() for part in (x_api_key or "").split(",")}
    for part in (authorization or "").split(","):
        scheme, _, token = part.strip().partition(" ")
        if scheme.lower() == "bearer":
            found.add(token.strip())
    return found - {""}


def digest(key):
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def now():
    return datetime.now(timezone.utc).replace(tzinfo=None, microsecond=0)


def add_key(name, admin=False):
    """Make a key and return it; it is shown this once and never again."""
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    KeyRow.create(name=name, prefix=key[:SHOWN], digest=digest(key), created=now(), admin=admin)
    return key


def first_key(name="me"):
    """A key for a machine that has none yet, else None."""
    return None if active().exists() else add_key(name)


def active(*where):
    return KeyRow.select().where(KeyRow.revoked.is_null(), *where)


# ---- the owner's commands


def dump(value):
    click.echo(json.dumps(value, indent=2))


def facts(row):
    return {
        "name": row.name,
        "prefix": row.prefix,
        "created": iso(row.created),
        "revoked": iso(row.revoked),
        "admin": row.admin,
    }


def iso(moment):
    return moment and moment.isoformat(timespec="seconds") + "Z"


def checked_name(name):
    name = name.strip()
    if (
        not 1 <= len(name) <= 64 or not name.isprintable()
    ):  # what is printed must not move the terminal's cursor
        raise click.ClickException("a name has 1 to 64 printable characters")
    return name


class Commands(click.Group):
    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except peewee.DatabaseError as error:
            raise click.ClickException(f"the database cannot be read or written: {error}") from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def cli():
    """Keys for the people who share this gateway. Works while the gateway runs; changes count at once.

    \b
    ./run.sh keys add alice          a key for alice, shown once
    ./run.sh keys list               who has keys
    ./run.sh keys revoke alice       alice's keys stop working with the next request
    ./run.sh keys limit alice        what alice may use; with options, sets it
    ./run.sh keys usage              who used how much
    ./run.sh keys log --follow       requests as they end
    """
    try:
        open_database(settings_module.load(warn=lambda line: None).db)
    except SettingsError as error:
        raise click.ClickException(str(error)) from None


@cli.command()
@click.argument("name")
@click.option("--again", is_flag=True, help="Make another key though NAME has one already.")
@click.option(
    "--admin", is_flag=True, help="Also let it read /metrics from elsewhere than this machine."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def add(name, again, admin, as_json):
    """Make a key for NAME and print it, this once, as the last line."""
    name = checked_name(name)
    if not again and active(KeyRow.name == name).exists():
        raise click.ClickException(
            f"{name} has a key already; --again makes another, `revoke {name}` ends the old one"
        )
    key = add_key(name, admin)
    spread()
    click.echo(
        f"A key for {name}. It is shown this once: hand it over by a safe way. In a shell:\n"
        f"  export SPARKS_API_KEY={PREFIX}...   (the key below)",
        err=True,
    )
    dump({"name": name, "prefix": key[:SHOWN], "key": key}) if as_json else click.echo(key)


@cli.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead.")
def list_keys(as_json):
    """List all keys, revoked ones too."""
    rows = list(KeyRow.select().order_by(KeyRow.name, KeyRow.created))
    if as_json:
        return dump([facts(row) for row in rows])
    if not rows:
        return click.echo("no keys yet; `./run.sh keys add NAME` makes one", err=True)
    width = max(len(row.name) for row in rows)
    for row in rows:
        state = f"revoked {iso(row.revoked)}" if row.revoked else "active"
        click.echo(f"{row.name:{width}}  {row.prefix}...  {iso(row.created)}  {state}")


@cli.command()
@click.argument("name_or_prefix")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the revoked keys as a list of objects."
)
def revoke(name_or_prefix, as_json):
    """End all keys of a name, or the one key with a prefix as `list` shows it."""
    rows = named(name_or_prefix)
    for row in rows:
        row.revoked = now()
        row.save()
    spread()
    if as_json:
        return dump([facts(row) for row in rows])
    for row in rows:
        click.echo(f"revoked {row.prefix}... of {row.name}")


def spread():
    """Wait until a gateway that runs has seen a change: what a command says is so when it says it."""
    time.sleep(FRESH)


def named(name_or_prefix):
    """The active keys that these words mean; a ClickException if there are none."""
    wanted = name_or_prefix.strip()
    rows = (
        (list(active(KeyRow.name == wanted)) or with_prefix(wanted.rstrip(".")))
        if wanted.isprintable()
        else []
    )
    if not rows:
        raise click.ClickException(
            f"no active key has the name or prefix {shortened(name_or_prefix)}; `list` shows all"
        )
    return rows


def with_prefix(prefix):
    """The active key that a prefix, or a whole key, names."""
    if not prefix.startswith(PREFIX) or len(prefix) <= len(PREFIX):
        return []
    if len(prefix) > SHOWN:  # a whole key, pasted
        return list(active(KeyRow.digest == digest(prefix)))
    rows = [row for row in active() if row.prefix.startswith(prefix)]
    if len(rows) > 1:
        raise click.ClickException(
            f"{len(rows)} active keys begin like that; give more of the prefix"
        )
    return rows


def shortened(text):
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


# ---- limits


class Count(click.ParamType):
    """A whole number from 1 on, or `none`."""

    name = "N|none"

    def convert(self, value, param, ctx):
        if isinstance(value, int) or value is CLEARED:
            return value
        if value.lower() == "none":
            return CLEARED
        if not value.isdecimal() or not 1 <= int(value) <= 1 << 53:
            self.fail(f"{value!r} is no whole number from 1 on, nor none", param, ctx)
        return int(value)


class Until(click.ParamType):
    """A day, whose end counts, or a moment, in UTC; or `none`."""

    name = "DATE|none"

    def convert(self, value, param, ctx):
        if not isinstance(value, str):
            return value
        if value.lower() == "none":
            return CLEARED
        try:
            if len(value) == 10:
                return datetime.combine(
                    date.fromisoformat(value) + timedelta(days=1), datetime.min.time()
                )
            moment = datetime.fromisoformat(value)
            if moment.tzinfo:
                moment = moment.astimezone(timezone.utc).replace(tzinfo=None)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no date such as 2026-12-31 or 2026-12-31T18:00", param, ctx)
        return moment


CLEARED = object()  # an option given as `none`
LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "active",
    "tokens_per_day",
    "tokens_per_month",
    "models",
    "expires",
    "reasoning_field",
)


@cli.command()
@click.argument("name_or_prefix")
@click.option("--rpm", "requests_per_minute", type=Count(), help="Requests per minute.")
@click.option(
    "--tpm", "tokens_per_minute", type=Count(), help="Tokens per minute, prompt and completion."
)
@click.option(
    "--active", type=Count(), help="Requests running at once; more of them wait their turn."
)
@click.option("--tokens-per-day", type=Count(), help="Tokens per calendar day, UTC.")
@click.option("--tokens-per-month", type=Count(), help="Tokens per calendar month, UTC.")
@click.option("--models", help="Models it may use, with commas; * stands for anything; none: all.")
@click.option("--expires", type=Until(), help="The last day (UTC) or moment on which it works.")
@click.option(
    "--reasoning-field",
    type=click.Choice([*reasoning.FIELDS, "none"]),
    help="The name(s) its client reads.",
)
@click.option("--clear", is_flag=True, help="Drop all limits first.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead.")
def limit(name_or_prefix, clear, as_json, **given):
    """Show or set what the keys of a name (or the key with a prefix) may do. Counts from the next request on."""
    rows = named(name_or_prefix)
    changes = {name: value for name, value in given.items() if value is not None}
    if "models" in changes:
        changes["models"] = patterns(changes["models"])
    for row in rows:
        for name in LIMITS if clear else ():
            setattr(row, name, None)
        for name, value in changes.items():
            setattr(row, name, None if value in (CLEARED, "none") else value)
        if clear or changes:
            row.save()
    spread()
    if as_json:
        return dump([limit_facts(row) for row in rows])
    for row in rows:
        click.echo(f"{row.name}  {row.prefix}...  {limit_line(row)}")


def patterns(text):
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not text.isprintable():
        raise click.ClickException(
            "--models takes names with commas, such as glm-5.3-flash,tiny*; none allows all"
        )
    return ",".join(names)


def limit_facts(row):
    return {
        "name": row.name,
        "prefix": row.prefix,
        **{name: getattr(row, name) for name in LIMITS},
        "models": row.models.split(",") if row.models else None,
        "expires": iso(row.expires),
    }


def limit_line(row):
    known = {
        name: value
        for name, value in limit_facts(row).items()
        if name in LIMITS and value is not None
    }
    return (
        "  ".join(
            f"{name.replace('_', ' ')}: {','.join(value) if isinstance(value, list) else value}"
            for name, value in known.items()
        )
        or "no limits"
    )


# ---- what was used


def owner_names():
    return {row.id: row.name for row in KeyRow.select()}


def ids_of(name):
    """The ids of all keys of a name, revoked ones too."""
    ids = [row.id for row in KeyRow.select().where(KeyRow.name == name)]
    if not ids:
        raise click.ClickException(f"no key has the name {shortened(name)}; `list` shows all")
    return ids


@cli.command()
@click.argument("name", required=False)
@click.option("--since", type=click.DateTime(["%Y-%m-%d"]), help="From this day (UTC) on.")
@click.option("--days", type=click.IntRange(1, 36500), help="The last N days.")
@click.option(
    "--by",
    type=click.Choice(["key", "day", "model"]),
    default="key",
    show_default=True,
    help="A line for each.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
@click.option("--plot", is_flag=True, help="Draw tokens per day in the terminal.")
def usage(name, since, days, by, as_json, as_csv, plot):
    """Requests and tokens: of everybody, or of NAME."""
    if since and days:
        raise click.ClickException("give --since or --days, not both")
    first = since.date().isoformat() if since else None
    if days:
        first = ledger.day_of(time.time() - (days - 1) * ledger.DAY)
    table = totals(name, first, "day" if plot else by)
    if plot:
        return draw(table)
    if as_json:
        return dump(table)
    if as_csv:
        return click.echo(as_text(table, by), nl=False)
    show_table(table)


def totals(name, first, by):
    column = {"key": "key_id"}.get(by, by)
    found = ledger.usage([column], ids_of(name) if name else None, first)
    if by != "key":
        return found
    names, merged = owner_names(), {}
    for row in found:  # several keys of one name are one person
        owner = names.get(row.pop("key_id"), "?")
        known = merged.setdefault(owner, {"key": owner, **dict.fromkeys(ledger.TOTALS, 0)})
        known.update({column: known[column] + row[column] for column in ledger.TOTALS})
    return [merged[owner] for owner in sorted(merged)]


def as_text(table, by):
    out = io.StringIO()
    writer = csv.DictWriter(out, [by, *ledger.TOTALS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


def show_table(table):
    if not table:
        return click.echo("no requests yet", err=True)
    heads = [name.replace("_tokens", "") for name in table[0]]
    lines = [heads] + [
        [f"{value:,}" if isinstance(value, int) else value or "-" for value in row.values()]
        for row in table
    ]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    for line in lines:
        click.echo(
            "  ".join(
                [
                    line[0].ljust(widths[0]),
                    *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:])),
                ]
            )
        )


def draw(table):
    import plotext

    if not table:
        return click.echo("no requests yet", err=True)
    plotext.simple_bar(
        [row["day"] for row in table],
        [row["prompt_tokens"] + row["completion_tokens"] for row in table],
        title="tokens per day",
        width=80,
    )
    click.echo(plotext.uncolorize(plotext.build()), nl=False)


@cli.command("log")
@click.option("--key", "name", help="Only requests of this name's keys.")
@click.option("--status", help="Only with this status, such as 503, or class, such as 5xx.")
@click.option(
    "-n", "most", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="How many."
)
@click.option("--follow", is_flag=True, help="Go on with new ones until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def show_log(name, status, most, follow, as_json):
    """The latest requests, newest last."""
    where, values = conditions(name, status)
    seen = 0
    while True:
        found = ledger.rows(f"{where} AND request.rowid > ?", (*values, seen), most)
        for row in found:
            click.echo(json.dumps(row) if as_json else row_line(row))
            seen = max(seen, row["rowid"])
        if not follow:
            return
        most = -1  # all that is new
        time.sleep(0.5)


def conditions(name, status):
    where, values = ["1"], []
    if name:
        ids = ids_of(name)
        where.append(f"request.key_id IN ({', '.join('?' * len(ids))})")
        values += ids
    if status:
        if not (
            len(status) == 3 and status[0] in "12345" and (status[1:] == "xx" or status.isdecimal())
        ):
            raise click.ClickException(
                "--status takes a number such as 503, or a class such as 5xx"
            )
        where.append("request.status BETWEEN ? AND ?")
        values += (
            [int(status[0]) * 100, int(status[0]) * 100 + 99]
            if status.endswith("xx")
            else [int(status), int(status)]
        )
    return " AND ".join(where), values


def moment(epoch):
    return datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def row_line(row):
    tokens = f"{row['prompt_tokens'] if row['prompt_tokens'] is not None else '?'}+{row['completion_tokens'] or 0}"
    word = "aborted" if row["aborted"] else row["error"] or "ok"
    words = (
        moment(row["started"]),
        row["id"],
        row["key"] or "?",
        row["model"] or "-",
        row["route"],
        row["status"],
        word,
        f"{row['total_ms']} ms",
        f"{tokens} tokens",
    )
    return "  ".join(map(str, words))


@cli.command()
@click.argument("request_id")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def show(request_id, as_json):
    """One request, whole: REQUEST-ID is the x-request-id of its answer."""
    found = ledger.rows("request.id = ?", (request_id,), 20)
    if not found:
        raise click.ClickException(f"there is no request {request_id[:64]!r} in the ledger")
    if as_json:
        return dump(found)
    for row in found:
        for name, value in row.items():
            click.echo(
                f"{name + ':':20}{moment(value) if name == 'started' else '-' if value is None else value}"
            )


if __name__ == "__main__":
    cli(prog_name="keys")
