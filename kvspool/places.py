"""Delete or rename a log: a spool or a journal.

**In use.** A writer, an open durable reader and a resize hold locks, so a log with one of them is refused, and new ones wait until the name
has changed. Handles that only read hold no lock. After a rename they continue to read. After a deletion they read what they have mapped,
and report LogVanished as soon as they look at the path.

**A crash.** Both take effect with one rename of the log's directory, which is on disk when the call returns. A deletion first renames it to
a hidden name, `.NAME.ID.deleted`, and then removes it. The next `create` or `delete` of that name removes the leftovers of a killed
process. The files next to a journal's directory (`.NAME.kvspool`) get their new names by hard links before a rename, and lose the old ones
after it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from kvspool import _frames_py as frames
from kvspool import disk, holders, locks, system
from kvspool.descriptor import Descriptor
from kvspool.errors import LogExists, LogNotFound, NotALog
from kvspool.journal import control
from kvspool.journal import files as journals
from kvspool.journal.format import Format
from kvspool.queue import is_queue
from kvspool.spool import format, making, resize, slots

_BESIDE = re.compile(r"(kvspool\.(json|repair)|producers)(\.tmp)?|.+\.removed-[0-9]+(\.[0-9]+)?")


def delete(path: str | os.PathLike[str], *, timeout: float = 0) -> None:
    """Delete the spool or journal at `path` with all of its records; its name is removed from the disk when the call returns.

    timeout: seconds to wait until no process writes to the log, resizes it, or has a durable reader of it open. A damaged log is deleted,
    too; a symbolic link is not followed.

    Raises LogNotFound; NotALog for anything else, also for a queue, shard set or hub root; LockTimeout, which names the user of the log; or
    the system's OSError (no permission, or files in the log's directory that aren't the log's). The log is then unchanged, except after
    NameNotDurable: it is deleted, but a crash of the machine may restore it.
    """
    with _held(path, timeout) as log:
        hidden = log.path.with_name(f".{log.path.name}.{system.port.random(16).hex()}{making.DELETED}")
        disk.put_in_place(log.path, hidden)
        making.remove_tree(hidden)
        if log.beside is not None:
            making.remove_tree(log.beside)
        disk.flush_directory(log.path.parent, done=f"{log.path} was deleted")


def rename(path: str | os.PathLike[str], target: str | os.PathLike[str], *, timeout: float = 0) -> None:
    """Rename the spool or journal at `path` to `target`, in the same file system; on disk when the call returns.

    Sequences, settings and durable readers stay the same. timeout: see `delete`.

    Raises LogExists if `target` exists; LogNotFound, NotALog, LockTimeout as `delete`; or the system's OSError, for example for a target in
    another file system; `kvspool.copy` copies a log there. The log then has its old name, except after NameNotDurable: it has the new one,
    but a crash of the machine may undo that.
    """
    goal = Path(os.path.abspath(target))
    if not goal.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "it is not a directory; create it first", str(goal.parent))
    with _held(path, timeout) as log:
        if os.path.lexists(goal):
            raise LogExists(f"{goal} exists already; delete it, or choose another name")
        with _linked(log, goal):
            disk.put_in_place(log.path, goal)
        if log.beside is not None:
            making.remove_tree(log.beside)
        disk.flush_directory(log.path.parent, done=f"{log.path} was renamed to {goal}")


class _Log:
    """A log that is not in use. path: its directory. beside: a hidden directory that belongs to it; None without one."""

    def __init__(self, path: Path, form: Format | None) -> None:
        self.path = path
        self.form = form
        sidecar = path if form is None else form.sidecar(path)
        self.beside = sidecar if sidecar != path and sidecar.is_dir() and not sidecar.is_symlink() else None


@contextmanager
def _held(path: str | os.PathLike[str], timeout: float) -> Iterator[_Log]:
    """Lock the log at a path, so that no other process uses it during the `with` block. Raises the errors of `delete`."""
    place = Path(os.path.abspath(path))
    log = _Log(place, _form(place))
    _refuse_others_files(log)
    with ExitStack() as held:
        making.remove_dead(place, making.remove_tree, making.DELETED)
        directory = _locked_file(held, place, os.O_RDONLY | os.O_DIRECTORY)
        if directory is None:
            raise LogNotFound(f"{place} was deleted just now")
        _wait(partial(_lock_whole, directory), timeout, lambda: f"another process creates or deletes {place}")
        if log.form is None:
            _hold_spool(held, place, timeout)
        else:
            _hold_journal(held, log, log.form, timeout)
        ours, there = system.port.status(directory.number), system.port.look_up(place)
        if there is None or (ours.st_dev, ours.st_ino) != (there.st_dev, there.st_ino):
            raise LogNotFound(f"{place} was deleted or replaced just now; try again")
        yield log


def _form(path: Path) -> Format | None:
    """Return the format of the journal at a path; None for a spool. Raises LogNotFound, NotALog."""
    status = system.port.look_up(path)
    if status is None:
        raise LogNotFound(f"{path} does not exist")
    if stat.S_ISLNK(status.st_mode):
        raise NotALog(f"{path} is a symbolic link; give the path that it leads to, {os.path.realpath(path)}")
    if is_queue(path):
        raise NotALog(f"{path} is a queue, not a log; its last user removes it when it is empty")
    if stat.S_ISDIR(status.st_mode):
        names = set(system.port.names(path))
        if names & {format.CONTROL_FILE, format.DATA_FILE}:
            return None
        found = journals.find(path)
        if found is not None:
            return found[0]
    raise NotALog(f"{path} is not a log; delete or rename each log of a shard set or hub root separately")


def _refuse_others_files(log: _Log) -> None:
    """Raise OSError if a log's directory has files that aren't the log's."""
    others = [name for name in system.port.names(log.path) if not _is_ours(log, log.path / name)]
    if log.form is not None and (inner := log.form.segments_in(log.path)) != log.path and inner.is_dir():
        form = log.form
        others += [f"{inner.name}/{name}" for name in system.port.names(inner) if not _is_segment(form, inner / name)]
    if others:
        words = f"the log's directory holds other files ({', '.join(sorted(others)[:3])}); move them away first"
        raise OSError(errno.ENOTEMPTY, words, os.fspath(log.path))


