"""The pump in the worst of company, with real sockets: one stream's trouble is nobody else's.

What else ends a stream early stands in test_leaving.py, framing in test_http1.py, time limits in test_chat.py.
"""
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.client import Truncated
from support.engine import Engine, Hang, Head, Json, Pause, Raw, Send, Wait, chat_chunks, completion
from support.gateway import started
from support.observe import descriptors, gauge, idle, resident
from support.processes import wait_until
from support.rows import row_of, rows

PATH = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "stream": True, "stream_options": {"include_usage": True}}
EVENTS = chat_chunks("Hello there my friend", reasoning="Let me think", usage=True)
ABORTS = 500

# `alive` is called by the sweep; and the sweep is quick.
FAULTY = """
import pump, stream
alive = stream.ChatStream.alive
def faulty(self, note="keep-alive"):
    if self.thoughts:
        raise ZeroDivisionError("a fault in the sweep")
    return alive(self, note)
stream.ChatStream.alive, pump.TICK = faulty, 0.05
"""


@pytest.fixture(scope="module")
def house(stock, tmp_path_factory):
    with Engine() as engine, started(engine, tmp_path_factory.mktemp("pump"), stock, FAULTY, max_active=64, max_queued=1000,
                                     keepalive=0.2) as gateway:
        gateway.engine, gateway.traceback_allowed = engine, True
        yield gateway


@pytest.fixture
def calm(stock, tmp_path):
    """A gateway without the fault, whose streams may be silent: fifty clients and their engine share one Python."""
    with Engine() as engine, started(engine, tmp_path, stock, max_active=64, max_queued=1000) as gateway:
        gateway.engine = engine
        yield gateway


@pytest.fixture
def one(house):
    house.engine.reset()
    yield house
    idle(house)
    house.engine.wait_idle()
    assert not house.engine.faults, house.engine.faults[0]


def begin(gateway, ident, n=1, **client):
    """A stream that has begun: (answer, its events)."""
    connection = gateway.client(**client).open()
    connection.start("POST", PATH, {**BODY, "n": n}, {"x-request-id": ident})
    answer = connection.answer()
    assert answer.status == 200
    return answer


def test_the_sweep_raises(one):
    """Its stream ends with an error event; the others, silent as long, get their comments and their end."""
    go = threading.Event()
    one.engine.play(EVENTS[0], Wait(go), *EVENTS[1:])
    other = begin(one, "pump-other")
    one.engine.play(*EVENTS[:3], Hang())
    events = list(begin(one, "pump-sweep").events())
    assert events[-1].json()["error"]["code"] == "internal_error"
    assert row_of(one.db, "pump-sweep")["status"] == 500
    time.sleep(0.3)
    go.set()
    rest = list(other.events())
    assert any(event.comment for event in rest) and rest[-1].data == "[DONE]"
    assert row_of(one.db, "pump-other")["status"] == 200


def test_bytes_after_the_last_chunk(one):
    """They are nobody's: the connection serves no other request."""
    one.engine.play(Head(), *map(Send, EVENTS), Raw(b"0\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong"))
    first = list(begin(one, "pump-behind-1").events())
    one.engine.play(*EVENTS)
    second = list(begin(one, "pump-behind-2").events())
    assert [event.data for event in first] == [event.data for event in second] and first[-1].data == "[DONE]"
    assert one.engine.requests[0].connection != one.engine.requests[1].connection


def test_a_reader_of_single_bytes(one):
    """It gets every byte, in its time; a stream beside it isn't held up, and what waits for it isn't kept in memory."""
    wide = chat_chunks(["w" * 4000, "end"], usage=True)
    one.engine.play(wide[0], *[wide[1]] * 2000, *wide[2:])
    slow, before = begin(one, "pump-slow", rcvbuf=4096, timeout=60), resident(one)
    one.engine.play(*[step for event in EVENTS for step in (event, Pause(0.05))])
    began, other = time.monotonic(), begin(one, "pump-quick")
    got = b""
    for _ in range(50):
        got += slow.connection.sock.recv(1)
        time.sleep(0.01)
    assert list(other.events())[-1].data == "[DONE]" and time.monotonic() - began < 10
    assert resident(one) - before < 4 << 20             # of the 8 MB that the engine has for it
    slow.connection.buffer += got
    assert sum(event.data.count("wwww") == 1000 for event in slow.events() if event.data) == 2000


def test_500_streams_aborted_at_random(calm):
    """Each at its own moment, most with others in the same turn of the loop: nothing stays behind."""
    calm.engine.always(lambda request: [step for event in EVENTS[:1] + EVENTS[1:5] * 10 for step in (event, Pause(0.004))] + [Hang()])
    files, dice = len(descriptors(calm)), random.Random(7)
    ways = [(number, dice.uniform(0, 0.2), dice.choice(["close", "reset"])) for number in range(ABORTS)]

    def abort(number, patience, leave):
        connection = calm.client(timeout=60).open()
        connection.start("POST", PATH, BODY, {"x-request-id": f"pump-abort-{number}"})
        answer = connection.answer()
        time.sleep(patience)
        getattr(answer, leave)()
        row_of(calm.db, f"pump-abort-{number}", 10)
        connection.close()

    with ThreadPoolExecutor(50) as pool:
        list(pool.map(lambda way: abort(*way), ways))
    idle(calm)
    found = rows(calm.db, "id LIKE 'pump-abort-%'")
    assert len(found) == ABORTS and not [row for row in found if row["status"] != 499 or not row["aborted"]]
    calm.engine.wait_idle()
    assert gauge(calm, "sparks_active") == 0 and len(descriptors(calm)) <= files + 2


