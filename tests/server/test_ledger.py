"""The ledger: what a row holds, when it is there, and that neither a lock, a full disk nor kill -9 costs one."""
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from itertools import count, pairwise
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from click.testing import CliRunner

import keys
from admission import Gate
from counting import token_count
from gateway import Gateway
from people import People
from store import ledger
from store.database import database, open_database
from store.ledger import DAY, Ledger, Row
from support import ROOT
from support.client import Truncated
from support.engine import (
    Engine,
    Head,
    Json,
    Pause,
    chat_chunks,
    completion,
    died,
    embeddings,
    refusal,
    text_chunks,
    text_completion,
)
from support.gateway import started
from support.observe import gauge, idle, worker
from support.processes import WITH_US, clean_environment, wait_until
from support.rows import days, read, row_now, row_of, rows, sums

MODEL, ROUTE = "GLM-5.3-Flash-EXL3", "POST /v1/chat/completions"
NOON = 1_798_804_800.0                              # 2027-01-01 12:00 UTC
IDS = count()


def row(n=0, **fields):
    """A row of a request that went well."""
    given = {"id": f"request-{n}", "key_id": 1, "model": MODEL, "engine": "http://127.0.0.1:8000", "route": ROUTE,
             "started": NOON + n, "queued_ms": 3, "first_ms": 120, "total_ms": 2000, "status": 200, "error": None,
             "streamed": True, "aborted": False, "truncated": False,
             "prompt_tokens": 1000, "cached_tokens": 600, "completion_tokens": 50, "reasoning_tokens": 20}
    return Row(**{**given, **fields})


# ---- pure

@pytest.mark.parametrize("fields, found", [
    ({}, (1, 1, 0, 0, 1000, 600, 50, 20)),
    ({"status": 499, "aborted": True, "prompt_tokens": None, "cached_tokens": None}, (1, 0, 0, 1, 0, 0, 50, 20)),
    ({"status": 502, "error": "upstream_error", "completion_tokens": None, "reasoning_tokens": None},
     (1, 0, 1, 0, 1000, 600, 0, 0)),
    ({"status": 404, "prompt_tokens": None, "cached_tokens": None, "completion_tokens": None, "reasoning_tokens": None},
     (1, 0, 1, 0, 0, 0, 0, 0)),
])
def test_totals_of(fields, found):
    assert ledger.totals_of(row(**fields)) == found


@pytest.mark.parametrize("moment, day", [(0, "1970-01-01"), (NOON, "2027-01-01"), (NOON + 43_199.999, "2027-01-01"),
                                         (NOON + 43_200, "2027-01-02")])
def test_days_are_utc(moment, day):
    assert ledger.utc_day(moment) == day


# ---- the database within this process

@pytest.fixture
def db(tmp_path):
    """A database file that is open in this process, and waits for nobody's lock, as in the gateway."""
    path = tmp_path / "sparks.db"
    open_database(path)
    database.execute_sql("PRAGMA busy_timeout = 0")
    yield path
    database.close()


@pytest.fixture
def book(db, monkeypatch):
    """A Ledger that has no patience."""
    monkeypatch.setattr(ledger, "PATIENCE", 0)
    return Ledger(SimpleNamespace(keep_days=90, db=db))


def locked(db, how="IMMEDIATE"):
    """A connection that holds the database's lock until it is closed."""
    connection = sqlite3.connect(db, isolation_level=None)
    connection.execute(f"BEGIN {how}")
    return closing(connection)


def idents(db):
    return [found["id"] for found in rows(db)]


def many(number, seed=1):
    """Rows of all kinds over some days, keys and models."""
    chance = random.Random(seed)
    for n in range(number):
        status = chance.choice([200, 200, 200, 404, 429, 499, 502])
        spent = [chance.choice([None, chance.randrange(100_000)]) for _ in range(4)]
        yield row(n, key_id=chance.randrange(1, 4), model=chance.choice(["", MODEL, "other"]), status=status,
                  started=NOON + chance.uniform(-3, 3) * DAY, aborted=status == 499, prompt_tokens=spent[0],
                  cached_tokens=spent[1], completion_tokens=spent[2], reasoning_tokens=spent[3])


def test_row_is_stored_whole(db, book):
    book.write(row())
    stored, = rows(db)
    assert stored == {**row()._asdict(), "streamed": 1, "aborted": 0, "truncated": 0}


def test_daily_totals_are_the_sums_of_the_rows(db, book):
    for each in many(300):
        book.write(each)
    assert len(rows(db)) == 300 and sums(db) == days(db) and len(days(db)) > 40


def test_rows_wait_while_the_database_is_locked(db, book, caplog):
    with locked(db):
        for n in range(3):
            book.write(row(n))
        assert len(book.waiting) == 3 and idents(db) == []
    assert book.flush() and not book.waiting
    assert idents(db) == ["request-0", "request-1", "request-2"] and sums(db) == days(db)
    assert [record.levelname for record in caplog.records] == ["ERROR"]     # one line, not three


def test_a_lock_that_passes_is_not_worth_a_line(db, monkeypatch, caplog):
    """A request waits for it, for PATIENCE at most."""
    book = Ledger(SimpleNamespace(keep_days=90))
    with locked(db) as connection:
        monkeypatch.setattr(ledger.gevent, "sleep", lambda seconds: connection.rollback())
        book.write(row())
    assert idents(db) == ["request-0"] and not caplog.records


def test_patience_has_an_end(db, monkeypatch):
    book, slept = Ledger(SimpleNamespace(keep_days=90)), []
    monkeypatch.setattr(ledger, "PATIENCE", 0.1)
    monkeypatch.setattr(ledger.gevent, "sleep", lambda seconds: (slept.append(seconds), time.sleep(seconds)))
    with locked(db):
        book.write(row(1))
        once = len(slept)
        book.write(row(2))                          # the next ones do not wait as long again
    assert 1 <= once == len(slept) and len(book.waiting) == 2


def test_memory_is_bounded(db, book, monkeypatch, caplog):
    monkeypatch.setattr(ledger, "MOST_WAITING", 5)
    with locked(db):
        for n in range(12):
            book.write(row(n))
            assert len(book.waiting) <= 5
    assert book.lost == 7 and book.flush()
    assert idents(db) == [f"request-{n}" for n in range(7, 12)] and sums(db) == days(db)


def test_complains_once_a_minute(db, book, monkeypatch, caplog):
    now = SimpleNamespace(moment=1000.0)
    monkeypatch.setattr(ledger, "monotonic", lambda: now.moment)
    with locked(db):
        for n in range(180):                        # one a second, for three minutes
            book.write(row(n))
            now.moment += 1
    assert 2 <= len(caplog.records) <= 3 and all("locked" in record.getMessage() for record in caplog.records)


