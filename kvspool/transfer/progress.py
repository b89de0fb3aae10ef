"""How far a copy has got."""

from __future__ import annotations

import msgspec


class CopyProgress(msgspec.Struct, frozen=True):
    """records, bytes: copied by this run so far, bytes being those of keys and values. all: sequences that it has to look at, 0 if that
    isn't known."""

    records: int
    bytes: int
    all: int
