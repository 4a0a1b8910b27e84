"""The gate without each of its parts, and with some of them alone."""

from functools import partial

from admission.accounts import Account
from counting import BYTES_A_TOKEN

from .policies import HEAVY, Gated

TELLING = ("freeze", "abuse", "batch", "sneak", "talk", "thrash", "office")  # traces
MANY = 1000


class Without(Gated):
    """admission.Gate without some parts, by their names in PARTS."""

    def __init__(self, *parts):
        super().__init__(HEAVY)
        self.parts = parts

    def open(self, world):
        super().open(world)
        for part in self.parts:
            PARTS[part](self)

    @property
    def places(self):
        return self.gate.places.values()


def put(owner, name, function):
    """In place of a method of that name, which there has to be."""
    assert callable(getattr(owner, name)), f"{owner} has no method {name}"
    setattr(owner, name, function)


def heavy(policy):
    """Any number of heavy prompts are read at once."""
    policy.gate.at_once = MANY


def rest(policy):
    """No key rests after a heavy prompt."""
    put(policy.gate, "is_shared", lambda *_: False)


def mirror(policy):
    """All of each prompt is taken for cold."""
    for place in policy.places:
        put(place.mirror, "hits", lambda _: 0)


def correction(policy):
    """The mirror stays as large as the cache is said to be."""
    for place in policy.places:
        put(place.mirror, "correct", lambda *_: None)


def room(policy):
    """Conversations that are going on may be pushed out of the cache."""
    for place in policy.places:
        put(place, "has_room", lambda *_: True)


def aging(policy):
    """Whoever waits longest has no turn for that."""
    put(policy.gate, "overdue", lambda *_: None)


def turnover(policy):
    """The next one that waits longest has its turn as soon as it has waited for long enough."""
    for place in policy.places:
        put(place, "force", partial(note_forced, place))


def note_forced(place, _, now):
    place.forced = now


def turns(policy):
    """A turn is a turn, however much work it is."""
    accounts = policy.gate.accounts
    put(policy.gate, "account", lambda key: accounts.setdefault(key, Equal()))


class Equal(Account):
    """Of the work that it is charged, only the number of turns counts."""

    def begin_work(self, ticket):
        self.worked += 1 / (self.limits.share or 1)

    def end_work(self, ticket, work, most):
        pass


def estimates(policy):
    """Tokens are told by bytes in the same way for ever."""
    put(policy.meter.prompts, "learn", lambda *_: None)
    policy.meter.begin_with(BYTES_A_TOKEN)


def batch(policy):
    """Batches are like all others."""
    need = policy.need
    put(policy, "need", lambda request: need(request)._replace(batch=False))


PARTS = {
    part.__name__: part
    for part in (heavy, rest, mirror, correction, room, aging, turnover, turns, estimates, batch)
}


def only(*kept):
    return partial(Without, *(part for part in PARTS if part not in kept))


KNOWLEDGE = ("mirror", "correction", "estimates")  # which do nothing by themselves
VARIANTS = {
    **{f"without {part}": partial(Without, part) for part in PARTS},
    "heavy alone": only("heavy", *KNOWLEDGE),
    "heavy, rest": only("heavy", "rest", *KNOWLEDGE),
    "room, aging": only("room", "aging", "turnover", *KNOWLEDGE),
    "turns alone": only("turns", *KNOWLEDGE),
    "batch alone": only("batch", *KNOWLEDGE),
}
