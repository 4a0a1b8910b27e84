"""The Gate, as lists of events in and lists of decisions out; then properties that hold after any events."""
import re
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from admission import MARGIN, MINUTE, NONE, PASSES, Gate, Limits, Seats
from errors import (
    LimitExceeded,
    ModelUnavailable,
    Overloaded,
    QueueFull,
    QuotaExceeded,
    Refusal,
    ShuttingDown,
)

NOON = 1_796_040_000.0                              # 2026-11-30 12:00 UTC
DAY = 86400


def gate_of(slots, most_waiting):
    """A Gate of some models, each at a place of its own."""
    gate, models = Gate(most_waiting), ("m", "n", "other")
    gate.arrange({model: (f"at {model}",) for model in models}, {f"at {model}": Seats(slots) for model in models}, NOON)
    return gate


def active_in(gate, lane):
    return sum(gate.places[name].active for name in lane.places)


class Play:
    """Events as words: `+a1` enters request 1 of key a, `-a1` ends it, `~a1` has its place not begin with it; each gives the names that were granted.

    places   {name: Seats} of the model; `homes`: where the requests' conversations ran before. Grants then name the place.
    """

    def __init__(self, slots=1, most_waiting=64, limits=None, places=None, homes=None):
        self.gate, self.limits, self.model, self.homes = gate_of(slots, most_waiting), limits or {}, "m", homes or {}
        self.tickets, self.now, self.places = {}, NOON, places
        if places:
            self.arrange(**places)

    def arrange(self, **places):
        self.places = {**self.places, **places}
        return self.said(self.gate.arrange({"m": tuple(self.places)}, self.places, self.now))

    def said(self, granted):
        return " ".join(f"{ticket.name}@{ticket.place}" if self.places else ticket.name for ticket in granted)

    def __call__(self, *words, tokens=0, reached=True):
        return [self.one(word, tokens, reached) for word in words]

    def one(self, word, tokens, reached):
        self.now += 0.001
        sign, name = word[0], word[1:]
        if sign == "+":
            key = name[0]
            try:
                ticket, granted = self.gate.enter(key, self.model, self.limits.get(key, NONE), self.now, self.homes.get(name))
            except Refusal as refusal:
                return refusal.code
            ticket.name, self.tickets[name] = name, ticket
        elif sign == "~":
            granted = self.gate.put_back(self.tickets[name], self.now)
        else:
            granted = self.gate.leave(self.tickets[name], tokens, reached, self.now)
        return self.said(granted)


def test_first_come_first_served_within_a_key():
    play = Play()
    assert play("+a1", "+a2", "+a3", "-a1", "-a2", "-a3") == ["a1", "", "", "a2", "a3", ""]


def test_keys_take_turns():
    play = Play()
    assert play("+a1", "+a2", "+a3", "+b1", "+c1", "-a1", "-b1", "-c1", "-a2") == ["a1", "", "", "", "", "b1", "c1", "a2", "a3"]


def test_one_question_does_not_wait_for_twenty_agents():
    play = Play(slots=2)
    play(*[f"+a{n}" for n in range(20)])
    assert play("+b1", "-a0", "-a1") == ["", "b1", "a2"]


def test_the_key_whose_turn_is_longest_ago_comes_next():
    play = Play()
    play("+a1", "+a2", "+b1", "-a1", "+b2", "+a3")
    assert play("-b1", "-a2", "-b2") == ["a2", "b2", "a3"]


def test_a_keys_own_limit_holds_with_slots_free():
    play = Play(slots=4, limits={"a": Limits(active=1)})
    assert play("+a1", "+a2", "+b1", "-a1", "-a2") == ["a1", "", "b1", "a2", ""]


def test_a_keys_limit_counts_over_all_models():
    gate, limits = gate_of(2, 9), Limits(active=1)
    first, _ = gate.enter("a", "m", limits, NOON)
    second, granted = gate.enter("a", "other", limits, NOON)
    assert granted == [] and gate.leave(first, 0, True, NOON) == [second]


