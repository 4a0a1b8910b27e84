"""What a client sends of the past: any of it is read, or left out and named, in every API that takes a conversation."""
import copy
import json
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from dialects import chat, messages
from dialects.history import MOST_BYTES, MOST_NAMED, Ignored
from dialects.messages import count
from dialects.responses import Responses
from errors import InvalidRequest
from support.dialect_tables import JSON, Fleet, sent
from support.messages import assistant, result, text, use, user

RESPONSES = Responses(lambda: 0, lambda: "ab" * 24)
NAME = r"[A-Za-z0-9_.-]+"


def named(*entries):
    ignored = Ignored()
    for entry in entries:
        ignored.add(*entry)
    return ignored.header


# ---- what was left out

@pytest.mark.parametrize("entries, header", [
    ([], ""),
    ([("input[3]", "shell_call")], "input[3] shell_call"),
    ([("a", "x\r\nset-cookie: y"), ("b", "é,\x00")], "a x__set-cookie__y, b ___"),
    ([("a", ""), ("b", None)], "a unnamed, b None"),
    ([("a", "x")] * 22, ", ".join(["a x"] * MOST_NAMED + ["and 2 more"])),
    ([("a" * 900, "x"), ("b" * 100, "y"), ("c", "z")], "a" * 900 + " x, and 2 more"),
])
def test_names_are_bounded_and_fit_for_a_header(entries, header):
    assert named(*entries) == header and len(header) < MOST_BYTES + 40 and header.isascii()


# ---- Messages

SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "rain"}}
FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [
    {"type": "web_search_result", "title": "Rain", "url": "https://x.org", "encrypted_content": "Eabc"}]}
