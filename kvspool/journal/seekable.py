"""The seekable format of zstd: a file cut into blocks that are compressed separately, with a table of their positions at the end.

It is specified together with zstd (contrib/seekable_format, version 0.1.0): consecutive frames, then the table in a skippable frame, so
that any decoder restores the whole file. kvspool's frames also contain the size and a checksum of their content, the lower 32 bits of
XXH64, which the table repeats. Files whose frames don't are refused.

Nothing in such a file is trusted: the size of the table is checked before it is read, and the size of a block is known, and bounded, before
it is decompressed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, NamedTuple

from kvspool import system
from kvspool.engine.layout import Layout
from kvspool.errors import Corruption, MissingExtra, TooLarge
from kvspool.system.descriptor import Descriptor

BLOCK = 1 << 20  # bytes compressed together
LARGEST_BLOCK = 1 << 22  # largest block that is read, in bytes
LARGEST_FRAME = LARGEST_BLOCK + LARGEST_BLOCK // 64  # largest compressed size: slightly more if a block is not compressible
LARGEST_PIECE = 1 << 17  # bytes that zstd compresses as one piece of a frame
LARGEST_TABLE = 1 << 20  # bytes: 87,381 blocks
SKIPPABLE, SEEKABLE = 0x184D2A5E, 0x8F92EAB1
HAS_CHECKSUMS, UNUSED_BITS = 0x80, 0x03


class SkippableHead(NamedTuple):
    """The head of a skippable frame, before the table."""

    magic: Annotated[int, "I", "0x184D2A5E"]
    size: Annotated[int, "I", "bytes that follow up to the end of the file"]


class BlockEntry(NamedTuple):
    """One block, in order."""

    stored: Annotated[int, "I", "bytes of its zstd frame"]
    size: Annotated[int, "I", "bytes of its content"]
    checksum: Annotated[int, "I", "lower 32 bits of XXH64 of its content; the frame ends with the same"]


class Footer(NamedTuple):
    """The end of the file."""

    blocks: Annotated[int, "I", "number of entries"]
    descriptor: Annotated[int, "B", "0x80: the entries have checksums"]
    magic: Annotated[int, "I", "0x8F92EAB1"]


HEAD = Layout(SkippableHead)
ENTRY = Layout(BlockEntry)
FOOTER = Layout(Footer)


def library() -> ModuleType:
    """Return the binding of zstd. Raises MissingExtra."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra.of("archive", "archived segments need the package zstandard", error) from error
    return zstandard


def compressed(read: Callable[[int, int], bytes], size: int, level: int) -> Iterator[bytes]:
    """Yield the pieces of a compressed file with the `size` bytes that `read(at, size)` returns. Raises TooLarge, MissingExtra."""
    if -(-size // BLOCK) * ENTRY.size > LARGEST_TABLE:
        raise TooLarge(f"{size} bytes are more than {LARGEST_TABLE // ENTRY.size * BLOCK}, the most that is archived as one file")
    compressor = library().ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    entries = []
    for at in range(0, size, BLOCK):
        block = read(at, min(BLOCK, size - at))
        frame = compressor.compress(block)
        entries.append(BlockEntry(len(frame), len(block), int.from_bytes(frame[-4:], "little")))
        yield frame
    yield packed(entries)


def packed(entries: list[BlockEntry]) -> bytes:
    """Return the bytes of a table, including the skippable frame around it."""
    body = b"".join(map(ENTRY.pack, entries))
    return HEAD.pack(SkippableHead(SKIPPABLE, len(body) + FOOTER.size)) + body + FOOTER.pack(Footer(len(entries), HAS_CHECKSUMS, SEEKABLE))


def table_of(fd: int) -> list[BlockEntry]:
    """Return the table of an open file. Raises Corruption for an impossible one."""
    end = system.port.status(fd).st_size
    footer = FOOTER.unpack(_read(fd, FOOTER.size, end - FOOTER.size))
    length = footer.blocks * ENTRY.size
    begin = end - FOOTER.size - length - HEAD.size
    if footer.magic != SEEKABLE or footer.descriptor & ~UNUSED_BITS != HAS_CHECKSUMS or length > LARGEST_TABLE or begin < 0:
        raise Corruption("it does not end with the table of a seekable zstd file")
    data = _read(fd, HEAD.size + length, begin)
    if HEAD.unpack(data) != (SKIPPABLE, length + FOOTER.size):
        raise Corruption("the table at its end does not begin where it should")
    entries = [ENTRY.unpack(data, at) for at in range(HEAD.size, len(data), ENTRY.size)]
    possible = all(0 < one.size <= LARGEST_BLOCK and 0 < one.stored <= LARGEST_FRAME for one in entries)
    if not possible or sum(one.stored for one in entries) != begin:
        raise Corruption("the table at its end does not fit its length")
    return entries


def size_of(path: Path) -> int:
    """Return the bytes of the content of a file, as its table says. Raises Corruption, or the system's OSError."""
    with Descriptor(path, os.O_RDONLY) as fd:
        return sum(one.size for one in table_of(fd))


def decompressed(fd: int, at: int, entry: BlockEntry) -> bytes:
    """Return the content of the block at byte `at` of an open file. Raises Corruption if it doesn't match the table, MissingExtra."""
    zstd = library()
    frame = _read(fd, entry.stored, at)
    try:
        says = zstd.get_frame_parameters(frame)
        if says.content_size != entry.size or not says.has_checksum or int.from_bytes(frame[-4:], "little") != entry.checksum:
            raise Corruption("its frame and the table contradict each other")
        data: bytes = zstd.ZstdDecompressor(max_window_size=LARGEST_BLOCK).decompress(frame, allow_extra_data=False)
        return data
    except zstd.ZstdError as error:
        raise Corruption(str(error)) from None


def beginning(fd: int, at: int, entry: BlockEntry, size: int) -> bytes:
    """Return the first bytes of the block at byte `at`, at most `LARGEST_PIECE`; none if they are damaged. The checksum is not compared."""
    zstd = library()
    decompressor = zstd.ZstdDecompressor(max_window_size=LARGEST_BLOCK).decompressobj()
    try:
        # Each piece has a head of 3 bytes, and the first one also that of the frame.
        found: bytes = decompressor.decompress(_read(fd, min(entry.stored, LARGEST_PIECE + 64), at))
    except (zstd.ZstdError, Corruption):
        return b""
    return found[:size]


def _read(fd: int, size: int, at: int) -> bytes:
    """Return exactly so many bytes of a file. Raises Corruption if there are fewer."""
    data = system.port.read(fd, size, at) if at >= 0 else b""
    if len(data) < size:
        raise Corruption(f"it ends before byte {max(at, 0) + size}")
    return data
