"""A folder of Parquet files that changes atomically: readers always see one complete version.

    [path] -> .[name]/versions/0000000012    a link, replaced atomically: the commit
    .[name]/versions/[number]/               the files of a version, hard links; a file of several versions is on disk once
    .[name]/versions/[number]/_kvspool.json  the version's manifest, which readers of Parquet ignore
    .[name]/staging/[random]/                this process's current batch
    .[name]/query                            the table's owner, written before its first batch
    .[name]/lock                             held by the one process that changes the table

**Versions.** Each batch and each compaction writes the next version next to the shown one, flushes it to disk, and moves the link. A batch
adds files or replaces all. So [path] is the old version or the new one. Names of files are never reused, and files never changed.

**Exactly once.** The manifest has the query and its last batch, and becomes visible with that batch's rows. If Spark crashes before it has
noted a commit, it replays the batch, which is detected and adds nothing.

**Snapshots.** A reader that lists files now and opens them later may find some replaced. One that lists the folders of partitions one after
the other may see some in the old version and some in the new one. A reader that resolves the link first (`os.path.realpath`, or
`snapshot`) reads one version while that is kept.

**Durability.** A version is on disk when `commit` or `compact` returns. **Recovery.** After a crash at any point, the link shows the old
version or the new one; `open` removes unfinished ones. It never removes a version that was shown. A missing link raises an error; it is
not treated as a new table.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from hub.pipeline.errors import PipelineRuns, SinkError
from kvspool import system
from kvspool.system import disk, documents
from kvspool.system.descriptor import Descriptor

MANIFEST = "_kvspool.json"
LARGEST_MANIFEST = 1 << 28  # bytes
OWNER = "query"
LARGEST_OWNER = 1 << 16  # bytes
MOST_VERSIONS = 100  # kept at most, however young
_NUMBER = re.compile(r"\d{10}")


class DataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Parquet file of the table. name: its path in a version, with its partition's folders; made: its time, ns since 1970."""

    name: str
    rows: int
    size: int
    made: int

    @property
    def folder(self) -> str:
        """The partition that it belongs to; "" without any."""
        return self.name.rpartition("/")[0]

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """The columns in the names of its folders."""
        return tuple(part.partition("=")[0] for part in self.name.split("/")[:-1])


