"""Whatever ends a request early: the engine is told within a second, the slot is free, the row is written.

The matrix is {where the request was} × {stream, plain} × {how the client left}, for every way in (APIS).
"""
import ctypes
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import pytest

from dialects.messages.events import MessageStream
from dialects.responses.events import Options, ResponseStream
from support.chat import failure
from support.client import Truncated
from support.engine import (
    Close,
    Early,
    Engine,
    Hang,
    Head,
    Json,
    Pause,
    Raw,
    Reset,
    Send,
    Wait,
    chat_chunks,
    chunk,
    compact,
    completion,
    embeddings,
    sse,
    text_chunks,
    text_completion,
)
from support.gateway import WITH_VECTORS, started
from support.observe import descriptors, gauge, gauges, idle
from support.processes import clean_environment, wait_until
from support.rows import row_now, row_of, rows

MODEL = "GLM-5.3-Flash-EXL3"
LEAVE = ["close", "reset"]
WORST = {}                                          # (phase, form, leave) -> ms until the engine saw it
IDS = count()
SO_ATTACH_FILTER = 26                               # Python has no name for it


class Api(NamedTuple):
    """A way in: its path, a body for it, and what the engine says.

    streams     where -> (the engine's events until it hangs, the tokens in them); nothing where there are no streams
    plains      where -> how much of the engine's plain answer has come
    events, whole   a whole stream, its usage with it, and a plain answer
    heard       how many events a client gets for the engine's events;  last  how its whole stream ends
    """
    path: str
    body: Callable
    streams: dict
    plains: dict
    events: list
    whole: dict
    model: str = MODEL
    heard: Callable = len
    last: bytes = b"data: [DONE]\n\n"

    @property
    def route(self):
        return f"POST {self.path}"

    @property
    def middle(self):
        """How many events bring a stream to its middle."""
        return len(self.streams["mid-content"][0])


def streaming(streams):
    """A stream also asks for the usage, so that each event of the engine's is one of the client's."""
    return {"stream": True, "stream_options": {"include_usage": True}} if streams else {}


def chat_body(streams, **fields):
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **streaming(streams), **fields}


def messages_body(streams, **fields):
    return {"model": MODEL, "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}], "stream": streams,
            "thinking": {"type": "adaptive"}, **fields}


def messages_heard(events):
    out = MessageStream(MODEL, True).feed(b"".join(events))
    return out.count(b"event: ") - out.count(b"event: ping")


def responses_body(streams, **fields):
    return {"model": MODEL, "input": "Hello", "stream": streams, **fields}


def responses_heard(events):
    return ResponseStream("0", Options(time.time)).feed(b"".join(events)).count(b"event: ")


def text_body(streams, **fields):
    return {"model": MODEL, "prompt": "Hello", **streaming(streams), **fields}


def embedding_body(streams, **fields):
    return {"model": "vectors", "input": "Hello", **fields}


TOOL = [("get_weather", ['{"ci', 'ty": "Pa', 'ris"}'])]
THOUGHT = chat_chunks("Hello there", reasoning="Let me think", usage=True)
CALLED = chat_chunks(None, tools=TOOL, usage=True)
TEXTS = text_chunks("Hello there", usage=True)
SAID = completion("Hello there", reasoning="Let me think", tools=TOOL)
WHOLE = compact(SAID)
TEXT = text_completion("Hello there")
VECTORS = embeddings([0.5, 0.25], model=MODEL)

CHAT = Api("/v1/chat/completions", chat_body, {
    "before the head": (None, 0),
    "prefill": ([], 0),
    "after the role": (THOUGHT[:1], 0),
    "mid-reasoning": (THOUGHT[:3], 2),
    "mid-content": (THOUGHT[:5], 4),
    "mid-tool": (CALLED[:3], 2),
    "after finish": (THOUGHT[:7], 6),
    "after usage": (THOUGHT[:8], 7),                # the engine's own figure
}, {
    "before the head": None,
    "prefill": 0,
    "mid-reasoning": WHOLE.index(b"me think"),
    "mid-content": WHOLE.index(b" there"),
    "mid-tool": WHOLE.index(b"Paris"),
    "after finish": WHOLE.index(b'"usage"'),
}, THOUGHT, SAID)
COMPLETIONS = Api("/v1/completions", text_body, {
    "before the head": (None, 0),
    "prefill": ([], 0),
    "mid-content": (TEXTS[:1], 1),
    "after finish": (TEXTS[:3], 3),
    "after usage": (TEXTS[:4], 3),
}, {"before the head": None, "prefill": 0, "mid-content": compact(TEXT).index(b" there")}, TEXTS, TEXT)
EMBEDDINGS = Api("/v1/embeddings", embedding_body, {}, {"before the head": None, "prefill": 0, "mid-content": 40}, None, VECTORS,
                 "vectors")
