"""What a client keeps for the gateway, and the gateway alone can read: sealed with a key that stays in the database.

A seal shows nothing of its text, and one that was changed, or made elsewhere, does not open (AES-256-GCM).
"""

import base64
import binascii
import os
from functools import cached_property

from store.database import database

KIND = b"sparks 1"  # another format would have another name
NONCE = 12  # bytes; random ones serve for 2**32 texts


class Seal:
    """Closes and opens texts with one key, 32 bytes."""

    def __init__(self, key):
        self.key = key

    @cached_property
    def box(self):
        from cryptography.hazmat.primitives.ciphers.aead import (
            AESGCM,
        )  # some MB, where somebody keeps reasoning

        return AESGCM(self.key)

    def close(self, text):
        """The text sealed, as printable ASCII."""
        nonce = os.urandom(NONCE)
        sealed = self.box.encrypt(nonce, text.encode("utf-8", "replace"), KIND)
        return base64.urlsafe_b64encode(nonce + sealed).decode()

    def open(self, sealed):
        """The text of what `close` gave, or None for anything else."""
        from cryptography.exceptions import InvalidTag

        try:
            data = base64.b64decode(sealed, b"-_", validate=True)
            return self.box.decrypt(data[:NONCE], data[NONCE:], KIND).decode()
        except (InvalidTag, binascii.Error, ValueError):
            return None


def own_seal():
    """The Seal with the key that the database holds since its migration."""
    ((key,),) = database.execute_sql("SELECT value FROM secret WHERE name = 'seal'").fetchall()
    return Seal(key)
