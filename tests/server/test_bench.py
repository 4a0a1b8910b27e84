"""./run.sh bench: a small real run, and what is left of it afterwards: nothing. Its figures: tests/pure/test_bench_figures.py."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import machine
from support import ROOT
from support.processes import clean_environment, wait_until

needs_compiler = pytest.mark.skipif(not (shutil.which("cc") or shutil.which("gcc")), reason="there is no C compiler")


# ---- processes

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
    out, err = process.communicate(timeout=60)
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
    assert "./run.sh bench: error: " in process.communicate(timeout=60)[1] and process.returncode == 2