def test_a_check_counts_nothing():
    """It says what would become of a request, as often as it is asked."""
    gate, limits = gate_of(1, 1), Limits(requests_per_minute=2)
    for _ in range(5):
        gate.check("a", "m", limits, NOON)
    for _ in range(2):
        gate.enter("a", "m", limits, NOON)
    assert (gate.active, gate.waiting) == (1, 1)
    for code, key in (("rate_limit_exceeded", "b"), ("overloaded", "a")):
        gate.account("b").requests.extend([NOON] * 2)
        with pytest.raises(Refusal) as caught:
            gate.check(key, "m", limits, NOON)
        assert caught.value.code == code
    gate.closed = True
    with pytest.raises(Refusal, match="restarting"):
        gate.check("a", "m", NONE, NOON)
    assert (gate.active, gate.waiting) == (1, 1)


def test_a_request_that_prepares_counts_but_takes_no_place():
    """It is one of its key's requests a minute; it holds no slot, and nobody's place in the queue."""
    gate, limits = gate_of(1, 1), Limits(requests_per_minute=3)
    first, second = gate.prepare("a", "m", limits, NOON), gate.prepare("a", "m", limits, NOON)
    assert (gate.active, gate.waiting) == (0, 0)
    with pytest.raises(Refusal, match="2 of your requests are being fetched"):      # as many as could run and wait
        gate.prepare("a", "m", limits, NOON)
    other, granted = gate.enter("b", "m", NONE, NOON)
    assert granted == [other] and gate.line_up(first, NOON) == [] and first.state == "waiting"
    with pytest.raises(Refusal) as caught:
        gate.prepare("a", "m", limits, NOON)
    assert caught.value.code == "overloaded"
    with pytest.raises(Refusal) as caught:          # the queue is full by now
        gate.line_up(second, NOON)
    assert caught.value.code == "overloaded" and second.state == "preparing"
    assert gate.leave(second, 0, False, NOON) == gate.leave(second, 0, False, NOON) == []
    assert gate.leave(other, 0, True, NOON) == [first]
    assert len(gate.account("a").requests) == 1 and gate.account("a").preparing == 0


def test_one_that_prepared_in_vain_is_not_counted():
    gate, limits = gate_of(1, 1), Limits(requests_per_minute=1)
    ticket = gate.prepare("a", "m", limits, NOON)
    with pytest.raises(Refusal, match="requests a minute"):
        gate.prepare("a", "m", limits, NOON)
    gate.leave(ticket, 0, False, NOON + 9)
    ticket = gate.prepare("a", "m", limits, NOON + 9)
    assert gate.line_up(ticket, NOON + 9) == [ticket]


def test_slots_are_per_model():
    gate = gate_of(1, 9)
    for model in ("m", "n"):
        ticket, granted = gate.enter("a", model, NONE, NOON)
        assert granted == [ticket]
    assert gate.active == 2


def test_a_raised_limit_lets_the_waiting_in():
    play = Play(slots=4, limits={"a": Limits(active=1)})
    play("+a1", "+a2")
    play.limits = {}
    assert play("+a3") == ["a2 a3"]


def test_who_leaves_the_queue_is_gone_from_it():
    play = Play()
    assert play("+a1", "+b1", "+c1", "-b1", "-a1") == ["a1", "", "", "", "c1"]
    assert play("-b1", "-c1", "-c1") == ["", "", ""] and play.gate.active == play.gate.waiting == 0


def test_positions_in_the_queue():
    play = Play()
    play("+a1", "+a2", "+a3", "+b1", "+b2")
    assert [play.gate.position(play.tickets[name]) for name in ("a1", "b1", "a2", "b2", "a3")] == [0, 1, 2, 3, 4]


# ---- the queue's bounds

