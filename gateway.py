"""The Gateway: what all Calls share, and what is done with all of them at once."""

import logging
import secrets
from contextlib import suppress
from time import monotonic, time

from gevent import sleep

from engines.homes import Homes
from errors import EngineStuck, ShuttingDown
from people import is_person
from store import ledger
from store.database import DATABASE_FAULTS

logger = logging.getLogger("sparks")
STARTED = time() - monotonic()
JUMP = 1.0  # seconds by which the wall clock is set, and does not merely drift
TICK = 1.0  # seconds between two looks at who may come in by now
QUIT_WAIT = 1.0  # seconds that requests have to end when the gateway ends at once


class Gateway:
    """What all calls share.

    settings, fleet, gate, ledger   see the modules of these names
    bodies    front.body.Bodies: how much all bodies in memory weigh together
    answers   front.body.Room: the same of plain answers that are collected, translated, and taken
    notes     functions that are told of each request's end: (Row, Key or None)
    odd       a function that is told a word of stream.py for what is odd about an answer
    homes     engines.homes.Homes: where conversations ran last
    live      the calls that have not ended
    secret    a key for what is kept of prompts, in memory alone: nobody can tell them by it
    people    people.People: those behind keys, who were seen last
    """

    def __init__(self, settings, fleet, gate, ledger, bodies, answers, people, notes=(), odd=None):
        """The parts, which `sparks.py` makes."""
        self.settings = settings
        self.fleet = fleet
        self.gate = gate
        self.ledger = ledger
        self.bodies = bodies
        self.answers = answers
        self.people = people
        self.notes = notes
        self.odd = odd
        self.homes = Homes()
        self.live = set()
        self.secret = secrets.token_bytes(32)

    def now(self):
        """The moment for the Gate, by a clock that nobody sets. Where the wall clock was set, the
        gate learns what was used in the day and month that it shows now."""
        moment = steady_time()
        ahead = time() - moment
        if abs(ahead - self.gate.ahead) > JUMP:
            with suppress(*DATABASE_FAULTS):  # then with the next request
                self.read_budgets()
                self.gate.ahead = ahead
        return moment

    def arrange(self):
        """Tell the gate where requests can run, and those that wait what that means for them."""
        wake(self.gate.arrange(*self.fleet.arrangement(), steady_time()))
        if self.fleet.seen.is_set():  # an engine that has just come may serve them
            wake(self.gate.stranded())

    def keep_time(self):
        """Have the gate look once a second who may come in because time has passed, for ever."""
        while True:
            sleep(TICK)
            try:
                if self.gate.waiting:
                    for call in list(self.live):
                        call.note_use()
                    wake(self.gate.tick(self.now()))
            except Exception:  # those that wait depend on the next look
                logger.exception("a look at those that wait failed")

    def running(self, engine):
        """How many requests run at an engine."""
        places = self.gate.places.items()
        return sum(place.active for where, place in places if where.engine == engine.url)

    def read_budgets(self):
        """Have the gate know what the ledger does of this day and month."""
        wall = time()
        day = ledger.utc_day(wall)
        today = ledger.used_by_key(day, day)  # a clock that was set back leaves later days
        for key, tokens in ledger.used_by_key(day[:8] + "01", day[:8] + "31").items():
            self.gate.begin(key, today.get(key, 0), tokens, wall)
        for account in filter(is_person, list(self.gate.accounts)):
            self.gate.forget(account)  # until they ask again

    def person(self, key, value):
        """Who of the people behind a key asks, by what its header says; "" where that is nothing.
        The Gate knows what they have used in the month."""
        gate = self.gate
        name = self.people.name_of(value, key.trusts_values)
        if not name:
            return ""
        wall = time()
        day = ledger.utc_day(wall)
        name = self.people.admit(key.id, name, day, lambda one: gate.forget((key.id, one)))
        if (key.id, name) not in gate.accounts:
            with suppress(*DATABASE_FAULTS):
                used = ledger.used_by_person(key.id, name, day)
                gate.begin((key.id, name), *used, wall)
        return name

    def drain(self, seconds):
        """Let nobody in any more, give the live requests so long, then end each with an error."""
        self.gate.closed = True
        self.wait_for_calls(seconds)
        self.interrupt_all()

    def abandon(self):
        """The end at once, with a row for each request.

        A call ends in its own greenlet, which alone stops the watchers that it has in the hub. What
        is left after that waits for a client that takes nothing, and has no watchers any more.
        """
        self.gate.closed = True
        self.interrupt_all()
        self.wait_for_calls(QUIT_WAIT)
        for call in list(self.live):
            call.settle(503, restarting())

    def interrupt_all(self):
        for call in list(self.live):
            call.end_soon(restarting())

    def note_engine(self, engine):
        """An engine's state has changed: nobody waits for an answer of one that is stuck."""
        if engine.health.word == "stuck":
            wait = engine.health.retry_after(time())
            for call in list(engine.pulse.owed):
                call.end_soon(stuck(wait))

    def wait_for_calls(self, seconds):
        end = monotonic() + seconds
        while self.live and monotonic() < end:
            sleep(0.05)


def stuck(wait):
    return EngineStuck(
        "the engine has stopped working on this request; send it again in a while", retry_after=wait
    )


def restarting():
    return ShuttingDown("the gateway is restarting; send the request again", retry_after=5)


def steady_time():
    """Seconds for the Gate's windows, which must not jump when the wall clock is set."""
    return STARTED + monotonic()


def wake(tickets):
    """Tell the requests that wait with these tickets that they have their slots, or that they will
    get none."""
    for ticket in tickets:
        ticket.granted.set()
