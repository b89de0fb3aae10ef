"""What can go wrong with a pipeline. Messages begin with a stable code, for Spark loses the classes of exceptions."""

from __future__ import annotations

from kvspool.errors import KvspoolError


class JobError(KvspoolError, ValueError):
    """A job file is wrong: the message names the file, the table and the key. Nothing was started."""

    exit_code = 2


class SchemaError(KvspoolError, ValueError):
    """A schema can't be read, or can't be inferred. Nothing was started."""

    exit_code = 2


class SinkError(KvspoolError):
    """What lies at the sink's path isn't what the pipeline left there. Nothing was written."""

    exit_code = 3


class BadRecords(KvspoolError):
    """A record can't be decoded, and the job is to fail then. The batch was not written."""

    exit_code = 5


class PipelineFailed(KvspoolError):
    """The query ended with an error; what it had committed stays, and the next run goes on behind it."""


class PipelineRuns(KvspoolError):
    """Another process works on the same sink."""

    exit_code = 6
