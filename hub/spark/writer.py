"""Batch writing: every task appends its rows, from its own process, to the same shards at once, each row once.

**Once.** A job has an id, made on the driver, and each of its tasks is a producer of that name; see `appending`. So a task that Spark runs
again, or twice at once, adds nothing that is there.

**No transaction.** What a task has appended is there when the task ends, not only when the job does. A job that fails leaves what its
tasks have appended; run again by hand, it is another job, and appends all of it once more.
"""

from __future__ import annotations

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
        return append(self.target, iterator, f"{self.job}/{task}", 0)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Let the logs forget the tasks: the job is done, and no task of it comes again."""
        self._forget(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Let the logs forget the tasks that ended; what they have appended stays."""
        self._forget(messages)

    def _forget(self, messages: list[WriterCommitMessage | None]) -> None:
        """Free the accounts, where this host has the logs; elsewhere they are free after some days."""
        names: dict[str, dict[int, list[str]]] = {}
        for message in messages:
            if isinstance(message, Appended):
                for topic, shards in message.shards.items():
                    for shard in shards:
                        names.setdefault(topic, {}).setdefault(shard, []).append(message.producer)
        for topic, by_shard in names.items():
            with suppress(KvspoolError, OSError), self.target.open(topic) as opened:
                for shard, producers in by_shard.items():
                    opened.shards[shard].forget_producers(producers)
