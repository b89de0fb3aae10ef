"""A task of a sink: gather its rows by shard, then append each shard's part once, as a producer's batch.

**Once.** A shard stores each producer's last batch, and how many of its records it has; see `kvspool.producers`. So a repeated task,
after a failure, on another executor, or twice at the same time, appends only missing records. That requires the same rows in the
repeated task; their order may differ.

**Choice of the shard.** Column `partition`; else the hash of the key; without a key that of the value. The shard depends only on the row,
not on the order; otherwise a repeated row might go to another shard.

**Order.** Rows of a key keep the task's order, unless some were appended before the task was repeated in another order.

**Memory.** Rows stay as Arrow batches, up to a limit. More rows go to a temporary file, and are read from it through the page cache. The
file is accessible only to its owner, and unlinked before it is written. Batches with several topics are first sorted by topic, so that the
rows of each topic are a slice, not a copy.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import WriterCommitMessage

from hub.spark.target import LEFT_OUT, OWN_LOGS, SinkTarget, SparkSinkError, ids_of
from hub.spark.workers import freeze_modules
from kvspool.producers import Pieces
from kvspool.system.handles import Handle, close_all
from shard import ShardSet
from shard.merged import Log
from shard.producers import grouped, int32s, laid_out, shards_of

if TYPE_CHECKING:
    import pyarrow

    from kvspool.arrow import Columns

STORED = ("value", "key", "type", "timestamp")
PARTITIONS_CHANGED = (
    "The query must make the same partitions when a batch is repeated: give repartition a number, and set "
    "spark.sql.adaptive.streaming.stateless.enabled to false, as session_settings does; changedBatch=append appends the missing records "
    "of each partition, so that no row is lost, and rows that moved between partitions are stored twice"
)


@dataclass
class Appended(WriterCommitMessage):
    """The result of one task.

    records: rows of the task; repeated: rows that an earlier attempt had appended; producer: its name; shards: the shards of its rows, by
    topic and number, each with the other producers of the query that had appended rows of this batch. host, logs: where it ran, and the ids
    of the logs of each topic there.
    """

    records: int
    repeated: int
    producer: str
    shards: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    host: str = ""
    logs: dict[str, tuple[str, ...]] = field(default_factory=dict)


def append(
    target: SinkTarget, batches: Iterator[pyarrow.RecordBatch], producer: str, batch: int, *, began: int = 0, keep: int = 0
) -> Appended:
    """Append the rows of a task, each once, as `batch` of `producer` in each shard; see the module.

    began: start of this attempt at the batch, ns since 1970. keep: hours for which a shard keeps the account at least if its table is full;
    0: seven days.

    Raises SparkSinkError for a row that can't be written, and the errors of appending: rows appended by then are in the accounts.
    """
    topics: dict[str, _Topic] = {}
    records = 0
    try:
        with _Kept(target.memory) as kept:
            for rows in kept.through(_arranged(target, one) for one in batches):
                records += rows.num_rows
                for topic, part in _by_topic(target, rows):
                    if topic not in topics:
                        topics[topic] = _Topic(target, topic)
                    topics[topic].add(part)
            done = Appended(records, 0, producer, host=socket.gethostname())
            for topic, gathered in topics.items():
                done.logs[topic] = ids_of(gathered.shards.shards)
                repeated, done.shards[topic] = gathered.append(producer, batch, began, keep)
                done.repeated += repeated
            topics.clear()  # its slices of the file are released before the file
        freeze_modules()
        return done
    finally:
        close_all(gathered.shards for gathered in topics.values())


def check_hosts(target: SinkTarget, tasks: Iterable[Appended]) -> None:
    """Raise SparkSinkError if tasks on different hosts have appended to different logs of one topic, unless the target permits that."""
    first: dict[str, Appended] = {}
    for task in tasks:
        for topic, found in task.logs.items():
            other = first.setdefault(topic, task)
            if found and other.logs[topic] and found != other.logs[topic] and not target.has_own_logs:
                raise SparkSinkError(f"[KVSPOOL_OTHER_LOGS] topic {topic!r} has other logs on {other.host} than on {task.host}. {OWN_LOGS}")


class _Kept(Handle):
    """Batches that are kept until the task has all of them: in memory, or, after a limit, in a file without a name."""

    def __init__(self, memory: int) -> None:
        self._left = memory
        self._fd = -1

    def through(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Yield all batches, in order, in a form that can be kept."""
        import pyarrow

        for batch in batches:
            self._left -= batch.nbytes
            if self._left >= 0:
                yield batch
                continue
            yield from self._spilled(pyarrow, batch, batches)
            return

    def _spilled(self, pyarrow: Any, first: pyarrow.RecordBatch, rest: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        self._fd, name = tempfile.mkstemp(prefix="kvspool-sink-", suffix=".arrow")  # accessible only to its owner
        os.unlink(name)
        path = f"/proc/self/fd/{self._fd}"
        with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_file(sink, first.schema) as writer:
            writer.write_batch(first)
            for batch in rest:
                writer.write_batch(batch)
        with pyarrow.memory_map(path) as source:
            reader = pyarrow.ipc.open_file(source)
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)

    def __enter__(self) -> _Kept:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _arranged(target: SinkTarget, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return the rows of a batch with columns in lower case, without ignored columns, and sorted by topic if they name it."""
    import pyarrow.compute as pc

    names = [name.lower() for name in rows.schema.names]
    left_out = LEFT_OUT if target.topic is None else (*LEFT_OUT, "topic")
    rows = rows.rename_columns(names).drop_columns([name for name in names if name in left_out])
    if "topic" not in rows.schema.names:
        return rows
    topics = rows.column("topic").dictionary_encode(null_encoding="encode")
    return rows if len(topics.dictionary) < 2 else rows.take(pc.array_sort_indices(topics.indices))


def _by_topic(target: SinkTarget, rows: pyarrow.RecordBatch) -> Iterator[tuple[str, pyarrow.RecordBatch]]:
    """Yield topics, each with its slice of sorted rows."""
    import pyarrow.compute as pc

    if not rows.num_rows:
        return
    if "topic" not in rows.schema.names:
        yield target.path.name if target.topic is None else target.topic, rows
        return
    runs = pc.run_end_encode(rows.column("topic"))
    rows = rows.drop_columns(["topic"])
    start = 0
    for topic, end in zip(runs.values.to_pylist(), runs.run_ends.to_pylist(), strict=True):
        yield target.check_topic(topic), rows.slice(start, end - start)
        start = end


class _Topic:
    """The rows of one topic, gathered by shard."""

    def __init__(self, target: SinkTarget, topic: str) -> None:
        self._target = target
        self.shards: ShardSet = target.open(topic)
        self.pieces: dict[int, Pieces] = {}

    def add(self, rows: pyarrow.RecordBatch) -> None:
        """Add rows, without a copy. Raises SparkSinkError, ValueError for values that can't be stored."""
        stored = rows.select([name for name in STORED if name in rows.schema.names])
        columns = laid_out(self.shards, stored, self._target.codec)
        count = len(self.shards.shards)
        for shard, numbers in grouped(_shards_of(rows, columns, count, self.shards.prefix), count).items():
            self.pieces.setdefault(shard, []).append((columns, numbers))

    def append(self, name: str, batch: int, began: int, keep: int) -> tuple[int, dict[int, list[str]]]:
        """Append the gathered rows, and close the shards.

        Return how many records of complete parts were already stored. Also return, by shard, the other producers that had appended to the
        batch before this attempt. Raises SparkSinkError for a stored part with another number of rows.
        """
        repeated = 0
        others = {}
        target = self._target
        try:
            for shard, pieces in sorted(self.pieces.items()):
                log = self.shards.shards[shard]
                producer = log.producer(name)
                producer.keep = keep
                done = producer.append_pieces(
                    pieces,
                    batch=batch,
                    codec=target.codec,
                    durable=target.is_durable,
                    changed="append" if target.takes_changed else "raise",
                )
                if done.repeated:
                    self._check_count(done.records, pieces, shard, name, batch)
                    repeated += done.records
                others[shard] = _others(log, name, batch, began)
        finally:
            self.pieces.clear()
            self.shards.close()
        return repeated, others

    def _check_count(self, stored: int, pieces: Pieces, shard: int, producer: str, batch: int) -> None:
        """Raise SparkSinkError if a stored part has another number of rows than now, or belongs to a batch before the last one.

        The account of such an earlier batch no longer exists.
        """
        count = sum(columns.rows if numbers is None else len(numbers) for columns, numbers in pieces)
        if stored == count or (stored and self._target.takes_changed):
            return
        where = f"partition {shard} of {self.shards.prefix or self._target.path}"
        if not stored:
            raise SparkSinkError(
                f"[KVSPOOL_BATCH_CHANGED] {where}: {producer} has appended a later batch than {batch}, so it is unknown which records "
                "of this one are stored; nothing was written for it. If the checkpoint is an older copy, use a new one: it reads all again"
            )
        raise SparkSinkError(
            f"[KVSPOOL_BATCH_CHANGED] {where}: {stored} records of batch {batch} of {producer} are stored, and now it has {count}; "
            f"nothing was written for it. {PARTITIONS_CHANGED}"
        )


def _others(log: Log, producer: str, batch: int, before: int) -> list[str]:
    """Return the other producers of the query that had appended to a batch in a shard before a time, ns since 1970."""
    query = producer.rpartition("/")[0] + "/"
    return [
        one.name
        for one in (log.producers() if before else ())
        if one.batch == batch and one.updated < before and one.name != producer and one.name.startswith(query)
    ]


def _shards_of(rows: pyarrow.RecordBatch, columns: Columns, count: int, topic: str) -> memoryview:
    """Return the shard of each row, int32; see the module."""
    shards = shards_of(columns, rows, count)
    if "partition" not in rows.schema.names:
        return shards
    import pyarrow
    import pyarrow.compute as pc

    given = rows.column("partition").cast(pyarrow.int32())
    bounds = pc.min_max(given).as_py()
    if bounds["min"] is not None and not 0 <= bounds["min"] <= bounds["max"] < count:
        wrong = bounds["min"] if bounds["min"] < 0 else bounds["max"]
        raise SparkSinkError(
            f"[KVSPOOL_UNKNOWN_PARTITION] column partition is {wrong} in a row; topic {topic!r} has the partitions 0 to {count - 1}"
        )
    return int32s(pc.coalesce(given, pyarrow.array(shards, pyarrow.int32())))
