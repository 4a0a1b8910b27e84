"""Who sends what, and when. A trace starts conversations and jobs in a world, and says until when
it runs. All are invented: no recording was at hand.

Sizes are tokens, times seconds; of two in brackets one is the least and one the most. Each
conversation has a chance of its own, so that it says the same whatever the gate does.
"""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from .world import Request, Text

CODE = ("a coding agent", 18_000)  # its instructions and tools: the same in all sessions
ALONE = ("nothing", 0)
RATES = (3.3, 4.6)  # bytes a token


class Habits(NamedTuple):
    """By how much a conversation grows between two turns, beside the answer; how long its answers
    are; how long its client takes until the next turn."""

    growth: tuple
    answer: tuple
    pause: tuple


AGENT = Habits((300, 3000), (150, 900), (5, 30))
SUBAGENT = AGENT._replace(pause=(1, 5))
CHAT = Habits((50, 300), (200, 600), (20, 60))


def text(world, rng, shared):
    return Text(f"text {next(world.texts)}", shared, rng.uniform(*RATES))


class Session:
    """A conversation of turns, each of which comes after the end of the one before and a pause.

    size    of its first prompt
    start   when that comes
    warm    whether it had turns before the trace begins
    first   what its first turn counts as, if it is not warm
    """

    def __init__(
        self,
        world,
        rng,
        key,
        size,
        start,
        habits=AGENT,
        turns=None,
        shared=CODE,
        warm=False,
        first="cold",
        batch=False,
    ):
        self.world = world
        self.rng = Random(rng.random())
        self.key = key
        self.size = size
        self.habits = habits
        self.turns = turns
        self.batch = batch
        self.text = text(world, self.rng, shared)
        if warm:
            world.before.append(Request(key, "warm", self.text, size, 1))
            first = "warm"
        world.at(start, self.turn, first)

    def turn(self, kind):
        answer = self.rng.randint(*self.habits.answer)
        request = Request(self.key, kind, self.text, self.size, answer, self.batch)
        self.world.submit(request, self.go_on)

    def go_on(self, request):
        """Its turn has ended."""
        self.size += request.answer + self.rng.randint(*self.habits.growth)
        if self.turns is not None:
            self.turns -= 1
        if self.turns != 0:
            pause = self.rng.uniform(*self.habits.pause)
            self.world.at(self.world.now + pause, self.turn, "warm")


class Jobs:
    """Prompts that have nothing to do with each other: so many in all, None for no end, of which
    so many at once."""

    def __init__(self, world, rng, key, count, at_once, size, answer, start, batch=False):
        self.world = world
        self.rng = Random(rng.random())
        self.key = key
        self.left = count
        self.size = size
        self.answer = answer
        self.batch = batch
        for _ in range(at_once):
            world.at(start, self.next)

    def next(self, _=None):
        """The next one, at the beginning or at the end of another."""
        if self.left == 0:
            return
        if self.left is not None:
            self.left -= 1
        prompt = text(self.world, self.rng, ALONE)
        size = self.rng.randint(*self.size)
        answer = self.rng.randint(*self.answer)
        request = Request(self.key, "job", prompt, size, answer, self.batch)
        self.world.submit(request, self.next)


def people(world, rng, count=4, name="person", sizes=(40_000, 120_000)):
    """So many people with an agent each, at work already."""
    for i in range(count):
        Session(world, rng, f"{name} {i}", rng.randint(*sizes), rng.uniform(0, 20), warm=True)


# ---- the traces


def freeze(world, rng):
    """Six agents at work; two people paste 260,000 tokens, at 60 s and at 65 s."""
    people(world, rng, 6, sizes=(40_000, 180_000))
    for i in range(2):
        Session(
            world,
            rng,
            f"paste {i}",
            260_000,
            60 + 5 * i,
            turns=1,
            shared=ALONE,
            habits=AGENT._replace(answer=(800, 800)),
        )
    return 900


def abuse(world, rng):
    """One key keeps 20 jobs of 60,000 tokens going. Four people are at work, each of whom begins a
    task of 25,000 now and then."""
    Jobs(world, rng, "greedy", None, 20, (55_000, 65_000), (300, 600), 30)
    for i in range(4):
        Session(
            world, rng, f"person {i}", rng.randint(40_000, 120_000), rng.uniform(0, 20), warm=True
        )
        for j in range(6):
            Session(
                world, rng, f"person {i}", 25_000, 120 + 280 * j + 60 * i, turns=3, first="task"
            )
    return 1800


def thrash(world, rng):
    """Sixteen agents of eight people, 281,000 tokens each: 1.5 times what the cache holds."""
    for i in range(16):
        Session(
            world,
            rng,
            f"person {i % 8}",
            281_000,
            rng.uniform(0, 120),
            warm=True,
            habits=AGENT._replace(growth=(300, 1500)),
        )
    return 7200


def batch(world, rng):
    """A batch of prompts of 30,000 tokens, twelve at once, beside three agents and two chats."""
    Jobs(world, rng, "batch", None, 12, (25_000, 35_000), (600, 1200), 10, batch=True)
    people(world, rng, 3, "agent")
    chats(world, rng, 2_000, 20)
    return 1800


