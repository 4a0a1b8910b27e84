"""Sparks: the front door of a small GPU cluster. Start reading here: how its parts are put
together.

    .venv/bin/python sparks.py [--local]            (./run.sh does that, after setting up)

There are two processes. `main` runs in gunicorn's master, which listens, forks one worker, and
forks another should that one die. `Service` is what the worker serves.
"""
# ruff: noqa: E402 -- the process has to be prepared before most imports

import contextlib
import ctypes
import os
import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the start without a traceback
# Nor does a wish to reload end it: the worker reads the settings anyway.
signal.signal(signal.SIGHUP, signal.SIG_IGN)

# Libraries read these, some while they are imported; the settings of Sparks are SPARKS_*.
for name in (
    "SCRIPT_NAME",
    "PROMETHEUS_MULTIPROC_DIR",
    "GUNICORN_PID",
    "FORWARDED_ALLOW_IPS",
    "WEB_CONCURRENCY",
    "SENDFILE",
):
    os.environ.pop(name, None)

# The next file or client would get the number of a closed descriptor, and log lines with it.
for descriptor in range(3):
    try:
        os.fstat(descriptor)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)

# glibc would keep what large bodies and answers took. A block over 65 KB, which is more than a read
# of a socket takes, goes back to the system when it is free, and so does what is free at the end.
with contextlib.suppress(OSError, AttributeError):  # another libc
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 65 << 10)  # M_MMAP_THRESHOLD
    libc.mallopt(-1, 4 << 20)  # M_TRIM_THRESHOLD

from gevent import monkey

monkey.patch_all()  # before any module takes sockets, locks or sleep from the standard library

import argparse
import gc
import json
import logging
import sys
from time import time
from urllib.parse import urlsplit

import gevent

import keys
from admission import Gate
from engines import local
from engines.fleet import Fleet
from engines.local.process import ServerProcess
from engines.remedy import Remedies
from errors import SettingsError
from front import lock, master
from front.app import create_app
from front.body import Bodies, Room
from front.screen import described, reachable, screen, told
from gateway import Gateway
from log import RequestLog, say, set_up
from metrics import Metrics
from monitor import Monitor
from people import People
from settings import load
from store import ledger, states
from store.database import DATABASE_FAULTS, check_whole, let_go, never_wait, open_database, whole
from store.file import identity
from store.seal import own_seal, secret

logger = logging.getLogger("sparks")
SOON = 5  # seconds in which the engines should have been looked at
AGAIN = 1  # seconds until another try to write, where the database could not be written


# ---- the master


def main(arguments=None):
    """The command. `arguments` are those of the command line unless given."""
    parser = argparse.ArgumentParser(
        prog="sparks", description="Start the gateway. Settings: sparks.example.toml."
    )
    parser.add_argument("--local", action="store_true", help="serve a small model on this machine")
    parser.add_argument(
        "--reload", action="store_true", help="let a running gateway read sparks.toml again"
    )
    parser.add_argument(
        "--engines", action="store_true", help="say how the engines are, and since when"
    )
    options = parser.parse_args(arguments)
    try:
        settings = load()
        if options.reload:
            return lock.tell_to_reload(settings.db)
        if options.engines:
            return show_engines(settings.db)
        master.check_free(settings.bind, soon=True)
        with lock.take(settings.db):
            try_database(settings.db)
            set_up(settings.log)
            freeze()
            master.run(settings, lambda: Service(settings, options.local))
    except SettingsError as error:
        sys.exit(f"sparks: {error}")


def show_engines(db):
    """Say how the engines are, as the gateway last saw them. Raises SettingsError."""
    open_database(db)
    print(told(states.kept(), time(), lock.is_running(db)))


def try_database(path):
    """Bring the database up to date, or say at once why that cannot be. Raises SettingsError.

    It is closed again: an open SQLite connection must not be carried through a fork
    (sqlite.org/howtocorrupt.html, 2.6).
    """
    open_database(path, alone=True, check=check_whole)
    let_go()
    whole.add(identity(path))  # for the worker, which need not read it again


def freeze():
    """What is loaded stays: the garbage collector need not walk through it, which in the worker
    would also copy the pages of memory that it shares with the master."""
    gc.collect()
    gc.freeze()


# ---- the worker


