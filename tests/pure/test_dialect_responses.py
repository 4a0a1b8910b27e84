"""OpenAI Responses as tables: a client's body in, the engine's payload out; an engine's chunks in, the client's events out."""
import copy
import gc
import json
import time
import weakref

import hypothesis
import pytest
from hypothesis import strategies as st

from dialects.responses import OWN, Responses
from dialects.responses.custom_input import CustomInput, input_of
from engines.failures import from_engine
from engines.models import Model
from errors import Overloaded, QueueFull, Refusal, UpstreamError, UpstreamTimeout
from support.cuts import cuts, however_cut, pieces
from support.engine import (
    DONE,
    chat_chunks,
    chunk,
    completion,
    died,
    llama_chunks,
    llama_completion,
    sse,
    tokens,
)
from support.openai_schema import event_problems, problems

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
SEALED = {"reasoning": {"summary": "auto"}, "include": [ENCRYPTED]}
PNG = "data:image/png;base64,iVBORw0KGgo="
TOKEN = "ab" * 24
NOW = 1_800_000_000
USAGE = {"input_tokens": 15, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0}, "output_tokens": 9,
         "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 24}
FIGURES = tokens(15, 3, 9, 4)
WEATHER = {"type": "function", "name": "get_weather", "description": "The weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files", "format": {
    "type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
AGENTS = {"type": "namespace", "name": "agents", "description": "Helpers", "tools": [
    {"type": "function", "name": "spawn", "description": "Begins one", "strict": False, "parameters": {"type": "object"}},
    {"type": "custom", "name": "note"}]}
SEARCH = {"type": "web_search", "external_web_access": False}


class Fleet:
    def __init__(self, **model):
        self.model = Model(**{"id": "glm", "engine_id": "engine/model", **model})

    def find(self, name):
        return self.model


class Seal:
    """Not a safe one."""

    def encrypt(self, text):
        return "sealed:" + text[::-1]

    def decrypt(self, sealed):
        return sealed[7:][::-1] if sealed.startswith("sealed:") else None


DIALECT = Responses(lambda: NOW + 0.9, lambda: TOKEN, Seal())


def body_of(input="Hello", **fields):
    return {"input": input, **fields}


def read(body, **model):
    return DIALECT.read(body if isinstance(body, bytes) else json.dumps(body).encode(), Fleet(**model))


def payload(body, **model):
    """What the engine gets, without what is the same in all of it."""
    out = json.loads(b"".join(part.encode() if isinstance(part, str) else part for part in read(body, **model).body))
    assert out.pop("model") == "engine/model"
    return out


def messages(*items, **fields):
    return payload(body_of(list(items), **fields))["messages"]


def refused(body):
    with pytest.raises(Refusal) as caught:
        read(body)
    error = caught.value
    assert (error.status, error.code) == (400, "invalid_request")
    assert json.loads(DIALECT.refusal(error))["error"]["message"] == error.message
    return error


def user(text):
    return {"role": "user", "content": text}


# ---- the request: what it becomes

def test_a_text():
    assert payload(body_of("Hello")) == {"messages": [user("Hello")]}


def test_settings_for_the_engine():
    asked = body_of(
        stream=True, max_output_tokens=50, temperature=0.5, top_p=0.9, parallel_tool_calls=False, top_logprobs=3, user="ann",
        store=True, metadata={"a": "b"}, prompt_cache_key="k", service_tier="flex", truncation="auto", max_tool_calls=3,
        safety_identifier="s", client_metadata={"x": "y"}, include=["file_search_call.results"], background=False,
        stream_options={"include_obfuscation": False}, previous_response_id=None, n=3, top_k=5, chat_template_kwargs={"a": 1},
        context_management=[{"type": "compaction"}], text={"verbosity": "low"})
    assert payload(asked) == {
        "messages": [user("Hello")], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 50,
        "temperature": 0.5, "top_p": 0.9, "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 3, "user": "ann",
        "verbosity": "low", "top_k": 5, "chat_template_kwargs": {"a": 1}}


@pytest.mark.parametrize("effort, kwargs", [
    ("none", {"enable_thinking": False}), ("minimal", {"enable_thinking": False}),
    ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
    ("high", {"enable_thinking": True, "reasoning_effort": "high"}),
    ("xhigh", {"enable_thinking": True, "reasoning_effort": "max"})])
def test_effort(effort, kwargs):
    assert payload(body_of(reasoning={"effort": effort, "summary": "auto"}))["chat_template_kwargs"] == kwargs


def test_the_length_under_its_own_name_counts():
    assert payload(body_of(max_output_tokens=5, max_completion_tokens=7, max_tokens="x")) == {
        "messages": [user("Hello")], "max_tokens": 5}


def test_without_an_effort_the_model_decides():
    assert "chat_template_kwargs" not in payload(body_of(reasoning={"summary": "auto"}))


@pytest.mark.parametrize("form, wanted", [
    ({"type": "text"}, None), ({}, None), ({"type": "json_object"}, {"type": "json_object"}),
    ({"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}},
     {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}})])
def test_form_of_the_text(form, wanted):
    assert payload(body_of(text={"format": form})).get("response_format") == wanted


@pytest.mark.parametrize("include", [[LOGPROBS], [ENCRYPTED, LOGPROBS]])
def test_logprobs_are_asked_for(include):
    out = payload(body_of(include=include))
    assert (out["logprobs"], out["top_logprobs"]) == (True, 0)


# ---- items

def test_a_conversation():
    """As an SDK sends an answer back: its items, with ids and all, and the results."""
    assert messages(
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "system", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sealed:mH", "status": "completed"},
        {"type": "message", "id": "msg_2", "role": "assistant", "status": "completed", "phase": "commentary",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "A", "name": "get_weather", "arguments": '{"city":"Paris"}',
         "status": "completed"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "B", "name": "apply_patch", "input": "*** \"x\"\n"},
        {"type": "function_call_output", "call_id": "A", "output": "19"},
        {"type": "custom_tool_call_output", "call_id": "B", "output": [{"type": "input_text", "text": "a"},
                                                                       {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "It is 19 degrees."},
        {"role": "user", "content": "Thanks"}, instructions="You help.") == [
        {"role": "system", "content": "You help.\n\nBe brief.\n\nBe kind."}, user("Weather?"),
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm", "tool_calls": [
            {"id": "A", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}},
            {"id": "B", "type": "function", "function": {"name": "apply_patch", "arguments": '{"input":"*** \\"x\\"\\n"}'}}]},
        {"role": "tool", "tool_call_id": "A", "content": "19"}, {"role": "tool", "tool_call_id": "B", "content": "a\nb"},
        {"role": "assistant", "content": "It is 19 degrees."}, user("Thanks")]


def test_later_developer_messages_stay_where_they_stand():
    """In front they would make the engine read the whole conversation anew."""
    assert messages(user("a"), {"role": "developer", "content": "b"}, user("c")) == [
        user("a"), {"role": "system", "content": "b"}, user("c")]


REASONED = [
    ({"encrypted_content": "sealed:ba"}, "ab"),
    ({"encrypted_content": "sealed:ba", "summary": [{"type": "summary_text", "text": "other"}]}, "ab"),
    ({"encrypted_content": "gAAAA of somebody else", "content": [{"type": "reasoning_text", "text": "clear"}]}, "clear"),
    ({"content": [{"type": "reasoning_text", "text": "a"}, {"type": "text", "text": "b"}], "summary": []}, "a\nb"),
    ({"content": None, "summary": [{"type": "summary_text", "text": "short"}]}, "short"),
    ({"encrypted_content": "gAAAA of somebody else", "summary": []}, None), ({"summary": []}, None), ({}, None)]


def test_reasoning_comes_back(subtests):
    for item, thought in REASONED:
        with subtests.test(str(item)):
            call = {"type": "function_call", "call_id": "A", "name": "f", "arguments": "{}"}
            turn = messages(user("a"), {"type": "reasoning", "id": "rs_1", **item}, call)[1]
            assert turn.get("reasoning_content") == thought and turn["tool_calls"][0]["id"] == "A"


def test_turns_of_the_model():
    """What belongs together is one message: calls and their thoughts; two answers are two."""
    think = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]}
    say, call = {"role": "assistant", "content": "s"}, {"type": "function_call", "call_id": "A", "name": "f", "arguments": ""}
    out = {"type": "function_call_output", "call_id": "A", "output": "o"}
    shape = lambda *items: [sorted(m) for m in messages(*items) if m["role"] == "assistant"]      # noqa: E731
    assert shape(think, say, call, think, call, out, think, say) == [
        ["content", "reasoning_content", "role", "tool_calls"], ["content", "reasoning_content", "role"]]
    assert shape(say, say) == [["content", "role"]] * 2
    assert shape(think, say, think, say) == [["content", "reasoning_content", "role"]] * 2
    assert messages(call, say, out)[0]["content"] == "s" and messages(think, think)[0]["reasoning_content"] == "t\n\nt"


