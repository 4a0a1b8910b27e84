"""/help's examples, read by the programs that they are for: node and bash. What is in them: tests/pure/test_help.py."""
import shutil
import subprocess

import pytest

from support.help_page import MODELS, NAMES, data, fences, page

some = pytest.mark.parametrize("models", [[model] if model else [] for model in MODELS], ids=NAMES)


@pytest.mark.skipif(not shutil.which("node"), reason="needs node")
@some
def test_javascript(models, tmp_path):
    for source in fences(page(models=models), "ts"):
        (tmp_path / "example.mjs").write_text(source, encoding="utf-8")
        subprocess.run(["node", "--check", tmp_path / "example.mjs"], check=True, capture_output=True)


@some
def test_shell(models):
    found = data(models=models)
    commands = [found["examples"][name] for name in ("chat", "stream", "tools", "messages")]
    for command in [*commands, found["harnesses"]["claude_code"]]:
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
