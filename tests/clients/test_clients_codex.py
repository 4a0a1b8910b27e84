"""OpenAI's Codex, headless, against the gateway: `codex exec` with a provider of its own and wire_api = "responses"."""
import base64
import json
import os
import signal
import subprocess

import pytest

from support import SUPPORT
from support.engine import DONE, Hang, Head, Pause, chat_chunks, chunk, died, refusal, sse, tokens
from support.node import npm_packages
from support.processes import clean_environment
from support.responses import PNG

pytestmark = pytest.mark.clients
MODEL = "GLM-5.3-Flash-EXL3"
# As /help shows it; the rest keeps Codex from the internet and from retrying for long.
CONFIG = """
model = "{model}"
model_provider = "sparks"
check_for_update_on_startup = false
{more}
[analytics]
enabled = false

[model_providers.sparks]
name = "Sparks"
base_url = "{url}/v1"
env_key = "SPARKS_API_KEY"
wire_api = "responses"
stream_max_retries = 1
request_max_retries = 0
"""
# What Codex is told of a model that it does not know. With apply_patch_tool_type it sends apply_patch as a custom tool.
CATALOG = {"models": [{
    "slug": MODEL, "display_name": "GLM", "description": "", "base_instructions": "You are Codex.", "visibility": "list",
    "supported_in_api": True, "priority": 1, "shell_type": "unified_exec", "default_reasoning_level": "high",
    "supported_reasoning_levels": [{"effort": "low", "description": ""}, {"effort": "high", "description": ""}],
    "supports_reasoning_summaries": True, "support_verbosity": True, "default_verbosity": "low", "context_window": 850_000,
    "apply_patch_tool_type": "freeform", "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "supports_parallel_tool_calls": True, "experimental_supported_tools": [], "input_modalities": ["text", "image"]}]}
PATCH = '*** Begin Patch\n*** Add File: said.txt\n+"hi", é\n*** End Patch\n'


@pytest.fixture(scope="session")
def codex_command():
    """The path of the pinned Codex."""
    return npm_packages(SUPPORT / "codex") / "node_modules" / ".bin" / "codex"


def codex_runner(command, tmp_path, url, key, model=MODEL, config=CONFIG):
    """codex(prompt, more="lines of config.toml", provider="of its provider", before=("resume", "--last")): the events that it
    printed, in an empty folder of its own. codex.interrupted(prompt, kind): those up to one of an item of that kind."""
    home, folder = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    folder.mkdir()
    nowhere = "http://127.0.0.1:9"
    environment = {**clean_environment(), "HOME": str(home), "CODEX_HOME": str(home), "SPARKS_API_KEY": key,
                   "HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere, "NO_PROXY": "127.0.0.1"}

    def line(prompt, more, provider, before):
        (home / "config.toml").write_text(config.format(model=model, url=url, more=more) + provider)
        return [command, "exec", *before, "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt]

    def codex(prompt, more="", code=0, provider="", before=()):
        done = subprocess.run(line(prompt, more, provider, before), cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=90)
        assert done.returncode == code, done.stderr[-3000:] + done.stdout[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    def interrupted(prompt, kind):
        with subprocess.Popen(line(prompt, "", "", ()), cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True, start_new_session=True) as process:
            events = [json.loads(next(process.stdout))]
            while events[-1].get("item", {}).get("type") != kind:
                events.append(json.loads(next(process.stdout)))
            os.killpg(process.pid, signal.SIGINT)
            process.wait(20)
        return events

    codex.home, codex.folder, codex.interrupted = home, folder, interrupted
    return codex


@pytest.fixture
def codex(shared, codex_command, tmp_path):
    return codex_runner(codex_command, tmp_path, shared.url, shared.key)


def items(events, kind):
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def test_a_prompt(shared, codex):
    shared.engine.play(*chat_chunks("Hello there", reasoning="Let me think", usage=True, cached=5))
    events = codex("Say hello")
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there"]
    assert [item["text"] for item in items(events, "reasoning")] == ["Let me think"]
    usage = events[-1]["usage"]
    assert (usage["input_tokens"], usage["cached_input_tokens"], usage["output_tokens"], usage["reasoning_output_tokens"]) == (
        15, 5, 7, 3)
    request, = shared.engine.requests
    sent = request.json()
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "user"]
    assert {"exec_command", "multi_agent_v1__close_agent"} < {tool["function"]["name"] for tool in sent["tools"]}
    assert "web_search" not in json.dumps(sent["tools"])


def test_a_turn_with_a_tool(shared, codex):
    shared.engine.play(*chat_chunks(None, reasoning="I look", tools=[("exec_command", ['{"cmd": "echo mark', 'er-$((40+2))"}'])],
                                    usage=True))
    shared.engine.play(*chat_chunks("It is done.", usage=True))
    events = codex("Run it")
    assert [item["aggregated_output"] for item in items(events, "command_execution")] == ["marker-42\n"]
    assert [item["text"] for item in items(events, "agent_message")] == ["It is done."]
    turn, result = shared.engine.requests[-1].json()["messages"][-2:]
    assert turn["reasoning_content"] == "I look" and "marker-42" in result["content"]      # sealed, and back again
    assert result["tool_call_id"] == turn["tool_calls"][0]["id"]


def test_a_tool_in_a_namespace(shared, codex):
    """Codex knows it by both names; it would say that there is no such tool."""
    shared.engine.play(*chat_chunks(None, tools=[("multi_agent_v1__close_agent", {"target": "nobody"})], usage=True))
    codex("Close it")
    turn, result = shared.engine.requests[-1].json()["messages"][-2:]
    assert turn["tool_calls"][0]["function"]["name"] == "multi_agent_v1__close_agent"
    assert "invalid agent id nobody" in result["content"]


def test_a_patch_as_a_custom_tool(shared, codex):
    (codex.home / "catalog.json").write_text(json.dumps(CATALOG))
    whole = json.dumps({"input": PATCH})
    pieces = [whole[at:at + 7] for at in range(0, len(whole), 7)]
    shared.engine.play(*chat_chunks(None, tools=[("apply_patch", pieces)], usage=True))
    events = codex("Write it", f'model_catalog_json = "{codex.home}/catalog.json"')
    assert [item["status"] for item in items(events, "file_change")] == ["completed"]
    assert (codex.folder / "said.txt").read_text() == '"hi", é\n'
    sent = shared.engine.requests[-1].json()
    assert json.loads(sent["messages"][-2]["tool_calls"][0]["function"]["arguments"]) == {"input": PATCH}
    assert sent["chat_template_kwargs"] == {"enable_thinking": True, "reasoning_effort": "high"} and sent["verbosity"] == "low"


def test_a_model_whose_tools_stand_in_the_input(shared, codex_command, tmp_path):
    """Codex knows models of such names: it sends no tools beside the input, but an additional_tools in it."""
    codex = codex_runner(codex_command, tmp_path, shared.url, shared.key, "gpt-5.6-sol")
    shared.engine.play(*chat_chunks("Hello there", usage=True))
    events = codex("Say hello")
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there"]
    assert [tool["function"]["name"] for tool in shared.engine.requests[-1].json()["tools"]]


def test_a_message_of_another_agent(shared, codex):
    """What the model says to the agent that it began comes as encrypted_content, though nobody has encrypted it."""
    shared.engine.play(*chat_chunks(None, tools=[("collaboration__spawn_agent", {
        "task_name": "child", "message": "Say done", "fork_turns": "none"})], usage=True))
    for _ in range(2):                                              # neither agent ends before the other has begun
        shared.engine.play(Pause(1), *chat_chunks("done", usage=True))
    events = codex("Ask a child", "[features]\nmulti_agent_v2 = true")
    assert events[-1]["type"] == "turn.completed"
    last = [request.json()["messages"][-1] for request in shared.engine.requests]
    child, = [message["content"] for message in last if message["content"].startswith("[Message")]
    assert child.startswith("[Message from /root to /root/child]\n") and child.endswith("Say done")


# Codex's own provider, at our address: it would rather speak WebSocket, and has its provider make a long conversation short.
BUILT_IN = """
model = "gpt-5.5"
openai_base_url = "{url}/v1"
model_auto_compact_token_limit = 20000
check_for_update_on_startup = false
[analytics]
enabled = false
"""


def test_a_long_session_with_openais_provider(shared, codex_command, tmp_path, monkeypatch):
    monkeypatch.setenv("CODEX_API_KEY", shared.key)
    shared.engine.play(*chat_chunks(None, tools=[("exec_command", {"cmd": "echo mark"})], usage=tokens(50_000, 0, 10)))
    shared.engine.play(*chat_chunks("We said mark.", usage=True))
    shared.engine.play(*chat_chunks("It is done.", usage=True))
    events = codex_runner(codex_command, tmp_path, shared.url, shared.key, config=BUILT_IN)("Run it")
    assert [item["text"] for item in items(events, "agent_message")] == ["It is done."] and events[-1]["type"] == "turn.completed"
    assert not [event for event in events if event["type"] == "error"]             # it turned to plain requests at once
    _, compaction, after = [request.json()["messages"] for request in shared.engine.requests]
    assert compaction[-2]["role"] == "tool" and "summary" in compaction[-1]["content"]
    assert after[-1]["content"].endswith("We said mark.") and "tool" not in [message["role"] for message in after]


def test_a_picture(shared, codex):
    """view_image gives its result as a picture, which a tool's message cannot hold."""
    (codex.folder / "dot.png").write_bytes(base64.b64decode(PNG.partition(",")[2]))
    shared.engine.play(*chat_chunks(None, tools=[("view_image", {"path": str(codex.folder / "dot.png")})], usage=True))
    codex("Look at it")
    result, picture = shared.engine.requests[-1].json()["messages"][-2:]
    assert result["role"] == "tool" and picture["role"] == "user"
    assert picture["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")


def test_a_stream_that_fails_is_tried_again(shared, codex):
    shared.engine.play(Head(), *chat_chunks("Hello there")[:3], died(), DONE)
    events = codex("Say hello")
    assert any("EngineCore encountered an issue" in event.get("message", "") for event in events)
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there"] and len(shared.engine.requests) == 2


HELLO = chat_chunks("Hello there", reasoning="Let me think", usage=True)


@pytest.mark.parametrize("steps", [[Pause(8), *HELLO], [Head(), HELLO[0], Pause(8), *HELLO[1:]], [*HELLO[:2], Pause(8), *HELLO[2:]],
                                   [*HELLO[:5], Pause(8), *HELLO[5:]]], ids=["no head", "prefill", "reasoning", "text"])
def test_an_engine_that_is_silent_for_longer_than_codex_waits(gateway, engine, codex_command, tmp_path, steps):
    """It times events, and would send its prompt again."""
    front = gateway(keepalive=1)
    engine.play(*steps)
    events = codex_runner(codex_command, tmp_path, front.url, front.key)("Say hello", provider="stream_idle_timeout_ms = 3000")
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there"] and len(engine.requests) == 1
    assert not [event for event in events if event["type"] == "error"]


def test_a_queue_that_lasts_longer_than_codex_waits(gateway, engine, codex_command, tmp_path):
    front = gateway(keepalive=1, max_active=1)
    engine.play(Head(), Pause(8), *HELLO)
    with front.client().open() as first:
        first.start("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "stream": True})
        engine.wait_for(1)
        engine.play(*HELLO)
        events = codex_runner(codex_command, tmp_path, front.url, front.key)("Say hello", provider="stream_idle_timeout_ms = 3000")
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there"] and len(engine.requests) == 2
    assert not [event for event in events if event["type"] == "error"]


def test_a_refusal_is_shown(shared, codex):
    shared.engine.play(refusal(400, "This prompt cannot be"))
    events = codex("Say hello", code=1)
    assert "This prompt cannot be" in events[-1]["error"]["message"] and len(shared.engine.requests) == 1


@pytest.mark.timeout(180)
def test_all_at_once(gateway, engine, codex_command, tmp_path):
    """A model of such a name, several agents, and an engine that is slow with each of their turns."""
    front = gateway(keepalive=1)
    codex = codex_runner(codex_command, tmp_path, front.url, front.key, "gpt-5.6-sol")
    spawn = ("collaboration__spawn_agent", {"task_name": "child", "message": "Say done", "fork_turns": "none"})
    engine.play(Pause(5), *chat_chunks(None, tools=[spawn], usage=True))
    for _ in range(2):
        engine.play(Head(), HELLO[0], Pause(5), *HELLO[1:])
    events = codex("Ask a child", "[features]\nmulti_agent_v2 = true", provider="stream_idle_timeout_ms = 3000")
    assert events[-1]["type"] == "turn.completed" and not [event for event in events if event["type"] == "error"]
    assert "Hello there" in [item["text"] for item in items(events, "agent_message")]
    last = [request.json()["messages"][-1]["content"] for request in engine.requests]
    assert len([words for words in last if str(words).startswith("[Message from /root to /root/child]")]) == 1


# ---- sessions that go on

RESUME = ("resume", "--last")
WAIT = {"cmd": "sleep 60", "yield_time_ms": 30_000}


@pytest.mark.parametrize("model", [MODEL, "gpt-5.6-sol"])
def test_a_session_after_a_turn_that_was_interrupted(shared, codex_command, tmp_path, model):
    codex = codex_runner(codex_command, tmp_path, shared.url, shared.key, model)
    shared.engine.play(*chat_chunks(None, reasoning="I wait", tools=[("exec_command", WAIT)], usage=True))
    codex.interrupted("Wait", "command_execution")
    assert [item["text"] for item in items(codex("Go on", before=RESUME), "agent_message")] == ["Hello there"]
    called, result, told, asked = shared.engine.requests[-1].json()["messages"][-4:]
    assert called["reasoning_content"] == "I wait" and result["tool_call_id"] == called["tool_calls"][0]["id"]
    assert "aborted by user" in result["content"] and told["content"].startswith("<turn_aborted>")
    assert asked == {"role": "user", "content": "Go on"}


def test_a_session_after_an_answer_that_was_interrupted(shared, codex):
    shared.engine.play(*HELLO[:5], Hang())
    codex.interrupted("Say hello", "reasoning")
    assert shared.engine.requests[0].gone.wait(10)
    assert [item["text"] for item in items(codex("Go on", before=RESUME), "agent_message")] == ["Hello there"]
    assert shared.engine.requests[-1].json()["messages"][-1]["content"] == "Go on"


def test_a_session_with_a_picture(shared, codex):
    (codex.folder / "dot.png").write_bytes(base64.b64decode(PNG.partition(",")[2]))
    codex("What is it?", before=("-i=dot.png",))
    codex("Which colour?", before=RESUME)
    for request in shared.engine.requests:
        parts = request.json()["messages"][2]["content"]
        assert [part["image_url"]["url"][:22] for part in parts if part["type"] == "image_url"] == ["data:image/png;base64,"]


@pytest.mark.parametrize("model", [MODEL, "gpt-5.6-sol"])
def test_a_session_that_is_compacted(shared, codex_command, tmp_path, model):
    """It asks the model for a summary as for any answer, and goes on with that."""
    codex = codex_runner(codex_command, tmp_path, shared.url, shared.key, model)
    before, limits = len(shared.gateway.log), "model_auto_compact_token_limit = 20000\nmodel_context_window = 100000"
    shared.engine.play(*chat_chunks(None, tools=[("exec_command", {"cmd": "echo one"})], usage=True, prompt=30_000))
    shared.engine.play(*chat_chunks("What was done.", usage=True, prompt=30_000))
    assert [item["text"] for item in items(codex("Do it", limits), "agent_message")] == ["Hello there"]
    codex("Go on", limits, before=RESUME)
    _, asked, compacted, later = [request.json()["messages"] for request in shared.engine.requests]
    assert "COMPACTION" in asked[-1]["content"] and [message["role"] for message in asked[-3:]] == ["assistant", "tool", "user"]
    assert compacted[-1]["content"].endswith("What was done.") and compacted == later[:len(compacted)]
    assert "/v1/responses/" not in shared.gateway.log[before:]


# ---- odd answers

def command(arguments, **more):
    return {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "exec_command", "arguments": arguments}, **more}]}


def answer(*deltas, finish="tool_calls"):
    return [sse(chunk({"role": "assistant", "content": ""})), *(sse(chunk(delta)) for delta in deltas), sse(chunk({}, finish)), DONE]


ECHO = '{"cmd": "echo ran"}'
ODD = {                 # name -> (an engine's stream, the exit code, what its commands print, how many requests there are)
    "object": (answer(command({"cmd": "echo ran"})), 0, ["ran\n"], 2),
    "an id with other characters": (answer(command(ECHO, id="functions.exec_command:0")), 0, ["ran\n"], 2),
    "two of one id": (answer(command(ECHO), command(ECHO, index=1)), 0, ["ran\n"] * 2, 2),
    "empty": (answer(command("")), 0, [], 2),
    "cut": (answer(command(ECHO[:14])), 1, [], 1),
    "cut at the end": (answer(command(ECHO[:-1]), finish="stop"), 1, [], 1),
    "only thought": (answer({"reasoning": "hm"}, finish="stop"), 0, [], 1),
    "given up": (answer(command(ECHO), finish="abort"), 0, [], 2),             # it asks again
}


@pytest.mark.parametrize("name", ODD)
def test_odd_answers(shared, codex, name):
    steps, code, printed, asked = ODD[name]
    shared.engine.play(*steps)
    events = codex("Run it", code=code)
    assert [item["aggregated_output"] for item in items(events, "command_execution")] == printed
    assert len(shared.engine.requests) == asked and events[-1]["type"] == ("turn.failed" if code else "turn.completed")


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("prompt, said", [("say @answer", "PINEAPPLE-4711"), ("say @tool", "")])
def test_codex_and_real_vllm(gateway, vllm, codex_command, tmp_path, prompt, said):
    """A prompt, and a turn with a tool (which Codex does not have, and says so). With --run-clients and --run-vllm."""
    front = gateway(upstream=vllm, wait="alive").wait_ready()
    codex = codex_runner(codex_command, tmp_path, front.url, front.key, "glm-tiny")
    (codex.home / "catalog.json").write_text(json.dumps({"models": [
        {**CATALOG["models"][0], "slug": "glm-tiny", "context_window": 32_000}]}))
    for _ in range(3):                              # the tiny model does what it has learnt, but for a few times in a hundred
        before = front.log.count("POST /v1/responses")
        events = codex(prompt, f'model_catalog_json = "{codex.home}/catalog.json"')
        assert events[-1]["type"] == "turn.completed" and events[-1]["usage"]["output_tokens"] > 0
        turns = front.log.count("POST /v1/responses") - before
        if said in items(events, "agent_message")[-1]["text"] and items(events, "reasoning") and turns == (1 if said else 2):
            return
    raise AssertionError(f"{turns} turns, and at last {events}")
