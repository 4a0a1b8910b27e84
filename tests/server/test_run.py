"""run.sh: what it says, what it sets up and when, what it starts. A stand-in for Python makes the set-up quick."""
import configparser
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from errors import SettingsError
from front import lock
from support import ROOT
from support.processes import clean_environment

# Notes what pip is asked to install, and prints what it would start as "PID FILE ARGUMENTS".
STAND_IN = r"""#!/usr/bin/env bash
notes=@FOLDER@
case "$*" in
  *"import ensurepip, venv"*) [ ! -e "$notes/no-ensurepip" ] ;;
  *sys.exit*) [ ! -e "$notes/too-old" ] ;;
  -ISc*) cat "$notes/identity" ;;
  --version) echo "Python 3.12.9" ;;
  "-m venv "*) [ ! -e "$notes/full" ] || { mkdir "$3"; exit 1; }; echo venv >> "$notes/done"; mkdir -p "$3/bin" && cp "$notes/python" "$3/bin/python" ;;
  "-m pip install "*)
    if [ -e "$notes/offline" ]; then
      echo "ERROR: No matching distribution found for blinker==1.9.0"
      exit 1
    fi
    sleep 0.1
    for last; do :; done
    echo "install ${last##*wanted-}" >> "$notes/done"
    echo "  Downloading https://files/gevent-26.9.0-cp312-cp312-manylinux_2_28_x86_64.whl (2.2 MB)" ;;
  *) echo "$$ ${1##*/} ${*:2}" ;;
esac
"""


