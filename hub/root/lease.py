"""The lock of a durable reader's name: only one process has it open, until it closes it or crashes.

It is a lock of the kernel, on a file next to the positions. Its holder stores its identity there, for error messages of others.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import ReaderBusy
from kvspool.system import forks, holders
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

SUFFIX = ".lock"
_WORDS = struct.Struct("<4Q")  # see `holders`
_BYTE = 1 << 20  # the locked byte, after the words
_AFTER_DEATH, _PAUSE = 50, 0.002  # checks, and seconds between them, of a lock whose holder has ended


class ReaderLease(Handle):
    """Open it by the path of the name's lock file; `close` releases it."""

    def __init__(self, path: Path, name: str, *, shared: bool = False) -> None:
        """Take the lock. shared: with the other members of a group. Raises ReaderBusy, which names the holder."""
        self._path = path
        self._shared = shared
        self._name = name
        self._process = system.port.process_id()
        self._file: Descriptor | None = None
        while not self._take():
            pass
        forks.register(self)

    @property
    def is_ours(self) -> bool:
        """Return whether this process holds the lock."""
        return self._file is not None and self._process == system.port.process_id()

    def _take(self) -> bool:
        """Take the lock. Return False if a deletion of the reader has removed the file in the meantime."""
        file = Descriptor(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fd = file.number
            self._lock(fd)
            if not file.is_at(self._path):
                locks.give_back(file, self._process)
                return False
            if not self._shared:
                system.port.write(fd, _WORDS.pack(*holders.ours()), 0)
        except BaseException:
            locks.give_back(file, self._process)
            raise
        self._file = file
        return True

    def _lock(self, fd: int) -> None:
        for _ in range(_AFTER_DEATH):
            if system.port.try_share(fd, _BYTE, 1) if self._shared else system.port.try_lock(fd, _BYTE):
                return
            words = _words(fd)
            if not system.port.is_shared(fd, _BYTE) and (words is None or not holders.is_gone(words)):
                break
            system.port.sleep(_PAUSE)  # the kernel is about to free it
        raise ReaderBusy(f"the reader {self._name!r} is already open in {_described(fd)}; {self._path} is locked")

    def forked(self) -> None:
        """Detach in a forked child: the lock belongs to the parent; only our copy of its descriptor is closed."""
        self.close()

    def close(self) -> None:
        """Release the name."""
        file, self._file = self._file, None
        if file is not None:
            locks.give_back(file, self._process)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:  # dropped: a child that another thread forks now must not keep the lock
            self.close()


def holder(path: Path) -> str:
    """Return a description of the holder of a lock file; "" if there is none."""
    try:
        file = Descriptor(path, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    with file as fd:
        return _described(fd) if system.port.is_locked(fd, _BYTE) else ""


def _words(fd: int) -> tuple[int, ...] | None:
    data = system.port.read(fd, _WORDS.size, 0)
    return _WORDS.unpack(data) if len(data) == _WORDS.size else None


def _described(fd: int) -> str:
    if system.port.is_shared(fd, _BYTE):
        return "a group of processes, which `kvspool group` shows"
    words = _words(fd)
    return "another process" if words is None else holders.describe(words)
