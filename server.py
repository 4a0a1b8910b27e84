"""How the app is served: gunicorn with one gevent worker, and what is said when it starts.

gunicorn speaks HTTP with clients. The `Worker` adds what this gateway needs of it: refusals of malformed HTTP in the
API's own shape, a way to end a connection whose body was not read, and no waiting for idle connections at the end.
"""
import fcntl
import logging
import os
import resource
import secrets
import signal
import socket
import sys

import gevent
from gevent import getcurrent
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter
from gunicorn.http import errors as http_errors
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from errors import InternalError, Refusal, SettingsError
from exchange import Response, environ_of, refuse

log = logging.getLogger("sparks")
KEEPALIVE = 75                                      # seconds that an idle connection stays open
GRACE = 5                                           # seconds for what is open when the drain is over
HANG = 600                                          # seconds of CPU in one go after which the worker counts as hung
CONNECTIONS = 10_000
STATUS = {                                          # of malformed HTTP; 400 if not here
    http_errors.LimitRequestLine: 414, http_errors.LimitRequestHeaders: 431, http_errors.ExpectationFailed: 417,
    http_errors.ForbiddenProxyRequest: 403,
}


class Waiting(gevent.Timeout):
    """A connection waits for its next request: for so long at most, and not when the worker is about to end."""

    def __init__(self, worker):
        super().__init__(KEEPALIVE, False)
        self.worker = worker

    def __enter__(self):
        if not self.worker.alive:
            raise StopIteration
        self.worker.waiting.add(getcurrent())
        return super().__enter__()

    def __exit__(self, *error):
        self.worker.waiting.discard(getcurrent())
        return super().__exit__(*error)


class Settled:
    """gunicorn's settings, each looked up once: it asks for dozens of them with each request."""

    def __init__(self, cfg):
        self.found = cfg

    def __getattr__(self, name):
        value = self.__dict__[name] = getattr(self.found, name)
        return value


class Worker(GeventWorker):
    """gunicorn's gevent worker with the three things above, and without its hooks and its own log of requests."""

    on_end = on_quit = on_reload = staticmethod(lambda: None)   # set by the app: for the end, the end at once, SIGHUP

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cfg, self.waiting = Settled(self.cfg), set()

    def load_wsgi(self):
        self.app.worker = self
        super().load_wsgi()

    def init_signals(self):
        super().init_signals()
        signal.signal(signal.SIGHUP, lambda *_: gevent.spawn(self.on_reload))
        signal.signal(signal.SIGINT, self.handle_int)

    def handle_int(self, sig, frame):
        """Ctrl-C reaches the worker too: the first one is as good as SIGTERM, the second ends all at once."""
        if self.alive:
            self.handle_exit(sig, frame)
        else:
            self.handle_quit(sig, frame)

    def handle_quit(self, sig, frame):
        gevent.spawn(self.quit, sig, frame)         # not in the signal's handler: it waits

    def quit(self, sig, frame):
        self.on_quit()
        AsyncWorker.handle_quit(self, sig, frame)

    def timeout_ctx(self):
        return Waiting(self)

    def run(self):
        gevent.spawn(self.part)
        super().run()

    def part(self):
        """Once the worker is to end, finish what is open, and let go of the connections that wait for another request."""
        while self.alive:
            gevent.sleep(0.2)
        self.on_end()
        for greenlet in list(self.waiting):
            gevent.get_hub().loop.run_callback(greenlet.throw, StopIteration())

    def handle_request(self, listener_name, req, sock, addr):
        """One request. StopIteration ends its connection."""
        if req._expected_100_continue:
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        response = Response(req, sock)
        getcurrent().close_after = req.force_close  # for the app: gunicorn does not hand it the request
        if not self.alive:
            req.force_close()
        try:
            self.answer(environ_of(req, sock, addr, listener_name), response)
        except (gevent.GreenletExit, SystemExit, TimeoutError):
            raise StopIteration from None           # the answer is cut: nothing more may follow on this connection
        except Exception as error:
            if isinstance(error, OSError) or not response.begun:
                raise
            log.exception("a fault of the gateway")
            raise StopIteration from None
        if response.closes or req.should_close():
            raise StopIteration

    def answer(self, environ, response):
        items = self.wsgi(environ, response.start_response)
        try:
            for item in items:
                response.write(item)
            response.end()
        finally:
            items.close()

    def handle_error(self, req, client, addr, exc):
        """Answer what never became a request, or what gunicorn would not send. Its own way logs the address with its query."""
        if isinstance(exc, http_errors.ParseException):
            refusal = Refusal(f"this is no valid HTTP request: {type(exc).__name__}", status=STATUS.get(type(exc), 400))
        else:
            log.exception("a fault of the gateway")
            refusal = InternalError("the gateway failed; this is its own fault, and its log has the details")
        ident = secrets.token_hex(16)
        log.warning("%s: %s", ident, refusal.message)
        refuse(client, refusal, ident)


class Application(BaseApplication):
    """gunicorn's settings, and the app that its worker makes by `create()`."""

    def __init__(self, settings, create):
        self.settings, self.create, self.worker = settings, create, None
        super().__init__()

    def load_config(self):
        for name, value in {
            "bind": self.settings.bind, "workers": 1, "worker_class": Worker, "worker_connections": CONNECTIONS,
            "keepalive": KEEPALIVE, "timeout": HANG, "graceful_timeout": int(self.settings.drain + GRACE),
            "control_socket_disable": True, "limit_request_field_size": 16380, "loglevel": "warning", "proc_name": "sparks",
            # No header is a proxy's word; so there is nothing in which to believe anybody, and no address to look at.
            "forwarder_headers": "", "secure_scheme_headers": {}, "forwarded_allow_ips": "*",
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
    try:
        lock = open(db.with_name(db.name + ".pid"), "a+")
    except OSError as error:
        raise SettingsError(f"SPARKS_DB: {error.filename} cannot be written: {error.strerror}") from None
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
            sys.exit(f"sparks: cannot listen on {bind}: {error.strerror or error}; set SPARKS_BIND to another address")


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
        return ", ".join(model.id + (f", {model.context:,} tokens of context" if model.context else "") for model in models)
    if is_local:
        return "is being loaded"
    return "does not answer yet. No vLLM at hand? ./run.sh --local serves a small model on this machine"
