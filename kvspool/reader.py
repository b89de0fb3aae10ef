"""A durable reader: a name and a position in a log that outlive the process.

A reader is open only once at a time. Its position moves with each record and Gap that it returns; `commit` stores it. After a crash of its
process, a reader continues after its last commit: later records are read again, none is skipped.

**Durability.** In a journal, and for the readers of a hub, a commit is on disk when it returns. In a spool it survives a crash of the
process; a crash of the machine may restore an earlier commit, unless the log was synced since.
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


class Reader(Handle, ABC):
    """An open durable reader. Get it from `Log.reader`; use it in one thread. Closing does not commit.

    `read`, `follow` and `follow_async` move its position. If several are used in turn, each starts at the current position, also after a
    `seek` within a loop.
    """

    name: str
    isolation: Isolation
    _iterations: Iterations

    @abstractmethod
    def read(self, *, limit: int | None = None, on_gap: OnGap = "raise") -> Iteration[Any]:
        """Iterate over the present records from the reader's position on; see `Log.read`."""

    @abstractmethod
    def follow(
        self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise", spin: float = 0.0
    ) -> Iteration[Any]:
        """Iterate over the records from the reader's position on, and wait for more; see `Log.follow`.

        Raises Closed as soon as any thread closes the reader, or the log.
        """

    @abstractmethod
    def follow_async(self, *, timeout: float | None = None, limit: int | None = None, on_gap: OnGap = "raise") -> AsyncFollowing[Any]:
        """Iterate with `async for` over the records from the reader's position on, and wait for more; see `Log.follow_async`."""

    @abstractmethod
    def view(self) -> AbstractContextManager[memoryview]:
        """Return a context manager with a view of the stored bytes of the next record's value; see `Log.view`.

        The position moves past the record if the block ends without an exception. Raises OutOfRange if there is no next record. Raises
        GapError if it was lost; the position is then after the Gap.
        """

    @abstractmethod
    def commit(self) -> int:
        """Store the position after the last returned record, and return the next sequence.

        The reader resumes there when it is next opened, even after a crash of this process. Raises Closed; in a journal also Poisoned and
        the system's OSError. After an error the previous position stays stored.
        """

    @property
    @abstractmethod
    def sequence(self) -> int:
        """Return the sequence of the next record."""

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

    @abstractmethod
    def _go(self, start: Start) -> None:
        """Continue at a start."""

    @abstractmethod
    def lag(self) -> Lag:
        """Return the lag of the reader's position."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Return whether the reader was closed."""

    @abstractmethod
    def close(self) -> None:
        """Release the reader, so that it can be opened again. Does not commit. Its iterations raise Closed, waiting ones at once."""

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
