"""Lanes, in which requests for a model wait, and places, where they run."""

from collections import deque
from typing import NamedTuple

from admission.mirror import Mirror

SAMPLES = 16  # of the moments at which slots came free, to tell how fast they do
HOT = 300  # seconds since its last turn for which a conversation is going on
REST = 1  # times the reading of its last long prompt that a key waits before the next one
TURNOVER = 5  # times the reading of a prompt before another one may push a conversation out
PATIENCE = 180  # seconds after which whoever waits longest goes first
PACE = 1000  # tokens a second at which prompts are read, until that was seen
LEARNT = 0.2  # of a pace that was seen
FADING = 0.05  # of a pace, for each long prompt that nobody saw being read
LULL = 2  # seconds without any request after which what is cached holds up nobody
FRESH = 30  # seconds after which what runs is noted to be in use again


class Lane:
    """The requests for one model: a queue for each line (see Ticket.line), the names of the places
    where they can run, and when slots came free."""

    def __init__(self):
        self.queues = {}
        self.places = ()
        self.freed = deque(maxlen=SAMPLES)


class Line(deque):
    """The tickets of one line, first come, first served.

    granted  {whether the prompt was a heavy one: when the last such was granted}
    """

    def __init__(self):
        """Nobody waits yet."""
        super().__init__()
        self.granted = dict.fromkeys((True, False), float("-inf"))


class Seats(NamedTuple):
    """What a place is: how many requests run there at once, how many it takes beside others of
    another weight, whether it takes new ones, for how many tokens its cache has room (None where
    nobody knows, 0 where nothing is kept), and whether its model is loaded, or would be by the next
    request."""

    slots: int
    weight: float = 1
    open: bool = True
    capacity: int | None = None
    loaded: bool = True


