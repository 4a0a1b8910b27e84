"""Large bodies: what is taken out comes back as it was, however the bytes arrive."""
import json
import time
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialects import messages
from errors import InvalidRequest
from front import large_json
from front.large_json import HEAD, LONG, Abridged
from support.cuts import cuts, however_cut, pieces
from support.dialect_tables import Fleet

IMAGE = "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUgAA" * 4000


def fed(*arrived, mark="mark"):
    """A body that arrives in these pieces."""
    one = Abridged(mark)
    for data in arrived:
        one.feed(data)
    return one


def there_and_back(arrived):
    """(what is left of a body, the body again)."""
    one = fed(*arrived)
    text = one.text()
    json.loads(text)
    return text, b"".join(one.restore(text))


@contextmanager
def short_is_long():
    """Strings of 81 bytes are taken out, so that every place of a body can be cut."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LONG": 80, "HEAD": 32, "SHORT": large_json.shorter(80)}.items():
            patch.setattr(large_json, name, value)
        yield


def test_an_image_is_taken_out_and_comes_back():
    body = json.dumps({"model": "m", "url": IMAGE, "n": [1, {"a": "b"}]}).encode()
    text, back = however_cut(body, there_and_back)
    value = json.loads(text)
    assert value["url"].startswith("data:image/png;base64,") and len(value["url"]) < HEAD + 20
    assert (value["model"], value["n"]) == ("m", [1, {"a": "b"}]) and back == body
    value["model"] = "other"
    back = json.loads(b"".join(fed(body).restore(json.dumps(value, ensure_ascii=False).encode())))
    assert back == {"model": "other", "url": IMAGE, "n": [1, {"a": "b"}]}


def test_pieces_are_not_copied():
    one = fed(json.dumps({"url": IMAGE}).encode())
    large = max(one.restore(one.text()), key=len)
    assert isinstance(large, memoryview) and large.obj is one.whole


def test_tool_arguments_stay():
    body = json.dumps({"function": {"name": "f", "arguments": json.dumps({"a": "x" * 30_000})}}).encode()
    assert fed(body).text() == body


def bodies(long):
    """Bodies whose texts are just as long as that, one longer, or hard to cut."""
    for text in ("\\" * 2 * long, '"' * 2 * long, "é" * long, "😀" * long, "\n" * 2 * long, "a" * long + "\\", 'a\\"' * long,
                 "\u2028" * long, "x" * long, "x" * (long + 1)):
        for ascii in (True, False):
            yield json.dumps({"a": text, "b": [text, 1]}, ensure_ascii=ascii).encode()


def test_any_text_comes_back(subtests):
    for body in bodies(LONG):
        with subtests.test(str(body[:20])):
            text, back = there_and_back([body])
            assert back == body and there_and_back(pieces(body, range(7, len(body), 7))) == (text, body)


def test_any_text_comes_back_however_it_is_cut(subtests):
    with short_is_long():
        for body in bodies(80):
            with subtests.test(str(body[:20])):
                assert however_cut(body, there_and_back)[1] == body


TEXTS = ["x" * 20_000, 'say "hi"\n\\ é 🌍 \u2028' * 2000, "\\" * 30_000, '"' * 30_000]


def test_an_object_that_became_a_string_gets_its_texts_back(subtests):
    for levels in [1, 2, 3]:
        for text in TEXTS:
            with subtests.test(text[:20], levels=levels):
                one = fed(json.dumps({"input": {"a": text, "b": "c"}}).encode())
                value = json.loads(one.text())
                for _ in range(levels):
                    value = {"arguments": json.dumps(value, ensure_ascii=False)}
                back = json.loads(b"".join(one.restore(json.dumps(value, ensure_ascii=False).encode())))
                for _ in range(levels):
                    back = json.loads(back["arguments"])
                assert back == {"input": {"a": text, "b": "c"}}


LONG_TEXTS = st.builds(lambda unit, count: unit * count, st.text(max_size=4), st.integers(20, 90))


@given(st.recursive(st.text(max_size=20) | LONG_TEXTS | st.integers() | st.none(),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=120), inner, max_size=4)),
       st.booleans(), st.data())
def test_any_json_comes_back(value, ascii, data):
    body = json.dumps(value, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    with short_is_long():
        text, back = there_and_back(pieces(body, data.draw(cuts(body))))
        assert back == body and text == fed(body).text()


@pytest.mark.parametrize("end", [b'\xff"}', b'\xc3', b'\xc3x\xa9"}'])
def test_bad_utf8_is_seen_in_what_is_taken_out(end):
    def refused(arrived):
        with pytest.raises(InvalidRequest, match="UTF-8"):
            fed(*arrived).text()

    however_cut(b'{"a":"' + b"x" * 20_000 + end, refused)


def test_lone_surrogates_are_no_text():
    with pytest.raises(InvalidRequest, match="escape"):
        fed(b'{"a":"' + b"x" * 20_000 + b'\\ud83d"}' + b" " * 9).text()
    body = b'{"a":"' + b"x" * 20_000 + b'\\ud83d"}'  # more may come
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
    with pytest.raises(InvalidRequest, match="600,000 texts"):
        fed(b"[" + b'"\\n",' * 600_001)
    with pytest.raises(InvalidRequest, match="MB beside"):
        fed(b'["' + b'","'.join([b"x" * 16_000] * 2200) + b'"]').text()


@pytest.mark.parametrize("strings", [b'"a",', b'"",', b'"role":"user","content":"Hello there",'])
def test_short_strings_are_passed_over_quickly(strings):
    """Others wait while a piece is looked at, and while the text is gone through for the marks. One by one they cost twenty times that."""
    body = b"[" + strings * ((1 << 20) // len(strings)) + b'"' + b"x" * 20_000 + b'"]'
    text = fed(body).text()

    def took(work):
        began = time.process_time()
        work()
        return time.process_time() - began

    assert min(took(lambda: fed(body)) for _ in range(5)) < 0.3
    one = fed(body)
    assert min(took(lambda: one.restore(text)) for _ in range(5)) < 0.05
    assert b"".join(one.restore(one.text())) == body
