"""Records as Arrow columns, in both directions, without a Python object for a row. Needs the extra `arrow`.

The frame loops copy straight between the ring and the buffers of Arrow arrays, checksums and overruns checked as everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from kvspool import _frames_py as frames
from kvspool import system
from kvspool.errors import GapError, TooLarge
from kvspool.iteration import OnGap
from kvspool.record import Gap
from kvspool.spool import format
from kvspool.spool.cursor import Cursor

BATCH = 32_768  # records of a batch: enough to make its fixed costs vanish, small enough for the caches
WINDOW = 16 << 20  # bytes of keys, and of values, that a batch has room for
LARGE = 8 << 20  # bytes of the ring still to read, from which on a table is made of large batches
LARGE_BATCH = 1 << 17  # records of one

SCHEMA = pa.schema(
    [
        pa.field("sequence", pa.int64()),
        pa.field("timestamp", pa.timestamp("ns", "UTC")),
        pa.field("type", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
"""The columns that reading gives. A null key is no key; nothing else is ever null."""


def read(cursor: Cursor, limit: int | None, on_gap: OnGap) -> pa.Table:
    """Return what the bounded cursor has to give, up to `limit` records; see `Spool.read_arrow`."""
    if on_gap not in ("raise", "skip"):
        raise ValueError(f'on_gap is "raise" or "skip" here, not {on_gap!r}: a table has no room for a Gap')
    if limit is not None and limit < 0:
        raise ValueError(f"limit is a number of records, not {limit}")
    got = []
    for batch in batches(cursor, limit, LARGE_BATCH):
        if not isinstance(batch, Gap):
            got.append(batch)
        elif on_gap == "raise":
            raise GapError(batch)
    return pa.Table.from_batches(got, schema=SCHEMA)


def batches(cursor: Cursor, limit: int | None = None, most: int = BATCH) -> Iterator[pa.RecordBatch | Gap]:
    """Yield what is there for the cursor now, as batches of up to `most` records, and Gaps between them."""
    left = limit
    while left is None or left > 0:
        batch = next_batch(cursor, most if left is None else min(most, left))
        if isinstance(batch, Gap):
            yield batch
            continue
        if batch.num_rows == 0:
            return
        yield batch
        if left is not None:
            left -= batch.num_rows


def next_batch(cursor: Cursor, most: int = BATCH) -> pa.RecordBatch | Gap:
    """Return up to `most` records, without blocking; a Gap in their place; an empty batch where nothing is there."""
    room = WINDOW
    while True:
        room = min(room, cursor.reader.capacity)
        end = cursor.reader.tail() if cursor.end is None else cursor.end[0]
        is_large = most >= LARGE_BATCH and end - cursor.reader.position >= LARGE
        gathered = _Batch(most if is_large else min(most, BATCH), room, _large_pages if is_large else pa.allocate_buffer)
        found = cursor.advance(gathered.take(cursor.reader))
        if isinstance(found, Gap):
            return found
        if gathered.count == 0 and cursor.reader.stop == frames.FULL:
            room = cursor.reader.stored  # a single record that is larger than the room for a batch
            continue
        return gathered.finish()


class _Batch:
    """Buffers that a batch is gathered into."""

    def __init__(self, most: int, room: int, allocate: Callable[[int], pa.Buffer]) -> None:
        self.most = most
        self.count = 0
        self._key_bits = pa.py_buffer(bytearray(most // 8 + 1))
        # One piece of memory for all: what isn't filled of it is never touched, and costs nothing.
        sizes = [8 * most, 8 * most, 4 * most, 4 * (most + 2), 4 * (most + 2), room, room]
        memory = allocate(sum(sizes))
        places = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        view = _items(memory, "B")
        self._views = [view[place].cast(code) for place, code in zip(places, "qqiiiBB", strict=True)]  # type: ignore[call-overload]
        self._columns = [memory.slice(place.start, place.stop - place.start) for place in places]

    def __len__(self) -> int:
        return self.count

    def take(self, reader: Any) -> Any:
        """Return the function that a Cursor calls to copy out frames up to a position."""

        def gather(end: int) -> _Batch:
            sequences, timestamps, types, key_offsets, value_offsets, values, keys = self._views
            key_bits = _items(self._key_bits, "B")
            self.count = reader.gather(end, self.most, sequences, timestamps, types, key_offsets, keys, key_bits, value_offsets, values)
            return self

        return gather

    def finish(self) -> pa.RecordBatch:
        """Return the batch; it shares the buffers."""
        count = self.count
        sequences, timestamps, types, key_offsets, value_offsets, values, keys = self._columns
        arrays = [
            pa.Array.from_buffers(pa.int64(), count, [None, sequences]),
            pa.Array.from_buffers(pa.timestamp("ns", "UTC"), count, [None, timestamps]),
            pa.Array.from_buffers(pa.int32(), count, [None, types]),
            pa.Array.from_buffers(pa.binary(), count, [self._key_bits, key_offsets, keys]),
            pa.Array.from_buffers(pa.binary(), count, [None, value_offsets, values]),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _large_pages(size: int) -> pa.Buffer:
    """Return a buffer whose memory the kernel clears in large pages, or any other where that can't be had. Raises MemoryError."""
    try:
        return pa.py_buffer(system.port.private_memory(size))
    except OSError:  # no room for it in the address space, but perhaps in what Arrow's pool has kept
        return pa.allocate_buffer(size)


