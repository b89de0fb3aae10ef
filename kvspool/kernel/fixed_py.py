"""The loops over the records of a blob with items of one length: encode, scan, pass over, find the last sound one.

Source of the format: `seeds/004`, commonware's journal::fixed; the table is in `journal.formats.fixed`. This source is also compiled, like
`frames_py`. Data is immutable `bytes`. `size` is that of an item, a record has `CHECKSUM` bytes more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvspool.kernel.crc32 as checksums
import kvspool.kernel.network as network

CHECKSUM = 4  # bytes after each item

WHOLE, SHORT, DAMAGED = 0, 1, 2  # as in `journal.format`


def first_unfit(values: list[bytes], size: int) -> int:
    """Return the index of the first value with another size; -1: none."""
    for row in range(len(values)):
        value = values[row]
        if len(value) != size:
            return row
    return -1


def encode(values: list[bytes], start: int, count: int, size: int) -> bytearray:
    """Return the records of `count` values from `start` on. Their size was checked before."""
    out = bytearray(count * (size + CHECKSUM))
    data = network.room_in(out)
    at = 0
    for row in range(start, start + count):
        at = put(data, at, size, values[row])
    return out


def put(data: bytearray, at: int, size: int, value: bytes) -> int:
    """Store one record at an offset with enough room, and return its end."""
    network.put_bytes(data, at, value, size)
    network.put_u32(data, at + size, checksums.crc32(network.bytes_in(value), 0, size))
    return at + size + CHECKSUM


def is_sound(data: bytes, at: int, size: int) -> bool:
    """Return whether the item of the complete record at `at` matches the checksum after it."""
    return network.get_u32(data, at + size) == checksums.crc32(data, at, size)


def scan(
    content: bytes, sequence: int, most: int, size: int, make: Callable[..., Any] | None, items: list[Any]
) -> tuple[int, int, int, int]:
    """Append up to `most` items to `items`; see `journal.format.Format.scan`."""
    data = network.bytes_in(content)
    length = len(content)
    record = size + CHECKSUM
    is_bare = make is None
    at = 0
    for _ in range(most):
        if length - at < record:
            return at, sequence, (WHOLE if length == at else SHORT), record
        if not is_sound(data, at, size):
            return at, sequence, DAMAGED, 0
        item = network.cut(data, at, size)
        if is_bare:
            items.append(item)
        else:
            items.append(make(sequence, 0, 0, None, item))  # type: ignore[misc]
        at += record
        sequence += 1
    return at, sequence, WHOLE, 0


def pass_over(content: bytes, sequence: int, most: int, size: int) -> tuple[int, int, int, int]:
    """Check up to `most` records; see `journal.format.Format.pass_over`."""
    data = network.bytes_in(content)
    length = len(content)
    record = size + CHECKSUM
    at = 0
    for _ in range(most):
        if length - at < record:
            return at, sequence, (WHOLE if length == at else SHORT), record
        if not is_sound(data, at, size):
            return at, sequence, DAMAGED, 0
        at += record
        sequence += 1
    return at, sequence, WHOLE, 0


def last_sound(content: bytes, size: int) -> int:
    """Return the byte after the last sound record, of bytes that begin with a record; 0 if none is sound."""
    data = network.bytes_in(content)
    record = size + CHECKSUM
    at = len(content) // record * record
    while at > 0 and not is_sound(data, at - record, size):
        at -= record
    return at


def item_of(content: bytes, size: int) -> bytes | None:
    """Return the item of a record; None if it is not whole and sound."""
    data = network.bytes_in(content)
    if len(content) != size + CHECKSUM or not is_sound(data, 0, size):
        return None
    return network.cut(data, 0, size)
