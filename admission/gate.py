"""The Gate: whose turn it is.

Waiting requests take turns by key, so that one person's twenty agents don't hold up another's one
question; within a key, first come, first served. Limits are values that come with each request.
A model has one queue, a lane; where its requests run, at engines, are places, each with its slots.

Where the Gate knows tokens (`heavy`), a turn is as long as its work, and a long prompt that its
engine has to read anew waits until no other one is being read there, until its key has rested from
its last one, and until it would push no conversation that is going on out of the engine's cache.
"""

from itertools import islice
from math import ceil
from operator import itemgetter

from admission.accounts import Account
from admission.places import PATIENCE, Lane, Line, Place
from admission.tickets import FULL, NO_NEED, READING, RESTS, SPARED, Ticket
from errors import RETRY_AFTER, ModelUnavailable, Overloaded, QueueFull, Refusal, ShuttingDown

MOST_RETRY = 30  # seconds: the longest Retry-After for a full queue
# By how many requests, of a place of the least weight, that where a conversation ran may be busier
# than the least busy one: some more streams beside it cost less than its prompt read anew.
MARGIN = 4
PASSES = 8  # younger ones of its key that a ticket lets by while its home is full
LOOKED_AT = 16  # tickets of a key that do so at once
MOST_HELD = 64  # tickets of a line that are looked at though others before them must wait
MEMORY = 4_000  # tokens of work that was done by which a key is behind the others at most
SPARE = 2  # slots that batch work leaves free
ODDS = 4  # a batch prompt is a heavy one at this fraction of the others' tokens


