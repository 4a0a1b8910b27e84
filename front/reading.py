"""A client's request as its dialect reads it: a small one at once, a large one in a thread, where
Python lets the event loop run whenever that has to. See steps.py for what is one long call.
"""

import logging
import sys
import traceback
from functools import cache

from gevent.threadpool import ThreadPool

from errors import InvalidRequest, Refusal
from faults import drop_frames
from loop import Shares, take_turn, without_collections
from steps import kept, let_go

MOST_ECHO = 8 << 20  # bytes of a request that its answer repeats: no context is as long
THREADS = 2
SWITCH = 0.0005  # seconds that a thread may keep Python's lock from another
LARGE = 1 << 17  # bytes of a text that is not read at once, whatever is in it
MANY = 1500  # values that are not read at once: the costliest take ten microseconds each
FEW = 1 << 12  # bytes in which there are never so many
MARKS = (b",", b"[", b"{")

logger = logging.getLogger("sparks")
readings = Shares(each=1, most=THREADS)  # the owner is a Call's account


def read(call, dialect):
    """The Ask that a body stands for, with all that was taken out of it. Raises Refusal."""
    fleet = call.gateway.fleet.seen_by(call.key)
    if is_small(call.body.first):
        take_turn()  # many of them together are not small
        ask = made(call, dialect, fleet)
    else:
        ask = read_in_thread(call, dialect, fleet)
    for remark in ask.remarks:
        logger.info(remark)
    return ask


def is_small(text):
    """Whether a text takes a few milliseconds at most. Of a large one there is only an abridged
    one."""
    if not text:
        return text is not None
    return len(text) <= FEW or len(text) <= LARGE and sum(map(text.count, MARKS)) <= MANY


def made(call, dialect, fleet):
    """The Ask, with the long strings in their places."""
    ask = dialect.read(call.body.text(), fleet)
    ask.body = call.body.restore(ask.body)
    ask.count = ask.count and call.body.restore(ask.count)
    if ask.echo:
        ask.echo[:] = [whole_echo(call.body.restore(ask.echo))]
    return ask


def whole_echo(parts):
    """What an answer repeats of its request, as bytes. Raises InvalidRequest.

    A stream repeats it three times, and with each sign of life, so there may be less of it than of
    a body.
    """
    if sum(map(len, parts)) > MOST_ECHO:
        raise InvalidRequest(
            f"instructions, tools and text.format hold over {MOST_ECHO >> 20} MB together, "
            "and each answer repeats them; send long texts in `input`",
            "instructions",
        )
    return b"".join(parts)


# ---- in a thread


@cache
def pool():
    # The event loop lets go of Python's lock with each call to the system, and asks for it back.
    sys.setswitchinterval(SWITCH)
    return ThreadPool(THREADS)


def read_in_thread(call, dialect, fleet):
    """The same, made in a thread. A key has one there at a time. Where the client leaves, the
    thread goes on, and keeps the place and the body for so long."""
    readings.acquire(call.account)
    call.body.lend()

    def back(_=None):
        readings.release(call.account)
        call.body.give_back()

    try:
        found = pool().spawn(attempt, call, dialect, fleet)
    except BaseException:
        back()
        raise
    found.rawlink(back)
    result = found.get()
    if isinstance(result, Exception):
        raise result
    return result


def attempt(call, dialect, fleet):
    """The Ask, or the exception. What was read is let go of here: that takes its time too."""
    values = []
    kept.set(values)
    with without_collections():
        try:
            ask = made(call, dialect, fleet)
            ask.measured = call.measure(ask)
            return ask
        except Refusal as refusal:
            drop_frames(refusal)  # which hold what was read
            return refusal
        except Exception as error:  # a fault of ours: the log shows where
            traceback.clear_frames(error.__traceback__)
            return error
        finally:
            let_go(values)
