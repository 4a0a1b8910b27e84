"""The engine's side of HTTP/1.1: framing as tables at every cut, heads, connections over real sockets, TLS."""
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time

import gevent
import hypothesis
import pytest
from hypothesis import strategies as st

from engines import http1
from engines.http1 import BadAnswer, Chunked, Length, Off, Pool, Silent, UntilClose, framing_of
from errors import UpstreamError
from support.cuts import cuts, however_cut, pieces
from support.engine import Close, Early, End, Head, Json, Pause, Raw, ReadBody, Reset, Send, Wait

HEAD = b"HTTP/1.1 200 OK\r\n"


# ---- framing

def fed(framing, arrived):
    """(body, ended, surplus, whole at the end of the connection), or the class of what was raised."""
    try:
        body = b"".join(map(framing.feed, arrived))
    except Exception as error:
        return type(error)
    return body, framing.ended, framing.surplus, framing.eof()


def at_every_cut(make, data, expected):
    assert however_cut(data, lambda arrived: fed(make(), arrived)) == expected


EVENT = b"data: " + b"x" * 40 + b"\n\n"
END = b"0\r\n\r\n"


def chunks(*parts):
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


CHUNKS = [
    (END, b""),
    (chunks(b"a") + END, b"a"),
    (chunks(b"hello", b" ", b"world") + END, b"hello world"),
    (chunks(EVENT) + END, EVENT),
    (chunks(EVENT, EVENT) + END, EVENT * 2),
    (chunks(b"\r\n", b"\r\n0\r\n\r\n") + END, b"\r\n\r\n0\r\n\r\n"),
    (b"2C\r\n" + b"a" * 44 + b"\r\n" + END, b"a" * 44),
    (b"2c\r\n" + b"a" * 44 + b"\r\n" + END, b"a" * 44),
    (b"0002c\r\n" + b"a" * 44 + b"\r\n0000\r\n\r\n", b"a" * 44),
    (b"5;a=b\r\nhello\r\n" + END, b"hello"),
    (b"5;a=b;c=\"d\"\r\nhello\r\n0;last\r\n\r\n", b"hello"),
    (b"5 \r\nhello\r\n" + END + b"", b"hello"),
    (b"5 ; a\r\nhello\r\n0 \r\n\r\n", b"hello"),
    (b"2c;a=b\r\n" + b"a" * 44 + b"\r\n" + END, b"a" * 44),
    (chunks(b"hello") + b"0\r\nX-Took: 1\r\nX-More: a: b\r\n\r\n", b"hello"),
    (chunks(b"hello") + b"0\r\n5\r\n\r\n", b"hello"),
]


def test_chunked(subtests):
    for data, body in CHUNKS:
        with subtests.test(str(data[:60])):
            at_every_cut(Chunked, data, (body, True, False, True))


CUT_OFF = [b"", b"5", b"5\r", b"5\r\n", b"5\r\nhel", b"5\r\nhello", b"5\r\nhello\r",
           b"5\r\nhello\r\n",
           b"5\r\nhello\r\n0", b"5\r\nhello\r\n0\r\n", b"5\r\nhello\r\n0\r\n\r",
           b"0\r\nX: 1\r\n", b"fffffffff\r\nhello"]


def test_chunked_cut_off(subtests):
    for data in CUT_OFF:
        with subtests.test(str(data)):
            body = data.partition(b"\r\n")[2][:5]
            at_every_cut(Chunked, data, (body if b"hel" in data else b"", False, False, False))


BAD_SIZES = [b"\r\n", b"x\r\n", b"-5\r\nhello\r\n", b"+5\r\nhello\r\n", b"0x5\r\nhello\r\n" + END,
             b"5_0\r\nhello", b"5 5\r\nhello",
             b" \r\n", b";a\r\n", b"5.0\r\nhello\r\n", b"\xb2\r\nhello\r\n",
             b"3\r\nhello\r\n" + END, b"hello\r\n\r\n",
             b"HTTP/1.1 200 OK\r\n\r\n", b"5\r\nhello!\r\n" + END]


def test_chunked_with_a_bad_size(subtests):
    for data in BAD_SIZES:
        with subtests.test(str(data)):
            at_every_cut(Chunked, data, BadAnswer)


@pytest.mark.parametrize("body", [b"hello", EVENT])
def test_a_chunk_that_is_longer_than_its_size(body):
    """Its CRLF is not where it should be, so nothing after it can be trusted."""
    at_every_cut(Chunked, b"%x\r\n" % len(body) + body + b"XY" + END, BadAnswer)


@pytest.mark.parametrize("before", [b"", chunks(b"hello"), b"0\r\n"])
def test_a_line_that_does_not_end(before):
    at_every_cut(Chunked, before + b"1" * 70000, BadAnswer)


def test_a_trailer_that_does_not_end():
    at_every_cut(Chunked, b"0\r\n" + b"a: b\r\n" * 20000, BadAnswer)


def test_surplus():
    for extra in (b"x", b"HTTP/1.1 200 OK\r\n", b"\r\n"):
        at_every_cut(Chunked, chunks(b"hello") + END + extra, (b"hello", True, True, True))
        at_every_cut(lambda: Length(5), b"hello" + extra, (b"hello", True, True, True))


