"""Check every record of a log while others use it, and report damage.

**No false alarms.** No lock is taken. Bytes before `head` may be overwritten at any moment, so `head` is reread after each finding: bytes
that it has passed were not damaged. Sequences left out on purpose after a restart of the machine are no damage either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool import system
from kvspool.engine import producer_table
from kvspool.engine.checksums import checksum
from kvspool.engine.damage import MOST_PLACES, Damage, VerifyReport
from kvspool.kernel import frames_py as frames
from kvspool.options import Progress
from kvspool.spool import format, search, slots

if TYPE_CHECKING:
    from kvspool.kernel.frames import FrameReader
    from kvspool.spool.spool_files import SpoolFiles

BATCH = 256  # records checked between two calls of `progress`


class _Look:
    """One check from the oldest record to the tail."""

    def __init__(self, reader: FrameReader) -> None:
        self.reader = reader
        self.first: int
        reader.position, reader.sequence = search.find(reader, "earliest")
        self.first = reader.sequence
        self.end, self.next_sequence, _ = reader.mark()
        self.records = self.bytes = self.left_out = self.overrun = 0
        self.damaged: list[Damage] = []
        self._broken: tuple[int, int] | None = None  # start of the damage, and the sequence expected there

    def go(self, progress: Progress) -> None:
        reader = self.reader
        begin = reader.position
        while True:
            records, size = reader.check(self.end, BATCH)
            self.records += records
            self.bytes += size
            progress(reader.position - begin, self.end - begin)
            if records:
                continue
            if reader.stop == frames.OVERRUN:
                if not self._catch_up():
                    return
            elif reader.stop == frames.JUMPED:
                self._jump(reader.sequence_found, reader.position)
            elif reader.stop == frames.DAMAGED:
                self._pass_over()
            else:
                self._jump(self.next_sequence, self.end)
                return

    def _catch_up(self) -> bool:
        """Continue at the head after an overrun. False if that is after the end."""
        reader, self._broken = self.reader, None
        while True:
            head = reader.head()
            if head >= self.end:
                self.overrun += max(0, self.next_sequence - reader.sequence)
                return False
            found = reader.sequence_at(head, self.end)
            if reader.head() != head:
                continue
            reader.position = head
            if found != frames.NOTHING and found > reader.sequence:
                self.overrun, reader.sequence = self.overrun + found - reader.sequence, found
            return True

    def _jump(self, sequence: int, position: int) -> None:
        """Continue at `sequence`: the records before it were damaged, or left out after a restart of the machine."""
        reader = self.reader
        restart = sequence // format.STRIDE * format.STRIDE
        if self._broken is not None:
            last = sequence if restart <= reader.sequence else restart
            # Unassigned sequences before a restart can't be distinguished from lost ones; the place is damaged in either case.
            missing = sequence - 1 if last == sequence else reader.sequence - 1
            self.damaged.append(Damage(self._broken[0], position - self._broken[0], self._broken[1], missing))
            self.left_out += sequence - 1 - missing
        elif sequence > reader.sequence:
            self.left_out += sequence - reader.sequence
        reader.sequence, self._broken = sequence, None

    def _pass_over(self) -> None:
        """Find the next sound frame; note the start of the damage, unless writers have overwritten it meanwhile."""
        reader = self.reader
        at = reader.position
        found = reader.find_frame(at + 8, self.end, reader.sequence, self.next_sequence - 1)
        if reader.head() > at:
            self._broken = None
            return  # the next fetch reports the overrun
        self._broken = self._broken or (at, reader.sequence)
        reader.position = found
        if found < self.end and reader.sequence_at(found, self.end) == reader.sequence:
            # Bytes that are no frames, without a missing record: leftovers of a crash of the machine.
            self._broken = None


def verify_files(files: SpoolFiles, progress: Progress | None = None) -> VerifyReport:
    """Check every present record; `progress(done, all)` is called with bytes. Raises Corruption if the log's end is unknown."""
    look = _Look(files.reader(0, 0))
    look.go(progress or (lambda done, all: None))
    return VerifyReport(
        path=str(files.path),
        format="spool",
        records=look.records,
        bytes=look.bytes,
        first_sequence=look.first,
        next_sequence=look.next_sequence,
        damaged_records=sum(place.count for place in look.damaged),
        damaged=look.damaged[:MOST_PLACES],
        left_out=look.left_out,
        overrun=look.overrun,
        problems=[*_problems(files), *producer_table.problems(files.path, files.origin)],
        sync_error=files.control.cast("Q")[frames.SYNC_ERROR],
    )


def _problems(files: SpoolFiles) -> list[str]:
    """Return the faults of the headers, which are reread from the files, the key table and the durable readers."""
    found = []
    for name, fd, size in (
        (format.CONTROL_FILE, files.control_fd, format.HEADER.size),
        (format.DATA_FILE, files.data_fd, format.DATA_HEADER.size),
    ):
        with files.held_open():
            raw = system.port.read(fd, size, 0)
        if checksum(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
            found.append(f"{name}: the checksum of its header doesn't match")
    if files.key_table is not None and not files.key_table.is_whole():
        known = len(files.key_table.indexes)
        found.append(f"the key table has lost all keys after {known}: records that name later ones can't be decoded")
    lost = [slot for slot in slots.Slots(files.control, files.header.log_id).taken() if slot.newest() is None]
    return found + [f"the durable reader {slot.name!r} (slot {slot.number}) has lost its position; delete it" for slot in lost]
