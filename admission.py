"""Admission, pure: who may run now, who waits, who is turned away. No socket, no sleep, no clock.

Waiting requests take turns by key, so that one person's twenty agents don't hold up another's one
question; within a key, first come, first served. Limits are values that come with each request.
Times are passed in: seconds of a clock that nobody sets. Only days and months are the wall clock's,
which is `Gate.ahead` of that one.
"""

from collections import deque
from datetime import UTC, datetime, timedelta
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

    @property
    def count_tokens(self):
        tokens = (self.tokens_per_minute, self.tokens_per_day, self.tokens_per_month)
        return tokens != (None, None, None)


NONE = Limits()


class Ticket:
    """A request's place: `state` is "preparing", "waiting", "active" or "left"; it came at
    `entered`."""

    def __init__(self, key, lane, entered):
        self.key = key
        self.lane = lane
        self.entered = entered
        self.state = "preparing"


class Account:
    """What a key has used.

    active, waiting, preparing
                     its requests right now
    last_turn        when it was last granted a slot, counted in grants
    requests         moments of the last minute's requests
    tokens           (moment, count) of the last minute; `minute` is the sum of the counts
    day, month       Budgets
    """

    def __init__(self):
        self.limits = NONE
        self.active = self.waiting = self.preparing = 0
        self.last_turn = 0
        self.requests = deque()
        self.tokens = deque()
        self.minute = 0
        self.day = Budget(day_bounds)
        self.month = Budget(month_bounds)

    def busy(self):
        return self.limits.active is not None and self.active >= self.limits.active

    def forget(self, now):
        """Drop what is older than a minute."""
        while self.requests and self.requests[0] <= now - MINUTE:
            self.requests.popleft()
        while self.tokens and self.tokens[0][0] <= now - MINUTE:
            self.minute -= self.tokens.popleft()[1]

    def spend(self, tokens, now, wall):
        if tokens:
            self.tokens.append((now, tokens))
            self.minute += tokens
            self.day.add(tokens, wall)
            self.month.add(tokens, wall)


class Budget:
    """Tokens of a calendar period. `bounds` is a function: moment -> (begin, end) of its period.

    Moments are the wall clock's, in epoch seconds.
    """

    def __init__(self, bounds):
        self.bounds = bounds
        self.begin = 0
        self.end = 0
        self.count = 0

    def used(self, now):
        if not self.begin <= now < self.end:
            self.begin, self.end = self.bounds(now)
            self.count = 0
        return self.count

    def add(self, tokens, now):
        self.count = self.used(now) + tokens

    def raise_to(self, tokens, now):
        self.count = max(self.used(now), tokens)


def midnight(now):
    """The beginning of the day, UTC."""
    moment = datetime.fromtimestamp(now, UTC)
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


def day_bounds(now):
    """(begin, end) of the day, in epoch seconds."""
    begin = midnight(now)
    return begin.timestamp(), (begin + timedelta(days=1)).timestamp()


def month_bounds(now):
    """(begin, end) of the month, in epoch seconds."""
    begin = midnight(now).replace(day=1)
    return begin.timestamp(), (begin + timedelta(days=32)).replace(day=1).timestamp()


class Lane:
    """The slots of one model: how many run, a queue a key, and when slots came free."""

    def __init__(self):
        self.active = 0
        self.queues = {}
        self.freed = deque(maxlen=SAMPLES)


