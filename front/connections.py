"""The clients' connections: how many there may be, and which one gives way to a new one."""

import resource
import socket
from collections import defaultdict
from contextlib import suppress

MOST = 10_000  # in all
MOST_OF_ONE = 1_000  # that wait for a request, of one address
SPARE = 500  # connections beyond the most, for as long as the oldest ones take to end
DESCRIPTORS = 4  # that a connection may need: its own, its engine's, and some in reserve


class Connections:
    """The open connections, and which of them are idle: they wait for a request, or for the rest of
    its head.

    Beyond the most, the one that has been idle for longest ends; so it does among those of one
    address. A proxy in front has one address for all, and keeps fewer than that idle. None ends in
    the middle of a request.

    open  how many there are
    """

    def __init__(self, most=None):
        self.most = most or min(MOST, descriptors() // DESCRIPTORS)
        self.open = 0
        self.idle = {}  # socket -> its address, the oldest first
        self.by_address = defaultdict(dict)  # address -> {socket: None}, the same of each

    def add(self):
        self.open += 1
        if self.open > self.most and self.idle:
            self.end(next(iter(self.idle)))

    def remove(self, sock):
        self.open -= 1
        self.awake(sock)

    def rest(self, sock, address):
        """It is idle from now on."""
        self.idle[sock] = address
        own = self.by_address[address]
        own[sock] = None
        if len(own) > MOST_OF_ONE:
            self.end(next(iter(own)))

    def awake(self, sock):
        """It is idle no more."""
        address = self.idle.pop(sock, None)
        if address is not None:
            own = self.by_address[address]
            del own[sock]
            if not own:
                del self.by_address[address]

    def end(self, sock):
        """Its greenlet reads the end then, as if the client had closed it."""
        self.awake(sock)
        with suppress(OSError):  # the client was quicker
            sock.shutdown(socket.SHUT_RDWR)

    def end_idle(self):
        for sock in list(self.idle):
            self.end(sock)


def descriptors():
    """How many this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST * DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
