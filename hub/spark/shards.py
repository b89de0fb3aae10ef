"""What a query reads from: shards, wherever they lie.

The driver looks at them through `Shards`, and cuts what is there into a `ShardRange` for each task or part of one. A task, in a worker
process on any host of the cluster, reads a range by itself.

Kafka's words are used for what Kafka has too: a *topic* is a client, a shard set's prefix or a log's name; a *partition* is a shard of
it; an *offset* is a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvspool import Gap

if TYPE_CHECKING:
    import pyarrow


class ShardKey(NamedTuple):
    """Names a shard of a source; sorts by topic, then by number."""

    topic: str
    partition: int


class Extent(NamedTuple):
    """What is there of a shard: the sequences first..end-1, maybe none. log_id: hex digits that change when another log takes its place;
    "" for a log that has none."""

    first: int
    end: int
    log_id: str


@dataclass(frozen=True)
class ShardRange:
    """The sequences first..end-1 of one shard: what a task is told, so it is small and can be pickled."""

    key: ShardKey
    log_id: str
    first: int
    end: int

    def batches(self) -> Iterator[pyarrow.RecordBatch | Gap]:
        """Yield the records in order, as batches of `kvspool.arrow.SCHEMA`, and a Gap for those that are missing. In the task's process.

        Raises DataLossError if another log has taken the shard's place, KvspoolError for what can't be read.
        """
        raise NotImplementedError


class Shards(Protocol):
    """The shards of a source, as the driver sees them. One process, one thread at a time."""

    def look(self) -> dict[ShardKey, Extent]:
        """Return all shards that there are now, in order; new ones appear by themselves. Costs little while nothing changes: a query
        that waits for records looks some 90 times a second. Raises KvspoolError."""

    def sequence_at(self, key: ShardKey, timestamp: int) -> int | None:
        """Return the first sequence whose record is not older than a time (ns since 1970), None if there is none."""

    def has_ordered_times(self, key: ShardKey) -> bool:
        """Return whether no record of a shard is older than the one before it, so that a range of time is one of sequences. A spool sees
        to that; a journal takes times as they come."""

    def range(self, key: ShardKey, first: int, end: int) -> ShardRange:
        """Return what a task needs to read the sequences first..end-1 of a shard that `look` has shown."""

    def commit(self, ends: Mapping[ShardKey, int]) -> None:
        """Note that a query is done with the sequences before these: its durable reader moves there, so that retention can follow.
        Does nothing for a source without one."""

    def close(self) -> None:
        """Let go of logs and connections."""
