"""The life of a request: what it holds, and how it ends, whatever ends it.

`relay` is a stream from top to bottom, `answer_whole` a request that is answered in one piece,
`count_prompt` one that only wants to know how long its prompt is.
"""

import logging
import random
import re
from contextlib import suppress
from time import monotonic, time

from gevent import get_hub, getcurrent, sleep, spawn
from gevent.event import Event

import pump
import steps
from counting import Tally, length_of_request
from engines import images
from engines.failures import from_engine
from engines.homes import Homes
from engines.http1 import Off, Silent
from errors import (
    RETRY_AFTER,
    ClientGone,
    EngineStuck,
    InternalError,
    Overloaded,
    Refusal,
    ShuttingDown,
    Unready,
    UpstreamError,
    UpstreamTimeout,
)
from loop import give_way, pause, take_turn, without_collections
from store import ledger
from store.database import DATABASE_FAULTS
from store.ledger import Row
from watch import ClientWatch

logger = logging.getLogger("sparks")
MAX_ANSWER = 256 << 20  # bytes of an answer that comes in one piece
MAX_UNSTREAMED = 32 << 20  # the same to a request that asked for a stream
MAX_ERROR = 1 << 20  # bytes of an engine's error of which any is read
MAX_HELD = 64 << 20  # bytes of a stream in memory: an answer has no more tokens than a context
SAYINGS = 5  # of a text, where an API says it again at its end, once inside each other thing
COPIES = 2  # of an answer in memory, while it is translated
ROOM_WAIT = 10  # seconds for which an answer waits, its slot with it, until there is room for it
ROOM_LOOK = 0.1  # seconds between two looks
STARTED = time() - monotonic()
JUMP = 1.0  # seconds by which the wall clock is set, and does not merely drift
COUNT_WAIT = 0.5  # seconds for which the first event waits for the count of the prompt
QUIT_WAIT = 1.0  # seconds that requests have to end when the gateway ends at once
BLAMED = (500, 502, 504)  # statuses of an engine's fault; a 503 is a full one's, or our own
LEFT = 499  # the status in the ledger of a request whose client went away
LAST_PIECE = 1 << 20  # bytes of a stream's last event in one write
BEGINNING = 1024  # bytes of an answer that tell what it is

steps.between.append(pause)


class Gateway:
    """What all calls share.

    settings, fleet, gate, ledger   see the modules of these names
    bodies    front.body.Bodies: how much all bodies in memory weigh together
    answers   front.body.Room: the same of plain answers that are collected, translated, and taken
    notes     functions that are told of each request's end: (Row, Key or None)
    odd       a function that is told a word of stream.py for what is odd about an answer
    homes     engines.homes.Homes: where conversations ran last
    live      the calls that have not ended
    """

    def __init__(self, settings, fleet, gate, ledger, bodies, answers, notes=(), odd=None):
        """The parts, which `sparks.py` makes."""
        self.settings = settings
        self.fleet = fleet
        self.gate = gate
        self.ledger = ledger
        self.bodies = bodies
        self.answers = answers
        self.notes = notes
        self.odd = odd
        self.homes = Homes()
        self.live = set()

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
        wake(self.gate.arrange(*self.fleet.arrangement()))
        wake(self.gate.stranded())

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


