"""Two real engines side by side: conversations find their prompts' beginnings in the cache again, and one of the two is killed.

Ten conversations of ten turns with one system prompt, all at once; fewer without `./run.sh test --soak`. The share of prompt tokens that came from the cache, by the
engines' own figures, beside one engine's alone, and beside two engines that take turns.
"""
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support import SUPPORT
from support.gateway import Gateway, Patched
from support.observe import gauge
from support.processes import (
    answers,
    children,
    clean_environment,
    free_port,
    kill,
    spawn,
    wait_until,
)
from support.real_engines import serve, serve_vllm
from support.rows import row_of

CONVERSATIONS, TURNS = (10, 10) if os.environ.get("SPARKS_SOAK") else (5, 6)
SLOTS = {"one": CONVERSATIONS, "first": CONVERSATIONS * 7 // 10, "second": CONVERSATIONS * 7 // 10}   # a slot holds one conversation
SYSTEM = "You are a helpful assistant who answers in a few words and never asks back. " * 6
TAKING_TURNS = "from engines.homes import Homes; Homes.find = lambda *_: None"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """{name: URL} of servers with so many slots; a byte is a token of theirs."""
    with ExitStack() as stack:
        urls = {}
        for name, slots in SLOTS.items():
            folder, port = tmp_path_factory.mktemp(name), free_port()
            command = [sys.executable, SUPPORT / "tiny_gguf.py", folder / "tiny.gguf", "--serve", port, "--slots", slots]
            urls[name] = stack.enter_context(contextmanager(serve)(command, port, folder, 60))
        yield urls


def share(engines, folder, stock, patch=""):
    """(cached tokens / prompt tokens of all requests, the same of each conversation). `engines`: {URL: slots}."""
    config = "".join(f'[[engines]]\nurl = "{url}"\nslots = {slots}\n' for url, slots in engines.items())
    gateway = Patched(folder, None, stock, patch, config=config, log="json")
    try:
        gateway.wait_alive().wait_ready()
        with ThreadPoolExecutor(CONVERSATIONS) as pool:
            usages = list(pool.map(lambda n: converse(gateway, folder.name, n), range(CONVERSATIONS)))
        gateway.stop()
        gateway.check_log()
    finally:
        gateway.kill()
    each = [sum(cached for _, cached in usage) / sum(prompt for prompt, _ in usage) for usage in usages]
    flat = [figures for usage in usages for figures in usage]
    return sum(cached for _, cached in flat) / sum(prompt for prompt, _ in flat), each


def converse(gateway, run, number):
    """[(prompt tokens, cached ones)] of each turn."""
    turns, figures = [{"role": "system", "content": f"{run}: {SYSTEM}"}], []
    for turn in range(TURNS):
        turns.append({"role": "user", "content": f"Conversation {number}, question {turn}: " + "why is that so? " * 6})
        answer = gateway.client(timeout=60).post("/v1/chat/completions", {"messages": turns, "max_tokens": 16, "seed": number})
        assert answer.status == 200
        said = answer.json()
        turns.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
        figures.append((said["usage"]["prompt_tokens"], said["usage"]["prompt_tokens_details"]["cached_tokens"]))
    return figures


def test_one_of_two_is_killed(tmp_path_factory, stock):
    """Streams that had begun there end with an error event, the others are whole, and the other engine answers what had not
    begun, and what is new."""
    urls, processes = [], []
    for name in ("stays", "goes"):
        folder, port = tmp_path_factory.mktemp(name), free_port()
        command = [sys.executable, SUPPORT / "tiny_gguf.py", folder / "tiny.gguf", "--serve", port, "--slots", 4]
        processes.append(spawn(command, folder / "server.log", clean_environment()))
        urls.append(f"http://127.0.0.1:{port}")
    gateway = Gateway(tmp_path_factory.mktemp("killed"), None, stock, "".join(f'[[engines]]\nurl = "{url}"\nslots = 8\n' for url in urls))
    try:
        for url in urls:
            wait_until(lambda url=url: answers(f"{url}/health"), 60)
        gateway.wait_alive()
        wait_until(lambda: gauge(gateway, "sparks_slots") == 16, 10)
        answers_of = [begin(gateway, number) for number in range(8)]
        os.kill(processes[1].pid, signal.SIGSTOP)   # it answers nothing of what it gets from here on
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(begin, gateway, number, 8, number % 4 < 2) for number in range(20, 28)]
            wait_until(lambda: gauge(gateway, "sparks_active") == 16, 10)
            kill(processes[1])
            for answer in waiting:
                assert b'"error"' not in answer.result().read_all()
                assert row_of(gateway.db, answer.result().headers["x-request-id"])["engine"] == urls[0]
        later = [begin(gateway, number, 8) for number in range(8, 12)]
        ends = [list(answer.events())[-1] for answer in answers_of + later]
        broken = [number for number, end in enumerate(ends) if end.data != "[DONE]"]
        assert len(broken) == 4 and max(broken) < 8 and {ends[number].json()["error"]["code"] for number in broken} == {"upstream_error"}
        engines = [row_of(gateway.db, answer.headers["x-request-id"])["engine"] for answer in answers_of + later]
        assert [number for number, url in enumerate(engines) if url == urls[1]] == broken
        gateway.stop()
        gateway.check_log()
    finally:
        gateway.kill()
        for process in processes:
            kill(process)


