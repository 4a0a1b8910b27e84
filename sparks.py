"""Sparks: the front door of a small GPU cluster. The Flask app, and the server that runs it.

    .venv/bin/python sparks.py [--local]            (./run.sh does that, after setting up)
"""
from gevent import monkey
monkey.patch_all()                                  # before any other import: what they bind must be patched already

import os
for name in ("SCRIPT_NAME", "PROMETHEUS_MULTIPROC_DIR"):    # libraries read them, some while they are imported
    os.environ.pop(name, None)

import argparse
import hmac
import ipaddress
import logging
import sys
from itertools import chain
from time import time
from urllib.parse import urlsplit

import gevent
from flask import Flask, Response, redirect, request
from werkzeug.exceptions import HTTPException
from werkzeug.wsgi import ClosingIterator

import call as calls
import keys
import ledger
import local
import log as log_module
import server
import settings as settings_module
from admission import Gate
from database import database, open_database
from dialects import chat, completions, embeddings
from errors import Forbidden, InvalidRequest, MethodNotAllowed, NotFound, SettingsError, error_body
from metrics import Metrics
from pages import help as help_page
from routes import ROUTES
from stream import dumps
from upstream import Fleet

log = logging.getLogger("sparks")
DIALECTS = {                                        # the routes that ask a model, and who reads them
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
}
PIECE = 1 << 16                                     # bytes of a plain answer in one write
STREAM_HEADERS = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
HELP_HEADERS = {"Vary": "Accept", "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
EXISTING = ", ".join(f"{route.method} {route.path}" for route in ROUTES)


# ---- the app

def create_app(desk, keyring, metrics):
    """The Flask app over a Desk, a Keyring and Metrics."""
    app = Flask(__name__, static_folder=None)
    app.url_map.strict_slashes = app.url_map.merge_slashes = False      # a redirect would be HTML
    completions = {path: lambda dialect=dialect: serve(desk, dialect) for path, dialect in DIALECTS.items()}
    views = {
        **completions,
        "/v1/models": lambda: list_models(desk),
        "/v1/models/{id}": lambda id: one_model(desk, id),
        "/help": lambda: show_help(desk),
        "/llms.txt": lambda: show_help(desk),
        "/v1/usage": lambda: own_usage(desk),
        "/metrics": lambda: show_metrics(keyring, metrics),
        "/healthz": lambda: json_response({"ok": True}),
    }
    for route in ROUTES:                            # /help and the 404 message list the same table
        app.add_url_rule(route.rule, route.path, views[route.path], methods=[route.method])
    app.add_url_rule("/", "root", lambda: "" if request.method == "HEAD" else redirect("/help"), methods=["GET"])
    app.before_request(lambda: admit(desk, keyring))
    app.after_request(lambda response: stamp(desk, response))
    app.register_error_handler(Exception, refused)
    app.wsgi_app = owned(desk, app.wsgi_app)
    return app


def owned(desk, wsgi_app):
    """The one place that makes a Call and releases it, whatever becomes of the response."""
    def application(environ, start_response):
        call = environ["sparks.call"] = calls.Call(desk, environ)
        environ["sparks.close"] = gevent.getcurrent().close_after
        try:
            return ClosingIterator(wsgi_app(environ, start_response), call.close)
        except BaseException as error:
            if isinstance(error, Exception):        # such as a header that may not be sent
                call.settle(500, calls.ours(error))
            call.close()
            raise
    return application


def admit(desk, keyring):
    """The edge, then the key."""
    call = request.environ["sparks.call"]
    if not request.path.startswith("/v1"):
        return
    rule = request.url_rule                         # of ours: a client's own words stay out of the log
    call.route = f"{request.method} {rule}" if rule else "unknown"
    secret = desk.settings.edge_secret
    if secret and not same(request.headers.get("X-Sparks-Edge", ""), secret):
        raise Forbidden("this request did not come through the public address; use the base URL in /help")
    if request.routing_exception is None:
        call.key = keyring.check(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))


