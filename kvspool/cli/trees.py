"""The logs below a directory: what is at each path, and what it takes on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvspool.cli import plugins
from kvspool.errors import KvspoolError
from kvspool.opening import logs
from kvspool.queue.format import chunk_id

BLOCK = 512  # bytes of a block in `st_blocks`


class FoundLog(NamedTuple):
    """A log. usage: bytes on disk; records: None if it can't be opened, which `problem` says; newest: ns, 0 without a record."""

    path: Path
    kind: str
    usage: int
    records: int | None = None
    newest: int = 0
    problem: str = ""


def walk(top: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the directories below `top` that hold logs, and the logs themselves (True), by name; hidden ones are left out."""
    if logs.is_log(top):
        yield top, True
        return
    for child in sorted(path for path in top.iterdir() if not path.is_symlink() and not path.name.startswith(".")):
        if logs.is_log(child):
            yield child, True
            continue
        below = list(walk(child)) if child.is_dir() else []
        if below:
            yield child, False
            yield from below


def look(path: Path) -> FoundLog:
    """Return what is known about a log, also if it can't be opened."""
    usage = usage_of(path)
    try:
        with plugins.opened(path) as log:
            stats = log.stats()
    except (KvspoolError, OSError) as error:
        return FoundLog(path, "?", usage, problem=str(error))
    records = getattr(stats, "records", getattr(stats, "entries", None))
    return FoundLog(path, getattr(stats, "format", "queue"), usage, records, getattr(stats, "last_timestamp", 0))


def usage_of(path: Path) -> int:
    """Return the bytes on disk of a log's files, as `du` counts them; files that vanish meanwhile don't count."""
    if path.is_file():  # a queue, and its chunks next to it
        files = [path, *(path.with_name(name) for name in os.listdir(path.parent) if chunk_id(path, name) is not None)]
    else:
        files = [Path(place, name) for place, _, names in os.walk(path) for name in names]
    total = 0
    for file in files:
        with suppress(FileNotFoundError):
            total += file.lstat().st_blocks * BLOCK
    return total
