"""The routes. A WSGI app that makes a Call for each request and releases it; the Flask app behind it has the small routes.

Requests for a completion are answered ahead of Flask, which would double what they cost.
"""

import hmac
import ipaddress
import secrets
from http.client import responses as PHRASES
from itertools import chain
from time import time

import gevent
from flask import Flask, Response, redirect, request
from werkzeug.exceptions import HTTPException
from werkzeug.wsgi import ClosingIterator

import call as calls
from front.body import Body
from store import ledger
from dialects import chat, completions, embeddings, messages
from dialects.messages import count as messages_count
from dialects.responses import Responses
from errors import Forbidden, InvalidRequest, MethodNotAllowed, NotFound
from front.routes import ROUTES
from stream import dumps

DIALECTS = {  # the routes that ask a model, and who reads them
    "/v1/chat/completions": chat,
    "/v1/messages": messages,
    "/v1/messages/count_tokens": messages_count,
    "/v1/responses": Responses(time, lambda: secrets.token_hex(24)),
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
}
PIECE = 1 << 16  # bytes of a plain answer in one write
MOST_ECHO = 8 << 20  # bytes of a request that its answer repeats: no context is as long
JSON = ("Content-Type", "application/json")
STREAM_HEADERS = [
    ("Content-Type", "text/event-stream; charset=utf-8"),
    ("Cache-Control", "no-cache, no-transform"),
    ("X-Accel-Buffering", "no"),
]
HELP_HEADERS = {"Vary": "Accept", "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
EXISTING = ", ".join(f"{route.method} {route.path}" for route in ROUTES)


# ---- the front


def create_app(gateway, keyring, metrics):
    """The app over a Gateway, a Keyring and Metrics."""
    app = small_routes(gateway, keyring, metrics)
    app.wsgi_app = front(gateway, keyring, app.wsgi_app)
    return app


def front(gateway, keyring, small):
    """The one place that makes a Call and releases it, whatever becomes of the response."""

    def application(environ, start_response):
        call = environ["sparks.call"] = calls.Call(
            gateway, environ, Body(environ, gateway.bodies, gateway.settings.max_body)
        )
        path = "/" + environ["PATH_INFO"].strip(
            "/"
        )  # as Flask's router reads it: base URLs end with slashes
        try:
            if environ["REQUEST_METHOD"] == "POST" and path in DIALECTS:
                answer = complete(call, path, keyring, environ, start_response)
            else:
                answer = small(environ, start_response)
            return ClosingIterator(answer, call.close)
        except BaseException as error:
            if isinstance(error, Exception):  # such as a header that may not be sent
                call.settle(500, calls.as_refusal(error))
            call.close()
            raise

    return application


def complete(call, path, keyring, environ, start_response):
    """A request for a completion, through the dialect of that path."""
    call.route, dialect = f"POST {path}", DIALECTS[path]
    try:
        check_edge(environ, call.gateway.settings)
        call.key = key_of(environ, keyring)
        headers, answer = serve(call, dialect)
        status = 200
    except Exception as error:
        refusal = calls.as_refusal(error)
        call.settle(refusal.status, refusal)
        status, answer = refusal.status, [dialect.refusal(refusal)]
        headers = [JSON, ("Content-Length", str(len(answer[0]))), *refusal.headers.items()]
    start_response(f"{status} {PHRASES.get(status, 'Unknown')}", [*headers, *stamp(call)])
    return answer


def serve(call, dialect):
    """(headers, body) of the answer. Raises Refusal."""
    body = call.body.read(call.key.id)
    call.attend()
    ask = dialect.read(body, call.gateway.fleet.seen_by(call.key))
    ask.body, ask.count = call.body.restore(ask.body), ask.count and call.body.restore(ask.count)
    if ask.echo:
        ask.echo[:] = [whole_echo(call.body.restore(ask.echo))]
    del body
    if ask.stream is None:
        body = (
            calls.answer_whole(call, ask, dialect.write)
            if ask.path
            else dialect.write(calls.count_prompt(call, ask), ask)[0]
        )
        return [JSON, ("Content-Length", str(len(body)))], pieces(body)
    events = calls.relay(call, ask)
    first = next(events)  # a Refusal here is still an HTTP status
    return STREAM_HEADERS, chain([first], events)


def whole_echo(parts):
    """What an answer repeats of its request, as bytes: a stream says it three times, so there is less of it than of a body."""
    if sum(map(len, parts)) > MOST_ECHO:
        raise InvalidRequest(
            f"instructions, tools and text.format hold over {MOST_ECHO >> 20} MB together, and each answer "
            "repeats them; send long texts in `input`",
            "instructions",
        )
    return b"".join(parts)


def pieces(body):
    """A body in pieces, each of which the client has its time to take."""
    return (
        [body]
        if len(body) <= PIECE
        else (body[at : at + PIECE] for at in range(0, len(body), PIECE))
    )


def check_edge(environ, settings):
    """Raises Forbidden for a request that did not come through the proxy in front."""
    secret = settings.edge_secret
    if secret and not same(environ.get("HTTP_X_SPARKS_EDGE", ""), secret):
        raise Forbidden(
            "this request did not come through the public address; use the base URL in /help"
        )


def same(given, secret):
    """Equal, in constant time, for any text."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())


def key_of(environ, keyring):
    """The Key of a request. Raises InvalidKey."""
    return keyring.check(environ.get("HTTP_AUTHORIZATION"), environ.get("HTTP_X_API_KEY"))


def stamp(call):
    """The headers that every response gets, as pairs."""
    headers = [
        ("x-request-id", call.id),
        ("request-id", call.id),
    ]  # OpenAI's name for it, and Anthropic's
    if call.key:
        headers += call.gateway.gate.standing(
            call.key.id, call.key.limits, calls.steady_time()
        ).items()
        if call.queued_ms is not None:
            headers.append(("x-sparks-queue-ms", str(call.queued_ms)))
    if call.body.breaks:
        gevent.getcurrent().close_after()  # the rest of its body is not read: the connection ends here
    return headers


# ---- the small routes


def small_routes(gateway, keyring, metrics):
    """The Flask app with all routes but those of DIALECTS, which it only knows to tell a wrong method from a wrong path."""
    app = Flask(__name__, static_folder=None)
    app.url_map.strict_slashes = app.url_map.merge_slashes = False  # a redirect would be HTML
    views = {
        "/v1/models": lambda: list_models(gateway),
        "/v1/models/{id}": lambda id: one_model(gateway, id),
        "/help": lambda: show_help(gateway),
        "/llms.txt": lambda: show_help(gateway),
        "/v1/usage": lambda: own_usage(gateway),
        "/metrics": lambda: show_metrics(keyring, metrics),
        "/healthz": lambda: json_response({"ok": True}),
    }
    for route in ROUTES:  # /help and the 404 message list the same table
        app.add_url_rule(route.rule, route.path, views.get(route.path), methods=[route.method])
    app.add_url_rule(
        "/", "root", lambda: "" if request.method == "HEAD" else redirect("/help"), methods=["GET"]
    )
    app.before_request(lambda: admit(keyring, gateway.settings))
    app.after_request(finish)
    app.register_error_handler(Exception, refused)
    return app


def admit(keyring, settings):
    """The edge, then the key."""
    if not request.path.startswith("/v1"):
        return
    call = request.environ["sparks.call"]
    rule = request.url_rule  # of ours: a client's own words stay out of the log
    call.route = f"{request.method} {rule}" if rule else "unknown"
    check_edge(request.environ, settings)
    if request.routing_exception is None:
        call.key = key_of(request.environ, keyring)


def finish(response):
    """The request has nothing more to hold."""
    call = request.environ["sparks.call"]
    call.settle(response.status_code, request.environ.get("sparks.refusal"))
    response.headers.extend(stamp(call))
    return response


def json_response(value, status=200, headers=None):
    return Response(dumps(value), status, headers, mimetype="application/json")


def model_object(model):
    """A model as OpenAI's clients know it, Anthropic's, and those that look for its context."""
    names = ("max_model_len", "context_length", "context_window", "max_input_tokens")
    return {
        "id": model.id,
        "object": "model",
        "created": 0,
        "owned_by": "sparks-gateway",
        "type": "model",
        "display_name": model.id,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        **(dict.fromkeys(names, model.context) if model.context else {}),
    }


def list_models(gateway):
    models, more = page_of(view_of(gateway).listed(), request.args)
    found = [model_object(model) for model in models]
    return json_response(
        {
            "object": "list",
            "data": found,
            "has_more": more,
            "first_id": found[0]["id"] if found else None,
            "last_id": found[-1]["id"] if found else None,
        }
    )


def page_of(models, args):
    """(the models that a client pages to, whether there are more in that direction). Anthropic's `limit`, `after_id` and
    `before_id`; without them all. Raises InvalidRequest."""
    given = args.get("limit", "1000")
    if not given.isascii() or not given.isdigit() or not 1 <= int(given[:9]) <= 1000:
        raise InvalidRequest("limit must be a whole number from 1 to 1000", "limit")
    limit, ids = int(given), [model.id for model in models]
    for name in ("after_id", "before_id"):
        if name in args and args[name] not in ids:
            raise InvalidRequest(f"{name} names no model of this list", name)
    if "before_id" in args:
        models = models[: ids.index(args["before_id"])]
        return models[-limit:], len(models) > limit
    models = models[ids.index(args["after_id"]) + 1 :] if "after_id" in args else models
    return models[:limit], len(models) > limit


def one_model(gateway, name):
    return json_response(model_object(view_of(gateway).find(name)))


def view_of(gateway):
    return gateway.fleet.seen_by(request.environ["sparks.call"].key)


def own_usage(gateway):
    """The caller's own totals and limits."""
    key, now = request.environ["sparks.call"].key, time()
    day = ledger.utc_day(now)
    return json_response(
        {
            "object": "usage",
            "key": key.name,
            "limits": {**key.limits._asdict(), "models": key.models or None},
            "active": gateway.gate.account(key.id).active,
            "queued": gateway.gate.account(key.id).waiting,
            "today": ledger.total(key.id, day),
            "this_month": ledger.total(key.id, day[:8] + "01"),
            "total": ledger.total(key.id),
            "expires": key.expires,
        }
    )


def show_metrics(keyring, metrics):
    """For this machine alone, unless a proxy speaks for somebody else; or for an admin's key."""
    if not from_here(request):
        key = keyring.check(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))
        if not key.admin:
            raise Forbidden(
                "metrics are for this machine, or for an admin's key (./run.sh keys add NAME --admin)"
            )
    return Response(metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")


def from_here(request):
    proxied = any(
        name in request.headers
        for name in ("X-Forwarded-For", "CF-Connecting-IP", "Forwarded", "X-Real-IP")
    )
    address = ipaddress.ip_address(request.remote_addr)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback and not proxied


def show_help(gateway):
    from pages import help as help_page  # what it needs is in memory only where somebody reads it

    form = help_page.form_of(request.headers.get("Accept"), request.args.get("format"))
    body, mimetype = help_page.render(
        gateway.settings,
        [model for model in gateway.fleet.known if not model.hidden],
        public_address(gateway.settings),
        form,
    )
    return Response(body, mimetype=mimetype, headers=HELP_HEADERS)


def public_address(settings):
    """The address that people use, without /v1: the setting, else as this request came in."""
    if settings.base_url:
        return settings.base_url
    scheme = request.headers.get("X-Forwarded-Proto", request.scheme).split(",")[0].strip()
    return f"{scheme if scheme in ('http', 'https') else 'http'}://{request.host}"


# ---- refusals


def refused(error):
    """Any exception as an answer."""
    allowed = (
        {"Allow": ", ".join(sorted(error.valid_methods))}
        if getattr(error, "valid_methods", None)
        else {}
    )
    if isinstance(error, HTTPException):
        error = from_werkzeug(error)
    refusal = request.environ["sparks.refusal"] = calls.as_refusal(error)
    body = messages.refusal(refusal) if speaks_anthropic(request) else chat.refusal(refusal)
    return Response(
        body, refusal.status, {**allowed, **refusal.headers}, mimetype="application/json"
    )


def speaks_anthropic(request):
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def from_werkzeug(error):
    where = f"{request.method} {request.path[:200]}"
    if error.code == 404:
        return NotFound(f"{where} is nothing here; there are {EXISTING}")
    if error.code == 405:
        return MethodNotAllowed(f"{where} is not allowed; there are {EXISTING}")
    if error.code is not None and 400 <= error.code < 500:
        return InvalidRequest(f"the request cannot be read: {error.name}", status=error.code)
    return error
