"""The engines together: who has which model; ask an engine, count with it."""

import logging
from dataclasses import replace
from time import monotonic, time

import gevent
from gevent import Timeout
from gevent.event import Event

from admission import Seats, unserved
from counting import IMAGE_TOKENS, Meter, measure
from engines.engine import COUNT_TIMEOUT, Engine
from engines.found import Found
from engines.health import Trouble
from engines.models import Catalogue, Model, names_of, unknown
from engines.watchdog import Watchdog
from errors import RETRY_AFTER, ModelNotAllowed, ModelNotFound, ModelUnavailable
from loop import take_turn
from settings import matches

logger = logging.getLogger("sparks")
FIRST_LOOK = 2  # seconds that a request waits for the very first look at an engine
LEAST_PAUSE = 0.1  # seconds between two looks
GONE_PAUSE = 0.5  # the same, at most, where the engine is gone
OUT_PAUSE = 5  # the same where it gets no requests for another reason
SAFE = 0.9  # of what an engine's cache holds: what is expected of it is never quite true
MOST_METERS = 100  # models whose counting is remembered
# What people are told of a model whose engine does not serve.
UNAVAILABLE = {
    "loading": "is being loaded",
    "stuck": "has stopped working and is being looked after",
}
REMIND = 60  # seconds after which the log says again that an engine does not serve
REASONS = 10  # seconds after which it gives another reason for the same state


