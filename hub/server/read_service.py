"""The read service of a hub: the shards under its root, for any Flight client; see docs/formats/hub.md.

A shard is read at its reader's pace: only the batch being sent is read ahead, so a slow reader costs one batch. When a reader is gone, its
iteration and its files are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from hub.errors import Fenced, HubFull, Malformed, NotAllowed, NotFound, Unexpected
from hub.protocol import reading
from hub.protocol.ingest import VERSION, Level
from hub.protocol.reading import LONGEST_WAIT, BatchMetadata, Query, ServerInfo, ShardState, Since, Ticket
from hub.root import columns
from hub.root.catalogue import Catalogue
from hub.root.store import generations
from hub.server import ipc
from hub.server.call import Call
from hub.server.flight import Endpoint, FlightDescriptor, Info, encode_data
from hub.server.ipc import BatchEncoder
from hub.server.shard_index import MayRead, Runs, ShardIndex
from kvspool import arrow, system
from kvspool.errors import OutOfRange
from kvspool.options import TIMEOUT
from kvspool.record import Gap
from kvspool.system.handles import Handle
from shard.merged import Log
from shard.shardset import open_shard

LARGEST_CRITERIA = 200  # bytes
ROOM = 4 << 20  # bytes of memory for reading a batch; a larger record is read once it has more
BATCH_BYTES = 2 << 20  # of the values of a batch: a tenth less work than with half of it, and hardly less with more
COPIED = 1 << 16  # bytes of a message up to which it is copied
_SCHEMA, _CODED_SCHEMA = (memoryview(schema.serialize()) for schema in (arrow.SCHEMA, arrow.CODED_SCHEMA))
_encode = msgspec.json.Encoder().encode

ACTIONS = [
    ("changes", 'the shards changed since a token: {"since": token, "wait": seconds up to 30}; without a token all of them'),
    ("server", "this hub: version of the protocol, level, id of its root, its clock"),
]


class _EncodedClientState(msgspec.Struct, frozen=True):
    """A `ClientState` whose shards are encoded."""

    client: str
    bits: int
    shards: list[msgspec.Raw]


class StreamPart(NamedTuple):
    """A message of a stream; `pieces` are its bytes. None: nothing was found so far; or what comes next needs memory of `size` bytes."""

    size: int = 0
    pieces: tuple[bytes | memoryview, ...] = ()


class ReadService(Handle):
    """The read service of a hub. Its functions block, its coroutines don't.

    Each gets the predicate of readable clients, and calls it again for each batch, because a right may be revoked during a call.
    """

    def __init__(self, root: Path, level: Level, catalogue: Catalogue | None = None) -> None:
        """catalogue: that of the root, if the caller has one."""
        self.root = root
        self.index = ShardIndex(root, catalogue)
        self._level: Level = level
        self._is_closing = False

    def close(self) -> None:
        """End all reads and waits."""
        self._is_closing = True
        self.index.close()

    async def flights(self, criteria: bytes, may_list: MayRead, run: Runs) -> Iterator[bytes]:
        """Return an iterator over the flights of the clients that may be listed; its steps block.

        criteria: a prefix of their ids, or a pattern with `*`, `?` and `[...]`.
        """
        wanted = _pattern(criteria)
        states = await self.index.states(lambda client: wanted(client) and may_list(client), run)
        return (self._info(Query(client), shards).encode() for client, shards in states.items())

    async def info(self, descriptor: FlightDescriptor, may_read: MayRead, run: Runs) -> Info:
        """Return the flight of a descriptor: a client, or one shard of it."""
        query = reading.decode_query(list(descriptor.path), descriptor.command)
        _check_right(query.client, may_read)
        states = (await self.index.states(lambda client: client == query.client, run)).get(query.client, [])
        wanted = [state for state in states if query.shard in (None, state.shard)]
        if not wanted:
            raise NotFound(f"there is no client {query.client} here, or not that shard of it")
        return await run(self._info, query, wanted)

    async def read(self, call: Call, ticket: bytes, may_read: MayRead) -> None:
        """Send the records of a ticket."""
        parts = await call.run(self._open, ticket, may_read, call.most_room)
        try:
            room = await call.room(ROOM)
            while (part := await call.run(next, parts, None)) is not None:
                if part.size > room.size:
                    room.release()
                    room = await call.room(part.size)
                if part.pieces:
                    room.release(room.size - part.size)
                    await call.write(*part.pieces, room=room)
                    room = await call.room(ROOM)
        finally:
            await call.release(parts.close)

    def about(self) -> bytes:
        """Return the answer of the action "server"."""
        return _encode(ServerInfo(VERSION, self._level, self.index.root_id, system.port.now()))

    async def changes(self, body: bytes, may_read: MayRead, run: Runs) -> bytes:
        """Return the answer of the action "changes"."""
        asked = reading.decode(Since, body or b"{}")
        if not 0 <= asked.wait <= LONGEST_WAIT:
            raise Malformed(f"wait must be 0 to {LONGEST_WAIT:.0f} seconds, not {asked.wait}")
        return _encode(await self.index.changes(asked.since, asked.wait, may_read, run))

    def _info(self, query: Query, states: list[ShardState]) -> Info:
        """Return a client's flight, with an endpoint for each shard."""
        ticket, encoded = reading.ticket_of(query), [_encode(state) for state in states]
        endpoints = [
            Endpoint(_encode(replace(ticket, shard=state.shard)), data) for state, data in zip(states, encoded, strict=True)
        ]
        return Info(
            _CODED_SCHEMA if query.coded else _SCHEMA,
            FlightDescriptor((query.client.encode(),)),
            endpoints,
            sum(state.next - state.first for state in states),
            sum(map(self.index.used, states)),
            _encode(_EncodedClientState(query.client, states[0].bits, list(map(msgspec.Raw, encoded)))),
        )

    def _open(self, ticket: bytes, may_read: MayRead, most: int) -> Generator[StreamPart]:
        """Return the stream of a ticket. most: bytes of memory that it can have."""
        wanted = reading.decode_ticket(ticket)
        _check_right(wanted.client, may_read)
        return self._stream(self.index.path(wanted.client, wanted.shard), wanted, may_read, most)

    def _stream(self, path: Path, ticket: Ticket, may_read: MayRead, most: int) -> Generator[StreamPart]:
        """Yield the messages of one shard; Gaps and the end are sent with empty batches."""
        schema = columns.schema_of(ticket)
        encoder = BatchEncoder(schema)
        yield _part(ipc.encode_schema(schema))
        with closing(open_shard(path, TIMEOUT)) as log:
            if ticket.log or ticket.generation is not None:
                _check_log(log, path, ticket)
            if ticket.isolation == "synced":
                log.sync()  # no other process may ever do it
            with closing(_Reading(log, ticket, most)) as source:
                for item in source:
                    _check_right(ticket.client, may_read)
                    if self._is_closing:
                        raise HubFull("the hub is shutting down", 1.0)
                    if isinstance(item, Gap):
                        yield _part(*encoder.encode(encoder.empty), BatchMetadata(gap=reading.gap_note(item)))
                    elif isinstance(item, int):
                        yield StreamPart(item)
                    elif "sequence" in schema.names:
                        yield _part(*encoder.encode(item.select(schema.names)))
                    else:
                        first = BatchMetadata(first=item.column("sequence")[0].as_py())
                        yield _part(*encoder.encode(item.select(schema.names)), first)
                yield _part(*encoder.encode(encoder.empty), BatchMetadata(next=source.next))


