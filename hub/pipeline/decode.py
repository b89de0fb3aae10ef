"""Decode values to columns: a task's work on each batch of records before Spark's own begins.

A row that can't be decoded is never dropped silently. It goes, with its position and the reason, to the *bad* folder. Each task with bad
rows writes one Parquet file there, named after the batch and the task. A repeated task, or a batch replayed after a crash, finds the same
bad rows and replaces that file by an equal one. So each row is stored once, and no commit is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from hub.pipeline import jsoncolumns
from hub.pipeline.errors import BadRecords
from hub.pipeline.job import RECORD_TIME
from hub.pipeline.schema import Kind, SchemaField, ddl
from hub.tables.files import LONGEST_FOLDER, escaped

RECORD_FIELDS = (
    SchemaField("key", Kind("binary")),
    SchemaField("topic", Kind("string")),
    SchemaField("partition", Kind("int")),
    SchemaField("offset", Kind("bigint")),
    SchemaField("timestamp", Kind("timestamp")),
    SchemaField("type", Kind("int")),
)
RECORD = Kind("struct", RECORD_FIELDS)
LONGEST_REASON = 300  # characters
BAD_SCHEMA = pa.schema(
    [
        *(pa.field(field.name, field.kind.arrow) for field in RECORD_FIELDS),
        pa.field("value", pa.binary()),
        pa.field("reason", pa.string()),
    ]
)
"""The columns of a row that can't be decoded."""

_TIMESTAMP = next(field for field in RECORD_FIELDS if field.name == "timestamp")
_ANY_LENGTH = ("string", "binary")
_FIXED = {"text": (SchemaField("text", Kind("string")),), "raw": (SchemaField("value", Kind("binary")),)}
_WRONG = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)

Decoded = tuple[list[Any], list[int], list[str]]  # the good rows; the numbers of the bad ones, and why


class Plan(NamedTuple):
    """The description of decoding for a task: small and picklable.

    time: RECORD_TIME or a field. job: its name, used in names of files in
    `bad`. fails: fail on a record that can't be decoded, instead of keeping it in the folder `bad`. ahead: seconds that a time from a field
    may be ahead of the record's timestamp; None for any number. folders: columns whose values become folders of the sink.
    """

    codec: str
    fields: tuple[SchemaField, ...]
    time: str
    bad: str
    fails: bool
    job: str
    ahead: float | None = None
    folders: tuple[str, ...] = ()

    @property
    def values(self) -> tuple[SchemaField, ...]:
        """The columns of a value."""
        return _FIXED.get(self.codec) or self.fields

    @property
    def columns(self) -> tuple[SchemaField, ...]:
        """The resulting columns, `record` and `event_time` included."""
        return (*self.values, SchemaField("record", RECORD), SchemaField("event_time", Kind("timestamp")))

    @property
    def ddl(self) -> str:
        """The columns in Spark's notation."""
        return ddl(self.columns)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Decode the batches of a task of Spark."""
        from pyspark import TaskContext

        task = TaskContext.get()
        assert task is not None
        batch = task.getLocalProperty("streaming.sql.batchId") or "0"
        kept = BadFile(bad_file(Path(self.bad), self.job, int(batch), task.partitionId()))
        yield from self.decode(batches, kept)

    def decode(self, batches: Iterable[pa.RecordBatch], kept: BadFile) -> Iterator[pa.RecordBatch]:
        """Yield the good rows, and keep the bad ones. Raises BadRecords for bad rows if the job fails on them."""
        decoder = Decoder(self)
        with kept:
            for batch in batches:
                good, bad = decoder.split(batch)
                if bad.num_rows:
                    self._refuse(bad)
                    kept.add(bad)
                if good.num_rows:
                    yield good

    def _refuse(self, bad: pa.RecordBatch) -> None:
        if not self.fails:
            return
        first = {name: bad.column(name)[0].as_py() for name in ("topic", "partition", "offset", "reason")}
        raise BadRecords(
            f"[KVSPOOL_BAD_RECORD] topic {first['topic']}, partition {first['partition']}, offset {first['offset']}: {first['reason']}. "
            'With [decode] bad = "keep" such records go to a separate folder, and the query continues.'
        )


class BadFile:
    """The file with the bad rows of one task. It becomes visible when the task ends without an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._building = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._writer: parquet.ParquetWriter | None = None

    def add(self, rows: pa.RecordBatch) -> None:
        """Write rows of `BAD_SCHEMA`; at most one row group is in memory. Raises the system's OSError."""
        if self._writer is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer = parquet.ParquetWriter(self._building, BAD_SCHEMA)
            self._building.chmod(0o600)
        self._writer.write_batch(rows)

    def __enter__(self) -> BadFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
            if kind is None:
                self._replace(writer is not None)
        finally:
            if writer is not None:
                self._building.unlink(missing_ok=True)

    def _replace(self, has_rows: bool) -> None:
        if not has_rows:
            with suppress(FileNotFoundError, NotADirectoryError):
                self.path.unlink()  # an earlier attempt at this batch, with another schema, had bad rows
            return
        with self._building.open("rb") as file:
            os.fsync(file.fileno())
        self._building.replace(self.path)


