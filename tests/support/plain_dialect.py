"""A dialect for tests and for the bench: the request of a chat, answered in events of its own.

    event: delta        {"kind": "reasoning" | "text", "text": "..."}
    event: piece        {"kind": "tool" | "finish" | "usage", "value": ...}
    event: end          {}          event: error   {"error": {...}}

In the project's folder `python -m tests.support.plain_dialect` is the gateway with this dialect at POST /v1/plain.
"""
import sys

if __name__ == "__main__":
    from gevent import monkey
    monkey.patch_all()                              # before a module takes sockets and locks

from dialects import chat  # noqa: E402
from errors import error_body  # noqa: E402
from stream import PieceStream  # noqa: E402
from values import dumps  # noqa: E402

write, refusal = chat.write, chat.refusal


def read(body, fleet):
    ask = chat.read(body, fleet)
    if ask.stream is not None:
        ask.stream = PlainStream()
    return ask


def event(name, value):
    return b"event: %b\ndata: %b\n\n" % (name, dumps(value))


class PlainStream(PieceStream):
    before = {kind: b'event: delta\ndata: {"kind":"%b","text":"' % kind.encode() for kind in ("reasoning", "text")}

    def text(self, kind, text):
        return self.before[kind] + text + b'"}\n\n'

    def piece(self, kind, value):
        return event(b"piece", {"kind": kind, "value": value["finish_reason"] if kind == "finish" else value})

    def end(self):
        super().end()
        return event(b"end", {})

    def fail(self, error):
        return event(b"error", error_body(error))


if __name__ == "__main__":
    import sparks
    from front.routes import ROUTES, Route

    ROUTES.append(Route("POST", "/v1/plain", "A dialect for tests", sys.modules[__name__]))
    sparks.main()
