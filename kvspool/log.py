"""The log: verbs that spools and journals of every format share, each with one signature, one meaning and one set of errors.

`kvspool.create` and `kvspool.open` return a `Log` of one of two stores: a spool (`kvspool.spool`), a ring of fixed size, or a journal
(`kvspool.journal`), growing segments. Shared behaviour is implemented here, on top of the store's cursors and prepared batches. A verb that
a store doesn't support raises `Unsupported`; `Log.capabilities` says so in advance.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from kvspool import producers
from kvspool.engine.cursor import Cursor
from kvspool.engine.iteration import Following, Iteration, Iterations
from kvspool.errors import OutOfRange, Truncated, Unsupported
from kvspool.groups.single import LogGroups
from kvspool.options import Isolation, OnGap, Start, check_sequence
from kvspool.producers import Producer, ProducerStats
from kvspool.record import Codec, Record
from kvspool.system.handles import ClosingHandle
from kvspool.tasks.single import LogTasks
from kvspool.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow

    from kvspool.engine.columns import Columns
    from kvspool.engine.damage import VerifyReport
    from kvspool.engine.following import AsyncFollowing
    from kvspool.engine.reports import ArchiveReport, Exported, RepairReport, Resized
    from kvspool.engine.retention import Retention, TrimReport
    from kvspool.engine.rows import Room
    from kvspool.engine.stats import LogStats
    from kvspool.options import Durability, Progress
    from kvspool.producers import BatchTransaction, ProducerRows, TableLocation
    from kvspool.reader import Reader, ReaderStats


CAPABILITIES = {
    "archive": "only journals of the kind kvj are compressed in place; copy it to one",
    "at": "a spool numbers its records automatically; append without `at`, or use a journal",
    "codecs": "values come back as bytes; use a spool or a kvj journal, or decode them yourself",
    "keys": "store the key in the value, or use a spool, kvj or sej",
    "producers": "only spools and kvj journals have them",
    "rename": "its settings are in a second directory: copy it to the new path, and delete it",
    "resize": "a journal grows as it is filled; `trim` makes it smaller",
    "tasks": "its sequences may be used again after a rewind; use a spool, kvj, sej or fflg",
    "timestamps": "start from a sequence, or use a spool, kvj or sej",
    "trim": "a spool overwrites its oldest records automatically; `resize` makes it smaller",
    "types": "store the type in the value, or use a spool, kvj or sej",
}
"""Optional capabilities of a log, and alternatives to each."""


def unsupported(kind: str, capability: str) -> Unsupported:
    """Return the error for a kind of log without a capability."""
    return Unsupported(kind, capability, CAPABILITIES[capability])


TRIES = 5  # reads of the last records, which rewinds may take back at that moment


class Log(ClosingHandle, LogGroups, LogTasks, ABC):
    """A handle of one log. Get it from `kvspool.create` or `kvspool.open`.

    Several threads may use it at once. It survives a fork: the child opens its own files on first use. `with` closes it. An empty log is
    true, like every handle.
    """

    HELPERS = frozenset(
        """
        always_has_id append_in_transaction append_prepared change_producers check_open columns_of cursor displace_reader end
        extent_files flush_for_commit has_checksums lag limits open_reader open_to_write prepare prepare_columns read_log_id
        records_from refuse_task_name remove_reader room sequence_at
        """.split()
    )
    always_has_id = True  # since it was created
    has_checksums = True
    path: Path
    timeout: float
    durability: Durability
    sync_interval: float
    _iterations: Iterations

    # Identity.

    @property
    @abstractmethod
    def kind(self) -> str:
        """Return "spool", or a journal's format: "kvj", "sej", "fflg" or "fixed"."""

    @property
    @abstractmethod
    def capabilities(self) -> frozenset[str]:
        """Return the optional capabilities of this kind of log: names from `kvspool.log.CAPABILITIES`."""

    @property
    @abstractmethod
    def log_id(self) -> bytes:
        """Return the 16 random bytes that identify this log; none for a journal that was created without."""

    @property
    def capacity(self) -> int:
        """Return the size of a spool's ring in bytes; 0 for a journal, which grows."""
        return 0

    @property
    @abstractmethod
    def room(self) -> Room:
        """Return the fields that its records can store."""

    @abstractmethod
    def limits(self) -> dict[str, Any]:
        """Return the options of `kvspool.create` for the size of this log, or of its parts."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Return whether the handle was closed."""

    @abstractmethod
    def has_vanished(self) -> bool:
        """Return whether the log was deleted, or another one is at its path."""

    def extent_files(self) -> list[Path]:
        """Return the paths of which at least one changes if `extent` does; none if calling `extent` costs less."""
        return []

    def read_log_id(self) -> bytes:
        """Return the `log_id` of the log now at the path: another one if a journal was replaced since it was opened."""
        return self.log_id

    def ensure_log_id(self, timeout: float | None = None) -> bytes:
        """Return `log_id`; a journal without one gets one, on disk when this returns.

        timeout: seconds to wait for the lock. Raises LockTimeout, Corruption, Poisoned, Closed, or the system's OSError.
        """
        return self.log_id

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
        chosen by the caller. timestamp: ns since the Unix epoch; by default the clock's, and at most a day after it. An earlier one than
        the last record's is raised to that. timeout: seconds to wait for the lock and for room (default: the handle's). durable: return
        when the record is on disk; all waiting callers share one flush. A handle of the level "disk" always does this.

        Raises Unencodable, TooLarge, Unsupported, TypeError and ValueError for the arguments. Raises LockTimeout, SpoolFull, Poisoned,
        Corruption, TimeUnknown, Closed, Reentered, LogVanished, or the system's OSError (no space, no permission). Nothing was written
        then. If only the flush fails, the record was appended, and the error is NotDurable, or Poisoned with a note.
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

        keys: one for each value. Nothing is written if any record is invalid, or if there is no room for all. Large batches are published
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
        """Append a record for each row under one lock, and return their sequences; spools and kvj create no Python object for a row.

        Columns: `value` (binary or string, no nulls); optionally `key` (binary or string; null: no key), `type` (0..255) and `timestamp` (a
        timestamp, or int64 in ns; null: now); in journals also `codec` (0..3, no nulls: of each value). Others are refused. codec: of all
        values. at: in a journal, the required sequence of the first row. In kvj it may be later than the next one; if it is impossible,
        OutOfRange is raised. Needs the extra `arrow`. Durability and errors as `append_many`.

        Validate untrusted data first (`batch.validate(full=True)`): wrong offsets would make it read memory outside the batch.
        """

    @abstractmethod
    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> Any:
        """Encode and check a batch for `append_prepared`; raises every error that the values can cause."""

    @abstractmethod
    def append_prepared(self, batch: Any, timeout: float | None = None, durable: bool = False) -> range:
        """Append a prepared batch under one lock; see `append_many`."""

    @abstractmethod
    def columns_of(self, batch: pyarrow.RecordBatch, codec: int) -> Columns:
        """Return the columns of a record batch for `prepare_columns` of logs of this kind."""

    @abstractmethod
    def prepare_columns(self, parts: Sequence[Any], rows: memoryview | None = None, codec: int = Codec.RAW) -> Any:
        """Check the given rows (int32 numbers; None: all) of each part for `append_prepared`. Raises TooLarge, ValueError."""

    def writer(self, timeout: float | None = None) -> Writer:
        """Return a writer for many appends: `with log.writer() as w: w.append(value)`.

        timeout: seconds to wait for the lock and for room (default: the handle's). Raises Closed, LogVanished; PermissionError if this
        process may not write to the log.
        """
        self.open_to_write()  # or raise the error of an append
        return Writer(self, timeout)

    @abstractmethod
    def open_to_write(self) -> None:
        """Open the files that appends need; raises the error that an append would raise."""

    def producer(self, name: str) -> Producer:
        """Return a producer, which appends numbered batches and stores each record once despite any crash; see `kvspool.producers`.

        Raises ValueError for an invalid name, Unsupported for journals other than kvj.
        """
        self._check_capability("producers")
        return Producer(self, name)

    def producers(self) -> list[ProducerStats]:
        """Return the statistics of the log's producers, by name. Raises Closed."""
        self.check_open()
        return producers.listing(self) if "producers" in self.capabilities else []

    def forget_producers(self, names: Iterable[str], timeout: float | None = None) -> int:
        """Forget producers, whose records stay, and return how many the log knew. Raises the errors of `producer`, LockTimeout, OSError."""
        self._check_capability("producers")
        return producers.forget(self, names, timeout)

    def retire_producers(self, prefix: str, timeout: float | None = None) -> int:
        """Declare that producers with this prefix append nothing more; see `kvspool.producers.retire`."""
        self._check_capability("producers")
        return producers.retire(self, prefix, timeout)

    @abstractmethod
    def append_in_transaction(self, rows: ProducerRows, transaction: BatchTransaction, timeout: float | None, durable: bool) -> None:
        """Append a producer's rows under one hold of the append lock, inside `transaction.kept`."""

    @abstractmethod
    def change_producers(self, change: Callable[[TableLocation, int], int], timeout: float | None = None) -> int:
        """Return the result of `change`, called under the append lock, after the leftovers of a killed process were resolved."""

    @abstractmethod
    def sync(self, timeout: float | None = None) -> int:
        """Flush every appended record to disk, and return the sequence below which all records are on disk.

        The commits of readers are then on disk, too. Concurrent callers share one flush of the records. Appends continue meanwhile. Raises
        Poisoned if the disk fails, or failed before: then no process can append. Raises LockTimeout if another process's flush takes longer
        than `timeout` seconds (default: the handle's); Closed.
        """

    # Reading.

    @abstractmethod
    def _cursor_at(self, start: Start, *, bounded: bool = False, end: int | None = None, isolation: Isolation = "appended") -> Cursor:
        """Return a cursor at `start`; bounded: it ends at the present end of the log. end: up to this sequence."""

    @abstractmethod
    def cursor(
        self, start: Start = "earliest", *, bounded: bool = False, end: int | None = None, isolation: Isolation = "appended"
    ) -> Cursor:
        """Return a cursor at `start`, for merging several logs; `bounded`: up to the present end, or to sequence `end`."""

    def sequence_at(self, start: Start) -> int:
        """Return the sequence of a start."""
        with closing(self.cursor(start)) as cursor:
            return cursor.sequence

    @abstractmethod
    def end(self) -> int:
        """Return the sequence that the next record will have."""

    @abstractmethod
    def extent(self, isolation: Isolation = "appended") -> tuple[int, int]:
        """Return the sequences of the oldest record and of the next one to be appended.

        With the isolation "synced" the second one is the end of the records on disk, but never before the first one.
        """

    @abstractmethod
    def records_from(self, sequence: int) -> int:
        """Return the number of records from a sequence on; of a spool, without numbers left out after a crash of the machine."""

    def read(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Iteration:
        """Iterate over the present records, from `start` on.

        start: "earliest", "latest", a sequence, or an aware datetime (the first record at or after it). limit: maximum number of records.
        on_gap: for lost records: "raise" (GapError; the next call continues after them), "yield" (returns a Gap), "skip". isolation:
        "appended" for all records, "synced" for only those on disk, which a crash of the machine can't remove; "latest" is then after the
        last of these. Raises OutOfRange, Unsupported for a time if records have none, Closed, Corruption, Truncated.
        """
        return self._iterations.add(Iteration(self._cursor_at(start, bounded=True, isolation=isolation), limit, on_gap))

    def read_values(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Iteration:
        """Iterate over the stored bytes of the values only; see `read`. The fastest way to Python objects."""
        return self._iterations.add(Iteration(self._cursor_at(start, bounded=True, isolation=isolation), limit, on_gap, None))

    def follow(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
        spin: float = 0.0,
    ) -> Iteration:
        """Iterate over the records from `start` on, and wait for more; see `read`.

        Ends after `timeout` seconds without a record; None: never. spin: seconds to poll before sleeping. Polling uses a whole core, but
        saves the wake-up time if records follow each other closely. Raises LogVanished if the log is deleted meanwhile, Closed as soon as
        any thread closes the log.
        """
        return self._iterations.add(Following(self._cursor_at(start, isolation=isolation), limit, on_gap, timeout, spin))

    def follow_async(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> AsyncFollowing:
        """Iterate with `async for` over the records from `start` on, and wait for more in the event loop; see `follow`.

        All followed logs of a loop share one inotify descriptor. A cancelled wait loses no record, and leaves nothing open.
        """
        from kvspool.engine.following import AsyncFollowing

        reading = Iteration(self._cursor_at(start, isolation=isolation), None, on_gap)
        following = AsyncFollowing(reading, limit, timeout)
        self._iterations.add(reading)
        return following

    def read_arrow(
        self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> pyarrow.Table:
        """Return the present records as a `pyarrow.Table`; spools and kvj create no Python object for a row.

        Columns: sequence (int64), timestamp (ns, UTC), type (int32), key (binary, null: none), value (binary). Gaps: "skip", or GapError
        with "raise"; a table can't hold "yield". Raises the errors of `read`, and OutOfRange for sequences from 2^63 on. Every error has
        the records before it as `partial`, a table; after a GapError, continue with `start=error.gap.last + 1`. Needs the extra `arrow`.
        """
        from kvspool.engine import batches

        with closing(self._cursor_at(start, bounded=True, isolation=isolation)) as cursor:
            return batches.read(cursor, limit, on_gap)

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
        """Return the last `count` records, in order; fewer if the log has fewer. Lost ones are omitted. Raises Closed, ValueError."""
        if count < 0:
            raise ValueError(f"the number of records must not be negative, and is {count}")
        for _ in range(TRIES - 1):
            with suppress(OutOfRange, Truncated):  # the records were taken back meanwhile, by a rewind
                return self._newest(min(count, sys.maxsize))
        return self._newest(min(count, sys.maxsize))

    def _newest(self, count: int) -> list[Record]:
        """Return the last records of the log: it reads more and more sequences, since some of them may have no record."""
        first, end = self.extent()
        begin = max(first, end - count)
        found = deque(self.read(begin, on_gap="skip") if count else (), count)  # no more of them, if others append meanwhile
        while len(found) < count and begin > first:
            end, begin = begin, max(first, begin - 2 * (end - begin))
            before = self._iterations.add(Iteration(self._cursor_at(begin, end=end), None, "skip"))
            found.extendleft(reversed(deque(before, count - len(found))))
        return list(found)

    @contextmanager
    def view(self, sequence: int) -> Iterator[memoryview]:
        """Return a context manager with a view of the stored bytes of a record's value; the memory is released at its end.

        In a spool the view is in the ring, without a copy. A writer that would overwrite it waits up to its timeout, then raises Pinned;
        with the policy "raise" at once. Don't keep slices after the block. Raises the errors of `get`; in a spool, PermissionError if this
        process may not write to the log.
        """
        with memoryview(self.get(sequence).value) as value:
            yield value

    def __iter__(self) -> Iteration:
        return self.read()

    def __len__(self) -> int:
        """Return the present number of records, according to their sequences: an upper bound if some were skipped or are lost."""
        first, end = self.extent()
        return min(end - first, sys.maxsize)

    def __bool__(self) -> bool:
        return True

    # Durable readers.

    def reader(self, name: str, start: Start = "earliest", *, isolation: Isolation = "appended") -> Reader:
        """Open the durable reader `name`: its position is stored in the log, and it is open only once at a time.

        name: in a spool, 1 to 64 bytes of UTF-8 without control characters; in a journal, a file's name. start: where a new reader begins,
        as in `read`; an existing one continues after its last `commit`. isolation: as in `read`. Raises ReaderBusy while it is open
        elsewhere, and for a task list; TooManyReaders, Corruption (its position is damaged), OutOfRange, ValueError, LockTimeout. Raises
        PermissionError if this process may not write to the log; `read` and `follow` still work.
        """
        self.refuse_task_name(name)
        return self.open_reader(name, start, isolation=isolation)  # type: ignore[no-any-return]

    def flush_for_commit(self, sequence: int) -> None:
        """Flush the records below a sequence, for a reader that is about to commit it. Raises Poisoned.

        In a spool that isn't needed: after a crash of the machine, its recovery assigns no number twice.
        """

    @abstractmethod
    def readers(self) -> list[ReaderStats]:
        """Return the state of each durable reader: name, position, lag, whether it is open."""

    def delete_reader(self, name: str | int) -> None:
        """Delete a durable reader; a new one of the same name has no stored position. A damaged one of a spool can be named by its slot
        number.

        Raises NoSuchReader, ReaderBusy while it is open, or is a task list; PermissionError if this process may not write to the log.
        """
        self.refuse_task_name(name)
        self.remove_reader(name)

    # Maintenance.

    @abstractmethod
    def stats(self) -> LogStats:
        """Return statistics of the log at this moment."""

    @abstractmethod
    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Check all present records and the log's files, while others append and read. Changes nothing.

        progress: called as `progress(done, all)` from time to time, with bytes. Raises LogNotFound, Closed, or the system's OSError.
        """

    @abstractmethod
    def repair(self, timeout: float | None = None) -> RepairReport:
        """Repair the log, and let it take records again after a failed flush. All of it is on disk when the call returns.

        timeout: seconds to wait for each lock. Writers wait meanwhile, readers continue. Raises LockTimeout, Poisoned if the disk still
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
        """Remove the oldest whole segments that no rule keeps; never the last one. On disk when it returns.

        retention: the rules; None: the journal's own. before: also remove segments wholly before this sequence. force: also remove records
        that a durable reader has yet to read; it gets a Gap. The floor, also the journal's own one, holds in any case. dry_run: only
        report. Others append and read meanwhile. most: maximum number of segments to remove at once.

        elsewhere: returns the positions, by name, of durable readers that the journal doesn't know (of a hub root). They keep segments as
        its own readers do; -1 keeps everything, and is never overtaken. It is called again while the append lock is held.

        Raises Unsupported for a spool; ValueError without any rule, OutOfRange, LockTimeout, Poisoned, Closed, or the system's OSError.
        Segments removed before the error stay removed.
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
        """Change the size of a spool's ring while others append and read; see `kvspool.resize`. Raises Unsupported for a journal."""
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
        """Compress sealed segments in place; they stay readable. Never the last one. On disk when it returns.

        before: only segments wholly before this sequence. older_than: only segments without a write for this many seconds. level: of zstd,
        1 to 22. dry_run: only report. progress: called as `progress(done, all)` from time to time, with bytes. timeout: seconds to wait for
        each lock. Others append and read meanwhile. The disk needs space for the archive of one segment.

        Raises Unsupported for a kind other than kvj, MissingExtra (install `kvspool[archive]`), LockTimeout, Poisoned, Corruption if an
        archive can't be read back, Closed, TooLarge, or the system's OSError. Segments archived before the error stay archived.
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
        """Restore archived segments byte for byte, and remove the archives; see `archive`.

        Raises Corruption for a damaged archive, which is not changed; the message names the block.
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
        progress: Callable[[int], object] | None = None,
    ) -> Exported:
        """Write the present records to a binary file; see `kvspool.export`."""
        from kvspool.engine import exporting

        return exporting.export(self, file, format, start=start, end=end, on_gap=on_gap, progress=progress)

    @abstractmethod
    def close(self) -> None:
        """Release locks, files and memory. Every later call raises Closed, and so do iterations, waiting ones in other threads at once.

        At the level "memory" this does not affect appended records. At "os" and "disk" it flushes. If that fails it raises the errors of
        `sync`, and the handle is closed nevertheless. In a signal handler during an append it raises Reentered, and closes nothing.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}{' closed' if self.closed else ''}>"

    # For the stores.

    def _check_capability(self, capability: str) -> None:
        """Raise Closed, or Unsupported for a missing capability."""
        if capability not in self.capabilities:
            self._refuse(capability)
        self.check_open()

    def _refuse(self, capability: str) -> NoReturn:
        self.check_open()
        raise unsupported(self.kind, capability)
