"""One open segment: the original file, or its archive, which is read like that file."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

from kvspool import system
from kvspool.errors import Corruption
from kvspool.journal import seekable
from kvspool.system.descriptor import Descriptor, OpenFile

ARCHIVE = ".zst"  # suffix of an archived segment
KEPT = 2  # decompressed blocks of an open archive: sequential readers move from one to the next


class Segment(OpenFile):
    """One open segment, for reading; also for writing if `is_writable`. most: bytes of it to consider."""

    def __init__(self, path: Path, base: int, *, is_writable: bool = False, most: int = (1 << 63) - 1) -> None:
        if is_writable and path.suffix == ARCHIVE:
            raise ValueError(f"{path} is an archive, which is never written to; kvspool archive --undo makes a segment of it")
        self.path = path
        self.base = base
        self._most = most
        self.begin = 0  # byte of the first frame, once it is known
        self._file = Descriptor(path, os.O_RDWR if is_writable else os.O_RDONLY)

    def size(self) -> int:
        """Return the present size of the segment in bytes."""
        return min(system.port.status(self.fd).st_size, self._most)

    def read(self, at: int, size: int) -> bytes:
        """Return up to `size` bytes at `at`; fewer at the end of the segment."""
        return system.port.read(self.fd, min(size, self._most - at), at)

    def glance(self, at: int, size: int) -> bytes:
        """Do as `read`, for a few bytes without a check: it reads no more of the file than needed."""
        return self.read(at, size)

    def close(self) -> None:
        self._file.close()


class Archived(Segment):
    """The archive of a segment, for reading. Positions and sizes are those of the segment.

    A damaged block reads as zeros, which no format with checksums treats as a frame: so its records become a Gap as in a damaged segment.
    `damage` has the reasons, by the number of the block.
    """

    def __init__(self, path: Path, base: int) -> None:
        """Open it, and read its table. Raises Corruption, MissingExtra, or the system's OSError."""
        super().__init__(path, base)
        try:
            seekable.library()
            self.table = seekable.table_of(self.fd)
        except BaseException as error:
            self.close()
            if isinstance(error, Corruption):
                raise Corruption(f"{path}: {error}; zstd -d restores the rest of the segment that begins at sequence {base}") from None
            raise
        self.starts = list(accumulate((one.size for one in self.table), initial=0))
        self._places = list(accumulate((one.stored for one in self.table), initial=0))
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self.damage: dict[int, Corruption] = {}

    def size(self) -> int:
        return self.starts[-1]

    def read(self, at: int, size: int) -> bytes:
        end = min(at + size, self.size())
        pieces = []
        while at < end:
            number = bisect_right(self.starts, at) - 1
            start = self.starts[number]
            pieces.append(self._kept(number)[at - start : end - start])
            at = self.starts[number + 1]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def glance(self, at: int, size: int) -> bytes:
        """Decompress no more of the first block than needed, if it has the bytes, and compare no checksum."""
        size = max(0, min(size, self.size() - at))
        if 0 in self._blocks or at + size > min(self.starts[1], seekable.LARGEST_PIECE):
            return self.read(at, size)
        return seekable.beginning(self.fd, self._places[0], self.table[0], at + size)[at:]

    def is_damaged(self, at: int) -> bool:
        """Return whether the block around a byte was read, and is damaged."""
        return bisect_right(self.starts, at) - 1 in self.damage

    def block(self, number: int) -> bytes:
        """Return the content of a block, from the file. Raises Corruption."""
        place, start, after = self._places[number], self.starts[number], self.starts[number + 1]
        try:
            return seekable.decompressed(self.fd, place, self.table[number])
        except Corruption as error:
            where = f"block {number} of {len(self.table)}, at byte {place}, with bytes {start} to {after - 1} of the segment"
            raise Corruption(f"{self.path}: {where}: {error}") from None

    def _kept(self, number: int) -> bytes:
        """Return the content of a block, zeros if it is damaged; the last ones read are cached."""
        block = self._blocks.pop(number, None)
        if block is None:
            try:
                block = self.block(number)
            except Corruption as error:
                self.damage[number] = error
                block = bytes(self.table[number].size)
        self._blocks[number] = block
        while len(self._blocks) > KEPT:
            with suppress(KeyError):  # another thread was faster
                self._blocks.popitem(last=False)
        return block