def parts(batch: pa.RecordBatch | pa.Table) -> list[pa.RecordBatch]:
    """Return the record batches of a table, or the one that was given."""
    return batch.to_batches() if isinstance(batch, pa.Table) else [batch]


class Columns:
    """A record batch laid out for the frame loops: every row is a record to append.

    Columns: `value`; `key`, `type` and `timestamp` where present. Raises ValueError or TypeError that names the column, for one that is
    missing, unknown, of a wrong type or null where nothing may be, and TooLarge for a key.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        unknown = set(batch.schema.names) - {"key", "value", "type", "timestamp"}
        if unknown:
            raise ValueError(f"columns {sorted(unknown)} can't be appended; there are value, key, type and timestamp")
        if "value" not in batch.schema.names:
            raise ValueError("a column named value is missing")
        self.rows = batch.num_rows
        self._value = _binary(batch, "value")
        if self._value.null_count:
            raise ValueError("column value has nulls; a record's value is bytes, perhaps none")
        has_keys = "key" in batch.schema.names
        self._key = _binary(batch, "key") if has_keys else pa.array([], pa.binary())
        self.has_key = _items(_values(pc.cast(self._key.is_valid(), pa.uint8())), "B") if has_keys else None
        self.key_offsets: memoryview
        self.keys: memoryview | bytes
        self.key_offsets, self.keys = _offsets(self._key) if has_keys else (_zeros(1), b"")
        self.value_offsets, self.values = _offsets(self._value)
        self._types = _cast(batch, "type", pa.uint8(), 0) if "type" in batch.schema.names else None
        self._timestamps = _cast(batch, "timestamp", pa.timestamp("ns"), None) if "timestamp" in batch.schema.names else None

    @cached_property
    def largest(self) -> int:
        """Return the bytes of key and value of the largest record."""
        if not self.rows:
            return 0
        lengths = pc.binary_length(self._value)
        if len(self._key):
            key_lengths = pc.fill_null(pc.binary_length(self._key), 0)
            if pc.max(key_lengths).as_py() > format.LARGEST_KEY:
                raise TooLarge(f"a key of {pc.max(key_lengths).as_py()} bytes; at most {format.LARGEST_KEY} are possible")
            lengths = pc.add(lengths, key_lengths)
        return int(pc.max(lengths).as_py())

    @property
    def least(self) -> int:
        """Return the bytes of the ring that the rows take at least."""
        return int(frames.HEADER * self.rows + self.value_offsets[self.rows] - self.value_offsets[0])

    def end(self, writer: Any, position: int, rows: Any) -> int:
        """Under the append lock: return the position behind the frames of the given rows, were they put at `position`."""
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
            None if self._types is None else _items(_values(self._types), "B"),
            codec,
            None if self._timestamps is None else _items(_values(self._timestamps), "q"),
            self.least if rows is None else 0,
        )


def _binary(batch: pa.RecordBatch, name: str) -> pa.Array:
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


def _cast(batch: pa.RecordBatch, name: str, kind: pa.DataType, default: int | None) -> pa.Array:
    """Return a column as `kind` without nulls: uint8 types, or int64 timestamps where -1 means now."""
    array = batch.column(name)
    if pa.types.is_timestamp(kind) and not (pa.types.is_timestamp(array.type) or pa.types.is_int64(array.type)):
        raise TypeError(f"column {name} is {array.type}; it must be a timestamp or int64, ns since 1970")
    try:
        array = array.cast(pa.int64()).cast(kind) if pa.types.is_int64(array.type) else array.cast(_zoned(kind, array.type))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"column {name} doesn't fit: {error}") from error
    if default is not None:
        return array.fill_null(default)
    array = array.cast(pa.int64())
    if len(array) and (pc.min(array).as_py() or 0) < 0:
        raise ValueError(f"column {name} has times before 1970")
    return array.fill_null(-1)


def _zoned(kind: pa.DataType, found: pa.DataType) -> pa.DataType:
    """Return `kind`, with the time zone of `found` if they are timestamps."""
    return pa.timestamp("ns", found.tz) if pa.types.is_timestamp(kind) else kind


def _offsets(array: pa.Array) -> tuple[memoryview, memoryview]:
    """Return the offsets of a binary array's items, one more than there are, and the bytes that they point into."""
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return _zeros(len(array) + 1), memoryview(b"")
    places = _items(offsets, "i")[array.offset : array.offset + len(array) + 1]
    return places, memoryview(b"") if data is None else _items(data, "B")


def _values(array: pa.Array) -> pa.Buffer:
    """Return the values of a fixed-width array without nulls, from its first item on."""
    width = array.type.bit_width // 8
    data = array.buffers()[1]
    return pa.py_buffer(b"") if data is None else data.slice(array.offset * width, len(array) * width)


def _items(buffer: pa.Buffer, code: str) -> memoryview:
    """Return a view of a buffer's items of the struct code `code`."""
    view = memoryview(buffer).cast("B")
    return view if code == "B" else view.cast(code)  # type: ignore[call-overload]


def _zeros(count: int) -> memoryview:
    return memoryview(bytes(4 * count)).cast("i")
