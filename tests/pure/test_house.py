"""The house's rules: what is pure stays pure, arrows run one way, functions fit on a page."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PURE = ["stream", "admission", "reasoning", "errors",
        *sorted(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                for path in (ROOT / "dialects").rglob("*.py"))]
NOT_PURE = {"gevent", "socket", "ssl", "select", "selectors", "time", "threading", "subprocess", "asyncio", "requests",
            "urllib3", "random", "secrets"}
EFFECTS = {"gevent", "requests", "urllib3", "gunicorn", "flask", "peewee"}
LINES = 45
LONGER = {}                                         # function -> its lines, where there is a reason


def sources():
    """Our modules: not the tests, nor what was installed or built here."""
    others = ("tests", "node_modules", "build", "dist")
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in others
               and not folder.name.startswith((".", "_"))]
    return sorted([*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])


SOURCES = sources()
TESTS = sorted((ROOT / "tests").rglob("*.py"))


def module(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {module(path): ast.parse(path.read_bytes(), str(path)) for path in SOURCES}


def imports(name):
    """The modules that a module's own statements import, wherever they stand."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in TREES else node.module
                      for alias in node.names}
    return found


def own(name):
    """Those of them that are ours."""
    return {part for part in imports(name) if part in TREES}


def package(name):
    return name.partition(".")[0]


# ---- purity

@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_nothing_that_acts(name):
    assert not {package(part) for part in imports(name)} & NOT_PURE


def test_what_is_pure_brings_nothing_that_acts():
    """Also by way of others: no event loop, no HTTP, no database is loaded by loading all of it."""
    code = f"import sys, {', '.join(PURE)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
                          timeout=30)
    assert not {package(name) for name in done.stdout.split()} & EFFECTS


def test_admission_and_stream_read_no_clock():
    """Their clock is passed in."""
    for name in ("stream", "admission"):
        attributes = {node.attr for node in ast.walk(TREES[name]) if isinstance(node, ast.Attribute)}
        assert not attributes & {"monotonic", "time", "sleep", "now", "utcnow", "perf_counter"}


# ---- arrows

# What may import what of ours, room by room; a module at the top is a room of its own. Everything may read settings and
# errors, and its own room.
ARROWS = {
    "errors": set(),
    "settings": {"reasoning"},
    "reasoning": set(),
    "stream": {"engines.kinds", "engines.failures"},
    "admission": set(),
    "loop": set(),
    "tcp": set(),
    "log": set(),
    "pump": set(),
    "metrics": set(),
    "store": set(),
    "engines": {"loop", "tcp"},
    "engines.local": {"engines"},
    "keys": {"store", "admission", "reasoning"},
    "call": {"pump", "engines", "admission", "store", "stream"},
    "dialects": {"stream", "reasoning", "engines.kinds"},
    "pages": {"reasoning", "front.routes"},
    "front": {"call", "dialects", "pages", "store", "stream", "loop", "tcp"},
    "sparks": {"front", "engines", "engines.local", "store", "call", "keys", "admission", "log", "metrics"},
}
FREE = ("errors", "settings")


def room(name):
    """engines.local is a room; of any other module the first part of its name is."""
    return "engines.local" if name.startswith("engines.local") else package(name)


@pytest.mark.parametrize("name", TREES)
def test_arrows(name):
    allowed = ARROWS.get(room(name))
    if allowed is not None:
        strange = [part for part in own(name) if not {part, room(part)} & {*allowed, *FREE, room(name)}]
        assert not strange


def test_no_circles():
    done, path = set(), []

    def visit(name):
        assert name not in path, " → ".join([*path, name])
        if name not in done:
            path.append(name)
            for part in sorted(own(name)):
                visit(part)
            done.add(path.pop())

    for name in TREES:
        visit(name)


def test_call_and_dialects_do_not_know_each_other():
    assert not [part for part in own("call") if package(part) == "dialects"]
    assert not [name for name in TREES if package(name) == "dialects" and "call" in own(name)]


def test_nobody_imports_the_app():
    assert not [name for name in TREES if "sparks" in own(name)]


# ---- the text itself

@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_compiles_on_the_oldest_python(path):
    ast.parse(path.read_bytes(), str(path), feature_version=(3, 11))


def test_functions_fit_on_a_page():
    long = {f"{name}.{node.name}": node.end_lineno - node.lineno + 1 for name,
            tree in TREES.items() for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno - node.lineno >= LINES}
    assert long == LONGER


@pytest.mark.parametrize("name", TREES)
def test_modules_say_what_they_are_about(name):
    assert ast.get_docstring(TREES[name]) or not TREES[name].body


# ---- kinds of engines

# The modules that may name an engine's maker, and how many lines of words for people others have.
MAKERS = ("engines/kinds.py", "engines/local/")
NAMING = {
    "front/screen.py": 1,                           # the start screen: how to start one
    "settings.py": 1,                               # SPARKS_VLLM_VENV, which the tests read
}


def test_what_differs_between_engines_stands_in_one_place():
    """So that a new kind of engine is a class in engines/kinds.py, and nothing else."""
    found = {}
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        lines = [line for line in path.read_text().splitlines() if re.search("vllm|llama", line, re.IGNORECASE)]
        if len(lines) > NAMING.get(name, 0) and not name.startswith((*MAKERS, "bench/")):
            found[name] = lines
    assert found == {}


def test_engines_and_images_share_one_trust():
    """requests brings a store of its own, and reads proxies and ~/.netrc."""
    assert not [name for name in TREES if {package(part or "") for part in imports(name)} & {"requests", "certifi"}]
