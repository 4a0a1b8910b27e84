"""What is done with a socket on either side of the gateway."""

import socket
from time import monotonic

LINGER = 2.0  # seconds for which the rest of a refused body is thrown away
READ = 1 << 18


def send_all(sock, data):
    """As sock.sendall, which in gevent asks the kernel for the size of its buffer first, each time."""
    sent = sock.send(data)
    if sent < len(data):
        sock.sendall(data[sent:])


def linger(sock):
    """After a refusal of what is still being sent: read on for a while, or closing would take the answer away from the
    client (RFC 9112 9.6)."""
    end = monotonic() + LINGER
    try:
        sock.shutdown(socket.SHUT_WR)
        while (left := end - monotonic()) > 0:
            sock.settimeout(left)
            if not sock.recv(READ):
                break
    except OSError:
        pass
