"""Streaming: every micro-batch is appended once, whatever is killed and restarted.

**Once.** Each task is a producer named after the query and the partition, and its batch is the micro-batch; see `appending`. A shard
remembers the last one. So nothing that is there is appended by a task that is run again, or by a batch that is replayed: since the driver
was killed between writing and committing, or the commit failed. The query's id lies in its checkpoint; with another checkpoint it is
another query.

**What it needs.** The same rows in a partition of a replayed batch. Sources that can be replayed and Spark's own operators give that;
`current_timestamp()` is the batch's and comes again too, `uuid()` doesn't. A shard that has a part of a batch and finds other rows says so;
see option `changedBatch`.

**When it is there.** Records of a batch are in the log, for every reader, when their task ends, before the batch is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from hub.spark.appending import PARTITIONS_CHANGED, Appended, append
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
            raise SparkSinkError(
                "[KVSPOOL_NO_QUERY] this task is of no streaming query: Spark doesn't say which query and batch it belongs to"
            )
        return append(self.target, iterator, f"{query}/{context.partitionId()}", int(batch), began=self.began)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Report the batch; its records are in the log already. Raises SinkError if they lie there in other partitions than those of the
        query now: then some of them may be there twice."""
        tasks = [message for message in messages if isinstance(message, Appended)]
        strangers = _strangers(tasks)
        if strangers:
            words = (
                f"[KVSPOOL_BATCH_CHANGED] batch {batchId} has {len(messages)} partitions, and was appended before with others, as "
                f"{', '.join(strangers[:3])}: some of its records may be there twice. {PARTITIONS_CHANGED}"
            )
            if not self.target.takes_changed:
                raise SparkSinkError(words)
            _logger.warning(words)
        records, repeated = sum(task.records for task in tasks), sum(task.repeated for task in tasks)
        again = f", {repeated} of which were there already" if repeated else ""
        _logger.info("batch %d: %d records in %d tasks%s", batchId, records, len(tasks), again)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Report that the batch failed. What was appended stays, and is not appended again when the batch is replayed."""
        _logger.warning("batch %d failed; what its tasks have appended is accounted for, and the batch comes again", batchId)


def _strangers(tasks: list[Appended]) -> list[str]:
    """Return the producers that have a part of a batch in some shard, and are none of the tasks that had one for it now."""
    parts: set[tuple[str, int, str]] = set()
    seen: set[tuple[str, int, str]] = set()
    for task in tasks:
        for topic, shards in task.shards.items():
            for shard, others in shards.items():
                parts.add((topic, shard, task.producer))
                seen.update((topic, shard, other) for other in others)
    return sorted({name for _, _, name in seen - parts})