def test_disk_full_for_real(db, book, caplog):
    """SQLite's own error: the transaction is undone, and what waits lands once."""
    database.execute_sql("PRAGMA max_page_count = 1")       # no less than there are
    written = 0
    while not book.waiting:
        book.write(row(written))
        written += 1
        assert written < 1000
    for n in range(written, written + 20):
        book.write(row(n))
    assert "full" in caplog.records[0].getMessage() and len(caplog.records) == 1
    assert len(rows(db)) + len(book.waiting) == written + 20
    database.execute_sql("PRAGMA max_page_count = 1000000")
    assert book.flush()
    assert idents(db) == [f"request-{n}" for n in range(written + 20)] and sums(db) == days(db)


@pytest.mark.parametrize("at", [0, 5, 9])
@pytest.mark.parametrize("poison", [{"error": "\ud83d"}, {"total_ms": 1 << 70}], ids=["text", "number"])
def test_row_that_cannot_be_written_costs_no_other(db, book, caplog, at, poison):
    with locked(db):
        for n in range(10):
            book.write(row(n, **(poison if n == at else {})))
    for _ in range(12):
        book.flush()
    book.write(row(10))
    assert idents(db) == [f"request-{n}" for n in range(11) if n != at] and sums(db) == days(db)
    assert not book.waiting and book.lost == 1


class Unusable:
    """A type that SQLite knows nothing of."""


BAD_VALUES = ["Secret words \ud83d", 1 << 70, -1 << 70, float("nan"), float("inf"), b"Secret words", None, [1], {"a": 1},
              Unusable()]


@pytest.mark.parametrize("column", Row._fields)
def test_bad_values_of_each_column(db, book, caplog, column):
    """Those that SQLite cannot keep are lost, and counted; the rows around them land once, in order."""
    good = []
    with locked(db):
        for n, value in enumerate(BAD_VALUES):
            good += [f"request-{2 * n}", f"request-{2 * n + 1}"]
            book.write(row(2 * n))
            book.write(row(0, **{"id": f"bad-{n}", "key_id": 3, column: value}))
            book.write(row(2 * n + 1))
    assert book.flush() and book.flush()
    assert [found["id"] for found in rows(db) if str(found["id"]) in good] == good
    assert len(rows(db)) + book.lost == 3 * len(BAD_VALUES) and book.lost >= 3
    assert [sum(day["requests"] for day in days(db) if day["key_id"] == 1)] == [len(good)]
    assert "Secret" not in caplog.text and "ud83d" not in caplog.text


def failing(error, statement, bad="request-2"):
    """A Transaction in which a statement ("request" or "day") of the row with that id raises."""
    class Failing(ledger.Transaction):
        def __enter__(self):
            run, now = super().__enter__(), [None]

            def execute(sql, values):
                if "INTO request" in sql:
                    now[0] = values[0]
                if now[0] == bad and f"INTO {statement}" in sql:
                    raise error
                return run(sql, values)
            return execute
    return Failing


@pytest.mark.parametrize("statement", ["request", "day"])
@pytest.mark.parametrize("error", [
    sqlite3.ProgrammingError("Error binding parameter 3: type 'Unusable' is not supported"),
    sqlite3.InterfaceError("Error binding parameter 0 - probably unsupported type."),
    sqlite3.DataError("string or blob too big"), sqlite3.IntegrityError("NOT NULL constraint failed: request.started"),
    OverflowError("Python int too large to convert to SQLite INTEGER"), UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates"),
    TypeError("unhashable"), ValueError("embedded null"), AttributeError("x"), ZeroDivisionError("x"),
], ids=lambda error: type(error).__name__)
def test_fault_of_a_row_costs_that_row(db, book, monkeypatch, caplog, error, statement):
    monkeypatch.setattr(ledger, "Transaction", failing(error, statement))
    with locked(db):
        for n in range(5):
            book.write(row(n))
    caplog.clear()
    assert book.flush() and not book.troubled
    assert idents(db) == [f"request-{n}" for n in (0, 1, 3, 4)] and sums(db) == days(db) and book.lost == 1
    assert [record.getMessage() for record in caplog.records] == [
        f"a row of the ledger cannot be kept ({type(error).__name__}): 1 were lost"]


@pytest.mark.parametrize("statement", ["request", "day"])
@pytest.mark.parametrize("error", [
    sqlite3.OperationalError("database is locked"), sqlite3.OperationalError("database or disk is full"),
    sqlite3.OperationalError("disk I/O error"), sqlite3.OperationalError("no such table: request"),
    sqlite3.DatabaseError("database disk image is malformed"), sqlite3.InternalError("x"), sqlite3.NotSupportedError("x"),
    OSError(5, "Input/output error"), MemoryError(),
], ids=repr)
def test_fault_of_the_database_costs_no_row(db, book, monkeypatch, error, statement):
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "Transaction", failing(error, statement))
        for n in range(5):
            book.write(row(n))
        assert not book.attempt(book.flush) and len(book.waiting) == 3 and book.troubled
    assert book.flush()
    assert idents(db) == [f"request-{n}" for n in range(5)] and sums(db) == days(db) and book.lost == 0


def test_closed_connection_costs_no_row(db, book):
    """SQLite's word for it is a ProgrammingError, as for a row that cannot be bound."""
    database.connection().close()
    book.write(row(0))
    assert len(book.waiting) == 1 and book.lost == 0
    database.close()
    assert book.flush() and idents(db) == ["request-0"]


def test_fault_that_nobody_expects_costs_no_row(db, book, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "commit", lambda rows: 1 / 0)
        for n in range(3):
            book.write(row(n))
    assert book.flush() and idents(db) == ["request-0", "request-1", "request-2"]
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


def test_a_backlog_is_written_in_steps(db, book, monkeypatch):
    """10,000 rows at once would hold the event loop for 150 ms, at each try."""
    sizes, commit = [], ledger.commit

    def noted(found):
        sizes.append(len(found))
        commit(found)

    monkeypatch.setattr(ledger, "commit", noted)
    with locked(db):
        book.waiting.extend(row(n) for n in range(3000))
        book.flush()
    for _ in range(30):
        book.flush()
    assert not book.waiting and len(rows(db)) == 3000 and max(sizes) <= 1000


def test_huge_figures_stop_no_sum(db, book):
    """An engine that lies about its tokens: every look at the totals still works, the one at the start too."""
    for n in range(4):
        book.write(row(n, model=f"model {n}", prompt_tokens=token_count({"n": (1 << 62) - 1}, "n")))
    assert ledger.used_by_key("2027-01-01")[1] >= 0
    assert ledger.total(1)["requests"] == 4


