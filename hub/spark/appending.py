"""A task of a sink: gather its rows by shard, then append each shard's part once, as a producer's batch.

**Once.** A shard stores each producer's last batch, and how many of its records it has; see `kvspool.producers`. So a repeated task,
after a failure, on another executor, or twice at the same time, appends only missing records. That requires the same rows in the
repeated task; their order may differ.

**Choice of the shard.** Column `partition`; else the hash of the key; without a key that of the value. The shard depends only on the row,
not on the order; otherwise a repeated row might go to another shard.

**Order.** Rows of a key keep the task's order, unless some were appended before the task was repeated in another order.

**A repeated batch** may have other partitions than before; only the driver knows all of them. A task may find rows of the batch from
other tasks, appended before this attempt began. Then it stages its rows in a file next to the logs. The commit compares the partitions, and
appends the rows, or raises an error; see `sink` and `staged`. Tasks append directly if the driver has no access to the logs.

**Memory.** Rows stay as Arrow batches, up to a limit. More rows go to a temporary file, and are read from it through the page cache. The
file is accessible only to its owner, and unlinked before it is written. Batches with several topics are first sorted by topic, so that the
rows of each topic are a slice, not a copy.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql.datasource import WriterCommitMessage

from hub.spark import staged
from hub.spark.target import LEFT_OUT, OWN_LOGS, SinkTarget, SparkSinkError, ids_of
from hub.spark.workers import freeze_modules
from kvspool.producers import Pieces
from kvspool.system.handles import Handle, close_all
from shard import ShardSet
from shard.producers import grouped, int32s, shards_of

if TYPE_CHECKING:
    import pyarrow

    from kvspool.arrow import Columns

MOST_OPEN = 64  # logs that a task keeps open
STORED = ("value", "key", "type", "timestamp")
PARTITIONS_CHANGED = (
    "The query must make the same partitions when a batch is repeated: give repartition a number, and set "
    "spark.sql.adaptive.streaming.stateless.enabled to false, as session_settings does; changedBatch=append appends the missing records "
    "of each partition, so that no row is lost, and rows that moved between partitions are stored twice"
)


class BatchPart(NamedTuple):
    """A task's part of a batch.

    producer: its name in each shard. began: start of this attempt at the batch, ns since 1970; 0: of a job without batches. keep: hours for
    which a shard keeps the account at least if its table is full; 0: seven days. word: of the batch's offsets, 0: unknown.
    """

    producer: str
    batch: int
    began: int = 0
    keep: int = 0
    word: int = 0

    @property
    def query(self) -> str:
        """Return the beginning of the names of all producers of the query."""
        return self.producer.rpartition("/")[0] + "/"


@dataclass
class Appended(WriterCommitMessage):
    """The result of one task.

    records: rows of the task; repeated: rows that an earlier attempt had appended; part: as which they were appended; shards: the shards of
    its rows, by topic and number, each with the other producers of the query that had appended rows of this batch. host, logs: where it
    ran, and the ids of the logs of each topic there. staged: the file with its rows if they are not appended yet; see `staged`.
    """

    records: int
    repeated: int
    part: BatchPart
    shards: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    host: str = ""
    logs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    staged: str = ""


def append(target: SinkTarget, batches: Iterable[pyarrow.RecordBatch], part: BatchPart) -> Appended:
    """Append the rows of a task, each once, as a producer's batch in each shard; or stage them, see the module.

    Raises SparkSinkError for a row that can't be written, and for a part of a batch that is stored with other rows; nothing is appended
    then. Raises the errors of appending: rows appended by then are in the accounts.
    """
    gathered = _Gathered(target)
    try:
        with _Kept(target.memory) as kept:
            for rows in kept.through(_arranged(target, one) for one in batches):
                gathered.add(rows)
            done = Appended(gathered.records, 0, part, host=socket.gethostname())
            is_missing = gathered.check(part, done)
            is_repeated = any(others for shards in done.shards.values() for others in shards.values())
            if is_repeated and is_missing and not target.takes_changed and target.is_at_driver():
                done.staged = staged.write(target, part.query, gathered.batches)
            else:
                gathered.append(part, done)
            gathered.close()  # its slices of the file are released before the file
        freeze_modules()
        return done
    finally:
        gathered.close()


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


class _Gathered(Handle):
    """The rows of a task, by topic and shard. At most `MOST_OPEN` logs stay open, however many topics there are."""

    def __init__(self, target: SinkTarget) -> None:
        self._target = target
        self._topics: dict[str, _Topic] = {}
        self._open = 0
        self.records = 0
        self.batches: list[pyarrow.RecordBatch] = []

    def add(self, rows: pyarrow.RecordBatch) -> None:
        """Add rows, without a copy. Raises SparkSinkError, ValueError for values that can't be stored."""
        self.records += rows.num_rows
        self.batches.append(rows)
        for topic, part in _by_topic(self._target, rows):
            if topic not in self._topics:
                found = self._topics[topic] = _Topic(self._target, topic)
                self._open += found.count
                if self._open > MOST_OPEN:
                    self._open -= found.count
                    found.close()
            self._topics[topic].add(part)

    def check(self, part: BatchPart, done: Appended) -> bool:
        """Compare all shards' accounts with the rows, and note in `done` what earlier attempts have appended. Return whether any row is
        missing. Raises SparkSinkError if a shard has another part, or a later batch.
        """
        is_missing = False
        for topic, gathered in self._topics.items():
            with gathered.opened() as shards:
                done.logs[topic] = ids_of(shards.shards)
                if part.began:
                    is_missing |= gathered.check(shards, part)
                done.shards[topic] = gathered.others(shards, part)
        return is_missing

    def append(self, part: BatchPart, done: Appended) -> None:
        """Append the missing rows."""
        for gathered in self._topics.values():
            with gathered.opened() as shards:
                done.repeated += gathered.append(shards, part)

    def close(self) -> None:
        """Close the shards, and release the rows."""
        topics, self._topics, self.batches = self._topics, {}, []
        close_all(topics.values())


