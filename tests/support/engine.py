"""A scripted engine over real sockets: it plays any answer byte by byte, and knows when its client went.

    with Engine() as engine:
        engine.play(*chat_chunks("Hello there", usage=True))            # the next POST: bytes, each a HTTP chunk
        engine.play(Json(completion("Hello there")))                    # the one after it
        engine.play(Head(), chat_chunks("Hello")[0], Wait(event), Reset())
        engine.always(lambda request: [Json(completion(request.json()["model"]))])
        ...
        engine.wait_for(1)[0].json()                                    # what arrived
        engine.requests[0].gone.wait(1)                                 # the client left while it was served

A script is a sequence (or a generator) of steps. Plain bytes are `Send(bytes)`. A `Head()` is put in front where the
script has none, and an `End()` behind it where nothing closed the connection. Without a script a POST gets the answer
that vLLM 0.32 would give (`engine.like = "llama"`: llama.cpp's server), with vLLM's refusals of an unknown model and of
`stream_options` without `stream`. Its chat template is `engine.template`, one of support/templates.py.

    Head(status, headers, framing, type, version, reason)
                        framing: "chunked", "close", a content length, or None for no body; status 1xx: interim
    Send(data)          one send(), one HTTP chunk where the head says chunked
    Raw(data)           bytes as they are, also behind the last chunk
    Dribble(data, size=1, pause=0, chunks=False)    `size` bytes a send(); chunks=True makes each of them a HTTP chunk
    Pause(seconds)      Wait(event, seconds)        Hang(), until the client goes
    End(trailers)       the last chunk; the connection stays
    Close()             FIN, whatever was promised        Reset()    RST
    Json(object, status, headers)                         a whole plain answer
    Early()             first in a script: play on before the body was read; ReadBody() reads it then

Only POSTs that ask for an answer count as `requests`; what asks about the engine (GET, /tokenize) is in `probes`, but for
what the gateway asks of its own about each model, which is in `learned`. The client is gone when it closed, reset or half-closed the connection while its script was played, as vLLM sees it;
`finished` is set where the script came to its end.
Everything is bounded: a wait longer than `engine.patience` ends the connection and lands in `engine.faults`.
"""
import base64
import json
import secrets
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from urllib.parse import parse_qs
from zlib import crc32

from support.processes import free_port
from support.templates import TEMPLATES, Refused, render

MODELS = [{"id": "GLM-5.3-Flash-EXL3", "max_model_len": 850000, "root": "/models/GLM-5.3-Flash-EXL3"}]
FINGERPRINT = "vllm-0.32.0-47ee2e8e"
GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
SLICE = 0.02                            # seconds between looks at a threading.Event, which cannot be polled


class Gone(Exception):
    """The client closed, half-closed or reset the connection."""


class Stopped(Exception):
    """The engine was stopped."""


# ---- steps

class Head:
    def __init__(self, status=200, headers=None, framing="chunked", type="text/event-stream; charset=utf-8",
                 version="1.1", reason=None):
        self.status, self.headers, self.framing, self.type = status, dict(headers or {}), framing, type
        self.version, self.reason = version, reason

    def run(self, c):
        if self.status >= 200:
            c.headed = True
            c.framing = "close" if self.framing is None and self.version == "1.0" else self.framing
            c.keep = c.keep and c.framing != "close" and "close" not in self._header("connection")
        c.send(self.bytes(c.engine))

    def bytes(self, engine):
        lines = [f"HTTP/{self.version} {self.status} {self.reason or _reason(self.status)}"]
        lines += [f"{name}: {value}" for name, value in self._lines(engine) if value is not None]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def _lines(self, engine):
        given = {name.lower() for name in self.headers}
        usual = [] if self.status < 200 else HEADERS[engine.like](self)
        return [(name, value) for name, value in usual if name.lower() not in given] + list(self.headers.items())

    def _header(self, wanted):
        return next((str(value).lower() for name, value in self.headers.items() if name.lower() == wanted), "")


class Send:
    def __init__(self, data):
        self.data = data

    def run(self, c):
        c.need_head()
        c.send(c.framed(self.data))


class Raw(Send):
    def run(self, c):
        c.headed = True
        c.send(self.data)


class Dribble(Send):
    def __init__(self, data, size=1, pause=0, chunks=False):
        self.data, self.size, self.pause, self.chunks = data, size, pause, chunks

    def run(self, c):
        c.need_head()
        data = self.data if self.chunks else c.framed(self.data)
        for at in range(0, len(data), self.size):
            piece = data[at:at + self.size]
            c.send(c.framed(piece) if self.chunks else piece)
            c.pause(self.pause)


class Pause:
    def __init__(self, seconds):
        self.seconds = seconds

    def run(self, c):
        c.pause(self.seconds)


