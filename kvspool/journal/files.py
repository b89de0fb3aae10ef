"""Create a journal, and open the one at a path."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from kvspool import system
from kvspool.engine.claims import directory_locked
from kvspool.errors import Corruption, FormatError, LogExists
from kvspool.journal import control, settings
from kvspool.journal.fixed import FixedJournal
from kvspool.journal.format import LAST_SEQUENCE, Format
from kvspool.journal.formats import FORMATS, Fixed
from kvspool.journal.journal import Journal
from kvspool.journal.settings import Settings
from kvspool.options import TIMEOUT, Durability
from kvspool.record import STRUCTURED
from kvspool.system import disk

KINDS: dict[str, type[Journal]] = {Fixed.name: FixedJournal}  # formats with further capabilities
LEFTOVERS = frozenset((settings.NAME, f"{settings.NAME}.tmp"))  # of a `create` that was killed before the journal existed


def create(path: Path, form: Format, chosen: Settings, *, mode: int, timeout: float) -> Journal:
    """Create a journal of a format at `path`, on disk, with its first segment, and open it; the settings get an id.

    One process at a time does that; the others wait up to `timeout` seconds. Raises LogExists, ValueError, LockTimeout, OSError.
    """
    _refuse_no_first(form, chosen.first_sequence)
    chosen = msgspec.structs.replace(chosen, id=settings.new_id())
    while True:
        made: list[Path] = []
        _make(path, mode, made)
        with directory_locked(path, timeout, shared=False, undo=partial(_remove_empty, made)) as is_there:
            if is_there:
                return _fill(path, form, chosen, mode, made, timeout)


def _fill(path: Path, form: Format, chosen: Settings, mode: int, made: list[Path], timeout: float) -> Journal:
    """Create a journal in a directory, and open it. If that fails, its files are removed, and the new directories `made`: under the lock
    of the directory no other process has appended anything.
    """
    if not LEFTOVERS.issuperset(system.port.names(path)):
        raise LogExists(f"{path} exists already, and is not empty; kvspool.open opens a log")
    try:
        if form.sidecar(path) != path:
            _make(form.sidecar(path), mode, made)
        form.prepare(path, is_new=True)
        settings.store(form.sidecar(path), chosen, mode)  # before the files that make it a journal
        for directory in dict.fromkeys((form.segments_in(path), form.lock_file(path).parent)):
            if directory not in (path, form.sidecar(path)):
                _make(directory, mode, made)
        journal = _opened(path, form, chosen, timeout)
        journal.begin(timeout)
        return journal
    except BaseException:
        for directory in reversed(made):
            _remove(directory)
        _remove_ours(path, path, form)  # if the directory existed before
        raise


def _refuse_no_first(form: Format, sequence: int) -> None:
    """Raise ValueError for a sequence at which no journal of the format can begin."""
    if not 0 <= sequence < LAST_SEQUENCE or form.name_of(sequence) is None:
        raise ValueError(f"no segment of the format {form.name} begins at sequence {sequence}")


def _make(directory: Path, mode: int, made: list[Path]) -> None:
    """Create a directory unless it exists, its name on disk; a new one is added to `made`. Raises LogExists if it is not a directory."""
    if disk.make_directory(directory, mode | (mode & 0o444) >> 2):
        made.append(directory)
    elif directory.is_dir():
        disk.flush_directory(directory.parent)  # its creator may have been killed before
    else:
        raise LogExists(f"{directory} exists already, and is not a directory")


def _remove_empty(directories: list[Path]) -> None:
    """Remove directories, except those in which another process makes a journal."""
    for directory in directories:
        with suppress(OSError):
            system.port.remove_directory(directory)


def _remove(directory: Path) -> None:
    """Remove a directory that we created, with its files."""
    with suppress(OSError):
        for name in system.port.names(directory):
            system.port.remove(directory / name)
        system.port.remove_directory(directory)


def _remove_ours(directory: Path, path: Path, form: Format) -> None:
    """Remove the files in a directory that have names of files of the journal at a path."""
    with suppress(OSError):
        lock = form.lock_file(path)
        ours = (lock.name, control.tail_file(lock).name, *LEFTOVERS)
        for name in system.port.names(directory):
            if name in ours or form.base_of(name) is not None:
                system.port.remove(directory / name)


def discard(path: Path, format: str) -> None:
    """Remove the leftovers of a process that crashed while it created a journal, and only files with their names. The caller knows that it
    contains no record.
    """
    form = FORMATS[format](**{"fixed": {"item_bytes": 1, "items_per_blob": 1}}.get(format, {}))
    for directory in reversed(dict.fromkeys((path, form.sidecar(path), form.lock_file(path).parent, form.segments_in(path)))):
        _remove_ours(directory, path, form)
        _remove_empty([directory])


def lies_at(path: Path) -> bool:
    """Return whether there is a journal of a known format at a path."""
    return any(form.lies_at(path, is_sure=False) for form in FORMATS.values())


def find(path: Path, format: str | None = None, limits: dict[str, int] | None = None) -> tuple[Format, Settings] | None:
    """Return the format and the settings of the journal at a path; None if there is none.

    format, limits: instead of the detected ones. Raises FormatError for an unknown format or missing limits, Corruption, ValueError.
    """
    for name, known in FORMATS.items():
        if format is not None and name != format:
            continue
        chosen = settings.load(known.sidecar(path))
        if chosen is not None and chosen.format not in FORMATS:
            raise FormatError(f"{path} has the format {chosen.format!r}, which this version doesn't know")
        if chosen is not None and chosen.format == name and known.lies_at(path, is_sure=True):
            _check_limits(known, chosen, path)
            _refuse_unknown(known, limits or {})
            return known(**known.chosen_limits(chosen.limits, limits or {})), chosen
        if chosen is None and known.lies_at(path, is_sure=format is not None):
            _refuse_unknown(known, limits or {})
            _refuse_unlimited(known, limits or {}, path)
            return known(**(limits or {})), Settings(format=name)
    return None


def _refuse_unlimited(known: type[Format], limits: dict[str, int], path: Path) -> None:
    """Raise FormatError for a journal without settings whose format needs limits that aren't given."""
    missing = [name for name in known.needed_limits() if name not in limits]
    if missing:
        raise FormatError(
            f"{path} has no settings ({known.sidecar(path) / settings.NAME}), and the format {known.name} can't be read without "
            f"its {' and '.join(missing)}: give them as options, or create a journal with kvspool.create"
        )


