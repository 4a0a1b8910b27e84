"""The gateway as a process: its start, its files, signals, and settings that stop it."""
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from support import ROOT
from support.chat import HELLO, PATH
from support.engine import Hang, chat_chunks
from support.gateway import Gateway, started
from support.observe import worker
from support.processes import WITH_US, children, clean_environment, listens, wait_until
from support.rows import rows


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


RELOADED = """
import os, signal, time
import {module} as module
def reloaded(*arguments):
    found = real(*arguments)
    os.kill(os.getpid(), signal.SIGHUP)
    time.sleep(0.01)
    return found
real, module.{name} = module.{name}, reloaded
"""


@pytest.mark.parametrize("module, name", [("front.lock", "take"), ("front.lock", "pid_file"), ("store.seal", "own_seal")])
def test_a_reload_during_the_start(engine, stock, tmp_path, module, name):
    """The first two ended the master; the third was lost, though the worker had read the settings already."""
    with started(engine, tmp_path, stock, RELOADED.format(module=module, name=name)) as front:
        if module == "store.seal":
            wait_until(lambda: "reload: sparks.toml was read" in front.log, 5)
        os.kill(front.pid, signal.SIGHUP)
        wait_until(lambda: front.log.count("reload: sparks.toml was read") == 1 + (module == "store.seal"), 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0, 0.1])
def test_an_end_during_the_start_of_the_worker(gateway, engine, number, seconds):
    """The worker had no handlers yet, and the master waited for it until the drain was over."""
    front = gateway(wait=None)
    wait_until(lambda: listens(front.settings["bind"]), 5, front.process)
    time.sleep(seconds)
    front.process.send_signal(number)
    assert front.process.wait(8) == 0


