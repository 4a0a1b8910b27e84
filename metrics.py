"""GET /metrics for Prometheus. No series per key: the ledger knows who, the metrics know how much."""

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

WAITS = (0.005, 0.02, 0.1, 0.5, 1, 5, 15, 60, 180, 600)
TIMES = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 180, 600, 1800)
KINDS = ("prompt", "cached", "completion", "reasoning")


class Gauges:
    """The state of this moment, read when it is asked for."""

    def __init__(self, gateway):
        self.gateway = gateway

    def collect(self):
        gate, fleet = self.gateway.gate, self.gateway.fleet
        for name, text, value in (
            ("sparks_active", "Requests that hold a slot", gate.active),
            ("sparks_queued", "Requests that wait for a slot", gate.waiting),
            ("sparks_slots", "Slots of each model", gate.slots),
            ("sparks_engine_up", "Whether the engine serves a model", int(bool(fleet.models()))),
            (
                "sparks_ledger_waiting",
                "Ledger rows that wait in memory for the database",
                len(self.gateway.ledger.waiting),
            ),
        ):
            yield GaugeMetricFamily(name, text, value)


class Tally:
    """A histogram. The library's own takes a lock and walks through its buckets for each value."""

    def __init__(self, name, text, bounds):
        self.name, self.text, self.bounds = name, text, bounds
        self.counts, self.sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds):
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def family(self):
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        return HistogramMetricFamily(
            self.name, self.text, list(zip(names, accumulate(self.counts))), self.sum
        )


class Metrics:
    """Counts the rows of the ledger; `text()` is the page."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.requests, self.tokens = Counter(), Counter()
        self.queued = Tally("sparks_queue_seconds", "Wait for a slot", WAITS)
        self.first = Tally("sparks_first_token_seconds", "Time to the first token", TIMES)
        self.total = Tally("sparks_total_seconds", "Time to the end", TIMES)

    def watch(self, gateway):
        self.registry.register(Gauges(gateway))

    def note(self, row, key):
        if key is None:
            return
        self.requests[row.route, str(row.status), row.model] += 1
        for kind, count in zip(
            KINDS,
            (row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.reasoning_tokens),
        ):
            if count:
                self.tokens[kind] += count
        for tally, value in (
            (self.queued, row.queued_ms),
            (self.first, row.first_ms),
            (self.total, row.total_ms),
        ):
            if value is not None:
                tally.observe(value / 1000)

    def collect(self):
        requests = CounterMetricFamily(
            "sparks_requests", "Requests past their key", labels=["route", "status", "model"]
        )
        tokens = CounterMetricFamily("sparks_tokens", "Tokens", labels=["kind"])
        for labels, count in self.requests.items():
            requests.add_metric(labels, count)
        for kind, count in self.tokens.items():
            tokens.add_metric([kind], count)
        return [
            requests,
            tokens,
            *(tally.family() for tally in (self.queued, self.first, self.total)),
        ]

    def text(self):
        return generate_latest(self.registry)