def chats(world, rng, size, begin):
    for i in range(2):
        Session(
            world, rng, f"chat {i}", size, rng.uniform(0, begin), CHAT, shared=ALONE, first="warm"
        )


def office(world, rng, load=0.4):
    """Two hours of twelve people: agents that begin anew, subagents in threes, chats, pastes, and a
    small batch; then until all of it has ended."""
    for i in range(12):
        busy = i < 7
        for _ in range(round((6 if busy else 2) * load)):
            size = rng.randint(22_000, 150_000 if rng.random() < 0.3 else 60_000)
            Session(world, rng, f"person {i}", size, rng.uniform(0, 7000), turns=rng.randint(6, 40))
        for _ in range(4):
            Session(
                world,
                rng,
                f"person {i}",
                rng.randint(500, 6000),
                rng.uniform(0, 7000),
                Habits((50, 400), (200, 900), (15, 90)),
                rng.randint(2, 8),
                ALONE,
                first="warm",
            )
        if busy and rng.random() < load:
            start = rng.uniform(600, 6500)
            for _ in range(3):
                Session(world, rng, f"person {i}", 24_000, start, SUBAGENT, 8)
    for _ in range(round(5 * load)):
        key = f"person {rng.randrange(12)}"
        size = rng.randint(120_000, 300_000)
        Session(world, rng, key, size, rng.uniform(500, 6500), turns=3, shared=ALONE)
    Jobs(world, rng, "person 11", 60, 6, (8_000, 20_000), (300, 800), 2400, batch=True)
    return 14_400


def rush(world, rng):
    """The same with nearly twice as many agents, which is more than the slots can take."""
    return office(world, rng, 0.7)


def light(world, rng):
    """Three agents and two chats."""
    for i in range(3):
        Session(world, rng, f"agent {i}", rng.randint(30_000, 90_000), rng.uniform(0, 60))
    chats(world, rng, 1_500, 60)
    return 1800


def overcommit(world, rng):
    """Eight cold prompts of 600,000 tokens from four people, with long answers; two agents."""
    for i in range(2):
        Session(world, rng, f"agent {i}", 80_000, rng.uniform(0, 20), warm=True)
    for i in range(8):
        Session(
            world,
            rng,
            f"big {i % 4}",
            600_000,
            10 + i,
            AGENT._replace(answer=(4000, 4000)),
            1,
            ALONE,
        )
    return 6000


def sneak(world, rng):
    """One key keeps 30 jobs of 14,000 tokens going; four people are at work."""
    Jobs(world, rng, "greedy", None, 30, (12_000, 15_000), (300, 600), 30)
    people(world, rng)
    return 1800


def talk(world, rng, batch=False):
    """One key keeps 20 short prompts with answers of 3,000 tokens going; four people work."""
    Jobs(world, rng, "greedy", None, 20, (500, 1500), (2500, 3500), 30, batch)
    people(world, rng)
    return 1800


def talk_batch(world, rng):
    """The same, as a batch."""
    return talk(world, rng, batch=True)


def team(world, rng, keys=("team",)):
    """Twenty people of a team, who share one key, and one person who has a key alone: more than the
    slots can take."""
    for i in range(20):
        key = keys[i % len(keys)]
        Session(world, rng, key, rng.randint(30_000, 90_000), rng.uniform(0, 20), warm=True)
    people(world, rng, 1, "single", (30_000, 90_000))
    return 1800


def members(world, rng):
    """The same, where the key's header tells who it is: each of them has an account."""
    return team(world, rng, [f"team, {i}" for i in range(20)])


def shares(world, rng):
    """Two keys of which each keeps 20 jobs going; one of them has twice the share."""
    world.shares = {"double": 2}
    for key in ("single", "double"):
        Jobs(world, rng, key, None, 20, (3_000, 6_000), (300, 900), 0)
    return 1800


def pair(world, rng):
    """Two engines of one model: eight people at work, who begin tasks now and then, two pastes, and
    one key that keeps 30 jobs of 60,000 tokens going."""
    Jobs(world, rng, "greedy", None, 30, (55_000, 65_000), (300, 600), 30)
    for i in range(8):
        key = f"person {i}"
        Session(world, rng, key, rng.randint(40_000, 120_000), rng.uniform(0, 20), warm=True)
        for j in range(5):
            Session(world, rng, key, 25_000, 120 + 320 * j + 30 * i, turns=3, first="task")
    for i in range(2):
        Session(world, rng, f"paste {i}", 260_000, 60 + 5 * i, turns=1, shared=ALONE)
    return 1800


class Trace(NamedTuple):
    begin: Callable
    engines: int = 1


TRACES = {
    "freeze": Trace(freeze),
    "abuse": Trace(abuse),
    "batch": Trace(batch),
    "sneak": Trace(sneak),
    "thrash": Trace(thrash),
    "office": Trace(office),
    "light": Trace(light),
    "rush": Trace(rush),
    "overcommit": Trace(overcommit),
    "talk": Trace(talk),
    "talk_batch": Trace(talk_batch),
    "team": Trace(team),
    "members": Trace(members),
    "shares": Trace(shares),
    "pair": Trace(pair, engines=2),
}
