"""Real vLLM on the CPU, with a tiny GLM that is known by heart, behind the real gateway: `./run.sh test --vllm`."""
import json
import time

import pytest

from support import responses
from support.chat import PATH, ROUTES, deltas
from support.client import Client
from support.gateway import Gateway
from support.loops import CLIENTS, STORED
from support.node import node_asker, node_result
from support.observe import gauge
from support.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ANSWER = "The test password is PINEAPPLE-4711."
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


@pytest.fixture(scope="module")
def front(vllm, stock, tmp_path_factory):
    gateway = Gateway(tmp_path_factory.mktemp("front"), vllm, stock, keepalive=0.5)
    gateway.wait_alive().wait_ready()
    yield gateway
    gateway.stop()
    gateway.check_log()


def ask(text, **fields):
    return {"model": "glm-tiny", "messages": [{"role": "user", "content": text}], **fields}


def engine_gauge(vllm, name):
    """A gauge of the engine's own metrics."""
    lines = Client(vllm).get("/metrics").read_all().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


def idle_within(vllm, seconds):
    end = time.monotonic() + seconds
    while engine_gauge(vllm, "num_requests_running") + engine_gauge(vllm, "num_requests_waiting"):
        assert time.monotonic() < end, "the engine is still working"
        time.sleep(0.05)


def test_plain(front):
    message = front.client(timeout=60).post(PATH, ask("say @answer")).json()["choices"][0]["message"]
    assert message["content"] == ANSWER and message["reasoning"] == message["reasoning_content"] != ""


def test_stream(front):
    found = deltas(front.client(timeout=60).post(PATH, ask("say @answer", stream=True)))
    assert "".join(delta.get("content") or "" for delta in found) == ANSWER
    assert "".join(delta.get("reasoning") or "" for delta in found)


@pytest.mark.parametrize("control, thinks", [
    ({}, True), ({"reasoning_effort": "none"}, False), ({"reasoning_effort": "low"}, True), ({"think": False}, False),
    ({"reasoning": {"effort": "max"}}, True), ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
])
def test_thinking_on_and_off(front, control, thinks):
    message = front.client(timeout=60).post(PATH, ask("say @answer", **control)).json()["choices"][0]["message"]
    assert bool(message.get("reasoning")) is thinks and ANSWER in message["content"]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_of_earlier_turns_reaches_the_prompt(front, name):
    """Under either name, it makes the prompt longer by what was thought."""
    def prompt(**thought):
        history = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", **thought},
                   {"role": "user", "content": "say @answer"}]
        return front.client(timeout=60).post(PATH, {**ask(""), "messages": history}).json()["usage"]["prompt_tokens"]
    assert prompt(**{name: "x" * 500}) in (prompt(), prompt(reasoning_content="x" * 500))
    assert prompt(**{name: "x" * 500}) == prompt(reasoning="x" * 500)


def test_tools(front):
    body = front.client(timeout=60).post(PATH, ask("weather", tools=[WEATHER])).json()
    call = body["choices"][0]["message"]["tool_calls"][0]
    assert call["function"]["name"] == "get_weather" and json.loads(call["function"]["arguments"])["city"]
    assert body["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
def test_streamed_tools(front, choice):
    found = deltas(front.client(timeout=60).post(PATH, ask("weather", tools=[WEATHER], tool_choice=choice, stream=True,
                                                 max_tokens=300)))
    calls = [call for delta in found for call in delta.get("tool_calls") or []]
    assert calls[0]["function"]["name"] == "get_weather" and {call["index"] for call in calls} == {0}


def test_two_calls_and_their_results(front):
    found = deltas(front.client(timeout=60).post(PATH, ask("say @tool2", tools=[WEATHER], stream=True)))
    calls = [call for delta in found for call in delta.get("tool_calls") or []]
    assert {call["index"] for call in calls} == {0, 1}
    history = [{"role": "user", "content": "weather"},
               {"role": "assistant", "content": None, "tool_calls": [
                   {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "broken {"}}]},
               {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"}]
    assert front.client(timeout=60).post(PATH, {**ask(""), "messages": history, "tools": [WEATHER]}).status == 200


@pytest.mark.parametrize("streams", [True, False])
def test_image_refused_in_our_shape(front, streams):
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    answer = front.client(timeout=60).post(PATH, {**ask(""), "messages": [{"role": "user", "content": [image]}], "stream": streams})
    error = answer.json()["error"]
    assert answer.status == 400 and error["code"] == "invalid_request" and "multimodal" in error["message"]


@pytest.mark.parametrize("streams", [True, False])
def test_prompt_too_long(front, streams):
    answer = front.client(timeout=60).post(PATH, ask("x" * 40_000, stream=streams))
    assert answer.status == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_models(front):
    model, = front.client().get("/v1/models").json()["data"]
    assert (model["id"], model["context_length"], model["owned_by"]) == ("glm-tiny", 32768, "sparks-gateway")


def test_json_n_logprobs_stop_and_seed(front):
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "temp": {"type": "integer"}},
              "required": ["city", "temp"]}
    body = front.client(timeout=60).post(PATH, ask("say @json", max_tokens=200, seed=1, response_format={
        "type": "json_schema", "json_schema": {"name": "w", "schema": schema}})).json()
    assert json.loads(body["choices"][0]["message"]["content"])["city"] == "Paris"
    body = front.client(timeout=60).post(PATH, ask("say @short", n=2, logprobs=True, top_logprobs=1)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1] and body["choices"][0]["logprobs"]["content"]
    assert front.client(timeout=60).post(PATH, ask("say @answer", stop=" is")).json()["choices"][0]["message"]["content"] \
        == "The test password"


