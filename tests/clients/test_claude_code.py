"""Claude Code against the gateway: `./run.sh test --clients`, with `--run-vllm` behind it before real vLLM too."""
import json
import os
import platform
import signal
import subprocess

import pytest

from support import SUPPORT
from support.client import Client
from support.engine import DONE, Hang, Json, chat_chunks, chunk, completion, sse
from support.gateway import Gateway
from support.node import npm_packages
from support.processes import wait_until
from support.real_engines import EXACT
from support.rows import rows

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
CHIPS = {"x86_64": "x64", "aarch64": "arm64"}


@pytest.fixture(scope="session")
def program():
    """The path of Claude Code's own binary, which npm brings as a package for each kind of machine."""
    packages = npm_packages(SUPPORT / "claude") / "node_modules" / "@anthropic-ai"
    return packages / f"claude-code-linux-{CHIPS[platform.machine()]}" / "claude"


@pytest.fixture
def claude(program, tmp_path):
    """claude(gateway, prompt, *options): the result, as an object, of one headless run in a folder with note.txt.
    claude.interrupted(gateway, prompt, when, *options): the same run, interrupted once when(its lines) has returned."""
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    (work / "note.txt").write_text("PINEAPPLE\n")

    def settings(gateway):
        return {"PATH": os.environ["PATH"], "HOME": str(home), "ANTHROPIC_BASE_URL": gateway.url,
                "ANTHROPIC_AUTH_TOKEN": gateway.key,
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "NO_PROXY": "127.0.0.1"}

    def claude(gateway, prompt, *options, timeout=60, **environment):
        done = subprocess.run([program, "-p", prompt, "--output-format", "json", *options], cwd=work,
                              env={**settings(gateway), **environment},
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def interrupted(gateway, prompt, when, *options):
        command = [program, "-p", prompt, "--output-format", "stream-json", "--verbose", "--include-partial-messages", *options]
        with subprocess.Popen(command, cwd=work, env=settings(gateway), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, start_new_session=True) as process:
            when(process.stdout)
            os.killpg(process.pid, signal.SIGINT)
            process.wait(20)

    claude.interrupted, claude.folder = interrupted, work
    return claude


def scripted(request):
    """A call of Bash, then what its result is about."""
    ask = request.json()
    if any(message["role"] == "tool" for message in ask["messages"]):
        said = {"text": "The file says PINEAPPLE.", "reasoning": "I have seen it"}
    elif any(tool["function"]["name"] == "Bash" for tool in ask.get("tools") or []) and "note.txt" in request.body.decode():
        said = {"text": "Let me look.", "reasoning": "I shall read it",
                "tools": [("Bash", ['{"command": "cat no', 'te.txt", "description": "Show"}'])]}
    else:
        said = {"text": "Good day."}
    usage = {"prompt": 20_000, "cached": 15_000}
    return chat_chunks(**said, usage=True, **usage) if ask.get("stream") else [Json(completion(**said, **usage))]


def test_a_prompt(gateway, engine, claude):
    engine.always(scripted)
    found = claude(gateway(), "Say good day")
    assert (found["result"], found["is_error"], found["num_turns"]) == ("Good day.", False, 1)
    assert (found["usage"]["input_tokens"], found["usage"]["cache_read_input_tokens"]) == (5000, 15_000)
    sent = engine.requests[-1].json()
    assert sent["chat_template_kwargs"]["enable_thinking"] and "billing-header" not in engine.requests[-1].body.decode()
    assert len(sent["tools"]) > 5 and sent["tools"][0]["function"]["parameters"]["type"] == "object"


def test_a_turn_with_a_tool(gateway, engine, claude):
    """The tool runs, its result goes back, and the second request begins as the first one did."""
    engine.always(scripted)
    front = gateway()
    found = claude(front, "What does note.txt say?", "--allowedTools", "Bash(cat:*)")
    assert (found["result"], found["num_turns"], found["permission_denials"]) == ("The file says PINEAPPLE.", 2, [])
    first, second = [request.json() for request in engine.requests if b"note.txt" in request.body][:2]
    assert second["messages"][:len(first["messages"])] == first["messages"] and second["tools"] == first["tools"]
    called, told = second["messages"][len(first["messages"]):][:2]
    assert (called["content"], called["reasoning_content"]) == ("Let me look.", "I shall read it")      # it sends the thinking back
    assert json.loads(called["tool_calls"][0]["function"]["arguments"])["command"] == "cat note.txt"
    assert (told["role"], told["content"].strip()) == ("tool", "PINEAPPLE")
    assert {row["status"] for row in rows(front.db, "route LIKE 'POST %'")} == {200}


def test_a_tool_that_it_searches_for(gateway, engine, claude):
    """It keeps most of its tools back; one that its own search finds stands behind the others from then on."""
    def searching(request):
        if any(message["role"] == "tool" for message in request.json()["messages"]):
            return chat_chunks("Done.", usage=True)
        return chat_chunks(tools=[("ToolSearch", {"query": "select:WebFetch", "max_results": 1})], usage=True)
    engine.always(searching)
    front = gateway()
    found = claude(front, "Look for a tool")
    first, second = [[tool["function"]["name"] for tool in request.json()["tools"]] for request in engine.requests]
    assert found["result"] == "Done." and "WebFetch" not in first and second == [*first, "WebFetch"]
    assert engine.requests[-1].json()["messages"][-2]["content"] == "The tool WebFetch can be called now."
    assert {row["status"] for row in rows(front.db, "route LIKE 'POST %'")} == {200}


def test_the_model_by_its_own_name(gateway, engine, claude):
    engine.always(scripted)
    found = claude(gateway(model="glm-5.3-flash"), "Say good day", ANTHROPIC_MODEL="glm-5.3-flash")
    assert found["result"] == "Good day." and list(found["modelUsage"]) == ["glm-5.3-flash"]


def test_a_wrong_key_is_told_at_once(gateway, engine, program, tmp_path, claude):
    front = gateway()
    front.key = "sk-sparks-wrong"
    with pytest.raises(AssertionError, match="401|authenticat|API key|log in"):
        claude(front, "Say good day", timeout=20)
    assert front.log.count("status=401") <= 4


def test_two_sessions_share_their_beginning(gateway, engine, claude):
    """Another prompt in another session: system prompt and tools are the same, byte for byte."""
    engine.always(scripted)
    front = gateway()
    claude(front, "Say good day")
    claude(front, "Say good night")
    one, two = [request.json() for request in engine.requests if b"Say good" in request.body][:2]
    assert one["tools"] == two["tools"] and one["messages"][0] == two["messages"][0]


@pytest.mark.parametrize("name", ["opus", "haiku", "sonnet[1m]"])
def test_a_model_by_a_name_of_its_own(gateway, engine, claude, name):
    engine.always(scripted)
    front = gateway()
    assert claude(front, "Say good day", "--model", name)["result"] == "Good day."
    assert {row["status"] for row in rows(front.db, "route LIKE 'POST %'")} == {200}


# ---- sessions that go on

def test_a_session_after_a_tool_that_was_interrupted(gateway, engine, claude):
    front, begun = gateway(), claude.folder / "begun"
    wait = {"command": f"touch {begun}; python3 -c 'import time; time.sleep(60)'", "description": "Wait"}
    engine.play(*chat_chunks("I wait.", reasoning="hm", tools=[("Bash", wait)], usage=True))
    claude.interrupted(front, "Wait for it", lambda _: wait_until(begun.exists, 20, what="the tool"), "--allowedTools", "Bash")
    engine.always(scripted)
    assert claude(front, "Go on", "--continue")["result"] == "The file says PINEAPPLE."
    history = engine.requests[-1].json()["messages"]
    called = next(message for message in history if message.get("tool_calls"))
    result = history[history.index(called) + 1]
    assert (called["content"], called["reasoning_content"]) == ("I wait.", "hm")
    assert result["tool_call_id"] == called["tool_calls"][0]["id"] and result["content"].startswith("Error: ")
    assert history[-1] == {"role": "user", "content": "Go on"}


def test_a_session_after_an_answer_that_was_interrupted(gateway, engine, claude):
    front = gateway()
    engine.play(*chat_chunks("Hello there, you", reasoning="Let me")[:5], Hang())
    claude.interrupted(front, "Say hello", lambda lines: next(line for line in lines if b'"Hello"' in line))
    assert engine.requests[0].gone.wait(10)
    engine.always(scripted)
    assert claude(front, "Go on", "--continue")["result"] == "Good day."
    assert engine.requests[-1].json()["messages"][-1] == {"role": "user", "content": "Go on"}


def test_a_session_that_is_counted_and_compacted(gateway, engine, claude):
    """It counts with our counts, and has the model sum up what was said."""
    engine.always(scripted)
    front = gateway()
    claude(front, "Say good day")
    assert "Tokens" in claude(front, "/context", "--continue")["result"]
    assert "/v1/messages/count_tokens" in front.log and "status=4" not in front.log and "status=5" not in front.log
    claude(front, "/compact", "--continue")
    assert "TEXT ONLY" in engine.requests[-1].body.decode()
    assert claude(front, "Say good night", "--continue")["result"] == "Good day."


# ---- odd answers

def bash(arguments, **more):
    return {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "Bash", "arguments": arguments}, **more}]}


