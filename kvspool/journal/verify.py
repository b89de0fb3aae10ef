"""Check every frame of a journal while others use it, and report damage.

**No false alarms.** No lock is kept. Sealed segments don't change, except by removal: records trimmed meanwhile are no damage. The end of
the last one changes all the time: a part of a frame there counts only if it stays the same while no writer, kvspool's or the original's, is
appending. Even then it is no damage, but the trace of a killed writer, which the next append cuts. A durable reader's position is compared
with the end as of after it was read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from kvspool import system
from kvspool.engine import producer_table
from kvspool.engine.damage import MOST_PLACES, VerifyReport
from kvspool.errors import Corruption
from kvspool.journal import control, settings
from kvspool.journal.control import NOTHING, Page
from kvspool.journal.damage import Examined, SegmentDamage, examine
from kvspool.journal.segment import Archived
from kvspool.options import Progress
from kvspool.system.descriptor import Descriptor

if TYPE_CHECKING:
    from kvspool.journal.handle import JournalHandle
    from kvspool.journal.segments import Segment

PATIENCE = 5.0  # seconds until the end of a journal in use has to look whole for a moment
PAUSE = 0.02  # seconds between two checks of it
SAME = 3  # checks in a row that have to find the same


class _Look:
    """One check from the oldest segment to the last one."""

    def __init__(self, journal: JournalHandle, progress: Progress) -> None:
        self.journal = journal
        self.progress = progress
        self.page, words = _page(journal)  # before the segments are checked: its records must exist
        self.problems = [words] if words else []
        self.segments = journal.segments_apart()
        self.damaged: list[SegmentDamage] = []
        self.records = self.bytes = self.trimmed = self.torn = self.looked_at = 0
        self.first = self.end = -1

    def go(self) -> None:
        """Check all present segments."""
        bases = self._regular(self.journal.bases())
        sizes = [system.port.look_up(self.segments.path_of(base)) for base in bases]
        done, total = 0, sum(status.st_size for status in sizes if status is not None)
        self.first = bases[0] if bases else 0
        for base, until in zip(bases, [*bases[1:], None], strict=False):  # there may be none
            try:
                segment = self.segments.get(base)
            except Corruption as error:  # an unreadable archive
                self.problems.append(str(error))
                self.damaged.append(SegmentDamage(0, 0, base, (until or base) - 1, segment=self.segments.path_of(base).name))
                continue
            if segment is None:
                self._vanished(base, until)
                continue
            self.looked_at += 1
            size = segment.size()
            if until is None:
                self._take_end(segment)
            else:
                self._take(examine(self.segments, segment, size, until, self._telling(done, total)), segment, until)
            if isinstance(segment, Archived):
                self.problems += map(str, segment.damage.values())  # the damaged block
            done += size
            self._tell(done, total)
        self._compare_with_page(bases)
        self.segments.close()

    def _telling(self, done: int, total: int) -> Callable[[int], None]:
        return lambda at: self._tell(done + at, total)

    def _tell(self, done: int, total: int) -> None:
        self.progress(done, max(total, done))

    def _regular(self, bases: list[int]) -> list[int]:
        """Return the segments that are files; reading a pipe would never end."""
        kept = []
        for base in bases:
            status = system.port.look_up(self.segments.path_of(base))
            if status is None or stat.S_ISREG(status.st_mode):
                kept.append(base)
            else:
                self.problems.append(f"{self.segments.path_of(base).name} has a segment's name and is not a file")
        return kept

    def _take(self, found: Examined, segment: Segment, until: int | None) -> None:
        self.records += found.records
        self.bytes += found.bytes
        self.damaged += found.damaged
        self.end = found.sequence if until is None else until
        if until is not None and found.sequence > until:
            self.problems.append(f"{segment.path.name} continues to sequence {found.sequence - 1}, but the next one begins at {until}")

    def _take_end(self, segment: Segment) -> None:
        """Check the last segment until it is whole, or stays damaged without a writer."""
        found, same = examine(self.segments, segment, segment.size(), None), 0
        deadline = system.port.monotonic() + PATIENCE
        is_written = False
        while (found.damaged or found.torn) and same < SAME and system.port.monotonic() < deadline:
            system.port.sleep(PAUSE)
            is_written = is_written_to(self.journal)
            before, found = found, examine(self.segments, segment, segment.size(), None)
            same = same + 1 if found == before and not is_written else 0
        self._take(found._replace(torn=0), segment, None)
        self.torn = 0 if is_written else found.torn

    def _vanished(self, base: int, until: int | None) -> None:
        """A segment no longer exists: trimmed, if older ones don't exist, either. The last one may have become the oldest."""
        left = self.journal.bases()
        after = left[0] if until is None else until
        self.end = max(self.end, after)
        if left[0] > base:
            self.trimmed += after - base
        elif base not in left:
            self.problems.append(f"the segment from sequence {base} on was removed, although older ones exist")

    def _compare_with_page(self, bases: list[int]) -> None:
        """Check that records promised before the check, by writers or by a flush in an earlier boot of the machine, exist."""
        page = self.page
        if page is NOTHING:
            return
        promised = page.next_sequence if page.boot == system.port.boot_id() else page.synced_sequence
        if promised <= self.end or not bases or self._was_cut_meanwhile(promised):
            return
        last = self.segments.path_of(bases[-1])
        status = system.port.look_up(last)
        at_end = SegmentDamage(0 if status is None else status.st_size, 0, self.end, promised - 1, segment=last.name)
        if self.damaged and self.damaged[-1].segment == last.name and self.damaged[-1].first == self.end:
            at_end = msgspec.structs.replace(self.damaged.pop(), last=promised - 1)
        self.damaged.append(at_end)

    def _was_cut_meanwhile(self, promised: int) -> bool:
        """Return whether the writers' own end is now an earlier one: the journal was rewound, or a torn end was cut."""
        now = _page(self.journal)[0]
        return now is not NOTHING and now != self.page and now.next_sequence < promised


