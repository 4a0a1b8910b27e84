"""What tells that an engine works: a clock that is passed in, and what each kind says of itself on the wire."""
import json
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.kinds import KINDS, LLAMA_CPP, NO_FIGURES, OTHER, VLLM, Figures, works
from engines.pulse import WANTED, Pulse
from support import SUPPORT
from support.engine import DONE, compact, completion, died, embeddings, text_chunks, text_completion

QUIET, PATIENCE = 5, 60


class Request:
    def __init__(self, since):
        self.owed_since = since


class Run:
    """An engine second by second: it is looked at as the gateway does, and `stuck` is when that said so.

    work(second): its Figures, or None where it does not answer.
    """

    def __init__(self, work=lambda now: Figures(0)):
        self.pulse, self.work, self.now, self.asked, self.stuck = Pulse(), work, 1000.0, [], None

    def owe(self):
        request = Request(self.now)
        self.pulse.owe(request, self.now)
        return request

    def go_on(self, seconds, hear=False):
        for _ in range(seconds):
            self.now += 1
            if hear:
                self.pulse.hear(self.now)
            if self.pulse.is_due(self.now, QUIET):
                self.asked.append(self.now)
                self.pulse.measure(self.work(self.now), self.now, QUIET)
                if self.stuck is None and self.pulse.is_stuck(self.now, PATIENCE):
                    self.stuck = self.now
        return self


def test_stuck():
    """Silent and still for as long as that takes. It is asked at first, and then once it is quiet."""
    run = Run()
    run.owe()
    run.go_on(200)
    assert run.asked[:2] == [1001, 1000 + QUIET] and run.stuck == 1001 + PATIENCE


