"""Follow a log of any kind from an event loop, which continues with other work while there is no record.

One inotify descriptor serves all followed logs of a running loop (`eventloops`). A cancelled task, a finished iteration, and a dropped
iterator leave nothing open.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, Self

from kvspool import system
from kvspool.engine.eventloops import LoopWatcher
from kvspool.engine.iteration import Iteration, check_timeout
from kvspool.engine.wakeups import BLIND_POLL, POLL, let_others_run
from kvspool.system.handles import Handle

NOTHING: Final = object()


class AsyncFollowing(AsyncIterator[Any], Handle):
    """Iterates as `Following` does, for `async for`. Get it from `follow_async`; use it in one task.

    A cancelled wait loses no record: the next one continues there. Leave the iteration early with `aclose`, or use `async with`.
    """

    def __init__(self, reading: Iteration, timeout: float | None) -> None:
        """Take over `reading`, which has no end: while it has no record, sleep for at most `timeout` seconds (None: indefinitely)."""
        self._reading = reading
        self._timeout = check_timeout(timeout)
        self._watcher: LoopWatcher | None = None
        self._watched: object = None  # the cursor's files that it watches

    @property
    def missed(self) -> int:
        """Return how many sequences were in Gaps so far."""
        return self._reading.missed

    async def __anext__(self) -> Any:
        try:
            return await self._next()
        except BaseException:  # over, cancelled, or a Gap: no caller may ask for more afterwards
            self._let_go()
            raise

    async def _next(self) -> Any:
        if not self._reading.has_items:
            await let_others_run()
        deadline = None if self._timeout is None else system.port.monotonic() + self._timeout
        while (item := next(self._reading, NOTHING)) is NOTHING:
            left = POLL if deadline is None else min(POLL, deadline - system.port.monotonic())
            if self._reading.is_over or left <= 0:
                self._reading.check_ended()
                raise StopAsyncIteration
            if not self._watch():  # otherwise there may have been a record before: check again
                await self._sleep(left)
        return item

    def _watch(self) -> bool:
        """Watch the files after the cursor; return whether they were not watched before."""
        cursor = self._reading.cursor
        if self._watcher is not None and self._watched == cursor.files:
            return False
        self._let_go()
        self._watcher = self._reading.waker = LoopWatcher()
        self._watched = cursor.files
        cursor.watch(self._watcher, 0)
        return True

    async def _sleep(self, left: float) -> None:
        """Sleep until there may be more, at most `left` seconds; not at all if there was a record before we asked."""
        cursor, watcher = self._reading.cursor, self._watcher
        cursor.ask()
        if watcher is None or self._reading.is_over or (cursor.frames is not None and cursor.frames.has_more()):
            return  # another thread may have closed the iteration before it could wake the watcher
        if not await watcher.wait(left if cursor.is_rung else min(left, BLIND_POLL)) and not self._reading.is_over:
            cursor.refuse_vanished()

    def _let_go(self) -> None:
        watcher, self._watcher = self._watcher, None
        self._reading.waker = None
        if watcher is not None:
            watcher.close()

    async def aclose(self) -> None:
        """Release the log; the iteration is over. Another task that waits in it wakes, and its iteration ends."""
        self._reading.close()
        self._let_go()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
