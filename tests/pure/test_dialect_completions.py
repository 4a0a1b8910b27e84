"""Text completions as tables: a client's body in, the engine's payload out; an engine's answer in, the client's out."""
import copy
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from dialects import completions
from errors import Refusal, UpstreamError
from stream import DONE, CompletionStream
from support.cuts import cuts, however_cut, pieces
from support.dialect_tables import JSON, Fleet, check_refusal, sent
from support.engine import sse

PROMPT = {"prompt": "Once upon a time"}


def read(body, **model):
    return completions.read(body if isinstance(body, bytes) else json.dumps(body).encode(), Fleet(**model))


def payload(**fields):
    model = fields.pop("model_is", {})
    out = sent(read({**PROMPT, **fields}, **model))
    assert out.pop("model") == "engine/model"
    return out


def refused(**fields):
    with pytest.raises(Refusal) as caught:
        read(fields, **fields.pop("model_is", {}))
    return caught.value


# ---- the request

def test_a_plain_ask():
    one = read(PROMPT)
    assert (one.path, one.stream) == ("/v1/completions", None)
    assert sent(one) == {"model": "engine/model", "max_tokens": 16, **PROMPT}


def test_prompts():
    """Several of them, and tokens: the engine decides."""
    prompts = ["a", "", ["a"], [""], ["a", "b"], [1, 2, 3], [0], [[1, 2], [3]], ["a", [1]]]
    assert [payload(prompt=prompt) for prompt in prompts] == [
        {"prompt": prompt, "max_tokens": 16} for prompt in prompts]
    for floats, prompt in (([1.0, 2], [1, 2]), ([[1.0], [2, 3.0]], [[1], [2, 3]])):
        assert payload(prompt=floats)["prompt"] == prompt
    assert payload(prompt=None, prompt_embeds="x") == {"prompt": None, "prompt_embeds": "x", "max_tokens": 16}


NO_PROMPTS = [None, [], 1, True, {}, [None], [True], [1.5], [-1], [1, "a"], [[]], ["a", []], [["a"]],
              [[[1]]], [[1], 2], [2 ** 31], [{"a": 1}]]


def test_prompts_that_are_none(subtests):
    for prompt in NO_PROMPTS:
        with subtests.test(repr(prompt)):
            check_refusal(refused(prompt=prompt), "prompt", "prompt")
            check_refusal(refused(), "prompt", "missing")


def test_what_passes():
    fields = {"n": 2, "echo": True, "logprobs": 3, "suffix": "end", "stop": ["a"], "seed": 1, "temperature": 0.1, "top_p": 0.5,
              "top_k": 3, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"1": 2}, "best_of": 1,
              "user": "x", "odd": {"deep": [None]}, "prompt_cache_key": "k", "reasoning_effort": "low"}
    assert payload(**fields) == {**PROMPT, "max_tokens": 16, **fields}


LENGTHS = [
    ({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 5}, 5), ({"max_completion_tokens": 7}, 7),
    ({"max_tokens": 5, "max_completion_tokens": 7}, 7), ({"max_tokens": 0, "echo": True}, 0)]


def test_max_tokens(subtests):
    for given, wanted in LENGTHS:
        with subtests.test(str(given)):
            assert payload(**given)["max_tokens"] == wanted
            assert payload(**given, model_is={"sampling": {"max_tokens": 900}})["max_tokens"] == wanted


def test_max_tokens_that_are_none(subtests):
    for value in [0, -1, 1.5, True, "5", [], {}, 10 ** 30]:
        with subtests.test(repr(value)):
            check_refusal(refused(**PROMPT, max_tokens=value), "max_tokens", "whole number")


def test_sampling_of_the_model():
    assert payload(temperature=0, model_is={"sampling": {"temperature": 0.6, "top_p": 0.9}, "system": "Be brief."}) == {
        **PROMPT, "max_tokens": 16, "temperature": 0, "top_p": 0.9}
    assert payload(repeat_penalty=1.1) == {**PROMPT, "max_tokens": 16, "repeat_penalty": 1.1, "repetition_penalty": 1.1}


WRONG = [
    ("stream", "yes"), ("stream", 1), ("stream_options", []), ("model", 5), ("model", ["a"]), ("response_format", "json")]


def test_wrong_types(subtests):
    for field, value in WRONG:
        with subtests.test(field, value=value):
            check_refusal(refused(**PROMPT, **{field: value}), field)


