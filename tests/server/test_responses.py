"""POST /v1/responses through the real server: the public compliance cases, how streams go and end, seals, large bodies."""
import json
import signal
import sqlite3
import threading
import time
from contextlib import closing

import pytest

from support.engine import (
    DONE,
    Close,
    Hang,
    Head,
    Json,
    Pause,
    Send,
    Wait,
    chat_chunks,
    completion,
    died,
    llama_chunks,
    refusal,
)
from support.gateway import run_keys
from support.observe import gauges
from support.processes import wait_until
from support.responses import PATH, PNG, said, types, whole
from support.rows import row_of

WEATHER = {"type": "function", "name": "get_weather", "description": "Get the current weather for a location",
           "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files"}
SEALED = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
CALL = [("get_weather", ['{"loca', 'tion": "Paris"}'])]
CUSTOM = [("apply_patch", ['{"input": "*** Be', 'gin\\n"}'])]


def ask(front, input="Hello", headers=None, **fields):
    return front.client().post(PATH, {"model": "GLM-5.3-Flash-EXL3", "input": input, **fields}, headers)


def text_of(response):
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def failure(answer):
    *events, last = said(answer)
    assert last["type"] == "response.failed"
    return last["response"]["error"], events


# ---- the cases of the Open Responses compliance suite (github.com/openresponses/openresponses)

def message(role, content):
    return {"type": "message", "role": role, "content": content}


def test_what_was_left_out_stands_in_a_header(shared):
    items = [{"type": "item_reference", "id": "rs_1"}, *[{"type": "shell_call", "call_id": "c", "action": {}}] * 30, message("user", "a")]
    for fields in ({}, {"stream": True}):
        answer = ask(shared, items, **fields)
        assert answer.read_all() and answer.status == 200
        header = answer.headers["x-sparks-ignored"]
        assert header.startswith("input[0] item_reference, input[1] shell_call, ") and header.endswith(", and 11 more")
        shared.engine.play(refusal(400, "a message without a call"))
        refused = ask(shared, items, **fields)
        assert (refused.status, refused.headers["x-sparks-ignored"]) == (400, header)
    assert "x-sparks-ignored" not in ask(shared).headers


def test_basic(shared):
    response = whole(ask(shared, [message("user", "Say hello in exactly 3 words.")]))
    assert response["status"] == "completed" and text_of(response) == "Hello there"


def test_streaming(shared):
    values = said(ask(shared, [message("user", "Count from 1 to 5.")], stream=True))
    assert values[-1]["response"]["status"] == "completed" and text_of(values[-1]["response"]) == "Hello there"
    assert "".join(value["delta"] for value in values if value["type"] == "response.output_text.delta") == "Hello there"


