"""The log: one line per request on stdout, and what else happens. A log that cannot be written stops nothing."""

import json
import logging
import os
import re
import select
import sys
from datetime import datetime, timezone
from functools import lru_cache
from time import time

MOST = 4000  # bytes at a time: a pipe that is ready takes so many without waiting
READY = 4  # poll's POLLOUT
STDOUT = 1
BARE = re.compile(r'[^ "=\n\r\t]+')  # a value that needs no quotes
FORM = {"json": False}  # the setting `log`


def say(text):
    """Write a line to stdout, or drop it where that would wait: nobody reads the pipe, or the disk is full."""
    try:
        data, poller = (text + "\n").encode("utf-8", "backslashreplace"), stdout_poller()
        for at in range(0, len(data), MOST):
            if poller.poll(0):
                os.write(STDOUT, data[at : at + MOST])
    except OSError:  # nowhere to say it
        pass


@lru_cache
def stdout_poller():
    gevent = sys.modules.get("gevent.monkey")  # its own poll would let others run meanwhile
    poller = gevent.get_original("select", "poll")() if gevent else select.poll()
    poller.register(STDOUT, READY)
    return poller


class Lines(logging.Handler):
    def emit(self, record):
        try:
            say(self.format(record))
        except Exception:  # a record that cannot be formatted stops nothing either
            pass


def line(fields):
    """Fields as a line, without those that are None."""
    if FORM["json"]:
        return json.dumps(
            {name: value for name, value in fields.items() if value is not None}, ensure_ascii=False
        )
    return logfmt(fields)


class Words(logging.Formatter):
    """Whatever is not a request, tracebacks included."""

    def format(self, record):
        fields = {
            "time": now(record.created),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return line(fields)


def now(epoch):
    return f"{second(int(epoch))}.{int(epoch % 1 * 1000):03d}Z"


@lru_cache(8)
def second(epoch):
    return datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


def logfmt(fields):
    traceback = fields.get("traceback")
    pairs = " ".join(
        [
            f"{name}={value if type(value) is int else quoted(value)}"
            for name, value in fields.items()
            if value is not None and name != "traceback"
        ]
    )
    return f"{pairs}\n{traceback}" if traceback else pairs


def quoted(value):
    text = str(value)
    return text if BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def set_up(form):
    """All logging to stdout, as "logfmt" or "json"."""
    FORM["json"] = form == "json"
    handler = Lines()
    handler.setFormatter(Words())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def note(row, key):
    """A request's line: never a client's own words."""
    say(
        line(
            {
                "time": now(time()),
                "id": row.id,
                "key": key.name if key else None,
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
        )
    )
