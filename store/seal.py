"""Texts that a client keeps for the gateway, and that the gateway alone can read.

They are encrypted with AES-256-GCM, whose key stays in the database. A sealed text shows nothing of
the one in it, and one that was changed, or made elsewhere, does not decrypt.
"""

import base64
import binascii
import os
from functools import cached_property

from store.database import database

FORMAT = b"sparks 1"  # authenticated with each text; another format would have another name
NONCE = 12  # bytes; random ones serve for 2**32 texts (NIST SP 800-38D, 8.3)


class Seal:
    """Encrypts and decrypts texts with one key, 32 bytes."""

    def __init__(self, key):
        self.key = key

    @cached_property
    def cipher(self):
        # Takes some MB, which only a gateway spends whose clients keep reasoning.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self.key)

    def encrypt(self, text):
        """The text sealed, as printable ASCII."""
        nonce = os.urandom(NONCE)
        data = self.cipher.encrypt(nonce, text.encode("utf-8", "replace"), FORMAT)
        return base64.urlsafe_b64encode(nonce + data).decode()

    def decrypt(self, sealed):
        """The text of what `encrypt` gave, or None for anything else."""
        from cryptography.exceptions import InvalidTag

        try:
            data = base64.b64decode(sealed, b"-_", validate=True)
            return self.cipher.decrypt(data[:NONCE], data[NONCE:], FORMAT).decode()
        except (InvalidTag, binascii.Error, ValueError):
            return None


def own_seal():
    """The Seal of this database."""
    return Seal(secret("seal"))


def secret(name):
    """A key (bytes) that the database holds since its migration."""
    sql = "SELECT value FROM secret WHERE name = ?"
    ((value,),) = database.execute_sql(sql, (name,)).fetchall()
    return value
