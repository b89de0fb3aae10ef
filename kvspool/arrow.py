"""Records as Arrow columns, in both directions, without a Python object for a row. Needs the extra `arrow`.

The frame loops copy directly between the ring and the buffers of Arrow arrays, with all checks of checksums and overruns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvspool.engine.columns import CODED_SCHEMA, RECORDS, SCHEMA, Columns, items_of, parts
from kvspool.engine.iteration import keeping
from kvspool.engine.pool import Pool
from kvspool.errors import GapError, OutOfRange, Undecodable
from kvspool.journal.columns import ColumnRows, JournalColumns, Records
from kvspool.journal.cursor import CHUNK, Take
from kvspool.journal.cursor import Cursor as JournalCursor
from kvspool.journal.format import WHOLE, Format, Scan
from kvspool.kernel import frames_py as frames
from kvspool.options import OnGap
from kvspool.record import Codec, Gap, Record, plain
from kvspool.spool.cursor import Cursor
from kvspool.spool.keys import KeyTable

__all__ = [
    "BATCH",
    "CODED_SCHEMA",
    "LARGE_BATCH",
    "RECORDS",
    "SCHEMA",
    "WINDOW",
    "AnyCursor",
    "ColumnRows",
    "Columns",
    "JournalColumns",
    "Records",
    "batches",
    "next_batch",
    "parts",
    "read",
    "table",
]
BATCH = 32_768  # records of a batch: enough to hide its fixed costs, few enough for the caches
WINDOW = 16 << 20  # bytes of keys, and of values, in a batch
LARGE = 8 << 20  # remaining bytes of the ring from which on larger batches use lent memory, and a table has large ones
LARGE_BATCH = 1 << 17  # records of a large one
_SEQUENCES = 1 << 63  # limit of an int64

AnyCursor = Cursor | JournalCursor


def read(cursor: AnyCursor, limit: int | None, on_gap: OnGap) -> pa.Table:
    """Read the bounded cursor, up to `limit` records; see `Log.read_arrow`."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit is a number of records, not {limit}")
    return table(batches(cursor, limit, LARGE_BATCH), SCHEMA, on_gap)


def table(items: Iterable[pa.RecordBatch | Gap], schema: pa.Schema, on_gap: OnGap) -> pa.Table:
    """Return the batches as one table. on_gap: "skip" leaves Gaps out, "raise" raises GapError at the first one.

    An error that ends `items`, and a GapError, have the table of all records before it as `partial`.
    """
    if on_gap not in ("raise", "skip"):
        raise ValueError(f'on_gap is "raise" or "skip" here, not {on_gap!r}: a table cannot hold a Gap')
    got: list[pa.RecordBatch] = []
    with keeping(lambda: pa.Table.from_batches(got, schema=schema)):
        for item in items:
            if not isinstance(item, Gap):
                got.append(item)
            elif on_gap == "raise":
                raise GapError(item)
    return pa.Table.from_batches(got, schema=schema)


def batches(
    cursor: AnyCursor, limit: int | None = None, most: int = BATCH, *, coded: bool = False, bytes: int = WINDOW
) -> Iterator[pa.RecordBatch | Gap]:
    """Yield the records of the cursor that are present now, as batches of up to `most` records, and Gaps between them; see `next_batch`."""
    left = limit
    while left is None or left > 0:
        batch = next_batch(cursor, most if left is None else min(most, left), coded=coded, bytes=bytes)
        if isinstance(batch, Gap):
            yield batch
            continue
        if batch.num_rows == 0:
            return
        yield batch
        if left is not None:
            left -= batch.num_rows


def next_batch(cursor: AnyCursor, most: int = BATCH, *, coded: bool = False, bytes: int = WINDOW) -> pa.RecordBatch | Gap:
    """Return up to `most` records without blocking; or a Gap; or an empty batch if there is none.

    coded: with `CODED_SCHEMA`. bytes: most bytes of all values, and of all keys; a larger record is a batch of its own. A batch may have
    fewer records than possible: it never continues over a Gap or, in a journal, into the next segment.

    Raises the errors of reading the log; Undecodable for a keyed value, if it is `coded`; OutOfRange for sequences from 2^63 on, which
    don't fit into the column. Records before an error are returned first, and the next call raises it. The call after an Undecodable
    continues with the next record.
    """
    if bytes < 1:
        raise ValueError(f"a batch has at least 1 byte, not {bytes}")
    if isinstance(cursor, JournalCursor):
        return _next_of_journal(cursor, most, coded, bytes)
    return _next_of_spool(cursor, most, coded, bytes)


