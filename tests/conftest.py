"""Options, and the fixtures that more than one folder uses.

    engine          a fresh scripted engine (support/engine.py)
    gateway         starts gateways in front of it: gateway(), gateway(max_active=2, keepalive=0.2)
    shared          one gateway and engine for the whole run, made new again for each test: shared.engine, shared.client()
    shared_vectors  the same with a second model, `vectors`, that embeds
    llama           the URL of a real llama.cpp server with a tiny random model
    no_proxy        an environment from which no SDK takes an address or a key
    vllm            the URL of a real vLLM on the CPU with a tiny model that is known by heart; only with --run-vllm
"""
import os
import signal
import sys
from importlib.util import find_spec

import hypothesis
import pytest

pytest.register_assert_rewrite("support")

from support import SUPPORT  # noqa: E402, it is to be rewritten
from support.engine import Engine  # noqa: E402
from support.gateway import WITH_VECTORS, Gateway, Shared, add_key  # noqa: E402
from support.processes import free_port  # noqa: E402
from support.real_engines import serve, serve_vllm  # noqa: E402

# ---- options

# The same examples each time; --hypothesis-profile=many tries other ones, and many. What must hold for the odd answers of all
# engines is worth most, some minutes: ./run.sh test tests/pure/test_reading.py --timeout 0 --hypothesis-profile=most
hypothesis.settings.register_profile("few", deadline=None, derandomize=True, database=None, max_examples=30)
hypothesis.settings.register_profile("many", deadline=None, database=None, max_examples=1000)
hypothesis.settings.register_profile("most", deadline=None, database=None, max_examples=10_000)
hypothesis.settings.load_profile("few")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:       # as of a shell's job in the background: children would have it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--run-vllm", action="store_true", help="also run what needs real vLLM, and install it")
    parser.addoption("--run-clients", action="store_true", help="also run other makers' client programs, and install them")
    parser.addoption("--run-conformance", action="store_true", help="also run other people's test suites, and install them")


def pytest_collection_modifyitems(config, items):
    """What needs more than is here runs only where its option is given."""
    left_out = [name for name in ("vllm", "clients", "conformance") if not config.getoption(f"--run-{name}")]
    unwanted = [item for item in items if any(item.get_closest_marker(name) for name in left_out)]
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = [item for item in items if item not in unwanted]


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


@pytest.fixture
def no_proxy(monkeypatch):
    """An environment from which no SDK takes an address or a key."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy") or name.startswith(("OPENAI_", "ANTHROPIC_"))]:
        monkeypatch.delenv(name)


# ---- one gateway and engine for many tests

@pytest.fixture(scope="session")
def shared_pair(tmp_path_factory, stock):
    """No prompt waits for another one: many tests send large bodies at once."""
    _check_unpatched()
    yield from _pair(tmp_path_factory.mktemp("shared"), stock, heavy_prompt=0)


@pytest.fixture
def shared(shared_pair):
    yield from _as_new(shared_pair)


@pytest.fixture(scope="session")
def shared_vectors_pair(tmp_path_factory, stock):
    yield from _pair(tmp_path_factory.mktemp("vectors"), stock, config=WITH_VECTORS)


@pytest.fixture
def shared_vectors(shared_vectors_pair):
    yield from _as_new(shared_vectors_pair)


def _pair(folder, stock, **settings):
    with Engine() as engine:
        gateway = Gateway(folder, engine.url, stock, **settings)
        try:
            gateway.wait_alive()
            yield Shared(engine, gateway)
        finally:
            gateway.stop()


def _as_new(pair):
    """The pair with nothing left of earlier tests; afterwards it is looked at."""
    pair.engine.reset()
    pair.gateway.wait_ready()
    before = len(pair.gateway.log)
    yield pair
    pair.engine.start()                             # a test may have left it off
    pair.engine.wait_idle()
    pair.gateway.check_log(before)
    assert not pair.engine.faults, "\n".join(pair.engine.faults)


# ---- real engines

@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """The URL of llama.cpp's own server with a tiny random model, `tiny`, and two slots."""
    if not find_spec("xllamacpp") or not find_spec("gguf"):
        pytest.fail("xllamacpp and gguf are missing; ./run.sh test installs them")
    folder, port = tmp_path_factory.mktemp("llama"), free_port()
    yield from serve([sys.executable, SUPPORT / "tiny_gguf.py", folder / "tiny.gguf", "--serve", port], port, folder, 60)


@pytest.fixture(scope="session")
def vllm(request, tmp_path_factory):
    """The URL of real vLLM with the model `glm-tiny` of support/tiny_glm.py."""
    yield from serve_vllm(request.config, tmp_path_factory)
