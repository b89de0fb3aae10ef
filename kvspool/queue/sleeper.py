"""Sleep until a queue changes: a write to its header, its first or its last chunk."""

from __future__ import annotations

from pathlib import Path

from kvspool.engine.wakeups import CHANGED, Watcher
from kvspool.system.handles import Handle

Watched = tuple[Path, int]  # a file, and its inode


class QueueSleeper(Handle):
    """Watches both ends of one queue; for one thread at a time. The contract is that of `kvspool.engine.wakeups`."""

    def __init__(self) -> None:
        self._watcher = Watcher()
        self._known: set[Watched] = set()

    def follow(self, files: set[Watched]) -> bool:
        """Watch these files; True if one of them was not watched before, so that it may have changed already."""
        new = files - self._known
        for file, _ in new:
            self._watcher.watch(file, CHANGED, file)
        self._known = files
        return bool(new)

    def wait(self, timeout: float) -> None:
        """Sleep up to `timeout` seconds, and never long; a change since the last wait ends it at once."""
        self._watcher.wait(timeout)

    def close(self) -> None:
        """Release the descriptor."""
        self._watcher.close()
