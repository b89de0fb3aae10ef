"""Write rows as the Parquet files of a table, in any process on any host; a commit in another process makes them part of it.

No two files ever have the same name. So an attempt that fails, or is repeated, leaves a file that no version of the table contains.
`vacuum` removes such files. Files are on disk when `close` returns.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import parquet

from hub.tables import statistics
from hub.tables.errors import TableError
from hub.tables.place import TablePlace, make_folders
from kvspool import system
from kvspool.system.descriptor import Descriptor

ROW_GROUP = 64 << 20  # bytes of Arrow columns in a row group
BUFFERED = 192 << 20  # and in all open files of a writer
LARGEST = 256 << 20  # bytes of a file, about
RISING = ("record.offset", "record.timestamp", "event_time")  # columns whose numbers mostly rise
MOST_OPEN = 64  # files of a writer, one for each partition
NULL = "__HIVE_DEFAULT_PARTITION__"  # in names of folders
LONGEST_FOLDER = 255  # bytes of a folder's name, of Linux
_ESCAPED = re.compile(r"""[\x01-\x1f"#%'*/:=?\\\x7f{[\]^]""")  # in names of folders, as %2F
_ODD = re.compile(r"[^A-Za-z0-9_.=/-]")

Values = tuple[str | None, ...]  # of the partition columns, as text


class DataFile(msgspec.Struct, frozen=True):
    """A written file that is in no version yet. Small and picklable.

    path: in the table. values: of the partition columns, as text. stats: JSON; see `hub.tables.statistics`.
    """

    path: str
    size: int
    rows: int
    values: dict[str, str | None]
    stats: str


class FileWriter:
    """Writes the rows of one task. Use it in a `with` statement: an error in the block removes its files."""

    def __init__(self, place: TablePlace, schema: pa.Schema, partition_by: Iterable[str], name: str) -> None:
        """Create no file yet. schema: of the table, with its partition columns; name: the beginning of the files' names."""
        self._place = place
        self._schema = schema
        self._by = tuple(partition_by)
        self._file_schema = pa.schema([field for field in schema if field.name not in self._by])
        self._name = name
        self._open: OrderedDict[Values, _File] = OrderedDict()
        self._buffered = 0
        self._made: list[str] = []
        self._written: list[DataFile] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows. Raises the system's OSError, ValueError for values that the table's types don't hold."""
        for values, rows in _parts(_cast(batch, self._schema), self._by):
            file = self._file(values)
            self._buffered += file.add(rows)
            if file.buffered >= ROW_GROUP:
                self._flush(file)
            if file.size >= LARGEST:
                self._finish(values)
        while self._buffered > BUFFERED:
            self._flush(max(self._open.values(), key=lambda file: file.buffered))

    def _file(self, values: Values) -> _File:
        file = self._open.get(values)
        if file is None:
            if len(self._open) >= MOST_OPEN:
                self._finish(next(iter(self._open)))
            folders = "".join(f"{folder(name, value)}/" for name, value in zip(self._by, values, strict=True))
            if self._place.local is None:
                folders = _ODD.sub("_", folders)  # the values are in the log; not every reader decodes names of objects
            path = f"{folders}{self._name}-{system.port.random(8).hex()}-c{len(self._made):03}.snappy.parquet"
            self._made.append(path)
            file = self._open[values] = _File(self._place, path, self._file_schema, dict(zip(self._by, values, strict=True)))
        self._open.move_to_end(values)
        return file

    def _flush(self, file: _File) -> None:
        self._buffered -= file.flush()

    def _finish(self, values: Values) -> None:
        file = self._open.pop(values)
        self._flush(file)
        self._written.append(file.close())

    def close(self) -> list[DataFile]:
        """Complete the files, and return them."""
        for values in list(self._open):
            self._finish(values)
        return self._written

    def abandon(self) -> None:
        """Close and remove all files."""
        for file in self._open.values():
            file.abandon()
        for path in self._made:
            self._place.remove(path)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.abandon()


