"""One chunk file: opened and checked, or created. The object owns the descriptor and the mapping."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvspool import system
from kvspool.errors import Corruption, Truncated
from kvspool.kernel import chunks_py as loops
from kvspool.queue import format
from kvspool.queue.format import ChunkHead
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle


class Chunk(Handle):
    """A chunk whose whole file is open and mapped."""

    def __init__(self, id: int, path: Path, file: Descriptor) -> None:
        """Take over a descriptor. Raises Corruption, Truncated, or the system's OSError."""
        self.id = id
        self.path = path
        self._file = file
        self.fd = fd = file.number  # nothing closes the file before this object is freed
        status = system.port.status(fd)
        refuse_unsound(path, status)
        self.inode = status.st_ino
        self.size = status.st_size
        self.view = memoryview(system.port.map(fd, self.size, writable=True))
        self.flushed_head = self.flushed_tail = -1  # flushed by this handle
        self.is_rooted = False  # whether its references from the header are on disk, too
        refuse_untrue(path, self.state(), self.size)

    @classmethod
    def open(cls, path: Path, id: int) -> Chunk:
        """Open a chunk of the queue at `path`. Raises FileNotFoundError too."""
        file = format.chunk_path(path, id)
        return cls(id, file, Descriptor(file, os.O_RDWR))

    @classmethod
    def create(cls, path: Path, id: int, size: int, mode: int) -> Chunk:
        """Create an unreferenced empty chunk; removed if that fails. FileExistsError if the name is in use."""
        place = format.chunk_path(path, id)
        file = Descriptor(place, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        try:
            system.port.set_mode(file.number, mode)
            system.port.allocate(file.number, size)
            system.port.write(file.number, format.FRESH, 0)
            return cls(id, place, file)
        except BaseException:
            with suppress(OSError):
                system.port.remove(place)
            raise

    def state(self) -> ChunkHead:
        """Return the present pointers and reference."""
        return format.CHUNK_HEAD.unpack(self.view)

    def link(self, id: int) -> None:
        """Store the reference to the next chunk, which is complete; handles waiting at this one wake up."""
        system.port.write(self.fd, format.HEADER.pack(format.QueueHeader(id)), loops.NEXT)


def refuse_unsound(path: Path, status: os.stat_result) -> None:
    """Raise Corruption unless a file can be a chunk, by its size."""
    if status.st_size < format.CHUNK_HEAD.size:
        raise Truncated(f"{path}: a chunk of {status.st_size} bytes has lost its pointers; see kvspool repair")
    if status.st_size > format.MOST_CHUNK:
        raise Corruption(f"{path}: a chunk has at most {format.MOST_CHUNK} bytes, not {status.st_size}; see kvspool repair")


def refuse_untrue(path: Path, state: ChunkHead, size: int) -> None:
    """Raise Corruption, or Truncated, unless the pointers are within the chunk, and in order."""
    head, tail, _ = state
    if head < loops.FIRST_ENTRY or tail < head:
        raise Corruption(f"{path}: its pointers are impossible: entries from {head} to {tail}; see kvspool repair")
    if tail > size:
        raise Truncated(f"{path} has {size} bytes, and its entries should end at {tail}; see kvspool repair")


def refuse_shorter(chunk: Chunk) -> None:
    """Raise Truncated if a chunk's file is shorter than when it was mapped: a load after its end would kill the process."""
    size = system.port.status(chunk.fd).st_size
    if size < chunk.size:
        raise Truncated(f"{chunk.path} has {size} bytes; it had {chunk.size} when it was opened; see kvspool repair")


def file_size(path: Path) -> int:
    """Return the size of a chunk file; 0 if it was removed, since all entries were taken."""
    try:
        file = Descriptor(path, os.O_PATH)
    except FileNotFoundError:
        return 0
    with file as fd:
        return system.port.status(fd).st_size
