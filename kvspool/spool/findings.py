"""The contents of a log after a crash of the machine, as its frames show them. Nothing is changed here.

**After a crash,** pages have reached the disk in any order and at any moment. So the control block may be older or newer than the ring,
and parts of the ring may be a lap or more older than others. Only checkpoints and flushed data are certain: no flush completes before a
checkpoint that includes all of its data is on disk, too.

**Truth** is every frame whose checksum, which begins with the log id, matches. A scan finds them all, once around the ring. Those with
sequences of the checkpoint are at their positions (see `checkpoints`); older ones are leftovers of earlier laps. The others are newer than
the checkpoint and after its tail; the last of them is the end of the log. In ring order from there on, a frame after one with a larger
sequence is a leftover; every other one is kept. Bytes between kept frames are damage: a reader gets a Gap for them, and nothing is cut off
there.

**Numbers.** The next sequence is a multiple of 2**32, at least 2**31 after the last known one: a reader may have seen records that the
crash took, and no number is ever used twice. It is a later multiple than any earlier recovery's, so open handles notice it: keys that they
know may be lost, see `keys`.
"""

from __future__ import annotations

from typing import NamedTuple

from kvspool.engine.damage import Damage
from kvspool.kernel import frames_py as frames
from kvspool.spool import checkpoints, doubtful, format, restored
from kvspool.spool.cases import Case, decide
from kvspool.spool.memory import FrameRun, Memory

SPARE = 1 << 31  # sequences that may have been assigned without a trace on disk


class Findings(NamedTuple):
    """The facts about a log, and how they were determined."""

    case: Case
    checkpoint: str
    state: checkpoints.State
    kept: list[FrameRun]
    rejected: list[FrameRun]
    damaged: list[Damage]
    cut_records: int
    cut_bytes: int


def examine(memory: Memory, echo: int | None = None) -> Findings:
    """Determine the contents of the log, without changing anything. echo: end of the last publication, if only the control block is old."""
    which, checkpoint = checkpoints.newest(memory.front, memory.header)
    published = None if echo is None else restored.checkpoint(memory, echo)
    given_out = checkpoint.next_seq  # possibly by a recovery, without a record after it
    checkpoint = published or checkpoint
    found, pads = _scan(memory, checkpoint)
    left: list[FrameRun] = []
    unsure: list[FrameRun] = []
    runs: list[FrameRun] = []
    for run in found:
        if published is not None and run.first >= published.next_seq or _crosses(run, checkpoint):
            left.append(run)
        else:
            (unsure if _is_doubtful(run, checkpoint, memory.header.capacity) else runs).append(run)
    newest = max(runs, key=lambda run: (run.last, -_distance(run, checkpoint, memory.header.capacity)), default=None)
    end = _end(newest, checkpoint, memory.header.capacity)
    lap = "same" if newest is None else _lap(runs, newest, end, checkpoint, memory.header.capacity)
    if lap == "later":
        end += memory.header.capacity
    case, recorded = _decide(memory, checkpoint, newest, end, lap)
    tail = checkpoint.tail if case.ends == "checkpoint" else end
    kept, rejected = _sort(memory, runs, case, tail, checkpoint)
    kept, unproven = doubtful.admit(kept, unsure, pads, checkpoint, memory.header.capacity)
    if set(unproven) != set(unsure):
        tail = kept[-1].end
        is_later = kept[0].first >= checkpoint.next_seq and tail - memory.header.capacity > checkpoint.tail
        case, recorded = _decide(memory, checkpoint, kept[-1], tail, "later" if is_later else lap)
    if published is not None:
        case = case._replace(name="as it was published", is_cut=False)
    known = max([given_out, checkpoint.next_seq, *(run.last + 1 for run in kept[-1:])])
    next_sequence = next_multiple(known)
    first = kept[0] if kept else FrameRun(tail, tail, next_sequence, 0, 0, 0)
    return Findings(
        case,
        "none" if which is None else "AB"[which],
        checkpoints.State(first.start, first.first, tail, next_sequence, max(checkpoint.timestamp, kept[-1].timestamp if kept else 0)),
        kept,
        [*left, *unproven, *rejected, *_unannounced(pads, kept, memory.header.capacity)],
        _damage(kept, checkpoint, tail, is_whole=case.counts == "all" and not _has_made_room(memory, checkpoint, tail)),
        max(0, recorded[1] - known) if case.is_cut and recorded else 0,
        recorded[0] - tail if case.is_cut and recorded else 0,
    )


