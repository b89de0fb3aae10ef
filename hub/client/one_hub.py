"""The calls that a reader makes to one hub; see `hub.client.remote`."""

from __future__ import annotations

import fnmatch
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import flight

from hub.client import connection
from hub.client.connection import Security
from hub.client.hubs import check
from hub.errors import Malformed, Unreachable
from hub.protocol import reading
from hub.protocol.ingest import LAST
from hub.protocol.reading import (
    LARGEST_ANSWER,
    BatchMetadata,
    Changes,
    ClientState,
    CommitPositions,
    Committed,
    ReaderName,
    ReaderPlace,
    Readers,
    ReaderState,
    ServerInfo,
    ShardState,
    Since,
    Ticket,
)
from hub.root import columns
from hub.root.columns import SequencedBatch
from kvspool.engine.iteration import Iterations
from kvspool.errors import Closed
from kvspool.record import Gap
from kvspool.system.handles import Handle

T = TypeVar("T")


class OneHub(Handle):
    """A connection to one hub. Can be shared by threads. After a lost connection, the next call reconnects."""

    def __init__(self, location: str, security: Security, timeout: float, *, has_others: bool = False) -> None:
        """Prepare the connection, without sending anything. Raises ValueError, Unreachable.

        timeout: seconds in which the hub has to answer. has_others: other hubs may have the records, so a hub that says nothing is
        abandoned within seconds.
        """
        self.location = check(location)
        self._security = security
        self._timeout = timeout
        attempt = connection.SHORT_ATTEMPT if has_others else connection.SILENCE
        self._client = connection.connect(location, security, is_watched=has_others, attempt=attempt)
        self._iterations = Iterations()
        self._is_closed = False

    def server(self, timeout: float | None = None) -> ServerInfo:
        """Return the hub's description. timeout: seconds; None: as for other calls. Raises Unreachable, NotAllowed."""
        return self._act("server", b"", ServerInfo, timeout)

    def clients(self, pattern: str = "*") -> list[str]:
        """Return the ids of the clients that this user may list and that match a pattern (`*`, `?`, `[...]`), sorted.

        To read a client is a separate right. Raises Unreachable, NotAllowed.
        """
        try:
            flights = list(self._client.list_flights(pattern.encode() if pattern != "*" else b"", self._options(self._timeout)))
        except (pa.ArrowException, OSError) as error:
            raise connection.error_of(self.location, error) from None
        states = [reading.decode(ClientState, found.app_metadata, LARGEST_ANSWER) for found in flights]
        return sorted(state.client for state in states if fnmatch.fnmatchcase(state.client, pattern) or pattern == "*")

    def shards(self, client: str) -> list[ShardState]:
        """Return a client's shards, in order. Raises NotFound, NotAllowed, Unreachable."""
        try:
            found = self._client.get_flight_info(flight.FlightDescriptor.for_path(client), self._options(self._timeout))
        except (pa.ArrowException, OSError) as error:
            raise connection.error_of(self.location, error) from None
        return reading.decode(ClientState, found.app_metadata, LARGEST_ANSWER).shards

    def changes(self, since: str = "", wait: float = 0.0) -> Changes:
        """Return the shards of all clients that have changed since the token of the last answer; all shards for an empty token.

        wait: seconds (at most 30) to wait for a change. Raises Unreachable, NotAllowed, Malformed.
        """
        return self._act("changes", msgspec.json.encode(Since(since, wait)), Changes, self._timeout + wait)

    def commit(self, reader: str, places: Mapping[tuple[str, int], int]) -> Committed:
        """Move a durable reader at the hub: `places` has the next sequence to read by client and shard. A new reader is created, owned by
        us.

        On return, all positions are on the hub's disk. Up to 3,000 positions are sent in one call: after an error, none is stored. More
        are sent in several calls, each complete or not stored. Raises NotAllowed for a client that may not be read or another user's
        reader, Malformed, Unexpected for a sequence that isn't written yet, QuotaExceeded, Conflict, Unreachable.
        """
        answer = Committed(0)
        for part in reading.parts([ReaderPlace(client, shard, next) for (client, shard), next in sorted(places.items())]):
            found = self._act("commit-positions", msgspec.json.encode(CommitPositions(reader, part)), Committed)
            answer = Committed(found.places, answer.missing + found.missing)
        return answer

    def readers(self) -> list[ReaderState]:
        """Return our durable readers at the hub, by name; an admin gets those of all users. Raises Unreachable, NotAllowed."""
        return self._act("readers", b"", Readers).readers

    def delete_reader(self, name: str) -> dict[str, str]:
        """Delete one of our durable readers. Raises NotFound, Conflict while it is open, Unreachable."""
        self._act("delete-reader", msgspec.json.encode(ReaderName(name)), Readers)
        return {}

    def away(self) -> dict[str, str]:
        """See `RemoteHub.away`."""
        return {}

    def items(self, ticket: Ticket, timeout: float | None = None) -> Generator[SequencedBatch | Gap | int]:
        """Yield the result of a ticket: rows, Gaps between them, and finally the sequence at which the hub ended the stream.

        timeout: seconds after which the stream is ended. Raises as `read_arrow`, Fenced for another log than the ticket names, and Closed
        as soon as any thread closes the connection.
        """
        where = f"{self.location}/{ticket.client}/{ticket.shard}"
        stream: _Stream | None = None
        try:
            reader = self._client.do_get(flight.Ticket(msgspec.json.encode(ticket)), self._options(timeout))
            if not reader.schema.equals(columns.schema_of(ticket)):
                raise Malformed(f"{where}: the stream has the columns {str(reader.schema)[:500]!r}")
            try:
                stream = self._iterations.add(_Stream(reader))
                yield from self._items(reader, where)
            finally:
                reader.cancel()
        except (pa.ArrowException, OSError) as error:
            if stream is not None and stream.why:
                raise Closed(stream.why) from None
            raise connection.error_of(self.location, error) from None

    def _items(self, reader: Any, where: str) -> Generator[SequencedBatch | Gap | int]:
        """Yield the items of a stream up to the hub's end mark. Raises Unreachable if that is missing."""
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                raise Unreachable(f"{where}: the stream was cut") from None
            metadata = BatchMetadata()
            if chunk.app_metadata is not None:
                metadata = reading.decode(BatchMetadata, chunk.app_metadata.to_pybytes())
            if metadata.gap is not None:
                gap = metadata.gap
                if not 0 <= gap.first <= gap.last:
                    raise Malformed(f"{where}: a gap from {gap.first} to {gap.last}")
                yield Gap(gap.first, gap.last, gap.reason, where)
            if chunk.data is not None and chunk.data.num_rows:
                yield SequencedBatch(_first(chunk.data, metadata, where), chunk.data)
            if metadata.next is not None:
                yield metadata.next
                return

    def _act(self, kind: str, body: bytes, answer: type[T], timeout: float | None = None) -> T:
        """Return the answer to an action. timeout: seconds; None: as for all calls."""
        timeout = self._timeout if timeout is None else timeout
        try:
            results = list(self._client.do_action(flight.Action(kind, body), self._options(timeout)))
        except (pa.ArrowException, OSError) as error:
            raise connection.error_of(self.location, error) from None
        if len(results) != 1:
            raise Malformed(f"{self.location} gave {len(results)} answers to the action {kind!r}")
        return reading.decode(answer, results[0].body.to_pybytes(), LARGEST_ANSWER)

    def _options(self, timeout: float | None) -> flight.FlightCallOptions:
        if self._is_closed:
            raise Closed(self._closed_words())
        return connection.call_options(self._security, timeout)

    def close(self) -> None:
        """Close the connection. Streams in progress raise Closed, at once if other threads wait for them."""
        self._is_closed = True
        self._iterations.end(self._closed_words())
        self._client.close()

    def _closed_words(self) -> str:
        return f"the connection to {self.location} was closed; connect again"


