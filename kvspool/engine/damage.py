"""Damage of a log: where it is, and how much of it a report lists."""

from __future__ import annotations

import msgspec

MOST_PLACES = 1000  # damaged places in a report; it counts all of them


class Damage(msgspec.Struct, frozen=True):
    """A place with bytes that are no frames, or not the expected ones.

    position, size: of the place in the ring. first, last: the missing sequences; last < first if none is.
    """

    position: int
    size: int
    first: int
    last: int

    @property
    def count(self) -> int:
        """Return how many sequences are missing."""
        return self.last - self.first + 1