class Gate:
    """Requests run at the places of their lane, as many as these have slots; `most_waiting` wait in
    all.

    heavy     tokens of a prompt from which it is a heavy one, where its engine has to read them
              anew; 0: the Gate counts requests, and no tokens
    at_once   how many such prompts a place reads at once

    `arrange` says what lanes and places there are. `enter`, or `prepare` and later `line_up`, let a
    request in; `leave` is the only counterpart. `tick` is to be called once a second. All but
    `prepare` return the tickets that are to be told: that they were granted, or have a refusal.
    """

    def __init__(self, most_waiting, heavy=0, at_once=1):
        """With no lanes, places and accounts yet."""
        self.most_waiting = most_waiting
        self.heavy = heavy
        self.at_once = at_once
        self.lanes = {}  # those that are used
        self.arranged = {}  # of all lanes the names of their places
        self.places = {}
        self.accounts = {}
        self.grants = 0
        self.floor = 0  # what whoever was granted last had worked by then
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

    def forget(self, key):
        """Forget what a key has used. Returns whether that is so: not while it has requests."""
        account = self.accounts.get(key)
        if account and (account.is_here or account.preparing or account.reserved):
            return False
        self.accounts.pop(key, None)
        return True

    def weigh(self, heavy, at_once):
        """Take such prompts for heavy ones from now on."""
        if bool(heavy) != bool(self.heavy):  # turns are counted in something else
            self.floor = 0
            for account in self.accounts.values():
                account.worked = 0
            for ticket in self.queued():
                ticket.held = None
        self.heavy = heavy
        self.at_once = at_once

    # -- lanes and places

    def arrange(self, lanes, places, now):
        """What there is from now on: {lane: names of its places}, {name: Seats}. Returns the
        tickets granted; `stranded` are those that nobody will serve.

        A place that is named no more takes no new requests, and is forgotten once it is empty.
        """
        for name, seats in places.items():
            self.places.setdefault(name, Place()).set_up(seats)
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
        return self.grant(now)

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
        return [ticket for ticket in self.queued() if not self.is_open(ticket.lane, ticket.avoids)]

    def queued(self):
        """All tickets that wait."""
        for lane in self.lanes.values():
            for queue in lane.queues.values():
                yield from queue

    # -- in

    def check(self, key, model, limits, now, need=NO_NEED):
        """(Account, Lane) of a request of `key` for `model`, the name of a lane. Counts nothing.

        Raises the Refusal that it would meet.
        """
        if self.closed:
            raise ShuttingDown("the gateway is restarting; try again shortly", retry_after=5)
        lane = self.lane(model)
        account = self.account(key)
        account.limits = limits
        self.check_room(account, lane, now, need)
        account.check(now, now + self.ahead)
        return account, lane

    def check_room(self, account, lane, now, need):
        """Raises the Refusal where a request of the account could not even wait."""
        free = self.free_places(lane)
        if not free and not self.is_open(lane):
            raise unserved()
        may_start = any(not self.gives_way(need, self.places[name]) for name in free)
        if not may_start or account.busy() or account.waiting >= MOST_HELD:
            self.check_queue(account, lane, now)

    def enter(self, key, model, limits, now, home=None, need=NO_NEED):
        """(Ticket, tickets to be told) for a request, whose conversation ran at `home`, the name of
        a place, if it did. Raises a Refusal, which counts nothing."""
        account, lane = self.check(key, model, limits, now, need)
        ticket = self.count(account, Ticket(key, lane, now, home, need))
        return ticket, self.queue(ticket, now)

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
        return self.count(account, Ticket(key, lane, now, home))

    def line_up(self, ticket, now, need=NO_NEED):
        """It is prepared: tickets to be told. Raises the Refusal of a queue that is full by now, or
        where nobody serves it any more."""
        self.check_room(self.account(ticket.key), ticket.lane, now, need)
        ticket.need = need
        return self.queue(ticket, now)

    def count(self, account, ticket):
        account.requests.append(ticket.entered)
        account.preparing += 1
        return ticket

    def queue(self, ticket, now):
        account = self.account(ticket.key)
        if self.heavy and not account.waiting:  # who asked for nothing has saved nothing up
            account.worked = max(account.worked, self.floor)
        account.preparing -= 1
        account.waiting += 1
        ticket.state = "waiting"
        ticket.lane.queues.setdefault(ticket.line, Line()).append(ticket)
        return self.grant(now)

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
        account = self.account(ticket.key)
        try:
            account.check_tokens(now, now + self.ahead)
        except Refusal as refusal:
            return refusal
        if ticket.held is FULL:
            places = [self.places[name] for name in ticket.lane.places]
            count = sum(place.conversations(now) for place in places)
            return Overloaded(
                f"the cluster's memory is full of {count} conversations that are going on, and "
                "this prompt would push one of them out; try again when it is quieter",
                retry_after=self.patience(ticket.lane, now),
            )
        if ticket.waits_as_heavy:
            return Overloaded(
                f"long prompts are read one after the other, and {ticket.held}; try again later",
                retry_after=self.patience(ticket.lane, now),
            )
        if ticket.held is SPARED:
            return Overloaded(
                "this is batch work, which is last in turn and leaves some slots to others; try "
                "again when it is quieter",
                retry_after=self.patience(ticket.lane, now),
            )
        return self.full(account, ticket.lane, now)

    def patience(self, lane, now):
        """Whole seconds in which the queue should have moved on, by how fast slots came free."""
        if len(lane.freed) < 2:
            return MOST_RETRY
        pace = (now - lane.freed[0]) / len(lane.freed)  # seconds a slot
        return min(MOST_RETRY, max(1, ceil(pace * (self.waiting + 1))))

    # -- while it runs

    def first_token(self, ticket, now):
        """Its prompt has been read. Returns the tickets to be told."""
        if ticket.state != "active":
            return []
        self.places[ticket.place].has_read(ticket, now)
        return self.grant(now)

    def reserve(self, ticket, tokens):
        """It has used so many tokens already, or is likely to."""
        if ticket.state == "active" and tokens > ticket.reserved:
            self.account(ticket.key).reserve(ticket, tokens)

    def tick(self, now):
        """Time alone lets some in. Returns the tickets to be told."""
        for place in self.places.values():
            for ticket in place.read_by(now):
                place.has_read(ticket, now)
        return self.grant(now)

    # -- out

    def leave(self, ticket, tokens, reached, now, usage=None, answered=True):
        """The request is over: it ran or gave up waiting. Leaving twice does nothing.

        tokens   how many it used; None: `charge` will say it
        reached  whether it came to an engine; if not, it is not counted as a request
        usage    see `charge`
        answered all that was asked for has come
        Returns the tickets to be told.
        """
        if ticket.state == "left":
            return []
        account = self.account(ticket.key)
        if ticket.state == "active":
            account.active -= 1
            self.places[ticket.place].end(ticket, answered, now)
            ticket.lane.freed.append(now)
        elif ticket.state == "waiting":
            self.unqueue(ticket)
        else:
            account.preparing -= 1
        ticket.state = "left"
        if not reached and ticket.entered in account.requests:
            account.requests.remove(ticket.entered)
        if tokens is None:
            return self.grant(now)
        return self.charge(ticket, tokens, now, usage)

    def charge(self, ticket, tokens, now, usage=None):
        """Count the tokens of a request that has left.

        usage   (prompt, those of it that were cached or None, answer) in tokens, or None
        Returns the tickets to be told.
        """
        account = self.account(ticket.key)
        account.reserve(ticket, 0)
        account.spend(tokens, now, now + self.ahead)
        if ticket.granted_at is not None:
            self.settle(account, ticket, usage)
        return self.turned_away(ticket.key, account, now) + self.grant(now)

    def settle(self, account, ticket, usage):
        """What a request was counts, in place of what had been expected."""
        share = account.limits.share or 1
        work = ticket.cost_of(usage) / share if usage else ticket.charged
        if self.heavy:
            account.end_work(ticket, work, self.floor + MEMORY / share)
        else:
            account.end_work(ticket, 0, account.worked)
        place = self.places.get(ticket.place)
        if usage and place:
            prompt, cached, _ = usage
            place.learn(ticket, prompt, cached)

    def turned_away(self, key, account, now):
        """The tickets of a key that wait though its budget is used up, each with its Refusal."""
        if not account.waiting or not account.limits.count_tokens:
            return []
        refusal = account.spent(now + self.ahead)
        if refusal is None:
            return []
        found = [
            ticket
            for lane in self.lanes.values()
            for batch in (False, True)
            for ticket in lane.queues.get((batch, key), ())
        ]
        for ticket in found:
            ticket.refusal = refusal
        return found

    def unqueue(self, ticket):
        queue = ticket.lane.queues[ticket.line]
        queue.remove(ticket)
        self.account(ticket.key).waiting -= 1
        if not queue:
            del ticket.lane.queues[ticket.line]

    def put_back(self, ticket, now):
        """The place of an active ticket has not begun with it: it waits, before others, for another
        place. Returns the tickets to be told."""
        account = self.account(ticket.key)
        account.active -= 1
        account.waiting += 1
        account.reserve(ticket, 0)
        account.end_work(ticket, 0, account.worked)
        self.places[ticket.place].give_up(ticket)
        ticket.avoids = ticket.place
        ticket.place = ticket.granted_at = None
        ticket.state = "waiting"
        ticket.lane.queues.setdefault(ticket.line, Line()).appendleft(ticket)
        return self.grant(now)

    # -- whose turn it is

    def grant(self, now):
        granted = []
        while (choice := self.next(now)) is not None:
            granted.append(self.activate(*choice, now))
        return granted

    def next(self, now):
        """(the ticket whose turn it is, the name of its place), or None.

        Of the keys that may run one more, the one whose last turn is longest ago.
        """
        waiting = []
        for lane in self.lanes.values():
            if lane.queues and (free := self.free_places(lane)):
                for (_, key), queue in lane.queues.items():
                    if self.may_have_turns(key, now):
                        waiting.append((self.turn(key, queue[0], free), queue, free))
        if self.heavy and (choice := self.overdue(waiting, now)):
            return choice
        if len(waiting) > 1:
            waiting.sort(key=itemgetter(0))
        for _, queue, free in waiting:
            if choice := self.choose(queue, free, now):
                return choice
        return None

    def may_have_turns(self, key, now):
        account = self.account(key)
        return not account.busy() and account.has_tokens(now, now + self.ahead)

    def turn(self, key, first, free):
        """When a key had its last turn, and when the first of its queue came: it may wait in
        several. A turn at a place that did not begin with that one does not count, once another
        place is free. What gives way to all others comes after them."""
        last = self.account(key).turn
        if first.avoids is not None and free != [first.avoids]:
            last = first.turn
        return first.need.batch, last, first.entered

    def overdue(self, waiting, now):
        """(a ticket, the name of its place) where it has waited longer than all others, and for too
        long; or None. One at a time: the next one's time begins with it."""
        late = []
        for _, queue, free in waiting:
            if now - queue[0].entered >= PATIENCE:
                for ticket in firsts(queue):
                    since = max(ticket.entered, queue.granted[ticket.waits_as_heavy])
                    late += [(since, ticket, name) for name in free if now - since >= PATIENCE]
        for _, ticket, name in sorted(late, key=itemgetter(0)):
            place = self.places[name]
            if now - place.forced < PATIENCE or name == ticket.avoids:
                continue
            if self.hindrance(ticket, name, now, first=True) is None:
                place.force(ticket, now)
                return ticket, name
        return None

    def choose(self, queue, free, now):
        """(a ticket of a line, the name of its place), or None: the first that may run at a free
        place. Those that wait for their home let some others by, if there are any."""
        patient = []
        held = []
        for ticket in queue:
            names = [name for name in free if name != ticket.avoids]
            if not names:
                continue
            names = self.admitting(ticket, names, now, held)
            if not names:
                held.append(ticket.held)
                if len(held) == MOST_HELD:
                    break
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

    def activate(self, ticket, name, now):
        """The ticket, which runs from now on at the place of that name."""
        queue = ticket.lane.queues[ticket.line]
        self.unqueue(ticket)
        self.grants += 1
        place = self.places[name]
        place.last_turn = self.grants
        place.begin(ticket, self.is_heavy(ticket.need, place), now)
        queue.granted[ticket.heavy] = now
        account = self.account(ticket.key)
        account.active += 1
        account.reserve(ticket, ticket.need.all_tokens)
        ticket.turn = account.turn
        ticket.place = name
        ticket.state = "active"
        if self.heavy:
            self.floor = max(self.floor, account.worked)
            account.begin_work(ticket)
        else:
            account.worked = self.grants
        return ticket

    # -- what heavy prompts and batches wait for

    def is_heavy(self, need, place):
        """Whether a prompt is a heavy one at a place, by the tokens that are not cached there."""
        least = self.heavy / ODDS if need.batch else self.heavy
        if not self.heavy or need.light or need.tokens < least:
            return False
        return place.mirror.cold(need) >= least

    def gives_way(self, need, place):
        """Whether a request may have to wait at a place with a free slot."""
        return need.batch or self.is_heavy(need, place)

    def admitting(self, ticket, names, now, held):
        """Those of these free places that may take a ticket.

        held  why others before it in its line wait: a heavy one overtakes no heavy one
        """
        if not ticket.need.batch and not self.heavy:
            return names
        found = []
        for name in names:
            ticket.held = self.hindrance(ticket, name, now, held)
            if ticket.held is None:
                found.append(name)
        if found:
            ticket.held = None
        return found

    def hindrance(self, ticket, name, now, held=(), first=False):
        """Why a free place does not take a ticket now, or None.

        first  it has waited for too long: no slot is spared, and no conversation
        """
        place = self.places[name]
        need = ticket.need
        if need.batch and not first and place.active >= place.slots - min(SPARE, place.slots - 1):
            return SPARED
        if not self.is_heavy(need, place):
            return None
        if held:
            return held[0]
        if len(place.reading) >= self.at_once:
            return READING
        if place.is_resting(ticket.key, now) and self.is_shared(name, ticket.key, now):
            return RESTS
        if not first and not place.has_room(ticket, now):
            return FULL
        return None

    def is_shared(self, name, key, now):
        """Whether requests of other keys run at a place, or could, or are likely to come soon."""
        place = self.places[name]
        if any(ticket.key != key for ticket in place.running) or place.serves_others(key, now):
            return True
        lanes = [lane for lane in self.lanes.values() if name in lane.places]
        return any(other != key for lane in lanes for _, other in lane.queues)

    # -- what clients may know

    def position(self, ticket):
        """How many will have had their turn when this one's comes, itself included.

        0 once it runs. Another key has as many turns until then as this key has before the ticket,
        and one more if it is ahead.
        """
        if ticket.state != "waiting":
            return 0
        turns = ticket.lane.queues[ticket.line].index(ticket)
        mine = self.account(ticket.key).turn
        position = 1 + turns
        for line, queue in ticket.lane.queues.items():
            batch, key = line
            if batch < ticket.need.batch:
                position += len(queue)
            elif batch == ticket.need.batch and line != ticket.line:
                ahead = self.account(key).turn < mine
                position += min(len(queue), turns + ahead)
        return position

    def progress(self, ticket, now):
        """How much of a heavy prompt its engine should have read by now, from 0 to 1; None where
        nobody knows."""
        if not ticket.reading:
            return None
        return self.places[ticket.place].progress(ticket, now)


def firsts(queue):
    """Of a line the first ticket that waits as a heavy one, and the first other one."""
    found = {}
    for ticket in islice(queue, MOST_HELD):
        found.setdefault(ticket.waits_as_heavy, ticket)
    return found.values()


def unserved():
    """The Refusal where an engine takes no requests any more: it has not begun with any."""
    return ModelUnavailable(
        "no engine takes requests for the model right now; try again later", retry_after=RETRY_AFTER
    )
