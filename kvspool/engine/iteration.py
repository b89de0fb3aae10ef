"""Iterations over logs of every kind: their limit, prefetched records, Gaps, and end.

**Closing.** Any thread may close an iteration: the thread that waits in it wakes, and the iteration ends without an error. Closing the log,
durable reader, shard set or hub root of an iteration ends it with `Closed`: the next call raises it, and a call that waits in another
thread or task raises it at once. Prefetched records are dropped then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, Generic, Protocol, Self, TypeVar
from weakref import WeakValueDictionary

from kvspool import system
from kvspool.engine.cursor import Cursor, Make
from kvspool.engine.wakeups import POLL, let_others_run
from kvspool.errors import Closed, GapError, LogVanished
from kvspool.kernel.frames import Batch, Items
from kvspool.options import OnGap
from kvspool.record import Gap, Record
from kvspool.system.handles import ClosingHandle, Handle

NO_END = 1 << 62  # more records than any log has
NOTHING: Final = object()  # there is no item now


class Waker(Protocol):
    """The object in which a thread or a task sleeps until there are more records."""

    def wake(self) -> None:
        """Wake the sleeper, or let its next sleep end at once. Any thread may call this."""


class Endable(Protocol):
    """An iteration, or a durable reader that has iterations."""

    def end(self, why: str) -> None:
        """Return no more records: every call raises Closed with the message `why`."""


E = TypeVar("E", bound=Endable)
R = TypeVar("R", covariant=True)
T = TypeVar("T")


class Iteration(Iterator[Any], ClosingHandle):
    """Iterates over the records that a cursor has now, and over Gaps according to `on_gap`.

    "raise": GapError, and the next call continues after it. "yield": the Gap instead of the records. "skip": only counted, in `missed`. Not
    to be shared between threads.
    """

    def __init__(self, cursor: Cursor, limit: int | None = None, on_gap: OnGap = "yield", make: Make | None = Record) -> None:
        """make: creates each item; None: only the values."""
        self._batch = Batch(check(limit, on_gap))
        self.cursor = cursor
        self._make = make
        self.waker: Waker | None = None  # of the thread or task that waits for the next record
        self._on_gap = on_gap
        self._calls = 0  # under way, and using the log
        self._is_closed = False
        self._why = ""  # why the iteration ended, if its handle was closed

    @property
    def missed(self) -> int:
        """Return how many sequences were in Gaps so far."""
        return self.cursor.missed

    @property
    def is_over(self) -> bool:
        """Return whether no more items will be returned: the limit was reached, or the iteration was closed."""
        return self._batch.left == 0

    @property
    def has_items(self) -> bool:
        """Return whether the next record is prefetched."""
        return self._batch.at < len(self._batch.items)

    @property
    def batch(self) -> Batch:
        """Return the prefetched records that were not returned yet, for a caller that takes them from there; see `fill`."""
        return self._batch

    def fill(self, most: int) -> bool:
        """If the batch is empty, prefetch up to `most` present records, or one Gap; return whether it has any now.

        Never blocks. An exception from a signal handler leaves prefetched records in the batch.
        """
        if not self.has_items:
            items = self._copied_out(self._fetch, most)
            if items is not self._batch.items:  # a Gap, or nothing, since another thread closed the iteration
                self._batch.items = items
        return self.has_items

    def poll(self, most: int | None = None) -> list[Any]:
        """Return up to `most` present records (None: one batch) without blocking: records, or one Gap, or nothing.

        Raises nothing for a Gap, whatever `on_gap` is: it is in the result.
        """
        self.fill(self.cursor.AT_ONCE if most is None else most)
        batch = self._batch.items[self._batch.at :]
        self._batch.clear()
        return batch

    def _fetch(self, most: int) -> list[Any]:
        """Prefetch up to `most` records into the batch and return them, or one Gap; called when the batch is empty."""
        return self._fetched(self.cursor.fetch, most)

    def _fetched(self, fetch: Callable[..., Gap | None], most: int) -> list[Any]:
        """Do the work of `_fetch` with `fetch(most, make, items)`.

        The records wait in the batch: a signal handler may raise before they are returned, and then the next call continues with them.
        """
        items = self._batch.clear()
        gap = fetch(most, self._make, items)
        return items if gap is None else [gap]

    def __iter__(self) -> Iterator[Any]:
        return Items(self._batch, self._refill)

    def __next__(self) -> Any:
        return self._batch.take(self._refill)

    def _refill(self) -> Any:
        """Return the next record or Gap, when the batch is empty."""
        while (left := self._batch.left) != 0:
            most = self.cursor.AT_ONCE
            batch = self._copied_out(self._next_batch, most if left < 0 else min(most, left))
            if not batch:
                break
            item = batch[0]
            if not isinstance(item, Gap):
                self._batch.at = 1
                self._batch.left -= left > 0
                return item
            if self._on_gap == "raise":
                raise GapError(item)
            if self._on_gap == "yield":
                return item
        self._release_closed()  # another thread has closed the iteration while the batch waited
        self.check_ended()
        raise StopIteration

    def _copied_out(self, fetch: Callable[[int], list[Any]], most: int) -> list[Any]:
        """Return the result of `fetch(most)`; nothing if the iteration is closed, also by another thread meanwhile.

        That thread leaves the release of the log to this one, which does it after the call: no thread reads from a closed descriptor.
        """
        self._calls += 1
        try:
            batch = [] if self._is_closed else fetch(most)
            return [] if self._is_closed else batch
        except (Closed, LogVanished):
            if self._is_closed:
                return []
            raise
        finally:
            self._calls -= 1
            self._release_closed()

    def _next_batch(self, most: int) -> list[Any]:
        """Return the result of `_fetch`; a follower waits for it. After records, the batch fetches the next ones itself where it can."""
        self._batch.unpark()
        batch = self._fetch(most)
        if batch and not isinstance(batch[0], Gap):
            self.cursor.run(self._batch, self._make)
        return batch

    def close(self) -> None:
        """Release the log; the iteration is over. A thread or task that waits in it wakes, and its iteration ends."""
        self._is_closed = True
        self._batch.left = 0
        waker = self.waker
        if waker is not None:
            waker.wake()
        self._release_closed()

    def end(self, why: str) -> None:
        """Close the iteration because its handle was closed: every call raises Closed with the message `why`."""
        if not self.is_over:
            self._why = why
            self.close()

    def check_ended(self) -> None:
        """Raise Closed if the iteration ended because its handle was closed."""
        if self._why:
            raise Closed(self._why)

    def _use(self, cursor: Cursor) -> None:
        """Continue with another cursor. Prefetched records count as not returned."""
        self._batch.unpark()
        self._batch.clear()
        before, self.cursor = self.cursor, cursor
        cursor.missed = before.missed
        before.close()

    def _release_closed(self) -> None:
        """Release the files of a closed iteration, unless a thread still uses them: that thread calls this afterwards."""
        if self._is_closed and not self._calls and not self._batch.waiting:
            self._release()

    def _release(self) -> None:
        """Release the iteration's files. They may be released already."""
        self.cursor.close()


