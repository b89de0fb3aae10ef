"""The read service of a hub: the shards under its root, for any Flight client; see docs/formats/hub.md.

A shard is read at its reader's pace: only the batch being sent is read ahead, so a slow reader costs one batch. When a reader is gone, its
iteration and its files are closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import flight

from hub.errors import Fenced, HubError, HubFull, Malformed, NotAllowed, NotFound, QuotaExceeded, ShardDamaged, Unexpected
from hub.protocol import reading
from hub.protocol.ingest import VERSION, Level
from hub.protocol.reading import LONGEST_WAIT, BatchMetadata, ClientState, Query, ServerInfo, ShardState, Since, Ticket
from hub.root import columns
from hub.root.store import generations
from hub.server.reads import Reads, Stream, gone
from hub.server.shard_index import IsOver, MayRead, ShardIndex, is_scarce, shown
from kvspool import arrow, system
from kvspool.errors import KvspoolError, OutOfRange
from kvspool.options import TIMEOUT
from kvspool.record import Gap
from kvspool.system.handles import Handle
from shard.merged import Log
from shard.shardset import open_shard

LARGEST_CRITERIA = 200  # bytes
BATCH_BYTES = 2 << 20  # of the values of a batch: a tenth less work than with half of it, and hardly less with more
logger = logging.getLogger("kvspool.hub")
_encode = msgspec.json.Encoder().encode

ACTIONS = [
    ("changes", 'the shards changed since a token: {"since": token, "wait": seconds up to 30}; without a token all of them'),
    ("server", "this hub: version of the protocol, level, id of its root, its clock"),
]


class ReadService(Handle):
    """The read service of a hub. Its methods are called on Flight's threads.

    Each gets the predicate of readable clients, and calls it again for each batch, because a right may be revoked during a call. Refusals
    are raised as errors of Flight.
    """

    def __init__(self, root: Path, level: Level, reads: Reads | None = None) -> None:
        self.root = root
        self.reads = Reads() if reads is None else reads
        self.index = ShardIndex(root)
        self._level: Level = level
        self._is_closing = False

    def close(self) -> None:
        """End all reads and waits."""
        self._is_closing = True
        self.index.close()

    def flights(self, criteria: bytes, may_list: MayRead, is_over: IsOver = lambda: False) -> Iterator[flight.FlightInfo]:
        """Yield a flight for each client that may be listed.

        criteria: a prefix of its id, or a pattern with `*`, `?` and `[...]`. is_over: whether the caller is gone.
        """
        with refusing(self.root):
            wanted = _pattern(criteria)
            for client, states in self.index.states(lambda client: wanted(client) and may_list(client), is_over).items():
                if is_over():
                    raise gone()
                yield self._info(Query(client), states)

    def info(self, descriptor: flight.FlightDescriptor, may_read: MayRead, is_over: IsOver = lambda: False) -> flight.FlightInfo:
        """Return the flight of a descriptor: a client, or one shard of it."""
        with refusing(self.root):
            query = reading.decode_query(descriptor.path or [], descriptor.command)
            _check_right(query.client, may_read)
            states = self.index.states(lambda client: client == query.client, is_over).get(query.client, [])
            wanted = [state for state in states if query.shard in (None, state.shard)]
            if not wanted:
                raise NotFound(f"there is no client {query.client} here, or not that shard of it")
            return self._info(query, wanted)

    def read(
        self,
        ticket: bytes,
        may_read: MayRead,
        sent: Callable[[int], object] = lambda size: None,
        is_over: IsOver = lambda: False,
        cut: Callable[[], object] = lambda: None,
    ) -> flight.FlightDataStream:
        """Return the stream of a ticket.

        sent: called with the size of each batch sent to the caller. is_over: whether the caller is gone. cut: cuts its connection.
        """
        with refusing(self.root):
            wanted = reading.decode_ticket(ticket)
            _check_right(wanted.client, may_read)
            path = self.index.path(wanted.client, wanted.shard)
            schema = columns.schema_of(wanted)
            return flight.GeneratorStream(schema, self._stream(path, wanted, schema, may_read, sent, self.reads.stream(is_over, cut)))

    def act(self, kind: str, body: bytes, may_read: MayRead, is_over: IsOver = lambda: False) -> Iterator[bytes]:
        """Yield the answers of an action. is_over: whether its caller is gone."""
        with refusing(self.root):
            if kind == "server":
                yield _encode(ServerInfo(VERSION, self._level, self.index.root_id, system.port.now()))
            elif kind == "changes":
                asked = reading.decode(Since, body or b"{}")
                if not 0 <= asked.wait <= LONGEST_WAIT:
                    raise Malformed(f"wait must be 0 to {LONGEST_WAIT:.0f} seconds, not {asked.wait}")
                yield _encode(self.index.changes(asked.since, asked.wait, may_read, is_over))
            else:
                raise Malformed(f"unknown action {kind[:50]!r}; ListActions lists the actions")

    def _info(self, query: Query, states: list[ShardState]) -> flight.FlightInfo:
        """Return a client's flight, with an endpoint for each shard; it has no location, which means this server."""
        endpoints, size = [], 0
        for state in states:
            ticket = _encode(reading.ticket_of(query, state.shard))
            endpoints.append(flight.FlightEndpoint(ticket, [], app_metadata=_encode(state)))
            size += self._used(state)
        return flight.FlightInfo(
            arrow.CODED_SCHEMA if query.coded else arrow.SCHEMA,
            flight.FlightDescriptor.for_path(query.client),
            endpoints,
            sum(state.next - state.first for state in states),
            size,
            app_metadata=_encode(ClientState(query.client, states[0].bits, states)),
        )

    def _used(self, state: ShardState) -> int:
        """Return the bytes of a shard's records; 0 if they can't be read."""
        try:
            with closing(open_shard(self.index.path(state.client, state.shard), TIMEOUT)) as log:
                return int(log.stats().used)
        except (KvspoolError, OSError):
            return 0  # its state has the error

    def _stream(
        self,
        path: Path,
        ticket: Ticket,
        schema: pa.Schema,
        may_read: MayRead,
        sent: Callable[[int], object],
        reads: AbstractContextManager[Stream],
    ) -> Iterator[tuple[pa.RecordBatch, bytes] | pa.RecordBatch]:
        """Yield the batches of one shard; Gaps and the end are sent with empty batches."""
        with refusing(self.root), reads as stream, closing(open_shard(path, TIMEOUT)) as log:
            if ticket.log:
                _check_log(log, path, ticket)
            if ticket.isolation == "synced":
                log.sync()  # no other process may ever do it
            with closing(_cursor(log, ticket)) as cursor:
                source = _Reading(cursor, ticket, stream)
                nothing = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
                for item in source:
                    stream.sends(0 if isinstance(item, Gap) else item.get_total_buffer_size())
                    _check_right(ticket.client, may_read)
                    if self._is_closing:
                        raise HubFull("the hub is shutting down", 1.0)
                    if isinstance(item, Gap):
                        yield nothing, _encode(BatchMetadata(gap=reading.gap_note(item)))
                    elif "sequence" in schema.names:
                        yield item.select(schema.names)
                    else:
                        yield item.select(schema.names), _encode(BatchMetadata(first=item.column("sequence")[0].as_py()))
                    sent(0 if isinstance(item, Gap) else item.nbytes)
                yield nothing, _encode(BatchMetadata(next=source.next))


