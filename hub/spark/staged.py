"""Rows of a repeated batch that a task has not appended yet. They are in a file next to the logs until the driver has compared all tasks.

A file is named after the query. Each commit of the query removes its files, and so does a failed batch. Files of killed drivers are
removed by the next commit of the same query; those of queries that never return after a week, by the next commit to the same logs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from hub.spark.target import SinkTarget
from kvspool import system
from kvspool.system import disk

if TYPE_CHECKING:
    import pyarrow

EXPIRY = 7 * 24 * 3600 * 10**9  # ns; the accounts of an abandoned query are kept as long
SUFFIX = ".arrow"


def folder_of(target: SinkTarget) -> Path:
    """Return the folder of staged rows of a target."""
    return target.path.with_name(f".{target.path.name}.staged") if target.is_log else target.path / ".staged"


def write(target: SinkTarget, query: str, batches: list[pyarrow.RecordBatch]) -> str:
    """Store batches, at least one, and return the path of the file, for this user only. Raises the system's OSError."""
    import pyarrow

    folder = folder_of(target)
    with suppress(FileExistsError):
        disk.make_directory(folder)
    path = folder / f"{_prefix(query)}{system.port.random(8).hex()}{SUFFIX}"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        with pyarrow.ipc.new_file(file, batches[0].schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
    return str(path)


def read(path: str) -> Iterator[pyarrow.RecordBatch]:
    """Yield the stored batches. Raises the system's OSError."""
    import pyarrow

    with pyarrow.memory_map(path) as source:
        reader = pyarrow.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def remove(paths: Iterable[str]) -> None:
    """Remove files, and the empty folder. Errors are ignored: the next commit removes what is left."""
    for path in map(Path, paths):
        with suppress(OSError):
            path.unlink()
        with suppress(OSError):
            path.parent.rmdir()


def sweep(target: SinkTarget, query: str) -> None:
    """Remove the files of a query whose batch is complete, and old files of other queries."""
    folder = folder_of(target)
    with suppress(OSError):
        names = [name for name in system.port.names(folder) if name.endswith(SUFFIX)]
        remove(str(folder / name) for name in names if name.startswith(_prefix(query)) or _is_old(folder / name))


def _is_old(path: Path) -> bool:
    status = system.port.look_up(path)
    return status is not None and status.st_mtime_ns < system.port.now() - EXPIRY


def _prefix(query: str) -> str:
    return f"{quote(query, safe='')}-"
