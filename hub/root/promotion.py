"""Make a mirror a hub of its own: shippers may write to its shards, and no other hub is pulled into them any more."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from hub.root.catalogue import Catalogue
from hub.root.store import MIRROR_LOCK, MIRRORED, PRIVATE, take_lock
from kvspool import system
from kvspool.system import disk


def promote(root: Path) -> list[str]:
    """Remove the marks of a mirror from all shards of a root. Return the clients that had them, in order; on disk on return.

    A running hub accepts their shippers from then on. A shipper continues after the records that are here. After a crash, call it again: a
    client with any mark is refused. Raises RootInUse while a mirror pulls into the root.
    """
    with ExitStack() as locks:
        for name in sorted(name for name in disk.names(root / PRIVATE) if name.startswith(MIRROR_LOCK)):
            locks.enter_context(take_lock(root, name, f"a mirror pulls into {root} now ({name})"))
        catalogue = Catalogue(root)
        try:
            return [client for client, found in sorted(catalogue.clients().items()) if _promote([path for _, path in found.paths(root)])]
        finally:
            catalogue.close()


def _promote(shards: list[Path]) -> bool:
    """Remove the marks of one client. Return whether there were any."""
    marked = [path for path in shards if system.port.look_up(path / MIRRORED) is not None]
    for path in marked:
        system.port.remove(path / MIRRORED)
        disk.flush_directory(path)
    return bool(marked)
