#!/usr/bin/env python3
"""Personal keys: who may come in. Also the owner's command, `./run.sh keys`.

A key is `sk-sparks-` and random characters; only its SHA-256 and a short prefix are stored.
"""

import os
import sys

if __name__ == "__main__":
    # Typed with the machine's own Python, perhaps, which lacks what is installed in .venv.
    VENV = os.path.join(os.path.dirname(os.path.abspath(__file__)), ".venv")
    PYTHON = os.path.join(VENV, "bin", "python")
    if os.path.exists(PYTHON) and os.path.realpath(sys.prefix) != os.path.realpath(VENV):
        os.execv(PYTHON, [PYTHON, os.path.abspath(__file__), *sys.argv[1:]])

try:
    import click
    import peewee
except ImportError:
    if __name__ != "__main__":
        raise
    sys.exit("Sparks is not set up yet: run ./run.sh once, then try again.")

import hashlib
import json
import re
import secrets
import time
from datetime import UTC, date, datetime, timedelta
from typing import NamedTuple

import reasoning
import settings
from admission import Limits
from errors import InvalidKey, SettingsError
from log import printable
from store import ledger, report
from store.database import (
    DATABASE_FAULTS,
    FAULTS,
    advised,
    check_place,
    database,
    is_ours,
    open_database,
)

PREFIX = "sk-sparks-"
RANDOM_BYTES = 32  # 43 URL-safe characters
MOST_GIVEN = 4  # different keys in one request: each is hashed
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
    keepalive_form = peewee.CharField(null=True)
    admin = peewee.BooleanField(default=False)
    share = peewee.IntegerField(null=True)
    batch = peewee.BooleanField(null=True)
    trusts = peewee.CharField(null=True)  # a header's name
    trusts_values = peewee.BooleanField(null=True)

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
    keepalive_form: str | None = None  # None: the setting keepalive_form
    batch: bool = False  # its requests are last in turn
    trusts: str | None = None  # the header that names the people behind it
    trusts_values: bool = False  # whose values the ledger keeps as they are, and not a hash


def key_of(row):
    expires = row.expires and row.expires.replace(tzinfo=UTC).timestamp()
    models = ()
    if row.models:
        models = tuple(row.models.split(","))
    more = row.reasoning_field, row.admin, row.keepalive_form, bool(row.batch)
    people = row.trusts, bool(row.trusts_values)
    return Key(row.id, row.name, row.limits, models, expires, *more, *people)


class Keyring:
    """The valid keys in memory.

    They are read again, within FRESH seconds, when another process has changed the database.
    """

    def __init__(self, follow=lambda: None):
        """`follow`: a function that opens the file which was put in the database's place."""
        self.follow = follow
        self.version = None
        self.keys = {}
        self.looked = -FRESH  # by time.monotonic

    def check(self, authorization, x_api_key):
        """The Key of a request's headers (strings, or None). Raises InvalidKey.

        A client may send somebody else's key beside it, such as one of Anthropic's that is left in
        its environment.
        """
        given = credentials(authorization, x_api_key)
        if not given:
            raise InvalidKey(
                "no API key: send it as 'Authorization: Bearer sk-sparks-...' or in 'x-api-key'"
            )
        if len(given) > MOST_GIVEN:
            raise InvalidKey("several different API keys: send one")
        self.refresh()
        # How long the look-up of a hash takes says nothing about the key it was made from.
        known = [self.keys[each] for each in map(digest, given) if each in self.keys]
        valid = [key for key in known if key.expires is None or key.expires > time.time()]
        if len(valid) == 1:
            return valid[0]
        if valid:
            raise InvalidKey("several different API keys: send one")
        if known:
            raise InvalidKey("this API key has expired; ask the operator for a new one")
        raise InvalidKey("this API key is wrong or was revoked; ask the operator for a new one")

    def refresh(self):
        """Read the keys again if another connection, whose commits SQLite counts, made one."""
        moment = time.monotonic()
        if moment - self.looked < FRESH:
            return
        try:
            if not is_ours():
                self.follow()
            connection = database.connection()
            # The connection is held: a new one could get its id, and starts from the same number.
            version = (connection, connection.execute("PRAGMA data_version").fetchone())
            if version != self.version:
                self.keys = {row.digest: key_of(row) for row in active_keys()}
                self.version = version
        except FAULTS:  # such as while a backup is put in place: the ledger tells of them
            if self.version is None:
                raise
        self.looked = moment  # last: keys that could not be read are not fresh


def credentials(authorization, x_api_key):
    """The different keys in both headers. WSGI joins a header that came twice with a comma."""
    found = {part.strip() for part in (x_api_key or "").split(",")}
    for part in (authorization or "").split(","):
        scheme, _, token = part.strip().partition(" ")
        if scheme.lower() == "bearer":
            found.add(token.strip())
    return found - {""}


