"""The appends of a shard set, one per call: between the caller and the loops of the shard stands what is compiled, and nothing else.

This source is also compiled, like `kvspool._frames_py`.
"""

from __future__ import annotations

from typing import Any

import kvspool._machine as native
import shard._hash_py as hashing
from shard.place import Place


class Spread:
    """Logs over which records are spread by their keys."""

    def __init__(self, shards: list[Any], are_spools: bool, turn: int) -> None:
        """shards: the logs of a complete set, in order. are_spools: each of them is a `Single`. turn: the shard before that of the first
        record without a key.
        """
        self.shards = shards
        self._are_spools = are_spools
        self._mask = len(shards) - 1
        self._turn = turn

    def append(
        self, value: Any, *, key: bytes | None = None, type: int = 0, timestamp: int | None = None, durable: bool = False
    ) -> Place:
        """Append one record to its key's shard and return where it went; see `kvspool.Spool.append`. Raises TypeError for a key that is
        not bytes.
        """
        shard = self.find(key)
        sequence = self.append_at_once(shard, value, key, type, timestamp, durable)
        if sequence >= 0:
            return native.new_pair(Place, shard, sequence)
        return self.append_slowly(shard, value, key, type, timestamp, durable)

    def append_at_once(self, shard: int, value: Any, key: Any, type: Any, timestamp: Any, durable: Any) -> int:
        """Append a record to a shard in one step and return its sequence; negative where that takes more than one."""
        if not self._are_spools:
            return -1
        log = self.shards[shard]
        return log.append_at_once(value, key, type, timestamp, durable)

    def shard_of(self, key: bytes | None) -> int:
        """Return the shard of a key. Records without a key (None) take turns; an empty key is a key. Raises TypeError."""
        return self.find(key)

    def find(self, key: Any) -> int:
        """Return the shard of a key; compiled, no subclass stands between."""
        if key is None:
            self._turn = (self._turn + 1) & self._mask
            return self._turn
        if not isinstance(key, bytes):
            raise TypeError(f"a key is bytes or None, not {key.__class__.__name__}")
        return hashing.hash16(key) & self._mask

    def append_slowly(self, shard: int, value: Any, key: bytes | None, type: int, timestamp: int | None, durable: bool) -> Place:
        """Append to a shard what takes more than one step, or raise for the arguments."""
        raise NotImplementedError
