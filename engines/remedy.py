"""The owner's command for an engine that is stuck (`on_stuck`): it is run, watched, and ended."""

import logging
import os
import signal
from contextlib import suppress
from time import monotonic

import gevent
from gevent import subprocess
from gevent.os import make_nonblocking, nb_read

logger = logging.getLogger("sparks")
TIME = 300  # seconds until a command that still runs is killed, and until one that has not helped
# is run again
LINE = 500  # characters of a line of its output that are logged
LINES = 100  # of its lines that are logged
READ = 4096  # bytes at a time
HASTE = 0.01  # seconds between two reads: whatever a command says, it holds nobody up
LAST_WORDS = 0.2  # seconds for output that is still to come when it has ended


class Remedies:
    """Runs the owner's command for each engine that is stuck.

    found  {the engine's URL: its Remedy}
    """

    def __init__(self, settings):
        self.settings = settings
        self.found = {}

    def note(self, engine):
        """An engine has been looked at."""
        command = self.settings.on_stuck
        if engine.health.word != "stuck" or not command:
            return
        remedy = self.found.setdefault(engine.url, Remedy(engine.url))
        remedy.apply(command, self.settings.on_stuck_pause, engine.health.since)

    def stop(self):
        """End what runs."""
        for remedy in self.found.values():
            remedy.stop()


class Remedy:
    """Runs a command, one at a time and not again within a while.

    since    since when its engine was stuck at the last time (epoch seconds)
    served   the same of the last time for which it was run
    running  the greenlet in which it runs or ran last, or None
    begun    the moment at which that began (monotonic)
    """

    def __init__(self, url):
        """`url`: the engine's, which the command finds as SPARKS_ENGINE."""
        self.url = url
        self.since = self.served = None
        self.running = None
        self.begun = float("-inf")

    def apply(self, command, pause, since):
        """Run the command line, unless it runs, or began less than `pause` seconds ago: then later,
        should the engine still be stuck.

        since  since when it is stuck (epoch seconds)
        """
        is_new = since != self.since
        self.since = since
        least = pause if since != self.served else max(pause, TIME)
        now = monotonic()
        if self.running and not self.running.ready() or now - self.begun < least:
            if is_new:
                logger.warning("on_stuck is not run again for %s: it has been just now", self.url)
            return
        self.begun = now
        self.served = since
        logger.warning("on_stuck is run for %s", self.url)
        self.running = gevent.spawn(run, command, self.url)

    def stop(self):
        """End it."""
        if self.running:
            self.running.kill()


def run(command, url):
    """Run a command line to its end, or to that of its time."""
    ours, its = os.pipe()
    reader = gevent.spawn(log_lines, ours)
    try:
        child = start(command, url, its)
    except OSError as error:
        logger.error("on_stuck cannot be run: %s", error)
        child = None
    finally:
        os.close(its)
    try:
        if child:
            watch(child)
            reader.join(LAST_WORDS)  # what it has left running may keep the pipe open
    finally:
        reader.kill()
        os.close(ours)


def start(command, url, output):
    """The shell with the command, in a process group of its own."""
    return subprocess.Popen(
        ["/bin/sh", "-c", command],
        env={**os.environ, "SPARKS_ENGINE": url},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


def watch(child):
    """Wait for its end, or make it; what it has left running is its own affair."""
    try:
        code = child.wait(TIME)
        logger.warning("on_stuck has ended with %s", code)
    except subprocess.TimeoutExpired:
        logger.error("on_stuck has not ended within %s s and is killed", TIME)
    finally:
        if child.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def log_lines(pipe):
    """Log what comes, without haste: as many lines as anybody reads; the rest is thrown away."""
    make_nonblocking(pipe)
    left = LINES
    rest = b""
    while data := nb_read(pipe, READ):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines[:left]:
            log_line(line)
        left = max(left - len(lines), 0)
        rest = rest[:LINE]
        gevent.sleep(HASTE)
    if rest and left:
        log_line(rest)


def log_line(line):
    logger.warning("on_stuck: %s", line.decode("utf-8", "replace")[:LINE])