def begin(gateway, number, tokens=1500, stream=True, more=""):
    """A stream whose first token is there, or a whole answer."""
    answer = gateway.client(timeout=60).post("/v1/chat/completions", {
        "messages": [{"role": "user", "content": f"Number {number}{more}"}], "max_tokens": tokens, "ignore_eos": True, "stream": stream})
    assert answer.status == 200
    return answer


def check_shares(one, two, tmp_path_factory, stock, capsys):
    """The shares at one engine, at two, and at two that take turns; each is {URL: slots}."""
    single, each_single = share(one, tmp_path_factory.mktemp("run"), stock)
    both, each = share(two, tmp_path_factory.mktemp("run"), stock)
    turns, _ = share(two, tmp_path_factory.mktemp("run"), stock, TAKING_TURNS)
    with capsys.disabled():
        print(f"\ncached share: one engine {single:.3f}, two {both:.3f} ({both / single:.3f} of it), two that take turns {turns:.3f}; "
              f"the worst conversation {min(each_single):.3f}, {min(each):.3f}")
    assert both >= 0.95 * single
    assert both > turns


def test_conversations_keep_their_cache(servers, tmp_path_factory, stock, capsys):
    one, two = ({servers[name]: SLOTS[name] for name in names} for names in (["one"], ["first", "second"]))
    check_shares(one, two, tmp_path_factory, stock, capsys)


# ---- vLLM

@pytest.fixture(scope="module")
def vllms(request, tmp_path_factory):
    """The URLs of two real vLLM."""
    with ExitStack() as stack:
        yield [stack.enter_context(contextmanager(serve_vllm)(request.config, tmp_path_factory)) for _ in range(2)]


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_conversations_keep_their_cache(vllms, tmp_path_factory, stock, capsys):
    check_shares({vllms[0]: CONVERSATIONS}, dict.fromkeys(vllms, SLOTS["first"]), tmp_path_factory, stock, capsys)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_one_of_two_vllm_is_killed(vllms, tmp_path, stock):
    """While two streams of it have begun, and others are in their prefill or wait inside of it: these the other one answers."""
    front = Gateway(tmp_path, None, stock, "".join(f'[[engines]]\nurl = "{url}"\nslots = 6\n' for url in vllms))
    try:
        front.wait_alive().wait_ready()
        wait_until(lambda: gauge(front, "sparks_slots") == 12, 10)
        begun = [begin(front, number, 1500) for number in range(4)]
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(begin, front, number, 8, number % 4 < 2, " word" * 500) for number in range(20, 24)]
            wait_until(lambda: gauge(front, "sparks_active") == 8, 10)
            kill_server(vllms[1])
            for answer in waiting:
                assert b'"error"' not in answer.result().read_all()
        rows = [row_of(front.db, answer.result().headers["x-request-id"]) for answer in waiting]
        assert {row["status"] for row in rows} == {200} and {row["engine"] for row in rows} == {vllms[0]}
        ends = [list(answer.events())[-1] for answer in begun]
        broken = [end.json()["error"]["code"] for end in ends if end.data != "[DONE]"]
        assert broken == ["upstream_error"] * 2
        front.stop()
        front.check_log()
    finally:
        front.kill()


def kill_server(url):
    """SIGKILL for all of an engine that `serve` has started."""
    port = url.rpartition(":")[2]
    found = [pid for pid in children(os.getpid()) if port in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
    os.killpg(found[0], signal.SIGKILL)
