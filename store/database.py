"""The database file: one connection, and the migrations that bring an old file up to date.

All greenlets of the process share the connection: nothing may switch inside a transaction.
"""

import os
import sqlite3
import stat
from contextlib import closing
from types import SimpleNamespace

import peewee

from errors import SettingsError

PAGE = 1024  # bytes, of a new file: a row of the ledger touches two, and each is logged whole
MAGIC = b"SQLite format 3\0"  # how a file begins that is not empty: sqlite.org/fileformat.html, 1.3
database = peewee.SqliteDatabase(None, thread_safe=False)
opened = SimpleNamespace(file=None)  # which file the connection has


def open_database(path, patient=True):
    """Open the file, made with mode 0600 if there is none, and bring it up to date.

    Unless `patient`, later calls never wait inside SQLite: neither for another process's lock nor
    for a checkpoint, which `checkpoint` makes instead. Raises SettingsError with one line.
    """
    try:
        refuse_other_files(path)
        os.chmod(path, 0o600)
        database.init(
            str(path),
            pragmas={
                "page_size": PAGE,
                "journal_mode": "wal",
                "synchronous": "normal",
                "busy_timeout": 5000,
            },
            check_same_thread=False,
        )
        database.connect(reuse_if_open=True)
        migrate()
        opened.file = identity(path)
        if not patient:
            database.execute_sql("PRAGMA busy_timeout = 0")
            database.execute_sql("PRAGMA wal_autocheckpoint = 0")
    except (OSError, peewee.PeeweeException, sqlite3.Error) as error:
        if not database.deferred:
            database.close()
        raise SettingsError(f"SPARKS_DB: {path} cannot be used: {error}") from None


def refuse_other_files(path):
    """OSError for what is no SQLite database, before its mode is changed or anything written."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "rb") as file:
        is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        if not is_regular or file.read(len(MAGIC)) not in (b"", MAGIC):
            raise OSError("it is no SQLite database")


def identity(path):
    found = os.stat(path)
    return found.st_dev, found.st_ino


def is_ours(path):
    """Whether the file at `path` is still the one that was opened. OSError if there is none."""
    return identity(path) == opened.file


def checkpoint(path):
    """Bring what the write-ahead log holds into the file.

    Runs in a thread, on a connection of its own, because it waits for the disk.
    """
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


class Transaction:
    """Takes the write lock at once, or fails at once; gives a function to execute SQL with.

    peewee's own transaction hides that a disk is full: its rollback fails, because SQLite has
    already rolled back. It also costs a quarter of a ledger row.
    """

    def __enter__(self):
        self.connection = database.connection()
        self.connection.execute("BEGIN IMMEDIATE")
        return self.connection.execute

    def __exit__(self, error_type, error, traceback):
        try:
            if error is None:
                self.connection.execute("COMMIT")
        finally:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")


# ---- migrations: in order, for ever; an old file goes through those it lacks, by their names


def first_keys():
    yield """
        CREATE TABLE IF NOT EXISTS key (
            id INTEGER PRIMARY KEY,
            name TEXT NOT NULL,
            prefix TEXT NOT NULL,
            digest TEXT NOT NULL UNIQUE,
            created DATETIME NOT NULL,
            revoked DATETIME
        )"""


def limits():
    """What `keys limit` sets, and whether a key may read /metrics from elsewhere."""
    for column in (
        "requests_per_minute INTEGER",
        "tokens_per_minute INTEGER",
        "active INTEGER",
        "tokens_per_day INTEGER",
        "tokens_per_month INTEGER",
        "models TEXT",
        "expires DATETIME",
        "reasoning_field TEXT",
        "admin INTEGER NOT NULL DEFAULT 0",
    ):
        yield f"ALTER TABLE key ADD COLUMN {column}"


def first_ledger():
    """A row for each request (store.ledger.Row), and the totals of each day, key and model."""
    yield """
        CREATE TABLE request (
            id TEXT NOT NULL,
            key_id INTEGER NOT NULL,
            model TEXT NOT NULL,
            engine TEXT NOT NULL,
            route TEXT NOT NULL,
            started REAL NOT NULL,
            queued_ms INTEGER,
            first_ms INTEGER,
            total_ms INTEGER NOT NULL,
            status INTEGER NOT NULL,
            error TEXT,
            streamed INTEGER NOT NULL,
            aborted INTEGER NOT NULL,
            truncated INTEGER NOT NULL,
            prompt_tokens INTEGER,
            cached_tokens INTEGER,
            completion_tokens INTEGER,
            reasoning_tokens INTEGER,
            counted TEXT NOT NULL
        )"""
    yield "CREATE INDEX request_started ON request (started)"
    yield "CREATE INDEX request_id ON request (id)"
    yield """
        CREATE TABLE day (
            day TEXT NOT NULL,
            key_id INTEGER NOT NULL,
            model TEXT NOT NULL,
            requests INTEGER NOT NULL,
            ok INTEGER NOT NULL,
            errors INTEGER NOT NULL,
            aborted INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            reasoning_tokens INTEGER NOT NULL,
            PRIMARY KEY (day, key_id, model)
        ) WITHOUT ROWID"""


def first_seal():
    yield "CREATE TABLE secret (name TEXT PRIMARY KEY, value BLOB NOT NULL)"
    yield f"INSERT INTO secret (name, value) VALUES ('seal', X'{os.urandom(32).hex()}')"


def ledger_without_indexes():
    """Each request had to write a page of each index, for nobody but the owner's commands.

    These can read all rows.
    """
    yield "DROP INDEX IF EXISTS request_started"
    yield "DROP INDEX IF EXISTS request_id"


def keepalive_form():
    """What keeps a key's silent streams alive."""
    yield "ALTER TABLE key ADD COLUMN keepalive_form TEXT"


MIGRATIONS = [first_keys, limits, first_ledger, first_seal, ledger_without_indexes, keepalive_form]


def migrate():
    if not pending():  # the usual case needs no lock
        return
    with Transaction():
        database.execute_sql("CREATE TABLE IF NOT EXISTS migration (name TEXT PRIMARY KEY)")
        for step in pending():
            for sql in step():
                database.execute_sql(sql)
            database.execute_sql("INSERT INTO migration (name) VALUES (?)", (step.__name__,))


def pending():
    """The migrations that the file lacks."""
    if not database.table_exists("migration"):
        return MIGRATIONS
    done = {name for (name,) in database.execute_sql("SELECT name FROM migration").fetchall()}
    return [step for step in MIGRATIONS if step.__name__ not in done]
