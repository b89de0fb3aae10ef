"""The streaming sink: every micro-batch is appended once, across crashes and restarts.

**Once.** Each task is a producer named after the query and the partition, and its batch is the micro-batch; see `appending`. A shard stores
the last batch of each. So neither a repeated task nor a replayed batch appends stored records again. A batch is replayed if the driver
was killed between writing and committing, or the commit failed. The query's id is in its checkpoint; with another checkpoint it is
another query.

**Requirement.** A replayed batch needs the same rows in each partition. Replayable sources and Spark's own operators ensure that;
`current_timestamp()` is the batch's and is repeated too, `uuid()` is not. A shard that has stored other rows of a batch raises an
error; see option `changedBatch`.

**Visibility.** Records of a batch are in the log, for every reader, when their task ends, before the batch is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from hub.spark import staged
from hub.spark.appending import PARTITIONS_CHANGED, Appended, BatchPart, append, check_hosts
from hub.spark.checkpoints import word_of
from hub.spark.target import SinkTarget, SparkSinkError

if TYPE_CHECKING:
    import pyarrow

_logger = logging.getLogger("kvspool")


class ShardSink(DataSourceStreamArrowWriter):
    """Appends the rows of micro-batches to a target; see the module. Spark makes one for each batch, and another one for its commit."""

    def __init__(self, target: SinkTarget) -> None:
        self.target = target
        self.began = time.time_ns()

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> Appended:
        """Append the rows of one task."""
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty("sql.streaming.queryId")
        batch = None if context is None else context.getLocalProperty("streaming.sql.batchId")
        if context is None or not query or batch is None:
            raise SparkSinkError("[KVSPOOL_NO_QUERY] this task belongs to no streaming query: Spark names neither query nor batch")
        word = word_of(self.target.checkpoint, int(batch))
        return append(self.target, iterator, BatchPart(f"{query}/{context.partitionId()}", int(batch), self.began, word=word))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Append the staged rows of a repeated batch. All others are already stored.

        Raises SparkSinkError if the batch was partly stored with other partitions than the query has now; then no row of this attempt is
        appended, unless the driver has no access to the logs. Also raises it for logs of several hosts: some rows may be stored twice.
        """
        tasks = [message for message in messages if isinstance(message, Appended)]
        check_hosts(self.target, tasks)
        strangers = _strangers(tasks)
        if strangers:
            is_staged = self.target.is_at_driver() and not self.target.takes_changed
            doubt = "nothing more was written" if is_staged else "some of its records may be stored twice"
            words = (
                f"[KVSPOOL_BATCH_CHANGED] batch {batchId} has {len(messages)} partitions, and was appended before by others, such as "
                f"{', '.join(strangers[:3])}: {doubt}. {PARTITIONS_CHANGED}"
            )
            if not self.target.takes_changed:
                staged.remove(task.staged for task in tasks if task.staged)
                raise SparkSinkError(words)
            _logger.warning(words)
        for task in tasks:
            if task.staged:
                task.repeated = append(self.target, staged.read(task.staged), task.part._replace(began=0)).repeated
        for query in {task.part.query for task in tasks}:
            staged.sweep(self.target, query)
        records, repeated = sum(task.records for task in tasks), sum(task.repeated for task in tasks)
        again = f", {repeated} of which were stored before" if repeated else ""
        _logger.info("batch %d: %d records in %d tasks%s", batchId, records, len(tasks), again)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Log that the batch failed. Appended records stay, and are not appended again when the batch is replayed."""
        staged.remove(message.staged for message in messages if isinstance(message, Appended) and message.staged)
        _logger.warning("batch %d failed; its appended records are accounted for, and the batch will be replayed", batchId)


def _strangers(tasks: list[Appended]) -> list[str]:
    """Return the producers that have appended rows of a batch to some shard, other than the present tasks for it."""
    parts: set[tuple[str, int, str]] = set()
    seen: set[tuple[str, int, str]] = set()
    for task in tasks:
        for topic, shards in task.shards.items():
            for shard, others in shards.items():
                parts.add((topic, shard, task.part.producer))
                seen.update((topic, shard, other) for other in others)
    return sorted({name for _, _, name in seen - parts})
