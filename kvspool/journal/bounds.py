"""Where a journal with items of one length begins and how it was shortened: what its blobs can't say.

**Begin.** `.first` holds the position below which no item counts, whatever lies in the blobs: a fresh begin in the midst of a blob fills it
up with zeros, and a prune notes what it will remove. It is replaced whole, on disk, before the blobs are touched; a missing one says 0.

**Rewinds.** Other items may come at positions that somebody has read already. So a rewind leaves two entries in `.rewinds`: one before the
blobs are touched, on disk, one after that. Who reads looks at the file's size *after* having read, and so learns of every rewind that
what was read may come from. Between the two entries, items below the new end are all that may be handed out; a writer that finds a single
entry has the rewind of a dead one to finish. Entries stay; 24 bytes for each rewind.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

from kvspool import system
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption
from kvspool.kernel.frames import crc32c
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor


class First(NamedTuple):
    """The content of `first`."""

    position: Annotated[int, "Q", "of the oldest item that counts"]
    is_done: Annotated[int, "I", "1: the blobs agree; 0: older ones are still to be removed, or the blob filled up"]
    checksum: Annotated[int, "I", "CRC32C register after what stands before it, from all ones on"]


class Rewind(NamedTuple):
    """An entry of `rewinds`. The first one, the third one and so on tell of a rewind that begins, those behind them of its end."""

    size: Annotated[int, "Q", "the position of the next item, from then on"]
    checksum: Annotated[int, "I", "CRC32C register after what stands before it, from all ones on"]


ALL_ONES = 0xFFFF_FFFF  # where the checksum begins, so that zeros have none
FIRST = Layout(First, ">")
REWIND = Layout(Rewind, ">")


class Bounds:
    """The two files. They have the name of the writers' lock file and a suffix, so that none is taken for another journal's."""

    def __init__(self, lock_file: Path) -> None:
        self.directory = lock_file.parent
        self._first = lock_file.with_suffix(".first")
        self._rewinds = lock_file.with_suffix(".rewinds")

    def forget(self) -> None:
        """Remove what an earlier journal has left."""
        for path in (self._first, self._rewinds):
            with suppress(FileNotFoundError):
                system.port.remove(path)

    def first(self) -> int:
        """Return the position below which no item counts. Raises Corruption."""
        return self._load().position

    def begun(self) -> int | None:
        """Return the position with which the blobs don't agree yet; None if they do. Raises Corruption."""
        first = self._load()
        return None if first.is_done else first.position

    def _load(self) -> First:
        try:
            data = disk.read(self._first, FIRST.size + 1)
        except (FileNotFoundError, NotADirectoryError):
            return First(0, True, 0)
        return FIRST.unpack(_checked(self._first, data, FIRST.size))

    def begin_at(self, position: int, mode: int, *, is_done: bool = False, done: str = "") -> None:
        """Let no item below a position count; on disk when it returns. is_done: the blobs agree. done: see `disk.flush_directory`."""
        disk.replace(self._first, _packed(FIRST.pack(First(position, is_done, 0))), mode, done=done)

    def entries(self) -> int:
        """Return how many whole entries there are: an odd number while a rewind goes on."""
        status = system.port.look_up(self._rewinds)
        return 0 if status is None else status.st_size // REWIND.size

    def lowest(self, since: int, until: int) -> int:
        """Return the least size that the entries from `since` up to `until`, one at least, rewind to. Raises Corruption."""
        data = disk.read(self._rewinds, (until - since) * REWIND.size, since * REWIND.size)
        pieces = [data[at : at + REWIND.size] for at in range(0, len(data), REWIND.size)]
        if len(pieces) != until - since:
            raise Corruption(f"{self._rewinds} has become shorter; open the journal again to read what is there")
        return min(REWIND.unpack(_checked(self._rewinds, piece, REWIND.size)).size for piece in pieces)

    def unfinished(self) -> int | None:
        """Return the size that a rewind leads to which is going on, or whose process has died; None: there is none. Raises Corruption."""
        count = self.entries()
        return self.lowest(count - 1, count) if count % 2 else None

    def begin_rewind(self, size: int, mode: int) -> None:
        """Say that items from the position `size` on will go; on disk when it returns. Under the append lock, with none unfinished."""
        self._add(size, mode, is_begin=True)

    def finish_rewind(self, size: int, mode: int) -> None:
        """Say that they are gone. Under the append lock."""
        self._add(size, mode, is_begin=False)

    def _add(self, size: int, mode: int, *, is_begin: bool) -> None:
        with Descriptor(self._rewinds, os.O_WRONLY | os.O_CREAT, mode) as fd:
            count = system.port.status(fd).st_size // REWIND.size  # the rest of one that was torn is written over
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
        raise Corruption(f"{path} is damaged, so nobody knows which items count; kvspool copy takes out what the blobs hold")
    return data
