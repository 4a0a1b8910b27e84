"""./run.sh bench: measure the gateway beside nginx and the engine itself, and print one table."""

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from . import figures, machine, measures, peers, whole
from .stage import HERE, Missing, Stage, compile_all

STREAMS, FEW = 10_000, 500  # that are compared byte for byte; with --quick
PATIENCE = 60  # seconds in all for quiet moments
GROUPS = list(dict.fromkeys([measure.group for measure in measures.MEASURES.values()] + ["whole"]))


def main(arguments=None):
    options = read_options(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(options)
    try:
        with Stage() as stage:
            run.everything(stage)
    except KeyboardInterrupt:
        say("stopped; this was measured until then:")
    return run.report()


def read_options(arguments):
    parser = argparse.ArgumentParser(
        prog="./run.sh bench",
        epilog="bench/README.md says how to read the table.",
        description="Measure the gateway beside nginx and the engine itself.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one short round of the main measures: about a minute"
    )
    parser.add_argument("--only", metavar="NAME,…", type=groups, help="of " + ", ".join(GROUPS))
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="rounds of each measure, whose median counts (3)"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also LiteLLM, vllm-router and smol-llm-proxy, from PyPI",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="where all numbers go (bench/results/DATE.json)"
    )
    options = parser.parse_args(arguments)
    options.rounds = max(1, options.rounds or (1 if options.quick else 3))
    return options


def groups(text):
    """The value of --only."""
    names = text.split(",")
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"there is no {unknown[0]!r}; there are {', '.join(GROUPS)}"
        )
    return names


def say(*words):
    print(*words, file=sys.stderr, flush=True)


class Run:
    """One run: what it measures, what it found, what is missing."""

    def __init__(self, options):
        self.options, self.results, self.missing, self.peers = options, {}, [], []
        self.machine, self.when = machine.about(), time.strftime("%Y-%m-%dT%H.%M.%S")
        self.patience, self.others = machine.Patience(0 if options.quick else PATIENCE), []

    def everything(self, stage):
        self.prepare(stage)
        for name, measure in self.chosen().items():
            if self.can_load or measure.group == "memory":
                self.measure(stage, name, measure)
        if self.can_load and self.wants("whole"):
            self.compare(stage)

    # -- who plays

    def prepare(self, stage):
        """Start all of them. Without a load generator that is the gateway alone."""
        self.can_load = self.attempt(compile_all)
        if self.machine["cores"] < 2:
            self.lacks(
                "one core only: gateway, engine and load share it, so latencies, bursts and gaps "
                "say little"
            )
        if not machine.take_priority():
            self.lacks(
                "no real-time priority (run as root): other programs come between; distrust "
                "latencies and gaps"
            )
        stage.open_keys()
        if self.can_load:
            stage.open_engine()
            self.attempt(stage.open_nginx)
        stage.open_gateway()
        if self.can_load and self.options.peers:
            for open_peer in peers.ALL:
                self.attempt(open_peer, stage)
        self.peers = [name for name in stage.targets if name not in measures.ALL]
        for target in stage.targets.values():
            measures.warm_up(stage, target, self.can_load)

    def attempt(self, action, *arguments):
        """Do it, or say what is missing; whether it was done."""
        try:
            action(*arguments)
            return True
        except Missing as missing:
            self.lacks(str(missing))
            return False

    def lacks(self, line):
        self.missing.append(line)
        say(line)

    # -- what is measured

    def wants(self, group):
        return group in self.options.only if self.options.only else True

    def chosen(self):
        """The measures of this run, by name."""
        found = {
            name: measure
            for name, measure in measures.MEASURES.items()
            if self.wants(measure.group)
        }
        if not self.options.quick:
            return found
        return {
            name: measures.quick(measure)
            for name, measure in found.items()
            if self.options.only or not measure.slow
        }

    def measure(self, stage, name, measure):
        """All rounds of a measure.

        The targets of a round lie side by side in time, in each second round in reverse.
        """
        wanted = [*measure.targets, *(self.peers if measure.peers else ())]
        names = [target for target in wanted if target in stage.targets]
        for turn in range(min(self.options.rounds, measure.rounds)):
            for target in names[::-1] if turn % 2 else names:
                machine.rest([pid for one in stage.targets.values() for pid in one.pids])
                self.patience.wait()
                others = machine.Others()
                found = measure.run(stage, stage.targets[target])
                found["other_cores"] = others.cores()
                self.others.append(found["other_cores"])
                self.results.setdefault(name, {}).setdefault(target, []).append(found)
        say(
            f"{name}: "
            + ", ".join(
                f"{target} {shown(rounds[-1])}" for target, rounds in self.results[name].items()
            )
        )

    def compare(self, stage):
        count = FEW if self.options.quick else STREAMS
        found = whole.check(stage.targets["direct"], stage.targets["sparks"], count)
        self.results["whole"] = {"sparks": [found]}
        say(f"whole: {found['different']} of {count} streams differ", found["first"] or "")

    # -- what is said

    def report(self):
        """Print the table, write the numbers; 1 if anything of the gateway's was lost, else 0."""
        troubles = figures.troubles(self.results)
        print(figures.table(self.results, self.peers))
        for line in [*self.missing, *troubles]:
            print("! " + line)
        if self.others and max(self.others) > machine.CALM:
            print(
                f"! other programs used up to {max(self.others):.1f} cores: "
                "trust the ratios, less the latencies"
            )
        print("all numbers are in", self.write(troubles))
        whole_ones = self.results.get("whole", {}).get("sparks", [{"different": 0}])
        return int(
            any(line.startswith("sparks,") for line in troubles) or whole_ones[0]["different"] > 0
        )

    def write(self, troubles):
        file = self.options.json or HERE / "results" / f"{self.when}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        options = {name: value for name, value in vars(self.options).items() if name != "json"}
        everything = {
            "when": self.when,
            "machine": self.machine,
            "options": options,
            "missing": self.missing,
            "troubles": troubles,
            "figures": figures.summary(self.results),
            "rounds": self.results,
        }
        file.write_text(json.dumps(everything, indent=1))
        return file


def shown(numbers):
    """The first two numbers of a round, for whoever waits."""
    return " ".join(
        f"{name} {value:.3g}" for name, value in list(numbers.items())[:2] if value is not None
    )


if __name__ == "__main__":
    sys.exit(main())
