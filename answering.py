"""The three sorts of request, each from top to bottom.

`relay` is a stream, `answer_whole` a request that is answered in one piece, `count_prompt` one that
only wants to know how long its prompt is.
"""

from time import monotonic

import pump
import steps
from call import attempt
from engines.failures import from_engine
from engines.http1 import Silent
from errors import Refusal, UpstreamError, UpstreamTimeout
from faults import as_refusal
from loop import give_way, pause, take_turn, without_collections

MAX_ANSWER = 256 << 20  # bytes of an answer that comes in one piece
MAX_UNSTREAMED = 32 << 20  # the same to a request that asked for a stream
MAX_ERROR = 1 << 20  # bytes of an engine's error of which any is read
COPIES = 2  # of an answer in memory, while it is translated
LAST_PIECE = 1 << 20  # bytes of a stream's last event in one write
BEGINNING = 1024  # bytes of an answer that tell what it is

steps.between.append(pause)


def relay(call, ask):
    """A stream: an iterator of the client's bytes, each item one write.

    What fails before the first item is raised, and can still be an HTTP status; what fails later is
    the stream's last event.
    """
    stream = ask.stream
    settings = call.gateway.settings
    fault = None
    if (call.key.keepalive_form or settings.keepalive_form) == "chunk":
        stream.alive_in_chunks(call.id, int(call.started), ask.model.id)
    try:
        call.fetch_images(ask)
        call.enter(ask)
        since, events = yield from begin(call)
        call.has_begun()
        call.headed = True
        yield b""  # the head; all that follows goes through the pump
        call.pump_rest(since, events)
        stream.own_figures = attempt(call.figures) or {}
        last = stream.end()
    except Exception as error:
        fault = as_refusal(error)
        if not call.headed:
            raise fault from None
        fault.request_id = call.id
        stream.own_figures = attempt(call.figures) or {}
        last = stream.fail(fault)
    if fault:
        call.settle(fault.status, fault)
    else:
        call.settle(200, whole=call.all_said)
    yield from in_pieces(last)


def begin(call):
    """Signs of life of a stream while it waits for its slot and its engine; returns when the engine
    got it, and its first events. Raises Refusal.

    An engine that has not begun with it is left for another one, once.
    """
    stream = call.ask.stream
    keepalive = call.gateway.settings.keepalive
    while True:
        while not call.turn(keepalive):
            call.headed = True
            yield stream.alive(f"queued {call.gateway.gate.position(call.ticket)}")
        since = monotonic()
        try:
            call.send()
            while (events := first_events(call, since)) is None or call.is_being_read:
                call.headed = True
                if events is None:
                    yield stream.alive(call.activity())
                else:
                    call.let_go_of_request()
                    yield events
        except Refusal as error:
            call.move(error)
        else:
            call.let_go_of_request()
            return since, events


def in_pieces(event):
    """A stream's last event, for one write each."""
    for at in range(0, len(event), LAST_PIECE):
        pause()
        yield event[at : at + LAST_PIECE]


def first_events(call, since):
    """The first events for the client, or None after a silence that is worth a comment; none once
    tokens come of which it sees nothing, where it has had a sign of life.

    Raises Refusal.
    """
    answer = call.answer
    stream = call.ask.stream
    settings = call.gateway.settings
    pause = monotonic() + settings.keepalive
    while (left := min(pause, call.deadline(since)) - monotonic()) > 0:
        data = answer.read(left)
        if data is None:
            continue
        if answer.streams is None:  # its first bytes tell
            answer.streams = answer.status == 200 and is_stream(answer, data)
        if call.counting is not None and stream.prompt_tokens is None:
            stream.prompt_tokens = call.prompt_tokens()
        if not answer.streams:
            return unstreamed(call, data, since)
        with without_collections():
            events = pump.feed(stream, data, call.hold_stream)
        if stream.tokens:
            call.note_read()
        if events or stream.tokens and call.headed:
            return events
        if not data or stream.over:
            stream.end()  # raises: it ended without a word, which is still an HTTP status
            return events
        give_way()  # bytes that say nothing may come faster than they are read
    if monotonic() >= call.deadline(since):
        raise unanswered(settings)
    return stream.end_hold() or None


