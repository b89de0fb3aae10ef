"""The hash that spreads keys over shards: FNV-1a of 32 bits, folded to 16.

It is part of the format: the same key goes to the same shard for ever. The constants are those of Fowler, Noll and Vo
(draft-eastlake-fnv); the fold is (h >> 16) XOR (h & 0xffff), as their page recommends for 16 bits. This source is also
compiled, like `kvspool._frames_py`.
"""

from __future__ import annotations

from typing import Any

import kvspool._machine as native

BASIS = 2166136261
PRIME = 16777619


def fold(data: Any, start: int, length: int) -> int:
    """Return the 16-bit hash of `length` bytes at `start`."""
    state = BASIS
    for at in range(start, start + length):
        state = ((state ^ data[at]) * PRIME) & 0xFFFFFFFF
    return (state >> 16) ^ (state & 0xFFFF)


def hash16(key: bytes) -> int:
    """Return the hash of a key, 0..65535."""
    return fold(native.bytes_of(key), 0, len(key))


def hash_column(offsets: memoryview, keys: memoryview, has_key: memoryview, mask: int, turn: int, shards: memoryview) -> int:
    """Write the shard of each row into `shards` (int32); rows without a key take turns. Returns the next turn.

    offsets: int32, one more than there are rows; keys: their bytes; has_key: a byte for each row, 0 for no key.
    """
    data = native.bytes_at(keys)
    for row in range(len(shards)):
        if has_key[row]:
            shards[row] = fold(data, offsets[row], offsets[row + 1] - offsets[row]) & mask
        else:
            shards[row] = turn & mask
            turn += 1
    return turn


def group(shards: memoryview, ends: memoryview, rows: memoryview) -> None:
    """Sort row numbers by shard, keeping their order: `rows[ends[s-1]:ends[s]]` becomes the rows of shard s.

    shards, rows: int32, one for each row; ends: int32, one for each shard, zeroed.
    """
    for row in range(len(shards)):
        ends[shards[row]] += 1
    total = 0
    for shard in range(len(ends)):
        count = ends[shard]
        ends[shard] = total
        total += count
    for row in range(len(shards)):
        shard = shards[row]
        rows[ends[shard]] = row
        ends[shard] += 1