def test_images():
    parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": PNG, "detail": "low"},
             {"type": "input_image", "image_url": "https://example.net/a.png", "detail": "original"}]
    asked_as_in_chat = [parts[0], {**parts[1], "image_url": {"url": PNG, "detail": "low"}}, parts[2]]
    assert messages({"role": "user", "content": asked_as_in_chat}) == messages({"role": "user", "content": parts})
    assert messages({"role": "user", "content": parts}) == [{"role": "user", "content": [
        {"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://example.net/a.png"}}]}]


def test_images_of_tools_follow_all_results_of_their_turn():
    image = {"type": "input_image", "image_url": PNG}
    shown = {"role": "user", "content": [{"type": "text", "text": "The tool's result holds this:"},
                                         {"type": "image_url", "image_url": {"url": PNG}}]}
    results = [{"type": "function_call_output", "call_id": "A", "output": [{"type": "input_text", "text": "a"}, image]},
               {"type": "function_call_output", "call_id": "B", "output": "b"}]
    wanted = [{"role": "tool", "tool_call_id": "A", "content": "a"}, {"role": "tool", "tool_call_id": "B", "content": "b"}, shown]
    assert messages(*results) == wanted
    assert messages(*results, user("and?")) == [*wanted, user("and?")]


@pytest.mark.parametrize("kind", ["web_search_call", "file_search_call", "mcp_call", "image_generation_call", "compaction"])
def test_traces_of_hosted_tools_are_left_out(kind):
    assert messages(user("a"), {"type": kind, "id": "x_1", "status": "completed"}, user("b")) == [user("a"), user("b")]


# ---- tools

def test_tools_for_the_engine():
    out = payload(body_of(tools=[WEATHER, PATCH, AGENTS, SEARCH, {"type": "mcp", "server_label": "x"}], tool_choice="auto"))
    assert out["tool_choice"] == "auto"
    raw = {"type": "object", "properties": {"input": {"type": "string", "description": "The tool's input, as raw text"}},
           "required": ["input"], "additionalProperties": False}
    assert [tool["function"] for tool in out["tools"]] == [
        {"name": "get_weather", "description": "The weather", "parameters": WEATHER["parameters"], "strict": True},
        {"name": "apply_patch", "parameters": raw,
         "description": "Edits files\n\nThe input must follow this lark grammar:\nstart: /.+/"},
        {"name": "agents__spawn", "description": "Begins one", "parameters": {"type": "object"}},
        {"name": "agents__note", "description": "", "parameters": raw}]


def test_names_that_meet_are_told_apart():
    other = {"type": "function", "name": "agents__spawn", "parameters": None, "strict": None}
    one = read(body_of(tools=[other, AGENTS]))
    assert list(one.extra["response_stream"].options.tools) == ["agents__spawn", "agents__spawn_2", "agents__note"]


def test_a_function_and_a_custom_tool_of_one_name():
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "f"}]
    history = [{"type": "custom_tool_call", "call_id": "A", "name": "f", "input": "x"},
               {"type": "function_call", "call_id": "B", "name": "f", "arguments": "{}"}]
    out = payload(body_of(history, tools=tools, tool_choice={"type": "function", "name": "f"}))
    assert [tool["function"]["name"] for tool in out["tools"]] == ["f", "f_2"]
    assert [one["function"]["name"] for one in out["messages"][0]["tool_calls"]] == ["f_2", "f"]
    assert out["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    found = said(chat_chunks(None, tools=[("f", "{}"), ("f_2", '{"input":"y"}')], usage=FIGURES), tools=tools)[-1]
    assert [one["type"] for one in found["response"][1]] == ["function_call", "custom_tool_call"]


def test_nested_tools_of_chat_clients():
    nested = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    out = payload(body_of(tools=[nested], tool_choice={"type": "function", "function": {"name": "f"}}))
    assert out["tools"][0]["function"]["name"] == "f" and out["tool_choice"] == {"type": "function", "function": {"name": "f"}}


def test_calls_in_the_history_have_the_engine_s_names():
    call = {"type": "function_call", "call_id": "A", "name": "spawn", "namespace": "agents", "arguments": "{}"}
    note = {"type": "custom_tool_call", "call_id": "B", "name": "note", "namespace": "agents", "input": "n"}
    gone = {"type": "function_call", "call_id": "C", "name": "x", "namespace": "y", "arguments": "{}"}
    turn = messages(call, note, gone, tools=[AGENTS])[0]
    assert [one["function"]["name"] for one in turn["tool_calls"]] == ["agents__spawn", "agents__note", "y__x"]


NAMED = {"type": "function", "function": {"name": "get_weather"}}


CHOICES = [
    (None, "auto", 4), ("auto", "auto", 4), ("none", "none", 4), ("required", "required", 4),
    ({"type": "function", "name": "get_weather"}, NAMED, 4),
    ({"type": "custom", "name": "apply_patch"}, {"type": "function", "function": {"name": "apply_patch"}}, 4),
    ({"type": "function", "name": "spawn", "namespace": "agents"},
     {"type": "function", "function": {"name": "agents__spawn"}}, 4),
    ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}, "required", 1),
    ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "agents"}, SEARCH]}, "auto", 2),
    ({"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "custom", "name": "note", "namespace": "agents"}, *[{"type": "namespace", "name": "agents"}] * 2]}, "auto", 2),
    ({"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "spawn", "namespace": "x"}, {"type": "function", "name": ["spawn"]}, {"type": "namespace"},
        {"type": "function", "name": "spawn", "namespace": {}}, {"type": "function", "name": "unknown"}]}, None, 0)]


def test_tool_choice(subtests):
    for choice, wanted, names in CHOICES:
        with subtests.test(str(choice)):
            out = payload(body_of(tools=[WEATHER, PATCH, AGENTS], tool_choice=choice))
            assert (out.get("tool_choice"), len(out.get("tools", []))) == (wanted, names)


def test_a_choice_without_tools_is_dropped():
    for choice in ("auto", "none", None):
        for tool in (SEARCH, {**AGENTS, "tools": [SEARCH]}):
            assert payload(body_of(tools=[tool], tool_choice=choice)) == {"messages": [user("Hello")]}


# ---- what is refused

def item(**fields):
    return body_of([fields])


def part(**fields):
    return body_of([{"role": "user", "content": [fields]}])


