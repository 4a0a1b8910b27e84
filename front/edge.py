"""What every request must show, and what every response carries, whoever answers it."""

import hmac

import gevent

from call import steady_time
from errors import Forbidden


def check_edge(environ, settings):
    """Raises Forbidden for a request that did not come through the proxy in front."""
    secret = settings.edge_secret
    if not secret:
        return
    # As bytes, surrogates and all: compare_digest takes no text that is not ASCII.
    given = environ.get("HTTP_X_SPARKS_EDGE", "").encode("utf-8", "surrogateescape")
    if not hmac.compare_digest(given, secret.encode()):
        raise Forbidden(
            "this request did not come through the public address; use the base URL in /help"
        )


def check_key(environ, keyring):
    """The Key of a request. Raises InvalidKey."""
    return keyring.check(environ.get("HTTP_AUTHORIZATION"), environ.get("HTTP_X_API_KEY"))


def response_headers(call):
    """The headers of every response, as pairs."""
    headers = [
        ("x-request-id", call.id),  # as OpenAI calls it
        ("request-id", call.id),  # as Anthropic does
    ]
    if call.key:
        headers += call.gateway.gate.standing(call.key.id, call.key.limits, steady_time()).items()
        if call.queued_ms is not None:
            headers.append(("x-sparks-queue-ms", str(call.queued_ms)))
    if call.body.breaks:
        # The rest of its body is not read: the connection ends. See Worker.handle_request.
        gevent.getcurrent().close_after()
    return headers