# ---- upkeep

def test_prune_in_steps(db, book, monkeypatch):
    """Old rows go, a few at a time; daily totals stay for ever."""
    ledger.commit([row(n, started=NOON - n * DAY / 100) for n in range(1000)])
    before, pauses = days(db), []
    monkeypatch.setattr(ledger, "STEP", 100)
    monkeypatch.setattr(ledger.gevent, "sleep", lambda seconds: pauses.append(len(rows(db))))
    book.prune(NOON - 3 * DAY)
    assert len(rows(db)) == 301 and min(found["started"] for found in rows(db)) == NOON - 3 * DAY
    assert max(had - has for had, has in zip([1000, *pauses], pauses, strict=False)) == 100 and days(db) == before


def test_prune_of_people(db, book, monkeypatch):
    """What each of the people behind a key used goes with the rows, but for a month, which their budgets are about."""
    ledger.commit([row(n, started=NOON - n * DAY, person=f"p{n % 2}") for n in range(100)])
    before, pauses = days(db), []
    monkeypatch.setattr(ledger.gevent, "sleep", pauses.append)
    for keep, left in ((90, 91), (7, 32)):
        book.trusted, book.settings.keep_days = NOON, keep
        assert book.prune_old() and len(read(db, "SELECT * FROM person_day")) == left and days(db) == before
    assert max(pauses) == 0.05 and len(pauses) >= 68
    used = ledger.used_by_person(1, "p0", ledger.utc_day(NOON))
    assert used[0] == row(0).tokens <= used[1] and ledger.used_by_person(1, "p2", ledger.utc_day(NOON)) == (0, 0)
    monkeypatch.setattr(ledger, "MONTH", 0)
    with locked(db):
        assert book.prune_people(NOON) is False and book.prune_people(NOON - 100 * DAY)


class Enough(BaseException):
    pass


def at_most(number):
    """A sleep that takes no time, so many times."""
    turns = iter(range(number))

    def sleep(seconds):
        if next(turns, None) is None:
            raise Enough
    return sleep


def test_prune_over_gaps(db, book, monkeypatch):
    """A gap between two rows costs nothing, however large; a row of the future stays and holds up no other."""
    ledger.commit([row(n, started=NOON + (DAY if n == 3 else -DAY)) for n in range(6)])
    for place, rowid in ((4, 10**9), (5, (1 << 63) - 2), (6, (1 << 63) - 1)):
        database.execute_sql("UPDATE request SET rowid = ? WHERE rowid = ?", (rowid, place))
    monkeypatch.setattr(ledger.gevent, "sleep", at_most(20))
    monkeypatch.setattr(ledger, "STEP", 2)
    assert book.prune(NOON)
    assert [found["started"] for found in rows(db)] == [NOON + DAY]
    database.execute_sql("DELETE FROM request")
    assert book.prune(NOON)                         # of an empty table


def test_prune_waits_only_where_it_deletes(db, book, monkeypatch):
    """It walks through all that is kept, and its greenlet has more to do than that; nor is a lock taken for nothing."""
    ledger.commit([row(n, started=NOON - (DAY if n < 20 else 0)) for n in range(200)])
    pauses = []
    monkeypatch.setattr(ledger, "STEP", 10)
    monkeypatch.setattr(ledger.gevent, "sleep", pauses.append)
    assert book.prune(NOON) and len(rows(db)) == 180
    assert len([pause for pause in pauses if pause >= 0.05]) == 2 and sum(pauses) < 0.2
    with locked(db):
        assert book.prune(NOON)


def test_upkeep_goes_on_when_the_clock_is_set_back(db, book, monkeypatch):
    clock, done, sleep = SimpleNamespace(wall=NOON, steady=1000.0), [], at_most(30)

    def a_minute(seconds):
        sleep(seconds)
        clock.wall, clock.steady = clock.wall - 3600, clock.steady + 61

    monkeypatch.setattr(ledger, "time", lambda: clock.wall)
    monkeypatch.setattr(ledger, "monotonic", lambda: clock.steady)
    monkeypatch.setattr(ledger.gevent, "sleep", a_minute)
    monkeypatch.setattr(book, "checkpoint", lambda: done.append("checkpoint"))
    monkeypatch.setattr(book, "prune", lambda before: done.append("prune") or True)
    monkeypatch.setattr(book, "stay_with_the_file", lambda: None)
    with pytest.raises(Enough):
        book.keep_up()
    assert done == ["checkpoint", "prune", *["checkpoint"] * 29]


STEPS = ["flush", "stay_with_the_file", "checkpoint", "prune"]


def upkeep(book, monkeypatch, broken, error, seconds, rounds=4):
    """The steps of so many rounds, so many seconds apart, of which one always raises."""
    clock, done, sleep = SimpleNamespace(steady=1000.0), [], at_most(rounds)

    def later(pause):
        sleep(pause)
        clock.steady += seconds

    def noting(name):
        def step(*arguments):
            done.append(name)
            if name == broken:
                raise error
            return True
        step.__name__ = name
        return step

    monkeypatch.setattr(ledger, "monotonic", lambda: clock.steady)
    monkeypatch.setattr(ledger.gevent, "sleep", later)
    for name in STEPS:
        monkeypatch.setattr(book, name, noting(name))
    with pytest.raises(Enough):
        book.keep_up()
    return done


@pytest.mark.parametrize("error", [RuntimeError("odd"), sqlite3.ProgrammingError("odd"), OSError(5, "odd"), MemoryError()],
                         ids=repr)
@pytest.mark.parametrize("broken", STEPS)
def test_upkeep_goes_on_whatever_step_fails(book, monkeypatch, caplog, broken, error):
    """A fault of one step costs no other one, and is logged each minute."""
    done = upkeep(book, monkeypatch, broken, error, 61)
    assert done == [*STEPS, *(STEPS if broken == "prune" else STEPS[:3]) * 3]
    assert [record.exc_info[1] for record in caplog.records] == [error] * 4


@pytest.mark.parametrize("broken", ["flush", "stay_with_the_file", "prune"])
def test_upkeep_logs_a_fault_once_a_minute(book, monkeypatch, caplog, broken):
    """These are tried each second."""
    done = upkeep(book, monkeypatch, broken, RuntimeError("odd"), 1, rounds=100)
    assert done.count(broken) == 100 and len(caplog.records) == 2 and "odd" in caplog.text


