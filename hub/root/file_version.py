"""The version of a file or directory, to detect changes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvspool import system

STABLE = 100_000_000  # ns; a later change may get the same time, because the kernel's clock ticks coarsely


class FileVersion(NamedTuple):
    """Attributes of a file or directory that change with its content."""

    inode: int
    changed: int  # ns since 1970
    size: int

    @classmethod
    def of(cls, path: Path) -> FileVersion | None:
        """Return the version of a path's file now; None if there is none."""
        status = system.port.look_up(path)
        return None if status is None else cls(status.st_ino, status.st_mtime_ns, status.st_size)

    @property
    def is_stable(self) -> bool:
        """Return whether another change would get another version."""
        return system.port.now() - self.changed >= STABLE


UNSTABLE = FileVersion(-1, -1, -1)  # equal to no file's