MESSAGES = CHAT._replace(path="/v1/messages", body=messages_body, heard=messages_heard, last=b'data: {"type":"message_stop"}\n\n')
RESPONSES = CHAT._replace(path="/v1/responses", body=responses_body, heard=responses_heard, last=b"}\n\n")
APIS = [CHAT, MESSAGES, RESPONSES, COMPLETIONS, EMBEDDINGS]
STREAMING = [api for api in APIS if api.streams]
FORMS = [(api, streams) for api in APIS for streams in (True, False) if api.streams or not streams]


def named(value):
    """A test's name for an Api or a form."""
    return value.path if isinstance(value, Api) else {True: "stream", False: "plain"}.get(value, str(value))


@pytest.fixture(scope="module")
def house(stock, tmp_path_factory):
    """An engine and a gateway with one slot, for all of this module."""
    with Engine() as engine, started(engine, tmp_path_factory.mktemp("leaving"), stock, max_active=1, keepalive=0.3,
                                     config=WITH_VECTORS) as gateway:
        gateway.engine = engine
        yield gateway


@pytest.fixture
def one(house):
    """The same, with nothing left of earlier tests, and nothing left behind."""
    house.engine.reset()
    yield house
    idle(house)
    house.engine.wait_idle()
    assert not house.engine.faults, "\n".join(house.engine.faults)
    house.check_log()


def send(gateway, api, streams, **fields):
    """A request on a connection of its own: (connection, its id)."""
    connection, ident = gateway.client().open(), f"leaving-{next(IDS)}"
    connection.start("POST", api.path, api.body(streams, **fields), {"x-request-id": ident})
    return connection, ident


def left(connection, leave):
    """Leave in that way; the moment before."""
    moment = time.monotonic()
    getattr(connection, leave)()
    return moment


def seen(request, since, what):
    """The engine sees that its client went. How soon, test_worst_time judges: one time says more about the machine."""
    assert request.gone.wait(10), f"{what}: the engine was not told"
    WORST[what] = (request.gone_at - since) * 1000


# ---- the matrix

@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("api, where", [(api, where) for api in APIS for where in api.streams], ids=named)
def test_leaving_a_stream(one, api, where, leave):
    events, tokens = api.streams[where]
    heard = api.heard(events or [])
    if events and tokens and heard == api.heard(events[:-1]):
        pytest.skip("its client cannot see that this has come")
    one.engine.play(*([Head(), *events] if events is not None else []), Hang())
    connection, ident = send(one, api, True)
    request = one.engine.wait_for(1)[0]
    if heard:
        answer = connection.answer().events()
        got = 0
        while got < heard:
            event = next(answer)
            got += event.comment is None and event.name != "ping"
    since = left(connection, leave)
    seen(request, since, (where, "stream", leave))
    row = row_of(one.db, ident)
    assert (row["status"], row["aborted"], row["streamed"], row["truncated"], row["error"]) == (499, 1, 1, 0, None)
    assert (row["model"], row["route"], row["engine"]) == (api.model, api.route, one.engine.url)
    assert row["prompt_tokens"] > 0 and tokens <= row["completion_tokens"] <= 2 * tokens
    assert row["counted"] == ("engine" if where == "after usage" else "gateway")
    assert row["queued_ms"] is not None and (row["first_ms"] is not None) == bool(heard)
    idle(one, 1)


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("api, where", [(api, where) for api in APIS for where in api.plains], ids=named)
def test_leaving_a_plain_request(one, api, where, leave):
    size, whole = api.plains[where], compact(api.whole)
    head = [] if size is None else [Head(framing=len(whole), type="application/json")]
    one.engine.play(*head, *([whole[:size]] if size else []), Hang())
    connection, ident = send(one, api, False)
    request = one.engine.wait_for(1)[0]
    since = left(connection, leave)
    seen(request, since, (where, "plain", leave))
    row = row_of(one.db, ident)
    assert (row["status"], row["aborted"], row["streamed"], row["truncated"], row["error"]) == (499, 1, 0, 0, None)
    assert (row["model"], row["route"], row["engine"]) == (api.model, api.route, one.engine.url)
    assert row["prompt_tokens"] > 0 and (row["completion_tokens"] > 0) == (api is not EMBEDDINGS)
    assert row["counted"] == "gateway" and row["queued_ms"] is not None
    idle(one, 1)


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("commented", [False, True], ids=["silent", "commented"])
@pytest.mark.parametrize("api, streams", FORMS, ids=named)
def test_leaving_the_queue(one, api, streams, commented, leave):
    one.engine.play(Hang())
    runs, running = send(one, api, True)
    one.engine.wait_for(1)
    waits, waiting = send(one, api, streams)
    wait_until(lambda: gauges(one)["sparks_queued"] == 1, 5, what="a request in the queue")
    if commented and streams:
        assert next(waits.answer().events()).comment == "queued 1"
    since = left(waits, leave)
    wait_until(lambda: gauges(one)["sparks_queued"] == 0, 1, what="an empty queue")
    WORST["queue", "stream" if streams else "plain", leave] = (time.monotonic() - since) * 1000
    row = row_of(one.db, waiting)
    assert (row["status"], row["aborted"], row["engine"], row["queued_ms"], row["model"]) == (499, 1, "", None, api.model)
    assert row["completion_tokens"] is row["prompt_tokens"] is None
    assert gauges(one)["sparks_active"] == 1 and len(one.engine.requests) == 1
    seen(one.engine.requests[0], left(runs, "close"), ("before the head", "stream", "close, beside a queue"))
    row_of(one.db, running)


