"""The loops over the entries of an FFLG journal: encode, scan, pass over.

Source of the format: `seeds/000`; the table is in `journal.formats.fflg`. This source is also compiled, like `frames_py`. Data is
immutable `bytes`; every size in it is untrusted until it is compared with the actual size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvspool.kernel.network as network

SIZE = 4  # bytes before an entry's blob

WHOLE, SHORT = 0, 1  # as in `journal.format`


def encode(values: list[bytes], start: int, most: int, room: int, enough: int) -> tuple[bytearray, int]:
    """Return the entries of up to `most` values from `start` on that fit into `room` bytes, and their number.

    It ends when the entries take `enough` bytes: data that is still in the processor's cache is written faster.

    Everything was checked before: values are bytes whose length fits into a size.
    """
    end = start
    stop = min(len(values), start + most)
    total = 0
    while end < stop and total < enough:
        value = values[end]
        size = total + SIZE + len(value)
        if size > room:
            break
        total = size
        end += 1
    out = bytearray(total)
    data = network.room_in(out)
    at = 0
    for row in range(start, end):
        at = put(data, at, values[row])
    return out, end - start


def put(data: bytearray, at: int, value: bytes) -> int:
    """Store one entry at an offset with enough room, and return its end."""
    size = len(value)
    network.put_u32(data, at, size)
    network.put_bytes(data, at + SIZE, value, size)
    return at + SIZE + size


def scan(content: bytes, sequence: int, most: int, make: Callable[..., Any] | None, items: list[Any]) -> tuple[int, int, int, int]:
    """Append the records of up to `most` entries to `items`; see `journal.format.Format.scan`."""
    data = network.bytes_in(content)
    length = len(content)
    at = 0
    for _ in range(most):
        if length - at < SIZE:
            return at, sequence, SHORT if at < length else WHOLE, 0
        size = network.get_u32(data, at)
        if length - at - SIZE < size:
            return at, sequence, SHORT, SIZE + size
        value = network.cut(data, at + SIZE, size)
        items.append(value if make is None else make(sequence, 0, 0, None, value))
        at += SIZE + size
        sequence += 1
    return at, sequence, WHOLE, 0


def pass_over(content: bytes, sequence: int, until: int) -> tuple[int, int, int, int]:
    """Check entries, up to the one with the sequence `until`."""
    data = network.bytes_in(content)
    length = len(content)
    at = 0
    while sequence < until:
        if length - at < SIZE:
            return at, sequence, SHORT if at < length else WHOLE, 0
        size = network.get_u32(data, at)
        if length - at - SIZE < size:
            return at, sequence, SHORT, SIZE + size
        at += SIZE + size
        sequence += 1
    return at, sequence, WHOLE, 0
