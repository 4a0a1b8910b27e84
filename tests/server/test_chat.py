"""POST /v1/chat/completions through the real server: what passes, what is owned, how streams go and end."""
import json
import threading
import time

import pytest
import requests
import sseclient

from support.chat import HELLO, PATH, deltas, failure, text_of
from support.engine import (
    Close,
    Dribble,
    Early,
    End,
    Hang,
    Head,
    Json,
    Pause,
    Raw,
    ReadBody,
    Reset,
    Send,
    Wait,
    chat_chunks,
    chunk,
    completion,
    died,
    llama_chunks,
    refusal,
    sse,
)


def ask(**fields):
    return {"model": "GLM-5.3-Flash-EXL3", "messages": HELLO, **fields}


def stream(**fields):
    return ask(stream=True, **fields)


# ---- plain

def test_plain_answer(shared):
    shared.engine.play(Json(completion("Yes indeed", reasoning="Ok")))
    answer = shared.client().post(PATH, ask())
    body = answer.json()
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    message = body["choices"][0]["message"]
    assert message["content"] == "Yes indeed"
    assert message["reasoning"] == message["reasoning_content"] == "Ok"
    assert body["model"] == "GLM-5.3-Flash-EXL3" and body["usage"]["completion_tokens"]


def test_unknown_fields_pass_untouched(shared):
    odd = {"n": 1, "logprobs": True, "top_logprobs": 2, "seed": 7, "stop": ["a"], "response_format": {"type": "json_object"},
           "vllm_xargs": {"deep": [1, {"er": None}]}, "min_p": 0.1, "top_k": -1, "user": "x", "metadata": {"a": "b"},
           "chat_template_kwargs": {"custom": [1, 2]}, "tool_choice": "required", "temperature": 1e-7,
           "tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": {}}, "strict": True}}]}
    shared.client().post(PATH, ask(**odd)).json()
    sent = shared.engine.requests[-1].json()
    assert sent == ask(**odd)


def test_request_id_is_passed_on(shared):
    answer = shared.client().post(PATH, ask(), headers={"X-Request-Id": "abc.DEF_1-2"})
    assert answer.headers["x-request-id"] == "abc.DEF_1-2"
    assert shared.engine.requests[-1].header("x-request-id") == "abc.DEF_1-2"
    other = shared.client().post(PATH, ask(), headers={"X-Request-Id": "no good;"})
    assert len(other.headers["x-request-id"]) == 32


def test_engine_that_streams_to_a_plain_request(shared):
    chunks = chat_chunks("Hello there", reasoning="Well", usage=True)
    shared.engine.play(*chunks)
    body = shared.client().post(PATH, ask()).json()
    assert body["object"] == "chat.completion" and body["usage"]["prompt_tokens"] == 15
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello there", "reasoning": "Well",
                                             "reasoning_content": "Well", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"


def test_engine_that_streams_tool_calls_to_a_plain_request(shared):
    shared.engine.play(*chat_chunks(None, tools=[("get_weather", {"city": "Paris"}), ("get_time", {})]))
    calls = shared.client().post(PATH, ask()).json()["choices"][0]["message"]["tool_calls"]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == \
        [("get_weather", {"city": "Paris"}), ("get_time", {})]


def test_engine_that_breaks_off_a_plain_answer(shared):
    shared.engine.play(Head(framing=1000, type="application/json"), b'{"id": "chatcmpl-1", ', Close())
    answer = shared.client().post(PATH, ask())
    assert answer.status == 502 and answer.json()["error"]["code"] == "upstream_error"


@pytest.mark.parametrize("close", [Close(), Reset()])
def test_engine_that_closes_without_an_answer(shared, close):
    shared.engine.always([close])                       # always: on a reused connection it is tried once more
    answer = shared.client().post(PATH, ask())
    assert answer.status == 502 and answer.json()["error"]["code"] == "upstream_error"


def test_stale_connection_is_tried_once_more(shared):
    shared.client().post(PATH, ask()).json()            # leaves an idle connection
    shared.engine.always(lambda request: [Close()] if request.nth > 1 else [Json(completion("again"))])
    assert shared.client().post(PATH, ask()).json()["choices"][0]["message"]["content"] == "again"