LOOKUP = {"type": "mcp_tool_use", "id": "m1", "name": "lookup", "server_name": "db", "input": {"key": 1}}
LOOKED = {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False, "content": [text("seven")]}
NOTE = {"type": "document", "title": "note", "source": {"type": "text", "media_type": "text/plain", "data": "It rains."}}
PDF = {"type": "document", "title": "a.pdf", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
ODD = {"type": "odd\r\n", "payload": {"x": 1}}


def read_messages(*conversation, dialect=messages, **fields):
    body = {"max_tokens": 9, "messages": list(conversation), **fields}
    return dialect.read(json.dumps(body).encode(), Fleet())


@pytest.mark.parametrize("block, said, ignored", [
    ([SEARCH, FOUND], '[web_search_tool_result of web_search {"query":"rain"}]\nRain\nhttps://x.org', "messages.1.content.1 server_tool_use"),
    ([LOOKUP, LOOKED], '[mcp_tool_result of lookup {"key":1}]\nseven', "messages.1.content.1 mcp_tool_use"),
    ([{"type": "mcp_tool_result", "tool_use_id": "?", "content": "no", "is_error": True}], "[mcp_tool_result, an error]\nno", ""),
    ([{"type": "web_fetch_tool_result", "tool_use_id": "?", "content": {"type": "web_fetch_result", "url": "u", "content": NOTE}}],
     "[web_fetch_tool_result]\nu\nnote\nIt rains.", ""),
    ([{"type": "bash_code_execution_tool_result", "tool_use_id": "?", "content": {
        "type": "bash_code_execution_result", "stdout": "42", "stderr": "", "return_code": 0, "content": []}}],
     "[bash_code_execution_tool_result]\n42", ""),
    ([{"type": "compaction", "content": "We spoke of rain."}], "[compaction]\nWe spoke of rain.", ""),
    ([{"type": "tool_search_tool_result", "tool_use_id": "?", "content": {"type": "tool_search_tool_result_error", "error_code": "down"}}],
     "[tool_search_tool_result]\ndown", ""),
    ([{"type": "browser_state", "tabs": [{"tab_id": 1, "title": "Home", "url": "https://x.org"}]}], "[browser_state]\nHome\nhttps://x.org", ""),
    ([{"type": "container_upload", "file_id": "f"}], "", "messages.1.content.1 container_upload"),
    ([ODD], "", "messages.1.content.1 odd__"),
    ([{"type": "redacted_thinking", "data": "x"}], "", "messages.1.content.1 redacted_thinking"),
])
def test_blocks_of_an_answer(block, said, ignored):
    one = read_messages(user("a"), assistant(text("I look."), *block), user("b"))
    assert sent(one)["messages"][1]["content"] == "\n\n".join(filter(None, ["I look.", said]))
    assert one.ignored == ignored


def test_files_are_refused_only_where_the_model_is_asked_about_them():
    one = read_messages(user(text("what?"), PDF), assistant(text("b")), user(text("and?"), NOTE))
    assert [message["content"] for message in sent(one)["messages"]] == [
        'what?\n[document "a.pdf": it could not be read here]', "b", 'and?\n[document "note"]\nIt rains.']
    assert one.ignored == "messages.0.content.1 document"
    tool = read_messages(user("a"), assistant(use("t", "f", {})), user(result("t", PDF), PDF))
    assert [message["role"] for message in sent(tool)["messages"]] == ["user", "assistant", "tool", "user"]
    with pytest.raises(InvalidRequest, match="images of its pages"):
        read_messages(user("a"), assistant(text("b")), user(text("what?"), PDF))


def test_images_that_others_have_stored_are_refused_only_there_too():
    stored = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    one = read_messages(user(stored), assistant(use("t", "f", {})), user(result("t", text("a"), stored), text("b")))
    assert sent(one)["messages"][2]["content"] == "a"
    assert one.ignored == "messages.0.content.0 image, messages.2.content.0.content.1 image"
    image = {"type": "input_image", "file_id": "f"}
    item = read_items({"role": "user", "content": [image]}, {"type": "function_call_output", "call_id": "A", "output": [image]},
                      {"role": "user", "content": "b"})
    assert item.ignored == "input[0].content[0] input_image, input[1].output[0] input_image"
    for refused in (lambda: read_messages(user(stored)), lambda: read_items({"role": "user", "content": [image]})):
        with pytest.raises(InvalidRequest):
            refused()


def test_content_may_be_null():
    one = read_messages(user("a"), {"role": "assistant", "content": None}, {"role": "system", "content": None},
                        {"role": "user", "content": None})
    assert [message["content"] for message in sent(one)["messages"]] == ["a", "", ""]
    item = read_items({"role": "user", "content": None}, {"role": "assistant", "content": None},
                      {"type": "function_call_output", "call_id": "A", "output": None})
    assert [message["content"] for message in sent(item)["messages"]] == ["", "", ""]


# ---- tools of Messages that come and go

def tool(name, **fields):
    return {"name": name, "input_schema": {"type": "object"}, **fields}


def change(kind, name, form="tool_reference", **fields):
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": {"type": form, "name": name, **fields}}]}


def definition(given):
    return {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_definition", "definition": given}}]}


DEFERRED = tool("mcp__x", defer_loading=True)
SERVER = {"type": "web_search_20250305", "name": "web_search"}


@pytest.mark.parametrize("changes, names, ignored", [
    ([], ["f"], ""),
    ([change("addition", "mcp__x")], ["f", "mcp__x"], ""),
    ([change("addition", "mcp__x"), change("removal", "mcp__x")], ["f"], ""),
    ([change("removal", "f"), change("addition", "mcp__x"), change("addition", "f")], ["mcp__x", "f"], ""),
    ([change("removal", "f")], [], ""),
    ([change("removal", "nobody")], ["f"], "messages.1.content.0 tool_removal"),
    ([{"role": "system", "content": change("addition", "mcp__x")["content"][0]}, assistant(text("b"))], ["f", "mcp__x"], ""),
    ([definition(tool("g"))], ["f", "g"], ""),
    ([definition(tool("g")), change("removal", "g"), change("addition", "g")], ["f", "g"], ""),
    ([definition(SERVER)], ["f"], "messages.1.content.0.tool.definition web_search_20250305"),
    ([change("addition", "nobody")], ["f"], "messages.1.content.0 tool_addition"),
    ([change("addition", "x", "mcp_tool_reference", server_name="s")], ["f"], "messages.1.content.0 tool_addition"),
    ([{"role": "system", "content": [{"type": "tool_definition", "definition": tool("g")}]}], ["f", "g"], ""),
    ([assistant({"type": "compaction", "content": "a", "tool_changes": [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "mcp__x"}}]})], ["f", "mcp__x"], ""),
    ([assistant({"type": "tool_search_tool_result", "tool_use_id": "s", "content": {
        "type": "tool_search_tool_search_result", "tool_references": [{"type": "tool_reference", "tool_name": "mcp__x"}]}})],
     ["f", "mcp__x"], ""),
])
def test_tools_in_force(changes, names, ignored):
    """The same for the answer, for a stream and for the count; without them the engine gets no word of a change."""
    for fields in ({}, {"stream": True}, {"dialect": count}):
        one = read_messages(user("a"), *changes, user("b"), tools=[DEFERRED, tool("f")], **fields)
        made = json.loads(b"".join(one.count)) if fields else sent(one)
        assert [given["function"]["name"] for given in made.get("tools", [])] == names and one.ignored == ignored
        assert [message for message in made["messages"] if message["role"] == "system"] == []


