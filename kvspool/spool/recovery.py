"""Restore the control block after a crash of the machine: `findings` determines from the frames what the log contains.

**A restored control block.** An older copy of spool.ctl with a newer spool.dat is the same case: the control block can't be trusted, the
frames can. Its epoch may name the present boot; then the echoes of tail and head in spool.dat reveal it, see `restored`. A pair that was
copied or restored together is consistent, and is used as it is.

**Leftovers are erased.** The first word of every sound frame that is not kept, although its sequence still counts, is set to 0: it was
dropped or never published, and must not be found again in a hole. The same is done to a damaged frame that would extend over kept frames: a
writer that makes room would skip those. Other damaged bytes stay as they are. After that every sound frame from `min_seq` on is at its
position, as the next checkpoint states.

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
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.engine import locks, producer_table
from kvspool.engine.damage import MOST_PLACES
from kvspool.engine.reports import RecoveryReport
from kvspool.errors import Poisoned, Unrecovered
from kvspool.kernel import frames_py as frames
from kvspool.kernel.frames import FrameReader
from kvspool.spool import checkpoints, epochs, format, lost_keys, restored, slots
from kvspool.spool.findings import Findings, examine
from kvspool.spool.memory import FrameRun, Memory
from kvspool.system import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvspool.kernel.frames import FrameScanner
    from kvspool.spool.spool_files import SpoolFiles


def apply(memory: Memory, found: Findings) -> None:
    """Erase the leftovers, and store the findings in the control block. It is not trusted before the epoch marks it as true."""
    scanner = memory.scanner()
    for run in found.rejected:
        scanner.erase(run.start, run.end, found.state.min_seq)
    for run, end in zip(found.kept, [*(run.start for run in found.kept[1:]), found.state.tail], strict=False):
        scanner.cut(run.end, end, found.state.min_seq)
    words = memory.control.cast("Q")
    state = found.state
    values = [(frames.MIN_SEQ, state.min_seq), (frames.HEAD, state.head)]
    for mark in (frames.MARKS, frames.MARKS + frames.MARK_WORDS):
        values += [(mark, state.tail), (mark + 1, state.next_seq), (mark + 2, state.timestamp)]
    values += [(frames.PENDING, 0), (frames.TAIL, state.tail), (format.SYNCED_SEQ, state.next_seq), (format.SYNCED, state.tail)]
    for at, value in values:
        if words[at] != value:
            words[at] = value
    scanner.clear_index()
    for run in found.kept:
        scanner.enter_run(run.start, run.end)
    _place_readers(memory, scanner, found)
    scanner.close()


def _place_readers(memory: Memory, scanner: FrameScanner, found: Findings) -> None:
    """Update each durable reader's commit with the new position of its next record; its sequence stays."""
    all_slots = slots.Slots(memory.control, memory.header.log_id)
    for slot in all_slots.taken():
        commit = slot.newest()
        if commit is None or commit.sequence > found.state.next_seq:
            continue  # damaged: the operator has to decide
        position = _place_of(scanner, found, commit.sequence)
        if position != commit.position:
            slot.replace(position)
    all_slots.announce()


def _place_of(scanner: FrameScanner, found: Findings, sequence: int) -> int:
    """Return the position of a reader that expects this sequence: its frame, or else the position after the previous one."""
    place = found.state.head
    for run in found.kept:
        if sequence <= run.last:
            return scanner.place_of(run.start, run.end, sequence) if sequence >= run.first else place
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
    is_rewritten = is_forced or memory.control.cast("Q")[frames.SYNC_ERROR] != 0
    is_sealed = not is_forced and before is not None and before[1].state == format.SEALED and before[1].boot_id == boot_id
    if not is_sealed:
        may_be_older = is_forced or restored.is_older(memory.front, memory.control)
        found = examine(memory, echo)
        if may_be_older:
            lost_keys.close_table(memory, found.kept)
        apply(memory, found)
        memory.update_producers(found.kept, is_forced=is_forced)
    if is_rewritten:
        memory.rewrite()
    if is_rewritten or not is_sealed:
        memory.flush_data()
    if found is not None:
        slot, count = (0, 0) if before is None else (1 - before[0], before[1].recoveries)
        epoch = format.Epoch(boot_id, found.state.next_seq, now, count + 1, found.cut_records, found.cut_bytes, format.SEALED, 0)
        epochs.store(memory.control, log_id, slot, epoch)
    else:
        assert before is not None
        slot, epoch = before
    memory.flush_control()
    _write_checkpoint(memory, boot_id, is_rewritten=is_rewritten)
    # From now on the numbers of this epoch may be assigned, so it must be on disk before any process can get one.
    memory.flush_data()
    words = memory.control.cast("Q")
    words[frames.SYNC_ERROR] = 0
    restored.put_right(memory)
    epochs.store(memory.control, log_id, slot, epoch._replace(state=format.TRUE))
    return found


def _write_checkpoint(memory: Memory, boot_id: bytes, *, is_rewritten: bool) -> None:
    """Overwrite the older checkpoint with the state of the control block, unless the newer one has it already, and is on disk."""
    words = memory.control.cast("Q")
    mark = frames.MARKS
    state = checkpoints.State(words[frames.HEAD], words[frames.MIN_SEQ], words[mark], words[mark + 1], words[mark + 2])
    newest = checkpoints.newest(memory.front, memory.header)[1]
    if is_rewritten or newest[1:7] != (*state, state.tail):  # the ring is on disk
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


