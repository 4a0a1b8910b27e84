"""gunicorn's master: it listens, keeps one worker running, and hands signals on to it."""

import errno
import resource
import signal
import socket

from gunicorn import glogging
from gunicorn.app.base import BaseApplication
from gunicorn.arbiter import Arbiter

from errors import SettingsError
from front import connections, heads
from front.worker import Worker

GRACE = 5  # seconds for what is open when the drain is over
HANG = 600  # seconds of CPU in one go after which the worker counts as hung


class Log(glogging.Logger):
    """gunicorn's words go where ours go, which waits for no reader: a master that waited would not
    see that its worker is gone."""

    def setup(self, cfg):
        super().setup(cfg)
        self.error_log.handlers = []
        self.error_log.propagate = True


class Application(BaseApplication):
    """gunicorn's settings, and `create()`, which makes what its worker serves."""

    def __init__(self, settings, create):
        self.settings = settings
        self.create = create
        super().__init__()

    def load_config(self):
        """gunicorn asks for its settings."""
        for name, value in {
            "bind": self.settings.bind,
            "workers": 1,
            "worker_class": Worker,
            "logger_class": Log,
            "worker_connections": connections.MOST + connections.SPARE,
            "timeout": HANG,
            "graceful_timeout": int(self.settings.drain + GRACE),
            "control_socket_disable": True,
            "limit_request_field_size": heads.MOST_FIELD,
            "limit_request_fields": heads.MOST_FIELDS,
            "loglevel": "warning",
            "proc_name": "sparks",
            # No header is taken for a proxy's word, so nobody has to be trusted with one.
            "forwarder_headers": "",
            "secure_scheme_headers": {},
            "forwarded_allow_ips": "*",
        }.items():
            self.cfg.set(name, value)

    def run(self):
        Master(self).run()


class Master(Arbiter):
    """gunicorn's, with other meanings for signals.

    SIGHUP: the worker reads the settings again, and no stream is dropped. SIGINT: streams may end,
    as with SIGTERM.
    """

    def handle_hup(self):
        self.kill_workers(signal.SIGHUP)

    def handle_int(self):
        self.handle_term()

    def handle_ttin(self):
        """No second worker: each would have slots and queues of its own."""

    handle_ttou = handle_ttin

    def spawn_worker(self):
        """Fork. Signals wait meanwhile: the worker would lose them to the handlers that it
        inherits, until it has its own (Worker.init_signals)."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self.SIGNALS)
        try:
            return super().spawn_worker()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)


def run(settings, create):
    """Serve until a signal ends it. `create()` makes what the worker serves, see Worker.

    Raises SettingsError.
    """
    raise_file_limit()
    check_free(settings.bind)
    Application(settings, create).run()


def raise_file_limit():
    """Thousands of streams need several descriptors each; the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections.DESCRIPTORS * connections.MOST
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_free(bind, soon=False):
    """Raises SettingsError if the address cannot be listened on: gunicorn would try for seconds,
    and then say less. `soon`: it may be in use, by a gateway that is about to end."""
    host, _, port = bind.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except (OSError, UnicodeError, TypeError) as error:  # the last two: what is no host's name
            if soon and getattr(error, "errno", None) == errno.EADDRINUSE:
                return
            reason = getattr(error, "strerror", None) or error
            raise SettingsError(
                f"cannot listen on {bind}: {reason}; set SPARKS_BIND to another address"
            ) from None
