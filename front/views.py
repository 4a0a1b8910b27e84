"""The small routes: a Flask app for all that asks no model, and for what is no route at all."""

import ipaddress
import re
from time import time

from flask import Flask, Response, current_app, redirect, request
from werkzeug.exceptions import HTTPException

from dialects import chat, messages
from errors import Forbidden, InvalidRequest, MethodNotAllowed, NotFound, NoWebSocket
from faults import as_refusal
from front.edge import (
    check_edge,
    check_key,
    identify,
    knows_edge,
    preflight_headers,
    response_headers,
)
from front.routes import ROUTES, existing
from pages import help
from store import ledger
from values import dumps

MOST_MODELS = 1000  # on one page of the list
KEYLESS_READ = 30  # seconds for an answer to be taken by a client that has shown no key
CONTEXT_NAMES = ("max_model_len", "context_length", "context_window", "max_input_tokens")
# What Anthropic's reference always has in a model, though nobody here knows it.
NULLS = dict.fromkeys(
    ("capabilities", "deprecated_at", "line", "max_input_tokens", "max_tokens", "retires_at")
)
HELP_HEADERS = {"Vary": "Accept", "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
# The headers, in WSGI's words, that proxies, tunnels and load balancers add: a request with one of
# them came from elsewhere.
PROXIED = re.compile(
    r"HTTP_(?:.*(?:FORWARDED|PROXY).*"
    r"|.*(?:CLIENT|CONNECTING|ORIGINATING|REAL|REMOTE|USER)_?(?:IP|ADDR)"
    r"|VIA|.*_VIA|CDN_LOOP|MAX_FORWARDS|SURROGATE_.*|X_REQUEST_START|X_SCHEME|X_VARNISH"
    r"|(?:CF|CLOUDFRONT|FASTLY|FLY|NGROK|TAILSCALE)_.*"
    r"|X_(?:AKAMAI|AMZ|AMZN|APPENGINE|ARR|AZURE|CLOUD|ENVOY|NGINX|ORIGINAL|TRAEFIK|VERCEL)_.*)"
)


def small_app(gateway, keyring, metrics):
    """The Flask app, as a WSGI application.

    It knows the routes that ask a model only to tell a wrong method from a wrong path.
    """
    app = Flask(__name__, static_folder=None)
    kept = help.Kept()
    app.url_map.strict_slashes = app.url_map.merge_slashes = False  # a redirect would be HTML
    views = {
        "/v1/models": lambda: list_models(gateway),
        "/v1/models/{id}": lambda id: one_model(gateway, id),
        "/help": lambda: show_help(gateway, kept),
        "/llms.txt": lambda: show_help(gateway, kept),
        "/v1/usage": lambda: own_usage(gateway),
        "/metrics": lambda: show_metrics(keyring, metrics, gateway.settings),
        "/healthz": lambda: json_response({"ok": True}),
    }
    for route in ROUTES:
        app.add_url_rule(route.rule, route.path, views.get(route.path), methods=[route.method])
    app.add_url_rule("/", "root", root, methods=["GET"])
    app.before_request(lambda: admit(keyring, gateway.settings))
    app.after_request(finish)
    app.register_error_handler(Exception, refused)
    return app.wsgi_app


def admit(keyring, settings):
    """Before each view: the edge, then the key."""
    keyed = request.path.startswith("/v1")
    call = request.environ["sparks.call"]
    if keyed:
        rule = request.url_rule  # of ours: a client's own words stay out of the log
        call.route = f"{request.method} {rule}" if rule else "unknown"
        check_edge(request.environ, settings)
    if request.method == "OPTIONS":
        return options(settings)
    if keyed and request.routing_exception is None:
        identify(call, request.environ, keyring)
    return None


def options(settings):
    """OPTIONS wants no key, since a browser asks so, without any, before it sends one. None where
    nothing is that could be asked about."""
    headers = preflight_headers(request.environ, settings)
    if request.routing_exception and not headers:
        return None
    response = current_app.make_default_options_response()
    response.status_code = 204
    response.headers.extend(headers)
    return response


def finish(response):
    """After each view: the request has nothing more to hold."""
    call = request.environ["sparks.call"]
    call.settle(response.status_code, request.environ.get("sparks.refusal"))
    if call.key is None:
        call.sock.settimeout(KEYLESS_READ)
    if response.mimetype == "application/json":
        response.headers["Cache-Control"] = "no-store"
    response.headers.extend(response_headers(call, request.environ))
    return response


def json_response(value, status=200, headers=None):
    return Response(dumps(value), status, headers, mimetype="application/json")


# ---- models


def list_models(gateway):
    """GET /v1/models: OpenAI's list, with what Anthropic's clients need to page through it."""
    models, more = page_of(view_of(gateway).listed(), request.args)
    ids = [model.id for model in models] or [None]
    return json_response(
        {
            "object": "list",
            "data": [model_object(model) for model in models],
            "has_more": more,
            "first_id": ids[0],
            "last_id": ids[-1],
        }
    )


def one_model(gateway, name):
    return json_response(model_object(view_of(gateway).find(name)))


def view_of(gateway):
    return gateway.fleet.seen_by(request.environ["sparks.call"].key)


def model_object(model):
    """A model as OpenAI's clients know it, Anthropic's, and those that look for its context."""
    found = {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "sparks-gateway",
        "type": "model",
        "display_name": model.id,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
    }
    if model.context:
        found |= dict.fromkeys(CONTEXT_NAMES, model.context)
    if speaks_anthropic(request):
        found = {**NULLS, **found}
    return found


def page_of(models, args):
    """(the models that a client pages to, whether there are more in that direction).

    `args` may hold Anthropic's `limit`, `after_id` and `before_id`; without them all models are
    given. Raises InvalidRequest.
    """
    limit = limit_of(args.get("limit", str(MOST_MODELS)))
    ids = [model.id for model in models]
    for name in ("after_id", "before_id"):
        if name in args and args[name] not in ids:
            raise InvalidRequest(f"{name} names no model of this list", name)
    if "before_id" in args:
        models = models[: ids.index(args["before_id"])]
        return models[-limit:], len(models) > limit
    if "after_id" in args:
        models = models[ids.index(args["after_id"]) + 1 :]
    return models[:limit], len(models) > limit


def limit_of(given):
    digits = given.isascii() and given.isdigit()
    if not digits or not 1 <= int(given[:9]) <= MOST_MODELS:  # int() refuses thousands of digits
        raise InvalidRequest(f"limit must be a whole number from 1 to {MOST_MODELS}", "limit")
    return int(given)


# ---- usage, metrics, help


def own_usage(gateway):
    """GET /v1/usage: the caller's own totals and limits; those of one of the people behind a key,
    where the request says who asks."""
    call = request.environ["sparks.call"]
    key = call.key
    account = gateway.gate.account(call.account)
    day = ledger.utc_day(time())
    first = day[:8] + "01"
    last = day[:8] + "31"
    person = {"person": call.person} if call.person else {}
    limits = {**key.limits._asdict(), "models": key.models or None, "batch": key.batch}
    return json_response(
        {
            "object": "usage",
            "key": key.name,
            **person,
            "limits": limits,
            "active": account.active,
            "queued": account.waiting,
            "today": ledger.total(key.id, day, day, call.person),
            "this_month": ledger.total(key.id, first, last, call.person),
            "total": ledger.total(key.id, person=call.person),
            "expires": key.expires,
        }
    )


def show_metrics(keyring, metrics, settings):
    """GET /metrics: for this machine, unless a proxy on it speaks for another, or an admin's
    key."""
    if not is_ours(request, settings) and not check_key(request.environ, keyring).admin:
        raise Forbidden(
            "metrics are for this machine, or for an admin's key (./run.sh keys add NAME --admin)"
        )
    return Response(metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")


def is_ours(request, settings):
    """Whether it came from this machine, and not through a proxy on it.

    Where the settings say that there is a proxy, not every proxy says so itself, and the edge's
    secret tells who it is. A proxy that adds the secret adds it to everybody's requests.
    """
    if not from_here(request) or any(map(PROXIED.fullmatch, request.environ)):
        return False
    if settings.edge_secret:
        return knows_edge(request.environ, settings)
    return not settings.base_url


def from_here(request):
    """Whether the other end of the connection is on this machine."""
    address = ipaddress.ip_address(request.remote_addr)
    mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1, where it listens on [::]
    return (mapped or address).is_loopback


def show_help(gateway, kept):
    """GET /help and /llms.txt, in the form that the client takes. `kept`: help.Kept."""
    body, mimetype = kept.render(
        gateway.settings,
        [model for model in gateway.fleet.known if not model.hidden],
        public_address(gateway.settings),
        help.form_of(request.headers.get("Accept"), request.args.get("format")),
    )
    return Response(body, mimetype=mimetype, headers=HELP_HEADERS)


def public_address(settings):
    """The address that people use, without /v1: the setting, else as this request came in."""
    if settings.base_url:
        return settings.base_url
    scheme = request.headers.get("X-Forwarded-Proto", request.scheme).split(",")[0].strip()
    if scheme not in ("http", "https"):
        scheme = "http"
    # Not request.host, which is empty for names with an underscore, as containers have them.
    host = request.environ.get("HTTP_HOST") or in_url(request.environ)
    return f"{scheme}://{host.removesuffix(':')}"


def in_url(environ):
    """The address that a request came to, where it doesn't say its host."""
    name = environ["SERVER_NAME"]
    if ":" in name:
        name = f"[{name}]"
    return f"{name}:{environ['SERVER_PORT']}"


def root():
    """GET /: browsers go to the help. HEAD, which asks only whether anybody is there, gets a
    200."""
    if request.method == "HEAD":
        return ""
    return redirect("/help")


# ---- refusals


def refused(error):
    """Any exception as a response."""
    headers = {}
    if getattr(error, "valid_methods", None):  # a 405 must name them (RFC 9110 15.5.6)
        headers["Allow"] = ", ".join(sorted(error.valid_methods))
    if isinstance(error, HTTPException):
        error = from_werkzeug(error)
    refusal = request.environ["sparks.refusal"] = as_refusal(error)
    refusal.request_id = request.environ["sparks.call"].id
    headers |= refusal.headers
    dialect = messages if speaks_anthropic(request) else chat
    return Response(dialect.refusal(refusal), refusal.status, headers, mimetype="application/json")


def speaks_anthropic(request):
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def from_werkzeug(error):
    """An exception of Flask's router as a Refusal; a server's error stays as it is."""
    where = f"{request.method} {request.path[:200]}"
    if error.code == 404:
        return NotFound(f"{where} is nothing here; there are {existing()}")
    # The router refuses a WebSocket with 400 where a GET would do.
    if error.code in (400, 405) and request.headers.get("Upgrade", "").lower() == "websocket":
        return NoWebSocket(f"{where} speaks no WebSocket; send a POST, with stream: true")
    if error.code == 405:
        return MethodNotAllowed(f"{where} is not allowed; there are {existing()}")
    if error.code is not None and 400 <= error.code < 500:
        return InvalidRequest(f"the request cannot be read: {error.name}", status=error.code)
    return error
