"""The memory that a recovery works on, and the runs of frames that it finds there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from kvspool.kernel.frames import FrameReader, FrameScanner
    from kvspool.spool import format


class Memory(Protocol):
    """The interface for a recovery: the memory of both files, ring and control writable, and their flushes."""

    front: memoryview
    ring: memoryview
    control: memoryview
    header: format.ControlHeader

    def scanner(self) -> FrameScanner: ...

    def write_front(self, data: bytes, at: int) -> None: ...

    def reader(self, position: int, sequence: int) -> FrameReader: ...

    def ring_reader(self) -> FrameReader: ...

    def rewrite(self) -> None: ...

    def flush_data(self) -> None: ...

    def flush_control(self) -> None: ...

    def update_producers(self, kept: list[FrameRun], *, is_forced: bool) -> None: ...


class FrameRun(NamedTuple):
    """A row of sound frames, or a pad (no frames); see `FrameScanner`."""

    start: int
    end: int
    first: int
    last: int
    timestamp: int
    frames: int

    def moved(self, by: int) -> FrameRun:
        """Return the run, moved by so many bytes."""
        return self._replace(start=self.start + by, end=self.end + by)
