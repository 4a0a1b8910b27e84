"""Models as people see them: from the engines' lists and the settings to names.

Pure: engines are only read here.
"""

import posixpath
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engines.found import Found
from engines.kinds import OTHER, Kind
from errors import ModelNotFound
from reasoning import SET, TABLES, Table
from settings import matches


class Where(NamedTuple):
    """Where a model's slots are: several names of one engine's model share them."""

    engine: str  # its url
    weights: str


@dataclass
class Model:
    """A model as people see it.

    id               its public name
    engine_id        the engine's name for it
    aliases          further public names, patterns among them
    others           further names that it has at its engine
    purpose          "chat" or "embedding"
    hidden           it answers to its names, and stands in no list
    system           the system prompt for requests that have none
    sampling         {field: value} for requests that leave the field out
    default          requests that name no model get it
    effort           a key of reasoning.TABLES, where the settings have one
    reasoning_field  a key of reasoning.FIELDS
    context          tokens, or None while the engine has not said
    loaded           an engine serves it right now
    places           {Where: engine.Engine} of each engine that has it, first those that serve
    engine_kind      the kinds.Kind of its engines
    asked            the reasoning.Table that its template turned out to be, or None
    found            found.Found: what its engine has told of it
    batch            the key that asks for it is last in turn
    """

    id: str
    engine_id: str | None = None
    aliases: list = field(default_factory=list)
    others: list = field(default_factory=list)
    purpose: str = "chat"
    hidden: bool = False
    system: str | None = None
    sampling: dict = field(default_factory=dict)
    default: bool = False
    effort: str | None = None
    reasoning_field: str = "both"
    context: int | None = None
    loaded: bool = False
    places: dict = field(default_factory=dict)
    engine_kind: Kind = OTHER
    asked: Table | None = None
    found: Found = field(default_factory=Found, compare=False)
    batch: bool = False

    @property
    def table(self):
        """The reasoning.Table: what its template does with the controls of thinking."""
        if self.effort:
            return TABLES[self.effort]
        return self.asked or TABLES["glm"]

    @property
    def origin(self):
        """How that is known, in words for people."""
        return SET if self.effort else self.table.origin

    @property
    def template(self):
        """What its template is, in words for people."""
        return f"{self.table.about} ({self.origin})"

    @property
    def may_leak(self):
        """Whether it thinks though it shall not, so that its thoughts may stand in its answer."""
        return not self.table.can_turn_off and self.found.opens is not False

    @property
    def lane(self):
        """The name of its queue: all names of it share one."""
        return f"{self.purpose} {self.engine_id}"

    @property
    def engine(self):
        """The first of its engines, one that serves if there is any; or None."""
        return next(iter(self.places.values()), None)

    @property
    def slots(self):
        """How many requests for it run at once, at the engines that serve."""
        return sum(engine.slots for engine in self.places.values() if engine.serves)

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


