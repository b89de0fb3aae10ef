"""Eviction: writers stop waiting for a durable reader that has made no progress for `reader_expiry` while records were pending.

The loops find the room that readers leave, and store the mark (`kernel.end_py`). This module decides which reader gets it, and when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool import system
from kvspool.kernel import frames_py as frames

if TYPE_CHECKING:
    from kvspool.kernel.frames import FrameWriter


CLOCK_JUMP = 1_000_000_000  # ns by which the time of the day gets ahead of the monotonic clock when it is set, or after a suspend


class Eviction:
    """The decisions of one handle."""

    def __init__(self, expiry: int) -> None:
        """expiry: ns without progress after which a reader is evicted; 0: never."""
        self._expiry = expiry
        self._ahead = _clocks()[0] if expiry else 0  # ns of the time of the day before the monotonic clock
        self._trusted_from = 0  # of the monotonic clock

    def admits(self, writer: FrameWriter, end: int) -> bool:
        """Under the append lock, after `begin`: return whether there is room for frames up to `end`; silent readers are evicted for it."""
        if writer.admits(end):
            return True
        if not self._expiry or not self._has_true_times():
            return False
        for slot in range(frames.SLOTS):
            commit = writer.commit_in(slot)
            if commit is None:
                continue
            position, moved, generation = commit
            place = max(position, writer.head())
            if end > place + writer.capacity and self._is_silent(writer, place, moved):
                writer.evict(slot, generation)
        return bool(writer.admits(end))  # which sees a commit that was stored meanwhile

    def _has_true_times(self) -> bool:
        """Return whether the times of commits can be compared with the clock.

        They have the time of the day, which may be set. After it has jumped ahead of the monotonic clock, no reader expires for `expiry`:
        until then each living one has committed again.
        """
        ahead, since_boot = _clocks()
        if ahead - self._ahead > CLOCK_JUMP:
            self._trusted_from = since_boot + self._expiry
        self._ahead = ahead
        return since_boot >= self._trusted_from

    def _is_silent(self, writer: FrameWriter, place: int, moved: int) -> bool:
        """Return whether a reader that last moved at the time `moved` has had pending records at `place` for longer than the expiry."""
        if place >= writer.end:
            return False
        now, since = system.port.now(), moved
        if writer.sequence_at(place, writer.end) != frames.NOTHING and since < writer.timestamp <= now:
            since = writer.timestamp
        return now - since > self._expiry


def _clocks() -> tuple[int, int]:
    """Return how far the time of the day is ahead of the monotonic clock, and the latter, in ns."""
    since_boot = int(system.port.monotonic() * 1e9)
    return system.port.now() - since_boot, since_boot
