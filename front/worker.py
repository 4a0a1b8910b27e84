"""The worker: gunicorn's with gevent, which speaks HTTP with clients.

It adds what this gateway needs: refusals of malformed HTTP in the API's own shape, a way to end a
connection whose body was not read, and no waiting for idle connections at the end. And it leaves
out gunicorn's hooks and its log of requests."""

import logging
import os
import secrets
import signal
import sys

import gevent
from gevent import getcurrent
from gevent.server import StreamServer
from gunicorn.arbiter import Arbiter
from gunicorn.http.errors import (
    ExpectationFailed,
    ForbiddenProxyRequest,
    LimitRequestHeaders,
    LimitRequestLine,
    NoMoreData,
    ParseException,
)
from gunicorn.util import close
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from errors import InternalError, Refusal, SettingsError
from front.connections import Connections
from front.edge import headers_unread
from front.heads import HeadParser, SlowHead
from front.wsgi import CONTINUE, Response, environ_of, host_of, problem_of, refuse
from loop import take_turn
from tcp import detect_vanished_peer

logger = logging.getLogger("sparks")
ACCEPTS = 20  # new connections in one run of the loop
LOOK = 0.2  # seconds between two looks whether the worker is to end
STATUSES = {  # of malformed HTTP; 400 if not here
    LimitRequestLine: 414,
    LimitRequestHeaders: 431,
    ExpectationFailed: 417,
    ForbiddenProxyRequest: 403,
    SlowHead: 408,
}


class CachedConfig:
    """gunicorn's settings, each looked up once: it asks for dozens of them with each request."""

    def __init__(self, cfg):
        self.original = cfg

    def __getattr__(self, name):
        value = self.__dict__[name] = getattr(self.original, name)
        return value


