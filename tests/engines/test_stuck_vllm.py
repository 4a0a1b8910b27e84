"""Real vLLM on the CPU that is stopped, killed and kept busy behind the real gateway: `./run.sh test --vllm`.

What is found out of scripted engines stands in tests/server/test_stuck.py.
"""
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.chat import PATH
from support.client import Client
from support.gateway import Gateway
from support.observe import gauge, gauges
from support.processes import children, wait_until
from support.real_engines import serve_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
STUCK_AFTER = 5
CONTEXT = 32768                                     # tokens, which is also all that its cache holds


@pytest.fixture(scope="module")
def engine(request, tmp_path_factory):
    """The URL of a vLLM that runs two requests at a time, in small steps."""
    yield from serve_vllm(request.config, tmp_path_factory, "--max-num-batched-tokens", 256, MAX_MODEL_LEN=str(CONTEXT),
                          MAX_NUM_SEQS="2", KV_CACHE_BYTES=str((CONTEXT + 512) * 1024))


@contextmanager
def before(engine, folder, stock, **settings):
    gateway = Gateway(folder, engine, stock, **{"poll": 5, "keepalive": 0.5, "max_active": 3, **settings})
    try:
        yield gateway.wait_alive().wait_ready()
    finally:
        gateway.stop()
    gateway.check_log()


def ask(text, **fields):
    return {"model": "glm-tiny", "messages": [{"role": "user", "content": text}], "stream": True, **fields}


class Stream(threading.Thread):
    """A stream that is read as it comes: its tokens' moments, and its last event, or its answer if that is an error."""

    def __init__(self, gateway, text, **fields):
        super().__init__(daemon=True)
        self.connection = gateway.client(timeout=400).open()
        self.connection.start("POST", PATH, ask(text, **fields))
        self.tokens, self.last, self.finish, self.over = [], None, None, None
        self.start()

    def run(self):
        answer = self.connection.answer()
        if answer.status != 200:
            self.last, self.over = answer, time.monotonic()
            return
        for event in answer.events():
            if event.comment is None:
                self.last = event
                self.tokens.append(time.monotonic())
                if '"finish_reason":"' in event.data.replace(": ", ":"):
                    self.finish = event.json()["choices"][0]["finish_reason"]
        self.over = time.monotonic()

    def end(self, seconds=60):
        self.join(seconds)
        assert not self.is_alive()
        return self


def pid_of(title):
    """The process of vLLM's, among this one's descendants, whose title begins so."""
    ahead = [os.getpid()]
    while ahead:
        for child in children(ahead.pop()):
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(title.encode()):
                return child
            ahead.append(child)
    raise AssertionError(f"there is no process {title}")


def stuck(gateway):
    return any(value for name, value in gauges(gateway).items() if 'state="stuck"' in name)


def figure(engine, name):
    lines = Client(engine).get("/metrics").read_all().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


def test_a_long_prefill_is_no_trouble(engine, stock, tmp_path):
    """Ten times as long as `stuck_after`, with one more prompt waiting behind it."""
    began = time.monotonic()
    whole = {"max_tokens": 1, "stream": False}
    assert Client(engine, timeout=400).post(PATH, ask("x" * 30_000, **whole)).status == 200
    took = time.monotonic() - began
    with before(engine, tmp_path, stock, stuck_after=max(took / 12, 0.2), answer_timeout=took / 4, stall_timeout=took / 4) as gateway:
        streams = [Stream(gateway, f"{n}" + "y" * 30_000, max_tokens=3) for n in range(2)]
        for stream in streams:
            assert stream.end(400).finish == "length" and stream.last.data == "[DONE]"
        print(f"a prefill of {took:.1f} s alone, stuck_after {took / 12:.1f} s;",
              f"two took {streams[1].over - began - took:.1f} s")
        assert " is stuck" not in gateway.log


