"""The hashes of how a request begins: what the turns of a conversation have in common, and nobody else knows."""
import json
import os
import re
from contextlib import contextmanager

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import counting
import steps
from counting import BATCH, BLOCK, Chain, Tally, measure
from dialects import chat, completions, messages
from dialects.engine import written
from dialects.responses import Responses
from front.large_json import LONG, Abridged
from support.cuts import cuts, pieces
from support.dialect_tables import Fleet

KEY = b"k" * 32
SMALL = 64                                          # bytes of a block, where a text is to have many


def hashes_of(parts, key=KEY, name="chat m"):
    return measure(parts, Chain(key, name)).hashes


@contextmanager
def small_blocks():
    """And pieces so small that they end anywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "BLOCK", SMALL)
        patch.setattr(counting, "BATCH", 50)
        yield


def text_of(body):
    """All but the images, said in another way."""
    return re.sub(rb'"url":"data:[^"]*', b"", body)


def image(data):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


TEXTS = st.lists(st.sampled_from([*'ab "\\\né語😀{}[]:,', '"url":"data:', "a" * 70]), max_size=40).map("".join)
PARTS = st.lists(TEXTS.map(lambda text: {"type": "text", "text": text}) | st.text("ABCD", max_size=90).map(image), max_size=4)
MESSAGES = st.lists(st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "assistant"]),
                              TEXTS | PARTS), min_size=1, max_size=5)
OTHERS = st.dictionaries(st.sampled_from(["model", "temperature", "stream", "max_tokens"]), st.integers(0, 99))


@given(MESSAGES, MESSAGES, OTHERS, OTHERS)
def test_growth_keeps_the_prefix(begun, more, others, then):
    former, later = (b"".join(written(body)) for body in ({**others, "messages": begun}, {"messages": begun + more, **then}))
    same = len(os.path.commonprefix([text_of(former), text_of(later)]))
    assert same >= len(text_of(json.dumps({"messages": begun}, separators=(",", ":"), ensure_ascii=False).encode())) - 2
    with small_blocks():
        one, other = hashes_of([former]), hashes_of([later])
    assert len(one) == len(text_of(former)) // SMALL and len(other) == len(text_of(later)) // SMALL
    assert one[:same // SMALL] == other[:same // SMALL] and not {*one[same // SMALL:]} & {*other[same // SMALL:]}


@given(st.binary(min_size=SMALL, max_size=1000).map(lambda data: data.replace(b'"', b".")), st.data())
def test_a_change_changes_its_block_and_all_after(text, data):
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + bytes([(text[at] + 1) % 256 or 1]) + text[at + 1:]
    assume(b'"' not in changed)
    with small_blocks():
        one, other = hashes_of([text]), hashes_of([changed])
    assert len(set(one)) == len(one) == len(other)
    assert [before == after for before, after in zip(one, other, strict=True)] == [block < at // SMALL for block in range(len(one))]


@given(MESSAGES, st.data())
def test_the_pieces_do_not_matter(chat, data):
    body = b"".join(written({"messages": chat}))
    places = data.draw(cuts(body))
    for batch in (50, 1000):
        with small_blocks(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(counting, "BATCH", batch)
            whole, cut = (measure(parts, Chain(KEY, "m")) for parts in ([body], list(map(memoryview, pieces(body, places)))))
        assert (whole.hashes, whole.length.size, whole.images) == (cut.hashes, cut.length.size, cut.images)
        assert (whole.length.size, whole.images) == (len(text_of(body)), len(re.findall(rb'"url":"data:', body)))


@given(MESSAGES, st.text("EFGH", min_size=1, max_size=40_000))
def test_what_an_image_shows_does_not_matter(chat, data):
    with small_blocks():
        one = hashes_of([b"".join(written({"messages": [{"role": "user", "content": [image("ABCD")]}, *chat]}))])
        assert one == hashes_of([b"".join(written({"messages": [{"role": "user", "content": [image(data)]}, *chat]}))])


@pytest.mark.parametrize("dialect", [chat, messages], ids=["chat", "messages"])
@pytest.mark.parametrize("on", ["message", "part", "tool"])
def test_where_a_client_marks_its_cache_does_not_matter(dialect, on):
    """The mark goes along with the end of the conversation; the engines know none."""
    def turn(number, mark):
        turns = [{"role": ("user", "assistant")[at % 2], "content": [{"type": "text", "text": f"{at}" * 6000}]} for at in range(number)]
        tool = {"name": "f", "input_schema": {"type": "object"}} if dialect is messages else {"type": "function", "function": {"name": "f"}}
        marked = {"message": turns[-3], "part": turns[-3]["content"][-1], "tool": tool}[on]
        marked.update({"cache_control": mark} if mark else {})
        return hashes_of(dialect.read(json.dumps({"max_tokens": 9, "tools": [tool], "messages": turns}).encode(), Fleet()).body)

    for mark in ({"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, None):
        former = turn(9, mark)
        assert len(former) >= 3 and turn(11, {"type": "ephemeral"})[:len(former)] == former


PNG = "data:image/png;base64,AAAA"
ANSWERED = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "And so?"}]
ASKED_ABOUT = {                                     # dialect -> (the rest of a body, the name of its list, contents that a user may send)
    chat: ({}, "messages", ["a", '[{"type":"text"}]', "", [{"type": "text", "text": "a"}, "b"], [{"type": "input_text", "text": "a"}],
                            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}],
                            [{"type": "image_url", "image_url": "http://images.example/a.png"}]]),
    messages: ({"max_tokens": 9}, "messages", [
        "a", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], [{"type": "text", "text": "a"}, {"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": "AAAA"}}], [{"type": "image", "source": {"type": "url", "url": "http://images.example/a.png"}}],
        [{"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, {"type": "text", "text": "a"}],
        [{"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "c"}]}, {"type": "text", "text": "a"}]]),
    Responses(lambda: 0, lambda: "00"): ({"instructions": "i"}, "input", [
        "a", [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], [{"type": "input_image", "image_url": PNG}],
        [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "http://images.example/a.png"}]]),
}


@pytest.mark.parametrize("dialect", ASKED_ABOUT, ids=["chat", "messages", "responses"])
def test_what_was_asked_reads_the_same_in_the_history(dialect):
    """Though it is read by other rules then, and an image may be gone."""
    rest, name, contents = ASKED_ABOUT[dialect]
    for content in contents:
        told = []
        for more in ([], ANSWERED):
            ask = dialect.read(json.dumps({**rest, name: [{"role": "user", "content": content}, *more]}).encode(), Fleet())
            told.append(b"".join(ask.filled(dict.fromkeys(ask.images, [PNG.encode()]))))
        asked, = re.findall(rb'"messages":(\[.*)\],"', told[0])
        assert told[1].startswith(b'{"messages":' + asked + b","), content


@pytest.mark.parametrize("fields", [{"cache_salt": "a"}, {"documents": [{"title": f"{at}", "text": "d" * 5000} for at in range(20)]}],
                         ids=["cache_salt", "documents"])
def test_what_else_a_cache_goes_by_stands_first(fields):
    """Documents are a template's, in front of the messages; no salt finds what was cached under another."""
    def turn(number, **fields):
        turns = [{"role": ("user", "assistant")[at % 2], "content": f"{at}" * 6000} for at in range(number)]
        return hashes_of(chat.read(json.dumps({"temperature": number, "messages": turns, **fields}).encode(), Fleet()).body)

    former = turn(9, **fields)
    assert len(former) >= 3 and turn(11, **fields)[:len(former)] == former
    other, = ({name: "b" if name == "cache_salt" else value[1:]} for name, value in fields.items())
    assert not {*former} & {*turn(11, **other)} and not {*former} & {*turn(11)}