def same(given, secret):
    """Equal, in constant time, for any text."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode())


def stamp(desk, response):
    """What every response gets; one that is no stream has nothing more to hold."""
    call = request.environ["sparks.call"]
    if not response.direct_passthrough:
        call.settle(response.status_code, request.environ.get("sparks.refusal"))
    response.headers["x-request-id"] = call.id
    if call.key:
        response.headers.update(desk.gate.standing(call.key.id, call.key.limits, calls.now()))
        if call.queued_ms is not None:
            response.headers["x-sparks-queue-ms"] = str(call.queued_ms)
    if call.body.breaks:
        request.environ["sparks.close"]()           # the rest of its body is not read: the connection ends here
    return response


def serve(desk, dialect):
    """A request for a completion, through a dialect."""
    call = request.environ["sparks.call"]
    body = call.body.read(call.key.id)
    call.attend()
    ask = dialect.read(body, desk.fleet.view(call.key))
    ask.body = call.body.restore(ask.body)
    del body
    if ask.stream is None:
        body = calls.plain(call, ask, dialect.write)
        return Response(pieces(body), mimetype="application/json", headers={"Content-Length": str(len(body))})
    events = calls.relay(call, ask)
    first = next(events)                            # a Refusal here is still an HTTP status
    return Response(chain([first], events), content_type="text/event-stream; charset=utf-8", headers=STREAM_HEADERS,
                    direct_passthrough=True)


def pieces(body):
    """A body in pieces, each of which the client has its time to take."""
    return (body[at:at + PIECE] for at in range(0, len(body), PIECE))


# ---- the small routes

def json_response(value, status=200, headers=None):
    return Response(dumps(value), status, headers, mimetype="application/json")


def model_object(model):
    context = dict.fromkeys(("max_model_len", "context_length", "context_window"), model.context) if model.context else {}
    return {"id": model.id, "object": "model", "created": 0, "owned_by": "sparks-gateway", **context}


def list_models(desk):
    return json_response({"object": "list", "data": [model_object(model) for model in view_of(desk).listed()]})


def one_model(desk, name):
    return json_response(model_object(view_of(desk).find(name)))


def view_of(desk):
    return desk.fleet.view(request.environ["sparks.call"].key)


def own_usage(desk):
    """The caller's own totals and limits."""
    key, now = request.environ["sparks.call"].key, time()
    day = ledger.day_of(now)
    return json_response({
        "object": "usage", "key": key.name, "limits": {**key.limits._asdict(), "models": key.models or None},
        "active": desk.gate.account(key.id).active, "queued": desk.gate.account(key.id).waiting,
        "today": ledger.total(key.id, day), "this_month": ledger.total(key.id, day[:8] + "01"), "total": ledger.total(key.id),
        "expires": key.expires})


def show_metrics(keyring, metrics):
    """For this machine alone, unless a proxy speaks for somebody else; or for an admin's key."""
    if not from_here(request):
        key = keyring.check(request.headers.get("Authorization"), request.headers.get("X-Api-Key"))
        if not key.admin:
            raise Forbidden("metrics are for this machine, or for an admin's key (./run.sh keys add NAME --admin)")
    return Response(metrics.text(), content_type="text/plain; version=0.0.4; charset=utf-8")


def from_here(request):
    proxied = any(name in request.headers for name in ("X-Forwarded-For", "CF-Connecting-IP", "Forwarded", "X-Real-IP"))
    address = ipaddress.ip_address(request.remote_addr)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback and not proxied


def show_help(desk):
    form = help_page.form_of(request.headers.get("Accept"), request.args.get("format"))
    body, mimetype = help_page.render(desk.settings, [model for model in desk.fleet.known if not model.hidden], public_address(desk.settings), form)
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
    allowed = {"Allow": ", ".join(sorted(error.valid_methods))} if getattr(error, "valid_methods", None) else {}
    if isinstance(error, HTTPException):
        error = from_werkzeug(error)
    refusal = request.environ["sparks.refusal"] = calls.ours(error)
    return json_response(error_body(refusal), refusal.status, {**allowed, **refusal.headers})


