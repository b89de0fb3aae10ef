# cython: nonecheck=True
"""The loops of `merge`: from an event, or a copied record, to the caller. Compiled as `merge_c`; `merge` chooses a twin.

These loops read *plain* logs themselves: spools whose next item can only be a record. In all other cases the log's cursor does it. Waits
go through the port in `system`; the compiled twin reads the clock and waits for events by its own system calls while the port is not
replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NoReturn

from msgspec import UNSET

import kvspool.kernel.machine as native
from kvspool import GapError, system
from kvspool.engine.cursor import Cursor
from kvspool.engine.iteration import Iteration, check, check_timeout
from kvspool.errors import Closed, Corruption, FormatError, Unrecovered
from kvspool.kernel.wakeups_py import BLIND_POLL, POLL
from kvspool.options import OnGap
from kvspool.record import Codec, Gap
from kvspool.system.handles import close_all, refuse_copy
from shard import descriptors

LOOK_AROUND = 256  # records after which idle logs are checked again
AHEAD = 1 << 16  # records copied in advance, of all logs together
LEAST_AHEAD, MOST_AHEAD = 16, 1024  # of one log
REST = 4  # multiple of the duration of a check of all logs that must pass before the next one, without wake-ups
LONGEST_REST = 30.0  # seconds between two searches for new logs that are not reported
PART = 1e-3  # share of our time for checks for lost wake-ups
NEVER = float("inf")
FEW = 64  # logs, at most, that are all checked twice a second, whatever share of our time that takes

REAL = system.REAL
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
        self.frames.ask_for_bell(0)
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
                self._settle()
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

    def _settle(self) -> None:
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


class FollowingLoops(Merging):
    """Waits if there are no records; see `FollowingMerge`, which arms the watcher."""

    def __init__(self, limit: int | None = None, on_gap: OnGap = "raise", timeout: float | None = None) -> None:
        Merging.__init__(self, limit, on_gap)
        self.timeout = check_timeout(timeout)
        self._watcher: Any = None
        self._has_mute = False  # there are idle logs without wake-ups
        self._turns: list[MergeSource] = []  # logs left in the present turn of checks
        self._is_lost = False  # events were lost, so any log may have changed
        self._must_look = 0.0  # when to check for lost wake-ups, in any case
        self._may_look = 0.0  # not to check earlier than this, without wake-ups
        self._must_seek = 0.0  # when to search for new logs, in any case

    def drop(self, key: Hashable) -> None:
        source = self.sources[key]
        Merging.drop(self, key)
        self._must_seek = 0.0  # another log may have replaced it
        if self._watcher is not None:
            self._watcher.unwatch(source)

    def fall_silent(self, source: MergeSource) -> None:
        source.is_silent = True
        if source.frames is not None or not source.will_wake():  # every write to a watched journal wakes us
            self._is_to_be_looked_at(source)

    def arm(self) -> Any:
        """Return a watcher, with the watches other than those of logs."""
        raise NotImplementedError

    def notice(self, key: Any) -> None:
        """Handle a wake-up with `key`, which belongs to no log."""

    def seek(self) -> None:
        """Search for new logs."""

    def look_after(self, source: MergeSource) -> None:
        """Raise LogVanished if the files of a log were removed."""
        source.cursor.refuse_vanished()

    def _armed(self) -> Any:
        if self._watcher is None:
            self._watcher = self.arm()
        return self._watcher

    def _now(self) -> float:
        return native.monotonic() / 1e9 if system.port is REAL else system.port.monotonic()

    def _are_few(self) -> bool:
        return len(self.sources) <= FEW

    def _silent(self) -> list[MergeSource]:
        return [source for source in self.sources.values() if source.is_silent]

    def listen(self, source: MergeSource) -> bool:
        """Return whether a log has records now; otherwise it will wake us."""
        if not source.ask():
            return False
        if source.step(self._most):
            return True
        while True:
            if not source.is_watched():  # it is new, was resized, or continues in another segment
                self._watch(source)
            source.cursor.ask()
            if source.step(self._most):
                return True
            if source.is_watched():
                break
        self._has_mute |= source.is_mute
        return False

    def _watch(self, source: MergeSource) -> None:
        watcher = self._armed()
        try:
            source.watch(watcher)
        except BaseException:
            self._disarm()
            raise

    def _disarm(self) -> None:
        """Close the watcher; the next check of all logs starts again."""
        for source in self.sources.values():
            source.unwatch()
            self._is_to_be_looked_at(source)
        self._must_look = 0.0
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    def look_around(self) -> None:
        self.look_at_new()
        self._heed(0.0)

    def wait(self) -> bool:
        deadline = NEVER if self.timeout is None else self._now() + self.timeout
        while not self._is_closed and not self._failures:
            if self.look_at_new():
                break
            now = self._now()
            left = deadline - now
            if left <= 0 or now >= self._must_look:  # also for changes before there was a watcher
                if now >= self._must_look:
                    self._look_for_missed(now)
                if left <= 0 and not self._ready:
                    self.look_at_each(self._silent())
                if left <= 0 or self._ready:
                    break
                continue
            until = self._must_look
            if (self._has_mute or self._is_lost) and self._may_look < until:
                until = self._may_look
            if left > until - now:
                left = until - now
            if self._heed(left if left > 0 else 0.0):
                break
        return len(self._ready) > 0 or len(self._failures) > 0

    def _heed(self, longest: float) -> bool:
        """Wait up to `longest` seconds, and check the logs that woke us, or all logs when that is due. Return whether there are records, or
        another thread has closed us.
        """
        watcher = self._armed()
        was_lost = self._is_lost
        self._is_lost = True  # until all events are read: a signal handler's exception may interrupt that
        keys = watcher.wait(longest)
        if self._is_closed:
            return True
        if keys is not None:
            if keys:
                self._look_at_keys(keys)
            self._is_lost = was_lost
            if keys and self._ready:
                return True
        now = self._now()
        if now >= self._must_look:
            return self._look_for_missed(now)
        if now >= self._may_look:
            if self._is_lost:
                self._look_at_all(now)
            elif self._has_mute:
                self._look_at_mute(now)
        return len(self._ready) > 0

    def _look_at_keys(self, keys: set[Any]) -> None:
        """Check the logs that woke us, and handle other wake-ups."""
        unlinked = self._watcher.unlinked
        for key in keys:
            if type(key) is MergeSource:
                self._is_to_be_looked_at(key)
        self.look_at_new()
        for key in keys:
            if type(key) is not MergeSource:
                self.notice(key)
            elif unlinked and key in unlinked and key.is_silent:
                self.look_after(key)
        if self._must_seek == 0:
            self._seek()

    def _look_at_all(self, now: float) -> None:
        """Check all logs at once: events were lost, or there will be none."""
        self._is_lost = False
        try:
            if self._armed().is_blind:
                self.look_at_each(self._silent())
            else:
                self._seek()
                for source in self._silent():
                    self._is_to_be_looked_at(source)  # they may have used up their request for a wake-up
                self.look_at_new()
        finally:
            self._rest(now)

    def _look_at_mute(self, now: float) -> None:
        mute = [source for source in self.sources.values() if source.is_mute]
        self._has_mute = len(mute) > 0
        try:
            self.look_at_each([source for source in mute if source.is_silent])
        finally:
            self._rest(now)

    def look_at_each(self, sources: list[MergeSource]) -> None:
        """Check logs without wake-ups: those whose memory shows more records, and those without mapped memory."""
        self.look_at([source for source in sources if source.frames is None or source.has_more()])

    def _rest(self, since: float) -> None:
        now = self._now()
        self._may_look = now + max(BLIND_POLL, REST * (now - since))

    def _look_for_missed(self, now: float) -> bool:
        """Check for lost wake-ups: in the memory of all logs, and in the files of some.

        That takes at most a share of our time, for any number of logs; if they are few, all are checked.
        """
        self._must_look = now + POLL
        self.look_at([source for source in self.sources.values() if source.is_silent and source.has_more()])
        if self._is_lost and now >= self._may_look:
            self._look_at_all(now)
        self._take_turns()
        if now >= self._must_seek or self._are_few():
            self._seek()
        return len(self._ready) > 0

    def _seek(self) -> None:
        began = self._now()
        self.seek()
        ended = self._now()
        self._must_seek = ended + min(LONGEST_REST, (ended - began) / PART)

    def _take_turns(self) -> None:
        """Check the files of some idle logs, and of the next ones next time; of all logs if they are few."""
        until = self._now() + POLL * PART
        if not self._turns:
            self._turns = self._silent()
        while self._turns:
            source = self._turns.pop()
            if source.is_silent and not self.look_at([source]):
                self.look_after(source)
            if not self._are_few() and self._now() > until:
                break

    def close(self) -> None:
        try:
            Merging.close(self)
        finally:
            if self._watcher is not None:
                self._watcher.close()
