"""The figures of ./run.sh bench as tables."""
import json

import pytest

from bench import figures, load
from bench.figures import Figure

RESULTS = {"paced": {"sparks": [{"us": 20.0}, {"us": 33.0}, {"us": 24.0}], "nginx": [{"us": 10.0}, {"us": 22.0}, {"us": 15.0}],
                     "direct": [{"us": 4.0}, {"us": 3.0}, {"us": 4.0}]}}


@pytest.mark.parametrize("against, value", [(None, 24.0), ("nginx", 1.6), ("direct", 6.0), ("added", 20.0), ("nobody", None)])
def test_ratios_are_taken_round_by_round(against, value):
    assert Figure("CPU", "µs", "paced", "us", against).value(RESULTS) == value


def test_what_was_not_measured_has_no_value():
    assert Figure("CPU", "µs", "burst", "us").value(RESULTS) is None
    assert Figure("CPU", "µs", "paced", "us").value({"paced": {"sparks": [{"us": None}]}}) is None


@pytest.mark.parametrize("value, least, verdict", [
    (1.2, False, "aim"), (1.25, False, "aim"), (1.6, False, "holds"), (2.0, False, "missed by 25 %"),
    (1.6, True, "aim"), (1.0, True, "missed by 38 %"), (None, False, ""),
])
def test_verdicts(value, least, verdict):
    assert Figure("CPU", "µs", "paced", "us", "nginx", 1.6, 1.25, least).verdict(value) == verdict


def test_the_table():
    lines = figures.table({"plain": {"sparks": [{"cpu_us": 400.0, "p50_ms": 0.5}], "direct": [{"cpu_us": None, "p50_ms": 0.1}]}}).split("\n")
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if "---" not in line] == [
        ["figure", "unit", "Sparks", "nginx", "direct", "compared", "bar", "aim", ""],
        ["plain request, CPU", "µs", "400", "", "", "", "≤ 450", "300", "holds"],
        ["added latency, plain, p50", "ms", "0.500", "", "0.100", "+0.400", "≤ 0.7", "0.4", "aim"],
    ]


def test_answers_that_were_not_whole_are_told():
    rounds = [{"bad": 0, "trouble": ""}, {"bad": 2, "trouble": "status: 503"}]
    assert figures.troubles({"plain": {"sparks": rounds}}) == ["sparks, plain: 2 answers were not whole (status: 503)"]


@pytest.mark.parametrize("kind", ["image", "text"])
def test_bodies_have_their_size(kind):
    assert 999_000 <= len(json.dumps(load.content(1_000_000, kind))) <= 1_100_000
