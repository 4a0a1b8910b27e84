"""How an engine is, in a word and a sentence. Pure: times are passed in, in epoch seconds.

up             it answers looks
loading        it is there, and not ready yet
busy           it has taken the connection of a look, and is slow to answer
off            there is no connection to it, or it says itself that it is not well
misconfigured  it answers, and not as an engine that people could use: a person has to change that
stuck          it answers looks, and works on nothing
draining       it gets no new requests, as its owner has asked
"""

STATES = ("up", "loading", "busy", "off", "misconfigured", "stuck", "draining")
SERVES = ("up", "busy")
FAILED_LOOKS = 2  # in a row, before an engine that served counts as something else
LEAST_WAIT = 5  # seconds: what a client is told to wait in the beginning of a trouble
MOST_WAITS = {"loading": 30, "busy": 5, "off": 60, "misconfigured": 60, "stuck": 60}


class Trouble(Exception):
    """A look that went wrong.

    word    one of STATES
    reason  why, for the owner: what is wrong and what to do about it
    sure    there is no doubt about it, so one look is enough
    """

    def __init__(self, word, reason, sure=False):
        super().__init__(reason)
        self.word = word
        self.reason = reason
        self.sure = sure


class Health:
    """The state of one engine.

    word    one of STATES
    reason  why, or None while it is up
    since   when that state began
    error   the last trouble there was, as "word: reason", or None
    failed  how many looks in a row have gone wrong
    """

    def __init__(self, now):
        self.word = "loading"
        self.reason = "it has not been asked yet"
        self.since = now
        self.error = None
        self.failed = 0

    @property
    def serves(self):
        """Whether it gets requests."""
        return self.word in SERVES

    def is_well(self, now):
        """A look went well."""
        self.failed = 0
        self.note("up", None, now)

    def is_troubled(self, trouble, now):
        """A look went wrong. One that is slow says little of an engine that serves; other doubtful
        ones must be several in a row: a healthy engine, too, closes a connection now and then."""
        self.failed += 1
        word = trouble.word
        if word == "busy" and not self.serves:
            word = "loading"
        doubtful = not trouble.sure and word != "busy" and self.failed < FAILED_LOOKS
        if self.serves and doubtful:
            self.error = f"{word}: {trouble.reason}"
        else:
            self.note(word, trouble.reason, now)

    def note(self, word, reason, now):
        """It is so from now on, if it was not before. `reason`: see above."""
        if word != self.word:
            self.since = now
        self.word = word
        self.reason = reason
        if reason:
            self.error = f"{word}: {reason}"

    def retry_after(self, now):
        """Whole seconds after which another try makes sense: half as long as the trouble has
        lasted, within bounds of its kind. Only a person ends a misconfiguration."""
        most = MOST_WAITS.get(self.word, LEAST_WAIT)
        if self.word == "misconfigured":
            return most
        return round(min(most, max(LEAST_WAIT, (now - self.since) / 2)))

    def told(self):
        """The state in words: "off: connection refused"."""
        return f"{self.word}: {self.reason}" if self.reason else self.word
