"""Flush a journal to disk: one flush for all waiting callers.

Segments before the last one are on disk since the last one began. So a flush concerns only the last segment.

**Group commit.** If writers share a tail (`kernel.tail_py`), it contains the synced sequence, and the words of their `FlushGroup`.
A flush then needs one read of the tail, one `fdatasync` of a descriptor that this handle keeps, and a moment of the append lock.

`_flush_tail` does this for the leader, and `_flush` is the long way.

**The long way** is used without a tail, or if the tail doesn't give the end of the journal: it finds the end from the page of the lock
file, and stores the synced sequence there. A waiter for the flush lock checks that before it flushes again.

**Errors.** The first error of a flush is stored in the lock file and in the tail before any other code runs (`control.flush_noted`), and a
closed handle keeps its locks until its flushes have ended. So no other flush succeeds between the error and its store.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from kvspool import system
from kvspool.engine import flushing
from kvspool.engine.background import Background
from kvspool.errors import Closed, KvspoolError, LockTimeout, NotDurable, Poisoned, Reentered, Truncated
from kvspool.journal import control
from kvspool.journal.control import SYNC
from kvspool.journal.segment import Segment
from kvspool.kernel import machine as native
from kvspool.kernel import tail_py as tails
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.journal.appender import Appender
    from kvspool.journal.control import Control, Page
    from kvspool.journal.handle import JournalHandle
    from kvspool.kernel.group import FlushGroup
    from kvspool.kernel.tail import Tail

BLANK = 4  # bytes at the end of a segment that are tested for zeros
TRIES = 2  # to open the tail's last segment; others may begin a new one


class FlushedSegment(Handle):
    """The last segment, kept open by one handle for flushes, until it flushes a later one or is closed.

    It closes when the object is freed: a thread may be flushing it.
    """

    def __init__(self, segment: Segment) -> None:
        status = system.port.status(segment.fd)
        self.segment = segment
        self.place = (segment.base, os.fsencode(segment.path), status.st_dev, status.st_ino)


class Patience:
    """The time limit of one call: `timeout` seconds until its flush begins, and as long again after it, to store its result."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._deadline = system.port.monotonic() + timeout

    @property
    def left(self) -> float:
        """Return the seconds left until the flush has to begin."""
        return max(0.0, self._deadline - system.port.monotonic())


