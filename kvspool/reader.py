"""A durable reader: a name, and a place in a log that outlives the process.

A reader is open in one place at a time. Its place moves with each record and Gap that is handed out; `commit` stores it. A reader whose
process dies goes on after its last commit: later records come again, none is passed over.

**Durability.** In a journal, and for the readers of a hub, a commit is on disk when it returns. In a spool it survives a crash of the
process; a crash of the machine may take it back to an earlier commit, unless the log was synced since.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

import msgspec

from kvspool.engine.iteration import Iterations
from kvspool.options import Isolation, OnGap, Start, check_sequence
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.engine.following import AsyncFollowing
    from kvspool.engine.iteration import Iteration


class Lag(msgspec.Struct, frozen=True):
    """How far a reader is behind the end of the log, counting only what it can still read.

    records: by their sequences, without those that a crash of the machine has left out. bytes: of the ring or the segments, headers and
    padding included. seconds: age of the oldest record that it has yet to read; 0 where there is none, or records have no time.
    """

    records: int
    bytes: int
    seconds: float


class ReaderStats(msgspec.Struct, frozen=True):
    """A durable reader as others see it.

    sequence: of the first record that is not committed. lag: from there; both None where its place is damaged. updated: when it last
    committed, ns since the Unix epoch, 0 where that isn't known. open: it is open now, somewhere; None where that isn't known. expired:
    writers wait no more for it, until it commits again. slot: of a spool, its number, 0..63; -1 in a journal. problem: why its place can't
    be read.
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


class Reader(Handle, ABC):
    """A durable reader that is open. Get it from `Log.reader`; use it in one thread. Closing does not commit.

    `read`, `follow` and `follow_async` move its place, several of them in turn: each begins at the reader's place, also after a `seek`
    during a loop.
    """

    name: str
    isolation: Isolation
    _iterations: Iterations

    @abstractmethod
    def read(self, *, limit: int | None = None, on_gap: OnGap = "raise") -> Iteration[Any]:
        """Iterate over the records that are there now, from the reader's place on; see `Log.read`."""

    @abstractmethod
    def follow(
        self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise", spin: float = 0.0
    ) -> Iteration[Any]:
        """Iterate over the records from the reader's place on, and wait for more; see `Log.follow`.

        Raises Closed as soon as any thread closes the reader, or the log.
        """

    @abstractmethod
    def follow_async(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> AsyncFollowing[Any]:
        """Iterate with `async for` over the records from the reader's place on, and wait for more; see `Log.follow_async`."""

    @abstractmethod
    def view(self) -> AbstractContextManager[memoryview]:
        """Look at the stored bytes of the next record's value inside the `with` block; see `Log.view`.

        The reader's place is after the record when the block has ended without an exception. Raises OutOfRange if there is no next
        record, GapError if it was lost; the place is after the Gap then.
        """

    @abstractmethod
    def commit(self) -> int:
        """Store the reader's place: after all handed-out records, exactly. Return the sequence that comes next.

        The next one to open the reader begins there, whatever becomes of this process. Raises Closed; in a journal also Poisoned and the
        system's OSError, and the stored place is the one before then.
        """

    @property
    @abstractmethod
    def sequence(self) -> int:
        """Return the sequence that comes next."""

    @property
    @abstractmethod
    def committed(self) -> int:
        """Return the sequence that came next at the last commit."""

    def seek(self, sequence: int) -> None:
        """Go on at `sequence`; a lost one gives a Gap. Not committed yet. Raises OutOfRange, Closed, TypeError."""
        self._go(check_sequence(sequence))

    def seek_time(self, time: datetime) -> None:
        """Go on at the first record at or after an aware datetime. Not committed yet. Raises Unsupported where records have no time."""
        if not isinstance(time, datetime):
            raise TypeError(f"a time is an aware datetime, not {type(time).__name__}")
        self._go(time)

    def rewind(self) -> None:
        """Go on at the oldest record that is kept. Not committed yet."""
        self._go("earliest")

    @abstractmethod
    def _go(self, start: Start) -> None:
        """Go on at a start."""

    @abstractmethod
    def lag(self) -> Lag:
        """Return how far the reader's place is behind the end of the log."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Return whether the reader was closed."""

    @abstractmethod
    def close(self) -> None:
        """Release the reader, for others to open. Nothing is committed. Its iterations raise Closed, waiting ones at once."""

    def end(self, why: str) -> None:
        """End all iterations: the reader, or its log, was closed."""
        self._iterations.end(why)

    def _closed_words(self) -> str:
        return f"the reader {self.name!r} was closed; open it again"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Reader {self.name!r} at {self.sequence}{' closed' if self.closed else ''}>"