def test_feeding_nothing_changes_nothing():
    for framing in (Chunked(), Length(5), UntilClose()):
        assert framing.feed(b"") == b"" and not framing.ended and not framing.surplus
    chunked = Chunked()
    assert chunked.feed(chunks(b"hello") + b"0\r") == b"hello"
    assert chunked.feed(b"") == b"" and chunked.feed(b"\n\r\n") == b"" and chunked.ended and not chunked.surplus
    assert chunked.feed(b"") == b"" and not chunked.surplus


def test_length():
    at_every_cut(lambda: Length(0), b"", (b"", True, False, True))
    at_every_cut(lambda: Length(5), b"hello", (b"hello", True, False, True))
    at_every_cut(lambda: Length(5), b"hell", (b"hell", False, False, False))
    at_every_cut(lambda: Length(5), b"", (b"", False, False, False))


def test_until_close():
    for data in (b"", b"hello", chunks(b"hello") + END):
        at_every_cut(UntilClose, data, (data, False, False, True))
    framing = UntilClose()
    framing.eof()
    assert framing.ended


@hypothesis.given(st.lists(st.binary(min_size=1, max_size=100), max_size=5), st.data(),
                  st.sampled_from([b"", b";a=b", b" "]), st.sampled_from([b"", b"X-Took: 1\r\n"]))
def test_any_chunks_at_any_cuts(parts, data, extension, trailer):
    sent = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts) + b"0\r\n" + trailer + b"\r\n"
    assert fed(Chunked(), pieces(sent, data.draw(cuts(sent)))) == (b"".join(parts), True, False, True)


@hypothesis.given(st.binary(max_size=40) | st.text("0123456789abcdefABCDEFx;= \r\n", max_size=40).map(str.encode),
                  st.data())
def test_no_bytes_break_the_chunked_coding(sent, data):
    """They are a body or a BadAnswer, and the cuts don't decide which."""
    whole = fed(Chunked(), [sent])
    assert whole is BadAnswer or len(whole) == 4
    assert fed(Chunked(), pieces(sent, data.draw(cuts(sent)))) == whole


FRAMINGS = [
    ({"transfer-encoding": "chunked"}, Chunked),
    ({"transfer-encoding": "Chunked"}, Chunked),
    ({"transfer-encoding": "chunked", "content-length": "5"}, Chunked),
    ({"content-length": "5"}, Length),
    ({"content-length": "0"}, Length),
    ({}, UntilClose),
]


def test_framing_of():
    assert [(headers, type(framing_of(headers))) for headers, _ in FRAMINGS] == FRAMINGS


def test_a_length_that_is_none_is_no_fault_of_ours(subtests):
    """RFC 9112, 6.3: unrecoverable. It must not count as a length, nor raise what is no Refusal."""
    for length in ["-5", "+5", "5x", "", "5, 6", "\u00b2", "1_0", "0x5", "9" * 5000]:
        with subtests.test(length[:20]), contextlib.suppress(UpstreamError):
            assert not isinstance(framing_of({"content-length": length}), Length)


# ---- the head

def answered(engine, *steps, pool=None):
    """The Answer to a POST that the engine plays these steps for."""
    engine.play(*steps)
    pool = pool or Pool(engine.url)
    return pool.post("/v1/x", [b"{}"], {})


def raw(data):
    """A whole answer in bytes, after which the connection is closed."""
    return Raw(data), Close()


@pytest.fixture
def pool(engine):
    pool = Pool(engine.url)
    yield pool
    for connection in pool.idle:
        connection.close()


def test_the_request(engine):
    pool = Pool(engine.url + "/prefix/")
    engine.play(Json({"a": 1}))
    answer = pool.post("/v1/x", ['{"é":1}'.encode()], {"Authorization": "Bearer abc", "X-Request-Id": "id-1"})
    assert answer.all(5, 1000) == b'{"a":1}'
    answer.close(whole=True)
    request = engine.requests[0]
    assert (request.method, request.path, request.body) == ("POST", "/prefix/v1/x", '{"é":1}'.encode())
    assert dict(request.headers) == {"Host": f"127.0.0.1:{engine.port}", "Content-Type": "application/json",
                                     "Accept-Encoding": "identity",
                                     "Content-Length": "8", "Authorization": "Bearer abc", "X-Request-Id": "id-1"}
    pool.idle.pop().close()


def test_a_large_request(engine, pool):
    body = b'"' + b"x" * (3 << 20) + b'"'
    engine.play(Json({}))
    answer = pool.post("/v1/x", [body], {})
    assert answer.all(5, 1000) == b"{}" and engine.requests[0].body == body
    answer.close()


def test_the_head(engine):
    lines = b"Content-Type:text/plain\r\nX-Odd :  a: b \r\nX-LATIN: caf\xe9\r\nX-Empty:\r\nContent-Length: 2\r\n"
    answer = answered(engine, *raw(HEAD + lines + b"\r\nok"))
    answer.head(5)
    assert answer.status == 200
    assert answer.headers == {"content-type": "text/plain", "x-odd": "a: b", "x-latin": "caf\u00e9", "x-empty": "",
                              "content-length": "2"}
    assert answer.all(5, 10) == b"ok" and answer.ended
    answer.close()


