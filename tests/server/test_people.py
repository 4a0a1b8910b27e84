"""The people behind a key that trusts a header, on the real server: each has turns, limits and figures as if by a key of its own."""
import json
import threading

import pytest

import support.chat
from support.chat import PATH, text_of
from support.engine import Head, Json, Wait, chat_chunks, completion, embeddings
from support.gateway import started
from support.processes import wait_until
from support.rows import read, row_of, rows

HEADER = "X-OpenWebUI-User-Id"
VECTORS = "/v1/embeddings"
ROUTES = {**support.chat.ROUTES, VECTORS: {"input": "Hello", "model": "vectors"}}
WAYS = [(path, streams) for path in ROUTES for streams in (False, True) if not (streams and path == VECTORS)]


@pytest.fixture(scope="module")
def web(shared_vectors_pair):
    """A web UI's key, which may say who its people are."""
    return trusting(shared_vectors_pair.gateway, "web")


@pytest.fixture
def front(gateway):
    """A gateway of its own with such a key: a function of settings."""
    def start(*limits, **settings):
        started = gateway(**settings)
        started.web = trusting(started, "web", *limits)
        return started
    return start


def trusting(gateway, name, *options):
    key = gateway.add_key(name)
    assert gateway.keys("limit", name, "--trusts", HEADER, *options).returncode == 0
    return key


def ask(front, key, who, path=PATH, headers=(), **fields):
    return front.client(key).post(path, {**ROUTES[path], **fields}, [*([(HEADER, who)] if who is not None else []), *headers])


def usage(front, key, who=None):
    return front.client(key).get("/v1/usage", {HEADER: who} if who else None).json()


# ---- who asks

@pytest.mark.parametrize("path, streams", WAYS)
def test_on_every_route(shared_vectors, web, path, streams):
    """By a hash, which is the same each time; what the header says is neither kept, nor logged, nor sent on."""
    gateway = shared_vectors.gateway
    shared_vectors.engine.on(VECTORS, [Json(embeddings([0.5]))])
    found = {}
    for who in ("ann@example.org", "bob@example.org", "ann@example.org", None, "", "  "):
        answer = ask(gateway, web, who, path, **({"stream": True} if streams else {}))
        assert answer.status == 200, answer.read_all()
        answer.read_all()
        person = row_of(gateway.db, answer.headers["x-request-id"])["person"]
        assert found.setdefault((who or "").strip(), person) == person
    assert len({*found.values()}) == 3 and found[""] == "" and all(len(name) == 16 for who, name in found.items() if who)
    for request in shared_vectors.engine.requests:
        assert b"example.org" not in request.body and HEADER.lower() not in {name.lower() for name, _ in request.headers}
    kept = b"".join(part.read_bytes() for part in gateway.db.parent.iterdir() if part.is_file())
    assert b"example.org" not in kept and b"example.org" not in gateway.log.encode()
    assert f"key=web person={found['ann@example.org']} " in gateway.log


def test_from_any_other_key_it_means_nothing(shared):
    answer = ask(shared.gateway, shared.key, "ann@example.org")
    row = row_of(shared.gateway.db, answer.headers["x-request-id"])
    assert answer.status == 200 and row["person"] == ""
    assert "person" not in usage(shared.gateway, shared.key, "ann")
    line, = [line for line in shared.gateway.log.splitlines() if answer.headers["x-request-id"] in line]
    assert "person" not in line and "example.org" not in line
    assert ask(shared.gateway, shared.key, "ann", headers=[(HEADER, "bob")]).status == 200      # nor is it looked at


def test_twice_it_is_refused(shared_vectors, web):
    """A client's own beside the one that a proxy adds would be a new person each time."""
    for path in ROUTES:
        answer = ask(shared_vectors.gateway, web, "ann", path, headers=[(HEADER.lower(), "ann")])
        error = answer.json()["error"]
        assert answer.status == 400 and HEADER in error["message"] and "send it once" in error["message"]
    assert not shared_vectors.engine.requests
    assert shared_vectors.gateway.client(web).get("/v1/usage", [(HEADER, "a"), (HEADER, "b")]).status == 400


def test_whatever_it_says(shared_vectors, web):
    """Long, in any writing, in bytes that are no text: a person all the same."""
    gateway, found = shared_vectors.gateway, set()
    for who in ("x" * 8000, "Müller, Jörg", "日本", "\udcff\udcfe", "a\tb", "others", "{{LIBRECHAT_USER_ID}}", "sk-sparks-x", "' OR 1=1 --"):
        answer = ask(gateway, web, who)
        assert answer.status == 200, (who, answer.read_all())
        found.add(row_of(gateway.db, answer.headers["x-request-id"])["person"])
    assert len(found) == 9 and {len(name) for name in found} == {16}


def test_the_value_itself_if_the_owner_says_so(shared_vectors):
    gateway = shared_vectors.gateway
    key = trusting(gateway, "plain", "--trusts-values")
    for who, kept in (("ann@example.org", True), ("Müller, Jörg", True), ("x" * 65, False)):
        answer = ask(gateway, key, who)
        person = row_of(gateway.db, answer.headers["x-request-id"])["person"]
        assert person == who if kept else len(person) == 16
    assert usage(gateway, key, "ann@example.org")["person"] == "ann@example.org"
    gateway.keys("limit", "plain", "--no-trusts-values")                # counts from the next request on
    assert len(usage(gateway, key, "ann@example.org")["person"]) == 16


