# cython: nonecheck=True
"""The loops of `merge`: from an event, or a copied record, to the caller. Compiled as `merge_c`; `merge` chooses a twin.

These loops read *plain* logs themselves: spools whose next item can only be a record. In all other cases the log's cursor does it. See
`following_py` for the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

from msgspec import UNSET

from kvspool import GapError
from kvspool.engine.cursor import Cursor
from kvspool.engine.iteration import Iteration, check
from kvspool.errors import Closed, Corruption, FormatError, Unrecovered
from kvspool.options import OnGap
from kvspool.record import Codec, Gap
from kvspool.system.handles import close_all, refuse_copy
from shard import descriptors

LOOK_AROUND = 256  # records after which idle logs are checked again
AHEAD = 1 << 16  # records copied in advance, of all logs together
LEAST_AHEAD, MOST_AHEAD = 16, 1024  # of one log

LAST_TIME = (1 << 63) - 1  # ns since 1970: later timestamps, of a wrong clock, count as this time
UNREADABLE = (Corruption, FormatError, Unrecovered)  # errors of one log, which don't stop the others


def placed(kind: Callable[..., Any], *place: Any) -> Callable[..., Any]:
    """Return a constructor of this kind of records, whose fields after those of every record are `place`.

    There is one function for each number of them: a `partial`, or a call with a tuple, takes longer than the rest of a record's cost here.
    """
    if len(place) == 1:
        only = place[0]

        def of_one(sequence: int, timestamp: int, type: int, key: Any, value: bytes, codec: int = Codec.RAW, key_table: Any = UNSET) -> Any:
            if key_table is not UNSET:
                return kind(sequence, timestamp, type, key, value, codec, only, key_table=key_table)
            return kind(sequence, timestamp, type, key, value, codec, only)

        return of_one
    first, second = place

    def of_two(sequence: int, timestamp: int, type: int, key: Any, value: bytes, codec: int = Codec.RAW, key_table: Any = UNSET) -> Any:
        if key_table is not UNSET:
            return kind(sequence, timestamp, type, key, value, codec, first, second, key_table=key_table)
        return kind(sequence, timestamp, type, key, value, codec, first, second)

    return of_two


class MergeSource:
    """One log of a merge: its copied records, and its next item."""

    def __init__(self, key: Hashable, order: int, cursor: Cursor, make: Callable[..., Any]) -> None:
        self.key = key
        self.order = order  # breaks ties, so that equal timestamps always have the same order
        self.cursor: Any = cursor
        self.make = make
        self.reading: Any = Iteration(cursor, make=make)
        self.frames: Any = cursor.frames  # the reader of frames; None without mapped memory
        self.batch: Any = self.reading.batch  # copied records that were not in `item` yet
        self.timestamp = 0
        self.item: Any = None
        self.is_silent = True
        self.is_new = True  # in the list of logs to check before we wait
        self.is_mute = False  # the writers can't be asked to wake us
        self._watched: Any = None  # the watched files, None if the cursor's files are others
        self._is_plain = False  # as its cursor says

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def step(self, most: int) -> bool:
        """Load the next item into `item` without blocking; False if there is none now. An item that is there already stays.

        most: records to copy at once.
        """
        batch = self.batch
        if self.item is None:
            if batch.at >= len(batch.items) and not self._copy_out(most):
                return False
            self.item = batch.items[batch.at]
            batch.at += 1
        if type(self.item) is not Gap:  # a gap has no time: it is returned at once
            timestamp = self.item.timestamp
            self.timestamp = timestamp if timestamp < LAST_TIME else LAST_TIME
        return True

    def _copy_out(self, most: int) -> bool:
        """Copy the next records into the batch. Return whether there are any."""
        frames = self.frames
        if frames is None:
            return self._fill(most)
        if self._is_plain and self.will_wake() and not frames.has_more() and not self._watched.is_closed:
            return False
        files, position, sequence = self.cursor.files, frames.position, frames.sequence
        try:
            if self._is_plain and not files.is_closed:
                frames.fetch(frames.edge_now(), most, self.make, self.batch.clear())
                if self.batch.items:
                    return True
            return self._fill(most)
        except BaseException:
            if self.cursor.files is files:  # a signal handler's exception may lose a record: copy them again
                self.batch.clear()
                frames.position, frames.sequence = position, sequence
            raise

    def _fill(self, most: int) -> bool:
        """Do the work of `_copy_out` by the cursor, for any kind of item."""
        self._is_plain = False
        has_items = self.reading.fill(most)
        self._is_plain = self.cursor.is_plain
        if self._watched != self.cursor.files:
            self._watched = None
        return bool(has_items)

    def has_items(self) -> bool:
        """Return whether the next item was already copied."""
        return self.item is not None or self.batch.at < len(self.batch.items)

    def has_more(self) -> bool:
        """Return whether the mapped memory of the log shows more records; False without mapped memory."""
        return self.frames is not None and bool(self.frames.has_more())

    def is_watched(self) -> bool:
        """Return whether the cursor's present files are watched."""
        return self._watched is not None

    def will_wake(self) -> bool:
        """Return whether writers wake us without being asked, or after an `ask`."""
        return self._watched is not None and not self.is_mute and (self.frames is None or self._is_plain)

    def watch(self, watcher: Any) -> None:
        """Watch the cursor's present files, and no others of the log."""
        self._watched = None
        files = self.cursor.files
        watcher.unwatch(self)
        self.cursor.watch(watcher, self)
        self.is_mute = not self.cursor.is_rung
        self._watched = files

    def unwatch(self) -> None:
        """Count as not watched, because the watcher is about to be closed."""
        self._watched = None

    def ask(self) -> bool:
        """Ask the next writer for a wake-up if there are no records. Return whether there are some, or whether this takes more than a
        check.
        """
        if self.frames is None or not self.will_wake() or self.has_items() or self.frames.has_more():
            return True
        self.frames.request_wake_up(0)
        return bool(self.frames.has_more())