class Wait:
    def __init__(self, event, seconds=None):
        self.event, self.seconds = event, seconds

    def run(self, c):
        end = time.monotonic() + (self.seconds or c.engine.patience)
        while not self.event.is_set():
            if time.monotonic() > end:
                raise TimeoutError("an engine's script waited in vain for its event")
            c.pause(SLICE)


class Hang(Wait):
    def __init__(self):
        super().__init__(threading.Event())


class End:
    def __init__(self, trailers=None):
        self.trailers = trailers or {}

    def run(self, c):
        c.need_head()
        if c.framing == "chunked":
            lines = "".join(f"{name}: {value}\r\n" for name, value in self.trailers.items())
            c.send(f"0\r\n{lines}\r\n".encode())
        c.ended = True


class Close:
    def run(self, c):
        c.close()


class Reset:
    def run(self, c):
        c.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        c.close()


class Json:
    def __init__(self, value, status=200, headers=None):
        self.value, self.status, self.headers = value, status, headers

    def run(self, c):
        data = compact(self.value)
        Head(self.status, self.headers, len(data), "application/json").run(c)
        c.send(data)


class Early:
    def run(self, c):
        pass


class ReadBody:
    def run(self, c):
        c.read_body()


# ---- what the engines say

def _reason(status):
    return HTTPStatus(status).phrase if status in set(HTTPStatus) else "Unknown"


def _vllm_headers(head):
    length = head.framing if isinstance(head.framing, int) else None
    return [("date", formatdate(usegmt=True)), ("server", "uvicorn"), ("content-length", length),
            ("content-type", head.type), ("vary", "Origin"),
            ("connection", "close" if head.framing == "close" and head.version != "1.0" else None),
            ("transfer-encoding", "chunked" if head.framing == "chunked" else None)]


def _llama_headers(head):
    stream = head.framing == "chunked"
    return [("Server", "llama.cpp"), ("Access-Control-Allow-Origin", ""),
            ("X-Accel-Buffering", "no" if stream else None),
            ("Content-Type", "text/event-stream" if stream else "application/json; charset=utf-8"),
            ("Content-Length", head.framing if isinstance(head.framing, int) else None),
            ("Transfer-Encoding", "chunked" if stream else None), ("Keep-Alive", "timeout=5, max=100")]


HEADERS = {"vllm": _vllm_headers, "llama": _llama_headers}


def compact(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def sse(value):
    """One event, as vLLM writes it."""
    return b"data: " + compact(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def died(message="EngineCore encountered an issue. See stack trace (above) for the root cause.", code=500):
    """What vLLM sends when its engine dies under a stream; [DONE] follows it, and no finish comes before it."""
    error = {"message": message, "type": "InternalServerError", "param": None, "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def refusal(status, message, type="BadRequestError", param=None):
    """vLLM's refusal: the code is the status, a number."""
    return Json({"error": {"message": message, "type": type, "param": param, "code": status}}, status)


def llama_refusal(status, message, type="invalid_request_error", **more):
    return Json({"error": {"code": status, "message": message, "type": type, **more}}, status, {"Connection": "close"})


def pieces(text):
    """A text as a stream cuts it: word by word, with the space in front."""
    if not isinstance(text, str):
        return list(text or [])
    words = text.split(" ")
    return [word if n == 0 else " " + word for n, word in enumerate(words)] if text else []


def calls(tools):
    """[(name, arguments)] with ids; arguments: a string, an object, or the pieces of a stream."""
    return [(f"chatcmpl-tool-{secrets.token_hex(8)}", name, [compact(a).decode()] if isinstance(a, dict) else pieces(a))
            for name, a in tools or []]


def tokens(prompt=15, reasoning=0, completion=0, cached=0):
    """vLLM's usage, as its usage chunk has it."""
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached, "created_cache_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": reasoning}}


def _new_id():
    return f"chatcmpl-{secrets.token_hex(8)}"


def chunk(delta=None, finish=None, id="chatcmpl-a4d799bba2c27bd4", model=MODELS[0]["id"], created=None, index=0,
          **more):
    """One chunk of vLLM's as an object. The first one and the last one have fields of their own."""
    choice = {"index": index, "delta": delta or {}, "logprobs": None, "finish_reason": finish}
    if finish:
        choice["stop_reason"] = {"stop": 319, "tool_calls": 321}.get(finish)
    if "role" not in choice["delta"]:
        choice["token_ids"] = None
    else:
        more = {**more, "prompt_token_ids": None, "prompt_text": None}
    return {"id": id, "object": "chat.completion.chunk", "created": created or int(time.time()), "model": model,
            "choices": [choice], **more}


def chat_chunks(text="Hello there", reasoning=None, tools=None, usage=None, finish=None, done=True, continuous=False,
                model=MODELS[0]["id"], id=None, prompt=15, cached=0):
    """The events of vLLM's chat stream, each as bytes.

    text, reasoning: a string (cut at its spaces) or the pieces; tools: [(name, arguments)]; usage: True or an object;
    continuous: running figures in every chunk; done=False: without [DONE].
    """
    deltas = [{"role": "assistant", "content": ""}, *({"reasoning": piece} for piece in pieces(reasoning)),
              *({"content": piece} for piece in pieces(text)), *_call_deltas(tools)]
    finish = finish or ("tool_calls" if tools else "stop")
    id, created, thought, out = id or _new_id(), int(time.time()), 0, []
    for n, delta in enumerate([*deltas, {}]):
        thought += "reasoning" in delta
        count = n + (0 < thought < n)                # </think> is a token that shows in no chunk
        more = {"usage": _running(prompt, count, thought)} if continuous else {}
        if not delta and not usage:
            more["system_fingerprint"] = FINGERPRINT
        out.append(sse(chunk(delta, None if delta else finish, id, model, created, **more)))
    if usage:
        figures = usage if isinstance(usage, dict) else tokens(prompt, thought, count, cached)
        out.append(sse({"id": id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": [],
                        "usage": figures, "system_fingerprint": FINGERPRINT}))
    return [*out, DONE] if done else out


def _running(prompt, completion, thought):
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
            "completion_tokens_details": {"reasoning_tokens": thought}}


