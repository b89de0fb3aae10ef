"""Bearer tokens: `kvs_<8 hex digits: its id>_<43 characters: 32 random bytes as base64url>`.

The hub stores the id and the SHA-256 of the whole token. 32 random bytes can't be guessed, so a slow hash would add no protection. The
prefix `kvs_` lets scanners find leaked tokens.
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
    """A token. Only `reveal` returns its text, so that it is not logged by accident."""

    __slots__ = ("_text", "id")

    def __init__(self, text: str) -> None:
        """Parse a token's text. Raises ValueError, without the text, if it is invalid."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError("that is no token: a token is kvs_, 8 hex digits, _ and 43 letters, digits, _ or -")
        self._text = text
        self.id = match[1]

    @classmethod
    def make(cls) -> Token:
        """Return a new token."""
        secret = base64.urlsafe_b64encode(system.port.random(32)).decode().rstrip("=")
        return cls(f"kvs_{system.port.random(4).hex()}_{secret}")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Token:
        """Return the token in a file, which must be readable only by its owner. Raises AccessError and OSError."""
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
        """Return the header that authenticates a Flight client."""
        return b"authorization", b"Bearer " + self._text.encode()

    @property
    def digest(self) -> str:
        """Return the form in which a hub stores it: its SHA-256 in hex."""
        return hashlib.sha256(self._text.encode()).hexdigest()

    def is_kept_as(self, digest: str) -> bool:
        """Return whether a digest is this token's, in constant time."""
        return hmac.compare_digest(self.digest, digest)

    def __repr__(self) -> str:
        return f"<Token {self.id}>"

    def __reduce__(self) -> str:
        raise TypeError("a token is not pickled")
