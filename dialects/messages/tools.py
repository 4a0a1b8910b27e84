"""Anthropic's tools and tool_choice in the form of chat completions.

Source: Anthropic's reference of POST /v1/messages, `tools` and `tool_choice`.
"""

from dialects.history import as_content
from dialects.messages.errors import invalid
from dialects.messages.schema import Schemas
from dialects.read import typed
from errors import InvalidRequest
from values import as_dict, as_list

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SKIPPED = "tools without an input_schema are skipped"
# Of a tool that the history adds or removes: declared in `tools`, or defined in its place.
REFERENCE = "tool_reference"
DEFINITION = "tool_definition"
SEARCHED = "tool_search_tool_result"


def read_tools(request, payload, table, ignored):
    """Put the tools that can be called, and what the model shall do with them, into the payload.

    request  its conversation has been read
    table    the model's reasoning.Table, which tells what its template can do
    ignored  history.Ignored
    """
    given = typed(request, "tools", list, "a list") or []
    tools = Tools(given, table.bare_schemas, ignored)
    for where, kind, tool in changes_in(request["messages"]):
        tools.change(where, kind, tool)
    wanted = typed(request, "tool_choice", dict, 'an object such as {"type": "auto"}')
    if wanted:
        choice = read_choice(wanted, list(tools.offered), bool(given))
    if not tools.offered:  # beside no tools, engines refuse a choice
        return
    payload["tools"] = list(tools.offered.values())
    if wanted:
        payload["tool_choice"] = choice
        if typed(wanted, "disable_parallel_tool_use", bool, "true or false", "tool_choice."):
            payload["parallel_tool_calls"] = False


def read_tool(tool, where, schemas):
    """A tool as a function, or None for a tool of Anthropic's servers: it has a type and no schema.

    schemas  Schemas, where the template knows no $ref, else None
    """
    if not isinstance(tool, dict):
        raise invalid(where, "must be an object with name and input_schema")
    schema = tool.get("input_schema")
    if schema is None:
        if tool.get("type") not in (None, "custom"):
            return None
        raise invalid(f"{where}.input_schema", "Field required")
    if not isinstance(schema, dict):
        raise invalid(f"{where}.input_schema", "must be an object")
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", "Field required")
    function = {"name": name}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function["parameters"] = schemas.inlined(schema) if schemas else schema
    return {"type": "function", "function": function}


class Tools:
    """The tools that the model can call by now.

    A tool with defer_loading is none of them until the client's search finds it, which a
    tool_reference in a result says, or a tool_addition adds it. It then stands behind the others:
    the prompt's beginning stays the same for the engine's cache.

    declared  name -> the tool as a function: all that there are
    offered   name -> the same: those that can be called
    """

    def __init__(self, given, bare, ignored):
        """
        given    the client's tools
        bare     the template knows no $ref
        ignored  history.Ignored
        """
        self.schemas = Schemas() if bare else None
        self.ignored = ignored
        self.declared = {}
        self.offered = {}
        for number, tool in enumerate(given):
            self.declare(tool, f"tools.{number}")
        # Where Anthropic's servers were to do the search, nobody does it here: all are known.
        searched = any(str(tool.get("type")).startswith("tool_search_tool") for tool in given)
        for tool in given:
            if searched or not tool.get("defer_loading"):
                self.offer(tool.get("name"))

    def declare(self, tool, where):
        """Take in a tool. Returns whether it can be offered."""
        function = read_tool(tool, where, self.schemas)
        if function is None:
            self.ignored.add(where, tool["type"])
            return False
        self.declared[function["function"]["name"]] = function
        return True

    def offer(self, name):
        if isinstance(name, str) and name in self.declared:
            self.offered[name] = self.declared[name]

    def change(self, where, kind, tool):
        """What the history says of a tool.

        kind  "tool_addition", "tool_removal", or "tool_reference" where a search has found it
        tool  refers to one by its name, or defines it
        """
        name = tool.get("name")
        if kind == "tool_addition" and tool.get("type") == DEFINITION:
            self.define(tool.get("definition"), where)
        elif tool.get("type") != REFERENCE or not isinstance(name, str):
            self.ignored.add(where, kind)  # such as a whole server's tools
        elif name not in self.declared:
            self.ignored.add(where, kind)
        elif kind == "tool_removal":
            self.offered.pop(name, None)
        else:
            self.offer(name)

    def define(self, tool, where):
        """Take in a tool of the history, and offer it."""
        try:
            if self.declare(tool, f"{where}.tool.definition"):
                self.offer(tool["name"])
        except InvalidRequest:  # it would be refused for ever
            self.ignored.add(where, DEFINITION)


def changes_in(messages):
    """(where, kind, the tool) for each change in the conversation; see `Tools.change`."""
    for number, message in enumerate(messages):
        content = as_dict(message).get("content")
        yield from changes_among(content, f"messages.{number}.content")


def changes_among(blocks, where):
    """Those in the content of a message."""
    for number, block in enumerate(map(as_dict, as_list(as_content(blocks)))):
        kind = block.get("type")
        here = f"{where}.{number}"
        if kind in ("tool_addition", "tool_removal"):
            yield here, kind, as_dict(block.get("tool"))
        elif kind == DEFINITION:
            yield here, "tool_addition", block
        elif kind == "compaction":
            yield from kept_changes(block.get("tool_changes"), here)
        elif kind == "tool_result":
            yield from found_tools(block.get("content"), here)
        elif kind == SEARCHED:
            yield from found_tools(found_by(block), here)


def kept_changes(blocks, where):
    """Those that a compaction has kept of what it stands for."""
    for block in map(as_dict, as_list(blocks)):
        if block.get("type") in ("tool_addition", "tool_removal"):
            yield where, block["type"], as_dict(block.get("tool"))


def found_by(block):
    """What a search has found, or None where it failed."""
    return as_dict(block.get("content")).get("tool_references")


def found_tools(blocks, where):
    """The tools that a search has found."""
    for block in map(as_dict, as_list(blocks)):
        if block.get("type") == REFERENCE:
            name = block.get("tool_name")
            yield where, REFERENCE, {"type": REFERENCE, "name": name}


def read_choice(choice, names, any_given):
    """The tool_choice of chat completions.

    names      of the tools that can be called
    any_given  whether the client sent tools, usable ones or not
    """
    kind = choice.get("type")
    if kind == "tool":
        name = choice.get("name")
        if name not in names:
            raise invalid(
                "tool_choice.name",
                f"{str(name)[:100]!r} is none of the tools that can be called here "
                f"({', '.join(names[:30]) or 'none'}); {SKIPPED}",
            )
        return {"type": "function", "function": {"name": name}}
    if kind == "any" and any_given and not names:
        raise invalid(
            "tool_choice", f"wants a tool, but none of them can be called here; {SKIPPED}"
        )
    if not isinstance(kind, str) or kind not in CHOICES:
        raise invalid("tool_choice.type", "must be auto, any, tool or none")
    return CHOICES[kind]
