"""How the app is served: gunicorn's master with one worker, and what is said when it starts."""

import fcntl
import os
import resource
import signal
import socket
import sys

from gunicorn import glogging
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.workers import base

from errors import SettingsError

KEEPALIVE = 75  # seconds that an idle connection stays open
GRACE = 5  # seconds for what is open when the drain is over
HANG = 600  # seconds of CPU in one go after which the worker counts as hung
CONNECTIONS = 10_000


class Log(glogging.Logger):
    """gunicorn's words go where ours go, which waits for no reader: a master that did would not see that its worker is gone."""

    def setup(self, cfg):
        super().setup(cfg)
        self.error_log.handlers, self.error_log.propagate = [], True


class Placeholder(base.Worker):
    """The worker as the master knows it. The real one is made in its own process alone: of all that one loads, the master,
    which lives on beside it, needs nothing."""

    def __init__(self, *args):
        super().__init__(*args)
        self.args = args

    def init_process(self):
        signal.pthread_sigmask(
            signal.SIG_BLOCK, self.SIGNALS
        )  # until the worker has handlers: the master's would lose them
        from front.worker import Worker

        worker = Worker(*self.args)
        worker.pid, worker.tmp = self.pid, self.tmp
        try:
            worker.init_process()
        except SettingsError as error:
            print(f"sparks: {error}", file=sys.stderr, flush=True)
            sys.exit(Arbiter.WORKER_BOOT_ERROR)  # which ends the master
        finally:
            self.booted = worker.booted


class Application(BaseApplication):
    """gunicorn's settings, and the app that its worker makes by `create()`."""

    def __init__(self, settings, create):
        self.settings, self.create, self.worker = settings, create, None
        super().__init__()

    def load_config(self):
        for name, value in {
            "bind": self.settings.bind,
            "workers": 1,
            "worker_class": Placeholder,
            "logger_class": Log,
            "worker_connections": CONNECTIONS,
            "keepalive": KEEPALIVE,
            "timeout": HANG,
            "graceful_timeout": int(self.settings.drain + GRACE),
            "control_socket_disable": True,
            "limit_request_field_size": 16380,
            "loglevel": "warning",
            "proc_name": "sparks",
            # No header is a proxy's word; so there is nothing in which to believe anybody, and no address to look at.
            "forwarder_headers": "",
            "secure_scheme_headers": {},
            "forwarded_allow_ips": "*",
        }.items():
            self.cfg.set(name, value)

    def load(self):
        return self.create(self.worker)

    def run(self):
        Master(self).run()


class Master(Arbiter):
    """gunicorn's master. SIGHUP means: read the settings again, and drop no stream. SIGINT lets streams end, as SIGTERM does."""

    def handle_hup(self):
        self.kill_workers(signal.SIGHUP)

    def handle_int(self):
        self.handle_term()

    def handle_ttin(self):
        """No second worker: each would have slots and queues of its own."""

    handle_ttou = handle_ttin


def run(settings, create):
    """Serve until a signal ends it. `create(worker)` makes the app, in the worker. Raises SettingsError."""
    raise_file_limit()
    check_free(settings.bind)
    lock = lock_database(settings.db)
    if lock is None:
        raise SettingsError(f"SPARKS_DB: a gateway runs on {settings.db} already")
    Application(settings, create).run()


def lock_database(db):
    """The file that a gateway holds locked, its pid in it, as long as it lives; None if another one does. Raises SettingsError."""
    path = db.with_name(db.name + ".pid")
    try:
        lock = open(path, "a+")
    except OSError as error:
        raise SettingsError(
            f"SPARKS_DB: {path} cannot be written: {error.strerror or error}"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def tell_to_reload(db):
    """Send SIGHUP to the gateway that runs on this database. Raises SettingsError."""
    if lock_database(db):
        raise SettingsError("no gateway runs here that could reload")
    pid = int(db.with_name(db.name + ".pid").read_text())
    os.kill(pid, signal.SIGHUP)
    print(f"sparks: sparks.toml is in order; gateway {pid} reads it now")


def raise_file_limit():
    """Thousands of streams need two descriptors each; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * CONNECTIONS if hard == resource.RLIM_INFINITY else min(4 * CONNECTIONS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_free(bind):
    """End with one line if the address cannot be listened on: gunicorn would try for seconds and then say less."""
    host, _, port = bind.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            sys.exit(
                f"sparks: cannot listen on {bind}: {error.strerror or error}; set SPARKS_BIND to another address"
            )


# ---- what is said at the start


def screen(settings, models, keys, is_local):
    """The start in one screen. `models` are those that are loaded, `keys` counts the active ones."""
    where = f"http://{reachable(settings.bind)}"
    lines = [
        f"listens at  {settings.bind}",
        f"people use  {settings.base_url or where}/v1   (everything is explained at {where}/help)",
        f"fronts      {'a small model on this machine' if is_local else ', '.join(settings.upstream)}",
        f"engine      {engine_line(models, is_local)}",
        f"keys        {f'{keys} active' if keys else 'none yet'}; ./run.sh keys add NAME makes one",
    ]
    return "\n".join(["Sparks", *(f"  {line}" for line in lines)])


def reachable(bind):
    """The address at which this machine reaches what it listens on."""
    return bind.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")


def engine_line(models, is_local):
    if models:
        return ", ".join(
            model.id + (f", {model.context:,} tokens of context" if model.context else "")
            for model in models
        )
    if is_local:
        return "is being loaded"
    return "does not answer yet. No vLLM at hand? ./run.sh --local serves a small model on this machine"
