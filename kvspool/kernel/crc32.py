"""CRC-32 of bytes in memory, for the loops over the formats that have it.

This is the interpreted form; `crc32.pxd` has the same function as inline C, for the compiled twins, so that they need no zlib to be built.
"""

from __future__ import annotations

import zlib


def crc32(data: bytes, at: int, length: int) -> int:
    """Return the CRC-32 of `length` bytes at a pointer; see `network` for what a pointer is."""
    return zlib.crc32(data[at : at + length])
