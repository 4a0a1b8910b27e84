"""The watchdog of an engine: finds out that its core hangs, whatever its server says, and lets it in
again when it has shown that it works."""

import logging
from time import monotonic, time

import gevent
import orjson

from engines.remedy import Remedy

logger = logging.getLogger("sparks")
QUIET = 5  # seconds of silence after which it is asked how far it is, or a part of `stuck_after`
PARTS = 4
QUESTION = 5  # seconds for that question
CANARY = 5  # seconds for the first canary; each further one has twice as long, up to `stuck_after`
MAX_PAGE = 1 << 20  # bytes of the answers to both


class Watchdog:
    """Watches over one engine.

    engine   fleet.Engine
    told     a function that is called with the engine when it is stuck
    tries    canaries in a row that came to nothing
    """

    def __init__(self, engine, settings, told):
        self.engine = engine
        self.settings = settings
        self.told = told
        self.remedy = Remedy(engine.url)
        self.tries = 0

    def watch(self):
        """For ever."""
        while True:
            gevent.sleep(self.pulse.next_look(monotonic(), self.quiet, self.settings.stuck_after))
            try:
                self.look()
            except Exception:  # whatever an engine says: the next look may do better
                logger.exception("the watchdog of an engine failed")

    @property
    def pulse(self):
        return self.engine.pulse

    @property
    def quiet(self):
        return min(QUIET, self.settings.stuck_after / PARTS)

    def look(self):
        """Ask how far it is, if that is in doubt, and end what it owes if it is stuck."""
        pulse = self.pulse
        if not pulse.is_due(monotonic(), self.quiet):
            return
        figures = self.engine.ask(self.engine.kind.progress)
        pulse.measure(figures, monotonic(), self.quiet)
        if pulse.is_stuck(monotonic(), self.settings.stuck_after):
            self.give_up()
