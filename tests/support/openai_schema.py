"""OpenAI's published schema as an oracle.

    problems("CreateChatCompletionResponse", value)         a list of what is wrong with it, as texts
    event_problems(value)                                   the same for an event of a Responses stream
"""
import json
from functools import cache, lru_cache

from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from support import SUPPORT


def nullable(schema):
    """OpenAPI 3.0's `nullable`, which the document still uses here and there, in the words of JSON Schema."""
    if isinstance(schema, list):
        return [nullable(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: nullable(part) for name, part in schema.items()}
    return {"anyOf": [schema, {"type": "null"}]} if schema.pop("nullable", None) is True else schema


@cache
def document():
    return nullable(json.loads((SUPPORT / "openai-schemas.json").read_text()))


@cache
def validator(name):
    registry = Registry().with_resource("openai", Resource.from_contents(document(), DRAFT202012))
    return Draft202012Validator({"$ref": f"openai#/components/schemas/{name}"}, registry=registry)


def problems(name, value):
    return problems_of_text(name, json.dumps(value))


@lru_cache(10_000)                                  # a check takes milliseconds, and most streams begin alike
def problems_of_text(name, text):
    errors = validator(name).iter_errors(json.loads(text))
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}"[:500] for error in errors]


@cache
def events():
    """The type of an event -> the name of its schema."""
    schemas = document()["components"]["schemas"]
    names = [part["$ref"].rpartition("/")[2] for part in schemas["ResponseStreamEvent"]["anyOf"]]
    return {kind: name for name in names for kind in schemas[name]["properties"]["type"]["enum"]}


def event_problems(value):
    return problems(events()[value["type"]], value)