def test_full_queue():
    play = Play(most_waiting=4)
    assert play("+a1", "+a2", "+a3", "+b1", "+b2") == ["a1", "", "", "", ""]
    assert play("+a4", "+c1", "+c2", "+d1") == ["queue_full", "", "overloaded", ""]


def test_a_key_with_nothing_waiting_is_always_let_in_once():
    play = Play(most_waiting=0)
    assert play("+a1", "+a2", "+a3", "+b1", "+b2") == ["a1", "", "overloaded", "", "overloaded"]


def test_retry_after_follows_how_fast_slots_come_free():
    play = Play(most_waiting=1)
    for n in range(8):                              # a slot every two seconds
        play(f"+a{n}")
        play.now += 2
        play(f"-a{n}")
    play("+a8", "+b1", "+b2")
    with pytest.raises(Overloaded) as caught:
        play.gate.enter("b", "m", NONE, play.now)
    assert 2 <= caught.value.retry_after <= 6


@pytest.mark.parametrize("freed", [[], [NOON], [NOON, NOON + 5000]])
def test_retry_after_is_30_at_most(freed):
    play = Play(most_waiting=0)
    play("+a1", "+a2")
    play.tickets["a1"].lane.freed.extend(freed)
    with pytest.raises(Overloaded) as caught:
        play.gate.enter("a", "m", NONE, NOON + 6000)
    assert caught.value.retry_after == 30


def test_waited_too_long():
    play = Play()
    play("+a1", "+a2", "+a3", "+b1")
    assert isinstance(play.gate.late(play.tickets["a2"], play.now), QueueFull)
    assert isinstance(play.gate.late(play.tickets["b1"], play.now), Overloaded)


def test_draining():
    play = Play()
    play("+a1", "+a2")
    play.gate.closed = True
    with pytest.raises(ShuttingDown):
        play.gate.enter("a", "m", NONE, NOON)
    assert play("-a1") == ["a2"]


# ---- windows and budgets

def refusal(gate, limits, now, key="a"):
    with pytest.raises(Refusal) as caught:
        gate.enter(key, "m", limits, now)
    return caught.value


def test_requests_per_minute_slide():
    gate, limits = gate_of(9, 9), Limits(requests_per_minute=2)
    for at in (0, 20):
        gate.enter("a", "m", limits, NOON + at)
    said = refusal(gate, limits, NOON + 30)
    assert isinstance(said, LimitExceeded) and said.retry_after == 30
    assert "2 requests a minute" in said.message and "30 s" in said.message
    gate.enter("a", "m", limits, NOON + 60)
    assert refusal(gate, limits, NOON + 61).retry_after == 19


def test_a_refused_request_burns_nothing():
    gate, limits = gate_of(9, 9), Limits(requests_per_minute=1)
    gate.enter("a", "m", limits, NOON)
    for at in range(1, 59):
        refusal(gate, limits, NOON + at)
    gate.enter("a", "m", limits, NOON + MINUTE)


def test_a_full_queue_is_found_before_anything_is_counted():
    gate, limits = gate_of(1, 0), Limits(requests_per_minute=9)
    for _ in range(2):
        gate.enter("a", "m", limits, NOON)
    refusal(gate, limits, NOON)
    assert gate.account("a").standing(limits, NOON)["x-ratelimit-remaining-requests"] == "7"


def test_a_request_that_reached_no_engine_is_given_back():
    gate, limits = gate_of(9, 9), Limits(requests_per_minute=1)
    ticket, _ = gate.enter("a", "m", limits, NOON)
    gate.leave(ticket, 0, False, NOON + 1)
    ticket, _ = gate.enter("a", "m", limits, NOON + 2)
    gate.leave(ticket, 0, True, NOON + 3)
    refusal(gate, limits, NOON + 4)


