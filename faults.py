"""What went wrong, as a Refusal that a client can be told."""

import logging

from errors import InternalError, Refusal, Unready, UpstreamError
from store.database import DATABASE_FAULTS

logger = logging.getLogger("sparks")


def as_refusal(error):
    """An exception as a Refusal.

    One that is no Refusal is a fault of the gateway, and leaves its traceback in the log.
    """
    if isinstance(error, Refusal):
        refusal = error
    elif isinstance(error, RecursionError):  # JSON is read deeper than it is written
        refusal = UpstreamError("the engine's answer is nested too deeply")
    elif isinstance(error, DATABASE_FAULTS):
        logger.error("the database cannot be read: %s", error)
        refusal = Unready("the gateway's database cannot be read; try again shortly", retry_after=5)
    else:
        logger.exception("a fault of the gateway")
        refusal = InternalError(
            "the gateway failed; this is its own fault, and its log has the details"
        )
    drop_frames(error)
    return refusal


def drop_frames(error):
    """Let go of the frames that an error came through, and those that led to it. They know the
    request's body, and the error as well: together they would stay until the garbage is
    collected."""
    errors = [error]
    while errors:
        error = errors.pop()
        errors += filter(None, (error.__cause__, error.__context__))
        error.__traceback__ = error.__cause__ = error.__context__ = None