class Call:
    """All that a request holds: body, slot, the engine's answer, the watch on its client.

    `settle` ends it once, before the last bytes leave; `close` does if nothing else did. Whatever
    ends a request early is thrown into its greenlet by `interrupt`, as gevent.Timeout does, in
    every phase alike.

    body     front.body.Body
    frame    a function: bytes of the answer -> bytes for the client's socket
    pump     pump.Pump, once a stream's first event has come
    engine   the engines.engine.Engine that has it, or None
    headed   something of the answer has gone to the client
    conversation
             its name among the gateway's `homes`, if the model has several engines
    kept     bytes of its answer on the account of the gateway's `answers`
    halted   its answer is not read for want of room
    tally    counting.Tally, from when its engine gets it
    loads    its engine has to load the model first
    charged  an Event: what it used is counted for the key's limits
    started  when it began, in epoch seconds; the other moments of its way are by the monotonic
             clock: begun, entered (the queue), granted (a slot), first (token), finished (the slot
             was given away before the engine's last word)
    """

    def __init__(self, gateway, environ, body):
        """`environ` is WSGI's, with what front/wsgi.py adds to it."""
        self.gateway = gateway
        self.sock = environ["gunicorn.socket"]
        self.frame = environ["sparks.frame"]
        self.nudge_client = environ["sparks.nudge"]
        self.id = request_id(environ.get("HTTP_X_REQUEST_ID", ""))
        self.body = body
        self.greenlet = getcurrent()
        self.open = True
        self.route = ""
        self.key = self.ask = self.usage = None
        self.watch = self.ticket = self.answer = self.counting = None
        self.tally = self.pump = self.engine = self.conversation = None
        self.kept = 0
        self.loads = self.halted = self.headed = False
        self.charged = Event()
        self.started = time()
        self.begun = monotonic()
        self.entered = self.granted = self.first = self.finished = None
        gateway.live.add(self)

    # -- the client

    def attend(self):
        """Watch the client from here on."""
        self.watch = ClientWatch(self.sock, self.nudge, lambda: self.interrupt(ClientGone()))

    def nudge(self):
        """Send something that a client passes over; whether that could be. Called in the hub."""
        if self.pump:
            self.pump.guarded(self.pump.nudge)
            return True
        return self.nudge_client(pump.NUDGE)

    def interrupt(self, error):
        """End the call early with `error` (Refusal or ClientGone). Called in the hub."""
        if self.open:
            self.greenlet.throw(error)

    def end_soon(self, error):
        """The same from a greenlet."""
        get_hub().loop.run_callback(self.interrupt, error)

    # -- the slot and the engine

    def fetch_images(self, ask):
        """Put the images in that the request names by their addresses. Raises Refusal.

        Nothing is fetched for a request that would be turned away, and one that is let in counts
        from here on.
        """
        self.ask = ask
        if ask.images:
            self.await_charges()
            self.ticket = self.gateway.gate.prepare(*self.entry())
            ask.fill_in(images.fetch_all(ask.images, self.gateway.settings, self.key.id, self.hold))

    def hold(self, size):
        """Count bytes that came beside the body.

        A fetch that is being ended may still say so when nothing is held any more.
        """
        if self.open:
            self.body.add(size)

    def measure(self, ask):
        """Measure a large request beforehand, in a thread. Its images are still to come."""
        parts = ask.body or ask.count
        ask.measured = length_of_request(
            [b"data:" if isinstance(part, str) else part for part in parts]
        )

    def enter(self, ask):
        """Ask for a slot; `turn` waits for it. Raises Refusal."""
        self.entered = monotonic()
        if not self.ticket:
            self.await_charges()
        if ask.count:  # while the request waits, and while its prompt is read
            self.counting = spawn(self.gateway.fleet.count, ask)
            self.counting.link(lambda _: self.drop_question())
        gate = self.gateway.gate
        if self.ticket:  # since its images were fetched
            granted = gate.line_up(self.ticket, self.gateway.now())
        else:
            self.ticket, granted = gate.enter(*self.entry())
        self.ticket.granted = Event()
        wake(granted)

    def entry(self):
        """Who wants to be let in, where to, and where its conversation ran last, as the Gate asks
        it."""
        ask = self.ask
        home = None
        if ask.opening is not None:
            homes = self.gateway.homes
            self.conversation = homes.name_of(self.key.id, ask.model.lane, ask.opening)
            home = homes.find(self.conversation)
        return self.key.id, ask.model.lane, self.key.limits, self.gateway.now(), home

    def await_charges(self):
        """Let the key's finished requests be charged, which takes a second at most: its limits
        could not see what they used."""
        if not self.key.limits.count_tokens:
            return
        until = monotonic() + pump.AFTERWORD
        for call in list(self.gateway.live):
            if call.is_closing and call.key.id == self.key.id:
                call.charged.wait(max(0, until - monotonic()))

    def turn(self, seconds):
        """Whether the slot came within so many seconds.

        Raises Refusal when the request has waited for too long.
        """
        left = self.entered + self.gateway.settings.queue_timeout - monotonic()
        if self.ticket.granted.wait(min(seconds, max(left, 0))):
            if self.ticket.state == "waiting":
                raise self.gateway.fleet.unavailable(self.ask.model)
            self.granted = monotonic()
            return True
        if seconds >= left:
            raise self.gateway.gate.late(self.ticket, self.gateway.now())
        return False

    def send(self):
        """Send the request to its engine; the Answer is still to come. Raises Refusal."""
        take_turn()  # many slots may come free at once
        ask = self.ask
        model = ask.model
        if self.tally is None:  # what it knows holds for another engine too
            meter = self.gateway.fleet.meter(model)
            self.tally = Tally(meter, ask.body, model.context, ask.most, ask.measured)
        self.engine = self.gateway.fleet.at(self.ticket.place)
        self.loads = model.engine_id in self.engine.resting
        self.answer = self.gateway.fleet.send(ask, self.engine, self.id)
        self.engine.pulse.owe(self, monotonic())
        if self.engine.health.word == "stuck":  # by now
            raise stuck(self.engine.health.retry_after(time()))
        if self.conversation:
            self.gateway.homes.note(self.conversation, self.ticket.place)
        if not self.may_move:
            self.let_go_of_request()

    @property
    def may_move(self):
        """Whether another engine could be asked, if this one does not begin."""
        ticket = self.ticket
        if len(ticket.lane.places) == 1 or ticket.avoids is not None or self.ask.body is None:
            return False
        return self.gateway.gate.is_open(ticket.lane, ticket.place)

    def move(self, error):
        """Wait for a slot at another engine, before others, where this one has not begun. Raises
        the error, a Refusal, if it has, or may have, or if there is no other one."""
        if isinstance(error, Off):
            self.gateway.fleet.note_off(self.engine, error)
        if not error.not_begun or not self.may_move:
            raise error
        logger.warning("request %s goes to another engine: %s", self.id, error.code)
        self.take_leave(False)
        if self.answer:
            self.answer.close(self.answer.ended)
        self.answer = self.engine = None
        self.keep_only(0)
        self.ticket.granted.clear()
        wake(self.gateway.gate.put_back(self.ticket))

    def let_go_of_request(self):
        """The engine has it, or will have: it is sent nowhere else."""
        if self.ask.body is None:
            return
        self.ask.body = None
        self.body.abridged = None
        self.answer.when_request_dropped(self.release_body)

    def release_body(self):
        """The engine has the body: nothing holds it any more once its prompt is counted."""
        if not self.ask.count:
            self.body.release()

    @property
    def owed_since(self):
        """The moment at which the engine had all of the request; None as long as no answer can be
        waited for, because that is still to come, or because the client takes nothing."""
        if not self.answer.sent or self.halted or self.pump and self.pump.left:
            return None
        return self.answer.since

    def deadline(self, since):
        """The moment until which an answer has its time. It may wait behind others' work: so it is
        counted from the engine's last progress, if that is later than `since`."""
        settings = self.gateway.settings
        until = since + settings.answer_timeout
        now = monotonic()
        if now >= until:
            progress = self.engine.pulse.progress(now, settings.stuck_after)
            until = max(until, progress + settings.answer_timeout)
        return until

    def take_leave(self, answered):
        """The engine owes it nothing more. `answered`: because all of the answer has come."""
        if self.engine:
            self.engine.pulse.settle(self, answered, monotonic())

    def prompt_tokens(self):
        """How many tokens the prompt has, as counted by now or soon, else estimated."""
        self.counting.join(COUNT_WAIT)
        self.stop_counting()
        self.drop_question()
        return self.tally.prompt()

    def drop_question(self):
        """Let go of the prompt as it was kept for counting."""
        self.ask.count = None
        if self.answer:
            self.answer.drop_request()

    def pump_rest(self, since, events):
        """Move a stream to its end, of which these events wait for the client already."""
        told = (self.finish, self.hold_stream)
        self.pump = pump.Pump(
            self.answer,
            self.ask.stream,
            self.sock,
            self.frame,
            self.gateway.settings,
            since,
            told,
            self.engine.pulse,
            events,
        )
        self.pump.move()

    # -- the memory for a large answer

    def keep(self, size):
        """Count bytes of an answer in memory. Where there is no room, the engine is not read on for
        a while, since slow readers make room. Raises Overloaded."""
        until = monotonic() + ROOM_WAIT
        while not self.gateway.answers.fits(self.key.id, self.kept, size):
            self.halted = True
            if monotonic() > until or self.kept + size > self.gateway.answers.most:
                raise Overloaded(
                    "too many large answers are waiting to be taken; read yours, and try again",
                    retry_after=RETRY_AFTER,
                )
            sleep(ROOM_LOOK)
        self.halted = False
        self.gateway.answers.take(self.key.id, size)
        self.kept += size

    def hold_stream(self):
        """Count what a stream takes in memory for a large event that comes, or for a text that it
        will say again at its end. Raises Overloaded, UpstreamError."""
        stream = self.ask.stream
        size = len(stream.events.rest) + stream.holds
        if size > MAX_HELD:
            raise UpstreamError("the engine's answer is beyond all bounds")
        if SAYINGS * size > self.kept + pump.LARGE:
            self.keep(SAYINGS * size - self.kept)

    def keep_only(self, size):
        """No more than so many bytes of the answer are in memory any more."""
        if self.kept > size:
            self.gateway.answers.release(self.key.id, self.kept - size)
            self.kept = size

    # -- the end

    def finish(self):
        """All that was asked for has come: the slot serves the next one, while the engine may still
        tell its figures. Called in the hub."""
        self.take_leave(True)
        self.leave(0)
        self.finished = monotonic()

    def hear_out(self):
        """The client has left an answer that was finished; its engine's figures count all the same.
        The slot serves others meanwhile."""
        stream = self.ask.stream
        attempt(self.unwatch)
        try:
            if self.tally.is_counted(stream):
                return
            if self.finished is None:
                pump.hear_out(self.answer, stream, monotonic() + pump.GRACE)
                self.finish()
            pump.hear_out(self.answer, stream, self.finished + pump.AFTERWORD - pump.GRACE)
        except Exception as error:  # also the gateway's own end
            as_refusal(error)

    def settle(self, status, error=None, whole=False):
        """Let go of everything, and write the row. Does nothing the second time.

        error  the Refusal that the request ended with
        whole  the engine's answer came to its end, so its connection may serve again

        A step that fails is logged and hinders no other: slot and row come whatever happens. None
        but the writing of the row lets other greenlets run.
        """
        if not self.open:
            return
        self.open = False
        for step in (self.body.release, self.unwatch, self.bound_writes, self.stop_counting):
            attempt(step)
        attempt(self.take_leave, status == 200)
        if self.answer:
            attempt(self.answer.close, whole)
            if error and error.status in BLAMED:
                self.engine.note_fault()
        attempt(self.note_oddities)
        row = attempt(self.row, status, error, attempt(self.figures, status) or {})
        if self.ticket:
            attempt(self.leave, attempt(lambda: row.tokens) or 0)
        self.charged.set()
        try:
            if self.key and row:
                attempt(self.gateway.ledger.write, row)
        finally:
            self.gateway.live.discard(self)
        if self.route and row:
            for note in self.gateway.notes:
                attempt(note, row, self.key)

    def unwatch(self):
        if self.watch:
            self.watch.stop()
            self.watch = None  # it knows the call

    def bound_writes(self):
        """Give each write that is still to come its time."""
        self.sock.settimeout(self.gateway.settings.stall_timeout)

    def stop_counting(self):
        if self.counting is not None:  # one that has ended counts as false
            if self.tally and self.counting.successful():
                self.tally.counted = self.counting.value
            self.counting.kill(block=False)
            self.counting = None

    def leave(self, tokens):
        """Give the slot, or the place in the queue, to others, and count what was used."""
        gate = self.gateway.gate
        if self.finished:
            gate.charge(self.key.id, tokens, self.gateway.now())
            return
        reached = self.answer is not None
        wake(gate.leave(self.ticket, tokens, reached, self.gateway.now()))
        if gate.is_given_up(self.ticket.place):
            self.gateway.fleet.at(self.ticket.place).look_due.set()

    def figures(self, status=None):
        """The tokens of the request as fields of a Row; none if no engine has taken it.

        status   how it ended, or None as long as it goes on
        """
        if self.answer is None or self.answer.status not in (None, 200):
            return {}
        stream = self.ask.stream
        usage = stream.usage if stream else self.usage
        worked = milliseconds(self.granted, monotonic())
        if status == 200 or stream and stream.closing:
            self.tally.learn(usage, stream, worked)
            self.ask.model.found.note_usage(usage)
        return self.tally.figures(usage, stream, worked if status == LEFT else 0)

    def note_oddities(self):
        """Log and count what is odd about the engine's answer: never its words."""
        found = self.oddities()
        if not found:
            return
        logger.warning("request %s: an odd answer: %s", self.id, ", ".join(found))
        for kind in found:
            if self.gateway.odd:
                self.gateway.odd(kind)

    def oddities(self):
        """What is odd about the engine's answer, words of stream.py."""
        if self.ask is None:
            return []
        found = self.ask.oddities
        if self.ask.stream is not None:
            found = found | self.ask.stream.oddities
        return sorted(found)

    def row(self, status, error, tokens):
        """The Row of the ledger. `tokens` are its fields of that sort, a dict."""
        model = self.ask and self.ask.model
        stream = self.ask and self.ask.stream
        return Row(
            id=self.id,
            key_id=self.key.id if self.key else 0,
            model=model.id if model else "",
            engine=self.ticket.place.engine if self.answer else "",
            route=self.route,
            started=self.started,
            queued_ms=self.queued_ms,
            first_ms=milliseconds(self.begun, self.first),
            total_ms=milliseconds(self.begun, monotonic()),
            status=status,
            error=error and error.code,
            streamed=stream is not None,
            aborted=status == LEFT,
            truncated=bool(stream and error and self.first),
            **tokens,
        )

    @property
    def is_closing(self):
        """Whether all of a stream has come but perhaps its engine's figures, and nothing is charged
        yet."""
        stream = self.ask and self.ask.stream
        return bool(self.open and stream and stream.closing)

    @property
    def all_said(self):
        """Whether the engine's last word has come, so that its connection may serve again."""
        stream = self.ask and self.ask.stream
        if not self.answer or not stream or stream.fault:
            return False
        return stream.over or self.answer.ended

    @property
    def queued_ms(self):
        return milliseconds(self.entered, self.granted)

    def close(self):
        """The response is over, whatever became of it."""
        try:
            if self.is_closing:
                self.hear_out()
        finally:
            self.settle(LEFT, whole=self.all_said)
            self.answer = self.pump = None  # they know the call
            self.keep_only(0)
        self.sock.settimeout(None)
        if self.body.breaks:
            self.body.discard()


