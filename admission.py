"""Admission, pure: who may run now and who waits. Tickets in, granted tickets out; no socket, no clock.

Waiting requests take turns by key, so that one person's twenty agents don't hold up another's one question.
"""
from collections import deque


class Ticket:
    """A request's place: `state` is "waiting", "active" or "left"."""

    def __init__(self, key):
        self.key, self.state = key, "waiting"


class Gate:
    """`slots` requests run at once. `enter` and `leave` return the tickets that they granted."""

    def __init__(self, slots):
        self.slots, self.active, self.lanes = slots, 0, {}

    def enter(self, key):
        ticket = Ticket(key)
        self.lanes.setdefault(key, deque()).append(ticket)
        return ticket, self.grant()

    def leave(self, ticket):
        if ticket.state == "active":
            self.active -= 1
        elif ticket.state == "waiting":
            self.lanes[ticket.key].remove(ticket)
            if not self.lanes[ticket.key]:
                del self.lanes[ticket.key]
        ticket.state = "left"
        return self.grant()

    def grant(self):
        granted = []
        while self.active < self.slots and self.lanes:
            key = next(iter(self.lanes))
            lane = self.lanes.pop(key)
            ticket = lane.popleft()
            if lane:
                self.lanes[key] = lane              # its next turn comes after everyone's
            self.active += 1
            ticket.state = "active"
            granted.append(ticket)
        return granted
