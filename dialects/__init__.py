"""One file per API: it reads a request into an Ask, and writes what the engine answers.

    read(body, fleet) -> Ask            `fleet` finds models; raises Refusal
    write(answer, ask) -> (bytes, usage)    the client's body for a plain answer (a dict, or the bytes of a stream that
                                        nobody asked for), and the engine's own figures
    refusal(error) -> bytes             the body for a Refusal

What several APIs share: read.py reads a body, engine.py writes the engine's request.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ask:
    """A request as its engine gets it.

    path, body      where it goes, and the JSON body as a list of bytes; a str among them is an address: the image that is
                    there goes in, as a data URL. No path: it is only counted
    model           engines.fleet.Model
    stream          a stream of stream.py for the answer, or None for a plain one
    extra           what the dialect keeps for itself
    count           the body of a question how long the prompt is, as a list of bytes; None: nobody needs to know before
                    the engine says it
    unseen          how many images were left out of `count`
    echo            what the answer repeats of the request, as a list of bytes
    """

    path: str
    body: list
    model: Any
    stream: Any = None
    extra: dict = field(default_factory=dict)
    count: list | None = None
    unseen: int = 0
    echo: list = field(default_factory=list)

    @property
    def images(self):
        """The addresses of images that are still to be fetched."""
        return [part for part in self.body if isinstance(part, str)]