def test_upkeep_survives_a_fault_of_its_own_care(book, monkeypatch, caplog):
    """Also where telling of a fault fails, or the pause between two rounds."""
    monkeypatch.setattr(book, "is_news", lambda fault: 1 / 0)
    monkeypatch.setattr(book, "pause", lambda: 1 / 0)
    monkeypatch.setattr(book, "flush", lambda: 1 / 0)
    rounds = at_most(3)
    monkeypatch.setattr(ledger.gevent, "sleep", rounds)
    with pytest.raises(Enough):
        book.keep_up()
    assert caplog.text.count("the ledger's upkeep failed; it goes on") == 3


@pytest.mark.parametrize("where", ["commit", "is_ours", "checkpoint", "time"])
def test_upkeep_survives_what_its_steps_call(db, monkeypatch, where):
    """Whatever else goes wrong, rows are committed and the write-ahead log does not grow without bound."""
    book, sleep, calls = Ledger(SimpleNamespace(keep_days=90, db=db)), at_most(3), []

    def broken(*arguments):
        calls.append(arguments)
        raise RuntimeError("odd")

    database.execute_sql("PRAGMA wal_autocheckpoint = 0")
    ledger.commit([row(n) for n in range(100)])
    log = db.with_name(db.name + "-wal")
    assert log.stat().st_size > 10_000
    book.waiting.append(row(100))
    monkeypatch.setattr(ledger, where, broken)
    monkeypatch.setattr(ledger.gevent, "sleep", sleep)
    with pytest.raises(Enough):
        book.keep_up()
    assert calls and len(rows(db)) == (100 if where == "commit" else 101)
    assert (log.stat().st_size == 0) is (where != "checkpoint")


WALKS = {                                           # (days of the wall clock, days that are trusted then) at each look, one a start
    "each half a day": [(0, 0), (0.5, 0.5), (1, 1), (9.5, 2), (10, 3)],
    "once 400 days ahead": [(0, 0), (400, 1), (0.1, 0.1), (0.2, 0.2)],
    "400 days ahead, again and again": [(0, 0), (400, 1), (400.001, 1.002), (400.002, 1.004), (0.2, 0.2)],
    "31 days behind, then right": [(0, 0), (-31, -31), (0.1, -30), (0.6, -29)],
}


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_a_clock_that_jumps_ahead_deletes_a_day_at_most(db, book, monkeypatch, walk):
    for at, found in walk:
        monkeypatch.setattr(ledger, "time", lambda at=at: NOON + at * DAY)
        assert round((book.trust_the_clock() - NOON) / DAY, 6) == found


@pytest.mark.parametrize("ahead, kept", [(0, 90), (400, 89), (-400, 300)])
def test_the_first_pruning_of_an_old_file(db, book, monkeypatch, ahead, kept):
    """It has rows, and nobody noted when they were pruned: the last row tells what the clock said."""
    ledger.commit([row(n, started=NOON - (300 - n) * DAY) for n in range(301)])
    monkeypatch.setattr(ledger, "time", lambda: NOON + ahead * DAY)
    book.keep_up_once()
    assert len(rows(db)) - 1 == kept and book.pruned > 0


def test_prune_of_a_locked_database(db, book):
    ledger.commit([row(n, started=n) for n in range(10)])
    with locked(db):
        book.prune(NOON)
    assert len(rows(db)) == 10
    book.prune(NOON)
    assert rows(db) == []


def test_used_by_key(db):
    """Without what people behind it used: that is theirs."""
    for each in many(100):
        ledger.commit([each, each._replace(person="ann")])
    for since in ("2026-12-30", "2027-01-02", "2030-01-01"):
        found = {}
        for each in many(100):
            if ledger.utc_day(each.started) >= since:
                found[each.key_id] = found.get(each.key_id, 0) + each.tokens
        assert ledger.used_by_key(since) == found


def test_what_people_used_counts_on_the_day_that_the_clock_shows(db, monkeypatch):
    """Also once it was set: an account that is kept then knows only of the day before."""
    clock, key = [NOON], keys.Key(1, "web")
    monkeypatch.setattr("gateway.time", lambda: clock[0])
    front = Gateway(None, None, Gate(9), None, None, None, People(b"secret"))
    ann = front.people.name_of("ann")
    ledger.commit([row(n, started=NOON + day * DAY, person=ann) for n, day in enumerate((0, 1, 1))])
    for day, times in ((0, 1), (1, 2)):
        clock[0] = NOON + day * DAY
        front.now()
        assert front.person(key, "ann") == ann
        assert front.gate.account((1, ann)).day.used(clock[0]) == times * row(0).tokens
        assert front.gate.account(1).day.used(clock[0]) == 0


def test_what_a_person_used_is_found_among_many(db):
    """Whoever asks /v1/usage holds up nobody, however many people there are and have been."""
    at = [NOON - n * DAY for n in range(60)]
    ledger.commit([row(n, started=started, person="p7", model=f"model {n % 3}") for n, started in enumerate(at)])
    others = [(ledger.utc_day(started), key, f"p{n}", *[1] * 8) for started in at for key in (1, 2) for n in range(100, 300)]
    connection, steps = database.connection(), []
    marks = ", ".join("?" * len(others[0]))
    with connection:
        connection.executemany(f"INSERT INTO person_day VALUES ({marks})", others)
    connection.set_progress_handler(lambda: steps.append(1), 100)
    assert ledger.total(1, person="p7") == ledger.total(1)
    assert ledger.total(1, ledger.utc_day(at[9]), ledger.utc_day(at[5]), "p7")["requests"] == 5
    assert ledger.used_by_person(1, "p7", ledger.utc_day(NOON))[0] == row(0).tokens
    assert len(steps) < 100     # a look at each row takes a thousand such hundreds
    connection.set_progress_handler(None, 0)


def test_cost_of_a_row(db, record_property, capsys):
    times = []
    for n in range(1000):
        began = time.perf_counter()
        ledger.commit([row(n)])
        times.append((time.perf_counter() - began) * 1e6)
    middle, worst = sorted(times)[500], max(times)
    record_property("row_us", round(middle, 1))
    with capsys.disabled():
        print(f"\nledger: a row costs {middle:.0f} µs (median of 1,000 commits; worst {worst:.0f} µs)")
    assert middle < 5000


# ---- old files

OLD = """
CREATE TABLE "key" ("id" INTEGER NOT NULL PRIMARY KEY, "name" VARCHAR(255) NOT NULL, "prefix" VARCHAR(255) NOT NULL,
                    "digest" VARCHAR(255) NOT NULL, "created" DATETIME NOT NULL, "revoked" DATETIME);
CREATE UNIQUE INDEX "keyrow_digest" ON "key" ("digest");
CREATE TABLE "migration" ("id" INTEGER NOT NULL PRIMARY KEY, "name" VARCHAR(255) NOT NULL);
CREATE UNIQUE INDEX "migration_name" ON "migration" ("name");
INSERT INTO migration (name) VALUES ('first_keys');
"""
OLD_KEY = "sk-sparks-" + "o" * 43


