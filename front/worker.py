"""The worker: gunicorn's with gevent, which speaks HTTP with clients.

It adds what this gateway needs: refusals of malformed HTTP in the API's own shape, a way to end a connection whose body was
not read, and no waiting for idle connections at the end. And it leaves gunicorn's hooks and its own log of requests out.
"""

from gevent import monkey

monkey.patch_all()  # before the other imports: what they bind must be patched already

import logging
import secrets
import signal

import gevent
from gevent import getcurrent
from gunicorn.http import errors as http_errors
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from errors import InternalError, Refusal
from front.wsgi import Response, environ_of, refuse

logger = logging.getLogger("sparks")
STATUS = {  # of malformed HTTP; 400 if not here
    http_errors.LimitRequestLine: 414,
    http_errors.LimitRequestHeaders: 431,
    http_errors.ExpectationFailed: 417,
    http_errors.ForbiddenProxyRequest: 403,
}


class Waiting(gevent.Timeout):
    """A connection waits for its next request: for so long at most, and not when the worker is about to end."""

    def __init__(self, worker):
        super().__init__(worker.cfg.keepalive, False)
        self.worker = worker

    def __enter__(self):
        if not self.worker.alive:
            raise StopIteration
        self.worker.waiting.add(getcurrent())
        return super().__enter__()

    def __exit__(self, *error):
        self.worker.waiting.discard(getcurrent())
        return super().__exit__(*error)


class Settled:
    """gunicorn's settings, each looked up once: it asks for dozens of them with each request."""

    def __init__(self, cfg):
        self.found = cfg

    def __getattr__(self, name):
        value = self.__dict__[name] = getattr(self.found, name)
        return value


class Worker(GeventWorker):
    """One process that serves."""

    on_end = on_quit = on_reload = staticmethod(
        lambda: None
    )  # set by the app: for the end, the end at once, SIGHUP

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.cfg, self.waiting = Settled(self.cfg), set()

    def load_wsgi(self):
        self.app.worker = self
        super().load_wsgi()

    def init_signals(self):
        super().init_signals()
        signal.signal(
            signal.SIGHUP, lambda *_: gevent.spawn(lambda: self.on_reload())
        )  # the app may be about to set it
        signal.signal(signal.SIGINT, self.handle_int)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)

    def handle_int(self, sig, frame):
        """Ctrl-C reaches the worker too: the first one is as good as SIGTERM, the second ends all at once."""
        if self.alive:
            self.handle_exit(sig, frame)
        else:
            self.handle_quit(sig, frame)

    def handle_quit(self, sig, frame):
        gevent.spawn(self.quit, sig, frame)  # not in the signal's handler: it waits

    def quit(self, sig, frame):
        self.on_quit()
        AsyncWorker.handle_quit(self, sig, frame)

    def timeout_ctx(self):
        return Waiting(self)

    def run(self):
        gevent.get_hub().print_exception = (
            self.note_fault
        )  # its own way waits for who reads stderr, and all else with it
        gevent.spawn(self.part)
        super().run()

    def note_fault(self, context, kind, error, traceback):
        if not isinstance(
            error, SystemExit
        ):  # which is how a second Ctrl-C ends the worker, and no fault
            logger.error("a fault beside the requests", exc_info=(kind, error, traceback))

    def part(self):
        """Once the worker is to end, finish what is open, and let go of the connections that wait for another request."""
        while self.alive:
            gevent.sleep(0.2)
        self.on_end()
        for greenlet in list(self.waiting):
            gevent.get_hub().loop.run_callback(greenlet.throw, StopIteration())

    def handle_request(self, listener_name, req, sock, addr):
        """One request. StopIteration ends its connection."""
        if req._expected_100_continue:
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        response = Response(req, sock)
        getcurrent().close_after = (
            req.force_close
        )  # for the app: gunicorn does not hand it the request
        if not self.alive:
            req.force_close()
        try:
            environ = environ_of(req, sock, addr, listener_name)
            environ["sparks.frame"] = response.frame
            self.answer(environ, response)
        except (gevent.GreenletExit, SystemExit, TimeoutError):
            raise StopIteration from None  # the answer is cut: nothing more may follow on this connection
        except Exception as error:
            if isinstance(error, OSError) or not response.begun:
                raise
            logger.exception("a fault of the gateway")
            raise StopIteration from None
        if response.closes or req.should_close():
            raise StopIteration

    def answer(self, environ, response):
        items = self.wsgi(environ, response.start_response)
        try:
            for item in items:
                response.write(item)
            response.end()
        finally:
            items.close()

    def handle_error(self, req, client, addr, exc):
        """Answer what never became a request, or what gunicorn would not send. Its own way logs the address with its query."""
        if isinstance(exc, http_errors.ParseException):
            refusal = Refusal(
                f"this is no valid HTTP request: {type(exc).__name__}",
                status=STATUS.get(type(exc), 400),
            )
        else:
            logger.exception("a fault of the gateway")
            refusal = InternalError(
                "the gateway failed; this is its own fault, and its log has the details"
            )
        ident = secrets.token_hex(16)
        logger.warning("%s: %s", ident, refusal.message)
        refuse(client, refusal, ident)
