"""A model's template is asked what it does with the controls of thinking: what people and the log hear of it, what the
engine gets, and what comes of thoughts that nobody wanted."""
import os
import signal
import time
from threading import Event

import pytest

from support import engine as engine_side
from support import responses
from support.chat import PATH as CHAT
from support.chat import deltas
from support.engine import (
    MODELS,
    Close,
    Engine,
    Hang,
    Head,
    Json,
    Pause,
    Wait,
    chat_chunks,
    completion,
    died,
)
from support.gateway import started
from support.messages import transcript
from support.processes import wait_until
from support.rows import rows
from support.templates import TEMPLATES

MESSAGES = "/v1/messages"
OWN = MODELS[0]["id"]
QUESTION = [{"role": "user", "content": "What is it?"}]


def body(path, **fields):
    asked = {"input": QUESTION} if path == responses.PATH else {"messages": QUESTION}
    return {**asked, **({"max_tokens": 500} if path == MESSAGES else {}), **fields}


def post(front, path, **fields):
    return front.client().post(path, body(path, **fields))


def said(answer, path, streams):
    """(reasoning, content) of an answer, as a client of that API adds them up."""
    assert answer.status == 200
    if path == CHAT:
        found = deltas(answer) if streams else [answer.json()["choices"][0]["message"]]
        return tuple("".join(delta.get(name) or "" for delta in found) for name in ("reasoning", "content"))
    if path == MESSAGES:
        if not streams:
            blocks = answer.json()["content"]
            return tuple("".join(block.get(kind, "") for block in blocks) for kind in ("thinking", "text"))
        found = [line for line in transcript(answer.read_all()) if len(line) == 3]
        return tuple("".join(line[2] for line in found if line[1] == kind) for kind in ("+thinking", "+text"))
    response = responses.said(answer)[-1]["response"] if streams else responses.whole(answer)
    parts = [(part["type"], part["text"]) for item in response["output"] for part in item.get("content", ())]
    return tuple("".join(text for kind, text in parts if kind == wanted) for wanted in ("reasoning_text", "output_text"))


def told(front):
    """What /help says of the default model's controls."""
    return front.client(key=False).get("/help?format=json").json()["reasoning"]


@pytest.fixture(scope="module")
def unswitched(tmp_path_factory, stock):
    """A gateway before a model that thinks whatever it is told, and the engine."""
    with Engine() as engine:
        engine.template = TEMPLATES["no-switch"]
        with started(engine, tmp_path_factory.mktemp("unswitched"), stock, model="glm-5.3-flash", keepalive=0.3) as front:
            yield front, engine
        assert not engine.faults


@pytest.fixture
def front(unswitched):
    front, engine = unswitched
    with engine.changed:
        engine.requests.clear()
    yield front
    assert not engine.scripts


@pytest.fixture
def model(unswitched):
    return unswitched[1]


# ---- what is found

@pytest.mark.parametrize("like, name, about", [
    ("vllm", "no-switch", "a GLM template that always thinks"), ("llama", "no-switch", "a GLM template that always thinks"),
    ("llama", "none", "a model without such a control")])
def test_what_was_found_is_told(gateway, engine, like, name, about):
    engine.like, engine.template = like, TEMPLATES[name]
    front = gateway()
    assert f"model {OWN} has {about} (asked of its template)" in front.log
    assert (told(front)["about"], told(front)["known"]) == (about, "asked of its template")
    page = front.client(key=False).get("/help?format=md").read_all().decode()
    assert "asked of its template" in page
    assert "Thinking can't be turned off on this model" in page or name != "no-switch"


