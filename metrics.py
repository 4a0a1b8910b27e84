"""GET /metrics for Prometheus. No series per key: the ledger knows who, metrics how much."""

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from engines.health import STATES

WAITS = (0.005, 0.02, 0.1, 0.5, 1, 5, 15, 60, 180, 600)
TIMES = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 180, 600, 1800)
RUNS = (0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.3, 1, 3, 10)
TOKENS = {  # the label `kind` of sparks_tokens -> the column of a ledger row
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "completion": "completion_tokens",
    "reasoning": "reasoning_tokens",
}


class Gauges:
    """The state of this moment, read when it is asked for."""

    def __init__(self, gateway):
        self.gateway = gateway

    def collect(self):
        """What prometheus_client asks for: the gauges with their values."""
        gate = self.gateway.gate
        up = int(bool(self.gateway.fleet.models()))
        behind = len(self.gateway.ledger.waiting)
        yield GaugeMetricFamily("sparks_active", "Requests that hold a slot", gate.active)
        yield GaugeMetricFamily("sparks_queued", "Requests that wait for a slot", gate.waiting)
        yield GaugeMetricFamily("sparks_slots", "Slots of each model", gate.slots)
        yield GaugeMetricFamily("sparks_engine_up", "Whether an engine serves a model", up)
        yield from engine_families(self.gateway.fleet.engines)
        yield GaugeMetricFamily(
            "sparks_ledger_waiting", "Ledger rows that wait in memory for the database", behind
        )


def engine_families(engines):
    """The state of each engine: 1 for the one that it is in, and when that began."""
    states = GaugeMetricFamily(
        "sparks_engine_state", "Whether an engine is in this state", labels=["engine", "state"]
    )
    since = GaugeMetricFamily(
        "sparks_engine_since_seconds", "When its state began, epoch time", labels=["engine"]
    )
    for engine in engines:
        for word in STATES:
            states.add_metric([engine.url, word], int(word == engine.health.word))
        since.add_metric([engine.url], engine.health.since)
    return states, since


class Histogram:
    """Seconds, counted between bounds.

    prometheus_client's own takes a lock and walks through its buckets for each value.
    """

    def __init__(self, name, text, bounds):
        self.name = name
        self.text = text
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds, count=1):
        """`count` values that are `seconds` together: each counts as their mean."""
        self.counts[bisect_left(self.bounds, seconds / count)] += count
        self.sum += seconds

    def family(self):
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        buckets = list(zip(names, accumulate(self.counts), strict=True))
        return HistogramMetricFamily(self.name, self.text, buckets, self.sum)


class Metrics:
    """Counts the rows of the ledger; `text()` is the page."""

    def __init__(self):
        """All counts begin at zero."""
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.requests = Counter()
        self.tokens = Counter()
        self.oddities = Counter()
        self.times = {  # a column of a ledger row, in milliseconds -> its histogram
            "queued_ms": Histogram("sparks_queue_seconds", "Wait for a slot", WAITS),
            "first_ms": Histogram("sparks_first_token_seconds", "Time to the first token", TIMES),
            "total_ms": Histogram("sparks_total_seconds", "Time to the end", TIMES),
        }
        self.runs = Histogram("sparks_loop_seconds", "Runs of the event loop", RUNS)
        self.longest_run = 0.0

    def watch(self, gateway):
        self.registry.register(Gauges(gateway))

    def note(self, row, key):
        """Count a store.ledger.Row; `key` is None for a request that has not got past its key."""
        if key is None:
            return
        self.requests[row.route, str(row.status), row.model] += 1
        for kind, column in TOKENS.items():
            count = getattr(row, column)
            if count:
                self.tokens[kind] += count
        for column, histogram in self.times.items():
            milliseconds = getattr(row, column)
            if milliseconds is not None:
                histogram.observe(milliseconds / 1000)

    def odd(self, kind):
        """Count an answer about which something is odd: a word of stream.py."""
        self.oddities[kind] += 1

    def run(self, seconds, count):
        """Count runs of the event loop, `seconds` together."""
        self.runs.observe(seconds, count)
        self.longest_run = max(self.longest_run, seconds / count)

    def collect(self):
        """What prometheus_client asks for: the counters and histograms with their values."""
        requests = CounterMetricFamily(
            "sparks_requests", "Requests past their key", labels=["route", "status", "model"]
        )
        tokens = CounterMetricFamily("sparks_tokens", "Tokens", labels=["kind"])
        for labels, count in self.requests.items():
            requests.add_metric(labels, count)
        for kind, count in self.tokens.items():
            tokens.add_metric([kind], count)
        oddities = CounterMetricFamily(
            "sparks_oddities", "Answers of an engine that were odd", labels=["kind"]
        )
        for kind, count in self.oddities.items():
            oddities.add_metric([kind], count)
        return [
            requests,
            tokens,
            oddities,
            GaugeMetricFamily(
                "sparks_loop_longest_seconds",
                "The longest run of the event loop since the start",
                self.longest_run,
            ),
            *(histogram.family() for histogram in (*self.times.values(), self.runs)),
        ]

    def text(self):
        return generate_latest(self.registry)