@pytest.mark.parametrize("api, streams", FORMS, ids=named)
def test_a_slot_of_somebody_who_left_serves_the_next(one, api, streams):
    one.engine.play(Hang())
    one.engine.play(*(api.events if streams else [Json(api.whole)]))
    gone, _ = send(one, api, streams)
    one.engine.wait_for(1)
    waits, ident = send(one, api, streams)
    wait_until(lambda: gauges(one)["sparks_queued"] == 1, 5, what="a request in the queue")
    gone.close()
    assert waits.answer().status == 200 and one.engine.wait_for(2)
    waits.close()
    row_of(one.db, ident)


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("api, streams", FORMS, ids=named)
def test_leaving_with_the_answer_whole_is_no_abort(one, api, streams, leave):
    for _ in range(5):
        one.engine.play(*(api.events if streams else [Json(api.whole)]))
        connection, ident = send(one, api, streams)
        body = connection.answer().read_all()
        getattr(connection, leave)()
        assert body.endswith(api.last if streams else b"}")
        row = row_now(one.db, ident)
        assert (row["status"], row["aborted"], row["counted"]) == (200, 0, "engine") and row["prompt_tokens"]


# ---- at the finish, before the engine has told its figures

def finished(gateway, api, **fields):
    """A stream of which all but the usage has come: (connection, id, its events that go on)."""
    connection, ident = send(gateway, api, True, **fields)
    events = connection.answer().events()
    heard = api.heard(api.events[:-2])
    while heard:
        event = next(events)
        heard -= event.comment is None and event.name != "ping"
    return connection, ident, events


def tried(one, api, leaves):
    """A request whose figures come once the next one has had the slot: its row. They are waited for for a second, which a
    busy machine may not have: it gets three tries."""
    for _ in range(3):
        one.engine.reset()
        go = threading.Event()
        one.engine.play(*api.events[:-2], Wait(go), *api.events[-2:])
        one.engine.always(lambda request: [Json(api.whole)])
        connection, ident, events = finished(one, api)
        if leaves:
            connection.close()
        next_one, _ = send(one, api, False)
        assert next_one.answer().status == 200
        go.set()
        if not leaves:
            assert list(events)[-1].raw.endswith(api.last)
        row = row_of(one.db, ident)
        if row["counted"] == "engine":
            break
    return row


@pytest.mark.parametrize("api", STREAMING, ids=named)
def test_figures_of_a_client_that_left_at_the_finish(one, api):
    """They are waited for, while the next request has the slot; then the engine's connection serves again."""
    row = tried(one, api, leaves=True)
    assert (row["status"], row["aborted"], row["counted"]) == (499, 1, "engine")
    assert row["prompt_tokens"] == api.whole["usage"]["prompt_tokens"] and row["completion_tokens"] > 2
    one.engine.wait_idle()
    send(one, api, False)[0].answer().read_all()
    assert len({request.connection for request in one.engine.requests}) == 2


@pytest.mark.parametrize("api", STREAMING, ids=named)
def test_the_slot_is_free_at_the_finish(one, api):
    """Also where the client stays; it gets the end of its answer all the same."""
    row = tried(one, api, leaves=False)
    assert (row["status"], row["counted"]) == (200, "engine")


NO_FIGURES = {"silence": [Hang()], "garbage": [b'data: {"usage": \n\n', Hang()], "no HTTP": [Raw(b"\xff\xff\r\n"), Hang()],
              "an error": [sse({"error": {"message": "died", "code": 500}}), Hang()], "the end": [Close()], "a reset": [Reset()],
              "figures of the wrong type": [sse({**chunk(), "choices": [], "usage": {"prompt_tokens": None}}), Hang()]}


@pytest.mark.parametrize("what", NO_FIGURES)
def test_figures_that_never_come(one, what):
    """For a second; nothing is left of it then, but a row with estimates."""
    before = len(descriptors(one))
    for api in (CHAT, MESSAGES):
        gone = threading.Event()
        one.engine.play(*api.events[:-2], Wait(gone), *NO_FIGURES[what])
        connection, ident, _ = finished(one, api)
        since = left(connection, "close")
        wait_until(lambda: gauges(one)["sparks_active"] == 0, 1)
        gone.set()
        row = row_of(one.db, ident)
        assert time.monotonic() - since < 5
        assert (row["status"], row["counted"]) == (499, "gateway") and row["prompt_tokens"] > 0 and 6 <= row["completion_tokens"] < 12
        one.engine.wait_idle()
        wait_until(lambda: len(descriptors(one)) <= before + 1, 3)


