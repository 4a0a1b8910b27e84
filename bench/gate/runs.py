"""Simulations, one or many."""

from multiprocessing import Pool
from random import Random
from typing import NamedTuple

from .ablation import VARIANTS
from .figures import figures, means
from .hardware import FLAGS
from .policies import POLICIES
from .traces import TRACES
from .world import World

PROCESSES = 2
ALL = POLICIES | VARIANTS


class Run(NamedTuple):
    """`whole`: kinds of requests that want their answers whole."""

    trace: str
    policy: str
    seed: int
    flags: str = "good"
    whole: tuple = ()

    def world(self):
        """(what it was like in the end, the seconds that it ran)"""
        trace = TRACES[self.trace]
        policy = ALL[self.policy]()
        world = World(policy, flags=FLAGS[self.flags], engines=trace.engines, whole=self.whole)
        until = trace.begin(world, Random(self.seed))
        world.preload()
        return world.run(until), until

    def figures(self):
        return figures(*self.world())


def several(runs):
    """{run: its figures}"""
    runs = list(dict.fromkeys(runs))
    with Pool(PROCESSES) as pool:
        return dict(zip(runs, pool.map(Run.figures, runs, chunksize=1), strict=True))


def averages(traces, policies, seeds, flags="good", whole=()):
    """{(trace, policy): the means of its figures}"""
    pairs = [(trace, policy) for trace in traces for policy in policies]
    found = several(Run(*pair, seed, flags, whole) for pair in pairs for seed in seeds)
    return {
        pair: means([found[Run(*pair, seed, flags, whole)] for seed in seeds]) for pair in pairs
    }
