"""The locks of a spool that is deleted or renamed.

All locks of the log are held, in the common order, and its word `moved` is set, as in a resize: it means "check the path". A writer, of any
version, checks it under the append lock, and finds nothing, or another log, at the path. So no record is appended to a deleted spool,
also by a writer that waited for the lock. Open durable readers, and writers that have appended, hold locks: the log is in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from kvspool import system
from kvspool.engine.claims import Contents
from kvspool.errors import KvspoolError, LogInUse
from kvspool.kernel import frames_py as frames
from kvspool.kernel import machine
from kvspool.kernel.lock_py import WRITER_SLOTS, WRITER_SLOTS_AT
from kvspool.spool import format, resize
from kvspool.spool.reader import administering
from kvspool.spool.spool_files import SpoolFiles
from kvspool.system.descriptor import Descriptor

CONTENTS = Contents(resize.NAMES.__contains__, {})


@contextmanager
def locked(path: Path, timeout: float, *, allow_unsafe_fs: bool) -> Iterator[None]:
    """Hold every lock of the spool at a claimed path for the `with` block, which may take the path away.

    Raises LogInUse if a handle has appended, or has a durable reader open; LockTimeout, PermissionError, and the errors of `SpoolFiles`.
    """
    files = SpoolFiles(path, allow_unsafe_fs=allow_unsafe_fs)
    try:
        if not files.is_writable:
            raise files.refusal("delete or rename")
        with administering(lambda: files, timeout) as admin:
            _refuse_users(files, admin.file)
            resize.remove_leftovers(path)
            with resize.all_locks(files, admin.file, timeout):
                _refuse_users(files, admin.file)
                words = files.control.cast("Q")
                try:
                    words[frames.MOVED] = 1
                    machine.fence()
                    yield
                except BaseException:
                    if files.is_in_place():
                        words[frames.MOVED] = 0
                    raise
    finally:
        files.close()


def trust_name(path: Path, *, allow_unsafe_fs: bool) -> None:
    """Reset the word `moved` of a spool whose new name is on disk. Otherwise the next writer does it, so errors are ignored."""
    with suppress(KvspoolError, OSError), closing(SpoolFiles(path, allow_unsafe_fs=allow_unsafe_fs)) as files:
        files.trust_name()


def _refuse_users(files: SpoolFiles, file: Descriptor) -> None:
    """Raise LogInUse if another open file description holds the lock of a writer or durable reader. `file` has those of this one."""
    if system.port.locked_from(file.number, WRITER_SLOTS_AT, WRITER_SLOTS) >= 0:
        raise LogInUse(files.path, "a handle that has appended to it is open")
    if system.port.locked_from(file.number, format.READER_LOCKS, len(format.SLOTS)) >= 0:
        raise LogInUse(files.path, "a durable reader of it is open")
