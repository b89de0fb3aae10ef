"""One log that is shipped: what was read of it, what was sent, and what the hub has."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from hub import columns, wire
from hub.errors import Conflict
from hub.wire import Put
from kvspool.errors import OutOfRange
from kvspool.journal import Journal
from kvspool.record import Gap
from kvspool.spool.cursor import Isolation
from kvspool.spool.search import Start
from shard.shardset import Log

if TYPE_CHECKING:
    from hub.columns import Cursor, Rows

PREFIX = "ship."  # of the durable readers' names; behind it comes the hub's


class Lane:
    """The way of one log to the hub. Its durable reader stands where the hub has acknowledged."""

    def __init__(self, index: int, log: Log, hub: str) -> None:
        """Take the durable reader for a hub, whose name is `hub`. Raises ReaderBusy if the log is shipped there already."""
        self.index = index
        self.log = log
        self.id = log.ensure_log_id() if isinstance(log, Journal) else log.log_id
        self.lost = 0  # sequences that were overwritten before they were shipped
        self.records = 0  # sent, those that were sent again too
        self.sent = 0  # the sequence behind the last record that was sent
        self.acked = 0
        name = f"{PREFIX}{hub}"
        known = {reader.name: reader.sequence for reader in log.readers() if reader.name.startswith(PREFIX) and reader.sequence is not None}
        self._is_moved = name not in known and bool(known)
        start: Start = max(known.values()) if self._is_moved else "earliest"
        self.reader = log.reader(name, start)
        self.cursor: Cursor | None = None
        self.error: Exception | None = None

    def open(self, place: wire.Place, isolation: Isolation) -> None:
        """Begin to read where the hub goes on. Raises Conflict if that can't be.

        The last record that the hub has is sent once more, if it is there still: the hub compares it. What the hub had acknowledged and
        has no more, since its machine died or its disk was lost, is sent again, too. But a hub that never had this log, since it was
        shipped to another one before, gets what comes behind that.
        """
        self.close_cursor()
        start = max(place.next - 1, 0) if place.is_known else 0
        if self._is_moved and not place.is_known:
            start = self.reader.sequence
        start = min(start, self.reader.sequence, self.log.end())
        try:
            self.cursor = self.log.cursor(start, isolation=isolation)
        except OutOfRange as error:
            raise Conflict(f"the log of shard {self.index} has no sequence {start}: {error}") from None
        self.sent = min(start, place.next)
        self.acked = place.next

    def next_rows(self, most: int) -> Rows | None:
        """Return the next records that are there now; None if nothing is."""
        assert self.cursor is not None
        while True:
            found = columns.next_rows(self.cursor, most)
            if not isinstance(found, Gap):
                return found
            self.lost += found.count

    def put(self, rows: Rows, ask: bool) -> Put:
        """Return the message beside some records, which are taken as sent."""
        put = Put(self.index, rows.first, self.sent, max(self.log.end(), rows.end), ask)
        self.sent = rows.end
        self.records += rows.batch.num_rows
        return put

    @property
    def behind(self) -> int:
        """Return how many records the hub has not acknowledged."""
        return max(0, self.log.end() - self.acked)

    def commit(self) -> None:
        """Let the durable reader stand where the hub has acknowledged; without anything new it only says that it is alive."""
        if self.acked > self.reader.sequence:
            with suppress(OutOfRange):  # the machine died, and the hub has what the log has lost
                self.reader.seek(self.acked)
        self.reader.commit()

    def close_cursor(self) -> None:
        """Let go of what was read ahead."""
        cursor, self.cursor = self.cursor, None
        if cursor is not None:
            cursor.close()

    def close(self) -> None:
        """Give the durable reader up."""
        self.close_cursor()
        self.reader.close()
