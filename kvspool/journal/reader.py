"""A durable reader of a journal: a named position, locked while it is open, and resumed at its last commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.errors import Closed
from kvspool.options import Isolation, Start
from kvspool.reader import Lag, Reader
from kvspool.system import forks

if TYPE_CHECKING:
    from kvspool.journal.cursor import SegmentCursor
    from kvspool.journal.handle import JournalHandle
    from kvspool.journal.offsets import Lease


class JournalReader(Reader):
    """A durable reader of a journal: its name is locked while it is open, and `commit` stores its position on disk."""

    def __init__(self, journal: JournalHandle, name: str, start: Start, isolation: Isolation, lease: Lease) -> None:
        super().__init__(name, isolation)
        self._journal = journal
        self._lease = lease
        stored = journal.offsets.load(name)
        place = journal.place_seen(start, isolation) if stored is None else journal.place(journal.clamped(stored))
        is_ahead = stored is not None and stored > place.sequence == journal.readable_end()  # cut, or restored from a backup
        self._sequence = place.sequence if stored is None or is_ahead else stored
        self._committed = stored
        if stored is None or is_ahead:
            self.commit()  # before others reuse the numbers that we had passed
        forks.register(self)

    @property
    def committed(self) -> int:
        return self._sequence if self._committed is None else self._committed

    def _cursor(self, end: int | None) -> SegmentCursor:
        self._check_open()
        place = self._journal.place(self._journal.clamped(self._sequence))
        return self._journal.cursor_from(place, end, self.isolation)

    def _end(self) -> int:
        return self._journal.end_of_read(self.isolation)

    def _find(self, start: Start) -> int:
        return self._journal.place(start).sequence

    def _store(self) -> None:
        if self._committed != self._sequence:
            self._journal.flush_for_commit(self._sequence)  # or a crash of the machine would leave us ahead of the journal
            self._journal.offsets.store(self.name, self._sequence, self.fence)
            self._committed = self._sequence
            self._journal.committed()

    def _lag(self) -> Lag:
        return self._journal.lag(self._sequence)

    def _check_open(self) -> None:
        if self.closed:
            raise Closed(self._closed_words())
        self._journal.check_open()
        self._catch_up()

    def _release(self) -> None:
        self._lease.close()

    def forked(self) -> None:
        """In a forked child: the name is the parent's, and so are the iterations."""
        self._is_closed = True
        self.end(self._closed_words())
