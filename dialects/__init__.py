"""One file per API: it reads a request into an Ask, and writes what the engine answers."""
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ask:
    """A request as its engine gets it.

    path, body      where it goes, and the JSON body as a list of bytes
    model           upstream.Model
    stream          a stream of stream.py for the answer, or None for a plain one
    extra           what the dialect keeps for itself
    """
    path: str
    body: list
    model: Any
    stream: Any = None
    extra: dict = field(default_factory=dict)
