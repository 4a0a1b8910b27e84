"""The gateway as a process: its start, its files, signals, and settings that stop it."""
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from support import ROOT
from support.chat import HELLO, PATH
from support.engine import Hang, chat_chunks
from support.gateway import Gateway
from support.observe import worker
from support.processes import children, clean_environment, wait_until


def ask(front, **fields):
    return front.client().post(PATH, {"messages": HELLO, **fields})


def test_a_worker_in_the_place_of_another_knows_what_was_reloaded(gateway, engine):
    front = gateway()
    toml = front.settings["config"]
    for text, status in (('[models."new name"]', 200), ("max_active = 0", 404)):
        toml.write_text(text)
        os.kill(front.pid, signal.SIGHUP)
        wait_until(lambda: "reload:" in front.log, 5)
        before = front.log.count("Sparks\n")
        os.kill(worker(front), signal.SIGKILL)
        wait_until(lambda before=before: front.log.count("Sparks\n") > before, 10)
        front.wait_ready()
        assert ask(front, model="new name").status == status
    assert "max_active must be a whole number" in front.log and "settings of the start" in front.log


def test_a_pid_file_that_cannot_be_written(gateway, engine):
    front = gateway()
    front.stop()
    pid_file = front.db.with_name(front.db.name + ".pid")
    pid_file.unlink()
    pid_file.mkdir()
    done = sparks(front)
    assert done.returncode == 1 and done.stderr == f"sparks: SPARKS_DB: {pid_file} cannot be written: Is a directory\n"
    pid_file.rmdir()
    os.mkfifo(pid_file)
    done = sparks(front)
    assert done.returncode == 1 and done.stderr.startswith(f"sparks: SPARKS_DB: {pid_file} cannot be written: ")


def test_a_stale_pid_file_is_no_gateway(gateway, engine):
    front = gateway()
    front.stop()
    other = subprocess.Popen(["sleep", "30"])
    try:
        front.db.with_name(front.db.name + ".pid").write_text(str(other.pid))
        done = sparks(front, "--reload")
        assert done.returncode == 1 and "no gateway runs here" in done.stderr and other.poll() is None
        front.launch()
        front.wait_alive()
        second = sparks(front, bind="127.0.0.1:1")
        assert second.returncode == 1 and second.stderr.count("\n") == 1 and "Traceback" not in second.stderr
    finally:
        other.kill()
        other.wait()


def sparks(front, *arguments, **settings):
    return subprocess.run([sys.executable, "sparks.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30,
                          env=clean_environment(**{**front.settings, **settings}))


@pytest.mark.parametrize("seconds", [0.3, 0.5])
def test_ctrl_c_during_the_start_is_quiet(gateway, engine, seconds):
    front = gateway(wait=None)
    time.sleep(seconds)
    os.killpg(front.pid, signal.SIGINT)
    assert front.process.wait(30) in (0, -signal.SIGINT)
    assert "KeyboardInterrupt" not in front.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0, 0.1])
def test_an_end_during_the_start_of_the_worker(gateway, engine, number, seconds):
    """The worker had no handlers yet, and the master waited for it until the drain was over."""
    front = gateway(wait=None)
    wait_until(lambda: listens(front), 5, front.process)
    time.sleep(seconds)
    front.process.send_signal(number)
    assert front.process.wait(8) == 0


def listens(front):
    host, port = front.settings["bind"].split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


def test_ctrl_c_lets_streams_end_and_the_second_one_writes_the_rows(gateway, engine):
    front = gateway(drain=20)
    engine.always(lambda request: [*chat_chunks("a b")[:2], Hang()])
    answer = ask(front, stream=True)
    for expected in (None, 0):
        os.killpg(front.pid, signal.SIGINT)
        time.sleep(0.6)
        if expected is None:
            assert front.process.poll() is None         # the stream may go on
    assert front.process.wait(30) == 0
    answer.close()
    rows = [json.loads(line) for line in front.keys("log", "--json").stdout.splitlines()]
    assert rows[-1]["error"] == "shutting_down" and rows[-1]["completion_tokens"] == 1


def test_signals_make_no_second_worker(gateway, engine):
    front = gateway()
    only = children(front.pid)
    for number in (signal.SIGTTIN, signal.SIGTTOU, signal.SIGHUP):
        os.kill(front.pid, number)
    wait_until(lambda: "reload:" in front.log, 5)           # they are dealt with in order
    assert children(front.pid) == only and len(only) == 1


def test_a_worker_that_cannot_start_ends_the_gateway_with_a_line(gateway, engine):
    front = gateway()
    before = len(front.log)
    front.db.write_bytes(b"no database" * 1000)
    os.kill(worker(front), signal.SIGKILL)
    assert front.process.wait(30) == 3
    said = front.log[before:]
    assert f"\nsparks: SPARKS_DB: {front.db} cannot be used: it is no SQLite database\n" in said and "Traceback" not in said


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_descriptors_that_are_closed(gateway, engine, closed):
    """What opened next got their numbers: the log went into the pid file, or to a client."""
    front = gateway()
    front.stop()
    front.process = subprocess.Popen(["bash", "-c", f'exec "$0" sparks.py {closed}', sys.executable], cwd=ROOT,
                                     env=clean_environment(**front.settings), start_new_session=True, stdin=subprocess.DEVNULL,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    front.pid = front.process.pid
    front.wait_alive()
    assert ask(front).status in (200, 503)
    assert front.db.with_name(front.db.name + ".pid").read_text() == str(front.pid)
    assert {os.readlink(f"/proc/{worker(front)}/fd/{number}") for number in range(3)} == {"/dev/null"}


def test_an_odd_environment(stock, engine, tmp_path):
    odd = {"PROMETHEUS_MULTIPROC_DIR": "/nonexistent", "SCRIPT_NAME": "/x", "GUNICORN_PID": "1", "GUNICORN_FD": "99",
           "FORWARDED_ALLOW_IPS": "proxy", "WEB_CONCURRENCY": "auto", "SENDFILE": "x"}
    os.environ.update(odd)
    try:
        front = Gateway(tmp_path, engine.url, stock)
        front.wait_alive().wait_ready()
    finally:
        for name in odd:
            del os.environ[name]
    assert front.stop() == 0


@pytest.mark.parametrize("settings", [{"max_body": "9" * 400 + "GB"}, {"db": "sqlite:///~nouser/x"}, {"max_active": "9" * 5000}])
def test_settings_beyond_all_bounds(settings):
    done = subprocess.run([sys.executable, "sparks.py"], cwd=ROOT, capture_output=True, text=True, timeout=30,
                          env=clean_environment(**settings))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["max_active = " + "9" * 5000, "a = " + "[" * 100_000])
def test_files_beyond_all_bounds(tmp_path, text):
    (tmp_path / "sparks.toml").write_text(text)
    done = subprocess.run([sys.executable, "sparks.py"], cwd=ROOT, capture_output=True, text=True, timeout=30,
                          env=clean_environment(config=tmp_path / "sparks.toml"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1


@pytest.mark.parametrize("host", ["é..x", "a" * 300, "no.such.host.invalid", "256.1.1.1"])
def test_an_address_that_is_none_is_one_line(gateway, engine, host):
    front = gateway()
    done = sparks(front, bind=f"{host}:8080")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"sparks: cannot listen on {host}:8080: ") and done.stderr.count("\n") == 1