# ---- Responses

def read_items(*items, **fields):
    return RESPONSES.read(json.dumps({"input": list(items), **fields}).encode(), Fleet())


def said_to(author, *content):
    return {"type": "agent_message", "author": author, "recipient": "/root", "content": list(content)}


def part(words):
    return {"type": "input_text", "text": words}


GREETING = {"type": "agent_message", "author": "/root/child", "recipient": "/root", "content": [part("done")]}
SHELL = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}
SHELL_OUTPUT = {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit"}}]}
SCREEN = {"type": "computer_call_output", "call_id": "d", "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA=="}}


@pytest.mark.parametrize("items, said, ignored", [
    ([GREETING], "[Message from /root/child to /root]\ndone", ""),
    ([said_to("/root/a", {"type": "encrypted_content", "encrypted_content": "Say done"})], "[Message from /root/a to /root]\nSay done", ""),
    ([said_to("/root/a", {"type": "encrypted_content", "encrypted_content": "gAAAAAB" + "x" * 60})], None,
     "input[1].content[0] encrypted_content, input[1] agent_message"),
    ([{"type": "shell_call", "call_id": "c", "action": {}}], None, "input[1] shell_call"),
    ([SHELL, SHELL_OUTPUT], '[shell_call_output of {"commands":["ls"]}]\na.txt', "input[1] shell_call"),
    ([{"type": "apply_patch_call_output", "call_id": "p", "status": "completed", "output": "ok"}], "[apply_patch_call_output]\nok", ""),
    ([{"type": "mcp_call", "name": "lookup", "arguments": "{}", "server_label": "db", "output": "seven"}], "[mcp_call of lookup {}]\nseven", ""),
    ([{"type": "file_search_call", "queries": ["q"], "results": [{"file_id": "f", "text": "It rains."}]}],
     '[file_search_call of ["q"]]\nIt rains.', ""),
    ([{"type": "code_interpreter_call", "code": "6*7", "outputs": [{"type": "logs", "logs": "42"}]}], "[code_interpreter_call]\n6*7\n42", ""),
    ([{"type": "image_generation_call", "result": "iVBORw0KGgo="}], None, "input[1] image_generation_call"),
    ([{"type": "web_search_call", "action": {"type": "search", "query": "rain"}}], None, "input[1] web_search_call"),
    ([{"type": "item_reference", "id": "rs_1"}], None, "input[1] item_reference"),
    ([{"id": "rs_1"}], None, "input[1] item_reference"),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}], None, "input[1] reasoning"),
    *[([{"type": kind, "encrypted_content": "gAAA"}], None, f"input[1] {kind}") for kind in (
        "compaction", "context_compaction", "configuration_update", "compaction_trigger", "ghost_snapshot", "tool_search_call",
        "program", "computer_call", "mcp_approval_request", "mcp_approval_response", "mcp_list_tools")],
    ([ODD], None, "input[1] odd__"),
])
def test_items(items, said, ignored):
    one = read_items({"role": "user", "content": "a"}, *items, {"role": "user", "content": "b"})
    contents = [message["content"] for message in sent(one)["messages"]]
    assert contents == [one for one in ("a", said, "b") if one is not None] and one.ignored == ignored


def test_a_call_of_codex_by_itself():
    call = {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"type": "exec", "command": ["ls"]}}
    by_id = {**call, "call_id": None, "id": "c"}
    for kind, made in (("function_call_output", call), ("local_shell_call_output", call), ("function_call_output", by_id)):
        turn, told = sent(read_items(made, {"type": kind, "call_id": "c", "output": "a.txt"}))["messages"]
        assert turn["tool_calls"][0]["function"] == {"name": "local_shell", "arguments": '{"type":"exec","command":["ls"]}'}
        assert told == {"role": "tool", "tool_call_id": "c", "content": "a.txt"}


