"""Requests in which one value, at any depth, is of another shape or missing: read or refused, and never a fault of ours."""
import copy
import json

import pytest

from dialects import chat, completions, embeddings, messages
from dialects.responses import Responses
from errors import Refusal
from support.chat import PNG
from support.dialect_tables import Fleet

CHAT = {
    "messages": [
        {"role": "system", "content": "s", "name": "n"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
                {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
                {"type": "file", "file": {"file_id": "f", "filename": "x", "file_data": "y"}},
                {"type": "refusal", "refusal": "r"}, {"type": "thinking", "thinking": "t"}, {"type": "new", "text": "z"}]},
        {
            "role": "assistant", "content": None, "refusal": "no", "audio": {"id": "a"}, "reasoning": "hm",
            "tool_calls": [
                {"id": "A", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "B", "type": "custom", "custom": {"name": "c", "input": "x"}}],
            "function_call": {"name": "f", "arguments": "{}"}},
        {
            "role": "tool", "tool_call_id": "A",
            "content": [{"type": "text", "text": "r"}, {"type": "image_url", "image_url": {"url": PNG}}]},
        {"role": "function", "name": "f", "content": "r"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "http://e.org/a.png"}}]}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f", "description": "d",
                "parameters": {
                    "type": "object", "properties": {"a": {"type": "string", "enum": ["x"], "$ref": "#/$defs/a"}},
                    "$defs": {"a": {"type": "string"}}},
                "strict": True}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "stop": ["a"], "stream": False, "reasoning": {"effort": "low", "enabled": True, "max_tokens": 5},
    "thinking": {"type": "enabled", "budget_tokens": 100}, "think": True, "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": True}, "temperature": 1, "n": 1, "max_tokens": 5, "logprobs": True,
    "top_logprobs": 2, "seed": 1, "user": "u", "metadata": {"a": "b"}, "functions": [], "logit_bias": {"1": 1}}
MESSAGES = {
    "max_tokens": 10, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a", "citations": None},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                {"type": "image", "source": {"type": "url", "url": "http://e.org/a.png"}},
                {
                    "type": "document", "source": {"type": "text", "data": "d", "media_type": "text/plain"},
                    "title": "t", "context": "c"},
                {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]},
                {"type": "container_upload", "file_id": "f"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "tool_use", "id": "A", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}},
                {"type": "server_tool_use", "id": "S", "name": "web_search", "input": {"query": "q"}},
                {
                    "type": "web_search_tool_result", "tool_use_id": "S",
                    "content": [{"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "e"}]},
                {"type": "mcp_tool_use", "id": "P", "name": "n", "server_name": "s", "input": {}},
                {
                    "type": "mcp_tool_result", "tool_use_id": "P", "is_error": False,
                    "content": [{"type": "text", "text": "r"}]},
                {"type": "future", "data": {"a": [1]}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result", "tool_use_id": "A", "is_error": True,
                    "content": [
                        {"type": "text", "text": "r"},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                        {
                            "type": "document",
                            "source": {"type": "content", "content": [{"type": "text", "text": "d"}]}},
                        {"type": "tool_reference", "tool_name": "f"}]},
                {"type": "text", "text": "b"}]},
        {
            "role": "system",
            "content": [
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
                {"type": "tool_definition", "tool": {"name": "g", "input_schema": {"type": "object"}}}]},
        {"role": "user", "content": "x"}],
    "tools": [
        {
            "name": "f", "description": "d",
            "input_schema": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "string"}}},
            "defer_loading": True, "cache_control": {"type": "ephemeral"}},
        {"type": "web_search_20250305", "name": "web_search"}, {"type": "custom", "name": "h", "input_schema": {}}],
    "tool_choice": {"type": "tool", "name": "h", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "output_format": {"type": "json_schema", "schema": {}}, "stop_sequences": ["a"], "temperature": 1, "top_k": 1,
    "top_p": 1, "metadata": {"user_id": "u"}, "stream": False, "thread": {"type": "create"},
    "context_management": {"edits": [{"type": "x"}]}, "mcp_servers": [{"type": "url", "url": "u", "name": "n"}],
    "container": "c", "service_tier": "auto"}
