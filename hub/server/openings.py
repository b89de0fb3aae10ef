"""The calls of shippers that are being opened: a bounded number. The hub refuses others before any work, with the time until a retry.

To open a call, the hub finds or makes its shards. When thousands of clients connect at once, many would wait until they time out, and then
retry. The hub would work for calls that are gone. So it accepts only as many as it can open soon, long before their clients give up. It
opens a few of them at a time. Meanwhile it stores the records of opened calls. Otherwise all clients would be served equally slowly, and
most of them too late.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hub.errors import HubFull
from kvspool import system
from kvspool.system.handles import Handle
from kvspool.system.pauses import jittered

MOST = 512  # calls that are being opened, or wait for that
SOON = 10.0  # seconds in which all of those will probably have been opened
AT_ONCE = 4  # calls that are opened at a time: fewer than there are threads
LEAST_WAIT, LONGEST_WAIT = 1.0, 30.0  # seconds
SLOWEST = 0.05  # longest mean that counts, in seconds: calls are slow while a crowd arrives, and early retries cost little
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
            if self._count >= self._most or self._count * self._interval > SOON:
                self.refused += 1
                raise HubFull(f"the hub is opening {self._count} calls, and can't open more of them soon", self._wait())
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

    @property
    def _interval(self) -> float:
        """Return the estimated seconds between the ends of two calls."""
        return min(self._mean, SLOWEST)

    def _wait(self) -> float:
        """Return after how many seconds those before a new call will probably have been opened, with those that were refused before it.

        Beyond the longest wait, calls return at random times, and not all at once.
        """
        now = system.port.monotonic()
        self._next = max(self._next, now + self._count * self._interval) + self._interval
        wait = max(LEAST_WAIT, self._next - now)
        return wait if wait <= LONGEST_WAIT else jittered(LONGEST_WAIT / 1.5)
