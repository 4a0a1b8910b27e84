"""Limits, usage, metrics, reload and the end, through the real server."""
import json
import os
import resource
import signal
import threading
import time
from contextlib import suppress

import pytest

from support import ROOT
from support.chat import HELLO, PATH, failure, text_of
from support.engine import Engine, Hang, Head, Json, Pause, Wait, chat_chunks, completion
from support.gateway import Gateway, run_keys, started
from support.observe import gauge, worker
from support.processes import WITH_US, clean_environment, wait_until


@pytest.fixture
def limited(gateway):
    """A gateway and a function that sets the limits of its key."""
    front = gateway(keepalive=0.2)
    front.limit = lambda *options: front.keys("limit", "tester", *options)
    return front


def ask(front, **fields):
    return front.client().post(PATH, {"messages": HELLO, **fields})


def error(answer):
    return answer.status, answer.json()["error"]["code"]


# ---- limits

def test_requests_per_minute(limited):
    assert limited.limit("--rpm", "2").returncode == 0
    for left in ("1", "0"):
        answer = ask(limited)
        assert answer.status == 200 and answer.headers["x-ratelimit-remaining-requests"] == left
    answer = ask(limited, stream=True)
    assert error(answer) == (429, "rate_limit_exceeded")
    assert 50 <= int(answer.headers["retry-after"]) <= 60 and "x-should-retry" not in answer.headers
    assert "2 requests a minute" in answer.json()["error"]["message"] and answer.json()["error"]["type"] == "rate_limit_error"
    limited.limit("--rpm", "none")                      # counts with the next request
    answer = ask(limited)
    assert answer.status == 200 and "x-ratelimit-limit-requests" not in answer.headers


@pytest.mark.parametrize("path, body", [("/v1/completions", {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})])
def test_limits_of_every_route(gateway, engine, path, body):
    """Requests and tokens count wherever they are used."""
    front = gateway(config='[models."GLM-5.3-Flash-EXL3"]\n[models.vectors]\nengine = "GLM-5.3-Flash-EXL3"\nkind = "embedding"')
    engine.embeds = path == "/v1/embeddings"
    front.keys("limit", "tester", "--rpm", "2")
    answers = [front.client().post(path, body) for _ in range(3)]
    assert [answer.status for answer in answers] == [200, 200, 429]
    assert answers[1].headers["x-ratelimit-remaining-requests"] == "0"
    front.keys("limit", "tester", "--clear", "--tpm", "5")      # some have been used by now
    assert error(front.client().post(path, body)) == (429, "rate_limit_exceeded")


def test_what_does_not_count(limited, engine):
    limited.limit("--rpm", "1")
    for _ in range(3):
        assert limited.client().get("/v1/models").status == 200
        assert ask(limited, messages=[]).status == 400
        assert ask(limited, model="nope").status == 404
    assert ask(limited).status == 200
    assert error(ask(limited)) == (429, "rate_limit_exceeded")


def test_an_engine_that_is_off_gives_the_count_back(limited, engine):
    limited.limit("--rpm", "1")
    engine.stop()
    for _ in range(3):
        assert ask(limited).status == 503
    engine.start()
    limited.wait_ready()
    assert ask(limited).status == 200


def test_tokens_per_minute_and_day(limited, engine):
    limited.limit("--tpm", "20")
    assert ask(limited).status == 200                   # 15 of the prompt and some
    assert error(ask(limited)) == (429, "rate_limit_exceeded")
    limited.limit("--clear", "--tokens-per-day", "20")
    answer = ask(limited)
    assert error(answer) == (429, "quota_exceeded") and answer.headers["x-should-retry"] == "false"
    assert "today" in answer.json()["error"]["message"] and "UTC" in answer.json()["error"]["message"]
    limited.stop()
    limited.launch()                                    # a restart does not reset a day's budget
    limited.wait_alive().wait_ready()
    assert error(ask(limited)) == (429, "quota_exceeded")
    limited.limit("--clear", "--tokens-per-month", "1000")
    assert ask(limited).status == 200