def attempt(step, *arguments):
    """What a step of a request's end gives; one that fails is logged, and the next one comes."""
    try:
        return step(*arguments)
    except Exception:
        logger.exception("a step of a request's end failed: %s", step.__qualname__)
        return None


def request_id(wish):
    """The client's own id if it is a clean one, and no key by mistake; else a new one."""
    if re.fullmatch(r"(?!(?i:sk-))[A-Za-z0-9._-]{1,64}", wish):
        return wish
    return f"{random.getrandbits(128):032x}"


def steady_time():
    """Seconds for the Gate's windows, which must not jump when the wall clock is set."""
    return STARTED + monotonic()


def milliseconds(begin, end):
    """Whole milliseconds between two moments, or None if one has not been."""
    if begin is None or end is None:
        return None
    return round((end - begin) * 1000)


def wake(tickets):
    """Tell the requests that wait with these tickets that they have their slots, or that they will
    get none."""
    for ticket in tickets:
        ticket.granted.set()


# ---- the three sorts of request


def relay(call, ask):
    """A stream: an iterator of the client's bytes, each item one write.

    What fails before the first item is raised, and can still be an HTTP status; what fails later is
    the stream's last event.
    """
    stream = ask.stream
    settings = call.gateway.settings
    fault = None
    if (call.key.keepalive_form or settings.keepalive_form) == "chunk":
        stream.alive_in_chunks(call.id, int(call.started), ask.model.id)
    try:
        call.fetch_images(ask)
        call.enter(ask)
        since, events = yield from begin(call)
        call.first = monotonic()
        call.headed = True
        yield b""  # the head; all that follows goes through the pump
        call.pump_rest(since, events)
        stream.own_figures = attempt(call.figures) or {}
        last = stream.end()
    except Exception as error:
        fault = as_refusal(error)
        if not call.headed:
            raise fault from None
        fault.request_id = call.id
        stream.own_figures = attempt(call.figures) or {}
        last = stream.fail(fault)
    if fault:
        call.settle(fault.status, fault)
    else:
        call.settle(200, whole=call.all_said)
    yield from in_pieces(last)


