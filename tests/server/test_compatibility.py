"""docs/compatibility.md against the code: each row of its tables is tried on the real server."""
import re

import pytest

import settings
from front import routes
from support.chat import HELLO, PNG, TOOL
from support.engine import MODELS, Close, Json, completion, embeddings, refusal

MODEL = MODELS[0]["id"]
DOC = settings.HOME / "docs" / "compatibility.md"
CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def tables():
    """{chapter: {row's name: its last cell}}"""
    found = {}
    for chapter in re.split(r"^## ", DOC.read_text(encoding="utf-8"), flags=re.M)[1:]:
        title, _, text = chapter.partition("\n")
        rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line.startswith("| ")]
        found[title] = {row[0].replace("`", ""): row[-1].strip("| ") for row in rows[1:]}
    return found


TABLES = tables()


class Front:
    """The gateway, and what it sends to its engine."""

    def __init__(self, pair):
        self.pair, self.engine = pair, pair.engine

    def post(self, path, **fields):
        return self.pair.client().post(path, fields)

    def chat(self, **fields):
        return self.post(CHAT, **{"messages": HELLO, **fields})

    def sent(self, answer):
        assert answer.status == 200, answer.read_all()
        answer.read_all()
        return self.engine.requests[-1].json()

    def refused(self, answer, param, status=400, type="invalid_request_error"):
        error = answer.json()["error"]
        assert (answer.status, error["param"], error["type"]) == (status, param, type)
        return error["message"]

    def passes(self, path, given):
        body = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}}[path]
        sent = self.sent(self.post(path, **body, **given))
        assert {name: sent[name] for name in given} == given


@pytest.fixture
def front(shared_vectors):
    return Front(shared_vectors)


# ---- chat

def chat_model(front):
    for name in (MODEL, MODEL.upper(), None):
        assert front.sent(front.chat(model=name))["model"] == MODEL
    assert MODEL in front.refused(front.chat(model="nope"), "model", 404, "not_found_error")


def chat_messages(front):
    history = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b", "name": "Ann"},
               {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [
                   {"id": "A", "type": "function", "function": {"name": "f", "arguments": ""}}]},
               {"role": "tool", "tool_call_id": "A", "content": "c"}]
    sent = front.sent(front.chat(messages=history))["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool"]
    assert sent[2]["reasoning_content"] == "hm" and sent[2]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert sent[1]["name"] == "Ann" and sent[3]["tool_call_id"] == "A"
    for wrong in (None, [], "a", [{"role": "x", "content": "a"}]):
        front.refused(front.chat(messages=wrong), "messages")


def chat_parts(front):
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}, {"type": "input_image", "image_url": PNG}]
    sent = front.sent(front.chat(messages=[{"role": "user", "content": parts}]))["messages"][0]["content"]
    assert [part["type"] for part in sent] == ["text", "text", "image_url"] and sent[2]["image_url"] == {"url": PNG}
    for kind in ("input_audio", "file"):
        front.refused(front.chat(messages=[{"role": "user", "content": [{"type": kind, kind: {}}]}]), "messages")
    local = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    assert "public" in front.refused(front.chat(messages=[{"role": "user", "content": [local]}]), "messages")


def chat_stream(front):
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})):
        for usage in (True, False):
            events = list(front.post(path, **body, stream=True, stream_options={"include_usage": usage}).events())
            assert events[-1].data == "[DONE]" and any(event.json().get("usage") for event in events[:-1]) is usage


def chat_lengths(front):
    assert front.sent(front.chat(max_tokens=5))["max_tokens"] == 5
    assert front.sent(front.chat(max_tokens=5, max_completion_tokens=7))["max_tokens"] == 7
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1):
            front.refused(front.chat(**{name: value}), name)


def chat_penalty(front):
    for given, sent in (({"repeat_penalty": 1.1}, 1.1), ({"repetition_penalty": 1.2, "repeat_penalty": 1.1}, 1.2)):
        payload = front.sent(front.chat(**given))
        assert payload["repeat_penalty"] == payload["repetition_penalty"] == sent


def chat_n(front):
    choice = completion("a")["choices"][0]
    front.engine.play(Json({**completion("a"), "choices": [choice, {**choice, "index": 1}]}))
    answer = front.chat(n=2)
    assert len(answer.json()["choices"]) == 2 and front.engine.requests[-1].json()["n"] == 2


