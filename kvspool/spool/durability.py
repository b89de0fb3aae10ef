"""Durability: how what was appended comes to the disk, and who waits for that.

**Levels.** "memory": appended records are in the page cache; `sync` puts them on disk. "os": a thread of the handle does that at an
interval, so that the death of the machine costs at most what was appended in the last interval and during one flush. "disk": `append`
returns when the record is on disk.

**One flush for all who wait.** Who wants records on disk takes the sync lock, flushes the data, and stores how far that goes: up to the
tail as it was when the flush began. Who comes meanwhile waits, and finds the work done, by the one before or by the next. The append lock
is never held across a flush.

**Checkpoints.** Each flush begins with a checkpoint, which lies in the same file: one flush puts both on disk, and nobody is told of
records that no checkpoint knows. `docs/decisions/0014-durability.md` says why that is right. `sync` then flushes spool.ctl as well, for
the sake of what readers have committed.

**Errors.** The first flush that fails poisons the log for all writers. The kernel reports a failure once and then takes the pages for
clean, so a retry would succeed without having written them.
"""

from __future__ import annotations

import errno
import threading
from contextlib import suppress

from kvspool import system
from kvspool.engine import flushing
from kvspool.errors import Poisoned
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import Ring
from kvspool.kernel.group import FlushGroup
from kvspool.spool import checkpoints, format
from kvspool.spool.pair import Pair
from kvspool.system.handles import Handle


class Flusher(Handle):
    """Puts a log on disk for one handle; its threads may all use it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._words = Ring(pair.ring, pair.control, pair.seed)
        self._group = FlushGroup(self._words, pair.control, frames.FLUSH_GROUP, frames.SYNC_LOCK)
        self._guard = threading.RLock()
        self._boot_id = system.port.boot_id()

    def sync(self, timeout: float) -> int:
        """Put everything that was appended so far on disk, and what readers have committed.

        Returns the sequence below which all is there. Raises what `flush_below` does.
        """
        self.flush(timeout)
        with self.pair.held_open():
            self.flush_control()
        return int(self._words.word(format.SYNCED_SEQ))

    def flush(self, timeout: float) -> None:
        """Put everything that was appended so far on disk."""
        self.flush_below(self._words.mark()[1], timeout)

    def flush_below(self, sequence: int, timeout: float) -> None:
        """Return when every record below `sequence` is on disk, whoever put it there.

        Raises Poisoned if the disk fails, or failed before; LockTimeout after `timeout` seconds, Closed, Reentered.
        """
        with self.pair.held_open():
            if self._group.lock_fd < 0:
                with self._guard:  # threads must not open two, which would exclude each other
                    self._group.lock_fd = self.pair.sync_lock_fd
            flushing.flush_for_all(self._group, sequence, timeout, self._flush, self.pair.path, self._error)

    def _error(self) -> int:
        """Return the errno of the first failed flush."""
        return int(self._words.word(frames.SYNC_ERROR))

    def flush_alone(self) -> None:
        """Put all on disk, for files that nobody else has seen yet: no lock is taken."""
        self._flush()
        self._flush()  # its checkpoint says that all is there
        self.flush_control()

    def flush_control(self) -> None:
        """Flush spool.ctl."""
        self._flush_file(self.pair.control_fd)

    # Flushing, under the sync lock.

    def _flush(self) -> None:
        """Put a checkpoint and the data that it speaks of on disk, and tell all."""
        state = checkpoints.state(self._words)
        synced = self._words.word(format.SYNCED)
        at, raw = checkpoints.successor(self.pair.front, self.pair.header, state, synced, self._boot_id)
        self._flush_file(self.pair.data_fd, raw, at)
        checkpoints.announce(self.pair.control, state)
        self._ring()

    def _ring(self) -> None:
        """Wake the readers who wait for what is on disk now. One that misses it looks by himself, so nothing that fails here matters."""
        if self._words.ring_bell():
            with suppress(OSError):
                self.pair.wake()

    def _flush_file(self, fd: int, data: bytes = b"", at: int = 0) -> None:
        """Write `data` at `at` of a file, and flush the file. A failure poisons the log; OSError if this process may not write there."""
        words = self.pair.control.cast("Q")
        try:
            if data:
                system.port.write(fd, data, at)
            system.port.flush_data(fd)
        except OSError as error:
            if error.errno == errno.EFBIG:  # a limit of this process (`ulimit -f`), and no failure of the disk
                raise
            # At once: no call before it lets an exception out of a signal handler in, and the failure is not reported again.
            words[frames.SYNC_ERROR] = error.errno or errno.EIO
            raise Poisoned(f"{self.pair.path}: the flush to disk failed ({error}); it takes no more records") from error
