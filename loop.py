"""The event loop that all requests share."""

import gevent

TURN = 0.02  # seconds


def give_way():
    """Between two pieces of something large: streams go first, but not for ever.

    (With gevent.sleep(0) they would wait twice as long.)
    """
    with gevent.Timeout(TURN, False):
        gevent.idle()