STATUS_LINES = [(b"HTTP/1.1 200 OK", 200), (b"HTTP/1.1 200", 200), (b"HTTP/1.0 200 OK", 200),
                (b"HTTP/1.1 422 ", 422),
                (b"HTTP/1.1 503 Service \xff Unavailable", 503), (b"HTTP/1.1 999 Odd", 999)]


def test_status_lines(engine, subtests):
    for first, status in STATUS_LINES:
        with subtests.test(str(first)):
            answer = answered(engine, *raw(first + b"\r\nContent-Length: 2\r\n\r\nok"))
            assert answer.all(5, 10) == b"ok" and answer.status == status
            answer.close()


NO_HTTP = [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n",
           b"HTTP/1.1\r\n\r\n", b"\r\n\r\n",
           b"<html></html>\r\n\r\n", b"HTTP/1.1 -12 x\r\n\r\n", b"ICY 200 OK\r\n\r\n"]


def test_no_http(engine, subtests):
    for data in NO_HTTP:
        with subtests.test(str(data)):
            answer = answered(engine, *raw(data))
            with pytest.raises(BadAnswer):
                answer.head(5)
            answer.close()


def test_a_head_that_does_not_end(engine):
    answer = answered(engine, Raw(HEAD + b"X: " + b"a" * 70000), Pause(0.01))
    with pytest.raises(BadAnswer, match="does not end"):
        answer.head(5)
    answer.close()


