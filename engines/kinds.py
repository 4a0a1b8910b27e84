"""All that differs between kinds of engines: one class for each, found by what the engine says.

A new kind of engine is a class here and an entry in KINDS. Pure: whoever holds the connections
passes in the functions that ask.

Source: vLLM's and llama.cpp's servers as they answer on the wire.
"""

import math
import posixpath
import re
from itertools import islice
from typing import NamedTuple

import orjson

import steps
from engines.health import Trouble

# Looked for in every engine's errors: streams and answers are read without knowing which kind
# wrote them, so these hold the words of all kinds.
TOO_LONG = re.compile(
    r"context (?:length|size|window)|exceed_context_size|too large to process", re.IGNORECASE
)
CLIENTS_MISTAKE = re.compile(r"image input is not supported|too large to process", re.IGNORECASE)
LENGTHS = (
    re.compile(
        r"maximum context length is (?P<most>\d+) tokens.*"
        r" prompt contains (?:at least )?(?P<prompt>\d+) input",
        re.DOTALL,
    ),
    re.compile(
        r"request \((?P<prompt>\d+) tokens\)"
        r" exceeds the available context size \((?P<most>\d+) tokens\)"
    ),
)
# What a 503 says of a request that the engine has not begun with: it is loading, or full. vLLM's
# "please retry" is no such word: it had begun.
NOT_BEGUN = re.compile(
    r"loading|initiali[sz]ing|not (?:yet )?(?:ready|loaded)|currently loaded"
    r"|no (?:healthy|available|server is available)|busy|scaling|queue|backlog|overload|too many"
    r"|capacity|cannot accept|pending requests",
    re.IGNORECASE,
)
CACHE = "vllm:cache_config_info"
LABEL = re.compile(r'(\w+)="([^"]*)"')
PROMPT_FIELDS = (None, "input_tokens", "input_text")  # vLLM's `param` of a prompt that is too long
# Fields of a request by which it would choose its own place in an engine's queue, the part of the
# engine that works on it, or where its cache is fetched from: vLLM's, SGLang's, llama.cpp's,
# TensorRT-LLM's and Dynamo's. The gateway decides these for everybody.
STEERING = (
    "priority",
    "session_id",
    "kv_transfer_params",
    "ec_transfer_params",
    "session_params",
    "routed_dp_rank",
    "data_parallel_rank",
    "data_parallel_rank_decode",
    "disagg_prefill_dp_rank",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "id_slot",
    "slot_id",
    "disaggregated_params",
    "nvext",
)
WRAPPERS = ("vllm_xargs", "extra_body")  # objects in which some engines read such fields as well
# The status, in a list of models, of one that a request has loaded first.
UNLOADED = ("unloaded", "loading", "starting", "sleeping", "downloading", "downloaded", "stopped")
# finish_reasons of an answer that its engine did not finish: vLLM's, and other makers'.
GIVEN_UP = ("abort", "aborted", "error", "cancelled", "timeout")
LOOKED_AT = 1000  # bytes of a refusal
EVENT = re.compile(rb"^data: ?(\{.*)", re.MULTILINE)  # of a stream

REFUSED = (400, 422, 500)  # statuses of a chat that a template can't take
# A text as people send it to models, of which the tokens are counted.
SAMPLE = (
    "Please look at the function below, which should return the average of all values: for an empty"
    " list it fails. What would you change, and why? def average(values): return sum(values) / "
    "len(values). I have tried 3 inputs so far: [1, 2, 3], [0.5] and []. The first two were fine."
)


class Unasked(Exception):
    """An engine has not answered a question about a model, or is of a kind that is not asked."""


class Figures(NamedTuple):
    """What an engine says of its own work.

    work      anything that changes as long as it works
    requests  how many it has, running and waiting, or None where it does not say
    """

    work: object
    requests: float | None = None


NO_FIGURES = Figures(None)  # of one that says that it has none

# Of a metrics page, in which case `name[]` asks for these samples alone. The older name of the
# cache's use is vLLM's of before 0.11.
VLLM_WORK = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "iteration_tokens_total_count")
VLLM_REQUESTS = ("num_requests_running", "num_requests_waiting")
LLAMA_CPP_WORK = ("n_decode_total", "prompt_tokens_total", "tokens_predicted_total")
LLAMA_CPP_REQUESTS = ("requests_processing", "requests_deferred")
MOST_SAMPLES = 1000  # of a page


