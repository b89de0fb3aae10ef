"""The data source `kvspool` of Spark: what it is called, its columns and its options.

    spark.read.format("kvspool").load("root")                                            a hub root, a shard set, or one log
    spark.read.format("kvspool").option("prefix", "JFK").load("root")                    one shard set of several
    df.write.format("kvspool").option("prefix", "JFK").mode("append").save("root")       append to a shard set
    df.write.format("kvspool").mode("append").save("events")                             append to one log

The columns are named as Kafka's source names them, so that moving a job is changing one word:

    key binary, value binary, topic string (the client, the prefix, or the log's name), partition int (the shard), offset bigint (the
    sequence), timestamp timestamp (cut to microseconds), type int

Spark's Python API doesn't tell a source which columns a query uses; `.schema("offset bigint, value binary")` before `load` reads fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from hub.spark.options import ReadOptions, local_path
from hub.spark.reader import ShardReader, reader
from hub.spark.stream import StreamReader
from hub.spark.writer import ShardWriter

SCHEMA = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, type int"
WRITING = frozenset({"path", "prefix", "bits", "capacity", "codec"})


@dataclass(frozen=True)
class Options:
    """The options of a write, parsed and checked; those of a read: `ReadOptions`.

    path: a log, or a root of shards. prefix: of the shard set; None: the only one. bits, capacity: make the shard set if it isn't
    there; of each shard. codec: what a written value is: raw, text, json, msgpack.
    """

    path: Path
    prefix: str | None = None
    bits: int | None = None
    capacity: str = "64MiB"
    codec: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Return the options of a write; ValueError names one that is unknown, missing or wrong."""
        options = {name.lower(): value for name, value in given.items()}
        unknown = sorted(set(options) - WRITING)
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r} for format kvspool; there are {', '.join(sorted(WRITING))}")
        if not options.get("path"):
            raise ValueError("a path is missing: save(path), of a log or of a root of shards")
        return cls(
            path=local_path(options["path"]),
            prefix=options.get("prefix"),
            bits=_number("bits", options["bits"]) if "bits" in options else None,
            capacity=options.get("capacity", "64MiB"),
            codec=options.get("codec"),
        )


class KvspoolDataSource(DataSource):
    """`kvspool`: see the module."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "kvspool"

    def schema(self) -> str:
        """Return the columns that a read has unless the user names fewer. ValueError for options that are wrong."""
        ReadOptions.parse(self.options)
        return SCHEMA

    def reader(self, schema: StructType) -> ShardReader:
        """Return the batch reader."""
        return reader(ReadOptions.parse(self.options).for_batch(), schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        """Return the stream reader."""
        return StreamReader(ReadOptions.parse(self.options).for_stream(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> ShardWriter:
        """Return the batch writer. Only mode append is possible: a log isn't replaced by a query."""
        options = Options.parse(self.options)
        if overwrite:
            raise ValueError('format kvspool only appends: use .mode("append")')
        return ShardWriter(options.path, options.prefix, options.bits, options.capacity, options.codec, schema)


def _number(name: str, text: Any) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"option {name} is a number, not {text!r}") from None
