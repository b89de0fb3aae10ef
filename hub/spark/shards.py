"""The source of a query: shards, at any place.

The driver examines them through `SparkShards`, and divides the available records into a `ShardRange` for each task or part of one. A
task, in a worker process on any host of the cluster, reads a range without the driver.

Terms of Kafka are used where they exist: a *topic* is a client, a shard set's prefix or a log's name; a *partition* is one of its shards;
an *offset* is a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvspool import Gap

if TYPE_CHECKING:
    import pyarrow

    from hub.client.timeline import Table


class ShardKey(NamedTuple):
    """Names a shard of a source; sorts by topic, then by number."""

    topic: str
    partition: int


class Extent(NamedTuple):
    """The extent of a shard: the sequences first..end-1, possibly none. log_id: hex digits that change when another log replaces it; ""
    for a log without an id.

    logs: at hubs, the logs of the sequences; see `hub.client.timeline`. late: describes records that came after the query had passed
    their place.
    """

    first: int
    end: int
    log_id: str
    logs: Table = ()
    late: str = ""


class ShardOffsets(NamedTuple):
    """The next sequence of each shard, the known ids of their logs, and for several logs of a shard the sequence at which each begins."""

    next: dict[ShardKey, int]
    logs: dict[ShardKey, str]
    bases: dict[ShardKey, Table] = {}


@dataclass(frozen=True)
class ShardRange:
    """The sequences first..end-1 of one shard: the description of a task's work, small and picklable."""

    key: ShardKey
    log_id: str
    first: int
    end: int

    def batches(self) -> Iterator[pyarrow.RecordBatch | Gap]:
        """Yield the records in order, as batches of `kvspool.arrow.SCHEMA`, and a Gap for missing ones. Called in the task's process.

        Raises DataLossError if another log has replaced the shard's, KvspoolError for unreadable records.
        """
        raise NotImplementedError


class SparkShards(Protocol):
    """The shards of a source, for the driver. Used by one process, one thread at a time."""

    def look(self) -> dict[ShardKey, Extent]:
        """Return all current shards, in order, including new ones. Cheap without changes: a waiting query looks some 90 times a second.

        Raises KvspoolError.
        """

    def expect(self, noted: ShardOffsets) -> None:
        """Note the offsets of a checkpoint: later looks show their shards with the same sequences, and wait for hubs that may have them."""

    def away(self) -> dict[str, str]:
        """Return the hubs that don't answer at present, each with since when and why."""

    def sequence_at(self, key: ShardKey, timestamp: int) -> int | None:
        """Return the first sequence whose record is not older than a time (ns since 1970), None if there is none."""

    def has_ordered_times(self, key: ShardKey) -> bool:
        """Return whether no record of a shard is older than its predecessor, so that a range of time is one of sequences.

        A spool ensures that; a journal accepts any times.
        """

    def range(self, key: ShardKey, first: int, end: int) -> ShardRange:
        """Return what a task needs to read the sequences first..end-1 of a shard that `look` has shown."""

    def commit(self, ends: Mapping[ShardKey, int]) -> None:
        """Note that a query has processed the sequences before these: its durable reader moves there, so that retention can follow.

        Does nothing without a durable reader.
        """

    def close(self) -> None:
        """Close logs and connections."""
