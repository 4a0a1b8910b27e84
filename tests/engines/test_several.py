"""Two real llama.cpp servers side by side: conversations find their prompts' beginnings in the cache again.

Ten conversations of ten turns with one system prompt, all at once. The share of prompt tokens that came from the cache, by the
engines' own figures, beside one engine's alone, and beside two engines that take turns.
"""
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from support import SUPPORT
from support.gateway import Patched
from support.processes import free_port
from support.real_engines import serve

CONVERSATIONS, TURNS = 10, 10
SLOTS = {"one": 10, "first": 7, "second": 7}         # a slot holds one conversation
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


def share(servers, names, folder, stock, patch=""):
    """(cached tokens / prompt tokens of all requests, the same of each conversation)."""
    config = "".join(f'[[engines]]\nurl = "{servers[name]}"\nslots = {SLOTS[name]}\n' for name in names)
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


def test_conversations_keep_their_cache(servers, tmp_path_factory, stock, capsys):
    single, each_single = share(servers, ["one"], tmp_path_factory.mktemp("run"), stock)
    two, each = share(servers, ["first", "second"], tmp_path_factory.mktemp("run"), stock)
    turns, _ = share(servers, ["first", "second"], tmp_path_factory.mktemp("run"), stock, TAKING_TURNS)
    with capsys.disabled():
        print(f"\ncached share: one engine {single:.3f}, two {two:.3f} ({two / single:.3f} of it), two that take turns {turns:.3f}; "
              f"the worst conversation {min(each_single):.3f}, {min(each):.3f}")
    assert two >= 0.95 * single
    assert two > turns
