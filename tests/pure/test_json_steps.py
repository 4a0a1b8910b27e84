"""JSON in steps: read and written as orjson does it in one go, whatever the steps cut."""
import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import json_steps
from json_steps import Most

TEXTS = st.text(max_size=8) | st.sampled_from(['q"\\,[{}]:', "é😀", "x" * 90, "\n\t\x01"])
JSON = st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e18, 1e18) | TEXTS,
                    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=40)
# What stands at some place of a text instead of what was there: nothing, mostly, or too much.
WRONG = [b"", b",", b"]", b"}", b"[", b"{", b'"', b"\\", b"1", b":", b" ", b"\n", b"NaN", b"\xff", b"\\ud800", b"1e999", b"\x01",
         b"\xef\xbb\xbf", b"-", b"01", b"'", b'"a"', b"null"]
ENDLESS = Most(1 << 40, 1 << 40)


@pytest.fixture(scope="module", autouse=True, params=[8, 64])
def tiny_steps(request):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("STEP", "LIGHT"):
            patch.setattr(json_steps, name, request.param)
        patch.setattr(json_steps, "SHORT", 0)
        patch.setattr(json_steps, "LONG", 0)
        yield


def outcome(read, text):
    try:
        return read(text)
    except ValueError:
        return "no JSON"


def same(text):
    assert outcome(lambda text: json_steps.loads(text, ENDLESS), text) == outcome(orjson.loads, text), text


@given(JSON, st.booleans(), st.sampled_from([None, 1]))
def test_any_json_is_read_and_written(value, ascii, indent):
    same(json.dumps(value, ensure_ascii=ascii, indent=indent).encode())
    assert b"".join(json_steps.dumps_in_steps(value)) == orjson.dumps(value)


@given(JSON, st.sampled_from(WRONG), st.booleans(), st.data())
def test_what_is_no_json_is_none(value, wrong, more, data):
    text = json.dumps(value, ensure_ascii=False).encode()
    at = data.draw(st.integers(0, len(text)))
    same(text[:at] + wrong + text[at + more:])


@pytest.mark.parametrize("text", [
    b"[]", b" [ ] ", b"{}", b"[1,]", b"[,1]", b"[,]", b"[1 2]", b"[1}", b'{"a":1]', b'{"a":1,}', b'{"a"}', b'{"a":}', b"{1:2}", b'{"a":1,"a":2}',
    b'{"b":1,"a":{},"b":[1,2,3,4,5,6,7,8,9]}', b"[" * 20, b"[" * 20 + b"]" * 20, b"]", b"", b" ", b"1", b'"a"', b"[1]]", b"[1] 1", b"\xef\xbb\xbf[]",
    b'["\xff"]', b'["\\ud83d"]', b'["\\ud83d\\ude00"]', b"[1e999]", b"[-]", b"[1.]", b"[nul]", b"[" + b"1" * 300 + b"]"])
def test_texts(text):
    same(text)


def test_too_deep():
    with pytest.raises((ValueError, RecursionError)):
        json_steps.loads(b"[" * 100_000 + b"]" * 100_000, ENDLESS)


def test_whole_numbers_of_the_outermost_object_stay_whole():
    text = b'{"a":"%b","seed":100000000000000000007}' % (b"x" * 99)
    assert json_steps.loads(text, ENDLESS)["seed"] == 100_000_000_000_000_000_007


@pytest.mark.parametrize("text, values, holders", [
    (b"[1,2,3,4,5,6,7,8,9,10]", 11, 1), (b'[{"a":1,"b":2},[[]],"a,b:c[d{"]', 9, 4), (b'{"a":"x,y","b":{"c":[]}}', 7, 3)])
def test_values_are_counted(text, values, holders):
    json_steps.loads(text, Most(values + 2, holders + 1))
    with pytest.raises(json_steps.TooMany, match="names of fields"):
        json_steps.loads(text, Most(values - 2, 99))
    with pytest.raises(json_steps.TooMany, match="objects and lists$"):
        json_steps.loads(text, Most(99, holders - 1))


def test_values_are_let_go_of_in_pieces():
    token = json_steps.kept.set([])
    try:
        value = json_steps.loads(b'{"a":[[1],[2]],"b":{"c":[]}}', ENDLESS)
        kept = json_steps.kept.get()
    finally:
        json_steps.kept.reset(token)
    assert kept == [value]
    json_steps.let_go(kept)
    assert kept == [] and value == {"a": [[1], [2]], "b": {"c": []}}
