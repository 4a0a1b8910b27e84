"""One run against one target -> numbers.

Each measure is a function (stage, target) -> dict; units are in the names:
`_us` microseconds, `_ms` milliseconds, `_mb` megabytes; `bad` counts answers that were not whole.
"""

import time
from dataclasses import dataclass, replace
from functools import partial

from . import machine

RATE = 50  # tokens a second of a paced stream
KB, MB = 1000, 1_000_000
EDGE = 0.05  # seconds between the window of the tokens and that of the CPU
BODY = 100 * MB


@dataclass(frozen=True)
class Pace:
    """Paced streams.

    How many tokens each, over how many seconds they start, and the window in which all of them
    flow. `spread`: they start at random, so that tokens come one by one; otherwise at even
    distances, so that many streams have their token at about the same moment, as those of an
    engine's batch do.
    """

    tokens: int
    ramp: float
    window: tuple
    spread: bool = False

    @property
    def seconds(self):
        return self.window[1] - self.window[0]


IN_STEP = Pace(300, 1.0, (1.5, 5.8))  # 200 streams: four groups of 50
SPREAD = replace(IN_STEP, spread=True)
MANY = Pace(300, 2.0, (2.5, 5.8))  # 1,000 streams: ten groups of 100


def paced(stage, target, count, pace=SPREAD, path=None):
    """`count` streams at 50 tokens a second.

    `path`: through that route of the gateway's, while nginx has chats as ever.

    steady_us   CPU per chunk while all of them flow
    setup_us    all CPU from before the first stream to after the last, per chunk
    kept        tokens in the window, of those asked for
    """
    request = stage.requests.file(
        target,
        model="fake@50",
        tokens=pace.tokens,
        stream=True,
        path=path if target.name == "sparks" else None,
    )
    before = machine.cpu(target.pids)
    load = stage.load(
        target,
        request,
        conns=count,
        requests=count,
        secs=pace.ramp + 1,
        ramp=pace.ramp,
        sse=1,
        spread=int(pace.spread),
        tokens=pace.tokens,
        window="{:g},{:g}".format(*pace.window),
        grace=pace.tokens / RATE + 4,
    )
    since, cpu = load.cpu_at(pace.window[0] + EDGE, target.pids)
    until, cpu_after = load.cpu_at(pace.window[1] - EDGE, target.pids)
    memory = {"rss_mb": machine.memory(target.pids), "pss_mb": machine.share(target.pids)}
    found = load.result()
    kept = found["window_tokens"] / (count * RATE * pace.seconds)
    return {
        "steady_us": per(cpu_after - cpu, count * RATE * kept * (until - since)),
        "setup_us": spent(before, target, found["tokens"]),
        "kept": kept,
        "gap_p99_ms": milliseconds(found, "gap_us", "p99"),
        "relay_p50_ms": milliseconds(found, "relay_us", "p50"),
        "relay_p99_ms": milliseconds(found, "relay_us", "p99"),
        **memory,
        **outcome(found),
    }


def burst(stage, target, seconds=3):
    """8 streams of 200 tokens as fast as they go."""
    request = stage.requests.file(target, stream=True)
    before = machine.cpu(target.pids)
    found = stage.load(target, request, conns=8, secs=seconds, sse=1, tokens=200, grace=10).result()
    return {
        "tokens_per_s": found["tokens"] / found["seconds"],
        "chunk_us": spent(before, target, found["tokens"]),
        **outcome(found),
    }


def plain(stage, target, seconds=2, conns=1, **body):
    """Whole answers, one after the other on each connection."""
    request = stage.requests.file(target, **body)
    before = machine.cpu(target.pids)
    found = stage.load(target, request, conns=conns, secs=seconds, grace=60).result()
    return {
        "cpu_us": spent(before, target, found["answered"]),
        "p50_ms": milliseconds(found, "latency_us", "p50"),
        "p99_ms": milliseconds(found, "latency_us", "p99"),
        **outcome(found),
    }


def first(stage, target, seconds=2):
    """Streams of 4 tokens on one connection: when the first event and the first token come."""
    request = stage.requests.file(target, tokens=4, stream=True)
    before = machine.cpu(target.pids)
    found = stage.load(target, request, secs=seconds, sse=1, tokens=4, grace=10).result()
    return {
        "cpu_us": spent(before, target, found["answered"]),
        "event_p50_ms": milliseconds(found, "first_event_us", "p50"),
        "token_p50_ms": milliseconds(found, "first_token_us", "p50"),
        **outcome(found),
    }


