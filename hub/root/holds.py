"""The retention holds of a hub root's durable readers: the lowest committed position of each shard."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hub.root import positions
from hub.root.file_version import FileVersion
from hub.root.positions import Position, StoredPositions
from kvspool import system
from kvspool.errors import Corruption, UnknownVersion
from shard import route
from shard.merged import Log


class _Seen(NamedTuple):
    """The content of a file of positions. stored: None if unreadable."""

    version: tuple[FileVersion | None, ...]  # of the file, and of its parts
    stored: StoredPositions | None


class RetentionHolds:
    """Caches the files of positions, and reads one again only after it was replaced. Use it in one thread at a time."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: dict[str, _Seen] = {}

    def lowest(self, client: str, index: int) -> int | None:
        """Return the lowest sequence that a reader has yet to read; None without readers.

        A reader without a position in the shard begins at its earliest record; one with unreadable positions may be anywhere: both hold
        back everything, from sequence 0.
        """
        places = self.places(client, index).values()
        return max(0, min(places)) if places else None

    def places(self, client: str, index: int, log: Log | None = None) -> dict[str, int]:
        """Return for each reader, by name, the sequence of a shard that it has yet to read; -1 if unknown.

        A reader with an owner reads only shards in which it has a position. log: the shard, if the caller has it open: a position in
        another log, before it was recreated, counts as unknown.
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
        """Return the positions of each reader, by name; none if they can't be read."""
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
        return -1 if system.port.look_up(directory) is None else position.sequence  # -1: of a removed client of the same name

    def _look(self, name: str) -> _Seen | None:
        path = positions.path_of(self._root, name)
        version = tuple(map(FileVersion.of, (path, positions.parts_directory(path), *positions.parts(path))))
        if version[0] is None:
            self._seen.pop(name, None)
            return None
        seen = self._seen.get(name)
        if seen is None or seen.version != version or not all(one is None or one.is_stable for one in version):
            try:
                stored = positions.load(path)
            except (Corruption, UnknownVersion):
                stored = None
            seen = self._seen[name] = _Seen(version, stored)  # if it was replaced since, its version will differ
        return seen