class _Stream:
    """A stream of records in progress. why: the reason why its connection was closed."""

    def __init__(self, reader: flight.FlightStreamReader) -> None:
        self._reader = reader
        self.why = ""

    def end(self, why: str) -> None:
        """Cancel the stream; see `kvspool.engine.iteration.Endable`."""
        self.why = why
        self._reader.cancel()


def _first(batch: pa.RecordBatch, metadata: BatchMetadata, where: str) -> int:
    """Return the sequence of a batch's first row. Raises Malformed for an inconsistent batch."""
    try:
        batch.validate(full=True)
        if any(batch.column(name).null_count for name in batch.schema.names if name != "key"):
            raise ValueError("a column has nulls")
        sequences = batch.column("sequence") if "sequence" in batch.schema.names else None
        if sequences is None:
            if metadata.first is None or not 0 <= metadata.first < LAST - batch.num_rows:
                raise ValueError("its sequences are missing")
            return metadata.first
        if batch.num_rows > 1 and not pc.all(pc.equal(pc.subtract(sequences[1:], sequences[:-1]), 1)).as_py():
            raise ValueError("its sequences are not consecutive")
        first = int(sequences[0].as_py())
        if first < 0:
            raise ValueError(f"its first sequence is {first}")
        return first
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise Malformed(f"{where}: a batch is damaged: {error}") from None
