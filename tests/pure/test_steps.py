"""JSON in steps: read and written as in one go, whatever the steps cut: of clients as orjson does, of engines as values.loads."""
import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import steps
from steps import Most
from values import dumps, loads

TEXTS = st.text(max_size=8) | st.sampled_from(['q"\\,[{}]:', "é😀", "x" * 90, "\n\t\x01"])
NAMES = TEXTS | st.sampled_from(["choices", "content", "data"])
JSON = st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e18, 1e18) | TEXTS,
                    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=40)
# What stands at some place of a text instead of what was there: nothing, mostly, or too much.
WRONG = [b"", b",", b"]", b"}", b"[", b"{", b'"', b"\\", b"1", b":", b" ", b"\n", b"NaN", b"\xff", b"\\ud800", b"1e999", b"\x01",
         b"\xef\xbb\xbf", b"-", b"01", b"'", b'"a"', b"null"]
ENDLESS = Most(1 << 40, 1 << 40)


SIZES = {name: vars(steps)[name] for name in ("LARGE", "LIGHT", "LONG")}


@pytest.fixture(scope="module", params=[16, 64])
def tiny_steps(request):
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"LARGE": request.param, "LIGHT": request.param, "LONG": 0}.items():
            patch.setattr(steps, name, size)
        yield


@pytest.fixture
def real_steps(monkeypatch):
    for name, size in SIZES.items():
        monkeypatch.setattr(steps, name, size)


def outcome(read, text):
    try:
        return read(text)
    except ValueError:
        return "no JSON"


def plain(text):
    """What a text stands for to an engine's client, to whom NaN and the like are null."""
    return loads(dumps(loads(text)))


def same(text):
    assert outcome(lambda text: steps.read_exactly(text, ENDLESS), text) == outcome(orjson.loads, text), text
    assert outcome(lambda text: plain(steps.joined(steps.read(text))), text) == outcome(plain, text), text


