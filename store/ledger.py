"""The ledger: a row for each request that got past its key, and daily totals, kept for ever.

A client's own words never get into it. A row is committed before the last byte of its answer
leaves. The commit is tried at once and never waits inside SQLite, which would stop the event loop;
while the database is locked or full, rows wait in memory and requests are answered all the same.
"""

import logging
import os
import sqlite3
from collections import deque
from datetime import date, timedelta
from functools import lru_cache
from time import monotonic, time
from typing import NamedTuple

import gevent
from gevent.lock import BoundedSemaphore

from errors import SettingsError
from store.database import (
    FAULTS,
    Transaction,
    check_place,
    check_whole,
    checkpoint,
    database,
    is_ours,
    open_database,
)
from store.file import ADVICE, Unusable, identity

logger = logging.getLogger("sparks")
PATIENCE = 0.25  # seconds for which a request waits for a locked database
RETRY = 0.02  # seconds between two tries
LAST = 3  # seconds for the rows that wait when the process ends
MOST_WAITING = 10_000  # rows in memory; beyond it the oldest are lost, and counted
COMPLAIN = 60  # seconds between two log lines about one fault
STEP = 500  # rows written or deleted in one go
MINUTE = 60  # seconds
DAY = 86400
MONTH = 31 * DAY
NEVER = "9999-12-31"  # a day after all others
PRUNE = DAY / 2  # seconds between two times when old rows are deleted

TOTALS = (
    "requests",
    "ok",
    "errors",
    "aborted",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
)


class Row(NamedTuple):
    """One request. Times in epoch seconds or milliseconds; None is unknown or does not apply."""

    id: str  # x-request-id
    key_id: int
    model: str  # the public id; empty if none was found
    engine: str  # its address; empty if it was not reached
    route: str
    started: float
    queued_ms: int | None
    first_ms: int | None  # to the first token
    total_ms: int
    status: int  # 499: the client left
    error: str | None  # the code of the refusal
    streamed: bool
    aborted: bool
    truncated: bool  # the engine broke off
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    counted: str = "engine"  # whose figures the tokens are: the engine's, or "gateway"
    person: str = ""  # of those behind the key, or nobody in particular

    @property
    def tokens(self):
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)


# ---- writing a row

INSERT = (
    f"INSERT INTO request ({', '.join(Row._fields)}) VALUES ({', '.join('?' * len(Row._fields))})"
)
ADD = (
    f"INSERT INTO day (day, key_id, model, {', '.join(TOTALS)}) "
    f"VALUES ({', '.join('?' * (3 + len(TOTALS)))}) "
    "ON CONFLICT (day, key_id, model) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in TOTALS)
)
ADD_OF_PERSON = ADD.replace("day (day, key_id, model", "person_day (day, key_id, person").replace(
    "(day, key_id, model)", "(day, key_id, person)"
)


class UnfitRow(Exception):
    """SQLite cannot keep a row, whatever the database's state. The text has none of its words."""


def commit(rows):
    """Rows and totals in one transaction, with no switch in between.

    Raises UnfitRow if one of the rows can never be kept, and what SQLite raises for anything else.
    """
    check_place()
    with Transaction() as execute:
        for row in rows:
            try:
                day = utc_day(row.started)
                execute(INSERT, row)
                execute(ADD, (day, row.key_id, row.model, *totals_of(row)))
                if row.person:
                    execute(ADD_OF_PERSON, (day, row.key_id, row.person, *totals_of(row)))
            except Exception as error:
                if is_of_database(error):
                    raise
                # Not `from error`: a UnicodeEncodeError says which characters it could not encode.
                raise UnfitRow(type(error).__name__) from None


def is_of_database(error):
    """Whether an insert failed because of the database, and the same row may fit in later.

    sqlite3 has OperationalError for what is locked, full, gone or cannot be read, and DatabaseError
    itself for a damaged file. The other classes below it, and Python's own errors, say that a value
    cannot be bound or breaks a constraint (NaN is NULL to SQLite), which is the row's fault.
    """
    if type(error) is sqlite3.DatabaseError:
        return True
    return isinstance(
        error,
        (
            sqlite3.OperationalError,
            sqlite3.InternalError,
            sqlite3.NotSupportedError,
            OSError,
            MemoryError,
        ),
    )


