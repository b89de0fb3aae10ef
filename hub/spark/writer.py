"""Batch writing: every task appends its rows, from its own process, to the same shards at once, each row once.

**Once.** A job has an id, made on the driver, and each of its tasks is a producer of that name; see `appending`. So a task that Spark runs
again, or twice at once, adds nothing that is there.

**No transaction.** What a task has appended is there when the task ends, not only when the job does. A job that fails leaves what its
tasks have appended; run again by hand, it is another job, and appends all of it once more.

**After the job** its accounts stay for an hour at least: a copy of a task that Spark gave up may still be at work on some host.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from hub.spark.appending import Appended, append
from hub.spark.target import Target
from kvspool import KvspoolError

if TYPE_CHECKING:
    import pyarrow

LONGEST_TASK = 3600 * 10**9  # ns for which the accounts of a job are kept at least
JOB = re.compile("job:[0-9a-f]{32}/[0-9]+")


class ShardWriter(DataSourceArrowWriter):
    """Appends rows to a target; see the module."""

    def __init__(self, target: Target) -> None:
        """Runs on the driver, once for a job, and is pickled for its tasks."""
        self.target = target
        self.job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Appended:
        """Append the rows of one task."""
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        return append(self.target, iterator, f"job:{self.job}/{task}", 0)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Let the logs forget earlier jobs. Not this one: a copy of a task that Spark gave up may still be at work somewhere, and must find
        that its rows are there."""
        self._forget_others(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Let the logs forget earlier jobs; what the tasks have appended stays."""
        self._forget_others(messages)

    def _forget_others(self, messages: list[WriterCommitMessage | None]) -> None:
        """Free the accounts of jobs that are long over, where this host has the logs; elsewhere they are free after some days."""
        over = time.time_ns() - LONGEST_TASK
        for topic in {topic for message in messages if isinstance(message, Appended) for topic in message.shards}:
            with suppress(KvspoolError, OSError), self.target.open(topic) as opened:
                for log in opened.shards:
                    names = [one.name for one in log.producers() if one.updated < over and JOB.fullmatch(one.name)]
                    if names:
                        log.forget_producers(names)
