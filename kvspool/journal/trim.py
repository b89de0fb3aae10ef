"""Trim a journal: decide which of the oldest segments its rules remove now, and why; `dropping` removes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING

import msgspec

from kvspool import system
from kvspool.engine import sizes
from kvspool.engine.retention import OvertakenReader, PlannedSegment, Retention, TrimPlan, TrimReport
from kvspool.errors import Corruption, KvspoolError, OutOfRange
from kvspool.journal.dropping import consumed, drop
from kvspool.journal.segments import Segments
from kvspool.journal.times import time_at

if TYPE_CHECKING:
    from kvspool.journal.appender import Appender
    from kvspool.journal.control import Page
    from kvspool.journal.handle import JournalHandle
    from kvspool.journal.offsets import Offsets

Elsewhere = Callable[[], Mapping[str, int]]
"""Returns the durable readers that a journal does not know of, such as those of a hub root: their positions, by name."""

AT_ONCE = 8  # segments removed under one hold of the append lock, so that writers can append in between
TAIL = 64  # bytes read for the size of the last frame


class _Candidate(msgspec.Struct, frozen=True):
    """A segment, and the remaining content after it."""

    base: int
    next_base: int
    bytes: int
    is_last: bool
    segments_after: int
    records_after: int
    bytes_after: int


class Trim:
    """One application of rules to the segments of a journal. `end`: the sequence of the next record."""

    def __init__(
        self,
        segments: Segments,
        offsets: Offsets,
        end: int,
        retention: Retention,
        before: int | None = None,
        own: Retention | None = None,
        elsewhere: Elsewhere = dict,
    ) -> None:
        self.segments = segments
        self.end = end
        self.retention = retention
        self.before = before
        self.floors = [rules.floors() for rules in (retention, own) if rules is not None]
        self.readers = [*_readers(offsets), *elsewhere().items()]
        self.now = system.port.now()

    def decisions(self) -> Iterator[PlannedSegment]:
        """Yield the fate of each segment, the oldest first."""
        stays = False
        for one in self._candidates():
            held_by = [name for name, sequence in self.readers if sequence < one.next_base]
            newest = self._newest(one)
            goes, why = (False, "an older segment stays") if stays and not one.is_last else self._decide(one, newest, held_by)
            stays = not goes
            age = max(0.0, (self.now - newest) / 1e9)
            yield PlannedSegment(one.base, one.next_base - one.base, one.bytes, newest, age, goes, why, held_by)

    def plan(self) -> TrimPlan:
        """Return the fate of all segments."""
        try:
            found = list(self.decisions())
        finally:
            self.segments.close()
        first = next((one.base for one in found if not one.goes), self.end)
        return TrimPlan(str(self.segments.path), found, self.overtaken(first))

    def overtaken(self, first: int) -> list[OvertakenReader]:
        """Return the durable readers before a sequence."""
        return [OvertakenReader(name, sequence, first - 1) for name, sequence in self.readers if 0 <= sequence < first]

    def remove(self, most: int | None = None) -> list[PlannedSegment]:
        """Remove up to `most` of the planned segments, and return them. Under the append lock."""
        try:
            going = list(islice(takewhile(lambda one: one.goes, self.decisions()), most))
            drop(self.segments, [one.base for one in going])
        finally:
            self.segments.close()
        return going

    def _candidates(self) -> Iterator[_Candidate]:
        bases = self.segments.bases()
        looked_up = [system.port.look_up(self.segments.path_of(base)) for base in bases]
        lengths = [0 if status is None else status.st_size for status in looked_up]
        left = sum(lengths)
        for number, (base, length) in enumerate(zip(bases, lengths, strict=True), start=1):
            next_base = bases[number] if number < len(bases) else max(base, self.end)
            left -= length
            yield _Candidate(base, next_base, length, number == len(bases), len(bases) - number, self.end - next_base, left)

    def _decide(self, one: _Candidate, newest: int, held_by: list[str]) -> tuple[bool, str]:
        if one.is_last:
            return False, "the last segment always stays"
        wish, waits = self._wish(one, newest, held_by)
        if not wish:
            return False, "no rule removes it"
        for floor in self.floors:
            words = floor.forbids(one.next_base, one.segments_after, one.records_after, one.bytes_after)
            if words:
                return False, words
        if held_by and waits:
            names = ", ".join(repr(name) for name in held_by)
            return False, f"{names} {'has' if len(held_by) == 1 else 'have'} yet to read it"
        return True, wish

    def _wish(self, one: _Candidate, newest: int, held_by: list[str]) -> tuple[str, bool]:
        """Return why a limit removes a segment, in words, if one does; and whether that waits for durable readers."""
        rules = self.retention
        waits = not rules.force
        if self.before is not None and one.next_base <= self.before:
            return f"all of it is before sequence {self.before}", waits
        if rules.max_bytes is not None and one.bytes + one.bytes_after > rules.max_bytes:
            return f"{sizes.show(one.bytes + one.bytes_after)} exceed the limit of {sizes.show(rules.max_bytes)}", waits
        if rules.max_age is not None and self.now - newest > rules.max_age * 1e9:
            return f"its newest record is older than {rules.max_age:g} s", waits
        if rules.by_consumers and self.readers:
            return "every durable reader has read it", True
        return "", True

    def _newest(self, one: _Candidate) -> int:
        """Return the time of a segment's last record; if unknown, that of its file's last write, or by record that of the record after it.
        """
        status = system.port.look_up(self.segments.path_of(one.base))
        written = self.now if status is None else status.st_mtime_ns
        if not self.segments.format.has_timestamps or one.next_base <= one.base:
            return written
        found = self._time_of(one.base, one.next_base - 1)
        if found <= 0 and self.retention.by_record and not one.is_last:
            found = self._first_time_of(one.next_base)
        return found if found > 0 else written

    def _first_time_of(self, base: int) -> int:
        """Return the timestamp of the first record of a segment, which no earlier record exceeds; 0 if it isn't known."""
        segment = self.segments.get(base)
        if segment is None:
            return 0
        with suppress(Corruption):
            return time_at(self.segments.format, segment, self.segments.begin_of(segment), base) or 0
        return 0

    def _time_of(self, base: int, last: int) -> int:
        """Return the timestamp of the last frame of a segment, which has the sequence `last`; 0 if it isn't found from the end."""
        format = self.segments.format
        segment = self.segments.get(base) if format.ends_with_size else None
        if segment is None:
            return 0
        end = segment.size()
        size = format.size_of_last(segment.read(max(0, end - TAIL), TAIL))
        return (time_at(format, segment, end - size, last) or 0) if 0 < size <= end else 0


