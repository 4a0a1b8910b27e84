"""What clients do to the wire before, and instead of, asking a model: thousands of requests at once, heads and bodies without an end,
connections that only wait. That none of it holds up the event loop is looked at by the gateway's own monitor, in each test."""
import json
import select
import threading
import time

import pytest

from support.engine import Engine, Hang, Json, completion, embeddings
from support.gateway import WITH_VECTORS, started
from support.observe import idle, resident
from support.processes import wait_until

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
MB = 1 << 20


# ---- many requests of one connection

FLOODS = {
    "help": (b"GET /help?format=html HTTP/1.1\r\nHost: x\r\n\r\n", 120, 200),
    "help, for each name its own": (b"GET /help?format=html HTTP/1.1\r\nHost: %d.example\r\n\r\n", 120, 200),
    "llms.txt": (b"GET /llms.txt HTTP/1.1\r\nHost: x\r\n\r\n", 120, 200),
    "healthz": (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 800, 200),
    "no key": (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", 500, 401),
    "nothing there": (b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n", 300, 404),
    "root": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 300, 302),
    "options": (b"OPTIONS /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 300, 204),
    "metrics": (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200, 200),
    "an endless Accept": (b"GET /help HTTP/1.1\r\nHost: x\r\nAccept: " + b"a/b;q=0.1,x/y;" * 1100 + b"\r\n\r\n", 100, 200),
}


def flood(gateway, request, times):
    """So many requests at once on one connection: how many answers came with which status line."""
    with gateway.client(timeout=60).open() as connection:
        requests = b"".join(request % number if b"%d" in request else request for number in range(times))
        sender = threading.Thread(target=lambda: connection.send(requests))
        sender.start()
        statuses = []
        for _ in range(times):
            answer = connection.answer(request.split()[0].decode())
            answer.read_all()
            statuses.append(answer.status)
        sender.join()
    return statuses


@pytest.mark.parametrize("what", FLOODS)
def test_many_requests_of_one_connection_hold_up_nobody(shared, what):
    request, times, status = FLOODS[what]
    done, waited = threading.Event(), []

    def others():
        with shared.client(key=False).open() as connection:
            while not done.is_set():
                began = time.monotonic()
                connection.get("/healthz").read_all()
                waited.append(time.monotonic() - began)
    thread = threading.Thread(target=others)
    thread.start()
    began = time.monotonic()
    try:
        assert flood(shared.gateway, request, times) == [status] * times
    finally:
        done.set()
        thread.join()
    took = time.monotonic() - began
    assert len(waited) > 1 and sorted(waited)[len(waited) // 2] < max(0.5 * took, 0.1)    # one that is held up waits for all


def test_many_connections_at_once_hold_up_nobody(shared):
    request, _, status = FLOODS["help"]
    threads = [threading.Thread(target=flood, args=(shared.gateway, request, 10)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.client(key=False).get("/help?format=html").status == status


# ---- heads

def test_heads_beyond_their_bound(shared):
    """They are refused when 64 KB of them have come, and not when they end, which they need not."""
    for rest in (b"", b"\r\n"):
        with shared.client(key=False).open() as connection:
            connection.send(b"GET /help HTTP/1.1\r\nHost: x\r\n" + (b"X: " + b"a" * 16_000 + b"\r\n") * 5 + rest)
            answer = connection.answer("GET")
            assert answer.status == 431 and "65536 bytes in all" in answer.json()["error"]["message"] and connection.ended()


def test_heads_within_their_bound(shared):
    fields = [("X", "a" * 16_000)] * 3 + [("Y", "b" * 100)] * 90
    assert shared.client(key=False).get("/healthz", fields).status == 200


def test_many_large_heads_at_once(shared):
    """They cost what came of them up to the bound."""
    head = b"GET / HTTP/1.1\r\nHost: x\r\n" + (b"X: " + b"a" * 16_000 + b"\r\n") * 97
    connections = [shared.client(key=False).open() for _ in range(20)]
    for connection in connections:
        connection.sock.setblocking(False)
        connection.sock.send(head)
    for connection in connections:
        assert connection.answer("GET").status == 431
        connection.close()


def test_many_small_bodies_at_once(shared):
    """Each takes some milliseconds, which are not one run of the loop together."""
    content = [{"role": "user", "content": "x"}] * 700
    shared.engine.always(lambda request: [Json(completion("Hello"))])
    body = json.dumps({"messages": content}).encode()
    connections = [shared.client().open() for _ in range(40)]
    for connection in connections:
        connection.send_head("POST", "/v1/chat/completions", [("Content-Length", str(len(body)))])
        connection.send(body[:-1])
    for connection in connections:
        connection.send(body[-1:])
    assert {connection.answer().status for connection in connections} <= {200, 429}


# ---- time

HASTY = """
from front import body, connections, heads, views
views.KEYLESS_READ = 0.5
heads.TIME, heads.KEEPALIVE = 0.6, 1
body.GRACE, body.RATE = 0.5, 100
connections.MOST, connections.MOST_OF_ONE = 40, 25
"""


@pytest.fixture(scope="module")
def hasty(stock, tmp_path_factory):
    """It has little time, and little room for connections."""
    with Engine() as engine, started(engine, tmp_path_factory.mktemp("hasty"), stock, HASTY) as gateway:
        gateway.engine = engine
        yield gateway


def drip(connection, data, seconds):
    """Send it a byte at a time, until there is an answer."""
    try:
        for byte in data:
            connection.send(bytes([byte]))
            if select.select([connection.sock], [], [], seconds)[0]:
                return
    except OSError:
        pass


def test_a_head_that_drips(hasty):
    with hasty.client().open() as connection:
        drip(connection, b"GET /help HTTP/1.1\r\nX: " + b"a" * 100, 0.03)
        answer = connection.answer("GET")
        assert answer.status == 408 and "its head has not come" in answer.json()["error"]["message"] and connection.ended()


def test_an_idle_connection_ends_without_a_word(hasty):
    with hasty.client().open() as connection:
        assert connection.get("/healthz").read_all() and not connection.ended(0.3) and connection.ended(10)


@pytest.mark.parametrize("framing", [{"content-length": 1000}, {"transfer-encoding": "chunked"}], ids=["length", "chunks"])
def test_a_body_that_drips(hasty, framing):
    """Never silent for long, and still none that ends."""
    with hasty.client().open() as connection:
        connection.send_head("POST", CHAT, framing)
        drip(connection, b" " * 100 if "content-length" in framing else b"1\r\n \r\n" * 50, 0.03)
        answer = connection.answer()
        assert answer.status == 408 and answer.json()["error"]["code"] == "request_timeout"
        assert "too slowly" in answer.json()["error"]["message"] and connection.ended()


def test_a_small_body_on_a_bad_line(hasty):
    body = json.dumps({"messages": MESSAGES}).encode()
    with hasty.client().open() as connection:
        connection.send_head("POST", CHAT, {"content-length": len(body)})
        drip(connection, body, 0.008)
        assert connection.answer().status == 200


def test_answers_that_nobody_reads(hasty):
    """Without a key the connection does not stay for long."""
    connection = hasty.client(key=False, rcvbuf=4096).open()
    connection.sock.setblocking(False)
    connection.sock.send(FLOODS["help"][0] * 400)

    def is_cut():
        try:
            connection.sock.send(b"G")
        except BlockingIOError:
            return False
        except OSError:
            return True
    wait_until(is_cut, 5, what="the end of a connection that is not read")


def is_over(connection):
    return bool(select.select([connection.sock], [], [], 0)[0])


def test_idle_connections_give_way(hasty):
    """The oldest ones, and those that drip a head as well; one in the middle of its request stays."""
    hasty.engine.play(Hang())
    with hasty.client().open() as busy:
        busy.start("POST", CHAT, {"messages": MESSAGES, "stream": True})
        hasty.engine.wait_for(1)
        held = [hasty.client().open() for _ in range(60)]
        for connection in held[::2]:
            connection.send(b"GET /help HT")
        for _ in range(3):
            assert hasty.client(key=False).get("/healthz").status == 200
        wait_until(lambda: sum(map(is_over, held)) >= 35, 5)
        assert is_over(held[0]) and is_over(held[20]) and not hasty.engine.requests[-1].gone.wait(0.1)
        for connection in held:
            connection.close()
    idle(hasty)
    hasty.engine.reset()


# ---- what is refused is let go of

NO_GARBAGE = "import gc; gc.disable(); gc.enable = gc.collect = lambda *_: None"
SIZE = 8 * MB


@pytest.fixture(scope="module")
def hoarding(stock, tmp_path_factory):
    """Its garbage is not collected: what is in a cycle stays for ever."""
    with Engine() as engine, started(engine, tmp_path_factory.mktemp("hoarding"), stock, NO_GARBAGE, max_body="10 MB") as gateway:
        gateway.engine = engine
        gateway.limited = gateway.client(gateway.add_key("limited"))
        gateway.keys("limit", "limited", "--rpm", "1")
        gateway.limited.post(CHAT, {"messages": MESSAGES})
        yield gateway


def ask(**fields):
    return json.dumps({"messages": [{"role": "user", "content": "x" * SIZE}], **fields}).encode()


def cut(gateway, data):
    """A client that leaves in the middle of its body."""
    with gateway.client().open() as connection:
        connection.send_head("POST", CHAT, {"content-length": len(data) + 1})
        connection.send(data)


def left(gateway, data):
    """One that leaves while the engine works."""
    gateway.engine.play(Hang())
    with gateway.client().open() as connection:
        connection.start("POST", CHAT, data)
        gateway.engine.wait_for(1)
    gateway.engine.reset()


REFUSED = {
    "unknown model": lambda gateway: gateway.client().post(CHAT, ask(model="none")).status == 404,
    "unknown model, streamed": lambda gateway: gateway.client().post(CHAT, ask(model="none", stream=True)).status == 404,
    "Messages": lambda gateway: gateway.client().post("/v1/messages", ask(model="none", max_tokens=5)).status == 404,
    "bad JSON": lambda gateway: gateway.client().post(CHAT, ask()[:-1]).status == 400,
    "bad field": lambda gateway: gateway.client().post(CHAT, ask(stream="x")).status == 400,
    "too large": lambda gateway: gateway.client().post(CHAT, [ask(), b"x" * 3 * MB], chunked=True).status == 413,
    "no chunk": lambda gateway: gateway.client().post(CHAT, [ask()[:-1]], chunked=True).status == 400,
    "over its limit": lambda gateway: gateway.limited.post(CHAT, ask()).status == 429,
    "over its limit, streamed": lambda gateway: gateway.limited.post(CHAT, ask(stream=True)).status == 429,
    "cut": lambda gateway: cut(gateway, ask()) is None,
    "left": lambda gateway: left(gateway, ask()) is None,
    "left, streamed": lambda gateway: left(gateway, ask(stream=True)) is None,
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_bodies_are_let_go_of(hoarding, what):
    """Whatever refuses them, the process weighs no more for it. A first one makes the room that is used again."""
    assert REFUSED[what](hoarding)
    idle(hoarding)
    before = resident(hoarding)
    for _ in range(4):
        assert REFUSED[what](hoarding)
    idle(hoarding)
    wait_until(lambda: resident(hoarding) - before < 2.5 * SIZE, 3, what="the memory of refused bodies")


def test_bodies_that_an_engine_is_not_there_for(hoarding):
    hoarding.engine.stop()
    try:
        for streams in (False, True):
            before = resident(hoarding)
            for _ in range(4):
                assert hoarding.client().post(CHAT, ask(stream=streams)).status in (502, 503)
            assert resident(hoarding) - before < 2.5 * SIZE
    finally:
        hoarding.engine.start()
        hoarding.wait_ready()


def test_large_answers_leave_no_memory_behind(engine, tmp_path, stock):
    """A block that is free goes back to the system, and is not kept for later between smaller ones."""
    answer = Json(embeddings(*[[number / 7 for number in range(4096)]] * 600))
    engine.always(lambda request: [answer])
    with started(engine, tmp_path, stock, config=WITH_VECTORS) as gateway:
        weights = []
        for _ in range(4):
            size = len(gateway.client().post("/v1/embeddings", {"model": "vectors", "input": ["x"] * 600}).read_all())
            idle(gateway)
            weights.append(resident(gateway))
        assert weights[-1] - weights[0] < size, f"{[weight // MB for weight in weights]} MB after answers of {size // MB}"
