"""Refusals: everything Sparks says no with. Raising one *is* answering.

The dialect of the request writes it in the caller's shape; where there is no dialect, as for an
unknown path, the front does, in OpenAI's.

Source: the errors table of the gateway's specification; OpenAI's error object.
"""

from greenlet import GreenletExit

# What `error.type` says for a status, in OpenAI's words. Of the others, those from 500 on are an
# api_error, those below it an invalid_request_error.
TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}

RETRY_AFTER = 5  # seconds after which an engine that is off is worth another try


class Refusal(Exception):
    """An answer that is an error.

    message      what is wrong and what to do about it; `param` names the field at fault
    status, code HTTP status and the short word that programs read
    retry_after  whole seconds until it makes sense to come back, or None
    headers      further response headers
    request_id   of the request that it answers, once that is known
    """

    status = 400
    code = "invalid_request"
    final = False  # trying again cannot help, whatever the status says
    not_begun = False  # the engine has done nothing of the work: another one may be asked
    request_id = None

    def __init_subclass__(cls, *, status=None, code=None, final=None):
        """class Strange(Refusal, status=418, code="strange"): what is not given is inherited."""
        if status is not None:
            cls.status = status
        if code is not None:
            cls.code = code
        if final is not None:
            cls.final = final

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
        other = "invalid_request_error"
        if self.status >= 500:
            other = "api_error"
        return TYPES.get(self.status, other)

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
        """Whether the same request would be refused again, so that trying again makes no sense.

        Some clients try all the same, for a minute, unless the header x-should-retry says no.
        """
        return self.final or (400 <= self.status < 500 and self.status not in (408, 429))


# ---- the request is at fault


class InvalidRequest(Refusal, status=400, code="invalid_request"): ...


class InvalidKey(Refusal, status=401, code="invalid_api_key", final=True): ...


class Forbidden(Refusal, status=403, code="forbidden"): ...


class ModelNotAllowed(Refusal, status=403, code="model_not_allowed"): ...


class NotFound(Refusal, status=404, code="not_found"): ...


class ModelNotFound(Refusal, status=404, code="model_not_found"): ...


class MethodNotAllowed(Refusal, status=405, code="method_not_allowed"): ...


class NoWebSocket(Refusal, status=426, code="upgrade_required"):
    """At this status Codex turns to plain requests at once; it would try others five times."""

    @property
    def headers(self):
        return super().headers | {"Upgrade": "HTTP/1.1"}  # RFC 9110 15.5.22


class BodyTimeout(Refusal, status=408, code="request_timeout"): ...


class TooLarge(Refusal, status=413, code="request_too_large"): ...


class UnsupportedEncoding(Refusal, status=415, code="unsupported_encoding"): ...


# ---- too much at once, or of a key's share


class LimitExceeded(Refusal, status=429, code="rate_limit_exceeded"): ...


class QuotaExceeded(Refusal, status=429, code="quota_exceeded", final=True): ...


class QueueFull(Refusal, status=429, code="queue_full"): ...


# ---- the gateway or the engine is at fault


class InternalError(Refusal, status=500, code="internal_error"): ...


class UpstreamError(Refusal, status=502, code="upstream_error"): ...


class EngineStuck(Refusal, status=502, code="engine_stuck"): ...


class ModelUnavailable(Refusal, status=503, code="model_unavailable"):
    not_begun = True


class Overloaded(Refusal, status=503, code="overloaded"): ...


class Unready(Refusal, status=503, code="database_unavailable"): ...


class ShuttingDown(Refusal, status=503, code="shutting_down"): ...


class UpstreamTimeout(Refusal, status=504, code="upstream_timeout"): ...


# ---- what is no refusal


class ClientGone(GreenletExit):
    """The client has left. Not an Exception, so that nobody takes it for an engine's fault."""


class SettingsError(Exception):
    """A setting that stops the start; its text is one line that names the setting."""


# ---- shapes


def error_body(refusal):
    """A refusal in OpenAI's shape, as a dict."""
    return {
        "error": {
            "message": refusal.message,
            "type": refusal.type,
            "code": refusal.code,
            "param": refusal.param,
        }
    }
