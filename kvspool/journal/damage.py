"""Find the sound and damaged parts of a segment, and where it could continue after damage. For `verify` and `repair`; nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvspool.engine.damage import Damage
from kvspool.errors import Corruption
from kvspool.journal.format import JUMPED, LAST_SEQUENCE, SHORT, Scan
from kvspool.journal.segments import Segment, Segments
from kvspool.journal.walking import walk

CHUNK = 1 << 16  # bytes read at once after damage
FARTHEST = 1 << 26  # bytes after damage that are searched for a sound frame
Progress = Callable[[int], None]


class SegmentDamage(Damage, frozen=True):
    """A damaged place in a segment; see `Damage`. segment: name of the file."""

    segment: str = ""

    @property
    def where(self) -> str:
        return f"{super().where} of {self.segment}"


class Run(NamedTuple):
    """Consecutive sound frames: from byte `begin` to `end`, the sequences from `first` up to `next`."""

    begin: int
    end: int
    first: int
    next: int


class Examined(NamedTuple):
    """The parts of a segment.

    runs: its sound parts. damaged: the places between them, and after the last one. position, sequence: after the last sound frame, and of
    the next record there. torn: bytes at the end that may be a part of a frame.
    """

    runs: list[Run]
    damaged: list[SegmentDamage]
    position: int
    sequence: int
    torn: int

    @property
    def records(self) -> int:
        """Return how many sound records there are."""
        return sum(run.next - run.first for run in self.runs)

    @property
    def bytes(self) -> int:
        """Return the size of their frames in bytes."""
        return sum(run.end - run.begin for run in self.runs)


def examine(segments: Segments, segment: Segment, size: int, until: int | None, progress: Progress | None = None) -> Examined:
    """Check every frame of a segment's first `size` bytes. until: first sequence of the next segment; None for the last one."""
    name = segment.path.name
    try:
        position = segments.begin_of(segment)
    except Corruption:
        return Examined([], [SegmentDamage(0, size, segment.base, (until or segment.base) - 1, segment=name)], 0, segment.base, 0)
    if segments.format.header_bytes and not position:  # the header is incomplete
        lost = [] if until is None else [SegmentDamage(0, size, segment.base, until - 1, segment=name)]
        return Examined([], lost, position, segment.base, size if until is None else 0)
    sequence = segment.base
    runs: list[Run] = []
    damaged: list[SegmentDamage] = []
    while True:
        found = walk(segments.format, segment, position, sequence, size, progress=progress)
        if found.size > position:
            runs.append(Run(position, found.size, sequence, found.sequence))
        position, sequence = found.size, found.sequence
        if position >= size:
            break
        after = find_after(segments, segment, found, size, until)
        if after is None:
            if found.stop == SHORT and until is None:
                return Examined(runs, damaged, position, sequence, size - position)
            damaged.append(SegmentDamage(position, size - position, sequence, (until or sequence) - 1, segment=name))
            return Examined(runs, damaged, position, sequence, 0)
        damaged.append(SegmentDamage(position, after[0] - position, sequence, after[1] - 1, segment=name))
        position, sequence = after
    if until is not None and sequence < until:
        damaged.append(SegmentDamage(position, 0, sequence, until - 1, segment=name))
    return Examined(runs, damaged, position, sequence, 0)


def find_after(segments: Segments, segment: Segment, found: Scan, size: int, until: int | None) -> tuple[int, int] | None:
    """Return where a segment continues after bytes that are no frame, or not the next one, and with which sequence; None if that can't be
    known.

    found: the scan that stopped there, `size` being the byte.
    """
    format = segments.format
    known = format.after_damage(found.size, found.sequence)
    if known is not None:
        return known if known[0] <= size else None
    last = LAST_SEQUENCE if until is None else until
    if found.stop == JUMPED:
        data = segment.read(found.size, min(size - found.size, CHUNK))
        need = format.pass_over(data, found.need, found.need + 1).need if found.need < LAST_SEQUENCE else 0
        if len(data) < need + CHUNK <= size - found.size:
            data = segment.read(found.size, need + CHUNK)
        jump = format.after_jump(data, found.sequence, found.need)
        if jump is not None and jump[1] <= last and jump[1] - found.sequence <= size:
            return found.size + jump[0], jump[1]
    length = CHUNK
    while True:
        data = segment.read(found.size, min(length, size - found.size))
        guess = format.guess(data, found.sequence, last)
        if guess is not None:
            return found.size + guess[0], guess[1]
        if length >= min(FARTHEST, size - found.size):
            return None
        length *= 4
