"""Engines and their models: what is loaded, which engine has it; ask an engine, count with it."""

import logging
import posixpath
from dataclasses import dataclass, field, replace

import gevent
from gevent import Timeout
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from admission import Seats
from counting import IMAGE_TOKENS, Meter, length_of_request
from engines.http1 import Off, Pool, Refused, Silent
from engines.kinds import OTHER, Kind, kind_of
from errors import (
    RETRY_AFTER,
    ModelNotAllowed,
    ModelNotFound,
    ModelUnavailable,
    Refusal,
    UpstreamError,
)
from settings import matches
from steps import read

logger = logging.getLogger("sparks")
PROBE_TIMEOUT = 10  # seconds for each question of a probe
FAILED_PROBES = 2  # in a row, after which an engine counts as off
FIRST_PROBE = 2  # seconds that a request waits for the very first probe
COUNT_TIMEOUT = 10  # seconds for the count of a prompt's tokens
COUNTS = 8  # prompts that one engine is asked to count at once
MAX_LIST = 4 << 20  # bytes of a list of models
MAX_COUNT = 16 << 20  # bytes of the answer to a count: some engines list the tokens too
MOST_MODELS = 1000  # of one engine; the others are not looked at
MOST_METERS = 100  # models whose counting is remembered
# What a probe may meet: an engine's JSON can be of any shape.
PROBE_FAULTS = (Silent, Refusal, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass
class Model:
    """A model as people see it.

    id               its public name
    engine_id        the engine's name for it
    lane             what its slots belong to: several names of one engine's model share them
    aliases          further public names, patterns among them
    others           further names that it has at its engine
    purpose          "chat" or "embedding"
    hidden           it answers to its names, and stands in no list
    system           the system prompt for requests that have none
    sampling         {field: value} for requests that leave the field out
    default          requests that name no model get it
    effort           a key of reasoning.TABLES
    reasoning_field  a key of reasoning.FIELDS
    context          tokens, or None while the engine has not said
    loaded           its engine serves it right now
    engine_kind      the kinds.Kind of its engine
    """

    id: str
    engine_id: str | None = None
    lane: str = ""
    aliases: list = field(default_factory=list)
    others: list = field(default_factory=list)
    purpose: str = "chat"
    hidden: bool = False
    system: str | None = None
    sampling: dict = field(default_factory=dict)
    default: bool = False
    effort: str = "glm"
    reasoning_field: str = "both"
    context: int | None = None
    loaded: bool = False
    engine: "Engine | None" = None
    engine_kind: Kind = OTHER

    @property
    def names(self):
        """All that it answers to."""
        engine_id = self.engine_id or self.id
        short = self.engine_kind.short_names(engine_id)
        return [self.id, *self.aliases, *self.others, engine_id, *short]

    def has_id(self, name):
        return self.id == name

    def is_called(self, name):
        """Whether one of its names is just that, ignoring case."""
        return any(name.lower() == own.lower() for own in self.names)

    def answers_to(self, name):
        """Whether one of its names, which may be patterns, fits."""
        return any(matches(name, pattern) for pattern in self.names)


class Engine:
    """One engine: its address, its connections, and what the last probe of it showed.

    pool           connections for requests
    probes         makes a new connection for each question of a probe: none can be stale
    served         the entries of its list of models; None: it is off
    listed         the same as it last was: an engine that is off will likely come back with it
    kind           its kinds.Kind
    purpose        what its models are for, "chat" or "embedding"
    failed_probes  how many in a row have failed
    probe_due      an Event: it is to be probed now, not only when `settings.poll` is over
    counts         a semaphore for prompts that it is asked to count
    """

    def __init__(self, url, key=None):
        """`key`: the engine's own, sent with everything that it is asked."""
        self.url = url
        self.headers = {}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.pool = Pool(url)
        self.probes = Pool(url, self.pool.tls)
        self.served = None
        self.listed = []
        self.kind = OTHER
        self.purpose = "chat"
        self.failed_probes = 0
        self.probe_due = Event()
        self.counts = BoundedSemaphore(COUNTS)

    def probe(self):
        """Ask the engine what it serves.

        It is off at once if nobody listens there, and after two probes in a row that failed in any
        other way: a healthy engine, too, is slow or closes a connection now and then.
        """
        try:
            self.note_models(self.ask_models())
            self.failed_probes = 0
        except Refused:
            self.served = None
        except PROBE_FAULTS:
            self.failed_probes += 1
            if self.failed_probes >= FAILED_PROBES:
                self.served = None
        self.pool.prune()

    def ask_models(self):
        """The entries of its list of models. Raises PROBE_FAULTS if it has none, or is not well."""
        health, _ = self.get("/health")
        if health >= 500:  # any other status: some engines have no such route
            raise UpstreamError("the engine is not well")
        status, body = self.get("/v1/models")
        if status != 200:
            raise UpstreamError("the engine lists no models")
        served = [entry for entry in read(body)["data"][:MOST_MODELS] if has_usable_id(entry)]
        if not served:
            raise UpstreamError("the engine has no model")
        return served

    def note_models(self, served):
        changed = ids_of(served) != ids_of(self.listed)
        self.served = self.listed = served
        if changed:
            self.kind = kind_of(served[0])
            self.purpose = self.ask_purpose()

    def ask_purpose(self):
        """What its models are for."""
        try:
            return self.kind.purpose(lambda path: self.get(path)[0])
        except (Silent, Refusal):
            return self.purpose

    def get(self, path):
        """(status, body) of a GET. Raises Silent, Refusal."""
        with Timeout(PROBE_TIMEOUT, Silent):  # looking up its name and connecting included
            answer = self.probes.get(path, self.headers)
            try:
                body = answer.all(PROBE_TIMEOUT, MAX_LIST)
                return answer.status, body
            finally:
                answer.close()

    def post(self, path, body):
        """The body of the answer to a question; b"" if it is no 200. Raises Silent, Refusal."""
        answer = self.pool.post(path, body, self.headers, harmless=True)
        try:
            data = answer.all(COUNT_TIMEOUT, MAX_COUNT)
            return data if answer.status == 200 else b""
        finally:
            answer.close(answer.ended)


class Fleet:
    """The engines and their models.

    `watch` probes each engine every `settings.poll` seconds, for ever; the Event `probed` is set
    once each has been.

    Each model goes to the first engine that has it, one that is up before one that is off. The
    default model, and the one that the setting `model` names, are the first engine's.

    known   all Models, loaded or not
    meters  {lane: counting.Meter}
    """

    def __init__(self, settings):
        self.settings = settings
        self.engines = [Engine(url, settings.upstream_key) for url in settings.upstream]
        self.probed = Event()
        self.never_probed = set(self.engines)
        self.meters = {}
        self.on_change = lambda: None
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
        if not (found and found.loaded) and not self.probed.is_set():
            self.probed.wait(FIRST_PROBE)
            found = self.meant(name)
        if found is None and self.known and name is not None:
            raise unknown(name, self.known)
        if found is None or not found.loaded:
            called = f"the model {found.id}" if found else "the model"
            raise ModelUnavailable(
                f"{called} is not loaded right now; try again later", retry_after=RETRY_AFTER
            )
        return found

    def meant(self, name):
        """The Model that a name means, loaded or not, or None. The better fit goes first: an id,
        another name, a pattern."""
        if name is None:
            return self.default()
        for fits in (Model.has_id, Model.is_called, Model.answers_to):
            for model in self.known:
                if fits(model, name):
                    return model
        # Clients of other makers' models ask for these by name.
        if any(matches(name, pattern) for pattern in self.settings.stand_in_for):
            return self.default()
        return None

    def default(self):
        for model in self.known:
            if model.default:
                return model
        return None

    def seen_by(self, key):
        """The fleet as a Key may use it."""
        return FleetForKey(self, key) if key.models or key.reasoning_field else self

    # -- probing

    def watch(self):
        gevent.joinall([gevent.spawn(self.watch_one, engine) for engine in self.engines])

    def watch_one(self, engine):
        """Each engine has its own greenlet: a slow one holds up no other."""
        while True:
            try:
                self.probe(engine)
            except Exception:  # whatever an engine says: the next probe may do better
                logger.exception("the probe of an engine failed")
            engine.probe_due.wait(self.settings.poll)
            engine.probe_due.clear()

    def probe(self, engine):
        """Probe an engine, and say in the log what has changed by that."""
        before = [model.id for model in self.models()]
        engine.probe()
        self.update()
        self.never_probed.discard(engine)
        if not self.never_probed:
            self.probed.set()
        after = [model.id for model in self.models()]
        if sorted(before) != sorted(after):
            loaded = ", ".join(after) or f"none; no engine answers at {engine.url}"
            logger.warning("models loaded: %s", loaded)

    # -- from engines' lists and the settings to Models

    def update(self):
        """Bring `known` up to date with the settings and with what the engines list."""
        engines = sorted(self.engines, key=lambda engine: not engine.served)
        if self.settings.models:
            groups = [group for engine in engines for group in groups_of(engine)]
            models = [
                self.from_settings(entry, self.pick(entry, groups))
                for entry in self.settings.models
            ]
        else:
            models = self.unconfigured(engines)
        if not any(model.default for model in models):
            for model in self.leading(models)[:1]:
                model.default = True
        self.known = models
        self.on_change()

    def arrangement(self):
        """What the Gate is told: {lane: names of its places}, {name of a place: its Seats}."""
        models = [model for model in self.known if model.engine]
        lanes = {model.lane: (model.lane,) for model in models}
        slots = self.settings.max_active
        return lanes, {model.lane: Seats(slots, open=bool(model.engine.served)) for model in models}

    def leading(self, models):
        """The chat models of the settings or, without any, of the first engine. The first of them
        is the default."""
        chats = [model for model in models if model.purpose == "chat"]
        if self.settings.models:
            return chats
        own = ids_of(self.engines[0].listed)
        if self.settings.model:
            own = [self.settings.model]
        return [model for model in chats if model.id in own]

    def unconfigured(self, engines):
        """The models when the settings have no table of any, but perhaps a name for the first
        engine's."""
        models = []
        public = self.settings.model
        if public:
            first = self.engines[0]
            groups = groups_of(first)
            found = self.match(public, groups)
            if groups and not found:
                found = groups[0]
            models.append(self.describe(public, found))
            engines = [engine for engine in engines if engine is not first]
        for engine in engines:
            models += [self.describe(entry["id"], (engine, [entry])) for entry in engine.listed]
        return distinct(models)

    def pick(self, entry, groups):
        """The group for a configured model (a ModelEntry), or None. If there is one of each, they
        mean each other without a word."""
        if entry.engine:
            return self.match(entry.engine, groups)
        found = self.match(entry.id, groups)
        if not found and len(groups) == len(self.settings.models) == 1:
            return groups[0]
        return found

    @staticmethod
    def match(name, groups):
        """The group that has an entry of that name, ignoring case, or None."""
        for group in groups:
            if any(name.lower() == entry["id"].lower() for entry in group[1]):
                return group
        return None

    def from_settings(self, entry, group):
        """The Model of a ModelEntry, with what its engine says of it."""
        model = self.describe(entry.id, group)
        model.default = entry.default
        model.effort = entry.effort
        model.aliases = entry.aliases
        model.others = []
        model.context = entry.context or model.context
        model.reasoning_field = entry.reasoning_field or self.settings.reasoning_field
        model.purpose = entry.kind or model.purpose
        model.hidden = entry.hidden
        model.system = entry.system
        model.sampling = entry.sampling
        return model

    def describe(self, public, group):
        """A Model from a group of an engine's entries; without one, a model that is not there."""
        model = Model(public, reasoning_field=self.settings.reasoning_field)
        if group is None:
            return model
        engine, (first, *more) = group
        weights = engine.kind.weights_of(first)
        others = [*ids_of(more), posixpath.basename(weights)]
        model.engine_id = first["id"]
        model.lane = f"{engine.url} {weights}"
        model.others = [name for name in others if name and name != public]
        model.purpose = engine.purpose
        model.context = engine.kind.context_of(first)
        model.loaded = bool(engine.served)
        model.engine = engine
        model.engine_kind = engine.kind
        return model

    # -- work

    def send(self, ask, request_id):
        """POST an Ask to its engine and give the Answer. Raises Off, UpstreamError."""
        engine = ask.model.engine
        headers = {**engine.headers, "X-Request-Id": request_id}
        try:
            return engine.pool.post(ask.path, ask.body, headers)
        except Off as error:
            engine.probe_due.set()
            error.retry_after = RETRY_AFTER
            raise

    def count(self, ask):
        """How many tokens the prompt of an Ask has, by the engine's own tokenizer and template, or
        else by an estimate."""
        engine = ask.model.engine
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
        length, _ = ask.measured or length_of_request(ask.count or ())
        return self.meter(ask.model).prompts.estimate(length) + ask.unseen * IMAGE_TOKENS

    def meter(self, model):
        """The Meter of a Model, which outlives that object."""
        if model.lane not in self.meters and len(self.meters) >= MOST_METERS:
            del self.meters[next(iter(self.meters))]
        return self.meters.setdefault(model.lane, Meter())


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
        try:
            model = self.fleet.find(name)
        except ModelNotFound:
            raise unknown(name, filter(self.allows, self.fleet.known)) from None
        if not self.allows(model):
            raise ModelNotAllowed(
                f"this key may not use {model.id}; it may use {', '.join(self.key.models)}", "model"
            )
        return replace(model, reasoning_field=self.key.reasoning_field or model.reasoning_field)


def names_of(models):
    """A Model for each name that can be listed: ids and aliases, patterns aside."""
    return distinct(
        [
            replace(model, id=name)
            for model in models
            if not model.hidden
            for name in (model.id, *model.aliases)
            if name == model.id or "*" not in name
        ]
    )


def distinct(models):
    """Of models with one id, the first."""
    found = {}
    for model in models:
        found.setdefault(model.id, model)
    return list(found.values())


def unknown(name, models):
    ids = ", ".join(model.id for model in models if not model.hidden) or "none"
    return ModelNotFound(
        f"there is no model {name[:100]!r} here; there is {ids} (see GET /v1/models)", "model"
    )


def ids_of(served):
    return [entry["id"] for entry in served]


def has_usable_id(entry):
    """Whether an entry of an engine's list has an id that can be written down."""
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
        return False
    try:
        return bool(entry["id"].encode())
    except UnicodeEncodeError:  # JSON may hold half a surrogate pair
        return False


def groups_of(engine):
    """An engine's models, each as (engine, its entries): one may be listed under several names."""
    groups = {}
    for entry in engine.listed:
        groups.setdefault(engine.kind.weights_of(entry), []).append(entry)
    return [(engine, entries) for entries in groups.values()]
