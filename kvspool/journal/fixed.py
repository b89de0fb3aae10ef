"""A journal of items of one length: items are read by position, the oldest blobs can be pruned, the newest items removed.

**Positions** are the sequences of the other verbs: the first item ever has 0, and a prune changes none.

**Rewind.** Removed items may have been read already, and other items may follow at their positions. A follower or durable reader that has
read past the new end gets Truncated, once; a durable reader is then at the new end. Others continue unaffected. `kvspool.journal.bounds`
explains how they notice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvspool.engine.iteration import Iteration
from kvspool.engine.wakeups import Watcher
from kvspool.errors import ChecksumMismatch, Corruption, KvspoolError, OutOfRange, Pruned, Truncated
from kvspool.journal.appender import Appender
from kvspool.journal.bounds import Bounds
from kvspool.journal.control import NO_RUN, Page
from kvspool.journal.cursor import SegmentCursor, SegmentPlace
from kvspool.journal.formats.fixed import Fixed, pruned, sidecar_bounds
from kvspool.journal.journal import Journal
from kvspool.journal.offsets import Lease
from kvspool.journal.places import Places
from kvspool.journal.reader import JournalReader
from kvspool.journal.segments import Segment, Segments
from kvspool.kernel import fixed
from kvspool.options import Isolation, OnGap, Start, check_isolation
from kvspool.record import Gap

TRIES = 5  # reads of an item that rewinds may replace meanwhile


class FixedPlaces(Places):
    """The blobs of a journal, whose bounds say which items count."""

    format: Fixed

    def __init__(self, path: Path, format: Fixed) -> None:
        super().__init__(path, format)
        self.bounds = sidecar_bounds(path)

    def first(self, bases: list[int] | None = None) -> int:
        oldest = max((bases or self.bases())[0], self.bounds.first())
        size = self.bounds.unfinished()
        return oldest if size is None else min(oldest, size)

    def at(self, position: int) -> SegmentPlace:
        """Return the place of a position, existing or not."""
        rest = position % self.format.items_per_blob
        return SegmentPlace(position - rest, rest * self.format.record_bytes, position)

    def place(self, start: Start) -> SegmentPlace:
        """Return a place as every journal does; the earliest one is that of the oldest item."""
        return self.at(self.first()) if start == "earliest" else super().place(start)

    def seek(self, base: int, until: int | None = None, timestamp: int | None = None) -> SegmentPlace | None:
        """Seek as every journal does; an item missing at the end of a blob would be after its end."""
        with self._looking:
            place = super().seek(base, until, timestamp)
            segment = self.segments.get(base)
            return place if place is None or segment is None else place._replace(position=min(place.position, segment.size()))

    def end(self, bases: list[int]) -> tuple[SegmentPlace, int]:
        """Return the end as every journal does; an unfinished rewind, or fresh begin, of a dead writer counts from its begin on."""
        place, stop = super().end(bases)
        size = self.bounds.unfinished()
        if size is not None and size < place.sequence:
            return self.at(size), stop
        first = self.bounds.first()
        return (self.at(first) if place.sequence < first else place), stop


class FixedJournal(Journal):
    """A handle of a journal with the format fixed. Get it from `kvspool.create` or `kvspool.open`; see `Journal` for the common methods."""

    PLACES = FixedPlaces
    HELPERS = frozenset(("open_for_sync",))
    format: Fixed
    _places: FixedPlaces

    def __init__(self, path: Path, format: Fixed, **options: Any) -> None:
        super().__init__(path, format, **options)
        self._bounds = self._places.bounds
        self._blobs = self.segments_to_read()  # for `item`
        self._blobs_lock = threading.Lock()

    # Items.

    def item(self, position: int) -> bytes:
        """Return the item at a position, checked.

        Raises OutOfRange for one that has not been appended yet, Pruned for a removed one, ChecksumMismatch for a damaged one, each with
        `position`, `path` and `offset`; Corruption if its blob is missing; Closed, ValueError, or the system's OSError.
        """
        if position < 0:
            raise ValueError(f"a position is not negative: {position}")
        item = fixed.item_of(self._record(position), self.format.item_bytes)
        return self._look_again(position) if item is None else item

    def _record(self, position: int) -> bytes:
        """Return the bytes at a position now; empty if its blob doesn't exist."""
        form = self.format
        base = position - position % form.items_per_blob
        with self._blobs_lock:
            self.check_open()
            segment = self._blobs.get(base)
            return b"" if segment is None else segment.read((position - base) * form.record_bytes, form.record_bytes)

    def _look_again(self, position: int) -> bytes:
        """Return an item that the first read did not find; or raise the reason."""
        for _ in range(TRIES):
            seen = self._bounds.entries()
            self._check_position(position)
            record = self._record(position)
            item = fixed.item_of(record, self.format.item_bytes)
            if item is not None:
                return item
            if seen == self._bounds.entries():
                break
        where = self._where(position)
        if len(record) < self.format.record_bytes:
            raise Corruption(f"{where[1]} is missing, or too short for item {position} at byte {where[2]}; kvspool verify shows the damage")
        raise ChecksumMismatch(*where)

    def _check_position(self, position: int) -> None:
        """Raise OutOfRange or Pruned for a position that can have no item."""
        end = self.end()
        if position >= end:
            raise OutOfRange(f"item {position} has not been appended yet; the next one is {end}", *self._where(position))
        oldest = self.oldest()
        if position < oldest:
            raise Pruned(f"item {position} was removed; the oldest one is {oldest}", *self._where(position))

    def _where(self, position: int) -> tuple[int, str, int]:
        rest = position % self.format.items_per_blob
        return position, str(self._segments.path_of(position - rest)), rest * self.format.record_bytes

    def replay(self, start: Start = "earliest", *, limit: int | None = None, on_gap: OnGap = "raise") -> Iteration:
        """Iterate over the present items, as bytes, in order, each one checked: the fastest way to read all.

        start, limit, on_gap: as in `read`. A damaged item is a Gap of one; later items follow.
        """
        return self.read_values(start, limit=limit, on_gap=on_gap)

    def oldest(self) -> int:
        """Return the position of the oldest item, or that of the next one if there is none."""
        return self._places.first()

    # Front and end.

    def prune(self, minimum: int, *, timeout: float | None = None) -> int:
        """Remove the blobs whose items all have positions below `minimum`; on disk when it returns. Return the oldest remaining position.

        The last blob stays. Positions never change. A reader in a removed blob gets a Gap. Raises LockTimeout, Corruption, Closed, or the
        system's OSError: then the next writer finishes it.
        """
        if minimum < 0:
            raise ValueError(f"a position is not negative: {minimum}")

        def work(appender: Appender, page: Page) -> int:
            self._prune(appender, page, minimum)
            return self.oldest()

        return self.under_lock(self.timeout if timeout is None else timeout, work)

    def rewind(self, size: int, *, timeout: float | None = None) -> None:
        """Remove the items from the position `size` on, so that the next one gets that position; on disk when it returns.

        Durable readers after it are moved there. Raises OutOfRange for more items than there are, Pruned for less than the oldest position;
        LockTimeout, Corruption, Closed. After an OSError of the system the next writer finishes it, if it had begun.
        """
        if size < 0:
            raise ValueError(f"a position is not negative: {size}")

        def work(appender: Appender, page: Page) -> None:
            if size > page.next_sequence:
                message = f"the journal has fewer than {size} items; the next one is {page.next_sequence}"
                raise OutOfRange(message, *self._where(size))
            oldest = self.oldest()
            if size < oldest:
                raise Pruned(f"the items from {size} on were already removed; the oldest one is {oldest}", *self._where(size))
            if size < page.next_sequence:
                self._rewind(appender, page, size)

        self.under_lock(self.timeout if timeout is None else timeout, work)

    def open_for_sync(self, lower: int, upper: int, *, timeout: float | None = None) -> range:
        """Reduce the journal to the positions `lower` to `upper`, both included; on disk when it returns.

        For state that is fetched from elsewhere: present items are kept as far as possible. Returns their positions; the next item gets the
        position after them.

        - No item beyond `lower`: all are removed, the next item gets the position `lower`.
        - All items beyond `upper`: the same. (The original refuses that.)
        - Otherwise whole blobs below `lower` are pruned, and items beyond `upper` are removed. If the oldest remaining one is after
          `lower`, the earlier ones don't exist: the returned range shows it.

        Raises the errors of `prune` and `rewind`.
        """
        if not 0 <= lower <= upper:
            raise ValueError(f"positions from 0 on, the lower one first: not {lower} and {upper}")

        def work(appender: Appender, page: Page) -> range:
            if page.next_sequence <= lower:
                page = self._begin_at(appender, page, lower)
            elif self.oldest() > upper:
                page = self._rewind(appender, page, lower)
            else:
                self._prune(appender, page, lower)
                if page.next_sequence > upper + 1:
                    page = self._rewind(appender, page, upper + 1)
            return range(self.oldest(), page.next_sequence)

        return self.under_lock(self.timeout if timeout is None else timeout, work)

    def _prune(self, appender: Appender, page: Page, minimum: int) -> None:
        first = min(minimum, page.next_sequence)
        first -= first % self.format.items_per_blob
        if first > self.bases()[0]:
            appender.control.write(page._replace(boot=NO_RUN))
            self._bounds.begin_at(first, self.mode(), done=pruned(self.path, first))
            self.format.prune(appender.segments, first, self.mode())
            appender.control.write(page)

    def _rewind(self, appender: Appender, page: Page, size: int) -> Page:
        appender.control.write(page._replace(boot=NO_RUN))  # if we crash, the next writer checks for unfinished work
        self._bounds.begin_rewind(size, self.mode())
        self.format.rewind(appender.segments, size, self.mode())
        return self._end_at(appender, page, size)

    def _begin_at(self, appender: Appender, page: Page, position: int) -> Page:
        appender.control.write(page._replace(boot=NO_RUN))
        self._bounds.begin_at(position, self.mode())
        self.format.finish(self.path, self.mode())
        return self._end_at(appender, page, position)

    def _end_at(self, appender: Appender, page: Page, position: int) -> Page:
        place = self._places.at(position)
        return appender.end_at(page, place.base, place.position, position)

    def generation(self) -> int:
        return self._bounds.entries()

    def cursor_from(self, place: SegmentPlace, end: int | None, isolation: Isolation = "appended") -> SegmentCursor:
        self.check_open()
        self.refuse_another()
        limit = self._places.synced if check_isolation(isolation) == "synced" else None
        return FixedCursor(self.segments_to_read(), place, end, limit, self._bounds)

    # Other methods.

    def _new_reader(self, name: str, start: Start, isolation: Isolation, lease: Lease) -> FixedReader:
        return FixedReader(self, name, start, isolation, lease, self._bounds)

    def forked(self) -> None:
        self._blobs_lock = threading.Lock()
        super().forked()

    def close(self) -> None:
        super().close()
        with self._blobs_lock:
            self._blobs.close()


