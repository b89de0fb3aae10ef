"""A ring and its control block in plain memory, so that tests can set every word of it; and memory that watches its stores."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from kvspool.engine import locks
from kvspool.engine.iteration import Iteration
from kvspool.kernel import frames_py as frames
from kvspool.kernel import lock_py
from kvspool.record import Gap, Record
from kvspool.spool import format, search
from kvspool.spool.cursor import RingCursor

SEED = format.frame_seed(bytes(range(16)))
HOLDER = bytes(range(1, 49))


class Ring:
    """The memory of one log, and readers and writers over it. It replaces a `SpoolFiles`: a RingCursor accepts it."""

    path = Path("ring")
    is_closed = False
    key_table = None

    def count_gap(self) -> None:
        """Count a Gap in the rates: there are none."""

    def __init__(self, twin: Any, capacity: int = 1024, *, position: int = 0, sequence: int = 0, guarded: bool = False) -> None:
        """Begin empty at `position` and `sequence`; `guarded`: a read after the ring's end kills, or raises in the interpreted twin."""
        self.twin = twin
        self.capacity = capacity
        self.is_guarded = guarded
        self.data = guarded_memory(capacity) if guarded else memoryview(bytearray(capacity))
        self.control = memoryview(bytearray(format.control_bytes(capacity)))
        self.words = self.control.cast("Q")
        self.lock_file = os.memfd_create("lock")
        self.files = [self.lock_file]
        for at in (frames.HEAD, frames.TAIL, frames.MARKS, frames.MARKS + frames.MARK_WORDS):
            self.words[at] = position
        for at in (frames.MIN_SEQ, frames.MARKS + 1, frames.MARKS + frames.MARK_WORDS + 1):
            self.words[at] = sequence

    def writer(self, data: Any = None, control: Any = None) -> Any:
        return self.twin.FrameWriter(
            self.data if data is None else data,
            self.control if control is None else control,
            SEED,
            self.append_lock(control),
            memoryview(HOLDER),
        )

    def kill(self) -> None:
        """Kill every handle that exists so far: the kernel frees its locks."""
        while len(self.files) > 1:
            os.close(self.files.pop())

    def append_lock(self, control: Any = None) -> Any:
        """Return an append lock on an open file description of its own, which is closed with the ring."""
        fd = os.open(f"/proc/self/fd/{self.lock_file}", os.O_RDWR)
        self.files.append(fd)
        return append_lock(lock_twin(self.twin), self.control if control is None else control, fd, len(self.files))

    def reader(self, position: int, sequence: int) -> Any:
        data = Strict(self.data) if self.is_guarded and self.twin.__name__.endswith("_py") else self.data
        return self.twin.FrameReader(data, self.control, SEED, position, sequence)

    def earliest(self) -> tuple[int, int]:
        return search.find(self.reader(0, 0), "earliest")

    def mark(self) -> tuple[int, int, int]:
        return self.reader(0, 0).mark()

    def cursor(self, place: tuple[int, int] | None = None) -> RingCursor:
        """Return a cursor that reads to what is there now."""
        return RingCursor(self, self.earliest() if place is None else place, self.mark()[:2], "overrun")  # type: ignore[arg-type]

    def read(self, place: tuple[int, int] | None = None) -> list[Record | Gap]:
        """Return the records and Gaps from `place` (default: the earliest) to the tail."""
        return list(Iteration(self.cursor(place)))

    def fill(self, values: Iterable[bytes], timestamp: int = 7) -> None:
        writer = self.writer()
        for value in values:
            writer.append(None, value, 0, 0, timestamp)

    def snapshot(self) -> tuple[bytes, bytes]:
        """Return the bytes of the ring and of the control block, without the words that name the lock's holder."""
        control = bytearray(self.control)
        control[frames.HOLDER * 8 : (frames.HOLDER + frames.HOLDER_WORDS) * 8] = bytes(frames.HOLDER_WORDS * 8)
        return bytes(self.data), bytes(control)

    def restore(self, snapshot: tuple[bytes, bytes]) -> None:
        self.data[:], self.control[:] = snapshot

    def close(self) -> None:
        for fd in self.files:
            os.close(fd)


def lock_twin(twin: ModuleType) -> ModuleType:
    """Return the module of the append lock that belongs to a twin of the frame loops."""
    return importlib.import_module(twin.__name__.replace("frames_", "lock_"))


def append_lock(twin: ModuleType, control: Any, fd: int, generation: int) -> Any:
    """Return the append lock of a control block, of a twin of its module, with the waits that every log has."""
    return twin.AppendLock(control, frames.LOCK, fd, generation, lock_py.GATE, locks.POLLS, locks.SLEEPS)


def guarded_memory(size: int) -> memoryview:
    """Return memory whose end is the end of a page, before one that kills who touches it."""
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    return memoryview(memory)[pages * mmap.PAGESIZE - size : pages * mmap.PAGESIZE]


class Strict:
    """Memory for the interpreted twin that raises where a slice would end outside of it, which Python would cut silently."""

    def __init__(self, view: memoryview) -> None:
        self.view = view

    def cast(self, code: str) -> memoryview:
        return self.view.cast(code)  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, at: slice) -> memoryview:
        assert 0 <= at.start <= at.stop <= len(self.view), f"read of {at.start}..{at.stop} in {len(self.view)} bytes"
        return self.view[at]


class Watched:
    """Memory for the interpreted twin that calls `before(name, offset, size)` before each 8 bytes or fewer are stored.

    A longer copy is stored in pieces, as a kill during it would find it.
    """

    def __init__(self, name: str, view: memoryview, before: Callable[[str, int, int], None]) -> None:
        self.name = name
        self.view = view
        self.before = before

    def cast(self, code: str) -> Watched:
        return Watched(self.name, self.view.cast(code), self.before)  # type: ignore[call-overload]

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, at: Any) -> Any:
        return self.view[at]

    def __setitem__(self, at: Any, value: Any) -> None:
        if not isinstance(at, slice):
            self.before(self.name, at * self.view.itemsize, self.view.itemsize)
            self.view[at] = value
            return
        source = memoryview(value)
        assert at.stop - at.start == len(source), "a copy must have the size of its target"
        for piece in range(0, len(source), 8):
            part = source[piece : piece + 8]
            self.before(self.name, at.start + piece, len(part))
            self.view[at.start + piece : at.start + piece + len(part)] = part
