"""A durable reader's name, taken: nobody else has it open until it is given back, or this process dies.

The lock is one of the kernel's, on a file beside the positions. Its holder writes down who he is, so that others can be told.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from kvspool import forks, holders, locks, system
from kvspool.descriptor import Descriptor
from kvspool.errors import ReaderBusy
from kvspool.handles import Handle

SUFFIX = ".lock"
_WORDS = struct.Struct("<4Q")  # see `holders`
_BYTE = 1 << 20  # that is locked: behind the words
_AFTER_DEATH, _PAUSE = 50, 0.002  # looks, and seconds between them, at a lock whose holder has ended


class ReaderLease(Handle):
    """Get it by the name's lock file; `close` gives it back."""

    def __init__(self, path: Path, name: str) -> None:
        """Take the lock. Raises ReaderBusy, which names the holder."""
        self._path = path
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
        """Take the lock; False if whoever deleted the reader has removed the file meanwhile."""
        file = Descriptor(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fd = file.number
            self._lock(fd)
            ours, there = system.port.status(fd), system.port.look_up(self._path)
            if there is None or (ours.st_ino, ours.st_dev) != (there.st_ino, there.st_dev):
                locks.give_back(file, self._process)
                return False
            system.port.write(fd, _WORDS.pack(*holders.ours()), 0)
        except BaseException:
            locks.give_back(file, self._process)
            raise
        self._file = file
        return True

    def _lock(self, fd: int) -> None:
        for _ in range(_AFTER_DEATH):
            if system.port.try_lock(fd, _BYTE):
                return
            words = _words(fd)
            if words is None or not holders.is_gone(words):
                break
            system.port.sleep(_PAUSE)  # the kernel is about to free it
        raise ReaderBusy(f"the reader {self._name!r} is open already: {_described(fd)} has it; {self._path} is locked")

    def forked(self) -> None:
        """In a forked child: the lock is the parent's; only our copy of its descriptor goes."""
        self.close()

    def close(self) -> None:
        """Give the name back."""
        file, self._file = self._file, None
        if file is not None:
            locks.give_back(file, self._process)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:  # dropped: a child that another thread forks now must not keep the lock
            self.close()


def holder(path: Path) -> str:
    """Return who holds a lock file, in words for people; nothing if nobody does."""
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
    words = _words(fd)
    return "another process" if words is None else holders.describe(words)
