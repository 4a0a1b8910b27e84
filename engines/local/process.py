"""The gateway's side of a local engine: its process is started, started again when it dies, and
ended. A pipe between the two ends the process when the gateway is gone.
"""

import sys
import time

import gevent
from gevent import subprocess

from settings import HOME

FIRST_DELAY = 1  # seconds before a dead server is started again
LONGEST_DELAY = 30
LONG_LIFE = 60  # seconds up, after which the delays begin anew
PATIENCE = 3  # seconds from SIGTERM to SIGKILL


class ServerProcess:
    """A process of engines.local.server that is kept running, from start() to stop().

    port     where it listens on 127.0.0.1
    log      a function that takes one line of text
    command  one of COMMANDS
    on_up    called each time it has begun to answer
    state    "loading", "up" or "down"
    """

    def __init__(self, port, log, command="serve", on_up=lambda: None):
        self.port = port
        self.log = log
        self.command = command
        self.on_up = on_up
        self.state = "down"
        self._child = None
        self._keeper = None

    def start(self):
        self._keeper = gevent.spawn(self._keep)

    def stop(self):
        """End the process within some 3 seconds; it is not started again."""
        if self._keeper:
            self._keeper.kill()
        if self._child:
            _end(self._child)
        self.state = "down"

    def _keep(self):
        delay = 0
        while True:
            started = time.monotonic()
            code = self._run()
            delay = back_off(delay, time.monotonic() - started)
            self.log(f"the local engine stopped (exit {code}); starting it again in {delay} s")
            gevent.sleep(delay)

    def _run(self):
        """Run the process until it ends: its exit code, negative for a signal."""
        self.state = "loading"
        self._child = child = _spawn(self.command, self.port)
        try:
            for line in child.stdout:
                if line.startswith(b"LISTENING"):
                    self.state = "up"
                    self.on_up()
            return child.wait()
        finally:
            self.state = "down"
            child.stdin.close()
            child.stdout.close()


def back_off(last, lived):
    """Seconds to wait before the next start, after a delay of `last` seconds (0: none yet) and a
    life of `lived` seconds."""
    if not last or lived >= LONG_LIFE:
        return FIRST_DELAY
    return min(2 * last, LONGEST_DELAY)


def _spawn(command, port):
    # A session of its own: Ctrl-C in the terminal is for the gateway alone, which then ends it.
    return subprocess.Popen(
        [sys.executable, "-m", "engines.local.server", command, "--port", str(port)],
        cwd=HOME,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _end(child):
    child.terminate()
    try:
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
