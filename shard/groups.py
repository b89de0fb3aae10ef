"""The groups of a shard set: each member reads its shards as one, and commits to the durable reader of the group's name in each."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from kvspool import Record
from kvspool.engine.wakeups import BLIND_POLL, POLL, Watcher
from kvspool.errors import NoSuchReader
from kvspool.groups.share import Arm, GroupShare
from kvspool.groups.single import ReaderShare, move_to
from kvspool.options import Isolation
from kvspool.reader import Reader
from kvspool.record import Gap
from kvspool.system.handles import Handle, close_all
from shard.merge import FollowingMerge, Merge
from shard.merged import Log

K = TypeVar("K")


class MergedSource(Handle):
    """The source of a member that reads several shards as one; see `kvspool.groups.share.GroupSource`."""

    def __init__(self, merge: Merge[Any]) -> None:
        self._merge = merge

    @property
    def last(self) -> Any:
        """Return the shard of the last item."""
        return self._merge.last

    def __next__(self) -> Any:
        return next(self._merge)

    def idle(self) -> tuple[Watcher | None, float]:
        """Return as `GroupSource.idle`."""
        merge = self._merge
        if not isinstance(merge, FollowingMerge):
            return None, 0.0
        watcher = merge.take_events()
        can_ask = watcher is not None and not watcher.is_blind and all(one.cursor.is_rung for one in merge.sources.values())
        return watcher, POLL if can_ask else BLIND_POLL

    def close(self) -> None:
        """Close the logs that are read."""
        self._merge.close()


class GroupMerge(FollowingMerge[Any]):
    """A merge that also wakes when the group changes. It never waits itself."""

    def __init__(self, arm: Arm) -> None:
        super().__init__(None, "yield", 0.0)
        self._arm = arm

    def arm(self) -> Watcher:
        watcher = super().arm()
        try:
            self._arm(watcher)
        except BaseException:
            watcher.close()
            raise
        return watcher


class MergedShare(GroupShare[K]):
    """The shards of a group whose owned ones are merged."""

    @abstractmethod
    def _open(self, keys: Collection[K], merge: Merge[Any], *, bounded: bool) -> None:
        """Add owned shards to a merge, at their positions."""

    def armed(self, arm: Arm) -> Arm:
        """Return a function that adds the group's files, and the share's own ones, to a watcher."""
        return arm

    def source(self, keys: Collection[K], *, bounded: bool, arm: Arm) -> MergedSource:
        merge: Merge[Any] = Merge(None, "yield") if bounded else GroupMerge(self.armed(arm))
        try:
            self._open(keys, merge, bounded=bounded)
        except BaseException:
            merge.close()
            raise
        return MergedSource(merge)


def reached(item: Record | Gap) -> int:
    """Return the sequence after a record or a Gap."""
    return item.last + 1 if isinstance(item, Gap) else item.sequence + 1


def reset(shards: list[Log], path: object, name: str, start: Any) -> None:
    """Move the durable readers of a name in all shards, after all of them are locked. Raises NoSuchReader, ReaderBusy."""
    if not any(one.name == name for log in shards for one in log.readers()):
        raise NoSuchReader(f"{path} has no group {name!r}")
    readers: list[Reader] = []
    try:
        for log in shards:
            readers += [log.reader(name)]
        for log, reader in zip(shards, readers, strict=True):
            move_to(reader, log, start)
        for reader in readers:
            reader.commit()
    finally:
        close_all(readers)


class ShardSetShare(ReaderShare, MergedShare[int]):
    """The shards of a set."""

    def __init__(
        self, shards: list[Log], name: str, start: Any, isolation: Isolation, placed: Callable[[int], Callable[..., Any]]
    ) -> None:
        """placed: returns the function that creates the records of a shard."""
        super().__init__()
        self._shards = shards
        self._names = {f"{index:03x}": index for index in range(len(shards))}
        self._name = name
        self._start = start
        self._isolation = isolation
        self._placed = placed

    def shards(self) -> dict[str, int]:
        return self._names

    def _opened(self, key: int) -> Reader:
        start = self._start.get(key, "earliest") if isinstance(self._start, Mapping) else self._start
        return self._shards[key].reader(self._name, start, isolation=self._isolation)

    def displace(self, key: int, pid: int) -> None:
        self._shards[key].displace_reader(self._name, pid)

    def passed(self, items: Mapping[int, Any]) -> None:
        for key, item in items.items():
            self._readers[key].pass_to(reached(item))

    def _open(self, keys: Collection[int], merge: Merge[Any], *, bounded: bool) -> None:
        for key in sorted(keys):
            merge.add(key, self._readers[key].cursor_here(bounded=bounded), self._placed(key))
