"""A position in a journal that moves forward, exactly, over frames, from segment to segment, and over lost records.

No lock is taken. If another journal is at the path when a segment is opened, the cursor raises LogVanished. An incomplete frame is the end
for now. Records that a cursor can't return become a Gap:

- *trimmed*: the oldest segments were removed before they were read;
- *damaged*: the bytes at the position are no frame; the cursor continues after them, in the next segment if the format doesn't tell where.
  Or a segment, or frames, don't exist although later ones do;
- *missing*: the numbers were left out on purpose, which only some formats allow, and only before a frame of the same segment: a writer
  begins each segment at the end of the previous one.

If no frame follows the damage in the last segment: Corruption. If a file is shorter than the part that was read: Truncated.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any, NamedTuple

from kvspool import system
from kvspool.engine import cursor
from kvspool.engine.cursor import Make
from kvspool.engine.wakeups import CHANGED, ENTERED, LINKS, Watcher
from kvspool.errors import Corruption, KvspoolError, LogVanished, Truncated
from kvspool.journal import control
from kvspool.journal.format import DAMAGED, JUMPED, LAST_SEQUENCE, SHORT, Scan
from kvspool.journal.segments import Segment, Segments
from kvspool.journal.walking import walk
from kvspool.kernel.frames import Batch
from kvspool.kernel.wakeups import FileSleeper
from kvspool.record import Gap, Record
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.engine.eventloops import LoopWatcher

CHUNK = 1 << 18  # bytes read at once
MOST = 1 << 12  # records taken at once
FARTHEST = 1 << 26  # bytes after damage that are searched for a sound frame
Take = Callable[[bytes, int, int], Scan]  # takes up to a number of records from bytes; the first has this sequence; see Format.scan


class SegmentPlace(NamedTuple):
    """A byte of a segment, and the sequence to begin with: of the record there, or, after damage, of a later one.

    `there` is the sequence of the record at the byte in that case, -1 otherwise.
    """

    base: int
    position: int
    sequence: int
    there: int = -1


class SegmentCursor(cursor.Cursor):
    """Moves over a journal. `end`: the sequence at which a bounded read stops, None to continue indefinitely.

    limit: returns each time the first sequence that may not be read yet; None: all may be read.
    """

    AT_ONCE = MOST
    sequence = 0

    def __init__(self, segments: Segments, place: SegmentPlace, end: int | None, limit: Callable[[], int] | None = None) -> None:
        self.limit = limit
        self.segments = segments
        self.end = end
        self.missed = 0
        self.base, self.position, self._first, there = place
        self.sequence = self._first if there < 0 else there
        self._data = b""  # read ahead, from `position` on
        self._size = CHUNK
        self._has_more = True
        self._has_waited = False  # in vain: at the next end, check whether later segments exist although the next one doesn't
        self._is_entered = self.position > 0  # the first frame of the segment was passed, or is at `position`

    def skip_to(self, sequence: int) -> bool:
        if not self.sequence <= sequence <= self.sequence + MOST:
            return False
        self._first = sequence
        return True

    def fetch(self, most: int, make: Make | None, items: list[Any]) -> Gap | None:
        """Fetch as every cursor does. Raises Corruption, Truncated."""
        mark = self.mark()
        try:
            return self._fetch(most, make, items)
        except BaseException:
            if items:  # from a signal handler, and we may be before or after them: copy them again
                items.clear()
                self.go_back(mark)
            raise

    def _fetch(self, most: int, make: Make | None, items: list[Any]) -> Gap | None:
        scan = self.segments.format.scan
        return self.advance(most, lambda data, sequence, most: scan(data, sequence, most, make, items), items)

    def advance(self, most: int, take: Take, taken: Sized, *, is_greedy: bool = False) -> Gap | None:
        """Let `take` have up to `most` present records; or return a Gap. taken: is empty until it has some.

        is_greedy: let it also have further records of the same segment while it wants more, not only those read at once. Never returns a
        Gap after records: the next call does.
        """
        self.needs = 0
        bound = LAST_SEQUENCE if self.end is None else self.end
        if self.limit is not None:
            limit = self.limit()
            bound = min(bound, limit)
        last = min(self.sequence + most, bound)
        while (left := min(most, bound - self.sequence)) > 0:  # a step may pass over sequences to the first one
            gap = self._step(left, take)
            if gap is not None:
                self.missed += gap.count
                return gap
            if taken or not self._has_more:
                break
        while is_greedy and taken and self.sequence < last and self._go_on_taking(last - self.sequence, take):
            pass
        if self.limit is not None and self.sequence >= limit:
            self._data = b""  # bytes after it may yet be cut
        return None

    def mark(self) -> tuple[int, int, int, int, bool]:
        """Return the argument with which `go_back` returns here."""
        return self.base, self.position, self.sequence, self.missed, self._is_entered

    def go_back(self, mark: tuple[int, int, int, int, bool]) -> None:
        """Return to where the cursor was when `mark` was called."""
        self.base, self.position, self.sequence, self.missed, self._is_entered = mark
        self._data = b""

    def _go_on_taking(self, most: int, take: Take) -> bool:
        """After records: take the following ones that are in the segment now. False if there are none, or something else is in between; the
        next step handles it.
        """
        try:
            segment = self.segments.get(self.base)
            data = b"" if segment is None else segment.read(self.position, CHUNK)
        except (KvspoolError, OSError):
            return False
        found = take(data, self.sequence, most)
        if found.size:
            self._move(data, found)
        return found.size > 0

    def _move(self, data: bytes, found: Scan) -> None:
        """Move past the frames that were found in the bytes read ahead."""
        self.position += found.size
        self.sequence = found.sequence
        self._data = data[found.size :]

    def _step(self, most: int, take: Take) -> Gap | None:
        """Take the records of one piece of a segment; `_has_more` says whether another step could find more."""
        self._has_more = True
        if self.sequence < self.base:
            return self._gap_to(self.base, "trimmed")  # the journal begins after the requested start
        segment = self.segments.get(self.base)
        if segment is None:
            return self._go_on("trimmed")
        if self.position == 0 and not self._is_entered:
            return self._begin(segment)
        if not self._data and not self._read(segment):
            return self._at_end(segment)
        if self.sequence < self._first:
            found = self.segments.format.pass_over(self._data, self.sequence, self._first)
        else:
            found = take(self._data, self.sequence, most)
        self._move(self._data, found)
        if found.size:
            self._size = CHUNK
            return None
        if found.stop == SHORT:
            return self._read_on(segment, found.need)
        return self._pass_damage(segment, found.need if found.stop == JUMPED else None)

    def _begin(self, segment: Segment) -> Gap | None:
        """Go to the first frame of the segment, or to the expected one, if it begins before that."""
        size = segment.size()  # before the check: bytes written meanwhile are not torn
        try:
            position = self.segments.begin_of(segment)
        except Corruption:
            return self._pass_header(segment)
        if position == 0 and self.segments.format.header_bytes:
            if not size and self._later() and not segment.size():
                return self._go_on("damaged")  # it was full once
            return self._at_torn_end(segment, b"", size) if size else self._at_end(segment)
        if self.sequence > self.base:
            found = walk(self.segments.format, segment, position, self.base, size, until=self.sequence)
            if found.sequence < self.sequence and found.stop not in (DAMAGED, JUMPED):
                return self._wait_for_more(segment, size)
            self._first, self.sequence = self.sequence, found.sequence  # damage may be between the two
            position = found.size
        self.position, self._is_entered = position, True
        return None

    def _pass_header(self, segment: Segment) -> Gap | None:
        """The header is damaged. The segment's name has the same sequence, so go to the first sound frame, or to the next segment. Raises
        Corruption.
        """
        later = self._later()
        after = self._after(segment, self.sequence - 1, later[0] if later else LAST_SEQUENCE)
        if after is None:
            if later:
                return self._go_on("damaged")
            self.segments.begin_of(segment)
            return None
        self.position, self._is_entered = after[0], True
        return self._gap_to(after[1], "damaged")

    def _wait_for_more(self, segment: Segment, size: int) -> Gap | None:
        """The segment, of `size` bytes, ends before the expected sequence."""
        self.position = 0
        is_sealed = bool(self._later())
        if is_sealed and segment.size() == size:
            return self._go_on("damaged")
        self._has_more = is_sealed
        return None

    def _read(self, segment: Segment) -> bool:
        """Read ahead; False if the segment has no more bytes now."""
        self._data = segment.read(self.position, self._size)
        if not self._data and segment.size() < self.position:
            raise Truncated(
                f"{segment.path} was cut to {segment.size()} bytes, before byte {self.position} where sequence {self.sequence} "
                "was expected; open the journal again to read the rest"
            )
        return bool(self._data)

    def _read_on(self, segment: Segment, need: int) -> Gap | None:
        """A frame extends past the bytes read: read more, or wait until it is whole."""
        seen, there = self._data, segment.size() - self.position
        had = len(seen)
        if self.largest < need <= there:
            self.needs, self._has_more = need, False
            return None
        if had < there and need <= there:
            self._size = min(max(self._size, need, 2 * had), there)
            self._data = segment.read(self.position, self._size)
            if not seen.startswith(self._data):  # it continues; or a dead writer's torn end was cut, and others wrote there
                return None
        self._data = b""
        return self._at_torn_end(segment, seen, self.position + there)

    def _at_torn_end(self, segment: Segment, seen: bytes, end: int) -> Gap | None:
        """The segment ended at byte `end`, within a frame that begins with `seen`: it is not written yet, unless the writers say that it
        should be.
        """
        is_missing = bool(self._later()) or self._is_published(segment)
        if segment.size() > end:
            return None  # it was still being written during the check
        if is_missing:
            if not seen.startswith(segment.read(self.position, len(seen))):
                return None  # it was cut, and others wrote there
            return self._pass_damage(segment, None)
        self._has_more = False
        return None

    def _is_published(self, segment: Segment) -> bool:
        """Return whether the writers state that there are whole frames where we see none."""
        page = control.look(self.segments.format.lock_file(self.segments.path))
        return page.base == self.base and self.position < page.end <= segment.size() and self.sequence < page.next_sequence

    def _at_end(self, segment: Segment) -> Gap | None:
        """The segment has nothing left now: continue in the next one, if there is one."""
        if self.sequence != self.base and self.segments.exists(self.sequence):
            if segment.size() == self.position:  # otherwise it was still being written during the check
                self._enter(self.sequence)
            return None
        if segment.is_gone() or self.end is not None or self._has_waited:
            self._has_waited = False
            if self._later():
                return self._go_on("damaged" if self.segments.exists(self.base) else "trimmed") if segment.size() == self.position else None
            lost_end = self.segments.lost_end(self.base, self.sequence)
            if lost_end > self.sequence and segment.size() == self.position:
                return self._gap_to(lost_end, "damaged")
        self._has_more = False
        return None

    def _later(self) -> list[int]:
        """Return the bases of later segments; none for a deleted journal."""
        try:
            return [base for base in self.segments.bases() if base > self.base]
        except LogVanished:
            if self.end is not None:
                self.refuse_vanished()
            return []

    def _pass_damage(self, segment: Segment, found: int | None) -> Gap | None:
        """The bytes here are not the next frame: continue at a later one. `found`: the sequence of the frame at this position."""
        later = self._later()
        until = later[0] if later else LAST_SEQUENCE
        after = self._after_damage(segment, until) if found is None else self._after_jump(segment, found)
        if after is None or (later and after[1] > later[0]):
            if not later:
                raise self._corruption(segment)
            return self._go_on("damaged")
        is_left_out = self.segments.format.may_leave_out and after[0] == self.position
        self._data = b""
        self.position = after[0]
        return self._gap_to(after[1], "missing" if is_left_out else "damaged")

    def _after_damage(self, segment: Segment, until: int) -> tuple[int, int] | None:
        """Return where to continue after bytes that are no frame, and the next sequence there."""
        found = self._after(segment, self.sequence, until)
        return self.segments.format.after_damage(self.position, self.sequence) if found is None else found

    def _after(self, segment: Segment, sequence: int, until: int) -> tuple[int, int] | None:
        """Return the position of the next sound frame with a sequence above `sequence` and below `until`: up to the end of the segment."""
        size = CHUNK
        while True:
            data = segment.read(self.position, size)
            found = self.segments.format.resume(data, sequence, until)
            if found is not None:
                return self.position + found[0], found[1]
            if len(data) < size or size >= FARTHEST:
                return None
            size *= 4

    def _after_jump(self, segment: Segment, found: int) -> tuple[int, int] | None:
        """Return where to continue after, or at, a frame with another sequence, and the next sequence there."""
        form = self.segments.format
        data = segment.read(self.position, CHUNK)
        need = form.pass_over(data, found, found + 1).need if found < LAST_SEQUENCE else 0
        if CHUNK < need + CHUNK <= segment.size() - self.position:
            data = segment.read(self.position, need + CHUNK)
        after = form.after_jump(data, self.sequence, found)
        return None if after is None else (self.position + after[0], after[1])

    def _corruption(self, segment: Segment) -> Corruption:
        return Corruption(
            f"{segment.path}: no {self.segments.format.name} frame at byte {self.position}, where sequence {self.sequence} should be, "
            "and no frame is found after it; kvspool verify shows the damage, kvspool repair cuts it off"
        )

    def _go_on(self, reason: str) -> Gap | None:
        """Go to the first later segment. The records in between are lost."""
        later = self._later()
        if later:
            self.segments.refuse()
        if not later and not self._is_entered:
            self._has_more = False  # there never was a segment
            return None
        if not later:
            if self.end is not None:
                raise LogVanished(f"{self.segments.path}: the segments from sequence {self.base} on were removed while they were read")
            self._has_more = False
            return None
        self._enter(later[0])
        return self._gap_to(later[0], reason)

    def _enter(self, base: int) -> None:
        self.base, self.position, self._data, self._size, self._is_entered = base, 0, b"", CHUNK, False

    def _gap_to(self, sequence: int, reason: str) -> Gap | None:
        """Expect `sequence` next; the Gap before it, if there is one."""
        first, self.sequence = max(self.sequence, self._first), max(sequence, self.sequence)
        if sequence <= first:
            return None
        last = sequence - 1 if self.end is None else min(sequence, self.end) - 1
        return Gap(first, last, reason, str(self.segments.path)) if last >= first else None

    def next_batch(self, most: int, coded: bool, room: int) -> Any:
        from kvspool.journal import gathering

        if not self.segments.format.has_columns and room < CHUNK:
            most = min(most, 1)  # otherwise the records read at once fit, or it is one record
        return gathering.next_batch(self, most, coded, room)

    # For iterations, and readers of several logs at once.

    def waiter(self, spin: float) -> FileWaiter:
        return FileWaiter(self, spin)

    @property
    def files(self) -> object:
        return self.base  # others in each segment

    def watch(self, watcher: Watcher | LoopWatcher, key: object) -> None:
        """Let the watcher wake when there may be more: in the segment, in a new one, or, for synced records, after a flush."""
        watcher.watch(self.segments.directory, ENTERED, key)
        watcher.watch(self.segments.path_of(self.base), CHANGED | LINKS, key)
        if self.limit is not None:
            watcher.watch(self.segments.format.lock_file(self.segments.path), CHANGED, key)

    def sleeper(self, watcher: Watcher) -> FileSleeper | None:
        """Return an object that sleeps until a record is written here, and copies it; None if more than that is expected.

        The watcher has reported only writes since a check found nothing after the cursor.
        """
        segment = self.segments.get(self.base)
        if type(segment) is not Segment or self.end is not None or self.limit is not None or self._data or self.sequence < self._first:
            return None
        return FileSleeper(watcher, self, self.segments.format.scanner(), segment.fd)

    def refuse_vanished(self) -> None:
        if self.has_vanished():
            raise LogVanished(f"{self.segments.path} was deleted while it was open; open it again if it exists")
        self._has_waited = True

    def has_vanished(self) -> bool:
        return system.port.look_up(self.segments.directory) is None

    def close(self) -> None:
        self.segments.close()


class FileWaiter(Handle):
    """Sleeps until the kernel reports a write to the current segment, or a new one; it polls for the first `spin` seconds."""

    def __init__(self, cursor: SegmentCursor, spin: float) -> None:
        self._cursor = cursor
        self._spin = spin
        self._watcher: Watcher | None = None
        self._watched = -1  # base of the watched segment
        self._sleeper: FileSleeper | None = None
        self._is_calm = False  # the last sleep ended with a write, and nothing else
        self._is_woken = False

    def fetch(self, seconds: float, most: int, make: Make | None, items: list[Any]) -> Gap | None:
        watcher = self._watch()
        gap = self._look(min(seconds, self._spin), most, make, items)
        if gap is None and not items and not self._is_woken:
            if not watcher.wait(seconds):  # no change was reported
                self._cursor.refuse_vanished()
            self._is_calm = watcher.changes == CHANGED
        return gap

    def _look(self, seconds: float, most: int, make: Make | None, items: list[Any]) -> Gap | None:
        """Fetch the present records, or those that arrive while polling for so many seconds."""
        until = system.port.monotonic() + seconds if seconds else 0.0
        while (gap := self._cursor.fetch(most, make, items)) is None and not items and seconds and not self._is_woken:
            if system.port.monotonic() >= until:
                break
        return gap

    def _watch(self) -> Watcher:
        """Watch the directory and the current segment. A removed segment's watch is removed with it."""
        cursor, watcher = self._cursor, self._watcher
        if watcher is None or self._watched != cursor.base:
            if watcher is not None:
                watcher.close()
            watcher = self._watcher = Watcher()
            cursor.watch(watcher, 0)
            self._watched = cursor.base
        return watcher

    def park(self, batch: Batch, seconds: float) -> None:
        if not self._is_calm or self._spin or self._watcher is None or self._watched != self._cursor.base:
            return
        self._sleeper = self._cursor.sleeper(self._watcher)
        if self._sleeper is not None:
            batch.park(self._sleeper, round(seconds * 1e9), MOST, Record)

    def unpark(self) -> None:
        self._is_calm = False
        sleeper, self._sleeper = self._sleeper, None  # another thread may close the iteration at the same time
        if sleeper is not None:
            sleeper.close()

    def wake(self) -> None:
        self._is_woken = True
        watcher = self._watcher
        if watcher is not None:
            watcher.wake()

    def close(self) -> None:
        self.unpark()
        if self._watcher is not None:
            self._watcher.close()