@given(value=JSON, ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_any_json_is_read_and_written(tiny_steps, value, ascii, indent):
    same(json.dumps(value, ensure_ascii=ascii, indent=indent).encode())
    assert b"".join(steps.parts_of(value)) == orjson.dumps(value)


@given(value=JSON, wrong=st.sampled_from(WRONG), more=st.booleans(), data=st.data())
def test_what_is_no_json_is_none(tiny_steps, value, wrong, more, data):
    text = json.dumps(value, ensure_ascii=False).encode()
    at = data.draw(st.integers(0, len(text)))
    same(text[:at] + wrong + text[at + more:])


@pytest.mark.parametrize("text", [
    b"[]", b" [ ] ", b"{}", b"[1,]", b"[,1]", b"[,]", b"[1 2]", b"[1}", b'{"a":1]', b'{"a":1,}', b'{"a"}', b'{"a":}', b"{1:2}", b'{"a":1,"a":2}',
    b'{"b":1,"a":{},"b":[1,2,3,4,5,6,7,8,9]}', b"[" * 20, b"[" * 20 + b"]" * 20, b"]", b"", b" ", b"1", b'"a"', b"[1]]", b"[1] 1", b"\xef\xbb\xbf[]",
    b'["\xff"]', b'["\\ud83d"]', b'["\\ud83d\\ude00"]', b"[1e999]", b"[-]", b"[1.]", b"[nul]", b"[" + b"1" * 300 + b"]"])
def test_texts(tiny_steps, text):
    same(text)


def test_too_deep(tiny_steps):
    with pytest.raises((ValueError, RecursionError)):
        steps.read_exactly(b"[" * 100_000 + b"]" * 100_000, ENDLESS)


def test_whole_numbers_of_the_outermost_object_stay_whole(tiny_steps):
    text = b'{"a":"%b","seed":100000000000000000007}' % (b"x" * 99)
    assert steps.read_exactly(text, ENDLESS)["seed"] == 100_000_000_000_000_000_007


@pytest.mark.parametrize("text, values, holders", [
    (b"[1,2,3,4,5,6,7,8,9,10]", 11, 1), (b'[{"a":1,"b":2},[[]],"a,b:c[d{"]', 9, 4), (b'{"a":"x,y","b":{"c":[]}}', 7, 3)])
def test_values_are_counted(tiny_steps, text, values, holders):
    text += b" " * 64
    steps.read_exactly(text, Most(values + 2, holders + 1))
    with pytest.raises(steps.TooMany, match="names of fields"):
        steps.read_exactly(text, Most(values - 2, 99))
    with pytest.raises(steps.TooMany, match="objects and lists$"):
        steps.read_exactly(text, Most(99, holders - 1))


@given(items=st.lists(JSON, max_size=9))
def test_each_item_goes_through_a_function(tiny_steps, items):
    items.append("y" * 90)                          # only those of a large list
    text = json.dumps({"data": items, "x": {"data": items}, "usage": {"data": [1]}}).encode()
    read = steps.read(text, ("data", lambda item: {"item": item}))
    assert loads(steps.joined(read)) == {"data": [{"item": item} for item in items], "x": {"data": items}, "usage": {"data": [1]}}


def test_what_nobody_looks_into_is_passed_on_and_can_be_read(tiny_steps):
    read = steps.read(b'{"x": {"a": [1, {"b": NaN}], "c": "%b"}, "content": [1]}' % (b"y" * 90))
    assert read["content"] == [1] and read["x"].value() == {"a": [1, {"b": None}], "c": "y" * 90}


def test_values_are_let_go_of_but_for_what_is_held(tiny_steps):
    token = steps.kept.set([])
    text = b'{"a":[[1],[2]],"b":{"c":[]},"d":[{"e":[3]}]}' + b" " * 64
    try:
        with pytest.raises(steps.TooMany):
            steps.read_exactly(text, Most(5, 5))
        assert steps.kept.get().pop().keys() <= {"a", "b"}
        value = steps.read_exactly(text, ENDLESS)
        kept = steps.kept.get()
    finally:
        steps.kept.reset(token)
    assert kept == [value]
    held = value["a"], value["d"][0]["e"]
    steps.let_go(kept)
    assert kept == [] and value == {"a": [[1], [2]], "b": {"c": []}, "d": [{"e": [3]}]}
    steps.let_go(value)
    assert value == {} and held == ([[1], [2]], [3])


# ---- large ones

LOGPROB = {"token": " x", "logprob": -0.5, "bytes": [32, 120]}

@pytest.mark.parametrize("value", [
    {"choices": [{"message": {"content": "é\"\\\n😀" * 40_000, "tool_calls": [{"id": str(at)} for at in range(9000)]}}]},
    {"choices": [{"logprobs": {"content": [LOGPROB] * 5000}}], "usage": {}, "x": list(range(99_999))},
    {"data": [[[[[[{"a": "]}" * 30}]]]]]] * 3000, "": {str(at): None for at in range(20_000)}},
    {"content": "\U0001f600" * 70_000, "error": [[], {}, "", 0, True] * 9999},
])
@pytest.mark.parametrize("pretty", [None, 1])
@pytest.mark.parametrize("ascii", [True, False])
def test_read_and_written_in_steps(real_steps, value, pretty, ascii):
    text = json.dumps(value, indent=pretty, ensure_ascii=ascii).encode()
    assert json.loads(steps.joined(steps.read(text))) == value
    assert json.loads(steps.joined(steps.read(bytearray(b" " * 70_000 + text + b"\n" * 70_000)))) == value


@pytest.mark.parametrize("broken", [
    b"[" + b"1," * 70_000 + b"]", b"[" + b"1," * 70_000 + b"1", b'{"a":"' + b"x" * 70_000, b"[" + b"1," * 70_000 + b"1}",
    b'{"choices":[' + b"{}," * 70_000 + b"{}]}x", b'{"a":' + b"[" * 70_000 + b"]" * 70_000 + b"}", b" " * 70_000, b"",
    b'{"a":"' + b"\\u12" * 20_000 + b'"}', b'{"a" "' + b"x" * 70_000 + b'"}', b"[1" + b" " * 70_000 + b"2]",
    b'{"choices":[' + b"{}," * 400_000 + b"{}]}",
])
def test_what_is_no_json_in_steps(real_steps, broken):
    with pytest.raises((ValueError, RecursionError)):
        steps.read(broken)


def test_what_json_has_not_is_null_in_what_is_passed_on(real_steps):
    """Also bytes that are no UTF-8."""
    read = steps.read(b'{"x":[' + b"1," * 40_000 + b'NaN,"\xff"],"choices":[{"index":0}]}')
    found = json.loads(steps.joined(read))
    assert found["x"][-2:] == [None, "\ufffd"] and len(found["x"]) == 40_002 and read["choices"] == [{"index": 0}]
