"""The table of generations of a shard: the logs that its records came from; see `hub.root.store`."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from hub.protocol.ingest import LAST
from hub.protocol.reading import Generation
from kvspool.errors import Corruption
from kvspool.system import disk, documents
from shard.merged import Log

GENERATIONS = "generations.json"
MOST_GENERATIONS = 8192
_ID = re.compile("[0-9a-f]{32}")
_LARGEST_FILE = 1 << 20  # bytes of a table of generations


def load_generations(path: Path) -> list[Generation]:
    """Return the table of generations at a path; empty if there is none. Raises Corruption."""
    try:
        found = documents.load(
            path, list[Generation], _LARGEST_FILE, "is no table of generations", "restore it from a copy of the shard"
        )
    except FileNotFoundError:
        return []
    bases, logs = [one.base for one in found], [one.log for one in found]
    if not found or bases != sorted(bases) or bases[0] < 0 or bases[-1] >= LAST:
        raise Corruption(f"{path} is no table of generations: the bases are out of order; restore it from a copy of the shard")
    if len(set(logs)) < len(logs) or not all(_ID.fullmatch(log) for log in logs):
        raise Corruption(f"{path} is no table of generations: a log id is invalid or listed twice; restore it from a copy")
    return found


def encode(generations: list[Generation]) -> bytes:
    """Return the bytes of a table."""
    return msgspec.json.encode(generations)


def store(directory: Path, generations: list[Generation]) -> None:
    """Replace the table of a shard; on disk on return."""
    disk.replace(directory / GENERATIONS, encode(generations), 0o600)


def generations(log: Log, path: Path, end: int) -> list[Generation]:
    """Return the logs that the records of a shard below `end` came from: itself, if it was written here. Raises Corruption."""
    known = load_generations(path / GENERATIONS)
    if known or not end or not log.log_id:
        return known
    return [Generation(log.log_id.hex(), 0)]
