"""OpenAI text completions: a prompt as it is, without a chat template.

Near-identity: it goes to the engine's own /v1/completions under the engine's name of the model.
Several prompts and token arrays go on as they are; an engine that does not take them says so.

Source: the gateway's specification, pages 2 and 3; OpenAI's reference of POST /v1/completions.
"""

import steps
from dialects import Ask, sampling
from dialects.engine import USUALLY_LEFT, model_for, take_tier, written
from dialects.history import Ignored
from dialects.read import choices_asked, hold_back, parse, read_stream, typed, whole_ids
from errors import InvalidRequest, error_body
from mending.answer import choices_of, fit_nulls, index_of, name_tier, read_text, required_choices
from stream import CompletionStream, chunks_of, data_event
from values import dumps

PATH = "/v1/completions"
MAX_TOKENS = 16  # unless the request says more, as OpenAI's
EXPECTED = "must be a text, a list of texts, a list of token ids, or a list of such lists"
# The lists in logprobs, which grow with a stream.
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class PromptStream(CompletionStream):
    """A text completion stream whose error events are in this API's words."""

    def fail(self, error):
        return data_event(error_body(of_prompt(error)))


def read(body, fleet):
    """A request's body (bytes) as an Ask. Raises Refusal."""
    payload = parse(body)
    streams, usage = read_stream(payload)
    typed(payload, "model", str, "a text")
    ignored = Ignored()
    hold_back(payload, ignored)
    prompts = read_prompt(payload)
    # With `echo` a client may ask for no new token: it wants the prompt's own logprobs.
    sampling.read_lengths(payload, least=int(payload.get("echo") is not True))
    sampling.read_format(payload)
    model = model_for(fleet, payload.get("model"), "chat")
    tier = take_tier(payload, model)
    if sampling.first_of(payload, sampling.LENGTH_NAMES) is None:
        payload["max_tokens"] = MAX_TOKENS
    sampling.fill_in(payload, model.sampling)
    payload["model"] = model.engine_id
    n = choices_asked(payload.get("n"))
    if n is not None:
        n *= prompts
    most = sampling.most_tokens(payload, n)
    opening = opening_of_prompt(payload.get("prompt")) if len(model.places) > 1 else None
    stream = None
    if streams:
        payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
        stream = PromptStream(usage, n, model.id)
        stream.tier = tier
    body = written(payload)
    more = {"left_out": ignored, "opening": opening, "tier": tier}
    return Ask(PATH, body, model, stream, most=most, **more)


def opening_of_prompt(prompt):
    """How a prompt begins, as bytes. In its next turn a conversation's is longer."""
    first = prompt or ""
    if isinstance(prompt, list) and isinstance(prompt[0], (str, list)):
        first = prompt[0]
    return dumps(first[:USUALLY_LEFT])


def read_prompt(payload):
    """How many prompts there are. Raises InvalidRequest where there is none."""
    prompt = payload.get("prompt")
    if prompt is None:
        if payload.get("prompt_embeds") is not None:  # some engines take it instead
            return 1
        raise InvalidRequest('prompt is missing: send a text such as "Once upon a time"', "prompt")
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"prompt {EXPECTED}, and not empty", "prompt")
    prompt = payload["prompt"] = whole_ids(prompt)
    if are_tokens(prompt):
        return 1
    for one in prompt:
        if not isinstance(one, str) and not (isinstance(one, list) and one and are_tokens(one)):
            raise InvalidRequest(f"prompt {EXPECTED}", "prompt")
    return len(prompt)


def are_tokens(values):
    """Whether all values are token ids."""
    return all(type(value) is int and 0 <= value < 1 << 31 for value in values)


# ---- what is answered


def write(answer, ask):
    """(the client's bytes, the usage) of an engine's answer: a dict, or the bytes of a stream that
    nobody asked for. Raises Refusal."""
    if not isinstance(answer, dict):
        answer = collected(answer, ask.oddities)
    for choice in steps.paced(required_choices(answer)):
        choice.setdefault("logprobs", None)
        read_text(choice, ask.oddities)
    answer["model"] = ask.model.id
    name_tier(answer, ask.tier)
    fit_nulls(answer)
    return steps.write(answer), answer.get("usage")


def collected(events, oddities):
    """The plain completion (a dict) that a stream's bytes add up to. Raises Refusal if they are no
    whole answer. What is odd about it is added to `oddities`, a set."""
    stream = CompletionStream(usage=True, n=None)  # so that every event is parsed
    stream.oddities = oddities
    first = {}
    choices = {}
    for chunk in chunks_of(events, stream):
        first = first or chunk
        for choice in steps.paced(choices_of(chunk)):
            index = index_of(choice)
            new = {"index": index, "text": [], "logprobs": None, "finish_reason": None}
            add(choices.setdefault(index, new), choice)
    for choice in choices.values():
        steps.pause()
        choice["text"] = steps.gathered_text(choice["text"])
    return {
        **{name: first.get(name) for name in ("id", "created", "model")},
        "object": "text_completion",
        "choices": [choices[index] for index in sorted(choices)],
        "usage": stream.usage,
    }


def add(whole, choice):
    """Add a chunk's choice to what came before it, of which the text is a list of pieces."""
    whole["text"].append(choice["text"])
    whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
    if not isinstance(choice.get("logprobs"), dict):
        return
    logprobs = whole["logprobs"] = whole["logprobs"] or {}
    for name in LISTS:
        if isinstance(choice["logprobs"].get(name), list):
            logprobs.setdefault(name, []).extend(choice["logprobs"][name])


def refusal(error):
    """A Refusal in OpenAI's shape, as bytes."""
    return dumps(error_body(of_prompt(error)))


def of_prompt(error):
    """A Refusal in this API's words: what is too long for the context is the prompt."""
    if error.param == "messages":
        error.param = "prompt"
    return error