def test_estimates_go_by_what_the_engine_counted(gateway, engine):
    """Of prompts and of answers, whose events have four tokens each here; half of an answer is half of its tokens."""
    front, words = gateway(), ["one two three four "] * 10
    whole = chat_chunks(words, usage={"prompt_tokens": 3000, "completion_tokens": 41, "total_tokens": 3041})
    for api in (CHAT, MESSAGES, RESPONSES):
        engine.play(*whole)
        send(front, api, True)[0].answer().read_all()
        engine.play(*whole[:6], Hang())
        connection, ident = send(front, api, True)
        events, heard = connection.answer().events(), 0
        while heard < api.heard(whole[:6]):
            event = next(events)
            heard += event.comment is None and event.name != "ping"
        connection.close()
        row = row_of(front.db, ident)
        assert (row["completion_tokens"], row["counted"]) == (20, "gateway")
        assert row["prompt_tokens"] == (8 if api is MESSAGES else pytest.approx(3000, rel=0.05))    # the engine was asked there


def test_a_limit_waits_for_the_figures_of_a_request_that_has_finished(gateway, engine):
    """A client that always leaves at the finish is charged like any other, from the first time on, on each route."""
    front = gateway()
    figures = {"prompt_tokens": 100_000, "completion_tokens": 40}
    for api in STREAMING:
        key = front.add_key(name := api.path)
        front.keys("limit", name, "--tokens-per-day", "1000")
        client = front.client(key)
        usage = api.events[-2].replace(b'"usage":{', b'"usage":%b,"was":{' % compact(figures))
        engine.always(lambda request, api=api, usage=usage: [*api.events[:-2], Pause(0.3), usage, api.events[-1]])
        statuses = []
        for _ in range(3):
            with client.open() as connection:
                connection.start("POST", api.path, api.body(True))
                answer = connection.answer()
                statuses.append(answer.status)
                events, heard = answer.events(), api.heard(api.events[:-2])
                while heard and answer.status == 200:
                    event = next(events)
                    heard -= event.comment is None and event.name != "ping"
        assert statuses == [200, 429, 429]
        assert client.get("/v1/usage").json()["today"]["prompt_tokens"] == 100_000


# ---- other ways to be gone

CLIENT = """
import socket, sys
host, port, request = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3])
sock = socket.create_connection((host, port))
sock.sendall(request)
print("sent", flush=True)
while sock.recv(65536):
    print("got", flush=True)
"""


