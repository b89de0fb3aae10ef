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

import atexit
import errno
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import posix_ipc

from kvspool import _frames_py as frames
from kvspool import system
from kvspool._frames import Bell
from kvspool.errors import Closed, KvspoolError, LockTimeout, Poisoned, Reentered
from kvspool.spool import checkpoints, format, seats
from kvspool.spool.pair import Pair

SYNC_INTERVAL = 1.0  # seconds between two flushes at the level "os"
LONGEST_WAIT = 2_000_000  # ns until a look whether another process is done, for one that was killed wakes nobody


class Flusher:
    """Puts a log on disk for one handle; its threads may all use it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._reader = pair.reader(0, 0)
        self._boot_id = system.port.boot_id()
        self._bells: list[Bell | None] = [None] * (frames.SEATS + 1)
        self._turn = threading.Condition()
        self._leader = 0  # the thread that flushes, or waits for another process that does

    def sync(self, timeout: float) -> int:
        """Put everything that was appended so far on disk, and what readers have committed.

        Returns the sequence below which all is there. Raises what `flush_below` does.
        """
        self.flush(timeout)
        with self._in_use():
            self.flush_control()
        return int(self._reader.word(format.SYNCED_SEQ))

    def flush(self, timeout: float) -> None:
        """Put everything that was appended so far on disk."""
        self.flush_below(checkpoints.state(self._reader).next_seq, timeout)

    def flush_below(self, sequence: int, timeout: float) -> None:
        """Return when every record below `sequence` is on disk, whoever put it there.

        Raises Poisoned if the disk fails, or failed before; LockTimeout after `timeout` seconds, Closed, Reentered.
        """
        if self._leader == threading.get_ident():
            raise Reentered("a signal handler may not flush a handle in the middle of a flush of it; let it use a handle of its own")
        deadline = system.port.monotonic() + timeout
        with self._in_use():
            try:
                if self._take_turn(sequence, deadline):
                    self._lead(sequence, deadline)
            finally:
                self._end_turn()

    def flush_alone(self) -> None:
        """Put all on disk, for files that nobody else has seen yet: no lock is taken."""
        self._flush()
        self._flush()  # its checkpoint says that all is there
        self.flush_control()

    def flush_control(self) -> None:
        """Flush spool.ctl."""
        self._flush_file(self.pair.control_fd)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        with self.pair.in_use() as is_open:
            if not is_open:
                raise Closed(f"{self.pair.path} was closed; open it again")
            yield

    # Waiting.

    def _take_turn(self, sequence: int, deadline: float) -> bool:
        """Return True once this thread leads those of the process, False once there is nothing left to do."""
        with self._turn:
            while not self._is_reached(sequence):
                if not self._leader:
                    self._leader = threading.get_ident()
                    return True
                left = deadline - system.port.monotonic()
                if left <= 0:
                    raise self._too_slow("another thread")
                self._turn.wait(left)
        return False

    def _end_turn(self) -> None:
        with self._turn:
            if self._leader == threading.get_ident():
                self._leader = 0
                self._turn.notify_all()

    def _lead(self, sequence: int, deadline: float) -> None:
        """Flush under the sync lock, unless another process gets there before."""
        fd = self.pair.sync_lock_fd
        while True:
            synced = self._reader.word(format.SYNCED)
            if self._is_reached(sequence):
                return
            is_ours = False
            try:
                is_ours = system.port.try_lock(fd, format.SYNC_LOCK)
                if is_ours:
                    if not self._is_reached(sequence):
                        self._flush()
                    return
            finally:
                # Whether we have it or not: an exception out of a signal handler may have come before we knew.
                system.port.unlock(fd, format.SYNC_LOCK)
                if is_ours:
                    self._reader.wake_all(format.SYNCED)
            left = deadline - system.port.monotonic()
            if left <= 0:
                raise self._too_slow("another process")
            self._reader.wait_word(format.SYNCED, synced, min(LONGEST_WAIT, int(left * 1e9)))

    def _is_reached(self, sequence: int) -> bool:
        """Return whether that is done. Raises Poisoned if a flush failed, even where an earlier one had done it."""
        reader = self._reader
        # What lies behind the end of the log is damage, and proves nothing.
        is_flushed = sequence <= reader.word(format.SYNCED_SEQ) <= reader.mark()[1]
        if number := reader.word(frames.SYNC_ERROR):
            raise Poisoned(f"{self.pair.path}: a flush to disk failed before (errno {number}); copy it to a sound disk")
        return is_flushed

    def _too_slow(self, who: str) -> LockTimeout:
        return LockTimeout(f"{self.pair.path}: {who} flushes, and is not done yet")

    # Flushing, under the sync lock.

    def _flush(self) -> None:
        """Put a checkpoint and the data that it speaks of on disk, and tell all."""
        state = checkpoints.state(self._reader)
        synced = self._reader.word(format.SYNCED)
        at, raw = checkpoints.successor(self.pair.front, self.pair.header, state, synced, self._boot_id)
        self._flush_file(self.pair.data_fd, raw, at)
        checkpoints.announce(self.pair.control, state)
        self._ring()

    def _ring(self) -> None:
        """Wake the readers who wait for what is on disk now. One that misses it looks by himself, so nothing that fails here matters."""
        wanted = self._reader.take_bell()
        if wanted:
            with suppress(OSError, posix_ipc.Error):
                seats.wake(self.pair, wanted, self._bells)

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


class Flushing(Protocol):
    """What a thread of the level "os" does its work with."""

    def flush(self, timeout: float) -> object:
        """Put the data on disk, waiting up to `timeout` seconds for others. Raises KvspoolError or OSError."""

    def sync(self, timeout: float) -> object:
        """Put everything on disk."""


class Background:
    """The thread that flushes for a handle of the level "os". It ends by itself where the handle is gone, or the log poisoned."""

    def __init__(self, flusher: Flushing, interval: float, timeout: float) -> None:
        self._flusher = flusher
        self._timeout = timeout
        self._is_over = threading.Event()
        # It must not keep alive a handle that nobody has any more.
        self._thread = threading.Thread(
            target=_flush_at_intervals, args=(weakref.ref(flusher), self._is_over, interval, timeout), name="kvspool sync", daemon=True
        )
        self._process = system.port.process_id()
        self._thread.start()
        _backgrounds.add(self)

    @property
    def is_ours(self) -> bool:
        """Return whether the thread is of this process: a forked child has none."""
        return self._process == system.port.process_id()

    def end(self) -> None:
        """End the thread, and put on disk what it had not come to."""
        _backgrounds.discard(self)
        self._is_over.set()
        self._thread.join(self._timeout)
        self._flusher.sync(self._timeout)


_backgrounds: weakref.WeakSet[Background] = weakref.WeakSet()


def _flush_at_intervals(flusher: weakref.ref[Flushing], is_over: threading.Event, interval: float, timeout: float) -> None:
    while not is_over.wait(interval):
        found = flusher()
        try:
            if found is None:
                return
            found.flush(timeout)
        except LockTimeout:
            pass  # another one flushes, for us too
        except KvspoolError:
            return  # poisoned or closed: the next append says so
        except OSError:
            pass  # no descriptor left, say: the next time, then
        found = None


@atexit.register
def _at_exit() -> None:
    """Do what `close` would have done for the handles that are still open."""
    for background in list(_backgrounds):
        if background.is_ours:
            with suppress(KvspoolError, OSError):
                background.end()
