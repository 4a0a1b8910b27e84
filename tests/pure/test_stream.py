"""Event streams as tables: these bytes of an engine in, exactly these for the client out, however they are cut."""
import itertools
import json
import re

import hypothesis
import pytest
from hypothesis import strategies as st

from errors import Refusal, UpstreamError, UpstreamTimeout
from mending.thinking import LeakedThinking, split_thinking
from reasoning import FIELDS
from stream import ChatStream, CompletionStream, Events, data_of
from support import SUPPORT
from support.cuts import cuts, however_cut, pieces
from support.engine import compact
from values import dumps, loads

WIRE = SUPPORT / "wire"
BOTH, REASONING, CONTENT = FIELDS["both"], FIELDS["reasoning"], FIELDS["reasoning_content"]
DONE = b"data: [DONE]\n\n"
BROKE_OFF = (502, "upstream_error", None,
             "the engine broke off before the answer was finished; send the request again")
UNREADABLE = (502, "upstream_error", None, "the engine sent an event that cannot be read")


# ---- an engine's events

def sse(value):
    return b"data: " + compact(value) + b"\n\n"


def choice(delta, finish=None, index=0, **more):
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **more}


def many(*choices, **more):
    return sse({"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": list(choices),
                **more})


def ev(delta, finish=None, index=0, **more):
    """An event with one choice, its fields in vLLM's order."""
    return many(choice(delta, finish, index), **more)


def llama(delta, finish=None, **more):
    """The same in llama.cpp's order: the finish comes first."""
    return sse({"choices": [{"finish_reason": finish, "index": 0, "delta": delta}], "created": 1, "id": "c1",
                "model": "m",
                "object": "chat.completion.chunk", **more})


def text(content):
    return ev({"content": content})


USAGE = {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}
ROLE, HI, STOP = ev({"role": "assistant", "content": ""}), text("Hello"), ev({}, "stop")
LONG = "x" * 5000


# ---- the table

class Case:
    """One stream.

    sent, got        the engine's bytes, the client's bytes before the last event
    end              the last event, or (status, code, param, message) of the Refusal
    tokens, figures  what the stream counted; None: not looked at / no usage
    """

    def __init__(self, sent, got, end=DONE, *, names=BOTH, usage=False, n=1, tokens=None, figures=None, over=None):
        self.sent, self.got, self.end = sent, got, end
        self.names, self.usage, self.n = names, usage, n
        self.tokens, self.figures = tokens, figures
        self.over = over if over is not None else b"[DONE]" in sent or end not in (DONE, BROKE_OFF)

    def stream(self):
        return ChatStream(self.names, self.usage, self.n)

    def read(self, arrived):
        """All that a stream shows of itself when its bytes arrive in these pieces."""
        stream = self.stream()
        out = replay(stream, arrived)
        return out, stream.over, stream.usage, stream.tokens, end_of(stream)

    def check(self):
        out, over, figures, tokens, end = however_cut(self.sent, self.read)
        assert out == self.got
        assert (over, figures, end) == (self.over, self.figures, self.end)
        assert self.tokens in (None, tokens)


def replay(stream, arrived):
    """Feed these pieces. Every answer must consist of whole events."""
    out = []
    for data in arrived:
        if stream.over:
            break
        out.append(stream.feed(data))
        assert not out[-1] or out[-1].endswith(b"\n\n")
    return b"".join(out)


def end_of(stream):
    try:
        return stream.end()
    except Refusal as error:
        return error.status, error.code, error.param, error.message


CASES = {}


def case(name, *args, **options):
    assert name not in CASES
    CASES[name] = Case(*args, **options)


# -- how a stream goes and ends

case("plain", ROLE + HI + text(" there") + STOP + DONE, ROLE + HI + text(" there") + STOP, tokens=3)
case("no DONE", ROLE + HI + STOP, ROLE + HI + STOP, tokens=2)
case("DONE without its blank line", ROLE + HI + STOP + b"data: [DONE]", ROLE + HI + STOP, over=False)
case("DONE without a space", ROLE + STOP + b"data:[DONE]\n\n", ROLE + STOP)
case("nothing follows DONE", ROLE + STOP + DONE + HI + DONE, ROLE + STOP, tokens=1)
case("content and finish in one", ROLE + ev({"content": "Hello"}, "stop") + DONE,
     ROLE + ev({"content": "Hello"}, "stop"),
     tokens=1)
case("finish: length", HI + ev({"content": "x"}, "length") + DONE, HI + ev({"content": "x"}, "length"))
case("role and finish in the only event", ev({"role": "assistant", "content": "Hi"}, "stop"),
     ev({"role": "assistant", "content": "Hi"}, "stop"))
case("nothing", b"", b"", BROKE_OFF, tokens=0)
case("only DONE", DONE, b"", BROKE_OFF, tokens=0)
case("only comments", b": keep-alive\n\n" * 3, b"", BROKE_OFF, tokens=0)
case("no finish, DONE", ROLE + HI + DONE, ROLE + HI, BROKE_OFF)
case("no finish, no DONE", ROLE + HI, ROLE + HI, BROKE_OFF)
case("no finish after quick events", ROLE + HI + text("a") * 3 + DONE, ROLE + HI + text("a") * 3, BROKE_OFF, tokens=4)
case("cut within the finish", ROLE + HI + STOP[:-1], ROLE + HI, BROKE_OFF)
case("cut within an event", ROLE + HI + text("more")[:40], ROLE + HI, BROKE_OFF)
case("cut within a thought", ROLE + ev({"reasoning": "a"}) + DONE,
     ROLE + ev({"reasoning": "a", "reasoning_content": "a"}), BROKE_OFF)
case("finish_reason is missing", ROLE + HI + many({"index": 0, "delta": {"content": "x"}}) + STOP + DONE,
     ROLE + HI + many({"index": 0, "delta": {"content": "x"}}) + STOP, tokens=3)
case("a role alone is no token", ev({"role": "assistant"}) + HI + STOP + DONE, ev({"role": "assistant"}) + HI + STOP,
     tokens=2)
