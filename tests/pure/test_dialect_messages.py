"""Anthropic's Messages as tables: a client's body in, the engine's payload out; the engine's chunks in, events out.

Rows that name an address are public reports of other translations that got the case wrong.
"""
import json

import hypothesis
import pytest
from hypothesis import strategies as st

import errors
from dialects import messages
from dialects.messages import count, refusal
from dialects.messages.events import MessageStream
from dialects.messages.schema import MOST, MOST_IN_ALL, Schemas
from dialects.messages.usage import usage_of
from engines.failures import from_engine
from engines.kinds import LLAMA_CPP, VLLM
from engines.models import Model
from errors import ModelNotFound, Refusal, UpstreamError
from support.cuts import cuts, however_cut, pieces
from support.engine import DONE, chat_chunks, completion, died, llama_completion
from support.message_streams import BEGIN, ROLE, STREAMS, WHOLE, calls, chunks, f, says, thinks
from support.messages import PNG, assistant, result, text, transcript, use, user

PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
OFF = {"enable_thinking": False}
DIRECT = {"caller": {"type": "direct"}}


class Fleet:
    def __init__(self, **model):
        self.model = Model(**{"id": "glm", "engine_id": "engine/model", **model})

    def find(self, name):
        if name in (None, "claude-x"):
            return self.model
        raise ModelNotFound(f"there is no model {name!r} here", "model")


def ask(*conversation, **fields):
    return {"max_tokens": 100, "messages": list(conversation) or [user("Hello")], **fields}


def read(body, dialect=messages, **model):
    return dialect.read(body if isinstance(body, bytes) else json.dumps(body).encode(), Fleet(**model))


def payload(body, **model):
    return json.loads(b"".join(part.encode() if isinstance(part, str) else part for part in read(body, **model).body))


def conversation(*given, **fields):
    model = {"effort": fields.pop("effort", "glm")}
    return payload(ask(*given, **fields), **model)["messages"]


# ---- the request: everything beside the conversation

def test_a_plain_request():
    assert payload(ask(model="claude-x")) == {
        "model": "engine/model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100,
        "chat_template_kwargs": OFF}


TOOL = {"name": "f", "description": "does f", "input_schema": {"$schema": "s", "type": "object", "propertyNames": {"const": 1}}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": TOOL["input_schema"]}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
SERVER = {"type": "web_search_20250305", "name": "web_search"}
ON = {"enable_thinking": True}


ASKED = [
    ({"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}),
    ({"stream": False}, {}),
    ({"temperature": 0.5, "top_p": 1, "top_k": 40}, {"temperature": 0.5, "top_p": 1, "top_k": 40}),
    ({"stop_sequences": ["a", "", "b"]}, {"stop": ["a", "b"]}),
    ({"stop_sequences": []}, {}),
    # what engines know goes on, what is Anthropic's own business does not
    ({"seed": 1, "min_p": 0.1, "repetition_penalty": 1.1},
     {"seed": 1, "min_p": 0.1, "repetition_penalty": 1.1, "repeat_penalty": 1.1}),
    ({"metadata": {"user_id": "u"}, "service_tier": "auto", "mcp_servers": [], "context_management": {"edits": []},
      "cache_control": {"type": "ephemeral"}, "container": "c", "speed": "fast", "n": 2, "logprobs": True, "betas": ["b"]}, {}),
    # thinking
    ({"thinking": {"type": "disabled"}}, {}),
    ({"thinking": None, "output_config": {"effort": "max"}}, {}),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"chat_template_kwargs": {**ON, "reasoning_effort": "low"}}),
    ({"thinking": {"type": "enabled", "budget_tokens": 4095}}, {"chat_template_kwargs": {**ON, "reasoning_effort": "low"}}),
    ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, {"chat_template_kwargs": {**ON, "reasoning_effort": "high"}}),
    ({"thinking": {"type": "enabled", "budget_tokens": 16384}}, {"chat_template_kwargs": {**ON, "reasoning_effort": "max"}}),
    ({"thinking": {"type": "adaptive"}}, {"chat_template_kwargs": {**ON, "reasoning_effort": "high"}}),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
     {"chat_template_kwargs": {**ON, "reasoning_effort": "low"}}),
    ({"thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "xhigh"}},
     {"chat_template_kwargs": {**ON, "reasoning_effort": "max"}}),
    # a whole number of a client that writes all of them like this
    ({"max_tokens": 100.0, "top_k": 40.0, "seed": 1.0, "thinking": {"type": "enabled", "budget_tokens": 1024.0}},
     {"top_k": 40, "seed": 1, "chat_template_kwargs": {**ON, "reasoning_effort": "low"}}),
    # structured output, under its present name and its old one
    ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, {"response_format": FORM}),
    ({"output_format": {"type": "json_schema", "schema": SCHEMA}}, {"response_format": FORM}),
    # tools
    ({"tools": [TOOL]}, {"tools": [FUNCTION]}),
    ({"tools": [{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "defer_loading": False}]},
     {"tools": [FUNCTION]}),
    # deferred: left out until a search has found it; one by Anthropic's servers never can
    ({"tools": [TOOL, {**TOOL, "name": "g", "defer_loading": True}]}, {"tools": [FUNCTION]}),
    ({"tools": [{**TOOL, "defer_loading": True}, {"type": "tool_search_tool_regex_20251119", "name": "s"}]},
     {"tools": [FUNCTION]}),
    ({"tools": [TOOL, SERVER]}, {"tools": [FUNCTION]}),
    ({"tools": [SERVER]}, {}),
    ({"tools": [SERVER], "tool_choice": {"type": "auto"}}, {}),
    # https://github.com/kittors/CliRelay/pull/739: a tool_choice beside no tools is refused by engines
    ({"tools": [], "tool_choice": {"type": "auto"}}, {}),
    ({"tool_choice": {"type": "any"}}, {}),
    ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": [FUNCTION], "tool_choice": "auto"}),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [FUNCTION], "tool_choice": "required"}),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": [FUNCTION], "tool_choice": "none"}),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
     {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f"}}, "parallel_tool_calls": False}),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": False}},
     {"tools": [FUNCTION], "tool_choice": "auto"}),
]