def _call_deltas(tools):
    for n, (id, name, arguments) in enumerate(calls(tools)):
        yield {"tool_calls": [{"id": id, "type": "function", "index": n, "function": {"name": name}}]}
        for piece in arguments:
            yield {"tool_calls": [{"index": n, "function": {"arguments": piece}}]}


def completion(text="Hello there", reasoning=None, tools=None, usage=None, finish=None, model=MODELS[0]["id"], id=None,
               prompt=15, cached=0):
    """vLLM's plain answer to a chat, as an object."""
    message = {"role": "assistant", "content": "".join(pieces(text)) or None, "refusal": None, "annotations": None,
               "audio": None, "function_call": None}
    if tools:
        message["tool_calls"] = [
            {"id": call, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
            for call, name, arguments in calls(tools)]
    message["reasoning"] = "".join(pieces(reasoning)) or None
    finish = finish or ("tool_calls" if tools else "stop")
    thought = len(pieces(reasoning))
    figures = tokens(prompt, thought, thought + bool(thought) + len(pieces(text)) + 1, cached)
    figures["prompt_tokens_details"]["multimodal_tokens"] = None
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish,
              "stop_reason": {"stop": 319, "tool_calls": 321}.get(finish), "token_ids": None, "routed_experts": None}
    return {"id": id or _new_id(), "object": "chat.completion", "created": int(time.time()), "model": model,
            "choices": [choice], "service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage or figures,
            "prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None, "kv_transfer_params": None,
            "ec_transfer_params": None, "metrics": None}


