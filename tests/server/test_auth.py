"""Who comes in: keys and the edge, on the real server."""
import os
import re
import select
import socket
import sqlite3
import subprocess
import sys
import time
from threading import Event

import pytest

from support import ROOT
from support.engine import Head, Wait, chat_chunks
from support.gateway import Gateway, add_key
from support.processes import clean_environment, wait_until

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hello"}]}
ID = re.compile(r"[0-9a-f]{32}")


def refused(answer, words=""):
    """The answer is the 401 that the specification promises."""
    error = answer.json()["error"]
    assert answer.status == 401 and answer.headers["x-should-retry"] == "false"
    assert ID.fullmatch(answer.headers["x-request-id"])
    assert error == {"message": error["message"], "type": "invalid_request_error", "code": "invalid_api_key",
                     "param": None}
    assert words in error["message"]
    return True


def with_headers(shared, *pairs, path="/v1/models"):
    """GET with these headers alone; KEY stands for the key."""
    headers = [(name, value.replace("KEY", shared.key)) for name, value in pairs]
    return shared.client(key=False).get(path, headers)


# ---- how a key may be sent

@pytest.mark.parametrize("headers", [
    [("Authorization", "Bearer KEY")],
    [("authorization", "bearer KEY")],
    [("AUTHORIZATION", "BEARER   KEY")],
    [("x-api-key", "KEY")],
    [("X-API-Key", " KEY ")],
    [("Authorization", "Bearer KEY"), ("x-api-key", "KEY")],
    [("Authorization", "Bearer KEY"), ("Authorization", "Bearer KEY")],
    [("x-api-key", "KEY"), ("x-api-key", "KEY")],
    [("Authorization", ""), ("x-api-key", "KEY")],
    [("Authorization", "Basic dTpw"), ("x-api-key", "KEY")],
    # somebody else's key beside it: ANTHROPIC_AUTH_TOKEN beside an ANTHROPIC_API_KEY
    [("Authorization", "Bearer KEY"), ("x-api-key", "sk-ant-api03-other")],
    [("Authorization", "Bearer sk-ant-oat01-other"), ("x-api-key", "KEY")],
    [("Authorization", "Bearer KEY"), ("Authorization", "Bearer other")],
    [("x-api-key", "KEY"), ("x-api-key", "other")],
    [("x-api-key", "KEY, other")],
], ids=str)
def test_let_in(shared, headers):
    assert with_headers(shared, *headers).status == 200


MISSING, WRONG, SEVERAL = "no API key", "wrong or was revoked", "several different"


@pytest.mark.parametrize("headers, words", [
    ([], MISSING),
    ([("Authorization", "")], MISSING),
    ([("Authorization", "Bearer")], MISSING),
    ([("Authorization", "Bearer ")], MISSING),
    ([("Authorization", "KEY")], MISSING),
    ([("Authorization", "Basic KEY")], MISSING),
    ([("Authorization", "BearerKEY")], MISSING),
    ([("x-api-key", "")], MISSING),
    ([("x-api-key", ",")], MISSING),
    ([("Cookie", "api_key=KEY")], MISSING),
    ([("api-key", "KEY")], MISSING),
    ([("x_api_key", "KEY")], MISSING),
    ([("Authorization", "Bearer wrong")], WRONG),
    ([("Authorization", "Bearer KEYx")], WRONG),
    ([("Authorization", "Bearer xKEY")], WRONG),
    ([("Authorization", 'Bearer "KEY"')], WRONG),
    ([("Authorization", "Bearer KEY KEY")], WRONG),
    ([("x-api-key", "Bearer KEY")], WRONG),
    ([("x-api-key", "sk-sparks-")], WRONG),
    ([("Authorization", "Bearer schlüssel")], WRONG),
    ([("Authorization", "Bearer \udcff\udcfe")], WRONG),
    ([("x-api-key", "日本")], WRONG),
    ([("x-api-key", "x" * 8000)], WRONG),
    ([("Authorization", "Bearer sk-ant-oat"), ("x-api-key", "sk-ant-api")], WRONG),
    ([("x-api-key", "KEY, a, b, c, d")], SEVERAL),      # each is hashed
], ids=lambda value: ascii(value)[:60])
@pytest.mark.parametrize("path", ["/v1/models", CHAT])
def test_kept_out(shared, headers, words, path):
    headers = [(name, value.replace("KEY", shared.key)) for name, value in headers]
    client = shared.client(key=False)
    assert refused(client.get(path, headers) if path != CHAT else client.post(path, ASK, headers), words)
    assert shared.engine.requests == []


