"""The watchdog of an engine: finds out that it works on nothing, whatever its server says."""

import logging
from time import monotonic, time

import gevent

logger = logging.getLogger("sparks")
QUIET = 5  # seconds of silence, at most, after which it is asked how far it is;
PARTS = 4  # or such a part of `stuck_after`, or `poll`


class Watchdog:
    """Watches over one engine.

    told  a function that is called with the engine once it is stuck
    """

    def __init__(self, engine, settings, told):
        self.engine = engine
        self.pulse = engine.pulse
        self.settings = settings
        self.told = told

    def watch(self):
        """For ever."""
        while True:
            patience = self.settings.stuck_after
            gevent.sleep(self.pulse.next_look(monotonic(), self.quiet, patience))
            try:
                self.look()
            except Exception:  # whatever an engine says: the next look may do better
                logger.exception("the watchdog of an engine failed")

    @property
    def quiet(self):
        return min(QUIET, self.settings.poll, self.settings.stuck_after / PARTS)

    def look(self):
        """Ask how far it is, if there is doubt, and say so if it is stuck."""
        known = self.engine.health.word == "stuck"
        seen = self.engine.was_up  # so that its kind is known
        if known or not seen or not self.pulse.is_due(monotonic(), self.quiet):
            return
        self.pulse.measure(self.engine.figures(), monotonic(), self.quiet)
        now = monotonic()
        if self.pulse.is_stuck(now, self.settings.stuck_after):
            self.engine.health.note("stuck", self.reason(now), time())
            self.told(self.engine)

    def reason(self, now):
        """Why it is stuck, for its owner."""
        pulse = self.pulse
        silent = f"it owes {len(pulse.owed)} answers and has sent no token"
        if pulse.has_lost(now, self.settings.stuck_after):
            return f"{silent} for {now - pulse.heard:.0f} s, and knows nothing of some of them"
        return f"{silent} and made no progress for {now - max(pulse.heard, pulse.changed):.0f} s"