def test_what_was_seen_follows_the_results_that_the_model_waits_for():
    called = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"} for name in "AB"]
    results = [{"type": "function_call_output", "call_id": name, "output": name} for name in "AB"]
    made = sent(read_items(called[0], SCREEN, called[1], GREETING, *results, {"role": "user", "content": "b"}))["messages"]
    assert [message["role"] for message in made] == ["assistant", "tool", "tool", "user", "user"]
    assert [part["type"] for part in made[3]["content"]] == ["text", "image_url", "text", "text"]


def test_tools_in_the_input():
    def function(name):
        return {"type": "function", "name": name, "parameters": {"type": "object"}}
    space = {"type": "namespace", "name": "mcp", "tools": [function("g"), {"type": "web_search"}]}
    one = read_items({"type": "additional_tools", "role": "developer", "tools": [function("f"), function("h"), space]},
                     {"type": "tool_search_output", "call_id": None, "tools": [function("h"), space]},
                     {"role": "user", "content": "a"}, tools=[function("f")], tool_choice={"type": "function", "name": "h"})
    assert [tool["function"]["name"] for tool in sent(one)["tools"]] == ["f", "h", "mcp__g"]
    assert json.loads(b"".join(one.echo))["tools"] == [{**function("f"), "description": None, "strict": False}]
    assert one.ignored == "input[0].tools[2].tools[1] web_search, input[1].tools[1].tools[1] web_search"


# ---- chat completions

def test_earlier_parts_of_a_chat():
    history = [{"role": "user", "content": [part("a"), {"type": "file", "file": {"filename": "a.pdf", "file_data": "AA=="}}]},
               {"role": "assistant", "content": [{"type": "odd"}]}, {"role": "user", "content": "b"}]
    one = chat.read(json.dumps({"messages": history}).encode(), Fleet())
    assert sent(one)["messages"][0]["content"][1]["text"] == '[file "a.pdf": it could not be read here]'
    assert sent(one)["messages"][1]["content"] == ""
    assert one.ignored == "messages[0].content[1] file, messages[1].content[0] odd"


