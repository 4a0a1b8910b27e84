"""What Anthropic's clients are refused with.

Source: Anthropic's reference of errors; what Claude Code looks for in an error's message.
"""

from engines.kinds import lengths_of
from errors import InvalidRequest
from values import dumps

# error.type by status; of the others a 4xx is an invalid_request_error, a 5xx an api_error
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
TOO_LONG = "prompt is too long: {prompt} tokens > {most} maximum"


def invalid(where, problem):
    """The refusal of a field; its message begins with the field's place, as Anthropic's do.

    where  the place, such as messages.2.content.0.source; its first part is the error's `param`
    """
    return InvalidRequest(f"{where}: {problem}", where.partition(".")[0])


def refusal(error):
    """A Refusal in Anthropic's shape, as bytes."""
    said = {"type": type_of(error.status), "message": message_of(error)}
    return dumps({"type": "error", "error": said})


def type_of(status):
    if status in TYPES:
        return TYPES[status]
    if status < 500:
        return "invalid_request_error"
    return "api_error"


def message_of(error):
    """Its message. One of a prompt that is too long has the words at which Claude Code compacts."""
    if error.code != "context_length_exceeded":
        return error.message
    if lengths := lengths_of(error.message):
        return TOO_LONG.format(**lengths)
    return f"prompt is too long: {error.message}"
