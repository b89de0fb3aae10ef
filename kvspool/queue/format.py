"""The files of a queue, byte for byte as QewQew writes them; `docs/queue.md` shows these tables.

`<name>` is the header: the id of the first chunk, or 0. `<name>.<id>` is a chunk. All numbers are big-endian.

**Order of stores.** Every operation of every process holds the exclusive lock OPERATION, a byte of the header file. tail-ptr is stored
after the bytes before it, next-ref after its chunk is complete, and the header's reference moves before the file of a consumed chunk is
removed. Consumed bytes are never written again, and no chunk is ever truncated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from kvspool.engine.layout import Layout
from kvspool.kernel import chunks_py as loops


class QueueHeader(NamedTuple):
    """The whole header file."""

    first_chunk: Annotated[int, "H", "id of the first chunk; 0: the queue is empty"]


class ChunkHead(NamedTuple):
    """The head of a chunk file."""

    head_ptr: Annotated[int, "i", "offset of the first live entry; 10 in a fresh chunk"]
    tail_ptr: Annotated[int, "i", "offset after the last entry; equal to head-ptr: all of them were taken"]
    next_ref: Annotated[int, "H", "id of the chunk that follows; 0: none"]


class EntryHead(NamedTuple):
    """The head of an entry, before its bytes."""

    length: Annotated[int, "H", "number of bytes that follow"]


HEADER = Layout(QueueHeader, ">")
CHUNK_HEAD = Layout(ChunkHead, ">")
ENTRY_HEAD = Layout(EntryHead, ">")
FRESH = CHUNK_HEAD.pack(ChunkHead(loops.FIRST_ENTRY, loops.FIRST_ENTRY, 0))

MODULUS = 65535  # of ids; 0 is no id, so at most 65534 chunks exist at once
MOST_CHUNKS = MODULUS - 1
LONGEST_ENTRY = loops.LONGEST  # bytes
CHUNK = 16 << 20  # bytes; default size of chunks
LEAST_CHUNK = 64  # bytes
MOST_CHUNK = (1 << 31) - 1  # bytes; the pointers are signed

# Locked bytes of the header file; the original locks every possible byte exclusively while it has the queue open.
OPERATION = loops.OPERATION  # exclusively, for one operation
IN_USE = OPERATION + 1  # shared by every open handle; exclusively to remove the files, or to repair them

# Locked bytes of a chunk file. A lock that records a flush stays true while the file exists; see `flusher`.
FLUSH = 1 << 30  # exclusively, during a flush of the chunk
FLUSHED_HEAD = 1 << 32  # shared, after a flush of the chunk: head-ptr + 1 bytes from here
FLUSHED_TAIL = 1 << 33  # the same for its tail-ptr


def following(id: int) -> int:
    """Return the id of the chunk after this one."""
    return (id + 1) % MODULUS or 1


def preceding(id: int) -> int:
    """Return the id of the chunk before this one."""
    return id - 1 if id > 1 else MOST_CHUNKS


def chunk_path(path: Path, id: int) -> Path:
    """Return the path of a chunk of the queue at `path`."""
    return path.with_name(f"{path.name}.{id}")


def chunk_id(path: Path, name: str) -> int:
    """Return the id of the chunk of the queue at `path` with this file name; 0 if it isn't a chunk's."""
    stem, _, digits = name.rpartition(".")
    is_id = stem == path.name and digits.isascii() and digits.isdigit() and not digits.startswith("0") and len(digits) < 6
    return int(digits) if is_id and int(digits) <= MODULUS else 0
