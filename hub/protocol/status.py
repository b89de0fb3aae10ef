"""What a hub server is at a moment: what its page, its metrics and its health are made from.

Times are ns since 1970, sizes bytes. Figures that count events do so since the server started; those of what is stored are of now.
Names and ids come from clients: whoever shows them escapes them.
"""

from __future__ import annotations

import msgspec

from kvspool import sizes


class ShardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A shard of a client, as it is stored."""

    index: int
    generation: int  # how often the client's log was made anew
    first_sequence: int
    next_sequence: int  # of the record that is expected next
    records: int
    used: int  # bytes on disk
    lost: int  # sequences that lie in Gaps
    last_timestamp: int  # of its last record; 0 without one
    behind: int  # records that the client says it has and the hub hasn't; -1 if that isn't known


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A client, connected or not."""

    client: str
    bits: int
    shards: list[ShardStatus]
    connections: int  # now
    last_seen: int  # when it last sent anything; 0 for not since the server started
    records: int  # taken in since the server started
    bytes: int  # taken in since the server started
    gaps: int  # that it declared since the server started
    duplicates: int  # records that were there already, acknowledged without a write
    refused: dict[str, int]  # batches, by reason
    quota_bytes: int  # that it may store; 0 for any number

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
        """Sequences of its shards that lie in Gaps."""
        return sum(shard.lost for shard in self.shards)

    @property
    def behind(self) -> int:
        """Records that it has and the hub hasn't, over the shards of which that is known; -1 if it is of none."""
        known = [shard.behind for shard in self.shards if shard.behind >= 0]
        return sum(known) if known else -1


class ReaderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A durable reader of the hub."""

    name: str
    lag: int  # records that it hasn't committed yet


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline that reads the hub's root, as it said last; on this host, and for nobody to trust."""

    name: str
    state: str  # starting, running, stopped, done, failed; silent: it should have said something since
    records: int  # read since it started
    rate: float  # records a second of its last batch
    lag: int  # records that it hasn't read yet; -1 if that isn't known
    bad: int  # records that it could not decode, since it started
    late: int = 0  # rows that came behind its watermark and are in no window, since it started
    batch: int  # number of its last batch; -1 before the first
    batch_seconds: float  # that the last batch took
    batch_ended: int  # when; 0 before the first
    updated: int  # when it last said anything
    error: str  # why it failed


class HubStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A hub server."""

    root: str
    version: str
    started: int
    now: int
    level: str  # what an acknowledged record has survived: "process" or "disk"
    address: str  # HOST:PORT that clients connect to
    is_secure: bool  # TLS
    free_bytes: int  # of the disk that the root is on
    disk_bytes: int  # size of that disk
    least_free: int  # the mark: with less free, the server takes nothing in
    certificate_expires: int  # 0 without one
    connections: int
    cut: dict[str, int]  # connections that the server ended, by reason
    clients: list[ClientStatus]
    readers: list[ReaderStatus]
    pipelines: list[PipelineStatus] = []  # that read the root
    error: str = ""  # why the server can't do its work, in a sentence; empty if it can

    def troubles(self) -> list[str]:
        """Return what keeps the server from its work, a sentence each; nothing if it is healthy."""
        found = []
        if self.error:
            found.append(self.error)
        if self.free_bytes < self.least_free:
            free, least = sizes.show(self.free_bytes), sizes.show(self.least_free)
            found.append(f"the disk has {free} free, less than its mark of {least}: nothing is taken in")
        if 0 < self.certificate_expires <= self.now:
            found.append("the certificate has expired: clients refuse to connect")
        return found
