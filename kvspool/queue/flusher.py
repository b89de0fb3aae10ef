"""Flush puts and gets of a queue to disk, with one flush for all waiting handles.

**On disk** must be, for an entry to survive a crash of the machine, its chunk's data and its references: the header, the names in the
directory, the references of the chunks before it. These are flushed once for each chunk by each handle (`is_rooted`).

**One flush for all.** The format has no field for the extent of the last flush, so the kernel's lock table holds it. A handle that has
flushed a chunk whose tail-ptr was t keeps a shared lock on the t + 1 bytes from FLUSHED_TAIL on. To know whether an entry that ends at u is
on disk, a handle tests for a lock on byte FLUSHED_TAIL + u. Such a lock stays true while the file exists. When its owner ends it is
released, which costs one more flush. A flushing handle holds the lock FLUSH; others wait meanwhile, and find their entries flushed by this
flush or the next.

**Errors.** The kernel reports a failure once and then treats the pages as clean, so a handle whose flush failed puts nothing more.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import LockTimeout, Poisoned
from kvspool.kernel import chunks_py as loops
from kvspool.kernel import pointers
from kvspool.queue import format
from kvspool.queue.chain import Chain
from kvspool.queue.chunk import Chunk
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle


class QueueFlusher(Handle):
    """Flushes a queue for one handle; all of its threads may use it."""

    def __init__(self, path: Path, held: Callable[[], AbstractContextManager[Chain]]) -> None:
        """`held` returns the chain, under the lock OPERATION."""
        self.path = path
        self.error = 0
        self._held = held
        self._turn = threading.Lock()

    def refuse_poisoned(self) -> None:
        """Raise Poisoned if a flush of this handle has failed."""
        if self.error:
            raise Poisoned(f"{self.path}: an earlier flush to disk failed: {os.strerror(self.error)}; move its entries to a working disk")

    def flush_file(self, fd: int) -> None:
        """Flush a file. A failure poisons the handle."""
        self.refuse_poisoned()
        try:
            system.port.flush_data(fd)
        except OSError as error:
            self.error = error.errno or errno.EIO
            raise Poisoned(f"{self.path}: the flush to disk failed ({error}); this handle puts nothing more") from error

    # One chunk.

    def reach(self, chunk: Chunk, head: int, tail: int, timeout: float) -> None:
        """Return when the chunk is on disk up to a head-ptr and a tail-ptr that it had, whichever handle flushed it; -1: ignore that one.

        Raises Poisoned, LockTimeout.
        """
        if not self._turn.acquire(timeout=timeout):
            raise LockTimeout(f"{self.path}: another thread is still flushing")
        try:
            locks.wait_for(
                lambda: self._attempt(chunk, head, tail), timeout, lambda: f"another process is still flushing {chunk.path}"
            )
        finally:
            self._turn.release()

    def _attempt(self, chunk: Chunk, head: int, tail: int) -> bool | None:
        if _is_reached(chunk, head, tail):
            return True
        try:
            if not system.port.try_lock(chunk.fd, format.FLUSH):
                return None
            if not _is_reached(chunk, head, tail):
                self._flush_chunk(chunk)
            return True
        finally:
            system.port.unlock(chunk.fd, format.FLUSH)

    def _flush_chunk(self, chunk: Chunk) -> None:
        if not chunk.is_rooted:
            self._root(chunk)
        tail = pointers.pointer(chunk.view, loops.TAIL)
        head = pointers.pointer(chunk.view, loops.HEAD)
        self.flush_file(chunk.fd)
        chunk.flushed_head, chunk.flushed_tail = max(head, chunk.flushed_head), max(tail, chunk.flushed_tail)
        with suppress(OSError):  # the kernel's lock table is full: other handles flush for themselves
            system.port.try_share(chunk.fd, format.FLUSHED_HEAD, head + 1)
            system.port.try_share(chunk.fd, format.FLUSHED_TAIL, tail + 1)

    def _root(self, chunk: Chunk) -> None:
        """Flush the references from the header to a chunk."""
        with self._held() as chain:
            fd, ids = chain.fd, list(chain.ids)
        for id in ids:
            if id == chunk.id:
                break
            self._flush_path(format.chunk_path(self.path, id))
        disk.flush_directory(self.path.parent)
        self.flush_file(fd)
        chunk.is_rooted = True

    # The whole queue.

    def sync(self, timeout: float) -> None:
        """Flush all puts and gets so far. Raises Poisoned, LockTimeout, and the errors of opening the chain."""
        if not self._turn.acquire(timeout=timeout):
            raise LockTimeout(f"{self.path}: another thread is still flushing")
        try:
            with self._held() as chain:
                fd, ids = chain.fd, list(chain.ids)
            for id in ids:
                self._flush_path(format.chunk_path(self.path, id))
            disk.flush_directory(self.path.parent)
            self.flush_file(fd)
        finally:
            self._turn.release()

    def flush(self, timeout: float) -> None:
        """Do what `sync` does, at an interval."""
        self.sync(timeout)

    def _flush_path(self, file: Path) -> None:
        with suppress(FileNotFoundError):  # all of it was taken meanwhile
            with Descriptor(file, os.O_RDWR) as fd:
                self.flush_file(fd)


def _is_reached(chunk: Chunk, head: int, tail: int) -> bool:
    return _has_gone(chunk, head, chunk.flushed_head, format.FLUSHED_HEAD) and _has_gone(
        chunk, tail, chunk.flushed_tail, format.FLUSHED_TAIL
    )


def _has_gone(chunk: Chunk, offset: int, ours: int, marks: int) -> bool:
    """Return whether a pointer is on disk, according to our own flushes or to the locks of other handles."""
    return offset <= ours or system.port.locked_from(chunk.fd, marks + offset, 1) >= 0
