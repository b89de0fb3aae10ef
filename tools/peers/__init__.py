"""Other products that keep records, with the few verbs that `tools/bench peers` measures.

kvspool is one of them, so that the same code measures it and its peer. A peer without its server, client or jars raises LeftOut, which says
how to install them.
"""

from __future__ import annotations

from importlib import import_module

from peers.peer import Peer

MODULES = {
    "kvspool": "ours",
    "kvj": "ours",
    "file": "files",
    "directory": "files",
    "sqlite": "sqlite",
    "persist": "persist_queue",
    "redis": "redis_streams",
    "nats": "jetstream",
    "kafka": "kafka",
    "chronicle": "java",
    "aeron": "java",
}


def peer(key: str) -> Peer:
    """Return a peer by its key in MODULES."""
    found: Peer = import_module(f"peers.{MODULES[key]}").PEERS[key]
    return found