@pytest.mark.parametrize("api, streams", FORMS, ids=named)
def test_client_process_is_killed(one, api, streams):
    one.engine.play(*([Head(), *api.events[:api.middle]] if streams else []), Hang())
    client = one.client()
    with client.open() as connection:
        data = connection.encode("POST", api.path, api.body(streams), {"x-request-id": (ident := f"leaving-{next(IDS)}")})
    process = subprocess.Popen([sys.executable, "-c", CLIENT, client.address[0], str(client.address[1]), data.hex()],
                               env=clean_environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "sent\n"
        request = one.engine.wait_for(1)[0]
        if streams:
            assert process.stdout.readline() == "got\n"
        since = time.monotonic()
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()
    seen(request, since, ("mid-content" if streams else "before the head", "stream" if streams else "plain", "kill -9"))
    assert row_of(one.db, ident)["status"] == 499


@pytest.mark.parametrize("api", STREAMING, ids=named)
def test_leaving_touches_neither_the_request_before_nor_the_connection(one, api):
    """The second request of a connection is aborted; the first one stays whole, and others go on."""
    one.engine.play(*api.events)
    connection, first = send(one, api, True)
    connection.answer().read_all()
    one.engine.play(Hang())
    connection.start("POST", api.path, api.body(True), {"x-request-id": (second := f"leaving-{next(IDS)}")})
    request = one.engine.wait_for(2)[1]
    seen(request, left(connection, "close"), ("before the head", "stream", "second on its connection"))
    assert row_of(one.db, second)["status"] == 499 and row_now(one.db, first)["status"] == 200


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("api", STREAMING, ids=named)
def test_leaving_with_another_request_on_its_way(one, api, leave):
    """Its bytes are gunicorn's, and still the client is missed; the second request is not served to nobody."""
    one.engine.play(Head(), *[step for n in range(200) for step in (api.events[api.middle - 1], Pause(0.05))])
    connection, first = send(one, api, True)
    request = one.engine.wait_for(1)[0]
    next(connection.answer().events())
    connection.start("POST", api.path, api.body(True), {"x-request-id": (second := f"leaving-{next(IDS)}")})
    seen(request, left(connection, leave), ("mid-content", "stream", f"{leave}, another request behind"))
    assert row_of(one.db, first)["status"] == 499
    idle(one, 2)
    assert {row["status"] for row in rows(one.db, "id = ?", (second,))} <= {499}


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("answered", [False, True], ids=["silent", "answering"])
def test_leaving_while_the_engine_does_not_read(one, answered, leave):
    """Most of a large body still waits on the way to it: the end must not wait behind that."""
    one.engine.play(Early(), *([Head(), *THOUGHT[:3]] if answered else []), Hang())
    connection, ident = send(one, CHAT, True, user="x" * (30 << 20))
    request = one.engine.wait_for(1)[0]
    if answered:
        next(connection.answer().events())
    else:
        time.sleep(0.2)
    try:
        seen(request, left(connection, leave), ("while its body is sent", "stream", leave))
    except AssertionError:                          # let go of it, or every test after this one fails too
        one.engine.stop()
        one.engine.start()
        one.wait_ready()
        raise
    assert row_of(one.db, ident)["status"] == 499
    idle(one, 1)


@pytest.mark.parametrize("behind", ["a request", "a line end"])
@pytest.mark.parametrize("api, streams", FORMS, ids=named)
def test_leaving_in_prefill_with_bytes_behind_the_request(one, api, behind, streams):
    """Old clients send a line end behind a body (RFC 9112, 2.2). It must not hide that they leave."""
    one.engine.play(Hang())
    connection, ident = send(one, api, streams)
    request = one.engine.wait_for(1)[0]
    connection.send(b"\r\n" if behind == "a line end" else connection.encode("POST", api.path, api.body(False)))
    wait_until(lambda: gauges(one)["sparks_active"] == 1, 5)        # the bytes are there by now
    try:
        form = "stream" if streams else "plain"
        seen(request, left(connection, "close"), ("before the head", form, f"close, {behind} behind"))
    except AssertionError:                          # let go of the slot, or every test after this one fails too
        one.engine.stop()
        one.engine.start()
        one.wait_ready()
        raise
    assert row_of(one.db, ident)["status"] == 499


def test_leaving_while_the_body_goes_to_the_engine(gateway, engine):
    """The engine does not read: its connection must not outlive the client."""
    front = gateway()
    before = len(descriptors(front))
    engine.always(lambda request: [Hang()])
    engine.play(Early(), Hang())
    connection = front.client().open()
    connection.start("POST", CHAT.path, CHAT.body(False, user="x" * 30_000_000))
    wait_until(lambda: gauge(front, "sparks_active") == 1, 10)
    connection.close()
    wait_until(lambda: gauge(front, "sparks_active") == 0, 3)
    wait_until(lambda: len(descriptors(front)) <= before + 2, 3)


# ---- a client that will send no more, and listens

def half_closed(gateway, api, streams):
    """A request whose client has said that it sends no more, and is being answered: (connection, id, the engine's request)."""
    connection, ident = send(gateway, api, streams)
    connection.half_close()
    return connection, ident, gateway.engine.wait_for(1)[0]


@pytest.mark.parametrize("api, streams", FORMS, ids=named)
def test_half_closing_is_not_leaving(one, api, streams):
    """Before the engine answers, and in the middle of its answer: `nc -N` gets its answer whole."""
    go, rest = threading.Event(), threading.Event()
    if streams:
        one.engine.play(Wait(go), Head(), *api.events[:api.middle], Wait(rest), *api.events[api.middle:])
    else:
        one.engine.play(Wait(go), Json(api.whole))
    connection, ident, request = half_closed(one, api, streams)
    assert not request.gone.wait(0.2)
    go.set()
    answer = connection.answer()
    if streams:
        next(answer.events())
        assert not request.gone.wait(0.2)
        rest.set()
    assert answer.status == 200 and answer.read_all().endswith(api.last if streams else b"}")
    assert {interim.status for interim in answer.interim} <= {100} and connection.ended()
    row = row_now(one.db, ident)
    assert (row["status"], row["aborted"]) == (200, 0)


def test_half_closing_in_the_queue(one):
    """Once with a sign of life before it, once without."""
    for commented in (False, True):
        one.engine.reset()
        one.engine.play(Hang())
        one.engine.always(lambda request: [*CHAT.events])
        runs, _ = send(one, CHAT, True)
        one.engine.wait_for(1)
        waits, ident = send(one, CHAT, True)
        wait_until(lambda: gauges(one)["sparks_queued"] == 1, 5, what="a request in the queue")
        answer = waits.answer() if commented else None
        waits.half_close()
        time.sleep(0.1)
        assert gauges(one)["sparks_queued"] == 1
        runs.close()
        assert (answer or waits.answer()).read_all().endswith(CHAT.last) and row_now(one.db, ident)["status"] == 200


@pytest.fixture(scope="module")
def asking(stock, tmp_path_factory):
    """It does not wait for long until it asks again, nor for what comes back."""
    with Engine() as engine, started(engine, tmp_path_factory.mktemp("asking"), stock, "import watch; watch.AGAIN = watch.PATIENCE = 0.3",
                                     max_active=1) as gateway:
        gateway.engine = engine
        yield gateway


@pytest.mark.parametrize("leave", [*LEAVE, "vanish"])
@pytest.mark.parametrize("where", ["prefill", "mid-content"])
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "plain"])
def test_leaving_after_half_closing(asking, streams, where, leave):
    """Nothing comes of itself then: the client is asked again. One that vanished answers nothing."""
    begun = THOUGHT[:3] if streams else [Head(framing=len(WHOLE), type="application/json"), WHOLE[:9]]
    asking.engine.reset()
    asking.engine.play(*(begun if where == "mid-content" else []), Hang())
    connection, ident, request = half_closed(asking, CHAT, streams)
    if streams and where == "mid-content":
        next(connection.answer().events())
    assert not request.gone.wait(0.4)
    if leave == "vanish":
        go_deaf(connection.sock)
    else:
        left(connection, leave)
    assert request.gone.wait(5) and row_of(asking.db, ident)["status"] == 499
    idle(asking)
    connection.close()


