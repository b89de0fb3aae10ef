"""Copy the records of one log into another one of any format, and resume an interrupted copy.

**Resuming.** If the target can keep the sequences, its own end shows how far the copy came, and its last record is compared with the
source's. Otherwise this is stored in a note next to the target, which is on disk before it is needed; see `note`. So the same call
continues a copy that was killed at any moment, and no record is duplicated or left out.

**Durability.** When it returns, the copy is on disk. It is appended in batches of some MiB.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from kvspool import system
from kvspool.engine.moving import Mover, limited
from kvspool.engine.rows import Room, Rows, latest, lost
from kvspool.errors import Corruption, LogNotFound, NotALog, OtherRecords
from kvspool.journal import files as journals
from kvspool.journal.formats import FORMATS
from kvspool.opening import logs
from kvspool.opening.keywords import refuse_unknown
from kvspool.options import TIMEOUT, OnGap, Start
from kvspool.record import Codec, Gap
from kvspool.system import disk
from kvspool.transfer import queues, sources, targets
from kvspool.transfer.note import Note, Notes, locked
from kvspool.transfer.progress import CopyProgress
from kvspool.transfer.sources import Source
from kvspool.transfer.targets import CopyTarget, QueueTarget

LEAST_CAPACITY = 64 << 20  # bytes of a spool that is created for a copy
FRAME = 48  # most bytes that a record takes in a spool in addition to key and value


class CopyPlan(msgspec.Struct, frozen=True):
    """The plan of a copy.

    first_sequence: the next one of the source; target_sequence: its sequence in the target, None in a queue. keeps_sequences: whether they
    stay the same. may_lose: fields that the source's format has and the target's has not. is_continued: the target already has a part of
    the copy.
    """

    source: str
    target: str
    source_format: str
    format: str
    first_sequence: int
    target_sequence: int | None
    keeps_sequences: bool
    may_lose: list[str]
    is_continued: bool


class CopyReport(msgspec.Struct, frozen=True):
    """The result of one run of a copy.

    records, bytes: copied by this run; bytes are those of keys and values. gaps: records that the source could not deliver. not_kept:
    fields of records that the target can't store: "keys", "empty keys", "types", "timestamps", "codecs"; and "sequences" if they have
    changed. first_sequence, last_sequence: of the source; target_first_sequence, target_last_sequence: of the same records in the target;
    None for no record, and in a queue. is_continued: the target already had a part of the copy. torn: places where files of kvspool v1 end
    with an incomplete frame.
    """

    source: str
    target: str
    source_format: str
    format: str
    records: int
    bytes: int
    gaps: list[Gap]
    not_kept: list[str]
    first_sequence: int | None
    last_sequence: int | None
    target_first_sequence: int | None
    target_last_sequence: int | None
    is_continued: bool
    torn: list[str]


def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str | None = None,
    start: Start = "earliest",
    end: int | None = None,
    limit: int | None = None,
    on_gap: OnGap = "raise",
    lossy: bool = False,
    append: bool = False,
    source_format: str | None = None,
    source_options: dict[str, Any] | None = None,
    before: Callable[[CopyPlan], object] | None = None,
    progress: Callable[[CopyProgress], object] | None = None,
    timeout: float = TIMEOUT,
    **options: Any,
) -> CopyReport:
    """Copy the present records of one log into another one, which is created if necessary; the copy is on disk when it returns.

    Sequence, timestamp, type, key and codec are kept if the target can store them. The same call resumes an interrupted copy, and copies
    newer records. Only one copy at a time fills a target, and no other program should append to it.

    source: a spool, a journal of any format, a queue (its entries stay there), or a directory of kvspool v1. source_format, source_options:
    options of `kvspool.open` for it, where they can't be detected. format: of the target: "spool", "queue", or one of a journal; by default
    the source's, for kvspool v1 "spool". options: those of `kvspool.create`, or `kvspool.queue.create`, for a new target. By default a
    spool gets room for all records.

    start, end, limit: the first record, the sequence to end before, and the maximum number of records from `start` on. on_gap: for lost
    records of the source: "raise" (GapError), or "yield" or "skip", which continue and report them; kvj leaves their sequences out in any
    case. lossy: continue although the target can't store some fields, and let a spool overwrite the oldest records of the copy. append: to
    a target that holds other records. before: called once before the first record is written. timeout: seconds for each lock.

    Raises TypeError for unknown options, NotKept, OtherRecords, TooLarge (naming the record), SpoolFull, QueueFull, GapError, LockTimeout
    (another copy fills the target), ValueError, the errors of opening and creating logs, or the system's OSError. Records copied before the
    error stay, and the same call continues there.
    """
    options = {name: value for name, value in options.items() if value is not None}
    refuse_unknown("copy", options, {*logs.all_options(), *queues.options(), *(copy.__kwdefaults__ or ())})
    origin_path, path = Path(os.path.abspath(source)), Path(os.path.abspath(target))
    _check(origin_path, path, format, end, limit, on_gap)
    with sources.open(origin_path, source_format, source_options or {}, timeout) as origin, locked(path) as notes:
        first = origin.begin(start)
        with _target(origin, path, format, first, notes, options, timeout) as filled:
            work = _Work(origin, filled, notes, on_gap, lossy)
            work.find_place(first, append, leaves_out=isinstance(start, int))
            return work.run(end, limit, before, progress)


def _check(source: Path, target: Path, format: str | None, end: int | None, limit: int | None, on_gap: str) -> None:
    known = ("spool", "queue", *FORMATS)
    if format is not None and format not in known:
        raise ValueError(f"a format is one of {', '.join(known)}, not {format!r}")
    for name, number in (("end", end), ("limit", limit)):
        if number is not None and number < 0:
            raise ValueError(f"{name} is 0 or more, not {number}")
    if on_gap not in ("raise", "yield", "skip"):
        raise ValueError(f'on_gap is "raise", "yield" or "skip", not {on_gap!r}')
    real, other = os.path.realpath(source), os.path.realpath(target)
    if real == other or f"{other}/".startswith(f"{real}/") or f"{real}/".startswith(f"{other}/"):
        raise ValueError(f"a log can't be copied into itself: {source} and {target}")
    disk.check_parent(target)


def _target(
    origin: Source, path: Path, format: str | None, first: int, notes: Notes, options: dict[str, Any], timeout: float
) -> CopyTarget:
    """Open the target, or create it; one that a killed process left incomplete is recreated."""
    wanted = format or ("spool" if origin.format == "v1" else origin.format)
    note = notes.load()
    if note is not None and not note.is_made:
        _discard(path, wanted, timeout)
        notes.clear()
    if targets.exists(path):
        found = targets.open(path, timeout)
        if format is not None and found.format != format:
            found.close()
            raise ValueError(f"{path} has the format {found.format}, not {format}")
        return found
    if note is not None and note.is_made and wanted == "queue" and note.source == origin.identity:
        raise OtherRecords(f"{path} was removed: its entries were taken out; remove {notes.directory} to copy all of them again")
    notes.store(Note(source=origin.identity, is_made=False))
    made = targets.create(path, wanted, first, _options(origin, wanted, options))
    notes.clear()
    return made


def _discard(path: Path, format: str, timeout: float) -> None:
    """Remove an incomplete target."""
    try:
        if targets.exists(path):
            with targets.open(path, timeout) as there:
                there.range()
    except (LogNotFound, NotALog):
        if format in FORMATS:
            journals.discard(path, format)
        elif path.is_file() and path.stat().st_size == 0:
            system.port.remove(path)  # a queue whose header was not written


def _options(origin: Source, format: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a new target: those given, else the source's, with room for all records."""
    if format == "queue":
        return given
    known = origin.options if format == origin.format else {name: value for name, value in origin.options.items() if name == "codec"}
    if format != "spool" and known.get("codec") == "keyed":
        known["codec"] = "msgpack"
    if format == "spool" and "capacity" not in {**known, **given}:
        needed = origin.most_bytes() + FRAME * len(origin.range())
        known = {**known, "capacity": max(LEAST_CAPACITY, needed + needed // 8)}
    return {**known, **given}


class _Work(Mover):
    """One run.

    sequence: of the source's next record; `at`: its sequence in a target with sequences; begun, since: the same for the first record that
    an earlier run, or this one, has copied.
    """

    target: CopyTarget

    def __init__(self, origin: Source, target: CopyTarget, notes: Notes, on_gap: OnGap, lossy: bool) -> None:
        super().__init__(target, origin.room, name=str(origin.path), on_gap=on_gap, is_lossy=lossy)
        self.origin = origin
        self._notes = notes
        self._edges: tuple[int, int] | None = None  # start and end of the copied records, in the source
        self.sequence = self.begun = self.at = self.since = 0
        self.is_continued = False

    # Resume.

    @property
    def _keeps_sequences(self) -> bool:
        return self.target.has_sequences and self.origin.has_sequences and self.at == self.sequence

    def find_place(self, first: int, append: bool, *, leaves_out: bool) -> None:
        """Find the next record of the source, and its sequence in the target. leaves_out: records before the sequence `first` aren't
        wanted.

        Raises OtherRecords, Corruption.
        """
        note, there = self._notes.load(), self.target.range()
        if note is not None and note.source == self.origin.identity:
            self._go_on(note, there)
        elif self._is_emptied(first, there) or (there and self._is_copy(there)):
            self.is_continued = True
            self.begun, self.since, self.sequence, self.at = max(first, there.start), there.start, there.stop, there.stop
        elif there and not append:
            raise OtherRecords(
                f"{self.target.path} holds records that aren't those of {self.origin.path}; append=True (--append) copies after them"
            )
        else:
            self.begun = self.sequence = first
            self.at = max(there.stop, first) if self.target.may_leave_out and not there else there.stop
            self.since = self.at
        if leaves_out and first > self.sequence:
            self.at += first - self.sequence if self.target.may_leave_out else 0
            self.sequence = first
        self.target.since, self.target.is_lossy = self.since, self.is_lossy
        self._remember()

    def _is_emptied(self, first: int, there: range) -> bool:
        """Return whether the target is empty and continues with a later record of the source."""
        has_sequences = self.target.has_sequences and self.origin.has_sequences
        return has_sequences and not there and first < there.stop <= self.origin.range().stop

    def _is_copy(self, there: range) -> bool:
        """Return whether the target ends with the source's record of the same sequence."""
        if not (self.target.has_sequences and self.origin.has_sequences):
            return False
        if there.stop - 1 < self.origin.range().start and self.on_gap != "raise":
            return True  # the source has lost the record to compare
        return self._is_same(there.stop - 1)

    def _is_same(self, sequence: int) -> bool:
        """Return whether the target's last record is the source's record with a sequence."""
        ours, theirs = self.target.last(), self.origin.one(sequence)
        return ours is not None and theirs is not None and _same(ours, theirs, self.target, self.origin.room)

    def _go_on(self, note: Note, there: range) -> None:
        """Continue after the records copied since a note. Raises OtherRecords, or Corruption for an invalid note."""
        if len(note.at) != (1 if self.target.has_sequences else 2) or min(note.first, note.sequence, note.since, *note.at) < 0:
            raise Corruption(f"{self._notes.directory} doesn't say how far the copy came; remove it and the target, and copy again")
        if isinstance(self.target, QueueTarget):
            copied = queues.entries_after(self.target.queue, (note.at[0], note.at[1]))
            done = len(copied)
            expected = self.origin.read(note.sequence, note.sequence + done) if done else iter(())
            is_sound = copied == [value for rows in expected if isinstance(rows, Rows) for value in rows.values]
        else:
            done = there.stop - note.at[0]
            is_lost = note.sequence + done - 1 < self.origin.range().start
            is_sound = done == 0 or done > 0 and (is_lost or self._is_same(note.sequence + done - 1))
        if not is_sound:
            raise OtherRecords(f"{self.target.path} has new records that aren't those of {self.origin.path}, so the copy can't continue")
        self.is_continued = True
        self.begun, self.since = note.first, note.since
        self.sequence, self.at = note.sequence + done, there.stop

    def _remember(self) -> None:
        """Store a note on disk if the target alone can't tell the next position."""
        if self._keeps_sequences:
            self._notes.clear()
            return
        self.target.sync()
        at = list(queues.end(self.target.queue)) if isinstance(self.target, QueueTarget) else [self.at]
        self._notes.store(Note(source=self.origin.identity, first=self.begun, sequence=self.sequence, at=at, since=self.since))

    # Copy.

    def run(
        self,
        end: int | None,
        limit: int | None,
        before: Callable[[CopyPlan], object] | None,
        progress: Callable[[CopyProgress], object] | None,
    ) -> CopyReport:
        """Copy the present records. Raises the errors of `copy`."""
        if end is not None:
            end = max(self.sequence, min(end, self.origin.range().stop))
        left = None if limit is None else max(0, limit - self._copied())
        if self.kinds and not self.is_lossy:
            self._look_ahead(end, left)
        if before is not None:
            before(self._plan())
        total = (self.origin.range().stop if end is None else end) - self.sequence if progress is not None else 0
        tell = None
        if progress is not None:
            tell = lambda: progress(CopyProgress(self.records, self.bytes, total if left is None else min(total, left)))  # noqa: E731
        self.move(limited(self.origin.read(self.sequence, end), left), tell)
        self.target.sync()
        return self._report()

    def _copied(self) -> int:
        """Return how many records earlier runs have copied."""
        if self.sequence <= self.begun:
            return 0
        return sum(len(item.values) for item in self.origin.read(self.begun, self.sequence) if isinstance(item, Rows))

    def _look_ahead(self, end: int | None, left: int | None) -> None:
        """Raise NotKept if a record of the copy has a field that the target can't store.

        Damage ends it: the copy ends there, too, with the records before it.
        """
        last = self.target.last_time
        with suppress(Corruption):
            for item in limited(self.origin.read(self.sequence, end), left):
                if isinstance(item, Rows):
                    self.refuse_loss(lost(item, self.kinds, self.target.room, last))
                    last = latest(item, last, self.target.room)

    def skip(self, gap: Gap) -> None:
        if self.target.may_leave_out:
            self.gaps.append(gap)
            self.at += gap.last + 1 - self.sequence
            self.sequence = gap.last + 1
            return
        super().skip(gap)
        self.sequence = gap.last + 1
        self._remember()

    def put(self, rows: Rows, at: int | None = None) -> None:
        super().put(rows, self.at)
        self._edges = (self.sequence if self._edges is None else self._edges[0], rows.end)
        self.sequence, self.at = rows.end, self.at + len(rows.values)
        if not self.target.has_sequences:
            self._remember()

    # Reports.

    def _plan(self) -> CopyPlan:
        origin, target = self.origin, self.target
        room = self.target.room
        return CopyPlan(
            source=str(origin.path),
            target=str(target.path),
            source_format=origin.format,
            format=target.format,
            first_sequence=self.sequence,
            target_sequence=self.at if target.has_sequences else None,
            keeps_sequences=self._keeps_sequences,
            may_lose=[kind for kind in self.kinds if kind != "timestamps" or not room.timestamps or room.is_ordered],
            is_continued=self.is_continued,
        )

    def _report(self) -> CopyReport:
        first, end = (None, None) if self._edges is None else self._edges
        has_sequences = self.target.has_sequences
        changed = [] if self._keeps_sequences or not self.origin.has_sequences else ["sequences"]
        return CopyReport(
            source=str(self.origin.path),
            target=str(self.target.path),
            source_format=self.origin.format,
            format=self.target.format,
            records=self.records,
            bytes=self.bytes,
            gaps=self.gaps,
            not_kept=[kind for kind in dict.fromkeys([*self.kinds, *self.lost]) if kind in self.lost] + changed,
            first_sequence=first,
            last_sequence=None if end is None else end - 1,
            target_first_sequence=self.first if has_sequences else None,
            target_last_sequence=self.last if has_sequences else None,
            is_continued=self.is_continued,
            torn=self.origin.torn,
        )


def _same(ours: Rows, theirs: Rows, target: CopyTarget, room: Room) -> bool:
    """Return whether the target's record is a copy of the source's record, as far as it can store it."""
    kept = target.room
    columns: list[tuple[object, object]] = [(ours.values, theirs.values)]
    if kept.keys and room.keys:
        columns.append((_keys(ours, kept), _keys(theirs, kept)))
    if kept.types:
        columns.append((ours.types, theirs.types))
    if kept.timestamps and room.timestamps and not kept.is_ordered:
        columns.append((ours.timestamps, list(map(max, ours.timestamps, theirs.timestamps))))  # perhaps raised
    if kept.codecs:
        columns.append((_codecs(ours), _codecs(theirs)))
    return all(one == other for one, other in columns)


def _keys(rows: Rows, room: Room) -> list[bytes | None]:
    return rows.keys if room.empty_keys else [key or None for key in rows.keys]


def _codecs(rows: Rows) -> bytes:
    return rows.codecs.replace(bytes([Codec.KEYED]), bytes([Codec.MSGPACK]))