def chat_tools(front):
    flat = {"type": "function", "name": "f", "parameters": {}}
    sent = front.sent(front.chat(tools=[TOOL, flat]))["tools"]
    assert sent == [TOOL, {"type": "function", "function": {"name": "f", "parameters": {}}}]
    front.refused(front.chat(tools=[{"type": "function", "function": {}}]), "tools")


def chat_tool_choice(front):
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("none", "auto", "required", named, {"type": "function", "name": "f"}):
        assert front.sent(front.chat(tools=[TOOL], tool_choice=choice))["tool_choice"] == (choice if isinstance(choice,
                                                                                                                str) else named)


def chat_format(front):
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for given, sent in ((schema, schema), ({"type": "json_object"}, {"type": "json_object"}),
                        ({"type": "json_schema", "json_schema": {}}, {"type": "json_object"}),
                        ({"type": "odd"}, {"type": "odd"})):
        assert front.sent(front.chat(response_format=given))["response_format"] == sent


def chat_thinking(front):
    for given, on in (({"reasoning_effort": "high"}, True), ({"reasoning_effort": "none"}, False), ({"think": True}, True),
                      ({"think": False}, False), ({"reasoning": {"effort": "low"}}, True),
                      ({"chat_template_kwargs": {"enable_thinking": True}}, True)):
        assert front.sent(front.chat(**given))["chat_template_kwargs"]["enable_thinking"] is on


def chat_cache_key(front):
    sent = front.sent(front.chat(prompt_cache_key="alice"))
    assert sent["prompt_cache_key"] == "alice" and "cache_salt" not in sent


def chat_logprobs(front):
    given = completion("a")
    given["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}
    front.engine.play(Json(given))
    answer = front.chat(logprobs=True, top_logprobs=2)
    assert answer.json()["choices"][0]["logprobs"] == given["choices"][0]["logprobs"]
    assert front.engine.requests[-1].json()["top_logprobs"] == 2


def chat_tier(front):
    """On the other routes: tests/server/test_tiers.py."""
    for asked, had in (("flex", "flex"), ("priority", "default"), (None, None)):
        answer = front.chat(service_tier=asked)
        assert answer.json().get("service_tier") == had and "service_tier" not in front.engine.requests[-1].json()
    front.refused(front.chat(service_tier="gold"), "service_tier")


def chat_steering(front):
    """On the other routes: tests/server/test_wire_of_engines.py."""
    given = {"priority": 1, "session_id": "a", "kv_transfer_params": {}, "id_slot": 0}
    answer = front.chat(**given)
    assert not given.keys() & front.sent(answer).keys()
    assert answer.headers["x-sparks-ignored"] == ", ".join(f"{name} field" for name in given)


CHAT_ROWS = {
    "model": chat_model, "messages": chat_messages, "Content parts": chat_parts,
    "stream, stream_options.include_usage": chat_stream, "max_completion_tokens, max_tokens": chat_lengths,
    "temperature, top_p, top_k, min_p": {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1},
    "presence_penalty, frequency_penalty": {"presence_penalty": 1, "frequency_penalty": -1},
    "repetition_penalty, repeat_penalty": chat_penalty, "seed": {"seed": 2 ** 53}, "stop": {"stop": ["a", "b"]}, "n": chat_n,
    "tools": chat_tools, "tool_choice": chat_tool_choice, "response_format": chat_format,
    "reasoning_effort, think, chat_template_kwargs.enable_thinking, reasoning.effort": chat_thinking,
    "prompt_cache_key": chat_cache_key, "logprobs, top_logprobs": chat_logprobs,
    "service_tier": chat_tier,
    "user, metadata, store and others": {"user": "x", "metadata": {"a": 1}, "store": True, "odd": {"deep": [None]}},
    "priority, session_id, kv_transfer_params, id_slot and their like": chat_steering,
}


# ---- completions and embeddings

def text_sampling(front):
    for fields in (value for value in CHAT_ROWS.values() if isinstance(value, dict)):
        front.passes(TEXT, fields)


def text_prompt(front):
    for prompt in ("a", ["a"], ["a", "b"], [1, 2], [[1], [2]]):
        assert front.sent(front.post(TEXT, prompt=prompt))["prompt"] == prompt
    front.refused(front.post(TEXT), "prompt")


def text_tokens(front):
    assert front.sent(front.post(TEXT, prompt="a"))["max_tokens"] == 16
    assert front.sent(front.post(TEXT, prompt="a", max_tokens=0, echo=True))["max_tokens"] == 0
    front.refused(front.post(TEXT, prompt="a", max_tokens=0), "max_tokens")


def text_n(front):
    answer = front.post(TEXT, prompt="a", n=2)
    assert len(answer.json()["choices"]) == 2


TEXT_ROWS = {"The sampling parameters above": text_sampling, "prompt": text_prompt, "max_tokens": text_tokens, "n": text_n,
             "echo, logprobs, suffix": {"echo": True, "logprobs": 2, "suffix": "end"},
             "stream, stream_options.include_usage": chat_stream}


def embed(front, *vectors, form="float", **fields):
    front.engine.play(Json(embeddings(*vectors or ([0.6, 0.8],), form=form)))
    return front.post(VECTORS, **{"model": "vectors", "input": "a", **fields})


def vectors_model(front):
    assert "use vectors" in front.refused(front.post(VECTORS, input="a", model=MODEL), "model")
    assert front.sent(embed(front))["model"] == front.sent(embed(front, model=None))["model"] == MODEL


def vectors_input(front):
    for given in ("a", ["a"], ["a", "b"], [1, 2], [[1], [2]]):
        assert front.sent(embed(front, *[[1.0]] * (2 if given in (["a", "b"], [[1], [2]]) else 1), input=given))["input"] == given
    for wrong in ([], None, 5):
        front.refused(front.post(VECTORS, model="vectors", input=wrong), "input")


def vectors_format(front):
    for gives in ("float", "base64"):
        assert embed(front, [0.5], form=gives).json()["data"][0]["embedding"] == [0.5]
        assert embed(front, [0.5], form=gives, encoding_format="base64").json()["data"][0]["embedding"] == "AAAAPw=="
    front.refused(front.post(VECTORS, model="vectors", input="a", encoding_format="hex"), "encoding_format")


def vectors_dimensions(front):
    assert embed(front, [0.6, 0.8], dimensions=1).json()["data"][0]["embedding"] == [1.0]
    front.refused(embed(front, [0.6, 0.8], dimensions=3), "dimensions")


VECTOR_ROWS = {"model": vectors_model, "input": vectors_input, "encoding_format": vectors_format,
               "dimensions": vectors_dimensions}


# ---- Anthropic's messages

MESSAGES = "/v1/messages"
WEATHER = {"name": "f", "input_schema": {"type": "object"}}
ASKED = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}


