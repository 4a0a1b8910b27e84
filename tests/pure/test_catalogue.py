"""From what several engines list to Models: who has a model together with others."""
from types import SimpleNamespace

from engines.found import Found
from engines.kinds import LLAMA_CPP, VLLM
from engines.models import Catalogue, Where
from reasoning import TABLES
from settings import ModelEntry


class Engine(SimpleNamespace):
    __hash__ = object.__hash__


def engine(url, *entries, kind=VLLM, purpose="chat", serves=True):
    """An engine; an entry is an id, or a dict."""
    listed = [entry if isinstance(entry, dict) else {"id": entry} for entry in entries]
    return Engine(url=url, kind=kind, purpose=purpose, serves=serves, listed=listed, slots=2, found={})


def known(*engines, model=None, tables=()):
    """{id: the urls of its engines} of all models; the default one's id has a star."""
    settings = SimpleNamespace(model=model, models=list(tables), reasoning_field="both")
    models = Catalogue(settings, engines).models()
    return {model.id + "*" * model.default: [one.url for one in model.places.values()] for model in models}


def test_engines_with_one_id_have_it_together():
    assert known(engine("a", "x", "y"), engine("b", "z", "x")) == {"x*": ["a", "b"], "y": ["a"], "z": ["b"]}


def test_those_that_serve_come_first_and_the_default_stays_the_first_ones():
    assert known(engine("a", "x", serves=False), engine("b", "x"), engine("c", "w")) == {"x*": ["b", "a"], "w": ["c"]}


def test_others_of_that_id_stand_in_for_each_other():
    """What one reads as it should another kind of engine would not."""
    assert known(engine("a", "x"), engine("b", "x", kind=LLAMA_CPP), engine("c", "x")) == {"x*": ["a", "c"]}
    assert known(engine("a", "x", serves=False), engine("b", "x", kind=LLAMA_CPP)) == {"x*": ["b"]}
    assert known(engine("a", "x"), engine("b", "x", purpose="embedding")) == {"x*": ["a"]}


def test_what_one_engine_has_told_is_known_of_their_model():
    """Where the first one could not be asked yet."""
    first, second = engine("a", "x"), engine("b", "x")
    first.found, second.found = {"x": Found(context=9)}, {"x": Found(table=TABLES["qwen"])}
    for engines, expected in (((first, second), second), ((first,), first), ((engine("c", "x"), first), first)):
        settings = SimpleNamespace(model=None, models=[], reasoning_field="both")
        model, = Catalogue(settings, engines).models()
        assert model.found is expected.found["x"] and model.table.name == ("qwen" if expected is second else "glm")


def test_one_name_for_all_of_them():
    """The setting `model` means the first engine's; others that have the same model have it with it."""
    assert known(engine("a", "x"), engine("b", "x", "y"), model="glm") == {"glm*": ["a", "b"], "y": ["b"]}
    assert known(engine("a", "x", serves=False), engine("b", "x"), model="glm") == {"glm*": ["b", "a"]}
    assert known(engine("a"), engine("b", "x"), model="glm") == {"glm*": [], "x": ["b"]}


def test_tables():
    glm, small, vectors = ModelEntry("glm", engine="x"), ModelEntry("y"), ModelEntry("vectors", engine="x", kind="embedding")
    engines = engine("a", "x"), engine("b", "Y", "x"), engine("c", "Y")
    assert known(*engines, tables=[glm, small, vectors]) == {"glm*": ["a", "b"], "y": ["b", "c"], "vectors": ["a", "b"]}
    for only in (engines[0], engine("b", "x")), (engines[0], engine("b", "x"), engine("c", "x", serves=False)):
        assert known(*only, tables=[ModelEntry("mine")]) == {"mine*": [one.url for one in only]}    # nobody can mean another
    assert known(*engines, tables=[ModelEntry("mine")]) == {"mine*": []}
    assert known(engine("a"), tables=[ModelEntry("mine")]) == {"mine*": []}


def test_names_of_one_model_share_its_places():
    names = [{"id": name, "root": "/models/glm"} for name in ("first", "second")]
    both = engine("a", *names), engine("b", names[0])
    models = Catalogue(SimpleNamespace(model=None, models=[], reasoning_field="both"), both).models()
    assert [(model.lane, list(model.places)) for model in models] == [
        ("chat first", [Where("a", "/models/glm"), Where("b", "/models/glm")]), ("chat second", [Where("a", "/models/glm")])]


def test_engines_that_share_one_of_a_models_names_have_it_together():
    """Whichever of its names the settings say; and its other names are no further models."""
    first, second = [{"id": name, "root": "/models/glm"} for name in ("first", "second")]
    for one in [second], [second, first]:
        both = engine("a", first, second), engine("b", *one)
        for said in {"model": "SECOND"}, {"model": "glm"}, {"tables": [ModelEntry("second")]}, {"tables": [ModelEntry("mine")]}:
            name = said["model"] if "model" in said else said["tables"][0].id
            assert known(*both, **said) == {f"{name}*": ["a", "b"]}, said
            tables = [ModelEntry("mine", engine="second"), ModelEntry("other")]
            assert known(*both, tables=tables) == {"mine*": ["a", "b"], "other": []}


def test_many_models_are_no_work():
    """Two engines with 1,000 adapters each: not each with each."""
    names = [f"adapter-{n}" for n in range(1000)]
    reads = []

    class Entry(dict):
        def __getitem__(self, name):
            reads.append(name)
            return super().__getitem__(name)

    engines = [engine(url, *(Entry(id=name) for name in names)) for url in "ab"]
    for tables in ((), [ModelEntry(name) for name in names[:5]]):
        found = known(*engines, tables=tables)
        assert set(map(tuple, found.values())) == {("a", "b")}
    assert len(reads) < 100 * len(names)


def test_a_template_that_one_of_its_engines_cannot_turn_off_counts():
    """As while a new version is rolled out under the old name: a switch that it does not have would put its thoughts into answers."""
    glm, fixed = Found(table=TABLES["glm"]), Found(table=TABLES["no-switch"])
    for found in ([glm, fixed], [fixed, glm], [None, fixed], [Found(), fixed]):
        engines = [engine(url, "x") for url in "ab"]
        for one, told in zip(engines, found, strict=True):
            one.found = {"x": told} if told else {}
        model, = Catalogue(SimpleNamespace(model=None, models=[], reasoning_field="both"), engines).models()
        assert model.found is fixed and model.may_leak


def test_a_model_has_the_least_context_and_all_slots_of_its_engines():
    """A request may come to any of them."""
    engines = [engine("a", {"id": "x", "max_model_len": 900}), engine("b", {"id": "x", "max_model_len": 500}), engine("c", "x", serves=False)]
    model, = Catalogue(SimpleNamespace(model=None, models=[], reasoning_field="both"), engines).models()
    assert (model.context, model.slots, model.loaded, model.engine) == (500, 4, True, engines[0])
