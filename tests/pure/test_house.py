"""The house's rules: what is pure stays pure, arrows run one way, and the text reads as one hand's.

Each rule is one test, whose message lists every place that breaks it. `code` is what is counted against: lines that are
neither blank nor a comment.
"""
import ast
import re
from functools import cache

from support import ROOT

WIDTH, LINES, SHORT = 100, 45, 10                   # columns; lines of a function; lines that need no docstring
CONDITIONALS, TUPLES = 2, 1                         # at most, for each 100 lines of code

PRODUCT_NOT = ("tests", "bench", "node_modules", "build", "dist")
PURE_FILES = ["engines/kinds.py", "engines/pulse.py", "engines/signs.py", "engines/template.py", "engines/found.py", "stream.py", "admission/*.py", "counting.py", "reasoning.py", "people.py", "errors.py", "values.py", "steps.py", "mending/*.py", "dialects/**/*.py"]
ACTS = {"gevent", "socket", "ssl", "select", "selectors", "time", "threading", "subprocess", "asyncio", "requests",
        "urllib3", "random", "secrets"}
HEAVY = {"gevent", "requests", "urllib3", "gunicorn", "flask", "peewee"}
CLOCKS = {"monotonic", "time", "sleep", "now", "utcnow", "perf_counter"}

# `import x as y` where the other name says more than the own one, and why.
RENAMED = {}
# A product's name in a line of the product, and why it may stand there.
NAMED = {
    "No vLLM at hand?": "a word for people, on the start screen",
    '"SPARKS_VLLM_VENV"': "a variable that the tests read",
}


def sources():
    """The product's files: not the tests, nor what was installed or built here."""
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in PRODUCT_NOT
               and not folder.name.startswith((".", "_"))]
    return sorted([*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])


def module(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module(path): path for path in sources()}
TREES = {name: ast.parse(path.read_bytes(), str(path)) for name, path in FILES.items()}
PURE = {module(path) for pattern in PURE_FILES for path in ROOT.glob(pattern)}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def place(name, node):
    return f"{FILES[name].relative_to(ROOT)}:{node.lineno}"


NODES = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]


def nodes(*kinds):
    """(module, node) of all of the product."""
    return [(name, node) for name, node in NODES if isinstance(node, kinds)]


def shown(title, offenders):
    return "\n".join([f"{title}: {len(offenders)}", *map(str, offenders)])


# ---- who imports whom

@cache
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
    return imports(name) & TREES.keys()


def package(name):
    return name.partition(".")[0]


def reachable(name):
    """All that is loaded with a module: what it imports, and what that imports, as far as it is ours."""
    found, ahead = set(), [name]
    while ahead:
        for part in imports(ahead.pop()) - found:
            found.add(part)
            if part in TREES:
                ahead.append(part)
    return found


def test_pure_modules_are_there():
    assert {"stream", "admission.gate", "reasoning", "errors", "dialects", "dialects.chat"} <= PURE


def test_pure_modules_import_nothing_that_acts():
    offenders = [f"{name} imports {part}" for name in sorted(PURE) for part in imports(name) if package(part) in ACTS]
    assert not offenders, shown("pure modules take clocks, sockets and randomness as arguments", offenders)


def test_what_is_pure_brings_nothing_that_acts():
    """Also by way of others: no event loop, no HTTP, no database is loaded by loading all of it."""
    offenders = [f"{name} loads {part}" for name in sorted(PURE) for part in reachable(name) if package(part) in HEAVY]
    assert not offenders, shown("pure modules load", offenders)


def test_admission_and_stream_read_no_clock():
    """Their clock is passed in."""
    offenders = [f"{place(name, node)} .{node.attr}" for name, node in nodes(ast.Attribute)
                 if (name in ("stream", "engines.pulse") or room(name) == "admission") and node.attr in CLOCKS]
    assert not offenders, shown("a clock is read", offenders)


