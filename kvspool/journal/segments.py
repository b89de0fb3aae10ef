"""The segments of a journal: a directory of files in the order of the sequences that their names tell.

Segments are read with `pread` and never mapped: another process may cut or remove one at any moment, and a load behind the end of a file
kills the process. At most `OPEN` descriptors are kept, however many segments there are.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.errors import Corruption, UnknownVersion

if TYPE_CHECKING:
    from kvspool.journal.format import Format

OPEN = 8  # descriptors that one handle keeps for reading


class Segment:
    """One open segment, for reading; writing as well if `is_writable`. most: bytes of it that are looked at."""

    def __init__(self, path: Path, base: int, *, is_writable: bool = False, most: int = (1 << 63) - 1) -> None:
        self.path = path
        self.base = base
        self._most = most
        self.fd = system.port.open(path, os.O_RDWR if is_writable else os.O_RDONLY)

    def size(self) -> int:
        """Return the bytes that the file has now."""
        return min(system.port.status(self.fd).st_size, self._most)

    def is_gone(self) -> bool:
        """Return whether no name stands for the file any more."""
        return system.port.status(self.fd).st_nlink == 0

    def read(self, at: int, size: int) -> bytes:
        """Return up to `size` bytes at `at`; fewer where the file ends."""
        return system.port.read(self.fd, min(size, self._most - at), at)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            system.port.close(fd)

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()


class Segments:
    """The directory, for one handle; not to be shared between threads. A forked child may share the descriptors: nothing depends on where
    they stand."""

    def __init__(self, path: Path, format: Format) -> None:
        self.path = path
        self.format = format
        self.directory = format.segments_in(path)
        self._open: OrderedDict[int, Segment] = OrderedDict()

    def bases(self) -> list[int]:
        """Return the first sequences of all segments, in order; names that no segment can have are left alone."""
        found = (self.format.base_of(name) for name in system.port.names(self.directory))
        return sorted(base for base in found if base is not None)

    def path_of(self, base: int) -> Path:
        """Return where the segment that begins at a sequence lies, or would lie."""
        name = self.format.name_of(base)
        if name is None:
            raise ValueError(f"no segment of {self.path} begins at sequence {base}")
        return self.directory / name

    def exists(self, base: int) -> bool:
        """Return whether there is a segment that begins at this sequence: one look at one name, however many segments there are."""
        return self.format.name_of(base) is not None and system.port.look_up(self.path_of(base)) is not None

    def get(self, base: int) -> Segment | None:
        """Return a segment, open; None if it is not there (any more). It stays open until others were asked for."""
        segment = self._open.pop(base, None)
        if segment is not None and segment.is_gone():
            segment.close()
            segment = None
        if segment is None:
            try:
                segment = Segment(self.path_of(base), base, most=self.format.most_bytes)
            except FileNotFoundError:
                return None
        self._open[base] = segment
        if len(self._open) > OPEN:
            self._open.popitem(last=False)[1].close()
        return segment

    def holding(self, sequence: int, bases: list[int]) -> int | None:
        """Return the base of the segment of `bases` that a sequence belongs into; None if all of them begin behind it."""
        at = bisect_right(bases, sequence)
        return bases[at - 1] if at else None

    def begin_of(self, segment: Segment) -> int:
        """Return where the first frame of a segment begins; 0 if its header isn't all there yet. Raises Corruption."""
        if not self.format.header_bytes:
            return 0
        data = segment.read(0, self.format.header_bytes + 1)
        header = self.format.header(segment.base)
        if len(data) <= self.format.header_bytes and data != header and header.startswith(data.rstrip(b"\0")):
            return 0  # a crash of the machine may leave the length and not the bytes
        try:
            return self.format.check_header(data[: self.format.header_bytes], segment.base)
        except (Corruption, UnknownVersion) as error:
            raise type(error)(f"{segment.path}: {error}") from None

    def close(self) -> None:
        """Give the descriptors back."""
        while self._open:
            self._open.popitem()[1].close()
