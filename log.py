"""The log: one line per request on stdout, and what else happens.

A log that cannot be written stops nothing.
"""

import json
import logging
import os
import re
import select
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from time import time

MOST = 4000  # bytes at a time: a pipe that is ready takes PIPE_BUF of them, 4096, without waiting
READY = 4  # poll's POLLOUT
STDOUT = 1
BARE = re.compile(r'[^ "=]+')  # a value that needs no quotes, if it can be printed


def say(text):
    """Write a line to stdout, or several.

    It is dropped where that would wait: nobody reads the pipe, or the disk is full.
    """
    data = (lines_of(text) + "\n").encode("utf-8", "backslashreplace")
    with suppress(OSError):  # nowhere to say it
        poller = stdout_poller()
        for at in range(0, len(data), MOST):
            if poller.poll(0):
                os.write(STDOUT, data[at : at + MOST])


@lru_cache
def stdout_poller():
    poll = select.poll
    if "gevent.monkey" in sys.modules:  # its own poll would let others run meanwhile
        poll = sys.modules["gevent.monkey"].get_original("select", "poll")
    poller = poll()
    poller.register(STDOUT, READY)
    return poller


# ---- the forms of a line


def json_line(fields):
    return in_json({name: value for name, value in fields.items() if value is not None})


def logfmt_line(fields):
    """name=value pairs, without those that are None; a traceback stands below them, indented, so
    that no line of it can pass for one of the log's."""
    pairs = " ".join(
        [
            f"{name}={quoted(value)}"
            for name, value in fields.items()
            if value is not None and name != "traceback"
        ]
    )
    if fields.get("traceback"):
        return f"{pairs}\n{indented(fields['traceback'])}"
    return pairs


def quoted(value):
    text = str(value)
    if BARE.fullmatch(text) and text.isprintable():
        return text
    return in_json(text)


def in_json(value):
    """A value as JSON that no terminal and no reader of lines stumbles over: in plain ASCII where
    it holds what cannot be printed, a line separator or a mark that turns the writing round."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return json.dumps(value)


def indented(text):
    return "\n".join(f"  {line}" for line in text.split("\n"))


def lines_of(text):
    return "\n".join(map(printable, text.split("\n")))


def printable(text):
    """A text as it may stand in a line of a terminal: what cannot be printed is an escape."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else escape(one) for one in text)


def escape(character):
    return character.encode("unicode_escape").decode()


LINES = {"logfmt": logfmt_line, "json": json_line}  # by the setting `log`


def timestamp(epoch):
    """An epoch moment as 2026-11-29T18:00:00.123Z."""
    return f"{second(int(epoch))}.{int(epoch % 1 * 1000):03d}Z"


@lru_cache(8)
def second(epoch):
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%S")


# ---- requests


class RequestLog:
    """Writes a line for each request: never a client's own words. `form` is the setting `log`."""

    def __init__(self, form):
        self.line = LINES[form]

    def note(self, row, key):
        """A store.ledger.Row, and the Key of its request, or None if it had none."""
        fields = {
            "time": timestamp(time()),
            "id": row.id,
            "key": key and key.name,
            "person": row.person or None,
            "route": row.route,
            "model": row.model or None,
            "status": row.status,
            "error": row.error,
            "queued_ms": row.queued_ms,
            "first_ms": row.first_ms,
            "ms": row.total_ms,
            "prompt": row.prompt_tokens,
            "completion": row.completion_tokens,
        }
        say(self.line(fields))


# ---- whatever else happens, tracebacks included


def set_up(form):
    """All logging to stdout, as "logfmt" or "json"."""
    handler = StdoutHandler()
    handler.setFormatter(FieldsFormatter(form))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("urllib3").setLevel(logging.ERROR)


class StdoutHandler(logging.Handler):
    def emit(self, record):
        with suppress(Exception):  # a record that cannot be formatted stops nothing either
            say(self.format(record))


class FieldsFormatter(logging.Formatter):
    """Log records in the form of the request lines."""

    def __init__(self, form):
        super().__init__()
        self.line = LINES[form]

    def format(self, record):
        fields = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return self.line(fields)
