"""Arrow columns that are appended to a journal, as its format takes them. Needs the extra `arrow`."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from kvspool import system
from kvspool.engine.columns import RECORDS, Columns, cast_column, column_of, filled, items_of, not_ahead, zeros
from kvspool.journal.format import Before, Format, JournalBatch
from kvspool.kernel import kvj, kvj_py
from kvspool.record import Codec, check_codec


class JournalColumns(Columns):
    """A record batch laid out for a journal: a time may be before 1970, a null is the present time, and there may be a column `codec`.

    codec: of all rows, without that column. Raises ValueError for codecs that no record of a journal has.
    """

    NAMES: ClassVar[tuple[str, ...]] = (*Columns.NAMES, "codec")

    def __init__(self, batch: pa.RecordBatch, codec: int) -> None:
        super().__init__(batch)
        self._codec = check_codec(codec)
        self._codecs = _codecs(batch) if "codec" in batch.schema.names else None

    def _without_nulls(self, found: pa.Array) -> pa.Array:
        return not_ahead(found, pc.max(found).as_py())

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

    @property
    def has_times(self) -> bool:
        """Return whether any row has a timestamp."""
        return self._timestamps is not None and self._timestamps.null_count < self.rows

    @property
    def has_codecs(self) -> bool:
        """Return whether any row has another codec than RAW."""
        return any(self._codecs_of(self._codec))

    def buffers(self, now: int) -> tuple[Any, ...]:
        """Return the arguments of `kvj.encode_columns` for the rows. now: the timestamp of rows without one."""
        types, times, codecs = self._columns
        if self._timestamps is not None and self._timestamps.null_count:
            times = column_of(filled(self._timestamps, now), "q")
        return self.key_offsets, self.keys, self.has_key, self.value_offsets, self.values, types, times, codecs, now, self._codec

    @cached_property
    def _columns(self) -> tuple[memoryview | None, memoryview | None, memoryview | None]:
        times = None if self._timestamps is None or self._timestamps.null_count else self._timestamps
        return column_of(self._types, "B"), column_of(times, "q"), column_of(self._codecs, "B")

    def listed(self, rows: memoryview | None) -> JournalBatch:
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
        return JournalBatch(chosen or [], keys, 0, None, types, times, self._codec, None if codecs is None else bytes(codecs))


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
        bits = None if key_bits is None or not keys.null_count else items_of(key_bits, "B")
        if bits is not None and 8 * len(bits) < keys.offset + self.rows:
            raise ValueError("column key has a bitmap that is too short")
        self._times, kinds, marks = _fixed(times, "q", "timestamp"), _fixed(types, "i", "type"), _fixed(codecs, "B", "codec")
        fault, found, self.longest_key, self.longest_value = kvj.check_columns(
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
    kvj_py.OFFSETS: "a column of bytes whose offsets decrease, or exceed its bytes",
    kvj_py.TYPES: "column type has a number outside 0 to 255",
    kvj_py.CODECS: "column codec has a number that is not a codec, or one that only its own log can read",
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
        return zeros(1), memoryview(b"")
    places = _part(offsets, array.offset, len(array) + 1, "i", name)
    return places, memoryview(b"") if data is None else items_of(data, "B")


def _fixed(array: pa.Array, code: str, name: str) -> memoryview:
    """Return the items of a fixed-width column that may be shorter than it claims. Raises ValueError then."""
    return _part(array.buffers()[1], array.offset, len(array), code, name)


def _part(buffer: pa.Buffer | None, start: int, count: int, code: str, name: str) -> memoryview:
    """Return so many items of a buffer of any length. Raises ValueError if it has fewer."""
    width = struct.calcsize(code)
    found = memoryview(b"") if buffer is None else items_of(buffer, "B")[start * width : (start + count) * width]
    if len(found) != count * width:
        raise ValueError(f"column {name} has {len(found)} bytes for {count} items of {width}")
    return found.cast(code)  # type: ignore[call-overload, no-any-return]


def _codecs(batch: pa.RecordBatch) -> pa.Array:
    """Return the column of codecs. Raises ValueError for a null, and for codecs that no record of a journal has."""
    array = cast_column(batch, "codec", pa.uint8())
    if array.null_count:
        raise ValueError("column codec has nulls; each value has a codec, 0 for none in particular")
    for codec in array.unique().to_pylist() if len(array) and pc.max(array).as_py() > Codec.MSGPACK else ():
        check_codec(codec)
    return array
