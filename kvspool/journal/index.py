"""A sparse index of a segment: the position of one frame in each stride, so that a seek reads only one stride.

It is a hint and never trusted blindly: from the entry before the target the frames are followed to the next entry, and if they don't lead
exactly there, the index is rebuilt. It is in kvspool's own file next to the segments; without write permission it is only in memory.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Annotated, NamedTuple

from kvspool import system
from kvspool.engine.checksums import checksum
from kvspool.engine.layout import Layout
from kvspool.journal.format import Format
from kvspool.journal.segments import Segment
from kvspool.journal.walking import walk
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

STRIDE = 1 << 20  # bytes of a segment between two entries, plus at most one frame
WORTHWHILE = 16  # new entries after which the file is written
LARGEST = 1 << 26  # largest file that is read, in bytes
MAGIC = b"kvINDEX1"


class SegmentIndexHeader(NamedTuple):
    """The beginning of an index file; the entries follow."""

    magic: Annotated[bytes, "8s", "kvINDEX1"]
    base: Annotated[int, "Q", "first sequence of the segment"]
    checksum: Annotated[int, "I", "CRC32C of the entries"]
    entries: Annotated[int, "I", "how many there are"]


class SegmentIndexEntry(NamedTuple):
    """One frame of the segment."""

    position: Annotated[int, "Q", "byte where it begins"]
    sequence: Annotated[int, "Q", "its record's"]
    timestamp: Annotated[int, "q", "its record's, ns since the Unix epoch; the smallest number: none, or not known"]


HEADER = Layout(SegmentIndexHeader)
ENTRY = Layout(SegmentIndexEntry)


class SegmentIndex:
    """The index of one segment, as far as it was read."""

    def __init__(self, format: Format, base: int, path: Path | None) -> None:
        """Load the file at `path`, if it is an index of this segment; `None`: keep the index in memory."""
        self._format = format
        self._base = base
        self._path = path
        self.entries: list[SegmentIndexEntry] = [] if path is None else load(path, base)
        self._stored = len(self.entries)

    def start(self, segment: Segment, begin: int, until: int | None, timestamp: int | None, end: int) -> tuple[int, int]:
        """Return a byte and its sequence from which the sequence `until`, or the end of a time, is reached within a stride or two.

        begin, end: bytes of the segment between which its frames are.
        """
        for _ in range(2):
            self._extend(segment, begin, end)
            at = self._before(until, timestamp)
            if at < 0:
                return begin, self._base
            if self._leads_on(segment, at, end):
                return self.entries[at].position, self.entries[at].sequence
            self.entries = []  # it is another segment's, or damaged: once more, without it
            self._stored = 0
        return begin, self._base

    def _before(self, until: int | None, timestamp: int | None) -> int:
        """Return the number of the last entry that isn't after the target; -1 if there is none."""
        if until is not None:
            return bisect_right(self.entries, until, key=lambda entry: entry.sequence) - 1
        assert timestamp is not None
        # The latest one so far: a record may have none, and other programs, and earlier versions, may have written decreasing ones.
        return bisect_right(list(accumulate((entry.timestamp for entry in self.entries), max)), timestamp) - 1

    def _leads_on(self, segment: Segment, at: int, end: int) -> bool:
        """Return whether the frames from one entry on lead exactly to the next one; from the last one, whether there is a frame."""
        entry = self.entries[at]
        if at + 1 == len(self.entries):
            return entry.position < end and _frame_at(self._format, segment, entry.position, entry.sequence) is not None
        after = self.entries[at + 1]
        found = walk(self._format, segment, entry.position, entry.sequence, after.position)
        return (found.size, found.sequence) == (after.position, after.sequence) and after.position <= end

    def _extend(self, segment: Segment, begin: int, end: int) -> None:
        """Read the frames that no entry covers yet."""
        position, sequence = self.entries[-1][:2] if self.entries else (begin, self._base)
        while end - position > STRIDE:
            found = walk(self._format, segment, position, sequence, position + STRIDE)
            position, sequence = found.size, found.sequence
            time = _frame_at(self._format, segment, position, sequence)
            if time is None or (self.entries and position <= self.entries[-1].position):
                break  # damage, a frame larger than a stride, or the end: later frames are passed one by one
            self.entries.append(SegmentIndexEntry(position, sequence, time))
        if self._path is not None and len(self.entries) - self._stored >= WORTHWHILE:
            self._stored = len(self.entries)
            with suppress(OSError):  # a hint that can't be stored
                store(self._path, self._base, self.entries)


def _frame_at(format: Format, segment: Segment, position: int, sequence: int) -> int | None:
    """Return the timestamp of the frame that begins at a byte; None if there is none with this sequence."""
    times: list[int] = []
    for size in (STRIDE // 16, segment.size() - position):
        found = format.scan(segment.read(position, max(0, size)), sequence, 1, _time, times)
        if times or not found.need:
            break
    return times[0] if times else None


def _time(sequence: int, timestamp: int, *_: object) -> int:
    return timestamp


def load(path: Path, base: int) -> list[SegmentIndexEntry]:
    """Return the entries in a file; none if it isn't an index of the segment at `base`, or can't be read."""
    try:
        data = disk.read(path, LARGEST)
    except OSError:
        return []
    if len(data) < HEADER.size:
        return []
    header, body = HEADER.unpack(data), data[HEADER.size :]
    if (header.magic, header.base) != (MAGIC, base) or len(body) != header.entries * ENTRY.size or checksum(body) != header.checksum:
        return []
    entries = [ENTRY.unpack(body, at) for at in range(0, len(body), ENTRY.size)]
    in_order = all(
        one.position < other.position and one.sequence < other.sequence for one, other in zip(entries, entries[1:], strict=False)
    )
    return entries if in_order and (not entries or entries[0].sequence > base) else []


def store(path: Path, base: int, entries: list[SegmentIndexEntry]) -> None:
    """Write an index file, whole or not at all; it isn't flushed, since it can be rebuilt."""
    body = b"".join(ENTRY.pack(entry) for entry in entries)
    with suppress(FileExistsError):
        system.port.make_directory(path.parent)
    temporary = path.with_name(f"{path.name}.{system.port.process_id()}.tmp")
    with Descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) as fd:
        system.port.write(fd, HEADER.pack(SegmentIndexHeader(MAGIC, base, checksum(body), len(entries))) + body, 0)
    system.port.rename(temporary, path)
