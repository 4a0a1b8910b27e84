"""bfcl-eval: what a model scores in calling functions is the same through the gateway, on three APIs, as at the engine.

The engine knows the suite's own answers, and gives a third of them wrong: all kinds of values and of calls go through, and
the scores tell whether they arrived.
"""
import json
import subprocess

import pytest

from support.engine import Json, completion
from support.plausible import text_of
from support.processes import clean_environment

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1800)]          # the installation counts too
# What is scored by its calls alone. Others want the internet, or a model that goes on by itself.
CATEGORIES = ["simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple", "live_parallel",
              "live_parallel_multiple"]
# Each API has its own program in the suite, which goes by the model's name.
CHAT, RESPONSES, MESSAGES = "openbmb/MiniCPM-SALA-FC", "gpt-4.1-mini-2025-04-14-FC", "claude-haiku-4-5-20251001-FC"


def answers_of(data):
    """What is asked -> (its number, the calls that answer it)."""
    found = {}
    for category in CATEGORIES:
        asked = rows(data / f"BFCL_v4_{category}.json")
        known = data / "possible_answer" / f"BFCL_v4_{category}.json"
        truths = {one["id"]: one["ground_truth"] for one in rows(known)} if known.exists() else {}
        for number, one in enumerate(asked):
            calls = [call for truth in truths.get(one["id"], []) for call in truth.items()]
            found[one["question"][0][-1]["content"]] = number, [(name, arguments_of(given)) for name, given in calls]
    return found


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def arguments_of(given):
    """Each argument's first value that counts as right; a table in a table is written like the arguments."""
    return {name: value_of(values[0]) for name, values in given.items() if values and values[0] != ""}


def value_of(value):
    if isinstance(value, list):
        return [value_of(one) for one in value]
    return arguments_of(value) if isinstance(value, dict) else value


def knowing(answers):
    def answer(request):
        ask = request.json()
        asked = [text_of(message) for message in ask["messages"] if message["role"] == "user"]
        number, calls = answers[asked[-1]]
        if number % 3 == 0:
            calls = [(name, {}) for name, _ in calls] or [(ask["tools"][0]["function"]["name"], {})]
        tools = [(name.replace(".", "_"), arguments) for name, arguments in calls]
        return [Json(completion(None if tools else "I can't.", tools=tools, model=ask["model"]))]
    return answer


def test_bfcl(suite, gateway, engine, judge, tmp_path):
    commands = suite("bfcl")
    data, = commands.parent.glob("lib/python*/site-packages/bfcl_eval/data")
    engine.always(knowing(answers_of(data)))
    engine.models[0]["id"] = CHAT
    front = gateway()
    direct, = scores(commands, tmp_path / "direct", engine.url, "none", [CHAT])
    right, of = (sum(figures) for figures in zip(*direct.values(), strict=True))
    assert len(direct) == len(CATEGORIES) and 0.5 < right / of < 0.9
    found = scores(commands, tmp_path / "gateway", front.url, front.key, [CHAT, RESPONSES, MESSAGES])
    for api, told in zip(["chat completions", "responses", "messages"], found, strict=True):
        unequal = {one: f"{told.get(one)}, but directly {figures}" for one, figures in direct.items() if told.get(one) != figures}
        judge(f"bfcl {api}", unequal, len(direct))


def scores(commands, folder, url, key, models):
    """For each model, category -> (how many calls are right, of how many)."""
    folder.mkdir()
    environment = {**clean_environment(), "BFCL_PROJECT_ROOT": str(folder), "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key,
                   "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
    for command in (["generate", "--num-threads", "4"], ["evaluate"]):
        line = [commands / "bfcl", *command, "--model", ",".join(models), "--test-category", ",".join(CATEGORIES)]
        done = subprocess.run(line, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    files = [sorted((folder / "score" / model.replace("/", "_")).rglob("*_score.json")) for model in models]
    return [{file.stem: (rows(file)[0]["correct_count"], rows(file)[0]["total_count"]) for file in own} for own in files]
