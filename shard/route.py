"""The shard of a key, and the name of a shard's directory.

    [root]/[prefix].[bit].[index]/      one log each; 2^bit of them form the set
    [root]/[prefix]/                    a set of one log (0 bits)

prefix: `[a-zA-Z0-9_-]*`; the dot follows an empty one, too. bit: one hex digit, 1..a. index: three hex digits, 000..3ff, below 2^bit. The
shard of a key is the low `bit` bits of its hash, so that one more bit splits each shard in two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvspool import system
from kvspool.opening import logs
from shard.errors import ConflictingShardSets, IncompleteShardSet
from shard.kernel.hash import hash16

MOST_BITS = 10
_PREFIX = re.compile(r"[a-zA-Z0-9_-]*")
_NAME = re.compile(r"(?:(?P<prefix>[a-zA-Z0-9_-]+)\.)?(?P<bits>[1-9a])\.(?P<index>[0-3][0-9a-f]{2})")


def shard_of(key: bytes, bits: int) -> int:
    """Return the shard of a key, of 2^bits."""
    return hash16(key) & ((1 << bits) - 1)


def check_prefix(prefix: str) -> str:
    """Return the prefix. Raises ValueError if it can't be part of a directory's name."""
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise ValueError(f"a prefix may have only the characters a-z A-Z 0-9 _ -, not {prefix!r}")
    return prefix


def is_prefix(name: str) -> bool:
    """Return whether a name may be a prefix, or that of a set of one log."""
    return _PREFIX.fullmatch(name) is not None


def check_bits(bits: int) -> int:
    """Return the bits. Raises ValueError for invalid ones."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 0 <= bits <= MOST_BITS:
        raise ValueError(f"bits must be 0..{MOST_BITS}, for 1 to {1 << MOST_BITS} shards, not {bits!r}")
    return bits


def directory_name(prefix: str, bits: int, index: int) -> str:
    """Return the name of a shard's directory. Raises ValueError for an invalid prefix, bits or index."""
    check_prefix(prefix)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < 1 << check_bits(bits):
        raise ValueError(f"with {bits} bits an index must be 0..{(1 << bits) - 1}, not {index}")
    if bits == 0:
        if not prefix:
            raise ValueError("a single shard without bits needs a prefix: without both it would be the root itself")
        return prefix
    return f"{prefix}.{bits:x}.{index:03x}" if prefix else f"{bits:x}.{index:03x}"


def parse_name(name: str) -> tuple[str, int, int] | None:
    """Return prefix, bits and index of a shard directory's name; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return match["prefix"] or "", int(match["bits"], 16), int(match["index"], 16)


@dataclass
class ShardDirectories:
    """The shard directories of one prefix under a root."""

    prefix: str
    indexes: dict[int, set[int]] = field(default_factory=dict)  # for each number of bits

    @property
    def bits(self) -> int:
        """Return the one number of bits. Raises ConflictingShardSets if there are two, or an index is out of range."""
        if len(self.indexes) > 1:
            raise ConflictingShardSets(f"prefix {self.prefix!r} has shards of {' and of '.join(map(str, sorted(self.indexes)))} bits")
        (bits, indexes), *_ = self.indexes.items()
        if max(indexes) >= 1 << bits:
            raise ConflictingShardSets(f"prefix {self.prefix!r} has {bits} bits, but a shard with index {max(indexes):#x}")
        return bits

    @property
    def missing(self) -> list[int]:
        """Return the missing indexes."""
        bits = self.bits
        return sorted(set(range(1 << bits)) - self.indexes[bits])

    @property
    def is_being_made(self) -> bool:
        """Return whether only the last indexes are missing: `create` makes shards in order."""
        missing = self.missing
        return bool(missing) and missing == list(range(missing[0], 1 << self.bits)) and missing[0] > 0

    def check_complete(self, root: Path) -> None:
        """Raise IncompleteShardSet if an index is missing."""
        if self.missing:
            names = ", ".join(directory_name(self.prefix, self.bits, index) for index in self.missing[:5])
            raise IncompleteShardSet(
                f"{root}: {len(self.missing)} of the {1 << self.bits} shards of prefix {self.prefix!r} are missing: {names}"
                + (" ..." if len(self.missing) > 5 else "")
            )

    def paths(self, root: Path) -> list[tuple[int, Path]]:
        """Return index and path of each existing shard, in order."""
        bits = self.bits
        return [(index, root / directory_name(self.prefix, bits, index)) for index in sorted(self.indexes[bits])]


def scan(root: Path) -> dict[str, ShardDirectories]:
    """Return the shards under a root, by prefix. A directory with another name that is a log is a set of one; other names are ignored."""
    return found_in(root, system.port.names(root))


def found_in(root: Path, names: Iterable[str]) -> dict[str, ShardDirectories]:
    """Return the shards for some of the names under a root; see `scan`."""
    found: dict[str, ShardDirectories] = {}
    for name in names:
        parsed = parse_name(name)
        if parsed is None:
            if not name or not _PREFIX.fullmatch(name) or not logs.is_log(root / name):
                continue
            parsed = name, 0, 0
        prefix, bits, index = parsed
        found.setdefault(prefix, ShardDirectories(prefix)).indexes.setdefault(bits, set()).add(index)
    return dict(sorted(found.items()))
