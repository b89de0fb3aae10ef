"""The two ends of a queue: entries are put at one and taken at the other, each in one step under the lock of the header file.

This source is also compiled, like `frames_py`. `kvspool.queue.format` describes the layout and its reasons. Every unusual case
(no chunk, no room, damage, a moved header) is left to `kvspool.queue.chain`.

**Order.** An entry's bytes are stored before the pointer after it, and are copied out before the pointer moves over them; a pointer is one
store. So a process that is killed between any two instructions has put an entry, or taken one, or not, and the next one continues.

**Doorbells.** A store through a mapping causes no event. After a put into an empty chunk, and after the last entry of a chunk was taken,
the same 4 bytes are rewritten, which inotify reports.
"""

from __future__ import annotations

from typing import Any, NoReturn

import kvspool.kernel.machine as native
import kvspool.kernel.pointers as chunks
from kvspool.system.handles import refuse_copy

HEAD = 0  # offsets within a chunk
TAIL = 4
NEXT = 8
FIRST_ENTRY = 10
PREFIX = 2  # bytes of the length before an entry
LONGEST = 65535  # bytes of an entry

OPERATION = 1 << 30  # the byte of the header file that each operation locks
HEADER_SIZE = 2

# Results of `put` and `get`, in `stop`.
DONE = 0
LOOK = 1  # left to the chain
BUSY = 2  # another handle has the lock
NOTHING = 3  # no entry
FULL = 4  # no room in the last chunk


class Ends:
    """The first and the last chunk of a queue, and the lock of its header file.

    `put`, `put_many`, `get`, `get_many` take the lock; `place`, `place_many`, `take`, `take_many`, `is_current` require it. Compiled, each
    is one step for all threads and signal handlers.
    """

    def __init__(self) -> None:
        self.fd = -1
        self.process = 0
        self.is_one_step = native.is_one_step()
        self.is_held = False  # the lock, for an operation of several steps
        self.look_at = 0
        self.stop = DONE
        self.first_id = 0
        self.head = 0  # after the last taken entry
        self.tail = 0  # after the last put entry
        self.detach()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy(self)

    def open(self, fd: int) -> None:
        """Use this descriptor of the header file; -1: none."""
        self.fd = fd
        self.process = native.process_id()

    def looked(self, ns: int) -> None:
        """Note that the queue still exists; the next check is due after `ns`."""
        self.look_at = native.monotonic() + ns

    def attach(self, first_id: int, first: Any, last: Any) -> None:
        """Set the ends: two chunks with `fd`, `size` and `view`, which live while they are used here.

        Raises ValueError for a view that is not its chunk's: too short, or read-only.
        """
        self.detach()
        for chunk in (first, last):
            if not FIRST_ENTRY <= chunk.size <= len(chunk.view) or not native.is_writable(chunk.view):
                raise ValueError(f"a chunk of {chunk.size} bytes needs memory of that size to write to, not {len(chunk.view)} bytes")
        self.first_owner = first
        self.last_owner = last
        self.first_fd = first.fd
        self.first_size = first.size
        self.first = native.bytes_at(first.view)
        self.last_fd = last.fd
        self.last_size = last.size
        self.last = native.bytes_at(last.view)
        self.first_id = first_id

    def detach(self) -> None:
        """Forget the chunks: everything is left to the chain."""
        self.first_id = 0
        self.first = self.last = native.no_bytes()
        self.first_fd = self.last_fd = -1
        self.first_size = self.last_size = 0
        self.first_owner = self.last_owner = None

    def is_current(self) -> bool:
        """Return whether these are still the ends, and their files have the same size."""
        return (
            self.first_id != 0
            and native.monotonic() < self.look_at
            and chunks.size_of(self.fd) == HEADER_SIZE
            and chunks.reference(self.fd) == self.first_id
            and chunks.size_of(self.first_fd) == self.first_size
            and (self.first_fd == self.last_fd or chunks.size_of(self.last_fd) == self.last_size)
            and chunks.number(self.last, NEXT) == 0
        )

    def is_good(self, fd: int, size: int) -> bool:
        """Return whether a chunk may be used without reading the header.

        Its file must have the mapped size, since a load after its end would kill the process. The chunk itself tells whether it is
        still an end: a first chunk is consumed when it has no entry left and another one follows, and a last one is the last while none
        follows.
        """
        return native.monotonic() < self.look_at and chunks.size_of(fd) == size

    # Putting.

    def put(self, entry: bytes) -> int:
        """Put an entry; return DONE, or the reason."""
        if self.is_held or self.first_id == 0 or native.process_id() != self.process:
            return LOOK
        try:
            if not native.try_lock(self.fd, OPERATION):
                return BUSY
            return self.place(entry) if self.is_good(self.last_fd, self.last_size) else LOOK
        finally:
            # Whether we hold it or not: a signal handler may have raised before we knew.
            native.unlock(self.fd, OPERATION)

    def place(self, entry: bytes) -> int:
        """Put an entry into the last chunk; return DONE, or FULL, or LOOK."""
        tail = self.tail_of_last()
        if tail < 0:
            return LOOK
        length = len(entry)
        if length > LONGEST:
            return LOOK
        if length > self.last_size - PREFIX - tail:
            return FULL
        chunks.copy_in(self.last, tail, entry, length)
        self.publish(tail, tail + PREFIX + length)
        return DONE

    def place_many(self, entries: list[bytes], start: int) -> int:
        """Put entries from `start` on into the last chunk, as many as fit, with one pointer for all; return the index of the first that was
        not put.
        """
        tail = self.tail_of_last()
        if tail < 0:
            return start
        at = tail
        index = start
        while index < len(entries):
            entry = entries[index]
            length = len(entry)
            if length > LONGEST or length > self.last_size - PREFIX - at:
                break
            chunks.copy_in(self.last, at, entry, length)
            at += PREFIX + length
            index += 1
        if at != tail:
            self.publish(tail, at)
        return index

    def tail_of_last(self) -> int:
        """Return the offset of the next entry; -1 if no chunk is known, another one follows, or the pointers are impossible."""
        if self.first_id == 0:
            return -1
        tail = chunks.pointer(self.last, TAIL)
        head = chunks.pointer(self.last, HEAD)
        if chunks.number(self.last, NEXT) != 0 or not FIRST_ENTRY <= head <= tail <= self.last_size:
            return -1
        return tail

    def publish(self, before: int, tail: int) -> None:
        """Store the tail pointer, and wake waiters for entries: they sleep only if there was none."""
        was_empty = chunks.pointer(self.last, HEAD) == before
        chunks.store_pointer(self.last, TAIL, tail)
        self.tail = tail
        if was_empty:
            chunks.ring(self.last_fd, self.last, TAIL)

    # Taking.

    def get(self) -> bytes | None:
        """Take an entry out; None if there is none, with the reason in `stop`. Check `is_drained` afterwards."""
        self.stop = LOOK
        if self.is_held or self.first_id == 0 or native.process_id() != self.process:
            return None
        try:
            if not native.try_lock(self.fd, OPERATION):
                self.stop = BUSY
                return None
            return self.take() if self.is_good(self.first_fd, self.first_size) else None
        finally:
            native.unlock(self.fd, OPERATION)

    def take(self) -> bytes | None:
        """Take an entry out of the first chunk; None, with the reason in `stop`."""
        entry = self.peek()
        if entry is not None:
            self.advance(self.head)
        return entry

    def take_many(self, limit: int) -> list[bytes]:
        """Take up to `limit` entries out of the first chunk, with one pointer for all; `stop` has the reason of the end."""
        taken: list[bytes] = []
        self.stop = self.find_first()
        if self.stop != DONE:
            return taken
        at = chunks.pointer(self.first, HEAD)
        tail = chunks.pointer(self.first, TAIL)
        begin = at
        while len(taken) < limit:
            length = length_at(self.first, at, tail)
            if length < 0:
                self.stop = NOTHING if at == tail and chunks.number(self.first, NEXT) == 0 else LOOK
                break
            taken.append(chunks.copy_out(self.first, at + PREFIX, length))
            at += PREFIX + length
        if at != begin:
            self.advance(at)
        return taken

    def peek(self) -> bytes | None:
        """Return the first entry, and set `head` after it; None if there is none, with the reason in `stop`."""
        self.stop = self.find_first()
        if self.stop != DONE:
            return None
        head = chunks.pointer(self.first, HEAD)
        length = length_at(self.first, head, chunks.pointer(self.first, TAIL))
        if length < 0:
            self.stop = LOOK
            return None
        self.head = head + PREFIX + length
        return chunks.copy_out(self.first, head + PREFIX, length)

    def find_first(self) -> int:
        """Return DONE if the first chunk has an entry, NOTHING if the queue has none, LOOK for everything else."""
        if self.first_id == 0:
            return LOOK
        head = chunks.pointer(self.first, HEAD)
        tail = chunks.pointer(self.first, TAIL)
        if not FIRST_ENTRY <= head <= tail <= self.first_size:
            return LOOK
        if head < tail:
            return DONE
        return NOTHING if chunks.number(self.first, NEXT) == 0 else LOOK

    def advance(self, head: int) -> None:
        """Store the head pointer; wake waiters for room if that was the last entry of the chunk."""
        if self.first_id == 0:
            return
        chunks.store_pointer(self.first, HEAD, head)
        self.head = head
        if head == chunks.pointer(self.first, TAIL):
            chunks.ring(self.first_fd, self.first, HEAD)

    def is_drained(self) -> bool:
        """Return whether the first chunk is consumed: all entries were taken, and another chunk follows."""
        return (
            self.first_id != 0
            and chunks.number(self.first, NEXT) != 0
            and chunks.pointer(self.first, HEAD) == chunks.pointer(self.first, TAIL)
        )


