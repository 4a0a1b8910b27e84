"""What `keys usage`, `keys log` and `keys show` tell: read from the ledger, for a terminal."""

import csv
import io
from datetime import UTC, datetime

from store.database import database
from store.ledger import TOTALS, Row

# What a line of `keys usage` can stand for. A row can outlive the key that it names.
COLUMNS = {
    "key": "COALESCE(key.name, '?')",
    "day": "day.day",
    "model": "day.model",
    "person": "COALESCE(key.name, '?') || '/' || day.person",
}


# ---- totals


def usage(by, name=None, since=None):
    """Totals as a list of dicts, one for each "key", "day", "model" or "person" (`by`), in its
    order. A "person" is one of those behind a key, with its name: "webui/ann".

    Several keys of one name count together.

    name   only of keys with this name
    since  only from this day on (2026-11-29)
    """
    conditions = ["day.day >= ?"]
    values = [since or ""]
    if name:
        conditions.append("key.name = ?")
        values.append(name)
    sums = ", ".join(f"SUM(day.{total})" for total in TOTALS)
    table = "person_day AS day" if by == "person" else "day"
    sql = (
        f"SELECT {COLUMNS[by]}, {sums} FROM {table} LEFT JOIN key ON key.id = day.key_id "
        f"WHERE {' AND '.join(conditions)} GROUP BY 1 ORDER BY 1"
    )
    found = database.execute_sql(sql, values).fetchall()
    return [dict(zip((by, *TOTALS), row, strict=True)) for row in found]


def table(totals):
    """Totals, of which there are some, as lines: columns with a head, figures to the right."""
    heads = [name.replace("_tokens", "") for name in totals[0]]
    lines = [heads, *([cell(value) for value in row.values()] for row in totals)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *figures in lines:
        right = [text.rjust(width) for text, width in zip(figures, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *right])


def cell(value):
    if isinstance(value, int):
        return f"{value:,}"
    return value or "-"


def as_csv(totals, by):
    """Totals as comma-separated values; the head is there even if they are none."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [by, *TOTALS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(totals)
    return out.getvalue()


def plot(totals):
    """Totals by day as a drawing in text, without colours."""
    import plotext  # takes a while to load, and no other command needs it

    plotext.simple_bar(
        [row["day"] for row in totals],
        [row["prompt_tokens"] + row["completion_tokens"] for row in totals],
        title="tokens per day",
        width=80,
    )
    return plotext.uncolorize(plotext.build())


# ---- requests


def requests(name=None, statuses=None, after=0, most=20):
    """The latest requests as dicts, newest last: their Row, its rowid, and the name of its `key`.

    name      only of this person's keys
    statuses  only with a status from the first of these two to the second
    after     only those behind this rowid
    most      how many; -1: all
    """
    conditions = ["request.rowid > ?"]
    values = [after]
    if name:
        conditions.append("key.name = ?")
        values.append(name)
    if statuses:
        conditions.append("request.status BETWEEN ? AND ?")
        values += statuses
    return select(" AND ".join(conditions), values, most)


def requests_with_id(request_id):
    """Those whose x-request-id this was: clients choose it, so there can be several."""
    return select("request.id = ?", [request_id], 20)


def select(condition, values, most):
    names = ["rowid", *Row._fields]
    columns = ", ".join(f"request.{name}" for name in names)
    sql = (
        f"SELECT {columns}, key.name FROM request LEFT JOIN key ON key.id = request.key_id "
        f"WHERE {condition} ORDER BY request.rowid DESC LIMIT ?"
    )
    found = database.execute_sql(sql, [*values, most]).fetchall()
    return [dict(zip([*names, "key"], row, strict=True)) for row in reversed(found)]


def log_line(request):
    """A request on one line."""
    prompt = request["prompt_tokens"]
    if prompt is None:
        prompt = "?"
    who = request["key"] or "?"
    if request["person"]:
        who += f"/{request['person']}"
    outcome = request["error"] or "ok"
    if request["aborted"]:
        outcome = "aborted"
    words = (
        utc_text(request["started"]),
        request["id"],
        who,
        request["model"] or "-",
        request["route"],
        request["status"],
        outcome,
        f"{request['total_ms']} ms",
        f"{prompt}+{request['completion_tokens'] or 0} tokens",
    )
    return "  ".join(map(str, words))


def all_lines(request):
    """A request with a line for each of its columns."""
    for name, value in request.items():
        if name == "person" and not value:
            continue
        if name == "started":
            value = utc_text(value)
        elif value is None:
            value = "-"
        yield f"{name + ':':20}{value}"


def utc_text(epoch):
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
