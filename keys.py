#!/usr/bin/env python3
"""Personal keys: who may come in. Also the owner's command, `./run.sh keys`.

A key is `sk-sparks-` and random characters; only its SHA-256 and a short prefix are stored.
"""
import os
import sys

HOME = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(HOME, ".venv")

PYTHON = os.path.join(VENV, "bin", "python")

if __name__ == "__main__" and os.path.exists(PYTHON) and os.path.realpath(sys.prefix) != os.path.realpath(VENV):
    os.execv(PYTHON, [PYTHON, os.path.abspath(__file__)] + sys.argv[1:])    # typed with the machine's own Python

try:
    import click
    import peewee
except ImportError:
    if __name__ != "__main__":
        raise
    sys.exit("Sparks is not set up yet: run ./run.sh once, then try again.")

import hashlib
import json
import secrets
from datetime import datetime, timezone
from typing import NamedTuple

import settings as settings_module
from errors import InvalidKey, SettingsError

PREFIX = "sk-sparks-"
RANDOM_BYTES = 32                                       # 43 URL-safe characters
SHOWN = len(PREFIX) + 6                                 # characters of a key that lists may show

database = peewee.SqliteDatabase(None, thread_safe=False)


# ---- the tables

class KeyRow(peewee.Model):
    name = peewee.CharField()
    prefix = peewee.CharField()
    digest = peewee.CharField(unique=True)              # SHA-256 of the key, hexadecimal
    created = peewee.DateTimeField()
    revoked = peewee.DateTimeField(null=True)

    class Meta:
        database = database
        table_name = "key"


class Migration(peewee.Model):
    name = peewee.CharField(unique=True)

    class Meta:
        database = database


def first_keys():
    database.create_tables([KeyRow])


MIGRATIONS = [first_keys]                               # in order, for ever: an old file goes through those it lacks


def open_database(path):
    """Open the database file (made with mode 0600), brought up to date. Raises SettingsError with one line."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb") as file:
            if file.read(16) not in (b"", b"SQLite format 3\0"):
                raise OSError("it is no SQLite database")
        os.chmod(path, 0o600)
        database.init(str(path), pragmas={"journal_mode": "wal", "synchronous": "normal", "busy_timeout": 5000},
                      check_same_thread=False)
        database.connect(reuse_if_open=True)
        with database.atomic("IMMEDIATE"):
            database.create_tables([Migration])
            done = {row.name for row in Migration.select()}
            for step in MIGRATIONS:
                if step.__name__ not in done:
                    step()
                    Migration.create(name=step.__name__)
    except (OSError, peewee.PeeweeException) as error:
        if not database.deferred:
            database.close()
        raise SettingsError(f"SPARKS_DB: {path} cannot be used: {error}") from None


# ---- keys for the gateway

class Key(NamedTuple):
    """A valid key as the gateway knows it."""
    id: int
    name: str


class Keyring:
    """The valid keys in memory, read again whenever another process has changed the database."""

    def __init__(self):
        self.version, self.keys = None, {}

    def check(self, authorization, x_api_key):
        """The Key of a request's headers (strings, or None). Raises InvalidKey."""
        given = credentials(authorization, x_api_key)
        if not given:
            raise InvalidKey("no API key: send it as 'Authorization: Bearer sk-sparks-...' or in 'x-api-key'")
        if len(given) > 1:
            raise InvalidKey("several different API keys: send one")
        self.refresh()
        key = self.keys.get(digest(given.pop()))        # a hash gives nothing away by the time it takes to look up
        if key is None:
            raise InvalidKey("this API key is wrong or was revoked; ask the operator for a new one")
        return key

    def refresh(self):
        version = database.execute_sql("PRAGMA data_version").fetchone()
        if version != self.version:
            rows = KeyRow.select().where(KeyRow.revoked.is_null())
            self.keys = {row.digest: Key(row.id, row.name) for row in rows}
            self.version = version


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


def add_key(name):
    """Make a key and return it; it is shown this once and never again."""
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    KeyRow.create(name=name, prefix=key[:SHOWN], digest=digest(key), created=now())
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
    return {"name": row.name, "prefix": row.prefix, "created": iso(row.created), "revoked": iso(row.revoked)}


def iso(moment):
    return moment and moment.isoformat(timespec="seconds") + "Z"


def checked_name(name):
    name = name.strip()
    if not 1 <= len(name) <= 64 or not name.isprintable():      # what is printed must not move the terminal's cursor
        raise click.ClickException("a name has 1 to 64 printable characters")
    return name


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli():
    """Keys for the people who share this gateway. Works while the gateway runs; changes count at once.

    \b
    ./run.sh keys add alice          a key for alice, shown once
    ./run.sh keys list               who has keys
    ./run.sh keys revoke alice       alice's keys stop working with the next request
    """
    try:
        open_database(settings_module.load(warn=lambda line: None).db)
    except SettingsError as error:
        raise click.ClickException(str(error)) from None


@cli.command()
@click.argument("name")
@click.option("--again", is_flag=True, help="Make another key though NAME has one already.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def add(name, again, as_json):
    """Make a key for NAME and print it, this once, as the last line."""
    name = checked_name(name)
    if not again and active(KeyRow.name == name).exists():
        raise click.ClickException(f"{name} has a key already; --again makes another, `revoke {name}` ends the old one")
    key = add_key(name)
    click.echo(f"A key for {name}. It is shown this once: hand it over by a safe way. In a shell:\n"
               f"  export SPARKS_API_KEY={PREFIX}...   (the key below)", err=True)
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
@click.option("--json", "as_json", is_flag=True, help="Print the revoked keys as a list of objects.")
def revoke(name_or_prefix, as_json):
    """End all keys of a name, or the one key with a prefix as `list` shows it."""
    wanted = name_or_prefix.strip()
    rows = (list(active(KeyRow.name == wanted)) or with_prefix(wanted.rstrip("."))) if wanted.isprintable() else []
    if not rows:
        raise click.ClickException(f"no active key has the name or prefix {shortened(name_or_prefix)}; `list` shows all")
    for row in rows:
        row.revoked = now()
        row.save()
    if as_json:
        return dump([facts(row) for row in rows])
    for row in rows:
        click.echo(f"revoked {row.prefix}... of {row.name}")


def with_prefix(prefix):
    """The active key that a prefix, or a whole key, names."""
    if not prefix.startswith(PREFIX) or len(prefix) <= len(PREFIX):
        return []
    if len(prefix) > SHOWN:                             # a whole key, pasted
        return list(active(KeyRow.digest == digest(prefix)))
    rows = [row for row in active() if row.prefix.startswith(prefix)]
    if len(rows) > 1:
        raise click.ClickException(f"{len(rows)} active keys begin like that; give more of the prefix")
    return rows


def shortened(text):
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


if __name__ == "__main__":
    cli(prog_name="keys")
