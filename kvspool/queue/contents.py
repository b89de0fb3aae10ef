"""The contents of a queue at one moment: its entries, which stay in the queue, their number, and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvspool.errors import Corruption
from kvspool.kernel import chunks_py as loops
from kvspool.kernel.chunks import copies, count
from kvspool.queue.chunk import Chunk, refuse_shorter
from kvspool.queue.format import ChunkHead

BATCH = 256  # entries that are copied at once by an iteration


class QueueStats(msgspec.Struct, frozen=True):
    """The contents of a queue at one moment.

    chunks: number of files; entries, bytes: of the entries that can be taken, without their lengths. size: bytes of the chunk files.
    chunk_bytes: of the next one; max_chunks: this handle's bound. durability: this handle's; sync_error: errno of its first failed flush, 0
    if there was none.
    """

    path: str
    format: str
    chunks: int
    entries: int
    bytes: int
    size: int
    chunk_bytes: int
    max_chunks: int
    durability: str
    sync_error: int


class ChunkPart(NamedTuple):
    """The live entries of a chunk, between two of its bytes. They never change."""

    chunk: Chunk
    begin: int
    end: int


def parts(path: Path, ids: Iterable[int], ends: Mapping[int, tuple[Chunk, ChunkHead]]) -> Iterator[ChunkPart]:
    """Yield the live part of each chunk. ends: the open first and last chunks, each with its head."""
    for id in ids:
        chunk, state = ends.get(id, (None, None))
        if chunk is None or state is None:
            try:
                chunk = Chunk.open(path, id)
            except FileNotFoundError:
                continue  # all of it was taken
            state = chunk.state()
        yield ChunkPart(chunk, state.head_ptr, state.tail_ptr)


def entries(path: Path, found: Iterable[ChunkPart]) -> Iterator[bytes]:
    """Yield the entries of some parts. Raises Corruption."""
    for chunk, at, end in found:
        while at < end:
            refuse_shorter(chunk)
            copied, at = copies(chunk.view, at, end, BATCH)
            yield from copied
            if not copied:
                raise _too_long(path, at, end)


def counted(path: Path, found: Iterable[ChunkPart]) -> tuple[int, int]:
    """Return the number of entries in some parts, and of their bytes. Raises Corruption."""
    number = size = 0
    for chunk, begin, end in found:
        refuse_shorter(chunk)
        more, at = count(chunk.view, begin, end)
        if at != end:
            raise _too_long(path, at, end)
        number, size = number + more, size + end - begin - loops.PREFIX * more
    return number, size


def _too_long(path: Path, at: int, end: int) -> Corruption:
    return Corruption(f"{path}: the entry at {at} of a chunk ends after the last one, at {end}; see kvspool repair")
