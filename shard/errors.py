"""The errors of a root of shard directories.

    KvspoolError
    |-- TooFewDescriptors           so many logs need more descriptors than the process may have (also OSError)
    `-- ShardError
        |-- IncompleteShardSet      an index is missing
        `-- ConflictingShardSets    the same prefix has two numbers of shards, or an index that its bits don't allow

    kvspool.errors.AppendedInPart
    `-- AppendedToSomeShards        a batch was interrupted: some of its records are stored, and stay
"""

from __future__ import annotations

from kvspool import KvspoolError
from kvspool.errors import AppendedInPart


class ShardError(KvspoolError):
    """The shard directories under a root form no shard set. Nothing was changed."""

    exit_code = 4


class TooFewDescriptors(KvspoolError, OSError):
    """No file descriptor is left for one of many logs. The message says how many they need; files opened by the call are closed.

    `errno` is the system's: EMFILE, the limit of the process, or ENFILE, that of the machine.
    """

    def __init__(self, why: str, number: int) -> None:
        super().__init__(number, why)
        self.why = why

    def __str__(self) -> str:
        return self.why


class IncompleteShardSet(ShardError):
    """Shards are missing: their directories were removed, or `create` was interrupted; another `create` adds them, empty."""


class ConflictingShardSets(ShardError):
    """One prefix with two numbers of shards, or with an index beyond them: a key has no single shard. Move one of them away."""


class AppendedToSomeShards(AppendedInPart):
    """A batch for several shards was interrupted. Stored records stay and can be read; don't append them again.

    `parts` holds their sequences for each shard: one range, or one for each record batch of a table. The records of a shard's part are
    stored in order, the first ones first. `__cause__` is the error that interrupted the batch.
    """

    def __init__(self, why: str, parts: dict[int, list[range]]) -> None:
        super().__init__(why, range(0))
        self.parts = parts
