"""What a task of a sink does: gather its rows by shard, then append each shard's part once, as a producer's batch.

**Once.** A shard remembers which batch of which producer it has, and how much of it; see `kvspool.producers`. So a task that is run again,
after it failed half-way, on another executor, or twice at the same time, appends only what isn't there. That needs the same rows in the
task each time; their order may be another one.

**Which shard.** Column `partition`; else the hash of the key; without a key that of the value. All of these depend on the row alone,
not on the order, or a row might go to another shard when it comes again.

**Order.** Rows of a key are in the order of the task, unless a part of them was appended before it was run again in another order.

**Memory.** Rows stay as Arrow batches, up to a limit; more go to a temporary file that nobody else can read, and that has no name any more
when it is written to. They are read from there through the page cache. A batch with rows of several topics is sorted by them before, so
that the rows of each are a slice of it, not a copy.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import WriterCommitMessage

from hub.spark.target import LEFT_OUT, SinkTarget, SparkSinkError
from hub.spark.workers import settle
from kvspool.handles import Handle, close_all
from kvspool.producers import Pieces
from shard import ShardSet
from shard.producers import grouped, int32s, laid_out, shards_of
from shard.shardset import Log

if TYPE_CHECKING:
    import pyarrow

    from kvspool.arrow import Columns

STORED = ("value", "key", "type", "timestamp")
PARTITIONS_CHANGED = (
    "The query must make the same partitions when a batch comes again: give repartition a number, and set "
    "spark.sql.adaptive.streaming.stateless.enabled to false, as session_settings does; changedBatch=append appends what its partition "
    "doesn't have yet, so that no row is lost, and rows that came from one partition to another are there twice"
)


@dataclass
class Appended(WriterCommitMessage):
    """What one task has appended. records: rows of the task; repeated: those that were there already from an earlier attempt; producer: its
    name; shards: where it has a part, by topic and number, and which other producers of the same query had one
    of this batch before."""

    records: int
    repeated: int
    producer: str
    shards: dict[str, dict[int, list[str]]] = field(default_factory=dict)


def append(
    target: SinkTarget, batches: Iterator[pyarrow.RecordBatch], producer: str, batch: int, *, began: int = 0, keep: int = 0
) -> Appended:
    """Append the rows of a task, each once, as `batch` of `producer` in each shard; see the module. began: when this attempt at the batch
    began, ns since 1970. keep: hours for which a shard remembers it at least, where room is short; 0: seven days.

    Raises SinkError for a row that can't be written, and what appending raises: what is appended by then is accounted for.
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
            done = Appended(records, 0, producer)
            for topic, gathered in topics.items():
                repeated, done.shards[topic] = gathered.append(producer, batch, began, keep)
                done.repeated += repeated
            topics.clear()  # what looks at the file goes before it
        settle()
        return done
    finally:
        close_all(gathered.shards for gathered in topics.values())


class _Kept(Handle):
    """Batches that are kept until the task has all of them: in memory as far as they fit, then in a file without a name."""

    def __init__(self, memory: int) -> None:
        self._left = memory
        self._fd = -1

    def through(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Yield all batches, in order, so that each may be kept as it is."""
        import pyarrow

        for batch in batches:
            self._left -= batch.nbytes
            if self._left >= 0:
                yield batch
                continue
            yield from self._spilled(pyarrow, batch, batches)
            return

    def _spilled(self, pyarrow: Any, first: pyarrow.RecordBatch, rest: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        self._fd, name = tempfile.mkstemp(prefix="kvspool-sink-", suffix=".arrow")  # with rights for its owner alone
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
    """Return the rows of a batch with columns in lower case, without those that are left out, and topic by topic if they name it."""
    import pyarrow.compute as pc

    names = [name.lower() for name in rows.schema.names]
    left_out = LEFT_OUT if target.topic is None else (*LEFT_OUT, "topic")
    rows = rows.rename_columns(names).drop_columns([name for name in names if name in left_out])
    if "topic" not in rows.schema.names:
        return rows
    topics = rows.column("topic").dictionary_encode(null_encoding="encode")
    return rows if len(topics.dictionary) < 2 else rows.take(pc.array_sort_indices(topics.indices))


def _by_topic(target: SinkTarget, rows: pyarrow.RecordBatch) -> Iterator[tuple[str, pyarrow.RecordBatch]]:
    """Yield topics, and the slice of arranged rows that has each."""
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
        """Take in rows, which are kept as they are. Raises SinkError, ValueError for values that can't be stored."""
        stored = rows.select([name for name in STORED if name in rows.schema.names])
        columns = laid_out(self.shards, stored, self._target.codec)
        count = len(self.shards.shards)
        for shard, numbers in grouped(_shards_of(rows, columns, count, self.shards.prefix), count).items():
            self.pieces.setdefault(shard, []).append((columns, numbers))

    def append(self, name: str, batch: int, began: int, keep: int) -> tuple[int, dict[int, list[str]]]:
        """Append what was gathered, and close the shards; return how many records were there already in full, and who else had a part of
        the batch in each shard before this attempt began. Raises SinkError for a part that is there with another number of rows."""
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
        """Raise SinkError if a part that is there in full has not as many rows as it has now, or is of an earlier batch than the last one:
        of that nothing is known any more."""
        count = sum(columns.rows if numbers is None else len(numbers) for columns, numbers in pieces)
        if stored == count or (stored and self._target.takes_changed):
            return
        where = f"partition {shard} of {self.shards.prefix or self._target.path}"
        if not stored:
            raise SparkSinkError(
                f"[KVSPOOL_BATCH_CHANGED] {where}: {producer} has appended a later batch than {batch}, so nobody can say what of this one "
                "is there; nothing was written for it. If the checkpoint is an older copy, take a new one: all of the source comes again"
            )
        raise SparkSinkError(
            f"[KVSPOOL_BATCH_CHANGED] {where}: {stored} records of batch {batch} of {producer} are there, and now it has {count}; "
            f"nothing was written for it. {PARTITIONS_CHANGED}"
        )


def _others(log: Log, producer: str, batch: int, before: int) -> list[str]:
    """Return the other producers of the same query that had a part of a batch in a shard before a time, ns since 1970."""
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