def text_completion(*texts, usage=None, model=MODELS[0]["id"], prompt=5, logprobs=None):
    """vLLM's plain answer to a text completion, as an object: a choice for each text."""
    choices = [{"index": n, "text": text, "logprobs": logprobs, "finish_reason": "stop", "stop_reason": 319, "token_ids": None,
                "prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None} for n, text in enumerate(texts)]
    figures = tokens(prompt, 0, sum(len(pieces(text)) + 1 for text in texts))
    return {"id": f"cmpl-{secrets.token_hex(8)}", "object": "text_completion", "created": int(time.time()), "model": model,
            "choices": choices, "service_tier": None, "system_fingerprint": FINGERPRINT,
            "usage": usage or {**figures, "completion_tokens_details": None}, "kv_transfer_params": None}


def text_chunks(*texts, usage=None, done=True, model=MODELS[0]["id"], prompt=5):
    """The events of vLLM's text completion stream, each as bytes: a choice for each text."""
    head = {"id": f"cmpl-{secrets.token_hex(8)}", "object": "text_completion", "created": int(time.time()), "model": model}
    said = [(n, piece, None) for n, text in enumerate(texts) for piece in pieces(text)]
    said += [(n, "", "stop") for n, _ in enumerate(texts)]
    out = [sse({**head, "choices": [{"index": n, "text": piece, "logprobs": None, "finish_reason": finish,
                                     "stop_reason": 319 if finish else None, "prompt_token_ids": None, "token_ids": None}]})
           for n, piece, finish in said]
    if usage:
        out.append(sse({**head, "choices": [], "usage": tokens(prompt, 0, len(said))}))
    return [*out, DONE] if done else out


def embeddings(*vectors, form="float", model=MODELS[0]["id"], prompt=3):
    """An engine's answer with these vectors, as an object."""
    packed = [base64.b64encode(struct.pack(f"<{len(one)}f", *one)).decode() if form == "base64" else one for one in vectors]
    return {"object": "list", "model": model, "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
            "data": [{"object": "embedding", "index": n, "embedding": one} for n, one in enumerate(packed)]}


def llama_chunk(delta=None, finish=None, id="chatcmpl-CPrPsmcsnJNhCkJRVRvcG7akrjx958aB", model=MODELS[0]["id"],
                created=None, **more):
    return {"choices": [{"finish_reason": finish, "index": 0, "delta": delta or {}}],
            "created": created or int(time.time()), "id": id, "model": model, "system_fingerprint": "b0-unknown",
            "object": "chat.completion.chunk", **more}


def llama_chunks(text="Hello there", reasoning=None, tools=None, usage=None, finish=None, done=True,
                 model=MODELS[0]["id"], id=None, prompt=15, cached=0):
    """The events of llama.cpp's chat stream, each as bytes; the arguments are chat_chunks'."""
    deltas = [{"role": "assistant", "content": None}, *({"reasoning_content": piece} for piece in pieces(reasoning)),
              *({"content": piece} for piece in pieces(text)), *_llama_call_deltas(tools)]
    id, count = id or f"chatcmpl-{secrets.token_urlsafe(24)}", len(deltas) - 1
    out = [sse(llama_chunk(delta, None, id, model)) for delta in deltas]
    timings = _timings(prompt, count, cached)
    finish = finish or ("tool_calls" if tools else "stop")
    out.append(sse(llama_chunk({}, finish, id, model, **({} if usage else {"timings": timings}))))
    if usage:
        figures = usage if isinstance(usage, dict) else _llama_usage(prompt, count, cached)
        out.append(sse({**llama_chunk(id=id, model=model), "choices": [], "usage": figures, "timings": timings}))
    return [*out, DONE] if done else out


def _llama_call_deltas(tools):
    for n, (_, name, arguments) in enumerate(calls(tools)):
        first, *rest = arguments or [""]
        yield {"tool_calls": [{"index": n, "id": secrets.token_urlsafe(24), "type": "function",
                               "function": {"name": name, "arguments": first}}]}
        for piece in rest:
            yield {"tool_calls": [{"index": n, "function": {"arguments": piece}}]}


def llama_completion(text="Hello there", reasoning=None, tools=None, usage=None, finish=None, model=MODELS[0]["id"],
                     id=None, prompt=15, cached=0):
    """llama.cpp's plain answer to a chat, as an object."""
    message = {"role": "assistant", "content": "".join(pieces(text))}
    if reasoning:
        message["reasoning_content"] = "".join(pieces(reasoning))
    if tools:
        message["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": "".join(arguments)},
                                  "id": secrets.token_urlsafe(24)} for _, name, arguments in calls(tools)]
    count = len(pieces(text)) + len(pieces(reasoning))
    finish = finish or ("tool_calls" if tools else "stop")
    return {"choices": [{"finish_reason": finish, "index": 0, "message": message}], "created": int(time.time()),
            "model": model, "system_fingerprint": "b0-unknown", "object": "chat.completion",
            "usage": usage or _llama_usage(prompt, count, cached), "id": id or f"chatcmpl-{secrets.token_urlsafe(24)}",
            "timings": _timings(prompt, count, cached)}


def _llama_usage(prompt, count, cached):
    return {"completion_tokens": count, "prompt_tokens": prompt, "total_tokens": prompt + count,
            "prompt_tokens_details": {"cached_tokens": cached}}


def _timings(prompt, count, cached):
    return {"cache_n": cached, "prompt_n": prompt - cached, "prompt_ms": 101.9, "prompt_per_token_ms": 8.5,
            "prompt_per_second": 117.7, "predicted_n": count, "predicted_ms": 271.8, "predicted_per_token_ms": 24.7,
            "predicted_per_second": 40.5}


def vllm_models(models):
    return {"object": "list", "data": [_vllm_model(model, int(time.time())) for model in models]}


def _vllm_model(model, now):
    permission = {"id": f"modelperm-{secrets.token_hex(8)}", "object": "model_permission", "created": now,
                  "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
                  "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False, "organization": "*",
                  "group": None, "is_blocking": False}
    return {"id": model["id"], "object": "model", "created": now, "owned_by": "vllm",
            "root": model.get("root", model["id"]), "parent": model.get("parent"), "max_model_len": model.get("max_model_len"),
            "permission": [permission]}


def llama_models(models):
    return {"models": [_ollama_model(model["id"]) for model in models], "object": "list",
            "data": [_llama_model(model, int(time.time())) for model in models]}


def _ollama_model(name):
    return {"name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model",
            "description": "", "tags": [""], "capabilities": ["completion"], "parameters": "",
            "details": {"parent_model": "", "format": "gguf", "family": "", "families": [""], "parameter_size": "",
                        "quantization_level": ""}}