def test_tokens_per_minute():
    gate, limits = gate_of(9, 9), Limits(tokens_per_minute=100)
    first, _ = gate.enter("a", "m", limits, NOON)
    second, _ = gate.enter("a", "m", limits, NOON)
    gate.leave(first, 60, True, NOON + 10)
    gate.enter("a", "m", limits, NOON + 11)
    gate.leave(second, 60, True, NOON + 20)
    said = refusal(gate, limits, NOON + 30)
    assert said.code == "rate_limit_exceeded" and said.retry_after == 40 and "used 120" in said.message
    gate.enter("a", "m", limits, NOON + 70)


@pytest.mark.parametrize("limits, rest, words", [
    (Limits(tokens_per_day=100), 12 * 3600, "today"), (Limits(tokens_per_month=100), 12 * 3600, "this month")])
def test_budgets(limits, rest, words):
    gate = gate_of(9, 9)
    ticket, _ = gate.enter("a", "m", limits, NOON)
    gate.leave(ticket, 100, True, NOON)
    said = refusal(gate, limits, NOON + 1)
    assert isinstance(said, QuotaExceeded) and said.headers["x-should-retry"] == "false" and words in said.message
    assert said.retry_after == rest - 1 and "2026-12-01 00:00 UTC" in said.message
    gate.enter("a", "m", limits, NOON + rest)


def test_a_restart_does_not_reset_a_budget():
    gate, limits = gate_of(9, 9), Limits(tokens_per_day=100)
    gate.begin("a", 99, 500, NOON)
    ticket, _ = gate.enter("a", "m", limits, NOON)
    gate.leave(ticket, 1, True, NOON)
    assert refusal(gate, limits, NOON).code == "quota_exceeded"


@pytest.mark.parametrize("days", [-31, -1, 1, 31, 400])
def test_periods_follow_the_wall_clock_and_windows_do_not(days):
    """It is set while the gateway runs: another day has its own tokens, and a minute is not over."""
    gate, limits = gate_of(9, 9), Limits(tokens_per_day=100, tokens_per_minute=1000)
    ticket, _ = gate.enter("a", "m", limits, NOON)
    gate.leave(ticket, 100, True, NOON)
    assert refusal(gate, limits, NOON).code == "quota_exceeded"
    gate.ahead = days * 86400.0
    ticket, _ = gate.enter("a", "m", limits, NOON + 1)
    gate.begin("a", 60, 60, NOON + 1 + gate.ahead)      # as the ledger has it
    gate.leave(ticket, 40, True, NOON + 1)
    said = refusal(gate, limits, NOON + 1)
    assert said.code == "quota_exceeded" and said.retry_after == 12 * 3600 - 1
    assert gate.account("a").standing(limits, NOON + 1)["x-ratelimit-remaining-tokens"] == "860"


def test_a_changed_limit_counts_at_once():
    gate = gate_of(9, 9)
    gate.enter("a", "m", Limits(requests_per_minute=1), NOON)
    refusal(gate, Limits(requests_per_minute=1), NOON)
    gate.enter("a", "m", Limits(requests_per_minute=2), NOON)
    gate.enter("a", "m", NONE, NOON)


def test_windows_as_headers():
    gate, limits = gate_of(9, 9), Limits(requests_per_minute=5, tokens_per_minute=1000)
    ticket, _ = gate.enter("a", "m", limits, NOON)
    gate.leave(ticket, 250, True, NOON + 10)
    assert gate.account("a").standing(limits, NOON + 20) == {
        "x-ratelimit-limit-requests": "5", "x-ratelimit-remaining-requests": "4", "x-ratelimit-reset-requests": "40.000s",
        "x-ratelimit-limit-tokens": "1000", "x-ratelimit-remaining-tokens": "750", "x-ratelimit-reset-tokens": "50.000s"}
    assert gate.account("b").standing(NONE, NOON) == {}


# ---- several places

def two(a=2, b=2, **options):
    return {"A": Seats(a, **options), "B": Seats(b)}


