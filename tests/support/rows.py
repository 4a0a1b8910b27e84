"""The ledger's rows, read from the database file itself.

    row_of(gateway.db, "the-request-id")
    rows(gateway.db, "status = 499")
"""
import sqlite3
from contextlib import closing

from support.processes import wait_until


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
