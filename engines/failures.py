"""An engine's error, whatever shape it has, as the Refusal that the client gets.

Shapes: OpenAI's {"error": {...}}, {"error": "a sentence"}, FastAPI's {"detail": ...}, or no JSON.
"""

import re

from engines.kinds import CLIENTS_MISTAKE, NOT_BEGUN, PROMPT_FIELDS, TOO_LONG
from errors import RETRY_AFTER, Refusal, UpstreamError

# Statuses of an engine that has another key, has not got the model any more, or has enough to do.
TURNED_AWAY = (401, 403, 404, 429)
MAX_MESSAGE = 2000  # characters of an engine's message; some repeat the whole prompt
LOOKED_AT = 1 << 16  # characters of one that are looked at
MOST_SENTENCES = 100  # of a list of errors
MARKUP = re.compile(r"<(?:!doctype|html|body|head)\b|Traceback \(most recent call last\)", re.I)
# An address, which an engine, or a proxy before it, may name when it fails: the owner's affair.
ADDRESS = re.compile(
    r"\b\w+://|\b\d{1,3}(?:\.\d{1,3}){3}\b|\blocalhost\b"
    r"|\[[0-9a-f]*:[0-9a-f:.]*\]|\b[a-z][\w.-]{0,60}:\d{4,5}\b"
    r"|(?<![\w:])(?=[a-f:]*\d)[0-9a-f:]{0,40}::[0-9a-f:.]{0,40}[0-9a-f]\b"
    r"|\bhost(?:name)?\b ?[=:] ?['\"\w]|\bport ?[=:]? ?\d|\b(?:lookup|ENOTFOUND|EAI_AGAIN) "
    r"|\.(?:local|internal|lan|svc)\b|\.sock\b",
    re.IGNORECASE,
)
CODES = {
    400: "invalid_request",
    404: "not_found",
    413: "request_too_large",
    422: "invalid_request",
    429: "rate_limit_exceeded",
    503: "model_unavailable",
}


def from_engine(status, answer, retry_after=None, page=""):
    """The Refusal for an engine's error.

    status       its HTTP status, or None for an error inside a stream, whose own code then counts
    answer       the parsed JSON (any type), or None if it was none
    retry_after  the header of that name, or None
    page         what it said where that was no JSON: a proxy's page, which people are not shown
    """
    fields = fields_of(answer)
    turned_away = status
    status = status or numeric(fields.get("code")) or 502
    message = message_of(fields) or f"the engine answered with status {status}"
    if status in (401, 403):  # its key is ours to set, not the client's
        refusal = UpstreamError(
            "the engine refused the gateway's own key; tell the operator to check"
            " SPARKS_UPSTREAM_KEY"
        )
        refusal.not_begun = is_turned_away(turned_away, page or message)
        return refusal
    if CLIENTS_MISTAKE.search(message):  # some engines call it a 500
        status = 400
    elif not 400 <= status <= 599 or status == 499:  # 499 would say that the client had left
        status = 502
    shown = message
    if status >= 500 and ADDRESS.search(message):
        shown = f"the engine answered with status {status}"
    param = fields.get("param")
    if not isinstance(param, str):
        param = None
    code = code_of(status)
    if status == 400 and TOO_LONG.search(f"{message} {fields.get('type')}"):
        code = "context_length_exceeded"
        if param in PROMPT_FIELDS:
            param = "messages"
    refusal = Refusal(shown, param, status=status, code=code, retry_after=wait(status, retry_after))
    refusal.not_begun = is_turned_away(turned_away, page or message)
    return refusal


def is_turned_away(status, message):
    """Whether an engine's answer of this HTTP status, if it was none inside a stream, says that it
    has not begun with the request (RFC 6585, 4; RFC 9110, 15.5 and 15.6.4)."""
    return status in TURNED_AWAY or status == 503 and NOT_BEGUN.search(message) is not None


def fields_of(answer):
    """The error object in an engine's answer; one that is a sentence becomes its message."""
    error = answer
    if isinstance(answer, dict):
        error = answer.get("error", answer)
    if isinstance(error, dict):
        return error
    return {"message": error}


def code_of(status):
    """The short word for an engine's status: ours, since the ledger keeps it."""
    if status in CODES:
        return CODES[status]
    if status < 500:
        return "invalid_request"
    return "upstream_error"


def wait(status, retry_after):
    """Seconds until it makes sense to come back, or None."""
    if retry_after and re.fullmatch(r"[0-9]{1,5}", retry_after):
        return retry_after
    if status == 503:
        return RETRY_AFTER
    return None


def numeric(code):
    """An error's own code as a status, or None where it is a word."""
    if isinstance(code, bool):
        return None
    if isinstance(code, int) or isinstance(code, str) and re.fullmatch(r"[0-9]{3}", code):
        return int(code)
    return None


def message_of(fields):
    """The sentence in an engine's error, or None where there is none that a person should see."""
    message = fields.get("message") or fields.get("detail")
    if isinstance(message, list):
        some = message[:MOST_SENTENCES]
        message = "; ".join(sentence(item) for item in some if isinstance(item, dict))
    if isinstance(message, str):
        message = message[:LOOKED_AT]
    if not isinstance(message, str) or not message.strip() or MARKUP.search(message):
        return None
    return message.strip()[:MAX_MESSAGE]


def sentence(item):
    """An entry of FastAPI's list of errors, {"loc": [...], "msg": "..."}, as text."""
    place = item.get("loc")
    if isinstance(place, list):
        place = ".".join(map(str, place))
    return f"{place}: {item.get('msg')}"
