"""Following a hub root: its clients that come are taken in, those that were removed are read to their end and let go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hub.root.shards import RootShards
from kvspool.errors import LogVanished
from kvspool.options import Isolation, OnGap
from kvspool.wakeups import ENTERED, Watcher
from shard.merge import FollowingMerge

if TYPE_CHECKING:
    from shard._merge_py import MergeSource

_ROOT = "the root itself"  # the key of its watch; the others are (client, shard)


class FollowingRoot(FollowingMerge):
    """A merge that takes in the shards of new clients, and lets go of those that were removed."""

    def __init__(self, root: RootShards, limit: int | None, on_gap: OnGap, timeout: float | None, isolation: Isolation) -> None:
        super().__init__(limit, on_gap, timeout)
        self.clients: set[str] = set()  # that were seen: what is missing of them is being removed
        self.names: dict[str, tuple[str, int]] = {}  # of the directories that are read, with their keys
        self.root = root
        self._isolation: Isolation = isolation

    def arm(self) -> Watcher:
        watcher = super().arm()
        try:
            watcher.watch(self.root.path, ENTERED, _ROOT)
        except BaseException:
            watcher.close()
            raise
        return watcher

    def notice(self, key: Any) -> None:
        self.add_new()

    def seek(self) -> None:
        self.add_new()

    def look_after(self, source: MergeSource) -> None:
        try:
            source.cursor.refuse_vanished()
        except LogVanished:
            # Appended before it was removed, and not read yet, is still in memory: only a silent log is let go.
            if not self.look_at([source]):
                self.drop(source.key)

    def add_new(self) -> None:
        """Read what has come, from its earliest record on."""
        isolation = self._isolation
        self.root.add_shards(self, lambda key, path, log: log.cursor("earliest", isolation=isolation), is_bounded=False)

    def drop(self, key: Any) -> None:
        super().drop(key)
        for name in [name for name, known in self.names.items() if known == key]:
            del self.names[name]
        self.root.forget(key)