def test_fields(subtests):
    for given, made in ASKED:
        with subtests.test(str(given)):
            usual = {"model": "engine/model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100,
                     "chat_template_kwargs": OFF}
            assert payload(ask(**given)) == {**usual, **made}


@pytest.mark.parametrize("context, made", [(None, 128_000), (850_000, 128_000), (32_768, 32_768)])
def test_max_tokens_is_no_more_than_the_context(context, made):
    assert payload(ask(max_tokens=128_000), context=context)["max_tokens"] == made


def test_a_tool_that_was_searched_for_stands_behind_the_others():
    found = user(result("t", {"type": "tool_reference", "tool_name": "g"}))
    sent = payload(ask(user("a"), assistant(use("t", "search", {})), found, tools=[
        {**TOOL, "name": "g", "defer_loading": True}, {**TOOL, "name": "h", "defer_loading": True}, TOOL]))
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["f", "g"]
    assert sent["messages"][-1] == {"role": "tool", "tool_call_id": "t", "content": "The tool g can be called now."}


@pytest.mark.parametrize("kind, field", [(VLLM, "thinking_token_budget"), (LLAMA_CPP, "thinking_budget_tokens")])
def test_an_engine_that_counts_thinking_gets_the_budget(kind, field):
    sent = payload(ask(thinking={"type": "enabled", "budget_tokens": 2000}), engine_kind=kind)
    assert sent[field] == 2000 and field not in payload(ask(thinking={"type": "adaptive"}), engine_kind=kind)


@pytest.mark.parametrize("effort, made", [
    ("qwen", {"chat_template_kwargs": {"enable_thinking": True}}), ("deepseek", {"chat_template_kwargs": {"thinking": True}}),
    ("gpt-oss", {"reasoning_effort": "high"}), ("none", {})])
def test_thinking_in_the_words_of_other_templates(effort, made):
    sent = payload(ask(thinking={"type": "adaptive"}), effort=effort)
    assert {name: sent[name] for name in ("chat_template_kwargs", "reasoning_effort") if name in sent} == made


