"""Requests that nobody should send: broken bodies, broken HTTP, paths and methods that are not there.

Every one gets a clear 4xx in OpenAI's shape, never a 5xx, never a traceback in the log; what the client said is not
in the log either; no slot stays taken; and the connection never falls out of step.
"""
import itertools
import json
import random
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from front.routes import ROUTES
from support.chat import text_of
from support.client import Truncated
from support.engine import Hang, Head, Json, Pause, Send, chat_chunks, completion, text_completion
from support.gateway import Gateway
from support.processes import clean_environment, spawn, wait_until

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
from front import body
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
    bounds = {"max_body": "1.5 MB", "max_bodies": "8 MB", "heavy_prompt": 0}
    gateway = Impatient(tmp_path_factory.mktemp("small"), shared_pair.engine.url, stock, **bounds)
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

NO_JSON = [
    b"", b" ", b"{", b"}", MARK.encode(), b'{"messages": [}', b"{'messages': []}", b'{"messages": []}}', b"{}{}",
    b"[]", b"[{}]", b"null", b"true", b"17", b'"text"', b"NaN", b"\x00", b"\xef\xbb\xbf{}",
    '{"messages": []}'.encode("utf-16"), b"messages=" + MARK.encode(),
    b"[" * 200_000, b"{" * 200_000, b'{"a":' * 200_000, b"[" + b"[]," * 1000,
]


def test_no_json_object(shared, subtests):
    for body in NO_JSON:
        shared.engine.reset()
        with subtests.test(repr(body[:20])):
            refused(shared.client().post(CHAT, body), 400, code="invalid_request")
            assert shared.engine.requests == []


BAD_VALUES = [
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"01", b"+1", b"0x1", b"1.", b"'a'", b'"\\x41"',
    b'"\\ud83d"', b'"\\udc00"', b'"\\ud83d\\ud83d"', b'"\xff"', b'"\xc0\xaf"', b'"\xed\xa0\xbd"',
    b'"\xf5\x80\x80\x80"', b'"\xe4\xb8"', b'"a\nb"', b'"\x00"',
]


def test_bad_values_anywhere(shared, subtests):
    for value in BAD_VALUES:
        shared.engine.reset()
        with subtests.test(repr(value)):
            part = b'[{"type": "text", "text": %b}]' % value
            for body in (with_field("user", value), with_field("metadata", b'{"deep": [1, {"er": %b}]}' % value),
                         b'{"messages": [{"role": "user", "content": %b}]}' % value,
                         b'{"messages": [{"role": "user", "content": %b}]}' % part):
                refused(shared.client().post(CHAT, body), 400, code="invalid_request")
            assert shared.engine.requests == []


def test_bad_names(shared, subtests):
    for key in [b'"\\ud83d"', b'"\xff"', b"NaN", b"1", b"null"]:
        with subtests.test(repr(key)):
            refused(shared.client().post(CHAT, b'{"messages": %b, %b: 1}' % (json.dumps(MESSAGES).encode(), key)), 400)


ODD_TEXTS = ["\x00", "😀 🌍", "\u2028\u2029\x85", "</script>", "data: [DONE]\n\n", "\ufeff", "e\u0301"]


def test_odd_texts_that_are_fine(shared, subtests):
    for text in ODD_TEXTS:
        with subtests.test(ascii(text)):
            body = {"messages": [{"role": "user", "content": text}], "user": text, text: text}
            assert shared.client().post(CHAT, body).status == 200
            sent = shared.engine.requests[-1].json()
            assert sent["messages"][0]["content"] == sent["user"] == sent[text] == text


def test_content_type_is_not_needed(shared, subtests):
    for type in ("", "text/plain", "a/b/c", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        with subtests.test(type):
            assert shared.client().post(CHAT, {"messages": MESSAGES}, {"content-type": type}).status == 200
            assert shared.engine.requests[-1].json()["messages"] == MESSAGES


# ---- nesting

def test_deep_nesting_in_fields(shared, subtests):
    """Deep ones pass or are refused; JSON readers and writers do not agree on how deep is too deep."""
    for depth in [100, 250, 253, 254, 255, 500, 990, 1022, 1024, 1100, 5000, 200_000]:
        shared.engine.reset()
        with subtests.test(depth):
            parameters = b'{"a":' * depth + b"1" + b"}" * depth
            tool = b'[{"type": "function", "function": {"name": "f", "parameters": %b}}]' % parameters
            for name, value in (("metadata", lists(depth)), ("tools", tool), ("chat_template_kwargs", parameters),
                                ("response_format", b'{"type": "json_object", "a": %b}' % parameters), ("model", lists(depth)), ("stop", lists(depth))):
                answer = shared.client().post(CHAT, with_field(name, value))
                if answer.status != 200:
                    refused(answer, 400, code="invalid_request")
            assert depth > 250 or len(shared.engine.requests) == 5      # all but the model
            answer = shared.client().post(CHAT, with_field("odd", b'%b, "seed": 18446744073709551616' % lists(depth)))
            if answer.status != 200:                        # read by another reader, for the seed
                refused(answer, 400, code="invalid_request")


NESTED = [
    b'[{"role": "user", "content": %b}]', b'[{"role": %b}]', b"[%b]", b'[{"role": "user", "content": [{"type": %b}]}]',
    b'[{"role": "user", "content": "x", "odd": %b}]', b'[{"role": "assistant", "tool_calls": %b}]',
    b'[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %b}}]}]',
    b'[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": %b}}}]}]',
    b'[{"role": "assistant", "content": "x", "reasoning": %b}]',
]


def test_deep_nesting_in_messages(shared, subtests):
    for depth in [250, 300, 1000, 1100, 100_000]:
        for where in NESTED:
            with subtests.test(repr(where), depth=depth):
                answer = shared.client().post(CHAT, b'{"messages": %b}' % (where % lists(depth)))
                if answer.status != 200:
                    refused(answer, 400, code="invalid_request")


ARGUMENTS = ["[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, '{"a": NaN}', '{"a": "\\ud83d"}', '{"a": 1}{',
             "😀", "\x00", "NaN", "1e999"]


def test_hostile_tool_arguments_in_history(shared, subtests):
    """They are texts, so they are mended or sent on; they must not break the gateway."""
    for arguments in ARGUMENTS:
        with subtests.test(ascii(arguments[:12])):
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
            answer = shared.client().post(CHAT, {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]})
            assert answer.status == 200