def test_sampling_under_either_name_and_json_without_a_name(front):
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "temp": {"type": "integer"}},
              "required": ["city", "temp"]}
    client = front.client(timeout=60)
    body = client.post(PATH, ask("say @json", max_completion_tokens=200, max_tokens=1, repeat_penalty=1.0, top_k=50, min_p=0.01,
                                 prompt_cache_key="alice", response_format={
                                     "type": "json_schema", "json_schema": {"schema": schema}})).json()
    assert json.loads(body["choices"][0]["message"]["content"])["city"] == "Paris"
    assert client.post(PATH, ask("say @json", response_format={"type": "json_schema"}, max_tokens=200)).status == 200


# ---- text completions

TEXTS = "/v1/completions"


def complete(front, **fields):
    return front.client(timeout=60).post(TEXTS, {"model": "glm-tiny", "temperature": 0, **fields})


@pytest.mark.parametrize("prompt, count", [("hello", 1), (["hello"], 1), (["hello", "good day"], 2), ([104, 105], 1),
                                           ([[104, 105], [104], [105, 106]], 3)], ids=str)
def test_prompts(front, prompt, count):
    """Several of them, and tokens; plain and streamed they come to the same."""
    body = complete(front, prompt=prompt, max_tokens=5).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(count)) and body["object"] == "text_completion"
    assert body["usage"]["completion_tokens"] and body["usage"]["prompt_tokens"]
    events = [event for event in complete(front, prompt=prompt, max_tokens=5, stream=True).events() if event.comment is None]
    assert events[-1].data == "[DONE]"
    texts = dict.fromkeys(range(count), "")
    for event in events[:-1]:
        for choice in event.json()["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {choice["index"]: choice["text"] for choice in body["choices"]}


def test_echo_logprobs_and_n(front):
    choice, = complete(front, prompt="hello", max_tokens=2, echo=True, logprobs=1).json()["choices"]
    assert choice["text"].startswith("hello")
    assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["token_logprobs"]) > 5
    assert len(complete(front, prompt=["a", "b"], n=2, temperature=1).json()["choices"]) == 4
    assert complete(front, prompt="hello").json()["usage"]["completion_tokens"] <= 16
    assert complete(front, prompt="hello", max_tokens=0, echo=True, logprobs=1).json()["choices"][0]["text"] == "hello"


@pytest.mark.parametrize("streams", [True, False])
def test_refusals_of_completions(front, streams):
    for fields, code, param in (({"prompt": "x" * 40_000}, "context_length_exceeded", "prompt"),
                                ({"prompt": "a", "suffix": "b"}, "invalid_request", "suffix")):
        answer = complete(front, **fields, stream=streams)
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (400, code) and error["param"] == param


def test_a_chat_model_embeds_nothing(front):
    answer = front.client().post("/v1/embeddings", {"model": "glm-tiny", "input": "a"})
    assert answer.status == 400 and "glm-tiny is a chat model" in answer.json()["error"]["message"]


def test_client_leaves_a_completion(front, vllm):
    connection = front.client(timeout=60).open()
    connection.start("POST", TEXTS, {"prompt": "<|mode_long|><|assistant|>", "max_tokens": 20_000, "stream": True,
                                     "ignore_eos": True})
    events = (event for event in connection.answer().events() if event.comment is None)
    for _ in range(5):
        next(events)
    connection.close()
    idle_within(vllm, 3)


# ---- the client leaves: the engine's own gauges tell

@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_client_leaves_in_prefill(front, vllm, streams, leave):
    connection = front.client(timeout=60).open()
    connection.start("POST", PATH, ask(f"{time.time()} {leave} " + "y" * 30_000, stream=streams))
    wait_for_work(vllm)
    getattr(connection, leave)()
    idle_within(vllm, 3)


@pytest.mark.parametrize("streams", [True, False])
def test_client_leaves_midway(front, vllm, streams):
    connection = front.client(timeout=60).open()
    connection.start("POST", PATH, ask("say @long", stream=streams, max_tokens=20_000))
    if streams:
        events = (event for event in connection.answer().events() if event.comment is None)
        for _ in range(20):
            next(events)
    else:
        wait_for_work(vllm)
        time.sleep(0.3)
    connection.close()
    idle_within(vllm, 3)                              # 0.3 s on a quiet machine


