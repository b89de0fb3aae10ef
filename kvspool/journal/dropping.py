"""Remove the oldest segments of a journal, whole.

Under the append lock, the oldest first, and never the last one: a crash meanwhile leaves a journal that begins later. A reader with a
removed segment open reads it to its end; a later one gets a Gap with the reason "trimmed".
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.errors import KvspoolError
from kvspool.journal.format import LARGEST_SEGMENT
from kvspool.journal.segments import Segments
from kvspool.system import disk

if TYPE_CHECKING:
    from kvspool.journal.control import Page
    from kvspool.journal.format import Format
    from kvspool.journal.offsets import Offsets


def whole_before(bases: list[int], sequence: int) -> list[int]:
    """Return the segments wholly before a sequence: the next one begins there, or earlier. Never the last one."""
    return [base for base, following in zip(bases, bases[1:], strict=False) if following <= sequence]


def drop(segments: Segments, bases: list[int]) -> list[int]:
    """Under the append lock: remove the segments that begin at these sequences, which are the oldest ones, in order.

    Each name is removed from the disk before the next one, so that no crash of the machine leaves a hole. Raises NameNotDurable, with the
    others left, if that flush fails.
    """
    for base in bases:
        path = segments.path_of(base)
        segments.remove(base)
        disk.flush_directory(segments.directory, done=f"{path} was removed")
        segments.remove_index(base)
    return bases


def consumed(segments: Segments, offsets: Offsets) -> list[int]:
    """Return the segments that every durable reader has passed; none without a reader. Raises Corruption for an unreadable position."""
    slowest = offsets.slowest()
    return [] if slowest is None else whole_before(segments.bases(), slowest)


class AppenderRetention:
    """Keeps a journal within its total size, and removes consumed segments, for one appender."""

    def __init__(self, format: Format, offsets: Offsets) -> None:
        self._format = format
        self._offsets = offsets
        self._base = -1  # of the last segment when the others were counted
        self._sealed = 0  # size of the others then, in bytes; too high if segments were removed since

    def make(self, segments: Segments, page: Page, size: int) -> None:
        """Under the append lock, before `size` bytes are added: remove the oldest segments until there is room within `total_bytes`."""
        most = self._format.total_bytes
        if not most or (page.base == self._base and self._sealed + page.end + size <= most):
            return
        self._base = -1  # count again, unless this completes
        sizes = {base: _size_of(segments, base) for base in segments.bases() if base < page.base}
        going = []
        sealed = sum(sizes.values())
        for base, bytes in sizes.items():
            if sealed + page.end + size <= most:
                break
            going.append(base)
            sealed -= bytes
        with disk.step():  # nothing was appended
            drop(segments, going)
        self._base, self._sealed = page.base, sealed

    def most(self, base: int) -> int:
        """Return the size in bytes that the segment at `base` may reach without a `make`, as far as known."""
        if not self._format.total_bytes:
            return LARGEST_SEGMENT
        return max(0, self._format.total_bytes - self._sealed) if base == self._base else 0

    def rolled(self, segments: Segments) -> None:
        """Under the append lock, after a segment was begun: remove consumed ones. Never raises: the next call retries."""
        if self._format.trims_consumed:
            with suppress(KvspoolError, OSError, ValueError):
                drop(segments, consumed(segments, self._offsets))


def _size_of(segments: Segments, base: int) -> int:
    status = system.port.look_up(segments.path_of(base))
    return 0 if status is None else status.st_size