def answer(*deltas, finish="tool_calls"):
    return [sse(chunk({"role": "assistant", "content": ""})), *(sse(chunk(delta)) for delta in deltas), sse(chunk({}, finish)), DONE]


ECHO = '{"command": "echo ran"}'
ODD = {                                             # name -> (an engine's stream, what the tools gave)
    "object": (answer(bash({"command": "echo ran"})), ["ran"]),
    "an id with other characters": (answer(bash(ECHO, id="functions.Bash:0")), ["ran"]),
    "two of one id": (answer(bash(ECHO), bash(ECHO, index=1)), ["ran", "ran"]),
    "empty": (answer(bash("")), ["Error: <tool_use_error>InputValidationError"]),
    "cut": (answer(bash(ECHO[:14])), ["Error: <tool_use_error>InputValidationError"]),
    "cut at the end": (answer(bash(ECHO[:-1]), finish="stop"), ["Error: <tool_use_error>InputValidationError"]),
    "only thought": (answer({"reasoning": "hm"}, finish="stop"), []),
    "given up": (answer(bash(ECHO), finish="abort"), []),               # it asks again
}


@pytest.mark.parametrize("name", ODD)
def test_odd_answers(gateway, engine, claude, name):
    steps, given = ODD[name]
    engine.play(*steps)
    assert claude(gateway(), "Run it", "--allowedTools", "Bash")["result"] == "Hello there"
    results = [message for message in engine.requests[-1].json()["messages"] if message["role"] == "tool"]
    assert [message["content"][:len(begin)] for message, begin in zip(results, given, strict=True)] == given
    if name == "an id with other characters":
        assert results[0]["tool_call_id"] == "functions.Bash:0"


