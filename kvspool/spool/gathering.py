"""Frames of the ring as Arrow columns; see `engine.batches`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from kvspool.engine.batches import BATCH, LARGE, LARGE_BATCH, ColumnBuffers, lent
from kvspool.engine.columns import CODED_SCHEMA
from kvspool.errors import Undecodable
from kvspool.gap import Gap
from kvspool.kernel import frames_py as frames
from kvspool.record import Codec, Record, plain

if TYPE_CHECKING:
    from kvspool.spool.keys import KeyTable


def next_batch(cursor: Any, most: int, coded: bool, room: int) -> pa.RecordBatch | Gap:
    """Return up to `most` records from a cursor; see `engine.batches.next_batch`."""
    while True:
        room = min(room, cursor.reader.capacity)
        end = cursor.reader.tail() if cursor.end is None else cursor.end[0]
        table = cursor.key_table if coded else None
        is_much = end - cursor.reader.position >= LARGE and most >= BATCH >> 3
        rows = most if is_much and most >= LARGE_BATCH else min(most, BATCH)
        gathered = ColumnBuffers(rows, room, lent if is_much else pa.allocate_buffer, coded)
        found = cursor.advance(_gathering(gathered, cursor.reader))
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


def _without_keys(batch: pa.RecordBatch, cursor: Any, key_table: KeyTable) -> pa.RecordBatch:
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


def _gathering(buffers: ColumnBuffers, reader: Any) -> Callable[[int], ColumnBuffers]:
    """Return the function with which a cursor copies frames up to a position."""

    def gather(end: int) -> ColumnBuffers:
        buffers.count = reader.gather(end, buffers.most, *buffers.views)
        return buffers

    return gather