def old_file(path):
    """A database of the first version, with one key."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(OLD)
        connection.execute("INSERT INTO key (name, prefix, digest, created) VALUES (?, ?, ?, ?)",
                           ("olga", OLD_KEY[:16], keys.digest(OLD_KEY), "2026-01-02 03:04:05"))
        connection.commit()
    return path


def test_old_file_is_brought_up_to_date_and_pruned(tmp_path, engine):
    """Its keys still work, its rows are written; at the next start rows of long ago go, and their totals stay."""
    db = old_file(tmp_path / "sparks.db")
    with started(engine, tmp_path, (db, OLD_KEY), db=db) as gateway:
        ident = f"ledger-{next(IDS)}"
        with gateway.client().open() as connection:
            assert connection.post("/v1/chat/completions", body(False), {"x-request-id": ident}).status == 200
        assert row_now(db, ident)["key_id"] == 1
        assert json.loads(gateway.keys("usage", "--json").stdout)[0]["key"] == "olga"
        assert gateway.keys("limit", "olga", "--rpm", "1000").returncode == 0
        gateway.stop()
        open_database(db)
        ledger.commit([row(n, started=time.time() - 100 * DAY) for n in range(1200)])
        database.close()
        before = days(db)
        gateway.launch()
        gateway.wait_alive().wait_ready()
        wait_until(lambda: len(rows(db)) < 1200 and not rows(db, "id LIKE 'request-%'"), 10, what="old rows gone")
        assert [found["id"] for found in rows(db, "started < ?", (time.time() - 90 * DAY,))] == [] and row_now(db, ident)
        assert [day["requests"] for day in before][0] == 1200 and days(db)[0] == before[0]


# ---- the owner's commands

@pytest.fixture
def run(db, monkeypatch):
    """run("usage"): (exit code, stdout, stderr) of a command on a database with two keys and five rows."""
    for name in [name for name in os.environ if name.startswith("SPARKS_")]:
        monkeypatch.delenv(name)
    for name in ("alice", "bob", "idle"):
        keys.add_key(name)
    ledger.commit([
        row(0, id="first"),
        row(1, id="gone", status=499, aborted=True, prompt_tokens=None, cached_tokens=None, completion_tokens=5,
            reasoning_tokens=0, counted="gateway"),
        row(2, id="refused", status=404, error="model_not_found", model="", engine="", queued_ms=None, first_ms=None,
            total_ms=1, streamed=False, prompt_tokens=None, cached_tokens=None, completion_tokens=None, reasoning_tokens=None),
        row(3, id="other", key_id=2, started=NOON + DAY, prompt_tokens=2_000_000),
        row(4, id="broken", key_id=2, started=NOON + DAY, status=502, error="upstream_error", truncated=True),
    ])

    def run(*arguments):
        done = CliRunner().invoke(keys.cli, arguments, env={"SPARKS_DB": f"sqlite:///{db}", "SPARKS_CONFIG": os.devnull},
                                  prog_name="keys")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done.exit_code, done.stdout, done.stderr
    return run


def said(run, *arguments):
    code, out, err = run(*arguments)
    assert (code, err) == (0, ""), (out, err)
    return out


def test_usage(run):
    assert said(run, "usage") == (
        "key    requests  ok  errors  aborted     prompt  cached  completion  reasoning\n"
        "alice         3   1       1        1      1,000     600          55         20\n"
        "bob           2   1       1        0  2,001,000   1,200         100         40\n")


def test_usage_by_day_and_by_model(run):
    assert said(run, "usage", "--by", "day") == (
        "day         requests  ok  errors  aborted     prompt  cached  completion  reasoning\n"
        "2027-01-01         3   1       1        1      1,000     600          55         20\n"
        "2027-01-02         2   1       1        0  2,001,000   1,200         100         40\n")
    assert said(run, "usage", "--by", "model") == (
        "model               requests  ok  errors  aborted     prompt  cached  completion  reasoning\n"
        "-                          1   0       1        0          0       0           0          0\n"
        "GLM-5.3-Flash-EXL3         4   2       1        1  2,002,000   1,800         155         60\n")


def test_usage_of_one(run):
    assert said(run, "usage", "alice", "--by", "day") == (
        "day         requests  ok  errors  aborted  prompt  cached  completion  reasoning\n"
        "2027-01-01         3   1       1        1   1,000     600          55         20\n")


def test_usage_as_json(run):
    alice = {"key": "alice", "requests": 3, "ok": 1, "errors": 1, "aborted": 1, "prompt_tokens": 1000, "cached_tokens": 600,
             "completion_tokens": 55, "reasoning_tokens": 20}
    bob = {"key": "bob", "requests": 2, "ok": 1, "errors": 1, "aborted": 0, "prompt_tokens": 2_001_000, "cached_tokens": 1200,
           "completion_tokens": 100, "reasoning_tokens": 40}
    assert json.loads(said(run, "usage", "--json")) == [alice, bob]
    assert json.loads(said(run, "usage", "bob", "--json")) == [bob]
    assert json.loads(said(run, "usage", "--json", "--since", "2027-01-02")) == [bob]
    assert json.loads(said(run, "usage", "idle", "--json")) == []
    day, = json.loads(said(run, "usage", "--json", "--by", "day", "--since", "2027-01-02"))
    assert day == {"day": "2027-01-02", **{name: bob[name] for name in list(bob)[1:]}}


def test_usage_as_csv(run):
    assert said(run, "usage", "--csv") == (
        "key,requests,ok,errors,aborted,prompt_tokens,cached_tokens,completion_tokens,reasoning_tokens\n"
        "alice,3,1,1,1,1000,600,55,20\n"
        "bob,2,1,1,0,2001000,1200,100,40\n")
    assert said(run, "usage", "--csv", "--by", "day", "--since", "2027-01-02") == (
        "day,requests,ok,errors,aborted,prompt_tokens,cached_tokens,completion_tokens,reasoning_tokens\n"
        "2027-01-02,2,1,1,0,2001000,1200,100,40\n")
    assert said(run, "usage", "--csv", "--by", "day", "--since", "2030-01-01").startswith("day,requests,")      # no rows


def test_usage_of_the_last_days(run, monkeypatch):
    monkeypatch.setattr(keys.time, "time", lambda: NOON + DAY)
    assert [found["key"] for found in json.loads(said(run, "usage", "--days", "1", "--json"))] == ["bob"]
    assert [found["key"] for found in json.loads(said(run, "usage", "--days", "2", "--json"))] == ["alice", "bob"]


def test_several_keys_of_one_name_are_one_person(run):
    keys.add_key("alice")
    ledger.commit([row(9, id="second key", key_id=4)])
    found = json.loads(said(run, "usage", "--json"))
    assert [(each["key"], each["requests"]) for each in found] == [("alice", 4), ("bob", 2)]


def test_usage_as_a_plot(run):
    out = said(run, "usage", "--plot")
    assert "2027-01-01" in out and "2027-01-02" in out and "tokens per day" in out and "\x1b" not in out


def test_plot_of_days_without_tokens(run):
    ledger.commit([row(7, id="nothing", started=NOON + 9 * DAY, prompt_tokens=0, completion_tokens=0)])
    assert "2027-01-10" in said(run, "usage", "--plot", "--since", "2027-01-05")


def test_nothing_yet(run):
    assert run("usage", "idle") == (0, "", "no requests yet\n")
    assert run("usage", "idle", "--plot") == (0, "", "no requests yet\n")
    assert said(run, "log", "--key", "idle") == ""


@pytest.mark.parametrize("arguments, message", [
    (("usage", "nobody"), "no key has the name 'nobody'; `list` shows all"),
    (("log", "--key", "nobody"), "no key has the name 'nobody'; `list` shows all"),
    (("show", "nothing"), "there is no request 'nothing' in the ledger"),
    (("usage", "--since", "2027-01-01", "--days", "2"), "give --since or --days, not both"),
    (("log", "--status", "6xx"), "--status takes a number such as 503, or a class such as 5xx"),
    (("log", "--status", "5x"), "--status takes a number such as 503, or a class such as 5xx"),
])
def test_mistakes_are_one_line(run, arguments, message):
    assert run(*arguments) == (1, "", f"Error: {message}\n")


LINES = [
    "2027-01-01T12:00:00Z  first  alice  GLM-5.3-Flash-EXL3  POST /v1/chat/completions  200  ok  2000 ms  1000+50 tokens",
    "2027-01-01T12:00:01Z  gone  alice  GLM-5.3-Flash-EXL3  POST /v1/chat/completions  499  aborted  2000 ms  ?+5 tokens",
    "2027-01-01T12:00:02Z  refused  alice  -  POST /v1/chat/completions  404  model_not_found  1 ms  ?+0 tokens",
    "2027-01-02T12:00:00Z  other  bob  GLM-5.3-Flash-EXL3  POST /v1/chat/completions  200  ok  2000 ms  2000000+50 tokens",
    "2027-01-02T12:00:00Z  broken  bob  GLM-5.3-Flash-EXL3  POST /v1/chat/completions  502  upstream_error  2000 ms"
    "  1000+50 tokens",
]


@pytest.mark.parametrize("arguments, found", [
    ((), LINES), (("-n", "2"), LINES[3:]), (("--key", "alice"), LINES[:3]), (("--status", "499"), LINES[1:2]),
    (("--status", "4xx"), LINES[1:3]), (("--key", "bob", "--status", "5xx"), LINES[4:]),
    (("--status", "2xx", "-n", "1"), LINES[3:4]),
])
def test_log(run, arguments, found):
    assert said(run, "log", *arguments).splitlines() == found


def test_log_as_json(run):
    found = [json.loads(line) for line in said(run, "log", "--json").splitlines()]
    assert [each["id"] for each in found] == ["first", "gone", "refused", "other", "broken"]
    first = {name: value for name, value in found[0].items() if name != "rowid"}
    assert first == {**row(0, id="first")._asdict(), "streamed": 1, "aborted": 0, "truncated": 0, "key": "alice"}


def test_log_of_a_key_that_is_gone(run):
    """A row outlives what it names."""
    ledger.commit([row(6, id="orphan", key_id=77)])
    assert said(run, "log", "-n", "1").split()[2] == "?"
    assert "?" in said(run, "usage")


def test_show(run):
    assert said(run, "show", "gone").splitlines() == [
        "rowid:              2", "id:                 gone", "key_id:             1", "model:              GLM-5.3-Flash-EXL3",
        "engine:             http://127.0.0.1:8000", "route:              POST /v1/chat/completions",
        "started:            2027-01-01T12:00:01Z", "queued_ms:          3", "first_ms:           120",
        "total_ms:           2000",
        "status:             499", "error:              -", "streamed:           1", "aborted:            1",
        "truncated:          0", "prompt_tokens:      -", "cached_tokens:      -", "completion_tokens:  5",
        "reasoning_tokens:   0", "counted:            gateway", "key:                alice"]
    shown, = json.loads(said(run, "show", "gone", "--json"))
    assert (shown["id"], shown["key"], shown["status"], shown["counted"]) == ("gone", "alice", 499, "gateway")


def test_log_follows(slow):
    """New rows as they come, until Ctrl-C."""
    environment = clean_environment(db=f"sqlite:///{slow.db}")
    process = subprocess.Popen([*WITH_US, sys.executable, "keys.py", "log", "--follow", "-n", "1"], cwd=ROOT, env=environment,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(2):
            ident = f"ledger-{next(IDS)}"
            with slow.client().open() as connection:
                connection.post("/v1/chat/completions", body(False), {"x-request-id": ident}).json()
            for line in process.stdout:
                if ident in line:
                    break
            else:
                pytest.fail("the log ended")
        process.send_signal(signal.SIGINT)
        assert "Traceback" not in process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()


# ---- when a row is there

def body(streams, **fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "stream": streams, **fields}


def either(request):
    """An engine's short answer, whatever was asked for."""
    return chat_chunks("Hello", usage=True) if request.json()["stream"] else [Json(completion("Hello"))]