class _Reading:
    """The items of a cursor that a ticket selects: coded batches, and Gaps."""

    def __init__(self, cursor: Any, ticket: Ticket, stream: Stream) -> None:
        self._cursor = cursor
        self._stream = stream
        self._limit = ticket.limit
        self._first_time = ticket.first_time
        self._last_time = ticket.last_time
        self._stopped_at: int | None = None

    @property
    def next(self) -> int:
        """Return the sequence after the returned items."""
        return int(self._cursor.sequence) if self._stopped_at is None else self._stopped_at

    def __iter__(self) -> Iterator[pa.RecordBatch | Gap]:
        left = self._limit
        while self._stopped_at is None and (left is None or left > 0):
            most = arrow.BATCH if left is None else min(arrow.BATCH, left)
            with self._stream.reading():
                found = arrow.next_batch(self._cursor, most, coded=True, bytes=BATCH_BYTES)
            if isinstance(found, Gap):
                yield found
                continue
            if not found.num_rows:
                return
            batch = self._within_times(found)
            left = None if left is None else left - batch.num_rows
            if batch.num_rows:
                yield batch

    def _within_times(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows within the ticket's times: from the first one at the start, up to one at the end."""
        times = batch.column("timestamp").cast(pa.int64())
        begin, end = 0, batch.num_rows
        if self._first_time is not None:
            begin = pc.index(pc.greater_equal(times, self._first_time), True).as_py()
            begin = end if begin < 0 else begin
            self._first_time = self._first_time if begin == end else None
        if self._last_time is not None:
            stop = pc.index(pc.greater_equal(times.slice(begin), self._last_time), True).as_py()
            if stop >= 0:
                end = begin + stop
                self._stopped_at = batch.column("sequence")[end].as_py()
        return batch.slice(begin, end - begin)


def _cursor(log: Log, ticket: Ticket) -> Any:
    """Return a cursor for a ticket, up to the present end. Raises Unexpected for a start that isn't written yet."""
    end = log.end()
    until = ticket.end if ticket.end is not None and ticket.end < end else None
    start: Any = ticket.begin
    if until is not None and start == "earliest":
        start = min(until, log.extent()[0])
    try:
        return log.cursor(start, bounded=True, end=until, isolation=ticket.isolation)
    except OutOfRange:
        raise Unexpected(f"client {ticket.client}, shard {ticket.shard}: the next record will be {end}, there is no {start}", end) from None


def _check_log(log: Log, path: Path, ticket: Ticket) -> None:
    """Raise Fenced if the shard's records don't come from the log in a ticket."""
    known = generations(log, path, log.end())
    if not known or known[0].log != ticket.log:
        raise Fenced(f"client {ticket.client}, shard {ticket.shard}: another log has replaced {ticket.log}")


def _check_right(client: str, may_read: MayRead) -> None:
    """Raise NotAllowed for a caller that may not read a client, whether it exists or not."""
    if not may_read(client):
        raise NotAllowed(f"you may not read client {client}")


def _pattern(criteria: bytes) -> Callable[[str], bool]:
    """Return a predicate for ids of clients that match the criteria. Raises Malformed."""
    if len(criteria) > LARGEST_CRITERIA or not criteria.isascii():
        raise Malformed(f"criteria must be a prefix of a client's id, or a pattern, of at most {LARGEST_CRITERIA} bytes")
    wanted = criteria.decode()
    if any(character in wanted for character in "*?["):
        return lambda client: fnmatchcase(client, wanted)
    return lambda client: client.startswith(wanted)


@contextmanager
def refusing(root: Path) -> Iterator[None]:
    """Raise errors as those of Flight, with the data that programs need, and without the hub's own tracebacks."""
    try:
        yield
    except flight.FlightError:
        raise
    except Exception as error:
        known = _as_hub_error(error, root)
        if not isinstance(error, HubError):
            logger.error("a reader got the error %s", known, exc_info=None if isinstance(error, KvspoolError | OSError) else error)
        failure = reading.failure(known)
        raise _KINDS.get(type(known), flight.FlightServerError)(failure.message, _encode(failure)) from None


_KINDS = {
    NotAllowed: flight.FlightUnauthorizedError,
    HubFull: flight.FlightUnavailableError,
    QuotaExceeded: flight.FlightUnavailableError,
    ShardDamaged: flight.FlightInternalError,
}


def _as_hub_error(error: Exception, root: Path) -> HubError:
    """Return the HubError for an error of a log."""
    if isinstance(error, HubError):
        return error
    if is_scarce(error):
        return HubFull(f"the hub lacks space for that now: {shown(error, root)}")
    if isinstance(error, MemoryError):
        return HubFull("the hub lacks memory for that now", 1.0)
    if isinstance(error, KvspoolError | OSError):
        return ShardDamaged(f"the hub can't continue reading: {shown(error, root)}")
    return ShardDamaged("the hub failed; its own log has the reason")
