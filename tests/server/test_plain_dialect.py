"""A dialect that is none of ours, in the routes of a real gateway: what an API with events of its own needs is there."""
import sys

import pytest

from support.chat import HELLO
from support.engine import Json, chat_chunks, completion
from support.gateway import Gateway

PATH = "/v1/plain"


class Plain(Gateway):
    def command(self):
        return [sys.executable, "-m", "tests.support.plain_dialect"]


@pytest.fixture
def front(engine, stock, tmp_path):
    gateway = Plain(tmp_path, engine.url, stock)
    try:
        yield gateway.wait_alive().wait_ready()
    finally:
        gateway.stop()
    gateway.check_log()


def test_a_stream_in_its_own_events(front, engine):
    engine.play(*chat_chunks("Hello there", reasoning="Hm", usage=True))
    events = list(front.client().post(PATH, {"messages": HELLO, "stream": True}).events())
    said = [(event.name, event.json().get("kind")) for event in events if event.comment is None]
    assert said[0] == ("delta", "reasoning") and ("delta", "text") in said and said[-1] == ("end", None)
    assert ("piece", "finish") in said and ("piece", "usage") in said


def test_two_at_once(front, engine):
    """gevent's patches are in force: one request that waits holds up nobody."""
    engine.always(lambda request: [Json(completion("Hello there"))])
    first = front.client().open()
    first.send_head("POST", PATH, {"content-length": 100})
    assert front.client().post(PATH, {"messages": HELLO}).json()["choices"][0]["message"]["content"] == "Hello there"
    first.close()
