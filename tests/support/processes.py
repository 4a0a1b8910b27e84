"""Processes of their own: their environment, their ports, and until when to wait for them."""
import os
import signal
import socket
import subprocess
import time
import urllib.request
from itertools import count
from pathlib import Path

from support import ROOT

# Ports of our own, below those that the kernel gives to outgoing connections (32768 on): one that a test stands by for a
# gateway that restarts can't become the other end of somebody's connection. Each worker of pytest-xdist has its range.
FIRST_PORT, PORTS_EACH = 20_000, 1_000
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
TURNS = count(os.getpid() * 37)                     # two runs on one machine begin at different places
PATIENCE = 3                                        # a machine with much else to do takes so many times as long
CLAIMS = {}                                         # port -> the socket that claims it for this process


def clean_environment(**settings):
    """The environment without SPARKS_ variables and proxies, and with these: max_active=2 is SPARKS_MAX_ACTIVE=2."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("SPARKS_") and not name.lower().endswith("_proxy")}
    given = {f"SPARKS_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
    return {**kept, "PYTHONUNBUFFERED": "1", **given}


def free_port():
    """A port of 127.0.0.1 that nobody has; the same one comes again only after all others of the range."""
    for _ in range(PORTS_EACH):
        port = FIRST_PORT + WORKER % 12 * PORTS_EACH + next(TURNS) % PORTS_EACH
        if is_claimed(port) and is_free(port):
            return port
    raise AssertionError("no port is free")


def is_claimed(port):
    """Whether the port is this process's until it ends: another run of the tests on this machine passes it over. A name
    in Linux's abstract namespace is a lock that needs no file, and goes with its process."""
    if port not in CLAIMS:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0sparks-test-port-{port}")
        except OSError:
            claim.close()
            return False
        CLAIMS[port] = claim
    return True


def is_free(port):
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_until(true, seconds, process=None, what="something"):
    """Until true() is; fails when the time, as it takes on an idle machine, is long up or the process has ended."""
    end = time.monotonic() + seconds * PATIENCE
    while not true():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"{what}: the process ended with {process.returncode}")
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.02)


def answers(url, seconds=1):
    """Whether GET url is a 200."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=seconds) as answer:
            return answer.status == 200
    except OSError:
        return False


def spawn(command, log_file, environment):
    """A process in a group of its own, what it says going to a file."""
    with open(log_file, "ab") as log:
        return subprocess.Popen([str(part) for part in command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                                stdout=log, stderr=log, start_new_session=True)


def end(process, seconds=15):
    """SIGTERM, then wait: the exit code. What doesn't end is killed and fails."""
    if process.poll() is not None:
        return process.returncode
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(f"{process.args} went on for {seconds} s after SIGTERM") from None


def kill(process):
    """SIGKILL for the process and its children: it leads a group of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
