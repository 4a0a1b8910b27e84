"""Models and engines: what is loaded, which engine answers, send, count."""

import logging
import posixpath
from dataclasses import dataclass, field, replace

import gevent
import requests
from gevent import Timeout
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from errors import ModelNotAllowed, ModelNotFound, ModelUnavailable, RETRY_AFTER
from engines.http1 import Off, Pool
from engines.kinds import OTHER, Kind, kind_of
from settings import matches

logger = logging.getLogger("sparks")
LOOK_TIMEOUT = 10  # seconds for a look at the engine
MISSES = 2  # looks that may time out before a busy engine counts as off
FIRST_LOOK = 2  # seconds that a request waits for the very first look
COUNT_TIMEOUT = 10  # seconds for the count of a prompt's tokens
COUNTS = 8  # prompts that one engine is asked to count at once
MAX_COUNT = 64 << 20  # bytes of the answer: vLLM lists the tokens too
BYTES_A_TOKEN, IMAGE_TOKENS = 4, 1500  # where no engine counts; images are never counted by one


@dataclass
class Model:
    """A model as people see it.

    id, aliases      its public names; `engine_id` the engine's own, `others` further ones that it goes by there
    lane             what its slots belong to: several names of one engine's model share them
    context          tokens, or None while the engine has not said
    effort           a table of reasoning.TABLES;  reasoning_field  a key of reasoning.FIELDS
    purpose          what it is for: "chat" or "embedding"
    hidden           it answers to its names, and stands in no list
    system           the system prompt for requests that have none;  sampling  {field: value} where the client is silent
    loaded           whether its engine serves it right now
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
        """What it answers to: its id, aliases, the engine's id and its file's name."""
        file = posixpath.basename(self.engine_id or self.id)
        return [
            self.id,
            *self.aliases,
            *self.others,
            self.engine_id or self.id,
            file,
            file.removesuffix(".gguf"),
        ]

    def is_called(self, name):
        """Whether one of its names is just that, ignoring case."""
        return any(name.lower() == own.lower() for own in self.names)

    def answers_to(self, name):
        """Whether one of its names, which may be patterns, fits."""
        return any(matches(name, pattern) for pattern in self.names)


class Engine:
    """One engine: its address, its connections, and what the last look at it showed.

    served  its models as it lists them; None: off
    listed  the same, as it last was: an engine that is off is likely to come back with it
    kind    the kinds.Kind that it is; `purpose`: what its models are for
    hurry   set: it is to be looked at again now
    """

    def __init__(self, url, key=None):
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.pool = Pool(url)
        self.http = requests.Session()
        self.http.trust_env = False  # no proxy, and no ~/.netrc in place of our key
        self.served, self.listed = None, []
        self.kind, self.purpose = OTHER, "chat"
        self.misses, self.hurry = 0, Event()
        self.counts = BoundedSemaphore(COUNTS)

    def look(self):
        """Ask the engine what it serves. Whatever goes wrong means that it is off."""
        try:
            with Timeout(
                2 * LOOK_TIMEOUT, requests.Timeout
            ):  # requests' own is per read: a drip would last for ever
                health = self.get("/health")
                listed = self.get("/v1/models")
            served = (
                listed.json()["data"]
                if listed.status_code == 200 and health.status_code < 500
                else None
            )
            self.served = [model for model in served or () if named(model)] or None
            self.misses = 0
        except requests.Timeout:  # busy, perhaps: one slow answer is no reason to send people away
            self.misses += 1
            if self.misses >= MISSES:
                self.served = None
        except (
            requests.RequestException,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ):
            self.served = None
        if self.served:
            changed = ids_of(self.served) != ids_of(self.listed)
            self.listed = self.served
            if changed:
                self.kind = kind_of(self.served[0])
                self.purpose = self.ask_purpose()
        self.pool.prune()

    def ask_purpose(self):
        """What its models are for."""
        try:
            with Timeout(LOOK_TIMEOUT, requests.Timeout):
                return self.kind.purpose(lambda path: self.get(path).status_code)
        except requests.RequestException:
            return self.purpose

    def post(self, path, body):
        """The body of the answer to a POST, or nothing where it is no 200."""
        answer = self.pool.post(path, body, self.headers)
        try:
            data = answer.all(COUNT_TIMEOUT, MAX_COUNT)
            return data if answer.status == 200 else b""
        finally:
            answer.close(answer.ended)

    def get(self, path):
        return self.http.get(
            self.url + path, headers=self.headers, timeout=LOOK_TIMEOUT, allow_redirects=False
        )


class Fleet:
    """The engines and their models. `watch` looks at each engine every `settings.poll` seconds, for ever; `looked` is set once
    all of them have been looked at.

    Each model goes to the first engine that has it, one that is up before one that is off. The default model, and the one
    that the setting `model` names, are the first engine's.
    """

    def __init__(self, settings):
        self.settings = settings
        self.engines = [Engine(url, settings.upstream_key) for url in settings.upstream]
        self.looked, self.unseen = Event(), set(self.engines)
        self.configure()

    def configure(self):
        """Know the models of the settings, and what the last looks showed of them."""
        self.known = []
        self.learn()

    # -- what there is

    def models(self):
        """The models that are loaded right now."""
        return [model for model in self.known if model.loaded]

    def listed(self):
        """The same as people see them, once under each name: without hidden ones and patterns."""
        return names_of(self.models())

    def find(self, name):
        """The Model that a client means by `name` (None: the default). Raises ModelNotFound, ModelUnavailable."""
        found = self.meant(name)
        if not (found and found.loaded) and not self.looked.is_set():
            self.looked.wait(FIRST_LOOK)
            found = self.meant(name)
        if found is None and self.known and name is not None:
            raise unknown(name, self.known)
        if found is None or not found.loaded:
            raise ModelUnavailable(
                f"the model {found.id if found else ''} is not loaded right now; try again later".replace(
                    "  ", " "
                ),
                retry_after=RETRY_AFTER,
            )
        return found

    def meant(self, name):
        """The Model that a name means, loaded or not, or None."""
        if name is None:
            return next((model for model in self.known if model.default), None)
        return (
            next((model for model in self.known if model.id == name), None)
            or next((model for model in self.known if model.is_called(name)), None)
            or next((model for model in self.known if model.answers_to(name)), None)
            or self.stand_in(name)
        )

    def stand_in(self, name):
        """The default model for a name that clients of other makers' models use, if it is one."""
        if any(matches(name, pattern) for pattern in self.settings.stand_in_for):
            return next((model for model in self.known if model.default), None)

    def view(self, key):
        """The fleet as a key may see it."""
        return View(self, key) if key.models or key.reasoning_field else self

    # -- looking

    def watch(self):
        gevent.joinall([gevent.spawn(self.watch_one, engine) for engine in self.engines])

    def watch_one(self, engine):
        """One that takes its time to be off holds up no other."""
        while True:
            try:
                self.look(engine)
            except Exception:  # whatever an engine says: the next look may be better
                logger.exception("the look at an engine failed")
            engine.hurry.wait(self.settings.poll)
            engine.hurry.clear()

    def look(self, engine):
        before = [model.id for model in self.models()]
        engine.look()
        self.learn()
        self.unseen.discard(engine)
        if not self.unseen:
            self.looked.set()
        after = [model.id for model in self.models()]
        if before != after:
            logger.warning(
                "models loaded: %s", ", ".join(after) or f"none; no engine answers at {engine.url}"
            )

    def learn(self):
        """Bring `known` up to date with what the engines list."""
        engines = sorted(self.engines, key=lambda engine: not engine.served)
        if self.settings.models:
            families = [(engine, names) for engine in engines for names in family(engine.listed)]
            models = [
                self.from_entry(entry, self.pick(entry, families)) for entry in self.settings.models
            ]
        else:
            models = self.unconfigured(engines)
        if not any(model.default for model in models):
            for model in self.leading(models)[:1]:
                model.default = True
        self.known = models

    def leading(self, models):
        """The chat models of which the first is the default: a configured one, or one of the first engine's."""
        own = ids_of(self.engines[0].listed)
        named = (
            [model.id for model in models]
            if self.settings.models
            else [self.settings.model]
            if self.settings.model
            else own
        )
        return [model for model in models if model.purpose == "chat" and model.id in named]

    def unconfigured(self, engines):
        """The models without a word about them in the settings, but perhaps a name for the first engine's."""
        first, public, models = self.engines[0], self.settings.model, []
        if public:
            families = [(first, names) for names in family(first.listed)]
            found = self.match(public, families) or (families[0] if families else None)
            models = [
                self.describe(public, *found)
                if found
                else Model(public, reasoning_field=self.settings.reasoning_field)
            ]
            engines = [engine for engine in engines if engine is not first]
        return distinct(
            models
            + [
                self.describe(entry["id"], engine, [entry])
                for engine in engines
                for entry in engine.listed
            ]
        )

    def pick(self, entry, families):
        """An engine and its names for a configured model; the only model there is needs no mention."""
        if entry.engine:
            return self.match(entry.engine, families)
        found = self.match(entry.id, families)
        return found or (
            families[0] if len(families) == 1 and len(self.settings.models) == 1 else None
        )

    @staticmethod
    def match(name, families):
        return next(
            (
                found
                for found in families
                if any(name.lower() == one["id"].lower() for one in found[1])
            ),
            None,
        )

    def from_entry(self, entry, found):
        model = self.describe(entry.id, *found) if found else Model(entry.id)
        model.default, model.effort, model.aliases, model.others = (
            entry.default,
            entry.effort,
            entry.aliases,
            [],
        )
        model.context = entry.context or model.context
        model.reasoning_field = entry.reasoning_field or self.settings.reasoning_field
        model.purpose, model.hidden = entry.kind or model.purpose, entry.hidden
        model.system, model.sampling = entry.system, entry.sampling
        return model

    def describe(self, public, engine, names):
        """A Model from an engine's entries for it."""
        first = names[0]
        others = [one["id"] for one in names[1:]] + [
            base for base in [posixpath.basename(root_of(first))] if base
        ]
        return Model(
            public,
            first["id"],
            f"{engine.url} {root_of(first)}",
            others=[name for name in others if name != public],
            purpose=engine.purpose,
            context=engine.kind.context_of(first),
            loaded=bool(engine.served),
            engine=engine,
            reasoning_field=self.settings.reasoning_field,
            engine_kind=engine.kind,
        )

    # -- work

    def send(self, ask, request_id):
        """POST an Ask to its engine and give the Answer. Raises Off, UpstreamError."""
        engine = ask.model.engine
        try:
            return engine.pool.post(
                ask.path, ask.body, {**engine.headers, "X-Request-Id": request_id}
            )
        except Off as error:
            engine.hurry.set()
            error.retry_after = RETRY_AFTER
            raise

    def count(self, ask):
        """How many tokens the prompt of an Ask has, by the engine's own tokenizer and template, or else by an estimate."""
        engine, images = ask.model.engine, ask.unseen * IMAGE_TOKENS
        try:
            with Timeout(COUNT_TIMEOUT), engine.counts:
                tokens = engine.kind.count(engine.post, ask.count)
                if tokens and tokens > 0:
                    return tokens + images
        except Timeout:
            pass
        except Exception as error:  # whatever an engine says: a count stops nothing
            logger.warning("the engine did not count a prompt: %s", type(error).__name__)
        return self.estimate(ask)

    @staticmethod
    def estimate(ask):
        return sum(map(len, ask.count or ())) // BYTES_A_TOKEN + 1 + ask.unseen * IMAGE_TOKENS


class View:
    """A fleet with the models that a key may use, its reasoning under the name that its client reads."""

    def __init__(self, fleet, key):
        self.fleet, self.key = fleet, key

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


def named(entry):
    """Whether an engine's entry has an id that can be written down."""
    try:
        return bool(entry["id"].encode())
    except UnicodeEncodeError:
        return False


def family(served):
    """The engine's entries grouped into models: vLLM lists each served name of one model, with one root."""
    groups = {}
    for entry in served:
        groups.setdefault(root_of(entry), []).append(entry)
    return list(groups.values())


def root_of(entry):
    """What an engine's entry stands for: the weights."""
    return entry["root"] if isinstance(entry.get("root"), str) and entry["root"] else entry["id"]
