"""The Gate where it knows tokens: heavy prompts, what is cached, what is going on, batches, turns by work, tokens put by."""
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from admission import BLOCK, NONE, Gate, Limits, Need, Seats
from admission.gate import MEMORY, SPARE
from admission.mirror import MOST_BLOCKS, Mirror
from admission.places import HOT, LULL, PATIENCE
from admission.tickets import OUTPUT
from errors import LimitExceeded, Overloaded, QueueFull, QuotaExceeded, Refusal

NOON = 1_796_040_000.0                              # 2026-11-30 12:00 UTC
ANSWER = 1000
LIGHT = Need()


def prompt(text, blocks, **more):
    """A prompt of so many blocks, 4 bytes a token; those of one text have their beginning in common."""
    size = int(blocks * BLOCK)
    hashes = tuple(f"{text} {n}".encode() for n in range(int(blocks)))
    return Need(size // 4, ANSWER, size, hashes, **more)


class Play:
    """A Gate of one model at one place, or at those that are named. Moments are seconds from noon."""

    def __init__(self, slots=8, capacity=None, heavy=8000, at_once=1, places=("A",), most_waiting=999):
        self.gate, self.limits = Gate(most_waiting, heavy, at_once), {}
        self.seats = {name: Seats(slots, 1, True, capacity) for name in places}
        self.arrange(0)

    def arrange(self, at, **seats):
        self.seats |= seats
        return self.gate.arrange({"m": tuple(self.seats)}, self.seats, NOON + at)

    def enter(self, at, key, need=LIGHT, **more):
        ticket, granted = self.gate.enter(key, "m", self.limits.get(key, NONE), NOON + at, need=need, **more)
        ticket.got_in = granted
        return ticket

    def first(self, at, ticket):
        return self.gate.first_token(ticket, NOON + at)

    def leave(self, at, ticket, cached=None, answer=100, **more):
        return self.gate.leave(ticket, 0, True, NOON + at, (ticket.need.tokens, cached, answer), **more)

    def tick(self, at):
        return self.gate.tick(NOON + at)

    def talk(self, at, key, need):
        """A whole turn of a conversation, which takes 20 s."""
        ticket = self.enter(at, key, need)
        assert ticket.state == "active"
        self.first(at + 10, ticket)
        self.leave(at + 20, ticket)

    @property
    def place(self):
        return self.gate.places["A"]


# ---- heavy prompts

def test_one_heavy_prompt_is_read_at_a_time_and_light_ones_pass():
    play = Play()
    first, second = play.enter(0, "a", prompt("x", 60)), play.enter(1, "b", prompt("y", 60))
    light, other = play.enter(2, "b", prompt("z", 1)), play.enter(3, "c")
    assert [ticket.state for ticket in (first, second, light, other)] == ["active", "waiting", "active", "active"]
    assert play.tick(199) == [] and play.first(200, first) == [second]


def test_as_many_are_read_at_once_as_the_owner_says():
    play = Play(at_once=2)
    tickets = [play.enter(n, f"k{n}", prompt(n, 60)) for n in range(3)]
    assert [ticket.state for ticket in tickets] == ["active", "active", "waiting"]


def test_the_turn_of_a_conversation_is_light():
    play = Play()
    play.talk(0, "a", prompt("talk", 60))
    busy = play.enter(71, "b", prompt("new", 60))
    again = play.enter(72, "a", prompt("talk", 61.5))
    assert (busy.state, again.state, again.cold, again.heavy) == ("active", "active", BLOCK * 1.5 / 4, False)


@pytest.mark.parametrize("change", [{"text": "other"}, {"blocks": 25}])
def test_what_is_not_cached_is_cold(change):
    play = Play()
    play.talk(0, "a", prompt("talk", 20))
    ticket = play.enter(30, "a", prompt(**{"text": "talk", "blocks": 20} | change))
    assert ticket.cold == (5 if "blocks" in change else 20) * BLOCK / 4 and ticket.heavy


def test_a_key_rests_after_its_heavy_prompt_while_others_are_there():
    play = Play()
    first, own = play.enter(0, "a", prompt("x", 60)), play.enter(1, "a", prompt("y", 60))
    assert play.enter(2, "c").state == "active"     # and it stays
    assert play.first(100, first) == []
    other = play.enter(101, "b", prompt("z", 60))
    assert other.state == "active"
    play.first(150, other)
    assert play.tick(199) == [] and play.tick(201) == [own]


def test_who_is_alone_need_not_rest():
    play = Play()
    first, own = play.enter(0, "a", prompt("x", 60)), play.enter(1, "a", prompt("y", 60))
    assert play.first(100, first) == [own]


@pytest.mark.parametrize("at, rests", [(30, True), (30 + HOT, False)])
def test_it_rests_too_while_conversations_of_others_are_going_on(at, rests):
    """The next turn of one may come any moment."""
    play = Play()
    play.talk(0, "z", prompt("talk", 60))
    first, own = play.enter(at, "a", prompt("x", 60)), play.enter(at + 1, "a", prompt("y", 60))
    assert play.first(at + 100, first) == ([] if rests else [own])


def test_a_prompt_that_was_left_counts_as_read_as_far_as_it_was():
    play = Play()
    play.talk(0, "z", prompt("pace", 60))           # 24,576 tokens a second
    left = play.enter(100, "a", prompt("x", 60))
    play.leave(105, left, answered=False)
    again = play.enter(111, "a", prompt("x", 60))      # its key has rested
    assert again.state == "active" and again.cold == 30 * BLOCK / 4


@pytest.mark.parametrize(("cached", "pace"), [(None, 29491), (59 * BLOCK // 4, 24576), (0, 29491)])
def test_a_pace_is_learned_from_what_was_not_cached(cached, pace):
    """Of a prompt that was cached after all none is; one that seems quicker than before is believed with care."""
    play = Play()
    play.talk(0, "z", prompt("pace", 60))
    ticket = play.enter(100, "a", prompt("x", 60))
    play.first(101, ticket)
    play.leave(102, ticket, cached)
    assert int(play.place.pace) == pace


def test_a_prompt_whose_first_token_nobody_sees_is_read_by_estimate():
    play = Play()
    play.talk(0, "z", prompt("pace", 60))
    play.enter(100, "a", prompt("x", 60, whole=True))
    second = play.enter(101, "b", prompt("y", 60))
    assert play.tick(109) == [] and play.tick(110) == [second]


def test_while_no_pace_is_known_it_is_read_until_it_ends():
    play = Play()
    whole, second = play.enter(0, "a", prompt("x", 60, whole=True)), play.enter(1, "b", prompt("y", 60))
    assert play.tick(500) == [] and play.leave(600, whole) == [second]
    assert play.place.pace == pytest.approx(60 * BLOCK / 4 / 600)
    assert not play.enter(601, "a", prompt("x", 61)).heavy


def test_how_far_a_heavy_prompt_has_been_read():
    play = Play()
    assert play.gate.progress(play.enter(0, "a"), NOON) is None
    play.talk(0, "z", prompt("pace", 60))
    ticket = play.enter(100, "a", prompt("x", 60))
    assert play.gate.progress(ticket, NOON + 104) == pytest.approx(0.4)
    play.first(110, ticket)
    assert play.gate.progress(ticket, NOON + 111) is None


def test_a_prompt_that_is_never_heavy():
    play = Play()
    assert all(play.enter(n, "a", prompt(n, 60, light=True)).state == "active" for n in range(8))


def test_an_engine_that_was_off_has_nothing_cached():
    play = Play()
    play.talk(0, "a", prompt("talk", 60))
    play.arrange(30, A=Seats(8, open=False))
    play.arrange(40, A=Seats(8))
    assert play.enter(50, "a", prompt("talk", 60)).heavy


def test_a_model_that_is_not_loaded_has_nothing_cached():
    """A router loads it for the next request, and answers itself meanwhile."""
    play = Play()
    play.talk(0, "a", prompt("talk", 60))
    play.arrange(30, A=Seats(8, loaded=False))
    ticket = play.enter(40, "a", prompt("talk", 60))
    assert ticket.heavy
    play.arrange(45)
    play.arrange(50, A=Seats(8))
    play.first(60, ticket), play.leave(70, ticket)
    assert not play.enter(80, "a", prompt("talk", 60)).heavy


def test_an_engine_that_keeps_nothing():
    play = Play(capacity=0)
    play.talk(0, "a", prompt("talk", 60))
    assert play.enter(50, "a", prompt("talk", 60)).heavy and not play.place.mirror.blocks


def test_each_place_reads_its_own():
    play = Play(places=("A", "B"))
    first, second, third = (play.enter(n, f"k{n}", prompt(n, 60)) for n in range(3))
    assert (first.place, second.place, third.state) == ("A", "B", "waiting")
    assert play.first(50, second) == [third] and third.place == "B"
    assert play.enter(60, "k0", prompt(1, 61), home="B").place == "B"


def test_a_place_that_did_not_begin_holds_up_no_other():
    play = Play(places=("A", "B"))
    first, second = play.enter(0, "a", prompt("x", 60)), play.enter(1, "b", prompt("y", 60))
    third = play.enter(2, "c", prompt("z", 60))
    assert play.gate.put_back(first, NOON + 3) == [third] and third.place == "A"
    assert (first.state, first.heavy, first.charged, first.reserved, play.gate.account("a").turn) == ("waiting", False, 0, 0, 0)
    assert play.first(4, second) == [first] and first.place == "B"


def test_heavy_ones_keep_their_order_within_a_key():
    play = Play()
    first = play.enter(0, "a", prompt("x", 60))
    tickets = [play.enter(n, "b", prompt(n, 60 - n)) for n in (1, 2)]
    assert play.first(9, first) == tickets[:1]


def test_the_queue_stays_bounded_though_slots_are_free():
    play = Play(most_waiting=3)
    play.enter(0, "a", prompt("x", 60))
    for n in range(1, 4):
        play.enter(n, "a", prompt(n, 60))
    for key in "ab":                                # one each is let in all the same
        with suppress(Refusal):
            play.enter(5, key, prompt(key, 60))
    assert play.gate.waiting == 4 and play.enter(6, "a").state == "active"
    with pytest.raises(QueueFull):
        play.enter(7, "a", prompt("y", 60))


def test_the_queue_stays_bounded_behind_many_long_prompts_of_ones_own():
    """Light ones that come behind more of them than are looked at wait though slots are free."""
    play = Play(most_waiting=100)
    for n in range(70):
        play.enter(n, "a", prompt(n, 60))
    with pytest.raises(QueueFull):
        for _ in range(100):
            play.enter(70, "a")
    assert play.gate.waiting == 100 and play.enter(71, "b").state == "active"


# ---- the working set

def full(play, at=360):
    """Four conversations that take the 983,040 tokens of the cache."""
    for n in range(4):
        play.talk(at + n * 20, f"k{n}", prompt(f"talk{n}", 60))
    return at + 80


def test_what_is_going_on_is_not_pushed_out_but_for_who_waits_longest():
    play = Play(capacity=1_000_000)
    now = full(play)
    play.enter(now, "k0", prompt("talk0", 60))      # it runs
    late = play.enter(now, "late", prompt("new", 60))
    assert (late.state, play.tick(now + PATIENCE - 1), play.tick(now + PATIENCE)) == ("waiting", [], [late])
    refusal = play.gate.late(late, NOON + now)
    assert play.place.forced == pytest.approx(NOON + now + PATIENCE + 5 * 10, abs=1), refusal


def test_who_waits_too_long_learns_why():
    play = Play(capacity=1_000_000)
    now = full(play)
    play.enter(now, "k0", prompt("talk0", 60))
    late = play.enter(now, "late", prompt("new", 60))
    assert "memory is full of 4 conversations" in str(play.gate.late(late, NOON + now))
    play = Play()
    play.enter(0, "a", prompt("x", 60))
    refusal = play.gate.late(play.enter(1, "b", prompt("y", 60)), NOON + 600)
    assert isinstance(refusal, Overloaded) and "one after the other" in str(refusal)


def test_what_is_not_used_any_more_makes_room():
    play = Play(capacity=1_000_000)
    now = full(play)
    play.enter(now, "k3", prompt("talk3", 60))
    late = play.enter(now + HOT, "late", prompt("new", 60))
    assert late.state == "active"


def test_what_runs_is_in_use_however_long():
    play = Play(capacity=1_000_000)
    for n in range(4):
        play.first(n, play.enter(n, f"k{n}", prompt(f"talk{n}", 60)))
    late = play.enter(4 * HOT, "late", prompt("new", 60))
    assert late.state == "waiting"


def test_an_empty_engine_takes_anything():
    assert Play(capacity=100_000).enter(0, "a", prompt("x", 1000)).state == "active"


def test_where_nothing_runs_for_a_moment_anything_may_come():
    play = Play(capacity=1_000_000)
    now = full(play)
    late = play.enter(now, "late", prompt("new", 60))
    assert late.state == "waiting" and play.tick(now + LULL - 1) == [] and play.tick(now + LULL) == [late]


def test_the_caches_size_is_learned_from_what_was_cached():
    play = Play(capacity=1_000_000)
    size = play.place.mirror.most
    for wrong, cached in ((True, 0), (False, 60 * BLOCK // 4)):
        play.talk(0, "a", prompt("talk", 60))
        ticket = play.enter(30, "a", prompt("talk", 60))
        play.leave(40, ticket, cached)
        assert (play.place.mirror.most < size) == wrong
        size = play.place.mirror.most


@pytest.mark.parametrize("beside", [0, 1])
def test_an_engine_of_which_nothing_is_ever_cached_makes_nobody_wait_for_room(beside):
    """As one without prefix caching; until it says that something was."""
    play, at = Play(capacity=1_000_000), 0
    for _ in range(beside):
        play.enter(0, "z")                          # and stays
    for n in range(60):
        ticket = play.enter(at, f"k{n % 3}", prompt(n % 3, 60))
        while ticket.state == "waiting":
            at += 1
            play.tick(at)
        play.first(at + 10, ticket)
        play.leave(at + 12, ticket, cached=0)
        at += 13
    assert at == 60 * 13 and ticket.heavy and play.place.mirror.most == 0
    ticket = play.enter(at, "k0", prompt(0, 60))
    play.first(at + 1, ticket)
    play.leave(at + 2, ticket, cached=60 * BLOCK // 4)
    assert play.place.mirror.most == 1_000_000
    play.talk(at + 100, "k0", prompt(0, 60))
    assert not play.enter(at + 121, "k0", prompt(0, 60)).heavy


@pytest.mark.parametrize(("cached", "most"), [(60 * BLOCK // 4, 2_000_000), (1 << 40, 2_000_000)])
def test_the_caches_size_is_bounded_whatever_is_said_to_be_cached(cached, most):
    play = Play(capacity=1_000_000)
    for n in range(60):
        ticket = play.enter(n * 9, "a", prompt(n, 60))
        play.first(n * 9 + 1, ticket)
        play.leave(n * 9 + 2, ticket, cached)
    assert play.place.mirror.most == most


def test_what_is_being_read_takes_room_and_so_does_an_answer():
    play = Play(capacity=500_000, at_once=2)
    play.enter(0, "a", prompt("x", 60))             # 245,760 tokens
    assert play.enter(1, "b", prompt("y", 62)).state == "waiting"
    assert play.enter(2, "c", prompt("z", 61.9)).state == "waiting"
    assert play.enter(3, "d", prompt("z", 61)).state == "active"


def test_a_mirror_has_so_many_blocks_at_most():
    mirror = Mirror()
    for n in range(MOST_BLOCKS // 1000 + 2):
        mirror.touch("a", prompt(n, 1000)._replace(tokens=1000), 0)
    assert len(mirror.blocks) == MOST_BLOCKS


def test_a_few_that_were_not_cached_say_nothing_of_the_others():
    play = Play(capacity=1_000_000)
    for n in range(100):
        play.talk(n * 40, "a", prompt("talk", 60))
        play.leave(n * 40 + 30, play.enter(n * 40 + 21, "a", prompt("talk", 60)), cached=min(n % 4, 1) * 60 * BLOCK // 4)
        assert play.place.mirror.most > 400_000


def test_an_engine_that_had_to_be_loaded_first_delays_who_waits_longest_by_minutes_at_most():
    play = Play(capacity=1_000_000)
    slow = play.enter(0, "z", prompt("slow", 2.5))
    play.first(300, slow)
    play.leave(301, slow)
    now = full(play, 700)
    play.enter(now, "k0", prompt("talk0", 60))
    late = play.enter(now, "late", prompt("new", 60))
    assert play.place.pace < 100 and play.tick(now + PATIENCE) == [late]
    assert PATIENCE < play.place.forced - NOON - now < 3600


def test_the_next_one_that_waits_longest_goes_after_five_times_the_reading_that_it_was():
    play = Play(capacity=1_000_000)
    now = full(play)
    play.enter(now, "k0", prompt("talk0", 60))
    late = play.enter(now, "late", prompt("new", 60))
    play.tick(now + PATIENCE)
    play.first(now + PATIENCE + 400, late)
    assert play.place.forced == NOON + now + PATIENCE + 5 * 400


def test_between_two_that_waited_too_long_others_have_time():
    play = Play(capacity=1_000_000)
    now = full(play)
    for n in range(4):                              # and they stay
        play.enter(now, f"k{n}", prompt(f"talk{n}", 60))
    late = [play.enter(now, key, prompt(key, 60)) for key in "ab"]
    assert play.tick(now + PATIENCE) == late[:1]
    play.first(now + PATIENCE + 1, late[0])
    at = play.place.forced - NOON + PATIENCE
    assert (play.tick(at - 1), play.tick(at)) == ([], late[1:])


def test_a_long_prompt_overtakes_no_longer_one_of_its_key_that_waits_for_room():
    play = Play(capacity=1_000_000)
    for n in range(2):
        play.first(n + 1, play.enter(n, f"k{n}", prompt(n, 60)))
    large, small = play.enter(5, "a", prompt("large", 150)), play.enter(6, "a", prompt("small", 20))
    assert (large.state, small.state) == ("waiting", "waiting") and play.enter(7, "b", prompt("other", 20)).state == "active"


def test_who_waits_longest_for_one_model_need_not_be_without_turns_for_another():
    play = Play(capacity=1_000_000)
    now = full(play)
    play.gate.arrange({"m": ("A",), "n": ("N",)}, {"A": play.seats["A"], "N": Seats(8)}, NOON + now)
    play.enter(now, "k0", prompt("talk0", 60))
    late = play.enter(now, "a", prompt("new", 60))
    for at in range(int(now), int(now) + PATIENCE, 20):
        other, _ = play.gate.enter("a", "n", NONE, NOON + at, need=prompt(at, 10))
        play.first(at + 1, other)
        play.leave(at + 2, other)
        assert other.heavy
    assert play.tick(now + PATIENCE) == [late]


# ---- batches

def test_a_batch_leaves_slots_free_and_comes_last():
    play = Play(slots=4)
    batch = [play.enter(n, "b", Need(batch=True)) for n in range(6)]
    assert [ticket.state for ticket in batch] == ["active"] * (4 - SPARE) + ["waiting"] * (2 + SPARE)
    quick = [play.enter(9, "a") for _ in range(3)]
    assert [ticket.state for ticket in quick] == ["active", "active", "waiting"] and play.gate.position(batch[-1]) == 5
    assert play.leave(10, batch[0]) == [quick[2]]
    assert "last in turn" in str(play.gate.late(batch[2], NOON + 600))


def test_a_batch_that_has_waited_longest_takes_a_slot_that_is_spared():
    play = Play(slots=2)
    play.enter(0, "a")                              # and stays
    batch = play.enter(1, "b", Need(batch=True))
    assert (play.tick(PATIENCE), play.tick(PATIENCE + 1)) == ([], [batch])


def test_those_of_a_batch_too_are_told_that_the_budget_is_used():
    play = Play(slots=1)
    play.limits["a"] = Limits(tokens_per_day=10_000)
    running = play.enter(0, "a")
    waiting = [play.enter(1, "a", Need(batch=batch)) for batch in (False, True)]
    assert play.gate.leave(running, 20_000, True, NOON + 2) == waiting


@pytest.mark.parametrize(("slots", "runs"), [(1, 1), (2, 1), (3, 1), (4, 2)])
def test_a_batch_runs_wherever_there_is_a_slot(slots, runs):
    play = Play(slots=slots, heavy=0)
    assert sum(play.enter(n, "b", Need(batch=True)).state == "active" for n in range(6)) == runs


def test_a_batch_is_heavy_at_a_quarter():
    play = Play()
    assert play.enter(0, "a", prompt("x", 1.9, batch=True)).heavy and not play.enter(0, "b", prompt("y", 1.9)).heavy


def test_who_asks_for_something_is_not_forgotten():
    """Of people that come and go: what they use would count for nobody."""
    play = Play(slots=1)
    gate, ran = play.gate, play.enter(0, "a", prompt("x", 1))
    play.enter(0, "b")
    gate.prepare("c", "m", NONE, NOON)
    assert not any(map(gate.forget, "abc")) and gate.forget("d")
    gate.leave(ran, None, True, NOON + 1)
    assert not gate.forget("a")                     # its tokens are still to come
    gate.charge(ran, 5, NOON + 2)
    assert gate.forget("a") and "a" not in gate.accounts


# ---- turns by work

def test_work_is_charged_when_granted_and_corrected_at_the_end():
    play = Play()
    ticket = play.enter(0, "a", prompt("x", 4))
    assert play.gate.account("a").turn == ticket.need.tokens + OUTPUT * ANSWER
    play.gate.leave(ticket, 0, True, NOON + 2, (3000, 1000, 50))
    assert play.gate.account("a").turn == 2000 + OUTPUT * 50
    assert play.gate.leave(ticket, 0, True, NOON + 3, (3000, 1000, 50)) == [] and play.gate.account("a").turn == 2200


@pytest.mark.parametrize("share", [1, 4])
def test_what_was_done_is_forgotten_but_for_a_usual_answer_of_it(share):
    play = Play()
    play.limits["a"] = Limits(share=share)
    play.gate.leave(play.enter(0, "a", prompt("x", 60)), 0, True, NOON + 2, (245_760, 0, 5000))
    assert play.gate.account("a").turn == MEMORY / share == OUTPUT * ANSWER / share


def turns(play, needs, count=150):
    """How many requests of each key had their turn, of so many, one after the other."""
    had = dict.fromkeys(needs, 0)
    running = [play.enter(n, key, needs[key]) for n in range(200) for key in needs][:1]
    for at in range(count):
        ticket = running.pop(0)
        had[ticket.key] += 1
        running += play.first(300 + at, ticket) + play.leave(300 + at, ticket, answer=10)
    return had


def test_turns_go_by_work():
    had = turns(Play(slots=1), {"large": prompt("x", 1.8), "small": Need(tokens=400, answer=100)})
    assert had["small"] > 5 * had["large"] > 0


def test_one_question_does_not_wait_for_a_crowd_whose_answers_are_shorter_than_expected():
    play = Play(slots=8)
    crowd = [play.enter(0, "a", Need(20, ANSWER)) for _ in range(48)]
    for at in range(1, 400):
        ticket = next(ticket for ticket in crowd if ticket.state == "active")
        play.gate.leave(ticket, 22, True, NOON + at, (20, 0, 2))
        crowd.remove(ticket)
        crowd.append(play.enter(at, "a", Need(20, ANSWER)))
    mine = play.enter(400, "b", Need(20, ANSWER))
    assert play.leave(401, next(ticket for ticket in crowd if ticket.state == "active")) == [mine]


def test_a_key_with_a_share_of_three_has_three_turns():
    play = Play(slots=1)
    play.limits["a"] = Limits(share=3)
    had = turns(play, {"a": Need(1000), "b": Need(1000)})
    assert had["a"] == pytest.approx(3 * had["b"], abs=3)


def test_who_was_away_has_saved_nothing_up():
    play = Play(slots=1)
    for at in range(30):
        play.leave(at, play.enter(at, "a", prompt("x", 1)))
    play.enter(40, "a", prompt("x", 1))
    play.enter(41, "b")
    assert play.gate.account("b").turn >= play.gate.floor > 0


def test_who_has_one_long_stream_has_saved_nothing_up_for_what_comes_beside_it():
    play = Play(slots=2)
    play.enter(0, "a")                              # and stays
    for at in range(200):
        play.leave(at, play.enter(at, "b", Need(1000)), answer=1000)
    running = play.enter(300, "b", Need(1000))
    crowd = [play.enter(300, "a", Need(1000)) for _ in range(20)]
    play.enter(300, "c", Need(1000))
    assert play.gate.account("a").turn >= play.gate.floor
    assert [ticket.key for ticket in play.leave(301, running) + play.leave(302, crowd[0])] == ["a", "c"]


def test_much_work_puts_a_key_behind_by_so_much_at_most():
    play = Play()
    play.gate.leave(play.enter(0, "a", Need(100)), 0, True, NOON + 1, (100, 0, 1 << 40))
    assert play.gate.account("a").turn == play.gate.floor + MEMORY


def test_usage_below_nothing_is_no_work():
    play = Play()
    for usage in ((-5, None, -1 << 40), (-5, 7, 0), (5, -1 << 40, -3)):
        play.gate.leave(play.enter(0, "a", Need(100)), 0, True, NOON + 1, usage)
        assert play.gate.account("a").worked >= 0


def test_once_it_is_off_nobody_is_told_of_long_prompts():
    play = Play(slots=2)
    play.enter(0, "a", prompt("x", 60))
    late = play.enter(1, "b", prompt("y", 60))
    play.enter(2, "c")
    play.gate.weigh(0, 1)
    assert "long prompts" not in str(play.gate.late(late, NOON + 4))


def test_to_turn_it_off_and_on_begins_the_turns_anew():
    play = Play(slots=1)
    play.enter(0, "a", prompt("x", 60))
    play.gate.weigh(0, 1)
    assert play.gate.account("a").worked == 0 and play.enter(1, "b").state == "waiting"


# ---- tokens put by

def test_what_runs_counts_for_the_limits_until_it_has_ended():
    play = Play()
    play.limits["a"] = Limits(tokens_per_minute=5000)
    ticket = play.enter(0, "a", Need(4500, 600))
    with pytest.raises(LimitExceeded, match="running"):
        play.enter(1, "a")
    assert play.gate.account("a").standing(play.limits["a"], NOON)["x-ratelimit-remaining-tokens"] == "0"
    play.gate.leave(ticket, 100, True, NOON + 2)
    assert play.enter(3, "a").state == "active"


@pytest.mark.parametrize("limit", ["tokens_per_day", "tokens_per_month"])
def test_many_at_once_cannot_spend_a_budget_many_times(limit):
    play = Play(slots=20)
    play.limits["a"] = Limits(**{limit: 10_000})
    let_in = 0
    for _ in range(20):
        with suppress(LimitExceeded):
            play.enter(0, "a", Need(3000, 1000))
            let_in += 1
    assert let_in == 3 and play.gate.account("a").reserved == 12_000


def test_those_that_wait_wait_on_while_tokens_are_put_by_and_are_refused_once_they_are_used():
    play = Play(slots=2)
    play.limits["a"] = Limits(tokens_per_day=10_000)
    others = [play.enter(n, "b") for n in range(2)]
    mine = [play.enter(3, "a", Need(6000, 1000)) for _ in range(3)]
    assert play.leave(4, others[0]) == mine[:1] and play.leave(5, others[1]) == mine[1:2]
    assert play.gate.leave(mine[0], 7000, True, NOON + 6) == [] and mine[2].state == "waiting"
    assert play.gate.leave(mine[1], 7000, True, NOON + 7) == [mine[2]]
    assert isinstance(mine[2].refusal, QuotaExceeded) and mine[2].state == "waiting"


def test_the_minute_that_is_used_up_passes():
    play = Play(slots=1)
    play.limits["a"] = Limits(tokens_per_minute=1000)
    first, second = play.enter(0, "a", Need(500)), play.enter(0, "a", Need(500))
    assert play.gate.leave(first, 2000, True, NOON + 1) == []
    assert play.tick(60) == [] and play.tick(61) == [second]


def test_what_has_been_used_by_now_is_put_by_if_it_is_more_than_was_expected():
    play = Play()
    ticket = play.enter(0, "a", Need(100, 100))
    for tokens, expected in ((150, 200), (9000, 9000)):
        play.gate.reserve(ticket, tokens)
        assert play.gate.account("a").reserved == expected
    play.leave(1, ticket)
    play.gate.reserve(ticket, 99_999)
    assert play.gate.account("a").reserved == 0


def test_what_is_charged_later_stays_put_by():
    play = Play()
    ticket = play.enter(0, "a", Need(100, 100))
    play.gate.leave(ticket, None, True, NOON + 1)
    assert play.gate.account("a").reserved == 200
    play.gate.charge(ticket, 50, NOON + 2, (20, 0, 30))
    assert (play.gate.account("a").reserved, play.gate.account("a").minute) == (0, 50)


# ---- properties

COUNTS = st.integers(-1 << 40, 1 << 40)
USAGE = st.one_of(st.none(), st.tuples(COUNTS, st.one_of(st.none(), COUNTS), COUNTS))
NEEDS = st.builds(prompt, st.integers(0, 9), st.sampled_from([0, 0.5, 1, 3, 10, 60, 200]), batch=st.booleans(), whole=st.booleans())
EVENTS = st.lists(st.tuples(st.sampled_from("eeeeffflltcpr"), st.sampled_from("abcd"), st.integers(0, 60), NEEDS, USAGE, st.sampled_from([0, 0, 1, 30, 200])), max_size=100)


@settings(deadline=None)
@given(EVENTS, st.integers(1, 4), st.integers(1, 2), st.sampled_from([None, 0, 100_000, 1_000_000]), st.sampled_from([0, 2000, 8000]))
def test_whatever_happens(events, slots, at_once, capacity, heavy):
    """Slots and heavy prompts stay in bounds, at equal clocks too and whatever usage says; in the end nothing is left, and all had their turn."""
    play, tickets, now = Play(slots, capacity, heavy, at_once, ("A", "B")), [], 0
    gate, alive = play.gate, lambda state: [ticket for ticket in tickets if ticket.state == state]
    for kind, key, number, need, usage, passes in events:
        now += passes
        active = alive("active")
        if kind == "e":
            with suppress(Refusal):
                tickets.append(play.enter(now, key, need))
        elif kind == "f" and active:
            play.first(now, active[number % len(active)])
        elif kind == "l" and tickets:
            gate.leave(tickets[number % len(tickets)], number, True, NOON + now, usage)
        elif kind == "t":
            play.tick(now)
        elif kind == "c":
            play.arrange(now, B=Seats(slots, 1, not play.seats["B"].open, capacity))
        elif kind == "p" and active and active[number % len(active)].avoids is None:
            gate.put_back(active[number % len(active)], NOON + now)
        elif kind == "r":
            gate.weigh(number % 3 * 2000, at_once)
        check(play, alive("active"), alive("waiting"), slots, at_once)
    gate.weigh(heavy, at_once)
    play.arrange(now, B=Seats(slots, 1, True, capacity))
    for _ in range(3000):                           # each second one ends
        now += 60
        play.tick(now)
        for ticket in alive("active")[:1]:
            play.leave(now, ticket)
        if not alive("waiting") and not alive("active"):
            break
    assert not alive("waiting") and not alive("active") and gate.active == gate.waiting == 0
    assert not any(lane.queues for lane in gate.lanes.values())
    assert all((account.is_here, account.reserved) == (0, 0) for account in gate.accounts.values())
    assert not any(place.running or place.reading for place in gate.places.values())


def check(play, active, waiting, slots, at_once):
    gate = play.gate
    assert gate.active == len(active) and gate.waiting == len(waiting)
    for name, place in gate.places.items():
        here = {ticket for ticket in active if ticket.place == name}
        assert set(place.running) == here and len(here) <= slots
        assert set(place.reading) == {ticket for ticket in here if ticket.reading} and len(place.reading) <= at_once
        assert place.mirror.tokens == pytest.approx(sum(block.tokens for block in place.mirror.blocks.values()), abs=1)
        assert place.mirror.tokens <= place.mirror.most + 1 and len(place.rested) <= len(gate.accounts)
    for account in gate.accounts.values():
        assert 0 <= account.worked <= max(gate.floor + MEMORY, gate.grants) and account.pending >= -1e-6
    assert sum(account.pending for account in gate.accounts.values()) == pytest.approx(sum(ticket.charged for ticket in active), abs=1e-3)
    assert sum(account.reserved for account in gate.accounts.values()) == sum(ticket.reserved for ticket in active)


@settings(deadline=None)
@given(st.lists(NEEDS, max_size=6), NEEDS)
def test_to_leave_undoes_to_enter(needs, need):
    play = Play(slots=2)
    for number, other in enumerate(needs):
        play.enter(0, f"k{number}", other)

    def state():
        gate = play.gate
        return [(line, list(queue)) for lane in gate.lanes.values() for line, queue in lane.queues.items()], gate.active, [
            (key, account.active, account.waiting, account.reserved, account.turn) for key, account in gate.accounts.items()]

    play.gate.account("me")
    before = state()
    ticket = play.enter(0, "me", need)
    play.gate.leave(ticket, 0, False, NOON, (0, None, 0))
    assert state()[:2] == before[:2] and state()[2][:-1] == before[2][:-1] and state()[2][-1][1:4] == (0, 0, 0)


def test_nobody_waits_for_ever():
    """Four keys keep the cache full all the time; a fifth one has its turn within patience and five times the readings."""
    play = Play(capacity=1_000_000)
    now = full(play)
    running = {n: play.enter(now, f"k{n}", prompt(f"talk{n}", 60)) for n in range(4)}
    out = [play.enter(now, f"out{n}", prompt(f"out{n}", 60)) for n in range(3)]
    waited = []
    for at in range(int(now), int(now) + 3000, 10):
        for n, ticket in running.items():
            play.first(at, ticket)
            play.leave(at + 1, ticket)
            running[n] = play.enter(at + 2, f"k{n}", prompt(f"talk{n}", 60))
        play.tick(at + 5)
        for ticket in [ticket for ticket in out if ticket.state == "active"]:
            play.first(at + 6, ticket)
            play.leave(at + 7, ticket)
            waited.append(at - now)
            out.remove(ticket)
    assert not out and len(waited) == 3 and max(waited) <= 3 * (PATIENCE + 6 * 20)


def test_a_decision_with_a_full_queue_is_quick():
    """Its cost grows no faster than the queue: 4 times as many that wait take at most 8 times as long."""
    from time import process_time

    def cost(waiting):
        play, found = Play(capacity=3_000_000), []
        for n in range(waiting):
            play.enter(n / 1000, f"k{n % 20}", prompt(n, 64))
        for _ in range(5):
            begin = process_time()
            for at in range(20):
                play.tick(1 + at)
            found.append(process_time() - begin)
        return min(found)

    assert any(cost(800) < 8 * cost(200) for _ in range(3))
