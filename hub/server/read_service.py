"""What a hub hands out: the shards under its root, to any Flight client; see docs/formats/hub.md.

A shard is read as its reader takes it: nothing is read ahead but the batch that is being sent, so a slow reader costs one batch. Who is
gone takes the iteration with it, and its files.
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
from hub.protocol.reading import LONGEST_WAIT, Beside, ClientState, Query, ServerInfo, ShardState, Since, Ticket
from hub.root import columns
from hub.root.store import generations
from hub.server.reads import Reads, Stream, gone
from hub.server.shard_index import IsOver, MayRead, ShardIndex, is_scarce, shown
from kvspool import arrow, system
from kvspool.errors import KvspoolError, OutOfRange
from kvspool.handles import Handle
from kvspool.journal import Journal
from kvspool.record import Gap
from kvspool.spool.spool import TIMEOUT
from shard.shardset import Log, open_shard

LARGEST_CRITERIA = 200  # bytes
BATCH_BYTES = 2 << 20  # of the values of a batch: a tenth less work than with half of it, and hardly less with more
logger = logging.getLogger("kvspool.hub")
_encode = msgspec.json.Encoder().encode

ACTIONS = [
    ("changes", 'the shards that have changed since a token: {"since": token, "wait": seconds up to 30}; without a token all of them'),
    ("server", "what this hub is: version of the protocol, level, id of its root, its clock"),
]


class ReadService(Handle):
    """The reading side of a hub. Its methods are called on Flight's threads; each is told which clients the caller may read, and asks again
    for each batch: a right may be taken away meanwhile.

    What is refused is raised as an error of Flight.
    """

    def __init__(self, root: Path, level: Level, reads: Reads | None = None) -> None:
        self.root = root
        self.reads = Reads() if reads is None else reads
        self.index = ShardIndex(root)
        self._level: Level = level
        self._is_closing = False

    def close(self) -> None:
        """End what is being read and waited for."""
        self._is_closing = True
        self.index.close()

    def flights(self, criteria: bytes, may_list: MayRead, is_over: IsOver = lambda: False) -> Iterator[flight.FlightInfo]:
        """Yield a flight for each client that may be listed. criteria: the beginning of its id, or a pattern with `*`, `?` and `[...]`.
        is_over: whether the caller is gone."""
        with refusing(self.root):
            wanted = _pattern(criteria)
            for client, states in self.index.states(lambda client: wanted(client) and may_list(client), is_over).items():
                if is_over():
                    raise gone()
                yield self._info(Query(client), states)

    def info(self, descriptor: flight.FlightDescriptor, may_read: MayRead, is_over: IsOver = lambda: False) -> flight.FlightInfo:
        """Return what a descriptor names: a client, or one shard of it."""
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
        """Return the stream that a ticket asks for.

        sent: called with the bytes of each batch that the caller was sent. is_over: whether the caller is gone. cut: cuts its connection.
        """
        with refusing(self.root):
            wanted = reading.decode_ticket(ticket)
            _check_right(wanted.client, may_read)
            path = self.index.path(wanted.client, wanted.shard)
            schema = columns.schema_of(wanted)
            return flight.GeneratorStream(schema, self._stream(path, wanted, schema, may_read, sent, self.reads.stream(is_over, cut)))

    def act(self, kind: str, body: bytes, may_read: MayRead, is_over: IsOver = lambda: False) -> Iterator[bytes]:
        """Yield what an action answers. is_over: whether its caller is gone."""
        with refusing(self.root):
            if kind == "server":
                yield _encode(ServerInfo(VERSION, self._level, self.index.root_id, system.port.now()))
            elif kind == "changes":
                asked = reading.decode(Since, body or b"{}")
                if not 0 <= asked.wait <= LONGEST_WAIT:
                    raise Malformed(f"wait is 0 to {LONGEST_WAIT:.0f} seconds, not {asked.wait}")
                yield _encode(self.index.changes(asked.since, asked.wait, may_read, is_over))
            else:
                raise Malformed(f"there is no action {kind[:50]!r}; ListActions says which there are")

    def _info(self, query: Query, states: list[ShardState]) -> flight.FlightInfo:
        """Return a client's flight: an endpoint without a location, which means this server, for each shard."""
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
        """Return the bytes that a shard's records take; 0 of one that can't be read."""
        try:
            with closing(open_shard(self.index.path(state.client, state.shard), TIMEOUT)) as log:
                return int(log.stats().used)
        except (KvspoolError, OSError):
            return 0  # its state says so

    def _stream(
        self,
        path: Path,
        ticket: Ticket,
        schema: pa.Schema,
        may_read: MayRead,
        sent: Callable[[int], object],
        reads: AbstractContextManager[Stream],
    ) -> Iterator[tuple[pa.RecordBatch, bytes] | pa.RecordBatch]:
        """Yield the batches of one shard; what is lost, and the end, beside batches without rows."""
        with refusing(self.root), reads as stream, closing(open_shard(path, TIMEOUT)) as log:
            if ticket.log:
                _check_log(log, path, ticket)
            if ticket.isolation == "synced":
                log.sync()  # nobody else may ever do it
            with closing(_cursor(log, ticket)) as cursor:
                source = _Reading(cursor, ticket, stream)
                nothing = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)
                for item in source:
                    stream.sends(0 if isinstance(item, Gap) else item.get_total_buffer_size())
                    _check_right(ticket.client, may_read)
                    if self._is_closing:
                        raise HubFull("the hub is being stopped", 1.0)
                    if isinstance(item, Gap):
                        yield nothing, _encode(Beside(gap=reading.gap_note(item)))
                    elif "sequence" in schema.names:
                        yield item.select(schema.names)
                    else:
                        yield item.select(schema.names), _encode(Beside(first=item.column("sequence")[0].as_py()))
                    sent(0 if isinstance(item, Gap) else item.nbytes)
                yield nothing, _encode(Beside(next=source.next))


