"""The target of a copy: a spool, a journal or a queue, filled with batches of columns."""

from __future__ import annotations

import builtins
from abc import abstractmethod
from pathlib import Path
from typing import Any

from kvspool.engine import sizes, times
from kvspool.engine.moving import Target
from kvspool.engine.rows import AROUND, BYTES, SPOOL, VALUES, Rows, any_key, rows_of
from kvspool.errors import OtherRecords, OutOfRange, SpoolFull, TooLarge
from kvspool.journal import Journal, JournalBatch
from kvspool.journal.formats import FORMATS
from kvspool.kernel.frames import measure
from kvspool.log import Log
from kvspool.opening import logs
from kvspool.record import NO_TIME, Codec
from kvspool.spool import Spool
from kvspool.system.handles import Handle
from kvspool.transfer import queues

LONGEST_ENTRY = 65535  # bytes, in a queue
NO_LIMITS = ("codec", "mode", "durability", "sync_interval", "timeout", "allow_unsafe_fs")  # of `kvspool.create` for a journal


class CopyTarget(Target):
    """The target of a copy. may_leave_out: sequences; has_sequences: a queue has none.

    is_lossy: a spool may overwrite the oldest records of the copy, and gives times too far ahead the present one; since: the sequence of
    the first of them.
    """

    may_leave_out = False
    has_sequences = True
    is_lossy = False
    since = 0

    @abstractmethod
    def range(self) -> range:
        """Return the present sequences; of a queue, the numbers of its entries."""

    @abstractmethod
    def last(self) -> Rows | None:
        """Return the last record; None if it can't be read."""

    @abstractmethod
    def sync(self) -> None:
        """Flush all to disk."""


class LogTarget(CopyTarget, Handle):
    """A log of any kind."""

    _log: Spool | Journal

    def range(self) -> range:
        return range(*self._log.extent())

    def last(self) -> Rows | None:
        there = self.range()
        if not there:
            return None
        items = list(self._log.read(there.stop - 1, on_gap="skip"))
        return rows_of(items[:1]) if items else None

    def sync(self) -> None:
        self._log.sync()

    def close(self) -> None:
        self._log.close()


class JournalTarget(LogTarget):
    """A journal of any format."""

    _log: Journal

    def __init__(self, log: Journal) -> None:
        super().__init__(log.path)
        self._log = log
        self.format = log.format.name
        self.room = log.room
        self.may_leave_out = log.format.may_leave_out
        if log.format.has_timestamps:
            self.last_time = log.latest_time()

    def check(self, rows: Rows) -> None:
        self._log.format.check(self._batch(rows))

    def _batch(self, rows: Rows) -> JournalBatch:
        room = self.room
        return JournalBatch(
            rows.values,
            rows.keys if room.keys and any_key(rows) else None,
            types=rows.types if room.types else None,
            timestamps=rows.timestamps if room.timestamps else None,
            codecs=rows.codecs.replace(bytes([Codec.KEYED]), bytes([Codec.MSGPACK])) if room.codecs else None,
        )

    def append(self, rows: Rows, at: int | None = None) -> range:
        try:
            return self._log.append_batch(self._batch(rows), at=at)
        except OutOfRange as error:
            raise OtherRecords(f"another program appends to the target of the copy: {error}") from error


class SpoolTarget(LogTarget):
    """A spool."""

    _log: Spool
    format = "spool"
    room = SPOOL

    def __init__(self, log: Spool) -> None:
        super().__init__(log.path)
        self._log = log
        self.most = min(BYTES, log.capacity // 8)
        self.last_time = log.stats().last_timestamp

    def check(self, rows: Rows) -> None:
        longest = max(map(len, filter(None, rows.keys)), default=0)
        if longest > 65534:
            raise TooLarge(f"a key of {longest} bytes; a frame has room for 65534")
        if not self.is_lossy and (latest := max(rows.timestamps)) > 0:
            times.check(latest)
        self._log.refuse_larger(measure(rows.keys, rows.values)[0])

    def too_late(self, rows: Rows) -> int | None:
        most = times.latest()
        if max(rows.timestamps) <= most:
            return None
        return rows.first + next(row for row, timestamp in enumerate(rows.timestamps) if timestamp > most)

    def append(self, rows: Rows, at: int | None = None) -> range:
        if self.is_lossy:
            most = times.latest()
            rows = rows._replace(timestamps=[NO_TIME if timestamp > most else timestamp for timestamp in rows.timestamps])
        self._refuse_overwriting(rows)
        appended = self._log.append_rows(rows)
        if at not in (None, appended.start):
            raise OtherRecords(f"another program appends to {self.path}: expected sequence {at}, got {appended.start}")
        return appended

    def _refuse_overwriting(self, rows: Rows) -> None:
        longest, stored = measure(rows.keys, rows.values)
        if not self.is_lossy and self._log.held(self.since) + stored + longest + AROUND > self._log.capacity:
            raise SpoolFull(
                f"{self.path} has room for the records before {rows.first}; later ones would overwrite records of the copy. "
                "Give it a larger capacity (kvspool resize), and copy again: the copy continues there"
            )


class QueueTarget(CopyTarget):
    """A queue."""

    format = "queue"
    room = VALUES
    has_sequences = False

    def __init__(self, queue: Any) -> None:
        super().__init__(queue.path)
        self.queue = queue

    def range(self) -> range:
        return range(self.queue.qsize())

    def last(self) -> Rows | None:
        return None

    def check(self, rows: Rows) -> None:
        longest = max(map(len, rows.values))
        if longest > LONGEST_ENTRY:
            raise TooLarge(f"a value of {longest} bytes; an entry of a queue has {LONGEST_ENTRY} at most")

    def append(self, rows: Rows, at: int | None = None) -> builtins.range:
        self.queue.put_many(rows.values)
        return builtins.range(len(rows.values)) if at is None else builtins.range(at, at + len(rows.values))

    def sync(self) -> None:
        self.queue.sync()

    def close(self) -> None:
        self.queue.close()


def exists(path: Path) -> bool:
    """Return whether a path exists, so that no log can be created there."""
    return path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir()))


def open(path: Path, timeout: float) -> CopyTarget:
    """Open an existing target. Raises the errors of `kvspool.open`."""
    if queues.is_queue(path):
        return QueueTarget(queues.open(path))
    return of(logs.open(path, timeout=timeout))


def of(log: Log) -> SpoolTarget | JournalTarget:
    """Return an open log as a target."""
    kind: Any = JournalTarget if "at" in log.capabilities else SpoolTarget
    return kind(log)  # type: ignore[no-any-return]


def create(path: Path, format: str, first: int, options: dict[str, Any]) -> CopyTarget:
    """Create a log and open it. first: the sequence of its first record, if the format permits it."""
    if format == "queue":
        return QueueTarget(queues.create(path, **options))
    if format == "spool":
        return SpoolTarget(logs.create(path, **options))
    known = FORMATS.get(format)
    limits = {name: sizes.parse(value) for name, value in options.items() if name not in NO_LIMITS}
    may_begin = known is not None and known(**limits).name_of(first) is not None
    log: Any = logs.create(path, format=format, first_sequence=first if may_begin else 0, **options)
    return JournalTarget(log)