class Place:
    """Where requests run, of one lane or of several. The rest is as in Seats.

    running    the tickets that have its slots
    reading    those of them with a long prompt that is still being read
    last_turn  when it was last given a request, counted in grants
    mirror     mirror.Mirror of its cache
    pace       tokens a second at which it reads a long prompt, or None
    rested     {key: the moment until which it rests after its last long prompt}
    left       when a request left it last
    forced     when the last one went first because it had waited longest; later, where that has
               pushed a conversation out
    """

    def __init__(self):
        """Closed, until `set_up` says what it is."""
        self.slots = 0
        self.weight = 1
        self.open = False
        self.capacity = None
        self.running = {}  # as a set that keeps its order
        self.reading = {}
        self.last_turn = 0
        self.mirror = Mirror()
        self.pace = None
        self.rested = {}
        self.left = self.forced = self.freshened = float("-inf")

    @property
    def active(self):
        return len(self.running)

    @property
    def load(self):
        return self.active / self.weight

    @property
    def load_with_another(self):
        return (self.active + 1) / self.weight

    def set_up(self, seats):
        """It is so from now on. What was off, or is not loaded, has nothing in its cache."""
        if seats.open and not self.open or not seats.loaded:
            self.mirror.clear()
        self.slots, self.weight, self.open, self.capacity, _ = seats
        self.mirror.resize(self.capacity)

    # -- who runs

    def begin(self, ticket, is_heavy, now):
        """A ticket runs here from now on."""
        self.running[ticket] = True
        ticket.granted_at = now
        ticket.cold = self.mirror.cold(ticket.need)
        ticket.heavy = ticket.reading = is_heavy
        if is_heavy:
            self.reading[ticket] = True
        self.mirror.touch(ticket.key, ticket.need, now, self.mirror.hits(ticket.need))

    def end(self, ticket, answered, now):
        """It does no more. What was read of its prompt by then is cached all the same."""
        del self.running[ticket]
        self.left = now
        if answered and ticket.need.whole:
            ticket.read_in = now - ticket.granted_at
        if ticket.reading and not answered:
            hits = self.mirror.hits(ticket.need)
            missing = len(ticket.need.hashes) - hits
            read = min(1, self.progress(ticket, now) or 0)
            self.stop_reading(ticket, now, hits + int(missing * read))
        else:
            self.stop_reading(ticket, now)

    def give_up(self, ticket):
        """It has not begun here."""
        del self.running[ticket]
        self.reading.pop(ticket, None)
        ticket.heavy = ticket.reading = ticket.forced = False

    def has_read(self, ticket, now):
        """Its prompt has been read."""
        if not ticket.need.whole:
            ticket.read_in = now - ticket.granted_at
        self.stop_reading(ticket, now)

    def learn(self, ticket, prompt, cached):
        """Learn from an answer, whose engine says how long its prompt was, and how much of that was
        cached; None: not that."""
        cold = ticket.cold
        if cached is not None:
            cold = max(0, prompt - cached)
            self.mirror.correct(ticket, prompt, cold)
        if ticket.heavy and ticket.read_in and 2 * cold >= ticket.cold:
            self.note_pace(cold / ticket.read_in, ticket.need.whole)

    def note_pace(self, seen, at_least):
        """`at_least`: it was that pace or a higher one. One that is higher than before is believed
        with care: more may have been cached than anybody knew."""
        if at_least:
            self.pace = max(seen, (1 - FADING) * (self.pace or 0))
        elif self.pace is None:
            self.pace = seen
        elif seen > self.pace:
            self.pace += LEARNT * (min(seen, 2 * self.pace) - self.pace)
        else:
            self.pace += (seen - self.pace) / 2

    def stop_reading(self, ticket, now, count=None):
        """Nobody waits for it any more but, if it was a long one, its own key's next one."""
        if ticket.reading:
            del self.reading[ticket]
            ticket.reading = False
            self.rested = {key: until for key, until in self.rested.items() if until > now}
            self.rested[ticket.key] = now + REST * (now - ticket.granted_at)
            if ticket.forced:
                until = ticket.granted_at + TURNOVER * (now - ticket.granted_at)
                self.forced = max(self.forced, until)
        self.mirror.touch(ticket.key, ticket.need, now, count)

    def read_by(self, now):
        """Those whose prompt should have been read by now, where nobody sees it."""
        whole = [ticket for ticket in self.reading if ticket.need.whole]
        return [ticket for ticket in whole if (self.progress(ticket, now) or 0) >= 1]

    def progress(self, ticket, now):
        """How much of its prompt should have been read, 1 for all of it; None: nobody knows."""
        if self.pace is None:
            return None
        return (now - ticket.granted_at) * self.pace / max(1, ticket.cold)

    def is_resting(self, key, now):
        return now < self.rested.get(key, now)

    def force(self, ticket, now):
        """It goes first, since it has waited for too long; the next such one later."""
        ticket.forced = True
        pace = max(self.pace or PACE, PACE / 2)  # what had to be loaded first seemed slow
        self.forced = now + TURNOVER * self.mirror.cold(ticket.need) / pace

    def freshen(self, now):
        """What runs is in use all the time."""
        if now - self.freshened >= FRESH:
            self.freshened = now
            for ticket in self.running:
                if not ticket.reading:
                    self.mirror.touch(ticket.key, ticket.need, now)

    # -- what its cache has room for

    def has_room(self, ticket, now):
        """Whether nothing that is going on would be pushed out by a prompt. Where nothing has run
        for a moment, or nothing is kept, any prompt may come."""
        is_idle = not self.running and now - self.left >= LULL
        if is_idle or not self.capacity or not self.mirror.most:
            return True
        self.freshen(now)
        taken = self.mirror.hot_tokens(now - HOT) + sum(other.cold for other in self.reading)
        room = min(self.capacity, self.mirror.most)
        return not taken or taken + self.mirror.cold(ticket.need) + ticket.need.answer <= room

    def serves_others(self, key, now):
        """Whether conversations of other keys are going on in its cache."""
        return any(block.key != key for _, block in self.mirror.hot(now - HOT))

    def conversations(self, now):
        """How many are going on in its cache."""
        hot = dict(self.mirror.hot(now - HOT))
        return len(hot.keys() - {block.before for block in hot.values()})
