"""Conversations of several turns through the gateway beside somebody's long cold prompts, with the
gate that counts requests and the one that counts tokens, as NVIDIA's aiperf measures them.

    python -m bench.gate.turns ENGINE_URL MODEL AIPERF TOKENIZER

AIPERF is the program, from a virtual environment of its own; TOKENIZER a folder with the model's.
The texts suit the tiny model of tests/support/tiny_glm.py, where a byte is a token but for tags.
"""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from ..stage import CHAT, HOME, READY, answers, end, gateway_environment, keys

HEAVY = (0, 8000)  # heavy_prompt: off, and its default
CONVERSATIONS = 6
AT_ONCE = 3
TURNS = 6
OPENING = 10_000  # tokens of a conversation's first turn
RESULT = 400  # tokens of each later one, as of a tool's result
THINKING = 500  # milliseconds between two turns
ANSWER = 16  # tokens
FLAGS = ("--streaming", "--use-server-token-count", "--no-gpu-telemetry")
COLD = 18_000  # tokens of the prompts beside
JOBS = 2  # that send them, one after the other, with one key
WORDS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")  # a token each


def text(seed, tokens):
    """So many tokens, of about four bytes each as in a real model."""
    pick = random.Random(seed).choice
    return "".join(pick(WORDS) + pick("abcdefgh") + pick("klmnopqr") for _ in range(tokens // 3))


def write_conversations(file, name):
    """The input of aiperf; the answers in between are the model's own."""
    lines = []
    for number in range(CONVERSATIONS):
        turns = [{"text": text(f"{name} {number}", OPENING)}]
        for turn in range(1, TURNS):
            said = text(f"{name} {number} {turn}", RESULT)
            turns.append({"text": said, "delay": THINKING})
        lines.append(json.dumps({"session_id": f"{number}", "turns": turns}))
    file.write_text("\n".join(lines) + "\n")


@contextmanager
def gateway(folder, engine, heavy):
    """(address, a key of the people's, one of the jobs') of a gateway with that gate."""
    environment = gateway_environment(folder, 0)
    environment |= {
        "SPARKS_UPSTREAM": engine,
        "SPARKS_HEAVY_PROMPT": str(heavy),
        "SPARKS_MAX_ACTIVE": "8",
    }
    both = [json.loads(keys(environment, "add", name, "--json"))["key"] for name in ("team", "job")]
    url = f"http://{environment['SPARKS_BIND']}"
    with open(folder / "gateway.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "sparks.py"], cwd=HOME, env=environment, stdout=log, stderr=log
        )
    try:
        until = time.monotonic() + READY
        while not answers(f"{url}/v1/models", both[0]) and time.monotonic() < until:
            time.sleep(0.1)
        yield url, *both
    finally:
        end(process, 30)


class Job(threading.Thread):
    """Long cold prompts, one after the other, until `enough`."""

    def __init__(self, url, key, model, name, enough):
        super().__init__(daemon=True)
        self.url, self.key, self.model, self.name = url, key, model, name
        self.enough = enough
        self.done = 0
        self.start()

    def run(self):
        while not self.enough.is_set():
            said = {"role": "user", "content": text(f"{self.name} {self.done}", COLD)}
            body = {"model": self.model, "messages": [said], "max_tokens": ANSWER, "stream": True}
            request = urllib.request.Request(
                self.url + CHAT,
                json.dumps(body).encode(),
                {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
            )
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=600) as answer:
                self.done += b"[DONE]" in answer.read()


def command(aiperf, tokenizer, model, url, key, folder):
    """aiperf's command line; its figures go to a folder."""
    options = {
        "--model": model,
        "--url": url,
        "--api-key": key,
        "--endpoint-type": "chat",
        "--custom-dataset-type": "multi_turn",
        "--input-file": folder / "conversations.jsonl",
        "--tokenizer": tokenizer,
        "--concurrency": AT_ONCE,
        "--num-conversations": CONVERSATIONS,
        "--extra-inputs": f"max_tokens:{ANSWER}",
        "--artifact-dir": folder / "aiperf",
        "--ui-type": "none",
    }
    words = [word for pair in options.items() for word in pair]
    return [aiperf, "profile", *map(str, words), *FLAGS]


def play(engine, model, aiperf, tokenizer, heavy):
    """The figures of one run, by name."""
    with tempfile.TemporaryDirectory(prefix="sparks-turns-") as name:
        folder = Path(name)
        write_conversations(folder / "conversations.jsonl", name)
        with gateway(folder, engine, heavy) as (url, team, job):
            enough = threading.Event()
            jobs = [Job(url, job, model, f"{name} job {number}", enough) for number in range(JOBS)]
            began = time.monotonic()
            line = command(aiperf, tokenizer, model, url, team, folder)
            done = subprocess.run(
                line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            took = time.monotonic() - began
            cold = sum(job.done for job in jobs)
            enough.set()
            for each in jobs:
                each.join()
        file = folder / "aiperf" / "profile_export_aiperf.json"
        if not file.exists():
            sys.exit(f"aiperf has no figures:\n{done.stderr[-2000:]}")
        return figures(json.loads(file.read_text()), took, cold)


def figures(exported, seconds, cold):
    first = exported["time_to_first_token"]
    return {
        "turns": exported["request_count"]["avg"],
        "first token p50, s": first["p50"] / 1000,
        "first token p95, s": first["p95"] / 1000,
        "turn p95, s": exported["request_latency"]["p95"] / 1000,
        "turns a minute": exported["request_throughput"]["avg"] * 60,
        "tokens a second": exported["output_token_throughput"]["avg"],
        "cold prompts a minute": cold * 60 / seconds,
    }


def main(engine, model, aiperf, tokenizer):
    found = {heavy: play(engine, model, aiperf, tokenizer, heavy) for heavy in HEAVY}
    print(f"{'heavy_prompt':24}" + "".join(f"{heavy:>10}" for heavy in HEAVY))
    for name in found[HEAVY[0]]:
        print(f"{name:24}" + "".join(f"{found[heavy][name]:10.2f}" for heavy in HEAVY))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
