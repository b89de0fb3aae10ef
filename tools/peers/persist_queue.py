"""persist-queue: `FIFOSQLiteQueue`, whose entries are removed when they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.peer import Peer, Place, Writer, library, names


class _QueueWriter:
    def __init__(self, queue: Any) -> None:
        self.append = queue.put

    def append_many(self, values: list[bytes]) -> None:
        """Put each value: there is no faster way for many."""
        for value in values:
            self.append(value)


class PersistQueue(Peer):
    """A queue of one process: its authors don't support several. SQLite flushes each put, whatever the level."""

    follows = shares = batches = False
    replayed = 2000

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Yield a function that names a queue, which is created when it is opened."""
        package()
        found = names()
        yield lambda: Place(str(folder), f"{self.key}-{next(found)}", level)

    @contextmanager
    def write(self, place: Place) -> Iterator[Writer]:
        """Open the queue so that each put is a transaction."""
        queue = _opened(place)
        try:
            yield _QueueWriter(queue)
        finally:
            queue.close()

    def replay(self, place: Place, count: int) -> Iterable[object]:
        """Get the entries, which removes them."""
        queue = _opened(place)
        try:
            for _ in range(count):
                yield queue.get()
        finally:
            queue.close()


def package() -> Any:
    """Return the module. Raises LeftOut."""
    return library("persistqueue", "persist-queue")


def _opened(place: Place) -> Any:
    return package().FIFOSQLiteQueue(str(place.path), auto_commit=True, multithreading=False)


PEERS = {"persist": PersistQueue("persist", "persist-queue")}
