"""Batch writing: every task appends its rows, from its own process, to the same shards at once, each row once.

**Once.** A job has an id, created on the driver, and each of its tasks is a producer of that name; see `appending`. So a task that Spark
repeats, or runs twice at once, appends no stored record again.

**No transaction.** A task's records are visible when the task ends, not only when the job does. The records of a failed job stay. If you
run it again manually, it is another job, and appends all records again.

**After the job** its accounts stay until other producers need the space. A copy of a task that Spark abandoned may still run on some host,
and must find its rows stored. The logs are notified that the job is over, so that a full producer table drops its oldest accounts. If they
can't be notified, because the driver was killed or its host doesn't have them, a job's accounts are all kept for a day.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from hub.spark.appending import Appended, BatchPart, append, check_hosts
from hub.spark.target import SinkTarget
from kvspool import KvspoolError

if TYPE_CHECKING:
    import pyarrow

KEPT = 24  # hours for which the accounts of a job that may not be over are kept at least
_logger = logging.getLogger("kvspool")


class ShardWriter(DataSourceArrowWriter):
    """Appends rows to a target; see the module."""

    def __init__(self, target: SinkTarget) -> None:
        """Runs on the driver, once for a job, and is pickled for its tasks."""
        self.target = target
        self.job = uuid.uuid4().hex

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Appended:
        """Append the rows of one task."""
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        return append(self.target, iterator, BatchPart(f"job:{self.job}/{task}", 0, keep=KEPT))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Note in the logs that the job is over. Raises SparkSinkError if its rows are in the logs of several hosts."""
        self._retire(messages)
        check_hosts(self.target, (message for message in messages if isinstance(message, Appended)))

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Note in the logs that the job is over; records of its tasks stay."""
        self._retire(messages)

    def _retire(self, messages: list[WriterCommitMessage | None]) -> None:
        """Let the logs of this host drop the accounts of this job when they need the space."""
        existing = replace(self.target, bits=None)  # nothing is created here
        of_all = self.target.path.name if self.target.is_log else self.target.topic
        topics = {topic for message in messages if isinstance(message, Appended) for topic in message.shards}
        for topic in sorted(topics if of_all is None else {of_all}):
            try:
                with existing.open(topic) as opened:
                    for log in opened.shards:
                        log.retire_producers(f"job:{self.job}/")
            except (KvspoolError, OSError) as error:
                _logger.info("topic %s can't store that a job is over, and keeps its accounts for a day: %s", topic, error)
