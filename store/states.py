"""How the gateway's engines are, kept for the owner's commands, which are other processes, and for
the next start: an engine that is off by then has the models that it had."""

from typing import NamedTuple

from store.database import Transaction, database


class State(NamedTuple):
    """One engine, as engines.health.Health tells of it.

    engine  its address
    word    the state
    reason  why, or None
    since   when it began, in epoch seconds
    error   the last trouble there was, or None
    about   what it serves, in words
    purpose what for: "chat" or "embedding"
    listed  the entries of its list of models, as JSON
    """

    engine: str
    word: str
    reason: str | None
    since: float
    error: str | None
    about: str
    purpose: str = "chat"
    listed: str = "[]"


def keep(states):
    """Keep these States in place of all others. Raises DATABASE_FAULTS."""
    fields = ", ".join("?" for _ in State._fields)
    with Transaction() as execute:
        execute("DELETE FROM engine")
        for state in states:
            execute(f"INSERT INTO engine VALUES ({fields})", state)


def kept():
    """The States as they were kept last."""
    names = ", ".join(State._fields)
    rows = database.execute_sql(f"SELECT {names} FROM engine ORDER BY rowid").fetchall()
    return [State(*row) for row in rows]
