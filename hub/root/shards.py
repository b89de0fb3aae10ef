"""The shards under a hub root, as followers and durable readers of the root use them; `hub.root.root.HubRoot` has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from hub.root.positions import Key
from shard.merge import Cursor, Merge
from shard.merged import Log

OpenCursor = Callable[[Key, Path, Log], Cursor]


class RootShards(Protocol):
    """The open logs of a root's shards."""

    path: Path

    def add_shards(self, merge: Merge[Any], open_cursor: OpenCursor, *, is_bounded: bool) -> None:
        """Add every shard to the merge that it does not read yet."""

    def shard_paths(self) -> list[tuple[Key, Path]]:
        """Return client and index, and path, of each shard."""

    def logs(self, *, passes_damaged: bool = False) -> Iterator[tuple[Key, Path, Log]]:
        """Yield client and index, path and log of each shard."""

    def open_log(self, key: Key, path: Path, may_be_gone: bool = False) -> Log | None:
        """Return the open log of a shard; None if it was removed."""

    def forget(self, key: Key) -> None:
        """Close the log of a shard that was removed."""
