"""The sender of one log: the state of its records, from read to sent to acknowledged."""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from hub.client import hubs
from hub.client.connection import LONGEST_BACKOFF, backoff
from hub.errors import Conflict, CopyUnreachable, HubError, HubFull, QuotaExceeded, Restored, ShardDamaged
from hub.protocol import ingest
from hub.protocol.ingest import Put
from hub.root import columns
from kvspool import system
from kvspool.errors import (
    Corruption,
    KvspoolError,
    LockTimeout,
    LogNotFound,
    LogVanished,
    OutOfRange,
    ReaderBusy,
    TooLarge,
    TooManyReaders,
)
from kvspool.opening import logs
from kvspool.options import Isolation, Start
from kvspool.record import Gap
from kvspool.system.handles import Handle
from shard.merged import Log

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hub.client.copies_of_log import Copies
    from hub.root.columns import SequencedBatch
    from kvspool.engine.cursor import Cursor

LOOK_AGAIN = 1.0  # seconds between two checks whether a deleted log was recreated
TRY_AGAIN = 10.0  # seconds until a retry after an error on this host; all senders begin a new call then
ASK_AGAIN = 60.0  # seconds until a retry after a shard was damaged at the hub
SETTLES = 2.0  # seconds after a call during which the hub may store what had arrived
HEARTBEAT = 5.0  # seconds between two heartbeats of a durable reader that hasn't moved
URGENT_HEARTBEAT = 1.0  # the same, in a log that evicts readers without progress
PATIENCE = 1.0  # seconds to wait for a log's lock; meanwhile no other log of the shipper is sent
RESTORED_AFTER = 10_000_000_000  # ns after a heartbeat of the durable reader during which its process may have sent records

logger = logging.getLogger("kvspool.ship")
_PASSING = (LockTimeout, ReaderBusy, TooManyReaders, Corruption, CopyUnreachable)  # and each OSError of the system itself