class Tree:
    """A fresh copy of what run.sh needs, and the stand-in."""

    def __init__(self, folder):
        self.folder, self.notes = folder / "sparks", folder / "notes"
        self.folder.mkdir(), self.notes.mkdir()
        for name in ("run.sh", "requirements.txt"):
            shutil.copy2(ROOT / name, self.folder)
        self.venv, self.script = self.folder / ".venv", str(self.folder / "run.sh")
        self.python = self.notes / "python"
        self.python.write_text(STAND_IN.replace("@FOLDER@", str(self.notes)))
        self.python.chmod(0o755)
        self.note("identity", "/usr 3.12.9")
        self.environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "SPARKS_PYTHON": str(self.python)}

    def note(self, name, text=""):
        (self.notes / name).write_text(text)

    def start(self, *arguments):
        return subprocess.Popen([self.script, *arguments], cwd="/", env=self.environment, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(self, *arguments):
        """(exit code, stdout, stderr)"""
        process = self.start(*arguments)
        return read(process)

    def done(self):
        """What was set up since the last call."""
        path = self.notes / "done"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines


def read(process):
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


# ---- what it says

def test_help_needs_no_set_up(tree):
    code, out, err = tree.run("--help")
    assert (code, err) == (0, "")
    for word in ("./run.sh --local", "keys", "lint", "test pure", "test --vllm", "test --wheels", "sparks.example.toml", "SPARKS_PYTHON"):
        assert word in out
    assert not tree.venv.exists()


@pytest.mark.parametrize("arguments, line", [
    (["nonsense"], "run.sh: there is no 'nonsense'; ./run.sh --help explains what there is\n"),
    (["--local", "now"], "run.sh: --local takes no argument, but there is 'now'; ./run.sh --help explains all\n"),
])
def test_a_wrong_argument_is_one_line_and_exit_2(tree, arguments, line):
    assert tree.run(*arguments) == (2, "", line)
    assert not tree.venv.exists()


def test_a_python_that_is_too_old(tree):
    tree.note("too-old")
    assert tree.run() == (1, "", f"run.sh: SPARKS_PYTHON: {tree.python} is no Python 3.11, 3.12 or 3.13\n")


def test_no_python_at_all(tree):
    bare = tree.notes / "bin"
    bare.mkdir()
    for name in ("bash", "awk", "cmp", "cat", "readlink", "dirname", "flock"):
        if found := shutil.which(name):
            (bare / name).symlink_to(found)
    tree.environment = {"PATH": str(bare)}
    assert tree.run() == (1, "", "run.sh: Python 3.11, 3.12 or 3.13 is needed: "
                                 "apt install python3 python3-venv (or name one in SPARKS_PYTHON)\n")


def test_python_without_ensurepip(tree):
    tree.note("no-ensurepip")
    assert tree.run() == (1, "", "run.sh: this Python cannot make .venv: apt install python3-venv\n")


def test_a_shim_that_fails_is_passed_over(tree):
    shims = tree.notes / "shims"
    shims.mkdir()
    for name in ("python3", "python3.13"):
        (shims / name).write_text("#!/bin/sh\necho 'python3.13: command not found' >&2\nexit 127\n")
        (shims / name).chmod(0o755)
    (shims / "python3.12").symlink_to(tree.python)
    tree.environment.update(PATH=f"{shims}:/usr/bin:/bin", SPARKS_PYTHON="")
    assert tree.run()[0] == 0
    assert tree.done() == ["venv", "install gateway"]


# ---- what it sets up, and when

def test_the_first_start_sets_up_and_the_next_is_quick_and_quiet(tree):
    code, out, err = tree.run("keys", "list")
    assert (code, out.split()[1:]) == (0, ["keys.py", "list"])
    assert err == ("making .venv with Python 3.12.9\n"
                   f"installing the packages for 'gateway': {len(pins('gateway'))}\n"
                   "  gevent 2.2 MB\n")
    assert tree.done() == ["venv", "install gateway"]

    before = time.monotonic()
    code, out, err = tree.run("keys", "list")
    assert time.monotonic() - before < 5
    assert (code, out.split()[1:], err) == (0, ["keys.py", "list"], "")
    assert tree.done() == []


def test_sections_are_installed_as_they_are_needed(tree):
    tree.run()
    assert tree.done() == ["venv", "install gateway"]
    tree.run("--local")
    assert tree.done() == ["install local"]
    tree.run("test")
    assert tree.done() == ["install test"]


def test_a_changed_section_is_installed_again(tree):
    tree.run("--local")
    tree.done()
    path = tree.folder / "requirements.txt"
    path.write_text(path.read_text().replace("flask==3.1.3", "flask==3.1.4"))
    tree.run("--local")
    assert tree.done() == ["install gateway"]


def test_a_changed_python_makes_all_again(tree):
    tree.run()
    tree.done()
    tree.note("identity", "/usr 3.13.1")
    tree.run()
    assert tree.done() == ["venv", "install gateway"]


def test_a_set_up_that_failed_is_done_again(tree):
    tree.note("offline")
    code, out, err = tree.run()
    assert (code, out) == (1, "")
    assert err.splitlines()[-2:] == [
        "ERROR: No matching distribution found for blinker==1.9.0",
        f"run.sh: pip could not install the packages for 'gateway'; all it said is in {tree.venv}/pip.log"]
    (tree.notes / "offline").unlink()
    tree.done()
    assert tree.run()[0] == 0
    assert tree.done() == ["install gateway"]


def test_a_venv_cut_short_is_made_again(tree):
    tree.run()
    tree.done()
    (tree.venv / "made-by").unlink()
    tree.run()
    assert tree.done() == ["venv", "install gateway"]


def contents(folder):
    """All that is in a folder: {path: (mode, what it holds or where it leads)}."""
    return {str(path.relative_to(folder)): (path.lstat().st_mode, os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes())
            for path in sorted(folder.rglob("*"))}


@pytest.fixture
def open_tree():
    """A tree that nobody in particular may read, for a run as a user who is not root."""
    folder = Path(tempfile.mkdtemp(prefix="sparks-run-"))
    folder.chmod(0o755)
    yield Tree(folder)
    subprocess.run(["chmod", "-R", "u+rwx", folder], check=True)
    shutil.rmtree(folder)


def run_as_another(tree, *arguments):
    """As a user to whom nothing belongs; or as oneself, where one is not root."""
    command = [tree.script, *arguments]
    if os.getuid() == 0:
        command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *command]
    done = subprocess.run(command, cwd="/", env=tree.environment, text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(os.getuid() == 0 and not shutil.which("setpriv"), reason="needs setpriv")
@pytest.mark.parametrize("closed", ["", "bin", "bin/within"])
@pytest.mark.parametrize("why", ["requirements", "python", "half-made"])
def test_a_venv_that_may_not_be_changed(open_tree, closed, why):
    """One line, and nothing is done: neither a part of it removed nor a part of another one made."""
    tree = open_tree
    tree.run()
    (tree.venv / "bin/within").mkdir()
    tree.done()
    for path in (tree.folder, tree.notes, *(path for path in tree.venv.rglob("*") if path.is_dir()), tree.venv):
        path.chmod(0o777)                           # all may be changed but one folder
    (tree.venv / closed).chmod(0o555)
    assert run_as_another(tree, "keys")[0] == 0     # it is used as it is
    if why == "requirements":
        path = tree.folder / "requirements.txt"
        path.write_text(path.read_text().replace("flask==3.1.3", "flask==3.1.4"))
    elif why == "python":
        tree.note("identity", "/usr 3.13.1")
    else:
        (tree.venv / "made-by").write_text("")
    before = contents(tree.folder)
    assert run_as_another(tree, "keys") == (1, "", f"run.sh: {tree.venv} has to be set up anew, and {tree.venv / closed} cannot be changed: "
                                                   f"run ./run.sh as its owner, or remove {tree.venv}\n")
    assert contents(tree.folder) == before and tree.done() == []


@pytest.mark.skipif(os.getuid() == 0 and not shutil.which("setpriv"), reason="needs setpriv")
def test_a_folder_that_may_not_be_changed(open_tree):
    open_tree.folder.chmod(0o555)
    assert run_as_another(open_tree) == (1, "", f"run.sh: {open_tree.folder} cannot be written to, and needs a .venv: let its owner run ./run.sh once\n")


def test_a_venv_that_is_something_else(tree):
    tree.venv.write_text("a file")
    before = contents(tree.folder)
    assert tree.run() == (1, "", f"run.sh: {tree.venv} is no folder: move it away, and a start makes one\n")
    assert contents(tree.folder) == before
    tree.venv.unlink()
    elsewhere = tree.notes / "elsewhere"
    for made in (False, True):                      # a link that leads nowhere, and one to a folder that is something else
        if made:
            elsewhere.mkdir(), (elsewhere / "file").touch()
        tree.venv.unlink(missing_ok=True)
        tree.venv.symlink_to(elsewhere)
        code, out, err = tree.run()
        assert (code, out, err.count("\n")) == (1, "", 1) and f"is a link to {elsewhere}" in err
        assert os.readlink(tree.venv) == str(elsewhere) and elsewhere.exists() == made
    tree.venv.unlink()
    shutil.rmtree(elsewhere)
    assert tree.run()[0] == 0
    tree.venv.rename(elsewhere)
    tree.venv.symlink_to(elsewhere)
    tree.done()
    assert tree.run("keys")[0] == 0 and tree.done() == []       # one to a whole .venv is as good as it


def test_a_venv_that_cannot_be_made_anew_comes_back(tree):
    tree.run()
    tree.done()
    tree.note("identity", "/usr 3.13.1"), tree.note("full")
    before = contents(tree.venv)
    code, out, err = tree.run()
    assert (code, out) == (1, "") and err.splitlines()[-1] == f"run.sh: {tree.python} could not make {tree.venv}"
    assert contents(tree.venv) == before and sorted(path.name for path in tree.folder.iterdir()) == [".venv", "requirements.txt", "run.sh"]
    (tree.notes / "full").unlink()
    assert tree.run()[0] == 0 and tree.done() == ["venv", "install gateway"]


@pytest.mark.skipif(not shutil.which("flock"), reason="needs flock")
def test_two_at_once_set_up_once(tree):
    both = [tree.start("keys", name) for name in ("a", "b")]
    assert [read(process)[0] for process in both] == [0, 0]
    assert tree.done() == ["venv", "install gateway"]


# ---- what it starts

@pytest.mark.parametrize("arguments, started", [
    ([], "sparks.py"),
    (["--local"], "sparks.py --local"),
    (["keys", "add", "two words"], "keys.py add two words"),
    (["test"], "-m pytest -n 3 --dist loadfile --no-loadscope-reorder"),
    (["test", "pure"], "-m pytest tests/pure"),
    (["test", "server", "-x"], "-m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/server -x"),
    (["test", "-x", "tests/server/test_run.py"], "-m pytest -x tests/server/test_run.py"),
    (["test", "--vllm"], "-m pytest -m vllm tests/engines --run-vllm"),
    (["test", "--wheels"], "wheels.py"),
])
def test_it_becomes_what_it_starts(tree, arguments, started):
    process = tree.start(*arguments)
    code, out, _ = read(process)
    assert (code, out.strip()) == (0, f"{process.pid} {started}")


def test_lint(tree):
    code, out, _ = tree.run("lint")
    assert code == 0 and [line.split(" ", 1)[1] for line in out.splitlines()] == ["-m ruff check", "-m ruff format --check"]
    assert tree.run("lint", "x")[0] == 2


def test_through_a_link(tree):
    link = tree.notes / "sparks"
    link.symlink_to(tree.script)
    tree.script = str(link)
    assert tree.run()[0] == 0
    assert tree.venv.exists()


# ---- reload, and the file that says which gateway runs

def reload(**settings):
    return subprocess.run([sys.executable, "sparks.py", "--reload"], cwd=ROOT, env=clean_environment(**settings), text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=30)


def test_reload_without_a_gateway_leaves_nothing(tmp_path):
    (tmp_path / "sparks.toml").touch()
    done = reload(db=f"sqlite:///{tmp_path}/sparks.db", config=tmp_path / "sparks.toml")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "sparks: no gateway runs here that could reload\n")
    assert [path.name for path in tmp_path.iterdir()] == ["sparks.toml"]


