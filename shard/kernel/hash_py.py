"""The hash that spreads keys over shards, FNV-1a of 32 bits folded to 16, and the appends of a set that use it.

It is part of the format: a key always belongs to the same shard. The constants are those of Fowler, Noll and Vo (draft-eastlake-fnv);
the fold is (h >> 16) XOR (h & 0xffff), as their page recommends for 16 bits. This source is also compiled, like
`kvspool.kernel.frames_py`.
"""

from __future__ import annotations

from typing import Any

import kvspool.kernel.machine as native
from kvspool.record import encode_key
from shard.place import Place

BASIS = 2166136261
PRIME = 16777619
LOW = 0xFFFFFFFF  # of 32 bits; a name, because the compiled twin would make a Python object of the number


def fold(data: Any, start: int, length: int) -> int:
    """Return the 16-bit hash of `length` bytes at `start`."""
    state = BASIS
    for at in range(start, start + length):
        state = ((state ^ data[at]) * PRIME) & LOW
    return (state >> 16) ^ (state & 0xFFFF)


def hash16(key: bytes) -> int:
    """Return the hash of a key, 0..65535."""
    return fold(native.bytes_of(key), 0, len(key))


def hash_column(offsets: memoryview, keys: memoryview, has_key: memoryview, mask: int, turn: int, shards: memoryview) -> int:
    """Write the shard of each row into `shards` (int32); rows without a key take turns. Return the next turn.

    offsets: int32, one more than rows; keys: their bytes; has_key: a byte for each row, 0 for no key.
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


class Spread:
    """Logs that share records by key."""

    def __init__(self, shards: list[Any], are_spools: bool, turn: int) -> None:
        """shards: the logs of a complete set, in order. are_spools: each of them is a `Single`. turn: the shard before that of the first
        record without a key.
        """
        self.shards = shards
        self._are_spools = are_spools
        self._mask = len(shards) - 1
        self._turn = turn

    def append(
        self,
        value: Any,
        *,
        key: bytes | str | None = None,
        type: int = 0,
        timestamp: int | None = None,
        timeout: float | None = None,
        durable: bool = False,
    ) -> Place:
        """Append one record to its key's shard and return its place; see `kvspool.Log.append`. Raises TypeError for a key that is neither
        bytes nor str; a str counts as its UTF-8.
        """
        shard = self.find(key)
        if timeout is None:
            sequence = self.append_at_once(shard, value, key, type, timestamp, durable)
            if sequence >= 0:
                place: Place = native.new_tuple_of_two(Place, shard, sequence)
                return place
        return self.append_slowly(shard, value, key, type, timestamp, timeout, durable)

    def append_at_once(self, shard: int, value: Any, key: Any, type: Any, timestamp: Any, durable: Any) -> int:
        """Append a record to a shard in one step and return its sequence; negative if that takes several steps."""
        if not self._are_spools:
            return -1
        log = self.shards[shard]
        sequence: int = log.append_at_once(value, key, type, timestamp, durable)
        return sequence

    def shard_of(self, key: bytes | str | None) -> int:
        """Return the shard of a key. Records without a key (None) take turns; an empty key is a key. Raises TypeError."""
        return self.find(key)

    def find(self, key: Any) -> int:
        """Return the shard of a key; when compiled, subclasses can't override this."""
        if key is None:
            self._turn = (self._turn + 1) & self._mask
            return self._turn
        if type(key) is not bytes:
            key = encode_key(key)
            if type(key) is not bytes:
                raise TypeError(f"a key must be bytes, str or None, not {key.__class__.__name__}")
        return fold(native.bytes_of(key), 0, len(key)) & self._mask

    def append_slowly(
        self, shard: int, value: Any, key: bytes | str | None, type: int, timestamp: int | None, timeout: float | None, durable: bool
    ) -> Place:
        """Append a record that takes several steps, or raise for invalid arguments."""
        raise NotImplementedError
