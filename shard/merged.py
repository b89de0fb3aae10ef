"""The reading verbs that a shard set and a hub root implement alike, on top of their logs."""

from __future__ import annotations

import heapq
import sys
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

from kvspool.journal import Journal
from kvspool.options import Isolation
from kvspool.record import Record
from kvspool.spool import Spool
from kvspool.system.handles import Handle
from shard import descriptors
from shard.merge import Merge

Log = Spool | Journal
K = TypeVar("K")  # the address of a log
R = TypeVar("R", bound=Record)  # the kind of the records


class MergedLogs(Handle, Generic[K, R]):
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
    def read(self) -> Merge[R]:
        """Iterate over the present records of all logs."""

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