def utc_day(epoch):
    """The day of an epoch moment, UTC, as 2026-11-29."""
    return day_name(int(epoch // DAY))


@lru_cache(8)
def day_name(number):
    return (date(1970, 1, 1) + timedelta(days=number)).isoformat()


def totals_of(row):
    """A row's share in its day's totals, in the order of TOTALS."""
    ok = row.status < 400
    return (
        1,
        int(ok),
        int(not ok and not row.aborted),
        int(row.aborted),
        row.prompt_tokens or 0,
        row.cached_tokens or 0,
        row.completion_tokens or 0,
        row.reasoning_tokens or 0,
    )


def is_lock(error):
    return "locked" in str(error)


def in_thread(step, *arguments):
    """Do a step in a thread. Its error is raised here; the pool would log it as well."""
    error = gevent.get_hub().threadpool.apply(error_of, (step, *arguments))
    if error:
        raise error


def error_of(step, *arguments):
    """The exception that a step ends with, or None."""
    try:
        step(*arguments)
    except Exception as error:
        return error
    return None


class Ledger:
    """Writes rows, and keeps the file in order.

    waiting   rows that are not committed yet, oldest first
    lost      how many were given up: too many waited, or SQLite could not keep them
    troubled  whether the last commit failed
    astray    that was because another file lies in the database's place
    moving    a lock for who opens that file, or is in the midst of a checkpoint
    refused   (identity of a damaged file, why it cannot be used): it is not read again
    """

    def __init__(self, settings):
        """`settings`: db and keep_days."""
        self.settings = settings
        self.waiting = deque()
        self.lost = 0
        self.troubled = False
        self.astray = False
        self.moving = BoundedSemaphore(1)
        self.refused = None, None
        self.logged = {}  # fault -> when it was logged last
        self.checked = -DAY  # when, by a clock that is never set back
        self.pruned = -DAY
        self.trusted = None  # see `trust_the_clock`

    def write(self, row):
        """Returns when the row is committed, or after PATIENCE if the database does not let it."""
        self.waiting.append(row)
        if len(self.waiting) > MOST_WAITING:
            self.waiting.popleft()
            self.lost += 1
        if self.attempt(self.flush):
            return
        if self.astray:
            gevent.spawn(self.attempt, self.stay_with_the_file)
        end = monotonic()
        if len(self.waiting) == 1:  # behind others that wait, more patience would be wasted
            end += PATIENCE
        while not self.attempt(self.flush) and monotonic() < end:
            gevent.sleep(RETRY)

    def flush(self):
        """Commit what waits, a step of it. Returns whether nothing waits any more."""
        self.troubled = True  # until it has gone well
        try:
            self.commit_step()
            self.troubled = False
        except FAULTS as error:
            self.astray = isinstance(error, Unusable)
            self.complain(error)
        return not self.waiting

    def commit_step(self):
        """Commit the oldest rows at once, or one by one without those that cannot be kept."""
        count = min(STEP, len(self.waiting))
        try:
            self.commit(count)
        except UnfitRow:
            for _ in range(count):
                self.commit_or_lose()

    def commit(self, count):
        if count:
            commit([self.waiting[at] for at in range(count)])
        for _ in range(count):
            self.waiting.popleft()

    def commit_or_lose(self):
        try:
            self.commit(1)
        except UnfitRow as error:
            self.waiting.popleft()
            self.lost += 1
            if self.is_news(f"row: {error}"):
                logger.error(
                    "a row of the ledger cannot be kept (%s): %d were lost", error, self.lost
                )

    def complain(self, error):
        """Log a fault of the database. A lock that a single row waits for is about to pass."""
        if is_lock(error) and len(self.waiting) < 2:
            return
        if self.is_news("database"):
            logger.error(
                "the ledger cannot be written (%s): %d rows wait in memory, %d were lost",
                error,
                len(self.waiting),
                self.lost,
            )

    def is_news(self, fault):
        """Whether this fault should be logged, since its last line is COMPLAIN seconds old."""
        now = monotonic()
        if fault in self.logged and now - self.logged[fault] <= COMPLAIN:
            return False
        self.logged[fault] = now
        return True

    def finish(self):
        """Before the process ends: commit what waits, as far as the database lets it."""
        end = monotonic() + LAST
        while not self.attempt(self.flush) and monotonic() < end:
            gevent.sleep(RETRY)
        if self.waiting:
            logger.error("%d rows of the ledger are lost with the process", len(self.waiting))

    # -- upkeep

    def keep_up(self):
        """For ever: commit what waits each second, checkpoint each minute, prune twice a day."""
        pause = 1
        while True:
            gevent.sleep(pause)
            try:
                self.keep_up_once()
                pause = self.pause()
            except Exception:  # which only a fault in `attempt` itself can be
                logger.exception("the ledger's upkeep failed; it goes on")

    def keep_up_once(self):
        """A round of the upkeep. Its steps don't hinder each other."""
        self.attempt(self.flush)
        self.attempt(self.stay_with_the_file)
        is_due = monotonic() - self.pruned > PRUNE
        if is_due:
            self.trusted = self.attempt(self.trust_the_clock)
        if monotonic() - self.checked > MINUTE and self.attempt(self.checkpoint):
            self.checked = monotonic()
        if is_due and self.trusted and self.attempt(self.prune_old):
            self.pruned = monotonic()

    def attempt(self, step):
        """What the step returns, or None if it fails: that is logged, and the caller goes on."""
        try:
            return step()
        except Exception as error:
            if self.is_news((step.__name__, type(error))):
                logger.exception("the ledger's %s failed; it will be tried again", step.__name__)
            return None

    def pause(self):
        """Seconds to the next round of the upkeep: a long backlog is written without delay."""
        if len(self.waiting) > STEP and not self.troubled:
            return 0.01
        return 1

    def stay_with_the_file(self):
        """Open the database anew if another file, perhaps a backup, was put in its place. One that
        cannot be used is left alone: the keys in memory count on, and rows wait."""
        try:
            with self.moving:
                if not is_ours():
                    self.take_over()
        except (OSError, SettingsError) as error:
            if self.is_news("file"):
                logger.error("%s; keys count as they were, and the ledger's rows wait", error)

    def take_over(self):
        """Go on with the file that lies in place now. Raises SettingsError."""
        if self.is_news("swap"):
            logger.error("another database file has been put in place")
        open_database(self.settings.db, patient=False, alone=True, check=self.check_whole)
        logger.error("it is used from now on")
        self.checked = -DAY  # it may have been locked: backups are alike until they have a stamp
        for said in ("file", "swap"):
            self.logged.pop(said, None)

    def check_whole(self, path):
        """In a thread, since a large file takes seconds."""
        found = identity(path)
        known, why = self.refused
        if found == known:
            raise Unusable(why)
        try:
            if not os.stat(path).st_size:
                raise Unusable(f"it is empty; {ADVICE}")
            in_thread(check_whole, path, 0)
        except Unusable as error:
            self.refused = found, str(error)
            raise

    def checkpoint(self):
        """Returns whether it went well."""
        try:
            with self.moving:
                in_thread(checkpoint)
        except FAULTS as error:
            self.complain(error)
            return False
        return True

    def prune_old(self):
        before = self.trusted - self.settings.keep_days * DAY
        return self.prune(before) and self.prune_people(before)

    def prune_people(self, before):
        """Delete what single people used before that epoch moment, a day of it in one go; but not
        of the last month, which their budgets are about. The keys' totals stay."""
        first = utc_day(min(before, self.trusted - MONTH))
        sql = "SELECT min(day) FROM person_day"
        try:
            while (day := database.execute_sql(sql).fetchone()[0]) and day < first:
                database.execute_sql("DELETE FROM person_day WHERE day = ?", (day,))
                gevent.sleep(0.05)
        except FAULTS as error:
            self.complain(error)
            return False
        return True

    def trust_the_clock(self):
        """The moment from which the age of rows counts: the wall clock's, unless that jumped ahead.
        It may be wrong for a while, and what is deleted stays so.

        It is trusted a day more each time, and twice what it has advanced since then at most: so it
        is caught up with after a long time without a gateway, but not by many starts in a row.
        """
        wall = time()
        try:
            return self.trust(wall)
        except FAULTS as error:
            self.complain(error)
            return None

    def trust(self, wall):
        with Transaction() as execute:
            last = execute("SELECT wall, trusted FROM pruning").fetchone() or self.newest(wall)
            advance = max(0, wall - last[0])
            trusted = min(wall, last[1] + min(2 * advance, DAY))
            execute("DELETE FROM pruning")
            execute("INSERT INTO pruning VALUES (?, ?)", (wall, trusted))
        return trusted

    @staticmethod
    def newest(wall):
        """The moment of the last row, twice; without any the wall clock's."""
        sql = "SELECT started, started FROM request ORDER BY rowid DESC LIMIT 1"
        return database.execute_sql(sql).fetchone() or (wall, wall)

    def prune(self, before):
        """Delete the rows of requests that started before that epoch moment, in small steps.

        Daily totals stay. Returns whether all those rows are gone.
        """
        try:
            first = 0
            last, oldest = self.span(first)
            while last is not None:
                pause = 0.001
                if oldest < before:
                    pause = 0.05
                    sql = "DELETE FROM request WHERE rowid > ? AND rowid <= ? AND started < ?"
                    database.execute_sql(sql, (first, last, before))
                gevent.sleep(pause)
                first = last
                last, oldest = self.span(first)
        except FAULTS as error:
            self.complain(error)
            return False
        return True

    def span(self, rowid):
        """Of the next STEP rows after that one: the last rowid, and when the oldest row started.

        Both are None if there are no more rows.
        """
        sql = (
            "SELECT max(rowid), min(started) FROM "
            "(SELECT rowid, started FROM request WHERE rowid > ? ORDER BY rowid LIMIT ?)"
        )
        return database.execute_sql(sql, (rowid, STEP)).fetchone()


# ---- reading, for the gateway; what the owner's commands read is in store/report.py


def used_by_key(since, until=NEVER):
    """{key id: prompt and completion tokens} from a day (2026-11-29) to another one, without those
    of the people behind it."""
    used = sums_by_key("day", since, until)
    for key_id, tokens in sums_by_key("person_day", since, until).items():
        used[key_id] = used.get(key_id, 0) - tokens
    return used


def sums_by_key(table, since, until):
    sql = (
        f"SELECT key_id, SUM(prompt_tokens + completion_tokens) FROM {table} "
        "WHERE day BETWEEN ? AND ? GROUP BY key_id"
    )
    return dict(database.execute_sql(sql, (since, until)).fetchall())


def used_by_person(key_id, person, day):
    """(tokens of that day, of its month) of a person behind a key."""
    days = [f"{day[:8]}{number:02}" for number in range(1, 32)]  # each is found at once
    sql = (
        "SELECT day, prompt_tokens + completion_tokens FROM person_day "
        f"WHERE day IN ({', '.join('?' * len(days))}) AND key_id = ? AND person = ?"
    )
    used = dict(database.execute_sql(sql, (*days, key_id, person)).fetchall())
    return used.get(day, 0), sum(used.values())


def total(key_id, since="", until=NEVER, person=""):
    """A key's totals as a dict, or those of a person behind it, from a day to another or of all
    time; all zero if there are none."""
    sums = ", ".join(f"COALESCE(SUM({name}), 0)" for name in TOTALS)
    where = "key_id = ? AND day BETWEEN ? AND ?"
    sql = f"SELECT {sums} FROM day WHERE {where}"
    values = [key_id, since, until]
    if person:  # of each day of the key it is found at once, where there may be many others
        days = f"SELECT DISTINCT day FROM day WHERE {where}"
        sql = f"SELECT {sums} FROM person_day WHERE day IN ({days}) AND key_id = ? AND person = ?"
        values += [key_id, person]
    found = database.execute_sql(sql, values).fetchone()
    return dict(zip(TOTALS, found, strict=True))
