"""The sinks of a pipeline, and how each stores every row once.

- `parquet`: a `Table`. The batch's number becomes visible in the same step as its rows, so a replayed batch is detected.
- `delta`: Delta's own transactions, which keep the last batch of an application; needs its jars.
- `kvspool`: the streaming sink of `format("kvspool")`, which keeps the last batch of a query in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from hub.pipeline import failures
from hub.pipeline.compaction import compact
from hub.pipeline.job import Job, seconds
from hub.pipeline.table import Table
from kvspool.errors import MissingExtra

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class Sink(Protocol):
    """A destination of batches. `query` is the id of the query, known from its first batch on."""

    def attach(self, frame: DataFrame, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """Make a query write its rows here. before: called with a batch's number before any of it is computed."""

    def close(self) -> None:
        """Close the sink."""


def open_sink(job: Job) -> Sink:
    """Return the job's sink. Raises SinkError, PipelineRuns."""
    if job.sink.format == "parquet":
        return ParquetSink(job)
    if job.sink.format == "delta":
        return DeltaSink(job)
    return KvspoolSink(job)


class ParquetSink:
    """A folder of Parquet files; see `hub.pipeline.table`."""

    def __init__(self, job: Job) -> None:
        """Open the table. Raises as `Table`."""
        from pathlib import Path

        self._job = job
        self._table = Table(Path(job.sink.path))
        try:
            self._table.check_job(job.name, job.mode)
        except BaseException:
            self._table.close()
            raise

    def attach(self, frame: DataFrame, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """See `Sink`."""

        def write(frame: DataFrame, batch: int) -> None:
            self._write(frame, query(), batch, before)

        return frame.writeStream.foreachBatch(write)

    def _write(self, frame: DataFrame, query: str, batch: int, before: Callable[[int], None]) -> None:
        if self._table.has(query, batch):
            if self._job.window is not None:  # Spark was killed before it committed the batch, and compares its state with this one
                frame.write.format("noop").mode("overwrite").save()
            return
        self._table.begin(query, self._job.name, batch, self._job.mode)
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
        self._job = job

    def attach(self, frame: DataFrame, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """See `Sink`. Raises MissingExtra if Spark has no Delta."""
        job = self._job
        self._check(frame.sparkSession)

        def write(frame: DataFrame, batch: int) -> None:
            before(batch)
            target = frame.write.format("delta").options(**job.sink.options)
            target = target.option("txnAppId", query()).option("txnVersion", batch)  # a repeated batch is ignored
            if job.sink.partition_by:
                target = target.partitionBy(*job.sink.partition_by)
            target.mode("overwrite" if job.mode == "complete" else "append").save(job.sink.path)

        return frame.writeStream.foreachBatch(write)

    def _check(self, spark: SparkSession) -> None:
        """Load the table, which may be missing. Spark must know the format, or the first batch would fail at its end."""
        try:
            spark.read.format("delta").load(self._job.sink.path)
        except failures.of_spark() as error:
            if "[DATA_SOURCE_NOT_FOUND]" in str(error):
                release = ".".join(spark.version.split(".")[:2])
                raise MissingExtra(
                    f"{self._job.path}: [sink] format: Spark {spark.version} has no Delta Lake; name the one for it in [spark.conf], "
                    f'for example "spark.jars.packages" = "io.delta:delta-spark_{release}_2.13:..." or by its files in "spark.jars"'
                ) from None

    def close(self) -> None:
        """See `Sink`."""


class KvspoolSink:
    """A log, a shard set or a hub root. Its columns are those of `format("kvspool")`: value, and optionally key, topic, partition, type."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def attach(self, frame: DataFrame, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """See `Sink`."""
        return frame.writeStream.format("kvspool").options(**self._job.sink.options).option("path", self._job.sink.path)

    def close(self) -> None:
        """See `Sink`."""
