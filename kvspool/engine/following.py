"""Follow a log of any kind from an event loop, which continues with other work while there is no record.

One inotify descriptor serves all followed logs of a running loop (`eventloops`). A cancelled task, a finished iteration, and a dropped
iterator leave nothing open.
"""

from __future__ import annotations

from typing import Any

from kvspool.engine.eventloops import LoopWatcher
from kvspool.engine.iteration import AsyncReading, Iteration
from kvspool.engine.wakeups import BLIND_POLL

RUN = 64  # records after which other tasks of the loop get a turn


class AsyncFollowing(AsyncReading[Any]):
    """Iterates as `Following` does, for `async for`."""

    def __init__(self, reading: Iteration, limit: int | None, timeout: float | None) -> None:
        super().__init__(reading, self._wait, limit, timeout, RUN)
        self._items = reading
        self._watcher: LoopWatcher | None = None
        self._watched: object = None  # the cursor's files that it watches

    async def __anext__(self) -> Any:
        try:
            return await super().__anext__()
        except BaseException:  # over, cancelled, or a Gap: no caller may ask for more afterwards
            self._let_go()
            raise

    async def _wait(self, left: float) -> None:
        """Sleep until there may be more, at most `left` seconds; not at all if there may have been a record before we asked."""
        if self._watch():
            return
        cursor, watcher = self._items.cursor, self._watcher
        cursor.ask()
        if watcher is None or self._items.is_over or (cursor.frames is not None and cursor.frames.has_more()):
            return  # another thread may have closed the iteration before it could wake the watcher
        if not await watcher.wait(left if cursor.is_rung else min(left, BLIND_POLL)) and not self._items.is_over:
            cursor.refuse_vanished()

    def _watch(self) -> bool:
        """Watch the files after the cursor; return whether they were not watched before."""
        cursor = self._items.cursor
        if self._watcher is not None and self._watched == cursor.files:
            return False
        self._let_go()
        self._watcher = self._items.waker = LoopWatcher()
        self._watched = cursor.files
        cursor.watch(self._watcher, 0)
        return True

    def _let_go(self) -> None:
        watcher, self._watcher = self._watcher, None
        self._items.waker = None
        if watcher is not None:
            watcher.close()

    async def aclose(self) -> None:
        await super().aclose()
        self._let_go()
