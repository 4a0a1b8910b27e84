"""The tools of a Responses request, and the functions that the engine knows them as.

Source: OpenAI's published schema (github.com/openai/openai-openapi), Tool and tool_choice.
"""

import re
from functools import cached_property
from typing import NamedTuple

from errors import InvalidRequest
from values import as_dict, as_list

CALLABLE = ("function", "custom")
BRINGS_TOOLS = ("additional_tools", "tool_search_output")  # items of the input
MODES = ("none", "auto", "required")
HOSTED = (
    "runs on OpenAI's side and cannot be called here; "
    "the model can be made to call function and custom tools only"
)
NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
NO_PARAMETERS = {"type": "object", "properties": {}}
# The parameters under which the engine knows a custom tool, which takes any text.
ANY_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's input, as raw text"}},
    "required": ["input"],
    "additionalProperties": False,
}


class ClientTool(NamedTuple):
    """A tool as the client named it: of the type "function" or "custom"."""

    type: str
    name: str
    namespace: str | None = None


class Toolbox:
    """The tools that the model may call.

    names   the engine's name of a tool -> ClientTool, under which the client gets its calls
    echo    the tools as a Response repeats them
    choice  tool_choice as a Response repeats it
    fields  what the engine gets of them

    Tools that OpenAI runs itself, such as web_search, are left out: a model that never hears of
    them does without.
    """

    def __init__(self, payload, ignored):
        """ignored: history.Ignored, which gets the names of what is left out"""
        self.ignored = ignored
        # Whether a tool counts only if none had its name before, and if nothing is wrong with it.
        self.once = False
        self.names = {}
        self.echo = []
        self.offered = []  # the engine's functions
        for at, tool in enumerate(typed_list(payload.get("tools"), "tools")):
            self.echo += self.add(tool, f"tools[{at}]")
        self.once = True
        for tool, where in tools_in_input(payload.get("input"), ignored):
            self.add(tool, where)  # a Response repeats those of the field alone
        self.choice, engine_choice, allowed = self.read_choice(payload.get("tool_choice"))
        self.fields = self.for_engine(engine_choice, allowed)

    # -- tools

    def add(self, tool, where, namespace=None):
        """Take in a tool. Returns it as a Response repeats it, in a list, which is empty where it
        is left out."""
        try:
            if namespace is None and as_dict(tool).get("type") == "namespace":
                return self.add_namespace(tool, where)
            return self.offer(tool, where, namespace)
        except InvalidRequest:
            if not self.once:
                raise
            self.ignored.add(where, as_dict(tool).get("type") or "tool")
            return []

    def add_namespace(self, space, where):
        """Tools that share a name in front of theirs."""
        namespace = name_of(space, where)
        inner = []
        for at, tool in enumerate(typed_list(space.get("tools"), f"{where}.tools")):
            inner += self.add(tool, f"{where}.tools[{at}]", namespace)
        if not inner:
            return []
        repeated = {
            "type": "namespace",
            "name": namespace,
            "description": text_of(space, "description", where) or "",
            "tools": inner,
        }
        return [repeated]

    def offer(self, tool, where, namespace):
        """Offer a tool to the engine as a function. Returns what `add` does."""
        kind = type_of(tool, where)
        if kind not in CALLABLE:
            self.ignored.add(where, kind)
            return []
        tool = flat(tool)
        name = name_of(tool, where)
        if self.once and full_name(name, namespace) in self.names:
            return []
        description = text_of(tool, "description", where)
        if tool["type"] == "custom":
            function = custom_for_engine(tool, where, description)
            repeated = custom_for_client(tool, description)
        else:
            function = function_for_engine(tool, where, description)
            repeated = function_for_client(tool, description)
        engine_name = self.engine_name(ClientTool(tool["type"], name, namespace))
        self.offered.append({"type": "function", "function": {"name": engine_name, **function}})
        return [{"type": tool["type"], "name": name, **repeated}]

    def engine_name(self, tool):
        """The engine's name of a ClientTool: one that no other has."""
        wanted = full_name(tool.name, tool.namespace)
        name = wanted
        number = 1
        while self.names.setdefault(name, tool) != tool:
            number += 1
            name = f"{wanted}_{number}"
        return name

    # -- which of them

    def read_choice(self, choice):
        """(what a Response repeats, what the engine gets, the engine's names of the allowed tools).

        The names are None where all tools are allowed.
        """
        if choice is None:
            choice = "auto"
        if isinstance(choice, str):
            if choice not in MODES:
                raise bad_choice(f"must be one of {', '.join(MODES)}, or an object")
            return choice, self.mode(choice, self.names), None
        kind = as_dict(choice).get("type")
        if not isinstance(kind, str):
            raise bad_choice(
                'must be a word, or an object such as {"type": "function", "name": "get_weather"}'
            )
        if kind == "allowed_tools":
            return self.read_allowed(choice)
        if kind not in CALLABLE:
            raise bad_choice(f"asks for {kind[:60]!r}, which {HOSTED}")
        found = self.meanings.get(meaning(flat(choice)))
        if not found:
            raise bad_choice("names a tool that is not in tools")
        return self.repeated(found[0]), {"type": "function", "function": {"name": found[0]}}, None

    def read_allowed(self, choice):
        """The same for a choice of the type allowed_tools."""
        mode = choice.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise bad_choice("allowed_tools needs the mode auto or required")
        meant = {}  # as an ordered set: each counts once, a whole namespace too
        for tool in typed_list(choice.get("tools"), "tool_choice.tools"):
            type_of(tool, "tool_choice.tools")
            meant[meaning(flat(tool))] = True
        allowed = dict.fromkeys(name for one in meant for name in self.meanings.get(one, ()))
        tools = [self.repeated(name) for name in allowed]
        repeated = {"type": "allowed_tools", "mode": mode, "tools": tools}
        return repeated, self.mode(mode, allowed), allowed

    def mode(self, mode, names):
        if mode == "required" and not names:
            raise bad_choice(
                "requires a call, but there is no function or custom tool to be called"
            )
        return mode if self.names else None

    @cached_property
    def meanings(self):
        """meaning of what a client names -> the engine's names of it: one, or all of a
        namespace."""
        found = {}
        for engine_name, tool in self.names.items():
            found.setdefault((tool.type, tool.name, None), [engine_name])
            if tool.namespace:
                found.setdefault(tool, [engine_name])
                found.setdefault(("namespace", tool.namespace, None), []).append(engine_name)
        return found

    def repeated(self, engine_name):
        tool = self.names[engine_name]
        repeated = {"type": tool.type, "name": tool.name}
        if tool.namespace:
            repeated["namespace"] = tool.namespace
        return repeated

    def for_engine(self, choice, allowed):
        """The engine's tools and tool_choice; it refuses a choice where there is no tool."""
        tools = self.offered
        if allowed is not None:
            tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        return {"tools": tools, "tool_choice": choice} if tools else {}


