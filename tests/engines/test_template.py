"""Real engines with chat templates of all kinds: what the gateway finds, and what comes of thoughts nobody wanted."""
import sys

import pytest

from support import SUPPORT, responses, tiny_glm
from support.chat import PATH as CHAT
from support.chat import text_of
from support.client import Client
from support.gateway import started
from support.messages import transcript
from support.processes import free_port
from support.real_engines import serve, serve_vllm
from support.templates import TEMPLATES

ANSWER = "".join(tiny_glm.ANSWER)
QUESTION = [{"role": "user", "content": "say @answer"}]
ABOUT = {
    "glm": "GLM: a switch and three levels (asked of its template)",
    "no-switch": "a GLM template that always thinks (asked of its template)",
    "qwen": "a template with the switch enable_thinking only (asked of its template)",
    "deepseek": "a template with the switch thinking only (asked of its template)",
    "gpt-oss": "a template without a switch, with the efforts low, medium, high (asked of its template, which hands any word of "
               "effort on)",
    "echo-switch": "GLM: a switch and three levels (asked of its template, which hands any word of effort on)",
    "raising": "a template without a switch, with the efforts none, high (asked of its template)",
    "thinking-only": "a model without such a control (asked of its template)",
}


class At:
    """What support.gateway.started wants of an engine."""

    def __init__(self, url):
        self.url = url


# ---- llama.cpp

@pytest.mark.parametrize("name", ["no-switch", "qwen", "gpt-oss", "raising"])
def test_llama(tmp_path, stock, name):
    """Its Jinja is one of its own."""
    file, port = tmp_path / "template.jinja", free_port()
    file.write_text(TEMPLATES[name], encoding="utf-8")
    command = [sys.executable, SUPPORT / "tiny_gguf.py", tmp_path / "tiny.gguf", "--serve", port, "--template", file]
    with_engine = serve(command, port, tmp_path, 60)
    try:
        with started(At(next(with_engine)), tmp_path, stock) as front:
            assert f"model tiny has {ABOUT[name]}" in front.log
            answer = front.client(timeout=60).post(CHAT, {"messages": QUESTION, "max_tokens": 5, "reasoning_effort": "high"})
            assert answer.status == 200
    finally:
        with_engine.close()


# ---- vLLM

SWITCH = "('</think>' if enable_thinking is defined and not enable_thinking else '<think>')"
ECHO = "{{- '<|system|>\\nEffort to spend on thinking: ' ~ reasoning_effort -}}"
LEVELS = "{{- '<|system|>\\nReasoning Effort: ' ~ {'low': 'Low', 'high': 'High'}.get(reasoning_effort, 'Max') -}}"


@pytest.fixture(scope="module", params=[(), ("--default-chat-template-kwargs", '{"enable_thinking": false}')],
                ids=["parser on", "parser off"])
def thinker(request, tmp_path_factory):
    """The URL of real vLLM with a model that thinks whatever it is told, and whether its thoughts leak into all it says."""
    file, template = tmp_path_factory.mktemp("thinker") / "template.jinja", tiny_glm.TEMPLATE
    assert SWITCH in template and ECHO in template
    file.write_text(template.replace(SWITCH, "'<think>'").replace(ECHO, LEVELS), encoding="utf-8")
    for url in serve_vllm(request.config, tmp_path_factory, "--chat-template", file, *request.param):
        yield url, bool(request.param)


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllm_without_a_switch(thinker, tmp_path, stock):
    url, leaks = thinker
    asked = {"model": "glm-tiny", "messages": QUESTION, "max_tokens": 200, "temperature": 0}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    leaked = Client(url).post(CHAT, {**asked, **off, "stream": True})
    assert text_of(leaked) == "They want the fixed sentence.</think>" + ANSWER          # what it would be without all this
    with started(At(url), tmp_path, stock, model="glm-5.3-flash") as front:
        assert f"model glm-5.3-flash has {ABOUT['no-switch']}" in front.log
        client = front.client(timeout=60)
        for fields in ({"reasoning_effort": "none"}, {"think": False}, off):
            answer = client.post(CHAT, {**asked, **fields, "stream": True})
            assert answer.headers.get("x-sparks-ignored") == ("chat_template_kwargs enable_thinking" if fields is off else None)
            assert text_of(answer) == ANSWER
            message = client.post(CHAT, {**asked, **fields}).json()["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == ("They want the fixed sentence.", ANSWER)
        messages = transcript(client.post("/v1/messages", {**asked, "stream": True}).read_all())
        assert [line for line in messages if line[1:2] == ("+text",)] == [(0, "+text", ANSWER)]
        assert client.post("/v1/messages", asked).json()["content"][0]["text"] == ANSWER
        given = {"input": QUESTION, "reasoning": {"effort": "none"}, "temperature": 0}
        found = [responses.said(client.post(responses.PATH, {**given, "stream": True}))[-1]["response"],
                 responses.whole(client.post(responses.PATH, given))]
        for response in found:
            texts = [part["text"] for item in response["output"] for part in item["content"]]
            assert texts == ["They want the fixed sentence.", ANSWER]
        if not leaks:                                   # the engine's parser is still on, and says what is thought
            thought = client.post(CHAT, {**asked, "reasoning_effort": "max", "stream": True})
            assert text_of(thought, "reasoning") == "They want the fixed sentence."
