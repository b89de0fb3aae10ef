"""Delete a log, or give it another name.

Both refuse a log that is in use, and hold the claim of `engine.claims` together with all locks of the log itself; see `spool.claim` and
`journal.claim`.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvspool import system
from kvspool.engine import claims, making
from kvspool.engine.claims import Claim, Companion, Contents
from kvspool.errors import LogInUse, LogNotFound
from kvspool.groups.share import LISTS, beside
from kvspool.importing import import_whole
from kvspool.log import unsupported
from kvspool.opening import contents, logs
from kvspool.options import TIMEOUT
from kvspool.system import disk, holders
from kvspool.tasks.files import workers_in
from kvspool.tasks.stats import task_files

if TYPE_CHECKING:
    from kvspool.journal import Journal
    from kvspool.journal.format import Format

def delete(path: str | os.PathLike[str], *, timeout: float = TIMEOUT, missing_ok: bool = False, allow_unsafe_fs: bool = False) -> None:
    """Delete the log at `path`: records, durable readers, producers and settings. It is gone from the disk when the call returns.

    All records stay until one step takes the log away whole. So a crash leaves all of it or nothing; the next `delete` or `create` of the
    same path removes hidden files that a crash left. Handles that only read may be open: they raise LogVanished at their next use, and a
    blocked follower within a second. A crash of the machine can't bring a part of the log back.

    timeout: seconds to wait for processes that create a log there, or begin to use it. missing_ok: return if there is nothing.
    allow_unsafe_fs: as in `open`.

    Raises LogInUse, which names the processes, while a handle that has appended, or a durable reader, is open; LogNotFound, NotALog (also
    for a queue, and for a symbolic link); ENOTEMPTY if there are files of others in its directory; LockTimeout; PermissionError; or the
    system's OSError. Nothing was changed then. Two errors come after the deletion: NameNotDurable, if a crash of the machine could undo it,
    and ENOTEMPTY, if another program has put files into the directory since it was checked.
    """
    target = _resolved(path)
    contents.finish(target)
    try:
        with _claimed(target, timeout, allow_unsafe_fs) as (claim, names, companions), ExitStack() as stack:
            claims.refuse_others(target, claim.directory, names)
            next_to_it = []
            for companion in companions:
                directory = stack.enter_context(claims.companion_claimed(claim, companion, timeout))
                if directory is not None:
                    claims.refuse_others(target.with_name(companion.name), directory, companion.contents)
                    next_to_it.append((companion, directory))
            hidden = claims.hidden_name(target.name, claim.directory)
            claims.take_away(claim, hidden)
            for companion, directory in next_to_it:
                claims.dispose(claim.parent, companion.name, directory, companion.contents)
            claims.dispose(claim.parent, hidden, claim.directory, names)
    except LogNotFound:
        if not missing_ok:
            raise


def rename(
    path: str | os.PathLike[str], new: str | os.PathLike[str], *, timeout: float = TIMEOUT, allow_unsafe_fs: bool = False
) -> None:
    """Rename the log at `path` to `new`, where there is nothing, in the same file system. On disk when the call returns.

    It is one step: a crash leaves the log under one of the names. Nothing is ever replaced, not even an empty directory. Handles that are
    still open only read: those of a spool continue to read it, those of a journal raise LogVanished.

    timeout, allow_unsafe_fs: as in `delete`. Raises LogExists; Unsupported for journals of the kinds fflg and fixed, whose settings are in
    a second directory; LogInUse as `delete` does; ENOTEMPTY if the note of an unfinished copy to it is next to the log; LogNotFound,
    NotALog, LockTimeout, ValueError for an impossible name, or the system's OSError. Nothing was changed then. NameNotDurable: it was
    renamed, but a crash of the machine could undo that.
    """
    target, place = _resolved(path), _resolved(new)
    making.check_target(place, 0o600, allow_unsafe_fs=allow_unsafe_fs)
    with _claimed(target, timeout, allow_unsafe_fs, _refuse_unnamed) as (claim, _, companions), _lists_moved(target, place):
        for companion in companions[:1]:
            if system.port.look_up(claim.beside(companion.name)) is not None:
                words = "the note of a copy to the log is there; repeat the copy, or remove the note"
                raise OSError(errno.ENOTEMPTY, words, os.fspath(target.with_name(companion.name)))
        claims.give_name(claim, place)
    if os.path.lexists(place / logs.CONTROL_FILE):
        from kvspool.spool import claim as spools

        spools.trust_name(place, allow_unsafe_fs=allow_unsafe_fs)


@contextmanager
def _lists_moved(target: Path, place: Path) -> Iterator[None]:
    """Let the files of groups and task lists be next to a log that is renamed in the `with` block.

    They have both names meanwhile. So whenever a crash comes, they are next to the log; those of another log are removed at their next use.
    """
    names = [name for name in disk.names(beside(target)) if re.fullmatch(LISTS, name)]
    if names:
        disk.make_directory(beside(place))
    for name in names:
        with suppress(FileNotFoundError):
            system.port.remove(beside(place) / name)
        system.port.link(beside(target) / name, beside(place) / name)
    if names:
        disk.flush_directory(beside(place))
    try:
        yield
    except BaseException:
        _remove(beside(place), names)
        raise
    _remove(beside(target), names)


def _remove(directory: Path, names: list[str]) -> None:
    with suppress(OSError):  # leftovers do no harm
        for name in names:
            system.port.remove(directory / name)
        if names:
            system.port.remove_directory(directory)


def _refuse_workers(path: Path) -> None:
    """Raise LogInUse if a task list of the log has workers."""
    for file in task_files(beside(path)):
        if workers_in(file):
            raise LogInUse(path, "a worker of a task list of it is open")


def _refuse_unnamed(form: Format) -> None:
    if not form.can_be_renamed:
        raise unsupported(form.name, "rename")


def _resolved(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path whose parent directory is no symbolic link, and is found by none."""
    target = Path(os.path.abspath(path))
    return Path(os.path.realpath(target.parent)) / target.name