def test_connections_are_reused(shared):
    for _ in range(3):
        shared.client().post(PATH, ask()).json()
        deltas(shared.client().post(PATH, stream()))
    assert len({request.connection for request in shared.engine.requests}) == 1


@pytest.mark.parametrize("body", [b"<html><body>502 Bad Gateway</body></html>", b"[]", b"null", b"", b'{"choices": '])
def test_engine_that_answers_no_json(shared, body):
    shared.engine.play(Head(framing=len(body), type="text/html"), *([body] if body else []))
    answer = shared.client().post(PATH, ask())
    assert answer.status == 502 and "html" not in answer.json()["error"]["message"]


# ---- streams

def test_stream(shared):
    shared.engine.play(*chat_chunks("Yes indeed", reasoning="Ok", usage=True))
    answer = shared.client().post(PATH, stream())
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache, no-transform" and answer.headers["x-accel-buffering"] == "no"
    found = deltas(answer)
    assert "".join(delta.get("content") or "" for delta in found) == "Yes indeed"
    assert [delta for delta in found if "reasoning" in delta] == [{"reasoning": "Ok", "reasoning_content": "Ok"}]
    assert answer.complete and shared.engine.requests[-1].json()["stream_options"] == {"include_usage": True}


def test_another_reader_of_events_agrees(shared):
    """requests and sseclient, which know nothing of ours."""
    shared.engine.play(*chat_chunks("Grüße, \u2028 Welt", reasoning="Hm", usage=True))
    with requests.post(shared.url + PATH, json=stream(), headers={"Authorization": f"Bearer {shared.key}"}, stream=True,
                       timeout=20) as answer:
        events = [event.data for event in sseclient.SSEClient(answer.raw.stream(65536)).events()]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]) == "Grüße, \u2028 Welt"


@pytest.mark.parametrize("wanted", [True, False, None])
def test_usage_chunk_only_if_asked_for(shared, wanted):
    shared.engine.play(*chat_chunks("Hi", usage=True))
    options = {} if wanted is None else {"stream_options": {"include_usage": wanted, "continuous_usage_stats": False}}
    events = list(shared.client().post(PATH, stream(**options)).events())
    usages = [event for event in events[:-1] if event.json().get("usage")]
    assert len(usages) == bool(wanted)
    sent = shared.engine.requests[-1].json()["stream_options"]
    assert sent == {**options.get("stream_options", {}), "include_usage": True}


def test_each_event_in_its_own_moment(shared):
    """The second token is sent only after the client has seen the first."""
    gates = [threading.Event() for _ in range(3)]
    chunks = chat_chunks("a b c", usage=True)
    shared.engine.play(chunks[0], chunks[1], Wait(gates[0]), chunks[2], Wait(gates[1]), *chunks[3:])
    answer = shared.client().post(PATH, stream())
    seen = 0
    for _ in answer.events():
        seen += 1
        if seen >= 2 and seen - 2 < len(gates):
            gates[seen - 2].set()
    assert seen >= 4


def test_head_waits_for_the_first_event_so_that_a_failure_is_a_status(shared):
    shared.engine.play(sse({"error": {"message": "prompt too long: maximum context length is 2048", "code": 400}}), died())
    answer = shared.client().post(PATH, stream())
    assert answer.status == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_an_engine_that_says_nothing_at_full_speed_holds_nobody_up(shared):
    """Its comments come faster than they are read."""
    over = threading.Event()

    def flood(request):
        yield Head()
        while not over.is_set():
            yield b": nothing\n\n" * 5000
        yield from chat_chunks("Hello")

    shared.engine.always(flood)
    with shared.client().open() as connection:
        connection.start("POST", PATH, stream())
        shared.engine.wait_for(1)
        try:
            for _ in range(4):
                assert shared.client(key=False, timeout=5).get("/healthz").status == 200
        finally:
            over.set()
        assert connection.answer().read_all().endswith(b"data: [DONE]\n\n")


