"""Gateways with a part of them replaced, and what a test sees of any gateway: its gauges, its rows, its descriptors.

    with started(engine, folder, stock, patch="import pump; pump.TICK = 0.1", max_active=2) as gateway:
        gauge(gateway, "sparks_active")
        row_of(gateway.db, "the-request-id")
        rows(gateway.db, "status = 499")
"""
import os
import sqlite3
import sys
from contextlib import closing, contextmanager
from pathlib import Path

from conftest import Gateway, clean_environment, spawn, wait_until

START = """
from gevent import monkey
monkey.patch_all()
{patch}
import sparks
sparks.main([])
"""


class Patched(Gateway):
    """A gateway that runs the Python text `patch` before it starts."""

    def __init__(self, folder, upstream, stock, patch="", **settings):
        self.patch, self.folder = patch, folder
        super().__init__(folder, upstream, stock, **settings)

    def launch(self):
        command = [sys.executable, "-c", START.format(patch=self.patch)] if self.patch else [sys.executable, "sparks.py"]
        self.process = spawn(command, self.log_file, clean_environment(**self.settings))
        self.pid = self.process.pid


@contextmanager
def started(engine, folder, stock, patch="", wait=True, **settings):
    """A Patched gateway before that engine, until the end of the block."""
    gateway = Patched(folder, engine.url, stock, patch, **settings)
    try:
        yield gateway.wait_alive().wait_ready() if wait else gateway
        gateway.stop()
        gateway.check_log()
    finally:
        gateway.kill()


def worker(gateway):
    """The process id of the worker."""
    return children(gateway.pid)[0]


def descriptors(gateway):
    """What the worker has open, sorted; without the database, whose closed descriptors SQLite keeps for the next time."""
    folder = Path(f"/proc/{worker(gateway)}/fd")
    found = []
    for file in folder.iterdir():
        try:
            found.append(os.readlink(file))
        except FileNotFoundError:                   # closed in this moment
            pass
    return sorted(name for name in found if not name.startswith(str(gateway.db)))


def resident(gateway):
    """Bytes of memory that the worker holds."""
    return int(Path(f"/proc/{worker(gateway)}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- gauges

def gauges(gateway):
    """All samples of GET /metrics, as a dict of floats by name and labels."""
    lines = gateway.client(key=False).get("/metrics").read_all().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def gauge(gateway, name):
    return gauges(gateway)[name]


def idle(gateway, seconds=5):
    """Until no request holds a slot or waits for one."""
    def nothing():
        found = gauges(gateway)
        return found["sparks_active"] == found["sparks_queued"] == 0
    wait_until(nothing, seconds, gateway.process, "no request in the gateway")


# ---- rows

def read(db, sql, values=()):
    """Rows of a database file as dicts; the gateway may be writing it."""
    with closing(sqlite3.connect(db, timeout=10)) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute(sql, values)]


def rows(db, where="1", values=()):
    return read(db, f"SELECT * FROM request WHERE {where} ORDER BY rowid", values)


def row_now(db, ident):
    """The row of a request, which must be there by now, once."""
    found = rows(db, "id = ?", (ident,))
    assert len(found) == 1, (ident, found)
    return found[0]


def row_of(db, ident, seconds=2):
    """The row of a request, as soon as it is there."""
    wait_until(lambda: rows(db, "id = ?", (ident,)), seconds, what=f"a row of {ident}")
    return row_now(db, ident)


def sums(db):
    """{(day, key_id, model): totals} added up from the rows."""
    found = read(db, """SELECT date(started, 'unixepoch') AS day, key_id, model, COUNT(*) AS requests,
        SUM(status < 400) AS ok, SUM(status >= 400 AND NOT aborted) AS errors, SUM(aborted) AS aborted,
        SUM(IFNULL(prompt_tokens, 0)) AS prompt_tokens, SUM(IFNULL(cached_tokens, 0)) AS cached_tokens,
        SUM(IFNULL(completion_tokens, 0)) AS completion_tokens, SUM(IFNULL(reasoning_tokens, 0)) AS reasoning_tokens
        FROM request GROUP BY 1, 2, 3 ORDER BY 1, 2, 3""")
    return found


def days(db):
    return read(db, "SELECT * FROM day ORDER BY day, key_id, model")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