# ---- histories, which come again with each request

ODD = [None, 5, "a", [], {}, {"type": None}, {"type": "x\r\nset-cookie: y"}, {"type": "é" * 100}, {"type": "text", "text": None},
       {"type": "image_url", "image_url": {"url": "data:,x"}}, {"type": "input_image", "image_url": "data:image/png;base64,@@"},
       {"type": "image", "source": {"type": "url", "url": "data:,x"}}, {"type": "tool_use"}, {"type": "tool_result"}, {"type": "thinking"},
       {"type": "function_call"}, {"type": "refusal"}, {"type": "file"}, {"type": "input_audio"}, {"type": "document"}]
CALLED = [{}, None, {"id": None, "function": {"name": "f", "arguments": "{"}}, {"type": "custom", "custom": {}}]
PAST = [*ODD, *({"role": role, "content": content} for role in ("user", "assistant", "system", "developer", "critic", None)
                for content in (ODD, None, 5, {}, [])),
        {"role": "assistant", "content": None, "tool_calls": CALLED, "function_call": 5, "audio": 5, "reasoning": [5]},
        {"role": "tool", "content": ODD}, {"role": "function", "content": None, "name": 5}]
ASKED = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("path, name, own", [
    (CHAT, "messages", []), ("/v1/messages", "messages", [{"role": "user", "content": ODD}]),
    ("/v1/messages/count_tokens", "messages", []),
    ("/v1/responses", "input", [{"type": kind, "call_id": "A", "name": "f", "content": odd, "output": odd, "tools": odd, "summary": odd, "arguments": odd}
                                for kind in ("reasoning", "function_call", "function_call_output", "custom_tool_call", "agent_message",
                                             "local_shell_call", "additional_tools", "tool_search_output", "shell_call_output", "x")
                                for odd in (ODD, None, 5, "a", {})])])
def test_no_history_ends_a_session(shared, path, name, own):
    past = [*PAST, *own] if name == "messages" else [*(one for one in PAST if one is not None), *own]
    said = []
    for stream in (False, True):
        answer = shared.client().post(path, {"model": "claude-x", "max_tokens": 9, "stream": stream, name: [*past, *ASKED]})
        assert answer.status == 200, answer.read_all()
        assert (b"there" in answer.read_all()) != path.endswith("count_tokens")
        said.append(answer.headers["x-sparks-ignored"])
    assert said[0] == said[1] and said[0].isascii() and said[0].isprintable() and " and " in said[0] and len(said[0]) < 1100


# ---- wrong types

NO_PARTS = [None, 1, [], {}, {"type": 1}, {"type": ["text"]}, {"type": MARK}, {"type": "text"},
            {"type": "text", "text": [MARK]}, {"type": "image_url"},
            {"type": "image_url", "image_url": 1}, {"type": "image_url", "image_url": []},
            {"type": "image_url", "image_url": {"url": None}},
            {"type": "image_url", "image_url": {"url": ["data:"]}}, {"type": "input_image", "input_image": {}}]
WRONG_VALUES = {                                    # field -> values of the wrong type
    "messages": [None, {}, MARK, [], [None], [1], [MARK], [[]], [{}],
                 *([{"role": role, "content": "x"}] for role in (None, 1, ["user"], {}, MARK)),
                 *([{"role": "user", "content": content}] for content in (1, True, {})),
                 *([{"role": "user", "content": [part]}] for part in NO_PARTS)],
    "model": [1, True, [], {}],
    "stream": [1, "true", []],
    "stream_options": [1, [], True, "x"],
    "tools": [1, {}, MARK, [1], [None], [[]], [{}], [{"type": 1}], [{"type": {}}], [{"type": MARK}],
              [{"type": "function", "function": 1}], [{"type": "function", "function": {}}],
              [{"type": "function", "function": {"name": []}}], [{"type": "function", "name": 1}]],
    "max_tokens": ["5", 0, -1, 1.5, True, [], 2 ** 70],
    "max_completion_tokens": [{}, 0],
    "reasoning_effort": [1, [], {}, MARK],
    "reasoning": [1, "high", [], True],
    "think": [1, "yes", {}],
    "chat_template_kwargs": [1, [], "x"],
}
WRONG = [*(({name: value}, name) for name, values in WRONG_VALUES.items() for value in values),
         ({"reasoning": {"effort": 1}}, "reasoning.effort"), ({"reasoning": {"effort": {}}}, "reasoning.effort"),
         ({"stream": True, "stream_options": 1}, "stream_options"),
         ({"stream": False, "stream_options": {}}, "stream_options"),
         ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
         ({"stream": True, "stream_options": {"include_usage": []}}, "stream_options.include_usage")]


def test_wrong_types(shared, subtests):
    for fields, param in WRONG:
        shared.engine.reset()
        with subtests.test(str(fields)[:60]):
            answer = shared.client().post(CHAT, {"messages": MESSAGES, **fields})
            error = refused(answer, 400, code="invalid_request", param=param)
            assert error["type"] == "invalid_request_error"
            assert shared.engine.requests == []


FIELDS = ["model", "stream", "stream_options", "tools", "tool_choice", "max_tokens", "max_completion_tokens",
          "reasoning_effort", "reasoning", "think", "chat_template_kwargs", "n", "repeat_penalty", "repetition_penalty",
          "stop", "user", "functions"]


def test_null_counts_as_absent(shared, subtests):
    for name in FIELDS:
        for stream in [True, False]:
            with subtests.test(name, stream=stream):
                body = {"messages": MESSAGES, "stream": stream, name: None}
                answer = shared.client().post(CHAT, body)
                assert answer.status == 200 and answer.read_all()


