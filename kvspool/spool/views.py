"""A view of a record's value in the ring, pinned so that no writer overwrites it.

A pin is a shared lock on the frame's bytes of `spool.dat`, on its own descriptor, which the kernel frees when the process ends. Writers
query such locks only while the word `pins` is set, so that pins cost nothing when unused. The order makes it safe: a reader locks, sets the
word, then checks whether `head` has passed the frame; a writer moves `head`, then checks the word, then the locks. One of them sees the
other.

After a resize the old ring is never written again: views of it need no pin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import GapError, LockTimeout, LogVanished, OutOfRange
from kvspool.kernel import frames_py as frames
from kvspool.kernel import machine
from kvspool.record import Gap
from kvspool.spool import format
from kvspool.system import forks
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.spool.cursor import RingCursor
    from kvspool.spool.spool_files import SpoolFiles


@contextmanager
def view(cursor: RingCursor) -> Iterator[memoryview]:
    """Yield the next value, and move the cursor past it. Raises OutOfRange, GapError, PermissionError."""
    pin = _Pin()
    try:
        found = cursor.advance(lambda end: pin.take(cursor, end))
        if isinstance(found, Gap):
            raise GapError(found)
        if not found:
            raise OutOfRange(f"record {cursor.sequence} is not written yet")
        with found[0] as value:
            yield value
    finally:
        pin.release()


class _Pin(Handle):
    """The lock of one view."""

    _file: Descriptor | None = None

    def __init__(self) -> None:
        self._process = system.port.process_id()
        forks.register(self)

    def take(self, cursor: RingCursor, end: int) -> list[memoryview]:
        """Return the value of the next frame before `end`, pinned; nothing if there is none, and the reader has the reason."""
        files, reader = cursor.files, cursor.reader
        position, sequence = reader.position, reader.sequence
        found = reader.find(end)
        if found is None:
            return []
        value_at, length, offset, stored = found
        start = reader.position - stored
        self._lock(files, offset, stored)
        if reader.head() > start:
            self.release()
            reader.position, reader.sequence = position, sequence
            reader.find(end)  # reports the overrun
            return []
        return [files.ring[value_at : value_at + length]]

    def _lock(self, files: SpoolFiles, offset: int, stored: int) -> None:
        """Pin some bytes of the ring, so that every writer that moves `head` after our next check of it sees the pin."""
        if not files.can_ask:
            raise files.refusal("pin records of")
        self._file = Descriptor(files.path / format.DATA_FILE, os.O_RDONLY)
        fd = self._file.number
        with files.held_open():
            is_same = os.path.sameopenfile(fd, files.data_fd)
        if not is_same:
            self.release()
            if files.successor() is None:
                raise LogVanished(f"{files.path} was deleted or replaced while it was open; open it again if it exists")
            return
        if not system.port.try_share(fd, format.DATA_START + offset, stored):
            raise LockTimeout(f"another program has locked the data of {files.path} exclusively; kvspool never does that")
        files.control.cast("Q")[frames.PINS] = 1
        machine.fence()

    def release(self) -> None:
        """Let writers continue."""
        file, self._file = self._file, None
        if file is not None:
            locks.give_back(file, self._process)

    def forked(self) -> None:
        """In a forked child: the pin is the parent's; close only our copy of its descriptor."""
        self.release()

    def __del__(self) -> None:
        self.release()
