"""The single append of a log, compiled from the caller on.

This source is compiled as a part of `frames_c`; see `frames_py`.
"""

from __future__ import annotations

from typing import Any

import kvspool.kernel.machine as native
from kvspool.kernel.frames_py import BUSY, NO_KEY
from kvspool.kernel.writer_py import FrameWriter


class Single:
    """The single appends of a log, with only compiled code between the caller and the loops."""

    def __init__(self, most_ahead: int) -> None:
        """most_ahead: ns that a caller's timestamp may be after the clock."""
        self.most_ahead = most_ahead
        self._writer: FrameWriter | None = None
        self.is_durable = False

    def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
    ) -> int:
        """Append one record and return its sequence; it survives a crash of this process when the call returns.

        value: bytes, str, or any value that the log's codec takes. key: bytes, str (stored as UTF-8), or None for no key. type: 0..255,
        chosen by the caller. timestamp: ns since the Unix epoch; by default the clock's, and at most a day after it. An earlier one than
        the last record's is raised to that. timeout: seconds to wait for the lock and for room (default: the handle's). durable: return
        when the record is on disk; all waiting callers share one flush. A handle of the level "disk" always does this.

        Raises Unencodable, TooLarge, Unsupported, TypeError and ValueError for the arguments. Raises LockTimeout, SpoolFull, Poisoned,
        Corruption, TimeUnknown, Closed, Reentered, LogVanished, or the system's OSError (no space, no permission). Nothing was written
        then. If only the flush fails, the record was appended, and the error is NotDurable, or Poisoned with a note.
        """
        sequence = self.append_at_once(value, key, type, timestamp, durable)
        if sequence >= 0:
            return sequence
        return self.append_slowly(value, key, type, timestamp, timeout, durable)

    def append_at_once(self, value: Any, key: Any, type: Any, timestamp: Any, durable: Any) -> int:
        """Append a record in one step and wake its waiters; see `FrameWriter.append`. BUSY if it needs more than one step."""
        if not isinstance(self._writer, FrameWriter) or durable or self.is_durable:
            return BUSY
        writer = self._writer
        if not native.is_bytes(value) or not are_plain(key, type, timestamp, self.most_ahead):
            return BUSY
        sequence = writer.append(key, value, type, 0, -1 if timestamp is None else timestamp)
        if sequence >= 0 and writer.has_watchers:
            self.ring(writer)
        return sequence

    def append_slowly(
        self, value: Any, key: bytes | str | None, type: int, timestamp: int | None, timeout: float | None, durable: bool
    ) -> int:
        """Append a record that needs more than one step: to encode the value, to wait for the lock or the disk, or to raise for the
        arguments.
        """
        raise NotImplementedError

    def ring(self, writer: FrameWriter) -> None:
        """Wake the readers that asked for it."""
        raise NotImplementedError


def are_plain(key: bytes | None, type: int, timestamp: int | None, most_ahead: int) -> bool:
    """Return whether these fit into a frame unchanged, and the timestamp is at most so many ns after the clock."""
    if key is not None and not (native.is_bytes(key) and len(key) < NO_KEY):
        return False
    return 0 <= type <= 255 and (timestamp is None or 0 <= timestamp <= native.now() + most_ahead)