def test_it_is_asked_once_for_each_load(gateway, engine):
    """Whether people may use it or not."""
    config = f"[[engines]]\nurl = '{engine.url}'\n"
    front = gateway(" ", config=config, poll=0.05).wait_ready()
    asked = len(engine.learned)
    assert 20 < asked < 40
    before = len(engine.probes)
    wait_until(lambda: len(engine.probes) > before + 20, 5)
    assert len(engine.learned) == asked
    front.settings["config"].write_text(config + "drain = true")
    os.kill(front.pid, signal.SIGHUP)
    wait_until(lambda: "is draining" in front.log, 5)
    before = len(engine.probes)
    wait_until(lambda: len(engine.probes) > before + 20, 5)
    assert len(engine.learned) == asked
    front.settings["config"].write_text(config)
    os.kill(front.pid, signal.SIGHUP)
    engine.template = TEMPLATES["qwen"]
    engine.models = [{"id": "other", "max_model_len": 5000}]
    wait_until(lambda: "model other has a template with the switch enable_thinking only" in front.log, 5)
    assert len(engine.learned) == 2 * asked
    engine.template = TEMPLATES["no-switch"]            # the same name, after a start of the engine
    engine.stop()
    wait_until(lambda: "models loaded: none" in front.log, 5)
    engine.start()
    wait_until(lambda: "model other has a GLM template that always thinks" in front.log, 5)
    assert len(engine.learned) == 3 * asked


def test_another_kind_of_engine_may_come_back_with_the_same_model(gateway, engine):
    front = gateway(poll=0.05)
    engine.stop()
    wait_until(lambda: "models loaded: none" in front.log, 5)
    engine.like, engine.template = "llama", TEMPLATES["no-switch"]
    engine.start()
    wait_until(lambda: told(front)["table"] == "no-switch", 5)


def test_adapters_have_the_template_of_their_model(gateway, engine):
    engine.template = TEMPLATES["no-switch"]
    engine.models = [{"id": "base", "max_model_len": 5000, "root": "/base"},
                     *({"id": f"adapter{n}", "root": f"/{n}", "parent": "base", "max_model_len": 5000} for n in range(50))]
    front = gateway(poll=0.05)
    assert len(engine.learned) < 40
    for fields in ({"model": "base"}, {"model": "adapter49"}):
        assert post(front, CHAT, reasoning_effort="none", **fields).status == 200
        assert engine.requests[-1].json()["chat_template_kwargs"] == LEAST


def test_what_the_settings_say_wins(gateway, engine):
    engine.template = TEMPLATES["no-switch"]
    front = gateway(config=f'[models."{OWN}"]\neffort = "qwen"\n')
    assert (told(front)["table"], told(front)["known"]) == ("qwen", "set in sparks.toml")
    assert post(front, CHAT, reasoning_effort="none").status == 200
    assert engine.requests[-1].json()["chat_template_kwargs"] == {"enable_thinking": False}
    answer = post(front, CHAT, chat_template_kwargs={"enable_thinking": False})
    assert "x-sparks-ignored" not in answer.headers and engine.requests[-1].json()["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("steps", [
    [Json({"detail": "Not Found"}, 404)], [Close()], [Head(framing=5 << 20), b"x" * (5 << 20)], [Pause(30)]])