def begin(call):
    """Signs of life of a stream while it waits for its slot and its engine; returns when the engine
    got it, and its first events. Raises Refusal.

    An engine that has not begun with it is left for another one, once.
    """
    stream = call.ask.stream
    keepalive = call.gateway.settings.keepalive
    while True:
        while not call.turn(keepalive):
            call.headed = True
            yield stream.alive(f"queued {call.gateway.gate.position(call.ticket)}")
        since = monotonic()
        try:
            call.send()
            while (events := first_events(call, since)) is None:
                call.headed = True
                yield stream.alive("loading") if call.loads else stream.alive()
        except Refusal as error:
            call.move(error)
        else:
            call.let_go_of_request()
            return since, events


def in_pieces(event):
    """A stream's last event, for one write each."""
    for at in range(0, len(event), LAST_PIECE):
        pause()
        yield event[at : at + LAST_PIECE]


def first_events(call, since):
    """The first events for the client, or None after a silence that is worth a comment.

    Raises Refusal.
    """
    answer = call.answer
    stream = call.ask.stream
    settings = call.gateway.settings
    pause = monotonic() + settings.keepalive
    while (left := min(pause, call.deadline(since)) - monotonic()) > 0:
        data = answer.read(left)
        if data is None:
            continue
        if answer.streams is None:  # its first bytes tell
            answer.streams = answer.status == 200 and is_stream(answer, data)
        if call.counting is not None and stream.prompt_tokens is None:
            stream.prompt_tokens = call.prompt_tokens()
        if not answer.streams:
            return unstreamed(call, data, since)
        with without_collections():
            events = pump.feed(stream, data, call.hold_stream)
        if events:
            return events
        if not data or stream.over:
            stream.end()  # raises: it ended without a word, which is still an HTTP status
            return events
        give_way()  # bytes that say nothing may come faster than they are read
    if monotonic() >= call.deadline(since):
        raise unanswered(settings)
    return stream.end_hold() or None