WORDS = some.sampled_from(["", MARK, "user", "assistant", "text", "image_url", "function", "high", "data:,"])
NAMES = some.sampled_from(["role", "content", "type", "text", "image_url", "url", "detail", "tool_calls", "function",
                           "name", "arguments", "reasoning", "effort", "include_usage", "enable_thinking", "id"])
FLOATS = some.floats(allow_nan=False, allow_infinity=False)
LEAVES = some.none() | some.booleans() | some.integers(-2, 3) | FLOATS | WORDS
JSON = some.recursive(LEAVES, lambda inner: some.lists(inner, max_size=3) | some.dictionaries(NAMES, inner, max_size=4),
                      max_leaves=12)
MESSAGE = some.fixed_dictionaries({}, optional={
    "role": some.sampled_from(["user", "assistant", "tool", "developer"]), "content": JSON, "tool_calls": JSON,
    "reasoning": JSON, "reasoning_content": JSON, "name": JSON})
ASKS = some.fixed_dictionaries({"messages": JSON | some.lists(MESSAGE | JSON, min_size=1, max_size=3)},
                               optional=dict.fromkeys(FIELDS, JSON))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(body=ASKS)
def test_any_json(shared, body):
    answer = shared.client().post(CHAT, body)
    if answer.status == 200:
        assert answer.read_all()
    else:
        refused(answer)


# ---- encodings

ENCODINGS = ["gzip", "GZIP", "deflate", "br", "zstd", "gzip, gzip", "identity, gzip",
             "\udcff"]


def test_encoded_bodies(shared, subtests):
    for encoding in ENCODINGS:
        shared.engine.reset()
        with subtests.test(ascii(encoding)):
            for body in ({"messages": MESSAGES}, b"\x1f\x8b\x08\x00" + bytes(20)):
                refused(shared.client().post(CHAT, body, {"content-encoding": encoding}), 415, code="unsupported_encoding")
            assert shared.engine.requests == []


def test_encoding_that_is_none(shared, subtests):
    for encoding in ["", "identity", "Identity"]:
        with subtests.test(encoding):
            assert shared.client().post(CHAT, {"messages": MESSAGES}, {"content-encoding": encoding}).status == 200


# ---- bodies that stop, or are too large

def head(connection, **headers):
    connection.send_head("POST", CHAT, {name.replace("_", "-"): value for name, value in headers.items()})


STOPPED = [                                         # heads, and what comes of their bodies
    ({"content_length": 100}, b""), ({"content_length": 100}, b'{"mess'), ({"content_length": 1_000_000}, b"{"),
    ({"transfer_encoding": "chunked"}, b""), ({"transfer_encoding": "chunked"}, b"5\r\n{"),
    ({"transfer_encoding": "chunked"}, b"2\r\n{}\r\n"), ({"transfer_encoding": "chunked"}, b"2\r\n{}\r\n0\r\n"),
    ({"transfer_encoding": "chunked"}, b"f" * 3), ({"transfer_encoding": "chunked"}, b"2;a=b"),
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
            assert answer.headers["connection"] == "close"      # RFC 9110, 15.5.9; its rest is no request
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


def test_length_beyond_the_limit_is_refused_unread(small, subtests):
    for length in [1536 * 1024 + 1, 200 * MB, 10 ** 15, 2 ** 63, 10 ** 30]:
        with subtests.test(length), small.client(timeout=5).open() as connection:
            head(connection, content_length=length)
            began = time.monotonic()
            answer = connection.answer()
            refused(answer, 413, code="request_too_large")
            assert time.monotonic() - began < 4 and answer.headers["connection"] == "close"
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


SIZES = [                                           # what is sent of a body, and what it gets before any more comes
    (b"f" * 17, 400), (b"0" * 16 + b"1\r\n", 400), (b"f" * 8000, 400), (b"2\r\n{}\r\n" + b"1" * 17 + b"\r\n", 400),
    (b"f" * 16 + b"\r\n", 413), (b"ffffffff\r\n", 413), (b"180001\r\n", 413), (b"180001;x=y\r\n", 413),
    (b"2\r\n{}\r\n17ffff\r\n", 413), (b"g\r\n", 400), (b"-1\r\n", 400), (b"0x5\r\n", 400), (b" 5\r\n", 400), (b"\r\n", 400),
    (b"5\n", 400), (b"5;a=b\n", 400), (b"2\r\n{}\r\n0\n\n", 400), (b"5 \n", 400), (b"5\rx", 400), (b"5 5", 400),     # RFC 9112, 2.2
    (b"z", 400), (b";a", 400), (b"0x", 400), (b"5;" + b"a" * 20_000, 400), (b"5" + b" " * 20_000, 400),
]


@pytest.mark.parametrize("sent, status", SIZES, ids=lambda value: repr(value)[:24])
def test_sizes_of_chunks_are_judged_at_their_line(small, sent, status):
    with small.client(timeout=0.9).open() as connection:
        head(connection, transfer_encoding="chunked")
        connection.send(sent)
        refused(connection.answer(), status)
        assert connection.ended(5)


@pytest.mark.parametrize("digits", [b"2", b"02", b"0000000000000002"])
def test_sizes_of_chunks_in_pieces(small, digits):
    body = json.dumps({"messages": MESSAGES}).encode()
    with small.client().open() as connection:
        head(connection, transfer_encoding="chunked")
        for part in (body[:2], body[2:]):
            size = b"%0*x" % (len(digits), len(part))
            for byte in size:
                connection.send(bytes([byte]))
                time.sleep(0.002)
            connection.send(b"\r\n%b\r\n" % part)
        connection.send(b"0\r\n\r\n")
        assert connection.answer().status == 200


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


def begun(client, size, rest=1, sent=None):
    """A body on its way: (connection, its rest), once all of it but `rest` bytes was sent, or so many bytes as `sent` says."""
    connection, body = client.open(), json.dumps({"messages": MESSAGES, "user": "x" * size}).encode()
    head(connection, content_length=len(body), expect="100-continue")
    assert connection.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
    at = len(body) - rest if sent is None else sent
    connection.send(body[:at])
    return connection, body[at:]


def test_too_many_bodies_at_once(small, shared):
    """Two bodies of 1.4 MB are on their way; a third one does not fit into a key's half of the 8 MB, and it is the one that goes."""
    client, size = small.client(), 1400 * 1024
    held = [begun(client, size) for _ in range(2)]
    for chunked in (False, True):
        body = json.dumps({"messages": MESSAGES, "user": "x" * size}).encode()
        answer = client.post(CHAT, body, chunked=chunked)
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["type"]) == (503, "overloaded", "api_error")
        assert answer.headers["retry-after"].isdigit()
    works(client)                                               # a small one still fits
    for connection, rest in held:
        connection.send(rest)
        assert connection.answer().status == 200
    assert client.post(CHAT, body).status == 200


