"""Admission, pure: who may run now, and where, who waits, who is turned away. No socket, no sleep,
no clock.

Waiting requests take turns by key, so that one person's twenty agents don't hold up another's one
question; within a key, first come, first served. Limits are values that come with each request.
A model has one queue, a lane; where its requests run, at engines, are places, each with its slots.
Times are passed in: seconds of a clock that nobody sets. Only days and months are the wall clock's,
which is `Gate.ahead` of that one.
"""

from collections import deque
from datetime import UTC, datetime, timedelta
from math import ceil
from operator import itemgetter
from typing import NamedTuple

from errors import (
    RETRY_AFTER,
    LimitExceeded,
    ModelUnavailable,
    Overloaded,
    QueueFull,
    QuotaExceeded,
    ShuttingDown,
)

MINUTE = 60.0
MOST_RETRY = 30  # seconds: the longest Retry-After for a full queue
SAMPLES = 16  # of the moments at which slots came free, to tell how fast they do
# By how many requests, of a place of the least weight, that where a conversation ran may be busier
# than the least busy one: some more streams beside it cost less than its prompt read anew.
MARGIN = 4
PASSES = 8  # younger ones of its key that a ticket lets by while its home is full
LOOKED_AT = 16  # tickets of a key that do so at once


class Limits(NamedTuple):
    """What a key may do; None is no limit. `share` is the weight of its turns, None is 1."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    active: int | None = None
    tokens_per_day: int | None = None
    tokens_per_month: int | None = None
    share: int | None = None

    @property
    def count_tokens(self):
        tokens = (self.tokens_per_minute, self.tokens_per_day, self.tokens_per_month)
        return tokens != (None, None, None)


NONE = Limits()


class Ticket:
    """A request in the Gate: `state` is "preparing", "waiting", "active" or "left"; it came at
    `entered`.

    home      the name of the place where its conversation ran last, or None
    place     the name of the place where it runs, once it does
    avoids    the name of a place that did not begin with it, or None
    passed    how many younger ones it has let by
    turn      what its key's last_turn was before it was granted
    """

    def __init__(self, key, lane, entered, home=None):
        self.key = key
        self.lane = lane
        self.entered = entered
        self.home = home
        self.place = self.avoids = None
        self.passed = self.turn = 0
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
    """The requests for one model: a queue a key, the names of the places where they can run, and
    when slots came free."""

    def __init__(self):
        self.queues = {}
        self.places = ()
        self.freed = deque(maxlen=SAMPLES)


class Seats(NamedTuple):
    """What a place is: how many requests run there at once, how many it takes beside others of
    another weight, and whether it takes new ones."""

    slots: int
    weight: float = 1
    open: bool = True


class Place:
    """Where requests run, of one lane or of several: `active` of its slots are taken. `last_turn`
    is when it was last given one, counted in grants. The rest is as in Seats."""

    def __init__(self):
        self.slots = 0
        self.weight = 1
        self.open = False
        self.active = 0
        self.last_turn = 0

    @property
    def load(self):
        return self.active / self.weight

    @property
    def load_with_another(self):
        return (self.active + 1) / self.weight


class Gate:
    """Requests run at the places of their lane, as many as these have slots; `most_waiting` wait in
    all.

    `arrange` says what lanes and places there are. `enter`, or `prepare` and later `line_up`, let a
    request in; `leave` is the only counterpart. All but `prepare` return the tickets that they
    granted.
    """

    def __init__(self, most_waiting):
        self.most_waiting = most_waiting
        self.lanes = {}  # those that are used
        self.arranged = {}  # of all lanes the names of their places
        self.places = {}
        self.accounts = {}
        self.grants = 0
        self.ahead = 0.0  # seconds by which the wall clock is ahead of the one that is passed in
        self.closed = False  # draining: nobody comes in any more

    @property
    def active(self):
        return sum(place.active for place in self.places.values())

    @property
    def slots(self):
        """Those of all places that take requests."""
        return sum(place.slots for place in self.places.values() if place.open)

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

    # -- lanes and places

    def arrange(self, lanes, places):
        """What there is from now on: {lane: names of its places}, {name: Seats}. Returns the
        tickets granted; `stranded` are those that nobody will serve.

        A place that is named no more takes no new requests, and is forgotten once it is empty.
        """
        for name, seats in places.items():
            place = self.places.setdefault(name, Place())
            place.slots, place.weight, place.open = seats
        for name in self.places.keys() - places.keys():
            place = self.places[name]
            place.open = False
            if not place.active:
                del self.places[name]
        self.arranged = lanes
        for name, lane in list(self.lanes.items()):
            lane.places = lanes.get(name, ())
            if not lane.places and not lane.queues:
                del self.lanes[name]
        return self.grant()

    def lane(self, name):
        """The lane of that name; one that nobody has told of has no places."""
        lane = self.lanes.get(name)
        if lane is None:
            lane = Lane()
            if name in self.arranged:
                lane.places = self.arranged[name]
                self.lanes[name] = lane
        return lane

    def is_open(self, lane, avoided=None):
        """Whether a place of the lane, apart from one, takes requests, at once or later."""
        return any(name != avoided and self.places[name].open for name in lane.places)

    def free_places(self, lane):
        """The names of the lane's places that have a free slot."""
        free = []
        for name in lane.places:
            place = self.places[name]
            if place.open and place.active < place.slots:
                free.append(name)
        return free

    def is_given_up(self, name):
        """Whether a place takes no requests, and the last one has left it."""
        place = self.places.get(name)
        return place is not None and not place.open and not place.active

    def stranded(self):
        """The tickets that wait where no place takes requests any more."""
        return [
            ticket
            for lane in self.lanes.values()
            for queue in lane.queues.values()
            for ticket in queue
            if not self.is_open(lane, ticket.avoids)
        ]

    # -- in

    def check(self, key, model, limits, now):
        """(Account, Lane) of a request of `key` for `model`, the name of a lane. Counts nothing.

        Raises the Refusal that it would meet.
        """
        if self.closed:
            raise ShuttingDown("the gateway is restarting; try again shortly", retry_after=5)
        lane = self.lane(model)
        account = self.account(key)
        account.limits = limits
        self.check_room(account, lane, now)
        self.check_limits(account, now)
        return account, lane

    def check_room(self, account, lane, now):
        """Raises the Refusal where a request of the account could not even wait."""
        free = self.free_places(lane)
        if not free and not self.is_open(lane):
            raise unserved()
        if not free or account.busy():
            self.check_queue(account, lane, now)

    def enter(self, key, model, limits, now, home=None):
        """(Ticket, tickets granted) for a request, whose conversation ran at `home`, the name of a
        place, if it did. Raises a Refusal, which counts nothing."""
        account, lane = self.check(key, model, limits, now)
        ticket = self.count(account, key, lane, now, home)
        return ticket, self.queue(ticket)

    def prepare(self, key, model, limits, now, home=None):
        """A Ticket for a request that has something to do before it can wait for a slot. It counts
        among its key's requests, of which as many may prepare as could run and wait, and holds up
        nobody else's. Raises a Refusal, which counts nothing."""
        account, lane = self.check(key, model, limits, now)
        slots = sum(self.places[name].slots for name in lane.places)
        if account.preparing >= slots + self.most_waiting:
            raise QueueFull(
                f"the images of {account.preparing} of your requests are being fetched already; "
                "let them end first",
                retry_after=self.patience(lane, now),
            )
        return self.count(account, key, lane, now, home)

    def line_up(self, ticket, now):
        """It is prepared: tickets granted. Raises the Refusal of a queue that is full by now, or
        where nobody serves it any more."""
        self.check_room(self.account(ticket.key), ticket.lane, now)
        return self.queue(ticket)

    def count(self, account, key, lane, now, home):
        account.requests.append(now)
        account.preparing += 1
        return Ticket(key, lane, now, home)

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
        if ticket.state == "active":
            account.active -= 1
            self.places[ticket.place].active -= 1
            ticket.lane.freed.append(now)
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

    def put_back(self, ticket):
        """The place of an active ticket has not begun with it: it waits, before others, for another
        place. Returns the tickets granted."""
        account = self.account(ticket.key)
        account.active -= 1
        account.waiting += 1
        self.places[ticket.place].active -= 1
        ticket.avoids = ticket.place
        ticket.place = None
        ticket.state = "waiting"
        ticket.lane.queues.setdefault(ticket.key, deque()).appendleft(ticket)
        return self.grant()

    def grant(self):
        granted = []
        while (choice := self.next()) is not None:
            granted.append(self.activate(*choice))
        return granted

    def next(self):
        """(the ticket whose turn it is, the name of its place), or None.

        Of the keys that may run one more, the one whose last turn is longest ago.
        """
        waiting = []
        for lane in self.lanes.values():
            if lane.queues and (free := self.free_places(lane)):
                for key, queue in lane.queues.items():
                    if not self.account(key).busy():
                        waiting.append((self.turn(key, queue[0], free), queue, free))
        if len(waiting) > 1:
            waiting.sort(key=itemgetter(0))
        for _, queue, free in waiting:
            if choice := self.choose(queue, free):
                return choice
        return None

    def turn(self, key, first, free):
        """When a key had its last turn, and when the first of its queue came: it may wait in
        several. A turn at a place that did not begin with that one does not count, once another
        place is free."""
        last = self.account(key).last_turn
        if first.avoids is not None and free != [first.avoids]:
            last = first.turn
        return last, first.entered

    def choose(self, queue, free):
        """(a ticket of a key's queue, the name of its place), or None: the first that may run at a
        free place. Those that wait for their home let some others by, if there are any."""
        patient = []
        for ticket in queue:
            names = [name for name in free if name != ticket.avoids]
            if not names:
                continue
            if len(patient) < LOOKED_AT and self.waits_for_home(ticket):
                patient.append((ticket, names))
                continue
            for older, _ in patient:
                older.passed += 1
            return ticket, self.best(names, ticket.home)
        if not patient:
            return None
        ticket, names = patient[0]
        return ticket, self.best(names, ticket.home)

    def waits_for_home(self, ticket):
        """Whether the place where its conversation ran is full, and may come free in time."""
        if ticket.home in (None, ticket.avoids) or ticket.home not in ticket.lane.places:
            return False
        place = self.places[ticket.home]
        return place.open and place.active >= place.slots and ticket.passed < PASSES

    def best(self, names, home):
        """The name of one of these free places: the one where the conversation ran or, if that is
        clearly busier, the least busy by weight."""
        least = min(names, key=self.business)
        if home not in names:
            return least
        margin = MARGIN / min(self.places[name].weight for name in names)
        busier = self.places[home].load > self.places[least].load + margin
        return least if busier else home

    def business(self, name):
        """How busy a place would be; of such that are equal, the one that had its turn longer ago
        goes first."""
        place = self.places[name]
        return place.load_with_another, place.last_turn

    def activate(self, ticket, name):
        """The ticket, which runs from now on at the place of that name."""
        self.unqueue(ticket)
        self.grants += 1
        account = self.account(ticket.key)
        ticket.turn = account.last_turn
        account.last_turn = self.grants
        account.active += 1
        place = self.places[name]
        place.last_turn = self.grants
        place.active += 1
        ticket.place = name
        ticket.state = "active"
        return ticket

    # -- what clients may know

    def position(self, ticket):
        """How many will have had their turn when this one's comes, itself included.

        0 once it runs. Another key has as many turns until then as this key has before the ticket,
        and one more if it is ahead.
        """
        if ticket.state != "waiting":
            return 0
        turns = ticket.lane.queues[ticket.key].index(ticket)
        mine = self.account(ticket.key).last_turn
        position = 1 + turns
        for key, queue in ticket.lane.queues.items():
            if key != ticket.key:
                ahead = self.account(key).last_turn < mine
                position += min(len(queue), turns + ahead)
        return position

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


def unserved():
    """The Refusal where an engine takes no requests any more: it has not begun with any."""
    return ModelUnavailable(
        "no engine takes requests for the model right now; try again later", retry_after=RETRY_AFTER
    )


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