TURNS = {
    "the least busy": ({"places": two()}, "+a1 +a2 +a3 +a4 +a5 -a2", "a1@A a2@B a3@A a4@B - a5@B"),
    "in turns where both are idle": ({"places": two()}, "+a1 -a1 +a2 -a2 +a3", "a1@A - a2@B - a3@A"),
    "by weight": ({"places": two(9, 9, weight=3)}, "+a1 +a2 +a3 +a4 +a5 +a6 +a7", "a1@A a2@A a3@B a4@A a5@A a6@A a7@B"),
    "a full one is passed over": ({"places": two(1, 3)}, "+a1 +a2 +a3 +a4 +a5", "a1@A a2@B a3@B a4@B -"),
    "where it ran last": ({"places": two(), "homes": {"a2": "A", "a3": "B"}}, "+a1 +a2 +a3", "a1@A a2@A a3@B"),
    "elsewhere where that is full": ({"places": two(), "homes": dict.fromkeys(("a1", "a2", "a3"), "A")},
                                     "+a1 +a2 +a3", "a1@A a2@A a3@B"),
    "elsewhere where that is gone": ({"places": two(), "homes": {"a1": "C"}}, "+a1", "a1@A"),
    "elsewhere where that drains": ({"places": two(open=False), "homes": {"a1": "A"}}, "+a1", "a1@B"),
    "its own first": ({"places": two(1, 1), "homes": {"a3": "A", "a4": "B", "a5": "A"}},
                      "+a1 +a2 +a3 +a4 +a5 -a2 -a1 -a4", "a1@A a2@B - - - a4@B a3@A a5@B"),
    "the first of those whose home is full": ({"places": two(1, 1), "homes": dict.fromkeys(("a2", "a3"), "A")},
                                              "+a1 +b1 +a2 +a3 -b1", "a1@A b1@B - - a2@B"),
    "another key's turn is its turn": ({"places": two(1, 1), "homes": {"b1": "A", "a3": "B"}},
                                       "+a1 +a2 +b1 +a3 -a2 -b1", "a1@A a2@B - - b1@B a3@B"),
    "not begun: once more elsewhere": ({"places": two()}, "+a1 ~a1 -a1", "a1@A a1@B -"),
    "not begun: first in the queue": ({"places": two(1, 1)}, "+a1 +b1 +a2 +c1 ~a1 -b1 -c1", "a1@A b1@B - - c1@A a1@B a2@A"),
    "not begun: no turns for others of its key meanwhile": ({"places": two(1, 1)}, "+a1 +c1 +a2 +a3 +b1 +b2 ~a1 -b1 -a2 -b2 -c1",
                                                            "a1@A c1@B - - - - b1@A a2@A b2@A a3@A a1@B"),
    "not begun: in the turn that it had": ({"places": two(1, 1)}, "+b1 -b1 +a1 -a1 +a2 +c1 +b2 +d1 ~a2 -c1", "b1@A - a1@B - a2@A c1@B - - d1@A b2@B"),
    "not begun: before those who came later": ({"places": two(1, 1)}, "+a1 +b1 +c1 +d1 ~a1 -b1", "a1@A b1@B - - c1@A a1@B"),
    "not begun: not even at home": ({"places": two(1, 1), "homes": {"a1": "A"}}, "+a1 +c1 +a2 +a3 ~a1 -c1", "a1@A c1@B - - a2@A a1@B"),
    "not begun: nor with the same one": ({"places": two(1, 1)}, "+a1 +b1 ~a1 +a2 -a2 -b1", "a1@A b1@B - a2@A - a1@B"),
}


@pytest.mark.parametrize("name", TURNS)
def test_where_requests_run(name):
    options, words, said = TURNS[name]
    assert [grant or "-" for grant in Play(**options)(*words.split())] == re.findall(r"-|\S+@\w", said)