REFUSED = [
    ({}, "input", "input is missing"), (body_of(None), "input", "input is missing"), (body_of([]), "input", "at least one"),
    (body_of(5), "input", "must be a text or a list"), (body_of({}), "input", "must be a text or a list"),
    (body_of([{"type": "web_search_call"}, {"type": "reasoning", "summary": []}]), "input", "holds nothing"),
    (body_of(["a"]), "input", "input[0] must be an object"), (item(), "input", "must have a type"),
    (item(type=5), "input", "must be an object with a type"), (item(type="odd"), "input", "holds nothing"),
    (item(type="item_reference", id="msg_1"), "input", "nothing is stored here"),
    (item(id="msg_1"), "input", "nothing is stored"),
    (item(role="tool", content="a"), "input", "input[0].role must be one of user"), (item(role=None), "input", "role must be"),
    (item(role="user"), "input", "input[0].content must be"), (item(role="user", content=[5]), "input", "content[0] must be"),
    (part(type=["input_text"], text="a"), "input", "content[0] must be"), (part(type={}), "input", "content[0] must be"),
    (part(type="input_file", file_id="f"), "input", "files are not supported"),
    (part(type="input_audio"), "input", "audio is not supported"), (part(type="odd"), "input", "'odd' is unknown"),
    (part(type="input_text"), "input", "content[0].text must be a text"),
    (part(type="input_image", file_id="f"), "input", "no files are stored here"),
    (part(type="input_image", image_url="file:///etc/passwd"), "input", "must be a data URL"),
    (part(type="input_image", image_url=5), "input", "image_url must be"),
    (body_of([{"role": "system", "content": [{"type": "input_image", "image_url": PNG}]}]), "input", "holds an image"),
    (item(type="function_call", name="f", arguments="{}"), "input", "call_id must be a text"),
    (item(type="function_call", call_id="A", arguments="{}"), "input", "name must be a text"),
    (item(type="compaction_trigger"), "input", "holds nothing"),
    (body_of(instructions=["a"]), "instructions", "must be a text"),
    (body_of(previous_response_id="resp_1"), "previous_response_id", "nothing is stored here"),
    (body_of(conversation={"id": "c"}), "conversation", "nothing is stored here"),
    (body_of(background=True), "background", "nothing is stored here"), (body_of(prompt={"id": "p"}), "prompt", "not stored"),
    (body_of(stream="yes"), "stream", "true or false"), (body_of(stream_options=[]), "stream_options", "an object"),
    (body_of(store="no"), "store", "true or false"), (body_of(model=5), "model", "a text"),
    (body_of(max_output_tokens=0), "max_output_tokens", "positive"),
    (body_of(max_output_tokens=True), "max_output_tokens", "posi"),
    (body_of(max_output_tokens=1.5), "max_output_tokens", "positive"), (body_of(temperature=3), "temperature", "from 0 to 2"),
    (body_of(temperature="1"), "temperature", "a number"), (body_of(top_p=True), "top_p", "from 0 to 1"),
    (body_of(top_logprobs=21), "top_logprobs", "from 0 to 20"), (body_of(max_tool_calls=-1), "max_tool_calls", "whole number"),
    (body_of(include="a"), "include", "a list of texts"), (body_of(include=[1]), "include", "a list of texts"),
    (body_of(metadata={"a": 1}), "metadata", "must hold texts"), (body_of(metadata=[]), "metadata", "an object of texts"),
    (body_of(metadata={str(n): "" for n in range(17)}), "metadata", "more than 16"), (body_of(user=5), "user", "a text"),
    (body_of(prompt_cache_key="x" * 513), "prompt_cache_key", "512"), (body_of(service_tier="gold"), "service_tier", "one of"),
    (body_of(truncation=True), "truncation", "one of: auto"), (body_of(reasoning="high"), "reasoning", "an object"),
    (body_of(reasoning={"effort": "huge"}), "reasoning.effort", "one of: none"),
    (body_of(reasoning={"effort": 5}), "reasoning.effort", "a text"),
    (body_of(reasoning={"summary": "long"}), "reasoning.summary", "one of: auto"), (body_of(text="a"), "text", "an object"),
    (body_of(text={"verbosity": "loud"}), "text.verbosity", "one of: low"),
    (body_of(text={"format": {"type": "xml"}}), "text.format.type", "one of: text"),
    (body_of(text={"format": {"type": "json_schema", "name": "n"}}), "text.format.schema", "missing"),
    (body_of(text={"format": {"type": "json_schema", "schema": {}}}), "text.format.name", "missing"),
    (body_of(tools={}), "tools", "must be a list"), (body_of(tools=[5]), "tools", "tools[0] must be an object"),
    (body_of(tools=[{"name": "f"}]), "tools", "with a type"), (body_of(tools=[{"type": "function"}]), "tools", "needs a name"),
    (body_of(tools=[{**WEATHER, "parameters": []}]), "tools", "parameters must be a JSON schema"),
    (body_of(tools=[{**WEATHER, "strict": 1}]), "tools", "strict must be"),
    (body_of(tools=[{**WEATHER, "description": 1}]), "tools", "description must be"),
    (body_of(tools=[{**PATCH, "format": {"type": "grammar"}}]), "tools", "format must be"),
    (body_of(tools=[{"type": "namespace", "name": "a", "tools": 5}]), "tools", "tools[0].tools must be a list"),
    (body_of(tools=[{"type": "namespace", "name": "a", "tools": [5]}]), "tools", "tools[0].tools[0] must be an object"),
    (body_of(tool_choice="any"), "tool_choice", "one of none"), (body_of(tool_choice=5), "tool_choice", "must be a word"),
    (body_of(tool_choice="required"), "tool_choice", "no function or custom tool"),
    (body_of(tools=[SEARCH], tool_choice="required"), "tool_choice", "no function or custom tool"),
    (body_of(tools=[SEARCH], tool_choice={"type": "web_search"}), "tool_choice", "runs on OpenAI's side"),
    (body_of(tools=[WEATHER], tool_choice={"type": "function", "name": "x"}), "tool_choice", "not in tools"),
    (body_of(tools=[WEATHER], tool_choice={"type": "custom", "name": "get_weather"}), "tool_choice", "not in tools"),
    (body_of(tools=[WEATHER], tool_choice={"type": "allowed_tools", "mode": "any", "tools": []}), "tool_choice", "mode"),
    (body_of(tools=[WEATHER], tool_choice={"type": "allowed_tools", "mode": "required", "tools": []}), "tool_choice", "requires"),
    (body_of(parallel_tool_calls=1), "parallel_tool_calls", "true or false"),
]


def test_bad_requests(subtests):
    for body, param, words in REFUSED:
        with subtests.test(json.dumps(body)[:80]):
            error = refused(body)
            assert (error.param, words in error.message) == (param, True), error.message


def test_bodies_that_are_no_object(subtests):
    for body in [b"", b"[]", b"{", b'{"input":"\xff"}', b'{"input":NaN}', b"[" * 100_000]:
        with subtests.test(str(body[:20])):
            assert refused(body).param is None


def test_deep_nesting_is_read_or_refused(subtests):
    for depth in [200, 254, 300, 900, 1000, 1024, 2000]:
        with subtests.test(depth):
            for body in (body_of(tools=[{**WEATHER, "parameters": {"a": "DEEP"}}]), body_of(odd="DEEP"),
                         body_of(text={"format": {"type": "json_schema", "name": "n", "schema": {"a": "DEEP"}}})):
                try:
                    read(json.dumps(body).replace('"DEEP"', "[" * depth + "]" * depth).encode())
                except Refusal as error:
                    assert error.status == 400


def test_the_engine_s_fields_have_the_client_s_names():
    too_long = from_engine(400, {"error": {"message": "This model's maximum context length is 10", "param": None}})
    assert json.loads(DIALECT.refusal(too_long))["error"]["param"] == "input"


KINDS = st.sampled_from(["user", "assistant", "message", "function", "custom", "namespace", "reasoning", "auto", "function_call",
                         "function_call_output", "input_text", "input_image", "allowed_tools", PNG])
NAMES = st.sampled_from(["type", "role", "content", "text", "name", "tools", "call_id", "output", "arguments", "input", "id",
                         "summary", "format", "mode", "image_url", "encrypted_content", "namespace", "parameters", "strict",
                         "schema", "effort", "url"])
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8), KINDS)
ODD = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5), max_leaves=12)
FIELDS = [*OWN, "model", "temperature", "top_p", "parallel_tool_calls", "user", "chat_template_kwargs", "frequency_penalty"]


