"""The scripted engine itself: it says what the real ones say, and sees its client go."""
import json
import threading
import time

import pytest

from support.client import Client, Truncated
from support.engine import (
    DONE,
    Close,
    Dribble,
    Early,
    End,
    Engine,
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
    completion,
    died,
    llama_chunks,
    llama_completion,
    refusal,
    sse,
)

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def client(engine):
    return Client(engine.url, timeout=5)


# ---- the shapes: lines that vLLM 0.32.0 and llama.cpp b0 wrote

VLLM_CHAT = r"""
{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],
 "prompt_token_ids":null,"prompt_text":null}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"reasoning":"Ok"},"logprobs":null,"finish_reason":null,"token_ids":null}]}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"content":"Yes"},"logprobs":null,"finish_reason":null,"token_ids":null}]}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"content":" indeed"},"logprobs":null,"finish_reason":null,"token_ids":null}]}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":319,"token_ids":null}]}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[],"usage":{"prompt_tokens":15,"total_tokens":20,"completion_tokens":5,
 "prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0},
 "completion_tokens_details":{"reasoning_tokens":1}},"system_fingerprint":"vllm-0.32.0-47ee2e8e"}
""".split("\n\n")
VLLM_CONTINUOUS = r"""
{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],
 "usage":{"prompt_tokens":15,"total_tokens":15,"completion_tokens":0,
 "completion_tokens_details":{"reasoning_tokens":0}},"prompt_token_ids":null,"prompt_text":null}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"reasoning":"Ok"},"logprobs":null,"finish_reason":null,"token_ids":null}],
 "usage":{"prompt_tokens":15,"total_tokens":16,"completion_tokens":1,
 "completion_tokens_details":{"reasoning_tokens":1}}}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"content":"Yes"},"logprobs":null,"finish_reason":null,"token_ids":null}],
 "usage":{"prompt_tokens":15,"total_tokens":18,"completion_tokens":3,
 "completion_tokens_details":{"reasoning_tokens":1}}}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"content":" indeed"},"logprobs":null,"finish_reason":null,"token_ids":null}],
 "usage":{"prompt_tokens":15,"total_tokens":19,"completion_tokens":4,
 "completion_tokens_details":{"reasoning_tokens":1}}}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":319,"token_ids":null}],
 "usage":{"prompt_tokens":15,"total_tokens":20,"completion_tokens":5,
 "completion_tokens_details":{"reasoning_tokens":1}}}

{"id":"chatcmpl-9ebe0060b60075df","object":"chat.completion.chunk","created":1795966772,"model":"glm-tiny",
 "choices":[],"usage":{"prompt_tokens":15,"total_tokens":20,"completion_tokens":5,
 "prompt_tokens_details":{"cached_tokens":0,"created_cache_tokens":0},
 "completion_tokens_details":{"reasoning_tokens":1}},"system_fingerprint":"vllm-0.32.0-47ee2e8e"}
""".split("\n\n")
VLLM_TOOLS = r"""
{"id":"chatcmpl-aef50a52e6590cd9","object":"chat.completion.chunk","created":1795966775,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"tool_calls":[{"id":"chatcmpl-tool-bc992d8208c197fd","type":"function","index":0,
 "function":{"name":"get_weather"}}]},"logprobs":null,"finish_reason":null,"token_ids":null}]}

{"id":"chatcmpl-aef50a52e6590cd9","object":"chat.completion.chunk","created":1795966775,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"city\": \"Île-de-"}}]},
 "logprobs":null,"finish_reason":null,"token_ids":null}]}

{"id":"chatcmpl-aef50a52e6590cd9","object":"chat.completion.chunk","created":1795966775,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"France\"}"}}]},"logprobs":null,
 "finish_reason":null,"token_ids":null}]}

{"id":"chatcmpl-aef50a52e6590cd9","object":"chat.completion.chunk","created":1795966775,"model":"glm-tiny",
 "choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"tool_calls","stop_reason":321,"token_ids":null}],
 "system_fingerprint":"vllm-0.32.0-47ee2e8e"}
""".split("\n\n")
VLLM_PLAIN = r"""
{"id":"chatcmpl-9ff7d8bc35a2770a","object":"chat.completion","created":1795966772,"model":"glm-tiny",
 "choices":[{"index":0,"message":{"role":"assistant","content":"Yes indeed","refusal":null,"annotations":null,
 "audio":null,"function_call":null,"reasoning":"Ok"},"logprobs":null,"finish_reason":"stop","stop_reason":319,
 "token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"vllm-0.32.0-47ee2e8e",
 "usage":{"prompt_tokens":15,"total_tokens":20,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":0,
 "created_cache_tokens":0,"multimodal_tokens":null},"completion_tokens_details":{"reasoning_tokens":1}},
 "prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,
 "ec_transfer_params":null,"metrics":null}
"""
VLLM_MODELS = r"""
{"object":"list","data":[{"id":"glm-tiny","object":"model","created":1795966807,"owned_by":"vllm",
 "root":"/models/tiny-glm","parent":null,"max_model_len":2048,"permission":[{"id":"modelperm-ae9237df19c35fc9",
 "object":"model_permission","created":1795966807,"allow_create_engine":false,"allow_sampling":true,
 "allow_logprobs":true,"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,"organization":"*",
 "group":null,"is_blocking":false}]}]}
"""
LLAMA_CHAT = r"""
{"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":1795966600,
 "id":"chatcmpl-gZjKz9ntZXRHc6qjAngUi082855Ra8O1","model":"smollm2-135m-instruct","system_fingerprint":"b0-unknown",
 "object":"chat.completion.chunk"}

{"choices":[{"finish_reason":null,"index":0,"delta":{"reasoning_content":"The"}}],"created":1795966600,
 "id":"chatcmpl-gZjKz9ntZXRHc6qjAngUi082855Ra8O1","model":"smollm2-135m-instruct","system_fingerprint":"b0-unknown",
 "object":"chat.completion.chunk"}

{"choices":[{"finish_reason":null,"index":0,"delta":{"content":"Sky"}}],"created":1795966601,
 "id":"chatcmpl-gZjKz9ntZXRHc6qjAngUi082855Ra8O1","model":"smollm2-135m-instruct","system_fingerprint":"b0-unknown",
 "object":"chat.completion.chunk"}

{"choices":[{"finish_reason":"stop","index":0,"delta":{}}],"created":1795966149,
 "id":"chatcmpl-CPrPsmcsnJNhCkJRVRvcG7akrjx958aB","model":"smollm2-135m-instruct","system_fingerprint":"b0-unknown",
 "object":"chat.completion.chunk"}

{"choices":[],"created":1795966149,"id":"chatcmpl-CPrPsmcsnJNhCkJRVRvcG7akrjx958aB","model":"smollm2-135m-instruct",
 "system_fingerprint":"b0-unknown","object":"chat.completion.chunk","usage":{"completion_tokens":2,"prompt_tokens":15,
 "total_tokens":17,"prompt_tokens_details":{"cached_tokens":0}},"timings":{"cache_n":24,"prompt_n":12,
 "prompt_ms":101.959,"prompt_per_token_ms":8.496583333333334,"prompt_per_second":117.6943673437362,"predicted_n":12,
 "predicted_ms":271.799,"predicted_per_token_ms":24.709,"predicted_per_second":40.471083410902914}}
""".split("\n\n")
LLAMA_TOOLS = r"""
{"choices":[{"finish_reason":null,"index":0,"delta":{"tool_calls":[{"index":0,"id":"QiYAQHjXkRpVfo1VsHg7S0DuXxX4EJ6V",
 "type":"function","function":{"name":"get_weather","arguments":"{"}}]}}],"created":1795966610,
 "id":"chatcmpl-22HSG4DgjOEo4R7e9iqEVWzJySERSVjP","model":"smollm2-135m-instruct","system_fingerprint":"b0-unknown",
 "object":"chat.completion.chunk"}

{"choices":[{"finish_reason":null,"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]}}],
 "created":1795966610,"id":"chatcmpl-22HSG4DgjOEo4R7e9iqEVWzJySERSVjP","model":"smollm2-135m-instruct",
 "system_fingerprint":"b0-unknown","object":"chat.completion.chunk"}
""".split("\n\n")
LLAMA_PLAIN = r"""
{"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant","content":"19 is 36."}}],
 "created":1795966598,"model":"smollm2-135m-instruct","system_fingerprint":"b0-unknown","object":"chat.completion",
 "usage":{"completion_tokens":3,"prompt_tokens":15,"total_tokens":18,"prompt_tokens_details":{"cached_tokens":0}},
 "id":"chatcmpl-DenKsDNdlDJ7acw9nEaOPIt76IpTXquF","timings":{"cache_n":0,"prompt_n":40,"prompt_ms":296.769,
 "prompt_per_token_ms":7.419225,"prompt_per_second":134.78496743258225,"predicted_n":12,"predicted_ms":279.049,
 "predicted_per_token_ms":25.368090909090906,"predicted_per_second":39.419600141910564}}
"""
VARYING = {"id", "created", "model", "root", "max_model_len"}


