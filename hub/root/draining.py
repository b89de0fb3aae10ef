"""Whether a hub is being drained: it serves readers, and refuses records, until it can be stopped.

    [root]/.hub/draining        exists while the hub is drained
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kvspool import system
from kvspool.system import disk
from kvspool.system.pauses import Interval

DRAINING = "draining"
LOOK_EVERY = 1.0  # seconds
RETRY = 30.0  # seconds after which a refused shipper asks again
WORDS = "this hub is being drained, and accepts no records; ship to another hub"


class Drain:
    """Looks whether a hub is being drained, at most once a second. Shared by threads."""

    def __init__(self, private: Path) -> None:
        """private: the directory of the hub's own files."""
        self._path = private / DRAINING
        self._interval = Interval(LOOK_EVERY)
        self._is_set = False

    @property
    def is_set(self) -> bool:
        """Return whether records are refused."""
        if self._interval.is_over():
            self._is_set = system.port.look_up(self._path) is not None
        return self._is_set


def set_draining(private: Path, is_drained: bool) -> None:
    """Begin to drain a hub, or let it accept records again; on disk on return. A running hub notices it within a second."""
    if is_drained:
        with suppress(FileExistsError):
            system.port.make_directory(private)
        disk.replace(private / DRAINING, b"", 0o600)
    else:
        with suppress(FileNotFoundError):
            system.port.remove(private / DRAINING)
        disk.flush_directory(private)
