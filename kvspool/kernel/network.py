"""Big-endian numbers in memory, for the loops over formats that use them.

This is the interpreted form; `network.pxd` has the same functions as inline C for the compiled twins. Here a *pointer* is the object
itself. No function checks an offset: the loops do.
"""

from __future__ import annotations

import struct

_U16, _U32, _U64 = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")


def bytes_in(data: bytes) -> bytes:
    """Return the pointer to the bytes of `data`."""
    return data


def room_in(data: bytearray) -> bytearray:
    """Return the pointer to writable bytes."""
    return data


def get_u8(data: bytes, at: int) -> int:
    return data[at]


def get_u16(data: bytes, at: int) -> int:
    return _U16.unpack_from(data, at)[0]  # type: ignore[no-any-return]


def get_u32(data: bytes, at: int) -> int:
    return _U32.unpack_from(data, at)[0]  # type: ignore[no-any-return]


def get_u64(data: bytes, at: int) -> int:
    return _U64.unpack_from(data, at)[0]  # type: ignore[no-any-return]


def get_i64(data: bytes, at: int) -> int:
    """Return a signed number in two's complement."""
    number: int = _U64.unpack_from(data, at)[0]
    return number - (1 << 64) if number >> 63 else number


def put_u8(data: bytearray, at: int, value: int) -> None:
    data[at] = value


def put_u16(data: bytearray, at: int, value: int) -> None:
    _U16.pack_into(data, at, value)


def put_u32(data: bytearray, at: int, value: int) -> None:
    _U32.pack_into(data, at, value)


def put_u64(data: bytearray, at: int, value: int) -> None:
    _U64.pack_into(data, at, value)


def put_i64(data: bytearray, at: int, value: int) -> None:
    """Store a signed number in two's complement."""
    _U64.pack_into(data, at, value & 0xFFFF_FFFF_FFFF_FFFF)


def put_bytes(data: bytearray, at: int, value: bytes, length: int) -> None:
    """Copy `length` bytes, all of `value`."""
    data[at : at + length] = value


def cut(data: bytes, at: int, length: int) -> bytes:
    """Return a copy of some bytes."""
    return data[at : at + length]
