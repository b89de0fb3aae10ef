"""The queue as source or target of a copy: the end of its last entry, and the entries after a position."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvspool.errors import OtherRecords

FIRST_ENTRY = 10  # byte of a chunk, after its pointers
Place = tuple[int, int]  # the id of a chunk, and a byte in it; (0, 0): before all entries


def is_queue(path: Path) -> bool:
    """Return whether there is a queue at a path."""
    return find_spec("kvspool.queue") is not None and bool(import_module("kvspool.queue").is_queue(path))


def create(path: Path, **options: Any) -> Any:
    """Create a queue, or complete one that a killed process left. Raises the errors of `kvspool.queue.create`."""
    return import_module("kvspool.queue").create(path, exist_ok=True, **options)


def options() -> set[str]:
    """Return the names of the options of `create`."""
    return set() if find_spec("kvspool.queue") is None else set(import_module("kvspool.queue").create.__kwdefaults__)


def open(path: Path) -> Any:
    """Open a queue. Raises the errors of `kvspool.queue.open`."""
    return import_module("kvspool.queue").open(path)


def first(queue: Any) -> Place:
    """Return the position of the first entry."""
    with queue._held() as chain:
        return (0, 0) if chain.first is None else (chain.first.id, chain.first.state().head_ptr)


def end(queue: Any) -> Place:
    """Return the end of the last entry."""
    with queue._held() as chain:
        return (0, 0) if chain.last is None else (chain.last.id, chain.last.state().tail_ptr)


def entries_after(queue: Any, place: Place) -> list[bytes]:
    """Return the entries that were put after a position, taken or not. Raises OtherRecords if that is no longer known."""
    chunks, chunk = import_module("kvspool.kernel.chunks"), import_module("kvspool.queue.chunk")
    with queue._held() as chain:
        ids = list(chain.ids)
    if place[0] and place[0] not in ids or not place[0] and ids and ids[0] != 1:
        raise OtherRecords(f"{queue.path}: the last entries of the copy were taken out, so it can't be known where it stopped")
    found: list[bytes] = []
    for id in ids[ids.index(place[0]) if place[0] else 0 :]:
        opened = chunk.Chunk.open(queue.path, id)
        at = place[1] if id == place[0] else FIRST_ENTRY
        tail = opened.state().tail_ptr
        while at < tail:
            entries, after = chunks.copies(opened.view, at, tail, 1 << 12)
            if not entries:
                break
            found, at = found + entries, after
    return found
