"""Appends and flushes that can be awaited.

An append that needs no wait takes microseconds, so it happens in the loop. One that must wait, for the lock or for room, continues in a
thread. Flushes happen in one thread at a time: all tasks that wait share the next flush, as processes and threads share flushes of the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvspool.engine.wakeups import running_loop
from kvspool.errors import Closed, KvspoolError, LockTimeout, NotDurable, SpoolFull
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.engine.following import AsyncFollowing
    from kvspool.log import Log
    from kvspool.options import Isolation, OnGap, Start

T = TypeVar("T")


class AsyncLog(Handle):
    """The appends, flushes and followers of a log for the tasks of one event loop.

    The log's other methods are in `log`. `close` closes the log, as `async with` does.
    """

    def __init__(self, log: Log) -> None:
        """log: a handle of its own, from `kvspool.open` or `kvspool.create`: an append by another thread would block the loop.

        At the handle's level "disk" every append is awaited until it is on disk.
        """
        self.log = log
        self._is_durable = log.durability == "disk"
        self._appender = ThreadPoolExecutor(1, "kvspool-append")
        self._in_thread = 0  # appends that wait; later ones follow them, since they would wait for the handle
        self._flusher = ThreadPoolExecutor(1, "kvspool-flush")
        self._flush: _Flush | None = None  # the newest one

    async def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
    ) -> int:
        """Append one record and return its sequence; the arguments and errors are those of `Log.append`.

        durable: return when the record is on disk; the loop runs other tasks meanwhile, and all that wait share one flush. A task that is
        cancelled may have appended its record.
        """
        fields: dict[str, Any] = {"key": key, "type": type, "timestamp": timestamp}
        sequence = await self._appended(lambda timeout: self.log.append(value, timeout=timeout, **fields), timeout)
        if durable and not self._is_durable:
            await self._on_disk(range(sequence, sequence + 1))
        return sequence

    async def append_many(
        self,
        values: Iterable[Any],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
    ) -> range:
        """Append a record for each value, and return their sequences; see `append` and `Log.append_many`."""
        every = list(values)
        fields: dict[str, Any] = {"keys": None if keys is None else list(keys), "type": type, "timestamp": timestamp}
        sequences = await self._appended(lambda timeout: self.log.append_many(every, timeout=timeout, **fields), timeout)
        if durable and not self._is_durable and sequences:
            await self._on_disk(sequences)
        return sequences

    async def sync(self) -> int:
        """Flush every appended record, and return the sequence below which all records are on disk; see `Log.sync`."""
        if self.log.closed:
            raise Closed(f"{self.log.path} is closed")
        flush = self._flush
        if flush is None or flush.has_begun:  # otherwise it covers all records that are appended now
            flush = self._flush = _Flush(self.log, self._flusher)
        return await asyncio.shield(flush.result)

    def follow(
        self,
        start: Start = "earliest",
        *,
        timeout: float | None = None,
        limit: int | None = None,
        on_gap: OnGap = "raise",
        isolation: Isolation = "appended",
    ) -> AsyncFollowing:
        """Iterate with `async for` over the records from `start` on, and wait for more; see `Log.follow_async`."""
        return self.log.follow_async(start, timeout=timeout, limit=limit, on_gap=on_gap, isolation=isolation)

    async def close(self) -> None:
        """Finish the flush under way, and close the log."""
        running_loop()
        await asyncio.to_thread(self._flusher.shutdown)
        self.log.close()  # an append that waits in the thread ends with Closed
        await asyncio.to_thread(self._appender.shutdown)

    async def __aenter__(self) -> Self:
        running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _appended(self, append: Callable[[float | None], T], timeout: float | None) -> T:
        """Return the result of an append; it happens in a thread if it must wait."""
        loop = running_loop()
        if not self._is_durable and not self._in_thread:
            try:
                return append(0)
            except (LockTimeout, SpoolFull) as error:
                if timeout == 0 or getattr(error, "appended", None):
                    raise
        self._in_thread += 1
        result = loop.run_in_executor(self._appender, append, timeout)
        result.add_done_callback(self._left_thread)
        return await asyncio.shield(result)

    def _left_thread(self, result: asyncio.Future[T]) -> None:
        self._in_thread -= 1
        if not result.cancelled():
            result.exception()  # its task may be cancelled

    async def _on_disk(self, sequences: range) -> None:
        """Wait until appended records are on disk. Raises NotDurable with the flush's error."""
        try:
            await self.sync()
        except (KvspoolError, OSError) as error:
            raise NotDurable(sequences, str(error)) from error


class _Flush:
    """A flush in another thread, for all tasks that asked for one before it began."""

    def __init__(self, log: Log, thread: ThreadPoolExecutor) -> None:
        self.has_begun = False
        self._log = log
        self.result = running_loop().run_in_executor(thread, self._run)
        self.result.add_done_callback(lambda result: result.cancelled() or result.exception())  # all of its tasks may be cancelled

    def _run(self) -> int:
        self.has_begun = True  # before the flush: a record that is appended later may not be in it
        return self._log.sync()
