"""An Iceberg table with a catalog of its own in SQLite, next to the data. Needs the extra `iceberg`.

**Exactly once.** As in `delta`: a commit says which number it expects for each application transaction, and moves it in the version of the
rows. The numbers are properties of the table. pyiceberg repeats a refused commit automatically, on the newest version. So the numbers are
compared in each attempt, by the catalog, in the version on which the attempt is based. If another version is there by then, the catalog
refuses the attempt.

**Durability.** Files are flushed before the catalog names them, and SQLite flushes the catalog: a commit is on disk when it returns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, ValidationException
from pyiceberg.io import OutputFile
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table as PyIcebergTable
from pyiceberg.table.update import AssertRefSnapshotId, TableRequirement, TableUpdate
from sqlalchemy import NullPool, create_engine
from sqlalchemy.exc import SQLAlchemyError

from hub.tables import files as data_files
from hub.tables.delta import Change
from hub.tables.errors import Overtaken, TableError
from hub.tables.files import DataFile
from hub.tables.place import TablePlace
from kvspool import system
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

CATALOG, NAME = "kvspool", ("kvspool", "rows")
DATABASE = "catalog.db"
PREFIX = "kvspool.transaction."  # of the properties with the numbers of application transactions
_ERRORS = (CommitFailedException, NoSuchTableError, ValidationException, SQLAlchemyError, OSError, ValueError)


class IcebergTable:
    """An open table; its methods are those of `hub.tables.delta.Table`. Use it in one thread of one process."""

    def __init__(self, place: TablePlace) -> None:
        """Open an existing table of this host. Raises TableError."""
        self.place = place
        if place.local is None or not self.exists(place):
            raise TableError(f"[KVSPOOL_NO_TABLE] {place.uri} has no Iceberg table with a catalog of kvspool ({DATABASE})")
        with self._errors("can't be read as an Iceberg table"):
            self._catalog = IcebergCatalog(place.local)
            self.table = self._catalog.load_table(NAME)

    @classmethod
    def make(
        cls, place: TablePlace, schema: pa.Schema, *, evolve: bool = False, properties: Mapping[str, str] = {}
    ) -> IcebergTable:
        """Open the table for rows of a schema; create a missing one. evolve: add missing columns to an existing one.

        properties: of the table, set if they differ. Raises TableError if the rows don't fit the table, or the place has other files; and
        the system's OSError.
        """
        folder = place.local
        if folder is None:
            raise TableError(f"[KVSPOOL_SINK_TAKEN] {place.uri}: an Iceberg table needs a folder for its catalog; use delta for a URL")
        _create(place, folder, schema)
        table = cls(place)
        table._fit(schema, evolve)
        table.set_properties({key: value for key, value in properties.items() if table.properties.get(key) != value})
        return table

    @staticmethod
    def exists(place: TablePlace) -> bool:
        """Return whether a place has a table."""
        return place.local is not None and (place.local / DATABASE).is_file()

    @property
    def version(self) -> int:
        """The number of the version that this handle shows."""
        found = self.table.current_snapshot()
        return 0 if found is None else int(found.sequence_number or 0)

    @property
    def schema(self) -> pa.Schema:
        """The columns."""
        return self.table.schema().as_arrow()

    @property
    def properties(self) -> dict[str, str]:
        """The table's properties."""
        return dict(self.table.properties)

    def refresh(self) -> None:
        """Show the newest version. Raises TableError if the table is gone."""
        with self._errors("can't be read"):
            self.table.refresh()

    def last(self, app: str) -> int | None:
        """Return the number of an application transaction; None if there is none."""
        found = self.table.properties.get(PREFIX + app)
        return None if found is None else int(found)

    def has_rows(self) -> bool:
        """Return whether the version has any row."""
        return self.rows() > 0

    def rows(self) -> int:
        """Return the number of rows."""
        return int(self.table.scan().count()) if self.table.current_snapshot() is not None else 0

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """Set properties of the table."""
        if properties:
            with self._errors("can't be changed"), self.table.transaction() as transaction:
                transaction.set_properties(dict(properties))

    def commit(
        self, files: Iterable[DataFile], changes: Mapping[str, Change], *, replace: bool = False, note: Mapping[str, Any] = {}
    ) -> int:
        """Add files in one version, and return its number; replace must be False. On disk on return.

        note: information about the commit. Raises Overtaken, TableError, and the system's OSError.
        """
        files = list(files)
        assert self.place.local is not None and not replace
        data_files.flush_folders(self.place, files)
        paths = [f"file://{self.place.local / file.path}" for file in files]
        about = {f"kvspool.{key}": str(value) for key, value in {**note, "rows": sum(file.rows for file in files)}.items()}
        self.refresh()
        self._catalog.expected = {app: change.before for app, change in changes.items()}
        try:
            self._check(self.table)
            with self._errors("can't be changed"), self.table.transaction() as transaction:
                transaction.set_properties({PREFIX + app: str(change.after) for app, change in changes.items()})
                if paths:
                    transaction.add_files(paths, snapshot_properties=about)
        except NumberMoved as error:
            self.refresh()
            self._check(self.table)
            raise TableError(f"[KVSPOOL_TABLE_FAILED] {self.place.uri}: {error}") from None
        finally:
            self._catalog.expected = {}
        return self.version

    def merge(self, files: Iterable[DataFile], keys: Iterable[str], changes: Mapping[str, Change], *, note: Mapping[str, Any] = {}) -> int:
        """Raise TableError: an Iceberg table is only added to."""
        raise TableError(f"[KVSPOOL_TABLE_FAILED] {self.place.uri}: rows of an Iceberg table are not merged; use delta")

    def expire(self, hours: int) -> None:
        """Forget versions that were replaced so many hours ago: the table's metadata would grow with each commit. Data files stay."""
        with self._errors("can't be cleaned"):
            self.table.maintenance.expire_snapshots().older_than(datetime.now(UTC) - timedelta(hours=hours)).commit()

    def _check(self, table: PyIcebergTable) -> None:
        for app, before in self._catalog.expected.items():
            found = number_in(table, app)
            if found != before:
                raise Overtaken(
                    f"[KVSPOOL_TABLE_OVERTAKEN] {self.place.uri}: another writer has moved {app} to {found}; {before} was expected", found
                )

    def _fit(self, schema: pa.Schema, evolve: bool) -> None:
        """Add missing columns. Raises TableError for every other difference."""
        uri = self.place.uri
        theirs, ours = _types(self.schema), _types(schema)
        for name in ours:
            if name in theirs and theirs[name] != ours[name]:
                raise TableError(f"[KVSPOOL_TABLE_SCHEMA] column {name} is {theirs[name]} in {uri}, and {ours[name]} in the rows")
        gone = [name for name in theirs if name not in ours]
        if gone:
            raise TableError(f"[KVSPOOL_TABLE_SCHEMA] {uri} has the column {gone[0]}, and the rows have none; add it")
        added = [name for name in ours if name not in theirs]
        if added and not evolve:
            raise TableError(
                f"[KVSPOOL_TABLE_SCHEMA] the rows have the column {added[0]}, and {uri} has none; allow new columns with evolve"
            )
        if added:
            with self._errors("can't be changed"), self.table.update_schema() as update:
                update.union_by_name(schema)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except NumberMoved:
            raise
        except _ERRORS as error:
            raise TableError(f"[KVSPOOL_TABLE_FAILED] {self.place.uri} {what}: {' '.join(str(error).split())[:500]}") from None


