"""Batch reading: the records available at planning, or a part of them by offset or time, as tasks that read Arrow batches.

Records that a writer overwrites between planning and reading are a data loss; see `reading`.

**Filters.** A reader that accepts filters makes every read fail in a session in which Spark doesn't push any. So there are two kinds. The
accepting one is returned only if Spark is about to push: it plans such a read in a separate module.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from hub.spark import offsets, reading
from hub.spark.errors import DataLossError
from hub.spark.filters import Pushed, pushed, select
from hub.spark.opening import open_shards
from hub.spark.options import ReadOptions
from hub.spark.planning import ReadTask, plan
from hub.spark.shards import Extent, ShardKey, ShardRange, SparkShards
from kvspool.errors import LogNotFound

if TYPE_CHECKING:
    import pyarrow

PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"  # the module in which Spark plans a read and pushes filters

_logger = logging.getLogger("kvspool")


def reader(options: ReadOptions, schema: StructType) -> ShardReader:
    """Return the reader of a batch query. Raises ValueError for an unknown column."""
    wanted = is_pushing() if options.push_filters is None else options.push_filters
    return FilteringReader(options, schema) if wanted else ShardReader(options, schema)


def is_pushing() -> bool:
    """Return whether Spark pushes filters in this process.

    A source can't read the session's setting spark.sql.python.filterPushdown.enabled.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return PUSHING in sys.modules or getattr(main, "name", None) == PUSHING


class ShardReader(DataSourceReader):
    """Reads ranges of shards; see the module."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """Store the options of a batch query, and check the requested columns: any known ones, in any order."""
        reading.check_columns(schema)
        self.options = options
        self.schema = schema
        self.pushed = Pushed()

    def partitions(self) -> list[InputPartition]:
        """Return the tasks. Raises LogNotFound for a missing shard that was requested by name, ValueError for impossible offsets, and
        DataLossError for lost ones.
        """
        shards = open_shards(self.options, reading.columns_of(self.schema))
        try:
            ranges = self._ranges(shards)
        finally:
            shards.close()
        tasks = plan(ranges, min_partitions=self.options.min_partitions, max_records=self.options.max_records)
        return list[InputPartition](tasks)

    def _ranges(self, shards: SparkShards) -> list[ShardRange]:
        extents = shards.look()
        missing = self.options.selection.missing(extents)
        if missing:
            where = self.options.path or ", ".join(self.options.hubs)
            there = ", ".join(sorted({repr(key.topic) for key in extents})) or "none"
            raise LogNotFound(f"{where} has no {', '.join(map(repr, missing))}; of the requested ones it has {there}")
        found = []
        for key, (first, end) in self._asked(shards, extents).items():
            if self.pushed.has(key):
                first, end = self.pushed.offsets(*self._timed(shards, key, first, end))
                if first < end:
                    found.append(shards.range(key, first, end))
        return found

    def _asked(self, shards: SparkShards, extents: dict[ShardKey, Extent]) -> dict[ShardKey, tuple[int, int]]:
        """Return the sequences that the options select."""
        options = self.options
        starts = options.starting.sequences(
            "starting", extents, shards.sequence_at, self._report, is_lenient_on_time=options.is_lenient_on_time
        )
        ends = options.ending.sequences("ending", extents, shards.sequence_at, self._report)
        return offsets.ranges(starts, ends)

    def _timed(self, shards: SparkShards, key: ShardKey, first: int, end: int) -> tuple[int, int]:
        """Narrow a range of sequences by the times in filters, if the order of times is that of sequences."""
        since, before = self.pushed.times
        if (since is None and before is None) or not shards.has_ordered_times(key):
            return first, end
        begin = None if since is None else shards.sequence_at(key, since)
        stop = None if before is None else shards.sequence_at(key, before)
        if since is not None:
            first = end if begin is None else max(first, begin)
        return first, end if stop is None else min(end, stop)

    def _report(self, loss: str) -> None:
        if self.options.fail_on_data_loss:
            raise DataLossError(f"{loss}. Set the option failOnDataLoss to false to continue without them.")
        _logger.warning(loss)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of one task as record batches."""
        if isinstance(partition, ReadTask):  # Spark makes one empty partition out of none
            terms = self.pushed.of_rows
            for batch in reading.read(partition, self.schema, fail_on_data_loss=self.options.fail_on_data_loss):
                if terms:
                    batch = select(batch, terms)
                if batch.num_rows:
                    yield batch


class FilteringReader(ShardReader):
    """Reads only records that match filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Accept filters that can be applied exactly; return the others for Spark to apply."""
        self.pushed, left = pushed(filters)
        return left