def test_a_call_of_a_custom_tool_in_a_chat():
    call = {"id": "A", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    one = chat.read(json.dumps({"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}).encode(), Fleet())
    assert sent(one)["messages"][0]["tool_calls"] == [
        {"id": "A", "type": "function", "function": {"name": "patch", "arguments": '{"input":"a\\nb"}'}}]


# ---- what is malformed, in all of them

def read_chat(*history, **fields):
    return chat.read(json.dumps({"messages": list(history), **fields}).encode(), Fleet())


CALL = {"id": "A", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ODD_PARTS = [  # a part -> the text of it, or None where it is left out; what the header names
    ("a", "a", None), (5, "5", None), ([{"type": "text", "text": "a"}], "a", None), ({"text": "a"}, "a", None),
    ({"type": None, "text": "a"}, "a", None), ({"type": 5, "text": "a"}, "a", None), ({"type": "", "text": "a"}, "a", None),
    ({"type": "text", "text": None}, "", None), ({"type": "text", "text": 5}, "5", None), ({"type": "text", "text": ["a"]}, "a", None),
    (None, None, "untyped"), ({}, None, "untyped"), ({"type": "text"}, None, "text"), ({"type": "é\r\n"}, None, "___"),
    ({"type": "odd", "content": [{"type": "text", "text": "a"}, {"type": "image", "data": "AA=="}]}, "[odd]\na", "image"),
    ({"type": "odd", "outputs": [{"type": "logs", "logs": "a"}, {"type": "image", "url": "data:image/png;base64,AA=="}]}, "[odd]\na", "image"),
    ({"type": "odd", "content": {"type": "document", "title": "a", "source": {"type": "base64", "data": "AA=="}}}, "[odd]\na", "document"),
]


@pytest.mark.parametrize("part, said, kind", ODD_PARTS)
def test_odd_parts_of_contents_and_of_results(part, said, kind):
    ways = [
        (read_chat(user(part), assistant(text("b")), user("c")), 0, "messages[0].content[0]"),
        (read_chat({"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "A", "content": [part]}),
         1, "messages[1].content[0]"),
        (read_messages(user(part), assistant(text("b")), user("c")), 0, "messages.0.content.0"),
        (read_messages(assistant(use("A", "f", {})), user({"type": "tool_result", "tool_use_id": "A", "content": [part]})), 1,
         "messages.1.content.0.content.0"),
        (read_messages(user(part), assistant(text("b")), user("c"), stream=True), 0, "messages.0.content.0"),
        (read_items({"role": "user", "content": [part]}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}),
         0, "input[0].content[0]"),
        (read_items({"type": "function_call", "call_id": "A", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "A", "output": [part]}), 1, "input[1].output[0]"),
    ]
    for one, at, place in ways:
        content = sent(one)["messages"][at]["content"]
        if isinstance(content, list):
            content = "\n".join(inner["text"] for inner in content)
        assert content == (said or "") and one.ignored == (f"{place} {kind}" if kind else "")


@pytest.mark.parametrize("content, said", [(5, "5"), (True, "true"), ({"type": "text", "text": "a"}, "a"), (["a", "b"], "a\nb"), ([], "")])
def test_odd_contents(content, said):
    ways = [(read_chat({"role": "user", "content": content}, assistant(text("b")), user("c")), 0),
            (read_chat({"role": "tool", "tool_call_id": "A", "content": content}), 0),
            (read_messages({"role": "user", "content": content}, assistant(text("b")), user("c")), 0),
            (read_messages(assistant(use("A", "f", {})), user({"type": "tool_result", "tool_use_id": "A", "content": content})), 1),
            (read_items({"role": "user", "content": content}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}), 0)]
    for one, at in ways:
        found = sent(one)["messages"][at]["content"]
        assert (found if isinstance(found, str) else "\n".join(inner["text"] for inner in found)) == said


@pytest.mark.parametrize("message, said, ignored", [
    ({"role": "critic", "content": "a"}, "[message of critic]\na", ""), ({"role": None, "content": "a"}, "[message of nobody]\na", ""),
    ({"role": ["user"], "content": "a"}, "[message of nobody]\na", ""), ("a", "a", ""),
    (None, None, "untyped"), ({"role": "critic"}, None, "message_of_critic"),
])
def test_messages_of_nobody_here(message, said, ignored):
    ways = [(read_chat(message, assistant(text("b")), user("c")), "messages[0]"),
            (read_messages(message, assistant(text("b")), user("c")), "messages.0")]
    if message is not None:
        ways += [(read_items(message, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}), "input[0]")]
    for one, place in ways:
        contents = [message["content"] for message in sent(one)["messages"]]
        assert contents[:-2] == ([said] if said else []) and one.ignored == (f"{place} {ignored}" if ignored else "")
        assert len(contents) == 3 or not said
    for refused in (lambda: read_chat(user("a"), message), lambda: read_messages(user("a"), message),
                    lambda: read_items({"role": "user", "content": "a"}, message)):
        with pytest.raises(InvalidRequest):         # nothing has answered it yet
            refused()


def test_calls_and_results_that_lack_something():
    """In Messages and Responses. What is left of them, the model is told."""
    one = read_messages(assistant(use(5, "f", None), use(None, "g", {}), use("C", None, {}), {"type": "thinking"}),
                        user({"type": "tool_result", "tool_use_id": 5}, {"type": "tool_result", "content": "b", "is_error": True}))
    turn, told, rest = sent(one)["messages"]
    assert [(call["id"], call["function"]) for call in turn["tool_calls"]] == [("5", {"name": "f", "arguments": "{}"})]
    assert (told["tool_call_id"], told["content"], rest["content"]) == ("5", "", "[tool_result, an error]\nb")
    assert one.ignored == "messages.0.content.1 tool_use, messages.0.content.2 tool_use, messages.0.content.3 thinking"
    call, output = {"type": "function_call", "name": "f"}, {"type": "function_call_output"}
    one = read_items({**call, "call_id": 5, "arguments": {"a": 1}, "namespace": 5}, {**call, "arguments": "{}"}, {**call, "call_id": "C", "name": None},
                     {"type": "custom_tool_call", "call_id": "D", "name": "p", "input": [1]},
                     {**output, "call_id": 5, "output": 7}, {**output, "output": "b"}, {**output, "call_id": "D"})
    turn, *told, rest = sent(one)["messages"]
    assert [(call["id"], call["function"]["arguments"]) for call in turn["tool_calls"]] == [("5", '{"a":1}'), ("D", '{"input":"[1]"}')]
    assert [(result["tool_call_id"], result["content"]) for result in told] == [("5", "7"), ("D", "")]
    assert rest == {"role": "user", "content": "[function_call_output]\nb"}
    assert one.ignored == "input[1] function_call, input[2] function_call"


@pytest.mark.parametrize("turn, results, wanted", [
    ({"tool_calls": [CALL]}, [{}], "A"), ({"tool_calls": [{**CALL, "id": 7, "type": None}]}, [{"tool_call_id": 7}], "7"),
    *(({"tool_calls": [{**CALL, "id": ident}]}, [{"tool_call_id": None}], "call_1") for ident in (None, "", [])),
    ({"tool_calls": {"name": "f", "arguments": None}}, [{"tool_call_id": ""}], "call_1"),
    ({"tool_calls": [{"type": "function_call", "call_id": "A", "name": "f", "arguments": {}}]}, [{"tool_call_id": "A"}], "A"),
    ({"function_call": {"name": "f", "arguments": ""}}, [{"role": "function", "name": "f"}], "call_1"),
])
def test_calls_of_a_chat_are_mended(turn, results, wanted):
    """llama.cpp fails at an id or a type that is no text, and everybody's template at OpenAI's first form of calls."""
    history = [user("a"), {"role": "assistant", "content": None, **turn}, *({"role": "tool", "content": "b", **one} for one in results)]
    for fields in ({}, {"stream": True}):
        _, called, result = sent(read_chat(*history, **fields))["messages"]
        assert called["tool_calls"] == [{"id": wanted, "type": "function", "function": {"name": "f", "arguments": "{}"}}]
        assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", wanted, "b") and "function_call" not in called


def test_results_without_an_id_follow_their_calls():
    made = sent(read_chat({"role": "assistant", "tool_calls": [{**CALL, "id": name} for name in ("A", None, "C")]},
                          *({"role": "tool", "content": name, "tool_call_id": name if name == "A" else None} for name in "ABC"),
                          {"role": "tool", "content": "more"}, user("b")))["messages"]
    assert [message["tool_call_id"] for message in made[1:5]] == ["A", "call_1", "C", "call_2"]


def test_what_a_chat_says_beside_its_content():
    one = read_chat({"role": "assistant", "content": None, "refusal": "No."}, {"role": "assistant", "content": None, "audio": {"id": "x"}},
                    {"role": "user", "name": 5, "content": "a"}, {"role": "tool"}, user("b"))
    assert [message["content"] for message in sent(one)["messages"]] == ["No.", None, "a", "", "b"]
    assert one.ignored == "messages[1].audio audio, messages[2].name name"
    with pytest.raises(InvalidRequest, match="send them as tools"):
        read_chat(user("a"), functions=[{"name": "f"}])


@pytest.mark.parametrize("kind", ["additional_tools", "tool_search_output"])
def test_malformed_tools_in_the_input_are_left_out(kind):
    good = {"type": "function", "name": "f", "parameters": {"type": "object"}}
    bad = [None, "f", {"name": "f"}, {"type": "function", "name": "a.b"}, {**good, "parameters": 5}, {**good, "strict": 5},
           {"type": "namespace", "name": "n", "tools": 5}, {"type": "namespace", "name": "m", "tools": [{**good, "name": ""}, good]}]
    one = read_items({"type": kind, "role": "developer", "tools": [*bad, good]}, {"type": kind, "tools": {"a": 1}}, {"role": "user", "content": "a"})
    assert [tool["function"]["name"] for tool in sent(one)["tools"]] == ["m__f", "f"]
    kinds = ["tool", "tool", "tool", "function", "function", "function", "namespace"]
    assert one.ignored == ", ".join([*(f"input[0].tools[{at}] {kind}" for at, kind in enumerate(kinds)),
                                     "input[0].tools[7].tools[0] function", "input[1].tools tools"])


@pytest.mark.parametrize("definition", [None, {}, {"name": "g"}, {"name": "g", "input_schema": 5}, {"input_schema": {}}])
def test_malformed_definitions_of_tools_are_left_out(definition):
    for dialect in (messages, count):
        one = read_messages(user("a"), {"role": "system", "content": [{"type": "tool_addition", "tool": {
            "type": "tool_definition", "definition": definition}}]}, user("b"), dialect=dialect)
        assert one.ignored == "messages.1.content.0 tool_definition"


def test_tool_changes_inside_of_a_result_are_none():
    one = read_messages(assistant(use("A", "f", {})), user(result("A", *change("addition", "mcp__x")["content"])), tools=[DEFERRED])
    assert "tools" not in sent(one) and one.ignored == "messages.1.content.0.content.0 tool_addition"


# ---- whatever comes next

KNOWN = {"message", "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output", "reasoning", "", "tool_use",
         "tool_result", "tool_reference", "text", "image", "thinking", "item_reference", "local_shell_call", "tool_addition",
         "local_shell_call_output", "additional_tools", "tool_search_output", "agent_message", "tool_definition"}
READABLE = ["text", "content", "output", "results", "error", "title", "source", "call_id", "tool_use_id", "id", "name", "input", "action"]
KINDS = st.text(max_size=9) | st.sampled_from(["x_call", "x_call_output", "x_tool_result", "x_tool_use", "document", "mcp_call"])
ITEMS = st.builds(lambda kind, fields: {**fields, "type": kind}, KINDS.filter(lambda kind: kind not in KNOWN),
                  st.dictionaries(st.sampled_from(READABLE), JSON, max_size=4))


@hypothesis.given(st.lists(ITEMS, min_size=1, max_size=4))
def test_no_type_is_refused_for_being_new(new):
    places = [
        read_items({"role": "user", "content": "a"}, *new, {"role": "user", "content": "b"}),
        read_items({"role": "assistant", "content": new}, {"role": "user", "content": "b"}),
        read_items({"type": "function_call_output", "call_id": "A", "output": new}),
        read_messages(user("a"), assistant(*new), user("b")),
        read_messages(user("a"), {"role": "system", "content": new}, assistant(text("b")), user("c")),
        read_messages(user(*new), assistant(text("b")), user("c")),
        read_messages(user("a"), assistant(use("t", "f", {})), user(result("t", *new), *new)),
        read_messages(user("a"), assistant(*new), user("b"), dialect=count),
        chat.read(json.dumps({"messages": [user(*new), assistant(*new), user("c")]}).encode(), Fleet()),
    ]
    for one in places:
        assert one.ignored.isascii() and one.ignored.isprintable() and len(one.ignored) < MOST_BYTES + 40


TYPES = ["message", "text", "input_text", "output_text", "refusal", "image", "image_url", "input_image", "video_url", "file", "input_file",
         "input_audio", "document", "thinking", "redacted_thinking", "reasoning", "tool_use", "tool_result", "tool_reference", "server_tool_use",
         "tool_addition", "tool_removal", "tool_definition", "tool_search_tool_result", "compaction", "function_call", "custom_tool_call",
         "function_call_output", "custom_tool_call_output", "local_shell_call", "local_shell_call_output", "agent_message",
         "computer_call_output", "additional_tools", "tool_search_output", "encrypted_content", "namespace", "function", "custom"]
FIELDS = ["role", "content", "text", "refusal", "image_url", "source", "url", "thinking", "name", "input", "arguments", "tool_use_id",
          "call_id", "tool_call_id", "output", "tools", "tool", "definition", "input_schema", "parameters", "summary", "encrypted_content",
          "tool_calls", "function_call", "function", "reasoning", "action", "author", "is_error", "audio", "file", "namespace", "format"]
ANYTHING = st.recursive(
    st.sampled_from([None, True, 5, 1.5, "", "a", "data:,x", "data:image/png;base64,AA==", "http://x.org/a.png", "user", "assistant", "A"]),
    lambda inner: st.lists(inner, max_size=3) | st.builds(
        lambda kind, fields: {**fields, **({"type": kind} if kind else {})}, st.sampled_from([None, *TYPES]),
        st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)), max_leaves=12)
MESSAGE = st.builds(lambda role, fields, content: {**fields, "role": role, "content": content},
                    st.sampled_from(["user", "assistant", "system", "developer", "tool", "function", "x"]),
                    st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=2), st.lists(ANYTHING, max_size=3) | ANYTHING)


def check_messages(messages):
    """They have the form that every engine takes."""
    for message in messages:
        content = message["content"]
        assert message["role"] in ("system", "user", "assistant", "tool") and isinstance(content, str | list | None)
        parts = content if isinstance(content, list) else []
        assert {part["type"] for part in parts} <= {"text", "image_url", "video_url", "tool_reference"}
        assert all(isinstance(part["text"], str) for part in parts if part["type"] == "text")
        assert message["role"] != "tool" or isinstance(message["tool_call_id"], str) and message["tool_call_id"]
        for call in message.get("tool_calls", ()):
            assert call["type"] == "function" and isinstance(call["id"], str) and call["id"] and isinstance(call["function"]["name"], str)
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert all(isinstance(message.get(name, ""), str) for name in ("reasoning", "reasoning_content"))


@hypothesis.given(st.lists(MESSAGE | ANYTHING, min_size=1, max_size=4))
def test_no_form_of_a_history_is_refused(past):
    asked = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    ways = [(read_chat, {}), (read_chat, {"stream": True}), (read_messages, {}), (read_messages, {"stream": True}), (read_messages, {"dialect": count}),
            (read_items, {}), (read_items, {"stream": True})]
    made = [read(*copy.deepcopy(past), *asked, **fields) for read, fields in ways]
    for one in made:
        one.fill_in(dict.fromkeys(one.images, [b"data:image/png;base64,AA=="]))
        check_messages(json.loads(b"".join(one.body or one.count))["messages"])
    named = [one.ignored for one in made]
    assert named[0] == named[1] and named[2] == named[3] == named[4] and named[5] == named[6]
    for ignored in named:
        assert ignored.isascii() and (ignored.isprintable() or not ignored) and len(ignored) < MOST_BYTES + 40


def test_many_results_of_one_large_call_take_no_longer_than_others():
    large = {"type": "server_tool_use", "id": "s1", "name": "f", "input": {str(n): n for n in range(100_000)}}
    results = [{"type": "x_tool_result", "tool_use_id": "s1", "content": "a"}] * 2000
    started = time.process_time()
    read_messages(user("a"), assistant(large, *results), user("b"))
    assert time.process_time() - started < 2


KB = "x" * 1000
NAMES = [{"type": "function", "name": f"f{number}"} for number in range(8000)]


@pytest.mark.parametrize("items, fields", [
    ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": KB}]}] * 16_000, {}),
    ([{"type": "function_call", "call_id": "A", "name": "f"}, *[{"role": "assistant", "content": KB}] * 16_000], {}),
    ([], {"tools": NAMES, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": NAMES}}),
    ([], {"tools": [{"type": "namespace", "name": "s", "tools": NAMES[:1000]}],
          "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "s"}] * 8000}}),
], ids=["thoughts", "words", "tools", "namespaces"])
def test_a_long_turn_and_many_tools_take_time_by_their_size(items, fields):
    body = json.dumps({"input": [*items, {"role": "user", "content": "a"}], **fields}).encode()
    started = time.process_time()
    RESPONSES.read(body, Fleet())
    assert time.process_time() - started < 1.5  # usually 0.1; it was 3 and more


def test_a_deep_item_is_no_fault_of_ours():
    for opening, closing in ((b'{"content":', b"}"), (b"[", b"]"), (b'{"content":[', b"]}")):
        deep = opening * 400 + b"1" + closing * 400
        for odd in (b'{"role":%b,"content":"a"}', b'{"role":"user","content":%b}', b'{"role":"assistant","content":[%b]}', b"%b",
                    b'{"role":"assistant","content":null,"tool_calls":[{"id":%b,"function":{"name":"f","arguments":%b}}]}',
                    b'{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":%b}]}'):
            turns = b'[%b,{"role":"assistant","content":"b"},{"role":"user","content":"c"}]' % odd.replace(b"%b", deep)
            for dialect, name in ((chat, b"messages"), (messages, b"messages"), (count, b"messages"), (RESPONSES, b"input")):
                one = dialect.read(b'{"max_tokens":9,"%b":%b}' % (name, turns), Fleet())
                assert dialect is count or sent(one)["messages"][-1]["content"] == "c"
        item = b'{"type":"odd","call_id":"c","input":' + deep + b',"content":' + deep + b"}"
        body = b'{"input":[' + item + b',{"type":"odd_output","call_id":"c","output":"a"},{"role":"user","content":"b"}]}'
        assert sent(RESPONSES.read(body, Fleet()))["messages"][-1]["content"] == "b"
