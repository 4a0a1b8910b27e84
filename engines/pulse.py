"""What tells that an engine works, pure: the answers that it owes, its tokens, its own figures.

An engine's core can hang while its server goes on answering every look, and goes on sending the
comments that keep streams alive. So neither is a sign of life here; a token is, and so is a change
of what the engine says about its own work.

Times are passed in: seconds of a clock that nobody sets.
"""

LEAST = 0.02  # seconds between two looks
FIRST = 0.5  # seconds, at most, until the first one
WANTED = 2  # looks for which somebody's wish to know lasts


class Pulse:
    """One engine's signs of life.

    owed     the requests that it has and has not answered. Each has `owed_since`: the moment at
             which the engine had all of it, or None while its answer cannot be waited for: it is
             still being sent, or nobody reads it because its client does not
    heard    the moment of the last token on any of its connections, or of an answer's end
    asked    it has been asked for its figures
    told     the moment at which it answered that
    figures  the last kinds.Figures; None: it has none, and has the clock alone
    changed  the moment at which they changed
    lost     the moment since which it knows of fewer requests than it was sent, or None
    wanted   the moment at which somebody last asked for its progress
    resting  the moment since which it owes nothing, or None: that time does not count
    """

    def __init__(self):
        """It owes nothing."""
        self.owed = set()
        self.wanted = float("-inf")
        self.forget()

    def forget(self):
        """It may be another one by now."""
        self.heard = self.changed = 0.0
        self.resting = 0.0
        self.asked = False
        self.told = 0.0
        self.figures = self.lost = None

    # -- what it owes

    def owe(self, request, now):
        self.owed.add(request)
        self.resume(now)

    def settle(self, request, answered, now):
        """It owes that one no longer. `answered`: because all of its answer has come."""
        if request not in self.owed:
            return
        self.owed.remove(request)
        if answered:
            self.hear(now)
        if not self.owed:
            self.rest(now)

    def owing(self):
        """Since when it has had the requests that it could be answering."""
        moments = [request.owed_since for request in self.owed]
        return [moment for moment in moments if moment is not None]

    def rest(self, now):
        if self.resting is None:
            self.resting = now

    def resume(self, now):
        """The time in which it owed nothing does not count; that of clients which gave up waiting
        and came again does."""
        if self.resting is None:
            return
        idle = now - self.resting
        self.heard = min(self.heard + idle, now)
        self.changed = min(self.changed + idle, now)
        if self.lost is not None:
            self.lost = min(self.lost + idle, now)
        self.resting = None

    # -- what it shows

    def hear(self, now):
        """A token has come, or the end of an answer."""
        self.heard = now

    def is_due(self, now, quiet):
        """Whether its figures should be asked for: it was never asked, while it could still say, or
        it owes an answer, and has been quiet for so long, or somebody wants to know."""
        if self.owing():
            self.resume(now)
        else:
            self.rest(now)
            return not self.asked
        return not self.asked or now - self.heard >= quiet or now - self.wanted <= WANTED * quiet

    def measure(self, figures, now, quiet):
        """Take in its figures, or None where it did not say: that is no progress. Where it says
        that it has none, work None, it has the clock alone from here on.

        quiet  seconds that it has to count a request among its own
        """
        self.asked = True
        if figures is None:
            return
        self.told = now
        if figures.work is None:
            self.figures = self.lost = None
            return
        if self.figures is None or figures.work != self.figures.work:
            self.changed = now
        self.figures = figures
        sent = sum(now - moment >= quiet for moment in self.owing())
        if figures.requests is None or 0 < sent <= figures.requests:
            self.lost = None
        elif sent and self.lost is None:
            self.lost = now

    # -- what that means

    def is_stuck(self, now, patience):
        """Whether it owes an answer and has shown no sign of work for so many seconds: no token,
        and the same figures, or fewer requests in them than it was sent."""
        if self.figures is None or self.resting is not None or now - self.heard < patience:
            return False
        return now - self.changed >= patience or self.has_lost(now, patience)

    def has_lost(self, now, patience):
        return self.lost is not None and now - self.lost >= patience

    def progress(self, now, patience):
        """The moment until which it certainly worked on what it has, which excuses it from an
        answer that waits behind others' work; -inf where nothing is known, or where it has lost
        requests."""
        self.wanted = now
        if self.figures is None or self.has_lost(now, patience):
            return float("-inf")
        return max(self.heard, self.changed)

    def next_look(self, now, quiet, patience):
        """Seconds until there may be something to see: until it has been quiet for so long, or
        would be stuck."""
        if self.resting is not None:
            return quiet if self.asked else min(quiet, FIRST)
        ahead = [now + quiet, self.heard + quiet, self.heard + patience, self.changed + patience]
        return max(min(moment for moment in ahead if moment > now) - now, LEAST)