def unstreamed(call, data, since):
    """A whole answer, or an error, to a request that asked for a stream. Raises Refusal."""
    answer = call.answer
    stream = call.ask.stream
    if not answer.ended:
        data += collect(call, since, MAX_UNSTREAMED)
    with without_collections():
        value = checked(answer, data)
        events = stream.feed_plain(value)
        if len(data) > steps.LARGE:
            steps.let_go(value)
    if stream.fault or not events:
        stream.end()  # raises: it is no answer, which is still an HTTP status
    return events


def answer_whole(call, ask, write):
    """The client's body of a request that is answered in one piece: bytes, or a list of them where
    it is large. Raises Refusal.

    write  a function: (the engine's answer, ask) -> (the client's body, the engine's usage). The
           answer is a dict, or the bytes of a stream that nobody asked for
    """
    try:
        call.fetch_images(ask)
        call.enter(ask)
        body = whole_answer(call)
        take_turn()  # many small ones together are not small
        if len(body) <= steps.LARGE:
            data = translated(call, body, write)
        else:
            with without_collections():
                data = translated(call, body, write)
    except Exception as error:
        raise as_refusal(error) from None
    call.settle(200, whole=True)
    call.keep_only(size_of(data))
    return data


def whole_answer(call):
    """The body of the engine's answer. Raises Refusal.

    An engine that has not begun with it is left for another one, once.
    """
    while True:
        call.turn(call.gateway.settings.queue_timeout)
        since = monotonic()
        try:
            call.send()
            body = collect(call, since)
            if call.answer.status == 200:
                call.let_go_of_request()
                return body
            checked(call.answer, body)  # raises
        except Refusal as error:
            call.move(error)


def translated(call, body, write):
    """The client's body for the engine's."""
    ask = call.ask
    value = body
    if not is_stream(call.answer, body):
        value = checked(call.answer, body, ask.each)
    try:
        call.tally.take(value)
        ask.own_figures = attempt(call.figures) or {}
        data, call.usage = write(value, ask)
    finally:
        if len(body) > steps.LARGE and isinstance(value, dict):
            steps.let_go(value)
    return data


def size_of(body):
    """How many bytes a body has, bytes or a list of them."""
    return sum(map(len, body)) if isinstance(body, list) else len(body)


def count_prompt(call, ask):
    """How many tokens a prompt has: asked without a slot, beside everything else."""
    call.ask = ask
    tokens = call.gateway.fleet.count(ask)
    call.settle(200)
    return tokens


# ---- an engine's answer


def collect(call, since, most=MAX_ANSWER):
    """The rest of an answer's body, at most so many bytes."""
    first = 0

    def hold(size):
        nonlocal first
        if not call.kept and first + size <= steps.LARGE:
            first += size  # what is small is not counted
        else:
            call.keep(COPIES * (first + size))
            first = 0

    def seconds():
        return call.deadline(since) - monotonic()

    try:
        return call.answer.all(seconds(), most, hold, seconds)
    except Silent:
        raise unanswered(call.gateway.settings) from None


def unanswered(settings):
    limit = settings.answer_timeout
    return UpstreamTimeout(f"the engine has not answered within {limit:g} seconds")


def is_stream(answer, data):
    """Whether the engine answers with events; some forget to say so."""
    content_type = answer.headers.get("content-type", "")
    if "event-stream" in content_type:
        return True
    looks_like_events = data[:BEGINNING].lstrip()[:1] not in (b"{", b"[", b"<", b"")
    return "json" not in content_type and looks_like_events


def checked(answer, body, each=None):
    """The JSON object of an answer that is no stream. Raises the Refusal that it stands for.

    each  see steps.read
    """
    if answer.status != 200 and len(body) > MAX_ERROR:
        body = b""
    try:
        value = steps.read(body, each)
    except (ValueError, RecursionError):
        value = None
    if answer.status != 200:
        page = "" if value else str(body[:BEGINNING], "latin-1")
        raise from_engine(answer.status, value, answer.headers.get("retry-after"), page)
    if not isinstance(value, dict):
        raise UpstreamError("the engine's answer cannot be read")
    if value.get("error") or value.get("object") == "error":
        raise from_engine(None, value)
    return value