class Merging:
    """Returns the items of several bounded logs; see `merge`."""

    def __init__(self, limit: int | None = None, on_gap: OnGap = "raise") -> None:
        self.sources: dict[Hashable, MergeSource] = {}
        self.missed = 0
        self.last: Any = None  # the key of the log of the last returned item
        self._left = check(limit, on_gap)
        self._next: Any = None  # the item that is being returned
        self._on_gap = on_gap
        self._ready: list[MergeSource] = []  # a heap, by timestamp and order of the next items
        self._new: list[MergeSource] = []  # presumably idle: to check before we wait
        self._is_torn = False  # an exception may have interrupted a change of these lists
        self._most = MOST_AHEAD
        self._taken = 0
        self._orders = 0
        self._refused: dict[Hashable, tuple[str, str]] = {}  # logs that can't be read, and why
        self._failures: list[Exception] = []  # to be raised by the next calls
        self._is_closed = False
        self._why = ""  # why the iteration ended: its handle was closed

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def add(self, key: Hashable, cursor: Cursor, make: Callable[..., Any]) -> None:
        """Read one more log; `make` constructs its records, and `key` identifies it."""
        source = MergeSource(key, self._orders, cursor, make)
        self._refused.pop(key, None)
        self._orders += 1
        self.sources[key] = source
        self._new.append(source)
        self._most = max(LEAST_AHEAD, min(MOST_AHEAD, AHEAD // len(self.sources)))
        if self._is_closed:  # another thread may have just closed the others
            source.reading.close()

    def refuse(self, key: Hashable, error: Exception, identity: str = "") -> None:
        """Make the next call raise the error of an unreadable log, once for each reason; the other logs continue.

        identity: of a log that is not a source yet. The same error is raised again for another log that replaces it.
        """
        reason = (identity, str(error))
        if self._refused.get(key) != reason:
            self._refused[key] = reason
            self._failures.append(error)

    def drop(self, key: Hashable) -> None:
        """Stop reading a log; only if no item of it waits to be returned."""
        source = self.sources.pop(key)
        source.reading.close()
        source.is_silent = False  # lists that contain it skip it
        self._refused.pop(key, None)

    def _is_to_be_looked_at(self, source: MergeSource) -> None:
        if not source.is_new:
            source.is_new = True
            self._new.append(source)

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        try:
            while self._next is None and self._left != 0:
                if self._failures:
                    raise self._failures.pop(0)
                if self._is_torn:
                    self._rebuild()
                self._refill()
                if self._failures:
                    continue
                if not self._ready:
                    if not self.wait():
                        break
                elif self._taken % LOOK_AROUND == 0:
                    self.look_around()
                if self._ready:
                    self._take()
        except BaseException as error:
            self._is_torn = True
            if isinstance(error, OSError):
                descriptors.explain(error, "the logs that are read together", len(self.sources))
            if not (self._is_closed and isinstance(error, Closed)):
                raise
        item = self._next
        self._next = None
        if item is not None:
            return item
        if self._why:
            raise Closed(self._why)
        raise StopIteration

    def _take(self) -> None:
        """Take the next item out of its source to return it, even after an exception of a signal handler. Raises GapError."""
        source = self._ready[0]
        item = source.item
        is_gap = type(item) is Gap
        if is_gap:
            self.missed += item.count
        elif self._left > 0:
            self._left = 0 if self._is_closed else self._left - 1
        self._taken += 1
        self.last = source.key
        source.item = None
        if not is_gap or self._on_gap == "yield":
            self._next = item
        elif self._on_gap == "raise":
            raise GapError(item)

    def _rebuild(self) -> None:
        """Rebuild the order of the sources, because a signal handler's exception may have interrupted a change of it."""
        self._new = [source for source in self.sources.values() if source.is_new]
        self._ready = []
        for source in self.sources.values():
            if source.is_silent and not source.has_items():
                continue
            source.is_silent = False
            if self._advance(source):
                push(self._ready, source)
        self._is_torn = False

    def _refill(self) -> None:
        """Move the source of the returned item to its place. This happens late, so that an error here can't lose the item."""
        if not self._ready:
            return
        source = self._ready[0]
        if source.item is None:
            sink(self._ready, source if self._advance(source) else self._ready.pop())

    def _advance(self, source: MergeSource) -> bool:
        """Load the next item of a source; False if it has none, and is idle now."""
        try:
            if source.step(self._most):
                return True
        except UNREADABLE as error:
            source.is_silent = True
            self.refuse(source.key, error)
            return False
        self.fall_silent(source)
        return False

    def fall_silent(self, source: MergeSource) -> None:
        """Mark a log as idle; a bounded one is finished."""
        source.is_silent = True

    def look_around(self) -> None:
        """Check the other logs from time to time, if one log alone keeps us busy."""

    def look_at_new(self) -> bool:
        """Check the logs that were not asked since they became idle. Return as `look_at`."""
        if not self._new:
            return False
        sources = self._new[:]
        try:
            return self.look_at(sources)
        finally:
            self._new = [source for source in self._new if source.is_new]

    def look_at(self, sources: list[MergeSource]) -> bool:
        """Check the idle ones of some logs. Return whether there is an item to return or an error to raise.

        The error of a damaged log is left to the next call; any other error is raised after all logs were checked.
        """
        failure: Exception | None = None
        spoke = False
        for source in sources:
            if not source.is_silent:
                source.is_new = False
                continue
            try:
                has_item = self.listen(source)
            except UNREADABLE as error:
                self.refuse(source.key, error)
                source.is_new = False
                continue
            except Exception as error:
                failure = failure or error
                continue
            source.is_new = False
            if has_item:
                source.is_silent = False
                if self._refused:
                    self._refused.pop(source.key, None)
                push(self._ready, source)
                spoke = True
        if failure is not None:
            raise failure
        return spoke or len(self._failures) > 0

    def listen(self, source: MergeSource) -> bool:
        """Return whether a log has records now."""
        return source.step(self._most)

    def wait(self) -> bool:
        """Return whether there may be more although nothing is ready: for bounded logs, only in newly added ones."""
        return self.look_at_new()

    def close(self) -> None:
        """Close all logs and end the iteration, also one that waits in another thread."""
        self._is_closed = True
        self._left = 0
        self._next = None
        close_all([source.reading for source in list(self.sources.values())])

    def end(self, why: str) -> None:
        """Close the iteration because its handle was closed: every call raises Closed with the words `why`."""
        if self._left != 0:
            self._why = why
            self.close()


def is_before(one: MergeSource, other: MergeSource) -> bool:
    """Return whether the next item of one log precedes that of another one."""
    return one.timestamp < other.timestamp or (one.timestamp == other.timestamp and one.order < other.order)


def push(heap: list[MergeSource], source: MergeSource) -> None:
    """Add a source to a heap."""
    at = len(heap)
    heap.append(source)
    while at > 0:
        above = (at - 1) >> 1
        other = heap[above]
        if not is_before(source, other):
            break
        heap[at] = other
        at = above
    heap[at] = source


def sink(heap: list[MergeSource], source: MergeSource) -> None:
    """Replace the first source of a heap by this one; an empty heap stays empty."""
    at = 0
    end = len(heap)
    if end == 0:
        return
    while True:
        below = 2 * at + 1
        if below >= end:
            break
        other = heap[below]
        if below + 1 < end and is_before(heap[below + 1], other):
            below += 1
            other = heap[below]
        if not is_before(other, source):
            break
        heap[at] = other
        at = below
    heap[at] = source