def test_stream_options_without_a_stream():
    check_refusal(refused(**PROMPT, stream_options={"include_usage": True}), "stream_options", "stream: true")


def test_a_stream_is_asked_for_its_usage():
    one = read({**PROMPT, "stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert sent(one)["stream_options"] == {"continuous_usage_stats": True, "include_usage": True}
    assert isinstance(one.stream, CompletionStream) and not one.stream.wants_usage
    assert read({**PROMPT, "stream": True, "stream_options": {"include_usage": True}}).stream.wants_usage


COUNTS = [("a", None, 1), (["a"], 1, 1), (["a", "b"], 3, 6), ([1, 2], 2, 2),
          ([[1], [2]], None, 2), ("a", "two", None), ("a", 0, None)]


def test_how_many_choices_a_stream_has(subtests):
    for prompt, n, count in COUNTS:
        with subtests.test(str(prompt), n=n):
            assert read({"prompt": prompt, "n": n, "stream": True}).stream.n == count


def test_an_embedding_model_completes_nothing():
    check_refusal(refused(**PROMPT, model_is={"purpose": "embedding"}), "model", "model is an embedding model")


@hypothesis.given(st.fixed_dictionaries({}, optional=dict.fromkeys(
    ["prompt", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "echo", "repeat_penalty",
     "repetition_penalty", "response_format", "prompt_embeds", "logprobs"], JSON)), st.booleans())
def test_any_body_is_sent_on_or_refused(fields, good):
    try:
        one = read({**fields, **({**PROMPT, "model": None} if good else {})})
    except Refusal as error:
        assert 400 <= error.status < 500 and error.message and json.loads(completions.refusal(error))["error"]["message"]
    else:
        sent(one)


# ---- the plain answer

USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def answer(*choices, **more):
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "model", "choices": list(choices),
            "usage": USAGE, **more}


def choice(text, finish=None, index=0, logprobs=None, **more):
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **more}


def written(given):
    data, usage = completions.write(copy.deepcopy(given), read(PROMPT))
    return json.loads(data), usage


def test_an_answer_is_untouched():
    """Also what looks like thinking: the prompt was raw, and so is what follows it."""
    given = answer(choice("<think>hm</think> yes", "stop", stop_reason=3, logprobs={"tokens": ["a"]}), choice("b", "length", 1),
                   odd=[10 ** 30], kv_transfer_params=None)
    assert written(given) == (given, USAGE)


def test_what_the_sdk_wants():
    assert written({"choices": [{"index": 0, "finish_reason": "stop"}, None]})[0]["choices"][0] == choice("", "stop")


def test_an_answer_without_a_choice_is_none(subtests):
    for choices in [None, [], [None], {}, "x", 5]:
        with subtests.test(str(choices)), pytest.raises(UpstreamError, match="no completion"):
            written({"choices": choices})


# ---- streams

def chunk(*choices, **more):
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "model", "choices": list(choices), **more}


LOGPROBS = [{"text_offset": [n], "token_logprobs": [-0.5], "tokens": [text], "top_logprobs": [{"text": -0.5, "error": -1}]}
            for n, text in enumerate("ab")]
STREAMS = {                                         # the engine's chunks, the client's, whether it wants usage, choices
    "vllm": ([chunk(choice(" a", stop_reason=None)), chunk(choice(' "b"\n\\ ü 🌍 \u2028')), chunk(choice("c")),
              chunk(choice("", "stop", stop_reason=319)), chunk(usage=USAGE)], None, True, 1),
    "usage for nobody": ([chunk(choice("a")), chunk(choice("", "stop")), chunk(usage=USAGE)],
                         [chunk(choice("a")), chunk(choice("", "stop"))], False, 1),
    "running usage for nobody": ([chunk(choice("a"), usage=USAGE), chunk(choice("", "stop"), usage=USAGE)],
                                 [chunk(choice("a")), chunk(choice("", "stop"))], False, 1),
    "llama.cpp": ([chunk(choice("a")), chunk(choice("b")), chunk(choice("", "length"), usage=USAGE, timings={"n": 1})],
                  [chunk(choice("a")), chunk(choice("b")), chunk(choice("", "length"), timings={"n": 1})], False, 1),
    "two choices": ([chunk(choice("a", index=1)), chunk(choice("b")), chunk(choice("", "stop")), chunk(choice("c", index=1)),
                     chunk(choice("", "length", 1))], None, False, 2),
    "logprobs": ([chunk(choice("a", logprobs=LOGPROBS[0])), chunk(choice("b", logprobs=LOGPROBS[1])), chunk(choice("", "stop"))],
                 None, False, 1),
    "raw thinking": ([chunk(choice("<think>")), chunk(choice("hm</think>")), chunk(choice("", "stop"))], None, False, 1),
    "odd texts": ([chunk({"index": 0, "finish_reason": None}), chunk(choice(None, "stop"))],
                  [chunk({"index": 0, "finish_reason": None, "text": ""}), chunk(choice("", "stop"))], False, 1),
    "an unknown number": ([chunk(choice("a")), chunk(choice("", "stop"))], None, False, None),
}