class JournalFlusher(Handle):
    """Flushes a journal for one handle; all of its threads may use it."""

    def __init__(self, journal: JournalHandle) -> None:
        self._journal = journal
        self._target: FlushedSegment | None = None
        self._flush_turn: Any = threading.RLock()  # without a tail, one thread at a time flushes
        self._leader = 0  # that thread
        self._background: Background | None = None
        self._starting = threading.RLock()

    # Levels.

    def keep_level(self, sequences: range, timeout: float, durable: bool) -> None:
        """Apply the level of the handle to appended records; durable: "disk" instead. Raises NotDurable."""
        journal = self._journal
        if durable or journal.durability == "disk":
            try:
                self.flush_below(sequences.stop, timeout)
            except Exception as error:
                raise NotDurable(sequences, str(error)) from error
        elif journal.durability == "os":
            with self._starting:
                if self._background is None or not self._background.is_ours:
                    self._background = Background(self, journal.sync_interval, journal.timeout)

    def end_background(self) -> None:
        """End the thread of the level "os", which flushes the remaining records. Raises the errors of `sync`."""
        background, self._background = self._background, None
        if background is not None and background.is_ours:
            background.end()

    # Flushes.

    def sync(self, timeout: float) -> int:
        """Flush all records appended so far; return the sequence below which all are on disk.

        timeout: see `Patience`. Raises Poisoned, LockTimeout, Closed, Reentered.
        """
        return self.flush(timeout)

    def flush(self, timeout: float) -> int:
        """Do as `sync`."""
        patience = Patience(timeout)
        sequence = self._end(self._journal.control(timeout))
        if sequence is None:  # without the lock the page may be half-written
            sequence = self._journal.under_lock(patience.left, lambda _, page: page.next_sequence)
        return min(sequence, self._covered(sequence, patience))  # less, if records were removed meanwhile

    def _end(self, held: Control) -> int | None:
        """Return the next sequence from the tail; None unless the segment ends there: a writer without a tail, or a killed one, may have
        written more.
        """
        tail, target = held.tail, self._target
        found = None if tail is None else tail.found()
        if tail is None or found is None or target is None or not tail.is_valid():
            return None
        base, path, device, number = target.place
        with suppress(OSError, Closed):  # another thread may be reopening the lock file
            if base == found[0] and native.size_at(path, device, number) == found[1] and not held.is_gone():
                return found[2]
        return None

    def flush_below(self, sequence: int, timeout: float) -> None:
        """Return when every record below `sequence` is on disk, whichever process flushed it.

        Raises the errors of `sync`, and Truncated if some of the records were removed before.
        """
        covered = self._covered(sequence, Patience(timeout))
        if covered < sequence:
            raise Truncated(f"{self._journal.path}: the records from sequence {covered} on were removed before they were on disk")

    def _covered(self, sequence: int, patience: Patience) -> int:
        """Flush the records below `sequence` that still exist, and return the sequence below which all are on disk."""
        self._journal.refuse_handler()
        held = self._journal.control(patience.left)
        with held.held_open():
            while True:
                # Another thread may be about to share the tail of a new lock file, under the append lock.
                group = held.group or self._journal.locked(patience.left, lambda: held.group)
                if group is None:
                    return self._flush_alone(held, sequence, patience)
                flush = partial(self._flush_tail, held, group, sequence, patience)
                try:
                    covered = flushing.flush_for_all(
                        group, sequence, patience.left, flush, self._journal.path, partial(_error, held), held.flusher
                    )
                    return sequence if covered is None else covered
                except Closed:
                    if held.group is group:
                        raise
                    # The lock file was removed, and another thread has opened the one that now has the name.

    def _flush_tail(self, held: Control, group: FlushGroup, sequence: int, patience: Patience) -> int:
        """Under the flush lock: flush the records of the tail; the long way, if it doesn't give the end. Return the synced sequence.

        Raises Closed if the tail is no longer the group's: a leader of the new one may be using it.
        """
        held.sign_flush()
        begun = self._begin(held, group, patience)
        if begun is None:
            return self._flush_unless_done(held, sequence, patience)
        tail, target = begun
        covered = tail.flush_to
        self._flush_data(held, target.segment, patience)
        if self._journal.locked(patience.timeout, tail.end_flush):
            return covered
        return self._flush(held, Patience(patience.timeout))

    def _begin(self, held: Control, group: FlushGroup, patience: Patience) -> tuple[Tail, FlushedSegment] | None:
        """Return the last segment, after the tail has stored the goal of its flush; None if the long way is needed."""
        for _ in range(TRIES):
            tail, target = held.tail, self._target
            if held.group is not group:
                raise Closed(f"{held.path} was removed, and another thread has opened the file that now has the name")
            if tail is not None and target is not None and tail.begin_flush(*target.place) != tails.SLOW:
                return None if self._is_blank(target, tail.flush_end) else (tail, target)
            self._target = self._journal.under_lock(patience.left, lambda appender, page: FlushedSegment(appender.reopened(page)))
        return None

    def _is_blank(self, target: FlushedSegment, end: int) -> bool:
        """Return whether the segment ends there in bytes that could be zeros left by a crash."""
        return self._journal.format.reads_zeros and not any(target.segment.read(max(0, end - BLANK), BLANK))

    def _flush_alone(self, held: Control, sequence: int, patience: Patience) -> int:
        """Without a tail: when no other thread flushes, flush under the flush lock, unless it was done. Return the synced sequence."""
        thread, lock = threading.get_ident(), self._flush_turn
        if self._leader == thread:
            raise Reentered(flushing.REENTERED)
        try:
            if not lock.acquire(timeout=min(patience.left, threading.TIMEOUT_MAX)):
                raise LockTimeout(f"{self._journal.path}: another thread is still flushing")
            self._leader = thread
            return self._flush_locked(held, sequence, patience)
        finally:
            try:
                self._free(lock, thread)
            except BaseException:  # from a signal handler, perhaps before the others could continue
                self._free(lock, thread)
                raise

    def _free(self, lock: Any, thread: int) -> None:
        """Let other threads flush, if this one holds the thread lock."""
        if self._leader == thread:
            self._leader = 0
        with suppress(RuntimeError):  # it doesn't
            lock.release()

    def _flush_locked(self, held: Control, sequence: int, patience: Patience) -> int:
        """Take the flush lock, and flush unless that was done. Return the synced sequence."""
        try:
            held.lock(patience.left, SYNC)
            return self._flush_unless_done(held, sequence, patience)
        finally:
            try:
                held.unlock(SYNC)
            except BaseException:  # from a signal handler, perhaps before the lock was released
                held.unlock(SYNC)
                raise

    def _flush_unless_done(self, held: Control, sequence: int, patience: Patience) -> int:
        """Under the flush lock: flush the long way, unless the page shows that this was done. Return the synced sequence."""
        page = held.seen()
        if page.sync_error or page.synced_sequence < sequence:
            return self._flush(held, patience)
        return page.synced_sequence

    def close(self) -> None:
        """Close all files, and in a forked child forget the state of the parent's threads."""
        self._target = None
        self._flush_turn, self._leader, self._starting = threading.RLock(), 0, threading.RLock()

    def flush_for_commit(self, sequence: int) -> None:
        """Flush the records below a sequence if they may not be on disk, for a reader that is about to commit it.

        Takes no lock, since the original may be writing. Raises Poisoned.
        """
        path = self._journal.format.lock_file(self._journal.path)
        if control.look(path).synced_sequence >= sequence:
            return
        segment = self._journal.segment_of(sequence - 1)
        if segment is None:
            return
        try:
            control.flush_noted(lambda: system.port.flush_data(segment.fd), partial(control.note_error, path))
        except OSError as error:
            self._poison(segment, error, self._journal.timeout)
        finally:
            segment.close()
        error_before = control.look(path).sync_error  # the kernel may have reported it to another flush, before we opened the segment
        if error_before:
            raise Poisoned(f"{self._journal.path}: an earlier flush to disk failed (errno {error_before}); copy it to a working disk")

    def _flush(self, held: Control, patience: Patience) -> int:
        """Flush the last segment the long way, again whenever records were removed meanwhile. Return the synced sequence.

        Raises LockTimeout if records were removed during each flush.
        """
        while (covered := self._flush_once(held, patience)) is None:
            if not patience.left:
                raise LockTimeout(f"{self._journal.path}: others removed records during each flush, for {patience.timeout:g} s")
        return covered

    def _flush_once(self, held: Control, patience: Patience) -> int | None:
        """Flush the last segment without the append lock: others append meanwhile. Return the synced sequence; None if it is unknown, since
        others may have removed records, and appended new ones.
        """
        journal = self._journal

        def rewinds() -> tuple[int, int]:
            return journal.generation(), 0 if held.tail is None else held.tail.rewinds()

        page, segment, before = journal.under_lock(patience.left, lambda appender, page: (page, appender.reopened(page), rewinds()))
        try:
            self._flush_data(held, segment, patience)
            ends_blank = not any(segment.read(max(0, page.end - BLANK), BLANK))
        finally:
            segment.close()

        def say_so(appender: Appender, now: Page) -> int | None:
            covered = min(page.next_sequence, now.next_sequence)
            if now.synced_sequence >= covered:
                return now.synced_sequence
            if before != rewinds():
                return None
            appender.control.write(now._replace(synced_sequence=covered))
            return covered

        covered = journal.under_lock(patience.timeout, say_so)
        if journal.format.reads_zeros and ends_blank:
            system.port.flush_data(held.fd)  # so that a recovery knows that these zeros are records
        return covered

    def _flush_data(self, held: Control, segment: Segment, patience: Patience) -> None:
        """Flush a segment. Raises Poisoned, after storing the error."""
        try:
            control.flush_noted(lambda: system.port.flush_data(segment.fd), held.note_error)
        except OSError as error:
            self._poison(segment, error, patience.timeout)

    def _poison(self, segment: Segment, error: OSError, timeout: float) -> NoReturn:
        """Write an error into the page, if the lock is available: so the next boot of the machine knows it, and all processes if it
        couldn't be stored. Raises Poisoned.
        """
        journal = self._journal

        def write() -> None:
            held = journal.control(timeout)
            page = held.read()
            held.write(page._replace(magic=control.MAGIC, sync_error=page.sync_error or error.errno or errno.EIO))

        with suppress(KvspoolError, OSError):
            journal.locked(timeout, write)
        raise Poisoned(f"{segment.path}: the flush to disk failed ({error}); the journal takes no more records") from error


def _error(held: Control) -> int:
    """Return the errno of the first failed flush."""
    return held.seen().sync_error
