"""After a crash of the machine: determine from the frames what the log contains, and restore the control block.

**A restored control block.** An older copy of spool.ctl with a newer spool.dat is the same case: the control block can't be trusted, the
frames can. Its epoch may name the present boot; then the echoes of tail and head in spool.dat reveal it, see `restored`. A pair that was
copied or restored together is consistent, and is used as it is.

**After a crash,** pages have reached the disk in any order and at any moment. So the control block may be older or newer than the ring,
and parts of the ring may be a lap or more older than others. Only checkpoints and flushed data are certain: no flush completes before a
checkpoint that includes all of its data is on disk, too.

**Truth** is every frame whose checksum, which begins with the log id, matches. A survey finds them all, once around the ring. Those with
sequences of the checkpoint are at their positions (see `checkpoints`); older ones are leftovers of earlier laps. The others are newer than
the checkpoint and after its tail; the last of them is the end of the log. In ring order from there on, a frame after one with a larger
sequence is a leftover; every other one is kept. Bytes between kept frames are damage: a reader gets a Gap for them, and nothing is cut off
there.

**Leftovers are erased.** The first word of every sound frame that is not kept, although its sequence still counts, is set to 0: it was
dropped or never published, and must not be found again in a hole. The same is done to a damaged frame that would extend over kept frames: a
writer that makes room would skip those. Other damaged bytes stay as they are. After that every sound frame from `min_seq` on is at its
position, as the next checkpoint states.

**Numbers.** The next sequence is a multiple of 2**32, at least 2**31 after the last known one: a reader may have seen records that the
crash took, and no number is ever used twice. It is a later multiple than any earlier recovery's, so open handles notice it: keys that they
know may be lost, see `keys`.

**Keys.** If the control block may be an older copy, its key table may have lost keys that records name; see `lost_keys`.

**Durable readers** keep their sequence. Their position is that of the record with this sequence, or of the next one, in the recovered log.
A commit ahead of the recovered log stays ahead: its reader gets a Gap, and no record twice.

**Interrupted.** The kept records do not depend on the rejected ones, the control block's words or the commits. So a recovery can be killed
at any store, and gives the same result when it is repeated. Once its epoch is sealed, only the checkpoint is left to write. The checkpoint
states that there are no leftovers, so the ring is on disk before it is written.

**After a failed flush** of this or an earlier recovery, the kernel treats pages as written that are not on disk, and the next flush would
report a false success. So the log is poisoned then. A recovery of a poisoned log stores every page again before its first flush, and writes
its checkpoint after that flush.
"""

from __future__ import annotations

import errno
import mmap
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from kvspool import system
from kvspool.engine import ledger, locks
from kvspool.engine.damage import MOST_PLACES, Damage
from kvspool.errors import Poisoned, Unrecovered
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import FrameReader
from kvspool.spool import checkpoints, doubtful, epochs, format, lost_keys, restored, slots
from kvspool.spool.memory import Memory, Run
from kvspool.system import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvspool.kernel.frames import FrameSurvey
    from kvspool.spool.pair import Pair

STRIDE = format.STRIDE
SPARE = 1 << 31  # sequences that may have been assigned without a trace on disk


class RecoveryReport(msgspec.Struct, frozen=True):
    """The result of a recovery.

    case: the name of the decision, see `CASES`. recovered: ns since the Unix epoch. checkpoint: "A", "B" or "none". head, tail: positions
    of the recovered log; records, first_sequence, last_sequence: the kept ones (last < first: none); next_sequence: of the next record.
    damaged_records: missing sequences; damaged: the places, the first 1000 of them. cut_records, cut_bytes: records of the control block
    after the end, which were not found. erased_records: leftovers of earlier laps.
    """

    path: str
    case: str
    recovered: int
    checkpoint: str
    head: int
    tail: int
    records: int
    first_sequence: int
    last_sequence: int
    next_sequence: int
    damaged_records: int
    damaged: list[Damage]
    cut_records: int
    cut_bytes: int
    erased_records: int

    def __str__(self) -> str:
        words = f"{self.path}: recovered ({self.case}): {self.records} records kept"
        if self.cut_records or self.cut_bytes:
            words += f", {self.cut_records} records ({self.cut_bytes} bytes) that were not synced are lost"
        if self.damaged_records:
            words += f", {self.damaged_records} records are damaged"
        return f"{words}; the log ends at position {self.tail} and continues with sequence {self.next_sequence}"


