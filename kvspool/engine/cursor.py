"""A cursor: a position in a log that moves forward, over records and lost records; both stores have one."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from kvspool.gap import Gap
from kvspool.kernel.frames import Batch
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.engine.eventloops import LoopWatcher
    from kvspool.engine.wakeups import Watcher

Make = Callable[..., Any]  # creates an item of sequence, timestamp, type, key, value and, if it isn't RAW, codec


class Waiter(Protocol):
    """Lets one thread sleep until a cursor has more records."""

    def fetch(self, seconds: float, most: int, make: Make | None, items: list[Any]) -> Gap | None:
        """Fetch as the cursor does; without a record, first wait up to `seconds` for one. It may return early, without any.

        Raises LogVanished if the log was deleted.
        """

    def park(self, batch: Batch, seconds: float) -> None:
        """After records: let the batch wait for the next ones, if only records are expected, without a Python step in between."""

    def unpark(self) -> None:
        """Before any other use of the cursor: the batch no longer waits."""

    def wake(self) -> None:
        """End the wait at once, or the next one: the iteration is closed. Any thread may call this."""

    def close(self) -> None:
        """Release the waiter's files."""


class Cursor(Handle, ABC):
    """Moves over a log, and turns the records that it can't return into Gaps. It takes no lock.

    missed: how many sequences were in Gaps so far. largest: bytes; the cursor of a journal doesn't read a larger record. It returns none
    then, and sets `needs` to the record's bytes, which are those of damage perhaps.
    """

    largest = sys.maxsize
    needs = 0
    AT_ONCE: ClassVar[int]  # records that an iteration fetches at once
    missed: int

    @property
    @abstractmethod
    def sequence(self) -> int:
        """Return the sequence of the next record."""

    @abstractmethod
    def fetch(self, most: int, make: Make | None, items: list[Any]) -> Gap | None:
        """Append up to `most` present records to the empty list `items`, without waiting; or return a Gap.

        make: creates each item; None: only the values. An exception from a signal handler leaves in `items` what the cursor has passed.
        """

    @abstractmethod
    def next_batch(self, most: int, coded: bool, room: int) -> Any:
        """Return up to `most` records with `room` bytes of values as a `pyarrow.RecordBatch`, or a Gap; see `engine.batches.next_batch`."""

    def skip_to(self, sequence: int) -> bool:
        """Continue at another sequence without returning the records before it; False if a new cursor there costs less."""
        return False

    def run(self, batch: Batch, make: Make | None) -> None:
        """After records: let the batch fetch the next ones, if they need nothing else, without a Python step in between."""

    @abstractmethod
    def waiter(self, spin: float) -> Waiter:
        """Return a waiter for one thread, which polls for `spin` seconds before it sleeps."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory or the files."""

    @property
    def key_table(self) -> Any:
        """Return the key table of the cursor's files; None if the log has none."""
        return None

    # For a task of an event loop, or a thread, that waits for several logs.

    @property
    def frames(self) -> Any:
        """Return the reader of frames, which can check whether there may be more; None without mapped memory."""
        return None

    @property
    def is_plain(self) -> bool:
        """Return whether only the next record is expected, so that a follower may let `frames` fetch it."""
        return False

    @property
    @abstractmethod
    def files(self) -> object:
        """Return the files to watch; they may change when the cursor moves."""

    @abstractmethod
    def watch(self, watcher: Watcher | LoopWatcher, key: object) -> None:
        """Let the watcher wake when there may be more, or the log was deleted."""

    def ask(self) -> None:
        """Ask the next writer to wake the watchers. Check once more after this and before sleeping."""

    @property
    def is_rung(self) -> bool:
        """Return whether watchers are woken; otherwise the caller has to poll."""
        return True

    @abstractmethod
    def refuse_vanished(self) -> None:
        """Raise LogVanished if the log was deleted."""

    @abstractmethod
    def has_vanished(self) -> bool:
        """Return whether the log was deleted."""