class Version(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version. query: the query of its batches; batch: the last one; -1 before the first."""

    number: int
    query: str
    batch: int
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(file.rows for file in self.files)


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The owner of the table.

    query: the query of its batches; job: the pipeline's name; is_shown: whether there has been a version; mode: "append" or "complete", the
    effect of its batches; "" for a table older than this field.
    """

    query: str
    job: str
    is_shown: bool
    mode: str = ""


class Table:
    """The table at a path, for the one process that changes it; use it in a `with` statement. Readers don't need this class."""

    def __init__(self, path: Path) -> None:
        """Open the table. Creates a missing one, and removes the unfinished work of a killed process.

        Raises SinkError for another kind of path, PipelineRuns if another process has it open, and the system's OSError.
        """
        self.path = Path(os.path.abspath(path))
        self.state = self.path.parent / f".{self.path.name}"
        self._stagings = self.state / "staging"
        # Unique to this process: tasks of a killed one may still write to theirs.
        self.staging = self._stagings / system.port.random(8).hex()
        self._versions = self.state / "versions"
        self._check_place()
        for folder in (self.path.parent, self.state, self._versions):
            _make(folder)
        self._lock = self._locked()
        try:
            self.version = self._shown()
            self.owner = self._owner()
            self._clear()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the table for other processes. May be called again."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Changes.

    def check_job(self, job: str, mode: str) -> None:
        """Raise SinkError if another job writes here, because they would share a checkpoint; or if this job wrote in another mode.

        After a change of mode, rows to be replaced would stay, or rows to be kept would be lost.
        """
        if self.owner is None:
            return
        if self.owner.job != job:
            raise SinkError(
                f"[KVSPOOL_SINK_OF_ANOTHER_JOB] {self.path} is written by the job {self.owner.job}, and this is {job}; give it its own "
                f"[sink] path, or name it {self.owner.job} again"
            )
        if self.owner.mode not in ("", mode):
            raise SinkError(
                f"[KVSPOOL_SINK_OF_ANOTHER_MODE] {self.path} was written with the mode {self.owner.mode}, and the job has {mode} now, by "
                f"its [sink] mode, [window] and [watermark]; set them back, give it another [sink] path, or move {self.path}, "
                f"{self.state} and the checkpoint away to start again"
            )

    def begin(self, query: str, job: str, batch: int, mode: str) -> None:
        """Note the owner on disk, before any data of a batch. Raises SinkError if rows of earlier batches are lost.

        A batch without rows creates no version. So without versions, this note distinguishes a query without rows from a lost sink.
        """
        known = self.owner is not None and self.owner.query == query and not self.owner.is_shown
        if self.version is None and batch > 0 and not known:
            raise SinkError(
                f"[KVSPOOL_SINK_DAMAGED] {self.path} has nothing, but the checkpoint is at batch {batch}: earlier rows would be "
                f"missing. Restore {self.path} and {self.state}, or move the checkpoint away, too, to start again"
            )
        self._note(Owner(query, job, self.version is not None, mode))

    def has(self, query: str, batch: int) -> bool:
        """Return whether a batch is stored already. Raises SinkError if the table has batches of another query."""
        if self.version is None or not self.version.query:
            return False
        if self.version.query != query:
            raise SinkError(
                f"[KVSPOOL_SINK_OF_ANOTHER_QUERY] {self.path} holds batches of the query {self.version.query}, and this is {query}: its "
                f"checkpoint is another one. Restore the checkpoint, or move {self.path} and {self.state} away to start again"
            )
        return batch <= self.version.batch

    def commit(self, query: str, batch: int, *, replace: bool = False) -> Version | None:
        """Show the Parquet files in `staging`, added to the present ones or replacing them; on disk on return.

        Files without rows are omitted, except the first one, which has the columns. Returns the new version; None if nothing has changed.
        Raises SinkError if added files are in folders of other columns than the present ones: no reader could combine them.
        """
        found = list(self._staged())
        added = [place for place in found if place[1] > 0]
        if not added and (replace or self.version is None):
            added = found[:1]
        if not added:
            self._discard(self.staging)
            return None
        live = () if replace or self.version is None else self.version.files
        number = self.next_number
        now = system.port.now()
        names: list[tuple[Path, DataFile]] = []
        for place, (path, rows, size) in enumerate(added):
            folder = path.parent.relative_to(self.staging)
            name = str(folder / f"part-{batch:010}-{number:010}-{place:05}.parquet")
            names.append((path, DataFile(name, rows, size, now)))
        self._check_partitions((*live, *(file for _, file in names)))
        version = self._publish(Version(number, query, batch, (*live, *(file for _, file in names))), live, names)
        self._discard(self.staging)
        return version

    def _check_partitions(self, files: Iterable[DataFile]) -> None:
        kinds = {file.partition_columns: None for file in files if file.rows}
        if len(kinds) > 1:
            old, new = (", ".join(columns) or "nothing" for columns in list(kinds)[:2])
            raise SinkError(
                f"[KVSPOOL_SINK_PARTITIONED] {self.path} is partitioned by {old}, and the batch by {new}; set [sink] partition_by back, or "
                f"move {self.path}, {self.state} and the checkpoint away to start again"
            )

    def replace_files(self, gone: Iterable[DataFile], made: Iterable[tuple[Path, DataFile]]) -> Version:
        """Show a version in which some files are replaced by others in `staging`, with the same rows."""
        assert self.version is not None
        gone_names = {file.name for file in gone}
        live = tuple(file for file in self.version.files if file.name not in gone_names)
        made = list(made)
        old = self.version
        number = self.next_number
        version = self._publish(Version(number, old.query, old.batch, (*live, *(file for _, file in made))), live, made)
        self._discard(self.staging)
        return version

    def fresh_staging(self) -> Path:
        """Return the path of the staging folder, without the folder: Spark creates it."""
        self._discard(self.staging)
        _make(self._stagings)
        return self.staging

    def prune(self, seconds: float) -> int:
        """Remove versions that have not been shown for so long. Return their number. A file is removed with its last version."""
        assert self.version is not None or not self._numbers()
        numbers = [number for number in self._numbers() if self.version is not None and number < self.version.number]
        oldest = system.port.now() - int(seconds * 1e9)
        removed = 0
        for place, number in enumerate(numbers):
            after = self._folder(numbers[place + 1]) if place + 1 < len(numbers) else self._folder(self.version.number)  # type: ignore[union-attr]
            status = system.port.look_up(after / MANIFEST)  # the time when the next version replaced it
            if len(numbers) - place > MOST_VERSIONS or status is None or status.st_mtime_ns < oldest:
                self._discard(self._folder(number))
                removed += 1
        return removed

    # Creation of versions.

    def _publish(self, version: Version, live: Iterable[DataFile], added: Iterable[tuple[Path, DataFile]]) -> Version:
        """Create the folder of a version, flush it to disk, and move the link."""
        folder = self._folder(version.number)
        system.port.make_directory(folder)
        folders = {""}
        if self.version is not None:
            shown = self._folder(self.version.number)
            for file in live:
                self._make_folders(folder, file.folder, folders)
                system.port.link(shown / file.name, folder / file.name)
        for path, file in added:
            self._make_folders(folder, file.folder, folders)
            _flush(path)
            system.port.rename(path, folder / file.name)
        disk.replace(folder / MANIFEST, msgspec.json.encode(version), 0o600)
        for name in sorted(folders, reverse=True):
            disk.flush_directory(folder / name)
        disk.flush_directory(self._versions)
        if self.owner is not None:
            self._note(msgspec.structs.replace(self.owner, is_shown=True))  # after a crash here, `_clear` shows it
        self._show(version.number)
        self.version = version
        return version

    def _note(self, owner: Owner) -> None:
        if owner != self.owner:
            disk.replace(self.state / OWNER, msgspec.json.encode(owner), 0o600)
            self.owner = owner

    def _show(self, number: int) -> None:
        link = self.state / "next"
        with suppress(FileNotFoundError):
            system.port.remove(link)
        system.port.symlink(self._folder(number).relative_to(self.path.parent), link)
        system.port.rename(link, self.path)
        disk.flush_directory(self.path.parent, done=f"{self.path} shows version {number}")

    def _make_folders(self, version: Path, name: str, known: set[str]) -> None:
        if name in known:
            return
        self._make_folders(version, name.rpartition("/")[0], known)
        system.port.make_directory(version / name)
        known.add(name)

    def _staged(self) -> Iterator[tuple[Path, int, int]]:
        """Yield path, rows and bytes of each Parquet file of the batch, in the order of their names."""
        from pyarrow import parquet

        for path in sorted(self.staging.rglob("*.parquet")):
            is_half = path.relative_to(self.staging).parts[0] == "_temporary"  # of a task with two attempts
            if path.is_file() and not is_half and not path.name.startswith(("_", ".")):  # a folder is a partition, as [file=a.parquet]
                yield path, parquet.read_metadata(path).num_rows, path.stat().st_size

    # Content.

    def _check_place(self) -> None:
        status = _look_up(self.path)
        if status is not None and not stat.S_ISLNK(status.st_mode):
            raise SinkError(f"[KVSPOOL_SINK_TAKEN] {self.path} exists already, and no pipeline made it; name another path")

    def _locked(self) -> Descriptor:
        file = Descriptor(self.state / "lock", os.O_RDWR | os.O_CREAT)
        if not system.port.try_lock_file(file.number, shared=False):
            file.close()
            raise PipelineRuns(f"another process is changing {self.path}; a running pipeline compacts automatically")
        return file

    def _shown(self) -> Version | None:
        """Return the version that the link shows. Raises SinkError for an impossible link."""
        try:
            target = Path(os.readlink(self.path))
        except FileNotFoundError:
            return None
        if target.parent != self._versions.relative_to(self.path.parent) or not _NUMBER.fullmatch(target.name):
            raise SinkError(f"[KVSPOOL_SINK_TAKEN] {self.path} is a link to {target}, which no pipeline made; name another path")
        return read_manifest(self.path.parent / target)

    def _owner(self) -> Owner | None:
        path = self.state / OWNER
        try:
            return documents.from_json(documents.read(path, LARGEST_OWNER), Owner)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise SinkError(f"[KVSPOOL_SINK_DAMAGED] {path} doesn't name the table's owner: {error}; restore it, or start again") from None

    def _clear(self) -> None:
        """Remove the unfinished work of a killed process. Raises SinkError if no version is shown although there was one."""
        if self.version is None:
            self._recover_link()
        self._discard(self._stagings)
        with suppress(FileNotFoundError):
            system.port.remove(self.state / "next")
        for number in self._numbers():
            if self.version is None or number > self.version.number:
                self._discard(self._folder(number))

    def _recover_link(self) -> None:
        """Show the first version if it is complete. A later one exists only if the link showed the one before."""
        last = max(self._numbers(), default=0)
        if last > 1:
            target = self._folder(last).relative_to(self.path.parent)
            raise SinkError(
                f"[KVSPOOL_SINK_DAMAGED] the link {self.path} is missing, but {self.state} has versions of it; restore it with "
                f"ln -s {target} {self.path}, or move {self.state} away to start again"
            )
        if last and self._is_whole(last):
            self._show(last)
            self.version = self._shown()

    def _is_whole(self, number: int) -> bool:
        folder = self._folder(number)
        try:
            files = read_manifest(folder).files
        except SinkError:
            return False
        found = [(file.size, system.port.look_up(folder / file.name)) for file in files]
        return all(status is not None and status.st_size == size for size, status in found)

    def _numbers(self) -> list[int]:
        return sorted(int(name) for name in system.port.names(self._versions) if _NUMBER.fullmatch(name))

    @property
    def next_number(self) -> int:
        """The number of the next version, which no file's name has yet."""
        return 1 if self.version is None else self.version.number + 1

    def _folder(self, number: int) -> Path:
        return self._versions / f"{number:010}"

    def _discard(self, folder: Path) -> None:
        """Remove an unused folder. Its manifest is removed first, so that a part of it never looks like a version."""
        with suppress(FileNotFoundError, NotADirectoryError):
            system.port.remove(folder / MANIFEST)
        shutil.rmtree(folder, ignore_errors=True)


def snapshot(path: str | os.PathLike[str]) -> Path:
    """Return the folder of the version that a table shows now. It doesn't change while the job keeps the snapshot."""
    return Path(os.path.realpath(path))


def read_manifest(folder: Path) -> Version:
    """Return the manifest of a version: the shown one, or a snapshot. Raises SinkError for an invalid manifest."""
    folder = Path(os.path.realpath(folder))
    path = folder / MANIFEST
    try:
        version = documents.from_json(documents.read(path, LARGEST_MANIFEST), Version)
    except (OSError, ValueError) as error:
        raise SinkError(f"[KVSPOOL_SINK_DAMAGED] {path} doesn't list the version's files: {error}; restore it, or start again") from None
    for file in version.files:
        parts = file.name.split("/")
        if any(part in ("", ".", "..") for part in parts) or file.rows < 0 or file.size < 0:
            raise SinkError(f"[KVSPOOL_SINK_DAMAGED] {path} names the file {file.name!r}, which can't be one of its own")
    if folder.name != f"{version.number:010}":
        raise SinkError(f"[KVSPOOL_SINK_DAMAGED] {path} is of version {version.number}")
    return version


def _make(folder: Path) -> None:
    try:
        disk.make_directory(folder)
    except FileNotFoundError:
        _make(folder.parent)
        disk.make_directory(folder)


def _look_up(path: Path) -> Any:
    with suppress(FileNotFoundError):
        return os.lstat(path)
    return None


def _flush(path: Path) -> None:
    with Descriptor(path, os.O_RDONLY) as fd:
        system.port.flush(fd)
