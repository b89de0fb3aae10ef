"""Batch reading: one partition for each shard, rows as Arrow batches straight out of the log.

The driver looks once at each shard: which sequences are there. A task reads just those, in its own process, without a lock. What a
writer has overwritten between the two is a data loss: an error that names the shard and the sequences, or a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, DataType, IntegerType, LongType, StringType, StructType, TimestampType

from kvspool import Gap, KvspoolError, Spool
from kvspool.errors import LogNotFound
from kvspool.journal import files as journals
from kvspool.spool.format import CONTROL_FILE
from kvspool.spool.spool import TIMEOUT
from shard import route
from shard.shardset import Log, open_shard

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

KNOWN = ("machine restart", "missing")  # reasons of Gaps that were there when the query was planned

_logger = logging.getLogger("kvspool")
_logs: dict[str, Spool] = {}  # a worker process serves many tasks; its logs stay open between them


class DataLossError(KvspoolError):
    """Records that the query was planned for are gone. `failOnDataLoss=false` leaves them out."""


@dataclass
class ShardRange(InputPartition):
    """The sequences first..end-1 of one log."""

    path: str
    log_id: bytes
    topic: str
    partition: int
    first: int
    end: int


class ShardReader(DataSourceReader):
    """Reads what is there when the query is planned; see the module."""

    def __init__(self, path: Path, prefix: str | None, fail_on_data_loss: bool, schema: StructType) -> None:
        """Check the columns asked for: any of ours, in any order."""
        self.path = path
        self.prefix = prefix
        self.fail_on_data_loss = fail_on_data_loss
        self.schema = schema
        for field in schema.fields:
            if COLUMNS.get(field.name) != field.dataType:
                names = ", ".join(f"{name} {kind.simpleString()}" for name, kind in COLUMNS.items())
                raise ValueError(f"no column {field.name} {field.dataType.simpleString()}; format kvspool has {names}")

    def partitions(self) -> list[InputPartition]:
        """Return a range for each shard that holds records."""
        ranges: list[InputPartition] = []
        for topic, partition, path in find_logs(self.path, self.prefix):
            with open_shard(path, TIMEOUT) as log:
                stats = log.stats()
                if stats.records:
                    ranges.append(ShardRange(str(path), log.log_id, topic, partition, stats.first_sequence, stats.next_sequence))
        return ranges

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of one range as record batches."""
        if not isinstance(partition, ShardRange):
            return  # Spark makes one empty partition out of none
        from kvspool import arrow

        log = _open(partition)
        rows = _Rows(self.schema, partition)
        for batch in arrow.batches(log.cursor(partition.first, bounded=True, end=partition.end)):
            if isinstance(batch, Gap):
                self._report(batch, partition)
            else:
                yield rows.of(batch)

    def _report(self, gap: Gap, partition: ShardRange) -> None:
        if gap.reason in KNOWN:
            _logger.warning("topic %s, partition %s: %s", partition.topic, partition.partition, gap)
            return
        message = (
            f"[KVSPOOL_DATA_LOSS] topic {partition.topic}, partition {partition.partition}: {gap}. "
            "They were there when the query was planned; a larger capacity keeps them longer."
        )
        if self.fail_on_data_loss:
            raise DataLossError(f"{message} Set the option failOnDataLoss to false to read on without them.")
        _logger.warning(message)


class _Rows:
    """Turns batches of a log into batches with the columns and types that Spark asked for."""

    def __init__(self, schema: StructType, partition: ShardRange) -> None:
        from pyspark.sql.pandas.types import to_arrow_schema

        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._partition = partition

    def of(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return the rows of a batch."""
        import pyarrow

        columns = [self._column(field, batch) for field in self._schema]
        if not columns:
            return pyarrow.RecordBatch.from_struct_array(pyarrow.nulls(batch.num_rows, pyarrow.struct([])))
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)

    def _column(self, field: Any, batch: pyarrow.RecordBatch) -> pyarrow.Array:
        import pyarrow

        if field.name == "topic":
            return pyarrow.repeat(pyarrow.scalar(self._partition.topic, field.type), batch.num_rows)
        if field.name == "partition":
            return pyarrow.repeat(pyarrow.scalar(self._partition.partition, field.type), batch.num_rows)
        column = batch.column("sequence" if field.name == "offset" else field.name)
        # Spark's timestamps are microseconds; the nanoseconds below them are cut off.
        return column.cast(field.type, safe=False) if field.name == "timestamp" else column


def find_logs(path: Path, prefix: str | None) -> list[tuple[str, int, Path]]:
    """Return topic, partition and path of each log at `path`: the log itself, or the shards under a root.

    Raises LogNotFound, ShardError for shards that make up no set, ValueError for a prefix that isn't one.
    """
    if (path / CONTROL_FILE).exists() or path.is_dir() and journals.find(path) is not None:
        if prefix is not None:
            raise ValueError(f"{path} is one log, not a root of shards: option prefix has no meaning there")
        return [(path.name, 0, path)]
    if not path.is_dir():
        raise LogNotFound(f"{path} does not exist, or is neither a log nor a root of shards")
    sets = route.scan(path)
    if prefix is not None:
        route.check_prefix(prefix)
        if prefix not in sets:
            raise LogNotFound(f"{path} has no shard set with prefix {prefix!r}; it has {', '.join(map(repr, sets)) or 'none'}")
        sets = {prefix: sets[prefix]}
    logs = []
    for name, found in sets.items():
        if not found.is_being_made:
            found.check_complete(path)
        logs += [(name, index, shard) for index, shard in found.paths(path)]
    return logs


def _open(partition: ShardRange) -> Log:
    """Return the open log of a range, one handle of a spool for all tasks of this process; a journal costs little to open."""
    log: Log | None = _logs.get(partition.path)
    if log is None or log.closed or log.has_vanished():
        log = open_shard(Path(partition.path), TIMEOUT)
        if isinstance(log, Spool):
            _logs[partition.path] = log
    if log.log_id != partition.log_id or log.end() < partition.end:  # a journal may have no id
        raise DataLossError(
            f"[KVSPOOL_LOG_REPLACED] {partition.path} is another log than when the query was planned; run the query again"
        )
    return log
