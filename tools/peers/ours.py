"""kvspool, as a peer: a spool and a journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from peers.peer import PATIENCE, Peer, Place, Writer, names


class _Durable:
    """A log whose appends are on disk when they return."""

    def __init__(self, log: Any) -> None:
        self.append = partial(log.append, durable=True)
        self.append_many = partial(log.append_many, durable=True)


class Kvspool(Peer):
    """A log. options: of `kvspool.create`."""

    def __init__(self, key: str, title: str, **options: Any) -> None:
        super().__init__(key, title)
        self._options = options

    @contextmanager
    def serve(self, folder: Path, level: str) -> Iterator[Callable[[], Place]]:
        """Yield a function that creates a log; there is no server."""
        import kvspool

        found = names()

        def create() -> Place:
            place = Place(str(folder), f"{self.key}-{next(found)}", level)
            kvspool.create(place.path, **self._options).close()
            return place

        yield create

    @contextmanager
    def write(self, place: Place) -> Iterator[Writer]:
        """Open the log; `append` of a log, not of its faster `writer()`."""
        import kvspool

        with kvspool.open(place.path) as log:
            yield _Durable(log) if place.level == "disk" else log

    def replay(self, place: Place, count: int) -> Iterable[object]:
        """Read records, not only their values."""
        import kvspool

        with kvspool.open(place.path) as log:
            yield from log.read(limit=count)

    @contextmanager
    def follow(self, place: Place) -> Iterator[Iterator[bytes]]:
        """Follow with a reader that sleeps."""
        import kvspool

        with kvspool.open(place.path) as log:
            following = log.follow("latest", timeout=PATIENCE)
            yield (record.value for record in following)


PEERS = {
    "kvspool": Kvspool("kvspool", "kvspool, a spool", capacity="64MiB"),
    "kvj": Kvspool("kvj", "kvspool, a journal", format="kvj"),
}