class Gate:
    """`slots` requests of a model run at once, `most_waiting` wait in all.

    `enter`, or `prepare` and later `line_up`, let a request in; `leave` is the only counterpart.
    All but `prepare` return the tickets that they granted.
    """

    def __init__(self, slots, most_waiting):
        self.slots = slots
        self.most_waiting = most_waiting
        self.lanes = {}
        self.accounts = {}
        self.grants = 0
        self.ahead = 0.0  # seconds by which the wall clock is ahead of the one that is passed in
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

    def begin(self, key, day, month, wall):
        """What a key has used already on the day and in the month that the wall clock has now."""
        self.account(key).day.raise_to(day, wall)
        self.account(key).month.raise_to(month, wall)

    # -- in

    def check(self, key, model, limits, now):
        """(Account, Lane) of a request of `key` for `model`. Counts nothing.

        Raises the Refusal that it would meet.
        """
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
        """(Ticket, tickets granted) for a request. Raises a Refusal, which counts nothing."""
        account, lane = self.check(key, model, limits, now)
        ticket = self.count(account, key, lane, now)
        return ticket, self.queue(ticket)

    def prepare(self, key, model, limits, now):
        """A Ticket for a request that has something to do before it can wait for a slot. It counts
        among its key's requests, of which as many may prepare as could run and wait, and holds up
        nobody else's. Raises a Refusal, which counts nothing."""
        account, lane = self.check(key, model, limits, now)
        if account.preparing >= self.slots + self.most_waiting:
            raise QueueFull(
                f"the images of {account.preparing} of your requests are being fetched already; "
                "let them end first",
                retry_after=self.patience(lane, now),
            )
        return self.count(account, key, lane, now)

    def line_up(self, ticket, now):
        """It is prepared: tickets granted. Raises the Refusal of a queue that is full by now."""
        account = self.account(ticket.key)
        if ticket.lane.active >= self.slots or account.busy():
            self.check_queue(account, ticket.lane, now)
        return self.queue(ticket)

    def count(self, account, key, lane, now):
        account.requests.append(now)
        account.preparing += 1
        return Ticket(key, lane, now)

    def queue(self, ticket):
        account = self.account(ticket.key)
        account.preparing -= 1
        account.waiting += 1
        ticket.state = "waiting"
        ticket.lane.queues.setdefault(ticket.key, deque()).append(ticket)
        return self.grant()

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
        """Whole seconds in which the queue should have moved on, by how fast slots came free."""
        if len(lane.freed) < 2:
            return MOST_RETRY
        pace = (now - lane.freed[0]) / len(lane.freed)  # seconds a slot
        return min(MOST_RETRY, max(1, ceil(pace * (self.waiting + 1))))

    def check_limits(self, account, now):
        """Raises LimitExceeded, QuotaExceeded."""
        limits = account.limits
        account.forget(now)
        if (
            limits.requests_per_minute is not None
            and len(account.requests) >= limits.requests_per_minute
        ):
            at = account.requests[-limits.requests_per_minute] + MINUTE
            raise over_limit(
                "requests a minute", limits.requests_per_minute, len(account.requests), at, now
            )
        used = account.minute
        if limits.tokens_per_minute is not None and used >= limits.tokens_per_minute:
            raise over_limit(
                "tokens a minute",
                limits.tokens_per_minute,
                used,
                self.next_room(account, used),
                now,
            )
        for name, limit, budget in (
            ("today", limits.tokens_per_day, account.day),
            ("this month", limits.tokens_per_month, account.month),
        ):
            if limit is not None and budget.used(now + self.ahead) >= limit:
                raise over_budget(name, limit, budget, now + self.ahead)

    @staticmethod
    def next_room(account, used):
        """When enough tokens have fallen out of the minute to let one request in again."""
        for moment, count in account.tokens:
            used -= count
            if used < account.limits.tokens_per_minute:
                return moment + MINUTE
        return account.tokens[-1][0] + MINUTE

    # -- out

    def leave(self, ticket, tokens, reached, now):
        """The request is over: it ran or gave up waiting. Leaving twice does nothing.

        tokens   how many it used
        reached  whether it came to an engine; if not, it is not counted as a request
        Returns the tickets that were granted.
        """
        if ticket.state == "left":
            return []
        account = self.account(ticket.key)
        lane = ticket.lane
        if ticket.state == "active":
            account.active -= 1
            lane.active -= 1
            lane.freed.append(now)
        elif ticket.state == "waiting":
            self.unqueue(ticket)
        else:
            account.preparing -= 1
        ticket.state = "left"
        account.spend(tokens, now, now + self.ahead)
        if not reached and ticket.entered in account.requests:
            account.requests.remove(ticket.entered)
        return self.grant()

    def charge(self, key, tokens, now):
        """Count tokens of a request that had left before it was known how many it used."""
        self.account(key).spend(tokens, now, now + self.ahead)

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
        """The ticket whose turn it is, or None.

        Of the keys that may run one more, the one whose last turn is longest ago.
        """
        free = [key for key in lane.queues if not self.account(key).busy()]
        if not free:
            return None
        first = min(free, key=lambda key: self.account(key).last_turn)
        return lane.queues[first][0]

    def activate(self, ticket):
        self.unqueue(ticket)
        self.grants += 1
        account = self.account(ticket.key)
        account.last_turn = self.grants
        ticket.lane.active += 1
        account.active += 1
        ticket.state = "active"
        return ticket

    # -- what clients may know

    def place(self, ticket):
        """How many will have had their turn when this one's comes, itself included.

        0 once it runs. Another key has as many turns until then as this key has before the ticket,
        and one more if it is ahead.
        """
        if ticket.state != "waiting":
            return 0
        turns = ticket.lane.queues[ticket.key].index(ticket)
        mine = self.account(ticket.key).last_turn
        place = 1 + turns
        for key, queue in ticket.lane.queues.items():
            if key != ticket.key:
                ahead = self.account(key).last_turn < mine
                place += min(len(queue), turns + ahead)
        return place

    def standing(self, key, limits, now):
        """The windows of a key as OpenAI's x-ratelimit- headers name them.

        A dict, empty without such limits.
        """
        account = self.account(key)
        account.forget(now)
        headers = {}
        if limits.requests_per_minute is not None:
            moments = account.requests
            used = len(moments)
            headers |= window("requests", limits.requests_per_minute, used, moments, now)
        if limits.tokens_per_minute is not None:
            moments = [account.tokens[0][0]] if account.tokens else []
            headers |= window("tokens", limits.tokens_per_minute, account.minute, moments, now)
        return headers


def window(what, limit, used, moments, now):
    """The headers of one window. The first of `moments` is when its oldest use was, if any."""
    reset = 0.0
    if moments:
        reset = max(0.0, moments[0] + MINUTE - now)
    return {
        f"x-ratelimit-limit-{what}": str(limit),
        f"x-ratelimit-remaining-{what}": str(max(0, limit - used)),
        f"x-ratelimit-reset-{what}": f"{reset:.3f}s",
    }


def over_limit(what, limit, used, at, now):
    wait = max(1, ceil(at - now))
    return LimitExceeded(
        f"this key may use {limit} {what} and has used {used}; the next is free in {wait} s",
        retry_after=wait,
    )


def over_budget(name, limit, budget, now):
    _, end = budget.bounds(now)
    when = datetime.fromtimestamp(end, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return QuotaExceeded(
        f"this key may use {limit:,} tokens {name} and has used {budget.used(now):,};"
        f" it starts anew at {when}",
        retry_after=max(1, ceil(end - now)),
    )