class NumberMoved(ValidationException):
    """A number of an application transaction is not the expected one: pyiceberg removes the attempt's manifests, and doesn't repeat it."""


class IcebergCatalog(SqlCatalog):
    """The catalog of one table. It has an open connection only during a call, so there is nothing to close.

    expected: the numbers of application transactions with which the next commit begins.
    """

    def __init__(self, folder: Path) -> None:
        place = {"uri": f"sqlite:///{folder / DATABASE}", "warehouse": f"file://{folder}"}
        super().__init__(CATALOG, **place, **{"py-io-impl": f"{__name__}.{FlushedFileIO.__name__}"})
        self.close()
        self.engine = create_engine(place["uri"], poolclass=NullPool)
        self.expected: dict[str, int | None] = {}

    def commit_table(self, table: PyIcebergTable, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]) -> Any:
        """Commit, if the expected numbers are those of the version on which the commit is based."""
        if self.expected:
            current = self.load_table(table.name())
            found = current.current_snapshot()
            base = [one.snapshot_id for one in requirements if isinstance(one, AssertRefSnapshotId)]
            if base and base[0] != (None if found is None else found.snapshot_id):
                raise CommitFailedException("another version is the newest one")  # the next attempt compares with that
            for app, before in self.expected.items():
                if number_in(current, app) != before:
                    raise NumberMoved(f"{app} is {number_in(current, app)}, not {before}")
        return super().commit_table(table, requirements, updates)


