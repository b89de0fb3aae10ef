"""Records as Arrow columns, in both directions, without a Python object for a row. Needs the extra `arrow`.

The frame loops copy directly between the ring and the buffers of Arrow arrays, with all checks of checksums and overruns.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from kvspool import _frames_py as frames
from kvspool import _kvj, _kvj_py, system
from kvspool._frames import measure_columns
from kvspool.errors import GapError, OutOfRange, TooLarge, Undecodable
from kvspool.exchange import plain
from kvspool.iteration import keeping
from kvspool.journal.cursor import CHUNK, Take
from kvspool.journal.cursor import Cursor as JournalCursor
from kvspool.journal.format import WHOLE, Batch, Before, Format, Scan
from kvspool.options import OnGap
from kvspool.pool import Pool
from kvspool.record import Codec, Gap, Record, check_codec
from kvspool.spool import format, times
from kvspool.spool.cursor import Cursor
from kvspool.spool.keys import KeyTable

BATCH = 32_768  # records of a batch: enough to hide its fixed costs, few enough for the caches
WINDOW = 16 << 20  # bytes of keys, and of values, in a batch
LARGE = 8 << 20  # remaining bytes of the ring from which on larger batches use lent memory, and a table has large ones
LARGE_BATCH = 1 << 17  # records of a large one
_SEQUENCES = 1 << 63  # limit of an int64

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
        view = _items(memory, "B")
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
        key_bits = _items(self._key_bits, "B")
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
        self._value = _binary(batch, "value")
        if self._value.null_count:
            raise ValueError("column value has nulls; a record's value is bytes, possibly empty")
        has_keys = "key" in batch.schema.names
        self._key = _binary(batch, "key") if has_keys else pa.array([], pa.binary())
        self.has_key = _items(_values(pc.cast(self._key.is_valid(), pa.uint8())), "B") if has_keys else None
        self.key_offsets: memoryview
        self.keys: memoryview | bytes
        self.key_offsets, self.keys = _offsets(self._key) if has_keys else (_zeros(1), b"")
        self.value_offsets, self.values = _offsets(self._value)
        self._types = _cast(batch, "type", pa.uint8()).fill_null(0) if "type" in batch.schema.names else None
        self._timestamps = self._settled(_times(batch)) if "timestamp" in batch.schema.names else None

    def _settled(self, found: pa.Array) -> pa.Array:
        """Return the timestamps, int64, without nulls: -1 means now."""
        least, most = pc.min_max(found).as_py().values()
        if least is not None and least < 0:
            raise ValueError("column timestamp has times before 1970")
        return _not_ahead(found, most).fill_null(-1)

    @cached_property
    def largest(self) -> int:
        """Return the bytes of key and value of the largest record."""
        longest_key, largest = measure_columns(self.rows, self.key_offsets, self.has_key, self.value_offsets)
        if longest_key > format.LARGEST_KEY:
            raise TooLarge(f"a key of {longest_key} bytes; at most {format.LARGEST_KEY} are possible")
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
            _column(self._types, "B"),
            codec,
            _column(self._timestamps, "q"),
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


def _not_ahead(found: pa.Array, most: int | None) -> pa.Array:
    """Return timestamps, of which `most` is the latest. Raises ValueError if that is too far ahead."""
    if most is not None:
        try:
            times.refuse_ahead(most)
        except ValueError as error:
            raise ValueError(f"column timestamp: {error}") from None
    return found


class JournalColumns(Columns):
    """A record batch laid out for a journal: a time may be before 1970, a null is the present time, and there may be a column `codec`.

    codec: of all rows, without that column. Raises ValueError for codecs that no record of a journal has.
    """

    NAMES: ClassVar[tuple[str, ...]] = (*Columns.NAMES, "codec")

    def __init__(self, batch: pa.RecordBatch, codec: int) -> None:
        super().__init__(batch)
        self._codec = check_codec(codec)
        self._codecs = _codecs(batch) if "codec" in batch.schema.names else None

    def _settled(self, found: pa.Array) -> pa.Array:
        return _not_ahead(found, pc.max(found).as_py())

    @property
    def longest_value(self) -> int:
        """Return the bytes of the longest value."""
        return pc.max(pc.binary_length(self._value)).as_py() or 0

    @property
    def longest_key(self) -> int:
        """Return the bytes of the longest key."""
        return pc.max(pc.binary_length(self._key)).as_py() or 0

    def _codecs_of(self, codec: int) -> list[int]:
        return [self._codec] * self.rows if self._codecs is None else self._codecs.to_pylist()

    def buffers(self, now: int) -> tuple[Any, ...]:
        """Return the arguments of `_kvj.encode_columns` for the rows. now: the timestamp of rows without one."""
        types, times, codecs = self._columns
        if self._timestamps is not None and self._timestamps.null_count:
            times = _column(self._timestamps.fill_null(now), "q")
        return self.key_offsets, self.keys, self.has_key, self.value_offsets, self.values, types, times, codecs, now, self._codec

    @cached_property
    def _columns(self) -> tuple[memoryview | None, memoryview | None, memoryview | None]:
        times = None if self._timestamps is None or self._timestamps.null_count else self._timestamps
        return _column(self._types, "B"), _column(times, "q"), _column(self._codecs, "B")

    def listed(self, rows: memoryview | None) -> Batch:
        """Return the given rows, or all for None, as lists, for a format without columns."""
        every = range(self.rows) if rows is None else rows
        values = self._value.cast(pa.binary()).to_pylist()
        keys = self._key.cast(pa.binary()).to_pylist() if self.has_key is not None else None
        types, times, codecs = (None if one is None else one.to_pylist() for one in (self._types, self._timestamps, self._codecs))
        if times is not None and None in times:
            now = system.port.now()  # a format with lists is slow, so the append follows soon; times never decrease anyway
            times = [now if time is None else time for time in times]
        lists = (None if column is None else [column[row] for row in every] for column in (values, keys, types, times, codecs))
        chosen, keys, types, times, codecs = lists
        return Batch(chosen or [], keys, 0, None, types, times, self._codec, None if codecs is None else bytes(codecs))


class ColumnRows:
    """Rows of several record batches, as an appender takes them; see `journal.format.Rows`.

    rows: for each part the int32 numbers of the selected rows, None for all.
    """

    def __init__(self, parts: Sequence[JournalColumns], rows: Sequence[memoryview | None]) -> None:
        self._parts = parts
        self._chosen = rows
        self._ends = list(accumulate(part.rows if chosen is None else len(chosen) for part, chosen in zip(parts, rows, strict=True)))
        self.rows = self._ends[-1] if parts else 0

    def _place(self, row: int) -> tuple[JournalColumns, memoryview | None, int]:
        """Return the part to which a row belongs, the selected rows of the part, and the row's number among those."""
        number = bisect_right(self._ends, row)
        return self._parts[number], self._chosen[number], row - (self._ends[number - 1] if number else 0)

    def encode(self, format: Format, start: int, place: Before) -> tuple[bytes | bytearray, int, int]:
        part, chosen, row = self._place(start)
        return format.encode_columns(part, chosen, row, place)


