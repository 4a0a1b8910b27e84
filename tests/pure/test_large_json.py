"""Large bodies: what is taken out comes back as it was, however the bytes arrive."""
import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dialects import messages
from errors import InvalidRequest
from front import large_json
from front.large_json import HEAD, Skeleton
from support.dialect_tables import Fleet

IMAGE = "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUgAA" * 4000
PIECES = (1, 2, 3, 7, 128, 1 << 20)


def fed(body, size=1 << 20, mark="mark"):
    one = Skeleton(mark)
    for at in range(0, len(body), size):
        one.feed(body[at:at + size])
    return one


@pytest.mark.parametrize("size", PIECES)
def test_an_image_is_taken_out_and_comes_back(size):
    body = json.dumps({"model": "m", "url": IMAGE, "n": [1, {"a": "b"}]}).encode()
    one = fed(body, size)
    value = json.loads(one.text())
    assert value["url"].startswith("data:image/png;base64,") and len(value["url"]) < HEAD + 20
    assert (value["model"], value["n"]) == ("m", [1, {"a": "b"}])
    value["model"] = "other"
    back = json.loads(b"".join(one.restore(json.dumps(value, ensure_ascii=False).encode())))
    assert back == {"model": "other", "url": IMAGE, "n": [1, {"a": "b"}]}


def test_pieces_are_not_copied():
    one = fed(json.dumps({"url": IMAGE}).encode())
    large = max(one.restore(one.text()), key=len)
    assert isinstance(large, memoryview) and large.obj is one.whole


def test_tool_arguments_stay():
    body = json.dumps({"function": {"name": "f", "arguments": json.dumps({"a": "x" * 30_000})}}).encode()
    assert fed(body).text() == body


@pytest.mark.parametrize("text", [
    "\\" * 30_000, '"' * 30_000, "é" * 20_000, "😀" * 10_000, "\n" * 30_000, "a" * 20_000 + "\\", 'a\\"' * 10_000,
    "\u2028" * 10_000, "x" * 16_384, "x" * 16_385])
@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_any_text_comes_back(text, ascii, size):
    body = json.dumps({"a": text, "b": [text, 1]}, ensure_ascii=ascii).encode()
    one = fed(body, size)
    json.loads(one.text())
    assert b"".join(one.restore(one.text())) == body


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("text", ["x" * 20_000, 'say "hi"\n\\ é 🌍 \u2028' * 2000, "\\" * 30_000, '"' * 30_000])
def test_an_object_that_became_a_string_gets_its_texts_back(text, levels):
    one = fed(json.dumps({"input": {"a": text, "b": "c"}}).encode())
    value = json.loads(one.text())
    for _ in range(levels):
        value = {"arguments": json.dumps(value, ensure_ascii=False)}
    back = json.loads(b"".join(one.restore(json.dumps(value, ensure_ascii=False).encode())))
    for _ in range(levels):
        back = json.loads(back["arguments"])
    assert back == {"input": {"a": text, "b": "c"}}


@given(st.recursive(st.text(max_size=200) | st.integers() | st.none(),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=120), inner, max_size=4)),
       st.booleans(), st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_json_comes_back(value, ascii, seed):
    body = json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    before = large_json.LONG, large_json.HEAD, large_json.SHORT
    large_json.LONG, large_json.HEAD, large_json.SHORT = 80, 32, large_json.shorter(80)
    try:
        one, at, chance = Skeleton("m"), 0, random.Random(seed)
        while at < len(body):
            step = chance.choice((1, 2, 5, 40))
            one.feed(body[at:at + step])
            at += step
        text = one.text()
        json.loads(text)
        assert b"".join(one.restore(text)) == body
    finally:
        large_json.LONG, large_json.HEAD, large_json.SHORT = before


@pytest.mark.parametrize("body", [b'{"a":"' + b"x" * 20_000 + b'\xff"}', b'{"a":"' + b"x" * 20_000 + b'\xc3'])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_bad_utf8_is_seen_in_what_is_taken_out(body, size):
    with pytest.raises(InvalidRequest, match="UTF-8"):
        fed(body, size).text()


def test_lone_surrogates_stay_for_the_parser():
    body = b'{"a":"' + b"x" * 20_000 + b'\\ud83d"}'
    assert fed(body).text() == body
    pair = b'{"a":"' + b"x" * 20_000 + b'\\ud83d\\ude00"}'
    assert len(fed(pair).text()) < HEAD + 60


def test_a_text_that_looks_like_a_mark_is_only_a_text():
    body = json.dumps({"a": "\x01other:0\x01", "b": IMAGE}, ensure_ascii=False).encode()
    one = fed(body)
    assert b"".join(one.restore(one.text())) == body


def test_what_is_told_by_its_beginning():
    """A client's billing line goes from a long system prompt too, and no refusal shows a mark."""
    def read(**fields):
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
        one = fed(json.dumps(body).encode(), mark="secret")
        return json.loads(b"".join(one.restore(messages.read(one.text(), Fleet()).body[0])))

    line = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=01234;\n"
    assert read(system=line + "You help. " * 5000)["messages"][0]["content"] == "You help. " * 5000
    with pytest.raises(InvalidRequest) as caught:
        read(system=[{"type": "x" * 20_000, "text": "a"}])
    assert "secret" not in caught.value.message


def test_too_many_values_and_too_much_text():
    with pytest.raises(InvalidRequest, match="objects and lists"):
        fed(b"[" + b"[]," * 1_000_001 + b"1]").text()
    with pytest.raises(InvalidRequest, match="MB beside"):
        fed(b'["' + b'","'.join([b"x" * 16_000] * 2200) + b'"]').text()


@pytest.mark.parametrize("strings", [b'"a",', b'"",', b'"role":"user","content":"Hello there",'])
def test_short_strings_are_passed_over_quickly(strings):
    """Others wait while a piece is looked at, and while the text is gone through for the marks. One by one they cost twenty times that."""
    body = b"[" + strings * ((2 << 20) // len(strings)) + b'"' + b"x" * 20_000 + b'"]'
    text = fed(body).text()

    def took(work):
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    assert min(took(lambda: fed(body)) for _ in range(5)) < 0.1
    one = fed(body)
    assert min(took(lambda: one.restore(text)) for _ in range(5)) < 0.015
    assert b"".join(one.restore(one.text())) == body
