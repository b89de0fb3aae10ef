"""Dropping the oldest segments of a journal, whole.

Under the append lock, the oldest first, and never the last one: whoever dies in the midst of it leaves a journal that begins later. Who has
a dropped segment open reads it to its end; who comes to it later gets a Gap with the reason "trimmed".
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.journal.appender import flush_directory
from kvspool.journal.index import path_of

if TYPE_CHECKING:
    from kvspool.journal.journal import Journal
    from kvspool.journal.segments import Segments


def drop_before(journal: Journal, sequence: int, timeout: float | None = None) -> list[int]:
    """Drop every segment whose records all come before a sequence, on disk when it returns; returns their first sequences.

    timeout: seconds to wait for the append lock; None: the journal's. Raises what `Journal.append` raises for the lock and the disk.
    """
    with journal.appending(journal.timeout if timeout is None else timeout) as (appender, _):
        bases = appender.segments.bases()
        return drop(appender.segments, whole_before(bases, sequence))


def whole_before(bases: list[int], sequence: int) -> list[int]:
    """Return those segments of which every record comes before a sequence: the next one begins there, or earlier. Never the last one."""
    return [base for base, following in zip(bases, bases[1:], strict=False) if following <= sequence]


def drop(segments: Segments, bases: list[int]) -> list[int]:
    """Under the append lock: remove the segments that begin at these sequences, which are the oldest ones, in order.

    Each name is gone from the disk before the next one is removed, so that no crash of the machine leaves a hole.
    """
    for base in bases:
        with suppress(FileNotFoundError):
            system.port.remove(segments.path_of(base))
            flush_directory(segments.directory)
        with suppress(OSError):  # a hint that stays is never looked at
            system.port.remove(path_of(segments.format, segments.path, base))
    return bases