class Records:
    """A record batch in the schema `RECORDS`, checked once, whose buffers become frames without a cast or copy.

    It may be untrusted. Appenders take it, see `journal.format.Rows`; `close` it afterwards.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        """Raises ValueError, naming the column, for one that contradicts itself or has values that no record of a journal can have."""
        times, types, keys, values, codecs = batch.columns
        self.rows: int = batch.num_rows
        for name, column in zip(RECORDS.names, (times, types, keys, values, codecs), strict=True):
            if name != "key" and column.null_count:
                raise ValueError(f"column {name} has nulls; only a key may be null")
            if len(column) != self.rows:
                raise ValueError(f"column {name} has {len(column)} items, the batch {self.rows}")
        key_offsets, key_data = _places(keys, "key")
        value_offsets, value_data = _places(values, "value")
        key_bits = keys.buffers()[0]
        bits = None if key_bits is None or not keys.null_count else _items(key_bits, "B")
        if bits is not None and 8 * len(bits) < keys.offset + self.rows:
            raise ValueError("column key has a bitmap that is too short")
        self._times, kinds, marks = _fixed(times, "q", "timestamp"), _fixed(types, "i", "type"), _fixed(codecs, "B", "codec")
        fault, found, self.longest_key, self.longest_value = _kvj.survey(
            self.rows, bits, keys.offset, key_offsets, len(key_data), value_offsets, len(value_data), kinds, marks, Codec.MSGPACK
        )
        if fault:
            raise ValueError(_FAULTS[fault])
        if found + keys.null_count != self.rows:
            raise ValueError(f"column key has {self.rows - found} nulls, but claims {keys.null_count}")
        self.size: int = 21 * self.rows + key_offsets[self.rows] - key_offsets[0] + value_offsets[self.rows] - value_offsets[0]
        self.buffers = bits, keys.offset, key_offsets, key_data or b"\0", value_offsets, value_data or b"\0", kinds, self._times, marks
        self._room: bytearray | None = None

    def room(self, size: int) -> bytearray:
        """Return a buffer for so many bytes of frames; its previous contents may be overwritten."""
        if self._room is None or len(self._room) < size:
            self.close()
            self._room = _rooms.take(size)
        return self._room

    def encode(self, format: Format, start: int, place: Before) -> tuple[memoryview, int, int]:
        return format.encode_records(self, start, place)

    def time_of(self, row: int) -> int:
        return int(self._times[row])

    def close(self) -> None:
        """Release the buffer for frames."""
        room, self._room = self._room, None
        if room is not None:
            _rooms.give_back(room)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_FAULTS = {
    _kvj_py.OFFSETS: "a column of bytes whose offsets decrease, or exceed its bytes",
    _kvj_py.TYPES: "column type has a number outside 0 to 255",
    _kvj_py.CODECS: "column codec has a number that is not a codec, or one that only its own log can read",
}


class _Rooms:
    """Lends buffers for frames: a recently used one is in the caches, with its pages mapped."""

    SIZE = 3 << 19  # bytes
    SPARE = 4

    def __init__(self) -> None:
        self._spare: deque[bytearray] = deque(maxlen=self.SPARE)

    def take(self, size: int) -> bytearray:
        """Return one of at least so many bytes."""
        if size <= self.SIZE:
            with suppress(IndexError):
                return self._spare.pop()
        return bytearray(max(size, self.SIZE))

    def give_back(self, room: bytearray) -> None:
        """Take a buffer back, unless it is unusually large."""
        if len(room) == self.SIZE:
            self._spare.append(room)


_rooms = _Rooms()


def _places(array: pa.Array, name: str) -> tuple[memoryview, memoryview]:
    """Return the result of `_offsets` for a column that may be shorter than it claims. Raises ValueError then."""
    _, offsets, data = array.buffers()
    if not len(array):
        return _zeros(1), memoryview(b"")
    places = _part(offsets, array.offset, len(array) + 1, "i", name)
    return places, memoryview(b"") if data is None else _items(data, "B")


def _fixed(array: pa.Array, code: str, name: str) -> memoryview:
    """Return the items of a fixed-width column that may be shorter than it claims. Raises ValueError then."""
    return _part(array.buffers()[1], array.offset, len(array), code, name)


def _part(buffer: pa.Buffer | None, start: int, count: int, code: str, name: str) -> memoryview:
    """Return so many items of a buffer of any length. Raises ValueError if it has fewer."""
    width = struct.calcsize(code)
    found = memoryview(b"") if buffer is None else _items(buffer, "B")[start * width : (start + count) * width]
    if len(found) != count * width:
        raise ValueError(f"column {name} has {len(found)} bytes for {count} items of {width}")
    return found.cast(code)  # type: ignore[call-overload, no-any-return]


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


def _cast(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array:
    """Return a column as `kind`. Raises ValueError for values that don't fit."""
    try:
        return batch.column(name).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"column {name} doesn't fit: {error}") from error


