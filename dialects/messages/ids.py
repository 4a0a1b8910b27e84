"""Ids of tool calls. Anthropic's API takes letters, digits, _ and - in them; engines use more.

Another id goes to the client in a form that fits, out of which the next turn's request, where the
client names the call again, gives the engine's own.

Source: Anthropic's reference of POST /v1/messages, `tool_use.id`.
"""

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode

FITS = re.compile(r"[a-zA-Z0-9_-]+")
PREFIX = "toolu_64_"  # before the engine's id in base64


def for_client(ident):
    """An engine's id in a form that fits. One that fits stays, unless it looks like such a form."""
    if FITS.fullmatch(ident) and not ident.startswith(PREFIX):
        return ident
    data = urlsafe_b64encode(ident.encode("utf-8", "surrogatepass"))
    return PREFIX + data.decode().rstrip("=")


def for_engine(ident):
    """The engine's id that a client's stands for."""
    if not ident.startswith(PREFIX):
        return ident
    data = ident.removeprefix(PREFIX)
    try:
        found = urlsafe_b64decode(data + "=" * (-len(data) % 4)).decode("utf-8", "surrogatepass")
    except ValueError:  # not made here
        return ident
    return found if found and for_client(found) == ident else ident
