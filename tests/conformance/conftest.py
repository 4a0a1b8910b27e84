"""Suites that nobody here wrote, against the gateway in front of an engine whose answers make sense.

Each has a virtual environment of its own, .venv-conformance/NAME, with the packages that pins/NAME.txt lists.

    suite       suite(name): the folder with that suite's commands
    front       a gateway in front of the `engine`, which answers plausibly
    judge       judge(name, failed, of): compares what failed with what misses.py expects
"""
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.misses import MISSES
from support import ROOT
from support.plausible import plausible
from support.processes import clean_environment

PINS = Path(__file__).parent / "pins"
VENVS = ROOT / ".venv-conformance"
FIGURES = []                                        # for the summary


def pytest_terminal_summary(terminalreporter):
    for line in FIGURES:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def suite(request):
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def commands(name):
        with capture.global_and_fixture_disabled():
            return installed(name) / "bin"
    return commands


def installed(name):
    """The suite's virtual environment, made if its packages or this Python have changed."""
    venv, pins = VENVS / name, PINS / f"{name}.txt"
    wanted, mark = sys.version + pins.read_text(), venv / "installed"
    with open(pins) as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        if not mark.exists() or mark.read_text() != wanted:
            print(f"\ninstalling {name} into {venv}", flush=True)
            run([sys.executable, "-m", "venv", "--clear", venv])
            # Without dependencies: all that is needed is listed, and nothing else.
            run([venv / "bin/pip", "install", "--quiet", "--no-deps", "--no-input", "--disable-pip-version-check", "-r", pins])
            mark.write_text(wanted)
    return venv


def run(command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=clean_environment())
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))}:\n{(done.stdout + done.stderr)[-3000:]}", pytrace=False)


@pytest.fixture
def front(gateway, engine):
    engine.always(plausible)
    return gateway()


@pytest.fixture
def judge():
    def compare(name, failed, of):
        """failed: what each case that failed says; of: how many cases there are."""
        expected = MISSES.get(name, {})
        FIGURES.append(f"{name}: {of - len(failed)} of {of}" + "".join(f"\n    {case}: {why}" for case, why in expected.items()))
        new = [f"{case}: {said}" for case, said in failed.items() if case not in expected]
        gone = [f"{case} passes now: take it out of misses.py and docs/compatibility.md" for case in expected if case not in failed]
        assert not new and not gone, "\n".join([f"{name}, what is new:", *new, *gone])
    return compare
