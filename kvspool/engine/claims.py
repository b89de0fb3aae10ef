"""The lock of a log's directory, and the removal of a deleted log.

**The lock** is an `flock` on the directory itself. A creator of a journal holds it exclusively until the journal is complete. A handle of
a journal shares it while it takes a lock that it keeps: that of its writer, or of a durable reader. A deletion or renaming, the *claim*,
holds it exclusively, and checks below it that no handle has a lock that is kept. So no handle is between its check of the path and its lock
while a log is taken away; later ones find that the log is gone.

**A deletion** is one rename, to the hidden name `.NAME.ID.deleted`. It is flushed before any file is removed. So a crash leaves the whole
log under its name, or only a hidden directory. The next deletion or creation of the same name finds that, and removes it. ID is derived
from the identity of the directory: a directory that a user gave such a name, or restored from a copy, is left alone.

**Files of others.** Files are removed through the claimed directory's descriptor, so that no renaming of a path leads to others. Only
regular files with names of the log's are removed, and `refuse_others` finds all others first.

**Companions** are hidden directories next to the log, with files that belong to it. They are claimed before the log is taken away, and
removed before the hidden directory: so that shows whether they remain. They stay if a new log has the name meanwhile, and are that one's.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvspool import system
from kvspool.engine import locks
from kvspool.engine.making import DELETED, deleted
from kvspool.errors import KvspoolError, LogExists, LogNotFound, LogVanished, NameNotDurable, NotALog
from kvspool.system.descriptor import Descriptor

_SHOWN = 3  # names of others in an error
_UNSUPPORTED = (errno.EINVAL, errno.ENOSYS)  # by a file system or kernel without RENAME_NOREPLACE

IsOurs = Callable[[str], bool]


class Contents(NamedTuple):
    """The names of a log's files. is_file: of regular files in its directory; folders: of directories in it, each with its files."""

    is_file: IsOurs
    folders: dict[str, IsOurs]


class Companion(NamedTuple):
    """A hidden directory next to a log. name: of the directory; is_file: see `Contents`; folders: see there."""

    name: str
    contents: Contents


class Claim:
    """An exclusively locked directory, and the open directory that contains its name."""

    def __init__(self, path: Path, parent: Descriptor, directory: Descriptor) -> None:
        self.path = path
        self.parent = parent
        self.directory = directory

    def beside(self, name: str) -> Path:
        """Return the path of another name in the same parent directory, whatever that is called meanwhile."""
        return inside(self.parent) / name

    def is_at(self, path: Path) -> bool:
        """Return whether a path leads to the claimed directory."""
        return self.directory.is_at(path)