@pytest.mark.parametrize("work", [
    lambda now: Figures(now // 50), lambda now: Figures(now // 50, 1), lambda now: None,
    lambda now: Figures(now // 50, 9),
], ids=["a slow prefill", "which counts its requests", "no figures", "others' requests too"])
def test_not_stuck(work):
    run = Run(work)
    run.owe()
    assert run.go_on(1000).stuck is None


def test_tokens_are_life_and_nobody_asks_meanwhile():
    """Also those of another answer than the one that is waited for."""
    run = Run()
    run.owe()
    run.owe()
    assert run.go_on(1000, hear=True).stuck is None and run.asked == [1001]
    assert run.go_on(PATIENCE + QUIET).stuck == 2000 + PATIENCE


def test_figures_that_stop_coming_are_no_progress():
    """Nor may they stop for a moment: what is stuck has been still for all the time."""
    run = Run(lambda now: Figures(now) if now < 1100 else None)
    run.owe()
    assert run.go_on(300).stuck == 1099 + PATIENCE
    run = Run(lambda now: Figures(now // 50) if now % 3 == 0 else None)
    run.owe()
    assert run.go_on(1000).stuck is None


def test_figures_that_are_none_any_more():
    """It says so: then it has the clock alone, until there are some again."""
    run = Run(lambda now: Figures(0) if now < 1030 or now >= 2000 else NO_FIGURES)
    run.owe()
    run.go_on(900)
    assert run.stuck is None and run.pulse.progress(run.now, PATIENCE) == float("-inf")
    assert run.go_on(500).stuck == 2000 + PATIENCE
    run = Run(lambda now: Figures(now, 0) if now < 1030 else NO_FIGURES)     # nor has it lost any, as far as anybody knows
    run.owe()
    assert run.go_on(900).stuck is None and not run.pulse.has_lost(run.now, PATIENCE)


def test_requests_that_it_knows_nothing_of():
    """Its figures move, and of what it was sent nothing is among them."""
    run = Run(lambda now: Figures(now, 1))
    run.owe()
    assert run.go_on(500).stuck is None
    run.owe()
    assert run.go_on(500).stuck == 1500 + QUIET + PATIENCE


def test_requests_that_are_counted_late():
    """Sent a moment ago, or counted now and then: no request is lost that is known at any look."""
    run = Run(lambda now: Figures(now, now % 20 == 0))
    run.owe()
    assert run.go_on(500).stuck is None


def test_short_requests_are_none_that_are_lost():
    """They are over before it has to count them."""
    run = Run(lambda now: Figures(now, 0))
    for _ in range(100):
        request = run.owe()
        run.pulse.progress(run.now, PATIENCE)
        run.go_on(QUIET - 2)
        run.pulse.settle(request, True, run.now)
    assert len(run.asked) > 50 and not run.pulse.has_lost(run.now, PATIENCE)


def test_one_that_owes_nothing():
    """It answers, or what it owes is still being sent, or not read by its client."""
    run = Run()
    request = run.owe()
    run.go_on(20)
    run.pulse.settle(request, True, run.now)
    asked = len(run.asked)
    assert run.go_on(500).stuck is None and len(run.asked) == asked
    request = run.owe()
    request.owed_since = None
    assert run.go_on(500).stuck is None and len(run.asked) == asked
    request.owed_since = run.now
    assert run.go_on(PATIENCE - QUIET).stuck is None
    assert run.go_on(3 * QUIET).stuck


@pytest.mark.parametrize("work", [lambda now: Figures(0), lambda now: Figures(now, 0)], ids=["still", "knows nothing of them"])
def test_clients_that_give_up_before_that_and_try_again(work):
    """What is stuck is noticed all the same, and the time between their tries does not count."""
    run = Run(work)
    for _ in range(3):
        request = run.owe()
        run.go_on(30)
        run.pulse.settle(request, False, run.now)
        run.go_on(1000)
    assert run.stuck and 60 <= run.stuck - 1000 - 2 * 1000 <= 60 + 2 * QUIET


def test_answers_that_end_are_life():
    run = Run()
    for _ in range(20):
        request = run.owe()
        run.go_on(30)
        run.pulse.settle(request, True, run.now)
    assert run.stuck is None


def test_progress_excuses_what_waits_behind():
    """Somebody wants to know: then it is asked though tokens come, until nobody does any more."""
    run = Run(lambda now: Figures(now // 7, 2 if now < 2000 else 1))
    run.owe()
    run.owe()
    run.go_on(28)
    assert run.now - 7 - QUIET < run.pulse.progress(run.now, PATIENCE) < run.now      # its figures alone say so
    asked = len(run.asked)
    run.go_on(100, hear=True)
    assert len(run.asked) <= asked + WANTED * QUIET + 1 and run.pulse.progress(run.now, PATIENCE) == run.now
    run.go_on(20, hear=True)
    assert len(run.asked) > 5 and run.pulse.progress(run.now, PATIENCE) == run.now
    run.go_on(100, hear=True)
    assert run.asked[-1] <= run.now - 80
    while run.now < 2000 + 2 * PATIENCE:
        run.pulse.progress(run.now, PATIENCE)
        run.go_on(1, hear=True)
    assert run.pulse.progress(run.now, PATIENCE) == float("-inf")  # one of them is lost: no excuse


def test_after_a_restart_it_is_another():
    run = Run()
    run.owe()
    run.go_on(PATIENCE)
    run.pulse.forget()
    assert run.go_on(PATIENCE - 1).stuck is None and run.pulse.progress(run.now, PATIENCE) > 0


@given(st.lists(st.tuples(st.sampled_from(["owe", "answer", "give up", "token"]), st.integers(0, 55)), max_size=40))
def test_one_that_works_is_never_stuck(events):
    """Whatever comes and goes, one whose figures change in time works, and the next look is never far."""
    run = Run(lambda now: Figures(now // 40))
    owed = []
    for what, seconds in events:
        if what == "owe":
            owed.append(run.owe())
        elif what == "token":
            run.pulse.hear(run.now)
        elif owed:
            run.pulse.settle(owed.pop(), what == "answer", run.now)
        run.go_on(seconds)
        assert 0 < run.pulse.next_look(run.now, QUIET, PATIENCE) <= QUIET
    assert run.stuck is None


# ---- what the kinds say

PAGE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="glm-tiny"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="glm-tiny"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="glm-tiny"} 0.0625
vllm:iteration_tokens_total_count{engine="0",model_name="glm-tiny"} 17.0
"""
TWO = PAGE + PAGE.replace('engine="0"', 'engine="1"')
OLD = 'vllm:num_requests_running{model_name="a b} c"} 1\nvllm:gpu_cache_usage_perc{model_name="a b} c"} 0.5 1766666666\n'


def ask(kind, answers):
    """(its Figures, the paths that were asked for): `answers` by path without the query."""
    asked = []

    def get(path):
        asked.append(path)
        status, body = answers.get(path if path in answers else path.partition("?")[0], (404, "not found"))
        return status, body.encode()
    return kind.progress(get), asked


def test_vllm_is_asked_for_five_samples():
    figures, asked = ask(VLLM, {"/metrics/": (200, PAGE)})
    assert figures.requests == 3 and len(figures.work) == 4
    path, = asked
    names = parse_qs(urlsplit(path).query)["name[]"]
    assert path.startswith("/metrics/?") and len(names) == 5 and all(name.startswith("vllm:") for name in names)


@pytest.mark.parametrize("line", range(4))
def test_each_sample_that_changes_is_work(line):
    lines = [text for text in PAGE.splitlines() if not text.startswith("#")]
    moved = lines[:line] + [lines[line].rpartition(" ")[0] + " 9.0"] + lines[line + 1:]
    before, after = (ask(VLLM, {"/metrics/": (200, "\n".join(page))})[0] for page in (lines, moved))
    assert before.work != after.work and before == ask(VLLM, {"/metrics/": (200, PAGE)})[0]


def test_several_engines_in_one():
    figures, _ = ask(VLLM, {"/metrics/": (200, TWO)})
    assert figures.requests == 6 and len(figures.work) == 8


def test_vllm_with_several_servers_gives_the_whole_page():
    figures, asked = ask(VLLM, {"/metrics/?" + ask(VLLM, {})[1][0].partition("?")[2]: (200, ""), "/metrics/": (200, PAGE)})
    assert figures.requests == 3 and len(asked) == 2 and asked[1] == "/metrics/"


def test_older_vllm():
    figures, _ = ask(VLLM, {"/metrics/": (200, OLD)})
    assert figures.requests == 1 and len(figures.work) == 2


def slots(*busy, done=0):
    states = [{"id": n, "is_processing": one, "next_token": [{"n_decoded": done}]} for n, one in enumerate(busy)]
    return 200, json.dumps(states, separators=(",", ":"))


def test_llama_cpp():
    """By its slots: others may wait where all are taken, and nobody where one is free."""
    assert ask(LLAMA_CPP, {"/slots": slots(True, False)})[0].requests == 1
    assert ask(LLAMA_CPP, {"/slots": slots(False, False)})[0].requests == 0
    assert ask(LLAMA_CPP, {"/slots": slots(True, True)})[0].requests is None
    before, after = (ask(LLAMA_CPP, {"/slots": slots(True, done=done)})[0] for done in (1, 2))
    assert before.work != after.work


@pytest.mark.parametrize("off", [(501, '{"error":{"code":501,"message":"This server does not support slots endpoint."}}'),
                                 (404, ""), (400, "{}"), (200, "<html>hello</html>"), (200, "[]")], ids=str)
def test_llama_cpp_without_slots(off):
    page = (SUPPORT / "wire/llama_metrics.txt").read_text()
    figures, asked = ask(LLAMA_CPP, {"/slots": off, "/metrics": (200, page)})
    assert figures.requests == 0 and asked == ["/slots", "/metrics"]
    assert figures != ask(LLAMA_CPP, {"/metrics": (200, page.replace("n_decode_total 1349", "n_decode_total 1350"))})[0]
    assert ask(LLAMA_CPP, {"/slots": off, "/metrics": off})[0] is None


@pytest.mark.parametrize("page", [
    "", "\n", "<html>502</html>", '{"detail":"Not Found"}', "vllm:num_requests_running", "vllm:num_requests_running{",
    "# TYPE vllm:kv_cache_usage_perc gauge\n", "llamacpp:n_decode_totals 5", "vllm:kv_cache_usage_percent 1", "\0\xff" * 1000,
    "vllm:num_requests_running{" + "}" * 100_000, "vllm:num_requests_running{}" + " " * 100_000,
    "avllm:num_requests_running 1\n", "vllm:num_requests_running" + "{" * 50_000 + "\n" * 50_000,
], ids=lambda page: page[:30])
@pytest.mark.parametrize("kind", [VLLM, LLAMA_CPP, OTHER], ids=["vLLM", "llama.cpp", "other"])
def test_no_figures(kind, page):
    """Whatever stands there instead: then the clock alone decides."""
    assert ask(kind, {"/metrics/": (200, page), "/metrics": (200, page), "/slots": (200, page)})[0] is None
    assert ask(kind, {"/metrics/": (500, PAGE), "/metrics": (401, PAGE), "/slots": (500, slots(True)[1])})[0] is None


@pytest.mark.parametrize("value", ["abc", "NaN", "+Inf", "-1", "1e999", "1.2.3"])
def test_odd_numbers(value):
    """They change or they do not; but how many requests they mean nobody knows."""
    def page(cache):
        return ask(VLLM, {"/metrics/": (200, f"vllm:num_requests_running {value}\nvllm:kv_cache_usage_perc {cache}\n")})[0]
    for work, stuck in ((lambda now: page(now // 40), False), (lambda now: page(0.5), True)):
        run = Run(work)
        run.owe()
        assert bool(run.go_on(500).stuck) is stuck


def test_nothing_is_asked_of_another_kind():
    assert ask(OTHER, {}) == (None, [])


# ---- the canary

def test_canary():
    entry = {"id": "glm", "owned_by": "vllm"}
    for kind in KINDS:
        assert kind.canary(entry, "chat") == ("/v1/completions", {"model": "glm", "prompt": "1", "max_tokens": 1})
        assert kind.canary(entry, "embedding") == ("/v1/embeddings", {"model": "glm", "input": "1"})
    assert OTHER.canary(entry, "chat") is None
    assert LLAMA_CPP.canary({**entry, "status": {"value": "unloaded"}}, "chat") is None


TEXT = text_completion("!")


SAID = [
    (200, TEXT, True), (200, embeddings([0.5]), True), (200, {**TEXT, "error": None}, True), (200, completion("!"), True),
    (200, b"".join(text_chunks("!", usage=True)), True),
    (200, {"content": "!", "stop": True}, True),        # llama.cpp's of before it had OpenAI's form
    (400, {"detail": "x"}, True), (401, {}, True), (404, b"", True), (429, b"", True), (501, b"", True),
    (200, {"error": {"message": "EngineCore died", "code": 500}}, False), (200, {"error": "dead"}, False),
    (200, {"object": "error", "message": "dead"}, False), (200, {**TEXT, "choices": []}, False),
    (200, {**TEXT, "choices": [{**TEXT["choices"][0], "finish_reason": "abort"}]}, False),
    (200, {"object": "list", "data": []}, False), (200, {"choices": None}, False), (200, {"choices": [1]}, False),
    (200, died() + DONE, False), (200, text_chunks("!")[0] + died() + DONE, False), (200, DONE, False), (200, b": ping\n\n", False),
    (200, b"", False), (200, b"<html>Welcome", False), (200, b"[]", False), (200, b"{}", False), (200, b"[" * 100_000, False),
    (204, b"", False), (302, b"", False), (307, b"", False), (408, b"", False), (500, b"", False), (502, b"<html>", False),
    (503, b"", False), (504, b"", False), (524, b"", False), (529, b"", False),
]


def test_what_a_canary_says():
    """A refusal shows that the core works; an error does not, nor what is no answer at all."""
    for status, body, work in SAID:
        assert works(status, body if isinstance(body, bytes) else compact(body)) is work, (status, body)