REFUSED = [
    ({"max_tokens": None}, "max_tokens", "max_tokens: Field required"),
    ({"max_tokens": 0}, "max_tokens", "positive"), ({"max_tokens": True}, "max_tokens", "positive"),
    ({"max_tokens": 1.5}, "max_tokens", "positive"), ({"max_tokens": "5"}, "max_tokens", "positive"),
    ({"messages": None}, "messages", "messages: Field required"), ({"messages": []}, "messages", "at least one"),
    ({"messages": {}}, "messages", "list"), ({"messages": [5]}, "messages", "messages.0: must be an object"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages.0.role: must be user or assistant"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages", "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages", "messages.0.content: Field required"),
    ({"messages": [user("a"), {"role": "user", "content": 5}]}, "messages", "messages.1.content: must be a text or a list"),
    ({"messages": [user({"type": "document", "source": {}})]}, "messages", "messages.0.content.0: a block of type 'document'"),
    ({"messages": [user({"type": "odd"})]}, "messages", "messages.0.content.0: a block of type 'odd'"),
    ({"messages": [user("a"), assistant(text("b")), user({"type": "odd"})]}, "messages", "messages.2.content.0"),
    ({"messages": [user(use("t", "f", {}))]}, "messages", "'tool_use' is not supported here"),
    ({"messages": [user({"text": "x"})]}, "messages", "messages.0.content.0.type: Field required"),
    ({"messages": [user({"type": {}})]}, "messages", "messages.0.content.0.type"),
    ({"messages": [user({"type": "text"})]}, "messages", "messages.0.content.0.text: Field required"),
    ({"messages": [user({"type": "text", "text": 5})]}, "messages", "messages.0.content.0.text: must be a text"),
    ({"messages": [user({"type": "image"})]}, "messages", "messages.0.content.0.source: must be of type base64 or url"),
    ({"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]}, "messages", "source"),
    ({"messages": [user({"type": "image", "source": {"type": "base64", "data": "x"}})]}, "messages", "media_type"),
    ({"messages": [user({"type": "image", "source": {"type": "url", "url": 5}})]}, "messages", "source"),
    ({"system": 5}, "system", "system: must be a text or a list"),
    ({"system": [PNG]}, "system", "system.0: a block of type 'image'"),
    ({"system": [{"type": "odd", "text": "a"}]}, "system", "system.0: a block of type 'odd'"),
    ({"model": 5}, "model", "model"), ({"stream": "yes"}, "stream", "stream"),
    ({"temperature": "hot"}, "temperature", "number"), ({"temperature": True}, "temperature", "number"),
    ({"top_k": 1.5}, "top_k", "whole"), ({"stop_sequences": "x"}, "stop_sequences", "list"),
    ({"stop_sequences": [5]}, "stop_sequences", "list of texts"),
    ({"thinking": "on"}, "thinking", "object"), ({"thinking": {}}, "thinking", "thinking.type"),
    ({"thinking": {"type": ["x"]}}, "thinking", "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking", "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking", "thinking.budget_tokens"),
    ({"output_config": []}, "output_config", "object"), ({"output_config": {"effort": "none"}}, "output_config",
                                                         "output_config.effort"),
    ({"output_config": {"effort": {}}}, "output_config", "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config", "output_config.format"),
    ({"tools": {}}, "tools", "list"), ({"tools": [5]}, "tools", "tools.0: must be an object"),
    ({"tools": [{"name": "f"}]}, "tools", "tools.0.input_schema: Field required"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools", "tools.0.input_schema: must be an object"),
    ({"tools": [{"input_schema": {}}]}, "tools", "tools.0.name: Field required"),
    ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", "object"),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice", "tool_choice.type"),
    ({"tool_choice": {"type": []}}, "tool_choice", "tool_choice.type"),
    ({"tools": [SERVER], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice",
     "'web_search' is none of the tools"),
    ({"tools": [SERVER], "tool_choice": {"type": "any"}}, "tool_choice", "without an input_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice", "none of the tools that can be called here (f)"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice",
     "disable_parallel_tool_use"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs", "object"),
]


def test_refusals_name_the_field(subtests):
    for given, where, words in REFUSED:
        with subtests.test(str(given)):
            with pytest.raises(Refusal) as caught:
                read({**ask(), **given})
            error = caught.value
            assert error.status == 400 and error.param.partition(".")[0] == where and words in error.message
            said = json.loads(refusal(error))
            assert said == {"type": "error", "error": {"type": "invalid_request_error", "message": error.message}, "request_id": None}


# ---- the conversation

WEATHER = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}


CONVERSATIONS = [
    ([user("Hello")], [{"role": "user", "content": "Hello"}]),
    ([user(text("a", cache_control={"type": "ephemeral"}), text(""), text("b"))], [{"role": "user", "content": "a\nb"}]),
    ([user(text("what?"), PNG)], [{"role": "user", "content": [text("what?"), PART]}]),
    ([user({"type": "image", "source": {"type": "url", "url": "https://x.org/a.png"}})],
     [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}]}]),
    ([user("a"), {"role": "assistant", "content": "b"}, user("c")],
     [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]),
    # https://github.com/intel/llm-scaler/issues/341: a thinking block in the history was refused
    ([assistant({"type": "thinking", "thinking": "hm", "signature": ""}, text("well"), use("t1", "f", {"a": 1}))],
     [{"role": "assistant", "content": "well", "reasoning_content": "hm", "tool_calls": [WEATHER]}]),
    ([assistant({"type": "redacted_thinking", "data": "x"}, use("t1", "f", {"a": 1}))],
     [{"role": "assistant", "content": None, "tool_calls": [WEATHER]}]),
    ([assistant(text("a"), text("b"))], [{"role": "assistant", "content": "ab"}]),
    ([assistant({"type": "thinking", "thinking": "", "signature": ""}, text("a"))], [{"role": "assistant", "content": "a"}]),
    # results first, then the rest in order
    ([user(text("and now?"), result("t1", "21"), result("t2", text("a"), text("b")))],
     [{"role": "tool", "tool_call_id": "t1", "content": "21"}, {"role": "tool", "tool_call_id": "t2", "content": "a\nb"},
      {"role": "user", "content": "and now?"}]),
    ([user(result("t1", "no such file", is_error=True))], [{"role": "tool", "tool_call_id": "t1",
                                                            "content": "Error: no such file"}]),
    ([user(result("t1"), {"type": "tool_result", "tool_use_id": "t2"})],
     [{"role": "tool", "tool_call_id": "t1", "content": ""}, {"role": "tool", "tool_call_id": "t2", "content": ""}]),
    # https://github.com/ggml-org/llama.cpp/pull/22536: images inside tool results were dropped
    ([user(result("t1", text("look"), PNG), result("t2", PNG), text("which?"))],
     [{"role": "tool", "tool_call_id": "t1", "content": "look\n[image 1 of the tool results]"},
      {"role": "tool", "tool_call_id": "t2", "content": "[image 2 of the tool results]"},
      {"role": "user", "content": [text("[image 1 of the tool results]"), PART, text("[image 2 of the tool results]"), PART,
                                   text("which?")]}]),
    ([user()], [{"role": "user", "content": ""}]),
]


def test_conversations(subtests):
    for given, made in CONVERSATIONS:
        with subtests.test(str(given)):
            assert conversation(*given) == made


@pytest.mark.parametrize("given, made", [
    ({"a": 1}, {"a": 1}), ({}, {}), (None, {}), ("", {}), ("  ", {}), ('{"a": 1}', {"a": 1}), ('{"a": ', {"input": '{"a": '}),
    ([1], {"input": [1]}), (5, {"input": 5}),
])
def test_tool_input_of_the_history_is_an_object(given, made):
    message, = conversation(assistant(use("t1", "f", given)))
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == made
    remarks = messages.read(json.dumps(ask(assistant(use("t1", "f", given)))).encode(), Fleet()).remarks
    assert [remark[:18] for remark in remarks] == ["1 tool calls in a "] * (not isinstance(given, dict))


