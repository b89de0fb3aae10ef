"""The Spark data source `kvspool`: its name, columns and options.

    logs = spark.read.format("kvspool").schema("offset bigint, value binary")            the columns that the query needs
    logs.load("root")                                                                    a hub root, a shard set, or one log
    logs.option("prefix", "JFK").load("root")                                            one shard set of several
    df.write.format("kvspool").option("prefix", "JFK").mode("append").save("root")       append to a shard set
    df.write.format("kvspool").mode("append").save("events")                             append to one log
    df.writeStream.format("kvspool").option("checkpointLocation", "c").start("events")   append a stream, each record once

The columns have the names of Kafka's source, so that moving a job means changing one word:

    key binary, value binary, topic string (the client, the prefix, or the log's name), partition int (the shard), offset bigint (the
    sequence), timestamp timestamp (cut to microseconds), type int

Spark's Python API doesn't report a query's columns to a source. Without `.schema(...)` all seven are read.
"""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from hub.spark.options import ReadOptions
from hub.spark.reader import ShardReader, reader
from hub.spark.sink import ShardSink
from hub.spark.stream import StreamReader
from hub.spark.target import SinkTarget
from hub.spark.writer import ShardWriter

SCHEMA = "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, type int"


class KvspoolDataSource(DataSource):
    """`kvspool`: see the module."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "kvspool"

    def schema(self) -> str:
        """Return the columns of a read, unless the user names fewer. Raises ValueError for wrong options."""
        ReadOptions.parse(self.options)
        return SCHEMA

    def reader(self, schema: StructType) -> ShardReader:
        """Return the batch reader."""
        return reader(ReadOptions.parse(self.options).for_batch(), schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        """Return the stream reader."""
        return StreamReader(ReadOptions.parse(self.options).for_stream(), schema)

    def writer(self, schema: StructType, overwrite: bool) -> ShardWriter:
        """Return the batch writer. Only mode append is possible: a query can't replace a log."""
        if overwrite:
            raise ValueError('format kvspool only appends: use .mode("append")')
        return ShardWriter(SinkTarget.parse(self.options, schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> ShardSink:
        """Return the sink of a micro-batch. Not for the output mode complete, which would append the whole result each time."""
        if overwrite:
            raise ValueError("format kvspool appends, so it can't replace its content with the whole result of each batch: use the output "
                             'mode "append", or foreachBatch')
        return ShardSink(SinkTarget.parse(self.options, schema))