def digest(key):
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def utc_now():
    """This second, UTC, as a datetime without a zone: as the database keeps it."""
    return datetime.now(UTC).replace(tzinfo=None, microsecond=0)


def add_key(name, admin=False):
    """Make a key and return it; it is shown this once and never again."""
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    KeyRow.create(name=name, prefix=key[:SHOWN], digest=digest(key), created=utc_now(), admin=admin)
    return key


def first_key(name="me"):
    """A key for a machine that has none yet, else None."""
    if active_keys().exists():
        return None
    return add_key(name)


def active_keys(*where):
    return KeyRow.select().where(KeyRow.revoked.is_null(), *where)


def change(rows, **columns):
    """Write columns of keys that are active, and nothing else of their rows.

    Another process may have changed the rows since they were read: other columns keep what it
    wrote, and a key that it revoked stays as it is. Returns (the changed rows as they are now, the
    rows that were revoked meanwhile).
    """
    changed = []
    revoked = []
    for row in rows:
        still_active = (KeyRow.id == row.id) & KeyRow.revoked.is_null()
        if KeyRow.update(**columns).where(still_active).execute():
            changed.append(KeyRow.get_by_id(row.id))
        else:
            revoked.append(row)
    return changed, revoked


# ---- the owner's commands


def tell(line):
    """Print a line. What engines call their models, for one, must not move the terminal's
    cursor."""
    click.echo(printable(line))


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
    if not 1 <= len(name) <= 64 or not name.isprintable():
        raise click.ClickException("a name has 1 to 64 printable characters")
    return name


class Commands(click.Group):
    def invoke(self, ctx):
        """A sub-command, whose faults are a line."""
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            error.message = printable(error.message)
            raise
        except UnicodeEncodeError:
            raise click.ClickException("what was typed is not valid UTF-8") from None
        except DATABASE_FAULTS as error:
            raise click.ClickException(
                f"the database cannot be read or written: {advised(error)}"
            ) from None


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
def cli():
    """Keys for the people who share this gateway. Works while the gateway runs; changes count at
    once.

    \b
    ./run.sh keys add alice          a key for alice, shown once
    ./run.sh keys list               who has keys
    ./run.sh keys revoke alice       alice's keys stop working with the next request
    ./run.sh keys limit alice        what alice may use; with options, sets it
    ./run.sh keys limit webui --trusts X-OpenWebUI-User-Id
                                     the people behind a web UI's key are told apart
    ./run.sh keys usage              who used how much
    ./run.sh keys log --follow       requests as they end
    """
    try:
        open_database(settings.load(warn=lambda line: None).db)
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
    if not again and active_keys(KeyRow.name == name).exists():
        raise click.ClickException(
            f"{name} has a key already; --again makes another, `revoke {name}` ends the old one"
        )
    key = add_key(name, admin)
    wait_until_seen()
    click.echo(
        f"A key for {name}. It is shown this once: hand it over by a safe way. In a shell:\n"
        f"  export SPARKS_API_KEY={PREFIX}...   (the key below)",
        err=True,
    )
    if as_json:
        return dump({"name": name, "prefix": key[:SHOWN], "key": key})
    click.echo(key)


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
        state = "active"
        if row.revoked:
            state = f"revoked {iso(row.revoked)}"
        tell(f"{row.name:{width}}  {row.prefix}...  {iso(row.created)}  {state}")


@cli.command()
@click.argument("name_or_prefix")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the revoked keys as a list of objects."
)
def revoke(name_or_prefix, as_json):
    """End all keys of a name, or the one key with a prefix as `list` shows it."""
    changed, revoked = change(named(name_or_prefix), revoked=utc_now())
    wait_until_seen()
    if as_json:
        dump([facts(row) for row in changed])
    else:
        for row in changed:
            tell(f"revoked {row.prefix}... of {row.name}")
    tell_revoked(revoked)


def tell_revoked(rows):
    """A ClickException that names keys which somebody else revoked before they were changed."""
    if rows:
        names = ", ".join(f"{row.prefix}... of {row.name}" for row in rows)
        raise click.ClickException(f"revoked meanwhile, and left as it is: {names}")


def wait_until_seen():
    """Until a running gateway has seen a change: what a command says is so when it says it."""
    time.sleep(FRESH)
    try:
        check_place()
    except OSError as error:
        raise click.ClickException(f"the database was replaced meanwhile: {error}") from None


def named(name_or_prefix):
    """The active keys that these words mean; a ClickException if there are none."""
    wanted = name_or_prefix.strip()
    rows = []
    if wanted.isprintable():
        rows = list(active_keys(KeyRow.name == wanted)) or with_prefix(wanted.rstrip("."))
    if not rows:
        raise click.ClickException(
            f"no active key has the name or prefix {shortened(name_or_prefix)}; `list` shows all"
        )
    return rows