def unstreamed(call, data, since):
    """A whole answer, or an error, to a request that asked for a stream. Raises Refusal."""
    answer = call.answer
    stream = call.ask.stream
    if not answer.ended:
        data += collect(call, since, MAX_UNSTREAMED)
    with without_collections():
        value = checked(answer, data)
        events = stream.feed_plain(value)
        if len(data) > steps.LARGE:
            steps.let_go(value)
    if stream.fault or not events:
        stream.end()  # raises: it is no answer, which is still an HTTP status
    return events


def answer_whole(call, ask, write):
    """The client's body of a request that is answered in one piece: bytes, or a list of them where
    it is large. Raises Refusal.

    write  a function: (the engine's answer, ask) -> (the client's body, the engine's usage). The
           answer is a dict, or the bytes of a stream that nobody asked for
    """
    try:
        call.fetch_images(ask)
        call.enter(ask)
        body = whole_answer(call)
        take_turn()  # many small ones together are not small
        if len(body) <= steps.LARGE:
            data = translated(call, body, write)
        else:
            with without_collections():
                data = translated(call, body, write)
    except Exception as error:
        raise as_refusal(error) from None
    call.settle(200, whole=True)
    call.keep_only(size_of(data))
    return data


def whole_answer(call):
    """The body of the engine's answer. Raises Refusal.

    An engine that has not begun with it is left for another one, once.
    """
    while True:
        call.turn(call.gateway.settings.queue_timeout)
        since = monotonic()
        try:
            call.send()
            body = collect(call, since)
            if call.answer.status == 200:
                call.let_go_of_request()
                return body
            checked(call.answer, body)  # raises
        except Refusal as error:
            call.move(error)


