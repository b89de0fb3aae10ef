"""A Delta table that several processes change at once, by atomic commits of delta-rs.

**Exactly once.** A commit moves application transactions: names with a number each, which are in the table and appear in the same version
as the rows. It says which number it expects. If another process has moved one since, nothing is committed: `Overtaken`. So a repeated
batch is known, and of two concurrent ones the second is refused.

**Versions.** Readers see one version, whatever is committed meanwhile. `optimize` combines small files in a new version; `vacuum` removes
files of old versions.

**Durability.** On a file system of this host, rows and commit are on disk when `commit` returns. A commit that a power failure has torn
was not reported to anybody; the next process that opens the table to change it moves it aside.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import msgspec
import pyarrow as pa

from hub.tables import files as data_files
from hub.tables.errors import Overtaken, TableError
from hub.tables.files import DataFile
from hub.tables.place import TablePlace, delta
from kvspool import system
from kvspool.importing import import_whole
from kvspool.system import disk, documents
from kvspool.system.descriptor import Descriptor

if TYPE_CHECKING:
    import os

ATTEMPTS = 20  # of a commit, while others commit
PAUSE = 0.05  # seconds between two of them, at most; doubled up to 2 s
LARGEST_COMMIT = 1 << 30  # bytes
MARK = "kvspool"  # in the information of our commits
PROPERTY = "kvspool.mode"
LOOKED = 200  # last commits that are searched for our information
_LOOSE = ("nullable", "metadata", "containsNull", "valueContainsNull")  # in nested types
_COMMIT = re.compile(r"\d{20}\.json")
_CLOSED = ("delta.columnMapping.mode", "delta.constraints.")  # properties of tables whose files we can't write


class Change(NamedTuple):
    """A move of an application transaction. before: the expected number, None for a new name."""

    before: int | None
    after: int


class TableCommit(msgspec.Struct, frozen=True):
    """One of our commits, as the table's history describes it. time: ns since 1970."""

    version: int
    time: int
    by: str
    batch: int
    rows: int


class TableInfo(msgspec.Struct, frozen=True):
    """The state of a table. bytes: of the files of its present version. last: our last commit, if it is among the newest ones."""

    path: str
    version: int
    rows: int
    files: int
    bytes: int
    updated: int
    partition_by: tuple[str, ...]
    columns: dict[str, str]
    last: TableCommit | None


