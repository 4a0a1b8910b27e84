"""bfcl-eval: what a model scores in calling functions is the same through the gateway as at the engine itself.

The engine knows the suite's own answers, and gives a third of them wrong: every kind of value and of call goes through, and
the scores tell whether it arrived.
"""
import csv
import json
import re
import subprocess
from functools import partial

import pytest

from support.engine import Json, completion
from support.processes import clean_environment

pytestmark = pytest.mark.conformance
# What is scored by the calls alone. The others need the internet, or a model that goes on by itself.
CATEGORIES = ["simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple", "live_multiple",
              "live_parallel", "live_parallel_multiple"]
# The suite asks through chat completions, Responses and Messages, by the handlers of these models.
MODELS = {"chat completions": "grok-4-0709-FC"}


def questions(data):
    """What is asked -> the calls that answer it, (name, arguments) each."""
    found = {}
    for category in CATEGORIES:
        lines = (data / f"BFCL_v4_{category}.json").read_text().splitlines()
        answers = data / "possible_answer" / f"BFCL_v4_{category}.json"
        truths = {}
        if answers.exists():
            truths = {one["id"]: one["ground_truth"] for one in map(json.loads, answers.read_text().splitlines())}
        for number, one in enumerate(map(json.loads, lines)):
            asked = one["question"][0][-1]["content"]
            found[asked] = number, [call for truth in truths.get(one["id"], []) for call in truth.items()]
    return found
