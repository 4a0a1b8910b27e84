"""The log: one line per request on stdout, and what else happens. A log that cannot be written stops nothing."""
import json
import logging
import os
from datetime import datetime, timezone

from gevent import monkey

MOST = 4000                                         # bytes at a time: a pipe that is ready takes so many without waiting
READY = 4                                           # poll's POLLOUT
real_poll = monkey.get_original("select", "poll")


STDOUT = 1


def say(text):
    """Write a line to stdout, or drop it where that would wait: nobody reads the pipe, or the disk is full."""
    try:
        data, poller = (text + "\n").encode("utf-8", "backslashreplace"), real_poll()
        poller.register(STDOUT, READY)
        for at in range(0, len(data), MOST):
            if poller.poll(0):
                os.write(STDOUT, data[at:at + MOST])
    except OSError:                                 # nowhere to say it
        pass


class Lines(logging.Handler):
    def emit(self, record):
        try:
            say(self.format(record))
        except Exception:                           # a record that cannot be formatted stops nothing either
            pass


class Words(logging.Formatter):
    """Other lines, tracebacks included, in the form of the setting."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def format(self, record):
        fields = getattr(record, "fields", None) or {"level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        fields = {"time": now(record.created), **fields}
        return json.dumps(fields, ensure_ascii=False) if self.form == "json" else logfmt(fields)


def now(epoch):
    return datetime.fromtimestamp(epoch, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def logfmt(fields):
    traceback = fields.get("traceback")
    pairs = " ".join(f"{name}={quoted(value)}" for name, value in fields.items() if value is not None and name != "traceback")
    return f"{pairs}\n{traceback}" if traceback else pairs


def quoted(value):
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c in text for c in ' "=\n\r\t') else text


def set_up(form):
    """All logging to stdout, as "logfmt" or "json"."""
    handler = Lines()
    handler.setFormatter(Words(form))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("urllib3").setLevel(logging.ERROR)


def note(row, key):
    """A request's line: never a client's own words."""
    fields = {"id": row.id, "key": key.name if key else None, "route": row.route, "model": row.model or None, "status": row.status,
              "error": row.error, "queued_ms": row.queued_ms, "first_ms": row.first_ms, "ms": row.total_ms,
              "prompt": row.prompt_tokens, "completion": row.completion_tokens}
    logging.getLogger("sparks").info("request", extra={"fields": {k: v for k, v in fields.items() if v is not None}})
