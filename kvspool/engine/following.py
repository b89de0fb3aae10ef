"""Follow a log of any kind from an event loop, which continues with other work while there is no record.

One inotify descriptor serves all followed logs of a running loop (`eventloops`). A cancelled task, a finished iteration, and a dropped
iterator leave nothing open.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import Any, Final, Generic, Self, TypeVar

from kvspool import system
from kvspool.engine.eventloops import LoopWatcher
from kvspool.engine.iteration import Iteration, check_timeout
from kvspool.engine.wakeups import POLL
from kvspool.system.handles import Handle

R = TypeVar("R", bound=Iteration[Any])
NOTHING: Final = object()


class AsyncFollowing(AsyncIterator[Any], Generic[R], Handle):
    """Iterates as `Following` does, for `async for`. Get it from `follow_async`; use it in one task.

    A cancelled wait loses no record: the next one continues there. Leave the iteration early with `aclose`, or use `async with`.
    """

    def __init__(self, reading: R, timeout: float | None) -> None:
        """Take over `reading`, which has no end: while it has no record, sleep for at most `timeout` seconds (None: indefinitely)."""
        self._reading = reading
        self._timeout = check_timeout(timeout)
        self._watcher: LoopWatcher | None = None

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
            await asyncio.sleep(0)  # a log that always has more must not block the loop's other tasks
        deadline = None if self._timeout is None else system.port.monotonic() + self._timeout
        has_slept = False
        while (item := self._look(has_slept)) is NOTHING:
            left = POLL if deadline is None else min(POLL, deadline - system.port.monotonic())
            if self._reading.is_over or left <= 0:
                self._reading.check_ended()
                raise StopAsyncIteration
            await self._sleep(left)
            has_slept = True
        return item

    @abstractmethod
    def _look(self, has_slept: bool) -> Any:
        """Return the next item without blocking; NOTHING if there is none yet. has_slept: we have just waited for it."""

    @abstractmethod
    async def _sleep(self, left: float) -> None:
        """Sleep until there may be more, at most `left` seconds."""

    def _watch_with(self, watcher: LoopWatcher) -> None:
        """Sleep on this watcher from now on."""
        self._watcher = self._reading.waker = watcher

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