def from_werkzeug(error):
    where = f"{request.method} {request.path[:200]}"
    if error.code == 404:
        return NotFound(f"{where} is nothing here; there are {EXISTING}")
    if error.code == 405:
        return MethodNotAllowed(f"{where} is not allowed; there are {EXISTING}")
    if error.code is not None and 400 <= error.code < 500:
        return InvalidRequest(f"the request cannot be read: {error.name}", status=error.code)
    return error


# ---- the start

def main(arguments=None):
    parser = argparse.ArgumentParser(prog="sparks", description="Start the gateway. Settings: sparks.example.toml.")
    parser.add_argument("--local", action="store_true", help="serve a small model on this machine")
    parser.add_argument("--reload", action="store_true", help="let a running gateway read sparks.toml again")
    options = parser.parse_args(arguments)
    try:
        settings = settings_module.load()
        if options.reload:
            return server.tell_to_reload(settings.db)
        open_database(settings.db)
    except SettingsError as error:
        sys.exit(f"sparks: {error}")
    first_key = keys.first_key() if options.local else None
    database.close()                                # a connection must not go through the worker's fork
    if options.local:
        local.adopt(settings)
    log_module.set_up(settings.log)
    try:
        server.run(settings, lambda worker: start(worker, settings, options.local, first_key))
    except SettingsError as error:
        sys.exit(f"sparks: {error}")


def start(worker, settings, is_local, first_key):
    """In the worker: the app, the look at the engine, the ledger's upkeep, and the local engine."""
    open_database(settings.db, patient=False)
    fleet, book, metrics = Fleet(settings), ledger.Ledger(settings), Metrics()
    desk = calls.Desk(settings, fleet, open_gate(settings), book, (log_module.note, metrics.note))
    metrics.watch(desk)
    engine = local.Engine(urlsplit(settings.upstream[0]).port, log.warning) if is_local else None
    if engine:
        engine.start()
    gevent.spawn(fleet.watch)
    gevent.spawn(book.keep_up)
    gevent.spawn(announce, settings, fleet, engine, first_key)
    worker.on_end, worker.on_quit = lambda: desk.drain(settings.drain), desk.abandon
    worker.on_reload = lambda: reload(desk, (lambda new: local.adopt(new, settings.upstream)) if is_local else lambda new: None)
    return create_app(desk, keys.Keyring(), metrics)


def open_gate(settings):
    """A Gate that knows what was used today and this month, before this start."""
    gate, now = Gate(settings.max_active, settings.max_queued), calls.now()
    day = ledger.day_of(now)
    today, month = ledger.used_by_key(day), ledger.used_by_key(day[:8] + "01")
    for key, tokens in month.items():
        gate.begin(key, today.get(key, 0), tokens, now)
    return gate


def reload(desk, adapt):
    """Read sparks.toml again; what is wrong with it is logged, and the old settings stay. `adapt` is done to new ones."""
    try:
        new = settings_module.load(warn=log.warning)
        adapt(new)
    except SettingsError as error:
        return log.error("reload: %s; the old settings stay", error)
    fixed = desk.settings.adopt(new)
    desk.gate.slots, desk.gate.most_waiting = desk.settings.max_active, desk.settings.max_queued
    desk.bodies.most = desk.settings.max_bodies
    desk.fleet.configure()
    calls.wake(desk.gate.grant())
    log.warning("reload: sparks.toml was read" + (f"; {', '.join(fixed)} need a restart" if fixed else ""))


def announce(settings, fleet, engine, first_key):
    """Say what was started; with a local engine, also how to try it, once it answers."""
    fleet.looked.wait()
    log_module.say(server.screen(settings, fleet.models(), keys.active().count(), engine is not None))
    if engine:
        while not fleet.models():
            if engine.state == "up":
                fleet.hurry.set()                   # no need to wait for the next look
            gevent.sleep(0.1)
        log_module.say(local.greeting(f"http://{server.reachable(settings.bind)}", first_key))


if __name__ == "__main__":
    main()