def test_bodies_that_may_be_sent_again_are_bodies(small, shared):
    """Their connections may be stale, so they are held until the engine answers; each key has half of the 8 MB."""
    client, large = small.client(), {"messages": MESSAGES, "user": "x" * (1400 * 1024)}
    shared.engine.always(lambda request: [Pause(0.3), Json(completion())])
    used = [client.open() for _ in range(3)]
    for connection in used:
        connection.start("POST", CHAT, {"messages": MESSAGES})
    for connection in used:
        assert connection.answer().read_all()
    shared.engine.always(lambda request: [Hang()])
    for number, connection in enumerate(used[:2]):
        connection.start("POST", CHAT, large)
        shared.engine.wait_for(4 + number)
        time.sleep(0.1)
    assert used[2].post(CHAT, large).json()["error"]["code"] == "overloaded"
    for connection in used:
        connection.close()
    shared.engine.always(lambda request: [Json(completion())])
    end = time.monotonic() + 3
    while client.post(CHAT, large).status != 200:
        assert time.monotonic() < end


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


def longest_gap(shared, body, **framing):
    """Take in a body while another client's stream flows: the longest time between two of its tokens, in seconds.
    framing: header fields, where the body's bytes are chunks."""
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
            head(connection, **(framing or {"content_length": len(body)}))
            connection.send(body)
            assert connection.answer().status == 200
    finally:
        done.set()
        reader.join(30)
    return max(b - a for a, b in itertools.pairwise(moments))


def test_100_mb_pass_and_streams_flow_on(shared):
    """The largest body that is allowed. A busy machine gets three tries."""
    start, rest = b'{"messages": [{"role": "user", "content": "', b'"}]}'
    body = start + b"x" * (100 * MB - len(start) - len(rest)) + rest
    assert any(longest_gap(shared, body) < 1 for _ in range(3))
    assert len(shared.engine.requests[-1].body) > 100 * MB - 1000


@pytest.mark.parametrize("extension", [b"", b";a=" + b"b" * 4000], ids=["bare", "extended"])
def test_tiny_chunks_hold_up_nobody(shared, extension):
    """They cost more to read than they weigh."""
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 2 * MB}]}).encode()
    tiny = 10_000 if extension else 250_000
    chunks = [b"1%b\r\n%c\r\n" % (extension, byte) for byte in body[:tiny]]
    chunks.append(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body) - tiny, body[tiny:]))
    assert any(longest_gap(shared, b"".join(chunks), transfer_encoding="chunked") < 0.3 for _ in range(5))
    assert json.loads(shared.engine.requests[-1].body)["messages"] == json.loads(body)["messages"]


def test_one_byte_over_100_mb(shared):
    with shared.client(timeout=5).open() as connection:
        head(connection, content_length=100 * MB + 1)
        assert "100 MB" in refused(connection.answer(), 413, code="request_too_large")["message"]


def test_a_body_is_taken_in_beside_a_flood(shared):
    """A stream that keeps the loop busy must not starve it."""
    stop = threading.Event()
    flood = [Send(chat_chunks("a b")[1])]

    def steps(request):
        if request.json().get("stream"):
            yield Head()
            while not stop.is_set():
                yield from flood
        else:
            yield Json(completion("ok"))
    shared.engine.always(steps)
    stream = shared.client().post(CHAT, {"messages": MESSAGES, "stream": True})
    reader = threading.Thread(target=drained, args=(stream,), daemon=True)
    reader.start()
    began = time.monotonic()
    try:
        assert shared.client().post(CHAT, {"messages": MESSAGES, "user": "x" * 6_000_000}).status == 200
        assert time.monotonic() - began < 8
    finally:
        stop.set()
        reader.join(10)
        stream.close()


def drained(answer):
    """Read an answer to whatever end it has."""
    try:
        for _ in answer.pieces():
            pass
    except OSError:
        pass


def test_bodies_that_never_come_lock_nobody_out(small, shared):
    """What counts is what has come: twelve that announce 1.4 MB each, and send a byte of it."""
    size = 1400 * 1024
    held = [begun(small.client(), size, sent=1) for _ in range(12)]
    for _ in range(3):
        assert small.client().post(CHAT, {"messages": MESSAGES, "user": "x" * size}).status == 200
    for connection, _ in held:
        connection.close()


def test_who_gives_way_where_there_is_no_room(gateway, engine):
    """The newest body of the key that holds the most; one that has little is let in, and what was there first comes to its end."""
    front = gateway(max_body="2 MB", max_bodies="6 MB", heavy_prompt=0)
    one, two, three = (front.client(front.add_key(name)) for name in ("one", "two", "three"))
    held = [begun(client, 1_400_000) for client in (one, one, two, two)]           # 5.6 of 6.3 million bytes
    assert three.post(CHAT, {"messages": MESSAGES, "user": "x" * 1_400_000}).status == 200
    refused_ones = []
    for connection, rest in held:
        try:
            connection.send(rest)
            answer = connection.answer()
            refused_ones.append(answer.status == 503)
        except OSError:
            refused_ones.append(True)
    assert refused_ones in ([False, True, False, False], [False, False, False, True])


