"""Sees that a client leaves while its request is being answered, and nothing is read of it."""

from array import array
from contextlib import suppress
from fcntl import ioctl
from struct import unpack_from
from termios import FIONREAD
from time import monotonic

from gevent import get_hub, socket

READABLE = 1  # as the event loop's watchers take it
LOOK = 0.25  # seconds between two looks at a socket that has bytes waiting
SOON = 0.001  # seconds until the first look for an answer to a nudge; then twice as long each time
PATIENCE = 2.0  # seconds for that answer
AGAIN = 15.0  # seconds until a client that listens is asked again
ESTABLISHED = 1  # a TCP connection's states, as TCP_INFO gives them
CLOSE_WAIT = 8
UNACKED = 24  # where TCP_INFO has the number of packets that nobody has acknowledged yet
INFO = 28  # bytes of it that are read


class ClientWatch:
    """Calls `on_gone` in the hub when the client at `sock` has left, whose request is in already.

    A client that closes sends the same as one that only will not send any more (shutdown, as
    `nc -N` does it): a FIN. They can be told apart by what comes back for the next byte: of the
    first one a reset, of the other one an acknowledgement. So `nudge` sends something that a client
    passes over; it says whether it could. Who is reset, does not acknowledge it within PATIENCE, or
    cannot be nudged (HTTP/1.0, as long as there is no answer), has left. Who acknowledges it
    listens, and is asked again after a while: that it leaves later is told by nothing else.

    With bytes behind the request, which are not ours to read, the FIN is hidden: then TCP is asked
    for it.
    """

    def __init__(self, sock, nudge, on_gone):
        self.sock = sock
        self.nudge = nudge
        self.on_gone = on_gone
        self.nudged = self.pause = 0.0
        self.watcher = get_hub().loop.io(sock.fileno(), READABLE)
        self.watcher.start(self.on_readable)

    def on_readable(self):
        waiting = array("i", [0])
        with suppress(OSError):
            ioctl(self.sock.fileno(), FIONREAD, waiting)
        if waiting[0]:
            self.wait(LOOK, self.on_look)
        else:
            self.on_end()

    def on_look(self):
        if self.state()[0] == ESTABLISHED:
            self.wait(LOOK, self.on_look)
        else:
            self.on_end()

    def on_end(self):
        """It sends no more: does it listen?"""
        self.stop()
        if self.state()[0] == CLOSE_WAIT and self.nudge():
            self.nudged = monotonic()
            self.pause = SOON
            self.on_answer()
        else:
            self.on_gone()

    def on_answer(self):
        """What came back for the nudge."""
        state, unacked = self.state()
        if state != CLOSE_WAIT or unacked and monotonic() - self.nudged > PATIENCE:
            self.stop()
            self.on_gone()
        elif unacked:
            self.wait(self.pause, self.on_answer)
            self.pause = min(self.pause * 2, LOOK)
        else:
            self.wait(AGAIN, self.on_end)

    def state(self):
        """(the state of the connection, packets that are not acknowledged)."""
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO)
        return info[0], unpack_from("I", info, UNACKED)[0]

    def wait(self, seconds, callback):
        self.stop()
        self.watcher = get_hub().loop.timer(seconds)
        self.watcher.start(callback)

    def stop(self):
        if self.watcher:
            self.watcher.stop()
            self.watcher.close()
            self.watcher = None
