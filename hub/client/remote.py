"""Read hubs from another host: for notebooks, programs and mirrors. Needs the extra `hub`.

    with RemoteHub("grpc+tls://hub:8815", security=Security(token="...")) as hub:
        for client in hub.clients():
            table = hub.read_arrow(client, 0, start_time="2026-01-31T00:00:00Z")

Of several hubs with the same records, `RemoteHub(["grpc+tls://hub1:8815", "grpc+tls://hub2:8815"])` reads any that has them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Literal, overload

import pyarrow as pa

from hub.client import hubs, timeline
from hub.client.connection import Security
from hub.client.one_hub import OneHub
from hub.client.reading import RemoteReading
from hub.client.several import SeveralHubs
from hub.client.timeline import LogPosition
from hub.errors import NotFound, Unexpected
from hub.protocol.reading import Changes, Committed, ReaderState, ServerInfo, ShardState, Ticket, Time
from hub.root.columns import SequencedBatch
from hub.root.records import HubRecord
from kvspool import arrow
from kvspool.engine.iteration import check as check_limit
from kvspool.errors import OutOfRange
from kvspool.options import Isolation, OnGap, check_isolation, check_sequence
from kvspool.record import Gap
from kvspool.system.handles import ClosingHandle
from shard.merge import NoGaps

Start = int | str | datetime | LogPosition
TIMEOUT = 15.0  # seconds for a call that is answered at once


class RemoteHub(ClosingHandle):
    """A hub on another host, or several with the same records, open for reading. Can be shared by threads.

    After a lost connection, the next call reconnects. Of several hubs, a call or stream whose hub is lost goes over to another one within
    seconds. It continues at the next sequence. A record is read once. A Gap is one only if every hub confirms it, and the end
    is that of the hub with the most records. An error names every hub and its reason. See docs/hub-readers.md for the sequences.
    """

    def __init__(
        self,
        location: str | Sequence[str],
        *,
        security: Security = Security(),  # noqa: B008 - it is frozen
        timeout: float = TIMEOUT,
    ) -> None:
        """Prepare connections to `grpc+tls://host:port` or `grpc://host:port`, without sending anything. Raises ValueError, Unreachable.

        location: one hub, or several: the preferred one first, as a list or as text with commas. timeout: seconds in which a hub has to
        answer; streams of records are not limited.
        """
        locations = hubs.parse(location if isinstance(location, str) else ",".join(location))
        self.locations = tuple(locations)
        self.location = ",".join(locations)
        self._hub = OneHub(locations[0], security, timeout) if len(locations) == 1 else SeveralHubs(locations, security, timeout)
        self._is_closed = False

    # Content.

    def away(self) -> dict[str, str]:
        """Return which of several hubs don't answer at present: "hub unreachable since ...", by location. It asks no hub."""
        return self._hub.away()

    def server(self) -> ServerInfo:
        """Return the hub's description; of several, of one that answers. Raises Unreachable, NotAllowed."""
        return self._hub.server()

    def clients(self, pattern: str = "*") -> list[str]:
        """Return the ids of the clients that this user may list and that match a pattern (`*`, `?`, `[...]`), sorted.

        To read a client is a separate right. Of several hubs, those that answer are asked; see `away`. Raises Unreachable, NotAllowed.
        """
        return self._hub.clients(pattern)

    def shards(self, client: str) -> list[ShardState]:
        """Return a client's shards, in order. Raises NotFound, NotAllowed, Unreachable, Conflict if its logs differ at several hubs."""
        return self._hub.shards(client)

    def position(self, client: str, shard: int, sequence: int) -> LogPosition:
        """Return the position of a sequence in the client's log, to be stored: it means the same record at every hub, and in every program.

        Raises NotFound, also for a shard whose log has no id, NotAllowed, Unreachable, Conflict.
        """
        found = timeline.position(self._table(client, shard), sequence)
        if found is None:
            raise NotFound(f"{self.location}: sequence {sequence} of client {client}, shard {shard}, is in no log with an id")
        return found

    def sequence(self, client: str, shard: int, position: LogPosition) -> int:
        """Return the sequence here of a position in a log. Raises NotFound for an unknown log, and the errors of `position`."""
        found = timeline.sequence_of(self._table(client, shard), position)
        if found is None:
            raise NotFound(f"{self.location}: client {client}, shard {shard}, has no log {position.log}")
        return found

    def _table(self, client: str, shard: int) -> timeline.Table:
        return tuple(one for state in self.shards(client) if state.shard == shard for one in state.generations)

    def changes(self, since: str = "", wait: float = 0.0) -> Changes:
        """Return the shards of all clients that have changed since the token of the last answer; all shards for an empty token.

        wait: seconds (at most 30) to wait for a change. Raises Unreachable, NotAllowed, Malformed, Conflict.
        """
        return self._hub.changes(since, wait)

    # Durable readers.

    def commit(self, reader: str, places: Mapping[tuple[str, int], int]) -> Committed:
        """Move a durable reader at the hub: `places` has the next sequence to read by client and shard. A new reader is created, owned by
        us.

        On return, all positions are on the hub's disk. Up to 3,000 positions are sent in one call: after an error, none is stored. More
        are sent in several calls, each complete or not stored. Raises NotAllowed for a client that may not be read or another user's
        reader, Malformed, Unexpected for a sequence that isn't written yet, QuotaExceeded, Conflict, Unreachable.

        Of several hubs, all that answer get the positions; a hub that was away gets them with our next commit. One that lags gets the
        position of its end.
        """
        return self._hub.commit(reader, places)

    def readers(self) -> list[ReaderState]:
        """Return our durable readers at the hub, by name; an admin gets those of all users. Raises Unreachable, NotAllowed.

        Of several hubs, the highest position of each shard counts.
        """
        return self._hub.readers()

    def delete_reader(self, name: str) -> dict[str, str]:
        """Delete one of our durable readers; an admin may delete any. Raises NotFound, Conflict while it is open, Unreachable.

        Of several hubs, it is deleted at all that answer. Return the others, by location, with the reason.
        """
        return self._hub.delete_reader(name)

    # Reading.

    @overload
    def read(
        self,
        client: str,
        shard: int,
        start: Start = ...,
        *,
        limit: int | None = ...,
        on_gap: NoGaps = ...,
        isolation: Isolation = ...,
    ) -> RemoteReading[HubRecord]: ...

    @overload
    def read(
        self,
        client: str,
        shard: int,
        start: Start = ...,
        *,
        limit: int | None = ...,
        on_gap: OnGap = ...,
        isolation: Isolation = ...,
    ) -> RemoteReading[HubRecord | Gap]: ...

    def read(
        self,
        client: str,
        shard: int,
        start: Start = "earliest",
        *,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> RemoteReading[HubRecord | Gap]:
        """Iterate over the stored records (`HubRecord`) of a shard; arguments as for `kvspool.Log.read`, errors as for `read_arrow`.

        The hub sends batches, and a Python object is created for each record: `read_arrow` is many times faster.
        """
        check_limit(limit, on_gap)
        batches = self.batches(client, shard, start, limit=limit, coded=True, isolation=check_isolation(isolation))
        return RemoteReading(batches, client, shard, on_gap)

    @overload
    def read_values(
        self,
        client: str,
        shard: int,
        start: Start = ...,
        *,
        limit: int | None = ...,
        on_gap: NoGaps = ...,
        isolation: Isolation = ...,
    ) -> Iterator[bytes]: ...

    @overload
    def read_values(
        self,
        client: str,
        shard: int,
        start: Start = ...,
        *,
        limit: int | None = ...,
        on_gap: OnGap = ...,
        isolation: Isolation = ...,
    ) -> Iterator[bytes | Gap]: ...

    def read_values(
        self,
        client: str,
        shard: int,
        start: Start = "earliest",
        *,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> Iterator[bytes | Gap]:
        """Yield the stored bytes of the values only; see `read`."""
        for item in self.read(client, shard, start, limit=limit, on_gap=on_gap, isolation=isolation):
            yield item if isinstance(item, Gap) else item.value

    def get(self, client: str, shard: int, sequence: int) -> HubRecord:
        """Return the record of a shard with this sequence. Raises OutOfRange if it was not written yet, GapError if it is lost, and the
        errors of `read_arrow`.
        """
        late = OutOfRange(f"sequence {sequence} of {self.location}/{client}/{shard} is not written yet")
        try:
            with self.read(client, shard, check_sequence(sequence), limit=1) as reading:
                found = next(reading, None)
        except Unexpected:
            raise late from None
        if found is None:
            raise late
        return found

    def read_arrow(
        self,
        client: str,
        shard: int,
        start: Start = "earliest",
        *,
        end: int | None = None,
        start_time: Time | datetime | None = None,
        end_time: Time | datetime | None = None,
        limit: int | None = None,
        coded: bool = False,
        isolation: Isolation = "appended",
        on_gap: Literal["raise", "skip"] = "raise",
    ) -> pa.Table:
        """Return the stored records of a shard as a `pyarrow.Table` with the columns of `kvspool.arrow.SCHEMA`.

        start: a sequence, "earliest", "latest", an aware datetime or a LogPosition; end: the first sequence not to return; start_time,
        end_time: the same by time (ns since 1970, RFC 3339, or an aware datetime). coded: add a column codec. isolation: "synced" returns
        only records on the hub's disk.

        on_gap: "raise" raises GapError at the first lost record, "skip" omits lost records. Raises NotFound, NotAllowed, ShardDamaged,
        Unexpected for a start that isn't written yet, HubFull, Unreachable, Malformed. A returned table is complete; an error has the
        records before it as `partial`, a table.
        """
        asked = {"start_time": start_time, "end_time": end_time, "limit": limit, "coded": coded, "isolation": isolation}
        items = self.batches(client, shard, start, end=end, **asked)  # type: ignore[arg-type]
        return arrow.table(items, arrow.CODED_SCHEMA if coded else arrow.SCHEMA, on_gap)

    def batches(
        self,
        client: str,
        shard: int,
        start: Start = "earliest",
        *,
        end: int | None = None,
        start_time: Time | datetime | None = None,
        end_time: Time | datetime | None = None,
        limit: int | None = None,
        coded: bool = False,
        isolation: Isolation = "appended",
        timeout: float | None = None,
    ) -> Generator[pa.RecordBatch | Gap]:
        """Yield the records of a shard as batches of at most 2 MiB, and Gaps between them. Arguments and errors: see `read_arrow`.

        timeout: seconds after which the stream is ended with Unreachable; None: never.
        """
        if isinstance(start, LogPosition):
            start = self.sequence(client, shard, start)
        elif isinstance(start, datetime):
            start, start_time = "earliest", start
        ticket = Ticket(client, shard, start, end, _time(start_time), _time(end_time), limit, coded, isolation)
        for item in self.items(ticket, timeout):
            if isinstance(item, Gap):
                yield item
            elif isinstance(item, SequencedBatch):
                yield item.batch

    def items(self, ticket: Ticket, timeout: float | None = None) -> Generator[SequencedBatch | Gap | int]:
        """Yield the result of a ticket: rows, Gaps between them, and finally the sequence at which the hub ended the stream.

        timeout: seconds after which the stream is ended. Raises as `read_arrow`, Fenced for another log than the ticket names, and Closed
        as soon as any thread closes the connection.
        """
        return self._hub.items(ticket, timeout)

    @property
    def closed(self) -> bool:
        """Return whether the connection was closed."""
        return self._is_closed

    def close(self) -> None:
        """Close the connection. Streams in progress raise Closed, at once if other threads wait for them."""
        self._is_closed = True
        self._hub.close()


def _time(time: Time | datetime | None) -> Time | None:
    """Return a time in the form of tickets. Raises ValueError for a datetime without a zone."""
    if not isinstance(time, datetime):
        return time
    if time.tzinfo is None:
        raise ValueError(f"a time without a zone is ambiguous: {time}; pass an aware datetime")
    return time.isoformat()
