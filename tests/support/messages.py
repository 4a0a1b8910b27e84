"""Anthropic's Messages: what a client sends, and its answer's events in short."""
import json

from support.engine import MODELS

MODEL = MODELS[0]["id"]
HELLO = [{"role": "user", "content": "Hello"}]
COUNTED = len(json.dumps(HELLO, separators=(",", ":"))) // 4        # as the scripted engine counts
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
TOOLS = [{"name": name, "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
         for name in ("get_weather", "get_time")]


def user(*content):
    return {"role": "user", "content": content[0] if content and isinstance(content[0], str) else list(content)}


def assistant(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def text(words, **more):
    return {"type": "text", "text": words, **more}


def use(ident, name, given):
    return {"type": "tool_use", "id": ident, "name": name, "input": given}


def result(ident, *content, **more):
    return {"type": "tool_result", "tool_use_id": ident, "content": content[0] if content and isinstance(content[0], str)
            else list(content), **more}


def transcript(data):
    """Events in short, deltas of one kind joined; what belongs to a block has its number in front."""
    out = []
    for block in data.decode().split("\n\n")[:-1]:
        name, value = block.split("\n")[-2].removeprefix("event: "), json.loads(block.split("data: ", 1)[1])
        assert value.pop("type") == name
        line = SHORT[name](value)
        if name == "content_block_delta" and out and out[-1][:2] == line[:2]:
            line = (*line[:2], out.pop()[2] + line[2])
        out.append(line)
    return out


SHORT = {
    "message_start": lambda value: ("start", value["message"]["usage"]["input_tokens"]),
    "ping": lambda value: ("ping",),
    "content_block_start": lambda value: (value["index"], *(value["content_block"][name] for name in ("type", "id", "name")
                                                            if name in value["content_block"])),
    "content_block_delta": lambda value: (value["index"], "+" + value["delta"].pop("type").split("_")[0],
                                          *value["delta"].values()),
    "content_block_stop": lambda value: (value["index"], "stop"),
    "message_delta": lambda value: (value["delta"]["stop_reason"], *filter(None, [value["delta"]["stop_sequence"]])),
    "message_stop": lambda value: ("end",),
    "error": lambda value: ("error", value["error"]["type"], value["error"]["message"]),
}
