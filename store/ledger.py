"""The ledger: a row for each request that got past its key, and daily totals, kept for ever. Never a client's own words.

A row is committed before the last byte of its answer leaves. A commit is tried at once, without waiting in the event loop; while
the database is locked or full, rows wait in memory and requests go on being answered.
"""

import logging
import sqlite3
from collections import deque
from datetime import datetime, timezone
from functools import lru_cache
from time import monotonic, time
from typing import NamedTuple

import gevent
import peewee

from store.database import checkpoint, database, is_ours, open_database, Transaction
from errors import SettingsError

logger = logging.getLogger("sparks")
PATIENCE = 0.25  # seconds for which a request waits for a locked database
RETRY = 0.02  # seconds between two tries
MOST_WAITING = 10_000  # rows in memory; beyond it the oldest are lost, and counted
COMPLAIN = 60  # seconds between two log lines about one fault
STEP = 500  # rows written or deleted in one go
MOST_TOKENS = 1 << 40  # of one request; more is no figure, and would break the sums
MINUTE, DAY = 60, 86400  # seconds

FAULTS = (sqlite3.Error, peewee.DatabaseError, OSError)  # of the database: locked, full, gone
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

    @property
    def tokens(self):
        return (self.prompt_tokens or 0) + (self.completion_tokens or 0)


def figures(usage, stream):
    """A Row's tokens as a dict: the engine's own `usage` (a dict, or None), else what came through the stream."""
    usage = usage if isinstance(usage, dict) else {}
    found = {
        "prompt_tokens": whole(usage, "prompt_tokens"),
        "completion_tokens": whole(usage, "completion_tokens"),
        "cached_tokens": whole(usage.get("prompt_tokens_details"), "cached_tokens"),
        "reasoning_tokens": whole(usage.get("completion_tokens_details"), "reasoning_tokens"),
    }
    if found["completion_tokens"] is None and stream is not None and stream.tokens:
        found.update(
            completion_tokens=stream.tokens, reasoning_tokens=stream.thoughts, counted="gateway"
        )
    return {name: value for name, value in found.items() if value is not None}


def whole(table, name):
    value = table.get(name) if isinstance(table, dict) else None
    return (
        value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS
        else None
    )


INSERT = (
    f"INSERT INTO request ({', '.join(Row._fields)}) VALUES ({', '.join('?' * len(Row._fields))})"
)
ADD = (
    f"INSERT INTO day (day, key_id, model, {', '.join(TOTALS)}) VALUES ({', '.join('?' * (3 + len(TOTALS)))}) "
    "ON CONFLICT (day, key_id, model) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in TOTALS)
)


