"""How long to wait between two attempts: longer after each failure, and each time by another random part."""

from __future__ import annotations

from kvspool import system


def growing(failures: int, first: float, longest: float) -> float:
    """Return how many seconds to wait after so many failures in a row: `first` after one, then twice as long each time, up to `longest`."""
    return jittered(min(first * 2.0 ** min(failures - 1, 20), longest))


def jittered(seconds: float) -> float:
    """Return between half of the seconds and one and a half times as many, so that clients don't all return at once."""
    return seconds * (0.5 + int.from_bytes(system.port.random(4), "little") / (1 << 32))
