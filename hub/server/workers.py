"""Threads for the work of calls that blocks: reading and storing records. Their number is fixed, whatever the number of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from kvspool.system.handles import Handle

T = TypeVar("T")


class Workers(Handle):
    """A pool of threads for coroutines. Work waits in the order in which it came."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Return the result of `work`, called on one of the threads.

        A cancelled caller waits for work that has begun, because that uses what the caller is about to release.
        """
        job = self._threads.submit(work, *arguments)
        result = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            job.cancel()
            while not result.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([result])
            if not result.cancelled():
                result.exception()  # it was asked for: asyncio would log it otherwise
            raise

    def close(self) -> None:
        """Wait for the work in progress, and end the threads."""
        self._threads.shutdown(cancel_futures=True)
