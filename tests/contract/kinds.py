"""The kinds of logs, how a log of each is created, and how its oldest records are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvspool
from kvspool.log import Log

OPTIONS: dict[str, dict[str, Any]] = {
    "spool": {"capacity": 65536},
    "kvj": {"segment_bytes": 400},
    "sej": {"segment_bytes": 400},
    "fflg": {"segment_bytes": 10_000},
    "fixed": {"item_bytes": 4, "items_per_blob": 8},
}
"""How a log of each kind is made: a journal's segments are as small as they can be, so that tests cross their borders."""


def create(kind: str, path: Path, **more: Any) -> Log:
    """Make a log of a kind."""
    return kvspool.create(path, format=kind, **OPTIONS[kind], **more)


def lose_oldest(log: Any) -> int:
    """Append records until the oldest ones are gone, or remove them; return the sequence of the oldest one that is left."""
    if log.kind == "spool":
        while log.extent()[0] == 0:
            log.append_many([b"x" * 1000] * 20)
    elif log.kind == "fixed":
        log.append_many([b"four"] * 30)
        log.prune(10)
    else:
        log.append_many([b"x" * 500] * 99)
        log.trim(before=50, force=True)
    first: int = log.extent()[0]
    assert first > 0
    return first
