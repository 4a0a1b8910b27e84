"""What became of the requests -> figures -> tables in Markdown, beside what they shall reach."""

from collections import defaultdict
from math import isnan, nan
from statistics import mean
from typing import NamedTuple

from .world import MINUTE

SPAN = 10 * MINUTE  # over which it is looked how the work was shared
MOMENT = 10  # seconds between two looks at who is there
LEAST = 30  # such looks, half of a span: who is there for less is not compared
# Seconds after which a request that still waits for its first token, or for its end, counts as if
# that came when the trace ended.
LATE_FIRST = 30
LATE_END = 60


def figures(world, until):
    """{name: figure} of a world that ran so long; `COLUMNS` says what they are."""
    warm = first_tokens(world, until, "warm")
    turns = wholes(world, until)
    waits = [request.waited(until) for request in world.requests]
    done = world.done
    prompts = sum(request.prompt for request in done)
    answers = sum(request.answer for request in done)
    return {
        "turns": sum(request.kind == "warm" for request in done),
        "first p50": quantile(warm, 0.5),
        "first p95": quantile(warm, 0.95),
        "first max": max(warm, default=nan),
        "turn p50": quantile(turns, 0.5),
        "turn p95": quantile(turns, 0.95),
        "cold": average(first_tokens(world, until, "cold", "task")),
        "jobs": sum(request.kind == "job" for request in done),
        "job": average(first_tokens(world, until, "job")),
        "gap": max((request.gap for request in done), default=nan),
        "answers": answers / until,
        "cached": sum(request.cached for request in done) / max(prompts, 1),
        "fair": fairness(world, until),
        "preempted": world.preemptions,
        "held": max(waits, default=nan),
    }


# name: (what it is, digits)
COLUMNS = {
    "turns": ("warm turns of people that ended", 0),
    "first p50": ("seconds until the first token of a warm turn, the median", 1),
    "first p95": ("the same, of the worst of twenty", 1),
    "first max": ("the same, the worst", 0),
    "turn p50": ("seconds until the end of a warm turn, the median", 1),
    "turn p95": ("the same, of the worst of twenty", 1),
    "cold": ("seconds until the first token of a cold prompt of people, the mean", 1),
    "jobs": ("jobs that ended", 0),
    "job": ("seconds until the first token of a job, the mean", 0),
    "gap": ("seconds between two tokens, the longest", 1),
    "answers": ("tokens of answers a second", 1),
    "cached": ("share of the prompts' tokens that came from the cache", 2),
    "fair": ("how evenly the work was shared between keys that were there: 1 is evenly (Jain)", 2),
    "preempted": ("sequences that the engine put back for want of room", 0),
    "held": ("seconds at the gate, the longest", 0),
}


def first_tokens(world, until, *kinds):
    """Seconds until the first token, of each request of these kinds."""
    return times(world, until, kinds, "first", LATE_FIRST)


def wholes(world, until):
    """Seconds until the end, of each warm turn."""
    return times(world, until, ("warm",), "ended", LATE_END)


def times(world, until, kinds, event, late):
    found = []
    for request in world.requests:
        if request.kind in kinds:
            moment = getattr(request, event)
            if moment is not None or until - request.arrived > late:
                found.append((until if moment is None else moment) - request.arrived)
    return found


def quantile(values, part):
    values = sorted(values)
    return values[min(len(values) - 1, int(part * len(values)))] if values else nan


def average(values):
    return mean(values) if values else nan


def fairness(world, until):
    """Jain's index of the work for each key that was there, the mean of all spans."""
    found = []
    for span in range(int(until // SPAN)):
        work = [done_for(world, key, span) for key in present(world, span * SPAN)]
        if len(work) > 1 and sum(work):
            found.append(sum(work) ** 2 / (len(work) * sum(amount**2 for amount in work)))
    return average(found)


def present(world, begin):
    """The keys that had a request for half of the span that begins then, or longer."""
    looks = defaultdict(set)
    for request in world.requests:
        for moment in range(begin, begin + SPAN, MOMENT):
            if request.arrived <= moment and (request.ended is None or moment < request.ended):
                looks[request.key].add(moment)
    return [key for key, moments in looks.items() if len(moments) >= LEAST]


def done_for(world, key, span):
    minutes = range(span * SPAN // MINUTE, (span + 1) * SPAN // MINUTE)
    return sum(world.work[minute][key] for minute in minutes)


def means(rows):
    """The mean of each figure of several runs, of those that have it."""
    found = {}
    for name in COLUMNS:
        found[name] = average([row[name] for row in rows if not isnan(row[name])])
    return found


# ---- what they shall reach


class Target(NamedTuple):
    """`bar`: at least or at most that, or a part of today's figure that it may differ by."""

    trace: str
    figure: str
    sign: str
    bar: float

    def is_met(self, new, today):
        if self.sign == "≥":
            return new >= self.bar
        if self.sign == "≤":
            return new <= self.bar
        return abs(new / today - 1) <= self.bar

    def __str__(self):
        return f"± {100 * self.bar:.0f} %" if self.sign == "±" else f"{self.sign} {self.bar:g}"


TARGETS = (
    Target("freeze", "first max", "≤", 20),
    Target("abuse", "turns", "≥", 130),
    Target("abuse", "first p95", "≤", 20),
    Target("batch", "turns", "≥", 150),
    Target("batch", "first p95", "≤", 15),
    Target("sneak", "turns", "≥", 140),
    Target("thrash", "turns", "≥", 500),
    Target("thrash", "cached", "≥", 0.93),
    Target("office", "turn p95", "≤", 85),
    Target("office", "cold", "≤", 55),
    Target("light", "turns", "±", 0.02),
)


# ---- tables


def number(value, name):
    return "" if isnan(value) else f"{value:,.{COLUMNS[name][1]}f}"


def row(label, found):
    return [label, *(number(found[name], name) for name in COLUMNS)]


def table(head, rows):
    """Markdown: words of the first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [head, rule, *rows]
    return "\n".join("| " + " | ".join(pad(cells, widths)) + " |" for cells in lines)


def pad(cells, widths):
    first, *others = zip(cells, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]


def targets_table(groups):
    """`groups` is {seeds: {(trace, policy): figures}}."""
    head = ["trace", "figure", "target"]
    for seeds in groups:
        named = ",".join(map(str, seeds))
        head += [f"today {named}", f"new {named}", ""]
    rows = []
    for target in TARGETS:
        cells = [target.trace, target.figure, str(target)]
        for found in groups.values():
            today = found[target.trace, "today"][target.figure]
            new = found[target.trace, "new"][target.figure]
            verdict = "holds" if target.is_met(new, today) else "missed"
            cells += [number(today, target.figure), number(new, target.figure), verdict]
        rows.append(cells)
    return table(head, rows)
