"""The directory of a journal: which journal it is, and the lock that its creator holds.

**Identity.** Another journal may be at the path of an open handle, since the handle's own one was removed or moved away. So a handle keeps
the identity of its directory, and the journal's id. It compares both before it writes anything there; see `Home.refuse_another`.

**Creation.** A creator holds an exclusive `flock` on the directory until the journal is complete, or removed again. A handle that begins to
append holds a shared one, until it has the append lock for the first time. So a creator that fails removes no record of another process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvspool import system
from kvspool.engine import locks
from kvspool.errors import Corruption, LogVanished
from kvspool.journal import settings
from kvspool.journal.format import Format
from kvspool.journal.settings import Settings
from kvspool.record import Codec
from kvspool.system.descriptor import Descriptor


class Home:
    """The directory of one open journal. id: in hex, from its settings; empty if unknown, or if the journal has none."""

    def __init__(self, path: Path, format: Format, id: str) -> None:
        self._path = path
        self._format = format
        self._segments = format.segments_in(path)
        self._sidecar = format.sidecar(path)
        self._identity = _identity(self._segments)
        self.id = id

    def settings(self) -> Settings:
        """Return the settings of the journal now at the path; the defaults if it has none. Raises Corruption."""
        return settings.load(self._sidecar) or Settings(format=self._format.name)

    def change(self, codec: Codec, mode: int, changes: dict[str, Any]) -> None:
        """Under the append lock: store the settings with changed fields, on disk; for a journal without settings with its present ones."""
        found = settings.load(self._sidecar)
        if found is None:
            found = Settings(format=self._format.name, limits=self._format.limits(), codec=codec.name.lower())
        found = msgspec.structs.replace(found, **changes)
        settings.store(self._sidecar, found, mode)
        self.id = found.id

    def has_vanished(self) -> bool:
        """Return whether the journal was deleted or replaced. Only under the append lock does the answer stay true."""
        return not self._identity or _identity(self._segments) != self._identity or ("-" not in self._identity and self._has_another_id())

    def refuse_another(self) -> None:
        """Raise LogVanished if the journal was deleted or replaced; see `has_vanished`."""
        if self.has_vanished():
            raise LogVanished(f"{self._path} was deleted or replaced while it was open; open it again if it exists")

    def _has_another_id(self) -> bool:
        """Return whether the journal at the path has another id: without file handles a later directory may have the same identity."""
        with suppress(Corruption, OSError):  # damaged settings stop no append
            found = settings.load(self._sidecar) if self.id else None
            return found is not None and found.id not in ("", self.id)
        return False


def _identity(directory: Path) -> str:
    """Return the identity of a directory; nothing if it doesn't exist."""
    try:
        return system.port.identity(directory)
    except (FileNotFoundError, NotADirectoryError):
        return ""


@contextmanager
def locked(path: Path, timeout: float, *, shared: bool, undo: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock of a journal's directory for the `with` block, which gets False if the directory was removed.

    shared: for a handle that begins to append; otherwise for a creator. undo: called under the lock if the block raises, and without it if
    the directory can't be opened. Raises LockTimeout, or the system's OSError.
    """
    process = system.port.process_id()
    real = os.path.realpath(path)
    try:
        file = Descriptor(real, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        yield False
        return
    except BaseException:
        undo()
        raise

    def attempt() -> bool | None:
        return system.port.try_lock_file(file.number, shared=shared) or None

    try:
        locks.wait_for(attempt, timeout, lambda: f"another process is creating a log at {path}")
        try:
            ours, there = system.port.status(file.number), system.port.look_up(real)
            yield there is not None and (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
        except BaseException:
            undo()
            raise
    finally:
        with suppress(OSError):  # the descriptor is closed then, too, and had nothing to write
            locks.give_back_file(file, process)
