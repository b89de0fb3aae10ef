"""The header file of a queue: opened or created, and locked so that the original and kvspool exclude each other.

The original locks every byte of the file exclusively (a POSIX lock) while it has the queue open, and fails if it can't. kvspool's handles
share the byte IN_USE by locks of their open file descriptions; the two kinds exclude each other.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import LogExists, LogNotFound, NotAFile, NotALog, Truncated
from kvspool.queue import format
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

ALL = (1 << 63) - 1  # bytes from 0 on: every possible one


def create(path: Path, mode: int) -> None:
    """Create an empty header, its name on disk when the call returns. Raises LogExists; removed if it fails.

    The first owner of the lock OPERATION writes the two bytes; that may be another process.
    """
    try:
        file = Descriptor(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise LogExists(f"{path} exists already; kvspool.queue.open opens a queue") from error
    with file as fd:
        try:
            system.port.set_mode(fd, mode)
            disk.flush_directory(path.parent)
        except BaseException:
            with suppress(OSError):
                system.port.remove(path)
            raise


def open(path: Path, timeout: float) -> Descriptor:
    """Return a descriptor of the header, with a shared lock on IN_USE.

    Raises LogNotFound, NotALog, Truncated; LockTimeout, which names the process, if the original has the queue open, or another process
    repairs it.
    """
    while True:
        try:
            file = Descriptor(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise LogNotFound(f"{path} does not exist; kvspool.queue.create makes a queue") from error
        except NotAFile as error:
            raise NotALog(str(error)) from None
        try:
            fd = file.number
            _share(fd, path, timeout)
            if is_at(path, fd):
                _refuse_strange(path, fd)
                return file
        except BaseException:
            file.close()
            raise
        file.close()  # its last user removed it while we waited


def _share(fd: int, path: Path, timeout: float) -> None:
    locks.wait_for(lambda: system.port.try_share(fd, format.IN_USE, 1) or None, timeout, lambda: holder(fd, path))


def _refuse_strange(path: Path, fd: int) -> None:
    status = system.port.status(fd)
    if status.st_size > format.HEADER.size:
        raise NotALog(f"{path} is not a queue: its header is a file of {format.HEADER.size} bytes")
    if status.st_size == 1:
        raise Truncated(f"{path} has lost a byte of its two; see kvspool repair")


def is_at(path: Path, fd: int) -> bool:
    """Return whether the file at `path` is the one that is open as `fd`."""
    try:
        file = Descriptor(path, os.O_PATH)
    except FileNotFoundError:
        return False
    with file as named:
        there, ours = system.port.status(named), system.port.status(fd)
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) and ours.st_nlink > 0


def holder(fd: int, path: Path) -> str:
    """Describe the holder of a lock of the header, as far as it is known: a POSIX lock has an owner, the others have none."""
    pid = system.port.lock_owner(fd, 0, ALL)
    if pid > 0:
        return f"process {pid} ({system.port.process_state(pid)}) has {path} open for itself alone, as QewQew does"
    if pid < 0:
        return f"another process uses {path}, or repairs it; its process id is unknown"
    return f"the holder of {path} has just released it"


def is_queue(path: Path) -> bool:
    """Return whether there is a queue at a path: a file of 2 bytes, and its chunks next to it, unless it refers to none."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != format.HEADER.size:
            return False
        is_empty = disk.read(path, format.HEADER.size + 1) == bytes(format.HEADER.size)
        return is_empty or any(format.chunk_id(path, name) for name in system.port.names(path.parent))
    except OSError:
        return False
