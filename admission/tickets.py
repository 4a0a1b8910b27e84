"""What a request needs, and its place among the others."""

from typing import NamedTuple

# Why a ticket waits though there are slots: for a heavy prompt, and for a batch.
READING = "another one is being read"
RESTS = "its key's last one has just been read"
FULL = "it would push what is going on out of the cache"
SPARED = "slots are spared for others"
OUTPUT = 4  # what a token of an answer costs, in tokens of a prompt that is read anew


class Need(NamedTuple):
    """What a request will take of an engine, as far as that is known before.

    tokens  of its prompt, all of it
    answer  tokens of its answer, as many as are usual
    size    bytes of the prompt's text
    hashes  of that text: one for each BLOCK bytes, of all of it up to there
    batch   it gives way to all others
    whole   its answer comes in one piece, so nobody sees when its prompt has been read
    light   its prompt is never long enough to hold others up, whatever its tokens
    """

    tokens: int = 0
    answer: int = 0
    size: int = 0
    hashes: tuple = ()
    batch: bool = False
    whole: bool = False
    light: bool = False

    @property
    def all_tokens(self):
        return self.tokens + self.answer


NO_NEED = Need()


class Ticket:
    """A request in the Gate: `state` is "preparing", "waiting", "active" or "left"; it came at
    `entered`, and was granted its slot at `granted_at`.

    home      the name of the place where its conversation ran last, or None
    place     the name of the place where it runs, once it does
    avoids    the name of a place that did not begin with it, or None
    passed    how many younger ones it has let by
    turn      what its key's turn was before it was granted
    held      why it waits though there are slots: one of the sentences above, or None
    refusal   the Refusal for which it will never have its turn, or None
    cold      tokens of its prompt that its engine has to read anew
    heavy     its prompt was a heavy one when it was granted
    reading   and is still being read
    forced    it went first, since it had waited for too long
    read_in   seconds in which its prompt was read, or its whole answer made; None: nobody saw it
    charged   the work that it is expected to be, in tokens for a share of 1
    reserved  tokens that its key has put by for it
    """

    def __init__(self, key, lane, entered, home=None, need=NO_NEED):
        self.key = key
        self.lane = lane
        self.entered = entered
        self.home = home
        self.need = need
        self.granted_at = self.place = self.avoids = self.held = self.refusal = self.read_in = None
        self.passed = self.turn = self.cold = self.charged = self.reserved = 0
        self.heavy = self.reading = self.forced = False
        self.state = "preparing"

    @property
    def line(self):
        """Which queue of its lane it waits in."""
        return self.need.batch, self.key

    @property
    def waits_as_heavy(self):
        return self.held not in (None, SPARED)

    @property
    def cost(self):
        """The work that it is expected to be, in tokens."""
        return self.cold + OUTPUT * self.need.answer

    def cost_of(self, usage):
        """The work that it was. `usage`: (prompt, those of it that were cached or None, answer)."""
        prompt, cached, answer = usage
        cold = min(self.cold, prompt) if cached is None else prompt - cached
        return max(0, cold) + OUTPUT * max(0, answer)
