"""What can be wrong with a hub.

    KvspoolError
    `-- HubError
        `-- ShardReplaced       a durable reader's place is in a log that is there no more
"""

from __future__ import annotations

from kvspool import KvspoolError


class HubError(KvspoolError):
    """Base of what only a hub can raise."""


class ShardReplaced(HubError):
    """The log of a shard isn't the one in which a durable reader has its place: it was made anew, or restored from an older copy.

    What the reader had not read of the old one can't be had any more; how much that was, nobody knows. `sequence` is the place it had
    there. The reader stands at the earliest record of the new log, `first`: take the next record to go on, or `seek`.
    """

    exit_code = 7

    def __init__(self, path: str, client: str, shard: int, sequence: int, first: int, why: str) -> None:
        super().__init__(f"{path}: {why}; the reader's place was {sequence}, and it goes on at the earliest record, {first}")
        self.path, self.client, self.shard, self.sequence, self.first = path, client, shard, sequence, first
