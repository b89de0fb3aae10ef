"""A producer of a sharded log: one producer per shard, all with the same name.

**Once.** As a producer of one log; see `kvspool.producers`. A batch is appended to the shards one after the other, and each stores the
account of its part. After an error in between, append the whole batch again.

**Choice of the shard.** By key; a row without one is placed by the hash of its value. An append uses turns instead, but a repeated row must
go to the same shard as before.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvspool import Codec, Log
from kvspool.producers import Changed, Pieces, Stored
from kvspool.record import encode, encode_keys, listed
from kvspool.system.handles import Handle
from shard import route
from shard.kernel.hash import group, hash_column

if TYPE_CHECKING:
    import pyarrow

    from kvspool.arrow import Columns


class ShardProducer(Handle):
    """One producer of a sharded log; get it from `ShardSet.producer`."""

    def __init__(self, logs: Sequence[Log], name: str) -> None:
        """Raises ValueError for an invalid name, and for shards of a format without producers. logs: of all shards, in order."""
        self.name = name
        self._logs = logs
        self._producers = [log.producer(name) for log in logs]

    def append_many(
        self,
        values: Iterable[Any],
        *,
        batch: int,
        keys: Iterable[bytes | str | None] | None = None,
        type: int = 0,
        timestamp: int | None = None,
        durable: bool = False,
        changed: Changed = "raise",
    ) -> dict[int, Stored]:
        """Append the records of a batch that are not stored yet, each to its shard. Return the result for each shard with a part.

        Arguments and errors: as for `kvspool.producers.Producer.append_many`. Parts of shards before an error stay stored.
        """
        values = listed(values)
        keys = [None] * len(values) if keys is None else encode_keys(listed(keys, "keys")) or []
        if len(keys) != len(values):
            raise ValueError(f"{len(values)} values, but {len(keys)} keys")
        parts: dict[int, tuple[list[Any], list[bytes | None]]] = {}
        for value, key in zip(values, keys, strict=True):
            part = parts.setdefault(self._shard_of(value, key), ([], []))
            part[0].append(value)
            part[1].append(key)
        return {
            shard: self._producers[shard].append_many(
                part[0], keys=part[1], batch=batch, type=type, timestamp=timestamp, durable=durable, changed=changed
            )
            for shard, part in sorted(parts.items())
        }

    def _shard_of(self, value: Any, key: bytes | None) -> int:
        if key is not None and key.__class__ is not bytes:
            raise TypeError(f"a key must be bytes, str or None, not {key.__class__.__name__}")
        return route.shard_of(encode(value, Codec.JSON)[0] if key is None else key, len(self._logs).bit_length() - 1)

    def append_arrow(
        self,
        table: pyarrow.RecordBatch | pyarrow.Table,
        *,
        batch: int,
        codec: int = Codec.RAW,
        durable: bool = False,
        changed: Changed = "raise",
    ) -> dict[int, Stored]:
        """As `append_many`, with a record for each row; columns and `codec`: as for `kvspool.Log.append_arrow`."""
        from kvspool import arrow

        pieces: dict[int, Pieces] = {}
        for part in arrow.parts(table):
            columns = self._logs[0].columns_of(part, codec)
            for shard, rows in grouped(shards_of(columns, part, len(self._producers)), len(self._producers)).items():
                pieces.setdefault(shard, []).append((columns, rows))
        return {
            shard: self._producers[shard].append_pieces(pieces[shard], batch=batch, codec=codec, durable=durable, changed=changed)
            for shard in sorted(pieces)
        }

    def __repr__(self) -> str:
        return f"<ShardProducer {self.name!r} of {len(self._logs)} shards from {self._logs[0].path} on>"


def shards_of(columns: Columns, batch: pyarrow.RecordBatch, count: int) -> memoryview:
    """Return the shard, of `count`, of each row of a batch, by its key or, without one, by its value: int32."""
    import pyarrow
    import pyarrow.compute as pc

    def hashed(offsets: memoryview, data: Any) -> memoryview:
        shards = memoryview(array("i", bytes(4 * columns.rows)))
        hash_column(offsets, data, memoryview(b"\1" * columns.rows), count - 1, 0, shards)
        return shards

    if count == 1:
        return memoryview(array("i", bytes(4 * columns.rows)))
    if columns.has_key is None:
        return hashed(columns.value_offsets, columns.values)
    by_key = hashed(columns.key_offsets, columns.keys)
    if not batch.column("key").null_count:
        return by_key
    by_value = pyarrow.array(hashed(columns.value_offsets, columns.values), pyarrow.int32())
    return int32s(pc.if_else(batch.column("key").is_valid(), pyarrow.array(by_key, pyarrow.int32()), by_value))


def grouped(shards: memoryview, count: int) -> dict[int, memoryview]:
    """Return the row numbers (int32) of each shard that has any, in order."""
    ends, rows = array("i", bytes(4 * count)), array("i", bytes(4 * len(shards)))
    group(shards, memoryview(ends), memoryview(rows))
    starts = [0, *ends[:-1]]
    return {shard: memoryview(rows)[start:end] for shard, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start}


def int32s(numbers: pyarrow.Array) -> memoryview:
    """Return an array of int32 without nulls as memory."""
    data = numbers.buffers()[1]
    return memoryview(array("i", memoryview(data)[4 * numbers.offset : 4 * (numbers.offset + len(numbers))].tobytes()))
