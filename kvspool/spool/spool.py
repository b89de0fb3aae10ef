"""The spool: one bounded circular log that any number of processes append to and read at once.

**Durability.** When `append` or `append_many` returns, the records are in the page cache: they survive a crash of any process, this one
included, at any instruction. When `sync` returns, or an append with `durable=True`, they survive a crash of the machine. At the level "os"
a thread syncs at an interval, at "disk" every append is durable; the level is the log's, or the handle's.

**Recovery.** A crash of a process needs no recovery: the kernel frees its lock, its unpublished records don't exist, and the next writer
continues. After a crash of the machine the first process that opens the log recovers it; see `recovery`.

**Limits.** A record takes at most a quarter of the ring, a key at most 65,534 bytes.

**A full ring** is handled by the policy, which was chosen when the log was created and never changes. "overwrite": new records overwrite
the oldest ones; a reader that had not reached them gets a Gap. "block": a writer waits for the slowest durable reader, up to its timeout,
then SpoolFull. "raise": SpoolFull at once. The last two consider only durable readers and their uncommitted records: a log without them
overwrites. A reader that makes no progress for `reader_expiry` while records are pending is evicted; its next read reports the Gap.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvspool import system
from kvspool.engine import ledger, locks, times
from kvspool.engine.background import SYNC_INTERVAL, Background
from kvspool.engine.damage import VerifyReport
from kvspool.engine.iteration import Iterations
from kvspool.errors import (
    AGAIN,
    DO_NOT_REPEAT,
    Closed,
    KvspoolError,
    LockTimeout,
    MismatchedPair,
    Moved,
    NotDurable,
    Pinned,
    Poisoned,
    Reentered,
    SpoolFull,
    TooLarge,
    appended_by,
    say_what_is_stored,
)
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import FrameWriter, Single, measure
from kvspool.keyed import Keys, Packer
from kvspool.log import Log
from kvspool.options import DURABILITIES, TIMEOUT, Durability, Isolation, Progress, Start, check_sequence
from kvspool.producers import Booking, ColumnPieces
from kvspool.reader import ReaderStats
from kvspool.record import Codec, check_codec, decode, encode, encode_key, encode_keys, listed
from kvspool.spool import epochs, format, producing, rates, recovery, restored, search, views
from kvspool.spool.appending import Appending, Batch, Outdated, Prepared, Row, RowBatch
from kvspool.spool.cursor import Cursor, end_of, refuse_vanished
from kvspool.spool.durability import Flusher
from kvspool.spool.pair import Pair
from kvspool.spool.reader import SpoolReader, delete, listing, slowest
from kvspool.spool.repair import RepairReport, repair
from kvspool.spool.verify import verify_pair
from kvspool.system import forks, holders

if TYPE_CHECKING:
    import pyarrow

    from kvspool.engine.columns import Columns
    from kvspool.spool.resize import Resized

T = TypeVar("T")
CAPABILITIES = frozenset(("codecs", "keys", "producers", "resize", "timestamps", "types"))
PATIENCE = 5_000_000  # most ns that one step waits for the append lock: signal handlers are delayed for that time


class SpoolStats(msgspec.Struct, frozen=True):
    """The contents of a spool at one moment.

    capacity, used: bytes of the ring, in all and with frames in them. first_sequence: of the oldest record; next_sequence: of the next one
    to be appended. first_timestamp, last_timestamp, created: ns since the Unix epoch, 0 if there is no record. synced_sequence: every
    record below it is on disk; unsynced_records, unsynced_bytes: from there on. reader_expiry: seconds, 0 for never. durability: the level
    of this handle; sync_interval: seconds, for the level "os". sync_error: errno of the first failed flush, 0 if there was none. rates: of
    appends and Gaps. recoveries: how often the log was recovered after a restart of the machine; recovered: the last time, ns since the
    Unix epoch, 0 for never; lost_records, lost_bytes: records of the control block that the last recovery did not find.
    """

    path: str
    format: str
    log_id: str
    policy: str
    reader_expiry: float
    codec: str
    capacity: int
    used: int
    records: int
    first_sequence: int
    next_sequence: int
    first_timestamp: int
    last_timestamp: int
    durability: str
    sync_interval: float
    synced_sequence: int
    unsynced_records: int
    unsynced_bytes: int
    sync_error: int
    created: int
    rates: rates.Rates
    recoveries: int = 0
    recovered: int = 0
    lost_records: int = 0
    lost_bytes: int = 0


class Spool(Single, Log):
    """A handle of a spool; see `Log` for the capabilities of every log.

    A forked child reopens only the files; a deleted log stays deleted. `recovery` is the report if opening it had to recover it after a
    crash of the machine, None otherwise.
    """

    HELPERS = frozenset(
        """
        append_at_once append_booked append_columns append_rows append_slowly change_accounts check_columns ensure_log_id forked
        frame_writer header held is_durable records_from refuse_larger ring
        """.split()
    )

    def __init__(
        self,
        pair: Pair,
        timeout: float = TIMEOUT,
        durability: Durability | None = None,
        sync_interval: float | None = None,
        *,
        is_new: bool = False,
    ) -> None:
        """Take over open files; `timeout`: seconds that a writer waits for another one.

        durability, sync_interval: instead of those in the log's header. is_new: this call of `create` created the log, so there is nothing
        to recover, and nothing can fail here any more.
        """
        Single.__init__(self)
        self.path = pair.path
        self.timeout = timeout
        self.recovery = None if is_new else _settled(pair, timeout)
        self._pair: Pair | None = pair
        self._log_id = pair.header.log_id  # of these files
        self._origin = pair.origin
        self._codec = Codec(pair.header.codec)
        self._packer = self._new_packer(pair)
        self.durability = durability or DURABILITIES[pair.header.durability]
        self.sync_interval = sync_interval or pair.header.sync_interval / 1e9 or SYNC_INTERVAL
        self.is_durable = self.durability == "disk"
        self._flusher: Flusher | None = None
        self._background: Background | None = None
        self._process = -1  # that opened the writer
        self._thread_lock = threading.RLock()
        self._is_forked = False
        self._iterations = Iterations()
        forks.register(self)

    @property
    def kind(self) -> str:
        return "spool"

    @property
    def capabilities(self) -> frozenset[str]:
        return CAPABILITIES

    # Writing.

    def append_slowly(
        self, value: Any, key: Any, type: int, timestamp: int | None, timeout: float | None, durable: bool
    ) -> int:
        """Append records that need more than one step; see `append`."""
        packer = None
        if value.__class__ is bytes:
            codec = 0
        else:
            packer = self._packer
            value, codec = encode(value, self._codec, None if packer is None else packer.pack)
        if key is not None or type or timestamp is not None:
            key = encode_key(key)
            _check(key, type, timestamp)
        writer = self._writer
        if writer is not None and writer.is_one_step:
            era = -1 if packer is None else packer.era
            patience = PATIENCE if timeout is None else min(round(timeout * 1e9), PATIENCE)
            sequence = writer.append(key, value, type, codec, -1 if timestamp is None else timestamp, era, patience)
            if sequence >= 0:
                if writer.has_watchers:
                    self.ring(writer)
                if durable or self.is_durable:
                    self._flush(range(sequence, sequence + 1), timeout)
                return sequence
        packed = None if packer is None else packer.keys
        batch = Prepared([key], [value], type, bytes((codec,)), -1 if timestamp is None else timestamp, packed=packed)
        return self.append_prepared(batch, timeout, durable)[0]

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
        many: Any = values if values.__class__ is list else listed(values)
        many_keys: Any = keys if keys is None or keys.__class__ is list else listed(keys, "keys")
        writer = self._writer
        if writer is not None and writer.is_one_step and not durable and not self.is_durable:
            _check(None, type, timestamp)
            appended = writer.append_many(many_keys, many, type, -1 if timestamp is None else timestamp)
            if appended is not None:
                if writer.has_watchers:
                    self.ring(writer)
                return appended
        return self.append_prepared(self.prepare(many, many_keys, type, timestamp), timeout, durable)

    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> Prepared:
        values = listed(values)  # our own list: it can't change while we wait for the lock
        stored_keys: Any = None if keys is None else listed(keys, "keys")
        _check(None, type, timestamp)
        codecs = packed = None
        longest, stored = measure(stored_keys, values)
        if longest < 0:
            stored_keys = encode_keys(stored_keys)
            _check_keys(stored_keys, values)
            packer = self._packer
            packed = None if packer is None else packer.keys
            values, codecs = _encode_all(values, self._codec, None if packer is None else packer.pack)
            longest, stored = measure(stored_keys, values)
        self.refuse_larger(longest)
        return Prepared(stored_keys, values, type, codecs or bytes(len(values)), -1 if timestamp is None else timestamp, stored, packed)

    def append_prepared(self, batch: Prepared, timeout: float | None = None, durable: bool = False) -> range:
        return self._write(batch, timeout, durable)

    def append_rows(self, rows: list[Row], timeout: float | None = None) -> range:
        """Append records of another log unchanged, each with its type, codec and timestamp, under one lock; see `append_many`.

        Values of codec KEYED are packed with this log's key table, or stored as MessagePack if it has none. Raises Undecodable, too.
        """
        for row in rows:
            _check(row.key, row.type, None if row.timestamp < 0 else row.timestamp)
        packer = self._packer
        batch = RowBatch([self._repacked(row, packer) for row in rows], None if packer is None else packer.keys)
        self.refuse_larger(measure(batch.keys, batch.values)[0])
        return self._write(batch, timeout, False)

    def _repacked(self, row: Row, packer: Packer | None) -> Row:
        if row.codec != Codec.KEYED:
            return row
        if packer is None:
            return row._replace(codec=Codec.MSGPACK)
        return row._replace(value=encode(decode(row.value, Codec.MSGPACK, None), self._codec, packer.pack)[0])

    def _producing(self) -> producing.SpoolProducing:
        return producing.SpoolProducing(self)

    def append_booked(self, batch: Batch, booking: Booking, timeout: float | None, durable: bool) -> None:
        """Append a producer's batch under one lock; see `_write` and `kvspool.producers`."""
        booking.appended = self._write(batch, timeout, durable, booking)

    def change_accounts(self, change: Callable[[producing.Place, int], int], timeout: float | None = None) -> int:
        """Under the append lock: change the list of producers; `change` gets its location and the next sequence. Return its result.

        Raises LockTimeout, Closed; PermissionError without write permission.
        """

        def work(writer: FrameWriter) -> int:
            next_sequence = writer.begin()
            return change(producing.Place.of(self._live()), next_sequence)

        return self._locked(work, self.timeout if timeout is None else timeout)

    def open_to_write(self) -> None:
        self.frame_writer()

    def frame_writer(self) -> FrameWriter:
        """Return the writer of frames of this handle, which belongs to this process."""
        with self._thread_lock:
            return self._open_writer()

    def append_arrow(
        self,
        batch: pyarrow.RecordBatch | pyarrow.Table,
        *,
        codec: int = Codec.RAW,
        timeout: float | None = None,
        durable: bool = False,
        at: int | None = None,
    ) -> range:
        from kvspool.engine import columns

        if at is not None:
            self._refuse("at")
        return self.append_columns([columns.Columns(part) for part in columns.parts(batch)], None, codec, timeout, durable)

    def append_columns(
        self, parts: list[Columns], rows: memoryview | None, codec: int, timeout: float | None = None, durable: bool = False
    ) -> range:
        """Append the given rows (int32 numbers; None: all) of each part; see `append_arrow`."""
        self.check_columns(parts, codec)
        return self._write(ColumnPieces([(part, rows) for part in parts], codec), timeout, durable)

    def check_columns(self, parts: list[Columns], codec: int) -> None:
        """Raise TooLarge if a row doesn't fit into this log, ValueError for an invalid codec."""
        check_codec(codec)
        capacity = self._live().header.capacity
        largest = max((part.largest for part in parts), default=0)
        if _stored(largest) > format.largest_frame(capacity):
            raise TooLarge(_too_large(largest, capacity))

    def sync(self, timeout: float | None = None) -> int:
        with self._thread_lock:
            self._open_writer()
            flusher = self._open_flusher()
        sequence = flusher.sync(self.timeout if timeout is None else timeout)
        # Records from before a resize are on disk, too, but perhaps not those appended since.
        return sequence if self._live() is flusher.pair else self.sync(timeout)

    # Reading.

    def cursor(
        self,
        start: Start = "earliest",
        *,
        bounded: bool = False,
        end: int | None = None,
        isolation: Isolation = "appended",
    ) -> Cursor:
        pair = self._live()
        reader = pair.reader(0, 0)
        place = end_of(reader, isolation) if start == "latest" else search.find(reader, start)
        stop = None
        if bounded:
            stop = end_of(reader, isolation) if end is None else search.find(reader, end)
        return Cursor(pair, place, stop, "overrun", isolation)

    _cursor_at = cursor

    def decode(self, value: bytes, codec: int = Codec.KEYED) -> Any:
        """Decode a stored value of this log, as returned by `read_values` and `read_arrow`; the result is that of `Record.data`.

        Keyed values are decoded with the log's present keys, some of which may have been lost since the value was read; see
        `kvspool.spool.keys`. Raises Undecodable.
        """
        table = self._live().key_table
        return decode(value, codec, None, msgspec.UNSET if table is None else table.keys)

    @contextmanager
    def view(self, sequence: int) -> Iterator[memoryview]:
        with views.view(self.cursor(check_sequence(sequence))) as value:
            yield value

    # Durable readers.

    def reader(self, name: str, start: Start = "earliest", *, isolation: Isolation = "appended") -> SpoolReader:
        return self._iterations.add(SpoolReader(self._live, name, start, self.timeout, isolation))

    def readers(self) -> list[ReaderStats]:
        return listing(self._live())

    def delete_reader(self, name: str | int) -> None:
        delete(self._live, name, self.timeout)

    # Maintenance.

    def stats(self) -> SpoolStats:
        pair = self._live()
        reader = pair.reader(0, 0)
        synced, synced_sequence = reader.word(format.SYNCED), reader.word(format.SYNCED_SEQ)
        position, first = search.find(reader, "earliest")
        tail, next_sequence, last = reader.mark()
        reader.walk(position, tail, 0, 0)
        first_timestamp = reader.timestamp if position < tail else 0
        return SpoolStats(
            path=str(self.path),
            format="spool",
            log_id=self._origin.hex(),
            policy=format.POLICIES[pair.header.policy],
            reader_expiry=pair.header.reader_expiry / 1e9,
            codec=self._codec.name.lower(),
            capacity=pair.header.capacity,
            used=tail - position,
            records=search.count(reader, first, (tail, next_sequence)),
            first_sequence=first,
            next_sequence=next_sequence,
            first_timestamp=first_timestamp,
            last_timestamp=last,
            durability=self.durability,
            sync_interval=self.sync_interval if self.durability == "os" else 0.0,
            synced_sequence=synced_sequence,
            unsynced_records=max(0, next_sequence - max(synced_sequence, first)),
            unsynced_bytes=max(0, tail - max(synced, position)),
            sync_error=reader.word(frames.SYNC_ERROR),
            created=pair.header.created,
            rates=rates.rates(pair.control.cast("Q"), system.port.now()),
            **_recovered(pair),
        )

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        return verify_pair(self._live(), progress)

    def repair(self, timeout: float | None = None) -> RepairReport:
        return repair(self._live().path, timeout=self.timeout if timeout is None else timeout)

    def resize(
        self, capacity: int | str, *, timeout: float | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Resized:
        from kvspool.spool import resize as resizing

        return resizing.resize(self._live, format.ring_size(capacity), self.timeout if timeout is None else timeout, progress)

    @property
    def closed(self) -> bool:
        return self._pair is None

    def has_vanished(self) -> bool:
        """Return whether the log's files were deleted; data in memory can still be read."""
        if self._pair is None:
            raise Closed(f"{self.path} was closed; open it again")
        return self._pair.has_vanished()

    @property
    def log_id(self) -> bytes:
        return self._origin  # also after a resize

    @property
    def header(self) -> format.Header:
        """Return the settings with which the log was created; its capacity is that of the last resize."""
        return self._live().header

    @property
    def capacity(self) -> int:
        """Return the size of the ring in bytes."""
        return self._live().header.capacity

    def end(self) -> int:
        return int(self._live().reader(0, 0).mark()[1])

    def extent(self, isolation: Isolation = "appended") -> tuple[int, int]:
        reader = self._live().reader(0, 0)
        first = search.find(reader, "earliest")[1]
        return first, max(first, end_of(reader, isolation)[1])

    def held(self, sequence: int) -> int:
        """Return how many bytes of the ring are taken by the records from a sequence on."""
        reader = self._live().reader(0, 0)
        position, _ = search.find(reader, sequence)
        return int(reader.mark()[0]) - position

    def records_from(self, sequence: int) -> int:
        """Return the number of records from a sequence on, without numbers left out after a crash of the machine."""
        reader = self._live().reader(0, 0)
        _, first = search.find(reader, "earliest")
        return search.count(reader, max(sequence, first), reader.mark()[:2])

    def close(self) -> None:
        with self._thread_lock:
            if self._writer is not None and self._writer.is_held and self._process == system.port.process_id():
                raise Reentered("a signal handler or destructor may not close a handle during an append to it")
            try:
                self._iterations.end(f"{self.path} was closed; open it again")
                if self._process == system.port.process_id():
                    self._settle()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        """Close writer and files, in an order that leaves a working or closed handle after each step."""
        # The writer of a parent is not touched: one of its threads may have been inside an append at the fork.
        if self._writer is not None and self._process == system.port.process_id():
            self._writer.close()
        self._writer = None
        self._flusher = self._background = None
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def _settle(self) -> None:
        """Flush what the level promises, and end the thread that does it."""
        if self._background is not None:
            self._background.end()
        elif self._flusher is not None and self.is_durable:
            self._flusher.sync(self.timeout)

    def forked(self) -> None:
        """In a forked child: leave the parent's lock alone, and reopen everything on next use."""
        self._thread_lock = threading.RLock()
        self._is_forked = True
        self._flusher = self._background = None
        if self._pair is not None:
            self._pair.forked()

    # Inside.

    def check_open(self) -> None:
        self._live()

    def _live(self) -> Pair:
        """Return the open files; in a forked child, its own ones."""
        if self._is_forked:
            with self._thread_lock:
                self._reopen()
        pair = self._pair
        if pair is None:
            raise Closed(f"{self.path} was closed; open it again")
        return self._follow(pair) if pair.may_have_moved else pair

    def _follow(self, pair: Pair) -> Pair:
        """Return the present files of the log: new ones after a resize, or still these."""
        with self._thread_lock:
            successor = pair.successor()
            if successor is None or self._pair is not pair:
                return self._pair or pair
            # Iterators still read from the old files, which close with the last of them. All of their records are on disk.
            self._writer = self._flusher = self._background = None
            self._log_id = successor.header.log_id
            self._pair = successor
            return successor

    def _reopen(self) -> None:
        if not self._is_forked or self._pair is None:
            return
        pair = Pair(self.path, allow_unsafe_fs=self._pair.allow_unsafe_fs)
        if pair.origin != self._origin:
            pair.close()
            raise MismatchedPair(f"{self.path} is no longer the log that was open before the fork")
        _settled(pair, self.timeout)
        # Iterators from before the fork still read from the old pair, which closes with the last of them.
        self._writer = None
        self._log_id = pair.header.log_id
        self._pair = pair
        self._is_forked = False

    def _open_writer(self) -> FrameWriter:
        """Return a writer that belongs to this process. Call it with the thread lock held."""
        pair = self._live()
        if self._writer is not None and self._process != system.port.process_id():
            # A raw fork without notification: the lock's descriptor is the parent's.
            self.forked()
            pair = self._live()
        if self._writer is None:
            self._process = system.port.process_id()
            writer = pair.writer(self._holder())
            self._flusher = Flusher(pair)
            if self.durability == "os":
                self._background = Background(self._flusher, self.sync_interval, self.timeout)
            self._writer = writer  # last: if it is set everything is, also after an exception from a signal handler
        now = system.port.now()
        if not 0 <= self._writer.look_at - now <= frames.LOOK_EVERY:
            refuse_vanished(pair)
            self._writer.look_at = now + frames.LOOK_EVERY
        return self._writer

    def _open_flusher(self) -> Flusher:
        """Return the flusher for the files of the open writer. Raises Closed after an incomplete `close`."""
        if self._flusher is None:
            raise Closed(f"{self.path} was not closed completely; close it again")
        return self._flusher

    def _holder(self) -> bytes:
        """Return the words that name this handle to waiters for its lock."""
        return system.port.random(16) + struct.pack("<4Q", *holders.ours())

    def _write(self, batch: Batch, timeout: float | None, durable: bool, booking: Booking | None = None) -> range:
        """Append a batch under one lock; see `Appending`. `durable`: and flush it. booking: of a producer's batch."""
        timeout = self.timeout if timeout is None else timeout
        appending = Appending(batch, None if booking is None else partial(self._kept, booking))
        try:
            appended = self._wait_for_room(appending, timeout)
            if (durable or self.is_durable) and appended:
                self._flush(appended, timeout)
            return appended
        except BaseException as error:
            if not appending.stored or appended_by(error):
                raise
            advice = AGAIN if booking is not None else DO_NOT_REPEAT
            say_what_is_stored(error, appending.stored, batch.rows, advice)
            raise

    def _wait_for_room(self, appending: Appending, timeout: float) -> range:
        """Append a batch; wait for the lock, and for room if the policy says so. Neither lock is held while waiting."""
        deadline = system.port.monotonic() + timeout
        pause = locks.FIRST_PAUSE
        left = timeout
        while True:
            try:
                appended = self._locked(appending.attempt, left)
            except Outdated:
                self._packer = packer = self._new_packer(self._live())
                assert packer is not None
                self.refuse_larger(appending.pack_anew(packer))
                left = max(0.0, deadline - system.port.monotonic())
                continue
            if isinstance(appended, range):
                return appended
            pair = self._live()
            left = deadline - system.port.monotonic()
            pinned = appending.pinned
            may_wait = pair.header.policy == format.BLOCK or (pinned is not None and not pair.header.policy)
            if left <= 0 or not may_wait:
                waited = f" within {timeout:g} s" if may_wait else ""
                if pinned is not None:
                    raise Pinned(f"{self.path}: {pinned}{waited and f', and none became free{waited}'}")
                raise SpoolFull(f"{self.path} has no room{waited}: {slowest(pair)}")
            system.port.sleep(min(pause, left))
            pause = min(pause * 1.5, locks.LONGEST_PAUSE)

    def _kept(self, booking: Booking, first: int) -> AbstractContextManager[bool]:
        """Under the lock: account for a producer's batch during the `with` block."""
        return booking.kept(first, producing.Place.of(self._live()))

    def _flush(self, appended: range, timeout: float | None) -> None:
        """Return when the appended records are on disk. Raises Poisoned, or NotDurable for any other error."""
        try:
            flusher = self._flusher
            if flusher is None:  # after a resize, or a close by another thread
                with self._thread_lock:
                    self._open_writer()
                    flusher = self._open_flusher()
            flusher.flush_below(appended.stop, self.timeout if timeout is None else timeout)
        except Poisoned as error:
            error.appended = appended  # type: ignore[attr-defined]
            error.add_note(f"sequences {appended[0]} to {appended[-1]} were appended before, and may not be on disk")
            raise
        except (KvspoolError, OSError) as error:
            raise NotDurable(appended, f"{self.path}: {error}") from error

    def _locked(self, work: Callable[[FrameWriter], T], timeout: float) -> T:
        """Do the work under the append lock, one thread at a time; then ring if a reader asked for it. See `FrameWriter.locked`."""
        left = timeout
        deadline = system.port.monotonic() + timeout
        with self._thread_lock:
            while True:
                writer = self._open_writer()
                pair = self._live()
                try:
                    attempt = partial(writer.locked, partial(self._settled, pair, work))
                    done: T = locks.wait_for(attempt, left, partial(self._describe_holder, pair), partial(locks.rest, writer.lock))
                except Moved:
                    if self._live() is pair:
                        refuse_vanished(pair)
                        pair.stay()
                        if left == 0.0:
                            raise LockTimeout(f"{self.path} was not in place within {timeout:g} s after a resize") from None
                    left = max(0.0, deadline - system.port.monotonic())
                    continue
                if writer.has_watchers:
                    self.ring(writer)
                return done

    def _settled(self, pair: Pair, work: Callable[[FrameWriter], T], writer: FrameWriter) -> T:
        """Under the append lock: do the work, after resolving a producer's batch that a killed process has left."""
        pending = writer.word(frames.PENDING)
        if pending and not writer.word(frames.MOVED):
            ledger.settle(pair.path, pair.origin, pending - 1, writer.mark()[1])
            producing.Place.of(pair).set_pending(0)
        return work(writer)

    def ring(self, writer: FrameWriter) -> None:
        """Wake the readers that watch by inotify. The records are stored, so errors are ignored: readers also poll."""
        writer.has_watchers = False
        pair = self._pair
        if pair is not None:
            with pair.in_use() as is_open, suppress(OSError):
                if is_open:
                    pair.wake()

    def _describe_holder(self, pair: Pair) -> str:
        """Name the last owner of the append lock: a hint, since it may have changed meanwhile."""
        reader = pair.reader(0, 0)
        words = [reader.word(frames.HOLDER + 2 + at) for at in range(4)]
        who = holders.describe(words)
        if not pair.append_lock.is_gate_open():
            return (
                f"handles of the compiled kvspool have {self.path} open; the last writer was {who}. This process runs the interpreted one, "
                f"which appends only while they are closed: build its extension (python setup.py build_ext --inplace), or install a wheel"
            )
        return f"{self.path} is locked by {who}"

    def refuse_larger(self, content: int) -> None:
        """Raise TooLarge for a record with so many bytes of key and value that it doesn't fit into this log."""
        if _stored(content) > format.largest_frame(self.capacity):
            raise TooLarge(_too_large(content, self.capacity))

    def _new_packer(self, pair: Pair) -> Packer | None:
        """Return a packer with the present key table; None if the log has none."""
        table = pair.key_table
        return None if table is None else Packer(partial(self._intern, table.keys), table.keys)

    def _intern(self, known: Keys, keys: list[str]) -> dict[str, int]:
        """Add keys to the key table while there is room, and return the indexes of all keys in it.

        Return none if the log was recovered after the table became `known`: keys then stay in the values, until they are packed again.
        """
        with self._thread_lock:
            self._open_writer()
            flusher = self._open_flusher()
            pair, table = flusher.pair, flusher.pair.key_table
            assert table is not None
            if table.era != known.era:
                return {}
            table.look()
            if not table.is_full and any(key not in table.indexes for key in keys):
                with locks.held(pair.lock, format.KEYS_LOCK, self.timeout, lambda: "another process adds keys"):
                    is_ours = not pair.may_have_moved or pair.is_in_place()
                    # A key table restored from a copy gets no key before a recovery: the next append refuses it.
                    if is_ours and not restored.is_behind(pair.front, pair.control):
                        table.add(keys, flusher.flush_control)
                if not is_ours and self._live() is not pair:
                    return self._intern(known, keys)
            if table.keys is not known:  # of other files: since a fork, for example
                known.names.update(table.keys.names)
            return table.indexes


def _settled(pair: Pair, timeout: float) -> recovery.RecoveryReport | None:
    """Recover the log if the machine was restarted; see `recovery.settle`. The files are closed if that fails."""
    try:
        return recovery.settle(pair, timeout)
    except BaseException:
        pair.close()
        raise


def _recovered(pair: Pair) -> dict[str, int]:
    """Return the fields of SpoolStats about the last recovery."""
    found = epochs.newest(pair.control, pair.header.log_id)
    names = ("recoveries", "recovered", "lost_records", "lost_bytes")
    return {name: 0 if found is None else getattr(found[1], name) for name in names}


def _check(key: bytes | None, type: int, timestamp: int | None) -> None:
    """Raise for arguments that don't fit into a frame."""
    if key is not None:
        if key.__class__ is not bytes:  # no subclass either: the loops copy bytes alone
            raise TypeError(f"a key is bytes, str or None, not {key.__class__.__name__}")
        if len(key) > format.LARGEST_KEY:
            raise TooLarge(f"a key of {len(key)} bytes; at most {format.LARGEST_KEY} are possible")
    if not 0 <= type <= 255:
        raise ValueError(f"a type is 0..255, not {type}")
    if timestamp is not None:
        times.check(timestamp)


def _check_keys(keys: list[Any] | None, values: list[Any]) -> None:
    """Raise for invalid keys, or a wrong number of them."""
    if keys is None:
        return
    if len(values) != len(keys):
        raise ValueError(f"{len(values)} values, but {len(keys)} keys")
    for key in keys:
        _check(key, 0, None)


def _encode_all(values: list[Any], structured: Codec, pack: Callable[[Any], bytes] | None) -> tuple[list[bytes], bytes]:
    """Return the stored bytes of all values, and one byte with the codec of each."""
    pairs = [encode(value, structured, pack) for value in values]
    return [value for value, _ in pairs], bytes(codec for _, codec in pairs)


def _stored(content: int) -> int:
    return (frames.HEADER + content + 7) & ~7


def _too_large(content: int, capacity: int) -> str:
    most = format.largest_frame(capacity)
    return f"a record of {content} bytes takes {_stored(content)} with its header; a ring of {capacity} bytes holds at most {most}"
