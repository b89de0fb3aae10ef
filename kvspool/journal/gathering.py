"""Frames of segments as Arrow columns; see `engine.batches`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from kvspool.engine.batches import ColumnBuffers
from kvspool.engine.columns import CODED_SCHEMA, SCHEMA
from kvspool.errors import OutOfRange
from kvspool.gap import Gap
from kvspool.journal.format import WHOLE, Format, Scan
from kvspool.record import Codec

SEQUENCES = 1 << 63  # limit of an int64


def next_batch(cursor: Any, most: int, coded: bool, room: int) -> pa.RecordBatch | Gap:
    """Return up to `most` records from a cursor; see `engine.batches.next_batch`."""
    if cursor.sequence >= SEQUENCES:
        raise OutOfRange(f"{cursor.segments.path}: sequence {cursor.sequence} doesn't fit into a column; read it as a record")
    most = min(most, SEQUENCES - cursor.sequence)
    if not cursor.segments.format.has_columns:
        return _listed(cursor, most, coded)
    gathered = ColumnBuffers(most, room, pa.allocate_buffer, coded)
    gap = cursor.advance(most, _gathering(gathered, cursor.segments.format), gathered, is_greedy=True)
    return gathered.finish() if gap is None else gap


def _gathering(buffers: ColumnBuffers, format: Format) -> Callable[[bytes, int, int], Scan]:
    """Return the function with which a cursor copies the read part of a segment, in pieces."""

    def gather(data: bytes, sequence: int, most: int) -> Scan:
        found = format.gather(data, sequence, min(buffers.most, buffers.count + most), buffers.count, buffers.views)
        if not (buffers.count or found.size) and found.stop == WHOLE and found.need:
            buffers.make_room(1, found.need, pa.allocate_buffer)  # a single record that is larger than a batch
            found = format.gather(data, sequence, 1, 0, buffers.views)
        buffers.count += found.sequence - sequence
        return found

    return gather


def _listed(cursor: Any, most: int, coded: bool) -> pa.RecordBatch | Gap:
    """Do the work of `next_batch` for a format without columns, from record objects."""
    rows: list[tuple[Any, ...]] = []
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
