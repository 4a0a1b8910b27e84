"""What every request must show, and what every response carries, whoever answers it."""

import hmac
import re

import gevent

from errors import Forbidden, InvalidRequest

# What scripts of another origin may read of an answer, beside its body.
EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "x-should-retry",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-reset-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-tokens",
    "x-sparks-queue-ms",
    "x-sparks-ignored",
)
# All of them: a script then reads the 404 or 405, and not that its own browser held it up.
METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
PREFLIGHT_AGE = "600"  # seconds for which a browser need not ask again
NAMES = re.compile(r"[!#-'*+.^-z|~\w-]+( *, *[!#-'*+.^-z|~\w-]+)*", re.ASCII)  # RFC 9110 5.1


def check_edge(environ, settings):
    """Raises Forbidden for a request that did not come through the proxy in front."""
    if settings.edge_secret and not knows_edge(environ, settings):
        raise Forbidden(
            "this request did not come through the public address; use the base URL in /help"
        )


def knows_edge(environ, settings):
    """Whether a request carries the secret that is set."""
    # As bytes, surrogates and all: compare_digest takes no text that is not ASCII.
    given = environ.get("HTTP_X_SPARKS_EDGE", "").encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, settings.edge_secret.encode())


def check_key(environ, keyring):
    """The Key of a request. Raises InvalidKey."""
    return keyring.check(environ.get("HTTP_AUTHORIZATION"), environ.get("HTTP_X_API_KEY"))


def identify(call, environ, keyring):
    """Find out whose request it is: the Call's key, and who of the people behind that. Raises
    InvalidKey, InvalidRequest."""
    call.key = check_key(environ, keyring)
    header = call.key.trusts
    if not header:
        return
    name = "HTTP_" + header.upper().replace("-", "_")
    if name in environ["sparks.repeated"]:  # a client's own beside that of a proxy, perhaps
        raise InvalidRequest(f"the header {header} came more than once; send it once", header)
    call.person = call.gateway.person(call.key, environ.get(name, ""))


def response_headers(call, environ):
    """The headers of every response, as pairs."""
    headers = [
        *cors_headers(environ, call.gateway.settings),
        ("x-request-id", call.id),  # as OpenAI calls it
        ("request-id", call.id),  # as Anthropic does
    ]
    if call.key:
        gateway = call.gateway
        account = gateway.gate.account(call.account)
        headers += account.standing(call.key.limits, gateway.now()).items()
        if call.queued_ms is not None:
            headers.append(("x-sparks-queue-ms", str(call.queued_ms)))
    if call.body.breaks:
        # The rest of its body is not read: the connection ends. See Worker.handle_request.
        gevent.getcurrent().close_after()
    return headers


# ---- pages of other origins (the Fetch standard, "CORS protocol")


def cors_headers(environ, settings):
    """What lets a script of another origin read the response, as pairs; none without the setting
    cors_origins, and none for what is not meant for scripts."""
    if not settings.cors_origins:
        return []
    path = "/" + environ["PATH_INFO"].strip("/")
    if path != "/help" and not f"{path}/".startswith("/v1/"):
        return []
    return headers_for(allowed_origin(environ.get("HTTP_ORIGIN", ""), settings.cors_origins))


def headers_unread(settings):
    """The same for the refusal of what cannot be read, not even its Origin: a script reads it if
    only its own page can be meant."""
    if not settings.cors_origins:
        return []
    if "*" in settings.cors_origins:
        return headers_for("*")
    return headers_for(settings.cors_origins[0] if len(settings.cors_origins) == 1 else None)


def headers_for(origin):
    """Those that let scripts of an origin, or of none, read a response."""
    headers = [("Vary", "Origin")]
    if origin:
        headers += [
            ("Access-Control-Allow-Origin", origin),
            ("Access-Control-Expose-Headers", ", ".join(EXPOSED)),
        ]
    return headers


def allowed_origin(origin, origins):
    """The value of Access-Control-Allow-Origin, or None."""
    if "*" in origins:
        return "*"  # no cookie lets anybody in here, so it need not be the one that asks
    if origin.lower() in origins:
        return origin
    return None


def preflight_headers(environ, settings):
    """What an answer to OPTIONS says beside cors_headers, as pairs: what a script may send. None
    for an origin that may send nothing."""
    if len(cors_headers(environ, settings)) < 2:
        return []
    headers = [("Access-Control-Allow-Methods", METHODS), ("Access-Control-Max-Age", PREFLIGHT_AGE)]
    # By their names, which "*" would not do for Authorization; clients have headers of their own.
    asked = environ.get("HTTP_ACCESS_CONTROL_REQUEST_HEADERS", "")
    if NAMES.fullmatch(asked):
        headers.append(("Access-Control-Allow-Headers", asked))
    # A page of the internet may use a gateway of its own network (WICG, Private Network Access).
    if environ.get("HTTP_ACCESS_CONTROL_REQUEST_PRIVATE_NETWORK") == "true":
        headers.append(("Access-Control-Allow-Private-Network", "true"))
    return headers
