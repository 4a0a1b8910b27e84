"""The tools of a Responses request, and the functions that the engine knows them as."""

import re

from dialects.responses.items import Tool
from errors import InvalidRequest

CALLABLE = ("function", "custom")
MODES = ("none", "auto", "required")
HOSTED = "runs on OpenAI's side and cannot be called here; the model can be made to call function and custom tools only"
NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
NOTHING = {"type": "object", "properties": {}}  # the parameters of a function that has none
RAW = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The tool's input, as raw text"}},
    "required": ["input"],
    "additionalProperties": False,
}  # those of a custom tool, which takes any text


class Toolbox:
    """The tools that the model may call.

    names    the engine's name of a tool -> Tool, under which the client gets its calls
    echo     the tools, and
    choice   tool_choice, as a Response repeats them
    fields   what the engine gets of them

    Tools that OpenAI runs itself, such as web_search, are left out: a model that never hears of them does without.
    """

    def __init__(self, payload):
        self.names, self.echo, self.offered = {}, [], []
        for at, tool in enumerate(typed_list(payload.get("tools"), "tools")):
            self.add(tool, f"tools[{at}]")
        self.choice, self.forced, allowed = self.read_choice(payload.get("tool_choice"))
        self.fields = self.for_engine(allowed)

    # -- tools

    def add(self, tool, where):
        kind = kind_of(tool, where)
        if kind == "namespace":
            self.add_namespace(tool, where)
        elif kind in CALLABLE:
            tool = flat(tool)
            self.echo.append(self.offer(tool, kind, where))

    def add_namespace(self, space, where):
        """Tools that share a name in front of theirs."""
        name = named(space, where)
        inner = []
        for at, tool in enumerate(typed_list(space.get("tools"), f"{where}.tools")):
            kind = kind_of(tool, f"{where}.tools[{at}]")
            if kind in CALLABLE:
                inner.append(self.offer(flat(tool), kind, f"{where}.tools[{at}]", name))
        if inner:
            description = text_of(space, "description", where) or ""
            self.echo.append(
                {"type": "namespace", "name": name, "description": description, "tools": inner}
            )

    def offer(self, tool, kind, where, namespace=None):
        """Offer a tool to the engine as a function. Returns it as a Response repeats it."""
        name, description = named(tool, where), text_of(tool, "description", where)
        engine_name = self.engine_name(Tool(kind, name, namespace))
        make, repeat = (custom, repeat_custom) if kind == "custom" else (function, repeat_function)
        offered = make(tool, where, description)
        self.offered.append({"type": "function", "function": {"name": engine_name, **offered}})
        return repeat({"type": kind, "name": name}, tool, description)

    def engine_name(self, tool):
        """The engine's name of a Tool: one that no other has."""
        wanted, number = f"{tool.namespace}__{tool.name}" if tool.namespace else tool.name, 1
        found = wanted
        while self.names.setdefault(found, tool) != tool:
            number += 1
            found = f"{wanted}_{number}"
        return found

    # -- which of them

    def read_choice(self, choice):
        """(what a Response repeats, what the engine gets, the engine's names of the tools that are left or None)."""
        if choice is None:
            choice = "auto"
        if isinstance(choice, str):
            if choice not in MODES:
                raise bad_choice(f"must be one of {', '.join(MODES)}, or an object")
            return choice, self.mode(choice, self.names), None
        kind = choice.get("type") if isinstance(choice, dict) else None
        if not isinstance(kind, str):
            raise bad_choice(
                'must be a word, or an object such as {"type": "function", "name": "get_weather"}'
            )
        if kind == "allowed_tools":
            return self.read_allowed(choice)
        if kind not in CALLABLE:
            raise bad_choice(f"asks for {kind[:60]!r}, which {HOSTED}")
        found = self.find(flat(choice))
        if not found:
            raise bad_choice("names a tool that is not in tools")
        return self.repeated(found[0]), {"type": "function", "function": {"name": found[0]}}, None

    def read_allowed(self, choice):
        mode = choice.get("mode", "auto")
        if mode not in ("auto", "required"):
            raise bad_choice("allowed_tools needs the mode auto or required")
        allowed = []
        for tool in typed_list(choice.get("tools"), "tool_choice.tools"):
            kind_of(tool, "tool_choice.tools")
            allowed += self.find(flat(tool))
        repeated = [self.repeated(name) for name in allowed]
        return (
            {"type": "allowed_tools", "mode": mode, "tools": repeated},
            self.mode(mode, allowed),
            allowed,
        )

    def mode(self, mode, names):
        if mode == "required" and not names:
            raise bad_choice(
                "requires a call, but there is no function or custom tool to be called"
            )
        return mode if self.names else None

    def find(self, wanted):
        """The engine's names of the tools that a client means: one, or all of a namespace."""
        name, namespace = wanted.get("name"), wanted.get("namespace")
        if wanted["type"] == "namespace":
            return [key for key, tool in self.names.items() if tool.namespace == name]
        return [
            key
            for key, tool in self.names.items()
            if (tool.kind, tool.name) == (wanted["type"], name)
            and namespace in (None, tool.namespace)
        ][:1]

    def repeated(self, engine_name):
        tool = self.names[engine_name]
        return {
            "type": tool.kind,
            "name": tool.name,
            **({"namespace": tool.namespace} if tool.namespace else {}),
        }

    def for_engine(self, allowed):
        """The engine's tools and tool_choice. vLLM refuses a choice where there is no tool."""
        offered = [
            tool for tool in self.offered if allowed is None or tool["function"]["name"] in allowed
        ]
        return {"tools": offered, "tool_choice": self.forced} if offered else {}


