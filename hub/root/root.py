"""The hub root: a directory that holds the shards of many clients.

    [root]/[client].[bit].[index]/

On one host the clients write there directly; followers of the root notice new clients by inotify. A client's id is the prefix of its shard
set, and not empty. Other names could leave the root or be mistaken for another client's shard.

**Order.** As in `shard.merge`: by timestamp among the available records; each shard always in its own order.

**New and removed clients.** `create` makes a client's shards in order. A set without its last ones is therefore being created, and its
existing shards are read. A client whose directories are removed is read to its end and then forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hub.client_ids import check_client
from hub.root import positions, requeued, tasks
from hub.root.following import FollowingRoot
from hub.root.groups import HubShare
from hub.root.groups import listing as group_listing
from hub.root.holds import RetentionHolds
from hub.root.positions import Key
from hub.root.reader import HubReader, HubReaderStats, delete, listing
from hub.root.records import HubRecord
from hub.root.shards import OpenCursor
from kvspool import LogStats, Record, system
from kvspool.engine.iteration import Iterations
from kvspool.errors import Closed, KvspoolError, LogExists, LogNotFound, NoSuchReader, NotALog
from kvspool.groups.files import SUFFIX
from kvspool.groups.layout import MOST_SHARDS
from kvspool.groups.stats import GroupStats
from kvspool.options import TIMEOUT, Isolation, OnGap
from kvspool.spool.format import CONTROL_FILE
from kvspool.system import disk
from kvspool.system.handles import close_all
from kvspool.tasks.dead import path_beside
from kvspool.tasks.layout import Wanted
from kvspool.tasks.stats import TaskStats
from shard import ShardSet, TooFewDescriptors, descriptors, route
from shard.kernel.merge import placed
from shard.merge import UNREADABLE, FollowingMerge, Merge
from shard.merged import Log, MergedLogs, moved
from shard.shardset import open_shard

M = TypeVar("M", bound=Merge[Any])


class ClientStats(msgspec.Struct, frozen=True):
    """The content of one client: records and bytes over all its shards, and the statistics of each shard."""

    client: str
    bits: int
    records: int
    used: int
    capacity: int
    last_timestamp: int
    shards: list[LogStats]


class HubStats(msgspec.Struct, frozen=True):
    """The content of a hub root."""

    path: str
    records: int
    used: int
    capacity: int
    clients: list[ClientStats]


class HubRoot(MergedLogs[Key, HubRecord, datetime]):
    """A handle of a hub root. Get it from `HubRoot.open`. It can be shared by threads, and survives a fork."""

    HELPERS = frozenset(("add_shards", "forget", "logs", "open_log", "shard_paths"))

    def __init__(self, path: Path, timeout: float) -> None:
        """Use an existing directory; `timeout` is how long a writer waits for another one, in seconds."""
        self.path = path
        self._timeout = timeout
        self._logs: dict[tuple[str, int], Log] = {}
        self._holds = RetentionHolds(path)
        self._most = 1  # the largest number of shards seen so far
        self._is_closed = False
        self._iterations = Iterations()

    @classmethod
    def create(cls, root: str | os.PathLike[str], *, exist_ok: bool = False, timeout: float = TIMEOUT) -> HubRoot:
        """Create an empty directory for a hub root, accessible only to its owner, and open it.

        exist_ok: open an existing root, as `open` does. Raises LogExists if the path exists; with `exist_ok`, NotALog if it can't be a hub
        root; FileNotFoundError without its parent; or the system's OSError.
        """
        path = Path(os.path.abspath(root))
        disk.check_parent(path)
        if not disk.make_directory(path):
            if exist_ok:
                return cls.open(path, timeout=timeout)
            raise LogExists(f"{path} exists already; hub.open opens it")
        return cls(path, timeout)

    @classmethod
    def open(cls, root: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> HubRoot:
        """Open the hub root at a directory, which may be empty. Raises LogNotFound, and NotALog if it is no hub root."""
        path = Path(os.path.abspath(root))
        if not os.path.lexists(path):
            raise LogNotFound(f"{path} does not exist; hub.create makes a hub root")
        if not path.is_dir():
            raise NotALog(f"{path} is not a directory, so it can't be a hub root")
        if os.path.lexists(path / CONTROL_FILE):
            raise NotALog(f"{path} is one log, not a hub root; kvspool.open opens it")
        return cls(path, timeout)

    # Clients.

    def clients(self) -> list[str]:
        """Return the ids of the existing clients, sorted."""
        self._check_open()
        return [prefix for prefix in route.scan(self.path) if _is_client(prefix)]

    def client(self, client: str) -> ShardSet:
        """Open a client's shards for reading and writing; the caller closes them. Raises as `ShardSet.open`, and ValueError for a bad id.
        """
        self._check_open()
        return ShardSet.open(self.path, prefix=check_client(client), timeout=self._timeout)

    def create_client(self, client: str, *, bits: int, **options: Any) -> ShardSet:
        """Create a client's shards and open them; `options` are those of `ShardSet.create`. Raises ValueError for a bad id."""
        self._check_open()
        return ShardSet.create(self.path, prefix=check_client(client), bits=bits, timeout=self._timeout, **options)

    # Reading.

    def _fill(self, merge: M, start: str | datetime, bounded: bool, isolation: Isolation) -> M:
        self.add_shards(merge, _cursors_at(start, bounded, isolation), is_bounded=bounded)
        return self._iterations.add(merge)

    def _follower(
        self, limit: int | None, on_gap: OnGap, timeout: float | None, isolation: Isolation, spin: float
    ) -> FollowingMerge[Any]:
        return FollowingRoot(self, limit, on_gap, timeout, isolation, spin)

    def get(self, client: str, shard: int, sequence: int) -> HubRecord:
        """Return a record by its place. Raises LogNotFound for a shard that doesn't exist, and the errors of `kvspool.Log.get`."""
        return self.placed_at((client, shard), self._log(client, shard).get(sequence))

    def view(self, client: str, shard: int, sequence: int) -> AbstractContextManager[memoryview]:
        """Return a context manager with a view of the stored bytes of a record's value; see `kvspool.Log.view` and `get`."""
        return self._log(client, shard).view(sequence)

    def _log(self, client: str, shard: int) -> Log:
        self._check_open()
        for key, path in self.shard_paths():
            if key == (client, shard):
                log = self.open_log(key, path, may_be_gone=True)
                if log is not None:
                    return log
        raise LogNotFound(f"{self.path} has no shard {shard} of a client {client!r}")

    def each_log(self) -> Iterator[tuple[Key, Log]]:
        return ((key, log) for key, _, log in self.logs())

    def placed_at(self, key: Key, record: Record) -> HubRecord:
        return moved(HubRecord, record, client=key[0], shard=key[1])

    def add_shards(self, merge: Merge[Any], open_cursor: OpenCursor, *, is_bounded: bool) -> None:
        """Add to the merge every shard that it doesn't read yet.

        A shard that can't be opened stops no other shard: the merge raises its error once and continues. A follower reads the shard after
        its repair, and raises the error of another shard that replaces it.
        """
        self._check_open()
        following = merge if isinstance(merge, FollowingRoot) else None
        paths = self.shard_paths(following)
        with descriptors.for_logs(self.path, self._most):
            for key, path in paths:
                if key not in merge.sources:
                    try:
                        log = self.open_log(key, path, may_be_gone=not is_bounded)
                        cursor = None if log is None else open_cursor(key, path, log)
                    except UNREADABLE as error:
                        merge.refuse(key, error, _identity(path))
                        continue
                    if cursor is not None:
                        if following is not None:
                            following.clients.add(key[0])
                            following.names[path.name] = key
                        merge.add(key, cursor, placed(HubRecord, key[1], key[0]))

    def shard_paths(self, following: FollowingRoot | None = None) -> list[tuple[tuple[str, int], Path]]:
        """Return client, index and path of each existing shard. Raises ShardError if a client's shards form no set.

        following: return only clients of which this follower doesn't read all shards. A client that it knows may lack shards, because it is
        being removed.
        """
        shards = []
        for prefix, found in self._found(following).items():
            if _is_client(prefix):
                if (following is None or prefix not in following.clients) and not found.is_being_made:
                    found.check_complete(self.path)
                shards += [((prefix, index), path) for index, path in found.paths(self.path)]
        self._most = max(self._most, len(shards))
        return shards

    def logs(self, *, passes_damaged: bool = False) -> Iterator[tuple[Key, Path, Log]]:
        """Yield client and index, path and log of each existing shard. passes_damaged: omit shards that can't be opened."""
        self._check_open()
        paths = self.shard_paths()
        with descriptors.for_logs(self.path, self._most):
            for key, path in paths:
                try:
                    log = self.open_log(key, path, may_be_gone=True)
                except UNREADABLE:
                    if not passes_damaged:
                        raise
                    continue
                if log is not None:
                    yield key, path, log

    def _found(self, following: FollowingRoot | None) -> dict[str, route.ShardDirectories]:
        """Return the shard sets of the root. A follower looks often, so it gets only clients with a name that it doesn't read."""
        names = system.port.names(self.path)
        if following is not None:
            clients = {name.partition(".")[0] for name in names if name not in following.names} - {""}
            names = [name for name in names if name.partition(".")[0] in clients] if clients else []
        return route.found_in(self.path, names)

    def open_log(self, key: tuple[str, int], path: Path, may_be_gone: bool = False) -> Log | None:
        """Return the open log of a shard; None if it has just been removed, or if only its empty directory is left."""
        log = self._logs.get(key)
        if log is None or log.closed or log.has_vanished():
            try:
                log = self._logs[key] = open_shard(path, self._timeout)
            except LogNotFound:
                return None
            except NotALog:
                if may_be_gone:
                    return None
                raise
        return log

    def forget(self, key: tuple[str, int]) -> None:
        """Close the log of a removed shard; its disk space is freed when the last reader closes it."""
        log = self._logs.get(key)
        if log is not None and (log.closed or log.has_vanished()):
            del self._logs[key]

    # Durable readers and groups.

    def groups(self) -> list[GroupStats]:
        self._check_open()
        with descriptors.for_logs(self.path, self._most):
            return group_listing(self)

    def reset_group(self, name: str, start: str | datetime) -> None:
        if name not in positions.names(self.path):
            raise NoSuchReader(f"{self.path} has no group or durable reader {name!r}")
        with self.reader(name) as reader:
            if start == "earliest":
                reader.rewind()
            elif isinstance(start, datetime):
                reader.seek_time(start)
            else:
                reader.seek({key: end for key, (_, end) in self.extent().items()})
            reader.commit()

    def _group_file(self, name: str) -> tuple[Path, int]:
        self._check_open()
        tasks.refuse_task_name(self.path, name)
        return positions.make_directory(self.path) / positions.path_of(self.path, name).with_suffix(SUFFIX).name, MOST_SHARDS

    def _share_of(self, name: str, start: str | datetime, isolation: Isolation) -> HubShare:
        return HubShare(self, name, _checked_start(start), isolation)

    def reader(self, name: str, start: str | datetime = "earliest", *, isolation: Isolation = "appended") -> HubReader:
        """Open the durable reader `name`: it keeps a position in every shard, resumes there next time, and is open only once.

        name: up to 200 letters, digits and _ @ . -, not beginning with . or -. start: where a new reader begins in the existing clients, as
        in `read`; later clients are read from their earliest record. isolation: as in `read`. Raises ReaderBusy (which names the holder),
        Corruption (its positions are damaged), ValueError, ShardError, or the system's OSError.
        """
        self._check_open()
        tasks.refuse_task_name(self.path, name)
        with descriptors.for_logs(self.path, self._most):
            return self._iterations.add(HubReader(self, name, _checked_start(start), isolation))

    def readers(self) -> list[HubReaderStats]:
        """Return the state of each durable reader: name, lag in each shard, time of its last commit, holder."""
        self._check_open()
        return listing(self)

    def delete_reader(self, name: str) -> None:
        """Delete a durable reader. Raises NoSuchReader, ReaderBusy while it is open, or is a task list, ValueError."""
        self._check_open()
        tasks.refuse_task_name(self.path, name)
        delete(self.path, name)

    # Tasks.

    def task_stats(self) -> list[TaskStats]:
        self._check_open()
        return tasks.listing(self.path)

    def delete_tasks(self, name: str) -> None:
        self._check_open()
        tasks.delete(self.path, name)
        delete(self.path, name)

    def requeue(self, name: str, dead_letters: Any = None) -> int:
        self._check_open()
        tasks.refuse_no_list(self.path, name)
        return requeued.requeue(self.path, name, path_beside(self.path, name) if dead_letters is None else Path(dead_letters))

    def _task_path(self) -> Path:
        return self.path

    def _task_sources(self, name: str, start: str | datetime, wanted: Wanted) -> tasks.HubSources:
        self._check_open()
        return tasks.HubSources(self, name, _checked_start(start), wanted)

    def held(self, client: str, index: int) -> int | None:
        """Return the lowest sequence of a shard that a durable reader has yet to read, as of its last commit; None without readers.

        For a process that trims the shard: lists a few names, and reads files only after a commit. A reader without a position in the
        shard, or with unreadable positions, holds back all of it: 0.
        """
        self._check_open()
        return self._holds.lowest(check_client(client), index)

    # Maintenance.

    def stats(self, damaged: list[str] | None = None) -> HubStats:
        """Return the current statistics of all clients.

        damaged: receives a sentence for each damaged shard, and the others are counted. None: the first error is raised.
        """
        self._check_open()
        bits = {prefix: found.bits for prefix, found in route.scan(self.path).items() if _is_client(prefix)}
        shards: dict[str, list[LogStats]] = {client: [] for client in bits}
        paths = self.shard_paths()
        for key, path in paths:
            try:
                with descriptors.for_logs(self.path, self._most):
                    log = self.open_log(key, path)
                    if log is not None:
                        shards.setdefault(key[0], []).append(log.stats())
            except TooFewDescriptors:
                raise
            except KvspoolError as error:
                if damaged is None:
                    raise
                damaged.append(f"{key[0]} shard {key[1]}: {error}")
        clients = [_client_stats(client, bits[client], stats) for client, stats in shards.items() if client in bits]
        return HubStats(
            path=str(self.path),
            records=sum(stats.records for stats in clients),
            used=sum(stats.used for stats in clients),
            capacity=sum(stats.capacity for stats in clients),
            clients=clients,
        )

    @property
    def closed(self) -> bool:
        """Return whether the handle is closed."""
        return self._is_closed

    def close(self) -> None:
        """Close all logs. Every later call raises Closed, as do iterations; those that wait in other threads do so at once."""
        self._is_closed = True
        self._iterations.end(self._closed_words())
        logs, self._logs = self._logs, {}
        close_all(logs.values())

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed(self._closed_words())

    def _closed_words(self) -> str:
        return f"{self.path} was closed; open it again"

    def __repr__(self) -> str:
        return f"<HubRoot {self.path}{' closed' if self.closed else ''}>"


def _identity(path: Path) -> str:
    """Return the identity that distinguishes a shard from a later one at the same path; "" if it has just been removed."""
    try:
        return system.port.identity(path)
    except OSError:
        return ""


def _checked_start(start: str | datetime) -> str | datetime:
    if isinstance(start, int):
        raise ValueError(f'start is "earliest", "latest" or an aware datetime here, not {start}: each shard has its own sequences')
    return start


def _cursors_at(start: str | datetime, bounded: bool, isolation: Isolation) -> OpenCursor:
    start = _checked_start(start)
    return lambda key, path, log: log.cursor(start, bounded=bounded, isolation=isolation)


def _is_client(prefix: str) -> bool:
    try:
        check_client(prefix)
    except ValueError:
        return False
    return True


def _client_stats(client: str, bits: int, shards: list[LogStats]) -> ClientStats:
    return ClientStats(
        client=client,
        bits=bits,
        records=sum(stats.records for stats in shards),
        used=sum(stats.used for stats in shards),
        capacity=sum(stats.capacity for stats in shards),
        last_timestamp=max((stats.last_timestamp for stats in shards), default=0),
        shards=shards,
    )