def _part(header: bytes, body: list[memoryview] | None = None, metadata: BatchMetadata | None = None) -> StreamPart:
    """Return a message of a stream. A small body is copied, because its columns are parts of much larger memory."""
    body = body or []
    size = sum(piece.nbytes for piece in body)
    if size < COPIED:
        body = [memoryview(b"".join(body))]
    start = encode_data(header, b"" if metadata is None else _encode(metadata), size)
    return StreamPart(len(start) + size, (start, *body))


class _Reading(Handle):
    """The items of a log that a ticket selects: coded batches, and Gaps. A number: the bytes of memory that the next step needs."""

    def __init__(self, log: Log, ticket: Ticket, most: int) -> None:
        """Begin; up to the present end. most: the largest number to yield. Raises Unexpected for a start that isn't written yet."""
        self._end = end = log.end()
        if ticket.end is not None:
            self._end = min(end, ticket.end)
        start: Any = ticket.begin
        if start == "earliest" and self._end < end:
            start = min(self._end, log.extent()[0])
        self._log = log
        self._most = most
        self._isolation = ticket.isolation
        try:
            self._cursor = self._cursor_at(start)
        except OutOfRange:
            words = f"client {ticket.client}, shard {ticket.shard}: the next record will be {end}, there is no {start}"
            raise Unexpected(words, end) from None
        self._limit = ticket.limit
        self._first_time = ticket.first_time
        self._last_time = ticket.last_time
        self._stopped_at: int | None = None

    def _cursor_at(self, start: Any) -> Any:
        return self._log.cursor(start, bounded=True, end=self._end, isolation=self._isolation)

    @property
    def next(self) -> int:
        """Return the sequence after the returned items."""
        return int(self._cursor.sequence) if self._stopped_at is None else self._stopped_at

    def __iter__(self) -> Iterator[pa.RecordBatch | Gap | int]:
        left, room, needs = self._limit, ROOM, 0  # needs: bytes of a large record that may be read now
        while self._stopped_at is None and (left is None or left > 0):
            most = arrow.BATCH if left is None else min(arrow.BATCH, left)
            self._cursor.largest = needs or room
            found = arrow.next_batch(self._cursor, most, coded=True, bytes=BATCH_BYTES)
            if isinstance(found, Gap):
                yield found
                continue
            if not found.num_rows and not self._cursor.needs:
                return
            if not found.num_rows:  # a large record, or damage that looks like one
                needs = self._cursor.needs
                room = min(needs + COPIED, self._most)
                yield room
                continue
            needs = 0
            needed = found.nbytes + COPIED
            if needed > room:  # a ring, or a format without the sizes of records, returns a large record at once
                self._go_back(found.column("sequence")[0].as_py())
                del found
                room = needed
                yield needed
                continue
            room = ROOM
            batch = self._within_times(found)
            left = None if left is None else left - batch.num_rows
            yield batch if batch.num_rows else 0

    def _go_back(self, sequence: int) -> None:
        self._cursor.close()
        self._cursor = self._cursor_at(sequence)

    def close(self) -> None:
        """Close the cursor."""
        self._cursor.close()

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


def _check_log(log: Log, path: Path, ticket: Ticket) -> None:
    """Raise Fenced if the shard's records don't come from the logs in a ticket."""
    known = generations(log, path, log.end())
    if ticket.log and (not known or known[0].log != ticket.log):
        raise Fenced(f"client {ticket.client}, shard {ticket.shard}: another log has replaced {ticket.log}")
    if ticket.generation is not None and ticket.generation not in known:
        wanted = ticket.generation
        raise Fenced(f"client {ticket.client}, shard {ticket.shard} has no records of log {wanted.log} from sequence {wanted.base} on")


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
