"""Records in transit from one log to another: columns, and the fields that a log of a format can store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from operator import le
from typing import TYPE_CHECKING, NamedTuple

from kvspool import system
from kvspool.errors import KvspoolError, Undecodable
from kvspool.gap import Gap
from kvspool.record import NO_TIME, Codec, Record, plain

if TYPE_CHECKING:
    from kvspool.engine.iteration import Iteration

ROWS = 1 << 16  # records in a batch
BYTES = 4 << 20  # bytes of keys and values in a batch, plus one record
AROUND = 64  # further bytes that a record takes


class Room(NamedTuple):
    """The fields that records of a log can store.

    is_ordered: only timestamps from 1970 on that never decrease. is_raised: a timestamp earlier than the last one is raised to it.
    """

    keys: bool = False
    empty_keys: bool = False
    types: bool = False
    timestamps: bool = False
    is_ordered: bool = False
    is_raised: bool = False
    codecs: bool = False


SPOOL = Room(keys=True, empty_keys=True, types=True, timestamps=True, is_ordered=True, is_raised=True, codecs=True)
VALUES = Room()
FILE = Room(keys=True, empty_keys=True, types=True, timestamps=True, is_ordered=True, codecs=True)


class Rows(NamedTuple):
    """Records without a gap between them. first: sequence of the first one. A value of codec KEYED is plain MessagePack here. size: bytes
    of keys and values."""

    first: int
    values: list[bytes]
    keys: list[bytes | None]
    types: list[int]
    timestamps: list[int]
    codecs: bytes
    size: int

    @property
    def end(self) -> int:
        """Return the sequence after the last record."""
        return self.first + len(self.values)

    def part(self, begin: int, end: int) -> Rows:
        """Return a range of the rows, by their numbers in this batch."""
        columns = (self.values[begin:end], self.keys[begin:end], self.types[begin:end], self.timestamps[begin:end], self.codecs[begin:end])
        return Rows(self.first + begin, *columns, size_of(columns[0], columns[1]))

    def parts(self, most: int) -> Iterator[Rows]:
        """Yield the rows in pieces of up to `most` bytes, or of one row that is larger."""
        if self.size + AROUND * len(self.values) <= most:
            yield self
            return
        begin = size = 0
        for row, (value, key) in enumerate(zip(self.values, self.keys, strict=True)):
            needed = len(value) + len(key or b"") + AROUND
            if row > begin and size + needed > most:
                yield self.part(begin, row)
                begin, size = row, 0
            size += needed
        yield self if begin == 0 else self.part(begin, len(self.values))


def rows_of(records: list[Record], *, has_times: bool = True) -> Rows:
    """Return the columns of records."""
    rows = columns_of(records, has_times=has_times)
    if Codec.KEYED not in rows.codecs:
        return rows
    values = [plain(record) for record in records]
    return rows._replace(values=values, size=size_of(values, rows.keys))


def columns_of(records: list[Record], *, has_times: bool = True) -> Rows:
    """Return the columns of records; values of codec KEYED stay packed with the keys of their log."""
    values = [record.value for record in records]
    codecs = bytes([record.codec for record in records])
    keys = [record.key for record in records]
    types = [record.type for record in records]
    timestamps = [record.timestamp for record in records] if has_times else [NO_TIME] * len(records)
    return Rows(records[0].sequence, values, keys, types, timestamps, codecs, size_of(values, keys))


def batches(reading: Iteration, *, has_times: bool = True, rows: int = ROWS) -> Iterator[Rows | Gap]:
    """Yield the records of an iteration in batches, and the Gaps between them; the records before an error are yielded first."""
    batch: list[Record] = []
    size = 0
    with closing(reading):
        try:
            while items := reading.poll(rows - len(batch)):
                gap = items.pop() if isinstance(items[0], Gap) else None
                batch += items
                size += sum([len(record.value) for record in items]) + AROUND * len(items)
                if batch and (gap is not None or size >= BYTES or len(batch) >= rows):
                    yield from _sound(batch, has_times)
                    batch, size = [], 0
                if gap is not None:
                    yield gap
        except (KvspoolError, OSError):
            if batch:
                yield from _sound(batch, has_times)
            raise
        if batch:
            yield from _sound(batch, has_times)


def _sound(batch: list[Record], has_times: bool) -> Iterator[Rows]:
    """Yield the columns of records; those before a record that can't be decoded are yielded before the error."""
    try:
        rows = rows_of(batch, has_times=has_times)
    except Undecodable:
        for number, record in enumerate(batch):
            try:
                plain(record)
            except Undecodable:
                if number:
                    yield rows_of(batch[:number], has_times=has_times)
                raise
        raise
    yield rows


def values_of(first: int, values: list[bytes], codec: int = Codec.RAW) -> Rows:
    """Return the columns of records that have only values."""
    count = len(values)
    return Rows(first, values, [None] * count, [0] * count, [NO_TIME] * count, bytes([codec]) * count, sum(map(len, values)))


def size_of(values: list[bytes], keys: list[bytes | None]) -> int:
    """Return the bytes of keys and values."""
    return sum(map(len, values)) + sum(map(len, filter(None, keys)))


def may_lose(source: Room, target: Room) -> list[str]:
    """Return the fields that records of one log may have, and those of the other can't store."""
    kinds = [name for name in ("keys", "types", "timestamps", "codecs") if getattr(source, name) and not getattr(target, name)]
    if source.empty_keys and target.keys and not target.empty_keys:
        kinds.append("empty keys")
    if source.timestamps and target.is_raised and not source.is_ordered:
        kinds.append("timestamps")
    return kinds


def lost(rows: Rows, kinds: list[str], target: Room, last: int) -> dict[str, int]:
    """Return which of these kinds of fields the rows really have, each with the sequence of the first such record.

    last: the timestamp of the record before them in a target where timestamps never decrease.
    """
    found = {}
    for kind in kinds:
        if kind in ("keys", "empty keys"):
            has = [key is not None if kind == "keys" else key == b"" for key in rows.keys] if any_key(rows, kind) else []
        elif kind == "types":
            has = [type != 0 for type in rows.types] if any(rows.types) else []
        elif kind == "codecs":
            has = [codec != 0 for codec in rows.codecs] if any(rows.codecs) else []
        elif target.timestamps:
            has = _out_of_order(rows.timestamps, last, target)
        else:
            has = [timestamp != NO_TIME for timestamp in rows.timestamps]
        if True in has:
            found[kind] = rows.first + has.index(True)
    return found


def any_key(rows: Rows, kind: str = "keys") -> bool:
    """Return whether any of the rows has a key; or, for "empty keys", one of no bytes."""
    return b"" in rows.keys if kind == "empty keys" else rows.keys.count(None) < len(rows.keys)


def latest(rows: Rows, last: int, target: Room) -> int:
    """Return the latest timestamp in a target after some rows; an ordered target gives rows without a timestamp the present one."""
    if target.is_ordered and NO_TIME in rows.timestamps:
        last = max(last, system.port.now())
    return max(last, max(rows.timestamps))


def _out_of_order(timestamps: list[int], last: int, target: Room) -> list[bool]:
    """Return which timestamps are earlier than a previous one; an empty list if none is."""
    if target.is_ordered:
        last = max(last, 0)
    if timestamps[0] >= last and all(map(le, timestamps, timestamps[1:])):
        return []
    found = []
    for timestamp in timestamps:
        found.append(timestamp < last and timestamp != NO_TIME)
        last = max(last, system.port.now() if target.is_ordered and timestamp == NO_TIME else timestamp)
    return found