def verify_journal(journal: JournalHandle, progress: Progress | None = None) -> VerifyReport:
    """Check every present record; `progress(done, all)` is called with bytes. Raises LogNotFound, or the system's OSError."""
    look = _Look(journal, progress or (lambda done, all: None))
    look.go()
    return VerifyReport(
        path=str(journal.path),
        format=journal.format.name,
        segments=look.looked_at,
        records=look.records,
        bytes=look.bytes,
        first_sequence=look.first,
        next_sequence=look.end,
        damaged_records=sum(max(0, place.count) for place in look.damaged),
        damaged=[*look.damaged[:MOST_PLACES]],
        trimmed=look.trimmed,
        torn_bytes=look.torn,
        foreign=_foreign(journal),
        problems=[*look.problems, *_settings(journal), *_readers(journal), *_producers(journal)],
        sync_error=look.page.sync_error,
    )


def is_written_to(journal: JournalHandle) -> bool:
    """Return whether a writer holds the append lock at this moment, or the original program has the journal open."""
    path = journal.format.lock_file(journal.path)
    try:
        file = Descriptor(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return False
    with file as fd:
        if control.is_appended_to(path, fd):
            return True
        if not system.port.try_lock_file(fd, shared=True):
            return True
        system.port.unlock_file(fd)
        return False


def _page(journal: JournalHandle) -> tuple[Page, str]:
    """Return the writers' page, of any boot of the machine, and its faults."""
    path = journal.format.lock_file(journal.path)
    try:
        file = Descriptor(path, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):
        return NOTHING, ""
    with file as fd:
        for _ in range(control.TRIES):
            data = system.port.read(fd, control.CONTENT, 0)
            page = control.parse(data)
            if page is not NOTHING or not data[: control.PAGE.size].strip(b"\0"):
                return control.with_error(control.with_tail(page, path, system.port.boot_id()), data), ""
            system.port.sleep(PAUSE)
    return NOTHING, f"{path.name} doesn't give the end of the journal; the next append finds it"


def _foreign(journal: JournalHandle) -> list[str]:
    form, path = journal.format, journal.path
    directory = form.segments_in(path)
    ours = {form.lock_file(path), form.sidecar(path), directory / settings.NAME}
    names, segments = system.port.names(directory), journal.segments_apart()
    return sorted(name for name in names if segments.base_of(name) is None and not form.knows(name) and directory / name not in ours)


def _settings(journal: JournalHandle) -> Iterator[str]:
    try:
        settings.load(journal.format.sidecar(journal.path))
    except Corruption as error:
        yield str(error)


def _producers(journal: JournalHandle) -> list[str]:
    if not journal.format.has_producers:
        return []
    try:
        return producer_table.problems(journal.path, journal.log_id)
    except Corruption:  # of the settings, which contain the id; already reported
        return []


def _readers(journal: JournalHandle) -> Iterator[str]:
    for name in journal.offsets.names():
        try:
            sequence = journal.offsets.load(name)
        except (Corruption, ValueError) as error:
            yield f"the durable reader {name!r} has lost its position: {error}"
            continue
        end = journal.end()
        if sequence is not None and sequence > end:
            yield f"the durable reader {name!r} is at sequence {sequence}, but {end} is the next one; it continues there"
