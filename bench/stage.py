"""Starts what is measured, on loopback, and ends all of it.

That is the engine, nginx, the gateway, and other gateways.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import settings

from . import machine
from .load import Load, Requests

HERE = Path(__file__).resolve().parent
HOME = HERE.parent
BUILD = HERE / "build"
CHAT = "/v1/chat/completions"
STREAMS = 5000  # more than a measure opens
READY = 30  # seconds for a process until it answers
LIBC = ctypes.CDLL(None)
STOPS = {signal.SIGINT, signal.SIGTERM}
PR_SET_PDEATHSIG = 1


class Missing(Exception):
    """Something isn't here; the message says what, and how to get it."""


@dataclass
class Target:
    """Something that answers chat requests.

    `pids`: what is charged for them; `idle`: MB before the first measure.
    """

    name: str
    port: int
    key: str
    pids: tuple = ()
    path: str = CHAT
    idle: float = 0


# ---- programs


def compile_all():
    """The engine and the load generator, from C. Raises Missing."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise Missing(
            "no C compiler (apt install gcc libc6-dev): nothing but memory can be measured"
        )
    BUILD.mkdir(exist_ok=True)
    ours = {**os.environ, "TMPDIR": str(BUILD)}  # where a compiler leaves its files if it is ended
    for name in ("upstream", "loadgen"):
        command = [compiler, "-O2", "-Wall", "-o", BUILD / name, HERE / f"{name}.c"]
        done = subprocess.run(command, capture_output=True, text=True, env=ours)
        if done.returncode:
            raise Missing(
                f"{name}.c does not compile (apt install libc6-dev): "
                f"nothing but memory can be measured\n{done.stderr[-500:]}"
            )


def nginx_program():
    """Raises Missing."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if not found:
        raise Missing("no nginx (apt install nginx): ratios to it are left out")
    return found


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def answers(url, key=""):
    """Whether GET url is a 200."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=1
        ) as answer:
            return answer.status == 200
    except OSError:
        return False


# ---- the stage


@contextmanager
def undisturbed():
    """Ctrl-C and SIGTERM wait.

    Between a process and the note of how it ends, they would leave it behind.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


class Stage:
    """All processes and files of a run.

    Leaving it ends and removes them, also after Ctrl-C and SIGTERM; if this process is killed, the
    kernel ends its children.
    """

    def __init__(self):
        self.ends = ExitStack()
        self.gateway_cores, self.load_cores = machine.cores()
        self.loadgen, self.targets = BUILD / "loadgen", {}

    def __enter__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="sparks-bench-"))
        self.folder.chmod(0o711)  # nginx's worker is another user
        self.ends.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.requests = Requests(self.folder)
        os.sched_setaffinity(0, self.load_cores)
        return self

    def __exit__(self, *error):
        before = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        self.ends.close()
        for number, handler in before.items():
            signal.signal(number, handler)

    # -- processes

    def start(self, command, cores=None, env=None, pipe=False, log="stage.log", cwd=HOME):
        """A process that ends with this stage; what it says goes to a file, or to a pipe."""

        def prepare():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            os.sched_setaffinity(0, cores or self.load_cores)
            LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

        with open(self.folder / log, "ab") as file, undisturbed():
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=cwd,
                env=env,
                preexec_fn=prepare,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else file,
                stderr=file,
            )
            self.ends.callback(end, process)
        return process

    def wait(self, process, url, log):
        """Until GET url is a 200. Raises Missing with the last that the process said."""
        deadline = time.monotonic() + READY
        while not answers(url, self.key):
            if process.poll() is not None or time.monotonic() > deadline:
                said = (self.folder / log).read_text(errors="replace")[-800:]
                raise Missing(f"{Path(process.args[0]).name} does not answer at {url}:\n{said}")
            time.sleep(0.05)

    def serve(self, name, command, path, port, env=None, cwd=HOME):
        """Start something to measure; it is a Target once GET path is answered. Raises Missing."""
        log = f"{name}.log"
        process = self.start(command, self.gateway_cores, env, log=log, cwd=cwd)
        self.wait(process, f"http://127.0.0.1:{port}{path}", log)
        self.targets[name] = Target(name, port, self.key, tuple(machine.family(process.pid)))
        return self.targets[name]

    def load(self, target, request, **options):
        return Load(self, target, request, **options)

    # -- who plays

    def open_keys(self):
        """The gateway's settings, a database of its own and a key, which is everybody's."""
        self.engine_port = free_port()
        self.environment = gateway_environment(self.folder, self.engine_port)
        self.key = make_key(self.environment)

    def open_engine(self):
        process = self.start([BUILD / "upstream", self.engine_port])
        self.wait(process, f"http://127.0.0.1:{self.engine_port}/health", "stage.log")
        self.targets["direct"] = Target("direct", self.engine_port, self.key)

    def open_nginx(self):
        program, port = nginx_program(), free_port()
        conf = (HERE / "nginx.conf").read_text()
        for name, value in {
            "{PORT}": port,
            "{ENGINE}": self.engine_port,
            "{KEY}": self.key,
        }.items():
            conf = conf.replace(name, str(value))
        (self.folder / "nginx.conf").write_text(conf)
        command = [
            program,
            "-p",
            self.folder,
            "-c",
            self.folder / "nginx.conf",
            "-g",
            "daemon off;",
        ]
        self.serve("nginx", command, "/v1/models", port)

    def open_gateway(self):
        port = int(self.environment["SPARKS_BIND"].rpartition(":")[2])
        self.serve("sparks", [sys.executable, "sparks.py"], "/healthz", port, env=self.environment)


def end(process, seconds=5):
    """SIGTERM, and SIGKILL for what is left of its group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with suppress(ProcessLookupError):  # also children that a start which was broken off has left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdout:
        process.stdout.close()


# ---- the gateway's own


def gateway_environment(folder, engine_port):
    """A gateway of its own: a database in `folder`, slots for all, all else as it comes."""
    own = {setting.variable for setting in settings.SETTINGS}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in own and not name.lower().endswith("_proxy")
    }
    (folder / "sparks.toml").touch()
    return {
        **kept,
        "SPARKS_CONFIG": str(folder / "sparks.toml"),
        "SPARKS_DB": f"sqlite:///{folder}/bench.db",
        "SPARKS_UPSTREAM": f"http://127.0.0.1:{engine_port}",
        "SPARKS_BIND": f"127.0.0.1:{free_port()}",
        "SPARKS_MAX_ACTIVE": str(STREAMS),
    }


def make_key(environment):
    """A key on which every limit is set, none of them near."""
    added = json.loads(keys(environment, "add", "bench", "--json"))
    keys(
        environment,
        "limit",
        "bench",
        "--rpm",
        10**9,
        "--tpm",
        10**12,
        "--active",
        STREAMS,
        "--tokens-per-day",
        10**12,
        "--tokens-per-month",
        10**12,
        "--models",
        "fake*",
        "--expires",
        "2099-12-31",
    )
    return added["key"]


def keys(environment, *arguments):
    command = [sys.executable, "keys.py", *map(str, arguments)]
    return subprocess.run(
        command, cwd=HOME, env=environment, check=True, capture_output=True, text=True, timeout=30
    ).stdout
