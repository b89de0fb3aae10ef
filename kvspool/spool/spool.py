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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvspool import system
from kvspool.engine import locks, times
from kvspool.engine.background import SYNC_INTERVAL, Background
from kvspool.engine.iteration import Iterations
from kvspool.errors import (
    AGAIN,
    DO_NOT_REPEAT,
    Closed,
    KvspoolError,
    LockTimeout,
    MismatchedFiles,
    Moved,
    NotDurable,
    Poisoned,
    Reentered,
    appended_by,
    say_what_is_stored,
)
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import FrameWriter, Single, measure
from kvspool.keyed import Keys, Packer
from kvspool.options import DURABILITIES, TIMEOUT, Durability, Isolation, Progress, Start, check_sequence
from kvspool.producers import BatchTransaction, ColumnPieces, ListedRows, ProducerRows, TableLocation
from kvspool.record import Codec, check_codec, decode, encode, encode_key, listed
from kvspool.spool import format, recovery, search, views
from kvspool.spool.appending import Appending, Kept, Outdated, Prepared, RingBatch, RowBatch, check_fields, prepared, refuse_larger
from kvspool.spool.cursor import RingCursor, end_of, refuse_vanished
from kvspool.spool.durability import SpoolFlusher
from kvspool.spool.eviction import Eviction
from kvspool.spool.readable import ReadableSpool
from kvspool.spool.reader import no_room
from kvspool.spool.spool_files import SpoolFiles
from kvspool.system import forks, holders

if TYPE_CHECKING:
    import pyarrow

    from kvspool.engine.columns import Columns
    from kvspool.engine.damage import VerifyReport
    from kvspool.engine.reports import RepairReport, Resized
    from kvspool.engine.rows import Room, Rows
    from kvspool.engine.stats import LogStats

T = TypeVar("T")
CAPABILITIES = frozenset(("codecs", "keys", "producers", "rename", "resize", "tasks", "timestamps", "types"))
LOOK_EVERY = 1_000_000_000  # ns after which a writer must check whether its log still exists
PATIENCE = 5_000_000  # most ns that one step waits for the append lock: signal handlers are delayed for that time