@hypothesis.given(st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=5), st.lists(ODD, max_size=3), st.lists(ODD, max_size=3))
def test_any_json_is_read_or_refused(fields, items, tools):
    for body in (fields, {"input": items, "tools": tools, **fields}, {"input": "Hello", **fields, "tools": tools}):
        try:
            one = read({name: value for name, value in body.items() if not name.startswith("previous")})
        except Refusal as error:
            assert error.status == 400 and error.message and error.param
            continue
        response = json.loads(DIALECT.write(completion(), one)[0])
        assert problems("Response", response) == []


RICH = body_of([
    {"type": "message", "id": "m", "role": "developer", "content": [{"type": "input_text", "text": "a"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG, "detail": "low"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "sealed:x"},
    {"role": "assistant", "content": "b"}, {"type": "function_call", "call_id": "A", "name": "get_weather", "arguments": "{}"},
    {"type": "custom_tool_call", "call_id": "B", "name": "note", "namespace": "agents", "input": "i"},
    {"type": "function_call_output", "call_id": "A", "output": "o"},
    {"type": "custom_tool_call_output", "call_id": "B", "output": [{"type": "input_image", "image_url": PNG}]}],
    tools=[WEATHER, PATCH, AGENTS, SEARCH], include=[ENCRYPTED], reasoning={"effort": "low", "summary": "auto"}, temperature=1,
    tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}, user="u",
    text={"verbosity": "low", "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
    metadata={"a": "b"}, instructions="i", max_output_tokens=5, top_logprobs=1, parallel_tool_calls=True, truncation="auto")


def places(value):
    """(container, key) of everything inside a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


@hypothesis.settings(max_examples=2 * hypothesis.settings.default.max_examples)
@hypothesis.given(st.integers(0, len(list(places(RICH))) - 1), ODD, st.booleans())
def test_a_good_request_with_one_odd_place_is_read_or_refused(at, odd, gone):
    body = copy.deepcopy(RICH)
    container, key = list(places(body))[at]
    if gone:
        del container[key]
    else:
        container[key] = odd
    try:
        one = read(body)
    except Refusal as error:
        assert error.status == 400 and error.message and error.param
    else:
        assert problems("Response", json.loads(DIALECT.write(completion(), one)[0])) == []


# ---- events

def fed(arrived, **fields):
    """(the stream, its events before the last one) of a request with these fields, for these pieces of the engine's bytes."""
    stream = read(body_of(stream=True, **fields)).stream
    return stream, b"".join(map(stream.feed, arrived))


def whole(arrived, **fields):
    stream, out = fed(arrived, **fields)
    return out + stream.end()


def events_of(out):
    """The events as objects; each is valid by OpenAI's schema, named like its type, and counted."""
    found = []
    for number, block in enumerate(out.decode().split("\n\n")[:-1]):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}" and event_problems(value) == [], value
        assert value.pop("sequence_number") == number
        found.append(value)
    return found


def said(chunks, **fields):
    """All events of a whole stream, however it is cut; those with a Response hold its status and output only."""
    return list(map(short, events_of(however_cut(b"".join(chunks), lambda arrived: whole(arrived, **fields)))))


def short(value):
    if "response" in value:
        response = value["response"]
        value = {**value, "response": (response["status"], response["output"])}
    return value | {"type": value["type"].removeprefix("response.")}


def response(status, *output):
    return {"type": status, "response": (status, list(output))}


BEGIN = [response("in_progress") | {"type": "created"}, response("in_progress")]


def ident(prefix, index):
    return f"{prefix}_{TOKEN}{index:02x}"


def whole_message(text, index=0, status="completed", logprobs=()):
    return {"id": ident("msg", index), "type": "message", "status": status, "role": "assistant",
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}]}


