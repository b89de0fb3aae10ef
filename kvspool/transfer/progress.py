"""The progress of a copy."""

from __future__ import annotations

import msgspec


class CopyProgress(msgspec.Struct, frozen=True):
    """records, bytes: copied by this run so far; bytes are those of keys and values. all: sequences to read, 0 if unknown."""

    records: int
    bytes: int
    all: int
