"""The calls of shippers that are being opened: a bounded number. The hub refuses others before any work, with the time until a retry.

To open a call, the hub finds or makes its shards. When thousands of clients connect at once, many would wait until they time out, and then
retry. The hub would work for calls that are gone. So it accepts a bounded number, and refuses those that have waited for long, before their
clients give up. It opens a few of them at a time. Meanwhile it stores the records of opened calls. Otherwise all clients would be served
equally slowly, and most of them too late.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from hub.errors import HubFull
from kvspool import system
from kvspool.system.handles import Handle
from kvspool.system.pauses import jittered

MOST = 512  # calls that are being opened, or wait for that
PATIENCE = 15.0  # seconds that a call waits to be opened; its client waits twice as long for an answer
AT_ONCE = 4  # calls that are opened at a time: fewer than there are threads
LEAST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds
SLOWEST = 0.05  # longest mean that counts, in seconds: calls are slow while a crowd arrives
HASTE = 2  # a refused call may return in this part of the estimated time: another refusal costs less than an idle hub
FIRST_MEAN = 0.01  # seconds between the ends of two, until that is known
WEIGHT, SLOW = 0.1, 4.0  # of the last call in the mean; it counts as at most so many times the mean, because one alone may be slow


class Openings(Handle):
    """Counts the calls that are being opened. Thread-safe, except for the slots."""

    def __init__(self, most: int = MOST) -> None:
        self.refused = 0  # refused calls
        self.slots = asyncio.Semaphore(AT_ONCE)  # for the event loop
        self._most = most
        self._count = 0
        self._mean = FIRST_MEAN  # seconds between the ends of two of them, while others wait
        self._next = 0.0  # when the last refused call may be repeated
        self._ended_at = 0.0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    @property
    def rest(self) -> float:
        """Return for how many seconds no call has been opened; 0 while one is."""
        return 0.0 if self._count else system.port.monotonic() - self._ended_at

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a call inside the `with` block, in which it is opened. Raises HubFull for too many."""
        with self._lock:
            if self._count >= self._most:
                raise self._refused(f"the hub is opening {self._count} calls, which is the limit")
            if not self._count:
                self._ended_at = system.port.monotonic()  # it was idle
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                now = system.port.monotonic()
                self._mean += WEIGHT * (min(now - self._ended_at, SLOW * self._mean) - self._mean)
                self._ended_at = now

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a slot, which the call has inside the `async with` block. Raises HubFull after `PATIENCE`. For the event loop."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self.slots.acquire()
        except TimeoutError:
            with self._lock:
                raise self._refused(f"the hub is opening {self._count} calls, and could not open this one in {PATIENCE:.0f} s") from None
        try:
            yield
        finally:
            self.slots.release()

    def _refused(self, words: str) -> HubFull:
        """Under the lock: count a refused call, and return its error."""
        self.refused += 1
        return HubFull(words, self._wait())

    def _wait(self) -> float:
        """Return after how many seconds a refused call may return, by the time that those before it will probably take.

        Beyond the longest wait, calls return at random times, and not all at once.
        """
        now, interval = system.port.monotonic(), min(self._mean, SLOWEST) / HASTE
        self._next = max(self._next, now + self._count * interval) + interval
        wait = max(LEAST_WAIT, self._next - now)
        return wait if wait <= LONGEST_WAIT else jittered(LONGEST_WAIT / 1.5)