class FlushedFileIO(PyArrowFileIO):
    """Files that are on disk, with their names, when they are closed."""

    def new_output(self, location: str) -> Any:
        """Return a file to write."""
        return FlushedOutput(super().new_output(location))


class FlushedOutput(OutputFile):
    """A file of pyiceberg that is flushed when it is closed."""

    def __init__(self, file: Any) -> None:
        super().__init__(file.location)
        self._file = file

    def __len__(self) -> int:
        return len(self._file)

    def exists(self) -> bool:
        """Return whether the file exists."""
        return bool(self._file.exists())

    def to_input_file(self) -> Any:
        """Return the file, to read."""
        return self._file.to_input_file()

    def create(self, overwrite: bool = False) -> Any:
        """Return the file, open for writing."""
        return FlushedStream(self._file.create(overwrite), Path(self.location.removeprefix("file://")))


class FlushedStream:
    """An open file that is flushed when it is closed."""

    def __init__(self, stream: Any, path: Path) -> None:
        self._stream, self._path = stream, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> FlushedStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Flush and close the file."""
        if not self._stream.closed:
            self._stream.close()
            with Descriptor(self._path, os.O_RDONLY) as file:
                system.port.flush(file)
            disk.flush_directory(self._path.parent)


def number_in(table: PyIcebergTable, app: str) -> int | None:
    """Return the number of an application transaction in a version; None if there is none."""
    found = table.properties.get(PREFIX + app)
    return None if found is None else int(found)


def _create(place: TablePlace, folder: Path, schema: pa.Schema) -> None:
    """Create a missing table, empty. Of a process that was killed meanwhile, a part may be there."""
    is_there = folder.is_symlink() or folder.exists()
    if is_there and (not folder.is_dir() or (names := system.port.names(folder)) and DATABASE not in names):
        raise TableError(f"[KVSPOOL_SINK_TAKEN] {folder} exists already, and is no Iceberg table of kvspool; name another path")
    place.make()
    Descriptor(folder / DATABASE, os.O_RDWR | os.O_CREAT, 0o600).close()
    try:
        catalog = IcebergCatalog(folder)
        catalog.create_namespace_if_not_exists(NAME[0])
        catalog.create_table_if_not_exists(NAME, schema, location=f"file://{folder}")
    except _ERRORS as error:
        raise TableError(f"[KVSPOOL_TABLE_FAILED] {place.uri} can't be created: {' '.join(str(error).split())[:500]}") from None
    disk.flush_directory(folder)


def _types(schema: pa.Schema) -> dict[str, str]:
    """Return the types of columns by name, as Iceberg stores them."""
    return {field.name: _type_text(field.type) for field in schema}


def _type_text(kind: pa.DataType) -> str:
    test = pa.types
    if test.is_map(kind):
        return f"map<{_type_text(kind.key_type)}, {_type_text(kind.item_type)}>"
    if test.is_list(kind) or test.is_large_list(kind):
        return f"list<{_type_text(kind.value_type)}>"
    if test.is_struct(kind):
        return f"struct<{', '.join(f'{name}: {text}' for name, text in _types(pa.schema(list(kind))).items())}>"
    if test.is_signed_integer(kind) and kind.bit_width < 32:
        return "int32"
    return str(kind).removeprefix("large_")
