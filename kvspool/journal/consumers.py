"""The positions of all consumers of an FFLG journal: one file, `index`, shared by all of them.

It is replaced whole, by a temporary file that is flushed and renamed, at each commit and under a lock: after a crash it is the old one or
the new one. Content of other programs is kept: the order of the entries, ids that are not UTF-8, bytes after the last whole entry. Two
processes of kvspool never lose each other's commits; another program that writes at the same time takes no lock. The lock, the leases and
the temporary file are in the hidden directory next to the journal; an id is never a part of a path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from kvspool import system
from kvspool.engine import locks
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, NoSuchReader
from kvspool.journal import sidecars
from kvspool.journal.format import LAST_SEQUENCE
from kvspool.journal.offsets import Lease, Offsets, deleted, moved, remove_lease
from kvspool.options import TIMEOUT
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

if TYPE_CHECKING:
    from kvspool.groups.share import Fence

INDEX = "index"
LARGEST = 1 << 24  # largest index that is read, in bytes
LONGEST_ID = 4096  # longest id that we write, in bytes


class ConsumerPlace(NamedTuple):
    """The bytes before a consumer's id."""

    id_length: Annotated[int, "I", "bytes of the id, which is UTF-8"]
    offset: Annotated[int, "Q", "sequence of the record that the consumer reads next"]


PLACE = Layout(ConsumerPlace, ">")


class StoredConsumers(NamedTuple):
    """The content of an index.

    entries: ids as stored, and positions; rest: bytes after the last whole entry.
    """

    entries: list[tuple[bytes, int]]
    rest: bytes

    def places(self) -> dict[bytes, int]:
        """Return the position of each consumer; of two entries with one id the later one counts."""
        return dict(self.entries)

    def id_of(self, name: str) -> bytes:
        """Return the id of a name: its UTF-8, or an id that is not UTF-8 and is shown with escapes. Raises ValueError for an id that we
        don't write.
        """
        id = name.encode()
        if len(id) > LONGEST_ID:
            raise ValueError(f"a consumer's name has up to {LONGEST_ID} bytes of UTF-8, not {len(id)}")
        places = self.places()
        return id if id in places else next((other for other in places if _shown(other) == name), id)


def read_index(directory: Path) -> bytes:
    """Return the bytes of the index in a directory; none if there is no such file. Raises Corruption for one that is too large."""
    try:
        data = disk.read(directory / INDEX, LARGEST + 1)
    except FileNotFoundError:
        return b""
    if len(data) > LARGEST:
        raise Corruption(f"{directory / INDEX} is larger than {LARGEST} bytes; it is not an index of consumers")
    return data


def parse_index(data: bytes) -> StoredConsumers:
    """Parse an index. It never allocates more than the size of the bytes."""
    entries = []
    at = 0
    while at + PLACE.size <= len(data):
        length, offset = PLACE.unpack(data, at)
        end = at + PLACE.size + length
        if end > len(data):
            break
        entries.append((data[at + PLACE.size : end], offset))
        at = end
    return StoredConsumers(entries, data[at:])


def pack_index(index: StoredConsumers) -> bytes:
    """Return the bytes of an index."""
    return b"".join(PLACE.pack(ConsumerPlace(len(id), offset)) + id for id, offset in index.entries) + index.rest


class ConsumerIndex(Offsets):
    """The consumers of the journal in a directory. A name is any text whose UTF-8 has up to 4096 bytes."""

    def __init__(self, directory: Path, mode: int = 0o600, timeout: float = TIMEOUT) -> None:
        """mode: of new files. timeout: seconds to wait for another process that replaces the index."""
        self.directory = directory
        self._mode = mode
        self._timeout = timeout

    def names(self) -> list[str]:
        return sorted(_shown(id) for id in self._read().places())

    def load(self, name: str) -> int | None:
        index = self._read()
        place = index.places().get(index.id_of(name))
        if place is None and index.rest:
            raise self._damaged(index)
        return place

    def slowest(self) -> int | None:
        index = self._read()
        if index.rest:
            raise self._damaged(index)
        return min(index.places().values(), default=None)

    def store(self, name: str, sequence: int, fence: Fence | None = None) -> None:
        """Set a consumer to a sequence. Raises Corruption for a new one if the index is damaged; LockTimeout."""
        if not 0 <= sequence <= LAST_SEQUENCE:
            raise ValueError(f"a sequence is an unsigned number of 64 bits, not {sequence}")
        with self._locked():
            index = self._read()
            places = index.places()
            id = index.id_of(name)
            if id not in places and index.rest:
                raise self._damaged(index)
            places[id] = sequence
            if fence is not None:
                fence()
            self._replace(StoredConsumers(list(places.items()), index.rest), moved(name, sequence))

    def updated(self, name: str) -> int:
        return 0

    def remove(self, name: str) -> None:
        with self._locked():
            index = self._read()
            places = index.places()
            if places.pop(index.id_of(name), None) is None:
                raise NoSuchReader(f"{self.directory / INDEX} has no consumer {name!r}")
            self._replace(StoredConsumers(list(places.items()), index.rest), deleted(name))

    def displace(self, name: str, pid: int) -> None:
        """Do as `Offsets.displace`. Raises LockTimeout while a former member is stopped during its store."""
        with self._locked():
            remove_lease(sidecars.reader_lock(self.directory, self._read().id_of(name)), pid)

    def take(self, name: str) -> Lease:
        sidecars.prepare(self.directory)
        return Lease(sidecars.reader_lock(self.directory, self._read().id_of(name)), self._mode, name)

    def _read(self) -> StoredConsumers:
        return parse_index(read_index(self.directory))

    def _damaged(self, index: StoredConsumers) -> Corruption:
        at = len(pack_index(index)) - len(index.rest)
        return Corruption(
            f"{self.directory / INDEX} has no whole entry at byte {at}, so further consumers are unknown; "
            f"truncate it to {at} bytes to continue without them, or restore it"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the index against other replacements during the `with` block."""
        sidecars.prepare(self.directory)
        path = sidecars.beside(self.directory) / "index.lck"
        process = system.port.process_id()
        file = Descriptor(path, os.O_RDWR | os.O_CREAT, self._mode)
        try:
            with locks.held(file, 0, self._timeout, lambda: f"another process has locked {path} to replace the index of consumers"):
                yield
        finally:
            locks.give_back(file, process)

    def _replace(self, index: StoredConsumers, done: str) -> None:
        """Under the lock: replace the index, on disk. done: see `disk.flush_directory`."""
        path = self.directory / INDEX
        temporary = sidecars.beside(self.directory) / "index.tmp"
        before = system.port.look_up(path)
        rights = None if before is None else before.st_mode & 0o666
        disk.replace(path, pack_index(index), self._mode, rights=rights, temporary=temporary, done=done)


def _shown(id: bytes) -> str:
    """Return a readable id; bytes that are not UTF-8 as `\\xff`."""
    return id.decode("utf-8", "backslashreplace")
