"""The errors of a pipeline. Messages begin with a stable code, because Spark loses the classes of exceptions."""

from __future__ import annotations

from kvspool.errors import KvspoolError


class JobError(KvspoolError, ValueError):
    """A job file is invalid: the message names the file, the table and the key. Nothing was started."""

    exit_code = 2


class SchemaError(KvspoolError, ValueError):
    """A schema can't be read, or can't be inferred. Nothing was started."""

    exit_code = 2


class SinkError(KvspoolError):
    """The sink holds something else than the pipeline left there, or can't take its rows. Nothing was written."""

    exit_code = 3


class BadRecords(KvspoolError):
    """A record can't be decoded, and the job says to fail then. The batch was not written."""

    exit_code = 5


class PipelineFailed(KvspoolError):
    """The query ended with an error; committed batches stay, and the next run continues after them."""


class PipelineRuns(KvspoolError):
    """Another process of this host runs the same job."""

    exit_code = 6