def arguments(text):
    return {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": text}}]}, *MESSAGES]}


def of_many(*values):
    """Messages whose content is as many parts as fit, or a field that nobody knows, of these values (bytes)."""
    for value, many in values:
        parts = b"[" + (value + b",") * many + value + b"]"
        yield b'{"messages":[{"role":"user","content":%b}]}' % parts
        yield b'{"messages":[{"role":"user","content":"a"}],"x":%b}' % parts


TOOL = {"type": "function", "function": {"name": "f", "description": "d" * 300, "parameters": {
    "type": "object", "properties": {f"p{number}": {"type": "string", "description": "d" * 20} for number in range(10)}}}}
# path or None for a chat's, body, what the refusal says; None: it is accepted
LARGE = {
    "lists": (None, b"[" + b"[]," * 1_200_000 + b"1]", "300,000 objects and lists"),
    "messages": (None, b'{"messages":[' + b'{"role":"user","content":""},' * 1_100_000 + b"1]}", "600,000 texts"),
    **{f"many {number}": (None, body, told) for number, (body, told) in enumerate(zip(
        of_many((b"{}", 700_000), (b'"\\n"', 2_000_000), (b"1", 4_000_000)),
        ["300,000 objects"] * 2 + ["600,000 texts"] * 2 + ["1,500,000 texts, numbers"] * 2, strict=True))},
    "arguments of lists": (None, arguments("[" + "[]," * 400_000 + "1]"), "a tool call hold over 300,000 objects"),
    "arguments of text": (None, arguments("x" * 5_000_000), "4 MB"),
    "token ids": ("/v1/completions", {"prompt": list(range(100_000)) * 10}, None),
    "real tools and messages": (None, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello " * 20}]}] * 10_000,
                                       "tools": [TOOL] * 2000}, None),
    "allowed tools": ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": f"n{n}"} for n in range(8000)], "tool_choice": {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": f"n{n}"} for n in range(8000)]}}, None),
    "many parts": (None, next(of_many((b'"a"', 290_000))), None),
    "encrypted": ("/v1/responses", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "A" * 4_000_000},
                                              {"role": "user", "content": "a"}]}, None),
    "emoji": (None, {"messages": [{"role": "user", "content": "😀" * 2_000_000}]}, None),
}


@pytest.mark.parametrize("path, body, told", LARGE.values(), ids=LARGE)
def test_a_body_of_a_million_values_does_not_hold_the_loop(shared, path, body, told):
    answered = text_completion("Hello") if path == "/v1/completions" else completion()
    shared.engine.always(lambda request: [Json(answered)])
    gaps, stop = [], threading.Event()

    def watch():
        client = shared.client(key=False)
        while not stop.is_set():
            began = time.monotonic()
            client.get("/healthz").read_all()
            gaps.append(time.monotonic() - began)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        answer = shared.client(timeout=60).post(path or CHAT, body)
        assert answer.status in ((400, 413) if told else (200,))
        assert not told or told in answer.json()["error"]["message"]
    finally:
        stop.set()
        thread.join(10)
    assert max(gaps) < 5                                # the run of a loop itself is judged by its CPU, by the fixture


def test_a_client_leaves_while_its_body_is_read(gateway):
    """Its thread ends what it does, and until then place and body count; then both are free again."""
    front = gateway(max_body="1 MB", max_bodies="1 MB")
    body = b'{"messages":[{"role":"user","content":[' + b'"a",' * 60_000 + b'"a"]}]}'
    other = front.client(front.add_key("other"), timeout=30)
    for _ in range(2):
        with front.client().open() as connection:
            head(connection, content_length=len(body))
            connection.send(body)
    assert other.post(CHAT, body).status == 200
    wait_until(lambda: [front.client(timeout=30).post(CHAT, body).status for _ in range(2)] == [200] * 2, 20)


# ---- clients that leave

@pytest.mark.parametrize("leave", ["close", "reset", "half_close"])
@pytest.mark.parametrize("headers, begun", [
    ({"content_length": 1000}, b'{"messages'), ({"content_length": 50 * MB}, b"x" * MB), ({"content_length": 10}, b""),
    ({"transfer_encoding": "chunked"}, b"5\r\n{"),
], ids=["some", "much", "none", "chunk"])
def test_client_leaves_in_its_body(shared, headers, begun, leave):
    before = shared.gateway.log.count("status=499")
    connection = shared.client(timeout=5).open()
    head(connection, **headers)
    connection.send(begun)
    getattr(connection, leave)()
    if leave == "half_close":
        assert connection.ended(5)
        connection.close()
    end = time.monotonic() + 3
    while shared.gateway.log.count("status=499") == before and time.monotonic() < end:
        time.sleep(0.01)
    assert shared.gateway.log.count("status=499") == before + 1
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
    "garbage": b"\x00\x01\x02\x03\r\n\r\n", "words": MARK.encode() + b"\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/0.9": b"GET /help\r\n\r\n", "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "blank lines": b"\r\n" * 3,
    "bare LF": b"GET /help HTTP/1.1\nHost: x\n\n", "bare LF in head": b"GET /help HTTP/1.1\r\nHost: x\nX: y\r\n\r\n",
    **{line: plain(line) for line in (
        "GET / HTTP/3.7", "GET / HTTP/1.x", "GET / HTTPS/1.1", "GET  HTTP/1.1", "GET  / HTTP/1.1", "GET\t/\tHTTP/1.1",
        "GET /a b HTTP/1.1", "GET /\udcff HTTP/1.1", "GET /\x00 HTTP/1.1", "get / HTTP/1.1", "G<T / HTTP/1.1",
        "A" * 30 + " / HTTP/1.1", "GET /" + "a" * 9000 + " HTTP/1.1")},
    **{line: plain("GET / HTTP/1.1", line) for line in (
        "X: " + "a" * 20000, MARK, ": x", "Host : x", "X: a\x00b", "X: a\rb", "X\udcff: a", "X: a\r\n folded",
        "Host: a\r\nHost: b")},
    "many headers": plain("GET / HTTP/1.1", *["X: y"] * 500),
}


def test_broken_http(shared, subtests):
    for name in BROKEN:
        with subtests.test(ascii(name)[:30]):
            (status, body), = said(shared, BROKEN[name])
            assert 400 <= status < 500
            assert set(json.loads(body)["error"]) == {"message", "type", "code", "param"} and MARK not in body.decode()


