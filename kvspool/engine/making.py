"""The checks before anything is created, the hidden directory in which a spool is created before it gets its name, and leftovers of crashed
creators.

`.NAME.ID.new` is next to NAME. Its creator holds an flock on the directory itself until the spool has its name, or the directory is
removed. The kernel frees that lock when the creator ends, and not while it is stopped. So a directory whose lock is free belongs to a dead
creator, or to one that has yet to lock it. The latter checks the name again after locking, and starts again with another ID if it was
removed.

**The name** is taken by a rename that replaces nothing. Only an empty directory is replaced, and only under its lock: creators of journals
hold that while they fill a directory. So of creators of any kinds at one path one succeeds.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvspool import system
from kvspool.engine import locks
from kvspool.options import TIMEOUT
from kvspool.system import disk, filesystems
from kvspool.system.descriptor import Descriptor
from kvspool.system.handles import Handle

NEW, RESIZE, DELETED = ".new", ".resize", ".deleted"
NOTE = "note"  # the file in `note_directory`
_SIDECAR = re.compile(r"\..+\.kvspool", re.DOTALL)  # of a journal whose format has no room for it
_NAME = re.compile(r"\.(?P<name>.+)\.(?P<id>[0-9a-f]{32})(?P<suffix>\.new|\.resize|\.deleted)", re.DOTALL)


def check_target(path: Path, mode: int, *, allow_unsafe_fs: bool) -> None:
    """Raise ValueError for an impossible mode or name, FileNotFoundError or UnsafeFilesystem if nothing can be created at a path."""
    if not 0o600 <= mode <= 0o666 or mode & 0o111:
        raise ValueError(f"mode is 0o600 with rights for others added, not {mode:#o}")
    if _NAME.fullmatch(path.name) or _SIDECAR.fullmatch(path.name):
        raise ValueError(f"{path} has a name that kvspool uses for files next to another log; choose another name")
    disk.check_parent(path)
    if not allow_unsafe_fs:
        filesystems.refuse_unsafe(path.parent)


def note_directory(path: Path) -> Path:
    """Return the hidden directory next to a log with the note of a copy to it; see `transfer.note`."""
    return path.with_name(f".{path.name}.copy")


class Unfinished(NamedTuple):
    """A hidden directory next to a log. name: of the log; suffix: NEW, RESIZE or DELETED; is_locked: its process is alive."""

    path: Path
    name: str
    suffix: str
    is_locked: bool


class Making(Handle):
    """A hidden directory, locked until `release`. id: the 16 bytes in its name."""

    def __init__(self, path: Path, id: bytes, lock: Descriptor) -> None:
        self.path = path
        self.id = id
        self._lock = lock

    def release(self) -> None:
        """Release the lock; once is enough. Raises the system's OSError."""
        self._lock.close()


@contextmanager
def directory(path: Path, discard: Callable[[Path], None]) -> Iterator[Making]:
    """Create a locked directory for the spool at `path`, for the `with` block.

    discard: removes it if the block raises; if that fails, a note of the error names the directory. Raises the system's OSError.
    """
    while True:
        id = system.port.random(16)
        building = path.with_name(f".{path.name}.{id.hex()}{NEW}")
        system.port.make_directory(building, 0o700)
        try:
            lock = _locked(building)
        except BaseException as error:
            _give_up(building, discard, error)
            raise
        if lock is not None:
            break
        discard(building)  # another process tested whether its creator is alive
    made = Making(building, id, lock)
    try:
        yield made
    except BaseException as error:
        _give_up(building, discard, error)
        raise
    finally:
        with suppress(OSError):  # it is closed anyway
            made.release()


def take_name(building: Path, path: Path) -> None:
    """Rename a directory to `path`, where there is nothing, or an empty directory. Waits while another process creates a log in that one.

    Raises LockTimeout; the system's OSError: ENOTEMPTY, EEXIST, ENOTDIR or ELOOP if something else is there.
    """

    def attempt() -> bool | None:
        try:
            system.port.rename_new(building, path)
            return True
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # the file system, or the kernel, has no such rename
                raise
            with suppress(FileExistsError):
                system.port.make_directory(path)
        lock = _locked(path)
        if lock is None:
            return None
        with lock:
            system.port.rename(building, path)
        return True

    locks.wait_for(attempt, TIMEOUT, lambda: f"another process is creating a log at {path}")


def _give_up(building: Path, discard: Callable[[Path], None], error: BaseException) -> None:
    """Remove the directory of a creator that failed with `error`, which gets a note if that fails, too."""
    try:
        discard(building)
    except OSError as why:
        error.add_note(f"{building} can't be removed ({why.strerror}): the next create of the same log retries it")


def remove_dead(path: Path, discard: Callable[[Path], None]) -> None:
    """Remove leftovers of dead creators of the spool at `path`. Those that can't be removed stay; `kvspool doctor` names them."""
    with suppress(PermissionError):  # of a parent with write permission, but without read permission
        for name in system.port.names(path.parent):
            found = _NAME.fullmatch(name)
            if found is not None and (found["name"], found["suffix"]) == (path.name, NEW):
                with suppress(OSError):
                    _remove(path.parent / name, discard)


def deleted(path: Path) -> list[str]:
    """Return the names of directories next to a path that seem to remain of killed deletions of the log there; see `claims`."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # of a parent that doesn't exist, or that we may not list
        matches = ((name, _NAME.fullmatch(name)) for name in system.port.names(path.parent))
        return [name for name, found in matches if found is not None and (found["name"], found["suffix"]) == (path.name, DELETED)]
    return []


def unfinished(parent: Path) -> Iterator[Unfinished]:
    """Yield the hidden directories of logs during creation or resize, or of dead creators."""
    for name in sorted(system.port.names(parent)):
        found = _NAME.fullmatch(name)
        if found is not None and os.path.isdir(parent / name):
            yield Unfinished(parent / name, found["name"], found["suffix"], _is_locked(parent / name))


def _remove(building: Path, discard: Callable[[Path], None]) -> None:
    lock = _locked(building)
    if lock is not None:
        with lock:
            discard(building)


def _is_locked(building: Path) -> bool:
    with suppress(OSError):
        lock = _locked(building)
        if lock is None:
            return True
        lock.close()
    return False


def _locked(building: Path) -> Descriptor | None:
    """Return an open directory with its lock; None if another process has the lock, or the directory was removed."""
    try:
        lock = Descriptor(building, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        if system.port.try_lock_file(lock.number, shared=False) and lock.is_at(building):
            return lock
    except BaseException:
        lock.close()
        raise
    lock.close()
    return None
