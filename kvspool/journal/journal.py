"""The journal: an unbounded log, in a directory of segments, that any number of processes append to and read at once.

**Durability.** When `append` returns, the record is in the page cache: it survives a crash of any process. When `sync` returns, or an
append with `durable=True`, it survives a crash of the machine. A segment is on disk when the next one begins. The level "os" syncs at an
interval, "disk" makes every append durable.

**Recovery.** The first append after a crash checks the last segment's frames and cuts torn bytes; `torn` reports them. Opening and reading
change nothing.

**Retention.** Nothing is removed automatically, unless the journal has a `Retention`: then the writer that begins a segment removes the
oldest ones that its rules don't keep. `trim` does it manually. Segments are removed whole. FFLG removes segments that every durable reader
has committed automatically, as its program does; see `dropping`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvspool import system
from kvspool.engine.background import SYNC_INTERVAL
from kvspool.engine.damage import VerifyReport
from kvspool.engine.iteration import Iterations
from kvspool.engine.reports import ArchiveReport, RepairReport
from kvspool.engine.retention import Retention, TrimReport
from kvspool.engine.stats import Consumer, LogStats
from kvspool.errors import AGAIN, Corruption, NoSuchReader, OutOfRange
from kvspool.journal import archive as archiving
from kvspool.journal import batches, settings, stats, trim
from kvspool.journal.appender import Appender, ProducerStates, Torn
from kvspool.journal.control import Control, Page
from kvspool.journal.cursor import SegmentCursor, SegmentPlace
from kvspool.journal.dropping import AppenderRetention
from kvspool.journal.durability import JournalFlusher
from kvspool.journal.format import Format, JournalBatch, JournalRows
from kvspool.journal.home import Home
from kvspool.journal.offsets import Lease, Offsets
from kvspool.journal.places import Places
from kvspool.journal.reader import JournalReader
from kvspool.journal.repair import repair_journal
from kvspool.journal.segments import OPEN, Segment, Segments
from kvspool.journal.trim import drop_consumed
from kvspool.journal.verify import verify_journal
from kvspool.kernel.tail_py import BUSY, SLOW, Tail
from kvspool.log import Log
from kvspool.options import TIMEOUT, Durability, Isolation, Progress, Start, check_isolation
from kvspool.producers import BatchTransaction, ProducerRows, TableLocation
from kvspool.reader import Lag, ReaderStats
from kvspool.record import Codec, encode, encode_key
from kvspool.system import forks

if TYPE_CHECKING:
    import pyarrow

    from kvspool.engine.rows import Room
    from kvspool.journal.columns import JournalColumns, Records

T = TypeVar("T")
RAW = int(Codec.RAW)


class Journal(Log):
    """A handle of a journal; see `Log` for the capabilities of every log."""

    PLACES: ClassVar[type[Places]] = Places
    always_has_id = False
    HELPERS = frozenset(
        """
        PLACES append_records bases begin capacity clamped committed control cursor_from end_of_read first forked
        generation lag latest_time locked mode offsets place place_seen readable_end records_from refuse_another
        refuse_handler segment_of segments_apart segments_to_read under_lock
        """.split()
    )

    def __init__(
        self,
        path: Path,
        format: Format,
        *,
        id: str = "",
        codec: Codec = Codec.JSON,
        timeout: float = TIMEOUT,
        durability: Durability = "memory",
        sync_interval: float | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.has_checksums = format.has_checksums
        self.timeout = timeout
        self.durability = durability
        self.sync_interval = sync_interval or SYNC_INTERVAL
        self._codec = codec
        self._home = Home(path, format, id)
        self._id = b""  # once it is known
        self._places = self.PLACES(path, format)
        self._segments = self._places.segments
        self._appender: Appender | None = None
        self._tail: Tail | None = None  # of the appender
        self.torn: list[Torn] = []  # bytes that this handle had to cut from the end before it could append
        self._flusher = JournalFlusher(self)
        self._thread_lock = threading.RLock()
        self._iterations = Iterations()
        self.trim_error: Exception | None = None
        self.offsets: Offsets = format.offsets(path, self.mode())
        forks.register(self)

    @property
    def kind(self) -> str:
        return self.format.name

    @property
    def capabilities(self) -> frozenset[str]:
        form = self.format
        has = {"keys": form.has_keys, "types": form.has_types, "timestamps": form.has_timestamps, "codecs": form.has_codecs}
        has |= {"producers": form.has_producers, "archive": form.has_archives, "rename": form.can_be_renamed, "tasks": form.keeps_sequences}
        return frozenset(("at", "trim", *(name for name, is_so in has.items() if is_so)))

    @property
    def room(self) -> Room:
        return self.format.room

    def limits(self) -> dict[str, Any]:
        return self.format.limits()

    # Writing.

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
        if timestamp is None and self._appender is not None:
            data, codec = (value, RAW) if value.__class__ is bytes else encode(value, self._codec)
            tail = self._tail
            sequence = BUSY if tail is None else tail.append(data, key, type, codec)  # type: ignore[arg-type]  # it refuses str
            if sequence == BUSY:
                sequence = self._append_one(data, encode_key(key), type, codec, self.timeout if timeout is None else timeout)
            if sequence >= 0:
                if durable or self.durability != "memory":
                    self._flusher.keep_level(range(sequence, sequence + 1), self.timeout if timeout is None else timeout, durable)
                return sequence
        return self.append_many(
            [value], keys=None if key is None else [key], type=type, timestamp=timestamp, timeout=timeout, durable=durable
        )[0]

    def _append_one(self, value: bytes, key: Any, type: int, codec: int, timeout: float) -> int:
        """Append one record in one step as soon as no other writer is appending; see `Appender.append_one`."""
        with self._thread_lock:
            appender = self._appender
            return SLOW if appender is None else appender.append_one(value, key, type, codec, timeout)

    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> JournalBatch:
        self.check_open()
        return batches.prepare(self.format, self._codec, values, keys, type, timestamp)

    def append_batch(self, batch: JournalBatch, timeout: float | None = None, durable: bool = False, at: int | None = None) -> range:
        """Append encoded records, each with its own type and time if given; see `append_many`.

        at: the required sequence of the first one; in the format kvj it may be later than the next one. Raises OutOfRange if it is
        impossible.
        """
        batches.check(self.format, batch)
        return self.append_prepared(batch, timeout, durable, at)

    def append_arrow(
        self,
        batch: pyarrow.RecordBatch | pyarrow.Table,
        *,
        codec: int = Codec.RAW,
        timeout: float | None = None,
        durable: bool = False,
        at: int | None = None,
    ) -> range:
        from kvspool.engine.columns import parts

        columns = [self.columns_of(part, codec) for part in parts(batch)]
        return self.append_prepared(self.prepare_columns(columns), timeout, durable, at)

    def columns_of(self, batch: pyarrow.RecordBatch, codec: int) -> JournalColumns:
        from kvspool.journal.columns import JournalColumns

        return JournalColumns(batch, codec)

    def prepare_columns(self, parts: Sequence[JournalColumns], rows: memoryview | None = None, codec: int = Codec.RAW) -> JournalRows:
        self.check_open()
        return batches.prepare_columns(self.format, parts, rows)

    def append_records(self, records: Records, at: int, expected: int | None = None) -> range:
        """Append records laid out by `journal.columns.Records`, in the format kvj; see `append_batch`. expected: as for
        `append_prepared`.
        """
        self.format.check_columns(records)
        return self.append_prepared(records, at=at, expected=expected)

    def append_prepared(
        self, batch: JournalRows, timeout: float | None = None, durable: bool = False, at: int | None = None, expected: int | None = None
    ) -> range:
        """Append a prepared batch under one lock; see `append_batch`. expected: the next sequence according to the caller; raises
        OutOfRange if it is another one, and nothing is written then.
        """
        timeout = self.timeout if timeout is None else timeout
        if not batch.rows:
            end = self.end()
            return range(end, end)

        def work(appender: Appender, page: Page) -> range:
            if expected is not None and page.next_sequence != expected:
                raise OutOfRange(f"{self.path} continues at sequence {page.next_sequence}, not at {expected}; nothing was written")
            return appender.append(batch, page, at)

        sequences = self.under_lock(timeout, work)
        self._flusher.keep_level(sequences, timeout, durable)
        return sequences

    def append_in_transaction(self, rows: ProducerRows, transaction: BatchTransaction, timeout: float | None, durable: bool) -> None:
        self.ensure_log_id(timeout)
        timeout, batch = self.timeout if timeout is None else timeout, batches.of_producer(rows)

        def work(appender: Appender, page: Page) -> range:
            with transaction.kept(page.next_sequence, self._table_location(appender)) as may_append:
                return appender.append(batch, page, advice=AGAIN) if may_append and batch.rows else range(0)

        sequences = self.under_lock(timeout, work)
        if sequences:
            self._flusher.keep_level(sequences, timeout, durable)

    def change_producers(self, change: Callable[[TableLocation, int], int], timeout: float | None = None) -> int:
        timeout = self.timeout if timeout is None else timeout
        return self.under_lock(timeout, lambda appender, page: change(self._table_location(appender), page.next_sequence))

    def _table_location(self, appender: Appender) -> TableLocation:
        return TableLocation(self.path, self.log_id, self.mode(), appender.control.set_pending)

    def under_lock(self, timeout: float, work: Callable[[Appender, Page], T]) -> T:
        """Return the result of `work`, called under the append lock with the end of the journal; see `Appender.under_lock`."""
        with self._thread_lock:
            appender = self._open_appender(timeout)
            return appender.under_lock(timeout, lambda page: work(appender, page))

    def locked(self, timeout: float, work: Callable[[], T]) -> T:
        """Return the result of `work`, called under the append lock; see `Appender.locked`."""
        with self._thread_lock:
            return self._open_appender(timeout).locked(timeout, work)

    def refuse_handler(self) -> None:
        """Raise Reentered in a signal handler that interrupted an append of this handle and thread; see `Appender.refuse_handler`."""
        appender = self._appender
        if appender is not None:
            appender.refuse_handler()

    def _open_appender(self, timeout: float) -> Appender:
        self.check_open()
        appender = self._appender
        if appender is None or appender.process != system.port.process_id():
            with self._home.in_place(timeout):
                appender = self.begin(timeout)
        self._use_tail(appender)  # another one, if the lock file was removed
        return appender

    def begin(self, timeout: float) -> Appender:
        """Open the files that appends need, and create the first segment if there is none. The caller has locked the directory."""
        self._home.refuse_another()
        mode = self.mode()
        self.format.prepare(self.path)
        self._home.refuse_another(by_id=True)
        control = Control(self.format.lock_file(self.path), mode)
        try:
            room = AppenderRetention(self.format, self.offsets) if self.format.total_bytes or self.format.trims_consumed else None
            producers = ProducerStates(self.path, lambda: self.log_id) if self.format.has_producers else None
            segments = self.segments_apart()
            appender = Appender(self._home, segments, control, mode, timeout, self.torn, room, trim.on_roll(self), producers)
        except BaseException:
            control.close()
            raise
        self._appender = appender
        self._use_tail(appender)
        return appender

    def _use_tail(self, appender: Appender) -> None:
        tail = appender.control.tail
        if tail is not None:
            tail.guard = self._thread_lock
        self._tail = tail

    def open_to_write(self) -> None:
        with self._thread_lock:
            self._open_appender(self.timeout)

    def control(self, timeout: float) -> Control:
        """Return the lock file of this handle, open for writing."""
        appender = self._appender
        if appender is not None and appender.process == system.port.process_id() and not self.closed:
            return appender.control
        with self._thread_lock:
            return self._open_appender(timeout).control

    def sync(self, timeout: float | None = None) -> int:
        self.check_open()
        return self._flusher.sync(self.timeout if timeout is None else timeout)

    # Reading.

    def _cursor_at(
        self, start: Start, *, bounded: bool = False, end: int | None = None, isolation: Isolation = "appended"
    ) -> SegmentCursor:
        if bounded and end is None:
            end = self.end_of_read(isolation)
        return self.cursor_from(self.place_seen(start, isolation), end, isolation)

    def end_of_read(self, isolation: Isolation) -> int:
        """Return the sequence at which a read of the present records ends."""
        return self.readable_end() if check_isolation(isolation) == "appended" else self.extent(isolation)[1]

    def place_seen(self, start: Start, isolation: Isolation) -> SegmentPlace:
        """Return the place of a start; with the isolation "synced" the latest one is the end of the records on disk."""
        return self.place(self.extent(isolation)[1] if start == "latest" and check_isolation(isolation) == "synced" else start)

    def cursor_from(self, place: SegmentPlace, end: int | None, isolation: Isolation = "appended") -> SegmentCursor:
        self.check_open()
        self.refuse_another()
        limit = self._places.synced if check_isolation(isolation) == "synced" else None
        if limit is None and end is None and self.format.reads_zeros and self._places.word_before_restart() is not None:
            limit = self._places.until_recovered
        return SegmentCursor(self.segments_to_read(most_open=1), place, end, limit)  # it only goes forward

    def cursor(
        self,
        start: Start = "earliest",
        *,
        bounded: bool = False,
        end: int | None = None,
        isolation: Isolation = "appended",
    ) -> SegmentCursor:
        found = self._cursor_at(start, bounded=bounded, end=end, isolation=isolation)
        self._places.release()  # of many logs even one descriptor each would be too many
        return found

    def has_vanished(self) -> bool:
        return self._home.has_vanished()

    @property
    def closed(self) -> bool:
        return self._places.is_closed

    # Positions.

    def sequence_at(self, start: Start) -> int:
        return self.place(start).sequence

    def end(self) -> int:
        return self._places.end(self.bases())[0].sequence

    def extent(self, isolation: Isolation = "appended") -> tuple[int, int]:
        return self._places.extent(isolation)

    def extent_files(self) -> list[Path]:
        segments = self.segments_apart()
        return [segments.directory, self.format.lock_file(self.path), segments.path_of(self.bases()[-1])]

    def readable_end(self) -> int:
        """Return the sequence at which a read of the present records ends; see `Places.readable_end`."""
        return self._places.readable_end()

    def __len__(self) -> int:
        """As for every log, and no more than the segments have room for: `list` makes room for so many before it reads."""
        return min(super().__len__(), self._places.most_records())

    def place(self, start: Start) -> SegmentPlace:
        """Return the place of a start; see `Places.place`."""
        return self._places.place(start)

    def clamped(self, sequence: int) -> int:
        """Return a stored sequence, or the end if that is earlier: the journal was cut, or restored from a backup."""
        return min(sequence, self.end())

    def check_open(self) -> None:
        self._places.check_open()

    def generation(self) -> int:
        """Return a number that changes, under the append lock, whenever records may have been replaced by others of the same sequence."""
        return 0

    # Durable readers.

    def flush_for_commit(self, sequence: int) -> None:
        self._home.refuse_another()
        self._flusher.flush_for_commit(sequence)

    def committed(self) -> None:
        """Remove segments that every durable reader has committed, if the format does so automatically. Never raises."""
        if self.format.trims_consumed:
            drop_consumed(self)

    def segment_of(self, sequence: int) -> Segment | None:
        """Return the open segment of a sequence, for the caller to close; None if it was removed."""
        segments = Segments(self.path, self.format)
        base = segments.holding(sequence, segments.bases())
        with suppress(FileNotFoundError):
            return None if base is None else Segment(segments.path_of(base), base)
        return None

    def open_reader(self, name: str, start: Start = "earliest", *, isolation: Isolation = "appended") -> JournalReader:
        self.check_open()
        if not isinstance(name, str):
            raise TypeError(f"a reader's name is str, not {type(name).__name__}")
        with self._home.in_place(self.timeout):
            lease = self.offsets.take(name)
        try:
            return self._iterations.add(self._new_reader(name, start, isolation, lease))
        except BaseException:
            lease.close()
            raise

    def _new_reader(self, name: str, start: Start, isolation: Isolation, lease: Lease) -> JournalReader:
        return JournalReader(self, name, start, isolation, lease)

    def readers(self) -> list[ReaderStats]:
        found = []
        for one in self.consumers():
            lag = None if one.sequence is None else self.lag(one.sequence)
            updated = self.offsets.updated(one.name)
            found.append(ReaderStats(one.name, one.sequence, lag, updated, None, False, lag is None, -1, one.problem))
        return found

    def lag(self, sequence: int) -> Lag:
        return self._places.lag(sequence)

    def consumers(self) -> list[Consumer]:
        """Return the positions of all durable readers, and their lags in records."""
        self.check_open()
        return self.offsets.listing(self.end() if self.offsets.names() else 0)

    def remove_reader(self, name: str | int) -> None:
        self.check_open()
        if not isinstance(name, str):
            raise ValueError(f"{self.path} is a journal: its readers have no slots, so {name!r} is not a reader; give its name")
        with self._home.in_place(self.timeout):
            with suppress(Corruption):  # one with an unreadable position can be deleted nevertheless
                if self.offsets.load(name) is None:
                    raise NoSuchReader(f"{self.path} has no reader {name!r}")
            lease = self.offsets.take(name)
            try:
                self.offsets.remove(name)
            finally:
                lease.close()

    def displace_reader(self, name: str, pid: int) -> None:
        self.offsets.displace(name, pid)

    # Retention.

    @property
    def retention(self) -> Retention | None:
        return self._home.settings().retention

    def set_retention(self, retention: Retention | None, timeout: float | None = None) -> None:
        self.under_lock(self.timeout if timeout is None else timeout, lambda *_: self._change_settings(retention=retention))

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
        return trim.trim(self, retention, before, force, dry_run, self.timeout if timeout is None else timeout, most, elsewhere)

    def first(self) -> int:
        """Return the sequence of the oldest record."""
        return self._places.first()

    def records_from(self, sequence: int) -> int:
        first, end = self.extent()
        return max(0, end - max(sequence, first))

    def segments_to_read(self, most_open: int = OPEN) -> Segments:
        """Return the directory of the segments with its own descriptors, which raises LogVanished as soon as another journal is there."""
        return Segments(self.path, self.format, most_open, self.refuse_another)

    def segments_apart(self) -> Segments:
        """Return the directory of the segments with its own descriptors."""
        return Segments(self.path, self.format)

    # Damage and archives.

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        return verify_journal(self, progress)

    def repair(self, timeout: float | None = None) -> RepairReport:
        return repair_journal(self, self.mode(), self.timeout if timeout is None else timeout)

    def refuse_another(self) -> None:
        """Raise LogVanished if another journal, or none, is at the path; see `journal.home`."""
        self._home.refuse_another()

    def bases(self) -> list[int]:
        """Return the first sequences of all segments, in order. Raises LogNotFound if there is none."""
        return self._places.bases()

    def archive(
        self,
        before: int | None = None,
        *,
        older_than: float | None = None,
        level: int = 3,
        dry_run: bool = False,
        progress: archiving.Progress | None = None,
        timeout: float | None = None,
    ) -> ArchiveReport:
        self.check_open()
        return archiving.archive(self, before, older_than, level, self.timeout if timeout is None else timeout, progress, dry_run=dry_run)

    def unarchive(
        self,
        before: int | None = None,
        *,
        older_than: float | None = None,
        dry_run: bool = False,
        progress: archiving.Progress | None = None,
        timeout: float | None = None,
    ) -> ArchiveReport:
        self.check_open()
        return archiving.unarchive(self, before, older_than, self.timeout if timeout is None else timeout, progress, dry_run=dry_run)

    @property
    def log_id(self) -> bytes:
        """Return the 16 random bytes that identify this journal; none if it was created without; see `ensure_log_id`.

        They don't depend on its records. A copy of its directory has them, too. Raises Corruption for damaged settings.
        """
        if not self._id:
            self._id = self.read_log_id()
        return self._id

    def read_log_id(self) -> bytes:
        return bytes.fromhex(self._home.settings().id)

    def ensure_log_id(self, timeout: float | None = None) -> bytes:
        if not self.log_id:
            self.under_lock(self.timeout if timeout is None else timeout, self._begin_id)
        return self.log_id

    def _begin_id(self, *_: object) -> None:
        """Under the append lock: create the id of a journal without one."""
        if not self.log_id:  # another handle may have been faster
            self._change_settings(id=settings.new_id())

    def _change_settings(self, **changes: Any) -> None:
        """Under the append lock: store the settings with changed fields, also for a journal without settings; on disk."""
        self._home.change(self._codec, self.mode(), changes)

    def stats(self) -> LogStats:
        interval = self.sync_interval if self.durability == "os" else 0.0
        return stats.collect(self._places, self.log_id, self._codec, self.durability, interval, self.consumers())

    def latest_time(self) -> int:
        """Return the latest timestamp, NO_TIME if no record has one; later records get no earlier one. Takes the append lock."""
        return self.under_lock(self.timeout, lambda _, page: page.last_timestamp)

    def mode(self) -> int:
        """Return the permission bits of new files: those of the directory, without the search permission."""
        status = system.port.look_up(self._segments.directory)
        return 0o600 if status is None else 0o600 | (status.st_mode & 0o066)

    def forked(self) -> None:
        """Release the parent's state in a forked child."""
        self._thread_lock = threading.RLock()
        self._places.forked()
        appender, self._appender = self._appender, None
        self._tail = None
        self._flusher.close()
        if appender is not None:
            appender.close()

    def close(self) -> None:
        self._iterations.end(f"{self.path} was closed; open it again")
        self._flusher.end_background()
        with self._thread_lock:
            self._places.is_closed = True
            self._tail = None
            self._flusher.close()
            if self._appender is not None:
                self._appender.close()
                self._appender = None
            self._places.release()
