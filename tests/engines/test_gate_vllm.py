"""The Gate before real vLLM on the CPU, beside the one that counts requests (`heavy_prompt = 0`): `./run.sh test --vllm`.

Each scene is played twice before one engine, and prints a line for each. What long prompts do to others depends on the
engine's flags: with a threshold of a quarter of the budget it takes four of them to fill a step, with half of it two.
The moments of the first scene's requests are left in trace.json, of which bench/gate/picture.py makes docs/queue.svg.
"""
import json
import random
import socket
import threading
import time
from contextlib import contextmanager
from statistics import median

import pytest

from support.chat import PATH
from support.client import Client, Truncated
from support.gateway import Gateway, add_key
from support.observe import idle
from support.processes import wait_until
from support.real_engines import serve_vllm
from support.rows import rows

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(360)]
BUDGET, CACHE = 512, 65_536                         # tokens: of a step; of the whole cache, which takes 1 KB for each
HEAVY = {"today": 0, "new": 4000}                   # heavy_prompt
TITLES = {"today": "Requests are counted: heavy_prompt = 0", "new": "Tokens are counted: heavy prompts are read one at a time"}
PEOPLE = "Ana Ben Cem Dora Ed Fay Gus Hal Ivy Jo Kit Lea".split()
CONVERSATION = 8192                                 # tokens; those of all twelve are 1.5 times the cache
ENOUGH, LONGEST = 60, 45                            # turns, or seconds, of these twelve
WORDS = ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]      # one token of the tiny model's each
GO_ON = {"role": "assistant", "content": "Go on."}


def engine_with(threshold):
    """A fixture: the URL of a vLLM that takes so many tokens of one prompt in a step."""
    @pytest.fixture(scope="module")
    def engine(request, tmp_path_factory):
        yield from serve_vllm(
            request.config, tmp_path_factory, "--enable-prefix-caching", "--max-num-batched-tokens", BUDGET,
            "--long-prefill-token-threshold", threshold, MAX_NUM_SEQS="8", KV_CACHE_BYTES=str(CACHE * 1024))
    return engine