class Catalogue:
    """From the settings and what the engines list to Models.

    Engines that list a model under the same id, and are of one kind and for one purpose, have it
    together; of others with that id the first one has it, one that serves before one that does not.
    The default model, and the one that the setting `model` names, are the first engine's.

    A group is an engine with those entries of its list that are names of one model.
    """

    def __init__(self, settings, engines):
        self.settings = settings
        self.engines = engines

    def models(self):
        """All Models, loaded or not."""
        engines = sorted(self.engines, key=lambda engine: not engine.serves)
        if self.settings.models:
            groups = [group for engine in engines for group in groups_of(engine)]
            having = by_id(groups)
            picked = [self.pick(entry, groups) for entry in self.settings.models]
            models = [
                self.from_settings(entry, together(group, having))
                for entry, group in zip(self.settings.models, picked, strict=True)
            ]
        else:
            models = self.unconfigured(engines)
        if not any(model.default for model in models):
            for model in self.leading(models)[:1]:
                model.default = True
        return models

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
        ones = [(engine, [entry]) for engine in engines for entry in engine.listed]
        public = self.settings.model
        if not public:
            return self.each_of(ones)
        first = self.engines[0]
        own = groups_of(first)
        others = [group for engine in engines if engine is not first for group in groups_of(engine)]
        found = self.match(public, own or others)
        if own and not found:
            found = only_one([*own, *others]) or own[0]
        named = together(found, by_id(others))
        taken = {where(*group) for group in named}
        rest = [one for one in ones if one[0] is not first and where(*one) not in taken]
        return distinct([self.describe(public, named), *self.each_of(rest)])

    def each_of(self, groups):
        """A Model for each id in groups of one entry."""
        having = by_id(groups)
        return [self.describe(name, together(found[0], having)) for name, found in having.items()]

    def pick(self, entry, groups):
        """The group for a configured model (a ModelEntry), or None. If there is one of each, they
        mean each other without a word."""
        if entry.engine:
            return self.match(entry.engine, groups)
        found = self.match(entry.id, groups)
        if not found and len(self.settings.models) == 1:
            return only_one(groups)
        return found

    @staticmethod
    def match(name, groups):
        """The group that has an entry of that name, ignoring case, or None. That entry stands
        first: other engines may list the model under that name alone."""
        for group in groups:
            for at, entry in enumerate(group[1]):
                if name.lower() == entry["id"].lower():
                    return led_by(at, group)
        return None

    def from_settings(self, entry, groups):
        """The Model of a ModelEntry, with what its engines say of it."""
        model = self.describe(entry.id, groups)
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

    def describe(self, public, groups):
        """A Model from the groups of the engines that have it; without any, one that is not
        there."""
        model = Model(public, reasoning_field=self.settings.reasoning_field)
        if not groups:
            return model
        engine, (first, *more) = groups[0]
        others = [*ids_of(more), posixpath.basename(engine.kind.weights_of(first))]
        contexts = [engine.kind.context_of(entries[0]) for _, entries in groups]
        model.engine_id = first["id"]
        model.others = [name for name in others if name and name != public]
        model.purpose = engine.purpose
        # It may run at any of them: so the least counts of what they can.
        told = [engine.found.get(where(engine, entries).weights) for engine, entries in groups]
        told = [found for found in told if found]
        known = [found for found in told if found.table]
        model.found = min(known or told, key=can_turn_off, default=model.found)
        model.asked = model.found.table
        model.context = min(filter(None, contexts), default=model.found.context)
        model.loaded = any(engine.serves for engine, _ in groups)
        serving = sorted(groups, key=lambda group: not group[0].serves)
        model.places = {where(*group): group[0] for group in serving}
        model.engine_kind = engine.kind
        return model


def can_turn_off(found):
    """Whether thinking can be turned off, of what an engine has told of a model; True where it has
    not told of that."""
    return found.table is None or found.table.can_turn_off


def where(engine, entries):
    """The Where of a group."""
    return Where(engine.url, engine.kind.weights_of(entries[0]))


def by_id(groups):
    """{id: the groups that have an entry of that id}."""
    found = {}
    for group in groups:
        for name in ids_of(group[1]):
            found.setdefault(name, []).append(group)
    return found


def together(group, having):
    """A group, and those of other engines that have the same model: a request that one can serve
    can be served by each. None: no model, so no engines. `having`: see `by_id`."""
    if group is None:
        return []
    engine, (first, *_) = group
    found = {engine: group}
    for other in having.get(first["id"], ()):
        if (other[0].kind, other[0].purpose) == (engine.kind, engine.purpose):
            found.setdefault(other[0], other)
    return list(found.values())


def led_by(at, group):
    """A group in which its entry of that index stands first."""
    engine, entries = group
    return engine, [entries[at], *entries[:at], *entries[at + 1 :]]


def only_one(groups):
    """The group that stands for all of these, where they are one model; or None."""
    having = by_id(groups)
    for at in range(len(groups[0][1]) if groups else 0):
        group = led_by(at, groups[0])
        if len(together(group, having)) == len(groups):
            return group
    return None


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
