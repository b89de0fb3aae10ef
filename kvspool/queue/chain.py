"""The chain of a queue's chunks: found, checked, extended, and shortened as it is consumed. All under the lock OPERATION.

**A new chunk** is complete (allocated, its pointers written, flushed if the level requires it) before the reference to it is stored. If its
creator crashes before that, it is an unreferenced empty file. The next process that needs the name removes it.

**A consumed chunk**: the header's reference moves to the next one, and is flushed at every level, since otherwise a crash of the machine
could leave a header with a dangling reference. Then the file is removed. A crash before that leaves an empty chunk before the first one.

**Unreferenced files with entries** are never removed: only damage, or a crash of the machine, leaves such a file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import Closed, Corruption, KvspoolError, LogVanished, Truncated
from kvspool.kernel import chunks_py as loops
from kvspool.kernel.chunks import Ends
from kvspool.queue import format, header
from kvspool.queue.chunk import Chunk, refuse_unsound, refuse_untrue
from kvspool.queue.format import ChunkHead
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor, OpenFile

LOOK_EVERY = 1_000_000_000  # ns after which a check whether the queue still exists is due


class Chain(OpenFile):
    """The chunks of one queue, as known to this handle, and the descriptor of its header."""

    def __init__(self, path: Path, file: Descriptor, chunk_bytes: int | None, flush: Callable[[int], None], is_durable: bool) -> None:
        """Take over the header's descriptor; `chunk_bytes`: of new chunks (None: as the last one), `flush`: flushes a file to disk."""
        self.path = path
        self._file = file
        fd = file.number
        self.ends = Ends()
        self.ends.open(fd)
        self.ids: deque[int] = deque()
        self.first: Chunk | None = None
        self.last: Chunk | None = None
        self.chunk_bytes = chunk_bytes
        self._flush = flush
        self._is_durable = is_durable
        self._process = system.port.process_id()
        self._mode = system.port.status(fd).st_mode & 0o666

    def close(self) -> None:
        """Release all files; the locks too, unless they belong to the parent process."""
        self.forget()
        self.ends.open(-1)
        if not self._file.is_closed:
            locks.give_back(self._file, self._process)

    def forget(self) -> None:
        """Forget all chunks."""
        self.ends.detach()
        self.ids.clear()
        self.first = self.last = None

    # Finding.

    def refresh(self) -> None:
        """Update to the present chain. Raises LogVanished, Truncated, Corruption."""
        if self.is_closed:
            raise Closed(f"{self.path} was closed; open it again")
        if self.ends.is_current() and not self.ends.is_drained():
            return
        if not header.is_at(self.path, self.fd):
            raise LogVanished(f"{self.path} was deleted or replaced while it was open; open it again if it exists")
        first = self.reference()
        if not first:
            self.forget()
        elif not self._follow(first):
            self._walk(first)
        self.ends.looked(LOOK_EVERY)
        self.consume()

    def reference(self) -> int:
        """Return the id of the first chunk from the header; 0: there is none."""
        found = system.port.read(self.fd, format.HEADER.size + 1, 0)
        if not found:  # created, but not written yet
            self._refer_to(0)
            system.port.flush(self.fd)
            return 0
        if len(found) != format.HEADER.size:
            raise Truncated(f"{self.path}: its header has {len(found)} bytes and not {format.HEADER.size}; see kvspool repair")
        return format.HEADER.unpack(found).first_chunk

    def _follow(self, first: int) -> bool:
        """Continue from the known chunks to `first` and past the last chunk; False if that is no longer possible.

        A last chunk that still has its name was never consumed, so the header can only have moved along the known chain.
        """
        last = self.last
        if last is None or first not in self.ids or not _is_whole(last):
            return False
        ids = deque(self.ids)
        while ids[0] != first:
            ids.popleft()
        known = set(ids)
        while id := last.state().next_ref:
            if id in known:
                return False
            try:
                last = Chunk.open(self.path, id)
            except FileNotFoundError:
                return False
            ids.append(id)
            known.add(id)
        self._know(ids, last)
        return True

    def _walk(self, first: int) -> None:
        """Find the chain from its beginning, and check the pointers of each chunk."""
        self.forget()
        ids: deque[int] = deque()
        known: set[int] = set()
        id, before = first, self.path
        while id:
            if id in known:
                raise Corruption(f"{before}: the chunks refer to each other in a circle, to {id} again; see kvspool repair")
            ids.append(id)
            known.add(id)
            before, id = self._look_at(id, before)
        self._know(ids, Chunk.open(self.path, ids[-1]))

    def _look_at(self, id: int, before: Path) -> tuple[Path, int]:
        """Check a chunk; return its path, and the id of the next one."""
        file = format.chunk_path(self.path, id)
        try:
            state = read_state(file)
        except FileNotFoundError as error:
            raise Corruption(f"{before} refers to {file.name}, which does not exist; see kvspool repair") from error
        return file, state.next_ref

    def _know(self, ids: deque[int], last: Chunk) -> None:
        first = self.first
        if ids[0] == last.id:
            first = last
        elif first is None or first.id != ids[0] or not _is_whole(first):
            try:
                first = Chunk.open(self.path, ids[0])
            except FileNotFoundError as error:
                raise Corruption(f"{self.path} refers to chunk {ids[0]}, which does not exist; see kvspool repair") from error
        self.ids, self.first, self.last = ids, first, last
        self.ends.attach(first.id, first, last)

    # Consuming.

    def consume(self) -> None:
        """Remove the consumed chunks at the start. Raises Corruption if the next one doesn't exist."""
        while self.first is not None and self.ends.is_drained():
            first = self.first
            self._look_at(first.state().next_ref, first.path)
            self._refer_to(first.state().next_ref)
            self._flush(self.fd)
            self.ids.popleft()
            assert self.last is not None
            self._know(self.ids, self.last)
            system.port.remove(first.path)

    def clear(self) -> None:
        """Remove every entry, chunk by chunk; a crash during it has removed the oldest ones."""
        while self.first is not None:
            self.ends.advance(self.first.state().tail_ptr)
            if not self.ends.is_drained():
                return
            self.consume()

    def _refer_to(self, id: int) -> None:
        system.port.write(self.fd, format.HEADER.pack(format.QueueHeader(id)), 0)

    # Entries.

    def put(self, entries: list[bytes], start: int, most: int) -> int:
        """Put entries from `start` on while there is room with `most` chunks; return the index of the first that was not put."""
        begin = start
        try:
            while start < len(entries):
                placed = start if self.last is None else self.ends.place_many(entries, start)
                if placed == start and not self.extend(most):
                    break
                start = placed
        except (KvspoolError, OSError) as error:
            if start > begin:
                error.add_note(f"{start} entries of the batch were put before")
            raise
        return start

    def take(self, limit: int) -> list[bytes]:
        """Take up to `limit` entries out. An error after some were taken is raised by the next call."""
        taken: list[bytes] = []
        while self.first is not None:
            taken += self.ends.take_many(limit - len(taken))
            stop, is_drained = self.ends.stop, self.ends.is_drained()
            if is_drained:
                try:
                    self.consume()
                except (KvspoolError, OSError):
                    if not taken:
                        raise
                    break
            if len(taken) == limit or stop == loops.NOTHING:
                break
            if not is_drained:
                if not taken:
                    self.explain()
                break
        return taken

    def peek(self) -> bytes | None:
        """Return the first entry without taking it; None if there is none."""
        if self.first is None:
            return None
        entry = self.ends.peek()
        if entry is None and self.ends.stop != loops.NOTHING:
            self.explain()
        return entry

    def explain(self) -> None:
        """Raise Corruption with the fault of the first entry."""
        assert self.first is not None
        head, tail, _ = state = self.first.state()
        refuse_untrue(self.first.path, state, self.first.size)
        raise Corruption(f"{self.first.path}: the entry at {head} ends after the last one, at {tail}; see kvspool repair")

    # Growing.

    def has_room(self, length: int, most: int) -> bool:
        """Return whether an entry fits into the last chunk, or into a new one, with at most `most` chunks."""
        if self.last is None or self._may_grow(most):
            return True
        _, tail, next_ref = self.last.state()
        return not next_ref and length <= self.last.size - tail - loops.PREFIX

    def _may_grow(self, most: int) -> bool:
        if self.last is None:
            return True
        is_replaced = self.first is self.last and self.last.state().head_ptr == self.last.state().tail_ptr
        id = format.following(self.last.id)
        return len(self.ids) - is_replaced < most and id not in self.ids

    def extend(self, most: int) -> bool:
        """Append a new chunk; False if there are `most` already, or one of them has its id."""
        if not self._may_grow(most):
            return False
        before = self.last
        chunk = self._make(1 if before is None else format.following(before.id))
        if before is None:
            self._refer_to(chunk.id)
        else:
            before.link(chunk.id)
        if self._is_durable:
            self._flush(self.fd if before is None else before.fd)
            chunk.is_rooted = before is None or before.is_rooted
        self._know(deque((*self.ids, chunk.id)), chunk)
        self.consume()
        return True

    def _make(self, id: int) -> Chunk:
        size = self.new_size()
        try:
            chunk = Chunk.create(self.path, id, size, self._mode)
        except FileExistsError:
            self.remove_leftover(id)
            chunk = Chunk.create(self.path, id, size, self._mode)
        if self._is_durable:
            self._flush(chunk.fd)
            disk.flush_directory(self.path.parent)
        return chunk

    def new_size(self) -> int:
        """Return the size of the next chunk, in bytes."""
        if self.chunk_bytes is not None:
            return self.chunk_bytes
        return format.CHUNK if self.last is None or self.last.size < format.LEAST_CHUNK else self.last.size

    def remove_leftover(self, id: int) -> None:
        """Remove an unreferenced chunk. Raises Corruption if it has entries: the operator must decide."""
        file = format.chunk_path(self.path, id)
        if not is_empty(file):
            raise Corruption(f"{file} has entries, but nothing refers to it; see kvspool repair")
        system.port.remove(file)

    def sweep(self) -> None:
        """Remove the leftovers of processes that crashed while adding or removing a chunk."""
        if not self.ids:
            return
        for id in (format.preceding(self.ids[0]), format.following(self.ids[-1])):
            file = format.chunk_path(self.path, id)
            with suppress(FileNotFoundError):
                if id not in self.ids and is_empty(file):
                    system.port.remove(file)

    # The end.

    def is_empty(self) -> bool:
        """Return whether no chunk has an entry."""
        return self.first is None or (self.first is self.last and self.first.state().head_ptr == self.first.state().tail_ptr)

    def remove(self) -> None:
        """Remove all files of a queue that is empty and not open elsewhere."""
        files = [format.chunk_path(self.path, id) for id in self.ids]
        self.forget()
        self._refer_to(0)
        self._flush(self.fd)
        for file in (*files, self.path):
            with suppress(FileNotFoundError):
                system.port.remove(file)


