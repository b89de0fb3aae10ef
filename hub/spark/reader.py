"""Batch reading: what is there when the query is planned, or a part of it by offset or time, as tasks that read Arrow batches.

What a writer overwrites between planning and reading is a data loss; see `reading`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from hub.spark import reading
from hub.spark.opening import open_shards
from hub.spark.options import ReadOptions
from hub.spark.planning import Task, plan
from kvspool.errors import LogNotFound

if TYPE_CHECKING:
    import pyarrow


class ShardReader(DataSourceReader):
    """Reads ranges of shards; see the module."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """Take the options of a batch query, and check the columns asked for: any of ours, in any order."""
        reading.check_columns(schema)
        self.options = options
        self.schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return the tasks. Raises LogNotFound for what was asked for by name and isn't there."""
        shards = open_shards(self.options, reading.columns_of(self.schema))
        try:
            extents = shards.look()
            missing = self.options.selection.missing(extents)
            if missing:
                there = ", ".join(sorted({repr(key.topic) for key in extents})) or "none"
                where = self.options.path or ", ".join(self.options.hubs)
                raise LogNotFound(f"{where} has no {', '.join(map(repr, missing))}; of what was asked for it has {there}")
            ranges = [shards.range(key, extent.first, extent.end) for key, extent in extents.items() if extent.first < extent.end]
        finally:
            shards.close()
        tasks = plan(ranges, min_partitions=self.options.min_partitions, max_records=self.options.max_records)
        return list[InputPartition](tasks)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of one task as record batches."""
        if isinstance(partition, Task):  # Spark makes one empty partition out of none
            yield from reading.read(partition, self.schema, fail_on_data_loss=self.options.fail_on_data_loss)