def with_prefix(prefix):
    """The active key that a prefix, or a whole key, names, in a list; empty if there is none."""
    if not prefix.startswith(PREFIX) or len(prefix) <= len(PREFIX):
        return []
    if len(prefix) > SHOWN:  # a whole key, pasted
        return list(active_keys(KeyRow.digest == digest(prefix)))
    rows = [row for row in active_keys() if row.prefix.startswith(prefix)]
    if len(rows) > 1:
        raise click.ClickException(
            f"{len(rows)} active keys begin like that; give more of the prefix"
        )
    return rows


def shortened(text):
    if len(text) > SHOWN:  # a whole key, perhaps: never shown
        text = text[:SHOWN] + "..."
    return repr(text)


# ---- limits


class Count(click.ParamType):
    """A whole number from 1 on, or `none`."""

    name = "N|none"
    most = 1 << 53
    expected = "from 1 on"

    def convert(self, value, param, ctx):
        """An int, or CLEARED."""
        if isinstance(value, int) or value is CLEARED:
            return value
        if value.lower() == "none":
            return CLEARED
        digits = value.isdecimal() and len(value) < 20
        if not digits or not 1 <= int(value) <= self.most:
            self.fail(f"{value!r:.60} is no whole number {self.expected}, nor none", param, ctx)
        return int(value)


class Share(Count):
    most = 100
    expected = f"from 1 to {most}"


class Header(click.ParamType):
    """The name of a header that says for whom a request is, or `none`."""

    name = "HEADER|none"

    def convert(self, value, param, ctx):
        """The name as it was typed, or CLEARED."""
        if not isinstance(value, str):
            return value
        if value.lower() == "none":
            return CLEARED
        if len(value) > LONGEST_HEADER or not TOKEN.fullmatch(value):
            what = "is no name of a header"
        elif "_" in value:
            what = "has an underscore, and such headers are not let in: have it sent with hyphens"
        elif NO_PERSON.fullmatch(value):
            what = "says something else than who a person is"
        else:
            return value
        self.fail(f"{value!r:.60} {what}; it takes one such as X-OpenWebUI-User-Id", param, ctx)


class Until(click.ParamType):
    """A day, whose end counts, or a moment, in UTC; or `none`."""

    name = "DATE|none"

    def convert(self, value, param, ctx):
        """A datetime without a zone, in UTC, or CLEARED."""
        if not isinstance(value, str):
            return value
        if value.lower() == "none":
            return CLEARED
        try:
            if len(value) == 10:
                day = date.fromisoformat(value) + timedelta(days=1)
                return datetime.combine(day, datetime.min.time())
            moment = datetime.fromisoformat(value)
            if moment.tzinfo:
                moment = moment.astimezone(UTC).replace(tzinfo=None)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no date such as 2026-12-31 or 2026-12-31T18:00", param, ctx)
        return moment