BILLING = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=36ee5;"


SYSTEMS = [
    ("Be brief.", "Be brief."), ([text("a", cache_control={"type": "ephemeral"}), text(""), text("b")], "a\nb"), ("", None),
    ([], None),
    # https://github.com/anthropics/claude-code/issues/68900, https://github.com/sgl-project/sglang/pull/21064 and more
    ([text(BILLING), text("You are")], "You are"), (BILLING, None), (BILLING + "\nYou are", "You are"),
    ([text(BILLING + "\n"), text("You are")], "You are"),
    ("About " + BILLING, "About " + BILLING), ([text("You are"), text(BILLING)], "You are\n" + BILLING),
    # a large body's text is left out of what is read here: it must not go with the line
    (BILLING[:40] + "\x01mark:0\x01", BILLING[:40] + "\x01mark:0\x01"),
]


def test_system(subtests):
    for system, made in SYSTEMS:
        with subtests.test(str(system)):
            assert conversation(system=system) == [{"role": "system", "content": made}] * (made is not None) + [{"role": "user",
                "content": "Hello"}]


@pytest.mark.parametrize("effort, role", [("glm", "system"), ("no-switch", "system"), ("deepseek", "system"), ("qwen", "user"),
    ("gpt-oss", "user"), ("none", "user")])
def test_system_messages_stay_where_they_stand(effort, role):
    given = [user("a"), {"role": "system", "content": [text("note")]}, user("b")]
    assert conversation(*given, effort=effort) == [
        {"role": "user", "content": "a"}, {"role": role, "content": "note"}, {"role": "user", "content": "b"}]


def test_a_longer_conversation_begins_like_the_shorter_one():
    """What a session says first is the beginning of all that it sends later, whatever its client marks or bills."""
    first = [user(text("do it", cache_control={"type": "ephemeral"}))]
    more = [user(text("do it")), assistant({"type": "thinking", "thinking": "hm", "signature": ""}, use("t", "f", {"a": 1})),
            user(result("t", "done", cache_control={"type": "ephemeral"})), {"role": "system", "content": "note"}]
    one = conversation(*first, system=[text(BILLING), text("You are")])
    two = conversation(*more, system=[text(BILLING.replace("36ee5", "0aaa9")),
                                      text("You are", cache_control={"type": "ephemeral"})])
    assert two[:len(one)] == one


REFS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}, "$defs": {"type": "string"}},
        "$defs": {"A": {"type": "array", "items": {"$ref": "#/$defs/B~1C"}}, "B/C": {"const": 1}}}


def test_refs_are_inlined_where_a_template_cannot_follow_them():
    tool = {"name": "f", "input_schema": REFS}
    made = {"type": "object", "properties": {"a": {"type": "array", "items": {"const": 1}}, "$defs": {"type": "string"}}}
    assert payload(ask(tools=[tool]), effort="glm")["tools"][0]["function"]["parameters"] == REFS
    assert payload(ask(tools=[tool]), effort="qwen")["tools"][0]["function"]["parameters"] == made


ODD_REFS = [
    ({"$ref": "#/nowhere"}, {"$ref": "#/nowhere"}), ({"$ref": "https://x.org/s"}, {"$ref": "https://x.org/s"}),
    ({"$ref": 5}, {"$ref": 5}), ({"$ref": "#/a/b", "a": 5}, {"$ref": "#/a/b", "a": 5}),
    ({"anyOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"const": 1}}}, {"anyOf": [{"const": 1}]}),
    ({"properties": 5, "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {}}}, {"properties": 5, "items": {}}),
    ({"properties": {"next": {"$ref": "#"}}}, {"properties": {"next": {"properties": {"next": {}}}}}),
    ({"a": {"$ref": "#/$defs/x"}, "$defs": {"x": {"$ref": "#/$defs/x"}}}, {"a": {}}),
    # what an instance may be is no schema, whatever it looks like
    *(({word: [{"$ref": "#", "definitions": {"a": [1]}}]},) * 2 for word in ("const", "enum", "default", "examples")),
    ({"patternProperties": {"definitions": {"const": {}}}}, {"patternProperties": {"definitions": {"const": {}}}}),
]


def test_odd_refs():
    assert [(schema, Schemas().inlined(schema)) for schema, _ in ODD_REFS] == ODD_REFS


def test_a_schema_that_explodes_stays_as_it_is():
    wide = {"$defs": {"x": {"enum": ["a"] * 1000}}, "properties": {f"p{n}": {"$ref": "#/$defs/x"} for n in range(1000)}}
    assert Schemas().inlined(wide) is wide
    bomb = {"$defs": {f"x{n}": {"a": {"$ref": f"#/$defs/x{n + 1}"}, "b": {"$ref": f"#/$defs/x{n + 1}"}} for n in range(40)},
            "$ref": "#/$defs/x0"}
    assert Schemas().inlined(bomb) is bomb
    long = {"$defs": {"x": {"description": "a" * 1000}}, "anyOf": [{"$ref": "#/$defs/x"}] * 1000}
    lost = {"$defs": {"x": {"$ref": "#/" + "a" * 1000}}, "anyOf": [{"$ref": "#/$defs/x"}] * 1000}
    assert Schemas().inlined(long) is long and Schemas().inlined(lost) is lost


def test_the_schemas_of_a_request_share_what_inlining_may_add():
    schema = {"$defs": {"x": {"description": "a" * (MOST // 2)}}, "items": {"$ref": "#/$defs/x"}}
    schemas = Schemas()
    found = [schemas.inlined(schema) is not schema for _ in range(9)]
    assert found == [True] * (2 * MOST_IN_ALL // MOST - 1) + [False] * (10 - 2 * MOST_IN_ALL // MOST)


JSON = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=4),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
                    max_leaves=8)
BLOCKS = st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "thinking", "tool_use", "tool_result", "document",
                                                                         "tool_reference"]) | JSON},
                               optional=dict.fromkeys(("text", "source", "thinking", "id", "name", "input", "tool_use_id",
                                                       "content", "is_error"), JSON))
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]) | JSON},
                                          optional={"content": JSON | st.lists(BLOCKS, max_size=3)}) | JSON, max_size=3)
