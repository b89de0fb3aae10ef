"""The shards of many clients under one root, read as one. `hub.spark` gives them to Spark.

    import hub

    with hub.open("root") as root:
        for record in root.follow(timeout=5):
            print(record.client, record.shard, record.sequence, record.data)
"""

from hub.errors import HubError, ShardReplaced
from hub.reader import HubLag, HubReader, HubReaderStats, ShardLag
from hub.root import ClientStats, HubRecord, HubRoot, HubStats

open = HubRoot.open
create = HubRoot.create

__all__ = [
    "ClientStats",
    "HubError",
    "HubLag",
    "HubReader",
    "HubReaderStats",
    "HubRecord",
    "HubRoot",
    "HubStats",
    "ShardLag",
    "ShardReplaced",
    "create",
    "open",
]