def length_at(data: Any, at: int, tail: int) -> int:
    """Return the length of the entry at `at`; -1 if it ends after `tail`, or there is none."""
    if tail - at < PREFIX:
        return -1
    length = chunks.number(data, at)
    return length if length <= tail - at - PREFIX else -1


def check_offsets(size: int, at: int, tail: int) -> None:
    """Raise ValueError unless both offsets are within a chunk of `size` bytes."""
    if not 0 <= at <= size or not 0 <= tail <= size:
        raise ValueError(f"offsets {at} and {tail} of a chunk of {size} bytes")


def count(view: memoryview, at: int, tail: int) -> tuple[int, int]:
    """Return the number of whole entries between two offsets of a chunk, and their end. Raises ValueError for invalid offsets."""
    check_offsets(len(view), at, tail)
    data = native.bytes_at(view)
    found = 0
    while True:
        length = length_at(data, at, tail)
        if length < 0:
            return found, at
        at += PREFIX + length
        found += 1


def copies(view: memoryview, at: int, tail: int, limit: int) -> tuple[list[bytes], int]:
    """Return copies of up to `limit` entries between two offsets of a chunk, and their end. Raises ValueError for invalid offsets."""
    check_offsets(len(view), at, tail)
    data = native.bytes_at(view)
    found: list[bytes] = []
    while len(found) < limit:
        length = length_at(data, at, tail)
        if length < 0:
            break
        found.append(chunks.copy_out(data, at + PREFIX, length))
        at += PREFIX + length
    return found, at