def _llama_model(model, now):
    return {"id": model["id"], "aliases": [model["id"]], "tags": [], "object": "model",
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]}, "created": now,
            "owned_by": "llamacpp",
            "meta": {"vocab_type": 2, "n_vocab": 49152, "n_ctx": model.get("max_model_len"), "n_ctx_train": 8192,
                     "n_embd": 576, "n_params": 134515008, "size": 96576768, "ftype": "Q4_1"}}


def router_models(statuses):
    """What an engine lists that loads on demand, llama.cpp's router: {id: "unloaded", "loading" or "loaded"}."""
    return {"object": "list", "data": [_router_model(name, status, int(time.time())) for name, status in statuses.items()]}


def _router_model(name, status, now):
    of_weights = _llama_model({"id": name, "max_model_len": 4096}, now)["meta"]
    return {"id": name, "aliases": [], "tags": [], "object": "model", "owned_by": "llamacpp", "created": now,
            "status": {"value": status, "args": ["llama-server", "--host", "127.0.0.1", "--alias", name], "preset": f"[{name}]\n"},
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]}, "source": "models_dir", "can_remove": False,
            **({"meta": of_weights} if status == "loaded" else {})}


def swap_models(statuses):
    """The same of llama-swap. It calls a model loaded as soon as it starts it, and says nothing of its context."""
    return {"object": "list", "data": [
        {"id": name, "object": "model", "created": int(time.time()), "owned_by": "llama-swap", "meta": {"llamaswap": {"type": "model"}},
         "status": {"value": status}} for name, status in statuses.items()]}


# ---- answers without a script

def default_answer(engine, request):
    try:
        ask = request.json()
    except ValueError:
        message = "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.0', 'msg': 'JSON decode error'}"
        return [refusal(400, message, "Bad Request", "body.0")]
    if request.path == "/v1/completions":
        return _text_answer(ask)
    if request.path == "/v1/embeddings" and engine.embeds:
        inputs = ask["input"] if isinstance(ask["input"], list) and not isinstance(ask["input"][0], int) else [ask["input"]]
        vectors = [[0.5, -0.25, 0.75, len(str(one)) / 8] for one in inputs]
        return [Json(embeddings(*vectors, form=ask.get("encoding_format"), model=ask["model"]))]
    if request.path != "/v1/chat/completions" or engine.embeds:
        return [Json({"detail": "Not Found"}, 404)]
    return _llama_answer(ask) if engine.like == "llama" else _vllm_answer(engine, request, ask)


def _vllm_answer(engine, request, ask):
    names = [m["id"] for m in engine.models or []]
    if ask.get("model") and ask["model"] not in names:
        return [refusal(404, f"The model `{ask['model']}` does not exist. Valid aliases: {', '.join(names)}.",
                        "NotFoundError", "model")]
    options = ask.get("stream_options") or {}
    if options and not ask.get("stream"):
        return [refusal(400, "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
                        param="stream_options")]
    wish = request.header("x-request-id")
    said = {"model": ask.get("model") or names[0], "id": f"chatcmpl-{wish}" if wish else None}
    if (ask.get("chat_template_kwargs") or {}).get("enable_thinking", True):
        said["reasoning"] = "Let me think"
    if not ask.get("stream"):
        return [Json(completion(**said))]
    return chat_chunks(**said, usage=options.get("include_usage"), continuous=options.get("continuous_usage_stats"))


def _text_answer(ask):
    several = isinstance(ask["prompt"], list) and not isinstance(ask["prompt"][0], int)
    texts = ["Hello there"] * (len(ask["prompt"]) if several else 1) * (ask.get("n") or 1)
    if not ask.get("stream"):
        return [Json(text_completion(*texts, model=ask["model"]))]
    return text_chunks(*texts, model=ask["model"], usage=(ask.get("stream_options") or {}).get("include_usage"))


def _llama_answer(ask):
    said = {"model": ask.get("model") or MODELS[0]["id"]}
    if (ask.get("chat_template_kwargs") or {}).get("enable_thinking"):
        said["reasoning"] = "Let me think"
    if not ask.get("stream"):
        return [Json(llama_completion(**said))]
    return llama_chunks(**said, usage=(ask.get("stream_options") or {}).get("include_usage"))


PROBES = {"/tokenize", "/apply-template"}       # POSTs that ask about the engine
OWN = (b"What is 2+2?", b"What is 3+3?", b"the average of all values", b"cache_config_info", b"/props")     # in what it is asked about a model


