"""How a request ends when something of the gateway's own goes wrong with it, or when all ends at once."""
import os
import signal
import time

import pytest

from support.engine import Engine, Hang, Json, Pause, Reset, chat_chunks, completion
from support.gateway import started
from support.observe import idle
from support.processes import listens, wait_until
from support.rows import rows

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]

# Each step of a request's end but those that give the slot back and write the row.
EVERY_STEP_FAILS = """
import call, counting, log, metrics
from engines import http1

def fails(*_, **__):
    raise ZeroDivisionError("a fault of a step")

stop = call.ClientWatch.stop
call.ClientWatch.stop = lambda self: (stop(self), fails())
http1.Pool.give = counting.Tally.figures = fails
call.Call.bound_writes = call.Call.stop_counting = metrics.Metrics.note = log.RequestLog.note = fails
"""
NO_ROW_CAN_BE_MADE = """
from store.ledger import Row

Row.tokens = property(lambda row: 1 / 0)
"""
NO_ROW_IS_WRITTEN = """
from store.ledger import Ledger

def fails(*_):
    raise ZeroDivisionError("a fault of the ledger")

Ledger.write = fails
"""


def ask(gateway, ident, streams):
    with gateway.client(timeout=5).post(PATH, {"messages": HELLO, "stream": streams}, {"x-request-id": ident}) as answer:
        said = answer.read_all()
    assert answer.status == 200 and (said.endswith(b"data: [DONE]\n\n") if streams else b'"stop"' in said)


@pytest.mark.parametrize("patch", [EVERY_STEP_FAILS, NO_ROW_CAN_BE_MADE, NO_ROW_IS_WRITTEN],
                         ids=["every step", "the row", "the ledger"])
def test_a_step_that_fails_keeps_neither_slot_nor_row(stock, tmp_path, patch):
    with Engine() as engine, started(engine, tmp_path, stock, patch, max_active=2) as gateway:
        gateway.traceback_allowed = True
        for number in range(6):
            engine.play(*chat_chunks("Hi")) if number % 2 else engine.play(Json(completion("Hi")))
            ask(gateway, f"ends-{number}", streams=bool(number % 2))
        idle(gateway)
        found = rows(gateway.db, "id LIKE 'ends-%'")
        assert [row["status"] for row in found] == ([] if patch is NO_ROW_IS_WRITTEN else [200] * 6)
        assert gateway.log.count("a step of a request's end failed") >= 6


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
def test_a_generation_that_an_engine_gave_up_is_not_run_twice(shared, streams):
    """It takes the request on a connection that was used before, works for a while, and resets."""
    engine, body = shared.engine, {"messages": HELLO, "stream": streams}
    engine.always([Json(completion("Hi"))])
    shared.client().post(PATH, {"messages": HELLO}).json()
    engine.always([Pause(0.5), Reset()])
    answer = shared.client().post(PATH, body)
    assert answer.status == 502 and "may have worked on it" in answer.json()["error"]["message"]
    asked = [request for request in engine.requests if request.path.endswith(PATH)]
    assert len(asked) == 2 and asked[0].connection == asked[1].connection


@pytest.mark.parametrize("signals", [1, 2])
def test_the_end_while_figures_are_awaited(stock, tmp_path, signals):
    """Their client has left; its row is written all the same."""
    with Engine() as engine, started(engine, tmp_path, stock, drain=0) as gateway:
        engine.play(*chat_chunks("Hi", done=False), Hang())
        with gateway.client().post(PATH, {"messages": HELLO, "stream": True}, {"x-request-id": "ends"}) as answer:
            events = answer.events()
            while next(events).json()["choices"][0]["finish_reason"] is None:
                pass
        time.sleep(0.1)
        for _ in range(signals):
            os.kill(gateway.pid, signal.SIGINT)
        gateway.process.wait(30)
        row, = rows(gateway.db, "id = 'ends'")
        assert (row["status"], row["counted"], row["completion_tokens"]) == (499, "gateway", 2)
        engine.wait_idle()


def test_the_end_at_once_in_every_state(stock, tmp_path):
    """A second Ctrl-C: what flows, waits for its first token, waits for a slot or for a client that takes nothing ends with
    an error event where its client reads, and each has its row."""
    with Engine() as engine, started(engine, tmp_path, stock, max_active=4, drain=30, keepalive=0.2) as gateway:
        chunks = chat_chunks(["w" * 60_000, "end"], usage=True)
        plays = {"flows": [*chunks[:2], Hang()], "prefill": [Hang()], "plain": [Hang()],
                 "stuck": [chunks[0], *[chunks[1]] * 500, Hang()], "queued": []}
        open_ones = {}
        for name, steps in plays.items():
            engine.play(*steps) if steps else None
            connection = gateway.client(timeout=20, rcvbuf=4096 if name == "stuck" else None).open()
            connection.start("POST", PATH, {"messages": HELLO, "stream": name != "plain"}, {"x-request-id": f"once-{name}"})
            open_ones[name] = connection
            if name == "plain":
                time.sleep(0.3)
            else:
                connection.head_of_answer = connection.answer()
        os.kill(gateway.pid, signal.SIGINT)
        wait_until(lambda: not listens(gateway.settings["bind"]), 5)        # two at once would be one
        os.kill(gateway.pid, signal.SIGINT)
        began = time.monotonic()
        for name in ("flows", "prefill", "queued"):
            last = list(open_ones[name].head_of_answer.events())[-1]
            assert last.json()["error"]["code"] == "shutting_down", name
        assert open_ones["plain"].answer().json()["error"]["code"] == "shutting_down"
        gateway.process.wait(30)
        assert time.monotonic() - began < 15
        statuses = {row["id"]: row["status"] for row in rows(gateway.db, "id LIKE 'once-%'")}
        assert statuses == {f"once-{name}": 503 for name in plays}
        engine.wait_idle()