@pytest.mark.parametrize("weights, most", [((1, 1), MARGIN), ((50, 50), MARGIN), ((0.5, 0.5), MARGIN), ((3, 1), 3 * MARGIN), ((1, 3), MARGIN)])
def test_a_home_that_is_clearly_busier_is_left(weights, most):
    """Whatever weights are counted in."""
    places = {name: Seats(99, weight) for name, weight in zip("AB", weights, strict=True)}
    play = Play(places=places, homes=dict.fromkeys([f"a{n}" for n in range(99)], "A"))
    runs = play(*[f"+a{n}" for n in range(most + 2)])
    assert {run[-1] for run in runs[:-1]} == {"A"} and runs[-1] == f"a{most + 1}@B"


def test_nobody_lets_others_by_for_ever():
    play = Play(places=two(1, 1), homes={"a2": "A", **{f"a{n}": "B" for n in range(3, 99)}})
    play("+a0", "+a1", *[f"+a{n}" for n in range(2, 30)])
    runs = []
    while "a2@B" not in runs:
        runs += play(f"-{runs[-1][:-2] if runs else 'a1'}")
    assert len(runs) == PASSES + 1


def test_nobody_waits_for_a_home_that_closes():
    play = Play(places=two(1, 1), homes={"a3": "A"})
    play("+a1", "+a2", "+a3", "+a4")
    assert play.arrange(A=Seats(1, open=False)) == "" and play("-a2") == ["a3@B"]


def test_what_comes_open_is_given_at_once_and_what_closes_is_not_given_again():
    play = Play(places=two(1, 1))
    assert not play.gate.is_given_up("A")
    assert play("+a1", "+a2", "+a3", "+a4") == ["a1@A", "a2@B", "", ""]
    assert play.arrange(C=Seats(1)) == "a3@C"
    assert play.arrange(A=Seats(1, open=False)) == "" and play("-a1") == [""]
    assert play.arrange(B=Seats(2)) == "a4@B" and play.gate.slots == 3
    play.places.pop("B")
    assert play.arrange() == "" and play.gate.slots == 1
    given_up = []
    for word in ("+a5", "-a2", "-a4"):
        assert play(word) == [""]
        given_up.append([name for name in ("A", "B", "C", "D") if play.gate.is_given_up(name)])
    assert given_up == [["A"], ["A"], ["A", "B"]] and play("-a3") == ["a5@C"]
    play.arrange()
    assert set(play.gate.places) == {"A", "C"}


def test_lanes_share_a_place_fairly():
    """Two models of one engine's slots: who has waited for longer comes first, whichever it asks for."""
    gate = Gate(9)
    gate.arrange({"m": ("A",), "n": ("A", "B")}, two(1, 0), NOON)
    first, _ = gate.enter("a", "m", NONE, NOON)
    again, granted = gate.enter("a", "m", NONE, NOON)
    other, more = gate.enter("b", "n", NONE, NOON)
    assert granted == more == [] and gate.leave(first, 0, True, NOON) == [other] and gate.leave(other, 0, True, NOON) == [again]


def test_a_keys_requests_for_several_models_of_an_engine_come_in_their_order():
    """An engine may list one model under two names, and each of them has a queue."""
    gate, order = Gate(9), []
    gate.arrange({"m": ("A",), "n": ("A",)}, {"A": Seats(1)}, NOON)
    tickets = [gate.enter("a", lane, NONE, NOON + n)[0] for n, lane in enumerate("mmnnm")]
    for n in range(5):
        order += gate.leave(tickets[n], 0, True, NOON)
    assert order == tickets[1:]


def test_nobody_waits_for_what_is_not_there():
    play = Play(places=two(1, 1))
    play("+a1", "+a2", "+a3")
    gate, shut = play.gate, Seats(1, open=False)
    assert play.arrange(A=shut) == "" and gate.stranded() == []
    assert play.arrange(B=shut) == "" and [ticket.name for ticket in gate.stranded()] == ["a3"]
    prepared = None
    for enter in (gate.check, gate.enter, gate.prepare):
        for lane in ("m", "unknown"):
            with pytest.raises(ModelUnavailable) as caught:
                enter("b", lane, NONE, NOON)
            assert caught.value.retry_after and caught.value.not_begun
    play.arrange(A=Seats(1))
    prepared = gate.prepare("b", "m", NONE, NOON)
    play.arrange(A=shut)
    with pytest.raises(ModelUnavailable):
        gate.line_up(prepared, NOON)
    assert play("-a1", "-a2", "-a3") == ["", "", ""] and gate.leave(prepared, 0, False, NOON) == [] and not gate.active


