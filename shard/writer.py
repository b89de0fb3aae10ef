"""A writer: the appends of a shard set in a `with` block. Durability: as for the set's own appends."""

from __future__ import annotations

from kvspool.writer import OpenWriter
from shard.place import Place


class ShardSetWriter(OpenWriter[Place, dict[int, range], dict[int, int]]):
    """Appends to a shard set until it is closed; get it from `ShardSet.writer`. Threads may share it."""

    _kind = "shard set"