def test_preempted_is_no_trouble(engine, stock, tmp_path):
    """The cache is full: one of two streams waits in its middle for longer than `stall_timeout`, and goes on."""
    before_that = figure(engine, "num_preemptions_total")
    with before(engine, tmp_path, stock, stuck_after=3, stall_timeout=3) as gateway:
        streams = [Stream(gateway, f"say @long {n}" + "z" * 15_900, max_tokens=2500, temperature=0) for n in range(2)]
        for stream in streams:
            assert stream.end(200).last.data == "[DONE]" and stream.finish == "length", (stream.last, stream.finish)
        gaps = [max(after - one for one, after in zip(stream.tokens, stream.tokens[1:], strict=False)) for stream in streams]
        print(f"preempted, longest gaps {gaps[0]:.1f} and {gaps[1]:.1f} s")
        assert figure(engine, "num_preemptions_total") > before_that and max(gaps) > 3
        assert " is stuck" not in gateway.log


@pytest.mark.parametrize("part", ["VLLM::EngineCore", "VLLM::Worker"])
def test_stopped(engine, stock, tmp_path, part):
    """Two streams run, one waits in the engine, one in the gateway: found out in time, then nobody waits; and back."""
    with before(engine, tmp_path, stock, stuck_after=STUCK_AFTER) as gateway:
        streams = [Stream(gateway, "say @long", max_tokens=20_000) for _ in range(3)]
        wait_until(lambda: sum(len(stream.tokens) > 5 for stream in streams) == 2, 20)
        streams.append(Stream(gateway, "say @long", max_tokens=20_000))
        wait_until(lambda: gauge(gateway, "sparks_queued") == 1 and figure(engine, "num_requests_waiting") == 1, 20)
        pid = pid_of(part)
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        try:
            while not stuck(gateway):
                assert time.monotonic() < stopped + STUCK_AFTER + 10
                time.sleep(0.05)
            found = time.monotonic()
            for stream in streams:
                stream.end(5)
            assert [stream.last.json()["error"]["code"] for stream in streams[:3]] == 3 * ["engine_stuck"]
            assert streams[3].last.json()["error"]["code"] == "model_unavailable"
            ended = max(stream.over for stream in streams)
            for streams_it in (True, False):
                at = time.monotonic()
                answer = gateway.client().post(PATH, ask("Hi", stream=streams_it))
                assert answer.status == 503 and answer.headers["retry-after"] and time.monotonic() - at < 1
            time.sleep(8)                           # canaries come and go
            assert stuck(gateway)
        finally:
            os.kill(pid, signal.SIGCONT)
        resumed = time.monotonic()
        while gateway.client(timeout=30).post(PATH, ask("say @answer")).status != 200:
            assert time.monotonic() < resumed + 10
            time.sleep(0.1)
        print(f"{part}: stuck after {found - stopped:.1f} s, all ended {ended - found:.2f} s later,",
              f"back {time.monotonic() - resumed:.1f} s after SIGCONT")
        assert ended - found < 1
        assert Stream(gateway, "say @answer").end().last.data == "[DONE]"


def test_killed(engine, stock, tmp_path):
    """The last one: the core is gone, and with it soon the server. Streams end with an error, and nobody waits."""
    with before(engine, tmp_path, stock, stuck_after=60) as gateway:
        streams = [Stream(gateway, "say @long", max_tokens=20_000) for _ in range(3)]
        wait_until(lambda: sum(len(stream.tokens) > 5 for stream in streams) == 2, 20)
        os.kill(pid_of("VLLM::EngineCore"), signal.SIGKILL)
        killed = time.monotonic()
        for stream in streams:
            assert stream.end(20).last.json()["error"]["code"] in ("upstream_error", "model_unavailable")
        ended = max(stream.over for stream in streams)
        answers = []
        for n in range(40):
            at = time.monotonic()
            answer = gateway.client().post(PATH, ask("Hi", stream=bool(n % 2)))
            answers.append((answer.status, round(time.monotonic() - at, 2)))
            assert time.monotonic() - at < 2
            time.sleep(0.05)
        print(f"killed: all ended {ended - killed:.2f} s later; then {answers[:4]}, {answers[-1]}")
        assert {status for status, _ in answers[-30:]} == {503}