def test_system_prompt(shared):
    whole(ask(shared, [message("system", "You are a pirate."), message("user", "Say hello.")]))
    assert shared.engine.requests[-1].json()["messages"] == [
        {"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "Say hello."}]


def test_tool_calling(shared):
    shared.engine.play(Json(completion(None, tools=CALL)))
    response = whole(ask(shared, [message("user", "What's the weather like?")], tools=[WEATHER]))
    call, = response["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "get_weather", {"location": "Paris"})
    assert shared.engine.requests[-1].json()["tools"] == [
        {"type": "function", "function": {name: WEATHER[name] for name in ("name", "description", "parameters")}}]


def test_tool_calling_streamed(shared):
    shared.engine.play(*chat_chunks(None, tools=CALL, usage=True))
    values = said(ask(shared, [message("user", "What's the weather like?")], tools=[WEATHER], stream=True))
    assert types(values) == ["created", "in_progress", "output_item.added", *["function_call_arguments.delta"] * 2,
                             "function_call_arguments.done", "output_item.done", "completed"]
    assert values[-1]["response"]["output"] == [values[-2]["item"]]


def test_image_input(shared):
    parts = [{"type": "input_text", "text": "What do you see?"}, {"type": "input_image", "image_url": PNG}]
    assert whole(ask(shared, [message("user", parts)]))["status"] == "completed"
    assert shared.engine.requests[-1].json()["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": PNG}}


def test_multi_turn(shared):
    turns = [message("user", "My name is Alice."), message("assistant", "Hello Alice!"), message("user", "What is my name?")]
    assert whole(ask(shared, turns))["status"] == "completed"
    assert shared.engine.requests[-1].json()["messages"] == [
        {name: turn[name] for name in ("role", "content")} for turn in turns]


# ---- answers

@pytest.mark.parametrize("version", ["vLLM", "llama.cpp"])
def test_plain_and_stream_say_the_same(shared, version):
    said_by_both = {"reasoning": "Let me think", "tools": [("get_weather", {"location": "Paris"})], "usage": True}
    if version == "llama.cpp":
        shared.engine.play(*llama_chunks("Well", **said_by_both))
    else:
        shared.engine.play(*chat_chunks("Well", **said_by_both))
    terminal = said(ask(shared, tools=[WEATHER], stream=True, **SEALED))[-1]["response"]
    shared.engine.play(Json(completion("Well", reasoning="Let me think", tools=said_by_both["tools"])))
    plain = whole(ask(shared, tools=[WEATHER], **SEALED))
    assert terminal.keys() == plain.keys()
    for response in (terminal, plain):
        response["output"] = [{**item, "id": item["id"].partition("_")[0], "call_id": None, "encrypted_content": None}
                              for item in response["output"]]
    settled = ("output", "status", "tools", "tool_choice", "model", "text", "reasoning", "incomplete_details")
    assert [terminal[name] for name in settled] == [plain[name] for name in settled]


def test_ids_are_new_each_time(shared):
    one, other = whole(ask(shared)), whole(ask(shared))
    assert one["id"] != other["id"] and one["id"].startswith("resp_")
    assert not {item["id"] for item in one["output"]} & {item["id"] for item in other["output"]}
    assert abs(one["created_at"] - time.time()) < 5 and one["completed_at"] >= one["created_at"]


def test_a_custom_tool(shared):
    shared.engine.play(*chat_chunks(None, tools=CUSTOM, usage=True))
    values = said(ask(shared, tools=[PATCH], stream=True))
    assert "".join(value["delta"] for value in values if "delta" in value) == "*** Begin\n"
    call, = values[-1]["response"]["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n")
    history = [message("user", "Do it"), call, {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done"}]
    whole(ask(shared, history, tools=[PATCH]))
    turn, result = shared.engine.requests[-1].json()["messages"][1:]
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": "*** Begin\n"}
    assert result == {"role": "tool", "tool_call_id": call["call_id"], "content": "Done"}


def test_the_engine_s_model_and_the_gateway_s(shared):
    assert whole(ask(shared))["model"] == shared.engine.requests[-1].json()["model"] == "GLM-5.3-Flash-EXL3"
    assert ask(shared, model="nothing").json()["error"]["code"] == "model_not_found"


# ---- sealed reasoning

def test_reasoning_goes_out_sealed_and_comes_back(shared):
    response = whole(ask(shared, **SEALED))
    thought = response["output"][0]
    assert thought["summary"] == [{"type": "summary_text", "text": "Let me think"}]
    sealed = thought["encrypted_content"]
    assert "think" not in sealed
    carried = [message("user", "Hello"), {"type": "reasoning", "summary": [], "encrypted_content": sealed},
               message("assistant", "Hello there"), message("user", "Go on")]
    whole(ask(shared, carried))
    assert shared.engine.requests[-1].json()["messages"][1] == {
        "role": "assistant", "content": "Hello there", "reasoning_content": "Let me think"}


@pytest.mark.parametrize("forge", [lambda sealed: sealed[:-8] + "AAAAAAAA", lambda sealed: "gAAAAABo",
                                   lambda sealed: "é" + sealed, lambda sealed: sealed[:10], lambda sealed: "A" * 40],
                         ids=["changed", "another's", "no ASCII", "cut", "zeros"])
def test_what_does_not_open_is_left_out(shared, forge):
    sealed = whole(ask(shared, **SEALED))["output"][0]["encrypted_content"]
    item = {"type": "reasoning", "summary": [], "encrypted_content": forge(sealed)}
    whole(ask(shared, [message("user", "Hello"), item, message("assistant", "Hello there"), message("user", "Go on")]))
    assert shared.engine.requests[-1].json()["messages"][1] == {"role": "assistant", "content": "Hello there"}


def test_seals_open_after_a_restart_and_nowhere_else(gateway, engine, tmp_path):
    front, other = gateway(), gateway(db=tmp_path / "other.db", wait="alive")
    sealed = whole(ask(front, **SEALED))["output"][0]["encrypted_content"]
    front.kill()
    front.launch()
    front.wait_alive().wait_ready()
    item = [{"type": "reasoning", "summary": [], "encrypted_content": sealed}, message("user", "Go on")]
    whole(ask(front, item))
    assert engine.requests[-1].json()["messages"][0].get("reasoning_content") == "Let me think"
    other.key = other.add_key("ann")
    whole(ask(other, item))
    assert engine.requests[-1].json()["messages"] == [{"role": "user", "content": "Go on"}]


def test_an_old_database_gets_its_key_once(tmp_path):
    db, found = tmp_path / "sparks.db", set()
    assert run_keys("list", db=db).returncode == 0
    with closing(sqlite3.connect(db)) as connection:
        connection.execute("DROP TABLE secret")
        connection.execute("DELETE FROM migration WHERE name = 'first_seal'")
        connection.commit()
        for _ in range(2):
            assert run_keys("list", db=db).returncode == 0
            found |= set(connection.execute("SELECT value FROM secret").fetchall())
    (key,), = found
    assert len(key) == 32


# ---- failures

@pytest.mark.parametrize("steps, status, code", [
    ([refusal(400, "This model's maximum context length is 10 tokens")], 400, "context_length_exceeded"),
    ([refusal(503, "busy")], 503, "model_unavailable"), ([died(), DONE], 500, "upstream_error"),
    ([chat_chunks("Hello")[0], died(), DONE], 500, "upstream_error"), ([chat_chunks("Hello")[0]], 502, "upstream_error"),
    ([Head(), Close()], 502, "upstream_error"), ([Json({"choices": 5})], 502, "upstream_error")])
@pytest.mark.parametrize("streams", [True, False])
def test_what_fails_before_the_first_token_is_an_http_status(shared, steps, status, code, streams):
    shared.engine.play(*steps)
    answer = ask(shared, stream=streams)
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (status, code) and error["message"]
    if code == "context_length_exceeded":
        assert error["param"] == "input"


@pytest.mark.parametrize("steps", [[died(), DONE], [Close()], []])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_what_fails_later_is_the_last_event(shared, steps, count):
    shared.engine.play(Head(), *chat_chunks("Hello there", reasoning="Let me")[:count], *steps)
    error, events = failure(ask(shared, stream=True))
    assert error["code"] == "server_error" and error["message"]
    assert types(events)[:2] == ["created", "in_progress"]


@pytest.fixture
def hasty(gateway, engine):
    return gateway(keepalive=0.2, answer_timeout=1, queue_timeout=0.7, stall_timeout=1, max_active=1, drain=0.2)


def test_events_keep_a_silent_stream_alive(hasty, engine):
    chunks = chat_chunks("Hello there", usage=True)
    engine.play(Head(), Pause(0.7), *chunks[:2], Pause(0.7), *chunks[2:])
    events = list(ask(hasty, stream=True).events())
    kinds = types(event.json() for event in events)
    assert kinds[:4] == ["created", "in_progress", "in_progress", "in_progress"] and kinds.count("created") == 1
    assert "in_progress" in kinds[kinds.index("output_text.delta"):] and kinds[-1] == "completed"
    assert [event.json()["sequence_number"] for event in events] == [*range(len(events))]


def test_an_engine_that_never_begins(hasty, engine):
    engine.play(Hang())
    error, events = failure(ask(hasty, stream=True))
    assert "has not answered within 1 seconds" in error["message"] and set(types(events)) == {"created", "in_progress"}


def test_an_engine_that_refuses_after_the_head(hasty, engine):
    engine.play(Pause(0.4), refusal(400, "This prompt cannot be"))
    assert failure(ask(hasty, stream=True))[0] == {"code": "invalid_prompt", "message": "This prompt cannot be"}


def test_an_engine_that_stalls(hasty, engine):
    engine.play(Head(), *chat_chunks("Hello there", reasoning="Let me")[:4], Hang())
    error, events = failure(ask(hasty, stream=True))
    assert "no token for 1 seconds" in error["message"] and "output_text.delta" in types(events)


def test_a_queue_that_lasts_too_long(hasty, engine):
    engine.play(Head(), *[step for _ in range(20) for step in (chat_chunks("a")[1], Pause(0.1))])
    first = ask(hasty, stream=True)
    error, events = failure(ask(hasty, stream=True))
    assert error["code"] in ("server_error", "rate_limit_exceeded") and set(types(events)) == {"created", "in_progress"}
    first.close()


def test_the_gateway_s_end(hasty, engine):
    engine.play(Head(), *chat_chunks("Hello there")[:3], Hang())
    answer = ask(hasty, stream=True)
    engine.wait_for(1)
    wait_until(lambda: gauges(hasty)["sparks_active"] == 1, 5)
    hasty.process.send_signal(signal.SIGTERM)
    assert failure(answer)[0] == {"code": "server_error", "message": "the gateway is restarting; send the request again"}


def test_refusals_have_openai_s_shape(shared):
    answer = ask(shared, previous_response_id="resp_1")
    assert answer.status == 400 and answer.json()["error"] == {
        "message": "previous_response_id is not supported: nothing is stored here, so an answer cannot be built on an earlier "
                   "one; send all items in `input`, with store: false",
        "type": "invalid_request_error", "code": "invalid_request", "param": "previous_response_id"}
    assert shared.client(key="sk-sparks-wrong").post(PATH, {"input": "a"}).json()["error"]["code"] == "invalid_api_key"
    assert shared.client().get(PATH).status == 405 and shared.client().get(PATH + "/resp_1").status == 404


def test_limits_count_it_too(gateway, engine):
    front = gateway()
    assert front.keys("limit", "tester", "--rpm", "1").returncode == 0
    whole(ask(front))
    answer = ask(front, stream=True)
    assert answer.status == 429 and answer.headers["retry-after"] and answer.json()["error"]["code"] == "rate_limit_exceeded"


def test_slots_are_the_same_ones(hasty, engine):
    """A chat holds the only slot; the Response waits for it, and is told so."""
    engine.play(Head(), chat_chunks("a")[0], Wait(go := threading.Event()), *chat_chunks("a")[1:])
    chat = hasty.client().post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True})
    events = ask(hasty, stream=True).events()
    assert next(events).comment == "queued 1"
    go.set()
    chat.read_all()
    assert list(events)[-1].name == "response.completed"


def test_the_row(shared):
    shared.engine.play(*chat_chunks("Hello there", reasoning="Let me think", usage=True, cached=7))
    values = said(ask(shared, stream=True, headers={"x-request-id": "responses-row"}))
    usage = values[-1]["response"]["usage"]
    row = row_of(shared.gateway.db, "responses-row")
    assert (row["route"], row["status"], row["counted"], row["streamed"]) == ("POST /v1/responses", 200, "engine", 1)
    assert (row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"], row["reasoning_tokens"]) == (
        usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"],
        usage["output_tokens_details"]["reasoning_tokens"]) == (15, 7, 7, 3)


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "plain"])
def test_an_engine_without_figures(shared, streams):
    """Its tokens are counted here: a client is told whole numbers, and the row has the same."""
    shared.engine.play(*(chat_chunks("Hello there") if streams else [Json({**completion("Hello there"), "usage": None})]))
    answer = ask(shared, stream=streams, headers={"x-request-id": (ident := f"responses-figures-{streams}")})
    response = said(answer)[-1]["response"] if streams else answer.json()
    row, usage = row_of(shared.gateway.db, ident), response["usage"]
    told = [usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]]
    assert told == [row["prompt_tokens"], row["completion_tokens"], row["prompt_tokens"] + row["completion_tokens"]]
    assert min(told) > 0 and row["counted"] == "gateway"


