"""A dialect for tests and for the bench: the request of a chat, answered in events of its own.

    event: delta        {"kind": "reasoning" | "text", "text": "..."}
    event: piece        {"kind": "tool" | "finish" | "usage", "value": ...}
    event: end          {}          event: error   {"error": {...}}

`python tests/support/plain_dialect.py` is the gateway with this dialect at POST /v1/plain.
"""
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
    import sparks  # patches everything, so it comes first

from dialects import chat  # noqa: E402
from errors import error_body  # noqa: E402
from stream import PieceStream, dumps  # noqa: E402

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
    from front import app, routes

    routes.ROUTES.append(routes.Route("POST", "/v1/plain", "A dialect for tests"))
    app.DIALECTS["/v1/plain"] = sys.modules[__name__]
    sparks.main()
