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

import builtins
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvspool import system
from kvspool.engine import times
from kvspool.engine.background import Background
from kvspool.engine.damage import VerifyReport
from kvspool.engine.iteration import Iterations
from kvspool.errors import AGAIN, Closed, Corruption, LogNotFound, LogVanished, NoSuchReader, NotDurable, OutOfRange
from kvspool.journal import archive as archiving
from kvspool.journal import control as page_file
from kvspool.journal import producing, settings, trim
from kvspool.journal.appender import IS_ONE_STEP, Appender, ProducerStates, Torn
from kvspool.journal.archive import ArchiveReport
from kvspool.journal.control import Control, Page
from kvspool.journal.cursor import Cursor, Place
from kvspool.journal.dropping import Room
from kvspool.journal.durability import SYNC_INTERVAL, Flusher
from kvspool.journal.format import DAMAGED, JUMPED, LAST_SEQUENCE, LAST_TIME, WHOLE, Batch, Format, Rows, joined
from kvspool.journal.index import STRIDE, Index
from kvspool.journal.offsets import Lease, Offsets
from kvspool.journal.reader import Consumer, JournalReader
from kvspool.journal.repair import JournalRepairReport, repair_journal
from kvspool.journal.retention import Retention
from kvspool.journal.segment import Archived
from kvspool.journal.segments import Segment, Segments
from kvspool.journal.settings import Settings
from kvspool.journal.times import time_at
from kvspool.journal.trim import Elsewhere, TrimReport, drop_consumed
from kvspool.journal.verify import verify_journal
from kvspool.journal.walking import last_whole, walk
from kvspool.kernel.tail_py import BUSY, SLOW, Tail
from kvspool.log import Log
from kvspool.options import TIMEOUT, Durability, Isolation, Progress, Start, check_isolation
from kvspool.producers import BatchTransaction
from kvspool.reader import Lag, ReaderStats
from kvspool.record import NO_TIME, Codec, encode, encode_key, encode_keys, listed
from kvspool.system import forks

if TYPE_CHECKING:
    import pyarrow

    from kvspool.journal.columns import JournalColumns, Records

T = TypeVar("T")
RAW = int(Codec.RAW)
INDEXES = 64  # sparse indexes that a handle keeps


class JournalStats(msgspec.Struct, frozen=True):
    """The contents of a journal at one moment.

    segments, used: files, and their size in bytes. first_sequence: of the oldest record; next_sequence: of the next one to be appended.
    first_timestamp, last_timestamp: ns since the Unix epoch, 0 if unknown. synced_sequence: every record below it is on disk. sync_error:
    errno of the first failed flush, 0 if there was none.
    """

    path: str
    format: str
    codec: str
    segments: int
    used: int
    records: int
    first_sequence: int
    next_sequence: int
    first_timestamp: int
    last_timestamp: int
    durability: str
    sync_interval: float
    synced_sequence: int
    sync_error: int
    readers: list[Consumer]

    @property
    def capacity(self) -> int:
        """Return 0: a journal is unbounded."""
        return 0


