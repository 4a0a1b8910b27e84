"""The pid file beside the database: one gateway a database, and the way to reach it.

A gateway holds a lock on the file as long as it lives (flock, which its worker shares), and its
master's pid stands in it. The file stays when the gateway has gone: only the lock says that one
runs. Whoever may open a file may lock it, so it is for its owner alone; and a pid says nothing of
whose it is by now, so a process counts only if it has the file open.
"""

import fcntl
import os
import signal
import stat
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from errors import SettingsError

PAUSE = 0.025  # seconds between two tries
MOMENT = 0.5  # seconds in which whoever only asks, see `locked`, is out of the way
LAST = 15  # seconds in which a worker ends whose master is gone


def pid_file(db):
    """Its path: beside the database itself, whatever symbolic links lead there."""
    db = Path(os.path.realpath(db))
    return db.with_name(db.name + ".pid")


def take(db):
    """Take the lock. Returns the open file, which holds it until it is closed.

    Raises SettingsError.
    """
    path = pid_file(db)
    begun = time.monotonic()
    while True:
        try:
            file = try_to_take(path, time.monotonic() - begun)
        except OSError as error:
            raise SettingsError(
                f"SPARKS_DB: {path} cannot be written: {error.strerror or error}"
            ) from None
        if file:
            break
        time.sleep(PAUSE)
    with suppress(OSError):  # where /proc cannot be read, nobody can tell
        refuse_second_name(db)
    os.truncate(file.fileno(), 0)
    os.write(file.fileno(), str(os.getpid()).encode())
    return file


def try_to_take(path, waited):
    """The locked file, or None if it is worth another try after so many seconds.

    Raises OSError, and SettingsError once it is certain that another gateway runs.
    """
    file = open_pid_file(path, os.O_RDWR | os.O_CREAT)
    found = os.fstat(file.fileno())
    is_private = not found.st_mode & 0o077
    if not locked(file, fcntl.LOCK_EX):
        holders = openers(found)
        if not holders and not is_private:
            return replaced(path)  # it was somebody's who may only read it
        patience = MOMENT
        if holders and pid_in(file) not in holders:
            patience = LAST
        file.close()
        if waited > patience:
            raise SettingsError(f"SPARKS_DB: a gateway runs on {path.with_suffix('')} already")
        return None
    if not is_in_place(path, found):
        file.close()
        return None
    if is_private:
        return file
    with file:  # some may have it open already
        return replaced(path)


def open_pid_file(path, flags):
    """Raises OSError for what is no file."""
    file = open(os.open(path, flags | os.O_NONBLOCK, 0o600), "rb", buffering=0)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("it is no file")
    return file


def locked(file, kind):
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_in_place(path, found):
    with suppress(OSError):
        return os.path.samestat(os.stat(path), found)
    return False


def replaced(path):
    """A new file in the place of the old one, locked before it gets there."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    file = open_pid_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    locked(file, fcntl.LOCK_EX)
    os.rename(new, path)
    return file


def pid_in(file):
    """The pid in the file, or None: it is empty in the moment after it was taken."""
    written = os.pread(file.fileno(), 20, 0)
    return int(written) if written.isdigit() else None


# ---- who has a file open


def openers(found):
    """The pids of the owner's other processes that have a file open. `found`: what os.stat says."""
    own = os.getpid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if pid != own and has_open(pid, found)]


def has_open(pid, found):
    """Whether a process of the file's owner has it open."""
    folder = f"/proc/{pid}/fd"
    try:
        if user_of(pid) != found.st_uid:
            return False
        names = os.listdir(folder)
    except OSError:  # it has ended, or may not be looked at
        return False
    return any(is_in_place(f"{folder}/{name}", found) for name in names)


def user_of(pid):
    """The uid that a process runs as (proc(5): the folder itself may be root's all the same)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nUid:")[2].split()[1])


def refuse_second_name(db):
    """SQLite's log goes by the file's name: under another one, a hard link, it would be missed.
    Raises SettingsError."""
    end = time.monotonic() + MOMENT
    while os.path.exists(db):
        found = os.stat(db)
        users = found.st_nlink > 1 and openers(found)
        if not users:
            return
        if time.monotonic() > end:
            raise SettingsError(
                f"SPARKS_DB: process {users[0]} has {db} open, perhaps by another of its names:"
                " it has hard links"
            )
        time.sleep(PAUSE)


# ---- from outside


@contextmanager
def running(db):
    """(pid, a descriptor of it) of the gateway that runs on this database.

    Raises ProcessLookupError if none does, OSError.
    """
    with open_pid_file(pid_file(db), os.O_RDONLY) as file:
        pid = pid_in(file)
        if locked(file, fcntl.LOCK_SH) or pid is None:
            raise ProcessLookupError
        process = os.pidfd_open(pid)  # whatever gets this pid later, it is not signalled
        try:
            if not has_open(pid, os.fstat(file.fileno())):
                raise ProcessLookupError
            yield pid, process
        finally:
            os.close(process)


def is_running(db):
    """Whether a gateway runs on this database, as far as can be seen."""
    try:
        with running(db):
            return True
    except PermissionError:  # another user's
        return True
    except (OSError, OverflowError):
        return False


def tell_to_reload(db):
    """Have the gateway that runs on this database read its settings again. Raises SettingsError."""
    try:
        with running(db) as (pid, process):
            signal.pidfd_send_signal(process, signal.SIGHUP)
    except PermissionError:
        raise SettingsError(f"{pid_file(db)} is another user's: reload as that user") from None
    except (OSError, OverflowError):  # or what is written there is nobody's pid
        raise SettingsError("no gateway runs here that could reload") from None
    print(f"sparks: sparks.toml is in order; gateway {pid} reads it now")