def test_ctrl_c_lets_streams_end_and_the_second_one_writes_the_rows(gateway, engine):
    front = gateway(drain=20)
    engine.always(lambda request: [*chat_chunks("a b")[:2], Hang()])
    answer = ask(front, stream=True)
    os.killpg(front.pid, signal.SIGINT)
    wait_until(lambda: not listens(front.settings["bind"]), 5)
    time.sleep(0.6)
    assert front.process.poll() is None                 # the stream may go on
    os.killpg(front.pid, signal.SIGINT)
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
    front.process = subprocess.Popen([*WITH_US, "bash", "-c", f'exec "$0" sparks.py {closed}', sys.executable], cwd=ROOT,
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


def test_kill_9_for_the_master_alone(gateway, engine):
    """Its worker sees it: streams end with an error event, each request has its row, and the next start is at once."""
    front = gateway(max_active=30)
    engine.always([*chat_chunks("Hi there")[:2], Hang()])
    events = [front.client(timeout=20).post(PATH, {"messages": HELLO, "stream": True}, {"x-request-id": f"left-{n}"}).events()
              for n in range(20)]
    for each in events:
        next(each)
    orphan = worker(front)
    front.process.kill()
    front.process.wait(10)
    began = time.monotonic()
    front.launch()
    for each in events:
        assert list(each)[-1].json()["error"]["code"] == "shutting_down"
    wait_until(lambda: not alive(orphan), 5)
    assert time.monotonic() - began < 10 and "the master is gone" in front.log
    front.wait_alive()
    found = rows(front.db, "id LIKE 'left-%'")
    assert [(row["status"], row["error"]) for row in found] == [(503, "shutting_down")] * 20
    engine.wait_idle()


def test_kill_9_for_the_master_while_it_drains(gateway, engine):
    front = gateway(drain=60)
    engine.always([*chat_chunks("Hi there")[:2], Hang()])
    events = front.client(timeout=20).post(PATH, {"messages": HELLO, "stream": True}).events()
    next(events)
    orphan = worker(front)
    front.process.terminate()
    wait_until(lambda: not listens(front.settings["bind"]), 5)
    front.process.kill()
    assert list(events)[-1].json()["error"]["code"] == "shutting_down"
    wait_until(lambda: not alive(orphan), 5)


# ---- the pid file

LOCKER = """
import fcntl, os, sys, time
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_SH)
os.setresuid(65534, 65534, 65534)
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def locked_by_a_stranger(path):
    """Another user's process, which may only read the file, holds a lock on it."""
    process = subprocess.Popen([sys.executable, "-c", LOCKER, path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_pid_file_that_others_can_lock(gateway, engine):
    """Of an older version, mode 0644, with the pid of what is somebody else's process by now."""
    front = gateway()
    front.stop()
    pid_file = front.db.with_name(front.db.name + ".pid")
    pid_file.chmod(0o644)
    with locked_by_a_stranger(pid_file) as stranger:
        pid_file.write_text(str(stranger.pid))
        done = sparks(front, "--reload")
        assert done.returncode == 1 and "no gateway runs here" in done.stderr and stranger.poll() is None
        front.launch()
        front.wait_alive()
        assert pid_file.read_text() == str(front.pid) and stat.S_IMODE(pid_file.stat().st_mode) == 0o600
        assert sparks(front, "--reload").returncode == 0


def test_a_pid_file_that_others_may_read_is_closed(gateway, engine):
    front = gateway()
    front.stop()
    pid_file = front.db.with_name(front.db.name + ".pid")
    pid_file.chmod(0o666)
    old = pid_file.stat().st_ino
    front.launch()
    front.wait_alive()
    found = pid_file.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_ino != old


def test_a_process_that_got_the_pid_is_not_told_to_reload(gateway, engine):
    """The lock is held, by a worker that outlives its master perhaps; the pid is somebody's who knows nothing of it."""
    front = gateway()
    front.stop()
    pid_file = front.db.with_name(front.db.name + ".pid")
    with open(pid_file) as file, subprocess.Popen(["sleep", "30"]) as other:
        fcntl.flock(file, fcntl.LOCK_EX)
        pid_file.write_text(str(other.pid))
        done = sparks(front, "--reload")
        assert done.returncode == 1 and "no gateway runs here" in done.stderr and other.poll() is None
        other.kill()


@pytest.mark.parametrize("way", ["symlink", "link", "relative", "through a folder", "no pid file"])
def test_a_database_by_another_name_is_the_same_one(gateway, engine, tmp_path, way):
    front = gateway()
    other = tmp_path / "other.db"
    if way == "symlink":
        other.symlink_to(front.db)
    elif way == "link":
        os.link(front.db, other)
    elif way == "relative":
        other = os.path.relpath(front.db, ROOT)
    elif way == "no pid file":                      # its owner took it for a stale one
        other = front.db
        other.with_name(other.name + ".pid").unlink()
    else:
        (tmp_path / "folder").symlink_to(front.db.parent)
        other = tmp_path / "folder" / front.db.name
    done = sparks(front, db=f"sqlite:///{other}", bind="127.0.0.1:1")
    assert done.returncode == 1 and done.stderr.startswith("sparks: SPARKS_DB: ") and done.stderr.count("\n") == 1
    assert front.keys("list").returncode == 0 and ask(front).status in (200, 503)


def test_two_starts_at_once(gateway, engine):
    """One of them serves, and the other one says why it does not."""
    front = gateway()
    for _ in range(2):
        front.stop()
        starts = [subprocess.Popen([sys.executable, "sparks.py"], cwd=ROOT, text=True, stderr=subprocess.PIPE,
                                   env=clean_environment(**front.settings)) for _ in range(2)]
        try:
            wait_until(lambda starts=starts: any(start.poll() is not None for start in starts), 15)
            front.wait_alive()
            loser, = (start for start in starts if start.poll() is not None)
            assert loser.returncode == 1 and loser.stderr.read().count("\n") == 1
        finally:
            for start in starts:
                start.terminate()
                start.communicate(timeout=30)


# ---- the tests' own processes

RUN = """
import sys, time
from pathlib import Path
from support.gateway import Gateway
front = Gateway(Path(sys.argv[1]), sys.argv[2], (Path(sys.argv[3]), "")).wait_alive()
print(front.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not WITH_US, reason="setpriv is not installed")
def test_a_gateway_ends_with_the_run_that_started_it(engine, stock, tmp_path):
    """However the run ends. Others of its tests would use the ports that the gateway still asks."""
    environment = {**clean_environment(), "PYTHONPATH": str(ROOT / "tests")}
    with subprocess.Popen([sys.executable, "-c", RUN, tmp_path, engine.url, stock[0]], cwd=ROOT, text=True, env=environment,
                          stdout=subprocess.PIPE) as run:
        pid = int(run.stdout.readline())
        gateway = [pid, *children(pid)]
        assert len(gateway) == 2
        run.kill()
    wait_until(lambda: not any(map(alive, gateway)), 10)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
