"""Published figures, and what the model makes of them. There is no gate in any of these."""

from dataclasses import replace
from random import Random

from .hardware import BAD, FOUR, GOOD, TWO, Flags
from .policies import Direct
from .traces import AGENT, ALONE, Session
from .world import World

SHORT = AGENT._replace(growth=(0, 0), answer=(20, 20), pause=(25, 25))


def lines():
    """One line for each figure."""
    yield from together()
    for threshold in (None, 1024):
        yield poll(threshold)
    yield stream("two Sparks, budget 1024: published 55, then 5 (#6)", TWO, Flags(1024, None))
    yield stream("four Sparks, good flags", FOUR, GOOD)
    yield stream("four Sparks, 512 of 1024", FOUR, replace(GOOD, threshold=512, budget=1024))
    for size in (60_000, 260_000, 600_000):
        good, bad = (round(cold(flags, size, 1)[0]) for flags in (GOOD, BAD))
        yield f"a cold prompt of {size:,} alone: first token after {good} s, with bad flags {bad} s"


def cold(flags, size, count):
    """When so many cold prompts, sent together, had their first tokens."""
    world = World(Direct(), FOUR, flags)
    for _ in range(count):
        Session(world, Random(1), "key", size, 0, SHORT, turns=1, shared=ALONE)
    world.run(2000)
    return [request.first for request in world.requests]


def together():
    """The order differs: that of the published ones fits an engine that turns from prompt to prompt
    with each step, which vLLM as it comes does not do."""
    firsts = cold(GOOD, 60_000, 4)
    yield (
        "four cold prompts of 60,000, four Sparks: published 165.4 165.9 169.5 178.8, that is "
        f"1,450 tokens a second (PR 112); here {' '.join(f'{first:.1f}' for first in firsts)}, "
        f"{240_000 / max(firsts):,.0f} a second"
    )


def neighbours(threshold):
    """One who asks again and again beside a cold prompt of the same length: (seconds until a first
    token before it came, while it was read, and until its own), as lists."""
    world = World(Direct(), TWO, Flags(2048, threshold))
    Session(world, Random(1), "a", 325_000, 0, SHORT, shared=ALONE, warm=True)
    Session(world, Random(2), "b", 325_000, 60, SHORT, turns=1, shared=ALONE)
    world.preload()
    world.run(900)
    other = next(request for request in world.requests if request.key == "b")
    asked = [request for request in world.done if request.key == "a"]
    before = [one for one in asked if one.first < other.arrived]
    beside = [one for one in asked if one.first >= other.arrived and one.arrived <= other.first]
    return [[one.first - one.arrived for one in some] for some in (before, beside, [other])]


def poll(threshold):
    """As #110 has it."""
    published = "17.9 to 24.9, its own 494" if threshold else "440, its own 447"
    before, beside, own = neighbours(threshold)
    return (
        f"a warm turn beside a cold 325,000, two Sparks, threshold {threshold or 'none'}: "
        f"published 3.8 alone, then {published} (#110); here {before[0]:.1f}, "
        f"then {min(beside):.1f} to {max(beside):.1f}, its own {own[0]:.0f}"
    )


def stream(name, hardware, flags):
    """Tokens a second of a stream, alone and beside a prefill."""
    world = World(Direct(), hardware, flags)
    long = SHORT._replace(answer=(3000, 3000))
    Session(world, Random(1), "a", 100_000, 0, long, turns=1, shared=ALONE, warm=True)
    Session(world, Random(2), "b", 100_000, 20, SHORT, turns=1, shared=ALONE)
    world.preload()
    made = {}
    for moment in (10, 15, 40, 70):
        world.run(moment)
        (engine,) = (server.engine for server in world.servers.values())
        made[moment] = next(one.made for one in engine.running if one.request.key == "a")
    alone = (made[15] - made[10]) / 5
    beside = (made[70] - made[40]) / 30
    return f"{name}: a stream makes {alone:.1f} tokens a second, {beside:.1f} beside a prefill"