class _File:
    """A file that is being written. buffered: bytes of rows that are not in it yet."""

    def __init__(self, place: TablePlace, path: str, schema: pa.Schema, values: dict[str, str | None]) -> None:
        self._path = path
        self._schema = schema
        self._values = values
        self._is_local = place.local is not None
        self._rows: list[pa.RecordBatch] = []
        self.buffered = 0
        self._has_nan: set[str] = set()
        self._floats = [field.name for field in schema if pa.types.is_floating(field.type)]
        self._metadata: list[parquet.FileMetaData] = []
        self._sink = place.create(path)
        try:
            self._writer = parquet.ParquetWriter(
                self._sink, schema, compression="snappy", metadata_collector=self._metadata, store_schema=False, **encodings(schema)
            )
        except BaseException:
            self._sink.close()
            raise

    @property
    def size(self) -> int:
        """Bytes in the file so far."""
        return int(self._sink.tell())

    def add(self, rows: pa.RecordBatch) -> int:
        """Take rows; return their bytes."""
        self._rows.append(rows)
        size = int(rows.get_total_buffer_size())
        self.buffered += size
        return size

    def flush(self) -> int:
        """Write the rows as a row group; return their bytes."""
        size, self.buffered = self.buffered, 0
        rows, self._rows = self._rows, []
        if rows:
            table = pa.Table.from_batches(rows, self._schema)
            self._has_nan.update(name for name in self._floats if pc.any(pc.is_nan(table.column(name))).as_py())
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        return size

    def close(self) -> DataFile:
        """Complete the file, on disk on return."""
        try:
            self._writer.close()
            size = self.size
            if self._is_local:
                self._sink.flush()
                system.port.flush(self._sink.fileno())
        finally:
            self._sink.close()
        (metadata,) = self._metadata
        return DataFile(self._path, size, metadata.num_rows, self._values, statistics.of_file(metadata, self._schema, self._has_nan))

    def abandon(self) -> None:
        """Close the file as it is."""
        self._rows.clear()
        for part in (self._writer, self._sink):
            try:
                part.close()
            except (OSError, ValueError, pa.ArrowException):
                pass


@lru_cache(64)
def encodings(schema: pa.Schema) -> dict[str, Any]:
    """Return the writer's options: numbers that mostly rise are stored as differences, everything else may have a dictionary."""
    with pa.BufferOutputStream() as sink, parquet.ParquetWriter(sink, schema):
        pass
    leaves = {column.path: column.physical_type for column in parquet.ParquetFile(pa.BufferReader(sink.getvalue())).schema}
    rising = [path for path in RISING if leaves.get(path) == "INT64"]
    if not rising:
        return {}
    others = [path for path in leaves if path not in rising]
    return {"use_dictionary": others, "column_encoding": dict.fromkeys(rising, "DELTA_BINARY_PACKED")}


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the columns of a schema, with its types."""
    if batch.schema.equals(schema):
        return batch
    columns = [batch.column(field.name) for field in schema]
    cast = [column if column.type == field.type else column.cast(field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(cast, schema=schema)


def _parts(batch: pa.RecordBatch, by: tuple[str, ...]) -> Iterator[tuple[Values, pa.RecordBatch]]:
    """Yield the rows of each partition, in their order, without the partition columns."""
    if not batch.num_rows:
        return
    if not by:
        yield (), batch
        return
    numbered = pa.table([*(batch.column(name) for name in by), pa.array(range(batch.num_rows), pa.int64())], names=[*by, "/row"])
    groups = numbered.group_by(list(by), use_threads=False).aggregate([("/row", "list")])
    rest = batch.select([name for name in batch.schema.names if name not in by])
    for number in range(groups.num_rows):
        values = tuple(as_text(groups.column(name)[number]) for name in by)
        yield values, rest if groups.num_rows == 1 else rest.take(groups.column("/row_list")[number].values)


def check_partitions(schema: pa.Schema, by: Iterable[str]) -> None:
    """Raise TableError for partition columns that are missing, or whose values have no exact text."""
    test = pa.types
    for name in by:
        place = schema.get_field_index(name)
        if place < 0:
            raise TableError(f"[KVSPOOL_TABLE_PARTITIONS] there is no column {name} to partition by; there are {', '.join(schema.names)}")
        kind = schema.field(place).type
        if not (test.is_string(kind) or test.is_integer(kind) or test.is_boolean(kind) or test.is_date(kind) or test.is_timestamp(kind)):
            raise TableError(f"[KVSPOOL_TABLE_PARTITIONS] {name} is {kind}; partition by text, integers, booleans, dates or timestamps")
    if len(tuple(by)) == len(schema):
        raise TableError("[KVSPOOL_TABLE_PARTITIONS] every column is a partition column; a table needs another one")


def as_text(value: pa.Scalar) -> str | None:
    """Return a partition value as Delta's log writes it: null for an empty text, too."""
    if not value.is_valid:
        return None
    if pa.types.is_timestamp(value.type):
        moment = value.cast(pa.timestamp("us")).as_py()
        return str(moment.strftime("%Y-%m-%d %H:%M:%S.%f"))
    if pa.types.is_boolean(value.type):
        return str(value.as_py()).lower()
    return str(value.as_py()) or None