def _is_ours(log: _Log, path: Path) -> bool:
    status = system.port.look_up(path)
    if status is None:
        return True  # just removed
    form = log.form
    if stat.S_ISDIR(status.st_mode):
        return form is not None and path in (form.segments_in(log.path), log.path / "ofs", form.sidecar(log.path) / "index")
    if not stat.S_ISREG(status.st_mode):
        return False
    if form is None:
        return path.name in resize.FILES
    lock = form.lock_file(log.path)
    is_of_lock = lock.parent == log.path and (path.name == lock.name or path.name.startswith((f"{lock.name}.", f"{lock.stem}.")))
    is_of_bare = form.segments_in(log.path) == log.path and (_is_segment(form, path) or path.name == "index")
    return is_of_lock or is_of_bare or _BESIDE.fullmatch(path.name) is not None


def _is_segment(form: Format, path: Path) -> bool:
    status = system.port.look_up(path)
    name = path.name.removesuffix(".tmp").removesuffix(".zst")
    return status is None or (stat.S_ISREG(status.st_mode) and (form.base_of(name) is not None or form.knows(path.name)))


# Locks.


def _locked_file(held: ExitStack, path: Path, flags: int) -> Descriptor | None:
    """Open a file whose locks are released at the end of `held`; None if there is none."""
    try:
        file = Descriptor(path, flags)
    except FileNotFoundError:
        return None
    held.callback(locks.give_back_file, file, system.port.process_id())
    return file


def _wait(attempt: Callable[[], bool], timeout: float, holder: Callable[[], str]) -> None:
    locks.wait_for(lambda: attempt() or None, timeout, holder)


