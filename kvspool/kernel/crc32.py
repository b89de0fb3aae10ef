"""CRC-32 of bytes in memory, for the loops over formats that use it.

This is the interpreted form; `crc32.pxd` has the same function as inline C for the compiled twins, so that their build needs no zlib.
"""

from __future__ import annotations

import zlib


def crc32(data: bytes, at: int, length: int) -> int:
    """Return the CRC-32 of `length` bytes at a pointer; `network` defines pointers."""
    return zlib.crc32(data[at : at + length])