def message_events(*deltas, index=0, status="completed"):
    place, first = {"item_id": ident("msg", index), "output_index": index}, {"content_index": 0}
    text, empty = "".join(deltas), {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return [
        {"type": "output_item.added", "output_index": index, "item": {**whole_message("", index, "in_progress"), "content": []}},
        {"type": "content_part.added", **place, **first, "part": empty},
        *({"type": "output_text.delta", **place, **first, "delta": delta, "logprobs": []} for delta in deltas),
        {"type": "output_text.done", **place, **first, "text": text, "logprobs": []},
        {"type": "content_part.done", **place, **first, "part": {**empty, "text": text}},
        {"type": "output_item.done", "output_index": index, "item": whole_message(text, index, status)}]


def whole_thought(text, index=0, status="completed", summary=False, sealed=False):
    return {"id": ident("rs", index), "type": "reasoning", "status": status,
            "content": [{"type": "reasoning_text", "text": text}], "summary": [{"type": "summary_text", "text": text}] * summary,
            **({"encrypted_content": "sealed:" + text[::-1]} if sealed else {})}


def thought_events(*deltas, index=0, status="completed"):
    place = {"item_id": ident("rs", index), "output_index": index, "content_index": 0}
    text, part = "".join(deltas), {"type": "reasoning_text", "text": ""}
    begun = {**whole_thought("", index, "in_progress"), "content": []}
    return [
        {"type": "output_item.added", "output_index": index, "item": begun},
        {"type": "content_part.added", **place, "part": part},
        *({"type": "reasoning_text.delta", **place, "delta": delta} for delta in deltas),
        {"type": "reasoning_text.done", **place, "text": text},
        {"type": "content_part.done", **place, "part": {**part, "text": text}},
        {"type": "output_item.done", "output_index": index, "item": whole_thought(text, index, status)}]


def whole_call(name, arguments, call_id, index=0, status="completed", **more):
    return {"id": ident("fc", index), "type": "function_call", "status": status, "call_id": call_id, "name": name,
            "arguments": arguments, **more}


def call_events(name, *deltas, call_id, index=0, status="completed", **more):
    place, text = {"item_id": ident("fc", index), "output_index": index}, "".join(deltas)
    return [
        {"type": "output_item.added", "output_index": index, "item": whole_call(name, "", call_id, index, "in_progress", **more)},
        *({"type": "function_call_arguments.delta", **place, "delta": delta} for delta in deltas),
        {"type": "function_call_arguments.done", **place, "name": name, "arguments": text},
        {"type": "output_item.done", "output_index": index, "item": whole_call(name, text, call_id, index, status, **more)}]


def whole_custom(name, text, call_id, index=0, status="completed", **more):
    return {"id": ident("ctc", index), "type": "custom_tool_call", "status": status, "call_id": call_id, "name": name,
            "input": text, **more}


def custom_events(name, *deltas, call_id, index=0, status="completed", **more):
    place, text = {"item_id": ident("ctc", index), "output_index": index}, "".join(deltas)
    return [
        {"type": "output_item.added", "output_index": index,
         "item": whole_custom(name, "", call_id, index, "in_progress", **more)},
        *({"type": "custom_tool_call_input.delta", **place, "delta": delta} for delta in deltas),
        {"type": "custom_tool_call_input.done", **place, "input": text},
        {"type": "output_item.done", "output_index": index, "item": whole_custom(name, text, call_id, index, status, **more)}]


def called(*calls, finish="tool_calls", usage=FIGURES):
    """vLLM's chunks for calls [(id, name, parts of arguments)]."""
    out = [sse(chunk({"role": "assistant", "content": ""}))]
    for n, (call_id, name, parts) in enumerate(calls):
        out.append(sse(chunk({"tool_calls": [{"id": call_id, "type": "function", "index": n, "function": {"name": name}}]})))
        out += [sse(chunk({"tool_calls": [{"index": n, "function": {"arguments": piece}}]})) for piece in parts]
    return [*out, sse(chunk({}, finish)), sse({"choices": [], "usage": usage}), DONE]


TRICKY = ['Say "hi"\n', "\\ ü 🌍", " \u2028\x7f</think>", "\t"]
TABLE = {
    "text": (chat_chunks(["Hello", " there"], usage=FIGURES), {}, [
        *BEGIN, *message_events("Hello", " there"), response("completed", whole_message("Hello there"))]),
    "any text": (chat_chunks(TRICKY, usage=FIGURES), {}, [
        *BEGIN, *message_events(*TRICKY), response("completed", whole_message("".join(TRICKY)))]),
    "reasoning + text": (chat_chunks("Hello", reasoning=["Let", " me"], usage=FIGURES), {}, [
        *BEGIN, *thought_events("Let", " me"), *message_events("Hello", index=1),
        response("completed", whole_thought("Let me"), whole_message("Hello", 1))]),
    "one call": (called(("A", "get_weather", ['{"ci', 'ty":"Paris"}'])), {"tools": [WEATHER]}, [
        *BEGIN, *call_events("get_weather", '{"ci', 'ty":"Paris"}', call_id="A"),
        response("completed", whole_call("get_weather", '{"city":"Paris"}', "A"))]),
    "two calls": (called(("A", "get_weather", ['{"city":"Paris"}']), ("B", "get_weather", ["{}"])), {"tools": [WEATHER]}, [
        *BEGIN, *call_events("get_weather", '{"city":"Paris"}', call_id="A"),
        *call_events("get_weather", "{}", call_id="B", index=1),
        response("completed", whole_call("get_weather", '{"city":"Paris"}', "A"), whole_call("get_weather", "{}", "B", 1))]),
    "a forced call": (called(("A", "get_weather", ["{}"]), finish="stop"),
                      {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "get_weather"}}, [
        *BEGIN, *call_events("get_weather", "{}", call_id="A"), response("completed", whole_call("get_weather", "{}", "A"))]),
    "a call without arguments": (called(("A", "get_weather", [])), {"tools": [WEATHER]}, [
        *BEGIN, *call_events("get_weather", "{}", call_id="A"), response("completed", whole_call("get_weather", "{}", "A"))]),
    "a call in a namespace": (called(("A", "agents__spawn", ["{}"])), {"tools": [AGENTS]}, [
        *BEGIN, *call_events("spawn", "{}", call_id="A", namespace="agents"),
        response("completed", whole_call("spawn", "{}", "A", namespace="agents"))]),
    "a custom tool": (called(("A", "apply_patch", ['{"inp', 'ut": "*** Be', 'gin\\', 'n+\\"é\\u00', 'e9"', "}"])),
                      {"tools": [PATCH]}, [
        *BEGIN, *custom_events("apply_patch", "*** Be", "gin", '\n+"é', "é", call_id="A"),
        response("completed", whole_custom("apply_patch", '*** Begin\n+"éé', "A"))]),
    "a custom tool in a namespace": (called(("A", "agents__note", ['{"input":"n"}'])), {"tools": [AGENTS]}, [
        *BEGIN, *custom_events("note", "n", call_id="A", namespace="agents"),
        response("completed", whole_custom("note", "n", "A", namespace="agents"))]),
    "a custom tool in another form": (called(("A", "apply_patch", ['{"pat', 'ch": "*** x"}'])), {"tools": [PATCH]}, [
        *BEGIN, *custom_events("apply_patch", "*** x", call_id="A"),
        response("completed", whole_custom("apply_patch", "*** x", "A"))]),
    "length": (chat_chunks("Hello", finish="length", usage=FIGURES), {}, [
        *BEGIN, *message_events("Hello", status="incomplete"), response("incomplete", whole_message("Hello", 0, "incomplete"))]),
    "length while thinking": (chat_chunks(None, reasoning=["Let"], finish="length", usage=FIGURES), {}, [
        *BEGIN, *thought_events("Let", status="incomplete"), response("incomplete", whole_thought("Let", 0, "incomplete"))]),
    "length in a call": (called(("A", "get_weather", ['{"ci']), finish="length"), {"tools": [WEATHER]}, [
        *BEGIN, *call_events("get_weather", '{"ci', call_id="A", status="incomplete"),
        response("incomplete", whole_call("get_weather", '{"ci', "A", 0, "incomplete"))]),
    "length before the arguments": (called(("A", "get_weather", []), finish="length"), {"tools": [WEATHER]}, [
        *BEGIN, *call_events("get_weather", call_id="A", status="incomplete"),
        response("incomplete", whole_call("get_weather", "", "A", 0, "incomplete"))]),
    "length in a custom tool": (called(("A", "apply_patch", ['{"input": "*** \\u00']), finish="length"), {"tools": [PATCH]}, [
        *BEGIN, *custom_events("apply_patch", "*** ", call_id="A", status="incomplete"),
        response("incomplete", whole_custom("apply_patch", "*** ", "A", 0, "incomplete"))]),
    "a filter": (chat_chunks("Hello", finish="content_filter", usage=FIGURES), {}, [
        *BEGIN, *message_events("Hello", status="incomplete"), response("incomplete", whole_message("Hello", 0, "incomplete"))]),
    "nothing": (chat_chunks("", usage=FIGURES), {}, [*BEGIN, response("completed")]),
    "an odd end": (chat_chunks("Hello", finish=5, usage=FIGURES), {}, [
        *BEGIN, *message_events("Hello"), response("completed", whole_message("Hello"))]),
    "a line end before a call": (
        [*chat_chunks(["\n"], reasoning=["Hm"], done=False)[:-1], *called(("A", "get_weather", ["{}"]))], {"tools": [WEATHER]}, [
            *BEGIN, *thought_events("Hm"), *call_events("get_weather", "{}", call_id="A", index=1),
            response("completed", whole_thought("Hm"), whole_call("get_weather", "{}", "A", 1))]),
    "line ends alone": (chat_chunks(["\n", "\n"], usage=FIGURES), {}, [
        *BEGIN, *message_events("\n\n"), response("completed", whole_message("\n\n"))]),
    "a line end after thoughts in between": (
        [*chat_chunks("a", reasoning=["b"], done=False)[:-1], *chat_chunks(["\n", "c"], reasoning=["d"], usage=FIGURES)[1:]], {}, [
            *BEGIN, *thought_events("b"), *message_events("a", index=1), *thought_events("d", index=2),
            *message_events("\nc", index=3), response("completed", whole_thought("b"), whole_message("a", 1),
                                                      whole_thought("d", 2), whole_message("\nc", 3))]),
    "leaked thinking": (chat_chunks(["<thi", "nk>Hm</think>\n\nHello"], usage=FIGURES), {}, [
        *BEGIN, *thought_events("Hm"), *message_events("Hello", index=1),
        response("completed", whole_thought("Hm"), whole_message("Hello", 1))]),
    "thoughts between": ([*chat_chunks("a", reasoning=["b"], done=False)[:-1],
                          *chat_chunks("c", reasoning=["d"], usage=FIGURES)], {}, [
        *BEGIN, *thought_events("b"), *message_events("a", index=1), *thought_events("d", index=2), *message_events("c", index=3),
        response("completed", whole_thought("b"), whole_message("a", 1), whole_thought("d", 2), whole_message("c", 3))]),
}


@pytest.mark.parametrize("case", TABLE)
def test_events(case):
    chunks, fields, wanted = TABLE[case]
    assert said(chunks, **fields) == wanted


@hypothesis.given(st.sampled_from(sorted(TABLE)), st.data())
def test_any_cuts(case, data):
    chunks, fields, _ = TABLE[case]
    sent = b"".join(chunks)
    assert whole(pieces(sent, data.draw(cuts(sent))), **fields) == whole([sent], **fields)


