"""Anthropic's tools and tool_choice in the form of chat completions.

Source: Anthropic's reference of POST /v1/messages, `tools` and `tool_choice`.
"""

from dialects.loose import as_list
from dialects.messages.errors import invalid
from dialects.messages.schema import inlined
from dialects.read import typed

# The effort tables (reasoning.TABLES) whose templates render a schema's fields, and know no $ref.
BARE_SCHEMAS = ("qwen", "gpt-oss")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SKIPPED = "tools without an input_schema are skipped"


def read_tools(request, payload, effort):
    """Put the tools that can be called, and what the model shall do with them, into the payload.

    request  its conversation has been read
    effort   the model's table in reasoning.TABLES, which tells what its template can do
    """
    given = typed(request, "tools", list, "a list") or []
    bare = effort in BARE_SCHEMAS
    tools = [read_tool(tool, f"tools.{number}", bare) for number, tool in enumerate(given)]
    tools = without_deferred(given, tools, request["messages"])
    wanted = typed(request, "tool_choice", dict, 'an object such as {"type": "auto"}')
    if wanted:
        names = [tool["function"]["name"] for tool in tools]
        choice = read_choice(wanted, names, bool(given))
    if not tools:  # beside no tools, engines refuse a choice
        return
    payload["tools"] = tools
    if wanted:
        payload["tool_choice"] = choice
        if typed(wanted, "disable_parallel_tool_use", bool, "true or false", "tool_choice."):
            payload["parallel_tool_calls"] = False


def read_tool(tool, where, bare):
    """A tool as a function, or None for a tool of Anthropic's servers: it has a type and no schema.

    bare  the template knows no $ref
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
    function["parameters"] = inlined(schema) if bare else schema
    return {"type": "function", "function": function}


def without_deferred(given, tools, messages):
    """The tools that the model knows by now.

    A tool with defer_loading is none of them until the client's search finds it, which a
    tool_reference in a result says. It then stands behind the others: the prompt's beginning stays
    the same for the engine's cache.

    given  the client's tools;  tools  the same as functions, or None;  messages  the client's, read
    """
    # Where Anthropic's servers were to do the search, nobody does it here: all tools are known.
    searched = any(str(tool.get("type")).startswith("tool_search_tool") for tool in given)
    found = set(found_tools(messages))
    known = []
    late = []
    for one, tool in zip(given, tools, strict=True):
        if tool is None:
            continue
        if searched or not one.get("defer_loading"):
            known.append(tool)
        elif tool["function"]["name"] in found:
            late.append(tool)
    return known + late


def found_tools(messages):
    """The names of the tools that a search has found."""
    for message in messages:
        for block in as_list(message.get("content")):
            if block["type"] == "tool_result":
                for inner in as_list(block.get("content")):
                    if inner["type"] == "tool_reference":
                        yield inner["tool_name"]


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
