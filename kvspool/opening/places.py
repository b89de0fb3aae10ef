"""Delete a log, or give it another path: spools and journals.

**In use.** Both need a log that no process has open for writing, whose durable readers are closed, and that is not being resized. They hold
the locks of all of these until they are done, so such processes wait for them, and then find that the log has vanished. Handles that only
read hold no lock: after a deletion they read what they have mapped or opened, and report LogVanished as soon as they look at the path.

**A deletion** is decided by one rename within the log's own directory, which is on disk before any file is removed; see `removal`. It
renames the core of the log, without which no process can open the log or append to it:

| kind | core | home |
|---|---|---|
| spool | `NAME/spool.ctl` | `NAME` |
| kvj, sej | `NAME/kvj`, `NAME/jnl` | `NAME` |
| fflg, fixed | `NAME` | `.NAME.kvspool` |

**A rename** is one rename of the directory, which replaces nothing.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvspool import system
from kvspool.engine import locks, producer_table, removal
from kvspool.engine.removal import LogFiles
from kvspool.errors import LogExists, LogNotFound, LogVanished, MismatchedFiles, NotALog, Unsupported
from kvspool.journal import files as journals
from kvspool.journal import sidecars
from kvspool.journal.format import Format
from kvspool.journal.formats import Fflg, fflg
from kvspool.kernel import frames_py as frames
from kvspool.queue import is_queue
from kvspool.spool import format, resize, slots
from kvspool.spool.reader import administering
from kvspool.spool.spool_files import SpoolFiles
from kvspool.system import disk, holders
from kvspool.system.descriptor import Descriptor

_PRODUCERS = rf"{producer_table.NAME}(\.tmp)?"
SPOOL = LogFiles({"": re.compile(rf"spool\.(dat|lck)|{_PRODUCERS}")}, format.CONTROL_MAGIC)
_SEGMENTS = re.compile(r"[0-9a-f]{16}\.(kvj(\.zst)?(\.tmp)?|jnl)")
ARRANGED = LogFiles(  # of journals with a directory of segments
    {
        "": re.compile(rf"(lock|jnl\.lck)(\.tail)?|{_PRODUCERS}|{sidecars.KEPT}"),
        "index": sidecars.INDEXES,
        "ofs": re.compile(sidecars.READERS),
        removal.MARKER: _SEGMENTS,
    }
)


def delete(path: str | os.PathLike[str], *, timeout: float = 0.0) -> None:
    """Delete the spool or journal at `path`, with all of its records and durable readers; on disk when the call returns.

    timeout: seconds to wait for each lock, until no process writes to the log, resizes it, or has a durable reader of it open.

    Raises LogNotFound; NotALog for anything else: a link, queue, shard set or hub root; LockTimeout, which says what is in use; the errors
    of `open` for a damaged log; or the system's OSError, for example for files in the log's directory that aren't the log's. Nothing was
    changed then, with two exceptions. NameNotDurable: the log is gone, but a crash of the machine may undo the last step. An OSError with a
    note: the log was deleted, but not all of its files. A killed process may leave such files, too. No process can open them, and the next
    `delete` or `create` of the path removes them.
    """
    place = _place(path)
    if finish(place, timeout):
        return
    with _held(place, timeout) as log:
        removal.refuse_foreign(log.home, log.layout, log.core)
        log.leave()
        try:
            disk.move(log.core, log.home / removal.MARKER, f"{place} was deleted")
        except BaseException:
            log.stay()
            raise
        removal.clear(log.home, log.layout)


def rename(path: str | os.PathLike[str], new: str | os.PathLike[str], *, timeout: float = 0.0) -> None:
    """Give the spool or journal at `path` the path `new`, on the same file system; on disk when the call returns.

    Records, sequences, settings, durable readers and permissions stay. timeout: as in `delete`. Handles that only read continue.

    Raises LogExists if there is anything at `new`; LogNotFound, NotALog and LockTimeout as `delete`; Unsupported for the formats fflg and
    fixed, whose journals have a second directory; or the system's OSError: EXDEV for another file system, to which `copy` copies a log. The
    log has its old path then. NameNotDurable: it has the new one, but a crash of the machine may restore the old one.
    """
    place, goal = _place(path), _place(new)
    if not goal.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "it is not a directory; create it first", str(goal.parent))
    with _held(place, timeout) as log:
        if log.core == place:
            raise Unsupported(log.kind, "rename", "the directory of its settings and readers can't be renamed in the same step; use copy")
        try:
            disk.move(place, goal, f"{place} was renamed to {goal}")
        except FileExistsError as error:
            raise LogExists(f"{goal} exists already; delete it, or choose another path") from error


def finish(place: Path, timeout: float) -> bool:
    """Finish a deletion of the log at a path that was killed; False if there is none. LogNotFound: another process has finished it."""
    for home, layout in _homes(place):
        if removal.is_begun(home, layout):
            if not removal.finish(home, layout, timeout):
                raise LogNotFound(f"{place} was deleted meanwhile")
            return True
    return False


def finish_leftover(place: Path, timeout: float) -> bool:
    """Do as `finish` for a `create`: False also if there are files that aren't the log's."""
    try:
        return finish(place, timeout)
    except LogNotFound:
        return True
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False


def is_left(place: Path) -> bool:
    """Return whether a killed deletion has left files of the log at a path."""
    return any(removal.is_begun(home, layout) for home, layout in _homes(place))


def _homes(place: Path) -> tuple[tuple[Path, LogFiles], ...]:
    """Return where a deletion of the log at a path may have left a marker."""
    if os.path.lexists(place):
        return (place, SPOOL), (place, ARRANGED)
    return ((sidecars.beside(place), sidecars.FILES),)


def leftovers(path: Path) -> Iterator[Path]:
    """Yield the paths of deleted logs of which a killed deletion has left files: the given one, and those in it. Raises OSError."""
    names = {path}
    for name in system.port.names(path) if path.is_dir() else ():
        beside = sidecars.journal_beside(name)
        names.add(path / (name if beside is None else beside))
    yield from (one for one in sorted(names) if is_left(one))


class _Log(NamedTuple):
    """A log whose locks are held. leave: called before its core gets the marker's name; stay: if that failed."""

    kind: str
    home: Path
    core: Path
    layout: LogFiles
    leave: Callable[[], None] = lambda: None
    stay: Callable[[], None] = lambda: None