def test_refusals():
    chunks = [sse(chunk({"role": "assistant", "content": ""})), sse(chunk({"refusal": "I "})), sse(chunk({"refusal": "won't."})),
              sse(chunk({}, "stop")), DONE]
    place = {"item_id": ident("msg", 0), "output_index": 0, "content_index": 0}
    whole = {"id": ident("msg", 0), "type": "message", "status": "completed", "role": "assistant",
             "content": [{"type": "refusal", "refusal": "I won't."}]}
    assert said(chunks) == [
        *BEGIN, {"type": "output_item.added", "output_index": 0, "item": {**whole, "status": "in_progress", "content": []}},
        {"type": "content_part.added", **place, "part": {"type": "refusal", "refusal": ""}},
        {"type": "refusal.delta", **place, "delta": "I "}, {"type": "refusal.delta", **place, "delta": "won't."},
        {"type": "refusal.done", **place, "refusal": "I won't."},
        {"type": "content_part.done", **place, "part": {"type": "refusal", "refusal": "I won't."}},
        {"type": "output_item.done", "output_index": 0, "item": whole}, response("completed", whole)]


def test_a_summary_is_the_same_text_in_both_forms():
    """Codex shows the one, other clients the other."""
    place = {"item_id": ident("rs", 0), "output_index": 0}
    content, summary = {**place, "content_index": 0}, {**place, "summary_index": 0}
    whole = whole_thought("Let me", summary=True, sealed=True)
    text, short_text = {"type": "reasoning_text", "text": "Let me"}, {"type": "summary_text", "text": "Let me"}
    begun = {"id": whole["id"], "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    assert said(chat_chunks("Hello", reasoning=["Let", " me"], usage=FIGURES), **SEALED) == [
        *BEGIN, {"type": "output_item.added", "output_index": 0, "item": begun},
        {"type": "content_part.added", **content, "part": {**text, "text": ""}},
        {"type": "reasoning_summary_part.added", **summary, "part": {**short_text, "text": ""}},
        *(event for delta in ("Let", " me") for event in (
            {"type": "reasoning_text.delta", **content, "delta": delta},
            {"type": "reasoning_summary_text.delta", **summary, "delta": delta})),
        {"type": "reasoning_text.done", **content, "text": "Let me"}, {"type": "content_part.done", **content, "part": text},
        {"type": "reasoning_summary_text.done", **summary, "text": "Let me"},
        {"type": "reasoning_summary_part.done", **summary, "part": short_text},
        {"type": "output_item.done", "output_index": 0, "item": whole}, *message_events("Hello", index=1),
        response("completed", whole, whole_message("Hello", 1))]


def test_logprobs():
    def logprobs(*given):
        top = [{"token": "x", "logprob": -2.5, "bytes": [120]}]
        return {"content": [{"token": token, "logprob": -1.5, "bytes": list(token.encode()), "top_logprobs": top}
                            for token in given]}

    chunks = [chunk({"role": "assistant", "content": ""}), chunk({"reasoning": "Ok"}), chunk({}), chunk({"content": "Yes "}),
              chunk({"content": "indeed"}), chunk({}, "stop")]
    for one, given in zip(chunks[1:], (["Ok"], ["</think>"], ["Yes", " "], ["indeed"], ["<|user|>"]), strict=True):
        one["choices"][0]["logprobs"] = logprobs(*given)
    asked = {"include": [LOGPROBS], "top_logprobs": 1}
    events = said([*map(sse, chunks), DONE], **asked)
    assert [[token["token"] for token in event["logprobs"]] for event in events if event["type"] == "output_text.delta"] == [
        ["Yes", " "], ["indeed"]]
    whole = events[-1]["response"][1][-1]["content"][0]["logprobs"]
    assert whole == logprobs("Yes", " ", "indeed")["content"]
    plain = completion("Yes indeed", reasoning="Ok")
    plain["choices"][0]["logprobs"] = logprobs("Ok", "</think>", "Yes", " ", "indeed", "<|user|>")
    assert json.loads(DIALECT.write(plain, read(body_of(**asked)))[0])["output"][1]["content"][0]["logprobs"] == whole


def piece(index, function, **more):
    """A chunk with a piece of a call."""
    return sse(chunk({"tool_calls": [{"index": index, "function": function, **more}]}))


def test_engines_that_mix_their_calls():
    """Pieces of an earlier call after a later one has begun: it stays open until it is whole."""
    chunks = [piece(0, {"name": "f", "arguments": '{"a'}, id="A"), piece(1, {"name": "g", "arguments": "{"}, id="B"),
              piece(0, {"arguments": '":1}'}), piece(1, {"arguments": "}"}), sse(chunk({}, "tool_calls")), DONE]
    found = said(chunks)
    assert found[-1] == response("completed", whole_call("f", '{"a":1}', "A"), whole_call("g", "{}", "B", 1))
    check_order(found)


def test_more_of_a_call_that_was_whole():
    chunks = [piece(0, {"name": "f", "arguments": "{}"}, id="A"), piece(1, {"name": "g", "arguments": "{"}, id="B"),
              piece(0, {"arguments": "x"}), piece(1, {"arguments": "}"}), sse(chunk({}, "tool_calls")), DONE]
    assert said(chunks)[-1] == response("completed", whole_call("f", "{}", "A"), whole_call("g", "{}", "B", 1))


def test_one_id_for_two_calls():
    chunks = [piece(0, {"name": "f", "arguments": '{"a":1}'}, id="A"), piece(1, {"name": "f", "arguments": '{"a"'}, id="A"),
              piece(1, {"arguments": ":2}"}, id="A"), sse(chunk({}, "tool_calls")), DONE]
    made = "call_chatcmpl-a4d799bba2c27bd4_1"
    assert said(chunks)[-1] == response(
        "completed", whole_call("f", '{"a":1}', "A"), whole_call("f", '{"a":2}', made, 1))


def test_only_one_of_several_choices():
    chunks = [sse(chunk({"content": text}, index=index)) for index, text in enumerate(("He", "Good", "bye"))]
    chunks += [sse(chunk({"content": "llo"})), *(sse(chunk({}, "stop", index=index)) for index in (2, 1, 0)), DONE]
    assert said(chunks)[-1] == response("completed", whole_message("Hello"))


def test_line_ends_without_end():
    """A model in a loop gives tens of thousands, after a call for example: each is looked at once."""
    stream, _ = fed(chat_chunks("a", tools=[("f", "{}")])[:-2])
    begin = time.process_time()
    assert stream.feed(sse(chunk({"content": "\n"})) * 30_000) == b""
    assert time.process_time() - begin < 3              # it was 8
    assert rb"\n" * 30_000 + b"b" in stream.feed(sse(chunk({"content": "b"})))


def test_a_name_that_comes_late():
    chunks = [piece(0, {"arguments": "{"}, id="A"), piece(0, {"name": "f", "arguments": "}"}), sse(chunk({}, "tool_calls")), DONE]
    assert said(chunks) == [*BEGIN, *call_events("f", "{}", call_id="A"), response("completed", whole_call("f", "{}", "A"))]


def check_order(events):
    """Each item is added once, then its deltas, then done once; what was said adds up."""
    output, texts = events[-1]["response"][1], {}
    for index, one in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert [event["type"] for event in (own[0], own[-1])] == ["output_item.added", "output_item.done"]
        assert sum(event["type"].startswith("output_item") for event in own) == 2 and own[-1]["item"] == one
        assert {event.get("item_id", one["id"]) for event in own} == {one["id"]}
        for event in own:
            name = event["type"].rpartition(".")[0]
            if event["type"].endswith(".delta"):
                texts[index, name] = texts.get((index, name), "") + event["delta"]
            elif event["type"].endswith(".done") and (index, name) in texts:
                assert texts[index, name] in event.values()
    assert [event["type"] for event in events[:2]] == ["created", "in_progress"]
    assert sum("response" in event for event in events) == 3


WORDS = st.text(max_size=5)
CALLED = st.fixed_dictionaries({
    "index": st.integers(0, 2), "function": st.fixed_dictionaries(
        {"arguments": WORDS | st.sampled_from(['{"input":"', '{"in', "\\", "\\ud83d", "\\ude00", '"}', "{}"])},
        optional={"name": st.sampled_from(["get_weather", "apply_patch", "agents__spawn", "unknown"])})})
