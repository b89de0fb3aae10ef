"""A writer: the appends of a shard set in a `with` block. Durability: as for the set's own appends."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from kvspool.errors import Closed
from kvspool.system.handles import Handle
from shard.place import Place


class AppendableShards(Protocol):
    """The interface of a `ShardSet` for its writers."""

    @property
    def path(self) -> Path: ...

    def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
    ) -> Place: ...

    def append_many(
        self,
        values: Iterable[Any],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
    ) -> dict[int, range]: ...

    def sync(self, timeout: float | None = None) -> dict[int, int]: ...


class ShardSetWriter(Handle):
    """Appends to a shard set until it is closed; get it from `ShardSet.writer`. Threads may share it."""

    def __init__(self, shards: AppendableShards, timeout: float | None) -> None:
        self._shards: AppendableShards | None = shards
        self._timeout = timeout

    def append(self, value: Any, *, key: bytes | str | None = None, type: int = 0, timestamp: int | None = None) -> Place:
        """Append one record to its key's shard and return its place; see `ShardSet.append`."""
        return self._live().append(value, key=key, type=type, timestamp=timestamp, timeout=self._timeout)

    def append_many(
        self, values: Iterable[Any], *, keys: Iterable[bytes | str | None] | None = None, type: int = 0, timestamp: int | None = None
    ) -> dict[int, range]:
        """Append a record for each value, and return the sequences for each shard; see `ShardSet.append_many`."""
        return self._live().append_many(values, keys=keys, type=type, timestamp=timestamp, timeout=self._timeout)

    def sync(self, timeout: float | None = None) -> dict[int, int]:
        """Flush all records appended so far to disk; see `ShardSet.sync`."""
        return self._live().sync(timeout)

    @property
    def closed(self) -> bool:
        """Return whether the writer was closed."""
        return self._shards is None

    def close(self) -> None:
        """Close the writer: every later append raises Closed. The shard set stays open."""
        self._shards = None

    def __enter__(self) -> ShardSetWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<ShardSetWriter of {'nothing: closed' if self._shards is None else self._shards.path}>"

    def _live(self) -> AppendableShards:
        return _refuse() if self._shards is None else self._shards


def _refuse() -> NoReturn:
    raise Closed("the writer was closed; `writer()` of the shard set returns another one")
