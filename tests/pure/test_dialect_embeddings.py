"""Embeddings as tables: a client's body in, the engine's payload out; an engine's answer in, the client's out."""
import copy
import json
import math
from array import array
from base64 import b64decode, b64encode
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import strategies as st

from dialects import embeddings
from engines.models import Model
from errors import InvalidRequest, ModelNotFound, Refusal, UpstreamError
from support.dialect_tables import JSON, check_refusal, sent

CHAT = Model("glm", "engine/glm")
SMALL = Model("small", "engine/small", purpose="embedding")
HELLO = {"input": "Hello", "model": "small"}


class Fleet:
    """Knows a chat model, which is the default, and perhaps an embedding model."""

    def __init__(self, *models):
        self.loaded = models or (CHAT, SMALL)

    def models(self):
        return self.loaded

    def find(self, name):
        found = next((model for model in self.loaded if name in (None, model.id)), None)
        if not found:
            raise ModelNotFound("there is no such model", "model")
        return found


def read(body, *models):
    return embeddings.read(body if isinstance(body, bytes) else json.dumps(body).encode(), Fleet(*models))


def payload(**fields):
    out = sent(read({**HELLO, **fields}))
    assert out.pop("model") == "engine/small"
    return out


def refused(*models, **fields):
    with pytest.raises(Refusal) as caught:
        read({**HELLO, **fields}, *models)
    return caught.value


# ---- the request

def test_a_plain_ask():
    one = read(HELLO)
    assert (one.path, one.stream, one.model) == ("/v1/embeddings", None, SMALL)
    assert sent(one) == {"model": "engine/small", "input": "Hello", "encoding_format": "float"}


INPUTS = [
    ("a", 1), ("", 1), (["a"], 1), ([""], 1), (["a", ""], 2), ([1, 2], 1), ([[1], [2, 3]], 2), (["x"] * 2048, 2048),
    ("x" * (1 << 20), 1)]


def test_inputs(subtests):
    for given, count in INPUTS:
        with subtests.test(repr(given)[:40]):
            one = read({**HELLO, "input": given})
            assert sent(one)["input"] == given and one.extra["inputs"] == count
    assert sent(read({**HELLO, "input": [[1.0], [2, 3.0]]}))["input"] == [[1], [2, 3]]


NO_INPUTS = [None, [], 1, True, {}, [None], [True], [1.5], [-1], [1, "a"], ["a", 1], [[]], [["a"]],
             [[1], "a"],
             [[1], 2], [[[1]]], [{"text": "a"}]]


def test_inputs_that_are_none(subtests):
    for given in NO_INPUTS:
        with subtests.test(repr(given)):
            check_refusal(refused(input=given), "input", "input")


def test_no_chat_is_embedded():
    """vLLM would take a body with both for a chat, and fetch its images."""
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}]
    check_refusal(refused(messages=messages), "input", "send texts as input")
    assert "messages" not in payload(messages=None)


@pytest.mark.parametrize("form", [None, "float", "base64"])
def test_forms(form):
    """The engine is asked for what the client wants."""
    assert payload(encoding_format=form) == {"input": "Hello", "encoding_format": form or "float"}


def test_forms_that_are_none(subtests):
    for form in ["", "hex", "FLOAT", "x" * 9999, 1, True, [], {}]:
        with subtests.test(repr(form)[:40]):
            error = refused(encoding_format=form)
            check_refusal(error, "encoding_format", "float or base64")
            assert len(error.message) < 200


def test_dimensions_are_the_gateways():
    for given in (3, 3.0):
        one = read({**HELLO, "dimensions": given})
        assert "dimensions" not in sent(one) and type(one.extra["dimensions"]) is int and one.extra["dimensions"] == 3


def test_dimensions_that_are_none(subtests):
    for value in [0, -1, 1.5, 0.0, True, "3", [], {}, 10 ** 30]:
        with subtests.test(repr(value)):
            check_refusal(refused(dimensions=value), "dimensions", "positive whole number")


def test_what_passes():
    assert payload(user="x", truncate_prompt_tokens=5, odd=[None], stream=True, stream_options={}) == {
        "input": "Hello", "encoding_format": "float", "user": "x", "truncate_prompt_tokens": 5, "odd": [None]}


def test_which_model():
    assert read({"input": "a"}).model is SMALL      # not the default, which is for chats
    check_refusal(refused(model="glm"), "model", "glm is a chat model", "use small")
    check_refusal(refused(CHAT, model="glm"), "model", "none is loaded here")
    check_refusal(refused(CHAT, model=None), "model", "none is loaded here")
    hidden = replace(SMALL, hidden=True)
    check_refusal(refused(CHAT, hidden, model="glm"), "model", "none is loaded here")
    assert read(HELLO, CHAT, hidden).model is hidden
    with pytest.raises(ModelNotFound):
        read({**HELLO, "model": "nothing"})
    for name in (5, True, [], {}):
        check_refusal(refused(model=name), "model")