HOSTS = ["", " ", "me@a", "me:pw@a", "a/b", "a/", "http://a", "a,b", "a, b", "a b", "a;b", "a?b", "a#b", "a\\b", "a:b", "a:80:80", "a:-1", ":80",
         "a..b", ".a", ".", "a.b..", "a" * 64, "a" * 64 + ".net", ".".join(["a" * 60] * 5), "a%2e", "a+b", "*", "a:\uff11", "\u00e4.net",
         "[1]", "[:::]", "[12345::]", "[1:2:3:4:5:6:7:8:9]", "[::1.2.3.4.5]", "[fe80::1%lo]", "[fe80::1%25lo]", "[v1.fe]", "[[::1]]", "[::1]:65536",
         "a:65536", "a:999999", "[::1", "::1", "[::1]a", "<script>alert(1)</script>", '"a"', "a%00", "\udce9", "a" * 4000, "[]", "@", "/", "a\tb"]


@pytest.mark.parametrize("target", ["/help", "/v1/models", "/nothing", "http://x/help"])
def test_hosts_that_are_none(shared, subtests, target):
    for host in HOSTS:
        with subtests.test(ascii(host)[:30]):
            for version in ("1.1", "1.0", "1.2"):
                (status, body), = said(shared, plain(f"GET {target} HTTP/{version}", f"Host: {host}"))
                assert status == 400 and "Host header" in json.loads(body)["error"]["message"]
                assert b"<script" not in body
    (status, _), = said(shared, plain(f"GET {target} HTTP/1.1"))
    assert status == 400                                # RFC 9112, 3.2
    assert said(shared, plain("GET /healthz HTTP/1.0"))[0][0] == 200


FINE_HOSTS = ["a", "a:80", "a.b-c_d.example.", "127.0.0.1:8080", "[::1]", "[::ffff:127.0.0.1]:65535", "a:", "a" * 63 + ".net", "A.Net:0443",
              "gateway_1:8080", "_", "a~b", "xn--4ca.net", "[::]:", "[1:2:3:4:5:6:1.2.3.4]:8080"]


@pytest.mark.parametrize("host", FINE_HOSTS)
def test_hosts_that_are_fine(shared, host):
    """They are in the addresses that /help shows."""
    answer = shared.client().get("/help?format=json", {"host": host})
    assert answer.status == 200 and answer.version == "HTTP/1.1"
    assert answer.json()["base_url"] == f"http://{host.removesuffix(':')}/v1"
    assert shared.client().post(CHAT, {"messages": MESSAGES}, {"host": host}).status == 200


def test_a_whole_address_goes_before_the_header(shared):
    """RFC 9112, 3.2.2."""
    for version in ("1.1", "1.0"):
        (status, body), = said(shared, plain(f"GET http://b_c:99/help?format=json HTTP/{version}", "Host: a"))
        assert status == 200 and json.loads(body)["base_url"] == "http://b_c:99/v1"
        for target in ("http://me@b/help", "http:///help", "http://b:65536/help", "http://b,c/help", "http://b%20/help"):
            (status, body), = said(shared, plain(f"GET {target} HTTP/{version}", "Host: a"))
            assert status == 400 and "Host header" in json.loads(body)["error"]["message"]


UNREAD = [                                          # what never becomes a request, and what its refusal names
    ("GET /" + "a" * 9000 + " HTTP/1.1", 414, "its first line is too long"), ("GET /help", 400, "a method, an address and a version"),
    ("get /help HTTP/1.1", 400, "its method"), ("GET /help HTTP/1.1\r\nX: " + "a" * 20_000, 431, "too many or too long"),
    ("GET /help HTTP/1.1\r\nHost: a\r\nHost: b", 400, "came twice"), ("GET /help HTTP/1.1\r\nX y: a", 400, "the name of a header"),
    ("GET /help HTTP/1.1\r\nX: a\r\n b", 400, "several lines"), ("GET /help HTTP/1.1\r\nExpect: x", 417, "100-continue"),
    ("GET /help HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: x", 400, "Transfer-Encoding"),
]


@pytest.mark.parametrize("head, status, words", UNREAD, ids=lambda value: str(value)[:30])
def test_what_is_no_request_is_told_why(shared, head, status, words):
    """In the shape of both makers, since nobody knows yet whose client it is."""
    (found, body), = said(shared, plain(head))
    body = json.loads(body)
    assert found == status and words in body["error"]["message"]
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and len(body["request_id"]) == 32


@pytest.mark.parametrize("coding", ["gzip, chunked", "deflate,chunked", "identity, chunked", "compress, gzip, chunked"])
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_codings_that_are_not_taken_off(shared, coding, path):
    with shared.client(timeout=5).open() as connection:
        connection.send_head("POST", path, {"transfer-encoding": coding})
        answer = connection.answer()
        assert answer.status == 415 and "Transfer-Encoding" in answer.json()["error"]["message"] and connection.ended(5)


@pytest.mark.parametrize("version, answered", [("1.0", "HTTP/1.0"), ("1.1", "HTTP/1.1"), ("1.2", "HTTP/1.1"), ("1.9", "HTTP/1.1")])
@pytest.mark.parametrize("path", ["/healthz", "/v1/models", "/nothing"])
def test_the_version_of_the_answer_is_ours(shared, path, version, answered):
    with shared.client().open() as connection:
        connection.send(shared.client().open().head("GET", path).replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1))
        answer = connection.answer("GET")
        assert answer.version == answered and answer.read_all()


def test_other_versions_are_named(shared):
    for version in ("0.9", "2.0", "2", "3.0", "9.9", "1.10", "01.1"):
        (status, body), = said(shared, plain(f"GET /help HTTP/{version}", "Host: x"))
        assert status == 400 and "HTTP/1.1 or HTTP/1.0" in json.loads(body)["error"]["message"]