# What may import what of ours, room by room; a module at the top is a room of its own. Everything may read settings and
# errors, and its own room.
ARROWS = {
    "errors": set(),
    "settings": {"reasoning"},
    "reasoning": set(),
    "values": set(),
    "steps": {"values"},
    "mending": {"values", "steps", "engines.kinds"},
    "stream": {"mending", "values", "steps", "engines.kinds", "engines.failures"},
    "admission": set(),
    "counting": {"mending", "values", "steps"},
    "loop": set(),
    "tcp": set(),
    "log": set(),
    "monitor": set(),
    "pump": {"loop", "steps"},
    "watch": set(),
    "people": set(),
    "metrics": {"engines.health"},
    "store": set(),
    "engines": {"admission", "loop", "tcp", "counting", "steps", "reasoning", "values"},
    "engines.local": {"engines"},
    "keys": {"store", "admission", "reasoning", "log"},
    "faults": {"store"},
    "gateway": {"engines", "store", "people"},
    "call": {"admission", "faults", "gateway", "pump", "watch", "engines", "store", "counting", "loop", "people"},
    "answering": {"call", "faults", "pump", "engines", "loop", "steps"},
    "dialects": {"stream", "mending", "values", "steps", "reasoning", "engines.kinds"},
    "pages": {"reasoning", "front.routes"},
    "front": {"answering", "call", "faults", "pump", "dialects", "pages", "store", "values", "steps", "loop", "tcp", "log"},
    "sparks": {"front", "engines", "engines.local", "store", "gateway", "keys", "admission", "log", "metrics", "monitor", "people"},
}
FREE = {"errors", "settings"}
COMMAND = "sparks"                                  # what ./run.sh starts


def room(name):
    """engines.local is a room; of any other module the first part of its name is."""
    return "engines.local" if name.startswith("engines.local") else package(name)


def test_arrows():
    offenders = [f"{name} imports {part}" for name in TREES for part in own(name)
                 if not {part, room(part)} & {*ARROWS.get(room(name), ()), *FREE, room(name)}]
    assert not offenders, shown("arrows that ARROWS does not have", offenders)


def test_every_room_has_its_arrows():
    assert {room(name) for name in TREES} == ARROWS.keys()


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
    assert "call" in TREES and "dialects.chat" in TREES
    offenders = [f"{name} loads {part}" for name in TREES for part in reachable(name)
                 if "dialects" in (pair := {package(name), package(part)}) and pair & {"call", "answering", "gateway"}]
    assert not offenders, shown("call and dialects", offenders)


def test_nobody_imports_the_command():
    assert f'"$home/{COMMAND}.py"' in (ROOT / "run.sh").read_text() and COMMAND in TREES
    offenders = [name for name in TREES if COMMAND in imports(name)]
    assert not offenders, shown(f"{COMMAND} is a command, which acts when it is imported", offenders)


def test_engines_and_images_share_one_trust():
    """requests brings a store of its own, and reads proxies and ~/.netrc."""
    offenders = [f"{name} imports {part}" for name in TREES for part in imports(name) if package(part) in ("requests", "certifi")]
    assert not offenders, shown("another store of certificates", offenders)


# ---- the text itself

def code(path):
    lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    return sum(bool(line) and not line.startswith("#") for line in lines)


CODE = {name: code(path) for name, path in FILES.items()}


def assert_rare(found, most, what):
    """At most so many for each 100 lines of all the product's code; the message begins with the worst modules."""
    total = 100 * len(found) / sum(CODE.values())
    counts = {name: sum(other == name for other, _ in found) for name in TREES}
    worst = sorted(counts, key=lambda name: counts[name] - most * CODE[name] / 100, reverse=True)
    lines = [f"{FILES[name].relative_to(ROOT)}: {counts[name]} in {CODE[name]} lines of code" for name in worst[:15]
             if 100 * counts[name] > most * CODE[name]]
    assert total <= most, shown(f"{what}: {total:.2f} for each 100 lines of code, at most {most}. The worst modules", lines)


def test_conditional_expressions_are_rare():
    assert_rare(nodes(ast.IfExp), CONDITIONALS, "conditional expressions")


def test_assignments_of_tuples_are_rare():
    """`a, b = f()` is none: there is a tuple on both sides."""
    found = [(name, node) for name, node in nodes(ast.Assign) if isinstance(node.value, ast.Tuple)
             and any(isinstance(target, ast.Tuple) for target in node.targets)]
    assert_rare(found, TUPLES, "assignments of tuples")


