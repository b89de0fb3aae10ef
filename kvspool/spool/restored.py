"""An older copy of spool.ctl beside a newer spool.dat: noticed by the echo of the tail in spool.dat, and confirmed by the frames.

Nothing was lost with the old control block, and no page is missing as after a crash of the machine. The echo says where the last
publication ended, so the log is what lies in the ring before it. Frames after it were never published.

**Damage.** An echo with a flipped bit must cost nothing. It is believed only if frames confirm it: a sound frame ends there, with a
sequence that the control block doesn't know. Where no frame is newer than the control block the echo is wrong, and is put right.

**Interrupted.** Until a recovery is done the echo has the mark UNDER_WAY, which makes it larger than any tail that the recovery stores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvspool import _frames_py as frames
from kvspool.spool import format

if TYPE_CHECKING:
    from kvspool.spool.recovery import Memory

UNDER_WAY = 1  # added to the echo, as every position is a multiple of 8


def is_behind(front: memoryview, control: memoryview) -> bool:
    """Return whether the control block seems to be older than the data.

    Writers store the tail first and its echo after it. So the echo, loaded first, is never ahead of the tail.
    """
    echo = front.cast("Q")[frames.ECHO]
    return bool(echo > control.cast("Q")[frames.TAIL])


def confirm(memory: Memory) -> int | None:
    """Under all locks, where the control block seems to be older: return the echo, marked; None if the echo was wrong and is right now."""
    echo = memory.front.cast("Q")[frames.ECHO]
    if echo & UNDER_WAY:
        return int(echo)
    known = _next_known(memory.control.cast("Q"))
    if known is not None:
        found = checkpoint(memory, echo)
        newest = _newest(memory) if found is None else found.next_seq - 1
        if newest < known:
            store(memory, memory.control.cast("Q")[frames.TAIL])
            return None
    store(memory, echo | UNDER_WAY)
    return int(echo | UNDER_WAY)


def store(memory: Memory, echo: int) -> None:
    """Overwrite the echo."""
    memory.write_front(echo.to_bytes(format.ECHO.size, "little"), format.ECHO_AT)


def checkpoint(memory: Memory, echo: int) -> format.Checkpoint | None:
    """Return what a checkpoint would say that was written after the last publication; None if no sound frame ends at the echo."""
    tail = echo & ~7
    if not 0 < tail <= frames.MOST_POSITION:
        return None
    runs = _runs(memory, max(0, tail - memory.header.capacity), tail)
    last = next((run for run in reversed(runs) if run[1] == tail), None)
    if last is None:
        return None
    start, _, first, sequence, timestamp = last
    for earlier, end, low, high, _ in reversed(runs):
        # Other frames before the chain are what a killed writer put after the tail, one lap on, and never published.
        if end <= start and high < first:
            start, first = earlier, low
    return format.Checkpoint(0, start, first, tail, sequence + 1, timestamp, tail, b"", 0, 0)


def _newest(memory: Memory) -> int:
    """Return the highest sequence of a sound frame in the ring; -1 if there is none."""
    return max((last for _, _, _, last, _ in _runs(memory, 0, memory.header.capacity)), default=-1)


def _runs(memory: Memory, start: int, stop: int) -> list[tuple[int, int, int, int, int]]:
    """Return the rows of sound frames between two positions: start, end, first and last sequence, last timestamp."""
    survey = memory.survey()
    runs = []
    while survey.next_run(start, stop, 0, frames.NOTHING):
        if survey.frames:
            runs.append((survey.start, survey.position, survey.first, survey.last, survey.newest))
        start = survey.position if survey.frames else survey.start + frames.HEADER
    survey.close()
    return runs


def _next_known(words: memoryview) -> int | None:
    """Return the sequence with which the control block would go on; None if it has no mark for its tail."""
    for at in (frames.MARKS, frames.MARKS + frames.MARK_WORDS):
        if words[at] == words[frames.TAIL]:
            return int(words[at + 1])
    return None
