"""The examples of /help and of README, read by the programs that they are for: node and bash.

What is in them: tests/pure/test_help.py, tests/pure/test_readme.py.
"""
import re
import shutil
import subprocess

import pytest

from support import ROOT
from support.help_page import MODELS, NAMES, data, fences, page
from support.readme import blocks

needs_node = pytest.mark.skipif(not shutil.which("node"), reason="needs node")
some = pytest.mark.parametrize("models", [[model] if model else [] for model in MODELS], ids=NAMES)


def check_javascript(source, folder):
    (folder / "example.mjs").write_text(source, encoding="utf-8")
    subprocess.run(["node", "--check", folder / "example.mjs"], check=True, capture_output=True)


def check_shell(command):
    subprocess.run(["bash", "-n"], input=command, text=True, check=True, capture_output=True)


@needs_node
@some
def test_help_s_javascript(models, tmp_path):
    for source in fences(page(models=models), "ts"):
        check_javascript(source, tmp_path)


@some
def test_help_s_shell(models):
    found = data(models=models)
    for command in [*(found["examples"][name] for name in ("chat", "stream", "tools", "messages")), found["harnesses"]["claude_code"]]:
        check_shell(command)


@needs_node
def test_readme_s_javascript(tmp_path):
    text = "\n".join(blocks((ROOT / "README.md").read_text(encoding="utf-8")))
    found = re.findall(r"^const .*", text, re.M)
    assert found
    check_javascript("\n".join(found), tmp_path)


def test_readme_s_shell():
    found = [block for block in blocks((ROOT / "README.md").read_text(encoding="utf-8"))
             if re.match(r"(\./run\.sh|\$ curl|vllm|export|SPARKS_)", block)]
    assert len(found) >= 6
    for block in found:
        check_shell(re.split(r"\n\n|\n\{", block.removeprefix("$ "))[0])