def test_a_compressed_answer(engine):
    answer = answered(engine, *raw(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nok"))
    with pytest.raises(BadAnswer, match="compressed"):
        answer.head(5)
    answer.close(whole=True)
    assert answer.pool.idle == []


def test_interim_heads(engine, subtests):
    for interim in (b"HTTP/1.1 100 Continue\r\n\r\n",
                    b"HTTP/1.1 103 Early Hints\r\nLink: </a>; rel=preload\r\n\r\n"):
        with subtests.test(str(interim)):
            data = interim * 2 + HEAD + b"Content-Length: 2\r\n\r\nok"
            answer = answered(engine, *raw(data))
            assert answer.all(5, 10) == b"ok" and answer.headers == {"content-length": "2"}
            answer.close()


def test_an_answer_in_single_bytes(engine):
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    data += chunks(b"hello", EVENT) + END
    answer = answered(engine, *(Raw(data[at:at + 1]) for at in range(len(data))))
    assert answer.all(5, 1000) == b"hello" + EVENT
    answer.close()


def test_the_head_and_all_of_the_body_in_one_read(engine):
    answer = answered(engine, Raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks(b"a", b"b") + END))
    assert answer.read(5) == b"ab" and answer.read(5) == b"" and answer.ended
    answer.close()


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_that_has_no_body(engine, status):
    """RFC 9112, 6.3: it ends with its head, though the connection stays open."""
    answer = answered(engine, Raw(b"HTTP/1.1 %d Odd\r\n\r\n" % status), Pause(5))
    assert answer.read(0.2) == b"" and answer.ended
    answer.close()


# ---- reading

def test_silence(engine):
    ready = threading.Event()
    answer = answered(engine, Wait(ready), Head(), Send(EVENT), Send(EVENT), Close())
    assert answer.read(0.01) is None and answer.status is None
    with pytest.raises(Silent):
        answer.head(0.01)
    with pytest.raises(Silent):
        answer.all(0.01, 1000)
    ready.set()
    body = b""
    while data := answer.read(5):
        body += data
    assert body == EVENT * 2 and not answer.ended
    answer.close()


def test_silence_in_the_body(engine):
    ready = threading.Event()
    answer = answered(engine, Head(), Send(EVENT), Wait(ready))
    assert answer.read(5) == EVENT
    assert answer.read(0.01) is None and answer.read(0) is None and answer.read(-1) is None
    ready.set()
    assert answer.read(5) == b"" and answer.ended
    answer.close()


@pytest.mark.parametrize("steps", [
    [Head(), Send(EVENT), Close()], [Head(), Send(EVENT), Reset()], [Head(framing=500), Send(EVENT), Close()],
    [Raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhel"), Close()],
])
def test_a_body_that_breaks_off(engine, steps):
    answer = answered(engine, *steps)
    with pytest.raises(UpstreamError, match="broke off"):
        answer.all(5, 1000)
    answer.close(whole=True)


def test_a_body_that_ends_with_its_connection(engine):
    answer = answered(engine, *raw(HEAD + b"\r\nhello"))
    assert answer.all(5, 100) == b"hello" and answer.ended
    answer.close(whole=True)
    assert answer.pool.idle == []


def test_a_body_beyond_the_limit(engine):
    answer = answered(engine, Head(), Send(b"x" * 500), Send(b"x" * 501), End())
    with pytest.raises(BadAnswer, match="too large"):
        answer.all(5, 1000)
    answer.close()


def test_a_bad_chunk(engine):
    answer = answered(engine, *raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"))
    with pytest.raises(BadAnswer):
        answer.all(5, 1000)
    answer.close()


# ---- connections

CHUNKED = [Head(), Send(EVENT), End()]
REUSED = {
    "a length": [Json({})], "chunks": CHUNKED, "an error": [Json({"error": "x"}, 400)],
    "trailers": [Head(), Send(EVENT), End({"X": "1"})],
    "an empty body": [Raw(HEAD + b"Content-Length: 0\r\n\r\n")],
    "keep-alive": [Json({}, headers={"Connection": "keep-alive"})],
}
NOT_REUSED = {
    "Connection: close": [Json({}, headers={"Connection": "close"})],
    "Connection: Close": [Json({}, headers={"Connection": "Close"})],
    "HTTP/1.0": [Raw(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}")],
    "a body until the end": [Head(framing="close"), Send(b"{}"), Close()],
    "surplus after a length": [Raw(HEAD + b"Content-Length: 2\r\n\r\n{}x")],
    "surplus after the last chunk": [Raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks(b"{}") + END + b"x")],
    "another answer behind it": [Raw((HEAD + b"Content-Length: 2\r\n\r\n{}") * 2)],
    "Connection: close among others": [Json({}, headers={"Connection": "foo, close"})],
}


def twice(engine, pool, steps):
    """On which connection each of two requests went."""
    engine.play(*steps)
    engine.play(Json({}))
    for _ in range(2):
        answer = pool.post("/v1/x", [b"{}"], {})
        answer.all(5, 1000)
        answer.close(whole=True)
    return [request.connection for request in engine.requests]


@pytest.mark.parametrize("name", REUSED)
def test_connections_are_reused(engine, pool, name):
    assert twice(engine, pool, REUSED[name]) == [1, 1]


@pytest.mark.parametrize("name", NOT_REUSED)
def test_connections_are_not_reused(engine, pool, name):
    assert twice(engine, pool, NOT_REUSED[name]) == [1, 2]


def test_an_answer_that_was_not_whole_closes_its_connection(engine, pool):
    engine.play(Head(), Send(EVENT), Pause(5))
    answer = pool.post("/v1/x", [b"{}"], {})
    assert answer.read(5) == EVENT
    answer.close()
    answer.close(whole=True)                        # closing again changes nothing
    assert pool.idle == [] and engine.requests[0].gone.wait(10)


def test_closing_before_the_head(engine, pool):
    engine.play(Pause(5))
    answer = pool.post("/v1/x", [b"{}"], {})
    engine.wait_for(1)
    answer.close(whole=True)
    assert pool.idle == [] and engine.requests[0].gone.wait(10)


def test_the_end_that_comes_after_the_answer_was_given_back(engine, pool):
    """The last event was in, the last chunk was not: it is read when the connection is taken again."""
    ready = threading.Event()
    engine.play(Head(), Send(EVENT), Wait(ready), End())
    engine.play(Json({}))
    first = pool.post("/v1/x", [b"{}"], {})
    assert first.read(5) == EVENT
    first.close(whole=True)
    ready.set()
    assert engine.requests[0].finished.wait(10)
    assert pool.post("/v1/x", [b"{}"], {}).all(5, 1000) == b"{}"
    assert [request.connection for request in engine.requests] == [1, 1]


@pytest.mark.parametrize("late", [[], [Send(EVENT)], [End(), Raw(b"x")], [Close()]])
def test_what_comes_late_and_is_no_end(engine, pool, late):
    ready = threading.Event()
    engine.play(Head(), Send(EVENT), Wait(ready), *late, Pause(5))
    engine.play(Json({}))
    first = pool.post("/v1/x", [b"{}"], {})
    assert first.read(5) == EVENT
    first.close(whole=True)
    ready.set()
    assert pool.post("/v1/x", [b"{}"], {}).all(5, 1000) == b"{}"
    assert engine.requests[-1].connection == 2


def test_as_many_connections_as_are_needed(engine, pool):
    engine.always(lambda request: [Json({})])
    answers = [pool.post("/v1/x", [b"{}"], {}) for _ in range(20)]
    for answer in answers:
        answer.all(5, 100)
        answer.close(whole=True)
    assert len({request.connection for request in engine.requests}) == len(pool.idle) == 20


def test_idle_connections_grow_old(engine, pool, monkeypatch):
    assert twice(engine, pool, [Json({})]) == [1, 1]
    monkeypatch.setattr(http1, "IDLE", 0)
    assert twice(engine, pool, [Json({})])[2:] == [2, 3]
    assert len(pool.idle) == 1
    pool.prune()
    assert pool.idle == []


def test_prune_keeps_what_is_young(engine, pool):
    twice(engine, pool, [Json({})])
    pool.prune()
    assert len(pool.idle) == 1


def test_an_engine_that_closes_as_soon_as_it_has_answered(engine, pool):
    """Whether the end of the connection is seen before the next request or only after it: it makes no difference."""
    engine.always(lambda request: [Json({"n": len(engine.requests)}), Close()])
    for n in range(20):
        answer = pool.post("/v1/x", [b"{}"], {})
        assert answer.all(5, 100) == b'{"n":%d}' % (n + 1)
        answer.close(whole=True)
    assert len(engine.requests) == 20


def test_an_engine_that_is_off(engine, pool):
    engine.stop()
    with pytest.raises(Off) as caught:
        pool.post("/v1/x", [b"{}"], {})
    assert (caught.value.status, caught.value.code) == (503, "model_unavailable")


def test_tcp_asks_whether_an_engine_is_still_there(engine, pool):
    """One that vanished without a word would hold its slot for half an hour."""
    engine.play(Json({}))
    answer = pool.post("/v1/x", [b"{}"], {})
    assert answer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert [answer.sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [60, 10, 6]
    answer.close()


# ---- once more

def first_one(engine, pool):
    """Leave a used connection in the pool."""
    engine.play(Json({}))
    answer = pool.post("/v1/x", [b"{}"], {})
    answer.all(5, 100)
    answer.close(whole=True)
    assert len(pool.idle) == 1


@pytest.mark.parametrize("end", [Close(), Reset()])
def test_a_stale_connection_is_tried_once_more(engine, pool, end):
    first_one(engine, pool)
    engine.play(end)
    engine.play(Json({"a": 1}))
    answer = pool.post("/v1/x", [b'{"b":2}'], {"X-Request-Id": "id-1"})
    assert answer.all(5, 100) == b'{"a":1}'
    answer.close(whole=True)
    assert [request.connection for request in engine.requests] == [1, 1, 2]
    _, first, second = engine.requests
    assert (second.body, second.headers) == (first.body, first.headers)


@pytest.mark.parametrize("end", [Close(), Reset()])
def test_a_stale_connection_and_a_large_body(engine, pool, end):
    """The connection breaks while the body is still being sent."""
    first_one(engine, pool)
    engine.play(Early(), end)
    engine.play(Json({"a": 1}))
    body = b'"' + b"x" * (4 << 20) + b'"'
    assert pool.post("/v1/x", [body], {}).all(5, 100) == b'{"a":1}'
    assert [request.connection for request in engine.requests] == [1, 1, 2] and engine.requests[2].body == body


@pytest.mark.parametrize("end", [Close(), Reset()])
@pytest.mark.parametrize("size", [10, http1.READ, 4 << 20])
def test_what_an_engine_may_have_worked_on_is_not_sent_again(engine, pool, size, end):
    """It took the whole request on a used connection, and was at it for a while: a generation would run twice."""
    first_one(engine, pool)
    engine.play(Pause(3 * http1.STALE if size < 1 << 20 else 1.5), end)
    with pytest.raises(UpstreamError, match="may have worked on it"):
        pool.post("/v1/x", [b"x" * size], {}).all(5, 100)
    assert len(engine.requests) == 2


def test_what_an_engine_has_not_whole_is_sent_again(engine, pool):
    """However long it took it in: it cannot have begun."""
    first_one(engine, pool)
    engine.play(Early(), Pause(3 * http1.STALE), Reset())
    engine.play(Json({"a": 1}))
    assert pool.post("/v1/x", [b"x" * (30 << 20)], {}).all(5, 100) == b'{"a":1}'


def test_a_question_may_be_asked_twice(engine, pool):
    """The count of a prompt, which costs nothing."""
    first_one(engine, pool)
    engine.play(Pause(3 * http1.STALE), Close())
    engine.play(Json({"a": 1}))
    assert pool.post("/v1/x", [b"{}"], {}, harmless=True).all(5, 100) == b'{"a":1}' and len(engine.requests) == 3


@pytest.mark.parametrize("end", [Close(), Reset()])
def test_only_once(engine, pool, end):
    first_one(engine, pool)
    engine.play(end)
    engine.play(end)
    with pytest.raises(UpstreamError, match="without an answer"):
        pool.post("/v1/x", [b"{}"], {}).head(5)
    assert [request.connection for request in engine.requests] == [1, 1, 2]


def test_other_idle_connections_are_not_tried(engine, pool):
    """If one was closed, so were those that are as old."""
    engine.always(lambda request: [Json({})])
    answers = [pool.post("/v1/x", [b"{}"], {}) for _ in range(3)]
    for answer in answers:
        answer.all(5, 100)
        answer.close(whole=True)
    engine.play(Close())
    pool.post("/v1/x", [b"{}"], {}).all(5, 100)
    assert engine.requests[-1].connection == 4 and pool.idle == []


@pytest.mark.parametrize("end", [Close(), Reset()])
def test_a_new_connection_is_not_tried_again(engine, pool, end):
    engine.play(end)
    with pytest.raises(UpstreamError, match="without an answer"):
        pool.post("/v1/x", [b"{}"], {}).head(5)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("some", [b"H", b"HTTP/1.1 200 OK\r\n", HEAD + b"Content-Length: 5\r\n\r\n",
                                  HEAD + b"Content-Length: 5\r\n\r\nhel",
                                  b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\n\r\n",
                                  b"HTTP/1.1 100 Continue\r\n\r\nHTTP"])
def test_never_after_a_byte_came(engine, pool, some):
    """An engine that said anything has seen the request: sent again it would be done twice."""
    first_one(engine, pool)
    engine.play(Raw(some), Close())
    engine.always(lambda request: [Json({})])
    with pytest.raises(UpstreamError):
        pool.post("/v1/x", [b"{}"], {}).all(5, 100)
    assert len(engine.requests) == 2


@pytest.mark.parametrize("size", [10, http1.READ])
def test_the_time_for_connecting_is_none_for_thinking(engine, pool, monkeypatch, size):
    monkeypatch.setattr(http1, "CONNECT_TIMEOUT", 0.2)
    engine.play(Pause(0.5), Json({"a": 1}))
    assert pool.post("/", [b"x" * size], {}).all(5, 100) == b'{"a":1}'


@pytest.mark.parametrize("used", [False, True])
def test_an_engine_that_takes_no_more_of_a_request(engine, pool, monkeypatch, used):
    """Once more where the connection may have been stale; then there is nothing to wait for."""
    monkeypatch.setattr(http1, "SEND_TIMEOUT", 0.2)
    if used:
        one = pool.post("/", [b"{}"], {})
        one.all(5, 10_000)
        one.close(whole=True)
    for _ in range(1 + used):
        engine.play(Early(), Pause(5))
    with pytest.raises(UpstreamError, match="without an answer"):
        pool.post("/", [b"x" * (30 << 20)], {}).all(5, 100)


@pytest.mark.parametrize("most", [0, 1 << 30], ids=["large", "small"])
def test_a_connection_that_took_half_a_request_serves_no_other(engine, pool, monkeypatch, most):
    """The engine answers whole, but stopped reading: the next request would be read as the rest of this one."""
    monkeypatch.setattr(http1, "SEND_TIMEOUT", 0.2)
    engine.play(Early(), Head(framing=2), Pause(0.6), Send(b"{}"), Wait(done := threading.Event()))
    with monkeypatch.context() as patch:
        patch.setattr(http1, "READ", most)
        answer = pool.post("/", [b"x" * (30 << 20)], {})
    assert answer.all(5, 100) == b"{}"
    answer.close(whole=True)
    done.set()
    assert pool.idle == []


@pytest.fixture
def given(monkeypatch):
    """How often a sender gave way; each time lasts."""
    given = []
    monkeypatch.setattr(http1, "give_way", lambda: (given.append(1), gevent.sleep(0.05)))
    return given


def test_many_parts_go_together(engine, pool, given):
    """A conversation with thousands of long texts is no slower than one long text."""
    parts = [b"[0", *[b",1234567890" * 100, b","] * 1000, b"1]"]
    engine.play(Json({}))
    answer = pool.post("/v1/x", parts, {})
    assert answer.all(5, 100) == b"{}" and engine.requests[0].body == b"".join(parts)
    assert len(given) <= 5
    answer.close()


@pytest.mark.parametrize("size", [http1.READ, http1.PIECE, http1.PIECE + 1])
def test_nobody_gives_way_behind_the_last_byte(engine, pool, given, size):
    """An engine that is quick would have answered meanwhile, and its connection been lost."""
    engine.play(Json({}))
    answer = pool.post("/v1/x", [b"x" * size], {})
    assert answer.all(5, 100) == b"{}"
    answer.close(whole=True)
    assert len(pool.idle) == 1


@pytest.mark.parametrize("size", [10, 4 << 20])
@pytest.mark.parametrize("used", [False, True])
def test_a_request_is_held_as_long_as_it_may_be_sent(engine, pool, size, used):
    """On a connection that may be stale that is until the first answer, else until it has gone."""
    if used:
        first_one(engine, pool)
    heard, head = [], threading.Event()
    engine.play(Wait(head), Head(framing=2), Send(b"{}"))
    answer = pool.post("/v1/x", [b"x" * size], {})
    answer.when_request_dropped(lambda: heard.append(answer.request))
    assert answer.read(0.5) is None and len(heard) == (not used)
    head.set()
    assert answer.all(5, 100) == b"{}" and heard and not any(heard)
    answer.close()


def test_a_request_that_is_still_being_sent_is_held(engine, pool):
    """Though its answer has begun."""
    heard = []
    engine.play(Early(), Head(framing=4), Send(b"{}"), ReadBody(), Send(b"{}"))
    answer = pool.post("/v1/x", [b"x" * (30 << 20)], {})
    answer.when_request_dropped(lambda: heard.append(answer.sent))
    answer.head(5)
    assert heard == []
    assert answer.all(5, 100) == b"{}{}" and heard == [True]
    answer.close()


def test_an_answer_before_the_request_was_read(engine, pool):
    """An engine that refuses a large body and closes: what it said counts."""
    engine.play(Early(), Json({"error": "too large"}, 413, {"Connection": "close"}))
    answer = pool.post("/v1/x", [b"x" * (1 << 20)], {})
    assert answer.all(5, 100) == b'{"error":"too large"}' and answer.status == 413
    answer.close()


# ---- TLS

NOTIFY = object()                                   # the end of TLS, while TCP stays open


class TlsServer(threading.Thread):
    """An engine behind TLS: one connection after another, one answer after another, its bytes cut to `size`.
    An answer is a list of parts; NOTIFY ends TLS, None closes the connection. `left` is set when a client has closed one."""

    def __init__(self, context, answers, size=None):
        super().__init__(daemon=True)
        self.context, self.answers, self.size = context, answers, size
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.requests, self.left = self.listener.getsockname()[1], [], threading.Event()

    def run(self):
        while True:
            try:
                self.sock, _ = self.listener.accept()
            except OSError:
                return
            with self.sock:
                self.sock.settimeout(3)
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                try:
                    self.serve()
                except (EOFError, OSError):
                    self.left.set()

    def serve(self):
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = self.context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.until_done(tls.do_handshake)
        while True:
            request = b""
            while not request.endswith(b"{}"):
                request += self.until_done(tls.read)
            self.requests.append(request)
            for part in self.answers.pop(0):
                if part is None:
                    return
                if part is NOTIFY:
                    with contextlib.suppress(ssl.SSLWantReadError):
                        tls.unwrap()
                    self.flush()
                    while self.sock.recv(65536):
                        pass
                    return
                if isinstance(part, float):
                    time.sleep(part)
                    continue
                tls.write(part)
                self.flush()

    def until_done(self, call):
        while True:
            try:
                done = call()
                self.flush()
                return done
            except ssl.SSLWantReadError:
                self.flush()
                data = self.sock.recv(65536)
                if not data:
                    raise EOFError from None
                self.incoming.write(data)

    def flush(self):
        data = self.outgoing.read()
        size = self.size or len(data) or 1
        for at in range(0, len(data), size):
            self.sock.sendall(data[at:at + size])

    def stop(self):
        self.listener.shutdown(socket.SHUT_RDWR)    # wakes accept()
        self.join(10)
        self.listener.close()
        assert not self.is_alive()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """(certificate, key): self-signed, for localhost and 127.0.0.1."""
    if not shutil.which("openssl"):
        pytest.skip("a certificate is made with the openssl command, which this machine does not have")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "2",
                    "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key,
                    "-out", cert],
                   check=True, capture_output=True)
    return cert, key


@pytest.fixture
def tls(certificate):
    """A function that starts a TlsServer and gives (server, pool)."""
    started = []

    def start(*answers, size=None, version=None, host="127.0.0.1", trusted=True):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        if version:
            context.minimum_version = context.maximum_version = version
        server = TlsServer(context, list(answers), size)
        server.start()
        pool = Pool(f"https://{host}:{server.port}", ssl.create_default_context(cafile=certificate[0])
                    if trusted else None)
        started.append((server, pool))
        return server, pool

    yield start
    for server, pool in started:
        for connection in pool.idle:
            connection.close()
        server.stop()


OK = HEAD + b"Content-Length: 2\r\n\r\nok"
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("size", [None, 1, 7, 100])
def test_tls(tls, version, size):
    """TLS 1.3 sends session tickets before the answer: records that hold nothing for us."""
    server, pool = tls([OK], [OK], size=size, version=version)
    for _ in range(2):
        answer = pool.post("/v1/x", [b"{}"], {})
        assert answer.all(5, 100) == b"ok"
        answer.close(whole=True)
    assert len(server.requests) == 2


@pytest.mark.parametrize("size", [None, 1000, 5000])
def test_tls_body_over_many_records(tls, size):
    body = bytes(range(256)) * 800
    parts = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
             *(chunks(body[at:at + 5000]) for at in range(0, len(body), 5000)), END]
    server, pool = tls(parts, [HEAD, b"Content-", b"Length: %d\r\n\r\n" % len(body), body], size=size)
    for _ in range(2):
        answer = pool.post("/v1/x", [b"{}"], {})
        assert answer.all(5, 1 << 20) == body
        answer.close(whole=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_tls_large_request(tls, version, monkeypatch):
    """Twice on its connection, and once more on another one."""
    monkeypatch.setattr(http1, "STALE", 10)         # reading it takes the scripted server a while
    body = [bytes(range(256)) * 4000, b"x" * (1 << 20), b"{}"]
    server, pool = tls([OK], [OK], [None], [OK], version=version)
    for _ in range(3):
        answer = pool.post("/v1/x", body, {})
        assert answer.all(5, 100) == b"ok"
        answer.close(whole=True)
    assert [request.endswith(b"\r\n\r\n" + b"".join(body)) for request in server.requests] == [True] * 4


def test_tls_record_by_record(tls):
    """Each event in its own moment, as the socket is watched and `decode` called: nothing stays in the layer."""
    server, pool = tls([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunks(EVENT)] * 5, END])
    answer, body = pool.post("/v1/x", [b"{}"], {}), b""
    answer.head(5)
    while data := answer.read(5):
        assert answer.connection.layer.tls.pending() == 0
        body += data
    assert body == EVENT * 5 and answer.ended
    answer.close()


def test_tls_by_name(tls):
    _, pool = tls([OK], host="localhost")
    try:
        answer = pool.post("/v1/x", [b"{}"], {})
    except Off:
        pytest.skip("localhost is not 127.0.0.1 on this machine")
    assert answer.all(5, 100) == b"ok"
    answer.close()


@pytest.mark.parametrize("first, second", [([OK], [None]), ([OK, NOTIFY], []), ([OK], [NOTIFY]),
                                           ([HEAD + b"\r\nok", NOTIFY], [])])
def test_tls_stale_connection(tls, first, second):
    """The end of TLS is the connection's end, however long TCP stays open (asyncio's servers wait for half a minute)."""
    server, pool = tls(first, *filter(None, [second]), [OK])
    for _ in range(2):
        answer = pool.post("/v1/x", [b"{}"], {})
        assert answer.all(5, 100) == b"ok"
        answer.close(whole=True)
    assert len(server.requests) == 2 + bool(second)


def test_tls_request_that_was_worked_on(tls):
    server, pool = tls([OK], [3 * http1.STALE, None], [OK])
    answer = pool.post("/v1/x", [b"{}"], {})
    assert answer.all(5, 100) == b"ok"
    answer.close(whole=True)
    with pytest.raises(UpstreamError, match="may have worked on it"):
        pool.post("/v1/x", [b"{}"], {}).all(5, 100)
    assert len(server.requests) == 2


@pytest.mark.parametrize("data", [b"\x17\x03\x03\x00\x20" + b"x" * 32, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_tls_that_breaks_in_the_body(tls, data):
    _, pool = tls([HEAD + b"Content-Length: 5\r\n\r\nhel", None])
    answer = pool.post("/v1/x", [b"{}"], {})
    answer.head(5)
    with pytest.raises(BadAnswer, match="TLS"):
        answer.decode(data)
    answer.close()


def test_tls_cut_off(tls):
    _, pool = tls([HEAD + b"Content-Length: 5\r\n\r\nhel", None])
    answer = pool.post("/v1/x", [b"{}"], {})
    with pytest.raises(UpstreamError, match="broke off"):
        answer.all(5, 100)
    answer.close()


def test_tls_with_a_certificate_that_nobody_knows(tls):
    server, pool = tls([OK], trusted=False)
    with pytest.raises(Off, match="SSLCertVerificationError") as caught:
        pool.post("/v1/x", [b"{}"], {})
    assert server.left.wait(1), "the connection is still open"
    assert caught.value.status == 503               # the error is still held here: its connection must not be


class TlsFront(threading.Thread):
    """TLS in front of an engine that has none."""

    def __init__(self, certificate, port):
        super().__init__(daemon=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(*certificate)
        self.listener, self.engine_port = socket.create_server(("127.0.0.1", 0)), port
        self.url = f"https://127.0.0.1:{self.listener.getsockname()[1]}"

    def run(self):
        while True:
            try:
                sock = self.context.wrap_socket(self.listener.accept()[0], server_side=True)
            except ssl.SSLError:                    # a client that does not trust it
                continue
            except OSError:
                return
            engine = socket.create_connection(("127.0.0.1", self.engine_port))
            for source, target in ((sock, engine), (engine, sock)):
                threading.Thread(target=self.copy, args=(source, target), daemon=True).start()

    @staticmethod
    def copy(source, target):
        try:
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def stop(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.join(5)
        self.listener.close()


@pytest.mark.parametrize("trusted", [True, False])
def test_an_https_engine_with_a_private_authority(engine, gateway, certificate, monkeypatch, trusted):
    """Whether it is up, and whether it answers, is decided by one trust: the system's."""
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    tls = TlsFront(certificate, engine.port)
    tls.start()
    front = gateway(upstream=tls.url, wait="ready" if trusted else "alive")
    answer = front.client().post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status == (200 if trusted else 503)
    assert len(engine.requests) == trusted
    front.stop()
    tls.stop()


def test_tls_to_a_port_that_speaks_none():
    def answer():
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Off):
            Pool(f"https://127.0.0.1:{listener.getsockname()[1]}").post("/v1/x", [b"{}"], {})
        thread.join(5)


def test_tls_that_is_cut_off_in_its_handshake():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: listener.accept()[0].close())
        thread.start()
        with pytest.raises(Off):
            Pool(f"https://127.0.0.1:{listener.getsockname()[1]}").post("/v1/x", [b"{}"], {})
        thread.join(5)


ADDRESSES = [
    ("http://10.0.0.1:8000", ("10.0.0.1", 8000), "", "10.0.0.1:8000"),
    ("http://engine", ("engine", 80), "", "engine"),
    ("https://engine/", ("engine", 443), "", "engine"),
    ("https://engine:8443/a/b/", ("engine", 8443), "/a/b", "engine:8443"),
    ("http://[::1]:8000", ("::1", 8000), "", "[::1]:8000"),
]


def test_addresses(subtests):
    for url, address, prefix, netloc in ADDRESSES:
        with subtests.test(url):
            pool = Pool(url)
            assert (pool.address, pool.prefix, pool.netloc) == (address, prefix, netloc)
            assert bool(pool.tls) == url.startswith("https")
