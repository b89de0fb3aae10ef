"""How what was put, and what was taken, comes to the disk; and how one flush serves all who wait for one.

**What must be on disk** for an entry to be there after the death of the machine: its chunk's data, and what leads to it: the header, the
names in the directory, the references of the chunks in front. The latter are flushed once for each chunk by each handle (`is_rooted`).

**One flush for all.** The format has no place for a word that says how far the last flush went, so the kernel's table of locks is that
place. Who has flushed a chunk whose tail-ptr was t keeps a shared lock on the t + 1 bytes from FLUSHED_TAIL on; who wants his entry, which
ends at u, on disk looks whether somebody has locked byte FLUSHED_TAIL + u. What such a lock says stays true as long as the file lives, and
when its owner dies it is gone, which costs one flush more. Who flushes holds the lock of FLUSH; who comes meanwhile waits, and finds the
work done, by that one or by the next.

**Errors.** The kernel reports a failure once and then takes the pages for clean, so a handle whose flush failed puts nothing more.
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


class Flusher(Handle):
    """Puts a queue on disk for one handle; its threads may all use it."""

    def __init__(self, path: Path, held: Callable[[], AbstractContextManager[Chain]]) -> None:
        """`held` gives the chain, under the lock of OPERATION."""
        self.path = path
        self.error = 0
        self._held = held
        self._turn = threading.Lock()

    def refuse_poisoned(self) -> None:
        """Raise Poisoned if a flush of this handle has failed."""
        if self.error:
            raise Poisoned(f"{self.path}: a flush to disk failed before: {os.strerror(self.error)}; get what it holds to a sound disk")

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
        """Return when the chunk is on disk up to a head-ptr and a tail-ptr that it had, whoever put it there; -1: never mind that one.

        Raises Poisoned, LockTimeout.
        """
        if not self._turn.acquire(timeout=timeout):
            raise LockTimeout(f"{self.path}: another thread flushes, and is not done yet")
        try:
            locks.wait_for(
                lambda: self._attempt(chunk, head, tail), timeout, lambda: f"another process flushes {chunk.path}, and is not done yet"
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
        with suppress(OSError):  # no room in the kernel for one more lock: others flush for themselves
            system.port.try_share(chunk.fd, format.FLUSHED_HEAD, head + 1)
            system.port.try_share(chunk.fd, format.FLUSHED_TAIL, tail + 1)

    def _root(self, chunk: Chunk) -> None:
        """Put on disk what leads to a chunk from the header."""
        with self._held() as chain:
            fd, ids = chain.fd, list(chain.ids)
        for id in ids:
            if id == chunk.id:
                break
            self._flush_path(format.chunk_path(self.path, id))
        disk.flush_directory(self.path.parent)
        self.flush_file(fd)
        chunk.is_rooted = True

    # Everything.

    def sync(self, timeout: float) -> None:
        """Put everything that was put and taken so far on disk. Raises Poisoned, LockTimeout, and what opening the chain does."""
        if not self._turn.acquire(timeout=timeout):
            raise LockTimeout(f"{self.path}: another thread flushes, and is not done yet")
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
    """Return whether the disk has a pointer, by our own flushes or by what the table of locks says of others'."""
    return offset <= ours or system.port.locked_from(chunk.fd, marks + offset, 1) >= 0
