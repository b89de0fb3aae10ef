"""One log that is shipped: what was read of it, what was sent, and what the hub has."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from hub.errors import Conflict, HubError, ShardDamaged
from hub.protocol import ingest
from hub.protocol.ingest import Put
from hub.root import columns
from kvspool import logs, system
from kvspool.errors import (
    KvspoolError,
    LockTimeout,
    LogNotFound,
    LogVanished,
    OutOfRange,
    ReaderBusy,
    TooLarge,
    TooManyReaders,
)
from kvspool.handles import Handle
from kvspool.journal import Journal
from kvspool.options import Isolation, Start
from kvspool.record import Gap
from shard.shardset import Log

if TYPE_CHECKING:
    from hub.root.columns import Cursor, SequencedBatch

PREFIX = "ship."  # of the durable readers' names; behind it comes the hub's
LOOK_AGAIN = 1.0  # seconds between two looks whether a log that was deleted was made anew
TRY_AGAIN = 10.0  # seconds after which what went wrong here may have passed; all lanes begin a new call then
ASK_AGAIN = 60.0  # seconds after which a shard that is damaged at the hub may have been repaired


_PASSING = (LockTimeout, ReaderBusy, TooManyReaders)  # and each OSError that is the system's own


class LogSender(Handle):
    """The way of one log to the hub. Its durable reader stands where the hub has acknowledged.

    `keep_alive` and what only tells may be called by another thread.
    """

    def __init__(self, index: int, log: Log, hub: str) -> None:
        """Take the durable reader for a hub, whose name is `hub`. Raises ReaderBusy if the log is shipped there already."""
        self.index = index
        self.path = log.path
        self.lost = 0  # sequences that the hub was told are lost: overwritten before they were shipped, or damaged
        self.records = 0  # sent, those that were sent again too
        self.error: Exception | None = None  # why it is not shipped now
        self.retry_at: float | None = None  # when to try again after the error; None: never
        self._name = f"{PREFIX}{hub}"
        self._lock = threading.Lock()  # of the reader: two threads commit
        self._take(log)

    def _take(self, log: Log) -> None:
        self.log = log
        self.id = _id(log)
        self.sent = 0  # the sequence behind the last record that was sent
        self.acked = 0
        self._synced = 0  # every sequence below was on disk when this was looked at last
        self.cursor: Cursor | None = None
        self._surplus: SequencedBatch | None = None  # read, and more than goes into one batch
        self._gaps: deque[tuple[int, int]] = deque()  # that the hub was told of, not acknowledged yet: from a sequence up to another
        places = {reader.name: reader.sequence for reader in log.readers() if reader.sequence is not None}
        ours = places.pop(self._name, None)
        others = [place for name, place in places.items() if name.startswith(PREFIX)]
        # A log that was shipped to another hub goes on here behind what that one has acknowledged. A reader that stands there still was
        # made for that, by a process that has ended before this hub had anything.
        self._is_moved = bool(others) if ours is None else ours in others
        start: Start = max(others, default="earliest")
        self.reader = log.reader(self._name, start)
        self._is_gone = False

    # On a connection.

    def open(self, place: ingest.ResumePoint, isolation: Isolation) -> None:
        """Begin to read where the hub goes on. Raises Conflict if that can't be.

        The last record that the hub has is sent once more, if it is there still: the hub compares it. It alone says what it has, wherever
        the durable reader stands: what it stored before a cut and could not acknowledge any more isn't sent again; what it had acknowledged
        and has no more, since its machine died or its disk was lost, is. But a hub that has nothing of this log, since that was shipped to
        another one before, gets what comes behind that.
        """
        self.close_cursor()
        self.acknowledge(place.next)
        self._gaps.clear()
        start = min(self.reader.sequence if self._is_moved else max(place.next - 1, 0), self.log.end())
        try:
            self.cursor = self.log.cursor(start, isolation=isolation)
        except OutOfRange as error:
            raise Conflict(f"the log of shard {self.index} has no sequence {start}: {error}") from None
        self.sent = min(start, place.next)
        self.acked = max(start, place.next)  # after a move: what lies below is at the other hub

    def sync(self) -> None:
        """Put what is there on disk, once all that is known to be there was read; nobody else may ever do it."""
        assert self.cursor is not None
        reached = max(self.sent, self.cursor.sequence)
        if self._synced <= reached < self.log.end():
            self._synced = self.log.sync()

    def next_rows(self, most: int, size: int) -> SequencedBatch | None:
        """Return the next records that are there now, up to `size` bytes of them, or one that is larger; None if nothing is there."""
        assert self.cursor is not None
        found: SequencedBatch | Gap | None = self._surplus
        while found is None or isinstance(found, Gap):
            found = columns.next_rows(self.cursor, most, max(1, size * 3 // 4))  # the rest is for sequences, times and keys
            if found is None:
                return None
        rows, self._surplus = found.cut(size)
        return rows

    def put(self, rows: SequencedBatch, ask: bool, largest: int) -> Put:
        """Return the message beside some records, which are taken as sent. Raises TooLarge for more bytes than the hub takes at once."""
        if rows.size > largest:
            raise TooLarge(f"{self.path}: record {rows.first} has {rows.size} bytes with its key; the hub takes {largest}")
        put = Put(self.index, rows.first, self.sent, max(self.log.end(), rows.end), ask)
        if rows.first > self.sent:
            self._gaps.append((self.sent, rows.first))
        self.sent = rows.end
        self.records += rows.batch.num_rows
        return put

    def acknowledge(self, sequence: int) -> None:
        """Note that the hub has everything below a sequence."""
        self._is_moved = self._is_moved and not sequence
        while self._gaps and self._gaps[0][1] <= sequence:
            first, end = self._gaps.popleft()
            self.lost += max(0, end - max(first, self.acked))
        self.acked = max(self.acked, sequence)

    @property
    def behind(self) -> int:
        """Return how many records the hub has not acknowledged; 0 if the log is gone."""
        try:
            return max(0, self.log.end() - self.acked)
        except (KvspoolError, OSError):
            return 0

    @property
    def is_sent(self) -> bool:
        """Return whether everything that is there now was sent, or can't be read."""
        try:
            return self._surplus is None and self.cursor is not None and self.log.end() <= max(self.sent, self.cursor.sequence)
        except (KvspoolError, OSError):
            return True  # it is gone; whoever looks for that says so

    def commit(self) -> None:
        """Let the durable reader stand where the hub has acknowledged; without anything new it only says that it is alive."""
        with self._lock:
            if self.acked > self.reader.sequence:
                with suppress(OutOfRange):  # the machine died, and the hub has what the log has lost
                    self.reader.seek(self.acked)
            self.reader.commit()

    def keep_alive(self) -> None:
        """Say that the durable reader is alive, so that writers who wait for it don't give it up."""
        with self._lock, suppress(KvspoolError, OSError):  # who ships it finds out, and says so
            self.reader.commit()

    # When it can't go on.

    def refuse_vanished(self) -> None:
        """Raise LogVanished if the log was deleted, or another one lies in its place."""
        assert self.cursor is not None
        self.cursor.refuse_vanished()
        if isinstance(self.log, Journal) and self._is_replaced():  # it reads what lies under its path, whatever that is
            raise LogVanished(f"{self.path} was deleted or replaced while it was shipped")

    def _is_replaced(self) -> bool:
        try:
            with logs.open_store(self.path) as now:
                return _id(now) != self.id
        except LogNotFound:
            return True
        except (KvspoolError, OSError):
            return False

    def fail(self, error: Exception) -> None:
        """Ship it no more, for good or until `retry_at`; the others go on. Whatever is wrong with a log that was replaced, it is gone."""
        if not (self._is_gone or isinstance(error, HubError | LogVanished)) and self._is_replaced():
            error = LogVanished(f"{self.path} was deleted or replaced while it was shipped: {error}")
        self._is_gone = self._is_gone or isinstance(error, LogVanished | LogNotFound)
        self.error = error
        wait = self._wait_after(error)
        self.retry_at = None if wait is None else system.port.monotonic() + wait
        self.close_cursor()

    def _wait_after(self, error: Exception) -> float | None:
        """Return the seconds after which an error may have passed; None: it can't."""
        if isinstance(error, LogVanished | LogNotFound):
            return LOOK_AGAIN
        if isinstance(error, ShardDamaged):
            return ASK_AGAIN
        is_of_the_system = isinstance(error, OSError) and not isinstance(error, KvspoolError)
        # What lies in the place of a log that is gone may be one that is being made.
        return TRY_AGAIN if self._is_gone or is_of_the_system or isinstance(error, _PASSING) else None

    @property
    def until(self) -> str:
        """Return for how long it is left aside, for people."""
        if self.retry_at is None:
            return "until the shipper is started anew"
        if isinstance(self.error, LogVanished | LogNotFound):
            return "until it is made anew"
        return f"for {max(0.0, self.retry_at - system.port.monotonic()):.0f} s"

    def is_due(self) -> bool:
        """Return whether it may be tried again, after an error that may have passed; if its log was deleted: whether it is there again.

        A log that was made anew under the same path is another one: the hub begins a new generation for it. Raises what opening it and
        taking its durable reader raise.
        """
        if self.retry_at is None or system.port.monotonic() < self.retry_at:
            return False
        if self._is_gone:
            try:
                self._take_anew()
            except LogNotFound:
                self.retry_at = system.port.monotonic() + LOOK_AGAIN
                return False
        self.error = self.retry_at = None
        return True

    def _take_anew(self) -> None:
        """Go on with the log that lies under the path now. If that fails, no log can be used before another call has succeeded."""
        log = logs.open_store(self.path)
        with suppress(KvspoolError, OSError):  # the old one can't be put on disk any more
            self.close()
        try:
            with self._lock:
                self._take(log)
        except BaseException:
            log.close()
            raise

    def close_cursor(self) -> None:
        """Let go of what was read ahead."""
        cursor, self.cursor, self._surplus = self.cursor, None, None
        if cursor is not None:
            cursor.close()

    def close(self) -> None:
        """Give the durable reader and the log up."""
        self.close_cursor()
        with self._lock:
            self.reader.close()
        self.log.close()


def _id(log: Log) -> bytes:
    return log.ensure_log_id() if isinstance(log, Journal) else log.log_id
