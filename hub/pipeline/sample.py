"""The first records of a source, read without Spark, to infer a schema from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hub.pipeline.errors import SchemaError
from hub.pipeline.infer import Inferred, infer
from hub.pipeline.job import Job
from hub.pipeline.keytables import KeyTables
from hub.spark.opening import open_shards
from hub.spark.options import ReadOptions
from hub.spark.shards import ShardKey, SparkShards
from kvspool import Gap, keyed
from kvspool.keyed import Keys


def infer_job(job: Job) -> Inferred:
    """Return the schema of the source's available records. Raises SchemaError if there is none, KvspoolError for unreadable records."""
    if job.decode.codec in ("text", "raw"):
        raise SchemaError(f"{job.path}: [decode] codec {job.decode.codec} has one column, and nothing to infer")
    tables = KeyTables(job.source.options.get("path"))
    decode = _decode_keyed if job.decode.codec == "keyed" else _plain(job.decode.codec)
    rows = ((value, tables.of(*key) if job.decode.codec == "keyed" else Keys()) for key, value in _values(job))
    return infer(rows, decode)  # type: ignore[arg-type]


def _plain(codec: str) -> Callable[[tuple[bytes, Keys]], Any]:
    decoder: Any = msgspec.json.Decoder() if codec == "json" else msgspec.msgpack.Decoder()
    return lambda row: decoder.decode(row[0])


def _decode_keyed(row: tuple[bytes, Keys]) -> Any:
    return keyed.unpack(*row)


def _values(job: Job) -> Iterator[tuple[ShardKey, bytes]]:
    """Yield the first values of each shard, equally many of each, so that every client is represented."""
    shards = open_shards(ReadOptions.parse(job.source.options))
    try:
        found = {key: extent for key, extent in shards.look().items() if extent.end > extent.first}
        most = -(-job.decode.sample // max(1, len(found)))
        for key, extent in found.items():
            yield from _first(shards, key, extent.first, min(extent.end, extent.first + most))
    finally:
        shards.close()


def _first(shards: SparkShards, key: ShardKey, first: int, end: int) -> Iterator[tuple[ShardKey, bytes]]:
    for batch in shards.range(key, first, end).batches():
        if not isinstance(batch, Gap):
            for value in batch.column("value").to_pylist():
                yield key, value
