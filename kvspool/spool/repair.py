"""Put a log in order on a person's word: after a flush that failed, or when its control block is damaged.

**What it does.** Under all locks it looks whether the control block says where the log ends; if not, the log is recovered from its frames
as after a crash of the machine. Every page of both files is rewritten to disk: after a flush that failed the kernel takes
them for written, and a flush of its own would report success that never was. Only when that has succeeded is a checkpoint written that
speaks of it, and only when that is on disk is the log free of its `sync_error`, and takes records again. So after a crash of the machine
at any moment, a recovery finds the state before the repair, or all of the repair.

**Killed**, it leaves a poisoned log, and can be run again: before it changes a control block it poisons the log.

**What it doesn't do.** No damaged byte is changed, and a record that is damaged stays a Gap. No sound record is discarded while the control
block says where the log ends. If it doesn't, the frames decide as after a crash of the machine: no synced record is discarded then.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvspool import system
from kvspool.errors import Corruption
from kvspool.kernel import frames_py as frames
from kvspool.spool import checkpoints, recovery, verify
from kvspool.spool.memory import Memory
from kvspool.spool.pair import Pair

if TYPE_CHECKING:
    from kvspool.kernel.frames_py import FrameReader

TIMEOUT = 10.0  # seconds that a repair waits for each lock


class RepairReport(msgspec.Struct, frozen=True):
    """What a repair did.

    sync_error: errno of the flush that had failed, 0 if none had. recovery: the report, if the control block had to be made anew.
    verify: what was found afterwards.
    """

    path: str
    sync_error: int
    recovery: recovery.RecoveryReport | None
    verify: verify.VerifyReport


def repair(path: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> RepairReport:
    """Put the log at `path` in order, and let it take records again. Everything that it holds is on disk when the call returns.

    timeout: seconds to wait for each lock. Raises LockTimeout while a writer holds the log; Poisoned if the disk still fails: then the log
    stays as it was, and `salvage` copies what it holds. LogNotFound, FormatError, Corruption where not even the headers are sound: only
    `salvage` helps then. PermissionError where one may only read.
    """
    pair = Pair(Path(os.path.abspath(path)))
    try:
        if not pair.is_writable:
            raise pair.refusal("repair")
        with recovery.exclusively(pair, timeout):
            boot_id = system.port.boot_id()
            failed = pair.control.cast("Q")[frames.SYNC_ERROR]
            done = recovery.recover_files(pair, boot_id, mend)
            return RepairReport(str(pair.path), failed, done, verify.verify_pair(pair))
    finally:
        pair.close()


def mend(memory: Memory, boot_id: bytes, now: int) -> recovery.Findings | None:
    """Under all locks: repair the log; return the findings if the control block had to be recreated.

    Raises the system's OSError; the log is poisoned then.
    """
    echo = recovery.newer_end(memory, boot_id)
    if echo is None and recovery.is_epoch_true(memory, boot_id) and _makes_sense(memory.reader(0, 0)):
        with recovery.poisoning(memory):
            _write_anew(memory, boot_id)
        return None
    words = memory.control.cast("Q")
    words[frames.SYNC_ERROR] = words[frames.SYNC_ERROR] or errno.EIO  # open handles must not append to a log that is half recovered
    return recovery.recover(memory, boot_id, now, is_forced=True, echo=echo)


def _makes_sense(reader: FrameReader) -> bool:
    """Return whether the words of the control block can be true: there is a mark for the tail, and the oldest frame is where they say."""
    try:
        tail, next_sequence, _ = reader.mark()
    except Corruption:
        return False
    head, least = reader.word(frames.HEAD), reader.word(frames.MIN_SEQ)
    if head & 7 or not head <= tail <= head + reader.capacity or least > next_sequence:
        return False
    # A writer that was killed may have stored a larger `min_seq` and not the head that belongs to it.
    if head < tail and not reader.sequence_at(head, tail) <= least:
        return False
    return bool(reader.find_frame(head, tail, next_sequence, frames.NOTHING) == tail)


def _write_anew(memory: Memory, boot_id: bytes) -> None:
    """Under all locks: put every page on disk, then a checkpoint that says so, then forget the flush that failed."""
    words = memory.control.cast("Q")
    state = checkpoints.state(memory.reader(0, 0))
    memory.rewrite()
    memory.flush_data()
    at, raw = checkpoints.successor(memory.front, memory.header, state, state.tail, boot_id)
    memory.write_front(raw, at)
    memory.flush_data()
    memory.flush_control()
    checkpoints.announce(memory.control, state)
    words[frames.SYNC_ERROR] = 0
