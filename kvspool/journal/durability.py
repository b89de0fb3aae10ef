"""Putting a journal on disk: one flush for all who wait for one.

Segments before the last one are on disk since the last one began. So a flush is one of the last segment; the page then says up to which
sequence all is there, and whoever waited for the flush lock looks at that before it flushes again.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.errors import KvspoolError, Poisoned
from kvspool.journal import control
from kvspool.journal.control import SYNC

if TYPE_CHECKING:
    from kvspool.journal.appender import Appender
    from kvspool.journal.control import Page
    from kvspool.journal.journal import Journal

BLANK = 4  # bytes at the end of a segment that make one look whether it ends in zeros
SYNC_INTERVAL = 1.0  # seconds between two flushes at the level "os"


class Flusher:
    """Puts a journal on disk for one handle; its threads may all use it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def sync(self, timeout: float) -> int:
        """Put everything that was appended so far on disk; returns the sequence below which all is there. Raises Poisoned, LockTimeout."""
        return self.flush(timeout)

    def flush(self, timeout: float) -> int:
        """As `sync`."""
        sequence = self._journal.under_lock(timeout, lambda _, page: page.next_sequence)  # without the lock the page may be half written
        return self.flush_below(sequence, timeout)

    def flush_below(self, sequence: int, timeout: float) -> int:
        """Return when every record below `sequence` is on disk, whoever put it there."""
        held = self._journal.control(timeout)
        try:
            held.lock(timeout, SYNC)
            page = held.read()
            if page.sync_error == 0 and page.synced_sequence >= sequence:
                return page.synced_sequence
            return self._flush(timeout)
        finally:
            try:
                held.unlock(SYNC)
            except BaseException:  # out of a signal handler, perhaps before the lock was released
                held.unlock(SYNC)
                raise

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
            with suppress(KvspoolError, OSError):
                self._poison(error, self._journal.timeout)
            raise Poisoned(f"{segment.path}: the flush to disk failed ({error}); the journal takes no more records") from error
        finally:
            segment.close()

    def _flush(self, timeout: float) -> int:
        """Flush the last segment, without the append lock: others append meanwhile."""
        journal = self._journal
        page, segment, generation = journal.under_lock(
            timeout, lambda appender, page: (page, appender.reopened(page), journal.generation())
        )
        try:
            system.port.flush_data(segment.fd)
            ends_blank = not any(segment.read(max(0, page.end - BLANK), BLANK))
        except OSError as error:
            self._poison(error, timeout)
            raise Poisoned(f"{segment.path}: the flush to disk failed ({error}); the journal takes no more records") from error
        finally:
            segment.close()

        def say_so(appender: Appender, now: Page) -> None:
            if now.synced_sequence < page.next_sequence and generation == journal.generation():
                appender.control.write(now._replace(synced_sequence=page.next_sequence))

        journal.under_lock(timeout, say_so)
        if journal.format.reads_zeros and ends_blank:
            system.port.flush_data(journal.control(timeout).fd)  # so that a recovery knows that these zeros are records
        return page.next_sequence

    def _poison(self, error: OSError, timeout: float) -> None:
        """Let the journal take no more records, since a flush to disk failed."""
        self._journal.under_lock(
            timeout, lambda appender, page: appender.control.write(page._replace(sync_error=error.errno or errno.EIO))
        )