def _next_of_spool(cursor: Cursor, most: int, coded: bool, room: int) -> pa.RecordBatch | Gap:
    while True:
        room = min(room, cursor.reader.capacity)
        end = cursor.reader.tail() if cursor.end is None else cursor.end[0]
        table = cursor.key_table if coded else None
        is_much = end - cursor.reader.position >= LARGE and most >= BATCH >> 3
        rows = most if is_much and most >= LARGE_BATCH else min(most, BATCH)
        gathered = _Batch(rows, room, _lent if is_much else pa.allocate_buffer, coded)
        found = cursor.advance(gathered.from_ring(cursor.reader))
        if isinstance(found, Gap):
            return found
        if gathered.count == 0 and cursor.reader.stop == frames.FULL:
            room, most = cursor.reader.stored, 1  # a single record that is larger than a batch
            continue
        batch = gathered.finish()
        if table is None or not batch.num_rows:
            return batch
        table.look()
        if cursor.key_table is not table:  # recovered or resized meanwhile: the indexes may refer to other keys
            cursor.go_to(batch.column("sequence")[0].as_py())
            continue
        return _without_keys(batch, cursor, table)


def _without_keys(batch: pa.RecordBatch, cursor: Cursor, key_table: KeyTable) -> pa.RecordBatch:
    """Return a coded batch with its keyed values as MessagePack: the same one if it has none.

    The batch ends before a value that can't be decoded, and the cursor returns there. Raises Undecodable if it is the first one.
    """
    is_keyed = pc.equal(batch.column("codec"), Codec.KEYED)
    if not pc.any(is_keyed).as_py():
        return batch
    values, sequences = batch.column("value").to_pylist(), batch.column("sequence")
    for row in pc.indices_nonzero(is_keyed).to_pylist():
        sequence = sequences[row].as_py()
        try:
            values[row] = plain(Record(sequence, 0, 0, None, values[row], Codec.KEYED, key_table=key_table.keys))
        except Undecodable:
            cursor.go_to(sequence if row else sequence + 1)
            if row:
                return _without_keys(batch.slice(0, row), cursor, key_table)
            raise
    codecs = pc.if_else(is_keyed, pa.scalar(Codec.MSGPACK, pa.uint8()), batch.column("codec"))
    return batch.set_column(4, CODED_SCHEMA.field(4), pa.array(values, pa.binary())).set_column(5, CODED_SCHEMA.field(5), codecs)


def _next_of_journal(cursor: JournalCursor, most: int, coded: bool, room: int) -> pa.RecordBatch | Gap:
    if cursor.sequence >= _SEQUENCES:
        raise OutOfRange(f"{cursor.segments.path}: sequence {cursor.sequence} doesn't fit into a column; read it as a record")
    most = min(most, _SEQUENCES - cursor.sequence)
    if not cursor.segments.format.has_columns:
        return _listed(cursor, most, coded, room)
    gathered = _Batch(most, room, pa.allocate_buffer, coded)
    gap = cursor.advance(most, gathered.from_segments(cursor.segments.format), gathered, is_greedy=True)
    return gathered.finish() if gap is None else gap


def _listed(cursor: JournalCursor, most: int, coded: bool, room: int) -> pa.RecordBatch | Gap:
    """Do the work of `next_batch` for a format without columns, from record objects."""
    rows: list[tuple[Any, ...]] = []
    if room < CHUNK:
        most = min(most, 1)  # otherwise the records read at once fit, or it is one record
    gap = cursor.fetch(most, _row, rows)
    if gap is not None:
        return gap
    schema = CODED_SCHEMA if coded else SCHEMA
    columns = list(zip(*rows, strict=True)) or [()] * len(CODED_SCHEMA)
    columns[1] = pa.array(columns[1], pa.int64()).cast(SCHEMA.field(1).type)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=False)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _row(sequence: int, timestamp: int, type: int, key: bytes | None, value: bytes, codec: int = Codec.RAW) -> tuple[Any, ...]:
    return sequence, timestamp, type, key, value, codec


