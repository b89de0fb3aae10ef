"""The group of a single log: one shard, so one member owns it, and the others stand by."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from kvspool.engine.wakeups import BLIND_POLL, POLL, Watcher
from kvspool.errors import NoSuchReader, Revoked
from kvspool.groups.share import Arm, Fence, GroupLag, GroupShare, GroupSource, beside, file_name
from kvspool.groups.verb import HasGroups
from kvspool.options import Isolation
from kvspool.system import disk
from kvspool.system.handles import Handle, close_all

if TYPE_CHECKING:
    from kvspool.engine.iteration import Iteration
    from kvspool.groups.stats import GroupStats
    from kvspool.reader import Reader


def log_group_file(path: Path, name: str) -> Path:
    """Return the path of the file of a group of a log, in the hidden directory next to the log, which is created."""
    directory = beside(path)
    disk.make_directory(directory)
    return directory / file_name(name)


def lag_of(lags: Iterable[Any]) -> GroupLag | None:
    """Return the sum of the lags of several logs (`kvspool.reader.Lag`); None if one is unknown."""
    found = list(lags)
    if any(one is None for one in found):
        return None
    seconds = max((one.seconds for one in found), default=0.0)
    return GroupLag(sum(one.records for one in found), sum(one.bytes for one in found), seconds)


def move_to(reader: Any, log: Any, start: Any) -> None:
    """Move a durable reader to a start, without a commit."""
    if start == "earliest":
        reader.rewind()
    elif start == "latest":
        reader.seek(log.end())
    else:
        reader.seek_time(start)


class LogGroups(HasGroups):
    """The groups of a log."""

    HELPERS: ClassVar[frozenset[str]] = frozenset(("displace_reader", "lag"))
    path: Path

    @abstractmethod
    def check_open(self) -> None:
        """Raise Closed if the handle was closed."""

    @abstractmethod
    def reader(self, name: str, start: Any = ..., *, isolation: Any = ...) -> Reader:
        """Open a durable reader."""

    @abstractmethod
    def displace_reader(self, name: str, pid: int) -> None:
        """Let others open a durable reader whose lock the process `pid`, a former member of its group, holds.

        Commits of that one fail by their fence, also pending ones. If another process holds the lock, nothing happens.
        """

    @abstractmethod
    def lag(self, sequence: int) -> Any:
        """Return the lag of a sequence."""

    @abstractmethod
    def readers(self) -> list[Any]:
        """Return the state of each durable reader."""

    def groups(self) -> list[GroupStats]:
        from kvspool.groups import stats

        self.check_open()
        lags = {one.name: one.lag for one in self.readers()}
        found = [stats.look(path, {"log": 0}) for path in stats.group_files(beside(self.path))]
        return [msgspec.structs.replace(one, lag=lag_of([lags.get(one.name)])) for one in found if one is not None]

    def reset_group(self, name: str, start: Any) -> None:
        if all(one.name != name for one in self.readers()):
            raise NoSuchReader(f"{self.path} has no group or durable reader {name!r}")
        with self.reader(name) as reader:
            move_to(reader, self, start)
            reader.commit()

    def _group_file(self, name: str) -> tuple[Path, int]:
        self.check_open()
        return log_group_file(self.path, name), 1

    def _share_of(self, name: str, start: Any, isolation: Isolation) -> SingleShare:
        return SingleShare(self, name, start, isolation)


class ReaderShare(GroupShare[int]):
    """Shards whose positions are those of the durable readers of the group's name, one in the log of each shard."""

    def __init__(self) -> None:
        self._readers: dict[int, Reader] = {}

    @abstractmethod
    def _opened(self, key: int) -> Reader:
        """Open the durable reader of a shard."""

    def take(self, key: int, fence: Fence) -> None:
        reader = self._opened(key)
        reader.fence = fence
        self._readers[key] = reader

    def give(self, keys: Collection[int]) -> None:
        self.drop(keys)

    def drop(self, keys: Collection[int]) -> None:
        close_all([self._readers.pop(key) for key in keys if key in self._readers])

    def position(self, key: int) -> int:
        return self._readers[key].sequence

    def is_clean(self, key: int) -> bool:
        reader = self._readers.get(key)
        return reader is None or reader.sequence == reader.committed

    def commit(self, keys: Iterable[int]) -> None:
        lost = [key for key in keys if not self._is_committed(key)]
        if lost:
            raise Revoked(f"shards {lost} were given to other members", tuple(lost))

    def _is_committed(self, key: int) -> bool:
        """Commit a shard; return False if it was taken from this member."""
        reader = self._readers[key]
        if reader.sequence != reader.committed:
            try:
                reader.commit()
            except Revoked:
                return False
        return True

    def seek(self, places: Mapping[int, int]) -> None:
        for key, sequence in places.items():
            self._readers[key].seek(sequence)

    def lag(self, keys: Collection[int]) -> GroupLag:
        found = lag_of([self._readers[key].lag() for key in keys])
        assert found is not None
        return found

    def close(self) -> None:
        self.drop(list(self._readers))


class SingleShare(ReaderShare):
    """The shard 0 of a group: the whole log."""

    def __init__(self, log: LogGroups, name: str, start: Any, isolation: Isolation) -> None:
        super().__init__()
        self._log = log
        self._name = name
        self._start = start
        self._isolation = isolation

    def shards(self) -> dict[str, int]:
        return {"log": 0}

    def _opened(self, key: int) -> Reader:
        return self._log.reader(self._name, self._start, isolation=self._isolation)

    def displace(self, key: int, pid: int) -> None:
        self._log.displace_reader(self._name, pid)

    def passed(self, items: Mapping[int, Any]) -> None:
        """Nothing: the durable reader moves with each item."""

    def source(self, keys: Collection[int], *, bounded: bool, arm: Arm) -> GroupSource:
        if not keys:
            return _Standby(arm)
        reader = self._readers[0]
        return _Items(reader.read(on_gap="yield") if bounded else reader.follow(timeout=0.0, on_gap="yield"), arm)


class _Standby(Handle):
    """The source of a member without a shard: it waits for a change of the group."""

    last = 0

    def __init__(self, arm: Arm) -> None:
        self._watcher: Watcher | None = None
        self._arm = arm

    def __next__(self) -> Any:
        raise StopIteration

    def idle(self) -> tuple[Watcher | None, float]:
        """Return as `GroupSource.idle`."""
        if self._watcher is None:
            self._watcher = Watcher()
            self._arm(self._watcher)
            return None, 0.0  # the group may have changed before
        return self._watcher, BLIND_POLL if self._watcher.is_blind else POLL

    def close(self) -> None:
        """Wake a thread that sleeps."""
        if self._watcher is not None:
            self._watcher.close()


class _Items(_Standby):
    """The source of the owner."""

    def __init__(self, items: Iteration, arm: Arm) -> None:
        super().__init__(arm)
        self._items = items
        self._watched: object = None  # the cursor's files that are watched

    def __next__(self) -> Any:
        return next(self._items)

    def idle(self) -> tuple[Watcher | None, float]:
        watcher, longest = super().idle()
        cursor = self._items.cursor
        if watcher is None:
            return None, 0.0
        if self._watched != cursor.files:
            watcher.unwatch(self)
            cursor.watch(watcher, self)
            self._watched = cursor.files
            return None, 0.0  # there may have been a record before
        cursor.ask()
        if cursor.frames is not None and cursor.frames.has_more():
            return None, 0.0
        return watcher, longest if cursor.is_rung else min(longest, BLIND_POLL)

    def close(self) -> None:
        self._items.close()
        super().close()
