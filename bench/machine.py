"""What this machine offers, and what processes use of it. Linux: all of it comes from /proc."""

import os
import time
from contextlib import suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
MB = 1 << 20
CALM = 0.35  # cores that other programs may use in a moment that counts as quiet


# ---- what it offers


def cores():
    """(the gateway's core, those of engine and load): two sets of numbers.

    Both are the same if there is but one core.
    """
    usable = sorted(os.sched_getaffinity(0))
    return {usable[-1]}, set(usable[:-1]) or {usable[-1]}


def take_priority():
    """Real-time priority for this process and all it starts from here on; whether it is allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        return False
    return True


def about():
    """What a reader of figures wants to know of the machine."""
    info = Path("/proc/cpuinfo").read_text()
    names = [
        line.partition(":")[2].strip()
        for line in info.splitlines()
        if line.startswith("model name")
    ]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": names[0] if names else "unknown",
        "kernel": os.uname().release,
        "load_average": os.getloadavg()[0],
    }


# ---- what processes use


def fields(pid):
    """The fields of /proc/PID/stat behind the name, which may hold spaces.

    Empty if the process has gone.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def family(*roots):
    """Processes and all their descendants, as pids."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := fields(entry)):
            children.setdefault(int(stat[1]), []).append(int(entry))
    found, todo = set(), list(roots)
    while todo:
        pid = todo.pop()
        found.add(pid)
        todo += children.get(pid, ())
    return found


def cpu(pids):
    """Seconds of CPU that processes have used, to the nanosecond where the kernel keeps them."""
    return sum(map(cpu_of, pids))


def cpu_of(pid):
    try:
        threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9 or ticks(pid)
    except OSError:
        return ticks(pid)


def ticks(pid):
    """Seconds of CPU of a process and of its children that have ended."""
    return sum(map(int, fields(pid)[11:15])) / TICKS


def memory(pids, name="VmRSS"):
    """MB in memory, summed: what processes share counts once for each.

    VmHWM: the peak since `forget_peak`.
    """
    return sum(value(f"/proc/{pid}/status", name + ":") for pid in pids) / 1024


def share(pids):
    """MB in memory, what processes share being divided among them (PSS)."""
    return sum(value(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in pids) / 1024


def value(path, name):
    """The number behind a name in a file of /proc; 0 if it isn't there."""
    try:
        return next(
            (
                int(line.split()[1])
                for line in Path(path).read_text().splitlines()
                if line.startswith(name)
            ),
            0,
        )
    except OSError:
        return 0


def forget_peak(pids):
    for pid in pids:
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def rest(pids, most=30):
    """Wait until processes have nothing more to do, for so many seconds at most.

    One that was overrun works on when its clients have gone, and would take its core from the next.
    """
    end = time.monotonic() + most
    while time.monotonic() < end:
        before = cpu(pids)
        time.sleep(0.2)
        if cpu(pids) - before < 0.02:
            break


# ---- the others


class Others:
    """The CPU that programs use that have nothing to do with this bench."""

    def __init__(self):
        self.start()

    def start(self):
        self.before, self.since = self.count(), time.monotonic()

    def count(self):
        times = list(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]))
        own = sum(ticks(pid) for pid in family(os.getpid()))
        return (sum(times) - times[3] - times[4]) / TICKS - own

    def cores(self):
        """Cores in use by others since `start`."""
        return max(0, self.count() - self.before) / max(0.01, time.monotonic() - self.since)


class Patience:
    """So many seconds in all to wait for quiet moments."""

    def __init__(self, seconds):
        self.left = seconds

    def wait(self, most=2):
        """Until others are quiet, for `most` seconds at most."""
        end = time.monotonic() + min(most, self.left)
        others = Others()
        while time.monotonic() < end:
            time.sleep(0.25)
            self.left -= 0.25
            if others.cores() < CALM:
                break
            others.start()