def _is_whole(chunk: Chunk) -> bool:
    """Return whether a chunk's file still has its name, and the mapped size."""
    status = system.port.status(chunk.fd)
    if status.st_nlink and status.st_size != chunk.size:
        raise Truncated(f"{chunk.path} has {status.st_size} bytes; it had {chunk.size} when it was opened; see kvspool repair")
    return status.st_nlink > 0


def read_state(file: Path) -> ChunkHead:
    """Return the checked head of a chunk file. Raises FileNotFoundError, Corruption, Truncated."""
    with Descriptor(file, os.O_RDONLY) as fd:
        status = system.port.status(fd)
        refuse_unsound(file, status)
        state = format.CHUNK_HEAD.unpack(system.port.read(fd, format.CHUNK_HEAD.size, 0))
        refuse_untrue(file, state, status.st_size)
        return state


def is_empty(file: Path) -> bool:
    """Return whether an unreferenced chunk has no entries: its creator crashed before it was complete, or all were taken."""
    with Descriptor(file, os.O_RDONLY) as fd:
        raw = system.port.read(fd, format.CHUNK_HEAD.size, 0)
    if len(raw) < format.CHUNK_HEAD.size:
        return not any(raw)
    head, tail, _ = format.CHUNK_HEAD.unpack(raw)
    return head == tail
