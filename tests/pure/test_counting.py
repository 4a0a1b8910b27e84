"""What a request has used: the engine's figures where they can be, and estimates that learn from them."""
import json
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counting import (
    IMAGE_TOKENS,
    MOST_TOKENS,
    Length,
    Meter,
    Tally,
    Yardstick,
    length_of,
    length_of_answer,
    measure,
    token_count,
)
from dialects.messages.events import MessageStream
from dialects.responses.events import Options, ResponseStream
from stream import ChatStream, CompletionStream
from support.engine import chat_chunks, chunk, completion, sse, text_chunks, text_completion

PROMPT = [b"x" * 400]                               # 100 tokens as long as nothing is known
USAGE = {"prompt_tokens": 15, "completion_tokens": 9, "total_tokens": 24, "prompt_tokens_details": {"cached_tokens": 8},
         "completion_tokens_details": {"reasoning_tokens": 4}}


def stream(tokens=7, thoughts=3, ends=0, usage=None, at_usage=None):
    """What of a stream counts; its usage has come after all, unless `at_usage` says otherwise."""
    at_usage = tokens if at_usage is None else at_usage
    return SimpleNamespace(tokens=tokens, thoughts=thoughts, ends=ends, usage=usage, tokens_at_usage=at_usage)


def figures(prompt, completion, counted=None, cached=None, reasoning=None):
    found = {"prompt_tokens": prompt, "completion_tokens": completion, "counted": counted, "cached_tokens": cached,
             "reasoning_tokens": reasoning}
    return {name: value for name, value in found.items() if value is not None}


# ---- whose figures

WHOLE = stream(ends=1)
OWN = figures(100, 7, "gateway", reasoning=3)


@pytest.mark.parametrize("usage, one, found", [
    (USAGE, WHOLE, figures(15, 9, cached=8, reasoning=4)),
    (USAGE, None, figures(15, 9, cached=8, reasoning=4)),
    ({"prompt_tokens": 15, "completion_tokens": 9}, WHOLE, figures(15, 9)),
    ({"prompt_tokens": 15, "completion_tokens": 0}, stream(tokens=1, ends=1), figures(15, 0)),
    ({"prompt_tokens": 15, "completion_tokens": 9, "prompt_tokens_details": None, "completion_tokens_details": [4]}, None,
     figures(15, 9)),
    (None, WHOLE, OWN), ("15", WHOLE, OWN), ({}, WHOLE, OWN), ([15], WHOLE, OWN),
    ({"prompt_tokens": "15", "completion_tokens": -1}, WHOLE, OWN),
    ({"prompt_tokens": True, "completion_tokens": 1.5}, WHOLE, OWN),
    ({"prompt_tokens": 1 << 62, "completion_tokens": 10 ** 30}, WHOLE, OWN),
    ({"prompt_tokens": 0, "completion_tokens": 0}, WHOLE, OWN),                         # while they don't know
    ({"prompt_tokens": 15}, WHOLE, figures(15, 7, "gateway", reasoning=3)),
    ({"completion_tokens": 9}, WHOLE, figures(100, 9, "gateway")),
    (None, stream(tokens=0, thoughts=0), figures(100, 0, "gateway", reasoning=0)),      # it left in the prefill
    (None, None, figures(100, 0, "gateway")),
])
def test_figures(usage, one, found):
    if one:
        one = SimpleNamespace(**{**vars(one), "usage": usage})
    assert Tally(Meter(), PROMPT).figures(usage, one) == found


def test_an_engine_that_tells_all_along():
    """What has come since is added; once nothing has, its figures are exact."""
    usage = {"prompt_tokens": 15, "completion_tokens": 20}
    tally = Tally(Meter(), PROMPT)
    assert tally.figures(usage, stream(5, 0, usage=usage, at_usage=5)) == figures(15, 20)
    assert tally.figures(usage, stream(8, 0, usage=usage, at_usage=5)) == figures(15, 23, "gateway", reasoning=0)
    assert tally.figures(usage, stream(9, 0, 1, usage=usage, at_usage=9)) == figures(15, 20)


def test_the_prompt_that_the_engine_has_counted():
    tally = Tally(Meter(), PROMPT)
    tally.counted = 42
    assert tally.figures(None, stream()) == figures(42, 7, "gateway", reasoning=3)


def test_an_answer_without_tokens():
    """Embeddings have none, and no engine says so."""
    assert Tally(Meter(), PROMPT, most=0).figures({"prompt_tokens": 3, "total_tokens": 3}) == figures(3, None)
    assert Tally(Meter(), PROMPT, most=0).figures(None, worked=60_000) == figures(100, 0, "gateway")


