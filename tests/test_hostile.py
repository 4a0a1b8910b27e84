"""Requests that nobody should send: broken bodies, broken HTTP, paths and methods that are not there.

Every one gets a clear 4xx in OpenAI's shape, never a 5xx, never a traceback in the log; what the client said is not
in the log either; no slot stays taken; and the connection never falls out of step.
"""
import json
import random
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from client import Truncated
from conftest import Gateway, clean_environment, spawn
from engine import Head, Json, Pause, Send, chat_chunks, completion
from routes import ROUTES

CHAT = "/v1/chat/completions"
MARK = "ZEBRA7421"                                  # a client's word: it must not show in the log
MESSAGES = [{"role": "user", "content": MARK}]
MB = 1 << 20


@pytest.fixture(autouse=True)
def quiet_log(shared):
    """After each test: no slot taken, nothing of the client in the log (`shared` looks for tracebacks)."""
    before = len(shared.gateway.log)
    yield
    shared.engine.wait_idle()
    assert MARK not in shared.gateway.log[before:]


IMPATIENT = """
from gevent import monkey
monkey.patch_all()
import body
body.SILENCE = 1
import sparks
sparks.main([])
"""


class Impatient(Gateway):
    """A gateway that waits one second, not thirty, for a body's next byte."""

    def launch(self):
        self.process = spawn([sys.executable, "-c", IMPATIENT], self.log_file, clean_environment(**self.settings))
        self.pid = self.process.pid


@pytest.fixture(scope="module")
def small(shared_pair, stock, tmp_path_factory):
    """It also takes bodies of 1.5 MB at most, and 4 MB of them at once."""
    gateway = Impatient(tmp_path_factory.mktemp("small"), shared_pair.engine.url, stock, max_body="1.5 MB", max_bodies="4 MB")
    try:
        yield gateway.wait_alive().wait_ready()
    finally:
        gateway.stop()
    gateway.check_log()
    assert MARK not in gateway.log


def refused(answer, *statuses, code=None, param=None):
    """The answer's error, which must be a 4xx in OpenAI's shape."""
    error = answer.json()["error"]
    assert answer.status in (statuses or range(400, 500)), error
    assert set(error) == {"message", "type", "code", "param"} and error["message"] and isinstance(error["code"], str)
    assert answer.headers["content-type"] == "application/json"
    assert code in (None, error["code"]) and param in (None, error["param"]), error
    return error


def works(client):
    assert client.post(CHAT, {"messages": MESSAGES}).status == 200


def lists(depth, inside=b""):
    return b"[" * depth + inside + b"]" * depth


def with_field(name, value):
    return b'{"messages": %b, "%b": %b}' % (json.dumps(MESSAGES).encode(), name.encode(), value)


# ---- bodies that are no JSON

@pytest.mark.parametrize("body", [
    b"", b" ", b"{", b"}", MARK.encode(), b'{"messages": [}', b"{'messages': []}", b'{"messages": []}}', b"{}{}", b"[]", b"[{}]",
    b"null", b"true", b"17", b'"text"', b"NaN", b"\x00", b"\xef\xbb\xbf{}", '{"messages": []}'.encode("utf-16"),
    b"messages=" + MARK.encode(), b"[" * 200_000, b"{" * 200_000, b'{"a":' * 200_000, b"[" + b"[]," * 1000,
], ids=lambda body: repr(body[:20]))
def test_no_json_object(shared, body):
    refused(shared.client().post(CHAT, body), 400, code="invalid_request")
    assert shared.engine.requests == []


@pytest.mark.parametrize("value", [
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"01", b"+1", b"0x1", b"1.", b"'a'", b'"\\x41"', b'"\\ud83d"', b'"\\udc00"',
    b'"\\ud83d\\ud83d"', b'"\xff"', b'"\xc0\xaf"', b'"\xed\xa0\xbd"', b'"\xf5\x80\x80\x80"', b'"\xe4\xb8"', b'"a\nb"', b'"\x00"',
], ids=repr)
def test_bad_values_anywhere(shared, value):
    nested = b'{"deep": [1, {"er": %b}]}' % value
    for body in (with_field("user", value), with_field("metadata", nested), b'{"messages": [{"role": "user", "content": %b}]}' % value,
                 b'{"messages": [{"role": "user", "content": [{"type": "text", "text": %b}]}]}' % value):
        refused(shared.client().post(CHAT, body), 400, code="invalid_request")
    assert shared.engine.requests == []


@pytest.mark.parametrize("key", [b'"\\ud83d"', b'"\xff"', b"NaN", b"1", b"null"], ids=repr)
def test_bad_names(shared, key):
    refused(shared.client().post(CHAT, b'{"messages": %b, %b: 1}' % (json.dumps(MESSAGES).encode(), key)), 400)


