"""Where conversations ran last: an engine that has the beginning of a prompt in its cache need not
read it again.

A conversation is told by a hash of how it begins, under a key that is made at each start: nothing
of it is kept but in memory, and nobody can tell from a hash what was said.
"""

import hashlib
import secrets

MOST = 10_000  # conversations that are remembered, those that ran last


class Homes:
    """The place of each conversation."""

    def __init__(self):
        self.key = secrets.token_bytes(32)
        self.places = {}

    def name_of(self, *parts):
        """The name of the conversation that begins with these texts or bytes."""
        told = hashlib.blake2b(key=self.key, digest_size=16)
        for part in parts:
            data = part if isinstance(part, bytes) else str(part).encode()
            told.update(b"%d:" % len(data))
            told.update(data)
        return told.digest()

    def find(self, name):
        """The place where a conversation ran last, or None."""
        return self.places.get(name)

    def note(self, name, place):
        self.places.pop(name, None)  # the newest stand last
        self.places[name] = place
        if len(self.places) > MOST:
            del self.places[next(iter(self.places))]
