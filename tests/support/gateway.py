"""The gateway as a process of its own, as it is and with a part of it replaced.

    with started(engine, folder, stock, patch="import pump; pump.TICK = 0.1", max_active=2) as gateway:
        gateway.client().post("/v1/chat/completions", {...})
"""
import shutil
import subprocess
import sys
from contextlib import contextmanager

from support import ROOT
from support.client import Client
from support.engine import MODELS
from support.processes import answers, clean_environment, end, free_port, kill, spawn, wait_until
from support.runs import LONGEST, too_long

# A second model that embeds, by the same scripted engine.
WITH_VECTORS = f"""
[models."{MODELS[0]["id"]}"]
[models.vectors]
engine = "{MODELS[0]["id"]}"
kind = "embedding"
"""
START = """
from gevent import monkey
monkey.patch_all()
{patch}
import sparks
sparks.main([])
"""


def run_keys(*arguments, db):
    """`python keys.py …` on that database file, as a CompletedProcess with text."""
    environment = clean_environment(db=f"sqlite:///{db}")
    return subprocess.run([sys.executable, "keys.py", *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=30)


def add_key(name, db):
    done = run_keys("add", name, db=db)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


class Gateway:
    """sparks.py as a process of its own.

    url, key, pid, db, log (all it wrote so far), process; `traceback_allowed` = True for a test that means one, and
    `long_runs_allowed` for one that holds the event loop on purpose.
    """

    def __init__(self, folder, upstream, stock, config="", db=None, **settings):
        self.db, self.key = db or folder / "sparks.db", stock[1]
        if not db:
            _copy_database(stock[0], self.db)
        (folder / "sparks.toml").write_text(config, encoding="utf-8")
        self.log_file, self.traceback_allowed, self.long_runs_allowed = folder / "gateway.log", False, False
        self.settings = {"upstream": upstream, "bind": f"127.0.0.1:{free_port()}", "db": f"sqlite:///{self.db}",
                         "poll": 0.2, "loop_warn": LONGEST, "config": folder / "sparks.toml", **settings}
        self.url = f"http://{self.settings['bind']}"
        self.launch()

    def launch(self):
        """Start the process; also again, after stop() or kill(), on the same address and database."""
        self.process = spawn(self.command(), self.log_file, clean_environment(**self.settings))
        self.pid = self.process.pid

    def command(self):
        return [sys.executable, "sparks.py"]

    def wait_alive(self, seconds=15):
        try:
            wait_until(lambda: answers(f"{self.url}/healthz"), seconds, self.process, "GET /healthz")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None
        return self

    def wait_ready(self, seconds=10):
        """Until the model is listed."""
        client, edge = self.client(), {"x-sparks-edge": self.settings.get("edge_secret")}
        wait_until(lambda: client.get("/v1/models", edge).json().get("data"), seconds, self.process, "a model in /v1/models")
        return self

    @property
    def log(self):
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def client(self, key=None, **options):
        """A Client with the stock's key, with another one, or with none: key=False."""
        return Client(self.url, self.key if key is None else key, **options)

    def add_key(self, name):
        return add_key(name, self.db)

    def keys(self, *arguments):
        return run_keys(*arguments, db=self.db)

    def stop(self, seconds=15):
        """SIGTERM; the exit code."""
        return end(self.process, seconds)

    def kill(self):
        """SIGKILL for all of it."""
        kill(self.process)

    def check_log(self, since=0):
        if not self.traceback_allowed:
            assert "Traceback" not in self.log[since:], self.log[since:]
        if not self.long_runs_allowed:
            runs = too_long(self.log[since:])
            assert not runs, "nothing may hold the event loop for so long:\n" + "\n".join(runs)


def _copy_database(source, target):
    for part in source.parent.glob(source.name + "*"):
        shutil.copy2(part, target.with_name(part.name.replace(source.name, target.name, 1)))


class Patched(Gateway):
    """A gateway that runs the Python text `patch` before it starts."""

    def __init__(self, folder, upstream, stock, patch="", **settings):
        self.patch = patch
        super().__init__(folder, upstream, stock, **settings)

    def command(self):
        return [sys.executable, "-c", START.format(patch=self.patch)] if self.patch else super().command()


@contextmanager
def started(engine, folder, stock, patch="", wait=True, **settings):
    """A Patched gateway before that engine, or its URL, until the end of the block."""
    gateway = Patched(folder, getattr(engine, "url", engine), stock, patch, **settings)
    try:
        yield gateway.wait_alive().wait_ready() if wait else gateway
        gateway.stop()
        gateway.check_log()
    finally:
        gateway.kill()


class Shared:
    def __init__(self, engine, gateway):
        self.engine, self.gateway = engine, gateway
        self.url, self.key, self.client = gateway.url, gateway.key, gateway.client
