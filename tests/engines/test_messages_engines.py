"""The same conversations through an engine's own /v1/messages and through ours. docs/messages.md says why ours differs."""
import json

import pytest

from support.client import Client
from support.gateway import Gateway
from support.messages import THINK, assistant, result, text, transcript, use, user

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL = {"name": "get_weather", "description": "w", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
HISTORY = [user("weather"), assistant({"type": "thinking", "thinking": "r1", "signature": ""}, text("ok"),
                                      use("t1", "get_weather", {"city": "Paris"})),
           user(result("t1", "21C"))]


def fronted(engine, stock, folder):
    """A gateway before a real engine."""
    gateway = Gateway(folder, engine, stock)
    gateway.wait_alive().wait_ready()
    yield gateway
    gateway.stop()
    gateway.check_log()


def both(engine, gateway, path=PATH, **fields):
    """(the engine's own answer, ours) to one request."""
    return [client.post(path, fields) for client in (Client(engine, timeout=60), gateway.client(timeout=60))]


def blocks_of(answer):
    """An answer's blocks without what no two answers share, or what vLLM leaves out."""
    apart = ("id", "signature", "citations", "caller")
    return [{name: value for name, value in block.items() if name not in apart} for block in answer.json()["content"]]


# ---- llama.cpp

@pytest.fixture(scope="module")
def llama_front(llama, stock, tmp_path_factory):
    yield from fronted(llama, stock, tmp_path_factory.mktemp("front"))


def tiny(*messages, **fields):
    return {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": list(messages) or [user("Hello")], **fields}


@pytest.mark.parametrize("fields", [tiny(), tiny(user("a"), assistant(text("b")), user(text("c"), text("d"))),
                                    tiny(system="Be brief.")])
def test_llama_says_the_same(llama, llama_front, fields):
    theirs, ours = both(llama, llama_front, **fields)
    assert "".join(block.get("text", "") for block in blocks_of(ours)) == "".join(block.get("text",
        "") for block in blocks_of(theirs))
    sums = [sum(value for name, value in answer.json()["usage"].items() if "input" in name) for answer in (theirs, ours)]
    assert sums[0] == sums[1] and theirs.json()["stop_reason"] == ours.json()["stop_reason"]
    stream = llama_front.client(timeout=60).post(PATH, {**fields, "stream": True})
    found = transcript(stream.read_all())
    assert found[0] == ("start", sums[1]) and found[-1] == ("end",)
    assert llama_front.client().post(COUNT, fields).json() == {"input_tokens": sums[1]}


def test_llama_differs(llama, llama_front):
    theirs, ours = both(llama, llama_front, model="tiny", max_tokens=5)         # no messages: a fault of the client's
    assert (theirs.status, ours.status) == (500, 400)
    assert "type" not in theirs.json() and ours.json()["error"]["message"] == "messages: Field required"
    theirs, ours = both(llama, llama_front, **tiny(user({"type": "document", "source": {}})))
    assert ours.status == 400 and "document" in ours.json()["error"]["message"]
    theirs, ours = both(llama, llama_front, **tiny(model="claude-x"))
    assert (theirs.json()["model"], ours.json()["model"]) == ("tiny", "claude-x")


# ---- vLLM

@pytest.fixture(scope="module")
def vllm_front(vllm, stock, tmp_path_factory):
    yield from fronted(vllm, stock, tmp_path_factory.mktemp("front"))


def glm(*messages, **fields):
    return {"model": "glm-tiny", "max_tokens": 2000, "messages": list(messages), **fields}


real = pytest.mark.vllm
SAME = {
    "text": glm(user("say @answer"), **THINK), "short": glm(user("hi @short"), **THINK),
        "cut characters": glm(user("say @utf"), **THINK),
    "a call": glm(user("weather"), tools=[TOOL], **THINK), "two calls": glm(user("say @tool2"), tools=[TOOL], **THINK),
    "any": glm(user("weather"), tools=[TOOL], tool_choice={"type": "any"}, **THINK),
    "named": glm(user("weather"), tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"}, **THINK),
    "a result": glm(*HISTORY, tools=[TOOL], **THINK), "a stop sequence": glm(user("hi @short"), stop_sequences=["indeed"],
        **THINK),
    "thinking off": glm(user("hi @short"), thinking={"type": "disabled"}),
}


@real
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SAME)
def test_vllm_says_the_same(vllm, vllm_front, name):
    theirs, ours = both(vllm, vllm_front, **SAME[name])
    assert blocks_of(ours) == blocks_of(theirs)
    for part in ("stop_reason", "stop_sequence"):
        assert ours.json()[part] == theirs.json().get(part)
    found = transcript(vllm_front.client(timeout=60).post(PATH, {**SAME[name], "stream": True}).read_all())
    usage = ours.json()["usage"]
    assert found[0] == ("start", sum(value for part, value in usage.items() if "input" in part)) and found[-1] == ("end",)
    kinds = [line[1] for line in found if line[1:2] in (("text",), ("thinking",), ("tool_use",))]
    assert kinds == [block["type"] for block in blocks_of(ours)] and "cache_read_input_tokens" in usage


@real
@pytest.mark.timeout(600)
@pytest.mark.parametrize("thinking", [{}, THINK, {"thinking": {"type": "adaptive"}}])
def test_vllm_counts_what_it_reads(vllm, vllm_front, thinking):
    body = glm(*HISTORY, tools=[TOOL], system="Be brief.", **thinking)
    counted = vllm_front.client().post(COUNT, body).json()["input_tokens"]
    usage = vllm_front.client(timeout=60).post(PATH, body).json()["usage"]
    assert counted == sum(value for part, value in usage.items() if "input" in part)


@real
@pytest.mark.timeout(600)
def test_vllm_differs(vllm, vllm_front):
    theirs, ours = both(vllm, vllm_front, **glm(user("hi @short")))             # thinking is asked for, or there is none
    assert [block["type"] for block in blocks_of(theirs)] == ["thinking",
                                                              "text"] and [block["type"] for block in blocks_of(ours)] == ["text"]
    theirs, ours = both(vllm, vllm_front, **glm(user("hi @short"), max_tokens=128_000))         # as Claude Code asks
    assert (theirs.status, ours.status) == (400, 200)
    theirs, ours = both(vllm, vllm_front, **glm(user("x" * 40_000)))
    assert theirs.json()["error"]["type"] == "BadRequestError"
    assert ours.json()["error"] == {"type": "invalid_request_error",
                                    "message": "prompt is too long: 32769 tokens > 32768 maximum"}
    theirs, ours = both(vllm, vllm_front, model="glm-tiny", messages=[user("hi")])
    assert "type" not in theirs.json() and ours.json()["error"]["message"] == "max_tokens: Field required"
    theirs, ours = both(vllm, vllm_front, **glm(user("hi @short"), model="claude-x"))
    assert (theirs.status, ours.json()["model"]) == (404, "claude-x")
    theirs, ours = both(vllm, vllm_front, path=COUNT, **glm(user("hi"), thinking={"type": "adaptive"}))
    assert theirs.json()["input_tokens"] < ours.json()["input_tokens"]          # it tells the template no effort


@real
@pytest.mark.timeout(600)
def test_vllm_sessions_share_their_prefix(vllm, vllm_front):
    """Two sessions with another billing line each, and one that went on: all but the new is in the cache."""
    def usage(*messages, billing):
        system = [text(f"x-anthropic-billing-header: cch={billing};"), text("You are a careful assistant. " * 40)]
        return vllm_front.client(timeout=60).post(PATH, glm(*messages, system=system, tools=[TOOL])).json()["usage"]
    first = usage(user("one @short"), billing="36ee5")
    second = usage(user("two @short"), billing="0aaa9")
    longer = usage(user("two @short"), assistant(text("Yes indeed")), {"role": "system", "content": "note"},
                   user("three @short"), billing="ffff1")
    print("\n", json.dumps([first, second, longer]))
    for found in (second, longer):
        total = sum(value for part, value in found.items() if "input" in part)
        assert found["cache_read_input_tokens"] >= 1152 and total - found["cache_read_input_tokens"] < 400