def test_an_engine_that_can_not_be_asked_keeps_the_default(gateway, engine, steps):
    engine.on("/tokenize", steps)
    began = time.monotonic()
    front = gateway()
    assert time.monotonic() - began < 10                # the start, and a look that gives the question up
    assert (told(front)["table"], told(front)["known"]) == ("glm", "assumed: its engine could not be asked")
    assert post(front, CHAT, reasoning_effort="none").status == 200
    assert engine.requests[-1].json()["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_busy_engine_is_asked_beside_the_looks(engine, tmp_path, stock):
    engine.template = TEMPLATES["no-switch"]
    engine.on("/tokenize", lambda request: [Pause(0.05), *engine_side.probe_answer(engine, request)])
    with started(engine, tmp_path, stock, "from engines import engine; engine.ASK_PATIENCE = 0.1", poll=30) as front:
        assert told(front)["table"] == "glm"
        wait_until(lambda: told(front)["table"] == "no-switch", 10)


def test_a_question_in_vain_is_asked_again(gateway, engine):
    engine.on("/tokenize", [Json({"error": "overloaded"}, 503)])
    front = gateway(poll=0.05)
    engine.template = TEMPLATES["no-switch"]
    assert told(front)["table"] == "glm"
    engine.on("/tokenize", None)
    wait_until(lambda: told(front)["table"] == "no-switch", 5)


def test_a_question_in_vain_says_nothing_of_the_engine(gateway, engine):
    """A proxy before it that cuts what it does not know: its looks may go wrong as those of any other."""
    engine.on("/tokenize", [Close()])
    front = gateway(poll=0.05)
    asked = len(engine.learned)
    wait_until(lambda: len(engine.learned) > asked, 5)
    engine.on("/v1/models", [Close()])
    before = len(engine.probes)
    wait_until(lambda: len(engine.probes) > before + 6, 5)
    assert post(front, CHAT).status == 200 and "is off" not in front.log


def test_a_model_that_is_not_loaded_is_not_loaded_by_a_question(gateway, engine):
    """As the router of llama.cpp lists them."""
    engine.like = "llama"
    status = {"value": "unloaded"}
    entry = {"id": "later", "object": "model", "owned_by": "llamacpp", "created": 0, "meta": None, "status": status}
    engine.on("/v1/models", lambda request: [Json({"object": "list", "data": [entry]})])
    front = gateway(poll=0.05)
    before = len(engine.probes)
    wait_until(lambda: len(engine.probes) > before + 6, 5)
    assert not engine.learned and told(front)["table"] == "glm"
    engine.template = TEMPLATES["no-switch"]
    status["value"] = "loaded"
    wait_until(lambda: told(front)["table"] == "no-switch", 5)
    asked = len(engine.learned)
    status["value"] = "unloaded"                        # what loads it next finds the template that it had
    before = len(engine.probes)
    wait_until(lambda: len(engine.probes) > before + 6, 5)
    assert len(engine.learned) == asked and post(front, CHAT, reasoning_effort="none").status == 200
    assert engine.requests[-1].json()["chat_template_kwargs"] == LEAST
    status["value"] = "loaded"
    wait_until(lambda: len(engine.learned) == 2 * asked, 5)


def test_what_a_token_is_was_asked(gateway, engine):
    """An engine that counts nothing: its prompts are charged by its tokenizer's bytes, here one a token."""
    engine.on("/tokenize", lambda request: [Json({"count": len(request.json()["prompt"]), "tokens": []})]
              if "prompt" in request.json() else engine_side.probe_answer(engine, request))
    front = gateway()
    engine.play(Json({**completion("Hello"), "usage": None}))
    assert front.client().post(CHAT, {"messages": [{"role": "user", "content": "x" * 4000}]}).status == 200
    wait_until(lambda: rows(front.db), 5)
    assert 4000 < rows(front.db)[-1]["prompt_tokens"] < 4300


# ---- what the engine gets, where there is no switch

LEAST = {"reasoning_effort": "low"}


@pytest.mark.parametrize("path, fields, kwargs, ignored", [
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, None, "chat_template_kwargs enable_thinking"),
    (CHAT, {"chat_template_kwargs": {"thinking": False, "a": 1}}, {"a": 1}, "chat_template_kwargs thinking"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "max"}, {"reasoning_effort": "max"},
     "chat_template_kwargs enable_thinking"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": None}}, None, "chat_template_kwargs enable_thinking"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}, None),
    (CHAT, {"chat_template_kwargs": {"reasoning_effort": "none"}}, LEAST, None),
    (CHAT, {"chat_template_kwargs": {"reasoning_effort": "max"}}, {"reasoning_effort": "max"}, None),
    (CHAT, {"thinking": False}, LEAST, "thinking false"), (CHAT, {"enable_thinking": False}, None, "enable_thinking false"),
    (CHAT, {"thinking": {"type": "disabled"}}, LEAST, None), (CHAT, {"think": False}, LEAST, None),
    (CHAT, {"reasoning_effort": "none"}, LEAST, None), (CHAT, {"reasoning_effort": "minimal"}, LEAST, None),
    (CHAT, {"reasoning": {"enabled": False}}, LEAST, None), (CHAT, {}, None, None),
    (MESSAGES, {}, LEAST, None), (MESSAGES, {"thinking": {"type": "disabled"}}, LEAST, None),
    (MESSAGES, {"chat_template_kwargs": {"enable_thinking": False}}, LEAST, "chat_template_kwargs enable_thinking"),
    (MESSAGES, {"enable_thinking": False}, LEAST, "enable_thinking false"),
    (MESSAGES, {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"thinking": False}}, {"reasoning_effort": "high"},
     "chat_template_kwargs thinking"),
    (responses.PATH, {"reasoning": {"effort": "none"}}, LEAST, None), (responses.PATH, {"reasoning": {"effort": "minimal"}}, LEAST, None),
    (responses.PATH, {"chat_template_kwargs": {"enable_thinking": False}}, None, "chat_template_kwargs enable_thinking"),
    (responses.PATH, {"enable_thinking": False}, None, "enable_thinking false"),
])
@pytest.mark.parametrize("streams", [True, False])
def test_a_switch_that_is_not_there_is_left_out(front, model, path, fields, kwargs, ignored, streams):
    answer = post(front, path, stream=streams, **fields)
    assert answer.status == 200 and answer.headers.get("x-sparks-ignored") == ignored and answer.read_all()
    sent = model.requests[-1].json()
    assert sent.get("chat_template_kwargs") == kwargs and not {"enable_thinking", "thinking", "reasoning_effort"} & sent.keys()


