"""What is ours alone of a journal in whose directory there is no place for it: a hidden directory beside the journal.

A program whose format it is may take every file in its directory for one of its own. So `log`'s settings and locks lie in `.log.kvspool`,
in the same parent. It is found from the directory itself, not from the name that somebody used for it: a symbolic link leads to the same
locks. A journal that is moved without it opens with the defaults; nothing that was appended depends on it.

The lock file bears the number of the journal's directory in its file system. So what writers noted of one journal is never taken for a word
about another one that came to its place.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from kvspool import system
from kvspool.errors import UnsafeFilesystem
from kvspool.system import disk

_LOCK = re.compile(r"writers-.*\.lck")


def beside(path: Path) -> Path:
    """Return the hidden directory of the journal at a path."""
    real = Path(os.path.realpath(path))
    return real.with_name(f".{real.name}.kvspool")


def lock_file(path: Path) -> Path:
    """Return the writers' lock file of the journal at a path."""
    try:
        name = system.port.identity(os.path.realpath(path))
    except FileNotFoundError:
        name = "gone"
    return beside(path) / f"writers-{name}.lck"


def prepare(path: Path, *, is_new: bool = False) -> None:
    """Make the hidden directory, with the rights of the journal's own. A lock file of another journal, which is there no more, goes: who
    still has it open learns so that his journal was removed. is_new: one that seems to be ours goes too.

    Raises UnsafeFilesystem if the journal lies where a mount begins: writers that come to it by another path would have other locks. Raises
    the system's OSError, for a parent that we may not write to, say.
    """
    real = Path(os.path.realpath(path))
    if os.path.ismount(real):
        raise UnsafeFilesystem(
            f"{real} is a mount of its own; its locks lie beside it, where others that have it mounted don't see them: mount its parent"
        )
    status = system.port.look_up(real)
    directory = beside(path)
    disk.make_directory(directory, 0o700 if status is None else 0o700 | (status.st_mode & 0o055))
    there = system.port.look_up(directory)
    owners = (system.port.user_id(), 0 if status is None else status.st_uid)
    if there is None or not stat.S_ISDIR(there.st_mode) or there.st_uid not in owners:
        raise PermissionError(errno.EACCES, "it is no directory of the user whose journal it stands beside; remove it", str(directory))
    ours = "" if is_new else lock_file(path).name
    for name in system.port.names(directory):
        if _LOCK.fullmatch(name) and name != ours:
            with suppress(FileNotFoundError):
                system.port.remove(directory / name)
