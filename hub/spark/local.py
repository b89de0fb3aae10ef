"""Shards on this host: one log, the shard sets under a root, or the clients of a hub root.

The driver keeps the logs open and checks them often. Without changes that costs a few loads for a spool, and three `stat` for a journal. A
directory is listed again only after its modification time has changed. A task opens a log by its path, takes no lock, and keeps it
open for the next task of its process.

**New and removed logs.** The next look finds a new client or shard; a set that is being created is read as far as it exists. A removed one
is missing from the next look. If another log replaces one, its id differs. A resized spool is the same log.

**A durable reader** is opened only during a commit, so a restarted query finds it free. Under a hub root it is the root's reader; of a
single log, or a set without a prefix, it is each log's own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hub.root.file_version import UNSTABLE, FileVersion
from hub.spark.errors import DataLossError
from hub.spark.selection import ALL, Selection
from hub.spark.shards import Extent, ShardKey, ShardOffsets, ShardRange
from kvspool import Gap, system
from kvspool.errors import LogNotFound, LogVanished, NotALog, Undecodable
from kvspool.journal.files import LEFTOVERS
from kvspool.opening import logs
from kvspool.options import TIMEOUT, Isolation
from kvspool.system.handles import close_all
from shard import route
from shard.merged import Log
from shard.shardset import open_shard

if TYPE_CHECKING:
    import pyarrow

BATCH = 1 << 14  # records of a batch for Spark, which then fits into the caches of the processor
MOST_OPEN = 64  # logs that a worker process keeps open
AGAIN = 0.5  # seconds between two checks of names that are no shards yet
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_logs: OrderedDict[Path, Log] = OrderedDict()  # a worker process runs many tasks; its logs stay open between them
_opening = threading.Lock()  # threads may read at once


@dataclass(frozen=True)
class LocalRange(ShardRange):
    """Sequences of a log on the host where the task runs."""

    path: str

    def batches(self, most: int = BATCH) -> Iterator[pyarrow.RecordBatch | Gap]:
        """See `ShardRange.batches`. most: records of a batch."""
        from kvspool import arrow

        with closing(self._open().cursor(self.first, bounded=True, end=self.end)) as cursor:
            count = self.end - self.first
            if cursor.key_table is None:
                yield from arrow.batches(cursor, count, min(count, most))
            else:
                yield from _without_keys(cursor, self.first, self.end, most)

    def _open(self) -> Log:
        log = _opened(Path(self.path))
        if log.log_id.hex() != self.log_id or log.end() < self.end:  # a journal may have no id
            raise DataLossError(
                f"[KVSPOOL_LOG_REPLACED] topic {self.key.topic}, partition {self.key.partition}: {self.path} was replaced by another log "
                "since the query was planned; run the query again, a stream from a new checkpoint"
            )
        return log


def _without_keys(cursor: Any, first: int, end: int, most: int) -> Iterator[pyarrow.RecordBatch | Gap]:
    """Yield the records first..end-1 with keyed values as plain MessagePack, as a hub sends them. A value whose keys are lost stays as it
    is stored: its indexes may mean anything.
    """
    from kvspool import arrow

    while first < end:
        try:
            found = arrow.next_batch(cursor, min(end - first, most), coded=True)
        except Undecodable:
            cursor.go_to(first)
            found = arrow.next_batch(cursor, 1)
        if isinstance(found, Gap):
            first = found.last + 1
            yield found
        elif found.num_rows:
            first = found.column("sequence")[-1].as_py() + 1
            yield found.select(arrow.SCHEMA.names)
        else:
            return


def _opened(path: Path) -> Log:
    """Return the log at a path; one that this process has already open, if it still exists."""
    with _opening:
        log = _logs.pop(path, None)
        if log is None or log.closed or log.has_vanished():
            log = open_shard(path, TIMEOUT)
        _logs[path] = log
        if len(_logs) > MOST_OPEN:
            _logs.popitem(last=False)  # it closes with the last iterator that reads it
        return log


def close_logs() -> None:
    """Close the logs that this process keeps open for its next task."""
    while _logs:
        _logs.popitem()[1].close()


class LocalShards:
    """The shards at a path; see `SparkShards`. Use it in one thread of one process."""

    def __init__(
        self, path: Path, selection: Selection = ALL, *, reader: str | None = None, isolation: Isolation = "appended"
    ) -> None:
        """Examine the path. reader: the durable reader that `commit` moves; a new one is created at once, and holds back records from now
        on.

        isolation: whether records that are not on disk yet count.

        Raises LogNotFound, NotALog, ValueError for a selection of shards of a single log, PermissionError without the right to have a
        reader, ReaderBusy.
        """
        self.path = path
        self._isolation = isolation
        self._reader = reader
        self._looks: dict[ShardKey, _Look] = {}
        self._names: _Names | None = None
        if logs.lies_at(path):
            if not selection.is_all:
                raise ValueError(f"{path} is one log, not a root of shards: it has no topics to select; leave out {selection}")
            self._looks[ShardKey(path.name, 0)] = _Look(path)
            self._only().refresh()
        elif path.is_dir():
            self._names = _Names(path, selection)
        else:
            raise LogNotFound(f"{path} does not exist, or is neither a log nor a root of shards")
        if reader is not None:
            self._make_reader(reader)

    def _make_reader(self, name: str) -> None:
        try:
            self.commit({})
        except PermissionError as error:
            words = f"the durable reader {name!r} of option groupId needs the right to write: {error.strerror}"
            raise PermissionError(error.errno, words, error.filename or str(self.path)) from None

    def expect(self, noted: ShardOffsets) -> None:
        """See `SparkShards.expect`: a log of this host needs no more than its own sequences."""

    def away(self) -> dict[str, str]:
        """See `SparkShards.away`."""
        return {}

    def look(self) -> dict[ShardKey, Extent]:
        """See `SparkShards.look`. Raises LogNotFound for a removed log or root, ShardError for shards that form no set."""
        if self._names is None:
            self._only().refresh()
        else:
            self._find(self._names)
        extents = {}
        for key, look in self._looks.items():
            extent = look.extent(self._isolation)
            if extent is not None:
                extents[key] = extent
            elif self._names is None:
                raise LogNotFound(f"{self.path} is gone")
        return extents

    def _only(self) -> _Look:
        (look,) = self._looks.values()
        return look

    def _find(self, names: _Names) -> None:
        """Add new shards, and close removed ones."""
        found = names.changed(all(look.log is not None for look in self._looks.values()))
        if found is not None:
            for key in [key for key, look in self._looks.items() if found.get(key) != look.path]:
                self._looks.pop(key).close()  # it was removed, or belongs now to a set with another number of shards
            self._looks = {key: self._looks.get(key) or _Look(path) for key, path in sorted(found.items())}
            for look in self._looks.values():
                look.refresh()

    def sequence_at(self, key: ShardKey, timestamp: int) -> int | None:
        """See `SparkShards.sequence_at`. Raises OutOfRange for a format whose records have no times."""
        log = self._log(key)
        moment = EPOCH + timedelta(microseconds=timestamp // 1000)
        for record in log.read(moment, on_gap="skip", isolation=self._isolation):
            if record.timestamp >= timestamp:  # a moment has microseconds
                return int(record.sequence)
        return None

    def has_ordered_times(self, key: ShardKey) -> bool:
        """See `SparkShards.has_ordered_times`."""
        return self._log(key).room.is_ordered

    def range(self, key: ShardKey, first: int, end: int) -> LocalRange:
        """See `SparkShards.range`."""
        log = self._log(key)
        return LocalRange(key, log.log_id.hex(), first, end, str(self._looks[key].path))

    def _log(self, key: ShardKey) -> Log:
        log = self._looks[key].log if key in self._looks else None
        if log is None:
            raise LogNotFound(f"{self.path} has no partition {key.partition} of {key.topic}")
        return log

    def commit(self, ends: Mapping[ShardKey, int]) -> None:
        """See `SparkShards.commit`. On disk on return, except for a spool's own reader; see `kvspool.spool.reader`.

        Raises ReaderBusy, PermissionError.
        """
        if self._reader is None:
            return
        if self._names is None or any(not key.topic for key in self.look()):  # no client of a hub has an empty name
            self._commit_to_logs(self._reader, ends)
        else:
            self._commit_to_root(self._reader, ends)

    def _commit_to_logs(self, name: str, ends: Mapping[ShardKey, int]) -> None:
        for key in self.look():
            log = self._log(key)
            with log.reader(name) as reader:
                if key in ends:
                    reader.seek(_within(log, ends[key]))
                    reader.commit()

    def _commit_to_root(self, name: str, ends: Mapping[ShardKey, int]) -> None:
        """Move the reader of the root. In shards outside the query's selection it moves to the end, and holds nothing back."""
        from hub.root.root import HubRoot

        assert self._names is not None
        with HubRoot.open(self.path) as root, root.reader(name) as reader:
            places = {}
            for shard, _, log in root.logs():
                key = ShardKey(*shard)
                if not self._names.selection.has(key):
                    places[shard] = log.end()
                elif key in ends:
                    places[shard] = _within(log, ends[key])
            reader.seek(places)
            reader.commit()

    def close(self) -> None:
        """See `SparkShards.close`."""
        looks, self._looks = self._looks, {}
        close_all(looks.values())