def test_in_stream_error_of_a_dying_engine_before_the_first_token(shared):
    shared.engine.play(died(), b"data: [DONE]\n\n")
    answer = shared.client().post(PATH, stream())
    assert answer.status in (500, 502) and answer.json()["error"]["code"] == "upstream_error"


@pytest.mark.parametrize("ending", [
    [died(), b"data: [DONE]\n\n"], [Close()], [Reset()], [End()], [b"data: [DONE]\n\n"], [Raw(b"zz\r\nbroken")],
    [b"data: nonsense\n\n"],
], ids=["error", "cut", "reset", "no finish", "done without finish", "garbled", "no json"])
def test_failure_midway_is_an_error_event(shared, ending):
    begun = threading.Event()
    shared.engine.play(*chat_chunks("Hi you", usage=True)[:2], Wait(begun), *ending)
    answer = shared.client().post(PATH, stream())
    begun.set()
    error, before = failure(answer)
    assert answer.status == 200 and answer.complete
    assert error["type"] == "api_error" and error["message"] and "finish_reason\":\"" not in "".join(e.data for e in before)
    assert not any(event.data == "[DONE]" for event in before)


DEEP = b'{"a":' * 1005 + b"1" + b"}" * 1005             # what reads JSON reads it, and what writes JSON doesn't write it
DEEP_CALL = b'{"id":"a","function":{"name":"f","arguments":%b}}' % DEEP


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path, choice, fields", [
    (PATH, b'"%b":{"tool_calls":[%b]}', {"messages": HELLO}), ("/v1/messages", b'"%b":{"tool_calls":[%b]}', {"messages": HELLO, "max_tokens": 9}),
    ("/v1/responses", b'"%b":{"tool_calls":[%b]}', {"input": "Hello"}), ("/v1/completions", b'"%b":{},"text":null,"x":%b', {"prompt": "Hello"})])
def test_an_answer_that_is_nested_too_deeply(shared, path, choice, fields, streams):
    """It is the engine's fault, and no fault of the gateway: nothing in its log looks like one."""
    body = b'{"id":"c","choices":[{"index":0,"finish_reason":"stop",%b}]}' % (choice % (b"delta" if streams else b"message", DEEP_CALL))
    steps = [Head(), b"data: %b\n\n" % body] if streams else [Head(framing=len(body), type="application/json"), body]
    shared.engine.always(lambda request: [Json({"count": 5})] if "token" in request.path else steps)
    answer = shared.client().post(path, {**fields, "stream": streams})
    assert answer.status == 502 and "nested too deeply" in answer.json()["error"]["message"]


def test_failure_in_the_same_breath_as_the_first_token(shared):
    first = chat_chunks("Hi you", usage=True)[1]
    shared.engine.play(first + died() + b"data: [DONE]\n\n")
    error, before = failure(shared.client().post(PATH, stream()))
    assert error["code"] == "upstream_error" and before[0].json()["choices"][0]["delta"]["content"] == "Hi"


def test_finish_without_done_is_a_whole_answer(shared):
    shared.engine.play(*chat_chunks("Hi", done=False))
    assert text_of(shared.client().post(PATH, stream())) == "Hi"


def test_empty_stream_is_a_status(shared):
    shared.engine.play(Head(), End())
    assert shared.client().post(PATH, stream()).status == 502


def test_engine_that_answers_json_to_a_stream_request(shared):
    shared.engine.play(Json(completion("Hello there", reasoning="Well")))
    answer = shared.client().post(PATH, stream(stream_options={"include_usage": True}))
    events = list(answer.events())
    assert events[-1].data == "[DONE]" and events[-2].json()["usage"]["prompt_tokens"] == 15
    delta = events[0].json()["choices"][0]
    assert delta["delta"]["content"] == "Hello there" and delta["delta"]["reasoning"] == "Well"
    assert delta["finish_reason"] == "stop" and events[0].json()["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("head", [Head(framing="close"), Head(version="1.0", framing=None), Head()],
                         ids=["close", "1.0", "chunked"])