class Table:
    """An open table. Use it in one thread of one process."""

    def __init__(self, place: TablePlace | str | os.PathLike[str], *, version: int | None = None) -> None:
        """Open an existing table, at its newest version or an older one. Raises TableError, MissingExtra without the package deltalake."""
        self.place = place if isinstance(place, TablePlace) else TablePlace.of(place)
        if self.place.local is not None and not self.place.local.exists():
            raise TableError(
                f"[KVSPOOL_NO_TABLE] {self.place.uri} does not exist; kvspool table append SOURCE PATH and pipelines create tables"
            )
        if self.place.local is not None and not (self.place.local / "_delta_log").is_dir():
            raise TableError(f"[KVSPOOL_NO_TABLE] {self.place.uri} is not a Delta table: it has no _delta_log; give another path")
        try:
            self._table = delta().DeltaTable(self.place.uri, version=version, storage_options=self.place.storage_options)
        except _errors() as error:
            raise TableError(f"[KVSPOOL_NO_TABLE] {self.place.uri} can't be read as a Delta table: {_words(error)}") from None

    @classmethod
    def make(
        cls,
        place: TablePlace,
        schema: pa.Schema,
        *,
        partition_by: Iterable[str] = (),
        evolve: bool = False,
        properties: Mapping[str, str] = {},
    ) -> Table:
        """Open the table for rows of a schema; create a missing one. evolve: add missing columns to an existing one.

        properties: of the table, set if they differ. Raises TableError if the rows don't fit the table: the message names both. Raises
        TableError for another kind of directory, and the system's OSError.
        """
        by = tuple(partition_by)
        data_files.check_partitions(schema, by)
        drop_torn(place)
        if not exists(place):
            _create(place, schema, by, properties)
        table = cls(place)
        for _ in range(ATTEMPTS):
            table.refresh()
            try:
                missing = table._check(schema, by, evolve)
                if missing:
                    table._table.alter.add_columns(missing)
                differ = {key: value for key, value in properties.items() if table.properties.get(key) != value}
                if differ and not missing:
                    table._table.alter.set_table_properties(differ, raise_if_not_exists=False)
                if not differ and not missing:
                    return table
            except _conflict():  # another process has changed it meanwhile
                continue
            table._flush()
        raise TableError(f"[KVSPOOL_TABLE_BUSY] {place.uri}: others changed the table {ATTEMPTS} times meanwhile; try again")

    # State.

    @property
    def version(self) -> int:
        """The number of the version that this handle shows."""
        return int(self._table.version())

    @property
    def schema(self) -> pa.Schema:
        """The columns, including the partition columns."""
        return pa.schema(self._table.schema())

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The partition columns."""
        return tuple(self._table.metadata().partition_columns)

    @property
    def properties(self) -> dict[str, str]:
        """The table's properties."""
        return dict(self._table.metadata().configuration)

    def refresh(self) -> None:
        """Show the newest version. Raises TableError if the table is gone."""
        try:
            self._table.update_incremental()
        except _errors() as error:
            raise TableError(f"[KVSPOOL_NO_TABLE] {self.place.uri} can't be read: {_words(error)}") from None

    def last(self, app: str) -> int | None:
        """Return the number of an application transaction; None if there is none."""
        found = self._table.transaction_version(app)
        return None if found is None else int(found)

    def has_rows(self) -> bool:
        """Return whether the version has any file."""
        return bool(self._table.file_uris())

    def files(self) -> list[tuple[str, dict[str, str | None]]]:
        """Return the names of the version's files, with the text of their partition values.

        Raises TableError for a table whose files alone don't have its rows.
        """
        protocol = self._table.protocol()
        features = set(protocol.reader_features or ()) - {"timestampNtz", "vacuumProtocolCheck"}
        if features or self.properties.get("delta.columnMapping.mode", "none") != "none":
            raise TableError(f"[KVSPOOL_TABLE_RULES] {self.place.uri} has more to it than its files: {', '.join(sorted(features))}")
        added = pa.table(self._table.get_add_actions(flatten=True))
        if not added.num_rows:
            return []
        names = [unquote(name) for name in added.column("path").to_pylist()]
        columns = {name: added.column(f"partition.{name}") for name in self.partition_by}
        return [(path, {name: data_files.as_text(column[at]) for name, column in columns.items()}) for at, path in enumerate(names)]

    def dataset(self) -> Any:
        """Return the version as a dataset of Arrow, which DuckDB and polars query. Only partition values skip files.

        (The one of delta-rs also skips files in which a column has no statistics, such as one with NaN, whatever the filter.)
        """
        from pyarrow import dataset, fs

        kind = dataset.ParquetFileFormat()
        source = self.place.file_system() or fs.SubTreeFileSystem(self.place.uri, fs.LocalFileSystem())
        schema = self.schema
        fragments = []
        for name, values in self.files():
            known = dataset.scalar(True)
            for column, text in values.items():
                field = dataset.field(column)
                value = data_files.of_text(text, schema.field(column).type)
                known = known & (field == value if value.is_valid else field.is_null())
            fragments.append(kind.make_fragment(name, source, known))
        return dataset.FileSystemDataset(fragments, schema, kind, source)

    def info(self) -> TableInfo:
        """Return the state of the version."""
        added = pa.table(self._table.get_add_actions(flatten=True))
        rows = sum(count or 0 for count in added.column("num_records").to_pylist()) if added.num_rows else 0
        sizes = added.column("size_bytes").to_pylist() if added.num_rows else []
        history = self._table.history(LOOKED)
        updated = int(history[0].get("timestamp", 0)) * 1_000_000 if history else 0
        columns = {field.name: str(field.type) for field in self.schema}
        last = next((found for found in map(_commit_of, history) if found is not None), None)
        return TableInfo(self.place.uri, self.version, rows, len(sizes), sum(sizes), updated, self.partition_by, columns, last)

    # Changes.

    def commit(
        self, files: Iterable[DataFile], changes: Mapping[str, Change], *, replace: bool = False, note: Mapping[str, Any] = {}
    ) -> int:
        """Add files in one version, or replace all; return its number. On disk on return.

        note: information about the commit. Raises Overtaken, TableError if others commit all the time, and the system's OSError.
        """
        files = list(files)
        data_files.flush_folders(self.place, files)
        actions = [_action(file) for file in files]
        mode = "overwrite" if replace else "append"
        note = {**note, "rows": sum(file.rows for file in files)}

        def write(properties: Any) -> None:
            self._table.create_write_transaction(
                actions, mode, self._table.schema(), list(self.partition_by) or None, commit_properties=properties
            )

        return self._commit(write, changes, note)

    def merge(self, files: Iterable[DataFile], keys: Iterable[str], changes: Mapping[str, Change], *, note: Mapping[str, Any] = {}) -> int:
        """Replace the rows that have the keys of a row in the files, and add the others; return the version's number.

        No two rows of the files have the same keys. The files are in no version before or after. Raises as `commit`.
        """
        files = list(files)
        names = self.schema.names
        same = " AND ".join(f"(t.{_quoted(key)} IS NOT DISTINCT FROM s.{_quoted(key)})" for key in keys)
        updates = {_quoted(name): f"s.{_quoted(name)}" for name in names}
        note = {**note, "rows": sum(file.rows for file in files)}

        def write(properties: Any) -> None:
            source = _rows(self.place, files, self.schema)
            merger = self._table.merge(source, same, source_alias="s", target_alias="t", commit_properties=properties)
            merger.when_matched_update(updates).when_not_matched_insert(updates).execute()

        return self._commit(write, changes, note) if files else self.commit((), changes, note=note)

    def _commit(self, write: Any, changes: Mapping[str, Change], note: Mapping[str, Any]) -> int:
        transaction = delta().Transaction
        properties = delta().CommitProperties(
            custom_metadata={MARK: dict(note)}, app_transactions=[transaction(app, change.after) for app, change in changes.items()]
        )
        pause = PAUSE
        for _ in range(ATTEMPTS):
            self.refresh()
            self._check_changes(changes)
            before = self.version
            try:
                write(properties)
            except _conflict():
                time.sleep(pause * (0.5 + random.random() / 2))
                pause = min(2.0, pause * 2)
                continue
            except _errors() as error:
                raise TableError(f"[KVSPOOL_TABLE_FAILED] {self.place.uri}: {_words(error)}") from None
            self.refresh()
            self._flush(before + 1)  # ours may not be the newest
            return self.version
        raise TableError(f"[KVSPOOL_TABLE_BUSY] {self.place.uri}: others committed {ATTEMPTS} times meanwhile; try again")

    def _check_changes(self, changes: Mapping[str, Change]) -> None:
        for app, change in changes.items():
            found = self.last(app)
            if found != change.before:
                raise Overtaken(
                    f"[KVSPOOL_TABLE_OVERTAKEN] {self.place.uri}: another writer has moved {app} to {found}; {change.before} was expected",
                    found,
                )

    def _flush(self, first: int | None = None) -> None:
        """Flush the newest commit to disk, and those before it from `first` on."""
        folder = self.place.local
        if folder is not None:
            log = folder / "_delta_log"
            for version in range(self.version if first is None else first, self.version + 1):
                with suppress(FileNotFoundError), Descriptor(log / f"{version:020}.json", 0) as fd:
                    system.port.flush(fd)
            disk.flush_directory(log)

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """Set properties of the table."""
        self._table.alter.set_table_properties(dict(properties), raise_if_not_exists=False)
        self._flush()

    # Maintenance.

    def small_files(self, most: int) -> dict[tuple[str, ...], list[int]]:
        """Return the sizes of the files below a size, by partition."""
        found: dict[tuple[str, ...], list[int]] = {}
        added = pa.table(self._table.get_add_actions(flatten=True))
        columns = [added.column(f"partition.{name}").to_pylist() for name in self.partition_by] if added.num_rows else []
        sizes = added.column("size_bytes").to_pylist() if added.num_rows else []
        for number, size in enumerate(sizes):
            if size < most:
                found.setdefault(tuple(str(column[number]) for column in columns), []).append(size)
        return found

    def optimize(self, target: int) -> tuple[int, int]:
        """Combine files that are smaller than a size, of each partition; return how many became how many.

        Readers and appends continue meanwhile. Raises TableError.
        """
        self.refresh()
        try:
            done = self._table.optimize.compact(target_size=target)
        except _conflict():
            return 0, 0  # another process has replaced the files; the next time finds what is left
        except _errors() as error:
            raise TableError(f"[KVSPOOL_TABLE_FAILED] {self.place.uri}: {_words(error)}") from None
        self._flush()
        return int(done["numFilesRemoved"]), int(done["numFilesAdded"])

    def vacuum(self, hours: int, *, everything: bool = False) -> int:
        """Remove the files of versions that were replaced so many hours ago; return their number.

        everything: also files that were never in a version, of killed writers. Raises TableError.
        """
        self.refresh()
        try:
            found = self._table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False, full=everything)
        except _errors() as error:
            raise TableError(f"[KVSPOOL_TABLE_FAILED] {self.place.uri}: {_words(error)}") from None
        return len(found)

    # The fit of rows.

    def _check(self, schema: pa.Schema, by: tuple[str, ...], evolve: bool) -> list[Any]:
        """Return the fields to add. Raises TableError for every other difference."""
        uri = self.place.uri
        closed = [key for key, value in self.properties.items() if key.startswith(_CLOSED) and value != "none"]
        ours, theirs = _fields(delta().Schema.from_arrow(schema)), _fields(self._table.schema())
        closed += [f"column {name} with rules" for name, field in theirs.items() if not field["nullable"] or field["metadata"]]
        if closed:
            raise TableError(f"[KVSPOOL_TABLE_RULES] {uri} has rules for its rows that kvspool doesn't apply: {closed[0]}")
        if self.partition_by != by:
            old, new = (", ".join(names) or "nothing" for names in (self.partition_by, by))
            raise TableError(f"[KVSPOOL_TABLE_PARTITIONED] {uri} is partitioned by {old}, and the rows by {new}; revert it, or start again")
        lower = {name.lower(): name for name in theirs}
        for name, field in ours.items():
            known = lower.get(name.lower())
            if known is not None and known != name:
                raise TableError(f"[KVSPOOL_TABLE_SCHEMA] {uri} has the column {known}, and the rows have {name}; readers ignore case")
            if known is not None and _bare(theirs[name]["type"]) != _bare(field["type"]):
                old, new = _type_text(theirs[name]["type"]), _type_text(field["type"])
                raise TableError(f"[KVSPOOL_TABLE_SCHEMA] column {name} is {old} in {uri}, and {new} in the rows")
        gone = [name for name in theirs if name not in ours]
        if gone:
            kind = _type_text(theirs[gone[0]]["type"])
            raise TableError(
                f"[KVSPOOL_TABLE_SCHEMA] {uri} has the column {gone[0]}, {kind}, and the rows have none; add it, "
                f"for example as CAST(NULL AS ...) AS {gone[0]}"
            )
        added = [name for name in ours if name not in theirs]
        if added and not evolve:
            kind = _type_text(ours[added[0]]["type"])
            raise TableError(
                f"[KVSPOOL_TABLE_SCHEMA] the rows have the column {added[0]}, {kind}, and {uri} has none; allow new columns with evolve"
            )
        return [field for field in delta().Schema.from_arrow(schema).fields if field.name in added]


