"""Durability: how appended records reach the disk, and how callers wait for that.

**Levels.** "memory": appended records are in the page cache; `sync` flushes them. "os": a thread of the handle does that at an interval, so
that a crash of the machine costs at most the records of the last interval and one flush. "disk": `append` returns when the record is on
disk.

**One flush for all waiting callers.** The caller that flushes takes the sync lock, flushes the data, and stores how far it reached: the
tail as it was when the flush began. Other callers wait meanwhile, and find their records flushed by this flush or the next. The append
lock is never held during a flush.

**Checkpoints.** Each flush begins with a checkpoint in the same file: one flush puts both on disk, and no record is reported as synced
without a checkpoint that includes it. `docs/decisions/0014-durability.md` gives the reasons. `sync` then also flushes spool.ctl, with the
commits of readers.

**Errors.** The first failed flush poisons the log for all writers. The kernel reports a failure once and then treats the pages as clean, so
a retry would succeed without writing them.
"""

from __future__ import annotations

import errno
import threading

from kvspool import system
from kvspool.engine import flushing
from kvspool.errors import Poisoned
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import Ring
from kvspool.kernel.group import FlushGroup
from kvspool.spool import checkpoints, format
from kvspool.spool.spool_files import SpoolFiles
from kvspool.system.handles import Handle


class SpoolFlusher(Handle):
    """Flushes a log for one handle; all of its threads may use it."""

    def __init__(self, files: SpoolFiles) -> None:
        self.files = files
        self._words = Ring(files.ring, files.control, files.seed)
        self._group = FlushGroup(self._words, files.control, frames.FLUSH_GROUP, frames.SYNC_LOCK)
        self._guard = threading.RLock()
        self._boot_id = system.port.boot_id()

    def sync(self, timeout: float) -> int:
        """Flush all records appended so far, and the commits of readers.

        Returns the sequence below which all records are on disk. Raises the errors of `flush_below`.
        """
        self.flush(timeout)
        with self.files.held_open():
            self.flush_control()
        return int(self._words.word(format.SYNCED_SEQ))

    def flush(self, timeout: float) -> None:
        """Flush all records appended so far."""
        self.flush_below(self._words.mark()[1], timeout)

    def flush_below(self, sequence: int, timeout: float) -> None:
        """Return when every record below `sequence` is on disk, whichever handle flushed it.

        Raises Poisoned if the disk fails, or failed before; LockTimeout after `timeout` seconds, Closed, Reentered.
        """
        with self.files.held_open():
            if self._group.lock_fd < 0:
                with self._guard:  # threads must not open two, which would exclude each other
                    self._group.lock_fd = self.files.sync_lock_fd
            flushing.flush_for_all(self._group, sequence, timeout, self._flush, self.files.path, self._error)

    def _error(self) -> int:
        """Return the errno of the first failed flush."""
        return int(self._words.word(frames.SYNC_ERROR))

    def flush_alone(self) -> None:
        """Flush everything, for files that no other process has seen yet: no lock is taken."""
        self._flush()
        self._flush()  # its checkpoint includes all records
        self.flush_control()

    def flush_control(self) -> None:
        """Flush spool.ctl."""
        self._flush_file(self.files.control_fd)

    # Flushing, under the sync lock.

    def _flush(self) -> None:
        """Flush a checkpoint together with its data, and publish the result."""
        state = checkpoints.state(self._words)
        synced = self._words.word(format.SYNCED)
        at, raw = checkpoints.successor(self.files.front, self.files.header, state, synced, self._boot_id)
        self._flush_file(self.files.data_fd, raw, at)
        checkpoints.announce(self.files.control, state)
        if self._words.wake_readers():  # a reader waits for synced records
            self.files.wake()

    def _flush_file(self, fd: int, data: bytes = b"", at: int = 0) -> None:
        """Write `data` at `at` of a file, and flush the file. A failure poisons the log; OSError if this process may not write there."""
        words = self.files.control.cast("Q")
        try:
            if data:
                system.port.write(fd, data, at)
            system.port.flush_data(fd)
        except OSError as error:
            if error.errno == errno.EFBIG:  # a limit of this process (`ulimit -f`), not a failure of the disk
                raise
            # Immediately: no earlier call lets a signal handler raise, and the failure is not reported again.
            words[frames.SYNC_ERROR] = error.errno or errno.EIO
            raise Poisoned(f"{self.files.path}: the flush to disk failed ({error}); it takes no more records") from error
