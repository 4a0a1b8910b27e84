"""The database as a file: which one lies at a path, and whose the write-ahead log beside it is.

SQLite knows a log by its name alone. If a backup is put in the place of a file whose log is still
there, it lays the old log over the new file, which destroys it. So a log is marked with the file
that it belongs to, and another file's log is set aside before anything is opened.

Whoever closes any descriptor of a file loses all of its process's locks on it (fcntl(2)). So the
descriptor of an open database is kept until its connection is closed.
"""

import fcntl
import os
import stat
import struct
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from time import monotonic, sleep

MAGIC = b"SQLite format 3\0"  # how a file begins that is not empty: sqlite.org/fileformat.html, 1.3
HEADER = 100  # bytes
STAMP = ((40, 44), (60, 64), (68, 72))  # in it: schema cookie, user version, application id
OWNER = "user.sparks.log_of"  # the extended attribute of a log: whose it is
SHARED = (0x40000002, 510)  # where SQLite locks a file to read it: sqlite.org/src, os.h
IN_USE = (0x40000200, 1)  # behind all of SQLite's locks: a gateway's, as long as it has the file
IN_HAND = (0x40000201, 1)  # whoever looks at the log and perhaps sets it aside
MOMENT = 2  # seconds in which whoever has a log in hand is done
ADVICE = "put a backup in its place; or move it away to begin a new one, which has no keys"


class Unusable(OSError):
    """A file cannot be the database. The text is for its owner."""


def beside(path, ending):
    return path.with_name(path.name + ending)


def open_file(path):
    """(a descriptor of the file, whether it was made just now, with mode 0600).

    OSError for what is no SQLite database, before its mode is changed or anything is written.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    with suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600), True
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        is_regular = stat.S_ISREG(found.st_mode)
        if not is_regular or os.pread(descriptor, len(MAGIC), 0) not in (b"", MAGIC):
            raise Unusable("it is no SQLite database")
        if not found.st_size and size_of(beside(path, "-wal")):
            raise Unusable(f"it was emptied; {ADVICE}")
        if stat.S_IMODE(found.st_mode) != 0o600:
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, False


def identity(file):
    """What a file, given by its path or a descriptor, has as long as nobody changes it."""
    found = os.stat(file)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def size_of(path):
    """Bytes of a file; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def stamp_of(descriptor):
    """What tells a database file from an older state of it and from copies, as a text.

    Only a checkpoint of ours and a change of the schema change it. SQLite's own copies (.backup,
    VACUUM INTO) have another schema cookie, small or greater by one.
    """
    header = os.pread(descriptor, HEADER, 0).ljust(HEADER, b"\0")
    return stamp(*(int.from_bytes(header[begin:end], "big") for begin, end in STAMP))


def is_cut_off(descriptor):
    """Whether a file is shorter than it says itself."""
    header = os.pread(descriptor, HEADER, 0)
    page = int.from_bytes(header[16:18], "big")
    if page == 1:
        page = 65536
    return os.fstat(descriptor).st_size < page * int.from_bytes(header[28:32], "big")


def stamp(cookie, version, application):
    return f"{cookie & 0xFFFFFFFF:08x}{version & 0xFFFFFFFF:08x}{application & 0xFFFFFFFF:08x}"


# ---- the log beside it


def mark_log(path, descriptor, *stamps):
    """Note that the log belongs to this file, with these stamps. Not every file system keeps it."""
    log = beside(path, "-wal")
    with suppress(OSError):
        found = os.stat(log)
        marks = found.st_ino, os.fstat(descriptor).st_ino, found.st_mtime_ns, *stamps
        os.setxattr(log, OWNER, " ".join(map(str, marks)).encode())


def unmark_log(path):
    with suppress(OSError):
        os.removexattr(beside(path, "-wal"), OWNER)


def marks_of_log(path):
    """The marks of the log: the inode of its file, when the log had been written last (in ns), and
    the stamps. None if it has none, or those of the log that it is a copy of."""
    log = beside(path, "-wal")
    try:
        own, inode, written, *stamps = os.getxattr(log, OWNER).decode().split()
        return (int(inode), int(written), stamps) if int(own) == os.stat(log).st_ino else None
    except (OSError, ValueError):
        return None


def has_own_log(path, descriptor):
    """Whether the log at this path is this file's, as far as that can be told."""
    marks = marks_of_log(path)
    if not marks:
        return True
    inode, marked, stamps = marks
    file = os.fstat(descriptor)
    if inode != file.st_ino:
        return False
    if stamp_of(descriptor) in stamps:
        return True
    # Or copies of both were written over both: with their times, or else the file first.
    log = os.stat(beside(path, "-wal"))
    if log.st_mtime_ns < marked:
        return True
    last = file.st_ctime_ns <= log.st_ctime_ns
    return last and marked < file.st_mtime_ns <= log.st_mtime_ns


def set_aside(path):
    """Rename the log, and what SQLite keeps with it, to names that it does not look for. Returns
    the log's new name."""
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%fZ")
    aside = beside(path, f".left-{moment}")
    for ending in ("-shm", "-wal"):
        with suppress(FileNotFoundError):
            os.rename(beside(path, ending), beside(aside, ending))
    return beside(aside, "-wal")


@contextmanager
def read_lock(descriptor):
    """Holds SQLite's lock for reading, as another process would.

    A connection that is closed meanwhile is not the last one to SQLite, and leaves its log alone.
    """
    change_lock(descriptor, fcntl.F_RDLCK, SHARED)
    try:
        yield
    finally:
        change_lock(descriptor, fcntl.F_UNLCK, SHARED)


@contextmanager
def in_hand(descriptor):
    """Only one process at a time looks at the log and sets it aside: a second one would do that
    to the first one's new log."""
    end = monotonic() + MOMENT
    while not locked(descriptor, IN_HAND):
        if monotonic() > end:
            raise Unusable("another process is about to open it; try again")
        sleep(0.001)
    try:
        yield
    finally:
        change_lock(descriptor, fcntl.F_UNLCK, IN_HAND)


def locked(descriptor, place):
    """Whether a lock that only one may have could be had; it is kept until the descriptor is
    closed."""
    try:
        change_lock(descriptor, fcntl.F_WRLCK, place)
    except BlockingIOError:
        return False
    except OSError:  # not every file system has such locks
        pass
    return True


def change_lock(descriptor, kind, place):
    """Of the open file description, so that it stands against the locks of this process too."""
    lock = struct.pack("hhqqi0q", kind, os.SEEK_SET, *place, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