def test_count_tokens_counts_what_is_sent(front, model):
    answer = post(front, MESSAGES + "/count_tokens", chat_template_kwargs={"enable_thinking": False})
    assert answer.headers["x-sparks-ignored"] == "chat_template_kwargs enable_thinking"
    assert [probe for probe in model.probes if probe.path == "/tokenize"][-1].json()["chat_template_kwargs"] == LEAST


# ---- what comes back

# Off, in the words of each API.
WAYS = [(CHAT, {"reasoning_effort": "none"}), (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"think": False}), (MESSAGES, {}), (MESSAGES, {"thinking": {"type": "disabled"}}),
        (responses.PATH, {"reasoning": {"effort": "none"}})]
SCRATCHPAD = ["2+2", " is", " easy.\n", "</", "think>", "\n\n", "4", ", of course"]


@pytest.mark.parametrize("path, fields", WAYS)
@pytest.mark.parametrize("streams", [True, False])
def test_thoughts_without_a_beginning_are_no_answer(front, model, path, fields, streams):
    if streams:
        model.play(*chat_chunks(SCRATCHPAD, usage=True))
    else:
        model.play(Json(completion("".join(SCRATCHPAD))))
    reasoning, content = said(post(front, path, stream=streams, **fields), path, streams)
    assert (reasoning, content) == ("" if path == MESSAGES else "2+2 is easy.", "4, of course")


@pytest.mark.parametrize("path, fields", WAYS)
def test_a_plain_answer_to_a_stream_and_the_reverse(front, model, path, fields):
    for streams, answer in ((True, [Json(completion("".join(SCRATCHPAD)))]), (False, chat_chunks(SCRATCHPAD, usage=True))):
        model.play(*answer)
        assert said(post(front, path, stream=streams, **fields), path, streams)[1] == "4, of course"


@pytest.mark.parametrize("path, fields", WAYS)
def test_an_answer_that_is_just_one_is_all_there(front, model, path, fields):
    """With a quotation in it, with the engine's own reasoning before it, with a call after it."""
    tool = {"input_schema": {}, "name": "f"} if path == MESSAGES else {"type": "function", "function": {"name": "f", "parameters": {}}}
    for chunks, content in (
        (chat_chunks("A short answer.", usage=True), "A short answer."),
        (chat_chunks("The tag `</think>` ends it.", usage=True), "The tag `</think>` ends it."),
        (chat_chunks("The end tag is </think> there.", "hm", usage=True), "The end tag is </think> there."),
        (chat_chunks("I look it up.", tools=[("f", {})], usage=True), "I look it up."),
    ):
        model.play(*chunks)
        assert said(post(front, path, stream=True, tools=[tool], **fields), path, True)[1] == content