class Kind:
    """An engine that speaks OpenAI's API, and of which nothing more is known.

    owner              what its list of models says in `owned_by`
    thinking_budget    its field for how many tokens a model may think, or None
    effort_is_field    whether a model without a template of its own reads its effort from the
                       request's field reasoning_effort
    earlier_reasoning  the field of a message in which it reads the reasoning of earlier turns
    counted_reasoning  the same where it counts a chat's tokens

    An entry is an object in its list of models: {"id": ..., ...}.
    """

    owner = None
    thinking_budget = None
    effort_is_field = False
    earlier_reasoning = "reasoning_content"
    counted_reasoning = "reasoning_content"

    def context_of(self, entry):
        """The tokens of context that an entry tells of, or None. Each kind has its own field, and
        engines of other makers borrow any of them."""
        found = [entry.get("max_model_len"), entry.get("context_length")]
        if isinstance(entry.get("meta"), dict):
            found.append(entry["meta"].get("n_ctx"))
        for value in found:
            if isinstance(value, int) and value > 0:
                return value
        return None

    def is_loaded(self, entry):
        """Whether an entry's model is ready. llama.cpp's router and llama-swap list all that they
        could load, and load what they are asked for: by a look, too."""
        status = entry.get("status")
        if isinstance(status, dict):
            status = status.get("value")
        return status not in UNLOADED

    def weights_of(self, entry):
        """What an entry stands for: entries with the same weights are names of one model. vLLM
        lists each of its `--served-model-name`s, with one `root`."""
        root = entry.get("root")
        return root if root and isinstance(root, str) else entry["id"]

    def base_of(self, entry):
        """The name of the model of which an entry is an adapter, or None: its template is that
        model's. vLLM lists as many as it was given."""
        base = entry.get("parent")
        return base if isinstance(base, str) else None

    def short_names(self, engine_id):
        """Further names for a model whose id is a path: llama.cpp's is the file that it serves."""
        file = posixpath.basename(engine_id)
        return [file, file.removesuffix(".gguf")]

    def purpose(self, status_of):
        """What its models are for, "chat" or "embedding".

        status_of  a function: path -> status of a GET. Engines have the routes of what their
                   models can do, and refuse a GET on them with 405.
        """
        if status_of("/v1/embeddings") == 405 and status_of("/v1/chat/completions") == 404:
            return "embedding"
        return "chat"

    def unwell(self, status, body):
        """The Trouble of an engine whose /health is a 5xx. One of them says so while it loads."""
        if is_loading(status, body):
            return Trouble("loading", "it says that it is loading its model")
        return Trouble("off", f"it says itself that it is not well: /health is a {status}")

    def unlisted(self, status, body):
        """The Trouble of an engine that does not list its models."""
        if is_loading(status, body):
            return Trouble("loading", "it says that it is loading its model")
        if status in (401, 403):
            reason = f"it wants another key ({status}): set SPARKS_UPSTREAM_KEY"
        elif status == 404:
            reason = "it is no OpenAI server: it has no /v1/models (404); check its address"
        elif status == 429:
            return Trouble("busy", "it takes no more questions just now: /v1/models is a 429")
        elif status < 500:
            reason = f"its /v1/models is a {status}: is it an OpenAI server?"
        else:
            return Trouble("off", f"its /v1/models is a {status}")
        return Trouble("misconfigured", reason)

    def prompt(self, ask, question):
        """The prompt that a model's template makes of a chat, a text or, if there is none, a list
        of tokens; None where it refuses the chat. Raises Unasked.

        ask       a function: (path, a question as a dict, or None for a GET) -> (status, body)
        question  the chat: `model`, `messages`, perhaps `tools` and `chat_template_kwargs`
        """
        raise Unasked

    def facts(self, ask, model_id):
        """Fields of a found.Found that the engine tells of a model: those that it knows."""
        return {}

    def count(self, post, prompt):
        """How many tokens a chat has, or None where the engine can't tell.

        post    a function: (path, body as a list of bytes) -> the answer's body, b"" if it is no
                200
        prompt  the body of a chat request as a list of bytes
        """
        for kind in (VLLM, LLAMA_CPP):
            if tokens := kind.count(post, prompt):
                return tokens
        return None

    def put_last(self, body):
        """The body of a request (JSON, a list of bytes) with what has it come behind all others, of
        an engine that goes by priority."""
        return body

    def progress(self, get):
        """Its Figures, or None where there are none to be had.

        get  a function: path -> (status, body) of a GET
        """
        return None

    def canary(self, entry, purpose):
        """The least request that shows whether its core works, as (path, body); None where that is
        not to be asked: it might have to load a model for it."""
        return None