def probe_answer(engine, request):
    """What the engine says about itself."""
    route = (request.method, request.path.partition("?")[0])
    if route == ("GET", "/health") or route == ("GET", "/ping"):
        return [Json({"status": "ok"})] if engine.like == "llama" else [Head(framing=0, headers={"content-type": None})]
    if route == ("GET", "/version"):
        return [Json({"version": "0.32.0"})]
    if route == ("GET", "/load"):
        return [Json({"server_load": engine.active})]
    if "cache_config_info" in request.path and engine.like == "vllm":
        line = b'vllm:cache_config_info{block_size="128",enable_prefix_caching="True",engine="0",kv_cache_size_tokens="65536",num_gpu_blocks="512"} 1.0\n'
        return [Head(framing=len(line), type="text/plain; version=0.0.4; charset=utf-8"), line]
    if route == ("GET", "/props") and engine.like == "llama":
        return [Json({"default_generation_settings": {"params": {}, "n_ctx": 4096}, "total_slots": 2})]
    if route in (("GET", "/metrics"), ("GET", "/metrics/")):
        return _metrics(engine, request)
    if route == ("GET", "/slots") and engine.like == "llama":
        return [Json(_slots(engine))]
    if route == ("GET", "/v1/models"):
        if not engine.models:
            return [llama_refusal(503, "Loading model", "unavailable_error")]
        return [Json((llama_models if engine.like == "llama" else vllm_models)(engine.models))]
    if route == ("POST", "/tokenize"):
        return _tokenize(engine, request)
    if route == ("POST", "/apply-template") and engine.like == "llama":
        try:
            return [Json({"prompt": render(engine.template, request.json())})]
        except Refused as refused:
            return [llama_refusal(400, f"Unable to generate parser for this template. Error: Jinja Exception: {refused}")]
    if route[1] == ("/v1/embeddings" if engine.embeds else "/v1/chat/completions"):
        return [Json({"detail": "Method Not Allowed"}, 405, {"allow": "POST"})]
    return [Json({"detail": "Not Found"}, 404)]


def is_canary(request, path):
    """Whether it asks for one token of next to nothing, as the gateway does to see whether the engine works."""
    if request.method != "POST" or path not in ("/v1/completions", "/v1/embeddings") or len(request.body) > 200:
        return False
    with suppress(ValueError):
        ask = request.json()
        return ask.keys() - {"model"} == {"input"} and ask["input"] == "1" \
            or ask.keys() - {"model"} == {"prompt", "max_tokens"} and (ask["prompt"], ask["max_tokens"]) == ("1", 1)
    return False


def _metrics(engine, request):
    """vLLM's page; with the slash, `name[]` chooses among the samples."""
    values = {"num_requests_running": float(engine.active), "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0,
              "iteration_tokens_total_count": 0.0, **engine.figures}
    path, _, query = request.path.partition("?")
    wanted = parse_qs(query).get("name[]") if path.endswith("/") else None
    lines = "".join(f"# TYPE vllm:{name} gauge\nvllm:{name}{{engine=\"0\"}} {value}\n" for name, value in values.items()
                    if not wanted or f"vllm:{name}" in wanted).encode()
    return [Head(framing=len(lines), type="text/plain; version=0.0.4; charset=utf-8"), lines]


def _slots(engine):
    """llama.cpp's slots, two of them."""
    done = engine.figures.get("n_decoded", 0)
    return [{"id": n, "n_ctx": 4096, "speculative": False, "is_processing": n < engine.active, "id_task": 7 + n,
             "next_token": [{"has_next_token": n < engine.active, "n_remain": -1, "n_decoded": done}]} for n in range(2)]


