"""The time of one record, for figures and searches by time: read from the head of its frame, however large the record is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvspool.journal.format import Format
    from kvspool.journal.segments import Segment

CHECKED = 1 << 12  # bytes; the checksum of a larger frame is not compared, since that takes the whole frame


def time_at(format: Format, segment: Segment, position: int, sequence: int) -> int | None:
    """Return the timestamp of the frame that begins at a byte of a segment, or None if the frame with this sequence is not whole there.

    In a format that may leave sequences out, a later sequence counts as well. Reads at most `CHECKED` bytes, and in an archive the first
    piece of a block.
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
    if format.ends_with_size and format.size_of_last(segment.read(position + head.size - 4, 4)) != head.size:
        return None
    return head.timestamp
