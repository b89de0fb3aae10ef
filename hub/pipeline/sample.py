"""The first records of a source, read without Spark, to infer a schema from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hub.pipeline.errors import SchemaError
from hub.pipeline.infer import Inferred, infer
from hub.pipeline.job import ONE_COLUMN, Job
from hub.spark.opening import open_shards
from hub.spark.options import ReadOptions
from hub.spark.shards import SparkShards
from kvspool import Gap


def infer_job(job: Job) -> Inferred:
    """Return the schema of the source's available records. Raises SchemaError if there is none, KvspoolError for unreadable records."""
    if job.decode.codec in ONE_COLUMN:
        raise SchemaError(f"{job.path}: [decode] codec {job.decode.codec} has one column, and nothing to infer")
    shards = open_shards(ReadOptions.parse(job.source.options))
    try:
        return infer(first_values(shards, job.decode.sample), plain_decoder(job.decode.codec))
    finally:
        shards.close()


def plain_decoder(codec: str) -> Callable[[bytes], Any]:
    """Return the function that decodes a value of a codec to plain objects. Shards have keyed values as MessagePack."""
    decoder: Any = msgspec.json.Decoder() if codec == "json" else msgspec.msgpack.Decoder()
    decode: Callable[[bytes], Any] = decoder.decode
    return decode


def first_values(shards: SparkShards, count: int) -> Iterator[bytes]:
    """Yield the first values of each shard, some `count` in all and equally many of each, so that every client is represented."""
    found = {key: extent for key, extent in shards.look().items() if extent.end > extent.first}
    most = -(-count // max(1, len(found)))
    for key, extent in found.items():
        for batch in shards.range(key, extent.first, min(extent.end, extent.first + most)).batches():
            if not isinstance(batch, Gap):
                yield from batch.column("value").to_pylist()