TOOLS = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(("name", "input_schema", "type", "description"), JSON)),
                 max_size=3)
FIELDS = {**dict.fromkeys(("model", "system", "stream", "temperature", "top_p", "top_k", "stop_sequences", "thinking",
                           "output_config", "output_format", "tool_choice", "metadata", *messages.PASSED), JSON),
          "tools": TOOLS | JSON, "messages": MESSAGES | JSON, "max_tokens": JSON,
          "thinking": st.fixed_dictionaries({}, optional={"type": st.sampled_from(["enabled", "adaptive"]) | JSON,
                                                          "budget_tokens": JSON})}


@hypothesis.given(st.fixed_dictionaries({}, optional=FIELDS), st.booleans(), st.sampled_from(["glm", "qwen", "gpt-oss"]))
def test_any_body_is_sent_on_or_refused(fields, good, effort):
    body = json.dumps({**(ask() if good else {}), **fields}).encode()
    for dialect in (messages, count):
        try:
            one = dialect.read(body, Fleet(effort=effort))
        except Refusal as error:
            assert 400 <= error.status < 500 and error.message and json.loads(refusal(error))
        else:
            json.loads(b"".join(one.body) or b"{}")


def test_endless_nesting_is_refused():
    schema = b'{"a":' * 990 + b"1" + b"}" * 990
    tools = json.dumps(ask()).encode()[:-1] + b', "tools": [{"name": "f", "input_schema": ' + schema + b"}]}"
    for deep in (b'{"messages": ' + b"[" * 100_000, tools):
        try:
            read(deep, effort="qwen")
        except Refusal as error:
            assert error.status == 400


# ---- counting

def test_what_is_counted():
    one = read(ask(user(text("what?"), PNG, PNG), system="s", tools=[TOOL], stream=True, thinking={"type": "adaptive"}))
    assert json.loads(b"".join(one.count)) == {
        "model": "engine/model", "tools": [FUNCTION], "chat_template_kwargs": {**ON, "reasoning_effort": "high"},
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [text("what?")]}]}
    assert one.unseen == 2 and len(payload(ask(user(PNG)))["messages"][0]["content"]) == 1
    assert read(ask()).count is None                    # the engine's own figure comes with a plain answer


def test_count_tokens_needs_no_max_tokens():
    body = {"messages": [user("Hello")], "tools": [TOOL]}
    one = read(body, count)
    assert (one.path, one.stream, one.model.id) == (None, None, "glm") and json.loads(b"".join(one.count))["tools"] == [FUNCTION]
    assert count.write(12, one) == (b'{"input_tokens":12}', None)
    counted = json.loads(b"".join(read(body, count, effort="gpt-oss").count))
    assert counted["chat_template_kwargs"] == {"reasoning_effort": "low"}


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x.org/a.png", "", "//x/y"])
def test_an_image_that_is_none_is_not_counted_either(url):
    body = ask(user({"type": "image", "source": {"type": "url", "url": url}}))
    for dialect in (messages, count):
        with pytest.raises(Refusal) as caught:
            read(body, dialect)
        assert caught.value.status == 400 and caught.value.param == "messages"


# ---- the stream

def fed(arrived, thinks=True):
    """(the stream, its events before the last one) when the engine's bytes arrive in these pieces."""
    stream = MessageStream("claude-x", thinks)
    stream.prompt_tokens = 7
    return stream, b"".join(map(stream.feed, arrived))


def whole(arrived, thinks=True):
    stream, out = fed(arrived, thinks)
    return out + stream.end()


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name):
    events, made = STREAMS[name]
    found = transcript(however_cut(b"".join(events), whole))
    if made is None:
        made = WHOLE
        found = [(line[0], line[1], None, line[3]) if line[1:2] == ("tool_use",) else line for line in found]
    assert found == [*BEGIN, *made, ("end",)]


@hypothesis.given(st.sampled_from(sorted(STREAMS)), st.booleans(), st.data())
def test_any_cuts(name, thinks, data):
    sent = b"".join(STREAMS[name][0])
    assert whole(pieces(sent, data.draw(cuts(sent))), thinks) == whole([sent], thinks)


ARGUMENTS = '{"n": %d, "city": "Paris"}'
WORDS = st.tuples(st.sampled_from([says, thinks]), st.sampled_from(["a", " ", "\n", "b c"]))


@hypothesis.given(st.lists(cuts(ARGUMENTS % 0), max_size=3), st.lists(WORDS, max_size=6),
                  st.randoms(use_true_random=False), st.booleans())
