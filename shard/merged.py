"""The reading verbs that a shard set and a hub root implement alike, on top of their logs."""

from __future__ import annotations

import heapq
import sys
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from kvspool.engine.iteration import AsyncReading
from kvspool.groups.verb import HasGroups
from kvspool.log import Log as Log
from kvspool.options import Isolation, OnGap
from kvspool.record import Gap, Record
from kvspool.system.handles import ClosingHandle
from kvspool.tasks.verb import HasTasks
from shard import descriptors
from shard.merge import LOOK_AROUND, FollowingMerge, Merge, NoGaps, Values

K = TypeVar("K")  # the address of a log
R = TypeVar("R", bound=Record)  # the kind of the records
S = TypeVar("S")  # further starts
M = TypeVar("M", bound=Merge[Any])


class MergedLogs(HasGroups, HasTasks, ClosingHandle, Generic[K, R, S]):
    """Several logs that are read as one. An empty one is true, like every handle."""

    HELPERS = frozenset(("each_log", "placed_at"))
    path: Path  # the directory of the logs

    @abstractmethod
    def each_log(self) -> Iterator[tuple[K, Log]]:
        """Yield the address of each log, and the log. Raises Closed."""

    @abstractmethod
    def placed_at(self, key: K, record: Record) -> R:
        """Return a record of the log at an address, with that address."""

    @abstractmethod
    def _fill(self, merge: M, start: str | S, bounded: bool, isolation: Isolation) -> M:
        """Add a cursor of each log to a merge that begins at `start`, and return it; the handle's end ends it."""

    def _follower(
        self, limit: int | None, on_gap: OnGap, timeout: float | None, isolation: Isolation, spin: float
    ) -> FollowingMerge[Any]:
        """Return the merge of a follower."""
        return FollowingMerge(limit, on_gap, timeout, spin)

    @overload
    def read(
        self, start: str | S = ..., *, limit: int | None = ..., on_gap: NoGaps = ..., isolation: Isolation = ...
    ) -> Merge[R]: ...

    @overload
    def read(
        self, start: str | S = ..., *, limit: int | None = ..., on_gap: OnGap = ..., isolation: Isolation = ...
    ) -> Merge[R | Gap]: ...

    def read(
        self, start: str | S = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Merge[R | Gap]:
        """Iterate over the present records of all logs, in the order of `shard.merge`.

        start: "earliest", "latest" or an aware datetime; of a shard set also a sequence for each shard (the others start at their earliest
        record). limit, on_gap and isolation: as in `kvspool.Log.read`. Raises OutOfRange; ShardError for shards of a hub root that form no
        set. The error of a shard of a root that can't be opened is raised once, by the first call for a record; the next calls return the
        records of all other shards.
        """
        return self._fill(Merge(limit, on_gap), start, True, isolation)

    @overload
    def read_values(
        self, start: str | S = ..., *, limit: int | None = ..., on_gap: NoGaps = ..., isolation: Isolation = ...
    ) -> Values[bytes]: ...

    @overload
    def read_values(
        self, start: str | S = ..., *, limit: int | None = ..., on_gap: OnGap = ..., isolation: Isolation = ...
    ) -> Values[bytes | Gap]: ...

    def read_values(
        self, start: str | S = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise", isolation: Isolation = "appended"
    ) -> Values[bytes | Gap]:
        """Iterate over the stored bytes of the values only; see `read`."""
        return Values(self.read(start, limit=limit, on_gap=on_gap, isolation=isolation))

    @overload
    def follow(
        self,
        start: str | S = ...,
        *,
        timeout: float | None = ...,
        limit: int | None = ...,
        on_gap: NoGaps = ...,
        isolation: Isolation = ...,
        spin: float = ...,
    ) -> FollowingMerge[R]: ...

    @overload
    def follow(
        self,
        start: str | S = ...,
        *,
        timeout: float | None = ...,
        limit: int | None = ...,
        on_gap: OnGap = ...,
        isolation: Isolation = ...,
        spin: float = ...,
    ) -> FollowingMerge[R | Gap]: ...

    def follow(
        self,
        start: str | S = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
        spin: float = 0.0,
    ) -> FollowingMerge[R | Gap]:
        """Iterate over the records from `start`, and wait for more, on one inotify descriptor for all logs; see `read`.

        Clients of a hub root that appear later are read from their earliest record. Ends normally after `timeout` seconds without a record;
        None: never. spin: as in `kvspool.Log.follow`. Raises Closed as soon as any thread closes the handle.
        """
        return self._fill(self._follower(limit, on_gap, timeout, isolation, spin), start, False, isolation)

    @overload
    def follow_async(
        self,
        start: str | S = ...,
        *,
        timeout: float | None = ...,
        limit: int | None = ...,
        on_gap: NoGaps = ...,
        isolation: Isolation = ...,
    ) -> AsyncReading[R]: ...

    @overload
    def follow_async(
        self, start: str | S = ..., *, timeout: float | None = ..., limit: int | None = ..., on_gap: OnGap = ..., isolation: Isolation = ...
    ) -> AsyncReading[R | Gap]: ...

    def follow_async(
        self,
        start: str | S = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> AsyncReading[R | Gap]:
        """Iterate with `async for` over the records from `start`, and wait for more in the event loop; see `follow`."""
        merge = self._fill(self._follower(None, on_gap, 0.0, isolation, 0.0), start, False, isolation)
        return AsyncReading(merge, merge.sleep, limit, timeout, LOOK_AROUND)

    def extent(self, isolation: Isolation = "appended") -> dict[K, tuple[int, int]]:
        """Return for each log the sequences of its oldest record and of the next one to be appended; see `kvspool.Log.extent`."""
        logs = list(self.each_log())
        with descriptors.for_logs(self.path, len(logs)):
            return {key: log.extent(isolation) for key, log in logs}

    def last(self, count: int = 1) -> list[R]:
        """Return the last `count` records of all logs, in the order of `read`; fewer if there are fewer. Lost ones are omitted.

        Reads up to `count` records of each log. Raises Closed, ValueError.
        """
        if count < 0:
            raise ValueError(f"the number of records must not be negative, and is {count}")
        logs = list(self.each_log())
        with descriptors.for_logs(self.path, len(logs)):
            newest = [[self.placed_at(key, record) for record in log.last(count)] for key, log in logs]
        merged = list(heapq.merge(*newest, key=lambda record: record.timestamp))
        return merged[max(0, len(merged) - count) :]

    def __iter__(self) -> Merge[R]:
        return self.read()

    def __len__(self) -> int:
        """Return the present number of records of all logs, according to their sequences; see `kvspool.Log`."""
        return min(sum(end - first for first, end in self.extent().values()), sys.maxsize)

    def __bool__(self) -> bool:
        return True


def moved(kind: type[R], record: Record, **place: object) -> R:
    """Return a record as one of another kind, with the fields of its place."""
    fields = (record.sequence, record.timestamp, record.type, record.key, record.value, record.codec)
    return kind(*fields, **place, key_table=record.key_table)  # type: ignore[arg-type]
