"""The database file: one connection, and the migrations that bring an old file up to date.

All greenlets of the process share the connection: nothing may switch inside a transaction.
"""

import logging
import os
import secrets
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import peewee

from errors import SettingsError
from store import file

logger = logging.getLogger("sparks")
PAGE = 1024  # bytes, of a new file: a row of the ledger touches two, and each is logged whole
PATIENCE = 5000  # milliseconds for another process's lock
HELD = 0.1  # seconds for which a checkpoint waits for readers; nobody can write meanwhile
TABLES = ("key", "request", "day", "person_day", "secret", "pruning", "engine")
database = peewee.SqliteDatabase(None, thread_safe=False)
DATABASE_FAULTS = (peewee.PeeweeException, sqlite3.Error)
FAULTS = (OSError, *DATABASE_FAULTS)


class Opened:
    """The file that the connection has.

    name        as it was given
    path        the same without symbolic links: SQLite's log lies beside that
    descriptor  see store/file.py; None if nothing is open
    stamps      those that it may have now, see file.stamp_of
    seen        its file.identity as of the last look at its stamp; None until there is a connection
    """

    def __init__(self):
        self.name = self.path = None
        self.descriptor = None
        self.stamps = ()
        self.seen = None

    def note(self):
        """Take the file as it is now for what it should be."""
        self.seen = file.identity(self.descriptor)
        self.stamps = (file.stamp_of(self.descriptor),)

    def forget(self):
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.__init__()

    def is_in_place(self):
        """Whether its name leads to it, and nobody has written over it. OSError if to nothing."""
        if self.seen is None:
            return False
        found = file.identity(self.name)
        if found != self.seen:
            if self.was_moved() or self.was_overwritten():
                return False
            self.seen = found  # changed by a checkpoint, perhaps another program's
        return True

    def was_moved(self):
        with suppress(OSError):
            return not os.path.samestat(os.stat(self.name), os.fstat(self.descriptor))
        return True

    def was_overwritten(self):
        """Whether the file itself has a stamp that neither we nor the connection know, or is only a
        part of one, which it is for a moment in a checkpoint of ours."""
        found = file.stamp_of(self.descriptor)
        if len(self.stamps) == 1 and file.is_cut_off(self.descriptor):
            return True
        if found in self.stamps:
            return False
        try:
            return found != stamp_by(database.execute_sql)
        except FAULTS:
            return True


opened = Opened()
whole = set()  # identities of files as they were read and found in order


def stamp_by(execute, cookie=None):
    """A file's stamp as a connection has it, which counts what the log holds; or as it will be with
    another schema cookie."""
    names = ["schema_version", "user_version", "application_id"]
    known, *rest = (execute(f"PRAGMA {name}").fetchone()[0] for name in names)
    if cookie is None:
        cookie = known
    return file.stamp(cookie, *rest)


def open_database(name, patient=True, alone=False, check=None):
    """Open the file, made with mode 0600 if there is none, and bring it up to date.

    patient  wait inside SQLite for another process's lock, now and later
    alone    for a gateway: no other one may have the file, under whatever name
    check    check_whole, or a function that calls it: read all of the file first
    Raises SettingsError with one line.
    """
    path = Path(os.path.realpath(name))
    try:
        take_up(name, path, alone)
        if check:
            check(path)
        connect(path, PATIENCE if patient else 0)
        if alone:  # and will serve on it
            for table in TABLES:
                database.execute_sql(f"SELECT * FROM {table} LIMIT 0")
    except FAULTS as error:
        let_go()
        raise SettingsError(f"SPARKS_DB: {path} cannot be used: {advised(error)}") from None


def take_up(name, path, alone):
    """Make sure of a file before SQLite sees it."""
    let_go()
    opened.name = name
    opened.path = path
    opened.descriptor, is_new = file.open_file(path)
    if alone and not file.locked(opened.descriptor, file.IN_USE):
        raise file.Unusable("a gateway runs on it already")
    with file.in_hand(opened.descriptor):
        has_log = os.path.exists(file.beside(path, "-wal"))
        if has_log and (is_new or not file.has_own_log(path, opened.descriptor)):
            aside = file.set_aside(path)
            logger.error("the log beside %s was another file's: it is %s now", path, aside)


def check_whole(path, patience=PATIENCE):
    """Raises Unusable for a file that is damaged.

    It is read on a connection of its own, which takes a second for a million rows; and not again by
    this process or its worker as long as it is unchanged.
    """
    if not file.size_of(path) or file.identity(path) in whole:
        return
    try:
        with closing(sqlite3.connect(path, patience / 1000)) as connection:
            ((said,),) = connection.execute("PRAGMA quick_check(1)").fetchall()
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        said = error
    if str(said) != "ok":
        raise file.Unusable(f"it is damaged ({' '.join(str(said).split())}); {file.ADVICE}")
    whole.add(file.identity(path))


def advised(error):
    """What SQLite says of a file, with what to do where it is damaged."""
    if "malformed" in str(error) and file.ADVICE not in str(error):
        return f"{error}; {file.ADVICE}"
    return error


