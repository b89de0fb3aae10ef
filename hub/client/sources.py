"""The source of a shipper: a log, or the logs of a shard set."""

from __future__ import annotations

from pathlib import Path

import shard
from kvspool.errors import NotALog
from kvspool.opening import logs
from kvspool.queue import is_queue
from shard.merged import Log


def open_source(path: Path, timeout: float) -> list[Log]:
    """Open a log, or the logs of a shard set, in order. timeout: seconds that they wait for locks.

    Raises NotALog for a queue, and the errors of opening.
    """
    try:
        return [logs.open_store(path, timeout=timeout)]
    except NotALog:
        if is_queue(path):
            raise
        return list(shard.open(path, timeout=timeout).shards)