def told(arrived, usage=False, n=1):
    """All that a stream shows of itself when its bytes arrive in these pieces."""
    stream = completions.PromptStream(usage, n)
    out = b"".join(map(stream.feed, arrived))
    return out + stream.end(), stream.finished, stream.tokens, stream.usage


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name):
    given, expected, usage, n = STREAMS[name]
    sent = b"".join(map(sse, given)) + DONE
    out, finished, tokens, figures = however_cut(sent, lambda arrived: told(arrived, usage, n))
    assert [json.loads(event[6:]) for event in out.split(b"\n\n")[:-2]] == (expected or given)
    assert out.endswith(DONE) and finished
    assert tokens == sum(bool(one.get("text") or one.get("finish_reason")) for event in given for one in event["choices"])
    assert figures == (USAGE if any("usage" in one for one in given) else None)


@hypothesis.given(st.sampled_from(sorted(STREAMS)), st.data())
def test_any_cuts(name, data):
    given, _, *options = STREAMS[name]
    sent = b"".join(map(sse, given)) + DONE
    assert told(pieces(sent, data.draw(cuts(sent))), *options) == told([sent], *options)


def test_most_events_are_never_parsed(monkeypatch):
    import stream as module
    one = completions.PromptStream()
    events = [sse(chunk(choice(text))) for text in ("a", "b", "c")]
    assert one.feed(events[0]) == events[0]
    monkeypatch.setattr(module, "loads", None)
    assert one.feed(events[1]) + one.feed(events[2]) == events[1] + events[2] and one.tokens == 3


def test_a_stream_that_breaks_off():
    def broken(arrived):
        with pytest.raises(UpstreamError):
            told(arrived)

    however_cut(sse(chunk(choice("a"))), broken)


def test_a_prompt_that_is_too_long():
    """In the words of this API, in a stream and before it."""
    stream = completions.PromptStream()
    stream.feed(sse({"error": {"message": "maximum context length is 5", "code": 400}}))
    with pytest.raises(Refusal) as caught:
        stream.end()
    assert caught.value.param == "messages"
    for data in (completions.refusal(caught.value), stream.fail(caught.value)[6:]):
        error = json.loads(data)["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_a_whole_answer_to_a_stream():
    stream = completions.PromptStream(usage=True, n=2)
    out = stream.feed_plain(answer(choice("a", "stop"), choice("b", "length", 1))) + stream.end()
    events = [json.loads(event[6:]) for event in out.split(b"\n\n")[:-2]]
    assert [event["object"] for event in events] == ["text_completion"] * 3
    assert [one["text"] for event in events for one in event["choices"]] == ["a", "b"] and events[2]["usage"] == USAGE


def test_a_stream_that_nobody_asked_for():
    data = b"".join(map(sse, [chunk(choice("b", index=1)), chunk(choice("a", logprobs=LOGPROBS[0])),
                              chunk(choice("c", "stop", logprobs=LOGPROBS[1])), chunk(choice("", "length", 1)),
                              chunk(usage=USAGE)])) + DONE
    assert json.loads(completions.write(data, read(PROMPT))[0]) == answer(
        choice("ac", "stop", logprobs={"tokens": ["a", "b"], "token_logprobs": [-0.5] * 2, "text_offset": [0, 1],
                                       "top_logprobs": [{"text": -0.5, "error": -1}] * 2}), choice("b", "length", 1))


def test_a_stream_that_is_not_whole(subtests):
    for body in [b"", DONE, sse(chunk(choice("a"))), sse(chunk(choice("a"))) + sse({"error": "it died"}) + DONE]:
        with subtests.test(str(body)):
            with pytest.raises(Refusal) as caught:
                completions.write(body, read(PROMPT))
            assert (caught.value.status, caught.value.code) == (502, "upstream_error")
