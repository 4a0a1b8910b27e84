"""Refusals: everything Sparks says no with. Raising one *is* answering: `sparks.py` renders it in the caller's shape.

Source: the errors table of the gateway's specification; OpenAI's error object.
"""
import re

from greenlet import GreenletExit

# What `error.type` says for a status, in OpenAI's words; anything else is an api_error.
TYPES = {
    400: "invalid_request_error", 401: "invalid_request_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "invalid_request_error", 413: "invalid_request_error",
    415: "invalid_request_error", 422: "invalid_request_error", 429: "rate_limit_error",
}

RETRY_AFTER = 5                                     # seconds after which an engine that is off is worth another try
MAX_MESSAGE = 2000                                  # characters of an engine's message; some repeat the whole prompt


class Refusal(Exception):
    """An answer that is an error.

    message      what is wrong and what to do about it; `param` names the field at fault
    status, code HTTP status and the short word that programs read
    retry_after  whole seconds until it makes sense to come back, or None
    headers      further response headers
    """

    status, code = 400, "invalid_request"
    final = False                                   # trying again cannot help, whatever the status says

    def __init__(self, message, param=None, *, status=None, code=None, retry_after=None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status or self.status
        self.code = code or self.code
        self.retry_after = retry_after

    @property
    def type(self):
        """OpenAI's name for the kind of error."""
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    @property
    def headers(self):
        """Response headers that go with it, as a dict."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.permanent:
            headers["x-should-retry"] = "false"
        return headers

    @property
    def permanent(self):
        """Whether the same request would be refused again: some clients try all the same, for a minute, unless told."""
        return self.final or 400 <= self.status < 500 and self.status not in (408, 429)


class InvalidRequest(Refusal): "The request is at fault; `param` names the field."
class InvalidKey(Refusal): status, code, final = 401, "invalid_api_key", True
class Forbidden(Refusal): status, code = 403, "forbidden"
class ModelNotAllowed(Refusal): status, code = 403, "model_not_allowed"
class NotFound(Refusal): status, code = 404, "not_found"
class ModelNotFound(Refusal): status, code = 404, "model_not_found"
class MethodNotAllowed(Refusal): status, code = 405, "method_not_allowed"
class BodyTimeout(Refusal): status, code = 408, "request_timeout"
class TooLarge(Refusal): status, code = 413, "request_too_large"
class UnsupportedEncoding(Refusal): status, code = 415, "unsupported_encoding"
class LimitExceeded(Refusal): status, code = 429, "rate_limit_exceeded"
class QuotaExceeded(Refusal): status, code, final = 429, "quota_exceeded", True
class QueueFull(Refusal): status, code = 429, "queue_full"
class InternalError(Refusal): status, code = 500, "internal_error"
class UpstreamError(Refusal): status, code = 502, "upstream_error"
class ModelUnavailable(Refusal): status, code = 503, "model_unavailable"
class Overloaded(Refusal): status, code = 503, "overloaded"
class ShuttingDown(Refusal): status, code = 503, "shutting_down"
class UpstreamTimeout(Refusal): status, code = 504, "upstream_timeout"


class ClientGone(GreenletExit):
    """The client has left. Not an Exception, so that nobody takes it for an engine's fault."""


class SettingsError(Exception):
    """A setting that stops the start; its text is one line that names the setting."""


# ---- shapes

def error_body(refusal):
    """A refusal in OpenAI's shape, as a dict."""
    return {"error": {"message": refusal.message, "type": refusal.type, "code": refusal.code, "param": refusal.param}}


CODES = {400: "invalid_request", 404: "not_found", 413: "request_too_large", 422: "invalid_request",
         429: "rate_limit_exceeded", 503: "model_unavailable"}
TOO_LONG = re.compile(r"context (?:length|size|window)|exceed_context_size|too large to process", re.I)
OWN_NAMES = (None, "input_tokens", "input_text")     # of vLLM for what is too long; no client sends them
THE_CLIENTS = re.compile(r"image input is not supported|too large to process", re.I)
MARKUP = re.compile(r"<(?:!doctype|html|body|head)\b|Traceback \(most recent call last\)", re.I)


def from_engine(status, answer, retry_after=None):
    """The Refusal for an engine's error, whatever shape it has.

    status  its HTTP status, or None for an error inside a stream, whose own code then counts; `retry_after` its header
    answer  the parsed JSON (any type), or None if it was no JSON: then a plain sentence stands for it
    """
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    fields = error if isinstance(error, dict) else {"message": error}
    status = status or numeric(fields.get("code")) or 502
    message = message_of(fields) or f"the engine answered with status {status}"
    if not 400 <= status <= 599 or status == 499:   # 499 would say that the client had left
        status = 502
    if status in (401, 403):                        # its key is ours to set, not the client's
        return UpstreamError("the engine refused the gateway's own key; tell the operator to check SPARKS_UPSTREAM_KEY")
    if THE_CLIENTS.search(message):                  # llama.cpp calls a client's mistake a 500
        status = 400
    param = fields.get("param") if isinstance(fields.get("param"), str) else None
    code = CODES.get(status, "invalid_request" if status < 500 else "upstream_error")    # ours: the ledger keeps it
    if status == 400 and TOO_LONG.search(f"{message} {fields.get('type')}"):
        code, param = "context_length_exceeded", "messages" if param in OWN_NAMES else param
    wait = retry_after if retry_after and re.fullmatch(r"[0-9]{1,5}", retry_after) else RETRY_AFTER if status == 503 else None
    return Refusal(message, param, status=status, code=code, retry_after=wait)


def numeric(code):
    if isinstance(code, bool):
        return None
    return int(code) if isinstance(code, int) or isinstance(code, str) and re.fullmatch(r"[0-9]{3}", code) else None


def message_of(fields):
    """The sentence in an engine's error, or None where there is none that a person should see."""
    message = fields.get("message") or fields.get("detail")
    if isinstance(message, list):                   # FastAPI's: [{"loc": [...], "msg": "..."}]
        message = "; ".join(f"{place(item.get('loc'))}: {item.get('msg')}" for item in message if isinstance(item, dict))
    if not isinstance(message, str) or not message.strip() or MARKUP.search(message):
        return None
    return message.strip()[:MAX_MESSAGE]


def place(loc):
    return ".".join(map(str, loc)) if isinstance(loc, list) else str(loc)
