"""Putting a journal on disk: one flush for all who wait for one.

Segments before the last one are on disk since the last one began. So a flush is one of the last segment.

**Group commit.** Where writers share a tail (`kvspool._tail_py`), it says how far all is on disk, and has the words of their `FlushGroup`.
A flush then takes a look at the tail, one `fdatasync` of a descriptor that this handle keeps, and a moment of the append lock.

**The long way** is taken without a tail, and where it doesn't say where the journal ends: it finds the end from the page of the lock file,
and says there how far all is on disk. Whoever waited for the flush lock looks at that before it flushes again.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from kvspool import _tail_py as tails
from kvspool import flushing, locks, system
from kvspool.errors import KvspoolError, Poisoned
from kvspool.handles import Handle
from kvspool.journal import control
from kvspool.journal.control import SYNC
from kvspool.journal.segment import Segment

if TYPE_CHECKING:
    from kvspool.journal.appender import Appender
    from kvspool.journal.control import Control, Page
    from kvspool.journal.journal import Journal

BLANK = 4  # bytes at the end of a segment that make one look whether it ends in zeros
SYNC_INTERVAL = 1.0  # seconds between two flushes at the level "os"
TRIES = 2  # to find the tail's last segment open; others may begin a new one


class Target(Handle):
    """The last segment, as one handle keeps it open to flush it. It closes with the object: a thread may be flushing it."""

    def __init__(self, segment: Segment) -> None:
        status = system.port.status(segment.fd)
        self.segment = segment
        self.place = (segment.base, os.fsencode(segment.path), status.st_dev, status.st_ino)


class Flusher(Handle):
    """Puts a journal on disk for one handle; its threads may all use it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._target: Target | None = None

    def sync(self, timeout: float) -> int:
        """Put everything that was appended so far on disk; returns the sequence below which all is there. Raises Poisoned, LockTimeout."""
        return self.flush(timeout)

    def flush(self, timeout: float) -> int:
        """As `sync`."""
        tail = self._journal.control(timeout).tail
        end = None if tail is None else tail.found()
        if end is None:  # without the lock the page may be half written
            sequence = self._journal.under_lock(timeout, lambda _, page: page.next_sequence)
        else:
            sequence = end[2]
        self.flush_below(sequence, timeout)
        return sequence

    def flush_below(self, sequence: int, timeout: float) -> None:
        """Return when every record below `sequence` is on disk, whoever put it there."""
        held = self._journal.control(timeout)
        if held.group is None:
            self._flush_locked(held, sequence, timeout)
        else:
            flush = partial(self._flush_tail, held, sequence, timeout)
            flushing.flush_for_all(held.group, sequence, timeout, flush, self._journal.path, partial(_error, held))

    def _flush_tail(self, held: Control, sequence: int, timeout: float) -> None:
        """Under the flush lock: flush what the tail says is there; the long way, if it doesn't say so."""
        tail, target = held.tail, self._begin(held, timeout)
        if tail is None or target is None:
            self._flush_unless_done(held, sequence, timeout)
            return
        try:
            system.port.flush_data(target.segment.fd)
        except OSError as error:
            tail.fail(error.errno or errno.EIO)  # at once: the failure is not reported again
            self._poison(target.segment, error, timeout)
        with self._journal.turn:  # interpreted, another thread would take it for an append that a signal handler came into
            found = locks.wait_for(lambda: _unless_busy(tail.end_flush()), timeout, held.who, partial(locks.rest, tail.lock))
        if found == tails.SLOW:
            self._flush(timeout)

    def _begin(self, held: Control, timeout: float) -> Target | None:
        """Return the last segment, when the tail has noted what a flush of it puts on disk; None if that has to go the long way."""
        tail = held.tail
        for attempt in range(TRIES):
            target = self._target
            if tail is None or (target is not None and tail.begin_flush(*target.place) != tails.SLOW):
                return None if tail is None or self._is_blank(target, tail.flush_end) else target
            if tail.found() is None and not attempt:  # others are in the midst of the long way
                self._journal.under_lock(timeout, lambda appender, page: None)
            self._target = self._opened(tail.found())
        return None

    def _opened(self, end: tuple[int, ...] | None) -> Target | None:
        """Return the segment that a tail speaks of."""
        if end is None:
            return None
        with suppress(FileNotFoundError):
            return Target(Segment(self._journal.segments_apart().plain_path(end[0]), end[0], is_writable=True))
        return None

    def _is_blank(self, target: Target | None, end: int) -> bool:
        """Return whether the segment ends there in what may be taken for zeros that a crash has left."""
        if target is None or not self._journal.format.reads_zeros:
            return False
        return not any(target.segment.read(max(0, end - BLANK), BLANK))

    def _flush_locked(self, held: Control, sequence: int, timeout: float) -> None:
        try:
            held.lock(timeout, SYNC)
            self._flush_unless_done(held, sequence, timeout)
        finally:
            try:
                held.unlock(SYNC)
            except BaseException:  # out of a signal handler, perhaps before the lock was released
                held.unlock(SYNC)
                raise

    def _flush_unless_done(self, held: Control, sequence: int, timeout: float) -> None:
        """Under the flush lock: flush the long way, unless the page says that this was done."""
        page = held.seen()
        if page.sync_error or page.synced_sequence < sequence:
            self._flush(timeout)

    def close(self) -> None:
        """Keep no file open."""
        self._target = None

    def settle(self, sequence: int) -> None:
        """Put the records below a sequence on disk, if they may not be there; for who is about to keep on disk that he has read them.

        Takes no lock, since the original may be writing. Raises Poisoned.
        """
        if control.look(self._journal.format.lock_file(self._journal.path)).synced_sequence >= sequence:
            return
        segment = self._journal.segment_of(sequence - 1)
        if segment is None:
            return
        try:
            system.port.flush_data(segment.fd)
        except OSError as error:
            self._poison(segment, error, self._journal.timeout)
        finally:
            segment.close()

    def _flush(self, timeout: float) -> None:
        """Flush the last segment the long way, without the append lock: others append meanwhile."""
        journal = self._journal
        page, segment, generation = journal.under_lock(
            timeout, lambda appender, page: (page, appender.reopened(page), journal.generation())
        )
        try:
            system.port.flush_data(segment.fd)
            ends_blank = not any(segment.read(max(0, page.end - BLANK), BLANK))
        except OSError as error:
            self._poison(segment, error, timeout)
        finally:
            segment.close()

        def say_so(appender: Appender, now: Page) -> None:
            if now.synced_sequence < page.next_sequence and generation == journal.generation():
                appender.control.write(now._replace(synced_sequence=page.next_sequence))

        journal.under_lock(timeout, say_so)
        if journal.format.reads_zeros and ends_blank:
            system.port.flush_data(journal.control(timeout).fd)  # so that a recovery knows that these zeros are records

    def _poison(self, segment: Segment, error: OSError, timeout: float) -> NoReturn:
        """Let the journal take no more records, since a flush to disk failed. Raises Poisoned."""
        with suppress(KvspoolError, OSError):
            self._journal.under_lock(
                timeout, lambda appender, page: appender.control.write(page._replace(sync_error=error.errno or errno.EIO))
            )
        raise Poisoned(f"{segment.path}: the flush to disk failed ({error}); the journal takes no more records") from error


def _error(held: Control) -> int:
    """Return the errno of the first failed flush."""
    return held.seen().sync_error


def _unless_busy(found: int) -> int | None:
    return None if found == tails.BUSY else found