def test_whatever_mixes_comes_apart(places, texts, chance, thinking):
    """Calls, texts and thoughts in any order: blocks one after the other, every call whole, no word lost."""
    wanted = {f"t{n}": ARGUMENTS % n for n in range(len(places))}
    ways = [[calls((n, f"t{n}" if at == 0 else None, f("f" if at == 0 else None, piece)))
             for at, piece in enumerate(pieces(ARGUMENTS % n, cut))] for n, cut in enumerate(places)]
    ways.append([make(words) for make, words in texts])
    deltas = []
    while any(ways):
        deltas.append(chance.choice([way for way in ways if way]).pop(0))
    found = transcript(whole(chunks(ROLE, *deltas, finish="tool_calls"), thinking))
    check_pairs(found)
    inputs = {line[2]: "".join(piece[2] for piece in found if piece[:2] == (line[0],
        "+input")) for line in found if line[1:2] == ("tool_use",)}
    assert inputs == wanted
    for kind, make in (("+text", says), ("+thinking", thinks)):
        said = "".join(line[2] for line in found if line[1:2] == (kind,)).split()
        assert "".join(said) == ("".join("".join(words for one,
                                                 words in texts if one is make).split()) if thinking or make is says else "")


def check_pairs(found):
    """Each block begins, goes on and ends before the next; their numbers follow each other; none is empty but a call."""
    open_, next_ = None, 0
    for line in found[2:-2]:
        if line[1] in ("text", "thinking", "tool_use"):
            assert open_ is None and line[0] == next_
            open_, next_, said = line[0], next_ + 1, line[1] == "tool_use"
        else:
            assert line[0] == open_
            said = said or line[1] in ("+text", "+thinking")
            open_ = None if line[1] == "stop" else open_
            assert said
    assert open_ is None and found[-1] == ("end",)


@pytest.mark.parametrize("name", STREAMS)
def test_without_thinking_there_is_no_thinking_block(name, caplog):
    """Clients read content[0].text. The other blocks keep their order and get the numbers that follow."""
    events, made = STREAMS[name]
    out = however_cut(b"".join(events), lambda arrived: whole(arrived, thinks=False))
    with caplog.at_level("INFO"):
        found = transcript(whole(events, thinks=False))
    assert found == transcript(out)
    thought = [line[0] for line in made or WHOLE if line[1:] == ("thinking",)]
    kept = [(line[0] - sum(index < line[0] for index in thought), *line[1:]) if isinstance(line[0], int) else line
            for line in made or WHOLE if line[0] not in thought]
    assert [line[:2] for line in found] == [line[:2] for line in [*BEGIN, *kept, ("end",)]]
    assert len([1 for record in caplog.records if "thinking was off" in record.getMessage()]) == bool(thought)


def test_a_call_says_who_calls():
    events = chat_chunks(None, tools=[("f", {})])
    assert b'"input":{},"caller":{"type":"direct"}}' in whole(events)


def test_events_as_they_are():
    stream, out = fed(chat_chunks("Hello there", id="chatcmpl-0123", usage=True))
    assert (out + stream.end()).decode().split("\n\n") == [
        'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_0123","type":"message","role":"assistant",'
        '"model":"claude-x","content":[],"stop_reason":null,"stop_sequence":null,"container":null,"diagnostics":null,"stop_details":null,'
        '"usage":{"cache_creation":null,"cache_creation_input_tokens":null,"cache_read_input_tokens":null,"inference_geo":null,'
        '"output_tokens_details":null,"server_tool_use":null,"service_tier":null,"speed":null,"input_tokens":7,"output_tokens":0}}}',
        'event: ping\ndata: {"type":"ping"}',
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,"content_block":{"type":"text","text":"",'
        '"citations":[]}}',
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"Hello"}}',
        'event: content_block_delta\n'
        'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":" there"}}',
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}',
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null,'
        '"container":null,"stop_details":null},'
        '"usage":{"input_tokens":15,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,'
        '"output_tokens_details":{"thinking_tokens":0},"server_tool_use":null,"output_tokens":3}}',
        'event: message_stop\ndata: {"type":"message_stop"}', ""]


def test_most_events_are_never_parsed(monkeypatch):
    import stream as module
    one, _ = fed(chat_chunks("a b c", done=False)[:3])
    monkeypatch.setattr(module, "loads", None)
    assert transcript(one.feed(one.template.before + b"more" + one.template.after)) == [(0, "+text", "more")]


def test_usage_without_the_engines_figures():
    """What was counted here; what nobody counted is null."""
    stream, out = fed(chunks(ROLE, says("Hello"), says(" there")))
    assert json.loads(stream.end().split(b"data: ")[1].split(b"\n")[0])["usage"] == {
        "input_tokens": 7, "cache_creation_input_tokens": 0, "output_tokens": 3, **dict.fromkeys(
            ["cache_read_input_tokens", "output_tokens_details", "server_tool_use"])}


