"""Make a mirror a hub of its own: shippers may write to its shards, and no other hub is pulled into them any more."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

from hub.errors import RootInUse
from hub.root.catalogue import Catalogue
from hub.root.store import MIRRORED, PRIVATE
from kvspool import system
from kvspool.system import disk
from kvspool.system.descriptor import Descriptor

MIRROR_LOCK = "mirror."  # beginning of the names of mirrors' locks, before the short name of the source


def promote(root: Path) -> list[str]:
    """Remove the marks of a mirror from all shards of a root. Return the clients that had them, in order; on disk on return.

    A running hub accepts their shippers from then on. A shipper continues after the records that are here. After a crash, call it again: a
    client with any mark is refused. Raises RootInUse while a mirror pulls into the root.
    """
    with ExitStack() as locks:
        for name in sorted(name for name in _names(root / PRIVATE) if name.startswith(MIRROR_LOCK)):
            file = locks.enter_context(Descriptor(root / PRIVATE / name, os.O_RDWR))
            if not system.port.try_lock_file(file, shared=False):
                raise RootInUse(f"a mirror pulls into {root} now ({name}); stop it first")
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


def _names(directory: Path) -> list[str]:
    try:
        return system.port.names(directory)
    except FileNotFoundError:
        return []
