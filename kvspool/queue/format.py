"""What lies in the files of a queue, byte for byte as QewQew writes it; `docs/queue.md` shows these tables.

`<name>` is the header: the id of the first chunk, 0 where there is none. `<name>.<id>` is a chunk. All numbers are big-endian.

**Who stores what.** Every operation of every process holds the exclusive lock of OPERATION, a byte of the header file. tail-ptr is stored
when the bytes in front of it are there; next-ref when the chunk that it names is complete; the header's reference moves before the file
of a consumed chunk goes. Consumed bytes are never written again, and no chunk is ever truncated.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from kvspool.engine.layout import Layout
from kvspool.kernel import chunks_py as loops


class Header(NamedTuple):
    """The header file, all of it."""

    first_chunk: Annotated[int, "H", "id of the first chunk; 0: the queue is empty"]


class ChunkHead(NamedTuple):
    """What a chunk file begins with."""

    head_ptr: Annotated[int, "i", "offset of the first live entry; 10 in a fresh chunk"]
    tail_ptr: Annotated[int, "i", "offset behind the last entry; equal to head-ptr: all of them were taken"]
    next_ref: Annotated[int, "H", "id of the chunk that follows; 0: none"]


class EntryHead(NamedTuple):
    """What stands in front of an entry's bytes."""

    length: Annotated[int, "H", "number of bytes that follow"]


HEADER = Layout(Header, ">")
CHUNK_HEAD = Layout(ChunkHead, ">")
ENTRY_HEAD = Layout(EntryHead, ">")
FRESH = CHUNK_HEAD.pack(ChunkHead(loops.FIRST_ENTRY, loops.FIRST_ENTRY, 0))

MODULUS = 65535  # of ids; 0 is no id, so 65534 chunks can be there at once
MOST_CHUNKS = MODULUS - 1
LONGEST_ENTRY = loops.LONGEST  # bytes
CHUNK = 16 << 20  # bytes; the size of chunks, where nobody says another one
LEAST_CHUNK = 64  # bytes
MOST_CHUNK = (1 << 31) - 1  # bytes; the pointers are signed

# Bytes of the header file that are locked; the original locks every byte there is, exclusively, for as long as it has the queue open.
OPERATION = loops.OPERATION  # exclusively, for one operation
IN_USE = OPERATION + 1  # shared by every open handle; exclusively by who removes the files, or repairs them

# Bytes of a chunk file that are locked. What a lock says of a flush stays true as long as the file lives; see `flusher`.
FLUSH = 1 << 30  # exclusively, by who flushes the chunk
FLUSHED_HEAD = 1 << 32  # shared, by who has flushed it: as many bytes from here as its head-ptr was, and one
FLUSHED_TAIL = 1 << 33  # the same for its tail-ptr


def following(id: int) -> int:
    """Return the id of the chunk that comes after this one."""
    return (id + 1) % MODULUS or 1


def preceding(id: int) -> int:
    """Return the id of the chunk that came before this one."""
    return id - 1 if id > 1 else MOST_CHUNKS


def chunk_path(path: Path, id: int) -> Path:
    """Return where a chunk of the queue at `path` lies."""
    return path.with_name(f"{path.name}.{id}")


def chunk_id(path: Path, name: str) -> int:
    """Return the id of the chunk of the queue at `path` that has this file name; 0 if it isn't one's."""
    stem, _, digits = name.rpartition(".")
    is_id = stem == path.name and digits.isascii() and digits.isdigit() and not digits.startswith("0") and len(digits) < 6
    return int(digits) if is_id and int(digits) <= MODULUS else 0