def _decide(
    memory: Memory, checkpoint: format.Checkpoint, newest: FrameRun | None, end: int, lap: str
) -> tuple[Case, tuple[int, int] | None]:
    """Return the case of a log that ends at a position with this run, and the end according to the control block."""
    recorded = _recorded(memory, end)
    case = decide(
        {
            "newest": _newest(newest, checkpoint),
            "room": "fits" if end - checkpoint.head <= memory.header.capacity else "over",
            "lap": lap,
            "recorded": _compare(recorded, end),
        }
    )
    return case, recorded


def next_multiple(sequence: int) -> int:
    """Return the next sequence of a recovered log whose last known next one is `sequence`."""
    return -(-(sequence + SPARE) // format.STRIDE) * format.STRIDE


def _scan(memory: Memory, checkpoint: format.Checkpoint) -> tuple[list[FrameRun], list[FrameRun]]:
    """Return all runs and all pads that are not leftovers according to the checkpoint, once around the ring from its head on."""
    scanner = memory.scanner()
    runs: list[FrameRun] = []
    pads: list[FrameRun] = []
    position = checkpoint.head
    # Split each run at the end of the checkpoint, and at the end of the records synced before it.
    for stop in (max(checkpoint.head, checkpoint.synced), checkpoint.tail, checkpoint.head + memory.header.capacity):
        while scanner.next_run(position, stop, checkpoint.min_seq, checkpoint.next_seq):
            run = FrameRun(scanner.start, scanner.position, scanner.first, scanner.last, scanner.newest, scanner.frames)
            if not run.frames:
                pads.append(run)
            elif run.start < checkpoint.tail < run.end:
                for parts in _split(memory, run, run.last - 1):  # the last frame crosses it
                    runs += parts
            else:
                runs.append(run)
            position = run.end if run.frames else run.start + frames.HEADER
        position = max(position, stop)
    scanner.close()
    return runs, pads


def _crosses(run: FrameRun, checkpoint: format.Checkpoint) -> bool:
    """Return whether a run has a known frame that extends over the checkpoint's tail. A killed writer has put it."""
    return run.first < checkpoint.next_seq and run.start < checkpoint.tail < run.end


def _is_doubtful(run: FrameRun, checkpoint: format.Checkpoint, capacity: int) -> bool:
    """Return whether a killed writer may have put a run before the checkpoint; see `doubtful`."""
    if run.first < checkpoint.next_seq:
        return False
    # A run that continues for more than a writer leaves unpublished, at most a quarter of the ring, belongs to the next lap.
    return checkpoint.synced <= run.start < checkpoint.tail and run.last - checkpoint.next_seq <= (capacity // frames.HEADER >> 2) + 2


def _distance(run: FrameRun, checkpoint: format.Checkpoint, capacity: int) -> int:
    """Return the minimum distance after the checkpoint's tail of a run that the checkpoint doesn't know."""
    return 0 if run.first < checkpoint.next_seq else (run.start - checkpoint.tail) % capacity


def _newest(run: FrameRun | None, checkpoint: format.Checkpoint) -> str:
    """Return the relation of the last sound frame, the last one of this run, to the checkpoint."""
    if run is None:
        return "none"
    if run.first >= checkpoint.next_seq:
        return "newer"
    return "last" if run.end == checkpoint.tail else "known"


def _end(run: FrameRun | None, checkpoint: format.Checkpoint, capacity: int) -> int:
    """Return the least end of a log whose last sound frame is the last one of this run: the checkpoint's tail, or after it."""
    if run is None or run.first < checkpoint.next_seq:
        return checkpoint.tail
    return run.end if run.start >= checkpoint.tail else run.end + capacity


def _into(run: FrameRun, end: int, capacity: int) -> FrameRun:
    """Return the run at its position in the lap that ends at position `end`."""
    return run.moved((end - 1 - run.start) // capacity * capacity)


def _lap(runs: list[FrameRun], newest: FrameRun, end: int, checkpoint: format.Checkpoint, capacity: int) -> str:
    """Return whether the log continued for a lap after it first passed `end`, where its last sound frame ends; see `CONDITIONS`.

    It decides by frames that are then kept, and by bytes that are never erased, so that a repeated recovery decides the same.
    """
    moved = [(_into(run, end, capacity), run) for run in runs]
    before = sorted(new for new, run in moved if run.first >= checkpoint.next_seq and new.start < checkpoint.tail)
    if not before:
        return "same"
    if max(run.last for run in before) == newest.last:
        return "doubtful"  # a number that was used twice
    if not any(run.first < checkpoint.next_seq and _is_known(run, end, checkpoint, capacity) for run in runs):
        return "later"  # and no synced record is endangered
    # A killed writer leaves at most a quarter of the ring unpublished. Between the leftovers of two of them there can't be so many records.
    if newest.last - before[0].first > (capacity // frames.HEADER >> 1) + 2:
        return "later"
    # More records were appended than fit between the checkpoint and here.
    return "later" if newest.last - checkpoint.next_seq > (end - checkpoint.tail) // frames.HEADER else "doubtful"


def _is_known(run: FrameRun, end: int, checkpoint: format.Checkpoint, capacity: int) -> bool:
    """Return whether a run of the checkpoint still exists if the log ends at `end`."""
    return run.start >= end - capacity and run.end <= checkpoint.tail


def _sort(
    memory: Memory, runs: list[FrameRun], case: Case, tail: int, checkpoint: format.Checkpoint
) -> tuple[list[FrameRun], list[FrameRun]]:
    """Return the kept runs, in order, and the leftovers of earlier laps."""
    capacity = memory.header.capacity
    rejected: list[FrameRun] = []
    found: list[FrameRun] = []
    for run in runs:
        if run.first < checkpoint.next_seq:
            moved, counts = run, case.counts == "all" and _is_known(run, tail, checkpoint, capacity)
        else:
            moved = _into(run, tail, capacity)
            counts = case.counts == "newer" or moved.start >= checkpoint.tail
        if counts:
            found.append(moved)
        else:
            rejected.append(run)
    found.sort()
    kept, again = _ascending(memory, found)
    # A killed writer may have left a run just after the end, with numbers that were reused. It must not cost the records before it.
    while again and found[0].first >= checkpoint.next_seq:
        others, others_again = _ascending(memory, found[1:])
        if sum(run.frames for run in others) <= sum(run.frames for run in kept):
            break
        rejected.append(found.pop(0))
        kept, again = others, others_again
    return kept, [*rejected, *again]


def _ascending(memory: Memory, runs: list[FrameRun]) -> tuple[list[FrameRun], list[FrameRun]]:
    """Return the runs whose sequences ascend, and the parts of runs that come after a larger sequence."""
    kept: list[FrameRun] = []
    rejected: list[FrameRun] = []
    for run in runs:
        again, further = _split(memory, run, kept[-1].last if kept else run.first - 1)
        rejected += again
        kept += further
    return kept, rejected


def _unannounced(pads: list[FrameRun], kept: list[FrameRun], capacity: int) -> list[FrameRun]:
    """Return the pads that announce no kept run."""
    announced = {(run.start % capacity, run.first) for run in kept}
    return [pad for pad in pads if (pad.end % capacity, pad.first) not in announced]


def _split(memory: Memory, run: FrameRun, last: int) -> tuple[list[FrameRun], list[FrameRun]]:
    """Return the part of a run up to the sequence `last`, and the part after it; each is one run or none."""
    if run.first > last:
        return [], [run]
    if run.last <= last:
        return [run], []
    scanner = memory.scanner()
    place = scanner.place_of(run.start, run.end, last + 1)
    scanner.close()
    frames_before = last + 1 - run.first
    return (
        [run._replace(end=place, last=last, frames=frames_before)],
        [run._replace(start=place, first=last + 1, frames=run.frames - frames_before)],
    )


def _recorded(memory: Memory, tail: int) -> tuple[int, int] | None:
    """Return the tail and next sequence in the control block: a hint, None if there is no mark or it can't be of this lap."""
    words = memory.control.cast("Q")
    found = words[frames.TAIL]
    for at in (frames.MARKS, frames.MARKS + frames.MARK_WORDS):
        if words[at] == found and found & 7 == 0 and abs(found - tail) <= memory.header.capacity:
            return found, words[at + 1]
    return None


def _compare(recorded: tuple[int, int] | None, tail: int) -> str:
    if recorded is None:
        return "unknown"
    return "ahead" if recorded[0] > tail else "at" if recorded[0] == tail else "before"


def _has_made_room(memory: Memory, checkpoint: format.Checkpoint, tail: int) -> bool:
    """Return whether writers dropped frames of the checkpoint. The echo of the head shows it, even if they published nothing."""
    return tail - checkpoint.head > memory.header.capacity or restored.head_echo(memory.front) > checkpoint.head


def _damage(kept: list[FrameRun], checkpoint: format.Checkpoint, tail: int, *, is_whole: bool) -> list[Damage]:
    """Return the places where sequences are missing; before the first kept one only if nothing was overwritten since the checkpoint."""
    places = []
    position, sequence = checkpoint.head, checkpoint.min_seq
    if not is_whole and kept:
        position, sequence = kept[0].start, kept[0].first
    for run in kept:
        expected = max(sequence, run.first // format.STRIDE * format.STRIDE)
        if run.first > expected:
            places.append(Damage(position, run.start - position, expected, run.first - 1))
        position, sequence = run.end, run.last + 1
    if checkpoint.next_seq > sequence and position < tail:
        places.append(Damage(position, tail - position, sequence, checkpoint.next_seq - 1))
    return places