def retention(hours: int) -> dict[str, str]:
    """Return the properties that keep replaced files for so long, and the log's entries for a day at least: commits compare with them."""
    return {
        "delta.deletedFileRetentionDuration": f"interval {hours} hours",
        "delta.logRetentionDuration": f"interval {max(24, hours)} hours",
    }


def exists(place: TablePlace) -> bool:
    """Return whether a place has a table. Raises TableError if it can't be examined."""
    try:
        return bool(delta().DeltaTable.is_deltatable(place.uri, place.storage_options))
    except _errors() as error:
        raise TableError(f"[KVSPOOL_NO_TABLE] {place.uri} can't be examined: {_words(error)}") from None


def _create(place: TablePlace, schema: pa.Schema, by: tuple[str, ...], properties: Mapping[str, str]) -> None:
    """Create an empty table, unless another process does."""
    folder = place.local
    if folder is not None and (folder.is_symlink() or folder.exists()):
        names = folder.is_dir() and not folder.is_symlink() and system.port.names(folder)
        if names is False or names and set(names) != {"_delta_log"}:
            raise TableError(f"[KVSPOOL_SINK_TAKEN] {folder} exists already, and is no Delta table; name another path")
    place.make()
    try:
        delta().DeltaTable.create(
            place.uri,
            delta().Schema.from_arrow(schema),
            partition_by=list(by),
            configuration=dict(properties),
            raise_if_key_not_exists=False,
            storage_options=place.storage_options,
        )
    except _errors() as error:
        if not exists(place):
            raise TableError(f"[KVSPOOL_TABLE_FAILED] {place.uri} can't be created: {_words(error)}") from None
    if folder is not None:
        with suppress(FileNotFoundError), Descriptor(folder / "_delta_log" / f"{0:020}.json", 0) as fd:
            system.port.flush(fd)
        disk.flush_directory(folder / "_delta_log")
        disk.flush_directory(folder)