class Following(Iteration):
    """Iterates over the records that a cursor has, and waits for more; ends after `timeout` seconds without one (None: never).

    spin: seconds to poll before sleeping: that uses a core, and saves the wake-up.
    """

    def __init__(self, cursor: Cursor, limit: int | None, on_gap: OnGap, timeout: float | None, spin: float = 0.0) -> None:
        super().__init__(cursor, limit, on_gap)
        self._timeout = check_timeout(timeout)
        self._spin = check_spin(spin)
        self._waiter = self.waker = cursor.waiter(spin)

    def _use(self, cursor: Cursor) -> None:
        self._waiter.close()
        super()._use(cursor)
        self._waiter = self.waker = cursor.waiter(self._spin)

    def _next_batch(self, most: int) -> list[Any]:
        """Return the next records as soon as there are any; nothing after the timeout, or after another thread has closed the iteration."""
        waited = self._batch.unpark()
        batch = self._fetch(most)
        if not batch and waited and not self.is_over:
            self.cursor.refuse_vanished()
        deadline = None if batch or self._timeout is None else system.port.monotonic() + self._timeout - waited / 1e9
        while not batch and not self.is_over:
            left = POLL if deadline is None else min(POLL, deadline - system.port.monotonic())
            if left <= 0:
                break
            batch = self._fetched(partial(self._waiter.fetch, left), most)
        if batch and not isinstance(batch[0], Gap) and self._make is Record:
            self._waiter.park(self._batch, POLL if self._timeout is None else min(POLL, self._timeout))
        return batch

    def _fetch(self, most: int) -> list[Any]:
        self._waiter.unpark()  # any caller, even a signal handler, moves the cursor
        return super()._fetch(most)

    def _release(self) -> None:
        self._waiter.close()
        super()._release()


class TurnReading(ClosingHandle):
    """An iteration over many logs that takes turns with others at one position; see `Iterations` for its end.

    missed: sequences in Gaps so far. _left: records that may still be returned; -1: no limit. _timeout: seconds to wait for one; None: no
    limit. _why: why its handle was closed.
    """

    _is_closed = False
    _why = ""

    def __init__(self, limit: int | None, on_gap: OnGap, timeout: float | None) -> None:
        self.missed = 0
        self._left = check(limit, on_gap)
        self._on_gap = on_gap
        self._timeout = check_timeout(timeout)

    @property
    def is_over(self) -> bool:
        """Return whether no more items will be returned."""
        return self._left == 0

    def _shows(self, gap: Gap) -> bool:
        """Count a Gap, and return whether it is returned. Raises GapError."""
        self.missed += gap.count
        if self._on_gap == "raise":
            raise GapError(gap)
        return self._on_gap == "yield"

    def _wait_until(self, deadline: float | None) -> tuple[float | None, float]:
        """Return when to end without a record, None for never, and how long to sleep once. deadline: None before the first sleep."""
        now = system.port.monotonic()
        if deadline is None and self._timeout is not None:
            deadline = now + self._timeout
        return deadline, POLL if deadline is None else min(POLL, deadline - now)

    def release(self) -> None:
        """Close the logs that are read; the next call reopens them."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all logs and end the iteration, also one that waits in another thread."""
        self._is_closed = True
        self._left = 0
        self.release()

    def end(self, why: str) -> None:
        """Close the iteration because its handle was closed: every call raises Closed with the words `why`."""
        if self._left != 0:
            self._why = why
            self.close()


