"""Memory that is granted before it is used: a number of bytes for all calls, and a share of it for each connection.

A request that can't be granted waits. The next one is that of the connection that would then use least. It isn't overtaken while the budget
lacks memory for it. Requests that exceed only the share of their own connection hold up no other. Only the event loop
asks; any thread may release.

**Reserve.** Clients that hold their memory and do nothing would let all others wait. So a part of the budget is for clients that use
little. A request that would have to wait is granted from it, if the reserve then has as much left as its owner uses of it. So each
further owner gets less, and no owner uses up the reserve.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from contextlib import suppress

from kvspool import system
from kvspool.system.handles import Handle

TOO_LARGE = "a request of {size} bytes of memory is beyond the limit of {most} bytes"


class Share:
    """The part of a budget that one connection uses, and its limit. owner: connections with the same one share a part of the reserve."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self.owner: Hashable = self


class Grant(Handle):
    """Granted bytes. Release it once its memory is no longer used; a second time has no effect. Usable as a context manager."""

    __slots__ = ("_budget", "_owner", "_share", "size")

    def __init__(self, budget: Budget, share: Share, size: int, owner: Hashable | None = None) -> None:
        """Created only by a budget. owner: whose part of the reserve it is; None: it is not from the reserve."""
        self.size = size
        self._budget = budget
        self._share = share
        self._owner = owner

    def release(self, size: int | None = None) -> None:
        """Give back `size` bytes, or all that remain. Callable in any thread."""
        self._budget._release(self, size)

    def __enter__(self) -> Grant:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class MemoryRequest:
    """A request that waits for its grant."""

    __slots__ = ("granted", "share", "since", "size")

    def __init__(self, size: int, share: Share, granted: Callable[[Grant], None], since: float) -> None:
        self.size = size
        self.share = share
        self.granted = granted
        self.since = since


class Budget(Handle):
    """A number of bytes. Requests are made on the event loop, and granted there."""

    def __init__(self, most: int, loop: asyncio.AbstractEventLoop, reserve: int = 0) -> None:
        """most: bytes, the reserve included."""
        self.most = most
        self._loop = loop
        self._reserve = reserve
        self._used = 0
        self._reserved: Counter[Hashable] = Counter()  # bytes of the reserve, by owner
        self._reserve_used = 0  # bytes of all of them
        self._waiting: dict[Share, deque[MemoryRequest]] = {}
        self._next: MemoryRequest | None = None  # waits for the budget, and not only for its share
        self._is_woken = False
        self._lock = threading.Lock()  # of used bytes, of shares and of grants

    @property
    def used(self) -> int:
        """Return how many bytes are granted now."""
        return self._used

    @property
    def room(self) -> int:
        """Return how many bytes are free, without the reserve."""
        return self.most - self._reserve - (self._used - self._reserve_used)

    @property
    def next(self) -> MemoryRequest | None:
        """Return the request that gets the next bytes; None if the budget has enough for all."""
        return self._next

    def fits(self, size: int, share: Share) -> bool:
        """Return whether a request of this size can ever be granted."""
        return size <= self.largest(share)

    def largest(self, share: Share) -> int:
        """Return the bytes of the largest request that can ever be granted."""
        return min(self.most - self._reserve, share.most)

    def try_grant(self, size: int, share: Share) -> Grant | None:
        """Return a grant, unless that needs waiting."""
        return None if share in self._waiting else self._grant(size, share)

    def request(self, size: int, share: Share, granted: Callable[[Grant], None]) -> MemoryRequest | None:
        """Call `granted` with the grant, at once or later on the event loop. Return the request if it waits.

        Raises ValueError if it can never be granted.
        """
        if not self.fits(size, share):
            raise ValueError(TOO_LARGE.format(size=size, most=self.largest(share)))
        if (grant := self.try_grant(size, share)) is not None:
            granted(grant)
            return None
        request = MemoryRequest(size, share, granted, system.port.monotonic())
        self._waiting.setdefault(share, deque()).append(request)
        self._wake_soon()  # a release in another thread may have come between
        return request

    def cancel(self, request: MemoryRequest) -> None:
        """Withdraw a request that waits."""
        waiting = self._waiting.get(request.share)
        if waiting is not None and request in waiting:
            waiting.remove(request)
            if not waiting:
                del self._waiting[request.share]
            self._wake_soon()

    async def grant(self, size: int, share: Share) -> Grant:
        """Return a grant, after waiting for it. Raises ValueError if it can never be granted."""
        future: asyncio.Future[Grant] = self._loop.create_future()

        def deliver(grant: Grant) -> None:
            if future.cancelled():
                grant.release()
            else:
                future.set_result(grant)

        request = self.request(size, share, deliver)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().release()
            elif request is not None:
                self.cancel(request)
            raise

    def _grant(self, size: int, share: Share) -> Grant | None:
        """Return a grant, if the budget has room and no other request is next, or from the reserve; else None."""
        with self._lock:
            if share.used + size > share.most:
                return None
            owner = None
            if self._next is not None or size > self.room:
                owner = share.owner
                if self._reserved[owner] + size > self._reserve - self._reserve_used - size:
                    return None
                self._reserved[owner] += size
                self._reserve_used += size
            self._used += size
            share.used += size
            return Grant(self, share, size, owner)

    def _release(self, grant: Grant, size: int | None) -> None:
        with self._lock:
            size = grant.size if size is None else min(size, grant.size)
            grant.size -= size
            self._used -= size
            grant._share.used -= size
            if grant._owner is not None:
                self._reserved[grant._owner] -= size
                self._reserve_used -= size
                if not self._reserved[grant._owner]:
                    del self._reserved[grant._owner]
            must_wake = size > 0 and bool(self._waiting) and not self._is_woken
            self._is_woken = self._is_woken or must_wake
        if must_wake:
            self._wake_soon()

    def _wake_soon(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        """Grant requests, beginning with the connection that then uses least."""
        self._is_woken = False
        self._next = None
        shares = [(share.used + waiting[0].size, at, share) for at, (share, waiting) in enumerate(self._waiting.items())]
        heapq.heapify(shares)
        while shares:
            _, at, share = heapq.heappop(shares)
            waiting = self._waiting.get(share)
            if not waiting:
                continue
            request = waiting[0]
            grant = self._grant(request.size, share)
            if grant is None:
                if self._next is None and share.used + request.size <= share.most:
                    self._next = request  # others may get memory of the reserve
                continue
            waiting.popleft()
            if not waiting:
                del self._waiting[share]
            else:
                heapq.heappush(shares, (share.used + waiting[0].size, at, share))
            request.granted(grant)