class Fleet:
    """The engines and their models.

    `watch` looks at each engine every `settings.poll` seconds, for ever; the Event `seen` is set
    once each has been looked at, and `unseen` are those that have not been.

    known     all Models, loaded or not
    leaving   engines that the settings do not name any more, while requests run there
    meters    {lane: counting.Meter}
    notes     functions that are told how an engine is after each look, and when it gets stuck:
              (Engine)
    told      {Engine: (its state, in words too, the monotonic moment when the log said so)}
    said      {name of a model: what the log has said of its template}
    drained   engines of which the log has said that nothing runs there any more
    arranged  a function that is told when the places for requests may have changed
    running   a function: (Engine) -> how many requests run there
    """

    def __init__(self, settings):
        """With the engines that the settings name, none of which has been looked at."""
        self.settings = settings
        self.engines = []
        self.leaving = []
        self.seen = Event()
        self.meters = {}
        self.notes = []
        self.told = {}
        self.said = {}
        self.drained = set()
        self.arranged = lambda: None
        self.running = lambda engine: 0
        self.follow_settings()
        self.unseen = set(self.engines)
        self.update()

    # -- what there is

    def models(self):
        """The models that are loaded right now."""
        return [model for model in self.known if model.loaded]

    def listed(self):
        """The same as people see them, once under each name: without hidden ones and patterns."""
        return names_of(self.models())

    def find(self, name):
        """The Model that a client means by `name` (None: the default). Raises ModelNotFound,
        ModelUnavailable."""
        found = self.meant(name)
        if not (found and found.loaded) and not self.seen.is_set():
            self.seen.wait(FIRST_LOOK)
            found = self.meant(name)
        if found is None and self.known and not self.means_default(name):
            raise unknown(name, self.known)
        if found is None or not found.loaded:
            raise self.unavailable(found)
        return found

    def unavailable(self, model):
        """The Refusal for a Model that no engine serves, or for no known one: None."""
        engines = self.engines[:1]
        called = "the model"
        if model:
            called = f"the model {model.id}"
            engines = model.places.values() or engines
        now = time()
        health = min((engine.health for engine in engines), key=lambda one: one.retry_after(now))
        return ModelUnavailable(
            f"{called} {UNAVAILABLE.get(health.word, 'is not loaded right now')}; try again later",
            retry_after=health.retry_after(now),
        )

    def meant(self, name):
        """The Model that a name means, loaded or not, or None. The better fit goes first: an id,
        another name, a pattern."""
        if name is None:
            return self.default()
        for fits in (Model.has_id, Model.is_called, Model.answers_to):
            for model in self.known:
                if fits(model, name):
                    return model
        return self.default() if self.means_default(name) else None

    def means_default(self, name):
        """Whether the default model is meant, though it may not be known yet. Clients of other
        makers' models ask for these by name."""
        return name is None or any(matches(name, other) for other in self.settings.stand_in_for)

    def default(self):
        for model in self.known:
            if model.default:
                return model
        return None

    def seen_by(self, key):
        """The fleet as a Key may use it."""
        own = key.models or key.reasoning_field or key.batch
        return FleetForKey(self, key) if own else self

    # -- looks

    def watch(self):
        for engine in self.engines:
            gevent.spawn(self.watch_one, engine)

    def watch_one(self, engine):
        """Each engine has its own greenlets: a slow one holds up no other."""
        watchdog = gevent.spawn(Watchdog(engine, self.settings, self.note).watch)
        try:
            self.look_on(engine)
        finally:
            watchdog.kill()

    def look_on(self, engine):
        """Look at an engine again and again, until it is given up."""
        while engine in self.engines or engine in self.leaving:
            try:
                self.look(engine)
                self.let_go(engine)
            except Exception:  # whatever an engine says: the next look may do better
                logger.exception("a look at an engine failed")
            pause = self.pause_after(engine)
            least = min(LEAST_PAUSE, pause)
            gevent.sleep(least)  # many requests may want a look at once
            engine.look_due.wait(pause - least)
            engine.look_due.clear()

    def pause_after(self, engine):
        """Seconds until the next look: few where the engine is gone, and may be back any moment;
        more where its figures tell as much meanwhile."""
        if engine.health.word in ("off", "loading"):
            return min(GONE_PAUSE, self.settings.poll)
        if not engine.health.serves:
            return min(OUT_PAUSE, self.settings.poll)
        if engine.pulse.owed and engine.pulse.figures:
            return 2 * self.settings.poll
        return self.settings.poll

    def let_go(self, engine):
        """Say of an engine that is drained that nothing runs there any more, and forget one that
        the settings do not name."""
        if not engine.health.drains or self.running(engine):
            self.drained.discard(engine)
        elif engine not in self.drained:
            self.drained.add(engine)
            logger.warning("engine %s is drained: nothing runs there any more", engine.url)
        if engine in self.leaving and engine in self.drained:
            self.leaving.remove(engine)
            self.drained.discard(engine)
            self.told.pop(engine, None)
            engine.pool.clear()

    def look(self, engine):
        """Look at an engine, and bring all that depends on it up to date."""
        engine.look(self.settings.stuck_after)
        take_turn()  # a list of a thousand models takes long to read, and as long again below
        self.unseen.discard(engine)
        if not self.unseen:
            self.seen.set()
        self.note(engine)

    def note(self, engine):
        """An engine's state may have changed: say so in the log, and which models there are now."""
        before = sorted(model.id for model in self.models())
        self.update()
        self.tell(engine)
        after = [model.id for model in self.models()]
        if before != sorted(after):
            logger.warning("models loaded: %s", ", ".join(after) or "none")
        chats = [model for model in self.models() if model.purpose == "chat"]
        for model in chats:
            if self.said.get(model.id) != model.template:
                logger.info("model %s has %s", model.id, model.template)
        self.said = {model.id: model.template for model in chats}

    def tell(self, engine):
        """Say how an engine is: at each change, and now and then while it is not up."""
        health = engine.health
        now = monotonic()
        word, words, moment = self.told.get(engine, (None, None, now))
        lasts = now - moment
        changed = health.word != word or health.told() != words and lasts >= REASONS
        if changed or health.word != "up" and lasts >= REMIND:
            self.told[engine] = (health.word, health.told(), now)
            log_state(engine.url, health, time(), changed)
        for note in self.notes:
            note(engine)

    def update(self):
        """Bring `known` up to date with the settings and with what the engines list."""
        self.known = Catalogue(self.settings, self.engines).models()
        self.arranged()

    def arrangement(self):
        """Where requests can run, as the Gate is told it: ({lane: names of its places}, {name of a
        place: its Seats})."""
        lanes = {model.lane: tuple(model.places) for model in self.known}
        places = {
            place: self.seats(engine, place.weights, model.engine_id not in engine.resting)
            for model in self.known
            for place, engine in model.places.items()
        }
        return lanes, places

    def seats(self, engine, weights, loaded):
        """The Seats of an engine for some weights. `loaded`: the engine has them in memory."""
        found = engine.found.get(weights) or Found()
        room = self.settings.kv_tokens or None
        if self.settings.kv_tokens is None and found.capacity:
            room = int(SAFE * found.capacity)
        if not found.caches:
            room = 0
        return Seats(engine.slots, engine.weight, engine.serves, room, loaded)

    # -- the settings

    def reload(self):
        """The settings may name other engines now, and say other things of them."""
        came = self.follow_settings()
        self.unseen = {engine for engine in self.engines if not engine.looked}
        self.seen.clear()
        if not self.unseen:
            self.seen.set()
        for engine in came:
            gevent.spawn(self.watch_one, engine)
        self.update()
        for engine in [*self.engines, *self.leaving]:
            engine.look_due.set()

    def follow_settings(self):
        """Have the engines that the settings name, as they say it. Returns those that are new."""
        settings = self.settings
        known = {engine.url: engine for engine in [*self.engines, *self.leaving]}
        named = {entry.url: known.get(entry.url) or Engine(entry.url) for entry in settings.engines}
        self.engines = list(named.values())
        self.leaving = [engine for engine in known.values() if engine.url not in named]
        for entry, engine in zip(settings.engines, self.engines, strict=True):
            engine.use_key(entry.key or settings.upstream_key)
            engine.slots = entry.slots or settings.max_active
            engine.weight = entry.weight
            engine.scheduling = entry.scheduling or settings.scheduling
            engine.health.drain(entry.drain, time())
        for engine in self.leaving:
            engine.health.drain(True, time())
        return [engine for engine in self.engines if engine.url not in known]

    # -- work

    def send(self, ask, engine, request_id):
        """POST an Ask to an engine and give the Answer. Raises ModelUnavailable, UpstreamError."""
        if engine.health.word == "stuck":
            raise unserved()
        headers = {**engine.headers, "X-Request-Id": request_id}
        body = ask.body
        if ask.batch and engine.scheduling == "priority":
            body = engine.kind.put_last(body)
        return engine.pool.post(ask.path, body, headers)

    def at(self, place):
        """The engine at a place, which may have come after the Model was found, or be leaving."""
        for engine in (*self.engines, *self.leaving):
            if engine.url == place.engine:
                return engine
        raise unserved()

    def note_off(self, engine, error):
        """There was no way to connect to an engine. `error`: Off."""
        engine.look_due.set()
        error.retry_after = RETRY_AFTER
        if error.sure:  # no other request needs to find that out
            engine.health.is_troubled(Trouble("off", error.reason, True), time())
            self.note(engine)

    def count(self, ask):
        """How many tokens the prompt of an Ask has, by the engine's own tokenizer and template, or
        else by an estimate."""
        engine = ask.model.engine
        if ask.model.engine_id in engine.resting:  # it would be loaded for that
            return self.estimate(ask)
        try:
            with Timeout(COUNT_TIMEOUT), engine.counts:
                tokens = engine.kind.count(engine.post, ask.count)
                if tokens and tokens > 0:
                    return tokens + ask.unseen * IMAGE_TOKENS
        except Timeout:
            pass
        except Exception as error:  # whatever an engine says: a count stops nothing
            logger.warning("the engine did not count a prompt: %s", type(error).__name__)
        return self.estimate(ask)

    def estimate(self, ask):
        """The same without asking the engine."""
        measured = ask.measured or measure(ask.count or ())
        prompts = self.meter(ask.model).prompts
        return prompts.estimate(measured.length) + ask.unseen * IMAGE_TOKENS

    def meter(self, model):
        """The Meter of a Model, which outlives that object."""
        if model.lane not in self.meters and len(self.meters) >= MOST_METERS:
            del self.meters[next(iter(self.meters))]
        meter = self.meters.setdefault(model.lane, Meter())
        if model.found.bytes_a_token:
            meter.begin_with(model.found.bytes_a_token)
        return meter


