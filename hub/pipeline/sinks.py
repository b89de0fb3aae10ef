"""Where a pipeline's rows go, and why each is there once.

- `parquet`: a `Table`. The batch's number becomes visible in the same step as its rows, so a replayed batch is known.
- `delta`: Delta's own transactions, which keep the last batch of an application; needs the package `delta-spark`.
- `kvspool`: the streaming sink of `format("kvspool")`, which keeps the last batch of a query in the log.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from hub.pipeline.compaction import compact
from hub.pipeline.job import Job, seconds
from hub.pipeline.table import Table
from kvspool.errors import MissingExtra

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class Sink(Protocol):
    """Where batches go. `query` is the id of the query, known when its first batch comes."""

    def attach(self, writer: DataStreamWriter, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """Let a query write here. before: is called with a batch's number before anything of it is computed."""

    def close(self) -> None:
        """Let go of it."""


def open_sink(job: Job) -> Sink:
    """Return the job's sink. Raises MissingExtra, SinkError, PipelineRuns."""
    if job.sink.format == "parquet":
        return ParquetSink(job)
    if job.sink.format == "delta":
        return DeltaSink(job)
    return KvspoolSink(job)


class ParquetSink:
    """A folder of Parquet files; see `hub.pipeline.table`."""

    def __init__(self, job: Job) -> None:
        """Open the table. Raises what `Table` does."""
        from pathlib import Path

        self._job = job
        self._table = Table(Path(job.sink.path))
        try:
            self._table.check_job(job.name)
        except BaseException:
            self._table.close()
            raise

    def attach(self, writer: DataStreamWriter, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """See `Sink`."""

        def write(frame: DataFrame, batch: int) -> None:
            self._write(frame, query(), batch, before)

        return writer.foreachBatch(write)

    def _write(self, frame: DataFrame, query: str, batch: int, before: Callable[[int], None]) -> None:
        if self._table.has(query, batch):
            return
        self._table.begin(query, self._job.name, batch)
        before(batch)
        target = frame.write
        if self._job.sink.partition_by:
            target = target.partitionBy(*self._job.sink.partition_by)
        target.parquet(str(self._table.fresh_staging()))
        self._table.commit(query, batch, replace=self._job.mode == "complete")
        if self._job.compact is not None and self._job.mode == "append":
            compact(self._table, self._job.compact)
        self._table.prune(seconds(self._job.sink.snapshots))

    def close(self) -> None:
        """See `Sink`."""
        self._table.close()


class DeltaSink:
    """A table of Delta Lake."""

    def __init__(self, job: Job) -> None:
        """Raises MissingExtra."""
        if importlib.util.find_spec("delta") is None:
            raise MissingExtra(
                "[sink] format delta needs the package delta-spark of Spark's version, and its jars in [spark.conf] spark.jars.packages; "
                "it isn't installed"
            )
        self._job = job

    def attach(self, writer: DataStreamWriter, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """See `Sink`."""
        job = self._job

        def write(frame: DataFrame, batch: int) -> None:
            before(batch)
            target = frame.write.format("delta").options(**job.sink.options)
            target = target.option("txnAppId", query()).option("txnVersion", batch)  # a batch that is in already is left out
            if job.sink.partition_by:
                target = target.partitionBy(*job.sink.partition_by)
            target.mode("overwrite" if job.mode == "complete" else "append").save(job.sink.path)

        return writer.foreachBatch(write)

    def close(self) -> None:
        """See `Sink`."""


class KvspoolSink:
    """A log, a shard set or a hub root. Its columns are those of `format("kvspool")`: value, and perhaps key, topic, partition, type."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def attach(self, writer: DataStreamWriter, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """See `Sink`."""
        return writer.format("kvspool").options(**self._job.sink.options).option("path", self._job.sink.path)

    def close(self) -> None:
        """See `Sink`."""