def of_text(text: str | None, kind: pa.DataType) -> pa.Scalar:
    """Return a partition value of a type. Raises ArrowInvalid for text that isn't one."""
    if text is None:
        return pa.scalar(None, kind)
    if pa.types.is_timestamp(kind):  # in UTC, with or without saying so
        return pa.scalar(text.removesuffix("Z")).cast(pa.timestamp("us")).cast(kind)
    return pa.scalar(text).cast(kind)


def folder(name: str, value: str | None) -> str:
    """Return the name of a partition's folder."""
    return f"{escaped(name)}={NULL if value is None else escaped(value)}"


def escaped(value: str) -> str:
    """Return a value as it is in a folder's name, in the notation of Hive and Spark."""
    return _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", value)


def adopt(place: TablePlace, staged: str, by: Iterable[str], name: str, schema: pa.Schema) -> list[DataFile]:
    """Move Parquet files of another program from a folder of a local table to their places in the table. They are in no version yet, and
    on disk when this returns.

    staged: the folder's path in the table; folders in it have the values of the partition columns. name: the beginning of the files' new
    names; their own ones are unique. schema: of the table. Raises the system's OSError.
    """
    assert place.local is not None
    by, folder = tuple(by), place.local / staged
    rows = pa.schema([field for field in schema if field.name not in by])
    found = []
    for path in sorted(folder.rglob("*.parquet")):
        folders = path.relative_to(folder).parts[:-1]
        metadata = parquet.read_metadata(path)
        if path.name.startswith((".", "_")) or not metadata.num_rows:
            continue
        values = {column: _value_in(part) for column, part in zip(by, folders, strict=True)}
        target = "/".join((*folders, f"{name}-{path.name}"))
        make_folders((place.local / target).parent)
        path.chmod(0o600)
        with Descriptor(path, os.O_RDONLY) as file:
            system.port.flush(file)
            size = system.port.status(file).st_size
        path.rename(place.local / target)
        found.append(DataFile(target, size, metadata.num_rows, values, statistics.of_file(metadata, rows, set())))
    return found


def _value_in(part: str) -> str | None:
    """Return the value in the name of a partition's folder; an empty text is null, as `as_text` has it."""
    value = part.partition("=")[2]
    return None if value == NULL else re.sub("%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), value) or None


def remove_files(place: TablePlace, files: Iterable[Any]) -> None:
    """Remove files that no version contains."""
    for file in files:
        place.remove(file.path)


def flush_folders(place: TablePlace, files: Iterable[DataFile]) -> None:
    """Flush the names of files to disk, before a commit names them. Raises the system's OSError."""
    from kvspool.system import disk

    if place.local is not None:
        for path in {os.path.dirname(file.path) for file in files}:
            disk.flush_directory(place.local / path)
