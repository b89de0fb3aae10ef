"""Batch writing: every task appends its rows, from its own process, to the same shards at once, each row once.

**Once.** A job has an id, made on the driver, and each of its tasks is a producer of that name; see `appending`. So a task that Spark runs
again, or twice at once, adds nothing that is there.

**No transaction.** What a task has appended is there when the task ends, not only when the job does. A job that fails leaves what its
tasks have appended; run again by hand, it is another job, and appends all of it once more.

**After the job** its accounts stay, until others need the room: a copy of a task that Spark gave up may still be at work on some host, and
must find that its rows are there. The logs are told that the job is over, so that a list of producers that is full takes the oldest ones of
those. Where they can't be told, since the driver was killed, or its host doesn't have them, whole accounts of a job are kept for a day.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from hub.spark.appending import Appended, append
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
        return append(self.target, iterator, f"job:{self.job}/{task}", 0, keep=KEPT)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Tell the logs that the job is over."""
        self._retire(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Tell the logs that the job is over; what its tasks have appended stays."""
        self._retire(messages)

    def _retire(self, messages: list[WriterCommitMessage | None]) -> None:
        """Let the logs give the accounts of this job away when they need them, where this host has the logs."""
        existing = replace(self.target, bits=None)  # nothing is made here
        of_all = self.target.path.name if self.target.is_log else self.target.topic
        told = {topic for message in messages if isinstance(message, Appended) for topic in message.shards}
        for topic in sorted(told if of_all is None else {of_all}):
            try:
                with existing.open(topic) as opened:
                    for log in opened.shards:
                        log.retire_producers(f"job:{self.job}/")
            except (KvspoolError, OSError) as error:
                _logger.info("topic %s can't be told that a job is over, and keeps its accounts for a day: %s", topic, error)