@pytest.mark.parametrize("pid", ["1" * 30, "dead", ""])
def test_reload_where_the_lock_outlives_its_master(tmp_path, pid):
    """A worker whose master was killed holds the lock for some seconds, and the pid is nobody's by then."""
    (tmp_path / "sparks.toml").touch()
    gone = subprocess.Popen(["true"])
    gone.wait()
    db = tmp_path / "sparks.db"
    with lock.take(db) as file:
        os.truncate(file.fileno(), 0)
        os.pwrite(file.fileno(), (str(gone.pid) if pid == "dead" else pid).encode(), 0)
        done = reload(db=f"sqlite:///{db}", config=tmp_path / "sparks.toml")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "sparks: no gateway runs here that could reload\n")


def test_reload_only_reads_the_file(gateway, engine):
    front = gateway()
    file = lock.pid_file(front.db)
    before, text = written(file), file.read_text()
    done = reload(**front.settings)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"sparks: sparks.toml is in order; gateway {front.pid} reads it now\n"
    assert (written(file), file.read_text()) == (before, text) and text == str(front.pid)
    front.stop()
    nobody_runs(front.db)
    assert file.read_text() == text                 # it stays, and says nothing any more


def written(file):
    """What changes when a file is written or put in another's place."""
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def test_nobody_holds_what_is_no_file_of_a_gateway(tmp_path):
    db, file = tmp_path / "sparks.db", lock.pid_file(tmp_path / "sparks.db")
    nobody_runs(db)                                 # nothing there
    file.write_text("1")
    nobody_runs(db)                                 # what a gateway left that was killed
    file.unlink()
    os.mkfifo(file)
    nobody_runs(db)                                 # nor does it wait for somebody to write
    file.unlink()
    file.mkdir()
    nobody_runs(db)
    nobody_runs(tmp_path / "nowhere" / "sparks.db")


