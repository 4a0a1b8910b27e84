"""Loops of tools, as the SDKs of Python and Node run them, with the tools get_weather and get_time.

    CLIENTS[name](gateway, prompts, streams, model)     a list: for each prompt {text, thoughts, end, ran: [[tool, input]]}, or
                                                        {error: [its class, its cause's class, its text], ran}
    TEXT_CLIENTS                                        the same of text completions
"""
import json

import anthropic
import openai
from anthropic.lib.tools import BetaFunctionTool

from support.engine import MODELS
from support.node import node_asker, node_result

MODEL = MODELS[0]["id"]
NAMES = ("get_weather", "get_time")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


def chat(client, model, prompt, ran, streams):
    messages = [{"role": "user", "content": prompt}]
    tools = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES]
    while True:
        asked = {"model": model, "messages": messages, "tools": tools}
        if streams:
            with client.chat.completions.stream(**asked) as stream:
                choice = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**asked).choices[0]
        said = choice.message
        if choice.finish_reason == "length" or not said.tool_calls:
            return said.content, getattr(said, "reasoning", None), choice.finish_reason
        messages.append(said)
        for made in said.tool_calls:
            ran.append([made.function.name, json.loads(made.function.arguments)])
            messages.append({"role": "tool", "tool_call_id": made.id, "content": "done"})


def responses(client, model, prompt, ran, streams):
    turns = [{"role": "user", "content": prompt}]
    tools = [{"type": "function", "name": name, "strict": False, "parameters": PARAMETERS} for name in NAMES]
    while True:
        asked = {"model": model, "input": turns, "tools": tools, "reasoning": {"effort": "high", "summary": "auto"}}
        if streams:
            with client.responses.stream(**asked) as stream:
                answer = list(stream)[-1].response
        else:
            answer = client.responses.create(**asked)
        if answer.error:
            raise openai.OpenAIError(answer.error.message)
        made = [item for item in answer.output if item.type == "function_call" and item.status == "completed"]
        if not made:
            thoughts = "".join(part.text for item in answer.output if item.type == "reasoning" for part in item.summary)
            return answer.output_text, thoughts, answer.incomplete_details.reason if answer.incomplete_details else answer.status
        turns += answer.output
        for item in made:
            ran.append([item.name, json.loads(item.arguments)])
            turns.append({"type": "function_call_output", "call_id": item.call_id, "output": "done"})


def messages(client, model, prompt, ran, streams):
    def tool(name):
        def run(**given):
            ran.append([name, given])
            return "done"
        return BetaFunctionTool(run, name=name, description=name, input_schema=PARAMETERS)
    said = client.beta.messages.tool_runner(
        model=model, max_tokens=2000, messages=[{"role": "user", "content": prompt}], tools=[tool(name) for name in NAMES],
        thinking={"type": "enabled", "budget_tokens": 1024}, stream=streams).until_done()
    text, thoughts = ("".join(getattr(block, kind) for block in said.content if block.type == kind) for kind in ("text", "thinking"))
    return text, thoughts, said.stop_reason


def completions(client, model, prompt, ran, streams):
    answer = client.completions.create(model=model, prompt=prompt, stream=streams)
    choices = [part.choices[0] for part in (answer if streams else [answer])]
    return "".join(choice.text for choice in choices), None, choices[-1].finish_reason


def in_python(loop, sdk, path=""):
    def answers(front, prompts, streams, model=MODEL):
        with sdk(base_url=front.url + path, api_key=front.key, max_retries=0, timeout=60) as client:
            return [in_loop(loop, client, model, prompt, streams) for prompt in prompts]
    return answers


def in_loop(loop, client, model, prompt, streams):
    ran = []
    try:
        text, thoughts, end = loop(client, model, prompt, ran, streams)
    except Exception as error:
        return {"error": [type(error).__name__, None, str(error)], "ran": ran}
    return {"text": text, "thoughts": thoughts, "end": end, "ran": ran}


def in_node(client):
    def answers(front, prompts, streams, model=MODEL):
        ask = node_asker("loops.mjs", front.url + "/v1", front.key)
        return node_result(ask(client, model=model, prompts=list(prompts), streamed=streams))
    return answers


CLIENTS = {"Python chat": in_python(chat, openai.OpenAI, "/v1"), "Python responses": in_python(responses, openai.OpenAI, "/v1"),
           "Python messages": in_python(messages, anthropic.Anthropic),
           **{f"Node {name}": in_node(name) for name in (
               "chat", "responses", "messages", "vercel openai", "vercel openai, nothing stored", "vercel openai, chat",
               "vercel anthropic", "vercel compatible")}}
STORED = "Node vercel openai"           # its default: it refers to the texts of earlier turns, which nobody keeps here
TEXT_CLIENTS = {"Python": in_python(completions, openai.OpenAI, "/v1"), "Node": in_node("completions")}
