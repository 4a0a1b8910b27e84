"""The Gate as tables: who comes and goes, and who is let in by it."""
import random

import pytest

from admission import Gate


def run(slots, events):
    """Play "+a1" (request a1 of key a enters) and "-a1" (it leaves): whom each of them lets in, "." for nobody."""
    gate, tickets, names, out = Gate(slots), {}, {}, []
    for event in events.split():
        sign, name = event[0], event[1:]
        if sign == "+":
            tickets[name], granted = gate.enter(name[0])
            names[tickets[name]] = name
        else:
            granted = gate.leave(tickets[name])
        out.append(",".join(names.get(ticket, name) for ticket in granted) or ".")
        check(gate, tickets.values())
    return " ".join(out)


def check(gate, tickets):
    """What holds at any moment."""
    waiting = [ticket for ticket in tickets if ticket.state == "waiting"]
    assert gate.active == sum(ticket.state == "active" for ticket in tickets) <= gate.slots
    assert not waiting or gate.active == gate.slots
    assert sorted(map(id, waiting)) == sorted(id(ticket) for lane in gate.lanes.values() for ticket in lane)
    assert all(gate.lanes.values())


@pytest.mark.parametrize("slots, events, granted", [
    (1, "+a1", "a1"),
    (2, "+a1 +a2 +a3", "a1 a2 ."),
    (1, "+a1 -a1 +a2", "a1 . a2"),
    (1, "+a1 +a2 -a1", "a1 . a2"),
    (2, "+a1 +b1 +c1 -b1", "a1 b1 . c1"),
])
def test_slots(slots, events, granted):
    assert run(slots, events) == granted


@pytest.mark.parametrize("slots, events, granted", [
    # one key: in order
    (1, "+a1 +a2 +a3 -a1 -a2 -a3", "a1 . . a2 a3 ."),
    # two keys take turns, however many one of them sent before
    (1, "+a1 +a2 +a3 +a4 +b1 +b2 -a1 -a2 -b1 -a3 -b2 -a4", "a1 . . . . . a2 b1 a3 b2 a4 ."),
    # who comes late waits one turn, not twenty
    (1, "+a1 +a2 +a3 +a4 +a5 -a1 +b1 -a2 -a3 -b1", "a1 . . . . a2 . a3 b1 a4"),
    # three keys
    (1, "+x1 +a1 +a2 +b1 +b2 +c1 -x1 -a1 -b1 -c1 -a2 -b2", "x1 . . . . . a1 b1 c1 a2 b2 ."),
    # two slots become free one after the other
    (2, "+a1 +a2 +a3 +a4 +b1 -a1 -a2 -a3", "a1 a2 . . . a3 b1 a4"),
])
def test_turns_by_key(slots, events, granted):
    assert run(slots, events) == granted


@pytest.mark.parametrize("slots, events, granted", [
    (1, "+a1 +a2 -a2 -a1", "a1 . . ."),
    (1, "+a1 +a2 +a3 -a2 -a1", "a1 . . . a3"),
    (1, "+a1 +b1 +c1 -b1 -a1", "a1 . . . c1"),
    (1, "+a1 +b1 +b2 -b1 -a1", "a1 . . . b2"),
    (1, "+a1 +b1 -b1 -a1 +b2", "a1 . . . b2"),
])
def test_leaving_while_waiting(slots, events, granted):
    assert run(slots, events) == granted


@pytest.mark.parametrize("slots, events, granted", [
    (1, "+a1 -a1 -a1 +a2 +a3", "a1 . . a2 ."),
    (1, "+a1 +a2 +a3 -a1 -a1", "a1 . . a2 ."),
    (1, "+a1 +a2 +a3 -a2 -a2 -a1", "a1 . . . . a3"),
    (2, "+a1 +a2 +a3 +a4 -a1 -a1 -a1", "a1 a2 . . a3 . ."),
])
def test_leaving_twice_frees_nothing(slots, events, granted):
    assert run(slots, events) == granted


def test_states():
    gate = Gate(1)
    first, granted = gate.enter("a")
    second, none = gate.enter("b")
    assert (granted, none) == ([first], []) and (first.key, second.key) == ("a", "b")
    assert (first.state, second.state) == ("active", "waiting")
    assert gate.leave(first) == [second] and (first.state, second.state) == ("left", "active")
    assert gate.leave(second) == [] and second.state == "left"
    assert (gate.active, gate.lanes) == (0, {})


@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_a_storm_leaves_nothing(slots, seed):
    """Whoever enters is let in once at most, and when all have left nothing is held."""
    dice, gate, there, granted = random.Random(seed), Gate(slots), [], []
    for _ in range(400):
        if there and dice.random() < 0.5:
            new = gate.leave(there.pop(dice.randrange(len(there))))
        else:
            ticket, new = gate.enter(dice.choice("abcd"))
            there.append(ticket)
        granted += new
        check(gate, there)
    while there:
        granted += gate.leave(there.pop(dice.randrange(len(there))))
    assert len(granted) == len(set(map(id, granted)))
    assert (gate.active, gate.lanes) == (0, {})


def test_nobody_is_passed_by_twice():
    dice, gate, turns = random.Random(1), Gate(1), []
    active, _ = gate.enter("x")
    for _ in range(300):
        for _ in range(dice.randrange(4)):
            gate.enter(dice.choice("aaaabcd"))
        waiting = set(gate.lanes)
        if not waiting:
            continue
        active, = gate.leave(active)
        turns.append((active.key, waiting))
    passed = {}
    for key, waiting in turns:
        passed = {other: passed.get(other, []) + [key] for other in waiting if other != key}
        assert all(len(keys) == len(set(keys)) for keys in passed.values())