def test_an_aborted_stream_counts_what_came(limited, engine):
    limited.limit("--tpm", "3")
    engine.play(*chat_chunks("a b c d e", done=False)[:6], Hang())
    answer = ask(limited, stream=True)
    events = answer.events()
    for _ in range(6):
        next(events)
    answer.close()
    wait_until(lambda: ask(limited).status == 429, 3)


def test_active_requests_of_a_key(limited, engine):
    limited.limit("--active", "1")
    go = threading.Event()
    engine.always(lambda request: [Head(), Wait(go), *chat_chunks("Hi")])
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(text_of(ask(limited, stream=True)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    other = limited.client(limited.add_key("other"))
    engine.wait_for(1)
    third = other.post(PATH, {"messages": HELLO, "stream": True})       # its slots are its own
    engine.wait_for(2)
    assert engine.active == 2
    go.set()
    assert text_of(third) == "Hi"
    for thread in threads:
        thread.join(10)
    assert answers == ["Hi"] * 3


def test_models_of_a_key(limited, engine):
    engine.models = engine.models + [{"id": "tiny-one", "max_model_len": 4096}]
    wait_until(lambda: len(limited.client().get("/v1/models").json()["data"]) == 2, 5)
    limited.limit("--models", "tiny*,other")
    assert [model["id"] for model in limited.client().get("/v1/models").json()["data"]] == ["tiny-one"]
    assert ask(limited, model="tiny-one").status == 200
    assert error(ask(limited, model="GLM-5.3-Flash-EXL3")) == (403, "model_not_allowed")
    assert error(limited.client().get("/v1/models/GLM-5.3-Flash-EXL3")) == (403, "model_not_allowed")
    assert error(ask(limited, model="none-such")) == (404, "model_not_found")


def test_expiry(limited):
    limited.limit("--expires", "2099-01-01")
    assert ask(limited).status == 200
    limited.limit("--expires", "2020-01-01")
    answer = ask(limited)
    assert error(answer) == (401, "invalid_api_key") and "expired" in answer.json()["error"]["message"]


@pytest.mark.parametrize("field, names", [("reasoning", {"reasoning"}), ("reasoning_content", {"reasoning_content"})])
def test_reasoning_field_of_a_key(limited, engine, field, names):
    limited.limit("--reasoning-field", field)
    engine.always([Json(completion("Yes", reasoning="Hm"))])
    message = ask(limited).json()["choices"][0]["message"]
    assert {name for name in message if name.startswith("reasoning")} == names


def test_keepalive_form_of_a_key(limited, engine):
    """It comes before the setting, and counts from the next stream on."""
    engine.always(lambda request: [Head(), Pause(0.5), *chat_chunks("Hi")])
    for option, comments in (("chunk", False), ("none", True), ("comment", True)):
        limited.limit("--keepalive-form", option)
        first = next(ask(limited, stream=True).events())
        assert (first.comment is not None) == comments and (comments or first.json()["choices"][0]["delta"] == {})


@pytest.mark.parametrize("options, said", [
    (["--keepalive-form", "ping"], "is not one of"), (["--rpm", "0"], "no whole number from 1 on"), (["--rpm", "-3"], "no whole number"), (["--expires", "soon"], "no date"),
    (["--models", " , "], "--models takes names"), (["--reasoning-field", "x"], "is not one of"), (["--tpm", "1e3"], "no whole")])
def test_wrong_limits(stock, options, said):
    done = run_keys("limit", "tester", *options, db=stock[0])
    assert done.returncode != 0 and said in done.stderr and "Traceback" not in done.stderr


def test_limit_shows_and_clears(limited):
    limited.limit("--rpm", "5", "--tokens-per-month", "1000000", "--models", "a, b*")
    shown, = json.loads(limited.limit("--json").stdout)
    assert (shown["requests_per_minute"], shown["tokens_per_month"], shown["models"]) == (5, 1000000, ["a", "b*"])
    assert "requests per minute: 5" in limited.limit().stdout
    assert "no limits" in limited.limit("--clear").stdout
    assert limited.keys("limit", "nobody").returncode == 1


# ---- usage, metrics

def test_own_usage(limited):
    limited.limit("--rpm", "100")
    ask(limited).read_all()
    body = limited.client().get("/v1/usage").json()
    assert body["key"] == "tester" and body["limits"]["requests_per_minute"] == 100
    assert body["today"]["prompt_tokens"] == body["total"]["prompt_tokens"] == 15
    assert limited.client(limited.add_key("new")).get("/v1/usage").json()["total"]["requests"] == 0


def test_an_odd_answer_is_counted_and_logged_without_its_words(limited, engine):
    """Plain and streamed, once an answer."""
    for at, streams in enumerate((False, True), 1):
        given = completion("secret words")
        given["choices"][0]["finish_reason"] = "tool_calls"
        engine.play(Json(given))
        answer = limited.client().post(PATH, {"messages": HELLO, "stream": streams}, headers={"X-Request-Id": f"odd-{at}"})
        assert answer.status == 200
        answer.read_all()
        wait_until(lambda at=at: gauge(limited, 'sparks_oddities_total{kind="finish_without_call"}') == at, 2)
        assert f"request odd-{at}: an odd answer: finish_without_call" in limited.log
    assert "secret words" not in limited.log


def test_metrics(limited, engine):
    ask(limited).read_all()
    engine.play(Head(), Hang())
    running = limited.client().open()
    running.start("POST", PATH, {"messages": HELLO, "stream": True})
    engine.wait_for(2)
    assert gauge(limited, "sparks_active") == 1 and gauge(limited, "sparks_slots") == 8
    assert gauge(limited, "sparks_engine_up") == 1 and gauge(limited, "sparks_queued") == 0
    assert gauge(limited, 'sparks_requests_total{model="GLM-5.3-Flash-EXL3",route="POST /v1/chat/completions",status="200"}') == 1
    assert gauge(limited, 'sparks_tokens_total{kind="prompt"}') == 15
    running.close()
    wait_until(lambda: gauge(limited, "sparks_active") == 0, 2)


@pytest.mark.parametrize("header", ["X-Forwarded-For", "CF-Connecting-IP", "Forwarded"])
def test_metrics_are_not_for_strangers(limited, header):
    assert limited.client(key=False).get("/metrics", {header: "203.0.113.9"}).status == 401
    assert error(limited.client().get("/metrics", {header: "203.0.113.9"})) == (403, "forbidden")
    admin = limited.keys("add", "boss", "--admin").stdout.strip()
    assert limited.client(admin).get("/metrics", {header: "203.0.113.9"}).status == 200


# ---- the queue

def test_queue_full_and_overloaded(gateway, engine):
    front = gateway(max_active=1, max_queued=2, keepalive=0.2)
    engine.always(lambda request: [Head(), Hang()])
    held = [front.client().open() for _ in range(3)]
    for connection in held:
        connection.start("POST", PATH, {"messages": HELLO, "stream": True})
    wait_until(lambda: gauge(front, "sparks_queued") == 2, 3)
    answer = ask(front, stream=True)
    assert error(answer) == (429, "queue_full") and 1 <= int(answer.headers["retry-after"]) <= 30
    other = front.client(front.add_key("other"))
    waits = other.open()
    waits.start("POST", PATH, {"messages": HELLO})      # nothing of its own waits: let in once
    wait_until(lambda: gauge(front, "sparks_queued") == 3, 3)
    assert error(other.post(PATH, {"messages": HELLO})) == (503, "overloaded")
    for connection in [*held, waits]:
        connection.close()
    wait_until(lambda: gauge(front, "sparks_queued") + gauge(front, "sparks_active") == 0, 3)


@pytest.mark.parametrize("streams", [True, False])
def test_too_long_in_the_queue(gateway, engine, streams):
    front = gateway(max_active=1, queue_timeout=0.7, keepalive=0.2)
    engine.always(lambda request: [Head(), Hang()])
    holder = front.client().open()
    holder.start("POST", PATH, {"messages": HELLO, "stream": True})
    engine.wait_for(1)
    answer = ask(front, stream=streams)
    if streams:                                         # its head went out with the first comment
        comments = [event.comment for event in answer.events() if event.comment is not None]
        assert answer.status == 200 and "queued 1" in comments[0].strip()
    else:
        assert error(answer) == (503, "overloaded")
    holder.close()


def test_queue_time_is_told(gateway, engine):
    front = gateway(max_active=1)
    go = threading.Event()
    engine.play(Head(), Wait(go), *chat_chunks("first"))
    first = front.client().open()
    first.start("POST", PATH, {"messages": HELLO, "stream": True})
    engine.wait_for(1)
    threading.Timer(0.3, go.set).start()
    assert int(ask(front).headers["x-sparks-queue-ms"]) >= 250
    assert ask(front).headers["x-sparks-queue-ms"] == "0"


# ---- reload and the end

def test_reload(gateway, engine, tmp_path):
    front = gateway(config='max_active = 3\n[models."GLM-5.3-Flash-EXL3"]\n')
    engine.play(*chat_chunks("a b c")[:3], Wait(go := threading.Event()), *chat_chunks("a b c")[3:])
    running = ask(front, stream=True)
    config = front.settings["config"]
    config.write_text('max_active = 2\n[models."renamed"]\nengine = "GLM-5.3-Flash-EXL3"\naliases = ["glm-*"]\n')
    os.kill(front.pid, signal.SIGHUP)
    wait_until(lambda: gauge(front, "sparks_slots") == 2, 5)
    assert [model["id"] for model in front.client().get("/v1/models").json()["data"]] == ["renamed"]
    assert ask(front, model="GLM-7").status == 200
    config.write_text("max_active = -1\n")
    os.kill(front.pid, signal.SIGHUP)
    wait_until(lambda: "the old settings stay" in front.log, 5)
    assert gauge(front, "sparks_slots") == 2
    go.set()
    assert text_of(running)                             # and no stream was dropped


def test_reload_changes_the_sign_of_life(gateway, engine):
    front = gateway(keepalive=0.2, config="max_active = 3\n")
    engine.always(lambda request: [Head(), Pause(0.5), *chat_chunks("Hi")])
    assert next(ask(front, stream=True).events()).comment == "keep-alive"
    front.settings["config"].write_text('max_active = 2\nkeepalive_form = "chunk"\n')
    os.kill(front.pid, signal.SIGHUP)
    wait_until(lambda: gauge(front, "sparks_slots") == 2, 5)
    first = next(ask(front, stream=True).events())
    assert first.comment is None and first.json()["choices"][0]["delta"] == {}


def test_reload_command_checks_first(gateway, engine):
    import subprocess
    import sys
    front = gateway(config="max_active = 3\n")

    def command():
        return subprocess.run([sys.executable, "sparks.py", "--reload"], cwd=ROOT, capture_output=True, text=True,
                              env=clean_environment(**front.settings), timeout=30)
    front.settings["config"].write_text("max_active = 4\n")
    assert command().returncode == 0
    wait_until(lambda: gauge(front, "sparks_slots") == 4, 5)
    front.settings["config"].write_text("max_activ = 4\n")
    done = command()
    assert done.returncode == 1 and "max_activ" in done.stderr and "Traceback" not in done.stderr
    front.stop()
    front.settings["config"].write_text("")
    done = command()
    assert done.returncode == 1 and "no gateway runs here" in done.stderr


def test_the_end_lets_streams_run_and_then_tells_them(gateway, engine):
    front = gateway(drain=6, max_active=2, keepalive=0.2)
    chunks = chat_chunks("a b c")
    engine.play(*chunks[:3], Wait(go := threading.Event()), *chunks[3:])
    engine.play(*chunks[:3], Hang())
    short, long, queued = [ask(front, stream=True) for _ in range(3)]
    idle = front.client().open()
    idle.request("GET", "/healthz").read_all()
    front.process.send_signal(signal.SIGTERM)
    wait_until(lambda: refuses(front), 3)
    time.sleep(0.2)
    assert idle.request("POST", PATH, {"messages": HELLO}).json()["error"]["code"] == "shutting_down"
    go.set()
    assert text_of(short)
    # Its head did not say that the connection would close, so its next request has an answer.
    assert short.connection.request("POST", PATH, {"messages": HELLO}).json()["error"]["code"] == "shutting_down"
    assert text_of(queued)                              # it got the slot of the one that ended
    assert failure(long)[0]["code"] == "shutting_down"
    assert front.process.wait(30) == 0
    rows = [json.loads(line) for line in front.keys("log", "--json").stdout.splitlines()]
    posts = [(row["status"], row["error"]) for row in rows if row["model"]]
    assert sorted(posts, key=str) == [(200, None)] * 2 + [(503, "shutting_down")] * 3


def refuses(front):
    """Whether nobody listens any more."""
    try:
        front.client().open().close()
    except ConnectionRefusedError:
        return True


# ---- the log

def lines(front):
    return [line for line in front.log.splitlines() if "route=" in line or '"route"' in line]


def test_one_line_per_request(limited):
    answer = ask(limited)
    answer.read_all()
    wait_until(lambda: any(answer.headers["x-request-id"] in line for line in lines(limited)), 2)
    line, = [line for line in lines(limited) if answer.headers["x-request-id"] in line]
    for part in ("key=tester", 'route="POST /v1/chat/completions"', "model=GLM-5.3-Flash-EXL3", "status=200", "prompt=15"):
        assert part in line


def test_log_as_json(gateway):
    front = gateway(log="json")
    ask(front).read_all()
    wait_until(lambda: len(lines(front)) >= 2, 2)
    found = json.loads(lines(front)[-1])
    assert found["status"] == 200 and found["key"] == "tester" and found["time"].endswith("Z")


def test_a_log_that_nobody_reads_stops_nothing(stock, engine, tmp_path):
    """stdout is a pipe that is full: the requests go on."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 65536)
    except BlockingIOError:
        pass
    os.set_blocking(writer, True)

    class Blocked(Gateway):
        def launch(self):
            import subprocess
            import sys
            self.process = subprocess.Popen([*WITH_US, sys.executable, "sparks.py"], cwd=ROOT, env=clean_environment(**self.settings),
                                            stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, start_new_session=True,
                                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)))
            self.pid = self.process.pid

    front = Blocked(tmp_path, engine.url, stock)
    try:
        front.wait_alive()
        for _ in range(20):
            assert ask(front).status in (200, 503)
        crowd = []                                  # gevent says that there are no descriptors left
        for _ in range(150):                        # none is idle for long, so few give way to another
            crowd.append(front.client().open())
            with suppress(OSError):
                crowd[-1].send_head("POST", "/v1/chat/completions", {"content-length": 10})
        descriptors = f"/proc/{worker(front)}/fd"
        wait_until(lambda: len(os.listdir(descriptors)) >= 60, 5)
        for connection in crowd:
            connection.close()
        front.wait_alive()
        os.kill(worker(front), signal.SIGKILL)      # the master has something to say, too
        front.wait_alive()
        front.process.send_signal(signal.SIGTERM)
        assert front.process.wait(30) == 0
    finally:
        front.kill()
        os.close(reader)
        os.close(writer)


# ---- the wall clock is set

CLOCK = """
import time
real = time.time
time.time = lambda: real() + 86400 * float(open({file!r}).read())
"""


def test_a_day_follows_the_clock(stock, tmp_path):
    """Set while the gateway runs, either way, or after a start in the wrong month."""
    days = tmp_path / "days"

    def set_to(day):
        (tmp_path / "new").write_text(str(day))
        os.replace(tmp_path / "new", days)              # it is read all the time

    set_to(0)
    with Engine() as engine, started(engine, tmp_path, stock, CLOCK.format(file=str(days))) as front:
        engine.always([Json(completion("Hi", prompt=100))])
        assert front.keys("limit", "tester", "--tokens-per-day", "50").returncode == 0

        def statuses(*walk):
            found = []
            for day in walk:
                set_to(day)
                found.append(front.client().post(PATH, {"messages": HELLO}).status)
            return found

        assert statuses(0, 0, 1, 1, 0, -31, 0, 1, -31, 2) == [200, 429, 200, 429, 429, 200, 429, 429, 429, 200]
        front.stop()
        set_to(-62)
        front.launch()
        front.wait_alive().wait_ready()
        assert statuses(-62, 0, -62, 3) == [200, 429, 429, 200]