def drop_torn(place: TablePlace) -> list[Path]:
    """Move commits aside that a power failure has torn: the last ones of a local table, not reported to anybody. Return their new names."""
    log = None if place.local is None else place.local / "_delta_log"
    moved: list[Path] = []
    if log is None:
        return moved
    for name in sorted((name for name in disk.names(log) if _COMMIT.fullmatch(name)), reverse=True):
        if _is_whole(log / name):
            break
        system.port.rename(log / name, log / f"{name}.torn")
        moved.append(log / f"{name}.torn")
    return moved


def _is_whole(path: Path) -> bool:
    """Return whether a commit ends with a complete action. Raises the system's OSError, also for what is no file."""
    lines = documents.read(path, LARGEST_COMMIT).rstrip(b"\n").rsplit(b"\n", 1)
    try:
        return isinstance(json.loads(lines[-1]), dict)
    except ValueError:
        return False


def _rows(place: TablePlace, files: list[DataFile], schema: pa.Schema) -> pa.RecordBatchReader:
    """Return the rows of files that are in no version, with their partition columns."""
    from pyarrow import parquet

    def read() -> Any:
        for file in files:
            with parquet.ParquetFile(place.open(file.path)) as opened:
                for batch in opened.iter_batches():
                    columns = [column_of(batch, field, file.values) for field in schema]
                    yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return pa.RecordBatchReader.from_batches(schema, read())