@pytest.mark.parametrize("size", [1, 3])
def test_engine_that_dribbles(shared, head, size):
    data = b"".join(chat_chunks("Grüße, \u2028 Welt 🌍", reasoning="ä", usage=True))
    shared.engine.play(head, Dribble(data, size), *([Close()] if head.framing != "chunked" else []))
    answer = shared.client().post(PATH, stream())
    assert text_of(answer) == "Grüße, \u2028 Welt 🌍"


def test_line_of_4_mb(shared):
    big = "x" * (4 << 20)
    shared.engine.play(*chat_chunks([big, "y"], usage=True))
    began = time.monotonic()
    assert len(text_of(shared.client().post(PATH, stream()))) == (4 << 20) + 1
    assert time.monotonic() - began < 5


def test_llama_cpp_stream(shared):
    shared.engine.play(*llama_chunks("Hello there", reasoning="Well", usage=True))
    answer = shared.client().post(PATH, stream())
    found = deltas(answer)
    assert "".join(delta.get("content") or "" for delta in found) == "Hello there"
    assert "".join(delta.get("reasoning") or "" for delta in found) == "Well"


def test_leaked_think_tags_across_chunks(shared):
    shared.engine.play(*chat_chunks(["<thi", "nk>I th", "ink</th", "ink>\n\n", "Answer <think>", "quoted</think>"], usage=True))
    answer = shared.client().post(PATH, stream())
    found = deltas(answer)
    assert "".join(delta.get("content") or "" for delta in found) == "Answer <think>quoted</think>"
    assert "".join(delta.get("reasoning") or "" for delta in found) == "I think"


def test_n_2_stream(shared):
    chunks = []
    for index in (0, 1):
        chunks += [sse(chunk({"role": "assistant", "content": ""}, index=index)),
                   sse(chunk({"content": f"choice {index}"}, index=index)),
                   sse(chunk({}, "stop", index=index))]
    shared.engine.play(*chunks, b"data: [DONE]\n\n")
    events = list(shared.client().post(PATH, stream(n=2)).events())
    assert events[-1].data == "[DONE]" and len(events) == 7


def test_http_1_0_client(shared):
    shared.engine.play(*chat_chunks("Hi there", usage=True))
    connection = shared.client().open()
    body = json.dumps(stream()).encode()
    connection.send(b"POST /v1/chat/completions HTTP/1.0\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
                    % (shared.key.encode(), len(body), body))
    answer = connection.answer()
    assert "transfer-encoding" not in answer.headers
    assert answer.read_all().endswith(b"data: [DONE]\n\n")


def test_pipelined_requests(shared):
    connection = shared.client().open()
    one, two = (connection.encode("POST", PATH, stream(user=name), {}, False) for name in ("one", "two"))
    connection.send(one + two)
    assert text_of(connection.answer()) and text_of(connection.answer())


@pytest.mark.parametrize("first", [b"data:", b": hello\n\n", b"\xef\xbb\xbf", b"d"])
def test_a_stream_that_does_not_say_so(shared, first):
    events = b"".join(chat_chunks("Hi", usage=True))
    rest = events[6:] if first == b"data:" else events[1:] if first == b"d" else events
    shared.engine.play(Head(type=None), first, Pause(0.05), rest)
    assert text_of(shared.client().post(PATH, ask(stream=True))) == "Hi"


def test_an_engine_that_lingers_after_the_finish(gateway, engine):
    front = gateway(keepalive=0.4)
    engine.play(*chat_chunks("Hi", done=False), Hang())
    began = time.monotonic()
    assert text_of(front.client().post(PATH, ask(stream=True))) == "Hi" and time.monotonic() - began < 9
    assert engine.requests[-1].gone.wait(10)


# ---- silence

def test_keepalive_in_prefill_and_between_tokens(gateway, engine):
    fast = gateway(keepalive=0.2)
    go, chunks = threading.Event(), chat_chunks("a b", usage=True)
    engine.play(Head(), Wait(go), chunks[0], chunks[1], Pause(0.7), *chunks[2:])
    answer = fast.client().post(PATH, stream())
    assert answer.status == 200                         # with the first comment, long before the first token
    events, comments = [], []
    for event in answer.events():
        (comments if event.comment is not None else events).append(event)
        if len(comments) == 2:
            go.set()
    assert events[-1].data == "[DONE]" and len(comments) >= 4


