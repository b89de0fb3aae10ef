"""A job as a query of Spark: source, decoded, selected, watermarked, aggregated. Nothing runs until the rows are written to a sink.

The source may be any frame with the columns of `format("kvspool")`, streaming or not, so that a batch can test the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hub.pipeline.decode import Plan
from hub.pipeline.job import Job, Window, source_options
from hub.pipeline.lateness import LATE, marking
from hub.pipeline.schema import SchemaField

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "type")


def stream(job: Job, spark: SparkSession) -> DataFrame:
    """Return the job's source as a stream."""
    return spark.readStream.format("kvspool").options(**source_options(job)).load()


def plan(job: Job, fields: tuple[SchemaField, ...]) -> Plan:
    """Return the description of decoding values to these fields."""
    decode = job.decode
    return Plan(
        decode.codec,
        fields,
        decode.time,
        str(job.bad_path),
        decode.bad == "fail",
        job.name,
        job.ahead,
        job.sink.partition_by,
    )


def rows(job: Job, fields: tuple[SchemaField, ...], source: DataFrame) -> DataFrame:
    """Return the job's rows of a source."""
    from pyspark.sql import functions as F

    decoding = plan(job, fields)
    late = marking(job, decoding)
    work = late or decoding
    frame = source.select(*COLUMNS).mapInArrow(work, work.ddl)  # type: ignore[arg-type]
    if job.select is not None:
        frame = frame.where(job.select.where) if job.select.where else frame
        has_all = late is None or any(column.strip() == "*" for column in job.select.columns)
        frame = frame.selectExpr(*job.select.columns, *([] if has_all else [f"`{LATE}`"]))
    if late is not None:
        frame = frame.observe(LATE, F.count_if(F.col(f"`{LATE}`")).alias("rows")).drop(LATE)
    if job.watermark is not None:
        frame = frame.withWatermark(job.watermark.column, job.watermark.delay)
    return frame if job.window is None else _aggregated(frame, job.window)


def _aggregated(frame: DataFrame, window: Window) -> DataFrame:
    from pyspark.sql import functions as F

    aggregates = [F.expr(text) for text in window.aggregates]
    groups = [F.expr(text) for text in window.group]
    if not window.size:
        return frame.groupBy(*groups).agg(*aggregates)
    span = F.window(window.column, window.size, window.slide or None)
    found = frame.groupBy(span, *groups).agg(*aggregates)
    others = [F.col(f"`{name}`") for name in found.columns if name != "window"]
    return found.select(F.col("window.start").alias("window_start"), F.col("window.end").alias("window_end"), *others)
