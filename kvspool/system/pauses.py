"""Pauses: between two attempts, longer after each failure and each time by another random part; and between two checks, always the same."""

from __future__ import annotations

import math

from kvspool import system


def growing(failures: int, first: float, longest: float) -> float:
    """Return how many seconds to wait after so many failures in a row: `first` after one, then twice as long each time, up to `longest`."""
    return jittered(min(first * 2.0 ** min(failures - 1, 20), longest))


def jittered(seconds: float) -> float:
    """Return between half of the seconds and one and a half times as many, so that clients don't all return at once."""
    return seconds * (0.5 + int.from_bytes(system.port.random(4), "little") / (1 << 32))


class Interval:
    """Lets a check run at once, and then again after so many seconds. Of threads that share one, several may run it at the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._next = -math.inf

    def is_over(self) -> bool:
        """Return whether the check is due. If so, the next interval begins."""
        now = system.port.monotonic()
        if now < self._next:
            return False
        self._next = now + self.seconds
        return True