def tools_in_input(items, ignored):
    """(tool, its place) for each that the conversation brings: where a client sends none beside it,
    or where a search has found some.

    ignored  history.Ignored
    """
    for at, item in enumerate(as_list(items)):
        if as_dict(item).get("type") not in BRINGS_TOOLS:
            continue
        where = f"input[{at}].tools"
        tools = item.get("tools") or []
        if not isinstance(tools, list):
            ignored.add(where, "tools")
        for number, tool in enumerate(as_list(tools)):
            yield tool, f"{where}[{number}]"


def full_name(name, namespace):
    """The engine's name of a tool, unless another has it too."""
    if namespace:
        return f"{namespace}__{name}"
    return name


# ---- the two types


def function_for_engine(tool, where, description):
    """A function tool as the engine's function, but for its name."""
    parameters = tool.get("parameters")
    strict = tool.get("strict")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}.parameters must be a JSON schema", "tools")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{where}.strict must be true or false", "tools")
    function = {"parameters": parameters or NO_PARAMETERS}
    if description:
        function = {"description": description, **function}
    if strict:
        function["strict"] = True
    return function


def function_for_client(tool, description):
    return {
        "description": description,
        "parameters": tool.get("parameters"),
        "strict": bool(tool.get("strict")),
    }


def custom_for_engine(tool, where, description):
    """A custom tool as the engine's function, which no grammar can bind: the model is told it."""
    paragraphs = [description] if description else []
    if grammar := grammar_of(tool, where):
        paragraphs.append(
            f"The input must follow this {grammar['syntax']} grammar:\n{grammar['definition']}"
        )
    return {"description": "\n\n".join(paragraphs), "parameters": ANY_TEXT}


def custom_for_client(tool, description):
    repeated = {"format": grammar_of(tool, "") or {"type": "text"}}
    if description is not None:
        repeated = {"description": description, **repeated}
    return repeated


def grammar_of(tool, where):
    """The grammar of a custom tool, or None where it takes any text."""
    form = tool.get("format")
    if form is None or isinstance(form, dict) and form.get("type") == "text":
        return None
    form = as_dict(form)
    if (
        form.get("type") != "grammar"
        or form.get("syntax") not in ("lark", "regex")
        or not isinstance(form.get("definition"), str)
    ):
        raise InvalidRequest(
            f"{where}.format must be a text, "
            "or a grammar with syntax (lark or regex) and definition",
            "tools",
        )
    return {"type": "grammar", "syntax": form["syntax"], "definition": form["definition"]}


# ---- fields


def type_of(tool, where):
    kind = as_dict(tool).get("type")
    if not isinstance(kind, str):
        raise InvalidRequest(
            f"{where} must be an object with a type, such as function", where.partition("[")[0]
        )
    return kind


def flat(tool):
    """A tool in the flat form; clients of chat completions send it nested."""
    inner = tool.get(tool["type"])
    if isinstance(inner, dict) and "name" not in tool:
        return {**inner, "type": tool["type"]}
    return tool


def meaning(wanted):
    """What a client names, see `Toolbox.meanings`; without a namespace the first of its name."""
    named = (wanted.get("name"), wanted.get("namespace"))
    if wanted["type"] == "namespace":
        named = (wanted.get("name"), None)
    if any(name is not None and not isinstance(name, str) for name in named):
        return None
    return wanted["type"], *named


def name_of(tool, where):
    name = tool.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where} needs a name of letters, digits, _ and -, at most 128", "tools"
        )
    return name


def text_of(tool, name, where):
    value = tool.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a text", "tools")
    return value


def typed_list(value, where):
    if value is not None and not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list", where.partition("[")[0])
    return value or []


def bad_choice(problem):
    return InvalidRequest(f"tool_choice {problem}", "tool_choice")
