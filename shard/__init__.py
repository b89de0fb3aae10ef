"""A log spread over shards by key.

    import shard

    shards = shard.create("root", prefix="orders", bits=2)
    shards.append({"total": 12}, key=b"customer-7")
    for record in shards.read():
        print(record.shard, record.sequence, record.data)
"""

from shard.errors import ConflictingShardSets, IncompleteShardSet, ShardError, TooFewDescriptors
from shard.place import Place
from shard.protocols import Readable, Writable
from shard.shardset import ShardRecord, ShardSet

create = ShardSet.create
open = ShardSet.open

__all__ = [
    "ConflictingShardSets",
    "IncompleteShardSet",
    "Place",
    "Readable",
    "ShardError",
    "ShardRecord",
    "ShardSet",
    "TooFewDescriptors",
    "Writable",
    "create",
    "open",
]
