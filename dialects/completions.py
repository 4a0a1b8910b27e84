"""OpenAI text completions: a prompt as it is, without a chat template.

Near-identity: it goes to the engine's own /v1/completions under the engine's name of the model. Several prompts and token
arrays go on as they are; an engine that does not take them says so.

Source: the gateway's specification, pages 2 and 3; OpenAI's reference of POST /v1/completions.
"""

from dialects import Ask, sampling
from dialects.engine import model_for, written
from dialects.read import choices_asked, parse, read_stream, typed
from errors import InvalidRequest, error_body
from stream import CompletionStream, chunks_of, required_choices, choices_of, data_event, dumps

PATH = "/v1/completions"
MAX_TOKENS = 16  # unless the request says more, as OpenAI's
EXPECTED = "must be a text, a list of texts, a list of token ids, or a list of such lists"
LISTS = (
    "tokens",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
)  # of logprobs, that grow with a stream


class Stream(CompletionStream):
    def fail(self, error):
        return data_event(error_body(of_prompt(error)))


def read(body, fleet):
    """A request's body (bytes) as an Ask. Raises Refusal."""
    payload = parse(body)
    streams, usage = read_stream(payload)
    typed(payload, "model", str, "a text")
    prompts = read_prompt(payload)
    sampling.read_lengths(
        payload, 0 if payload.get("echo") is True else 1
    )  # nothing new: the prompt's own logprobs
    sampling.read_format(payload)
    model = model_for(fleet, payload.get("model"), "chat")
    settle(payload, model)
    if not streams:
        return Ask(PATH, written(payload), model)
    payload["stream_options"] = {**(payload.get("stream_options") or {}), "include_usage": True}
    n = choices_asked(payload.get("n"))
    return Ask(PATH, written(payload), model, Stream(usage, n and n * prompts))


def settle(payload, model):
    """The fields that the gateway owns."""
    if sampling.first_of(payload, sampling.LENGTH_NAMES) is None:
        payload["max_tokens"] = MAX_TOKENS
    sampling.fill_in(payload, model.sampling)
    payload["model"] = model.engine_id


def read_prompt(payload):
    """How many prompts there are. Raises InvalidRequest where there is none."""
    prompt = payload.get("prompt")
    if (
        prompt is None and payload.get("prompt_embeds") is not None
    ):  # vLLM's, where it is started for them
        return 1
    if prompt is None:
        raise InvalidRequest('prompt is missing: send a text such as "Once upon a time"', "prompt")
    if isinstance(prompt, str):
        return 1
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(f"prompt {EXPECTED}, and not empty", "prompt")
    if are_tokens(prompt):
        return 1
    if not all(
        isinstance(one, str) or isinstance(one, list) and one and are_tokens(one) for one in prompt
    ):
        raise InvalidRequest(f"prompt {EXPECTED}", "prompt")
    return len(prompt)


def are_tokens(values):
    """Whether all values are token ids."""
    return all(type(value) is int and 0 <= value < 1 << 31 for value in values)


# ---- what is answered


def write(answer, ask):
    """(the client's bytes, the usage) of an engine's answer: a dict, or the bytes of a stream that nobody asked for."""
    if isinstance(answer, bytes):
        answer = collected(answer)
    for choice in required_choices(answer):
        choice.setdefault("logprobs", None)
        if not isinstance(choice.get("text"), str):
            choice["text"] = ""
    if isinstance(answer.get("usage"), dict):  # vLLM's nulls, which OpenAI's schema forbids
        answer["usage"] = {
            name: value for name, value in answer["usage"].items() if value is not None
        }
    return dumps(answer), answer.get("usage")


def collected(events):
    """A stream's bytes as the plain completion they add up to. Raises Refusal if they are no whole answer."""
    stream, choices = CompletionStream(usage=True, n=None), {}
    chunks = chunks_of(events, stream)
    for chunk in chunks:
        for choice in choices_of(chunk):
            index = choice["index"] if isinstance(choice.get("index"), int) else 0
            add(
                choices.setdefault(
                    index, {"index": index, "text": "", "logprobs": None, "finish_reason": None}
                ),
                choice,
            )
    head = {name: chunks[0].get(name) for name in ("id", "created", "model")}
    return {
        **head,
        "object": "text_completion",
        "choices": [choices[index] for index in sorted(choices)],
        "usage": stream.usage,
    }


def add(whole, choice):
    """Add a chunk's choice to what came before it."""
    whole["text"] += choice["text"]
    whole["finish_reason"] = choice.get("finish_reason") or whole["finish_reason"]
    given = choice.get("logprobs")
    if isinstance(given, dict):
        before = whole["logprobs"] or {}
        whole["logprobs"] = {
            name: [*before.get(name, []), *given[name]]
            for name in LISTS
            if isinstance(given.get(name), list)
        }


def refusal(error):
    """A Refusal in OpenAI's shape, as bytes."""
    return dumps(error_body(of_prompt(error)))


def of_prompt(error):
    """A Refusal in this API's words: what is too long for the context is the prompt."""
    error.param = "prompt" if error.param == "messages" else error.param
    return error