@pytest.mark.parametrize("path, fields", [WAYS[0], WAYS[3], WAYS[5]])
def test_what_is_held_comes_with_the_keep_alive_at_the_latest(front, model, path, fields):
    """An answer that comes slowly is kept from the client no longer."""
    chunks, go_on = chat_chunks(["one", " two", " three"], usage=True), Event()
    model.play(*chunks[:2], Wait(go_on), *chunks[2:])
    answer = post(front, path, stream=True, **fields)
    assert b"two" not in until_said(answer, b"one")
    go_on.set()
    assert b"three" in answer.read_all()


@pytest.mark.parametrize("path, fields", [WAYS[0], WAYS[3]])
@pytest.mark.parametrize("end", [[], [Close()], [died()], chat_chunks(" two", finish="abort", usage=True)[1:]])
def test_what_is_held_comes_before_an_error(front, model, path, fields, end):
    model.play(*chat_chunks("one", usage=True)[:2], *end)
    text = post(front, path, stream=True, **fields).read_all()
    assert b"one" in text and (b"event: error" in text or b'"error":{' in text)


@pytest.mark.parametrize("path, fields", [WAYS[0], WAYS[3], WAYS[5]])
def test_a_stall_after_what_was_held_is_one(gateway, engine, path, fields):
    """And no answer that has not begun."""
    engine.template = TEMPLATES["no-switch"]
    front = gateway(keepalive=0.3, stall_timeout=1)
    engine.play(*chat_chunks("one two", usage=True)[:2], Hang())
    text = post(front, path, stream=True, **fields).read_all()
    assert b"one" in text and b"no token for 1 seconds" in text
    wait_until(lambda: rows(front.db), 5)
    assert rows(front.db)[-1]["error"] == "upstream_timeout" and rows(front.db)[-1]["first_ms"] is not None


def until_said(answer, words):
    """What has come when these words have, while the stream goes on."""
    seen = b""
    for data, _ in answer.pieces():
        seen += data
        if words in seen:
            return seen
    raise AssertionError(seen)


def test_a_stream_that_wants_thoughts_or_has_a_switch_is_not_held(front, model, gateway, engine):
    """Nor is one of a model whose prompt opens no thoughts: there can be no such tag."""
    plain = gateway()
    with Engine() as other:
        other.template = TEMPLATES["none"]
        quiet = gateway(upstream=other.url, wait="ready")
        for where, source, path, fields in ((front, model, CHAT, {}), (front, model, CHAT, {"reasoning_effort": "high"}),
                                            (plain, engine, CHAT, {"reasoning_effort": "none"}), (plain, engine, MESSAGES, {}),
                                            (quiet, other, CHAT, {"reasoning_effort": "none"}), (quiet, other, MESSAGES, {})):
            chunks, go_on = chat_chunks(["one", " two"], usage=True), Event()
            source.play(*chunks[:2], Wait(go_on), *chunks[2:])
            answer = post(where, path, stream=True, **fields)
            until_said(answer, b'"one"')
            go_on.set()
            assert answer.read_all()


def test_held_tokens_count_where_a_client_leaves(front, model):
    played, go_on = Event(), Event()

    def script():
        yield from chat_chunks(["w"] * 150, done=False)[:131]
        played.set()
        yield Wait(go_on)

    model.always(lambda request: script())
    try:
        connection = front.client().open()
        connection.start("POST", CHAT, body(CHAT, stream=True, reasoning_effort="none"))
        assert played.wait(10)
        for _ in range(2):                              # the second one comes when all of it has long been read
            wait_until(lambda: b"keep-alive" in connection.read(), 5)
        connection.close()
        assert model.requests[-1].gone.wait(10)
    finally:
        model.always(None)
        go_on.set()
    wait_until(lambda: rows(front.db, "aborted"), 5)
    assert rows(front.db, "aborted")[-1]["completion_tokens"] >= 100
