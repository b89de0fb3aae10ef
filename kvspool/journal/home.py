"""The directory of a journal: which journal it is.

**Identity.** Another journal may be at the path of an open handle, since the handle's own one was removed or moved away. So a handle keeps
the identity of its directory, and the journal's id. It compares both before it writes anything there; see `Home.refuse_another`.

**The lock of the directory** is described in `engine.claims`. A creator holds it until the journal is complete, or removed again, and a
handle shares it until it has the append lock for the first time. So a creator that fails removes no record of another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from kvspool import system
from kvspool.engine.claims import directory_locked
from kvspool.errors import Corruption, LogVanished
from kvspool.journal import settings
from kvspool.journal.format import Format
from kvspool.journal.settings import Settings
from kvspool.record import Codec


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

    def refuse_another(self, *, by_id: bool = False) -> None:
        """Raise LogVanished if the journal was deleted or replaced; see `has_vanished`. by_id: compare the ids in any case: a creator may
        have replaced the settings of an empty directory.
        """
        if self.has_vanished() or (by_id and self._has_another_id()):
            raise LogVanished(f"{self._path} was deleted or replaced while it was open; open it again if it exists")

    @contextmanager
    def in_place(self, timeout: float) -> Iterator[None]:
        """Share the lock of the directory for the `with` block, in which no process deletes or renames the journal.

        Raises LogVanished, LockTimeout, or the system's OSError.
        """
        with directory_locked(self._path, timeout, shared=True) as is_there:
            self.refuse_another(by_id=is_there)
            if not is_there:
                raise LogVanished(f"{self._path} was replaced at this moment; open it again")
            yield

    def _has_another_id(self) -> bool:
        """Return whether the journal at the path has another id: without file handles a later directory may have the same identity.

        Settings next to the journal were there, so without them it is another one, too.
        """
        with suppress(Corruption, OSError):  # damaged settings stop no append
            if self.id:
                found = settings.load(self._sidecar)
                return self._sidecar != self._path if found is None else found.id not in ("", self.id)
        return False


def _identity(directory: Path) -> str:
    """Return the identity of a directory; nothing if it doesn't exist."""
    try:
        return system.port.identity(directory)
    except (FileNotFoundError, NotADirectoryError):
        return ""