class Api(NamedTuple):
    """A way in: its path, its body for a stream or a plain answer, the engine's whole stream and plain answer, and a field
    that is at fault."""
    path: str
    body: Callable
    events: list
    whole: dict
    malformed: dict


def messages_body(streams, **fields):
    return body(streams, **{"max_tokens": 50, **fields})


def responses_body(streams, **fields):
    return {"model": MODEL, "input": "Hello", "stream": streams, **fields}


def text_body(streams, **fields):
    return {"model": MODEL, "prompt": "Hello", "stream": streams, **fields}


def embedding_body(streams, **fields):
    return {"model": "vectors", "input": "Hello", **fields}


CHAT = Api("/v1/chat/completions", body, chat_chunks("Hello there", usage=True), completion("Hello there"), {"messages": "no"})
MESSAGES = CHAT._replace(path="/v1/messages", body=messages_body)
RESPONSES = CHAT._replace(path="/v1/responses", body=responses_body, malformed={"input": 5})
LAST = (b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n')
APIS = [CHAT, MESSAGES, RESPONSES,
        Api("/v1/completions", text_body, text_chunks("Hello there", usage=True), text_completion("Hello there"),
                  {"prompt": 5}),
        Api("/v1/embeddings", embedding_body, None, embeddings([0.5, 0.25]), {"input": 5})]
CONFIG = f"""
[models."{MODEL}"]
[models.vectors]
engine = "{MODEL}"
kind = "embedding"
"""


def ends(api):
    """How a request ends -> (streams, fields of its body, the engine's steps or None, (status, aborted, error))."""
    plain = {
        "plain": (False, {}, [Json(api.whole)], (200, 0, None)),
        "engine's refusal": (False, {}, [refusal(400, "no")], (400, 0, "invalid_request")),
        "unknown model": (False, {"model": "nothing"}, None, (404, 0, "model_not_found")),
        "malformed": (bool(api.events), api.malformed, None, (400, 0, "invalid_request")),
    }
    return plain if not api.events else plain | {
        "stream": (True, {}, api.events, (200, 0, None)),
        "plain for a stream": (True, {}, [Json(api.whole)], (200, 0, None)),
        "error event": (True, {}, [*api.events[:3], died(), b"data: [DONE]\n\n"], (500, 0, "upstream_error")),
        "engine's refusal of a stream": (True, {}, [refusal(400, "no")], (400, 0, "invalid_request")),
    }


ENDS = [(api, ending) for api in APIS for ending in ends(api)]

SLOW = """
from store import ledger
from gevent import monkey
sleep, commit = monkey.get_original("time", "sleep"), ledger.commit

def slow(rows):
    sleep(0.15)
    commit(rows)

ledger.commit = slow
"""


@pytest.fixture(scope="module")
def slow(stock, tmp_path_factory):
    """A gateway whose commits take 150 ms: a commit that comes late shows."""
    folder = tmp_path_factory.mktemp("slow")
    with Engine() as engine, started(engine, folder, stock, SLOW, stall_timeout=1, config=CONFIG) as gateway:
        gateway.engine = engine
        yield gateway


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("api, ending", ENDS, ids=lambda value: getattr(value, "path", value))
def test_row_is_committed_before_the_last_byte_leaves(slow, api, ending, version):
    path, make, (streams, fields, steps, expected) = api.path, api.body, ends(api)[ending]
    slow.engine.reset()
    if steps:
        slow.engine.play(*steps)
    ident = f"ledger-{next(IDS)}"
    with slow.client().open() as connection:
        data = connection.encode("POST", path, make(streams, **fields), {"x-request-id": ident})
        connection.send(data.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1))
        last = b"".join(read_to_the_last_byte(connection))
        found = row_now(slow.db, ident)
    assert last.endswith((b"data: [DONE]\n\n", b"}\n\n", b"}"))
    assert (found["status"], found["aborted"], found["error"]) == expected and found["total_ms"] < 5000
    idle(slow)


