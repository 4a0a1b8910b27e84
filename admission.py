"""Admission, pure: who may run now, who waits, who is turned away. No socket, no sleep, no clock of its own.

Waiting requests take turns by key, so that one person's twenty agents don't hold up another's one question; within a key,
first come, first served. Limits are values that come with each request. Times are epoch seconds, passed in.
"""

from collections import deque
from datetime import datetime, timedelta, timezone
from math import ceil
from typing import NamedTuple

from errors import LimitExceeded, Overloaded, QueueFull, QuotaExceeded, ShuttingDown

MINUTE = 60.0
MOST_RETRY = 30  # seconds: the longest Retry-After for a full queue
SAMPLES = 16  # of the moments at which slots came free, to tell how fast they do


class Limits(NamedTuple):
    """What a key may do; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    active: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None


NONE = Limits()


class Ticket:
    """A request's place: `state` is "waiting", "active" or "left"; `counted` when its request was counted."""

    def __init__(self, key, lane, counted):
        self.key, self.lane, self.counted, self.state = key, lane, counted, "waiting"


class Account:
    """What a key has used: running requests, the last minute's requests and tokens, the day's and the month's tokens."""

    def __init__(self):
        self.limits, self.active, self.waiting = NONE, 0, 0
        self.turn = 0  # when it was last granted a slot, counted in grants
        self.requests, self.tokens = deque(), deque()  # moments; (moment, count)
        self.minute = 0  # the sum of these counts
        self.day, self.month = Budget(day_of), Budget(month_of)

    def busy(self):
        return self.limits.active is not None and self.active >= self.limits.active

    def forget(self, now):
        """Drop what is older than a minute."""
        while self.requests and self.requests[0] <= now - MINUTE:
            self.requests.popleft()
        while self.tokens and self.tokens[0][0] <= now - MINUTE:
            self.minute -= self.tokens.popleft()[1]

    def spend(self, tokens, now):
        if tokens:
            self.tokens.append((now, tokens))
            self.minute += tokens
            self.day.add(tokens, now)
            self.month.add(tokens, now)


class Budget:
    """Tokens of a calendar period (UTC), which `period` gives the beginning of."""

    def __init__(self, period):
        self.period, self.begun, self.end, self.count = period, 0, 0, 0

    def used(self, now):
        if not self.begun <= now < self.end:
            (self.begun, self.end), self.count = self.period(now), 0
        return self.count

    def add(self, tokens, now):
        self.count = self.used(now) + tokens


def day_of(now):
    """(begin, end) of the day, in epoch seconds."""
    begin = datetime.fromtimestamp(now, timezone.utc).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    return begin.timestamp(), (begin + timedelta(days=1)).timestamp()


def month_of(now):
    """(begin, end) of the month, in epoch seconds."""
    begin = datetime.fromtimestamp(now, timezone.utc).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    return begin.timestamp(), (begin + timedelta(days=32)).replace(day=1).timestamp()


class Lane:
    """The slots of one model: how many run, a queue a key, and when slots came free."""

    def __init__(self):
        self.active, self.queues, self.freed = 0, {}, deque(maxlen=SAMPLES)