def test_one_that_no_other_place_can_take_is_stranded():
    play = Play(places=two(1, 1))
    play("+a1")
    play.arrange(B=Seats(1, open=False))
    assert play("~a1") == [""] and [ticket.name for ticket in play.gate.stranded()] == ["a1"]


# ---- properties

EVENTS = st.lists(st.tuples(st.sampled_from("eeepqlll"), st.sampled_from("abcd"), st.integers(0, 40), st.sampled_from("mn")), max_size=120)
CAPS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 3))


@given(EVENTS, st.integers(1, 4), st.integers(0, 12), CAPS)
def test_whatever_happens(events, slots, most_waiting, caps):
    gate, tickets, now, turns = gate_of(slots, most_waiting), [], NOON, []
    limits = {key: Limits(active=caps.get(key)) for key in "abcd"}
    for kind, key, number, model in events:
        now += 1
        if kind == "p":
            granted = []
            with suppress(Refusal):
                tickets.append(gate.prepare(key, model, limits[key], now))
        elif kind == "q":
            granted = []
            for ticket in [ticket for ticket in tickets if ticket.state == "preparing"][:1]:
                with suppress(Refusal):
                    granted = gate.line_up(ticket, now)
        elif kind == "e":
            had_none = not gate.account(key).waiting
            try:
                ticket, granted = gate.enter(key, model, limits[key], now)
            except Refusal:
                assert not had_none
                granted = []
            else:
                tickets.append(ticket)
        elif tickets:
            granted = gate.leave(tickets[number % len(tickets)], number, True, now)
        else:
            continue
        turns += granted
        check(gate, tickets, caps, slots)
    for ticket in tickets:
        turns += gate.leave(ticket, 1, True, now)
        check(gate, tickets, caps, slots)
    assert gate.active == gate.waiting == 0
    assert all(not lane.queues for lane in gate.lanes.values())
    assert len(set(map(id, turns))) == len(turns)


def check(gate, tickets, caps, slots):
    active = [ticket for ticket in tickets if ticket.state == "active"]
    waiting = [ticket for ticket in tickets if ticket.state == "waiting"]
    by_key = Counter(ticket.key for ticket in active)
    assert gate.active == len(active) and gate.waiting == len(waiting)
    assert all(by_key[key] <= caps.get(key, 99) for key in by_key)
    for lane in gate.lanes.values():
        assert active_in(gate, lane) == sum(ticket.lane is lane for ticket in active) <= slots
        if active_in(gate, lane) < slots:                     # a slot is free: whoever waits must not be allowed it
            assert all(by_key[ticket.key] >= caps.get(ticket.key, 99) for ticket in waiting if ticket.lane is lane)
    for key, account in gate.accounts.items():
        mine = Counter(ticket.state for ticket in tickets if ticket.key == key)
        assert (account.active, account.waiting, account.preparing) == tuple(mine[state] for state in ("active", "waiting", "preparing"))


STEPS = st.lists(st.tuples(st.sampled_from("eeeellltcp"), st.sampled_from("abc"), st.integers(0, 40), st.sampled_from("mn"),
                           st.sampled_from(["A", "B", "C", None])), max_size=120)


