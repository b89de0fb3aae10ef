"""Follow many logs from an event loop, which continues with other work while there is no record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from kvspool import system
from kvspool.engine.iteration import check, check_timeout
from kvspool.engine.wakeups import BLIND_POLL, POLL, let_others_run
from kvspool.options import OnGap
from kvspool.record import Gap
from kvspool.system.handles import Handle
from shard.merge import LOOK_AROUND, FollowingMerge

NOTHING: Final = object()
R = TypeVar("R", covariant=True)


class Followed(Protocol):
    """An iteration over a following merge with the timeout 0: it ends whenever there is no record, and continues later."""

    @property
    def missed(self) -> int:
        """Return how many sequences were in Gaps so far."""

    @property
    def merge(self) -> FollowingMerge[Any] | None:
        """Return the merge; None if there is none yet."""

    def __next__(self) -> Any: ...

    def close(self) -> None:
        """Close all logs."""


class AsyncMerge(AsyncIterator[R], Generic[R], Handle):
    """Iterates as `FollowingMerge` does, for `async for`. Get it from `follow_async`; use it in one task.

    A cancelled wait loses no record: the next one continues there. Leave the iteration early with `aclose`, or use `async with`. A wake-up
    costs a check of every idle log.
    """

    def __init__(self, followed: Followed, limit: int | None, on_gap: OnGap, timeout: float | None) -> None:
        """Take over `followed`, which has no limit; while it has no record, sleep for at most `timeout` seconds (None: indefinitely)."""
        self._followed = followed
        self._left = check(limit, on_gap)
        self._timeout = check_timeout(timeout)
        self._taken = 0
        self._is_closed = False

    @property
    def missed(self) -> int:
        """Return how many sequences were in Gaps so far."""
        return self._followed.missed

    async def __anext__(self) -> R:
        if self._left == 0:
            raise StopAsyncIteration
        if self._taken % LOOK_AROUND == 0:
            await let_others_run()
        deadline = None if self._timeout is None else system.port.monotonic() + self._timeout
        while (item := next(self._followed, NOTHING)) is NOTHING:
            left = POLL if deadline is None else min(POLL, deadline - system.port.monotonic())
            if self._is_closed or left <= 0:
                raise StopAsyncIteration
            await self._sleep(left)
        self._taken += 1
        if self._left > 0 and not isinstance(item, Gap):
            self._left -= 1
        return item  # type: ignore[return-value]  # of the kind that the merge creates

    async def _sleep(self, left: float) -> None:
        """Sleep until a log may have records; not at all if wake-ups have arrived since the last check."""
        merge = self._followed.merge
        watcher = None if merge is None else merge.take_events()
        if merge is not None and watcher is not None:
            can_ask = all(source.cursor.is_rung for source in merge.sources.values())
            await watcher.sleep(left if can_ask else min(left, BLIND_POLL))

    async def aclose(self) -> None:
        """Close all logs; the iteration is over. Another task that waits in it wakes, and its iteration ends."""
        self._is_closed = True
        self._left = 0
        self._followed.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