# ---- before real vLLM

@pytest.fixture(scope="module")
def front(vllm, stock, tmp_path_factory):
    gateway = Gateway(tmp_path_factory.mktemp("claude"), vllm, stock, config=EXACT)
    gateway.wait_alive().wait_ready()
    yield gateway
    gateway.stop()
    gateway.check_log()


SHORT = ("--system-prompt", "Be brief.", "--tools", "Read")         # for a context of 32,768 bytes


@pytest.mark.vllm
def test_real_engine(front, claude):
    """The tiny GLM reads only the script's name; a second session finds the beginning of its prompt in the cache."""
    first = claude(front, "say @answer", *SHORT, timeout=300)
    assert first["result"] == "The test password is PINEAPPLE-4711."
    second = claude(front, "now please say @answer", *SHORT, timeout=300)
    cached = second["usage"]["cache_read_input_tokens"]
    total = cached + second["usage"]["input_tokens"] + second["usage"]["cache_creation_input_tokens"]
    print(f"\nClaude Code, second session: {cached} of {total} prompt tokens from the cache")
    assert cached >= total / 2
    row = rows(front.db, "route = 'POST /v1/messages'")[-1]
    assert row["status"] == 200 and row["cached_tokens"] >= row["prompt_tokens"] / 2


@pytest.mark.vllm
def test_real_engine_counts_for_claude_code(front):
    said = Client(front.url, front.key, timeout=60).post("/v1/messages/count_tokens",
                                                         {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert said["input_tokens"] > 2