def shape(value):
    """The value with its fields in their order, without what differs from run to run."""
    if isinstance(value, dict):
        return [(name, None if name in VARYING else sorted(inner) if name == "timings" else shape(inner))
                for name, inner in value.items()]
    return [shape(inner) for inner in value] if isinstance(value, list) else value


def shapes(lines):
    return [shape(json.loads(line)) for line in lines]


def said(events):
    """What comes between `data: ` and the blank line."""
    assert all(event.startswith(b"data: ") and event.endswith(b"\n\n") for event in events)
    return [event[6:-2].decode() for event in events if event != DONE]


def test_vllm_stream():
    assert shapes(said(chat_chunks("Yes indeed", "Ok", usage=True))) == shapes(VLLM_CHAT)
    assert shapes(said(chat_chunks("Yes indeed", "Ok", usage=True, continuous=True))) == shapes(VLLM_CONTINUOUS)


def test_vllm_tool_calls():
    tools = [("get_weather", ['{"city": "Île-de-', 'France"}'])]
    assert shapes(said(chat_chunks("", tools=tools))[1:]) == shapes(VLLM_TOOLS)
    assert "Île" in said(chat_chunks("", tools=tools))[2]


def test_vllm_plain():
    assert shape(completion("Yes indeed", "Ok")) == shape(json.loads(VLLM_PLAIN))