@pytest.mark.parametrize("text", ["\x00", "\ud83d\ude00 🌍", "\u2028\u2029\x85", "</script>", "data: [DONE]\n\n", "\ufeff", "e\u0301"],
                         ids=ascii)
def test_odd_texts_that_are_fine(shared, text):
    text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    body = {"messages": [{"role": "user", "content": text}], "user": text, text: text}
    assert shared.client().post(CHAT, body).status == 200
    sent = shared.engine.requests[-1].json()
    assert sent["messages"][0]["content"] == sent["user"] == sent[text] == text


@pytest.mark.parametrize("type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "a/b/c"])
def test_content_type_is_not_needed(shared, type):
    assert shared.client().post(CHAT, {"messages": MESSAGES}, {"content-type": type}).status == 200
    assert shared.engine.requests[-1].json()["messages"] == MESSAGES


# ---- nesting

@pytest.mark.parametrize("depth", [100, 250, 253, 254, 255, 500, 990, 1022, 1024, 1100, 5000, 200_000])
def test_deep_nesting_in_fields(shared, depth):
    """Deep ones pass or are refused; JSON readers and writers do not agree on how deep is too deep."""
    parameters = b'{"a":' * depth + b"1" + b"}" * depth
    tool = b'[{"type": "function", "function": {"name": "f", "parameters": %b}}]' % parameters
    for body in (with_field("metadata", lists(depth)), with_field("tools", tool), with_field("chat_template_kwargs", parameters),
                 with_field("response_format", parameters), with_field("model", lists(depth)), with_field("stop", lists(depth))):
        answer = shared.client().post(CHAT, body)
        if answer.status != 200:
            refused(answer, 400, code="invalid_request")
    assert depth > 250 or len(shared.engine.requests) == 5      # all but the model


@pytest.mark.parametrize("depth", [250, 300, 1000, 1100, 100_000])
@pytest.mark.parametrize("where", [
    b'[{"role": "user", "content": %b}]', b'[{"role": %b}]', b"[%b]", b'[{"role": "user", "content": [{"type": %b}]}]',
    b'[{"role": "user", "content": "x", "odd": %b}]', b'[{"role": "assistant", "tool_calls": %b}]',
    b'[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %b}}]}]',
    b'[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": %b}}}]}]',
    b'[{"role": "assistant", "content": "x", "reasoning": %b}]',
], ids=repr)
def test_deep_nesting_in_messages(shared, where, depth):
    answer = shared.client().post(CHAT, b'{"messages": %b}' % (where % lists(depth)))
    if answer.status != 200:
        refused(answer, 400, code="invalid_request")


@pytest.mark.parametrize("arguments", ["[" * 100_000, "{\"a\":" * 100_000, "[" * 900 + "]" * 900, "{\"a\": NaN}", "\ud83d\ude00", "\x00",
                                       "NaN", "1e999", "{\"a\": 1}{", '{"a": "\\ud83d"}'], ids=lambda text: ascii(text[:12]))
def test_hostile_tool_arguments_in_history(shared, arguments):
    """They are texts, so they are mended or sent on; they must not break the gateway."""
    text = arguments.encode("utf-16", "surrogatepass").decode("utf-16")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    answer = shared.client().post(CHAT, {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]})
    assert answer.status == 200


# ---- wrong types