def test_half_closing_a_request_that_cannot_be_nudged(one):
    """HTTP/1.0 has no interim answers: there it counts as leaving, as long as no answer has begun."""
    one.engine.play(Hang())
    connection, ident = one.client().open(), f"leaving-{next(IDS)}"
    request = connection.encode("POST", CHAT.path, CHAT.body(False), {"x-request-id": ident})
    connection.send(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    asked = one.engine.wait_for(1)[0]
    connection.half_close()
    assert asked.gone.wait(3) and row_of(one.db, ident)["status"] == 499
    connection.close()


# ---- a client that stops reading

@pytest.fixture(scope="module")
def stalling(stock, tmp_path_factory):
    with Engine() as engine, started(engine, tmp_path_factory.mktemp("stalling"), stock, max_active=8, stall_timeout=1,
                                     keepalive=0.5) as gateway:
        gateway.engine = engine
        yield gateway


BIG = chat_chunks(["x" * 60_000, "y"], usage=True)
FLOODS = {
    "a flood of events": (True, lambda: [Head(), BIG[0]] + [Send(BIG[1])] * 1000),
    "one large first event": (True, lambda: [Head(), chat_chunks(["x" * (24 << 20), "y"], usage=True)[1], Hang()]),
    "a large plain answer to a stream": (True, lambda: [Json(completion("x" * (24 << 20)))]),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_client_that_stops_reading(stalling, flood):
    """Its socket is full for longer than stall_timeout: it counts as gone, and its connection ends."""
    streams, steps = FLOODS[flood]
    stalling.engine.reset()
    stalling.engine.play(*steps())
    with stalled(stalling, streams) as (answer, ident):
        row = row_of(stalling.db, ident, 4)
        assert (row["status"], row["aborted"]) == (499, 1)
        idle(stalling, 1)
        stalling.engine.wait_idle()
        with pytest.raises((Truncated, ConnectionError)):   # what it did not take is lost, and it must learn so
            answer.read_all()


@contextmanager
def stalled(gateway, streams):
    """The head of an answer whose body is not read: (answer, id). Whatever comes of it, the client is gone in the end."""
    connection, ident = gateway.client(rcvbuf=4096).open(), f"leaving-{next(IDS)}"
    try:
        connection.start("POST", CHAT.path, CHAT.body(streams), {"x-request-id": ident})
        yield connection.answer(), ident
    finally:
        connection.reset()
        idle(gateway)


def test_connection_of_a_stalled_client_serves_nothing_more(stalling):
    """Another request on it would be answered in the middle of the first one's broken chunk."""
    stalling.engine.reset()
    stalling.engine.play(*FLOODS["a flood of events"][1]())
    with stalled(stalling, True) as (answer, ident):
        row_of(stalling.db, ident, 4)
        try:
            answer.connection.start("POST", CHAT.path, CHAT.body(False), {"x-request-id": (second := f"leaving-{next(IDS)}")})
            answer.read_all()
        except (Truncated, TimeoutError, ConnectionError) as error:
            rest = getattr(error, "data", b"")
        assert b"HTTP/1.1" not in rest and not rows(stalling.db, "id = ?", (second,))


def test_client_that_stops_reading_a_plain_answer(stalling):
    """The slot is free and the row written at once; the connection does not stay for ever."""
    stalling.engine.reset()
    stalling.engine.play(Json(completion("x" * (24 << 20))))
    with stalled(stalling, False) as (answer, ident):
        port = answer.connection.sock.getsockname()[1]
        assert row_of(stalling.db, ident)["status"] == 200
        idle(stalling, 1)
        wait_until(lambda: not serves(port), 6, what="the end of a connection that is not read")


def serves(port):
    """Whether a process holds a connection with that port at its other end."""
    with open("/proc/net/tcp") as table:
        return any(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "01" for line in table)


def test_slow_reader_is_not_gone(stalling):
    """A client that takes some bytes now and then is slow, and gets everything."""
    stalling.engine.reset()
    stalling.engine.play(BIG[0], *[BIG[1]] * 250, *BIG[2:])
    connection, ident = stalling.client().open(), f"leaving-{next(IDS)}"
    connection.start("POST", CHAT.path, CHAT.body(True), {"x-request-id": ident})
    answer, got, end = connection.answer(), 0, time.monotonic() + 1.6
    for data, _ in answer.pieces():
        got += len(data)
        if time.monotonic() < end:                  # for longer than the limit
            time.sleep(0.01)
    assert got > 250 * 60_000 and data.endswith(b"data: [DONE]\n\n")
    assert row_now(stalling.db, ident)["status"] == 200
    connection.close()


def test_connection_that_rests_is_no_stalled_one(stalling):
    """It waits for its next request for longer than stall_timeout."""
    stalling.engine.reset()
    with stalling.client().open() as connection:
        for streams in (False, True, False):
            answer = connection.post(CHAT.path, CHAT.body(streams))
            assert answer.status == 200 and answer.read_all()
            if not streams:
                assert not connection.ended(1.3)


def test_a_slow_readers_stream_is_ended_with_whole_chunks(gateway, engine):
    """The end comes while a chunk is half written: the error event must not land inside it."""
    front = gateway(drain=0.5)
    piece = sse(chunk({"content": "y" * 200_000}))
    engine.play(*chat_chunks("a")[:1], *[Send(piece)] * 40, Hang())
    answer = front.client(rcvbuf=4096, timeout=30).post(CHAT.path, CHAT.body(True))
    wait_until(lambda: gauge(front, "sparks_active") == 1, 3)
    front.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    error, before = failure(answer)
    assert error["code"] == "shutting_down" and len(before) > 1


# ---- clients that vanish

OPTIONS = """
import socket
from front.worker import Worker

handle_request = Worker.handle_request
names = "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"

def noted(self, listener, req, sock, addr):
    on = sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    print("keepalive", on, *(sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names), flush=True)
    return handle_request(self, listener, req, sock, addr)

Worker.handle_request = noted
"""
SOON = "import socket, tcp; tcp.KEEPALIVE = {socket.TCP_KEEPIDLE: 1, socket.TCP_KEEPINTVL: 1, socket.TCP_KEEPCNT: 2}"


def test_silent_clients_are_probed(tmp_path, stock):
    with Engine() as engine, started(engine, tmp_path, stock, OPTIONS) as gateway:
        assert gateway.client(key=False).get("/healthz").status == 200
        assert "keepalive 1 60 10 6\n" in gateway.log


@pytest.mark.parametrize("where", ["queue", "prefill", "stream"])
def test_a_client_that_vanishes(tmp_path, stock, where):
    """No FIN comes, and nothing is acknowledged any more: as with a machine that was switched off."""
    with Engine() as engine, started(engine, tmp_path, stock, SOON, max_active=1) as gateway:
        engine.always(lambda request: [*THOUGHT[:3], Hang()] if request.json().get("stream") else [Head(), Hang()])
        first, connection = gateway.client().open(), gateway.client().open()
        if where == "queue":
            first.start("POST", CHAT.path, chat_body(False))
            wait_until(lambda: gauges(gateway)["sparks_active"] == 1, 3)
        connection.start("POST", CHAT.path, chat_body(where == "stream"), {"x-request-id": "vanished"})
        if where == "stream":
            events = connection.answer().events()
            next(events), next(events), next(events)
        held = "sparks_queued" if where == "queue" else "sparks_active"
        wait_until(lambda: gauges(gateway)[held] == 1, 3)
        go_deaf(connection.sock)
        assert row_of(gateway.db, "vanished", 6)["status"] == 499
        first.close()
        idle(gateway)


def go_deaf(sock):
    """Have the kernel drop all that comes for a socket, probes too, before TCP sees it: a packet filter of one
    instruction, `return 0`."""
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(instruction)))


