"""The task lists of a hub root: one window for each shard, and workers that take tasks of all of them in turn.

The files of a list are in a directory next to the positions of the durable reader with its name. There is one for each shard, with the name
of the shard's directory. Workers hold that reader's lock together, so it can't be open at the same time. They store its positions for
retention. Records that were put back are in one more shard; see `requeued`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import kvspool
from hub.root import lease, positions, requeued
from hub.root.lease import ReaderLease
from hub.root.positions import Key
from hub.root.reader import place_of
from hub.root.records import HubRecord
from hub.root.shards import RootShards
from kvspool import system
from kvspool.engine import locks
from kvspool.engine.wakeups import ENTERED, Watcher
from kvspool.errors import LockTimeout, NoSuchReader, ReaderBusy
from kvspool.groups.files import SUFFIX as GROUP_SUFFIX
from kvspool.groups.stats import look as look_at_group
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import close_all
from kvspool.tasks.files import SUFFIX, workers_in
from kvspool.tasks.layout import Wanted
from kvspool.tasks.single import enter
from kvspool.tasks.source import TaskSource
from kvspool.tasks.stats import TaskStats, look
from kvspool.tasks.worker import Sources, TaskWorker
from shard.kernel.merge import placed
from shard.merge import UNREADABLE
from shard.merged import Log
from shard.tasks import part_of

LOCK = "keep.lock"  # of the process that stores positions
SHARE = 20  # at least so many times the duration of a store are between two
_ROOT = "the root itself"  # the key of its watch


def directory_of(root: Path, name: str) -> Path:
    """Return the directory of a task list. Raises ValueError for an invalid name."""
    return positions.path_of(root, name).with_suffix(SUFFIX)


class HubSources(Sources):
    """Opens the sources of a worker of a hub root."""

    def __init__(self, root: RootShards, name: str, start: str | datetime, wanted: Wanted) -> None:
        self._root = root
        self._path = positions.path_of(root.path, name)
        self._name = name
        self._start = start
        self._wanted = wanted
        self._lease: ReaderLease | None = None
        self._directory = directory_of(root.path, name)
        self._kept = _Kept(self._path, self._directory)
        self._requeued: Any = None  # the open log of records that were put back

    def open(self, worker: TaskWorker) -> list[TaskSource]:
        """Take the reader's name, together with other workers, and return a source for each shard. Raises ReaderBusy."""
        positions.make_directory(self._root.path)
        self.close()
        self._lease = ReaderLease(self._path.with_suffix(lease.SUFFIX), self._name, shared=True)
        try:
            group = look_at_group(self._path.with_suffix(GROUP_SUFFIX), {})
            if group is not None and group.members:
                raise ReaderBusy(f"{self._name!r} is a group of {self._root.path} with {len(group.members)} members; take another name")
            disk.make_directory(self._directory)
            with self._kept.locked():
                self._begin()
            return self.renewed(worker, [])
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Store the positions of a new list, which keep its records. Raises ReaderBusy for a reader that is moved over the network."""
        stored = positions.load(self._path)
        if stored is None:
            places = {key: place_of(path, log, log.sequence_at(self._start)) for key, path, log in self._root.logs(passes_damaged=True)}
            positions.store(self._path, places)
        elif stored.owner:
            raise ReaderBusy(f"the reader {self._name!r} belongs to {stored.owner}, and is moved over the network; take another name")
        else:
            positions.absorb(self._path)

    def renewed(self, worker: TaskWorker, sources: list[TaskSource]) -> list[TaskSource]:
        """Return the sources with those of new shards, and without those of removed ones, which are closed."""
        paths = dict(self._root.shard_paths()) | requeued.found(self._root.path, self._name)
        known = {one.shard: one for one in sources}
        gone = [one for key, one in known.items() if key not in paths or one.log.has_vanished()]
        for one in gone:
            one.close()
            self._root.forget(one.shard)
        left = [one for one in sources if one not in gone]
        wanted = part_of(self._wanted, len(paths))
        added: list[TaskSource] = []
        try:
            for key, path in paths.items():
                if key not in known or known[key] in gone:
                    added += self._opened(worker, key, path, wanted)
        except BaseException:
            close_all(added)
            raise
        return left + added

    def _opened(self, worker: TaskWorker, key: Key, path: Path, wanted: Wanted) -> Iterator[TaskSource]:
        """Yield the source of a shard; nothing while it can't be read."""
        if key == requeued.KEY:
            self._requeued = kvspool.open(path)
            yield requeued.source(self._requeued, worker, wanted)
            return
        try:
            log = self._root.open_log(key, path, may_be_gone=True)
        except UNREADABLE:
            return
        if log is not None:
            keep, make = partial(self._kept.store, key, path, log), placed(HubRecord, key[1], key[0])
            place = self._kept.position(key, log)
            yield enter(log, key, worker, self._directory / f"{path.name}{SUFFIX}", place, wanted, keep, make)

    def watch(self, watcher: Watcher) -> None:
        """Let a watcher wake when there may be new shards."""
        watcher.watch(self._root.path, ENTERED, _ROOT)

    def close(self) -> None:
        """Release the reader's name."""
        taken, self._lease = self._lease, None
        log, self._requeued = self._requeued, None
        for one in (taken, log):
            if one is not None:
                one.close()


