"""The log: the verbs that spools and journals of every format share, each with one signature, one meaning and one set of errors.

`kvspool.create` and `kvspool.open` return a `Log` of one of two stores: a spool (`kvspool.spool`), a ring of fixed size, or a journal
(`kvspool.journal`), segments that grow. What both do alike is implemented here, on top of the store's cursors and prepared batches. A verb
that a store has no room for raises `Unsupported`; `Log.capabilities` tells in advance.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol, Self

from kvspool import producers
from kvspool.engine.iteration import Iterations
from kvspool.errors import OutOfRange, Truncated, Unsupported
from kvspool.options import Isolation, OnGap, Start, check_sequence
from kvspool.producers import Producer, ProducerStats
from kvspool.record import Codec, Record
from kvspool.system.handles import Handle
from kvspool.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow

    from kvspool.engine.following import AsyncFollowing
    from kvspool.engine.iteration import Iteration
    from kvspool.journal.archive import ArchiveReport
    from kvspool.journal.journal import JournalStats
    from kvspool.journal.repair import JournalRepairReport
    from kvspool.journal.retention import Retention
    from kvspool.journal.trim import TrimReport
    from kvspool.journal.verify import JournalVerifyReport
    from kvspool.options import Durability, Progress
    from kvspool.producers import ProducerLog
    from kvspool.reader import Reader, ReaderStats
    from kvspool.spool.repair import RepairReport
    from kvspool.spool.resize import Resized
    from kvspool.spool.spool import SpoolStats
    from kvspool.spool.verify import VerifyReport
    from kvspool.transfer.exchange import Exported
    from kvspool.transfer.exchange import Progress as ExportProgress


CAPABILITIES = {
    "archive": "only journals of the kind kvj are compressed in place; copy it to one",
    "at": "a spool numbers its records automatically; append without `at`, or use a journal",
    "codecs": "values come back as bytes; use a spool or a kvj journal, or decode them yourself",
    "keys": "store the key in the value, or use a spool, kvj or sej",
    "producers": "only spools and kvj journals have them",
    "resize": "a journal grows as it is filled; `trim` makes it smaller",
    "timestamps": "start from a sequence, or use a spool, kvj or sej",
    "trim": "a spool overwrites its oldest records automatically; `resize` makes it smaller",
    "types": "store the type in the value, or use a spool, kvj or sej",
}
"""What not every kind of log can do, and what to use in its place."""

TRIES = 5  # reads of the last records, which rewinds may take back at that moment


class Cursor(Protocol):
    """A place in a log that moves forward."""

    lost: int

    @property
    def sequence(self) -> int:
        """Return the sequence that comes next."""

    def reading(self, make: Callable[..., Any] | None, limit: int | None = None, on_gap: OnGap = "yield") -> Iteration[Any]:
        """Return an iteration over the records up to the cursor's end, made by `make`; None: the values alone."""

    def following(self, limit: int | None, on_gap: OnGap, timeout: float | None, spin: float) -> Iteration[Any]:
        """Return an iteration that waits for more."""

    def close(self) -> None:
        """Release the log."""