@given(STEPS, st.lists(st.integers(1, 3), min_size=3, max_size=3), st.booleans())
def test_whatever_happens_with_several_places(steps, slots, capped):
    """No place has more than its slots from when they are what they are, nobody waits beside a free one, nothing leaks."""
    gate, tickets, now = Gate(99), [], NOON
    limits, seats = Limits(active=2 if capped else None), {name: Seats(n, n) for name, n in zip("ABC", slots, strict=True)}
    lanes = {"m": ("A", "B"), "n": ("B", "C")}
    gate.arrange(lanes, seats, now)
    for kind, key, number, lane, place in steps:
        now += 1
        active = [ticket for ticket in tickets if ticket.state == "active"]
        if kind == "e":
            with suppress(ModelUnavailable):
                tickets.append(gate.enter(key, lane, limits, now, place)[0])
        elif kind == "l" and tickets:
            gate.leave(tickets[number % len(tickets)], number, True, now)
        elif kind == "t" and active and active[number % len(active)].avoids is None:
            gate.put_back(active[number % len(active)], now)
        elif kind == "c" and place:
            seats[place] = Seats(1 + number % 3, 1 + number % 2, not seats[place].open)
            gate.arrange(lanes, seats, now)
        elif kind == "p":
            for ticket in gate.stranded():
                gate.leave(ticket, 0, False, now)
        waiting = [ticket for ticket in tickets if ticket.state == "waiting"]
        taken = Counter(ticket.place for ticket in tickets if ticket.state == "active")
        running = Counter(ticket.key for ticket in tickets if ticket.state == "active")
        assert {name: found.active for name, found in gate.places.items()} == {name: taken[name] for name in "ABC"}
        assert all(account.active == running[key] for key, account in gate.accounts.items())
        assert not any(ticket.place == ticket.avoids for ticket in tickets if ticket.state == "active")
        for ticket in waiting:
            free = [name for name in ticket.lane.places if name != ticket.avoids and gate.places[name].open and gate.places[name].active < gate.places[name].slots]
            assert not free or capped and running[ticket.key] >= 2
            assert (ticket in gate.stranded()) == (not any(seats[name].open for name in ticket.lane.places if name != ticket.avoids))
        assert gate.waiting == len(waiting) and all(n <= 2 for n in running.values() if capped)
    for ticket in tickets:
        gate.leave(ticket, 1, True, now)
    assert gate.active == gate.waiting == 0 and not any(lane.queues for lane in gate.lanes.values())


def test_lanes_that_are_gone_leave_nothing():
    """An engine may list other models each time."""
    gate = Gate(9)
    for n in range(50):
        gate.arrange({f"m{n}": (f"A{n}",)}, {f"A{n}": Seats(1)}, NOON)
        first, _ = gate.enter("a", f"m{n}", NONE, NOON)
        waiting, _ = gate.enter("a", f"m{n}", NONE, NOON)
        prepared = gate.prepare("a", f"m{n}", NONE, NOON)
        gate.arrange({}, {}, NOON)
        assert gate.stranded() == [waiting] and gate.leave(waiting, 0, False, NOON) == []
        with pytest.raises(ModelUnavailable):
            gate.line_up(prepared, NOON)
        assert gate.leave(prepared, 0, False, NOON) == gate.leave(first, 0, True, NOON) == []
    gate.arrange({}, {}, NOON)
    assert (gate.lanes, gate.places, gate.active, gate.waiting) == ({}, {}, 0, 0)


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=60), st.integers(1, 3))
def test_each_waiting_key_is_served_within_one_round(keys, slots):
    gate, running = gate_of(slots, 999), []
    for key in keys:
        running += gate.enter(key, "m", NONE, NOON)[1]
    while running:
        waiting = {key for lane in gate.lanes.values() for _, key in lane.queues}
        round_ = []
        while running and len(round_) < len(waiting):
            granted = gate.leave(running.pop(0), 0, True, NOON)
            running += granted
            round_ += [ticket.key for ticket in granted]
        assert set(round_) == waiting if waiting else True
        if not waiting:
            running = [ticket for ticket in running if gate.leave(ticket, 0, True, NOON)]