def test_keys_of_two_people(shared):
    """Whose request it is cannot be told, until one of them is no key any more."""
    second = shared.gateway.add_key("second")
    headers = [("Authorization", f"Bearer {shared.key}"), ("x-api-key", second)]
    client = shared.client(key=False)
    assert refused(client.get("/v1/models", headers), SEVERAL) and refused(client.post(CHAT, ASK, headers), SEVERAL)
    assert shared.gateway.keys("limit", "second", "--expires", "2020-01-01").returncode == 0
    assert client.get("/v1/models", headers).status == 200
    assert refused(client.get("/v1/models", {"x-api-key": second}), "expired")
    assert shared.gateway.keys("revoke", "second").returncode == 0
    assert client.post(CHAT, ASK, headers).status == 200


@pytest.mark.parametrize("query", ["api_key=", "key=", "access_token=", "x-api-key=", "authorization=Bearer%20"])
def test_key_in_the_query_is_no_key(shared, query):
    before = len(shared.gateway.log)
    assert refused(shared.client(key=False).get(f"/v1/models?{query}{shared.key}"), MISSING)
    assert shared.key not in shared.gateway.log[before:]


def test_refused_before_the_body_is_looked_at(shared):
    client = shared.client(key=False, timeout=5)
    assert refused(client.post(CHAT, b"no json at all"))
    connection = client.open()
    connection.send_head("POST", CHAT, {"content-length": "50000000"})
    assert refused(connection.answer())             # none of it has come, and none is waited for


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/some", CHAT])
def test_every_route_of_the_api_wants_a_key(shared, path):
    for method in ("GET", "POST", "HEAD"):
        answer = shared.client(key=False).request(method, path)
        assert answer.status in (401, 405), method


@pytest.mark.parametrize("path", ["/", "/help", "/llms.txt", "/healthz"])
def test_what_wants_no_key(shared, path):
    for key in (False, "wrong", "schlüssel"):
        assert shared.client(key=key).get(path).status in (200, 302)


def test_body_of_a_refused_request_is_no_request(shared):
    """What stands in an unread body must not be taken for the next request."""
    inner = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n\r\n" % shared.key.encode()
    connection = shared.client(key=False).open()
    connection.start("POST", CHAT, inner)
    assert refused(connection.answer())
    assert connection.get("/healthz").json() == {"ok": True}        # and not the list of models


# ---- added and revoked while it runs

def test_key_counts_at_once(shared):
    key = shared.gateway.add_key("newcomer")
    assert shared.client(key=key).get("/v1/models").status == 200
    assert shared.gateway.keys("revoke", "newcomer").returncode == 0
    assert refused(shared.client(key=key).get("/v1/models"), WRONG)
    assert shared.client().get("/v1/models").status == 200


def test_revoked_when_the_command_says_so(shared):
    """Its line may be read before it has ended; here the keys are looked at all the time."""
    for _ in range(4):
        connection = shared.client(key=shared.gateway.add_key("hasty")).open()
        with subprocess.Popen([sys.executable, "keys.py", "revoke", "hasty"], cwd=ROOT, stdout=subprocess.PIPE,
                              env=clean_environment(db=f"sqlite:///{shared.gateway.db}")) as command:
            while not select.select([command.stdout], [], [], 0)[0]:
                connection.get("/v1/models").read_all()
            assert refused(connection.get("/v1/models"), WRONG)


def test_revoked_on_an_open_connection(shared):
    key = shared.gateway.add_key("leaver")
    connection = shared.client(key=key).open()
    for _ in range(2):
        assert connection.post(CHAT, ASK).read_all()
    assert shared.gateway.keys("revoke", key[:16]).returncode == 0
    answer = connection.post(CHAT, ASK)
    assert refused(answer, WRONG) and len(shared.engine.requests) == 2
    assert refused(connection.post(CHAT, ASK), WRONG)               # on the same connection, still in step


def test_revoked_during_its_stream(shared):
    """A stream that has begun goes on; the next request fails."""
    key, go, chunks = shared.gateway.add_key("streamer"), Event(), chat_chunks("Hi you")
    shared.engine.play(Head(), *chunks[:2], Wait(go), *chunks[2:])
    client = shared.client(key=key)
    answer = client.post(CHAT, {**ASK, "stream": True})
    assert shared.gateway.keys("revoke", "streamer").returncode == 0
    assert refused(client.get("/v1/models"), WRONG)
    go.set()
    assert answer.read_all().endswith(b"data: [DONE]\n\n")


def test_one_of_two_keys_is_revoked(shared):
    first = shared.gateway.add_key("twice")
    second = shared.gateway.keys("add", "twice", "--again").stdout.strip()
    assert shared.gateway.keys("revoke", first).returncode == 0
    assert refused(shared.client(key=first).get("/v1/models"), WRONG)
    assert shared.client(key=second).get("/v1/models").status == 200