def test_no_conditional_expression_inside_another():
    offenders = [place(name, node) for name, node in nodes(ast.IfExp)
                 if any(isinstance(part, ast.IfExp) for part in ast.walk(node) if part is not node)]
    assert not offenders, shown("nested conditional expressions", offenders)


def test_lines_are_not_wide():
    offenders = [f"{path.relative_to(ROOT)}:{number}" for path in FILES.values()
                 for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1) if len(line) > WIDTH]
    assert not offenders, shown(f"lines of more than {WIDTH} columns", offenders)


def test_functions_fit_on_a_page():
    offenders = [f"{place(name, node)} {node.name}" for name, node in nodes(*FUNCTIONS) if length(node) > LINES]
    assert not offenders, shown(f"functions of more than {LINES} lines", offenders)


def test_long_functions_have_a_docstring():
    offenders = [f"{place(name, node)} {node.name}" for name, node in nodes(*FUNCTIONS)
                 if length(node) > SHORT and not ast.get_docstring(node)]
    assert not offenders, shown(f"functions of more than {SHORT} lines without a docstring", offenders)


def length(function):
    return function.end_lineno - function.lineno + 1


def test_modules_say_what_they_are_about():
    offenders = [name for name, tree in TREES.items() if tree.body and not ast.get_docstring(tree)]
    assert not offenders, shown("modules without a docstring", offenders)


def test_no_method_is_chosen_by_a_computed_name():
    offenders = [place(name, node) for name, node in nodes(ast.Call) if is_call(node.func, "getattr")
                 and is_self(node.func.args[0]) and not isinstance(node.func.args[1], ast.Constant)]
    assert not offenders, shown("getattr(self, name)(...)", offenders)


def test_several_searches_are_a_loop():
    """`next(...) or next(...)` is one that must be read four times."""
    offenders = [place(name, node) for name, node in nodes(ast.BoolOp)
                 if sum(is_call(value, "next") for value in node.values) > 1]
    assert not offenders, shown("next(...) or next(...)", offenders)


def is_call(node, name):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def is_self(node):
    return isinstance(node, ast.Name) and node.id == "self"


def test_names_need_no_other_name():
    """`import x as y` only where RENAMED gives a reason; what is listed there and gone is to go, too."""
    found = set()
    for name, node in nodes(ast.Import, ast.ImportFrom):
        origin = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        found |= {f"{FILES[name].relative_to(ROOT)}: {origin}{alias.name} as {alias.asname}" for alias in node.names
                  if alias.asname}
    assert found == RENAMED.keys(), shown("import as, without a reason or with one for nothing",
                                          sorted(found ^ RENAMED.keys()))


def test_what_differs_between_engines_stands_in_one_place():
    """engines/kinds.py knows the kinds of engines, engines/local starts one of them; nobody else names them."""
    offenders = []
    for path in FILES.values():
        where = str(path.relative_to(ROOT))
        if where == "engines/kinds.py" or where.startswith("engines/local/"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if re.search("vllm|llama", line, re.I) and not any(words in line for words in NAMED):
                offenders.append(f"{where}:{number}: {line.strip()}")
    assert not offenders, shown("kinds of engines by name", offenders)


# ---- the tests

def test_test_modules_stand_alone():
    """What several share is in tests/support and in conftest.py; nobody edits sys.path, or imports a fixture."""
    rule = re.compile(r"^\s*(from|import) (test_|conftest\b|tests\.)|\bsys\.path\b|noqa: F401|noqa: F811", re.M)
    offenders = []
    for path in sorted((ROOT / "tests").glob("*/test_*.py")):
        if path.name != "test_house.py":
            offenders += [f"{path.relative_to(ROOT)}: {found[0].strip()}" for found in rule.finditer(path.read_text())]
    assert not offenders, shown("tests that lean on each other", offenders)


def test_pure_tests_start_nothing():
    offenders = []
    for path in sorted((ROOT / "tests/pure").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            offenders += [f"{path.relative_to(ROOT)}:{node.lineno} {name}" for name in names
                          if package(name) in {"subprocess", "socket", "threading", "gevent", "multiprocessing"}
                          or name in ("support.gateway", "support.processes", "support.node", "support.client")]
    assert not offenders, shown("tests/pure holds nothing but tables; tests/server and tests/clients start things", offenders)
