"""Sparks: the front door of a small GPU cluster. The command that starts it.

.venv/bin/python sparks.py [--local]            (./run.sh does that, after setting up)
"""

import signal

signal.signal(
    signal.SIGINT, signal.SIG_DFL
)  # Ctrl-C ends the start without a traceback; gunicorn listens to it later

import os

for name in (
    "SCRIPT_NAME",
    "PROMETHEUS_MULTIPROC_DIR",
    "GUNICORN_PID",
    "FORWARDED_ALLOW_IPS",
    "WEB_CONCURRENCY",
    "SENDFILE",
):
    os.environ.pop(name, None)  # libraries read them, some while they are imported
for descriptor in range(
    3
):  # one that is closed would be the next file's or client's, log lines and all
    try:
        os.fstat(descriptor)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)

import argparse
import sys

from log import set_up
from front import master
import settings as settings_module
from errors import SettingsError


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="sparks", description="Start the gateway. Settings: sparks.example.toml."
    )
    parser.add_argument("--local", action="store_true", help="serve a small model on this machine")
    parser.add_argument(
        "--reload", action="store_true", help="let a running gateway read sparks.toml again"
    )
    options = parser.parse_args(arguments)
    try:
        settings = settings_module.load()
        if options.reload:
            return master.tell_to_reload(settings.db)
        try_database(settings.db)
        set_up(settings.log)
        master.run(settings, lambda worker: work(worker, settings, options.local))
    except SettingsError as error:
        sys.exit(f"sparks: {error}")


def try_database(path):
    """Open the database and bring it up to date, in a process that ends with that: the master, which lives on beside the
    worker, needs none of what it loads."""
    pid = os.fork()
    if pid:
        if os.waitpid(pid, 0)[1]:
            sys.exit(1)
        return
    status = 1
    try:
        from store import database

        database.open_database(path)
        status = 0
    except SettingsError as error:
        print(f"sparks: {error}", file=sys.stderr, flush=True)
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def work(worker, settings, is_local):
    """In the worker: the gateway itself, which is loaded here for the same reason."""
    import gateway

    return gateway.start(worker, settings, is_local)


if __name__ == "__main__":
    main()