FIGURES = [
    ({"prompt_tokens": 516, "completion_tokens": 11, "prompt_tokens_details": {"cached_tokens": 384,
        "created_cache_tokens": 128}},
     {"input_tokens": 4, "cache_creation_input_tokens": 128, "cache_read_input_tokens": 384, "output_tokens": 11}),
    ({"prompt_tokens": 37, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 24}},
     {"input_tokens": 13, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 24, "output_tokens": 3}),
    ({"prompt_tokens": 37, "completion_tokens": 3, "prompt_tokens_details": None},
     {"input_tokens": 37, "cache_creation_input_tokens": 0, "output_tokens": 3}),
    ({"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8, "created_cache_tokens": 8}},
     {"input_tokens": 0, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 8, "output_tokens": 3}),
    ({"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 80}},
     {"input_tokens": 0, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 10, "output_tokens": 3}),
    ({"completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 2}},
     {"output_tokens": 3, "output_tokens_details": {"thinking_tokens": 2}}),
    ({"prompt_tokens": "x", "completion_tokens": -1, "prompt_tokens_details": [], "completion_tokens_details": True}, {}),
    (None, {}), ([], {}),
]


def test_figures_add_up_to_the_prompt(subtests):
    for usage, made in FIGURES:
        with subtests.test(str(usage)):
            assert usage_of(usage, {}) == made
            if made.get("input_tokens") is not None:
                assert sum(value for name, value in made.items() if "input" in name) == usage["prompt_tokens"]


# ---- streams that end badly

@pytest.mark.parametrize("events", [
    chat_chunks("a b c", done=False)[:3], [*chat_chunks("a b c")[:3], DONE], [*chat_chunks("a b c")[:3], died(), DONE],
    [*chat_chunks("a b c")[:3], b"data: {broken\n\n"], []])
def test_a_broken_stream_is_no_end(events):
    stream, out = fed(events)
    with pytest.raises(Refusal) as caught:
        stream.end()
    assert transcript(stream.fail(caught.value)) == [("error", "api_error", caught.value.message)]
    assert b"message_stop" not in out and b"message_delta" not in out


def test_alive():
    stream = MessageStream("m", True)
    assert stream.alive() == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert stream.alive("queued 3") == b': queued 3\nevent: ping\ndata: {"type":"ping"}\n\n'


# ---- the plain answer

def answered(words):
    """A block of text as answers have it."""
    return {**text(words), "citations": []}


def write(answer, thinks=True, named="claude-x"):
    one = read(ask(model=named, thinking={"type": "adaptive" if thinks else "disabled"}))
    data, usage = messages.write(answer, one)
    return json.loads(data), usage



@pytest.mark.parametrize("make", [completion, llama_completion])
@pytest.mark.parametrize("thinks", [True, False])
def test_a_plain_answer(make, thinks):
    answer = make("Hello there", reasoning="Let me", tools=[("f", {"a": 1}), ("g", "")], id="chatcmpl-01", cached=8)
    said, usage = write(answer, thinks)
    assert (said["id"], said["type"], said["role"], said["model"]) == ("msg_01", "message", "assistant", "claude-x")
    ids = [block.pop("id") for block in said["content"] if block["type"] == "tool_use"]
    assert said["content"] == [*[{"type": "thinking", "thinking": "Let me", "signature": ""}] * thinks, answered("Hello there"),
                               {"type": "tool_use", "name": "f", "input": {"a": 1}, **DIRECT},
                               {"type": "tool_use", "name": "g", "input": {}, **DIRECT}]
    assert len(set(ids)) == 2 and (said["stop_reason"], said["stop_sequence"]) == ("tool_use", None)
    assert (said["usage"]["input_tokens"], said["usage"]["cache_read_input_tokens"]) == (7, 8) and usage["prompt_tokens"] == 15


ODD_MESSAGES = [
    ({"content": "\n", "reasoning": None}, [], "end_turn"),
    ({"content": "<think>hm</think>well"}, [{"type": "thinking", "thinking": "hm", "signature": ""}, answered("well")], "end_turn"),
    ({"tool_calls": [{"id": "t", "function": {"name": "f", "arguments": "{broken"}}]},
     [answered("Hello"), {"type": "tool_use", "id": "t", "name": "f", "input": {"input": "{broken"}, **DIRECT}], "max_tokens"),
    ({"tool_calls": [None, {}, {"function": {"name": ""}}, {"function": {"name": "f"}}], "content": None},
     [{"type": "tool_use", "id": "call_c1_0", "name": "f", "input": {}, **DIRECT}], "tool_use"),
    ({"tool_calls": "x", "content": 5}, [], "end_turn"),
    ({"tool_calls": [{"id": ident, "function": {"name": "f"}} for ident in ("t", "t", "", None, [5])], "content": None},
     [{"type": "tool_use", "id": ident, "name": "f", "input": {}, **DIRECT} for ident in ("t", "call_c1_1", "call_c1_2", "call_c1_3", "call_c1_4")],
     "tool_use"),
    ({"refusal": "I won't.", "content": None}, [answered("I won't.")], "refusal"),
]


def test_odd_messages(subtests):
    for change, content, reason in ODD_MESSAGES:
        with subtests.test(str(change)):
            answer = completion("Hello")
            answer["choices"][0]["message"].update(change)
            said, _ = write({**answer, "id": "c1"})
            assert (said["content"], said["stop_reason"]) == (content, reason)


@pytest.mark.parametrize("finish, stopped, reason, sequence", [
    ("length", None, "max_tokens", None), ("stop", "END", "stop_sequence", "END"), ("stop", 5, "end_turn", None),
    ("content_filter", None, "refusal", None), ([5], [], "end_turn", None)])
def test_plain_ends(finish, stopped, reason, sequence):
    answer = completion("Hello")
    answer["choices"][0].update(finish_reason=finish, stop_reason=stopped)
    said, _ = write(answer)
    assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)


def test_a_stream_that_nobody_asked_for_becomes_the_same_message(subtests):
    """But for the order between kinds, which a plain completion does not know."""
    for name, (events, made) in STREAMS.items():
        if made is None:                            # the real engines' streams: test_a_plain_answer_to_a_stream
            continue
        with subtests.test(name):
            said, _ = write(b"".join(events))
            assert sorted(block["type"] for block in said["content"] if block["type"] == "tool_use") \
                == ["tool_use"] * sum(line[1:2] == ("tool_use",) for line in made)
            assert "".join(block.get("text", "") for block in said["content"]).split() == "".join(
                line[2] for line in made if line[1:2] == ("+text",)).split()
            assert said["stop_reason"] == next(line[0] for line in made if isinstance(line[0], str))


def test_a_plain_answer_to_a_stream():
    stream = MessageStream("claude-x", True)
    out = stream.feed_plain(completion("Hello there", reasoning="Let me", tools=[("f", {"a": 1})]))
    found = transcript(out + stream.end())
    assert [line[:2] for line in found[2:]] == [line[:2] for line in [*WHOLE, ("end",)]]


@pytest.mark.parametrize("answer", [{}, {"choices": [], "usage": 5}, {"choices": [None]}])
def test_no_answer(answer):
    with pytest.raises(UpstreamError, match="no completion"):
        write(answer)


@pytest.mark.parametrize("answer", [{"choices": [{"finish_reason": "stop"}], "id": 5, "usage": 5},
                                    {"choices": [{"message": None, "finish_reason": "stop"}], "id": []}])
def test_hardly_an_answer(answer):
    said, _ = write(answer)
    assert said["content"] == [] and said["id"].startswith("msg_") and not any(said["usage"].values())
    assert (said["usage"]["input_tokens"], said["usage"]["output_tokens"]) == (0, 0)        # never null, and never absent


NOT_WHOLE = [{}, {"choices": [], "usage": 5}, {"choices": [{}]}, {"choices": [{"message": {"content": "a"}}]},
             *({"choices": [{"message": {"content": "a"}, "finish_reason": reason}]}
               for reason in (None, "", "abort", "error"))]


def test_no_whole_answer(subtests):
    for answer in NOT_WHOLE:
        with subtests.test(str(answer)), pytest.raises(UpstreamError):
            write(answer)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_the_engine_gave_up(reason):
    stream = MessageStream("claude-x", True)
    stream.feed(b"".join(chunks(ROLE, says("Hello"), finish=reason)))
    with pytest.raises(UpstreamError):
        stream.end()


def test_the_answers_model_is_the_one_asked_for():
    """https://github.com/musistudio/claude-code-router/issues/1629: Claude Code drops the thinking of any other model."""
    assert write(completion("x"), named="claude-x")[0]["model"] == "claude-x" and write(completion("x"),
        named=None)[0]["model"] == "glm"


# ---- refusals

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Refusal) and kind is not Refusal]
NAMES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 502: "api_error", 503: "overloaded_error",
         504: "api_error"}