quarter, half = engine_with(BUDGET // 4), engine_with(BUDGET // 2)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """(a database file, {name: key})"""
    db = tmp_path_factory.mktemp("keys") / "sparks.db"
    return db, {name: add_key(name, db) for name in PEOPLE}


@contextmanager
def before(engine, gate, folder, keys):
    """A gateway with that gate, which has learned how many bytes a token has; nothing is left of what it was asked."""
    place = folder / gate
    place.mkdir()
    gateway = Gateway(place, engine, (keys[0], keys[1][PEOPLE[0]]), poll=2, keepalive=1, max_active=8, heavy_prompt=HEAVY[gate])
    gateway.people = keys[1]
    try:
        gateway.wait_alive().wait_ready()
        for n in range(3):
            Turn(gateway, PEOPLE[0], [user(text(f"{gate} {n}", 3000))]).seconds()
        yield gateway
        idle(gateway, 10)
        wait_until(lambda: not running(engine), 10, what="an engine with nothing to do")
        assert not gateway.stop()
        gateway.check_log()
    finally:
        gateway.kill()


def running(engine):
    return figure(engine, "num_requests_running") + figure(engine, "num_requests_waiting")


def figure(engine, name):
    lines = Client(engine).get("/metrics").read_all().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


# ---- what people do

def text(seed, tokens):
    """A text of so many tokens, of about four bytes each as in a real model. Those of two seeds begin differently."""
    pick = random.Random(seed).choice
    return "".join(pick(WORDS) + pick("abcdefgh") + pick("klmnopqr") for _ in range(tokens // 3))


def user(said):
    return {"role": "user", "content": said}


class Turn(threading.Thread):
    """A streamed request, and its moments: `sent`, `first` (its first token) and `over`, or None where it has not got so far."""

    def __init__(self, gateway, who, messages, max_tokens=4):
        super().__init__(daemon=True)
        self.who, self.status = who, None
        self.sent, self.first, self.over = time.monotonic(), None, None
        self.id, self.comments, self.said = f"{who}-{self.sent:.6f}", [], ""
        self.connection = gateway.client(gateway.people[who], timeout=300).open()
        self.connection.start("POST", PATH, {"model": "glm-tiny", "messages": messages, "stream": True, "max_tokens": max_tokens},
                              {"x-request-id": self.id})
        self.start()

    def run(self):
        with self.connection:
            try:
                self.read(self.connection.answer())
            except (OSError, Truncated) as error:
                self.status = self.status or error

    def read(self, answer):
        self.status = answer.status
        for event in answer.events():
            if event.comment is not None:
                self.comments.append(event.comment)
            elif event.data == "[DONE]":
                self.over = event.at
            elif event.data:
                self.hear(event)

    def hear(self, event):
        for choice in event.json().get("choices", ()):
            said = choice["delta"].get("reasoning") or choice["delta"].get("content") or ""
            if said and self.first is None:
                self.first = event.at
            self.said += said

    def seconds(self):
        """To its first token; it must have been answered."""
        self.join(300)
        assert self.status == 200 and self.over, (self.who, self.status)
        return self.first - self.sent

    def give_up(self):
        self.connection.sock.shutdown(socket.SHUT_RDWR)


class Agent(threading.Thread):
    """Somebody whose conversation goes on, turn after turn, until it is `enough`."""

    def __init__(self, gateway, who, enough):
        super().__init__(daemon=True)
        self.gateway, self.who, self.enough, self.turn, self.done = gateway, who, enough, None, 0
        self.messages = [user(text(f"{gateway.pid} {who}", CONVERSATION))]
        self.start()

    def run(self):
        while not self.enough.wait(0.5):
            self.turn = turn = Turn(self.gateway, self.who, self.messages, max_tokens=8)
            turn.join()
            if turn.over:
                self.done += 1
                self.messages += [{"role": "assistant", "content": turn.said}, user(f"What about {self.done}?")]

    def stop(self):
        if self.turn and self.turn.is_alive():
            self.turn.give_up()
        self.join(20)
        assert not self.is_alive()


# ---- a warm conversation beside cold prompts

def beside_cold_prompts(gateway, count, tokens):
    """(seconds to a first token alone, the same while so many cold prompts of two other people are read, a trace of all)"""
    ana, *others = PEOPLE[:3]
    conversation = user(text(f"{gateway.pid} conversation", 2 * CONVERSATION))

    def poll(n):
        return Turn(gateway, ana, [conversation, GO_ON, user(text(f"{gateway.pid} result {n}", 500))])

    poll(0).seconds()
    alone = [poll(n).seconds() for n in range(1, 7)]
    began = time.monotonic()
    cold = [Turn(gateway, others[n % 2], [user(text(f"{gateway.pid} cold {n}", tokens) + " say @long")], max_tokens=60)
            for n in range(count)]
    polls = []
    while any(turn.is_alive() for turn in cold):
        time.sleep(0.5)
        polls.append(poll(10 + len(polls)))
        polls[-1].seconds()
    read = max(turn.sent + turn.seconds() for turn in cold)
    print(f"  cold prompts had their first token after {', '.join(f'{turn.seconds():.1f}' for turn in cold)} s",
          f"and heard {sorted({comment for turn in cold for comment in turn.comments})}")
    return alone, [turn.seconds() for turn in polls if turn.sent < read], trace(gateway, cold, polls, began)


def trace(gateway, cold, polls, began):
    """The requests' moments, as a picture wants them: seconds since `began`."""
    waits = {row["id"]: row["queued_ms"] / 1000 for row in rows(gateway.db, "queued_ms IS NOT NULL")}
    names = [f"{turn.who}'s cold prompt {n}" for n, turn in enumerate(cold, 1)] + [f"{turn.who}'s warm turns" for turn in polls]
    found = []
    for name, turn in zip(names, [*cold, *polls], strict=True):
        moments = {"sent": turn.sent, "in": turn.sent + waits[turn.id], "first": turn.first, "over": turn.over}
        found.append({"name": name} | {moment: round(at - began, 3) for moment, at in moments.items()})
    return found


@pytest.mark.parametrize("flags, count, tokens", [("quarter", 4, 10_000), ("half", 2, 14_000)])
def test_a_warm_conversation_beside_cold_prompts(request, flags, count, tokens, keys, tmp_path):
    engine, times, slowest, scenes = request.getfixturevalue(flags), {}, {}, []
    for gate, title in TITLES.items():
        with before(engine, gate, tmp_path, keys) as gateway:
            alone, beside, requests = beside_cold_prompts(gateway, count, tokens)
        scenes.append({"title": title, "requests": requests})
        times[gate], slowest[gate] = median(beside) / median(alone), max(beside)
        print(f"{flags}, {gate}: a warm turn's first token after {median(alone):.2f} s alone; beside {count} cold prompts",
              f"{times[gate]:.1f} times that, at most {slowest[gate]:.2f} s of {len(beside)}")
    (tmp_path / "trace.json").write_text(json.dumps(scenes))
    print(f"  {tmp_path / 'trace.json'}")
    assert times["new"] <= 4 < times["today"] and 2 * slowest["new"] < slowest["today"]


# ---- more conversations than the cache holds

def agents_at_work(engine, gateway):
    """(the share of prompts that the cache had, how many turns, of how many agents)"""
    names = ("prefix_cache_hits_total", "prefix_cache_queries_total")
    earlier = [figure(engine, name) for name in names]
    enough, until = threading.Event(), time.monotonic() + LONGEST
    agents = [Agent(gateway, who, enough) for who in PEOPLE]
    while sum(agent.done for agent in agents) < ENOUGH and time.monotonic() < until:
        time.sleep(0.2)
    enough.set()
    for agent in agents:
        agent.stop()
    hits, queries = (figure(engine, name) - before for name, before in zip(names, earlier, strict=True))
    return hits / queries, sum(agent.done for agent in agents), sum(agent.done > 0 for agent in agents)


def test_more_conversations_than_the_cache_holds(quarter, keys, tmp_path):
    shares = {}
    for gate in HEAVY:
        with before(quarter, gate, tmp_path, keys) as gateway:
            began = time.monotonic()
            shares[gate], turns, agents = agents_at_work(quarter, gateway)
        print(f"{gate}: {shares[gate]:.2f} of the prompts were cached; {turns} turns of {agents} agents in",
              f"{time.monotonic() - began:.0f} s")
    assert shares["new"] >= 0.8 > shares["today"]
