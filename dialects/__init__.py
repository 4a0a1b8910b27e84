"""The APIs that clients speak: one dialect each, a module or an object with three functions.

    read(body, fleet) -> Ask
        body     the request's, as bytes
        fleet    finds models: engines.fleet.Fleet
    write(answer, ask) -> (bytes, usage)
        The client's body for an answer that is not streamed, and the engine's own figures.
        answer   the engine's: a dict, or the bytes of a stream that nobody asked for
    refusal(error) -> bytes
        The client's body for a Refusal. `read` and `write` raise them.

Dialects share read.py, which reads a body, engine.py, which makes the engine's request,
history.py, which reads what has no form here, and sampling.py. The answer's way back is stream.py.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Ask:
    """A request as its engine gets it.

    path     where it goes; None: nowhere, its prompt is only counted
    body     the JSON as a list of bytes; a str among them is an image's address, in the place where
             the image goes in, as a data URL
    model    engines.fleet.Model
    stream   a stream of stream.py for the answer, or None: it is not streamed
    extra    what the dialect keeps for `write`
    count    the body of a question how long the prompt is, as a list of bytes; None: nobody needs
             to know before the engine says it
    unseen   how many images were left out of `count`
    most     how many tokens the answer can have at most, or None
    echo     what the answer repeats of the request, as a list of bytes
    ignored  what was left out of the client's request, in the words of a header; or an empty text
    oddities what is odd about a plain answer, words of stream.py; a stream has its own
    own_figures
             what stands in for the figures that a plain answer's engine does not give, in the same
             names; a stream has its own
    """

    path: str | None
    body: list
    model: Any
    stream: Any = None
    extra: dict = field(default_factory=dict)
    count: list | None = None
    unseen: int = 0
    most: int | None = None
    echo: list = field(default_factory=list)
    ignored: str = ""
    oddities: set = field(default_factory=set)
    own_figures: dict = field(default_factory=dict)

    @property
    def images(self):
        """The addresses of images that are still to be fetched."""
        return [part for part in self.body if isinstance(part, str)]