class LogSender(Handle):
    """The sender of one log to the hub. Its durable reader's position is the hub's last acknowledgement.

    `keep_alive` and the read-only methods may be called by another thread.
    """

    def __init__(self, index: int, log: Log, location: str, copies: Copies | None = None) -> None:
        """Take the durable reader for the hub at a location. Raises ReaderBusy if the log is already shipped there.

        copies: what the client's other hubs have. Then the reader's position is that which enough hubs have acknowledged, if that is later.
        """
        self.index = index
        self.location = location
        self._copies = copies
        self.path = log.path
        self.lost = 0  # sequences declared lost to the hub: overwritten before they were shipped, or damaged
        self.records = 0  # sent, repeated ones counted again
        self.error: Exception | None = None  # why it is not shipped now
        self.retry_at: float | None = None  # when to retry after the error; None: never
        self._refusals = 0  # transient ones of the hub, since its last acknowledgement
        self._name = hubs.reader_name(location)
        self._lock = threading.Lock()  # of the reader, because two threads commit
        self._reading = threading.Lock()  # what was read is known to other threads before the log can lose it
        self._take(log)

    def _take(self, log: Log) -> None:
        self.log = log
        self.id = log.ensure_log_id()
        self.sent = 0  # the sequence after the last sent record
        self.acked = 0
        self._synced = 0  # every sequence below was on disk at the last check
        self.cursor: Cursor | None = None
        self._surplus: SequencedBatch | None = None  # read, and too large for one batch
        self._relayed: Iterator[SequencedBatch] | None = None  # records that only another hub still has
        self._read = 0  # the sequence after the last record that was read; it may not be sent yet
        self._changed = system.port.monotonic()  # when the log was taken, or last ceased to be sent
        self._elsewhere = 0  # another hub has the sequences below it
        self._gaps: deque[tuple[int, int]] = deque()  # reported to the hub, not acknowledged yet: from a sequence up to another
        readers = log.readers()
        self._seen_alive = max((reader.updated for reader in readers if reader.name == self._name), default=0)  # ns since 1970
        self._note_earlier({reader.name for reader in readers if reader.name.startswith(hubs.PREFIX)})
        places = {reader.name: reader.sequence for reader in readers if reader.sequence is not None}
        ours = places.pop(self._name, None)
        others = [place for name, place in places.items() if name.startswith(hubs.PREFIX)]
        # A log that was shipped to another hub continues here after that hub's last acknowledgement. If our reader is still at that
        # position, it was created for this move, by a process that ended before this hub had any records.
        self._is_moved = self._copies is None and (bool(others) if ours is None else ours in others)
        if self._copies is not None:
            self.acked = ours or 0  # or enough hubs have those below
        start: Start = max(others, default="earliest") if self._is_moved else "earliest"
        self.reader = log.reader(self._name, start)
        self.heartbeat = URGENT_HEARTBEAT if log.stats().reader_expiry else HEARTBEAT
        self._beat = 0.0  # when the reader last sent a heartbeat
        self._is_gone = False
        self._damaged_at: int | None = None  # where the log could not be read; it may be repaired

    def _note_earlier(self, readers: set[str]) -> None:
        """Note what earlier processes may have sent, from the names of their readers: perhaps everything up to the present end.

        A hub may have stored more than its reader was moved to, because the process may have been killed in between.
        """
        is_ours = self._name in readers
        is_of_others = self._copies is None or any(not self._copies.is_shared(name) for name in readers)
        self._before = self.log.end() if is_ours else 0  # this hub may have the sequences below it; it will say so itself
        self._at_others = self.log.end() if readers and is_of_others else 0  # the same, of a hub that is not one of the copies

    # On a connection.

    def open(self, place: ingest.ResumePoint, isolation: Isolation) -> None:
        """Begin to read where the hub continues. Raises Conflict if that is impossible, Restored for a log from a backup.

        The hub's last record is sent once more, if it is still in the log: the hub compares it. Only the hub's answer counts, not the
        durable reader's position. Records that the hub stored before a broken connection, without an acknowledgement, are not sent again.
        Records that it acknowledged and then lost, through a power failure or a lost disk, are sent again. If the log was shipped to
        another hub before, and this one has nothing of it, it gets only later records.
        """
        self.close_cursor()
        self._refuse_restored(place)
        self.acknowledge(place.next)
        self._gaps.clear()
        self._elsewhere = self.reader.sequence if self._is_moved else 0
        start = min(self.reader.sequence if self._is_moved else max(place.next - 1, 0), self.log.end())
        try:
            self.cursor = self.log.cursor(start, isolation=isolation)
        except OutOfRange as error:
            raise Conflict(f"the log of shard {self.index} has no sequence {start}: {error}") from None
        self.sent = min(start, place.next)
        self.acked = max(start, place.next)  # after a move, the other hub has the records below
        self._read = self._before = 0  # the hub has said what it has

    def _refuse_restored(self, place: ingest.ResumePoint) -> None:
        """Raise Restored if the hub has records that no process can have sent from this log, and the last of them can't be compared.

        The hub compares its last record, unless it was overwritten here. But a process that sends records also sends heartbeats of the
        durable reader. So if the hub's last record is later than those, the log came from a backup, and has used its sequences again.
        """
        is_ours = place.next <= max(self.reader.sequence, self.sent)
        is_comparable = place.next - 1 >= self.log.extent()[0]
        if not place.is_known or is_ours or is_comparable or not self._seen_alive:
            return
        if self._seen_alive + RESTORED_AFTER < place.time <= system.port.now():
            raise Restored(
                f"the hub has the log of shard {self.index} up to sequence {place.next}, from after this log was last shipped, at "
                f"{self.reader.sequence}: it was restored from an older state. Copy it to a new log (kvspool copy) and ship that one"
            )

    def sync(self) -> None:
        """Sync the log once all records that are known to be on disk were read; no other process may ever do it."""
        assert self.cursor is not None
        reached = max(self.sent, self.cursor.sequence)
        if self._synced <= reached < self.log.end():
            self._synced = self.log.sync()

    def next_rows(self, most: int, size: int) -> SequencedBatch | None:
        """Return the next available records, up to `size` bytes or one larger record; None if there are none."""
        assert self.cursor is not None
        found: SequencedBatch | Gap | None = self._surplus or self._next_relayed()
        while found is None or isinstance(found, Gap):
            with self._reading:
                found = columns.next_rows(self.cursor, most, max(1, size * 3 // 4))  # the rest is for sequences, times and keys
                if isinstance(found, columns.SequencedBatch):
                    self._read = found.end
            if found is None:
                return None
            if isinstance(found, Gap) and self._copies is not None:
                first = max(found.first, self.sent, self.acked)
                self._relayed = self._copies.records(self, first, found.last + 1)
                found = self._next_relayed()
        rows, self._surplus = found.cut(size)
        return rows

    def _next_relayed(self) -> SequencedBatch | None:
        """Return the next records that the log has lost, from another hub. Raises CopyUnreachable."""
        found = None if self._relayed is None else next(self._relayed, None)
        if found is None:
            self._relayed = None
        return found

    def put(self, rows: SequencedBatch, ask: bool, largest: int) -> Put:
        """Return the message for some records, which count as sent now. Raises TooLarge for more bytes than the hub accepts at once."""
        if rows.size > largest:
            raise TooLarge(f"{self.path}: record {rows.first} has {rows.size} bytes with its key; the hub accepts {largest}")
        put = Put(self.index, rows.first, self.sent, max(self.log.end(), rows.end), ask, self._elsewhere)
        if rows.first > self.sent:
            self._gaps.append((self.sent, rows.first))
        if rows.first > (lost := max(self.sent, self.acked)) and self._copies is not None:
            words = "%s: sequences %d to %d are declared lost to %s: the log has forgotten them, and no hub has them"
            logger.warning(words, self.path, lost, rows.first - 1, self.location)
        self.sent = rows.end
        self.records += rows.batch.num_rows
        return put

    def acknowledge(self, sequence: int) -> None:
        """Note that the hub has everything below a sequence."""
        self._is_moved = self._is_moved and not sequence
        while self._gaps and self._gaps[0][1] <= sequence:
            first, end = self._gaps.popleft()
            self.lost += max(0, end - max(first, self.acked))
        if sequence > self.acked:
            self.acked, self._refusals = sequence, 0

    @property
    def shipped(self) -> int:
        """Return the sequence below which the hub, or an earlier hub of the log, may have records, or may get them from this process."""
        return max(self.coming, self._at_others, self.acked)

    @property
    def coming(self) -> int:
        """Return the sequence below which this process may be sending records to the hub, or an earlier one has sent them."""
        with self._reading:
            return max(self._before, self._read, self.sent)

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing is on its way to the hub: the log is not sent now, nor was it just before."""
        return self.cursor is None and system.port.monotonic() > self._changed + SETTLES

    @property
    def behind(self) -> int:
        """Return how many records the hub has not acknowledged; 0 if the log is gone."""
        try:
            return max(0, self.log.end() - self.acked)
        except (KvspoolError, OSError):
            return 0

    @property
    def is_sent(self) -> bool:
        """Return whether every available record was sent, or the log can't be read."""
        try:
            if self.cursor is None or self._surplus is not None or self._relayed is not None:
                return False
            return self.log.end() <= max(self.sent, self.cursor.sequence)
        except (KvspoolError, OSError):
            return True  # it is gone; `refuse_vanished` reports that

    def commit(self) -> None:
        """Commit the hub's last acknowledgement in the durable reader; if it is unchanged, this is only a heartbeat, now and then.

        With several hubs, the commit is also what enough of them have acknowledged.
        """
        with self._lock:
            reached = self.acked if self._copies is None else self._copies.reached(self)
            if reached > self.reader.sequence:
                with suppress(OutOfRange):  # after a power failure the hub has records that the log has lost
                    self.reader.seek(reached)
            elif system.port.monotonic() < self._beat + self.heartbeat:
                return
            self._commit()

    def _commit(self) -> None:
        self._beat = system.port.monotonic()
        self.reader.commit()

    def keep_alive(self) -> None:
        """Send a heartbeat of the durable reader, so that waiting writers don't evict it; a restored log keeps its last one."""
        if isinstance(self.error, Restored):
            return
        with suppress(KvspoolError, OSError):  # the thread that ships it gets the same error and reports it
            if self._copies is not None:
                self.commit()
                return
            with self._lock:
                if system.port.monotonic() >= self._beat + self.heartbeat:
                    self._commit()

    # Quarantine.

    def refuse_vanished(self) -> None:
        """Raise LogVanished if the log was deleted, or replaced by another one."""
        assert self.cursor is not None
        self.cursor.refuse_vanished()
        if not self.log.always_has_id and self._is_replaced():  # the cursor of a journal reads any log at the path
            raise LogVanished(f"{self.path} was deleted or replaced while it was shipped")

    def _is_replaced(self) -> bool:
        try:
            with logs.open_store(self.path) as now:
                return now.ensure_log_id() != self.id
        except LogNotFound:
            return True
        except (KvspoolError, OSError):
            return False

    def fail(self, error: Exception) -> None:
        """Quarantine the sender, for good or until `retry_at`; others continue. Errors of a replaced log are reported as LogVanished."""
        if not (self._is_gone or isinstance(error, HubError | LogVanished)) and self._is_replaced():
            error = LogVanished(f"{self.path} was deleted or replaced while it was shipped: {error}")
        self._is_gone = self._is_gone or isinstance(error, LogVanished | LogNotFound)
        if isinstance(error, Corruption) and self._damaged_at is None:
            self._damaged_at = self.acked if self.cursor is None else self.cursor.sequence
        self.error = error
        wait = self._wait_after(error)
        self.retry_at = None if wait is None else system.port.monotonic() + wait
        self.close_cursor()

    def _wait_after(self, error: Exception) -> float | None:
        """Return the seconds until a retry after an error; None: never."""
        if isinstance(error, LogVanished | LogNotFound):
            return LOOK_AGAIN
        if isinstance(error, ShardDamaged):
            return ASK_AGAIN
        if isinstance(error, HubFull | QuotaExceeded):
            self._refusals += 1
            return max(error.retry_after or LONGEST_BACKOFF, backoff(self._refusals))
        is_of_the_system = isinstance(error, OSError) and not isinstance(error, KvspoolError)
        # The path of a deleted log may hold one that is being created.
        return TRY_AGAIN if self._is_gone or is_of_the_system or isinstance(error, _PASSING) else None

    @property
    def until(self) -> str:
        """Return how long the sender is quarantined, as text."""
        if self.retry_at is None:
            return "until the shipper is restarted"
        if isinstance(self.error, LogVanished | LogNotFound):
            return "until it is recreated"
        if isinstance(self.error, Corruption):
            return "until it is repaired"
        return f"for {max(0.0, self.retry_at - system.port.monotonic()):.0f} s"

    def is_due(self) -> bool:
        """Return whether the sender is due for a retry after an error; for a deleted log: whether it exists again.

        A log that was recreated under the same path is another one: the hub begins a new generation for it. Raises the errors of opening it
        and of taking its durable reader.
        """
        if self.retry_at is None or system.port.monotonic() < self.retry_at:
            return False
        damaged_at = self._damaged_at
        if self._is_gone or damaged_at is not None:
            try:
                self._take_again()
            except LogNotFound:
                self.retry_at = system.port.monotonic() + LOOK_AGAIN
                return False
            if damaged_at is not None:
                self._damaged_at = damaged_at
                self._read_at(damaged_at)
                self._damaged_at = None
        self.error = self.retry_at = None
        return True

    def _read_at(self, sequence: int) -> None:
        """Raise Corruption unless the log can be read again where it could not: a retry takes a new call, also of other logs."""
        cursor = self.log.cursor(min(sequence, self.log.end()))
        try:
            columns.next_rows(cursor, 1)
        finally:
            cursor.close()

    def _take_again(self) -> None:
        """Switch to the log at the path. After an error, no log can be used until another call has succeeded."""
        log = logs.open_store(self.path, timeout=PATIENCE)
        with suppress(KvspoolError, OSError):  # the old one can't be synced any more
            self.close()
        try:
            with self._lock:
                self._take(log)
        except BaseException:
            log.close()
            raise

    def close_cursor(self) -> None:
        """Close the read-ahead."""
        cursor, self.cursor, self._surplus, self._relayed = self.cursor, None, None, None
        if cursor is not None:
            self._changed = system.port.monotonic()
            cursor.close()

    def close(self) -> None:
        """Close the durable reader and the log."""
        self.close_cursor()
        with self._lock:
            self.reader.close()
        self.log.close()