def _place(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path, without links before the last component."""
    target = Path(os.path.abspath(path))
    return Path(os.path.realpath(target.parent)) / target.name


@contextmanager
def _held(path: Path, timeout: float) -> Iterator[_Log]:
    """Give the log at a path, with all of its locks, for the `with` block, whose error or success is that of the whole."""
    form = _format(path)
    is_over, raised = False, None
    try:
        with _held_spool(path, timeout) if form is None else _held_journal(path, form, timeout) as log:
            try:
                yield log
            except BaseException as error:
                raised = error
                raise
            finally:
                is_over = True
    except (LogVanished, MismatchedFiles) as error:
        raise _replaced(path) from error
    except OSError:
        if raised is not None:
            raise raised from raised.__cause__
        if not is_over:  # otherwise a close has failed: the descriptor is closed then, too, and had nothing to write
            raise


def _format(path: Path) -> Format | None:
    """Return the format of the journal at a path; None for a spool. Raises LogNotFound, NotALog."""
    status = system.port.look_up(path)
    if status is None:
        raise LogNotFound(f"{path} does not exist")
    if stat.S_ISLNK(status.st_mode):
        raise NotALog(f"{path} is a symbolic link: give the path that it leads to, {os.path.realpath(path)}")
    if is_queue(path):
        raise NotALog(f"{path} is a queue, not a log: the process that empties it removes it")
    if stat.S_ISDIR(status.st_mode):
        if os.path.lexists(path / format.CONTROL_FILE):
            return None
        found = journals.find(path)
        if found is not None:
            return found[0]
    raise NotALog(f"{path} is not a log; of a shard set or hub root, give the path of each log")


# Spools.


@contextmanager
def _held_spool(path: Path, timeout: float) -> Iterator[_Log]:
    with ExitStack() as held:
        first = held.enter_context(closing(SpoolFiles(path)))
        if not first.is_writable:
            raise first.refusal("delete or rename")
        admin = held.enter_context(administering(lambda: first.successor() or first, timeout))
        files = admin.files
        with (
            locks.held(admin.file, format.SYNC_LOCK, timeout, lambda: f"another process flushes {path}"),
            locks.held(admin.file, format.KEYS_LOCK, timeout, lambda: f"another process adds keys to {path}"),
            locks.held(admin.file, format.GATE, timeout, lambda: f"{path} is open for writing; {_last_writer(files)}"),
        ):
            _wait_for_readers(path, files, admin.fd, timeout)
            resize.remove_leftovers(path)
            if not held.enter_context(removal.alone(path, timeout)) or not files.is_in_place():
                raise _replaced(path)
            words = files.control.cast("Q")

            def leave() -> None:
                words[frames.MOVED] = 1  # writers that wait for the lock check the path

            def stay() -> None:
                with suppress(OSError):  # if the word stays, the next writer resets it
                    if files.is_in_place():
                        words[frames.MOVED] = 0

            yield _Log("spool", path, path / format.CONTROL_FILE, SPOOL, leave, stay)


def _wait_for_readers(path: Path, files: SpoolFiles, fd: int, timeout: float) -> None:
    """Wait until no durable reader is open. None can be opened while the admin lock is held."""
    number = 0

    def attempt() -> bool | None:
        nonlocal number
        number = system.port.locked_from(fd, format.READER_LOCKS, len(format.SLOTS)) - format.READER_LOCKS
        return True if number < 0 else None

    def holder() -> str:
        slot = slots.Slots(files.control, files.header.log_id).slot(number)
        return f"the durable reader {slot.name!r} of {path} is open in {slot.holder}"

    locks.wait_for(attempt, timeout, holder)


def _last_writer(files: SpoolFiles) -> str:
    reader = files.reader(0, 0)
    words = [reader.word(frames.HOLDER + 2 + at) for at in range(4)]
    return f"the last writer was {holders.describe(words)}" if words[0] else "no record was appended yet"


# Journals.


@contextmanager
def _held_journal(path: Path, form: Format, timeout: float) -> Iterator[_Log]:
    with ExitStack() as held:
        if not held.enter_context(removal.alone(path, timeout)):  # first, as a `create` does
            raise _replaced(path)
        form.prepare(path)
        log = _log_of(path, form)
        if log.home != path and not held.enter_context(removal.alone(log.home, timeout)):
            raise _replaced(path)
        lock = form.lock_file(path)
        mode = 0o600 | path.stat().st_mode & 0o066
        _hold(held, lock, os.O_RDWR | os.O_CREAT, mode, timeout, f"{path} is open for writing: {lock} is locked")
        for directory in dict.fromkeys((log.home, path / "ofs")):
            for name in system.port.names(directory) if directory.is_dir() else ():
                if name.endswith(".lck") and directory / name != lock:
                    words = f"a durable reader of {path} is open: {directory / name} is locked"
                    _hold(held, directory / name, os.O_RDWR, 0, timeout, words)
        found = _format(path)
        if found is None or (found.name, found.lock_file(path)) != (form.name, lock):
            raise _replaced(path)
        yield _log_of(path, form)


def _replaced(path: Path) -> LogNotFound:
    return LogNotFound(f"{path} was removed or replaced meanwhile")


def _log_of(path: Path, form: Format) -> _Log:
    segments = form.segments_in(path)
    if segments != path:
        return _Log(form.name, path, segments, ARRANGED)
    names = r"[0-9a-f]{16}"
    if isinstance(form, Fflg):  # any eight digits may be a segment's name: only its first bytes tell
        found = [name for name in system.port.names(path) if form.base_of(name) is not None]
        names = "|".join(["index", *(name for name in found if fflg.MAGIC.startswith(disk.read(path / name, len(fflg.MAGIC))))])
    layout = LogFiles({**sidecars.FILES.folders, removal.MARKER: re.compile(names)})
    return _Log(form.name, form.sidecar(path), path, layout)


def _hold(held: ExitStack, path: Path, flags: int, mode: int, timeout: float, words: str) -> None:
    """Lock the whole file that has a name until the end of `held`; nothing if there is none."""
    process = system.port.process_id()

    def attempt() -> bool | None:
        try:
            file = Descriptor(path, flags, mode)
        except FileNotFoundError:
            return True
        with ExitStack() as opened:
            opened.callback(locks.give_back_file, file, process)
            if not system.port.try_lock_file(file.number, shared=False) or not removal.is_at(path, file):
                return None
            held.push(opened.pop_all())
        return True

    locks.wait_for(attempt, timeout, lambda: words)