def test_keys_are_read_while_somebody_writes(shared):
    writer = sqlite3.connect(shared.gateway.db, isolation_level=None)
    try:
        writer.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        assert shared.client().get("/v1/models").status == 200
        assert refused(shared.client(key="wrong").get("/v1/models"))
        assert time.monotonic() - began < 3
    finally:
        writer.close()


def test_another_database_in_its_place_is_used(gateway, engine, tmp_path):
    front = gateway()
    key = add_key("restored", tmp_path / "backup.db")
    os.replace(tmp_path / "backup.db", front.db)
    for part in ("-wal", "-shm"):
        front.db.with_name(front.db.name + part).unlink(missing_ok=True)
    wait_until(lambda: front.client(key).get("/v1/models").status == 200, 5)
    assert front.client().get("/v1/models").status == 401


# ---- the log

def test_no_key_in_the_log(shared):
    wrong = "sk-sparks-THIS-ONE-IS-WRONG"
    client = shared.client(key=False)
    for headers in ({"authorization": f"Bearer {wrong}"}, {"x-api-key": wrong}, {"authorization": f"Basic {wrong}"}):
        client.get("/v1/models", headers)
        client.get(f"/v1/models/{wrong}?api_key={wrong}", headers)
        client.get(f"/{wrong}", headers)
        client.post(CHAT, {**ASK, "model": wrong, "user": wrong}, headers)
    shared.client().post(CHAT, {**ASK, "model": wrong})
    shared.client().post(CHAT, {**ASK, "user": wrong})
    shared.client().get("/v1/models", {"user-agent": wrong, "referer": wrong})
    client.request(wrong[:18], "/v1/models")        # as a method
    with client.open() as connection:
        connection.send(f"{wrong} {wrong}\r\n{wrong}\r\n\r\n".encode())
        assert connection.answer().status == 400
    log = shared.gateway.log
    assert shared.key not in log and "THIS-ONE" not in log and wrong[:18] not in log
    assert not re.search(r"sk-sparks-[^.\s]", log)
    assert "key=tester" in log and "status=401" in log


# ---- the edge

SECRET = "edge-secret-0123456789"


@pytest.fixture(scope="module")
def edged(shared_pair, stock, tmp_path_factory):
    gateway = Gateway(tmp_path_factory.mktemp("edge"), shared_pair.engine.url, stock, edge_secret=SECRET)
    try:
        yield gateway.wait_alive().wait_ready()
    finally:
        gateway.stop()
    gateway.check_log()


def edge(gateway, *values, key=None, method="GET", path="/v1/models", body=None):
    return gateway.client(key=key).request(method, path, body, [("X-Sparks-Edge", value) for value in values])


def forbidden(answer):
    error = answer.json()["error"]
    assert answer.status == 403 and ID.fullmatch(answer.headers["x-request-id"])
    assert error == {"message": error["message"], "type": "permission_error", "code": "forbidden", "param": None}
    return "/help" in error["message"]


def test_right_secret(shared, edged):
    assert edge(edged, SECRET).status == 200
    assert edge(edged, SECRET, method="POST", path=CHAT, body=ASK).status == 200
    assert shared.engine.requests[-1].header("x-sparks-edge") is None


@pytest.mark.parametrize("values", [[], [""], ["wrong"], [SECRET[:-1]], [SECRET + "x"], [SECRET.upper()],
                                    ["geheimnüs"], ["\udcff"], [SECRET, SECRET], [SECRET, "x"], ["x" * 8000]],
                         ids=ascii)
@pytest.mark.parametrize("key", [None, False, "wrong"])
def test_wrong_secret_goes_before_the_key(shared, edged, values, key):
    assert forbidden(edge(edged, *values, key=key))
    assert forbidden(edge(edged, *values, key=key, method="POST", path=CHAT, body=ASK))
    assert shared.engine.requests == []


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/nothing", "//v1/models", "/v1/models/", "/v1/models/x",
                                  "/%76%31/models"])
def test_edge_keeps_all_of_v1(shared, edged, path):
    for method in ("GET", "POST", "OPTIONS"):
        assert edge(edged, method=method, path=path).status == 403


def test_secret_with_a_wrong_key(shared, edged):
    assert refused(edge(edged, SECRET, key="wrong"), WRONG)
    assert refused(edge(edged, SECRET, key=False), MISSING)


