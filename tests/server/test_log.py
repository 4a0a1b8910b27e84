"""What others call their models, and say, never reaches a terminal raw: the log, the start screen, the owner's commands."""
import json
import os

import pytest
from click.testing import CliRunner

import keys
from support.chat import PATH
from support.engine import Json
from support.processes import wait_until

ODD = "glm\x1b[2J\x07\x85\u2028\u2029\u202e\x9b\r\nstatus=200 \ufeff5"


def check(text):
    """Each line as it may be shown, none of another's making."""
    lines = text.removesuffix("\n").split("\n")
    assert all(line.isprintable() for line in lines), lines
    assert not any(line.startswith("status=200") for line in lines)
    return lines


@pytest.mark.parametrize("form", ["logfmt", "json"])
def test_a_models_name(gateway, engine, form):
    engine.models = [{"id": ODD}]
    front = gateway(log=form)
    engine.on("/v1/embeddings", [Json({"error": {"message": ODD, "type": ODD, "code": ODD}}, 400)])
    wait_until(lambda: "engine   " in front.log, 8, what="the start screen")
    for body in ({"model": ODD}, {}, {"stream": True}):
        assert front.client().post(PATH, {"messages": [{"role": "user", "content": ODD}], **body}, {"x-sparks-odd": ODD[:3]}).status == 200
    front.client().post("/v1/embeddings", {"model": ODD, "input": ODD})
    front.client().get("/v1/%1b%c2%85%e2%80%a8%0a%0dstatus=200")
    engine.models = [{"id": ODD + "2"}]             # a line about the engine
    wait_until(lambda: "\\ufeff52" in front.log, 8, what="its new name in the log")
    lines = check(front.log)
    if form == "json":
        found = [json.loads(line) for line in lines if line.startswith("{")]
        assert sum(one.get("model") == ODD for one in found) >= 3
        return
    for command in (["log"], ["log", "--json"], ["usage", "--by", "model"], ["usage", "--by", "model", "--csv"], ["list"],
                    ["show", row_id(front)], ["show", "\x1b[2J"], ["revoke", "\x1b[2J"], ["limit", ODD, "--models", ODD]):
        check("".join(run_keys(front, *command)))
    assert "\\x1b" in run_keys(front, "log")[0] and "\\u2028" in run_keys(front, "usage", "--by", "model")[0]


def row_id(front):
    return json.loads(run_keys(front, "log", "-n", "4", "--json")[0].splitlines()[0])["id"]


def run_keys(front, *arguments):
    """What `./run.sh keys ...` says: (stdout, stderr)."""
    try:
        done = CliRunner().invoke(keys.cli, arguments, env={"SPARKS_DB": f"sqlite:///{front.db}", "SPARKS_CONFIG": os.devnull})
    finally:
        keys.database.close()
    return done.stdout, done.stderr