# ---- limits and turns

def test_limits_are_each_person_s(front):
    gateway = front("--rpm", "2")
    for who in ("ann", "bob", None):
        assert [ask(gateway, gateway.web, who).status for _ in range(3)] == [200, 200, 429], who
    left = ask(gateway, gateway.web, "carl").headers["x-ratelimit-remaining-requests"]
    assert left == "1"


def test_a_restart_keeps_each_person_s_budget(front):
    gateway = front("--tokens-per-day", "15")
    assert [ask(gateway, gateway.web, "ann").status for _ in range(2)] == [200, 429]
    assert [ask(gateway, gateway.web, None).status for _ in range(2)] == [200, 429]
    gateway.stop()
    gateway.launch()
    gateway.wait_alive().wait_ready()
    assert [ask(gateway, gateway.web, who).status for who in ("ann", None, "bob")] == [429, 429, 200]


def test_people_take_turns_as_keys_do(front, engine):
    """Ann's four wait for one slot, then bob's one: his is the second to run."""
    gateway = front(max_active=1, keepalive=0.1)
    go = threading.Event()
    engine.always(lambda request: [Head(), Wait(go), *chat_chunks("Hi")])
    answers = []
    for who in ("ann", "ann", "ann", "ann", "bob"):
        answers.append(ask(gateway, gateway.web, who, stream=True))
        next(answers[-1].events())
    places = usage(gateway, gateway.web, "ann"), usage(gateway, gateway.web, "bob"), usage(gateway, gateway.web)
    assert [(one["active"], one["queued"]) for one in places] == [(1, 3), (0, 1), (0, 0)]
    go.set()
    assert [text_of(answer) for answer in answers] == ["Hi"] * 5
    order = [row["person"] for row in rows(gateway.db, "route LIKE 'POST%'")]
    assert order[0] == order[2] == order[3] == order[4] != order[1]


def test_at_most_so_many_are_told_apart(engine, tmp_path, stock):
    """The others are one person together: it does not grow with what comes."""
    with started(engine, tmp_path, stock, patch="import people; people.MOST = 3") as gateway:
        web = trusting(gateway, "web", "--rpm", "3")
        found = {who: ask(gateway, web, who).headers["x-request-id"] for who in ("ann", "bob", "carl", "new", "newer", "bob")}
        people = {who: row_of(gateway.db, name)["person"] for who, name in found.items()}
        assert people["new"] == people["newer"] == "others" and len({*people.values()}) == 4
        assert [ask(gateway, web, who).status for who in ("newest", "ann", "latest")] == [200, 200, 429]


# ---- figures

def test_what_is_told_of_people(front):
    gateway = front("--trusts-values")
    for who, count in (("ann", 2), ("bob", 1), (None, 1)):
        for _ in range(count):
            assert ask(gateway, gateway.web, who).status == 200
    found = json.loads(gateway.keys("usage", "--by", "person", "--json").stdout)
    assert [(one["person"], one["requests"]) for one in found] == [("web/ann", 2), ("web/bob", 1)]
    lines = gateway.keys("log", "--key", "web").stdout.splitlines()
    ann, all_of_them = usage(gateway, gateway.web, "ann"), usage(gateway, gateway.web)      # the second counts the first
    assert {name: found[0][name] for name in ann["today"]} == ann["today"]
    assert ann["person"] == "ann" and "person" not in all_of_them
    for period in ("today", "this_month", "total"):
        assert (ann[period]["requests"], all_of_them[period]["requests"]) == (2, 5)
        assert 2 * ann[period]["prompt_tokens"] == all_of_them[period]["prompt_tokens"] > 0
    whole, = json.loads(gateway.keys("usage", "web", "--json").stdout)
    assert (whole["key"], whole["requests"]) == ("web", 6)
    assert [line.split("  ")[2] for line in lines] == ["web/ann", "web/ann", "web/bob", "web"]
    told = [json.loads(line) for line in gateway.keys("log", "--key", "web", "--json").stdout.splitlines()]
    assert [one["person"] for one in told] == ["ann", "ann", "bob", "", "ann", ""]
    assert "web/bob" in gateway.keys("usage", "--by", "person", "--days", "1").stdout
    assert gateway.keys("usage", "--by", "person", "--csv").stdout.startswith("person,requests,")
    nobody = gateway.keys("usage", "tester", "--by", "person")
    assert nobody.stdout == "" and "--trusts" in nobody.stderr


def test_sums_of_people_and_of_keys_agree(front, engine):
    gateway = front()
    for who in ("ann", "bob", "ann"):
        ask(gateway, gateway.web, who).read_all()
    engine.play(Json(completion("a"), 500))
    assert ask(gateway, gateway.web, "bob").status == 500
    names = "requests, ok, errors, aborted, prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens"
    sums = ", ".join(f"SUM({name}) AS {name}" for name in names.split(", "))
    where = "key_id = (SELECT id FROM key WHERE name = 'web')"
    wait_until(lambda: len(rows(gateway.db, where)) == 4, 5)
    of_people, of_keys = (read(gateway.db, f"SELECT {sums} FROM {table} WHERE {where}") for table in ("person_day", "day"))
    assert of_people == of_keys and of_keys[0]["requests"] == 4 and of_keys[0]["errors"] == 1