class Journal(Log):
    """A handle of a journal; see `Log` for the capabilities of every log."""

    HELPERS = frozenset(
        """
        append_in_transaction append_records bases clamped committed control cursor_from end_of_read first forked
        generation lag latest_time locked mode offsets place place_seen prepare_columns readable_end records_from refuse_handler
        segment_of segments_apart under_lock
        """.split()
    )

    def __init__(
        self,
        path: Path,
        format: Format,
        *,
        codec: Codec = Codec.JSON,
        timeout: float = TIMEOUT,
        durability: Durability = "memory",
        sync_interval: float | None = None,
    ) -> None:
        self.path = path
        self.format = format
        self.timeout = timeout
        self.durability = durability
        self.sync_interval = sync_interval or SYNC_INTERVAL
        self._codec = codec
        self._id = b""  # once it is known
        self._segments = Segments(path, format)
        self._looking = threading.RLock()  # one thread at a time uses those segments
        self._indexes: dict[int, Index] = {}
        self._appender: Appender | None = None
        self._tail: Tail | None = None  # of the appender, if an append to it needs no lock between threads
        self._torn: list[Torn] = []
        self._flusher = Flusher(self)
        self._background: Background | None = None
        self._thread_lock = threading.RLock()
        self._is_closed = False
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
        has |= {"producers": form.has_producers, "archive": form.has_archives, "at": True, "trim": True}
        return frozenset(name for name, is_so in has.items() if is_so)

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
                if durable or self.durability == "disk":
                    self._make_durable(sequence, sequence + 1, self.timeout if timeout is None else timeout)
                elif self.durability == "os":
                    self._start_background()
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
    ) -> Batch:
        encoded, codecs = self._encoded(listed(values))
        if timestamp is None:
            timestamp = None if self.format.has_timestamps else 0
        elif self.format.has_timestamps:
            times.refuse_ahead(timestamp)
        else:
            self._refuse("timestamps")
        batch = Batch(encoded, None if keys is None else listed(keys, "keys"), type, timestamp, codecs=codecs)  # type: ignore[arg-type]
        try:
            self._check(batch)
        except TypeError:
            if not any(isinstance(key, str) for key in batch.keys or ()):
                raise
            batch = batch._replace(keys=encode_keys(batch.keys))  # separately, since most keys are bytes and nothing is checked twice
            self._check(batch)
        return batch

    def _encoded(self, values: list[Any]) -> tuple[list[bytes], bytes | None]:
        """Return the bytes of values, and their codecs if they are not all raw."""
        if set(map(builtins.type, values)) <= {bytes}:
            return values, None
        encoded = [encode(value, self._codec) for value in values]
        return [value for value, _ in encoded], bytes(codec for _, codec in encoded)

    def append_batch(self, batch: Batch, timeout: float | None = None, durable: bool = False, at: int | None = None) -> range:
        """Append encoded records, each with its own type and time if given; see `append_many`.

        at: the required sequence of the first one; in the format kvj it may be later than the next one. Raises OutOfRange if it is
        impossible.
        """
        self._check(batch)
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
        from kvspool.journal.columns import JournalColumns

        columns = [JournalColumns(part, codec) for part in parts(batch)]
        return self.append_prepared(self.prepare_columns(columns), timeout, durable, at)

    def prepare_columns(self, parts: list[JournalColumns], rows: memoryview | None = None) -> Rows:
        """Prepare and check a batch for `append_prepared`: the given rows (int32 numbers; None: all) of each part."""
        from kvspool.journal.columns import ColumnRows

        for part in parts:
            if not self.format.has_timestamps and part.has_times:
                self._refuse("timestamps")
            if not self.format.has_codecs and part.has_codecs:
                self._refuse("codecs")
        if not self.format.has_columns:
            batch = joined([part.listed(rows) for part in parts])
            if not self.format.has_timestamps:
                batch = batch._replace(timestamp=0, timestamps=None)
            self._check(batch)
            return batch
        for part in parts:
            self.format.check_columns(part)
        return ColumnRows(parts, [rows] * len(parts))

    def append_records(self, records: Records, at: int, expected: int | None = None) -> range:
        """Append records laid out by `journal.columns.Records`, in the format kvj; see `append_batch`. expected: as for
        `append_prepared`.
        """
        self.format.check_columns(records)
        return self.append_prepared(records, at=at, expected=expected)

    def append_prepared(
        self, batch: Rows, timeout: float | None = None, durable: bool = False, at: int | None = None, expected: int | None = None
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
        self._apply_durability(sequences, timeout, durable)
        return sequences

    def _apply_durability(self, sequences: range, timeout: float, durable: bool) -> None:
        """Apply the durability level to appended records."""
        if durable or self.durability == "disk":
            self._make_durable(sequences.start, sequences.stop, timeout)
        elif self.durability == "os":
            self._start_background()

    def append_in_transaction(self, rows: Rows, transaction: BatchTransaction, timeout: float | None, durable: bool) -> None:
        """Append a prepared batch of a producer under one lock; see `kvspool.producers`."""
        timeout = self.timeout if timeout is None else timeout

        def work(appender: Appender, page: Page) -> range:
            with transaction.kept(page.next_sequence, producing.JournalProducing(self).location(appender.control)) as may_append:
                return appender.append(rows, page, advice=AGAIN) if may_append and rows.rows else range(0)

        sequences = self.under_lock(timeout, work)
        if sequences:
            self._apply_durability(sequences, timeout, durable)

    def _producing(self) -> producing.JournalProducing:
        return producing.JournalProducing(self)

    def _check(self, batch: Batch) -> None:
        """Raise TypeError, ValueError or TooLarge for an invalid batch."""
        for name, many in (("keys", batch.keys), ("types", batch.types), ("timestamps", batch.timestamps)):
            if many is not None and len(many) != len(batch.values):
                raise ValueError(f"{len(many)} {name} for {len(batch.values)} values; there must be one for each")
        kinds = set(map(builtins.type, batch.keys or ()))
        if not kinds <= {bytes, NoneType}:
            raise TypeError(f"a key is bytes, str or None, not {', '.join(kind.__name__ for kind in kinds - {bytes, NoneType})}")
        types, times = batch.types or (batch.type,), batch.timestamps or (batch.timestamp or 0,)
        if not 0 <= min(types) <= max(types) <= 255:
            raise ValueError("a type is a number from 0 to 255")
        if not NO_TIME <= min(times) <= max(times) <= LAST_TIME:
            raise ValueError("a timestamp is ns since 1970 in 64 bits, signed")
        if not self.format.has_keys and bytes in kinds:
            self._refuse("keys")
        if not self.format.has_types and any(types):
            self._refuse("types")
        if not self.format.has_timestamps and not {0, NO_TIME}.issuperset(times):
            self._refuse("timestamps")
        self.format.check(batch)

    def _make_durable(self, first: int, end: int, timeout: float) -> None:
        """Return when the records from `first` up to `end` are on disk. Raises NotDurable."""
        try:
            self._flusher.flush_below(end, timeout)
        except Exception as error:
            raise NotDurable(range(first, end), str(error)) from error

    def _start_background(self) -> None:
        with self._thread_lock:
            if self._background is None or not self._background.is_ours:
                self._background = Background(self._flusher, self.sync_interval, self.timeout)

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
            if self.has_vanished():
                raise LogVanished(f"{self.path} was deleted while it was open; open it again if it exists")
            mode = self.mode()
            self.format.prepare(self.path)
            control = Control(self.format.lock_file(self.path), mode)
            try:
                room = Room(self.format, self.offsets) if self.format.total_bytes or self.format.trims_consumed else None
                producers = ProducerStates(self.path, lambda: self.log_id) if self.format.has_producers else None
                appender = Appender(self.segments_apart(), control, mode, timeout, self._torn, room, trim.on_roll(self), producers)
            except BaseException:
                control.close()
                raise
            self._appender = appender
        if IS_ONE_STEP:
            self._tail = appender.control.tail
        return appender

    def open_to_write(self) -> None:
        with self._thread_lock:
            self._open_appender(self.timeout)

    def control(self, timeout: float) -> Control:
        """Return the lock file of this handle, open for writing."""
        appender = self._appender
        if appender is not None and appender.process == system.port.process_id() and not self._is_closed:
            return appender.control
        with self._thread_lock:
            return self._open_appender(timeout).control

    def sync(self, timeout: float | None = None) -> int:
        self.check_open()
        return self._flusher.sync(self.timeout if timeout is None else timeout)

    @property
    def torn(self) -> list[Torn]:
        """Return the bytes that this handle had to cut from the end before it could append."""
        return self._torn

    # Reading.

    def _cursor_at(self, start: Start, *, bounded: bool = False, end: int | None = None, isolation: Isolation = "appended") -> Cursor:
        if bounded and end is None:
            end = self.end_of_read(isolation)
        return self.cursor_from(self.place_seen(start, isolation), end, isolation)

    def end_of_read(self, isolation: Isolation) -> int:
        """Return the sequence at which a read of the present records ends."""
        return self.readable_end() if check_isolation(isolation) == "appended" else self.extent(isolation)[1]

    def place_seen(self, start: Start, isolation: Isolation) -> Place:
        """Return the place of a start; with the isolation "synced" the latest one is the end of the records on disk."""
        return self.place(self.extent(isolation)[1] if start == "latest" and check_isolation(isolation) == "synced" else start)

    def cursor_from(self, place: Place, end: int | None, isolation: Isolation = "appended") -> Cursor:
        self.check_open()
        limit = self._synced if check_isolation(isolation) == "synced" else None
        if limit is None and end is None and self.format.reads_zeros and self._word_before_restart() is not None:
            limit = self._until_recovered
        return Cursor(Segments(self.path, self.format, most_open=1), place, end, limit)  # it only goes forward

    def cursor(
        self,
        start: Start = "earliest",
        *,
        bounded: bool = False,
        end: int | None = None,
        isolation: Isolation = "appended",
    ) -> Cursor:
        found = self._cursor_at(start, bounded=bounded, end=end, isolation=isolation)
        with self._looking:
            self._segments.close()  # of many logs even one descriptor each would be too many
        return found

    def has_vanished(self) -> bool:
        """Return whether the journal was deleted."""
        return system.port.look_up(self._segments.directory) is None

    @property
    def closed(self) -> bool:
        return self._is_closed

    # Positions.

    def sequence_at(self, start: Start) -> int:
        return self.place(start).sequence

    def end(self) -> int:
        return self._end(self._bases())[0].sequence

    def extent(self, isolation: Isolation = "appended") -> tuple[int, int]:
        try:  # no file stays open
            first, end = self.first(), self.end()
            if check_isolation(isolation) == "synced":
                end = min(end, self._synced())
            return first, max(first, end)
        finally:
            with self._looking:
                self._segments.close()

    def readable_end(self) -> int:
        """Return the sequence at which a read of the present records ends; no end if damage hides it, so that reading reaches the
        damage.
        """
        place, stop = self._end(self._bases())
        return LAST_SEQUENCE if stop in (DAMAGED, JUMPED) else place.sequence

    def __len__(self) -> int:
        """As for every log, and no more than the segments have room for: `list` makes room for so many before it reads."""
        least = self.format.least_bytes
        return min(super().__len__(), sum(self._segments.size_of(base) // least for base in self._bases()))

    def place(self, start: Start) -> Place:
        """Return the place of a start: "earliest", "latest", a sequence, or an aware datetime.

        A trimmed sequence gives the oldest place, with that sequence expected: reading then reports the Gap. Raises OutOfRange for a
        sequence after the next one, and for a time if records have none; ValueError for anything else.
        """
        bases = self._bases()
        if start == "latest":
            return self._end(bases)[0]
        if start == "earliest":
            return Place(bases[0], 0, bases[0])
        if isinstance(start, datetime):
            return self._place_of_time(start, bases)
        if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
            return self._place_of(start, bases)
        raise ValueError(f'start is a sequence, "earliest", "latest" or an aware datetime, not {start!r}')

    def clamped(self, sequence: int) -> int:
        """Return a stored sequence, or the end if that is earlier: the journal was cut, or restored from a backup."""
        return min(sequence, self.end())

    def _place_of(self, sequence: int, bases: list[int]) -> Place:
        base = self._segments.holding(sequence, bases)
        if base is None:
            return Place(bases[0], 0, sequence)
        if sequence == base:
            return Place(base, 0, sequence)
        end, _ = self._end(bases)
        if sequence > end.sequence:
            raise OutOfRange(f"sequence {sequence} has not been written yet; the next one of {self.path} is {end.sequence}")
        if sequence == end.sequence:
            return end
        found = Place(base, 0, base)
        with suppress(Corruption):  # of its header: reading skips that
            found = self._seek(base, until=sequence) or found
        there = -1 if found.sequence == sequence else found.sequence  # it stopped earlier, at damage: reading will pass it
        return found._replace(sequence=sequence, there=there)

    def _place_of_time(self, time: datetime, bases: list[int]) -> Place:
        self.format.refuse_time()
        if time.tzinfo is None:
            raise ValueError(f"a time without a zone is ambiguous: {time}; pass an aware datetime")
        before = min(round(time.timestamp() * 1e6) * 1000 - 1, LAST_TIME)
        if before < NO_TIME:  # a time that is earlier than any that a record can have
            return Place(bases[0], 0, bases[0])
        base = self._last_begun(before, bases)
        place = Place(base, 0, base)
        with suppress(Corruption):  # of its header: reading skips that
            place = self._seek(base, timestamp=before) or place
        return self._pass(place, before)[0]

    def _last_begun(self, before: int, bases: list[int]) -> int:
        """Return the last segment whose first timestamp isn't later than `before`; the first segment if there is none.

        A segment without a timestamp is skipped to the left, once.
        """
        found, low, high = bases[0], 1, len(bases) - 1
        while low <= high:
            middle = at = (low + high) // 2
            while (time := self._first_sound_time(bases[at])) is None and at > low:
                at -= 1
            if time is None:
                low = middle + 1
            elif time <= before:
                found, low = bases[at], middle + 1
            else:
                high = at - 1
        return found

    def _pass(self, place: Place, before: int) -> tuple[Place, int | None]:
        """Skip the records of a segment that aren't later than a time, and the damage before each of them.

        Return the place after them, and the timestamp of the next record in the segment, None if there is none.
        """
        while (found := self._time_from(place)) is not None and found[0] <= before:
            place = self._walk_on(found[1], before)
        return place, None if found is None else found[0]

    def _walk_on(self, place: Place, before: int) -> Place:
        """Return the place in the same segment after the following records that aren't later than a time."""
        with self._looking:
            segment = self._segments.get(place.base)
            if segment is None:
                return place
            found = walk(self.format, segment, place.position, place.sequence, segment.size(), timestamp=before)
            return Place(place.base, found.size, found.sequence)

    def _first_time(self, base: int, *, is_checked: bool = False) -> int:
        """Return the timestamp of a segment's first record, from the head of its frame; LAST_TIME if it has none, or a damaged one.

        is_checked: LAST_TIME as well for a record whose checksum isn't compared, since it is too large.
        """
        with self._looking:
            segment = self._segments.get(base)
            if segment is None:
                return LAST_TIME
            begin = self.format.header_bytes
            if not isinstance(segment, Archived):
                with suppress(Corruption):  # of the header: the frames may be sound
                    begin = self._segments.begin_of(segment)
            found = time_at(self.format, segment, begin, base, is_checked=is_checked)
            return LAST_TIME if found is None else found

    def _first_sound_time(self, base: int) -> int | None:
        """Return the first timestamp in a segment, of a wholly sound record; None if no such record there has one."""
        time = LAST_TIME
        with suppress(Corruption):  # of an archive: reading reports it
            time = self._first_time(base, is_checked=True)
        return time if NO_TIME < time < LAST_TIME else self._pass(Place(base, 0, base), NO_TIME)[1]

    def _time_from(self, place: Place) -> tuple[int, Place] | None:
        """Return the timestamp of the first sound record from a place on, and the place after it; None if the segment has none."""
        with self._looking:
            cursor = Cursor(self._segments, place, None)
            times: list[int] = []
            with suppress(Corruption):
                while cursor.fetch(1, lambda sequence, time, *_: time, times) is not None:
                    pass
            if not times or cursor.base != place.base:
                return None
            return times[0], Place(cursor.base, cursor.position, cursor.sequence)

    def _seek(self, base: int, until: int | None = None, timestamp: int | None = None) -> Place | None:
        """Return the place of a sequence, or after a time, in a segment; None if the segment was removed."""
        with self._looking:
            segment = self._segments.get(base)
            if segment is None:
                return None
            known = None if until is None else self.format.place_in(base, until)
            if known is not None and until is not None:
                return Place(base, known, until)
            begin, size = self._segments.begin_of(segment), segment.size()
            start, sequence = begin, base
            if size - begin > STRIDE:
                start, sequence = self._index(base).start(segment, begin, until, timestamp, size)
            found = walk(self.format, segment, start, sequence, size, until, timestamp)
            return Place(base, found.size, found.sequence)

    def _index(self, base: int) -> Index:
        """Return the index of a segment. Those of the last used segments are kept."""
        index = self._indexes.pop(base, None)
        if index is None:
            index = Index(self.format, base, self._segments.index_path(base))
        self._indexes[base] = index
        if len(self._indexes) > INDEXES:
            del self._indexes[next(iter(self._indexes))]
        return index

    def _end(self, bases: list[int]) -> tuple[Place, int]:
        """Return the place after the last record, according to the writers if the last segment agrees, otherwise according to its frames;
        and the state of the bytes there: SHORT for a part of a frame, DAMAGED or JUMPED for others.
        """
        with self._looking:
            page = page_file.look(self.format.lock_file(self.path))
            segment = self._segments.get(bases[-1])
            if segment is None:
                return self._end(self._bases()) if self._segments.bases() else (Place(bases[-1], 0, bases[-1]), WHOLE)
            size = segment.size()
            if page.base == segment.base and page.end == size and page.end:
                return Place(page.base, page.end, page.next_sequence), WHOLE
            begin, sequence = self._segments.begin_of(segment), segment.base
            if not begin and self.format.header_bytes:
                return Place(segment.base, 0, segment.base), WHOLE  # it is being created
            size = max(size, begin)  # the header may have been written after the size was read
            if page.base == segment.base and begin <= page.end <= size:
                begin, sequence = page.end, page.next_sequence
            found = last_whole(self.format, segment, begin, sequence, size)
            before = self._word_before_restart() if self.format.reads_zeros else None
            if before is not None:
                found = self.format.true_end(segment, begin, found, before.synced_sequence)
            return Place(segment.base, found.size, found.sequence), found.stop

    def _word_before_restart(self) -> Page | None:
        """Return the writers' last page from before a restart of the machine, if the segments were not checked since."""
        page = page_file.last_word(self.format.lock_file(self.path))
        return page if page.magic == page_file.MAGIC and page.boot != system.port.boot_id() else None

    def _until_recovered(self) -> int:
        """Return the end of the readable records: none that the next writer would cut."""
        return LAST_SEQUENCE if self._word_before_restart() is None else self.end()

    def _synced(self) -> int:
        return page_file.look(self.format.lock_file(self.path)).synced_sequence

    def check_open(self) -> None:
        if self._is_closed:
            raise Closed(f"{self.path} was closed; open it again")

    def _bases(self) -> list[int]:
        self.check_open()
        try:
            bases = self._segments.bases()
        except FileNotFoundError:
            raise LogNotFound(f"{self._segments.directory} does not exist; was the journal deleted?") from None
        if not bases:
            known = page_file.look(self.format.lock_file(self.path)).next_sequence
            return [max(known, self.format.first(self.path))]  # where the first writer will begin
        return bases

    def generation(self) -> int:
        """Return a number that changes, under the append lock, whenever records may have been replaced by others of the same sequence."""
        return 0

    # Durable readers.

    def flush_for_commit(self, sequence: int) -> None:
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

    def reader(self, name: str, start: Start = "earliest", *, isolation: Isolation = "appended") -> JournalReader:
        self.check_open()
        if not isinstance(name, str):
            raise TypeError(f"a reader's name is str, not {type(name).__name__}")
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
        """Return the lag of a sequence."""
        first, end = self.extent()
        begin = max(first, sequence)
        if begin >= end:
            return Lag(0, 0, 0.0)
        place = self.place(begin)
        bases = [base for base in self._bases() if base >= place.base]
        size = sum(map(self._segments.size_of, bases))
        found = self._time_from(place) if self.format.has_timestamps else None
        age = 0.0 if found is None or found[0] == NO_TIME else max(0.0, (system.port.now() - found[0]) / 1e9)
        return Lag(end - begin, max(0, size - place.position), age)

    def consumers(self) -> list[Consumer]:
        """Return the positions of all durable readers, and their lags in records."""
        end = self.end()
        found = []
        for name in self.offsets.names():
            try:
                sequence = self.offsets.load(name)
            except (OSError, ValueError, Corruption) as error:
                found.append(Consumer(name, None, 0, str(error)))
                continue
            if sequence is not None:
                found.append(Consumer(name, sequence, max(0, end - sequence)))
        return found

    def delete_reader(self, name: str | int) -> None:
        self.check_open()
        if not isinstance(name, str):
            raise ValueError(f"{self.path} is a journal: its readers have no slots; {name!r} is not a reader's name")
        with suppress(Corruption):  # one with an unreadable position can be deleted nevertheless
            if self.offsets.load(name) is None:
                raise NoSuchReader(f"{self.path} has no reader {name!r}")
        lease = self.offsets.take(name)
        try:
            self.offsets.remove(name)
        finally:
            lease.close()

    # Retention.

    @property
    def retention(self) -> Retention | None:
        return trim.own(self)

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
        elsewhere: Elsewhere = dict,
    ) -> TrimReport:
        return trim.trim(self, retention, before, force, dry_run, self.timeout if timeout is None else timeout, most, elsewhere)

    def first(self) -> int:
        """Return the sequence of the oldest record."""
        return self._bases()[0]

    def records_from(self, sequence: int) -> int:
        """Return the number of records from a sequence on, according to the numbers."""
        try:
            return max(0, self.end() - max(sequence, self.first()))
        finally:
            with self._looking:
                self._segments.close()

    def segments_apart(self) -> Segments:
        """Return the directory of the segments with its own descriptors."""
        return Segments(self.path, self.format)

    # Damage.

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        return verify_journal(self, progress)

    def repair(self, timeout: float | None = None) -> JournalRepairReport:
        return repair_journal(self, self.mode(), self.timeout if timeout is None else timeout)

    def bases(self) -> list[int]:
        """Return the first sequences of all segments, in order. Raises LogNotFound if there is none."""
        return self._bases()

    # Archives.

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
        timeout = self.timeout if timeout is None else timeout
        return archiving.archive(self, before, older_than, level, timeout, progress, dry_run=dry_run)

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
        timeout = self.timeout if timeout is None else timeout
        return archiving.unarchive(self, before, older_than, timeout, progress, dry_run=dry_run)

    # Other methods.

    @property
    def log_id(self) -> bytes:
        """Return the 16 random bytes that identify this journal; none if it was created without; see `ensure_log_id`.

        They don't depend on its records. A copy of its directory has them, too. Raises Corruption for damaged settings.
        """
        if not self._id:
            self._id = self.read_log_id()
        return self._id

    def read_log_id(self) -> bytes:
        found = settings.load(self.format.sidecar(self.path))
        return b"" if found is None else bytes.fromhex(found.id)

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
        directory = self.format.sidecar(self.path)
        found = settings.load(directory)
        if found is None:
            found = Settings(format=self.format.name, limits=self.format.limits(), codec=self._codec.name.lower())
        settings.store(directory, msgspec.structs.replace(found, **changes), self.mode())

    def stats(self) -> JournalStats:
        bases = self._bases()
        end, _ = self._end(bases)
        page = page_file.look(self.format.lock_file(self.path))
        sizes = [system.port.look_up(self._segments.path_of(base)) for base in bases]
        return JournalStats(
            path=str(self.path),
            format=self.format.name,
            codec=self._codec.name.lower(),
            segments=sum(status is not None for status in sizes),
            used=sum(status.st_size for status in sizes if status is not None),
            records=end.sequence - bases[0],
            first_sequence=bases[0],
            next_sequence=end.sequence,
            first_timestamp=self._shown(self._first_time(bases[0])) if self.format.has_timestamps else 0,
            last_timestamp=self._shown(page.last_timestamp) if self.format.has_timestamps else 0,
            durability=self.durability,
            sync_interval=self.sync_interval if self.durability == "os" else 0.0,
            synced_sequence=page.synced_sequence,
            sync_error=page.sync_error,
            readers=self.consumers(),
        )

    def latest_time(self) -> int:
        """Return the latest timestamp, NO_TIME if no record has one; later records get no earlier one. Takes the append lock."""
        return self.under_lock(self.timeout, lambda _, page: page.last_timestamp)

    def _shown(self, timestamp: int) -> int:
        return 0 if timestamp in (NO_TIME, LAST_TIME) else timestamp

    def mode(self) -> int:
        """Return the permission bits of new files: those of the directory, without the search permission."""
        status = system.port.look_up(self._segments.directory)
        return 0o600 if status is None else 0o600 | (status.st_mode & 0o066)

    def forked(self) -> None:
        """Release the parent's state in a forked child."""
        self._thread_lock, self._looking = threading.RLock(), threading.RLock()
        appender, self._appender = self._appender, None
        self._tail = None
        self._flusher.close()
        if appender is not None:
            appender.close()

    def close(self) -> None:
        self._iterations.end(f"{self.path} was closed; open it again")
        background, self._background = self._background, None
        if background is not None and background.is_ours:
            background.end()
        with self._thread_lock:
            self._is_closed = True
            self._tail = None
            self._flusher.close()
            if self._appender is not None:
                self._appender.close()
                self._appender = None
            with self._looking:
                self._segments.close()
