"""Read and replace small files as a whole, and flush the names in a directory.

**A failed flush of a directory** after a name was created, changed or removed has one of two results. An empty directory is removed
again: so `make_directory` leaves nothing, and the next attempt flushes again. Nothing else is undone, since other processes may use it
already: NameNotDurable describes the operation (`done`). An operation passes `done` only to its last flush; an earlier one that fails
raises the plain OSError.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvspool import system
from kvspool.errors import NameNotDurable
from kvspool.system.descriptor import Descriptor


def read(path: Path, most: int, at: int = 0) -> bytes:
    """Return the bytes of a file from `at` on, up to `most`. Raises the system's OSError."""
    with Descriptor(path, os.O_RDONLY) as fd:
        return system.port.read(fd, most, at)


def names(directory: Path) -> list[str]:
    """Return the names in a directory; none if there is no directory."""
    try:
        return system.port.names(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def replace(
    path: Path,
    data: bytes,
    mode: int,
    *,
    rights: int | None = None,
    temporary: Path | None = None,
    done: str = "",
    check: Callable[[], None] | None = None,
) -> None:
    """Replace the contents of a file; on disk when it returns. After a crash it is the old or the new one, whole.

    mode: permission bits of the new file, less the umask; rights: the same, regardless of the umask. temporary: its name until then, on the
    same file system; by default `NAME.tmp` next to it. A leftover of a crash is overwritten. Two callers at once may not replace the same
    file. done: see `flush_directory`. check: called before the rename; its error keeps the old file. Raises the system's OSError.
    """
    if temporary is None:
        temporary = path.with_name(f"{path.name}.tmp")
    with Descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode) as fd:
        if rights is not None:
            system.port.set_mode(fd, rights)
        system.port.write(fd, data, 0)
        system.port.flush(fd)
    if check is not None:
        check()
    system.port.rename(temporary, path)
    flush_directory(path.parent, done=done)


def check_parent(path: Path) -> None:
    """Raise FileNotFoundError, with the next step, if the directory in which `path` is to be created is missing."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a directory; create it first")


def make_directory(path: Path, mode: int = 0o700) -> bool:
    """Create a directory, its name on disk when this returns; False if it exists. If the flush fails, the directory is removed.

    Raises the system's OSError.
    """
    try:
        system.port.make_directory(path, mode)
    except FileExistsError:
        return False
    try:
        flush_directory(path.parent)
    except BaseException:
        with suppress(OSError):  # another process has created files in it already, and needs it
            system.port.remove_directory(path)
        raise
    return True


@contextmanager
def step() -> Iterator[None]:
    """Raise the plain OSError instead of NameNotDurable: the `with` block is a step of an operation that fails as a whole."""
    try:
        yield
    except NameNotDurable as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


def flush_directory(path: Path, mode: int | None = None, *, done: str = "") -> None:
    """Flush the names in a directory to disk, after setting its permission bits if they are given.

    done: the finished operation, in words ("X was removed"). Raises the system's OSError: as NameNotDurable if `done` is given.
    """
    try:
        _flush_directory(path, mode)
    except OSError as error:
        if not done:
            raise
        raise NameNotDurable(done, os.fspath(path), error) from error


@contextmanager
def flushed_names(path: Path, done: str) -> Iterator[None]:
    """Flush the names in a directory after the `with` block, which changes them and can't be undone.

    The directory is opened first, so a lack of descriptors fails before the block: as the system's OSError. done: see `flush_directory`.
    """
    is_done = False
    try:
        with _opened(path) as fd:
            yield
            is_done = True
            system.port.flush(fd)
    except OSError as error:
        if not is_done:
            raise
        raise NameNotDurable(done, os.fspath(path), error) from error


def _flush_directory(path: Path, mode: int | None) -> None:
    with _opened(path) if mode is None else Descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        if mode is not None:
            system.port.set_mode(fd, mode)
        system.port.flush(fd)


def _opened(path: Path) -> Descriptor:
    """Open a directory, which may be found by a link: a user's path may lead through one."""
    return Descriptor(os.path.realpath(path), os.O_RDONLY | os.O_DIRECTORY)