@pytest.mark.parametrize("path", ["/help", "/llms.txt", "/healthz", "/"])
def test_open_without_the_secret(shared, edged, path):
    for values in ([], ["wrong"], ["geheimnüs"]):
        answer = edge(edged, *values, key=False, path=path)
        assert answer.status in (200, 302) and SECRET.encode() not in answer.read_all()


def test_no_secret_in_the_log(shared, edged):
    edge(edged, SECRET)
    edge(edged, "wrong-edge-secret")
    assert SECRET not in edged.log and "wrong-edge-secret" not in edged.log
    assert "status=403" in edged.log


def test_without_a_secret_the_header_is_nothing(shared):
    assert shared.client().get("/v1/models", {"x-sparks-edge": "anything"}).status == 200


@pytest.mark.parametrize("other", ["X-Forwarded-Protocol: https", "X-Forwarded-Ssl: off"])
def test_a_proxys_scheme_headers(shared, other):
    name, _, value = other.partition(": ")
    assert shared.client().get("/v1/models", {"X-Forwarded-Proto": "https", name: value}).status == 200


# ---- x-request-id

ANYTHING = [("GET", "/healthz", None, 200), ("GET", "/help", None, 200), ("HEAD", "/help", None, 200),
            ("GET", "/", None, 302), ("GET", "/v1/models", None, 200), ("GET", "/nothing", None, 404),
            ("PUT", "/v1/models", None, 405), ("GET", CHAT, None, 405), ("POST", CHAT, b"{", 400),
            ("POST", CHAT, ASK, 200), ("POST", CHAT, None, 400),
            ("POST", CHAT, {**ASK, "stream": True}, 200), ("POST", CHAT, {**ASK, "model": "no"}, 404)]


@pytest.mark.parametrize("method, path, body, status", ANYTHING, ids=str)
def test_every_answer_has_an_id(shared, method, path, body, status):
    own = shared.client().request(method, path, body)
    assert own.status == status and ID.fullmatch(own.headers["x-request-id"])
    theirs = shared.client().request(method, path, body, {"X-Request-Id": "Trace.me_1-2"})
    assert theirs.headers["x-request-id"] == "Trace.me_1-2"


def test_refusals_have_an_id(shared):
    theirs = {"X-Request-Id": "Trace-3"}
    assert shared.client(key=False).get("/v1/models", theirs).headers["x-request-id"] == "Trace-3"          # 401
    connection = shared.client().open()
    connection.send_head("POST", CHAT, {**theirs, "content-length": 200 << 20})                             # 413
    answer = connection.answer()
    assert answer.status == 413 and answer.headers["x-request-id"] == "Trace-3"
    answer = shared.client().post(CHAT, ASK, {**theirs, "content-encoding": "gzip"})
    assert answer.status == 415 and answer.headers["x-request-id"] == "Trace-3"


@pytest.mark.parametrize("wish", ["", " ", "a b", "a,b", "a/b", "ü", "\udcff", "x" * 65, "x" * 8000, "<b>"], ids=ascii)
def test_ids_that_are_not_taken_over(shared, wish):
    answer = shared.client().post(CHAT, ASK, {"X-Request-Id": wish})
    assert ID.fullmatch(answer.headers["x-request-id"])
    assert shared.engine.requests[-1].header("x-request-id") == answer.headers["x-request-id"]


def test_two_ids_are_none(shared):
    answer = shared.client().get("/healthz", [("X-Request-Id", "one"), ("X-Request-Id", "two")])
    assert ID.fullmatch(answer.headers["x-request-id"])


def test_ids_are_told_apart(shared):
    connection = shared.client().open()
    found = []
    for _ in range(5):
        answer = connection.get("/healthz")
        answer.read_all()
        found.append(answer.headers["x-request-id"])
    assert len(set(found)) == 5


def test_key_is_never_sent_to_the_engine(shared):
    shared.client().post(CHAT, ASK, {"x-api-key": shared.key}).read_all()
    request = shared.engine.requests[-1]
    assert shared.key not in str(request.headers) and shared.key.encode() not in request.body


def test_idle_connection_costs_nothing(shared):
    """Connections that never ask don't keep others out."""
    idle = [socket.create_connection(shared.client().address, 5) for _ in range(50)]
    try:
        assert shared.client().get("/v1/models").status == 200
    finally:
        for sock in idle:
            sock.close()


def test_a_key_as_request_id_is_not_kept(shared):
    answer = shared.client().post(CHAT, ASK, {"X-Request-Id": shared.key})
    assert answer.headers["x-request-id"] != shared.key and shared.key not in shared.gateway.log


def test_malformed_http_has_a_request_id(shared):
    connection = shared.client().open()
    connection.send(b"GET / HTTP/9.9\r\n\r\n")
    assert len(connection.answer().headers["x-request-id"]) == 32