class Log(Handle, ABC):
    """A handle of one log. Get it from `kvspool.create` or `kvspool.open`.

    It may be used by several threads at once, and it survives a fork: the child opens files of its own when it uses it. `with` closes it.
    A log that has no records is true, as every handle is.
    """

    HELPERS = frozenset("append_prepared check_open open_to_write prepare".split())
    path: Path
    timeout: float
    durability: Durability
    sync_interval: float
    _iterations: Iterations

    # What it is.

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return "spool", or a journal's format: "kvj", "sej", "fflg" or "fixed"."""

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """Return what this kind of log can do of what not every kind can: names out of `kvspool.log.CAPABILITIES`."""

    @property
    @abstractmethod
    def log_id(self) -> bytes:
        """Return the 16 random bytes that distinguish this log from every other one; none for a journal that was made without."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Return whether the handle was closed."""

    # Writing.

    @abstractmethod
    def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
    ) -> int:
        """Append one record and return its sequence; it survives a crash of this process when the call returns.

        value: bytes, str, or any value that the log's codec takes. key: bytes, str (stored as UTF-8), or None for no key. type: 0..255,
        yours. timestamp: ns since the Unix epoch; the clock's by default, and at most a day after it. One earlier than the last record's
        becomes that record's. timeout: seconds to wait for the lock and for room (default: the handle's). durable: return when the
        record is on disk, in a flush that all waiting callers share; a handle of the level "disk" always does.

        Raises Unencodable, TooLarge, Unsupported, TypeError and ValueError for the arguments, LockTimeout, SpoolFull, Poisoned, Corruption,
        TimeUnknown, Closed, Reentered, LogVanished, or the system's OSError (no space, no permission): nothing was written then. If only
        the flush fails, the record was appended: NotDurable, or Poisoned with a note, says so.
        """

    def append_many(
        self,
        values: Iterable[Any],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
    ) -> range:
        """Append a record for each value under one lock, and return their sequences; see `append`.

        keys: one for each value. Nothing is written if any of them can't be, or if there is no room for all. Large batches are published
        in pieces: an error after some of them is AppendedInPart, or has the attribute `appended`; see `kvspool.errors`.
        """
        return self.append_prepared(self.prepare(values, keys, type, timestamp), timeout, durable)

    @abstractmethod
    def append_arrow(
        self,
        batch: pyarrow.RecordBatch | pyarrow.Table,
        *,
        codec: int = Codec.RAW,
        timeout: float | None = None,
        durable: bool = False,
        at: int | None = None,
    ) -> range:
        """Append a record for each row under one lock, and return their sequences; in spools and kvj without a Python object for a row.

        Columns: `value` (binary or string, no nulls); if present `key` (binary or string; null: no key), `type` (0..255) and `timestamp`
        (a timestamp, or int64 in ns; null: now); in journals also `codec` (0..3, no nulls: of each value). Others are refused. codec: of
        all values. at: of a journal, the sequence that the first row must get; in kvj it may be later than the next one, and OutOfRange is
        raised if it can't. Needs the extra `arrow`. Durability and errors as `append_many`.

        Validate data from elsewhere first (`batch.validate(full=True)`): wrong offsets would make it read memory that isn't the batch's.
        """

    @abstractmethod
    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> Any:
        """Return what `append_prepared` takes: encoded and checked, with every error that the values can cause raised here."""

    @abstractmethod
    def append_prepared(self, batch: Any, timeout: float | None = None, durable: bool = False) -> range:
        """Append a prepared batch under one lock; see `append_many`."""

    def writer(self, timeout: float | None = None) -> Writer:
        """Return a writer for many appends: `with log.writer() as w: w.append(value)`.

        timeout: seconds to wait for the lock and for room (default: the handle's). Raises Closed, LogVanished; PermissionError for
        readers without the right to write.
        """
        return Writer(self, timeout)

    @abstractmethod
    def open_to_write(self) -> None:
        """Open what appends need; raises the error that an append would raise."""

    def producer(self, name: str) -> Producer:
        """Return a producer: it appends numbered batches, each record of which is stored once despite any crash; see `kvspool.producers`.

        Raises ValueError for an invalid name, Unsupported for journals other than kvj.
        """
        self.check_open()
        return Producer(self._producing(), name)

    def producers(self) -> list[ProducerStats]:
        """Return the figures of the log's producers, by name. Raises Closed."""
        self.check_open()
        return producers.listing(self._producing()) if "producers" in self.capabilities else []

    def forget_producers(self, names: Iterable[str], timeout: float | None = None) -> int:
        """Let the log forget producers, whose records stay; returns how many it knew. Raises what `producer` does, LockTimeout, OSError."""
        self.check_open()
        return producers.forget(self._producing(), names, timeout)

    def retire_producers(self, prefix: str, timeout: float | None = None) -> int:
        """Let the log know that producers whose names begin so append nothing more; see `kvspool.producers.retire`."""
        self.check_open()
        return producers.retire(self._producing(), prefix, timeout)

    @abstractmethod
    def _producing(self) -> ProducerLog:
        """Return the log as its producers see it. Raises Unsupported."""

    @abstractmethod
    def sync(self, timeout: float | None = None) -> int:
        """Put every appended record on disk, and return the sequence below which all of them are there.

        The commits of readers are on disk then, too. Concurrent callers share one flush of the records. Appends go on meanwhile. Raises
        Poisoned if the disk fails, or failed before: then no process can append; LockTimeout if another process's flush takes longer than
        `timeout` seconds (default: the handle's); Closed.
        """

    # Reading.

    @abstractmethod
    def _cursor_at(self, start: Start, *, bounded: bool = False, end: int | None = None, isolation: Isolation = "appended") -> Cursor:
        """Return a cursor at `start`; bounded: up to the last record that is there now. end: up to this sequence."""

    @abstractmethod
    def extent(self, isolation: Isolation = "appended") -> tuple[int, int]:
        """Return the sequences of the oldest record and of the next one to be appended.

        With the isolation "synced" the second one is where the records on disk end; never before the first one.
        """

    def read(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Iteration[Any]:
        """Iterate over the records that are there now, from `start` on.

        start: "earliest", "latest", a sequence, or an aware datetime (the first record at or after it). limit: at most so many records.
        on_gap: for records that were lost before they could be read: "raise" (GapError; the next call goes on after them), "yield" (the
        Gap in their place), "skip". isolation: "appended" for all, "synced" for only those on disk, which a crash of the machine can't
        take; "latest" is after the last of these then. Raises OutOfRange, Unsupported for a time where records have none, Closed,
        Corruption, Truncated.
        """
        return self._iterations.add(self._cursor_at(start, bounded=True, isolation=isolation).reading(Record, limit, on_gap))

    def read_values(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Iteration[Any]:
        """Iterate over the stored bytes of the values alone; see `read`. The fastest way to Python objects."""
        return self._iterations.add(self._cursor_at(start, bounded=True, isolation=isolation).reading(None, limit, on_gap))

    def follow(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
        spin: float = 0.0,
    ) -> Iteration[Any]:
        """Iterate over the records from `start` on, and wait for more; see `read`.

        Ends quietly after `timeout` seconds without a record; None: never. spin: seconds to look for more before it sleeps: that takes a
        core, and saves the time to wake up where records come close together. Raises LogVanished if the log is deleted meanwhile, Closed
        as soon as any thread closes the log.
        """
        return self._iterations.add(self._cursor_at(start, isolation=isolation).following(limit, on_gap, timeout, spin))

    def follow_async(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> AsyncFollowing[Any]:
        """Iterate with `async for` over the records from `start` on, and wait for more while the event loop does other work; see `follow`.

        All followed logs of a loop share one inotify descriptor. A cancelled wait loses no record, and leaves nothing open.
        """
        reading = self._cursor_at(start, isolation=isolation).reading(Record, limit, on_gap)
        following = self._following_async(reading, timeout)
        self._iterations.add(reading)
        return following

    @abstractmethod
    def _following_async(self, reading: Any, timeout: float | None) -> AsyncFollowing[Any]:
        """Return an iteration that waits in an event loop for more than a reading has; it is made of the reading."""

    def read_arrow(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> pyarrow.Table:
        """Return the records that are there now as a `pyarrow.Table`; of spools and kvj without a Python object for a row.

        Columns: sequence (int64), timestamp (ns, UTC), type (int32), key (binary, null: none), value (binary). Gaps: "skip", or GapError
        with "raise"; a table has no room for "yield". Raises what `read` does, and OutOfRange for sequences from 2^63 on. Every error has
        the records before it as `partial`, a table; go on after a GapError with `start=error.gap.last + 1`. Needs the extra `arrow`.
        """
        from kvspool import arrow

        with closing(self._cursor_at(start, bounded=True, isolation=isolation)) as cursor:
            return arrow.read(cursor, limit, on_gap)  # type: ignore[arg-type]

    def get(self, sequence: int) -> Record:
        """Return the record with this sequence.

        Raises OutOfRange if it was not written yet when the call began, GapError if it is lost, TypeError for a sequence that is no int,
        and what `read` does.
        """
        found = next(self.read(check_sequence(sequence), limit=1), None)
        if found is None:
            raise OutOfRange(f"sequence {sequence} of {self.path} is not written yet")
        assert isinstance(found, Record)
        return found

    def last(self, count: int = 1) -> list[Record]:
        """Return the last `count` records, in order; fewer if there are no more. Lost ones are left out. Raises Closed, ValueError."""
        if count < 0:
            raise ValueError(f"a number of records is not negative: {count}")
        for _ in range(TRIES - 1):
            with suppress(OutOfRange, Truncated):  # the records were taken back meanwhile, by a rewind
                return self._newest(min(count, sys.maxsize))
        return self._newest(min(count, sys.maxsize))

    def _newest(self, count: int) -> list[Record]:
        """Return the last records that are there now: out of ever more sequences, since some of them may have no record."""
        first, end = self.extent()
        begin = max(first, end - count)
        found = deque(self.read(begin, on_gap="skip") if count else (), count)  # no more of them, if others append meanwhile
        while len(found) < count and begin > first:
            end, begin = begin, max(first, begin - 2 * (end - begin))
            before = self._iterations.add(self._cursor_at(begin, end=end).reading(Record, None, "skip"))
            found.extendleft(reversed(deque(before, count - len(found))))
        return list(found)

    @contextmanager
    def view(self, sequence: int) -> Iterator[memoryview]:
        """Look at the stored bytes of a record's value inside the `with` block; the memory is released with it.

        In a spool they are looked at where they lie, without a copy, and a writer that would overwrite them waits up to its timeout, then
        raises Pinned, with the policy "raise" at once. Make no slices that live longer. Raises what `get` does; of a spool,
        PermissionError for readers without the right to write.
        """
        with memoryview(self.get(sequence).value) as value:
            yield value

    def __iter__(self) -> Iteration[Any]:
        return self.read()

    def __len__(self) -> int:
        """Return how many records are there now, as far as their sequences tell: at most so many if some were left out, or are lost."""
        first, end = self.extent()
        return min(end - first, sys.maxsize)

    def __bool__(self) -> bool:
        return True

    # Durable readers.

    @abstractmethod
    def reader(self, name: str, start: Start = "earliest", *, isolation: Isolation = "appended") -> Reader:
        """Open the durable reader `name`: it keeps its place in the log, goes on there next time, and is open only once.

        name: in a spool, 1 to 64 bytes of UTF-8 without control characters; in a journal, a file's name. start: where a new reader begins,
        as in `read`; one that exists goes on after its last `commit`. isolation: as in `read`. Raises ReaderBusy while it is open
        elsewhere, TooManyReaders, Corruption (its place is damaged), OutOfRange, ValueError, LockTimeout; PermissionError for readers
        without the right to write: `read` and `follow` work there too.
        """

    @abstractmethod
    def readers(self) -> list[ReaderStats]:
        """Return what is known of each durable reader: name, place, lag, whether it is open."""

    @abstractmethod
    def delete_reader(self, name: str | int) -> None:
        """Forget a durable reader; a new one of the same name starts afresh. A damaged one of a spool can be named by its slot's number.

        Raises NoSuchReader, ReaderBusy while it is open; PermissionError for readers without the right to write.
        """

    # Looking after it.

    @abstractmethod
    def stats(self) -> SpoolStats | JournalStats:
        """Return what the log holds at this moment."""

    @abstractmethod
    def verify(self, progress: Progress | None = None) -> VerifyReport | JournalVerifyReport:
        """Check every record that is there now while others append and read, and the files around them. Changes nothing.

        progress: called as `progress(done, all)` now and then, with bytes. Raises LogNotFound, Closed, or the system's OSError.
        """

    @abstractmethod
    def repair(self, timeout: float | None = None) -> RepairReport | JournalRepairReport:
        """Put the log in order, and let one whose flush failed take records again. All of it is on disk when the call returns.

        timeout: seconds to wait for each lock. Writers wait meanwhile, readers go on. Raises LockTimeout, Poisoned if the disk still
        fails, Corruption, Closed, or the system's OSError. See `kvspool.spool.repair` and `kvspool.journal.repair`.
        """

    def trim(
        self,
        retention: Retention | None = None,
        *,
        before: int | None = None,
        force: bool = False,
        dry_run: bool = False,
        timeout: float | None = None,
        most: int | None = None,
        elsewhere: Callable[[], Mapping[str, int]] = dict,
    ) -> TrimReport:
        """Remove the oldest segments, whole, that no rule keeps; never the last one. On disk when it returns.

        retention: the rules; None: the journal's own. before: segments wholly before this sequence go as well. force: remove also
        records that a durable reader has yet to read, and it gets a Gap; the floor, also the journal's own one, holds all the same.
        dry_run: only report. Others append and read meanwhile. most: segments that go at once.

        elsewhere: returns the places, by name, of durable readers that the journal doesn't know of (a hub root's): they hold segments back
        as its own ones do; -1 holds back everything, and isn't left behind. It is asked again while the append lock is held.

        Raises Unsupported for a spool; ValueError without any rule, OutOfRange, LockTimeout, Poisoned, Closed, or the system's OSError:
        segments removed before it stay removed.
        """
        self._refuse("trim")

    @property
    def retention(self) -> Retention | None:
        """Return the rules that a writer applies when it begins a segment; None if there are none. Raises Corruption."""
        return None

    def set_retention(self, retention: Retention | None, timeout: float | None = None) -> None:
        """Store other rules with the log, on disk; handles apply them from their next new segment on. Raises Unsupported, LockTimeout."""
        self._refuse("trim")

    def resize(self, capacity: int | str, *, timeout: float | None = None, progress: Callable[[int, int], None] | None = None) -> Resized:
        """Give a spool a ring of another size while others append and read; see `kvspool.resize`. Raises Unsupported for a journal."""
        self._refuse("resize")

    def archive(
        self,
        before: int | None = None,
        *,
        older_than: float | None = None,
        level: int = 3,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
        timeout: float | None = None,
    ) -> ArchiveReport:
        """Compress sealed segments in place, which stay readable as they were; never the last one. On disk when it returns.

        before: only segments whose records all come before this sequence. older_than: only those that nothing was written to for so many
        seconds. level: of zstd, 1 to 22. dry_run: only report. progress: called as `progress(done, all)` now and then, with bytes.
        timeout: seconds to wait for each lock. Others append and read meanwhile; there must be room for one segment's archive.

        Raises Unsupported for a kind other than kvj, MissingExtra (install `kvspool[archive]`), LockTimeout, Poisoned, Corruption if an
        archive can't be read back, Closed, TooLarge, or the system's OSError: segments done before it stay done.
        """
        self._refuse("archive")

    def unarchive(
        self,
        before: int | None = None,
        *,
        older_than: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
        timeout: float | None = None,
    ) -> ArchiveReport:
        """Restore archived segments, byte for byte, and remove the archives; see `archive`.

        Raises Corruption for a damaged archive, which stays as it is; it names the block.
        """
        self._refuse("archive")

    def export(
        self,
        file: IO[bytes],
        format: str = "jsonl",
        *,
        start: Start = "earliest",
        end: int | None = None,
        on_gap: OnGap = "raise",
        progress: ExportProgress | None = None,
    ) -> Exported:
        """Write the records that are there now to a binary file; see `kvspool.export`."""
        from kvspool.transfer import exchange

        return exchange.export(self, file, format, start=start, end=end, on_gap=on_gap, progress=progress)

    @abstractmethod
    def close(self) -> None:
        """Release locks, files and memory. Every later call raises Closed; so do iterations, waiting ones in other threads at once.

        At the level "memory" appended records don't need it. At "os" and "disk" it flushes; if that fails it raises what `sync` does, and
        the handle is closed all the same. Raises Reentered, and closes nothing, in a signal handler during an append.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}{' closed' if self.closed else ''}>"

    # For the stores.

    @abstractmethod
    def check_open(self) -> None:
        """Raise Closed if the handle was closed."""

    def _refuse(self, capability: str) -> NoReturn:
        self.check_open()
        raise Unsupported(self.kind, capability, CAPABILITIES[capability])
