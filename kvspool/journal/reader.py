"""A durable reader of a journal: a named position, locked while it is open, and resumed at its last commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from kvspool.engine.iteration import Iterations, check_timeout
from kvspool.errors import Closed, GapError, OutOfRange, Truncated
from kvspool.journal.cursor import Cursor, Following, Reading, SegmentPlace
from kvspool.journal.offsets import Lease
from kvspool.options import Isolation, OnGap, Start, check_isolation
from kvspool.reader import Lag, Reader
from kvspool.record import Gap
from kvspool.system import forks

if TYPE_CHECKING:
    from kvspool.journal.following import AsyncFollowing
    from kvspool.journal.offsets import Offsets


class Consumer(msgspec.Struct, frozen=True):
    """A durable reader of a journal.

    sequence: of its next record; lag: records from there to the end; problem: why its position can't be read.
    """

    name: str
    sequence: int | None
    lag: int
    problem: str = ""


class ReadableJournal(Protocol):
    """The part of `kvspool.journal.Journal` for its readers."""

    offsets: Offsets

    def check_open(self) -> None: ...

    def clamped(self, sequence: int) -> int: ...

    def committed(self) -> None: ...

    def cursor_from(self, place: SegmentPlace, end: int | None, isolation: Isolation = "appended") -> Cursor: ...

    def end_of_read(self, isolation: Isolation) -> int: ...

    def lag(self, sequence: int) -> Lag: ...

    def place(self, start: Start) -> SegmentPlace: ...

    def place_seen(self, start: Start, isolation: Isolation) -> SegmentPlace: ...

    def readable_end(self) -> int: ...

    def flush_for_commit(self, sequence: int) -> None: ...


class JournalReader(Reader):
    """A durable reader of a journal: its name is locked while it is open, and `commit` stores its position on disk."""

    def __init__(self, journal: ReadableJournal, name: str, start: Start, isolation: Isolation, lease: Lease) -> None:
        self.name = name
        self.isolation = check_isolation(isolation)
        self._journal = journal
        self._lease: Lease | None = lease
        self._iterations = Iterations()
        self._offsets = journal.offsets
        stored = self._offsets.load(name)
        place = journal.place_seen(start, isolation) if stored is None else journal.place(journal.clamped(stored))
        is_ahead = stored is not None and stored > place.sequence == journal.readable_end()  # cut, or restored from a backup
        self._sequence = place.sequence if stored is None or is_ahead else stored
        self._committed = stored
        if stored is None or is_ahead:
            self.commit()  # before others reuse the numbers that we had passed
        forks.register(self)

    # Reading.

    def read(self, *, limit: int | None = None, on_gap: OnGap = "raise") -> Reading:
        return self._iterations.add(_Taking(self, limit, on_gap, self._journal.end_of_read(self.isolation)))

    def follow(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise", spin: float = 0.0) -> Following:
        return self._iterations.add(_Waiting(self, limit, on_gap, timeout, spin))

    def follow_async(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> AsyncFollowing:
        from kvspool.journal.following import AsyncFollowing

        return AsyncFollowing(self._iterations.add(_Taking(self, limit, on_gap, None)), timeout)

    @contextmanager
    def view(self) -> Iterator[memoryview]:
        with closing(_Taking(self, None, "raise", self._journal.end_of_read(self.isolation))) as taking:
            before = self._sequence
            item = next(taking, None)
            if item is None:
                raise OutOfRange(f"record {before} is not written yet")
            self._sequence = before
            with memoryview(item.value) as value:
                yield value
        self._sequence = item.sequence + 1

    def commit(self) -> int:
        self._check_open()
        if self._committed != self._sequence:
            self._journal.flush_for_commit(self._sequence)  # or a crash of the machine would leave us ahead of the journal
            self._offsets.store(self.name, self._sequence)
            self._committed = self._sequence
            self._journal.committed()
        return self._sequence

    # Moving.

    @property
    def sequence(self) -> int:
        return self._sequence

    @property
    def committed(self) -> int:
        return self._sequence if self._committed is None else self._committed

    def _go(self, start: Start) -> None:
        self._check_open()
        self._sequence = self._journal.place(start).sequence

    def lag(self) -> Lag:
        self._check_open()
        return self._journal.lag(self._sequence)

    def cursor(self, end: int | None) -> Cursor:
        """Return a cursor at the reader's position, up to the sequence `end`; None: up to the present end."""
        self._check_open()
        return self._journal.cursor_from(self._place(), end, self.isolation)

    def _place(self) -> SegmentPlace:
        return self._journal.place(self._journal.clamped(self._sequence))

    # Opening and closing.

    @property
    def closed(self) -> bool:
        return self._lease is None or self._lease.is_closed

    def follow_rewinds(self) -> None:
        """Raise Truncated if records that were read were removed by a rewind, and continue at its end. Most formats have no rewinds."""

    def forked(self) -> None:
        """In a forked child: the name is the parent's, and so are the iterations."""
        self._iterations.end(self._closed_words())

    def _check_open(self) -> None:
        if self._lease is None or self._lease.is_closed:  # closed, or its parent's in a forked child
            raise Closed(self._closed_words())
        self._journal.check_open()

    def close(self) -> None:
        try:
            self.end(self._closed_words())
        finally:
            lease, self._lease = self._lease, None
            if lease is not None:
                lease.close()


class _Moving(Reading):
    """An iteration that moves its reader with each item, and continues at the reader's position, also if another iteration has moved it."""

    _owner: JournalReader
    _next: int  # the reader's position after the last item, while nothing else moves it

    def _belong_to(self, owner: JournalReader) -> None:
        self._owner = owner
        self._next = owner._sequence

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        owner = self._owner
        is_in_step = owner._sequence == self._next
        if not is_in_step and not self.is_over:
            self._begin_afresh()
            is_in_step = True
        self._next = -1  # if interrupted from here on, it continues at the reader's position: prefetched records count as not returned
        try:
            item = self._batch.take(self._refill)
        except (GapError, StopIteration):
            if is_in_step:  # otherwise a seek since the last item counts
                if not self._is_closed and not self.has_items:
                    owner._sequence = max(owner._sequence, self._passed())  # after a Gap that was raised or skipped
                self._next = owner._sequence
            raise
        except Truncated:
            owner.follow_rewinds()
            raise
        owner._sequence = self._next = item.last + 1 if isinstance(item, Gap) else item.sequence + 1
        return item

    def _passed(self) -> int:
        """Return the sequence before which nothing is left for this iteration. The cursor may be beyond its end, after a Gap."""
        sequence, end = self.cursor.sequence, self.cursor.end
        return sequence if end is None else min(sequence, end)

    def _begin_afresh(self) -> None:
        """Continue at the reader's present position."""
        before = self.cursor
        self._batch.rise()
        self._batch.clear()
        self.cursor = self._owner.cursor(before.end)
        self.cursor.missed = before.missed
        before.close()


class _Taking(_Moving):
    """The present records, up to `end`; None: those present at each call."""

    def __init__(self, owner: JournalReader, limit: int | None, on_gap: OnGap, end: int | None) -> None:
        super().__init__(owner.cursor(end), limit, on_gap)
        self._belong_to(owner)


class _Waiting(_Moving, Following):
    """The present records, and new ones."""

    def __init__(self, owner: JournalReader, limit: int | None, on_gap: OnGap, timeout: float | None, spin: float) -> None:
        Following.__init__(self, owner.cursor(None), limit, on_gap, check_timeout(timeout), spin=spin)
        self._belong_to(owner)
