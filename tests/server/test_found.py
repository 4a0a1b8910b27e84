"""Inputs and situations that once broke a promise, found by trying; each kind stays here."""
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from support import ROOT
from support.chat import HELLO, PATH, failure, text_of
from support.engine import (
    Close,
    Hang,
    Head,
    Json,
    Pause,
    Raw,
    Send,
    chat_chunks,
    chunk,
    completion,
    sse,
)
from support.gateway import Gateway, add_key, run_keys
from support.observe import gauge, worker
from support.processes import children, clean_environment, wait_until

DIALECTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens",
            "/v1/responses")


def ask(front, **fields):
    return front.client().post(PATH, {"messages": HELLO, **fields})


# ---- engines

@pytest.mark.parametrize("drip", [
    [step for _ in range(40) for step in (Raw(b"HTTP/1.1 102 Processing\r\n\r\n"), Pause(0.1))],
    [Raw(b"HTTP/1.1 200 OK\r\nX: "), *[step for _ in range(40) for step in (Raw(b"x"), Pause(0.1))]],
], ids=["interim heads", "a head in drops"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_head_that_drips_is_silence(gateway, engine, drip, streams):
    front = gateway(keepalive=0.3, answer_timeout=1.2)
    engine.play(*drip)
    began = time.monotonic()
    answer = ask(front, stream=streams)
    if streams:
        assert failure(answer)[0]["code"] == "upstream_timeout" and answer.status == 200
    else:
        assert answer.status == 504
    assert time.monotonic() - began < 3


ODD = [{"choices": 5}, {"choices": "abc"}, {"choices": {"a": 1}}, {"choices": [5]}, {"choices": [{"message": "text"}]}, [], "x", 5]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("value", ODD)
def test_odd_json_is_the_engines_fault(shared, value, streams):
    shared.engine.play(Json(value))
    answer = ask(shared, stream=streams)
    if answer.status == 200 and streams:
        list(answer.events())
    else:
        assert answer.status in (200, 502) and answer.json() is not None


@pytest.mark.parametrize("delta", [
    {"index": None, "delta": {"content": "a"}}, {"index": [], "delta": {"content": "a"}}, {"delta": {"content": ["a"]}},
    {"index": 0, "delta": None}, {"index": 0, "delta": {"tool_calls": "x"}}])
@pytest.mark.parametrize("streams", [True, False])
def test_odd_chunks_are_no_fault_of_ours(shared, delta, streams):
    shared.engine.play(sse({"choices": [delta]}), *chat_chunks("b", usage=True))
    answer = ask(shared, stream=streams)
    assert answer.status in (200, 502)
    list(answer.events()) if streams and answer.status == 200 else answer.json()


def test_an_empty_finish_reason_is_none(shared):
    shared.engine.play(*[sse(chunk({"content": text}, finish="")) for text in "ab"], Close())
    assert failure(ask(shared, stream=True))[0]["code"] == "upstream_error"


@pytest.mark.parametrize("first", [b"data:", b": hello\n\n", b"\xef\xbb\xbf", b"d"])
def test_a_stream_that_does_not_say_so(shared, first):
    events = b"".join(chat_chunks("Hi", usage=True))
    rest = events[6:] if first == b"data:" else events[1:] if first == b"d" else events
    shared.engine.play(Head(type=None), first, Pause(0.05), rest)
    assert text_of(ask(shared, stream=True)) == "Hi"


def test_a_choice_that_never_began_is_missed(shared):
    shared.engine.play(*chat_chunks("Hi", done=False), Close())
    assert failure(ask(shared, stream=True, n=3))[0]["code"] == "upstream_error"


def test_an_engine_that_lingers_after_the_finish(gateway, engine):
    front = gateway(keepalive=0.4)
    engine.play(*chat_chunks("Hi", done=False), Hang())
    began = time.monotonic()
    assert text_of(ask(front, stream=True)) == "Hi" and time.monotonic() - began < 9
    assert engine.requests[-1].gone.wait(1)


@pytest.mark.parametrize("data", [
    b'{"data":[{"id":"m","root":5}]}', b'{"data":[{"id":"m","root":["x"]}]}', b"[" * 200_000, b'{"data":[{"id":"\\ud83d"}]}',
    b'{"data":5}', b"null"])
def test_odd_model_lists_do_not_end_the_look_out(gateway, engine, data):
    front = gateway(poll=0.1)
    engine.on("/v1/models", [Head(type="application/json", framing=len(data)), Send(data)])
    wait_until(lambda: len([probe for probe in engine.probes if probe.path == "/v1/models"]) > 5, 5)
    assert front.client(key=False).get("/metrics").status == 200
    engine.on("/v1/models", None)
    wait_until(lambda: [model["id"] for model in front.client().get("/v1/models").json()["data"]] == ["GLM-5.3-Flash-EXL3"], 5)
    front.traceback_allowed = True                      # whatever it was is in the log


@pytest.mark.parametrize("status, seen", [(499, 502), (302, 502), (429, 429)])
def test_odd_statuses(shared, status, seen):
    shared.engine.play(Json({"error": {"message": "no"}}, status, {"Retry-After": "7"}))
    answer = ask(shared)
    assert answer.status == seen and (status != 429 or answer.headers["retry-after"] == "7")


# ---- clients

@pytest.mark.parametrize("version", ["1.2", "1.9"])
def test_other_http_1_versions(shared, version):
    shared.engine.play(*chat_chunks("Hi there", usage=True))
    connection, body = shared.client().open(), json.dumps({"messages": HELLO, "stream": True}).encode()
    connection.send(b"POST %b HTTP/%b\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
                    % (PATH.encode(), version.encode(), shared.key.encode(), len(body), body))
    answer = connection.answer()
    if answer.status == 200:
        assert text_of(answer) == "Hi there"


def test_a_key_as_request_id_is_not_kept(shared):
    answer = shared.client().post(PATH, {"messages": HELLO}, {"X-Request-Id": shared.key})
    assert answer.headers["x-request-id"] != shared.key and shared.key not in shared.gateway.log


def test_malformed_http_has_a_request_id(shared):
    connection = shared.client().open()
    connection.send(b"GET / HTTP/9.9\r\n\r\n")
    assert len(connection.answer().headers["x-request-id"]) == 32


@pytest.mark.parametrize("other", ["X-Forwarded-Protocol: https", "X-Forwarded-Ssl: off"])
def test_a_proxys_scheme_headers(shared, other):
    name, _, value = other.partition(": ")
    assert shared.client().get("/v1/models", {"X-Forwarded-Proto": "https", name: value}).status == 200


def test_a_slow_readers_stream_is_ended_with_whole_chunks(gateway, engine):
    """The end comes while a chunk is half written: the error event must not land inside it."""
    front = gateway(drain=0.5)
    piece = sse(chunk({"content": "y" * 200_000}))
    engine.play(*chat_chunks("a")[:1], *[Send(piece)] * 40, Hang())
    answer = front.client(rcvbuf=4096, timeout=30).post(PATH, {"messages": HELLO, "stream": True})
    wait_until(lambda: gauge(front, "sparks_active") == 1, 3)
    front.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    error, before = failure(answer)
    assert error["code"] == "shutting_down" and len(before) > 1


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
    stream = shared.client().post(PATH, {"messages": HELLO, "stream": True})
    reader = threading.Thread(target=drained, args=(stream,), daemon=True)
    reader.start()
    began = time.monotonic()
    try:
        assert ask(shared, user="x" * 6_000_000).status == 200
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


def test_bodies_that_never_come_lock_out_their_own_key_only(gateway, engine):
    front = gateway(max_body="1 MB", max_bodies="4 MB")
    other = front.client(front.add_key("other"))
    held = [front.client().open() for _ in range(6)]
    for connection in held:
        connection.send_head("POST", PATH, {"content-length": 1 << 20})
    wait_until(lambda: ask(front, user="x" * 300_000).status == 503, 3)
    assert other.post(PATH, {"messages": HELLO, "user": "x" * 900_000}).status == 200
    for connection in held:
        connection.close()


def test_leaving_while_the_body_goes_to_the_engine(gateway, engine):
    """The engine does not read: its connection must not outlive the client."""
    front = gateway()
    descriptors = f"/proc/{worker(front)}/fd"
    before = len(os.listdir(descriptors))
    engine.always(lambda request: [Hang()])
    from support.engine import Early
    engine.play(Early(), Hang())
    connection = front.client().open()
    connection.start("POST", PATH, {"messages": HELLO, "user": "x" * 30_000_000})
    wait_until(lambda: gauge(front, "sparks_active") == 1, 10)
    connection.close()
    wait_until(lambda: gauge(front, "sparks_active") == 0, 3)
    wait_until(lambda: len(os.listdir(descriptors)) <= before + 2, 3)


def test_a_stream_is_kept_alive_while_its_body_goes_to_the_engine(gateway, engine):
    from support.engine import Early, ReadBody
    front = gateway(keepalive=0.3)
    engine.play(Early(), Pause(1.2), ReadBody(), *chat_chunks("Hi"))
    answer = front.client().post(PATH, {"messages": HELLO, "stream": True, "user": "x" * 30_000_000})
    events = list(answer.events())
    assert [event.comment is not None for event in events[:2]] == [True, True] and events[-1].data == "[DONE]"


@pytest.mark.parametrize("body, code", [(b"[" + b"[]," * 1_200_000 + b"1]", 400),
                                        (b'{"messages":[' + b'{"role":"user","content":""},' * 1_100_000 + b"1]}", 400)])
def test_a_body_of_a_million_values_does_not_hold_the_loop(shared, body, code):
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
        answer = shared.client().post(PATH, body)
        assert answer.status == code and "objects and lists" in answer.json()["error"]["message"]
    finally:
        stop.set()
        thread.join(10)
    assert max(gaps) < 1


@pytest.mark.parametrize("value", [{}, {"choices": None}, {"choices": []}, {"choices": [None]}, {"choices": {"a": 1}}])
@pytest.mark.parametrize("path, fields", [
    ("/v1/chat/completions", {"messages": HELLO}), ("/v1/messages", {"messages": HELLO, "max_tokens": 9}),
    ("/v1/responses", {"input": "Hi"}), ("/v1/completions", {"prompt": "Hi"})])
@pytest.mark.parametrize("streams", [True, False])
def test_an_answer_without_a_choice_is_none(shared, path, fields, value, streams):
    shared.engine.play(Json(value))
    answer = shared.client().post(path, {**fields, "stream": streams})
    assert answer.status == 502 and "engine" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [f"{way}{end}" for way in DIALECTS for end in ("/", "//")] + [f"/{way}" for way in DIALECTS])
def test_slashes_too_many(shared, path):
    """As in the other routes."""
    answer = shared.client().post(path, {})
    assert answer.status == 400 and answer.json()["error"]["type"] == "invalid_request_error"


# ---- the owner's machine

def test_a_worker_in_the_place_of_another_knows_what_was_reloaded(gateway, engine):
    front = gateway()
    toml = front.settings["config"]
    for text, status in (('[models."new name"]', 200), ("max_active = 0", 404)):
        toml.write_text(text)
        os.kill(front.pid, signal.SIGHUP)
        wait_until(lambda: "reload:" in front.log, 5)
        before = front.log.count("Sparks\n")
        os.kill(worker(front), signal.SIGKILL)
        wait_until(lambda: front.log.count("Sparks\n") > before, 10)
        front.wait_ready()
        assert ask(front, model="new name").status == status
    assert "max_active must be a whole number" in front.log and "settings of the start" in front.log


def test_a_pid_file_that_cannot_be_written(gateway, engine):
    front = gateway()
    front.stop()
    pid_file = front.db.with_name(front.db.name + ".pid")
    pid_file.unlink()
    pid_file.mkdir()
    done = sparks(front)
    assert done.returncode == 1 and done.stderr == f"sparks: SPARKS_DB: {pid_file} cannot be written: Is a directory\n"
    pid_file.rmdir()
    os.mkfifo(pid_file)
    done = sparks(front)
    assert done.returncode == 1 and done.stderr.startswith(f"sparks: SPARKS_DB: {pid_file} cannot be written: ")


@pytest.mark.parametrize("seconds", [0.3, 0.5])
def test_ctrl_c_during_the_start_is_quiet(gateway, engine, seconds):
    front = gateway(wait=None)
    time.sleep(seconds)
    os.killpg(front.pid, signal.SIGINT)
    assert front.process.wait(10) in (0, -signal.SIGINT)
    assert "KeyboardInterrupt" not in front.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0, 0.1])
