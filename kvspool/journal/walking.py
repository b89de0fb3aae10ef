"""Passing over the frames of a segment, in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Callable

from kvspool.journal.format import DAMAGED, JUMPED, SHORT, WHOLE, Format, Scan
from kvspool.journal.segment import Segment
from kvspool.record import NO_TIME

CHUNK = 1 << 20  # bytes read at once


def walk(
    format: Format, segment: Segment, begin: int, sequence: int, end: int, until: int | None = None, timestamp: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scan:  # fmt: skip
    """Pass over the frames of a segment from byte `begin` up to byte `end`; see `Format.pass_over`. `size` of the result is the byte where
    it stopped.
    """
    bounds = {name: bound for name, bound in (("until", until), ("timestamp", timestamp)) if bound is not None}
    position, size, latest = begin, CHUNK, NO_TIME
    while True:
        data = segment.read(position, min(size, end - position))
        found = format.pass_over(data, sequence, **bounds)
        found = found._replace(latest=(latest := max(latest, found.latest)))
        position, sequence = position + found.size, found.sequence
        if progress is not None:
            progress(position)
        is_last = position - found.size + len(data) >= end or not data
        if found.stop == SHORT and found.need > end - position:
            return found._replace(size=position)
        if found.stop in (DAMAGED, JUMPED) or is_last or (found.stop == WHOLE and found.size < len(data)):
            return found._replace(size=position)
        if found.stop == SHORT and found.size == 0:
            size = max(2 * size, found.need)  # one frame, larger than the bytes read
        else:
            size = CHUNK


def last_whole(format: Format, segment: Segment, begin: int, sequence: int, size: int) -> Scan:
    """Return the end of the last whole frame of a segment, and the next sequence. The frame of `sequence` begins at `begin`."""
    found = format.end_in(segment, begin, size)
    return walk(format, segment, begin, sequence, size) if found is None else Scan(*found, WHOLE)