@contextmanager
def directory_locked(path: Path, timeout: float, *, shared: bool, undo: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock of a log's directory for the `with` block, which gets False if the directory was removed.

    shared: for a handle that takes a lock which it keeps; otherwise for a creator. undo: called under the lock if the block raises, and
    without it if the directory can't be opened. Raises LockTimeout, or the system's OSError.
    """
    process = system.port.process_id()
    real = os.path.realpath(path)
    try:
        file = Descriptor(real, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    except BaseException:
        undo()
        raise
    try:
        _lock(file, path, timeout, shared=shared)
        try:
            yield file.is_at(real)
        except BaseException:
            undo()
            raise
    finally:
        with suppress(OSError):  # the descriptor is closed then, too, and had nothing to write
            locks.give_back_file(file, process)


@contextmanager
def claimed(path: Path, timeout: float) -> Iterator[Claim]:
    """Claim the directory at an absolute path for the `with` block. Raises LogNotFound, NotALog, LockTimeout, or the system's OSError."""
    parent = _parent(path)
    try:
        there = system.port.look_up(inside(parent) / path.name)
        if there is None:
            raise LogNotFound(f"{path} does not exist")
        if stat.S_ISLNK(there.st_mode):
            raise NotALog(f"{path} is a symbolic link; give the path of the log, {os.path.realpath(path)}")
        if not stat.S_ISDIR(there.st_mode):
            raise NotALog(f"{path} is not a directory of a log")
        with _open(inside(parent) / path.name, path, timeout) as directory:
            yield Claim(path, parent, directory)
    finally:
        parent.close()


@contextmanager
def companion_claimed(claim: Claim, companion: Companion, timeout: float) -> Iterator[Descriptor | None]:
    """Claim a companion of a claimed log for the `with` block, which gets None if there is none. Raises LockTimeout, or the system's
    OSError.
    """
    place = claim.beside(companion.name)
    if not _is_directory(place):
        yield None
        return
    with _open(place, claim.path.with_name(companion.name), timeout) as directory:
        yield directory


@contextmanager
def _open(place: Path, path: Path, timeout: float) -> Iterator[Descriptor]:
    process = system.port.process_id()
    try:
        directory = Descriptor(place, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise _gone(path) from None
    except OSError as error:
        error.filename = os.fspath(path)  # and not our path of it
        raise
    try:
        _lock(directory, path, timeout, shared=False)
        if not directory.is_at(place):
            raise _gone(path)
        yield directory
    finally:
        with suppress(OSError):
            locks.give_back_file(directory, process)


def _gone(path: Path) -> LogNotFound:
    return LogNotFound(f"{path} was deleted or renamed by another process at this moment")


def _lock(directory: Descriptor, path: Path, timeout: float, *, shared: bool) -> None:
    def attempt() -> bool | None:
        return system.port.try_lock_file(directory.number, shared=shared) or None

    words = f"another process is creating a log at {path}, deletes it, or begins to use it"
    locks.wait_for(attempt, timeout, lambda: words)


def inside(directory: Descriptor) -> Path:
    """Return a path of an open directory that no renaming changes."""
    return Path(f"/proc/self/fd/{directory.number}")


def refuse_others(path: Path, directory: Descriptor, contents: Contents) -> None:
    """Raise ENOTEMPTY if a directory holds anything but files of the log; `path` is for the message."""
    others = sorted(_others(inside(directory), contents))
    if others:
        names = ", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
        raise OSError(errno.ENOTEMPTY, f"it holds files that are not the log's ({names}); move them away", os.fspath(path))


def _others(here: Path, contents: Contents) -> Iterator[str]:
    for name in system.port.names(here):
        if name in contents.folders and _is_directory(here / name):
            within = contents.folders[name]
            yield from (f"{name}/{one}" for one in system.port.names(here / name) if not _is_ours(here / name / one, within))
        elif not _is_ours(here / name, contents.is_file):
            yield name


def _is_ours(place: Path, is_file: IsOurs) -> bool:
    there = system.port.look_up(place)
    return there is None or (stat.S_ISREG(there.st_mode) and is_file(place.name))


def take_away(claim: Claim, name: str) -> None:
    """Delete a claimed log for all other processes: rename it to a hidden name in the same directory. On disk when it returns.

    Raises LogVanished, the system's OSError, with the log in place; NameNotDurable if only the flush of the parent directory failed.
    """
    _rename(claim, claim.beside(name), claim.path.with_name(name))
    _flush(claim.parent, f"{claim.path} was deleted", claim.path.parent)


def give_name(claim: Claim, path: Path) -> None:
    """Rename a claimed log to an absolute path at which there is nothing. On disk when it returns.

    Raises LogExists, LogVanished, the system's OSError, with the log in place; NameNotDurable if only a flush of a parent directory failed.
    """
    done = f"{claim.path} was renamed to {path}"
    with _parent(path) as number:
        _rename(claim, Path(f"/proc/self/fd/{number}") / path.name, path)
        try:
            system.port.flush(number)
        except OSError as error:
            raise NameNotDurable(done, os.fspath(path.parent), error) from error
    _flush(claim.parent, done, claim.path.parent)


def _rename(claim: Claim, place: Path, path: Path) -> None:
    here = claim.beside(claim.path.name)
    try:
        system.port.rename_new(here, place)
    except FileExistsError:
        raise LogExists(f"{path} exists already; nothing was changed") from None
    except OSError as error:
        error.filename, error.filename2 = os.fspath(claim.path), os.fspath(path)
        if error.errno in _UNSUPPORTED:
            error.add_note("this file system can't rename without replacing what another process creates at the same moment")
        if error.errno == errno.EXDEV:
            error.add_note("a log is renamed within one file system; kvspool.copy copies it to another one")
        raise
    if not claim.is_at(place):  # another program has exchanged it since our check
        system.port.rename_new(place, here)
        raise LogVanished(f"{claim.path} was replaced at this moment; nothing was changed")


def hidden_name(name: str, directory: Descriptor) -> str:
    """Return the hidden name of a deleted log, for its open directory."""
    import hashlib

    identity = system.port.identity(inside(directory))
    return f".{name}.{hashlib.sha256(identity.encode()).hexdigest()[:32]}{DELETED}"


def dispose(parent: Descriptor, name: str, directory: Descriptor, contents: Contents) -> None:
    """Remove the files of a claimed directory, and it from its parent. Raises ENOTEMPTY if others have put files there meanwhile."""
    here = inside(directory)
    for folder, is_file in contents.folders.items():
        if _is_directory(here / folder):
            with Descriptor(here / folder, os.O_RDONLY | os.O_DIRECTORY) as number:
                _remove_files(Path(f"/proc/self/fd/{number}"), is_file)
            with suppress(FileNotFoundError):
                system.port.remove_directory(here / folder)
    _remove_files(here, contents.is_file)
    place = inside(parent) / name
    if directory.is_at(place):
        system.port.remove_directory(place)


def _remove_files(here: Path, is_file: IsOurs) -> None:
    for name in system.port.names(here):
        there = system.port.look_up(here / name)
        if there is not None and stat.S_ISREG(there.st_mode) and is_file(name):
            with suppress(FileNotFoundError):
                system.port.remove(here / name)


def finish(path: Path, contents: Contents, companions: tuple[Companion, ...]) -> None:
    """Finish the killed deletions of the log at an absolute path. Remains that can't be removed stay; `kvspool doctor` names them."""
    with suppress(OSError), closing(_parent(path)) as parent:
        for name in deleted(path):
            with suppress(OSError, KvspoolError), _open(inside(parent) / name, path.with_name(name), 0.0) as directory:
                if hidden_name(path.name, directory) == name:
                    system.port.flush(parent.number)  # on disk, it may still have the log's name
                    for companion in companions:
                        _dispose_abandoned(parent, path, companion)
                    dispose(parent, name, directory, contents)


def _dispose_abandoned(parent: Descriptor, path: Path, companion: Companion) -> None:
    """Remove a companion, unless there is a log: it is that one's then."""
    place = inside(parent) / companion.name
    if _is_directory(place):
        with _open(place, path.with_name(companion.name), 0.0) as directory:
            if system.port.look_up(inside(parent) / path.name) is None:
                dispose(parent, companion.name, directory, companion.contents)


def _parent(path: Path) -> Descriptor:
    try:
        return Descriptor(os.path.realpath(path.parent), os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise LogNotFound(f"{path.parent} does not exist") from None


def _flush(directory: Descriptor, done: str, path: Path) -> None:
    try:
        system.port.flush(directory.number)
    except OSError as error:
        raise NameNotDurable(done, os.fspath(path), error) from error


def _is_directory(place: Path) -> bool:
    there = system.port.look_up(place)
    return there is not None and stat.S_ISDIR(there.st_mode)
