"""A durable reader: a name and a position in a log that outlive the process.

A reader is open only once at a time. Its position moves with each record and Gap that it returns; `commit` stores it. After a crash of its
process, a reader continues after its last commit: later records are read again, none is skipped.

**Durability.** In a journal, and for the readers of a hub, a commit is on disk when it returns. In a spool it survives a crash of the
process; a crash of the machine may restore an earlier commit, unless the log was synced since.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

import msgspec

from kvspool.engine.cursor import Cursor
from kvspool.engine.iteration import Following, Iteration, Iterations
from kvspool.errors import GapError, OutOfRange, Truncated
from kvspool.gap import Gap
from kvspool.options import Isolation, OnGap, Start, check_isolation, check_sequence
from kvspool.system.handles import ClosingHandle

if TYPE_CHECKING:
    from kvspool.engine.following import AsyncFollowing


class Lag(msgspec.Struct, frozen=True):
    """The distance of a reader from the end of the log, counting only records that it can still read.

    records: by their sequences, without numbers left out after a crash of the machine. bytes: of the ring or the segments, including
    headers and padding. seconds: age of the oldest pending record; 0 if none is pending, or records have no time.
    """

    records: int
    bytes: int
    seconds: float


class ReaderStats(msgspec.Struct, frozen=True):
    """The state of a durable reader, as seen from outside.

    sequence: of the first uncommitted record. lag: from there; both are None if the position is damaged. updated: time of the last commit
    in ns since the Unix epoch, 0 if unknown. open: whether any process has it open; None if unknown. expired: writers no longer wait for
    it, until its next commit. slot: in a spool, its number, 0..63; -1 in a journal. problem: why its position can't be read.
    """

    name: str
    sequence: int | None
    lag: Lag | None
    updated: int
    open: bool | None
    expired: bool
    damaged: bool
    slot: int
    problem: str = ""


class OpenReader(ClosingHandle, ABC):
    """A durable reader that this process has open: of a log, or of a hub root."""

    HELPERS = frozenset(("end",))

    def __init__(self, name: str, isolation: Isolation) -> None:
        self.name = name
        self.isolation = check_isolation(isolation)
        self._is_closed = False
        self._iterations = Iterations()

    @property
    def closed(self) -> bool:
        """Return whether the reader was closed."""
        return self._is_closed

    def close(self) -> None:
        """Release the reader, so that it can be opened again. Does not commit. Its iterations raise Closed, waiting ones at once."""
        self._is_closed = True
        try:
            self.end(self._closed_words())
        finally:
            self._release()

    def end(self, why: str) -> None:
        """End all iterations: the reader, or its log, was closed."""
        self._iterations.end(why)

    def _closed_words(self) -> str:
        return f"the reader {self.name!r} was closed; open it again"

    @abstractmethod
    def _release(self) -> None:
        """Let others open the reader."""


class Reader(OpenReader):
    """An open durable reader. Get it from `Log.reader`; use it in one thread. Closing does not commit.

    `read`, `follow` and `follow_async` move its position. If several are used in turn, each starts at the current position, also after a
    `seek` within a loop.
    """

    HELPERS = frozenset(("cursor_here", "fence", "forked", "pass_to"))

    def __init__(self, name: str, isolation: Isolation) -> None:
        super().__init__(name, isolation)
        self.fence: Callable[[], None] | None = None  # of a member of a group: raises Revoked if others may own the log now
        self._sequence = 0  # of the next record
        # The iteration that moved the reader to its position, and may have prefetched records.
        self._turn: weakref.ref[ReaderIteration] | None = None

    # Reading.

    def read(self, *, limit: int | None = None, on_gap: OnGap = "raise") -> Iteration:
        """Iterate over the present records from the reader's position on; see `Log.read`."""
        self._check_open()
        return self._iterations.add(_Present(self, limit, on_gap, self._end()))

    def follow(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise", spin: float = 0.0) -> Iteration:
        """Iterate over the records from the reader's position on, and wait for more; see `Log.follow`.

        Raises Closed as soon as any thread closes the reader, or the log.
        """
        return self._iterations.add(_Waiting(self, limit, on_gap, timeout, spin))

    def follow_async(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> AsyncFollowing:
        """Iterate with `async for` over the records from the reader's position on, and wait for more; see `Log.follow_async`."""
        from kvspool.engine.following import AsyncFollowing

        return AsyncFollowing(self._iterations.add(_Present(self, None, on_gap, None)), limit, timeout)

    @contextmanager
    def view(self) -> Iterator[memoryview]:
        """Return a context manager with a view of the stored bytes of the next record's value; see `Log.view`.

        The position moves past the record if the block ends without an exception. Raises OutOfRange if there is no next record. Raises
        GapError if it was lost; the position is then after the Gap.
        """
        self._check_open()
        before, end = self._sequence, self._end()
        self._turn = None
        with closing(self._cursor(end)) as cursor:
            try:
                with self._view(cursor) as value:
                    yield value
            except GapError as error:
                if error.gap.first == before:
                    self._pass_by(cursor, end)
                raise
            except Truncated:
                self._catch_up()
                raise
            self._pass_by(cursor, end)

    def commit(self) -> int:
        """Store the position after the last returned record, and return the next sequence.

        The reader resumes there when it is next opened, even after a crash of this process. Raises Closed and, before anything is stored,
        LogVanished and Poisoned of a journal. After LockTimeout, NameNotDurable, or the system's OSError the old or the new position is
        stored: commit again.
        """
        self._check_open()
        self._store()
        return self._sequence

    # Moving.

    @property
    def sequence(self) -> int:
        """Return the sequence of the next record."""
        return self._sequence

    @property
    @abstractmethod
    def committed(self) -> int:
        """Return the next sequence as of the last commit."""

    def seek(self, sequence: int) -> None:
        """Continue at `sequence`; a lost one gives a Gap. Does not commit. Raises OutOfRange, Closed, TypeError."""
        self._go(check_sequence(sequence))

    def seek_time(self, time: datetime) -> None:
        """Continue at the first record at or after an aware datetime. Does not commit. Raises Unsupported if records have no time."""
        if not isinstance(time, datetime):
            raise TypeError(f"a time is an aware datetime, not {type(time).__name__}")
        self._go(time)

    def rewind(self) -> None:
        """Continue at the oldest record. Does not commit."""
        self._go("earliest")

    def _go(self, start: Start) -> None:
        self._check_open()
        self._sequence = self._find(start)
        self._turn = None

    def lag(self) -> Lag:
        """Return the lag of the reader's position."""
        self._check_open()
        return self._lag()

    def __repr__(self) -> str:
        return f"<Reader {self.name!r} at {self.sequence}{' closed' if self.closed else ''}>"

    # For the stores: where the position is stored, and how to read from there.

    @abstractmethod
    def _check_open(self) -> None:
        """Raise Closed if the reader or its log was closed; then do `_catch_up`."""

    @abstractmethod
    def _cursor(self, end: int | None) -> Cursor:
        """Return a cursor at the reader's position, up to the sequence `end`; None: no end."""

    @abstractmethod
    def _end(self) -> int:
        """Return the sequence at which a read of the present records ends."""

    @abstractmethod
    def _find(self, start: Start) -> int:
        """Return the sequence of a start."""

    @abstractmethod
    def _store(self) -> None:
        """Store the position."""

    @abstractmethod
    def _lag(self) -> Lag:
        """Return the lag of the position."""

    def _view(self, cursor: Cursor) -> AbstractContextManager[memoryview]:
        """Return a context manager with a view of the cursor's next value, which moves the cursor past it."""
        return _copied(cursor)

    def _note(self, cursor: Cursor) -> None:
        """Note that the cursor is at the reader's position. Stores that look positions up need not do that."""

    def _catch_up(self) -> None:
        """Raise Truncated if records that were read were removed by a rewind, and continue at its end. Most formats have no rewinds."""

    # For a group that reads several logs at once.

    def cursor_here(self, *, bounded: bool) -> Cursor:
        """Return a cursor at the reader's position. bounded: it ends at the present end."""
        self._check_open()
        return self._cursor(self._end() if bounded else None)

    def pass_to(self, sequence: int) -> None:
        """Move to a sequence after records that such a cursor has returned."""
        self._sequence = sequence
        self._turn = None

    # For the iterations.

    def _pass_by(self, cursor: Cursor, end: int | None) -> None:
        """Move to a cursor that has returned everything before it. It may be beyond the end of its read, after a Gap."""
        reached = cursor.sequence if end is None else min(cursor.sequence, end)
        if reached >= self._sequence:
            self._note(cursor)
            self._sequence = reached


class ReaderIteration(Iteration):
    """An iteration that moves its reader with each item.

    Several iterations of a reader alternate: each begins at the reader's position, and records prefetched by another one are dropped.
    `seek` has the same effect, even within a loop.
    """

    _owner: Reader
    _end: int | None  # of the read
    _token: weakref.ref[ReaderIteration]  # the reader must not keep an iteration alive that its user has dropped

    def _belong_to(self, owner: Reader, end: int | None) -> None:
        self._owner, self._end = owner, end
        self._token = owner._turn = weakref.ref(self)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        owner = self._owner
        if owner._turn is not self._token and not self.is_over:
            self._use(owner._cursor(self._end))
            owner._turn = self._token
        before, missed = owner._sequence, self.cursor.missed
        try:
            item = self._batch.take(self._refill)
            owner._sequence = item.last + 1 if item.__class__ is Gap else item.sequence + 1
            return item
        except (GapError, StopIteration):
            # After a Gap that was raised or skipped. But a seek since the last item counts; and once closed, it may have dropped records.
            if owner._turn is self._token:
                try:
                    owner._turn = None  # until the position has moved: if this is interrupted, the Gap counts as not reported
                    if not self._is_closed and not self.has_items:
                        owner._pass_by(self.cursor, self._end)
                    owner._turn = self._token
                except BaseException:
                    self._uncount(before, missed)
                    raise
            raise
        except Truncated:
            owner._turn = None
            owner._catch_up()
            raise
        except BaseException:
            owner._turn = None  # interrupted: prefetched records count as not returned
            self._uncount(before, missed)
            raise

    def _uncount(self, before: int, missed: int) -> None:
        """Interrupted: unless the reader has moved on from `before`, Gaps since then count as not reported."""
        if self._owner._sequence == before:
            self.cursor.missed = missed

    def _refill(self) -> Any:
        if self._owner._turn is self._token:
            self._owner._note(self.cursor)
        return super()._refill()


class _Present(ReaderIteration):
    """The present records, up to `end`; None: those present at each call."""

    def __init__(self, owner: Reader, limit: int | None, on_gap: OnGap, end: int | None) -> None:
        super().__init__(owner._cursor(end), limit, on_gap)
        self._belong_to(owner, end)


class _Waiting(ReaderIteration, Following):
    """The present records, and new ones."""

    def __init__(self, owner: Reader, limit: int | None, on_gap: OnGap, timeout: float | None, spin: float) -> None:
        Following.__init__(self, owner._cursor(None), limit, on_gap, timeout, spin)
        self._belong_to(owner, None)


@contextmanager
def _copied(cursor: Cursor) -> Iterator[memoryview]:
    """View a copy of the cursor's next value."""
    values: list[bytes] = []
    gap = cursor.fetch(1, None, values)
    if gap is not None:
        raise GapError(gap)
    if not values:
        raise OutOfRange(f"record {cursor.sequence} is not written yet")
    with memoryview(values[0]) as value:
        yield value
