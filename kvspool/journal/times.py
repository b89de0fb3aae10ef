"""Times of a journal: that of one record, for statistics and trims, from the head of its frame; and the latest one, from whole segments."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvspool.errors import Corruption, MissingExtra, TimeUnknown
from kvspool.journal.damage import find_after
from kvspool.journal.walking import walk
from kvspool.record import NO_TIME

if TYPE_CHECKING:
    from kvspool.journal.format import Format
    from kvspool.journal.segments import Segment, Segments

CHECKED = 1 << 12  # bytes; the checksum of a larger frame is not compared, since that would read the whole frame


def time_at(format: Format, segment: Segment, position: int, sequence: int, *, is_checked: bool = False) -> int | None:
    """Return the timestamp of the frame that begins at a byte of a segment, or None if the frame with this sequence is not whole there.

    In a format that may leave sequences out, a later sequence counts as well. Reads at most `CHECKED` bytes, and in an archive the first
    piece of a block. is_checked: None also for a frame that has a checksum and is too large to compare it.
    """
    data = segment.glance(position, CHECKED)
    head = format.head(data)
    if head is None or head.sequence < sequence or head.size > segment.size() - position:
        return None
    if head.sequence > sequence and not format.may_leave_out:
        return None
    if head.size <= len(data):
        times: list[Any] = []
        format.scan(data, head.sequence, 1, lambda _, timestamp, *__: timestamp, times)
        return times[0] if times else None
    if is_checked and format.has_checksums:
        return None
    if format.ends_with_size and format.size_of_last(segment.read(position + head.size - 4, 4)) != head.size:
        return None
    return head.timestamp


def latest_time(segments: Segments) -> int:
    """Return the latest timestamp of the last segment that has one, NO_TIME if none has.

    A segment that is damaged, or needs a missing package, counts as one without. Raises TimeUnknown for one that the system can't read: its
    records exist, and may be later than those of earlier segments.
    """
    if not segments.format.has_timestamps:
        return NO_TIME
    try:
        for base in reversed(segments.bases()):
            try:
                segment = segments.get(base)
                latest = NO_TIME if segment is None else _latest_in(segments, segment)
            except (Corruption, MissingExtra):
                continue
            except OSError as error:
                raise TimeUnknown(segments.path_of(base), error) from error
            if latest != NO_TIME:
                return latest
        return NO_TIME
    finally:
        segments.close()


def _latest_in(segments: Segments, segment: Segment) -> int:
    """Return the latest timestamp of the sound records of a segment, after damage too; NO_TIME if none has one."""
    format, position, sequence, size, latest = segments.format, segments.format.header_bytes, segment.base, segment.size(), NO_TIME
    with suppress(Corruption):  # of the header: the frames may be sound
        position = segments.begin_of(segment) or position
    while position < size:
        found = walk(format, segment, position, sequence, size)
        latest = max(latest, found.latest)
        after = find_after(segments, segment, found, size, None) if found.size < size else None
        if after is None:
            break
        position, sequence = after
    return latest
