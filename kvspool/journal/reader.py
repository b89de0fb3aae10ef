"""A durable reader of a journal: a place with a name, exclusive while it is open, that is resumed where it was committed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from kvspool.errors import Closed, GapError
from kvspool.handles import Handle
from kvspool.iteration import Iterations
from kvspool.journal.cursor import Place, Reading
from kvspool.journal.offsets import Lease
from kvspool.options import OnGap, Start
from kvspool.record import Gap

if TYPE_CHECKING:
    from kvspool.journal.journal import Journal


class Consumer(msgspec.Struct, frozen=True):
    """One durable reader of a journal. sequence: of the record it reads next; lag: records from there to the end; problem: why it can't
    be read."""

    name: str
    sequence: int | None
    lag: int
    problem: str = ""


class JournalReader(Handle):
    """Get it from `log.reader(name)`. Used by one thread at a time.

    Reading moves it, `commit` makes that durable: a reader that dies is resumed at its last commit, so records after that come again.
    """

    def __init__(self, journal: Journal, name: str, start: Start, lease: Lease) -> None:
        self.name = name
        self._journal = journal
        self._lease: Lease | None = lease
        self._iterations = Iterations()
        self._offsets = journal.offsets
        stored = self._offsets.load(name)
        place = journal.place(start if stored is None else journal.clamped(stored))
        is_ahead = stored is not None and stored > place.sequence == journal.readable_end()  # of what was cut, or came from a backup
        self._sequence = place.sequence if stored is None or is_ahead else stored
        self._committed = stored
        if stored is None or is_ahead:
            self.commit()  # before others get the numbers that we had passed

    @property
    def sequence(self) -> int:
        """Return the sequence of the record that comes next."""
        return self._sequence

    @property
    def committed(self) -> int:
        """Return where the reader would be resumed."""
        return self._sequence if self._committed is None else self._committed

    def read(self, *, limit: int | None = None, on_gap: OnGap = "raise") -> Iterator[Any]:
        """Iterate over the records that are there now, from where the reader stands."""
        self._check_open()
        reading = self._journal.reading(self._place(), limit, on_gap, self._journal.readable_end())
        return _Moving(self, self._iterations.add(reading))

    def follow(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> Iterator[Any]:
        """Iterate over records as they come; ends after `timeout` seconds without one (None: never).

        Raises Closed as soon as any thread closes the reader, or the journal.
        """
        self._check_open()
        return _Moving(self, self._iterations.add(self._journal.following(self._place(), limit, on_gap, timeout)))

    def commit(self) -> int:
        """Let the reader be resumed behind the last record that was handed out; on disk when it returns. Returns that sequence."""
        self._check_open()
        if self._committed != self._sequence:
            self._journal.settle(self._sequence)  # or a crash of the machine would leave us ahead of what is there
            self._offsets.store(self.name, self._sequence)
            self._committed = self._sequence
            self._journal.committed()
        return self._sequence

    def seek(self, sequence: int) -> None:
        """Go to a sequence; not durable before `commit`. Raises OutOfRange for one that has not been written yet."""
        self._check_open()
        self._sequence = self._journal.place(sequence).sequence

    def seek_time(self, time: datetime) -> None:
        """Go to the first record that is not before a time. Raises OutOfRange where the format has no times."""
        self._check_open()
        self._sequence = self._journal.place(time).sequence

    def rewind(self) -> None:
        """Go back to the oldest record; not durable before `commit`."""
        self._check_open()
        self._sequence = self._journal.place("earliest").sequence

    def _place(self) -> Place:
        return self._journal.place(self._journal.clamped(self._sequence))

    def moved(self, item: Any) -> None:
        """Stand behind an item that was handed out."""
        self._sequence = item.last + 1 if isinstance(item, Gap) else item.sequence + 1

    def _check_open(self) -> None:
        if self._lease is None or self._lease.is_closed:  # closed, or its parent's in a forked child
            raise Closed(self._closed_words())

    def _closed_words(self) -> str:
        return f"the reader {self.name!r} was closed; open it again"

    def close(self) -> None:
        """Give the name back, without a commit. Iterations raise Closed, those that wait in other threads at once."""
        try:
            self._iterations.end(self._closed_words())
        finally:
            lease, self._lease = self._lease, None
            if lease is not None:
                lease.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Moving(Iterator[Any], Handle):
    """An iteration that moves its reader with each item that it hands out."""

    def __init__(self, owner: JournalReader, reading: Reading) -> None:
        self._owner = owner
        self._reading = reading

    def __next__(self) -> Any:
        try:
            item = next(self._reading)
        except GapError as error:
            self._owner.moved(error.gap)
            raise
        self._owner.moved(item)
        return item

    def close(self) -> None:
        """Let go of the files; the iteration is over."""
        self._reading.close()
