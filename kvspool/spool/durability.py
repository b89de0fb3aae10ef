"""Durability: how appended records reach the disk, and how callers wait for that.

**Levels.** "memory": appended records are in the page cache; `sync` flushes them. "os": a thread of the handle does that at an interval, so
that a crash of the machine costs at most the records of the last interval and one flush. "disk": `append` returns when the record is on
disk.

**One flush for all waiting callers.** The caller that flushes takes the sync lock, flushes the data, and stores its extent: the tail at the
start of the flush. Other callers wait meanwhile, and find their records flushed by this flush or the next. The append lock is never held
during a flush.

**Checkpoints.** Each flush begins with a checkpoint in the same file: one flush puts both on disk, and no record is reported as synced
without a checkpoint that includes it. `docs/decisions/0014-durability.md` gives the reasons. `sync` then also flushes spool.ctl, with the
commits of readers.

**Errors.** The first failed flush poisons the log for all writers. The kernel reports a failure once and then treats the pages as clean, so
a retry would succeed without writing them.
"""

from __future__ import annotations

import atexit
import errno
import threading
import weakref
from contextlib import suppress
from typing import Any, Protocol

from kvspool import _frames_py as frames
from kvspool import flushing, system
from kvspool._frames import Ring
from kvspool._group import FlushGroup
from kvspool.errors import KvspoolError, LockTimeout, Poisoned
from kvspool.handles import Handle
from kvspool.spool import checkpoints, format
from kvspool.spool.pair import Pair

SYNC_INTERVAL = 1.0  # seconds between two flushes at the level "os"


class Flusher(Handle):
    """Flushes a log for one handle; all of its threads may use it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._words = Ring(pair.ring, pair.control, pair.seed)
        self._group = FlushGroup(self._words, pair.control, frames.FLUSH_GROUP, frames.SYNC_LOCK)
        self._guard = threading.RLock()
        self._boot_id = system.port.boot_id()

    def sync(self, timeout: float) -> int:
        """Flush all records appended so far, and the commits of readers.

        Returns the sequence below which all records are on disk. Raises the errors of `flush_below`.
        """
        self.flush(timeout)
        with self.pair.held_open():
            self.flush_control()
        return int(self._words.word(format.SYNCED_SEQ))

    def flush(self, timeout: float) -> None:
        """Flush all records appended so far."""
        self.flush_below(self._words.mark()[1], timeout)

    def flush_below(self, sequence: int, timeout: float) -> None:
        """Return when every record below `sequence` is on disk, whichever handle flushed it.

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
        """Flush everything, for files that no other process has seen yet: no lock is taken."""
        self._flush()
        self._flush()  # its checkpoint includes all records
        self.flush_control()

    def flush_control(self) -> None:
        """Flush spool.ctl."""
        self._flush_file(self.pair.control_fd)

    # Flushing, under the sync lock.

    def _flush(self) -> None:
        """Flush a checkpoint together with its data, and publish the result."""
        state = checkpoints.state(self._words)
        synced = self._words.word(format.SYNCED)
        at, raw = checkpoints.successor(self.pair.front, self.pair.header, state, synced, self._boot_id)
        self._flush_file(self.pair.data_fd, raw, at)
        checkpoints.announce(self.pair.control, state)
        self._ring()

    def _ring(self) -> None:
        """Wake readers that wait for synced records. A reader that misses it polls, so errors don't matter."""
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
            if error.errno == errno.EFBIG:  # a limit of this process (`ulimit -f`), not a failure of the disk
                raise
            # Immediately: no earlier call lets a signal handler raise, and the failure is not reported again.
            words[frames.SYNC_ERROR] = error.errno or errno.EIO
            raise Poisoned(f"{self.pair.path}: the flush to disk failed ({error}); it takes no more records") from error


class Flushes(Protocol):
    """The interface of a log for a background thread: `flush` for the records, `sync` for all."""

    def flush(self, timeout: float) -> Any: ...

    def sync(self, timeout: float) -> Any: ...


class Background(Handle):
    """The thread that flushes for a handle of the level "os". It ends when the handle is freed, or the log poisoned."""

    def __init__(self, flusher: Flushes, interval: float, timeout: float) -> None:
        self._flusher = flusher
        self._timeout = timeout
        self._is_over = threading.Event()
        # It must not keep an unused handle alive.
        self._thread = threading.Thread(
            target=_flush_at_intervals, args=(weakref.ref(flusher), self._is_over, interval, timeout), name="kvspool sync", daemon=True
        )
        self._process = system.port.process_id()
        self._thread.start()
        _backgrounds.add(self)

    @property
    def is_ours(self) -> bool:
        """Return whether the thread belongs to this process: a forked child has none."""
        return self._process == system.port.process_id()

    def end(self) -> None:
        """End the thread, and flush the remaining records."""
        _backgrounds.discard(self)
        self._is_over.set()
        self._thread.join(self._timeout)
        self._flusher.sync(self._timeout)


_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()


def _flush_at_intervals(flusher: weakref.ref[Flushes], is_over: threading.Event, interval: float, timeout: float) -> None:
    while not is_over.wait(interval):
        found = flusher()
        try:
            if found is None:
                return
            found.flush(timeout)
        except LockTimeout:
            pass  # another thread flushes, for us too
        except KvspoolError:
            return  # poisoned or closed: the next append reports it
        except OSError:
            pass  # for example no free descriptor: retry at the next interval
        found = None


@atexit.register
def _at_exit() -> None:
    """Close the handles that are still open, as `close` does."""
    for background in list(_backgrounds):
        if background.is_ours:
            with suppress(KvspoolError, OSError):
                background.end()