class Resumable(Protocol):
    """An iteration that ends whenever there is no item, and continues later."""

    @property
    def missed(self) -> int:
        """Return how many sequences were in Gaps so far."""

    def __next__(self) -> Any:
        """Return the next item; StopIteration if there is none now."""

    def close(self) -> None:
        """Close all logs and end the iteration."""


class AsyncReading(AsyncIterator[R], Handle, Generic[R]):
    """Iterates as a reading does, for `async for`. Get it from `follow_async`; use it in one task.

    A cancelled wait loses no item: the next one continues there. Leave the iteration early with `aclose`, or use `async with`.
    """

    def __init__(
        self, reading: Resumable, sleep: Callable[[float], Awaitable[object]], limit: int | None, timeout: float | None, run: int = 1
    ) -> None:
        """Take over `reading`, which has no limit.

        sleep: waits up to some seconds until there may be an item. timeout: seconds without an item after which the iteration ends; None:
        never. run: items after which other tasks of the loop get a turn.
        """
        self._reading = reading
        self._sleep = sleep
        self._left = check(limit, "raise")
        self._timeout = check_timeout(timeout)
        self._run = run
        self._taken = 0

    @property
    def missed(self) -> int:
        """Return how many sequences were in Gaps so far."""
        return self._reading.missed

    async def __anext__(self) -> R:
        if self._left == 0:
            raise StopAsyncIteration
        if self._taken % self._run == 0:
            await let_others_run()
        deadline = None if self._timeout is None else system.port.monotonic() + self._timeout
        while (item := next(self._reading, NOTHING)) is NOTHING:
            left = POLL if deadline is None else min(POLL, deadline - system.port.monotonic())
            if self._left == 0 or left <= 0:  # another task has closed it, or the timeout is over
                raise StopAsyncIteration
            await self._sleep(left)
        self._taken += 1
        if self._left > 0 and item.__class__ is not Gap:
            self._left -= 1
        return item  # type: ignore[return-value]  # of the kind that the reading returns

    async def aclose(self) -> None:
        """Close all logs; the iteration is over. Another task that waits in it wakes, and its iteration ends."""
        self._left = 0
        self._reading.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Iterations:
    """The iterations of an open handle. Closing the handle ends them, in any thread."""

    def __init__(self) -> None:
        self._all: WeakValueDictionary[int, Endable] = WeakValueDictionary()
        self._why = ""

    def add(self, one: E) -> E:
        """End this iteration with the handle; at once if another thread is closing it. Return the iteration."""
        self._all[id(one)] = one
        if self._why:
            one.end(self._why)
        return one

    def end(self, why: str) -> None:
        """End all iterations, and those that are added later; see `Endable.end`."""
        self._why = why
        with ExitStack() as ending:  # all of them, even if one fails
            for reference in self._all.valuerefs():
                one = reference()
                if one is not None:
                    ending.callback(one.end, why)


def gathered(items: Iterable[T], size: Callable[[T], int], most: int, most_bytes: int) -> Iterator[list[T]]:
    """Yield the items in lists. A list ends when it has `most` items, or when their sizes add up to `most_bytes`.

    If `items` raises an error, the items before it are yielded first.
    """
    batch: list[T] = []
    total = 0
    try:
        for item in items:
            batch.append(item)
            total += size(item)
            if len(batch) == most or total >= most_bytes:
                yield batch
                batch, total = [], 0
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


@contextmanager
def keeping(partial: Callable[[], Any]) -> Iterator[None]:
    """Run the `with` block; an error in it gets the result of `partial()` as its attribute `partial`; see `KvspoolError`."""
    try:
        yield
    except BaseException as error:
        error.partial = partial()  # type: ignore[attr-defined]
        raise


def check(limit: int | None, on_gap: OnGap) -> int:
    """Return how many records may be returned, -1 for no limit. Raises ValueError for an invalid limit, or an invalid `on_gap`."""
    if on_gap not in ("raise", "yield", "skip"):
        raise ValueError(f'on_gap is "raise", "yield" or "skip", not {on_gap!r}')
    if limit is not None and limit < 0:
        raise ValueError(f"limit is a number of records, not {limit}")
    return -1 if limit is None or limit >= NO_END else limit


def check_timeout(timeout: float | None) -> float | None:
    """Return the seconds to wait for a record; 0 for a negative number, None for no limit. Raises ValueError for nan."""
    if timeout is None:
        return None
    if timeout != timeout:
        raise ValueError("timeout is a number of seconds, not nan")
    return max(0.0, timeout)


def check_spin(spin: float) -> float:
    """Return the seconds to poll for a record before sleeping. Raises ValueError for another value."""
    if not 0 <= spin < float("inf"):
        raise ValueError(f"spin is a number of seconds, not {spin}")
    return spin
