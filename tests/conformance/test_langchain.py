"""langchain-tests: what LangChain wants of every chat model, on three APIs."""
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.engine import MODELS
from support.processes import clean_environment

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1800)]          # the installation counts too
CASES = Path(__file__).with_name("langchain_models.py")


@pytest.mark.parametrize("name", ["Completions", "Responses", "Messages"])
def test_langchain(suite, front, judge, name, tmp_path):
    report = tmp_path / "report.xml"
    environment = {**clean_environment(), "SPARKS_URL": front.url, "SPARKS_KEY": front.key, "SPARKS_MODEL_ID": MODELS[0]["id"]}
    line = [suite("langchain") / "pytest", "-q", "-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider",
            "--asyncio-mode", "auto", "-o", "asyncio_default_test_loop_scope=session", "--junitxml", report, f"{CASES}::Test{name}"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert report.exists(), done.stdout + done.stderr
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    failed = {case.get("name"): fault.get("message") for case in cases for fault in case if fault.tag in ("failure", "error")}
    judge(f"langchain {name}", failed, len(cases))