# ---- the two kinds


def function(tool, where, description):
    parameters, strict = tool.get("parameters"), tool.get("strict")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}.parameters must be a JSON schema", "tools")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{where}.strict must be true or false", "tools")
    return {
        **({"description": description} if description else {}),
        "parameters": parameters or NOTHING,
        **({"strict": True} if strict else {}),
    }


def repeat_function(repeated, tool, description):
    return {
        **repeated,
        "description": description,
        "parameters": tool.get("parameters"),
        "strict": bool(tool.get("strict")),
    }


def custom(tool, where, description):
    """It takes any text, and cannot be held to a grammar; but the model can be told it."""
    grammar = format_of(tool, where)
    rule = (
        f"The input must follow this {grammar['syntax']} grammar:\n{grammar['definition']}"
        if grammar
        else ""
    )
    return {
        "description": "\n\n".join(part for part in (description, rule) if part),
        "parameters": RAW,
    }


def repeat_custom(repeated, tool, description):
    described = {"description": description} if description is not None else {}
    return {**repeated, **described, "format": format_of(tool, "") or {"type": "text"}}


def format_of(tool, where):
    """The grammar of a custom tool, or None."""
    given = tool.get("format")
    if given is None or isinstance(given, dict) and given.get("type") == "text":
        return None
    if (
        not isinstance(given, dict)
        or given.get("type") != "grammar"
        or given.get("syntax") not in ("lark", "regex")
        or not isinstance(given.get("definition"), str)
    ):
        raise InvalidRequest(
            f"{where}.format must be a text, or a grammar with syntax (lark or regex) and definition",
            "tools",
        )
    return {"type": "grammar", "syntax": given["syntax"], "definition": given["definition"]}


# ---- small things


def kind_of(tool, where):
    kind = tool.get("type") if isinstance(tool, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(
            f"{where} must be an object with a type, such as function", where.partition("[")[0]
        )
    return kind


def flat(tool):
    """A tool in the flat form; clients of chat completions send it nested."""
    inner = tool.get(tool["type"])
    return (
        {**inner, "type": tool["type"]} if isinstance(inner, dict) and "name" not in tool else tool
    )


def named(tool, where):
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
