"""GET /metrics for Prometheus. No series per key: the ledger knows who, the metrics know how much."""
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily

WAITS = (0.005, 0.02, 0.1, 0.5, 1, 5, 15, 60, 180, 600)
TIMES = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 180, 600, 1800)
KINDS = ("prompt", "cached", "completion", "reasoning")

disable_created_metrics()


class Gauges:
    """The state of this moment, read when it is asked for."""

    def __init__(self, desk):
        self.desk = desk

    def collect(self):
        gate, fleet = self.desk.gate, self.desk.fleet
        for name, text, value in (
                ("sparks_active", "Requests that hold a slot", gate.active),
                ("sparks_queued", "Requests that wait for a slot", gate.waiting),
                ("sparks_slots", "Slots of each model", gate.slots),
                ("sparks_engine_up", "Whether the engine serves a model", int(bool(fleet.models()))),
                ("sparks_ledger_waiting", "Ledger rows that wait in memory for the database", len(self.desk.ledger.waiting))):
            yield GaugeMetricFamily(name, text, value)


class Metrics:
    """Counts the rows of the ledger; `text()` is the page."""

    def __init__(self):
        self.registry = CollectorRegistry()
        made = {"registry": self.registry}
        self.requests = Counter("sparks_requests", "Requests past their key", ["route", "status", "model"], **made)
        self.series = lru_cache(256)(self.requests.labels)      # which takes its time
        self.tokens = Counter("sparks_tokens", "Tokens", ["kind"], **made)
        self.queued = Histogram("sparks_queue_seconds", "Wait for a slot", buckets=WAITS, **made)
        self.first = Histogram("sparks_first_token_seconds", "Time to the first token", buckets=TIMES, **made)
        self.total = Histogram("sparks_total_seconds", "Time to the end", buckets=TIMES, **made)

    def watch(self, desk):
        self.registry.register(Gauges(desk))

    def note(self, row, key):
        if key is None:
            return
        self.series(row.route, row.status, row.model).inc()
        for kind in KINDS:
            count = getattr(row, f"{kind}_tokens")
            if count:
                self.tokens.labels(kind).inc(count)
        for histogram, value in ((self.queued, row.queued_ms), (self.first, row.first_ms), (self.total, row.total_ms)):
            if value is not None:
                histogram.observe(value / 1000)

    def text(self):
        return generate_latest(self.registry)
