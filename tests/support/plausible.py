"""Answers that make sense, for suites that judge an answer: a tool is called as long as none has given its result, a
schema is kept, thinking comes where it is asked for. For the scripted engine: engine.always(plausible)."""
import json
import re

from support.engine import Json, chat_chunks, completion

TEXT = "Hello there, friend."
THOUGHT = "Let me think"


def plausible(request):
    """The steps for a chat. Names that the prompt quotes, and its numbers, come back in calls and in JSON."""
    if request.path != "/v1/chat/completions":
        return None                                 # the engine's own answer
    ask = request.json()
    prompt = text_of(ask["messages"][-1])
    said = {"model": ask["model"], "text": answer_to(prompt, ask.get("response_format") or {})}
    if tools := calls_for(prompt, ask):
        said = {"model": ask["model"], "text": None, "tools": tools}
    if (ask.get("chat_template_kwargs") or {}).get("enable_thinking"):
        said["reasoning"] = THOUGHT
    if not ask.get("stream"):
        return [Json(completion(**said))]
    return chat_chunks(**said, usage=(ask.get("stream_options") or {}).get("include_usage"))


def text_of(message):
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


def answer_to(prompt, form):
    if form.get("type") == "json_schema":
        return json.dumps(instance(form["json_schema"]["schema"], prompt), ensure_ascii=False)
    if form.get("type") == "json_object":
        return json.dumps(dict.fromkeys(re.findall(r"'(\w+)'", prompt), TEXT))
    return TEXT


def calls_for(prompt, ask):
    """[(name, arguments)] of one tool: the one that must be called, that the prompt names, or the first."""
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in ask.get("tools") or []}
    choice = ask.get("tool_choice") or "auto"
    if not tools or choice == "none" or ask["messages"][-1]["role"] == "tool":
        return []
    named = [name for name in tools if name in prompt] or list(tools)
    name = named[0] if isinstance(choice, str) else choice["function"]["name"]
    return [(name, instance(tools[name], prompt))]


def instance(schema, prompt="", root=None):
    """A value that keeps a JSON schema."""
    root = root or schema
    if "$ref" in schema:
        return instance(root["$defs"][schema["$ref"].rpartition("/")[2]], prompt, root)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return instance(schema[several][0], prompt, root)
    if "enum" in schema or "const" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    kind = schema.get("type", "object")
    kind = kind if isinstance(kind, str) else kind[0]
    numbers, quoted = re.findall(r"\d+", prompt), re.findall(r"'([^']+)'", prompt)
    return {
        "object": lambda: {name: instance(one, prompt, root) for name, one in schema.get("properties", {}).items()},
        "array": lambda: [instance(schema.get("items") or {"type": "string"}, prompt, root)],
        "integer": lambda: int((numbers or [1])[0]),
        "number": lambda: float((numbers or [1])[0]),
        "boolean": lambda: True,
        "null": lambda: None,
        "string": lambda: (quoted or [TEXT])[0],
    }[kind]()