# The decision, as data: conditions, and their possible values.
CONDITIONS: dict[str, tuple[str, ...]] = {
    # The last sound frame: none; included in the checkpoint, as its last one or not; or newer.
    "newest": ("none", "last", "known", "newer"),
    # Whether the ring can hold all from the checkpoint's head to the end of that frame.
    "room": ("fits", "over"),
    # Whether frames newer than the checkpoint follow the last one. Later: yes, of the previous lap, and all frames of the checkpoint were
    # dropped. Doubtful: or else the last one is of a writer that was killed before it published it.
    "lap": ("same", "doubtful", "later"),
    # The tail in the control block, compared to the end; unknown: it has no mark.
    "recorded": ("behind", "at", "ahead", "unknown"),
}
ANY = "any"


class Case(NamedTuple):
    """Conditions, and the conclusions: the end of the log, the frames that count, and whether records are reported as cut."""

    name: str
    newest: str
    room: str
    lap: str
    recorded: tuple[str, ...] | str
    ends: Literal["checkpoint", "newest"]
    counts: Literal["all", "newer"]
    is_cut: bool


_NOT_AHEAD = ("behind", "at", "unknown")

CASES = (
    # No record: the log was empty, or all records of the checkpoint are damaged.
    Case("no record found", "none", ANY, ANY, _NOT_AHEAD, "checkpoint", "all", False),
    Case("no record found, unsynced ones lost", "none", ANY, ANY, "ahead", "checkpoint", "all", True),
    # The newest frame ends before the checkpoint does: the last synced records are damaged, and are not overwritten.
    Case("synced records damaged at the end", "known", ANY, ANY, _NOT_AHEAD, "checkpoint", "all", False),
    Case("synced records damaged at the end, unsynced ones lost", "known", ANY, ANY, "ahead", "checkpoint", "all", True),
    # Only synced records.
    Case("as it was synced", "last", ANY, ANY, _NOT_AHEAD, "checkpoint", "all", False),
    Case("as it was synced, unsynced records lost", "last", ANY, ANY, "ahead", "checkpoint", "all", True),
    # Synced records, and later ones.
    Case("rolled forward", "newer", "fits", "same", _NOT_AHEAD, "newest", "all", False),
    Case("rolled forward, unsynced records lost", "newer", "fits", "same", "ahead", "newest", "all", True),
    # Newer frames have begun to overwrite the oldest ones of the checkpoint.
    Case("oldest records overwritten", "newer", "over", "same", _NOT_AHEAD, "newest", "all", False),
    Case("oldest records overwritten, unsynced ones lost", "newer", "over", "same", "ahead", "newest", "all", True),
    # Perhaps a lap later; synced records win if the two can't be distinguished.
    Case("perhaps a lap on", "newer", ANY, "doubtful", _NOT_AHEAD, "newest", "all", False),
    Case("perhaps a lap on, unsynced records lost", "newer", ANY, "doubtful", "ahead", "newest", "all", True),
    # Newer frames continued into a further lap: all records of the checkpoint were dropped.
    Case("a lap on", "newer", ANY, "later", _NOT_AHEAD, "newest", "newer", False),
    Case("a lap on, unsynced records lost", "newer", ANY, "later", "ahead", "newest", "newer", True),
)


def decide(conditions: dict[str, str]) -> Case:
    """Return the one case whose conditions hold."""
    (case,) = [case for case in CASES if matches(case, conditions)]
    return case


def matches(case: Case, conditions: dict[str, str]) -> bool:
    """Return whether all conditions of a case hold."""
    for kind, value in conditions.items():
        wanted = getattr(case, kind)
        if wanted != ANY and value != wanted and (isinstance(wanted, str) or value not in wanted):
            return False
    return True


class Findings(NamedTuple):
    """The facts about a log, and how they were determined."""

    case: Case
    checkpoint: str
    state: checkpoints.State
    kept: list[Run]
    rejected: list[Run]
    damaged: list[Damage]
    cut_records: int
    cut_bytes: int


def examine(memory: Memory, echo: int | None = None) -> Findings:
    """Determine the contents of the log, without changing anything. echo: end of the last publication, if only the control block is old."""
    which, checkpoint = checkpoints.newest(memory.front, memory.header)
    published = None if echo is None else restored.checkpoint(memory, echo)
    given_out = checkpoint.next_seq  # possibly by a recovery, without a record after it
    checkpoint = published or checkpoint
    found, pads = _survey(memory, checkpoint)
    left: list[Run] = []
    unsure: list[Run] = []
    runs: list[Run] = []
    for run in found:
        if published is not None and run.first >= published.next_seq or _crosses(run, checkpoint):
            left.append(run)
        else:
            (unsure if _is_doubtful(run, checkpoint, memory.header.capacity) else runs).append(run)
    newest = max(runs, key=lambda run: (run.last, -_behind(run, checkpoint, memory.header.capacity)), default=None)
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
    first = kept[0] if kept else Run(tail, tail, next_sequence, 0, 0, 0)
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