def _readers(offsets: Offsets) -> Iterator[tuple[str, int]]:
    """Yield the durable readers and their positions; one with an unreadable position counts as before everything, and so keeps all of
    it.
    """
    for name in offsets.names():
        try:
            sequence = offsets.load(name)
        except (Corruption, ValueError):
            sequence = -1
        if sequence is not None:
            yield name, sequence


def drop_consumed(journal: JournalHandle) -> None:
    """Remove segments that every durable reader has committed, unless a writer is appending: then the next call does it. Never raises."""
    with suppress(KvspoolError, OSError, ValueError):
        segments = Segments(journal.path, journal.format)
        if consumed(segments, journal.offsets):
            journal.under_lock(0, lambda appender, _: drop(appender.segments, consumed(appender.segments, journal.offsets)))


def plan(journal: JournalHandle, retention: Retention, before: int | None = None, elsewhere: Elsewhere = dict) -> TrimPlan:
    """Return the plan of a trim now. Takes no lock, and changes nothing."""
    return Trim(journal.segments_apart(), journal.offsets, journal.end(), retention, before, journal.retention, elsewhere).plan()


def trim(
    journal: JournalHandle,
    retention: Retention | None,
    before: int | None,
    force: bool,
    dry_run: bool,
    timeout: float,
    most: int | None = None,
    elsewhere: Elsewhere = dict,
) -> TrimReport:
    """See `Journal.trim`."""
    kept = journal.retention
    if retention is None:
        retention = Retention(force=force) if before is not None else kept
    if retention is None or (before is None and not retention.has_limit):
        raise ValueError("no rule to apply: pass a Retention with a limit, or before=; the journal has no retention of its own")
    if before is not None and before > (end := journal.end()):
        raise OutOfRange(f"sequence {before} has not been written yet; the next one of {journal.path} is {end}")
    if force:
        retention = msgspec.structs.replace(retention, force=True)
    planned = plan(journal, retention, before, elsewhere)
    going = planned.going[:most] if dry_run else _remove(journal, retention, before, kept, timeout, most, elsewhere)
    first = _first_left(planned, len(going)) if dry_run else journal.first()
    left = Trim(journal.segments_apart(), journal.offsets, first, retention, elsewhere=elsewhere).overtaken(first) if going else []
    totals = sum(one.records for one in going), sum(one.bytes for one in going)
    return TrimReport(str(journal.path), dry_run, len(going), *totals, first, left, planned)


def _first_left(planned: TrimPlan, gone: int) -> int:
    """Return the first sequence of a journal after the removal of so many of its oldest segments."""
    return planned.segments[gone].base if planned.segments else 0


def _remove(
    journal: JournalHandle,
    retention: Retention,
    before: int | None,
    kept: Retention | None,
    timeout: float,
    most: int | None,
    elsewhere: Elsewhere,
) -> list[PlannedSegment]:
    """Remove the planned segments, a few at a time, so that writers can append, and commits take effect, in between."""

    def remove(batch: int, _: Appender, page: Page) -> list[PlannedSegment]:
        return Trim(journal.segments_apart(), journal.offsets, page.next_sequence, retention, before, kept, elsewhere).remove(batch)

    removed: list[PlannedSegment] = []
    while True:
        batch = AT_ONCE if most is None else min(AT_ONCE, most - len(removed))
        some = journal.under_lock(timeout, partial(remove, batch))
        removed += some
        if len(some) < batch or len(removed) == most:
            return removed


def on_roll(journal: JournalHandle) -> Callable[[int], None]:
    """Return the function that an appender calls, with the next sequence, after it has begun a segment: it applies the journal's own
    retention.

    Never raises: a failed trim is no failure of the append. The journal stores it as `trim_error`.
    """

    def apply(end: int) -> None:
        try:
            rules = journal.retention
            if rules is not None and rules.has_limit:
                Trim(journal.segments_apart(), journal.offsets, end, rules).remove()
            journal.trim_error = None
        except (OSError, KvspoolError, ValueError) as error:
            journal.trim_error = error

    return apply
