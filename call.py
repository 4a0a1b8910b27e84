"""A Call: all that a request holds, from its first byte to its row, whatever ends it.

What is done with it, by the sort of request, is answering.py.
"""

import logging
import random
import re
from time import monotonic, time

from gevent import get_hub, getcurrent, sleep, spawn
from gevent.event import Event

import pump
from admission import BLOCK, Need
from counting import Chain, Tally, measure
from engines import images
from engines.http1 import Off
from errors import RETRY_AFTER, ClientGone, Overloaded, UpstreamError
from faults import as_refusal
from gateway import stuck, wake
from loop import take_turn
from people import account_of
from store.ledger import Row
from watch import ClientWatch

logger = logging.getLogger("sparks")
MAX_HELD = 64 << 20  # bytes of a stream in memory: an answer has no more tokens than a context
SAYINGS = 5  # of a text, where an API says it again at its end, once inside each other thing
ROOM_WAIT = 10  # seconds for which an answer waits, its slot with it, until there is room for it
ROOM_LOOK = 0.1  # seconds between two looks
COUNT_WAIT = 0.5  # seconds for which the first event waits for the count of the prompt
BLAMED = (500, 502, 504)  # statuses of an engine's fault; a 503 is a full one's, or our own
NOTED = 0.5  # seconds between two times when the Gate is told what a request has used by then
LEFT = 499  # the status in the ledger of a request whose client went away


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
    noted    when the Gate was told last what it has used by then
    halted   its answer is not read for want of room
    tally    counting.Tally, from when it asks for a slot
    loads    its engine has to load the model first
    person   who of the people behind the key asks, or ""
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
        self.person = ""
        self.watch = self.ticket = self.answer = self.counting = None
        self.tally = self.pump = self.engine = self.conversation = None
        self.kept = 0
        self.noted = 0.0
        self.loads = self.halted = self.headed = False
        self.charged = Event()
        self.started = time()
        self.begun = monotonic()
        self.entered = self.granted = self.first = self.finished = None
        gateway.live.add(self)

    @property
    def account(self):
        """Who it counts for, wherever turns, limits and memory are shared out."""
        return self.key and account_of(self.key.id, self.person)

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
            settings = self.gateway.settings
            ask.fill_in(images.fetch_all(ask.images, settings, self.account, self.hold))

    def hold(self, size):
        """Count bytes that came beside the body.

        A fetch that is being ended may still say so when nothing is held any more.
        """
        if self.open:
            self.body.add(size)

    def measure(self, ask):
        """The Measure of a request: of a large one beforehand, in a thread, where its images are
        still to come. What an engine only counts, or embeds, is in no cache afterwards."""
        chain = None
        if self.gateway.settings.heavy_prompt and ask.body and ask.model.purpose == "chat":
            chain = Chain(self.gateway.secret, ask.model.lane)
        parts = ask.filled(dict.fromkeys(ask.images, [b"data:"]))
        return measure(parts or ask.count, chain)

    def enter(self, ask):
        """Ask for a slot; `turn` waits for it. Raises Refusal."""
        self.entered = monotonic()
        measured = ask.measured or self.measure(ask)
        meter = self.gateway.fleet.meter(ask.model)
        self.tally = Tally(meter, ask.body, ask.model.context, ask.most, measured)
        if not self.ticket:
            self.await_charges()
        if ask.count:  # while the request waits, and while its prompt is read
            self.counting = spawn(self.gateway.fleet.count, ask)
            self.counting.link(lambda _: self.drop_question())
        gate = self.gateway.gate
        if self.ticket:  # since its images were fetched
            granted = gate.line_up(self.ticket, self.gateway.now(), self.need())
        else:
            self.ticket, granted = gate.enter(*self.entry(), self.need())
        self.ticket.granted = Event()
        wake(granted)

    def entry(self):
        """Who wants to be let in, where to, and where its conversation ran last, as the Gate asks
        it."""
        ask = self.ask
        home = None
        if ask.opening is not None:
            homes = self.gateway.homes
            self.conversation = homes.name_of(self.account, ask.model.lane, ask.opening)
            home = homes.find(self.conversation)
        return self.account, ask.model.lane, self.key.limits, self.gateway.now(), home

    def need(self):
        """What it will take of its engine, as the Gate asks it. Of images nobody knows whether they
        are cached, where the text beside them is too short to tell."""
        tally = self.tally
        is_chat = self.ask.model.purpose == "chat"
        is_short = tally.length.size < BLOCK
        return Need(
            tokens=tally.rough_prompt() if is_short else tally.careful_prompt(),
            answer=tally.answer() if is_chat else 0,
            size=tally.length.size,
            hashes=tally.hashes,
            batch=self.ask.batch,
            whole=self.ask.stream is None,
            light=not is_chat or is_short and tally.images > 0,
        )

    def await_charges(self):
        """Have the Gate know what the key's other requests have used. Those that have finished are
        charged within a second; until then its limits could not see it."""
        if not self.key.limits.count_tokens:
            return
        until = monotonic() + pump.AFTERWORD
        for call in list(self.gateway.live):
            if call.account != self.account:
                continue
            if call.is_closing:
                call.charged.wait(max(0, until - monotonic()))
            else:
                call.note_use()

    def note_use(self):
        """Have the Gate know what it has used by now, where that counts before it ends. Many others
        may want that, and it takes a while: so it is told now and then."""
        if not (self.key and self.key.limits.count_tokens and self.ticket and self.answer):
            return
        now = monotonic()
        if now - max(self.granted, self.noted) >= NOTED:
            self.noted = now
            self.gateway.gate.reserve(self.ticket, tokens_of(self.figures(LEFT)))

    def turn(self, seconds):
        """Whether the slot came within so many seconds.

        Raises Refusal when the request has waited for too long.
        """
        left = self.entered + self.gateway.settings.queue_timeout - monotonic()
        if self.ticket.granted.wait(min(seconds, max(left, 0))):
            if self.ticket.refusal:
                raise self.ticket.refusal
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
        self.engine = self.gateway.fleet.at(self.ticket.place)
        self.loads = model.engine_id in self.engine.resting
        self.engine.pulse.owe(self, monotonic())  # should it get stuck before it has it all
        self.answer = self.gateway.fleet.send(ask, self.engine, self.id)
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
        """Wait for a slot at another engine, before others, where this one has not begun, or has
        died before its answer did. Raises the error, a Refusal, if it may be at work on it, or if
        there is no other one."""
        if not error.not_begun and self.may_move:
            error = self.death(error) or error
        if isinstance(error, Off):
            self.gateway.fleet.note_off(self.engine, error)
        if not error.not_begun or not self.may_move:
            raise error
        logger.warning("request %s goes to another engine: %s", self.id, error.code)
        self.entered += monotonic() - self.granted  # its time at that engine was no waiting
        self.take_leave(False)
        if self.answer:
            self.answer.close(self.answer.ended)
        self.answer = self.engine = None
        self.keep_only(0)
        self.ticket.granted.clear()
        wake(self.gateway.gate.put_back(self.ticket, self.gateway.now()))

    def death(self, error):
        """The Off of an engine that has ended, and with it all that it had begun, before anything
        of a stream had come, or all of a plain answer; or None."""
        stream = self.ask.stream
        if type(error) is not UpstreamError or stream and not stream.untouched:
            return None
        return self.engine.death()

    def has_begun(self):
        """The first of its answer is there for the client."""
        self.first = monotonic()
        self.note_read()

    def note_read(self):
        """The engine has begun to answer: so its prompt has been read. The client may see nothing
        of that yet, or only later."""
        ticket = self.ticket
        if ticket.read_in is None and (ticket.reading or ticket.need.hashes):
            wake(self.gateway.gate.first_token(ticket, self.gateway.now()))

    @property
    def is_being_read(self):
        """Whether a long prompt is still being read, though the stream may say something already:
        engines tell how far they are in events without a token."""
        stream = self.ask.stream
        return self.ticket.reading and not (stream.tokens or stream.closing)

    def activity(self):
        """What its engine is doing before its answer begins, in a few words for people, or none."""
        if self.loads:
            return "loading"
        progress = self.gateway.gate.progress(self.ticket, self.gateway.now())
        if progress is None or progress >= 1:
            return ""
        return f"reading your prompt, about {10 * int(10 * progress)} %"

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
        if not self.answer or not self.answer.sent or self.halted or self.pump and self.pump.left:
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
        while not self.gateway.answers.fits(self.account, self.kept, size):
            self.halted = True
            if monotonic() > until or self.kept + size > self.gateway.answers.most:
                raise Overloaded(
                    "too many large answers are waiting to be taken; read yours, and try again",
                    retry_after=RETRY_AFTER,
                )
            sleep(ROOM_LOOK)
        self.halted = False
        self.gateway.answers.take(self.account, size)
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
            self.gateway.answers.release(self.account, self.kept - size)
            self.kept = size

    # -- the end

    def finish(self):
        """All that was asked for has come: the slot serves the next one, while the engine may still
        tell its figures. Called in the hub."""
        self.take_leave(True)
        self.leave()
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
            attempt(self.charge, row)
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

    def leave(self, tokens=None, usage=None, answered=True):
        """Give the slot, or the place in the queue, to others. What was used, as in Gate.leave, may
        be known later."""
        gate = self.gateway.gate
        reached = self.answer is not None
        wake(gate.leave(self.ticket, tokens, reached, self.gateway.now(), usage, answered))
        if gate.is_given_up(self.ticket.place):
            self.gateway.fleet.at(self.ticket.place).look_due.set()

    def charge(self, row):
        """Count what was used, by its Row; None: that failed. Give the slot away with it, if that
        was not done before."""
        tokens = attempt(lambda: row.tokens) or 0
        usage = row and (row.prompt_tokens or 0, cached_in(row), row.completion_tokens or 0)
        if self.finished:
            wake(self.gateway.gate.charge(self.ticket, tokens, self.gateway.now(), usage))
        else:
            self.leave(tokens, usage, row is not None and row.status == 200)

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
            person=self.person,
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


def cached_in(row):
    """The tokens that an engine says were cached; None where it has said nothing."""
    return row.cached_tokens if row.counted == "engine" else None


def tokens_of(figures):
    """How many tokens the fields of a Row say that were used."""
    return figures.get("prompt_tokens", 0) + figures.get("completion_tokens", 0)


def request_id(wish):
    """The client's own id if it is a clean one, and no key by mistake; else a new one."""
    if re.fullmatch(r"(?!(?i:sk-))[A-Za-z0-9._-]{1,64}", wish):
        return wish
    return f"{random.getrandbits(128):032x}"


def milliseconds(begin, end):
    """Whole milliseconds between two moments, or None if one has not been."""
    if begin is None or end is None:
        return None
    return round((end - begin) * 1000)