def test_json_is_not_to_be_stored(shared):
    """Whatever it says, it is for the one who asked."""
    client = shared.client()
    answers = [client.get("/healthz"), client.get("/v1/models"), client.get("/v1/usage"), client.get("/nothing"), client.get(CHAT),
               client.get("/help?format=json"), shared.client(key=False).get("/v1/models"), client.post(CHAT, {"messages": MESSAGES}),
               client.post(CHAT, b"{"), client.post("/v1/messages", b"{"), client.post("/v1/responses", {"input": "a"}),
               client.get("/help", {"host": "a b"})]
    assert {answer.headers["content-type"].partition(";")[0] for answer in answers} == {"application/json"}
    assert {answer.headers["cache-control"] for answer in answers} == {"no-store"}


def test_rest_of_broken_http_is_read(shared):
    """Closing with bytes unread would reset the connection and take the answer away."""
    with shared.client(key=False, timeout=8).open() as connection:
        connection.send(b"GET / HTTP/9.9\r\n" + b"x" * (2 * MB))
        refused(connection.answer(), 400)


LENGTHS = ["5, 5", "+5", "-5", "0x5", "5.0", "five", "", "9" * 5000, "\udcb2", "1_0", "5 5"]
CODINGS = ["chunked, chunked", "identity", "chunked, identity", "gzip", "chunked, gzip", "xchunked", '"chunked"',
           "\x0bchunked", "", ",", "chunked;a"]
SMUGGLED = {                                        # doubtful framing: the lines that a head says about its body
    "length and chunked": ["Content-Length: 5", "Transfer-Encoding: chunked"],
    "chunked and length": ["Transfer-Encoding: chunked", "Content-Length: 5"],
    "two lengths": ["Content-Length: 5", "Content-Length: 6"],
    "one length twice": ["Content-Length: 5", "Content-Length: 5"],
    "chunked twice": ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
    "space before the colon": ["Transfer-Encoding : chunked"],
    "chunked in HTTP/1.0": None,
    **{f"length {ascii(value[:9])}": [f"Content-Length: {value}"] for value in LENGTHS},
    **{f"coding {ascii(value)}": [f"Transfer-Encoding: {value}"] for value in CODINGS},
}


def test_smuggling(shared, subtests):
    """Behind the request waits another one, which must not be seen."""
    for name in SMUGGLED:
        with subtests.test(name):
            lines = SMUGGLED[name]
            hidden = plain("GET /v1/models HTTP/1.1", "Host: x", f"Authorization: Bearer {shared.key}")
            version = "1.1" if lines else "1.0"
            data = plain(f"POST {CHAT} HTTP/{version}", "Host: x", *(lines or ["Transfer-Encoding: chunked"])) + b"0\r\n\r\n"
            answers = said(shared, data + hidden)
            assert len(answers) == 1, answers
            status, body = answers[0]
            assert 400 <= status < 500 and json.loads(body)["error"]["code"]
            assert shared.key not in shared.gateway.log


BROKEN_CHUNKS = [
    b"zz\r\n", b"-1\r\n", b"\r\n", b"\xff\r\n", MARK.encode() + b"\r\n", b"2\r\n{}\r\n",
    *(size + b"\r\n{}\r\n0\r\n\r\n" for size in (b"+2", b"0x2", b" 2", b"2 ", b"2;a=\x01", b"2;\rx")),
    *(b"0\r\n" + line + b"\r\n\r\n" for line in (b"Content-Length: 5", b"Transfer-Encoding: chunked", b"word", b": x")),
    b"0\r\nA: b\nC: d\r\n\r\n", b"2\r\n{}XX0\r\n\r\n", b"1" * 40_000, b"2;" + b"a" * 40_000,
    b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * 300 + b"\r\n",
]


def test_broken_chunks(shared, subtests):
    for body in BROKEN_CHUNKS:
        shared.engine.reset()
        with subtests.test(repr(body[:24])):
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


HEADERS = ["SCRIPT_NAME: /abc", "PATH_INFO: /healthz", "REMOTE_USER: root", "X_API_KEY: KEY",
           "HTTP_AUTHORIZATION: Bearer KEY"]


def test_headers_do_not_reach_the_servers_own_variables(shared, subtests):
    """WSGI servers hand paths and users on in names with an underscore; a client must not set them."""
    for header in HEADERS:
        with subtests.test(header):
            for path in ("/abc/v1/models", "/v1/models"):
                key = shared.key if path == "/abc/v1/models" else "none"
                lines = [f"GET {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", header.replace("KEY", shared.key)]
                (status, _), = said(shared, plain(*lines))
                assert status in ((404, 400) if path == "/abc/v1/models" else (401, 400))