def test_llama_stream():
    assert shapes(said(llama_chunks("Sky", "The", usage=True))) == shapes(LLAMA_CHAT)
    assert "timings" in said(llama_chunks("Sky"))[-1]


def test_llama_tool_calls():
    assert shapes(said(llama_chunks("", tools=[("get_weather", ["{", "}"])]))[1:3]) == shapes(LLAMA_TOOLS)


def test_llama_plain():
    assert shape(llama_completion("19 is 36.")) == shape(json.loads(LLAMA_PLAIN))


def test_vllm_models(engine, client):
    engine.models = [{"id": "glm-tiny", "max_model_len": 2048}]
    assert shape(client.get("/v1/models").json()) == shape(json.loads(VLLM_MODELS))


# ---- answers without a script

def test_default_stream(engine, client):
    ask = {**ASK, "stream": True, "stream_options": {"include_usage": True}}
    answer = client.post(CHAT, ask, {"X-Request-Id": "abc"})
    assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *events, last = answer.events()
    assert last.data == "[DONE]" and events[-1].json()["usage"]["prompt_tokens"] == 15
    assert events[0].json()["id"] == "chatcmpl-abc"
    assert "".join(e.json()["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "Hello there"


def test_default_plain(engine, client):
    answer = client.post(CHAT, {**ASK, "chat_template_kwargs": {"enable_thinking": False}})
    assert answer.headers["content-length"] and answer.json()["choices"][0]["message"]["reasoning"] is None


@pytest.mark.parametrize("ask, status, param", [
    ({**ASK, "model": "nope"}, 404, "model"),
    ({**ASK, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (b"{", 400, "body.0"),
])
def test_default_refusals(engine, client, ask, status, param):
    answer = client.post(CHAT, ask)
    error = answer.json()["error"]
    assert (answer.status, error["code"], error["param"]) == (status, status, param)


def test_default_llama(engine, client):
    engine.like = "llama"
    answer = client.post(CHAT, {**ASK, "stream": True})
    assert answer.headers["server"] == "llama.cpp" and len(list(answer.events())) == 5
    assert client.get("/v1/models").json()["data"][0]["meta"]["n_ctx"] == 850000


@pytest.mark.parametrize("method, path, status, body", [
    ("GET", "/health", 200, b""), ("GET", "/version", 200, b'{"version":"0.32.0"}'),
    ("GET", "/v1/nope", 404, b'{"detail":"Not Found"}'), ("GET", CHAT, 405, b'{"detail":"Method Not Allowed"}'),
    ("POST", "/v1/embeddings", 404, b'{"detail":"Not Found"}'),
])
def test_other_routes(engine, client, method, path, status, body):
    answer = client.request(method, path, {} if method == "POST" else None)
    assert (answer.status, answer.read_all()) == (status, body)


def test_tokenize_takes_no_script(engine, client):
    engine.play(Json({"mine": True}))
    assert client.post("/tokenize", ASK).json()["max_model_len"] == 850000
    assert client.post(CHAT, ASK).json() == {"mine": True}
    assert ([r.path for r in engine.requests], [r.path for r in engine.probes]) == ([CHAT], ["/tokenize"])


@pytest.mark.parametrize("models", [[], None])
def test_loading(engine, client, models):
    engine.models = models
    assert client.get("/v1/models").status == 503


def test_key(engine, client):
    engine.key = "secret"
    assert (client.post(CHAT, ASK).status, client.get("/health").status) == (401, 200)
    assert Client(engine.url, "secret").post(CHAT, ASK).status == 200


# ---- scripts

def test_scripts_queue_and_then_always(engine, client):
    engine.play(Json({"n": 1}))
    engine.play(Json({"n": 2}, 500))
    engine.always(lambda request: [Json({"said": request.json()["messages"][0]["content"]})])
    assert [client.post(CHAT, ASK).json() for _ in range(3)] == [{"n": 1}, {"n": 2}, {"said": "hi"}]


def test_a_route_of_its_own(engine, client):
    engine.on("/v1/models", [Head(200, type="text/html", framing=6), b"<html>"])
    assert client.get("/v1/models").read_all() == b"<html>"


def test_each_send_is_a_chunk_of_its_own(engine, client):
    engine.play(b"a", b"bc", Send(b"def"))
    assert [piece for piece, _ in client.post(CHAT, ASK).pieces()] == [b"a", b"bc", b"def"]


@pytest.mark.parametrize("framing", ["chunked", "close", 5, None])
def test_framings(engine, client, framing):
    head = Head(framing=framing, version="1.0") if framing is None else Head(framing=framing)
    engine.play(head, b"he", b"llo")
    with client.open() as connection:
        answer = connection.post(CHAT, ASK)
        assert answer.read_all() == b"hello" and answer.complete
        assert connection.ended(0.1) == (framing in ("close", None))


@pytest.mark.parametrize("chunks", [False, True])
def test_dribble(engine, client, chunks):
    engine.play(Dribble(b"data: x\n\n", chunks=chunks))
    answer = client.post(CHAT, ASK)
    assert [len(piece) for piece, _ in answer.pieces()] == ([1] * 9 if chunks else [9])


def test_own_headers(engine, client):
    engine.play(Head(headers={"X-Mine": "1", "server": None, "Content-Type": "text/plain"}), b"x")
    answer = client.post(CHAT, ASK)
    assert (answer.headers["x-mine"], answer.headers["content-type"]) == ("1", "text/plain")
    assert "server" not in answer.headers


def test_interim_heads_trailers_and_bytes_behind_the_end(engine, client):
    engine.play(Head(103, {"link": "</x>"}), Head(), b"x", End({"x-late": "1"}), Raw(b"junk"))
    answer = client.post(CHAT, ASK)
    assert [i.status for i in answer.interim] == [103]
    assert answer.read_all() == b"x" and answer.trailers == [("x-late", "1")]
    assert (answer.connection.buffer or answer.connection.read()) == b"junk"


def test_expect_continue(engine, client):
    connection = client.open()
    connection.send_head("POST", CHAT, {"expect": "100-continue", "content-length": 2})
    assert connection.read_until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue"
    connection.send(b"{}")
    assert connection.answer().status == 200


def test_keep_alive_and_its_end(engine, client):
    engine.idle = 0.1
    with client.open() as connection:
        for _ in range(3):
            assert connection.post(CHAT, ASK).json()
        assert connection.ended(2)
    assert [(r.connection, r.nth) for r in engine.requests] == [(1, 1), (1, 2), (1, 3)]


def test_pipelined_requests(engine, client):
    with client.open() as connection:
        connection.send(connection.encode("POST", CHAT, ASK) * 2)
        assert [connection.answer().json()["object"] for _ in range(2)] == ["chat.completion"] * 2


def test_chunked_request(engine, client):
    assert client.post(CHAT, [b'{"messa', b'ges": []}'], chunked=True).status == 200
    assert engine.requests[0].json() == {"messages": []}


def test_early_answer(engine, client):
    engine.play(Early(), Json({"early": True}), ReadBody())
    connection = client.open()
    connection.send_head("POST", CHAT, {"content-length": 4})
    assert connection.answer().json() == {"early": True}
    connection.send(b"late")
    engine.wait_until(lambda: engine.requests[0].body == b"late")


def test_close_without_an_answer(engine, client):
    engine.play(Close())
    with pytest.raises(Truncated, match="without an answer"):
        client.post(CHAT, ASK)


def test_cut_in_the_middle(engine, client):
    engine.play(sse({"n": 1}), died(), Raw(b"ff\r\nhal"), Close())
    answer = client.post(CHAT, ASK)
    with pytest.raises(Truncated) as cut:
        answer.read_all()
    assert b"EngineCore" in cut.value.data and not answer.complete


def test_reset(engine, client):
    engine.play(Head(), b"x", Pause(0.05), Reset())
    answer = client.post(CHAT, ASK)
    with pytest.raises(ConnectionResetError):
        list(answer.pieces())


def test_refusal(engine, client):
    engine.play(refusal(400, "too long", param="input_tokens"))
    assert client.post(CHAT, ASK).json() == {
        "error": {"message": "too long", "type": "BadRequestError", "param": "input_tokens", "code": 400}}


# ---- the client goes

BIG = [Head(), *[b"x" * 1_000_000] * 20]


@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
@pytest.mark.parametrize("script", [[Hang()], [Head(), b"x", Pause(20)], [Wait(threading.Event())], BIG],
                         ids=["before the head", "pause", "wait", "blocked send"])
def test_gone(engine, client, script, leave):
    engine.play(*script)
    with client.open() as connection:
        connection.start("POST", CHAT, ASK)
        request = engine.wait_for(1)[0]
        time.sleep(0.02)
        left = time.monotonic()
        getattr(connection, leave)()
        assert request.gone.wait(10)
    assert request.gone_at - left < 0.5 and not request.finished.is_set()
    assert (engine.active, engine.max_active) == (0, 1)


def test_a_finished_answer_is_not_gone(engine, client):
    with client.post(CHAT, ASK) as answer:
        answer.read_all()
    request = engine.wait_for(1)[0]
    assert request.finished.wait(1) and not request.gone.is_set()


def test_an_event_lets_the_script_go_on(engine, client):
    event = threading.Event()
    engine.play(b"a", Wait(event), b"b")
    pieces = client.post(CHAT, ASK).pieces()
    first, _ = next(pieces)
    event.set()
    assert (first, next(pieces)[0]) == (b"a", b"b")


# ---- the whole

def threads_of(engine):
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"engine-{engine.port}-")]


def test_off_and_on(engine, client):
    waiting = client.open()
    engine.play(b"x", Hang())
    answer = waiting.post(CHAT, ASK)
    engine.stop()
    with pytest.raises(Truncated):
        answer.read_all()
    with pytest.raises(ConnectionRefusedError):
        client.post(CHAT, ASK)
    assert not engine.requests[0].gone.is_set() and not threads_of(engine)
    engine.start()
    assert client.post(CHAT, ASK).status == 200


def test_faults_are_kept(client):
    with Engine() as engine:
        engine.always(lambda request: 1 / 0)
        with pytest.raises(Truncated):
            Client(engine.url).post(CHAT, ASK)
        assert "ZeroDivisionError" in engine.faults[0] and engine.active == 0


def test_three_hundred_connections_and_no_thread_left():
    with Engine() as engine:
        go, client = threading.Event(), Client(engine.url)
        engine.always([b"a", Wait(go), *chat_chunks("b")])
        connections = [client.open() for _ in range(300)]
        for connection in connections:
            connection.start("POST", CHAT, ASK)
        engine.wait_for(300, 10)
        assert engine.active == engine.max_active == 300 and len(threads_of(engine)) == 301
        for connection in connections[:100]:
            connection.close()
        engine.wait_until(lambda: engine.active == 200)
        go.set()
        for connection in connections[100:]:
            assert connection.answer().read_all().endswith(DONE)
            connection.close()
        engine.wait_idle()
        assert sum(request.gone.is_set() for request in engine.requests) == 100
        assert sum(request.finished.is_set() for request in engine.requests) == 200
    assert not threads_of(engine)
