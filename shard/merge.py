"""Many logs read as one: by timestamp within what is there, each log in its own order.

A record is handed out when it has the smallest timestamp of all that can be read at that moment; nothing waits for a log that is silent.
So over logs that were written before, the order is that of the timestamps; while following, a record that arrives later than another
one comes after it, whatever its timestamp. Within one log the order is always that of its sequences.

**Cost.** A record costs the logarithm of the number of logs that have something; a wake-up costs the logs that changed, however many
others are silent. All logs together are looked at twice a second at most, and where wake-ups were lost or can't be had.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Self

from kvspool import GapError, system
from kvspool.errors import Closed, Corruption, FormatError, Unrecovered
from kvspool.handles import Handle, close_all
from kvspool.iteration import OnGap, check
from kvspool.journal.cursor import Cursor as JournalCursor
from kvspool.record import Gap
from kvspool.spool.cursor import Cursor as SpoolCursor
from kvspool.wakeups import BLIND_POLL, POLL, Watcher
from shard import descriptors

if TYPE_CHECKING:
    from kvspool.journal.cursor import Reading as JournalReading
    from kvspool.spool.cursor import Reading as SpoolReading

Cursor = SpoolCursor | JournalCursor

LOOK_AROUND = 256  # records after which silent logs are looked at again
AHEAD = 1 << 16  # records that are copied out in advance, of all logs together
LEAST_AHEAD, MOST_AHEAD = 16, 1024  # of one log
REST = 4  # times as long as a look at everything took, before the next one where no wake-up will come
LONG_REST = 20  # the same where wake-ups do come

UNREADABLE = (Corruption, FormatError, Unrecovered)  # errors of one log, which stop no other


class Source:
    """One log of a merge: what was copied out of it, and what comes next."""

    def __init__(self, key: Hashable, order: int, cursor: Cursor, make: Callable[..., Any]) -> None:
        self.key = key
        self.order = order  # breaks ties, so that equal timestamps always come in the same order
        self.cursor = cursor
        self.reading: SpoolReading | JournalReading = cursor.reading(make)
        self.timestamp = 0
        self.item: Any = None
        self.watched: object = None  # the files whose changes wake us
        self._items: Iterator[Any] = iter(())

    def step(self, most: int) -> bool:
        """Have the next item in `item`, never blocking; False if there is none now. One that is there already stays.

        most: records to copy out at once.
        """
        item = self.item
        if item is None:
            item = next(self._items, None)
            if item is None:
                if self.reading.has_items:  # a signal came between while they were copied out
                    item = self.reading.next_or_none()
                else:
                    self._items = iter(self.reading.poll(most))
                    item = next(self._items, None)
                if item is None:
                    return False
            self.item = item
        if not isinstance(item, Gap):
            # A gap has no time of its own: it comes out at once.
            self.timestamp = item.timestamp
        return True


class Merge(Iterator[Any], Handle):
    """Iterates over several logs that are bounded. `limit` and `on_gap` as `kvspool.Spool.read` has them."""

    def __init__(self, limit: int | None = None, on_gap: OnGap = "raise") -> None:
        check(limit, on_gap)
        self.sources: dict[Hashable, Source] = {}
        self.lost = 0
        self.last: Any = None  # the key of the log whose item was handed out last
        self._left = limit
        self._on_gap = on_gap
        self._ready: list[tuple[int, int, Source]] = []  # a heap: timestamp and order of what each has next
        self._silent: dict[Hashable, Source] = {}
        self._new: dict[Hashable, Source] = {}  # silent, as far as we know: they are to be looked at before we sleep
        self._most = MOST_AHEAD
        self._taken = 0
        self._orders = 0
        self._refused: dict[Hashable, tuple[str, str]] = {}  # which log can't be read, and why
        self._failures: deque[Exception] = deque()  # to be raised by the next calls
        self._is_closed = False
        self._why = ""  # the iteration ended, if its handle was closed

    def add(self, key: Hashable, cursor: Cursor, make: Callable[..., Any]) -> None:
        """Read one more log; `make` makes its records, and `key` tells it from the others."""
        source = Source(key, self._orders, cursor, make)
        self._refused.pop(key, None)
        self._orders += 1
        self.sources[key] = self._silent[key] = self._new[key] = source
        self._most = max(LEAST_AHEAD, min(MOST_AHEAD, AHEAD // len(self.sources)))
        if self._is_closed:  # another thread may have closed the others just before
            source.reading.close()

    def refuse(self, key: Hashable, error: Exception, identity: str = "") -> None:
        """Let the next call raise the error of a log that can't be read, once for each reason; the other logs go on.

        identity: of a log that is no source yet. It raises the same error again for another log that took its place.
        """
        reason = (identity, str(error))
        if self._refused.get(key) != reason:
            self._refused[key] = reason
            self._failures.append(error)

    def drop(self, key: Hashable) -> None:
        """Read a log no more; only where nothing of it waits to be handed out."""
        self._silent.pop(key).reading.close()
        self._new.pop(key, None)
        self._refused.pop(key, None)
        del self.sources[key]

    def __next__(self) -> Any:
        try:
            while self._left != 0:
                if self._failures:
                    raise self._failures.popleft()
                self._settle()
                if self._failures:
                    continue
                if not self._ready:
                    if not self.wait():
                        break
                elif self._taken % LOOK_AROUND == 0:
                    self.look_around()
                if not self._ready:
                    continue
                item = self._take()
                if isinstance(item, Gap):
                    self.lost += item.count
                    if self._on_gap == "raise":
                        raise GapError(item)
                    if self._on_gap == "skip":
                        continue
                elif self._left is not None:
                    self._left = 0 if self._is_closed else self._left - 1
                return item
        except Closed:
            if not self._is_closed:
                raise
        except OSError as error:
            descriptors.explain(error, "the logs that are read together", len(self.sources))
            raise
        if self._why:
            raise Closed(self._why)
        raise StopIteration

    def _take(self) -> Any:
        self._taken += 1
        source = self._ready[0][2]
        item, source.item = source.item, None
        self.last = source.key
        return item

    def _settle(self) -> None:
        """Put the source whose item was handed out in its place: only now, since what goes wrong there must not cost that item."""
        ready = self._ready
        if ready and ready[0][2].item is None:
            source = ready[0][2]
            try:
                has_item = source.step(self._most)
            except UNREADABLE as error:
                heapq.heappop(ready)
                self._silent[source.key] = source
                self.refuse(source.key, error)
                return
            if has_item:
                heapq.heapreplace(ready, (source.timestamp, source.order, source))
            else:
                heapq.heappop(ready)
                self.fall_silent(source)

    def fall_silent(self, source: Source) -> None:
        """Nothing is left of a log now: of one that is bounded, for good."""
        self._silent[source.key] = source

    def look_around(self) -> None:
        """Once in a while, where one log alone would keep us busy: look at the others too."""

    def look_at(self, sources: Iterable[Source]) -> bool:
        """Look at logs, those of them that are silent; return whether there is something to hand out or to raise.

        The error of a log that is damaged is left to the next call; any other error is raised when all logs were looked at.
        """
        failure = None
        spoke = False
        for source in sources:
            if source.key not in self._silent:
                continue
            try:
                has_item = self.listen(source)
            except UNREADABLE as error:
                self.refuse(source.key, error)
                self._new.pop(source.key, None)
                continue
            except Exception as error:
                failure = failure or error
                continue
            self._new.pop(source.key, None)
            if has_item:
                self._refused.pop(source.key, None)
                self._silent.pop(source.key)
                heapq.heappush(self._ready, (source.timestamp, source.order, source))
                spoke = True
        if failure is not None:
            raise failure
        return spoke or bool(self._failures)

    def listen(self, source: Source) -> bool:
        """Return whether a log has something now."""
        return source.step(self._most)

    def wait(self) -> bool:
        """Return whether there may be more, where nothing is ready: of bounded logs, only in those that were just added."""
        return self.look_at(list(self._new.values()))

    def close(self) -> None:
        """Release all logs; the iteration is over. Another thread that waits in it wakes, and its iteration ends."""
        self._is_closed = True
        self._left = 0
        close_all(source.reading for source in list(self.sources.values()))

    def end(self, why: str) -> None:
        """Close the iteration because its handle was closed: every call raises Closed with the words `why`."""
        if self._left != 0:
            self._why = why
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FollowingMerge(Merge):
    """Like Merge, and sleeps on one inotify descriptor where nothing is there; ends after `timeout` seconds without a record.

    A log that falls silent is asked once to wake us, and not looked at again before it does. All are looked at every `POLL` seconds. Where
    no wake-up will come, because the kernel has no watch left, its queue overflowed, or we may not write to a log and so can't ask, they
    are looked at as often as `BLIND_POLL` says; and not for more than a part of our time, however many there are.
    """

    def __init__(self, limit: int | None = None, on_gap: OnGap = "raise", timeout: float | None = None) -> None:
        super().__init__(limit, on_gap)
        self.timeout = timeout
        self._watcher: Watcher | None = None
        self._mute: dict[Hashable, Source] = {}  # silent, and nobody will ring for them
        self._is_lost = False  # something happened, and we don't know where
        self._must_look = 0.0  # when everything is looked at, whatever happens
        self._may_look = 0.0  # not before that, where no wake-up will come

    def drop(self, key: Hashable) -> None:
        super().drop(key)
        self._mute.pop(key, None)
        if self._watcher is not None:
            self._watcher.unwatch(key)

    def fall_silent(self, source: Source) -> None:
        super().fall_silent(source)
        self._new[source.key] = source

    def arm(self) -> Watcher:
        """Return a watcher of what is to be watched beside the logs."""
        return Watcher()

    def _armed(self) -> Watcher:
        if self._watcher is None:
            self._watcher = self.arm()
        return self._watcher

    def listen(self, source: Source) -> bool:
        """Return whether a log has something now; otherwise it will wake us."""
        while True:
            if source.watched != source.cursor.files:  # it is new, was resized, or went on in another segment
                self._watch(source)
            source.cursor.ask()
            if source.step(self._most):
                self._mute.pop(source.key, None)
                return True
            if source.watched == source.cursor.files:
                break
        if not source.cursor.is_rung:
            self._mute[source.key] = source
        return False

    def _watch(self, source: Source) -> None:
        watcher, files = self._armed(), source.cursor.files
        try:
            watcher.unwatch(source.key)
            source.cursor.watch(watcher, source.key)
        except BaseException:
            self._disarm()
            raise
        source.watched = files

    def _disarm(self) -> None:
        """Watch nothing any more; the next look at everything begins anew."""
        watcher, self._watcher, self._must_look = self._watcher, None, 0.0
        for source in self.sources.values():
            source.watched = None
        if watcher is not None:
            watcher.close()

    def look_around(self) -> None:
        self.look_at(list(self._new.values()))
        self._heed(self._armed().wait(0))

    def wait(self) -> bool:
        deadline = None if self.timeout is None else system.port.monotonic() + self.timeout
        watcher = self._armed()
        while not self._is_closed and not self._failures:
            if self.look_at(list(self._new.values())):
                break
            now = system.port.monotonic()
            left = POLL if deadline is None else deadline - now
            if left <= 0 or now >= self._must_look:  # also for what came before there was a watcher
                if self._look_at_all() or left <= 0:
                    break
                continue
            until = min(self._must_look, self._may_look) if self._mute or self._is_lost else self._must_look
            keys = watcher.wait(max(0.0, min(left, until - now)))
            if self._is_closed:
                break  # another thread has closed us
            if self._heed(keys):
                break
        return bool(self._ready or self._failures)

    def _heed(self, keys: set[Any] | None) -> bool:
        """Look at what woke us, and at everything if it is time for that; return whether something is there."""
        now = system.port.monotonic()
        self._is_lost |= keys is None
        if now >= self._must_look or (self._is_lost and now >= self._may_look):
            return self._look_at_all()
        spoke = False
        if keys:
            self.notice(keys)
            spoke = self.look_at([self._silent[key] for key in keys if key in self._silent])
        if self._mute and now >= self._may_look:
            spoke |= self._look_at_many(self._mute, now)
        return spoke or bool(self._ready)

    def _look_at_all(self) -> bool:
        now = system.port.monotonic()
        if now >= self._must_look or not self._armed().is_blind:
            self._must_look = now + POLL
            self.notice(None)
        self._is_lost = False
        return self._look_at_many(self._silent, now)

    def _look_at_many(self, sources: dict[Hashable, Source], since: float) -> bool:
        try:
            return self.look_at(list(sources.values())) or bool(self._ready)
        finally:
            now = system.port.monotonic()
            took = now - since
            self._may_look = now + max(BLIND_POLL, REST * took)
            self._must_look = max(self._must_look, now + LONG_REST * took)

    def notice(self, keys: set[Any] | None) -> None:
        """Look after what isn't records: `keys` is what woke us, None that it may be anything. Raises LogVanished."""
        if keys is None:
            for source in self._silent.values():
                source.cursor.refuse_vanished()

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._watcher is not None:
                self._watcher.close()
