"""Read a task's ranges as Arrow batches with the columns that Spark selects, and report missing records.

This runs in a worker process on any host. Rows are in the order of the ranges and, within each, of the sequences: a repeated task yields
the same rows.

**Missing records.** Records lost between planning and reading, by overwriting, trimming or damage, are a data loss. It is an error with
topic, partition and sequences or, if the query allows it, a warning. The log counts each Gap in both cases, if we may write to it.
Sequences that were skipped, after a crash of the machine or on purpose, never had a record in the log; they are reported as a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StringType, StructType, TimestampType

from hub.spark.errors import DataLossError
from hub.spark.planning import ReadTask
from hub.spark.shards import ShardKey
from hub.spark.workers import freeze_modules
from kvspool import Gap

if TYPE_CHECKING:
    import pyarrow

COLUMNS: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "type": IntegerType(),
}
LEFT_OUT = ("machine restart", "missing")  # reasons of Gaps that never had a record in the log
OVERTAKEN = (
    "They existed when the query was planned; a larger capacity, or retention that waits for a durable reader, keeps them longer."
)
DAMAGED = "kvspool verify, or kvspool hub verify for a hub's root, shows where; a copy of the log may still have them."

SMALL = 2048  # rows of a batch, below which the batch itself costs Spark more than its rows
SMALL_BYTES = 8 << 20  # at most so many bytes are combined

_logger = logging.getLogger("kvspool")


def check_columns(schema: StructType) -> None:
    """Raise ValueError for a column that a read doesn't have."""
    for field in schema.fields:
        if COLUMNS.get(field.name) != field.dataType:
            names = ", ".join(f"{name} {kind.simpleString()}" for name, kind in COLUMNS.items())
            raise ValueError(f"no column {field.name} {field.dataType.simpleString()}; format kvspool has {names}")


def columns_of(schema: StructType) -> frozenset[str]:
    """Return the columns of `kvspool.arrow.SCHEMA` for the rows, at least one."""
    names = {"sequence" if name == "offset" else name for name in schema.fieldNames()} - {"topic", "partition"}
    return frozenset(names or {"sequence"})


def read(task: ReadTask, schema: StructType, *, fail_on_data_loss: bool) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows of a task. Raises DataLossError, and the errors of reading the shards."""
    batches = _batches(task, schema, fail_on_data_loss)
    return together(batches) if schema.fields and len(task.ranges) > 1 else batches


def _batches(task: ReadTask, schema: StructType, fail_on_data_loss: bool) -> Iterator[pyarrow.RecordBatch]:
    rows = BatchProjection(schema)
    for one in task.ranges:
        for batch in one.batches():
            if isinstance(batch, Gap):
                report(batch, one.key, fail_on_data_loss)
            else:
                yield rows.of(batch, one.key)
    freeze_modules()


def together(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Yield the same rows; adjacent small batches are combined."""
    import pyarrow

    waiting: list[pyarrow.RecordBatch] = []
    for batch in chain(batches, [None]):
        is_small = batch is not None and batch.num_rows < SMALL
        is_room = sum(one.num_rows for one in waiting) < SMALL and sum(one.nbytes for one in waiting) < SMALL_BYTES
        if waiting and not (is_small and is_room):
            yield from waiting if len(waiting) == 1 else pyarrow.Table.from_batches(waiting).combine_chunks().to_batches()
            waiting = []
        if is_small:
            waiting.append(batch)
        elif batch is not None:
            yield batch


def report(gap: Gap, key: ShardKey, fail_on_data_loss: bool) -> None:
    """Raise DataLossError for lost records, or only log it."""
    if gap.reason in LEFT_OUT:
        _logger.warning("topic %s, partition %s: %s", key.topic, key.partition, gap)
        return
    why = DAMAGED if gap.reason == "damaged" else OVERTAKEN
    message = f"[KVSPOOL_DATA_LOSS] topic {key.topic}, partition {key.partition}: {gap}. {why}"
    if fail_on_data_loss:
        raise DataLossError(f"{message} Set the option failOnDataLoss to false to continue without them.")
    _logger.warning(message)


class BatchProjection:
    """Converts batches of `kvspool.arrow.SCHEMA` to exactly the schema that Spark asks for: any of our columns, in any order."""

    def __init__(self, schema: StructType) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._repeated: dict[str, tuple[object, pyarrow.Array]] = {}  # the columns with one value in all rows of a shard

    def of(self, batch: pyarrow.RecordBatch, key: ShardKey) -> pyarrow.RecordBatch:
        """Return the rows of a batch of a shard."""
        import pyarrow

        columns = [self._column(field, batch, key) for field in self._schema]
        if not columns:
            return pyarrow.RecordBatch.from_struct_array(pyarrow.nulls(batch.num_rows, pyarrow.struct([])))
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, field: pyarrow.Field, batch: pyarrow.RecordBatch, key: ShardKey) -> pyarrow.Array:
        if field.name in ("topic", "partition"):
            return self._same(field, getattr(key, field.name), batch.num_rows)
        column = batch.column("sequence" if field.name == "offset" else field.name)
        # Spark's timestamps are microseconds; nanoseconds are cut off.
        return column.cast(field.type, safe=False) if field.name == "timestamp" else column

    def _same(self, field: pyarrow.Field, value: object, count: int) -> pyarrow.Array:
        """Return a column of one value: a slice of the previous one, if that has the same shard and is long enough."""
        import pyarrow

        known, column = self._repeated.get(field.name, (None, None))
        if column is None or known != value or len(column) < count:
            column = pyarrow.repeat(pyarrow.scalar(value, field.type), count)
            self._repeated[field.name] = value, column
        return column.slice(0, count)
