"""Following a hub root: new clients are added, and removed ones are read to their end and closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hub.root.shards import RootShards
from kvspool.engine.wakeups import ENTERED, Watcher
from kvspool.errors import LogVanished
from kvspool.options import Isolation, OnGap
from shard.merge import FollowingMerge

if TYPE_CHECKING:
    from shard.kernel.merge_py import MergeSource

_ROOT = "the root itself"  # the key of its watch; other keys are (client, shard)


class FollowingRoot(FollowingMerge[Any]):
    """A merge that adds the shards of new clients, and drops those of removed ones."""

    def __init__(
        self, root: RootShards, limit: int | None, on_gap: OnGap, timeout: float | None, isolation: Isolation, spin: float = 0.0
    ) -> None:
        super().__init__(limit, on_gap, timeout, spin)
        self.clients: set[str] = set()  # known clients: their missing shards are being removed
        self.names: dict[str, tuple[str, int]] = {}  # of the directories that are read, with their keys
        self.root = root
        self._isolation = isolation

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
            # Records appended before the removal are still readable: only an idle log is dropped.
            if not self.look_at([source]):
                self.drop(source.key)

    def add_new(self) -> None:
        """Read new shards from their earliest record."""
        isolation = self._isolation
        self.root.add_shards(self, lambda key, path, log: log.cursor("earliest", isolation=isolation), is_bounded=False)

    def drop(self, key: Any) -> None:
        super().drop(key)
        for name in [name for name, known in self.names.items() if known == key]:
            del self.names[name]
        self.root.forget(key)