WRONG = [                                           # fields -> the field that the refusal names
    ({"messages": None}, "messages"), ({"messages": {}}, "messages"), ({"messages": MARK}, "messages"), ({"messages": []}, "messages"),
    ({"messages": [None]}, "messages"), ({"messages": [1]}, "messages"), ({"messages": [MARK]}, "messages"), ({"messages": [[]]}, "messages"),
    ({"messages": [{}]}, "messages"), ({"messages": [{"role": None}]}, "messages"), ({"messages": [{"role": 1}]}, "messages"),
    ({"messages": [{"role": ["user"]}]}, "messages"), ({"messages": [{"role": {}}]}, "messages"), ({"messages": [{"role": MARK}]}, "messages"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages"), ({"messages": [{"role": "user", "content": True}]}, "messages"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages"), ({"messages": [{"role": "user", "content": [None]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [1]}]}, "messages"), ({"messages": [{"role": "user", "content": [[]]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages"), ({"messages": [{"role": "user", "content": [{"type": 1}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": MARK}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": [MARK]}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 1}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": []}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": None}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": ["data:"]}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "input_image", "input_image": {}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "messages"), ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages"), ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": []}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]}, "messages"),
    ({"model": 1}, "model"), ({"model": True}, "model"), ({"model": []}, "model"), ({"model": {}}, "model"),
    ({"stream": 1}, "stream"), ({"stream": "true"}, "stream"), ({"stream": []}, "stream"),
    ({"stream_options": {}}, "stream_options"), ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"), ({"stream": True, "stream_options": True}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"include_usage": []}}, "stream_options.include_usage"),
    ({"tools": 1}, "tools"), ({"tools": {}}, "tools"), ({"tools": [1]}, "tools"), ({"tools": [None]}, "tools"), ({"tools": [[]]}, "tools"),
    ({"tools": [{}]}, "tools"), ({"tools": [{"type": 1}]}, "tools"), ({"tools": [{"type": {}}]}, "tools"), ({"tools": [{"type": MARK}]}, "tools"),
    ({"tools": [{"type": "function", "function": 1}]}, "tools"), ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": []}}]}, "tools"), ({"tools": [{"type": "function", "name": 1}]}, "tools"),
    ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"), ({"max_tokens": []}, "max_tokens"), ({"max_tokens": 2 ** 70}, "max_tokens"),
    ({"max_completion_tokens": {}}, "max_completion_tokens"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"reasoning_effort": 1}, "reasoning_effort"), ({"reasoning_effort": []}, "reasoning_effort"), ({"reasoning_effort": MARK}, "reasoning_effort"),
    ({"reasoning": 1}, "reasoning"), ({"reasoning": "high"}, "reasoning"), ({"reasoning": []}, "reasoning"),
    ({"reasoning": {"effort": 1}}, "reasoning.effort"), ({"reasoning": {"effort": {}}}, "reasoning.effort"),
    ({"think": 1}, "think"), ({"think": "yes"}, "think"), ({"think": {}}, "think"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs"), ({"chat_template_kwargs": []}, "chat_template_kwargs"),
]


@pytest.mark.parametrize("fields, param", WRONG, ids=lambda value: str(value)[:60])
def test_wrong_types(shared, fields, param):
    error = refused(shared.client().post(CHAT, {"messages": MESSAGES, **fields}), 400, code="invalid_request", param=param)
    assert error["type"] == "invalid_request_error"
    assert shared.engine.requests == []


FIELDS = ["model", "stream", "stream_options", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "reasoning_effort",
          "reasoning", "think", "chat_template_kwargs", "n", "repeat_penalty", "repetition_penalty", "stop", "user", "functions"]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("stream", [True, False])
def test_null_counts_as_absent(shared, name, stream):
    body = {"messages": MESSAGES, "stream": stream, name: None}
    answer = shared.client().post(CHAT, body)
    assert answer.status == 200 and answer.read_all()


JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers(-2, 3) | strategies.floats(allow_nan=False, allow_infinity=False)
    | strategies.sampled_from(["", MARK, "user", "assistant", "text", "image_url", "function", "high", "data:,"]),
    lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(
        strategies.sampled_from(["role", "content", "type", "text", "image_url", "url", "tool_calls", "function", "name", "arguments",
                                 "reasoning", "effort", "include_usage", "enable_thinking", "detail", "id"]), inner, max_size=4),
    max_leaves=12)
LIKELY = strategies.fixed_dictionaries({}, optional={
    "role": strategies.sampled_from(["user", "assistant", "tool", "developer"]), "content": JSON, "tool_calls": JSON, "reasoning": JSON,
    "reasoning_content": JSON, "name": JSON})
ASKS = strategies.fixed_dictionaries({"messages": JSON | strategies.lists(LIKELY | JSON, min_size=1, max_size=3)},
                                     optional={name: JSON for name in FIELDS})


@settings(max_examples=300, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=ASKS)
def test_any_json(shared, body):
    answer = shared.client().post(CHAT, body)
    if answer.status == 200:
        assert answer.read_all()
    else:
        refused(answer)


# ---- encodings

@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "gzip, gzip", "identity, gzip", "x", "\udcff"], ids=ascii)
def test_encoded_bodies(shared, encoding):
    for body in ({"messages": MESSAGES}, b"\x1f\x8b\x08\x00" + bytes(20)):
        refused(shared.client().post(CHAT, body, {"content-encoding": encoding}), 415, code="unsupported_encoding")
    assert shared.engine.requests == []


@pytest.mark.parametrize("encoding", ["", "identity", "Identity"])
def test_encoding_that_is_none(shared, encoding):
    assert shared.client().post(CHAT, {"messages": MESSAGES}, {"content-encoding": encoding}).status == 200


# ---- bodies that stop, or are too large

def head(connection, **headers):
    connection.send_head("POST", CHAT, {name.replace("_", "-"): value for name, value in headers.items()})


