"""./run.sh bench: its figures as tables, a small real run, and what is left of it afterwards: nothing."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import figures, load, machine
from bench.figures import Figure
from support import ROOT
from support.processes import clean_environment, wait_until

needs_compiler = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")


# ---- figures, pure

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


# ---- requests and processes

@pytest.mark.parametrize("kind", ["image", "text"])
def test_bodies_have_their_size(kind):
    assert 999_000 <= len(json.dumps(load.content(1_000_000, kind))) <= 1_100_000


def test_the_cpu_of_a_process_is_seen():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.4)
        assert machine.cpu([busy.pid]) > 0.02 and machine.memory([busy.pid]) > 1
        assert busy.pid in machine.family(os.getpid())
    finally:
        busy.kill()
        busy.wait()
    assert machine.cpu([busy.pid]) == 0


# ---- a real run

def bench(folder, *arguments, **options):
    """A run as a process, its files under `folder`."""
    environment = {**clean_environment(), "TMPDIR": str(folder), **options}
    return subprocess.Popen([sys.executable, "-m", "bench", *map(str, arguments)], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def processes_of(folder):
    """Living processes that were started with a path in `folder`, by command or environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "environ").read_bytes() and (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@needs_compiler
def test_a_small_run(tmp_path):
    process = bench(tmp_path, "--quick", "--only", "memory,first,whole", "--json", tmp_path / "numbers.json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "| added latency, first token, p50" in out and "| memory: idle" in out
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["rounds"]["whole"]["sparks"] == [{"streams": 500, "different": 0, "first": None}]
    assert numbers["rounds"]["first"]["sparks"][0]["bad"] == 0
    wait_until(lambda: not processes_of(tmp_path), 5)   # one that a start had just begun ends by itself
    assert files_of(tmp_path) == ["numbers.json"]


@needs_compiler
def test_ctrl_c_leaves_nothing_behind(tmp_path):
    process = bench(tmp_path, "--only", "chunk", "--json", tmp_path / "numbers.json")
    deadline = time.monotonic() + 20
    while len(processes_of(tmp_path)) < 4 and time.monotonic() < deadline:      # itself, the engine, the gateway's two
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert "stopped" in err and "Traceback" not in err
    wait_until(lambda: not processes_of(tmp_path), 5)   # one that a start had just begun ends by itself
    assert files_of(tmp_path) == ["numbers.json"]


def test_without_a_compiler_there_is_still_memory(tmp_path):
    process = bench(tmp_path, "--quick", "--json", tmp_path / "numbers.json", PATH=str(tmp_path))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "no C compiler (apt install gcc libc6-dev)" in out and "| memory: idle" in out


@pytest.mark.parametrize("arguments", [["--only", "nothing"], ["--rounds", "x"], ["more"]])
def test_wrong_arguments_are_told(tmp_path, arguments):
    process = bench(tmp_path, *arguments)
    assert "./run.sh bench: error: " in process.communicate(timeout=20)[1] and process.returncode == 2
