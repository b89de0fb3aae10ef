"""Remove the files of a log, and no others, in steps that another process can finish.

A removal begins with one rename: the file or directory by which the log is recognized becomes the *marker*, in a directory of the log, its
*home*. Before it the log is whole; after it no process can open the log. Then known files are removed by name, the marker last. Meanwhile
the home keeps its name, and the remover holds an flock on it. So no other log can be created there, and no file of one is removed. The next
process that finds a marker whose remover was killed finishes the work.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvspool import system
from kvspool.engine import locks
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

TRIES = 100  # of removing a directory in which handles of the removed log leave files


MARKER = "kvspool.deleted"


class LogFiles(NamedTuple):
    """The files of a log, without its core. folders: the pattern of file names in each directory of the home; "" is the home itself, MARKER
    the marker if it is a directory. magic: the first bytes of a marker that is a file.
    """

    folders: Mapping[str, re.Pattern[str]]
    magic: bytes = b""


def is_begun(home: Path, layout: LogFiles) -> bool:
    """Return whether there is a marker, as far as this process may look."""
    marker = home / MARKER
    with suppress(OSError):
        status = system.port.look_up(marker)
        if status is not None and MARKER in layout.folders:
            return stat.S_ISDIR(status.st_mode)
        return status is not None and stat.S_ISREG(status.st_mode) and disk.read(marker, len(layout.magic)) == layout.magic
    return False


def refuse_foreign(home: Path, layout: LogFiles, core: Path) -> None:
    """Raise OSError for anything in the log's directories that isn't the log's. core: the path that becomes the marker."""
    found = []
    for folder, pattern in layout.folders.items():
        directory = core if folder == MARKER else home / folder
        for name in _names(directory):
            is_core = directory / name == core and not os.path.islink(core)
            is_folder = not folder and name in layout.folders and name != MARKER
            if not is_core and not _is_own(directory / name, pattern, may_be_folder=is_folder):
                found.append(os.path.relpath(directory / name, home))
    if found:
        words = f"the log's directory holds other files ({', '.join(sorted(found)[:3])}); move them away first"
        raise OSError(errno.ENOTEMPTY, words, os.fspath(home))


def _is_own(path: Path, pattern: re.Pattern[str], *, may_be_folder: bool) -> bool:
    status = system.port.look_up(path)
    if status is None or (may_be_folder and stat.S_ISDIR(status.st_mode)):
        return True
    return stat.S_ISREG(status.st_mode) and pattern.fullmatch(path.name) is not None


@contextmanager
def alone(directory: Path, timeout: float) -> Iterator[bool]:
    """Keep other removers, and creators of journals, out of a directory during the `with` block, which gets False if it was removed, or is
    none.
    """
    process = system.port.process_id()
    try:
        file = Descriptor(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        yield False
        return
    try:
        words = f"another process creates or deletes the log at {directory}"
        locks.wait_for(lambda: system.port.try_lock_file(file.number, shared=False) or None, timeout, lambda: words)
        yield is_at(directory, file)
    finally:
        with suppress(OSError):  # the descriptor is closed then, too, and had nothing to write
            locks.give_back_file(file, process)


def is_at(path: Path, file: Descriptor) -> bool:
    """Return whether a path is that of an open file."""
    there, ours = system.port.look_up(path), system.port.status(file.number)
    return there is not None and (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def finish(home: Path, layout: LogFiles, timeout: float) -> bool:
    """Finish a removal whose process was killed; False if there is none. Waits for one under way.

    Raises as `refuse_foreign` and `clear`, and LockTimeout.
    """
    with alone(home, timeout) as is_there:
        if not is_there or not is_begun(home, layout):
            return False
        refuse_foreign(home, layout, home / MARKER)
        clear(home, layout)
        return True


def clear(home: Path, layout: LogFiles) -> None:
    """Remove the files of a log that has a marker, then the marker and the home; their names are gone from the disk when it returns. The
    caller is inside `alone`.

    Raises the system's OSError, for example for a foreign file that was created meanwhile; NameNotDurable if only the last flush failed.
    """
    marker = home / MARKER
    left = f"the log was deleted, but not all of its files: delete {home} again to finish that"
    try:
        for folder, pattern in layout.folders.items():
            if folder:
                _remove_files(home / folder, pattern)
            if folder not in ("", MARKER):
                _remove_directory(home / folder)
        _remove_files(home, layout.folders[""], kept=MARKER)
        disk.flush_directory(home)  # while there are files, there is the marker
        if MARKER in layout.folders:
            _remove_directory(marker)
        else:
            with suppress(FileNotFoundError):
                system.port.remove(marker)
        left = f"the log was deleted, but not the directory {home}, which contains no file of it"
        _remove_home(home, layout.folders[""])
    except OSError as error:
        error.add_note(left)
        raise
    disk.flush_directory(home.parent, done=f"{home} was deleted")


def _remove_home(home: Path, pattern: re.Pattern[str]) -> None:
    """Remove the empty home. A handle that was about to append may have created a lock file in it, once."""
    for _ in range(TRIES):
        try:
            _remove_directory(home)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _remove_files(home, pattern, is_late=True)
    _remove_directory(home)


def _remove_files(directory: Path, pattern: re.Pattern[str], *, kept: str = "", is_late: bool = False) -> None:
    """Remove the files of a log in a directory. is_late: except those that a process has locked, of another program."""
    for name in _names(directory):
        path = directory / name
        if name != kept and _is_own(path, pattern, may_be_folder=False) and not (is_late and _is_locked(path)):
            with suppress(FileNotFoundError):
                system.port.remove(path)


def _is_locked(path: Path) -> bool:
    try:
        with Descriptor(path, os.O_RDWR) as fd:
            return not system.port.try_lock_file(fd, shared=False)
    except FileNotFoundError:
        return False


def _remove_directory(path: Path) -> None:
    with suppress(FileNotFoundError):
        system.port.remove_directory(path)


def _names(directory: Path) -> list[str]:
    """Return the names in a directory; none if there is no directory, or a link."""
    status = system.port.look_up(directory)
    if status is None or not stat.S_ISDIR(status.st_mode):
        return []
    with suppress(FileNotFoundError):
        return system.port.names(directory)
    return []
