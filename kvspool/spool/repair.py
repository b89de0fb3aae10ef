"""Put a log in order on a person's word: after a flush that failed, or when its control block is damaged.

**What it does.** Under all locks it looks whether the control block says where the log ends; if not, the log is recovered from its frames
as after a crash of the machine. Then every page of both files is written to disk anew: after a flush that failed the kernel takes
them for written, and a flush of its own would report success that never was. Only when that has succeeded is the log free of its
`sync_error`, and takes records again.

**What it doesn't do.** No sound record is discarded, no damaged byte changed. A record that is damaged stays a Gap.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvspool import _frames_py as frames
from kvspool import system
from kvspool.errors import Corruption, Poisoned
from kvspool.spool import checkpoints, format, recovery, verify
from kvspool.spool.pair import Pair

if TYPE_CHECKING:
    from kvspool._frames_py import FrameReader

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
            raise PermissionError(errno.EACCES, "no permission to repair this spool", os.fspath(pair.path))
        with recovery.exclusively(pair, timeout):
            boot_id = system.port.boot_id()
            failed = pair.control.cast("Q")[frames.SYNC_ERROR]
            done = None
            if not recovery.is_true(pair, boot_id) or not _makes_sense(pair.reader(0, 0)):
                done = recovery.recover_files(pair, boot_id, is_forced=True)
            _write_anew(pair, boot_id)
            return RepairReport(str(pair.path), failed, done, verify.verify_pair(pair))
    finally:
        pair.close()


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


def _write_anew(pair: Pair, boot_id: bytes) -> None:
    """Under all locks: let every page and a checkpoint go to disk, then forget the flush that failed."""
    words = pair.control.cast("Q")
    _touch(pair.map_ring())
    _touch(pair.control)
    state = checkpoints.state(pair.reader(0, 0))
    at, raw = checkpoints.successor(pair.front, pair.header, state, words[format.SYNCED], boot_id)
    try:
        system.port.write(pair.data_fd, raw, at)
        system.port.flush_data(pair.data_fd)
        system.port.flush_data(pair.control_fd)
    except OSError as error:
        words[frames.SYNC_ERROR] = error.errno or errno.EIO
        raise Poisoned(f"{pair.path}: the flush to disk failed again ({error}); salvage copies what the log holds") from error
    checkpoints.announce(pair.control, state)
    words[frames.SYNC_ERROR] = 0


def _touch(view: memoryview) -> None:
    """Store the first byte of each page as it is, so that the kernel writes the page again. What is stored there needs one of our locks."""
    for at in range(0, len(view), mmap.PAGESIZE):
        view[at] = view[at]
