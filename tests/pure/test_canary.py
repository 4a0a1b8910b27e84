"""What the product uses of gunicorn, gevent and others that is not documented API. An upgrade that takes one of these away fails here,
with a sentence that says what breaks and what to do; docs/design.md has the same list for people.

An attribute of instances counts as there if a method of the class, or of those above it, assigns it.
"""
import ast
import importlib
import inspect
import textwrap

import pytest

# (object, its attribute, what breaks without it, and what to do then)
USED = [
    ("gunicorn.arbiter.Arbiter", "run", "front/master.py starts it in Application.run: start the master as gunicorn does now"),
    ("gunicorn.arbiter.Arbiter", "handle_hup", "Master overrides it: SIGHUP would replace the worker and cut streams; find the way"
     " of a signal from the master to its worker anew"),
    ("gunicorn.arbiter.Arbiter", "handle_int", "Master overrides it: Ctrl-C would cut streams; find what SIGINT calls now"),
    ("gunicorn.arbiter.Arbiter", "handle_term", "Master calls it for SIGINT; find what ends the master with its streams now"),
    ("gunicorn.arbiter.Arbiter", "handle_ttin", "Master overrides it: SIGTTIN would start a second worker, with slots of its own"),
    ("gunicorn.arbiter.Arbiter", "handle_ttou", "Master overrides it as it does handle_ttin"),
    ("gunicorn.arbiter.Arbiter", "kill_workers", "Master.handle_hup hands SIGHUP on with it: send it to the pids in WORKERS"),
    ("gunicorn.arbiter.Arbiter", "spawn_worker", "Master blocks signals around it: find the place of the fork, or SIGTERM in the"
     " moment after it is lost and the end waits for the drain"),
    ("gunicorn.arbiter.Arbiter", "SIGNALS", "Master.spawn_worker blocks them and Worker.init_signals lets them in: list them"),
    ("gunicorn.arbiter.Arbiter", "WORKER_BOOT_ERROR", "Worker.load_wsgi exits with it, so that a worker that cannot start ends the"
     " master too: find the exit code for that"),
    ("gunicorn.glogging.Logger", "setup", "front/master.py Log overrides it: gunicorn's words would go to stderr, which may block"),
    ("gunicorn.glogging.Logger", "error_log", "front/master.py Log takes its handlers away: find where gunicorn's words go now"),
    ("gunicorn.workers.base.Worker", "alive", "Worker and the end read it: find out how a worker knows that it is to end"),
    ("gunicorn.workers.base.Worker", "app", "Worker.load_wsgi makes what is served with it"),
    ("gunicorn.workers.base.Worker", "cfg", "Worker puts CachedConfig in its place; without that each request costs more"),
    ("gunicorn.workers.base.Worker", "ppid", "Worker.watch_master compares it: a worker whose master was killed would go on for ever"),
    ("gunicorn.workers.base.Worker", "notify", "Worker.notify calls it: the master would take the worker for hung"),
    ("gunicorn.workers.ggevent.GeventWorker", "notify", "Worker overrides it: it exits in the middle of all streams when the master"
     " has gone"),
    ("gunicorn.workers.base.Worker", "wsgi", "Worker.load_wsgi sets it and Worker.respond calls it"),
    ("gunicorn.workers.base.Worker", "load_wsgi", "Worker overrides it to make what is served after the fork"),
    ("gunicorn.workers.base.Worker", "init_signals", "Worker overrides it: SIGHUP would end the worker, SIGINT cut streams"),
    ("gunicorn.workers.base.Worker", "handle_exit", "Worker.handle_int calls it for the first Ctrl-C: set alive to False"),
    ("gunicorn.workers.base.Worker", "handle_quit", "Worker.quit calls it once the rows are written: end the process"),
    ("gunicorn.workers.base_async.AsyncWorker", "handle", "Worker overrides it: that is where connections come from"),
    ("gunicorn.workers.base_async.AsyncWorker", "handle_request", "Worker overrides it: that is where requests come from"),
    ("gunicorn.workers.base.Worker", "handle_error", "Worker overrides it: malformed HTTP would be answered in HTML"),
    ("gunicorn.workers.ggevent.GeventWorker", "run", "Worker.run calls it: that is what accepts connections"),
    ("gunicorn.http.parser.RequestParser", "mesg_class", "front/heads.py has requests made by HeadRequest with it: heads would have"
     " neither a bound nor a time"),
    ("gunicorn.http.parser.RequestParser", "finish_body", "front/heads.py gives it some seconds: a body that nobody reads could be"
     " waited for for ever"),
    ("gunicorn.http.message.Request", "parse", "front/heads.py takes the whole head in before it: each read would cost as much as all"),
    ("gunicorn.http.message.Request", "parse_request_line", "front/heads.py refuses a first line with it that is none"),
    ("gunicorn.http.message.Request", "limit_request_line", "front/heads.py bounds the first line by it"),
    ("gunicorn.http.message.Request", "max_buffer_headers", "front/heads.py bounds trailers with it"),
    ("gunicorn.http.unreader.Unreader", "read", "front/heads.py reads a head with it, a piece at a time"),
    ("gunicorn.http.unreader.Unreader", "unread", "front/heads.py hands a whole head on with it"),
    ("gunicorn.http.message.Request", "headers", "front/wsgi.py environ_of reads it, as (NAME, value)"),
    ("gunicorn.http.message.Request", "body", "front/wsgi.py hands it on as wsgi.input"),
    ("gunicorn.http.message.Request", "method", "front/wsgi.py environ_of reads it"),
    ("gunicorn.http.message.Request", "path", "front/wsgi.py environ_of reads it"),
    ("gunicorn.http.message.Request", "query", "front/wsgi.py environ_of reads it"),
    ("gunicorn.http.message.Request", "version", "front/wsgi.py frames the answer by it, a pair of numbers"),
    ("gunicorn.http.message.Request", "should_close", "front/wsgi.py and Worker.handle_request end the connection by it"),
    ("gunicorn.http.message.Request", "force_close", "front/edge.py ends a connection with it whose body was not read"),
    ("gunicorn.http.message.Request", "_expected_100_continue", "Worker.handle_request says 100 Continue: curl would wait a second"
     " with each large body; look for Expect in the headers"),
    ("gunicorn.http.body.Body", "reader", "front/body.py reaches the socket through it: tiny chunks would hold up all streams"),
    ("gunicorn.http.body.ChunkedReader", "req", "front/body.py reaches the socket through it, as through Body.reader"),
    ("gunicorn.http.body.ChunkedReader", "parser", "front/body.py takes the pieces of a body from it as they come"),
    ("gunicorn.http.body.LengthReader", "length", "front/body.py reads a body of known length past it, as it comes"),
    ("gunicorn.http.body.LengthReader", "unreader", "front/body.py reads a body of known length with it"),
    ("gunicorn.http.body.ChunkedReader", "parse_chunk_size", "front/body.py ChunkSizes looks at each line before it: a chunk of any"
     " size would be waited for"),
    ("gunicorn.http.message.Request", "unreader", "front/body.py reaches the socket through it, as through Body.reader"),
    ("gunicorn.http.unreader.SocketUnreader", "sock", "front/body.py puts YieldingSocket in its place: tiny chunks would hold up"
     " all streams"),
    ("gunicorn.http.errors", "ParseException", "Worker.handle_error knows malformed HTTP by it; so does front/body.py"),
    ("gunicorn.http.errors", "InvalidChunkSize", "front/body.py refuses a chunk's size with it, as gunicorn does"),
    ("gunicorn.http.errors", "InvalidHTTPVersion", "front/worker.py says which versions there are"),
    ("gunicorn.http.errors", "NoMoreData", "front/body.py knows by it that a client left in the middle of its body"),
    ("gunicorn.http.errors", "LimitRequestLine", "front/worker.py answers it with 414"),
    ("gunicorn.http.errors", "LimitRequestHeaders", "front/worker.py answers it with 431"),
    ("gunicorn.http.errors", "ExpectationFailed", "front/worker.py answers it with 417"),
    ("gunicorn.http.errors", "ForbiddenProxyRequest", "front/worker.py answers it with 403"),
    ("gunicorn.util", "unquote_to_wsgi_str", "front/wsgi.py makes PATH_INFO with it: urllib.parse.unquote_to_bytes, as latin-1"),
    ("gunicorn.util", "write_nonblock", "front/wsgi.py refuse sends with it: sendall with a time limit"),
    ("gevent.hub.Hub", "print_exception", "Worker.run replaces it: a fault in a greenlet would be written to stderr, and all would"
     " wait for whoever reads that"),
    ("gevent.server.StreamServer", "max_accept", "Worker.run sets it: a hundred new connections at once would be one long run"),
    ("gevent.hub.Hub", "loop", "call.py, pump.py and Worker.wind_down watch sockets and set timers through it: without it each"
     " stream needs greenlets that wait"),
    ("gevent._interfaces.ILoop", "io", "call.py and pump.py watch sockets with it"),
    ("gevent._interfaces.ILoop", "timer", "call.py and pump.py look around with it"),
    ("gevent._interfaces.ILoop", "now", "loop.py take_turn knows by it how long a run of the loop has taken"),
    ("gevent._interfaces.ILoop", "run_callback", "call.py and front/body.py throw into greenlets with it, from the hub"),
    ("gevent._interfaces.IWatcher", "close", "call.py and pump.py free watchers with it: descriptors would be watched that are"
     " somebody else's by then"),
    ("http.client.HTTPResponse", "begin", "engines/images.py Response passes over interim heads in it"),
    ("http.client.HTTPResponse", "fp", "engines/images.py Response bounds what is read by putting Metered beneath it"),
    ("http.client.HTTPResponse", "msg", "engines/images.py Response takes it away between two heads"),
    ("urllib3.connection.HTTPConnection", "response_class", "engines/images.py has answers made by Response with it: without that"
     " heads and framing are not bounded"),
]
# (function, its parameters, what breaks)
SIGNATURES = [
    ("gunicorn.workers.base_async.AsyncWorker.handle", ["self", "listener", "client", "addr"], "Worker.handle"),
    ("gunicorn.workers.base_async.AsyncWorker.handle_request", ["self", "listener_name", "req", "sock", "addr"],
     "Worker.handle_request"),
    ("gunicorn.workers.base.Worker.handle_error", ["self", "req", "client", "addr", "exc"], "Worker.handle_error"),
    ("gunicorn.workers.base.Worker.handle_quit", ["self", "sig", "frame"], "Worker.quit"),
    ("gunicorn.workers.base.Worker.handle_exit", ["self", "sig", "frame"], "Worker.handle_int"),
    ("gevent.hub.Hub.print_exception", ["self", "context", "t", "v", "tb"], "Worker.log_fault"),
]
# (function, texts that stand in it in this order, what breaks)
STEPS = [
    ("gunicorn.workers.base.Worker.init_process", ["self.init_signals()", "self.load_wsgi()", "self.run()"],
     "Worker.init_signals lets signals in that Master.spawn_worker held back: it must come first"),
    ("gunicorn.workers.ggevent.GeventWorker.init_process", ["hub.reinit()", "super().init_process()"],
     "the event loop is the master's until then"),
    ("gunicorn.http.parser.Parser.__next__", ["self.mesg.should_close()", "self.finish_body()", "self.mesg_class("],
     "front/heads.py has its own finish_body and mesg_class called there"),
    ("gunicorn.http.message.Message.__init__", ["self.max_buffer_headers =", "self.parse(self.unreader)", "self.set_body_reader()"],
     "HeadRequest.parse sets the bound of trailers, for the reader that is made after it"),
    ("gunicorn.http.message.Request.parse", ["self.read_into(unreader, buf, stop=True)", "self._parse_python(unreader, buf)"],
     "it must find the whole head in its first read"),
    ("gunicorn.workers.ggevent.GeventWorker.run", ["partial(self.handle, s)", "while self.alive:", "server.close()"],
     "Worker.handle is called for each connection, and no new one comes once alive is False"),
    ("gunicorn.arbiter.Arbiter.run", ['"handle_%s" % signame'], "Master's handlers are found by their names"),
    ("gunicorn.arbiter.Arbiter.spawn_worker", ["os.fork()", "worker.init_process()"],
     "Master.spawn_worker holds signals back from before the fork until Worker.init_signals"),
    ("gunicorn.http.body.ChunkedReader.parse_chunked", ["self.parse_chunk_size(unreader)", "yield rest", "read_ahead=size", "yield rest["],
     "front/body.py has its own parse_chunk_size called there, and takes each piece as it comes"),
    ("gunicorn.http.body.LengthReader.read", ["self.unreader.read(", "self.length -= "],
     "front/body.py next_of does the same for what has come"),
]