RESPONSES = {
    "instructions": "i",
    "input": [
        {
            "type": "message", "role": "user",
            "content": [
                {"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": PNG, "detail": "auto"},
                {"type": "input_file", "file_id": "f", "file_data": "d"},
                {"type": "input_audio", "input_audio": {"data": "x"}}]},
        {
            "type": "additional_tools", "role": "developer",
            "tools": [{"type": "function", "name": "z", "parameters": {}}]},
        {
            "type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}],
            "content": [{"type": "reasoning_text", "text": "t"}], "encrypted_content": "e"},
        {
            "type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
            "content": [
                {"type": "output_text", "text": "b", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "n"}, {"type": "encrypted_content", "encrypted_content": "q"}]},
        {"type": "function_call", "id": "fc", "call_id": "A", "name": "f", "arguments": "{}", "namespace": "ns"},
        {
            "type": "function_call_output", "call_id": "A",
            "output": [{"type": "input_text", "text": "r"}, {"type": "input_image", "image_url": PNG}]},
        {"type": "custom_tool_call", "call_id": "B", "name": "c", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "B", "output": "y"},
        {"type": "local_shell_call", "call_id": "L", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "L", "output": "o"},
        {"type": "shell_call", "call_id": "S", "action": {"commands": ["a"]}},
        {
            "type": "shell_call_output", "call_id": "S",
            "output": [{"stdout": "o", "stderr": "e", "outcome": {"type": "exit", "exit_code": 0}}]},
        {"type": "web_search_call", "id": "w", "action": {"type": "search", "query": "q"}},
        {"type": "computer_call", "call_id": "K", "action": {"type": "click"}, "pending_safety_checks": []},
        {
            "type": "computer_call_output", "call_id": "K", "output": {"type": "computer_screenshot", "image_url": PNG}},
        {"type": "mcp_call", "id": "m", "name": "n", "server_label": "s", "arguments": "{}", "output": "o"},
        {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": [{"name": "n", "input_schema": {}}]},
        {
            "type": "agent_message", "author": "/root", "recipient": "/root/a",
            "content": [{"type": "input_text", "text": "d"}]},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "tool_search_call", "call_id": "T", "arguments": {"q": "a"}},
        {
            "type": "tool_search_output", "call_id": "T", "tools": [{"type": "function", "name": "y", "parameters": {}}]},
        {"type": "apply_patch_call", "call_id": "U", "operation": {"type": "update_file", "path": "p", "diff": "d"}},
        {"type": "item_reference", "id": "rs_2"}, {"type": "future", "x": [{"text": "t"}]},
        {
            "type": "message", "role": "user",
            "content": [{"type": "input_text", "text": "z"}, {"type": "input_image", "image_url": "http://e.org/a.png"}]}],
    "tools": [
        {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "d"}},
        {
            "type": "namespace", "name": "ns", "description": "d",
            "tools": [{"type": "function", "name": "f", "parameters": {}}]},
        {"type": "web_search", "filters": {}}],
    "tool_choice": {
        "type": "allowed_tools", "mode": "auto",
        "tools": [{"type": "function", "name": "f"}, {"type": "namespace", "name": "ns"}]},
    "text": {
        "format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 10, "temperature": 1, "top_p": 1, "metadata": {"a": "b"}, "truncation": "auto",
    "parallel_tool_calls": True, "stream": False, "store": False, "stream_options": {"include_obfuscation": False},
    "top_logprobs": 0, "prompt_cache_key": "k", "context_management": [{"type": "compaction", "compact_threshold": 5}]}
COMPLETIONS = {
    "prompt": ["a", [1, 2]], "max_tokens": 5, "stop": ["x"], "stream": False, "n": 1, "best_of": 1, "logprobs": 1,
    "echo": False, "suffix": "s", "logit_bias": {"1": 1}}
EMBEDDINGS = {"model": "known", "input": ["a"], "encoding_format": "float", "dimensions": 4, "user": "u"}
DIALECTS = {
    "chat": (chat, CHAT), "messages": (messages, MESSAGES), "responses": (Responses(lambda: 1, lambda: "ab" * 24), RESPONSES),
    "completions": (completions, COMPLETIONS), "embeddings": (embeddings, EMBEDDINGS),
}
MISSING = object()
ODD = [MISSING, None, True, -1, 1.5, "", "x", [], {}, [[None]], [{"type": {}}], {"type": []}]


def places(value, path=()):
    """Where there is a value in a request: keys and indices, from the outside."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inner:
        yield from places(part, (*path, name))


def with_odd(body, path, odd):
    body = copy.deepcopy(body)
    *way, last = path
    holder = body
    for name in way:
        holder = holder[name]
    if odd is MISSING:
        del holder[last]
    else:
        holder[last] = odd
    return body


@pytest.mark.parametrize("name", DIALECTS)
def test_no_shape_is_a_fault(name):
    dialect, body = DIALECTS[name]
    fleet = Fleet(purpose="embedding") if dialect is embeddings else Fleet()
    dialect.read(json.dumps(body).encode(), fleet)
    for path in list(places(body))[1:]:
        for odd in ODD:
            try:
                dialect.read(json.dumps(with_odd(body, path, odd)).encode(), fleet)
            except Refusal as refusal:
                assert 400 <= refusal.status < 500, (path, odd)
            except Exception as error:
                pytest.fail(f"{path} as {odd!r}: {type(error).__name__}: {error}")
