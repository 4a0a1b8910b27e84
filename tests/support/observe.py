"""What a test sees of a running gateway from outside: its worker's memory and descriptors, and its gauges.

    gauge(gateway, "sparks_active")
"""
import os
from contextlib import suppress
from pathlib import Path

from support.processes import children, wait_until


def worker(gateway):
    """The process id of the worker."""
    return children(gateway.pid)[0]


def descriptors(gateway):
    """What the worker has open, sorted; without the database, whose closed descriptors SQLite keeps for the next time."""
    folder = Path(f"/proc/{worker(gateway)}/fd")
    found = []
    for file in folder.iterdir():
        with suppress(FileNotFoundError):           # closed in this moment
            found.append(os.readlink(file))
    return sorted(name for name in found if not name.startswith(str(gateway.db)))


def resident(gateway):
    """Bytes of memory that the worker holds."""
    return int(Path(f"/proc/{worker(gateway)}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- gauges

def gauges(gateway):
    """All samples of GET /metrics, as a dict of floats by name and labels."""
    lines = gateway.client(key=False).get("/metrics").read_all().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def gauge(gateway, name):
    return gauges(gateway)[name]


def idle(gateway, seconds=5):
    """Until no request holds a slot or waits for one."""
    def nothing():
        found = gauges(gateway)
        return found["sparks_active"] == found["sparks_queued"] == 0
    wait_until(nothing, seconds, gateway.process, "no request in the gateway")
