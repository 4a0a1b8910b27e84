"""schemathesis: requests made up from OpenAI's published schema, to our routes. None may end in a 5xx, and every answer
keeps the schema of its route."""
import json
import subprocess

import pytest

from support.engine import MODELS
from support.openai_schema import document
from support.processes import clean_environment

pytestmark = pytest.mark.conformance
ROUTES = {                                          # path -> the schemas of its request, its answer and its events
    "/v1/chat/completions": ("CreateChatCompletionRequest", "CreateChatCompletionResponse"),
    "/v1/completions": ("CreateCompletionRequest", "CreateCompletionResponse"),
    "/v1/responses": ("CreateResponse", "Response"),
    "/v1/embeddings": ("CreateEmbeddingRequest", "CreateEmbeddingResponse"),
}
ERROR = {"type": "object", "required": ["error"], "properties": {"error": {
    "type": "object", "required": ["message", "type", "param", "code"], "properties": {"message": {"type": "string"}}}}}
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"


def api():
    """OpenAI's document has no paths: these are ours. The model is always the one that there is."""
    whole = json.loads(json.dumps(document()))
    for request, _ in ROUTES.values():
        model = {"allOf": [{"properties": {"model": {"const": MODELS[0]["id"]}}, "required": ["model"]}]}
        whole["components"]["schemas"][f"{request}Here"] = {"allOf": [reference(request), *model["allOf"]]}
    return {**whole, "info": {"title": "Sparks", "version": "1"}, "paths": {
        path: {"post": {"requestBody": {"required": True, "content": holds("application/json", reference(f"{request}Here"))},
                        "responses": {"200": {"description": "", "content": {
                            **holds("application/json", reference(answer)), **holds("text/event-stream", {})}},
                            "default": {"description": "", "content": holds("application/json", ERROR)}}}}
        for path, (request, answer) in ROUTES.items()}}


def reference(name):
    return {"$ref": f"#/components/schemas/{name}"}


def holds(kind, schema):
    return {kind: {"schema": schema}}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", ROUTES)
def test_schemathesis(suite, gateway, engine, judge, path, tmp_path):
    front = gateway()
    (tmp_path / "api.json").write_text(json.dumps(api()))
    line = [suite("schemathesis") / "st", "run", tmp_path / "api.json", "--url", front.url, "--header", f"Authorization: Bearer {front.key}",
            "--include-path", path, "--checks", CHECKS, "--phases", "coverage,fuzzing", "--seed", "1", "--max-examples", "200"]
    done = subprocess.run(line, cwd=tmp_path, env=clean_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    print(done.stdout[-20000:], done.stderr[-3000:])
    assert done.returncode == 0