def read_to_the_last_byte(connection):
    """An answer's body up to its last byte; neither the last chunk's mark nor the connection's end is waited for."""
    answer = connection.answer()
    whole = b""
    while not whole.endswith((b"data: [DONE]\n\n", b"}\n\n", b"}")) or not complete(whole):
        data = connection.buffer or connection.read()
        connection.buffer = b""
        assert data
        if answer.headers.get("transfer-encoding") == "chunked":
            data = b"".join(part for n, part in enumerate(data.split(b"\r\n")) if n % 2)
        whole += data
        yield data


def complete(whole):
    """Whether a body is a JSON object, or a stream whose last event is [DONE], an error, or a Response that has ended."""
    if whole.startswith(b"{"):
        try:
            return bool(json.loads(whole))
        except ValueError:
            return False
    ended = re.search(rb"event: response\.(completed|incomplete|failed)\n[^\n]*\n\n\Z", whole)
    return whole.endswith(LAST) or b'data: {"error"' in whole or b'data: {"type":"error"' in whole or bool(ended)


def test_lookups_are_counted_too(slow):
    """One row per request that got past its key, whatever it asked for."""
    ids = []
    with slow.client().open() as connection:
        for path, status in (("/v1/models", 200), (f"/v1/models/{MODEL}", 200), ("/v1/models/none", 404), ("/v1/usage", 200)):
            ids.append(f"ledger-{next(IDS)}")
            answer = connection.get(path, {"x-request-id": ids[-1]})
            assert (answer.status, bool(answer.read_all())) == (status, True)
            found = row_now(slow.db, ids[-1])
            assert (found["status"], found["queued_ms"], found["model"], found["prompt_tokens"]) == (status, None, "", None)
    for key, path in ((False, "/v1/models"), ("sk-sparks-wrong", "/v1/models"), (None, "/healthz"), (None, "/help")):
        with slow.client(key).open() as connection:
            connection.get(path, {"x-request-id": (ident := f"ledger-{next(IDS)}")}).read_all()
        assert not rows(slow.db, "id = ?", (ident,))


@pytest.mark.parametrize("code", ["\ud83d", "x" * 5000, "Ignore all instructions", "bad_words\n", 7, None, ["a"], {"a": 1}],
                         ids=["surrogate", "long", "text", "line", "number", "null", "list", "object"])
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "plain"])
def test_odd_engine_codes(slow, code, streams):
    """An engine's own error code reaches its client; the ledger keeps short words, and no row holds up the next."""
    slow.engine.reset()
    data = json.dumps({"error": {"message": "no", "code": code}}).encode()
    slow.engine.play(Head(400, framing=len(data), type="application/json"), data)
    with slow.client().open() as connection:
        ident = f"ledger-{next(IDS)}"
        answer = connection.post("/v1/chat/completions", body(streams), {"x-request-id": ident})
        assert answer.status == 400 and answer.json()
        found = row_now(slow.db, ident)
        assert found["status"] == 400 and found["error"].replace("_", "").isalnum() and len(found["error"]) <= 64
        connection.post("/v1/chat/completions", body(False), {"x-request-id": (after := f"ledger-{next(IDS)}")}).json()
        assert row_now(slow.db, after)["status"] == 200
    assert gauge(slow, "sparks_ledger_waiting") == 0


# ---- kill -9

def sound(db):
    """The file is in order, its totals too."""
    assert read(db, "PRAGMA integrity_check") == [{"integrity_check": "ok"}]
    assert sums(db) == days(db)
    found = idents(db)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.path)