class _Reading:
    """What a ticket asks for of one cursor: coded batches, and Gaps."""

    def __init__(self, cursor: Any, ticket: Ticket, stream: Stream) -> None:
        self._cursor = cursor
        self._stream = stream
        self._limit = ticket.limit
        self._first_time = ticket.first_time
        self._last_time = ticket.last_time
        self._stopped_at: int | None = None

    @property
    def next(self) -> int:
        """Return the sequence behind what was handed out."""
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
        """Return the rows that are wanted: once one was found that begins them, all that follow, up to one that ends them."""
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
    """Return a cursor over what a ticket asks for, up to what is there now. Raises Unexpected for what isn't there yet."""
    end = log.end()
    until = ticket.end if ticket.end is not None and ticket.end < end else None
    start: Any = ticket.begin
    if until is not None and start == "earliest":
        start = min(until, log.first() if isinstance(log, Journal) else log.stats().first_sequence)
    try:
        return log.cursor(start, bounded=True, end=until, isolation=ticket.isolation)
    except OutOfRange:
        raise Unexpected(f"client {ticket.client}, shard {ticket.shard}: the next record will be {end}, there is no {start}", end) from None


def _check_log(log: Log, path: Path, ticket: Ticket) -> None:
    """Raise Fenced if the shard's records don't come from the log that a ticket names."""
    known = generations(log, path, log.end())
    if not known or known[0].log != ticket.log:
        raise Fenced(f"client {ticket.client}, shard {ticket.shard}: another log has taken the place of {ticket.log}")


def _check_right(client: str, may_read: MayRead) -> None:
    """Raise NotAllowed for who may not read a client, whether it is there or not."""
    if not may_read(client):
        raise NotAllowed(f"you may not read client {client}")


def _pattern(criteria: bytes) -> Callable[[str], bool]:
    """Return what says whether a client's id agrees with the criteria. Raises Malformed."""
    if len(criteria) > LARGEST_CRITERIA or not criteria.isascii():
        raise Malformed(f"criteria are the beginning of a client's id, or a pattern, of at most {LARGEST_CRITERIA} bytes")
    wanted = criteria.decode()
    if any(character in wanted for character in "*?["):
        return lambda client: fnmatchcase(client, wanted)
    return lambda client: client.startswith(wanted)


@contextmanager
def refusing(root: Path) -> Iterator[None]:
    """Raise what goes wrong as errors of Flight, which carry what programs need, and nothing of the hub's own code."""
    try:
        yield
    except flight.FlightError:
        raise
    except Exception as error:
        known = _as_hub_error(error, root)
        if not isinstance(error, HubError):
            logger.error("a reader was told %s", known, exc_info=None if isinstance(error, KvspoolError | OSError) else error)
        failure = reading.failure(known)
        raise _KINDS.get(type(known), flight.FlightServerError)(failure.message, _encode(failure)) from None


_KINDS = {
    NotAllowed: flight.FlightUnauthorizedError,
    HubFull: flight.FlightUnavailableError,
    QuotaExceeded: flight.FlightUnavailableError,
    ShardDamaged: flight.FlightInternalError,
}


def _as_hub_error(error: Exception, root: Path) -> HubError:
    """Return what an error of a log means to who reads a hub."""
    if isinstance(error, HubError):
        return error
    if is_scarce(error):
        return HubFull(f"the hub has no room for that now: {shown(error, root)}")
    if isinstance(error, MemoryError):
        return HubFull("the hub has no memory for that now", 1.0)
    if isinstance(error, KvspoolError | OSError):
        return ShardDamaged(f"the hub can't read on: {shown(error, root)}")
    return ShardDamaged("the hub failed; its own log says why")
