"""Verify a queue, and repair it on an operator's request, whatever damaged it.

**Repairs.** Impossible pointers are recomputed from the entries. An entry that ends after the tail-ptr is cut off, with the bytes
after it. A dangling or circular reference is set to the chunk with the next id if nothing else refers to it, and ends the chain otherwise.
If the header's reference is dangling, the chain begins at the chunk to which none refers. At last everything is rewritten and flushed.

**Limits.** No file that has entries is removed: one that can't be part of the chain is renamed to `<name>.<id>.lost`. It can't
detect damage for which the format has no field: an entry whose bytes were changed stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import LogNotFound, NotAFile, NotALog
from kvspool.kernel import chunks_py as loops
from kvspool.kernel.chunks import count
from kvspool.queue import format, header
from kvspool.queue.format import ChunkHead
from kvspool.queue.scan import Found, QueueScan, QueueVerifyReport
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

TIMEOUT = 10.0  # seconds to wait for a lock
PIECE = 1 << 20  # bytes written at once


class QueueRepairReport(msgspec.Struct, frozen=True):
    """The actions of a repair, in words; set_aside: files that were renamed, since they don't fit into the chain; verify: the state
    afterwards.
    """

    path: str
    done: list[str]
    set_aside: list[str]
    verify: QueueVerifyReport


def verify(path: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> QueueVerifyReport:
    """Check every file of the queue at `path`; others wait meanwhile. Raises LogNotFound, NotALog, LockTimeout, the system's OSError."""
    target = Path(os.path.abspath(path))
    with _opened(target, timeout, alone=False) as fd:
        return QueueScan(target, fd).report()


def repair(path: str | os.PathLike[str], *, timeout: float = TIMEOUT) -> QueueRepairReport:
    """Repair the queue at `path`. All of it is on disk when the call returns; after a crash, repeat it.

    Raises LockTimeout while another process has the queue open; LogNotFound, NotALog, or the system's OSError.
    """
    target = Path(os.path.abspath(path))
    with _opened(target, timeout, alone=True) as fd:
        work = _Repair(target, fd)
        work.go()
        return QueueRepairReport(str(target), work.done, work.set_aside, QueueScan(target, fd).report())


@contextmanager
def _opened(path: Path, timeout: float, *, alone: bool) -> Iterator[int]:
    """Return the header's descriptor, under the lock OPERATION, and without any other user if `alone`. It may have any content."""
    try:
        file = Descriptor(path, os.O_RDWR)
    except FileNotFoundError as error:
        raise LogNotFound(f"{path} does not exist") from error
    except NotAFile as error:
        raise NotALog(str(error)) from None
    process = system.port.process_id()
    try:
        fd = file.number
        if system.port.status(fd).st_size > format.HEADER.size:
            raise NotALog(f"{path} is not a queue: its header is a file of {format.HEADER.size} bytes")
        if alone:
            locks.acquire(fd, format.IN_USE, timeout, lambda: f"{header.holder(fd, path)}; every handle of it must be closed first")
        else:
            locks.wait_for(lambda: system.port.try_share(fd, format.IN_USE, 1) or None, timeout, lambda: header.holder(fd, path))
        locks.acquire(fd, format.OPERATION, timeout, lambda: header.holder(fd, path))
        yield fd
    finally:
        locks.give_back(file, process)