class _Batch:
    """Buffers into which a batch is gathered."""

    def __init__(self, most: int, room: int, allocate: Callable[[int], pa.Buffer], coded: bool) -> None:
        self.count = 0
        self.coded = coded
        self._make_room(most, room, allocate)

    def _make_room(self, most: int, room: int, allocate: Callable[[int], pa.Buffer]) -> None:
        self.most = most
        self._key_bits = pa.py_buffer(bytearray(most // 8 + 1))
        # One allocation for all: its unused part is never touched, and costs nothing.
        sizes = [8 * most, 8 * most, 4 * most, 4 * (most + 2), 4 * (most + 2), room, room, most if self.coded else 0]
        memory = allocate(sum(sizes))
        places = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        view = items_of(memory, "B")
        self._views = [view[place].cast(code) for place, code in zip(places, "qqiiiBBB", strict=True)]  # type: ignore[call-overload]
        self._columns = [memory.slice(place.start, place.stop - place.start) for place in places]
        self._views[3][0] = self._views[4][0] = 0  # the start of the first key and the first value

    def __len__(self) -> int:
        return self.count

    def from_ring(self, reader: Any) -> Callable[[int], _Batch]:
        """Return the function with which a spool's cursor copies frames up to a position."""

        def gather(end: int) -> _Batch:
            self.count = reader.gather(end, self.most, *self.views)
            return self

        return gather

    def from_segments(self, format: Format) -> Take:
        """Return the function with which a journal's cursor copies the read part of a segment, in pieces."""

        def gather(data: bytes, sequence: int, most: int) -> Scan:
            found = format.gather(data, sequence, min(self.most, self.count + most), self.count, self.views)
            if not (self.count or found.size) and found.stop == WHOLE and found.need:
                self._make_room(1, found.need, pa.allocate_buffer)  # a single record that is larger than a batch
                found = format.gather(data, sequence, 1, 0, self.views)
            self.count += found.sequence - sequence
            return found

        return gather

    @property
    def views(self) -> tuple[memoryview | None, ...]:
        """Return the buffers in the order in which the loops take them."""
        sequences, timestamps, types, key_offsets, value_offsets, values, keys, codecs = self._views
        key_bits = items_of(self._key_bits, "B")
        return sequences, timestamps, types, key_offsets, keys, key_bits, value_offsets, values, codecs if self.coded else None

    def finish(self) -> pa.RecordBatch:
        """Return the batch; it shares the buffers."""
        count = self.count
        sequences, timestamps, types, key_offsets, value_offsets, values, keys, codecs = self._columns
        arrays = [
            pa.Array.from_buffers(pa.int64(), count, [None, sequences]),
            pa.Array.from_buffers(pa.timestamp("ns", "UTC"), count, [None, timestamps]),
            pa.Array.from_buffers(pa.int32(), count, [None, types]),
            pa.Array.from_buffers(pa.binary(), count, [self._key_bits, key_offsets, keys]),
            pa.Array.from_buffers(pa.binary(), count, [None, value_offsets, values]),
        ]
        if self.coded:
            arrays.append(pa.Array.from_buffers(pa.uint8(), count, [None, codecs]))
        return pa.RecordBatch.from_arrays(arrays, schema=CODED_SCHEMA if self.coded else SCHEMA)


_pools = [Pool(6 << 20, spare=16), Pool(36 << 20, spare=64)]
"""Memory for the batches of large reads: of 2 MiB of values, and any. Values of 100 bytes fill half of a large piece with a large
batch; the spare ones have room for the records of a ring of 1 GiB."""


def _lent(size: int) -> pa.Buffer:
    """Return a buffer of reused memory, or of memory that the kernel clears in large pages; any other if neither is available.

    Only the buffer holds the view that was lent. Arrow's own pool reuses memory, too, but only with some of its allocators. Raises
    MemoryError.
    """
    pool = next((pool for pool in _pools if size <= pool.size), _pools[-1])
    try:
        return pa.py_buffer(pool.lend(size))
    except OSError:  # no address space for it, but perhaps Arrow's pool has memory
        return pa.allocate_buffer(size)