def _decide(memory: Memory, checkpoint: format.Checkpoint, newest: Run | None, end: int, lap: str) -> tuple[Case, tuple[int, int] | None]:
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
    return -(-(sequence + SPARE) // STRIDE) * STRIDE


def _survey(memory: Memory, checkpoint: format.Checkpoint) -> tuple[list[Run], list[Run]]:
    """Return all runs and all pads that are not leftovers according to the checkpoint, once around the ring from its head on."""
    survey = memory.survey()
    runs: list[Run] = []
    pads: list[Run] = []
    position = checkpoint.head
    # Split each run at the end of the checkpoint, and at the end of the records synced before it.
    for stop in (max(checkpoint.head, checkpoint.synced), checkpoint.tail, checkpoint.head + memory.header.capacity):
        while survey.next_run(position, stop, checkpoint.min_seq, checkpoint.next_seq):
            run = Run(survey.start, survey.position, survey.first, survey.last, survey.newest, survey.frames)
            if not run.frames:
                pads.append(run)
            elif run.start < checkpoint.tail < run.end:
                for parts in _split(memory, run, run.last - 1):  # the last frame crosses it
                    runs += parts
            else:
                runs.append(run)
            position = run.end if run.frames else run.start + frames.HEADER
        position = max(position, stop)
    survey.close()
    return runs, pads


def _crosses(run: Run, checkpoint: format.Checkpoint) -> bool:
    """Return whether a run has a known frame that extends over the checkpoint's tail. A killed writer has put it."""
    return run.first < checkpoint.next_seq and run.start < checkpoint.tail < run.end


def _is_doubtful(run: Run, checkpoint: format.Checkpoint, capacity: int) -> bool:
    """Return whether a killed writer may have put a run before the checkpoint; see `doubtful`."""
    if run.first < checkpoint.next_seq:
        return False
    # A run that continues for more than a writer leaves unpublished, at most a quarter of the ring, belongs to the next lap.
    return checkpoint.synced <= run.start < checkpoint.tail and run.last - checkpoint.next_seq <= (capacity // frames.HEADER >> 2) + 2


def _behind(run: Run, checkpoint: format.Checkpoint, capacity: int) -> int:
    """Return the minimum distance after the checkpoint's tail of a run that the checkpoint doesn't know."""
    return 0 if run.first < checkpoint.next_seq else (run.start - checkpoint.tail) % capacity


def _newest(run: Run | None, checkpoint: format.Checkpoint) -> str:
    """Return the relation of the last sound frame, the last one of this run, to the checkpoint."""
    if run is None:
        return "none"
    if run.first >= checkpoint.next_seq:
        return "newer"
    return "last" if run.end == checkpoint.tail else "known"


def _end(run: Run | None, checkpoint: format.Checkpoint, capacity: int) -> int:
    """Return the least end of a log whose last sound frame is the last one of this run: the checkpoint's tail, or after it."""
    if run is None or run.first < checkpoint.next_seq:
        return checkpoint.tail
    return run.end if run.start >= checkpoint.tail else run.end + capacity


def _into(run: Run, end: int, capacity: int) -> Run:
    """Return the run at its position in the lap that ends at position `end`."""
    return run.moved((end - 1 - run.start) // capacity * capacity)


def _lap(runs: list[Run], newest: Run, end: int, checkpoint: format.Checkpoint, capacity: int) -> str:
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


def _is_known(run: Run, end: int, checkpoint: format.Checkpoint, capacity: int) -> bool:
    """Return whether a run of the checkpoint still exists if the log ends at `end`."""
    return run.start >= end - capacity and run.end <= checkpoint.tail


def _sort(memory: Memory, runs: list[Run], case: Case, tail: int, checkpoint: format.Checkpoint) -> tuple[list[Run], list[Run]]:
    """Return the kept runs, in order, and the leftovers of earlier laps."""
    capacity = memory.header.capacity
    rejected: list[Run] = []
    found: list[Run] = []
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


def _ascending(memory: Memory, runs: list[Run]) -> tuple[list[Run], list[Run]]:
    """Return the runs whose sequences ascend, and the parts of runs that come after a larger sequence."""
    kept: list[Run] = []
    rejected: list[Run] = []
    for run in runs:
        again, further = _split(memory, run, kept[-1].last if kept else run.first - 1)
        rejected += again
        kept += further
    return kept, rejected


def _unannounced(pads: list[Run], kept: list[Run], capacity: int) -> list[Run]:
    """Return the pads that announce no kept run."""
    announced = {(run.start % capacity, run.first) for run in kept}
    return [pad for pad in pads if (pad.end % capacity, pad.first) not in announced]


def _split(memory: Memory, run: Run, last: int) -> tuple[list[Run], list[Run]]:
    """Return the part of a run up to the sequence `last`, and the part after it; each is one run or none."""
    if run.first > last:
        return [], [run]
    if run.last <= last:
        return [run], []
    survey = memory.survey()
    place = survey.place_of(run.start, run.end, last + 1)
    survey.close()
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
    return "ahead" if recorded[0] > tail else "at" if recorded[0] == tail else "behind"


def _has_made_room(memory: Memory, checkpoint: format.Checkpoint, tail: int) -> bool:
    """Return whether writers dropped frames of the checkpoint. The echo of the head shows it, even if they published nothing."""
    return tail - checkpoint.head > memory.header.capacity or restored.head_echo(memory.front) > checkpoint.head


def _damage(kept: list[Run], checkpoint: format.Checkpoint, tail: int, *, is_whole: bool) -> list[Damage]:
    """Return the places where sequences are missing; before the first kept one only if nothing was overwritten since the checkpoint."""
    places = []
    position, sequence = checkpoint.head, checkpoint.min_seq
    if not is_whole and kept:
        position, sequence = kept[0].start, kept[0].first
    for run in kept:
        expected = max(sequence, run.first // STRIDE * STRIDE)
        if run.first > expected:
            places.append(Damage(position, run.start - position, expected, run.first - 1))
        position, sequence = run.end, run.last + 1
    if checkpoint.next_seq > sequence and position < tail:
        places.append(Damage(position, tail - position, sequence, checkpoint.next_seq - 1))
    return places


def apply(memory: Memory, found: Findings) -> None:
    """Erase the leftovers, and store the findings in the control block. It is not trusted before the epoch marks it as true."""
    survey = memory.survey()
    for run in found.rejected:
        survey.erase(run.start, run.end, found.state.min_seq)
    for run, end in zip(found.kept, [*(run.start for run in found.kept[1:]), found.state.tail], strict=False):
        survey.cut(run.end, end, found.state.min_seq)
    words = memory.control.cast("Q")
    state = found.state
    values = [(frames.MIN_SEQ, state.min_seq), (frames.HEAD, state.head)]
    for mark in (frames.MARKS, frames.MARKS + frames.MARK_WORDS):
        values += [(mark, state.tail), (mark + 1, state.next_seq), (mark + 2, state.timestamp)]
    values += [(frames.PENDING, 0), (frames.TAIL, state.tail), (format.SYNCED_SEQ, state.next_seq), (format.SYNCED, state.tail)]
    for at, value in values:
        if words[at] != value:
            words[at] = value
    survey.clear_index()
    for run in found.kept:
        survey.enter_run(run.start, run.end)
    _place_readers(memory, survey, found)
    survey.close()


def _place_readers(memory: Memory, survey: FrameSurvey, found: Findings) -> None:
    """Update each durable reader's commit with the new position of its next record; its sequence stays."""
    all_slots = slots.Slots(memory.control, memory.header.log_id)
    for slot in all_slots.taken():
        commit = slot.newest()
        if commit is None or commit.sequence > found.state.next_seq:
            continue  # damaged: the operator has to decide
        position = _place_of(survey, found, commit.sequence)
        if position != commit.position:
            slot.replace(position)
    all_slots.announce()


def _place_of(survey: FrameSurvey, found: Findings, sequence: int) -> int:
    """Return the position of a reader that expects this sequence: its frame, or else the position after the previous one."""
    place = found.state.head
    for run in found.kept:
        if sequence <= run.last:
            return survey.place_of(run.start, run.end, sequence) if sequence >= run.first else place
        place = run.end
    return found.state.tail if sequence >= found.state.next_seq else place


def recover(memory: Memory, boot_id: bytes, now: int, *, is_forced: bool = False, echo: int | None = None) -> Findings | None:
    """Make the control block true in this boot of the machine; None if only the end of an interrupted recovery was left to do.

    Call it under the admin, sync, key and append locks. `is_forced`: from the beginning, whatever the epoch says. echo: see `examine`.
    Raises the system's OSError; the log is poisoned then.
    """
    with poisoning(memory):
        return _recover(memory, boot_id, now, is_forced, echo)


@contextmanager
def poisoning(memory: Memory) -> Iterator[None]:
    """Poison the log if the `with` block fails, so that the next recovery or repair doesn't rely on its flushes."""
    try:
        yield
    except OSError as error:
        memory.control.cast("Q")[frames.SYNC_ERROR] = error.errno or errno.EIO
        raise


def _recover(memory: Memory, boot_id: bytes, now: int, is_forced: bool, echo: int | None) -> Findings | None:
    log_id = memory.header.log_id
    before = epochs.newest(memory.control, log_id)
    found = None
    is_anew = is_forced or memory.control.cast("Q")[frames.SYNC_ERROR] != 0
    is_sealed = not is_forced and before is not None and before[1].state == format.SEALED and before[1].boot_id == boot_id
    if not is_sealed:
        may_be_older = is_forced or restored.is_behind(memory.front, memory.control)
        found = examine(memory, echo)
        if may_be_older:
            lost_keys.close_table(memory, found.kept)
        apply(memory, found)
        memory.account(found.kept, is_forced=is_forced)
    if is_anew:
        memory.rewrite()
    if is_anew or not is_sealed:
        memory.flush_data()
    if found is not None:
        slot, count = (0, 0) if before is None else (1 - before[0], before[1].recoveries)
        epoch = format.Epoch(boot_id, found.state.next_seq, now, count + 1, found.cut_records, found.cut_bytes, format.SEALED, 0)
        epochs.store(memory.control, log_id, slot, epoch)
    else:
        assert before is not None
        slot, epoch = before
    memory.flush_control()
    _write_checkpoint(memory, boot_id, is_anew=is_anew)
    # From now on the numbers of this epoch may be assigned, so it must be on disk before any process can get one.
    memory.flush_data()
    words = memory.control.cast("Q")
    words[frames.SYNC_ERROR] = 0
    restored.put_right(memory)
    epochs.store(memory.control, log_id, slot, epoch._replace(state=format.TRUE))
    return found


def _write_checkpoint(memory: Memory, boot_id: bytes, *, is_anew: bool) -> None:
    """Overwrite the older checkpoint with the state of the control block, unless the newer one has it already, and is on disk."""
    words = memory.control.cast("Q")
    mark = frames.MARKS
    state = checkpoints.State(words[frames.HEAD], words[frames.MIN_SEQ], words[mark], words[mark + 1], words[mark + 2])
    newest = checkpoints.newest(memory.front, memory.header)[1]
    if is_anew or newest[1:7] != (*state, state.tail):  # the ring is on disk
        at, raw = checkpoints.successor(memory.front, memory.header, state, state.tail, boot_id)
        memory.write_front(raw, at)


def report(path: str, found: Findings, now: int) -> RecoveryReport:
    """Return the report of the findings."""
    kept, state = found.kept, found.state
    return RecoveryReport(
        path=path,
        case=found.case.name,
        recovered=now,
        checkpoint=found.checkpoint,
        head=state.head,
        tail=state.tail,
        records=sum(run.frames for run in kept),
        first_sequence=state.min_seq,
        last_sequence=kept[-1].last if kept else state.next_seq - 1,
        next_sequence=state.next_seq,
        damaged_records=sum(place.count for place in found.damaged),
        damaged=found.damaged[:MOST_PLACES],
        cut_records=found.cut_records,
        cut_bytes=found.cut_bytes,
        erased_records=sum(run.frames for run in found.rejected),
    )


class Files:
    """The memory of an open pair."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self.front = pair.front
        self.ring = pair.map_ring()
        self.control = pair.control
        self.header = pair.header

    def survey(self) -> FrameSurvey:
        return self._pair.survey(self.ring)

    def write_front(self, data: bytes, at: int) -> None:
        system.port.write(self._pair.data_fd, data, at)

    def reader(self, position: int, sequence: int) -> FrameReader:
        return self._pair.reader(position, sequence)

    def ring_reader(self) -> FrameReader:
        """Return a reader of the ring alone, which trusts no word of the control block."""
        return FrameReader(self.ring, memoryview(bytes(len(self.control))), self._pair.seed, 0, 0)

    def rewrite(self) -> None:
        """Let the kernel write every page of the ring and of the control block again."""
        touch(self.ring)
        touch(self.control)

    def flush_data(self) -> None:
        system.port.flush_data(self._pair.data_fd)

    def flush_control(self) -> None:
        system.port.flush_data(self._pair.control_fd)

    def account(self, kept: list[Run], *, is_forced: bool) -> None:
        """Remove records that are not kept from the producers' accounts, on disk."""

        def there(first: int, count: int) -> list[tuple[int, int]]:
            oldest = kept[0].first if kept else first
            before = [(first, min(first + count, oldest) - first)] if first < oldest else []  # overwritten since, by kept records
            parts = ((max(first, run.first), min(first + count, run.last + 1)) for run in kept)
            return before + [(begin, end - begin) for begin, end in parts if begin < end]

        ledger.restarted(self._pair.path, self._pair.origin, there, is_forced=is_forced)


def touch(view: memoryview) -> None:
    """Rewrite the first byte of each page, so that the kernel writes the page again. Stores to these bytes need one of our locks."""
    for at in range(0, len(view), mmap.PAGESIZE):
        view[at] = view[at]


@contextmanager
def exclusively(pair: Pair, timeout: float) -> Iterator[None]:
    """Hold every lock that recovery and repair need, in the common order, for the `with` block."""
    with (
        locks.held(pair.lock, format.ADMIN_LOCK, timeout, lambda: f"{pair.path} is being recovered or maintained by another process"),
        locks.held(pair.lock, format.SYNC_LOCK, timeout, lambda: f"{pair.path} is being flushed by another process"),
        locks.held(pair.lock, format.KEYS_LOCK, timeout, lambda: f"{pair.path}: another process adds keys"),
        locks.appending(pair.append_lock, timeout, lambda: f"{pair.path} is locked by another process"),
    ):
        yield


def settle(pair: Pair, timeout: float) -> RecoveryReport | None:
    """Ensure that the pair's control block is true: recover the log if it is not. Every opener does this first.

    Returns the report if anything was to be done. Raises Unrecovered without write permission; LockTimeout if another process's recovery
    takes longer than `timeout` seconds; Poisoned if the disk fails.
    """
    boot_id = system.port.boot_id()
    if is_true(pair, boot_id):
        return None
    if not pair.is_writable:
        is_behind = restored.is_behind(pair.front, pair.control)
        why = f"{format.CONTROL_FILE} is an older copy" if is_behind else "the machine was restarted since the log was written"
        raise Unrecovered(f"{pair.path}: {why}; let a user with write permission open it once") from pair.refusal("recover")
    with exclusively(pair, timeout):
        return None if is_true(pair, boot_id) else recover_files(pair, boot_id)


def is_true(pair: Pair, boot_id: bytes) -> bool:
    """Return whether the control block can be trusted in the boot with this id."""
    return epochs.is_true(pair.control, pair.header.log_id, boot_id) and not restored.is_behind(pair.front, pair.control)


def recover_untrue(memory: Memory, boot_id: bytes, now: int) -> Findings | None:
    """Recover the log if its control block is of another boot of the machine, or an older copy; None if there was nothing to do."""
    echo = newer_end(memory, boot_id)
    if echo is None and is_epoch_true(memory, boot_id):
        return None
    return recover(memory, boot_id, now, is_forced=echo is not None, echo=echo)


def newer_end(memory: Memory, boot_id: bytes) -> int | None:
    """Return the end of the ring if the control block is of this boot of the machine, but an older copy; None otherwise."""
    is_behind = is_epoch_true(memory, boot_id) and restored.is_behind(memory.front, memory.control)
    return restored.confirm(memory) if is_behind else None


def is_epoch_true(memory: Memory, boot_id: bytes) -> bool:
    """Return whether the control block was made true in the boot with this id."""
    return epochs.is_true(memory.control, memory.header.log_id, boot_id)


def recover_files(
    pair: Pair, boot_id: bytes, work: Callable[[Memory, bytes, int], Findings | None] = recover_untrue
) -> RecoveryReport | None:
    """Under all locks: recover the log by `work`, and log that; None if there was nothing to do.

    Raises Poisoned if the disk fails.
    """
    now = system.port.now()
    try:
        found = work(Files(pair), boot_id, now)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise Poisoned(f"{pair.path}: a flush to disk failed during recovery ({error}); salvage copies its records") from error
        raise
    if found is None:
        return None
    done = report(str(pair.path), found, now)
    say = logger.warn if done.cut_records or done.damaged_records else logger.inform
    say("%s", done)
    return done