def count_bad(folder: Path, job: str, batch: int) -> int:
    """Return the number of bad rows in a batch of a job."""
    return sum(parquet.read_metadata(path).num_rows for path in folder.glob(f"{_bad_name(job, batch)}*.parquet"))


def clear_bad(folder: Path, job: str, batch: int) -> None:
    """Remove the files of earlier attempts at a batch of a job, complete or not."""
    for pattern in (f"{_bad_name(job, batch)}*.parquet", f".{_bad_name(job, batch)}*"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def bad_file(folder: Path, job: str, batch: int, task: int) -> Path:
    """Return the path of the file with the bad rows of a task of a job."""
    return folder / f"{_bad_name(job, batch)}{task:05}.parquet"


def _bad_name(job: str, batch: int) -> str:
    """Return the beginning of a batch's file names, with a dot, which no job name has, so that jobs never share files."""
    return f"{job}.{batch:010}-"


class Decoder:
    """Splits batches of the source into rows with values that it can decode, as columns, and the others."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._schema = pa.schema([pa.field(field.name, field.kind.arrow) for field in plan.columns])
        self._bytes = len(RECORD_FIELDS)

    def split(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return the good rows with the plan's columns, and the bad ones with `BAD_SCHEMA`, both in order."""
        columns, wrong, reasons = self._columns(batch)
        bad = dict(zip(wrong, reasons, strict=True))
        numbers = [row for row in range(batch.num_rows) if row not in bad]
        good = batch.take(pa.array(numbers, pa.int64())) if bad else batch
        refused = self._refused(columns, good)
        if refused:
            bad |= {numbers[place]: reason for place, reason in refused.items()}
            kept = pa.array([place for place in range(good.num_rows) if place not in refused], pa.int64())
            columns, good = [column.take(kept) for column in columns], good.take(kept)
        record = pa.StructArray.from_arrays([_column(good, field) for field in RECORD_FIELDS], fields=list(RECORD.arrow))
        time = record.field("timestamp") if self._plan.time == RECORD_TIME else columns[self._time]
        arrays = [*columns, record, time]
        wrong = sorted(bad)
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema), _bad(batch, wrong, [bad[row] for row in wrong])

    @cached_property
    def _time(self) -> int:
        return next(place for place, field in enumerate(self._plan.fields) if field.name == self._plan.time)

    def _refused(self, columns: list[pa.Array], rows: pa.RecordBatch) -> dict[int, str]:
        """Return the decoded rows that are bad nevertheless, with the reasons: later steps would fail on them."""
        bad = {} if self._plan.time == RECORD_TIME else self._mistimed(columns[self._time], rows)
        for place in self._folders:
            bad |= _no_folders(self._plan.values[place].name, columns[place])
        return bad

    @cached_property
    def _folders(self) -> list[int]:
        """Return the columns that become names of folders and may be of any length."""
        names = {name.lower() for name in self._plan.folders}
        return [place for place, field in enumerate(self._plan.values) if field.name.lower() in names and field.kind.name in _ANY_LENGTH]

    def _mistimed(self, times: pa.Array, rows: pa.RecordBatch) -> dict[int, str]:
        """Return the rows without a time, which no watermark or window accepts, and those too far ahead."""
        name = self._plan.time
        bad = {} if not times.null_count else {place: f"no {name}" for place in _places(times.is_null())}
        if self._plan.ahead is None:
            return bad
        written = _column(rows, _TIMESTAMP)
        ahead = pc.subtract(times.cast(pa.int64()), written.cast(pa.int64()))
        for place in _places(pc.greater(ahead, min(int(self._plan.ahead * 1e6), (1 << 63) - 1))):
            bad[place] = f"{name} is {times[place].as_py()}, too far ahead of {written[place].as_py()}, when the record was written"
        return bad

    def _columns(self, batch: pa.RecordBatch) -> tuple[list[pa.Array], list[int], list[str]]:
        if self._plan.codec == "raw":
            return [batch.column("value").cast(pa.binary())], [], []
        if self._plan.codec == "text":
            return self._texts(batch.column("value"))
        if self._plan.codec == "json":
            columns = jsoncolumns.columns(batch.column("value").cast(pa.binary()), self._plan.fields)
            if columns is not None:
                return columns, [], []
        rows, wrong, reasons = self._decoded(batch)
        try:
            return self._arrays(rows), wrong, reasons
        except _WRONG:
            return self._one_by_one(rows, batch.num_rows, wrong, reasons)

    def _texts(self, values: pa.Array) -> tuple[list[pa.Array], list[int], list[str]]:
        try:
            return [values.cast(pa.string())], [], []
        except pa.ArrowInvalid:
            rows, wrong, reasons = _each(values.to_pylist(), bytes.decode)
            return [pa.array(rows, pa.string())], wrong, reasons

    def _decoded(self, batch: pa.RecordBatch) -> Decoded:
        return _each(batch.column("value").to_pylist(), self._decode)

    @cached_property
    def _decode(self) -> Callable[[bytes], Any]:
        decoder: Any = msgspec.json.Decoder if self._plan.codec == "json" else msgspec.msgpack.Decoder
        decode: Callable[[bytes], Any] = decoder(self._row).decode
        return decode

    @cached_property
    def _row(self) -> type:
        """The type of decoded values. Its attributes have generated names, because a field may have any name."""
        fields = [
            (f"f{place}", field.kind.python | None, msgspec.field(default=None, name=field.name))
            for place, field in enumerate(self._plan.fields)
        ]
        return msgspec.defstruct("Row", fields, gc=False)

    def _arrays(self, rows: list[Any]) -> list[pa.Array]:
        return [
            pa.array([getattr(row, name) for row in rows], field.kind.arrow)
            for name, field in zip(self._row.__struct_fields__, self._plan.fields, strict=True)  # type: ignore[attr-defined]
        ]

    def _one_by_one(self, rows: list[Any], count: int, wrong: list[int], reasons: list[str]) -> tuple[list[pa.Array], list[int], list[str]]:
        """Do as `_columns` if a decoded value fits in no column, such as half a surrogate: such rows are bad, too."""
        numbers = [row for row in range(count) if row not in set(wrong)]
        bad = dict(zip(wrong, reasons, strict=True))
        kept = []
        for number, row in zip(numbers, rows, strict=True):
            try:
                self._arrays([row])
            except _WRONG as error:
                bad[number] = _reason(error)
            else:
                kept.append(row)
        return self._arrays(kept), sorted(bad), [bad[row] for row in sorted(bad)]