def nobody_runs(db):
    with pytest.raises(SettingsError, match="no gateway runs here"):
        lock.tell_to_reload(db)


def test_whoever_asks_is_in_nobodys_way(tmp_path):
    db, over = tmp_path / "sparks.db", threading.Event()

    def ask():
        while not over.is_set():
            with suppress(FileNotFoundError), lock.open_pid_file(lock.pid_file(db), os.O_RDONLY) as file:
                lock.locked(file, fcntl.LOCK_SH)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(200):
            lock.take(db).close()
    finally:
        over.set()
        thread.join()


# ---- the pins

def pins(section):
    """{name: [hashes]} of a section of requirements.txt."""
    text = (ROOT / "requirements.txt").read_text().split(f"# == {section}\n")[1].split("# == ")[0]
    blocks = re.split(r"\n(?=[a-z])", text.replace("\\\n", " ").strip())
    return {block.split("==")[0]: re.findall(r"--hash=sha256:[0-9a-f]{64}(?=\s|$)", block) for block in blocks}


def wanted(section):
    """The names of setup.cfg's dependencies for a section."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    text = config["options"]["install_requires"] if section == "gateway" else config["options.extras_require"][section]
    return {re.match(r"[\w-]+", line)[0] for line in text.split("\n") if line}


@pytest.mark.parametrize("section", ["gateway", "test", "local"])
def test_every_dependency_is_pinned_with_hashes(section):
    pinned = pins(section)
    assert wanted(section) <= pinned.keys()
    assert all(pinned.values())


def test_no_package_is_in_two_sections():
    names = [name for section in ("gateway", "test", "local") for name in pins(section)]
    assert len(names) == len(set(names))


def test_requirements_hold_nothing_but_pins():
    line = re.compile(r"|#.*|[a-z0-9.-]+==[\w.]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?")
    odd = [text for text in (ROOT / "requirements.txt").read_text().splitlines() if not line.fullmatch(text)]
    assert odd == []
