"""The version of a file, a directory or a journal, to detect changes."""

from __future__ import annotations

from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from hub.root.generations import GENERATIONS
from kvspool import system
from kvspool.errors import KvspoolError
from shard.merged import Log

if TYPE_CHECKING:
    from kvspool.journal import Journal
    from kvspool.journal.segments import Segments

STABLE = 100_000_000  # ns; a later change may get the same time, because the kernel's clock ticks coarsely


class FileVersion(NamedTuple):
    """Attributes of a file or directory that change with its content."""

    inode: int
    changed: int  # ns since 1970
    size: int

    @classmethod
    def of(cls, path: Path | str) -> FileVersion | None:
        """Return the version of a path's file now; None if there is none."""
        found = _attributes(path)
        return None if found is None else cls(*found)

    @property
    def is_stable(self) -> bool:
        """Return whether another change would get another version."""
        return system.port.now() - self.changed >= STABLE


UNSTABLE = FileVersion(-1, -1, -1)  # equal to no file's


class JournalVersion(NamedTuple):
    """The version of an open journal. Each append, trim and repair changes it, each change of its table of generations, and each file that
    is put next to the segments.
    """

    paths: tuple[str, ...]  # of its directories, its last segment and its table of generations
    versions: tuple[FileVersion | None, ...]
    is_stable: bool

    @classmethod
    def of(cls, log: Log) -> JournalVersion | None:
        """Return the version of a log now, before its contents are read; None for a log that is written through mappings."""
        if "at" not in log.capabilities:
            return None
        journal = cast("Journal", log)
        try:
            return cls.at(log.path, journal.segments_apart(), journal.bases())
        except (KvspoolError, OSError):
            return None  # the caller will get the same error

    @classmethod
    def at(cls, path: Path, segments: Segments, bases: list[int]) -> JournalVersion:
        """Return the version of the journal at a path now. bases: those of its segments."""
        files = path, segments.directory, segments.path_of(bases[-1]), path / GENERATIONS
        paths = tuple(dict.fromkeys(map(str, files)))
        versions = tuple(map(FileVersion.of, paths))
        return cls(paths, versions, all(version is None or version.is_stable for version in versions))

    @property
    def is_current(self) -> bool:
        """Return whether the journal has certainly not changed since."""
        return self.is_stable and all(map(eq, map(_attributes, self.paths), self.versions))


def _attributes(path: Path | str) -> tuple[int, int, int] | None:
    """Return the fields of the `FileVersion` of a path's file now; None if there is none."""
    status = system.port.look_up(path)
    return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)