def test_a_plain_answer_that_nobody_waited_for():
    """By the time that it took; never more than it could have been."""
    tally = Tally(Meter(), PROMPT)
    assert tally.figures(None, worked=5000)["completion_tokens"] == 100                 # 20 a second
    tally.learn({"prompt_tokens": 100, "completion_tokens": 500}, None, 10_000)
    assert tally.figures(None, worked=5000)["completion_tokens"] == 250
    for limits in ({"most": 60}, {"context": 60}):
        assert Tally(tally.meter, PROMPT, **limits).figures(None, worked=5000)["completion_tokens"] == 60


# ---- what is learned

@pytest.mark.parametrize("events", [10, 100])
@pytest.mark.parametrize("each", [1, 2, 4, 7.5])
def test_events_of_several_tokens(events, each):
    """Also where a stream breaks off in the middle."""
    meter = Meter()
    Tally(meter, PROMPT).learn({"prompt_tokens": 100, "completion_tokens": round(events * each) + 1}, stream(events + 1, 0, 1), 1)
    half = Tally(meter, PROMPT).figures(None, stream(events // 2, 0))
    assert half["completion_tokens"] == pytest.approx(events * each / 2, rel=0.05, abs=1)


def test_prompts_of_all_lengths():
    """With a template that adds 150 tokens, and 3.3 bytes a token."""
    meter, chance = Meter(), random.Random(1)
    for n in range(60):
        size = round(10 ** chance.uniform(2, 5.5))
        truth = 150 + size / 3.3
        tally = Tally(meter, [b"x" * size])
        if n > 20:
            assert tally.prompt() == pytest.approx(truth, rel=0.25)
        tally.learn({"prompt_tokens": round(truth), "completion_tokens": 5}, stream(), 1)


def test_a_slip_of_the_engine_is_nothing():
    meter = Meter()
    for tokens in (100, 100, 800_000, 100, 1):
        Tally(meter, PROMPT).learn({"prompt_tokens": tokens, "completion_tokens": tokens}, stream(11, 0, 1), 1)
    assert Tally(meter, PROMPT).figures(None, stream(10, 0)) == figures(100, 99, "gateway", reasoning=0)


@pytest.mark.parametrize("figure", [0, -5, None, True, "7", 1.5, [7], 1 << 62, 10 ** 30, 100_001])
def test_figures_that_cannot_be_teach_nothing(figure):
    """The last one is beyond the model's context."""
    meter = Meter()
    tally = Tally(meter, PROMPT, context=100_000)
    tally.learn({"prompt_tokens": figure, "completion_tokens": figure}, stream(11, 0, 1), 1000)
    tally.learn(figure, None, 1000)
    assert tally.figures(None, stream(10, 0)) == figures(100, 10, "gateway", reasoning=0)
    assert not meter.answers and not any(yardstick.seen for yardstick in vars(meter).values() if yardstick is not meter.answers)


@given(st.lists(st.tuples(st.integers(-5, 1 << 41), st.integers(-5, MOST_TOKENS))), st.integers(-1, 1 << 41))
def test_a_yardstick_takes_whatever_comes(pairs, size):
    one = Yardstick((Length(4), 1), (0.2, 1))
    for known, tokens in pairs:
        one.learn(Length(known), tokens)
    assert len(one.seen) <= 64
    tokens = one.estimate(Length(size))
    assert type(tokens) is int and 0 <= tokens <= MOST_TOKENS + max(size, 0) and bool(tokens) == (size > 0)


def test_a_prompt_is_never_longer_than_the_context():
    assert Tally(Meter(), [b"x" * 1_000_000], context=5000).prompt() == 5000


def test_texts_of_another_kind_count_less():
    """A model of which Chinese, numbers and English were seen, all of one length."""
    meter, kinds = Meter(), {"早上好，今天天气很好。" * 30: 300, "3141592653" * 99: 990, "All the king's horses. " * 43: 240}
    for _ in range(5):
        for text, tokens in kinds.items():
            Tally(meter, [text.encode()]).learn({"prompt_tokens": tokens, "completion_tokens": 1}, None, 1)
    for text, tokens in kinds.items():
        assert Tally(meter, [text[:-22].encode()]).prompt() == pytest.approx(tokens, rel=0.1)


# ---- lengths

IMAGE = b'{"type":"image_url","image_url":{"url":"data:image/png;base64,%b"}}'


@pytest.mark.parametrize("data", [b"AAAA", b"A" * 5_000])
def test_images_are_no_text(data):
    whole = b'{"a":"words",' + IMAGE % data + b"," + IMAGE % data + b"}"
    without = whole.replace(b'"url":"data:image/png;base64,' + data, b"")
    assert measure([whole]) == (length_of(without), 2, ())
    for cut in range(0, len(whole), max(1, len(whole) // 60)):              # a body may lie in pieces
        assert measure([whole[:cut], memoryview(whole)[cut:]]) == (length_of(without), 2, ())


@pytest.mark.parametrize("size", [20_000, 3_900_000, 5_000_000])
@pytest.mark.parametrize("kept", [0, 1000])
def test_images_in_parts_of_their_own_are_no_text(size, kept):
    """As they are put in: all of one that was fetched, or what was cut out of one. They are not gone over."""
    long, data = b"words " * 9000, b"data:image/png;base64," + b"A" * size
    first = b'{"a":"words","image_url":{"url":"' + data[:kept]
    rest = [data[at:at + (1 << 20)] for at in range(kept, len(data), 1 << 20)]
    body = [first, memoryview(data)[kept:], b'"},', long, b',"image_url":{"url":"' + data[:kept], *rest, b'"}']
    assert measure(body) == (length_of(b"".join(body).replace(b'"url":"' + data, b"")), 2, ())


def test_a_large_image_is_not_looked_at():
    length, images, _ = measure([b'{"url":"', b"data:image/png;base64," + b"A" * (9 << 20), b'","text":"words"}'])
    assert images == 1 and length.size < 40
    assert Tally(Meter(), [b'{"url":"data:image/png;base64,AAAA"}']).prompt() == IMAGE_TOKENS + 1


def test_a_large_text_is_a_text_in_all_its_length():
    """Also behind an image: tokens of white space are so long that even this would be a prompt."""
    body = [b'{"image_url":{"url":"data:image/png;base64,AAAA', b"A" * 20_000, b'"}},"text":"' + b"a" * 20_000, b" " * (5 << 20), b'"}']
    length, images, _ = measure(body)
    assert images == 1 and length.size == sum(map(len, body)) - 20_000 - len(b'"url":"data:image/png;base64,AAAA')


def test_a_text_that_tells_of_an_image_is_a_text():
    body = json.dumps({"content": json.dumps({"url": "data:image/png;AAAA"})}, separators=(",", ":")).encode()
    assert measure([body]) == (length_of(body), 0, ())


def test_length_of_an_answer():
    answer = completion("Hello", reasoning="Let me", tools=[("f", {"a": "b"})])
    assert length_of_answer(answer).size == len('HelloLet me{"a":"b"}')
    assert length_of_answer(text_completion("ab", "cd")).size == 4
    for odd in ({}, {"choices": None}, {"choices": [None, {"message": 5}, {"message": {"content": ["a"], "tool_calls": [1]}}]}):
        assert length_of_answer(odd).size == 0


@pytest.mark.parametrize("usage, found", [({"n": 5}, 5), ({"n": 0}, 0), ({"n": True}, None), (None, None), ([], None), ({}, None)])
def test_token_count(usage, found):
    assert token_count(usage, "n") == found


# ---- what a stream counts

STREAMS = {"chat": ChatStream, "messages": lambda: MessageStream("m", True), "responses": lambda: ResponseStream("0", Options(lambda: 0))}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_what_a_stream_counts(make):
    """Texts by events; the arguments of a call by their length, since some engines give them at once."""
    one = make()
    one.feed(b"".join(chat_chunks("Hello there", reasoning="Let me think", done=False)[:-1]))
    assert (one.tokens, one.thoughts, one.ends, one.closing) == (5, 3, 0, False)
    one = make()
    one.feed(b"".join(chat_chunks(None, tools=[("f", ['{"text": "' + "words " * 100, '"}'])], done=False)))
    assert 150 < one.tokens < 160 and (one.ends, one.closing, one.over) == (1, True, False)


def test_usage_counts_the_chunk_that_it_comes_with():
    one, said = ChatStream(), chunk({"content": "a"})
    one.feed(sse(said))
    one.feed(sse({**said, "usage": {"completion_tokens": 2}}))
    assert one.tokens == one.tokens_at_usage == 2
    one.feed(sse(said))
    assert (one.tokens, one.tokens_at_usage) == (3, 2)


def test_all_choices_close_a_stream():
    events = text_chunks("a", "b", done=False)
    for n, closed in ((2, True), (3, False), (None, False)):
        one = CompletionStream(n=n)
        one.feed(b"".join(events))
        assert (one.closing, one.ends) == (closed, 2)
