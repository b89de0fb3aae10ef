"""Find places in a journal: its end, and those of sequences and times.

No lock between processes is taken. An end is that of the writers' page, if the last segment agrees; otherwise it is determined from the
frames.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from kvspool import system
from kvspool.errors import Closed, Corruption, OutOfRange
from kvspool.journal import control
from kvspool.journal.control import Page
from kvspool.journal.cursor import SegmentCursor, SegmentPlace
from kvspool.journal.format import DAMAGED, JUMPED, LAST_SEQUENCE, LAST_TIME, WHOLE, Format
from kvspool.journal.index import STRIDE, SegmentIndex
from kvspool.journal.segment import Archived
from kvspool.journal.segments import Segments
from kvspool.journal.times import time_at
from kvspool.journal.walking import last_whole, walk
from kvspool.options import Isolation, Start, check_isolation
from kvspool.reader import Lag
from kvspool.record import NO_TIME
from kvspool.system.handles import Handle

INDEXES = 64  # sparse indexes that a handle keeps


class Places(Handle):
    """The segments of a journal, for one handle; all of its threads may use it."""

    def __init__(self, path: Path, format: Format) -> None:
        self.path = path
        self.format = format
        self.segments = Segments(path, format)
        self._looking = threading.RLock()  # one thread at a time uses those segments
        self._indexes: dict[int, SegmentIndex] = {}
        self.is_closed = False

    # The segments.

    def check_open(self) -> None:
        """Raise Closed after `close`."""
        if self.is_closed:
            raise Closed(f"{self.path} was closed; open it again")

    def bases(self) -> list[int]:
        """Return the first sequences of all segments, in order; if there is none, the one at which the first writer will begin.

        Raises Closed, LogVanished.
        """
        self.check_open()
        bases = self.segments.bases()
        if bases:
            return bases
        first = max(self._page().next_sequence, self.format.first(self.path))
        return self.segments.bases() or [first]  # the first segment may have been created, and filled, since

    def first(self, bases: list[int] | None = None) -> int:
        """Return the sequence of the oldest record. bases: those of the segments, if the caller has them."""
        return (bases or self.bases())[0]

    def most_records(self) -> int:
        """Return how many records the segments have room for at most."""
        return sum(self.segments.size_of(base) // self.format.least_bytes for base in self.bases())

    def release(self) -> None:
        """Close the descriptors until the next use."""
        with self._looking:
            self.segments.close()

    def close(self) -> None:
        """Close the descriptors; later calls raise Closed."""
        self.is_closed = True
        self.release()

    def forked(self) -> None:
        """Forget the parent's threads in a forked child."""
        self._looking = threading.RLock()

    # The end.

    def end(self, bases: list[int]) -> tuple[SegmentPlace, int]:
        """Return the place after the last record, and the state of the bytes there: SHORT for a part of a frame, DAMAGED or JUMPED for
        others. The writers' place counts if the last segment agrees, otherwise that of its frames. If the files of later segments are gone,
        the records in them are damaged.
        """
        with self._looking:
            page = self._page()
            segment = self.segments.get(bases[-1])
            if segment is None:
                return self.end(self.bases()) if self.segments.bases() else (SegmentPlace(bases[-1], 0, bases[-1]), WHOLE)
            size = segment.size()
            if page.base == segment.base and page.end == size and page.end:
                return SegmentPlace(page.base, page.end, page.next_sequence), WHOLE
            begin, sequence = self.segments.begin_of(segment), segment.base
            if not begin and self.format.header_bytes:
                return SegmentPlace(segment.base, 0, segment.base), WHOLE  # it is being created
            size = max(size, begin)  # the header may have been written after the size was read
            if page.base == segment.base and begin <= page.end <= size:
                begin, sequence = page.end, page.next_sequence
            found = last_whole(self.format, segment, begin, sequence, size)
            before = self.word_before_restart() if self.format.reads_zeros else None
            if before is not None:
                found = self.format.true_end(segment, begin, found, before.synced_sequence)
            lost_end = found.sequence if page.base <= segment.base else self.segments.lost_end(segment.base, found.sequence)
            if lost_end > found.sequence:
                return SegmentPlace(segment.base, found.size, lost_end, found.sequence), DAMAGED
            return SegmentPlace(segment.base, found.size, found.sequence), found.stop

    def word_before_restart(self) -> Page | None:
        """Return the writers' last page from before a restart of the machine, if the segments were not checked since."""
        page = control.last_word(self.format.lock_file(self.path))
        return page if page.magic == control.MAGIC and page.boot != system.port.boot_id() else None

    def until_recovered(self) -> int:
        """Return the end of the readable records: none that the next writer would cut."""
        return LAST_SEQUENCE if self.word_before_restart() is None else self.end(self.bases())[0].sequence

    def extent(self, isolation: Isolation = "appended") -> tuple[int, int]:
        """See `Log.extent`; no file stays open."""
        try:
            first, end = self.first(), self.end(self.bases())[0].sequence
            if check_isolation(isolation) == "synced":
                end = min(end, self.synced())
            return first, max(first, end)
        finally:
            self.release()

    def readable_end(self) -> int:
        """Return the sequence at which a read of the present records ends; no end if damage hides it, so that reading reaches the
        damage.
        """
        place, stop = self.end(self.bases())
        return LAST_SEQUENCE if stop in (DAMAGED, JUMPED) else place.sequence

    def lag(self, sequence: int) -> Lag:
        """Return the lag of a sequence."""
        first, end = self.extent()
        begin = max(first, sequence)
        if begin >= end:
            return Lag(0, 0, 0.0)
        place = self.place(begin)
        size = sum(self.segments.size_of(base) for base in self.bases() if base >= place.base)
        found = self.time_from(place) if self.format.has_timestamps else None
        age = 0.0 if found is None or found[0] == NO_TIME else max(0.0, (system.port.now() - found[0]) / 1e9)
        return Lag(end - begin, max(0, size - place.position), age)

    def synced(self) -> int:
        """Return the sequence below which all records are on disk."""
        return self._page().synced_sequence

    def _page(self) -> Page:
        return control.look(self.format.lock_file(self.path))

    # Sequences.

    def place(self, start: Start) -> SegmentPlace:
        """Return the place of a start: "earliest", "latest", a sequence, or an aware datetime.

        A trimmed sequence gives the oldest place, with that sequence expected: reading then reports the Gap. Raises OutOfRange for a
        sequence after the next one, and for a time if records have none; ValueError for anything else.
        """
        bases = self.bases()
        if start == "latest":
            return self.end(bases)[0]
        if start == "earliest":
            return SegmentPlace(bases[0], 0, bases[0])
        if isinstance(start, datetime):
            return self._place_of_time(start, bases)
        if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
            return self._place_of(start, bases)
        raise ValueError(f'start is a sequence, "earliest", "latest" or an aware datetime, not {start!r}')

    def _place_of(self, sequence: int, bases: list[int]) -> SegmentPlace:
        base = self.segments.holding(sequence, bases)
        if base is None:
            return SegmentPlace(bases[0], 0, sequence)
        if sequence == base:
            return SegmentPlace(base, 0, sequence)
        end, _ = self.end(bases)
        if sequence > end.sequence:
            raise OutOfRange(f"sequence {sequence} has not been written yet; the next one of {self.path} is {end.sequence}")
        if sequence == end.sequence:
            return end
        found = SegmentPlace(base, 0, base)
        with suppress(Corruption):  # of its header: reading skips that
            found = self.seek(base, until=sequence) or found
        there = -1 if found.sequence == sequence else found.sequence  # it stopped earlier, at damage: reading will pass it
        return found._replace(sequence=sequence, there=there)

    def seek(self, base: int, until: int | None = None, timestamp: int | None = None) -> SegmentPlace | None:
        """Return the place of a sequence, or after a time, in a segment; None if the segment was removed."""
        with self._looking:
            segment = self.segments.get(base)
            if segment is None:
                return None
            known = None if until is None else self.format.place_in(base, until)
            if known is not None and until is not None:
                return SegmentPlace(base, known, until)
            begin, size = self.segments.begin_of(segment), segment.size()
            start, sequence = begin, base
            if size - begin > STRIDE:
                start, sequence = self._index(base).start(segment, begin, until, timestamp, size)
            found = walk(self.format, segment, start, sequence, size, until, timestamp)
            return SegmentPlace(base, found.size, found.sequence)

    def _index(self, base: int) -> SegmentIndex:
        """Return the index of a segment. Those of the last used segments are kept."""
        index = self._indexes.pop(base, None)
        if index is None:
            index = SegmentIndex(self.format, base, self.segments.index_path(base))
        self._indexes[base] = index
        if len(self._indexes) > INDEXES:
            del self._indexes[next(iter(self._indexes))]
        return index

    # Times.

    def _place_of_time(self, time: datetime, bases: list[int]) -> SegmentPlace:
        self.format.refuse_time()
        if time.tzinfo is None:
            raise ValueError(f"a time without a zone is ambiguous: {time}; pass an aware datetime")
        before = min(round(time.timestamp() * 1e6) * 1000 - 1, LAST_TIME)
        if before < NO_TIME:  # a time that is earlier than any that a record can have
            return SegmentPlace(bases[0], 0, bases[0])
        base = self._last_begun(before, bases)
        place = SegmentPlace(base, 0, base)
        with suppress(Corruption):  # of its header: reading skips that
            place = self.seek(base, timestamp=before) or place
        return self._pass(place, before)[0]

    def _last_begun(self, before: int, bases: list[int]) -> int:
        """Return the last segment whose first timestamp isn't later than `before`; the first segment if there is none.

        A segment without a timestamp is skipped to the left, once.
        """
        found, low, high = bases[0], 1, len(bases) - 1
        while low <= high:
            middle = at = (low + high) // 2
            while (time := self._first_sound_time(bases[at])) is None and at > low:
                at -= 1
            if time is None:
                low = middle + 1
            elif time <= before:
                found, low = bases[at], middle + 1
            else:
                high = at - 1
        return found

    def first_time(self, base: int, *, is_checked: bool = False) -> int:
        """Return the timestamp of a segment's first record, from the head of its frame; LAST_TIME if it has none, or a damaged one.

        is_checked: LAST_TIME as well for a record whose checksum isn't compared, since it is too large.
        """
        with self._looking:
            segment = self.segments.get(base)
            if segment is None:
                return LAST_TIME
            begin = self.format.header_bytes
            if not isinstance(segment, Archived):
                with suppress(Corruption):  # of the header: the frames may be sound
                    begin = self.segments.begin_of(segment)
            found = time_at(self.format, segment, begin, base, is_checked=is_checked)
            return LAST_TIME if found is None else found

    def _first_sound_time(self, base: int) -> int | None:
        """Return the first timestamp in a segment, of a wholly sound record; None if no such record there has one."""
        time = LAST_TIME
        with suppress(Corruption):  # of an archive: reading reports it
            time = self.first_time(base, is_checked=True)
        return time if NO_TIME < time < LAST_TIME else self._pass(SegmentPlace(base, 0, base), NO_TIME)[1]

    def time_from(self, place: SegmentPlace) -> tuple[int, SegmentPlace] | None:
        """Return the timestamp of the first sound record from a place on, and the place after it; None if the segment has none."""
        with self._looking:
            cursor = SegmentCursor(self.segments, place, None)
            times: list[int] = []
            with suppress(Corruption):
                while cursor.fetch(1, lambda sequence, time, *_: time, times) is not None:
                    pass
            if not times or cursor.base != place.base:
                return None
            return times[0], SegmentPlace(cursor.base, cursor.position, cursor.sequence)

    def _pass(self, place: SegmentPlace, before: int) -> tuple[SegmentPlace, int | None]:
        """Skip the records of a segment that aren't later than a time, and the damage before each of them.

        Return the place after them, and the timestamp of the next record in the segment, None if there is none.
        """
        while (found := self.time_from(place)) is not None and found[0] <= before:
            place = self._walk_on(found[1], before)
        return place, None if found is None else found[0]

    def _walk_on(self, place: SegmentPlace, before: int) -> SegmentPlace:
        """Return the place in the same segment after the following records that aren't later than a time."""
        with self._looking:
            segment = self.segments.get(place.base)
            if segment is None:
                return place
            found = walk(self.format, segment, place.position, place.sequence, segment.size(), timestamp=before)
            return SegmentPlace(place.base, found.size, found.sequence)
