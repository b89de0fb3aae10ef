"""The status of a hub server, for its page, its metrics and its health check.

Times are ns since 1970, sizes bytes. Counters of events begin at the server's start; other values are current. Names and ids come from
clients: code that shows them escapes them.
"""

from __future__ import annotations

import msgspec

from kvspool.engine import sizes
from kvspool.tasks.stats import TaskWorkerStats


class ShardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A shard of a client."""

    index: int
    generation: int  # how often the client's log was recreated
    first_sequence: int
    next_sequence: int  # of the next expected record
    records: int
    used: int  # bytes on disk
    lost: int  # sequences in Gaps
    last_timestamp: int  # of its last record; 0 without one
    behind: int  # records that the client has reported and the hub doesn't have; -1 if unknown
    behind_is_estimate: bool = False  # the client is silent: it grows from the last report, at the last rate


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A client, connected or not."""

    client: str
    bits: int
    shards: list[ShardStatus]
    connections: int  # now
    last_seen: int  # time of its last message; 0 for none since the server started
    records: int  # received since the server started
    bytes: int  # received since the server started
    gaps: int  # declared since the server started
    duplicates: int  # records that were already stored, acknowledged without a write
    refused: dict[str, int]  # batches, by reason
    quota_bytes: int  # limit of its stored bytes; 0 for none
    is_mirrored: bool = False  # a mirror pulls its records from another hub; it has no shippers here

    @property
    def used(self) -> int:
        """Bytes of its shards on disk."""
        return sum(shard.used for shard in self.shards)

    @property
    def stored(self) -> int:
        """Records that its shards hold."""
        return sum(shard.records for shard in self.shards)

    @property
    def lost(self) -> int:
        """Sequences of its shards in Gaps."""
        return sum(shard.lost for shard in self.shards)

    @property
    def behind(self) -> int:
        """Records that only the client has, over the shards for which that is known; -1 if it is known for none."""
        known = [shard.behind for shard in self.shards if shard.behind >= 0]
        return sum(known) if known else -1

    @property
    def behind_is_estimate(self) -> bool:
        """Whether `behind` is estimated, in part or all of it."""
        return any(shard.behind_is_estimate for shard in self.shards)


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A member of a group: its process, since when, and how many shards it owns."""

    process: str
    joined: int
    shards: int


class TaskListStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A task list, with the sums of its shards."""

    workers: list[TaskWorkerStats]
    given: int  # tasks that a worker has
    waiting: int  # all other records that are not acknowledged
    delayed: int  # those of them that were given back, until a later time
    retried: int  # deliveries of tasks that had been given before, since the list was created
    dead: int  # records that became dead letters, since the list was created
    window: int  # tasks
    used: int  # tasks of the window
    waits_for: list[str]  # why workers wait although there are records, or the list can't be read


class ReaderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A durable reader of the hub."""

    name: str
    lag: int  # uncommitted records
    members: list[MemberStatus] = []  # of a group of processes on this host
    tasks: TaskListStatus | None = None  # of the task list with this name


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline that reads the hub's root, by its last update; from a file on this host, and untrusted."""

    name: str
    state: str  # starting, running, stopped, done, failed; silent: an update is overdue
    records: int  # read since the start
    rate: float  # records per second of its last batch
    lag: int  # unread records; -1 if unknown
    bad: int  # records that it could not decode, since the start
    late: int = 0  # rows later than its watermark, in no window, since the start
    batch: int  # number of its last batch; -1 before the first
    batch_seconds: float  # duration of the last batch
    batch_ended: int  # end of the last batch; 0 before the first
    updated: int  # time of its last update
    error: str  # why it failed


class HubStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A hub server."""

    root: str
    version: str
    started: int
    now: int
    level: str  # durability of an acknowledged record: "process" or "disk"
    address: str  # HOST:PORT for clients
    is_secure: bool  # TLS
    free_bytes: int  # of the disk that the root is on
    disk_bytes: int  # size of that disk
    least_free: int  # with less free, the server refuses batches
    certificate_expires: int  # 0 without one
    connections: int
    cut: dict[str, int]  # connections that the server ended, by reason
    clients: list[ClientStatus]
    readers: list[ReaderStatus]
    pipelines: list[PipelineStatus] = []  # those that read the root
    calls: int | None = None  # under way; None: not counted
    threads: int | None = None  # of the server; None: not counted
    refusals: dict[str, int] | None = None  # calls that were refused before any work, by reason; None: not counted
    error: str = ""  # why the server can't work, in a sentence; empty if it can

    def troubles(self) -> list[str]:
        """Return what keeps the server from its work, a sentence each; empty if it is healthy."""
        found = []
        if self.error:
            found.append(self.error)
        if self.free_bytes < self.least_free:
            free, least = sizes.show(self.free_bytes), sizes.show(self.least_free)
            found.append(f"the disk has {free} free, less than its mark of {least}: batches are refused")
        if 0 < self.certificate_expires <= self.now:
            found.append("the certificate has expired: clients refuse to connect")
        return found
