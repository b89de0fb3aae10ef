"""What tells whether a file or directory has changed since it was looked at."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvspool import system

SETTLED = 100_000_000  # ns; what was written later may have been replaced again with the same time: the kernel's clock ticks coarsely


class FileVersion(NamedTuple):
    """What changes about a file or directory when its content does."""

    inode: int
    changed: int  # ns since 1970
    size: int

    @classmethod
    def of(cls, path: Path) -> FileVersion | None:
        """Return the stamp of what lies at a path now; None if nothing does."""
        status = system.port.look_up(path)
        return None if status is None else cls(status.st_ino, status.st_mtime_ns, status.st_size)

    @property
    def is_settled(self) -> bool:
        """Return whether a further change gets another stamp."""
        return system.port.now() - self.changed >= SETTLED


UNSETTLED = FileVersion(-1, -1, -1)  # equal to no file's
