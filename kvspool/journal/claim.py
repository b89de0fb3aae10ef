"""The locks of a journal that is deleted or renamed, and the names of its files.

A writing handle shares the `flock` of the lock file until it is closed, and a durable reader holds that of its lease. They take it while
they share the lock of the directory, which the claim holds exclusively. So if all these locks are free below the claim, no process changes
the journal, and none can begin to. Programs that own the formats lock the same files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvspool import system
from kvspool.engine import locks, producer_table
from kvspool.engine.claims import Companion, Contents, IsOurs
from kvspool.errors import LogInUse
from kvspool.groups.share import LISTS
from kvspool.journal import settings, sidecars
from kvspool.journal.archive import TEMPORARY
from kvspool.journal.consumers import INDEX
from kvspool.journal.format import Format
from kvspool.journal.formats import FORMATS
from kvspool.journal.formats.arrangement import Bare, Nested
from kvspool.journal.segment import ARCHIVE
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

_LEASE = ".lck"
_SEGMENT = r"[0-9a-fA-F]{8,20}"
_NESTED_SEGMENT = rf"[0-9a-f]{{16}}\.({'|'.join(kind.suffix for kind in FORMATS.values() if issubclass(kind, Nested))})"
_OWN = (
    rf"{re.escape(settings.NAME)}(\.tmp)?|{producer_table.NAME}(\.tmp)?|(lock|jnl\.lck)(\.tail)?"
    rf"|({_SEGMENT}|{_NESTED_SEGMENT})\.removed-\d+(\.\d+)?|kvspool\.repair\.tmp"  # of a repair: bytes that it has removed
)
_READERS = r"[A-Za-z0-9_@][A-Za-z0-9_@.-]*\.(ofs|ofs\.tmp|lck)"
_BESIDE = rf"{LISTS}|writers-.+\.(lck(\.tail)?|(first|rewinds)(\.tmp)?)|reader-[0-9a-f]{{32}}\.lck|index\.(lck|tmp)|{_READERS}|{_OWN}"


def _matches(pattern: str) -> IsOurs:
    compiled = re.compile(pattern, re.DOTALL)
    return lambda name: compiled.fullmatch(name) is not None


_INDEX = {"index": _matches(r"[0-9a-f]{16}\.idx(\.\d+\.tmp)?")}
_SEGMENTS = _matches(rf"{_NESTED_SEGMENT}({re.escape(ARCHIVE)})?({re.escape(TEMPORARY)})?")
_SUFFIXES = [kind.suffix for kind in FORMATS.values() if issubclass(kind, Nested)]

NESTED = Contents(_matches(_OWN), {**{suffix: _SEGMENTS for suffix in _SUFFIXES}, "ofs": _matches(_READERS), **_INDEX})
BARE = Contents(_matches(rf"{_SEGMENT}|{INDEX}"), {})
SIDECAR = Contents(_matches(_BESIDE), _INDEX)


def contents(form: Format) -> Contents:
    """Return the names of the files in a journal's directory."""
    return BARE if isinstance(form, Bare) else NESTED


def companion(path: Path) -> Companion:
    """Return the hidden directory next to a journal at a path, existing or not."""
    return Companion(sidecars.beside(path).name, SIDECAR)


@contextmanager
def locked(path: Path, form: Format, mode: int) -> Iterator[None]:
    """Hold the locks of all writers and durable readers of the journal at a claimed path, for the `with` block. mode: of a new lock file.

    Raises LogInUse if one of them is open, or the system's OSError.
    """
    form.prepare(path)
    with ExitStack() as held:
        _lock(held, form.lock_file(path), path, "a handle that has appended to it is open", os.O_CREAT, mode)
        directory = path / "ofs" if isinstance(form, Nested) else form.sidecar(path)
        for name in disk.names(directory):
            if name.endswith(_LEASE) and directory / name != form.lock_file(path):
                _lock(held, directory / name, path, "a durable reader of it is open")
        yield


def _lock(held: ExitStack, place: Path, path: Path, what: str, flags: int = 0, mode: int = 0) -> None:
    try:
        file = Descriptor(place, os.O_RDWR | flags, mode)
    except FileNotFoundError:  # of a reader deleted at this moment
        return
    held.callback(locks.give_back_file, file, system.port.process_id())
    if not system.port.try_lock_file(file.number, shared=False):
        raise LogInUse(path, what)
    if not file.is_at(place):
        raise LogInUse(path, f"another program has replaced {place.name}, which is locked,")
