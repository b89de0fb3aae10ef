"""Check every file of a queue in any state, and report its faults. Nothing is mapped, trusted or changed.

There are no checksums. Checks cover whether the pointers are within their chunk, whether the lengths of the entries add up to the end of
the last one, and whether the references make one chain of the present files. Changed bytes of an entry can't be detected, nor changed
lengths with the same sum.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from kvspool import system
from kvspool.errors import Corruption
from kvspool.kernel import chunks_py as loops
from kvspool.kernel.chunks import count
from kvspool.queue import format
from kvspool.queue.chunk import refuse_unsound, refuse_untrue
from kvspool.queue.format import ChunkHead
from kvspool.system.descriptor import Descriptor


class QueueVerifyReport(msgspec.Struct, frozen=True):
    """The result of checking every file of a queue.

    chunks, entries, bytes: sound ones, up to the first damage of each chunk. problems: the faults, in words. leftovers: chunk files to
    which nothing refers, with or without entries; a killed process may leave an empty one, which is no damage.
    """

    path: str
    chunks: int
    entries: int
    bytes: int
    problems: list[str]
    leftovers: list[str]

    @property
    def is_sound(self) -> bool:
        """Return whether nothing is damaged."""
        return not self.problems


class Found:
    """A chunk file as found."""

    def __init__(self, path: Path, id: int) -> None:
        """Read it. Raises only the system's OSError: FileNotFoundError if there is none."""
        self.id = id
        self.path = format.chunk_path(path, id)
        self.problem = ""
        self.state = ChunkHead(loops.FIRST_ENTRY, loops.FIRST_ENTRY, 0)
        self.entries = self.bytes = 0
        self.end = loops.FIRST_ENTRY  # end of the last whole entry
        self.size = -1  # if it is not a file
        self.is_chunk = False
        try:
            with Descriptor(self.path, os.O_RDONLY) as fd:
                self._examine(fd)
        except Corruption as error:
            self.problem = str(error).removesuffix("; see kvspool repair")

    def _examine(self, fd: int) -> None:
        status = system.port.status(fd)
        self.size = status.st_size
        refuse_unsound(self.path, status)
        self.is_chunk = True
        self.state = format.CHUNK_HEAD.unpack(system.port.read(fd, format.CHUNK_HEAD.size, 0))
        refuse_untrue(self.path, self.state, self.size)
        head, tail, _ = self.state
        # The loops don't accept an empty view, so one more byte is read than is examined.
        data = memoryview(system.port.read(fd, tail - head, head) + b"\0")
        self.entries, end = count(data, 0, min(tail - head, len(data) - 1))
        self.end = head + end
        self.bytes = end - loops.PREFIX * self.entries
        if self.end != tail:
            raise Corruption(f"{self.path}: the entry at {self.end} ends after the last one, at {tail}")

    @property
    def is_empty(self) -> bool:
        """Return whether it has no entries: all were taken, or its creator crashed before it was complete."""
        head, tail, next_ref = self.state
        return (head == tail and (head >= loops.FIRST_ENTRY or (head, next_ref) == (0, 0))) if self.is_chunk else self.size == 0


class QueueScan:
    """The header and all chunk files of a queue. Take it under the lock of OPERATION."""

    def __init__(self, path: Path, fd: int) -> None:
        """Check all files, beginning with the header's descriptor."""
        self.path = path
        self.problems: list[str] = []
        ids = sorted(filter(None, (format.chunk_id(path, name) for name in system.port.names(path.parent))))
        self.found = {id: Found(path, id) for id in ids}
        header = system.port.read(fd, format.HEADER.size + 1, 0)
        self.first = format.HEADER.unpack(header).first_chunk if len(header) == format.HEADER.size else -1
        self.chain: list[Found] = []
        self.broken = False  # the last chunk of the chain refers to an impossible next one
        self._follow()

    def _follow(self) -> None:
        if self.first < 0:
            self.problems.append(f"{self.path}: the header doesn't have {format.HEADER.size} bytes")
            return
        known: set[int] = set()
        id, before = self.first, self.path
        while id:
            if id in known:
                self.problems.append(f"{before}: the chunks refer to each other in a circle, to {id} again")
                self.broken = True
                return
            if id not in self.found:
                self.problems.append(f"{before} refers to chunk {id}, which does not exist")
                self.broken = True
                return
            chunk = self.found[id]
            known.add(id)
            self.chain.append(chunk)
            if chunk.problem:
                self.problems.append(chunk.problem)
            id, before = chunk.state.next_ref, chunk.path

    @property
    def leftovers(self) -> list[Found]:
        """Return the chunks to which nothing refers."""
        known = {chunk.id for chunk in self.chain}
        return [chunk for id, chunk in self.found.items() if id not in known]

    def report(self) -> QueueVerifyReport:
        """Return the result."""
        leftovers = self.leftovers
        lost = [f"{chunk.path} has entries, but nothing refers to it" for chunk in leftovers if not chunk.is_empty]
        return QueueVerifyReport(
            path=str(self.path),
            chunks=len(self.chain),
            entries=sum(chunk.entries for chunk in self.chain),
            bytes=sum(chunk.bytes for chunk in self.chain),
            problems=self.problems + lost,
            leftovers=[str(chunk.path) for chunk in leftovers],
        )
