"""Numbers -> figures beside their bars -> one table. Pure: no process, no clock.

`results` is {measure: {target: [numbers of a round, …]}}, as measures.py makes them.
"""

from dataclasses import dataclass
from statistics import median

US = "sparks"


@dataclass(frozen=True)
class Figure:
    """A line of the table.

    measure, name   which number, in `unit`
    against         what is held against the bar: "nginx" or "direct": the ratio to it, taken round
                    by round, because the two of a round lie side by side in time; "added": the
                    difference to direct; None: the number
    bar, aim        None: there is none
    least           whether more is better
    """

    title: str
    unit: str
    measure: str
    name: str
    against: str | None = None
    bar: float | None = None
    aim: float | None = None
    least: bool = False
    digits: int = 1

    def rounds(self, results, target):
        found = [numbers[self.name] for numbers in results.get(self.measure, {}).get(target, ())]
        return [] if None in found else found

    def of(self, results, target):
        """The median of a target's rounds, or None."""
        rounds = self.rounds(results, target)
        return median(rounds) if rounds else None

    def value(self, results, target=US):
        """What is held against the bar, or None if something of it was not measured."""
        if self.against is None:
            return self.of(results, target)
        other = "direct" if self.against == "added" else self.against
        pairs = list(zip(self.rounds(results, target), self.rounds(results, other), strict=False))
        if not pairs or any(not other for _, other in pairs):
            return None
        return median(
            own - other if self.against == "added" else own / other for own, other in pairs
        )

    def reaches(self, value, mark):
        return value >= mark if self.least else value <= mark

    def verdict(self, value):
        """One of "aim", "holds", "missed by N %"; nothing where there is nothing to say."""
        if value is None or self.bar is None:
            return ""
        if self.aim is not None and self.reaches(value, self.aim):
            return "aim"
        if self.reaches(value, self.bar):
            return "holds"
        return f"missed by {abs(value / self.bar - 1) * 100:.2g} %" if self.bar else "missed"


BARS = [
    Figure(
        "CPU per chunk, 200 paced streams in step, steady",
        "µs",
        "in step 200",
        "steady_us",
        "nginx",
        1.6,
        1.25,
    ),
    Figure(
        "  the same, set-up of the streams included",
        "µs",
        "in step 200",
        "setup_us",
        "nginx",
        2.1,
        1.5,
    ),
    Figure(
        "CPU per chunk, 200 paced streams spread, steady",
        "µs",
        "spread 200",
        "steady_us",
        "nginx",
        1.6,
        1.25,
    ),
    Figure(
        "  the same, set-up of the streams included",
        "µs",
        "spread 200",
        "setup_us",
        "nginx",
        2.1,
        1.5,
    ),
    Figure(
        "  translated in step, steady: Anthropic messages",
        "µs",
        "messages 200",
        "steady_us",
        "nginx",
        1.8,
        1.5,
    ),
    Figure("  OpenAI responses", "µs", "responses 200", "steady_us", "nginx", 1.8, 1.5),
    Figure(
        "1,000 paced streams in step: tokens kept up",
        "of asked",
        "in step 1000",
        "kept",
        None,
        0.99,
        1.0,
        True,
        3,
    ),
    Figure("  their p99 gap (20 is perfect)", "ms", "in step 1000", "gap_p99_ms", None, 60, 25),
    Figure(
        "1,000 paced streams spread: tokens kept up",
        "of asked",
        "spread 1000",
        "kept",
        None,
        0.99,
        1.0,
        True,
        3,
    ),
    Figure("  their p99 gap (20 is perfect)", "ms", "spread 1000", "gap_p99_ms", None, 60, 25),
    Figure("burst, 8 streams", "tokens/s", "burst", "tokens_per_s", "direct", 0.30, 0.5, True, 0),
    Figure("plain request, CPU", "µs", "plain", "cpu_us", None, 450, 300, digits=0),
    Figure("added latency, plain, p50", "ms", "plain", "p50_ms", "added", 0.7, 0.4, digits=3),
    Figure(
        "added latency, first token, p50",
        "ms",
        "first",
        "token_p50_ms",
        "added",
        0.7,
        0.4,
        digits=3,
    ),
    Figure(
        "100 MB body: peak memory over idle", "MB", "upload", "peak_mb", None, 120, 10, digits=0
    ),
    Figure(
        "  the worst gap of 8 other streams",
        "ms",
        "upload",
        "gap_max_ms",
        "nginx",
        2.0,
        1.2,
        digits=0,
    ),
    Figure("memory: idle", "MB", "idle", "rss_mb", None, 95, 60, digits=0),
    Figure("  1,000 streams", "MB", "spread 1000", "rss_mb", None, 140, 100, digits=0),
    Figure("streams that are not the same bytes", "", "whole", "different", None, 0, 0, digits=0),
]
COUNTS = (8, 64, 200, 1000)
BODIES = ("image 1 KB", "image 1 MB", "image 10 MB", "image 100 MB", "text 1 MB", "text 10 MB")
GROWTH = [
    *(
        Figure(
            f"CPU per chunk, {count:,} streams spread, steady",
            "µs",
            f"spread {count}",
            "steady_us",
            "nginx",
        )
        for count in COUNTS
    ),
    *(
        Figure(
            f"relay of a chunk, {count:,} streams spread, p99",
            "ms",
            f"spread {count}",
            "relay_p99_ms",
            digits=2,
        )
        for count in COUNTS
    ),
    *(
        Figure(f"CPU per plain request, {body}", "µs", body, "cpu_us", "nginx", digits=0)
        for body in BODIES
    ),
]
MORE = [
    Figure("CPU per plain request, 8 connections", "µs", "plain 8", "cpu_us", digits=0),
    Figure("CPU of a stream of 4 tokens, one connection", "µs", "first", "cpu_us", digits=0),
    Figure("burst, CPU per chunk", "µs", "burst", "chunk_us", "nginx"),
    Figure("memory, idle, shared pages counted once", "MB", "idle", "pss_mb", digits=0),
    Figure(
        "memory, 1,000 streams, shared pages counted once", "MB", "spread 1000", "pss_mb", digits=0
    ),
]
FIGURES = BARS + GROWTH + MORE
SIGNS = {"nginx": "{:.2f} × nginx", "direct": "{:.2f} × direct", "added": "+{:.3f}", None: ""}


