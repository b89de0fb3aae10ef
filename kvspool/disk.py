"""Small files, read and replaced whole, and the names in a directory, put on disk."""

from __future__ import annotations

import os
from pathlib import Path

from kvspool import system
from kvspool.descriptor import Descriptor


def read(path: Path, most: int, at: int = 0) -> bytes:
    """Return the bytes of a file from `at` on, up to `most`. Raises the system's OSError."""
    with Descriptor(path, os.O_RDONLY) as fd:
        return system.port.read(fd, most, at)


def replace(path: Path, data: bytes, mode: int, *, rights: int | None = None, temporary: Path | None = None) -> None:
    """Let a file have these bytes; on disk when it returns. After a crash it is the old one or the new one, whole.

    mode: permission bits of the new file, less the umask; rights: the same, whatever the umask is. temporary: its name until then, on the
    same file system; `NAME.tmp` beside it by default, and what a crash has left there is overwritten. Two at a time may not replace a file.
    Raises the system's OSError.
    """
    if temporary is None:
        temporary = path.with_name(f"{path.name}.tmp")
    with Descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode) as fd:
        if rights is not None:
            system.port.set_mode(fd, rights)
        system.port.write(fd, data, 0)
        system.port.flush(fd)
    system.port.rename(temporary, path)
    flush_directory(path.parent)


def flush_directory(path: Path, mode: int | None = None) -> None:
    """Put the names in a directory on disk, after its permission bits were set if they are given."""
    with Descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        if mode is not None:
            system.port.set_mode(fd, mode)
        system.port.flush(fd)
