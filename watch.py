"""Sees that a client leaves while its request is being answered, and nothing is read of it."""

from array import array
from contextlib import suppress
from fcntl import ioctl
from termios import FIONREAD

from gevent import get_hub, socket

READABLE = 1  # as the event loop's watchers take it
LOOK = 0.25  # seconds between two looks at a socket that has bytes waiting
ESTABLISHED = 1  # a TCP connection's state, as TCP_INFO gives it


class ClientWatch:
    """Calls `on_gone` in the hub when the client at `sock` has left, whose request is in already.

    A readable socket without bytes means that the client has closed. With bytes it is a pipelined
    request, which is not ours to read and hides the end behind it: then TCP itself is asked.
    """

    def __init__(self, sock, on_gone):
        self.sock = sock
        self.on_gone = on_gone
        self.watcher = get_hub().loop.io(sock.fileno(), READABLE)
        self.watcher.start(self.on_readable)

    def on_readable(self):
        waiting = array("i", [0])
        with suppress(OSError):
            ioctl(self.sock.fileno(), FIONREAD, waiting)
        self.stop()
        if waiting[0]:
            self.watcher = get_hub().loop.timer(LOOK, LOOK)
            self.watcher.start(self.on_look)
        else:
            self.on_gone()

    def on_look(self):
        if self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED:
            self.stop()
            self.on_gone()

    def stop(self):
        if self.watcher:
            self.watcher.stop()
            self.watcher.close()
            self.watcher = None
