"""Checkpoints: what recovery relies on after a crash of the machine. Two, in the front of spool.dat; a new one overwrites the older.

**One flush.** A checkpoint is written before the flush of the data that it speaks of. It lies in the same file, so this one flush puts both
on disk, and nothing is taken for synced that no checkpoint on disk knows. In a crash meanwhile it may get there without its data.

**Exactness.** A checkpoint says that the frames with the sequences `min_seq` up to `next_seq` were put between `head` and `tail`. A
sequence is written at one position only. So a frame found later that has one of these sequences stands where it belongs, one with a smaller
sequence is left over from an earlier lap, and one with a larger sequence lies behind `tail`. This holds only if `min_seq` is not smaller
than the sequence of the frame at `head`: `state` sees to that.

**Up to `synced`** it holds whatever came to the disk. Between there and `tail`, if the data did not get there, may still stand what a
killed writer had put and not published, under numbers that others have since been given: recovery takes nothing there for newer than the
checkpoint, unless no such writer can have put it, or the frames next to it tell; see `doubtful`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvspool.kernel import frames_py as frames
from kvspool.spool import format

if TYPE_CHECKING:
    from kvspool.kernel.frames_py import Ring


class State(NamedTuple):
    """What a checkpoint says of the log."""

    head: int
    min_seq: int
    tail: int
    next_seq: int
    timestamp: int


EMPTY = format.Checkpoint(0, 0, 0, 0, 0, 0, 0, b"", 0, 0)  # what holds for a log without a checkpoint


def newest(front: memoryview, header: format.Header) -> tuple[int | None, format.Checkpoint]:
    """Return which of the two checkpoints is the newest sound one, and the checkpoint; None and EMPTY if neither is."""
    which, best = None, EMPTY
    for number, at in enumerate(format.CHECKPOINTS_AT):
        raw = bytes(front[at : at + format.CHECKPOINT.size])
        found = format.CHECKPOINT.unpack(raw)
        if found.generation <= best.generation or found.crc != format.checksum(header.log_id, raw[:-4]):
            continue
        if found.head & 7 or found.tail & 7 or found.synced > found.tail or found.generation >> 63:
            continue  # no checkpoint says so
        if found.head <= found.tail <= found.head + header.capacity:
            which, best = number, found
    return which, best


def state(reader: Ring) -> State:
    """Return what a checkpoint may say, and what is on disk once a flush that begins now is done."""
    while True:
        tail, next_sequence, timestamp = reader.mark()
        head = reader.head()
        least = reader.word(frames.MIN_SEQ)
        found = reader.sequence_at(head, tail) if head < tail else next_sequence
        if reader.head() != head or head > tail:
            continue  # overwritten meanwhile
        # Where the oldest frame is damaged, `min_seq` bounds those behind it: nothing of an earlier lap has such a sequence.
        return State(head, min(least, next_sequence) if found == frames.NOTHING else found, tail, next_sequence, timestamp)


def successor(front: memoryview, header: format.Header, state: State, synced: int, boot_id: bytes) -> tuple[int, bytes]:
    """Return where a new checkpoint goes, over the older one, and its bytes; `synced` is how far everything is on disk already."""
    which, before = newest(front, header)
    body = format.CHECKPOINT.pack(format.Checkpoint(before.generation + 1, *state, min(synced, state.tail), boot_id, 0, 0))[:-4]
    return format.CHECKPOINTS_AT[0 if which is None else 1 - which], body + format.checksum(header.log_id, body).to_bytes(4, "little")


def announce(control: memoryview, state: State) -> None:
    """Tell all what is on disk now."""
    words = control.cast("Q")
    words[format.SYNCED_SEQ] = state.next_seq
    words[format.SYNCED] = state.tail
