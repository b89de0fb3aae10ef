"""Many logs read as one: by timestamp within what is there, each log in its own order.

A record is handed out when it has the smallest timestamp of all that can be read at that moment; nothing waits for a log that is silent.
So over logs that were written before, the order is that of the timestamps; while following, a record that arrives later than another
one comes after it, whatever its timestamp. Within one log the order is always that of its sequences.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, Self

from kvspool import GapError, system
from kvspool.iteration import OnGap, check
from kvspool.record import Gap
from kvspool.wakeups import BLIND_POLL, POLL, Watcher

if TYPE_CHECKING:
    from kvspool.journal.cursor import Cursor as JournalCursor
    from kvspool.journal.cursor import Reading as JournalReading
    from kvspool.spool.cursor import Cursor as SpoolCursor
    from kvspool.spool.cursor import Reading as SpoolReading

    Cursor = SpoolCursor | JournalCursor

LOOK_AROUND = 256  # records after which silent logs are looked at again


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

    def step(self) -> bool:
        """Have the next item in `item`, never blocking; False if there is none now. One that is there already stays."""
        if self.item is None:
            self.item = self.reading.next_or_none()
        if self.item is None:
            return False
        if not isinstance(self.item, Gap):
            # A gap has no time of its own: it comes out at once.
            self.timestamp = self.item.timestamp
        return True

    def __lt__(self, other: Source) -> bool:
        return (self.timestamp, self.order) < (other.timestamp, other.order)


class Merge(Iterator[Any]):
    """Iterates over several logs that are bounded. `limit` and `on_gap` as `kvspool.Spool.read` has them."""

    def __init__(self, limit: int | None = None, on_gap: OnGap = "raise") -> None:
        check(limit, on_gap)
        self.sources: dict[Hashable, Source] = {}
        self.lost = 0
        self._left = limit
        self._on_gap = on_gap
        self._ready: list[Source] = []
        self._silent: dict[Hashable, Source] = {}
        self._taken = 0
        self._orders = 0

    def add(self, key: Hashable, cursor: Cursor, make: Callable[..., Any]) -> None:
        """Read one more log; `make` makes its records, and `key` tells it from the others."""
        source = Source(key, self._orders, cursor, make)
        self._orders += 1
        self.sources[key] = source
        self._silent[key] = source

    def drop(self, key: Hashable) -> None:
        """Read a log no more; only where nothing of it waits to be handed out."""
        self._silent.pop(key).reading.close()
        del self.sources[key]

    def __next__(self) -> Any:
        while True:
            if self._left == 0:
                raise StopIteration
            self._settle()
            if not self._ready:
                self.look(None)
            elif self._taken % LOOK_AROUND == 0:
                self.look_around()
            if not self._ready and not self.wait():
                raise StopIteration
            if self._ready:
                item = self._take()
                if isinstance(item, Gap):
                    self.lost += item.count
                    if self._on_gap == "raise":
                        raise GapError(item)
                    if self._on_gap == "skip":
                        continue
                elif self._left is not None:
                    self._left -= 1
                return item

    def _take(self) -> Any:
        self._taken += 1
        source = self._ready[0]
        item, source.item = source.item, None
        return item

    def _settle(self) -> None:
        """Put the source whose item was handed out in its place: only now, since what goes wrong there must not cost that item."""
        if self._ready and self._ready[0].item is None:
            source = self._ready[0]
            if source.step():
                heapq.heapreplace(self._ready, source)
            else:
                heapq.heappop(self._ready)
                self._silent[source.key] = source

    def look_around(self) -> None:
        """Once in a while, where one log alone would keep us busy: look at the others too."""
        self.look(None)

    def look(self, keys: set[Any] | None) -> bool:
        """Look at silent logs, those of `keys` or all; return whether one has something."""
        sources = self._silent.values() if keys is None else (self._silent[key] for key in keys if key in self._silent)
        spoke = False
        for source in list(sources):
            if source.step():
                heapq.heappush(self._ready, self._silent.pop(source.key))
                spoke = True
        return spoke

    def wait(self) -> bool:
        """Return whether there may be more, after everything was read: never, of bounded logs."""
        return False

    def close(self) -> None:
        """Let go of all logs; the iteration is over."""
        self._left = 0
        for source in self.sources.values():
            source.reading.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FollowingMerge(Merge):
    """Like Merge, and sleeps on one inotify descriptor where nothing is there; ends after `timeout` seconds without a record."""

    def __init__(self, limit: int | None = None, on_gap: OnGap = "raise", timeout: float | None = None) -> None:
        super().__init__(limit, on_gap)
        self._timeout = timeout
        self._watcher: Watcher | None = None

    def add(self, key: Hashable, cursor: Cursor, make: Callable[..., Any]) -> None:
        super().add(key, cursor, make)
        if self._watcher is not None:
            self._watch(self._watcher, self.sources[key])

    def arm(self) -> Watcher:
        """Return a watcher of all there is to wait for."""
        watcher = Watcher()
        try:
            for source in self.sources.values():
                self._watch(watcher, source)
        except BaseException:
            watcher.close()
            raise
        return watcher

    def _watch(self, watcher: Watcher, source: Source) -> None:
        source.watched = source.cursor.files
        source.cursor.watch(watcher, source.key)

    def look_around(self) -> None:
        self.notice(self._armed().wait(0))
        self.look(None)

    def _armed(self) -> Watcher:
        """Return the watcher; after it was made, what came before is looked at."""
        if self._watcher is None:
            self._watcher = self.arm()
            self.notice(None)
        return self._watcher

    def wait(self) -> bool:
        deadline = None if self._timeout is None else system.port.monotonic() + self._timeout
        watcher = self._armed()
        while True:
            for source in self._silent.values():
                if source.watched != source.cursor.files:
                    self._watch(watcher, source)  # it was resized, or went on in another segment
                source.cursor.ask()
            if self.look(None):
                return True
            left = POLL if deadline is None else deadline - system.port.monotonic()
            if left <= 0:
                return False
            is_rung = all(source.cursor.is_rung for source in self._silent.values())
            keys = watcher.wait(left if is_rung else min(left, BLIND_POLL))
            if self._left == 0:
                return False  # another thread has closed us
            self.notice(keys)
            if self.look(keys if is_rung else None):
                return True

    def notice(self, keys: set[Any] | None) -> None:
        """Look after what isn't records: `keys` is what woke us, None that it may be anything. Raises LogVanished."""
        if keys is None:
            for source in self._silent.values():
                source.cursor.refuse_vanished()

    def close(self) -> None:
        super().close()
        if self._watcher is not None:
            self._watcher.close()