def found(path):
    """The object of a dotted path."""
    module, rest = path, []
    while True:
        try:
            thing = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            rest.insert(0, name)
    for name in rest:
        thing = getattr(thing, name)
    return thing


def assigned(cls):
    """The attributes that methods of a class, or of those above it, assign to `self`."""
    names = set()
    for one in cls.__mro__:
        if one.__module__ in ("builtins", "_io", "io"):     # compiled, without a source to read
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                  and isinstance(node.value, ast.Name) and node.value.id == "self"}
    return names


@pytest.mark.parametrize("path, name, sentence", USED, ids=lambda value: value if " " not in value else "")
def test_it_is_there(path, name, sentence):
    thing = found(path)
    if path.startswith("gevent._interfaces"):           # what it describes: the loop's own class is compiled
        there = name in thing.names(all=True)
    else:
        there = hasattr(thing, name) or inspect.isclass(thing) and name in assigned(thing)
    assert there, f"{path}.{name} has gone. {sentence}."


@pytest.mark.parametrize("path, parameters, user", SIGNATURES, ids=lambda value: value if isinstance(value, str) else "")
def test_it_takes_the_same(path, parameters, user):
    now = list(inspect.signature(found(path)).parameters)
    assert now == parameters, f"{path} takes {now} now: {user} must take the same."


@pytest.mark.parametrize("path, texts, sentence", STEPS, ids=lambda value: value if isinstance(value, str) and " " not in value else "")
def test_it_goes_the_same_way(path, texts, sentence):
    source, at = inspect.getsource(found(path)), 0
    for text in texts:
        at = source.find(text, at)
        assert at >= 0, f"{path} has no {text!r} where it was: {sentence}. Read it, and make it so again."