def _times(batch: pa.RecordBatch) -> pa.Array:
    """Return the column of timestamps as int64, ns since 1970."""
    kind = batch.column("timestamp").type
    if not (pa.types.is_timestamp(kind) or pa.types.is_int64(kind)):
        raise TypeError(f"column timestamp is {kind}; it must be a timestamp or int64, ns since 1970")
    return _cast(batch, "timestamp", pa.int64() if pa.types.is_int64(kind) else pa.timestamp("ns", kind.tz)).cast(pa.int64())


def _codecs(batch: pa.RecordBatch) -> pa.Array:
    """Return the column of codecs. Raises ValueError for a null, and for codecs that no record of a journal has."""
    array = _cast(batch, "codec", pa.uint8())
    if array.null_count:
        raise ValueError("column codec has nulls; each value has a codec, 0 for none in particular")
    for codec in array.unique().to_pylist() if len(array) and pc.max(array).as_py() > Codec.MSGPACK else ():
        check_codec(codec)
    return array


def _offsets(array: pa.Array) -> tuple[memoryview, memoryview]:
    """Return the offsets of a binary array's items, one more than items, and the bytes to which they refer."""
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


def _column(array: pa.Array | None, code: str) -> memoryview | None:
    """Return the items of a fixed-width array without nulls; None for none."""
    return None if array is None else _items(_values(array), code)


def _items(buffer: pa.Buffer, code: str) -> memoryview:
    """Return a view of a buffer's items of the struct code `code`; of a copy if they aren't aligned, as in some buffers from a network."""
    view = memoryview(buffer).cast("B")
    if buffer.address % struct.calcsize(code):
        view = memoryview(bytes(view))
    return view if code == "B" else view.cast(code)  # type: ignore[call-overload]


def _zeros(count: int) -> memoryview:
    return memoryview(bytes(4 * count)).cast("i")
