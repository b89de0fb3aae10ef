"""An open file and its number, owned by one object.

A signal handler may raise an exception between any two steps of Python code. A bare number is lost if that happens after the system has
opened the file, and closed twice if it happens after the system has closed it. The second close would close another file that has the
number by then. So a number is never stored alone: the result of the system call goes into a C object that closes it, within one call that
no handler can interrupt.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from pathlib import Path
from types import TracebackType

from kvspool import system
from kvspool.errors import Closed, NotAFile
from kvspool.system.handles import Handle

_NO_FILE = os.O_PATH | os.O_DIRECTORY  # flags for directories, and for names without opening the file
_OTHER_KINDS = (errno.ENXIO, errno.EISDIR, errno.ENODEV)  # the kernel's errors for a socket, a FIFO, a directory, a device
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Descriptor:
    """An open file. Its last path component is not followed as a link, and it closes on exec. It is closed at the latest when the object is
    freed.

    The owner is an `epoll` object made from the number. It knows nothing about the file, and forgets the number before it closes it, so it
    closes it once. It does so without any Python code when it is collected, so that no handler's exception is swallowed there.
    """

    __slots__ = ("__weakref__", "_file", "holds", "path")

    def __init__(self, path: str | os.PathLike[str], flags: int, mode: int = 0o600) -> None:
        """Open a regular file, or with O_DIRECTORY a directory, without blocking.

        Raises the system's OSError; NotAFile for a FIFO, a socket, a device, or a directory where a file is expected: opening a FIFO may
        block, and reading a device may never end. A regular file ignores O_NONBLOCK.
        """
        self.path = path
        self.holds: dict[int, object] = {}  # the holders of byte locks, see `locks.held`
        try:
            self._file = next(map(select.epoll.fromfd, map(system.port.open, (path,), (flags | system.PRIVATE_FILE,), (mode,))))
        except OSError as error:
            there = system.port.look_up(path) if error.errno in _OTHER_KINDS else None
            if there is None or stat.S_ISREG(there.st_mode):
                raise
            raise _not_a_file(path, there.st_mode) from None
        if not flags & _NO_FILE:
            self._check_kind()

    def _check_kind(self) -> None:
        """Raise NotAFile, and close the file, unless it is a regular file."""
        try:
            kind = system.port.status(self.number).st_mode
            if not stat.S_ISREG(kind):
                raise _not_a_file(self.path, kind)
        except BaseException:
            self.close()
            raise

    @property
    def number(self) -> int:
        """Return the number of the open file. Raises Closed."""
        try:
            return self._file.fileno()
        except ValueError:
            raise Closed(f"{os.fspath(self.path)} was closed by this handle; open the log again") from None

    @property
    def is_closed(self) -> bool:
        """Return whether it was closed."""
        return self._file.closed

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether the open file is the one at a path."""
        ours, there = system.port.status(self.number), system.port.look_up(path)
        return there is not None and (ours.st_ino, ours.st_dev) == (there.st_ino, there.st_dev)

    def close(self) -> None:
        """Close the file, if it is open. Raises the system's OSError; the file is closed then, too."""
        if not self._file.closed:
            system.port.close(self._file)

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class OpenFile(Handle):
    """A handle on one file, under the name `path`."""

    path: Path
    _file: Descriptor

    @property
    def fd(self) -> int:
        """Return the number of the open file. Raises Closed."""
        return self._file.number

    @property
    def is_closed(self) -> bool:
        """Return whether it was closed."""
        return self._file.is_closed

    def is_gone(self) -> bool:
        """Return whether the file no longer has a name."""
        return system.port.status(self.fd).st_nlink == 0

    def is_in_place(self) -> bool:
        """Return whether the name refers to the open file."""
        return self._file.is_at(self.path)


def _not_a_file(path: str | os.PathLike[str], mode: int) -> NotAFile:
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    return NotAFile(f"{os.fspath(path)} is not a regular file, but {kind}: move it away, or restore the file")