def translated(call, body, write):
    """The client's body for the engine's."""
    ask = call.ask
    value = body
    if not is_stream(call.answer, body):
        value = checked(call.answer, body, ask.each)
    try:
        call.tally.take(value)
        ask.own_figures = attempt(call.figures) or {}
        data, call.usage = write(value, ask)
    finally:
        if len(body) > steps.LARGE and isinstance(value, dict):
            steps.let_go(value)
    return data


def size_of(body):
    """How many bytes a body has, bytes or a list of them."""
    return sum(map(len, body)) if isinstance(body, list) else len(body)


def count_prompt(call, ask):
    """How many tokens a prompt has: asked without a slot, beside everything else."""
    call.ask = ask
    tokens = call.gateway.fleet.count(ask)
    call.settle(200)
    return tokens


# ---- an engine's answer


def collect(call, since, most=MAX_ANSWER):
    """The rest of an answer's body, at most so many bytes."""
    first = 0

    def hold(size):
        nonlocal first
        if not call.kept and first + size <= steps.LARGE:
            first += size  # what is small is not counted
        else:
            call.keep(COPIES * (first + size))
            first = 0

    def seconds():
        return call.deadline(since) - monotonic()

    try:
        return call.answer.all(seconds(), most, hold, seconds)
    except Silent:
        raise unanswered(call.gateway.settings) from None


