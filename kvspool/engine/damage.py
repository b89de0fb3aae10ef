"""Damage of a log: where it is, and the report of a check of all records."""

from __future__ import annotations

import msgspec

MOST_PLACES = 1000  # damaged places in a report; it counts all of them


class Damage(msgspec.Struct, frozen=True):
    """A place with bytes that are no frames, or not the expected ones.

    position, size: of the place in the ring. first, last: the missing sequences; last < first if none is.
    """

    position: int
    size: int
    first: int
    last: int

    @property
    def count(self) -> int:
        """Return how many sequences are missing."""
        return self.last - self.first + 1

    @property
    def where(self) -> str:
        """Describe the place in words."""
        return f"position {self.position}"


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking every record that a log had at the start.

    records, bytes: sound records, and the size of their keys and values; in a journal, of their frames. damaged_records: sequences that are
    missing or whose bytes are wrong; damaged: the places, the first 1000 of them. problems: the faults of headers, names, settings, the key
    table, the lock file, durable readers and the list of producers. sync_error: errno of the first failed flush, 0 if there was none.

    Of a spool: left_out: sequences without a record since a restart of the machine. overrun: sequences that writers overwrote meanwhile,
    which is no fault.

    Of a journal: segments: files. trimmed: records of segments removed meanwhile, which is no fault. torn_bytes: bytes of a dead writer
    after the last record; the next append cuts them. foreign: unknown names next to the segments.
    """

    path: str
    format: str
    segments: int = 0
    records: int
    bytes: int
    first_sequence: int
    next_sequence: int
    damaged_records: int
    damaged: list[Damage]
    left_out: int = 0
    overrun: int = 0
    trimmed: int = 0
    torn_bytes: int = 0
    foreign: list[str] = []
    problems: list[str]
    sync_error: int

    @property
    def is_sound(self) -> bool:
        """Return whether nothing is damaged."""
        return not self.damaged and not self.problems
