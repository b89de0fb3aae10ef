"""Declared jobs: from logs, through Spark, to Delta tables or other logs, exactly once. See docs/pipeline.md.

    from hub.pipeline import load
    from hub.pipeline.run import PipelineRun

    progress = PipelineRun(load(Path("delays.toml")), once=True).run()
"""

from hub.pipeline.errors import BadRecords, JobError, PipelineFailed, PipelineRuns, SchemaError, SinkError
from hub.pipeline.job import Job, load

__all__ = ["BadRecords", "Job", "JobError", "PipelineFailed", "PipelineRuns", "SchemaError", "SinkError", "load"]