class Gate:
    """`slots` requests of a model run at once, `most_waiting` wait in all. `enter` and `leave` return the tickets that
    they granted; `leave` is the only counterpart of `enter`."""

    def __init__(self, slots, most_waiting):
        self.slots, self.most_waiting = slots, most_waiting
        self.lanes, self.accounts = {}, {}
        self.grants = 0
        self.closed = False  # draining: nobody comes in any more

    @property
    def active(self):
        return sum(lane.active for lane in self.lanes.values())

    @property
    def waiting(self):
        return sum(account.waiting for account in self.accounts.values())

    def account(self, key):
        account = self.accounts.get(key)
        if account is None:
            account = self.accounts[key] = Account()
        return account

    def begin(self, key, day, month, now):
        """What a key has used today and this month already, before a restart."""
        self.account(key).day.add(day, now)
        self.account(key).month.add(month, now)

    # -- in

    def check(self, key, model, limits, now):
        """Raises the Refusal that a request of `key` for `model` would meet, and counts nothing. Returns (Account, Lane)."""
        if self.closed:
            raise ShuttingDown("the gateway is restarting; try again shortly", retry_after=5)
        lane = self.lanes.get(model) or self.lanes.setdefault(model, Lane())
        account = self.account(key)
        account.limits = limits
        if lane.active >= self.slots or account.busy():
            self.check_queue(account, lane, now)
        self.check_limits(account, now)
        return account, lane

    def enter(self, key, model, limits, now):
        """A request of `key` for `model`. Returns (Ticket, granted); raises a Refusal, which counts nothing."""
        account, lane = self.check(key, model, limits, now)
        account.requests.append(now)
        ticket = Ticket(key, lane, now)
        lane.queues.setdefault(key, deque()).append(ticket)
        account.waiting += 1
        return ticket, self.grant()

    def check_queue(self, account, lane, now):
        if account.waiting and self.waiting >= self.most_waiting:
            raise self.full(account, lane, now)

    def full(self, account, lane, now):
        """The Refusal for a request that found the queue full, or waited in it for too long."""
        wait = self.patience(lane, now)
        if 2 * account.waiting >= max(self.waiting, 1) and account.waiting > 1:
            return QueueFull(
                f"{account.waiting} of your requests are waiting already; let them end first",
                retry_after=wait,
            )
        return Overloaded(
            "all slots are taken and the queue is full; try again later", retry_after=wait
        )

    def late(self, ticket, now):
        """The Refusal for a ticket that has waited for too long."""
        return self.full(self.account(ticket.key), ticket.lane, now)

    def patience(self, lane, now):
        """Whole seconds in which the lane's queue should have moved on, by how fast slots have been freeing."""
        if len(lane.freed) < 2:
            return MOST_RETRY
        pace = (now - lane.freed[0]) / len(lane.freed)  # seconds a slot
        return min(MOST_RETRY, max(1, ceil(pace * (self.waiting + 1))))

    def check_limits(self, account, now):
        limits = account.limits
        account.forget(now)
        if (
            limits.requests_per_minute is not None
            and len(account.requests) >= limits.requests_per_minute
        ):
            at = account.requests[-limits.requests_per_minute] + MINUTE
            raise spent(
                "requests a minute", limits.requests_per_minute, len(account.requests), at, now
            )
        used = account.minute
        if limits.tokens_per_minute is not None and used >= limits.tokens_per_minute:
            raise spent(
                "tokens a minute", limits.tokens_per_minute, used, self.ebb(account, used), now
            )
        for name, limit, budget in (
            ("today", limits.tokens_per_day, account.day),
            ("this month", limits.tokens_per_month, account.month),
        ):
            if limit is not None and budget.used(now) >= limit:
                raise exhausted(name, limit, budget, now)

    @staticmethod
    def ebb(account, used):
        """When so many tokens have fallen out of the minute that the limit lets one request in again."""
        for moment, count in account.tokens:
            used -= count
            if used < account.limits.tokens_per_minute:
                break
        return moment + MINUTE

    # -- out

    def leave(self, ticket, tokens, reached, now):
        """The request is over: it ran or gave up waiting. `tokens` were used; unless an engine was `reached`, its count is
        given back. Returns the tickets that were granted. Leaving twice does nothing."""
        if ticket.state == "left":
            return []
        account, lane = self.account(ticket.key), ticket.lane
        if ticket.state == "active":
            account.active -= 1
            lane.active -= 1
            lane.freed.append(now)
        else:
            self.unqueue(ticket)
        ticket.state = "left"
        account.spend(tokens, now)
        if not reached and ticket.counted in account.requests:
            account.requests.remove(ticket.counted)
        return self.grant()

    def unqueue(self, ticket):
        queue = ticket.lane.queues[ticket.key]
        queue.remove(ticket)
        self.account(ticket.key).waiting -= 1
        if not queue:
            del ticket.lane.queues[ticket.key]

    def grant(self):
        granted = []
        for lane in self.lanes.values():
            while lane.active < self.slots and (ticket := self.next(lane)):
                granted.append(self.activate(ticket))
        return granted

    def next(self, lane):
        """The ticket whose turn it is: of the keys that may run one more, the one whose last turn is longest ago."""
        free = [key for key in lane.queues if not self.account(key).busy()]
        return lane.queues[min(free, key=lambda key: self.account(key).turn)][0] if free else None

    def activate(self, ticket):
        lane, account = ticket.lane, self.account(ticket.key)
        self.unqueue(ticket)
        self.grants += 1
        account.turn = self.grants
        lane.active += 1
        account.active += 1
        ticket.state = "active"
        return ticket

    # -- what clients may know

    def place(self, ticket):
        """How many will have had their turn when this one's comes, itself included; 0 once it runs."""
        if ticket.state != "waiting":
            return 0
        turns = ticket.lane.queues[ticket.key].index(ticket)  # of its own key before it
        mine = self.account(ticket.key).turn
        return (
            1
            + turns
            + sum(
                min(len(queue), turns + (self.account(key).turn < mine))
                for key, queue in ticket.lane.queues.items()
                if key != ticket.key
            )
        )

    def standing(self, key, limits, now):
        """The windows of a key as OpenAI's x-ratelimit- headers name them: a dict, empty without such limits."""
        account = self.account(key)
        account.forget(now)
        oldest = account.requests[0] if account.requests else None
        headers = window("requests", limits.requests_per_minute, len(account.requests), oldest, now)
        oldest = account.tokens[0][0] if account.tokens else None
        return {
            **headers,
            **window("tokens", limits.tokens_per_minute, account.minute, oldest, now),
        }


def window(kind, limit, used, oldest, now):
    if limit is None:
        return {}
    reset = max(0.0, oldest + MINUTE - now) if oldest is not None else 0
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(max(0, limit - used)),
        f"x-ratelimit-reset-{kind}": f"{reset:.3f}s",
    }


def spent(what, limit, used, at, now):
    wait = max(1, ceil(at - now))
    return LimitExceeded(
        f"this key may use {limit} {what} and has used {used}; the next is free in {wait} s",
        retry_after=wait,
    )


def exhausted(name, limit, budget, now):
    end = budget.period(now)[1]
    when = datetime.fromtimestamp(end, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return QuotaExceeded(
        f"this key may use {limit:,} tokens {name} and has used {budget.used(now):,}; it starts anew at {when}",
        retry_after=max(1, ceil(end - now)),
    )