def _within(log: Log, sequence: int) -> int:
    """Return a sequence, or the nearest possible position of a reader of the log."""
    first, end = log.extent()
    return min(max(sequence, first), end)


class _Names:
    """The shards for the names under a root, read again only after a possible change."""

    def __init__(self, root: Path, selection: Selection) -> None:
        self.selection = selection
        self._root = root
        self._version: FileVersion | None = None
        self._again_at = 0.0
        self._is_plain = False  # every name belongs to a shard
        self._complete: set[tuple[str, int]] = set()  # topics, by bits, that were complete once: missing shards of them are being removed

    def changed(self, is_all_there: bool) -> dict[ShardKey, Path] | None:
        """Return the current shards, with their paths; None if they have not changed.

        is_all_there: every one of them has a log.
        """
        version = FileVersion.of(self._root)
        if version is None:
            raise LogNotFound(f"{self._root} is gone")
        if version == self._version and (is_all_there and self._is_plain or system.port.monotonic() < self._again_at):
            return None
        found = self._found()
        self._version = version if version.is_stable else None
        self._again_at = system.port.monotonic() + AGAIN
        return found

    def _found(self) -> dict[ShardKey, Path]:
        shards: dict[ShardKey, Path] = {}
        names = [name for name in system.port.names(self._root) if not name.startswith(".")]
        there, sets = 0, set()
        for topic, found in route.found_in(self._root, names).items():
            there += sum(map(len, found.indexes.values()))
            if self.selection.has_topic(topic):
                sets.add((topic, found.bits))
                if (topic, found.bits) not in self._complete and not found.is_being_made:
                    found.check_complete(self._root)
                    self._complete.add((topic, found.bits))
                shards |= {ShardKey(topic, index): path for index, path in found.paths(self._root)}
        self._complete &= sets
        self._is_plain = there == len(names)  # the other names may yet become logs
        return {key: path for key, path in shards.items() if self.selection.has(key)}


