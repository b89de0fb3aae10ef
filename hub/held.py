"""What the durable readers of a hub root hold back: the lowest position of each shard that one of them has committed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hub import positions
from hub.positions import Key, Position
from kvspool import system
from kvspool.errors import Corruption, UnknownVersion
from shard import route

SETTLED = 100_000_000  # ns; a file that was written later may have been replaced again with the same time


class _Seen(NamedTuple):
    """A file of positions as it was read. places: None if they can't be known."""

    stamp: tuple[int, int, int]
    places: dict[Key, Position] | None


class Held:
    """Remembers the files of positions, and reads one again only when it was replaced. Use it in one thread at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, _Seen] = {}

    def lowest(self, client: str, index: int) -> int | None:
        """Return the lowest sequence that a reader has yet to read; None if there is no reader.

        A reader that has no position in the shard begins at its earliest record; one whose positions can't be read may stand anywhere:
        both hold back everything, from sequence 0 on.
        """
        places = self.places(client, index).values()
        return max(0, min(places)) if places else None

    def places(self, client: str, index: int) -> dict[str, int]:
        """Return the sequence of a shard that each reader has yet to read, by the reader's name; -1 where that isn't known."""
        found = {}
        for name in positions.names(self._root):
            seen = self._look(name)
            if seen is not None:
                found[name] = -1 if seen.places is None else self._sequence(seen.places.get((client, index)), client, index)
        return found

    def readers(self) -> dict[str, dict[Key, int]]:
        """Return what each reader has yet to read, by its name: the sequence of each shard; nothing where that isn't known."""
        found: dict[str, dict[Key, int]] = {}
        for name in positions.names(self._root):
            seen = self._look(name)
            if seen is not None:
                found[name] = {key: position.sequence for key, position in (seen.places or {}).items()}
        return found

    def _sequence(self, position: Position | None, client: str, index: int) -> int:
        if position is None:
            return -1
        directory = self._root / route.directory_name(client, position.bits, index)
        return -1 if system.port.look_up(directory) is None else position.sequence  # else: of a client of the same name that is gone

    def _look(self, name: str) -> _Seen | None:
        path = positions.path_of(self._root, name)
        status = system.port.look_up(path)
        if status is None:
            self._seen.pop(name, None)
            return None
        stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
        seen = self._seen.get(name)
        if seen is None or seen.stamp != stamp or system.port.now() - status.st_mtime_ns < SETTLED:
            try:
                places = positions.load(path)
            except (Corruption, UnknownVersion):
                places = None
            seen = self._seen[name] = _Seen(stamp, places)  # of a file replaced since the look: its stamp will be another one
        return seen