def converse(front, **fields):
    return front.post(MESSAGES, **{**ASKED, **fields})


def objects(front, status=400, **fields):
    answer = converse(front, **fields)
    error = answer.json()
    assert (answer.status, error["type"]) == (status, "error")
    return error["error"]["type"], error["error"]["message"]


def messages_model(front):
    for name in (MODEL, MODEL.lower(), "claude-x"):
        assert front.sent(converse(front, model=name))["model"] == MODEL
    assert objects(front, 404, model="nope")[0] == "not_found_error"


def messages_max_tokens(front):
    assert "max_tokens: Field required" in objects(front, max_tokens=None)[1]
    assert front.sent(converse(front, max_tokens=1 << 30))["max_tokens"] == 850000


def messages_messages(front):
    turns = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "system", "content": "b"},
             {"role": "user", "content": "c"}]
    assert [turn["role"] for turn in front.sent(converse(front, messages=turns))["messages"]] == ["user", "system", "user"]
    assert objects(front, messages=[])[0] == "invalid_request_error"


def messages_system(front):
    for system in ("a", [{"type": "text", "text": "a"}]):
        assert front.sent(converse(front, system=system))["messages"][0] == {"role": "system", "content": "a"}


def messages_blocks(front):
    blocks = [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}]
    turns = [{"role": "user", "content": blocks}, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "A", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "A", "content": "b", "is_error": True}]}]
    sent = front.sent(converse(front, messages=turns, tools=[WEATHER]))["messages"]
    assert sent[0]["content"][1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert sent[1]["tool_calls"][0]["id"] == "A" and sent[2] == {"role": "tool", "tool_call_id": "A", "content": "Error: b"}
    for block, words in (({"type": "document"}, "document"), ({"type": "odd"}, "odd"),
                         ({"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}, "no public address"),
                         ({"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}, "data URL")):
        assert words in objects(front, messages=[{"role": "user", "content": [block]}])[1]


def messages_stream(front):
    names = [event.name for event in converse(front, stream=True).events()]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]


def messages_sampling(front):
    given = {"temperature": 0.5, "top_p": 0.5, "top_k": 3}
    sent = front.sent(converse(front, **given))
    assert {name: sent[name] for name in given} == given


def messages_tool_choice(front):
    for given, sent in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert front.sent(converse(front, tools=[WEATHER], tool_choice={"type": given}))["tool_choice"] == sent
    named = front.sent(converse(front, tools=[WEATHER], tool_choice={"type": "tool", "name": "f"}))["tool_choice"]
    assert named == {"type": "function", "function": {"name": "f"}}


def messages_tools(front):
    sent = front.sent(converse(front, tools=[WEATHER, {"type": "web_search_20250305", "name": "web_search"}]))["tools"]
    assert [tool["function"]["name"] for tool in sent] == ["f"]


def messages_thinking(front):
    for given, on in (({"type": "enabled", "budget_tokens": 5000}, True), ({"type": "adaptive"}, True), ({"type": "disabled"}, False),
                      (None, False)):
        assert front.sent(converse(front, thinking=given))["chat_template_kwargs"]["enable_thinking"] is on


def messages_ignored(front):
    fields = {"metadata": {"user_id": "u"}, "mcp_servers": [], "cache_control": {"type": "ephemeral"}}
    assert not fields.keys() & front.sent(converse(front, **fields)).keys()


def messages_tier(front):
    for asked, had in (("flex", "batch"), ("auto", "standard"), ("standard_only", "standard"), (None, None)):
        assert converse(front, service_tier=asked).json()["usage"]["service_tier"] == had
    assert "service_tier" in objects(front, service_tier="gold")[1]


def messages_answer(front):
    front.engine.play(Json(completion("a", reasoning="hm")))
    answer = converse(front, thinking={"type": "adaptive"}).json()
    assert answer["stop_reason"] == "end_turn" and answer["content"][0]["signature"] == ""
    assert {"input_tokens", "output_tokens"} <= answer["usage"].keys()


MESSAGE_ROWS = {
    "model": messages_model, "max_tokens": messages_max_tokens, "messages": messages_messages, "system": messages_system,
    "Blocks": messages_blocks, "stream": messages_stream, "temperature, top_p, top_k": messages_sampling,
    "stop_sequences": lambda front: front.sent(converse(front, stop_sequences=["a"]))["stop"] == ["a"] or pytest.fail("no stop"),
    "tools": messages_tools, "tool_choice": messages_tool_choice, "thinking": messages_thinking, "cache_control": messages_ignored,
    "service_tier": messages_tier, "metadata, mcp_servers and others": messages_ignored, "Response fields": messages_answer,
}


# ---- answers, errors, routes

def field_usage(front):
    front.engine.play(Json(completion("a", cached=8)))
    usage = front.chat().json()["usage"]
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 8


def field_reasoning(front):
    front.engine.play(Json(completion("a", reasoning="hm")))
    message = front.chat().json()["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm"


def field_request_id(front):
    assert front.chat().headers["x-request-id"]
    answer = front.pair.client().post(CHAT, {"messages": HELLO}, {"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


def answered(front, finish="stop", **message):
    """(the status, the answer) of a chat to which the engine says this."""
    answer = completion("a")
    answer["model"] = "/srv/model.gguf"
    answer["choices"] = [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": "a", **message}}]
    front.engine.play(Json(answer))
    got = front.chat()
    return got.status, got.json()


def field_model(front):
    assert answered(front)[1]["model"] == front.chat().json()["model"] != "/srv/model.gguf"


def field_finish(front):
    assert [answered(front, finish)[0] for finish in ("eos", "abort", "error", None)] == [200, 502, 502, 502]
    call = {"id": "A", "type": "function", "function": {"name": "f", "arguments": '{"a": "b'}}
    assert answered(front, "tool_calls", tool_calls=[call])[1]["choices"][0]["finish_reason"] == "length"


def field_calls(front):
    calls = [{"id": 7, "function": {"name": "f"}}, {"id": "7", "function": {"name": "g", "arguments": {"a": 1}}}, {"id": "B"}]
    first, second = answered(front, "tool_calls", tool_calls=calls)[1]["choices"][0]["message"]["tool_calls"]
    assert first == {"id": "7", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert second["id"] != "7" and second["function"] == {"name": "g", "arguments": '{"a":1}'}


def field_content(front):
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "b"}]
    for content in (parts, "<think>hm</think>b"):
        message = answered(front, content=content)[1]["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("hm", "b")


FIELD_ROWS = {"usage": field_usage, "reasoning_content": field_reasoning, "model": field_model, "finish_reason": field_finish,
              "tool_calls": field_calls, "content": field_content, "x-request-id": field_request_id}


def error_key(front):
    for header in ("authorization", "x-api-key"):
        value = f"Bearer {front.pair.key}" if header == "authorization" else front.pair.key
        assert front.pair.client(False).get("/v1/models", {header: value}).status == 200


def error_no_key(front):
    for key in (False, "sk-sparks-wrong"):
        front.refused(front.pair.client(key).post(CHAT, {"messages": HELLO}), None, 401)


def error_encoded(front):
    answer = front.pair.client().post(CHAT, {"messages": HELLO}, {"content-encoding": "gzip"})
    front.refused(answer, "Content-Encoding", 415)


def error_failed(front):
    for steps, status in (([Close()], 502), ([refusal(500, "no")], 500)):
        front.engine.always(steps)
        front.refused(front.chat(), None, status, "api_error")


def browsers(front):
    """Without the setting a preflight learns nothing; with it: tests/server/test_front.py."""
    answer = front.pair.client(False).request("OPTIONS", CHAT, headers={"Origin": "http://a", "Access-Control-Request-Method": "POST"})
    assert answer.status == 204 and "access-control-allow-origin" not in answer.headers


ERROR_ROWS = {"Key sent as": error_key, "Browsers": browsers, "No or wrong key": error_no_key, "Unknown model": chat_model,
              "Invalid request": lambda front: front.refused(front.chat(messages=[]), "messages"),
              "A body that is encoded": error_encoded, "Generation failed": error_failed,
              "Too many or too large images": lambda front: front.refused(front.chat(messages=[{"role": "user", "content": [
                  {"type": "image_url", "image_url": {"url": f"http://example.org/{n}"}} for n in range(17)]}]), "messages"),
              'A data URL that is no PNG, JPEG, GIF, WebP or BMP image in base64': lambda front: front.refused(
                  front.chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:text/html,<b>"}}]}]),
                  "messages")}
CHAPTERS = {"Chat completions parameters": (CHAT, CHAT_ROWS), "Completions parameters": (TEXT, TEXT_ROWS),
            "Embeddings parameters": (VECTORS, VECTOR_ROWS), "Response fields": (CHAT, FIELD_ROWS),
            "Authentication and errors": (CHAT, ERROR_ROWS), "Messages parameters": (MESSAGES, MESSAGE_ROWS)}


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_each_row_is_tried_and_nothing_else(chapter):
    assert list(TABLES[chapter]) == list(CHAPTERS[chapter][1])


@pytest.mark.parametrize("chapter, row", [(chapter, row) for chapter, (_, rows) in CHAPTERS.items() for row in rows])
def test_row(front, chapter, row):
    path, rows = CHAPTERS[chapter]
    if isinstance(rows[row], dict):
        front.passes(path, rows[row])
    else:
        rows[row](front)


def test_routes(front):
    """What the table says yes to is there, what it says no to is not."""
    said = {**TABLES["OpenAI routes"], **TABLES["Anthropic routes"]}
    there = {f"{route.method} {route.path}" for route in routes.ROUTES}
    for row, ours in said.items():
        if row[:4] in ("GET ", "POST"):
            assert (row in there) is ours.startswith("Yes"), row
    for path in ("audio/speech", "images/generations", "files", "batches", "fine_tuning/jobs", "moderations"):
        answer = front.post(f"/v1/{path}")
        assert answer.status == 404 and answer.json()["error"]["type"] == "not_found_error"
    ids = [entry["id"] for entry in front.pair.client().get("/v1/models").json()["data"]]
    assert ids == [MODEL, "vectors"]
