"""The clients of a hub root that a mirror pulls from another hub, as its server shows them."""

from __future__ import annotations

import os
from pathlib import Path

from hub.root.catalogue import Catalogue
from hub.root.store import MIRRORED
from kvspool.system.pauses import Interval

INTERVAL = 10.0  # seconds between two checks


class MirrorMarks:
    """`clients` is the result of the last check. `look` is called by one thread."""

    def __init__(self, root: Path, catalogue: Catalogue) -> None:
        self.clients: frozenset[str] = frozenset()
        self._root = root
        self._catalogue = catalogue
        self._interval = Interval(INTERVAL)

    def look(self) -> None:
        """Look for the marks of mirrors in the shards of all clients, unless the last check was a moment ago."""
        if not self._interval.is_over():
            return
        found = self._catalogue.clients().items()
        self.clients = frozenset(name for name, one in found if any(os.path.lexists(path / MIRRORED) for _, path in one.paths(self._root)))