def test_engine_without_a_head_gets_keepalives_too(gateway, engine):
    """llama.cpp sends no head while a request waits for its slot."""
    fast = gateway(keepalive=0.2)
    engine.play(Pause(1.5), *chat_chunks("Hi", usage=True))
    events = list(fast.client().post(PATH, stream()).events())
    assert [event.comment is not None for event in events[:3]] == [True] * 3 and events[-1].data == "[DONE]"


def test_comments_are_no_sign_of_life(gateway, engine):
    short = gateway(keepalive=0.2, stall_timeout=1)
    forever = [step for _ in range(60) for step in (b": keep-alive\n\n", Pause(0.1))]
    engine.play(*chat_chunks("a b", usage=True)[:2], *forever)
    began = time.monotonic()
    error, _ = failure(short.client().post(PATH, stream()))
    assert error["code"] == "upstream_timeout" and 0.9 < time.monotonic() - began < 4
    assert engine.requests[-1].gone.wait(10)


@pytest.mark.parametrize("streams", [True, False])
def test_answer_timeout(gateway, engine, streams):
    short = gateway(answer_timeout=0.5)
    engine.play(Hang())
    answer = short.client().post(PATH, ask(stream=streams))
    assert answer.status == 504 and answer.json()["error"]["code"] == "upstream_timeout"
    assert engine.requests[-1].gone.wait(10)


