"""Arrow columns that are appended, as the loops take them: without a Python object for a row. Needs the extra `arrow`."""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from kvspool.engine import times
from kvspool.errors import TooLarge
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import measure_columns

SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.int64()),
        pa.field("timestamp", pa.timestamp("ns", "UTC")),
        pa.field("type", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
"""The columns of reads. A null key is no key; nothing else is ever null."""
CODED_SCHEMA = SCHEMA.append(pa.field("codec", pa.uint8()))
"""The same with the codec of each value, a `kvspool.record.Codec`. Values of codec KEYED become plain MessagePack, with its codec."""
RECORDS = CODED_SCHEMA.remove(0)
"""The same without the sequences: `Records` appends it to a journal unchanged."""


def parts(batch: pa.RecordBatch | pa.Table) -> list[pa.RecordBatch]:
    """Return the record batches of a table, or the given one."""
    return batch.to_batches() if isinstance(batch, pa.Table) else [batch]


class Columns:
    """A record batch laid out for the frame loops: every row is a record to append.

    Columns: `value`; optionally `key`, `type` and `timestamp`. Raises ValueError or TypeError, naming the column, for one that is missing,
    unknown, of a wrong type, or null where nulls aren't allowed, and TooLarge for a key. Arrow's offsets are trusted.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("value", "key", "type", "timestamp")

    def __init__(self, batch: pa.RecordBatch) -> None:
        unknown = set(batch.schema.names) - set(self.NAMES)
        if unknown:
            raise ValueError(f"columns {sorted(unknown)} can't be appended; known are {', '.join(self.NAMES[:-1])} and {self.NAMES[-1]}")
        if "value" not in batch.schema.names:
            raise ValueError("a column named value is missing")
        self.rows = batch.num_rows
        self._value = binary_column(batch, "value")
        if self._value.null_count:
            raise ValueError("column value has nulls; a record's value is bytes, possibly empty")
        has_keys = "key" in batch.schema.names
        self._key = binary_column(batch, "key") if has_keys else pa.nulls(0, pa.binary())
        self.has_key = items_of(values_of(pc.cast(self._key.is_valid(), pa.uint8())), "B") if has_keys else None
        self.key_offsets: memoryview
        self.keys: memoryview | bytes
        self.key_offsets, self.keys = offsets_of(self._key) if has_keys else (zeros(1), b"")
        self.value_offsets, self.values = offsets_of(self._value)
        self._types = filled(cast_column(batch, "type", pa.uint8()), 0) if "type" in batch.schema.names else None
        self._timestamps = self._without_nulls(times_of(batch)) if "timestamp" in batch.schema.names else None

    def _without_nulls(self, found: pa.Array) -> pa.Array:
        """Return the timestamps, int64, without nulls: -1 means now."""
        least, most = pc.min_max(found).as_py().values()
        if least is not None and least < 0:
            raise ValueError("column timestamp has times before 1970")
        return filled(not_ahead(found, most), -1)

    @cached_property
    def largest(self) -> int:
        """Return the bytes of key and value of the largest record."""
        longest_key, largest = measure_columns(self.rows, self.key_offsets, self.has_key, self.value_offsets)
        if longest_key >= frames.NO_KEY:
            raise TooLarge(f"a key of {longest_key} bytes; at most {frames.NO_KEY - 1} are possible")
        return largest

    @property
    def least(self) -> int:
        """Return the bytes of the ring that the rows take at least."""
        return int(frames.HEADER * self.rows + self.value_offsets[self.rows] - self.value_offsets[0])

    def end(self, writer: Any, position: int, rows: Any) -> int:
        """Under the append lock: return the position after the frames of the given rows if they begin at `position`."""
        count = self.rows if rows is None else len(rows)
        return int(writer.end_of_columns(position, rows, count, self.key_offsets, self.has_key, self.value_offsets))

    def put(self, writer: Any, rows: Any, codec: int) -> None:
        """Under the append lock: put the frames of the given rows, or of all for None."""
        writer.put_columns(
            rows,
            self.rows if rows is None else len(rows),
            self.key_offsets,
            self.keys,
            self.has_key,
            self.value_offsets,
            self.values,
            column_of(self._types, "B"),
            codec,
            column_of(self._timestamps, "q"),
            self.least if rows is None else 0,
        )

    def records(self, rows: memoryview | None, codec: int) -> list[tuple[bytes | None, bytes, int, int]]:
        """Return key, value, type and codec of the given rows, or of all for None. It creates a Python object for each, for the rare
        comparisons.
        """
        every = range(self.rows) if rows is None else rows
        values = self._value.cast(pa.binary()).to_pylist()
        keys = self._key.cast(pa.binary()).to_pylist() if self.has_key is not None else [None] * self.rows
        types = [0] * self.rows if self._types is None else self._types.to_pylist()
        codecs = self._codecs_of(codec)
        return [(keys[row], values[row], types[row], codecs[row]) for row in every]

    def _codecs_of(self, codec: int) -> list[int]:
        return [codec] * self.rows


def not_ahead(found: pa.Array, most: int | None) -> pa.Array:
    """Return timestamps, of which `most` is the latest. Raises ValueError if that is too far ahead."""
    if most is not None:
        try:
            times.refuse_ahead(most)
        except ValueError as error:
            raise ValueError(f"column timestamp: {error}") from None
    return found


def filled(found: pa.Array, value: int) -> pa.Array:
    """Return an array with `value` instead of nulls. Arrow imports pandas for a Python value, if it is installed: only where needed."""
    return found.fill_null(value) if found.null_count else found


def binary_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column as binary with 32-bit offsets."""
    array = batch.column(name)
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return array
    if any(test(kind) for test in (pa.types.is_large_string, pa.types.is_large_binary, pa.types.is_fixed_size_binary)):
        return array.cast(pa.binary())
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return array.cast(pa.binary())
    raise TypeError(f"column {name} is {kind}; it must be binary or string")


def cast_column(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    """Return a column as `kind`. Raises ValueError for values that don't fit."""
    try:
        return batch.column(name).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"column {name} doesn't fit: {error}") from error


def times_of(batch: pa.RecordBatch) -> pa.Array:
    """Return the column of timestamps as int64, ns since 1970."""
    kind = batch.column("timestamp").type
    if not (pa.types.is_timestamp(kind) or pa.types.is_int64(kind)):
        raise TypeError(f"column timestamp is {kind}; it must be a timestamp or int64, ns since 1970")
    return cast_column(batch, "timestamp", pa.int64() if pa.types.is_int64(kind) else pa.timestamp("ns", kind.tz)).cast(pa.int64())


def offsets_of(array: pa.Array) -> tuple[memoryview, memoryview]:
    """Return the offsets of a binary array's items, one more than items, and the bytes to which they refer."""
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return zeros(len(array) + 1), memoryview(b"")
    places = items_of(offsets, "i")[array.offset : array.offset + len(array) + 1]
    return places, memoryview(b"") if data is None else items_of(data, "B")


def values_of(array: pa.Array) -> pa.Buffer:
    """Return the values of a fixed-width array without nulls, from its first item on."""
    width = array.type.bit_width // 8
    data = array.buffers()[1]
    return pa.py_buffer(b"") if data is None else data.slice(array.offset * width, len(array) * width)


def column_of(array: pa.Array | None, code: str) -> memoryview | None:
    """Return the items of a fixed-width array without nulls; None for none."""
    return None if array is None else items_of(values_of(array), code)


def items_of(buffer: pa.Buffer, code: str) -> memoryview:
    """Return a view of a buffer's items of the struct code `code`; of a copy if they aren't aligned, as in some buffers from a network."""
    view = memoryview(buffer).cast("B")
    if buffer.address % struct.calcsize(code):
        view = memoryview(bytes(view))
    return view if code == "B" else view.cast(code)  # type: ignore[call-overload]


def zeros(count: int) -> memoryview:
    return memoryview(bytes(4 * count)).cast("i")
