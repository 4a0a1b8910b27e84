"""schemathesis: requests made up from the published schemas, good and bad ones, to our routes. None may end in a 5xx, and
every answer keeps the schema of its route."""
import copy
import json
import re
import subprocess

import pytest

from support import openai_schema
from support.engine import MODELS, default_answer, refusal
from support.gateway import WITH_VECTORS
from support.plausible import plausible
from support.processes import clean_environment

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(1800)]          # the installation counts too
# path -> the schemas of its request and of its answer, and what a good request must have here: else nearly all that is
# made up is refused before it gets anywhere
STREAMED = {"dependentSchemas": {"stream_options": {"required": ["stream"], "properties": {"stream": {"const": True}}}}}
ROUTES = {
    "/v1/chat/completions": ("CreateChatCompletionRequest", "CreateChatCompletionResponse", STREAMED),
    "/v1/completions": ("CreateCompletionRequest", "CreateCompletionResponse", {"required": ["prompt"], **STREAMED}),
    "/v1/responses": ("CreateResponse", "Response", {"required": ["input"], "properties": {
        "previous_response_id": {"type": "null"}, "conversation": {"type": "null"}, "prompt": {"type": "null"}}}),
    "/v1/embeddings": ("CreateEmbeddingRequest", "CreateEmbeddingResponse", {}),
}
NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
NAMED = ("FunctionTool", "CustomToolParam", "NamespaceToolParam")
ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"], "properties": {"message": {"type": "string"}}}}}
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"


def openais_api(path, model):
    """OpenAI's document with one path, which it has none of, for one model."""
    whole, (request, answer, more) = copy.deepcopy(openai_schema.document()), ROUTES[path]
    schemas = whole["components"]["schemas"]
    for name in NAMED:
        schemas[name]["properties"]["name"] = NAME
    # It forgets that a vector is a text where base64 is asked for.
    schemas["Embedding"]["properties"]["embedding"]["type"] = ["array", "string"]
    asked = {"allOf": [reference(request), {"required": ["model"], "properties": {"model": {"const": model}}}, more]}
    answers = {"200": {"description": "", "content": {**holds("application/json", reference(answer)), **holds("text/event-stream", {})}},
               "default": {"description": "", "content": holds("application/json", ERROR)}}
    post = {"requestBody": {"required": True, "content": holds("application/json", asked)}, "responses": answers}
    return {**whole, "info": {"title": "Sparks", "version": "1"}, "paths": {path: {"post": post}}}


def anthropics_api(document, path, model):
    """Anthropic's document with one path, for one model."""
    post = document["paths"][path]["post"]
    post["responses"]["200"]["content"] |= holds("text/event-stream", {})         # it forgets that messages can be streamed
    body = post["requestBody"]["content"]["application/json"]
    body["schema"] = {"allOf": [body["schema"], {"properties": {"model": {"const": model}, "messages": {"minItems": 1}}}]}
    return {**document, "paths": {path: {"post": post}}}


def reference(name):
    return {"$ref": f"#/components/schemas/{name}"}


def holds(kind, schema):
    return {kind: {"schema": schema}}


@pytest.mark.parametrize("path", [*ROUTES, "/v1/messages", "/v1/messages/count_tokens"])
def test_schemathesis(suite, gateway, engine, judge, path, tmp_path):
    engine.embeds = path == "/v1/embeddings"
    engine.always(lambda request: strict(engine, request))
    front, model = gateway(config=WITH_VECTORS), "vectors" if engine.embeds else MODELS[0]["id"]
    if path in ROUTES:
        document = openais_api(path, model)
    else:                                           # that suite has Anthropic's document with it
        found, = suite("llm-comply").parent.glob("lib/python*/site-packages/llm_comply/specs/anthropic.json")
        document = anthropics_api(json.loads(found.read_text()), path, model)
    (tmp_path / "api.json").write_text(json.dumps(document))
    line = [suite("schemathesis") / "st", "run", "api.json", "--url", front.url, "--header", f"Authorization: Bearer {front.key}",
            "--checks", CHECKS, "--phases", "coverage,fuzzing", "--max-examples", "100", "--seed", "1", "--no-shrink",
            "--generation-database", "none", "--no-color"]
    done = subprocess.run(line, cwd=tmp_path, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    sent = int(re.search(r"(\d+) generated", done.stdout)[1])
    judge(f"schemathesis {path}", {path: done.stdout} if done.returncode else {}, sent)
    answered = len(engine.requests) + len([one for one in engine.probes if one.path == "/tokenize"])
    assert answered > 50                            # not all was refused before it got there


def strict(engine, request):
    """An engine refuses what it can't read."""
    try:
        return plausible(request) or default_answer(engine, request)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return [refusal(400, "this is no request for a model")]