def test_nobody_else_has_these_hashes():
    text = [b"x" * 10 * BLOCK]
    found = [hashes_of(text, key, name) for key in (KEY, b"l" * 32) for name in ("chat m", "chat n")]
    assert len({one for hashes in found for one in hashes}) == 40
    assert hashes_of(text) == found[0] and {len(one) for one in found[0]} == {8}


def test_nothing_is_hashed_of_what_is_small(monkeypatch):
    def hashed(*_, **__):
        raise AssertionError

    monkeypatch.setattr(counting, "blake2b", hashed)
    assert hashes_of([b"x" * (BLOCK - 1)]) == () == hashes_of([b"x" * 100] * 160)
    assert hashes_of([b'{"url":"data:image/png;base64,' + b"A" * 10 * BLOCK, b'"}', b"x" * (BLOCK - 30)]) == ()
    assert measure([b"x" * 10 * BLOCK]).hashes == Tally(None, [b"x" * 10 * BLOCK]).hashes == ()        # where nobody wants any
    with pytest.raises(AssertionError):
        hashes_of([b"x" * BLOCK])


# ---- large requests, of which front/large_json.py takes the long strings out

def through(body, dialect=chat):
    """(what goes to the engine of a body that is read as it is, and of the same where it is abridged)"""
    data = json.dumps(body, ensure_ascii=False).encode()
    one = Abridged("0123456789abcdef")
    one.feed(data)
    ask = dialect.read(one.text(), Fleet())
    return dialect.read(data, Fleet()).body, [piece for part in ask.body for piece in one.restore(part)]


