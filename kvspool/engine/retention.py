"""The retention of a journal: rules for the removal of its oldest segments.

A segment is removed if one of the *limits* says so (`max_bytes`, `max_age`, `by_consumers`, or `before` of a manual trim), nothing keeps
it, and no older one stays. Two things keep it: the *floor*, always; and a durable reader that has yet to read a record of it, unless
`force` is set. A reader overtaken because of `force` gets an exact Gap, and the report of the trim names it.
"""

from __future__ import annotations

import msgspec

from kvspool.engine import sizes


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The records to keep whatever the limits say.

    sequence: every record from it on. bytes, records, segments: at least so many of the newest. All given ones hold.
    """

    sequence: int | None = None
    bytes: int | None = None
    records: int | None = None
    segments: int | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"a floor's {name} is not negative: {getattr(self, name)}")

    def forbids(self, sequence: int, segments: int, records: int, size: int) -> str:
        """Return why a journal may not begin at `sequence` with this content, in words; nothing if it may."""
        if self.sequence is not None and sequence > self.sequence:
            return f"the floor keeps all from sequence {self.sequence} on"
        if self.segments is not None and segments < self.segments:
            return f"the floor keeps {self.segments:,} segments"
        if self.records is not None and records < self.records:
            return f"the floor keeps {self.records:,} records"
        if self.bytes is not None and size < self.bytes:
            return f"the floor keeps {sizes.show(self.bytes)}"
        return ""


class Retention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Rules for the removal; see the module.

    max_bytes: of all segments together. max_age: seconds since the newest record of a segment was appended; if the end of the segment
    doesn't give that, since the last write to its file. by_record: `max_age` counts the timestamps of records in any case: a segment counts
    as old as the first record after it. by_consumers: remove records that every durable reader has committed; none without a reader.
    floor: the records to keep in any case; a number is a sequence. force: `max_bytes`, `max_age` and a manual trim don't wait for durable
    readers.
    """

    max_bytes: int | None = None
    max_age: float | None = None
    by_record: bool = False
    by_consumers: bool = False
    floor: Floor | int | None = None
    force: bool = False

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes < 0:
            raise ValueError(f"max_bytes is a number of bytes, not {self.max_bytes}")
        if self.max_age is not None and not 0 <= self.max_age < float("inf"):
            raise ValueError(f"max_age is a number of seconds, not {self.max_age}")
        if self.by_record and self.max_age is None:
            raise ValueError("by_record says how max_age counts: give max_age, too")
        if isinstance(self.floor, int) and self.floor < 0:
            raise ValueError(f"a floor is a sequence or a Floor, not {self.floor}")

    @property
    def has_limit(self) -> bool:
        """Return whether any rule could remove a segment."""
        return self.max_bytes is not None or self.max_age is not None or self.by_consumers

    def floors(self) -> Floor:
        """Return the floor as one."""
        return Floor(sequence=self.floor) if isinstance(self.floor, int) else self.floor or Floor()


class PlannedSegment(msgspec.Struct, frozen=True):
    """One segment, and its fate.

    base: sequence of its first record. newest: ns since the Unix epoch of its newest record, or of the last write to its file; age: seconds
    since then. why: why it is removed or stays. held_by: durable readers that have yet to read a record of it.
    """

    base: int
    records: int
    bytes: int
    newest: int
    age: float
    goes: bool
    why: str
    held_by: list[str]


class OvertakenReader(msgspec.Struct, frozen=True):
    """A durable reader whose next records are removed: it gets a Gap from `first` to `last`."""

    name: str
    first: int
    last: int


class TrimPlan(msgspec.Struct, frozen=True):
    """The plan of a trim, the oldest segment first."""

    path: str
    segments: list[PlannedSegment]
    left_behind: list[OvertakenReader]

    @property
    def going(self) -> list[PlannedSegment]:
        """Return the segments to remove."""
        return [one for one in self.segments if one.goes]


class TrimReport(msgspec.Struct, frozen=True):
    """The result of a trim, or its preview with `dry_run`: segments, records and bytes removed; the first remaining sequence; the initial
    plan; and the durable readers that lost records.
    """

    path: str
    dry_run: bool
    removed_segments: int
    removed_records: int
    removed_bytes: int
    first_sequence: int
    left_behind: list[OvertakenReader]
    plan: TrimPlan
