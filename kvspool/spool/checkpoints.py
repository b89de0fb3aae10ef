"""Checkpoints: the basis of recovery after a crash of the machine. There are two, at the start of spool.dat; a new one overwrites the
older.

**One flush.** A checkpoint is written before the flush of the data that it describes. It is in the same file, so this one flush puts both
on disk, and no record counts as synced without a checkpoint on disk that includes it. A crash meanwhile may leave it on disk without its
data.

**Exactness.** A checkpoint states that the frames with the sequences `min_seq` up to `next_seq` were put between `head` and `tail`. A
sequence is written at one position only. So a frame found later with one of these sequences is at its position, one with a smaller sequence
is a leftover of an earlier lap, and one with a larger sequence is after `tail`. This holds only if `min_seq` is not smaller than the
sequence of the frame at `head`: `state` ensures that.

**Up to `synced`** it holds whatever reached the disk. Between `synced` and `tail`, if the data did not reach the disk, there may still be
frames that a killed writer had put and not published, with numbers that were reused since. Recovery treats no frame there as newer than the
checkpoint, unless no such writer can have put it, or the frames next to it prove it; see `doubtful`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvspool.engine.checksums import checksum, sealed
from kvspool.kernel import frames_py as frames
from kvspool.spool import format

if TYPE_CHECKING:
    from kvspool.kernel.frames import Ring


class State(NamedTuple):
    """The content of a checkpoint about the log."""

    head: int
    min_seq: int
    tail: int
    next_seq: int
    timestamp: int


EMPTY = format.Checkpoint(0, 0, 0, 0, 0, 0, 0, b"", 0, 0)  # the state of a log without a checkpoint


def newest(front: memoryview, header: format.ControlHeader) -> tuple[int | None, format.Checkpoint]:
    """Return which of the two checkpoints is the newest sound one, and the checkpoint; None and EMPTY if neither is."""
    which, best = None, EMPTY
    for number, at in enumerate(format.CHECKPOINTS_AT):
        raw = bytes(front[at : at + format.CHECKPOINT.size])
        found = format.CHECKPOINT.unpack(raw)
        if found.generation <= best.generation or found.crc != checksum(header.log_id, raw[:-4]):
            continue
        if found.head & 7 or found.tail & 7 or found.synced > found.tail or found.generation >> 63:
            continue  # no valid checkpoint says so
        if found.head <= found.tail <= found.head + header.capacity:
            which, best = number, found
    return which, best


def state(reader: Ring) -> State:
    """Return the state for a checkpoint, which is on disk once a flush that begins now is done."""
    while True:
        tail, next_sequence, timestamp = reader.mark()
        head = reader.head()
        least = reader.word(frames.MIN_SEQ)
        found = reader.sequence_at(head, tail) if head < tail else next_sequence
        if reader.head() != head or head > tail:
            continue  # overwritten meanwhile
        # If the oldest frame is damaged, `min_seq` bounds the ones after it: no frame of an earlier lap has such a sequence.
        return State(head, min(least, next_sequence) if found == frames.NOTHING else found, tail, next_sequence, timestamp)


def successor(front: memoryview, header: format.ControlHeader, state: State, synced: int, boot_id: bytes) -> tuple[int, bytes]:
    """Return the place of a new checkpoint, that of the older one, and its bytes; `synced`: end of the records that are on disk already."""
    which, before = newest(front, header)
    body = format.CHECKPOINT.pack(format.Checkpoint(before.generation + 1, *state, min(synced, state.tail), boot_id, 0, 0))
    return format.CHECKPOINTS_AT[0 if which is None else 1 - which], sealed(body, header.log_id)


def announce(control: memoryview, state: State) -> None:
    """Publish what is on disk now."""
    words = control.cast("Q")
    words[format.SYNCED_SEQ] = state.next_seq
    words[format.SYNCED] = state.tail