@pytest.mark.parametrize("drip", [
    [step for _ in range(40) for step in (Raw(b"HTTP/1.1 102 Processing\r\n\r\n"), Pause(0.1))],
    [Raw(b"HTTP/1.1 200 OK\r\nX: "), *[step for _ in range(40) for step in (Raw(b"x"), Pause(0.1))]],
], ids=["interim heads", "a head in drops"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_head_that_drips_is_silence(gateway, engine, drip, streams):
    front = gateway(keepalive=0.3, answer_timeout=1.2)
    engine.play(*drip)
    began = time.monotonic()
    answer = front.client().post(PATH, ask(stream=streams))
    if streams:
        assert failure(answer)[0]["code"] == "upstream_timeout" and answer.status == 200
    else:
        assert answer.status == 504
    assert time.monotonic() - began < 10


def test_a_stream_is_kept_alive_while_its_body_goes_to_the_engine(gateway, engine):
    front = gateway(keepalive=0.3)
    engine.play(Early(), Pause(1.2), ReadBody(), *chat_chunks("Hi"))
    answer = front.client().post(PATH, {"messages": HELLO, "stream": True, "user": "x" * 30_000_000})
    events = list(answer.events())
    assert [event.comment is not None for event in events[:2]] == [True, True] and events[-1].data == "[DONE]"


# ---- the client leaves

BEFORE = {"before the head": [Hang()], "in prefill": [Head(), Hang()]}
DURING = {"after the first event": [*chat_chunks("a b", usage=True)[:2], Hang()],
          "in a flood": [Head()] + [Send(chat_chunks("a b")[1])] * 200_000}


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("phase", [*BEFORE, *DURING])
def test_client_leaves_a_stream(shared, phase, leave):
    shared.engine.play(*{**BEFORE, **DURING}[phase])
    connection = shared.client().open()
    connection.start("POST", PATH, stream())
    request = shared.engine.wait_for(1)[0]
    if phase in DURING:
        connection.answer()
    left = time.monotonic()
    getattr(connection, leave)()
    assert request.gone.wait(10) and time.monotonic() - left < 5


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_client_leaves_a_plain_request(shared, leave):
    shared.engine.play(Hang())
    connection = shared.client().open()
    connection.start("POST", PATH, ask())
    request = shared.engine.wait_for(1)[0]
    getattr(connection, leave)()
    assert request.gone.wait(10)


def test_slots_come_back(gateway, engine):
    two = gateway(max_active=2, keepalive=0.2)
    engine.always(lambda request: [Head(), Hang()])
    gone = [two.client().open() for _ in range(4)]
    for connection in gone:
        connection.start("POST", PATH, stream())
    engine.wait_for(2)
    assert engine.active == 2                           # the others wait
    for connection in gone:
        connection.close()
    engine.wait_idle()
    engine.always(chat_chunks("Hi"))
    assert text_of(two.client().post(PATH, stream())) == "Hi"
    assert engine.max_active == 2


def test_waiting_stream_gets_comments(gateway, engine):
    one = gateway(max_active=1, keepalive=0.2)
    go = threading.Event()
    engine.play(Head(), Wait(go), *chat_chunks("first"))
    engine.play(*chat_chunks("second"))
    first = one.client().open()
    first.start("POST", PATH, stream())
    engine.wait_for(1)
    second = one.client().post(PATH, stream())
    events = second.events()
    assert next(events).comment is not None and engine.active == 1
    go.set()
    assert "second" in "".join(event.data or "" for event in events)
    assert text_of(first.answer()) == "first"


def test_client_that_does_not_read_stops_the_engine(shared):
    """Back-pressure: the engine's socket is not read while the client's is full; then all of it arrives."""
    piece = chat_chunks(["x" * 10_000, "y"], usage=True)
    count = 3000                                        # 30 MB
    shared.engine.play(piece[0], *([piece[1]] * count), *piece[2:])
    answer = shared.client(timeout=60, rcvbuf=4096).post(PATH, stream())
    time.sleep(0.2)
    assert not shared.engine.requests[-1].finished.is_set()
    assert sum(len(delta.get("content") or "") for delta in deltas(answer)) == count * 10_000 + 1


# ---- engine errors

@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("answer, status, code, message", [
    (refusal(400, "Unexpected message role: wizard"), 400, "invalid_request", "Unexpected message role: wizard"),
    (refusal(400, "This model's maximum context length is 2048 tokens.", param="input_tokens"), 400,
     "context_length_exceeded", "This model's maximum context length is 2048 tokens."),
    (Json({"error": {"code": 400, "message": "request (6031 tokens) exceeds the available context size (4096 tokens)",
                     "type": "exceed_context_size_error", "n_prompt_tokens": 6031, "n_ctx": 4096}}, 400), 400,
     "context_length_exceeded", "request (6031 tokens) exceeds the available context size (4096 tokens)"),
    (Json({"error": "Unauthorized"}, 401), 502, "upstream_error", None),
    (Json({"error": {"message": "no"}}, 403), 502, "upstream_error", None),
    (Json({"detail": "Not Found"}, 404), 404, "not_found", "Not Found"),
    (Json({"detail": [{"loc": ["body", "messages"], "msg": "Field required", "type": "missing"}]}, 422), 422,
     "invalid_request", "body.messages: Field required"),
    (Json({"object": "error", "message": "old shape", "type": "X", "code": 400}, 400), 400, "invalid_request", "old shape"),
    (Json({"error": {"code": 500, "message": "image input is not supported - hint", "type": "server_error"}}, 500), 400,
     "invalid_request", "image input is not supported - hint"),
    (Json({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, 500), 500, "upstream_error",
     "EngineCore encountered an issue."),
    (Json({"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, 503), 503,
     "model_unavailable", "Loading model"),
    (Json({"error": {"message": "slow down"}}, 429), 429, "rate_limit_exceeded", "slow down"),
    (Json({"error": {"message": "Traceback (most recent call last): secret"}}, 500), 500, "upstream_error",
     "the engine answered with status 500"),
    (Json({"error": {"message": "a proxy's own"}}, 520), 520, "upstream_error", "a proxy's own"),      # a status without a name
    (Json({"error": {"message": "odd"}}, 460), 460, "invalid_request", "odd"),
    (Json({}, 307, {"location": "http://elsewhere/"}), 502, "upstream_error", "the engine answered with status 307"),
])
def test_engine_errors_in_our_shape(shared, answer, status, code, message, streams):
    shared.engine.play(answer)
    reply = shared.client().post(PATH, ask(stream=streams))
    error = reply.json()["error"]
    assert (reply.status, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "code", "param"}
    if message:
        assert error["message"] == message
    if status == 503:
        assert reply.headers["retry-after"].isdigit()


def test_engine_that_answers_before_it_read_the_body(shared):
    shared.engine.play(Early(), Json({"error": {"message": "too big for me", "code": 413}}, 413), Close())
    reply = shared.client().post(PATH, ask(user="x" * 3_000_000))
    assert reply.status in (413, 502)


def test_engine_off_and_on(gateway, engine):
    front = gateway()
    engine.stop()
    deadline = time.monotonic() + 5
    while front.client().get("/v1/models").json()["data"] and time.monotonic() < deadline:
        time.sleep(0.05)
    for streams in (True, False):
        answer = front.client().post(PATH, ask(stream=streams))
        assert answer.status == 503 and answer.json()["error"]["code"] == "model_unavailable"
        assert answer.headers["retry-after"].isdigit()
    assert front.client().post(PATH, ask(model="other")).status == 404
    engine.start()
    front.wait_ready()
    assert front.client().post(PATH, ask()).status == 200


def test_engine_that_was_never_there(gateway, engine):
    engine.stop()
    front = gateway(wait="alive")
    assert front.client().post(PATH, ask()).json()["error"]["code"] == "model_unavailable"
    assert front.client().get("/v1/models").json() == {
        "object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}


ODD = [{"choices": 5}, {"choices": "abc"}, {"choices": {"a": 1}}, {"choices": [5]}, {"choices": [{"message": "text"}]}, [], "x", 5]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("value", ODD)
def test_odd_json_is_the_engines_fault(shared, value, streams):
    shared.engine.play(Json(value))
    answer = shared.client().post(PATH, ask(stream=streams))
    if answer.status == 200 and streams:
        list(answer.events())
    else:
        assert answer.status in (200, 502) and answer.json() is not None


@pytest.mark.parametrize("delta", [
    {"index": None, "delta": {"content": "a"}}, {"index": [], "delta": {"content": "a"}}, {"delta": {"content": ["a"]}},
    {"index": 0, "delta": None}, {"index": 0, "delta": {"tool_calls": "x"}}])
@pytest.mark.parametrize("streams", [True, False])
def test_odd_chunks_are_no_fault_of_ours(shared, delta, streams):
    shared.engine.play(sse({"choices": [delta]}), *chat_chunks("b", usage=True))
    answer = shared.client().post(PATH, ask(stream=streams))
    assert answer.status in (200, 502)
    list(answer.events()) if streams and answer.status == 200 else answer.json()


def test_an_empty_finish_reason_is_none(shared):
    shared.engine.play(*[sse(chunk({"content": text}, finish="")) for text in "ab"], Close())
    assert failure(shared.client().post(PATH, ask(stream=True)))[0]["code"] == "upstream_error"


def test_a_choice_that_never_began_is_missed(shared):
    shared.engine.play(*chat_chunks("Hi", done=False), Close())
    assert failure(shared.client().post(PATH, ask(stream=True, n=3)))[0]["code"] == "upstream_error"


@pytest.mark.parametrize("status, seen", [(499, 502), (302, 502), (429, 429)])
def test_odd_statuses(shared, status, seen):
    shared.engine.play(Json({"error": {"message": "no"}}, status, {"Retry-After": "7"}))
    answer = shared.client().post(PATH, ask())
    assert answer.status == seen and (status != 429 or answer.headers["retry-after"] == "7")


@pytest.mark.parametrize("value", [{}, {"choices": None}, {"choices": []}, {"choices": [None]}, {"choices": {"a": 1}}])
@pytest.mark.parametrize("path, fields", [
    ("/v1/chat/completions", {"messages": HELLO}), ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
    ("/v1/responses", {"input": "Hi"}), ("/v1/completions", {"prompt": "Hi"})])
@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_without_a_choice_is_none(shared, path, fields, value, streams):
    shared.engine.play(Json(value))
    answer = shared.client().post(path, {**fields, "stream": streams})
    assert answer.status == 502 and "engine" in answer.json()["error"]["message"]
