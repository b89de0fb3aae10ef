"""Following a journal from an event loop: the loop goes on with its other work while nothing is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Self

from kvspool import system
from kvspool.eventloops import LoopWatcher
from kvspool.journal.cursor import Reading
from kvspool.wakeups import POLL


class AsyncFollowing(AsyncIterator[Any]):
    """Iterates as `Following` does, for `async for`. Use it in one task; a cancelled wait loses no record."""

    def __init__(self, reading: Reading, timeout: float | None) -> None:
        self._reading = reading
        self._timeout = timeout
        self._watcher: LoopWatcher | None = None
        self._watched = -1

    async def __anext__(self) -> Any:
        try:
            return await self._next()
        except BaseException:  # over, cancelled, or a Gap: after that nobody may ask for more
            self._let_go()
            raise

    async def _next(self) -> Any:
        if not self._reading.has_items:
            await asyncio.sleep(0)  # a log that always has more must not keep the loop's other tasks waiting
        deadline = None if self._timeout is None else system.port.monotonic() + self._timeout
        while True:
            self._watch()
            with suppress(StopIteration):
                return next(self._reading)
            left = POLL if deadline is None else min(POLL, deadline - system.port.monotonic())
            if self._reading.is_over or left <= 0 or self._watcher is None:
                raise StopAsyncIteration
            if await self._watcher.wait(left) is None:
                self._reading.cursor.refuse_vanished()

    def _watch(self) -> None:
        cursor = self._reading.cursor
        if self._reading.has_items or (self._watcher is not None and self._watched == cursor.base):
            return
        self._let_go()
        self._watcher = LoopWatcher()
        cursor.watch(self._watcher, 0)
        self._watched = cursor.base

    def _let_go(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    async def aclose(self) -> None:
        """Let go of the log; the iteration is over."""
        self._let_go()
        self._reading.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