def test_client_leaves_the_queue(vllm, stock, tmp_path):
    """One slot: who waits for it and leaves never reaches the engine."""
    front = Gateway(tmp_path, vllm, stock, max_active=1, keepalive=0.2)
    try:
        front.wait_alive().wait_ready()
        first, second = front.client(timeout=60).open(), front.client(timeout=60).open()
        first.start("POST", PATH, ask("say @long", stream=True, max_tokens=20_000))
        wait_for_work(vllm)
        second.start("POST", PATH, ask("say @long", stream=True, max_tokens=20_000))
        wait_until(lambda: gauge(front, "sparks_queued") == 1, 5)
        second.close()
        wait_until(lambda: gauge(front, "sparks_queued") == 0, 1)
        assert engine_gauge(vllm, "num_requests_running") + engine_gauge(vllm, "num_requests_waiting") == 1
        first.close()
        idle_within(vllm, 3)
    finally:
        front.stop()
    front.check_log()


def test_what_is_batch_comes_behind_all_others(vllm, stock, tmp_path):
    """The field that says so to vLLM is one that it takes, on all its routes, whatever its policy."""
    front = Gateway(tmp_path, vllm, stock, scheduling="priority")
    try:
        front.wait_alive().wait_ready()
        for path, body in ROUTES.items():
            for streams in (False, True):
                answer = front.client(timeout=60).post(path, {**body, "stream": streams, "service_tier": "flex"})
                said = answer.read_all()
                assert answer.status == 200 and (b'"service_tier":"flex"' in said or b'"service_tier":"batch"' in said), said
                assert b'"error"' not in said.replace(b'"error":null', b"")
    finally:
        front.stop()
    front.check_log()


def wait_for_work(vllm):
    end = time.monotonic() + 20
    while not engine_gauge(vllm, "num_requests_running"):
        assert time.monotonic() < end, "the engine got no request"
        time.sleep(0.02)


# ---- Responses

def respond(front, prompt, **fields):
    answer = front.client(timeout=60).post(responses.PATH, {"model": "glm-tiny", "input": prompt, **fields})
    return responses.said(answer)[-1]["response"] if fields.get("stream") else responses.whole(answer)


@pytest.mark.parametrize("streams", [True, False])
def test_responses(front, streams):
    response = respond(front, "say @answer", stream=streams, reasoning={"effort": "high", "summary": "auto"},
                       include=["reasoning.encrypted_content"])
    thought, message = response["output"]
    assert response["status"] == "completed" and message["content"][0]["text"] == ANSWER
    assert thought["summary"][0]["text"] == thought["content"][0]["text"] != "" and thought["encrypted_content"]
    usage = response["usage"]
    assert usage["input_tokens"] and 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "get_weather"}])
def test_responses_with_tools(front, choice, streams):
    tool = {"type": "function", "strict": False, **WEATHER["function"]}
    response = respond(front, "weather", tools=[tool], tool_choice=choice, stream=streams, max_output_tokens=300)
    call = next(item for item in response["output"] if item["type"] == "function_call")
    assert call["name"] == "get_weather" and (response["status"] == "incomplete" or json.loads(call["arguments"])["city"])


@pytest.mark.parametrize("streams", [True, False])
def test_responses_cut_short_and_structured(front, streams):
    response = respond(front, "say @long", stream=streams, max_output_tokens=20)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    schema = {"type": "object", "required": ["city", "temp"],
              "properties": {"city": {"type": "string"}, "temp": {"type": "integer"}}}
    response = respond(front, "say @json", stream=streams, max_output_tokens=300,
                       text={"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}})
    assert json.loads(response["output"][-1]["content"][0]["text"]) == {"city": "Paris", "temp": 21}


def test_responses_logprobs(front):
    message = respond(front, "say @short", include=["message.output_text.logprobs"], top_logprobs=2)["output"][-1]["content"][0]
    assert "".join(token["token"] for token in message["logprobs"]) == message["text"] == "Yes indeed"


def test_vercel_s_sdk(front):
    ask = node_asker("responses.mjs", front.url + "/v1", front.key)
    for case in ("vercel_text", "vercel_stream"):
        found = node_result(ask(case, model="glm-tiny", input="say @answer"))
        said = found.get("text") or "".join(part.get("text") or "" for part in found["parts"] if part["type"] == "text-delta")
        assert said == ANSWER


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("client", [name for name in CLIENTS if name != STORED])
def test_loops_of_tools(front, no_proxy, client, streams):
    """Each SDK's own, three times at most: the tiny model does what it has learnt, but for a few times in a hundred."""
    for _ in range(3):
        answer, turn = CLIENTS[client](front, ["say @answer", "say @tool"], streams, "glm-tiny")
        assert "error" not in answer and "error" not in turn, (answer, turn)
        if answer["text"] == ANSWER and [name for name, _ in turn["ran"]] == ["get_weather"] and turn["ran"][0][1].get("city"):
            return
    raise AssertionError((answer, turn))
