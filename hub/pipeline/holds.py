"""How far an appender's table is, as its logs know it: retention and full rings wait for these positions.

They belong to a durable reader or to a group. Members of a group share the shards: each appends only those that it owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hub.spark.local import LocalShards
from hub.spark.shards import ShardKey
from kvspool.errors import ReaderBusy
from kvspool.opening import logs

if TYPE_CHECKING:
    from kvspool.groups.member import GroupMember


class Hold(Protocol):
    """The positions of one appender."""

    def attend(self) -> None:
        """Notice which shards this process is to append from now on."""

    def owns(self, key: ShardKey) -> bool:
        """Return whether this process is to append a shard."""

    def commit(self, ends: Mapping[ShardKey, int]) -> bool:
        """Note that the table has the records before these sequences. Return whether that is stored; otherwise commit again later."""

    def close(self) -> None:
        """Release the positions to others."""


class ReaderHold:
    """The positions of the durable reader of `LocalShards`, if it has one. This process appends all shards."""

    def __init__(self, shards: LocalShards) -> None:
        self._shards = shards

    def attend(self) -> None:
        """See `Hold`."""

    def owns(self, key: ShardKey) -> bool:
        """See `Hold`."""
        return True

    def commit(self, ends: Mapping[ShardKey, int]) -> bool:
        """See `Hold`. Another appender may have the reader open at this moment."""
        with suppress(ReaderBusy):
            self._shards.commit(ends)
            return True
        return False

    def close(self) -> None:
        """See `Hold`: the reader is open only during a commit."""


class GroupHold:
    """A member of a group. A shard passes to another member after our commit, or when this process ends."""

    def __init__(self, path: Path, shards: LocalShards, name: str) -> None:
        """Join the group. Raises the errors of `group`, and ValueError for shard sets that have no group together."""
        import kvspool
        import shard
        from hub.root.root import HubRoot

        topics = {key.topic for key in shards.look()}
        self._is_log = logs.lies_at(path)
        self._is_set = not self._is_log and "" in topics
        if self._is_set and len(topics) > 1:
            raise ValueError(f"{path} has a shard set without a prefix next to others, and they have no group together")
        opened: Any = kvspool.open(path) if self._is_log else shard.open(path) if self._is_set else HubRoot.open(path)
        self._source = opened
        try:
            self._member: GroupMember[Any] = opened.group(name)
        except BaseException:
            opened.close()
            raise

    def attend(self) -> None:
        """See `Hold`."""
        self._member.tick()  # cheaper than `attend`, which looks for new shards each time

    def owns(self, key: ShardKey) -> bool:
        """See `Hold`."""
        return self._named(key) in self._member.assigned

    def commit(self, ends: Mapping[ShardKey, int]) -> bool:
        """See `Hold`. Shards that have another owner by now are left to it."""
        self._member.seek({self._named(key): end for key, end in ends.items() if self.owns(key)})
        self._member.commit()
        return True

    def _named(self, key: ShardKey) -> object:
        """Return the group's name of a shard."""
        return 0 if self._is_log else key.partition if self._is_set else (key.topic, key.partition)

    def close(self) -> None:
        """See `Hold`."""
        try:
            self._member.close()
        finally:
            self._source.close()
