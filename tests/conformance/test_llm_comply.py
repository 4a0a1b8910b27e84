"""llm-comply: the answers of three APIs against their published schemas."""
import json
import subprocess

import pytest

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1800)]          # the installation counts too
# With these names, which reach the default model, the suite also tries reasoning.
FORMATS = {"openai-chat": "gpt-5", "open-responses": "gpt-5", "anthropic": "claude-sonnet-4"}


@pytest.mark.parametrize("form", FORMATS)
def test_llm_comply(suite, front, judge, form):
    line = [suite("llm-comply") / "llm-comply", "--base-url", f"{front.url}/v1", "--api-key", front.key,
            "--model", FORMATS[form], "--format", form, "--json"]
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    results = json.loads(done.stdout)["results"]
    failed = {case["id"]: case.get("errors") for case in results if case["status"] != "passed"}
    judge(f"llm-comply {form}", failed, len(results))
