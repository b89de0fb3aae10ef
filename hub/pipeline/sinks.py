"""The sinks of a pipeline, and how each stores every row once.

- `delta`: a table of `hub.tables`. The executors write its files, the driver commits them. The query's batch is in the same commit, so a
  repeated batch is known, and the second of two concurrent ones is refused.
- `iceberg`: the same with an Iceberg table, which is only added to.
- `parquet`: Spark's own sink of files, whose log only Spark reads.
- `kvspool`: the streaming sink of `format("kvspool")`, which keeps the last batch of a query in the log.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from hub.pipeline.errors import SinkError
from hub.pipeline.job import Compact, Job, seconds
from hub.spark.checkpoints import number_of, word_of
from kvspool import system

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from hub.tables.delta import Table
    from hub.tables.files import DataFile
    from hub.tables.iceberg import IcebergTable
    from hub.tables.place import TablePlace

FACTOR = 8  # between two magnitudes of files that are combined
VACUUM = 3600.0  # seconds between two removals of old versions
ORPHANS = 24  # hours after which files of killed tasks are removed, at least
STAGED = "_staged"  # the folder in a table in which Spark writes; readers and `vacuum` ignore its name


class Sink(Protocol):
    """A destination of batches. `query` is the id of the query, known from its first batch on."""

    def attach(self, frame: DataFrame, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """Make a query write its rows here. before: called with a batch's number before any of it is computed."""


def open_sink(job: Job) -> Sink:
    """Return the job's sink. Raises SinkError, MissingExtra."""
    if job.sink.format == "parquet":
        return ParquetSink(job)
    if job.sink.format == "delta":
        return DeltaSink(job)
    if job.sink.format == "iceberg":
        return IcebergSink(job)
    return KvspoolSink(job)