class Worker(GeventWorker):
    """The one process that serves. What it serves is made by its app's `create()`, an object with

    app         the WSGI application
    settings
    reload()    SIGHUP came: read the settings again
    drain()     the worker is to end: returns when what is open has ended, or its time is over
    abandon()   it ends at once: write down what is open
    close()     the last thing before the end
    """

    service = None  # until it is made
    drained = False  # it is to end, and what was open has ended

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cfg = CachedConfig(self.cfg)
        self.connections = Connections()

    # -- the life of the process

    def load_wsgi(self):
        """Make what is served; or say in one line why that cannot be, and end the master too."""
        try:
            self.service = self.app.create()
        except SettingsError as error:
            print(f"sparks: {error}", file=sys.stderr, flush=True)
            sys.exit(Arbiter.WORKER_BOOT_ERROR)
        self.wsgi = self.service.app

    def init_signals(self):
        super().init_signals()
        signal.signal(signal.SIGHUP, lambda sig, frame: gevent.spawn(self.reload))
        signal.signal(signal.SIGINT, self.handle_int)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, Arbiter.SIGNALS)  # see Master.spawn_worker

    def reload(self):
        while not self.service:  # what is being made may have read the settings already
            gevent.sleep(LOOK)
        self.service.reload()

    def handle_int(self, sig, frame):
        """Ctrl-C reaches the worker too. The first one is as good as SIGTERM, the second ends all
        at once."""
        if self.alive:
            self.handle_exit(sig, frame)
        else:
            self.handle_quit(sig, frame)

    def handle_quit(self, sig, frame):
        gevent.spawn(self.quit, sig, frame)  # not in the signal's handler: it waits

    def quit(self, sig, frame):
        if self.service:
            self.service.abandon()
        AsyncWorker.handle_quit(self, sig, frame)

    def run(self):
        # The hub's own way waits for whoever reads stderr, and all else with it.
        gevent.get_hub().print_exception = self.log_fault
        gevent.spawn(self.wind_down)
        gevent.spawn(self.watch_master)
        StreamServer.max_accept = ACCEPTS
        try:
            super().run()
        finally:
            self.service.close()

    def log_fault(self, context, kind, error, traceback):
        """An exception that left a greenlet or a callback of the hub."""
        if not isinstance(error, SystemExit):  # no fault: a second Ctrl-C ends the worker so
            logger.error("a fault beside the requests", exc_info=(kind, error, traceback))

    def notify(self):
        """Tell the master that this process lives. gunicorn's own way, where there is no master any
        more, exits in the middle of all that is open."""
        AsyncWorker.notify(self)

    def watch_master(self):
        """End at once when the master has gone, which would start another worker: nobody else looks
        after this one, and a new gateway waits for its lock and its address."""
        while self.ppid == os.getppid():
            gevent.sleep(LOOK)
        logger.error("the master is gone: the worker ends")
        self.quit(signal.SIGQUIT, None)

    def wind_down(self):
        """Once the worker is to end, finish what is open, and let go of idle connections."""
        while self.alive:
            gevent.sleep(LOOK)
        self.service.drain()
        self.drained = True
        self.connections.end_idle()

    # -- connections and requests

    def handle(self, listener, client, addr):
        """One connection, from its first request to its end."""
        request = None
        self.connections.add()
        try:
            client.setblocking(1)
            detect_vanished_peer(client)
            server = listener.getsockname()
            parser = HeadParser(self.cfg, client, addr)
            while True:
                request = None
                request = self.next_request(parser, client, addr)
                self.handle_request(server, request, client, addr)
        except (StopIteration, NoMoreData, ConnectionError):
            pass  # one of both has ended it
        except OSError as error:
            logger.warning("a client's connection failed: %s", error)
        except Exception as error:
            self.handle_error(request, client, addr, error)
        finally:
            self.connections.remove(client)
            close(client)

    def next_request(self, parser, client, addr):
        """The next request of a connection. StopIteration ends it.

        Its client may have sent thousands at once: others get their turn in between.
        """
        if self.drained:
            raise StopIteration
        take_turn()
        self.connections.rest(client, addr[0])
        try:
            return next(parser)
        finally:
            self.connections.awake(client)

    def handle_request(self, listener_name, req, sock, addr):
        """One request. StopIteration ends its connection."""
        host = host_of(req)
        if req._expected_100_continue:
            sock.sendall(CONTINUE)
        response = Response(req, sock)
        # For the app, to which gunicorn does not hand the request:
        getcurrent().close_after = req.force_close
        if not self.alive:
            req.force_close()
        try:
            environ = environ_of(req, host, sock, addr, listener_name)
            environ["sparks.frame"] = response.frame
            environ["sparks.nudge"] = response.nudge
            self.respond(environ, response)
        except (gevent.GreenletExit, SystemExit, TimeoutError):
            raise StopIteration from None  # the answer is cut: nothing more may follow
        except Exception as error:
            if isinstance(error, OSError) or not response.begun:
                raise
            logger.exception("a fault of the gateway")
            raise StopIteration from None
        if response.closes or req.should_close():
            raise StopIteration

    def respond(self, environ, response):
        items = self.wsgi(environ, response.start_response)
        try:
            for item in items:
                response.write(item)
            response.end()
        finally:
            items.close()

    def handle_error(self, req, client, addr, exc):
        """Answer what never became a request, or a fault of ours. (gunicorn's own way logs the
        address with its query, which can hold secrets.)"""
        if isinstance(exc, ParseException):
            refusal = Refusal(
                f"this is no valid HTTP request: {problem_of(exc)}",
                status=STATUSES.get(type(exc), 400),
            )
        else:
            logger.exception("a fault of the gateway")
            refusal = InternalError(
                "the gateway failed; this is its own fault, and its log has the details"
            )
        request_id = secrets.token_hex(16)
        logger.warning("%s: %s", request_id, refusal.message)
        headers = []
        if self.service:
            headers = headers_unread(self.service.settings)
        refuse(client, refusal, request_id, headers)
