"""Checksums of the headers and states in kvspool's own files, and names within headers."""

from __future__ import annotations

from kvspool.kernel.frames import crc32c

LOW = 0xFFFF_FFFF


def checksum(*parts: bytes) -> int:
    """Return the CRC32C of the parts, one after the other."""
    state = LOW
    for part in parts:
        state = crc32c(state, part)
    return state ^ LOW


def sealed(body: bytes, *before: bytes) -> bytes:
    """Return the bytes of a record with a checksum as its last field, of the parts before it and of the other fields."""
    return body[:-4] + checksum(*before, body[:-4]).to_bytes(4, "little")


def with_name(header: bytes, name: str, noun: str, most: int) -> bytes:
    """Return a header and the name after it, which its checksum covers. Raises ValueError for a name of more than `most` bytes, or none."""
    raw = name.encode()
    if not 1 <= len(raw) <= most:
        raise ValueError(f"the name of {noun} has 1 to {most} bytes of UTF-8, not {len(raw)}")
    return header[:-4] + checksum(header[:-4], raw).to_bytes(4, "little") + raw


def name_after(data: bytes, size: int, length: int) -> str:
    """Return the name after a header of `size` bytes. Raises ValueError with the reason if one of them is damaged."""
    raw = data[size : size + length]
    if len(raw) < length or checksum(data[: size - 4], raw) != int.from_bytes(data[size - 4 : size], "little"):
        raise ValueError("the checksum of its header doesn't match")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ValueError("its name is not UTF-8") from None