def upload(stage, target, size=BODY):
    """One large body while 8 paced streams flow.

    The peak of memory over the idle target, and the streams' worst gap.
    """
    streams = stage.requests.file(target, model="fake@50", tokens=400, stream=True)
    request = stage.requests.file(target, size=size, tokens=20)
    machine.forget_peak(target.pids)
    around = stage.load(
        target,
        streams,
        conns=8,
        requests=8,
        secs=1,
        ramp=0.3,
        sse=1,
        tokens=400,
        window="0.5,7.8",
        grace=30,
    )
    time.sleep(1.2)
    body = stage.load(target, request, requests=1, secs=1, grace=60).result()
    found = around.result()
    found["bad"] += body["bad"]
    return {
        "peak_mb": machine.memory(target.pids, "VmHWM") - target.idle,
        "gap_max_ms": milliseconds(found, "gap_us", "max"),
        "upload_ms": milliseconds(body, "latency_us", "p50"),
        **outcome(found),
        "trouble": found["trouble"] or body["trouble"],
    }


def idle(stage, target):
    """Memory after the warm-up, before any measure."""
    return {"rss_mb": machine.memory(target.pids), "pss_mb": machine.share(target.pids), "bad": 0}


def warm_up(stage, target, can_load):
    """Some plain requests and some streams; then what it takes while idle is noted."""
    if can_load:
        plain(stage, target, 0.5, 4)
        burst(stage, target, 0.5)
    target.idle = machine.memory(target.pids)


# ---- small


def spent(before, target, units):
    """Microseconds of CPU per unit since `before`; None for the engine itself."""
    return per(machine.cpu(target.pids) - before, units) if target.pids else None


def per(seconds, units):
    """Microseconds per unit."""
    return seconds * 1e6 / units if units else 0.0


def milliseconds(found, series, name):
    return found[series][name] / 1000 if found[series] else 0.0


def outcome(found):
    return {"bad": found["bad"], "trouble": found["trouble"]}


# ---- which there are

GATEWAYS = ("nginx", "sparks")
ALL = ("direct", *GATEWAYS)
BODIES = {"1 KB": KB, "1 MB": MB, "10 MB": 10 * MB, "100 MB": BODY}
TEXTS = {"1 MB": MB, "10 MB": 10 * MB}


@dataclass(frozen=True)
class Measure:
    """One measure as `--only` knows it.

    The run, its targets, whether other gateways take part, the most rounds.
    """

    group: str
    run: callable
    targets: tuple = GATEWAYS
    peers: bool = False
    rounds: int = 1000
    slow: bool = False  # left out by --quick


def bodies(size, **body):
    return Measure("bodies", partial(plain, seconds=1, size=size, **body), ALL, slow=True)


MEASURES = {
    "idle": Measure("memory", idle, peers=True, rounds=1),
    "upload": Measure(
        "upload", upload, slow=True
    ),  # early: what many streams leave in memory would count as the body's
    "in step 200": Measure("chunk", partial(paced, count=200, pace=IN_STEP), peers=True),
    "spread 200": Measure("chunk", partial(paced, count=200)),
    "messages 200": Measure(
        "translated", partial(paced, count=200, pace=IN_STEP, path="/v1/messages")
    ),
    "responses 200": Measure(
        "translated", partial(paced, count=200, pace=IN_STEP, path="/v1/responses")
    ),
    "spread 1000": Measure("many", partial(paced, count=1000, pace=replace(MANY, spread=True))),
    "in step 1000": Measure("many", partial(paced, count=1000, pace=MANY)),
    "burst": Measure("burst", burst, ALL, True),
    "plain": Measure("plain", plain, ALL, True),
    "plain 8": Measure("plain", partial(plain, conns=8), ALL, True),
    "first": Measure("first", first, ALL, True),
    "spread 8": Measure("streams", partial(paced, count=8), slow=True),
    "spread 64": Measure("streams", partial(paced, count=64), slow=True),
    **{f"image {name}": bodies(size) for name, size in BODIES.items()},
    **{f"text {name}": bodies(size, kind="text") for name, size in TEXTS.items()},
}


def quick(measure):
    """The same in half the time."""
    function, given = (
        getattr(measure.run, "func", measure.run),
        getattr(measure.run, "keywords", {}),
    )
    if function is paced:
        pace = given.get("pace", SPREAD)
        window = (pace.window[0], pace.window[1] - pace.tokens / 2 / RATE)
        return replace(
            measure,
            run=partial(measure.run, pace=replace(pace, tokens=pace.tokens // 2, window=window)),
        )
    return (
        replace(measure, run=partial(measure.run, seconds=1))
        if function in (plain, first, burst)
        else measure
    )