def day_of(moment):
    """The day of an epoch moment, UTC, as 2026-11-29."""
    return day_name(int(moment // DAY))


@lru_cache(8)
def day_name(number):
    return datetime.fromtimestamp(number * DAY, timezone.utc).strftime("%Y-%m-%d")


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


class Ledger:
    """Writes rows. `write(row)` returns when the row is committed, or after PATIENCE if the database does not let it."""

    def __init__(self, settings):
        self.settings, self.waiting, self.lost, self.complained = settings, deque(), 0, -COMPLAIN
        self.troubled = False  # the last try failed

    def write(self, row):
        self.waiting.append(row)
        if len(self.waiting) > MOST_WAITING:
            self.waiting.popleft()
            self.lost += 1
        end = monotonic() + (PATIENCE if len(self.waiting) == 1 else 0)
        while not self.flush() and monotonic() < end:
            gevent.sleep(RETRY)

    def flush(self):
        """Commit what waits, a step of it. Returns whether nothing waits any more."""
        try:
            self.commit(min(STEP, len(self.waiting)))
            self.troubled = False
        except FAULTS as error:
            self.troubled = True
            self.complain(error)
        except Exception:  # one row that cannot be written must not hold up the others
            logger.exception("a row cannot be written")
            self.sift()
        return not self.waiting

    def commit(self, count):
        if count:
            commit([self.waiting[at] for at in range(count)])
        for _ in range(count):
            self.waiting.popleft()

    def sift(self):
        """Commit row by row, and lose those that cannot be written."""
        try:
            for _ in range(min(STEP, len(self.waiting))):
                try:
                    self.commit(1)
                except (ValueError, TypeError, OverflowError):
                    self.waiting.popleft()
                    self.lost += 1
        except FAULTS as error:
            self.complain(error)

    def complain(self, error):
        if monotonic() - self.complained > COMPLAIN and not (
            is_lock(error) and len(self.waiting) < 2
        ):
            self.complained = monotonic()
            logger.error(
                "the ledger cannot be written (%s): %d rows wait in memory, %d were lost",
                error,
                len(self.waiting),
                self.lost,
            )

    # -- upkeep

    def keep_up(self):
        """For ever: commit what waits once a second, checkpoint once a minute, and prune once a day."""
        pruned = checked = -DAY  # by a clock that is never set back
        while True:
            gevent.sleep(0.01 if len(self.waiting) > STEP and not self.troubled else 1)
            self.flush()
            self.stay_with_the_file()
            if monotonic() - checked > MINUTE:
                checked = monotonic()
                self.checkpoint()
            if monotonic() - pruned > DAY and self.prune(time() - self.settings.keep_days * DAY):
                pruned = monotonic()

    def stay_with_the_file(self):
        """Somebody may have put another file in the database's place, a backup for example, or taken it away."""
        try:
            if is_ours(self.settings.db):
                return
            logger.error("another database file has been put in place: it is used from now on")
            database.close()
            open_database(self.settings.db, patient=False)
        except (OSError, SettingsError) as error:
            self.complain(error)

    def checkpoint(self):
        try:
            gevent.get_hub().threadpool.apply(checkpoint, (self.settings.db,))
        except FAULTS as error:
            self.complain(error)

    def prune(self, before):
        """Delete the rows of requests that started before that moment, in small steps. Totals stay. Returns whether all
        are gone."""
        try:
            first, (last, oldest) = 0, self.span(0)
            while last is not None:
                if oldest < before:
                    database.execute_sql(
                        "DELETE FROM request WHERE rowid > ? AND rowid <= ? AND started < ?",
                        (first, last, before),
                    )
                gevent.sleep(0.05 if oldest < before else 0.001)
                first, (last, oldest) = last, self.span(last)
        except peewee.DatabaseError as error:
            self.complain(error)
            return False
        return True

    def span(self, rowid):
        """The last rowid of the next rows after that one, a step of them, and when the oldest started; None if there are none."""
        sql = "SELECT max(rowid), min(started) FROM (SELECT rowid, started FROM request WHERE rowid > ? ORDER BY rowid LIMIT ?)"
        return database.execute_sql(sql, (rowid, STEP)).fetchone()


def is_lock(error):
    return "locked" in str(error)


def commit(rows):
    """Rows and totals in one transaction, with no switch in between."""
    with Transaction() as execute:
        for row in rows:
            execute(INSERT, row)
            execute(ADD, (day_of(row.started), row.key_id, row.model, *totals_of(row)))


# ---- reading


def used_by_key(since):
    """{key id: prompt and completion tokens} from a day on (2026-11-29)."""
    sql = "SELECT key_id, SUM(prompt_tokens + completion_tokens) FROM day WHERE day >= ? GROUP BY key_id"
    return dict(database.execute_sql(sql, (since,)).fetchall())


def usage(group, key_ids=None, since=None):
    """Totals as a list of dicts, by `group` (columns of the day table: key_id, day, model)."""
    where, values = ["1"], []
    if key_ids is not None:
        where.append(f"key_id IN ({', '.join('?' * len(key_ids))})")
        values += key_ids
    if since:
        where.append("day >= ?")
        values.append(since)
    names, by = [*group, *TOTALS], ", ".join(group)
    columns = ", ".join([*group, *(f"SUM({name})" for name in TOTALS)])
    sql = f"SELECT {columns} FROM day WHERE {' AND '.join(where)} GROUP BY {by} ORDER BY {by}"
    return [dict(zip(names, row)) for row in database.execute_sql(sql, values).fetchall()]


def total(key_id, since=None):
    """One key's totals, all zero if it has none."""
    found = usage(["key_id"], [key_id], since)
    return {name: found[0][name] if found else 0 for name in TOTALS}


def rows(where="1", values=(), most=20):
    """The newest rows that fit, as dicts with their key's name, newest last."""
    names = ["rowid", *Row._fields, "key"]
    columns = [*(f"request.{name}" for name in names[:-1]), "key.name"]
    sql = (
        f"SELECT {', '.join(columns)} FROM request LEFT JOIN key ON key.id = request.key_id WHERE {where} "
        "ORDER BY request.rowid DESC LIMIT ?"
    )
    found = database.execute_sql(sql, (*values, most)).fetchall()
    return [dict(zip(names, row)) for row in reversed(found)]
