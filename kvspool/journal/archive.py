"""Archiving: sealed segments are compressed in place, in the seekable format of zstd, and can be restored byte for byte.

One segment after the other, never the last one. The traces of a process that crashes meanwhile:

| crashed | trace |
|---|---|
| while writing, flushing or comparing the new form | a temporary file, which the next run removes |
| after renaming the new form, before removing the old one | both forms; the uncompressed one counts, and the next run finishes it |

The rename and the removal are done under the append lock, like trimming, after a check that the old form is unchanged. So no segment that
was trimmed or repaired meanwhile returns. Readers continue: a reader with the old form open reads it to its end, and lookups find one of
the two at any moment. One process archives at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.engine import locks
from kvspool.engine.reports import ArchiveReport, Converted
from kvspool.errors import Corruption
from kvspool.journal import seekable
from kvspool.journal.control import ADMIN, Control
from kvspool.journal.segment import Archived, Segment
from kvspool.journal.segments import Segments
from kvspool.log import unsupported
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

if TYPE_CHECKING:
    from kvspool.journal.handle import JournalHandle

LEVELS = range(1, 23)
TEMPORARY = ".tmp"
Progress = Callable[[int, int], None]


class Archiver:
    """One run over the segments of a journal, in one of the two directions."""

    def __init__(self, journal: JournalHandle, timeout: float, progress: Progress | None, *, level: int = 3, undo: bool = False) -> None:
        self.journal = journal
        self.segments = Segments(journal.path, journal.format)
        self._timeout = timeout
        self._progress = progress
        self._level = level
        self._undo = undo
        self._done = self._all = 0

    def run(self, before: int | None, older_than: float | None, *, dry_run: bool) -> ArchiveReport:
        """Convert the selected segments. See `Log.archive`."""
        if dry_run:
            return self._report([Converted(base, size, None) for base, size in self._chosen(before, older_than)], is_done=False)
        seekable.library()  # before anything is begun
        done = []
        with self._alone():
            self._tidy()
            chosen = list(self._chosen(before, older_than))
            self._all = sum(size for _, size in chosen)
            for base, size in chosen:
                after = self._convert(base)
                if after is not None:
                    done.append(Converted(base, size, after))
                self._tell(self._done + size)
        return self._report(done, is_done=True)

    def _report(self, segments: list[Converted], *, is_done: bool) -> ArchiveReport:
        return ArchiveReport(str(self.journal.path), not is_done, self._undo, segments)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep out every other archiver of the journal."""
        self.journal.under_lock(self._timeout, lambda *_: None)  # this creates the lock file, and fixes the end
        control = Control(self.journal.format.lock_file(self.journal.path), None)
        try:
            locks.acquire(control.fd, ADMIN, self._timeout, lambda: f"another process archives {self.journal.path}; try again later")
            yield
        finally:
            control.close()

    def _tidy(self) -> None:
        """Remove the leftovers of crashed runs."""
        for name in system.port.names(self.segments.directory):
            if name.endswith(TEMPORARY) and self.segments.base_of(name.removesuffix(TEMPORARY)) is not None:
                system.port.remove(self.segments.directory / name)

    def _chosen(self, before: int | None, older_than: float | None) -> Iterator[tuple[int, int]]:
        """Yield the sealed segments in the old form, and the size of their files."""
        bases = self.segments.bases()
        now = system.port.now()
        for base, following in zip(bases, bases[1:], strict=False):
            status = system.port.look_up(self._path(base))
            if status is None or (before is not None and following > before):
                continue
            if older_than is None or now - status.st_mtime_ns >= older_than * 1e9:
                yield base, status.st_size

    def _path(self, base: int) -> Path:
        """Return the path of the old form."""
        return self.segments.archive_path(base) if self._undo else self.segments.plain_path(base)

    def _convert(self, base: int) -> int | None:
        """Convert a segment to its other form; return the size of its file, None if it was removed or changed meanwhile."""
        old = self._path(base)
        new = self.segments.plain_path(base) if self._undo else self.segments.archive_path(base)
        was = system.port.look_up(old)
        if was is None:
            return None
        if self._undo and system.port.look_up(new) is not None:
            return self._take_the_place(old, was, new)  # both exist, and that one counts, whatever the archive contains
        try:
            source = Archived(old, base) if self._undo else Segment(old, base)
        except FileNotFoundError:
            return None
        temporary = new.with_name(new.name + TEMPORARY)
        try:
            was = system.port.status(source.fd)
            self._write(temporary, self._pieces(source), was)
            self._compare(source, temporary)
            return self._take_the_place(old, was, new, temporary)
        except Corruption:
            if _is_still(old, was):
                raise
            return None  # it was trimmed or repaired meanwhile
        finally:
            source.close()
            with suppress(OSError):
                system.port.remove(temporary)

    def _pieces(self, source: Segment) -> Iterator[bytes]:
        """Yield the content of the new form, and report progress."""
        begun, size = self._done, system.port.status(source.fd).st_size
        blocks = len(source.table) if isinstance(source, Archived) else -(-size // seekable.BLOCK)
        made = self._blocks(source) if isinstance(source, Archived) else seekable.compressed(source.read, size, self._level)
        for number, piece in enumerate(made):
            yield piece
            if self._progress is not None:
                self._progress(begun + size * min(number + 1, blocks) // max(1, blocks), self._all)

    def _blocks(self, source: Archived) -> Iterator[bytes]:
        return (source.block(number) for number in range(len(source.table)))

    def _tell(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(done, self._all)

    def _write(self, path: Path, pieces: Iterable[bytes], like: os.stat_result) -> None:
        """Create a file from pieces, on disk, with the permissions and times of another one."""
        with Descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as fd:
            at = 0
            for piece in pieces:
                system.port.write(fd, piece, at)
                at += len(piece)
            made = system.port.status(fd)
            if (made.st_uid, made.st_gid) != (like.st_uid, like.st_gid):
                system.port.set_owner(fd, like.st_uid, like.st_gid)
            system.port.set_mode(fd, like.st_mode & 0o777)
            system.port.set_times(fd, like.st_atime_ns, like.st_mtime_ns)  # retention rules use its age
            system.port.flush(fd)

    def _compare(self, source: Segment, path: Path) -> None:
        """Read a new file back. Raises Corruption if it differs from its source."""
        written = Segment(path, source.base) if isinstance(source, Archived) else Archived(path, source.base)
        try:
            archived, plain = (source, written) if isinstance(source, Archived) else (written, source)
            assert isinstance(archived, Archived)
            same = archived.size() == plain.size() and all(
                archived.block(number) == plain.read(archived.starts[number], one.size) for number, one in enumerate(archived.table)
            )
            if not same:
                raise Corruption(f"{path} differs from {source.path} when read back; the disk may be failing. Nothing was changed")
        finally:
            written.close()

    def _take_the_place(self, old: Path, was: os.stat_result, new: Path, temporary: Path | None = None) -> int | None:
        """Put the new form in place, then remove the old one, on disk; return the size of the new one. None: the old one is no longer the
        file that was read.
        """

        def change(*_: object) -> bool:
            if not _is_still(old, was):
                return False
            if temporary is not None:
                system.port.rename(temporary, new)
                disk.flush_directory(new.parent)
            system.port.remove(old)
            disk.flush_directory(new.parent, done=f"{new} replaced {old.name}")
            return True

        if not self.journal.under_lock(self._timeout, change):
            return None
        status = system.port.look_up(new)
        return None if status is None else status.st_size


def _is_still(path: Path, was: os.stat_result) -> bool:
    """Return whether a name still refers to the same, unchanged file."""
    now = system.port.look_up(path)
    return now is not None and all(getattr(now, field) == getattr(was, field) for field in ("st_dev", "st_ino", "st_size", "st_mtime_ns"))


def archive(
    journal: JournalHandle,
    before: int | None,
    older_than: float | None,
    level: int,
    timeout: float,
    progress: Progress | None,
    *,
    dry_run: bool = False,
) -> ArchiveReport:
    """See `Log.archive`."""
    if not journal.format.has_archives:
        raise unsupported(journal.kind, "archive")
    if level not in LEVELS:
        raise ValueError(f"a level is a number from {LEVELS[0]} to {LEVELS[-1]}, not {level}")
    return Archiver(journal, timeout, progress, level=level).run(before, older_than, dry_run=dry_run)


def unarchive(
    journal: JournalHandle,
    before: int | None,
    older_than: float | None,
    timeout: float,
    progress: Progress | None,
    *,
    dry_run: bool = False,
) -> ArchiveReport:
    """See `Log.unarchive`."""
    if not journal.format.has_archives:
        raise unsupported(journal.kind, "archive")
    return Archiver(journal, timeout, progress, undo=True).run(before, older_than, dry_run=dry_run)
