"""The APIs that clients speak: one dialect each, a module or an object with three functions.

    read(body, fleet) -> Ask
        body     the request's, as bytes
        fleet    finds models: engines.fleet.Fleet
    write(answer, ask) -> (body, usage)
        The client's body for an answer that is not streamed (bytes, or a list of them where it is
        large), and the engine's own figures.
        answer   the engine's: a dict, or the bytes of a stream that nobody asked for
    refusal(error) -> bytes
        The client's body for a Refusal. `read` and `write` raise them.

Dialects share read.py, which reads a body, engine.py, which makes the engine's request,
history.py, which reads what has no form here, and sampling.py. The answer's way back is stream.py.
"""

from dataclasses import dataclass, field
from typing import Any

NO_IMAGE = b'{"type":"text","text":"[image: it could not be fetched]"}'  # a part of a chat


class Earlier(str):
    """The address of an image in the history: where none comes, the request goes without.

    where   the place of its part in the client's request
    around  the bytes of the part before the address and after it, which follow when it is filled in
    """

    def __new__(cls, url, where):
        earlier = super().__new__(cls, url)
        earlier.where = where
        earlier.around = (b"", b"")
        return earlier


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
    left_out history.Ignored: what was left out of the client's request; None: nothing can be
    oddities what is odd about a plain answer, words of stream.py; a stream has its own
    remarks  what the log says of it: never the client's words
    measured counting.Measure of a large one, or None
    each     see steps.read: what is done with each item of a large plain answer
    own_figures
             what stands in for the figures that a plain answer's engine does not give, in the same
             names; a stream has its own
    opening  what tells its conversation from others, over all of its turns; None: nobody asks
    tier     the service tier that it has, "flex" or "default"; None: nobody has asked for one
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
    left_out: Any = None
    oddities: set = field(default_factory=set)
    remarks: list = field(default_factory=list)
    measured: tuple | None = None
    each: tuple | None = None
    own_figures: dict = field(default_factory=dict)
    opening: bytes | None = None
    tier: str | None = None

    @property
    def batch(self):
        """Whether it is last in turn."""
        return self.tier == "flex"

    @property
    def images(self):
        """The addresses of images that are still to be fetched."""
        return [part for part in self.body if isinstance(part, str)]

    def fill_in(self, found):
        """Put images in.

        found  address -> data URL, a list of bytes; of those in the history some may be missing
        """
        self.body = self.filled(found)

    def filled(self, found):
        """The body with these images in their places."""
        body = []
        for part in self.body:
            if not isinstance(part, str):
                body.append(part)
            elif not isinstance(part, Earlier):
                body += found[part]
            elif part in found:
                before, after = part.around
                body += [before, *found[part], after]
            else:
                self.left_out.add(part.where, "image")
                body.append(NO_IMAGE)
        return body

    @property
    def ignored(self):
        """What was left out of the client's request, in the words of a header; or an empty text."""
        return self.left_out.header if self.left_out else ""
