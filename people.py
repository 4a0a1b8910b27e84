"""The people behind a key, such as that of a team's web UI: which of them asks, as a header says
that the key is trusted with."""

import hashlib
import re
from itertools import takewhile

MOST = 1000  # people of a key that are told apart on one day
LONGEST = 64  # characters of a name that is kept as it came
OTHERS = "others"  # all who came when there were so many
LIKE_A_HASH = re.compile(r"(?!\d+\Z)[0-9a-f]{16}")  # digits alone are an id of somebody's


def account_of(key_id, person):
    """What a request counts for, as the Gate and others know it: a person, or else the key."""
    return (key_id, person) if person else key_id


def is_person(account):
    return isinstance(account, tuple)


class People:
    """Those who were seen last.

    secret  the key of the hashes that they are known by (bytes): the same after each start
    seen    {a key's id: {a person: the day on which it was seen last}}, the newest last
    """

    def __init__(self, secret):
        self.secret = secret
        self.seen = {}

    def name_of(self, value, plain=False):
        """Whom a header's value means, or "" where it says nothing.

        value  as WSGI has it: each byte a character
        plain  the value itself is the name, where it can be
        """
        data = value.strip(" \t").encode("latin-1", "replace")
        if not data:
            return ""
        if plain and (name := as_name(data)):
            return name
        return hashlib.blake2b(data, key=self.secret, digest_size=8).hexdigest()

    def admit(self, key_id, name, day, forget):
        """The name that a person has on a day: its own, or OTHERS.

        Who was not seen on that day makes room, the one that was away longest before others.

        forget  a function: forgets all else about a person, and returns whether it could: not while
                they ask for something
        """
        seen = self.seen.setdefault(key_id, {})
        if name not in seen and len(seen) >= MOST:
            away = takewhile(lambda one: seen[one] != day, list(seen))
            gone = next(filter(forget, away), None)
            if gone is None:
                return OTHERS
            del seen[gone]
        seen.pop(name, None)
        seen[name] = day
        return name


def as_name(data):
    """A value (bytes) as the text that it is; None where that is none, is too long, cannot be
    printed or could be somebody else's name."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if len(text) > LONGEST or not text.isprintable():
        return None
    if text == OTHERS or LIKE_A_HASH.fullmatch(text):
        return None
    return text
