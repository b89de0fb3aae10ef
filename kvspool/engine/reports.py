"""The results of maintenance of a log: of a recovery, a repair, a resize, an archive run and an export."""

from __future__ import annotations

import msgspec

from kvspool.engine.damage import Damage, VerifyReport
from kvspool.gap import Gap


class RecoveryReport(msgspec.Struct, frozen=True):
    """The result of a recovery.

    case: the name of the decision, see `cases`. recovered: ns since the Unix epoch. checkpoint: "A", "B" or "none". head, tail: positions
    of the recovered log; records, first_sequence, last_sequence: the kept ones (last < first: none); next_sequence: of the next record.
    damaged_records: missing sequences; damaged: the places, the first 1000 of them. cut_records, cut_bytes: records of the control block
    after the end, which were not found. erased_records: leftovers of earlier laps.
    """

    path: str
    case: str
    recovered: int
    checkpoint: str
    head: int
    tail: int
    records: int
    first_sequence: int
    last_sequence: int
    next_sequence: int
    damaged_records: int
    damaged: list[Damage]
    cut_records: int
    cut_bytes: int
    erased_records: int

    def __str__(self) -> str:
        words = f"{self.path}: recovered ({self.case}): {self.records} records kept"
        if self.cut_records or self.cut_bytes:
            words += f", {self.cut_records} records ({self.cut_bytes} bytes) that were not synced are lost"
        if self.damaged_records:
            words += f", {self.damaged_records} records are damaged"
        return f"{words}; the log ends at position {self.tail} and continues with sequence {self.next_sequence}"


class Removed(msgspec.Struct, frozen=True):
    """Bytes removed from a segment. sequence: of the record that should begin there; kept: path of the file that contains the bytes."""

    segment: str
    position: int
    sequence: int
    size: int
    kept: str


class RepairReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a repair.

    sync_error: errno of the failed flush, 0 if none had failed. verify: the state afterwards.

    Of a spool: recovery: the report, if the control block had to be recreated.

    Of a journal: removed: the removed bytes. begun: the first sequences of segments created for frames after damage, or for records after
    lost numbers. headers: segments whose header was rewritten. written_anew: segments copied because of the flush.
    """

    path: str
    sync_error: int
    recovery: RecoveryReport | None = None
    removed: list[Removed] = []
    begun: list[int] = []
    headers: list[int] = []
    written_anew: int = 0
    verify: VerifyReport


class Resized(msgspec.Struct, frozen=True):
    """The result of a resize.

    capacity, before: bytes of the ring, now and before. records: kept. dropped: records that had no room.
    """

    path: str
    before: int
    capacity: int
    records: int
    dropped: int


class Converted(msgspec.Struct, frozen=True):
    """One segment that changed its form.

    base: sequence of its first record; before, after: bytes of its file; in a dry run `after` is None.
    """

    base: int
    before: int
    after: int | None


class ArchiveReport(msgspec.Struct, frozen=True):
    """The segments that were archived, or restored with `undo`; with `dry_run`, those that would be. bytes_after: None in a dry run."""

    path: str
    dry_run: bool
    undo: bool
    segments: list[Converted]

    @property
    def bytes_before(self) -> int:
        """Return the previous size of the segments in bytes."""
        return sum(one.before for one in self.segments)

    @property
    def bytes_after(self) -> int | None:
        """Return their present size in bytes; None if nothing was done."""
        return None if self.dry_run else sum(one.after or 0 for one in self.segments)


class Exported(msgspec.Struct, frozen=True):
    """The result of an export. lost: records that could not be read, not counting numbers left out after a restart; gaps: all of them."""

    records: int
    lost: int
    gaps: list[Gap]
