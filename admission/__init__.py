"""Admission, pure: who may run now, and where, who waits, who is turned away. No socket, no sleep,
no clock.

Times are passed in: seconds of a clock that nobody sets. Only days and months are the wall clock's,
which is `Gate.ahead` of that one.
"""

from admission.accounts import MINUTE, NONE, Limits
from admission.gate import MARGIN, PASSES, Gate, unserved
from admission.mirror import BLOCK
from admission.places import Seats
from admission.tickets import Need

__all__ = [
    "BLOCK",
    "MARGIN",
    "MINUTE",
    "NONE",
    "PASSES",
    "Gate",
    "Limits",
    "Need",
    "Seats",
    "unserved",
]
