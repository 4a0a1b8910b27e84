"""README and the other pages against the code: routes, commands, variables, files and snippets.

The programs that README's examples are for read them in tests/clients/test_examples.py.
"""
import ast
import json
import re
import shlex
import tomllib

import click
import pytest

import keys
from front.routes import ROUTES
from settings import NO_SETTINGS, SETTINGS
from support import ROOT
from support.readme import blocks, commands

README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT = (ROOT / "run.sh").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md"), *ROOT.glob("tests/support/**/README.md")])
PAGES = [page for page in PAGES if "node_modules" not in page.parts]


def test_endpoints():
    table = README.split("## Endpoints\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [route for cell in cells for route in re.findall(r"`(\w+ /\S*)`", cell)]
    assert sorted(listed) == sorted(f"{route.method} {route.path}" for route in ROUTES)


# ---- commands

def choices(start):
    """What a `case` of run.sh takes: the words in front of each `)`."""
    lines = SCRIPT.split(start)[1].split("esac")[0].splitlines()
    found = [match[1] for line in lines if (match := re.match(r" +([^\s()*][^()]*|\"\")\) ", line))]
    return {word.strip(' "') for words in found for word in words.split("|")}


def test_commands_of_run_sh():
    ways, tests = choices("\ncase ${1-} in"), choices("  case ${1-} in")
    assert {"keys", "reload", "lint", "--help"} <= ways and {"--vllm", "pure"} <= tests
    unknown = [words for words in commands(README) if words[0] not in ways]
    unknown += [words for words in commands(README) if words[0] == "test" and len(words) > 1 and words[1] not in tests]
    assert not unknown


def test_run_sh_tells_its_commands():
    text = SCRIPT.split("<<'END'")[1].split("\nEND\n")[0]
    assert choices("\ncase ${1-} in") - {"-h"} == {words[0] for words in commands(text)}
    assert not [word for word in choices("  case ${1-} in") if word not in text]


@pytest.mark.parametrize("words", [words[1:] for words in commands(README) if words[0] == "keys"], ids=" ".join)
def test_commands_of_keys(words):
    name, *rest = words
    with click.Context(keys.cli) as context:
        keys.cli.get_command(context, name).make_context(name, rest, parent=context).close()


def test_sub_commands_named_in_passing():
    named = re.findall(r"`keys (\w+)", README)
    assert named and set(named) <= set(keys.cli.list_commands(click.Context(keys.cli)))


def test_ci_runs_what_readme_says():
    run = commands((ROOT / ".ci/run").read_text())
    assert run == [("lint",), ("test",)] and set(run) <= set(commands(README))


# ---- variables and files

@pytest.mark.parametrize("page", [*PAGES, ROOT / "run.sh", ROOT / "sparks.example.toml"], ids=lambda page: page.name)
def test_variables(page):
    named = set(re.findall(r"\bSPARKS_[A-Z_]*[A-Z]\b(?!_)", page.read_text(encoding="utf-8")))
    assert named <= {setting.variable for setting in SETTINGS} | NO_SETTINGS | OTHERS


# What is no setting: of an example's base URL, of the tests, and what `on_stuck` is told.
OTHERS = {"SPARKS_BASE_URL", "SPARKS_SOAK", "SPARKS_ENGINE"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files(page):
    """Files that a page links to, and those of tests, docs and bench that it names; DATE.json is none."""
    text = page.read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    named = re.findall(r"`((?:tests|docs|bench)/[\w./-]+\.\w+)`", text)
    missing = [name for name in linked if not (page.parent / name).exists()]
    missing += [name for name in named if not (ROOT / name).exists() and not re.search(r"/[A-Z]+\.", name)]
    assert not missing


# ---- snippets

def test_toml():
    found = [tomllib.loads(block) for block in blocks(README) if re.match(r"\w+ = |\[", block)
             and not block.startswith("client = ")]
    assert [example["model_provider"] for example in found] == ["sparks"]
    assert found[0]["model_providers"]["sparks"]["wire_api"] == "responses"


def test_python():
    lines = [line for block in blocks(README) for line in block.splitlines() if line.startswith("client = ")]
    call, = [ast.parse(line).body[0].value for line in lines]
    assert ast.unparse(call.func) == "anthropic.Anthropic"
    assert {keyword.arg for keyword in call.keywords} == {"base_url", "api_key"}


def test_curl():
    block, = [block for block in blocks(README) if block.startswith("$ curl")]
    command, answer = re.fullmatch(r"\$ (.*?')\n(\{.*\})\n", block, re.S).groups()
    words = shlex.split(command)
    assert json.loads(words[-1])["messages"] and words[2].endswith("/v1/chat/completions")
    assert json.loads(re.sub(r"\{…\}", "{}", answer))["choices"][0]["finish_reason"] == "stop"