def _each(values: list[Any], decode: Callable[[Any], Any]) -> Decoded:
    """Return the result of each value."""
    try:
        return list(map(decode, values)), [], []
    except _WRONG:
        pass
    rows, wrong, reasons = [], [], []
    for number, value in enumerate(values):
        try:
            rows.append(decode(value))
        except _WRONG as error:
            wrong.append(number)
            reasons.append(_reason(error))
    return rows, wrong, reasons


def _reason(error: BaseException) -> str:
    words = "nested too deep" if isinstance(error, RecursionError) else str(error) or type(error).__name__
    return words[:LONGEST_REASON].encode(errors="backslashreplace").decode()


def _bad(batch: pa.RecordBatch, rows: list[int], reasons: list[str]) -> pa.RecordBatch:
    taken = batch.take(pa.array(rows, pa.int64()))
    arrays = [*(_column(taken, field) for field in RECORD_FIELDS), taken.column("value").cast(pa.binary()), pa.array(reasons, pa.string())]
    return pa.RecordBatch.from_arrays(arrays, schema=BAD_SCHEMA)


def _no_folders(name: str, values: pa.Array) -> dict[int, str]:
    """Return the values that can't be part of a folder's name in Spark's notation; such a row would fail every attempt at its batch."""
    bad = {}
    room = LONGEST_FOLDER - len(f"{escaped(name)}=".encode())
    for place in _places(pc.greater(pc.binary_length(values), room // len("%2F"))):
        value = values[place].as_py()
        length = len(escaped(value if isinstance(value, str) else value.decode(errors="replace")).encode())
        if length > room:
            bad[place] = f"{name} takes {length:,} bytes in the name of a folder, where {room} fit, and is in [sink] partition_by"
    for place in _places(pc.match_substring(values, "\0")):
        bad[place] = f"{name} has a NUL, which names of folders can't have, and is in [sink] partition_by"
    return bad


def _places(mask: pa.Array) -> list[int]:
    """Return the places where a mask is true."""
    places: list[int] = pc.indices_nonzero(mask).to_pylist()
    return places


def _column(batch: pa.RecordBatch, field: SchemaField) -> pa.Array:
    return batch.column(field.name).cast(field.kind.arrow, safe=False)
