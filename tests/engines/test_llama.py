"""Real llama.cpp behind the real gateway."""
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from support import SUPPORT, responses
from support.chat import PATH, deltas
from support.client import Client
from support.gateway import Gateway, started
from support.observe import gauge
from support.processes import children, free_port, wait_until
from support.real_engines import serve

TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {
    "type": "object", "properties": {"zone": {"type": "string", "maxLength": 4}}, "required": ["zone"]}}}


@pytest.fixture(scope="module")
def front(llama, stock, tmp_path_factory):
    gateway = Gateway(tmp_path_factory.mktemp("front"), llama, stock, keepalive=0.2)
    gateway.wait_alive().wait_ready()
    yield gateway
    gateway.stop()
    gateway.check_log()


def ask(**fields):
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, **fields}


def busy(llama):
    """How many of the engine's slots are working, in its own words."""
    return sum(slot["is_processing"] for slot in Client(llama).get("/slots").json())


def test_model_and_its_context(front):
    model, = front.client().get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["context_length"] > 0


def test_plain(front):
    body = front.client().post(PATH, ask()).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 12


def test_stream_with_usage(front):
    answer = front.client().post(PATH, ask(stream=True, stream_options={"include_usage": True}))
    events = [event for event in answer.events() if event.comment is None]
    assert events[-1].data == "[DONE]" and events[-2].json()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("effort, thinks", [("none", False), ("high", True)])
def test_reasoning_effort_reaches_the_template(front, effort, thinks):
    found = deltas(front.client().post(PATH, ask(stream=True, reasoning_effort=effort)))
    assert any(delta.get("reasoning") for delta in found) is thinks
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in found)


def test_prompt_too_long(front):
    answer = front.client().post(PATH, ask(messages=[{"role": "user", "content": "x " * 20_000}]))
    assert answer.status == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_image_for_a_text_model(front):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    answer = front.client().post(PATH, ask(messages=[{"role": "user", "content": [image]}]))
    assert answer.status == 400 and "image" in answer.json()["error"]["message"]


def test_client_leaves(front, llama):
    """A stream: llama.cpp itself notices a leaver of a plain request only when it writes the answer."""
    connection = front.client().open()
    connection.start("POST", PATH, ask(stream=True, max_tokens=3500))
    wait_until(lambda: busy(llama) == 1, 5)
    connection.close()
    began = time.monotonic()
    wait_until(lambda: busy(llama) == 0, 5)
    assert time.monotonic() - began < 1


def test_client_leaves_the_queue(llama, stock, tmp_path):
    """One slot: who waits for it and leaves never reaches the engine."""
    front = Gateway(tmp_path, llama, stock, max_active=1, keepalive=0.2)
    try:
        front.wait_alive().wait_ready()
        first, second = front.client().open(), front.client().open()
        first.start("POST", PATH, ask(stream=True, max_tokens=3500))
        wait_until(lambda: busy(llama) == 1, 5)
        second.start("POST", PATH, ask(stream=True, max_tokens=3500))
        wait_until(lambda: gauge(front, "sparks_queued") == 1, 5)
        second.close()
        wait_until(lambda: gauge(front, "sparks_queued") == 0, 1)
        first.close()
        wait_until(lambda: busy(llama) == 0, 1)
    finally:
        front.stop()
    front.check_log()


@pytest.mark.parametrize("streams", [True, False])
def test_responses(front, streams):
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 12, "stream": streams,
            "reasoning": {"effort": "high", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    answer = front.client().post(responses.PATH, body)
    response = responses.said(answer)[-1]["response"] if streams else responses.whole(answer)
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 12)
    assert [item["status"] for item in response["output"]] == ["incomplete"] and response["output"][0]["summary"][0]["text"]


# ---- it is stopped

@pytest.fixture
def mortal(tmp_path):
    """The URL of a llama.cpp that nobody else uses."""
    port = free_port()
    yield from serve([sys.executable, SUPPORT / "tiny_gguf.py", tmp_path / "tiny.gguf", "--serve", port], port, tmp_path, 60)


def pid_of(url):
    """The process of the engine, a child of this one."""
    port = url.rpartition(":")[2].encode()
    return next(child for child in children(os.getpid()) if port in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[:-1])


def test_stopped(mortal, stock, tmp_path):
    """Three requests for its two slots are no trouble; then it is stopped, its server with it: found out, and back."""
    patch = "import engines.engine; engines.engine.PROGRESS_TIMEOUT = 0.5"
    with started(mortal, tmp_path, stock, patch, keepalive=0.2, stuck_after=1, max_active=3) as gateway:
        streams = [gateway.client().open() for _ in range(3)]
        for stream in streams:
            stream.start("POST", PATH, ask(stream=True, max_tokens=300))
        assert all(list(stream.answer().events())[-1].data == "[DONE]" for stream in streams)
        assert " is stuck" not in gateway.log
        stream = gateway.client().open()
        stream.start("POST", PATH, ask(stream=True, max_tokens=100_000))
        wait_until(lambda: busy(mortal), 5)
        os.kill(pid_of(mortal), signal.SIGSTOP)
        try:
            last = list(stream.answer().events())[-1].json()
        finally:
            os.kill(pid_of(mortal), signal.SIGCONT)
        assert last["error"]["code"] == "engine_stuck"
        wait_until(lambda: gateway.client().post(PATH, ask()).status == 200, 10)