@hypothesis.given(st.fixed_dictionaries({}, optional=dict.fromkeys(["input", "model", "encoding_format", "dimensions", "stream"],
                                                                   JSON)),
                  st.booleans())
def test_any_body_is_sent_on_or_refused(fields, good):
    try:
        one = read({**fields, **(HELLO if good else {})})
    except Refusal as error:
        assert 400 <= error.status < 500 and error.message and json.loads(embeddings.refusal(error))["error"]["message"]
    else:
        sent(one)


# ---- the answer

VECTOR = [0.5, -0.25, 0.75, 0.125]
USAGE = {"prompt_tokens": 3, "total_tokens": 3}


def packed(numbers):
    return b64encode(array("f", numbers).tobytes()).decode()


def answer(*vectors, **more):
    return {"object": "list", "model": "small", "usage": USAGE,
            "data": [{"object": "embedding", "index": n, "embedding": one} for n, one in enumerate(vectors)], **more}


def written(given, **fields):
    data, usage = embeddings.write(copy.deepcopy(given), read({**HELLO, **fields}))
    return json.loads(data), usage


def test_forms_of_an_answer(subtests):
    for given in [VECTOR, packed(VECTOR), [VECTOR]]:
        for form, expected in [("float", VECTOR), ("base64", packed(VECTOR))]:
            with subtests.test(form, given=given):
                assert written(answer(given), encoding_format=form) == (answer(expected), USAGE)


def test_what_is_right_is_not_touched():
    numbers = [0.1, 1e-30, -0.0, 1]                 # not cut to 32 bits
    assert written(answer(numbers, VECTOR, odd=1), input=["a", "b"])[0] == answer(numbers, VECTOR, odd=1)


def length(numbers):
    return math.sqrt(sum(number * number for number in numbers))


def test_dimensions_of_an_answer(subtests):
    for given in [VECTOR, packed(VECTOR)]:
        for form in embeddings.FORMATS:
            for dimensions in [1, 2, 3, 4]:
                with subtests.test(form, given=given, dimensions=dimensions):
                    found = written(answer(given), encoding_format=form, dimensions=dimensions)[0]["data"][0]["embedding"]
                    numbers = array("f", b64decode(found)).tolist() if form == "base64" else found
                    part = VECTOR[:dimensions]
                    assert numbers == pytest.approx([number / length(part) for number in part]) and length(numbers) == pytest.approx(1)


def test_nothing_has_no_length():
    assert written(answer([0.0, 0.0, 1.0]), dimensions=2)[0]["data"][0]["embedding"] == [0, 0]


def test_more_dimensions_than_there_are():
    with pytest.raises(InvalidRequest) as caught:
        written(answer(VECTOR), dimensions=5)
    check_refusal(caught.value, "dimensions", "at most 4")


def test_the_model_has_its_public_name():
    assert written({**answer(VECTOR), "model": "/srv/small.gguf"})[0]["model"] == "small"


def test_usage():
    assert written(answer(VECTOR, usage=None))[0]["usage"] == {"prompt_tokens": 0, "total_tokens": 0}
    assert written(answer(VECTOR, usage="x"))[1] is None


UNREADABLE = [
    {}, {"data": None}, {"data": []}, {"data": "x"}, answer(VECTOR, VECTOR), answer(None), answer(""), answer([]), answer({}),
    answer(5),
    {"data": [None]}, {"data": ["x"]}, {"data": [{}]}, b"data: {}\n\n",
]


def test_answers_that_cannot_be_read(subtests):
    for given in UNREADABLE:
        with subtests.test(str(given)[:80]), pytest.raises(UpstreamError):
            written(given)


NO_VECTORS = ["!", "abc", "ü", ["a"], [None], [[1], 2], [[1], [2]], [{}], [10 ** 400], [1e39],
              [math.nan, 1.0], [math.inf, -math.inf]]


def test_vectors_that_cannot_be_read(subtests):
    for form in embeddings.FORMATS:
        for vector in NO_VECTORS:
            with subtests.test(str(vector)[:80], form=form), pytest.raises(UpstreamError):
                written(answer(vector), encoding_format=form)


@pytest.mark.parametrize("text", ["AAAA", packed([math.nan])])
def test_other_numbers_in_base64(text):
    """They pass as they are, and are no 32-bit floats to make anything of."""
    assert written(answer(text), encoding_format="base64")[0] == answer(text)
    for fields in ({}, {"encoding_format": "base64", "dimensions": 1}):
        with pytest.raises(UpstreamError):
            written(answer(text), **fields)


def test_an_input_that_is_too_long():
    error = json.loads(embeddings.refusal(InvalidRequest("too long", "messages", code="context_length_exceeded")))["error"]
    assert error["param"] == "input"
