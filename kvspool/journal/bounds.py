"""The begin of a journal with items of one length, and its truncations, which its blobs can't show.

**Begin.** `.first` contains the position below which no item counts, whatever the blobs contain: a fresh begin within a blob fills it with
zeros, and a prune stores what it will remove. It is replaced whole, on disk, before the blobs are changed; a missing one means 0.

**Rewinds.** Later items may get positions that a reader has already read. So a rewind writes two entries in `.rewinds`: one before the
blobs are changed, on disk, and one after that. A reader checks the file's size *after* reading, and so learns of every rewind that may
affect the items read. Between the two entries, only items below the new end may be returned. A writer that finds a single entry finishes
the rewind of a dead one. Entries stay; 24 bytes for each rewind.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

from kvspool import system
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, LogVanished
from kvspool.kernel.frames import crc32c
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor


class First(NamedTuple):
    """The content of `first`."""

    position: Annotated[int, "Q", "of the oldest item that counts"]
    is_done: Annotated[int, "I", "1: the blobs agree; 0: older ones are still to be removed, or the blob filled up"]
    checksum: Annotated[int, "I", "CRC32C register after what stands before it, from all ones on"]


class Rewind(NamedTuple):
    """An entry of `rewinds`. Odd ones (the first, the third and so on) mark the begin of a rewind, even ones its end."""

    size: Annotated[int, "Q", "the position of the next item, from then on"]
    checksum: Annotated[int, "I", "CRC32C register after what stands before it, from all ones on"]


ALL_ONES = 0xFFFF_FFFF  # initial value, so that zeros have no valid checksum
FIRST = Layout(First, ">")
REWIND = Layout(Rewind, ">")


class Bounds:
    """The two files. They have the name of the writers' lock file and a suffix, so that they can't be those of another journal."""

    def __init__(self, lock_file: Path) -> None:
        self.directory = lock_file.parent
        self._first = lock_file.with_suffix(".first")
        self._rewinds = lock_file.with_suffix(".rewinds")

    def forget(self) -> None:
        """Remove the files of an earlier journal."""
        for path in (self._first, self._rewinds):
            with suppress(FileNotFoundError):
                system.port.remove(path)

    def first(self) -> int:
        """Return the position below which no item counts. Raises Corruption."""
        return self._load().position

    def begun(self) -> int | None:
        """Return the position for which the blobs are not adjusted yet; None if they are. Raises Corruption."""
        first = self._load()
        return None if first.is_done else first.position

    def _load(self) -> First:
        try:
            data = disk.read(self._first, FIRST.size + 1)
        except (FileNotFoundError, NotADirectoryError):
            return First(0, True, 0)
        return FIRST.unpack(_checked(self._first, data, FIRST.size))

    def begin_at(self, position: int, mode: int, *, is_done: bool = False, done: str = "") -> None:
        """Let no item below a position count; on disk when it returns. is_done: the blobs are adjusted. done: see
        `disk.flush_directory`.
        """
        disk.replace(self._first, _packed(FIRST.pack(First(position, is_done, 0))), mode, done=done)

    def entries(self) -> int:
        """Return the number of whole entries: odd during a rewind."""
        status = system.port.look_up(self._rewinds)
        return 0 if status is None else status.st_size // REWIND.size

    def lowest(self, since: int, until: int) -> int:
        """Return the least size of the rewinds in the entries from `since` up to `until`, at least one. Raises Corruption, LogVanished."""
        try:
            data = disk.read(self._rewinds, (until - since) * REWIND.size, since * REWIND.size)
        except FileNotFoundError:
            raise LogVanished(f"{self._rewinds} was removed; open the journal again if it exists") from None
        pieces = [data[at : at + REWIND.size] for at in range(0, len(data), REWIND.size)]
        if len(pieces) != until - since:
            raise Corruption(f"{self._rewinds} has become shorter; open the journal again to read what is there")
        return min(REWIND.unpack(_checked(self._rewinds, piece, REWIND.size)).size for piece in pieces)

    def unfinished(self) -> int | None:
        """Return the size of an unfinished rewind, of a living or dead process; None: there is none. Raises Corruption."""
        count = self.entries()
        return self.lowest(count - 1, count) if count % 2 else None

    def begin_rewind(self, size: int, mode: int) -> None:
        """Announce the removal of items from the position `size` on; on disk when it returns. Under the append lock, with none
        unfinished.
        """
        self._add(size, mode, is_begin=True)

    def finish_rewind(self, size: int, mode: int) -> None:
        """Mark the rewind as finished. Under the append lock."""
        self._add(size, mode, is_begin=False)

    def _add(self, size: int, mode: int, *, is_begin: bool) -> None:
        with Descriptor(self._rewinds, os.O_WRONLY | os.O_CREAT, mode) as fd:
            count = system.port.status(fd).st_size // REWIND.size  # a torn rest is overwritten
            assert (count % 2 == 0) == is_begin
            system.port.write(fd, _packed(REWIND.pack(Rewind(size, 0))), count * REWIND.size)
            system.port.flush(fd)
        if count == 0:
            disk.flush_directory(self.directory)


def _packed(data: bytes) -> bytes:
    """Return the bytes of a record, with its checksum."""
    data = data[:-4]
    return data + crc32c(ALL_ONES, data).to_bytes(4, "big")


def _checked(path: Path, data: bytes, size: int) -> bytes:
    if len(data) != size or int.from_bytes(data[-4:], "big") != crc32c(ALL_ONES, data[:-4]):
        raise Corruption(f"{path} is damaged, so it is unknown which items count; kvspool copy copies the items in the blobs")
    return data
