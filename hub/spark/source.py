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

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from hub.spark.reader import ShardReader
from hub.spark.writer import ShardWriter

SCHEMA = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, type int"
READING = frozenset({"path", "prefix", "failondataloss"})
WRITING = frozenset({"path", "prefix", "bits", "capacity", "codec"})


@dataclass(frozen=True)
class Options:
    """The options of a read or a write, parsed and checked.

    path: a log, or a root of shards. prefix: of the shard set; None: all that there are (reading), the only one (writing).
    failOnDataLoss: whether records that are gone before they were read fail the query (default) or are left out with a warning.
    bits, capacity: make the shard set if it isn't there; of each shard. codec: what a written value is: raw, text, json, msgpack.
    """

    path: Path
    prefix: str | None = None
    fail_on_data_loss: bool = True
    bits: int | None = None
    capacity: str = "64MiB"
    codec: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str], known: frozenset[str]) -> Options:
        """Return the options of a job; ValueError names one that is unknown, missing or wrong."""
        options = {name.lower(): value for name, value in given.items()}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r} for format kvspool; there are {', '.join(sorted(known))}")
        if not options.get("path"):
            raise ValueError("a path is missing: load(path) or save(path), of a log or of a root of shards")
        return cls(
            path=_local_path(options["path"]),
            prefix=options.get("prefix"),
            fail_on_data_loss=_boolean("failOnDataLoss", options.get("failondataloss", "true")),
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
        """Return the columns that a read has unless the user names fewer."""
        return SCHEMA

    def reader(self, schema: StructType) -> ShardReader:
        """Return the batch reader."""
        options = Options.parse(self.options, READING)
        return ShardReader(options.path, options.prefix, options.fail_on_data_loss, schema)

    def writer(self, schema: StructType, overwrite: bool) -> ShardWriter:
        """Return the batch writer. Only mode append is possible: a log isn't replaced by a query."""
        options = Options.parse(self.options, WRITING)
        if overwrite:
            raise ValueError('format kvspool only appends: use .mode("append")')
        return ShardWriter(options.path, options.prefix, options.bits, options.capacity, options.codec, schema)


def _local_path(text: str) -> Path:
    """Return a path of this host: Spark may hand over a file: URL."""
    if text.startswith("file:"):
        text = "/" + text.removeprefix("file:").lstrip("/")
    elif "://" in text:
        raise ValueError(f"path {text!r} is not on this host; format kvspool reads local paths")
    return Path(os.path.abspath(text))


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(f"option {name} is true or false, not {text!r}")
    return text.lower() == "true"


def _number(name: str, text: Any) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"option {name} is a number, not {text!r}") from None