def connect(path, patience):
    """Connect to the file that was taken up, bring it up to date, and mark its log."""
    database.init(
        str(path),
        pragmas={
            "page_size": PAGE,
            "journal_mode": "wal",
            "synchronous": "normal",
            "busy_timeout": patience,
            "wal_autocheckpoint": 0,
        },
        timeout=patience / 1000,
        check_same_thread=False,
    )
    database.connect()
    if opened.was_moved():
        raise file.Unusable("it was replaced in this moment; try again")
    if pending():  # the usual case needs no lock
        file.unmark_log(path)  # until the log is in the file, that has either schema
        migrate()
    opened.note()
    if file.marks_of_log(path) is None:
        database.execute_sql("PRAGMA busy_timeout = 0")
        with suppress(peewee.PeeweeException):  # it is locked, or the disk is full: no mark yet
            begin_log(database.execute_sql)
        database.execute_sql(f"PRAGMA busy_timeout = {patience}")


def never_wait():
    """From now on nothing waits inside SQLite for another process's lock."""
    database.execute_sql("PRAGMA busy_timeout = 0")


def let_go():
    """Close what is open; until the next `open_database` nothing connects."""
    if not database.deferred:
        if not database.is_closed():
            close()
        database.init(None)
    opened.forget()


def close():
    """Close the connection, but never bring its log into a file that it isn't of."""
    if opened.was_moved():
        # That file gets its last rows, wherever it is now, without a wait for the disk.
        with suppress(peewee.PeeweeException):
            database.execute_sql("PRAGMA synchronous = OFF")
            database.execute_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        database.close()
    elif opened.was_overwritten():
        with file.read_lock(opened.descriptor):
            database.close()
    else:
        database.close()


def is_ours():
    """Whether the file at the path is still the one that was opened. OSError if there is none."""
    return opened.is_in_place()


def check_place():
    """OSError unless what is written now would be in the file at the path."""
    if not opened.is_in_place():
        raise file.Unusable("another file lies in its place")


def checkpoint():
    """Bring what the write-ahead log holds into the file, with a new stamp.

    Runs in a thread, on a connection of its own, because it waits for the disk.
    """
    if is_ours() and has_log_to_begin(opened.path):
        with closing(sqlite3.connect(opened.path, HELD)) as connection:
            if is_ours():  # so that is the file which the connection has
                begin_log(connection.execute)


def has_log_to_begin(path):
    return file.size_of(file.beside(path, "-wal")) or file.marks_of_log(path) is None


def begin_log(execute):
    """Empty the log into the file. That gets a new stamp, and the log is marked with it: what was
    copied of the file before has another one."""
    path = opened.path
    execute("PRAGMA wal_autocheckpoint = 0")  # a file never has a stamp that its log is without
    if len(opened.stamps) == 1:  # else the last one is still in the log alone
        # SQLite's own copies of a file have another one; all that it does is to be unlike the last.
        cookie = secrets.randbits(31)
        opened.stamps += (stamp_by(execute, cookie),)
        file.mark_log(path, opened.descriptor, *opened.stamps)
        execute(f"PRAGMA schema_version = {cookie}")
    execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    if file.stamp_of(opened.descriptor) == opened.stamps[-1]:
        opened.stamps = opened.stamps[-1:]
        file.mark_log(path, opened.descriptor, *opened.stamps)


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


def pruning():
    """What the clock said when old rows were deleted last, and what of that was trusted."""
    yield "CREATE TABLE pruning (wall REAL NOT NULL, trusted REAL NOT NULL)"


def engine_states():
    """How each engine is (store.states.State)."""
    yield """
        CREATE TABLE engine (
            engine TEXT NOT NULL,
            word TEXT NOT NULL,
            reason TEXT,
            since REAL NOT NULL,
            error TEXT,
            about TEXT NOT NULL
        )"""


def engine_lists():
    """What each engine had when it was last looked at."""
    yield "ALTER TABLE engine ADD COLUMN purpose TEXT NOT NULL DEFAULT 'chat'"
    yield "ALTER TABLE engine ADD COLUMN listed TEXT NOT NULL DEFAULT '[]'"


def shares():
    """Whose turn is how long, who is last in turn, and whose header names people."""
    yield "ALTER TABLE key ADD COLUMN share INTEGER"
    yield "ALTER TABLE key ADD COLUMN batch INTEGER"
    yield "ALTER TABLE key ADD COLUMN trusts TEXT"
    yield "ALTER TABLE key ADD COLUMN trusts_values INTEGER"


def people():
    """Who of the people behind a key asked, what each has used on each day, and the key of the
    hashes that they are known by.

    A table of its own: that of all days may be large, and a gateway that still runs writes to it.
    """
    yield "ALTER TABLE request ADD COLUMN person TEXT NOT NULL DEFAULT ''"
    yield """
        CREATE TABLE person_day (
            day TEXT NOT NULL,
            key_id INTEGER NOT NULL,
            person TEXT NOT NULL,
            requests INTEGER NOT NULL,
            ok INTEGER NOT NULL,
            errors INTEGER NOT NULL,
            aborted INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            completion_tokens INTEGER NOT NULL,
            reasoning_tokens INTEGER NOT NULL,
            PRIMARY KEY (day, key_id, person)
        ) WITHOUT ROWID"""
    yield f"INSERT INTO secret (name, value) VALUES ('people', X'{os.urandom(32).hex()}')"


MIGRATIONS = [
    first_keys,
    limits,
    first_ledger,
    first_seal,
    ledger_without_indexes,
    keepalive_form,
    pruning,
    engine_states,
    engine_lists,
    shares,
    people,
]


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