def number(value, digits):
    return "" if value is None else f"{value:,.{digits}f}"


def row(figure, results, targets):
    """A line's cells: title, unit, a number for each target, the comparison, bar, aim, verdict."""
    value = figure.value(results)
    sign = "≥" if figure.least else "≤"
    bar = f"{sign} {figure.bar:g}" if figure.bar is not None else ""
    aim = f"{figure.aim:g}" if figure.aim is not None else ""
    cells = [number(figure.of(results, target), figure.digits) for target in targets]
    compared = SIGNS[figure.against].format(value) if value is not None else ""
    return [figure.title, figure.unit, *cells, compared, bar, aim, figure.verdict(value)]


def table(results, peers=()):
    """All that was measured, as one table in Markdown."""
    targets = [US, "nginx", "direct", *peers]
    head = ["figure", "unit", "Sparks", *targets[1:], "compared", "bar", "aim", ""]
    rows = [head, *(row(figure, results, targets) for figure in measured(results))]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(head))]
    lines = ["| " + " | ".join(pad(cells, widths)) + " |" for cells in rows]
    ends = [":" if 2 <= column < 2 + len(targets) else "-" for column in range(len(head))]
    dashes = ["-" * (width + 1) + end for width, end in zip(widths, ends, strict=False)]
    rule = "|" + "|".join(dashes) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def pad(cells, widths):
    """Words to the left, numbers to the right."""
    return [
        cell.ljust(width) if column < 2 or column >= len(cells) - 4 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=False))
    ]


def measured(results):
    return [figure for figure in FIGURES if results.get(figure.measure, {}).get(US)]


def summary(results):
    """The figures as a list of dicts."""
    return [
        {
            "title": figure.title.strip(),
            "unit": figure.unit,
            "measured": figure.of(results, US),
            "nginx": figure.of(results, "nginx"),
            "direct": figure.of(results, "direct"),
            "against": figure.against,
            "value": figure.value(results),
            "bar": figure.bar,
            "aim": figure.aim,
            "verdict": figure.verdict(figure.value(results)),
        }
        for figure in measured(results)
    ]


def troubles(results):
    """Lines on answers that were not whole."""
    return [
        f"{target}, {measure}: {numbers['bad']} answers were not whole "
        f"({numbers.get('trouble', '')})"
        for measure, targets in results.items()
        for target, rounds in targets.items()
        for numbers in rounds
        if numbers.get("bad")
    ]