class _Kept:
    """The positions of a list's durable reader, which its workers store."""

    def __init__(self, path: Path, directory: Path) -> None:
        self._path = path
        self._directory = directory
        self._places: dict[Key, Any] = {}
        self._after = 0.0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the positions for the `with` block. Raises LockTimeout."""
        file = Descriptor(self._directory / LOCK, os.O_RDWR | os.O_CREAT)
        with file, locks.held(file, 0, 10.0, lambda: "another worker stores positions"):
            yield

    def position(self, key: Key, log: Log) -> int:
        """Return the stored position in a shard; without one that belongs to its log, that of the earliest record."""
        stored = positions.load(self._path)
        place = None if stored is None else stored.places.get(key)
        if place is None or positions.why_replaced(place, log):
            return log.sequence_at("earliest")
        return place.sequence

    def store(self, key: Key, path: Path, log: Log, low: int) -> bool:
        """Store a position in a shard together with others that wait; False if it waits, too. See `kvspool.tasks.source.Keep`."""
        log.flush_for_commit(low)
        self._places[key] = place_of(path, log, low)
        began = system.port.monotonic()
        if began < self._after:
            return False
        try:
            with self.locked():
                positions.merge(self._path, self._places)
        except LockTimeout:
            return False
        self._places.clear()
        now = system.port.monotonic()
        self._after = now + SHARE * (now - began)
        return True


def listing(root: Path, name: str | None = None) -> list[TaskStats]:
    """Return the state of each task list in each shard, and in the log of records that were put back."""
    directory = positions.directory_of(root)
    names = [one.removesuffix(SUFFIX) for one in disk.names(directory) if one.endswith(SUFFIX)]
    found = []
    for one in sorted(names):
        if name in (None, one):
            place = directory / f"{one}{SUFFIX}"
            found += [look(place / file, file.removesuffix(SUFFIX)) for file in sorted(disk.names(place)) if file.endswith(SUFFIX)]
            found.append(requeued.state(root, one))
    return [one for one in found if one is not None]


def refuse_task_name(root: Path, name: str) -> None:
    """Raise ReaderBusy if there is a task list of that name."""
    if system.port.look_up(directory_of(root, name)) is not None:
        raise ReaderBusy(f"{name!r} is a task list of {root}: use tasks({name!r}), or delete it with delete_tasks")


def refuse_no_list(root: Path, name: str) -> None:
    """Raise NoSuchReader if there is no task list of that name."""
    if system.port.look_up(directory_of(root, name)) is None:
        raise NoSuchReader(f"{root} has no task list {name!r}")


def delete(root: Path, name: str) -> None:
    """Delete the files of a task list, and records that were put back. Raises NoSuchReader; ReaderBusy while it has workers, or is open as
    a reader.
    """
    directory = directory_of(root, name)
    refuse_no_list(root, name)
    taken = ReaderLease(positions.path_of(root, name).with_suffix(lease.SUFFIX), name)
    try:
        for file in disk.names(directory):
            if workers_in(directory / file):
                raise ReaderBusy(f"the task list {name!r} of {root} has workers; close them first")
        for file in disk.names(directory):
            with suppress(FileNotFoundError):
                system.port.remove(directory / file)
        requeued.delete(root, name)
        system.port.remove_directory(directory)
        disk.flush_directory(directory.parent, done=f"the task list {name!r} was deleted")
    finally:
        taken.close()
