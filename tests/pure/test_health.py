"""How an engine is: its states, what a failed look says, and what clients and the owner are told."""
import pytest

from engines.failures import from_engine
from engines.health import MOST_WAITS, SERVES, STATES, Health, Trouble
from engines.kinds import OTHER
from front.screen import for_how_long, told
from store.states import State

REFUSED = Trouble("off", "connection refused", sure=True)
CLOSED = Trouble("off", "it closed the connection")
SLOW = Trouble("busy", "it has not answered")
KEY = Trouble("misconfigured", "it wants another key")
STUCK = Trouble("stuck", "it works on nothing", sure=True)
WELL = None


@pytest.mark.parametrize("looks, word", [
    ([], "loading"),
    ([WELL], "up"),
    ([SLOW], "loading"),                               # nobody has seen it work yet
    ([CLOSED], "off"), ([KEY], "misconfigured"),       # nor is there anything to be kept
    ([WELL, CLOSED], "up"), ([WELL, KEY], "up"), ([WELL, CLOSED, CLOSED], "off"), ([WELL, KEY, CLOSED], "off"),
    ([WELL, CLOSED, WELL, CLOSED], "up"),
    ([WELL, REFUSED], "off"),
    ([WELL, SLOW], "busy"), ([WELL, *[SLOW] * 20], "busy"), ([WELL, SLOW, WELL], "up"),
    ([WELL, SLOW, CLOSED], "busy"), ([WELL, CLOSED, SLOW, CLOSED], "busy"), ([WELL, SLOW, CLOSED, CLOSED], "off"),
    ([WELL, STUCK, SLOW], "stuck"), ([WELL, STUCK, REFUSED], "off"), ([WELL, STUCK, SLOW, WELL], "up"),
    ([WELL, REFUSED, SLOW], "loading"), ([WELL, REFUSED, SLOW, WELL], "up"),
], ids=str)
def test_states_after_looks(looks, word):
    health = Health(0)
    for now, look in enumerate(looks, 1):
        if look is WELL:
            health.is_well(now)
        else:
            health.is_troubled(look, now)
    assert health.word == word and health.serves == (word in SERVES)
    assert (health.reason is None) == (word == "up")
    troubles = [look for look in looks if look]
    assert health.error is None or health.error.endswith(troubles[-1].reason) or STUCK in looks


def test_draining():
    """It is well and gets nothing; what else becomes of it shows, and it comes back as it was."""
    health = Health(0)
    health.drain(True, 1)
    assert health.word == "loading"                    # nobody has seen it work yet
    health.is_well(2)
    for now, look in enumerate([WELL, CLOSED, SLOW, WELL], 3):
        health.is_well(now) if look is WELL else health.is_troubled(look, now)
        assert (health.word, health.since, health.serves, health.answers) == ("draining", 2, False, True)
    health.is_troubled(REFUSED, 7)
    assert (health.word, health.answers) == ("off", False)
    health.is_well(8)
    health.drain(True, 9)
    assert (health.word, health.since) == ("draining", 8) and health.told().startswith("draining: ")
    health.drain(False, 10)
    assert (health.word, health.since, health.serves) == ("up", 10, True)
    health.drain(False, 11)
    assert health.since == 10 and health.error == "off: connection refused"
    health.is_troubled(SLOW, 12)
    health.drain(False, 13)                            # as each reload says
    assert (health.word, health.since) == ("busy", 12)


def test_since_when():
    health = Health(10)
    health.is_well(20)
    health.is_well(30)
    assert health.since == 20
    health.is_troubled(REFUSED, 40)
    health.note("off", "no such name", 50)             # another reason is the same state
    assert (health.since, health.told(), health.error) == (40, "off: no such name", "off: no such name")
    health.is_well(60)
    assert (health.since, health.told(), health.error) == (60, "up", "off: no such name")


@pytest.mark.parametrize("word", STATES)
def test_when_to_come_back(word):
    """Soon in the beginning, later as it lasts; whole seconds within bounds, also where the clock is set back."""
    health = Health(1000)
    health.note(word, "x", 1000)
    waits = [health.retry_after(1000 + age) for age in (-500, 0, 1, 20, 100, 86400)]
    assert waits == sorted(waits) and all(isinstance(wait, int) and 1 <= wait <= 60 for wait in waits)
    assert waits[-1] == MOST_WAITS.get(word, 5)
    assert waits[0] == (60 if word == "misconfigured" else 5)
    assert waits[3] == {"misconfigured": 60, "off": 10, "stuck": 10, "loading": 10}.get(word, 5)   # half as long as it has lasted


LOADING = b'{"error":{"message":"Loading model","type":"unavailable_error","code":503}}'


@pytest.mark.parametrize("status, body, word, words", [
    (503, LOADING, "loading", "loading"), (503, b"", "off", "503"), (502, b"<html>Bad Gateway", "off", "502"),
    (401, b"", "misconfigured", "SPARKS_UPSTREAM_KEY"), (403, b"", "misconfigured", "SPARKS_UPSTREAM_KEY"),
    (404, b"", "misconfigured", "404"), (307, b"", "misconfigured", "307"), (429, b"", "busy", "429"),
    (204, b"", "misconfigured", "204"),
])
def test_what_a_refused_list_says(status, body, word, words):
    trouble = OTHER.unlisted(status, body)
    assert trouble.word == word and words in trouble.reason and not trouble.sure


@pytest.mark.parametrize("status, body, word", [(503, LOADING, "loading"), (503, b"", "off"), (500, b"{}", "off")])
def test_what_an_ailing_engine_says(status, body, word):
    assert OTHER.unwell(status, body).word == word


