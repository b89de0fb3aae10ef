"""Doubtful frames: newer than a checkpoint, at positions where a killed writer may have left its own frames. Which of them are records?

Between a checkpoint's `synced` and its tail, a newer frame may be a record of the next lap, or a killed writer may have put it before the
checkpoint; see `checkpoints`. The adjacent frames decide. A row of doubtful frames counts in three cases:

- It continues a newer frame that is kept, or the checkpoint itself: without a gap, in position and sequence.
- A newer frame that is kept continues the row in the same way.
- It is longer than a killed writer can leave, which is a quarter of the ring, and it endangers no frame of the checkpoint.

A row is only added between kept frames, at its own bytes, and only if sequences still ascend. So it costs no other record, and a recovery
that was killed adds the same rows when it is repeated.
"""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING

from kvspool.kernel import frames_py as frames

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvspool.spool import format
    from kvspool.spool.memory import FrameRun

    Place = tuple[int, int]  # position of a frame in the ring, and its sequence


def admit(
    kept: list[FrameRun], doubtful: list[FrameRun], pads: list[FrameRun], checkpoint: format.Checkpoint, capacity: int
) -> tuple[list[FrameRun], list[FrameRun]]:
    """Return the kept runs together with the doubtful ones that count, in order, and the remaining doubtful ones."""
    after = _successor(pads, capacity)
    rows = _rows(doubtful, after, capacity)
    newer = [run for run in kept if run.first >= checkpoint.next_seq]
    ends = {after(run.end, run.last + 1): run.end for run in newer}
    starts = {(run.start % capacity, run.first): run.start for run in newer}
    if not newer:
        ends[after(checkpoint.tail, checkpoint.next_seq)] = checkpoint.tail
    kept = list(kept)
    left: list[list[FrameRun]] = []
    for row in rows:
        begin, end = (row[0].start % capacity, row[0].first), after(row[-1].end, row[-1].last + 1)
        if begin in ends:
            is_added = _add(kept, _moved(row, ends[begin], capacity), checkpoint)
        elif end in starts:
            is_added = _add(kept, _moved(row, starts[end] - capacity, capacity), checkpoint)
        else:
            is_added = False
        if not is_added:
            left.append(row)
    # From the newest one back, so that if nothing else is kept it determines the end of the log.
    for row in sorted(filter(lambda row: _is_long(row, capacity), left), key=lambda row: -row[-1].last):
        if _add(kept, _moved(row, kept[-1].end - capacity if kept else checkpoint.tail, capacity), checkpoint):
            left.remove(row)
    # The bytes after the header of a pad are old: the frame there was dropped when the pad was put.
    given_up = [run for run in kept if run.start < kept[-1].end - capacity]
    kept = kept[len(given_up) :]
    if kept and kept[0].first >= checkpoint.next_seq and kept[0].start < checkpoint.tail:
        kept = [run.moved(capacity) for run in kept]
    return kept, [run for row in [*left, given_up] for run in row]


def _successor(pads: list[FrameRun], capacity: int) -> Callable[[int, int], Place]:
    """Return a function that returns the position of the frame with a sequence after a position: possibly after a pad."""
    padded = {(pad.start % capacity, pad.first) for pad in pads}

    def after(position: int, sequence: int) -> Place:
        offset = position % capacity
        is_over = capacity - offset < frames.HEADER or (offset, sequence) in padded
        return 0 if is_over else offset, sequence

    return after


def _rows(doubtful: list[FrameRun], after: Callable[[int, int], Place], capacity: int) -> list[list[FrameRun]]:
    """Return the runs in rows, once around the ring: in each row, every run continues the previous one."""
    rows: list[list[FrameRun]] = []
    for run in sorted(doubtful):
        if rows and after(rows[-1][-1].end, rows[-1][-1].last + 1) == (run.start % capacity, run.first):
            rows[-1].append(run)
        else:
            rows.append([run])
    # The first one may continue the last one: the scan began in its middle.
    if len(rows) > 1 and after(rows[-1][-1].end, rows[-1][-1].last + 1) == (rows[0][0].start % capacity, rows[0][0].first):
        rows[-1] += [run.moved(capacity) for run in rows.pop(0)]
    return rows


def _is_long(row: list[FrameRun], capacity: int) -> bool:
    """Return whether a row is longer than what a killed writer can leave."""
    return sum(run.end - run.start for run in row) > capacity >> 2


def _moved(row: list[FrameRun], position: int, capacity: int) -> list[FrameRun]:
    """Return the row at its first possible place from this position on."""
    laps = -(-(position - row[0].start) // capacity)
    return [run.moved(laps * capacity) for run in row]


def _add(kept: list[FrameRun], row: list[FrameRun], checkpoint: format.Checkpoint) -> bool:
    """Add a row to the kept runs if it fits between them; return whether it does."""
    at = bisect(kept, row[0])
    for before in kept[max(0, at - 1) : at]:
        is_known = before.first < checkpoint.next_seq
        if before.last >= row[0].first or (is_known and row[0].start < checkpoint.tail):
            return False
    if any(following.first <= row[-1].last for following in kept[at : at + 1]):
        return False
    kept[at:at] = row
    return True