MUTANTS = [plain("GET /v1/models HTTP/1.1", "Host: x"),
           plain(f"POST {CHAT} HTTP/1.1", "Host: x", "Content-Length: 2") + b"{}",
           plain(f"POST {CHAT} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"]


def test_mutated_http(shared):
    """Bytes flipped, cut, doubled and thrown in: an answer below 500, or none."""
    chance = random.Random(7)
    for _ in range(400):
        data = bytearray(chance.choice(MUTANTS))
        for _ in range(chance.randint(1, 3)):
            at, cut = chance.randrange(len(data)), chance.choice((0, 0, 1, 4))
            data[at:at + cut] = chance.choice((bytes([chance.randrange(256)]), b"", b"\r\n", b"\n", b" ", b":"))
        for status, body in said(shared, bytes(data)):
            assert status < 500 and (status < 400 or not body or json.loads(body)["error"]), bytes(data)


@pytest.mark.parametrize("version", ["1.2", "1.9"])
def test_other_http_1_versions(shared, version):
    shared.engine.play(*chat_chunks("Hi there", usage=True))
    connection, body = shared.client().open(), json.dumps({"messages": MESSAGES, "stream": True}).encode()
    connection.send(b"POST %b HTTP/%b\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
                    % (CHAT.encode(), version.encode(), shared.key.encode(), len(body), body))
    answer = connection.answer()
    if answer.status == 200:
        assert text_of(answer) == "Hi there"


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


METHODS = [
    ("PUT", "/v1/models"), ("DELETE", "/v1/models/x"), ("POST", "/v1/models"), ("GET", CHAT), ("HEAD", CHAT),
    ("DELETE", CHAT), ("POST", "/help"), ("POST", "/healthz"), ("TRACE", "/help"), ("BREW", "/help"),
    ("M-SEARCH", CHAT), ("POST", "/"),
]


def test_wrong_method(shared, subtests):
    for method, path in METHODS:
        with subtests.test(method, path=path):
            answer = shared.client().request(method, path)
            assert answer.status == 405
            allowed = {"GET", "HEAD"} if path != CHAT else {"POST"}
            assert allowed <= set(answer.headers["allow"].replace(" ", "").split(","))          # RFC 9110, 15.5.6
            if method != "HEAD":
                error = refused(answer, 405, code="method_not_allowed")
                assert error["type"] == "invalid_request_error"
                assert all(f"{route.method} {route.path}" in error["message"] for route in ROUTES)


def test_a_websocket_is_told_to_send_requests(shared):
    """At 426 Codex does so at once; it would try five times at 405."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    for path in ("/v1/responses", CHAT, "/v1/models"):
        answer = shared.client().get(path, upgrade)
        error = refused(answer, 426, code="upgrade_required")
        assert "POST" in error["message"] and answer.headers["upgrade"] == "HTTP/1.1"
    refused(shared.client().get("/v1/realtime", upgrade), 404)


@pytest.mark.parametrize("path", ["/help", "/healthz", "/v1/models", CHAT])
def test_options(shared, path):
    preflight = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    answer = shared.client().request("OPTIONS", path, headers=preflight)
    assert answer.status in (200, 204, 405) and answer.headers["allow"]
    assert "access-control-allow-origin" not in answer.headers


PATHS = [
    "/nothing", "/v1", "/v1/", "/v2/models", "/V1/models", "/v1/Models", "/v1/no/such/route", "/v1//models",
    "/v1/./models", "/v1/../help", "/help/../v1/models", "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc%2fpasswd",
    "/static/x", "/sparks.db", "/.git/config", "/%00", "/help%00", "/help%0a", "/%0d%0aX-Injected:%20yes", "/%ff%fe",
    "/%zz", "/%", "/a" * 1500, "/" + MARK, "/help;x", "/favicon.ico",
]


def test_unknown_path(shared, subtests):
    for path in PATHS:
        for key in [None, False]:
            with subtests.test(path[:40], key=key):
                for method in ("GET", "POST"):
                    answer = shared.client(key=key).request(method, path)
                    error = refused(answer, 404, code="not_found")
                    assert error["type"] == "not_found_error"
                    assert all(f"{route.method} {route.path}" in error["message"] for route in ROUTES)
                    assert "x-injected" not in answer.headers and len(error["message"]) < 1500


ODD_PATHS = [
    *((f"/v1/models/{name}", 404)
      for name in ("../x", "%2e%2e/x", "%00", "%0a", "%0d%0aX-Injected:%20yes", "%ff", "a//b", MARK, "a" * 4000)),
    ("/v1/models/" + "a" * 9000, 414), ("//v1/models", 200), ("/v1/models/", 200), ("/v1/models?" + "a=b&" * 500, 200),
    ("/v1/models?%00=%ff&a", 200), ("/v1/models#x", 200), ("http://x/v1/models", 200),
]


def test_odd_paths(shared, subtests):
    for path, status in ODD_PATHS:
        with subtests.test(path[:40]):
            answer = shared.client().get(path)
            assert answer.status == status and "x-injected" not in answer.headers
            if status != 200:
                error = refused(answer, status)
                assert error["code"] in ("model_not_found", "not_found", "invalid_request")
                assert len(error["message"]) < 1500 and "aaaa" * 100 not in error["message"]


def test_method_is_not_in_the_log(shared):
    """It is a client's word like any other."""
    shared.client().request(MARK, "/v1/models")
    shared.client().request("SK-SPARKS-" + MARK[:5], "/v1/models")
    assert MARK[:5] not in shared.gateway.log


def test_words_of_clients_stay_out_of_the_log(shared):
    """In every place where a client can say something."""
    client = shared.client()
    names = ("user-agent", "referer", "x-forwarded-for", "x-forwarded-proto", "cookie", "host", MARK)
    headers = dict.fromkeys(names, MARK)
    client.get(f"/{MARK}?{MARK}={MARK}", headers)
    client.get(f"/v1/models/{MARK}?{MARK}", headers)
    client.post(CHAT, {"messages": MESSAGES, "user": MARK, "metadata": {MARK: MARK}}, headers)
    client.post(CHAT, {"messages": MESSAGES, "stream": True}, headers).read_all()
    client.post(CHAT, {"messages": MESSAGES, "model": MARK}, headers)
    client.post(CHAT, MARK.encode(), headers)
    shared.client(key=MARK).get("/v1/models", headers)
    client.get("/healthz", {"x-request-id": f"{MARK} {MARK}"})
    client.get("/help", {"accept": MARK})
    assert MARK not in shared.gateway.log


DIALECTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens",
            "/v1/responses")


def test_slashes_too_many(shared, subtests):
    """As in the other routes."""
    for path in [f"{way}{end}" for way in DIALECTS for end in ("/", "//")] + [f"/{way}" for way in DIALECTS]:
        with subtests.test(path):
            answer = shared.client().post(path, {})
            assert answer.status == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_a_base_url_with_a_slash_too_many(shared, subtests):
    for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"):
        for form in ("{}/", "/{}", "/{}/"):
            with subtests.test(path, form=form):
                body = {"messages": MESSAGES, "max_tokens": 9, "prompt": "Hello", "input": "Hello"}
                wanted = {name: body[name] for name in {"/v1/responses": ["input"], "/v1/completions": ["prompt"]}.get(
                    path, ["messages", "max_tokens"])}
                answer = shared.client().post(form.format(path), wanted)
                assert answer.status == 200, answer.read_all()
                assert answer.json() and f'route="POST {path}"' in shared.gateway.log.splitlines()[-1]
