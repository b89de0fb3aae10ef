"""The key tables of a local source, which turn keyed MessagePack into maps with names.

Only spools have such tables. Shipped records, and those of journals, are plain MessagePack, which needs none.
"""

from __future__ import annotations

from pathlib import Path

from kvspool.engine.cursor import Cursor
from kvspool.keyed import Keys
from kvspool.opening import logs
from kvspool.options import TIMEOUT
from shard import route
from shard.merged import Log
from shard.shardset import open_shard


class KeyTables:
    """Looks keys up by topic and partition. One process, one thread."""

    def __init__(self, path: str | None) -> None:
        """Use the log, the shard set or the root at a path; None for a source on other hosts."""
        self._path = None if path is None else Path(path)
        self._known: dict[tuple[str, int], Cursor | None] = {}  # they keep the tables open, and are read again for a new key
        self._logs: list[Log] = []

    def of(self, topic: str, partition: int) -> Keys:
        """Return the keys of a shard; without a table they know no name. Raises KvspoolError for a log that can't be opened."""
        key = topic, partition
        if key not in self._known:
            path = self._find(topic, partition)
            self._known[key] = None if path is None else self._open(path)
        cursor = self._known[key]
        table = None if cursor is None else cursor.key_table  # another one after a recovery of the log
        return Keys() if table is None else table.keys

    def _find(self, topic: str, partition: int) -> Path | None:
        if self._path is None:
            return None
        if logs.is_log(self._path):
            return self._path
        found = route.scan(self._path).get(topic)
        return None if found is None else dict(found.paths(self._path)).get(partition)

    def _open(self, path: Path) -> Cursor | None:
        log = open_shard(path, TIMEOUT)
        cursor = log.cursor("latest")
        if cursor.key_table is None:
            cursor.close()
            log.close()
            return None
        self._logs.append(log)
        return cursor