class _Look:
    """One shard, and the result of its last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log: Log | None = None
        self._log_id = ""
        self._extent: Extent | None = None
        self._versions: list[FileVersion | None] = []  # of a journal: its segments' directory, its lock file, its last segment
        self._paths: list[Path] = []  # their paths

    def refresh(self) -> None:
        """Open the log, or another one that has replaced it."""
        if self.log is not None and not self._paths and self.log.has_vanished():  # its files show the same
            self.close()
        if self.log is None:
            self._open()

    def _open(self) -> None:
        try:
            self.log = open_shard(self.path, TIMEOUT)
        except LogNotFound:
            return
        except NotALog:
            if not _is_being_made(self.path):
                raise
            return
        self._log_id = self.log.log_id.hex()

    def extent(self, isolation: Isolation) -> Extent | None:
        """Return the extent of the log; None if there is no log."""
        log = self.log
        try:
            return None if log is None else self._examined(log, isolation)
        except (LogNotFound, LogVanished):
            self.close()
            return None

    def _noted(self, first: int, end: int) -> Extent:
        known = self._extent
        if known is None or known.first != first or known.end != end:
            known = self._extent = Extent(first, end, self._log_id)
        return known

    def _examined(self, log: Log, isolation: Isolation) -> Extent | None:
        """Examine the log; if that costs more than a look at its files, only after one of them has changed."""
        versions = [FileVersion.of(path) for path in self._paths]
        if versions and versions == self._versions:
            return self._extent
        paths = log.extent_files()
        directory = [FileVersion.of(path) for path in paths[:1]]
        if directory != self._versions[:1]:  # another segment, or another journal: our knowledge of it may be outdated
            self.close()
            self._open()
            if self.log is None:
                return None
            log = self.log
            paths = log.extent_files()
        self._paths = paths
        versions = [*directory, *map(FileVersion.of, paths[1:])]  # taken before the look: the next one sees later changes
        self._versions = [version if version is None or version.is_stable else UNSTABLE for version in versions]
        return self._noted(*log.extent(isolation))

    def close(self) -> None:
        """Close the log."""
        log, self.log = self.log, None
        self._extent = None
        self._versions, self._paths = [], []
        if log is not None:
            log.close()


def _is_being_made(path: Path) -> bool:
    """Return whether a path has nothing but the beginnings of a journal."""
    try:
        return LEFTOVERS.issuperset(system.port.names(path))
    except (FileNotFoundError, NotADirectoryError):
        return not path.exists()