class Rewinds:
    """One reader's knowledge of the rewinds: earlier ones don't concern it."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._seen = self._noted = bounds.entries() // 2 * 2

    def news(self) -> int | None:
        """Return the least size of new rewinds; None if there were none. They stay new until `noted`."""
        count = self._bounds.entries()
        if count == self._seen:
            return None
        size = self._bounds.lowest(self._seen, count)
        self._noted = count // 2 * 2  # an unfinished one stays new
        return size

    def noted(self) -> bool:
        """Mark the result of `news` as known; return whether a rewind is unfinished, and so will be new again."""
        self._seen = self._noted
        return self._bounds.entries() % 2 == 1


class FixedCursor(SegmentCursor):
    """A cursor that detects rewinds, and the zeros before a fresh begin."""

    def __init__(self, segments: Segments, place: SegmentPlace, end: int | None, limit: Callable[[], int] | None, bounds: Bounds) -> None:
        super().__init__(segments, place, end, limit)
        self._bounds = bounds
        self._rewinds = Rewinds(bounds)

    def _fetch(self, most: int, make: Callable[..., Any] | None, items: list[Any]) -> Gap | None:
        """Fetch as every journal does. Raises Truncated if items returned before were removed since."""
        while True:
            before, had, missed = SegmentPlace(self.base, self.position, self.sequence), len(items), self.missed
            try:
                gap = super()._fetch(most, make, items)
            except KvspoolError:
                size = self._rewinds.news()
                if size is None:
                    raise
            else:
                size = self._rewinds.news()
                if size is None:
                    return gap
                if self.sequence <= size:  # none of this is from positions that others may have reused
                    self._data = b""
                    self._rewinds.noted()
                    return gap
            self._refuse(before.sequence, size)
            del items[had:]
            self.missed = missed
            self.base, self.position, self.sequence, _ = before
            self._data = b""
            if self._rewinds.noted():
                most = size - self.sequence
                if most == 0:
                    return None

    def sleeper(self, watcher: Watcher) -> None:
        """Return None: each check also checks for rewinds."""

    def _refuse(self, sequence: int, size: int) -> None:
        if size < sequence:
            raise Truncated(
                f"{self.segments.path} was rewound to {size} items, after {sequence} were read; read again from the start"
            )

    def _pass_damage(self, segment: Segment, found: int | None) -> Gap | None:
        first = min(self._bounds.first(), self.base + self._form.items_per_blob)
        if self.sequence >= first:
            return super()._pass_damage(segment, found)
        self._data = b""
        self.position = (first - self.base) * self._form.record_bytes
        return self._gap_to(first, "trimmed")

    @property
    def _form(self) -> Fixed:
        form = self.segments.format
        assert isinstance(form, Fixed)
        return form


class FixedReader(JournalReader):
    """A durable reader that detects rewinds.

    After a rewind to less than it has read, its next operation raises Truncated, and moves it to the new end.
    """

    def __init__(self, journal: FixedJournal, name: str, start: Start, isolation: Isolation, lease: Lease, bounds: Bounds) -> None:
        self._rewinds = Rewinds(bounds)
        self._path = journal.path
        super().__init__(journal, name, start, isolation, lease)
        self._sequence = journal.clamped(self._sequence)

    def _store(self) -> None:
        """Commit as every journal does. Raises Truncated if items it has read were removed; it is at the new end then."""
        super()._store()
        self._catch_up()  # a concurrent rewind may have missed the commit that we just stored

    def _catch_up(self) -> None:
        """Raise Truncated, once, if less is left than was read; move to the end, durably if the stored position was after it."""
        size = self._rewinds.news()
        if size is None:
            return
        self._rewinds.noted()
        is_stored_later = self._committed is not None and self._committed > size
        if is_stored_later:
            self._committed = size  # the rewind has moved the stored place
        was = self._sequence
        if size >= was:
            return
        self._sequence, self._turn = size, None
        if is_stored_later:
            super()._store()
        raise Truncated(f"{self._path} was rewound to {size} items; the reader {self.name!r} had read {was}, and continues from there")
