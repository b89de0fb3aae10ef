"""Follow a spool from an event loop: its writers ring if asked."""

from __future__ import annotations

from typing import Any

from kvspool.engine import following
from kvspool.engine.eventloops import LoopWatcher
from kvspool.engine.following import NOTHING
from kvspool.engine.wakeups import BLIND_POLL
from kvspool.spool.cursor import Reading, ask, refuse_vanished, watch


class AsyncFollowing(following.AsyncFollowing[Reading]):
    """Iterates as `Following` does, for `async for`."""

    def _look(self, has_slept: bool) -> Any:
        item = next(self._reading, NOTHING)
        if item is NOTHING and has_slept:
            refuse_vanished(self._reading.cursor.files)
        return item

    async def _sleep(self, left: float) -> None:
        """Sleep until a writer rings; not at all if a record was appended before we asked."""
        cursor = self._reading.cursor
        if self._watcher is None:
            watcher = LoopWatcher()
            self._watch_with(watcher)
            watch(watcher, cursor.files, 0)
        ask(cursor)
        if self._watcher is not None and self._reading.is_at_edge and not self._reading.is_over:
            await self._watcher.wait(left if cursor.files.can_ask else min(left, BLIND_POLL))
