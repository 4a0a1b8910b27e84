"""What runs in the worker: the parts are made, told of each other, and set going."""

import gc
import logging
from urllib.parse import urlsplit

import gevent

import call as calls
import keys
from store import ledger
from engines import local
from log import RequestLog, say
from front import master
import settings as settings_module
from admission import Gate
from front.app import DIALECTS, create_app
from front.body import Bodies
from store.database import open_database
from errors import SettingsError
from metrics import Metrics
from store.seal import own_seal
from engines.fleet import Fleet
from engines.local.process import ServerProcess

logger = logging.getLogger("sparks")
SOON = 5  # seconds in which the engines should have been looked at


def start(worker, settings, is_local):
    """The app of a worker. Also starts the look at the engine, the ledger's upkeep, and the local engine. Raises SettingsError."""
    renew(settings)
    open_database(settings.db)
    first_key = keys.first_key() if is_local else None
    open_database(settings.db, patient=False)
    if is_local:
        local.adopt(settings)
    fleet, book, metrics = Fleet(settings), ledger.Ledger(settings), Metrics()
    gateway = calls.Gateway(
        settings,
        fleet,
        open_gate(settings),
        book,
        Bodies(settings.max_bodies),
        (RequestLog(settings.log).note, metrics.note),
    )
    metrics.watch(gateway)
    for engine, command in zip(fleet.engines, local.COMMANDS if is_local else ()):
        port = urlsplit(engine.url).port
        ServerProcess(port, logger.warning, command, engine.probe_due.set).start()
    gevent.spawn(fleet.watch)
    gevent.spawn(book.keep_up)
    gevent.spawn(announce, settings, fleet, is_local, first_key)
    worker.on_end, worker.on_quit = lambda: gateway.drain(settings.drain), gateway.abandon
    worker.on_reload = lambda: reload(
        gateway, (lambda new: local.adopt(new, settings.upstream)) if is_local else lambda new: None
    )
    DIALECTS["/v1/responses"].seal = own_seal()
    app = create_app(gateway, keys.Keyring(), metrics)
    gc.collect()
    gc.freeze()  # what is loaded stays: the collector need not walk through it
    return app


def renew(settings):
    """Read sparks.toml again: a worker that comes in the place of another one must not go back behind a reload."""
    try:
        settings.update_from(settings_module.load(warn=lambda line: None))
    except SettingsError as error:
        logger.error("a new worker: %s; the settings of the start are in force", error)


def open_gate(settings):
    """A Gate that knows what was used today and this month, before this start."""
    gate, now = Gate(settings.max_active, settings.max_queued), calls.steady_time()
    day = ledger.utc_day(now)
    today, month = ledger.used_by_key(day), ledger.used_by_key(day[:8] + "01")
    for key, tokens in month.items():
        gate.begin(key, today.get(key, 0), tokens, now)
    return gate


def reload(gateway, adapt):
    """Read sparks.toml again; what is wrong with it is logged, and the old settings stay. `adapt` is done to new ones."""
    try:
        new = settings_module.load(warn=logger.warning)
        adapt(new)
    except SettingsError as error:
        return logger.error("reload: %s; the old settings stay", error)
    fixed = gateway.settings.update_from(new)
    gateway.gate.slots, gateway.gate.most_waiting = (
        gateway.settings.max_active,
        gateway.settings.max_queued,
    )
    gateway.bodies.most = gateway.settings.max_bodies
    gateway.fleet.update()
    calls.wake(gateway.gate.grant())
    logger.warning(
        "reload: sparks.toml was read" + (f"; {', '.join(fixed)} need a restart" if fixed else "")
    )


def announce(settings, fleet, is_local, first_key):
    """Say what was started; with a local engine, also how to try it, once it answers."""
    fleet.probed.wait(SOON)
    say(master.screen(settings, fleet.models(), keys.active_keys().count(), is_local))
    if is_local:
        while not any(model.default for model in fleet.models()):
            gevent.sleep(0.1)
        say(local.greeting(f"http://{master.reachable(settings.bind)}", first_key))
