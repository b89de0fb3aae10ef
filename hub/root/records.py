"""The records of a hub root."""

from __future__ import annotations

from shard.shardset import ShardRecord


class HubRecord(ShardRecord, frozen=True, gc=False):
    """A record, its client, and its shard of that client."""

    client: str = ""