def test_every_refusal_in_anthropics_shape(subtests):
    for kind in KINDS:
        with subtests.test(kind.__name__):
            error = kind("what is wrong", "field", retry_after=5)
            assert json.loads(refusal(error)) == {"type": "error", "error": {
                "type": NAMES.get(error.status, "invalid_request_error"), "message": "what is wrong"}, "request_id": None}
            permanent = error.headers.get("x-should-retry") == "false"
            assert permanent == (error.status in (400, 401, 403, 404, 405, 413, 415, 426) or kind is errors.QuotaExceeded)


def test_a_thread_is_not_kept():
    """The SDKs' tool runners begin one, and would then send the last turn alone."""
    assert read(ask(thread={"type": "create"})).ignored == "thread create"
    assert read(ask(thread=None)).ignored == ""
    for dialect in (messages, count):
        with pytest.raises(errors.NotFound, match="send all messages again") as caught:
            read(ask(thread={"type": "continue", "previous_message_id": "msg_1"}), dialect)
        error = json.loads(refusal(caught.value))["error"]
        assert (error["type"], error["details"]) == ("not_found_error", {"error_code": "thread_not_found"})


@pytest.mark.parametrize("status, name", [(529, "overloaded_error"), (418, "invalid_request_error"), (599, "api_error")])
def test_other_statuses(status, name):
    assert json.loads(refusal(Refusal("x", status=status)))["error"]["type"] == name


@pytest.mark.parametrize("said, made", [
    ("This model's maximum context length is 2048 tokens. However, your prompt contains at least 2049 input tokens, which "
     "exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
     "prompt is too long: 2049 tokens > 2048 maximum"),
    ("request (6031 tokens) exceeds the available context size (4096 tokens), try increasing it",
     "prompt is too long: 6031 tokens > 4096 maximum"),
    ("the context length is exceeded", "prompt is too long: the context length is exceeded"),
])
def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_know(said, made):
    error = from_engine(400, {"error": {"message": said, "type": "x"}})
    assert error.code == "context_length_exceeded" and json.loads(refusal(error))["error"]["message"] == made


def test_other_errors_keep_their_words():
    assert json.loads(refusal(UpstreamError("gone")))["error"] == {"type": "api_error", "message": "gone"}
