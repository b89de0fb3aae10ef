"""kvspool's own files for a journal whose directory can't contain them: a hidden directory next to the journal.

A program that owns the format may treat every file in its directory as one of its own. So `log`'s settings and locks are in `.log.kvspool`,
in the same parent. It is found from the directory itself, not from the name by which it was opened: a symbolic link leads to the same
locks. A journal that is moved without it opens with the defaults; appended records don't depend on it.

The names of the lock files of writers and readers contain the identity of the journal's directory. So the notes of one journal are never
applied to another one at the same path, and a reader of one keeps no reader of the other out.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from kvspool import system
from kvspool.engine.claims import directory_locked
from kvspool.errors import UnsafeFilesystem
from kvspool.options import TIMEOUT
from kvspool.system import disk

_LOCK = re.compile(r"writers-.*\.lck")


def beside(path: Path) -> Path:
    """Return the hidden directory of the journal at a path."""
    real = Path(os.path.realpath(path))
    return real.with_name(f".{real.name}.kvspool")


def lock_file(path: Path) -> Path:
    """Return the writers' lock file of the journal at a path."""
    return beside(path) / f"writers-{_identity(path)}.lck"


def reader_lock(path: Path, id: bytes) -> Path:
    """Return the lock file of a durable reader of the journal at a path."""
    import hashlib

    digest = hashlib.sha256(b"%s %s" % (_identity(path).encode(), id)).hexdigest()
    return beside(path) / f"reader-{digest[:32]}.lck"


def _identity(path: Path) -> str:
    try:
        return system.port.identity(os.path.realpath(path))
    except FileNotFoundError:
        return "gone"


def prepare(path: Path, *, is_new: bool = False) -> None:
    """Create the hidden directory, with the permissions of the journal's own. A lock file of a journal that no longer exists is removed:
    handles that still have it open learn that their journal was removed. is_new: remove also one that seems to be ours.

    A deletion of an earlier journal of the name may be removing the directory: it is waited for.

    Raises UnsafeFilesystem if the journal is a mount point: writers that reach it by another path would have other locks. Raises
    LockTimeout, or the system's OSError, for example for a parent without write permission.
    """
    real = Path(os.path.realpath(path))
    if os.path.ismount(real):
        raise UnsafeFilesystem(
            f"{real} is a mount point; its locks are next to it, where other mounts of it don't see them: mount its parent"
        )
    directory = beside(path)
    while not _is_made(directory, system.port.look_up(real)):
        pass
    ours = "" if is_new else lock_file(path).name
    for name in system.port.names(directory):
        if _LOCK.fullmatch(name) and name != ours:
            with suppress(FileNotFoundError):
                system.port.remove(directory / name)


def _is_made(directory: Path, status: os.stat_result | None) -> bool:
    """Create the hidden directory unless it exists; False if a deletion has removed it since. `status`: of the journal's directory."""
    disk.make_directory(directory, 0o700 if status is None else 0o700 | (status.st_mode & 0o055))
    there = system.port.look_up(directory)
    owners = (system.port.user_id(), 0 if status is None else status.st_uid)
    if there is None or not stat.S_ISDIR(there.st_mode) or there.st_uid not in owners:
        raise PermissionError(errno.EACCES, "it is not a directory of the owner of the journal; remove it", str(directory))
    with directory_locked(directory, TIMEOUT, shared=True) as is_there:
        return is_there