def _lock_whole(file: Descriptor) -> bool:
    return system.port.try_lock_file(file.number, shared=False)


def _lock_byte(file: Descriptor, byte: int) -> bool:
    return system.port.try_lock(file.number, byte)


def _hold_spool(held: ExitStack, path: Path, timeout: float) -> None:
    """Keep out writers, resizes and changes of durable readers, and wait until no durable reader is open."""
    file = _locked_file(held, path / format.LOCK_FILE, os.O_RDWR) or _locked_file(held, path / format.CONTROL_FILE, os.O_RDWR)
    if file is None:
        return  # only spool.dat is left
    _wait(partial(_lock_byte, file, format.ADMIN_LOCK), timeout, lambda: f"another process resizes {path}, or changes its readers")
    _wait(partial(_lock_byte, file, format.GATE), timeout, lambda: f"{path} is open for writing; {_last_writer(path)}")
    readers = partial(system.port.locked_from, file.number, format.READER_LOCKS, len(format.SLOTS))
    _wait(lambda: readers() < 0, timeout, lambda: _open_reader(path, readers() - format.READER_LOCKS))
    resize.remove_leftovers(path)


def _last_writer(path: Path) -> str:
    words = memoryview(_control_block(path)).cast("Q")[frames.HOLDER + 2 : frames.HOLDER + 6].tolist()
    return f"{holders.describe(words)} has appended last" if len(words) == 4 and words[0] else "no process has appended yet"


def _open_reader(path: Path, slot: int) -> str:
    data = _control_block(path)
    if slot not in format.SLOTS or len(data) < format.INDEX_AT:
        return f"a durable reader of {path} is open"
    found = slots.Slots(memoryview(data), b"").slot(slot)
    return f"the durable reader {found.name!r} of {path} is open in {found.holder}"


def _control_block(path: Path) -> bytes:
    """Return the part of the control block before the index, as far as it exists."""
    with suppress(OSError):
        data = disk.read(path / format.CONTROL_FILE, format.INDEX_AT)
        return data[: len(data) // 8 * 8]
    return b""


def _hold_journal(held: ExitStack, log: _Log, form: Format, timeout: float) -> None:
    """Keep out writers and durable readers, also those of the program that owns the format."""
    lock = form.lock_file(log.path)
    places = dict.fromkeys((log.path, log.path / "ofs", form.sidecar(log.path)))
    leases = [place / name for place in places if place.is_dir() for name in system.port.names(place) if name.endswith(".lck")]
    for path in dict.fromkeys((lock, *leases)):
        file = _locked_file(held, path, os.O_RDWR)
        if file is not None:
            _wait(partial(_lock_whole, file), timeout, partial(_user, log.path, lock, path))


def _user(path: Path, lock: Path, locked: Path) -> str:
    if locked != lock:
        return f"a durable reader of {path} is open: {locked} is locked"
    with closing(control.Control(lock, None)) as file:
        return f"{path} is open for writing; {file.who()}"


# The files next to a journal.


@contextmanager
def _linked(log: _Log, goal: Path) -> Iterator[None]:
    """Link the files next to a journal to names next to `goal`, on disk before the `with` block; if that fails they are removed."""
    if log.beside is None or log.form is None:
        yield
        return
    linked = log.form.sidecar(goal)
    try:
        disk.make_directory(linked, log.beside.stat().st_mode & 0o777)
        making.empty(linked)
        _link_all(log.beside, linked)
        yield
    except BaseException:
        if not os.path.lexists(goal):
            with suppress(OSError):
                making.remove_tree(linked)
        raise


def _link_all(source: Path, target: Path) -> None:
    for name in system.port.names(source):
        status = system.port.look_up(source / name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            system.port.make_directory(target / name, status.st_mode & 0o777)
            _link_all(source / name, target / name)
        elif status is not None:
            system.port.link(source / name, target / name)
    disk.flush_directory(target)