class Service:
    """A gateway at work: its parts are made, told of each other and set going.

    Raises SettingsError.

    app      the WSGI application
    keeping  the greenlet that writes how the engines are, or None
    kept     the states that it has written last
    """

    def __init__(self, settings, is_local):
        """`is_local`: start engines of our own on this machine."""
        renew(settings)
        open_database(settings.db, alone=True, check=check_whole)
        first_key = keys.first_key() if is_local else None
        never_wait()
        if is_local:
            local.adopt(settings)
        self.settings = settings
        self.is_local = is_local
        self.keeping = None
        self.kept = None
        self.fleet = Fleet(settings)
        self.recall_states()
        self.fleet.notes.append(self.keep_states)
        self.ledger = ledger.Ledger(settings)
        metrics = Metrics()
        self.gateway = Gateway(
            settings,
            self.fleet,
            Gate(settings.max_queued, settings.heavy_prompt, settings.heavy_at_once),
            self.ledger,
            Bodies(settings.max_bodies),
            Room(settings.max_bodies),
            People(secret("people")),
            (RequestLog(settings.log).note, metrics.note),
            metrics.odd,
        )
        self.remedies = Remedies(settings)
        self.fleet.notes += [self.gateway.note_engine, self.remedies.note]
        self.fleet.arranged = self.gateway.arrange
        self.fleet.running = self.gateway.running
        self.gateway.arrange()
        self.gateway.read_budgets()
        metrics.watch(self.gateway)
        self.monitor = Monitor(metrics.run, settings)
        self.app = create_app(
            self.gateway, keys.Keyring(self.ledger.stay_with_the_file), metrics, own_seal()
        )
        self.start(first_key)
        freeze()
        self.monitor.start()

    def start(self, first_key):
        """Begin what runs beside the requests: local engines, looks at all engines, the ledger's
        upkeep."""
        if self.is_local:
            for engine, command in zip(self.fleet.engines, local.COMMANDS, strict=True):
                engine.is_ours = True
                port = urlsplit(engine.url).port
                ServerProcess(port, logger.warning, command, engine.look_due.set).start()
        gevent.spawn(self.fleet.watch)
        gevent.spawn(self.gateway.keep_time)
        gevent.spawn(self.ledger.keep_up)
        gevent.spawn(self.announce, first_key, keys.active_keys().count())

    def announce(self, first_key, active):
        """Say what was started; with a local engine, also how to try it, once it answers."""
        self.fleet.seen.wait(SOON)
        say(screen(self.settings, self.fleet, active, self.is_local))
        if self.is_local:
            while not any(model.default for model in self.fleet.models()):
                gevent.sleep(0.1)
            say(local.greeting(f"http://{reachable(self.settings.bind)}", first_key))

    def recall_states(self):
        """Have the engines know what they had when they were looked at last."""
        engines = {engine.url: engine for engine in self.fleet.engines}
        for state in states.kept():
            listed = json.loads(state.listed)
            if listed and state.engine in engines:
                engines[state.engine].remember(listed, state.purpose)
        self.fleet.update()

    def keep_states(self, engine=None):
        """Have it kept how the engines are, if something has changed."""
        if not self.keeping and self.kept != self.states():  # one that has ended counts as false
            self.keeping = gevent.spawn(self.write_states)

    def states(self):
        return [state_of(engine, self.fleet) for engine in self.fleet.engines]

    def write_states(self):
        """Write how the engines are, as soon as the database can be written."""
        said = None
        while True:
            try:
                now = self.states()
                states.keep(now)
                self.kept = now
                return
            except DATABASE_FAULTS as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("the engines' states cannot be kept: %s", said)
            gevent.sleep(AGAIN)

    def reload(self):
        """Read sparks.toml again; what is wrong with it is logged, and the old settings stay."""
        try:
            new = load(warn=logger.warning)
        except SettingsError as error:
            logger.error("reload: %s; the old settings stay", error)
            return
        settings = self.settings
        if self.is_local:
            local.adopt(new, settings.upstream)
        fixed = settings.update_from(new)
        self.gateway.gate.most_waiting = settings.max_queued
        self.gateway.gate.weigh(settings.heavy_prompt, settings.heavy_at_once)
        self.gateway.bodies.most = settings.max_bodies
        self.gateway.answers.most = settings.max_bodies
        self.fleet.reload()
        self.keep_states()
        restart = f"; {', '.join(fixed)} need a restart" if fixed else ""
        logger.warning("reload: sparks.toml was read%s", restart)

    def drain(self):
        """The end: let nobody in any more, and let live requests end."""
        self.gateway.drain(self.settings.drain)

    def abandon(self):
        """The end at once."""
        self.gateway.abandon()

    def close(self):
        """The very end."""
        self.remedies.stop()
        self.ledger.finish()


def state_of(engine, fleet):
    """An Engine as a store.states.State."""
    health = engine.health
    models = [described(model) for model in fleet.known if engine in model.places.values()]
    return states.State(
        engine.url,
        health.word,
        health.reason,
        health.since,
        health.error,
        "; ".join(models),
        engine.purpose,
        engine.memory(),
    )


def renew(settings):
    """Read sparks.toml again: a worker in the place of another must not go back behind a reload."""
    try:
        settings.update_from(load(warn=lambda line: None))
    except SettingsError as error:
        logger.error("a new worker: %s; the settings of the start are in force", error)


if __name__ == "__main__":
    main()
