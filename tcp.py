"""What is done with a socket on either side of the gateway."""

import socket
from time import monotonic

LINGER = 2.0  # seconds for which the rest of a refused body is thrown away
READ = 1 << 18
KEEPALIVE = {  # TCP's own probes of a silent peer
    socket.TCP_KEEPIDLE: 60,  # seconds of silence before the first one
    socket.TCP_KEEPINTVL: 10,  # seconds between two
    socket.TCP_KEEPCNT: 6,  # unanswered ones after which the connection is dead
}


def detect_vanished_peer(sock):
    """Have the kernel probe a silent peer: one that vanished without closing (a power cut, a cable,
    a forgotten NAT entry) ends its connection after two minutes, with an OSError."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def send_all(sock, data):
    """As sock.sendall, which in gevent asks the kernel for its buffer's size first, each time."""
    sent = sock.send(data)
    if sent < len(data):
        sock.sendall(data[sent:])


def linger(sock, pause):
    """After a refusal of what is still being sent: read on for a while, or closing would take the
    answer away from the client (RFC 9112 9.6).

    pause  called in between, since it may come faster than it is thrown away
    """
    end = monotonic() + LINGER
    try:
        sock.shutdown(socket.SHUT_WR)
        while (left := end - monotonic()) > 0:
            sock.settimeout(left)
            if not sock.recv(READ):
                break
            pause()
    except OSError:
        pass
