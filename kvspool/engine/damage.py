"""Damage of a log: where it is, and how much of it a report lists."""

from __future__ import annotations

import msgspec

MOST_PLACES = 1000  # damaged places that a report lists; it counts all of them


class Damage(msgspec.Struct, frozen=True):
    """A place whose bytes are no frames, or not those that should be there.

    position, size: of the place in the ring. first, last: the sequences that are missing there; last < first if none is.
    """

    position: int
    size: int
    first: int
    last: int

    @property
    def count(self) -> int:
        """Return how many sequences are missing."""
        return self.last - self.first + 1