@contextmanager
def _claimed(
    path: Path, timeout: float, allow_unsafe_fs: bool, check: Callable[[Format], None] = lambda form: None
) -> Iterator[tuple[Claim, Contents, tuple[Companion, ...]]]:
    """Hold the claim and all locks of a log for the `with` block, which gets the names of its files and companions.

    check: raises for a format of journals. LogInUse names the processes that have files of the log open.
    """
    try:
        with claims.claimed(path, timeout) as claim, ExitStack() as stack:
            yield claim, *_locked(stack, path, timeout, allow_unsafe_fs, check)
    except LogInUse as error:
        found = holders.having_open(contents.files_of(path))
        raise LogInUse(path, error.what, tuple(found), holders.described(found)) from None


def _locked(
    stack: ExitStack, path: Path, timeout: float, allow_unsafe_fs: bool, check: Callable[[Format], None]
) -> tuple[Contents, tuple[Companion, ...]]:
    """Take all locks of the log at a claimed path. Return the names of its files, and its companions."""
    if os.path.lexists(path / logs.CONTROL_FILE):
        import_whole("kvspool.spool.claim")
        from kvspool.spool import claim as spools

        stack.enter_context(spools.locked(path, timeout, allow_unsafe_fs=allow_unsafe_fs))
        _refuse_workers(path)
        return spools.CONTENTS, (contents.note(path), contents.lists(path))
    with cast("Journal", logs.open(path, timeout=timeout)) as log:  # raises the error of what is there instead of a log
        form, mode = log.format, log.mode()
    check(form)
    import_whole("kvspool.journal.claim")
    from kvspool.journal import claim as journals

    stack.enter_context(journals.locked(path, form, mode))
    _refuse_workers(path)
    return journals.contents(form), (contents.note(path), journals.companion(path))


