"""Follow a journal from an event loop: the file system reports every write."""

from __future__ import annotations

from typing import Any

from kvspool.engine import following
from kvspool.engine.eventloops import LoopWatcher
from kvspool.engine.following import NOTHING
from kvspool.journal.cursor import Reading


class AsyncFollowing(following.AsyncFollowing[Reading]):
    """Iterates as `Following` does, for `async for`."""

    _watched = -1  # base of the watched segment

    def _look(self, has_slept: bool) -> Any:
        """Watch before checking: later writes wake us."""
        self._watch()
        return next(self._reading, NOTHING)

    def _watch(self) -> None:
        cursor = self._reading.cursor
        if self._reading.has_items or (self._watcher is not None and self._watched == cursor.base):
            return
        self._let_go()
        watcher = LoopWatcher()
        self._watch_with(watcher)
        cursor.watch(watcher, 0)
        self._watched = cursor.base

    async def _sleep(self, left: float) -> None:
        is_over = self._reading.is_over  # another thread may have closed it before it could wake the watcher
        if not is_over and self._watcher is not None and await self._watcher.wait(left) is None:
            self._reading.cursor.refuse_vanished()