def unanswered(settings):
    limit = settings.answer_timeout
    return UpstreamTimeout(f"the engine has not answered within {limit:g} seconds")


def is_stream(answer, data):
    """Whether the engine answers with events; some forget to say so."""
    content_type = answer.headers.get("content-type", "")
    if "event-stream" in content_type:
        return True
    looks_like_events = data[:BEGINNING].lstrip()[:1] not in (b"{", b"[", b"<", b"")
    return "json" not in content_type and looks_like_events


def checked(answer, body, each=None):
    """The JSON object of an answer that is no stream. Raises the Refusal that it stands for.

    each  see steps.read
    """
    if answer.status != 200 and len(body) > MAX_ERROR:
        body = b""
    try:
        value = steps.read(body, each)
    except (ValueError, RecursionError):
        value = None
    if answer.status != 200:
        raise from_engine(answer.status, value, answer.headers.get("retry-after"))
    if not isinstance(value, dict):
        raise UpstreamError("the engine's answer cannot be read")
    if value.get("error") or value.get("object") == "error":
        raise from_engine(None, value)
    return value


def as_refusal(error):
    """An exception as a Refusal.

    One that is no Refusal is a fault of the gateway, and leaves its traceback in the log.
    """
    if isinstance(error, Refusal):
        refusal = error
    elif isinstance(error, RecursionError):  # JSON is read deeper than it is written
        refusal = UpstreamError("the engine's answer is nested too deeply")
    elif isinstance(error, DATABASE_FAULTS):
        logger.error("the database cannot be read: %s", error)
        refusal = Unready("the gateway's database cannot be read; try again shortly", retry_after=5)
    else:
        logger.exception("a fault of the gateway")
        refusal = InternalError(
            "the gateway failed; this is its own fault, and its log has the details"
        )
    drop_frames(error)
    return refusal


def drop_frames(error):
    """Let go of the frames that an error came through, and those that led to it. They know the
    request's body, and the error as well: together they would stay until the garbage is
    collected."""
    errors = [error]
    while errors:
        error = errors.pop()
        errors += filter(None, (error.__cause__, error.__context__))
        error.__traceback__ = error.__cause__ = error.__context__ = None
