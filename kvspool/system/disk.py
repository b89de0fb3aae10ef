"""Small files, read and replaced whole, and the names in a directory, put on disk.

**A flush of a directory that fails** after a name was made, changed or removed can mean two things. Where the operation can be undone,
it is: so `make_directory` and `put_in_place` leave nothing, and the next attempt flushes again. Where it can't, NameNotDurable
says what was done (`done`). An operation passes `done` to its last flush only; an earlier one that fails raises the plain OSError.
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


def replace(path: Path, data: bytes, mode: int, *, rights: int | None = None, temporary: Path | None = None, done: str = "") -> None:
    """Let a file have these bytes; on disk when it returns. After a crash it is the old one or the new one, whole.

    mode: permission bits of the new file, less the umask; rights: the same, whatever the umask is. temporary: its name until then, on the
    same file system; `NAME.tmp` beside it by default, and what a crash has left there is overwritten. Two at a time may not replace a file.
    done: see `flush_directory`. Raises the system's OSError.
    """
    if temporary is None:
        temporary = path.with_name(f"{path.name}.tmp")
    with Descriptor(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode) as fd:
        if rights is not None:
            system.port.set_mode(fd, rights)
        system.port.write(fd, data, 0)
        system.port.flush(fd)
    system.port.rename(temporary, path)
    flush_directory(path.parent, done=done)


def make_directory(path: Path, mode: int = 0o700) -> bool:
    """Make a directory, its name on disk when this returns; False if it is there already. Nothing is left of it if the flush fails.

    Raises the system's OSError.
    """
    try:
        system.port.make_directory(path, mode)
    except FileExistsError:
        return False
    try:
        flush_directory(path.parent)
    except BaseException:
        with suppress(OSError):  # another process has put something into it already, and needs it
            system.port.remove_directory(path)
        raise
    return True


def put_in_place(building: Path, path: Path, release: Callable[[], None] | None = None) -> None:
    """Rename a complete file or directory, its new name on disk when this returns. If anything fails it gets its old name back.

    release: called under the new name, before the flush. Raises the system's OSError, or what `release` raises; NameNotDurable in place of
    an OSError if it couldn't get its old name back either.
    """
    system.port.rename(building, path)
    try:
        if release is not None:
            release()
        flush_directory(path.parent)
    except BaseException as error:
        try:
            system.port.rename(path, building)
        except OSError:
            if isinstance(error, OSError):
                raise NameNotDurable(f"{path} was made", os.fspath(path.parent), error) from error
        raise


@contextmanager
def step() -> Iterator[None]:
    """Raise the plain OSError in place of NameNotDurable: the `with` block is a step of an operation that fails as a whole."""
    try:
        yield
    except NameNotDurable as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None


def flush_directory(path: Path, mode: int | None = None, *, done: str = "") -> None:
    """Put the names in a directory on disk, after its permission bits were set if they are given.

    done: what was done before, in words ("X was removed"). Raises the system's OSError: as NameNotDurable if `done` is given.
    """
    try:
        _flush_directory(path, mode)
    except OSError as error:
        if not done:
            raise
        raise NameNotDurable(done, os.fspath(path), error) from error


def _flush_directory(path: Path, mode: int | None) -> None:
    with Descriptor(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        if mode is not None:
            system.port.set_mode(fd, mode)
        system.port.flush(fd)