case("a refusal is a token", ROLE + ev({"refusal": "no"}) + STOP, ROLE + ev({"refusal": "no"}) + STOP, tokens=2)
case("delta null", ROLE + HI + ev(None, "stop") + DONE, ROLE + HI + STOP)
case("logprobs pass",
     ROLE + many(choice({"content": "a"}) | {"logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}) + STOP,
     ROLE + many(choice({"content": "a"}) | {"logprobs": {"content": [{"token": "a", "logprob": -0.5}]}}) + STOP)
case("unknown fields pass", ROLE + ev({"content": "a", "odd": [1, {"b": None}]}, more=1.5) + STOP,
     ROLE + ev({"content": "a", "odd": [1, {"b": None}]}, more=1.5) + STOP)

for name, odd in (("without choices", {}), ("whose choices are null", {"choices": None}), ("with a choice that is none", {"choices": [None]})):
    case(f"an event {name} has an empty list of them, which the SDKs iterate", ROLE + sse({"id": "c1", "note": "x", **odd}) + STOP,
         ROLE + sse({"id": "c1", "note": "x", "choices": []}) + STOP)
case("llama.cpp's order", llama({"role": "assistant", "content": None}) + llama({"content": "Hello"})
     + llama({"content": "!"})
     + llama({}, "stop") + DONE,
     llama({"role": "assistant", "content": None}) + llama({"content": "Hello"}) + llama({"content": "!"})
     + llama({}, "stop"),
     tokens=3)
case("spaces in the JSON", b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}\n\n'
     + STOP,
     b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": null}]}\n\n' + STOP, tokens=2)
case("a long event", ROLE + text(LONG) + text(LONG) + STOP + DONE, ROLE + text(LONG) + text(LONG) + STOP)

# -- the grammar of events

WHOLE, SAID = ROLE + HI + text(" a") + STOP + DONE, ROLE + HI + text(" a") + STOP
for name, ending in {"CRLF": b"\r\n", "CR": b"\r"}.items():
    case(name, WHOLE.replace(b"\n", ending), SAID)
for name, blank in {"LF CRLF": b"\n\r\n", "CRLF LF": b"\r\n\n", "CR CRLF": b"\r\r\n", "CR LF LF": b"\r\n\n",
                    "LF CR": b"\n\r",
                    "CRLF CR": b"\r\n\r", "three LF": b"\n\n\n", "four CRLF": b"\r\n\r\n\r\n\r\n"}.items():
    case(f"blank line of {name}", WHOLE.replace(b"\n\n", blank), SAID)
case("every event ends in its own way", ROLE[:-2] + b"\r\n\r\n" + HI[:-2] + b"\r\r" + text("b")[:-2] + b"\n\r\n" + STOP
     + DONE,
     ROLE + HI + text("b") + STOP)
case("a BOM", b"\xef\xbb\xbf" + WHOLE, SAID)
case("a BOM before CRLF", b"\xef\xbb\xbf" + WHOLE.replace(b"\n", b"\r\n"), SAID)
case("a BOM before a comment", b"\xef\xbb\xbf: hello\n\n" + WHOLE, SAID)
case("blank lines first", b"\n\n\n" + WHOLE, SAID)
case("comments between", b": a\n\n" + ROLE + b":b\n\n:\n\n" + HI + text(" a") + b": data: {\n\n" + STOP + DONE, SAID,
     tokens=3)
case("a comment in an event", ROLE + b": a\n" + HI + text(" a")[:-1] + b": b\n\n" + STOP + DONE, SAID)
case("data without a space", WHOLE.replace(b"data: ", b"data:"), SAID)
case("event and id", ROLE + b"event: message\nid: 7\n" + HI + text(" a")[:-1] + b"id: 8\nretry: 9\n\n" + STOP + DONE,
     SAID)
case("fields that only look like data", ROLE + b"database: 1\n\n" + b"data \n\n" + b" data: {}\n\n" + HI + text(" a")
     + STOP, SAID)
case("empty data", ROLE + b"data:\n\ndata: \n\ndata\n\n" + HI + text(" a") + STOP, SAID)
case("data over several lines",
     ROLE + b'data: {"choices": [{"index": 0,\ndata: "delta": {"content": "a\\nb"},\ndata:"finish_reason": null}]}\n\n'
     + STOP,
     ROLE + b'data: {"choices":[{"index":0,"delta":{"content":"a\\nb"},"finish_reason":null}]}\n\n' + STOP)
case("the same after the first text",
     ROLE + HI + b'data: {"choices":[{"index":0,\ndata: "delta":{"content":"b"},"finish_reason":null}]}\n\n' + STOP,
     ROLE + HI + b'data: {"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":null}]}\n\n' + STOP)
for name in ("event and id", "a comment in an event", "data over several lines"):
    one = CASES[name]
    case(f"{name}, CRLF", one.sent.replace(b"\n", b"\r\n"), one.got)
SEPARATORS = "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1e\u00a0e"
for name, content in {"separators": SEPARATORS, "emoji": "\U0001f600 é", "zeros": "\x00\x7f"}.items():
    case(f"{name} in a text", ROLE + text(content) + text(content) + STOP + DONE, ROLE + text(content) + text(content)
         + STOP)
case("raw VT and FF end no line", ROLE + b"event: a\x0bdata: b\x0cdata: c\xe2\x80\xa8data: d\xc2\x85data: e\n" + HI
     + STOP, ROLE + HI + STOP)

BAD = text("@")
for name, broken in {"a lone byte": b"\xff", "a cut character": b"\xe2\x82", "a surrogate": b"\xed\xa0\xbd",
                     "Latin-1": b"caf\xe9",
                     "overlong": b"\xc0\xaf"}.items():
    mended = broken.decode("utf-8", "replace")
    sent, got = BAD.replace(b"@", broken), text(mended)
    case(f"bad UTF-8 at the start: {name}", ROLE + sent + STOP + DONE, ROLE + got + STOP, tokens=2)
    case(f"bad UTF-8 later: {name}", ROLE + HI + sent + STOP + DONE, ROLE + HI + got + STOP, tokens=3)
    case(f"bad UTF-8 after two texts: {name}", ROLE + HI * 2 + sent + STOP, ROLE + HI * 2 + got + STOP, tokens=4)
    case(f"bad UTF-8 in a thought: {name}", ROLE + ev({"reasoning": "@"}).replace(b"@", broken) + STOP,
         ROLE + ev({"reasoning": mended, "reasoning_content": mended}) + STOP)
case("bad UTF-8 with the finish", HI + ev({"content": "@"}, "stop").replace(b"@", b"\xff"),
     HI + ev({"content": "\ufffd"}, "stop"))
case("a lone surrogate as an escape", ROLE + HI + text("@").replace(b"@", rb"\ud83d") + STOP,
     ROLE + HI + text("@").replace(b"@", rb"\ud83d") + STOP)
case("a lone surrogate in an event that changes", ROLE + ev({"content": "@"}, usage=USAGE).replace(b"@", rb"\ud83d")
     + STOP,
     ROLE + ev({"content": "@"}).replace(b"@", rb"\ud83d") + STOP, figures=USAGE)

for name, data in {"no JSON": b"hello", "a list": b"[1]", "a string": b'"x"', "a number": b"5", "null": b"null",
                   "half": b'{"a":',
                   "two": b"{}{}", "nested without end": b"[" * 100000, "bytes": b"\xff\xfe",
                   "DONE and more": b"[DONE] x"}.items():
    case(f"no event: {name}", ROLE + HI + b"data: " + data + b"\n\n" + STOP + DONE, ROLE + HI, UNREADABLE)

for name, broken in {"CR": b"a\rb", "LF": b"a\nb"}.items():
    case(f"a raw {name} in a text", ROLE + HI * 2 + BAD.replace(b"@", broken) + STOP + DONE, ROLE + HI * 2, UNREADABLE)

# -- usage

FIGURES = many(usage=USAGE)
NO_CHOICES = sse({"id": "c1", "usage": USAGE})
for asked in (False, True):
    def then(kept, asked=asked):
        return kept if asked else b""

    word, options = ("asked" if asked else "not asked"), {"usage": asked, "figures": USAGE}
    case(f"usage {word}, choices []", ROLE + HI + STOP + FIGURES + DONE, ROLE + HI + STOP + then(FIGURES), **options,
         tokens=2)
    case(f"usage {word}, no choices", ROLE + HI + STOP + NO_CHOICES + DONE,
         ROLE + HI + STOP + then(sse({"id": "c1", "usage": USAGE, "choices": []})), **options)
    case(f"usage {word}, choices null", ROLE + HI + STOP + sse({"choices": None, "usage": USAGE}) + DONE,
         ROLE + HI + STOP + then(sse({"choices": [], "usage": USAGE})), **options)
    case(f"usage {word}, with a finish", ROLE + HI + ev({}, "stop", usage=USAGE) + DONE,
         ROLE + HI + (ev({}, "stop", usage=USAGE) if asked else STOP), **options)
    case(f"usage {word}, in every chunk", ROLE + ev({"content": "a"}, usage={"prompt_tokens": 1})
         + ev({}, "stop", usage=USAGE) + DONE,
         ROLE + (ev({"content": "a"}, usage={"prompt_tokens": 1}) + ev({}, "stop", usage=USAGE) if asked else text("a")
                 + STOP), **options)
    case(f"usage {word}, null in every chunk", ROLE + ev({"content": "a"}, usage=None)
         + ev({"content": "b"}, usage=None)
         + ev({}, "stop", usage=None) + FIGURES + DONE,
         ROLE + (ev({"content": "a"}, usage=None) + ev({"content": "b"}, usage=None) + ev({}, "stop", usage=None)
                 + FIGURES if asked
                 else text("a") + text("b") + STOP), **options)
    case(f"usage {word}, before a cut", ROLE + ev({"content": "a"}, usage=USAGE),
         ROLE + (ev({"content": "a"}, usage=USAGE) if asked else text("a")), BROKE_OFF, **options)
    case(f"usage {word}, none came", ROLE + HI + STOP + DONE, ROLE + HI + STOP, usage=asked)
    case(f"usage {word}, llama.cpp's with timings", llama({"content": "a"}) + llama({}, "stop")
         + sse({"choices": [], "created": 1, "usage": USAGE, "timings": {"cache_n": 24}}) + DONE,
         llama({"content": "a"}) + llama({}, "stop")
         + then(sse({"choices": [], "created": 1, "usage": USAGE, "timings": {"cache_n": 24}})), **options)

# -- errors

ERRORS = {
    "vLLM's": ({"error": {"message": "it died", "type": "InternalServerError", "param": None, "code": 500}},
               (500, "upstream_error", None, "it died")),
    "a string": ({"error": "it died"}, (502, "upstream_error", None, "it died")),
    "old vLLM's": ({"object": "error", "message": "too bad", "type": "BadRequestError", "param": "n", "code": 400},
                   (400, "invalid_request", "n", "too bad")),
    "a code as text": ({"error": {"message": "too bad", "code": "400"}}, (400, "invalid_request", None, "too bad")),
    "a word as code": ({"error": {"message": "too bad", "code": "odd_word"}}, (502, "upstream_error", None, "too bad")),
    "too many": ({"error": {"message": "slow down", "code": 429}}, (429, "rate_limit_exceeded", None, "slow down")),
    "without a message": ({"error": {"message": None, "code": 500}},
                          (500, "upstream_error", None, "the engine answered with status 500")),
    "HTML": ({"error": {"message": "<html><body>nginx", "code": 500}},
             (500, "upstream_error", None, "the engine answered with status 500")),
    "true": ({"error": True}, (502, "upstream_error", None, "the engine answered with status 502")),
    "a code out of range": ({"error": {"message": "it died", "code": 7}}, (502, "upstream_error", None, "it died")),
    "a float as code": ({"error": {"message": "it died", "code": 5e2}}, (502, "upstream_error", None, "it died")),
    "with choices": ({"id": "c1", "choices": [], "error": {"message": "it died"}},
                     (502, "upstream_error", None, "it died")),
    "too long": ({"error": {"message": "the maximum context length is 10 tokens", "code": 400}},
                 (400, "context_length_exceeded", "messages", "the maximum context length is 10 tokens")),
    "the gateway's key": ({"error": {"message": "bad key sk-1", "code": 401}},
                          (502, "upstream_error", None,
                           "the engine refused the gateway's own key; tell the operator to check "
                           "SPARKS_UPSTREAM_KEY")),
}
for name, (error, refusal) in ERRORS.items():
    case(f"error: {name}", ROLE + HI + sse(error), ROLE + HI, refusal)
    case(f"error first: {name}", sse(error) + DONE, b"", refusal, tokens=0)
DIED, IT_DIED = sse({"error": {"message": "it died", "code": 500}}), (500, "upstream_error", None, "it died")
case("error, then DONE", ROLE + HI + DIED + DONE, ROLE + HI, IT_DIED)
case("error, then text", ROLE + HI + DIED + HI + STOP + DONE, ROLE + HI, IT_DIED)
case("error after the finish", ROLE + HI + STOP + DIED + DONE, ROLE + HI + STOP, IT_DIED)
case("error as a named event", ROLE + b"event: error\n" + DIED + DONE, ROLE, IT_DIED)
case("error null is none", ROLE + ev({"content": "a"}, error=None) + ev({"content": "b"}, error=None) + STOP,
     ROLE + ev({"content": "a"}, error=None) + ev({"content": "b"}, error=None) + STOP, tokens=3)
case("error in a longer stream's bytes", ROLE + HI + text("a") * 20 + DIED, ROLE + HI + text("a") * 20, IT_DIED)

# -- reasoning

THINKS = {"reasoning": {"reasoning": "a"}, "reasoning_content": {"reasoning_content": "a"},
          "both": {"reasoning": "a", "reasoning_content": "a"},
          "reasoning and null": {"reasoning": "a", "reasoning_content": None},
          "null and reasoning_content": {"reasoning": None, "reasoning_content": "a"}}
for setting, wanted in FIELDS.items():
    names = {"names": wanted}
    out = dict.fromkeys(wanted, "a")
    for name, delta in THINKS.items():
        case(f"{name} as {setting}", ROLE + ev(delta) + ev(delta) + HI + STOP + DONE, ROLE + ev(out) + ev(out) + HI
             + STOP, **names, tokens=4)
        case(f"{name} with content as {setting}", ROLE + ev({"content": "x", **delta}) + STOP,
             ROLE + ev({"content": "x", **out}) + STOP, **names)
        case(f"{name} with content and finish as {setting}", ROLE + ev({"content": "x", **delta}, "stop"),
             ROLE + ev({"content": "x", **out}, "stop"), **names, tokens=1)
    for nulls in ({"reasoning": None}, {"reasoning_content": None}, {"reasoning": None, "reasoning_content": None}):
        case(f"{' and '.join(nulls)} null as {setting}", ROLE + ev({"content": "x", **nulls}) * 2
             + ev({**nulls}, "stop"),
             ROLE + text("x") * 2 + STOP, **names, tokens=3)
    case(f"empty reasoning as {setting}", ROLE + ev({"content": "x", "reasoning": ""}) * 2 + STOP,
         ROLE + text("x") * 2 + STOP, **names)
    case(f"llama.cpp's reasoning as {setting}", llama({"role": "assistant", "content": None})
         + llama({"reasoning_content": "a"})
         + llama({"content": "b"}) + llama({}, "stop"),
         llama({"role": "assistant", "content": None}) + llama(out) + llama({"content": "b"}) + llama({}, "stop"),
         **names, tokens=3)
    case(f"reasoning with the role as {setting}", ev({"role": "assistant", "reasoning": "a"}) + HI + STOP,
         ev({"role": "assistant", **out}) + HI + STOP, **names)
    case(f"a finish while thinking as {setting}", ROLE + ev({"reasoning": "a"}, "length") + DONE,
         ROLE + ev(out, "length"), **names)

# -- thinking that leaked into content: exact bytes for some; the rest below by what it adds up to

THOUGHT = {"reasoning": "hm", "reasoning_content": "hm"}
case("a leak in one event", ROLE + text("<think>hm</think>\n\nHello") + text("!") + STOP,
     ROLE + ev({"content": "Hello", **THOUGHT}) + text("!") + STOP, tokens=3)
case("a leak under one name", ROLE + text("<think>hm</think>\n\nHello") + STOP,
     ROLE + ev({"content": "Hello", "reasoning": "hm"}) + STOP, names=REASONING)
case("a leak in events of its own", ROLE + text("<think>") + text("hm") + text("</think>") + text("\n\n")
     + text("Hello") + STOP,
     ROLE + ev(THOUGHT) + text("Hello") + STOP, tokens=3)
case("a leak with the role", ev({"role": "assistant", "content": "<think>"}) + text("hm</think>Hello") + STOP,
     ev({"role": "assistant", "content": ""}) + ev({"content": "Hello", **THOUGHT}) + STOP)
case("tags cut", ROLE + text("<thi") + text("nk>hm</") + text("think>") + text("Hello") + STOP,
     ROLE + ev(THOUGHT) + text("Hello") + STOP)
case("a tag that was none", ROLE + text("<thin") + text("g>") + STOP, ROLE + text("<thing>") + STOP)
case("half a tag at the end", ROLE + text("<thin") + STOP + DONE, ROLE + ev({"content": "<thin"}, "stop"), tokens=1)
case("half a tag with the finish", ROLE + ev({"content": "<thin"}, "stop"), ROLE + ev({"content": "<thin"}, "stop"))
case("spaces alone", ROLE + text(" ") + text("\n") + STOP, ROLE + ev({"content": " \n"}, "stop"))
case("spaces, then text", ROLE + text("  ") + text("Hello") + STOP, ROLE + text("  Hello") + STOP)
case("never closed, finish length", ROLE + text("<think>") + text("hm") + ev({}, "length"),
     ROLE + ev(THOUGHT) + ev({}, "length"))
case("never closed, half a closing tag", ROLE + text("<think>hm</th") + ev({}, "length"),
     ROLE + ev(THOUGHT) + ev({"reasoning": "</th", "reasoning_content": "</th"}, "length"))
case("an empty thought", ROLE + text("<think></think>Hello") + STOP, ROLE + HI + STOP)
case("an empty thought and no answer", ROLE + text("<think>") + text("</think>") + STOP, ROLE + STOP)
case("tags quoted later", ROLE + HI + text("<think>") + text("a</think>b") + STOP, ROLE + HI + text("<think>")
     + text("a</think>b") + STOP)
case("a second thought is a quotation", ROLE + text("<think>hm</think>Hello") + text("<think>x</think>") + STOP,
     ROLE + ev({"content": "Hello", **THOUGHT}) + text("<think>x</think>") + STOP)
case("a leak with logprobs keeps them", ROLE + many(choice({"content": "<think>"}) | {"logprobs": {"content": []}})
     + text("hm</think>Hello") + STOP,
     ROLE + many(choice({}) | {"logprobs": {"content": []}}) + ev({"content": "Hello", **THOUGHT}) + STOP)
case("a leak beside reasoning", ROLE + ev({"reasoning": "so", "content": "<think>hm</think>Hello"}) + STOP,
     ROLE + ev({"content": "Hello", "reasoning": "sohm", "reasoning_content": "sohm"}) + STOP)
case("a leak that is cut off", ROLE + text("<think>hm") + DONE, ROLE + ev(THOUGHT), BROKE_OFF)

# -- several choices

R2 = ROLE + ev({"role": "assistant", "content": ""}, index=1)
B, STOP1 = ev({"content": "b"}, index=1), ev({}, "stop", 1)
case("n=2", R2 + HI + B + STOP + B + STOP1 + DONE, R2 + HI + B + STOP + B + STOP1, n=2, tokens=5)
case("n=2, one without a finish", R2 + HI + B + STOP + B + DONE, R2 + HI + B + STOP + B, BROKE_OFF, n=2)
case("n=2 in one event", R2 + many(choice({"content": "a"}), choice({"content": "b"}, index=1))
     + many(choice({}, "stop"), choice({}, "length", 1)),
     R2 + many(choice({"content": "a"}), choice({"content": "b"}, index=1))
     + many(choice({}, "stop"), choice({}, "length", 1)), n=2)
case("n=2 in one event, one of them held back", many(choice({"content": "<think>"}), choice({"content": "b"}, index=1))
     + many(choice({"content": "hm</think>a"}, "stop"), choice({}, "stop", 1)),
     many(choice({"content": "b"}, index=1)) + many(choice({"content": "a", **THOUGHT}, "stop"), choice({}, "stop", 1)),
     n=2)
case("n=2, reasoning", R2 + ev({"reasoning": "hm"}) + ev({"reasoning": "hm"}, index=1) + STOP + STOP1,
     R2 + ev(THOUGHT) + ev(THOUGHT, index=1) + STOP + STOP1, n=2)
case("n=2, both leak", R2 + text("<think>") + ev({"content": "<think>h"}, index=1) + text("hm</think>")
     + ev({"content": "m</think>b"}, index=1)
     + HI + STOP + STOP1,
     R2 + ev({"reasoning": "h", "reasoning_content": "h"}, index=1) + ev(THOUGHT)
     + ev({"content": "b", "reasoning": "m", "reasoning_content": "m"}, index=1) + HI + STOP + STOP1, n=2)


def test_table(subtests):
    for name, one in CASES.items():
        with subtests.test(name):
            one.check()


@hypothesis.given(st.lists(st.sampled_from(sorted(CASES)), min_size=1, max_size=4),
                  st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data())
def test_any_cuts(names, line_end, data):
    """Of any streams of the table behind one another, with any end of their lines."""
    one = Case(b"".join(CASES[name].sent.replace(DONE, b"") for name in names), None, n=len(names))
    sent = one.sent if b"\r" in one.sent else one.sent.replace(b"\n", line_end)
    assert one.read(pieces(sent, data.draw(cuts(sent)))) == one.read([one.sent])


def test_what_leaves_is_utf8_and_json():
    for one in CASES.values():
        for event in one.stream().feed(one.sent).decode().split("\n\n"):
            assert not event or isinstance(json.loads(event.removeprefix("data: ")), dict)


# ---- texts that look like fields

LOOKALIKES = [
    '"reasoning":"x"', '"reasoning_content":"x"', "reasoning", "reasoning_content", '"usage"', "usage", '"usage":null',
    '"finish_reason":null', '"finish_reason":"stop"', "finish_reason", '"error"', "error", '"error":{"message":"x"}',
    '"tool_calls"',
    "tool_calls", '"tool_calls":[]', "content", '"content":"x"', "data: [DONE]", "[DONE]", "data: [DONE]\n\n", "\n\n",
    "\r\n\r\n", ": x",
    "\\", '\\"', '"', '\\\\"', '"reasoning":"', '\\"reasoning\\":\\"x\\"', '{"choices":[]}', "</think>",
    "a<think>b</think>", "\\u0022",
    SEPARATORS, "\U0001f600\u0301", "ends with \\",
]


def test_lookalikes(subtests):
    for looks, names, ascii in itertools.product(LOOKALIKES, FIELDS.values(), (False, True)):
        with subtests.test(looks, names=names, ascii=ascii):
            check_lookalike(looks, names, ascii)


def check_lookalike(looks, names, ascii):
    def send(delta, finish=None):
        chunk = {"id": "c1", "choices": [choice(delta, finish)]}
        return b"data: " + json.dumps(chunk, ensure_ascii=ascii, separators=(",", ":")).encode() + b"\n\n"

    sent = [{"role": "assistant", "content": ""}, {"reasoning": looks}, {"reasoning": "so"}, {"content": "Well"},
            {"content": looks},
            {"content": looks, "reasoning": looks}, {"content": "so"}]
    stream = ChatStream(names)
    out = b"".join(stream.feed(send(delta)) for delta in sent) + stream.feed(send({}, "stop"))
    expected = [{**{name: value for name, value in delta.items() if name != "reasoning"},
                 **(dict.fromkeys(names, delta["reasoning"]) if "reasoning" in delta else {})}
                for delta in sent]
    assert [chunk["choices"][0]["delta"] for chunk in events_of(out)] == [*expected, {}]
    assert stream.tokens == 7 and stream.usage is None and stream.end() == DONE


def test_lookalikes_in_content_keep_their_bytes():
    sent = {looks: ROLE + HI + text(looks) + ev({"content": looks}, "stop") for looks in LOOKALIKES}
    assert {looks: ChatStream().feed(data) for looks, data in sent.items()} == sent


# ---- what a client makes of it

def events_of(out):
    """The JSON of a stream as a strict client reads it: UTF-8, lines ended by CR, LF or CRLF, blank lines between."""
    events, data = [], []
    for line in re.split("\r\n|\r|\n", out.decode()):
        if not line and data:
            events.append(json.loads("\n".join(data)))
            data = []
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
    assert not data
    return events


def client(out, index=0):
    """(reasoning, content, calls, finish) as a client that reads `reasoning` accumulates them."""
    reasoning, content, calls, finish = "", "", {}, None
    for event in events_of(out):
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            reasoning, content = reasoning + delta.get("reasoning", ""), content + (delta.get("content") or "")
            finish = choice["finish_reason"] or finish
            for piece in delta.get("tool_calls") or []:
                add_call(calls, piece)
    return reasoning, content, calls, finish


def add_call(calls, piece):
    """As clients do: the index tells the calls apart; a new id on a known index would be taken for a new call."""
    call = calls.setdefault(piece["index"], {"id": piece.get("id"), "name": "", "arguments": ""})
    assert call["id"] and piece.get("id") in (None, call["id"])
    function = piece.get("function") or {}
    call["name"] = call["name"] or function.get("name") or ""
    call["arguments"] += function.get("arguments") or ""


def said(pieces, finish="stop", last=None, make=ev):
    """What a client has after an engine said these pieces of content."""
    stream = ChatStream()
    out = stream.feed(make({"role": "assistant", "content": ""})
                      + b"".join(make({"content": piece}) for piece in pieces)
                      + make(last or {}, finish) + DONE)
    assert stream.end() == DONE
    reasoning, content, calls, ended = client(out)
    assert (calls, ended) == ({}, finish)
    return reasoning, content


LEAKS = [
    ("<think>hm</think>Hello", "hm", "Hello"),
    ("<think>hm</think>\n\nHello\n", "hm", "Hello\n"),
    ("\n <think>hm</think> Hello", "hm", "Hello"),
    ("<think>\nhm\n</think>\n\nHello", "\nhm\n", "Hello"),
    ("<think></think>Hello", "", "Hello"),
    ("<think>\n\n</think>\n\nHello", "\n\n", "Hello"),
    ("<think>hm", "hm", ""),
    ("<think>hm</thin", "hm</thin", ""),
    ("<think>a</thin</think>b", "a</thin", "b"),
    ("<think>a < b </ c</think>d", "a < b </ c", "d"),
    ("<think><think>a</think>b", "<think>a", "b"),
    ("<think>a</think></think>b", "a", "</think>b"),
    ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    ("Hello <think>a</think>", "", "Hello <think>a</think>"),
    ("`<think>` opens", "", "`<think>` opens"),
    ("<thin", "", "<thin"), ("<thinking>a", "", "<thinking>a"), ("<", "", "<"), ("<<think>a", "", "<<think>a"),
    (" \n", "", " \n"), (" <", "", " <"), ("  a", "", "  a"), ("<Think>a</Think>", "", "<Think>a</Think>"),
    ("a</think>b", "", "a</think>b"), ("", "", ""),
]


def test_leaks_cut_anywhere(subtests):
    for whole, reasoning, content in LEAKS:
        with subtests.test(whole):
            assert however_cut(whole, said) == (reasoning, content)
            if whole:
                assert however_cut(whole, said_to_the_end) == (reasoning, content)


def said_to_the_end(arrived):
    """The same from llama.cpp, the last piece beside the finish."""
    return said(arrived[:-1], "length", {"content": arrived[-1]}, llama)


SNIPPETS = st.sampled_from([*LOOKALIKES, "<think>", "</think>", "<thi", "</thin", "nk>", " ", "\n"])
TEXTS = st.lists(SNIPPETS | st.text(max_size=8), max_size=5).map("".join)


@hypothesis.given(thought=TEXTS, content=TEXTS, leak=st.booleans(), data=st.data(),
                  style=st.tuples(st.booleans(), st.sampled_from([(",", ":"), (", ", ": ")]), st.booleans()))
def test_what_the_engine_meant_arrives(thought, content, leak, data, style):
    """Any texts, thought as a field or as a leak, any cut of the texts and of the bytes, any way to write the JSON."""
    def cut(whole):
        return pieces(whole, data.draw(cuts(whole)))

    hypothesis.assume("</think>" not in thought if leak else not content.lstrip().startswith("<think>"))
    if leak:
        content = content.lstrip()
        deltas = [{"content": piece} for piece in cut(f"<think>{thought}</think>\n{content}")]
    else:
        deltas = [*({"reasoning_content": piece} for piece in cut(thought)),
                  *({"content": piece} for piece in cut(content))]
    ascii, separators, together = style
    ends = [choice(delta) for delta in [{"role": "assistant"}, *deltas]] + [choice({}, "stop")]
    if together and deltas:
        ends[-2:] = [choice(deltas[-1], "stop")]
    sent = b"".join(b"data: " + json.dumps({"id": "c1", "choices": [end]}, ensure_ascii=ascii,
                                           separators=separators).encode() + b"\n\n"
                    for end in ends)
    stream = ChatStream()
    out = replay(stream, cut(sent))
    assert stream.end() == DONE
    assert client(out) == (thought, content, {}, "stop")


JSON = st.recursive(st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
                    max_leaves=4)
FIELD_NAMES = st.sampled_from(["index", "delta", "finish_reason", "logprobs", "content", "reasoning", "role",
                               "tool_calls", "id", "choices",
                               "function", "name", "arguments", "usage", "error", "message", "code", "detail", "object",
                               "type"])


def objects(inner):
    return st.dictionaries(FIELD_NAMES, inner, max_size=4)


ODD_CALL = objects(JSON | objects(JSON))
ODD_DELTA = st.fixed_dictionaries({"tool_calls": JSON | st.lists(ODD_CALL, max_size=3)},
                                  optional={"content": JSON, "reasoning": JSON, "role": JSON})
ODD_CHOICE = st.fixed_dictionaries({"delta": JSON | ODD_DELTA},
                                   optional={"index": JSON, "finish_reason": JSON, "logprobs": JSON})
ODD_CHUNK = st.fixed_dictionaries({"choices": st.lists(ODD_CHOICE | JSON, max_size=2)},
                                  optional={"id": JSON, "usage": JSON})
ODD_ERROR = st.fixed_dictionaries({"error": JSON | objects(JSON | st.lists(objects(JSON), max_size=2))})


@hypothesis.given(st.lists(ODD_CHUNK | ODD_ERROR | JSON, max_size=3), st.booleans(), st.sampled_from([1, 2]))
def test_an_engine_that_talks_nonsense_is_no_fault_of_ours(chunks, usage, n):
    """Whatever JSON an engine sends: what leaves is JSON, and the end is an end or a Refusal."""
    stream = ChatStream(usage=usage, n=n)
    events_of(stream.feed(ROLE + b"".join(map(sse, chunks))))
    end_of(stream)


ODD_DELTAS = [
    {"tool_calls": [{"index": [], "id": "a", "function": {"name": "f"}}]},
    {"tool_calls": [{"index": 0, "id": {"a": 1}, "function": {"name": "f"}}]},
    {"tool_calls": [{"index": 0, "id": "a", "function": "f"}]},
    {"tool_calls": [{"index": 0, "id": "a", "function": ["f"]}]},
    {"tool_calls": [None, "x", 5]},
    {"tool_calls": 5},
    {"tool_calls": {"index": 0}},
    {"content": 5}, {"content": [{"type": "text", "text": "a"}]}, {"reasoning": 5}, {"role": []},
]


def test_odd_deltas(subtests):
    for delta in ODD_DELTAS:
        with subtests.test(str(delta)):
            stream = ChatStream()
            assert events_of(stream.feed(ROLE + ev(delta) + STOP + DONE))
            assert end_of(stream) == DONE or end_of(stream)[0] == 502


ODD_ERRORS = [
    {"message": [{"loc": 5, "msg": "x"}]}, {"message": [{"loc": None}]}, {"message": {"a": 1}}, {"code": []},
    {"code": {}}, {"param": 5},
    {"code": True}, {"code": -1}, {"code": 200}, {"code": "9" * 5000}, {"code": "\u00b2"}, {"type": []}, [], ["x"], 5,
]


def test_odd_errors(subtests):
    for error in ODD_ERRORS:
        with subtests.test(str(error)[:60]):
            stream = ChatStream()
            stream.feed(ROLE + sse({"error": error or {"message": ""}, "choices": []}))
            status, code, param, message = end_of(stream)
            assert 400 <= status < 600 and isinstance(code, str) and isinstance(message, str)
            assert isinstance(param, str | None)


# ---- tool calls

def piece(name=None, arguments=None, **fields):
    function = {name: value for name, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {**fields, **({"function": function} if function else {})}


def calls(*deltas, index=0):
    """Events, one for each list of pieces."""
    return b"".join(ev({"tool_calls": list(pieces)}, index=index) for pieces in deltas)


def placed(*deltas, n=1, index=0, finish="tool_calls"):
    stream = ChatStream(n=n)
    out = stream.feed(ev({"role": "assistant", "content": None}, index=index) + calls(*deltas, index=index)
                      + ev({}, finish, index) + DONE)
    assert stream.end() == DONE
    reasoning, content, found, ended = client(out, index)
    assert (reasoning, content, ended) == ("", "", finish)
    assert list(found) == list(range(len(found)))
    return [tuple(call.values()) for call in found.values()]


def f(**fields):
    return piece("f", None, **fields)


def g(**fields):
    return piece("g", None, **fields)


def sound(deltas):
    """The same pieces, each call's first one with its type."""
    return [[{**one, "type": "function"} if "id" in one else one for one in pieces] for pieces in deltas]


def args(text, **fields):
    return piece(None, text, **fields)


TWO = [("A", "f", "12"), ("B", "g", "34")]
CALLS = {
    "vLLM's": [[f(id="A", index=0)], [args("1", index=0)], [args("2", index=0)], [g(id="B", index=1)],
               [args("3", index=1)], [args("4", index=1)]],
    "whole in one": [[piece("f", "12", id="A", index=0), piece("g", "34", id="B", index=1)]],
    "no index": [[f(id="A")], [args("1")], [args("2")], [g(id="B")], [args("3")], [args("4")]],
    "no index, whole": [[piece("f", "12", id="A")], [piece("g", "34", id="B")]],
    "no index, whole in one": [[piece("f", "12", id="A"), piece("g", "34", id="B")]],
    "index null": [[f(id="A", index=None)], [args("12", index=None)], [g(id="B", index=None)],
                   [args("34", index=None)]],
    "two ids on one index": [[f(id="A", index=0)], [args("12", index=0)], [g(id="B", index=0)], [args("34", index=0)]],
    "two ids on one index, whole": [[piece("f", "12", id="A", index=0)], [piece("g", "34", id="B", index=0)]],
    "two ids on one index, in one event": [[piece("f", "12", id="A", index=0), piece("g", "34", id="B", index=0)]],
    "the id on each piece": [[f(id="A", index=0)], [args("1", id="A", index=0)], [args("2", id="A", index=0)],
                             [g(id="B", index=1)],
                             [args("34", id="B", index=1)]],
    "the id on each piece, one index": [[f(id="A", index=0)], [args("12", id="A", index=0)], [g(id="B", index=0)],
                                        [args("34", id="B", index=0)]],
    "the id on each piece, no index": [[f(id="A")], [args("12", id="A")], [g(id="B")], [args("34", id="B")]],
    "the id on each piece, interleaved, no index": [[f(id="A")], [g(id="B")], [args("1", id="A")], [args("3", id="B")],
                                                    [args("2", id="A")],
                                                    [args("4", id="B")]],
    "id and name on each piece": [[f(id="A", index=0)], [piece("f", "12", id="A", index=0)],
                                  [piece("g", "3", id="B", index=1)],
                                  [piece("g", "4", id="B", index=1)]],
    "an id made anew for each piece": [[f(id="A", index=0)], [args("1", id="X", index=0)], [args("2", id="Y", index=0)],
                                       [g(id="B", index=1)],
                                       [args("34", id="Z", index=1)]],
    "an id made anew, no index": [[f(id="A")], [args("1", id="X")], [args("2", id="Y")], [g(id="B")],
                                  [args("34", id="Z")]],
    "an id made anew, one index": [[f(id="A", index=0)], [args("12", id="X", index=0)], [g(id="B", index=0)],
                                   [args("34", id="Y", index=0)]],
    "id null on later pieces": [[f(id="A", index=0)], [args("12", id=None, index=0)], [g(id="B", index=1)],
                                [args("34", id="", index=1)]],
    "index from 1": [[f(id="A", index=1)], [args("12", index=1)], [g(id="B", index=2)], [args("34", index=2)]],
    "index with a gap": [[f(id="A", index=3)], [args("12", index=3)], [g(id="B", index=9)], [args("34", index=9)]],
    "index as text": [[f(id="A", index="0")], [args("12", index="0")], [g(id="B", index="1")], [args("34", index="1")]],
    "interleaved": [[f(id="A", index=0)], [g(id="B", index=1)], [args("1", index=0)], [args("3", index=1)],
                    [args("2", index=0)], [args("4", index=1)]],
    "interleaved in one event": [[f(id="A", index=0), g(id="B", index=1)], [args("12", index=0), args("34", index=1)]],
    "interleaved, index from 1": [[f(id="A", index=1), g(id="B", index=2)], [args("3", index=2), args("1", index=1)],
                                  [args("2", index=1), args("4", index=2)]],
    "the name after the id": [[{"id": "A", "index": 0}], [f(index=0)], [args("12", index=0)], [{"id": "B", "index": 1}],
                              [g(index=1)],
                              [args("34", index=1)]],
    "function null": [[f(id="A", index=0)], [{"index": 0, "function": None}], [args("12", index=0)],
                      [g(id="B", index=1)], [args("34", index=1)]],
    "name null on later pieces": [[f(id="A", index=0)], [{"index": 0, "function": {"name": None, "arguments": "12"}}],
                                  [g(id="B", index=1)], [{"index": 1, "function": {"name": "", "arguments": "34"}}]],
}
NO_IDS = {
    "no id": [[f(index=0)], [args("12", index=0)], [g(index=1)], [args("34", index=1)]],
    "no id, from 1": [[f(index=1)], [args("12", index=1)], [g(index=2)], [args("34", index=2)]],
    "no id, id null": [[f(index=0, id=None)], [args("12", index=0, id=None)], [g(index=1, id=None)],
                       [args("34", index=1, id=None)]],
    "no id, interleaved": [[f(index=0), g(index=1)], [args("3", index=1)], [args("1", index=0)], [args("4", index=1)],
                           [args("2", index=0)]],
    "no id, no index": [[f()], [args("12")], [g()], [args("34")]],
    "no id, no index, whole": [[piece("f", "12")], [piece("g", "34")]],
    "no id, no index, in one event": [[piece("f", "12"), piece("g", "34")]],
}


def test_calls_keep_their_identity(subtests):
    for name, deltas in CALLS.items():
        with subtests.test(name):
            assert placed(*deltas) == TWO
            assert placed(*deltas, n=2, index=1) == TWO


def test_calls_without_ids_get_some(subtests):
    for name, deltas in NO_IDS.items():
        with subtests.test(name):
            found = placed(*deltas)
            assert [call[1:] for call in found] == [call[1:] for call in TWO]
            assert len({call[0] for call in found}) == 2


def test_one_function_called_twice_without_ids():
    assert [call[1:] for call in placed([piece("f", "1")], [piece("f", "2")])] == [("f", "1"), ("f", "2")]


def test_an_id_that_comes_late_is_not_another_call():
    found = placed([f(index=0)], [args("12", index=0, id="A")])
    assert [call[1:] for call in found] == [("f", "12")]


def test_sound_calls_keep_their_bytes():
    sent = ROLE + calls(*sound(CALLS["vLLM's"])) + calls(*[[args("5", index=1)]] * 3) + ev({}, "tool_calls")
    stream = ChatStream()
    assert stream.feed(sent) == sent
    assert stream.tokens == 10


def test_calls_exactly():
    """The bytes of a mended stream: only what must change has changed."""
    sent = calls([piece("f", "1", id="A", type="function", index=1)], [args("2", index=1, id="Z")], [args("3")],
                 [g(id="B", type="function")]) + ev({}, "length")
    assert ChatStream().feed(sent) == calls([piece("f", "1", id="A", type="function", index=0)], [args("2", index=0)]) \
        + b"".join(ev({"tool_calls": [{**call, "index": index}]}) for call,
                   index in ((args("3"), 0), (g(id="B", type="function"), 1))) + ev({}, "length")


def test_choices_count_their_calls_apart():
    stream = ChatStream(n=2)
    out = stream.feed(calls([f(id="A", index=0)]) + calls([g(id="B")], index=1) + calls([args("1", index=0)])
                      + calls([args("2")], index=1)
                      + calls([f(id="C", index=0)], index=1) + ev({}, "tool_calls") + ev({}, "tool_calls", 1))
    assert client(out)[2] == {0: {"id": "A", "name": "f", "arguments": "1"}}
    assert client(out, 1)[2] == {0: {"id": "B", "name": "g", "arguments": "2"},
                                 1: {"id": "C", "name": "f", "arguments": "{}"}}


def test_calls_after_thinking_and_text():
    stream = ChatStream()
    out = stream.feed(ROLE + text("<think>hm</think>\n") + text("Let me see") + calls([f(id="A")], [args("{}")])
                      + ev({}, "tool_calls"))
    assert client(out) == ("hm", "Let me see", {0: {"id": "A", "name": "f", "arguments": "{}"}}, "tool_calls")


def test_calls_and_text_in_one_delta():
    delta = {"content": "<think>hm</think>Hello", "tool_calls": [f(id="A")]}
    call = {"id": "A", "name": "f", "arguments": "{}"}
    assert client(ChatStream().feed(ev(delta, "tool_calls"))) == ("hm", "Hello", {0: call}, "tool_calls")


# ---- real engines

def wire(name):
    return (WIRE / f"{name}.sse").read_bytes()


def renamed(data):
    return re.sub(rb'"reasoning(?:_content)?":("[^"]*")', rb'"reasoning":\1,"reasoning_content":\1', data)


def without_usage(data):
    return b"".join(event + b"\n\n" for event in data.split(b"\n\n") if event and b'"choices":[]' not in event)


def real(name, said, end=DONE, **options):
    sent = wire(name)
    before = renamed(sent.removesuffix(DONE))
    one = Case(sent, before if options.get("usage") else without_usage(before), end, **options)
    one.check()
    assert client(one.got) == said


VLLM_USAGE = {"prompt_tokens": 15, "total_tokens": 20, "completion_tokens": 5,
              "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
              "completion_tokens_details": {"reasoning_tokens": 1}}


@pytest.mark.parametrize("usage", [False, True])
def test_vllm_chat(usage):
    real("vllm-chat", ("Ok", "Yes indeed", {}, "stop"), usage=usage, tokens=4, figures=VLLM_USAGE)


@pytest.mark.parametrize("usage", [False, True])
def test_vllm_two_calls(usage):
    sent = wire("vllm-two-calls")
    figures = json.loads(sent.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
    got = renamed(sent.removesuffix(DONE))
    if not usage:
        got = re.sub(rb',"usage":\{(?:[^{}]|\{[^{}]*\})*\}', b"", without_usage(got))
    Case(sent, got, usage=usage, figures=figures, tokens=14).check()
    reasoning, content, found, finish = client(got)
    assert [(call["name"], json.loads(call["arguments"])) for call in found.values()] == [
        ("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})]
    assert (reasoning, finish) == ("Two cities asked", "tool_calls") and figures["completion_tokens"] == 20


def test_vllm_n2():
    sent = wire("vllm-n2")
    real("vllm-n2", ("Ok", "Yes indeed", {}, "stop"), n=2, usage=True, tokens=8,
         figures=json.loads(sent.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"])
    assert client(ChatStream(n=2).feed(sent), 1) == ("Ok", "Yes indeed", {}, "stop")


def test_vllm_killed():
    real("vllm-killed", ("Going long", "", {}, None), BROKE_OFF, tokens=2)


def test_vllm_died():
    sent = wire("vllm-died")
    got = renamed(sent[:sent.index(b'data: {"error"')])
    message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
    Case(sent, got, (500, "upstream_error", None, message)).check()


def test_llama_chat():
    figures = {"completion_tokens": 12, "prompt_tokens": 36, "total_tokens": 48,
               "prompt_tokens_details": {"cached_tokens": 24}}
    for usage in (False, True):
        real("llama-chat", ("", "Hello, welcome to my little corner of the world.", {}, "stop"), usage=usage,
             figures=figures, tokens=12)


def test_llama_think():
    reasoning, content, _, finish = client(ChatStream().feed(wire("llama-think")))
    real("llama-think", (reasoning, content, {}, "length"), usage=True)
    assert reasoning.startswith("The answer to this") and content.endswith("light.") and finish == "length"


# ---- the rest of the interface

def test_alive_is_a_comment():
    assert ChatStream().alive() == b": keep-alive\n\n"
    assert ChatStream().alive("queued") == b": queued\n\n"


SILENCE = {"chat": (ChatStream, "chatcmpl-", "chat.completion.chunk", {"delta": {}}),
           "completion": (CompletionStream, "cmpl-", "text_completion", {"text": ""})}


def silent(api, model="m", **options):
    make, prefix, kind, choice = SILENCE[api]
    stream = make(usage=True, **options)
    stream.alive_in_chunks("1", 7, model)
    head = {"id": prefix + "1", "object": kind, "created": 7, "model": model}
    return stream, head, {"index": 0, "logprobs": None, "finish_reason": None, **choice}


@pytest.mark.parametrize("api", SILENCE)
def test_alive_in_chunks_before_the_engine_s(api):
    """What the first of all chunks says of the completion, all of them say; no other word of the engine's changes."""
    stream, head, choice = silent(api)
    assert [events_of(stream.alive(note)) for note in ("queued 3", "keep-alive")] == [[{**head, "choices": [choice]}]] * 2
    engine = {"id": "x", "object": "y", "created": 1, "model": "z", "more": 5}
    ways = [{**choice, "delta": {"content": "a"}, "text": "a"}, {**choice, "delta": {}, "text": "", "finish_reason": "stop"}]
    for value in ({**engine, "choices": [ways[0]]}, {**engine, "choices": [ways[0]]}, {**engine, "choices": [ways[1]]},
                  {**engine, "choices": [], "usage": {"prompt_tokens": 1}}):
        assert events_of(stream.feed(sse(value))) == [{**value, **head}]
    assert stream.tokens == 3


@pytest.mark.parametrize("api", SILENCE)
def test_alive_in_chunks_after_the_engine_s(api):
    """They say what it says, and its bytes stay as they are."""
    stream, _, choice = silent(api)
    piece = {**choice, "delta": {"role": "assistant", "content": "a"}, "text": "a"}
    engine = {"id": "x", "object": SILENCE[api][2], "created": 1, "model": "z"}
    event = sse({**engine, "choices": [piece]})
    for _ in range(3):
        assert stream.feed(event) == event
        assert events_of(stream.alive()) == [{**engine, "choices": [choice]}]
    assert stream.tokens == 3


def test_alive_in_chunks_goes_on_without_parsing(monkeypatch):
    stream, _, _ = silent("chat")
    stream.feed(ROLE + HI + HI)
    stream.alive()
    monkeypatch.setattr("stream.loads", None)
    assert stream.feed(text("more")) == text("more")


@pytest.mark.parametrize("finished, index", [((), 0), ((0,), 1), ((1,), 0), ((0, 1), None)])
def test_alive_in_chunks_hides_no_finish(finished, index):
    stream, _, _ = silent("chat", n=2)
    stream.feed(ev({"content": "a"}) + ev({"content": "b"}, index=1) + b"".join(ev({}, "stop", index=at) for at in finished))
    if index is None:
        assert stream.alive() == b": keep-alive\n\n"
    else:
        assert events_of(stream.alive())[0]["choices"][0]["index"] == index


@pytest.mark.parametrize("name", ["vllm-chat", "vllm-two-calls", "vllm-n2", "llama-chat", "llama-think"])
def test_every_chunk_names_the_tier_that_was_asked_for(name):
    """And is the same else, however it was cut."""
    sent = wire(name)
    options = {"n": 2 if "n2" in name else 1, "usage": True, "model": "another name"}
    usual = events_of(ChatStream(**options).feed(sent))

    def read(parts):
        stream = ChatStream(**options)
        stream.tier = "flex"
        return b"".join(map(stream.feed, parts))
    said = read([sent])
    assert said.count(b'"service_tier":"flex"') == said.count(b"data: ") == len(usual)
    assert events_of(said) == [{**value, "service_tier": "flex"} for value in usual]
    for size in (1, 7, 128):
        assert events_of(read(pieces(sent, range(size, len(sent), size)))) == events_of(said)


def test_a_tier_goes_on_without_parsing_and_signs_of_life_have_it(monkeypatch):
    stream, _, _ = silent("chat")
    stream.tier = "flex"
    stream.feed(ROLE + HI + HI)
    assert events_of(stream.alive())[0]["service_tier"] == "flex"
    monkeypatch.setattr("stream.loads", None)
    assert stream.feed(text("more")).startswith(b'data: {"service_tier":"flex","id":')
    engines_own = sse({**json.loads(HI[6:]), "service_tier": "auto"})
    monkeypatch.undo()
    assert events_of(stream.feed(engines_own))[0]["service_tier"] == "flex"


def test_alive_in_chunks_for_a_choice_that_has_not_begun():
    stream, _, _ = silent("chat", n=2)
    stream.feed(ev({"content": "a"}) + ev({}, "stop"))
    assert events_of(stream.alive())[0]["choices"][0]["index"] == 1


def test_fail_is_an_error_event():
    error = UpstreamTimeout("no token for 300 seconds")
    assert ChatStream().fail(error) == sse({"error": {"message": "no token for 300 seconds", "type": "api_error",
                                                      "code": "upstream_timeout",
                                                      "param": None}})


def test_nothing_comes_out_once_it_is_over():
    stream = ChatStream()
    stream.feed(ROLE + STOP + DONE)
    assert stream.over and stream.feed(HI + DIED + b"data: x\n\n") == b"" and stream.end() == DONE


def test_comments_are_no_tokens():
    stream = ChatStream()
    stream.feed(ROLE + HI)
    before = stream.tokens
    assert stream.feed(b": keep-alive\n\n" * 5) == b"" and stream.tokens == before


def test_an_event_that_never_ends(monkeypatch):
    monkeypatch.setattr("stream.MAX_EVENT", 1000)
    end = (502, "upstream_error", None, "the engine sent an event that does not end")
    Case(ROLE + HI + b"data: " + b"x" * 2000, ROLE + HI, end).check()


def test_the_longest_event_passes(monkeypatch):
    monkeypatch.setattr("stream.MAX_EVENT", 1000)
    whole = ROLE + text("x" * (1001 - len(text("")))) + STOP       # its last byte comes with the last of the 1000
    Case(whole, whole).check()


def test_a_large_event_is_cut_in_linear_time():
    """4 MB in pieces of 128 bytes: a second look at every byte for each piece would take minutes."""
    sent = text("x" * (4 << 20))
    events = Events()
    found = [event for data in pieces(sent, range(128, len(sent), 128)) for event in events.feed(data)]
    assert [event + b"\n\n" for event in found] == [sent]


# ---- a plain completion to a client that streams

def plain(message, finish="stop", **more):
    return {"id": "c1", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}], **more}


def test_a_message_at_the_end_repeats_no_text_that_waits():
    """The text could become a tag until then."""
    stream = ChatStream()
    out = stream.feed(sse({"choices": [choice({"role": "assistant", "content": "<"})]}))
    out += stream.feed(sse({"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "<"}}]}))
    assert client(out)[1] == "<" and stream.end()


def test_an_empty_usage_takes_no_figures_back():
    stream = ChatStream()
    stream.feed(sse({"choices": [choice({"content": "a"}, "stop")], "usage": USAGE}) + sse({"choices": [], "usage": {}}) + DONE)
    assert stream.usage == USAGE and stream.end() == DONE


@pytest.mark.parametrize("usage", [False, True])
def test_whole(usage):
    stream = ChatStream(usage=usage)
    out = stream.feed_plain(plain({"role": "assistant", "content": "Hello", "reasoning": "hm"}, usage=USAGE))
    chunk = {"id": "c1", "created": 1, "model": "m", "object": "chat.completion.chunk"}
    assert out == sse({**chunk, "choices": [choice({"role": "assistant", "content": "Hello", **THOUGHT}, "stop")]}) \
        + (sse({**chunk, "choices": [], "usage": USAGE}) if usage else b"")
    assert stream.over and stream.usage == USAGE and stream.end() == DONE


def test_whole_with_calls_and_a_leak():
    stream = ChatStream()
    tools = [{"id": "A", "type": "function", "function": {"name": "f", "arguments": "{}"}},
             {"id": "B", "type": "function",
             "function": {"name": "g", "arguments": "{}"}}]
    out = stream.feed_plain(plain({"role": "assistant", "content": "<think>hm</think>Hello", "tool_calls": tools},
                             "tool_calls", usage=USAGE))
    assert client(out) == ("hm", "Hello",
                           {0: {"id": "A", "name": "f", "arguments": "{}"},
                            1: {"id": "B", "name": "g", "arguments": "{}"}},
                           "tool_calls")


def test_whole_without_usage_says_nothing_more():
    """An event with no choices and no usage would only break clients that read choices[0]."""
    stream = ChatStream()
    out = stream.feed_plain(plain({"role": "assistant", "content": "Hello"}))
    assert [len(event["choices"]) for event in events_of(out)] == [1] and stream.end() == DONE


@pytest.mark.parametrize("completion", [{}, {"choices": []}, {"choices": None}, plain({"content": "Hello"}, None)])
def test_whole_that_is_none(completion):
    stream = ChatStream()
    stream.feed_plain(completion)
    with pytest.raises(UpstreamError):
        stream.end()


# ---- pieces

LEAKED = [
    ("Hello", "", "Hello"), ("", "", ""), (" \n", "", " \n"), ("<thin", "", "<thin"),
    ("<think>hm</think>Hello", "hm", "Hello"), ("\n<think>\nhm\n</think>\n\nHello\n", "hm", "Hello\n"),
    ("<think>hm", "hm", ""),
    ("<think>hm</th", "hm</th", ""), ("<think></think>Hello", "", "Hello"), ("<think></think>", "", ""),
    ("<think>hm</think>", "hm", ""),
    ("hm\n</think>\n\nHello", "hm", "Hello"), ("</think>Hello", "", "Hello"), ("hm</think>", "hm", ""),
    ("\n</think>\n\nHello", "", "Hello"),
    ("hm</think>a</think>b", "hm", "a</think>b"),
    ("The tag `</think>` ends it", "", "The tag `</think>` ends it"), ('say "</think>"', "", 'say "</think>"'),
    ("'</think>'", "", "'</think>'"), ("Use <think>a</think> here", "", "Use <think>a</think> here"),
    ("<think>a</think>b</think>c", "a", "b</think>c"), ("<thinking>a</think>b", "<thinking>a", "b"),
]


def test_leaked():
    assert [(content, *split_thinking(content)) for content, *_ in LEAKED] == LEAKED


@hypothesis.given(TEXTS)
def test_leaked_loses_nothing_but_tags_and_blanks(content):
    def bare(text):
        return re.sub(r"\s", "", text).replace("<think>", "", 1).replace("</think>", "", 1)

    assert bare("".join(split_thinking(content))) == bare(content) or "think>" in content
    if "think>" not in content:
        assert split_thinking(content) == ("", content)


@hypothesis.given(TEXTS, st.data())
def test_a_lead_gives_the_same_for_any_cut(content, data):
    def run(arrived):
        lead, out = LeakedThinking(), []
        for piece in arrived:
            out.append(lead.feed(piece))
        out.append(lead.flush())
        return tuple("".join(part) for part in zip(*out, strict=True))

    assert run(pieces(content, data.draw(cuts(content)))) == run([content])


# -- a closing tag alone, in a stream whose request wanted no thoughts of a model that can't but think

CALL = {"tool_calls": [{"index": 0, "id": "A", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
BEGUN = {0: {"id": "A", "name": "f", "arguments": "{}"}}
ORPHANS = [  # the events; what the client has of them in the end; the content that it has before the last event
    ("2+2 is easy.\n|</think>4| and|STOP", ("2+2 is easy.", "4 and", {}, "stop"), "4 and"),
    ("2+2 is easy.\n|</|thi|nk>|\n|\n4|STOP", ("2+2 is easy.", "4", {}, "stop"), "4"),
    ("</think>\n\n4|STOP", ("", "4", {}, "stop"), "4"), ("\n|</think>|4|STOP", ("", "4", {}, "stop"), "4"),
    ("hm</think>The tag </think>| is a tag|STOP", ("hm", "The tag </think> is a tag", {}, "stop"), "The tag </think> is a tag"),
    ("4|STOP", ("", "4", {}, "stop"), ""), ("4 and| so on|LENGTH", ("", "4 and so on", {}, "length"), ""),
    ("hm|</thi|STOP", ("", "hm</thi", {}, "stop"), ""), ("\n|STOP", ("", "\n", {}, "stop"), ""),
    ("Use `|</think>`| to end it|STOP", ("", "Use `</think>` to end it", {}, "stop"), "Use `</think>` to end it"),
    ("Use\n```\n|</think>|\n```\nto end it|STOP", ("", "Use\n```\n</think>\n```\nto end it", {}, "stop"), "Use\n```\n</think>\n```\nto end it"),
    ("```\nx\n```\n|</think>4|STOP", ("```\nx\n```", "4", {}, "stop"), "4"),
    ('{"a": "b |</think> c"}|STOP', ("", '{"a": "b </think> c"}', {}, "stop"), '{"a": "b </think> c"}'),
    ("<think>hm</think>|4|STOP", ("hm", "4", {}, "stop"), "4"), ("<thi|nk>hm|</think>4|STOP", ("hm", "4", {}, "stop"), "4"),
    ("Look: |<think>a</think>|STOP", ("", "Look: <think>a</think>", {}, "stop"), "Look: <think>a</think>"),
    ("I look it up.|\n</think>|CALL|STOP", ("I look it up.", "", BEGUN, "tool_calls"), ""),
    ("I look it up.|CALL|STOP", ("", "I look it up.", BEGUN, "tool_calls"), "I look it up."),
    ("CALL|I did </think>| so|STOP", ("", "I did </think> so", BEGUN, "tool_calls"), "I did </think> so"),
    ("REASONING:hm|The tag </think>| is|STOP", ("hm", "The tag </think> is", {}, "stop"), "The tag </think> is"),
    ("Well,|REASONING:hm| then|STOP", ("hm", "Well, then", {}, "stop"), "Well, then"),
    (f"{'a|' * 199}b</think>4|STOP", ("a" * 199 + "b", "4", {}, "stop"), "4"),                   # the 200th piece has it
    (f"{'a|' * 200}b</think>4|STOP", ("", "a" * 200 + "b</think>4", {}, "stop"), "a" * 200 + "b</think>4"),
    (f"{'a' * 4001}|b</think>4|STOP", ("", "a" * 4001 + "b</think>4", {}, "stop"), "a" * 4001 + "b</think>4"),
]


def orphan_events(script, index=0):
    """The events of a script, in which a word stands for each that is no content."""
    known = {"STOP": ({}, "stop"), "LENGTH": ({}, "length"), "CALL": (CALL, None)}
    for part in script.split("|"):
        delta, finish = known.get(part) or ({"content": part}, None)
        if part == "STOP" and "CALL" in script:
            finish = "tool_calls"
        if part.startswith("REASONING:"):
            delta = {"reasoning": part.removeprefix("REASONING:")}
        yield ev(delta, finish, index)


def expecting(n=1, **options):
    stream = ChatStream(n=n, **options)
    stream.expect_orphan()
    return stream


@pytest.mark.parametrize("script, got, early", ORPHANS)
def test_an_orphan_is_found_in_time(script, got, early):
    stream = expecting()
    *events, last = [ROLE, *orphan_events(script)]
    before = b"".join(map(stream.feed, events))
    assert client(before)[1] == early
    assert client(before + stream.feed(last)) == got and stream.end() == DONE
    pieces_said = sum(part not in ("", "\n") for part in script.split("|"))
    assert abs(stream.tokens - pieces_said) <= 2        # also of what is held: so an engine shows that it works


@pytest.mark.parametrize("script, got, early", ORPHANS)
def test_an_orphan_comes_in_any_cut_and_in_each_choice(script, got, early):
    whole = ROLE + b"".join(orphan_events(script))
    assert client(however_cut(whole, lambda arrived: replay(expecting(), arrived))) == got
    both = [ev({"role": "assistant", "content": ""}), ev({"role": "assistant", "content": ""}, index=1)]
    both += [event for pair in zip(orphan_events(script), orphan_events(script, 1), strict=True) for event in pair]
    out = b"".join(map(expecting(n=2).feed, both))
    assert client(out) == client(out, 1) == got


def test_only_what_can_be_an_orphan_is_held():
    """By the stream that expects one; then only until the client would hear a sign of life instead."""
    script = list(orphan_events("2+2 is|easy|</think>4|STOP"))
    assert [bool(ChatStream().feed(event)) for event in script] == [True] * 4
    stream = expecting()
    assert not stream.feed(script[0])
    said = stream.alive()
    assert said.endswith(b": keep-alive\n\n") and client(said)[1] == "2+2 is" and stream.alive() == b": keep-alive\n\n"
    assert client(stream.feed(script[1]))[1] == "easy"
    stream = expecting()
    stream.alive()                                      # nothing had come: that was the prompt's time
    assert [bool(stream.feed(event)) for event in script] == [False, False, True, True]


@pytest.mark.parametrize("last", [sse({"error": {"message": "dead", "code": 500}}), ev({}, "abort"), ev({"content": "!"}, "abort"), b""])
def test_what_is_held_comes_before_an_error(last):
    stream = expecting(n=2, usage=True)
    held = b"".join(map(stream.feed, [ev({"role": "assistant", "content": "2+2"}), ev({"content": "hm"}, index=1), last]))
    with pytest.raises(Refusal) as caught:
        stream.end()
    words, error = (held + stream.fail(caught.value)).rstrip().rsplit(b"\n\n", 1)
    words += b"\n\n"
    assert client(words)[:2] == ("", "2+2!" if b"!" in last else "2+2") and client(words, 1)[:2] == ("", "hm")
    assert b'"error"' in error and b'"usage"' not in words and stream.fail(caught.value).count(b"data:") == 1


def test_logprobs_and_usage_go_on_while_content_is_held():
    stream = expecting(usage=True)
    logprobs = {"content": [{"token": "2", "logprob": -0.1, "bytes": [50], "top_logprobs": []}]}
    held = stream.feed(sse({"id": "c1", "choices": [choice({"content": "2"}) | {"logprobs": logprobs}]}))
    out = stream.feed(text("</think>4")) + stream.feed(ev({}, "stop")) + stream.feed(many(usage=USAGE))
    assert [event["choices"][0]["logprobs"] for event in events_of(held)] == [logprobs]
    assert client(held + out) == ("2", "4", {}, "stop") and stream.usage == USAGE and stream.thoughts == 2


@hypothesis.given(TEXTS, st.data())
def test_an_orphan_is_what_it_is_in_a_plain_answer(content, data):
    leak, out = LeakedThinking(orphan=True), []
    for piece in pieces(content, data.draw(cuts(content))):
        out.append(leak.feed(piece))
    out.append(leak.flush())
    reasoning, answer = ("".join(part) for part in zip(*out, strict=True))
    assert (reasoning.strip(), answer) == (split_thinking(content)[0].strip(), split_thinking(content)[1])


DATA = [
    (b"data: a", b"a"), (b"data:a", b"a"), (b"data:  a", b" a"), (b"data: a\ndata: b", b"a\nb"), (b"data:", b""),
    (b": a", None), (b"", None),
    (b"event: x\ndata: a\nid: 1", b"a"), (b"data: a\n: c\ndata:b", b"a\nb"), (b"event: data: a", None),
]


def test_data_of():
    assert [(event, data_of(event)) for event, _ in DATA] == DATA


def test_loads_is_forgiving_and_dumps_writes_anything():
    assert loads(b'{"a":"\xff"}') == {"a": "\ufffd"}
    assert loads(rb'"\ud83d"') == "\ud83d" and dumps("\ud83d") == rb'"\ud83d"'
    assert dumps({"a": 10 ** 30, "é": "\u2028"}) and json.loads(dumps({"a": 10 ** 30})) == {"a": 10 ** 30}