DELTAS = st.one_of(*(st.fixed_dictionaries(fields) for fields in (
    {"content": WORDS}, {"reasoning": WORDS}, {"refusal": WORDS}, {"reasoning": WORDS, "content": WORDS},
    {"tool_calls": st.lists(CALLED, min_size=1, max_size=1)})))
FINISHES = st.sampled_from(["stop", "length", "tool_calls", "content_filter"])


@hypothesis.given(st.lists(DELTAS, max_size=8), FINISHES, st.data())
def test_whatever_comes_the_events_are_in_order(deltas, finish, data):
    sent = b"".join([*(sse(chunk(delta)) for delta in deltas), sse(chunk({}, finish)), DONE])
    asked = {"tools": [WEATHER, PATCH, AGENTS], **SEALED}
    out = whole([sent], **asked)
    check_order(list(map(short, events_of(out))))
    assert whole(pieces(sent, data.draw(cuts(sent))), **asked) == out


VALUE = st.one_of(st.none(), st.booleans(), st.integers(-1, 3), st.text(max_size=3), st.just([0]), st.just([]), st.just({}))
FUNCTION = st.fixed_dictionaries({}, optional={"name": VALUE, "arguments": VALUE | st.just({"a": 1})})
CALL = st.fixed_dictionaries({}, optional={"id": VALUE, "index": VALUE, "function": FUNCTION | VALUE})
DELTA = st.fixed_dictionaries({}, optional={"content": VALUE, "reasoning": VALUE, "reasoning_content": VALUE, "refusal": VALUE,
                                            "tool_calls": st.lists(CALL | VALUE, max_size=3) | VALUE, "role": VALUE})
CHOICE = st.fixed_dictionaries({}, optional={
    "delta": DELTA | VALUE, "index": VALUE, "finish_reason": VALUE | st.just("stop"),
    "logprobs": st.just({"content": [{"token": 5, "top_logprobs": [5, {}]}, 7]}) | VALUE})
ODD_USAGE = st.fixed_dictionaries({}, optional=dict.fromkeys(
    ("prompt_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details"), VALUE))


@hypothesis.given(st.lists(st.fixed_dictionaries({"choices": st.lists(CHOICE | VALUE, max_size=2) | VALUE},
                                                 optional={"usage": ODD_USAGE | VALUE}), max_size=4), st.booleans())
def test_odd_chunks_break_nothing_of_ours(chunks, ends):
    stream, out = fed([*map(sse, chunks), *([sse(chunk({}, "stop"))] if ends else []), DONE], include=[LOGPROBS])
    try:
        out += stream.end()
    except UpstreamError as error:
        out += stream.fail(error)
    check_order(list(map(short, events_of(out))))


# ---- failures

def failed(stream, out, error):
    last = stream.fail(error)
    *_, value = events_of(out + last)
    assert value["type"] == "response.failed" and value["response"]["status"] == "failed"
    return value["response"]


CODES = [(UpstreamError("gone"), "server_error"), (UpstreamTimeout("silent"), "server_error"),
         (Overloaded("full"), "server_error"), (QueueFull("many"), "rate_limit_exceeded"),
         (Refusal("bad image", "input"), "invalid_prompt")]


def test_failure_at_each_stage(subtests):
    for error, code in CODES:
        for count in range(8):
            with subtests.test(type(error).__name__, count=count):
                chunks = chat_chunks("Hello there", reasoning="Let me", usage=FIGURES)
                stream, out = fed(chunks[:count])
                if count < 6:
                    with pytest.raises(UpstreamError):
                        stream.end()
                response = failed(stream, out, error)
                assert response["error"] == {"code": code, "message": error.message}
                assert [one["type"] for one in response["output"]] == ["reasoning", "message"][:(count > 1) + (count > 3)]
                said = 0 if count < 2 else min(count - 1, 5)
                assert response["usage"]["output_tokens"] == (said if count < 7 else 9)
                assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == (min(said, 2) if count < 7 else 3)


def test_what_is_still_open_when_it_fails_is_incomplete():
    stream, out = fed(chat_chunks(["Hel", "lo"], reasoning=["Hm"])[:3])
    assert failed(stream, out, UpstreamError("gone"))["output"] == [whole_thought("Hm"), whole_message("Hel", 1, "incomplete")]


def test_a_context_that_is_too_long_is_told_as_codex_knows_it():
    """The code is in no published schema, but it is what OpenAI sends."""
    error = from_engine(400, {"error": {"message": "maximum context length is 10 tokens"}})
    assert b'"error":{"code":"context_length_exceeded","message":"maximum context length is 10 tokens"}' in read(
        body_of(stream=True)).stream.fail(error)


def test_an_engine_that_dies_or_gives_up():
    for chunks in ([*chat_chunks("Hello")[:2], died(), DONE], chat_chunks("Hello", finish="abort")):
        stream, out = fed(chunks)
        with pytest.raises(Refusal) as caught:
            stream.end()
        assert caught.value.status in (500, 502) and failed(stream, out, caught.value)["error"]["code"] == "server_error"


@pytest.mark.parametrize("chunks", [[], chat_chunks("Hello")[:1], [died(), DONE]])
def test_before_the_first_token_nothing_is_said(chunks):
    """So that a failure can still be an HTTP status."""
    stream, out = fed(chunks)
    assert out == b""
    with pytest.raises(Refusal):
        stream.end()


# ---- the plain answer

SAID = {"text": {}, "thought": {"reasoning": "Let me think"},
        "call": {"text": None, "tools": [("get_weather", {"city": "Paris"})]},
        "both": {"reasoning": "Hm", "tools": [("get_weather", "{}"), ("apply_patch", {"input": "*** x"})]}, "empty": {"text": ""},
        "cut": {"finish": "length"}}


def test_plain_and_terminal_are_equal(subtests):
    for makers in [(completion, chat_chunks), (llama_completion, llama_chunks)]:
        for case in SAID:
            for fields in [{}, SEALED]:
                with subtests.test(case, engine=makers[0].__name__, sealed=bool(fields)):
                    fields, plain = {"tools": [WEATHER, PATCH], **fields}, makers[0](**SAID[case], usage=FIGURES)
                    data, usage = DIALECT.write(plain, read(body_of(**fields)))
                    stream, out = fed(makers[1](**SAID[case], usage=FIGURES), **fields)
                    terminal = events_of(out + stream.end())[-1]["response"]
                    calls = lambda response: [one.pop("call_id", None) for one in response["output"]]       # noqa: E731, they are random here
                    whole = json.loads(data)
                    assert problems("Response", whole) == [] and calls(whole) is not calls(terminal)
                    assert whole == terminal and whole["usage"] == USAGE and usage == FIGURES


def test_a_stream_that_nobody_asked_for():
    data, usage = DIALECT.write(b"".join(chat_chunks("Hello", usage=FIGURES)), read(body_of()))
    assert json.loads(data)["output"] == [whole_message("Hello")] and usage == FIGURES
    for broken in (b"".join(chat_chunks("Hello")[:2]), {"choices": []}, {}):
        with pytest.raises(UpstreamError):
            DIALECT.write(broken, read(body_of()))