class Vllm(Kind):
    owner = "vllm"
    thinking_budget = "thinking_token_budget"
    effort_is_field = True
    counted_reasoning = "reasoning"  # /tokenize does not know the older name, as the chat does

    def count(self, post, prompt):
        """/tokenize takes a chat. The count stands in front of a list of all tokens, which is not
        worth parsing."""
        answer = post("/tokenize", prompt)
        if found := re.match(rb'\{"count":(\d+)', answer):
            return int(found[1])
        return field_of(answer, "count", int)

    def put_last(self, body):
        """A lower priority comes earlier, and requests without any have 0."""
        first, *rest = body
        return [b'{"priority":1,', memoryview(first)[1:], *rest]

    def progress(self, get):
        """Of /metrics/. With several API servers it is empty where names are asked for, and without
        the slash it knows no names."""
        names = "&".join(f"name%5B%5D=vllm:{name}" for name in (*VLLM_WORK, *VLLM_REQUESTS))
        for path in (f"/metrics/?{names}", "/metrics/"):
            status, page = get(path)
            if status == 200 and (found := figures_in(page, "vllm:", VLLM_WORK, VLLM_REQUESTS)):
                return found
        return None

    def canary(self, entry, purpose):
        return one_token(entry, purpose)

    def prompt(self, ask, question):
        """The tokens' own texts are those of its vocabulary, in which letters and tags are
        themselves."""
        answer = ask("/tokenize", {**question, "return_token_strs": True})
        tokens = in_answer(answer, "tokens", list)
        texts = field_of(answer[1], "token_strs", list)
        if tokens and texts and all(isinstance(text, str) for text in texts):
            return "".join(texts)
        return tokens

    def facts(self, ask, model_id):
        _, answer = ask("/tokenize", {"model": model_id, "prompt": SAMPLE})
        found = {"context": field_of(answer, "max_model_len", int)}
        found["bytes_a_token"] = bytes_a_token(field_of(answer, "count", int))
        return known(found) | self.cache(ask)

    def cache(self, ask):
        """The fields that say how much it caches: of all its engines, if it has more than one."""
        caches = self.caches(ask)
        sizes = [labels.get("kv_cache_size_tokens", "") for labels in caches]
        found = known({"capacity": sum(int(size) for size in sizes if size.isdecimal())})
        if caches and all(labels.get("enable_prefix_caching") == "False" for labels in caches):
            found["caches"] = False
        return found

    def caches(self, ask):
        """What it says of the cache of each of its engines: dicts of texts."""
        for path in (f"/metrics/?name%5B%5D={CACHE}", "/metrics"):  # some can't be asked for one
            _, answer = ask(path)
            lines = answer.decode().splitlines()
            if samples := [line for line in lines if line.startswith(CACHE + "{")]:
                return [dict(LABEL.findall(line)) for line in samples]
        return []


class LlamaCpp(Kind):
    owner = "llamacpp"
    thinking_budget = "thinking_budget_tokens"

    def count(self, post, prompt):
        """/apply-template makes the prompt of a chat, and /tokenize its tokens."""
        made = field_of(post("/apply-template", prompt), "prompt", str)
        if made is None:
            return None
        question = {"content": made, "add_special": True, "parse_special": True}
        answer = post("/tokenize", [orjson.dumps(question)])
        begun = re.match(rb'\{"tokens":\[\d', answer)
        if begun and answer.find(b'"', begun.end()) < 0:  # numbers alone, which need no parsing
            return answer.count(b",") + 1
        return len(field_of(answer, "tokens", list) or ())

    def progress(self, get):
        """Of /slots, or of /metrics: either may be turned off. Both are answered between two steps
        of its work, so that no answer at all says as much."""
        status, slots = get("/slots")
        if status == 200 and slots[:2] == b"[{":
            busy = slots.count(b'"is_processing":true')
            others_wait = not slots.count(b'"is_processing":false')
            return Figures(slots, None if others_wait else busy)
        status, page = get("/metrics")
        if status != 200:
            return None
        return figures_in(page, "llamacpp:", LLAMA_CPP_WORK, LLAMA_CPP_REQUESTS)

    def canary(self, entry, purpose):
        """One with a `status` is a router's, which loads a model when it is asked for it."""
        if "status" in entry:
            return None
        return one_token(entry, purpose)

    def prompt(self, ask, question):
        """Its template is applied without counting anything."""
        return in_answer(ask("/apply-template", question), "prompt", str)

    def facts(self, ask, model_id):
        """Not how much it caches: it does not say whether its slots have a cache each or share one,
        and what they drop it may keep in main memory."""
        _, answer = ask("/tokenize", {"model": model_id, "content": SAMPLE})
        tokens = field_of(answer, "tokens", list)
        found = {"bytes_a_token": bytes_a_token(len(tokens or ()))}
        _, answer = ask("/props")
        settings = field_of(answer, "default_generation_settings", dict) or {}
        if isinstance(settings.get("n_ctx"), int):
            found["context"] = settings["n_ctx"]
        return known(found)