class FleetForKey:
    """The part of a Fleet that a key may use, its reasoning under the name that the key's client
    reads."""

    def __init__(self, fleet, key):
        self.fleet = fleet
        self.key = key

    def allows(self, model):
        return not self.key.models or any(matches(model.id, pattern) for pattern in self.key.models)

    def models(self):
        return [model for model in self.fleet.models() if self.allows(model)]

    def listed(self):
        return names_of(self.models())

    def find(self, name):
        """The Model that the key's client means, as that key has it. Raises Refusal."""
        try:
            model = self.fleet.find(name)
        except ModelNotFound:
            raise unknown(name, filter(self.allows, self.fleet.known)) from None
        if not self.allows(model):
            raise ModelNotAllowed(
                f"this key may not use {model.id}; it may use {', '.join(self.key.models)}", "model"
            )
        field = self.key.reasoning_field or model.reasoning_field
        return replace(model, reasoning_field=field, batch=self.key.batch)


def log_state(url, health, now, changed):
    """A line of the log for an engine's state, which has changed or goes on."""
    level = logging.INFO if health.serves else logging.WARNING
    if changed:
        logger.log(level, "engine %s is %s", url, health.told())
    else:
        minutes = round((now - health.since) / 60)
        logger.log(level, "engine %s is still %s (for %d min)", url, health.told(), minutes)