CLEARED = object()  # an option given as `none`
TOKEN = re.compile(r"[!#-'*+.^-z|~\w-]+", re.ASCII)  # RFC 9110 5.6.2
LONGEST_HEADER = 100  # characters of its name
# Headers that are secrets, differ with each request or conversation, are alike for everybody, or
# are HTTP's own.
NO_PERSON = re.compile(
    r".*(?:authorization|cookie|token|secret|password|api-?key).*"
    r"|(?:.*-)?(?:request|correlation|trace|span|session|chat|conversation|thread|message)-?id"
    r"|traceparent|tracestate|baggage|b3|x-b3-.*|cf-ray|x-cloud-trace-context|idempotency-key"
    r"|(?:accept|content|if|sec|access-control|proxy|x-stainless|x-sparks|anthropic|openai)-.*"
    r"|accept|age|allow|cache-control|connection|date|dnt|etag|expect|expires|host|keep-alive"
    r"|max-forwards|origin|pragma|priority|range|referer|server|te|trailer|transfer-encoding"
    r"|upgrade|upgrade-insecure-requests|user-agent|vary|via|warning"
    r"|forwarded|x-forwarded-(?:for|host|port|prefix|proto|scheme|server|ssl)|x-requested-with",
    re.IGNORECASE,
)
LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "active",
    "tokens_per_day",
    "tokens_per_month",
    "models",
    "expires",
    "reasoning_field",
    "keepalive_form",
    "share",
    "batch",
    "trusts",
    "trusts_values",
)
FLAGS = ("batch", "trusts_values")


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
@click.option(
    "--keepalive-form",
    type=click.Choice([*settings.KEEPALIVE_FORMS, "none"]),
    help="What keeps its silent streams alive.",
)
@click.option(
    "--share",
    type=Share(),
    help="The weight of its turns where others wait, 1 to 100; none: 1, as anybody's.",
)
@click.option(
    "--batch/--no-batch",
    default=None,
    help="Its requests are last in turn, and answered when nobody else needs the slots.",
)
@click.option(
    "--trusts",
    type=Header(),
    help="The header in which its program names the person for whom it asks, such as a web UI's"
    " X-OpenWebUI-User-Id: each has turns, limits and figures as if by a key of their own. Whoever"
    " has the key is believed.",
)
@click.option(
    "--trusts-values/--no-trusts-values",
    default=None,
    help="Keep what that header says itself in the ledger, and not a hash of it.",
)
@click.option("--clear", is_flag=True, help="Drop all limits first.")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects instead.")
def limit(name_or_prefix, clear, as_json, **given):
    """Show or set what the keys of a name (or the key with a prefix) may do. Counts from the next
    request on."""
    changes = {name: value for name, value in given.items() if value is not None}
    rows = named(name_or_prefix)
    if "models" in changes:
        changes["models"] = patterns(changes["models"])
    for name, value in changes.items():
        if value in (CLEARED, "none", False):
            changes[name] = None
    if clear:
        changes = {**dict.fromkeys(LIMITS), **changes}
    if "trusts" in changes and not changes["trusts"]:  # a later header is another matter
        changes.setdefault("trusts_values", None)
    revoked = []
    if changes:
        rows, revoked = change(rows, **changes)
    wait_until_seen()
    if as_json:
        dump([limit_facts(row) for row in rows])
    else:
        for row in rows:
            tell(f"{row.name}  {row.prefix}...  {limit_line(row)}")
    tell_revoked(revoked)


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
        "models": row.models and row.models.split(","),
        "expires": iso(row.expires),
        **{name: bool(getattr(row, name)) for name in FLAGS},
    }


def limit_line(row):
    known = {**limit_facts(row), "models": row.models}
    parts = []
    for name in LIMITS:
        words = name.replace("_", " ")
        if name not in FLAGS and known[name] is not None:
            parts.append(f"{words}: {known[name]}")
        elif known[name] is True:
            parts.append(words)
    return "  ".join(parts) or "no limits"


# ---- what was used


def check_known(name):
    """A ClickException for a name that nobody's key has, revoked ones counted."""
    if name and not KeyRow.select().where(KeyRow.name == name).exists():
        raise click.ClickException(f"no key has the name {shortened(name)}; `list` shows all")


@cli.command()
@click.argument("name", required=False)
@click.option("--since", type=click.DateTime(["%Y-%m-%d"]), help="From this day (UTC) on.")
@click.option("--days", type=click.IntRange(1, 36500), help="The last N days.")
@click.option(
    "--by",
    type=click.Choice([*report.COLUMNS]),
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
    first = since and since.date().isoformat()
    if days:
        first = ledger.utc_day(time.time() - (days - 1) * ledger.DAY)
    if plot:
        by = "day"
    check_known(name)
    totals = report.usage(by, name, first)
    if as_json and not plot:
        return dump(totals)
    totals = [{**row, by: printable(row[by])} for row in totals]
    if as_csv and not plot:
        return click.echo(report.as_csv(totals, by), nl=False)
    if not totals:
        hint = ""
        if by == "person":
            hint = " of people behind a key, see `keys limit --help`: --trusts"
        return click.echo(f"no requests{hint} yet", err=True)
    if plot:
        return click.echo(report.plot(totals), nl=False)
    for line in report.table(totals):
        click.echo(line)


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
    check_known(name)
    statuses = status and status_range(status)
    write = report.log_line
    if as_json:
        write = json.dumps
    seen = 0
    while True:
        for request in report.requests(name, statuses, seen, most):
            tell(write(request))
            seen = request["rowid"]
        if not follow:
            return
        most = -1  # all that is new
        time.sleep(0.5)


def status_range(text):
    """The first and the last status that 503 or 5xx means."""
    if len(text) == 3 and text[0] in "12345":
        if text.endswith("xx"):
            least = int(text[0]) * 100
            return least, least + 99
        if text.isdecimal():
            return int(text), int(text)
    raise click.ClickException("--status takes a number such as 503, or a class such as 5xx")


@cli.command()
@click.argument("request_id")
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def show(request_id, as_json):
    """One request, whole: REQUEST-ID is the x-request-id of its answer."""
    found = report.requests_with_id(request_id)
    if not found:
        raise click.ClickException(f"there is no request {request_id[:64]!r} in the ledger")
    if as_json:
        return dump(found)
    for request in found:
        for line in report.all_lines(request):
            tell(line)


if __name__ == "__main__":
    cli(prog_name="keys")
