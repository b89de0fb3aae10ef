"""Batch reading: what is there when the query is planned, or a part of it by offset or time, as tasks that read Arrow batches.

What a writer overwrites between planning and reading is a data loss; see `reading`.

**Filters.** A reader that takes filters makes every read fail in a session where Spark doesn't push any, so there are two kinds, and the
one that takes them is returned only where Spark is about to push: it plans such a read in a module of its own.
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
from hub.spark.planning import Task, plan
from hub.spark.shards import Extent, ShardKey, ShardRange, Shards
from kvspool.errors import LogNotFound

if TYPE_CHECKING:
    import pyarrow

PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"  # the module in which Spark plans a read and pushes filters

_logger = logging.getLogger("kvspool")


def reader(options: ReadOptions, schema: StructType) -> ShardReader:
    """Return the reader of a batch query. Raises ValueError for a column that there isn't."""
    wanted = is_pushing() if options.push_filters is None else options.push_filters
    return FilteringReader(options, schema) if wanted else ShardReader(options, schema)


def is_pushing() -> bool:
    """Return whether this process is one in which Spark pushes filters: the session's setting spark.sql.python.filterPushdown.enabled is
    not told to a source."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return PUSHING in sys.modules or getattr(main, "name", None) == PUSHING


class ShardReader(DataSourceReader):
    """Reads ranges of shards; see the module."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        """Take the options of a batch query, and check the columns asked for: any of ours, in any order."""
        reading.check_columns(schema)
        self.options = options
        self.schema = schema
        self.pushed = Pushed()

    def partitions(self) -> list[InputPartition]:
        """Return the tasks. Raises LogNotFound for what was asked for by name and isn't there, ValueError for offsets that can't be, and
        DataLossError for ones that are gone."""
        shards = open_shards(self.options, reading.columns_of(self.schema))
        try:
            ranges = self._ranges(shards)
        finally:
            shards.close()
        tasks = plan(ranges, min_partitions=self.options.min_partitions, max_records=self.options.max_records)
        return list[InputPartition](tasks)

    def _ranges(self, shards: Shards) -> list[ShardRange]:
        extents = shards.look()
        missing = self.options.selection.missing(extents)
        if missing:
            where = self.options.path or ", ".join(self.options.hubs)
            there = ", ".join(sorted({repr(key.topic) for key in extents})) or "none"
            raise LogNotFound(f"{where} has no {', '.join(map(repr, missing))}; of what was asked for it has {there}")
        found = []
        for key, (first, end) in self._asked(shards, extents).items():
            if self.pushed.has(key):
                first, end = self.pushed.offsets(*self._timed(shards, key, first, end))
                if first < end:
                    found.append(shards.range(key, first, end))
        return found

    def _asked(self, shards: Shards, extents: dict[ShardKey, Extent]) -> dict[ShardKey, tuple[int, int]]:
        """Return the sequences that the options ask for."""
        options = self.options
        starts = options.starting.sequences(
            "starting", extents, shards.sequence_at, self._report, is_lenient_on_time=options.is_lenient_on_time
        )
        ends = options.ending.sequences("ending", extents, shards.sequence_at, self._report)
        return offsets.ranges(starts, ends)

    def _timed(self, shards: Shards, key: ShardKey, first: int, end: int) -> tuple[int, int]:
        """Return the sequences of some that have the times asked for in filters, where the order of times is that of sequences."""
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
            raise DataLossError(f"{loss}. Set the option failOnDataLoss to false to read on without them.")
        _logger.warning(loss)

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of one task as record batches."""
        if isinstance(partition, Task):  # Spark makes one empty partition out of none
            terms = self.pushed.of_rows
            for batch in reading.read(partition, self.schema, fail_on_data_loss=self.options.fail_on_data_loss):
                if terms:
                    batch = select(batch, terms)
                if batch.num_rows:
                    yield batch


class FilteringReader(ShardReader):
    """Reads no more than filters ask for."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what can be applied exactly; return the others, for Spark to apply."""
        self.pushed, left = pushed(filters)
        return left
