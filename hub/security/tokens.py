"""Bearer tokens: `kvs_<8 hex digits: its id>_<43 characters: 32 random bytes as base64url>`.

The hub keeps the id and the SHA-256 of the whole token. 32 random bytes can't be guessed, so a slow hash would protect nothing more. The
`kvs_` lets a scanner find a token that went where it should not be.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re

from hub.errors import AccessError
from hub.security.private import WatchedFile
from kvspool import system

ID = re.compile(r"[0-9a-f]{8}")
_TEXT = re.compile(r"kvs_([0-9a-f]{8})_[A-Za-z0-9_-]{43}")


class Token:
    """A token. Its text is got by `reveal` alone, so that it gets into no log by accident."""

    __slots__ = ("_text", "id")

    def __init__(self, text: str) -> None:
        """Take a token's text. Raises ValueError, which does not repeat it, if it is none."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError("that is no token: one is kvs_, 8 hex digits, _ and 43 letters, digits, _ or -")
        self._text = text
        self.id = match[1]

    @classmethod
    def make(cls) -> Token:
        """Return a new one."""
        secret = base64.urlsafe_b64encode(system.port.random(32)).decode().rstrip("=")
        return cls(f"kvs_{system.port.random(4).hex()}_{secret}")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Token:
        """Return the one that a file holds, which must be readable by its owner alone. Raises AccessError and OSError."""
        data = WatchedFile(path, is_secret=True).read()
        try:
            return cls(data.decode("ascii").strip())
        except ValueError:
            raise AccessError(f"{os.fspath(path)} holds no token") from None

    def reveal(self) -> str:
        """Return its text."""
        return self._text

    @property
    def header(self) -> tuple[bytes, bytes]:
        """Return the header by which a Flight client shows it."""
        return b"authorization", b"Bearer " + self._text.encode()

    @property
    def digest(self) -> str:
        """Return what a hub keeps of it: its SHA-256 in hex."""
        return hashlib.sha256(self._text.encode()).hexdigest()

    def is_kept_as(self, digest: str) -> bool:
        """Return whether a digest is this token's, in a time that says nothing about how much of it agrees."""
        return hmac.compare_digest(self.digest, digest)

    def __repr__(self) -> str:
        return f"<Token {self.id}>"

    def __reduce__(self) -> str:
        raise TypeError("a token is not pickled")