# ---- large bodies

LONG = 'A "long" text, \\ and é\n' * 2000


@pytest.mark.parametrize("streams", [True, False])
def test_long_texts_in_a_large_body_are_whole_wherever_they_go(shared, streams):
    """They are taken out while it comes in: the engine gets them back, and so does the Response that repeats them."""
    sealed = "x" * 30_000
    image = "data:image/png;base64," + "A" * (3 << 20)
    tool = {**PATCH, "description": LONG}
    items = [message("user", [{"type": "input_image", "image_url": image}, {"type": "input_text", "text": LONG}]),
             {"type": "reasoning", "summary": [], "encrypted_content": sealed},
             {"type": "custom_tool_call", "call_id": "A", "name": "apply_patch", "input": LONG},
             {"type": "custom_tool_call_output", "call_id": "A", "output": LONG}]
    answer = ask(shared, items, tools=[tool], instructions=LONG, stream=streams)
    response = said(answer)[-1]["response"] if streams else whole(answer)
    assert response["instructions"] == LONG and response["tools"][0]["description"] == LONG
    sent = shared.engine.requests[-1].json()
    system, user, turn, result = sent["messages"]
    assert system["content"] == result["content"] == LONG and user["content"][1]["text"] == LONG
    assert user["content"][0]["image_url"]["url"] == image
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == {"input": LONG}
    assert sent["tools"][0]["function"]["description"] == LONG


def test_a_client_that_reads_slowly_gets_it_all(shared):
    shared.engine.play(Send(b"".join(chat_chunks(["word " * 20] * 3000, usage=True))))
    answer = shared.client(rcvbuf=4096).post(PATH, {"input": "Hello", "stream": True})
    assert text_of(said(answer)[-1]["response"]) == "word " * 60_000


@pytest.mark.parametrize("streams", [True, False])
def test_what_a_response_repeats_is_bounded(shared, streams):
    """A stream says it three times; the gateway stood still for a second, with 90 MB of it."""
    answer = shared.client().post(PATH, {"input": "Hello", "instructions": "x" * (9 << 20), "stream": streams})
    assert answer.status == 400 and answer.json()["error"]["param"] == "instructions"
    answer = shared.client().post(PATH, {"input": "x" * (9 << 20), "instructions": "y" * (3 << 20), "stream": streams})
    assert answer.status == 200 and answer.read_all().count(b"y" * (3 << 20)) == (3 if streams else 1)
