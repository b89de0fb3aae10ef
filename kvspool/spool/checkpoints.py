"""Checkpoints: what is on disk in full, for the recovery after a crash of the machine. Two of them; a new one overwrites the older.

**Exactness.** A checkpoint says that the frames from `head` to `tail` are on disk, the sequences `min_seq` up to `next_seq`. A sequence
is written at one position only. So a frame found later that has one of these sequences stands where it belongs, one with a smaller
sequence is left over from an earlier lap, and one with a larger sequence lies behind `tail`. This holds only if `min_seq` is not smaller
than the sequence of the frame at `head`: `state` sees to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvspool import _frames_py as frames
from kvspool.spool import format

if TYPE_CHECKING:
    from kvspool._frames_py import FrameReader


class State(NamedTuple):
    """What a checkpoint says of the log."""

    head: int
    min_seq: int
    tail: int
    next_seq: int
    timestamp: int


EMPTY = format.Checkpoint(0, 0, 0, 0, 0, 0, b"", 0, 0)  # what holds for a log without a checkpoint


def newest(control: memoryview, header: format.Header) -> tuple[int | None, format.Checkpoint]:
    """Return which of the two checkpoints is the newest sound one, and the checkpoint; None and EMPTY if neither is."""
    which, best = None, EMPTY
    for number, at in enumerate(format.CHECKPOINTS_AT):
        raw = bytes(control[at : at + format.CHECKPOINT.size])
        found = format.CHECKPOINT.unpack(raw)
        if found.generation <= best.generation or found.crc != format.checksum(header.log_id, raw[:-4]):
            continue
        if found.head & 7 == found.tail & 7 == 0 and found.head <= found.tail <= found.head + header.capacity:
            which, best = number, found
    return which, best


def state(reader: FrameReader) -> State:
    """Return what a checkpoint may say once everything up to the tail is flushed, while writers go on."""
    while True:
        tail, next_sequence, timestamp = reader.mark()
        head = reader.head()
        least = reader.word(frames.MIN_SEQ)
        found = reader.sequence_at(head, tail) if head < tail else next_sequence
        if reader.head() != head or head > tail:
            continue  # overwritten meanwhile
        # Where the oldest frame is damaged, `min_seq` bounds those behind it: nothing of an earlier lap has such a sequence.
        return State(head, min(least, next_sequence) if found == frames.NOTHING else found, tail, next_sequence, timestamp)


def successor(control: memoryview, header: format.Header, state: State, boot_id: bytes) -> tuple[int, bytes]:
    """Return where a new checkpoint goes, over the older one, and its bytes."""
    which, before = newest(control, header)
    body = format.CHECKPOINT.pack(format.Checkpoint(before.generation + 1, *state, boot_id, 0, 0))[:-4]
    return format.CHECKPOINTS_AT[0 if which is None else 1 - which], body + format.checksum(header.log_id, body).to_bytes(4, "little")


def announce(control: memoryview, state: State) -> None:
    """Tell all what is on disk now."""
    words = control.cast("Q")
    words[format.SYNCED_SEQ] = state.next_seq
    words[format.SYNCED] = state.tail