def _refuse_unknown(known: type[Format], limits: dict[str, int]) -> None:
    for name in limits:
        if name not in known.limit_names():
            raise TypeError(f"a journal in the format {known.name} can't be opened with the option {name!r}")


def _check_limits(known: type[Format], chosen: Settings, path: Path) -> None:
    """Raise Corruption for limits, or a first sequence, that the format doesn't have."""
    try:
        _refuse_no_first(known(**chosen.limits), chosen.first_sequence)
    except (TypeError, ValueError) as error:
        raise Corruption(f"{known.sidecar(path) / settings.NAME} {settings.FAULT}: {error}; {settings.ADVICE}") from None


def open(
    path: Path,
    found: tuple[Format, Settings],
    *,
    timeout: float = TIMEOUT,
    durability: Durability | None = None,
    sync_interval: float | None = None,
) -> Journal:
    """Open the journal found by `find`. Nothing is changed before the first append."""
    form, chosen = found
    if durability is not None:
        chosen = msgspec.structs.replace(chosen, durability=durability, sync_interval=sync_interval)
    return _opened(path, form, chosen, timeout)


def _opened(path: Path, form: Format, chosen: Settings, timeout: float) -> Journal:
    return KINDS.get(form.name, Journal)(
        path,
        form,
        id=chosen.id,
        codec=STRUCTURED[chosen.codec],
        timeout=timeout,
        durability=chosen.durability,
        sync_interval=chosen.sync_interval,
    )