# ---- faults of our own

FAULTY = """
from front import app
import stream
from dialects import chat
from gevent import getcurrent

read, feed, write = chat.read, stream.ChatStream.feed, chat.write
headers_of, complete = app.response_headers, app.Front.complete
faults = {}                                         # greenlet -> what its request shall meet

def faulty_complete(self, call, path, environ, start_response):
    faults[getcurrent()] = environ.get("HTTP_X_FAULT")
    return complete(self, call, path, environ, start_response)

def faulty_read(body, fleet):
    if faults.get(getcurrent()) == "read":
        raise ZeroDivisionError("a fault in read")
    return read(body, fleet)

def faulty_feed(self, data):
    if b"BOOM" in data:
        raise ZeroDivisionError("a fault in feed")
    return feed(self, data)

def faulty_write(answer, ask):
    if b"BOOM" in stream.dumps(answer):
        raise ZeroDivisionError("a fault in write")
    return write(answer, ask)

def faulty_headers(call, environ):
    headers, fault = headers_of(call, environ), faults.get(getcurrent())
    if fault == "name":                             # the server refuses it
        return [*headers, ("no good name", "1")]
    if fault == "value":
        return [*headers, ("x-bad", "a\\r\\nb")]
    if fault == "two in one":
        return [*headers, ("x-bad", "a\\r\\nx-worse: b")]
    if fault == "headers":
        raise ZeroDivisionError("a fault in the headers")
    return headers

app.Front.complete, chat.read, stream.ChatStream.feed = faulty_complete, faulty_read, faulty_feed
chat.write, app.response_headers = faulty_write, faulty_headers
"""


