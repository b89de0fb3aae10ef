"""The positions of a journal's durable readers: a number for each name, and a lock while it is open.

A number is the sequence of the reader's next record. It is replaced whole, by a temporary file that is flushed and renamed: after a crash
it is the old one or the new one.
"""

from __future__ import annotations

import os
import re
import struct
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvspool import system
from kvspool.engine import locks
from kvspool.engine.stats import Consumer
from kvspool.errors import Corruption, NoSuchReader, ReaderBusy
from kvspool.groups.fencing import remove_unfinished, replace_fenced
from kvspool.system import disk, forks
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

if TYPE_CHECKING:
    from kvspool.groups.share import Fence

LONGEST_NAME = 200  # bytes, so that the names of its files fit in a directory entry
_PID = struct.Struct("<Q")  # the content of the file of a lease: its last holder
_NAME = re.compile(r"[A-Za-z0-9_@][A-Za-z0-9_@.-]*")


def check_name(name: str) -> str:
    """Return a reader's name. Raises ValueError for one that must not become part of a path."""
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ValueError(
            f"a reader's name is up to {LONGEST_NAME} letters, digits and _ @ . -, and doesn't begin with . or -; not {name!r}"
        )
    return name


def moved(name: str, sequence: int) -> str:
    """Describe `store`, for NameNotDurable."""
    return f"the reader {name!r} was moved to sequence {sequence}"


def deleted(name: str) -> str:
    """Describe `remove`, for NameNotDurable."""
    return f"the reader {name!r} was deleted"


class Lease(Handle):
    """The lock of a name: no other process has it open until `close`, or until this process ends."""

    def __init__(self, path: Path, mode: int, name: str) -> None:
        """Take the file's lock. Raises ReaderBusy."""
        self._process = system.port.process_id()
        while not self._take(path, mode, name):
            pass
        forks.register(self)

    def _take(self, path: Path, mode: int, name: str) -> bool:
        """Take the lock. Return False if the file was replaced meanwhile; see `Offsets.displace`."""
        self._file = Descriptor(path, os.O_RDWR | os.O_CREAT, mode)
        if not system.port.try_lock_file(self._file.number, shared=False):
            self.close()
            raise ReaderBusy(f"the reader {name!r} is open elsewhere, as a reader or in a group; {path} is locked")
        if self._file.is_at(path):
            system.port.write(self._file.number, _PID.pack(self._process), 0)
            return True
        self.close()
        return False

    def forked(self) -> None:
        """Close it in a forked child: otherwise the child would keep the name locked after its parent has ended."""
        self.close()

    def close(self) -> None:
        """Release the name. A forked child only closes the descriptor: the lock is its parent's."""
        locks.give_back_file(self._file, self._process)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # otherwise `__init__` failed before it opened it
            self.close()

    @property
    def is_closed(self) -> bool:
        """Return whether the name was released, or is the parent's in a forked child."""
        return self._file.is_closed


def remove_lease(path: Path, pid: int) -> None:
    """Remove the file of a lease that the process `pid` holds, so that others get another one; not that of any other process."""
    with suppress(FileNotFoundError), Descriptor(path, os.O_RDONLY) as fd:
        if system.port.read(fd, _PID.size, 0) == _PID.pack(pid):
            system.port.remove(path)


class Offsets(ABC):
    """The durable readers of one journal."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all readers, in order."""

    @abstractmethod
    def load(self, name: str) -> int | None:
        """Return a reader's position; None if there is no such reader. Raises Corruption."""

    @abstractmethod
    def store(self, name: str, sequence: int, fence: Fence | None = None) -> None:
        """Set a reader's position; on disk when it returns. fence: raises Revoked, and then the position does not change."""

    @abstractmethod
    def displace(self, name: str, pid: int) -> None:
        """Let others `take` a reader whose lease the process `pid` holds, a former member of its group. Its stores fail by their fence."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a reader. Raises NoSuchReader."""

    def slowest(self) -> int | None:
        """Return the lowest position of a reader; None if there is none. Raises Corruption if one is unreadable."""
        places = [self.load(name) for name in self.names()]
        return min((place for place in places if place is not None), default=None)

    def listing(self, end: int) -> list[Consumer]:
        """Return the position of each reader, and its distance from a sequence."""
        found = []
        for name in self.names():
            try:
                sequence = self.load(name)
            except (OSError, ValueError, Corruption) as error:
                found.append(Consumer(name, None, 0, str(error)))
                continue
            if sequence is not None:
                found.append(Consumer(name, sequence, max(0, end - sequence)))
        return found

    @abstractmethod
    def take(self, name: str) -> Lease:
        """Return the reader's lease. Raises ReaderBusy."""

    @abstractmethod
    def updated(self, name: str) -> int:
        """Return when a reader's position was last stored, ns since the Unix epoch; 0 if unknown."""


class OffsetFiles(Offsets):
    """A file of 8 bytes for each reader, big-endian, and one for its lock: sej's `ofs` directory, which the program of sej reads, too."""

    def __init__(self, directory: Path, mode: int = 0o600) -> None:
        self.directory = directory
        self._mode = mode

    def names(self) -> list[str]:
        stems = (name[:-4] for name in disk.names(self.directory) if name.endswith(".ofs"))
        return sorted(stem for stem in stems if _NAME.fullmatch(stem))

    def load(self, name: str) -> int | None:
        path = self._path(name)
        try:
            data = disk.read(path, 9)
        except FileNotFoundError:
            return None
        if len(data) != 8:
            raise Corruption(
                f"{path} doesn't have 8 bytes but {len(data)}{'' if len(data) < 9 else ' or more'}; delete the reader, or restore the file"
            )
        return int.from_bytes(data, "big")

    def store(self, name: str, sequence: int, fence: Fence | None = None) -> None:
        path = self._path(name)
        self._make_directory()
        if fence is None:
            disk.replace(path, sequence.to_bytes(8, "big"), self._mode, done=moved(name, sequence))
        else:
            replace_fenced(path, sequence.to_bytes(8, "big"), self._mode, moved(name, sequence), fence)

    def displace(self, name: str, pid: int) -> None:
        remove_unfinished(self._path(name))
        remove_lease(self._lock_path(name), pid)

    def updated(self, name: str) -> int:
        status = system.port.look_up(self._path(name))
        return 0 if status is None else status.st_mtime_ns

    def remove(self, name: str) -> None:
        try:
            system.port.remove(self._path(name))
        except FileNotFoundError:
            raise NoSuchReader(f"{self.directory} has no reader {name!r}") from None
        disk.flush_directory(self.directory, done=deleted(name))

    def take(self, name: str) -> Lease:
        self._make_directory()
        return Lease(self._lock_path(name), self._mode, name)

    def _lock_path(self, name: str) -> Path:
        return self._path(name).with_suffix(".lck")

    def _path(self, name: str) -> Path:
        return self.directory / f"{check_name(name)}.ofs"

    def _make_directory(self) -> None:
        disk.make_directory(self.directory)