def column_of(batch: pa.RecordBatch, field: pa.Field, values: Mapping[str, str | None]) -> pa.Array:
    """Return a column of rows from a file: a partition's value, or null where an older file doesn't have it."""
    if field.name in values:
        return pa.repeat(data_files.of_text(values[field.name], field.type), batch.num_rows)
    if batch.schema.get_field_index(field.name) < 0:
        return pa.nulls(batch.num_rows, field.type)
    return batch.column(field.name).cast(field.type)


def _action(file: DataFile) -> Any:
    added = import_whole("deltalake.transaction").AddAction
    return added(file.path, file.size, file.values, system.port.now() // 1_000_000, True, file.stats)


def _fields(schema: Any) -> dict[str, dict[str, Any]]:
    return {field["name"]: field for field in json.loads(schema.to_json())["fields"]}


def _bare(kind: Any) -> Any:
    """Return a type without what may differ: the nullability and metadata of nested fields."""
    if isinstance(kind, dict):
        return {key: _bare(value) for key, value in kind.items() if key not in _LOOSE}
    return [_bare(one) for one in kind] if isinstance(kind, list) else kind


def _type_text(kind: Any) -> str:
    return kind if isinstance(kind, str) else json.dumps(_bare(kind))


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _commit_of(entry: Mapping[str, Any]) -> TableCommit | None:
    noted = entry.get(MARK)
    if isinstance(noted, str):
        with suppress(ValueError):
            noted = json.loads(noted)
    if not isinstance(noted, dict):
        return None
    try:
        by, batch, rows = str(noted.get("by", "")), int(noted.get("batch", -1)), int(noted.get("rows", 0))
        return TableCommit(int(entry["version"]), int(entry.get("timestamp", 0)) * 1_000_000, by, batch, rows)
    except (KeyError, TypeError, ValueError):
        return None


def moment(nanoseconds: int) -> datetime:
    """Return a time of `TableInfo`."""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)


def _errors() -> tuple[type[Exception], ...]:
    found = import_whole("deltalake.exceptions")
    return found.DeltaError, OSError, ValueError


def _conflict() -> type[Exception]:
    conflict: type[Exception] = import_whole("deltalake.exceptions").CommitFailedError
    return conflict


def _words(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(str(error).split())[:500]
