"""Bring the root of a hub up to date from another hub: a new root, one that was away, or a mirror."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hub.client.connection import Security
from hub.client.mirror import Mirror
from hub.protocol.ingest import Level
from hub.root.promotion import promote
from hub.root.store import lock_root
from kvspool import system


def rejoin(
    root: Path,
    source: str,
    *,
    security: Callable[[], Security],
    level: Level = "disk",
    began: Callable[[Mirror], None] = lambda mirror: None,
) -> Mirror:
    """Pull all that another hub has and a root lacks, and let shippers write to it. Return the mirror that did it, closed.

    Shards that are ahead of the other hub stay as they are. began: called with the mirror before it begins: it has a status, and `stop`.
    After a crash, call it again. On return, all pulled records are as durable as `level` says. Raises RootInUse while a hub serves the
    root, Fenced and Conflict for other records than those of the other hub, and the errors of `Mirror.run`. Then shards of a mirror stay
    marked.
    """
    with Mirror(source, root, security=security, level=level, is_own=True) as mirror:
        with lock_root(mirror.root) as lock:
            try:
                began(mirror)
                mirror.run(until_empty=True)
            finally:
                system.port.unlock_file(lock)
    if not mirror.is_stopped:
        promote(mirror.root)
    return mirror