LINES = "".join(f"{at}: so \"it\" is\\, é語😀\t\x1b[0m\n" for at in range(1500))            # some escapes, 46 KB
CONVERSATION = [{"role": "user", "content": LINES}, {"role": "user", "content": [image("ABCD" * LONG), {"type": "text", "text": "a" * 9000}]},
                *({"role": "assistant", "content": f"{at}" * 2000} for at in range(20)), {"role": "user", "content": LINES[::-1]}]
ASKED = {
    "chat": (chat, lambda turns: {"messages": turns}),
    "messages": (messages, lambda turns: {"max_tokens": 9, "messages": [
        {**turn, "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": part["image_url"]["url"][22:]}}
                             if "image_url" in part else part for part in turn["content"]]}
        if isinstance(turn["content"], list) else turn for turn in turns]}),
    "responses": (Responses(lambda: 0, lambda: "00"), lambda turns: {"input": [
        {**turn, "content": [{"type": "input_image", "image_url": part["image_url"]["url"]} if "image_url" in part
                             else {"type": "input_text", "text": part["text"]} for part in turn["content"]]}
        if isinstance(turn["content"], list) else turn for turn in turns]}),
    "completions": (completions, lambda turns: {"prompt": "".join(turn["content"] for turn in turns if isinstance(turn["content"], str))}),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_large_request_has_the_hashes_of_a_small_one(name):
    """Its text is the same, and so is that of its next turn."""
    dialect, made = ASKED[name]
    whole, abridged = through(made(CONVERSATION), dialect)
    text = text_of(b"".join(whole))
    found = measure(abridged, Chain(KEY, "m"))
    assert found[1:] == measure(whole, Chain(KEY, "m"))[1:] and found.length.size == len(text)
    assert (found.images, len(found.hashes)) == (int(name != "completions"), len(text) // BLOCK)
    later = measure(through(made([*CONVERSATION, {"role": "user", "content": "And so?"}]), dialect)[1], Chain(KEY, "m"))
    assert later.hashes[:len(found.hashes) - 1] == found.hashes[:-1]


# ---- what it costs

def test_a_large_text_is_hashed_in_steps(monkeypatch):
    """However it lies: others have their turn after each megabyte, or sooner."""
    paused = []
    monkeypatch.setattr(steps, "between", [lambda: paused.append(None)])
    for parts in ([b"x" * 8 * BATCH], [memoryview(b"x" * 4 * BATCH)] * 2, [b"x" * (1 << 17)] * 64):
        paused.clear()
        assert len(hashes_of(parts)) == 8 * BATCH // BLOCK
        assert len(paused) >= 8