class Spool(Single, ReadableSpool):
    """A handle of a spool; see `Log` for the capabilities of every log.

    A forked child reopens only the files; a deleted log stays deleted. `recovery` is the report if opening it had to recover it after a
    crash of the machine, None otherwise.
    """

    HELPERS = frozenset(
        """
        append_at_once append_rows append_slowly ensure_log_id forked
        frame_writer header held is_durable refuse_larger ring
        """.split()
    )

    def __init__(
        self,
        files: SpoolFiles,
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
        Single.__init__(self, times.MOST_AHEAD)
        self.path = files.path
        self.timeout = timeout
        self.recovery = None if is_new else recovery.ensure_true(files, timeout)
        self._files: SpoolFiles | None = files
        self._origin = files.origin
        self._codec = Codec(files.header.codec)
        self._packer = self._new_packer(files)
        self.durability = durability or DURABILITIES[files.header.durability]
        self.sync_interval = sync_interval or files.header.sync_interval / 1e9 or SYNC_INTERVAL
        self.is_durable = self.durability == "disk"
        self._eviction = Eviction(files.header.reader_expiry)
        self._flusher: SpoolFlusher | None = None
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

    @property
    def room(self) -> Room:
        from kvspool.engine.rows import SPOOL

        return SPOOL

    def limits(self) -> dict[str, Any]:
        return {"capacity": self.capacity}

    # Writing.

    def append_slowly(
        self, value: Any, key: Any, type: int, timestamp: int | None, timeout: float | None, durable: bool
    ) -> int:
        """Append a record that needs more than one step, as each durable one does; see `Single.append` (`kernel.single_py`)."""
        packer = None
        if value.__class__ is bytes:
            codec = 0
        else:
            packer = self._packer
            value, codec = encode(value, self._codec, None if packer is None else packer.pack)
        if key is not None or type or timestamp is not None:
            key = encode_key(key)
            check_fields(key, type, timestamp)
        writer = self._writer
        if writer is not None:
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
        if writer is not None and not durable and not self.is_durable:
            check_fields(None, type, timestamp)
            appended = writer.append_many(many_keys, many, type, -1 if timestamp is None else timestamp)
            if appended is not None:
                if writer.has_watchers:
                    self.ring(writer)
                return appended
        return self.append_prepared(self.prepare(many, many_keys, type, timestamp), timeout, durable)

    def prepare(
        self, values: Iterable[Any], keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> Prepared:
        batch, longest = prepared(values, keys, type, timestamp, self._codec, self._packer)
        self.refuse_larger(longest)
        return batch

    def append_prepared(self, batch: RingBatch, timeout: float | None = None, durable: bool = False) -> range:
        return self._write(batch, timeout, durable)

    def append_rows(self, rows: Rows, timeout: float | None = None) -> range:
        """Append records of another log unchanged, each with its type, codec and timestamp, under one lock; see `append_many`.

        Values of codec KEYED are packed with this log's key table, or stored as MessagePack if it has none. Raises Undecodable, too.
        """
        batch = RowBatch.of(rows, self._codec, self._packer)
        self.refuse_larger(measure(batch.keys, batch.values)[0])
        return self._write(batch, timeout, False)

    def append_in_transaction(self, rows: ProducerRows, transaction: BatchTransaction, timeout: float | None, durable: bool) -> None:
        batch: Any = rows.batch._replace(stored=0) if isinstance(rows, ListedRows) else rows  # its size is unknown if rows were chosen
        transaction.appended = self._write(batch, timeout, durable, lambda first: transaction.kept(first, self._live().table_location()))

    def change_producers(self, change: Callable[[TableLocation, int], int], timeout: float | None = None) -> int:
        def work(writer: FrameWriter) -> int:
            next_sequence = writer.begin()
            return change(self._live().table_location(), next_sequence)

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
        from kvspool.engine.columns import parts

        if at is not None:
            self._refuse("at")
        columns = [self.columns_of(part, codec) for part in parts(batch)]
        return self._write(self.prepare_columns(columns, codec=codec), timeout, durable)

    def columns_of(self, batch: pyarrow.RecordBatch, codec: int) -> Columns:
        from kvspool.engine.columns import Columns

        return Columns(batch)

    def prepare_columns(self, parts: Sequence[Columns], rows: memoryview | None = None, codec: int = Codec.RAW) -> ColumnPieces:
        check_codec(codec)
        self.refuse_larger(max((part.largest for part in parts), default=0))
        return ColumnPieces([(part, rows) for part in parts], codec)

    def sync(self, timeout: float | None = None) -> int:
        flusher = self._open_flusher()
        sequence = flusher.sync(self.timeout if timeout is None else timeout)
        # Records from before a resize are on disk, too, but perhaps not those appended since.
        return sequence if self._live() is flusher.files else self.sync(timeout)

    # Reading.

    def cursor(
        self,
        start: Start = "earliest",
        *,
        bounded: bool = False,
        end: int | None = None,
        isolation: Isolation = "appended",
    ) -> RingCursor:
        files = self._live()
        reader = files.reader(0, 0)
        place = end_of(reader, isolation) if start == "latest" else search.find(reader, start)
        stop = None
        if bounded:
            stop = end_of(reader, isolation) if end is None else search.find(reader, end)
        return RingCursor(files, place, stop, "overrun", isolation)

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

    # Maintenance.

    def stats(self) -> LogStats:
        from kvspool.spool.stats import stats

        return stats(self._live(), self.durability, self.sync_interval)

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        from kvspool.spool.verify import verify_files

        return verify_files(self._live(), progress)

    def repair(self, timeout: float | None = None) -> RepairReport:
        from kvspool.spool.repair import repair

        return repair(self._live().path, timeout=self.timeout if timeout is None else timeout)

    def resize(
        self, capacity: int | str, *, timeout: float | None = None, progress: Callable[[int, int], None] | None = None
    ) -> Resized:
        from kvspool.spool import resize as resizing

        return resizing.resize(self._live, format.ring_size(capacity), self.timeout if timeout is None else timeout, progress)

    @property
    def closed(self) -> bool:
        return self._files is None

    def has_vanished(self) -> bool:
        if self._files is None:
            raise Closed(f"{self.path} was closed; open it again")
        return self._files.has_vanished()

    @property
    def log_id(self) -> bytes:
        return self._origin  # also after a resize

    @property
    def header(self) -> format.ControlHeader:
        """Return the settings with which the log was created; its capacity is that of the last resize."""
        return self._live().header

    @property
    def capacity(self) -> int:
        return self._live().header.capacity

    def end(self) -> int:
        return int(self._live().reader(0, 0).mark()[1])

    def extent(self, isolation: Isolation = "appended") -> tuple[int, int]:
        reader = self._live().reader(0, 0)
        first = search.find(reader, "earliest")[1]
        return first, max(first, end_of(reader, isolation)[1])

    def held(self, sequence: int) -> int:
        """Return how many bytes of the ring are taken by the records from a sequence on."""
        return search.held(self._live().reader(0, 0), sequence)

    def records_from(self, sequence: int) -> int:
        return search.records_from(self._live().reader(0, 0), sequence)

    def close(self) -> None:
        with self._thread_lock:
            if self._writer is not None and self._writer.is_held and self._process == system.port.process_id():
                raise Reentered("a signal handler or destructor may not close a handle during an append to it")
            try:
                self._iterations.end(f"{self.path} was closed; open it again")
                if self._process == system.port.process_id():
                    self._flush_level()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        """Close writer and files, in an order that leaves a working or closed handle after each step."""
        # The writer of a parent is not touched: one of its threads may have been inside an append at the fork.
        if self._writer is not None and self._process == system.port.process_id():
            self._writer.close()
        self._writer = None
        self._flusher = self._background = None
        if self._files is not None:
            self._files.close()
            self._files = None

    def _flush_level(self) -> None:
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
        if self._files is not None:
            self._files.forked()

    # Inside.

    def check_open(self) -> None:
        self._live()

    def _live(self) -> SpoolFiles:
        """Return the open files; in a forked child, its own ones."""
        if self._is_forked:
            with self._thread_lock:
                self._reopen()
        files = self._files
        if files is None:
            raise Closed(f"{self.path} was closed; open it again")
        return self._follow(files) if files.may_have_moved else files

    def _follow(self, files: SpoolFiles) -> SpoolFiles:
        """Return the present files of the log: new ones after a resize, or still these."""
        with self._thread_lock:
            successor = files.successor()
            if successor is None or self._files is not files:
                return self._files or files
            # Iterators still read from the old files, which close with the last of them. All of their records are on disk.
            self._writer = self._flusher = self._background = None
            self._files = successor
            return successor

    def _reopen(self) -> None:
        if not self._is_forked or self._files is None:
            return
        files = SpoolFiles(self.path, allow_unsafe_fs=self._files.allow_unsafe_fs)
        if files.origin != self._origin:
            files.close()
            raise MismatchedFiles(f"{self.path} is no longer the log that was open before the fork")
        recovery.ensure_true(files, self.timeout)
        # Iterators from before the fork still read from the old pair, which closes with the last of them.
        self._writer = None
        self._files = files
        self._is_forked = False

    def _open_writer(self) -> FrameWriter:
        """Return a writer that belongs to this process. Call it with the thread lock held."""
        files = self._live()
        if self._writer is not None and self._process != system.port.process_id():
            # A raw fork without notification: the lock's descriptor is the parent's.
            self.forked()
            files = self._live()
        if self._writer is None:
            self._process = system.port.process_id()
            # The words that name this handle to waiters for its lock.
            writer = files.writer(system.port.random(16) + struct.pack("<4Q", *holders.ours()))
            writer.guard = self._thread_lock
            self._flusher = SpoolFlusher(files)
            if self.durability == "os":
                self._background = Background(self._flusher, self.sync_interval, self.timeout)
            self._writer = writer  # last: if it is set everything is, also after an exception from a signal handler
        now = system.port.now()
        if not self._writer.looked_at <= now <= self._writer.look_at:
            refuse_vanished(files)
            self._writer.looked_at, self._writer.look_at = now, now + LOOK_EVERY
        return self._writer

    def _open_flusher(self) -> SpoolFlusher:
        """Return the flusher for the files of the writer, which is opened if necessary. Raises Closed after an incomplete `close`."""
        with self._thread_lock:
            self._open_writer()
            if self._flusher is None:
                raise Closed(f"{self.path} was not closed completely; close it again")
            return self._flusher

    def _write(self, batch: RingBatch, timeout: float | None, durable: bool, kept: Kept | None = None) -> range:
        """Append a batch under one lock; see `Appending`. `durable`: and flush it."""
        timeout = self.timeout if timeout is None else timeout
        appending = Appending(batch, self._eviction, kept)
        try:
            appended = self._wait_for_room(appending, timeout)
            if (durable or self.is_durable) and appended:
                self._flush(appended, timeout)
            return appended
        except BaseException as error:
            if not appending.stored or appended_by(error):
                raise
            say_what_is_stored(error, appending.stored, batch.rows, DO_NOT_REPEAT if kept is None else AGAIN)
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
                self.refuse_larger(appending.repack(packer))
                left = max(0.0, deadline - system.port.monotonic())
                continue
            if isinstance(appended, range):
                return appended
            files = self._live()
            left = deadline - system.port.monotonic()
            pinned = appending.pinned
            may_wait = files.header.policy == format.BLOCK or (pinned is not None and not files.header.policy)
            if left <= 0 or not may_wait:
                raise no_room(files, pinned, f" within {timeout:g} s" if may_wait else "")
            system.port.sleep(min(pause, left))
            pause = min(pause * 1.5, locks.LONGEST_PAUSE)

    def _flush(self, appended: range, timeout: float | None) -> None:
        """Return when the appended records are on disk. Raises Poisoned, or NotDurable for any other error."""
        try:
            flusher = self._flusher or self._open_flusher()  # none after a resize, or a close by another thread
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
                files = self._live()
                try:
                    attempt = partial(writer.locked, partial(self._resolved, files, work))
                    done: T = locks.wait_for(attempt, left, files.describe_owner, partial(locks.rest, writer.lock))
                except Moved:
                    if self._live() is files:
                        refuse_vanished(files)
                        files.stay()
                        if left == 0.0:
                            raise LockTimeout(f"{self.path} was not in place within {timeout:g} s after a resize") from None
                    left = max(0.0, deadline - system.port.monotonic())
                    continue
                if writer.has_watchers:
                    self.ring(writer)
                return done

    def _resolved(self, files: SpoolFiles, work: Callable[[FrameWriter], T], writer: FrameWriter) -> T:
        """Under the append lock: do the work, after resolving a producer's batch that a killed process has left."""
        if writer.word(frames.PENDING) and not writer.word(frames.MOVED):
            files.resolve_pending()
        return work(writer)

    def ring(self, writer: FrameWriter) -> None:
        """Wake the readers that watch by inotify. The records are stored, so errors are ignored: readers also poll."""
        writer.has_watchers = False
        files = self._files
        if files is not None:
            files.wake()

    def refuse_larger(self, content: int) -> None:
        """Raise TooLarge for a record with so many bytes of key and value that it doesn't fit into this log."""
        refuse_larger(content, self.capacity)

    def _new_packer(self, files: SpoolFiles) -> Packer | None:
        """Return a packer with the present key table; None if the log has none."""
        table = files.key_table
        return None if table is None else Packer(partial(self._intern, table.keys), table.keys)

    def _intern(self, known: Keys, keys: list[str]) -> dict[str, int]:
        """Add keys to the key table while there is room, and return the indexes of all keys in it.

        Return none if the log was recovered after the table became `known`: keys then stay in the values, until they are packed again.
        """
        with self._thread_lock:
            flusher = self._open_flusher()
            files, table = flusher.files, flusher.files.key_table
            assert table is not None
            if table.era != known.era:
                return {}
            if not files.add_keys(table, keys, flusher.flush_control, self.timeout) and self._live() is not files:
                return self._intern(known, keys)
            if table.keys is not known:  # of other files: since a fork, for example
                known.names.update(table.keys.names)
            return table.indexes