STOPPED = [                                         # heads, and what comes of their bodies
    ({"content_length": 100}, b""), ({"content_length": 100}, b'{"mess'), ({"content_length": 1_000_000}, b"{"),
    ({"transfer_encoding": "chunked"}, b""), ({"transfer_encoding": "chunked"}, b"5\r\n{"),
    ({"transfer_encoding": "chunked"}, b"2\r\n{}\r\n"), ({"transfer_encoding": "chunked"}, b"2\r\n{}\r\n0\r\n"),
    ({"transfer_encoding": "chunked"}, b"f" * 20 + b"\r\n"), ({"transfer_encoding": "chunked"}, b"2\n{}\n0\n\n"),
]


def test_bodies_that_stop_arriving(small):
    began, waiting = time.monotonic(), []
    for headers, begun in STOPPED:
        connection = small.client(timeout=8).open()
        head(connection, **headers)
        connection.send(begun)
        waiting.append(connection)
    for connection in waiting:
        with connection:
            answer = connection.answer()
            error = refused(answer, 408, code="request_timeout")
            assert error["type"] == "invalid_request_error"
            assert answer.headers["connection"] == "close"      # RFC 9110, 15.5.9: or its rest would be the next request
            assert connection.ended(5)
    assert 0.9 < time.monotonic() - began < 5


def test_body_that_trickles(small, shared):
    """It is silence that counts, not time."""
    body = json.dumps({"messages": MESSAGES}).encode()
    with small.client().open() as connection:
        head(connection, content_length=len(body))
        for at in range(0, len(body), 5):
            connection.send(body[at:at + 5])
            time.sleep(0.15)
        assert connection.answer().status == 200
    assert shared.engine.requests[-1].json()["messages"] == MESSAGES


@pytest.mark.parametrize("length", [1536 * 1024 + 1, 200 * MB, 10 ** 15, 2 ** 63, 10 ** 30])
def test_length_beyond_the_limit_is_refused_unread(small, length):
    with small.client(timeout=5).open() as connection:
        head(connection, content_length=length)
        began = time.monotonic()
        answer = connection.answer()
        refused(answer, 413, code="request_too_large")
        assert time.monotonic() - began < 1 and answer.headers["connection"] == "close"
        connection.half_close()
        assert connection.ended(5)


def test_message_of_413_names_the_limit(small):
    with small.client().open() as connection:
        head(connection, content_length=10 * MB)
        assert "1.5 MB" in connection.answer().json()["error"]["message"]


def test_chunks_beyond_the_limit_are_refused_at_once(small):
    """With the first byte too many, whether or not more would come."""
    with small.client(timeout=5).open() as connection:
        head(connection, transfer_encoding="chunked")
        for size in (512 * 1024, 512 * 1024, 512 * 1024, 1):
            connection.send(b"%x\r\n%b\r\n" % (size, b"x" * size))
        refused(connection.answer(), 413, code="request_too_large")


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("extra, status", [(0, 200), (1, 413)])
def test_limit_to_the_byte(small, shared, chunked, extra, status):
    start, rest = b'{"messages": [{"role": "user", "content": "', b'"}]}'
    body = start + b"x" * (1536 * 1024 - len(start) - len(rest) + extra) + rest
    pieces = [body[at:at + 100_000] for at in range(0, len(body), 100_000)] if chunked else body
    answer = small.client().post(CHAT, pieces, chunked=chunked)
    assert answer.status == status
    assert len(shared.engine.requests) == (status == 200)


@pytest.mark.parametrize("chunked", [True, False])
def test_client_that_writes_all_before_it_reads(small, chunked):
    piece = b"x" * MB
    with small.client().open() as connection:
        head(connection, **({"transfer_encoding": "chunked"} if chunked else {"content_length": 24 * MB}))
        for _ in range(24):
            connection.send(b"100000\r\n%b\r\n" % piece if chunked else piece)
        refused(connection.answer(), 413, code="request_too_large")


def test_client_that_never_stops_writing_is_cut_off(small):
    with small.client().open() as connection:
        head(connection, content_length=10 ** 12)
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 10:
                connection.send(b"x" * 65536)
                time.sleep(0.01)
        assert 1 < time.monotonic() - began < 5
    works(small.client())


def test_too_many_bodies_at_once(small, shared):
    """Two bodies of 1.5 MB are on their way; a third one does not fit into the 4 MB."""
    client = small.client()
    held = [client.open() for _ in range(2)]
    for connection in held:
        head(connection, content_length=1536 * 1024, expect="100-continue")
        assert connection.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")         # the app has it now
    large = {"messages": MESSAGES, "user": "x" * (1400 * 1024)}
    for chunked in (False, True):
        body = json.dumps(large).encode() if chunked else large
        answer = client.post(CHAT, body, chunked=chunked)
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["type"]) == (503, "overloaded", "api_error")
        assert answer.headers["retry-after"].isdigit()
    works(client)                                               # a small one still fits
    for connection in held:
        connection.close()
    end = time.monotonic() + 3
    while client.post(CHAT, large).status != 200:
        assert time.monotonic() < end
    assert len(shared.engine.requests) == 2