class _Topic(Handle):
    """The rows of one topic, gathered by shard."""

    def __init__(self, target: SinkTarget, topic: str) -> None:
        self._target, self._topic = target, topic
        self._shards: ShardSet | None = target.open(topic)
        self._lay_out = self._shards.shards[0].columns_of
        self.count = len(self._shards.shards)
        self._prefix = self._shards.prefix
        self._pieces: dict[int, Pieces] = {}

    @contextmanager
    def opened(self) -> Iterator[ShardSet]:
        """Return the shards, open in the `with` block."""
        if self._shards is not None:
            yield self._shards
            return
        with self._target.open(self._topic) as shards:
            yield shards

    def add(self, rows: pyarrow.RecordBatch) -> None:
        """Add rows, without a copy. Raises SparkSinkError, ValueError for values that can't be stored."""
        stored = rows.select([name for name in STORED if name in rows.schema.names])
        columns = self._lay_out(stored, self._target.codec)
        for shard, numbers in grouped(_shards_of(rows, columns, self.count, self._prefix), self.count).items():
            self._pieces.setdefault(shard, []).append((columns, numbers))

    def check(self, shards: ShardSet, part: BatchPart) -> bool:
        """Compare the accounts of all shards with the rows; see `_Gathered.check`."""
        is_missing = False
        for shard, log in enumerate(shards.shards):
            known = log.producer(part.producer).begun()
            count = _count(self._pieces.get(shard, ()))
            if known is not None and known.batch > part.batch:
                raise self._later(shard, part)
            if known is None or known.batch < part.batch:
                is_missing |= count > 0
                continue
            if part.word and known.word not in (0, part.word):
                raise SparkSinkError(
                    f"[KVSPOOL_CHECKPOINT_RESTORED] {self._where(shard)}: {known.stored} records of batch {part.batch} of {part.producer} "
                    "are stored, and the checkpoint repeats it with other offsets: it is an older one; nothing was written. Restore the "
                    "checkpoint that belongs to the log. With a new one the query appends all rows again"
                )
            if known.is_done and known.rows != count and not self._target.takes_changed:
                raise self._changed(known.rows, count, shard, part)
            is_missing |= not known.is_done
        return is_missing

    def others(self, shards: ShardSet, part: BatchPart) -> dict[int, list[str]]:
        """Return by shard the other producers of the query that had appended to the batch before this attempt. A shard without rows is left
        out if there are none.
        """
        found = {}
        for shard, log in enumerate(shards.shards):
            others = log.producer(part.producer).others(part.query, part.batch, part.began) if part.began else []
            if others or shard in self._pieces:
                found[shard] = others
        return found

    def append(self, shards: ShardSet, part: BatchPart) -> int:
        """Append the rows; return how many records of complete parts were already stored."""
        target, repeated = self._target, 0
        for shard, pieces in sorted(self._pieces.items()):
            producer = shards.shards[shard].producer(part.producer)
            producer.keep = part.keep
            done = producer.append_pieces(
                pieces,
                batch=part.batch,
                codec=target.codec,
                durable=target.is_durable,
                changed="append" if target.takes_changed else "raise",
                word=part.word,
            )
            if done.repeated:  # also if another copy of the task was faster
                if not done.records:
                    raise self._later(shard, part)
                if done.records != _count(pieces) and not target.takes_changed:
                    raise self._changed(done.records, _count(pieces), shard, part)
                repeated += done.records
        return repeated

    def _where(self, shard: int) -> str:
        return f"partition {shard} of {self._prefix or self._target.path}"

    def _later(self, shard: int, part: BatchPart) -> SparkSinkError:
        return SparkSinkError(
            f"[KVSPOOL_BATCH_CHANGED] {self._where(shard)}: {part.producer} has appended a later batch than {part.batch}, so it is unknown "
            "which records of this one are stored; nothing was written for it. If the checkpoint is an older copy, use a new one: it reads "
            "all again"
        )

    def _changed(self, stored: int, count: int, shard: int, part: BatchPart) -> SparkSinkError:
        return SparkSinkError(
            f"[KVSPOOL_BATCH_CHANGED] {self._where(shard)}: {stored} records of batch {part.batch} of {part.producer} are stored, and now "
            f"it has {count}; nothing was written for it. {PARTITIONS_CHANGED}"
        )

    def close(self) -> None:
        """Close the shards."""
        shards, self._shards = self._shards, None
        if shards is not None:
            shards.close()


def _count(pieces: Iterable[tuple[Columns, memoryview | None]]) -> int:
    return sum(columns.rows if numbers is None else len(numbers) for columns, numbers in pieces)


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
