"""Repair a journal on an operator's request: damaged segments, and a failed flush.

**Repairs**, under the locks of the writers, which wait meanwhile; readers continue:

| found | done |
|---|---|
| bytes that are no frame, at the end | cut off |
| the same within a segment, followed by sound frames | removed; those frames become a separate segment |
| the same, without a known next frame | the rest of that segment is removed |
| a damaged frame of known position and size | stays: readers get its Gap |
| a damaged header, followed by sound frames | rewritten |
| numbers at the end that were assigned, without records | never assigned again, if the format lets a segment begin anywhere |
| a failed flush | each affected segment is copied to new blocks, and on disk before the journal takes records again |

**Nothing is lost.** Removed bytes are first stored in a separate file: `SEGMENT.removed-POSITION` in the directory of kvspool's settings.
Sequences stay the same. Readers get a Gap for removed records.

**Killed at any step** it leaves a journal that the next repair fixes: the writers' page is invalidated first, so that writers in between
check the segments. New segments exist, whole, before their content is cut from the old one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.engine.reports import Removed, RepairReport
from kvspool.errors import Corruption, Poisoned
from kvspool.journal.control import APPEND, MAGIC, NO_RUN, NOTHING, SYNC, Control, Page
from kvspool.journal.damage import Examined, Run, examine
from kvspool.journal.segment import ARCHIVE
from kvspool.journal.segments import Segment
from kvspool.journal.times import latest_time
from kvspool.journal.verify import verify_journal
from kvspool.journal.walking import walk
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

if TYPE_CHECKING:
    from kvspool.journal.handle import JournalHandle

CHUNK = 1 << 20  # bytes copied at once


def repair_journal(journal: JournalHandle, mode: int, timeout: float) -> RepairReport:
    """See `Journal.repair`. mode: the permission bits of new files."""
    with _shut(journal, mode, timeout) as control:
        work = _Repair(journal, control, mode)
        work.go()
    return RepairReport(
        path=str(journal.path),
        sync_error=work.page.sync_error,
        removed=work.removed,
        begun=sorted(work.begun),
        headers=work.headers,
        written_anew=work.written_anew,
        verify=verify_journal(journal),
    )


@contextmanager
def _shut(journal: JournalHandle, mode: int, timeout: float) -> Iterator[Control]:
    """Keep all writers out during the `with` block, also those of other programs. Raises LogVanished if the journal was replaced."""
    journal.refuse_another()
    control = Control(journal.format.lock_file(journal.path), mode)
    try:
        control.enter(timeout)
        control.lock(timeout, SYNC)
        control.lock(timeout, APPEND)
        journal.refuse_another()
        yield control
    finally:
        try:
            control.close()
        except BaseException:  # out of a signal handler, perhaps before the locks were released
            control.close()
            raise


class _Repair:
    """One repair, under the locks."""

    def __init__(self, journal: JournalHandle, control: Control, mode: int) -> None:
        self.journal = journal
        self.mode = mode
        self.control = control
        self.format = journal.format
        self.page = control.read()
        self.segments = journal.segments_apart()
        self.removed: list[Removed] = []
        self.begun: list[int] = []
        self.headers: list[int] = []
        self.written_anew = 0

    def go(self) -> None:
        try:
            if self.page is not NOTHING:
                self.control.write(self.page._replace(boot=NO_RUN))
            bases = self.journal.bases()
            for base, until in zip(bases, [*bases[1:], None], strict=True):
                self._mend(base, until)
            if self.page.sync_error:
                self._rewrite()
            self._finish()
        finally:
            self.segments.close()

    # One segment.

    def _mend(self, base: int, until: int | None) -> None:
        """Reduce a segment to consecutive sound frames, and damaged ones of known size."""
        path = self.segments.path_of(base)
        if path.suffix == ARCHIVE:
            return  # never written to: damage in it is a Gap already, and the rest is kept
        segment = Segment(path, base, is_writable=True)
        try:
            self._mend_header(segment)
            size = segment.size()
            found = examine(self.segments, segment, size, until)
            cut = self._cut(found, size, is_last=until is None)
            if cut is None:
                return
            after = self._split(segment, [run for run in found.runs if run.begin >= cut[0]])
            self._keep_between(segment, *cut, after, size)
            system.port.truncate(segment.fd, cut[0])
            system.port.flush(segment.fd)
        finally:
            segment.close()

    def _cut(self, found: Examined, size: int, *, is_last: bool) -> tuple[int, int] | None:
        """Return where a segment has to end, and before which sequence; None if it is sound. Damaged frames of known size stay if sound
        ones, or segments, follow them.
        """
        sound = max((run.end for run in found.runs), default=0) if is_last else size
        for place in found.damaged:
            known = self.format.after_damage(place.position, place.first) if place.position < sound else None
            if place.position < size and (known is None or known[0] > size):
                return place.position, place.first
        return (found.position, found.sequence) if found.torn else None

    def _mend_header(self, segment: Segment) -> None:
        """Rewrite a damaged or incomplete header; sound frames after it stay, other bytes are set aside."""
        header = self.format.header(segment.base)
        if not header:
            return
        size = segment.size()
        with suppress(Corruption):
            if self.segments.begin_of(segment):
                return
        found = walk(self.format, segment, len(header), segment.base, size) if size > len(header) else None
        is_sound = size == len(header) or (found is not None and found.size > len(header))
        self._keep(segment, 0, segment.base, len(header) if is_sound else size)
        if not is_sound:
            system.port.truncate(segment.fd, 0)
        system.port.write(segment.fd, header, 0)
        system.port.flush(segment.fd)
        self.headers.append(segment.base)

    def _split(self, segment: Segment, runs: list[Run]) -> list[Run]:
        """Create a segment of each run, the last one first; return the runs for which that was possible."""
        made = []
        for run in reversed(runs):
            if self.format.name_of(run.first) is not None and not self.segments.exists(run.first) and self._make(segment, run):
                made.append(run)
                self.begun.append(run.first)
        return made[::-1]

    def _make(self, source: Segment, run: Run) -> bool:
        """Create a segment, on disk, from some frames of another one; False if they would be invalid there."""
        header = self.format.header(run.first)
        temporary = self._copied(source, run.begin, run.end, header)
        copy = Segment(temporary, run.first)
        try:
            found = walk(self.format, copy, len(header), run.first, copy.size())
        finally:
            copy.close()
        if (found.size, found.sequence) != (len(header) + run.end - run.begin, run.next):
            system.port.remove(temporary)
            return False
        self._put(temporary, self.segments.path_of(run.first))
        return True

    def _put(self, temporary: Path, path: Path) -> None:
        system.port.rename(temporary, path)
        disk.flush_directory(path.parent)

    # Removed bytes.

    def _keep_between(self, segment: Segment, position: int, sequence: int, runs: list[Run], size: int) -> None:
        """Keep the bytes after `position` that are in none of the runs."""
        for run in runs:
            self._keep(segment, position, sequence, run.begin - position)
            position, sequence = run.end, run.next
        self._keep(segment, position, sequence, size - position)

    def _keep(self, segment: Segment, position: int, sequence: int, size: int) -> None:
        """Copy some bytes of a segment to a separate file, on disk."""
        if size <= 0:
            return
        temporary = self._copied(segment, position, position + size)
        path = base = self._beside(f"{segment.path.name}.removed-{position}")
        number = 1
        while system.port.look_up(path) is not None:
            number += 1
            path = base.with_name(f"{base.name}.{number}")
        self._put(temporary, path)
        self.removed.append(Removed(segment.path.name, position, sequence, size, str(path)))

    def _beside(self, name: str) -> Path:
        return self.format.sidecar(self.journal.path) / name

    def _copied(self, source: Segment, begin: int, end: int, header: bytes = b"") -> Path:
        """Return a new file next to the segments, on disk, with a header and some bytes of a segment; removed if that fails."""
        path = self._beside("kvspool.repair.tmp")
        file = Descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, self.mode)
        try:
            with file as fd:
                system.port.write(fd, header, 0)
                for at in range(begin, end, CHUNK):
                    system.port.write(fd, source.read(at, min(CHUNK, end - at)), len(header) + at - begin)
                system.port.flush(fd)
        except BaseException:
            with suppress(OSError):
                system.port.remove(path)
            raise
        return path

    # The whole journal.

    def _rewrite(self) -> None:
        """Copy every segment with a record that may not be on disk. A page of the cache that couldn't be written counts as written: only
        new ones are sure to be written.
        """
        bases = self.journal.bases()
        first = self.segments.holding(self.page.synced_sequence, bases)
        for base in bases:
            if first is not None and base < first:
                continue
            path = self.segments.path_of(base)
            segment = Segment(path, base)
            try:
                self._put(self._copied(segment, 0, segment.size()), path)
            except OSError as error:
                raise Poisoned(f"{path}: it could not be rewritten ({error}); the journal still takes no records") from error
            finally:
                segment.close()
            self.written_anew += 1

    def _finish(self) -> None:
        """Store the end of the journal, after all of it is on disk."""
        base = self.journal.bases()[-1]
        segment = Segment(self.segments.path_of(base), base, is_writable=True)
        try:
            found = walk(self.format, segment, self.segments.begin_of(segment), base, segment.size())
            end, sequence = segment.size(), found.sequence
            if found.size < end:  # damaged frames of known size
                sequence = examine(self.segments, segment, end, None).sequence
            system.port.flush(segment.fd)
            promised = self.page.next_sequence if self.page.boot == self.control.boot_id else self.page.synced_sequence
            if promised > sequence and self.format.name_of(promised) is not None:
                base, sequence, end = promised, promised, self._begin(promised, segment)
        finally:
            segment.close()
        disk.flush_directory(self.segments.directory)
        known = max(self.page.last_timestamp, latest_time(self.segments)), sequence, 0
        self.control.write(Page(MAGIC, self.control.boot_id, base, end, sequence, *known, *self.control.holder, 0))

    def _begin(self, base: int, source: Segment) -> int:
        """Create an empty segment, so that assigned numbers are not assigned again; return its end."""
        header = self.format.header(base)
        self._put(self._copied(source, 0, 0, header), self.segments.path_of(base))
        self.begun.append(base)
        return len(header)
