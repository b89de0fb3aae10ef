"""Repair a log on an operator's request: after a failed flush, or with a damaged control block.

**Steps.** Under all locks it checks whether the control block gives the end of the log; if not, the log is recovered from its frames
as after a crash of the machine. Every page of both files is rewritten to disk: after a failed flush the kernel treats them as written, and
another flush would report a false success. Only when that has succeeded is a checkpoint written. Only when the checkpoint is on disk is the
`sync_error` reset, and the log takes records again. So after a crash of the machine at any moment, a recovery finds the state before the
repair, or the whole repair.

**Killed**, it leaves a poisoned log, and can be repeated: before it changes a control block it poisons the log.

**Limits.** No damaged byte is changed, and a damaged record stays a Gap. No sound record is discarded while the control block
gives the end of the log. If it doesn't, the frames decide as after a crash of the machine: no synced record is discarded then.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.engine.reports import RepairReport
from kvspool.errors import Corruption
from kvspool.kernel import frames_py as frames
from kvspool.spool import checkpoints, recovery, verify
from kvspool.spool.findings import Findings
from kvspool.spool.memory import Memory
from kvspool.spool.spool_files import SpoolFiles

if TYPE_CHECKING:
    from kvspool.kernel.frames import FrameReader

TIMEOUT = 10.0  # seconds that a repair waits for each lock


def repair(path: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> RepairReport:
    """Repair the log at `path`, and let it take records again. All of it is on disk when the call returns.

    timeout: seconds to wait for each lock. Raises LockTimeout while a writer holds the log; Poisoned if the disk still fails: then the log
    is unchanged, and `salvage` copies its records. LogNotFound, FormatError, Corruption if not even the headers are sound: then only
    `salvage` helps. PermissionError without write permission.
    """
    files = SpoolFiles(Path(os.path.abspath(path)))
    try:
        if not files.is_writable:
            raise files.refusal("repair")
        with recovery.exclusively(files, timeout):
            boot_id = system.port.boot_id()
            failed = files.control.cast("Q")[frames.SYNC_ERROR]
            done = recovery.recover_files(files, boot_id, mend)
            return RepairReport(path=str(files.path), sync_error=failed, recovery=done, verify=verify.verify_files(files))
    finally:
        files.close()


def mend(memory: Memory, boot_id: bytes, now: int) -> Findings | None:
    """Under all locks: repair the log; return the findings if the control block had to be recreated.

    Raises the system's OSError; the log is poisoned then.
    """
    echo = recovery.newer_end(memory, boot_id)
    if echo is None and recovery.is_epoch_true(memory, boot_id) and _makes_sense(memory.reader(0, 0)):
        with recovery.poisoning(memory):
            _rewrite(memory, boot_id)
        return None
    words = memory.control.cast("Q")
    words[frames.SYNC_ERROR] = words[frames.SYNC_ERROR] or errno.EIO  # open handles must not append to a half-recovered log
    return recovery.recover(memory, boot_id, now, is_forced=True, echo=echo)


def _makes_sense(reader: FrameReader) -> bool:
    """Return whether the words of the control block are possible: there is a mark for the tail, and the oldest frame is where they say."""
    try:
        tail, next_sequence, _ = reader.mark()
    except Corruption:
        return False
    head, least = reader.word(frames.HEAD), reader.word(frames.MIN_SEQ)
    if head & 7 or not head <= tail <= head + reader.capacity or least > next_sequence:
        return False
    # A killed writer may have stored a larger `min_seq` without its head.
    if head < tail and not reader.sequence_at(head, tail) <= least:
        return False
    return bool(reader.find_frame(head, tail, next_sequence, frames.NOTHING) == tail)


def _rewrite(memory: Memory, boot_id: bytes) -> None:
    """Under all locks: flush every page, then a checkpoint, then reset the error of the failed flush."""
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