def test_refused_bodies_weigh_nothing(small):
    """Each of these held memory when it was refused; none may stay on the account."""
    client = small.client()
    for _ in range(5):
        refused(client.post(CHAT, b"x" * MB), 400)
        refused(client.post(CHAT, b"x" * MB, {"content-encoding": "gzip"}), 415)
        refused(client.post(CHAT, [b"x" * MB] * 2, chunked=True), 413)
        with client.open() as connection:
            head(connection, content_length=1536 * 1024)
            connection.send(b"x" * MB)
    end = time.monotonic() + 3
    while client.post(CHAT, {"messages": MESSAGES, "user": "x" * MB}).status != 200:
        assert time.monotonic() < end


def longest_gap(shared, body):
    """Take in a body while another client's stream flows: the longest time between two of its tokens, in seconds."""
    chunks, done = chat_chunks("a b", usage=True), threading.Event()

    def flow():
        yield from (Head(), chunks[0])
        while not done.is_set():
            yield from (Send(chunks[1]), Pause(0.005))
        yield from chunks[2:]

    shared.engine.always(lambda request: flow() if len(request.body) < MB else [Json(completion())])
    stream = shared.client(timeout=60).post(CHAT, {"messages": MESSAGES, "stream": True})
    moments = []
    reader = threading.Thread(target=lambda: moments.extend(event.at for event in stream.events()))
    reader.start()
    try:
        with shared.client(timeout=30).open() as connection:
            head(connection, content_length=len(body))
            connection.send(body)
            assert connection.answer().status == 200
    finally:
        done.set()
        reader.join(30)
    return max(b - a for a, b in zip(moments, moments[1:]))


def test_100_mb_pass_and_streams_flow_on(shared):
    """The largest body that is allowed. A busy machine gets three tries."""
    start, rest = b'{"messages": [{"role": "user", "content": "', b'"}]}'
    body = start + b"x" * (100 * MB - len(start) - len(rest)) + rest
    assert any(longest_gap(shared, body) < 1 for _ in range(3))
    assert len(shared.engine.requests[-1].body) > 100 * MB - 1000


def test_one_byte_over_100_mb(shared):
    with shared.client(timeout=5).open() as connection:
        head(connection, content_length=100 * MB + 1)
        assert "100 MB" in refused(connection.answer(), 413, code="request_too_large")["message"]


# ---- clients that leave

@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
@pytest.mark.parametrize("headers, begun", [({"content_length": 1000}, b'{"messages'), ({"content_length": 50 * MB}, b"x" * MB),
                                            ({"transfer_encoding": "chunked"}, b"5\r\n{"), ({"content_length": 10}, b"")], ids=str)
def test_client_leaves_in_its_body(shared, headers, begun, leave):
    before = shared.gateway.log.count("status=aborted")
    connection = shared.client(timeout=5).open()
    head(connection, **headers)
    connection.send(begun)
    getattr(connection, leave)()
    if leave == "half_close":
        assert connection.ended(5)
        connection.close()
    end = time.monotonic() + 3
    while shared.gateway.log.count("status=aborted") == before and time.monotonic() < end:
        time.sleep(0.01)
    assert shared.gateway.log.count("status=aborted") == before + 1
    assert shared.engine.requests == []
    works(shared.client())


def test_client_leaves_in_its_head(shared):
    for data in (b"", b"G", b"GET /help HTTP/1.1\r\n", b"GET /help HTTP/1.1\r\nHost: x"):
        for leave in ("close", "reset", "half_close"):
            connection = shared.client(timeout=5).open()
            connection.send(data)
            getattr(connection, leave)()
            connection.close()
    works(shared.client())


# ---- Expect

def test_expect_100_continue(shared):
    body = json.dumps({"messages": MESSAGES}).encode()
    with shared.client(timeout=5).open() as connection:
        head(connection, content_length=len(body), expect="100-continue")
        assert connection.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
        connection.send(body)
        assert connection.answer().status == 200


@pytest.mark.parametrize("key, length, status", [(False, 100, 401), (None, 200 * MB, 413)])
def test_expect_100_continue_and_refused(shared, key, length, status):
    with shared.client(key=key, timeout=5).open() as connection:
        head(connection, content_length=length, expect="100-continue")
        refused(connection.answer(), status)


def test_other_expectations(shared):
    refused(shared.client().get("/healthz", {"expect": "200-ok"}), 417)


# ---- broken HTTP

