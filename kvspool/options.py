"""The options that the verbs of every log share: the start of a read, its isolation, and its treatment of lost records."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Literal

Start = int | str | datetime
"""The start of a read: "earliest", "latest", a sequence, or an aware datetime (the first record at or after it)."""

OnGap = Literal["raise", "yield", "skip"]
"""The treatment of lost records: raise GapError, return the Gap, or only count them."""

Isolation = Literal["appended", "synced"]
"""The records that a read sees: every appended one, or only those on disk."""

Durability = Literal["memory", "os", "disk"]
DURABILITIES: tuple[Durability, ...] = ("memory", "os", "disk")  # when an append is on disk; the number is the index here

Progress = Callable[[int, int], object]
"""The progress of a long verb: called with the part that is done, and with all."""

TIMEOUT = 10.0  # seconds that a writer waits for the lock before LockTimeout names its holder


def check_isolation(isolation: Isolation) -> Isolation:
    """Return the isolation. Raises ValueError for any other value."""
    if isolation not in ("appended", "synced"):
        raise ValueError(f'isolation is "appended" or "synced", not {isolation!r}')
    return isolation


def check_sequence(sequence: int) -> int:
    """Return the sequence. Raises TypeError for what is no int."""
    if not isinstance(sequence, int):
        raise TypeError(f"a sequence is an int, not {type(sequence).__name__}")
    return sequence