@pytest.fixture(scope="module")
def faulty(stock, tmp_path_factory):
    with Engine() as engine, started(engine, tmp_path_factory.mktemp("faulty"), stock, FAULTY, max_active=1) as gateway:
        gateway.engine, gateway.traceback_allowed = engine, True
        yield gateway


@pytest.fixture
def broken(faulty):
    faulty.engine.reset()
    before = len(faulty.log)
    yield faulty
    idle(faulty)
    faulty.engine.wait_idle()
    assert "no-such-secret" not in faulty.log[before:]      # of a query string
    assert faulty.client().post(CHAT.path, CHAT.body(False)).status == 200


def fault(gateway, kind, streams, method="POST", query=""):
    """A request that meets that fault: (connection, id)."""
    connection, ident = gateway.client().open(), f"leaving-{next(IDS)}"
    connection.start(method, CHAT.path + query, CHAT.body(streams), {"x-request-id": ident, "x-fault": kind})
    return connection, ident


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "plain"])
def test_fault_in_a_dialects_read(broken, streams):
    connection, ident = fault(broken, "read", streams, query="?no-such-secret=1")
    answer = connection.answer()
    assert answer.status == 500 and answer.json()["error"]["code"] == "internal_error"
    row = row_now(broken.db, ident)
    assert (row["status"], row["error"], row["aborted"], row["model"]) == (500, "internal_error", 0, "")
    connection.close()


def test_fault_in_feed_before_the_first_event(broken):
    broken.engine.play(*chat_chunks("BOOM", usage=True)[1:2], Hang())
    connection, ident = fault(broken, "", True)
    answer = connection.answer()
    assert answer.status == 500 and answer.json()["error"]["code"] == "internal_error"
    assert row_now(broken.db, ident)["status"] == 500 and broken.engine.requests[0].gone.wait(10)
    connection.close()


def test_fault_in_feed_midway(broken):
    go = threading.Event()
    broken.engine.play(*chat_chunks("Hello there", usage=True)[:3], Wait(go), *chat_chunks("BOOM", usage=True)[1:2], Hang())
    connection, ident = fault(broken, "", True)
    answer = connection.answer()
    events = answer.events()
    assert [next(events).json()["choices"][0]["delta"].get("content") for _ in range(3)] == ["", "Hello", " there"]
    go.set()
    rest = list(events)
    assert [event.json()["error"]["code"] for event in rest] == ["internal_error"] and answer.complete
    row = row_now(broken.db, ident)
    assert (row["status"], row["error"], row["aborted"], row["completion_tokens"]) == (500, "internal_error", 0, 2)
    assert broken.engine.requests[0].gone.wait(10)
    connection.close()


def test_fault_in_write(broken):
    broken.engine.play(Json(completion("BOOM")))
    connection, ident = fault(broken, "", False)
    assert connection.answer().json()["error"]["code"] == "internal_error"
    row = row_now(broken.db, ident)
    assert (row["status"], row["error"], row["aborted"]) == (500, "internal_error", 0)
    connection.close()


@pytest.mark.parametrize("kind", ["name", "value", "two in one", "headers"])
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "plain"])
def test_refused_response_header(broken, streams, kind):
    """Such an answer never begins; what its request holds is let go of all the same, and it was no client that left."""
    broken.engine.play(*([*THOUGHT[:3], Hang()] if streams else [Json(completion("Hello there"))]))
    connection, ident = fault(broken, kind, streams, query="?no-such-secret=1")
    request = broken.engine.wait_for(1)[0]
    assert connection.answer().status == 500
    if streams:
        assert request.gone.wait(10)
    row = row_of(broken.db, ident)
    assert row["aborted"] == 0 and row["status"] == (500 if streams else 200)       # a plain answer was whole already
    connection.close()


def test_head_of_the_real_routes(one):
    for path, status in (("/v1/models", 200), ("/v1/usage", 200), (CHAT.path, 405), ("/healthz", 200)):
        answer = one.client().request("HEAD", path)
        assert (answer.status, answer.read_all()) == (status, b"")
        answer.close()


# ---- the figure

def test_worst_time(record_property, capsys):
    """How long the engine, or the queue, took at most to know that a client had left."""
    if not WORST:
        pytest.skip("nobody left")
    groups = {"matrix": {}, "bytes behind the request": {}}
    for what, took in WORST.items():
        groups["bytes behind the request" if "behind" in what[2] else "matrix"][what] = took
    for name, found in groups.items():
        if found:
            what, worst = max(found.items(), key=lambda pair: pair[1])
            record_property(f"worst_ms, {name}", round(worst, 1))
            with capsys.disabled():
                print(f"\nleaving, {name}: {len(found)} cases, median {sorted(found.values())[len(found) // 2]:.1f} ms, "
                      f"worst {worst:.1f} ms ({', '.join(what)})", end="")
            assert sorted(found.values())[len(found) * 9 // 10] < 1000
