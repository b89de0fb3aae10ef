"""What the durable readers of a hub root hold back: the lowest position of each shard that one of them has committed."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hub.root import positions
from hub.root.file_version import FileVersion
from hub.root.positions import Position, StoredPositions
from kvspool import system
from kvspool.errors import Corruption, UnknownVersion
from shard import route
from shard.shardset import Log


class _Seen(NamedTuple):
    """A file of positions as it was read. stored: None if that can't be known."""

    version: FileVersion
    stored: StoredPositions | None


class RetentionHolds:
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

    def places(self, client: str, index: int, log: Log | None = None) -> dict[str, int]:
        """Return the sequence of a shard that each reader has yet to read, by the reader's name; -1 where that isn't known.

        A reader that has an owner reads only shards in which it has a place. log: the shard, for who has it open: a place in another log,
        which it was made anew for, counts as not known.
        """
        found = {}
        for name in positions.names(self._root):
            seen = self._look(name)
            if seen is not None:
                sequence = -1 if seen.stored is None else self._sequence(seen.stored.places.get((client, index)), client, index, log)
                if sequence >= 0 or seen.stored is None or not seen.stored.owner:
                    found[name] = sequence
        return found

    def readers(self) -> dict[str, StoredPositions]:
        """Return where each reader stands, by its name; without a place where that can't be known."""
        found: dict[str, StoredPositions] = {}
        for name in positions.names(self._root):
            seen = self._look(name)
            if seen is not None:
                found[name] = seen.stored or StoredPositions({})
        return found

    def _sequence(self, position: Position | None, client: str, index: int, log: Log | None) -> int:
        if position is None or (log is not None and positions.why_replaced(position, log)):
            return -1
        directory = self._root / route.directory_name(client, position.bits, index)
        return -1 if system.port.look_up(directory) is None else position.sequence  # else: of a client of the same name that is gone

    def _look(self, name: str) -> _Seen | None:
        path = positions.path_of(self._root, name)
        version = FileVersion.of(path)
        if version is None:
            self._seen.pop(name, None)
            return None
        seen = self._seen.get(name)
        if seen is None or seen.version != version or not version.is_settled:
            try:
                stored = positions.load(path)
            except (Corruption, UnknownVersion):
                stored = None
            seen = self._seen[name] = _Seen(version, stored)  # of a file replaced since the look: its stamp will be another one
        return seen
