"""Make a journal, and open what lies at a path."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from kvspool import disk, system
from kvspool.errors import Corruption, FormatError, LogExists
from kvspool.journal import settings
from kvspool.journal.fixed import FixedJournal
from kvspool.journal.format import LAST_SEQUENCE, Format
from kvspool.journal.formats import FORMATS, Fixed
from kvspool.journal.journal import Journal
from kvspool.journal.retention import Retention
from kvspool.journal.settings import Settings
from kvspool.record import STRUCTURED
from kvspool.spool.format import Durability
from kvspool.spool.spool import TIMEOUT

KINDS: dict[str, type[Journal]] = {Fixed.name: FixedJournal}  # those that can do more than every journal can
LEFTOVERS = frozenset((settings.NAME, f"{settings.NAME}.tmp"))  # of a `create` that was killed before it had made a journal


def create(
    path: Path,
    format: str,
    limits: dict[str, int],
    *,
    codec: str,
    mode: int,
    durability: Durability,
    sync_interval: float | None,
    timeout: float,
    retention: Retention | None = None,
    first_sequence: int = 0,
) -> Journal:
    """Make a journal of a format at `path`, on disk, with its first segment, and open it. Raises LogExists, ValueError, OSError."""
    form = FORMATS[format](**limits)
    _refuse_no_first(form, first_sequence)
    chosen = Settings(
        format=format,
        limits=form.limits(),
        codec=codec,
        durability=durability,
        sync_interval=sync_interval,
        retention=retention,
        first_sequence=first_sequence,
        id=settings.new_id(),
    )
    made: list[Path] = []
    try:
        for directory in dict.fromkeys((path, form.sidecar(path))):
            _make(directory, mode, made, is_ours=directory != path)
        form.prepare(path, is_new=True)
        settings.store(form.sidecar(path), chosen, mode)  # before there is what makes it a journal
        for directory in dict.fromkeys((form.segments_in(path), form.lock_file(path).parent)):
            if directory not in (path, form.sidecar(path)):
                _make(directory, mode, made, is_ours=True)
        journal = _opened(path, form, chosen, timeout)
        journal.under_lock(timeout, lambda *_: None)  # makes the lock file and the first segment
        return journal
    except BaseException:
        for directory in reversed(made):
            _remove(directory)
        raise


def _refuse_no_first(form: Format, sequence: int) -> None:
    """Raise ValueError for a sequence that no journal of the format begins at."""
    if not 0 <= sequence < LAST_SEQUENCE or form.name_of(sequence) is None:
        raise ValueError(f"no segment of the format {form.name} begins at sequence {sequence}")


def _make(directory: Path, mode: int, made: list[Path], *, is_ours: bool) -> None:
    try:
        system.port.make_directory(directory, mode | (mode & 0o444) >> 2)
    except FileExistsError:
        if not is_ours and not LEFTOVERS.issuperset(system.port.names(directory)):
            raise LogExists(f"{directory} exists already, and is not empty; kvspool.open opens a log") from None
        if is_ours and directory.exists():
            return
    else:
        made.append(directory)
    disk.flush_directory(directory.parent)


def _remove(directory: Path) -> None:
    """Remove a directory that we made, with the files in it."""
    with suppress(OSError):
        for name in system.port.names(directory):
            system.port.remove(directory / name)
        system.port.remove_directory(directory)


def discard(path: Path, format: str) -> None:
    """Remove what a process left that died while it made a journal, and nothing that has another name than what it makes. For who knows
    that it holds no record."""
    form = FORMATS[format](**{"fixed": {"item_bytes": 1, "items_per_blob": 1}}.get(format, {}))
    lock = form.lock_file(path).name
    made = dict.fromkeys((path, form.sidecar(path), form.lock_file(path).parent, form.segments_in(path)))
    for directory in reversed(made):
        with suppress(OSError):
            for name in system.port.names(directory):
                if name in (lock, settings.NAME, f"{settings.NAME}.tmp") or form.base_of(name) is not None:
                    system.port.remove(directory / name)
            system.port.remove_directory(directory)


def lies_at(path: Path) -> bool:
    """Return whether a journal of a format that this version knows lies at a path."""
    return any(form.lies_at(path, is_sure=False) for form in FORMATS.values())


def find(path: Path, format: str | None = None, limits: dict[str, int] | None = None) -> tuple[Format, Settings] | None:
    """Return the format and the settings of the journal that lies at a path; None if none does.

    format, limits: in place of what is found. Raises FormatError for a format that this version doesn't know, Corruption, ValueError.
    """
    for name, known in FORMATS.items():
        if format is not None and name != format:
            continue
        chosen = settings.load(known.sidecar(path))
        if chosen is not None and chosen.format not in FORMATS:
            raise FormatError(f"{path} has the format {chosen.format!r}, which this version doesn't know")
        if chosen is not None and chosen.format == name and known.lies_at(path, is_sure=True):
            _check_limits(known, chosen, path)
            return known(**known.settled(chosen.limits, limits or {})), chosen
        if chosen is None and known.lies_at(path, is_sure=format is not None):
            return known(**(limits or {})), Settings(format=name)
    return None


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
    """Open the journal that `find` has found. Nothing is changed before the first append."""
    form, chosen = found
    if durability is not None:
        chosen = msgspec.structs.replace(chosen, durability=durability, sync_interval=sync_interval)
    return _opened(path, form, chosen, timeout)


def _opened(path: Path, form: Format, chosen: Settings, timeout: float) -> Journal:
    return KINDS.get(form.name, Journal)(
        path, form, codec=STRUCTURED[chosen.codec], timeout=timeout, durability=chosen.durability, sync_interval=chosen.sync_interval
    )
