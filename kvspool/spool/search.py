"""Find a position in a spool: by sequence or by time, in O(log n) through the sparse index.

The index is a hint. Each step checks the data it used: the entry is between head and tail, and the frame there is sound and has the
sequence of the entry. From the entry before the target the chain of frames is followed, at most for one block.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from kvspool.errors import OutOfRange
from kvspool.kernel import frames_py as frames
from kvspool.options import Start
from kvspool.spool import format

if TYPE_CHECKING:
    from kvspool.kernel.frames import FrameReader

LAST_TIME = (1 << 63) - 1  # ns; a timestamp can't be later
NEAR = 8192  # records up to which following the frames is faster than a search
Place = tuple[int, int]  # a position and the sequence expected there


def find(reader: FrameReader, start: Start) -> Place:
    """Return the place of a start: "earliest", "latest", a sequence, or an aware datetime.

    An overwritten sequence gives the oldest place, with that sequence expected: the reader then reports the Gap. Raises OutOfRange for a
    sequence after the next one, ValueError for anything else.
    """
    if start == "latest":
        return reader.mark()[:2]
    if start == "earliest":
        return _earliest(reader)
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise ValueError(f"a time without a zone is ambiguous: {start}; pass an aware datetime")
        return _at_or_after(reader, 0, min(max(round(start.timestamp() * 1e6) * 1000, 0), LAST_TIME))
    if isinstance(start, int) and not isinstance(start, bool) and start >= 0:
        return _at_sequence(reader, start)
    raise ValueError(f'start is a sequence, "earliest", "latest" or an aware datetime, not {start!r}')


def onward(reader: FrameReader, known: Place, sequence: int) -> Place:
    """Return the place of a sequence, from a known place before it, or at any other one.

    If the record was overwritten since, it is the known place with that sequence expected: the reader then reports the Gap.
    """
    position, first = known
    if first < sequence <= first + NEAR:
        found = reader.walk(position, reader.tail(), sequence, 0)
        if reader.passed == sequence and reader.head() <= position:
            return found, sequence
    if first < sequence < _earliest(reader)[1]:
        return position, sequence
    return find(reader, sequence)


def count(reader: FrameReader, sequence: int, end: Place) -> int:
    """Return the number of records from `sequence` up to a place, without numbers left out after a crash of the machine."""
    tail, next_sequence = end
    total = 0
    while sequence // format.STRIDE < next_sequence // format.STRIDE:
        boundary = (sequence // format.STRIDE + 1) * format.STRIDE
        total += max(0, _last_before(reader, boundary) + 1 - sequence)
        found = reader.sequence_at(_at_or_after(reader, boundary, 0)[0], tail)
        sequence = (next_sequence if not boundary <= found < next_sequence else found) // format.STRIDE * format.STRIDE
    return total + max(0, next_sequence - sequence)


def _last_before(reader: FrameReader, boundary: int) -> int:
    """Return the last sequence before a boundary; -1 if there is none."""
    tail, head = reader.mark()[0], reader.head()
    position = _entry_before(reader, head, tail, boundary, 0)
    low, high = reader.sequence_at(position, tail), boundary
    if not low < boundary:
        return -1
    while low + 1 < high:
        middle = (low + high) // 2
        found = reader.sequence_at(reader.walk(position, tail, middle, 0), tail)
        if low < found < boundary:
            low = found
        else:
            high = middle
    return low


def _earliest(reader: FrameReader) -> Place:
    """Return the place of the oldest frame, as of one moment."""
    while True:
        head = reader.head()
        tail, next_sequence, _ = reader.mark()
        sequence = reader.sequence_at(head, tail)
        if reader.head() != head:
            continue
        if sequence != frames.NOTHING:
            return head, sequence
        if head >= tail:
            return tail, next_sequence
        # The oldest frame is damaged. The control block has its sequence, or the planned one of a writer that crashed just there. Frames
        # with smaller ones don't count: they may be leftovers of an earlier lap in the damage of a machine crash.
        return head, min(reader.word(frames.MIN_SEQ), next_sequence)


def _at_sequence(reader: FrameReader, sequence: int) -> Place:
    tail, next_sequence, _ = reader.mark()
    if sequence > next_sequence:
        raise OutOfRange(f"sequence {sequence} is not written yet; the next one is {next_sequence}")
    if sequence == next_sequence:
        return tail, next_sequence
    return _at_or_after(reader, sequence, 0)[0], sequence


def _at_or_after(reader: FrameReader, sequence: int, timestamp: int) -> Place:
    """Return the place of the first frame with at least this sequence and at least this timestamp."""
    while True:
        tail, next_sequence, _ = reader.mark()
        head = reader.head()
        position = reader.walk(_entry_before(reader, head, tail, sequence, timestamp), tail, sequence, timestamp)
        expected = reader.passed
        found = reader.sequence_at(position, tail)
        if reader.head() <= position:
            break
        # The frames of the search were overwritten. The one that it looks for may still be there.
    if position >= tail:
        return tail, next_sequence
    if expected <= found < frames.NOTHING:
        return position, found
    # Damage ended the search early; the reader continues from there and reports exactly the skipped records, from `expected` on.
    return (position, expected or sequence) if expected or sequence else _earliest(reader)


def _entry_before(reader: FrameReader, head: int, tail: int, sequence: int, timestamp: int) -> int:
    """Return the position of the nearest indexed frame before the target; `head` if there is none."""
    block_bytes = 1 << frames.BLOCK
    first = _next_block(head, reader.capacity, block_bytes)
    low, high = 0, max(0, -(-(tail - first) // block_bytes))
    best = head
    while low < high:
        middle = (low + high) // 2
        position, found, when = _sound_entry(reader, first + middle * block_bytes, head, tail)
        if position == frames.NOTHING:
            # No frame begins in that block, or it was overwritten: try the previous one.
            high = middle
        elif found < sequence or (timestamp and when < timestamp):
            best, low = position, middle + 1
        else:
            high = middle
    return best


def _next_block(position: int, capacity: int, block_bytes: int) -> int:
    """Return a position in the block after that of `position`, counted from the ring's start."""
    offset = position % capacity
    return position - offset + (offset // block_bytes + 1) * block_bytes


def _sound_entry(reader: FrameReader, position: int, head: int, tail: int) -> tuple[int, int, int]:
    entry = reader.entry(position % reader.capacity >> frames.BLOCK)
    if entry[0] == frames.NOTHING or not head <= entry[0] < tail:
        return frames.NOTHING, 0, 0
    return entry if reader.sequence_at(entry[0], tail) == entry[1] else (frames.NOTHING, 0, 0)


def held(reader: FrameReader, sequence: int) -> int:
    """Return how many bytes of the ring are taken by the records from a sequence on."""
    position, _ = find(reader, sequence)
    return int(reader.mark()[0]) - position


def records_from(reader: FrameReader, sequence: int) -> int:
    """Return the number of records from a sequence on, without numbers left out after a crash of the machine."""
    _, first = find(reader, "earliest")
    return count(reader, max(sequence, first), reader.mark()[:2])