def test_an_end_during_the_start_of_the_worker(gateway, engine, number, seconds):
    """The worker had no handlers yet, and the master waited for it until the drain was over."""
    front = gateway(wait=None)
    wait_until(lambda: listens(front), 5, front.process)
    time.sleep(seconds)
    front.process.send_signal(number)
    assert front.process.wait(8) == 0


def listens(front):
    host, port = front.settings["bind"].split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


def test_signals_make_no_second_worker(gateway, engine):
    front = gateway()
    only = children(front.pid)
    for number in (signal.SIGTTIN, signal.SIGTTOU, signal.SIGHUP):
        os.kill(front.pid, number)
    wait_until(lambda: "reload:" in front.log, 5)           # they are dealt with in order
    assert children(front.pid) == only and len(only) == 1


def test_a_worker_that_cannot_start_ends_the_gateway_with_a_line(gateway, engine):
    front = gateway()
    before = len(front.log)
    front.db.write_bytes(b"no database" * 1000)
    os.kill(worker(front), signal.SIGKILL)
    assert front.process.wait(10) == 3
    said = front.log[before:]
    assert f"\nsparks: SPARKS_DB: {front.db} cannot be used: it is no SQLite database\n" in said and "Traceback" not in said


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_descriptors_that_are_closed(gateway, engine, closed):
    """What opened next got their numbers: the log went into the pid file, or to a client."""
    front = gateway()
    front.stop()
    front.process = subprocess.Popen(["bash", "-c", f'exec "$0" sparks.py {closed}', sys.executable], cwd=ROOT,
                                     env=clean_environment(**front.settings), start_new_session=True, stdin=subprocess.DEVNULL,
                                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    front.pid = front.process.pid
    front.wait_alive()
    assert ask(front).status in (200, 503)
    assert front.db.with_name(front.db.name + ".pid").read_text() == str(front.pid)
    assert {os.readlink(f"/proc/{worker(front)}/fd/{number}") for number in range(3)} == {"/dev/null"}


def test_a_stale_pid_file_is_no_gateway(gateway, engine):
    front = gateway()
    front.stop()
    other = subprocess.Popen(["sleep", "30"])
    try:
        front.db.with_name(front.db.name + ".pid").write_text(str(other.pid))
        done = sparks(front, "--reload")
        assert done.returncode == 1 and "no gateway runs here" in done.stderr and other.poll() is None
        front.launch()
        front.wait_alive()
        second = sparks(front, bind="127.0.0.1:1")
        assert second.returncode == 1 and second.stderr.count("\n") == 1 and "Traceback" not in second.stderr
    finally:
        other.kill()
        other.wait()


def sparks(front, *arguments, **settings):
    return subprocess.run([sys.executable, "sparks.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30,
                          env=clean_environment(**{**front.settings, **settings}))


def test_ctrl_c_lets_streams_end_and_the_second_one_writes_the_rows(gateway, engine):
    front = gateway(drain=20)
    engine.always(lambda request: [*chat_chunks("a b")[:2], Hang()])
    answer = ask(front, stream=True)
    for expected in (None, 0):
        os.killpg(front.pid, signal.SIGINT)
        time.sleep(0.6)
        if expected is None:
            assert front.process.poll() is None         # the stream may go on
    assert front.process.wait(5) == 0
    answer.close()
    rows = [json.loads(line) for line in front.keys("log", "--json").stdout.splitlines()]
    assert rows[-1]["error"] == "shutting_down" and rows[-1]["completion_tokens"] == 1


def test_another_database_in_its_place_is_used(gateway, engine, tmp_path):
    front = gateway()
    key = add_key("restored", tmp_path / "backup.db")
    os.replace(tmp_path / "backup.db", front.db)
    for part in ("-wal", "-shm"):
        front.db.with_name(front.db.name + part).unlink(missing_ok=True)
    wait_until(lambda: front.client(key).get("/v1/models").status == 200, 5)
    assert front.client().get("/v1/models").status == 401


@pytest.mark.parametrize("arguments", [
    ("limit", "tester", "--expires", "9999-12-31"), ("limit", "tester", "--expires", "0001-01-01T00:00:00+14:00"),
    ("usage", "--days", "1000000"), ("log", "-n", "99999999999999999999")])
def test_beyond_all_bounds(stock, arguments):
    done = run_keys(*arguments, db=stock[0])
    assert done.returncode and "Traceback" not in done.stderr and "Error" in done.stderr


def test_a_full_disk_is_one_line(tmp_path):
    add_key("a", tmp_path / "sparks.db")
    done = subprocess.run(["bash", "-c", 'ulimit -f 1; exec "$0" keys.py revoke a', sys.executable], cwd=ROOT, capture_output=True,
                          text=True, env={**clean_environment(db=f"sqlite:///{tmp_path}/sparks.db"), "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode and "Traceback" not in done.stderr


@pytest.mark.parametrize("settings", [{"max_body": "9" * 400 + "GB"}, {"db": "sqlite:///~nouser/x"}, {"max_active": "9" * 5000}])
def test_settings_beyond_all_bounds(settings):
    done = subprocess.run([sys.executable, "sparks.py"], cwd=ROOT, capture_output=True, text=True, timeout=30,
                          env=clean_environment(**settings))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["max_active = " + "9" * 5000, "a = " + "[" * 100_000])
def test_files_beyond_all_bounds(tmp_path, text):
    (tmp_path / "sparks.toml").write_text(text)
    done = subprocess.run([sys.executable, "sparks.py"], cwd=ROOT, capture_output=True, text=True, timeout=30,
                          env=clean_environment(config=tmp_path / "sparks.toml"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_an_odd_environment(stock, engine, tmp_path):
    odd = dict(PROMETHEUS_MULTIPROC_DIR="/nonexistent", SCRIPT_NAME="/x", GUNICORN_PID="1", GUNICORN_FD="99",
               FORWARDED_ALLOW_IPS="proxy", WEB_CONCURRENCY="auto", SENDFILE="x")
    os.environ.update(odd)
    try:
        front = Gateway(tmp_path, engine.url, stock)
        front.wait_alive().wait_ready()
    finally:
        for name in odd:
            del os.environ[name]
    assert front.stop() == 0


# ---- requests

@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens",
                                  "/v1/responses"])
@pytest.mark.parametrize("form", ["{}/", "/{}", "/{}/"])
def test_a_base_url_with_a_slash_too_many(shared, path, form):
    body = {"messages": HELLO, "max_tokens": 9, "prompt": "Hello", "input": "Hello"}
    wanted = {name: body[name] for name in {"/v1/responses": ["input"], "/v1/completions": ["prompt"]}.get(
        path, ["messages", "max_tokens"])}
    answer = shared.client().post(form.format(path), wanted)
    assert answer.status == 200, answer.read_all()
    assert answer.json() and f'route="POST {path}"' in shared.gateway.log.splitlines()[-1]


@pytest.mark.parametrize("streams", [True, False])
def test_what_a_response_repeats_is_bounded(shared, streams):
    """A stream says it three times; the gateway stood still for a second, with 90 MB of it."""
    answer = shared.client().post("/v1/responses", {"input": "Hello", "instructions": "x" * (9 << 20), "stream": streams})
    assert answer.status == 400 and answer.json()["error"]["param"] == "instructions"
    answer = shared.client().post("/v1/responses", {"input": "x" * (9 << 20), "instructions": "y" * (3 << 20), "stream": streams})
    assert answer.status == 200 and answer.read_all().count(b"y" * (3 << 20)) == (3 if streams else 1)