def said(shared, data):
    """All that the server answers to these bytes and an end, as [(status, body)], each of them JSON."""
    answers = []
    with shared.client(key=False, timeout=8).open() as connection:
        connection.send(data)
        connection.half_close()
        while True:
            try:
                answer = connection.answer()
            except (Truncated, ConnectionResetError):
                return answers
            answers.append((answer.status, answer.read_all()))


def plain(*lines):
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")


BROKEN = {
    "garbage": b"\x00\x01\x02\x03\r\n\r\n", "words": MARK.encode() + b"\r\n\r\n", "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/0.9": b"GET /help\r\n\r\n", "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/3.7": plain("GET / HTTP/3.7"),
    "HTTP/1.x": plain("GET / HTTP/1.x"), "HTTPS": plain("GET / HTTPS/1.1"), "no target": plain("GET  HTTP/1.1"),
    "two spaces": plain("GET  / HTTP/1.1"), "tab": plain("GET\t/\tHTTP/1.1"), "space in target": plain("GET /a b HTTP/1.1"),
    "raw bytes in target": plain("GET /\udcff HTTP/1.1"), "NUL in target": plain("GET /\x00 HTTP/1.1"), "small method": plain("get / HTTP/1.1"),
    "odd method": plain("G<T / HTTP/1.1"), "long method": plain("A" * 30 + " / HTTP/1.1"), "bare LF": b"GET /help HTTP/1.1\nHost: x\n\n",
    "bare LF in head": b"GET /help HTTP/1.1\r\nHost: x\nX: y\r\n\r\n", "long line": plain("GET /" + "a" * 9000 + " HTTP/1.1"),
    "large header": plain("GET / HTTP/1.1", "X: " + "a" * 20000), "many headers": plain("GET / HTTP/1.1", *["X: y"] * 500),
    "no colon": plain("GET / HTTP/1.1", MARK), "no name": plain("GET / HTTP/1.1", ": x"), "space before colon": plain("GET / HTTP/1.1", "Host : x"),
    "folded": plain("GET / HTTP/1.1", "X: a", " b"), "NUL in header": plain("GET / HTTP/1.1", "X: a\x00b"), "CR in header": plain("GET / HTTP/1.1", "X: a\rb"),
    "two hosts": plain("GET / HTTP/1.1", "Host: a", "Host: b"), "bytes in name": plain("GET / HTTP/1.1", "X\udcff: a"),
    "schemes at odds": plain("GET / HTTP/1.1", "X-Forwarded-Proto: https", "X-Forwarded-Ssl: off"),
    "two blank lines": b"\r\n\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http(shared, name):
    (status, body), = said(shared, BROKEN[name])
    assert 400 <= status < 500
    assert set(json.loads(body)["error"]) == {"message", "type", "code", "param"} and MARK not in body.decode()


def smuggle(*lines, body=b"0\r\n\r\n"):
    """A POST with doubtful framing; behind it waits a request that must not be seen."""
    return plain(f"POST {CHAT} HTTP/1.1", "Host: x", *lines) + body


SMUGGLED = {
    "length and chunked": ["Content-Length: 5", "Transfer-Encoding: chunked"], "chunked and length": ["Transfer-Encoding: chunked", "Content-Length: 5"],
    "two lengths": ["Content-Length: 5", "Content-Length: 6"], "same length twice": ["Content-Length: 5", "Content-Length: 5"],
    "list of lengths": ["Content-Length: 5, 5"], "plus": ["Content-Length: +5"], "minus": ["Content-Length: -5"], "hex": ["Content-Length: 0x5"],
    "point": ["Content-Length: 5.0"], "words": ["Content-Length: five"], "none": ["Content-Length: "], "huge": ["Content-Length: " + "9" * 5000],
    "superscript": ["Content-Length: \udcb2"], "underscored digits": ["Content-Length: 1_0"],
    "chunked twice": ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"], "list of chunked": ["Transfer-Encoding: chunked, chunked"],
    "identity": ["Transfer-Encoding: identity"], "chunked, identity": ["Transfer-Encoding: chunked, identity"], "gzip": ["Transfer-Encoding: gzip"],
    "chunked, gzip": ["Transfer-Encoding: chunked, gzip"], "xchunked": ["Transfer-Encoding: xchunked"], "quoted": ['Transfer-Encoding: "chunked"'],
    "VT": ["Transfer-Encoding: \x0bchunked"], "space before colon": ["Transfer-Encoding : chunked"], "empty": ["Transfer-Encoding: "],
    "chunked in HTTP/1.0": None,
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_smuggling(shared, name):
    lines = SMUGGLED[name]
    hidden = plain("GET /v1/models HTTP/1.1", "Host: x", f"Authorization: Bearer {shared.key}")
    data = smuggle(*lines) if lines else plain(f"POST {CHAT} HTTP/1.0", "Host: x", "Transfer-Encoding: chunked") + b"0\r\n\r\n"
    answers = said(shared, data + hidden)
    assert len(answers) == 1, answers
    status, body = answers[0]
    assert 400 <= status < 500 and json.loads(body)["error"]["code"]
    assert shared.key not in shared.gateway.log


@pytest.mark.parametrize("body", [
    b"zz\r\n", b"-1\r\n", b"+2\r\n{}\r\n0\r\n\r\n", b"0x2\r\n{}\r\n0\r\n\r\n", b" 2\r\n{}\r\n0\r\n\r\n", b"\r\n", b"2 \r\n{}\r\n0\r\n\r\n",
    b"2\r\n{}XX0\r\n\r\n", b"2;a=\x01\r\n{}\r\n0\r\n\r\n", b"2;\rx\r\n{}\r\n0\r\n\r\n", b"0\r\nContent-Length: 5\r\n\r\n",
    b"0\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\nno colon\r\n\r\n", b"0\r\n: x\r\n\r\n", b"2\r\n{}\r\n0\r\nA: b\nC: d\r\n\r\n", b"2\r\n{}\r\n",
    b"1" * 40_000, b"2;" + b"a" * 40_000, b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 300 + b"\r\n", b"\xff\r\n", MARK.encode() + b"\r\n",
], ids=lambda body: repr(body[:24]))
def test_broken_chunks(shared, body):
    hidden = plain("GET /v1/models HTTP/1.1", "Host: x", f"Authorization: Bearer {shared.key}")
    with shared.client(timeout=8).open() as connection:
        head(connection, transfer_encoding="chunked")
        connection.send(body + (hidden if not body.endswith(b"2\r\n{}\r\n") else b""))
        connection.half_close()
        try:
            answer = connection.answer()
        except Truncated:
            assert body == b"2\r\n{}\r\n" or len(body) > 30_000            # it left before the end
        else:
            refused(answer, 400, 431)
            assert answer.headers["connection"] == "close" and connection.ended(5)
    assert shared.engine.requests == []


@pytest.mark.parametrize("header", ["SCRIPT_NAME: /abc", "PATH_INFO: /healthz", "REMOTE_USER: root", "HTTP_AUTHORIZATION: Bearer KEY",
                                    "X_API_KEY: KEY"])
def test_headers_do_not_reach_the_servers_own_variables(shared, header):
    """WSGI servers hand paths and users on in names with an underscore; a client must not set them."""
    for path in ("/abc/v1/models", "/v1/models"):
        key = shared.key if path == "/abc/v1/models" else "none"
        data = plain(f"GET {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", header.replace("KEY", shared.key))
        (status, _), = said(shared, data)
        assert status in ((404, 400) if path == "/abc/v1/models" else (401, 400))


MUTANTS = [plain(f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Length: 2") + b"{}", plain("GET /v1/models HTTP/1.1", "Host: x"),
           plain(f"POST {CHAT} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"]


def test_mutated_http(shared):
    """Bytes flipped, cut, doubled and thrown in: an answer below 500, or none."""
    chance = random.Random(7)
    for _ in range(400):
        data = bytearray(chance.choice(MUTANTS))
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(data))
            data[at:at + chance.choice((0, 0, 1, 4))] = chance.choice((bytes([chance.randrange(256)]), b"", b"\r\n", b"\n", b" ", b":"))
        for status, body in said(shared, bytes(data)):
            assert status < 500 and (status < 400 or not body or json.loads(body)["error"]), bytes(data)


# ---- methods and paths

@pytest.mark.parametrize("path", ["/", "/help", "/llms.txt", "/healthz", "/v1/models"])
def test_head(shared, path):
    with shared.client(timeout=5).open() as connection:
        answer = connection.request("HEAD", path)
        assert answer.status == 200
        assert connection.get("/healthz").json() == {"ok": True}           # nothing of a body stands in between


def test_root_sends_browsers_to_the_help(shared):
    answer = shared.client(key=False).get("/", {"accept": "text/html"})
    assert answer.status == 302 and answer.headers["location"] == "/help"


@pytest.mark.parametrize("method, path", [("PUT", "/v1/models"), ("DELETE", "/v1/models/x"), ("POST", "/v1/models"), ("GET", CHAT),
                                          ("HEAD", CHAT), ("DELETE", CHAT), ("POST", "/help"), ("POST", "/healthz"), ("TRACE", "/help"),
                                          ("BREW", "/help"), ("M-SEARCH", CHAT), ("POST", "/")])
def test_wrong_method(shared, method, path):
    answer = shared.client().request(method, path)
    allowed = {"GET", "HEAD"} if path != CHAT else {"POST"}
    assert answer.status == 405 and allowed <= set(answer.headers["allow"].replace(" ", "").split(","))    # RFC 9110, 15.5.6
    if method != "HEAD":
        error = refused(answer, 405, code="method_not_allowed")
        assert error["type"] == "invalid_request_error"
        assert all(f"{route.method} {route.path}" in error["message"] for route in ROUTES)


@pytest.mark.parametrize("path", ["/help", "/healthz", "/v1/models", CHAT])
def test_options(shared, path):
    answer = shared.client().request("OPTIONS", path, headers={"Origin": "http://x", "Access-Control-Request-Method": "POST"})
    assert answer.status in (200, 204, 405) and answer.headers["allow"]
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", [
    "/nothing", "/v1", "/v1/", "/v2/models", "/V1/models", "/v1/Models", "/v1/completions", "/v1/embeddings", "/v1/responses",
    "/v1/messages", "/v1/audio/speech", "/v1//models", "/v1/./models", "/v1/../help", "/help/../v1/models", "/%2e%2e/%2e%2e/etc/passwd",
    "/..%2f..%2fetc%2fpasswd", "/static/x", "/sparks.db", "/.git/config", "/%00", "/help%00", "/help%0a", "/%0d%0aX-Injected:%20yes",
    "/%ff%fe", "/%zz", "/%", "/a" * 1500, "/" + MARK, "/help;x", "/metrics", "/favicon.ico",
], ids=lambda path: path[:40])
@pytest.mark.parametrize("key", [None, False], ids=["key", "no key"])
def test_unknown_path(shared, path, key):
    for method in ("GET", "POST"):
        answer = shared.client(key=key).request(method, path)
        error = refused(answer, 404, code="not_found")
        assert error["type"] == "not_found_error"
        assert all(f"{route.method} {route.path}" in error["message"] for route in ROUTES)
        assert "x-injected" not in answer.headers and len(error["message"]) < 1500


@pytest.mark.parametrize("path, status", [
    ("/v1/models/../x", 404), ("/v1/models/%2e%2e/x", 404), ("/v1/models/%00", 404), ("/v1/models/%0a", 404), ("/v1/models/%0d%0aX-Injected:%20yes", 404),
    ("/v1/models/%ff", 404), ("/v1/models/" + "a" * 4000, 404), ("/v1/models/" + "a" * 9000, 414), ("/v1/models/a//b", 404),
    ("/v1/models/" + MARK, 404), ("//v1/models", 200), ("/v1/models/", 200), ("/v1/models?" + "a=b&" * 500, 200), ("/v1/models?%00=%ff&a", 200),
    ("/v1/models#x", 200), ("http://x/v1/models", 200),
], ids=lambda value: str(value)[:40])
def test_odd_paths(shared, path, status):
    answer = shared.client().get(path)
    assert answer.status == status and "x-injected" not in answer.headers
    if status != 200:
        error = refused(answer, status)
        assert error["code"] in ("model_not_found", "not_found", "invalid_request") and len(error["message"]) < 1500


def test_method_is_not_in_the_log(shared):
    """It is a client's word like any other."""
    shared.client().request(MARK, "/v1/models")
    shared.client().request("SK-SPARKS-" + MARK[:5], "/v1/models")
    assert MARK[:5] not in shared.gateway.log


@pytest.mark.parametrize("host", ["", "a b", "<script>alert(1)</script>", "a/b", "\udcff", "x" * 4000, "[::1", "x:99999", "x:y", "@", None], ids=ascii)
@pytest.mark.parametrize("path", ["/healthz", "/help", "/help?format=json", "/", "/v1/models", "/nothing", "/v1//models"])
def test_odd_hosts(shared, host, path):
    answer = shared.client().get(path, {"host": host, "accept": "text/html"})
    assert answer.status < 500 and b"<script>alert" not in answer.read_all()


def test_words_of_clients_stay_out_of_the_log(shared):
    """In every place where a client can say something."""
    client, headers = shared.client(), {"user-agent": MARK, "referer": f"http://{MARK}/", "x-forwarded-for": MARK, "cookie": MARK, "host": MARK}
    client.get(f"/{MARK}?{MARK}={MARK}", headers)
    client.get(f"/v1/models/{MARK}?{MARK}", headers)
    client.post(CHAT, {"messages": MESSAGES, "user": MARK, "metadata": {MARK: MARK}}, headers)
    client.post(CHAT, {"messages": MESSAGES, "stream": True}, headers).read_all()
    client.post(CHAT, {"messages": MESSAGES, "model": MARK}, headers)
    client.post(CHAT, MARK.encode(), headers)
    shared.client(key=MARK).get("/v1/models", headers)
    client.get("/healthz", {"x-request-id": f"{MARK} {MARK}"})
    client.get("/help", {"accept": MARK})
    shared.client().get("/help", {"x-forwarded-proto": MARK})
    assert MARK not in shared.gateway.log