def _tokenize(engine, request):
    ask = request.json()
    if engine.like == "llama":
        return [Json({"tokens": list(range(len(ask.get("content") or "") // 4))})]
    count = max(1, len(compact(ask.get("messages") or ask.get("prompt") or "")) // 4)
    try:
        made = render(engine.template, ask) if ask.get("messages") else ask.get("prompt") or ""
    except Refused as refused:
        return [refusal(400, str(refused))]
    words = [made[at:at + 4] for at in range(0, len(made), 4)]
    longest = (engine.models or [{}])[0].get("max_model_len")
    return [Json({"count": count, "max_model_len": longest, "tokens": [crc32(word.encode()) for word in words],
                  "token_strs": words if ask.get("return_token_strs") else None})]


# ---- the server

class Request:
    """What arrived, and what became of it. Times are time.monotonic()'s."""

    def __init__(self, method, path, headers, connection, nth):
        self.method, self.path, self.headers = method, path, headers
        self.connection, self.nth = connection, nth            # which connection, and the how-manieth request on it
        self.body, self.arrived, self.gone_at = b"", time.monotonic(), None
        self.gone, self.finished = threading.Event(), threading.Event()

    def header(self, wanted):
        return next((value for name, value in self.headers if name.lower() == wanted), None)

    def json(self):
        return json.loads(self.body)

    def __repr__(self):
        return f"<{self.method} {self.path} on connection {self.connection}, {len(self.body)} bytes>"


class Connection(threading.Thread):
    def __init__(self, engine, sock, number):
        super().__init__(name=f"engine-{engine.port}-connection-{number}", daemon=True)
        self.engine, self.sock, self.number = engine, sock, number
        self.buffer, self.open, self.served = b"", True, 0
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.poller = select.poll()
        self.poller.register(sock, 0)

    def run(self):
        try:
            while self.open and self.serve():
                pass
        except (Gone, Stopped, ConnectionError):
            pass
        except Exception:
            self.engine.faults.append(traceback.format_exc())
        finally:
            self.sock.close()
            self.engine._closed(self)

    def serve(self):
        """One request. Whether another may follow on this connection."""
        if not self.buffer and not self.poll(select.POLLIN, self.engine.idle if self.served else self.engine.patience):
            return False
        self.request = request = self.read_head()
        self.keep = (request.header("connection") or "").lower() != "close"
        self.headed, self.framing, self.ended, self.body_read = False, None, False, False
        early = self.engine._early(request)
        if early is None:
            self.read_body()
        self.engine._perform(self, request, early)
        if self.open and not self.body_read:
            self.read_body()
        return self.keep

    def play(self, steps):
        """A script, to its end or the client's."""
        for step in steps:
            step = Send(bytes(step)) if isinstance(step, (bytes, bytearray)) else step
            step.run(self)
            if not self.open:
                return
        if not self.ended:
            self.finish()

    def finish(self):
        """The end of a script that has none of its own; a client that left before it had all that was said."""
        try:
            End().run(self)
        except Gone:
            self.close()

    # what steps and readers use

    def need_head(self):
        if not self.headed:
            Head().run(self)

    def poll(self, mask, seconds, gone=0):
        """Wait for one of mask, or for the client to go where `gone` says so."""
        if self.engine.stopping:
            raise Stopped
        self.poller.modify(self.sock, mask | gone)
        found = self.poller.poll(None if seconds is None else seconds * 1000)
        if self.engine.stopping:
            raise Stopped
        bits = found[0][1] if found else 0
        if gone and bits & GONE:
            raise Gone
        return bits

    def pause(self, seconds):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.poll(0, left, GONE)

    def framed(self, data):
        return b"%x\r\n%b\r\n" % (len(data), data) if self.framing == "chunked" and data else data

    def send(self, data):
        data = memoryview(data)
        while data:
            if not self.poll(select.POLLOUT, self.engine.patience, GONE):
                raise TimeoutError("the engine's client did not read")
            try:
                data = data[self.sock.send(data):]
            except BlockingIOError:
                pass
            except ConnectionError:
                raise Gone from None

    def close(self):
        """Close now, and let a RST (SO_LINGER) out at once."""
        self.open = self.keep = False
        self.poller.unregister(self.sock)
        self.sock.close()

    def read(self, size=65536):
        if not self.poll(select.POLLIN, self.engine.patience):
            raise TimeoutError("a request stopped arriving at the engine")
        data = self.sock.recv(size)
        if not data:
            raise Gone
        return data

    def read_until(self, mark):
        while mark not in self.buffer:
            self.buffer += self.read()
        line, _, self.buffer = self.buffer.partition(mark)
        return line

    def read_exactly(self, size):
        parts, had = [self.buffer], len(self.buffer)
        while had < size:
            parts.append(self.read())
            had += len(parts[-1])
        data = b"".join(parts)
        self.buffer = data[size:]
        return data[:size]

    def read_head(self):
        first, *lines = self.read_until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ")
        self.served += 1
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return Request(method, path, headers, self.number, self.served)

    def read_body(self):
        request = self.request
        if (request.header("expect") or "").lower() == "100-continue":
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if (request.header("transfer-encoding") or "").lower() == "chunked":
            request.body = self.read_chunks()
        else:
            request.body = self.read_exactly(int(request.header("content-length") or 0))
        self.body_read, request.arrived = True, time.monotonic()

    def read_chunks(self):
        parts = []
        while size := int(self.read_until(b"\r\n").partition(b";")[0], 16):
            parts.append(self.read_exactly(size))
            self.read_until(b"\r\n")
        while self.read_until(b"\r\n"):
            pass
        return b"".join(parts)


class Engine:
    """Listens on 127.0.0.1 from the start; `url` stays the same through stop() and start().

    models      what GET /v1/models lists; [] or None: 503, as an engine that is still loading
    like        "vllm" or "llama"
    embeds      its models are for embeddings, as in vLLM: other routes are not there
    canary      the steps for a gateway's test request, which is among the `probes`; None: as any other
    figures     {name: value} over what its metrics say: kv_cache_usage_perc, iteration_tokens_total_count, ...
    key         if set, /v1 wants it as Bearer, as vLLM does
    idle        seconds until a connection without a request is closed (uvicorn: 5); None: never
    patience    seconds that any wait may take
    requests, probes, connections, active, max_active, faults
    """

    def __init__(self):
        self.hold = _socket(free_port())                   # keeps the port ours while the engine is off
        self.port = self.hold.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.listener, self.changed, self.threads = None, threading.Condition(), set()
        self.active = self.connections = 0
        self.reset()
        self.start()

    def reset(self):
        """Everything as in a new engine; connections stay."""
        with self.changed:
            self.models, self.like, self.key = [dict(m) for m in MODELS], "vllm", None
            self.embeds, self.canary, self.figures, self.template = False, None, {}, TEMPLATES["glm"]
            self.idle, self.patience = 5, 30
            self.scripts, self.answer, self.routes = deque(), None, {}
            self.requests, self.probes, self.learned, self.faults = [], [], [], []
            self.max_active = self.active

    def play(self, *steps):
        """The script for the next POST; scripts queue."""
        with self.changed:
            self.scripts.append(steps)

    def always(self, answer):
        """The steps, or a function of the request that gives them, for every POST that no script waits for."""
        self.answer = answer

    def on(self, path, answer):
        """The same for one path and any method, /v1/models and /tokenize too; it goes before everything else."""
        self.routes[path] = answer

    # off and on

    def start(self):
        if self.listener:
            return
        self.stopping, self.listener = False, _socket(self.port)
        self.listener.listen(1024)
        name = f"engine-{self.port}-acceptor"
        self.acceptor = threading.Thread(target=self._accept, args=[self.listener], name=name, daemon=True)
        self.acceptor.start()

    def stop(self):
        """Off: connections are refused, open ones are closed, no thread is left."""
        if not self.listener:
            return
        self.stopping = True
        self.listener.shutdown(socket.SHUT_RDWR)    # wakes accept()
        self.acceptor.join(5)
        self.listener.close()
        self.listener = None
        with self.changed:
            threads = list(self.threads)
        for thread in threads:
            _hang_up(thread.sock)
        for thread in threads:
            thread.join(5)
        if self.threads:
            raise RuntimeError(f"threads that don't end: {self.threads}")

    def close(self):
        self.stop()
        self.hold.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # waiting

    def wait_until(self, true, seconds=5):
        """Until true() holds, looked at whenever something happens here."""
        with self.changed:
            if not self.changed.wait_for(true, seconds):
                raise AssertionError(f"waited {seconds} s for nothing: {self}")

    def wait_for(self, count, seconds=5):
        """The requests, as soon as there are `count`."""
        self.wait_until(lambda: len(self.requests) >= count, seconds)
        return self.requests

    def wait_idle(self, seconds=5):
        self.wait_until(lambda: not self.active, seconds)

    def __repr__(self):
        return f"<Engine {self.port}: {self.active} active, requests {self.requests}, faults {self.faults}>"

    # in the threads

    def _accept(self, listener):
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self._take(sock)

    def _take(self, sock):
        with self.changed:
            self.connections += 1
            connection = Connection(self, sock, self.connections)
            self.threads.add(connection)
        connection.start()

    def _closed(self, connection):
        with self.changed:
            self.threads.discard(connection)
            self.changed.notify_all()

    def _early(self, request):
        """The next script, if it wants to be played before the body is read."""
        with self.changed:
            if request.method == "POST" and self.scripts and self.scripts[0] and isinstance(self.scripts[0][0], Early):
                return self.scripts.popleft()

    def _perform(self, connection, request, early):
        path = request.path.partition("?")[0]
        if is_canary(request, path):
            self.probes.append(request)
            try:
                return connection.play(self.canary or self._routed(request, path) or default_answer(self, request))
            except Gone:
                request.gone.set()
                raise
        if request.method != "POST" or path in PROBES:
            own = any(words in request.body or words in request.path.encode() for words in OWN)
            (self.learned if own else self.probes).append(request)
            return connection.play(self._routed(request, path) or probe_answer(self, request))
        with self.changed:
            self.requests.append(request)
            self.active += 1
            self.max_active = max(self.max_active, self.active)
            self.changed.notify_all()
        became = None
        try:
            connection.play(early or self._answer(request, path))
            became = request.finished
        except Gone:
            became, request.gone_at = request.gone, time.monotonic()
            raise
        finally:
            with self.changed:
                self.active -= 1
                if became:
                    became.set()
                self.changed.notify_all()

    def _routed(self, request, path):
        if self.key and path.startswith("/v1/") and request.header("authorization") != f"Bearer {self.key}":
            return [Json({"error": "Unauthorized"}, 401)]
        return _steps(self.routes.get(path), request)

    def _answer(self, request, path):
        return (self._routed(request, path) or self._next() or _steps(self.answer, request)
                or default_answer(self, request))

    def _next(self):
        with self.changed:
            return self.scripts.popleft() if self.scripts else None


def _steps(answer, request):
    return answer(request) if callable(answer) else answer


def _socket(port):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def _hang_up(sock):
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