# What engines, and proxies before them, say in a 503: of a request that they have not begun with; and of others, who knows.
FULL_OR_LOADING = (
    "Loading model", "Model is loading, please wait", "Initializing the engine", "Model with name glm is not ready.", "the model is not yet loaded",
    "No models are currently loaded.", "no healthy upstream", "no available server", "No server is available to handle this request.",
    "The engine is currently busy and cannot accept new requests.", "The server is busy", "server busy, please try again.  maximum pending requests exceeded",
    "The model is scaling up", "The request queue is full.", "Request dropped due to backpressure (backlog)", "Model is overloaded",
    "Too many concurrent requests", "We are at capacity", "it cannot accept requests", "3 pending requests",
)
WHO_KNOWS = ("Request failed; please retry", "Service Unavailable", "EngineCore encountered an issue.", "", "upstream connect error or reset before headers")


@pytest.mark.parametrize("message, not_begun", [*((message, True) for message in FULL_OR_LOADING), *((message, False) for message in WHO_KNOWS)])
def test_what_a_503_says_of_its_request(message, not_begun):
    """In any of the shapes that errors have; the same words under another status, or inside a stream, say nothing."""
    shapes = ({"error": {"message": message, "code": 503}}, {"error": message}, {"detail": message}, {"object": "error", "message": message})
    assert [from_engine(503, shape).not_begun for shape in shapes] == [not_begun] * 4
    assert from_engine(503, None, page=f"<html><h1>{message}</h1>").not_begun == not_begun
    for status in (None, 400, 500, 502, 504):
        assert not from_engine(status, None, page=message).not_begun
        assert not any(from_engine(status, shape).not_begun for shape in shapes)


@pytest.mark.parametrize("status", [401, 403, 404, 429])
def test_what_turns_a_request_away_has_not_begun_with_it(status):
    assert from_engine(status, None).not_begun and not from_engine(None, {"error": {"message": "Loading model", "code": status}}).not_begun


@pytest.mark.parametrize("message", [
    "unable to start process: dial tcp 127.0.0.1:8001: connect: connection refused", "upstream http://10.0.0.7:8000/v1 failed",
    "Cannot connect to host spark-2:8000 ssl:default", "localhost is down", "no route to [fd00::7]:8000", "connect ECONNREFUSED ::1:8000", "from fd00::7",
    "HTTPConnectionPool(host='spark-2', port=80): Max retries exceeded with url: /v1/chat/completions", "connect() to spark-2 port 80 failed",
    "dial tcp: lookup spark-2: no such host", "getaddrinfo ENOTFOUND spark-2", "upstream vllm.default.svc did not answer", "connect ENOENT /run/vllm.sock"])
def test_no_error_of_an_engine_names_an_address_to_people(message):
    """Where it is the engine's own fault; a client's mistake may be about an address of the client's."""
    for status in (500, 502, 503, 504, None):
        assert from_engine(status, {"error": {"message": message}}).message == f"the engine answered with status {status or 502}"
    assert from_engine(400, {"error": {"message": message}}).message == message
    assert from_engine(503, {"error": {"message": f"loading: {message}"}}).not_begun


def test_an_engines_own_words_without_one_are_told():
    for message in ("EngineCore encountered an issue. See stack trace (above) for the root cause.", "at 12:30:15 it failed: 1.2.3 of 4:5",
                    "std::bad_alloc in torch::cuda at main.cpp:17", "c10::Error: a::b ::x", "the host buffer is too small; export it", "CUDA error 2 at 2026-11-30T12:00:00"):
        assert from_engine(500, {"error": message}).message == message


# ---- for the owner

def test_the_owners_command():
    states = [State("http://a:1", "up", None, 1000, "off: connection refused", "glm, 850,000 tokens of context"),
              State("http://b:2", "off", "no such name: odd\x1b[2J", 4540, "off: no such name: odd\x1b[2J", "")]
    assert told(states, 4600, True) == """\
http://a:1  up, for 1 h 0 min
  last error  off: connection refused
  serves      glm, 850,000 tokens of context
http://b:2  off, for 1 min
  why         no such name: odd\\x1b[2J"""
    assert told(states, 4600, False).startswith("no gateway runs here now; the engines as they were last seen:\nhttp://a:1")
    assert told([], 4600, False) == "no gateway has run on this database yet"


@pytest.mark.parametrize("seconds, words", [(-5, "0 s"), (0, "0 s"), (59.4, "59 s"), (60, "1 min"), (3599, "59 min"),
                                            (3600, "1 h 0 min"), (86399, "23 h 59 min"), (90000, "1 d 1 h")])
def test_for_how_long(seconds, words):
    assert for_how_long(seconds) == f"for {words}"


@pytest.mark.parametrize("entry, loaded", [
    ({}, True), ({"status": None}, True), ({"status": {}}, True), ({"status": 5}, True), ({"status": [1]}, True), ({"status": "active"}, True),
    ({"status": {"value": "loaded"}}, True), ({"status": {"value": "unloaded"}}, False), ({"status": {"value": "loading"}}, False),
    ({"status": {"value": "sleeping", "args": []}}, False), ({"status": "unloaded"}, False),
    ({"status": {"value": "unloaded", "failed": True, "exit_code": 1}}, False),
], ids=str)
def test_what_is_loaded_on_demand(entry, loaded):
    """As llama.cpp's router and llama-swap say it; another engine's status may mean anything."""
    assert OTHER.is_loaded({"id": "m", **entry}) is loaded