class FilesMemory:
    """The memory of an open pair."""

    def __init__(self, files: SpoolFiles) -> None:
        self._files = files
        self.front = files.front
        self.ring = files.map_ring()
        self.control = files.control
        self.header = files.header

    def scanner(self) -> FrameScanner:
        return self._files.scanner(self.ring)

    def write_front(self, data: bytes, at: int) -> None:
        system.port.write(self._files.data_fd, data, at)

    def reader(self, position: int, sequence: int) -> FrameReader:
        return self._files.reader(position, sequence)

    def ring_reader(self) -> FrameReader:
        """Return a reader of the ring alone, which trusts no word of the control block."""
        return FrameReader(self.ring, memoryview(bytes(len(self.control))), self._files.seed, 0, 0)

    def rewrite(self) -> None:
        """Let the kernel write every page of the ring and of the control block again."""
        touch(self.ring)
        touch(self.control)

    def flush_data(self) -> None:
        system.port.flush_data(self._files.data_fd)

    def flush_control(self) -> None:
        system.port.flush_data(self._files.control_fd)

    def update_producers(self, kept: list[FrameRun], *, is_forced: bool) -> None:
        """Remove records that are not kept from the producers' states, on disk."""

        def there(first: int, count: int) -> list[tuple[int, int]]:
            oldest = kept[0].first if kept else first
            before = [(first, min(first + count, oldest) - first)] if first < oldest else []  # overwritten since, by kept records
            parts = ((max(first, run.first), min(first + count, run.last + 1)) for run in kept)
            return before + [(begin, end - begin) for begin, end in parts if begin < end]

        producer_table.restarted(self._files.path, self._files.origin, there, is_forced=is_forced)


def touch(view: memoryview) -> None:
    """Rewrite the first byte of each page, so that the kernel writes the page again. Stores to these bytes need one of our locks."""
    for at in range(0, len(view), mmap.PAGESIZE):
        view[at] = view[at]


@contextmanager
def exclusively(files: SpoolFiles, timeout: float) -> Iterator[None]:
    """Hold every lock that recovery and repair need, in the common order, for the `with` block. Raises LogVanished if the log has left
    its path by then.
    """
    with (
        locks.held(files.lock, format.ADMIN_LOCK, timeout, lambda: f"{files.path} is being recovered or maintained by another process"),
        locks.held(files.lock, format.SYNC_LOCK, timeout, lambda: f"{files.path} is being flushed by another process"),
        locks.held(files.lock, format.KEYS_LOCK, timeout, lambda: f"{files.path}: another process adds keys"),
        locks.appending(files.append_lock, timeout, lambda: f"{files.path} is locked by another process"),
    ):
        files.refuse_elsewhere()
        yield


def ensure_true(files: SpoolFiles, timeout: float) -> RecoveryReport | None:
    """Ensure that the pair's control block is true: recover the log if it is not. Every opener does this first.

    Returns the report if anything was to be done. Raises Unrecovered without write permission; LockTimeout if another process's recovery
    takes longer than `timeout` seconds; Poisoned if the disk fails. The files are closed after an error.
    """
    try:
        boot_id = system.port.boot_id()
        if is_true(files, boot_id):
            return None
        if not files.is_writable:
            is_older = restored.is_older(files.front, files.control)
            why = f"{format.CONTROL_FILE} is an older copy" if is_older else "the machine was restarted since the log was written"
            raise Unrecovered(f"{files.path}: {why}; let a user with write permission open it once") from files.refusal("recover")
        with exclusively(files, timeout):
            return None if is_true(files, boot_id) else recover_files(files, boot_id)
    except BaseException:
        files.close()
        raise


def is_true(files: SpoolFiles, boot_id: bytes) -> bool:
    """Return whether the control block can be trusted in the boot with this id."""
    return epochs.is_true(files.control, files.header.log_id, boot_id) and not restored.is_older(files.front, files.control)


def recover_untrue(memory: Memory, boot_id: bytes, now: int) -> Findings | None:
    """Recover the log if its control block is of another boot of the machine, or an older copy; None if there was nothing to do."""
    echo = newer_end(memory, boot_id)
    if echo is None and is_epoch_true(memory, boot_id):
        return None
    return recover(memory, boot_id, now, is_forced=echo is not None, echo=echo)


def newer_end(memory: Memory, boot_id: bytes) -> int | None:
    """Return the end of the ring if the control block is of this boot of the machine, but an older copy; None otherwise."""
    is_older = is_epoch_true(memory, boot_id) and restored.is_older(memory.front, memory.control)
    return restored.confirm(memory) if is_older else None


def is_epoch_true(memory: Memory, boot_id: bytes) -> bool:
    """Return whether the control block was made true in the boot with this id."""
    return epochs.is_true(memory.control, memory.header.log_id, boot_id)


def recover_files(
    files: SpoolFiles, boot_id: bytes, work: Callable[[Memory, bytes, int], Findings | None] = recover_untrue
) -> RecoveryReport | None:
    """Under all locks: recover the log by `work`, and log that; None if there was nothing to do.

    Raises Poisoned if the disk fails.
    """
    now = system.port.now()
    try:
        found = work(FilesMemory(files), boot_id, now)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise Poisoned(f"{files.path}: a flush to disk failed during recovery ({error}); salvage copies its records") from error
        raise
    if found is None:
        return None
    done = report(str(files.path), found, now)
    say = logger.warn if done.cut_records or done.damaged_records else logger.inform
    say("%s", done)
    return done