def test_sigterm_with_streams_in_every_state(stock, tmp_path):
    """One flows, one is silent, one's client does not read: the first ends well, the others with an error event, or cut."""
    with Engine() as engine, started(engine, tmp_path, stock, max_active=8, drain=1) as gateway:
        engine.play(*[step for event in EVENTS for step in (event, Pause(0.05))])
        flowing = begin(gateway, "pump-flows")
        engine.play(*EVENTS[:3], Hang())
        silent = begin(gateway, "pump-silent")
        wide = chat_chunks(["w" * 60_000, "end"], usage=True)
        engine.play(wide[0], *[wide[1]] * 500, Hang())
        stuck = begin(gateway, "pump-stuck", rcvbuf=4096)
        gateway.process.send_signal(signal.SIGTERM)
        assert list(flowing.events())[-1].data == "[DONE]"
        assert list(silent.events())[-1].json()["error"]["code"] == "shutting_down"
        gateway.process.wait(15)
        statuses = {row["id"]: row["status"] for row in rows(gateway.db, "id LIKE 'pump-%'")}
        assert statuses == {"pump-flows": 200, "pump-silent": 503, "pump-stuck": end_of(stuck)}
        engine.wait_idle()


def end_of(stuck):
    """The status that belongs to what a client reads which did not before. A kernel with large buffers takes all of the
    stream and its error event from the gateway, one with small ones keeps the gateway waiting until it cuts the stream."""
    try:
        last = list(stuck.events())[-1]
    except (Truncated, ConnectionError):
        return 499
    assert last.json()["error"]["code"] == "shutting_down"
    return 503


@pytest.mark.parametrize("stall_timeout", [0.3, 1.2])
def test_an_answer_that_is_finished_is_no_silence(stock, tmp_path, stall_timeout):
    """However soon an engine's silence is an error: without [DONE], with usage or not, and where nobody can tell how many
    choices there will be (`n` is a text). One that is not finished is an error all the same."""
    with Engine() as engine, started(engine, tmp_path, stock, stall_timeout=stall_timeout, keepalive=0.2) as gateway:
        begun = {}
        for number, (n, usage) in enumerate([(1, True), (1, False), ("1", True), ("1", False)]):
            events = chat_chunks("Hello there", usage=usage, done=False)
            engine.play(*events, Hang())
            begun[f"finished-{number}"] = (begin(gateway, f"finished-{number}", n=n), len(events) + 1)
        engine.play(*chat_chunks("Hello there")[:2], Hang())
        silent = begin(gateway, "silent")
        for name, (answer, count) in begun.items():
            said = [event.data for event in answer.events() if event.data]
            assert said[-1] == "[DONE]" and len(said) == count and row_of(gateway.db, name)["status"] == 200
        assert "no token for" in list(silent.events())[-1].data and row_of(gateway.db, "silent")["status"] == 504
# ---- who takes too little

@pytest.fixture
def narrow(stock, tmp_path):
    """A gateway that keeps 3 MB of answers, and asks much of its readers."""
    patch = "import call, pump, front.app; call.ROOM_WAIT = 1; front.app.LEAST_RATE = pump.LEAST_RATE = 1 << 20"
    with Engine() as engine, started(engine, tmp_path, stock, patch, max_bodies="3 MB", max_body="1 MB", stall_timeout=1) as gateway:
        gateway.engine = engine
        yield gateway


def test_answers_that_nobody_reads_are_counted(narrow):
    """They make room as their readers are let go; meanwhile the next one waits, and is refused in the end."""
    body = {"messages": BODY["messages"]}
    large = Json(completion("x" * 700_000))
    narrow.engine.always(lambda request: [large])
    slow = [narrow.client(rcvbuf=4096).open() for _ in range(4)]
    for one in slow:
        one.start("POST", PATH, body)
    statuses = [one.answer().status for one in slow]
    assert set(statuses) <= {200, 503} and 200 in statuses
    for one in slow:
        one.close()
    wait_until(lambda: narrow.client().post(PATH, body).status == 200, 10)


def test_a_large_event_is_counted(narrow):
    """While it comes, with all that is made of it. One for which there is no room ends the stream."""
    first, *_, end, done = chat_chunks("Hello")
    for size, fits in ((300_000, True), (900_000, False)):
        narrow.engine.play(first, *chat_chunks("x" * size)[1:-2], end, done)
        *_, last = begin(narrow, f"pump-{size}").events()
        assert (last.data == "[DONE]") is fits and ("too many large answers" in last.data) is not fits
    assert gauge(narrow, "sparks_active") == 0


def test_a_reader_of_a_stream_that_takes_too_little(narrow):
    """A byte now and then is no reading: the slot is not its for ever."""
    narrow.engine.play(Head(), Send(EVENTS[0]), *[Send(EVENTS[1] * 200)] * 2000, *EVENTS[2:])
    answer = begin(narrow, "pump-slow", rcvbuf=4096)
    assert row_of(narrow.db, "pump-slow", 10)["aborted"]
    answer.close()