def test_the_response_repeats_the_request():
    asked = body_of(
        instructions="Be brief.", model="glm-alias", tools=[WEATHER, PATCH, AGENTS, SEARCH], temperature=0.2, top_p=0.5,
        tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}, user="ann",
        parallel_tool_calls=False, max_output_tokens=99, max_tool_calls=5, metadata={"a": "b"}, prompt_cache_key="k",
        safety_identifier="s", reasoning={"effort": "low", "summary": "detailed"}, store=True, truncation="auto",
        service_tier="flex", top_logprobs=2, text={"verbosity": "high", "format": {
            "type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}})
    got = json.loads(DIALECT.write(completion(usage=FIGURES), read(asked))[0])
    assert problems("Response", got) == []
    assert got == {
        "id": f"resp_{TOKEN}", "object": "response", "created_at": NOW, "completed_at": NOW, "status": "completed", "error": None,
        "incomplete_details": None, "usage": USAGE, "output": [whole_message("Hello there")], "model": "glm",
        "instructions": "Be brief.", "temperature": 0.2, "top_p": 0.5, "presence_penalty": 0, "frequency_penalty": 0,
        "user": "ann", "reasoning": {"effort": "low", "summary": "detailed"}, "tools": [WEATHER, PATCH, {**AGENTS, "tools": [
            AGENTS["tools"][0], {**AGENTS["tools"][1], "format": {"type": "text"}}]}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
        "parallel_tool_calls": False, "text": {"verbosity": "high", "format": {
            "type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        "max_output_tokens": 99, "max_tool_calls": 5, "top_logprobs": 2, "metadata": {"a": "b"}, "prompt_cache_key": "k",
        "safety_identifier": "s", "previous_response_id": None, "background": False, "store": False, "truncation": "disabled",
        "service_tier": "flex"}


def test_without_an_engine_s_figures_what_came_is_counted():
    stream, out = fed(chat_chunks("Hello there", reasoning="Let me think"))
    events_of(out + stream.end())
    assert json.loads(stream.response)["usage"] == {
        "input_tokens": 0, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 6}


@pytest.mark.parametrize("given, told", [(-1.5, -1.5), (float("-inf"), -9999.0), ("x", 0), (None, 0)])
def test_odd_logprobs(given, told):
    odd = chunk({"content": "a"})
    odd["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": given, "bytes": 5, "top_logprobs": [{"token": "a"}]}]}
    events = said([sse(odd), sse(chunk({}, "stop")), DONE], include=[LOGPROBS])
    assert events[-1]["response"][1][0]["content"][0]["logprobs"] == [{
        "token": "a", "logprob": told, "bytes": [97], "top_logprobs": [{"token": "a", "logprob": 0, "bytes": [97]}]}]


def test_figures_that_cannot_be():
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9},
             "completion_tokens_details": {"reasoning_tokens": 7}}
    stream, _ = fed(chat_chunks("Hello", usage=usage))
    stream.end()
    found = json.loads(stream.response)["usage"]
    assert found["input_tokens_details"]["cached_tokens"] == 5 and found["output_tokens_details"]["reasoning_tokens"] == 3


def test_most_events_are_never_parsed(monkeypatch):
    import stream as module
    one, _ = fed(chat_chunks("a b c", done=False)[:3])
    monkeypatch.setattr(module, "loads", None)
    assert b'"delta":"more"' in one.feed(one.template.before + b"more" + one.template.after)


def test_nothing_of_a_stream_waits_for_the_garbage_collector():
    """Answers are long: a circle of references would keep them for a while."""
    gc.disable()
    try:
        stream, _ = fed(chat_chunks("a b", reasoning="c", tools=[("f", "{}"), ("apply_patch", "{}")]), tools=[PATCH], **SEALED)
        stream.end()
        left = [weakref.ref(part) for part in (stream, stream.writer, *stream.items)]
        del stream
        assert not any(part() for part in left)
    finally:
        gc.enable()


# ---- the input of a custom tool

def inside(pieces):
    one = CustomInput()
    deltas = [one.feed(piece) for piece in pieces]
    for delta in deltas:
        json.loads(b'"' + delta + b'"')
        json.loads(b'"' + delta + b'"').encode()        # no half of a character
    return json.loads(b'"' + b"".join(deltas) + b'"'), one.found


@hypothesis.given(st.text(alphabet=st.sampled_from('ab"\\\n\té🌍\x00/u{}d8')), st.booleans(),
                  st.sampled_from(["", " ", "\n "]), st.data())
def test_the_text_of_a_custom_tool_in_pieces(text, ascii, space, data):
    raw = f'{space}{{{space}"input"{space}:{space}{json.dumps(text, ensure_ascii=ascii)}{space}}}'
    assert inside(pieces(raw, data.draw(cuts(raw)))) == (text, True)


WRONG_INPUTS = [
    ('{"input": "a\nb\tc"}', "a\nb\tc"), (r'{"input": "\d \x \u12"}', r"\d \x \u12"), (r'{"input": "\ud83d"}', "\ufffd"),
    (r'{"input": "\ude00\ud83d\ude00"}', "\ufffd😀"), ('{"input": "a", "b": "c"}', "a"), ('{"input": "open', "open")]


def test_what_models_get_wrong_in_it():
    assert [(raw, however_cut(raw, inside)[0]) for raw, _ in WRONG_INPUTS] == WRONG_INPUTS


OTHER_INPUTS = [
    ('{"patch": "a"}', "a"), ('"a"', "a"), ("plain words", "plain words"), ('{"a": "b", "input": "c"}', "c"), ("", ""),
    ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'), ('{"input": 5}', '{"input": 5}'), ("[1]", "[1]"), ("{}", ""),
    ("null", "null")]


def test_other_forms_of_it(subtests):
    for raw, text in OTHER_INPUTS:
        with subtests.test(raw):
            assert input_of(raw) == text and inside([raw]) == ("", False)


# ---- a conversation made short

TRIGGER = {"type": "compaction_trigger"}
TALK = [{"role": "user", "content": "Add it"}, {"role": "assistant", "content": "Done"}]


def test_a_compaction_asks_for_a_summary():
    sent = payload(body_of([*TALK, TRIGGER], tools=[WEATHER], text={"format": {"type": "json_object"}}))
    *talk, last = sent["messages"]
    assert talk == TALK and last["role"] == "user" and "summary" in last["content"]
    assert sent["tools"] and sent["tool_choice"] == "none" and "response_format" not in sent
    assert "tool_choice" not in payload(body_of([*TALK, TRIGGER]))
    assert payload(body_of([TRIGGER, *TALK]))["messages"] == TALK                  # an old one asks for nothing


def test_a_compaction_goes_back_as_its_summary():
    ask = body_of([*TALK, TRIGGER])
    for answer in (completion("We added it.", reasoning="Hm", tools=[("get_weather", {})]), completion(None, reasoning="We added it.")):
        got = json.loads(DIALECT.write(answer, read(ask))[0])
        compaction, = got["output"]
        assert problems("Response", got) == [] and got["status"] == "completed"
        assert messages(TALK[0], compaction) == [TALK[0], {
            "role": "user", "content": "[A summary of the conversation until here]\nWe added it."}]
    alien = {**compaction, "encrypted_content": "gAAAA"}
    assert messages(alien, *TALK) == TALK


@pytest.mark.parametrize("chunks", [chat_chunks("We added it.", reasoning="Hm", usage=FIGURES), chat_chunks(None, reasoning="We added it.")])
def test_a_compaction_in_a_stream(chunks):
    stream = read(body_of([*TALK, TRIGGER], stream=True)).stream
    begin = stream.feed(chunks[0] + chunks[1])
    events = events_of(begin + stream.alive() + stream.feed(b"".join(chunks[2:])) + stream.end())
    assert [event["type"].partition(".")[2] for event in events] == [
        "created", "in_progress", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert [event["item"] for event in events[3:5]] == events[-1]["response"]["output"] * 2
    assert events[-1]["response"]["output"][0]["encrypted_content"] == Seal().encrypt("We added it.")


@pytest.mark.parametrize("chunks, last", [(chat_chunks("We ad", finish="length"), "response.incomplete"), (chat_chunks(" "), None)])
def test_half_a_compaction_is_none(chunks, last):
    """A client would put it in place of its conversation."""
    stream = read(body_of([*TALK, TRIGGER], stream=True)).stream
    out = stream.feed(b"".join(chunks))
    if last:
        event = events_of(out + stream.end())[-1]
        assert event["type"] == last and event["response"]["output"] == []
    else:
        with pytest.raises(UpstreamError):
            stream.end()
