"""Declared jobs: from logs, through Spark, to Parquet, Delta or other logs, exactly once. See docs/pipeline.md.

    from hub.pipeline import load
    from hub.pipeline.run import PipelineRun

    progress = PipelineRun(load(Path("delays.toml")), once=True).run()

A Parquet table of a pipeline can be read by any reader of Parquet; `snapshot` returns its current version.
"""

from hub.pipeline.errors import BadRecords, JobError, PipelineFailed, PipelineRuns, SchemaError, SinkError
from hub.pipeline.job import Job, load
from hub.pipeline.table import Table, snapshot

__all__ = ["BadRecords", "Job", "JobError", "PipelineFailed", "PipelineRuns", "SchemaError", "SinkError", "Table", "load", "snapshot"]
