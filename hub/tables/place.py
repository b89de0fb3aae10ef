"""The place of a table: a folder, or a URL of an object store such as `s3://bucket/table`.

Credentials of an object store come from the environment (`AWS_ACCESS_KEY_ID` and the like), in every process that reads or writes there.
Options with secrets are refused, because options are shown and stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from hub.tables.errors import TableError
from kvspool.errors import MissingExtra
from kvspool.importing import import_whole
from kvspool.system import disk

if TYPE_CHECKING:
    from pyarrow.fs import PyFileSystem

SECRET = re.compile(r"secret|password|token|credential|access.?key|account.?key|sas", re.IGNORECASE)


def delta() -> ModuleType:
    """Return the package `deltalake`. Raises MissingExtra."""
    try:
        return import_whole("deltalake")
    except ImportError as error:
        raise MissingExtra.of("tables", "Delta tables need the package deltalake", error) from error


def iceberg() -> ModuleType:
    """Return `hub.tables.iceberg`. Raises MissingExtra without the package `pyiceberg`."""
    try:
        return import_whole("hub.tables.iceberg")
    except ImportError as error:
        raise MissingExtra.of("iceberg", "Iceberg tables need the package pyiceberg", error) from error


class TablePlace(msgspec.Struct, frozen=True):
    """Where a table is. Small and picklable.

    uri: an absolute path, or a URL. options: of the object store, such as AWS_ENDPOINT_URL, without secrets.
    """

    uri: str
    options: dict[str, str] = {}

    @classmethod
    def of(cls, path: str | os.PathLike[str], options: Mapping[str, str] | None = None) -> TablePlace:
        """Return the place at a path or URL. Raises TableError for an option with a secret."""
        text = os.fspath(path)
        secret = next((name for name in options or {} if SECRET.search(name)), None)
        if secret is not None:
            raise TableError(f"[KVSPOOL_TABLE_SECRET] option {secret} is a secret; set the environment's variable of that name instead")
        return cls(text if "://" in text else os.path.abspath(text), dict(options or {}))

    @property
    def local(self) -> Path | None:
        """The folder; None on an object store."""
        return None if "://" in self.uri else Path(self.uri)

    @property
    def storage_options(self) -> dict[str, str] | None:
        """The options as delta-rs expects them."""
        return dict(self.options) or None

    def make(self) -> None:
        """Create a missing folder, with its parents, for this user only."""
        if self.local is not None:
            make_folders(self.local)

    def create(self, name: str) -> BinaryIO | Any:
        """Create a file of the table, with the folders in its name, and return it, open for writing. Raises the system's OSError."""
        if self.local is None:
            return self._files().open_output_stream(name)
        path = self.local / name
        make_folders(path.parent)
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", buffering=1 << 20)

    def open(self, name: str) -> Any:
        """Return a file of the table for Arrow to read: a path, or an open file."""
        return str(self.local / name) if self.local is not None else self._files().open_input_file(name)

    def remove(self, name: str) -> None:
        """Remove a file of the table that no version has. Errors are ignored: `vacuum` finds it."""
        try:
            if self.local is None:
                self._files().delete_file(name)
            else:
                (self.local / name).unlink(missing_ok=True)
        except OSError:
            pass

    def file_system(self) -> PyFileSystem | None:
        """Return a file system whose root is the table; None for a folder of this host."""
        return self._files() if self.local is None else None

    def _files(self) -> PyFileSystem:
        from pyarrow.fs import PyFileSystem

        delta()
        handler = import_whole("deltalake.fs").DeltaStorageHandler(self.uri, self.storage_options)
        return PyFileSystem(handler)


def make_folders(folder: Path) -> None:
    """Create a folder with its parents, for this user only, on disk on return. Raises the system's OSError."""
    try:
        disk.make_directory(folder)
    except FileNotFoundError:
        make_folders(folder.parent)
        disk.make_directory(folder)
