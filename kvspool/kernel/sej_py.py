"""The loops over the messages of a sej journal: encode, scan, pass over.

Source of the format: `seeds/001`, the journals of h12.me/sej; the table is in `journal.formats.sej`. This source is also compiled, like
`frames_py`. Data is immutable `bytes`; every size in it is untrusted until it is compared with the actual size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kvspool.kernel.network as network
from kvspool.record import NO_TIME

HEAD = 18  # bytes before the key: offset, timestamp, type, key size
SIZES = 26  # bytes of a message around its key and value
LONGEST_KEY = 127
LONGEST_VALUE = (1 << 31) - 1 - SIZES - LONGEST_KEY  # so that the size of the whole message fits into its field

WHOLE, SHORT, DAMAGED, JUMPED = 0, 1, 2, 3  # as in `journal.format`


def encode(
    values: list[bytes],
    keys: list[bytes | None] | None,
    types: list[int] | None,
    timestamps: list[int] | None,
    type: int,
    timestamp: int,
    start: int,
    sequence: int,
    room: int,
    last: int,
) -> tuple[bytearray, int, int]:
    """Return the messages of the values from `start` on, up to the first one whose end reaches `room`, their number, and the latest
    timestamp.

    last: the latest timestamp before them. An earlier one is raised to the latest one before it; NO_TIME stays. Everything was checked
    before: values and keys are bytes of an allowed length, the lists have the length of `values`.
    """
    end = start
    total = 0
    while end < len(values) and total < room:
        value = values[end]
        total += SIZES + len(value)
        if keys is not None:
            key = keys[end]
            if key is not None:
                total += len(key)
        end += 1
    out = bytearray(total)
    data = network.room_in(out)
    at = 0
    for row in range(start, end):
        key = None
        if types is not None:
            type = types[row]
        if timestamps is not None:
            timestamp = timestamps[row]
        if timestamp > last:
            last = timestamp
        elif timestamp != NO_TIME:
            timestamp = last
        if keys is not None:
            key = keys[row]
        at = put(data, at, sequence, timestamp, type, key, values[row])
        sequence += 1
    return out, end - start, last


def put(data: bytearray, at: int, sequence: int, timestamp: int, type: int, key: bytes | None, value: bytes) -> int:
    """Store one message at an offset with enough room, and return its end."""
    value_size = len(value)
    key_size = 0
    network.put_u64(data, at, sequence)
    network.put_i64(data, at + 8, timestamp)
    network.put_u8(data, at + 16, type)
    if key is not None:
        key_size = len(key)
        network.put_bytes(data, at + HEAD, key, key_size)
    network.put_u8(data, at + 17, key_size)
    at += HEAD + key_size
    network.put_u32(data, at, value_size)
    network.put_bytes(data, at + 4, value, value_size)
    network.put_u32(data, at + 4 + value_size, SIZES + key_size + value_size)
    return at + 8 + value_size


def scan(content: bytes, sequence: int, most: int, make: Callable[..., Any] | None, items: list[Any]) -> tuple[int, int, int, int]:
    """Append the records of up to `most` messages to `items`; see `journal.format.Format.scan`."""
    data = network.bytes_in(content)
    length = len(content)
    at = 0
    for _ in range(most):
        size = size_of(data, at, length - at, sequence)
        if size == 0:
            return at, sequence, *why(data, at, length - at, sequence)
        key_size = network.get_u8(data, at + 17)
        value = network.cut(data, at + HEAD + 4 + key_size, size - SIZES - key_size)
        if make is None:
            items.append(value)
        else:
            key = network.cut(data, at + HEAD, key_size) if key_size else None
            items.append(make(sequence, network.get_i64(data, at + 8), network.get_u8(data, at + 16), key, value))
        at += size
        sequence += 1
    return at, sequence, WHOLE, 0


def pass_over(content: bytes, sequence: int, until: int, timestamp: int) -> tuple[int, int, int, int, int]:
    """Check messages, up to the one with the sequence `until`, or the first one later than `timestamp`.

    The last item of the result is the latest timestamp passed.
    """
    data = network.bytes_in(content)
    length = len(content)
    at = 0
    latest = NO_TIME
    while sequence < until:
        size = size_of(data, at, length - at, sequence)
        if size == 0:
            return at, sequence, *why(data, at, length - at, sequence), latest
        time = network.get_i64(data, at + 8)
        if time > timestamp:
            break
        if time > latest:
            latest = time
        at += size
        sequence += 1
    return at, sequence, WHOLE, 0, latest


def size_of(data: bytes, at: int, left: int, sequence: int) -> int:
    """Return the size of the message with this sequence, if it is whole and sound in the `left` bytes from `at` on; 0 otherwise."""
    if left < SIZES or network.get_u64(data, at) != sequence:
        return 0
    key_size = network.get_u8(data, at + 17)
    if key_size > LONGEST_KEY or left < SIZES + key_size:
        return 0
    size = SIZES + key_size + network.get_u32(data, at + HEAD + key_size)
    if left < size or network.get_u32(data, at + size - 4) != size:
        return 0
    return size


def why(data: bytes, at: int, left: int, sequence: int) -> tuple[int, int]:
    """Return why there is no message at an offset: a stop, and the `need` of `Scan`."""
    if left < HEAD:
        return (SHORT if left else WHOLE), 0
    found = network.get_u64(data, at)
    key_size = network.get_u8(data, at + 17)
    if key_size > LONGEST_KEY:
        return DAMAGED, 0
    if found != sequence:
        return JUMPED, found
    if left < HEAD + key_size + 4:
        return SHORT, 0
    value_size = network.get_u32(data, at + HEAD + key_size)
    size = SIZES + key_size + value_size
    if value_size > LONGEST_VALUE or left >= size:
        return DAMAGED, 0
    return SHORT, size
