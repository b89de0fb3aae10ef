"""The format of commonware's journal::fixed: items of one length, each with a checksum, addressed by their position.

Source: `seeds/004` and the bytes that its program writes. A segment is a *blob*; its name is its index, and each but the last one contains
exactly `items_per_blob` records, so that a position alone gives an item's location. No blob has a header, and no record contains its
position. The last blob always has room: once it is full an empty one follows.

The program refuses a directory with any other name in it, so kvspool's files are in a hidden directory next to it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from kvspool import system
from kvspool.engine import sizes
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, TooLarge
from kvspool.journal import sidecars
from kvspool.journal.bounds import Bounds
from kvspool.journal.format import LAST_SEQUENCE, LAST_TIME, Before, JournalBatch, Scan
from kvspool.journal.formats.arrangement import Bare
from kvspool.journal.offsets import OffsetFiles, Offsets, check_name
from kvspool.journal.segments import Segment, Segments
from kvspool.kernel import fixed, tail_py
from kvspool.kernel.fixed_py import CHECKSUM
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

LONGEST_ITEM = 1 << 25  # bytes; after damage a cursor searches at most twice that
PIECE = 1 << 20  # bytes read at once, at least one record
_NAME = re.compile(r"[0-9a-f]{16}")


class ItemTail(NamedTuple):
    """The bytes after each item."""

    checksum: Annotated[int, "I", "CRC-32 (IEEE, as zlib has it) of the item"]


TAIL = Layout(ItemTail, ">")
assert TAIL.size == CHECKSUM


class FixedOffsets(OffsetFiles):
    """The durable readers of the journal at a path: their files are in the directory next to it."""

    def __init__(self, path: Path, mode: int) -> None:
        super().__init__(sidecars.beside(path), mode)
        self._journal = path

    def _lock_path(self, name: str) -> Path:
        return sidecars.reader_lock(self._journal, check_name(name).encode())


class Fixed(Bare):
    """The fixed format. item_bytes: of each item; items_per_blob: of each blob but the last. The blobs show neither."""

    name: ClassVar[str] = "fixed"
    number: ClassVar[int] = tail_py.FIXED
    has_checksums = True
    keeps_sequences = False

    def __init__(self, item_bytes: int | str, items_per_blob: int | str) -> None:
        self.item_bytes = sizes.parse(item_bytes)
        self.items_per_blob = sizes.parse(items_per_blob)
        self.record_bytes = self.least_bytes = self.item_bytes + CHECKSUM
        self.most_bytes = self.full_at = self.items_per_blob * self.record_bytes
        if not 1 <= self.item_bytes <= LONGEST_ITEM:
            raise ValueError(f"an item has 1 to {LONGEST_ITEM} bytes, not {item_bytes}")
        if self.items_per_blob < 1 or self.most_bytes >= 1 << 63:
            raise ValueError(f"a blob has at least 1 item, and less than 2^63 bytes: not {items_per_blob} items")

    def limits(self) -> dict[str, int]:
        return {"item_bytes": self.item_bytes, "items_per_blob": self.items_per_blob}

    @classmethod
    def chosen_limits(cls, stored: dict[str, int], given: dict[str, int]) -> dict[str, int]:
        """Return the limits as every format does, but refuse different lengths, which would tear items apart. Raises ValueError."""
        for name, value in given.items():
            if stored.get(name, value) != value:
                raise ValueError(f"the journal was created with {name}={stored[name]}, not {value}")
        return {**stored, **given}

    # Files.

    @classmethod
    def lies_at(cls, path: Path, *, is_sure: bool) -> bool:
        """Return whether there are blobs; never unless the caller is sure, since their lengths can't be detected."""
        if not is_sure or not path.is_dir():
            return False
        names = system.port.names(path)
        return not names or any(_NAME.fullmatch(name) for name in names)

    def prepare(self, path: Path, *, is_new: bool = False) -> None:
        """Create the directory next to the journal. is_new: remove bounds and readers of an earlier one."""
        super().prepare(path, is_new=is_new)
        if is_new:
            sidecar_bounds(path).forget()
            offsets = self.offsets(path, 0)
            for name in offsets.names():
                offsets.remove(name)

    def offsets(self, path: Path, mode: int) -> Offsets:
        return FixedOffsets(path, mode)

    def name_of(self, base: int) -> str | None:
        index, rest = divmod(base, self.items_per_blob)
        return None if rest else f"{index:016x}"

    def base_of(self, name: str) -> int | None:
        return int(name, 16) * self.items_per_blob if _NAME.fullmatch(name) else None

    # Bytes.

    def check(self, batch: JournalBatch) -> None:
        row = fixed.first_unfit(batch.values, self.item_bytes)
        if row < 0:
            return
        size = len(batch.values[row])
        message = f"item {row} of {len(batch.values)} has {size} bytes; this journal has items of {self.item_bytes}; nothing was written"
        raise TooLarge(message) if size > self.item_bytes else ValueError(message)

    def encode(self, batch: JournalBatch, start: int, place: Before) -> tuple[bytes | bytearray, int, int]:
        left = place.base + self.items_per_blob - place.sequence
        count = min(len(batch.values) - start, left, max(1, PIECE // self.record_bytes))
        return fixed.encode(batch.values, start, count, self.item_bytes), count, place.last

    def is_full(self, base: int, end: int, sequence: int) -> bool:
        return end >= self.most_bytes

    def scan(self, data: bytes, sequence: int, most: int, make: Callable[..., Any] | None, items: list[Any]) -> Scan:
        return Scan(*fixed.scan(data, sequence, most, self.item_bytes, make, items))

    def pass_over(self, data: bytes, sequence: int, until: int = LAST_SEQUENCE, timestamp: int = LAST_TIME) -> Scan:
        return Scan(*fixed.pass_over(data, sequence, min(until - sequence, len(data)), self.item_bytes))

    def place_in(self, base: int, sequence: int) -> int | None:
        return (sequence - base) * self.record_bytes

    def resume(self, data: bytes, sequence: int, until: int) -> tuple[int, int] | None:
        """Return the next record's position, sound or not: each damaged one is lost alone."""
        return (self.record_bytes, sequence + 1) if len(data) >= self.record_bytes else None

    def end_in(self, segment: Segment, begin: int, size: int) -> tuple[int, int] | None:
        """Return where the last sound record ends: damage before it loses records, not the end."""
        first = sidecar_bounds(segment.path.parent).first()
        begin = max(begin, min(first - segment.base, self.items_per_blob) * self.record_bytes)
        end = size // self.record_bytes * self.record_bytes
        step = max(1, PIECE // self.record_bytes) * self.record_bytes
        while end > begin:
            at = max(begin, end - step)
            sound = fixed.last_sound(segment.read(at, end - at), self.item_bytes)
            if sound:
                end = at + sound
                break
            end = at
        return end, segment.base + end // self.record_bytes

    # Leftovers of a dead writer.

    def finish(self, path: Path, mode: int) -> None:
        """Finish a rewind, a prune or a fresh begin. Raises Corruption for blobs that are missing, too short or too long."""
        segments, bounds = Segments(path, self), sidecar_bounds(path)
        size = bounds.unfinished()
        if size is not None:
            self.rewind(segments, size, mode)
        first = bounds.begun()
        if first is not None:
            self._fill(segments, first, mode)
            with disk.step():
                self.prune(segments, first, mode)
        self._check_blobs(segments)

    def rewind(self, segments: Segments, size: int, mode: int) -> None:
        """Remove the items from the position `size` on, as `rewinds` announces; on disk when it returns."""
        bounds = sidecar_bounds(segments.path)
        base = size - size % self.items_per_blob
        length = (size - base) * self.record_bytes
        is_new = not segments.exists(base)
        if size < bounds.first() or is_new:  # all items are removed, and the journal begins again, at an earlier position
            bounds.begin_at(size, mode, is_done=True)
        if is_new:
            self._resize(segments.path_of(base), length, mode)  # first: an empty directory would be a new journal
        later = [other for other in segments.bases() if other > base]
        for other in reversed(later):
            system.port.remove(segments.path_of(other))
        self._resize(segments.path_of(base), length, mode)
        offsets = self.offsets(segments.path, mode)
        for name in offsets.names():
            stored = offsets.load(name)
            if stored is not None and stored > size:
                with disk.step():
                    offsets.store(name, size)
        bounds.finish_rewind(size, mode)

    def prune(self, segments: Segments, first: int, mode: int) -> None:
        """Remove the blobs whose items are all below a position, as `first` announces; on disk when it returns."""
        gone = [base for base in segments.bases() if base + self.items_per_blob <= first]
        for base in gone:
            system.port.remove(segments.path_of(base))
        done = pruned(segments.path, first)
        disk.flush_directory(segments.directory, done=done)
        sidecar_bounds(segments.path).begin_at(first, mode, is_done=True, done=done)

    def _fill(self, segments: Segments, first: int, mode: int) -> None:
        """Create the blob of the first position. If that is within it, it contains zeros up to there, which are no items, and nothing else:
        this happens only in a fresh begin.
        """
        base = first - first % self.items_per_blob
        path = segments.path_of(base)
        if first > base:
            self._resize(path, 0, mode)
        if first > base or not segments.exists(base):
            self._resize(path, (first - base) * self.record_bytes, mode)

    def _resize(self, path: Path, size: int, mode: int) -> None:
        with Descriptor(path, os.O_RDWR | os.O_CREAT, mode) as fd:
            system.port.truncate(fd, size)
            system.port.flush(fd)
        disk.flush_directory(path.parent)

    def _check_blobs(self, segments: Segments) -> None:
        bases = segments.bases()
        for base, following in zip(bases, bases[1:], strict=False):
            if following != base + self.items_per_blob:
                raise Corruption(
                    f"{segments.path_of(base + self.items_per_blob)} is missing, although later blobs exist; nothing is appended to "
                    "such a journal, but it can be read; restore the blob, or copy the journal"
                )
        for base in bases:
            status = system.port.look_up(segments.path_of(base))
            if status is not None and (status.st_size > self.most_bytes or base != bases[-1] and status.st_size < self.most_bytes):
                raise Corruption(
                    f"{segments.path_of(base)} has {status.st_size} bytes instead of {self.most_bytes}: it is damaged, or items don't have "
                    f"{self.item_bytes} bytes, or blobs not {self.items_per_blob} items; nothing is appended, whole items can be read"
                )


def pruned(path: Path, first: int) -> str:
    """Describe a prune, for NameNotDurable."""
    return f"{path}: the items before {first} were removed"


def sidecar_bounds(path: Path) -> Bounds:
    """Return the bounds of the journal at a path."""
    return Bounds(sidecars.lock_file(path))