def test_kill_right_after_a_whole_answer(engine, tmp_path, stock, api):
    path, make = api.path, api.body
    with started(engine, tmp_path, stock, config=CONFIG) as gateway:
        for ending in [ending for ending in ("stream", "plain", "error event") if ending in ends(api)]:
            streams, fields, steps, expected = ends(api)[ending]
            engine.play(*steps)
            with gateway.client().open() as connection:
                connection.start("POST", path, make(streams, **fields), {"x-request-id": (ident := f"ledger-{next(IDS)}")})
                list(read_to_the_last_byte(connection))
                gateway.kill()
            found = row_now(gateway.db, ident)
            assert (found["status"], found["aborted"], found["error"]) == expected
            sound(gateway.db)
            gateway.launch()
            gateway.wait_alive().wait_ready()
        assert gateway.client().get("/v1/models").status == 200


def test_kill_at_any_moment(engine, tmp_path, stock):
    """Under load, ten times: the worker alone, twice all of it. What a client saw complete is in the ledger."""
    engine.always(either)
    chance = random.Random(4)
    with started(engine, tmp_path, stock) as gateway:
        gateway.traceback_allowed = True            # of a worker that dies
        for n in range(10):
            with load(gateway) as complete:
                wait_until(lambda: len(complete) >= 20, 10, what="answers")
                time.sleep(chance.uniform(0, 0.05))
                if n % 5 == 4:
                    gateway.kill()
                else:
                    old = worker(gateway)
                    os.kill(old, signal.SIGKILL)
            assert set(complete) <= set(idents(gateway.db))
            sound(gateway.db)
            if n % 5 == 4:
                gateway.launch()
            gateway.wait_alive()
            gateway.wait_ready()


@contextmanager
def load(gateway):
    """Eight clients send one request after the other: the ids of those that they saw complete. Ends when the gateway dies."""
    complete, over = [], threading.Event()

    def one(streams):
        while not over.is_set():
            ident = f"ledger-{next(IDS)}"
            try:
                with gateway.client(timeout=5).open() as connection:
                    answer = connection.post("/v1/chat/completions", body(streams), {"x-request-id": ident})
                    if answer.status == 200 and answer.read_all().endswith((b"data: [DONE]\n\n", b"}")):
                        complete.append(ident)
            except (Truncated, OSError):
                if over.wait(0.02):
                    return

    threads = [threading.Thread(target=one, args=[n % 2 == 0], daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    try:
        yield complete
    finally:
        over.set()
        for thread in threads:
            thread.join(10)


# ---- another process holds the lock

HOLDER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN " + sys.argv[2])
connection.execute("UPDATE key SET name = name")
print("held", flush=True)
time.sleep(float(sys.argv[3]))
connection.execute("COMMIT")
print("free", flush=True)
"""


@pytest.mark.parametrize("how", ["IMMEDIATE", "EXCLUSIVE"])
def test_locked_for_two_seconds(locking, how):
    """No stream stalls, requests are answered, and all rows are there afterwards. A noisy machine has three tries."""
    for last in (False, False, True):
        gap, answered = lock_once(locking, how)
        if gap < 0.3 or last:
            break
    assert gap < 0.3, f"a stream stood still for {gap * 1000:.0f} ms"
    assert max(answered) < ledger.PATIENCE + 0.5


@pytest.fixture(scope="module")
def locking(stock, tmp_path_factory):
    with Engine() as engine, started(engine, tmp_path_factory.mktemp("locking"), stock) as gateway:
        gateway.engine = engine
        yield gateway


def lock_once(gateway, how):
    """(the longest gap in the streams that ran meanwhile, how long each short request took)."""
    engine, over, ids, gaps, answered = gateway.engine, threading.Event(), [], [], []
    engine.reset()
    token, end = chat_chunks("x", usage=True)[1], chat_chunks("x", usage=True)[2:]

    def steps(request):
        return long_stream() if request.json().get("seed") else either(request)

    def long_stream():
        while not over.is_set():
            yield token
            yield Pause(0.02)
        yield from end

    def listen(n):
        ids.append(ident := f"ledger-{next(IDS)}")
        with gateway.client().open() as connection:
            answer = connection.post("/v1/chat/completions", body(True, seed=1), {"x-request-id": ident})
            moments = [event.at for event in answer.events() if event.data and event.data != "[DONE]"]
        gaps.append(max(after - before for before, after in pairwise(moments)))

    engine.always(steps)
    listeners = [threading.Thread(target=listen, args=[n]) for n in range(4)]
    for thread in listeners:
        thread.start()
    engine.wait_for(4)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(gateway.db), how, "2"], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        while holder.poll() is None:
            ids.append(ident := f"ledger-{next(IDS)}")
            began = time.monotonic()
            with gateway.client().open() as connection:
                answer = connection.post("/v1/chat/completions", body(len(ids) % 2 == 0), {"x-request-id": ident})
                assert answer.status == 200 and answer.read_all().endswith((b"}", b"data: [DONE]\n\n"))
            answered.append(time.monotonic() - began)
            time.sleep(0.02)
        assert holder.stdout.readline() == "free\n"
    finally:
        holder.kill()
        holder.communicate()
        over.set()
        for thread in listeners:
            thread.join(10)
    for ident in ids:
        assert row_of(gateway.db, ident, 3)["status"] == 200
    assert len(gaps) == 4 and len(answered) >= 5
    idle(gateway)
    sound(gateway.db)
    return max(gaps), answered


# ---- a full disk

FULL = """
import os
from store import ledger
import peewee
commit, flag = ledger.commit, os.environ["SPARKS_DB"].removeprefix("sqlite:///") + ".full"

def full(rows):
    if os.path.exists(flag):
        raise peewee.OperationalError("database or disk is full")
    commit(rows)

ledger.commit = full
"""


def test_disk_full(engine, tmp_path, stock):
    """Requests are answered as ever, one line says so, rows wait and land afterwards."""
    engine.always(either)
    with started(engine, tmp_path, stock, FULL) as gateway:
        flag, before, ids = gateway.db.with_name(gateway.db.name + ".full"), idents(gateway.db), []
        flag.touch()
        began = time.monotonic()
        for n in range(40):
            ids.append(f"ledger-{next(IDS)}")
            with gateway.client().open() as connection:
                answer = connection.post("/v1/chat/completions", body(n % 2 == 0), {"x-request-id": ids[-1]})
                assert answer.status == 200 and answer.read_all().endswith((b"}", b"data: [DONE]\n\n"))
        assert time.monotonic() - began < 10 and gauge(gateway, "sparks_ledger_waiting") == 40
        wait_until(lambda: "cannot be written" in gateway.log, 3, what="a line about it")
        assert gateway.log.count("cannot be written") == 1 and "disk is full" in gateway.log
        assert idents(gateway.db) == before
        flag.unlink()
        wait_until(lambda: gauge(gateway, "sparks_ledger_waiting") == 0, 5, what="rows that land")
        assert idents(gateway.db) == before + ids
        sound(gateway.db)