class _Repair(Handle):
    """One repair. It changes each file in an order in which every state can be repaired again."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.done: list[str] = []
        self.set_aside: list[str] = []

    def go(self) -> None:
        for found in QueueScan(self.path, self.fd).found.values():
            if not found.is_chunk:
                self._remove(found) if found.is_empty else self._put_aside(found)
            elif found.is_chunk and found.problem:
                self._set_pointers(found)
        scan = QueueScan(self.path, self.fd)
        while scan.broken or scan.first < 0 or (not scan.chain and any(not found.is_empty for found in scan.leftovers)):
            self._lead_on(scan)
            scan = QueueScan(self.path, self.fd)
        for found in scan.leftovers:
            self._remove(found) if found.is_empty else self._put_aside(found)
        self._flush(scan)

    def _set_pointers(self, found: Found) -> None:
        """Set the pointers of a chunk according to its entries."""
        head, tail, next_ref = found.state
        is_head_true = loops.FIRST_ENTRY <= head <= found.size and (head <= tail or not loops.FIRST_ENTRY <= tail <= found.size)
        is_tail_true = loops.FIRST_ENTRY <= tail <= found.size
        head = head if is_head_true else loops.FIRST_ENTRY
        tail = self._end_of(found, head, tail if is_tail_true else found.size, is_guess=not is_tail_true)
        self._write(found, ChunkHead(head, tail, next_ref))
        self.done.append(f"{found.path}: {found.problem}; its entries are now from {head} to {tail}")

    def _end_of(self, found: Found, head: int, tail: int, *, is_guess: bool) -> int:
        """Return the end of the last whole entry before `tail`; a guess ends at the first entry of no bytes, which is how unused bytes
        look.
        """
        data = disk.read(found.path, tail - head, head)
        if not is_guess:
            return head + count(memoryview(data + b"\0"), 0, len(data))[1]
        at = 0
        while len(data) - at >= loops.PREFIX:
            length = int.from_bytes(data[at : at + loops.PREFIX], "big")
            if not length or length > len(data) - at - loops.PREFIX:
                break
            at += loops.PREFIX + length
        return head + at

    def _lead_on(self, scan: QueueScan) -> None:
        """Fix the reference at which the chain breaks."""
        leftovers = {found.id: found for found in scan.leftovers}
        referred = {found.state.next_ref for found in scan.found.values()}
        if not scan.chain:
            first = _beginning(leftovers, referred)
            system.port.write(self.fd, format.HEADER.pack(format.QueueHeader(first)), 0)
            self.done.append(
                f"{self.path}: the header's reference was dangling; the first chunk is now {first}" if first else f"{self.path}: empty"
            )
            return
        last = scan.chain[-1]
        following = format.following(last.id)
        next_ref = following if following in leftovers and following not in referred - {last.state.next_ref} else 0
        self._write(last, last.state._replace(next_ref=next_ref))
        self.done.append(
            f"{last.path}: {scan.problems[-1]}; " + (f"its next chunk is now {next_ref}" if next_ref else "the chain now ends there")
        )

    def _write(self, found: Found, state: ChunkHead) -> None:
        with Descriptor(found.path, os.O_RDWR) as fd:
            system.port.write(fd, format.CHUNK_HEAD.pack(state), 0)
            system.port.flush(fd)

    def _remove(self, found: Found) -> None:
        system.port.remove(found.path)
        self.done.append(f"removed {found.path}, which was empty")

    def _put_aside(self, found: Found) -> None:
        target = found.path.with_name(f"{found.path.name}.lost")
        number = 1
        while os.path.lexists(target):
            number += 1
            target = found.path.with_name(f"{found.path.name}.lost{number}")
        system.port.rename(found.path, target)
        self.set_aside.append(str(target))
        self.done.append(f"{found.path} is not part of the chain; it was renamed to {target.name}")

    def _flush(self, scan: QueueScan) -> None:
        for found in scan.chain:
            with Descriptor(found.path, os.O_RDWR) as fd:
                _rewrite(fd, found.size)
        _rewrite(self.fd, format.HEADER.size)
        disk.flush_directory(self.path.parent, done=f"{self.path} was repaired")


def _rewrite(fd: int, size: int) -> None:
    """Rewrite the bytes of a file and flush it: after a failed flush the kernel treats unwritten pages as written."""
    for at in range(0, size, PIECE):
        if data := system.port.read(fd, min(PIECE, size - at), at):
            system.port.write(fd, data, at)
    system.port.flush(fd)


def _beginning(leftovers: dict[int, Found], referred: set[int]) -> int:
    """Return the first chunk of a chain whose header is lost: one to which none refers; of several, the one with the longest chain."""
    best, longest = min(leftovers, default=0), 0
    for id in leftovers:
        if id in referred and format.preceding(id) in leftovers:
            continue
        length, at, seen = 0, id, set[int]()
        while at in leftovers and at not in seen:
            seen.add(at)
            length, at = length + 1, leftovers[at].state.next_ref
        if length > longest:
            best, longest = id, length
    return best
