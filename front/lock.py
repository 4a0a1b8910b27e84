"""The pid file beside the database: one gateway a database, and the way to reach it.

A gateway holds a lock on the file as long as it lives (flock, which its worker shares), and its
master's pid stands in it. The file stays when the gateway has gone: only the lock says that one
runs."""

import fcntl
import os
import signal
import time

from errors import SettingsError

TRIES = 20  # whoever only asks, see `holder`, is in the way for a moment
PAUSE = 0.025  # seconds between two


def pid_file(db):
    return db.with_name(db.name + ".pid")


def take(db):
    """Take the lock. Returns the open file, which holds it until it is closed.

    Raises SettingsError.
    """
    path = pid_file(db)
    try:
        file = open(path, "a+")  # noqa: SIM115, the caller closes it
    except OSError as error:
        raise SettingsError(
            f"SPARKS_DB: {path} cannot be written: {error.strerror or error}"
        ) from None
    for _ in range(TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(PAUSE)
        else:
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            return file
    file.close()
    raise SettingsError(f"SPARKS_DB: a gateway runs on {db} already")


def holder(db):
    """The pid of the gateway that runs on this database, or None.

    This only asks: no file is made or written.
    """
    try:
        descriptor = os.open(pid_file(db), os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None  # nobody holds it; closing the file gives it back
    except BlockingIOError:
        written = os.read(descriptor, 20)
        return int(written) if written.isdigit() else None  # empty in the moment after `take`
    finally:
        os.close(descriptor)


def tell_to_reload(db):
    """Have the gateway that runs on this database read its settings again. Raises SettingsError."""
    pid = holder(db)
    try:
        if pid is None:
            raise ProcessLookupError
        os.kill(pid, signal.SIGHUP)
    except (ProcessLookupError, OverflowError):  # or what is written there is nobody's pid
        raise SettingsError("no gateway runs here that could reload") from None
    except PermissionError:
        raise SettingsError(f"gateway {pid} is another user's: reload it as that user") from None
    print(f"sparks: sparks.toml is in order; gateway {pid} reads it now")