class Writing(NamedTuple):
    """A task's work: write its rows as files of a table on an object store, and return their descriptions. Picklable."""

    place: TablePlace
    schema: pyarrow.Schema
    partition_by: tuple[str, ...]
    name: str

    def __call__(self, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        """Write the batches of a task of Spark."""
        import pyarrow as pa
        from pyspark import TaskContext

        from hub.tables.files import FileWriter

        task = TaskContext.get()
        assert task is not None
        with FileWriter(self.place, self.schema, self.partition_by, f"{self.name}-{task.partitionId():05}") as writer:
            for batch in batches:
                writer.write(batch)
            files = [msgspec.json.encode(file) for file in writer.close()]
        if files:
            yield pa.RecordBatch.from_pydict({"file": files}, pa.schema([("file", pa.binary())]))


def write_files(frame: DataFrame, place: TablePlace, schema: pyarrow.Schema, by: tuple[str, ...], name: str) -> list[DataFile]:
    """Let the executors write the rows of a frame; return the files of the tasks that succeeded. They are on disk.

    schema: of the table; by: its partition columns; name: the beginning of the files' names, unique to the attempt.
    """
    import pyarrow as pa

    from hub.tables.files import DataFile

    if place.local is not None and not any(pa.types.is_timestamp(schema.field(column).type) for column in by):
        return _written_by_spark(frame, place, schema, by, name)  # it would write times in the session's zone into names of folders
    if by:
        frame = frame.sortWithinPartitions(*(f"`{column}`" for column in by))
    found = frame.mapInArrow(Writing(place, schema, by, name), "file binary").collect()  # type: ignore[arg-type]
    return [msgspec.json.decode(bytes(row[0]), type=DataFile) for row in found]


def _written_by_spark(frame: DataFrame, place: TablePlace, schema: pyarrow.Schema, by: tuple[str, ...], name: str) -> list[DataFile]:
    """Let Spark's writer of Parquet write to a folder of the table, and take the files of its complete job from there."""
    from hub.tables.files import adopt
    from hub.tables.place import make_folders

    assert place.local is not None
    staged = f"{STAGED}/{name}-{system.port.random(4).hex()}"
    make_folders(place.local / staged)
    try:
        writer = frame.write.mode("append")
        (writer.partitionBy(*by) if by else writer).parquet(f"file://{place.local / staged}")
        return adopt(place, staged, by, name, schema)
    finally:
        shutil.rmtree(place.local / staged, ignore_errors=True)


def remove_staged(place: TablePlace, name: str) -> None:
    """Remove the folders of killed drivers whose names have a beginning, and those that are older than `ORPHANS` hours."""
    folder = None if place.local is None else place.local / STAGED
    with suppress(OSError):
        for one in [] if folder is None else folder.iterdir():
            if one.name.startswith(name) or system.port.now() - one.lstat().st_mtime_ns > ORPHANS * 3600 * 10**9:
                shutil.rmtree(one, ignore_errors=True)


class TableSink:
    """A table whose files the executors write, and whose versions the driver commits. Subclasses say which kind of table."""

    def __init__(self, job: Job, place: TablePlace) -> None:
        self._job = job
        self._place = place
        self._cleaned = -math.inf

    def exists(self) -> bool:
        """Return whether there is a table."""
        raise NotImplementedError

    def opened(self) -> Table | IcebergTable:
        """Return the existing table."""
        raise NotImplementedError

    def made(self, schema: pyarrow.Schema, properties: dict[str, str]) -> Table | IcebergTable:
        """Return the table for rows of a schema; create a missing one."""
        raise NotImplementedError

    def clean(self, table: Any) -> None:
        """Combine or remove files after a batch."""
        raise NotImplementedError

    def attach(self, frame: DataFrame, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """See `Sink`. Creates the table, or adds columns to it; raises TableError, SinkError if the rows or the mode don't fit it."""
        from hub.tables.delta import PROPERTY, retention

        job = self._job
        self.check_mode()
        keys = tuple(frame.columns[: len(frame.columns) - len(job.window.aggregates)]) if job.mode == "merge" and job.window else ()
        properties = {PROPERTY: job.mode, **retention(self._hours)}
        if self.exists() and PROPERTY not in self.opened().properties:
            properties = {}  # another program's table, with its own rules
        schema = table_schema(frame)
        table = self.made(schema, properties)

        def write(frame: DataFrame, batch: int) -> None:
            self._write(table, schema, keys, frame, query(), batch, before)

        return frame.writeStream.foreachBatch(write)

    def check_mode(self) -> None:
        """Raise SinkError if the table was written in another mode: rows to be replaced would stay, or rows to be kept would be lost."""
        from hub.tables.delta import PROPERTY

        job = self._job
        if not self.exists():
            return
        table = self.opened()
        mode = table.properties.get(PROPERTY)
        if mode is None and job.mode == "complete" and table.has_rows():
            raise SinkError(
                f"[KVSPOOL_SINK_TAKEN] {self._place.uri} has rows that no pipeline wrote, and each batch of {job.name} would replace them; "
                "name another path"
            )
        if mode not in (None, job.mode):
            raise SinkError(
                f"[KVSPOOL_SINK_OF_ANOTHER_MODE] {self._place.uri} was written with the mode {mode}, and the job has {job.mode} now, by "
                f"its [sink] mode, [window] and [watermark]; set them back, give it another [sink] path, or move the table and the "
                "checkpoint away to start again"
            )

    def _write(
        self, table: Table | IcebergTable, schema: pyarrow.Schema, keys: tuple[str, ...], frame: DataFrame, query: str, batch: int,
        before: Callable[[int], None],
    ) -> None:  # fmt: skip
        from hub.tables.delta import Change
        from hub.tables.errors import Overtaken
        from hub.tables.files import remove_files

        table.refresh()
        remove_staged(self._place, f"part-{query[:8]}-")
        state = BatchState(table, self._job, query, batch)
        if state.is_stored():
            if self._job.window is not None:  # Spark was killed before it committed the batch, and compares its state with this one
                frame.write.format("noop").mode("overwrite").save()
            return
        changes = {name: Change(*change) for name, change in state.changes().items()}
        before(batch)
        files = write_files(frame, self._place, schema, self._job.sink.partition_by, f"part-{query[:8]}-{batch:010}")
        note = {"by": self._job.name, "batch": batch}
        try:
            if keys:
                table.merge(files, keys, changes, note=note)
            else:
                table.commit(files, changes, replace=self._job.mode == "complete", note=note)
        except Overtaken:  # the files stay for `vacuum`: our own commit may have them
            if BatchState(table, self._job, query, batch).is_stored():  # another driver has stored the same batch meanwhile
                return
            raise
        if keys:  # the table has the rows in files of its own
            remove_files(self._place, files)
        self.clean(table)

    def _is_due(self) -> bool:
        """Return whether old versions are to be removed: now and then."""
        if system.port.monotonic() - self._cleaned < VACUUM:
            return False
        self._cleaned = system.port.monotonic()
        return True

    @property
    def _hours(self) -> int:
        return math.ceil(seconds(self._job.sink.keep) / 3600)


class DeltaSink(TableSink):
    """A Delta table."""

    def __init__(self, job: Job) -> None:
        """Check that the package is there. Raises MissingExtra, TableError for an option with a secret."""
        from hub.tables.place import TablePlace, delta

        delta()
        super().__init__(job, TablePlace.of(job.sink.path, job.sink.options))
        self._has_all_vacuumed = False

    def exists(self) -> bool:
        """See `TableSink`."""
        from hub.tables.delta import exists

        return exists(self._place)

    def opened(self) -> Table:
        """See `TableSink`."""
        from hub.tables.delta import Table

        return Table(self._place)

    def made(self, schema: pyarrow.Schema, properties: dict[str, str]) -> Table:
        """See `TableSink`."""
        from hub.tables.delta import Table

        sink = self._job.sink
        return Table.make(self._place, schema, partition_by=sink.partition_by, evolve=sink.evolve, properties=properties)

    def clean(self, table: Any) -> None:
        """Combine small files; remove those of old versions now and then, and once those of killed tasks."""
        if self._job.compact is not None:
            compact(table, self._job.compact)
        if self._is_due():
            table.vacuum(self._hours)
            if not self._has_all_vacuumed:
                self._has_all_vacuumed = True
                table.vacuum(max(ORPHANS, self._hours), everything=True)


class IcebergSink(TableSink):
    """An Iceberg table, which is only added to."""

    def __init__(self, job: Job) -> None:
        """Check that the package is there. Raises MissingExtra."""
        from hub.tables.place import TablePlace, iceberg

        self._kind = iceberg().IcebergTable
        super().__init__(job, TablePlace.of(job.sink.path))

    def exists(self) -> bool:
        """See `TableSink`."""
        return bool(self._kind.exists(self._place))

    def opened(self) -> IcebergTable:
        """See `TableSink`."""
        table: IcebergTable = self._kind(self._place)
        return table

    def made(self, schema: pyarrow.Schema, properties: dict[str, str]) -> IcebergTable:
        """See `TableSink`."""
        table: IcebergTable = self._kind.make(self._place, schema, evolve=self._job.sink.evolve, properties=properties)
        return table

    def clean(self, table: Any) -> None:
        """Forget old versions now and then."""
        if self._is_due():
            table.expire(self._hours)


class BatchState:
    """The batches of a query in a table, by its application transactions.

    The query's id has the number of the last batch, as for Delta's own sink. A second name has the job's query, so that a lost checkpoint
    is noticed. A third one has a digest of the last batch's offsets, so that an older checkpoint is noticed.
    """

    def __init__(self, table: Table | IcebergTable, job: Job, query: str, batch: int) -> None:
        self._table, self._job, self._query, self._batch = table, job, query, batch
        self._owner, self._offsets = f"kvspool/{job.name}/query", f"kvspool/{job.name}/offsets"

    def is_stored(self) -> bool:
        """Return whether the batch is in the table. Raises SinkError if checkpoint and table don't fit each other."""
        known, batch, uri = self._table.last(self._query), self._batch, self._table.place.uri
        again = "Restore the checkpoint and the table that belong together, or move both away to start again"
        if known is None:
            if self._table.last(self._owner) is not None:
                raise SinkError(
                    f"[KVSPOOL_SINK_OF_ANOTHER_QUERY] {uri} holds batches of another query of the job {self._job.name}: its checkpoint is "
                    "another one, and all rows would be added again. Restore the checkpoint, move the table away to start again, or give "
                    "the job another name to add its rows"
                )
            if batch > 0:
                raise SinkError(
                    f"[KVSPOOL_SINK_DAMAGED] {uri} has nothing of this query, but the checkpoint is at batch {batch}: earlier rows would "
                    f"be missing. {again}"
                )
            return False
        if batch > known + 1:
            raise SinkError(f"[KVSPOOL_SINK_DAMAGED] {uri} ends with batch {known}, but the checkpoint is at batch {batch}. {again}")
        if batch < known or batch == known and self._table.last(self._offsets) not in (None, self._word()):
            raise SinkError(
                f"[KVSPOOL_CHECKPOINT_RESTORED] {uri} has batch {known}, and the checkpoint repeats batch {batch} with other offsets: it "
                f"is an older one. {again}"
            )
        return batch == known

    def changes(self) -> dict[str, tuple[int | None, int]]:
        """Return the changes of application transactions that store the batch: the expected and the new number of each."""
        owner = number_of(self._query.encode())
        return {
            self._query: (self._table.last(self._query), self._batch),
            self._owner: (self._table.last(self._owner), owner),
            self._offsets: (self._table.last(self._offsets), self._word()),
        }

    def _word(self) -> int:
        """Return a number for the batch's offsets, which Spark writes once, before the batch; 0 for a checkpoint on an object store."""
        return word_of(self._job.checkpoint, self._batch)


def table_schema(frame: DataFrame) -> pyarrow.Schema:
    """Return the columns of a frame as those of a table; each may be null. Raises SinkError for a type that tables don't have."""
    import pyarrow as pa
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    try:
        schema = to_arrow_schema(frame.schema, timezone="UTC")
    except (PySparkException, TypeError) as error:
        raise SinkError(f"[KVSPOOL_TABLE_SCHEMA] the rows have a column that a table can't have: {error}") from None
    odd = [field.name for field in schema if pa.types.is_null(field.type) or pa.types.is_duration(field.type)]
    if odd:
        raise SinkError(f"[KVSPOOL_TABLE_SCHEMA] column {odd[0]} is {schema.field(odd[0]).type}, which a table can't have; CAST it")
    return pa.schema([pa.field(field.name, field.type, True) for field in schema])


def compact(table: Table, rules: Compact, *, everything: bool = False) -> tuple[int, int]:
    """Combine small files by the rules, or all small ones; return how many became how many.

    Files are combined when there are `files` of one magnitude in a partition. So a row is rewritten once per magnitude, not with every
    batch.
    """
    table.refresh()
    if everything:
        return table.optimize(rules.target_bytes)
    sizes = table.small_files(rules.target_bytes // 2)
    target = max((limit for one in sizes.values() for limit in _limits(one, rules)), default=0)
    return table.optimize(min(target, rules.target_bytes)) if target else (0, 0)


def _limits(sizes: list[int], rules: Compact) -> Iterator[int]:
    """Yield the sizes below which there are enough files of one magnitude."""
    magnitudes: dict[int, int] = {}
    for size in sizes:
        magnitude = (max(1, size).bit_length() - 1) // (FACTOR.bit_length() - 1)
        magnitudes[magnitude] = magnitudes.get(magnitude, 0) + 1
    yield from (FACTOR ** (magnitude + 1) for magnitude, count in magnitudes.items() if count >= rules.files)


class ParquetSink:
    """A folder of Parquet files, written by Spark's own sink.

    Exactly once for readers of its log `_spark_metadata`, that is, for Spark. Other readers may see files of failed attempts.
    """

    def __init__(self, job: Job) -> None:
        """Raises SinkError if the folder has the log of another checkpoint: Spark would leave batches out silently."""
        self._job = job
        if Path(job.sink.path, "_spark_metadata").exists() and not Path(job.checkpoint.removeprefix("file://"), "metadata").exists():
            raise SinkError(
                f"[KVSPOOL_SINK_OF_ANOTHER_QUERY] {job.sink.path} was written with another checkpoint than {job.checkpoint}: Spark would "
                "leave out batches that it finds in its log. Restore the checkpoint, or move the folder away to start again"
            )

    def attach(self, frame: DataFrame, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """See `Sink`."""
        writer = frame.writeStream.format("parquet").option("path", self._job.sink.path)
        return writer.partitionBy(*self._job.sink.partition_by) if self._job.sink.partition_by else writer


class KvspoolSink:
    """A log, a shard set or a hub root. Its columns are those of `format("kvspool")`: value, and optionally key, topic, partition, type."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def attach(self, frame: DataFrame, query: Callable[[], str], before: Callable[[int], None]) -> DataStreamWriter:
        """See `Sink`."""
        return frame.writeStream.format("kvspool").options(**self._job.sink.options).option("path", self._job.sink.path)


__all__ = ["DeltaSink", "KvspoolSink", "ParquetSink", "Sink", "compact", "open_sink"]
