"""An older copy of spool.ctl with a newer spool.dat: detected by the echoes of tail and head in spool.dat, confirmed by the frames.

Nothing was lost with the old control block, and no page is missing as after a crash of the machine. The echo gives the end of the last
publication, so the log consists of the frames before it. Frames after it were never published.

**The head.** A writer that was killed before its first publication may have overwritten frames that an older control block with the same
tail still counts. The echo of the head reveals this: each writer stores it before it overwrites bytes before the head.

**Damage.** An echo with a flipped bit must cost nothing. It is trusted only if frames confirm it: a sound frame ends there, with a sequence
that the control block doesn't know. If no frame is newer than the control block the echo is wrong, and is corrected. An echo of the head is
trusted only if a sound frame begins there, and an earlier one is overwritten or damaged.

**Interrupted.** During a recovery the echo of the tail has the mark UNDER_WAY, which means that the recovery must be repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool.kernel import frames_py as frames
from kvspool.spool import format

if TYPE_CHECKING:
    from kvspool.spool.memory import Memory

UNDER_WAY = 1  # added to the echo, as every position is a multiple of 8


def is_older(front: memoryview, control: memoryview) -> bool:
    """Return whether the control block seems to be older than the data.

    Writers store tail and head before each echo. So the echoes, loaded first, are never ahead.
    """
    tail, head = _echoes(front)
    words = control.cast("Q")
    return bool(tail > words[frames.TAIL] or head > words[frames.HEAD] or tail & UNDER_WAY)


def confirm(memory: Memory) -> int | None:
    """Under all locks, if the control block seems to be older: return the end of the log, marked; None if the echoes were wrong, and are
    now corrected.
    """
    echo, _ = _echoes(memory.front)
    if echo & UNDER_WAY:
        return echo
    known = _next_known(memory.control.cast("Q"))
    if known is not None and not _is_newer(memory, echo, known):
        if not _is_overwritten(memory):
            put_right(memory)
            return None
        echo = memory.control.cast("Q")[frames.TAIL]
    memory.write_front((echo | UNDER_WAY).to_bytes(8, "little"), format.ECHO_AT)
    return echo | UNDER_WAY


def put_right(memory: Memory) -> None:
    """Set the echoes according to the control block."""
    words = memory.control.cast("Q")
    memory.write_front(format.ECHO.pack(format.Echo(words[frames.TAIL], words[frames.HEAD])), format.ECHO_AT)


def checkpoint(memory: Memory, echo: int) -> format.Checkpoint | None:
    """Return the checkpoint as of the last publication; None if no sound frame ends at the echo."""
    tail = echo & ~7
    if not 0 < tail <= frames.MOST_POSITION:
        return None
    lowest = max(0, tail - memory.header.capacity)
    _, head = _echoes(memory.front)
    runs = _runs(memory, head, tail) if head >= lowest else []
    if runs and runs[0][0] == head:
        runs = [run for run in runs if run[2] >= runs[0][2]]  # others are leftovers of earlier laps
    else:
        runs = _runs(memory, lowest, tail)
    last = next((run for run in reversed(runs) if run[1] == tail), None)
    if last is None:
        return None
    start, _, first, sequence, timestamp = last
    for earlier, end, low, high, _ in reversed(runs):
        # Other frames before the chain were put after the tail by a killed writer, one lap later, and never published.
        if end <= start and high < first:
            start, first = earlier, low
    return format.Checkpoint(0, start, first, tail, sequence + 1, timestamp, tail, b"", 0, 0)


def head_echo(front: memoryview) -> int:
    """Return the position before which writers have certainly made room, according to spool.dat."""
    return _echoes(front)[1]


def _echoes(front: memoryview) -> tuple[int, int]:
    """Return the echoes of tail and head."""
    words = front.cast("Q")
    return words[frames.ECHO], words[frames.HEAD_ECHO]


def _is_newer(memory: Memory, echo: int, known: int) -> bool:
    """Return whether the frames confirm an echo of the tail: one has a sequence that the control block doesn't know."""
    if echo <= memory.control.cast("Q")[frames.TAIL]:
        return False
    found = checkpoint(memory, echo)
    return (_newest(memory) if found is None else found.next_seq - 1) >= known


def _is_overwritten(memory: Memory) -> bool:
    """Return whether the frames confirm the echo of the head: a frame begins there, and the frames before it are not whole."""
    _, head = _echoes(memory.front)
    words = memory.control.cast("Q")
    found = checkpoint(memory, words[frames.TAIL])
    return found is not None and words[frames.HEAD] < head == found.head and not _is_whole(memory, words[frames.HEAD], found)


def _is_whole(memory: Memory, position: int, found: format.Checkpoint) -> bool:
    """Return whether there are only sound frames between a position and the head of a checkpoint, each older than the frame at the head."""
    reader = memory.ring_reader()
    reader.position = position
    while reader.find(found.head) is not None or reader.stop == frames.JUMPED:
        reader.sequence = max(reader.sequence, reader.sequence_found)
    is_whole = reader.stop == frames.END and reader.sequence <= found.min_seq
    reader.close()
    return is_whole


def _newest(memory: Memory) -> int:
    """Return the highest sequence of a sound frame in the ring; -1 if there is none."""
    return max((last for _, _, _, last, _ in _runs(memory, 0, memory.header.capacity)), default=-1)


def _runs(memory: Memory, start: int, stop: int) -> list[tuple[int, int, int, int, int]]:
    """Return the rows of sound frames between two positions: start, end, first and last sequence, last timestamp."""
    scanner = memory.scanner()
    runs = []
    while scanner.next_run(start, stop, 0, frames.NOTHING):
        if scanner.frames:
            runs.append((scanner.start, scanner.position, scanner.first, scanner.last, scanner.newest))
        start = scanner.position if scanner.frames else scanner.start + frames.HEADER
    scanner.close()
    return runs


def _next_known(words: memoryview) -> int | None:
    """Return the next sequence of the control block; None if it has no mark for its tail."""
    for at in (frames.MARKS, frames.MARKS + frames.MARK_WORDS):
        if words[at] == words[frames.TAIL]:
            return int(words[at + 1])
    return None