OTHER = Kind()
VLLM = Vllm()
LLAMA_CPP = LlamaCpp()
KINDS = (VLLM, LLAMA_CPP)


def kind_of(entry):
    """The Kind of the engine whose list of models has this entry."""
    for kind in KINDS:
        if entry.get("owned_by") == kind.owner:
            return kind
    return OTHER


def figures_in(page, prefix, work, requests):
    """The Figures in a metrics page, or None. An engine in several parts has a sample for each.

    work, requests  names of samples, without their prefix
    """
    names = "|".join((*work, *requests)).encode()
    sample = rb"^%b((%b)(?:\{.*\})?) +(\S+)" % (prefix.encode(), names)
    found = islice(re.finditer(sample, page, re.MULTILINE), MOST_SAMPLES)
    samples = {one[1]: (one[2].decode(), one[3]) for one in found}
    if not samples:
        return None
    return Figures(samples, sum_of([value for name, value in samples.values() if name in requests]))


def sum_of(values):
    """The sum of numbers as they are written, or None if there are none, or others."""
    try:
        total = sum(map(float, values))
    except ValueError:
        return None
    return total if values and 0 <= total < math.inf else None


def one_token(entry, purpose):
    """A request (path, body) for as little as can be."""
    if purpose == "embedding":
        return "/v1/embeddings", {"model": entry["id"], "input": "1"}
    return "/v1/completions", {"model": entry["id"], "prompt": "1", "max_tokens": 1}


def works(status, body):
    """Whether an engine's answer to a canary shows that its core works. A refusal of the request is
    an answer, too; an error is none, though its status may be 200, and neither is a part of one."""
    if status != 200:
        return 400 <= status < 500 and status != 408 or status == 501
    events = EVENT.findall(body) or [body]  # some send nothing but streams
    choices = [choice for event in events for choice in choices_of(event)]
    return bool(choices) and not any(choice in GIVEN_UP for choice in choices)


def choices_of(answer):
    """The finish_reason of each choice, or of each vector, in an answer to a canary."""
    try:
        value = steps.read(answer)
    except (ValueError, RecursionError):
        return []
    if not value or not isinstance(value, dict):
        return []
    if value.get("error") or value.get("object") == "error":
        return ["error"]
    choices = value.get("choices", value.get("data", [value]))  # older servers have one, unnamed
    if not isinstance(choices, list):
        return []
    return [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]


def lengths_of(message):
    """{"prompt": tokens, "most": tokens} in an engine's words for a prompt that is too long."""
    for pattern in LENGTHS:
        if found := pattern.search(message):
            return found.groupdict()
    return None


def is_loading(status, body):
    """Whether an engine's refusal says that its model is still being loaded."""
    return status == 503 and b"oading" in body[:LOOKED_AT]


def in_answer(answer, name, wanted):
    """A field of an answer, a status and a body, to a question for a prompt; None where the chat is
    refused. Raises Unasked."""
    status, body = answer
    if status in REFUSED:
        return None
    value = field_of(body, name, wanted)
    if status != 200 or not value:
        raise Unasked
    return value


def bytes_a_token(count):
    """How many bytes a token of SAMPLE has, where it has so many, or None."""
    return len(SAMPLE) / count if count and count <= len(SAMPLE) else None


def known(found):
    return {name: value for name, value in found.items() if value and value > 0}


def field_of(answer, name, wanted):
    """A field of a JSON answer, if it is of the wanted type; else None."""
    try:
        value = steps.read(answer).get(name)
    except (ValueError, AttributeError, RecursionError):
        return None
    return value if isinstance(value, wanted) else None
